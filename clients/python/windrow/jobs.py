"""Jobs as the user sees them, and their conversion from and to protobuf. No I/O.

The router checks sizes and limits, which windrow/v1/job.proto states. This module refuses only values that protobuf
cannot encode.
"""

from __future__ import annotations

import asyncio
import enum
import json
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, TypedDict, Unpack, cast

from windrow.errors import InvalidJob, Span, Violation, WindrowError, invalid_argument
from windrow.failures import Failure, read_failure
from windrow.ids import nth_id, uuid7
from windrow.job_log import JobLog
from windrow.payloads import Payload, checked_text, duration, encode, moment, no_unicode, timestamp
from windrow.reports import Progress, Reporter, read_progress, report_of
from windrow.v1 import job_pb2, queue_pb2

if TYPE_CHECKING:
    from windrow.workflows import Added, FailurePolicy, Nodes, Parent, WorkflowCalls

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_NOBODY = Reporter()
# One lock for all jobs is enough, because it is held rarely, and for microseconds.
_LOST_LOCK = threading.Lock()


class JobState(enum.Enum):
    """The state of a job."""

    # The job waits for other nodes of its workflow.
    BLOCKED = "blocked"
    SCHEDULED = "scheduled"
    READY = "ready"
    LEASED = "leased"
    SUCCEEDED = "succeeded"
    DEAD = "dead"
    CANCELLED = "cancelled"
    # A newer router sent a state that this release does not know.
    UNKNOWN = "unknown"


# A job in one of these states does not run again, unless it is dead and somebody redrives it.
ENDED = frozenset({JobState.SUCCEEDED, JobState.DEAD, JobState.CANCELLED})


class AttemptOutcome(enum.Enum):
    """How one attempt ended."""

    ACKED = "acked"
    NACKED = "nacked"
    EXPIRED = "expired"
    RELEASED = "released"
    # The lease expired, because the attempt had lasted for the job's max_runtime.
    TIMED_OUT = "timed_out"
    # The job was cancelled during the attempt.
    CANCELLED = "cancelled"
    UNKNOWN = "unknown"


class RunCause(enum.Enum):
    """Why a schedule has a run."""

    SCHEDULE = "schedule"
    # The run was due earlier, and was stored late.
    CATCH_UP = "catch_up"
    TRIGGER = "trigger"
    BACKFILL = "backfill"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledRun:
    """The run of a schedule that stored a job."""

    schedule: str
    # The nominal time: what the calendar says. The job was stored then or later.
    at: datetime
    # The nominal time of the run that was stored before this one. None: no run was stored before.
    previous_at: datetime | None
    cause: RunCause


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkflowNode:
    """Which node of a workflow a job is."""

    workflow_id: str
    node: int
    # Returns the client and the job for calls about this node; a Worker sets it.
    caller: Callable[[WorkflowNode], tuple[WorkflowCalls, Job]] | None = field(default=None, repr=False, compare=False)
    # The nodes that were added with this lease, in the order of the calls.
    added: list[Nodes] = field(default_factory=list["Nodes"], repr=False, compare=False)

    # These are no coroutine functions, so that a `def` handler gets the error, and not a coroutine that nobody awaits.

    def add(self, nodes: Nodes) -> Awaitable[Added]:
        """Adds nodes to this workflow: see Client.add_nodes. Only an `async def` handler of a Worker can call this, and
        it must await the result. Raises RuntimeError elsewhere."""
        client, job = self._calls("add_nodes")
        return client.add_nodes(job, nodes)

    def wait_for(self, nodes: Nodes, *, on_failed: FailurePolicy | None = None) -> Awaitable[list[Parent]]:
        """Adds nodes to this workflow, and lets the job wait for them: see Client.wait_for. Only an `async def` handler
        of a Worker can call this, and it must await the result. Raises RuntimeError elsewhere."""
        client, job = self._calls("wait_for")
        return client.wait_for(job, nodes) if on_failed is None else client.wait_for(job, nodes, on_failed=on_failed)

    def _calls(self, method: str) -> tuple[WorkflowCalls, Job]:
        if self.caller is None or not _in_event_loop():
            raise RuntimeError(
                f"only an async handler of a Worker can do this by job.workflow: use {method} of a client"
            )
        return self.caller(self)


