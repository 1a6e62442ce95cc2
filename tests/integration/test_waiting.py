"""Tests calls that wait for jobs: which calls are woken, by what, how soon, and how many statements the routers send
while nothing happens."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Generator
from types import SimpleNamespace
from typing import Any, cast

import grpc
import psycopg
import pytest
from google.protobuf.duration_pb2 import Duration
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from proof.proxy import open_proxy_before, through
from router.buffer import Account, Buffer
from router.fleet.end_waits import EndWaits
from router.fleet.handover import Handovers
from router.fleet.siblings.siblings import Siblings
from router.fleet.starts import Permit, Starts
from router.fleet.wait_room import WaitRoom
from router.keda import externalscaler_pb2 as keda
from router.keda import externalscaler_pb2_grpc as keda_grpc
from shard.errors import ShardUnavailable
from shard.history import erasure
from shard.limits import Limit, LimitKey, LimitTable, Measure
from shard.placement.slots import slot_of
from shard.postgres import arrays
from shard.postgres.pool import Database
from shard.queue import statements
from shard.queue.doorbell import Doorbell
from shard.queue.pending_enqueue import NOTHING_HANDED, Handover
from shard.queue.settle import Settlement
from shard.queue.store import Store
from shard.vocabulary import NewJobs, OrgId, QueueId, QueueName, ShardName
from tests.conftest import SHARD
from tests.effort import luck_of, trials
from tests.jobs import job_id, lease_jobs, some_jobs
from tests.pools import no_pools
from tests.postgres import Server
from tests.recorder import Recorder
from tests.routers import PATIENCE_S, Routers, running_routers, write_cluster
from tests.streams import QUEUE, Client, acks, client, new_job, sql, until, window
from tests.waiting import WaitingConsumer
from windrow.v1 import admin_pb2, cluster_pb2, job_pb2, queue_pb2

SHARDS = ("s1", "s2")
# No router sweeps during a test. So a job that a waiting call gets was announced.
NEVER_S = 3600.0
# Some routers sweep, for tests of jobs that nothing announces.
OFTEN_S = 0.2


@pytest.fixture(scope="module")
def dsns(postgres: Server) -> dict[str, str]:
    return {shard: postgres.create(f"waiting_{shard}") for shard in SHARDS}


@pytest.fixture(scope="module")
def both_routers(
    dsns: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Generator[tuple[Routers, Routers], None, None]:
    """Starts two routers of one cluster that never sweep. Each router has its own port, so that a test can choose a
    router."""
    folder = tmp_path_factory.mktemp("waiting")
    with (
        running_routers(write_cluster(folder / "one.toml", dsns, sweep_seconds=NEVER_S)) as one,
        running_routers(write_cluster(folder / "other.toml", dsns, sweep_seconds=NEVER_S)) as other,
    ):
        yield one, other


@pytest.fixture(scope="module")
def sweeping(
    dsns: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Generator[tuple[Routers, Routers], None, None]:
    """Starts two more routers of the cluster, which sweep often."""
    folder = tmp_path_factory.mktemp("sweeping")
    with (
        running_routers(write_cluster(folder / "one.toml", dsns, sweep_seconds=OFTEN_S)) as one,
        running_routers(write_cluster(folder / "other.toml", dsns, sweep_seconds=OFTEN_S)) as other,
    ):
        yield one, other


def routers_of(request: pytest.FixtureRequest) -> tuple[Routers, Routers]:
    """Returns the routers that sweep if the test has the mark `usefixtures("sweeping")`, and otherwise the routers that
    never sweep."""
    marked = any("sweeping" in mark.args for mark in request.node.iter_markers("usefixtures"))
    name = "sweeping" if marked else "both_routers"
    routers: tuple[Routers, Routers] = request.getfixturevalue(name)
    return routers


@pytest.fixture
async def near(request: pytest.FixtureRequest) -> AsyncGenerator[Client, None]:
    async with client(routers_of(request)[0].address) as opened:
        yield opened


@pytest.fixture
async def far(request: pytest.FixtureRequest) -> AsyncGenerator[Client, None]:
    """Yields a client of the second router."""
    async with client(routers_of(request)[1].address) as opened:
        yield opened


@pytest.fixture(params=["the same router", "another router"])
def producer(request: pytest.FixtureRequest, near: Client, far: Client) -> Client:
    """Returns the client through which a test enqueues jobs, while a consumer waits at `near`."""
    return near if request.param == "the same router" else far


@pytest.fixture
async def org(near: Client) -> str:
    return await near.org_on("s1")


@contextlib.asynccontextmanager
async def waiter(
    near: Client, org: str, *queues: str, max_jobs: int = 10, wait_s: float = 60
) -> AsyncGenerator[asyncio.Task[list[job_pb2.LeasedJob]], None]:
    """Makes a Dequeue call that waits. When the `with` block begins, the call has most likely looked for jobs and found
    none."""
    task = asyncio.create_task(near.dequeue(org, *queues, max_jobs=max_jobs, wait_s=wait_s))
    # A router runs statements in turn. So after two more calls, the first claim of the waiting call has run.
    await asyncio.sleep(0)
    for _ in range(2):
        await near.dequeue(org, "nothing")
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait({task})


async def jobs_of(task: asyncio.Task[list[job_pb2.LeasedJob]]) -> list[job_pb2.LeasedJob]:
    async with asyncio.timeout(PATIENCE_S):
        return await task


@contextlib.asynccontextmanager
async def awaiting(
    near: Client, org: str, job: str, *, wait_s: float = 60
) -> AsyncGenerator[asyncio.Task[job_pb2.Job]]:
    """Makes a WaitJob call. Yields its task."""

    async def wait() -> job_pb2.Job:
        request = queue_pb2.WaitJobRequest(org=org, id=job, wait=window(wait_s), include_payload=True)
        return (await near.queue.WaitJob(request, timeout=wait_s + PATIENCE_S)).job

    task = asyncio.create_task(wait())
    # As in `waiter`, the test looks at the job itself, after the waiting call has looked at it.
    await asyncio.sleep(0)
    for _ in range(2):
        await near.queue.GetJobs(queue_pb2.GetJobsRequest(org=org, ids=[job]))
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait({task})


# ── WaitJob ──────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_wait_for_a_jobs_end_returns_its_result(near: Client, producer: Client, org: str) -> None:
    job = new_job()
    await near.enqueue(org, job)
    async with awaiting(near, org, job.id) as task:
        (leased,) = await producer.dequeue(org, QUEUE)
        # The job runs again, so the wait continues.
        await producer.queue.Nack(
            queue_pb2.NackRequest(org=org, nacks=[queue_pb2.Nack(lease=leased.lease, retry_after=window(0))])
        )
        (leased,) = await producer.dequeue(org, QUEUE, wait_s=60)
        ack = queue_pb2.Ack(lease=leased.lease, result=b"42")
        await producer.queue.Ack(queue_pb2.AckRequest(org=org, acks=[ack]))
        async with asyncio.timeout(PATIENCE_S):
            ended = await task
        assert (ended.id, ended.state, ended.result) == (job.id, job_pb2.JOB_STATE_SUCCEEDED, b"42")
    # A call for a job that has already ended returns the result too.
    async with awaiting(near, org, job.id) as task, asyncio.timeout(PATIENCE_S):
        assert (await task).result == b"42"


async def test_a_wait_for_a_jobs_end_sees_every_way_to_end(near: Client, producer: Client, org: str) -> None:
    jobs = [new_job() for _ in range(3)]
    await near.enqueue(org, *jobs)
    async with contextlib.AsyncExitStack() as stack:
        tasks = [await stack.enter_async_context(awaiting(near, org, job.id)) for job in jobs]
        await producer.queue.CancelJobs(queue_pb2.CancelJobsRequest(org=org, ids=[jobs[0].id]))
        (leased,) = await producer.dequeue(org, QUEUE, max_jobs=1)
        nack = queue_pb2.Nack(lease=leased.lease, failure=job_pb2.Failure(permanent=True))
        await producer.queue.Nack(queue_pb2.NackRequest(org=org, nacks=[nack]))
        # Nothing announces the end of this job. The router finds the end when it looks at the job again.
        await producer.admin.PurgeQueue(admin_pb2.PurgeQueueRequest(org=org, queue=QUEUE))
        async with asyncio.timeout(PATIENCE_S):
            reasons = {(await task).id: (await task).reason for task in tasks}
    assert reasons.pop(leased.id) == "failed permanently"
    assert sorted(reasons.values()) == ["cancelled", "purged"]


async def test_a_wait_for_an_end_that_does_not_come_returns_the_job_as_it_is(near: Client, org: str) -> None:
    job = new_job()
    await near.enqueue(org, job)
    async with awaiting(near, org, job.id, wait_s=0.1) as task:
        assert (await task).state == job_pb2.JOB_STATE_READY
    answer = await near.queue.WaitJob(queue_pb2.WaitJobRequest(org=org, id=job_id(), wait=window(60)))
    assert not answer.HasField("job")


async def test_a_settle_at_another_router_ends_a_wait_that_does_not_look_again(module_dsn: str) -> None:
    org, heard = OrgId("ends"), asyncio.Event()
    async with contextlib.AsyncExitStack() as stack:

        async def router() -> tuple[Store, EndWaits]:
            database = Database(SHARD, module_dsn, connections=1)
            await database.open()
            stack.push_async_callback(database.close)
            store = Store(database)

            def awaited(jobs: Collection[str]) -> None:
                ends.awaited_elsewhere(jobs)
                heard.set()

            bell = Doorbell(
                database,
                module_dsn,
                on_ring=lambda _: None,
                on_arrival=lambda _: None,
                on_awaited=awaited,
                on_ended=lambda jobs: ends.ended(jobs),
            )
            # Do not start `ends.run`. Otherwise it would look at the job without a notification.
            ends = EndWaits(store, bell)
            ringing = asyncio.create_task(bell.run())
            stack.push_async_callback(asyncio.wait, [ringing])
            stack.callback(ringing.cancel)
            return store, ends

        (_, near), (store, _) = await router(), await router()
        await store.enqueue(some_jobs(org, 1))
        ((job, lease),) = await lease_jobs(store, org)
        async with asyncio.timeout(PATIENCE_S):
            # Repeat this until the other router listens, because a listener does not get earlier notifications.
            while True:
                waiting = asyncio.create_task(near.until_ended(org, job.id))
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(heard.wait(), 0.1)
                    break
                waiting.cancel()
            await store.settle(Settlement.ack(org, [lease]))
            await waiting


async def test_many_waits_for_one_jobs_end_look_at_it_together(fresh_dsn: str) -> None:
    org, database = OrgId("ends"), Recorder(SHARD, fresh_dsn, connections=1)
    await database.open()
    store = Store(database)
    await store.enqueue(some_jobs(org, 2))
    leased = await lease_jobs(store, org)
    ends = EndWaits(store, Doorbell(database, fresh_dsn, on_ring=lambda _: None, on_arrival=lambda _: None))
    waits = [asyncio.create_task(ends.until_ended(org, leased[n % 2][0].id)) for n in range(500)]
    await asyncio.sleep(0)
    looking = asyncio.create_task(ends.run())
    try:
        async with asyncio.timeout(PATIENCE_S):
            # Ack with another store, as another router does. So this router gets no notice of the ack.
            await Store(database).settle(Settlement.ack(org, [leased[0][1]]))
            await asyncio.gather(*waits[::2])
        assert not any(wait.done() for wait in waits[1::2])
        looks = [
            str(parameters["ids"]).split(",")
            for statement, parameters in database.runs
            if statement == statements.FIND_ENDED
        ]
        assert looks
        assert all(len(set(ids)) == len(ids) for ids in looks)
    finally:
        looking.cancel()
        for wait in waits:
            wait.cancel()
        await asyncio.wait([looking, *waits])
        await database.close()


async def test_many_calls_wait_for_one_job_and_all_get_its_end(near: Client, producer: Client, org: str) -> None:
    job = new_job()
    await near.enqueue(org, job)
    (leased,) = await producer.dequeue(org, QUEUE)
    request = queue_pb2.WaitJobRequest(org=org, id=job.id, wait=window(60), include_payload=True)
    calls = [asyncio.create_task(_ended(near, request)) for _ in range(200)]
    async with awaiting(near, org, job.id) as task, asyncio.timeout(PATIENCE_S):
        # Callers that leave must not prevent the answers to the other callers.
        for call in calls[:100]:
            call.cancel()
        await producer.queue.Ack(queue_pb2.AckRequest(org=org, acks=[queue_pb2.Ack(lease=leased.lease, result=b"42")]))
        for call in (task, *calls[100:]):
            ended = await call
            assert (ended.state, ended.result) == (job_pb2.JOB_STATE_SUCCEEDED, b"42")


async def _ended(near: Client, request: queue_pb2.WaitJobRequest) -> job_pb2.Job:
    return (await near.queue.WaitJob(request, timeout=60 + PATIENCE_S)).job


async def test_a_wait_for_a_jobs_end_ends_while_its_shard_is_away(postgres: Server, fresh_dsn: str) -> None:
    org = OrgId("ends")
    database = Database(SHARD, fresh_dsn, connections=1)
    await database.open()
    store = Store(database)
    await store.enqueue(some_jobs(org, 1))
    ((job, _),) = await lease_jobs(store, org)
    ends = EndWaits(store, Doorbell(database, fresh_dsn, on_ring=lambda _: None, on_arrival=lambda _: None))
    looking = asyncio.create_task(ends.run())
    try:
        waiting = asyncio.create_task(ends.until_ended(org, job.id))
        away = postgres.away(str(conninfo_to_dict(fresh_dsn)["dbname"]))
        await asyncio.to_thread(away.__enter__)
        try:
            async with asyncio.timeout(PATIENCE_S):
                await waiting
        finally:
            await asyncio.to_thread(away.__exit__, None, None, None)
    finally:
        looking.cancel()
        await asyncio.wait([looking])
        await database.close()


# ── Dequeue(wait) ────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_wait_ends_at_once_where_there_is_a_job(near: Client, org: str) -> None:
    ids = await near.enqueue(org, *(new_job() for _ in range(5)))
    # This test waits for less time than the call may wait. So the answer must come before the end of the call's wait.
    async with asyncio.timeout(PATIENCE_S):
        got = {job.id for job in await near.dequeue(org, max_jobs=3, wait_s=60)}
    assert (len(got), got < set(ids)) == (3, True)


async def test_a_wait_in_vain_ends_empty_when_its_time_is_over(near: Client, org: str) -> None:
    began_s = time.monotonic()
    answer = await near.queue.Dequeue(
        queue_pb2.DequeueRequest(org=org, queues=[QUEUE], wait=window(0.3)), timeout=PATIENCE_S
    )
    # The answer never comes earlier, not even on a busy machine.
    assert time.monotonic() - began_s >= 0.3
    assert (list(answer.jobs), answer.HasField("lease_deadline"), answer.visibility_window.seconds) == ([], False, 30)


@pytest.mark.parametrize("fields", [{}, {"attributes": {"a": "b"}}, {"payload": b"x" * 100_000}])
async def test_a_wait_ends_with_the_first_jobs_that_come(
    near: Client, producer: Client, org: str, fields: dict[str, Any]
) -> None:
    async with waiter(near, org) as waiting:
        job = new_job(**fields)
        await producer.enqueue(org, job, new_job(queue="other"))
        (got,) = await jobs_of(waiting)
    assert (got.id, got.attempt, got.payload) == (job.id, 1, job.template.payload)
    ack = queue_pb2.AckRequest(org=org, acks=acks([got]))
    assert list((await near.queue.Ack(ack)).answers) == [job_pb2.JOB_ANSWER_OK]


async def test_a_wait_for_a_queue_that_does_not_exist_yet_ends_with_its_first_job(
    near: Client, producer: Client, org: str
) -> None:
    for queue in ("new", "newer"):
        async with waiter(near, org, queue) as waiting:
            ids = await producer.enqueue(org, new_job(queue=queue))
            assert [job.id for job in await jobs_of(waiting)] == ids


async def test_a_wait_for_an_org_that_does_not_exist_yet_ends_with_its_first_job(
    near: Client, producer: Client
) -> None:
    org = f"org-{job_id()}"
    async with waiter(near, org) as waiting:
        ids = await producer.enqueue(org)
        assert [job.id for job in await jobs_of(waiting)] == ids


@pytest.mark.usefixtures("sweeping")
async def test_a_wait_for_a_queue_that_was_deleted_and_made_again_ends_with_its_first_job(
    near: Client, producer: Client, org: str
) -> None:
    async with waiter(near, org) as waiting:
        await producer.admin.DeleteQueue(admin_pb2.DeleteQueueRequest(org=org, queue=QUEUE))
        ids = await producer.enqueue(org)
        # The sweep detects that the remembered number is wrong.
        assert [job.id for job in await jobs_of(waiting)] == ids


@pytest.mark.usefixtures("sweeping")
async def test_a_wait_for_an_org_that_was_erased_ends_with_the_first_job_that_it_has_again(
    near: Client, producer: Client, dsns: dict[str, str], org: str
) -> None:
    await producer.enqueue(org)
    await near.dequeue(org)
    async with waiter(near, org) as waiting:
        erased = []
        for shard, dsn in dsns.items():
            database = Database(ShardName(shard), dsn, connections=1)
            await database.open()
            erased.append(await erasure.begin(database, OrgId(org), erasure=str(uuid.uuid4())))
            await database.close()
        assert any(erased)
        ids = await producer.enqueue(org)
        # The waiting consumer gets the jobs of the new queue, as after the deletion of a queue.
        assert [job.id for job in await jobs_of(waiting)] == ids


async def test_a_delayed_job_comes_when_it_is_due(near: Client, producer: Client, org: str) -> None:
    for delay_s in (0.05, 0.4):
        async with waiter(near, org) as waiting:
            await producer.enqueue(org, new_job(delay=window(delay_s)))
            # A job that is due later does not hide this job.
            await producer.enqueue(org, new_job(delay=window(3600)))
            # This job has its own timer. Neither a sweep nor another job's timer finds the job.
            (job,) = await jobs_of(waiting)
        assert job.run_at.ToNanoseconds() - job.enqueued_at.ToNanoseconds() == delay_s * 1e9


async def test_a_job_nacked_with_a_delay_comes_when_it_is_due_again(near: Client, producer: Client, org: str) -> None:
    await near.enqueue(org)
    (held,) = await near.dequeue(org)
    async with waiter(near, org) as waiting:
        nack = queue_pb2.Nack(lease=held.lease, failure=job_pb2.Failure(message="e"), retry_after=window(0.3))
        began_s = time.monotonic()
        await producer.queue.Nack(queue_pb2.NackRequest(org=org, nacks=[nack]), timeout=PATIENCE_S)
        (job,) = await jobs_of(waiting)
    assert (job.id, job.attempt) == (held.id, 2)
    # The job does not come before it is due, and no sweep has found it.
    assert time.monotonic() - began_s >= 0.3


async def test_a_released_job_comes_at_once(near: Client, producer: Client, org: str) -> None:
    await near.enqueue(org)
    (held,) = await near.dequeue(org)
    async with waiter(near, org) as waiting:
        await producer.queue.Release(queue_pb2.ReleaseRequest(org=org, leases=[held.lease]), timeout=PATIENCE_S)
        (job,) = await jobs_of(waiting)
    assert (job.id, job.attempt) == (held.id, 1)


async def test_the_next_job_of_a_group_comes_at_once(near: Client, producer: Client, org: str) -> None:
    """No router sweeps. So only the end of a group's job can announce the next job of the group. `producer` is the
    consumer's router or another router."""
    ids = await near.enqueue(org, *(new_job(group="g") for _ in range(3)))
    assert len(ids) == 3
    (held,) = await near.dequeue(org)
    async with waiter(near, org) as waiting:
        await producer.queue.Ack(queue_pb2.AckRequest(org=org, acks=acks([held])), timeout=PATIENCE_S)
        (held,) = await jobs_of(waiting)
    assert held.group == "g"
    async with waiter(near, org) as waiting:
        cancel = queue_pb2.CancelJobsRequest(org=org, ids=[held.id])
        await producer.queue.CancelJobs(cancel, timeout=PATIENCE_S)
        (held,) = await jobs_of(waiting)
    async with waiter(near, org) as waiting:
        (other,) = await producer.enqueue(org, new_job(group="h"))
        (job,) = await jobs_of(waiting)
        assert job.id == other


