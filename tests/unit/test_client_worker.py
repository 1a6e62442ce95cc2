"""The worker's promises about leases, the outcomes of jobs, and shutdown, against a fake router."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import math
import os
import re
import signal
import sys
import threading
import time
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import fields, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from google.protobuf.duration_pb2 import Duration
from google.rpc import status_pb2
from grpc import StatusCode, aio
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader, NumberDataPoint

import windrow.testing
from tests.unit.client_fake import WAIT_S, FakeRouter, FakeStream, Script, refuse, settled_as
from windrow import (
    Client,
    Enqueued,
    InvalidRequest,
    Job,
    Kill,
    Lost,
    LostReason,
    NewJob,
    Payload,
    PermissionDenied,
    Retry,
    RouterTooOld,
    Snooze,
    Worker,
)
from windrow.client import CallNext as EnqueueNext
from windrow.handlers import CallNext
from windrow.jobs import read_leased
from windrow.unhandled import pause_s
from windrow.v1 import job_pb2, queue_pb2

CHECKOUT = Path(__file__).parents[2]
OK, STALE = job_pb2.JOB_ANSWER_OK, job_pb2.JOB_ANSWER_STALE


@asynccontextmanager
async def running(worker: Worker, *, within_s: float = WAIT_S) -> AsyncGenerator[asyncio.Task[None]]:
    """Runs the worker during the block, then stops it; it must end without an error."""
    async with asyncio.timeout(within_s):
        task = asyncio.create_task(worker.run())
        try:
            yield task
            worker.stop()
            await task
        finally:
            task.cancel()


def refusing(times: int, code: StatusCode, message: str = "no") -> Script:
    """Returns a script that refuses this many streams."""
    left = times

    async def script(stream: FakeStream, context: Any) -> None:
        nonlocal left
        if left > 0:
            left -= 1
            await refuse(context, code, message)

    return script


async def stopped(task: asyncio.Task[None]) -> None:
    async with asyncio.timeout(WAIT_S):
        await task


async def test_a_job_is_handled_and_its_result_goes_with_the_ack(router: FakeRouter, client: Client) -> None:
    worker = Worker(client, ["q"], name="w1")

    @worker.handler("add")
    async def add(job: Job) -> dict[str, int]:
        return {"sum": sum(job.json())}

    job = router.give("add", b"[1,2]")
    async with running(worker):
        await router.until(router.acks)
    (ack,) = router.acks()
    assert (ack.lease, ack.result) == (job.lease, b'{"sum":3}')
    (stream,) = router.streams
    start = stream.start
    assert (start.org, list(start.queues), start.worker, start.visibility_window.seconds) == ("acme", ["q"], "w1", 30)
    assert list(start.kinds) == ["add"]
    assert stream.messages[0].credit == 10
    assert stream.ended is StatusCode.OK


async def test_a_plain_function_runs_in_a_thread_with_the_callers_context(router: FakeRouter, client: Client) -> None:
    worker = Worker(client, "q")

    @worker.handler("where")
    def where(job: Job) -> str:
        return threading.current_thread().name

    router.give("where")
    async with running(worker):
        await router.until(router.acks)
    assert router.acks()[0].result.decode().startswith(f"{worker.name}-handler")


async def test_jobs_that_follow_one_another_in_a_task_share_no_context_and_no_cancellation(
    router: FakeRouter, client: Client
) -> None:
    worker = Worker(client, "q", concurrency=1)
    seen = contextvars.ContextVar[list[str]]("seen")
    found: dict[str, list[str] | None] = {}
    tasks: set[object] = set()

    @worker.handler("quick")
    async def quick(job: Job) -> None:
        tasks.add(asyncio.current_task())
        found[job.id] = seen.get(None)
        seen.set([job.id])

    @worker.handler("cancels")
    async def cancels(job: Job) -> None:
        await quick(job)
        task = asyncio.current_task()
        assert task is not None
        task.cancel()

    @worker.handler("suspends")
    async def suspends(job: Job) -> None:
        await quick(job)
        await asyncio.sleep(0)
        assert seen.get() == [job.id]

    jobs = [router.give(kind) for kind in ("quick", "quick", "cancels", "suspends", "quick", "cancels", "quick")]
    async with running(worker):
        await router.until(lambda: len(found) == len(jobs))
        await router.until(lambda: len(router.settled("Ack")) >= len(jobs) - 2)
    assert found == {job.id: None for job in jobs}
    assert {job.id for job in jobs if job.kind != "cancels"} <= set(router.settled("Ack"))
    assert 1 < len(tasks) < len(jobs)


@pytest.mark.parametrize("is_batch", [False, True])
async def test_a_handler_whose_own_code_cancels_its_task_has_failed(
    router: FakeRouter, client: Client, is_batch: bool
) -> None:
    """For example, the handler has its own timeout, built with `call_later()`. If the worker released the job, the
    attempt would not count, so the job would run again at once, for ever."""
    worker = Worker(client, "q")

    async def cancel(jobs: object) -> None:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().call_soon(task.cancel)
        await asyncio.Event().wait()

    (worker.batch_handler if is_batch else worker.handler)("cancels")(cancel)
    job = router.give("cancels")
    async with running(worker):
        await router.until(router.nacks)
    (nack,) = router.nacks()
    assert (nack.lease, nack.failure.type) == (job.lease, "asyncio.exceptions.CancelledError")
    assert "Event().wait()" in nack.failure.stack
    assert not router.settled("Release")


async def test_jobs_are_released_when_all_tasks_of_the_loop_are_cancelled_together(
    router: FakeRouter, client: Client
) -> None:
    """`asyncio.run()` cancels all tasks at its end. The tasks of the handlers may be cancelled before the worker's
    `run()` is."""
    worker = Worker(client, "q")
    begun = asyncio.Event()

    @worker.handler("wait")
    async def wait(job: Job) -> None:
        begun.set()
        await asyncio.Event().wait()

    job = router.give("wait")
    task = asyncio.create_task(worker.run())
    async with asyncio.timeout(WAIT_S):
        await begun.wait()
    (handling,) = (one for one in asyncio.all_tasks() if one.get_name() == f"windrow handlers of {worker.name}")
    handling.cancel()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stopped(task)
    assert router.settled("Release") == [job.id]
    assert not router.nacks()


@pytest.mark.parametrize("second", ["coroutine", "thread"])
async def test_a_late_cancellation_of_one_jobs_task_does_not_meet_the_next_job(
    router: FakeRouter, client: Client, second: str
) -> None:
    worker = Worker(client, "q", concurrency=1)
    # The worker prefetches from the beginning, so that both jobs come in one message.
    worker._runner._mean_job_s = 0.001
    cancelled = threading.Event()

    @worker.handler("first")
    async def first(job: Job) -> None:
        task = asyncio.current_task()
        assert task is not None
        await asyncio.sleep(0)

        def cancel() -> None:
            task.cancel()
            cancelled.set()

        asyncio.get_running_loop().call_later(0.05, cancel)

    @worker.handler("coroutine")
    async def coroutine(job: Job) -> None:
        await asyncio.to_thread(cancelled.wait, WAIT_S)

    @worker.handler("thread")
    def thread(job: Job) -> None:
        assert cancelled.wait(WAIT_S)

    jobs = [router.give("first"), router.give(second)]
    async with running(worker):
        await router.until(lambda: len(router.settled("Ack")) == len(jobs))
    assert not router.settled("Release") + router.settled("Nack")


async def test_a_thread_that_outlives_the_grace_keeps_no_lease(router: FakeRouter, client: Client) -> None:
    worker = Worker(client, "q", grace=0, visibility_window=0.3)
    begun, finish = threading.Event(), threading.Event()

    @worker.handler("hangs")
    def hangs(job: Job) -> None:
        begun.set()
        finish.wait(WAIT_S)

    router.give("hangs")
    try:
        async with running(worker):
            await asyncio.to_thread(begun.wait, WAIT_S)
        assert not worker._runner.leases
    finally:
        finish.set()


async def test_handlers_that_suspend_run_at_the_same_time_up_to_the_concurrency(
    router: FakeRouter, client: Client
) -> None:
    worker = Worker(client, "q", concurrency=3)
    together, most = asyncio.Barrier(3), 0
    inside = 0

    @worker.handler("waits")
    async def waits(job: Job) -> None:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        # This line waits until three handlers have reached it.
        await together.wait()
        inside -= 1

    jobs = [router.give("waits") for _ in range(9)]
    async with running(worker):
        await router.until(lambda: len(router.settled("Ack")) == len(jobs))
    assert most == 3


async def test_handlers_that_never_suspend_let_the_worker_report_meanwhile(router: FakeRouter, client: Client) -> None:
    worker = Worker(client, "q", concurrency=50)
    acked_before: list[int] = []

    @worker.handler("computes")
    async def computes(job: Job) -> None:
        acked_before.append(len(router.settled("Ack")))
        until_s = time.monotonic() + 0.01
        while time.monotonic() < until_s:
            pass

    jobs = [router.give("computes") for _ in range(40)]
    async with running(worker):
        await router.until(lambda: len(router.settled("Ack")) == len(jobs))
    assert acked_before[-1] > 0


async def test_what_a_handler_raises_decides_the_nack(router: FakeRouter, client: Client) -> None:
    worker = Worker(client, "q")

    @worker.handler("later")
    async def later(job: Job) -> None:
        raise Retry("busy", after=90)

    @worker.handler("never")
    def never(job: Job) -> None:
        raise Kill("no such user")

    @worker.handler("broken")
    async def broken(job: Job) -> None:
        raise ValueError("x" * 20_000 + " the end")

    @worker.handler("no json")
    async def no_json(job: Job) -> Any:
        return object()

    @worker.handler("cancelled")
    async def cancelled(job: Job) -> None:
        raise asyncio.CancelledError

    jobs = {kind: router.give(kind) for kind in ("later", "never", "broken", "no json", "cancelled")}
    async with running(worker):
        await router.until(lambda: len(router.settled("Nack")) == len(jobs))
    nacks = {nack.lease: nack for nack in router.nacks()}
    told = {kind: nacks[job.lease] for kind, job in jobs.items()}
    assert (told["later"].failure.message, told["later"].retry_after.seconds) == ("busy", 90)
    assert (told["never"].failure.type, told["never"].failure.message) == ("", "no such user")
    assert [nack.failure.permanent for nack in told.values()] == [False, True, False, False, False]
    broken_one = told["broken"].failure
    assert (broken_one.type, broken_one.message) == ("ValueError", "x" * 8192)
    assert broken_one.stack.startswith("Traceback (most recent call last):\n")
    assert broken_one.stack.endswith("x…")
    assert not told["broken"].HasField("retry_after")
    assert "this object is none of them" in told["no json"].failure.message
    assert told["cancelled"].failure.type == "asyncio.exceptions.CancelledError"
    assert "handlers.py" not in told["cancelled"].failure.stack.split("test_client_worker.py")[0]


async def test_a_result_that_is_too_large_is_dropped_with_a_warning_and_its_job_is_acked(
    router: FakeRouter, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    worker = Worker(client, "q", name="w1")

    @worker.handler("huge")
    async def huge(job: Job) -> bytes:
        return bytes(65_537)

    @worker.handler("just fits")
    async def just_fits(job: Job) -> bytes:
        return bytes(65_536)

    jobs = [router.give("huge"), router.give("just fits")]
    async with running(worker):
        await router.until(lambda: len(router.acks()) == 2)
    assert {ack.lease: len(ack.result) for ack in router.acks()} == {jobs[0].lease: 0, jobs[1].lease: 65_536}
    assert not router.nacks()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage() == (
        f"w1: job {jobs[0].id} (huge, queue q), attempt 1: its result has 65,537 bytes and is not stored; at "
        "most 65,536 are allowed"
    )


@pytest.mark.parametrize("raised", [TimeoutError, asyncio.CancelledError, asyncio.InvalidStateError])
async def test_an_error_that_futures_replace_keeps_the_traceback_of_its_plain_handler(
    router: FakeRouter, client: Client, caplog: pytest.LogCaptureFixture, raised: type[BaseException]
) -> None:
    worker = Worker(client, "q")

    @worker.handler("broken")
    def broken(job: Job) -> None:
        def innermost() -> None:
            raise raised("the bank did not answer")

        innermost()

    router.give("broken")
    async with running(worker):
        await router.until(router.nacks)
    (nack,) = router.nacks()
    (record,) = caplog.records
    for text in (nack.failure.stack, logging.Formatter().format(record)):
        assert "the bank did not answer" in text
        assert "in innermost" in text
        assert text.count("File ") == text.count(__file__) == 2


async def test_a_handler_that_snoozes_gives_its_job_back_for_a_while_and_nothing_failed(
    router: FakeRouter, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "windrow.worker")
    worker = Worker(client, "q", name="w1")

    @worker.handler("early")
    async def early(job: Job) -> None:
        raise Snooze("the report is not ready", after=timedelta(minutes=5))

    @worker.handler("early thread")
    def early_thread(job: Job) -> None:
        raise Snooze(after=0.25)

    jobs = [router.give("early", max_attempts=1), router.give("early thread")]
    async with running(worker):
        await router.until(lambda: len(router.settled("Snooze")) == 2)
    snoozes = {snooze.lease: snooze for message in router.of("Consume") for snooze in message.snoozes}
    assert [(snoozes[job.lease].after.ToTimedelta(), snoozes[job.lease].reason) for job in jobs] == [
        (timedelta(minutes=5), "the report is not ready"),
        (timedelta(seconds=0.25), ""),
    ]
    assert not router.nacks()
    lines = sorted((record.levelno, record.getMessage()) for record in caplog.records)
    assert lines == sorted(
        [
            (
                logging.INFO,
                f"w1: job {jobs[0].id} (early, queue q), attempt 1 is snoozed for 300 s: the report is not ready",
            ),
            (logging.INFO, f"w1: job {jobs[1].id} (early thread, queue q), attempt 1 is snoozed for 0.25 s"),
        ]
    )


@pytest.mark.parametrize("outcome", [Retry, Snooze])
def test_a_delay_that_is_a_text_is_named(outcome: type[Retry] | type[Snooze]) -> None:
    # The header Retry-After has the delay as a text.
    with pytest.raises(TypeError, match="after: '30' is neither a number of seconds nor a timedelta"):
        outcome("429", after=cast("Any", "30"))


@pytest.mark.parametrize("after", [-1, timedelta(days=3651), float("nan")])
def test_a_snooze_for_less_than_nothing_or_for_more_than_ten_years_is_refused(after: float | timedelta) -> None:
    with pytest.raises(ValueError, match=r"after must be 0 s to 3,650 days, not "):
        Snooze(after=after)


async def test_jobs_without_a_handler_are_given_back_uncounted_logged_together_and_measured(
    router: FakeRouter, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    reader = InMemoryMetricReader()
    worker = Worker(client, "q", name="w1", meter_provider=MeterProvider([reader]))
    worker.handler("old")(print)
    jobs = [router.give(f"new {n % 20}", max_attempts=1) for n in range(100)]
    async with running(worker):
        await router.until(lambda: len(router.settled("Snooze")) == len(jobs))
    assert not router.nacks()
    assert sorted(router.settled("Snooze")) == sorted(job.id for job in jobs)
    snoozes = [snooze for message in router.of("Consume") for snooze in message.snoozes]
    assert all(2.5 <= snooze.after.ToTimedelta().total_seconds() <= 5 for snooze in snoozes)
    assert {snooze.reason for snooze in snoozes} == {f"no handler for kind 'new {n}' in worker w1" for n in range(20)}
    (record,) = caplog.records
    assert record.getMessage() == (
        "w1: no handler for jobs of these kinds; they are given back uncounted, and run again within 300 s: "
        "1 of 'new 0'"
    )
    measured = reader.get_metrics_data()
    assert measured is not None
    (metric,) = measured.resource_metrics[0].scope_metrics[0].metrics
    (point,) = metric.data.data_points
    assert isinstance(point, NumberDataPoint)
    assert (metric.name, point.value, dict(point.attributes or {})) == (
        "windrow.worker.unhandled_jobs",
        100,
        {"messaging.destination.name": "q"},
    )


async def test_a_job_without_a_handler_is_not_taken_for_a_quick_one(router: FakeRouter, client: Client) -> None:
    worker = Worker(client, "q", concurrency=2, prefetch=50)
    async with running(worker):
        for count in range(1, 4):
            router.give("unknown")
            await router.until(lambda count=count: len(router.settled("Snooze")) == count)  # type: ignore[misc]
            # If the worker counted this job as a quick one, the worker would ask for 50 more jobs.
            assert sum(message.credit for message in router.of("Consume")) <= 2 + count


def test_the_pause_of_a_job_without_a_handler_grows_with_the_time_that_it_is_known() -> None:
    begin = datetime(2026, 1, 1, tzinfo=UTC)
    run_at, longest, shortest = begin, list[float](), list[float]()
    for _ in range(9):
        job = Job(enqueued_at=begin, run_at=run_at)
        longest.append(pause_s(job, luck=1.0))
        shortest.append(pause_s(job, luck=0.0))
        run_at += timedelta(seconds=longest[-1])
    assert longest == [5, 5, 10, 20, 40, 80, 160, 300, 300]
    assert [2 * pause for pause in shortest] == longest
    # The clock was set back between the two times.
    assert pause_s(Job(enqueued_at=begin, run_at=begin - timedelta(hours=1)), luck=1.0) == 5


async def test_a_failed_job_is_logged_once_as_loudly_as_it_matters(
    router: FakeRouter, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "windrow.worker")
    worker = Worker(client, "q", name="w1")

    @worker.handler("broken", "broken for good")
    async def broken(job: Job) -> None:
        raise ValueError("no such user\nas ada")

    @worker.handler("broken thread")
    def broken_thread(job: Job) -> None:
        raise ValueError("no such user\nas ada")

    @worker.handler("later", "later, in vain")
    async def later(job: Job) -> None:
        raise Retry("busy", after=90)

    @worker.handler("never")
    async def never(job: Job) -> None:
        raise Kill("no such user")

    expected = {
        "broken": (logging.WARNING, 1, "failed: ValueError: no such user", True),
        "broken thread": (logging.WARNING, 2, "failed: ValueError: no such user", True),
        "broken for good": (logging.ERROR, 3, "failed, its last: ValueError: no such user", True),
        "later": (logging.INFO, 2, "failed: busy; it runs again in 90 s", False),
        "later, in vain": (logging.ERROR, 3, "failed, its last: busy", False),
        "never": (logging.WARNING, 1, "failed, permanently: no such user", False),
    }
    jobs = {kind: router.give(kind, attempt=attempt, max_attempts=3) for kind, (_, attempt, _, _) in expected.items()}
    async with running(worker):
        await router.until(lambda: len(router.settled("Nack")) == len(jobs))
    for kind, (level, attempt, words, traced) in expected.items():
        (record,) = [record for record in caplog.records if jobs[kind].id in record.getMessage()]
        assert record.levelno == level
        assert record.getMessage() == f"w1: job {jobs[kind].id} ({kind}, queue q), attempt {attempt} of 3 {words}"
        # A traceback begins in the handler.
        text = logging.Formatter().format(record)
        assert text.count("Traceback") == traced
        assert text.count("File ") == text.count(__file__) == traced


async def test_a_failure_has_the_type_the_message_and_the_stack_of_what_was_raised(
    router: FakeRouter, client: Client
) -> None:
    worker = Worker(client, "q")

    @worker.handler("long")
    async def long(job: Job) -> None:
        raise ValueError("é" * 20_000 + " the end")

    @worker.handler("unwritten")
    async def unwritten(job: Job) -> None:
        compile("a b", "<rules>", "exec")

    jobs = [router.give("long"), router.give("unwritten")]
    async with running(worker):
        await router.until(lambda: len(router.settled("Nack")) == len(jobs))
    failures = {nack.lease: nack.failure for nack in router.nacks()}
    long_one, unwritten_one = failures[jobs[0].lease], failures[jobs[1].lease]
    assert (long_one.type, long_one.message) == ("ValueError", "é" * 4096)
    first, *_, last = long_one.stack.splitlines()
    assert (first, last[:14], last[-2:]) == ("Traceback (most recent call last):", "ValueError: éé", "é…")
    assert (unwritten_one.type, unwritten_one.message) == ("SyntaxError", "invalid syntax (<rules>, line 1)")


async def test_a_plain_function_that_raises_stop_iteration_fails_and_the_worker_goes_on(
    router: FakeRouter, client: Client
) -> None:
    """A future cannot hold a `StopIteration`. Without special care, the worker would wait for the thread's answer for
    ever."""
    worker = Worker(client, "q", concurrency=1)

    @worker.handler("empty")
    def empty(job: Job) -> str:
        return next(iter(()))

    @worker.handler("good")
    def good(job: Job) -> None:
        pass

    failed, done = router.give("empty"), router.give("good")
    async with running(worker):
        await router.until(lambda: router.settled("Ack") == [done.id])
    assert router.settled("Nack") == [failed.id]
    (nack,) = router.nacks()
    assert (nack.failure.type, nack.failure.message) == ("RuntimeError", "the handler raised StopIteration")


class Panic(BaseException):
    """A BaseException that is no Exception, like pyo3's PanicException and the outcomes of pytest."""


