"""What routers tell a worker about its leases and its stream, and what handlers report through the worker."""

from __future__ import annotations

import asyncio
import logging
import pickle
from dataclasses import asdict
from typing import Any

import pytest
from grpc import StatusCode

from tests.unit.client_fake import FakeRouter, FakeStream
from tests.unit.test_client_worker import running
from windrow import Client, InvalidRequest, Job, LostReason, Payload, Progress, Retry, Worker
from windrow.handlers import CallNext
from windrow.reports import Report, Reporter
from windrow.v1 import job_pb2, queue_pb2

CANCELLED, STALE = job_pb2.JOB_ANSWER_CANCELLED, job_pb2.JOB_ANSWER_STALE


def answer(lease: bytes, value: job_pb2.JobAnswer.ValueType) -> queue_pb2.LeaseAnswer:
    return queue_pb2.LeaseAnswer(lease=lease, answer=value)


def extends(router: FakeRouter) -> list[queue_pb2.Extend]:
    return [extend for message in router.of("Consume") for extend in message.extends]


async def test_a_revoked_lease_cancels_its_handler_and_frees_its_place(
    router: FakeRouter, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "windrow.worker")
    worker = Worker(client, "q", concurrency=1, prefetch=0)
    lost, after = router.give("wait"), router.give("quick")
    begun = asyncio.Event()

    @worker.handler("wait")
    async def wait(_: Job) -> None:
        begun.set()
        await asyncio.Event().wait()

    @worker.handler("quick")
    async def quick(_: Job) -> None: ...

    async with running(worker):
        await begun.wait()
        await router.stream.tell(revoked=[answer(b"somebody else's", STALE), answer(lost.lease, CANCELLED)])
        await router.until(lambda: router.settled("Ack") == [after.id])
    assert not router.nacks()
    assert not router.settled("Release")
    assert f"job {lost.id} (wait, queue q) was cancelled" in caplog.text
    assert "WARNING" not in caplog.text


@pytest.mark.parametrize(("told", "reason"), [(CANCELLED, LostReason.CANCELLED), (STALE, LostReason.LEASE_ENDED)])
async def test_a_handler_can_tell_why_it_should_stop(
    router: FakeRouter, client: Client, told: job_pb2.JobAnswer.ValueType, reason: LostReason
) -> None:
    worker = Worker(client, "q")
    begun, seen = asyncio.Event(), list[LostReason | None]()

    @worker.handler("wait")
    async def wait(job: Job) -> None:
        seen.append(job.lost.reason)
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            seen.append(job.lost.reason)

    lost = router.give("wait")
    async with running(worker):
        await begun.wait()
        await router.stream.tell(revoked=[answer(lost.lease, told)])
        await router.until(lambda: len(seen) == 2)
    assert seen == [None, reason]


async def test_middleware_that_goes_on_after_a_thread_is_cancelled(router: FakeRouter, client: Client) -> None:
    ended = asyncio.Event()

    async def slow(job: Job, call_next: CallNext) -> Payload:
        await call_next(job)
        ended.set()
        await asyncio.Event().wait()
        return None

    worker = Worker(client, "q", concurrency=1, prefetch=0, middleware=[slow])

    @worker.handler("thread")
    def thread(_: Job) -> None: ...

    job = router.give("thread")
    async with running(worker):
        await ended.wait()
        await router.stream.tell(revoked=[answer(job.lease, CANCELLED)])
        # The place of the job is free again.
        await router.until(lambda: sum(message.credit for message in router.stream.messages) == 2)


