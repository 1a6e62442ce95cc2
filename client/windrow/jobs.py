"""Jobs as the user sees them, and as they go over the wire. Pure.

Sizes and limits are the router's to check, and the contract's to state (windrow/v1/job.proto); here only what has no
form on the wire is refused.
"""

from __future__ import annotations

import asyncio
import enum
import json
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from datetime import UTC, datetime
from typing import Any, TypedDict, cast

from windrow.errors import InvalidJob, Span, Violation, WindrowError
from windrow.ids import uuid7
from windrow.payloads import Payload, duration, encode, moment, timestamp
from windrow.v1 import job_pb2, queue_pb2

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class JobState(enum.Enum):
    """Where a job stands."""

    SCHEDULED = "scheduled"
    READY = "ready"
    LEASED = "leased"
    SUCCEEDED = "succeeded"
    DEAD = "dead"
    CANCELLED = "cancelled"
    # A newer router speaks of a state that this release does not know.
    UNKNOWN = "unknown"


class AttemptOutcome(enum.Enum):
    """How one attempt ended."""

    ACKED = "acked"
    NACKED = "nacked"
    EXPIRED = "expired"
    RELEASED = "released"
    UNKNOWN = "unknown"


class Answer(enum.Enum):
    """What became of one job named in a call."""

    OK = "ok"
    # The lease has ended (or, for cancel_jobs, the job has finished): nothing was changed.
    STALE = "stale"
    # No such job in this org: nothing was changed.
    NOT_FOUND = "not_found"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class FixedRetry:
    """The same delay before every retry: FixedRetry(30)."""

    delay: Span


@dataclass(frozen=True, slots=True, kw_only=True)
class ExponentialRetry:
    """delay = min(max_delay, initial_delay × multiplier^(attempt − 1)), then × (1 − jitter … 1 + jitter) at random."""

    initial_delay: Span = 1.0
    multiplier: float = 2.0
    max_delay: Span = 3600.0
    # Share of the delay that is random, 0 to 1.
    jitter: float = 0.1


RetryPolicy = FixedRetry | ExponentialRetry


class JobOptions(TypedDict, total=False):
    """What may be said of a new job besides its queue, kind and payload: the other fields of NewJob."""

    attributes: Mapping[str, str] | None
    priority: int
    run_at: datetime | None
    delay: Span | None
    expires_at: datetime | None
    max_attempts: int
    retry: RetryPolicy | None
    dedup_key: str
    dedup_window: Span | None
    id: str


@dataclass(frozen=True, slots=True)
class NewJob:
    """A job to be stored. Its id is made with it: enqueueing the same NewJob again stores nothing new."""

    queue: str
    kind: str
    # At most 1 MiB.
    payload: Payload = b""
    _: KW_ONLY
    # At most 32 labels, readable without the payload.
    attributes: Mapping[str, str] | None = None
    # 1 (first) to 9 (last); 0: 5.
    priority: int = 0
    # When it may run: at a time (with a zone), or so long after it was stored; neither: now.
    run_at: datetime | None = None
    delay: Span | None = None
    # Not leased by then, it is cancelled instead of run.
    expires_at: datetime | None = None
    # 1 to 1,000; 0: as the queue is configured, else 20.
    max_attempts: int = 0
    # None: as the queue is configured, else exponential from 1 s to 1 h.
    retry: RetryPolicy | None = None
    # Within dedup_window (1 s to 30 days; None: 1 day) a second job of the queue with this key stores nothing.
    dedup_key: str = ""
    dedup_window: Span | None = None
    # A UUIDv7; older than 7 days it is refused.
    id: str = field(default_factory=uuid7)


@dataclass(frozen=True, slots=True, kw_only=True)
class Enqueued:
    """What became of a new job. `duplicate`: its id or dedup key was known, nothing was stored, `id` is the first's."""

    id: str
    duplicate: bool = False
    # Only from an independent enqueue_many: why this job was not stored.
    error: WindrowError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A leased job: what a consumer works on. Every field has a default, so that a test of a handler can make one."""

    # Names this lease to ack, nack, extend and release. Opaque.
    lease: bytes = b""
    id: str = ""
    queue: str = ""
    kind: str = ""
    payload: bytes = b""
    attributes: Mapping[str, str] = field(default_factory=dict[str, str])
    priority: int = 5
    # 1 on the first run.
    attempt: int = 1
    max_attempts: int = 20
    enqueued_at: datetime = _EPOCH
    # When it became due.
    run_at: datetime = _EPOCH
    traceparent: str = ""
    tracestate: str = ""
    # Set by a Worker once the lease has ended under a running handler: another worker may have the job by now. A plain
    # `def` handler that runs long asks `job.lost.is_set()` between its steps.
    lost: asyncio.Event = field(default_factory=asyncio.Event, repr=False, compare=False)

    def json(self) -> Any:
        """The payload read as JSON. Raises ValueError."""
        return json.loads(self.payload)

    def text(self) -> str:
        """The payload read as UTF-8. Raises ValueError."""
        return self.payload.decode()


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One past lease of a job."""

    attempt: int
    worker: str
    leased_at: datetime
    ended_at: datetime
    outcome: AttemptOutcome
    # What the nack said.
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    """A job as the books have it, wherever it is in its life."""

    id: str
    queue: str
    kind: str
    state: JobState
    # None: they were not asked for. A result that nobody gave is empty.
    payload: bytes | None
    result: bytes | None
    attributes: Mapping[str, str]
    priority: int
    # Leases counted so far.
    attempt: int
    max_attempts: int
    retry: RetryPolicy | None
    dedup_key: str
    enqueued_at: datetime
    run_at: datetime
    expires_at: datetime | None
    lease_deadline: datetime | None
    finished_at: datetime | None
    # Who holds, or last held, the lease.
    worker: str
    # Why it is dead or cancelled.
    reason: str
    # Ended attempts, oldest first; the newest 50 are kept.
    attempts: Sequence[Attempt]
    shard: str


