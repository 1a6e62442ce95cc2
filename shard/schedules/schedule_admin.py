"""Operators' calls about the schedules of one shard: create, update, pause, trigger, backfill, list.

Every change is one transaction. It locks the schedule, computes the next instant from the shard's time, and stores the
changed schedule with that instant.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import re
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, takewhile
from typing import Any, NamedTuple, TypeVar

from shard.errors import (
    BadPageToken,
    BadSchedule,
    ScheduleExists,
    ShardUnavailable,
    TooManyQueues,
    TooManySchedules,
    UnknownSchedule,
)
from shard.job_id import to_hex
from shard.postgres import arrays
from shard.postgres.connection import Connection
from shard.postgres.pool import Database
from shard.queue.coalescer import SingleCall, single_calls
from shard.queue.enqueue import find_refused
from shard.queue.queue_ids import QUEUES_MAX
from shard.queue.store import Store
from shard.schedule import (
    BACKFILL_MAX,
    RUNS_KEPT,
    SCHEDULES_MAX,
    SPEC_COLUMNS,
    TEMPLATE_COLUMNS,
    CatchUp,
    Overlap,
    Run,
    RunCause,
    RunOutcome,
    ScheduleId,
    ScheduleName,
    ScheduleRecord,
    ScheduleSpec,
    SkipReason,
    Template,
    Timing,
    spec_of,
    spec_values,
)
from shard.schedules import calendar, plan, statements
from shard.schedules.run_writer import Advance, NewRun, advance, forget_runs, job_id_of, store_runs
from shard.vocabulary import JobId, Micros, OrgId, QueueId, QueueName

_T = TypeVar("_T")
_NAME = re.compile(r"[A-Za-z0-9._:/-]{1,128}")
_PAYLOAD = "payload"
# Upper bound for the attributes of a page of schedules. Without attributes, a page of 1,000 schedules takes 2.7 MB, and
# gRPC clients accept 4 MiB.
LISTED_BYTES_MAX = 1024 * 1024
# A backfill stores instants that were skipped for these reasons. An instant that was skipped for an overlap stays
# skipped.
_BACKFILLED = {SkipReason.CATCH_UP, SkipReason.PAUSE, SkipReason.RECOVERED}
# The maximum number of times that a backfill asks whether the job of the previous run is live. If the schedule fires
# meanwhile, the backfill asks about the job of the new run.
_ASKS_MAX = 10
_LISTED = tuple(name for name in TEMPLATE_COLUMNS if name != _PAYLOAD)


class Found(NamedTuple):
    """A schedule, and the shard's time."""

    schedule: ScheduleRecord
    now: Micros


@dataclass(frozen=True, slots=True, kw_only=True)
class Backfilled:
    """What a backfill has done, in numbers of instants. `known`: the instants that had a run already."""

    stored: int
    buffered: int
    skipped: int
    known: int


async def _nowhere_else(_: JobId) -> bool:
    """Says that a job is not live on any other shard. Used for an org whose live jobs are all on this shard."""
    return True


