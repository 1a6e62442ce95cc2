"""Routers tell consumers about leases that others have ended, and about streams that will soon end. Consumers report
their progress. Each test uses two routers, and the consumers of one router learn what the other router has done."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import AsyncExitStack
from functools import partial

import grpc
import psycopg
import pytest
import pytest_asyncio

from tests.postgres import Server
from tests.routers import PATIENCE_S, Routers, running_routers, write_cluster
from tests.streams import CANCELLED, OK, QUEUE, STALE, Client, acks, client, new_job, until, window
from windrow import Answer, Job, JobRecord, JobState, NewJob, Progress, Retry, Worker
from windrow import Client as WindrowClient
from windrow.v1 import admin_pb2, job_pb2, queue_pb2

_KIB = 1024


@pytest.fixture(scope="module")
def dsn(postgres: Server) -> str:
    return postgres.create("told")


@pytest.fixture(scope="module")
def routers(dsn: str, tmp_path_factory: pytest.TempPathFactory) -> Generator[list[Routers], None, None]:
    config = write_cluster(tmp_path_factory.mktemp("told") / "cluster.toml", {"s1": dsn})
    with running_routers(config) as one, running_routers(config) as other:
        yield [one, other]


@pytest_asyncio.fixture
async def both(routers: list[Routers]) -> AsyncGenerator[tuple[Client, Client], None]:
    async with AsyncExitStack() as stack:
        one, other = [await stack.enter_async_context(client(running.address)) for running in routers]
        yield one, other


async def _cancel(near: Client, org: str, *ids: str) -> None:
    request = queue_pb2.CancelJobsRequest(org=org, ids=ids)
    assert set((await near.queue.CancelJobs(request, timeout=PATIENCE_S)).answers) == {OK}


async def _extend(near: Client, org: str, *extends: queue_pb2.Extend) -> list[job_pb2.JobAnswer.ValueType]:
    request = queue_pb2.ExtendRequest(org=org, extends=extends)
    return list((await near.queue.Extend(request, timeout=PATIENCE_S)).answers)


@pytest.mark.parametrize("cancelled_at", [0, 1], ids=["its own router", "another router"])
async def test_the_worker_of_a_cancelled_job_is_told(both: tuple[Client, Client], cancelled_at: int) -> None:
    near, org = both[0], f"cancels-{cancelled_at}"
    async with (
        near.stream(org, credit=2, worker="busy") as busy,
        near.stream(org, worker="idle") as idle,
        near.stream(f"{org}-stranger", worker="busy") as stranger,
    ):
        await near.enqueue(org, new_job(), new_job())
        kept, lost = await busy.until_jobs(2)
        await _cancel(both[cancelled_at], org, lost.id)
        await busy.until(lambda: busy.revoked, "a revoked lease")
        assert busy.revoked == {lost.lease: CANCELLED}
        assert await busy.settle(1, acks=acks([kept, lost])) == [OK, CANCELLED]
        # Both streams have got a job since then, so the router would have told them before.
        for other, other_org in ((idle, org), (stranger, f"{org}-stranger")):
            await near.enqueue(other_org)
            await other.send(credit=1)
            await other.until_jobs(1)
            assert other.revoked == {}


async def test_a_worker_hears_of_a_lease_that_came_by_an_earlier_stream(both: tuple[Client, Client]) -> None:
    one, other = both
    async with one.stream("earlier", credit=1, worker="moving") as first:
        await one.enqueue("earlier")
        (job,) = await first.until_jobs(1)
    async with other.stream("earlier", worker="moving") as second:
        # Extend the lease, because the answer shows that the stream has begun.
        assert await second.settle(1, extends=[queue_pb2.Extend(lease=job.lease)]) == []
        await _cancel(one, "earlier", job.id)
        await second.until(lambda: second.revoked, "a revoked lease")
        assert second.revoked == {job.lease: CANCELLED}


async def test_the_worker_of_an_expired_lease_is_told_when_another_one_gets_the_job(
    both: tuple[Client, Client],
) -> None:
    one, other = both
    async with one.stream("expiries", credit=1, worker="slow", window_s=0.2) as slow:
        await one.enqueue("expiries")
        (job,) = await slow.until_jobs(1)
        (again,) = await other.dequeue("expiries", wait_s=PATIENCE_S)
        assert (again.id, again.attempt) == (job.id, 2)
        await slow.until(lambda: slow.revoked, "a revoked lease")
        assert slow.revoked == {job.lease: STALE}


async def test_a_cancel_of_jobs_that_nobody_has_revokes_nothing(both: tuple[Client, Client]) -> None:
    near = both[0]
    async with near.stream("waiting", worker="idle") as stream:
        ids = await near.enqueue("waiting", *[new_job() for _ in range(3)])
        await _cancel(near, "waiting", *ids)
        await near.enqueue("waiting")
        await stream.send(credit=1)
        await stream.until_jobs(1)
        assert stream.revoked == {}


async def test_whatever_is_said_about_the_lease_of_a_cancelled_job_is_answered_cancelled(
    both: tuple[Client, Client],
) -> None:
    near = both[0]
    ids = await near.enqueue("answers", *[new_job() for _ in range(4)])
    jobs = await near.dequeue("answers")
    await _cancel(near, "answers", *ids)
    leases = [job.lease for job in jobs]
    acked = await near.queue.Ack(queue_pb2.AckRequest(org="answers", acks=acks(jobs)), timeout=PATIENCE_S)
    nacks = [queue_pb2.Nack(lease=lease) for lease in leases]
    nacked = await near.queue.Nack(queue_pb2.NackRequest(org="answers", nacks=nacks), timeout=PATIENCE_S)
    released = await near.queue.Release(queue_pb2.ReleaseRequest(org="answers", leases=leases), timeout=PATIENCE_S)
    extended = await _extend(near, "answers", *[queue_pb2.Extend(lease=lease) for lease in leases])
    for answers in (acked.answers, nacked.answers, released.answers, extended):
        assert list(answers) == [CANCELLED] * 4


async def test_progress_and_checkpoint_stay_with_the_job_until_its_next_attempt(both: tuple[Client, Client]) -> None:
    one, other = both
    (job_id,) = await one.enqueue("reports")
    (job,) = await one.dequeue("reports")
    assert job.checkpoint == b""
    progress = job_pb2.Progress(done=3, total=7, note="files\x07 copied")
    assert await _extend(one, "reports", queue_pb2.Extend(lease=job.lease, progress=progress, checkpoint=b"at 3")) == [
        OK
    ]
    # This extend names neither the checkpoint nor the progress. So the job keeps its checkpoint and its progress.
    assert await _extend(one, "reports", queue_pb2.Extend(lease=job.lease)) == [OK]
    stored = await other.job("reports", job_id)
    assert stored.progress == job_pb2.Progress(done=3, total=7, note="files\ufffd copied")
    assert stored.checkpoint == b"", "only with payloads"
    await one.queue.Nack(
        queue_pb2.NackRequest(org="reports", nacks=[queue_pb2.Nack(lease=job.lease, retry_after=window(0))]),
        timeout=PATIENCE_S,
    )
    async with other.stream("reports", credit=1) as stream:
        (again,) = await stream.until_jobs(1)
        assert (again.attempt, again.checkpoint) == (2, b"at 3")
        at_5 = queue_pb2.Extend(lease=again.lease, progress=job_pb2.Progress(done=5), checkpoint=b"x" * 64 * _KIB)
        assert await stream.settle(1, extends=[at_5]) == []
        assert await stream.settle(2, extends=[queue_pb2.Extend(lease=again.lease, checkpoint=b"")]) == []
        assert await stream.settle(3, acks=acks([again])) == []
    request = queue_pb2.GetJobsRequest(org="reports", ids=[job_id], include_payload=True)
    (done,) = (await one.queue.GetJobs(request, timeout=PATIENCE_S)).jobs
    assert (done.state, done.progress, done.checkpoint) == (
        job_pb2.JOB_STATE_SUCCEEDED,
        job_pb2.Progress(done=5),
        b"",
    )


async def test_a_dead_job_keeps_its_checkpoint_through_a_redrive(both: tuple[Client, Client]) -> None:
    near = both[0]
    (job_id,) = await near.enqueue("redriven")
    (job,) = await near.dequeue("redriven")
    await _extend(near, "redriven", queue_pb2.Extend(lease=job.lease, checkpoint=b"half way"))
    dead = queue_pb2.Nack(lease=job.lease, failure=job_pb2.Failure(permanent=True))
    await near.queue.Nack(queue_pb2.NackRequest(org="redriven", nacks=[dead]), timeout=PATIENCE_S)
    await near.admin.RedriveQueue(admin_pb2.RedriveQueueRequest(org="redriven", queue=QUEUE), timeout=PATIENCE_S)
    (again,) = await near.dequeue("redriven", wait_s=PATIENCE_S)
    assert (again.id, again.attempt, again.checkpoint) == (job_id, 1, b"half way")


async def test_a_stale_extend_stores_nothing(both: tuple[Client, Client]) -> None:
    near = both[0]
    (job_id,) = await near.enqueue("stale")
    (job,) = await near.dequeue("stale")
    await near.queue.Release(queue_pb2.ReleaseRequest(org="stale", leases=[job.lease]), timeout=PATIENCE_S)
    late = queue_pb2.Extend(lease=job.lease, progress=job_pb2.Progress(done=1), checkpoint=b"late")
    assert await _extend(near, "stale", late) == [STALE]
    assert not (await near.job("stale", job_id)).HasField("progress")
    (again,) = await near.dequeue("stale", wait_s=PATIENCE_S)
    assert again.checkpoint == b""


def _was_given_back(times: int, record: JobRecord) -> bool:
    """On a slow machine, one job's pause may end while other jobs have not been given back yet. The first job then has
    more attempts than `times`."""
    return len(record.attempts) >= times and record.state is JobState.SCHEDULED


async def test_jobs_that_come_before_their_workers_wait_for_them_and_no_attempt_is_counted(
    routers: list[Routers], dsn: str
) -> None:
    """This happens in a rolling deploy that replaces the producers first: workers of the old release do not know the
    new kind of jobs."""
    # For each job, the pauses after its attempts, keyed by the number of attempts.
    pauses = dict[str, dict[int, float]]()
    async with WindrowClient(routers[0].address, org="deploy") as near:
        jobs = [NewJob(QUEUE, "new", max_attempts=1) for _ in range(20)]
        ids = [job.id for job in jobs]
        await near.enqueue_many(jobs)

        async def work(worker: Worker, holds: Callable[[JobRecord], bool]) -> Sequence[JobRecord]:
            """Runs the worker until `holds` returns true for each job."""
            records: Sequence[JobRecord] = ()

            async def done() -> bool:
                nonlocal records
                records = list((await near.get_jobs(ids)).values())
                return all(map(holds, records))

            task = asyncio.create_task(worker.run())
            await until(done, "every job")
            worker.stop()
            await task
            return records

        for turn in range(1, 5):
            records = await work(Worker(near, QUEUE, name="old"), partial(_was_given_back, turn))
            assert {one.attempt for one in records} == {0}
            for one in records:
                pause_s = (one.run_at - one.attempts[-1].ended_at).total_seconds()
                pauses.setdefault(one.id, {})[len(one.attempts)] = pause_s
            # Make it look as if the pause were over. The pause begins when the job is due.
            async with await psycopg.AsyncConnection.connect(dsn) as connection:
                await connection.execute(
                    """
                    UPDATE windrow.job
                    SET enqueued_at = enqueued_at - (run_at - now()), run_at = now(), visible_at = now()
                    WHERE id = ANY (%s)
                    """,
                    (ids,),
                )
        new = Worker(near, QUEUE, name="new")

        @new.handler("new")
        async def handle(job: Job) -> int:
            return job.attempt

        records = await work(new, lambda one: one.state is JobState.SUCCEEDED)
        assert all(len(one.attempts) >= 5 and {past.attempt for past in one.attempts} == {1} for one in records)
        assert any(1 in of_job for of_job in pauses.values())
        for of_job in pauses.values():
            *before, last = of_job.values()
            assert 2.5 <= of_job.get(1, 5) <= 5
            assert last >= sum(before) / 2


@pytest.mark.parametrize(
    ("extend", "field"),
    [
        (queue_pb2.Extend(checkpoint=b"x" * (64 * _KIB + 1)), "checkpoint"),
        (queue_pb2.Extend(progress=job_pb2.Progress(done=-1)), "progress.done"),
        (queue_pb2.Extend(progress=job_pb2.Progress(note="x" * 1025)), "progress.note"),
    ],
)
async def test_reports_that_are_too_large_are_refused(
    both: tuple[Client, Client], extend: queue_pb2.Extend, field: str
) -> None:
    extend.lease = b"any"
    with pytest.raises(grpc.aio.AioRpcError, match="INVALID_ARGUMENT") as refused:
        await _extend(both[0], "large", extend)
    assert f"extends[0].{field}" in str(refused.value)


async def test_a_claim_ends_with_the_job_whose_checkpoint_fills_the_answer(both: tuple[Client, Client]) -> None:
    near, count = both[0], 64
    await near.enqueue("checkpoints", *[new_job() for _ in range(count)])
    jobs = await near.dequeue("checkpoints")
    large = [queue_pb2.Extend(lease=job.lease, checkpoint=b"x" * 64 * _KIB) for job in jobs]
    assert await _extend(near, "checkpoints", *large) == [OK] * count
    leases = [job.lease for job in jobs]
    await near.queue.Release(queue_pb2.ReleaseRequest(org="checkpoints", leases=leases), timeout=PATIENCE_S)
    taken: list[job_pb2.LeasedJob] = []
    while len(taken) < count:
        some = await near.dequeue("checkpoints", wait_s=PATIENCE_S)
        assert 0 < len(some) < count
        assert all(len(job.checkpoint) == 64 * _KIB for job in some)
        taken += some
    # A look-up of all these jobs stays within one answer, too.
    request = queue_pb2.GetJobsRequest(org="checkpoints", ids=[job.id for job in taken], include_payload=True)
    answer = await near.queue.GetJobs(request, timeout=PATIENCE_S)
    assert 0 < len(answer.jobs) < count
    assert len(answer.jobs) + len(answer.omitted_ids) == count


async def test_a_draining_router_tells_its_consumers_and_takes_what_they_still_have_to_say(
    postgres: Server, tmp_path_factory: pytest.TempPathFactory
) -> None:
    config = write_cluster(tmp_path_factory.mktemp("drain") / "cluster.toml", {"s1": postgres.create("told_drain")})
    with running_routers(config) as running:
        async with client(running.address) as near:
            await near.make_queue("drain")
            async with (
                near.stream("drain", credit=10, worker="orderly") as orderly,
                near.stream("drain", worker="deaf") as deaf,
            ):
                await near.enqueue("drain", new_job(), new_job())
                jobs = await orderly.until_jobs(2)
                running.supervisor.send_signal(signal.SIGTERM)
                await orderly.until(lambda: orderly.draining, "the announcement")
                assert await orderly.settle(1, acks=acks(jobs)) == []
                await orderly.half_close()
                assert orderly.error is None, "it ended in order"
                # The other consumer does not close its side, and the router ends its stream a little later.
                refused = await deaf.refusal()
                assert deaf.draining
                assert refused.code() is grpc.StatusCode.UNAVAILABLE
        await until(lambda: running.supervisor.poll() is not None, "the end of the router")


async def test_a_handler_goes_on_from_the_checkpoint_of_the_attempt_before(routers: list[Routers]) -> None:
    seen: list[bytes] = []
    async with WindrowClient(routers[0].address, org="resumed") as producer:
        worker = Worker(producer, [QUEUE])
        done = asyncio.Event()

        @worker.handler("greet")
        async def greet(job: Job) -> None:
            seen.append(job.checkpoint)
            if job.attempt == 3:
                done.set()
                return
            job.report(Progress(done=job.attempt, total=3), checkpoint=job.checkpoint + b"x")
            raise Retry(after=0)

        enqueued = await producer.enqueue(QUEUE, "greet")
        running = asyncio.create_task(worker.run())
        async with asyncio.timeout(PATIENCE_S):
            await done.wait()
        worker.stop()
        await running
        record = (await producer.get_jobs([enqueued.id], include_payload=True))[enqueued.id]
    assert seen == [b"", b"x", b"xx"]
    assert (record.state, record.progress, record.checkpoint) == (
        JobState.SUCCEEDED,
        Progress(done=2, total=3),
        b"xx",
    )


async def test_a_cancel_stops_the_handler_at_once(routers: list[Routers]) -> None:
    async with (
        WindrowClient(routers[0].address, org="stopped") as near,
        WindrowClient(routers[1].address, org="stopped") as far,
    ):
        # With this window, the worker would extend the lease, and learn of the cancellation, only after hours.
        worker = Worker(near, [QUEUE], visibility_window=43_200)
        begun, ended = asyncio.Event(), asyncio.Event()

        @worker.handler("greet")
        async def greet(_: Job) -> None:
            begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()

        running = asyncio.create_task(worker.run())
        async with asyncio.timeout(PATIENCE_S):
            enqueued = await far.enqueue(QUEUE, "greet")
            await begun.wait()
            assert await far.cancel_jobs([enqueued.id]) == [Answer.OK]
            await ended.wait()
        worker.stop()
        await running