class LostReason(enum.Enum):
    """Why a handler should stop working on its job."""

    # The job was cancelled: nobody will run it.
    CANCELLED = "cancelled"
    # The lease has ended: another worker may have the job.
    LEASE_ENDED = "lease_ended"
    # The handler has used up its `timeout`; the attempt counts as failed.
    TIMED_OUT = "timed_out"
    # The worker has stopped, and `grace` is over.
    STOPPED = "stopped"


class Lost(asyncio.Event):
    """Set when a handler should stop working on its job. The handler's result is then dropped. There is one exception:
    if the reason is TIMED_OUT, and an `async def` still finishes, its result counts."""

    def __init__(self) -> None:
        super().__init__()
        # None as long as the event is not set. A second reason does not replace the first.
        self.reason: LostReason | None = None

    def set(self, reason: LostReason = LostReason.LEASE_ENDED) -> None:
        self.reason = self.reason or reason
        super().set()


class Answer(enum.Enum):
    """The result of a call for one of its jobs."""

    OK = "ok"
    # The lease has ended (for cancel_jobs: the job had succeeded). Nothing was changed.
    STALE = "stale"
    # The lease has ended, and the job was cancelled. Nothing was changed.
    CANCELLED = "cancelled"
    # This org has no such job. Nothing was changed.
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
    # The share of the delay that is random, 0 to 1.
    jitter: float = 0.1


RetryPolicy = FixedRetry | ExponentialRetry


# How many attributes the Python object of a NewJob has if it was made without options: queue, kind, payload and id.
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
    - `attributes`: at most 32 labels, readable without the payload. A key has 1 to 128 bytes, a value at most 1,024.
    - `priority`: 1 (first) to 9 (last). Default: 5.
    - `run_at` (a datetime with a time zone) or `delay` (s, or timedelta; from when the job is stored): when the job may
      run, at most 3,650 days ahead. Default: at once.
    - `expires_at` (a datetime with a time zone, at most 7,300 days ahead): a job that is not leased by then is
      cancelled, also if this time has passed already. Default: never.
    - `max_attempts`: 1 to 1,000. The job is dead after this many attempts without success. Default: the queue's
      setting, or 20 if the queue has none.
    - `max_runtime` (s, or timedelta; 1 s to 30 days): how long one attempt may take; then its lease ends. Default: as
      long as its lease is extended.
    - `group` (at most 256 bytes): at most group_concurrency (a setting of the queue; 1 by default) jobs of one group
      run at a time, in order. Default: no group.
    - `retry`: when the job runs again after a failure. Default: the queue's setting, or exponential from 1 s to 1 h.
    - `dedup_key` (at most 256 bytes): enqueueing another job with this key in the queue stores nothing. Default: none.
    - `dedup_window` (s, or timedelta; 1 s to 30 days): how long the key counts, from when the job is stored. Default:
      1 day.
    - `dedup_while_live`: the key counts until the job has succeeded, died or was cancelled, and not for a window. A
      redriven job does not take its key again.
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


@dataclass(frozen=True, kw_only=True)
class Enqueued:
    """The result of enqueueing a job.

    - `duplicate`: the id or the dedup key existed already. Nothing was stored, and `id` is the id of the existing job.
    - `state`: the state of the existing job, if this is a duplicate. None if that job has been deleted since, or if its
      shard did not say.
    - `differs`: the stored job with the same id has another queue, kind or payload, so one id was used for two jobs.
      For a duplicate by its dedup key it is always False, even if the two jobs differ.
    - `error`: why this job was not stored. Only set by an independent enqueue_many.
    """

    id: str
    duplicate: bool = False
    state: JobState | None = None
    differs: bool = False
    error: WindrowError | None = None


def newly_stored(ids: Iterable[str]) -> list[Enqueued]:
    """Returns the results for jobs that are all newly stored. Sets only the ids, because the class has the defaults:
    this takes a fifth of the time."""
    results: list[Enqueued] = []
    for id_ in ids:
        stored = _new(Enqueued)
        stored.__dict__["id"] = id_
        results.append(stored)
    return results


