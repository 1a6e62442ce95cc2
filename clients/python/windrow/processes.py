"""Processes that run handlers. Each process runs one job at a time, so killing a process ends only that job.

This module owns the processes and their pipes. It does not know the leases, and does not decide when a job must stop.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import pickle
import queue
import signal
import socket
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import NamedTuple

from windrow.job_log import JobLog, Lines
from windrow.jobs import Job, Lost
from windrow.outcomes import Action, action_of
from windrow.payloads import Payload, encode
from windrow.reports import Report, Reporter

# A process that has run this many jobs is replaced by a new one. This bounds what handlers can leak.
_JOBS_MAX = 1000
# How long a process that has closed its pipe may take to end.
_END_S = 5.0
_NAME = "windrow-handler"
# If the fork server of a process has ended, multiprocessing reports this exit code for the process.
_UNKNOWN_CODE = 255
# How many processes may start at the same time, and for how many seconds at most other processes wait for a slow start.
# If hundreds started together, the worker itself would have no CPU time to extend its leases.
_STARTS = threading.BoundedSemaphore(2 * (os.cpu_count() or 1))
_START_S_MAX = 10.0
if sys.platform == "win32":
    from multiprocessing.context import SpawnProcess as _Process
else:
    from windrow.fork_server import ForkedProcess as _Process


class Crashed(Exception):
    """The process of a handler ended before the handler did."""

    __module__ = "windrow"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ended:
    """How a handler ended, as its process reports it."""

    result: bytes | None = None
    # The pickled error that the handler raised, and the outcome of the job.
    error: bytes = b""
    action: Action | None = None


class _Asked(NamedTuple):
    """A handler asks whether everything that it has reported is stored. The answer is the number of the question."""

    number: int


# What the process of a handler can send about a lease.
_Said = Report | Lines | _Asked


class _SentLog(JobLog):
    """Sends the lines to the worker's process, which keeps them if this process crashes."""

    def __init__(self, send: Callable[[Lines], None]) -> None:
        self._send = send

    def add(self, lines: Lines) -> None:
        self._send(lines)


