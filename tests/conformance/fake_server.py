# ruff: noqa: N802 - the calls are named by the contract
"""A server of windrow.v1.Queue that does what a scenario tells it, and records what the client does.

The server stores nothing. Unless a scenario says otherwise, it sends the given jobs as credit allows, and answers OK.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any, cast

from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2, status_pb2
from grpc import StatusCode, aio

from router.codec.lease_verbs import VERBS, LeaseVerb
from tests.conformance.transcript import Enqueue, Event, Stream, Transcript, entries
from tests.jobs import job_id
from windrow.v1 import job_pb2, queue_pb2, queue_pb2_grpc, server_pb2

DETAILS = "grpc-status-details-bin"
_JOBS_MAX = 100
_CANCELLED_S = 0.05
_START_S = 1.0
# How long the server's stop waits for the streams of clients that are being killed.
_STOP_S = 5.0
Settle = Callable[[queue_pb2.ConsumeRequest], queue_pb2.Settled | None]
_leases = itertools.count(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """The status with which a call is refused, or with which a message is answered that was not settled."""

    code: StatusCode
    reason: str = ""
    retry_after_s: float | None = None

    @property
    def status(self) -> status_pb2.Status:
        status = status_pb2.Status(code=self.code.value[0], message=f"the scenario says {self.code.name}")
        if self.reason:
            status.details.add().Pack(error_details_pb2.ErrorInfo(reason=self.reason, domain="windrow"))
        if self.retry_after_s is not None:
            delay = Duration(nanos=round(self.retry_after_s * 1e9) % 1_000_000_000, seconds=int(self.retry_after_s))
            status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=delay))
        return status


AWAY = Refusal(code=StatusCode.UNAVAILABLE, reason="SHARD_UNAVAILABLE")
TOO_LARGE = Refusal(code=StatusCode.INVALID_ARGUMENT, reason="MESSAGE_TOO_LARGE")


# This has the type Any, because gRPC also accepts a method Consume that writes its answers, but the types of the
# generated class do not.
_Servicer: Any = queue_pb2_grpc.QueueServicer


class FakeServer(_Servicer):  # type: ignore[misc]
    """Answers the calls of consumers. Other methods are UNIMPLEMENTED. Scenarios replace two functions. `greet` gets
    the number of the stream, from 1 on, and says whether the stream is refused. `settle` answers a message with leases;
    if it returns None, the message is never answered."""

    def __init__(self, *, org: str, queue: str) -> None:
        self.seen = Transcript(org=org, queue=queue)
        self.greet: Callable[[int], Refusal | None] = lambda _: None
        self.settle: Settle = self.settled
        # The answer for each lease. A lease that is not in this dict gets OK.
        self.answers: dict[bytes, job_pb2.JobAnswer.ValueType] = {}
        # Each of the next calls of Enqueue gets one of these refusals. Later calls are answered.
        self.enqueue_refusals: deque[Refusal] = deque()
        # A job to send when the client has closed its side, as if the server had sent the job before that.
        self.parting: job_pb2.LeasedJob | None = None
        self._pool: deque[job_pb2.LeasedJob] = deque()
        self._calls: list[_Call] = []
        self._news: set[asyncio.Future[None]] = set()
        self._answering = asyncio.Event()
        self._answering.set()

    # Methods for scenarios.

    def give(self, *payloads: str, kind: str = "work") -> list[bytes]:
        """Makes jobs, which are sent as credit allows. Returns their leases."""
        return self.give_jobs(*[self.new_job(payload, kind=kind) for payload in payloads])

    def give_jobs(self, *jobs: job_pb2.LeasedJob) -> list[bytes]:
        self._pool += jobs
        self.wake()
        return [job.lease for job in jobs]

    def new_job(self, payload: str, *, kind: str = "work") -> job_pb2.LeasedJob:
        lease = b"lease %08d" % next(_leases)
        return job_pb2.LeasedJob(
            id=job_id(),
            lease=lease,
            org=self.seen.org,
            queue=self.seen.queue,
            kind=kind,
            payload=payload.encode(),
            attempt=1,
            max_attempts=20,
        )

    def keep_rest(self) -> None:
        """Drops the jobs that were not sent yet."""
        self._pool.clear()

    @contextlib.contextmanager
    def silence(self) -> Any:
        """Holds back all answers during the block, and sends them after it."""
        self._answering.clear()
        try:
            yield
        finally:
            self._answering.set()

    async def say(self, **fields: Any) -> None:
        """Sends a message on the newest stream."""
        await self._calls[-1].send(queue_pb2.ConsumeResponse(**fields))

    async def revoke(self, leases: Iterable[bytes], answer: job_pb2.JobAnswer.ValueType) -> None:
        """Ends leases, and tells the client."""
        self.answers.update(dict.fromkeys(leases, answer))
        await self.say(revoked=[queue_pb2.LeaseAnswer(lease=lease, answer=answer) for lease in leases])

    async def drain(self) -> None:
        """Sends no more jobs on the newest stream, and tells the client that the stream will end."""
        self._calls[-1].gives = False
        await self.say(draining=True)

    def end(self, refusal: Refusal) -> None:
        """Ends the newest stream with this status."""
        self._calls[-1].end(refusal)

    def settled(self, request: queue_pb2.ConsumeRequest) -> queue_pb2.Settled:
        not_ok = [
            queue_pb2.LeaseAnswer(lease=lease, answer=self.answers[lease])
            for _, lease, _ in entries(request)
            if lease in self.answers
        ]
        return queue_pb2.Settled(request_id=request.request_id, not_ok=not_ok)

    def wake(self) -> None:
        for waiting in self._news:
            if not waiting.done():
                waiting.set_result(None)

    async def news(self) -> None:
        """Waits until something happens."""
        waiting = asyncio.get_running_loop().create_future()
        self._news.add(waiting)
        try:
            await waiting
        finally:
            self._news.discard(waiting)

    # Calls of the client.

    async def Consume(self, requests: AsyncIterator[queue_pb2.ConsumeRequest], context: Any) -> None:
        call = _Call(self, context)
        self._calls.append(call)
        self.seen.streams.append(call.stream)
        self.wake()
        refusal = self.greet(len(self.seen.streams))
        try:
            if refusal is None:
                refusal = await call.serve(requests)
            else:
                await call.read_start(requests)
        except asyncio.CancelledError:
            call.over(StatusCode.CANCELLED)
            raise
        call.over(refusal.code if refusal else StatusCode.OK, None if refusal is None else refusal.retry_after_s)
        if refusal is not None and refusal.code is not StatusCode.OK:
            await _abort(context, refusal)

    async def Enqueue(self, request: queue_pb2.EnqueueRequest, context: Any) -> queue_pb2.EnqueueResponse:
        refusal = self.enqueue_refusals.popleft() if self.enqueue_refusals else None
        now_s = asyncio.get_running_loop().time()
        self.seen.enqueues.append(
            Enqueue(
                at_s=now_s,
                answered_s=now_s,
                metadata=_metadata(context),
                ids=tuple(job.id for job in request.jobs),
                code=refusal.code if refusal else StatusCode.OK,
                retry_after_s=refusal.retry_after_s if refusal else None,
            )
        )
        self.wake()
        if refusal is not None:
            await _abort(context, refusal)
        return queue_pb2.EnqueueResponse(results=[queue_pb2.EnqueueResult(id=job.id) for job in request.jobs])

    # Calls that no scenario is about.

    async def Dequeue(self, _request: queue_pb2.DequeueRequest, _context: Any) -> queue_pb2.DequeueResponse:
        return queue_pb2.DequeueResponse()

    async def GetJobs(self, request: queue_pb2.GetJobsRequest, _context: Any) -> queue_pb2.GetJobsResponse:
        return queue_pb2.GetJobsResponse(not_found_ids=request.ids)

    async def CancelJobs(self, request: queue_pb2.CancelJobsRequest, _context: Any) -> queue_pb2.CancelJobsResponse:
        return queue_pb2.CancelJobsResponse(answers=[job_pb2.JOB_ANSWER_NOT_FOUND for _ in request.ids])

    async def WaitJob(self, _request: queue_pb2.WaitJobRequest, _context: Any) -> queue_pb2.WaitJobResponse:
        return queue_pb2.WaitJobResponse()

    async def GetServerInfo(self, _request: Any, _context: Any) -> server_pb2.GetServerInfoResponse:
        return server_pb2.GetServerInfoResponse()

    def settle_unary(self, context: Any, request: queue_pb2.ConsumeRequest) -> list[job_pb2.JobAnswer.ValueType]:
        now_s = asyncio.get_running_loop().time()
        answer = queue_pb2.ConsumeResponse(settled=[self.settled(request)])
        said = [Event(at_s=now_s, message=request), Event(at_s=now_s, message=answer)]
        self.seen.calls.append(Stream(opened_s=now_s, metadata=_metadata(context), events=said, ended=StatusCode.OK))
        self.wake()
        return [self.answers.get(lease, job_pb2.JOB_ANSWER_OK) for _, lease, _ in entries(request)]

    def next_jobs(self, count: int) -> list[job_pb2.LeasedJob]:
        return [self._pool.popleft() for _ in range(min(count, len(self._pool), _JOBS_MAX))]

    async def until_answering(self) -> None:
        await self._answering.wait()


def _unary(verb: LeaseVerb) -> Callable[[FakeServer, Any, Any], Awaitable[Any]]:
    """Makes the method of a verb that is called by itself, outside of a stream."""

    async def answer(server: FakeServer, request: Any, context: Any) -> Any:
        said = {verb.stream_field: getattr(request, verb.request_field)}
        return verb.response(answers=server.settle_unary(context, queue_pb2.ConsumeRequest(request_id=1, **said)))

    return answer


for _verb in VERBS:
    setattr(FakeServer, _verb.method, _unary(_verb))


class _Call:
    """The server's side of one stream."""

    def __init__(self, server: FakeServer, context: Any) -> None:
        self._loop = asyncio.get_running_loop()
        self.stream = Stream(opened_s=self._loop.time(), metadata=_metadata(context))
        self.gives = True
        self._server = server
        self._context = context
        self._turn = asyncio.Lock()
        self._end: asyncio.Future[Refusal] = self._loop.create_future()
        self._answers: set[asyncio.Task[None]] = set()
        self._answered = asyncio.Event()

    def end(self, refusal: Refusal) -> None:
        if not self._end.done():
            self._end.set_result(refusal)

    def over(self, code: StatusCode, retry_after_s: float | None = None) -> None:
        self.stream.ended, self.stream.ended_s = code, self._loop.time()
        self.stream.retry_after_s = retry_after_s
        self._server.wake()

    async def read_start(self, requests: AsyncIterator[queue_pb2.ConsumeRequest]) -> None:
        """Before the stream is refused, reads the first message if it comes soon. If a stream ended while a library was
        writing to it, the library would report its own error, and not the server's status."""
        with contextlib.suppress(TimeoutError, StopAsyncIteration):
            async with asyncio.timeout(_START_S):
                self._write_down(await anext(requests))

    async def serve(self, requests: AsyncIterator[queue_pb2.ConsumeRequest]) -> Refusal | None:
        """Serves the stream until the client closes its side. If `end` is called first, returns the argument of
        `end`."""
        await self._context.send_initial_metadata(())
        reading = asyncio.create_task(self._read(requests))
        giving = asyncio.create_task(self._give())
        try:
            await self._unless_ended(reading)
            # If the client cancels the stream, it looks at first as if the client had closed its side. A moment later,
            # gRPC cancels this task.
            await asyncio.wait({self._end}, timeout=_CANCELLED_S)
            if self._end.done():
                return self._end.result()
            self.stream.closed_after = len(self.stream.events)
            self._server.wake()
            if self._server.parting is not None:
                parting, self._server.parting = self._server.parting, None
                await self.send(queue_pb2.ConsumeResponse(jobs=[parting]))
            while self._answers and not self._end.done():
                await self._unless_ended(*self._answers)
            return self._end.result() if self._end.done() else None
        finally:
            tasks = {reading, giving, *self._answers}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def send(self, response: queue_pb2.ConsumeResponse) -> None:
        # gRPC accepts no second write before the first one has ended.
        async with self._turn:
            self._write_down(response)
            await self._context.write(response)

    async def _unless_ended(self, *work: asyncio.Future[Any]) -> None:
        await asyncio.wait({*work, self._end}, return_when=asyncio.FIRST_COMPLETED)

    def _write_down(self, message: queue_pb2.ConsumeRequest | queue_pb2.ConsumeResponse) -> None:
        self.stream.events.append(Event(at_s=self._loop.time(), message=message))
        self._server.wake()

    async def _read(self, requests: AsyncIterator[queue_pb2.ConsumeRequest]) -> None:
        async for request in requests:
            self._write_down(request)
            if entries(request):
                settled = self._server.settle(request)
                if settled is not None:
                    task = asyncio.create_task(self._answer(settled))
                    self._answers.add(task)
                    task.add_done_callback(self._answers.discard)

    async def _answer(self, settled: queue_pb2.Settled) -> None:
        await self._server.until_answering()
        await self.send(queue_pb2.ConsumeResponse(settled=[settled]))

    async def _give(self) -> None:
        while True:
            may = self.gives and self.stream.closed_after is None and not self._end.done()
            jobs = self._server.next_jobs(self.stream.credit) if may and self.stream.credit > 0 else []
            if jobs:
                await self.send(queue_pb2.ConsumeResponse(jobs=jobs))
            else:
                await self._server.news()


def refused(request: queue_pb2.ConsumeRequest, refusal: Refusal) -> queue_pb2.Settled:
    """Returns the answer to a message that was not settled."""
    return queue_pb2.Settled(request_id=request.request_id, error=refusal.status)


@contextlib.asynccontextmanager
async def serving(server: FakeServer, address: str) -> AsyncGenerator[str, None]:
    """Serves at this address. Yields the address, with the port that was chosen if the given port was 0."""
    # A client under test may send large messages. No other server may share the port, because it would get some of this
    # server's connections.
    options = [("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", 64 << 20)]
    listening = aio.server(options=options)
    queue_pb2_grpc.add_QueueServicer_to_server(cast("queue_pb2_grpc.QueueServicer", server), listening)
    host = address.rpartition(":")[0]
    port = listening.add_insecure_port(address)
    await listening.start()
    try:
        yield f"{host}:{port}"
    finally:
        await listening.stop(_STOP_S)


async def _abort(context: Any, refusal: Refusal) -> None:
    status = refusal.status
    await context.abort(refusal.code, status.message, ((DETAILS, status.SerializeToString()),))


def _metadata(context: Any) -> dict[str, str]:
    return {key: str(value) for key, value in context.invocation_metadata() or ()}
