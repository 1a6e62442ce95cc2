# ruff: noqa: N802 - the verbs are named by the contract
"""A fake router that runs in the test's own process and gives the answers that a test sets. It has no queues."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, cast

import grpc
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status
from grpc import StatusCode, aio
from grpc_status import rpc_status

from router.codec.lease_verbs import VERBS
from windrow import uuid7
from windrow.v1 import job_pb2, queue_pb2, server_pb2
from windrow.v1.queue_pb2_grpc import QueueServicer, add_QueueServicer_to_server

# The longest time for which a test waits. A test reaches this limit only if something hangs.
WAIT_S = 30.0
Script = Callable[[Any, Any], Awaitable[Any]]


class FakeStream:
    """A fake Consume stream: sends jobs as credit allows, and answers the client's messages."""

    def __init__(self, router: FakeRouter, context: Any) -> None:
        self.router = router
        self.start = queue_pb2.ConsumeStart()
        self.messages: list[queue_pb2.ConsumeRequest] = []
        # How many more jobs may be sent to the consumer.
        self.credit = 0
        self.sent = 0
        self.half_closed = False
        self.began = time.monotonic()
        # Jobs to send after the consumer has closed its side, as if the router had sent them before that.
        self.parting: list[job_pb2.LeasedJob] = []
        # The status with which the stream ended; None while the stream lasts.
        self.ended: StatusCode | None = None
        self._context = context
        self._cut: asyncio.Future[StatusCode] = asyncio.get_running_loop().create_future()
        self._reason = ""
        self._answers: set[asyncio.Task[None]] = set()
        self._turn = asyncio.Lock()

    def cut(self, code: StatusCode = StatusCode.UNAVAILABLE, *, reason: str = "SHARD_UNAVAILABLE") -> None:
        if not self._cut.done():
            self._reason = reason
            self._cut.set_result(code)

    async def send(self, *jobs: job_pb2.LeasedJob) -> None:
        """Sends jobs, even without credit."""
        self.credit -= len(jobs)
        self.sent += len(jobs)
        await self._write(queue_pb2.ConsumeResponse(jobs=jobs))

    async def tell(self, **fields: Any) -> None:
        """Sends a message."""
        await self._write(queue_pb2.ConsumeResponse(**fields))

    async def serve(self, messages: Any) -> None:
        await self._context.send_initial_metadata(())
        reading = asyncio.create_task(self._read(messages))
        giving = asyncio.create_task(self._give())
        try:
            await self._or_cut(reading)
            if self.parting and self.half_closed:
                await self.send(*self.parting)
            if self._answers and not self._cut.done():
                await self._or_cut(asyncio.gather(*self._answers))
            self.ended = self._cut.result() if self._cut.done() else StatusCode.OK
        finally:
            if self.ended is None:
                # The consumer cancelled the stream.
                self.ended = StatusCode.CANCELLED
            for task in (reading, giving, *self._answers):
                task.cancel()
            await asyncio.gather(reading, giving, *self._answers, return_exceptions=True)
            self.router.wake()
        if self.ended is not StatusCode.OK:
            await refuse(self._context, self.ended, "cut", reason=self._reason)

    async def _or_cut(self, work: asyncio.Future[Any]) -> None:
        either: set[asyncio.Future[Any]] = {work, self._cut}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)

    async def _read(self, messages: Any) -> None:
        async for message in messages:
            if message.HasField("start"):
                assert not self.messages, "start belongs in the first message, and in no other"
                self.start = message.start
            self.messages.append(message)
            self.credit += message.credit
            self.router.requests.append(("Consume", message))
            self.router.wake()
            if message.request_id:
                self._answers.add(asyncio.create_task(self._settle(message)))
        self.half_closed = True

    async def _settle(self, message: queue_pb2.ConsumeRequest) -> None:
        script = self.router.scripts.get("Settle")
        told = queue_pb2.Settled() if script is None else await script(message, self)
        if told is not None:
            told.request_id = message.request_id
            await self._write(queue_pb2.ConsumeResponse(settled=[told]))

    async def _write(self, response: queue_pb2.ConsumeResponse) -> None:
        # gRPC accepts no second write before the first one has ended.
        async with self._turn:
            await self._context.write(response)

    async def _give(self) -> None:
        jobs = self.router.jobs
        while True:
            if count := 0 if self.half_closed else min(self.credit, len(jobs)):
                await self.send(*[jobs.popleft() for _ in range(count)])
            else:
                await self.router.next_news()


