"""Tests limits of the backlog over gRPC, with two routers that have two processes each."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Generator
from dataclasses import dataclass
from typing import Any

import grpc
import psycopg
import pytest

import windrow
from tests.command import windrow as command
from tests.postgres import Server
from tests.routers import PATIENCE_S, Routers, running_routers, write_cluster
from tests.streams import QUEUE, Client, acks, client, detail, new_job, retry_after_s
from windrow.v1 import admin_pb2, cluster_pb2, limits_pb2, queue_pb2

OTHER = "files"
BACKLOG, BACKLOG_BYTES = limits_pb2.LIMIT_MEASURE_BACKLOG, limits_pb2.LIMIT_MEASURE_BACKLOG_BYTES
PROCESSES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    dsn: str
    near: Routers
    far: Routers

    def stored(self, org: str) -> int:
        statement = "SELECT count(*) FROM windrow.job JOIN windrow.queue USING (queue_id) WHERE org = %s"
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            row: tuple[Any, ...] | None = connection.execute(statement, [org]).fetchone()
        assert row is not None
        return int(row[0])


@pytest.fixture(scope="module")
def cluster(postgres: Server, tmp_path_factory: pytest.TempPathFactory) -> Generator[Cluster, None, None]:
    dsn = postgres.create("backlog")
    config = write_cluster(tmp_path_factory.mktemp("backlog") / "cluster.toml", {"s1": dsn})
    with running_routers(config, processes=2) as near, running_routers(config, processes=2) as far:
        yield Cluster(dsn=dsn, near=near, far=far)
    postgres.drop("backlog")


@pytest.fixture
async def near(cluster: Cluster) -> AsyncGenerator[Client, None]:
    async with client(cluster.near.address) as opened:
        yield opened


async def limit(
    cluster: Cluster,
    by: Client,
    org: str,
    amount: int,
    *,
    queue: str = "",
    measure: limits_pb2.LimitMeasure.ValueType = BACKLOG,
) -> None:
    """Sets a limit, and returns when the limit is in force at each process. Opens many connections, because each
    connection reaches a random process."""
    request = cluster_pb2.SetLimitRequest(org=org, queue=queue, measure=measure, amount=amount)
    await by.cluster.SetLimit(request, timeout=PATIENCE_S)
    for routers in (cluster.near, cluster.far):
        for _ in range(12):
            async with client(routers.address) as one:
                await one.admin.ListLimits(admin_pb2.ListLimitsRequest(org=org), timeout=PATIENCE_S)


async def error_of(by: Client, org: str, *jobs: Any) -> grpc.aio.AioRpcError | None:
    try:
        await by.enqueue(org, *jobs)
    except grpc.aio.AioRpcError as error:
        return error
    return None


async def refusal(by: Client, org: str, *jobs: Any) -> grpc.aio.AioRpcError:
    error = await error_of(by, org, *jobs)
    assert error is not None
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    return error


def reached(error: grpc.aio.AioRpcError) -> limits_pb2.LimitReached:
    found = detail(error, limits_pb2.LimitReached())
    assert isinstance(found, limits_pb2.LimitReached)
    return found


async def enqueue_when_there_is_room(by: Client, org: str, *jobs: Any) -> None:
    """Enqueues jobs. After a refusal, waits as long as the refusal says, and tries again."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            error = await error_of(by, org, *jobs)
            if error is None:
                return
            after_s = retry_after_s(error)
            assert after_s is not None, error
            await asyncio.sleep(after_s)


async def test_jobs_above_the_limit_are_refused_until_others_have_ended(cluster: Cluster, near: Client) -> None:
    org = await near.org_on("s1")
    await limit(cluster, near, org, 10)
    await near.enqueue(org, *(new_job() for _ in range(10)))
    error = await refusal(near, org, new_job())
    full = reached(error)
    assert (full.limit.measure, full.limit.amount, full.usage, full.asked) == (BACKLOG, 10, 10, 1)
    assert not full.limit.HasField("interval")
    assert "may have 10 jobs that have not ended" in (error.details() or "")
    # A limit of the backlog counts leased jobs too.
    leased = await near.dequeue(org, max_jobs=3)
    assert retry_after_s(await refusal(near, org, new_job())) is not None
    await near.queue.Ack(queue_pb2.AckRequest(org=org, acks=acks(leased)), timeout=PATIENCE_S)
    await enqueue_when_there_is_room(near, org, *(new_job() for _ in range(3)))
    await refusal(near, org, new_job())
    assert cluster.stored(org) == 10


async def test_a_call_that_can_never_succeed_is_told_so(cluster: Cluster, near: Client) -> None:
    org = await near.org_on("s1")
    await limit(cluster, near, org, 10)
    assert retry_after_s(await refusal(near, org, *(new_job() for _ in range(11)))) is None
    assert cluster.stored(org) == 0


async def test_bytes_of_payloads_and_attributes_count(cluster: Cluster, near: Client) -> None:
    org = await near.org_on("s1")
    await limit(cluster, near, org, 1000, measure=BACKLOG_BYTES)
    for _ in range(2):
        await near.enqueue(org, new_job(payload=bytes(400)))
    full = reached(await refusal(near, org, new_job(payload=bytes(400))))
    assert (full.limit.measure, full.usage, full.asked) == (BACKLOG_BYTES, 800, 400)
    await near.enqueue(org, new_job(payload=bytes(200)))


