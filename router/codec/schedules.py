"""Converts between the messages of schedules.proto and the records of the shard, and checks the rules that
protovalidate cannot check. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import cast

from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from router.codec import convert
from router.codec.convert import ALL_FIELDS, RUN_CAUSES, duration, micros, moment, timestamp
from router.codec.status import InvalidRequest, Violation
from router.codec.validate import violations_of
from shard.schedule import (
    TEMPLATE_COLUMNS,
    CatchUp,
    Overlap,
    Run,
    RunOutcome,
    ScheduleRecord,
    ScheduleSpec,
    SkipReason,
    Template,
    Timing,
)
from shard.schedules import calendar
from shard.vocabulary import JOB_CONTENT, SPARSE_COLUMNS, JobId, Micros, OrgId, ShardName
from windrow.v1 import job_pb2, schedules_pb2

PAYLOAD_BYTES_MAX = 65_536
_PATHS_MAX = 100
_TIMINGS = ("cron", "interval", "at")
_OVERLAPS = {policy: schedules_pb2.OverlapPolicy.Value(f"OVERLAP_POLICY_{policy.name}") for policy in Overlap}
_CATCH_UPS = {policy: schedules_pb2.CatchUpPolicy.Value(f"CATCH_UP_POLICY_{policy.name}") for policy in CatchUp}
_OUTCOMES = {outcome: schedules_pb2.RunOutcome.Value(f"RUN_OUTCOME_{outcome.name}") for outcome in RunOutcome}
_SKIPS = {reason: schedules_pb2.SkipReason.Value(f"SKIP_REASON_{reason.name}") for reason in SkipReason}
_BY_NUMBER: Mapping[int, Overlap] = {number: policy for policy, number in _OVERLAPS.items()}
_CATCH_UP_BY_NUMBER: Mapping[int, CatchUp] = {number: policy for policy, number in _CATCH_UPS.items()}


# ── In ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


def spec(message: schedules_pb2.ScheduleSpec) -> ScheduleSpec:
    """Returns a spec with its defaults filled in."""
    which = message.WhichOneof("timing")
    catch_up = _CATCH_UP_BY_NUMBER.get(message.catch_up, CatchUp.LATEST)
    return ScheduleSpec(
        timing=Timing(
            cron=message.cron if which == "cron" else None,
            interval_us=micros(message.interval) if which == "interval" else None,
            at=moment(message.at) if which == "at" else None,
            zone=message.time_zone if message.HasField("time_zone") else "UTC",
            start=moment(message.start) if message.HasField("start") else None,
            end=moment(message.end) if message.HasField("end") else None,
            jitter_us=micros(message.jitter),
        ),
        overlap=overlap(message.overlap, Overlap.SKIP),
        catch_up=catch_up,
        catch_up_window_us=micros(message.catch_up_window) if catch_up is CatchUp.WINDOW else None,
        note=message.note,
        declared_by=message.declared_by,
    )


def overlap(number: int, default: Overlap) -> Overlap:
    return _BY_NUMBER.get(number, default)


def template(job: job_pb2.JobTemplate) -> Template:
    """Returns the columns that say what each job of a schedule is like."""
    jobs = convert.new_jobs(OrgId(""), [job_pb2.NewJob(template=job)], trace=None)
    arrays = {"queue": "queues", "priority": "priorities", "max_attempts": "max_attempts", **JOB_CONTENT}
    return {
        column: getattr(jobs, arrays[column]).get(0)
        if arrays[column] in SPARSE_COLUMNS
        else getattr(jobs, arrays[column])[0]
        for column in TEMPLATE_COLUMNS
    }


def check_create(request: schedules_pb2.CreateScheduleRequest) -> None:
    """Raises InvalidRequest with every violation."""
    of_spec = _spec_violations(request.spec) if request.HasField("spec") else ()
    _refuse([*violations_of(request), *_payload_violations(request.job), *of_spec])


def check_update(request: schedules_pb2.UpdateScheduleRequest) -> None:
    """Raises InvalidRequest with every violation."""
    violations = [*violations_of(request), *_payload_violations(request.job)]
    known = [field.name for field in schedules_pb2.ScheduleSpec.DESCRIPTOR.fields]
    paths = request.update_mask.paths
    for at, path in enumerate(paths[:_PATHS_MAX]):
        if path not in known and path != ALL_FIELDS:
            names = ", ".join(known)
            violations.append(Violation(f"update_mask.paths[{at}]", f"must be one of {names} or *, not {path!r}"))
        elif path in _TIMINGS and request.spec.WhichOneof("timing") != path:
            why = f"names {path}, which spec does not have: a schedule needs one of {', '.join(_TIMINGS)}"
            violations.append(Violation(f"update_mask.paths[{at}]", why))
    if len(paths) > _PATHS_MAX:
        violations.append(Violation("update_mask.paths", f"must have at most {_PATHS_MAX} items"))
    _refuse(violations)


def check_preview(request: schedules_pb2.PreviewScheduleRequest) -> None:
    """Raises InvalidRequest with every violation."""
    violations = violations_of(request)
    if request.WhichOneof("of") == "spec":
        violations += _spec_violations(request.spec)
    _refuse(violations)


def check_backfill(request: schedules_pb2.BackfillScheduleRequest) -> None:
    """Raises InvalidRequest with every violation."""
    violations = violations_of(request)
    if not violations and micros(request.end) <= micros(request.begin):
        violations.append(Violation("end", "must be after begin"))
    _refuse(violations)


def change(
    request: schedules_pb2.UpdateScheduleRequest,
) -> Callable[[ScheduleSpec, Template], tuple[ScheduleSpec, Template]]:
    """Returns a function that makes the changes of a checked request to a schedule."""

    def changed(before: ScheduleSpec, had: Template) -> tuple[ScheduleSpec, Template]:
        merged = cast("Message", spec_message(before))
        paths = set(request.update_mask.paths)
        given = cast("Message", request.spec)
        for field in merged.DESCRIPTOR.fields:
            has = given.HasField(field.name)
            if has if not paths else paths & {field.name, ALL_FIELDS}:
                if has:
                    part = schedules_pb2.ScheduleSpec()
                    value = getattr(given, field.name)
                    if field.message_type is None:
                        setattr(part, field.name, value)
                    else:
                        getattr(part, field.name).CopyFrom(value)
                    merged.ClearField(field.name)
                    merged.MergeFrom(part)
                elif field.name not in _TIMINGS:
                    merged.ClearField(field.name)
        return spec(cast("schedules_pb2.ScheduleSpec", merged)), template(request.job) if request.HasField(
            "job"
        ) else had

    return changed


def _refuse(violations: Sequence[Violation]) -> None:
    if violations:
        raise InvalidRequest(violations)


def _payload_violations(job: job_pb2.JobTemplate) -> Iterable[Violation]:
    if PAYLOAD_BYTES_MAX < len(job.payload) <= 1_048_576:
        yield Violation(
            "job.payload", f"must be at most {PAYLOAD_BYTES_MAX:,} bytes in a schedule, not {len(job.payload):,}"
        )


def _spec_violations(message: schedules_pb2.ScheduleSpec) -> Iterable[Violation]:
    """Yields what is wrong with a spec according to the calendar. Yields nothing if protovalidate refuses the spec
    anyway."""
    if violations_of(message):
        return
    for fault in calendar.faults(spec(message).timing):
        yield Violation(f"spec.{fault.field}", fault.description)
    if message.catch_up == schedules_pb2.CATCH_UP_POLICY_WINDOW and not message.HasField("catch_up_window"):
        yield Violation("spec.catch_up_window", "must be set for the policy WINDOW")


# ── Out ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def spec_message(stored: ScheduleSpec) -> schedules_pb2.ScheduleSpec:
    timing = stored.timing
    message = schedules_pb2.ScheduleSpec(
        time_zone=timing.zone,
        jitter=duration(timing.jitter_us),
        overlap=_OVERLAPS[stored.overlap],
        catch_up=_CATCH_UPS[stored.catch_up],
        note=stored.note,
        declared_by=stored.declared_by,
    )
    if timing.cron is not None:
        message.cron = timing.cron
    if timing.interval_us is not None:
        message.interval.CopyFrom(duration(timing.interval_us))
    for name, value in (("at", timing.at), ("start", timing.start), ("end", timing.end)):
        if value is not None:
            getattr(message, name).CopyFrom(timestamp(value))
    if stored.catch_up_window_us is not None:
        message.catch_up_window.CopyFrom(duration(stored.catch_up_window_us))
    return message


def info(schedule: ScheduleRecord, upcoming: Sequence[Micros], shard: ShardName) -> schedules_pb2.ScheduleInfo:
    message = schedules_pb2.ScheduleInfo(
        org=schedule.org,
        name=schedule.name,
        spec=spec_message(schedule.spec),
        job=convert.template_message(schedule.template),
        paused=schedule.paused_at is not None,
        created_at=timestamp(schedule.created_at),
        next=map(timestamp, upcoming),
        buffered=schedule.buffered,
        shard=shard,
    )
    if schedule.paused_at is not None:
        message.paused_at.CopyFrom(timestamp(schedule.paused_at))
    if schedule.last_at is not None:
        message.last.CopyFrom(timestamp(schedule.last_at))
    return message


def run_message(run: Run, states: Mapping[JobId, job_pb2.JobState.ValueType]) -> schedules_pb2.ScheduleRun:
    message = schedules_pb2.ScheduleRun(
        at=timestamp(run.at),
        cause=RUN_CAUSES[run.cause],
        outcome=_OUTCOMES[run.outcome],
        job_id=run.job_id or "",
        decided_at=timestamp(run.decided_at),
    )
    if run.through is not None:
        message.through.CopyFrom(timestamp(run.through))
    if run.skipped_for is not None:
        message.skip_reason = _SKIPS[run.skipped_for]
    if run.job_id is not None and run.job_id in states:
        message.job_state = states[run.job_id]
    return message


def times(instants: Iterable[Micros]) -> list[Timestamp]:
    return [timestamp(at) for at in instants]