class ScheduleAdmin:
    """The schedules of one shard. All methods may raise ShardUnavailable. Methods that change something may also raise
    NotOwned and ClockSetBack. `epoch`: the epoch of the placement by which new jobs of the org are written to this
    shard. `changed` is called when a router may have to look at a schedule earlier than before."""

    def __init__(self, database: Database, store: Store, changed: Callable[[], None] = lambda: None) -> None:
        self._database = database
        self._store = store
        self._changed = changed
        # Runs one call after another, and serves the orgs in turn (invariant I4).
        self._calls = single_calls(lambda: ShardUnavailable(database.name, "earlier calls about schedules take long"))

    async def create(
        self, org: OrgId, name: ScheduleName, spec: ScheduleSpec, template: Template, *, paused: bool, epoch: int
    ) -> Found:
        """Creates a schedule. Raises BadSchedule, ScheduleExists, TooManySchedules, TooManyQueues."""
        refuse_bad(spec)
        return await self._in_turn(org, partial(self._create, org, name, spec, template, paused, epoch))

    async def _create(
        self, org: OrgId, name: ScheduleName, spec: ScheduleSpec, template: Template, paused: bool, epoch: int
    ) -> Found:
        self._store.clock.check()
        # Refuse the call before the queue is created: a shard that does not own the org's slot must not get a queue of
        # this org, and a call that is refused must change nothing.
        await self._refuse_unowned(org, epoch)

        async def refuse(_: Micros) -> None:
            if await self._database.run(statements.GET_SCHEDULE, {"org": org, "name": name}):
                raise ScheduleExists(org, name)
            for _, count, _ in await self._database.run(statements.FIND_ROOM, {"org": org, "epoch": epoch}):
                if count >= SCHEDULES_MAX:
                    raise TooManySchedules(org, schedules_max=SCHEDULES_MAX)

        await self._make_queue(org, template, check=refuse)
        async with self._database.transaction() as connection:
            rows = await connection.run(statements.FIND_ROOM, {"org": org, "epoch": epoch})
            if not rows:
                raise ShardUnavailable(self._database.name, f"org {org!r} was moved or erased meanwhile")
            ((org_id, count, now),) = rows
            if count >= SCHEDULES_MAX and not await connection.run(statements.GET_SCHEDULE, {"org": org, "name": name}):
                raise TooManySchedules(org, schedules_max=SCHEDULES_MAX)
            schedule = ScheduleId(str(uuid.uuid4()))
            next_at = calendar.following(spec.timing, now)
            parameters = {
                "id": schedule,
                "org_id": org_id,
                "name": name,
                **spec_values(spec),
                **template,
                "next_us": next_at,
                "wake_us": None if next_at is None else calendar.due(spec.timing, schedule, next_at),
            }
            if not await connection.run(statements.INSERT_SCHEDULE, parameters):
                raise ScheduleExists(org, name)
            if paused:
                found = await self._lock(connection, org, name, epoch)
                await self._write(connection, found, next_at=next_at, paused_at=now)
            found = await self._lock(connection, org, name, epoch)
        self._changed()
        return found

    async def update(
        self,
        org: OrgId,
        name: ScheduleName,
        change: Callable[[ScheduleSpec, Template], tuple[ScheduleSpec, Template]],
        *,
        epoch: int,
    ) -> Found:
        """Changes a schedule. `change` gets the present spec and template, and returns the new spec and template. A
        changed timing applies from now on. If an instant of the old timing has passed and is not decided yet, it is
        recorded as skipped. Raises UnknownSchedule, BadSchedule, TooManyQueues."""
        return await self._in_turn(org, partial(self._update, org, name, change, epoch))

    async def _update(
        self,
        org: OrgId,
        name: ScheduleName,
        change: Callable[[ScheduleSpec, Template], tuple[ScheduleSpec, Template]],
        epoch: int,
    ) -> Found:
        self._store.clock.check()
        try:
            before = await self._get(org, name)
        except UnknownSchedule:
            # The schedule may have moved away with its org.
            await self._refuse_unowned(org, epoch)
            raise
        spec, template = change(before.schedule.spec, before.schedule.template)
        if template["queue"] != before.schedule.template["queue"]:
            # Refuse the call before the queue is created.
            refuse_bad(spec)
            await self._refuse_unowned(org, epoch)
            await self._make_queue(org, template)
        async with self._locked(org, name, epoch) as (connection, found):
            schedule = found.schedule
            spec, template = change(schedule.spec, schedule.template)
            refuse_bad(spec)
            next_at = schedule.next_at
            if spec.timing != schedule.spec.timing:
                await self._skip_due(connection, found)
                next_at = calendar.following(spec.timing, found.now)
            changed = replace(schedule, spec=spec, template=template)
            await self._write(connection, Found(changed, found.now), next_at=next_at, paused_at=schedule.paused_at)
            answer = await self._lock(connection, org, name, epoch)
        self._changed()
        return answer

    async def _skip_due(self, connection: Connection, found: Found) -> None:
        """Records the undecided instants of a locked schedule until now as skipped, because they belong to its old
        timing."""
        schedule, now = found
        # A timing that has become invalid, for example because its time zone no longer exists, has no instants.
        if calendar.faults(schedule.spec.timing):
            return
        reason = SkipReason.CATCH_UP if schedule.paused_at is None else SkipReason.PAUSE
        skipped, _ = plan.skip_until(schedule.spec.timing, schedule.next_at, now, reason=reason)
        if skipped is not None:
            await self._store_runs(connection, found, [skipped], buffered=schedule.buffered)

    async def set_paused(self, org: OrgId, name: ScheduleName, *, paused: bool, epoch: int) -> Found:
        """Pauses or resumes a schedule. Changes nothing if the schedule already is in that state. Raises
        UnknownSchedule."""
        return await self._in_turn(org, partial(self._set_paused, org, name, paused, epoch))

    async def _set_paused(self, org: OrgId, name: ScheduleName, paused: bool, epoch: int) -> Found:
        self._store.clock.check()
        async with self._locked(org, name, epoch) as (connection, found):
            schedule, now = found
            if (schedule.paused_at is not None) is paused:
                return found
            next_at = schedule.next_at
            if not paused:
                skipped, next_at = plan.skip_due(
                    schedule.id, schedule.spec.timing, next_at, now, reason=SkipReason.PAUSE
                )
                if skipped is not None:
                    await self._store_runs(connection, found, [skipped], buffered=schedule.buffered)
            await self._write(connection, found, next_at=next_at, paused_at=now if paused else None)
            answer = await self._lock(connection, org, name, epoch)
        self._changed()
        return answer

    async def delete(self, org: OrgId, name: ScheduleName, *, epoch: int) -> None:
        """Deletes a schedule and its runs, but not its jobs. Raises UnknownSchedule."""
        await self._in_turn(org, partial(self._delete, org, name, epoch))

    async def _delete(self, org: OrgId, name: ScheduleName, epoch: int) -> None:
        self._store.clock.check()
        parameters = {"org": org, "name": name, "epoch": epoch}
        if not await self._database.run(statements.DELETE_SCHEDULE, parameters):
            await self._refuse_unowned(org, epoch)
            raise UnknownSchedule(org, name)

    async def get(self, org: OrgId, name: ScheduleName) -> Found:
        """Returns a schedule. Raises UnknownSchedule."""
        return await self._in_turn(org, partial(self._get, org, name))

    async def _get(self, org: OrgId, name: ScheduleName) -> Found:
        rows = await self._database.run(statements.GET_SCHEDULE, {"org": org, "name": name})
        if not rows:
            raise UnknownSchedule(org, name)
        return _found(rows[0])

    async def now(self, org: OrgId) -> Micros:
        """Returns the shard's time."""
        ((now,),) = await self._in_turn(org, partial(self._database.run, statements.READ_TIME, {}))
        return Micros(now)

    async def runs(self, org: OrgId, schedule: ScheduleId) -> list[Run]:
        """Returns the newest runs of a schedule, the latest instant first."""
        parameters = {"id": schedule, "rows": RUNS_KEPT}
        rows = await self._in_turn(org, partial(self._database.run, statements.READ_RUNS, parameters))
        return list(map(_run, rows))

    async def list(self, org: OrgId, *, declared_by: str, page_size: int, page_token: str) -> tuple[list[Found], str]:
        """Returns a page of schedules by name, without payloads, and the token of the next page (empty on the last
        page). The page ends early with the schedule whose attributes fill LISTED_BYTES_MAX. Raises BadPageToken."""
        parameters = {
            "org": org,
            "after": _unpack(page_token) if page_token else "",
            "declared_by": declared_by,
            "rows": page_size + 1,
            "bytes_max": LISTED_BYTES_MAX,
        }
        rows = await self._in_turn(org, partial(self._database.run, statements.LIST_SCHEDULES, parameters))
        page = [_found(row[:-1]) for row in rows[:page_size]]
        return page, _pack(page[-1].schedule.name) if page and len(page) < rows[0][-1] else ""

    async def trigger(self, org: OrgId, name: ScheduleName, *, request: str | None, epoch: int) -> tuple[JobId, bool]:
        """Stores a run now, even if the schedule is paused, and without regard to its overlap policy. Returns the job
        of the run, and whether an earlier call with this `request`, a UUID, had stored that job. Raises
        UnknownSchedule, and UnknownQueue if the queue of the schedule's jobs does not exist any more."""
        return await self._in_turn(org, partial(self._trigger, org, name, request, epoch))

    async def _trigger(self, org: OrgId, name: ScheduleName, request: str | None, epoch: int) -> tuple[JobId, bool]:
        self._store.clock.check()
        async with self._locked(org, name, epoch) as (connection, found):
            schedule, now = found
            if request is not None:
                rows = await connection.run(statements.FIND_REQUEST, {"id": schedule.id, "request": request})
                if rows:
                    return JobId(rows[0][0]), True
            run = Run(now, RunCause.TRIGGER, RunOutcome.STORED)
            queues = await self._store_runs(connection, found, [run], buffered=schedule.buffered, request=request)
        self._store.jobs_stored(queues)
        return job_id_of(schedule.id, now, now), False

    async def backfill(
        self,
        org: OrgId,
        name: ScheduleName,
        *,
        begin: Micros,
        end: Micros,
        overlap: Overlap,
        epoch: int,
        ended_elsewhere: Callable[[JobId], Awaitable[bool]] = _nowhere_else,
    ) -> Backfilled:
        """Stores a run for each instant from `begin` up to, but not including, `end`. Leaves out instants that have a
        run, unless the run is a skip for a reason in _BACKFILLED. `ended_elsewhere` returns True if a job is live on
        none of the shards from which jobs of the org move to this shard. Raises UnknownSchedule, UnknownQueue,
        BadSchedule, and what `ended_elsewhere` raises."""
        return await self._in_turn(org, partial(self._backfill, org, name, begin, end, overlap, epoch, ended_elsewhere))

    async def _backfill(
        self,
        org: OrgId,
        name: ScheduleName,
        begin: Micros,
        end: Micros,
        overlap: Overlap,
        epoch: int,
        ended_elsewhere: Callable[[JobId], Awaitable[bool]],
    ) -> Backfilled:
        self._store.clock.check()
        # Ask shards about the job of the previous run while no transaction is open. An open transaction would hold a
        # connection and the lock of the schedule while the shards are asked.
        live: dict[JobId, bool] = {}
        for _ in range(_ASKS_MAX):
            answer = await self._backfill_if_known(org, name, begin, end, overlap, epoch, live)
            if isinstance(answer, Backfilled):
                return answer
            # The job may be on its way to this shard, so this shard is asked last.
            live[answer] = not await ended_elsewhere(answer) or not await self._store.find_ended(
                [(org, to_hex(answer))]
            )
        raise ShardUnavailable(self._database.name, f"schedule {name!r} fires too often to be backfilled now")

    async def _backfill_if_known(
        self,
        org: OrgId,
        name: ScheduleName,
        begin: Micros,
        end: Micros,
        overlap: Overlap,
        epoch: int,
        live: Mapping[JobId, bool],
    ) -> Backfilled | JobId:
        """Does the backfill. If the backfill depends on whether a job is live, and `live` does not have this job, does
        nothing and returns the job."""
        async with self._locked(org, name, epoch) as (connection, found):
            schedule, now = found
            if end > now:
                raise BadSchedule(
                    "end", "must not be after the shard's present time: schedules fire by themselves then"
                )
            instants = instants_between(schedule.spec.timing, begin, end)
            found_runs = await self._find_runs(connection, schedule.id, instants)
            skipped = [run for run in found_runs if run.outcome is RunOutcome.SKIPPED]
            known = {run.at for run in found_runs} - {run.at for run in skipped if run.skipped_for in _BACKFILLED}
            new = [at for at in instants if at not in known]
            if not new:
                return Backfilled(stored=0, buffered=0, skipped=0, known=len(known))
            running = False
            if overlap is not Overlap.ALLOW and schedule.last_job is not None:
                if schedule.last_job not in live:
                    return schedule.last_job
                running = live[schedule.last_job]
            runs, buffered = plan.backfill(new, overlap, running=running, buffered=schedule.buffered)
            rest = [run for one in skipped if (run := await self._rest(connection, schedule, one, new)) is not None]
            # After the timing was changed, skips may overlap. A statement cannot store one instant twice.
            rest = list({run.at: run for run in rest}.values())
            next_at = await self._find_undecided(connection, schedule, new)
            found = found._replace(schedule=replace(schedule, next_at=next_at))
            queues = await self._store_runs(connection, found, [*runs, *rest], buffered=buffered)
        self._store.jobs_stored(queues)
        self._changed()
        outcomes = [run.outcome for run in runs]
        return Backfilled(
            stored=outcomes.count(RunOutcome.STORED),
            buffered=outcomes.count(RunOutcome.BUFFERED),
            skipped=outcomes.count(RunOutcome.SKIPPED),
            known=len(known),
        )

    async def _rest(
        self, connection: Connection, schedule: ScheduleRecord, skipped: Run, new: Collection[Micros]
    ) -> Run | None:
        """`skipped` may be one record for several skipped instants, stored under the first of them. If the first
        instant gets a run now, the later instants need a new record, stored under the first of them that has no run.
        Returns the new record, or None if no new record is needed."""
        if skipped.through is None or skipped.at not in new:
            return None
        first = await self._first_without_run(connection, schedule, skipped.at, new)
        if first is None or first > skipped.through:
            return None
        return skipped._replace(at=first, through=skipped.through if skipped.through > first else None)

    async def _find_undecided(
        self, connection: Connection, schedule: ScheduleRecord, new: Collection[Micros]
    ) -> Micros | None:
        """Returns the first instant that is still undecided after the instants of `new` have got runs. The returned
        instant must have no run, because a skip of several instants is recorded at its first instant. If the first
        instant had a run, the skip of the later instants would not be recorded."""
        if schedule.next_at is None or schedule.next_at not in new:
            return schedule.next_at
        return await self._first_without_run(connection, schedule, schedule.next_at, new)

    async def _first_without_run(
        self, connection: Connection, schedule: ScheduleRecord, after: Micros, new: Collection[Micros]
    ) -> Micros | None:
        """Returns the first instant after `after` that has no run and is not in `new`, or None if there is none."""
        later = calendar.after(schedule.spec.timing, after)
        # The loop ends, because only some instants have runs.
        while instants := list(islice(later, RUNS_KEPT)):
            taken = {*new, *(run.at for run in await self._find_runs(connection, schedule.id, instants))}
            for at in instants:
                if at not in taken:
                    return at
        return None

    async def _find_runs(
        self, connection: Connection, schedule: ScheduleId, instants: Sequence[Micros]
    ) -> Sequence[Run]:
        """Returns the runs of these instants. Leaves out instants without a run."""
        parameters = {"id": schedule, "ats_us": arrays.numbers(instants)}
        return [_run(row) for row in await connection.run(statements.FIND_RUNS, parameters)]

    async def _store_runs(
        self,
        connection: Connection,
        found: Found,
        runs: Sequence[Run],
        *,
        buffered: int,
        request: str | None = None,
    ) -> set[QueueId]:
        """Stores runs of a locked schedule. Does not change the configuration of the schedule. Returns the queues that
        got jobs. Raises UnknownQueue."""
        schedule, now = found
        previous = schedule.last_at if runs[0].cause is RunCause.TRIGGER else None
        latest: Micros | None = None
        new: list[NewRun] = []
        for run in runs:
            new.append(NewRun(schedule.id, schedule.name, schedule.spec.timing, run, previous, now, request))
            if run.outcome is RunOutcome.STORED:
                previous = latest = run.at
        stored = await store_runs(connection, new)
        wake_at = None if schedule.paused_at is not None else _wake_at(schedule, now, buffered)
        await advance(connection, [Advance(schedule.id, schedule.next_at, wake_at, None, latest, buffered, len(runs))])
        await forget_runs(connection, [schedule.id])
        return stored.queues

    async def _write(
        self, connection: Connection, found: Found, *, next_at: Micros | None, paused_at: Micros | None
    ) -> None:
        schedule, now = found
        wake_at = (
            None if paused_at is not None else _wake_at(replace(schedule, next_at=next_at), now, schedule.buffered)
        )
        parameters = {
            "id": schedule.id,
            **spec_values(schedule.spec),
            **schedule.template,
            "next_us": next_at,
            "wake_us": wake_at,
            "paused_us": paused_at,
        }
        await connection.run(statements.UPDATE_SCHEDULE, parameters)

    @contextlib.asynccontextmanager
    async def _locked(self, org: OrgId, name: ScheduleName, epoch: int) -> AsyncGenerator[tuple[Connection, Found]]:
        """Opens a transaction that has locked this schedule. Raises UnknownSchedule."""
        try:
            async with self._database.transaction() as connection:
                yield connection, await self._lock(connection, org, name, epoch)
        except UnknownSchedule:
            # Ask only after the transaction has ended, so that this call does not hold a connection while it takes
            # another one.
            await self._refuse_unowned(org, epoch)
            raise

    async def _lock(self, connection: Connection, org: OrgId, name: ScheduleName, epoch: int) -> Found:
        rows = await connection.run(statements.LOCK_SCHEDULE, {"org": org, "name": name, "epoch": epoch})
        if not rows:
            raise UnknownSchedule(org, name)
        return _found(rows[0])

    async def _make_queue(
        self, org: OrgId, template: Template, *, check: Callable[[Micros], Awaitable[None]] | None = None
    ) -> None:
        """Makes the queue of the jobs, so that no firing has to make it. `check` has the same meaning as for
        QueueIds.make."""
        queue = QueueName(str(template["queue"]))
        if not await self._store.names.make([(org, queue)], check=check):
            raise TooManyQueues(self._database.name, org, [queue], queues_max=QUEUES_MAX)

    async def _refuse_unowned(self, org: OrgId, epoch: int) -> None:
        for error in (await find_refused(self._database, [(org, epoch)])).values():
            raise error

    async def _in_turn(self, org: OrgId, act: Callable[[], Awaitable[_T]]) -> _T:
        answer: _T = await self._calls.submit(SingleCall(org, 1, act))
        return answer