class RateLimited(Retry):
    """An exception whose `__init__` does not call the `__init__` of its base class."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds


class AskingTooMuch(Retry):
    def __init__(self) -> None:
        self.after = float("nan")


class Wordless:
    def __str__(self) -> str:
        raise Panic("no words")

    __repr__ = __str__


class WordlessError(Exception):
    def __str__(self) -> str:
        raise Panic("no words")


@pytest.mark.parametrize("in_thread", [False, True], ids=["async def", "def"])
@pytest.mark.parametrize(
    ("error", "told"),
    [
        (Panic("rust"), "Panic: rust"),
        (SystemExit(3), "SystemExit: 3"),
        (GeneratorExit(), "GeneratorExit"),
        (asyncio.CancelledError(), "CancelledError"),
        (BaseExceptionGroup("several", [Panic("rust")]), "BaseExceptionGroup: several"),
        (RateLimited(3), "AttributeError: 'RateLimited' object has no attribute 'after'"),
        (AskingTooMuch(), "ValueError: after must be 0 s to 3,650 days"),
        (Kill(Wordless()), ": <exception str() failed>"),  # type: ignore[arg-type]
        (WordlessError(), "WordlessError: <exception str() failed>"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
async def test_no_error_of_a_handler_ends_the_worker_or_is_kept_from_its_job(
    router: FakeRouter,
    client: Client,
    caplog: pytest.LogCaptureFixture,
    error: BaseException,
    told: str,
    in_thread: bool,
) -> None:
    worker = Worker(client, "q", concurrency=2)
    finish = asyncio.Event()

    async def broken(job: Job) -> None:
        raise error

    def broken_in_a_thread(job: Job) -> None:
        raise error

    worker.handler("broken")(broken_in_a_thread if in_thread else broken)

    @worker.handler("beside")
    async def beside(job: Job) -> None:
        await finish.wait()

    other, job = router.give("beside"), router.give("broken")
    async with running(worker):
        await router.until(router.nacks)
        finish.set()
        await router.until(router.acks)
    (nack,) = router.nacks()
    assert nack.lease == job.lease
    assert told in f"{nack.failure.type}: {nack.failure.message}"
    assert nack.failure.permanent == isinstance(error, Kill)
    assert router.settled("Ack") == [other.id]
    (record,) = [record for record in caplog.records if job.id in record.getMessage()]
    assert record.levelno == logging.WARNING
    assert told in record.getMessage()


async def test_a_handler_that_takes_no_job_fails_its_job_and_not_the_worker(router: FakeRouter, client: Client) -> None:
    worker = Worker(client, "q")

    async def wrong() -> None:
        pass

    worker.handler("wrong")(cast("Any", wrong))
    router.give("wrong")
    async with running(worker):
        await router.until(router.nacks)
    (nack,) = router.nacks()
    assert nack.failure.type == "TypeError"
    assert "takes 0 positional arguments" in nack.failure.message


async def test_a_handler_that_sets_a_field_of_its_job_fails_its_attempt_and_not_the_worker(
    router: FakeRouter, client: Client
) -> None:
    worker = Worker(client, "q")

    @worker.handler("sets")
    async def sets(job: Job) -> None:
        setattr(job, job.text(), None)

    names = [field.name for field in fields(Job)]
    for name in names:
        router.give("sets", name.encode())
    async with running(worker):
        await router.until(lambda: len(router.nacks()) == len(names))
    messages = {nack.failure.message for nack in router.nacks()}
    assert messages == {f"cannot assign to field {name!r}" for name in names}


async def test_threads_and_the_worker_see_the_same_sign_that_a_job_is_lost() -> None:
    for _ in range(50):
        job = read_leased(job_pb2.LeasedJob(id="i"))
        at_once = threading.Barrier(4)

        def look(job: Job = job, at_once: threading.Barrier = at_once) -> Lost:
            at_once.wait(WAIT_S)
            return job.lost

        looks = await asyncio.gather(*(asyncio.to_thread(look) for _ in range(4)))
        assert {id(lost) for lost in looks} == {id(job.lost)}
    with pytest.raises(AttributeError, match="'Job' object has no attribute 'los'"):
        _ = cast("Any", Job()).los


async def test_an_error_with_half_a_character_is_told_without_it(router: FakeRouter, client: Client) -> None:
    """The text of the error has half of a surrogate pair. Python makes such a text from a file name that is not UTF-8.
    A protobuf message cannot hold such a text."""
    worker = Worker(client, "q")

    @worker.handler("broken")
    async def broken(job: Job) -> None:
        raise ValueError("no file \udcff")

    @worker.handler("later")
    def later(job: Job) -> None:
        raise Retry("no file \udcff")

    @worker.handler("never")
    async def never(job: Job) -> None:
        raise Kill("no file \udcff")

    jobs = [router.give(kind) for kind in ("broken", "later", "never")]
    async with running(worker):
        await router.until(lambda: len(router.settled("Nack")) == len(jobs))
    nacks = router.nacks()
    assert {nack.lease for nack in nacks} == {job.lease for job in jobs}
    assert [nack.failure.message for nack in nacks] == ["no file ?"] * 3


async def test_acks_gather_while_messages_are_unanswered(router: FakeRouter, client: Client) -> None:
    worker = Worker(client, "q", concurrency=50)
    firsts_are_out = asyncio.Event()
    let_go = asyncio.Event()

    async def slow_firsts(message: Any, stream: FakeStream) -> queue_pb2.Settled:
        if message.request_id == 2:
            firsts_are_out.set()
        await let_go.wait()
        return queue_pb2.Settled()

    router.scripts["Settle"] = slow_firsts

    @worker.handler("first")
    async def first(job: Job) -> None:
        pass

    @worker.handler("second")
    async def second(job: Job) -> None:
        await router.until(router.acks)

    @worker.handler("rest")
    async def rest(job: Job) -> None:
        await firsts_are_out.wait()
        done.append(job.id)
        if len(done) == 48:
            let_go.set()

    done: list[str] = []
    router.give("first")
    router.give("second")
    for _ in range(48):
        router.give("rest")
    async with running(worker):
        await router.until(lambda: len(router.acks()) == 50)
    messages = [len(message.acks) for message in router.of("Consume") if message.acks]
    assert messages[:2] == [1, 1]
    assert len(messages) <= 4


async def test_leases_are_extended_together(router: FakeRouter, client: Client) -> None:
    # The window is long, so that even a busy machine extends the leases in time.
    worker = Worker(client, "q", visibility_window=1.5)
    finish = asyncio.Event()

    @worker.handler("slow")
    async def slow(job: Job) -> None:
        await finish.wait()

    jobs = [router.give("slow") for _ in range(4)]

    def extended() -> list[Any]:
        return [[one.lease for one in message.extends] for message in router.of("Consume") if message.extends]

    async with running(worker):
        await router.until(lambda: len(extended()) >= 4)
        assert router.stream.start.visibility_window.ToMilliseconds() == 1500
        assert all(sorted(leases) == sorted(job.lease for job in jobs) for leases in extended())
        finish.set()
        await router.until(lambda: len(router.settled("Ack")) == 4)


async def test_a_job_that_waits_too_long_goes_back_to_whoever_has_a_free_hand(
    router: FakeRouter, client: Client
) -> None:
    worker = Worker(client, "q", concurrency=1, prefetch=2, visibility_window=1.5)
    finish = asyncio.Event()

    @worker.handler("quick")
    async def quick(job: Job) -> None:
        pass

    @worker.handler("slow")
    async def slow(job: Job) -> None:
        await finish.wait()

    router.give("quick")
    async with running(worker):
        # The worker prefetches only after a quick job.
        await router.until(lambda: router.acks() and router.stream.credit == 3)
        runs, *wait = [router.give("slow") for _ in range(3)]
        await router.until(lambda: len(router.settled("Release")) == 2)
        assert sorted(router.settled("Release")) == sorted(job.id for job in wait)
        assert runs.id not in router.settled("Release")
        # The worker asks for no more jobs, because they would only wait in the worker.
        assert router.stream.credit == 0
        finish.set()
        await router.until(lambda: len(router.acks()) == 2)


async def test_a_job_whose_lease_is_short_by_its_max_runtime_goes_back_uncounted_when_it_waits(
    router: FakeRouter, client: Client
) -> None:
    worker = Worker(client, "q", concurrency=1, prefetch=2, visibility_window=600)
    finish = asyncio.Event()

    @worker.handler("quick")
    async def quick(job: Job) -> None:
        pass

    @worker.handler("slow")
    async def slow(job: Job) -> None:
        await finish.wait()

    router.give("quick")
    async with running(worker):
        await router.until(lambda: router.acks() and router.stream.credit == 3)
        router.give("slow")
        wait = [router.give("slow", max_runtime=Duration(seconds=2)) for _ in range(2)]
        await router.until(lambda: len(router.settled("Release")) == 2)
        assert sorted(router.settled("Release")) == sorted(job.id for job in wait)
        finish.set()
        await router.until(lambda: len(router.acks()) == 2)


async def test_a_handler_is_stopped_while_the_router_still_takes_its_failure(
    router: FakeRouter, client: Client
) -> None:
    worker = Worker(client, "q", visibility_window=600)

    @worker.handler("hangs")
    async def hangs(job: Job) -> None:
        await asyncio.Event().wait()

    # The lease ends 0.9 s after the handler is stopped; a failure later than that would not be sent.
    router.give("hangs", max_runtime=Duration(seconds=9))
    async with running(worker):
        await router.until(router.nacks)
    (nack,) = router.nacks()
    assert (nack.failure.type, nack.failure.message) == (
        "windrow.TimedOut",
        "the attempt has used up the job's max_runtime of 9 s",
    )


async def test_a_stale_lease_cancels_its_handler_and_is_not_acked(
    router: FakeRouter, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    worker = Worker(client, "q", visibility_window=1.5)
    ended: list[tuple[str, bool]] = []
    over = asyncio.Event()
    lost = router.give("wait")
    kept = router.give("wait")

    async def stale(message: Any, stream: FakeStream) -> queue_pb2.Settled:
        named = [one.lease for one in (*message.acks, *message.extends)]
        return settled_as(STALE, *(lease for lease in named if lease == lost.lease))

    router.scripts["Settle"] = stale

    @worker.handler("wait")
    async def wait(job: Job) -> None:
        try:
            await over.wait()
        finally:
            ended.append((job.id, job.lost.is_set()))

    async with running(worker):
        # Four extends take longer than a window.
        await router.until(lambda: router.settled("Extend").count(kept.id) >= 4)
        over.set()
        await router.until(lambda: kept.id in router.settled("Ack"))
    assert ended == [(lost.id, True), (kept.id, False)]
    assert router.settled("Ack") == [kept.id]
    assert not router.nacks()
    assert not router.settled("Release")
    assert f"lost the lease of job {lost.id}" in caplog.text


async def test_a_thread_that_lost_its_lease_is_told_and_not_acked(router: FakeRouter, client: Client) -> None:
    worker = Worker(client, "q", visibility_window=0.2)
    saw = threading.Event()

    async def stale(message: Any, stream: FakeStream) -> queue_pb2.Settled:
        return settled_as(STALE, *(one.lease for one in message.extends))

    router.scripts["Settle"] = stale
    done = asyncio.Event()
    loop = asyncio.get_running_loop()

    @worker.handler("long")
    def long(job: Job) -> None:
        while not job.lost.is_set():
            saw.wait(0.01)
        loop.call_soon_threadsafe(done.set)

    router.give("long")
    async with running(worker):
        await done.wait()
    assert not router.acks()


async def test_a_lease_that_cannot_be_extended_ends_by_the_workers_own_clock(
    router: FakeRouter, client: Client
) -> None:
    worker = Worker(client, "q", visibility_window=0.4)
    ended = asyncio.Event()

    async def unanswered(message: Any, stream: FakeStream) -> None:
        return None

    router.scripts["Settle"] = unanswered

    @worker.handler("wait")
    async def wait(job: Job) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            assert job.lost.is_set()
            ended.set()

    router.give("wait")
    task = asyncio.create_task(worker.run())
    await ended.wait()
    worker.stop()
    worker.stop()
    await stopped(task)
    assert not router.acks()


async def test_a_job_whose_lease_is_lost_before_its_first_step_leaves_its_place_to_the_next(
    router: FakeRouter, client: Client
) -> None:
    """A task that is cancelled before its first step runs no line of its coroutine."""
    worker = Worker(client, "q", concurrency=1, prefetch=2)
    finish = asyncio.Event()
    handled: list[str] = []
    lost: list[str] = []

    @worker.handler("quick")
    async def quick(job: Job) -> None:
        handled.append(job.id)

    @worker.handler("slow")
    async def slow(job: Job) -> None:
        await finish.wait()
        following = worker._runner._waiting[0]
        lost.append(following.job.id)
        # The end of this handler creates the task of the next job. This callback runs after that, and before the first
        # step of the new task.
        asyncio.get_running_loop().call_soon(worker._runner.leases.lose, following, "the loop had stood still")

    router.give("quick")
    async with running(worker):
        # The worker prefetches only after it has run a quick job.
        await router.until(lambda: router.acks() and router.stream.credit == 3)
        router.give("slow")
        second, third = router.give("quick"), router.give("quick")
        await router.until(lambda: len(worker._runner._waiting) == 2)
        finish.set()
        await router.until(lambda: third.id in router.settled("Ack"))
        assert lost == [second.id]
        assert second.id not in handled
        assert not worker._runner._running
        await router.until(lambda: not worker._runner.leases)


async def test_a_job_cut_off_before_its_first_step_is_released(router: FakeRouter, client: Client) -> None:
    worker = Worker(client, "q", concurrency=1, prefetch=1)
    finish = asyncio.Event()

    @worker.handler("quick")
    async def quick(job: Job) -> None:
        pass

    @worker.handler("slow")
    async def slow(job: Job) -> None:
        await finish.wait()
        # This wakes `run()` first. The task of the next job is created later, and so it runs later.
        task.cancel()

    router.give("quick")
    task = asyncio.create_task(worker.run())
    await router.until(lambda: router.acks() and router.stream.credit == 2)
    router.give("slow")
    following = router.give("quick")
    await router.until(lambda: worker._runner._waiting)
    finish.set()
    with pytest.raises(asyncio.CancelledError):
        await stopped(task)
    assert router.settled("Release") == [following.id]


async def test_a_job_whose_lease_is_over_is_not_begun(
    router: FakeRouter, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    """The worker has not noticed the end of the lease, because the loop stood still for longer than the window, and
    `keep()` has not run since then."""
    worker = Worker(client, "q", visibility_window=600, cancel_lost=False)
    begun: list[str] = []

    @worker.handler("first")
    async def first(job: Job) -> None:
        begun.append(job.id)
        for held in worker._runner._waiting:
            held.renewed_at -= 3600

    @worker.handler("second")
    async def second(job: Job) -> None:
        begun.append(job.id)

    # Both jobs arrive in one message, and the second one runs after the first one.
    jobs = [router.give("first"), router.give("second")]
    async with running(worker):
        await router.until(router.acks)
    assert begun == [jobs[0].id]
    assert router.settled("Ack") == [jobs[0].id]
    assert not router.settled("Nack") + router.settled("Release") + router.settled("Extend")
    assert f"lost the lease of job {jobs[1].id}" in caplog.text
    assert not worker._runner.leases


async def test_stopping_releases_what_waits_and_lets_finish_what_runs(router: FakeRouter, client: Client) -> None:
    worker = Worker(client, "q", concurrency=1)
    started, finish = asyncio.Event(), asyncio.Event()

    @worker.handler("quick")
    async def quick(job: Job) -> None:
        pass

    @worker.handler("slow")
    async def slow(job: Job) -> None:
        started.set()
        await finish.wait()

    router.give("quick")
    task = asyncio.create_task(worker.run())
    await router.until(lambda: router.acks() and router.stream.credit > 1)
    runs, waits = router.give("slow"), router.give("slow")
    await router.until(lambda: started.is_set() and not router.jobs)
    worker.stop()
    await router.until(lambda: router.settled("Release"))
    # The router had already sent this job when the worker stopped.
    late = router.give("slow")
    await router.until(lambda: len(router.settled("Release")) == 2)
    assert router.settled("Release") == [waits.id, late.id]
    given = sum(message.credit for message in router.stream.messages)
    finish.set()
    await stopped(task)
    assert router.settled("Ack")[-1] == runs.id
    assert sum(message.credit for message in router.stream.messages) == given
    assert router.stream.ended is StatusCode.OK


async def test_after_the_grace_handlers_are_cancelled_and_released(
    router: FakeRouter, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "windrow")
    worker = Worker(client, "q", name="w1", grace=0.05)
    started, reasons = asyncio.Event(), list[LostReason | None]()

    @worker.handler("slow")
    async def slow(job: Job) -> None:
        started.set()
        try:
            await asyncio.sleep(60)
        finally:
            reasons.append(job.lost.reason)

    job = router.give("slow")
    task = asyncio.create_task(worker.run())
    await started.wait()
    worker.stop()
    await stopped(task)
    assert router.settled("Release") == [job.id]
    assert not router.nacks()
    assert reasons == [LostReason.STOPPED]
    told = [record.getMessage() for record in caplog.records]
    assert "w1: stopping; handlers that have 0.05 s to finish: 1" in told
    assert "w1: cancelling handlers that did not finish in time: 1" in told


@pytest.mark.parametrize("batch", [False, True])
@pytest.mark.parametrize(
    ("end", "verb"),
    [(None, "Release"), (ValueError("the connection is busy"), "Release"), (Retry(after=60), "Nack"), (Kill(), "Nack")],
)
async def test_a_handler_that_the_worker_cancels_is_neither_acked_nor_failed_unless_it_chooses_so(
    router: FakeRouter, client: Client, end: Exception | None, verb: str, batch: bool
) -> None:
    worker = Worker(client, "q", grace=0)
    started = asyncio.Event()

    async def work() -> None:
        started.set()
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        if end is not None:
            raise end

    @worker.handler("one")
    async def one(_: Job) -> str:
        await work()
        return "done by half"

    @worker.batch_handler("many")
    async def many(_: Sequence[Job]) -> None:
        await work()

    job = router.give("many" if batch else "one")
    task = asyncio.create_task(worker.run())
    await started.wait()
    worker.stop()
    await stopped(task)
    assert {each: router.settled(each) for each in ("Ack", "Nack", "Release")} == {
        "Ack": [],
        "Nack": [],
        "Release": [],
        verb: [job.id],
    }


async def test_a_handler_that_blocks_the_event_loop_is_warned_of(
    router: FakeRouter, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    worker = Worker(client, "q", name="w1", visibility_window=0.15)

    @worker.handler("blocks")
    async def blocks(job: Job) -> None:
        # The handler blocks the event loop for longer than the lease.
        threading.Event().wait(0.2)

    router.give("blocks")
    async with running(worker):
        await router.until(lambda: any("was blocked" in record.getMessage() for record in caplog.records))


async def test_a_second_stop_does_not_wait_for_the_grace(router: FakeRouter, client: Client) -> None:
    worker = Worker(client, "q", grace=60)
    started = asyncio.Event()

    @worker.handler("slow")
    async def slow(job: Job) -> None:
        started.set()
        await asyncio.sleep(60)

    job = router.give("slow")
    task = asyncio.create_task(worker.run())
    await started.wait()
    worker.stop()
    worker.stop()
    await stopped(task)
    assert router.settled("Release") == [job.id]


async def test_a_thread_that_does_not_end_is_not_given_to_another_worker(
    router: FakeRouter, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    worker = Worker(client, "q", name="w1", grace=0.05)
    started, finish = threading.Event(), threading.Event()

    @worker.handler("slow")
    def slow(job: Job) -> None:
        started.set()
        finish.wait(WAIT_S)

    job = router.give("slow")
    task = asyncio.create_task(worker.run())
    await asyncio.to_thread(started.wait)
    worker.stop()
    await stopped(task)
    finish.set()
    assert not router.settled("Release")
    assert [record.getMessage() for record in caplog.records] == [
        f"w1: job {job.id} (slow, queue q) still runs in its thread; its lease will expire",
        "w1: has stopped; 1 handler thread(s) still run, and keep the process alive; another signal ends it",
    ]


async def test_a_job_whose_thread_ends_when_the_worker_stops_is_released(router: FakeRouter, client: Client) -> None:
    worker = Worker(client, "q")
    begun, go, ended = threading.Event(), threading.Event(), threading.Event()

    @worker.handler("work")
    def work(job: Job) -> None:
        begun.set()
        go.wait(WAIT_S)

    job = router.give()
    task = asyncio.create_task(worker.run())
    await router.until(begun.is_set)
    # The worker cancels the handler after the thread of the handler has ended, and before the task of the handler
    # notices that end.
    (thread,) = worker._handlers.threads._running
    thread.add_done_callback(lambda _: ended.set())
    worker.stop()
    worker.stop()
    go.set()
    ended.wait(WAIT_S)
    async with asyncio.timeout(WAIT_S):
        await task
    assert router.settled("Release") == [job.id]


async def test_a_job_whose_thread_has_only_just_begun_is_not_given_to_another_worker(
    router: FakeRouter, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = Worker(client, "q", name="w1", grace=0.05)
    begun, go_on, ran = threading.Event(), threading.Event(), threading.Event()

    def thread_id() -> int:
        begun.set()
        go_on.wait(WAIT_S)
        return threading.get_ident()

    monkeypatch.setattr("windrow.handler_threads.threading", SimpleNamespace(get_ident=thread_id))

    @worker.handler("slow")
    def slow(job: Job) -> None:
        ran.set()

    router.give("slow")
    task = asyncio.create_task(worker.run())
    await asyncio.to_thread(begun.wait)
    worker.stop()
    await stopped(task)
    go_on.set()
    assert await asyncio.to_thread(ran.wait, WAIT_S)
    assert not router.settled("Release")


ENDLESS = """
import sys, threading, windrow