_LEASE_VERBS = {verb.method: verb for verb in VERBS}


class FakeRouter:
    """Records every request. `scripts` replaces the answers of a verb, `jobs` is what Dequeue and Consume deliver.

    The script of Consume gets the stream before any message is read. The script of Settle gets each message that has a
    request_id.
    """

    def __init__(self) -> None:
        self.address = ""
        self.requests: list[tuple[str, Any]] = []
        self.metadata: list[dict[str, str]] = []
        self.peers: list[str] = []
        self.scripts: dict[str, Script] = {}
        self.jobs: deque[job_pb2.LeasedJob] = deque()
        self.streams: list[FakeStream] = []
        self._news: set[asyncio.Future[None]] = set()
        for method in queue_pb2.DESCRIPTOR.services_by_name["Queue"].methods:
            if not method.client_streaming:
                setattr(self, method.name, partial(self._answer, method.name))

    def give(self, kind: str = "work", payload: bytes = b"", **fields: Any) -> job_pb2.LeasedJob:
        id_ = uuid7()
        fields = {"attempt": 1, "max_attempts": 20, **fields}
        job = job_pb2.LeasedJob(id=id_, lease=id_.encode(), queue="q", kind=kind, payload=payload, **fields)
        self.jobs.append(job)
        self.wake()
        return job

    @property
    def stream(self) -> FakeStream:
        """Returns the newest stream."""
        return self.streams[-1]

    def wake(self) -> None:
        for waiting in self._news:
            if not waiting.done():
                waiting.set_result(None)

    async def next_news(self) -> None:
        waiting = asyncio.get_running_loop().create_future()
        self._news.add(waiting)
        try:
            await waiting
        finally:
            self._news.discard(waiting)

    def of(self, verb: str) -> list[Any]:
        return [request for called, request in self.requests if called == verb]

    def settled(self, verb: str) -> list[str]:
        """Returns the ids of the jobs for which this verb was called, in the order of the calls."""
        entries = [one for message in self.of("Consume") for one in getattr(message, _LEASE_VERBS[verb].stream_field)]
        return [(one if isinstance(one, bytes) else one.lease).decode() for one in entries]

    def acks(self) -> list[queue_pb2.Ack]:
        """Returns the acks on all streams."""
        return [ack for message in self.of("Consume") for ack in message.acks]

    def nacks(self) -> list[queue_pb2.Nack]:
        """Returns the nacks on all streams."""
        return [nack for message in self.of("Consume") for nack in message.nacks]

    async def until(self, holds: Callable[[], object], *, within_s: float = WAIT_S) -> None:
        """Waits until the condition holds. Checks the condition on every request, and every 20 ms for conditions that
        only the test sees."""
        async with asyncio.timeout(within_s):
            while not holds():
                with suppress(TimeoutError):
                    await asyncio.wait_for(self.next_news(), 0.02)

    async def _answer(self, verb: str, request: Any, context: Any) -> Any:
        self.requests.append((verb, request))
        self.metadata.append({key: str(value) for key, value in context.invocation_metadata() or ()})
        self.peers.append(context.peer())
        self.wake()
        if verb in self.scripts:
            return await self.scripts[verb](request, context)
        return self.plain(verb, request)

    def plain(self, verb: str, request: Any) -> Any:
        """Returns the answer of a router without problems."""
        ok = job_pb2.JOB_ANSWER_OK
        if verb in _LEASE_VERBS:
            known = _LEASE_VERBS[verb]
            return known.response(answers=[ok for _ in getattr(request, known.request_field)])
        match verb:
            case "Enqueue":
                return queue_pb2.EnqueueResponse(results=[queue_pb2.EnqueueResult(id=job.id) for job in request.jobs])
            case "Dequeue":
                taken = [self.jobs.popleft() for _ in range(min(request.max_jobs, len(self.jobs)))]
                return queue_pb2.DequeueResponse(jobs=taken)
            case "GetJobs":
                return queue_pb2.GetJobsResponse(not_found_ids=request.ids)
            case "GetServerInfo":
                return server_pb2.GetServerInfoResponse(version="0.0.1")
            case _:
                return queue_pb2.CancelJobsResponse(answers=[ok for _ in request.ids])

    async def Consume(self, request_iterator: Any, context: Any) -> None:
        self.metadata.append({key: str(value) for key, value in context.invocation_metadata() or ()})
        self.peers.append(context.peer())
        stream = FakeStream(self, context)
        self.streams.append(stream)
        self.wake()
        if "Consume" in self.scripts:
            await self.scripts["Consume"](stream, context)
        await stream.serve(request_iterator)