async def test_a_job_that_is_revoked_before_it_begins_never_begins(
    router: FakeRouter, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    worker = Worker(client, "q", concurrency=1, prefetch=1)
    begun: list[str] = []
    go = asyncio.Event()

    @worker.handler("wait")
    async def wait(job: Job) -> None:
        begun.append(job.id)
        await go.wait()

    first, second, third = (router.give("wait") for _ in range(3))
    async with running(worker):
        await router.until(lambda: begun == [first.id])
        # The worker has room for one job. The fake router sends the other jobs although there is no credit.
        router.jobs.clear()
        await router.stream.send(second, third)
        await router.stream.tell(revoked=[answer(second.lease, STALE)])
        await router.until(lambda: f"lost the lease of job {second.id}" in caplog.text)
        go.set()
        await router.until(lambda: len(router.acks()) == 2)
    assert begun == [first.id, third.id]


async def test_a_worker_leaves_a_draining_stream_in_order_and_goes_on_with_the_next(
    router: FakeRouter, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    worker = Worker(client, "q")
    begun: list[str] = []
    go = asyncio.Event()
    answering = asyncio.Event()

    @worker.handler("wait")
    async def wait(job: Job) -> None:
        begun.append(job.id)
        await go.wait()

    @worker.handler("quick")
    async def quick(_: Job) -> None: ...

    async def late(_: Any, stream: FakeStream) -> queue_pb2.Settled:
        if stream is router.streams[0]:
            await answering.wait()
        return queue_pb2.Settled()

    router.scripts["Settle"] = late
    held, quick_one = router.give("wait"), router.give("quick")
    with caplog.at_level(logging.WARNING, "windrow.worker"):
        async with running(worker):
            await router.until(lambda: begun and router.acks())
            first = router.stream
            await first.tell(draining=True)
            assert not first.half_closed, "its ack is not answered yet"
            answering.set()
            await router.until(lambda: len(router.streams) == 2)
            assert first.ended is StatusCode.OK
            said = len(first.messages)
            go.set()
            await router.until(lambda: router.settled("Ack") == [quick_one.id, held.id])
    assert len(first.messages) == said
    assert "cannot be reached" not in caplog.text


async def test_the_newest_report_goes_with_the_next_message_and_before_the_outcome(
    router: FakeRouter, client: Client
) -> None:
    worker = Worker(client, "q")
    answering = asyncio.Event()

    async def late(message: Any, _: FakeStream) -> queue_pb2.Settled:
        if message.extends:
            await answering.wait()
        return queue_pb2.Settled()

    router.scripts["Settle"] = late

    @worker.handler("work")
    async def work(job: Job) -> None:
        assert job.checkpoint == b"row 1"
        job.report(Progress(done=1, total=3, note="one"))
        job.report(Progress(done=2, total=3, note="two" * 1000), checkpoint={"row": 2})
        job.report(checkpoint=b"row 3")
        raise Retry(after=0)

    router.give("work", checkpoint=b"row 1")
    async with running(worker):
        await router.until(lambda: extends(router))
        assert not router.nacks()
        answering.set()
        await router.until(router.nacks)
    (extend,) = extends(router)
    assert (extend.progress.done, extend.progress.total, len(extend.progress.note)) == (2, 3, 1024)
    assert extend.checkpoint == b"row 3"


async def test_a_later_report_waits_until_the_earlier_one_is_answered(router: FakeRouter, client: Client) -> None:
    worker = Worker(client, "q")
    answering, go = asyncio.Event(), asyncio.Event()

    async def late(message: Any, _: FakeStream) -> queue_pb2.Settled:
        if message.extends:
            await answering.wait()
        return queue_pb2.Settled()

    router.scripts["Settle"] = late

    @worker.handler("work")
    async def work(job: Job) -> None:
        job.report(checkpoint=b"first")
        await go.wait()
        job.report(Progress(done=2), checkpoint=b"second")
        job.report(Progress(done=3))

    @worker.handler("quick")
    async def quick(_: Job) -> None: ...

    router.give("work")
    async with running(worker):
        await router.until(lambda: extends(router))
        go.set()
        other = router.give("quick")
        await router.until(lambda: router.settled("Ack") == [other.id])
        assert [extend.checkpoint for extend in extends(router)] == [b"first"]
        answering.set()
        await router.until(lambda: len(router.acks()) == 2)
    assert [(extend.checkpoint, extend.progress.done) for extend in extends(router)] == [(b"first", 0), (b"second", 3)]


@pytest.mark.parametrize("is_async", [True, False])
async def test_an_outcome_that_waits_for_a_report_survives_the_end_of_the_grace(
    router: FakeRouter, client: Client, is_async: bool
) -> None:
    worker = Worker(client, "q", grace=0)
    answering = asyncio.Event()

    async def late(message: Any, _: FakeStream) -> queue_pb2.Settled:
        if message.extends:
            await answering.wait()
        return queue_pb2.Settled()

    router.scripts["Settle"] = late

    def work(job: Job) -> str:
        job.report(checkpoint=b"all of it")
        return "done"

    async def work_async(job: Job) -> str:
        return work(job)

    worker.handler("work")(work_async if is_async else work)
    job = router.give("work")
    async with running(worker):
        await router.until(lambda: extends(router) and not worker._runner._running)
        worker.stop()
        worker.stop()
        answering.set()
    assert router.settled("Ack") == [job.id]
    assert not router.settled("Release")


async def test_a_checkpoint_that_is_reported_while_the_handler_is_cancelled_is_stored_before_the_release(
    router: FakeRouter, client: Client
) -> None:
    worker = Worker(client, "q", grace=0)
    begun = asyncio.Event()

    @worker.handler("work")
    async def work(job: Job) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            job.report(checkpoint=b"so far")
            raise

    job = router.give("work")
    async with running(worker):
        await begun.wait()
    messages = [message for message in router.of("Consume") if message.extends or message.releases]
    assert [([one.checkpoint for one in m.extends], list(m.releases)) for m in messages] == [
        ([b"so far"], []),
        ([], [job.lease]),
    ]


async def test_a_handler_that_goes_on_reporting_after_its_end_does_not_hold_up_its_outcome(
    router: FakeRouter, client: Client
) -> None:
    worker = Worker(client, "q")
    beats: list[asyncio.Task[None]] = []

    @worker.handler("work")
    async def work(job: Job) -> None:
        async def beat() -> None:
            while True:
                job.report(Progress(done=1))
                await asyncio.sleep(0)

        beats.append(asyncio.create_task(beat()))
        await asyncio.sleep(0.01)

    router.give("work")
    async with running(worker):
        await router.until(router.acks)
    for one in beats:
        one.cancel()


def test_a_job_can_be_sent_to_another_process() -> None:
    jobs: list[tuple[bytes, Report]] = []
    job = Job(id="1", checkpoint=b"x", reporter=Reporter(lambda lease, report: jobs.append((lease, report))))
    job.report(checkpoint=b"here")
    copied: Job = pickle.loads(pickle.dumps(job))
    copied.report(checkpoint=b"there")
    assert copied == job
    assert asdict(job)["checkpoint"] == b"x"
    assert [report.checkpoint for _, report in jobs] == [b"here"]


async def test_a_thread_reports_too(router: FakeRouter, client: Client) -> None:
    worker = Worker(client, "q")

    @worker.handler("work")
    def work(job: Job) -> None:
        for done in range(3):
            job.report(Progress(done=done), checkpoint=b"")

    router.give("work")
    async with running(worker):
        await router.until(router.acks)
    assert extends(router)[-1].progress.done == 2
    assert extends(router)[-1].HasField("checkpoint")
    assert len(router.acks()) == 1


async def test_a_report_is_sent_again_on_the_next_stream(router: FakeRouter, client: Client) -> None:
    worker = Worker(client, "q")

    async def silent_at_first(_: Any, stream: FakeStream) -> queue_pb2.Settled | None:
        return None if stream is router.streams[0] else queue_pb2.Settled()

    router.scripts["Settle"] = silent_at_first

    @worker.handler("work")
    async def work(job: Job) -> None:
        job.report(checkpoint=b"once")

    router.give("work")
    async with running(worker):
        await router.until(lambda: extends(router))
        router.stream.cut()
        await router.until(router.acks)
    assert [extend.checkpoint for extend in extends(router)] == [b"once", b"once"]


async def test_a_report_about_a_lost_lease_is_dropped(router: FakeRouter, client: Client) -> None:
    worker = Worker(client, "q", cancel_lost=False)
    begun = asyncio.Event()

    @worker.handler("work")
    async def work(job: Job) -> None:
        begun.set()
        await job.lost.wait()
        job.report(Progress(done=1))

    @worker.handler("after")
    async def after(_: Job) -> None: ...

    lost = router.give("work")
    async with running(worker):
        await begun.wait()
        await router.stream.tell(revoked=[answer(lost.lease, STALE)])
        then = router.give("after")
        await router.until(lambda: router.settled("Ack") == [then.id])
    assert extends(router) == []


@pytest.mark.parametrize(
    ("progress", "checkpoint", "error"),
    [
        (Progress(done=-1), None, ValueError),
        (Progress(total=2**63), None, ValueError),
        ({"done": 1}, None, TypeError),
        (Progress(done=0.5), None, TypeError),  # type: ignore[arg-type]
        (Progress(done=True), None, TypeError),
        (Progress(note=None), None, TypeError),  # type: ignore[arg-type]
        (None, b"x" * 65_537, ValueError),
        (None, object(), TypeError),
    ],
)
async def test_a_report_that_cannot_be_stored_is_refused_in_the_handler(
    client: Client, progress: Any, checkpoint: Any, error: type[Exception]
) -> None:
    with pytest.raises(error):
        Job().report(progress, checkpoint=checkpoint)
    with pytest.raises(InvalidRequest):
        await client.extend(Job(lease=b"x"), progress=progress, checkpoint=checkpoint)


async def test_a_consumer_without_a_worker_reports_with_its_extends(router: FakeRouter, client: Client) -> None:
    await client.extend([Job(lease=b"1"), Job(lease=b"2")], progress=Progress(done=5), checkpoint="at 5")
    (request,) = router.of("Extend")
    assert [(one.lease, one.progress.done, one.checkpoint) for one in request.extends] == [
        (b"1", 5, b"at 5"),
        (b"2", 5, b"at 5"),
    ]