# Frozen, because a worker still needs the job when its handler has ended.
@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A leased job. Every field has a default, so that the test of a handler can easily make a Job."""

    # An opaque token that identifies this lease to ack, nack, extend and release.
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
    # When the job became due.
    run_at: datetime = _EPOCH
    # How long this attempt may take, counted from its lease; None: as long as its lease is extended.
    max_runtime: timedelta | None = None
    # Empty: the job has no group.
    group: str = ""
    traceparent: str = ""
    tracestate: str = ""
    # The checkpoint that an earlier attempt stored by report(), as bytes. Empty: there is none.
    checkpoint: bytes = b""
    # The run of the schedule that stored the job; None: a producer enqueued it.
    scheduled_run: ScheduledRun | None = None
    # The job's node in a workflow. Client.parents returns the results of the nodes that it waited for. None: the job is
    # in no workflow.
    workflow: WorkflowNode | None = None
    # The org that owns the job: the client's, unless the worker works for all orgs.
    org: str = ""
    # A Worker sets this when the handler should stop; `job.lost.reason` says why. A `def` handler that runs long should
    # check `job.lost.is_set()` between its steps.
    lost: Lost = field(default_factory=Lost, repr=False, compare=False)
    # Takes the reports; a Worker sets it.
    reporter: Reporter = field(default_factory=Reporter, repr=False, compare=False)
    # The lines that log() has kept.
    logged: JobLog = field(default_factory=JobLog, repr=False, compare=False)

    if not TYPE_CHECKING:

        def __getattr__(self, name):
            """Makes `lost` when it is first used. read_leased() does not make it, because few handlers use it."""
            if name != "lost":
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
            with _LOST_LOCK:
                # The handler's thread and the worker may both ask for it first, and must get the same object.
                try:
                    return object.__getattribute__(self, "lost")
                except AttributeError:
                    object.__setattr__(self, "lost", lost := Lost())
                    return lost

    def log(self, text: str) -> None:
        """Adds one line or several to the log of this attempt. The job's history keeps it, and `windrow jobs get` shows
        it.

        The log keeps the first 512 bytes of a line, and the newest 50 lines of an attempt (at most 4 KiB; its first
        line then says how many earlier lines were dropped). A job keeps the logs of its newest 5 attempts.

        Returns at once: the worker sends the lines with its extends, and with the outcome of the attempt. If the worker
        crashes, or the job is cancelled, the lines since the last extend are lost. Lines that are logged after the
        handler has ended are dropped. May be called in a thread. Raises TypeError."""
        self.logged.write(text)

    def report(self, progress: Progress | None = None, *, checkpoint: Payload = None) -> None:
        """Reports how far the handler has come (`progress`), and what the next attempt needs in order to go on from
        there (`checkpoint`, which it finds in job.checkpoint; at most 64 KiB; b"" removes an earlier checkpoint). None:
        the earlier report stays.

        Only a Worker's handler reports like this; with a job from Client.dequeue, use Client.extend. Returns at once.
        The worker sends the newest report with its next message, which also extends the lease. It sends the job's
        outcome only after the report is stored. A report that was not sent is lost if the worker crashes. May be called
        in a thread. Raises TypeError or ValueError."""
        self.reporter(self.lease, report_of(progress, checkpoint))

    def json(self) -> Any:
        """Returns the payload parsed as JSON. Raises ValueError."""
        return json.loads(self.payload)

    def text(self) -> str:
        """Returns the payload decoded as UTF-8. Raises ValueError."""
        return self.payload.decode()


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One past lease of a job."""

    attempt: int
    worker: str
    leased_at: datetime
    ended_at: datetime
    outcome: AttemptOutcome
    # The failure that the nack reported, or the reason of a snooze. None: none was given, or the outcome has none.
    failure: Failure | None
    # The lines that its handler logged. A job keeps the lines of its newest 5 attempts.
    log: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    """A job as it is stored, in whatever state."""

    id: str
    queue: str
    kind: str
    state: JobState
    # None: the call did not ask for them. If the job has no result, `result` is empty.
    payload: bytes | None
    result: bytes | None
    attributes: Mapping[str, str]
    priority: int
    # The number of leases counted so far.
    attempt: int
    max_attempts: int
    retry: RetryPolicy | None
    dedup_key: str
    enqueued_at: datetime
    run_at: datetime
    expires_at: datetime | None
    lease_deadline: datetime | None
    finished_at: datetime | None
    # The worker that holds, or last held, the lease.
    worker: str
    # Why the job is dead or cancelled.
    reason: str
    # Ended attempts, oldest first. Only the newest 50 are stored.
    attempts: Sequence[Attempt]
    shard: str
    # The newest reports of handlers. None: there is none, or, for the checkpoint, the call did not ask for payloads.
    progress: Progress | None = None
    checkpoint: bytes | None = None
    # Whether the dedup key counts, or counted, while the job is live.
    dedup_while_live: bool = False
    max_runtime: timedelta | None = None
    # Empty: the job has no group.
    group: str = ""
    # The log of the attempt under way, as its newest extend reported it.
    log: str = ""
    # The run of the schedule that stored the job; None: a producer enqueued it.
    scheduled_run: ScheduledRun | None = None
    # The job's node in a workflow. None: the job is in no workflow.
    workflow: WorkflowNode | None = None