@asynccontextmanager
async def fake_router(address: str = "127.0.0.1:0") -> AsyncGenerator[FakeRouter]:
    router = FakeRouter()
    options = (
        # If a test gives a port, the port is from `reserved_address()`, which has bound it with SO_REUSEPORT.
        ("grpc.so_reuseport", int(not address.endswith(":0"))),
        ("grpc.max_receive_message_length", 17 << 20),
        # A client may ping this router as often as a real router.
        ("grpc.http2.min_ping_interval_without_data_ms", 1000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_ping_strikes", 0),
    )
    server = aio.server(options=options)
    add_QueueServicer_to_server(cast("QueueServicer", router), server)
    port = server.add_insecure_port(address)
    router.address = f"127.0.0.1:{port}"
    await server.start()
    try:
        yield router
    finally:
        await server.stop(None)


async def refuse(
    context: Any,
    code: grpc.StatusCode,
    message: str = "no",
    *,
    retry_after_s: float | None = None,
    violations: dict[str, str] | None = None,
    reason: str = "INTERNAL_ERROR",
) -> None:
    """Ends a call with a status and the details that a router adds to it."""
    status = Status(code=code.value[0], message=message) if violations is None else invalid(message, violations)
    status.details.add().Pack(ErrorInfo(reason=reason, domain="windrow"))
    if retry_after_s is not None:
        delay = Duration(seconds=int(retry_after_s), nanos=round(retry_after_s % 1 * 1e9))
        status.details.add().Pack(RetryInfo(retry_delay=delay))
    await context.abort_with_status(rpc_status.to_status(status))


def invalid(message: str, violations: dict[str, str]) -> Status:
    """Returns the status INVALID_ARGUMENT with these violations, by path."""
    found = [BadRequest.FieldViolation(field=path, description=why) for path, why in violations.items()]
    status = Status(code=StatusCode.INVALID_ARGUMENT.value[0], message=message)
    status.details.add().Pack(BadRequest(field_violations=found))
    return status


def settled_as(answer: job_pb2.JobAnswer.ValueType, *leases: bytes) -> queue_pb2.Settled:
    """Returns an answer to a message: these leases have this answer, and all other leases are OK."""
    if answer == job_pb2.JOB_ANSWER_OK:
        return queue_pb2.Settled()
    return queue_pb2.Settled(not_ok=[queue_pb2.LeaseAnswer(lease=lease, answer=answer) for lease in leases])


def failing(times: int, code: grpc.StatusCode, router: FakeRouter, verb: str, **how: Any) -> Script:
    """Returns a script that fails this many times, then gives the normal answers."""
    left = times

    async def script(request: Any, context: Any) -> Any:
        nonlocal left
        if left > 0:
            left -= 1
            await refuse(context, code, **how)
        return router.plain(verb, request)

    return script
