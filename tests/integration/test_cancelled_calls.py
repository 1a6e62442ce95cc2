"""Clients cancel their calls at every stage. The router must not log an error, because a client may cancel a call."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import grpc
import psycopg
import pytest

from router.codec.lease_verbs import VERBS
from tests.jobs import job_id
from tests.postgres import Server
from tests.routers import PATIENCE_S, Routers, running_routers, write_cluster
from tests.streams import QUEUE, Client, Stream, acks, client, new_job, until, window
from tests.verbs import lease_request
from windrow.v1 import admin_pb2, cluster_pb2, queue_pb2

ORG = "acme"
# A few payloads of this size exceed what a connection buffers while nobody reads.
LARGE = bytes(1_000_000)


# A function that returns the statements that wait for a lock.
Waiting: TypeAlias = Callable[[], Awaitable[frozenset[Any]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    dsn: str
    routers: Routers

    def errors(self) -> list[str]:
        """Returns the log's lines that report errors."""
        lines = self.routers.log.read_text().splitlines()
        level = logging.getLevelName(logging.ERROR)
        return [line for line in lines if f" {level} " in line or line.startswith("Traceback")]

    @contextlib.asynccontextmanager
    async def locked(self) -> AsyncGenerator[Waiting, None]:
        """Makes every statement wait during the `with` block. Yields a function that returns the waiting statements,
        including the router's own statements such as sweeps."""
        async with (
            await psycopg.AsyncConnection.connect(self.dsn) as holder,
            await psycopg.AsyncConnection.connect(self.dsn, autocommit=True) as watcher,
        ):
            await holder.execute(
                "LOCK TABLE windrow.job, windrow.dead, windrow.finished, windrow.queue, windrow.org, windrow.tally,"
                " windrow.owned_slot, windrow.catalog IN ACCESS EXCLUSIVE MODE"
            )

            async def waiting() -> frozenset[Any]:
                cursor = await watcher.execute(
                    "SELECT pid, query_start FROM pg_stat_activity WHERE datname = current_database()"
                    " AND wait_event_type = 'Lock' AND application_name = 'windrow'"
                )
                return frozenset(await cursor.fetchall())

            yield waiting


@pytest.fixture(scope="module")
def cluster(postgres: Server, tmp_path_factory: pytest.TempPathFactory) -> Generator[Cluster, None, None]:
    dsn = postgres.create("cancelled")
    config = write_cluster(tmp_path_factory.mktemp("cancelled") / "cluster.toml", {"s1": dsn})
    with running_routers(config) as routers:
        yield Cluster(dsn=dsn, routers=routers)
    postgres.drop("cancelled")


@pytest.fixture
async def near(cluster: Cluster) -> AsyncGenerator[Client, None]:
    async with client(cluster.routers.address) as opened:
        yield opened


async def cancel(call: Any) -> None:
    call.cancel()
    with contextlib.suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
        await call


def unary_calls(to: Client, lease: bytes) -> dict[str, Callable[[], Any]]:
    queue, admin = to.queue, to.admin
    waiting = queue_pb2.DequeueRequest(org=ORG, queues=["empty"], wait=window(20))
    return {
        "Enqueue": lambda: queue.Enqueue(queue_pb2.EnqueueRequest(org=ORG, jobs=[new_job()])),
        "Enqueue, each alone": lambda: queue.Enqueue(
            queue_pb2.EnqueueRequest(org=ORG, jobs=[new_job(delay=window(60))], independent=True)
        ),
        "Enqueue, refused": lambda: queue.Enqueue(queue_pb2.EnqueueRequest(org=ORG)),
        "Dequeue": lambda: queue.Dequeue(queue_pb2.DequeueRequest(org=ORG, queues=[QUEUE])),
        "Dequeue that waits": lambda: queue.Dequeue(waiting),
        **{verb.method: partial(getattr(queue, verb.method), lease_request(verb, [lease], ORG)) for verb in VERBS},
        "GetJobs": lambda: queue.GetJobs(queue_pb2.GetJobsRequest(org=ORG, ids=[job_id()])),
        "FindJob": lambda: queue.FindJob(queue_pb2.FindJobRequest(org=ORG, queue=QUEUE, dedup_key="key")),
        "CancelJobs": lambda: queue.CancelJobs(queue_pb2.CancelJobsRequest(org=ORG, ids=[job_id()])),
        "WaitJob": lambda: queue.WaitJob(queue_pb2.WaitJobRequest(org=ORG, id=job_id(), wait=window(20))),
        "AlterJobs": lambda: queue.AlterJobs(queue_pb2.AlterJobsRequest(org=ORG, ids=[job_id()], priority=1)),
        "RedriveJobs": lambda: queue.RedriveJobs(queue_pb2.RedriveJobsRequest(org=ORG, ids=[job_id()])),
        "CreateQueue": lambda: admin.CreateQueue(admin_pb2.CreateQueueRequest(org=ORG, queue=f"queue-{job_id()}")),
        "PauseQueue": lambda: admin.PauseQueue(admin_pb2.PauseQueueRequest(org=ORG, queue="other")),
        "GetQueue": lambda: admin.GetQueue(admin_pb2.GetQueueRequest(org=ORG, queue=QUEUE)),
        "ListQueues": lambda: admin.ListQueues(admin_pb2.ListQueuesRequest(org=ORG)),
        "DeleteQueue": lambda: admin.DeleteQueue(admin_pb2.DeleteQueueRequest(org=ORG, queue="other")),
        "PurgeQueue": lambda: admin.PurgeQueue(admin_pb2.PurgeQueueRequest(org=ORG, queue="other")),
        "ListJobs": lambda: admin.ListJobs(admin_pb2.ListJobsRequest(org=ORG)),
        "CountJobs": lambda: admin.CountJobs(admin_pb2.CountJobsRequest(org=ORG)),
        "RestoreJobs": lambda: admin.RestoreJobs(
            admin_pb2.RestoreJobsRequest(org=ORG, jobs=[admin_pb2.RestoreJob(id=job_id())])
        ),
        "RedriveQueue": lambda: admin.RedriveQueue(admin_pb2.RedriveQueueRequest(org=ORG, queue=QUEUE)),
        "GetStats": lambda: admin.GetStats(admin_pb2.GetStatsRequest(org=ORG)),
        "ExplainJob": lambda: admin.ExplainJob(admin_pb2.ExplainJobRequest(org=ORG, id=job_id())),
        "ExplainQueue": lambda: admin.ExplainQueue(admin_pb2.ExplainQueueRequest(org=ORG, queue=QUEUE)),
        "ListShards": lambda: to.cluster.ListShards(cluster_pb2.ListShardsRequest()),
    }