async def test_a_scheduled_job_of_a_group_comes_when_it_is_due(near: Client, producer: Client, org: str) -> None:
    async with waiter(near, org) as waiting:
        (due,) = await producer.enqueue(org, new_job(group="g", delay=window(0.3)))
        (job,) = await jobs_of(waiting)
    assert job.id == due


@pytest.mark.usefixtures("sweeping")
async def test_a_job_whose_lease_expires_comes_within_a_sweep(near: Client, producer: Client, org: str) -> None:
    await near.enqueue(org)
    (held,) = await producer.dequeue(org, window_s=0.5)
    async with waiter(near, org) as waiting:
        (job,) = await jobs_of(waiting)
    assert (job.id, job.attempt) == (held.id, 2)


async def test_a_new_job_beside_one_that_has_finished_comes_at_once(near: Client, org: str) -> None:
    known = new_job()
    await near.enqueue(org, known)
    ack = queue_pb2.AckRequest(org=org, acks=acks(await near.dequeue(org)))
    await near.queue.Ack(ack, timeout=PATIENCE_S)
    async with near.stream(org, credit=100) as stream:
        for turn in range(5):
            # The insert is refused as a whole. The new job is then stored without a hand-over.
            fresh = new_job()
            assert await near.enqueue(org, known, fresh) == [known.id, fresh.id]
            assert (await stream.until_jobs(turn + 1))[-1].id == fresh.id