worker = windrow.Worker(windrow.Client(sys.argv[1], org="acme"), "q", grace=0)

@worker.handler("endless")
def endless(job):
    job_is_lost.append(job.lost)
    print("begun", flush=True)
    threading.Event().wait()

job_is_lost = []
windrow.run(worker)
print("stopped", job_is_lost[0].is_set(), flush=True)
"""


async def test_a_thread_that_never_ends_keeps_the_process_until_one_more_signal(router: FakeRouter) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", ENDLESS, router.address, cwd=CHECKOUT, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(3 * WAIT_S):
            router.give("endless")
            assert await process.stdout.readline() == b"begun\n"
            process.send_signal(signal.SIGTERM)
            assert await process.stdout.readline() == b"stopped True\n"
            process.send_signal(signal.SIGTERM)
            assert await process.wait() == -signal.SIGTERM
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert not router.settled("Release")


INTERRUPTED = """
import sys, windrow

worker = windrow.Worker(windrow.Client(sys.argv[1], org="acme"), "q")

@worker.handler("one")
async def one(job):
    raise KeyboardInterrupt

@worker.batch_handler("many", max_jobs=2)
async def many(jobs):
    raise KeyboardInterrupt

windrow.run(worker)
"""


@pytest.mark.parametrize("kind", ["one", "many"])
async def test_a_handler_that_is_interrupted_ends_the_worker_which_gives_its_jobs_back(
    router: FakeRouter, kind: str
) -> None:
    jobs = [router.give(kind), router.give(kind)]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", INTERRUPTED, router.address, cwd=CHECKOUT, stderr=asyncio.subprocess.DEVNULL
    )
    async with asyncio.timeout(3 * WAIT_S):
        assert await process.wait() == -signal.SIGINT
    assert sorted(router.settled("Release")) == sorted(job.id for job in jobs)


async def test_a_signal_stops_a_worker_of_the_main_thread(router: FakeRouter, client: Client) -> None:
    worker = Worker(client, "q")
    before = signal.getsignal(signal.SIGTERM)
    task = asyncio.create_task(worker.run())
    await router.until(lambda: router.streams)
    os.kill(os.getpid(), signal.SIGTERM)
    await stopped(task)
    assert signal.getsignal(signal.SIGTERM) is before


HANGS = """
import asyncio, logging, sys, windrow

logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(message)s")
worker = windrow.Worker(windrow.Client(sys.argv[1], org="acme"), "q", name="w1")

@worker.handler("hangs")
async def hangs(job):
    print("begun", flush=True)
    try:
        await asyncio.Event().wait()
    finally:
        print("cancelled", flush=True)
        await asyncio.Event().wait()

windrow.run(worker)
"""


async def test_a_third_signal_ends_a_worker_whose_handler_does_not_end_when_it_is_cancelled(router: FakeRouter) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", HANGS, router.address, cwd=CHECKOUT, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(3 * WAIT_S):
            router.give("hangs")
            for line in (b"begun\n", b"w1: stopping; handlers that have 20 s to finish: 1\n", b"cancelled\n"):
                while await process.stdout.readline() != line:
                    pass
                process.send_signal(signal.SIGTERM)
            assert await process.wait() == -signal.SIGTERM
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@pytest.mark.parametrize("by_loop", [False, True])
async def test_a_worker_leaves_signals_to_a_program_that_handles_them(
    router: FakeRouter, client: Client, by_loop: bool
) -> None:
    """The worker may be a task in the process of a web server, which ends its workers itself."""
    loop, worker, seen = asyncio.get_running_loop(), Worker(client, "q"), asyncio.Event()
    before = signal.getsignal(signal.SIGTERM)
    if by_loop:
        loop.add_signal_handler(signal.SIGTERM, seen.set)
    else:
        signal.signal(signal.SIGTERM, lambda *_: seen.set())
    try:
        async with running(worker) as task:
            await router.until(lambda: router.streams)
            os.kill(os.getpid(), signal.SIGTERM)
            async with asyncio.timeout(WAIT_S):
                await seen.wait()
            assert not task.done()
        seen.clear()
        os.kill(os.getpid(), signal.SIGTERM)
        async with asyncio.timeout(WAIT_S):
            await seen.wait()
    finally:
        loop.remove_signal_handler(signal.SIGTERM)
        signal.signal(signal.SIGTERM, before)


OWN_HANDLER = """
import signal, sys, windrow

