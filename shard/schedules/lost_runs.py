"""Skips the runs that a shard may have stored before it lost history (docs/decisions/0066-recovering-one-shard.md).

Nobody knows which runs the shard had stored. So each undecided instant until now is recorded as skipped (invariant
I10). An operator who knows that the run of an instant was not stored can backfill it. Until all of these instants are
recorded, routers must refuse the shard.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

from shard.postgres import arrays
from shard.postgres.connection import Connection
from shard.postgres.pool import Database
from shard.schedule import SPEC_COLUMNS, Run, ScheduleId, ScheduleName, ScheduleSpec, SkipReason, spec_of
from shard.schedules import calendar, plan, statements
from shard.schedules.run_writer import Advance, NewRun, advance, store_runs
from shard.vocabulary import Micros, OrgId

_log = logging.getLogger(__name__)

# Upper bound for the schedules of one transaction.
_BATCH_MAX = 500
_FIRST = ScheduleId("00000000-0000-0000-0000-000000000000")


class Overdue(NamedTuple):
    """A schedule with instants that are not decided, or with runs that wait, as take_overdue.sql returns it."""

    id: ScheduleId
    org: OrgId
    name: ScheduleName
    spec: ScheduleSpec
    next_at: Micros | None
    buffered: int
    now: Micros


class Lost(NamedTuple):
    """A schedule of a shard that lost history, and the runs that `skip` would skip."""

    id: ScheduleId
    org: OrgId
    name: ScheduleName
    paused: bool
    # The first instant that was not decided at the point of recovery.
    next_at: Micros | None
    # The instants that would be skipped: `first` to `through`, both included. If `through` is None, only `first` would
    # be skipped. `buffered`: how many buffered runs would be skipped.
    first: Micros | None
    through: Micros | None
    buffered: int


class Skipped(NamedTuple):
    """How many schedules `skip` has decided, and how many of their buffered runs it has skipped."""

    schedules: int
    buffered: int


class _Decision(NamedTuple):
    """The decision about a schedule: the run that records the schedule's past instants as skipped, the first instant
    after those, and the time at which a router must look at the schedule again."""

    run: Run | None
    next_at: Micros | None
    wake_at: Micros | None


async def preview(database: Database, behind: Lost | None) -> list[Lost]:
    """Returns a page of the schedules of a shard that lost history: the schedules after `behind`. After the last page,
    returns an empty page. Raises ShardUnavailable."""
    parameters = {"behind": _FIRST if behind is None else behind.id, "rows": _BATCH_MAX}
    return [_lost(row) for row in await database.run(statements.SCAN_SCHEDULES, parameters)]


def _lost(row: Sequence[Any]) -> Lost:
    one, paused = _overdue(row[:-1]), row[-1]
    decided = None if paused else _decide(one)
    run = None if decided is None else decided.run
    return Lost(
        id=one.id,
        org=one.org,
        name=one.name,
        paused=paused,
        next_at=one.next_at,
        first=None if run is None else run.at,
        through=None if run is None else run.through,
        buffered=0 if paused else one.buffered,
    )


async def skip(database: Database) -> Skipped:
    """Skips all instants until now of the schedules that are not paused, and the buffered runs of these schedules. May
    be repeated. Raises ShardUnavailable."""
    schedules = buffered = 0
    behind = _FIRST
    while True:
        async with database.transaction() as connection:
            rows = await connection.run(statements.TAKE_OVERDUE, {"behind": behind, "rows": _BATCH_MAX})
            found = [_overdue(row) for row in rows]
            skipped = await _skip(connection, found)
        schedules += skipped.schedules
        buffered += skipped.buffered
        if len(found) < _BATCH_MAX:
            return Skipped(schedules, buffered)
        behind = found[-1].id


async def _skip(connection: Connection, found: list[Overdue]) -> Skipped:
    runs: list[NewRun] = []
    advances: list[Advance] = []
    for one in found:
        decided = _decide(one)
        if decided is None:
            continue
        if decided.run is not None:
            runs.append(_new(one, decided.run))
        advances.append(Advance(one.id, decided.next_at, decided.wake_at, None, None, 0, int(decided.run is not None)))
    if not advances:
        return Skipped(0, 0)
    await store_runs(connection, runs)
    schedules = arrays.plain(one.schedule for one in advances)
    ((buffered,),) = await connection.run(statements.SKIP_BUFFERED, {"schedules": schedules})
    await advance(connection, advances)
    return Skipped(len(advances), buffered)


def _decide(one: Overdue) -> _Decision | None:
    """Returns the decision about a schedule. None: the schedule cannot be decided, for example because its time zone no
    longer exists. Such a schedule must not delay the others."""
    try:
        run, next_at = plan.skip_until(one.spec.timing, one.next_at, one.now, reason=SkipReason.RECOVERED)
        wake_at = None if next_at is None else calendar.due(one.spec.timing, one.id, next_at)
    except Exception:  # noqa: BLE001 - whatever is wrong with it, the others go on
        _log.exception("schedule %r of org %r cannot be decided", one.name, one.org)
        return None
    return _Decision(run, next_at, wake_at)


def _new(schedule: Overdue, run: Run) -> NewRun:
    return NewRun(schedule.id, schedule.name, schedule.spec.timing, run, None, schedule.now)


def _overdue(row: Sequence[Any]) -> Overdue:
    first = 3 + len(SPEC_COLUMNS)
    return Overdue._make([*row[:3], spec_of(row[3:first]), *row[first:]])