# ── What an operator does ────────────────────────────────────────────────────────────────────────────────────────────
# Each test has its own org, so that the other router does not know the org's queue.


async def a_dead_job(near: Client, org: str) -> str:
    await near.enqueue(org)
    (held,) = await near.dequeue(org)
    kill = queue_pb2.Nack(lease=held.lease, failure=job_pb2.Failure(permanent=True))
    await near.queue.Nack(queue_pb2.NackRequest(org=org, nacks=[kill]), timeout=PATIENCE_S)
    return held.id


async def test_a_redriven_queue_wakes_consumers(near: Client, producer: Client, org: str) -> None:
    dead = await a_dead_job(near, org)
    async with waiter(near, org) as waiting:
        await producer.admin.RedriveQueue(admin_pb2.RedriveQueueRequest(org=org, queue=QUEUE), timeout=PATIENCE_S)
        assert [job.id for job in await jobs_of(waiting)] == [dead]


async def test_a_redriven_job_wakes_consumers(near: Client, producer: Client, org: str) -> None:
    dead = await a_dead_job(near, org)
    async with waiter(near, org) as waiting:
        await producer.queue.RedriveJobs(queue_pb2.RedriveJobsRequest(org=org, ids=[dead]), timeout=PATIENCE_S)
        assert [job.id for job in await jobs_of(waiting)] == [dead]


