"""Helpers for the tests of programs that use Windrow. They need no cluster: they run a handler, and record what is
enqueued.

    result = await testing.run_job(worker, windrow.NewJob("emails", "send_email", {"to": "ada@example.com"}))
    assert result.state is windrow.JobState.SUCCEEDED

    client = testing.RecordingClient(org="acme")
    await welcome(client, "ada@example.com")
    testing.assert_enqueued(client, "emails", "send_email", {"to": "ada@example.com"})

Everything except the network is the real code: middleware, encoding, timeouts, threads and processes. This module
simulates neither time nor retries, and no job runs by itself.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.message import Message
from google.rpc.code_pb2 import INVALID_ARGUMENT
from google.rpc.error_details_pb2 import BadRequest
from google.rpc.status_pb2 import Status
from grpc import StatusCode

from windrow.calls import FINAL, Calls, Method, error_of
from windrow.client import Client
from windrow.errors import Violation, invalid_argument
from windrow.failures import Failure
from windrow.ids import uuid7
from windrow.job_rules import job_faults, org_fault
from windrow.jobs import AttemptOutcome, Job, JobState, WorkflowNode, read_leased, state_value
from windrow.leases import HeldLease
from windrow.new_jobs import JobOptions, NewJob, new_message, read_new
from windrow.outcomes import Action, Done, Failed, Snoozed, Waits
from windrow.payloads import Payload, encode, timestamp
from windrow.reports import Progress, Report, Reporter
from windrow.sync_client import SyncClient
from windrow.tokens import Metadata
from windrow.v1 import job_pb2, queue_pb2, workflows_pb2
from windrow.worker import Worker

if TYPE_CHECKING:
    from windrow.channels import Stub

_PRIORITY_DEFAULT = 5
_MAX_ATTEMPTS_DEFAULT = 20
_LEASED_FIELDS = frozenset(job_pb2.LeasedJob.DESCRIPTOR.fields_by_name)
_ANY_PAYLOAD: Any = object()

_Request = TypeVar("_Request", bound=Message)
_Response = TypeVar("_Response")


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptResult:
    """The result of one attempt of a handler."""

    # ACKED, NACKED or RELEASED. A Snooze and a Waiting release the job, and do not count as attempts.
    outcome: AttemptOutcome
    # The job's state after the attempt: SUCCEEDED, DEAD, SCHEDULED if the job will run again, or BLOCKED after a
    # Waiting.
    state: JobState
    # The handler's result, as the bytes that are stored.
    result: bytes = b""
    # The failure that a nack reports: the type, message and stack of the handler's error.
    failure: Failure | None = None
    # The time after which the job runs again. None: the job's retry policy sets this time, or the job does not run
    # again.
    after: timedelta | None = None
    # The reason of a Snooze.
    reason: str = ""
    # The lines of job.log(), and the last progress and checkpoint of job.report().
    log: str = ""
    progress: Progress | None = None
    checkpoint: bytes | None = None
    # The jobs of the nodes that the handler has added with job.workflow, by the name of the node. Their payloads are
    # bytes. The nodes that the handler waits for are included.
    added: Mapping[str, NewJob] = field(default_factory=dict[str, NewJob])


async def run_job(
    worker: Worker,
    job: NewJob,
    *,
    attempt: int = 1,
    checkpoint: Payload = None,
    results: Mapping[str, Payload] | None = None,
) -> AttemptResult:
    """Runs the worker's handler for this job, as a running worker does: through its middleware, in a thread or process
    if the handler needs one, and within its timeout. A batch handler gets a batch with this job only. run_job needs no
    router, and uses only the org and the tracing of the worker's client.

    `attempt`: the number of the attempt. If the last of the job's `max_attempts` (20 by default) fails, the job is
    DEAD. `checkpoint`: the checkpoint that an earlier attempt has reported. In a test without an event loop, call
    asyncio.run(run_job(...)).

    `results`: the results of nodes that have succeeded, by name. If `results` is given, the job is a node of a
    workflow: job.workflow.add adds nodes. job.workflow.wait_for returns the nodes that it was given if `results` has a
    result for each of them. Otherwise the attempt ends, and the job is BLOCKED. If you then call run_job again with the
    results, the handler runs again from its beginning.

    If the handler raises an error, the returned AttemptResult has it. Raises InvalidJob for a job that a router would
    refuse. Raises InvalidRequest if the worker does not take jobs of the job's queue, or has no handler for the job's
    kind."""
    message = new_message(job)
    if faults := list(job_faults(message)):
        raise error_of(_refusal("jobs[0]", faults))
    if job.queue not in worker.queues:
        raise invalid_argument("queue", f"must be one of the worker's, not {job.queue!r}")
    # This module belongs to the same package as the worker, so it may use what is private there.
    handlers = worker._handlers  # noqa: SLF001
    batch_handlers = worker._batch_handlers  # noqa: SLF001
    if job.kind not in handlers:
        raise invalid_argument("kind", f"must have a handler, and {job.kind!r} has none")
    encoded = {name: encode(result, what=f"result of node {name!r}") for name, result in (results or {}).items()}
    told: list[Report] = []
    leased = _leased(message, attempt, checkpoint, Reporter(lambda _, report: told.append(report)))
    flow = _FlowClient(org=worker.client.org)
    if results is not None:
        _flow_calls(flow.calls).results = encoded
        lease = leased.lease
        node = WorkflowNode(workflow_id=uuid7(), node=0, caller=lambda of: (flow, Job(lease=lease, workflow=of)))
        leased = replace(leased, workflow=node)
    held = HeldLease(leased, time.monotonic(), math.inf)

    async def handle() -> Action:
        if gathering := batch_handlers.by_kind.get(job.kind):
            (action,) = await batch_handlers.run(gathering, [held])
            return action
        return await handlers.run(held)

    handlers.open(worker.concurrency)
    try:
        # Run the handler in a task of its own, as a worker does. If the handler's code cancels this task, the attempt
        # has failed.
        handling = asyncio.create_task(handle())
        try:
            action = await handling
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            action = handlers.outcome_of(held, error)
    finally:
        handlers.close()
    reported = Report()
    for report in told:
        reported = reported.then(report)
    ended = _result_of(action, leased)
    return replace(
        ended,
        log=leased.logged.read()[0],
        progress=reported.progress,
        checkpoint=reported.checkpoint,
        added=_flow_calls(flow.calls).added,
    )


def _leased(message: job_pb2.NewJob, attempt: int, checkpoint: Payload, reporter: Reporter) -> Job:
    template, now = message.template, timestamp(datetime.now(UTC))
    max_attempts = template.max_attempts or _MAX_ATTEMPTS_DEFAULT
    if not 1 <= attempt <= max_attempts:
        raise invalid_argument("attempt", f"must be 1 to {max_attempts}, the job's max_attempts, not {attempt}")
    content: dict[str, Any] = {
        field.name: value for field, value in template.ListFields() if field.name in _LEASED_FIELDS
    }
    leased = job_pb2.LeasedJob(**content)
    leased.lease = b"a lease of windrow.testing"
    leased.id = message.id
    leased.priority = template.priority or _PRIORITY_DEFAULT
    leased.attempt = attempt
    leased.max_attempts = max_attempts
    leased.enqueued_at.CopyFrom(now)
    leased.run_at.CopyFrom(now)
    if checkpoint is not None:
        leased.checkpoint = encode(checkpoint, what="checkpoint")
    return read_leased(leased, reporter=reporter)


def _result_of(action: object, job: Job) -> AttemptResult:
    match action:
        case Done():
            return AttemptResult(outcome=AttemptOutcome.ACKED, state=JobState.SUCCEEDED, result=action.result)
        case Failed():
            is_last = action.failure.permanent or job.attempt >= job.max_attempts
            after = None if is_last or action.retry_after_s is None else timedelta(seconds=action.retry_after_s)
            state = JobState.DEAD if is_last else JobState.SCHEDULED
            return AttemptResult(outcome=AttemptOutcome.NACKED, state=state, failure=action.failure, after=after)
        case Snoozed():
            after = timedelta(seconds=action.after_s)
            return AttemptResult(
                outcome=AttemptOutcome.RELEASED, state=JobState.SCHEDULED, after=after, reason=action.reason
            )
        case Waits():
            return AttemptResult(outcome=AttemptOutcome.RELEASED, state=JobState.BLOCKED)
        case _:
            raise AssertionError(f"no outcome of a handler: {action!r}")


class _Recorder(Calls):
    """Answers Enqueue calls as a router does. Refuses every other call."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        # The stored jobs of each org.
        self.stored: dict[str, list[job_pb2.NewJob]] = defaultdict(list)

    def loop(self) -> asyncio.AbstractEventLoop:
        # This client may be used in any loop, because it has no connection.
        return asyncio.get_running_loop()

    def open(self, method: Callable[[Stub], Any], *, org: str | None, token: Metadata = ()) -> Any:
        raise NotImplementedError("a RecordingClient runs no worker: use windrow.testing.run_job")

    async def call(
        self,
        method: Callable[[Stub], Method[_Request, _Response]],
        request: _Request,
        *,
        timeout_s: float | None = None,
        wait_s: float = 0.0,
        before_try: Callable[[float], object] | None = None,
        final: Collection[StatusCode] = FINAL,
        final_reason: str = "",
        refusals: Collection[str] = (),
        verb: str = "",
    ) -> Any:
        if not isinstance(request, queue_pb2.EnqueueRequest):
            name = verb or type(request).__name__.removesuffix("Request")
            raise NotImplementedError(f"{name}: a RecordingClient stores nothing, and only takes enqueues")
        if fault := org_fault(request.org):
            raise invalid_argument("org", fault)
        refused = {at: faults for at, job in enumerate(request.jobs) if (faults := list(job_faults(job)))}
        if refused and not request.independent:
            at, faults = next(iter(refused.items()))
            raise error_of(_refusal(f"jobs[{at}]", faults))
        return queue_pb2.EnqueueResponse(
            results=[
                queue_pb2.EnqueueResult(error=_refusal(f"jobs[{at}]", refused[at]))
                if at in refused
                else self._store(request.org, job)
                for at, job in enumerate(request.jobs)
            ]
        )

    def _store(self, org: str, job: job_pb2.NewJob) -> queue_pb2.EnqueueResult:
        stored = self.stored[org]
        same_id = next((known for known in stored if known.id == job.id), None)
        known = same_id or next((known for known in stored if _has_key_of(known, job)), None)
        if known is None:
            stored.append(job)
            return queue_pb2.EnqueueResult(id=job.id)
        differs = same_id is not None and any(
            getattr(same_id.template, name) != getattr(job.template, name) for name in ("queue", "kind", "payload")
        )
        waits = known.delay.ToTimedelta() > timedelta() or (
            known.HasField("run_at") and known.run_at.ToDatetime(UTC) > datetime.now(UTC)
        )
        state = state_value(JobState.SCHEDULED if waits else JobState.READY)
        return queue_pb2.EnqueueResult(id=known.id, duplicate=True, state=state, differs=differs)


