"""Fires the due schedules of one shard. Any number of routers do this at the same time, and none of them is special.

One transaction locks some due schedules, decides about their instants, stores the runs and their jobs, and advances the
schedules. So a router that dies, or does not hear of its commit, leaves either nothing or everything. Only the shard's
clock counts: the statement that locks the schedules returns the time, and this process's clock is not read (I8).
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from uuid import UUID

from shard.postgres import arrays
from shard.postgres.connection import Connection
from shard.postgres.pool import Database
from shard.queue.store import ID_AGE_DAYS_MAX, Store
from shard.schedule import (
    RUNS_KEPT,
    SPEC_COLUMNS,
    Run,
    RunCause,
    RunOutcome,
    ScheduledRun,
    ScheduleId,
    ScheduleName,
    ScheduleSpec,
    spec_of,
)
from shard.schedules import plan, statements
from shard.schedules.plan import Plan, Present
from shard.vocabulary import JobId, Micros, OrgId, QueueId, QueueName

_log = logging.getLogger(__name__)

# Schedules of one transaction. It holds a connection, and their locks, for about 0.1 s.
BATCH_MAX = 500
# Runs of one transaction. A schedule that catches up may exceed it.
_RUNS_MAX = 2000
# After so many schedules were decided, other tasks get their turn.
_AT_ONCE = 20
# When a schedule is looked at again that could not be decided.
_AGAIN_US = 100_000
_AGAIN_LATER_US = 60_000_000
_DAY_US = 86_400_000_000


class Wake(NamedTuple):
    """When a router must look at the schedules of a shard: the difference of two times of the shard's clock."""

    now: Micros
    # None: not before one is changed.
    at: Micros | None


class Needed(NamedTuple):
    """A job on which a decision depends, and which another shard may have; or which must be cancelled first."""

    org: OrgId
    job: JobId
    cancel: bool


@dataclass(slots=True, kw_only=True)
class Fired:
    """What one transaction has done."""

    # How many schedules it has looked at.
    taken: int = 0
    jobs: int = 0
    queues: set[QueueId] = field(default_factory=set[QueueId])
    needed: list[Needed] = field(default_factory=list[Needed])


class Due(NamedTuple):
    """A schedule that was locked because it is due, as take_due.sql returns it."""

    id: ScheduleId
    org: OrgId
    org_id: int
    name: ScheduleName
    queue: QueueName
    queue_id: QueueId | None
    spec: ScheduleSpec
    next_at: Micros | None
    last_at: Micros | None
    last_job: JobId | None
    buffered: int
    decided: int
    # Whether it counts that the job of the run before is live, and whether it is live on this shard.
    matters: bool
    is_live: bool | None
    now: Micros

    @classmethod
    def from_row(cls, row: Sequence[Any]) -> Due:
        first = 6 + len(SPEC_COLUMNS)
        return cls._make([*row[:6], spec_of(row[6:first]), *row[first:]])


class Firing:
    """The schedules of one shard, as a router fires them. All methods may raise ShardUnavailable."""

    def __init__(self, database: Database, store: Store) -> None:
        self._database = database
        self._store = store

    async def next_wake(self) -> Wake:
        """Returns when the next schedule of this shard must be looked at."""
        ((now, at),) = await self._database.run(statements.FIND_WAKE, {})
        return Wake(now, at)

    async def fire(
        self,
        *,
        is_whole: Callable[[OrgId], bool] = lambda _: True,
        known: Mapping[JobId, bool] | None = None,
    ) -> Fired:
        """Fires some of the schedules that are due, those first that have waited longest.

        `is_whole` says whether this shard has all live jobs of an org. If not, and if it counts whether a job is live
        that this shard does not have, the job is `needed`, and its schedule waits until it is among the `known` ones:
        whether they are live, or were cancelled. Raises ClockSetBack."""
        self._store.clock.check()
        fired = Fired()
        async with self._database.transaction() as connection:
            found = [Due.from_row(row) for row in await connection.run(statements.TAKE_DUE, {"rows": BATCH_MAX})]
            writer = _Writer()
            for number, schedule in enumerate(found, start=1):
                if number % _AT_ONCE == 0:
                    await asyncio.sleep(0)
                if len(writer.runs) >= _RUNS_MAX:
                    break
                fired.taken += 1
                _decide(schedule, writer, fired, is_whole, known or {})
            await writer.write(connection, fired)
        if fired.jobs:
            self._store.runs_stored(fired.queues)
        return fired


def _decide(
    schedule: Due, writer: _Writer, fired: Fired, is_whole: Callable[[OrgId], bool], known: Mapping[JobId, bool]
) -> None:
    if schedule.queue_id is None:
        _log.error("schedule %r of org %r: its queue %r is gone", schedule.name, schedule.org, schedule.queue)
        writer.postpone(schedule, _AGAIN_LATER_US)
        return
    running = schedule.matters and bool(schedule.is_live)
    if schedule.matters and schedule.last_job is not None and not schedule.is_live and not is_whole(schedule.org):
        if schedule.last_job not in known:
            fired.needed.append(Needed(schedule.org, schedule.last_job, cancel=False))
            writer.postpone(schedule, _AGAIN_US)
            return
        running = known[schedule.last_job]
    present = Present(now=schedule.now, next_at=schedule.next_at, running=running, buffered=schedule.buffered)
    decided = plan.plan(schedule.id, schedule.spec, present)
    if decided.cancels and schedule.last_job is not None:
        fired.needed.append(Needed(schedule.org, schedule.last_job, cancel=True))
        writer.postpone(schedule, _AGAIN_US)
        return
    writer.add(schedule, decided)


