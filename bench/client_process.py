"""`python -m bench.client_process`: one client process.

Reads orders from standard input, one JSON line each. Answers each order with a JSON line: the order's result or error,
and when the order began and ended, by the machine's monotonic clock. Ends when its input ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import sys
import time
from array import array
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.messages import MESSAGES
from bench.payloads import intact, stamp_ns, stamped
from bench.system import Site, System, Wrong
from bench.systems import load
from bench.tally import Tally

_LOOK_S, _LOOK_AFAR_S = 0.002, 0.02
# If no job has been taken or finished for this long, jobs must be missing.
STUCK_S = 30.0
_SETTLE_S_MAX = 30.0
# How long workers may take to start before the first job is enqueued.
WORKERS_UP_S = 1.0


class Client:
    """What one client process does in a run."""

    def __init__(self, system: System, tally: Tally) -> None:
        self._system = system
        self._tally = tally
        self._working: asyncio.Task[None] | None = None
        self._wrong: str | None = None
        self._finished_at_s = 0.0
        # Pairs of numbers: the time at which a job was taken, and the time between the job's stamp and that moment.
        # None: pickups are not recorded.
        self._pickups: array[int] | None = None

    async def prepare(self, run: str, *, record: bool = False) -> None:
        await self.rest()
        self._tally.reset()
        self._wrong = None
        self._pickups = array("q") if record else None
        await self._system.prepare(run)

    async def enqueue(self, *, jobs: int, batch: int, callers: int) -> None:
        """Stores `jobs` jobs, with `callers` calls at the same time."""
        left = jobs

        async def produce() -> None:
            nonlocal left
            while left:
                count = min(batch, left)
                left -= count
                await self._system.enqueue(stamped(count))

        async with asyncio.TaskGroup() as group:
            for _ in range(callers):
                group.create_task(produce())

    async def offer(self, *, rate: float, seconds: float, batch: int, late_s_max: float) -> int:
        """Stores `rate` jobs a second, without waiting for earlier calls. Each job is stamped with the time at which it
        was due to be stored. Returns how many jobs were stored.

        If calls are late, the process makes them as soon as it can. While the process is more than `late_s_max` behind,
        it skips the calls that become due.
        """
        pause_s = batch / rate
        began_s = time.monotonic()
        stored = skipped = turn = 0
        calls: set[asyncio.Task[None]] = set()
        failed: list[BaseException] = []

        async def call(due_ns: int) -> None:
            nonlocal stored
            await self._system.enqueue(stamped(batch, at_ns=due_ns))
            stored += batch

        def done(task: asyncio.Task[None]) -> None:
            calls.discard(task)
            if not task.cancelled() and (error := task.exception()):
                failed.append(error)

        while (due_s := began_s + turn * pause_s) < began_s + seconds and not failed:
            turn += 1
            if (early_s := due_s - time.monotonic()) > 0:
                await asyncio.sleep(early_s)
            if len(calls) * pause_s > late_s_max:
                skipped += 1
                continue
            task = asyncio.create_task(call(round(due_s * 1e9)))
            calls.add(task)
            task.add_done_callback(done)
        if calls:
            await asyncio.wait(calls)
        if failed:
            raise failed[0]
        return stored

    async def ping(self, *, jobs: int, seconds_max: float, pause_s: float) -> int:
        """Stores jobs one by one. Before each job, waits until the job before it has been taken, and then pauses for
        `pause_s` on average. Returns how many jobs were stored. Ends early after about `seconds_max`."""
        until_s = time.monotonic() + seconds_max
        for at in range(jobs):
            if time.monotonic() > until_s:
                return at
            before = self._tally.taken
            await self._system.enqueue(stamped(1))
            await self._until(lambda: self._tally.taken > before, "1 more")  # noqa: B023 - ended before the next turn
            # Pause for a random time. Otherwise the jobs might always come at the same moment between two polls of the
            # system.
            await asyncio.sleep(pause_s * random.uniform(0.2, 1.8))
        return jobs

    async def work(self, *, batch: int, concurrency: int) -> None:
        """Starts a consumer, which runs until rest() is called. Starts none if `concurrency` is 0, because then only
        other processes consume."""
        await self.rest()
        self._finished_at_s = time.monotonic()
        if not concurrency:
            return
        run = self._system.work(batch=batch, concurrency=concurrency, taken=self._taken, finished=self._finished)
        self._working = asyncio.create_task(_run(run))

    async def rest(self) -> None:
        working, self._working = self._working, None
        if working is not None:
            working.cancel()
            await asyncio.wait({working})
            if not working.cancelled() and (error := working.exception()):
                raise error

    async def drain(self, *, total: int, batch: int, concurrency: int) -> float:
        """Starts to consume, and waits until all clients together have finished `total` jobs. Then continues to
        consume. Returns the time at which this client finished its last job."""
        await self.work(batch=batch, concurrency=concurrency)
        # Look rarely at first: each look wakes this process up, and the benchmark counts wake-ups.
        await self._until(lambda: self._tally.finished >= 0.9 * total, f"{total}", look_s=_LOOK_AFAR_S)
        await self._until(lambda: self._tally.finished >= total, f"{total}")
        return self._finished_at_s

    async def live(self, *, jobs: int, total: int, batch: int, callers: int, concurrency: int) -> tuple[float, float]:
        """Starts to consume, and then enqueues while the clients finish the jobs. Returns the times at which the first
        job was enqueued, and at which the last job finished."""
        async with asyncio.TaskGroup() as group:
            draining = group.create_task(self.drain(total=total, batch=batch, concurrency=concurrency))
            await asyncio.sleep(WORKERS_UP_S)
            began_s = time.monotonic()
            group.create_task(self.enqueue(jobs=jobs, batch=batch, callers=callers))
        return began_s, draining.result()

    async def settle(self, *, total: int) -> float | None:
        """Waits until the database has no unfinished job. Returns the time at which the database had none, or None if
        it had none at the first look."""
        first = True
        until_s = time.monotonic() + _SETTLE_S_MAX
        while left := await self._system.left():
            if time.monotonic() > until_s:
                raise Wrong(f"{left} of {total} jobs are not finished in the database")
            self._sound()
            first = False
            await asyncio.sleep(_LOOK_S)
        if (self._tally.taken, self._tally.finished) != (total, total):
            raise Wrong(f"{self._tally.taken} jobs came out, {self._tally.finished} finished, and {total} had gone in")
        return None if first else time.monotonic()

    async def calm(self, *, seconds_max: float) -> int:
        """Waits for the remaining jobs to finish, for at most `seconds_max`. Returns how many jobs are still
        unfinished."""
        until_s = time.monotonic() + seconds_max
        while (left := await self._system.left()) and time.monotonic() < until_s:
            self._sound()
            await asyncio.sleep(0.1)
        return left

    async def counts(self) -> tuple[int, int]:
        """Returns how many jobs all clients together have taken, and how many they have finished."""
        self._sound()
        return self._tally.taken, self._tally.finished

    async def pickups(self, *, file: str) -> None:
        """Writes the recorded pickups to a file, and forgets them."""
        self._sound()
        assert self._pickups is not None
        await asyncio.to_thread(Path(file).write_bytes, self._pickups.tobytes())
        self._pickups = array("q")

    async def messages(self) -> dict[str, int]:
        """Returns how many messages this process's Consume streams have received and sent since the process began."""
        return asdict(MESSAGES)

    async def check(self, jobs: int) -> None:
        self._sound()
        await self._system.check(jobs)

    def _taken(self, at_ns: int, payload: bytes) -> None:
        self._tally.take(1)
        if not intact(payload):
            self._wrong = f"a job came out with another payload than it was stored with: {payload[:40]!r}…"
        elif self._pickups is not None:
            self._pickups.append(at_ns)
            self._pickups.append(at_ns - stamp_ns(payload))

    def _finished(self, jobs: int) -> None:
        self._tally.finish(jobs)
        self._finished_at_s = time.monotonic()

    async def _until(self, holds: Callable[[], bool], what: str, *, look_s: float = _LOOK_S) -> None:
        """Waits until `holds()` is true. Raises Wrong if no job has been taken or finished for STUCK_S."""
        moved_s, seen = time.monotonic(), (-1, -1)
        while not holds():
            self._sound()
            if (now := (self._tally.taken, self._tally.finished)) != seen:
                moved_s, seen = time.monotonic(), now
            elif time.monotonic() - moved_s > STUCK_S:
                raise Wrong(
                    f"{now[0]} jobs came out, {now[1]} finished, and for {STUCK_S:g} s no more; awaited: {what}"
                )
            await asyncio.sleep(look_s)

    def _sound(self) -> None:
        """Raises the consumer's error if the consumer has failed."""
        if self._wrong is not None:
            raise Wrong(self._wrong)
        if self._working is not None and self._working.done():
            working, self._working = self._working, None
            working.result()
            raise Wrong("its consumer ended by itself")


