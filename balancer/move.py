"""Takes a move from wherever it is to its end (docs/decisions/0017-moving-slots.md).

What is due next is read from the catalog and the two shards, and from nothing else: to begin and to resume are the
same. Others may do so too, at the same time or late, and stop anywhere. Plans no moves, and takes no lock.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, assert_never

from shard import catalog, history, moving, pinning
from shard.catalog import Move
from shard.database import Database
from shard.errors import Misconfigured, ShardUnavailable
from shard.moving import Left, SlotState
from shard.vocabulary import ShardName, Slot

# How often a table is tried to be had alone before that is given up, and the longest pause between two tries: others go
# on meanwhile.
_LOCK_TRIES_MAX = 100
_LOCK_PAUSE_S_MAX = 0.5
# Of how many slots one statement looks for jobs.
_SLOTS_AT_ONCE = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """What a move may ask of two shards. Defaults: a quarter of one connection's time, in steps that hold up nobody for
    long."""

    # What a chunk may hold. Its jobs are invisible from depart to take.
    rows_max: int = 1_000
    bytes_max: int = 4 * 1024 * 1024
    jobs_per_s_max: float = math.inf
    # Each chunk is followed by a rest so many times as long as it took: the busier the shards are, the longer.
    rest: float = 3.0
    rest_s_max: float = 5.0
    # Between two looks at jobs that cannot leave yet.
    look_s: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a move is: what this run has moved, and what it found on the source when it last counted."""

    move: Move
    moved: int
    free: int
    leased: int
    dead: int
    departing: int

    @property
    def waits(self) -> bool:
        """For leases to end, and for nothing else."""
        return self.leased > 0 and not (self.free or self.dead or self.departing)