async def test_a_restored_job_wakes_consumers(near: Client, producer: Client, org: str) -> None:
    jobs = [admin_pb2.RestoreJob(id=await a_dead_job(near, org))]
    async with waiter(near, org) as waiting:
        restored = await producer.admin.RestoreJobs(
            admin_pb2.RestoreJobsRequest(org=org, jobs=jobs), timeout=PATIENCE_S
        )
        assert [job.id for job in await jobs_of(waiting)] == [one.restored.id for one in restored.results]


async def test_a_resumed_queue_wakes_consumers(near: Client, producer: Client, org: str) -> None:
    await near.admin.PauseQueue(admin_pb2.PauseQueueRequest(org=org, queue=QUEUE), timeout=PATIENCE_S)
    ids = await near.enqueue(org)
    async with waiter(near, org) as waiting:
        await producer.admin.ResumeQueue(admin_pb2.ResumeQueueRequest(org=org, queue=QUEUE), timeout=PATIENCE_S)
        assert [job.id for job in await jobs_of(waiting)] == ids


async def test_a_job_that_is_altered_to_run_now_wakes_consumers(near: Client, producer: Client, org: str) -> None:
    ids = await near.enqueue(org, new_job(delay=Duration(seconds=3600)))
    async with waiter(near, org) as waiting:
        request = queue_pb2.AlterJobsRequest(org=org, ids=ids, delay=Duration())
        answered = await producer.queue.AlterJobs(request, timeout=PATIENCE_S)
        assert list(answered.answers) == [job_pb2.JOB_ANSWER_OK]
        assert [job.id for job in await jobs_of(waiting)] == ids


async def test_a_wait_that_is_cancelled_while_it_is_handed_a_job_gives_it_back(
    near: Client, dsns: dict[str, str], org: str
) -> None:
    # After these calls the router knows the queue.
    await near.enqueue(org)
    await near.dequeue(org)
    async with contextlib.AsyncExitStack() as stack:
        for dsn in dsns.values():
            locker = await stack.enter_async_context(await psycopg.AsyncConnection.connect(dsn))
            await locker.execute("LOCK TABLE windrow.tally IN ACCESS EXCLUSIVE MODE")
        waiting = asyncio.create_task(near.dequeue(org, wait_s=50, window_s=3600))
        enqueuing = asyncio.create_task(near.enqueue(org))
        await until(lambda: waits_for_tally(dsns), "the job is being stored", within_s=PATIENCE_S)
        waiting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await waiting
        # This call is on the same connection, so it arrives after the cancel.
        await near.cluster.ListShards(cluster_pb2.ListShardsRequest(), timeout=PATIENCE_S)
    ids = await enqueuing
    async with waiter(near, org) as again:
        (job,) = await jobs_of(again)
    assert ([job.id], job.attempt) == (ids, 1)


async def waits_for_tally(dsns: dict[str, str]) -> bool:
    look = "SELECT pid FROM pg_locks WHERE NOT granted AND relation = 'windrow.tally'::regclass"
    return any(sql(dsns, shard, look) for shard in dsns)


async def test_of_waits_that_are_cancelled_no_job_is_lost(near: Client, org: str) -> None:
    ids: list[str] = []
    got: list[str] = []
    luck = luck_of("cancelled waits")
    for _ in range(80):
        waiting = asyncio.create_task(near.dequeue(org, max_jobs=2, wait_s=10, window_s=2))
        await asyncio.sleep(luck.uniform(0, 0.006))
        enqueuing = asyncio.create_task(near.enqueue(org))
        await asyncio.sleep(luck.uniform(0, 0.006))
        waiting.cancel()
        ids += await enqueuing
        with contextlib.suppress(asyncio.CancelledError):
            got += [job.id for job in await waiting]
    rest = set(ids) - set(got)
    found: set[str] = set()

    async def take() -> bool:
        found.update(job.id for job in await near.dequeue(org, max_jobs=1000))
        return found >= rest

    # The router cannot take back an answer that it has sent before the cancellation arrives. The job in such an answer
    # becomes ready when its window ends.
    await until(take, "what nobody got is to be had", within_s=PATIENCE_S)
    assert found <= set(ids)


