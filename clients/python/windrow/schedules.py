"""The methods of Client for schedules, and what they return."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TypeVar

from google.protobuf.field_mask_pb2 import FieldMask
from google.protobuf.message import Message

from windrow.calls import ADMIN_FINAL, Calls, Method
from windrow.channels import Stub
from windrow.errors import (
    AlreadyExists,
    InvalidRequest,
    NotFound,
    ResourceExhausted,
    Span,
    Violation,
    ids_in_error,
    invalid_argument,
)
from windrow.ids import uuid7
from windrow.jobs import JobState, RunCause, read_run_cause, state_of
from windrow.new_jobs import NewJob, new_message, read_new
from windrow.payloads import checked_text, moment, named_duration, named_timestamp, shown
from windrow.v1 import job_pb2, schedules_pb2

_PAGE_MAX = 1000
_TRIES_MAX = 5
# The job of a schedule is a template without an id, so it gets this id.
_NO_ID = "00000000-0000-7000-8000-000000000000"

_Request = TypeVar("_Request", bound=Message)
_Response = TypeVar("_Response")


class Overlap(enum.Enum):
    """What happens if a run is due while the job of the previous run is scheduled, ready or leased."""

    ALLOW = "allow"
    SKIP = "skip"
    # The run waits until the job of the previous run has ended. One run may wait (BUFFER_ONE), or up to 100 runs
    # (BUFFER_ALL); further runs are skipped.
    BUFFER_ONE = "buffer_one"
    BUFFER_ALL = "buffer_all"
    # The job of the previous run is cancelled.
    CANCEL_RUNNING = "cancel_running"
    UNKNOWN = "unknown"


class CatchUp(enum.Enum):
    """Which runs are stored late, if no router could store some runs in time. The other late runs are skipped."""

    LATEST = "latest"
    # The runs of the last `catch_up_window` of the schedule, at most 1,000.
    WINDOW = "window"
    # The newest 1,000 runs.
    ALL = "all"
    UNKNOWN = "unknown"


class RunOutcome(enum.Enum):
    """The decision about a run."""

    STORED = "stored"
    # The run waits until the job of an earlier run has ended.
    BUFFERED = "buffered"
    SKIPPED = "skipped"
    UNKNOWN = "unknown"


class SkipReason(enum.Enum):
    """Why a run was skipped."""

    OVERLAP = "overlap"
    CATCH_UP = "catch_up"
    PAUSE = "pause"
    RECOVERED = "recovered"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """When a schedule fires: give exactly one of `cron`, `every` and `at`.

    `cron` has five fields, or six if the first is for seconds, and is read in the time zone `tz`. `every` counts from
    `start`, or from 1970. `at` is a single time. Each run is delayed by a random time of at most `jitter` after its
    nominal time."""

    cron: str = ""
    every: Span | None = None
    at: datetime | None = None
    # A name of the IANA time zone database, such as "Europe/Paris".
    tz: str = "UTC"
    # Instants are at or after `start`, and before `end`.
    start: datetime | None = None
    end: datetime | None = None
    jitter: Span = 0.0
    overlap: Overlap = Overlap.SKIP
    catch_up: CatchUp = CatchUp.LATEST
    # Needed with CatchUp.WINDOW.
    catch_up_window: Span | None = None
    note: str = ""
    # The name of the program that declares the schedule in its code. Worker.every sets this field.
    declared_by: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleRecord:
    """A schedule that exists, with its state."""

    name: str
    schedule: Schedule
    # The template of the schedule's jobs. The id of the template means nothing. In lists of schedules, the template has
    # no payload.
    job: NewJob
    paused: bool
    paused_at: datetime | None
    created_at: datetime
    # The next nominal times, at most 5.
    next: Sequence[datetime]
    # The nominal time of the latest run that was stored because it was due.
    last: datetime | None
    # How many runs wait until the job of an earlier run has ended.
    buffered: int
    shard: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleRun:
    """A run of a schedule, or several instants that were skipped together: the instants from `at` through `through`."""

    at: datetime
    through: datetime | None
    cause: RunCause
    outcome: RunOutcome
    skip_reason: SkipReason | None
    # Empty: the run was not stored.
    job_id: str
    # None: there is no job, or its state is not known.
    job_state: JobState | None
    decided_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Backfilled:
    """How many instants of a backfill had each outcome."""

    stored: int
    buffered: int
    skipped: int
    # How many instants had a run already.
    known: int


class ScheduleCalls:
    """The schedules of one org."""

    org: str
    calls: Calls

    async def create_schedule(
        self, name: str, schedule: Schedule, job: NewJob, *, paused: bool = False
    ) -> ScheduleRecord:
        """Creates a schedule. At each instant, the schedule stores a job like `job` with a new id. The payload has at
        most 64 KiB. The times, the delay and the dedup key of `job` must not be set.

        Raises AlreadyExists if there is a schedule of this name, even if the first try of this call created it and the
        answer to that try was lost. Raises InvalidRequest, for example for a cron expression that cannot be read."""
        request = schedules_pb2.CreateScheduleRequest(
            org=self.org, name=checked_text("name", name), spec=_spec(schedule), job=_template(job), paused=paused
        )
        return _read((await self._ask_schedules(lambda stub: stub.CreateSchedule, request)).schedule)

    async def update_schedule(
        self, name: str, schedule: Schedule | None = None, job: NewJob | None = None
    ) -> ScheduleRecord:
        """Replaces the timing of a schedule (`schedule`), or the template of its jobs (`job`), or both. A new timing
        applies from now on. Raises NotFound."""
        request = schedules_pb2.UpdateScheduleRequest(org=self.org, name=checked_text("name", name))
        if schedule is not None:
            request.spec.CopyFrom(_spec(schedule))
            timing = {"cron", "interval", "at"} - {request.spec.WhichOneof("timing")}
            fields = [field.name for field in schedules_pb2.ScheduleSpec.DESCRIPTOR.fields]
            request.update_mask.CopyFrom(FieldMask(paths=[field for field in fields if field not in timing]))
        if job is not None:
            request.job.CopyFrom(_template(job))
        return _read((await self._ask_schedules(lambda stub: stub.UpdateSchedule, request)).schedule)

    async def put_schedule(self, name: str, schedule: Schedule, job: NewJob) -> ScheduleRecord:
        """Creates a schedule, or changes the existing schedule of this name to `schedule` and `job`. Does nothing if
        the existing schedule is equal already. A paused schedule stays paused. Several processes may call this method
        at the same time."""
        check_schedule(name, schedule, job)
        for tries_left in range(_TRIES_MAX, -1, -1):
            try:
                found, _ = await self.get_schedule(name)
                if _is_equal(found, schedule, job):
                    return found
                return await self.update_schedule(name, schedule, job)
            except NotFound:
                pass
            try:
                return await self.create_schedule(name, schedule, job)
            except AlreadyExists:
                # Another process has created the schedule, and perhaps deleted it since.
                if not tries_left:
                    raise
        raise AssertionError("unreachable")

    async def get_schedule(self, name: str) -> tuple[ScheduleRecord, list[ScheduleRun]]:
        """Returns a schedule and its newest runs, at most 20, the latest first. Raises NotFound."""
        request = schedules_pb2.GetScheduleRequest(org=self.org, name=name)
        response = await self._ask_schedules(lambda stub: stub.GetSchedule, request)
        return _read(response.schedule), list(map(_read_run, response.runs))

    async def list_schedules(self, *, declared_by: str = "") -> list[ScheduleRecord]:
        """Returns all schedules of the org in the order of their names, without the payloads of their jobs.
        `declared_by`: only the schedules that are declared under this name."""
        return [record async for record in self._schedules(declared_by)]

    async def _schedules(self, declared_by: str) -> AsyncIterator[ScheduleRecord]:
        token = ""
        while True:
            request = schedules_pb2.ListSchedulesRequest(
                org=self.org, page_size=_PAGE_MAX, page_token=token, declared_by=declared_by
            )
            response = await self._ask_schedules(lambda stub: stub.ListSchedules, request)
            for schedule in response.schedules:
                yield _read(schedule)
            token = response.next_page_token
            if not token:
                return

    async def delete_schedule(self, name: str) -> None:
        """Deletes a schedule; its jobs stay. Raises NotFound, even if the first try of this call deleted the schedule
        and the answer to that try was lost."""
        request = schedules_pb2.DeleteScheduleRequest(org=self.org, name=name)
        await self._ask_schedules(lambda stub: stub.DeleteSchedule, request)

    async def pause_schedule(self, name: str) -> ScheduleRecord:
        """Stops a schedule from storing jobs by itself. Raises NotFound."""
        request = schedules_pb2.PauseScheduleRequest(org=self.org, name=name)
        return _read((await self._ask_schedules(lambda stub: stub.PauseSchedule, request)).schedule)

    async def resume_schedule(self, name: str) -> ScheduleRecord:
        """Ends a pause. The instants of the pause are skipped. Raises NotFound."""
        request = schedules_pb2.ResumeScheduleRequest(org=self.org, name=name)
        return _read((await self._ask_schedules(lambda stub: stub.ResumeSchedule, request)).schedule)

    async def trigger_schedule(self, name: str, *, request_id: str = "") -> str:
        """Stores a run now, even if the schedule is paused or its overlap policy would not allow the run. Returns the
        id of the run's job.

        `request_id`: a UUIDv7 that makes it safe to repeat the call. While the run is among the schedule's newest 20
        runs, a call with the same `request_id` stores no other run, and returns the id of the same job. Default: a new
        UUIDv7, which an error has in `made_ids`. Raises NotFound."""
        request_id = request_id or uuid7()
        request = schedules_pb2.TriggerScheduleRequest(org=self.org, name=name, request_id=request_id)
        with ids_in_error((request_id,)):
            return (await self._ask_schedules(lambda stub: stub.TriggerSchedule, request)).job_id

    async def backfill_schedule(
        self, name: str, begin: datetime, end: datetime, *, overlap: Overlap = Overlap.ALLOW
    ) -> Backfilled:
        """Stores the runs of all instants that are at or after `begin` and before `end`, at most 1,000. Skips instants
        that have a run already. `end` must have passed. Raises NotFound, InvalidRequest."""
        request = schedules_pb2.BackfillScheduleRequest(org=self.org, name=name, overlap=_number("overlap", overlap))
        request.begin.CopyFrom(named_timestamp("begin", begin))
        request.end.CopyFrom(named_timestamp("end", end))
        done = await self._ask_schedules(lambda stub: stub.BackfillSchedule, request)
        return Backfilled(stored=done.stored, buffered=done.buffered, skipped=done.skipped, known=done.known)

    async def preview_schedule(
        self, schedule: Schedule | str, *, count: int = 10, after: datetime | None = None
    ) -> list[datetime]:
        """Returns the next `count` (1 to 100) instants after `after`, or after now. `schedule` is a Schedule, or the
        name of a schedule that exists. Raises NotFound, InvalidRequest."""
        request = schedules_pb2.PreviewScheduleRequest(org=self.org, count=count)
        if isinstance(schedule, str):
            request.name = schedule
        else:
            request.spec.CopyFrom(_spec(schedule))
        if after is not None:
            request.after.CopyFrom(named_timestamp("after", after))
        return list(map(moment, (await self._ask_schedules(lambda stub: stub.PreviewSchedule, request)).times))

    async def declare_schedules(
        self, declared: Iterable[tuple[str, Schedule, NewJob]], *, declared_by: str, remove: bool = False
    ) -> list[str]:
        """Declares these schedules, and no others, under the name `declared_by` (1 to 128 bytes). Returns the names of
        the schedules that were declared under this name before and are not in `declared`. `remove`: deletes these
        schedules. Several processes may call this method at the same time. Raises InvalidRequest if one of these names
        belongs to an existing schedule that was not declared under `declared_by`."""
        wanted = list(declared)
        for name, schedule, job in wanted:
            with _about(name):
                check_schedule(name, schedule, job)
        names: set[str] = set()
        for name, schedule, job in wanted:
            names.add(name)
            try:
                found, _ = await self.get_schedule(name)
            except NotFound:
                pass
            else:
                if found.schedule.declared_by != declared_by:
                    keeper = found.schedule.declared_by or "nobody in code"
                    raise _invalid("name", f"{name!r} is a schedule that is kept by {keeper}: take another name")
            with _about(name):
                await self.put_schedule(name, replace(schedule, declared_by=declared_by), job)
        stale = [
            record.name for record in await self.list_schedules(declared_by=declared_by) if record.name not in names
        ]
        if remove:
            for name in stale:
                with contextlib.suppress(NotFound):
                    await self.delete_schedule(name)
        return stale

    async def _ask_schedules(
        self, method: Callable[[Stub], Method[_Request, _Response]], request: _Request
    ) -> _Response:
        return await self.calls.call(method, request, final=ADMIN_FINAL)


def check_schedule(name: str, schedule: Schedule, job: NewJob) -> None:
    """Raises InvalidRequest or InvalidJob for a schedule that cannot be sent. A router checks the rest."""
    checked_text("name", name)
    _spec(schedule)
    _template(job)


@contextlib.contextmanager
def _about(name: str) -> Generator[None]:
    """Adds the name of a schedule to an error, because the caller has several schedules."""
    try:
        yield
    except (InvalidRequest, ResourceExhausted) as error:
        error.add_note(f"This is about the schedule {name!r}.")
        raise


def _invalid(field: str, why: str) -> InvalidRequest:
    return InvalidRequest(f"{field}: {why}", [Violation(field, why)])


def _number(name: str, policy: Overlap) -> schedules_pb2.OverlapPolicy.ValueType:
    try:
        return _OVERLAP_NUMBERS[policy]
    except KeyError as error:
        raise invalid_argument(name, f"must be an Overlap, not {policy!r}") from error


def _spec(schedule: Schedule) -> schedules_pb2.ScheduleSpec:
    """Returns the protobuf message of a schedule. Raises InvalidRequest, which names the field that cannot be sent."""
    given: object = schedule
    if not isinstance(given, Schedule):
        raise invalid_argument("schedule", f"must be a windrow.Schedule, not {shown(given)}")
    timings = [name for name in ("cron", "every", "at") if getattr(schedule, name) not in ("", None)]
    if len(timings) != 1:
        has = " and ".join(timings) or "none of them"
        raise invalid_argument("schedule", f"must have exactly one of cron, every and at, and has {has}")
    for name in ("cron", "tz", "note", "declared_by"):
        checked_text(name, getattr(schedule, name) or "")
    message = schedules_pb2.ScheduleSpec(
        time_zone=schedule.tz,
        overlap=_number("overlap", schedule.overlap),
        note=schedule.note,
        declared_by=schedule.declared_by,
    )
    try:
        message.catch_up = _CATCH_UP_NUMBERS[schedule.catch_up]
    except KeyError as error:
        raise invalid_argument("catch_up", f"must be a CatchUp, not {schedule.catch_up!r}") from error
    if schedule.catch_up is CatchUp.WINDOW and schedule.catch_up_window is None:
        raise invalid_argument("catch_up_window", "must be set with CatchUp.WINDOW")
    if schedule.cron:
        message.cron = schedule.cron
    for field, name in (("interval", "every"), ("jitter", "jitter"), ("catch_up_window", "catch_up_window")):
        span = getattr(schedule, name)
        if span is not None:
            getattr(message, field).CopyFrom(named_duration(name, span))
    for name in ("at", "start", "end"):
        time = getattr(schedule, name)
        if time is not None:
            getattr(message, name).CopyFrom(named_timestamp(name, time))
    return message


def _template(job: NewJob) -> job_pb2.JobTemplate:
    message = new_message(job)
    for field in ("run_at", "delay", "expires_at", "dedup"):
        if message.HasField(field):
            raise invalid_argument(field, "must not be set in the job of a schedule")
    return message.template


def _is_equal(found: ScheduleRecord, schedule: Schedule, job: NewJob) -> bool:
    """Returns whether a stored schedule equals a wanted schedule. Compares both as the router would store them."""
    wanted = _template(job)
    # The router stores 5 if no priority was given.
    wanted.priority = wanted.priority or 5
    return _spec(found.schedule) == _spec(schedule) and _template(found.job) == wanted


def _read(message: schedules_pb2.ScheduleInfo) -> ScheduleRecord:
    spec = message.spec
    which = spec.WhichOneof("timing")
    return ScheduleRecord(
        name=message.name,
        schedule=Schedule(
            cron=spec.cron,
            every=spec.interval.ToTimedelta() if which == "interval" else None,
            at=moment(spec.at) if which == "at" else None,
            tz=spec.time_zone,
            start=moment(spec.start) if spec.HasField("start") else None,
            end=moment(spec.end) if spec.HasField("end") else None,
            jitter=spec.jitter.ToTimedelta(),
            overlap=_OVERLAPS.get(spec.overlap, Overlap.UNKNOWN),
            catch_up=_CATCH_UPS.get(spec.catch_up, CatchUp.UNKNOWN),
            catch_up_window=spec.catch_up_window.ToTimedelta() if spec.HasField("catch_up_window") else None,
            note=spec.note,
            declared_by=spec.declared_by,
        ),
        job=read_new(job_pb2.NewJob(id=_NO_ID, template=message.job)),
        paused=message.paused,
        paused_at=moment(message.paused_at) if message.HasField("paused_at") else None,
        created_at=moment(message.created_at),
        next=list(map(moment, message.next)),
        last=moment(message.last) if message.HasField("last") else None,
        buffered=message.buffered,
        shard=message.shard,
    )


def _read_run(message: schedules_pb2.ScheduleRun) -> ScheduleRun:
    return ScheduleRun(
        at=moment(message.at),
        through=moment(message.through) if message.HasField("through") else None,
        cause=read_run_cause(message.cause),
        outcome=_OUTCOMES.get(message.outcome, RunOutcome.UNKNOWN),
        skip_reason=_SKIPS.get(message.skip_reason, SkipReason.UNKNOWN) if message.skip_reason else None,
        job_id=message.job_id,
        job_state=state_of(message.job_state) if message.HasField("job_state") else None,
        decided_at=moment(message.decided_at),
    )


# The numbers are the numbers of the enum values in the proto files. In the proto files, the names have a prefix.
_OVERLAP_NUMBERS: dict[Overlap, schedules_pb2.OverlapPolicy.ValueType] = {
    policy: schedules_pb2.OverlapPolicy.Value(f"OVERLAP_POLICY_{policy.name}")
    for policy in Overlap
    if policy is not Overlap.UNKNOWN
}
_CATCH_UP_NUMBERS: dict[CatchUp, schedules_pb2.CatchUpPolicy.ValueType] = {
    policy: schedules_pb2.CatchUpPolicy.Value(f"CATCH_UP_POLICY_{policy.name}")
    for policy in CatchUp
    if policy is not CatchUp.UNKNOWN
}
_OVERLAPS: dict[int, Overlap] = {number: policy for policy, number in _OVERLAP_NUMBERS.items()}
_CATCH_UPS: dict[int, CatchUp] = {number: policy for policy, number in _CATCH_UP_NUMBERS.items()}
_OUTCOMES: dict[int, RunOutcome] = {
    schedules_pb2.RunOutcome.Value(f"RUN_OUTCOME_{outcome.name}"): outcome
    for outcome in RunOutcome
    if outcome is not RunOutcome.UNKNOWN
}
_SKIPS: dict[int, SkipReason] = {
    schedules_pb2.SkipReason.Value(f"SKIP_REASON_{reason.name}"): reason
    for reason in SkipReason
    if reason is not SkipReason.UNKNOWN
}
