"""Converts between the messages of proto/windrow/v1 and the command's input and output. No I/O.

docs/cli.md documents the keys of these JSON objects; they must not change.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime, timedelta
from enum import Enum
from typing import Any

import typer
from google.protobuf.descriptor import EnumDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.field_mask_pb2 import FieldMask
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from cli import values
from cli.output import time_text, visible
from windrow.causes import Figure, read_causes
from windrow.failures import Failure
from windrow.v1 import admin_pb2, cause_pb2, job_pb2

_SHOWN_MAX = 2000


def _words(enum: EnumDescriptor, prefix: str) -> dict[int, str]:
    """Returns the values of an enum as the command writes them, such as "ready" for JOB_STATE_READY."""
    return {value.number: value.name.removeprefix(prefix).lower() for value in enum.values if value.number}


_STATES = _words(job_pb2.JobState.DESCRIPTOR, "JOB_STATE_")
_OUTCOMES = _words(job_pb2.AttemptOutcome.DESCRIPTOR, "ATTEMPT_OUTCOME_")
ANSWERS = _words(job_pb2.JobAnswer.DESCRIPTOR, "JOB_ANSWER_")
_RESTORE_REFUSALS = {
    admin_pb2.RESTORE_REFUSAL_NOT_FOUND: "not_found",
    admin_pb2.RESTORE_REFUSAL_LIVE: "live",
    admin_pb2.RESTORE_REFUSAL_BAD_NEW_ID: "bad_id",
    admin_pb2.RESTORE_REFUSAL_SIGNAL: "signal",
}


def restore_answer(result: admin_pb2.RestoreResult) -> str:
    return "ok" if result.HasField("restored") else _RESTORE_REFUSALS[result.refusal]


def duration(value: timedelta) -> Duration:
    message = Duration()
    message.FromTimedelta(value)
    return message


def timestamp(value: datetime) -> Timestamp:
    message = Timestamp()
    message.FromDatetime(value)
    return message


def update_mask(changed: Message, reset: Iterable[str]) -> FieldMask:
    """Returns a mask that names the fields that `changed` has and the fields to reset. The router resets a field that
    is in the mask but not in the message. Raises BadParameter."""
    given = [field.name for field, _ in changed.ListFields()]
    for name in reset:
        if name in given:
            raise typer.BadParameter(f"{name} is given a value and reset too", param_hint="'--reset'")
    return FieldMask(paths=[*given, *reset])


def retry_message(policy: values.Retry) -> job_pb2.RetryPolicy:
    if policy.last is None:
        return job_pb2.RetryPolicy(fixed=job_pb2.FixedRetry(delay=duration(policy.first)))
    return job_pb2.RetryPolicy(
        exponential=job_pb2.ExponentialRetry(
            initial_delay=duration(policy.first),
            multiplier=policy.multiplier,
            max_delay=duration(policy.last),
            jitter=policy.jitter,
        )
    )


def retry_policy(message: job_pb2.RetryPolicy) -> values.Retry:
    if message.WhichOneof("policy") == "fixed":
        return values.Retry(first=message.fixed.delay.ToTimedelta())
    policy = message.exponential
    return values.Retry(
        first=policy.initial_delay.ToTimedelta(),
        last=policy.max_delay.ToTimedelta(),
        multiplier=policy.multiplier,
        jitter=policy.jitter,
    )


def no_queues(org: str) -> str:
    """Returns the text that a command prints if the org has no queues. The user may have mistyped the org's name."""
    return f"org {org!r} has no queues (is the name right?); the first job of a queue creates it"


def state_name(state: job_pb2.JobState.ValueType) -> str:
    return _STATES.get(state, str(state))


def outcome_name(outcome: job_pb2.AttemptOutcome.ValueType) -> str:
    return _OUTCOMES.get(outcome, str(outcome))


