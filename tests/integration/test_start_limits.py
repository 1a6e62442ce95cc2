"""Tests limits of starts over gRPC, with two sets of routers that have two processes each, and two shards. Most limits
in these tests are per day, so that a bucket gets no new token while a test runs."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import AsyncGenerator, Generator, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pytest
from google.protobuf.duration_pb2 import Duration

from tests.command import windrow
from tests.moves import begin_move
from tests.postgres import Server
from tests.routers import PATIENCE_S, Routers, running_routers, write_cluster
from tests.streams import QUEUE, Client, acks, client, new_job, until
from windrow.v1 import admin_pb2, cluster_pb2, limits_pb2, queue_pb2

OTHER = "files"
STARTS = limits_pb2.LIMIT_MEASURE_STARTS
DAY_S = 86_400


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    dsns: Mapping[str, str]
    config: Path
    near: Routers
    far: Routers

    def sql(self, statement: str, *parameters: object, shard: str = "s1") -> list[tuple[Any, ...]]:
        with psycopg.connect(self.dsns[shard], autocommit=True) as connection:
            cursor = connection.execute(statement.encode(), parameters)
            return cursor.fetchall() if cursor.description else []

    def leased(self, org: str) -> int:
        statement = (
            "SELECT count(*) FROM windrow.job JOIN windrow.queue USING (queue_id) WHERE org = %s AND attempt > 0"
        )
        ((count,),) = self.sql(statement, org)
        return int(count)

    def tokens(self, org: str, *, shard: str = "s1") -> list[int]:
        found = self.sql("SELECT floor(tokens + 1e-3)::int FROM windrow.token_bucket WHERE org = %s", org, shard=shard)
        return [count for (count,) in found]


@pytest.fixture(scope="module")
def cluster(postgres: Server, tmp_path_factory: pytest.TempPathFactory) -> Generator[Cluster, None, None]:
    dsns = {shard: postgres.create(f"starts_{shard}") for shard in ("s1", "s2")}
    config = write_cluster(tmp_path_factory.mktemp("starts") / "cluster.toml", dsns)
    with running_routers(config, processes=2) as near, running_routers(config, processes=2) as far:
        yield Cluster(dsns=dsns, config=config, near=near, far=far)
    for shard in dsns:
        postgres.drop(f"starts_{shard}")


@pytest.fixture
async def near(cluster: Cluster) -> AsyncGenerator[Client, None]:
    async with client(cluster.near.address) as opened:
        yield opened


@pytest.fixture
async def far(cluster: Cluster) -> AsyncGenerator[Client, None]:
    async with client(cluster.far.address) as opened:
        yield opened


async def limit(by: Client, org: str, amount: int, *, per_s: int = DAY_S, queue: str = "") -> None:
    request = cluster_pb2.SetLimitRequest(
        org=org, queue=queue, measure=STARTS, amount=amount, interval=Duration(seconds=per_s)
    )
    await by.cluster.SetLimit(request, timeout=PATIENCE_S)


async def in_force(cluster: Cluster, org: str) -> None:
    """Returns when each process of both routers has read the limits and put them in force. One ListLimits call makes
    one process do this. Each connection reaches a random process, so this function opens many connections."""
    for routers in (cluster.near, cluster.far):
        for _ in range(8):
            async with client(routers.address) as one:
                await one.admin.ListLimits(admin_pb2.ListLimitsRequest(org=org), timeout=PATIENCE_S)


async def store(by: Client, org: str, count: int, *, queue: str = QUEUE) -> list[str]:
    return await by.enqueue(org, *(new_job(queue=queue) for _ in range(count)))


# ── Bad input ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("arguments", "code", "why"),
    [
        (["set", "--org", "acme", "--starts", "0"], 2, "--starts: must be 1 to"),
        (["set", "--org", "acme", "--starts", str(10**30)], 2, "--starts"),
        (["set", "--org", "acme", "--starts", "5", "--jobs", "5"], 2, "give either"),
        (["set", "--org", "acme", "--starts", "5", "--per", "25h"], 2, "--per"),
        (["clear", "--org", "acme", "--starts", "--bytes"], 2, "give either"),
        (["clear", "--org", "nobody", "--starts"], 4, "there is no such limit"),
    ],
)
def test_bad_input_of_the_command_sets_nothing(cluster: Cluster, arguments: list[str], code: int, why: str) -> None:
    before = cluster.sql("SELECT * FROM windrow.usage_limit ORDER BY 1, 2, 3")
    done = windrow("limits", *arguments, "--address", cluster.near.address)
    assert (done.code, done.out) == (code, "")
    assert why in done.err
    assert cluster.sql("SELECT * FROM windrow.usage_limit ORDER BY 1, 2, 3") == before


# ── How many jobs start ──────────────────────────────────────────────────────────────────────────────────────────────


async def test_all_processes_together_start_exactly_the_limit(cluster: Cluster, near: Client, far: Client) -> None:
    org = await near.org_on("s1")
    await limit(near, org, 20, queue=QUEUE)
    await in_force(cluster, org)
    async with AsyncExitStack() as stack:
        streams = [
            await stack.enter_async_context(one.stream(org, credit=7))
            for routers in (cluster.near, cluster.far)
            for one in [await stack.enter_async_context(client(routers.address)) for _ in range(6)]
        ]
        # Some jobs are handed over and some are claimed.
        for _ in range(15):
            await store(near, org, 1)
            await store(far, org, 5)
        await until(lambda: sum(len(one.jobs) for one in streams) >= 20, "the whole limit has started")
        for by in (near, far):
            assert await by.dequeue(org) == []
    assert cluster.leased(org) == 20


async def test_consumers_of_all_orgs_start_exactly_the_limit_and_can_finish_what_they_got(
    cluster: Cluster, near: Client, far: Client
) -> None:
    org = await near.org_on("s1")
    queues = [f"all-{org}-{at}" for at in range(3)]
    for queue, amount in zip(queues, (4, 6, 100), strict=True):
        await limit(near, org, amount, queue=queue)
    await in_force(cluster, org)
    async with near.stream(None, *queues, credit=100) as one, far.stream(None, *queues, credit=100) as two:
        for queue in queues:
            for by in (near, far):
                await store(by, org, 6, queue=queue)
        await until(lambda: len(one.jobs) + len(two.jobs) >= 22, "each limit is used up")
        # One stream may have got all jobs.
        for stream in (stream for stream in (one, two) if stream.jobs):
            assert await stream.settle(1, acks=acks(stream.jobs)) == []
    counts = Counter(job.queue for job in [*one.jobs, *two.jobs])
    assert [counts[queue] for queue in queues] == [4, 6, 12]


async def test_a_dequeue_gets_as_many_jobs_as_there_are_tokens(cluster: Cluster, near: Client, far: Client) -> None:
    org = await near.org_on("s1")
    await limit(near, org, 8)
    await in_force(cluster, org)
    await store(near, org, 10)
    await store(near, org, 10, queue=OTHER)
    assert len(await near.dequeue(org, QUEUE, OTHER)) == 8
    assert await far.dequeue(org, OTHER) == []


async def test_a_spent_limit_does_not_hold_up_other_queues(cluster: Cluster, near: Client, far: Client) -> None:
    org = await near.org_on("s1")
    await limit(near, org, 2, queue=QUEUE)
    await in_force(cluster, org)
    async with near.stream(org, QUEUE, OTHER, credit=1000) as stream:
        await store(far, org, 10)
        await stream.until_jobs(2)
        for count in range(1, 11):
            await store(near if count % 2 else far, org, 1, queue=OTHER)
            await stream.until_jobs(2 + count)
        assert [job.queue for job in stream.jobs].count(QUEUE) == 2


async def test_consumers_get_the_next_job_when_its_token_comes(cluster: Cluster, near: Client, far: Client) -> None:
    org = await near.org_on("s1")
    await limit(near, org, 2, per_s=1)
    await in_force(cluster, org)
    async with near.stream(org, credit=100) as one, far.stream(org, credit=100) as two:
        await store(near, org, 8)
        await until(lambda: len(one.jobs) + len(two.jobs) == 8, "each token starts a job")
    statement = """
        SELECT extract(epoch FROM max(leased_at) - min(leased_at))
        FROM windrow.job JOIN windrow.queue USING (queue_id) WHERE org = %s
    """
    # Two jobs start at once from the full bucket, and then one job each half second.
    ((seconds,),) = cluster.sql(statement, org)
    assert seconds >= 2.9


async def test_a_spent_limit_is_the_cause_why_a_job_waits(cluster: Cluster, near: Client) -> None:
    org = await near.org_on("s1")
    await limit(near, org, 2, queue=QUEUE)
    await in_force(cluster, org)
    ids = await store(near, org, 3)
    leased = {job.id for job in await near.dequeue(org)}
    (waiting,) = set(ids) - leased
    async with near.stream(org, credit=1):
        job = await near.admin.ExplainJob(admin_pb2.ExplainJobRequest(org=org, id=waiting), timeout=PATIENCE_S)
        queue = await near.admin.ExplainQueue(admin_pb2.ExplainQueueRequest(org=org, queue=QUEUE), timeout=PATIENCE_S)
    for causes in (job.causes, queue.causes):
        (spent,) = [cause.start_limit for cause in causes if cause.HasField("start_limit")]
        assert (spent.queue, spent.amount, spent.usage, spent.interval) == (QUEUE, 2, 2, Duration(seconds=DAY_S))
        assert 0 < spent.next_start.seconds <= DAY_S / 2
    assert not job.HasField("runs_at")
    done = windrow("jobs", "why", org, waiting, "--address", cluster.near.address)
    assert "queue 'mail' may have 2 starts per" in done.out


# ── What is charged ──────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_released_job_has_started(cluster: Cluster, near: Client) -> None:
    org = await near.org_on("s1")
    await limit(near, org, 2)
    await in_force(cluster, org)
    await store(near, org, 1)
    for _ in range(2):
        (job,) = await near.dequeue(org)
        await near.queue.Release(queue_pb2.ReleaseRequest(org=org, leases=[job.lease]), timeout=PATIENCE_S)
    assert await near.dequeue(org) == []


async def test_a_claim_that_finds_nothing_costs_nothing(cluster: Cluster, near: Client, far: Client) -> None:
    org = await near.org_on("s1")
    await limit(near, org, 3)
    await in_force(cluster, org)
    for _ in range(5):
        assert await near.dequeue(org) == []
        assert await far.dequeue(org) == []
    await until(lambda: cluster.tokens(org) in ([], [3]), "what the claims did not use is given back")
    await store(near, org, 5)
    # Another process of the router may have seen the bucket while the bucket was empty. Such a process asks the shard
    # again after 3 s.
    started = 0
    while started < 3:
        started += len(await far.dequeue(org, wait_s=30))
    assert started == 3
    assert await near.dequeue(org) == []


# ── Changes and faults ───────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_change_governs_the_jobs_that_wait(cluster: Cluster, near: Client, far: Client) -> None:
    org = await near.org_on("s1")
    await limit(near, org, 1)
    await in_force(cluster, org)
    async with far.stream(org, credit=100) as stream:
        await store(near, org, 30)
        await stream.until_jobs(1)
        # The change scales the bucket: an empty bucket stays empty, but fills faster from now on.
        await limit(near, org, 1000, per_s=1)
        await stream.until_jobs(30)
        await limit(near, org, 1)
        await in_force(cluster, org)
        await store(near, org, 5)
        assert await near.dequeue(org) == []
        await near.cluster.ClearLimit(cluster_pb2.ClearLimitRequest(org=org, measure=STARTS), timeout=PATIENCE_S)
        await stream.until_jobs(35)


async def test_a_router_that_is_killed_takes_no_tokens_along_that_it_does_not_use(
    cluster: Cluster, near: Client
) -> None:
    org = await near.org_on("s1")
    await limit(near, org, 10)
    await store(near, org, 3)
    with running_routers(cluster.config) as mortal:
        async with client(mortal.address) as there:
            assert len(await there.dequeue(org, max_jobs=100)) == 3
            await until(lambda: cluster.tokens(org) == [7], "it gives back what it does not need")
            for pid in mortal.pids:
                os.kill(pid, signal.SIGKILL)
    await in_force(cluster, org)
    await store(near, org, 20)
    assert len(await near.dequeue(org)) == 7


async def test_the_bucket_moves_with_its_org(cluster: Cluster, near: Client, far: Client) -> None:
    org = await near.org_on("s1")
    await limit(near, org, 10)
    await in_force(cluster, org)
    await store(near, org, 20)
    started = await near.dequeue(org, max_jobs=6)
    assert len(started) == 6
    # Ack the jobs, because the move ends only when no job is leased.
    await near.queue.Ack(queue_pb2.AckRequest(org=org, acks=acks(started)), timeout=PATIENCE_S)
    await until(lambda: cluster.tokens(org) == [4], "unused tokens are given back")
    move = await asyncio.to_thread(begin_move, cluster.dsns, org, to="s2")
    await asyncio.to_thread(move.close)
    await asyncio.to_thread(move.switch)
    assert cluster.tokens(org, shard="s2") == [4]
    await asyncio.to_thread(move.finish)
    # This call makes routers read the catalog, which says where the org is.
    await in_force(cluster, org)
    async with far.stream(org, credit=100) as stream:
        await stream.until_jobs(4)
        assert await far.dequeue(org) == []
        assert len(stream.jobs) == 4


# ── The command ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_command_sets_lists_and_clears(cluster: Cluster) -> None:
    at = ("--address", cluster.near.address)
    done = windrow("limits", "set", "--org", "mailer", "--queue", QUEUE, "--starts", "100", "--per", "60s", *at)
    assert (done.code, done.out) == (0, "org mailer, queue mail: 100 starts per 1m\n")
    wanted = {"org": "mailer", "queue": QUEUE, "measure": "starts", "amount": 100, "interval_s": 60.0}
    assert windrow("limits", "list", "--org", "mailer", "--json", *at).documents == [wanted]
    assert windrow("limits", "clear", "--org", "mailer", "--queue", QUEUE, "--starts", *at).code == 0
    assert windrow("limits", "list", "--org", "mailer", "--json", *at).documents == []
