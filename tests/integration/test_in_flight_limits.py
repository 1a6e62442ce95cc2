"""Tests limits of jobs in flight over gRPC, with two sets of routers that have two processes each. The routers sweep
only once an hour. So only the end of a lease wakes a consumer."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.command import windrow
from tests.postgres import Server
from tests.routers import PATIENCE_S, Routers, running_routers, write_cluster
from tests.streams import QUEUE, Client, Stream, acks, client, new_job, until
from windrow.v1 import admin_pb2, cluster_pb2, job_pb2, limits_pb2, queue_pb2

OTHER = "files"
IN_FLIGHT = limits_pb2.LIMIT_MEASURE_IN_FLIGHT


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    dsn: str
    folder: Path
    near: Routers
    far: Routers

    def leased(self, org: str) -> int:
        # The statement does not use `now()`, because its time is earlier than the snapshot. With `now()`, leases that
        # have just expired would be counted together with the leases that followed them.
        statement = """
            SELECT count(*) FROM windrow.job JOIN windrow.queue USING (queue_id)
            WHERE org = %s AND lease IS NOT NULL AND visible_at > clock_timestamp()
        """
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            row: tuple[Any, ...] | None = connection.execute(statement, [org]).fetchone()
        assert row is not None
        return int(row[0])


@pytest.fixture(scope="module")
def cluster(postgres: Server, tmp_path_factory: pytest.TempPathFactory) -> Generator[Cluster, None, None]:
    dsn = postgres.create("in_flight")
    folder = tmp_path_factory.mktemp("in_flight")
    config = write_cluster(folder / "cluster.toml", {"s1": dsn}, sweep_seconds=3600)
    with running_routers(config, processes=2) as near, running_routers(config, processes=2) as far:
        yield Cluster(dsn=dsn, folder=folder, near=near, far=far)
    postgres.drop("in_flight")


@pytest.fixture
async def near(cluster: Cluster) -> AsyncGenerator[Client, None]:
    async with client(cluster.near.address) as opened:
        yield opened


@pytest.fixture
async def far(cluster: Cluster) -> AsyncGenerator[Client, None]:
    async with client(cluster.far.address) as opened:
        yield opened


async def limit(cluster: Cluster, by: Client, org: str, amount: int, *, queue: str = "") -> None:
    """Sets a limit, and returns when it is in force at each process of both routers. Each connection reaches a random
    process, so this function opens many connections. A ListLimits call puts the limits in force."""
    request = cluster_pb2.SetLimitRequest(org=org, queue=queue, measure=IN_FLIGHT, amount=amount)
    await by.cluster.SetLimit(request, timeout=PATIENCE_S)
    await in_force(cluster, org)


async def in_force(cluster: Cluster, org: str) -> None:
    for routers in (cluster.near, cluster.far):
        for _ in range(12):
            async with client(routers.address) as one:
                await one.admin.ListLimits(admin_pb2.ListLimitsRequest(org=org), timeout=PATIENCE_S)


async def store(by: Client, org: str, count: int, *, queue: str = QUEUE) -> list[str]:
    return await by.enqueue(org, *(new_job(queue=queue) for _ in range(count)))


class Work:
    """Consumers that ack the jobs that they get. `held_max`: the largest number of jobs that all consumers together
    held at one time."""

    def __init__(self) -> None:
        self.held = self.held_max = self.done = 0

    async def run(self, stream: Stream) -> None:
        """Acks the jobs of a stream until cancelled. A job is counted as held from its arrival until its ack is sent.
        This time lies within the job's lease."""
        seen = 0
        while True:
            jobs = (await stream.until_jobs(seen + 1))[seen:]
            seen += len(jobs)
            self.held += len(jobs)
            self.held_max = max(self.held_max, self.held)
            await asyncio.sleep(0.005)
            self.held -= len(jobs)
            await stream.send(request_id=seen, acks=acks(jobs), credit=len(jobs))
            self.done += len(jobs)


async def work(streams: Sequence[Stream], jobs: int) -> Work:
    """Returns when the consumers have acked this many jobs."""
    doing = Work()
    tasks = [asyncio.create_task(doing.run(stream)) for stream in streams]
    try:
        await until(lambda: doing.done >= jobs, f"{jobs} jobs are done")
    finally:
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
    assert not [one for one in ended if not isinstance(one, asyncio.CancelledError)]
    return doing


