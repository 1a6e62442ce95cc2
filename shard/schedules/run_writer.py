"""Writes decided runs, their jobs, and the changes of their schedules, inside a transaction of the caller."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from itertools import islice, takewhile
from typing import NamedTuple
from uuid import UUID

from shard.errors import UnknownQueue
from shard.job_id import HORIZON_US
from shard.postgres import arrays
from shard.postgres.connection import Connection
from shard.schedule import RUNS_KEPT, Run, RunOutcome, ScheduledRun, ScheduleId, ScheduleName, Timing
from shard.schedules import calendar, statements
from shard.vocabulary import JobId, Micros, OrgId, QueueId, QueueName


class NewRun(NamedTuple):
    """A decided run. `previous`: the instant of the previous run. The job of this run stores that instant."""

    schedule: ScheduleId
    name: ScheduleName
    timing: Timing
    run: Run
    previous: Micros | None
    # The shard's time.
    now: Micros
    # The id of the call that asked for the run. None: no call asked for the run, or the call has no id.
    request: str | None = None


class Advance(NamedTuple):
    """The changes to a schedule after some of its runs were decided. `last_at`: the instant of the latest run that is
    stored now and was due by the calendar. `run_at`: the instant of the latest run that is stored now, whatever its
    cause. `last_at` and `run_at` are None if no such run is stored now. `buffered`: the maximum number of runs that
    wait."""

    schedule: ScheduleId
    next_at: Micros | None
    wake_at: Micros | None
    last_at: Micros | None
    run_at: Micros | None
    buffered: int
    # How many runs were decided.
    decided: int


class Stored(NamedTuple):
    """What was stored: how many jobs, and in which queues."""

    jobs: int
    queues: set[QueueId]


def job_id_of(schedule: ScheduleId, at: Micros, now: Micros) -> JobId:
    """Returns the id of a run's job. The time in the id is the time at which the schedule fires, because shards compare
    that time with the horizon. The row of a run, and not this id, ensures that the run is stored only once."""
    digest = int.from_bytes(hashlib.blake2b(f"{schedule} {at}".encode(), digest_size=10).digest())
    number = now // 1000 << 80 | 0x7 << 76 | (digest >> 62 & 0xFFF) << 64 | 0b10 << 62 | digest & (1 << 62) - 1
    return JobId(str(UUID(int=number)))


async def store_runs(connection: Connection, runs: Sequence[NewRun]) -> Stored:
    """Stores runs and their jobs. The transaction must have locked the schedules. An instant that has a run already
    keeps that run; store_runs.sql names the exceptions. Raises UnknownQueue, after which the transaction must not
    commit."""
    runs = await _tell_all(connection, runs)
    if not runs:
        return Stored(0, set())
    ids = [
        job_id_of(new.schedule, new.run.at, new.now) if new.run.outcome is RunOutcome.STORED else None for new in runs
    ]
    jobs = sorted((job, new) for job, new in zip(ids, runs, strict=True) if job is not None)
    told = [ScheduledRun(new.name, new.run.at, new.previous, new.run.cause).to_json() for _, new in jobs]
    skips = {at: new.run.skipped_for.value for at, new in enumerate(runs) if new.run.skipped_for is not None}
    ((queues, count, unknown_queue),) = await connection.run(
        statements.STORE_RUNS,
        {
            "schedules": arrays.plain(new.schedule for new in runs),
            "ats_us": arrays.numbers(new.run.at for new in runs),
            "throughs_us": _nullable(new.run.through for new in runs),
            "causes": arrays.names(new.run.cause.value for new in runs),
            "outcomes": arrays.names(new.run.outcome.value for new in runs),
            "skipped_for": arrays.sparse_texts(skips, len(runs)),
            "job_ids": _nullable(ids),
            "requests": _nullable(new.request for new in runs),
            "stored_ids": arrays.plain(job for job, _ in jobs),
            "scheduled_runs": arrays.texts(told),
        },
    )
    if unknown_queue is not None:
        org, queue = unknown_queue
        raise UnknownQueue(OrgId(org), QueueName(queue))
    return Stored(count, set(queues or ()))


async def _tell_all(connection: Connection, runs: Sequence[NewRun]) -> Sequence[NewRun]:
    """Makes sure that skips of several instants are recorded. Such a skip is recorded at its first instant. If that
    instant has a run already, for example from a backfill, the skip would not be stored, and the skip of the other
    instants would not be recorded. So this function moves the skip to its first instant without a run."""
    skips = [at for at, new in enumerate(runs) if new.run.through is not None]
    if not skips:
        return runs
    parameters = {
        "schedules": arrays.plain(runs[at].schedule for at in skips),
        "ats_us": arrays.numbers(runs[at].run.at for at in skips),
    }
    told: list[NewRun | None] = list(runs)
    positions: list[int] = [position for (position,) in await connection.run(statements.FIND_TAKEN, parameters)]
    for position in positions:
        at = skips[position - 1]
        told[at] = await _later(connection, runs[at])
    return [new for new in told if new is not None]


async def _later(connection: Connection, new: NewRun) -> NewRun | None:
    """Returns the skip, moved to the first of its later instants that has no run. Returns None if all its instants have
    runs."""
    through = new.run.through or new.run.at
    instants = takewhile(lambda at: at <= through, calendar.after(new.timing, new.run.at))
    while page := list(islice(instants, RUNS_KEPT)):
        parameters = {"schedules": arrays.plain([new.schedule] * len(page)), "ats_us": arrays.numbers(page)}
        taken = {position - 1 for (position,) in await connection.run(statements.FIND_TAKEN, parameters)}
        for position, at in enumerate(page):
            if position not in taken:
                return new._replace(run=new.run._replace(at=at, through=through if through > at else None))
    return None


async def advance(connection: Connection, advances: Sequence[Advance]) -> None:
    """Advances schedules that the transaction has locked, after their runs were stored."""
    if advances:
        columns = {
            "nexts_us": (one.next_at for one in advances),
            "wakes_us": (one.wake_at for one in advances),
            "lasts_us": (one.last_at for one in advances),
            "runs_us": (one.run_at for one in advances),
            "buffered": (one.buffered for one in advances),
            "decided": (one.decided for one in advances),
        }
        parameters = {name: _nullable(column) for name, column in columns.items()}
        await connection.run(
            statements.ADVANCE, {"schedules": arrays.plain(one.schedule for one in advances), **parameters}
        )


async def forget_runs(connection: Connection, schedules: Sequence[ScheduleId]) -> None:
    """Forgets the older runs of these schedules."""
    if schedules:
        parameters = {
            "schedules": arrays.plain(schedules),
            "kept": RUNS_KEPT,
            # Runs of backfills are kept for as long as shards accept ids of their age.
            "backfill_us": HORIZON_US,
        }
        await connection.run(statements.FORGET_RUNS, parameters)


def _nullable(values: Iterable[object]) -> str:
    """Encodes numbers or UUIDs, with None as NULL."""
    return "{" + ",".join("NULL" if value is None else str(value) for value in values) + "}"