# Of a new job, by what protobuf takes there.
_TEXTS = frozenset({"queue", "kind", "dedup_key", "id"})
_NUMBERS = frozenset({"priority", "max_attempts"})
_SHOWN_CHARS_MAX = 100

_STATES: dict[int, JobState] = {
    job_pb2.JOB_STATE_SCHEDULED: JobState.SCHEDULED,
    job_pb2.JOB_STATE_READY: JobState.READY,
    job_pb2.JOB_STATE_LEASED: JobState.LEASED,
    job_pb2.JOB_STATE_SUCCEEDED: JobState.SUCCEEDED,
    job_pb2.JOB_STATE_DEAD: JobState.DEAD,
    job_pb2.JOB_STATE_CANCELLED: JobState.CANCELLED,
}
_OUTCOMES: dict[int, AttemptOutcome] = {
    job_pb2.ATTEMPT_OUTCOME_ACKED: AttemptOutcome.ACKED,
    job_pb2.ATTEMPT_OUTCOME_NACKED: AttemptOutcome.NACKED,
    job_pb2.ATTEMPT_OUTCOME_EXPIRED: AttemptOutcome.EXPIRED,
    job_pb2.ATTEMPT_OUTCOME_RELEASED: AttemptOutcome.RELEASED,
}
_ANSWERS: dict[int, Answer] = {
    job_pb2.JOB_ANSWER_OK: Answer.OK,
    job_pb2.JOB_ANSWER_STALE: Answer.STALE,
    job_pb2.JOB_ANSWER_NOT_FOUND: Answer.NOT_FOUND,
}


def answers(values: Sequence[int]) -> list[Answer]:
    return [_ANSWERS.get(value, Answer.UNKNOWN) for value in values]


def enqueue_request(org: str, jobs: Sequence[NewJob], *, independent: bool = False) -> queue_pb2.EnqueueRequest:
    """Raises InvalidJob, with the path of what has no form on the wire."""
    request = queue_pb2.EnqueueRequest(org=org, independent=independent)
    add = request.jobs.add
    for at, job in enumerate(jobs):
        try:
            write(job, add())
        except (TypeError, ValueError) as error:
            raise _invalid(job, at, error) from error
    return request


def new_message(job: NewJob) -> job_pb2.NewJob:
    """Raises InvalidJob, as if for a request of this job alone."""
    message = job_pb2.NewJob()
    try:
        write(job, message)
    except (TypeError, ValueError) as error:
        raise _invalid(job, 0, error) from error
    return message


def write(job: NewJob, message: job_pb2.NewJob) -> None:
    """Fills an empty message. Raises TypeError or ValueError."""
    if not job.id:
        raise ValueError("id is empty; leave it out and one is made")
    message.id = job.id
    message.queue = job.queue
    message.kind = job.kind
    payload = job.payload
    message.payload = payload if type(payload) is bytes else encode(payload)
    if job.attributes:
        message.attributes.update(job.attributes)
    if job.priority:
        message.priority = job.priority
    if job.run_at is not None:
        if job.delay is not None:
            raise ValueError("run_at and delay are both given; one says when")
        message.run_at.CopyFrom(timestamp(job.run_at))
    elif job.delay is not None:
        message.delay.CopyFrom(duration(job.delay))
    if job.expires_at is not None:
        message.expires_at.CopyFrom(timestamp(job.expires_at))
    if job.max_attempts:
        message.max_attempts = job.max_attempts
    if job.retry is not None:
        message.retry.CopyFrom(_retry(job.retry))
    if job.dedup_key:
        message.dedup_key = job.dedup_key
    if job.dedup_window is not None:
        message.dedup_window.CopyFrom(duration(job.dedup_window))