def _wake_at(schedule: ScheduleRecord, now: Micros, buffered: int) -> Micros | None:
    """Returns the time at which a router must look at a schedule that is not paused. None: never."""
    next_at = schedule.next_at
    wake_at = None if next_at is None else calendar.due(schedule.spec.timing, schedule.id, next_at)
    if not buffered:
        return wake_at
    look_at = Micros(now + plan.BUFFER_LOOK_US)
    return look_at if wake_at is None else min(wake_at, look_at)


def refuse_bad(spec: ScheduleSpec) -> None:
    """Raises BadSchedule if a spec is not valid, or has no instant at all."""
    for fault in calendar.faults(spec.timing):
        raise BadSchedule(f"spec.{fault.field}", fault.description)
    if spec.catch_up is CatchUp.WINDOW and not spec.catch_up_window_us:
        raise BadSchedule("spec.catch_up_window", "must be set for the policy WINDOW")


def instants_between(timing: Timing, begin: Micros, end: Micros) -> list[Micros]:
    """Returns the instants from `begin` up to, but not including, `end`. Raises BadSchedule if there are more than
    BACKFILL_MAX."""
    found = list(islice(takewhile(lambda at: at < end, calendar.after(timing, Micros(begin - 1))), BACKFILL_MAX + 1))
    if len(found) > BACKFILL_MAX:
        raise BadSchedule("end", f"makes more than {BACKFILL_MAX:,} instants: backfill in several parts")
    return found