async def cancel_while_it_waits(name: str, make: Callable[[], Any], waiting: Waiting) -> None:
    before, started = await waiting(), frozenset[Any]()

    async def waits() -> bool:
        nonlocal started
        started = await waiting() - before
        return bool(started)

    async def rests() -> bool:
        return not await waiting() & started

    call = make()
    await until(waits, f"{name} waits for the shard")
    await cancel(call)
    await until(rests, f"{name} has ended")


async def test_unary_calls_are_cancelled_at_any_stage_without_an_error_in_the_log(
    cluster: Cluster, near: Client
) -> None:
    await near.make_queue(ORG, QUEUE, "other")
    await near.enqueue(ORG)
    (leased,) = await near.dequeue(ORG)
    calls = unary_calls(near, leased.lease)
    for make in calls.values():
        # Cancel each call before it is sent, and about when it arrives.
        await cancel(make())
        for turns in range(20):
            call = make()
            for _ in range(turns):
                await asyncio.sleep(0)
            await cancel(call)
    async with cluster.locked() as waiting:
        for name, make in calls.items():
            if name in ("Enqueue, refused", "Dequeue that waits", "ListShards"):
                # These calls use none of the locked tables.
                continue
            await cancel_while_it_waits(name, make, waiting)
    # When another call is answered, the router has handled the last cancelled call too.
    await near.enqueue(ORG)
    assert cluster.errors() == []


async def test_a_dequeue_that_waits_is_cancelled_without_an_error_in_the_log(cluster: Cluster, near: Client) -> None:
    call = near.queue.Dequeue(queue_pb2.DequeueRequest(org=ORG, queues=["later"], wait=window(20)))
    await near.enqueue(ORG)
    await cancel(call)
    await near.enqueue(ORG, new_job(queue="later"))
    assert len(await near.dequeue(ORG, "later", wait_s=20)) == 1
    assert cluster.errors() == []


async def test_streams_are_cancelled_at_any_stage_without_an_error_in_the_log(cluster: Cluster, near: Client) -> None:
    # Cancel a stream before its first message, and about when this message arrives.
    for turns in range(20):
        stream = Stream(near.queue)
        for _ in range(turns):
            await asyncio.sleep(0)
        await stream.cancel()
        async with near.stream(ORG, "stream", credit=turns):
            for _ in range(turns):
                await asyncio.sleep(0)
    # Cancel a stream that has jobs, and an ack that is not answered yet.
    await near.enqueue(ORG, *(new_job(queue="stream") for _ in range(3)))
    async with near.stream(ORG, "stream", credit=2) as stream:
        jobs = await stream.until_jobs(1)
        async with cluster.locked() as waiting:
            await stream.send(request_id=1, acks=acks(jobs))
            await until(waiting, "the ack waits for the shard")
            await stream.cancel()
    # Cancel a stream while it claims jobs.
    async with cluster.locked() as waiting, near.stream(ORG, "stream", credit=2) as stream:
        await until(waiting, "it looks for jobs")
        await stream.cancel()
    async for _ in near.cluster.CheckShard(cluster_pb2.CheckShardRequest(shard="s1"), timeout=PATIENCE_S):
        break
    await near.enqueue(ORG)
    assert cluster.errors() == []


async def test_a_stream_that_is_cancelled_while_a_message_is_being_sent_is_no_error_in_the_log(
    cluster: Cluster, near: Client
) -> None:
    org = "unread"
    # The buffers of a loopback connection may grow to more than 6 MiB.
    jobs = [await near.enqueue(org, new_job(payload=LARGE)) for _ in range(12)]
    async with near.stream(org, credit=100, reads=False) as stream:

        async def stats() -> admin_pb2.QueueStats:
            answer = await near.admin.GetStats(admin_pb2.GetStatsRequest(org=org), timeout=PATIENCE_S)
            return answer.queues[0]

        async def all_leased() -> bool:
            return (await stats()).leased == len(jobs)

        async def some_back() -> bool:
            return (await stats()).ready > 0

        await until(all_leased, "jobs are on their way, and nobody reads")
        await stream.cancel()
        await until(some_back, "what was not sent has gone back")
    await near.enqueue(org)
    assert cluster.errors() == []
