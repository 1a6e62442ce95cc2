"""Workers log lines, and people read the lines in the job's history. One attempt is ended by a cancellation."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Generator

import grpc
import pytest
import pytest_asyncio

from tests.postgres import Server
from tests.routers import PATIENCE_S, Routers, running_routers, violated_fields, write_cluster
from tests.streams import OK, QUEUE, Client, client, until
from windrow import AttemptOutcome, Job, JobRecord, JobState, Progress, Retry, Worker
from windrow import Client as WindrowClient
from windrow.v1 import queue_pb2


@pytest.fixture(scope="module")
def routers(postgres: Server, tmp_path_factory: pytest.TempPathFactory) -> Generator[Routers, None, None]:
    folder = tmp_path_factory.mktemp("logs")
    with running_routers(write_cluster(folder / "cluster.toml", {"s1": postgres.create("logs")})) as running:
        yield running


@pytest_asyncio.fixture
async def near(routers: Routers) -> AsyncGenerator[Client, None]:
    async with client(routers.address) as opened:
        yield opened


@pytest.mark.parametrize("field", ["acks", "nacks", "extends", "snoozes"])
@pytest.mark.parametrize("log", ["a\0b", "x" * 4_097], ids=["NUL", "too long"])
async def test_a_bad_log_on_a_stream_is_refused_and_nothing_of_its_message_is_done(
    near: Client, field: str, log: str
) -> None:
    org = f"bad-{field}-{len(log)}"
    await near.enqueue(org)
    async with near.stream(org, credit=1) as stream:
        (job,) = await stream.until_jobs(1)
        message = queue_pb2.ConsumeRequest(request_id=1)
        getattr(message, field).add(lease=job.lease, log=log)
        await stream.send(request_id=1, **{field: getattr(message, field)})
        error = await stream.refusal()
    assert (error.code(), violated_fields(error)) == (grpc.StatusCode.INVALID_ARGUMENT, [f"{field}[0].log"])
    stored = await near.job(org, job.id)
    assert (stored.log, len(stored.attempts)) == ("", 0)


async def test_the_longest_log_of_the_worst_characters_is_stored_and_read(near: Client) -> None:
    (job_id,) = await near.enqueue("worst")
    (job,) = await near.dequeue("worst")
    log = "\x01" * 4_090 + "\t\n\r\\\"'"
    request = queue_pb2.ExtendRequest(org="worst", extends=[queue_pb2.Extend(lease=job.lease, log=log)])
    assert list((await near.queue.Extend(request, timeout=PATIENCE_S)).answers) == [OK]
    shown = log.replace("\x01", "\ufffd")
    assert (await near.job("worst", job_id)).log == shown
    ack = queue_pb2.Ack(lease=job.lease, result=b"done")
    await near.queue.Ack(queue_pb2.AckRequest(org="worst", acks=[ack]), timeout=PATIENCE_S)
    stored = await near.job("worst", job_id)
    assert ([one.log for one in stored.attempts], stored.log) == ([shown], "")


async def test_the_log_of_every_attempt_is_read_by_a_client(routers: Routers) -> None:
    async with WindrowClient(routers.address, org="worked") as here:
        worker = Worker(here, QUEUE, name="w1")
        seen = asyncio.Event()

        @worker.handler("greet")
        async def greet(job: Job) -> str:
            job.log(f"attempt {job.attempt}")
            if job.attempt == 1:
                raise Retry("again", after=0)
            job.log("waiting")
            job.report(Progress(done=1))
            await seen.wait()
            job.log("done")
            return "greeted"

        job_id = (await here.enqueue(QUEUE, "greet")).id
        task = asyncio.create_task(worker.run())

        async def record() -> JobRecord:
            return (await here.get_jobs([job_id]))[job_id]

        async def shows_the_attempt_under_way() -> bool:
            return (await record()).log == "attempt 2\nwaiting"

        # The extend that sends the progress report also sends the log lines.
        await until(shows_the_attempt_under_way, "the log of a leased job")
        seen.set()
        ended = await here.wait(job_id, timeout=PATIENCE_S)
        worker.stop()
        await task
        assert [(one.attempt, one.worker, one.outcome, one.log) for one in ended.attempts] == [
            (1, "w1", AttemptOutcome.NACKED, "attempt 1"),
            (2, "w1", AttemptOutcome.ACKED, "attempt 2\nwaiting\ndone"),
        ]
        assert (ended.log, (await record()).attempts) == ("", ended.attempts)
        listed = (await here.list_jobs(state=JobState.SUCCEEDED)).jobs
        assert [one.attempts for one in listed] == [ended.attempts]


async def test_an_attempt_that_was_cancelled_is_in_the_history_with_what_was_told(routers: Routers) -> None:
    async with WindrowClient(routers.address, org="cancelled") as here:
        worker = Worker(here, QUEUE, name="w1")
        lost = asyncio.Event()

        @worker.handler("greet")
        async def greet(job: Job) -> None:
            job.log("begun")
            job.report(Progress(done=1))
            try:
                await job.lost.wait()
            finally:
                job.log("too late")
                lost.set()

        job_id = (await here.enqueue(QUEUE, "greet")).id
        task = asyncio.create_task(worker.run())

        async def told() -> bool:
            return (await here.get_jobs([job_id]))[job_id].log == "begun"

        await until(told, "the log of a leased job")
        await here.cancel_jobs([job_id], reason="no more")
        async with asyncio.timeout(PATIENCE_S):
            await lost.wait()
        worker.stop()
        await task
        record = (await here.get_jobs([job_id]))[job_id]
        (attempt,) = record.attempts
        assert (attempt.attempt, attempt.worker, attempt.outcome, attempt.log) == (
            1,
            "w1",
            AttemptOutcome.CANCELLED,
            "begun",
        )
        assert attempt.leased_at < attempt.ended_at == record.finished_at