def time_shown(message: Any, field: str) -> str:
    """Formats a timestamp field for people; empty if the field is not set."""
    return time_text(getattr(message, field).ToDatetime()) if message.HasField(field) else ""


def time_json(message: Any, field: str) -> str | None:
    return getattr(message, field).ToJsonString() if message.HasField(field) else None


def causes_shown(causes: Iterable[cause_pb2.Cause], *, of_queue: bool = False) -> str:
    """Returns a line for each cause of an ExplainJob or, with `of_queue`, of an ExplainQueue."""
    return "\n".join(map(str, read_causes(causes, of_queue=of_queue)))


def causes_json(causes: Iterable[cause_pb2.Cause]) -> list[dict[str, object]]:
    """Returns each cause with its name and its figures."""
    return [
        {"cause": cause.name} | dict(_figure_json(name, figure) for name, figure in cause.figures.items())
        for cause in read_causes(causes)
    ]


def _figure_json(name: str, figure: Figure) -> tuple[str, object]:
    match figure:
        case datetime():
            stamp = Timestamp()
            stamp.FromDatetime(figure)
            return name, stamp.ToJsonString()
        case timedelta():
            return f"{name}_s", figure.total_seconds()
        case Enum():
            return name, figure.value
        case Failure():
            return name, {"type": figure.type, "message": figure.message, "permanent": figure.permanent}
        case _:
            return name, figure


def bytes_json(name: str, data: bytes) -> dict[str, str | None]:
    """Returns an object with the bytes as text under the key `name`. If the bytes are not UTF-8, the object has them as
    base64 under another key."""
    try:
        return {name: data.decode()}
    except UnicodeDecodeError:
        return {name: None, f"{name}_base64": values.lease_text(data)}


def bytes_shown(data: bytes) -> str:
    """Formats bytes for people: as text if they are UTF-8. Cuts off text that would not fit on a screen."""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return f"{len(data):,} bytes that are not text (--json has them all)"
    if len(text) <= _SHOWN_MAX:
        return text
    return f"{text[:_SHOWN_MAX]}… ({len(data):,} bytes; --json has them all)"


def retry_json(message: job_pb2.RetryPolicy) -> dict[str, object]:
    policy = retry_policy(message)
    if policy.last is None:
        return {"policy": "fixed", "delay_s": policy.first.total_seconds()}
    return {
        "policy": "exponential",
        "initial_delay_s": policy.first.total_seconds(),
        "max_delay_s": policy.last.total_seconds(),
        "multiplier": policy.multiplier,
        "jitter": policy.jitter,
    }


def _text_json(value: str | None) -> str | None:
    return value or None


def _moment_json(value: Timestamp | datetime | None) -> str | None:
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat().replace("+00:00", "Z")
    return None if value is None else value.ToJsonString()


def _attributes_json(value: Mapping[str, str] | str | None) -> dict[str, str]:
    # An exported job has its attributes as JSON.
    return dict(json.loads(value) if isinstance(value, str) else value or {})


def _attempt_json(attempt: job_pb2.Attempt) -> dict[str, object]:
    return {
        "attempt": attempt.attempt,
        "outcome": outcome_name(attempt.outcome),
        "worker": attempt.worker,
        "leased_at": time_json(attempt, "leased_at"),
        "ended_at": time_json(attempt, "ended_at"),
        "failure": _failure_json(attempt.failure) if attempt.HasField("failure") else None,
        "log": attempt.log or None,
    }


def _failure_json(failure: job_pb2.Failure) -> dict[str, object]:
    return {
        "type": failure.type or None,
        "message": failure.message or None,
        "stack": failure.stack or None,
        "permanent": failure.permanent,
    }


def failure_text(failure: job_pb2.Failure) -> str:
    """Returns the type and the message of a failure."""
    return ": ".join(filter(None, (failure.type, failure.message)))