def job_id_of(schedule: ScheduleId, at: Micros, now: Micros) -> JobId:
    """Returns the id of a run's job. Its time is that of the firing, because the time in an id counts for the dedup
    horizon; the run itself is once by its row."""
    digest = int.from_bytes(hashlib.blake2b(f"{schedule} {at}".encode(), digest_size=10).digest())
    number = now // 1000 << 80 | 0x7 << 76 | (digest >> 62 & 0xFFF) << 64 | 0b10 << 62 | digest & (1 << 62) - 1
    return JobId(str(UUID(int=number)))


class _Writer:
    """Collects what one transaction stores."""

    def __init__(self) -> None:
        self.runs: list[tuple[Due, Run, Micros | None]] = []
        self._advanced: list[tuple[Due, Plan, Micros | None, int]] = []

    def postpone(self, schedule: Due, by_us: int) -> None:
        """Looks at the schedule again later."""
        again = Plan(next_at=schedule.next_at, wake_at=Micros(schedule.now + by_us), buffered=schedule.buffered)
        self._advanced.append((schedule, again, None, 0))

    def add(self, schedule: Due, decided: Plan) -> None:
        previous = schedule.last_at
        for run in decided.runs:
            self.runs.append((schedule, run, previous))
            if run.outcome is RunOutcome.STORED:
                previous = run.at
        self._advanced.append((schedule, decided, previous, len(decided.runs) + decided.promotes))

    async def write(self, connection: Connection, fired: Fired) -> None:
        if not self._advanced:
            return
        await self._promote(connection)
        rows = await connection.run(statements.STORE_RUNS, self._parameters())
        ((queues, fired.jobs),) = rows
        fired.queues.update(queues or ())
        # Not each time: a schedule that is due often would look for its oldest run for each new one.
        full = [
            schedule.id
            for schedule, _, _, decided in self._advanced
            if schedule.decided // RUNS_KEPT < (schedule.decided + decided) // RUNS_KEPT
        ]
        await forget_runs(connection, full)

    async def _promote(self, connection: Connection) -> None:
        """Finds the runs that have waited and are stored now."""
        waiting = {schedule.id: schedule for schedule, decided, _, _ in self._advanced if decided.promotes}
        if not waiting:
            return
        rows = await connection.run(statements.FIND_BUFFERED, {"schedules": arrays.plain(waiting)})
        found = {ScheduleId(name): Run(at, RunCause(cause), RunOutcome.STORED) for name, at, cause in rows}
        for place, (schedule, decided, last_at, count) in enumerate(self._advanced):
            run = found.get(schedule.id)
            if run is not None:
                self.runs.append((schedule, run, schedule.last_at))
                self._advanced[place] = (schedule, decided, max(run.at, last_at or run.at), count)
            elif schedule.id in waiting:
                # The count was wrong: no run waits.
                decided.buffered = 0

    def _parameters(self) -> dict[str, object]:
        runs, advanced = self.runs, self._advanced
        ids = [
            job_id_of(schedule.id, run.at, schedule.now) if run.outcome is RunOutcome.STORED else None
            for schedule, run, _ in runs
        ]
        told = [ScheduledRun(schedule.name, run.at, previous, run.cause).to_json() for schedule, run, previous in runs]
        return {
            **run_columns(
                [(schedule.id, run._replace(job_id=job)) for (schedule, run, _), job in zip(runs, ids, strict=True)]
            ),
            "requests": "{}",
            "queue_ids": arrays.numbers([schedule.queue_id or 0 for schedule, _, _ in runs]),
            "scheduled_runs": arrays.texts(told),
            "schedules": arrays.plain(schedule.id for schedule, _, _, _ in advanced),
            "nexts_us": nullable(decided.next_at for _, decided, _, _ in advanced),
            "wakes_us": nullable(decided.wake_at for _, decided, _, _ in advanced),
            "lasts_us": nullable(last_at for _, _, last_at, _ in advanced),
            "buffered": arrays.numbers(decided.buffered for _, decided, _, _ in advanced),
            "decided": arrays.numbers(count for _, _, _, count in advanced),
        }


def run_columns(runs: Sequence[tuple[ScheduleId, Run]]) -> dict[str, object]:
    """Returns runs as parameters of store_runs.sql."""
    skipped = {at: run.skipped_for.value for at, (_, run) in enumerate(runs) if run.skipped_for is not None}
    return {
        "run_schedules": arrays.plain(schedule for schedule, _ in runs),
        "ats_us": arrays.numbers(run.at for _, run in runs),
        "throughs_us": nullable(run.through for _, run in runs),
        "causes": arrays.names(run.cause.value for _, run in runs),
        "outcomes": arrays.names(run.outcome.value for _, run in runs),
        "skipped_for": arrays.sparse_texts(skipped, len(runs)),
        "job_ids": nullable(run.job_id for _, run in runs),
    }


def nullable(values: Iterable[object]) -> str:
    """Encodes numbers or UUIDs, with None as NULL."""
    return "{" + ",".join("NULL" if value is None else str(value) for value in values) + "}"


async def forget_runs(connection: Connection, schedules: Sequence[ScheduleId]) -> None:
    """Forgets the older runs of these schedules."""
    if schedules:
        parameters = {
            "schedules": arrays.plain(schedules),
            "kept": RUNS_KEPT,
            # For as long as an id counts.
            "backfill_us": round(ID_AGE_DAYS_MAX * _DAY_US),
        }
        await connection.run(statements.FORGET_RUNS, parameters)