async def _run(what: Awaitable[None]) -> None:
    await what


async def _obey(order: dict[str, Any], client: Client) -> dict[str, object]:
    verb = order.pop("verb")
    began_s = time.monotonic()
    try:
        found = await getattr(client, verb)(**order)
    except Exception as error:  # noqa: BLE001 - told to the parent, which decides
        return {"error": f"{verb}: {_first(error)}"}
    return {"began_s": began_s, "ended_s": time.monotonic(), "found": found}


def _first(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{error}" if isinstance(error, Wrong) else f"{type(error).__name__}: {error}"


async def main() -> None:
    loop = asyncio.get_running_loop()
    orders = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(orders), sys.stdin)
    first = json.loads(await orders.readline())
    site = Site(**first["site"])
    system = load(first["system"])(site)
    client = Client(system, Tally(Path(first["tally"]), places=first["places"], mine=first["mine"]))
    following = asyncio.create_task(orders.readline())
    try:
        while line := await following:
            following = asyncio.create_task(orders.readline())
            work = asyncio.create_task(_obey(json.loads(line), client))
            # The parent sends an order only after the answer to the last order. Therefore, if the read ends before the
            # order is done, the input has ended.
            await asyncio.wait({work, following}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                work.cancel()
                await asyncio.wait({work})
                break
            print(json.dumps(work.result()), flush=True)
    finally:
        with contextlib.suppress(Exception):
            await client.rest()
        await system.close()


if __name__ == "__main__":
    asyncio.run(main())
