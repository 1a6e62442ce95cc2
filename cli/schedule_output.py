"""How the commands print schedules and their runs: for people, and as JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cli import output, values

if TYPE_CHECKING:
    from windrow.v1 import schedules_pb2


def print_schedule(schedule: schedules_pb2.ScheduleInfo, *, as_json: bool = False) -> None:
    if as_json:
        output.say_json([schedule_json(schedule)])
        return
    from cli.messages import OTHER_TEXTS, bytes_shown, retry_policy, time_shown
    from windrow.v1 import schedules_pb2

    spec, job = schedule.spec, schedule.job
    catch_up = schedules_pb2.CatchUpPolicy.Name(spec.catch_up).removeprefix("CATCH_UP_POLICY_").lower()
    if spec.HasField("catch_up_window"):
        catch_up += f" of {values.exact(spec.catch_up_window.ToTimedelta())}"
    output.facts(
        [
            ("schedule", schedule.name),
            ("org", schedule.org),
            ("state", _state(schedule)),
            ("fires", _fires(spec)),
            ("start", time_shown(spec, "start")),
            ("end", time_shown(spec, "end")),
            ("jitter", values.exact(spec.jitter.ToTimedelta()) if spec.jitter.ToTimedelta() else ""),
            ("overlap", _word(schedules_pb2.OverlapPolicy.Name(spec.overlap), "OVERLAP_POLICY_")),
            ("catch up", catch_up),
            ("next", "\n".join(output.time_text(time.ToDatetime()) for time in schedule.next)),
            ("last", time_shown(schedule, "last")),
            ("buffered", str(schedule.buffered) if schedule.buffered else ""),
            ("note", spec.note),
            ("declared by", spec.declared_by),
            ("queue", job.queue),
            ("kind", job.kind),
            ("priority", str(job.priority)),
            ("max attempts", str(job.max_attempts or "")),
            ("max runtime", values.exact(job.max_runtime.ToTimedelta()) if job.HasField("max_runtime") else ""),
            ("retry", values.retry_text(retry_policy(job.retry)) if job.HasField("retry") else ""),
            *((name.replace("_", " "), getattr(job, name)) for name in OTHER_TEXTS),
            ("attributes", "\n".join(f"{key}={value}" for key, value in sorted(job.attributes.items()))),
            ("payload", bytes_shown(job.payload)),
            ("created", time_shown(schedule, "created_at")),
            ("shard", schedule.shard),
        ]
    )


def note_end(schedule: schedules_pb2.ScheduleInfo) -> None:
    """Warns the user if a schedule that was created or changed has no next time: the year in its timing may be
    wrong."""
    # Do not warn about a paused schedule: the router never sends its next times.
    if schedule.next or schedule.paused:
        return
    end = f", until {output.time_text(schedule.spec.end.ToDatetime())}" if schedule.spec.HasField("end") else ""
    output.note(
        f"schedule {schedule.name!r} has no time to come ({_fires(schedule.spec)}{end}), and stores no job by itself: "
        "give it another with `windrow schedules update`"
    )


def _state(schedule: schedules_pb2.ScheduleInfo) -> str:
    return "paused" if schedule.paused else "open" if schedule.next else "ended"


def _fires(spec: schedules_pb2.ScheduleSpec) -> str:
    match spec.WhichOneof("timing"):
        case "cron":
            return f"{spec.cron} {spec.time_zone}"
        case "interval":
            return f"every {values.exact(spec.interval.ToTimedelta())}"
        case _:
            return f"once, {output.time_text(spec.at.ToDatetime())}"


def _word(name: str, prefix: str) -> str:
    return name.removeprefix(prefix).lower().replace("_", "-")


def schedule_row(schedule: schedules_pb2.ScheduleInfo) -> tuple[str, ...]:
    from cli.messages import time_shown

    upcoming = output.time_text(schedule.next[0].ToDatetime()) if schedule.next else ""
    job = schedule.job
    return (
        *(schedule.name, _state(schedule), _fires(schedule.spec), upcoming, time_shown(schedule, "last")),
        *(job.queue, job.kind),
    )


def run_row(run: schedules_pb2.ScheduleRun) -> tuple[str, ...]:
    from cli.messages import state_name
    from windrow.v1 import job_pb2, schedules_pb2

    when = output.time_text(run.at.ToDatetime())
    if run.HasField("through"):
        when += f" … {output.time_text(run.through.ToDatetime())}"
    outcome = _word(schedules_pb2.RunOutcome.Name(run.outcome), "RUN_OUTCOME_")
    if run.skip_reason:
        outcome += f": {_word(schedules_pb2.SkipReason.Name(run.skip_reason), 'SKIP_REASON_')}"
    state = state_name(run.job_state) if run.HasField("job_state") else ""
    return when, _word(job_pb2.RunCause.Name(run.cause), "RUN_CAUSE_"), outcome, run.job_id, state


def schedule_json(schedule: schedules_pb2.ScheduleInfo) -> dict[str, object]:
    from cli.messages import OTHER_TEXTS, bytes_json, retry_json, time_json
    from windrow.v1 import schedules_pb2

    spec, job = schedule.spec, schedule.job
    window = spec.catch_up_window.ToTimedelta().total_seconds() if spec.HasField("catch_up_window") else None
    return {
        "org": schedule.org,
        "schedule": schedule.name,
        "paused": schedule.paused,
        "paused_at": time_json(schedule, "paused_at"),
        "cron": spec.cron or None,
        "interval_s": spec.interval.ToTimedelta().total_seconds() if spec.HasField("interval") else None,
        "at": time_json(spec, "at"),
        "time_zone": spec.time_zone,
        "start": time_json(spec, "start"),
        "end": time_json(spec, "end"),
        "jitter_s": spec.jitter.ToTimedelta().total_seconds(),
        "overlap": schedules_pb2.OverlapPolicy.Name(spec.overlap).removeprefix("OVERLAP_POLICY_").lower(),
        "catch_up": schedules_pb2.CatchUpPolicy.Name(spec.catch_up).removeprefix("CATCH_UP_POLICY_").lower(),
        "catch_up_window_s": window,
        "note": spec.note or None,
        "declared_by": spec.declared_by or None,
        "next": [time.ToJsonString() for time in schedule.next],
        "last": time_json(schedule, "last"),
        "buffered": schedule.buffered,
        "queue": job.queue,
        "kind": job.kind,
        "priority": job.priority,
        "max_attempts": job.max_attempts or None,
        "max_runtime_s": job.max_runtime.ToTimedelta().total_seconds() if job.HasField("max_runtime") else None,
        "retry": retry_json(job.retry) if job.HasField("retry") else None,
        **{name: getattr(job, name) or None for name in OTHER_TEXTS},
        "attributes": dict(job.attributes),
        **bytes_json("payload", job.payload),
        "created_at": time_json(schedule, "created_at"),
        "shard": schedule.shard,
    }


def run_json(run: schedules_pb2.ScheduleRun) -> dict[str, object]:
    from cli.messages import state_name, time_json
    from windrow.v1 import job_pb2, schedules_pb2

    skipped = schedules_pb2.SkipReason.Name(run.skip_reason).removeprefix("SKIP_REASON_").lower()
    return {
        "at": time_json(run, "at"),
        "through": time_json(run, "through"),
        "cause": job_pb2.RunCause.Name(run.cause).removeprefix("RUN_CAUSE_").lower(),
        "outcome": schedules_pb2.RunOutcome.Name(run.outcome).removeprefix("RUN_OUTCOME_").lower(),
        "skip_reason": skipped if run.skip_reason else None,
        "id": run.job_id or None,
        "state": state_name(run.job_state) if run.HasField("job_state") else None,
        "decided_at": time_json(run, "decided_at"),
    }