signal.signal(signal.SIGTERM, lambda *_: print("not taken", flush=True))
windrow.run(windrow.Worker(windrow.Client(sys.argv[1], org="acme"), "q"))
print("stopped", flush=True)
"""


async def test_a_script_takes_signals_although_the_program_handles_them(router: FakeRouter) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", OWN_HANDLER, router.address, cwd=CHECKOUT, stdout=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(3 * WAIT_S):
            await router.until(lambda: router.streams, within_s=2 * WAIT_S)
            process.send_signal(signal.SIGTERM)
            output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert output == b"stopped\n"


async def test_a_cancelled_worker_says_what_is_done_and_releases_the_rest(router: FakeRouter, client: Client) -> None:
    worker = Worker(client, "q", concurrency=1)
    started = asyncio.Event()

    @worker.handler("quick")
    async def quick(job: Job) -> None:
        pass

    @worker.handler("slow")
    async def slow(job: Job) -> None:
        started.set()
        await asyncio.sleep(60)

    router.give("quick")
    task = asyncio.create_task(worker.run())
    await router.until(lambda: router.acks() and router.stream.credit > 1)
    jobs = [router.give("slow"), router.give("slow")]
    await router.until(lambda: started.is_set() and not router.jobs)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert sorted(router.settled("Release")) == sorted(job.id for job in jobs)


async def test_an_outage_is_logged_once_and_its_end_once(
    router: FakeRouter, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "windrow.worker")
    worker = Worker(client, "q")
    handled = asyncio.Event()

    @worker.handler("work")
    async def work(job: Job) -> None:
        handled.set()

    router.scripts["Consume"] = refusing(4, StatusCode.UNAVAILABLE)
    router.give("work")
    async with running(worker):
        await handled.wait()
    assert len(router.streams) == 5
    told = [record.getMessage() for record in caplog.records if record.name == "windrow.worker"]
    assert sum("cannot be reached" in message for message in told) == 1
    assert sum("reached again" in message for message in told) == 1


async def test_one_refused_ack_does_not_hold_up_the_others(router: FakeRouter, client: Client) -> None:
    worker = Worker(client, "q", concurrency=3)
    bad = router.give("work")
    good = [router.give("work") for _ in range(2)]
    ready = asyncio.Barrier(3)

    async def picky(message: Any, stream: FakeStream) -> queue_pb2.Settled:
        if any(ack.lease == bad.lease for ack in message.acks):
            return queue_pb2.Settled(error=status_pb2.Status(code=3, message="malformed lease"))
        accepted.extend(ack.lease for ack in message.acks)
        return queue_pb2.Settled()

    router.scripts["Settle"] = picky
    accepted: list[bytes] = []

    @worker.handler("work")
    async def work(job: Job) -> None:
        await ready.wait()

    async with running(worker):
        await router.until(lambda: len(accepted) == 2)
    assert sorted(accepted) == sorted(job.lease for job in good)


async def test_an_error_that_time_cannot_heal_ends_the_worker(router: FakeRouter, client: Client) -> None:
    # Refuse every stream. If gRPC is writing when a stream ends, it does not report the status, and the worker opens
    # another stream.
    router.scripts["Consume"] = refusing(1_000, StatusCode.PERMISSION_DENIED, "no token")
    with pytest.raises(PermissionDenied, match="no token"):
        await Worker(client, "q").run()


async def test_a_router_that_knows_no_streams_ends_the_worker_and_is_named() -> None:
    """The worker need not wait, because this router will never offer streams."""
    router = aio.server()
    address = f"127.0.0.1:{router.add_insecure_port('127.0.0.1:0')}"
    await router.start()
    try:
        async with Client(address, org="acme") as client, asyncio.timeout(WAIT_S):
            with pytest.raises(RouterTooOld, match=f"Consume at {address}: .* upgrade the routers first"):
                await Worker(client, "q").run()
    finally:
        await router.stop(None)


async def test_no_more_is_asked_for_than_can_run_until_handlers_prove_quick(router: FakeRouter, client: Client) -> None:
    worker = Worker(client, "q", concurrency=2)
    finish = asyncio.Event()
    running_now = 0

    @worker.handler("slow")
    async def slow(job: Job) -> None:
        nonlocal running_now
        running_now += 1
        assert running_now <= 2
        await finish.wait()
        running_now -= 1

    for _ in range(6):
        router.give("slow")
    async with running(worker):
        await router.until(lambda: running_now == 2)
        assert len(router.jobs) == 4
        finish.set()
        await router.until(lambda: len(router.settled("Ack")) == 6)


async def test_a_handler_that_hangs_is_stopped_at_its_timeout_and_its_place_is_free(
    router: FakeRouter, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    worker = Worker(client, "q", name="w1", concurrency=1, prefetch=0)
    reasons: list[LostReason | None] = []
    hangs = threading.Event()
    told = threading.Event()

    @worker.handler("coroutine", timeout=0.02)
    async def coroutine(job: Job) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            reasons.append(job.lost.reason)

    # The timeout is long, so that even a busy machine starts the thread before it ends.
    @worker.handler("thread", timeout=timedelta(seconds=0.5))
    def thread(job: Job) -> None:
        hangs.wait(WAIT_S)
        reasons.append(job.lost.reason)
        told.set()

    @worker.handler("quick", timeout=WAIT_S)
    async def quick(job: Job) -> None: ...

    jobs = {router.give(kind).id: kind for kind in ("coroutine", "thread", "quick")}
    async with running(worker):
        await router.until(router.acks)
        hangs.set()
        await asyncio.to_thread(told.wait, WAIT_S)
    assert reasons == [LostReason.TIMED_OUT] * 2
    assert [jobs[nack.lease.decode()] for nack in router.nacks()] == ["coroutine", "thread"]
    lines = ("await asyncio.Event().wait()", "hangs.wait(WAIT_S)")
    for nack, timeout, last in zip(router.nacks(), ("0.02 s", "0.5 s"), lines, strict=True):
        failure = nack.failure
        assert (failure.type, failure.permanent) == ("windrow.TimedOut", False)
        assert failure.message == f"the handler did not finish within {timeout}"
        # The stack begins at the handler.
        assert failure.stack.split("\n")[1].startswith(f'  File "{__file__}"')
        assert last in failure.stack
        assert failure.stack.endswith(f"\nwindrow.TimedOut: the handler did not finish within {timeout}")
    # A timeout is expected. So the worker logs one line, which says what the handler was doing, and no traceback.
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2
    for record, kind in zip(caplog.records, ("coroutine", "thread"), strict=True):
        (line,) = logging.Formatter().format(record).splitlines()
        assert re.search(rf"\({kind}, queue q\), attempt 1 of 20 failed: windrow\.TimedOut: the handler did not", line)
        assert re.search(rf"; it was in {kind} \({re.escape(__file__)}:\d+\), in wait \(.*\.py:\d+\)$", line)


async def test_a_handler_that_ends_by_its_timeout_or_in_spite_of_it_says_itself_how(
    router: FakeRouter, client: Client
) -> None:
    worker = Worker(client, "q", concurrency=1)

    @worker.handler("own", timeout=WAIT_S)
    async def own(job: Job) -> None:
        raise TimeoutError("of the bank")

    @worker.handler("finishes", timeout=0.02)
    async def finishes(job: Job) -> str:
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        return "all the same"

    @worker.handler("cleans up", timeout=0.02)
    async def cleans_up(job: Job) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            raise Retry("cleaned up", after=1)

    jobs = [router.give(kind) for kind in ("own", "finishes", "cleans up")]
    async with running(worker):
        await router.until(lambda: len(router.nacks()) == 2 and router.acks())
    assert [(ack.lease, ack.result) for ack in router.acks()] == [(jobs[1].lease, b"all the same")]
    assert [(nack.failure.type, nack.failure.message) for nack in router.nacks()] == [
        ("TimeoutError", "of the bank"),
        ("", "cleaned up"),
    ]


async def test_a_handler_that_gets_no_thread_fails_and_does_not_run_later(
    router: FakeRouter, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = Worker(client, "q")
    begun: list[str] = []
    go = threading.Event()

    @worker.handler("work")
    def work(job: Job) -> None:
        begun.append(job.id)
        go.wait(WAIT_S)

    def refuse_thread(_: object) -> None:
        raise RuntimeError("can't start new thread")

    first = router.give()
    async with running(worker):
        await router.until(lambda: begun)
        with monkeypatch.context() as no_threads:
            no_threads.setattr(ThreadPoolExecutor, "_adjust_thread_count", refuse_thread)
            router.give()
            await router.until(router.nacks)
        third = router.give()
        go.set()
        await router.until(lambda: len(router.acks()) == 2)
    assert router.nacks()[0].failure.message == "can't start new thread"
    assert begun == [first.id, third.id]


async def test_so_many_threads_are_left_alone_and_then_each_keeps_its_place(
    router: FakeRouter, client: Client, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("windrow.handler_threads._ABANDONED_MAX", 1)
    worker = Worker(client, "q", name="w1", concurrency=2, prefetch=0)
    over = threading.Event()

    @worker.handler("hang", timeout=0.02)
    def hang(job: Job) -> None:
        over.wait(WAIT_S)

    @worker.handler("quick")
    async def quick(job: Job) -> None: ...

    for _ in range(3):
        router.give("hang")
    async with running(worker):
        await router.until(lambda: len(router.nacks()) == 3)
        router.give("quick")
        # A job that comes although there is no credit waits, too.
        await router.stream.send(router.jobs.popleft())
        assert not router.acks()
        over.set()
        await router.until(router.acks)
    (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert "more than 1 threads of handlers that timed out still run" in record.getMessage()


@pytest.mark.parametrize("timeout", [0, -1, math.inf, math.nan])
async def test_a_timeout_that_makes_no_sense_is_refused(client: Client, timeout: float) -> None:
    with pytest.raises(InvalidRequest, match="timeout must be more than 0 s, not "):
        Worker(client, "q").handler("kind", timeout=timeout)


async def test_a_way_of_isolation_that_does_not_exist_is_refused(client: Client) -> None:
    unknown: Any = "proces"
    with pytest.raises(InvalidRequest, match="isolate must be \"process\" or None, not 'proces'"):
        Worker(client, "q").handler("kind", isolate=unknown)


async def test_middleware_is_around_every_handler_and_its_timeout_and_may_change_what_comes_and_goes(
    router: FakeRouter, client: Client
) -> None:
    seen: list[str] = []

    async def outer(job: Job, call_next: CallNext) -> Payload:
        seen.append(f"outer {job.kind}")
        try:
            return await call_next(replace(job, payload=b"3"))
        except Exception as error:
            seen.append(f"outer saw {type(error).__name__}")
            raise

    async def inner(job: Job, call_next: CallNext) -> Payload:
        seen.append(f"inner {job.text()}")
        if job.kind == "swallowed":
            with suppress(ValueError):
                await call_next(job)
            return "never mind"
        result = await call_next(job)
        assert isinstance(result, int)
        return result + 1

    worker = Worker(client, "q", concurrency=1, prefetch=0, middleware=[outer, inner])

    @worker.handler("coroutine")
    async def coroutine(job: Job) -> int:
        return int(job.json())

    @worker.handler("thread")
    def thread(job: Job) -> int:
        return 10 * int(job.json())

    @worker.handler("hangs", timeout=0.02)
    async def hangs(job: Job) -> None:
        await asyncio.Event().wait()

    @worker.handler("swallowed")
    async def swallowed(job: Job) -> None:
        raise ValueError("no such user")

    kinds = ("coroutine", "thread", "hangs", "swallowed")
    for kind in kinds:
        router.give(kind, b"1")
    async with running(worker):
        await router.until(lambda: len(router.acks()) == 3 and router.nacks())
    assert [ack.result for ack in router.acks()] == [b"4", b"31", b"never mind"]
    (nack,) = router.nacks()
    assert nack.failure.type == "windrow.TimedOut"
    # The stack begins at the handler, without frames of the middleware and the worker.
    assert "in hangs" in nack.failure.stack.split("\n")[1]
    assert seen == [
        *("outer coroutine", "inner 3", "outer thread", "inner 3", "outer hangs", "inner 3", "outer saw TimedOut"),
        *("outer swallowed", "inner 3"),
    ]


async def test_middleware_of_a_client_is_around_every_enqueue(router: FakeRouter) -> None:
    seen: list[int] = []

    async def outer(jobs: Sequence[NewJob], call_next: EnqueueNext) -> list[Enqueued]:
        stored = await call_next([replace(job, attributes={"release": "7"}) for job in jobs])
        assert [job.id for job in jobs] == [one.id for one in stored]
        return stored

    async def inner(jobs: Sequence[NewJob], call_next: EnqueueNext) -> list[Enqueued]:
        seen.append(len(jobs))
        return await call_next(jobs)

    async with Client(router.address, org="acme", middleware=[outer, inner]) as client:
        stored = await client.enqueue("q", "kind")
        await client.for_org("other").enqueue_many([NewJob("q", "kind") for _ in range(3)])
        assert await client.enqueue_many([]) == []
    assert seen == [1, 3]
    jobs = [job for request in router.of("Enqueue") for job in request.jobs]
    assert jobs[0].id == stored.id
    assert [dict(job.template.attributes) for job in jobs] == [{"release": "7"}] * 4


async def test_a_worker_runs_once_and_takes_one_handler_a_kind(client: Client) -> None:
    worker = Worker(client, "q")
    worker.handler("a", "b")(lambda job: None)
    with pytest.raises(InvalidRequest, match="'b' has a handler"):
        worker.handler("b")(lambda job: None)
    worker.stop()
    await worker.run()
    with pytest.raises(InvalidRequest, match="has run already"):
        await worker.run()


@pytest.mark.parametrize(
    "options",
    [
        {"queues": []},
        {"concurrency": 0},
        {"prefetch": 5001},
        {"visibility_window": 0.05},
        {"grace": -1},
        {"grace": math.nan},
    ],
)
async def test_a_worker_that_makes_no_sense_is_refused(client: Client, options: dict[str, Any]) -> None:
    queues = options.pop("queues", "q")
    with pytest.raises(InvalidRequest):
        Worker(client, queues, **options)


# ── What is refused before a worker runs ─────────────────────────────────────────────────────────────────────────────


def test_orgs_of_a_worker_are_its_clients_or_all() -> None:
    client = windrow.testing.RecordingClient(org="o1")
    for orgs in (["o1", "o2"], "ALL"):
        with pytest.raises(InvalidRequest, match=r"orgs must be windrow\.ALL, or None for the client's org, not "):
            Worker(client, "q", orgs=cast("Any", orgs))


def test_a_worker_names_an_argument_of_a_wrong_type() -> None:
    client = windrow.testing.RecordingClient(org="o1")
    with pytest.raises(InvalidRequest, match=r"^queues must be names of queues, not 7$"):
        Worker(client, ["q", cast("Any", 7)])
    for name, number in (("concurrency", 3.0), ("concurrency", "3"), ("prefetch", 3.0)):
        with pytest.raises(InvalidRequest, match=f"^{name} must be an int, not {number!r}$"):
            Worker(client, "q", **cast("Any", {name: number}))
    with pytest.raises(InvalidRequest, match=r"^queues must be names of queues, not 7$"):
        Worker(client, cast("Any", 7))
    with pytest.raises(InvalidRequest, match=r"^middleware must be a sequence of functions, not <function"):
        Worker(client, "q", middleware=cast("Any", lambda job, call_next: None))
    for name in ("visibility_window", "grace"):
        options: dict[str, Any] = {name: "5s"}
        with pytest.raises(InvalidRequest, match=f"^{name}: '5s' is neither a number of seconds nor a timedelta$"):
            Worker(client, "q", **options)
    worker = Worker(client, "q")
    with pytest.raises(InvalidRequest, match=r"^timeout: '5s' is neither a number of seconds nor a timedelta$"):
        worker.handler("k", timeout=cast("Any", "5s"))
    with pytest.raises(InvalidRequest, match=r"^max_wait: '5s' is neither a number of seconds nor a timedelta$"):
        worker.batch_handler("k", max_jobs=5, max_wait=cast("Any", "5s"))
    with pytest.raises(InvalidRequest, match=r"^max_jobs must be an int, not 2\.5$"):
        worker.batch_handler("k", max_jobs=cast("Any", 2.5))


def test_a_worker_needs_a_client_of_asyncio() -> None:
    with pytest.raises(InvalidRequest, match=r"a worker needs a windrow\.Client, not a RecordingSyncClient"):
        Worker(cast("Any", windrow.testing.RecordingSyncClient(org="o1")), "q")


@pytest.mark.parametrize("kinds", [(), (print,)])
@pytest.mark.parametrize("name", ["handler", "batch_handler"])
def test_a_decorator_without_kinds_is_refused(name: str, kinds: tuple[object, ...]) -> None:
    worker = Worker(windrow.testing.RecordingClient(org="o1"), "q")
    with pytest.raises(InvalidRequest, match=rf'{name} needs the kinds of its jobs: write @worker\.{name}\("a_kind"'):
        cast("Any", getattr(worker, name))(*kinds)


def test_a_worker_without_handlers_says_so(caplog: pytest.LogCaptureFixture) -> None:
    worker = Worker(windrow.testing.RecordingClient(org="o1"), "q", name="w1")
    with pytest.raises(NotImplementedError):
        asyncio.run(worker.run())
    assert "worker w1 has no handlers, and gives every job back" in caplog.messages


def test_a_worker_that_has_ended_may_be_stopped_again() -> None:
    worker = Worker(windrow.testing.RecordingClient(org="o1"), "q")
    with pytest.raises(NotImplementedError):
        asyncio.run(worker.run())
    worker.stop()
    worker.stop()
