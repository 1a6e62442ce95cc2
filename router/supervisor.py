"""Several router processes on one port: starts them, starts those again that die, and ends them in order."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import signal
import socket
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Generator
from pathlib import Path

from router.errors import HOPELESS, CannotListen, RouterFailed
from router.settings import host_and_port

_log = logging.getLogger(__name__)

# A process that lived this long starts again at once; one that did not, after a pause.
_LIVED_S = 5.0
_PAUSE_S = 1.0


class Supervisor:
    """The router processes of one machine. `pids` are those alive now; fault tests kill them."""

    def __init__(self, config: Path, *, listen: str, processes: int, drain_seconds: float) -> None:
        self._config = config
        self._listen = listen
        self._processes = processes
        self._drain_s = drain_seconds
        self._running: set[Process] = set()
        # Those that take calls.
        self._serving: set[Process] = set()
        self._stopping = asyncio.Event()

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._running if process.returncode is None]

    def reload(self) -> None:
        """Has every process look at the cluster file now. One that has yet to say that it serves has just read it."""
        _signal(list(self._serving), signal.SIGHUP)

    async def run(self, *, ready: Callable[[str], None], stop: asyncio.Event) -> None:
        """Runs until `stop` is set. Calls `ready` with the address once every process takes calls. Raises
        CannotListen and RouterFailed."""
        with _reserved(self._listen) as address:
            up = [asyncio.Event() for _ in range(self._processes)]
            keepers = [asyncio.create_task(self._keep(address, event)) for event in up]
            all_up = asyncio.create_task(_all(up))
            stopped = asyncio.create_task(stop.wait())
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
                for task in (all_up, stopped):
                    task.cancel()
                await self._end_all()
                for keeper in keepers:
                    keeper.cancel()
                await asyncio.wait({all_up, stopped, *keepers})

    async def _keep(self, address: str, up: asyncio.Event) -> None:
        """Keeps one process running."""
        while not self._stopping.is_set():
            began_s = time.monotonic()
            try:
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", "router.process", "--config", str(self._config), "--listen", address),
                    stdin=PIPE,
                    stdout=PIPE,
                    # Ctrl-C is for the supervisor, which ends its processes in order.
                    start_new_session=True,
                )
            except OSError as error:
                # No memory, too many processes: the others serve, and must not end for it.
                if not up.is_set():
                    raise RouterFailed(f"a router process cannot be started: {error.strerror}") from error
                _log.warning("a router process cannot be started: %s; trying again", error.strerror)
                await asyncio.sleep(_PAUSE_S)
                continue
            self._running.add(process)
            try:
                assert process.stdout is not None
                if (await process.stdout.readline()).startswith(b"ready"):
                    up.set()
                    self._serving.add(process)
                code = await process.wait()
            finally:
                self._running.discard(process)
                self._serving.discard(process)
            if self._stopping.is_set():
                return
            # Once it has served, there is something to come back to: the cluster file may have been broken since, and
            # the other processes go on with what it said before.
            if code == HOPELESS and not up.is_set():
                raise RouterFailed(f"a router process gave up (exit code {code})")
            _log.warning("router process %d ended with %d; starting another", process.pid, code)
            if time.monotonic() - began_s < _LIVED_S:
                await asyncio.sleep(_PAUSE_S)

    async def _end_all(self) -> None:
        """Lets every process drain, and kills what has not ended by then."""
        processes = list(self._running)
        _signal(processes, signal.SIGTERM)
        ends = [asyncio.create_task(process.wait()) for process in processes]
        if ends:
            _, late = await asyncio.wait(ends, timeout=self._drain_s + 5.0)
            if late:
                _log.warning("%d router process(es) did not end in time; killing them", len(late))
                _signal(processes, signal.SIGKILL)
                await asyncio.wait(late)


def _signal(processes: list[Process], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(number)


async def _all(events: list[asyncio.Event]) -> None:
    for event in events:
        await event.wait()


@contextlib.contextmanager
def _reserved(listen: str) -> Generator[str, None, None]:
    """Holds an address for our processes while they come and go, and refuses one that others use: with SO_REUSEPORT the
    kernel would deal half of the connections to them. Port 0 takes a free one. Yields HOST:PORT."""
    host, port = host_and_port(listen, where="listen")
    bare = host.strip("[]")
    try:
        family, _, _, _, place = socket.getaddrinfo(bare, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(place)
            place = probe.getsockname()
        holder = socket.socket(family, socket.SOCK_STREAM)
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind(place)
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        remedy = "stop what uses it, or choose another" if taken else "choose an address of this machine"
        raise CannotListen(f"cannot listen on {listen}: {error.strerror}; {remedy}") from error
    with holder:
        yield f"{host}:{holder.getsockname()[1]}"
