"""Starts routers and balancers by forking a process that has imported them. The imports of a supervisor and of its
router process take a second of CPU, and a run of all tests starts hundreds of such processes.

Each test process has one such fork server. It has no threads and never uses gRPC, so that its forks are safe. A process
that it forks becomes a child of the test process, and the test process controls it as with `subprocess.Popen`. Only
Linux can do this. On other systems, programs are started as usual. Programs that get their own environment are also
started as usual.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Generator, Mapping, Sequence
from typing import IO, Any, AnyStr, NoReturn, cast

from tests.checks import ROOT

_AVAILABLE = sys.platform == "linux"
# The modules that the fork server imports.
_CHILD = "router.process.child"
_PRELOADED = ("router.__main__", _CHILD, "cli.main", "cli.servers", "balancer.service")
_PR_SET_CHILD_SUBREAPER = 36
_REQUEST_BYTES_MAX = 1 << 20


# ── In the test process ──────────────────────────────────────────────────────────────────────────────────────────────


def start(
    *arguments: object,
    stdout: int | None = None,
    stderr: IO[str],
    environ: Mapping[str, str] | None = None,
) -> subprocess.Popen[str]:
    """Starts `python -m MODULE …` in the checkout. `arguments` are arguments of Python. `environ`: variables in
    addition to those of this process. The OTEL_* of this process are not passed on."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    # Some modules read the environment when they are imported.
    popen = subprocess.Popen[str] if environ or not _AVAILABLE else _Preloaded
    command = [sys.executable, *map(str, arguments)]
    return popen(command, cwd=ROOT, stdout=stdout, stderr=stderr, text=True, env=clean | dict(environ or {}))


class _Forked(subprocess.Popen[AnyStr]):
    """A process that was forked from a process with the imports. Only this class uses private parts of Popen."""

    def _fork(self, args: Sequence[str], cwd: object, env: Mapping[str, str], descriptors: list[int]) -> int | None:
        """Returns the pid of a new child with these descriptors as 0, 1 and 2. Returns None if `Popen` must start the
        program as usual."""
        raise NotImplementedError

    def _execute_child(
        self, args: Sequence[str], executable: object, preexec_fn: object, close_fds: bool, pass_fds: object,
        cwd: object, env: Mapping[str, str], startupinfo: object, creationflags: int, shell: bool,
        p2cread: int, p2cwrite: int, c2pread: int, c2pwrite: int, errread: int, errwrite: int, *more: object,
    ) -> None:  # fmt: skip
        pipes = p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite
        pid = self._fork(args, cwd, env, _inherited(p2cread, c2pwrite, errwrite))
        if pid is None:
            as_usual = cast("Any", super())._execute_child
            as_usual(args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell,
                     *pipes, *more)  # fmt: skip
            return
        self.pid = pid
        self._child_created = True
        cast("Any", self)._close_pipe_fds(*pipes)


class _Preloaded(_Forked[AnyStr]):
    """A process that the fork server forks."""

    def _fork(self, args: Sequence[str], cwd: object, env: Mapping[str, str], descriptors: list[int]) -> int | None:
        request = {"module": args[2], "arguments": args[3:], "cwd": str(cwd or os.getcwd()), "environ": dict(env)}
        return _server().start(request, descriptors)


class RouterProcess(_Preloaded[AnyStr]):
    """Replaces Popen for supervisors that run in the test's process. The fork server forks router processes; any other
    process is started as usual."""

    def _fork(self, args: Sequence[str], cwd: object, env: Mapping[str, str], descriptors: list[int]) -> int | None:
        if not _AVAILABLE or [*args[1:3]] != ["-m", _CHILD] or env != os.environ:
            return None
        return super()._fork(args, cwd, env, descriptors)


def _inherited(*descriptors: int) -> list[int]:
    """Returns the descriptors for 0, 1 and 2. The value -1 stands for the descriptor of this process."""
    return [number if given == -1 else given for number, given in enumerate(descriptors)]