# The fields of a NewJob that must be a str or an int.
_STR_FIELDS = frozenset({"queue", "kind", "group", "dedup_key", "id"})
_INT_FIELDS = frozenset({"priority", "max_attempts"})
_SHOWN_CHARS_MAX = 100
# What `write` raises. AttributeError: the job is no NewJob.
_UNSENDABLE = (AttributeError, TypeError, ValueError)
# Maps a field to its path in a windrow.v1.NewJob, as violations name it, if the path is not just the field's name.
_PATHS = {
    **{field.name: f"template.{field.name}" for field in job_pb2.JobTemplate.DESCRIPTOR.fields},
    **{f"dedup_{field.name}": f"dedup.{field.name}" for field in job_pb2.Dedup.DESCRIPTOR.fields},
}

# The keys are numbers of the contract's enums. The names there are the same after a prefix.
_STATES: dict[int, JobState] = {
    job_pb2.JobState.Value(f"JOB_STATE_{state.name}"): state for state in JobState if state is not JobState.UNKNOWN
}
_OUTCOMES: dict[int, AttemptOutcome] = {
    job_pb2.AttemptOutcome.Value(f"ATTEMPT_OUTCOME_{outcome.name}"): outcome
    for outcome in AttemptOutcome
    if outcome is not AttemptOutcome.UNKNOWN
}
_RUN_CAUSES: dict[int, RunCause] = {
    job_pb2.RunCause.Value(f"RUN_CAUSE_{cause.name}"): cause for cause in RunCause if cause is not RunCause.UNKNOWN
}
_ANSWERS: dict[int, Answer] = {
    job_pb2.JobAnswer.Value(f"JOB_ANSWER_{answer.name}"): answer for answer in Answer if answer is not Answer.UNKNOWN
}


_new = object.__new__
_STATE_VALUES = {state: job_pb2.JobState.ValueType(value) for value, state in _STATES.items()}


def state_value(state: JobState) -> job_pb2.JobState.ValueType:
    """Raises KeyError for UNKNOWN."""
    return _STATE_VALUES[state]


def state_of(value: int) -> JobState:
    return _STATES.get(value, JobState.UNKNOWN)


def outcome_of(value: int) -> AttemptOutcome:
    return _OUTCOMES.get(value, AttemptOutcome.UNKNOWN)


def answer_of(value: int) -> Answer:
    return _ANSWERS.get(value, Answer.UNKNOWN)


def answers(values: Sequence[int]) -> list[Answer]:
    return [answer_of(value) for value in values]


def listed_ids(ids: Iterable[str], name: str = "ids") -> list[str]:
    """Returns a call's argument as a list. Raises InvalidRequest. One id is refused: a type checker takes a text for a
    sequence of texts, and the router would be asked for 36 jobs with ids of one letter."""
    if isinstance(ids, str):
        raise invalid_argument(name, f"must be a list of ids, not one id: write [{_shown(ids)}]")
    listed = list(ids)
    for at, one in enumerate(listed):
        if not isinstance(one, str):
            raise invalid_argument(f"{name}[{at}]", f"must be a str, not {_shown(one)}")
        checked_text(f"{name}[{at}]", one)
    return listed


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
    """Builds one job's message. Raises InvalidJob. The error names the wrong field by its path, as if this job were
    the only one in the request."""
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
    # In a message, 0 means the default. Refuse it, because a caller who writes 0 means something else.
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
        fault = f"must be a windrow.NewJob, not {_shown(job)}"
        return InvalidJob(f"jobs[{at}]: {fault}", [Violation(f"jobs[{at}]", fault)])
    # protobuf does not name the bad field: try each field alone, in a job that is otherwise valid.
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
    """Returns a text about the wrong type of a field's value, or "". protobuf's own message does not show the value."""
    if name in _STR_FIELDS:
        return "" if isinstance(value, str) else f"must be a str, not {_shown(value)}"
    if name in _INT_FIELDS:
        return "" if type(value) is int else f"must be an int, not {_shown(value)}"
    if name == "attributes":
        if not isinstance(value, Mapping):
            return f"must be a dict of str to str, not {_shown(value)}"
        for key, text in cast("Mapping[object, object]", value).items():
            if not (isinstance(key, str) and isinstance(text, str)):
                return f"key and value must both be str, not {_shown(key)}: {_shown(text)}"
    return ""


