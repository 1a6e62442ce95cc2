"""The client processes of one system: started, commanded and ended together."""

from __future__ import annotations

import asyncio
import contextlib
import json
from asyncio.subprocess import Process
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.system import Site, Wrong
from proof.processes import end, start


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """The result of an order, and when the order began and ended, by the machine's monotonic clock."""

    began_s: float
    ended_s: float
    found: Any


# An order may take as long as the order itself says, and this many seconds more.
_ORDER_S_MAX = 300.0


class Clients:
    """`pids` are the ids of the client processes."""

    def __init__(self, processes: list[Process]) -> None:
        self._processes = processes

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    async def one(self, at: int, verb: str, **order: object) -> Answered:
        """Sends an order to one process. Raises Wrong."""
        return await _order(self._processes[at], {"verb": verb, **order})

    async def all(self, verb: str, order: Callable[[int], dict[str, object]] = lambda _: {}) -> list[Answered]:
        """Sends an order to all processes at the same time. `order` returns the order's arguments for the process with
        a given index. Raises Wrong."""
        return await asyncio.gather(
            *(_order(process, {"verb": verb, **order(at)}) for at, process in enumerate(self._processes))
        )

    async def prepare(self, run: str, *, record: bool = False) -> None:
        """Prepares a run of this name: one process creates the queues, and the other processes then find them."""
        await self.one(0, "prepare", run=run, record=record)
        await self.all("prepare", lambda _: {"run": run, "record": record})


@contextlib.asynccontextmanager
async def open_clients(
    system: str, sites: Sequence[Site], *, tally: Path, environ: Mapping[str, str]
) -> AsyncGenerator[Clients, None]:
    """Runs client processes for this scope, one at each site."""
    await asyncio.to_thread(tally.touch)
    async with contextlib.AsyncExitStack() as stack:
        processes: list[Process] = []
        for at, site in enumerate(sites):
            process = await start("bench.client_process", environ=environ)
            stack.push_async_callback(end, process)
            shared = {"tally": str(tally), "places": len(sites), "mine": at}
            await _say(process, {"system": system, "site": asdict(site), **shared})
            processes.append(process)
        yield Clients(processes)


async def _order(process: Process, order: dict[str, object]) -> Answered:
    await _say(process, order)
    assert process.stdout is not None
    seconds = order.get("seconds", 0.0)
    assert isinstance(seconds, int | float)
    try:
        async with asyncio.timeout(_ORDER_S_MAX + seconds):
            line = await process.stdout.readline()
    except TimeoutError:
        raise Wrong(f"{order['verb']}: no end after {_ORDER_S_MAX + seconds:g} s") from None
    if not line:
        raise Wrong(f"client process {process.pid} died of {order['verb']!r}")
    answer = json.loads(line)
    if "error" in answer:
        raise Wrong(answer["error"])
    return Answered(**answer)


async def _say(process: Process, message: Mapping[str, object]) -> None:
    assert process.stdin is not None
    process.stdin.write(json.dumps(message).encode() + b"\n")
    with contextlib.suppress(ConnectionError):
        await process.stdin.drain()