# ── How many jobs are leased at a time ───────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("whole_org", [False, True])
async def test_consumers_of_all_processes_never_have_more_jobs_than_the_limit_and_finish_all(
    cluster: Cluster, near: Client, far: Client, whole_org: bool
) -> None:
    org = await near.org_on("s1")
    await limit(cluster, near, org, 5, queue="" if whole_org else QUEUE)
    queues = [QUEUE, OTHER] if whole_org else [QUEUE]
    async with AsyncExitStack() as stack:
        streams = [
            await stack.enter_async_context(one.stream(org, queues[at % len(queues)], credit=3))
            for routers in (cluster.near, cluster.far)
            for at in range(6)
            for one in [await stack.enter_async_context(client(routers.address))]
        ]
        for at in range(20):
            for by in (near, far):
                await store(by, org, 3, queue=queues[at % len(queues)])
        done = await work(streams, 120)
        # Wait for the acks before the streams end: the router may not read the last acks of a cancelled stream.
        await until(lambda: cluster.leased(org) == 0, "all are acked")
    assert done.held_max <= 5
    # The consumers held more than one job at the same time.
    assert done.held_max > 1


async def test_a_queues_limit_does_not_hold_up_the_orgs_other_queues(
    cluster: Cluster, near: Client, far: Client
) -> None:
    org = await near.org_on("s1")
    await limit(cluster, near, org, 2, queue=QUEUE)
    async with near.stream(org, QUEUE, OTHER, credit=1000) as stream:
        await store(far, org, 10)
        await stream.until_jobs(2)
        await store(far, org, 10, queue=OTHER)
        await stream.until_jobs(12)
        assert [job.queue for job in stream.jobs].count(QUEUE) == 2
    assert await far.dequeue(org) == []


@pytest.mark.parametrize("end", ["acks", "nacks", "releases", "cancel"])
async def test_the_end_of_a_lease_wakes_a_consumer_of_another_router_and_queue(
    cluster: Cluster, near: Client, far: Client, end: str
) -> None:
    org = await near.org_on("s1")
    await limit(cluster, near, org, 1)
    async with near.stream(org, QUEUE, credit=1) as one, far.stream(org, OTHER, credit=1) as two:
        (first,) = await store(near, org, 1)
        (job,) = await one.until_jobs(1)
        await store(near, org, 1, queue=OTHER)
        if end == "cancel":
            await far.queue.CancelJobs(queue_pb2.CancelJobsRequest(org=org, ids=[first]), timeout=PATIENCE_S)
        elif end == "acks":
            await one.settle(1, acks=acks([job]))
        elif end == "nacks":
            await one.settle(1, nacks=[queue_pb2.Nack(lease=job.lease, failure=job_pb2.Failure(permanent=True))])
        else:
            await one.settle(1, releases=[job.lease])
        await two.until_jobs(1)


async def test_an_expired_lease_makes_room_at_the_next_sweep(cluster: Cluster, near: Client) -> None:
    org = await near.org_on("s1")
    await limit(cluster, near, org, 1)
    config = write_cluster(cluster.folder / "sweeps.toml", {"s1": cluster.dsn}, sweep_seconds=0.2)
    with running_routers(config) as routers:
        async with client(routers.address) as there:
            await store(there, org, 2)
            assert len(await there.dequeue(org, window_s=1)) == 1
            async with there.stream(org, credit=10) as stream:
                await stream.until_jobs(1)
                assert cluster.leased(org) == 1


async def test_consumers_that_are_killed_leave_no_place_taken(cluster: Cluster, near: Client, far: Client) -> None:
    org = await near.org_on("s1")
    await limit(cluster, near, org, 3)
    config = write_cluster(cluster.folder / "killed.toml", {"s1": cluster.dsn}, sweep_seconds=0.2)
    with running_routers(config, processes=2) as mortal:
        async with client(mortal.address) as there, there.stream(org, credit=2, window_s=1) as stream:
            await store(near, org, 12)
            await stream.until_jobs(2)
            for pid in mortal.pids:
                os.kill(pid, signal.SIGKILL)
    sampled: list[int] = []
    with running_routers(config) as others:
        async with client(others.address) as there, there.stream(org, credit=3) as stream:
            working = asyncio.create_task(work([stream], 12))
            while not working.done():
                sampled.append(await asyncio.to_thread(cluster.leased, org))
            await working
    assert max(sampled) <= 3