def last_failure(job: job_pb2.Job) -> str:
    """Returns the first line of the failure of a job's last attempt, which summarises the failure; "" if there is
    none."""
    return first_line(failure_text(job.attempts[-1].failure)) if job.attempts else ""


def first_line(text: str) -> str:
    return next(iter(text.strip().splitlines()), "")


def _progress_json(progress: job_pb2.Progress | str | None) -> dict[str, object] | None:
    """Returns the progress of a job as JSON values. For an exported job, `progress` is a text: the JSON that the shard
    stores, without empty fields."""
    if progress is None:
        return None
    stored = json.loads(progress) if isinstance(progress, str) else _fields(progress)
    return {"done": stored.get("done", 0), "total": stored.get("total") or None, "note": stored.get("note") or None}


def _workflow_json(of: job_pb2.WorkflowNode | None) -> dict[str, object] | None:
    return None if of is None else {"id": of.workflow_id, "node": of.node}


def _scheduled_run_json(run: job_pb2.ScheduledRun | str | None) -> dict[str, object] | None:
    """Returns, as JSON values, the run of a schedule that has stored a job, or None if a producer enqueued the job. For
    an exported job, `run` is a text: the JSON that the shard stores, with times in microseconds."""
    if run is None:
        return None
    if isinstance(run, str):
        stored = json.loads(run)
        cause, schedule = stored["cause"], stored["schedule"]
        at, previous = (_stamp(stored.get(name)) for name in ("at", "previous"))
    else:
        cause, schedule = job_pb2.RunCause.Name(run.cause).removeprefix("RUN_CAUSE_").lower(), run.schedule
        at, previous = run.at, run.previous_at if run.HasField("previous_at") else None
    times = {"at": _moment_json(at), "previous_at": _moment_json(previous)}
    return {"schedule": schedule, **times, "cause": cause}


