"""What an ended call leaves to the garbage collector, which a router seldom lets run: nothing of what it was asked."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import AsyncGenerator
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message

from router.buffer import Buffer
from router.calls import Methods
from router.fleet import Fleet
from router.gate import Gate
from router.queue_service import QueueService
from router.stream import Stream
from router.tracing import Tracing
from shard.arrays import Blobs
from shard.cluster import parse_cluster
from shard.vocabulary import NewJobs
from tests.fault.proxy import Proxy, open_proxy_before, through
from tests.jobs import job_id
from tests.routers import PATIENCE_S
from tests.streams import until
from windrow.v1 import job_pb2, queue_pb2

MADE_LONG_AGO = "01000000-0000-7000-8000-000000000000"


@pytest.fixture
async def proxy(empty_dsn: str) -> AsyncGenerator[Proxy, None]:
    async with open_proxy_before(empty_dsn) as opened:
        yield opened


@pytest.fixture
async def channel(empty_dsn: str, proxy: Proxy) -> AsyncGenerator[grpc.aio.Channel, None]:
    """To a router in this process."""
    cluster = parse_cluster(f"[[shard]]\nname = 's1'\ndsn = '''{through(empty_dsn, proxy)}'''\n", source="test")
    fleet, ready = Fleet(cluster, connections_per_shard=2), asyncio.Event()
    running = asyncio.create_task(fleet.run(ready))
    gate = Gate(Tracing(), Buffer(2**30))
    methods = Methods(gate)
    methods.add(QueueService(fleet, gate), queue_pb2.DESCRIPTOR.services_by_name["Queue"])
    server = grpc.aio.server(handlers=(methods,))
    port = server.add_insecure_port("127.0.0.1:0")
    try:
        await asyncio.wait_for(ready.wait(), PATIENCE_S)
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as opened:
            yield opened
    finally:
        await server.stop(0)
        running.cancel()
        await asyncio.wait({running})


def requests() -> list[object]:
    """What is in memory of what callers asked; they themselves send bytes."""
    return [one for one in gc.get_objects() if isinstance(one, Message | NewJobs | Blobs | Stream)]


@contextlib.asynccontextmanager
async def nothing_kept() -> AsyncGenerator[None, None]:
    """Of calls within the block nothing is left after it that only the garbage collector would find."""
    gc.collect()
    gc.disable()
    try:
        before = set(map(id, requests()))
        yield
        # A client may hear of the end first.
        await until(lambda: not any("HandleExceptions" in task.get_name() for task in asyncio.all_tasks()), "no calls")
        assert [one for one in requests() if id(one) not in before] == []
    finally:
        gc.enable()


async def enqueue(channel: grpc.aio.Channel, job_id: str) -> None:
    call: Any = channel.unary_unary("/windrow.v1.Queue/Enqueue")
    # No names for messages: an error keeps them.
    await call(
        queue_pb2.EnqueueRequest(org="o", jobs=[job_pb2.NewJob(id=job_id, queue="q", kind="k")]).SerializeToString()
    )


def consume(channel: grpc.aio.Channel, *said: queue_pb2.ConsumeRequest) -> Any:
    start = queue_pb2.ConsumeRequest(start=queue_pb2.ConsumeStart(org="o", queues=["q"]), credit=1)
    call: Any = channel.stream_stream("/windrow.v1.Queue/Consume")
    return call([message.SerializeToString() for message in (start, *said)])


async def refused(call: Any) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await call
    return refusal.value.code()


@pytest.mark.parametrize("job_id", ["no id", MADE_LONG_AGO], ids=["by the rules", "by the shard"])
async def test_a_refused_call_keeps_nothing(channel: grpc.aio.Channel, job_id: str) -> None:
    async with nothing_kept():
        assert await refused(enqueue(channel, job_id)) is grpc.StatusCode.INVALID_ARGUMENT


async def test_calls_that_a_lost_shard_refuses_together_keep_nothing(channel: grpc.aio.Channel, proxy: Proxy) -> None:
    await enqueue(channel, job_id())
    proxy.closed = True
    proxy.cut_all()
    async with nothing_kept():
        codes = await asyncio.gather(*(refused(enqueue(channel, job_id())) for _ in range(10)))
        assert set(codes) == {grpc.StatusCode.UNAVAILABLE}


async def test_a_refused_stream_keeps_nothing(channel: grpc.aio.Channel) -> None:
    async with nothing_kept():
        stream = consume(channel, queue_pb2.ConsumeRequest(acks=[queue_pb2.Ack(lease=b"short")]))
        assert await refused(stream.read()) is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_cancelled_stream_keeps_nothing(channel: grpc.aio.Channel) -> None:
    async with nothing_kept():
        stream = consume(channel)
        await stream.initial_metadata()
        stream.cancel()
