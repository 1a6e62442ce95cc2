"""Processes that run handlers, each for one job at a time. A process can be killed, and what ends it ends only its job.

Owns a process and the pipe to it. Does not know leases, nor when a job must stop.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import FrameType

from windrow.job_log import JobLog, Lines
from windrow.jobs import Job, Lost
from windrow.outcomes import Action, action_of
from windrow.payloads import Payload, encode
from windrow.reports import Report, Reporter

# A process that has run so many jobs is replaced by a new one: what handlers leak is bounded.
_JOBS_MAX = 1000
# How long a process that has closed its pipe may take to end.
_END_S = 5.0
_NAME = "windrow-handler"
# Another thread may run an event loop or hold locks: a fork of it could hang.
_SPAWN = multiprocessing.get_context("spawn")


class Crashed(Exception):
    """The process of a handler ended before the handler did."""

    __module__ = "windrow"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ended:
    """How a handler ended, as its process tells it."""

    result: bytes | None = None
    # What it raised, pickled, and what that means for the job.
    error: bytes = b""
    action: Action | None = None


class _SentLog(JobLog):
    """Sends the lines to the worker's process, which keeps them if this process crashes."""

    __slots__ = ("_send",)

    def __init__(self, send: Callable[[Lines], None]) -> None:
        super().__init__()
        self._send = send

    def add(self, lines: Lines) -> None:
        self._send(lines)


class HandlerProcess:
    """Starts with its first job. Not for use by two threads, but for kill()."""

    def __init__(self) -> None:
        # Guards the start against kill().
        self._lock = threading.Lock()
        self._process: BaseProcess | None = None
        self._connection: Connection | None = None
        self._jobs = 0
        self._over = False
        # What the last handler raised, and what that means for its job.
        self.error: BaseException | None = None
        self.action: Action | None = None

    @property
    def is_reusable(self) -> bool:
        """Whether it can run another job. Otherwise run() has closed it, or kill() was called."""
        return not self._over and self._jobs < _JOBS_MAX and self._process is not None and self._process.is_alive()

    def run(self, function: Callable[[Job], Payload], job: Job) -> Payload:
        """Runs a handler, and blocks meanwhile. Raises what it raises, or Crashed."""
        # Pickled first: a handler that cannot be sent is no reason to give up the process.
        call = pickle.dumps((function, replace(job, lost=Lost(), reporter=Reporter(), logged=JobLog())))
        self._jobs += 1
        self.error = self.action = None
        connection = self._started()
        try:
            connection.send_bytes(call)
            while not isinstance(told := connection.recv(), _Ended):
                lease, said = told
                if lease != job.lease:
                    # This comes from a thread that an earlier handler left running.
                    continue
                if isinstance(said, Report):
                    job.reporter(lease, said)
                else:
                    job.logged.add(said)
        except (EOFError, OSError):
            raise Crashed(self._end()) from None
        finally:
            if not self.is_reusable:
                self.close()
        if told.action is None:
            return told.result
        error: BaseException = pickle.loads(told.error)  # noqa: S301 - from a process of ours
        self.error, self.action = error, told.action
        raise error

    def kill(self) -> None:
        """Ends the process and a run() that waits for it, which then closes the pipe. Thread-safe."""
        with self._lock:
            self._over = True
            if self._process is not None and self._connection is not None:
                # Its group too, once it has made one. Never by the number of a process that has ended.
                if self._process.exitcode is None and self._process.pid is not None:
                    with suppress(ProcessLookupError):
                        os.killpg(self._process.pid, signal.SIGKILL)
                self._process.kill()
                # run() need not wait until the last process that has inherited the other end is over.
                with suppress(OSError), socket.socket(fileno=os.dup(self._connection.fileno())) as pipe:
                    pipe.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Lets the process end. Not while run() reads the pipe: another one could get its file descriptor."""
        with self._lock:
            self._over = True
            if self._connection is not None:
                self._connection.close()

    def _started(self) -> Connection:
        with self._lock:
            if self._over:
                raise Crashed("the handler's process was ended before it began")
            if self._connection is None:
                ours, theirs = _SPAWN.Pipe()
                with theirs:
                    process = _SPAWN.Process(target=_serve, args=(theirs,), name=_NAME)
                    process.start()
                self._process, self._connection = process, ours
            return self._connection

    def _end(self) -> str:
        """Returns how the process ended."""
        assert self._process is not None
        self._process.join(_END_S)
        self.kill()
        self._process.join(_END_S)
        code = self._process.exitcode
        if code is None:
            return "the handler's process does not end"
        if code >= 0:
            return f"the handler's process ended with exit code {code}"
        with suppress(ValueError):
            return f"the handler's process was ended by {signal.Signals(-code).name}"
        return f"the handler's process was ended by signal {-code}"


def can_be_sent(function: Callable[..., object]) -> bool:
    """Whether a process can get this function: it is sent by the names of its module and itself."""
    try:
        pickle.dumps(function)
    except (pickle.PicklingError, AttributeError, TypeError):
        return False
    return True


def is_handler_process() -> bool:
    """Whether this process runs handlers for a worker in another one."""
    return multiprocessing.current_process().name == _NAME


def _serve(connection: Connection) -> None:
    # A group of its own: what handlers start is killed with this process.
    os.setsid()
    # A supervisor's SIGTERM may reach every process of the worker. The worker decides when this one ends. Not SIG_IGN:
    # what handlers start would inherit that.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _ignore)
    threading.Thread(target=_end_with_worker, daemon=True).start()
    # A handler may report from several threads.
    lock = threading.Lock()

    def tell(told: tuple[bytes, Report | Lines] | _Ended) -> None:
        with lock:
            connection.send(told)

    with suppress(EOFError, OSError):
        while True:
            call = connection.recv_bytes()
            tell(_run(call, tell))
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    # Do not wait for threads that handlers have left alone.
    os._exit(0)


def _ignore(_number: int, _frame: FrameType | None) -> None:
    """Takes a signal, and does nothing."""


def _end_with_worker() -> None:
    worker = multiprocessing.parent_process()
    assert worker is not None
    worker.join()
    # The worker's lease ends: another one will run the job.
    os._exit(1)


def _run(call: bytes, tell: Callable[[tuple[bytes, Report | Lines]], None]) -> _Ended:
    try:
        function, job = pickle.loads(call)  # noqa: S301 - from the worker
        reporter = Reporter(lambda lease, report: tell((lease, report)))
        result = function(replace(job, reporter=reporter, logged=_SentLog(lambda lines: tell((job.lease, lines)))))
        return _Ended(result=None if result is None else encode(result, what="result"))
    except BaseException as error:  # noqa: BLE001 - whatever a handler raises becomes its job's error
        return _Ended(error=_pickled(error), action=action_of(error, runner=__file__)[0])


def _pickled(error: BaseException) -> bytes:
    try:
        data = pickle.dumps(error)
        pickle.loads(data)  # noqa: S301 - made one line above
    except Exception:  # noqa: BLE001 - an exception's __reduce__ may raise anything
        return pickle.dumps(RuntimeError(f"the handler raised {type(error).__qualname__}, which cannot be pickled"))
    return data