def _stamp(us: int | None) -> Timestamp | None:
    return None if us is None else Timestamp(seconds=us // 1_000_000, nanos=us % 1_000_000 * 1000)


# The keys of a job's JSON, in their order, each with a function that converts the field. None: the field is written as
# it is.
_JOB_JSON: Mapping[str, Callable[[Any], object] | None] = {
    "id": None,
    "org": None,
    "queue": None,
    "kind": None,
    "state": lambda state: state if isinstance(state, str) else state_name(state),
    "priority": None,
    "attempt": None,
    "max_attempts": None,
    "enqueued_at": _moment_json,
    "run_at": _moment_json,
    "expires_at": _moment_json,
    "lease_deadline": _moment_json,
    "leased_at": _moment_json,
    "finished_at": _moment_json,
    "worker": _text_json,
    "reason": _text_json,
    "dedup_key": _text_json,
    "dedup_while_live": None,
    "live_key": _text_json,
    "attributes": _attributes_json,
    "retry": retry_json,
    "progress": _progress_json,
    "log": _text_json,
    "scheduled_run": _scheduled_run_json,
    "workflow": _workflow_json,
    "workflow_node": _text_json,
    "attempts": lambda attempts: list(map(_attempt_json, attempts)),
    "history": lambda history: json.loads(history or "[]"),
    "shard": None,
}
# The text fields of a job's template that need no entry in _JOB_JSON, such as `group`.
OTHER_TEXTS = tuple(
    field.name
    for field in job_pb2.JobTemplate.DESCRIPTOR.fields
    if field.type == field.TYPE_STRING and field.name not in _JOB_JSON
)


def job_json(job: job_pb2.LeasedJob | job_pb2.Job | Mapping[str, Any], *, payloads: bool) -> dict[str, object]:
    """Returns the JSON object of a leased, stored or exported job. The object has a key only for the fields that this
    form of a job has."""
    fields = job if isinstance(job, Mapping) else _fields(job)
    document = {
        name: fields[name] if write is None else write(fields[name])
        for name, write in _JOB_JSON.items()
        if name in fields
    }
    if "max_runtime" in fields:
        span = fields["max_runtime"]
        document["max_runtime_s"] = span and span.ToTimedelta().total_seconds()
    elif "max_runtime_us" in fields:
        span_us = fields["max_runtime_us"]
        document["max_runtime_s"] = span_us and span_us / 1_000_000
    # In an exported job the group has the name of the shard's column, group_key.
    texts = {"group": fields["group_key"], **fields} if "group_key" in fields else fields
    document |= {name: _text_json(texts[name]) for name in OTHER_TEXTS if name in texts}
    if payloads:
        for name in ("payload", "result", "checkpoint"):
            if name in fields:
                document |= bytes_json(name, fields[name] or b"")
    return document


def job_facts(job: job_pb2.LeasedJob | job_pb2.Job) -> list[tuple[str, str]]:
    """Returns a leased or stored job as names and values for people. Fields that the job does not have are empty."""
    fields = _fields(job)

    def shown(name: str, show: Callable[[Any], str] = str) -> str:
        return "" if fields.get(name) is None else show(fields[name])

    def time(stamp: Timestamp) -> str:
        return time_text(stamp.ToDatetime())

    return [
        ("lease", shown("lease", values.lease_text)),
        ("state", shown("state", state_name)),
        ("reason", shown("reason")),
        ("queue", job.queue),
        ("kind", job.kind),
        ("priority", str(job.priority)),
        ("attempt", f"{job.attempt} of {job.max_attempts}"),
        ("max runtime", shown("max_runtime", lambda span: values.exact(span.ToTimedelta()))),
        ("retry", shown("retry", lambda retry: values.retry_text(retry_policy(retry)))),
        ("enqueued", shown("enqueued_at", time)),
        ("due", shown("run_at", time)),
        ("expires", shown("expires_at", time)),
        ("leased until", shown("lease_deadline", time)),
        ("worker", shown("worker")),
        ("progress", shown("progress", _progress_text)),
        ("log", shown("log")),
        ("finished", shown("finished_at", time)),
        ("schedule", shown("scheduled_run", lambda run: f"{run.schedule}, run of {time(run.at)}")),
        ("workflow", shown("workflow", lambda of: f"{of.workflow_id}, node {of.node}")),
        *((name.replace("_", " "), shown(name)) for name in OTHER_TEXTS),
        ("dedup key", shown("dedup_key") + (" (while live)" if fields.get("dedup_while_live") else "")),
        ("attributes", "\n".join(f"{key}={value}" for key, value in sorted(job.attributes.items()))),
        ("shard", shown("shard")),
        ("payload", bytes_shown(job.payload)),
        ("result", shown("result", bytes_shown)),
        ("checkpoint", shown("checkpoint", bytes_shown)),
    ]


def watch_line(job: job_pb2.Job) -> str:
    """Returns the line that `jobs watch` shows of a job: its state, with details."""
    state = state_name(job.state)
    facts = {
        "attempt": f"{job.attempt} of {job.max_attempts}",
        "due": time_shown(job, "run_at") if state == "scheduled" else "",
        "worker": job.worker if state == "leased" else "",
        "progress": _progress_text(job.progress) if job.HasField("progress") else "",
        "reason": job.reason,
        "failure": "" if state == "succeeded" else last_failure(job),
    }
    return "  ".join([state, *(f"{name} {value}" for name, value in facts.items() if value)])


def _progress_text(progress: job_pb2.Progress) -> str:
    done = f"{progress.done:,} of {progress.total:,}" if progress.total else f"{progress.done:,}"
    # Show the note on one line, because a second line would look like a part of the answer.
    return f"{done}: {visible(progress.note)}" if progress.note else done


def _fields(message: Message) -> dict[str, Any]:
    """Returns all fields by name. A message field that is not set is None."""
    return {
        field.name: None if field.has_presence and not message.HasField(field.name) else getattr(message, field.name)
        for field in message.DESCRIPTOR.fields
    }