async def test_consumers_of_all_orgs_obey_it_and_are_woken(cluster: Cluster, near: Client, far: Client) -> None:
    org = await near.org_on("s1")
    queues = [f"all-{org}", f"both-{org}"]
    await limit(cluster, near, org, 2)
    async with near.stream(None, *queues, credit=4) as one, far.stream(None, *queues, credit=4) as two:
        for at in range(10):
            for by in (near, far):
                await store(by, org, 1, queue=queues[at % 2])
        done = await work([one, two], 20)
    assert done.held_max <= 2


async def test_a_change_governs_the_jobs_that_wait(cluster: Cluster, near: Client, far: Client) -> None:
    org = await near.org_on("s1")
    await limit(cluster, near, org, 1)
    async with far.stream(org, credit=100) as stream:
        await store(near, org, 30)
        await stream.until_jobs(1)
        await limit(cluster, near, org, 10)
        await stream.until_jobs(10)
        assert cluster.leased(org) == 10
        await near.cluster.ClearLimit(cluster_pb2.ClearLimitRequest(org=org, measure=IN_FLIGHT), timeout=PATIENCE_S)
        await stream.until_jobs(30)


# ── What callers are told ────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_full_limit_is_the_cause_why_a_job_waits(cluster: Cluster, near: Client) -> None:
    org = await near.org_on("s1")
    await limit(cluster, near, org, 3)
    await limit(cluster, near, org, 1, queue=QUEUE)
    ids = await store(near, org, 2)
    leased = {job.id for job in await near.dequeue(org)}
    (waiting,) = set(ids) - leased
    async with near.stream(org, credit=1):
        job = await near.admin.ExplainJob(admin_pb2.ExplainJobRequest(org=org, id=waiting), timeout=PATIENCE_S)
        queue = await near.admin.ExplainQueue(admin_pb2.ExplainQueueRequest(org=org, queue=QUEUE), timeout=PATIENCE_S)
    for causes in (job.causes, queue.causes):
        (full,) = [cause.in_flight_limit for cause in causes if cause.HasField("in_flight_limit")]
        assert (full.queue, full.amount, full.usage) == (QUEUE, 1, 1)
    assert not job.HasField("runs_at")
    done = windrow("jobs", "why", org, waiting, "--address", cluster.near.address)
    assert "queue 'mail' may have 1 job leased at a time" in done.out


def test_the_command_sets_lists_and_clears(cluster: Cluster) -> None:
    at = ("--address", cluster.near.address)
    done = windrow("limits", "set", "--org", "mailer", "--queue", QUEUE, "--in-flight", "100", *at)
    assert (done.code, done.out) == (0, "org mailer, queue mail: 100 jobs in flight\n")
    wanted = {"org": "mailer", "queue": QUEUE, "measure": "in_flight", "amount": 100, "interval_s": None}
    assert windrow("limits", "list", "--org", "mailer", "--json", *at).documents == [wanted]
    assert "100 jobs in flight" in windrow("limits", "list", "--org", "mailer", *at).out
    assert windrow("limits", "clear", "--org", "mailer", "--queue", QUEUE, "--in-flight", *at).code == 0
    assert windrow("limits", "list", "--org", "mailer", "--json", *at).documents == []


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--in-flight", "5", "--per", "1s"], "--per"),
        (["--in-flight", "0"], "--in-flight: must be 1 to"),
        (["--in-flight", "5", "--jobs", "5"], "give either"),
    ],
)
def test_bad_input_of_the_command_sets_nothing(cluster: Cluster, arguments: list[str], why: str) -> None:
    at = ("--address", cluster.near.address)
    done = windrow("limits", "set", "--org", "nobody", *arguments, *at)
    assert (done.code, done.out) == (2, "")
    assert why in done.err
    assert windrow("limits", "list", "--org", "nobody", "--json", *at).documents == []
