"""The client processes of one system: started, ordered about together, and ended together."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import asdict
from pathlib import Path

from bench.system import Site, Wrong

_END_S_MAX = 10.0


class Clients:
    """`pids` are those of its processes."""

    def __init__(self, processes: list[Process]) -> None:
        self._processes = processes

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    async def first(self, verb: str, **order: object) -> None:
        """Orders one process alone."""
        await _order(self._processes[0], {"verb": verb, **order})

    async def all(self, verb: str, order: Callable[[int], dict[str, object]]) -> float:
        """Orders every process at once, each by its position; answers the seconds from the first to begin to the last
        to end. Raises Wrong."""
        answers = await asyncio.gather(
            *(_order(process, {"verb": verb, **order(at)}) for at, process in enumerate(self._processes))
        )
        return max(ended for _, ended in answers) - min(began for began, _ in answers)


@contextlib.asynccontextmanager
async def open_clients(system: str, site: Site, *, count: int, tally: Path) -> AsyncGenerator[Clients, None]:
    """Client processes for this scope. The file `tally` must exist."""
    async with contextlib.AsyncExitStack() as stack:
        processes: list[Process] = []
        for at in range(count):
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "bench.client_process"), stdin=PIPE, stdout=PIPE
            )
            stack.push_async_callback(_end, process)
            shared = {"tally": str(tally), "places": count, "mine": at}
            await _say(process, {"system": system, "site": asdict(site), **shared})
            processes.append(process)
        yield Clients(processes)


async def _order(process: Process, order: dict[str, object]) -> tuple[float, float]:
    await _say(process, order)
    assert process.stdout is not None
    line = await process.stdout.readline()
    if not line:
        raise Wrong(f"client process {process.pid} died of {order['verb']!r}")
    answer = json.loads(line)
    if "error" in answer:
        raise Wrong(answer["error"])
    return answer["began_s"], answer["ended_s"]


async def _say(process: Process, message: Mapping[str, object]) -> None:
    assert process.stdin is not None
    process.stdin.write(json.dumps(message).encode() + b"\n")
    with contextlib.suppress(ConnectionError):
        await process.stdin.drain()


async def _end(process: Process) -> None:
    assert process.stdin is not None
    process.stdin.close()
    try:
        async with asyncio.timeout(_END_S_MAX):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
