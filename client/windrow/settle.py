"""How a worker says what became of its jobs: acks, nacks and releases, in batches that cost no delay.

One call of a kind is under way at a time; what is decided meanwhile goes with the next. An idle worker's ack leaves at
once, a busy worker's acks leave by the hundred.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from windrow.client import JOBS_MAX, Client
from windrow.errors import TRANSIENT, InvalidRequest
from windrow.jobs import Answer, answers
from windrow.leases import Held, Leases, Reach, log
from windrow.payloads import duration, error_text
from windrow.v1 import queue_pb2

# Results may have 64 KiB each: a call stays well below the largest message.
_BYTES_MAX = 8 * 1024 * 1024
_PAUSE_MAX_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """Finished, with a result of at most 64 KiB."""

    result: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """Given back with an error. `delay_s` None: as the retry policy says."""

    error: str
    delay_s: float | None = None
    kill: bool = False


Fate = Done | Failed
_Entry = TypeVar("_Entry")


class _Lane(Generic[_Entry]):
    """The calls of one kind."""

    def __init__(
        self,
        verb: str,
        send: Callable[[Sequence[_Entry]], Awaitable[Sequence[int]]],
        leases: Leases,
        reach: Reach,
    ) -> None:
        self._verb = verb
        self._send = send
        self._leases = leases
        self._reach = reach
        self._waiting: list[tuple[Held, _Entry, int]] = []
        self._some = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self.idle = asyncio.Event()
        self.idle.set()

    async def put(self, held: Held, entry: _Entry, size: int = 0) -> None:
        """Returns at once, unless more than a call's worth is waiting: handlers go no faster than the router."""
        self.put_now(held, entry, size)
        while len(self._waiting) > JOBS_MAX:
            self._room.clear()
            await self._room.wait()

    def put_now(self, held: Held, entry: _Entry, size: int = 0) -> None:
        held.settling = True
        self._waiting.append((held, entry, size))
        self._some.set()
        self.idle.clear()

    async def run(self) -> None:
        while True:
            await self._some.wait()
            while self._waiting:
                await self._deliver(self._take())
            self._some.clear()
            self.idle.set()

    def _take(self) -> list[tuple[Held, _Entry]]:
        count = size = 0
        for _, _, entry_size in self._waiting[:JOBS_MAX]:
            size += entry_size
            if count and size > _BYTES_MAX:
                break
            count += 1
        taken = [(held, entry) for held, entry, _ in self._waiting[:count]]
        del self._waiting[:count]
        self._room.set()
        return taken

    async def _deliver(self, batch: list[tuple[Held, _Entry]]) -> None:
        while batch:
            try:
                told = answers(await self._send([entry for _, entry in batch]))
            except InvalidRequest as error:
                if len(batch) > 1:
                    # One bad entry must not hold up the others.
                    for one in batch:
                        await self._deliver([one])
                    return
                held, _ = batch[0]
                log.error("job %s: its %s was refused; its lease is left to end: %s", held.job.id, self._verb, error)
                self._leases.drop(held)
                return
            except TRANSIENT as error:
                self._reach.failed(error)
                batch = self._without_ended(batch)
                await asyncio.sleep(random.uniform(0, _PAUSE_MAX_S) if error.retry_after is None else error.retry_after)
                continue
            self._reach.answered()
            for (held, _), answer in zip(batch, told, strict=True):
                self._leases.drop(held)
                if answer is not Answer.OK:
                    log.warning(
                        "job %s: its %s was answered %s: the lease had ended", held.job.id, self._verb, answer.name
                    )
            return

    def _without_ended(self, batch: list[tuple[Held, _Entry]]) -> list[tuple[Held, _Entry]]:
        for held, _ in batch:
            if self._leases.ended(held):
                self._leases.drop(held)
                log.warning("job %s: its lease ended before its %s reached the router", held.job.id, self._verb)
        return [(held, entry) for held, entry in batch if not self._leases.ended(held)]


class Settlements:
    """The fates of a worker's jobs, on their way to the router."""

    def __init__(self, client: Client, leases: Leases, reach: Reach) -> None:
        org, calls = client.org, client.calls

        async def ack(entries: Sequence[queue_pb2.Ack]) -> Sequence[int]:
            return (await calls.call(lambda stub: stub.Ack, queue_pb2.AckRequest(org=org, acks=entries))).answers

        async def nack(entries: Sequence[queue_pb2.Nack]) -> Sequence[int]:
            return (await calls.call(lambda stub: stub.Nack, queue_pb2.NackRequest(org=org, nacks=entries))).answers

        async def release(entries: Sequence[bytes]) -> Sequence[int]:
            request = queue_pb2.ReleaseRequest(org=org, leases=entries)
            return (await calls.call(lambda stub: stub.Release, request)).answers

        self._acks = _Lane("ack", ack, leases, reach)
        self._nacks = _Lane("nack", nack, leases, reach)
        self._releases = _Lane("release", release, leases, reach)

    async def settle(self, held: Held, fate: Fate) -> None:
        lease = held.job.lease
        match fate:
            case Done(result=result):
                await self._acks.put(held, queue_pb2.Ack(lease=lease, result=result), len(result))
            case Failed(error=error, delay_s=delay_s, kill=kill):
                nack = queue_pb2.Nack(lease=lease, error=error_text(error))
                if kill:
                    nack.kill = True
                elif delay_s is not None:
                    nack.delay.CopyFrom(duration(delay_s))
                await self._nacks.put(held, nack, len(nack.error))

    def give_back(self, held: Held) -> None:
        """Releases the job. Never waits: this is for the way out."""
        self._releases.put_now(held, held.job.lease)

    def runs(self) -> list[Callable[[], Coroutine[None, None, None]]]:
        """What has to run for anything to be sent."""
        return [self._acks.run, self._nacks.run, self._releases.run]

    async def flushed(self) -> None:
        """Returns when nothing waits or is under way."""
        for lane in (self._acks, self._nacks, self._releases):
            await lane.idle.wait()
