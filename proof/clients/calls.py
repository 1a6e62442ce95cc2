"""The calls of a worker. Each try is recorded in the worker's history."""

from __future__ import annotations

import asyncio
import enum
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import grpc
from google.protobuf.duration_pb2 import Duration

import windrow
from proof.clients.site import QUEUE
from proof.history import (
    Answer,
    Outcome,
    Recorder,
    Verb,
    asked_to_add,
    asked_to_signal,
    asked_to_store,
    leased,
    payload_of,
)
from windrow.v1 import job_pb2, queue_pb2, queue_pb2_grpc, workflows_pb2, workflows_pb2_grpc

_Stub = TypeVar("_Stub")

TRY_S = 5.0
WRITE_FAILED = "WRITE_FAILED"
# The largest number of tries of a settle or a signal, if no router answers.
_TRIES_MAX = 5
_PAUSE_S = 0.3
_ANSWERS = {
    job_pb2.JOB_ANSWER_OK: Answer.OK,
    job_pb2.JOB_ANSWER_STALE: Answer.STALE,
    job_pb2.JOB_ANSWER_NOT_FOUND: Answer.NOT_FOUND,
    job_pb2.JOB_ANSWER_CANCELLED: Answer.CANCELLED,
}
_REFUSALS = frozenset(
    {
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.ALREADY_EXISTS,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
    }
)
# A frozen router accepts a connection, but does not answer. Therefore the timeouts of a connection must be short.
_OPTIONS: Sequence[tuple[str, int]] = (
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.keepalive_time_ms", 6000),
    ("grpc.keepalive_timeout_ms", 3000),
    ("grpc.max_receive_message_length", -1),
)


class Added(enum.Enum):
    """What a call that adds nodes did to the job that adds them."""

    # The job continues with its lease.
    GOES_ON = enum.auto()
    # The lease has ended, and the job waits for the nodes.
    WAITS = enum.auto()
    # Nothing was done.
    REFUSED = enum.auto()
    UNKNOWN = enum.auto()


def connect(address: str) -> grpc.aio.Channel:
    """Opens a channel with its own connection. So with several channels, calls reach several router processes."""
    return grpc.aio.insecure_channel(address, options=_OPTIONS)


def duration(seconds: float) -> Duration:
    whole = Duration()
    whole.FromNanoseconds(round(seconds * 1e9))
    return whole


def asked(job: windrow.NewJob) -> dict[str, object]:
    """Returns a job that the Python client enqueues, in the form of a history's line."""
    delay = job.delay or 0.0
    delay_s = delay.total_seconds() if isinstance(delay, timedelta) else delay
    return asked_to_store(job=str(job.id), queue=job.queue, key=job.dedup_key, delay_s=delay_s)


def answer_of(value: int) -> Answer:
    return _ANSWERS[job_pb2.JobAnswer.ValueType(value)]


def outcome_of(error: grpc.aio.AioRpcError) -> tuple[Outcome, str]:
    code = error.code()
    return Outcome.ERROR if code in _REFUSALS else Outcome.UNKNOWN, code_name(code, error.details())


async def read(call: Any) -> Any:
    """Returns a stream's next message, or EOF. If the connection is cut during the read, `grpc.aio` returns None; this
    function then raises InvalidStateError, as a write does."""
    message = await call.read()
    if message is None:
        raise asyncio.InvalidStateError("the connection was cut while a message was read")
    return message


def code_name(code: grpc.StatusCode, details: str | None) -> str:
    """Returns the name of a status. WRITE_FAILED means that no router sent the status. If a message is written to a
    stream that has just ended, the client's gRPC library invents a status and forgets the stream's real status."""
    if code is grpc.StatusCode.INTERNAL and details == "Internal error from Core":
        return WRITE_FAILED
    return code.name


