"""The worker's promises about leases, fates and the way out, against a router that answers what the test says."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from grpc import StatusCode

from tests.unit.client_fake import WAIT_S, FakeRouter, failing, fake_router, refuse
from windrow import Client, InvalidRequest, Job, Kill, PermissionDenied, Retry, Worker
from windrow.v1 import job_pb2, queue_pb2


@pytest.fixture
async def router() -> AsyncIterator[FakeRouter]:
    async with fake_router() as running:
        yield running


@pytest.fixture
async def client(router: FakeRouter) -> AsyncIterator[Client]:
    async with Client(router.address, org="acme") as made:
        yield made


@asynccontextmanager
async def running(worker: Worker) -> AsyncGenerator[asyncio.Task[None]]:
    """Runs the worker; stops it at the end, and expects it to end well."""
    async with asyncio.timeout(WAIT_S):
        task = asyncio.create_task(worker.run())
        try:
            yield task
            worker.stop()
            await task
        finally:
            task.cancel()


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
        await router.until(lambda: router.of("Ack"))
    ack = router.of("Ack")[0].acks[0]
    assert (ack.lease, ack.result) == (job.lease, b'{"sum":3}')
    asked = router.of("Dequeue")[0]
    assert (asked.org, list(asked.queues), asked.worker, asked.max_jobs) == ("acme", ["q"], "w1", 10)


async def test_a_plain_function_runs_in_a_thread_with_the_callers_context(router: FakeRouter, client: Client) -> None:
    worker = Worker(client, "q")

    @worker.handler("where")
    def where(job: Job) -> str:
        return threading.current_thread().name

    router.give("where")
    async with running(worker):
        await router.until(lambda: router.of("Ack"))
    assert router.of("Ack")[0].acks[0].result.decode().startswith(f"{worker.name}-handler")


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

    @worker.handler("huge")
    async def huge(job: Job) -> bytes:
        return bytes(70_000)

    @worker.handler("cancelled")
    async def cancelled(job: Job) -> None:
        raise asyncio.CancelledError

    jobs = {kind: router.give(kind) for kind in ("later", "never", "broken", "huge", "cancelled", "unknown")}
    async with running(worker):
        await router.until(lambda: len(router.settled("Nack")) == len(jobs))
    nacks = {nack.lease: nack for request in router.of("Nack") for nack in request.nacks}
    told = {kind: nacks[job.lease] for kind, job in jobs.items()}
    assert (told["later"].error, told["later"].delay.seconds) == ("busy", 90)
    assert (told["never"].error, told["never"].kill) == ("no such user", True)
    assert told["broken"].error.endswith(" the end")
    assert len(told["broken"].error) == 8192
    assert told["broken"].WhichOneof("fate") is None
    assert "65,536" in told["huge"].error
    assert "CancelledError" in told["cancelled"].error
    assert "worker.py" not in told["cancelled"].error.split("test_client_worker.py")[0]
    assert "no handler for kind 'unknown'" in told["unknown"].error
    assert told["unknown"].delay.seconds == 5


async def test_a_plain_function_that_raises_stop_iteration_fails_and_the_worker_goes_on(
    router: FakeRouter, client: Client
) -> None:
    """No future takes a StopIteration: the worker would wait for the thread's answer for ever."""
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
    (nack,) = router.of("Nack")[0].nacks
    assert nack.error.endswith("RuntimeError: the handler raised StopIteration")


async def test_an_error_with_half_a_character_is_told_without_it(router: FakeRouter, client: Client) -> None:
    """As in the name of a file that is not UTF-8; no message can carry it."""
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
    nacks = [nack for request in router.of("Nack") for nack in request.nacks]
    assert {nack.lease for nack in nacks} == {job.lease for job in jobs}
    assert [nack.error.endswith("no file ?") for nack in nacks] == [True] * 3


async def test_acks_gather_while_one_is_under_way(router: FakeRouter, client: Client) -> None:
    worker = Worker(client, "q", concurrency=50)
    first_is_out = asyncio.Event()
    let_go = asyncio.Event()

    async def slow_first(request: Any, context: Any) -> Any:
        if not first_is_out.is_set():
            first_is_out.set()
            await let_go.wait()
        return router.plain("Ack", request)

    router.scripts["Ack"] = slow_first

    @worker.handler("one")
    async def one(job: Job) -> None:
        pass

    @worker.handler("rest")
    async def rest(job: Job) -> None:
        await first_is_out.wait()
        done.append(job.id)
        if len(done) == 49:
            let_go.set()

    done: list[str] = []
    router.give("one")
    for _ in range(49):
        router.give("rest")
    async with running(worker):
        await router.until(lambda: len(router.settled("Ack")) == 50)
    assert len(router.of("Ack")[0].acks) == 1
    assert len(router.of("Ack")) <= 3


