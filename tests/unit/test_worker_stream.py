"""How a worker handles a stream that breaks, hangs, refuses or ends: nothing is lost, and nothing is tried again and
again without a pause."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from functools import partial
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration
from google.rpc import status_pb2
from google.rpc.error_details_pb2 import RetryInfo
from grpc import StatusCode

from tests.unit.client_fake import WAIT_S, FakeRouter, FakeStream, refuse, settled_as
from windrow import Client, ClientClosed, InvalidRequest, Job, Worker
from windrow.v1 import job_pb2, queue_pb2

OK, STALE = job_pb2.JOB_ANSWER_OK, job_pb2.JOB_ANSWER_STALE


class Running:
    """A worker whose handlers of kind `work` wait until the test lets them continue."""

    def __init__(self, client: Client, **options: Any) -> None:
        self.worker = Worker(client, "q", **options)
        self.begun: list[str] = []
        self.ended: list[str] = []
        self.go = asyncio.Event()
        self.worker.handler("work")(self._work)
        self.worker.handler("quick")(self._quick)
        self.task = asyncio.create_task(self.worker.run())

    async def _work(self, job: Job) -> None:
        self.begun.append(job.id)
        await self.go.wait()
        self.ended.append(job.id)

    async def _quick(self, job: Job) -> None:
        self.ended.append(job.id)

    async def stop(self) -> None:
        self.worker.stop()
        async with asyncio.timeout(WAIT_S):
            await self.task


async def acked(router: FakeRouter, count: int) -> None:
    await router.until(lambda: len(router.acks()) == count)


async def unanswered(message: Any, stream: FakeStream) -> None:
    return None


async def test_handlers_go_on_when_their_stream_is_cut_and_are_acked_on_the_next(
    router: FakeRouter, client: Client
) -> None:
    running = Running(client)
    jobs = [router.give() for _ in range(3)]
    await router.until(lambda: len(running.begun) == 3)
    router.stream.cut()
    await router.until(lambda: len(router.streams) == 2)
    running.go.set()
    await router.until(lambda: len(router.acks()) == 3)
    await running.stop()
    assert sorted(router.settled("Ack")) == sorted(job.id for job in jobs)
    assert len(running.begun) == 3
    assert router.streams[1].messages[0].HasField("start")
    assert router.streams[1].ended is StatusCode.OK
    assert [metadata["windrow-org"] for metadata in router.metadata] == ["acme", "acme"]


@pytest.mark.parametrize(("reason", "warns"), [("STREAM_EXPIRED", False), ("SHARD_UNAVAILABLE", True)])
async def test_a_stream_that_expires_is_no_outage(
    router: FakeRouter, client: Client, caplog: pytest.LogCaptureFixture, reason: str, warns: bool
) -> None:
    running = Running(client)
    job = router.give()
    await router.until(lambda: len(running.begun) == 1)
    router.stream.cut(reason=reason)
    await router.until(lambda: len(router.streams) == 2)
    running.go.set()
    await acked(router, 1)
    await running.stop()
    assert router.settled("Ack") == [job.id]
    assert ("the router cannot be reached" in caplog.text) == warns


async def test_credit_is_counted_anew_on_the_next_stream(router: FakeRouter, client: Client) -> None:
    running = Running(client, concurrency=5, prefetch=0)
    for _ in range(3):
        router.give()
    await router.until(lambda: len(running.begun) == 3)
    assert router.stream.credit == 2
    router.stream.cut()
    await router.until(lambda: len(router.streams) == 2 and router.stream.messages)
    assert router.stream.messages[0].credit == 2
    running.go.set()
    await router.until(lambda: router.stream.credit == 5)
    await running.stop()


@pytest.mark.parametrize("answer", [OK, STALE])
async def test_settlements_without_an_answer_at_the_cut_are_repeated(
    router: FakeRouter, client: Client, caplog: pytest.LogCaptureFixture, answer: job_pb2.JobAnswer.ValueType
) -> None:
    async def first_unanswered(message: Any, stream: FakeStream) -> queue_pb2.Settled | None:
        if stream is router.streams[0]:
            return None
        return settled_as(answer, *(ack.lease for ack in message.acks))

    router.scripts["Settle"] = first_unanswered
    running = Running(client)
    job = router.give("quick")
    await router.until(router.acks)
    router.stream.cut()
    await router.until(lambda: len(router.acks()) == 2)
    await running.stop()
    assert router.settled("Ack") == [job.id] * 2
    assert running.ended == [job.id]
    assert not running.worker._runner.leases
    assert ("answered STALE" in caplog.text) == (answer == STALE)


async def test_a_stream_that_is_refused_at_once_again_and_again_is_not_spun_on(
    router: FakeRouter, client: Client
) -> None:
    async def refused(stream: FakeStream, context: Any) -> None:
        if len(router.streams) < 7:
            await refuse(context, StatusCode.UNAVAILABLE)

    router.scripts["Consume"] = refused
    running = Running(client)
    await router.until(lambda: len(router.streams) == 7)
    pauses = [later.began - one.began for one, later in itertools.pairwise(router.streams)]
    # The upper bound of the pauses begins at 50 ms and doubles each time. Each pause is at least half of its upper
    # bound.
    assert all(pause >= 0.025 * 2**at for at, pause in enumerate(pauses))
    await running.stop()


async def test_a_router_that_greets_and_leaves_again_and_again_is_not_spun_on(
    router: FakeRouter, client: Client
) -> None:
    async def leaves(stream: FakeStream, context: Any) -> None:
        if len(router.streams) < 6:
            stream.cut()

    router.scripts["Consume"] = leaves
    running = Running(client)
    await router.until(lambda: len(router.streams) == 6)
    assert router.streams[-1].began - router.streams[0].began >= 0.025 * (1 + 2 + 4 + 8 + 16)
    await running.stop()


async def test_a_router_that_answers_and_leaves_again_and_again_is_not_spun_on(
    router: FakeRouter, client: Client
) -> None:
    def opened(count: int) -> bool:
        return len(router.streams) == count and bool(router.stream.messages)

    running = Running(client)
    for count in range(1, 6):
        await router.until(partial(opened, count))
        await router.stream.tell()
        router.stream.cut()
    await router.until(partial(opened, 6))
    assert router.streams[-1].began - router.streams[0].began >= 0.025 * (1 + 2 + 4 + 8 + 16)
    await running.stop()


@pytest.mark.parametrize(
    "code", [StatusCode.DEADLINE_EXCEEDED, StatusCode.INTERNAL, StatusCode.FAILED_PRECONDITION, StatusCode.NOT_FOUND]
)
async def test_a_stream_that_ends_with_any_status_that_may_pass_is_opened_again(
    router: FakeRouter, client: Client, code: StatusCode
) -> None:
    async def refused(stream: FakeStream, context: Any) -> None:
        if len(router.streams) == 1:
            await refuse(context, code)

    router.scripts["Consume"] = refused
    running = Running(client)
    await router.until(lambda: len(router.streams) == 2)
    await running.stop()


async def test_a_router_asks_for_a_pause_and_gets_it(router: FakeRouter, client: Client) -> None:
    async def busy(stream: FakeStream, context: Any) -> None:
        if len(router.streams) == 1:
            await refuse(context, StatusCode.RESOURCE_EXHAUSTED, retry_after_s=0.4)

    router.scripts["Consume"] = busy
    running = Running(client)
    await router.until(lambda: len(router.streams) == 2)
    assert router.streams[1].began - router.streams[0].began >= 0.4
    await running.stop()


async def test_a_router_that_asks_for_an_hours_pause_gets_a_bounded_one(
    router: FakeRouter, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("windrow.calls.ASKED_S_MAX", 0.2)

    async def busy(stream: FakeStream, context: Any) -> None:
        if len(router.streams) == 1:
            await refuse(context, StatusCode.UNAVAILABLE, retry_after_s=3600)

    router.scripts["Consume"] = busy
    running = Running(client)
    await router.until(lambda: len(router.streams) == 2)
    assert router.streams[1].began - router.streams[0].began >= 0.2
    await running.stop()


async def test_a_settlement_that_failed_is_repeated_after_a_pause(
    router: FakeRouter, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "windrow.worker")
    times: list[float] = []

    async def away(message: Any, stream: FakeStream) -> queue_pb2.Settled:
        times.append(asyncio.get_running_loop().time())
        if len(times) <= 4:
            return queue_pb2.Settled(error=status_pb2.Status(code=14, message="the shard is away"))
        return queue_pb2.Settled()

    router.scripts["Settle"] = away
    running = Running(client)
    job = router.give("quick")
    await router.until(lambda: len(times) == 5)
    await running.stop()
    assert router.settled("Ack") == [job.id] * 5
    assert len(router.streams) == 1
    assert all(later - one >= 0.02 * 2**at for at, (one, later) in enumerate(itertools.pairwise(times)))
    told = [record.getMessage() for record in caplog.records if record.name == "windrow.worker"]
    assert sum("the shard is away" in message for message in told) == 1


async def test_a_settlement_that_failed_is_repeated_after_the_pause_that_the_router_asks_for(
    router: FakeRouter, client: Client
) -> None:
    times: list[float] = []

    async def busy(message: Any, stream: FakeStream) -> queue_pb2.Settled:
        times.append(asyncio.get_running_loop().time())
        if len(times) > 1:
            return queue_pb2.Settled()
        error = status_pb2.Status(code=8, message="the shard is busy")
        error.details.add().Pack(RetryInfo(retry_delay=Duration(nanos=400_000_000)))
        return queue_pb2.Settled(error=error)

    router.scripts["Settle"] = busy
    running = Running(client)
    router.give("quick")
    await router.until(lambda: len(times) == 2)
    await running.stop()
    assert times[1] - times[0] >= 0.4


async def test_a_long_job_keeps_its_lease_across_a_cut(router: FakeRouter, client: Client) -> None:
    async def first_unanswered(message: Any, stream: FakeStream) -> queue_pb2.Settled | None:
        return None if stream is router.streams[0] else queue_pb2.Settled()

    router.scripts["Settle"] = first_unanswered
    running = Running(client, visibility_window=1.8)
    job = router.give()
    await router.until(lambda: router.settled("Extend"))
    router.stream.cut()
    # Five extends take four thirds of a window. The lease would have ended if the first extend had not been repeated.
    await router.until(lambda: len(router.settled("Extend")) == 5)
    running.go.set()
    await router.until(router.acks)
    await running.stop()
    assert running.ended == [job.id]
    assert router.settled("Ack") == [job.id]


async def test_a_router_that_does_not_answer_is_left_for_another(router: FakeRouter) -> None:
    async def first_unanswered(message: Any, stream: FakeStream) -> queue_pb2.Settled | None:
        return None if stream is router.streams[0] else queue_pb2.Settled()

    router.scripts["Settle"] = first_unanswered
    async with Client(router.address, org="acme", try_timeout=2.0) as client:
        running = Running(client)
        job = router.give("quick")
        # The stream may have ended with any status: gRPC may show a server that a stream was closed before it shows
        # that the stream was cancelled.
        await router.until(lambda: len(router.acks()) == 2 and router.streams[0].ended)
        await running.stop()
    assert router.settled("Ack") == [job.id] * 2


async def test_an_answer_that_does_not_fit_its_question_is_not_believed(router: FakeRouter, client: Client) -> None:
    async def wrong(message: Any, stream: FakeStream) -> queue_pb2.Settled:
        return settled_as(STALE, b"never sent") if stream is router.streams[0] else queue_pb2.Settled()

    router.scripts["Settle"] = wrong
    running = Running(client)
    job = router.give("quick")
    await router.until(lambda: len(router.acks()) == 2)
    await running.stop()
    assert router.settled("Ack") == [job.id] * 2


async def test_no_more_is_asked_for_than_there_is_room_for(router: FakeRouter, client: Client) -> None:
    running = Running(client, concurrency=4, prefetch=6)
    running.go.set()
    most = 0

    async def look(message: Any, stream: FakeStream) -> queue_pb2.Settled:
        nonlocal most
        most = max(most, stream.credit + stream.sent - len(running.ended))
        return queue_pb2.Settled()

    router.scripts["Settle"] = look
    for count in range(20, 400, 20):
        for _ in range(20):
            router.give("quick")
        await acked(router, count)
    await running.stop()
    assert 4 < most <= 10


async def test_handlers_that_block_the_loop_are_as_slow_as_they_are(router: FakeRouter, client: Client) -> None:
    """Handlers that block the loop run one after another, even if the concurrency is higher. So the worker does not ask
    for jobs that would have to wait, and other workers can take them."""
    running = Running(client, concurrency=50, prefetch=500)

    @running.worker.handler("blocking")
    async def blocking(job: Job) -> None:
        until = time.monotonic() + 0.02
        while time.monotonic() < until:
            pass

    for _ in range(60):
        router.give("blocking")
    await acked(router, 60)
    asked = sum(message.credit for message in router.of("Consume"))
    await running.stop()
    # A worker prefetches the jobs for 0.1 s of work. In this test, these are 5 jobs.
    assert asked <= 60 + 50 + 5


async def test_credit_is_returned_in_halves_not_job_by_job(router: FakeRouter, client: Client) -> None:
    running = Running(client, concurrency=50, prefetch=50)
    running.go.set()
    for _ in range(1000):
        router.give()
    await router.until(lambda: len(router.acks()) == 1000)
    await running.stop()
    assert len(router.of("Consume")) < 300


async def test_credit_of_a_message_that_was_too_large_is_given_again(router: FakeRouter, client: Client) -> None:
    too_large = [queue_pb2.Settled(error=status_pb2.Status(code=StatusCode.INVALID_ARGUMENT.value[0], message="no"))]

    async def refuse_first(message: Any, stream: FakeStream) -> queue_pb2.Settled:
        if not too_large:
            return queue_pb2.Settled()
        stream.credit -= message.credit
        refused.append(message)
        return too_large.pop()

    refused: list[queue_pb2.ConsumeRequest] = []
    router.scripts["Settle"] = refuse_first
    running = Running(client, concurrency=1, prefetch=0)
    router.give("quick")
    await router.until(lambda: refused)
    assert refused[0].credit == 1
    router.give("quick")
    await router.until(lambda: len(running.ended) == 2)
    await running.stop()


async def test_jobs_that_come_while_the_stream_is_closed_are_given_back_on_another(
    router: FakeRouter, client: Client
) -> None:
    running = Running(client)
    await router.until(lambda: router.streams and router.stream.credit)
    late = router.give()
    router.jobs.remove(late)
    router.stream.parting = [late]
    await running.stop()
    assert router.settled("Release") == [late.id]
    assert [stream.ended for stream in router.streams] == [StatusCode.OK] * 2
    assert router.streams[1].messages[0].credit == 0
    assert not running.begun


async def test_a_cut_while_stopping_loses_no_ack(router: FakeRouter, client: Client) -> None:
    running = Running(client)
    job = router.give()
    await router.until(lambda: running.begun)
    running.worker.stop()
    await router.until(lambda: running.worker._runner.stopping.is_set())
    router.stream.cut()
    running.go.set()
    await running.stop()
    assert router.settled("Ack") == [job.id]
    assert all(message.credit == 0 for message in router.streams[1].messages)


async def test_one_refused_entry_is_found_and_left_when_its_message_ends_the_stream(
    router: FakeRouter, client: Client
) -> None:
    bad = router.give()
    good = [router.give() for _ in range(3)]
    accepted: list[bytes] = []

    async def picky(message: Any, stream: FakeStream) -> queue_pb2.Settled | None:
        if any(ack.lease == bad.lease for ack in message.acks):
            stream.cut(StatusCode.INVALID_ARGUMENT)
            return None
        accepted.extend(ack.lease for ack in message.acks)
        return queue_pb2.Settled()

    router.scripts["Settle"] = picky
    running = Running(client)
    await router.until(lambda: len(running.begun) == 4)
    running.go.set()
    await router.until(lambda: len(accepted) == 3)
    await running.stop()
    assert sorted(accepted) == sorted(job.lease for job in good)
    assert not running.worker._runner.leases


async def test_a_start_that_is_refused_ends_the_worker(router: FakeRouter, client: Client) -> None:
    async def refused(stream: FakeStream, context: Any) -> None:
        await refuse(context, StatusCode.INVALID_ARGUMENT, violations={"start.queues[0]": "has a space"})

    router.scripts["Consume"] = refused
    with pytest.raises(InvalidRequest, match="has a space"):
        await Worker(client, "no spaces").run()


async def test_a_client_closed_under_its_worker_ends_it(router: FakeRouter) -> None:
    client = Client(router.address, org="acme")
    running = Running(client)
    await router.until(lambda: router.streams)
    await client.close()
    with pytest.raises(ClientClosed):
        async with asyncio.timeout(WAIT_S):
            await running.task


async def test_a_worker_stops_in_time_though_nobody_answers(
    router: FakeRouter, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    router.scripts["Settle"] = unanswered
    running = Running(client)
    router.give("quick")
    await router.until(router.acks)
    running.worker.stop()
    await running.stop()
    assert "before every outcome was reported" in caplog.text
