"""Between the messages of proto/windrow/v1 and the columns and records of the shard. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import assert_never, cast

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from router.status import InvalidRequest, Violation
from shard import retry
from shard.books import OrgBooks, QueueCounts, QueueRecord
from shard.cluster import ShardState
from shard.lease import MalformedLease, parse_token
from shard.listing import Wanted
from shard.records import JobRecord
from shard.vocabulary import (
    MAX_ATTEMPTS_DEFAULT,
    RETENTION_DEFAULT,
    Answer,
    Claimed,
    JobState,
    Lease,
    Micros,
    NewJobs,
    OrgId,
    Outcome,
    QueueName,
    ShardName,
)
from windrow.ids import uuid7
from windrow.v1 import admin_pb2, job_pb2, queue_pb2

WINDOW_DEFAULT_US = 30_000_000
_DEDUP_WINDOW_DEFAULT_US = 86_400_000_000

ANSWERS: dict[Answer, job_pb2.JobAnswer.ValueType] = {
    Answer.OK: job_pb2.JOB_ANSWER_OK,
    Answer.STALE: job_pb2.JOB_ANSWER_STALE,
    Answer.NOT_FOUND: job_pb2.JOB_ANSWER_NOT_FOUND,
}
_STATES = {
    "scheduled": job_pb2.JOB_STATE_SCHEDULED,
    "ready": job_pb2.JOB_STATE_READY,
    "leased": job_pb2.JOB_STATE_LEASED,
    "succeeded": job_pb2.JOB_STATE_SUCCEEDED,
    "dead": job_pb2.JOB_STATE_DEAD,
    "cancelled": job_pb2.JOB_STATE_CANCELLED,
}
STATES_BY_NUMBER = {number: JobState(name) for name, number in _STATES.items()}
_OUTCOMES = {
    Outcome.ACKED: job_pb2.ATTEMPT_OUTCOME_ACKED,
    Outcome.NACKED: job_pb2.ATTEMPT_OUTCOME_NACKED,
    Outcome.EXPIRED: job_pb2.ATTEMPT_OUTCOME_EXPIRED,
    Outcome.RELEASED: job_pb2.ATTEMPT_OUTCOME_RELEASED,
}
SHARD_STATES = {
    ShardState.ACTIVE: admin_pb2.SHARD_STATE_ACTIVE,
    ShardState.DRAINING: admin_pb2.SHARD_STATE_DRAINING,
    ShardState.ENQUEUE_ONLY: admin_pb2.SHARD_STATE_ENQUEUE_ONLY,
    ShardState.DEQUEUE_ONLY: admin_pb2.SHARD_STATE_DEQUEUE_ONLY,
    ShardState.READ_ONLY: admin_pb2.SHARD_STATE_READ_ONLY,
    ShardState.OFF: admin_pb2.SHARD_STATE_OFF,
}


# ── Times ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def timestamp(us: int) -> Timestamp:
    return Timestamp(seconds=us // 1_000_000, nanos=us % 1_000_000 * 1000)


def duration(us: int) -> Duration:
    return Duration(seconds=us // 1_000_000, nanos=us % 1_000_000 * 1000)


def micros(value: Timestamp | Duration) -> int:
    return value.seconds * 1_000_000 + value.nanos // 1000


def moment(value: Timestamp) -> Micros:
    return Micros(micros(value))


def window_us(request: queue_pb2.DequeueRequest | queue_pb2.ExtendRequest | queue_pb2.ConsumeStart) -> int:
    return micros(request.visibility_window) if request.HasField("visibility_window") else WINDOW_DEFAULT_US


# ── Jobs in ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def new_jobs(org: OrgId, jobs: Sequence[job_pb2.NewJob], *, trace: str | None) -> NewJobs:
    """The columns of valid jobs. `trace` is kept with jobs that bring no trace of their own."""
    columns = NewJobs(
        org=org,
        ids=[job.id or uuid7() for job in jobs],
        queues=cast("list[QueueName]", [job.queue for job in jobs]),
        kinds=[job.kind for job in jobs],
        payloads=[job.payload for job in jobs],
    )
    for at, job in enumerate(jobs):
        if job.priority:
            columns.priorities[at] = job.priority
        if job.attributes:
            columns.attributes[at] = json.dumps(dict(job.attributes))
        match job.WhichOneof("when"):
            case "delay":
                columns.delay_us[at] = micros(job.delay)
            case "run_at":
                columns.run_at_us[at] = micros(job.run_at)
            case None:
                pass
        if job.HasField("expires_at"):
            columns.expires_at_us[at] = micros(job.expires_at)
        if job.max_attempts:
            columns.max_attempts[at] = job.max_attempts
        if job.HasField("retry"):
            columns.retries[at] = retry.to_json(policy(job.retry))
        if job.dedup_key:
            columns.dedup_keys[at] = job.dedup_key
            window = micros(job.dedup_window) if job.HasField("dedup_window") else _DEDUP_WINDOW_DEFAULT_US
            columns.dedup_window_us[at] = window
        if job.HasField("trace") and job.trace.traceparent:
            columns.traces[at] = f"{job.trace.traceparent} {job.trace.tracestate}".rstrip()
        elif trace is not None:
            columns.traces[at] = trace
    return columns


def policy(message: job_pb2.RetryPolicy) -> retry.Policy:
    """A retry policy with its defaults filled in."""
    which = message.WhichOneof("policy")
    match which:
        case "fixed":
            return retry.Fixed(delay_us=micros(message.fixed.delay))
        case "exponential":
            given, default = message.exponential, retry.Exponential()
            return retry.Exponential(
                initial_us=micros(given.initial_delay) if given.HasField("initial_delay") else default.initial_us,
                multiplier=given.multiplier or default.multiplier,
                max_us=micros(given.max_delay) if given.HasField("max_delay") else default.max_us,
                jitter=given.jitter if given.HasField("jitter") else default.jitter,
            )
        case None:
            return retry.DEFAULT
        case _:
            assert_never(which)


def own_policy(config: admin_pb2.QueueConfig) -> retry.Policy | None:
    """The retry policy that a configuration brings; None: it leaves it as it is."""
    return policy(config.retry) if config.HasField("retry") else None


def own_max_attempts(config: admin_pb2.QueueConfig) -> int | None:
    """Same, for the attempts."""
    return config.max_attempts if config.HasField("max_attempts") else None


def own_retention(config: admin_pb2.QueueConfig) -> int | None:
    """Same, for how many days finished jobs are kept."""
    return config.retention_days if config.HasField("retention_days") else None


def policy_message(stored: retry.Policy) -> job_pb2.RetryPolicy:
    match stored:
        case retry.Fixed():
            return job_pb2.RetryPolicy(fixed=job_pb2.FixedRetry(delay=duration(stored.delay_us)))
        case retry.Exponential():
            return job_pb2.RetryPolicy(
                exponential=job_pb2.ExponentialRetry(
                    initial_delay=duration(stored.initial_us),
                    multiplier=stored.multiplier,
                    max_delay=duration(stored.max_us),
                    jitter=stored.jitter,
                )
            )
        case _:
            assert_never(stored)


def leases(tokens: Iterable[bytes], *, field: str) -> list[tuple[int, Lease]]:
    """Shard tags and leases of tokens; `field` is their path with {} for the position. Raises InvalidRequest."""
    parsed: list[tuple[int, Lease]] = []
    violations: list[Violation] = []
    for at, data in enumerate(tokens):
        try:
            parsed.append(parse_token(data))
        except MalformedLease as error:
            violations.append(Violation(field.format(at), str(error)))
    if violations:
        raise InvalidRequest(violations)
    return parsed


def wanted(request: admin_pb2.ListJobsRequest) -> Wanted:
    return Wanted(
        org=OrgId(request.org),
        queue=QueueName(request.queue) if request.queue else None,
        state=STATES_BY_NUMBER[request.state] if request.state else None,
        kind=request.kind,
        made_after=moment(request.made_after) if request.HasField("made_after") else None,
        made_before=moment(request.made_before) if request.HasField("made_before") else None,
        include_payload=request.include_payload,
    )


# ── Jobs out ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def leased_job(job: Claimed) -> job_pb2.LeasedJob:
    """A claimed job without what tells it from others that are alike: lease, id and payload."""
    message = job_pb2.LeasedJob(
        queue=job.queue,
        kind=job.kind,
        priority=job.priority,
        attempt=job.attempt,
        max_attempts=job.max_attempts or MAX_ATTEMPTS_DEFAULT,
        enqueued_at=timestamp(job.enqueued_at),
        run_at=timestamp(job.run_at),
    )
    if job.attributes is not None:
        message.attributes.update(json.loads(job.attributes))
    if job.trace is not None:
        message.trace.traceparent, _, message.trace.tracestate = job.trace.partition(" ")
    return message


def job(record: JobRecord, shard: ShardName) -> job_pb2.Job:
    message = job_pb2.Job(
        id=record.id,
        queue=record.queue,
        kind=record.kind,
        state=_STATES[record.state],
        payload=record.payload or b"",
        attributes=json.loads(record.attributes or "{}"),
        priority=record.priority,
        enqueued_at=timestamp(record.enqueued_at),
        run_at=timestamp(record.run_at),
        attempt=record.attempt,
        max_attempts=record.max_attempts or MAX_ATTEMPTS_DEFAULT,
        retry=policy_message(retry.from_json(record.retry)),
        dedup_key=record.dedup_key or "",
        worker=record.worker or "",
        result=record.result or b"",
        reason=record.reason or "",
        shard=shard,
    )
    if record.expires_at is not None:
        message.expires_at.CopyFrom(timestamp(record.expires_at))
    if record.state == "leased" and record.deadline is not None:
        message.lease_deadline.CopyFrom(timestamp(record.deadline))
    if record.finished_at is not None:
        message.finished_at.CopyFrom(timestamp(record.finished_at))
    for ended in record.attempts():
        message.attempts.add(
            attempt=ended.attempt,
            worker=ended.worker,
            leased_at=timestamp(ended.leased_at),
            ended_at=timestamp(ended.ended_at),
            outcome=_OUTCOMES[ended.outcome],
            error=ended.error,
        )
    return message


# ── Books out ────────────────────────────────────────────────────────────────────────────────────────────────────────


def queue_info(org: OrgId, record: QueueRecord, shard: ShardName) -> admin_pb2.QueueInfo:
    config = admin_pb2.QueueConfig(retry=policy_message(retry.from_json(record.retry)))
    config.max_attempts = record.max_attempts or MAX_ATTEMPTS_DEFAULT
    config.retention_days = RETENTION_DEFAULT if record.retention is None else record.retention
    return admin_pb2.QueueInfo(
        org=org,
        queue=record.queue,
        config=config,
        paused=record.paused,
        created_at=timestamp(record.created_at),
        shard=shard,
    )


def queue_stats(counts: QueueCounts) -> admin_pb2.QueueStats:
    message = admin_pb2.QueueStats(
        queue=counts.queue,
        scheduled=counts.scheduled,
        ready=counts.ready,
        leased=counts.leased,
        dead=counts.dead,
        succeeded=counts.succeeded,
        cancelled=counts.cancelled,
        paused=counts.paused,
    )
    if counts.oldest_ready_age_us is not None:
        message.oldest_ready_age.CopyFrom(duration(counts.oldest_ready_age_us))
    if counts.next_due is not None:
        message.next_due.CopyFrom(timestamp(counts.next_due))
    return message


def org_books(books: OrgBooks, *, lives_on: str = "") -> admin_pb2.OrgBooks:
    """`lives_on`: where the org's live jobs belong, if not on this shard."""
    return admin_pb2.OrgBooks(
        org=books.org,
        accepted=books.accepted,
        scheduled=books.scheduled,
        ready=books.ready,
        leased=books.leased,
        succeeded=books.succeeded,
        dead=books.dead,
        cancelled=books.cancelled,
        archived=books.archived,
        expired=books.expired,
        balanced=books.balanced,
        stray=books.unfinished if lives_on else 0,
        lives_on=lives_on,
    )


def enqueue_results(ids: Sequence[str], known: Mapping[int, str]) -> list[queue_pb2.EnqueueResult]:
    return [queue_pb2.EnqueueResult(id=known.get(at, job_id), duplicate=at in known) for at, job_id in enumerate(ids)]
