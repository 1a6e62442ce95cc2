"""The classes in which a user sees stored jobs, and the conversion of these classes from and to protobuf. No I/O."""

from __future__ import annotations

import asyncio
import enum
import json
import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Protocol, cast

from windrow.errors import WindrowError, invalid_argument
from windrow.failures import Failure, read_failure
from windrow.job_log import JobLog
from windrow.new_jobs import RetryPolicy, read_retry
from windrow.payloads import Payload, checked_text, moment, shown
from windrow.reports import Progress, Reporter, read_progress, report_of
from windrow.v1 import job_pb2
from windrow.workflows import Added, FailurePolicy, Nodes, Parent

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


# A job in one of these states does not run again, except a dead job that somebody redrives.
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
    """What caused a run of a schedule."""

    SCHEDULE = "schedule"
    # The run was due earlier, and was stored late.
    CATCH_UP = "catch_up"
    TRIGGER = "trigger"
    BACKFILL = "backfill"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledRun:
    """A run of a schedule. This run stored a job."""

    schedule: str
    # The nominal time, which the calendar says. The job was stored at this time or later.
    at: datetime
    # The nominal time of the run that was stored before this one. None: no run was stored before.
    previous_at: datetime | None
    cause: RunCause


class NodeCalls(Protocol):
    """The methods of Client that a job can call about its node."""

    def add_nodes(self, job: Job, nodes: Nodes) -> Awaitable[Added]: ...

    def wait_for(self, job: Job, nodes: Nodes, *, on_failed: FailurePolicy = ...) -> Awaitable[list[Parent]]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkflowNode:
    """Says which node of a workflow a job is."""

    workflow_id: str
    node: int
    # Returns the client and the job for calls about this node. A Worker sets this field.
    caller: Callable[[WorkflowNode], tuple[NodeCalls, Job]] | None = field(default=None, repr=False, compare=False)
    # The nodes that were added with this lease, in the order of the calls that added them.
    added: list[Nodes] = field(default_factory=list[Nodes], repr=False, compare=False)

    # These methods are not coroutine functions, so that a call in a `def` handler raises the error. A coroutine
    # function would return a coroutine that nobody awaits.

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

    def _calls(self, method: str) -> tuple[NodeCalls, Job]:
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
    # The handler has used up its `timeout`, or its job's max_runtime; the attempt counts as failed.
    TIMED_OUT = "timed_out"
    # The worker has stopped, and `grace` is over.
    STOPPED = "stopped"


class Lost(asyncio.Event):
    """An event that is set when a handler should stop working on its job. The handler's result is then dropped. There
    is one exception: if the reason is TIMED_OUT, and an `async def` handler still finishes, its result is used."""

    def __init__(self) -> None:
        super().__init__()
        # None as long as the event is not set. A second reason does not replace the first.
        self.reason: LostReason | None = None

    def set(self, reason: LostReason = LostReason.LEASE_ENDED) -> None:
        self.reason = self.reason or reason
        super().set()


class Answer(enum.Enum):
    """A call's result for one of the jobs that were passed to the call."""

    OK = "ok"
    # The lease has ended (for cancel_jobs: the job had succeeded). Nothing was changed.
    STALE = "stale"
    # The lease has ended, and the job was cancelled. Nothing was changed.
    CANCELLED = "cancelled"
    # This org has no such job. Nothing was changed.
    NOT_FOUND = "not_found"
    UNKNOWN = "unknown"


@dataclass(frozen=True, kw_only=True)
class Enqueued:
    """The result of enqueueing a job.

    - `duplicate`: the id or the dedup key existed already. Nothing was stored, and `id` is the id of the existing job.
    - `state`: the state of the existing job, if this is a duplicate. None if that job has been deleted since, or if its
      shard did not say.
    - `differs`: the stored job with the same id has another queue, kind or payload, so one id was used for two jobs. If
      the job is a duplicate by its dedup key, `differs` is always False, even if the two jobs differ.
    - `error`: why this job was not stored. Only set by an independent enqueue_many.
    """

    id: str
    duplicate: bool = False
    state: JobState | None = None
    differs: bool = False
    error: WindrowError | None = None


def newly_stored(ids: Iterable[str]) -> list[Enqueued]:
    """Returns the results for jobs that are all newly stored. Sets only the ids, because the class has the defaults of
    the other fields. This takes a fifth of the time that calls of Enqueued() would take."""
    results: list[Enqueued] = []
    for id_ in ids:
        stored = _new(Enqueued)
        stored.__dict__["id"] = id_
        results.append(stored)
    return results


