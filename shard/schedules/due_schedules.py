"""Fires the due schedules of one shard. Any number of routers do this at the same time, without a leader.

One transaction locks some due schedules, decides about their instants, stores the runs and their jobs, and advances the
schedules. So if a router dies, or does not learn whether its commit succeeded, either nothing or everything was done.
Only the shard's clock is used (invariant I8): the statement that locks the schedules returns the time, and this
process's clock is not read.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from shard.postgres import arrays
from shard.postgres.connection import Connection
from shard.postgres.pool import Database
from shard.queue.store import Store
from shard.schedule import (
    RUNS_KEPT,
    SPEC_COLUMNS,
    Overlap,
    Run,
    RunCause,
    RunOutcome,
    ScheduleId,
    ScheduleName,
    ScheduleSpec,
    spec_of,
)
from shard.schedules import plan, statements
from shard.schedules.plan import Plan, Present
from shard.schedules.run_writer import Advance, NewRun, Stored, advance, forget_runs, store_runs
from shard.vocabulary import JobId, Micros, OrgId, QueueId, QueueName

_log = logging.getLogger(__name__)

# Upper bound for the schedules of one transaction, which holds a connection and the locks of the schedules for about
# 0.1 s.
BATCH_MAX = 500
# Upper bound for the runs of one transaction. A schedule that catches up may exceed this number.
_RUNS_MAX = 2000
# After this many schedules were decided, other tasks get their turn.
_AT_ONCE = 5
# If a schedule cannot be decided now, the router tries again after one of these times: after _AGAIN_US if the decision
# needs the state of a job, and after _AGAIN_LATER_US if the decision failed.
_AGAIN_US = 100_000
_AGAIN_LATER_US = 60_000_000


class Wake(NamedTuple):
    """The time at which a router must look at the schedules of a shard. The router waits for the difference of the two
    times, which both come from the shard's clock."""

    now: Micros
    # The time at which the router must look. None: it need not look until a schedule is changed.
    at: Micros | None


class Needed(NamedTuple):
    """A job on which a decision depends. If `cancel` is true, the job must be cancelled before the decision. If not,
    another shard may have the job."""

    org: OrgId
    job: JobId
    cancel: bool


@dataclass(slots=True, kw_only=True)
class Fired:
    """What one transaction has done."""

    # How many schedules the transaction has looked at.
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
    has_queue: bool
    spec: ScheduleSpec
    next_at: Micros | None
    last_at: Micros | None
    last_job: JobId | None
    buffered: int
    decided: int
    # Whether the decision depends on the job of the previous run, and whether that job is live on this shard.
    matters: bool
    is_live: bool | None
    now: Micros

    @classmethod
    def from_row(cls, row: Sequence[Any]) -> Due:
        first = 6 + len(SPEC_COLUMNS)
        return cls._make([*row[:6], spec_of(row[6:first]), *row[first:]])


class DueSchedules:
    """The schedules of one shard that are due, and the time at which the next schedule is due. All methods may raise
    ShardUnavailable."""

    def __init__(self, database: Database, store: Store) -> None:
        self._database = database
        self._store = store

    async def next_wake(self) -> Wake:
        """Returns the time at which a router must next look at the schedules of this shard."""
        ((now, at),) = await self._database.run(statements.FIND_WAKE, {})
        return Wake(now, at)

    async def fire(
        self,
        *,
        is_whole: Callable[[OrgId], bool] = lambda _: True,
        known: Mapping[JobId, bool] | None = None,
    ) -> Fired:
        """Fires some of the schedules that are due. The schedules that have waited for the longest time come first.

        `is_whole` returns whether this shard has all live jobs of an org. If the shard does not have all of them, a job
        that is not live on this shard may be live on another shard, and a decision may depend on such a job. Then the
        job is returned in `Fired.needed`, and its schedule waits until `known` contains the job. The values of `known`
        say whether a job is live. Raises ClockSetBack."""
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
                try:
                    _decide(schedule, writer, fired, is_whole, known or {})
                except Exception:  # noqa: BLE001 - one schedule, such as one of a zone that is gone, must not hold up all
                    _log.exception("schedule %r of org %r cannot be decided", schedule.name, schedule.org)
                    writer.postpone(schedule, _AGAIN_LATER_US)
            fired.jobs, fired.queues = await writer.write(connection)
        if fired.jobs:
            self._store.jobs_stored(fired.queues)
        return fired