@pytest.mark.parametrize("wait", [Duration(seconds=61), Duration(seconds=-1), Duration(nanos=-1)])
async def test_a_wait_beyond_its_bounds_is_refused(near: Client, org: str, wait: Duration) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await near.queue.Dequeue(queue_pb2.DequeueRequest(org=org, queues=[QUEUE], wait=wait), timeout=PATIENCE_S)
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT


# ── Across routers ───────────────────────────────────────────────────────────────────────────────────────────────────


async def test_consumers_of_both_routers_share_what_one_of_them_stores(near: Client, far: Client, org: str) -> None:
    async with near.stream(org, credit=1) as here, far.stream(org, credit=1) as there:
        got = 0
        for _ in range(30):
            await near.enqueue(org, new_job(), new_job())
            got += 2
            # Neither stream has room for both jobs.
            await until(lambda: len(here.jobs) + len(there.jobs) >= got, "both came")  # noqa: B023
            for stream in (here, there):
                fresh = stream.jobs[len(stream.settled) :]
                for job in fresh:
                    await stream.send(request_id=len(stream.jobs), acks=acks([job]), credit=1)
                    await stream.answer(len(stream.jobs))
        assert len(here.jobs) == len(there.jobs) == 30


# ── Hints are never truth (I7) ───────────────────────────────────────────────────────────────────────────────────────

_KILL = """
SELECT pg_terminate_backend(pid) FROM pg_stat_activity
WHERE datname = current_database() AND application_name = 'windrow doorbell'
"""

_LISTENING = """
SELECT pid FROM pg_stat_activity
WHERE datname = current_database() AND application_name = 'windrow doorbell' AND query ~ '^LISTEN'
"""


@pytest.mark.usefixtures("sweeping")
async def test_with_the_doorbell_cut_again_and_again_every_job_comes_within_a_sweep(
    near: Client, far: Client, dsns: dict[str, str], org: str
) -> None:
    over = asyncio.Event()
    killed = 0

    async def cut() -> None:
        nonlocal killed
        async with await psycopg.AsyncConnection.connect(dsns["s1"], autocommit=True) as connection:
            while not over.is_set():
                killed += len(await (await connection.execute(_KILL)).fetchall())
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(over.wait(), 0.05)

    cutting = asyncio.create_task(cut())
    try:
        async with near.stream(org, credit=1000) as stream:
            for turn in range(4):
                # The listener connects again, and its new connection is cut too.
                await until(lambda: killed >= 2 * turn + 2, "the doorbells were cut")  # noqa: B023
                ids = await far.enqueue(org, new_job(), new_job(attributes={"a": "b"}))
                got = await stream.until_jobs(2 * turn + 2)
                assert {job.id for job in got[-2:]} == set(ids)
            # A consumer of the same router needs no doorbell.
            await near.enqueue(org)
            await stream.until_jobs(9)
    finally:
        over.set()
        await cutting


async def test_after_a_cut_the_doorbell_is_heard_again(
    near: Client,
    far: Client,
    both_routers: tuple[Routers, Routers],
    sweeping: tuple[Routers, Routers],
    dsns: dict[str, str],
    org: str,
) -> None:
    async with near.stream(org, credit=1000) as stream:
        await far.enqueue(org)
        await stream.until_jobs(1)
        # The previous test has cut the doorbells of all routers, including the routers that sweep often.
        routers = len(both_routers) + len(sweeping)
        await until(lambda: len(sql(dsns, "s1", _LISTENING)) == routers, "all routers listen")
        cut = {pid for (pid,) in sql(dsns, "s1", _LISTENING)}
        await until(lambda: sql(dsns, "s1", _KILL), "the doorbells were cut")
        await until(
            lambda: len({pid for (pid,) in sql(dsns, "s1", _LISTENING)} - cut) == routers, "all routers listen again"
        )
        for turn in range(3):
            await far.enqueue(org)
            await stream.until_jobs(2 + turn)


async def test_the_doorbell_goes_over_with_its_shard_when_a_server_says_nothing_any_more(module_dsn: str) -> None:
    heard: asyncio.Queue[Collection[QueueId] | None] = asyncio.Queue()
    async with (
        open_proxy_before(module_dsn) as old,
        open_proxy_before(module_dsn) as new,
        contextlib.AsyncExitStack() as stack,
    ):
        dsn = make_conninfo(through(module_dsn, old), host="127.0.0.1,127.0.0.1", port=f"{old.port},{new.port}")
        database, other = Database(SHARD, dsn, connections=1), Database(SHARD, module_dsn, connections=1)
        for one in (database, other):
            await one.open()
            stack.push_async_callback(one.close)
        bell = Doorbell(database, dsn, on_ring=heard.put_nowait, on_arrival=heard.put_nowait)
        ringing = asyncio.create_task(bell.run())
        stack.callback(ringing.cancel)
        assert await asyncio.wait_for(heard.get(), PATIENCE_S) is None
        assert await database.run(b"SELECT 1", {}) == [(1,)]
        old.hold()
        # This call may be refused because its server was silent, or it may end on the other server. In both cases the
        # router has noticed the silence.
        with contextlib.suppress(ShardUnavailable):
            await database.run(b"SELECT 1", {})
        assert await asyncio.wait_for(heard.get(), PATIENCE_S) is None, "what was said meanwhile may have been missed"
        await other.run(statements.NOTIFY_WORK, {"messages": arrays.texts(["another 7"])})
        assert await asyncio.wait_for(heard.get(), PATIENCE_S) == [7]


async def test_the_more_ask_for_a_ring_at_once_the_longer_the_next_one_waits(module_dsn: str) -> None:
    heard: asyncio.Queue[Collection[QueueId] | None] = asyncio.Queue()
    async with contextlib.AsyncExitStack() as stack:
        bells: list[Doorbell] = []
        for hear in (lambda _: None, heard.put_nowait):
            database = Database(SHARD, module_dsn, connections=1)
            await database.open()
            stack.push_async_callback(database.close)
            bells.append(Doorbell(database, module_dsn, on_ring=hear, on_arrival=hear))
            ringing = asyncio.create_task(bells[-1].run())
            stack.callback(ringing.cancel)
        assert await asyncio.wait_for(heard.get(), PATIENCE_S) is None

        async def rung(times: int) -> float:
            """Returns how long twenty rings of the doorbell take if this many consumers wait for each ring."""
            began_s = time.monotonic()
            for number in range(1, 21):
                for _ in range(times):
                    bells[0].ring([QueueId(number)])
                assert await asyncio.wait_for(heard.get(), PATIENCE_S) == [number]
            return time.monotonic() - began_s

        assert await rung(100) >= 19 * 0.035
        assert await rung(2) >= 19 * 0.018


