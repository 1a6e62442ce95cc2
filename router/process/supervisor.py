"""Runs several router processes on one port: starts them, connects them to each other, restarts processes that die, and
ends all of them in order."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from router.errors import EXIT_NO_RETRY, CannotListen, RouterFailed, RouterGaveUp
from router.settings import END_S_MAX, host_and_port

if TYPE_CHECKING:
    from router.process.metrics import Metrics

_log = logging.getLogger(__name__)

# A process that ran for at least this long is restarted at once. Any other process is restarted after a pause.
_RAN_S_MIN = 5.0
_PAUSE_S = 1.0
# How often the log says what strangers can do.
_EXPOSED_S = 60.0


class Supervisor:
    """The router processes of one machine. `pids` are the process ids of the running ones; fault tests kill them.
    `metrics` is where their metrics are served (HOST:PORT); None: nowhere. `exposed` is what strangers can do
    (router/process/exposure.py): the log repeats it. `environ` is added to the environment of the processes."""

    def __init__(
        self,
        config: Path,
        *,
        listen: str,
        processes: int,
        drain_seconds: float,
        metrics: str | None = None,
        exposed: str | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self._config = config
        self._listen = listen
        self._processes = processes
        self._drain_s = drain_seconds
        self._exposed = exposed
        self._added = environ or {}
        self._metrics_at = metrics
        self._metrics: Metrics | None = None
        self._running: set[Process] = set()
        # The processes that take calls. With each: the connection over which the supervisor passes the process its
        # connections to its siblings.
        self._serving: dict[Process, socket.socket] = {}
        self._stopping = asyncio.Event()

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._running if process.returncode is None]

    def reload(self) -> None:
        """Makes every serving process read the cluster file now. A process that is still starting has just read it."""
        _signal(list(self._serving), signal.SIGHUP)

    async def run(self, *, ready: Callable[[str], None], stop: asyncio.Event) -> None:
        """Runs the processes until `stop` is set. Calls `ready` with the address once all of them take calls. Raises
        CannotListen and RouterFailed."""
        with _reserved(self._listen) as address, _served(self._metrics_at) as self._metrics:
            up = [asyncio.Event() for _ in range(self._processes)]
            keepers = [asyncio.create_task(self._keep(address, event)) for event in up]
            all_up = asyncio.create_task(_all(up))
            stopped = asyncio.create_task(stop.wait())
            warning = asyncio.create_task(self._warn())
            try:
                waiting: set[asyncio.Task[None] | asyncio.Task[bool]] = {all_up, stopped, *keepers}
                done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                if all_up in done:
                    ready(address)
                done, _ = await asyncio.wait({stopped, *keepers}, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    await task
            finally:
                self._stopping.set()
                for task in (all_up, stopped, warning):
                    task.cancel()
                await self._end_all()
                for keeper in keepers:
                    keeper.cancel()
                await asyncio.wait({all_up, stopped, warning, *keepers})

    async def _warn(self) -> None:
        while self._exposed is not None:
            _log.warning("insecure = true: %s", self._exposed)
            await asyncio.sleep(_EXPOSED_S)

    async def _keep(self, address: str, up: asyncio.Event) -> None:
        """Keeps one process running; sets `up` when it has served for the first time."""
        while not self._stopping.is_set():
            began_s = time.monotonic()
            # This connection is the process's standard input: when the supervisor has ended, the process notices that
            # and ends.
            ours, its = socket.socketpair()
            ours.setblocking(False)
            try:
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", "router.process.child", "--config", str(self._config), "--listen", address),
                    stdin=its.fileno(),
                    stdout=PIPE,
                    env=self._environ(),
                    # Ctrl-C must reach only the supervisor, which then ends its processes in order.
                    start_new_session=True,
                )
            except OSError as error:
                # The machine has no memory left, or too many processes. The other router processes must continue to
                # serve.
                ours.close()
                if not up.is_set():
                    raise RouterFailed(f"a router process cannot be started: {error.strerror}") from error
                _log.warning("a router process cannot be started: %s; trying again", error.strerror)
                await asyncio.sleep(_PAUSE_S)
                continue
            finally:
                its.close()
            self._running.add(process)
            try:
                assert process.stdout is not None
                if (await process.stdout.readline()).startswith(b"ready"):
                    up.set()
                    for sibling in self._serving.values():
                        _connect(ours, sibling)
                    self._serving[process] = ours
                code = await process.wait()
            finally:
                self._running.discard(process)
                self._serving.pop(process, None)
                ours.close()
                if self._metrics is not None and process.returncode is not None:
                    self._metrics.ended(process.pid)
            if self._stopping.is_set():
                return
            # If one of the processes started in this loop has served, keep trying: the cluster file may have become
            # unusable since then, while the other processes continue with its previous contents.
            if code == EXIT_NO_RETRY and not up.is_set():
                raise RouterGaveUp(f"a router process gave up (exit code {code})")
            _log.warning("router process %d ended with %d; starting another", process.pid, code)
            if time.monotonic() - began_s < _RAN_S_MIN:
                await asyncio.sleep(_PAUSE_S)

    def _environ(self) -> dict[str, str]:
        """Returns the environment of a router process."""
        inherited = {name: value for name, value in os.environ.items() if name != "PROMETHEUS_MULTIPROC_DIR"}
        return inherited | dict(self._added) | (self._metrics.environ if self._metrics is not None else {})

    async def _end_all(self) -> None:
        """Lets every process drain, and kills those that have not ended in time."""
        processes = list(self._running)
        _signal(processes, signal.SIGTERM)
        ends = [asyncio.create_task(process.wait()) for process in processes]
        if ends:
            _, late = await asyncio.wait(ends, timeout=self._drain_s + END_S_MAX)
            if late:
                _log.warning("%d router process(es) did not end in time; killing them", len(late))
                _signal(processes, signal.SIGKILL)
                await asyncio.wait(late)


def _signal(processes: list[Process], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(number)


def _connect(*processes: socket.socket) -> None:
    """Passes one end of a new connection to each of two processes. If one of them is ending, the other one sees that
    the connection has ended."""
    for process, end in zip(processes, socket.socketpair(), strict=True):
        with end, contextlib.suppress(OSError):
            socket.send_fds(process, [b"+"], [end.fileno()])


async def _all(events: list[asyncio.Event]) -> None:
    for event in events:
        await event.wait()


@contextlib.contextmanager
def _served(address: str | None) -> Generator[Metrics | None, None, None]:
    """Serves metrics, if there is an address. Raises CannotListen."""
    if address is None:
        yield None
        return
    # Imported only if it is used: it takes a third of the supervisor's start-up time.
    from router.process.metrics import served

    with served(address) as metrics:
        yield metrics


@contextlib.contextmanager
def _reserved(listen: str) -> Generator[str, None, None]:
    """Reserves an address for the router processes, even while one of them restarts. Port 0 chooses a free port. Yields
    HOST:PORT. Raises CannotListen if another program uses the address: with SO_REUSEPORT the kernel would send half of
    the connections to that program."""
    host, port = host_and_port(listen, where="listen")
    bare = host.strip("[]")
    try:
        family, _, _, _, address = socket.getaddrinfo(bare, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            address = probe.getsockname()
        holder = socket.socket(family, socket.SOCK_STREAM)
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind(address)
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        remedy = "stop what uses it, or choose another" if taken else "choose an address of this machine"
        raise CannotListen(f"cannot listen on {listen}: {error.strerror}; {remedy}") from error
    with holder:
        yield f"{host}:{holder.getsockname()[1]}"
