"""Continues a move from any state to its end (docs/decisions/0017-moving-slots.md).

Only the states of the catalog and of the two shards decide which step is next. So a move is resumed in the same way as
it is started. Other processes may carry out steps of the same move at the same time, or with a delay. Each of these
processes may stop at any point. This module plans no moves, and does not check that its process leads.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, assert_never

from shard.errors import Misconfigured, ShardUnavailable
from shard.placement import catalog, marks, move_steps, pins
from shard.placement.catalog import Move
from shard.placement.move_steps import Remaining, SlotState
from shard.postgres.pool import Database
from shard.vocabulary import ShardName, Slot

# How many times to try for an exclusive table lock, and the longest pause between two tries. During the pauses, other
# sessions use the table.
_LOCK_TRIES_MAX = 100
_LOCK_PAUSE_S_MAX = 0.5
# How many slots one statement searches for jobs.
_SLOTS_AT_ONCE = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How much load a move may put on its two shards. By default, a move uses one connection for a quarter of the time,
    in steps so short that no other session waits long."""

    # Upper bounds for one chunk. The jobs of a chunk are invisible from the export until the import.
    rows_max: int = 1_000
    bytes_max: int = 4 * 1024 * 1024
    jobs_per_s_max: float = math.inf
    # After each chunk, the move rests `rest` times as long as the chunk took, but at most `rest_s_max`. So the busier
    # the shards are, the longer the move rests.
    rest: float = 3.0
    rest_s_max: float = 5.0
    # Time between two checks whether jobs that could not be exported yet can be exported now.
    poll_s: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How many jobs this process has moved, and how many it found on the source when it last counted them."""

    move: Move
    moved: int
    free: int
    leased: int
    dead: int
    departing: int

    @property
    def waits(self) -> bool:
        """Whether the move waits only for leases to end."""
        return self.leased > 0 and not (self.free or self.dead or self.departing)


class Mover:
    """Carries out the move that has this epoch. `shards` must contain every shard that the move may name. `report` is
    called after each step and chunk."""

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
        # True if perhaps no shard accepts new jobs of the slots, because the source is closed and the target is not the
        # writer yet. Another Mover may have left the move in this state, so the value is True until the first step has
        # read the state.
        self._closed = True
        # Whether this process has deleted the schedules and workflows on the source. At that time, the target has
        # copies of both.
        self._cleared = False
        self._moved = 0
        self._remaining: Sequence[Remaining] = ()

    async def finish(self) -> bool:
        """Carries out the move. Returns True if the move has ended, no matter which process ended it. Returns False if
        this Mover was stopped before that. Raises ShardUnavailable; `finish` may then be called again. Raises
        Misconfigured if an operator must intervene."""
        while self._closed or not self._stopping.is_set():
            if not await self.step():
                return True
        return False

    def stop(self) -> None:
        """Makes `finish` return soon, at a point where the move can be left for any length of time: no chunk is between
        the shards, and every slot has a writer."""
        self._stopping.set()

    async def step(self) -> bool:
        """Takes the next step. Returns False if the move has ended. Raises what `finish` raises."""
        move = next((move for move in await catalog.moves(self._catalog) if move.epoch == self._epoch), None)
        if move is None:
            return False
        source, target = self._shard(move.source), self._shard(move.target)
        self._report_progress(move)
        before = await move_steps.read_slots(source, move.slots)
        on_target = await move_steps.read_slots(target, move.slots)
        on_source = await move_steps.read_slots(source, move.slots)
        contradiction = find_contradiction(move, before, on_target, on_source)
        if contradiction is not None:
            # Another process may have continued the move between the reads.
            if move in await catalog.moves(self._catalog):
                raise Misconfigured(f"{move} cannot go on: {contradiction}")
            return True
        step = next_step(move, on_source, on_target)
        self._closed = step != "jobs"
        match step:
            case "close":
                self._closed = await self._close(move, source, target)
            case "open":
                queues = await move_steps.read_queues(source, move.slots)
                buckets = await move_steps.read_buckets(source, move.slots)
                schedules = await move_steps.read_schedules(source, move.slots)
                workflows = await move_steps.read_workflows(source, move.slots)
                quarantines = await move_steps.read_quarantines(source, move.slots)
                await move_steps.open_slots(
                    target,
                    move.slots,
                    epoch=move.epoch,
                    queues=queues,
                    buckets=buckets,
                    schedules=schedules,
                    workflows=workflows,
                    quarantines=quarantines,
                )
            case "switch":
                await catalog.switch_writer(self._catalog, move)
                self._closed = False
            case "jobs":
                await self._move_jobs(move, source, target, {slot: on_source[slot].chunk for slot in move.slots})
            case _:
                assert_never(step)
        return True

    def _shard(self, name: ShardName) -> Database:
        if name not in self._shards:
            raise Misconfigured(
                f"the catalog moves slots from or to shard {name!r}, which the cluster file does not name; put it back"
            )
        return self._shards[name]

    async def _close(self, move: Move, source: Database, target: Database) -> bool:
        """Closes the source. From then until the target becomes the writer, producers wait. So two things are done
        before the source is closed: the source learns which orgs have slots of their own, and the target creates the
        queues. Creating the queues also shows that the target is reachable. Returns False if the mover was stopped."""
        # No org can be pinned while its hash slot moves, so `org_pins` is complete.
        org_pins = await pins.read_on(self._catalog, move.source)
        if not await self._retry_lock(
            lambda: pins.adopt(source, org_pins), source, f"{move} waits for changes of queues", "queue"
        ):
            return False
        await move_steps.make_queues(target, await move_steps.read_queues(source, move.slots))
        return await self._retry_lock(
            lambda: move_steps.close_slots(source, move.slots, epoch=move.epoch),
            source,
            f"{move} waits for enqueues",
            "owned_slot",
        )

    async def _retry_lock(self, act: Callable[[], Awaitable[bool]], shard: Database, what: str, table: str) -> bool:
        """Repeats `act` until it succeeds. `act` waits only briefly for a table lock. Returns False if the mover was
        stopped."""
        for _ in range(_LOCK_TRIES_MAX):
            if self._stopping.is_set():
                return False
            if await act():
                return True
            await self._pause(random.uniform(0, _LOCK_PAUSE_S_MAX))
        raise ShardUnavailable(
            shard.name,
            f"{what}: {_LOCK_TRIES_MAX} tries to lock table windrow.{table} took longer than 0.1 s; "
            "pg_locks and pg_stat_activity show which session holds a lock on it",
        )

    async def _move_jobs(self, move: Move, source: Database, target: Database, chunks: dict[Slot, int]) -> None:
        """Does the first of four things that is possible: hands over the jobs that are already exported; exports and
        hands over all free jobs (jobs without a valid lease, and dead jobs); ends the move of the slots that are empty;
        waits."""
        if not self._cleared:
            # Delete schedules and workflows only now, after the switch. Before the switch, routers read the schedules
            # and workflows on the source.
            await move_steps.delete_schedules(source, move.slots, epoch=move.epoch)
            await move_steps.delete_workflows(source, move.slots, epoch=move.epoch)
            self._cleared = True
        self._remaining = await move_steps.count_remaining(source, move.slots)
        self._report_progress(move)
        told_of = [row.slot for row in self._remaining if row.arrivals]
        if told_of:
            await move_steps.carry_arrivals(source, target, told_of, epoch=move.epoch)
        departing = [row.slot for row in self._remaining if row.departing]
        free = [row.slot for row in self._remaining if row.free or row.dead]
        # Slots whose arrivals were moved just now do not count as empty, because more arrivals may have come since
        # then.
        empty = set(move.slots).difference(row.slot for row in self._remaining)
        if departing:
            await self._hand_over(move, source, target, departing)
        elif free:
            await self._move_chunks(move, source, target, {slot: chunks[slot] for slot in free})
        elif empty:
            await move_steps.delete_quarantines(source, sorted(empty), epoch=move.epoch)
            # After this step, no process compares the two shards any more. So mark both shards now: the marks will show
            # if one of the shards is restored from an older backup.
            for database in (source, target):
                await marks.mark(database, self._catalog)
            await move_steps.end_arrival(target, sorted(empty), epoch=move.epoch)
            await catalog.finish_move(self._catalog, move, sorted(empty))
        else:
            await self._pause(self._pace.poll_s)

    async def _move_chunks(self, move: Move, source: Database, target: Database, chunks: dict[Slot, int]) -> None:
        """Moves one chunk after another, through the slots in ascending order. May miss some jobs: the next step counts
        the remaining jobs and moves them."""
        slots: list[Slot] = sorted(chunks)
        before = self._moved
        loop = asyncio.get_running_loop()
        while slots and not self._stopping.is_set():
            began = loop.time()
            batch = slots[:_SLOTS_AT_ONCE]
            exported = await move_steps.export_chunk(
                source,
                {slot: chunks[slot] + 1 for slot in batch},
                epoch=move.epoch,
                rows_max=self._pace.rows_max,
                bytes_max=self._pace.bytes_max,
            )
            if not exported:
                slots = slots[len(batch) :]
                continue
            jobs = await self._hand_over(move, source, target, sorted(exported))
            if jobs < sum(exported.values()):
                # The target lost chunks, or another process carries out this move. Compare the states again before more
                # jobs move.
                return
            # The export may have stopped inside the last slot, so continue with the next chunk of this slot.
            last = max(exported)
            chunks[last] += 1
            slots = [slot for slot in slots if slot >= last]
            took_s = loop.time() - began
            rest_s = min(took_s * self._pace.rest, self._pace.rest_s_max)
            await self._pause(max(rest_s, jobs / self._pace.jobs_per_s_max - took_s))
        if self._moved == before:
            # No job was moved: other sessions hold locks on all free jobs.
            await self._pause(self._pace.poll_s)

    async def _pause(self, seconds: float) -> None:
        """Waits for this time, or until the mover is stopped."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stopping.wait()

    async def _hand_over(self, move: Move, source: Database, target: Database, slots: Sequence[Slot]) -> int:
        """Stores the exported jobs of these slots on the target, then deletes, on the source, the jobs that the target
        has. Returns how many jobs were deleted."""
        exported = await move_steps.read_exported(source, slots, epoch=move.epoch)
        chunks = {part.slot: part.chunk for part in exported}
        imported = await move_steps.import_chunk(target, exported, epoch=move.epoch)
        refused = [slot for slot in chunks if slot not in imported]
        if refused:
            # Either this or another process has imported the chunk before, or the move has ended.
            states = await move_steps.read_slots(target, refused)
            imported.update(slot for slot in refused if _has_imported(states.get(slot), move.epoch, chunks[slot]))
        if imported:
            # The process that imported the chunk may have died before it notified routers, so notify again.
            await move_steps.notify_imported(target, [part for part in exported if part.slot in imported])
        jobs = await move_steps.delete_exported(
            source, {slot: chunks[slot] for slot in chunks if slot in imported}, epoch=move.epoch
        )
        self._moved += jobs
        self._report_progress(move)
        return jobs

    def _report_progress(self, move: Move) -> None:
        self._report(
            Progress(
                move=move,
                moved=self._moved,
                free=sum(row.free for row in self._remaining),
                leased=sum(row.leased for row in self._remaining),
                dead=sum(row.dead for row in self._remaining),
                departing=sum(row.departing for row in self._remaining),
            )
        )


def next_step(
    move: Move, source: Mapping[Slot, SlotState], target: Mapping[Slot, SlotState]
) -> Literal["close", "open", "switch", "jobs"]:
    """Returns the next step of the move."""
    if any(_epoch(source, slot) < move.epoch for slot in move.slots):
        return "close"
    if any(_epoch(target, slot) < move.epoch for slot in move.slots):
        return "open"
    return "jobs" if move.switched else "switch"


def find_contradiction(
    move: Move, before: Mapping[Slot, SlotState], target: Mapping[Slot, SlotState], source: Mapping[Slot, SlotState]
) -> str | None:
    """Returns why these states cannot belong to this move, or None if they can. The states must have been read in this
    order: the source's (`before`), the target's, then the source's again."""
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


def _has_imported(state: SlotState | None, epoch: int, chunk: int) -> bool:
    return state is not None and state.epoch == epoch and state.chunk >= chunk
