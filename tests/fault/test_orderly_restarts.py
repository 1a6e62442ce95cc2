"""Router processes are told to end (SIGTERM) one after another, under load: clients see no error but UNAVAILABLE."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections import Counter
from collections.abc import AsyncGenerator, Generator

import grpc
import pytest

from tests.effort import trials
from tests.postgres import Server
from tests.routers import PATIENCE_S, Routers, ending, running_routers, until, write_cluster
from tests.streams import new_job, start
from windrow.v1 import queue_pb2, queue_pb2_grpc

RESTARTS = trials(3, thorough=40)
CHANNELS, CALLERS = 4, 4


@pytest.fixture
def routers(postgres: Server, tmp_path_factory: pytest.TempPathFactory) -> Generator[Routers, None, None]:
    config = write_cluster(tmp_path_factory.mktemp("restarts") / "cluster.toml", {"s1": postgres.create("restarts")})
    with running_routers(config, processes=2) as running:
        yield running


@pytest.mark.thorough
@pytest.mark.timeout(600)
async def test_clients_see_nothing_but_unavailable_while_routers_restart_in_order(routers: Routers) -> None:
    succeeded = 0
    failures = Counter[tuple[grpc.StatusCode, str]]()

    def failed(error: grpc.aio.AioRpcError) -> None:
        failures[error.code(), (error.details() or "")[:100]] += 1

    async def call(queue: queue_pb2_grpc.QueueAsyncStub, org: str) -> None:
        nonlocal succeeded
        while True:
            job = new_job()
            try:
                await queue.Enqueue(
                    queue_pb2.EnqueueRequest(org=org, jobs=[job]), timeout=PATIENCE_S, wait_for_ready=True
                )
                taken = await queue.Dequeue(
                    queue_pb2.DequeueRequest(org=org, queues=[job.template.queue]),
                    timeout=PATIENCE_S,
                    wait_for_ready=True,
                )
                for one in taken.jobs:
                    await queue.Ack(
                        queue_pb2.AckRequest(org=org, acks=[queue_pb2.Ack(lease=one.lease)]),
                        timeout=PATIENCE_S,
                        wait_for_ready=True,
                    )
                succeeded += 1
            except grpc.aio.AioRpcError as error:
                failed(error)

    async def consume(queue: queue_pb2_grpc.QueueAsyncStub) -> None:
        """Holds a stream that gets no jobs. Opens another stream when the stream ends."""
        first = queue_pb2.ConsumeRequest(start=start("consumed"), credit=10)

        async def said() -> AsyncGenerator[queue_pb2.ConsumeRequest, None]:
            yield first
            await asyncio.Event().wait()

        while True:
            try:
                async for _ in queue.Consume(said(), wait_for_ready=True):
                    pass
            except grpc.aio.AioRpcError as error:
                failed(error)

    async with contextlib.AsyncExitStack() as stack:
        options = [("grpc.use_local_subchannel_pool", 1)]
        queues = [
            queue_pb2_grpc.QueueStub(
                await stack.enter_async_context(grpc.aio.insecure_channel(routers.address, options=options))
            )
            for _ in range(CHANNELS)
        ]
        tasks = [asyncio.create_task(call(queue, f"org-{at}")) for at, queue in enumerate(queues * CALLERS)]
        tasks += [asyncio.create_task(consume(queue)) for queue in queues]
        try:
            for _ in range(RESTARTS):
                enough, (ends, *_) = succeeded + 50, routers.pids

                def many(enough: int = enough) -> bool:
                    return succeeded > enough

                await asyncio.to_thread(until, many, "calls succeed")
                with ending([ends]):
                    os.kill(ends, signal.SIGTERM)
                await asyncio.to_thread(until, lambda: len(routers.pids) == 2, "another has taken its place")
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
    assert [task for task in tasks if not task.cancelled()] == []
    assert {code for code, _ in failures} <= {grpc.StatusCode.UNAVAILABLE}, failures
