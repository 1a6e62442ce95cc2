"""Tests Consume streams of all orgs, with two shards and with two routers that learn of each other's jobs only by the
doorbell."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Generator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

import windrow
from shard.history import erasure
from shard.postgres.pool import Database
from shard.vocabulary import OrgId, ShardName
from tests import moves
from tests.jobs import job_id
from tests.postgres import Server
from tests.routers import PATIENCE_S, Routers, running_routers, write_cluster
from tests.streams import NOT_FOUND, STALE, Client, acks, client, new_job, sql, start, until, window
from windrow.v1 import admin_pb2, cluster_pb2, job_pb2, queue_pb2, workflows_pb2, workflows_pb2_grpc

SHARDS = ("s1", "s2")
# The pause between sweeps is longer than a test, so that no sweep hides a lost wake-up.
NEVER_S = 3600.0
_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    dsns: dict[str, str]
    config: Path
    near: Routers
    far: Routers


@pytest.fixture(scope="module")
def cluster(postgres: Server, tmp_path_factory: pytest.TempPathFactory) -> Generator[Cluster, None, None]:
    dsns = {shard: postgres.create(f"all_{shard}") for shard in SHARDS}
    config = write_cluster(tmp_path_factory.mktemp("all") / "cluster.toml", dsns, sweep_seconds=NEVER_S)
    with running_routers(config) as near, running_routers(config) as far:
        yield Cluster(dsns=dsns, config=config, near=near, far=far)


@pytest.fixture
async def near(cluster: Cluster) -> AsyncGenerator[Client, None]:
    async with client(cluster.near.address) as opened:
        yield opened


@pytest.fixture
async def far(cluster: Cluster) -> AsyncGenerator[Client, None]:
    async with client(cluster.far.address) as opened:
        yield opened


@pytest.fixture
def queue() -> str:
    """Returns a queue name that no other test uses, because a stream of all orgs gets the jobs of every org of the
    cluster."""
    return f"mail-{next(_numbers)}"


def erase(shard: str, dsn: str, org: str) -> bool:
    """Erases an org on its shard, as an archiver does. Returns whether there was anything to erase."""

    async def run() -> bool:
        database = Database(ShardName(shard), dsn, connections=1)
        await database.open()
        try:
            began = await erasure.begin(database, OrgId(org), erasure=str(uuid.uuid4()))
            for one in await erasure.unfinished(database):
                while await erasure.go_on(database, one):
                    pass
            return began
        finally:
            await database.close()

    return asyncio.run(run())


async def shard_of(near: Client, org: str, queue: str) -> str:
    request = admin_pb2.GetQueueRequest(org=org, queue=queue)
    return (await near.admin.GetQueue(request, timeout=PATIENCE_S)).queue.shard


def orgs(count: int) -> list[str]:
    return [f"org-a{next(_numbers)}" for _ in range(count)]


async def test_jobs_that_were_there_before_come_from_all_orgs_of_all_shards(near: Client, queue: str) -> None:
    of = orgs(30)
    for org in of:
        await near.enqueue(org, new_job(queue=queue), new_job(queue=queue))
    async with near.stream(None, queue, credit=100) as stream:
        jobs = await stream.until_jobs(60)
        assert Counter(job.org for job in jobs) == dict.fromkeys(of, 2)
        assert await stream.settle(1, acks=acks(jobs)) == []


# ── What is refused ──────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_stream_that_names_an_org_in_its_metadata_is_not_one_of_all_orgs(near: Client, queue: str) -> None:
    call = near.queue.Consume(metadata=(("windrow-org", "acme"),))
    await call.write(queue_pb2.ConsumeRequest(start=start(None, queue)))
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call.read()
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_all_orgs_must_be_true(near: Client, queue: str) -> None:
    call = near.queue.Consume()
    await call.write(queue_pb2.ConsumeRequest(start=queue_pb2.ConsumeStart(all_orgs=False, queues=[queue])))
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call.read()
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_leases_that_name_no_org_or_a_wrong_one_are_not_found(near: Client, queue: str) -> None:
    (org, other) = orgs(2)
    await near.enqueue(org, new_job(queue=queue))
    await near.enqueue(other, new_job(queue="other"))
    (of_one_org,) = await near.dequeue(other, "other")
    async with near.stream(None, queue, credit=10) as stream:
        (job,) = await stream.until_jobs(1)
        assert job.lease.endswith(org.encode())
        forged = job.lease.removesuffix(org.encode()) + other.encode()
        leases = [of_one_org.lease, forged, job.lease]
        answers = await stream.settle(1, acks=[queue_pb2.Ack(lease=lease) for lease in leases])
        assert answers == [NOT_FOUND, NOT_FOUND, job_pb2.JOB_ANSWER_OK]


async def test_a_lease_of_another_org_is_not_found_by_a_stream_of_one_org(near: Client, queue: str) -> None:
    (org, other) = orgs(2)
    await near.enqueue(org, new_job(queue=queue))
    async with near.stream(None, queue, credit=1) as all_orgs, near.stream(other, queue) as one:
        (job,) = await all_orgs.until_jobs(1)
        assert await one.settle(1, acks=acks([job])) == [NOT_FOUND]
        assert await all_orgs.settle(1, acks=acks([job])) == []


# ── How jobs are found ───────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_parked_stream_gets_jobs_of_an_org_that_did_not_exist(near: Client, queue: str) -> None:
    async with near.stream(None, queue, credit=10) as stream:
        await near.enqueue("first-" + queue, new_job(queue=queue))
        await stream.until_jobs(1)
        for n, org in enumerate(orgs(5)):
            await near.enqueue(org, new_job(queue=queue))
            jobs = await stream.until_jobs(n + 2)
            assert jobs[-1].org == org
            assert await stream.settle(n + 1, acks=acks(jobs[-1:])) == []


async def test_jobs_that_another_router_has_stored_wake_a_parked_stream(near: Client, far: Client, queue: str) -> None:
    async with near.stream(None, queue, credit=10) as stream:
        for n, org in enumerate(orgs(5)):
            await far.enqueue(org, new_job(queue=queue))
            assert (await stream.until_jobs(n + 1))[-1].org == org


async def test_jobs_that_fall_due_later_come_when_they_are_due(near: Client, far: Client, queue: str) -> None:
    one, other = orgs(2)
    async with near.stream(None, queue, credit=10) as stream:
        await near.enqueue(one, new_job(queue=queue, delay=window(0.3)))
        await far.enqueue(other, new_job(queue=queue, delay=window(0.3)))
        assert {job.org for job in await stream.until_jobs(2)} == {one, other}


async def test_a_nacked_job_comes_again_after_its_delay(near: Client, queue: str) -> None:
    (org,) = orgs(1)
    await near.enqueue(org, new_job(queue=queue))
    async with near.stream(None, queue, credit=10) as stream:
        (job,) = await stream.until_jobs(1)
        assert await stream.settle(1, nacks=[queue_pb2.Nack(lease=job.lease, retry_after=window(0.2))]) == []
        again = (await stream.until_jobs(2))[1]
        assert (again.id, again.attempt) == (job.id, 2)


async def test_a_job_whose_lease_expires_comes_again(near: Client, queue: str) -> None:
    (org,) = orgs(1)
    await near.enqueue(org, new_job(queue=queue))
    async with near.stream(None, queue, credit=10, window_s=0.5) as stream:
        (job,) = await stream.until_jobs(1)
        again = (await stream.until_jobs(2))[1]
        assert again.id == job.id
        assert await stream.settle(1, acks=acks([job])) == [STALE]


async def test_a_paused_queue_gives_nothing_until_it_is_resumed(near: Client, far: Client, queue: str) -> None:
    paused, other = orgs(2)
    await near.make_queue(paused, queue)
    await near.admin.PauseQueue(admin_pb2.PauseQueueRequest(org=paused, queue=queue))
    await near.enqueue(paused, new_job(queue=queue))
    async with near.stream(None, queue, credit=10) as stream:
        await near.enqueue(other, new_job(queue=queue))
        (job,) = await stream.until_jobs(1)
        assert job.org == other
        await far.admin.ResumeQueue(admin_pb2.ResumeQueueRequest(org=paused, queue=queue))
        assert (await stream.until_jobs(2))[1].org == paused


async def test_credit_is_never_exceeded_and_the_rest_comes_with_more_credit(near: Client, queue: str) -> None:
    of = orgs(10)
    for org in of:
        await near.enqueue(org, *(new_job(queue=queue) for _ in range(3)))
    async with near.stream(None, queue, credit=7) as stream:
        await stream.until_jobs(7)
        # The answer arrives after everything that the router sent before the answer.
        assert await stream.settle(1, extends=[queue_pb2.Extend(lease=stream.jobs[0].lease)]) == []
        assert len(stream.jobs) == 7
        await stream.send(credit=100)
        assert Counter(job.org for job in await stream.until_jobs(30)) == dict.fromkeys(of, 3)


async def test_two_streams_of_two_routers_get_each_job_once(near: Client, far: Client, queue: str) -> None:
    of = orgs(20)
    for org in of:
        await near.enqueue(org, *(new_job(queue=queue) for _ in range(5)))
    async with near.stream(None, queue, credit=1000) as one, far.stream(None, queue, credit=1000) as other:
        await until(lambda: len(one.jobs) + len(other.jobs) >= 100, "all jobs")
        ids = [job.id for stream in (one, other) for job in stream.jobs]
        assert len(set(ids)) == len(ids) == 100


# ── Shares ───────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_new_org_does_not_wait_behind_a_large_backlog(near: Client, queue: str) -> None:
    large, small = orgs(2)
    await near.enqueue(large, *(new_job(queue=queue) for _ in range(500)))
    async with near.stream(None, queue, credit=10) as stream:
        jobs = await stream.until_jobs(10)
        await near.enqueue(small, new_job(queue=queue))
        for turn in range(1, 4):
            first = len(stream.jobs) - 10
            await stream.settle(turn, acks=acks(stream.jobs[first : first + 10]), credit=10)
            jobs = await stream.until_jobs(10 * turn + 10)
        assert small in {job.org for job in jobs[:40]}


async def test_an_org_with_twice_the_weight_gets_twice_the_jobs_on_every_router(
    near: Client, far: Client, queue: str
) -> None:
    light, heavy = orgs(2)
    for org in (light, heavy):
        await near.enqueue(org, *(new_job(queue=queue) for _ in range(900)))
    async with near.stream(None, queue) as stream:
        await far.cluster.SetWeight(cluster_pb2.SetWeightRequest(org=heavy, weight=2), timeout=PATIENCE_S)
        listed = await near.cluster.ListWeights(cluster_pb2.ListWeightsRequest(), timeout=PATIENCE_S)
        assert [(one.org, one.weight) for one in listed.weights] == [(heavy, 2)]
        seen = 0

        async def two_of_three() -> bool:
            nonlocal seen
            await stream.send(credit=60)
            jobs = (await stream.until_jobs(seen + 60))[seen : seen + 60]
            seen += 60
            return Counter(job.org for job in jobs)[heavy] == pytest.approx(40, abs=4)

        # The router of the stream learns of the weight within two seconds.
        await until(two_of_three, "the heavy org gets two jobs of three", every_s=0.2, within_s=4)
        assert await two_of_three()
        await near.cluster.SetWeight(cluster_pb2.SetWeightRequest(org=heavy, weight=1), timeout=PATIENCE_S)
        listed = await far.cluster.ListWeights(cluster_pb2.ListWeightsRequest(), timeout=PATIENCE_S)
        assert list(listed.weights) == []


@pytest.mark.parametrize("weight", [0, -1, 1001, float("nan"), float("inf")])
async def test_a_weight_out_of_range_is_refused(near: Client, weight: float) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await near.cluster.SetWeight(cluster_pb2.SetWeightRequest(org="acme", weight=weight), timeout=PATIENCE_S)
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT


# ── Causes, and what consumers are told ──────────────────────────────────────────────────────────────────────────────


async def test_a_consumer_of_all_orgs_is_a_consumer_of_each(near: Client, far: Client, queue: str) -> None:
    (org,) = orgs(1)
    shard = await near.make_queue(org, queue)
    request = admin_pb2.ExplainQueueRequest(org=org, queue=queue)

    async def no_consumer(at: Client) -> bool:
        answer = await at.admin.ExplainQueue(request, timeout=PATIENCE_S)
        return any(cause.HasField("no_consumer") for cause in answer.causes)

    await near.enqueue(org, new_job(queue=queue, delay=window(3600)))
    assert await no_consumer(near)
    async with near.stream(None, queue, credit=1):
        await until(lambda: _not(no_consumer(near)), "the consumer is known to its own router")
        await until(lambda: _not(no_consumer(far)), f"the consumer is recorded on shard {shard}")


async def _not(asked: Awaitable[bool]) -> bool:
    return not await asked


async def test_an_org_that_others_are_served_before_is_told_so(near: Client, queue: str) -> None:
    (org,) = orgs(1)
    await near.enqueue(org, *(new_job(queue=queue) for _ in range(5)))
    async with near.stream(None, queue, credit=2) as stream:
        await stream.until_jobs(2)
        request = admin_pb2.ExplainQueueRequest(org=org, queue=queue)
        answer = await near.admin.ExplainQueue(request, timeout=PATIENCE_S)
        (share,) = [cause.fair_share for cause in answer.causes if cause.HasField("fair_share")]
        assert share.weight == 1
        assert share.ahead.ToTimedelta().total_seconds() > 0
        # A paused queue gets no share.
        await near.admin.PauseQueue(admin_pb2.PauseQueueRequest(org=org, queue=queue), timeout=PATIENCE_S)
        answer = await near.admin.ExplainQueue(request, timeout=PATIENCE_S)
        assert [cause.WhichOneof("cause") for cause in answer.causes][:2] == ["paused", "backlog"]


async def test_a_stream_of_all_orgs_is_told_of_a_cancelled_job(near: Client, far: Client, queue: str) -> None:
    (org,) = orgs(1)
    await near.enqueue(org, new_job(queue=queue))
    async with near.stream(None, queue, credit=1, worker="w-" + queue) as stream:
        (job,) = await stream.until_jobs(1)
        await far.queue.CancelJobs(queue_pb2.CancelJobsRequest(org=org, ids=[job.id]), timeout=PATIENCE_S)
        await stream.until(lambda: job.lease in stream.revoked, "the revoked lease")


@pytest.mark.parametrize("how", ["cancel", "wait"])
async def test_an_org_is_not_charged_for_a_job_whose_lease_was_ended_by_others_or_that_waits_for_nodes(
    near: Client, queue: str, how: str
) -> None:
    (org,) = orgs(1)
    workflow, loop = job_id(), asyncio.get_running_loop()
    flows: workflows_pb2_grpc.WorkflowsAsyncStub = workflows_pb2_grpc.WorkflowsStub(near.channel)
    node = workflows_pb2.NewNode(name="first", job=new_job(id="", queue=queue))
    begun = workflows_pb2.StartWorkflowRequest(org=org, id=workflow, nodes=[node])
    await flows.StartWorkflow(begun, timeout=PATIENCE_S)
    async with near.stream(None, queue, credit=1, worker="w-" + queue, window_s=3600) as stream:
        (job,) = await stream.until_jobs(1)
        if how == "cancel":
            await near.queue.CancelJobs(queue_pb2.CancelJobsRequest(org=org, ids=[job.id]), timeout=PATIENCE_S)
        else:
            more = workflows_pb2.NewNode(name="second", job=new_job(id="", queue="other-" + queue))
            added = workflows_pb2.AddNodesRequest(org=org, id=workflow, lease=job.lease, nodes=[more], wait=True)
            assert (await flows.AddNodes(added, timeout=PATIENCE_S)).waits
        ahead, since_s = -1.0, loop.time()
        async with asyncio.timeout(PATIENCE_S):
            while loop.time() < since_s + 0.5:
                # The new job makes the router charge each org for the time of its live leases.
                await near.enqueue(org, new_job(queue=queue))
                asked = admin_pb2.ExplainQueueRequest(org=org, queue=queue)
                answer = await near.admin.ExplainQueue(asked, timeout=PATIENCE_S)
                (share,) = [cause.fair_share for cause in answer.causes if cause.HasField("fair_share")]
                if (now := share.ahead.ToTimedelta().total_seconds()) != ahead:
                    ahead, since_s = now, loop.time()


# ── Faults, moves and erasures ───────────────────────────────────────────────────────────────────────────────────────


async def test_jobs_of_a_stream_that_breaks_come_back(near: Client, far: Client, queue: str) -> None:
    (org,) = orgs(1)
    await near.enqueue(org, *(new_job(queue=queue) for _ in range(5)))
    async with far.stream(None, queue, credit=100) as other:
        await other.until_jobs(5)
        async with near.stream(None, queue, credit=100) as stream:
            # Release the jobs through a call of one org: the doorbell tells the other router.
            leases = [job.lease for job in other.jobs]
            await far.queue.Release(queue_pb2.ReleaseRequest(org=org, leases=leases), timeout=PATIENCE_S)
            await until(lambda: len(stream.jobs) + len(other.jobs) >= 10, "all jobs again")


async def test_leases_of_a_killed_router_come_back_and_lost_hints_are_found_by_the_sweep(
    cluster: Cluster, far: Client, queue: str, tmp_path: Path
) -> None:
    (org,) = orgs(1)
    await far.enqueue(org, new_job(queue=queue), new_job(queue=queue, delay=window(3600)))
    config = write_cluster(tmp_path / "killed.toml", cluster.dsns, sweep_seconds=NEVER_S)
    sweeping = write_cluster(tmp_path / "sweeping.toml", cluster.dsns, sweep_seconds=0.2)
    with running_routers(sweeping) as router:
        async with client(router.address) as near, near.stream(None, queue, credit=100) as stream:
            # When the stream has got a job of another org, its first walk has ended.
            await far.enqueue("other-" + queue, new_job(queue=queue))
            await stream.until_jobs(2)
            with running_routers(config) as killed:
                async with client(killed.address) as doomed:
                    (job,) = [job for job in stream.jobs if job.org == org]
                    assert await stream.settle(1, releases=[job.lease]) == []
                    async with doomed.stream(None, queue, credit=100, window_s=1) as other:
                        await until(lambda: len(stream.jobs) + len(other.jobs) >= 3, "the released job")
                        for pid in killed.pids:
                            os.kill(pid, signal.SIGKILL)
            await until(lambda: [one.id for one in stream.jobs].count(job.id) >= 2, "the job of the killed router")
            # This write rings no doorbell, so only the sweep can find the job.
            moved = sql(
                cluster.dsns,
                await shard_of(near, org, queue),
                "UPDATE windrow.job SET run_at = now(), visible_at = now() WHERE lease IS NULL AND queue_id IN "
                "(SELECT queue_id FROM windrow.queue WHERE queue = %s) RETURNING id::text",
                queue,
            )
            assert len(moved) == 1
            await until(lambda: moved[0][0] in {one.id for one in stream.jobs}, "the job without a hint")


async def test_no_job_is_missing_or_comes_twice_while_its_org_moves(
    cluster: Cluster, near: Client, far: Client, queue: str
) -> None:
    (org,) = orgs(1)
    await near.enqueue(org, *(new_job(queue=queue) for _ in range(20)), new_job(queue=queue, delay=window(2)))
    source = await shard_of(near, org, queue)
    async with near.stream(None, queue, credit=10) as stream, far.stream(None, queue, credit=0) as other:
        leased = await stream.until_jobs(10)
        (target,) = set(SHARDS) - {source}
        move = await asyncio.to_thread(moves.begin_move, cluster.dsns, org, to=target)
        await asyncio.to_thread(move.switch)
        # The source no longer takes jobs, and still has ten leases and ten jobs that nobody has taken.
        await far.enqueue(org, *(new_job(queue=queue) for _ in range(5)))
        finishing = asyncio.create_task(asyncio.to_thread(move.finish))
        assert await stream.settle(1, acks=acks(leased), credit=10) == []
        await other.send(credit=100)
        await until(lambda: len(stream.jobs) + len(other.jobs) >= 26, "all jobs")
        # The move ends when the leases on the source have ended.
        assert await stream.settle(2, acks=acks(stream.jobs[10:])) == []
        assert await other.settle(1, acks=acks(other.jobs)) == []
        await finishing
        assert await shard_of(near, org, queue) == target
        arrived = Counter(job.id for job in (*stream.jobs, *other.jobs))
        assert len(arrived) == 26
        assert set(arrived.values()) == {1}


async def test_a_stream_goes_on_when_an_org_is_erased_and_comes_again(
    cluster: Cluster, near: Client, queue: str
) -> None:
    (org, other) = orgs(2)
    await near.enqueue(org, *(new_job(queue=queue) for _ in range(3)))
    async with near.stream(None, queue, credit=1) as stream:
        (job,) = await stream.until_jobs(1)
        shard = await shard_of(near, org, queue)
        assert await asyncio.to_thread(erase, shard, cluster.dsns[shard], org)
        # The erasure has deleted the job and so its lease. The other jobs of the erased org never come.
        await near.enqueue(other, new_job(queue=queue))
        assert await stream.settle(1, acks=acks([job]), credit=10) == [NOT_FOUND]
        jobs = await stream.until_jobs(2)
        assert [one.org for one in jobs[1:]] == [other]
        (again,) = await near.enqueue(org, new_job(queue=queue))
        jobs = await stream.until_jobs(3)
        assert (jobs[2].org, jobs[2].id) == (org, again)
        assert await stream.settle(2, acks=acks(jobs[1:])) == []


async def test_a_router_that_drains_ends_its_streams_and_gives_no_more_jobs(
    cluster: Cluster, far: Client, queue: str
) -> None:
    (org,) = orgs(1)
    await far.enqueue(org, new_job(queue=queue), new_job(queue=queue))
    with running_routers(cluster.config) as ending:
        async with client(ending.address) as near, near.stream(None, queue, credit=1) as stream:
            (job,) = await stream.until_jobs(1)
            for pid in ending.pids:
                os.kill(pid, signal.SIGTERM)
            await stream.until(lambda: stream.draining, "the announcement")
            assert await stream.settle(1, acks=acks([job])) == []
            await stream.half_close()
            assert await stream.end() is grpc.StatusCode.OK
            assert len(stream.jobs) == 1
    async with far.stream(None, queue, credit=10) as other:
        (rest,) = await other.until_jobs(1)
        assert rest.id != job.id


async def test_a_shard_that_is_away_delays_no_org_of_another_one(postgres: Server, tmp_path: Path, queue: str) -> None:
    dsns = {"s1": postgres.create("all_here"), "s2": postgres.create("all_away")}
    try:
        config = write_cluster(tmp_path / "cluster.toml", dsns, catalog_dsn=dsns["s1"])
        with running_routers(config) as router:
            async with client(router.address) as near:
                here, away = await near.org_on("s1"), await near.org_on("s2")
                for org in (here, away):
                    await near.enqueue(org, new_job(queue=queue))
                async with near.stream(None, queue, credit=100) as stream:
                    await stream.until_jobs(2)
                    with postgres.away("all_away"):
                        for n in range(10):
                            await near.enqueue(here, new_job(queue=queue))
                            assert (await stream.until_jobs(n + 3))[-1].org == here
                    await until(lambda: _stored(near, away, queue), "the shard is back")
                    await stream.until(lambda: stream.jobs[-1].org == away, "a job of the shard that is back")
    finally:
        for name in ("all_here", "all_away"):
            postgres.drop(name)


async def _stored(near: Client, org: str, queue: str) -> bool:
    try:
        await near.enqueue(org, new_job(queue=queue))
    except grpc.aio.AioRpcError:
        return False
    return True


# ── The client ───────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_worker_of_all_orgs_runs_and_acks_the_jobs_of_each(cluster: Cluster, near: Client, queue: str) -> None:
    of = orgs(10)
    ran = Counter[str]()
    async with windrow.Client(cluster.near.address, org="operators") as opened:
        worker = windrow.Worker(opened, [queue], orgs=windrow.ALL, name="w-" + queue)
        assert worker.prefetch == 0

        @worker.handler("greet")
        async def greet(job: windrow.Job) -> str:
            ran[job.org] += 1
            if sum(ran.values()) == 30:
                worker.stop()
            return job.org

        working = asyncio.create_task(worker.run())
        ids = {org: await near.enqueue(org, *(new_job(queue=queue) for _ in range(3))) for org in of}
        async with asyncio.timeout(PATIENCE_S):
            await working
    assert ran == dict.fromkeys(of, 3)
    for org in of:
        assert {job.state for job in await near.get(org, *ids[org])} == {job_pb2.JOB_STATE_SUCCEEDED}


async def test_unary_calls_take_a_lease_of_such_a_stream_with_its_org(near: Client, queue: str) -> None:
    (org,) = orgs(1)
    await near.enqueue(org, new_job(queue=queue))
    async with near.stream(None, queue, credit=10) as stream:
        (job,) = await stream.until_jobs(1)
        request = queue_pb2.AckRequest(org=org, acks=acks([job]))
        assert list((await near.queue.Ack(request, timeout=PATIENCE_S)).answers) == [job_pb2.JOB_ANSWER_OK]


# ── The books ─────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_books_balance_after_all_of_it(near: Client) -> None:
    await near.balanced(SHARDS)