class _Server:
    """The fork server of this process."""

    def __init__(self) -> None:
        self._socket, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with its:
            self._process = subprocess.Popen([sys.executable, "-m", "tests.preloaded"], cwd=ROOT, stdin=its.fileno())
        self._lock = threading.Lock()
        atexit.register(self._end)

    def start(self, request: Mapping[str, object], descriptors: list[int]) -> int:
        """Returns the pid of the new process, which is a child of this one."""
        with self._lock, _adopting():
            socket.send_fds(self._socket, [json.dumps(request).encode()], descriptors)
            answer = self._socket.recv(32)
        assert answer, "the fork server has ended"
        return int(answer)

    def _end(self) -> None:
        self._socket.close()
        self._process.wait()


@functools.cache
def _server() -> _Server:
    return _Server()


@contextlib.contextmanager
def _adopting() -> Generator[None, None, None]:
    """Makes descendants of this process its children when their parents end. This lasts only for a moment: otherwise
    the orphans that tests make would stay here as zombies."""
    _be_subreaper(True)
    try:
        yield
    finally:
        _be_subreaper(False)


def _be_subreaper(wanted: bool) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, int(wanted), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


# ── In the fork server, and in the supervisors that it forks ─────────────────────────────────────────────────────────


class _RouterProcess(_Forked[bytes]):
    """A router process that a supervisor forks from itself. This class is used in the supervisor."""

    def _fork(self, args: Sequence[str], cwd: object, env: Mapping[str, str], descriptors: list[int]) -> int | None:
        if env != os.environ:
            # Some modules read the environment when they are imported.
            return None
        assert args[2] == _CHILD, args
        # At first the new process has the supervisor's signal handlers. A signal for the new process must not reach
        # these handlers.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            pid = os.fork()
            if pid == 0:
                os.setsid()
                _forget_signals(before)
                _take(descriptors)
                _run(_CHILD, args[3:])
            return pid
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _forget_signals(mask: set[signal.Signals | int]) -> None:
    """Handles signals as a new interpreter does."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _take(descriptors: Sequence[int]) -> None:
    """Makes these descriptors 0, 1 and 2, and closes all other descriptors."""
    # First copy the descriptors to higher numbers, because a descriptor may have the number that another one will get.
    copies = [os.dup(descriptor) for descriptor in descriptors]
    for target, copy in enumerate(copies):
        os.dup2(copy, target)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))


def _run(module: str, arguments: Sequence[str]) -> NoReturn:
    """Runs a program to its end, as an interpreter does."""
    sys.argv = ["preloaded", *arguments]
    try:
        found = importlib.import_module(module)
        if hasattr(found, "__path__"):
            found = importlib.import_module(f"{module}.__main__")
        code = found.main() or 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except BaseException:  # noqa: BLE001 - an interpreter prints it too
        traceback.print_exc()
        code = 1
    # This process must not return to the calling functions: they belong to the process from which it was forked, and
    # continue there.
    cast("Any", threading)._shutdown()
    cast("Any", atexit)._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _forked(request: Mapping[str, Any], descriptors: Sequence[int]) -> int:
    """Starts a program in a new process. The parent of this process ends at once. Returns the pid of the new
    process."""
    reading, writing = os.pipe()
    if (between := os.fork()) == 0:
        if pid := os.fork():
            os.write(writing, str(pid).encode())
            os._exit(0)
        _take(descriptors)
        os.environ.clear()
        os.environ.update(request["environ"])
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")
        os.chdir(request["cwd"])
        subprocess.Popen = _RouterProcess  # type: ignore[assignment, misc]
        gc.enable()
        _run(request["module"], request["arguments"])
    os.close(writing)
    pid = int(os.read(reading, 32))
    os.close(reading)
    os.waitpid(between, 0)
    return pid


def main() -> None:
    """Serves the test process to which the standard input is connected, until the test process ends."""
    gc.disable()
    for module in _PRELOADED:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()
    with socket.socket(fileno=os.dup(0)) as requests:
        with open(os.devnull) as nothing:
            os.dup2(nothing.fileno(), 0)
        # Ctrl-C ends this process without a traceback. The processes that it has forked handle Ctrl-C themselves.
        with contextlib.suppress(KeyboardInterrupt):
            while True:
                data, descriptors, *_ = socket.recv_fds(requests, _REQUEST_BYTES_MAX, 3)
                if not data:
                    return
                requests.send(str(_forked(json.loads(data), descriptors)).encode())
                for descriptor in descriptors:
                    os.close(descriptor)


if __name__ == "__main__":
    main()