class Mover:
    """Of the move that has this epoch. `shards`: all that it may name. `report` hears of each step and chunk."""

    def __init__(
        self,
        catalog_database: Database,
        shards: Mapping[ShardName, Database],
        epoch: int,
        *,
        pace: Pace,
        report: Callable[[Progress], None],
    ) -> None:
        self._catalog = catalog_database
        self._shards = shards
        self._epoch = epoch
        self._pace = pace
        self._report = report
        self._stopping = asyncio.Event()
        # The source is closed, and nobody takes the slots' jobs until they are switched.
        self._closed = False
        # For reports only.
        self._moved = 0
        self._left: Sequence[Left] = ()

    async def finish(self) -> bool:
        """Returns once the move has ended, by whomever; False: it was stopped before. Raises ShardUnavailable, after
        which it may be called again; Misconfigured, where an operator must look."""
        while self._closed or not self._stopping.is_set():
            if not await self.step():
                return True
        return False

    def stop(self) -> None:
        """Has `finish` return soon, at a moment that harms nobody however long the rest takes to come: no chunk is on
        its way, and no slot is without a writer."""
        self._stopping.set()

    async def step(self) -> bool:
        """Does what is due next; False if the move has ended. Raises what `finish` does."""
        move = next((move for move in await catalog.moves(self._catalog) if move.epoch == self._epoch), None)
        if move is None:
            return False
        source, target = self._shard(move.source), self._shard(move.target)
        self._tell(move)
        before = await moving.read_slots(source, move.slots)
        there = await moving.read_slots(target, move.slots)
        here = await moving.read_slots(source, move.slots)
        wrong = what_is_wrong(move, before, there, here)
        if wrong is not None:
            # Unless it has gone on while we looked.
            if move in await catalog.moves(self._catalog):
                raise Misconfigured(f"{move} cannot go on: {wrong}")
            return True
        todo = due(move, here, there)
        match todo:
            case "close":
                self._closed = await self._close(move, source, target)
            case "open":
                self._closed = True
                queues = await moving.read_queues(source, move.slots)
                await moving.open_slots(target, move.slots, epoch=move.epoch, queues=queues)
            case "switch":
                await catalog.switch(self._catalog, move)
                self._closed = False
            case "jobs":
                await self._move_jobs(move, source, target, {slot: here[slot].chunk for slot in move.slots})
            case _:
                assert_never(todo)
        return True

    def _shard(self, name: ShardName) -> Database:
        if name not in self._shards:
            raise Misconfigured(
                f"the catalog moves slots from or to shard {name!r}, which the cluster file does not name; put it back"
            )
        return self._shards[name]

    async def _close(self, move: Move, source: Database, target: Database) -> bool:
        """When the source knows which orgs have slots of their own, and the target has shown that it is there, and
        knows the queues: producers wait from here to the switch. False: it was stopped."""
        # None is pinned there while a slot of its hash moves, so that what is read now is all.
        pins = await pinning.read_on(self._catalog, move.source)
        if not await self._insist(
            lambda: pinning.settle(source, pins), source, f"{move} waits there for queues", "queue"
        ):
            return False
        await moving.make_queues(target, await moving.read_queues(source, move.slots))
        return await self._insist(
            lambda: moving.close(source, move.slots, epoch=move.epoch),
            source,
            f"{move} waits there for enqueues",
            "owned_slot",
        )

    async def _insist(self, act: Callable[[], Awaitable[bool]], shard: Database, what: str, table: str) -> bool:
        """Does what needs a table for itself, in a moment when nobody is in its way for long. False: it was stopped."""
        for _ in range(_LOCK_TRIES_MAX):
            if self._stopping.is_set():
                return False
            if await act():
                return True
            await self._pause(random.uniform(0, _LOCK_PAUSE_S_MAX))
        raise ShardUnavailable(
            shard.name,
            f"{what} to end: {_LOCK_TRIES_MAX} times one was under way for 0.1 s or more; "
            f"pg_locks and pg_stat_activity tell who holds a lock on windrow.{table}",
        )

    async def _move_jobs(self, move: Move, source: Database, target: Database, chunks: dict[Slot, int]) -> None:
        """Moves all that may leave now; if there is nothing, puts slots to rest that are empty; else waits."""
        self._left = await moving.count_left(source, move.slots)
        self._tell(move)
        departing = [left.slot for left in self._left if left.departing]
        free = [left.slot for left in self._left if left.free or left.dead]
        empty = set(move.slots).difference(left.slot for left in self._left)
        if departing:
            await self._hand_over(move, source, target, departing)
        elif free:
            await self._carry(move, source, target, {slot: chunks[slot] for slot in free})
        elif empty:
            # From then on nobody compares the two. A backup of either that is older than this is noticed by the marks.
            for database in (source, target):
                await history.mark(database, self._catalog)
            await catalog.leave(self._catalog, move, sorted(empty))
        else:
            await self._pause(self._pace.look_s)

    async def _carry(self, move: Move, source: Database, target: Database, chunks: dict[Slot, int]) -> None:
        """One chunk after another, through the slots in order. What it misses is found when all are counted again."""
        rest: list[Slot] = sorted(chunks)
        before = self._moved
        loop = asyncio.get_running_loop()
        while rest and not self._stopping.is_set():
            began = loop.time()
            some = rest[:_SLOTS_AT_ONCE]
            departed = await moving.depart(
                source,
                {slot: chunks[slot] + 1 for slot in some},
                epoch=move.epoch,
                rows_max=self._pace.rows_max,
                bytes_max=self._pace.bytes_max,
            )
            if not departed:
                rest = rest[len(some) :]
                continue
            jobs = await self._hand_over(move, source, target, sorted(departed))
            if jobs < sum(departed.values()):
                # The target has lost chunks, or somebody else works here: that is to be looked at first.
                return
            # The last one may have more.
            last = max(departed)
            chunks[last] += 1
            rest = [slot for slot in rest if slot >= last]
            took_s = loop.time() - began
            rest_s = min(took_s * self._pace.rest, self._pace.rest_s_max)
            await self._pause(max(rest_s, jobs / self._pace.jobs_per_s_max - took_s))
        if self._moved == before:
            # Somebody has all of them locked.
            await self._pause(self._pace.look_s)

    async def _pause(self, seconds: float) -> None:
        """Or until it is stopped."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stopping.wait()

    async def _hand_over(self, move: Move, source: Database, target: Database, slots: Sequence[Slot]) -> int:
        """Stores on the target what has departed from these slots, then deletes it on the source: only what the target
        has. Answers how many jobs that were."""
        departed = await moving.read_departing(source, slots, epoch=move.epoch)
        chunks = {part.slot: part.chunk for part in departed}
        taken = await moving.take(target, departed, epoch=move.epoch)
        others = [slot for slot in chunks if slot not in taken]
        if others:
            # Taken before, by us or by somebody else; or this move is over.
            states = await moving.read_slots(target, others)
            taken.update(slot for slot in others if _has(states.get(slot), move.epoch, chunks[slot]))
        if taken:
            # Whoever has taken it may have died before he told of it.
            await moving.tell_arrivals(target, [part for part in departed if part.slot in taken])
        jobs = await moving.forget(source, {slot: chunks[slot] for slot in chunks if slot in taken}, epoch=move.epoch)
        self._moved += jobs
        self._tell(move)
        return jobs

    def _tell(self, move: Move) -> None:
        self._report(
            Progress(
                move=move,
                moved=self._moved,
                free=sum(left.free for left in self._left),
                leased=sum(left.leased for left in self._left),
                dead=sum(left.dead for left in self._left),
                departing=sum(left.departing for left in self._left),
            )
        )


def due(
    move: Move, source: Mapping[Slot, SlotState], target: Mapping[Slot, SlotState]
) -> Literal["close", "open", "switch", "jobs"]:
    """What is to be done next."""
    if any(_epoch(source, slot) < move.epoch for slot in move.slots):
        return "close"
    if any(_epoch(target, slot) < move.epoch for slot in move.slots):
        return "open"
    return "jobs" if move.switched else "switch"


def what_is_wrong(
    move: Move, before: Mapping[Slot, SlotState], target: Mapping[Slot, SlotState], source: Mapping[Slot, SlotState]
) -> str | None:
    """Why these states cannot be of this move: the source's, the target's, the source's again, in this order read."""
    for slot in move.slots:
        for at, states in ((move.source, source), (move.target, target)):
            if _epoch(states, slot) > move.epoch:
                return (
                    f"shard {at!r} knows of epoch {_epoch(states, slot)} for slot {slot}, later than the catalog does. "
                    "Was the catalog restored from a backup? Find out which shard has the slot's jobs before anything "
                    "else moves"
                )
        if slot in source and source[slot].state == "draining" and source[slot].epoch < move.epoch:
            return (
                f"shard {move.source!r} has given slot {slot} away in epoch {source[slot].epoch}. Was the catalog "
                "restored from a backup? Find out which shard has the slot's jobs before anything else moves"
            )
        if _epoch(source, slot) == move.epoch == _epoch(target, slot):
            if _epoch(before, slot) == move.epoch and before[slot].chunk > target[slot].chunk + 1:
                return _lost(move.target, slot, target[slot].chunk, move.source, before[slot].chunk)
            if target[slot].chunk > source[slot].chunk:
                return _lost(move.source, slot, source[slot].chunk, move.target, target[slot].chunk)
    return None


def _lost(shard: ShardName, slot: Slot, chunk: int, other: ShardName, further: int) -> str:
    return (
        f"shard {shard!r} is at chunk {chunk} of slot {slot}, and shard {other!r} at {further}. Was {shard!r} restored "
        "from a backup? Compare the jobs of both before anything else moves"
    )


def _epoch(states: Mapping[Slot, SlotState], slot: Slot) -> int:
    return states[slot].epoch if slot in states else 0


def _has(state: SlotState | None, epoch: int, chunk: int) -> bool:
    return state is not None and state.epoch == epoch and state.chunk >= chunk
