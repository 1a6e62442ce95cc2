"""The benchmark's consumer on the Consume stream, against a fake service."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import replace

import grpc
import pytest

from bench.messages import MESSAGES, watch
from bench.payloads import stamped
from bench.system import Wrong
from bench.systems.stubs import consume
from windrow.v1 import job_pb2, queue_pb2, queue_pb2_grpc


class FakeRouter:
    """Sends `jobs` as credit allows, and answers each settlement."""

    def __init__(self) -> None:
        self.jobs: list[job_pb2.LeasedJob] = [
            job_pb2.LeasedJob(lease=b"%d" % number, attempt=1, payload=stamped(1)[0]) for number in range(10)
        ]
        self.credits: list[int] = []
        self.acked: list[bytes] = []
        self.answers: list[job_pb2.JobAnswer.ValueType] = []
        self.start: queue_pb2.ConsumeStart | None = None

    async def consume(
        self, requests: AsyncIterator[queue_pb2.ConsumeRequest], _context: object
    ) -> AsyncGenerator[queue_pb2.ConsumeResponse, None]:
        room = 0
        async for request in requests:
            if request.HasField("start"):
                self.start = request.start
            room += request.credit
            self.credits.append(request.credit)
            self.acked += [ack.lease for ack in request.acks]
            given, self.jobs = self.jobs[:room], self.jobs[room:]
            room -= len(given)
            not_ok = [queue_pb2.LeaseAnswer(answer=answer) for answer in self.answers]
            settled = [queue_pb2.Settled(request_id=request.request_id, not_ok=not_ok)] if request.acks else []
            if given or settled:
                yield queue_pb2.ConsumeResponse(jobs=given, settled=settled)


@pytest.fixture
def router() -> FakeRouter:
    return FakeRouter()


@pytest.fixture
async def stub(router: FakeRouter) -> AsyncGenerator[queue_pb2_grpc.QueueAsyncStub, None]:
    server = grpc.aio.server()
    method = grpc.stream_stream_rpc_method_handler(
        router.consume,  # pyrefly: ignore[bad-argument-type]
        request_deserializer=queue_pb2.ConsumeRequest.FromString,
        response_serializer=queue_pb2.ConsumeResponse.SerializeToString,
    )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("windrow.v1.Queue", {"Consume": method}),))
    watch()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield queue_pb2_grpc.QueueStub(channel)
    finally:
        await server.stop(grace=None)


async def test_the_messages_of_a_stream_are_counted(router: FakeRouter, stub: queue_pb2_grpc.QueueAsyncStub) -> None:
    before = replace(MESSAGES)
    finished = asyncio.Event()
    task = asyncio.create_task(consume(stub, queue_pb2.ConsumeStart(), 10, lambda *_: None, lambda _: finished.set()))
    async with asyncio.timeout(30):
        await finished.wait()
    task.cancel()
    await asyncio.wait({task})
    assert (MESSAGES.with_jobs - before.with_jobs, MESSAGES.jobs - before.jobs) == (1, 10)
    assert (MESSAGES.with_acks - before.with_acks, MESSAGES.acks - before.acks) == (1, 10)
    # Two messages were sent: the start and the acks. Two were received: the jobs and the answer to the acks.
    assert (MESSAGES.sent - before.sent, MESSAGES.received - before.received) == (2, 2)


async def test_every_job_of_a_stream_is_acked_and_its_credit_given_again(
    router: FakeRouter, stub: queue_pb2_grpc.QueueAsyncStub
) -> None:
    finished = 0
    all_finished = asyncio.Event()
    payloads: list[bytes] = []

    def finish(jobs: int) -> None:
        nonlocal finished
        finished += jobs
        if finished == 10:
            all_finished.set()

    start = queue_pb2.ConsumeStart(org="acme", queues=["work"])
    task = asyncio.create_task(consume(stub, start, 4, lambda _, payload: payloads.append(payload), finish))
    async with asyncio.timeout(30):
        await all_finished.wait()
    task.cancel()
    await asyncio.wait({task})
    assert router.start == start
    assert router.credits[0] == 4
    assert sum(router.credits) == 4 + 10
    assert sorted(router.acked) == [b"%d" % number for number in range(10)]
    assert len(payloads) == 10


async def test_a_settlement_that_is_not_ok_is_wrong(router: FakeRouter, stub: queue_pb2_grpc.QueueAsyncStub) -> None:
    router.answers = [job_pb2.JOB_ANSWER_STALE]
    with pytest.raises(Wrong, match="did not finish every job"):
        async with asyncio.timeout(30):
            await consume(stub, queue_pb2.ConsumeStart(), 1, lambda *_: None, lambda _: None)


async def test_a_job_that_is_given_again_is_wrong(router: FakeRouter, stub: queue_pb2_grpc.QueueAsyncStub) -> None:
    router.jobs[0].attempt = 2
    with pytest.raises(Wrong, match="second time"):
        async with asyncio.timeout(30):
            await consume(stub, queue_pb2.ConsumeStart(), 1, lambda *_: None, lambda _: None)