async def test_leases_are_extended_together_also_those_that_wait(router: FakeRouter, client: Client) -> None:
    worker = Worker(client, "q", concurrency=2, visibility_window=0.6)
    finish = asyncio.Event()

    @worker.handler("quick")
    async def quick(job: Job) -> None:
        pass

    @worker.handler("slow")
    async def slow(job: Job) -> None:
        await finish.wait()

    router.give("quick")
    async with running(worker):
        # A quick one first: only then does the worker prefetch.
        await router.until(lambda: router.of("Ack"))
        jobs = [router.give("slow") for _ in range(4)]
        await router.until(lambda: len(router.of("Extend")) >= 4)
        extended = router.of("Extend")[-1]
        assert sorted(extended.leases) == sorted(job.lease for job in jobs)
        assert extended.visibility_window.nanos == 600_000_000
        finish.set()
        await router.until(lambda: len(router.settled("Ack")) == 5)


async def test_a_stale_lease_cancels_its_handler_and_is_not_acked(
    router: FakeRouter, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    worker = Worker(client, "q", visibility_window=0.3)
    ended: list[tuple[str, bool]] = []
    lost = router.give("wait")
    kept = router.give("wait")

    async def stale(request: Any, context: Any) -> Any:
        answers = [
            job_pb2.JOB_ANSWER_STALE if lease == lost.lease else job_pb2.JOB_ANSWER_OK for lease in request.leases
        ]
        return queue_pb2.ExtendResponse(answers=answers)

    router.scripts["Extend"] = stale

    @worker.handler("wait")
    async def wait(job: Job) -> None:
        try:
            await asyncio.wait_for(job.lost.wait(), 0.8)
        except TimeoutError:
            return
        finally:
            ended.append((job.id, job.lost.is_set()))

    async with running(worker):
        await router.until(lambda: kept.id in router.settled("Ack"))
    assert sorted(ended) == sorted([(lost.id, True), (kept.id, False)])
    assert router.settled("Ack") == [kept.id]
    assert not router.of("Nack")
    assert not router.of("Release")
    assert f"lost the lease of job {lost.id}" in caplog.text


async def test_a_thread_that_lost_its_lease_is_told_and_not_acked(router: FakeRouter, client: Client) -> None:
    worker = Worker(client, "q", visibility_window=0.2)
    saw = threading.Event()

    async def stale(request: Any, context: Any) -> Any:
        return queue_pb2.ExtendResponse(answers=[job_pb2.JOB_ANSWER_STALE for _ in request.leases])

    router.scripts["Extend"] = stale
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
    assert not router.of("Ack")


async def test_a_lease_that_cannot_be_extended_ends_by_the_workers_own_clock(
    router: FakeRouter, client: Client
) -> None:
    worker = Worker(client, "q", visibility_window=0.4)
    ended = asyncio.Event()

    async def hang(request: Any, context: Any) -> Any:
        await asyncio.sleep(60)

    router.scripts["Extend"] = hang

    @worker.handler("wait")
    async def wait(job: Job) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            assert job.lost.is_set()
            ended.set()

    router.give("wait")
    async with running(worker):
        await ended.wait()
    assert not router.of("Ack")


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
    await router.until(lambda: router.of("Ack"))
    runs, waits = router.give("slow"), router.give("slow")
    await router.until(lambda: started.is_set() and not router.jobs)
    worker.stop()
    await router.until(lambda: router.of("Release"))
    assert router.settled("Release") == [waits.id]
    asked = len(router.of("Dequeue"))
    finish.set()
    await stopped(task)
    assert router.settled("Ack")[-1] == runs.id
    assert len(router.of("Dequeue")) == asked


async def test_after_the_grace_handlers_are_cancelled_and_released(router: FakeRouter, client: Client) -> None:
    worker = Worker(client, "q", grace=0.05)
    started = asyncio.Event()

    @worker.handler("slow")
    async def slow(job: Job) -> None:
        started.set()
        await asyncio.sleep(60)

    job = router.give("slow")
    task = asyncio.create_task(worker.run())
    await started.wait()
    worker.stop()
    await stopped(task)
    assert router.settled("Release") == [job.id]
    assert not router.of("Nack")


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
    worker = Worker(client, "q", grace=0.05)
    started, finish = threading.Event(), threading.Event()

    @worker.handler("slow")
    def slow(job: Job) -> None:
        started.set()
        finish.wait(WAIT_S)

    router.give("slow")
    task = asyncio.create_task(worker.run())
    await asyncio.to_thread(started.wait)
    worker.stop()
    await stopped(task)
    finish.set()
    assert not router.of("Release")
    assert "still runs in its thread" in caplog.text


async def test_a_signal_stops_a_worker_of_the_main_thread(router: FakeRouter, client: Client) -> None:
    worker = Worker(client, "q")
    before = signal.getsignal(signal.SIGTERM)
    task = asyncio.create_task(worker.run())
    await router.until(lambda: router.of("Dequeue"))
    os.kill(os.getpid(), signal.SIGTERM)
    await stopped(task)
    assert signal.getsignal(signal.SIGTERM) is before


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
    await router.until(lambda: router.of("Ack"))
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

    router.scripts["Dequeue"] = failing(4, StatusCode.UNAVAILABLE, router, "Dequeue")
    router.give("work")
    async with running(worker):
        await handled.wait()
    assert len(router.of("Dequeue")) >= 5
    told = [record.getMessage() for record in caplog.records if record.name == "windrow.worker"]
    assert sum("cannot be reached" in message for message in told) == 1
    assert sum("reached again" in message for message in told) == 1


async def test_one_refused_ack_does_not_hold_up_the_others(router: FakeRouter, client: Client) -> None:
    worker = Worker(client, "q", concurrency=3)
    bad = router.give("work")
    good = [router.give("work") for _ in range(2)]
    ready = asyncio.Barrier(3)

    async def picky(request: Any, context: Any) -> Any:
        if any(ack.lease == bad.lease for ack in request.acks):
            await refuse(context, StatusCode.INVALID_ARGUMENT, "malformed lease")
        accepted.extend(ack.lease for ack in request.acks)
        return router.plain("Ack", request)

    router.scripts["Ack"] = picky
    accepted: list[bytes] = []

    @worker.handler("work")
    async def work(job: Job) -> None:
        await ready.wait()

    async with running(worker):
        await router.until(lambda: len(accepted) == 2)
    assert sorted(accepted) == sorted(job.lease for job in good)


async def test_acks_outlive_an_outage(router: FakeRouter) -> None:
    router.scripts["Ack"] = failing(3, StatusCode.UNAVAILABLE, router, "Ack")
    router.give("work")
    async with Client(router.address, org="acme", timeout=0.02) as client:
        worker = Worker(client, "q")

        @worker.handler("work")
        async def work(job: Job) -> None:
            pass

        async with running(worker):
            await router.until(lambda: len(router.of("Ack")) == 4)


async def test_an_error_that_time_cannot_heal_ends_the_worker(router: FakeRouter, client: Client) -> None:
    router.scripts["Dequeue"] = failing(1, StatusCode.PERMISSION_DENIED, router, "Dequeue", message="no token")
    with pytest.raises(PermissionDenied, match="no token"):
        await Worker(client, "q").run()


async def test_an_idle_worker_polls_ever_slower(router: FakeRouter, client: Client) -> None:
    worker = Worker(client, "q")
    pauses = [worker._idle.next_s() for _ in range(8)]
    assert 0.01 <= pauses[0] <= 0.02
    assert all(0.25 <= pause <= 0.5 for pause in pauses[5:])
    worker._idle.reset()
    assert worker._idle.next_s() <= 0.02


async def test_no_more_is_dequeued_than_can_run_until_handlers_prove_quick(router: FakeRouter, client: Client) -> None:
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
    [{"queues": []}, {"concurrency": 0}, {"concurrency": 2, "prefetch": 3}, {"visibility_window": 0.05}],
)
async def test_a_worker_that_makes_no_sense_is_refused(client: Client, options: dict[str, Any]) -> None:
    queues = options.pop("queues", "q")
    with pytest.raises(InvalidRequest):
        Worker(client, queues, **options)
