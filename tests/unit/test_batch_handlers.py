"""What a worker promises to handlers that take many jobs at once, against a fake router."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import logging
import math
import re
import threading
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, cast

import pytest
from google.protobuf.duration_pb2 import Duration
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.unit.client_fake import WAIT_S, FakeRouter
from tests.unit.test_client_worker import running, stopped
from windrow import (
    AttemptOutcome,
    Client,
    InvalidRequest,
    Job,
    Kill,
    LostReason,
    NewJob,
    Payload,
    Retry,
    Snooze,
    Worker,
)
from windrow.batch_handlers import Results
from windrow.gathering import Gathering
from windrow.handlers import CallNext
from windrow.leases import HeldLease
from windrow.testing import run_job
from windrow.v1 import job_pb2, queue_pb2

HOUR_S = 3600.0
# A test whose batch waits for this time fails, because the time limit of the test is shorter.
NEVER_S = 60.0


def told(router: FakeRouter, verb: str) -> set[str]:
    return set(router.settled(verb))


@pytest.mark.parametrize(
    ("results", "fault"),
    [
        (
            [None],
            "ValueError: a handler of batches returns None, or one result for each of its 3 jobs in a list or tuple",
        ),
        ([None] * 4, "ValueError: a handler of batches returns None"),
        ("yes", "TypeError: a handler of batches returns None, .*; this one returned a str"),
        ({"a": 1, "b": 2, "c": 3}, "TypeError: a handler of batches returns None, .*; this one returned a dict"),
        (3, "TypeError: a handler of batches returns None, .*; this one returned a int"),
    ],
    ids=["too few", "too many", "a text", "a dict", "a number"],
)
async def test_results_that_fit_no_jobs_fail_them_all_and_are_logged_once(
    router: FakeRouter, client: Client, caplog: pytest.LogCaptureFixture, results: Any, fault: str
) -> None:
    worker = Worker(client, "q")

    @worker.batch_handler("work", max_jobs=3, max_wait=NEVER_S)
    async def work(jobs: Sequence[Job]) -> Results:
        return cast("Results", results)

    jobs = [router.give() for _ in range(3)]
    async with running(worker):
        await router.until(lambda: len(router.nacks()) == 3)
    assert told(router, "Nack") == {job.id for job in jobs}
    (line,) = [record for record in caplog.records if "batch of 3 jobs failed" in record.getMessage()]
    assert line.levelno == logging.WARNING
    for nack in router.nacks():
        assert re.match(fault, f"{nack.failure.type}: {nack.failure.message}")


async def test_a_handler_that_raises_decides_alike_for_all_its_jobs(
    router: FakeRouter, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    worker = Worker(client, "q", concurrency=50)
    raised: dict[str, BaseException] = {
        "fails": OSError("no disk"),
        "again": Retry("later", after=60),
        "kills": Kill("never"),
        "waits": Snooze("not yet", after=30),
        "cancels": asyncio.CancelledError(),
    }

    @worker.batch_handler(*raised, max_jobs=2, max_wait=NEVER_S)
    async def work(jobs: Sequence[Job]) -> None:
        raise raised[jobs[0].kind]

    jobs = {kind: [router.give(kind), router.give(kind)] for kind in raised}
    async with running(worker):
        await router.until(lambda: len(router.nacks()) == 8 and len(router.settled("Snooze")) == 2)
    failures = {nack.lease.decode(): nack for nack in router.nacks()}
    for kind, both in jobs.items():
        if kind == "waits":
            assert told(router, "Snooze") == {job.id for job in both}
            continue
        first, second = (failures[job.id] for job in both)
        assert first.failure == second.failure
    fails, again, kills = (failures[jobs[kind][0].id] for kind in ("fails", "again", "kills"))
    assert (fails.failure.type, fails.failure.message) == ("OSError", "no disk")
    # The stack begins at the handler.
    assert fails.failure.stack.splitlines()[1].endswith("in work")
    assert (again.retry_after.seconds, kills.failure.permanent) == (60, True)
    lines = {record.getMessage().partition(": ")[2]: record.levelno for record in caplog.records}
    killed_id = jobs["kills"][0].id
    killed = (
        f"a batch of 2 jobs failed, permanently; the first is job {killed_id} (kills, queue q), attempt 1 of 20: never"
    )
    assert lines[killed] == logging.WARNING
    assert lines["a batch of 2 jobs is snoozed for 30 s: not yet"] == logging.INFO


async def test_each_job_of_a_batch_has_its_own_outcome(router: FakeRouter, client: Client) -> None:
    worker = Worker(client, "q")
    outcomes: list[Payload | BaseException] = [
        None,
        {"sum": 3},
        Retry("later", after=60),
        Kill("never"),
        Snooze("not yet", after=30),
        ValueError("this one is bad"),
        cast("Any", object()),
        # The handler returned the KeyboardInterrupt and did not raise it: nobody pressed Ctrl-C.
        KeyboardInterrupt("mine"),
    ]

    @worker.batch_handler("work", max_jobs=len(outcomes), max_wait=NEVER_S)
    async def work(jobs: Sequence[Job]) -> Results:
        return [outcomes[int(job.payload)] for job in jobs]

    jobs = [router.give(payload=b"%d" % at) for at in range(len(outcomes))]
    async with running(worker):
        await router.until(lambda: len(router.nacks()) == 5 and len(router.acks()) == 2 and router.settled("Snooze"))
    assert {ack.lease.decode(): ack.result for ack in router.acks()} == {jobs[0].id: b"", jobs[1].id: b'{"sum":3}'}
    failures = {nack.lease.decode(): nack for nack in router.nacks()}
    assert failures[jobs[2].id].retry_after.seconds == 60
    assert failures[jobs[3].id].failure.permanent
    assert router.settled("Snooze") == [jobs[4].id]
    assert failures[jobs[5].id].failure.message == "this one is bad"
    assert failures[jobs[6].id].failure.type == "TypeError"
    assert failures[jobs[7].id].failure.type == "KeyboardInterrupt"


@pytest.mark.parametrize("in_thread", [False, True], ids=["async def", "def"])
async def test_a_job_that_is_lost_in_the_middle_of_a_batch_is_seen_and_the_others_go_on(
    router: FakeRouter, client: Client, in_thread: bool
) -> None:
    worker = Worker(client, "q")
    begun, go_on = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()
    reasons: list[LostReason | None] = []

    def finish(jobs: Sequence[Job]) -> Results:
        reasons.extend(job.lost.reason for job in jobs)
        return [{"at": at} for at, _ in enumerate(jobs)]

    async def coroutine(jobs: Sequence[Job]) -> Results:
        begun.set()
        await asyncio.to_thread(go_on.wait, WAIT_S)
        return finish(jobs)

    def thread(jobs: Sequence[Job]) -> Results:
        loop.call_soon_threadsafe(begun.set)
        go_on.wait(WAIT_S)
        return finish(jobs)

    worker.batch_handler("work", max_jobs=3, max_wait=NEVER_S)(thread if in_thread else coroutine)
    jobs = [router.give() for _ in range(3)]
    async with running(worker):
        await begun.wait()
        gone = queue_pb2.LeaseAnswer(lease=jobs[1].lease, answer=job_pb2.JOB_ANSWER_CANCELLED)
        await router.stream.tell(revoked=[gone])
        await router.until(lambda: len(worker._runner.leases) == 2)
        go_on.set()
        await router.until(lambda: len(router.acks()) == 2)
    assert reasons == [None, LostReason.CANCELLED, None]
    assert {ack.lease: ack.result for ack in router.acks()} == {jobs[0].lease: b'{"at":0}', jobs[2].lease: b'{"at":2}'}
    assert not router.nacks()
    assert not router.settled("Release")


async def test_a_batch_of_which_all_jobs_are_lost_is_cancelled(router: FakeRouter, client: Client) -> None:
    worker = Worker(client, "q")
    begun, ended = asyncio.Event(), asyncio.Event()

    @worker.batch_handler("work", max_jobs=2, max_wait=NEVER_S)
    async def work(jobs: Sequence[Job]) -> None:
        begun.set()
        try:
            await asyncio.sleep(HOUR_S)
        except asyncio.CancelledError:
            ended.set()
            raise

    jobs = [router.give() for _ in range(2)]
    async with running(worker):
        await begun.wait()
        for job in jobs:
            assert not ended.is_set()
            gone = queue_pb2.LeaseAnswer(lease=job.lease, answer=job_pb2.JOB_ANSWER_STALE)
            await router.stream.tell(revoked=[gone])
        await ended.wait()
        await router.until(lambda: not worker._runner._running)
    assert not router.acks() + router.nacks() + router.settled("Release")


@pytest.mark.parametrize("in_thread", [False, True], ids=["async def", "def"])
async def test_a_batch_that_takes_too_long_fails_as_a_whole(
    router: FakeRouter, client: Client, in_thread: bool
) -> None:
    worker = Worker(client, "q", concurrency=2)
    finish = threading.Event()
    reasons: list[LostReason | None] = []

    async def hangs(jobs: Sequence[Job]) -> None:
        try:
            await asyncio.sleep(HOUR_S)
        finally:
            reasons.extend(job.lost.reason for job in jobs)

    def hangs_in_a_thread(jobs: Sequence[Job]) -> None:
        finish.wait(WAIT_S)
        reasons.extend(job.lost.reason for job in jobs)

    # The timeout is long, so that even a busy machine starts the thread before it ends.
    handler = worker.batch_handler("work", max_jobs=2, max_wait=NEVER_S, timeout=0.5)
    handler(hangs_in_a_thread if in_thread else hangs)
    for _ in range(2):
        router.give()
    try:
        async with running(worker):
            await router.until(lambda: len(router.nacks()) == 2)
            finish.set()
            await router.until(lambda: len(reasons) == 2)
    finally:
        finish.set()
    for nack in router.nacks():
        assert nack.failure.type == "windrow.TimedOut"
        assert nack.failure.message == "the handler did not finish a batch within 0.5 s"
        assert "hangs" in nack.failure.stack
    assert reasons == [LostReason.TIMED_OUT] * 2


async def test_the_shortest_max_runtime_of_its_jobs_bounds_a_batch(router: FakeRouter, client: Client) -> None:
    worker = Worker(client, "q")

    @worker.batch_handler("work", max_jobs=2, max_wait=NEVER_S, timeout=HOUR_S)
    async def work(jobs: Sequence[Job]) -> None:
        await asyncio.sleep(HOUR_S)

    router.give()
    router.give(max_runtime=Duration(seconds=1))
    async with running(worker):
        await router.until(lambda: len(router.nacks()) == 2)
    assert {nack.failure.message for nack in router.nacks()} == {
        "the batch has used up the max_runtime of one of its jobs"
    }


async def test_stopping_releases_the_jobs_that_wait_for_a_batch_and_lets_one_finish_that_runs(
    router: FakeRouter, client: Client
) -> None:
    worker = Worker(client, "q")
    begun, finish = asyncio.Event(), asyncio.Event()

    @worker.batch_handler("work", max_jobs=2, max_wait=NEVER_S)
    async def work(jobs: Sequence[Job]) -> None:
        begun.set()
        await finish.wait()

    jobs = [router.give() for _ in range(3)]
    async with running(worker):
        await begun.wait()
        worker.stop()
        await router.until(lambda: router.settled("Release"))
        finish.set()
    assert told(router, "Ack") == {job.id for job in jobs[:2]}
    assert router.settled("Release") == [jobs[2].id]


@pytest.mark.parametrize("how", ["after the grace", "when its worker is cancelled"])
async def test_a_batch_that_is_cut_off_is_released_whole(router: FakeRouter, client: Client, how: str) -> None:
    worker = Worker(client, "q", grace=0)
    begun = asyncio.Event()
    reasons: list[LostReason | None] = []

    @worker.batch_handler("work", max_jobs=3, max_wait=NEVER_S)
    async def work(jobs: Sequence[Job]) -> None:
        begun.set()
        try:
            await asyncio.sleep(HOUR_S)
        finally:
            reasons.extend(job.lost.reason for job in jobs)

    jobs = [router.give() for _ in range(3)]
    task = asyncio.create_task(worker.run())
    await begun.wait()
    if how == "after the grace":
        worker.stop()
        await stopped(task)
        assert reasons == [LostReason.STOPPED] * 3
    else:
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stopped(task)
    assert told(router, "Release") == {job.id for job in jobs}
    assert not router.acks() + router.nacks()


async def test_a_batch_is_full_or_has_waited_or_has_no_place_for_more(router: FakeRouter, client: Client) -> None:
    worker = Worker(client, "q", concurrency=5)
    sizes: list[int] = []
    begun, finish = asyncio.Event(), asyncio.Event()

    @worker.batch_handler("full", max_jobs=2, max_wait=NEVER_S)
    async def full(jobs: Sequence[Job]) -> None:
        sizes.append(len(jobs))

    @worker.batch_handler("late", max_jobs=100, max_wait=0.02)
    async def late(jobs: Sequence[Job]) -> None:
        sizes.append(len(jobs))

    @worker.handler("single")
    async def single(job: Job) -> None:
        begun.set()
        await finish.wait()

    @worker.batch_handler("crowded", max_jobs=100, max_wait=NEVER_S)
    async def crowded(jobs: Sequence[Job]) -> None:
        sizes.append(len(jobs))

    async with running(worker):
        for _ in range(2):
            router.give("full")
        await router.until(lambda: sizes == [2])
        router.give("late")
        await router.until(lambda: sizes == [2, 1])
        router.give("single")
        await begun.wait()
        for _ in range(4):
            router.give("crowded")
        await router.until(lambda: sizes == [2, 1, 4])
        finish.set()
        await router.until(lambda: len(router.acks()) == 8)


async def test_every_job_of_a_batch_takes_a_place(router: FakeRouter, client: Client) -> None:
    worker = Worker(client, "q", concurrency=4, prefetch=0)
    go_on = asyncio.Event()
    sizes: list[int] = []

    @worker.batch_handler("work", max_jobs=3, max_wait=0)
    async def work(jobs: Sequence[Job]) -> None:
        sizes.append(len(jobs))
        await go_on.wait()

    for _ in range(10):
        router.give()
    async with running(worker):
        await router.until(lambda: len(sizes) == 2)
        assert sizes == [3, 1]
        assert len(router.jobs) == 6
        go_on.set()
        await router.until(lambda: len(router.acks()) == 10)
    assert max(sizes) == 3


async def test_a_job_that_waits_too_long_for_a_batch_goes_back_uncounted(router: FakeRouter, client: Client) -> None:
    worker = Worker(client, "q", visibility_window=1.5)

    @worker.batch_handler("work", max_jobs=100, max_wait=NEVER_S)
    async def work(jobs: Sequence[Job]) -> None:
        raise AssertionError("it had no batch")

    job = router.give()
    async with running(worker):
        await router.until(lambda: router.settled("Release"))
    assert router.settled("Release")[0] == job.id


async def test_leases_of_a_batch_are_extended_and_its_jobs_report_and_log(router: FakeRouter, client: Client) -> None:
    # The window is long, so that even a busy machine extends the leases in time.
    worker = Worker(client, "q", visibility_window=1.5)
    finish = asyncio.Event()

    @worker.batch_handler("work", max_jobs=2, max_wait=NEVER_S)
    async def work(jobs: Sequence[Job]) -> None:
        jobs[0].report(checkpoint=b"half")
        jobs[1].log("seen")
        await finish.wait()

    def extended() -> list[queue_pb2.Extend]:
        return [one for message in router.of("Consume") for one in message.extends]

    jobs = [router.give() for _ in range(2)]
    async with running(worker):
        await router.until(lambda: len([one for one in extended() if one.lease == jobs[1].lease]) >= 2)
        finish.set()
        await router.until(lambda: len(router.acks()) == 2)
    assert extended()[0].checkpoint == b"half"
    assert {ack.lease: ack.log for ack in router.acks()} == {jobs[0].lease: "", jobs[1].lease: "seen"}


async def test_a_batch_that_has_ended_leaves_nothing_to_the_garbage_collector(
    router: FakeRouter, client: Client
) -> None:
    worker = Worker(client, "q")
    seen: list[weakref.ref[HeldLease]] = []

    @worker.batch_handler("work", max_jobs=2, max_wait=NEVER_S)
    async def work(jobs: Sequence[Job]) -> None:
        seen.extend(weakref.ref(held) for held in worker._runner._running)

    for _ in range(2):
        router.give()
    gc.disable()
    try:
        async with running(worker):
            await router.until(lambda: router.acks() and not worker._runner.leases)
            await router.until(lambda: not any(held() for held in seen))
    finally:
        gc.enable()
    assert len(seen) == 2


async def test_batches_share_no_context_and_have_no_middleware(router: FakeRouter, client: Client) -> None:
    async def around(job: Job, call_next: CallNext) -> Payload:
        raise AssertionError("middleware is around single jobs")

    worker = Worker(client, "q", middleware=[around])
    seen = contextvars.ContextVar[str]("seen")
    found: list[str | None] = []

    @worker.batch_handler("work", max_jobs=1)
    async def work(jobs: Sequence[Job]) -> None:
        found.append(seen.get(None))
        seen.set(jobs[0].id)

    for _ in range(3):
        router.give()
    async with running(worker):
        await router.until(lambda: len(router.acks()) == 3)
    assert found == [None] * 3


async def test_a_batch_has_one_span_that_links_to_the_spans_of_its_jobs(router: FakeRouter) -> None:
    spans = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    async with Client(router.address, org="acme", tracer_provider=provider) as client:
        worker = Worker(client, "q")

        @worker.batch_handler("work", max_jobs=3, max_wait=NEVER_S)
        async def work(jobs: Sequence[Job]) -> None:
            raise ValueError("no")

        trace = job_pb2.TraceContext(traceparent=f"00-{'a' * 32}-{'b' * 16}-01")
        router.give()
        router.give(trace=trace)
        router.give()
        async with running(worker):
            await router.until(lambda: len(router.nacks()) == 3)
    (span,) = spans.get_finished_spans()
    assert (span.name, span.parent) == ("process q", None)
    assert [format(link.context.span_id, "x") for link in span.links] == ["b" * 16]
    attributes = span.attributes or {}
    assert (attributes["messaging.batch.message_count"], attributes["error.type"]) == (3, "ValueError")


async def test_the_test_of_a_batch_handler_gives_it_a_batch_of_one(client: Client) -> None:
    worker = Worker(client, "q")

    @worker.batch_handler("work")
    async def work(jobs: Sequence[Job]) -> Results:
        return [Retry("later", after=60) if job.payload == b"bad" else {"was": job.text()} for job in jobs]

    done = await run_job(worker, NewJob("q", "work", "good"))
    assert (done.outcome, done.result) == (AttemptOutcome.ACKED, b'{"was":"good"}')
    again = await run_job(worker, NewJob("q", "work", "bad"))
    assert (again.outcome, again.after) == (AttemptOutcome.NACKED, timedelta(seconds=60))


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"max_jobs": 0}, "max_jobs must be 1 to 1,000, not 0"),
        ({"max_jobs": 1001}, "max_jobs must be 1 to 1,000, not 1001"),
        ({"max_wait": -1}, "max_wait must be 0 s to 60 s, not -1.0 s"),
        ({"max_wait": math.nan}, "max_wait must be 0 s to 60 s, not nan s"),
        ({"timeout": 0}, "timeout must be more than 0 s, not 0.0 s"),
    ],
)
def test_a_batch_handler_that_makes_no_sense_is_refused(client: Client, options: dict[str, Any], fault: str) -> None:
    with pytest.raises(InvalidRequest, match=fault):
        Worker(client, "q").batch_handler("work", **options)


def test_a_kind_has_one_handler_of_either_sort(client: Client) -> None:
    worker = Worker(client, "q")

    @worker.batch_handler("batch")
    async def batch(jobs: Sequence[Job]) -> None: ...

    @worker.handler("single")
    async def single(job: Job) -> None: ...

    with pytest.raises(InvalidRequest, match="kind 'batch' has a handler already"):
        worker.handler("batch")(single)
    with pytest.raises(InvalidRequest, match="kind 'single' has a handler already"):
        worker.batch_handler("single")(batch)


def test_a_batch_is_due_when_nothing_is_gained_by_waiting() -> None:
    gathering = Gathering(jobs_max=3, wait_s_max=2.0)
    assert gathering.due_at(places=10) is None
    for at in range(5):
        gathering.waiting.append(HeldLease(Job(id=str(at)), 100.0 + at, 30.0))
    assert gathering.due_at(places=0) is None
    assert gathering.due_at(places=10) == -math.inf
    assert [held.job.id for held in gathering.take(places=10)] == ["0", "1", "2"]
    assert gathering.due_at(places=10) == 105.0
    assert gathering.due_at(places=2) == -math.inf
    assert [held.job.id for held in gathering.take(places=1)] == ["3"]