def _value_fault(error: Exception) -> str:
    return no_unicode(error) if isinstance(error, UnicodeEncodeError) else str(error)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARS_MAX else text[:_SHOWN_CHARS_MAX] + "…"


def retry_message(policy: object) -> job_pb2.RetryPolicy:
    """Raises TypeError or ValueError."""
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
                f"{_shown(policy)} is not a retry policy; write FixedRetry(seconds) or ExponentialRetry(...); "
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


class _Unfrozen:
    """A Job whose fields can be set. It becomes a Job when its class is set."""

    __slots__ = tuple(field.name for field in fields(Job))


def read_leased(message: job_pb2.LeasedJob, *, reporter: Reporter = _NOBODY) -> Job:
    # Set the fields one by one: passing so many arguments would take as long as reading them, and to set the fields of
    # a frozen object takes several times as long. `lost` is made when it is first used.
    job: Any = _new(_Unfrozen)
    job.lease = message.lease
    job.id = message.id
    job.queue = message.queue
    job.org = message.org
    job.kind = message.kind
    job.payload = message.payload
    attributes = message.attributes
    job.attributes = dict(attributes) if attributes else {}
    job.priority = message.priority
    job.attempt = message.attempt
    job.max_attempts = message.max_attempts
    enqueued, run = message.enqueued_at, message.run_at
    job.enqueued_at = enqueued_at = moment(enqueued)
    at_once = run.nanos == enqueued.nanos and run.seconds == enqueued.seconds
    job.run_at = enqueued_at if at_once else moment(run)
    # HasField first: reading an absent message field would create an object.
    traced = message.HasField("trace")
    job.traceparent = message.trace.traceparent if traced else ""
    job.tracestate = message.trace.tracestate if traced else ""
    job.max_runtime = message.max_runtime.ToTimedelta() if message.HasField("max_runtime") else None
    job.group = message.group
    job.checkpoint = message.checkpoint
    job.scheduled_run = read_scheduled_run(message.scheduled_run) if message.HasField("scheduled_run") else None
    job.workflow = read_workflow_node(message.workflow) if message.HasField("workflow") else None
    job.reporter = reporter
    job.logged = JobLog()
    job.__class__ = Job
    return cast("Job", job)


def read_new(message: job_pb2.NewJob) -> NewJob:
    """Reads what write() has written. The payload is bytes, and spans are timedeltas."""
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


def read_record(message: job_pb2.Job, *, with_payload: bool) -> JobRecord:
    return JobRecord(
        id=message.id,
        queue=message.queue,
        kind=message.kind,
        state=state_of(message.state),
        payload=message.payload if with_payload else None,
        result=message.result if with_payload else None,
        attributes=dict(message.attributes),
        priority=message.priority,
        attempt=message.attempt,
        max_attempts=message.max_attempts,
        retry=read_retry(message.retry),
        dedup_key=message.dedup_key,
        dedup_while_live=message.dedup_while_live,
        max_runtime=message.max_runtime.ToTimedelta() if message.HasField("max_runtime") else None,
        group=message.group,
        enqueued_at=moment(message.enqueued_at),
        run_at=moment(message.run_at if message.HasField("run_at") else message.enqueued_at),
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
                outcome=outcome_of(past.outcome),
                failure=read_failure(past.failure) if past.HasField("failure") else None,
                log=past.log,
            )
            for past in message.attempts
        ],
        shard=message.shard,
        progress=read_progress(message.progress) if message.HasField("progress") else None,
        checkpoint=message.checkpoint if with_payload else None,
        log=message.log,
        scheduled_run=read_scheduled_run(message.scheduled_run) if message.HasField("scheduled_run") else None,
        workflow=read_workflow_node(message.workflow) if message.HasField("workflow") else None,
    )


def read_workflow_node(message: job_pb2.WorkflowNode) -> WorkflowNode:
    return WorkflowNode(workflow_id=message.workflow_id, node=message.node)


def read_scheduled_run(message: job_pb2.ScheduledRun) -> ScheduledRun:
    return ScheduledRun(
        schedule=message.schedule,
        at=moment(message.at),
        previous_at=moment(message.previous_at) if message.HasField("previous_at") else None,
        cause=read_run_cause(message.cause),
    )


def read_run_cause(value: int) -> RunCause:
    return _RUN_CAUSES.get(value, RunCause.UNKNOWN)


def _in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