async def test_a_doorbell_that_finishes_has_rung_although_the_last_ring_was_a_moment_ago(module_dsn: str) -> None:
    heard: asyncio.Queue[Collection[QueueId] | None] = asyncio.Queue()
    async with contextlib.AsyncExitStack() as stack:
        bells: list[Doorbell] = []
        ringing: list[asyncio.Task[None]] = []
        for hear in (lambda _: None, heard.put_nowait):
            database = Database(SHARD, module_dsn, connections=1)
            await database.open()
            stack.push_async_callback(database.close)
            bells.append(Doorbell(database, module_dsn, on_ring=hear, on_arrival=hear))
            ringing.append(asyncio.create_task(bells[-1].run()))
            stack.callback(ringing[-1].cancel)
        assert await asyncio.wait_for(heard.get(), PATIENCE_S) is None
        bells[0].ring([QueueId(1)])
        assert await asyncio.wait_for(heard.get(), PATIENCE_S) == [1]
        # Now the doorbell pauses.
        bells[0].ring([QueueId(2)])
        await bells[0].finish()
        ringing[0].cancel()
        assert await asyncio.wait_for(heard.get(), PATIENCE_S) == [2]


async def test_a_ring_that_no_router_made_harms_nobody(
    near: Client, far: Client, dsns: dict[str, str], org: str
) -> None:
    async with near.stream(org, credit=1000) as stream:
        for message in ("", "x", "x y", "x 1,", "x 1,2,3", "x *", "x 99999999999999999999999", " ", "x -1", "ü ü"):
            sql(dsns, "s1", "SELECT pg_notify('windrow_work', %s)", message)
        await far.enqueue(org)
        await stream.until_jobs(1)


# ── What waiting costs ───────────────────────────────────────────────────────────────────────────────────────────────


def commits(dsns: dict[str, str], shard: str) -> int:
    ((count,),) = sql(
        dsns,
        shard,
        "SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = current_database()",
    )
    return int(count)


async def statements_a_second(dsns: dict[str, str], *, seconds: float = 4.0) -> float:
    """Returns how many statements per second all routers together run on s1. An active server process reports its
    statistics up to a second late."""
    before, began_s = commits(dsns, "s1"), time.monotonic()
    await asyncio.sleep(seconds)
    return (commits(dsns, "s1") - before) / (time.monotonic() - began_s)


async def until_statements_a_second(dsns: dict[str, str], *, below: float, seconds: float = 2.0) -> None:
    """Waits until the routers run fewer than `below` statements per second. An idle server process reports its
    statistics up to ten seconds late, so the first values may be old."""
    rates: list[float] = []
    for _ in range(8):
        rates.append(await statements_a_second(dsns, seconds=seconds))
        if rates[-1] < below:
            return
    raise AssertionError(f"{rates} statements a second, and not below {below}")


@pytest.mark.parametrize("exist", [True, False], ids=["queues that exist", "queues that nobody has made"])
async def test_two_hundred_consumers_who_wait_cost_next_to_nothing(
    near: Client, dsns: dict[str, str], org: str, exist: bool
) -> None:
    queues = [f"idle-{number}" for number in range(100)]
    if exist:
        await near.enqueue(org, *(new_job(queue=queue, delay=Duration(seconds=3600)) for queue in queues))
    async with contextlib.AsyncExitStack() as stack:
        streams = [
            await stack.enter_async_context(near.stream(org, queue, credit=10)) for queue in queues for _ in range(2)
        ]
        await until_statements_a_second(dsns, below=60)
        await near.enqueue(org, *(new_job(queue=queue) for queue in queues))
        await until(lambda: sum(len(stream.jobs) for stream in streams) == 100, "every queue is served")


async def test_four_hundred_scalers_of_queues_without_work_cost_next_to_nothing(
    near: Client, dsns: dict[str, str], org: str
) -> None:
    scaler: keda_grpc.ExternalScalerAsyncStub = keda_grpc.ExternalScalerStub(near.channel)
    streams: list[Any] = []
    try:
        for number in range(400):
            metadata = {"org": org, "queue": f"idle-{number}", "jobsPerWorker": "1"}
            streams.append(scaler.StreamIsActive(keda.ScaledObjectRef(scalerMetadata=metadata), timeout=PATIENCE_S))
        assert not any(answer.result for answer in await asyncio.gather(*(stream.read() for stream in streams)))
        # If each stream looked every 5 s by itself, there would be 80 statements a second.
        await until_statements_a_second(dsns, below=60, seconds=6)
        await near.enqueue(org, new_job(queue="idle-7"))
        assert (await streams[7].read()).result
    finally:
        for stream in streams:
            stream.cancel()


async def test_a_consumer_of_a_paused_queue_with_a_backlog_costs_next_to_nothing(
    near: Client, dsns: dict[str, str], org: str
) -> None:
    await near.enqueue(org, *(new_job() for _ in range(10)))
    await near.admin.PauseQueue(admin_pb2.PauseQueueRequest(org=org, queue=QUEUE))
    async with near.stream(org, credit=10) as stream:
        # The routers of other tests here sweep five times a second, and make about 25 of these statements.
        await until_statements_a_second(dsns, below=60)
        assert stream.jobs == []


async def test_rings_for_queues_that_nobody_waits_for_cost_those_who_wait_next_to_nothing(
    near: Client, far: Client, dsns: dict[str, str], org: str
) -> None:
    async with contextlib.AsyncExitStack() as stack:
        # The streams are of many orgs, whose queues do not exist yet.
        for number in range(50):
            await stack.enter_async_context(near.stream(f"{org}-{number}", credit=1))
        enqueues = 0
        over = False

        async def produce() -> None:
            nonlocal enqueues
            while not over:
                await far.enqueue(org, new_job(queue="nobody"))
                enqueues += 1
                await asyncio.sleep(0.02)

        producing = asyncio.create_task(produce())
        seen: list[tuple[float, int]] = []
        # At first the statistics may still include the statements with which the streams began.
        for _ in range(8):
            before, began_s = enqueues, time.monotonic()
            rate = await statements_a_second(dsns, seconds=2)
            seen.append((rate, round((enqueues - before) / (time.monotonic() - began_s))))
            # The bound allows for each enqueue and its ring, and for periodic work.
            if rate < 3 * seen[-1][1] + 60:
                break
        else:
            raise AssertionError(f"statements and enqueues a second: {seen}")
        over = True
        await producing