class HandlerProcess:
    """A process that runs one handler at a time. It starts with its first job. Only retire() and kill() may be called
    from another thread."""

    def __init__(self) -> None:
        # Prevents kill() from running during the start, and prevents the use of the pipe's descriptor after close().
        self._lock = threading.Lock()
        # Held while something is sent, because messages must not mix.
        self._sending = threading.Lock()
        self._process: BaseProcess | None = None
        self._connection: Connection | None = None
        self._jobs = 0
        self._over = False
        # The error that the last handler raised, and the outcome of its job.
        self.error: BaseException | None = None
        self.action: Action | None = None

    @property
    def is_reusable(self) -> bool:
        """Whether the process can run another job."""
        return not self._over and self._jobs < _JOBS_MAX and self._process is not None and self._process.is_alive()

    def run(self, function: Callable[[Job], Payload], job: Job) -> Payload:
        """Runs a handler, and blocks meanwhile. Raises what the handler raises. Raises Crashed if the process ends."""
        # Pickle the call first, so that the process stays usable if the handler cannot be sent.
        of = None if job.workflow is None else replace(job.workflow, caller=None)
        call = pickle.dumps((function, replace(job, lost=Lost(), reporter=Reporter(), logged=JobLog(), workflow=of)))
        self._jobs += 1
        self.error = self.action = None
        is_new = self._connection is None
        with _STARTS if is_new else nullcontext():
            connection = self._started()
            # If the process has ended, send() fails, and so does _received() below.
            with suppress(OSError):
                with self._sending:
                    connection.send(call)
                if is_new:
                    # Let other processes start only after this process has imported the handler.
                    connection.poll(_START_S_MAX)
        try:
            while not isinstance(told := self._received(connection), _Ended):
                if told is None:
                    # The process has begun.
                    continue
                lease, said = told
                if isinstance(said, _Asked):
                    stored = job.reporter.when_stored(lease)
                    stored.add_done_callback(partial(self._answer, said))
                elif lease != job.lease:
                    # The message comes from a thread that an earlier handler left running.
                    continue
                elif isinstance(said, Report):
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

    def _answer(self, asked: _Asked, _: Future[None]) -> None:
        # The process reads at once, so send() does not wait.
        with self._sending, self._lock:
            if self._connection is not None and not self._connection.closed:
                # The process may have ended.
                with suppress(OSError):
                    self._connection.send(asked.number)

    def _received(self, connection: Connection) -> _Ended | tuple[bytes, _Said] | None:
        """Waits for the next message of the process. Raises EOFError if the process ends before it has sent a
        message."""
        assert self._process is not None
        # Also wait for the end of the process itself: a process that the handler has forked may keep the other end of
        # the pipe open for ever.
        if connection not in wait([connection, self._process.sentinel]) and not connection.poll():
            raise EOFError
        received: _Ended | tuple[bytes, _Said] | None = connection.recv()
        return received

    def retire(self) -> None:
        """Prevents the process from running another job. Does not wait for anything."""
        self._over = True

    def kill(self) -> None:
        """Ends the process. If run() waits for the process, run() ends too, and closes the pipe. Thread-safe."""
        with self._lock:
            self._over = True
            if self._process is not None and self._connection is not None:
                # Also kill the group of the process, if the process has made one yet. Never use the id of a process
                # that has ended.
                if self._process.exitcode is None and self._process.pid is not None:
                    with suppress(ProcessLookupError):
                        os.killpg(self._process.pid, signal.SIGKILL)
                self._process.kill()
                # Shut the pipe down, so that run() does not wait for other processes that have inherited the other end.
                with suppress(OSError), socket.socket(fileno=os.dup(self._connection.fileno())) as pipe:
                    pipe.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Lets the process end. Do not call close() while run() reads the pipe: another file could get the pipe's
        descriptor."""
        with self._lock:
            self._over = True
            if self._connection is not None:
                self._connection.close()

    def _started(self) -> Connection:
        with self._lock:
            if self._over:
                raise Crashed("the handler's process was ended before it began")
            if self._connection is None:
                ours, theirs = multiprocessing.Pipe()
                with theirs:
                    process = _Process(target=_serve, args=(theirs,), name=_NAME)
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
        if code == _UNKNOWN_CODE:
            return f"the handler's process ended with exit code {code}, or the server that started it was killed"
        if code >= 0:
            return f"the handler's process ended with exit code {code}"
        with suppress(ValueError):
            return f"the handler's process was ended by {signal.Signals(-code).name}"
        return f"the handler's process was ended by signal {-code}"


def can_be_sent(function: Callable[..., object]) -> bool:
    """Returns whether a process can get this function. A process gets only the name of the function and the name of its
    module."""
    try:
        pickle.dumps(function)
    except (pickle.PicklingError, AttributeError, TypeError):
        return False
    return True


def is_handler_process() -> bool:
    """Returns whether this process runs handlers for a worker in another process."""
    return multiprocessing.current_process().name == _NAME


def _serve(connection: Connection) -> None:
    # Make a process group of its own, so that processes that handlers start are killed with this process.
    os.setsid()
    # A supervisor's SIGTERM may reach every process of the worker. The worker decides when this process ends. Do not
    # use SIG_IGN: processes that handlers start would inherit it.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _ignore)
    threading.Thread(target=_end_with_worker, daemon=True).start()
    worker = _WorkersEnd(connection)
    threading.Thread(target=worker.read, daemon=True).start()
    with suppress(OSError):
        while (call := worker.calls.get()) is not None:
            ended = _run(call, worker)
            worker.busy = False
            worker.tell(ended)
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    # Do not wait for threads that handlers have left running.
    os._exit(0)


class _WorkersEnd:
    """The pipe to the worker, in the process of a handler. A handler may use the pipe in several threads."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        self._numbers = itertools.count()
        # The questions that the worker has not answered yet, by their numbers.
        self._asked: dict[int, Future[None]] = {}
        # True: a handler runs, or is about to run.
        self.busy = False
        # The calls of handlers, and None when the worker has closed the pipe.
        self.calls: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()

    def read(self) -> None:
        """Receives what the worker sends, until the worker closes the pipe."""
        with suppress(EOFError, OSError):
            while True:
                received: bytes | int = self._connection.recv()
                if isinstance(received, bytes):
                    self.busy = True
                    self.calls.put(received)
                else:
                    self._asked.pop(received).set_result(None)
        if self.busy:
            # The worker has given up this process, but could not kill it, because the fork server of this process was
            # killed.
            os._exit(1)
        self.calls.put(None)

    def tell(self, told: tuple[bytes, _Said] | _Ended | None) -> None:
        with self._sending:
            self._connection.send(told)

    def when_stored(self, lease: bytes) -> Future[None]:
        """Asks the worker whether all reports and lines are stored. Returns a future that is completed when the answer
        arrives. The worker reads this question after all earlier reports and lines."""
        number, stored = next(self._numbers), Future[None]()
        # A future that runs cannot be cancelled, so set_result() never fails.
        stored.set_running_or_notify_cancel()
        self._asked[number] = stored
        self.tell((lease, _Asked(number)))
        return stored


def _ignore(_number: int, _frame: FrameType | None) -> None:
    """Receives a signal, and does nothing."""


def _end_with_worker() -> None:
    worker = multiprocessing.parent_process()
    assert worker is not None
    worker.join()
    # The worker's lease will end, and another worker will run the job.
    os._exit(1)


def _run(call: bytes, worker: _WorkersEnd) -> _Ended:
    try:
        # This imports the handler's module.
        function, job = pickle.loads(call)  # noqa: S301 - from the worker
        worker.tell(None)
        reporter = Reporter(lambda lease, report: worker.tell((lease, report)), worker.when_stored)
        logged = _SentLog(lambda lines: worker.tell((job.lease, lines)))
        result = function(replace(job, reporter=reporter, logged=logged))
        return _Ended(result=None if result is None else encode(result, what="result"))
    except BaseException as error:  # noqa: BLE001 - whatever a handler raises becomes its job's error
        return _Ended(error=_pickled(error), action=action_of(error, runners=(__file__,))[0])


def _pickled(error: BaseException) -> bytes:
    try:
        data = pickle.dumps(error)
        pickle.loads(data)  # noqa: S301 - made one line above
    except Exception:  # noqa: BLE001 - an exception's __reduce__ may raise anything
        return pickle.dumps(RuntimeError(f"the handler raised {type(error).__qualname__}, which cannot be pickled"))
    return data