class _FlowCalls(_Recorder):
    """Answers the calls that a job makes about its workflow, as a router does. Assumes that only the nodes with results
    have ended."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.results: Mapping[str, bytes] = {}
        self.added: dict[str, NewJob] = {}

    async def call(self, method: Any, request: Message, **options: Any) -> Any:
        match request:
            case workflows_pb2.AddNodesRequest():
                return self._add(request)
            case workflows_pb2.ListParentsRequest():
                return workflows_pb2.ListParentsResponse(
                    parents=[
                        workflows_pb2.ParentInfo(
                            name=name,
                            job_id=job.id or "",
                            state=workflows_pb2.NODE_STATE_SUCCEEDED,
                            result=self.results[name],
                        )
                        for name, job in self.added.items()
                        if name in self.results
                    ]
                )
            case _:
                return await super().call(method, request, **options)

    def _add(self, request: workflows_pb2.AddNodesRequest) -> workflows_pb2.AddNodesResponse:
        new = {at: node for at, node in enumerate(request.nodes) if node.name not in self.added}
        for at, node in new.items():
            # Make the job's id, as a router does.
            node.job.id = uuid7()
            if faults := list(job_faults(node.job)):
                raise error_of(_refusal(f"nodes[{at}].job", faults))
        self.added |= {node.name: read_new(node.job) for node in new.values()}
        return workflows_pb2.AddNodesResponse(
            job_ids=[self.added[node.name].id or "" for node in request.nodes],
            added=len(new),
            waits=request.wait and any(node.name not in self.results for node in request.nodes),
        )


class _FlowClient(Client):
    """The client through which a job adds nodes in run_job."""

    _calls_class = _FlowCalls


def _flow_calls(calls: Calls) -> _FlowCalls:
    assert isinstance(calls, _FlowCalls)
    return calls


class RecordingClient(Client):
    """A Client that connects to nothing. It keeps the jobs that a program enqueues, and refuses what a router would
    refuse. A second job with the same id, or with the same dedup key in the same queue, is a duplicate and is not kept.
    Dedup keys are remembered for ever. Every call except enqueues raises NotImplementedError.

    The arguments are those of Client. Each client that for_org returns has only the jobs of its org.
    """

    _calls_class = _Recorder

    @property
    def jobs(self) -> Sequence[NewJob]:
        """The jobs of this org, in the order in which they were stored, with their payloads as bytes."""
        return tuple(read_new(message) for message in _recorder(self.calls).stored[self.org])

    def enqueued(
        self, queue: str = "", kind: str = "", payload: Payload = _ANY_PAYLOAD, **options: Unpack[JobOptions]
    ) -> list[NewJob]:
        """Returns the jobs that have this queue, kind and payload, and these options. An argument that is left out
        matches all jobs. JSON payloads are compared as values: the order of their keys does not matter."""
        # Encode the wanted job and read it again, as the recorded jobs were, so that 60 s equal timedelta(minutes=1).
        wanted = read_new(new_message(NewJob(queue, kind, b"" if payload is _ANY_PAYLOAD else payload, **options)))
        names = [*options, *(["queue"] if queue else ()), *(["kind"] if kind else ())]
        return [
            job
            for job in self.jobs
            if all(getattr(job, name) == getattr(wanted, name) for name in names)
            and (payload is _ANY_PAYLOAD or _same(job.payload, wanted.payload))
        ]

    def clear(self) -> None:
        """Forgets the jobs of this org, their ids and their dedup keys."""
        _recorder(self.calls).stored.pop(self.org, None)


class RecordingSyncClient(SyncClient):
    """A RecordingClient for code that uses a SyncClient."""

    _client_class = RecordingClient

    @property
    def jobs(self) -> Sequence[NewJob]:
        """As RecordingClient.jobs."""
        return self._recording.jobs

    def enqueued(
        self, queue: str = "", kind: str = "", payload: Payload = _ANY_PAYLOAD, **options: Unpack[JobOptions]
    ) -> list[NewJob]:
        """As RecordingClient.enqueued."""
        return self._recording.enqueued(queue, kind, payload, **options)

    def clear(self) -> None:
        """As RecordingClient.clear."""
        self._recording.clear()

    @property
    def _recording(self) -> RecordingClient:
        assert isinstance(self._client, RecordingClient)
        return self._client


def assert_enqueued(
    client: RecordingClient | RecordingSyncClient,
    queue: str = "",
    kind: str = "",
    payload: Payload = _ANY_PAYLOAD,
    **options: Unpack[JobOptions],
) -> NewJob:
    """Returns the only job that matches, in the sense of RecordingClient.enqueued. If no job or several jobs match,
    raises an AssertionError that lists the enqueued jobs."""
    found = client.enqueued(queue, kind, payload, **options)
    if len(found) == 1:
        return found[0]
    all_jobs = "".join(f"\n  {job}" for job in client.jobs) or " nothing"
    raise AssertionError(f"{len(found)} enqueued jobs match, not 1; enqueued were:{all_jobs}")


def _has_key_of(known: job_pb2.NewJob, job: job_pb2.NewJob) -> bool:
    return (
        job.HasField("dedup")
        and known.dedup.key == job.dedup.key
        and known.dedup.while_live == job.dedup.while_live
        and known.template.queue == job.template.queue
    )


def _recorder(calls: Calls) -> _Recorder:
    assert isinstance(calls, _Recorder)
    return calls


def _refusal(job: str, faults: Sequence[Violation]) -> Status:
    """Returns the status by which a router refuses a job. `job`: the job's path in the request."""
    paths = [(f"{job}.{fault.field}", fault.description) for fault in faults]
    bad = BadRequest(field_violations=[BadRequest.FieldViolation(field=path, description=text) for path, text in paths])
    detail = AnyMessage()
    detail.Pack(bad)
    return Status(code=INVALID_ARGUMENT, message="; ".join(f"{path}: {text}" for path, text in paths), details=[detail])


def _same(found: Payload, wanted: Payload) -> bool:
    if found == wanted:
        return True
    assert isinstance(found, bytes)
    assert isinstance(wanted, bytes)
    with suppress(ValueError):
        one: object = json.loads(found)
        two: object = json.loads(wanted)
        return one == two
    return False