# ── No lost wake-up ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.thorough
@pytest.mark.timeout(600)
@pytest.mark.parametrize("how", ["streams", "waits"])
async def test_single_jobs_that_race_with_consumers_who_come_and_go_are_all_delivered(
    near: Client, far: Client, org: str, how: str
) -> None:
    luck = luck_of(how)
    over = asyncio.Event()
    count = trials(400, thorough=20_000)
    delivered: set[str] = set()

    def note(jobs: list[job_pb2.LeasedJob]) -> None:
        delivered.update(job.id for job in jobs)

    async def by_stream(which: Client) -> None:
        async with which.stream(org, credit=luck.randint(1, 3)) as stream:
            seen = 0
            for _ in range(luck.randint(1, 20)):
                await stream.until(lambda: len(stream.jobs) > seen or over.is_set(), "a job", within_s=60)  # noqa: B023
                fresh, seen = stream.jobs[seen:], len(stream.jobs)
                note(fresh)
                await stream.send(request_id=seen, acks=acks(fresh), credit=len(fresh))
            await stream.half_close()
            note(stream.jobs)
            late = stream.jobs[seen:]
            if late:
                await which.queue.Ack(queue_pb2.AckRequest(org=org, acks=acks(late)), timeout=PATIENCE_S)

    async def by_wait(which: Client) -> None:
        jobs = await which.dequeue(org, max_jobs=luck.randint(1, 3), wait_s=luck.choice([0.01, 0.05, 0.2]))
        note(jobs)
        if jobs:
            await which.queue.Ack(queue_pb2.AckRequest(org=org, acks=acks(jobs)), timeout=PATIENCE_S)

    async def consume(which: Client, act: Callable[[Client], Awaitable[None]]) -> None:
        while not over.is_set():
            await act(which)

    async def produce(which: Client) -> None:
        for number in range(count // 2):
            job = new_job(attributes={"a": "b"}) if number % 3 == 0 else new_job()
            await which.enqueue(org, job)
            if luck.random() < 0.1:
                await asyncio.sleep(luck.uniform(0, 0.02))

    act = by_stream if how == "streams" else by_wait
    async with asyncio.timeout(540):
        consuming = [asyncio.create_task(consume(which, act)) for which in (near, far) for _ in range(4)]
        try:
            await asyncio.gather(produce(near), produce(far))
            # No router sweeps. So a job whose wake-up was lost would never come.
            with contextlib.suppress(AssertionError):
                await until(lambda: len(delivered) >= count, "every job is delivered", within_s=20)
        finally:
            over.set()
            for one in consuming:
                one.cancel()
            outcomes = await asyncio.gather(*consuming, return_exceptions=True)
    assert [one for one in outcomes if isinstance(one, Exception)] == []
    # On a busy machine a few jobs commit more than a second late, below the floors. Only a sweep finds these jobs (I7).
    lost = count - len(delivered)
    assert lost <= count // 500, f"{lost} of {count} jobs would wait for a sweep"


class _Nothing:
    """A store and a doorbell that the code under test gets but never uses."""

    names: Any = None
    consumers_seen: Any = SimpleNamespace(note=lambda *_: None)
    quarantine: Any = SimpleNamespace(kinds=lambda *_: frozenset())

    def ring(self, _: object, *, lease_ended: bool = False) -> None: ...

    def release_soon(self, *_: object) -> None: ...


@pytest.fixture
def room() -> WaitRoom:
    nothing = _Nothing()
    nothing.names = type("Names", (), {"known": lambda *_: []})()
    store = cast("Store", nothing)
    return WaitRoom(store, cast("Doorbell", nothing), *no_pools(store), sweep_s=NEVER_S)


async def offer(room: WaitRoom, jobs: NewJobs) -> Handover | None:
    siblings = Siblings(Buffer(2**20), consumers=lambda _: None, ready=list)
    store = cast("Store", _Nothing())
    starts = Starts(lambda _: store, lambda: None)
    return await Handovers(store, room, no_pools(store)[0], siblings, starts).offer(jobs)


def stored(room: WaitRoom, jobs: NewJobs) -> None:
    room.stored(jobs, (), None)


def test_a_consumer_that_leaves_passes_on_what_it_was_woken_for(room: WaitRoom) -> None:
    first, second = WaitingConsumer(OrgId("o"), "mail", "other"), WaitingConsumer(OrgId("o"), "mail")
    room.enter(first)
    room.enter(second)
    stored(room, some_jobs(OrgId("o"), 1))
    assert (first.woken, second.woken) == (1, 0)
    room.leave(first)
    assert second.woken == 1


def test_a_consumer_that_leaves_and_was_not_woken_wakes_nobody(room: WaitRoom) -> None:
    first, second = WaitingConsumer(OrgId("o"), "mail"), WaitingConsumer(OrgId("o"), "mail")
    room.enter(first)
    room.enter(second)
    room.leave(first)
    assert second.woken == 0


async def test_a_consumer_that_is_full_is_woken_and_not_counted_on(room: WaitRoom) -> None:
    full, empty = WaitingConsumer(OrgId("o"), "mail", credit=1000), WaitingConsumer(OrgId("o"), "mail")
    full.full = True
    room.enter(full)
    room.enter(empty)
    stored(room, some_jobs(OrgId("o"), 1))
    assert empty.woken == 1
    handover = await offer(room, some_jobs(OrgId("o"), 1))
    assert handover is None or len(handover.takers) == 1


class _Seen(WaitingConsumer):
    """Also counts how often its credit was looked at."""

    looks = 0

    @property
    def credit(self) -> int:
        self.looks += 1
        return self._credit

    @credit.setter
    def credit(self, credit: int) -> None:
        self._credit = credit


async def test_consumers_without_credit_are_looked_at_once(room: WaitRoom) -> None:
    spent = [_Seen(OrgId("o"), "mail", credit=0) for _ in range(100)]
    for one in spent:
        room.enter(one)
    able = _Seen(OrgId("o"), "mail", credit=10)
    room.enter(able)
    stored(room, some_jobs(OrgId("o"), 1))
    assert {one.looks for one in spent} == {1}
    for _ in range(10):
        stored(room, some_jobs(OrgId("o"), 1))
        assert await offer(room, some_jobs(OrgId("o"), 1)) is not None
    assert (able.woken, {one.looks for one in spent}) == (11, {1})


def test_a_consumer_that_missed_its_turn_for_lack_of_credit_is_next_when_it_has_some(room: WaitRoom) -> None:
    missed, *others = (WaitingConsumer(OrgId("o"), "mail") for _ in range(4))
    for one in (missed, *others):
        room.enter(one)
    missed.credit = 0
    stored(room, some_jobs(OrgId("o"), 1))
    assert [one.woken for one in (missed, *others)] == [0, 1, 0, 0]
    missed.credit = 1
    room.has_credit(missed)
    for _ in range(4):
        stored(room, some_jobs(OrgId("o"), 1))
    # The consumer that was served before comes last.
    assert [one.woken for one in (missed, *others)] == [1, 2, 1, 1]


async def test_jobs_are_offered_to_those_with_credit_by_turns(room: WaitRoom) -> None:
    waiters = [WaitingConsumer(OrgId("o"), "mail", credit=credit) for credit in (1, 100, 0, 2)]
    for one in waiters:
        room.enter(one)
    handover = await offer(room, some_jobs(OrgId("o"), 30))
    assert handover is not None
    # Each consumer gets as many jobs as it has room for, but at most an even share. A consumer without room gets none.
    dealt = Counter(taker.number for taker in handover.takers.values())
    assert sorted(dealt.values()) == [1, 2, 15]
    assert [one.credit for one in waiters] == [0, 85, 0, 0]
    assert await offer(room, some_jobs(OrgId("another"), 3)) is None


async def test_of_no_jobs_none_is_offered(room: WaitRoom) -> None:
    """An enqueue may have no job to store. For example, a former owner knows all of its jobs, or it repeats an earlier
    enqueue while a limit is reached."""
    one = WaitingConsumer(OrgId("o"), "mail", credit=1)
    room.enter(one)
    assert await offer(room, NewJobs(org=OrgId("o"))) is None
    assert one.credit == 1


async def test_a_call_that_jobs_are_on_their_way_to_is_not_woken_for_others(room: WaitRoom) -> None:
    call = WaitingConsumer(OrgId("o"), "mail", credit=1000, takes_once=True)
    stream = WaitingConsumer(OrgId("o"), "mail", credit=1000)
    room.enter(call)
    handover = await offer(room, some_jobs(OrgId("o"), 3))
    assert handover is not None
    room.enter(stream)
    stored(room, some_jobs(OrgId("o"), 5))
    # The call's answer has no room for the job.
    assert (call.woken, stream.woken) == (0, 1)
    handover.tell(NOTHING_HANDED)
    assert (call.woken, call.credit) == (1, 1000)
    stored(room, some_jobs(OrgId("o"), 5))
    assert call.woken == 2


async def test_a_call_for_whose_jobs_there_is_no_memory_keeps_waiting(room: WaitRoom) -> None:
    call = WaitingConsumer(OrgId("o"), "mail", credit=1000, takes_once=True)
    call.account = cast("Account", SimpleNamespace(take=lambda _: False))
    room.enter(call)
    assert await offer(room, some_jobs(OrgId("o"), 3)) is None
    assert (call.idle, call.promised, call.credit) == (True, False, 1000)


async def test_a_sweep_learns_the_queues_of_all_orgs_by_one_statement(recorder: Recorder, org: str) -> None:
    orgs = [OrgId(f"{org}-{number}") for number in range(20)]
    await asyncio.gather(*(Store(recorder).enqueue(some_jobs(one, 1)) for one in orgs))
    store = Store(recorder)
    room = WaitRoom(store, cast("Doorbell", _Nothing()), *no_pools(store), sweep_s=NEVER_S)
    waiting = [WaitingConsumer(one, QUEUE, "never-made") for one in orgs]
    for one in waiting:
        room.enter(one)
    before = len(recorder.runs)
    await room.sweep()
    assert recorder.count(statements.FIND_QUEUE_IDS, since=before) == 1
    assert [one.woken for one in waiting] == [1] * 20


def test_two_streams_have_nothing_in_common_but_their_room(room: WaitRoom) -> None:
    same, other = WaitingConsumer(OrgId("o"), "mail"), WaitingConsumer(OrgId("p"), "mail")
    room.enter(same)
    room.enter(other)
    stored(room, some_jobs(OrgId("o"), 5))
    assert (same.woken, other.woken) == (1, 0)


@pytest.mark.usefixtures("sweeping")
@pytest.mark.parametrize("how", ["stream", "dequeue"])
async def test_who_waits_follows_an_org_whose_slot_moves(
    near: Client, far: Client, dsns: dict[str, str], how: str
) -> None:
    org = await near.org_on("s1")
    slot = int(slot_of(OrgId(org)))
    async with near.stream(org, credit=9 if how == "stream" else 0) as stream, waiter(near, org, "idle") as waiting:
        ((epoch,),) = sql(dsns, "s1", "SELECT epoch + 1 FROM windrow.catalog")
        for shard, state in (("s1", "draining"), ("s2", "owned")):
            moved = "INSERT INTO windrow.owned_slot VALUES ({0}, '{1}', {2}) ON CONFLICT (slot) DO UPDATE "
            sql(dsns, shard, (moved + "SET state = '{1}', epoch = {2} RETURNING slot").format(slot, state, epoch))
        placed = f"writes = '{{s2}}', reads = '{{s2}}', epoch = {epoch}, changed = {epoch}"
        # Both changes are in one statement. A router that read the catalog between two statements would never learn of
        # the second change.
        sql(
            dsns,
            "s1",
            f"WITH next AS (UPDATE windrow.catalog SET epoch = {epoch}) "
            f"UPDATE windrow.placement SET {placed} WHERE slot = {slot} RETURNING slot",
        )
        ids = await far.enqueue(org, new_job(queue=QUEUE if how == "stream" else "idle"))
        got = await (stream.until_jobs(1) if how == "stream" else jobs_of(waiting))
        assert [job.id for job in got] == ids


async def test_an_offer_that_fails_gives_back_the_credit_and_the_tokens_that_it_took(
    room: WaitRoom, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, org = cast("Store", _Nothing()), OrgId("o")
    store_is_away = False

    def store_of(_: OrgId) -> Store:
        if store_is_away:
            raise ShardUnavailable(ShardName("s"), "gone")
        return store

    def limit(queue: str) -> Limit:
        return Limit(LimitKey(org, QueueName(queue), Measure.STARTS), 10, 1_000_000, version=1)

    starts = Starts(store_of, lambda: None)
    starts.replace(LimitTable([limit("mail"), limit("second")], version=1))
    buckets = [*starts.of(org, QueueName("mail")), *starts.of(org, QueueName("second"))]
    for bucket in buckets:
        bucket.tokens = 10
    waiter = WaitingConsumer(org, "plain", "mail", "second", credit=100)
    room.enter(waiter)
    jobs = some_jobs(org, 9)
    jobs.queues = [QueueName(queue) for queue in ("plain", "mail", "second") for _ in range(3)]
    siblings = Siblings(Buffer(2**20), consumers=lambda _: None, ready=list)
    handovers = Handovers(store, room, no_pools(store)[0], siblings, starts)
    take = starts.take

    def take_or_fail(of: OrgId, queue: QueueName, wanted: int) -> Permit | None:
        nonlocal store_is_away
        store_is_away = queue == "second"
        return take(of, queue, wanted)

    monkeypatch.setattr(starts, "take", take_or_fail)
    with pytest.raises(ShardUnavailable):
        await handovers.offer(jobs)
    assert waiter.credit == 100
    assert [bucket.tokens for bucket in buckets] == [10, 10]
