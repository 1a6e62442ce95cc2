"""When a call has ended, the data of its request is freed without the garbage collector, because a router rarely runs
the garbage collector."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message

from proof.proxy import Proxy, open_proxy_before, through
from router.buffer import Buffer
from router.fleet.fleet import Fleet
from router.gate.admission import Gate
from router.gate.calls import Methods
from router.gate.tracing import Tracing
from router.services.consume_stream import Stream
from router.services.queue import QueueService
from shard.placement.cluster_file import parse_cluster
from shard.postgres.arrays import Blobs
from shard.vocabulary import NewJobs
from tests.jobs import job_id, job_message
from tests.routers import PATIENCE_S
from tests.streams import until
from windrow.v1 import queue_pb2

MADE_LONG_AGO = "01000000-0000-7000-8000-000000000000"


@pytest.fixture
async def proxy(spare_dsn: str) -> AsyncGenerator[Proxy, None]:
    async with open_proxy_before(spare_dsn) as opened:
        yield opened


@pytest.fixture
async def channel(spare_dsn: str, proxy: Proxy) -> AsyncGenerator[grpc.aio.Channel, None]:
    """A channel to a router in this process."""
    cluster = parse_cluster(f"[[shard]]\nname = 's1'\ndsn = '''{through(spare_dsn, proxy)}'''\n", source="test")
    fleet, ready = Fleet(cluster, connections_per_shard=2, sweep_s=0.2, buffer=Buffer(2**20)), asyncio.Event()
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
    """Returns the request messages in memory. They all belong to the router, because the callers send bytes."""
    return [one for one in gc.get_objects() if isinstance(one, Message | NewJobs | Blobs | Stream)]


@contextlib.asynccontextmanager
async def nothing_kept() -> AsyncGenerator[None, None]:
    """Asserts that calls within the `with` block leave nothing that only the garbage collector would free."""
    gc.collect()
    gc.disable()
    try:
        before = set(map(id, requests()))
        yield
        # A client may see the end of a call before the router does.
        await until(lambda: not any("HandleExceptions" in task.get_name() for task in asyncio.all_tasks()), "no calls")
        assert [one for one in requests() if id(one) not in before] == []
    finally:
        gc.enable()


async def enqueue(channel: grpc.aio.Channel, job_id: str) -> None:
    call: Any = channel.unary_unary("/windrow.v1.Queue/Enqueue")
    # No variable of this function refers to a message, because a raised error keeps the variables of its frames alive.
    await call(
        queue_pb2.EnqueueRequest(org="o", jobs=[job_message(id=job_id, queue="q", kind="k")]).SerializeToString()
    )


def consume(
    channel: grpc.aio.Channel, *said: queue_pb2.ConsumeRequest, metadata: Sequence[tuple[str, str]] = ()
) -> Any:
    start = queue_pb2.ConsumeRequest(start=queue_pb2.ConsumeStart(org="o", queues=["q"]), credit=1)
    call: Any = channel.stream_stream("/windrow.v1.Queue/Consume")
    return call([message.SerializeToString() for message in (start, *said)], metadata=metadata)


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


async def test_a_stream_whose_metadata_names_another_org_keeps_nothing(channel: grpc.aio.Channel) -> None:
    async with nothing_kept():
        stream = consume(channel, metadata=[("windrow-org", "another")])
        assert await refused(stream.read()) is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_cancelled_stream_keeps_nothing(channel: grpc.aio.Channel) -> None:
    async with nothing_kept():
        stream = consume(channel)
        await stream.initial_metadata()
        stream.cancel()
