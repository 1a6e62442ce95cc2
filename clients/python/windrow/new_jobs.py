"""The class in which a user writes a new job, and its conversion to and from protobuf. No I/O.

The router checks sizes and limits, which windrow/v1/job.proto states. This module refuses only values that protobuf
cannot encode.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from datetime import datetime
from typing import Any, TypedDict, Unpack, cast

from windrow.errors import InvalidJob, Span, Violation
from windrow.ids import nth_id, uuid7
from windrow.payloads import Payload, duration, encode, moment, no_unicode, shown, timestamp
from windrow.v1 import job_pb2, queue_pb2


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
    # The random share of the delay, from 0 to 1.
    jitter: float = 0.1


RetryPolicy = FixedRetry | ExponentialRetry


# The number of entries in the `__dict__` of a NewJob that was made without options: queue, kind, payload and id.
_PLAIN_FIELDS = 4


class JobOptions(TypedDict, total=False):
    """The optional fields of a new job: those of NewJob except queue, kind and payload. NewJob says what they mean."""

    attributes: Mapping[str, str] | None
    priority: int | None
    run_at: datetime | None
    delay: Span | None
    expires_at: datetime | None
    max_attempts: int | None
    max_runtime: Span | None
    group: str
    retry: RetryPolicy | None
    dedup_key: str
    dedup_window: Span | None
    dedup_while_live: bool
    id: str


# The generated __init__ of a frozen class sets each field through object.__setattr__. That would take most of the time
# of an enqueue. This __init__ sets only the given fields: the class has the defaults.
@dataclass(frozen=True, init=False)
class NewJob:
    """A job to store. Its id is made with the object, so enqueueing the same NewJob again stores nothing new.

    - `queue`, `kind`: 1 to 128 characters of A–Z a–z 0–9 . _ : / -, of which the first is a letter or a digit. A queue
      is created at its first use.
    - `payload`: bytes, text or a JSON value, at most 1 MiB.
    - `attributes`: at most 32 labels, str to str, readable without the payload. A key has 1 to 128 bytes, a value at
      most 1,024.
    - `priority`: 1 (first) to 9 (last). Default: 5.
    - `run_at` (a datetime with a time zone) or `delay` (s, or timedelta; from when the job is stored): when the job may
      run, at most 3,650 days ahead. Default: at once.
    - `expires_at` (a datetime with a time zone, at most 7,300 days ahead): a job that is not leased by then is
      cancelled, also if this time has passed already. Default: never.
    - `max_attempts`: 1 to 1,000. The job is dead after this many attempts without success. Default: the queue's
      setting, or 20 if the queue has none.
    - `max_runtime` (s, or timedelta; 1 s to 30 days): how long one attempt may take; then its lease ends. The handler
      finds this time in job.max_runtime. Default: as long as its lease is extended.
    - `group` (at most 256 bytes): at most group_concurrency (a setting of the queue; 1 by default) jobs of one group
      run at a time, in order. Default: no group.
    - `retry` (FixedRetry or ExponentialRetry): when the job runs again after a failure. Default: the queue's setting,
      or exponential from 1 s to 1 h.
    - `dedup_key` (at most 256 bytes): enqueueing another job with this key in the queue stores nothing. Default: none.
    - `dedup_window` (s, or timedelta; 1 s to 30 days): how long the key counts, from when the job is stored. Default:
      1 day.
    - `dedup_while_live`: the key counts until the job has succeeded, died or was cancelled, and not for a window. A
      redriven job does not get its key back.
    - `id`: a UUIDv7 (uuid7()). The router refuses an id that is older than 7 days. Default: a new id.
    """

    queue: str
    kind: str
    payload: Payload = b""
    _: KW_ONLY
    attributes: Mapping[str, str] | None = None
    priority: int | None = None
    run_at: datetime | None = None
    delay: Span | None = None
    expires_at: datetime | None = None
    max_attempts: int | None = None
    max_runtime: Span | None = None
    group: str = ""
    retry: RetryPolicy | None = None
    dedup_key: str = ""
    dedup_window: Span | None = None
    dedup_while_live: bool = False
    id: str = ""

    def __init__(self, queue: str, kind: str, payload: Payload = b"", **options: Unpack[JobOptions]) -> None:
        given = self.__dict__
        given["queue"] = queue
        given["kind"] = kind
        given["payload"] = payload
        if options:
            for name in options:
                if name not in JobOptions.__annotations__:
                    raise TypeError(f"NewJob.__init__() got an unexpected keyword argument {name!r}")
            given.update(options)
        if "id" not in given:
            given["id"] = uuid7()


# The fields of a NewJob that must be a str or an int.
_STR_FIELDS = frozenset({"queue", "kind", "group", "dedup_key", "id"})
_INT_FIELDS = frozenset({"priority", "max_attempts"})
# The errors that `write` raises. AttributeError means that the job is not a NewJob.
_UNSENDABLE = (AttributeError, TypeError, ValueError)
# The paths of fields in a windrow.v1.NewJob, by which violations name the fields. A field that is missing has its name
# as its path.
_PATHS = {
    **{field.name: f"template.{field.name}" for field in job_pb2.JobTemplate.DESCRIPTOR.fields},
    **{f"dedup_{field.name}": f"dedup.{field.name}" for field in job_pb2.Dedup.DESCRIPTOR.fields},
}


def enqueue_request(org: str, jobs: Sequence[NewJob], *, independent: bool = False) -> queue_pb2.EnqueueRequest:
    """Builds a request. Raises InvalidJob with the path of a field that cannot be encoded."""
    request = queue_pb2.EnqueueRequest(org=org, independent=independent)
    add = request.jobs.add
    for at, job in enumerate(jobs):
        try:
            write(job, add())
        except _UNSENDABLE as error:
            raise _invalid(job, at, error) from error
    return request


def batch_requests(
    org: str, jobs: Iterable[NewJob], batch: str, *, jobs_max: int, bytes_max: int
) -> Iterator[tuple[int, queue_pb2.EnqueueRequest]]:
    """Yields requests for all jobs of a batch, each with the number of its first job. A request has at most `jobs_max`
    jobs, and at most `bytes_max` bytes unless it has only one job. Raises InvalidJob."""
    request, first, size = queue_pb2.EnqueueRequest(org=org), 0, 0
    for at, job in enumerate(jobs):
        message = job_pb2.NewJob()
        try:
            write(job, message)
            message.id = nth_id(batch, at)
        except _UNSENDABLE as error:
            raise _invalid(job, at, error) from error
        size += message.ByteSize()
        if request.jobs and (len(request.jobs) == jobs_max or size > bytes_max):
            yield first, request
            request, first, size = queue_pb2.EnqueueRequest(org=org), at, message.ByteSize()
        request.jobs.append(message)
    if request.jobs:
        yield first, request


def new_message(job: NewJob) -> job_pb2.NewJob:
    """Builds one job's message. Raises InvalidJob, which names the wrong field by its path in a request with only this
    job."""
    message = job_pb2.NewJob()
    try:
        write(job, message)
    except _UNSENDABLE as error:
        raise _invalid(job, 0, error) from error
    return message


def write(job: NewJob, message: job_pb2.NewJob) -> None:
    """Fills an empty message. Raises TypeError or ValueError."""
    if not job.id:
        raise ValueError("id is empty; leave it out to get a new one")
    message.id = job.id
    template = message.template
    template.queue = job.queue
    template.kind = job.kind
    payload = job.payload
    template.payload = payload if type(payload) is bytes else encode(payload)
    if len(job.__dict__) == _PLAIN_FIELDS:
        return
    if job.attributes:
        template.attributes.update(job.attributes)
    # In a message, 0 means the default. Refuse a 0 of the caller, because the caller means something else.
    if job.priority is not None:
        template.priority = job.priority
        if not template.priority:
            raise ValueError("must be 1 to 9, not 0; leave it out for the default")
    if job.max_attempts is not None:
        template.max_attempts = job.max_attempts
        if not template.max_attempts:
            raise ValueError("must be 1 to 1,000, not 0; leave it out for the default")
    if job.max_runtime is not None:
        template.max_runtime.CopyFrom(duration(job.max_runtime))
    if job.group:
        template.group = job.group
    if job.retry is not None:
        template.retry.CopyFrom(retry_message(job.retry))
    if job.run_at is not None:
        if job.delay is not None:
            raise ValueError("run_at and delay are both given; give only one")
        message.run_at.CopyFrom(timestamp(job.run_at))
    elif job.delay is not None:
        message.delay.CopyFrom(duration(job.delay))
    if job.expires_at is not None:
        message.expires_at.CopyFrom(timestamp(job.expires_at))
    if job.dedup_key:
        message.dedup.key = job.dedup_key
    if job.dedup_window is not None:
        message.dedup.window.CopyFrom(duration(job.dedup_window))
    if job.dedup_while_live:
        message.dedup.while_live = True


def _invalid(job: object, at: int, error: Exception) -> InvalidJob:
    if not isinstance(job, NewJob):
        fault = f"must be a windrow.NewJob, not {shown(job)}"
        return InvalidJob(f"jobs[{at}]: {fault}", [Violation(f"jobs[{at}]", fault)])
    # protobuf does not name the bad field. To find it, try each field in a job that is otherwise valid.
    valid = NewJob("queue", "kind")
    for name in NewJob.__dataclass_fields__:
        if name == "_":
            continue
        value = getattr(job, name)
        fields: dict[str, Any] = {"queue": valid.queue, "kind": valid.kind, "id": valid.id, name: value}
        try:
            write(NewJob(**fields), job_pb2.NewJob())
        except (TypeError, ValueError) as found:
            path, fault = f"jobs[{at}].{_PATHS.get(name, name)}", _type_fault(name, value) or _value_fault(found)
            return InvalidJob(f"{path}: {fault}", [Violation(path, fault)])
    path = f"jobs[{at}]"
    return InvalidJob(f"{path}: {error}", [Violation(path, str(error))])


def _type_fault(name: str, value: object) -> str:
    """Returns an error text if a field's value has a wrong type, or "". The error message of protobuf does not show the
    value."""
    if name in _STR_FIELDS:
        return "" if isinstance(value, str) else f"must be a str, not {shown(value)}"
    if name in _INT_FIELDS:
        return "" if type(value) is int else f"must be an int, not {shown(value)}"
    if name == "attributes":
        if not isinstance(value, Mapping):
            return f"must be a dict of str to str, not {shown(value)}"
        for key, text in cast("Mapping[object, object]", value).items():
            if not (isinstance(key, str) and isinstance(text, str)):
                return f"key and value must both be str, not {shown(key)}: {shown(text)}"
    return ""


def _value_fault(error: Exception) -> str:
    return no_unicode(error) if isinstance(error, UnicodeEncodeError) else str(error)


def retry_message(policy: object) -> job_pb2.RetryPolicy:
    """Returns the message of a retry policy. Raises TypeError or ValueError."""
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
                f"{shown(policy)} is not a retry policy; write FixedRetry(seconds) or ExponentialRetry(...); "
                "max_attempts sets how often a job is tried"
            )


def read_retry(message: job_pb2.RetryPolicy) -> RetryPolicy | None:
    match message.WhichOneof("policy"):
        case "fixed":
            return FixedRetry(delay=message.fixed.delay.ToTimedelta())
        case "exponential":
            policy = message.exponential
            return ExponentialRetry(
                initial_delay=policy.initial_delay.ToTimedelta() if policy.HasField("initial_delay") else 1.0,
                multiplier=policy.multiplier or 2.0,
                max_delay=policy.max_delay.ToTimedelta() if policy.HasField("max_delay") else 3600.0,
                jitter=policy.jitter if policy.HasField("jitter") else 0.1,
            )
        case _:
            return None


def read_new(message: job_pb2.NewJob) -> NewJob:
    """Reads a message that write() has filled. In the result, the payload is bytes, and spans are timedeltas."""
    template, dedup = message.template, message.dedup
    return NewJob(
        template.queue,
        template.kind,
        template.payload,
        attributes=dict(template.attributes),
        priority=template.priority or None,
        run_at=moment(message.run_at) if message.HasField("run_at") else None,
        delay=message.delay.ToTimedelta() if message.HasField("delay") else None,
        expires_at=moment(message.expires_at) if message.HasField("expires_at") else None,
        max_attempts=template.max_attempts or None,
        max_runtime=template.max_runtime.ToTimedelta() if template.HasField("max_runtime") else None,
        group=template.group,
        retry=read_retry(template.retry),
        dedup_key=dedup.key,
        dedup_window=dedup.window.ToTimedelta() if dedup.HasField("window") else None,
        dedup_while_live=dedup.while_live,
        id=message.id,
    )