def error_code(error: windrow.WindrowError) -> str:
    """Returns the name of the status from which the Python client made this error."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", type(error).__name__).upper()


class Calls:
    """The unary calls of one process."""

    def __init__(self, channels: Sequence[grpc.aio.Channel], recorder: Recorder) -> None:
        self._stubs = [queue_pb2_grpc.QueueStub(channel) for channel in channels]
        self._workflows = [workflows_pb2_grpc.WorkflowsStub(channel) for channel in channels]
        self._turn = 0
        self._recorder = recorder

    async def dequeue(
        self, org: str, queue: str, *, max_jobs: int, window_s: float, wait_s: float, worker: str
    ) -> Sequence[job_pb2.LeasedJob]:
        request = queue_pb2.DequeueRequest(
            org=org, queues=[queue], max_jobs=max_jobs, visibility_window=duration(window_s), worker=worker
        )
        if wait_s:
            request.wait.CopyFrom(duration(wait_s))
        number = self._recorder.begin(Verb.DEQUEUE, org, {"window_s": window_s})
        stub = self._stub()
        response = await self._answered(number, lambda: stub.Dequeue(request, timeout=TRY_S + wait_s))
        if response is None:
            return []
        self._recorder.got(number, [told(job) for job in response.jobs])
        self._recorder.end(number, Outcome.OK)
        jobs: Sequence[job_pb2.LeasedJob] = response.jobs
        return jobs

    async def settle(self, verb: Verb, org: str, leases: Sequence[bytes], *, span_s: float = 0.0) -> None:
        """Settles or extends these leases. Repeats the call until a router answers, at most `_TRIES_MAX` times.
        `span_s`: a nack's delay, or an extend's window."""
        asked: Mapping[str, object] = {"leases": [lease.hex() for lease in leases], "span_s": span_s}
        for _ in range(_TRIES_MAX):
            number = self._recorder.begin(verb, org, asked)
            send = self._settle(self._stub(), verb, org, leases, span_s)
            response = await self._answered(number, send)
            if response is not None:
                answers = [answer_of(answer) for answer in response.answers]
                self._recorder.end(number, Outcome.OK, answered=answers)
                return
            await asyncio.sleep(_PAUSE_S)

    async def add_nodes(
        self,
        org: str,
        job: job_pb2.LeasedJob,
        nodes: Mapping[str, Sequence[str]],
        *,
        wait: bool = False,
        try_s: float = TRY_S,
    ) -> Added:
        """Adds nodes to the job's workflow, in one try. `nodes`: the names of the new nodes, each with the names of its
        parents. With `wait`, the job waits for the nodes."""
        workflow = job.workflow.workflow_id
        request = workflows_pb2.AddNodesRequest(org=org, id=workflow, lease=job.lease, wait=wait)
        if wait:
            request.on_failed = workflows_pb2.FAILURE_POLICY_RUN
        for name, after in nodes.items():
            node = request.nodes.add(name=name)
            node.job.template.queue, node.job.template.kind = QUEUE, "work"
            node.job.template.payload = payload_of(org, name, 0)
            for other in after:
                node.after.add(node=other, on_failed=workflows_pb2.FAILURE_POLICY_RUN)
        asked = asked_to_add(workflow=workflow, lease=job.lease, nodes=nodes, wait=wait)
        number = self._recorder.begin(Verb.ADD, org, asked)
        stub = self._next(self._workflows)
        try:
            response = await stub.AddNodes(request, timeout=try_s)
        except grpc.aio.AioRpcError as error:
            outcome, code = outcome_of(error)
            self._recorder.end(number, outcome, code=code)
            return Added.UNKNOWN if outcome is Outcome.UNKNOWN else Added.REFUSED
        jobs = dict(zip(nodes, response.job_ids, strict=True))
        answered = {"jobs": jobs, "stored": response.added, "waits": response.waits}
        self._recorder.end(number, Outcome.OK, answered=answered)
        return Added.WAITS if response.waits else Added.GOES_ON

    async def signal(self, org: str, workflow: str, node: str, payload: str) -> None:
        """Gives a signal to a node of a workflow. Repeats the call until a router answers, at most `_TRIES_MAX`
        times."""
        asked = asked_to_signal(workflow=workflow, node=node, payload=payload)
        request = workflows_pb2.SignalNodeRequest(org=org, id=workflow, node=node, payload=payload.encode())
        for _ in range(_TRIES_MAX):
            number = self._recorder.begin(Verb.SIGNAL, org, asked)
            try:
                response = await self._next(self._workflows).SignalNode(request, timeout=TRY_S)
            except grpc.aio.AioRpcError as error:
                outcome, code = outcome_of(error)
                self._recorder.end(number, outcome, code=code)
                if outcome is Outcome.ERROR:
                    return
                await asyncio.sleep(_PAUSE_S)
            else:
                self._recorder.end(number, Outcome.OK, answered={"is_first": response.accepted})
                return

    def _settle(
        self, stub: queue_pb2_grpc.QueueAsyncStub, verb: Verb, org: str, leases: Sequence[bytes], span_s: float
    ) -> Callable[[], Any]:
        match verb:
            case Verb.ACK:
                acks = queue_pb2.AckRequest(org=org, acks=[queue_pb2.Ack(lease=lease) for lease in leases])
                return lambda: stub.Ack(acks, timeout=TRY_S)
            case Verb.NACK | Verb.KILL:
                nacks = queue_pb2.NackRequest(org=org, nacks=[nack(verb, lease, span_s) for lease in leases])
                return lambda: stub.Nack(nacks, timeout=TRY_S)
            case Verb.RELEASE:
                releases = queue_pb2.ReleaseRequest(org=org, leases=leases)
                return lambda: stub.Release(releases, timeout=TRY_S)
            case Verb.EXTEND:
                extends = queue_pb2.ExtendRequest(
                    org=org,
                    extends=[queue_pb2.Extend(lease=lease) for lease in leases],
                    visibility_window=duration(span_s),
                )
                return lambda: stub.Extend(extends, timeout=TRY_S)
            case _:
                raise ValueError(f"{verb} settles nothing")

    async def _answered(self, number: int, send: Callable[[], Any]) -> Any:
        try:
            return await send()
        except grpc.aio.AioRpcError as error:
            outcome, code = outcome_of(error)
            self._recorder.end(number, outcome, code=code)
            return None

    def _stub(self) -> queue_pb2_grpc.QueueAsyncStub:
        return self._next(self._stubs)

    def _next(self, stubs: Sequence[_Stub]) -> _Stub:
        self._turn = (self._turn + 1) % len(stubs)
        return stubs[self._turn]


def nack(verb: Verb, lease: bytes, span_s: float) -> queue_pb2.Nack:
    message = queue_pb2.Nack(lease=lease, failure=job_pb2.Failure(message="chaos", permanent=verb is Verb.KILL))
    if verb is not Verb.KILL:
        message.retry_after.CopyFrom(duration(span_s))
    return message


def told(job: job_pb2.LeasedJob) -> dict[str, object]:
    return leased(lease=job.lease, attempt=job.attempt, payload=job.payload)