def _decide(
    schedule: Due, writer: _Writer, fired: Fired, is_whole: Callable[[OrgId], bool], known: Mapping[JobId, bool]
) -> None:
    if not schedule.has_queue:
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


class _Writer:
    """Collects what one transaction stores."""

    def __init__(self) -> None:
        self.runs: list[NewRun] = []
        self._advances: dict[ScheduleId, Advance] = {}
        # The schedules for which a buffered run is stored now.
        self._promoted: dict[ScheduleId, Due] = {}
        # The schedules whose older runs are to be forgotten.
        self._full: list[ScheduleId] = []

    def postpone(self, schedule: Due, by_us: int) -> None:
        """Leaves the schedule undecided, so that a router looks at it again after this time."""
        wake_at = Micros(schedule.now + by_us)
        self._advances[schedule.id] = Advance(schedule.id, schedule.next_at, wake_at, None, None, schedule.buffered, 0)

    def add(self, schedule: Due, decided: Plan) -> None:
        previous, latest = schedule.last_at, None
        for run in decided.runs:
            self.runs.append(_new(schedule, run, previous))
            if run.outcome is RunOutcome.STORED:
                previous = latest = run.at
        if decided.promotes:
            self._promoted[schedule.id] = schedule
        count = len(decided.runs) + decided.promotes
        # With ALLOW, new runs are stored although buffered runs wait. The buffered runs must continue to wait for the
        # same job as before. If they waited for the jobs of the new runs, they might wait for ever, because one of the
        # new jobs might always be live.
        run_at = None if schedule.buffered and schedule.spec.overlap is Overlap.ALLOW else latest
        self._advances[schedule.id] = Advance(
            schedule.id, decided.next_at, decided.wake_at, latest, run_at, decided.buffered, count
        )
        # Forget older runs only once in RUNS_KEPT runs. Otherwise a schedule that is due often would need a search for
        # older runs at each new run.
        if schedule.decided // RUNS_KEPT < (schedule.decided + count) // RUNS_KEPT:
            self._full.append(schedule.id)

    async def write(self, connection: Connection) -> Stored:
        """Stores everything that was collected."""
        await self._promote(connection)
        stored = await store_runs(connection, self.runs)
        await advance(connection, list(self._advances.values()))
        await forget_runs(connection, self._full)
        return stored

    async def _promote(self, connection: Connection) -> None:
        """Adds the buffered runs that are stored now: the first buffered run of each schedule in `_promoted`."""
        if not self._promoted:
            return
        rows = await connection.run(statements.FIND_BUFFERED, {"schedules": arrays.plain(self._promoted)})
        # A backfill may have buffered an instant that this firing has just decided too. One statement cannot store an
        # instant twice, so leave out the new decision. Keep it only if it is a skip of several instants, because
        # `store_runs` then records the skip at a later one of these instants.
        promoted = {(name, at) for name, at, _ in rows}
        self.runs = [new for new in self.runs if (new.schedule, new.run.at) not in promoted or new.run.through]
        for name, at, cause in rows:
            schedule = self._promoted.pop(name)
            self.runs.append(_new(schedule, Run(at, RunCause(cause), RunOutcome.STORED), schedule.last_at))
            change = self._advances[schedule.id]._replace(run_at=at)
            # If a run of the calendar is stored in the same transaction, it is later than this run, and has set
            # `last_at`. The run of a backfill is not a run of the calendar, so it does not set `last_at`.
            if change.last_at is None and cause != RunCause.BACKFILL.value:
                change = change._replace(last_at=at)
            self._advances[schedule.id] = change


def _new(schedule: Due, run: Run, previous: Micros | None) -> NewRun:
    return NewRun(schedule.id, schedule.name, schedule.spec.timing, run, previous, schedule.now)
