"""Between the messages of proto/windrow/v1 and what the command reads and prints. Pure.

The keys of the JSON objects made here are documented in docs/cli.md, and stay.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from cli import values
from cli.output import time_text
from windrow.v1 import admin_pb2, job_pb2

STATES: Mapping[str, job_pb2.JobState.ValueType] = {
    "scheduled": job_pb2.JOB_STATE_SCHEDULED,
    "ready": job_pb2.JOB_STATE_READY,
    "leased": job_pb2.JOB_STATE_LEASED,
    "succeeded": job_pb2.JOB_STATE_SUCCEEDED,
    "dead": job_pb2.JOB_STATE_DEAD,
    "cancelled": job_pb2.JOB_STATE_CANCELLED,
}
_SHOWN_MAX = 2000
_STATE_NAMES = {number: name for name, number in STATES.items()}
_OUTCOMES = {
    job_pb2.ATTEMPT_OUTCOME_ACKED: "acked",
    job_pb2.ATTEMPT_OUTCOME_NACKED: "nacked",
    job_pb2.ATTEMPT_OUTCOME_EXPIRED: "expired",
    job_pb2.ATTEMPT_OUTCOME_RELEASED: "released",
}
ANSWERS = {
    job_pb2.JOB_ANSWER_OK: "ok",
    job_pb2.JOB_ANSWER_STALE: "stale",
    job_pb2.JOB_ANSWER_NOT_FOUND: "not_found",
}

RESTORE_ANSWERS = {
    admin_pb2.RESTORE_REFUSAL_UNSPECIFIED: "ok",
    admin_pb2.RESTORE_REFUSAL_NOT_FOUND: "not_found",
    admin_pb2.RESTORE_REFUSAL_LIVE: "live",
    admin_pb2.RESTORE_REFUSAL_NEW_ID: "bad_id",
}


def duration(value: timedelta) -> Duration:
    message = Duration()
    message.FromTimedelta(value)
    return message


def timestamp(value: datetime) -> Timestamp:
    message = Timestamp()
    message.FromDatetime(value)
    return message


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
    grows = message.exponential
    return values.Retry(
        first=grows.initial_delay.ToTimedelta(),
        last=grows.max_delay.ToTimedelta(),
        multiplier=grows.multiplier,
        jitter=grows.jitter,
    )


def state_name(state: job_pb2.JobState.ValueType) -> str:
    return _STATE_NAMES.get(state, str(state))


def outcome_name(outcome: job_pb2.AttemptOutcome.ValueType) -> str:
    return _OUTCOMES.get(outcome, str(outcome))


def time_shown(message: Any, field: str) -> str:
    """A timestamp field for the eye; empty where it is not set."""
    return time_text(getattr(message, field).ToDatetime()) if message.HasField(field) else ""


def time_json(message: Any, field: str) -> str | None:
    return getattr(message, field).ToJsonString() if message.HasField(field) else None


def bytes_json(name: str, data: bytes) -> dict[str, str | None]:
    """Bytes as text; what is no text as base64, below another key."""
    try:
        return {name: data.decode()}
    except UnicodeDecodeError:
        return {name: None, f"{name}_base64": values.lease_text(data)}


def bytes_shown(data: bytes) -> str:
    """Bytes for the eye: as text where they are, and not more than a screenful."""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return f"{len(data):,} bytes that are no text (--json has them all)"
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


def job_json(job: job_pb2.Job, *, payloads: bool) -> dict[str, object]:
    document: dict[str, object] = {
        "id": job.id,
        "queue": job.queue,
        "kind": job.kind,
        "state": state_name(job.state),
        "priority": job.priority,
        "attempt": job.attempt,
        "max_attempts": job.max_attempts,
        "enqueued_at": time_json(job, "enqueued_at"),
        "run_at": time_json(job, "run_at"),
        "expires_at": time_json(job, "expires_at"),
        "lease_deadline": time_json(job, "lease_deadline"),
        "finished_at": time_json(job, "finished_at"),
        "worker": job.worker or None,
        "reason": job.reason or None,
        "dedup_key": job.dedup_key or None,
        "attributes": dict(job.attributes),
        "retry": retry_json(job.retry),
        "attempts": [
            {
                "attempt": attempt.attempt,
                "outcome": outcome_name(attempt.outcome),
                "worker": attempt.worker,
                "leased_at": time_json(attempt, "leased_at"),
                "ended_at": time_json(attempt, "ended_at"),
                "error": attempt.error or None,
            }
            for attempt in job.attempts
        ],
        "shard": job.shard,
    }
    if payloads:
        document |= bytes_json("payload", job.payload)
        document |= bytes_json("result", job.result)
    return document