def _run(row: Sequence[Any]) -> Run:
    """Makes a Run from a row of read_runs.sql or find_runs.sql."""
    at, cause, outcome, through, skipped_for, job_id, decided_at = row
    return Run(
        at=at,
        cause=RunCause(cause),
        outcome=RunOutcome(outcome),
        through=through,
        skipped_for=None if skipped_for is None else SkipReason(skipped_for),
        job_id=job_id,
        decided_at=decided_at,
    )


def _found(row: Sequence[Any]) -> Found:
    """Makes a Found from a row with the columns of {{schedule_record}}, the org, the payload and the time."""
    first = 2 + len(SPEC_COLUMNS)
    then = first + len(_LISTED)
    schedule, name = row[:2]
    created_at, paused_at, next_at, last_at, last_job, buffered, org, payload, now = row[then:]
    template = {**dict(zip(_LISTED, row[first:then], strict=True)), _PAYLOAD: payload}
    return Found(
        ScheduleRecord(
            id=schedule,
            org=org,
            name=name,
            spec=spec_of(row[2:first]),
            template=template,
            created_at=created_at,
            paused_at=paused_at,
            next_at=next_at,
            last_at=last_at,
            last_job=last_job,
            buffered=buffered,
        ),
        now,
    )


def _pack(name: ScheduleName) -> str:
    return base64.urlsafe_b64encode(name.encode()).decode()


def _unpack(token: str) -> str:
    """Returns the name in a page token, which a caller may have forged. Raises BadPageToken."""
    try:
        name = base64.urlsafe_b64decode(token.encode()).decode()
    except (ValueError, binascii.Error) as error:
        raise BadPageToken(token) from error
    if _NAME.fullmatch(name) is None:
        raise BadPageToken(token)
    return name
