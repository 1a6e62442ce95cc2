# ruff: noqa: N802 - the verbs are named by the contract
"""A router that answers what a test tells it to, in the test's own process. Knows nothing of queues."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc.error_details_pb2 import BadRequest, RetryInfo
from google.rpc.status_pb2 import Status
from grpc import aio
from grpc_status import rpc_status

from windrow import uuid7
from windrow.v1 import job_pb2, queue_pb2
from windrow.v1.queue_pb2_grpc import QueueServicer, add_QueueServicer_to_server

WAIT_S = 10.0
Script = Callable[[Any, Any], Awaitable[Any]]


class FakeRouter(QueueServicer):
    """Records every request; `scripts` replaces the answers of a verb, `jobs` is what Dequeue gives out."""

    def __init__(self) -> None:
        self.address = ""
        self.requests: list[tuple[str, Any]] = []
        self.metadata: list[dict[str, str]] = []
        self.peers: list[str] = []
        self.scripts: dict[str, Script] = {}
        self.jobs: deque[job_pb2.LeasedJob] = deque()
        self._news = asyncio.Event()

    def give(self, kind: str = "work", payload: bytes = b"", **fields: Any) -> job_pb2.LeasedJob:
        id_ = uuid7()
        job = job_pb2.LeasedJob(
            id=id_, lease=id_.encode(), queue="q", kind=kind, payload=payload, attempt=1, max_attempts=20, **fields
        )
        self.jobs.append(job)
        return job

    def of(self, verb: str) -> list[Any]:
        return [request for called, request in self.requests if called == verb]

    def settled(self, verb: str) -> list[str]:
        """Ids of the jobs named so far in the calls of one verb, in order."""
        match verb:
            case "Ack":
                leases = [ack.lease for request in self.of(verb) for ack in request.acks]
            case "Nack":
                leases = [nack.lease for request in self.of(verb) for nack in request.nacks]
            case _:
                leases = [lease for request in self.of(verb) for lease in request.leases]
        return [lease.decode() for lease in leases]

    async def until(self, holds: Callable[[], object]) -> None:
        """Returns once it holds: looks again on every request, and every 20 ms for what only a test sees."""
        async with asyncio.timeout(WAIT_S):
            while not holds():
                self._news.clear()
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._news.wait(), 0.02)

    async def _answer(self, verb: str, request: Any, context: Any) -> Any:
        self.requests.append((verb, request))
        self.metadata.append({key: str(value) for key, value in context.invocation_metadata() or ()})
        self.peers.append(context.peer())
        self._news.set()
        if verb in self.scripts:
            return await self.scripts[verb](request, context)
        return self.plain(verb, request)

    def plain(self, verb: str, request: Any) -> Any:
        """What a router without troubles answers."""
        ok = job_pb2.JOB_ANSWER_OK
        match verb:
            case "Enqueue":
                return queue_pb2.EnqueueResponse(results=[queue_pb2.EnqueueResult(id=job.id) for job in request.jobs])
            case "Dequeue":
                taken = [self.jobs.popleft() for _ in range(min(request.max_jobs, len(self.jobs)))]
                return queue_pb2.DequeueResponse(jobs=taken)
            case "Ack":
                return queue_pb2.AckResponse(answers=[ok for _ in request.acks])
            case "Nack":
                return queue_pb2.NackResponse(answers=[ok for _ in request.nacks])
            case "Extend":
                return queue_pb2.ExtendResponse(answers=[ok for _ in request.leases])
            case "Release":
                return queue_pb2.ReleaseResponse(answers=[ok for _ in request.leases])
            case "GetJobs":
                return queue_pb2.GetJobsResponse(not_found=request.ids)
            case _:
                return queue_pb2.CancelJobsResponse(answers=[ok for _ in request.ids])

    async def Enqueue(self, request: Any, context: Any) -> Any:
        return await self._answer("Enqueue", request, context)

    async def Dequeue(self, request: Any, context: Any) -> Any:
        return await self._answer("Dequeue", request, context)

    async def Ack(self, request: Any, context: Any) -> Any:
        return await self._answer("Ack", request, context)

    async def Nack(self, request: Any, context: Any) -> Any:
        return await self._answer("Nack", request, context)

    async def Extend(self, request: Any, context: Any) -> Any:
        return await self._answer("Extend", request, context)

    async def Release(self, request: Any, context: Any) -> Any:
        return await self._answer("Release", request, context)

    async def GetJobs(self, request: Any, context: Any) -> Any:
        return await self._answer("GetJobs", request, context)

    async def CancelJobs(self, request: Any, context: Any) -> Any:
        return await self._answer("CancelJobs", request, context)


@asynccontextmanager
async def fake_router(address: str = "127.0.0.1:0") -> AsyncGenerator[FakeRouter]:
    router = FakeRouter()
    server = aio.server(options=(("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", 17 << 20)))
    add_QueueServicer_to_server(router, server)
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
) -> None:
    """Ends a call with a status, and the details that a router gives with it."""
    details: list[Message] = []
    if retry_after_s is not None:
        details.append(RetryInfo(retry_delay=Duration(nanos=round(retry_after_s * 1e9))))
    if violations is not None:
        found = [BadRequest.FieldViolation(field=path, description=why) for path, why in violations.items()]
        details.append(BadRequest(field_violations=found))
    status = Status(code=code.value[0], message=message)
    for detail in details:
        status.details.add().Pack(detail)
    await context.abort_with_status(rpc_status.to_status(status))


def failing(times: int, code: grpc.StatusCode, router: FakeRouter, verb: str, **how: Any) -> Script:
    """A script that fails so many times, and then answers as ever."""
    left = times

    async def script(request: Any, context: Any) -> Any:
        nonlocal left
        if left > 0:
            left -= 1
            await refuse(context, code, **how)
        return router.plain(verb, request)

    return script