# The class is frozen, because a worker still needs a job after the job's handler has ended.
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
    # How long this attempt may take, counted from the start of its lease. None: the attempt may take as long as its
    # lease is extended.
    max_runtime: timedelta | None = None
    # Empty: the job has no group.
    group: str = ""
    traceparent: str = ""
    tracestate: str = ""
    # The checkpoint that an earlier attempt stored by report(), as bytes. Empty: there is none.
    checkpoint: bytes = b""
    # The run of the schedule that stored the job; None: a producer enqueued it.
    scheduled_run: ScheduledRun | None = None
    # The job's node in a workflow. Client.parents returns the results of the nodes that this node waited for. None: the
    # job is in no workflow.
    workflow: WorkflowNode | None = None
    # The org that owns the job; empty: the client's org. If this job is passed to a method of a client, the client
    # makes the call for this org.
    org: str = ""
    # A Worker sets this when the handler should stop; `job.lost.reason` says why. A `def` handler that runs for long
    # should check `job.lost.is_set()` between its steps.
    lost: Lost = field(default_factory=Lost, repr=False, compare=False)
    # Receives the handler's reports. A Worker sets this field.
    reporter: Reporter = field(default_factory=Reporter, repr=False, compare=False)
    # The lines that log() has kept.
    logged: JobLog = field(default_factory=JobLog, repr=False, compare=False)

    if not TYPE_CHECKING:

        def __getattr__(self, name):
            """Makes `lost` when it is first used. read_leased() does not make it, because few handlers use it."""
            if name != "lost":
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
            with _LOST_LOCK:
                # Both the handler's thread and the worker may be the first to ask for `lost`, and they must get the
                # same object.
                try:
                    return object.__getattribute__(self, "lost")
                except AttributeError:
                    object.__setattr__(self, "lost", lost := Lost())
                    return lost

    def log(self, text: str) -> None:
        """Adds one line or several to the log of this attempt. The job's history keeps the log, and `windrow jobs get`
        shows it.

        The log keeps the first 512 bytes of each line, and the newest lines of an attempt: at most 50 lines, and at
        most 4 KiB in total. If lines were dropped, the first line says how many. A job keeps the logs of its newest 5
        attempts.

        Returns at once: the worker sends the lines with its extends, and with the outcome of the attempt. If the worker
        crashes, or the job is cancelled, the lines since the last extend are lost. Lines that are logged after the
        handler has ended are dropped. May be called in a thread. Raises TypeError."""
        self.logged.write(text)

    def report(self, progress: Progress | None = None, *, checkpoint: Payload = None) -> None:
        """Reports how far the handler has come (`progress`), and what the next attempt needs in order to continue from
        there (`checkpoint`, at most 64 KiB). The next attempt finds the checkpoint in job.checkpoint. If an argument is
        None, what an earlier report said about it stays. b"" removes an earlier checkpoint.

        Only a Worker's handler can call this method. For a job from Client.dequeue, use Client.extend. Returns at once.
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
    # The failure that the nack reported, or the reason of a snooze. None: the attempt ended without a failure and
    # without a reason.
    failure: Failure | None
    # The lines that the handler logged during this attempt. A job keeps the lines of its newest 5 attempts.
    log: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    """A job as it is stored, in any state."""

    id: str
    queue: str
    kind: str
    state: JobState
    # None: the call did not ask for payloads and results. If the job has no result, `result` is empty.
    payload: bytes | None
    result: bytes | None
    attributes: Mapping[str, str]
    priority: int
    # How many attempts of the job were counted so far.
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


# The keys are the numbers of the enum values in the proto files. In the proto files, the name of a value is a prefix
# such as JOB_STATE_, and then the name that the value has here.
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
    """Returns the number of a state in the proto files. Raises KeyError for UNKNOWN."""
    return _STATE_VALUES[state]


def state_of(value: int) -> JobState:
    return _STATES.get(value, JobState.UNKNOWN)


def outcome_of(value: int) -> AttemptOutcome:
    return _OUTCOMES.get(value, AttemptOutcome.UNKNOWN)


def answer_of(value: int) -> Answer:
    return _ANSWERS.get(value, Answer.UNKNOWN)


def answers(values: Sequence[int]) -> list[Answer]:
    return [answer_of(value) for value in values]


def listed_jobs(jobs: object) -> list[Job]:
    """Returns leased jobs as a list. Raises InvalidRequest if `jobs` has anything else, such as an id, because the
    calls need a lease, and only a leased job has one."""
    listed: list[Any] = list(jobs) if isinstance(jobs, Iterable) and not isinstance(jobs, str) else [jobs]
    for one in listed:
        if not isinstance(one, Job):
            raise invalid_argument(
                "jobs",
                f"must be a job that was leased (of dequeue or of a worker), or a list of these, not {shown(one)}",
            )
    return listed


def listed_ids(ids: Iterable[str], name: str = "ids") -> list[str]:
    """Returns a call's argument as a list. Raises InvalidRequest, also if the argument is a single id and not a list.
    Type checkers allow that mistake, because a `str` is an iterable of `str`. Without this check, each of the 36
    characters of the id would be sent as an id."""
    if isinstance(ids, str):
        raise invalid_argument(name, f"must be a list of ids, not one id: write [{shown(ids)}]")
    listed = list(ids)
    for at, one in enumerate(listed):
        if not isinstance(one, str):
            raise invalid_argument(f"{name}[{at}]", f"must be a str, not {shown(one)}")
        checked_text(f"{name}[{at}]", one)
    return listed


class _Unfrozen:
    """An object with the fields of a Job; these fields can be set. The object becomes a Job when its `__class__` is set
    to Job."""

    __slots__ = tuple(field.name for field in fields(Job))


def read_leased(message: job_pb2.LeasedJob, *, reporter: Reporter = _NOBODY) -> Job:
    # Set the fields one by one, in an object that is not frozen, because that is fast. Calling Job() with all its
    # arguments would take as long as reading the message. Setting the fields of a frozen object would take several
    # times as long. `lost` is made when it is first used.
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
    # Call HasField first, because reading an absent message field would create an object.
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
