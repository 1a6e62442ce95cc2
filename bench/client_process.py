"""`python -m bench.client_process`: one client process.

Does what standard input says, a JSON line each, and answers each with a JSON line: when it began and ended, by the
machine's monotonic clock, or what went wrong. Ends with its input.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from bench.system import Site, System, Wrong
from bench.systems import load
from bench.tally import Tally

# A consumer that found nothing asks again after this long.
_POLL_S = 0.002
# With nothing done by anyone for so long, jobs must be missing.
STUCK_S = 30.0


class Client:
    """One process's part in a run: several calls at a time, until its share is done."""

    def __init__(self, system: System, tally: Tally, *, callers: int) -> None:
        self._system = system
        self._tally = tally
        self._callers = callers

    async def prepare(self, run: str) -> None:
        self._tally.reset()
        await self._system.prepare(run)

    async def check(self, jobs: int) -> None:
        await self._system.check(jobs)

    async def enqueue(self, jobs: int, batch: int) -> None:
        left = jobs

        async def produce() -> None:
            nonlocal left
            while left:
                count = min(batch, left)
                left -= count
                await self._system.enqueue(count)

        await self._at_once(produce)

    async def drain(self, total: int, batch: int) -> None:
        """Drains until all clients together have finished `total` jobs."""

        async def consume() -> None:
            idle_since_s, seen = time.monotonic(), -1
            while (finished := self._tally.total()) < total:
                count = await self._system.drain(batch)
                if count:
                    self._tally.add(count)
                    continue
                if finished != seen:
                    idle_since_s, seen = time.monotonic(), finished
                elif time.monotonic() - idle_since_s > STUCK_S:
                    raise Wrong(f"only {finished} of {total} jobs came out, and for {STUCK_S:g} s no more")
                await asyncio.sleep(_POLL_S)

        await self._at_once(consume)
        if self._tally.total() != total:
            raise Wrong(f"{self._tally.total()} jobs came out, and {total} had gone in")

    async def live(self, jobs: int, total: int, batch: int) -> None:
        """Enqueues and drains at the same time."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.enqueue(jobs, batch))
            group.create_task(self.drain(total, batch))

    async def _at_once(self, act: Callable[[], Awaitable[None]]) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(self._callers):
                group.create_task(_run(act))


async def _run(act: Callable[[], Awaitable[None]]) -> None:
    await act()


async def _obey(order: dict[str, Any], client: Client) -> dict[str, object]:
    verb = order.pop("verb")
    began_s = time.monotonic()
    try:
        match verb:
            case "prepare":
                await client.prepare(**order)
            case "enqueue":
                await client.enqueue(**order)
            case "drain":
                await client.drain(**order)
            case "live":
                await client.live(**order)
            case "check":
                await client.check(**order)
            case _:
                return {"error": f"no such order: {verb!r}"}
    except Exception as error:  # noqa: BLE001 - told to the parent, which ends the benchmark
        return {"error": f"{verb}: {_first(error)}"}
    return {"began_s": began_s, "ended_s": time.monotonic()}


def _first(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"


async def main() -> None:
    loop = asyncio.get_running_loop()
    orders = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(orders), sys.stdin)
    first = json.loads(await orders.readline())
    site = Site(**first["site"])
    system = load(first["system"])(site)
    tally = Tally(Path(first["tally"]), places=first["places"], mine=first["mine"])
    client = Client(system, tally, callers=site.callers)
    following = asyncio.create_task(orders.readline())
    try:
        while line := await following:
            following = asyncio.create_task(orders.readline())
            work = asyncio.create_task(_obey(json.loads(line), client))
            # The parent speaks again only after it was answered: a line that comes earlier is its end.
            await asyncio.wait({work, following}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                work.cancel()
                await asyncio.wait({work})
                break
            print(json.dumps(work.result()), flush=True)
    finally:
        await system.close()


if __name__ == "__main__":
    # Ctrl-C reaches the whole terminal; the parent hears it, and ends this process in order.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    asyncio.run(main())