def _invalid(job: NewJob, at: int, error: Exception) -> InvalidJob:
    # protobuf does not say which field it choked on: each is tried alone, over one that is known to be good.
    good = NewJob("queue", "kind")
    for name in NewJob.__dataclass_fields__:
        if name == "_":
            continue
        value = getattr(job, name)
        alone: dict[str, Any] = {"queue": good.queue, "kind": good.kind, "id": good.id, name: value}
        try:
            write(NewJob(**alone), job_pb2.NewJob())
        except (TypeError, ValueError) as found:
            path, told = f"jobs[{at}].{name}", _in_words(name, value) or str(found)
            return InvalidJob(f"{path}: {told}", [Violation(path, told)])
    path = f"jobs[{at}]"
    return InvalidJob(f"{path}: {error}", [Violation(path, str(error))])


def _in_words(name: str, value: object) -> str:
    """What is wrong with a field, where protobuf does not name the value; else empty."""
    if name in _TEXTS:
        return "" if isinstance(value, str) else f"must be a str, not {_shown(value)}"
    if name in _NUMBERS:
        return "" if type(value) is int else f"must be an int, not {_shown(value)}"
    if name == "attributes":
        if not isinstance(value, Mapping):
            return f"must be a dict of str to str, not {_shown(value)}"
        for key, text in cast("Mapping[object, object]", value).items():
            if not (isinstance(key, str) and isinstance(text, str)):
                return f"key and value must both be str, not {_shown(key)}: {_shown(text)}"
    return ""


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARS_MAX else text[:_SHOWN_CHARS_MAX] + "…"


def _retry(policy: object) -> job_pb2.RetryPolicy:
    match policy:
        case FixedRetry():
            return job_pb2.RetryPolicy(fixed=job_pb2.FixedRetry(delay=duration(policy.delay)))
        case ExponentialRetry():
            return job_pb2.RetryPolicy(
                exponential=job_pb2.ExponentialRetry(
                    initial_delay=duration(policy.initial_delay),
                    multiplier=policy.multiplier,
                    max_delay=duration(policy.max_delay),
                    jitter=policy.jitter,
                )
            )
        case _:
            raise TypeError(
                f"{_shown(policy)} is no retry policy; write FixedRetry(seconds) or ExponentialRetry(...); "
                "how often a job is tried is max_attempts"
            )


def _read_retry(message: job_pb2.RetryPolicy) -> RetryPolicy | None:
    match message.WhichOneof("policy"):
        case "fixed":
            return FixedRetry(delay=message.fixed.delay.ToTimedelta())
        case "exponential":
            told = message.exponential
            return ExponentialRetry(
                initial_delay=told.initial_delay.ToTimedelta() if told.HasField("initial_delay") else 1.0,
                multiplier=told.multiplier or 2.0,
                max_delay=told.max_delay.ToTimedelta() if told.HasField("max_delay") else 3600.0,
                jitter=told.jitter if told.HasField("jitter") else 0.1,
            )
        case _:
            return None


def read_leased(message: job_pb2.LeasedJob) -> Job:
    # Looking at a field that is not there makes an object all the same.
    traced = message.HasField("trace")
    enqueued, run = message.enqueued_at, message.run_at
    enqueued_at = moment(enqueued)
    at_once = run.nanos == enqueued.nanos and run.seconds == enqueued.seconds
    return Job(
        lease=message.lease,
        id=message.id,
        queue=message.queue,
        kind=message.kind,
        payload=message.payload,
        attributes=dict(message.attributes),
        priority=message.priority,
        attempt=message.attempt,
        max_attempts=message.max_attempts,
        enqueued_at=enqueued_at,
        run_at=enqueued_at if at_once else moment(run),
        traceparent=message.trace.traceparent if traced else "",
        tracestate=message.trace.tracestate if traced else "",
    )


def read_record(message: job_pb2.Job, *, with_payload: bool) -> JobRecord:
    return JobRecord(
        id=message.id,
        queue=message.queue,
        kind=message.kind,
        state=_STATES.get(message.state, JobState.UNKNOWN),
        payload=message.payload if with_payload else None,
        result=message.result if with_payload else None,
        attributes=dict(message.attributes),
        priority=message.priority,
        attempt=message.attempt,
        max_attempts=message.max_attempts,
        retry=_read_retry(message.retry),
        dedup_key=message.dedup_key,
        enqueued_at=moment(message.enqueued_at),
        run_at=moment(message.run_at),
        expires_at=moment(message.expires_at) if message.HasField("expires_at") else None,
        lease_deadline=moment(message.lease_deadline) if message.HasField("lease_deadline") else None,
        finished_at=moment(message.finished_at) if message.HasField("finished_at") else None,
        worker=message.worker,
        reason=message.reason,
        attempts=[
            Attempt(
                attempt=past.attempt,
                worker=past.worker,
                leased_at=moment(past.leased_at),
                ended_at=moment(past.ended_at),
                outcome=_OUTCOMES.get(past.outcome, AttemptOutcome.UNKNOWN),
                error=past.error,
            )
            for past in message.attempts
        ],
        shard=message.shard,
    )