async def test_a_queues_limit_is_its_own_and_a_repeat_is_no_new_job(cluster: Cluster, near: Client) -> None:
    org = await near.org_on("s1")
    await limit(cluster, near, org, 2, queue=QUEUE)
    jobs = [new_job(), new_job()]
    await near.enqueue(org, *jobs)
    await near.enqueue(org, *jobs)
    await refusal(near, org, new_job())
    await near.enqueue(org, *(new_job(queue=OTHER) for _ in range(5)))


async def refused(client: windrow.Client, job: windrow.Job, nodes: windrow.Nodes) -> windrow.Added:
    """Repeats an `add_nodes` call until the router's answer says why the nodes are refused. A call makes several tries.
    If the time for the last try is too short for an answer, the call must be repeated."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            with contextlib.suppress(windrow.DeadlineExceeded):
                return await client.add_nodes(job, nodes)


async def test_the_jobs_of_workflows_count_until_they_have_ended(cluster: Cluster, near: Client) -> None:
    org = await near.org_on("s1")
    await limit(cluster, near, org, 5)
    # A client has one connection, so all of its calls reach the same process.
    async with (
        windrow.Client(cluster.near.address, org=org, timeout=PATIENCE_S) as client,
        windrow.Client(cluster.near.address, org=org, timeout=3) as hurried,
    ):
        for _ in range(3):
            flow = windrow.Workflow()
            flow.job(QUEUE, "k", name="list")
            # The client tries again until the router counts the jobs of the previous round as ended.
            await client.start(flow)
            (job,) = await client.dequeue(QUEUE)
            nodes = windrow.Nodes()
            for at in range(4):
                nodes.job(QUEUE, "k", name=f"page {at}")
            await client.add_nodes(job, nodes)
            # The nodes that the previous call has added are not counted again.
            nodes.job(QUEUE, "k", name="one too many")
            with pytest.raises(windrow.ResourceExhausted, match="the call has 1;"):
                await refused(hurried, job, nodes)
            for one in [job, *await client.dequeue(QUEUE, max_jobs=10)]:
                await client.ack(one)
    assert cluster.stored(org) == 0


async def test_an_independent_call_stores_what_fits(cluster: Cluster, near: Client) -> None:
    org = await near.org_on("s1")
    await limit(cluster, near, org, 3)
    request = queue_pb2.EnqueueRequest(org=org, jobs=[new_job() for _ in range(5)], independent=True)
    answer = await near.queue.Enqueue(request, timeout=PATIENCE_S)
    assert [result.HasField("error") for result in answer.results] == [False] * 3 + [True] * 2
    assert cluster.stored(org) == 3


async def test_a_limit_below_the_backlog_refuses_until_it_has_shrunk(cluster: Cluster, near: Client) -> None:
    org = await near.org_on("s1")
    await near.enqueue(org, *(new_job() for _ in range(20)))
    await limit(cluster, near, org, 5)
    full = reached(await refusal(near, org, new_job()))
    # A router counts the backlog only up to the limit.
    assert (full.limit.amount, full.usage) == (5, 5)


async def test_each_process_lets_through_no_more_than_the_limit_beyond_what_it_knows(
    cluster: Cluster, near: Client
) -> None:
    org = await near.org_on("s1")
    amount = 25
    await limit(cluster, near, org, amount)

    async def fill(routers: Routers) -> None:
        """Stores jobs until the process refuses a job."""
        async with client(routers.address) as one:
            while (error := await error_of(one, org, new_job())) is None:
                pass
            assert reached(error).limit.amount == amount

    await asyncio.gather(*(fill(routers) for routers in (cluster.near, cluster.far) * 8))
    stored = cluster.stored(org)
    assert amount <= stored <= PROCESSES * amount
    # After all processes have counted again, none of them stores another job.
    await asyncio.gather(*(fill(routers) for routers in (cluster.near, cluster.far) * 8))
    assert cluster.stored(org) <= PROCESSES * amount


def test_the_command_sets_lists_and_clears(cluster: Cluster) -> None:
    at = ("--address", cluster.near.address)
    done = command("limits", "set", "--org", "hoarder", "--backlog", "1000", *at)
    assert (done.code, done.out) == (0, "org hoarder: 1,000 jobs of backlog\n")
    done = command("limits", "set", "--org", "hoarder", "--queue", QUEUE, "--backlog-bytes", "5000", *at)
    assert (done.code, done.out) == (0, "org hoarder, queue mail: 5,000 bytes of backlog\n")
    listed = command("limits", "list", "--org", "hoarder", "--json", *at).documents
    assert [(one["measure"], one["amount"], one["interval_s"]) for one in listed] == [
        ("backlog", 1000, None),
        ("backlog_bytes", 5000, None),
    ]
    refused = command("limits", "set", "--org", "hoarder", "--backlog", "5", "--per", "1s", *at)
    assert (refused.code, refused.out) == (2, "")
    assert "--per" in refused.err
    assert command("limits", "clear", "--org", "hoarder", "--backlog", *at).code == 0
    assert command("limits", "clear", "--org", "hoarder", "--queue", QUEUE, "--backlog-bytes", *at).code == 0
    assert command("limits", "list", "--org", "hoarder", "--json", *at).documents == []
