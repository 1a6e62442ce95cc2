"""The client as a user uses it, against a real cluster."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta, timezone
from functools import partial
from typing import Any

import psycopg
import pytest

from tests.collector import Collector
from tests.e2e.conftest import CHECKOUT, WAIT_S, RunningCluster, eventually
from windrow import (
    AlreadyExists,
    Answer,
    AttemptOutcome,
    Batch,
    BulkChange,
    Client,
    DeadlineExceeded,
    Enqueued,
    ExponentialRetry,
    FailedPrecondition,
    Failure,
    FixedRetry,
    InvalidJob,
    InvalidRequest,
    Job,
    JobFilter,
    JobRecord,
    JobState,
    Kill,
    NewJob,
    NotFound,
    RestoreRefusal,
    Retry,
    Schedule,
    SyncClient,
    Worker,
    Workflow,
    nth_id,
    outbox,
    uuid7,
)
from windrow.new_jobs import enqueue_request

HOUR = timedelta(hours=1)

SCRIPT = """
import sys
import windrow

worker = windrow.Worker(windrow.Client(org=sys.argv[1]), "q")

@worker.handler("hello")
def hello(job):
    print("hello", job.text(), flush=True)

windrow.run(worker)
print("stopped", flush=True)
"""


async def stopped(worker: Worker, task: asyncio.Task[None]) -> None:
    worker.stop()
    async with asyncio.timeout(WAIT_S):
        await task


async def state(client: Client, id_: str) -> JobState:
    return (await client.get_jobs([id_]))[id_].state


async def test_a_job_is_found_by_its_dedup_key(client: Client) -> None:
    stored = await client.enqueue("q", "k", b"7", dedup_key="user 7")
    found = await client.find_job("q", "user 7", include_payload=True)
    assert found is not None
    assert (found.id, found.payload, found.dedup_key) == (stored.id, b"7", "user 7")
    assert await client.find_job("q", "user 8") is None
    assert await client.find_job("other", "user 7") is None


async def test_a_job_goes_from_enqueue_to_its_result(client: Client) -> None:
    worker = Worker(client, ["math"])

    @worker.handler("sum")
    async def add(job: Job) -> dict[str, Any]:
        return {"sum": sum(job.json()), "by": job.attributes["by"], "attempt": job.attempt}

    task = asyncio.create_task(worker.run())
    stored = await client.enqueue("math", "sum", [1, 2, 3], attributes={"by": "ada"}, priority=2)

    async def done() -> bool:
        return await state(client, stored.id) is JobState.SUCCEEDED

    await eventually(done)
    await stopped(worker, task)
    record = (await client.get_jobs([stored.id], include_payload=True))[stored.id]
    assert record.result == b'{"sum":6,"by":"ada","attempt":1}'
    assert record.payload == b"[1,2,3]"
    assert (record.queue, record.kind, record.priority, record.worker) == ("math", "sum", 2, worker.name)
    assert record.finished_at is not None
    assert record.finished_at - record.enqueued_at < timedelta(seconds=WAIT_S)
    assert [past.outcome for past in record.attempts] == [AttemptOutcome.ACKED]


async def test_the_pair_of_run_at_and_attempt_is_higher_for_each_lease(client: Client) -> None:
    await client.enqueue("fenced", "k", max_attempts=5)
    past = datetime.now(UTC) - timedelta(days=1)

    async def redrive(job: Job) -> None:
        await client.nack(job, permanent=True)
        assert await client.redrive_jobs([job.id]) == [Answer.OK]

    async def alter(job: Job) -> None:
        await client.nack(job, retry_after=3600)
        assert await client.alter_jobs([job.id], run_at=past) == [Answer.OK]

    async def expire(_: Job) -> None:
        """Does nothing, because the next dequeue waits until the lease has expired."""

    ends: list[Callable[[Job], Awaitable[object]]] = [
        *(client.release, partial(client.snooze, after=0), partial(client.nack, retry_after=0)),
        *(expire, redrive, expire, alter, client.release),
    ]
    fences: list[tuple[datetime, int]] = []
    for end in ends:
        (job,) = await client.dequeue("fenced", visibility_window=0.1 if end is expire else 30, wait=WAIT_S)
        fences.append((job.run_at, job.attempt))
        await end(job)
    assert fences == sorted(set(fences))
    assert [attempt for _, attempt in fences] == [1, 1, 1, 2, 3, 1, 2, 3]


async def test_payloads_are_looked_up_only_if_they_are_asked_for(client: Client) -> None:
    stored = await client.enqueue("q", "k", b"p")
    bare = (await client.get_jobs([stored.id]))[stored.id]
    assert (bare.payload, bare.result) == (None, None)
    whole = (await client.get_jobs([stored.id], include_payload=True))[stored.id]
    assert (whole.payload, whole.result) == (b"p", b"")


async def test_a_payload_that_is_too_large_is_refused_with_its_size_and_the_bound(client: Client) -> None:
    payload = bytes((1 << 20) + 1)
    with pytest.raises(InvalidJob, match=r"jobs\[0\]\.template\.payload: must be at most 1048576 bytes, not 1048577"):
        await client.enqueue("q", "k", payload)
    fits, too_large = await client.enqueue_many([NewJob("q", "k"), NewJob("q", "k", payload)], independent=True)
    assert fits.error is None
    assert "jobs[1].template.payload: must be at most 1048576 bytes, not 1048577" in str(too_large.error)


async def test_hundreds_of_jobs_each_run_once(client: Client) -> None:
    worker = Worker(client, ["a", "b"], concurrency=20)
    ran: list[str] = []

    @worker.handler("k")
    async def k(job: Job) -> None:
        ran.append(job.id)

    stored = await client.enqueue_many(
        [NewJob("a" if at % 2 else "b", "k", f"{at}") for at in range(1500)], independent=True
    )
    task = asyncio.create_task(worker.run())

    async def all_ran() -> bool:
        return len(ran) >= 1500

    await eventually(all_ran)
    await stopped(worker, task)
    assert sorted(ran) == sorted(one.id for one in stored)
    records = await client.get_jobs(ran)
    assert {record.state for record in records.values()} == {JobState.SUCCEEDED}


@pytest.mark.parametrize("in_thread", [False, True], ids=["async def", "def"])
async def test_hundreds_of_jobs_run_in_batches_each_with_its_own_outcome(client: Client, in_thread: bool) -> None:
    worker = Worker(client, "a", concurrency=300)
    sizes: list[int] = []
    ran: list[str] = []

    def outcomes(jobs: Sequence[Job]) -> list[dict[str, str] | Exception]:
        sizes.append(len(jobs))
        ran.extend(job.id for job in jobs)
        return [Kill("odd") if int(job.payload) % 2 else {"was": job.text()} for job in jobs]

    async def coroutine(jobs: Sequence[Job]) -> list[dict[str, str] | Exception]:
        return outcomes(jobs)

    worker.batch_handler("k", max_jobs=100)(outcomes if in_thread else coroutine)
    stored = await client.enqueue_many([NewJob("a", "k", f"{at}") for at in range(750)])
    task = asyncio.create_task(worker.run())

    async def all_ran() -> bool:
        return len(ran) >= 750

    await eventually(all_ran)
    await stopped(worker, task)
    assert sorted(ran) == sorted(one.id for one in stored)
    assert len(sizes) < 75
    assert max(sizes) <= 100
    records = await client.get_jobs(ran, include_payload=True)
    for at, one in enumerate(stored):
        record = records[one.id]
        if at % 2:
            assert (record.state, record.reason) == (JobState.DEAD, "failed permanently")
        else:
            assert (record.state, record.result) == (JobState.SUCCEEDED, b'{"was":"%d"}' % at)


async def test_a_job_that_is_cancelled_in_the_middle_of_a_batch_is_lost_alone(client: Client) -> None:
    worker = Worker(client, "a", concurrency=3)
    begun, lost = asyncio.Event(), asyncio.Event()
    seen: list[bool] = []

    @worker.batch_handler("k", max_jobs=3, max_wait=30)
    async def k(jobs: Sequence[Job]) -> None:
        begun.set()
        await jobs[1].lost.wait()
        seen.extend(job.lost.is_set() for job in jobs)
        lost.set()

    stored = await client.enqueue_many([NewJob("a", "k") for _ in range(3)])
    task = asyncio.create_task(worker.run())
    async with asyncio.timeout(WAIT_S):
        await begun.wait()
        # The router sends the jobs in the order in which they were stored.
        assert await client.cancel_jobs([stored[1].id]) == [Answer.OK]
        await lost.wait()
    await stopped(worker, task)
    assert seen == [False, True, False]
    records = await client.get_jobs([one.id for one in stored])
    assert [records[one.id].state for one in stored] == [
        JobState.SUCCEEDED,
        JobState.CANCELLED,
        JobState.SUCCEEDED,
    ]


async def test_the_same_job_twice_is_stored_once(client: Client) -> None:
    job = NewJob("q", "k", dedup_key="order-7")
    assert not (await client.enqueue_many([job]))[0].duplicate
    again = (await client.enqueue_many([job]))[0]
    assert (again.id, again.duplicate, again.state, again.differs) == (job.id, True, JobState.READY, False)
    assert (await client.enqueue("q", "k", "another", id=job.id)).differs
    by_key = await client.enqueue("q", "k", dedup_key="order-7")
    assert (by_key.id, by_key.duplicate) == (job.id, True)


async def test_a_batch_that_was_interrupted_goes_on_and_stores_nothing_twice(client: Client) -> None:
    batch, seen = uuid7(), list[Batch]()

    def jobs(ends_at: int) -> Iterator[NewJob]:
        for n in range(2500):
            if n == ends_at:
                raise ZeroDivisionError
            yield NewJob("bulk", "k", str(n))

    with pytest.raises(ZeroDivisionError):
        await client.enqueue_batch(jobs(2300), batch=batch)
    done = await client.enqueue_batch(jobs(-1), batch=batch, on_progress=seen.append)
    assert [one.jobs for one in seen] == [1000, 2000, 2500]
    assert (done, done.jobs) == (seen[-1], 2500)
    assert (await client.stats("bulk")).queues["bulk"].ready == 2500
    (last,) = (await client.get_jobs([nth_id(batch, 2499)], include_payload=True)).values()
    assert last.payload == b"2499"
    assert (await client.enqueue_batch(jobs(-1), batch=batch)).duplicates == 2500
    bad = [*(NewJob("bulk", "k") for _ in range(1000)), NewJob("bulk", "k"), NewJob("", "k")]
    with pytest.raises(InvalidJob) as refused:
        await client.enqueue_batch(bad, batch=uuid7())
    assert [violation.field for violation in refused.value.violations] == ["jobs[1001].template.queue"]
    with pytest.raises(InvalidRequest, match="batch: 'x' is not a UUIDv7; make one with"):
        await client.enqueue_batch([], batch="x")
    with pytest.raises(InvalidRequest, match="batch: job 0 of it was stored before with another queue"):
        await client.enqueue_batch([NewJob("elsewhere", "k")], batch=batch)


async def test_the_jobs_of_a_batch_come_from_the_callers_thread(cluster: RunningCluster) -> None:
    def store() -> None:
        here, threads = threading.get_ident(), set[int]()
        with SyncClient(cluster.address, org="batches") as client:

            def jobs() -> Iterator[NewJob]:
                for _ in range(3):
                    threads.add(threading.get_ident())
                    # The iterator may call the client itself.
                    yield NewJob("q", "k", client.enqueue("other", "k").id)

            steps: list[Batch] = []
            done = client.enqueue_batch(jobs(), batch=uuid7(), on_progress=steps.append)
        assert (threads, steps, done.jobs) == ({here}, [done], 3)

    await asyncio.to_thread(store)


async def test_a_job_that_is_unique_while_it_is_live_is_stored_again_when_it_has_ended(client: Client) -> None:
    first = await client.enqueue("q", "k", dedup_key="order-7", dedup_while_live=True)
    again = await client.enqueue("q", "k", dedup_key="order-7", dedup_while_live=True)
    assert (again.id, again.duplicate) == (first.id, True)
    record = (await client.get_jobs([first.id]))[first.id]
    assert (record.dedup_key, record.dedup_while_live) == ("order-7", True)
    (leased,) = await client.dequeue("q")
    assert leased.max_runtime is None
    assert await client.ack(leased) is Answer.OK
    assert not (await client.enqueue("q", "k", max_runtime=60, dedup_key="order-7", dedup_while_live=True)).duplicate
    (leased,) = await client.dequeue("q")
    assert leased.max_runtime == timedelta(seconds=60)


async def test_callers_share_calls_and_have_their_own_outcomes(client: Client) -> None:
    same = uuid7()
    told = await asyncio.gather(
        *(client.enqueue("q", "k", f"{at}") for at in range(200)),
        *(client.enqueue("q", "once", dedup_key="order-7") for _ in range(5)),
        *(client.enqueue("q", "once", id=same) for _ in range(5)),
        client.enqueue("no spaces", "k"),
        return_exceptions=True,
    )
    bad = told.pop()
    assert isinstance(bad, InvalidJob)
    assert [violation.field for violation in bad.violations] == ["jobs[0].template.queue"]
    stored = [one for one in told if isinstance(one, Enqueued)]
    assert len(stored) == 210
    assert [one.duplicate for one in stored[:200]] == [False] * 200
    for five in (stored[200:205], stored[205:]):
        assert sorted(one.duplicate for one in five) == [False, True, True, True, True]
        assert len({one.id for one in five}) == 1
    jobs = await client.dequeue("q", max_jobs=1000)
    assert {job.id for job in jobs} == {one.id for one in stored}
    assert await asyncio.gather(*(client.ack(job) for job in jobs)) == [Answer.OK] * 202


async def test_a_dequeue_waits_for_the_first_job(client: Client) -> None:
    assert await client.dequeue("q", wait=0.1) == []
    waiting = asyncio.create_task(client.dequeue("q", wait=WAIT_S))
    done, _ = await asyncio.wait([waiting], timeout=0.3)
    assert not done
    stored = await client.enqueue("q", "k")
    async with asyncio.timeout(WAIT_S / 2):
        (job,) = await waiting
    assert job.id == stored.id


async def test_every_option_of_a_job_is_kept(client: Client) -> None:
    soon = datetime.now(UTC) + timedelta(hours=1)
    retry = ExponentialRetry(initial_delay=2.0, multiplier=3.0, max_delay=60.0, jitter=0.0)
    stored = await client.enqueue(
        "q",
        "k",
        run_at=soon,
        expires_at=soon + timedelta(hours=1),
        max_attempts=3,
        max_runtime=60,
        retry=retry,
        dedup_key="d",
        dedup_window=60,
    )
    record = (await client.get_jobs([stored.id]))[stored.id]
    assert record.state is JobState.SCHEDULED
    assert record.run_at == soon
    assert record.expires_at == soon + timedelta(hours=1)
    assert (record.max_attempts, record.max_runtime) == (3, timedelta(seconds=60))
    assert record.retry == ExponentialRetry(
        initial_delay=timedelta(seconds=2), multiplier=3.0, max_delay=timedelta(seconds=60), jitter=0.0
    )
    assert await client.alter_jobs([stored.id], priority=2, delay=60, attributes={"a": "b"}) == [Answer.OK]
    record = (await client.get_jobs([stored.id]))[stored.id]
    assert (record.priority, record.attributes, record.run_at < soon) == (2, {"a": "b"}, True)
    assert await client.alter_jobs([stored.id], attributes={}) == [Answer.OK]
    assert (await client.get_jobs([stored.id]))[stored.id].attributes == {}
    assert await client.cancel_jobs([stored.id], reason="changed our mind") == [Answer.OK]
    assert await client.alter_jobs([stored.id], priority=3) == [Answer.CANCELLED]
    assert (await client.get_jobs([stored.id]))[stored.id].reason == "changed our mind"
    assert await client.get_jobs(["01900000-0000-7000-8000-000000000000"]) == {}


async def test_a_bad_job_is_told_by_its_path_and_stores_nothing(client: Client) -> None:
    good = NewJob("q", "k")
    with pytest.raises(InvalidJob) as caught:
        await client.enqueue_many([good, NewJob("no spaces", "k")])
    assert caught.value.violations[0].field == "jobs[1].template.queue"
    assert await client.get_jobs([good.id]) == {}
    alone = await client.enqueue_many([good, NewJob("no spaces", "k")], independent=True)
    assert alone[0].error is None
    assert isinstance(alone[1].error, InvalidJob)
    assert alone[1].error.violations[0].field == "jobs[1].template.queue"


async def test_a_failing_job_is_retried_and_then_dead_with_its_history(client: Client) -> None:
    worker = Worker(client, "q")

    @worker.handler("flaky")
    async def flaky(job: Job) -> str:
        if job.attempt == 1:
            raise Retry("not yet", after=0.0)
        if job.attempt == 2:
            raise ValueError("still not")
        return "at last"

    @worker.handler("hopeless")
    async def hopeless(job: Job) -> None:
        raise ValueError("never")

    @worker.handler("killed")
    def killed(job: Job) -> None:
        raise Kill("no such user")

    now = FixedRetry(delay=0.0)
    ids = {
        "flaky": (await client.enqueue("q", "flaky", retry=now)).id,
        "hopeless": (await client.enqueue("q", "hopeless", retry=now, max_attempts=3)).id,
        "killed": (await client.enqueue("q", "killed")).id,
        "unknown": (await client.enqueue("q", "unknown", max_attempts=1)).id,
    }
    task = asyncio.create_task(worker.run())
    ended = {
        "flaky": JobState.SUCCEEDED,
        "hopeless": JobState.DEAD,
        "killed": JobState.DEAD,
        "unknown": JobState.SCHEDULED,
    }

    async def all_ended() -> bool:
        records = await client.get_jobs(ids.values())
        return all(records[ids[kind]].state is wanted for kind, wanted in ended.items())

    await eventually(all_ended)
    await stopped(worker, task)
    records = await client.get_jobs(ids.values(), include_payload=True)
    flaky_one, hopeless_one, killed_one, unknown_one = (records[id_] for id_ in ids.values())
    assert flaky_one.result == b"at last"
    assert [past.outcome.value for past in flaky_one.attempts] == ["nacked", "nacked", "acked"]
    assert failures_of(flaky_one)[0].message == "not yet"
    assert (failures_of(flaky_one)[1].type, failures_of(flaky_one)[1].message) == ("ValueError", "still not")
    assert [past.attempt for past in hopeless_one.attempts] == [1, 2, 3]
    assert failures_of(killed_one)[0].message == "no such user"
    assert "no handler for kind 'unknown'" in failures_of(unknown_one)[0].message
    assert (unknown_one.attempt, unknown_one.attempts[0].outcome) == (0, AttemptOutcome.RELEASED)


def failures_of(record: JobRecord) -> list[Failure]:
    return [past.failure for past in record.attempts if past.failure is not None]


async def test_a_graceful_stop_releases_what_is_not_done_uncounted(client: Client) -> None:
    first, second = Worker(client, "q", concurrency=2, grace=0.1), Worker(client, "q")
    started = asyncio.Barrier(3)
    attempts: list[int] = []

    @first.handler("slow")
    async def slow(job: Job) -> None:
        await started.wait()
        await asyncio.sleep(3600)

    @second.handler("slow")
    async def quick(job: Job) -> None:
        attempts.append(job.attempt)

    await client.enqueue_many([NewJob("q", "slow") for _ in range(4)])
    task = asyncio.create_task(first.run())
    async with asyncio.timeout(WAIT_S):
        await started.wait()
    await stopped(first, task)
    task = asyncio.create_task(second.run())

    async def all_ran() -> bool:
        return len(attempts) == 4

    await eventually(all_ran)
    await stopped(second, task)
    # The second worker gets the jobs at once, long before the first worker's leases would have ended. The first
    # attempts are not counted.
    assert attempts == [1, 1, 1, 1]


async def test_a_long_job_keeps_its_lease_and_a_lost_one_is_stale(client: Client) -> None:
    # The window is long enough for a busy machine to extend the lease in time.
    worker = Worker(client, "q", visibility_window=8.0)
    ended = asyncio.Event()

    @worker.handler("long")
    async def long(job: Job) -> None:
        with_time = asyncio.get_running_loop().time() + 9
        while asyncio.get_running_loop().time() < with_time:
            assert await client.dequeue("q") == []
            await asyncio.sleep(0.1)
        ended.set()

    stored = await client.enqueue("q", "long")
    task = asyncio.create_task(worker.run())
    async with asyncio.timeout(WAIT_S):
        await ended.wait()
    await stopped(worker, task)
    record = (await client.get_jobs([stored.id]))[stored.id]
    assert (record.state, record.attempt) == (JobState.SUCCEEDED, 1)

    await client.enqueue("q", "long")
    (held,) = await client.dequeue("q", visibility_window=0.1)
    again: list[Job] = []

    async def retaken() -> bool:
        again.extend(await client.dequeue("q"))
        return bool(again)

    await eventually(retaken)
    assert await client.ack(held) is Answer.STALE
    assert await client.extend([held]) == [Answer.STALE]
    assert await client.ack(again[0]) is Answer.OK


async def test_a_cancelled_job_is_lost_by_its_handler(client: Client) -> None:
    worker = Worker(client, "q", visibility_window=3.0)
    started, ended = asyncio.Event(), asyncio.Event()
    lost: list[bool] = []

    @worker.handler("k")
    async def k(job: Job) -> None:
        started.set()
        try:
            await asyncio.sleep(3600)
        finally:
            lost.append(job.lost.is_set())
            ended.set()

    stored = await client.enqueue("q", "k")
    task = asyncio.create_task(worker.run())
    async with asyncio.timeout(WAIT_S):
        await started.wait()
        assert await client.cancel_jobs([stored.id]) == [Answer.OK]
        await ended.wait()
    await stopped(worker, task)
    assert lost == [True]
    assert await state(client, stored.id) is JobState.CANCELLED


async def test_queues_are_configured_paused_and_deleted(client: Client) -> None:
    made = await client.create_queue("mail", max_attempts=3, retry=FixedRetry(30), retention_days=7)
    assert (made.queue, made.max_attempts, made.retention_days, made.paused) == ("mail", 3, 7, False)
    assert made.retry == FixedRetry(timedelta(seconds=30))
    with pytest.raises(AlreadyExists):
        await client.create_queue("mail")
    changed = await client.update_queue("mail", max_attempts=4, reset=["retry"])
    assert (changed.max_attempts, changed.retention_days) == (4, 7)
    assert isinstance(changed.retry, ExponentialRetry)
    with pytest.raises(InvalidRequest, match="'max_attempts', which is given a value too"):
        await client.update_queue("mail", max_attempts=5, reset=["max_attempts"])
    with pytest.raises(InvalidRequest, match=r"UpdateQueue at .*: reset: must be one of .*, not 'colour'") as refused:
        await client.update_queue("mail", max_attempts=5, reset=["retry", "colour"])
    assert [violation.field for violation in refused.value.violations] == ["reset"]
    assert "reset: must be one of" in refused.value.details
    put = await client.put_queue("mail", group_concurrency=3)
    assert (put.max_attempts, put.group_concurrency) == (4, 3)
    assert await client.put_queue("mail", group_concurrency=1) == changed
    assert await client.put_queue("mail") == changed
    others = await asyncio.gather(*(client.put_queue("other", max_attempts=2) for _ in range(3)))
    assert {queue.max_attempts for queue in others} == {2}
    assert (await client.pause_queue("mail")).paused
    assert not (await client.resume_queue("mail")).paused
    await client.enqueue("other", "k")
    assert [queue.queue for queue in await client.list_queues()] == ["mail", "other"]
    assert await client.get_queue("mail") == changed
    with pytest.raises(FailedPrecondition):
        await client.delete_queue("other")
    await client.delete_queue("mail")
    with pytest.raises(NotFound, match="mail"):
        await client.get_queue("mail")


async def test_jobs_are_listed_counted_purged_redriven_and_restored(client: Client) -> None:
    stored = await client.enqueue_many([NewJob("q", "k", str(n), attributes={"n": str(n)}) for n in range(5)])
    for job in await client.dequeue("q", max_jobs=2):
        await client.nack(job, permanent=True)
    newest_first = [one.id for one in reversed(stored)]
    pages = [await client.list_jobs("q", page_size=2, include_payload=True)]
    while pages[-1].next_page_token:
        token = pages[-1].next_page_token
        pages.append(await client.list_jobs("q", page_size=2, include_payload=True, page_token=token))
    assert [[job.id for job in page.jobs] for page in pages] == [newest_first[:2], newest_first[2:4], newest_first[4:]]
    assert pages[0].jobs[0].payload == b"4"
    assert [job.id async for job in client.iter_jobs("q", page_size=2)] == newest_first
    dead = await client.list_jobs(state=JobState.DEAD, created_before=datetime.now(UTC) + timedelta(hours=1))
    assert len(dead.jobs) == 2
    with pytest.raises(InvalidRequest, match=r"page_size: must be 1 to 1,000, not 0"):
        await client.list_jobs(page_size=0)
    with pytest.raises(InvalidRequest, match="state: "):
        await client.list_jobs(state=JobState.UNKNOWN)
    found = await client.list_jobs("q", state=JobState.READY, attributes={"n": "4"})
    assert [job.id for job in found.jobs] == newest_first[:1]
    counts = (await client.stats("q")).queues["q"]
    assert (counts.ready, counts.dead, counts.succeeded) == (3, 2, None)
    with pytest.raises(NotFound, match=r"^RedriveQueue at .* has no queue 'nosuch'"):
        await client.redrive_queue("nosuch")
    assert await client.redrive_queue("q", kind="another") == 0
    assert await client.redrive_queue("q", limit=1) == 1
    assert await client.purge_queue("q", include_dead=True) == 5
    counted = await client.stats(include_finished=True)
    assert (counted.queues["q"].cancelled, counted.unavailable_shards) == (5, [])
    ids, new_ids = [stored[0].id, uuid7()], [uuid7(), uuid7()]
    for again in (False, True):
        there, nowhere = await client.restore_jobs(ids, new_ids=new_ids)
        assert (there.id, there.new_id, there.duplicate, there.refusal) == (ids[0], new_ids[0], again, None)
        assert nowhere.refusal is RestoreRefusal.NOT_FOUND
    assert await state(client, new_ids[0]) is JobState.READY


async def test_jobs_that_meet_conditions_are_changed_in_steps_and_a_repeated_call_goes_on(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("windrow.job_changes._STEP_MAX", 2)
    jobs = [NewJob("q", "k", attributes={"n": str(n % 2)}, delay=HOUR if n % 4 else None) for n in range(12)]
    stored = await client.enqueue_many(jobs)
    odd = [one.id for one in stored][1::2]
    where = JobFilter(queue="q", attributes={"n": "1"})
    # The call changes the priority and the time of jobs. So if it listed jobs in the order of claims, it would find the
    # changed jobs again.
    later: dict[str, Any] = {"priority": 9, "run_at": datetime.now(UTC) + 2 * HOUR}
    tried = await client.alter_where(where, **later, dry_run=True)
    assert (tried.found, tried.changed, [job.id for job in tried.first]) == (6, 0, odd[:0:-1])
    # A job's record may contain a whole stack trace, so the printed answer shows only the numbers.
    assert repr(tried) == "BulkChange(found=6, changed=0, skipped=0)"
    steps: list[BulkChange] = []

    def interrupt(so_far: BulkChange) -> None:
        steps.append(so_far)
        raise InterruptedError

    with pytest.raises(InterruptedError):
        await client.alter_where(where, **later, on_progress=interrupt)
    done = await client.alter_where(where, **later, on_progress=steps.append)
    assert 0 < steps[0].changed < 6
    assert (done.found, done.changed, done.skipped) == (6 - steps[0].changed, 6 - steps[0].changed, 0)
    assert (await client.alter_where(where, **later)).found == 0
    altered = {job.id for job in (await client.list_jobs()).jobs if job.priority == 9 and job.run_at == later["run_at"]}
    assert altered == set(odd)
    told: list[int] = []
    assert await client.count_jobs(where, on_progress=told.append) == told[-1] == 6
    assert await client.count_jobs() == await client.count_jobs(JobFilter(queue="q")) == 12
    with pytest.raises(NotFound):
        await client.count_jobs(JobFilter(queue="nope"))
    assert (await client.cancel_where(where, limit=4, reason="over")).changed == 4
    assert (await client.cancel_where(where, reason="over")).changed == 2
    assert [job.reason for job in (await client.list_jobs(state=JobState.CANCELLED)).jobs] == ["over"] * 6


async def test_a_job_that_is_leased_meanwhile_is_skipped(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    await client.enqueue_many([NewJob("q", "k") for _ in range(3)])
    alter_jobs = client.alter_jobs

    async def altered_late(ids: Sequence[str], **change: Any) -> list[Answer]:
        assert len(await client.dequeue("q", max_jobs=2)) == 2
        return await alter_jobs(ids, **change)

    monkeypatch.setattr(client, "alter_jobs", altered_late)
    done = await client.alter_where(JobFilter(kind="k"), priority=1)
    assert (done.found, done.changed, done.skipped) == (3, 1, 2)


async def test_blocked_jobs_that_meet_conditions_get_another_priority_but_no_time(client: Client) -> None:
    flow = Workflow("build", org=client.org)
    flow.job("q", "k", after=flow.job("q", "k"))
    await client.start(flow)
    assert (await client.alter_where(JobFilter(kind="k"), priority=1)).changed == 2
    assert (await client.alter_where(JobFilter(kind="k"), delay=60)).found == 1


async def test_dead_jobs_that_meet_conditions_are_redriven(client: Client) -> None:
    stored = await client.enqueue_many([NewJob("q", "k") for _ in range(3)])
    for job in await client.dequeue("q", max_jobs=3):
        await client.nack(job, permanent=True)
    ids = [one.id for one in stored]
    died_at = [job.finished_at for job in (await client.get_jobs(ids)).values()]
    last = max(time for time in died_at if time is not None)
    assert await client.redrive_jobs([ids[0], uuid7()]) == [Answer.OK, Answer.NOT_FOUND]
    assert (await client.redrive_where(JobFilter(died_after=last + HOUR))).found == 0
    assert (await client.redrive_where(JobFilter(queue="q", not_killed=True))).found == 0
    assert (await client.redrive_where(JobFilter(died_before=last + HOUR))).changed == 2
    assert {job.state for job in (await client.get_jobs(ids)).values()} == {JobState.READY}


async def test_an_alter_to_a_past_time_passes_over_the_jobs_that_are_ready(client: Client) -> None:
    await client.enqueue_many([NewJob("q", "k", delay=delay) for delay in (None, 3600)])
    for found in (1, 0):
        past = datetime.now(UTC) - HOUR
        assert (await client.alter_where(JobFilter(queue="q"), run_at=past)).found == found


async def test_a_redrive_may_leave_out_the_jobs_that_were_killed(client: Client) -> None:
    killed, spent = await client.enqueue_many([NewJob("q", "k", max_attempts=1) for _ in range(2)])
    for job in await client.dequeue("q", max_jobs=2):
        await client.nack(job, permanent=job.id == killed.id)
    assert (await client.redrive_where(JobFilter(queue="q", not_killed=True))).changed == 1
    jobs = await client.get_jobs([killed.id, spent.id])
    assert (jobs[killed.id].state, jobs[spent.id].state) == (JobState.DEAD, JobState.READY)


async def test_conditions_that_no_job_can_meet_are_refused_and_nothing_is_changed(client: Client) -> None:
    await client.enqueue("q", "k")
    with pytest.raises(InvalidRequest, match="states: only jobs that are blocked, scheduled, ready can be changed so"):
        await client.alter_where(JobFilter(states=[JobState.LEASED]), priority=1)
    with pytest.raises(InvalidRequest, match=r"died_before: .* has no time zone"):
        JobFilter(died_before=datetime(2026, 1, 1))  # noqa: DTZ001
    # In UTC, this is before the year 1.
    too_early = datetime(1, 1, 1, tzinfo=timezone(HOUR))
    told = r": .* is not in the years 1 to 9999 in UTC$"
    with pytest.raises(InvalidRequest, match=f"^died_before{told}"):
        JobFilter(died_before=too_early)
    with pytest.raises(InvalidRequest, match=f"^run_at{told}"):
        await client.alter_jobs([uuid7()], run_at=too_early)
    with pytest.raises(InvalidRequest, match=r"^delay: '5s' is neither a number of seconds nor a timedelta$"):
        await client.alter_jobs([uuid7()], delay="5s")  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match=f"^at{told}"):
        await client.create_schedule("s", Schedule(at=too_early), NewJob("q", "k"))
    with pytest.raises(InvalidRequest, match="where: has no condition, which would mean every job of the org"):
        await client.cancel_where(JobFilter(states=[JobState.READY]))
    with pytest.raises(InvalidRequest, match=r"attributes\['n'\]: must be a text, not None"):
        JobFilter(attributes={"n": None})  # type: ignore[dict-item]
    with pytest.raises(InvalidRequest, match=r"state: must be one of JobState\.BLOCKED, .*, not 'dead'"):
        await client.list_jobs(state="dead")  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="limit: must be 1 or more, or None for all, not 0"):
        await client.cancel_where(JobFilter(queue="q"), limit=0)
    with pytest.raises(InvalidRequest, match="priority: must be set, unless"):
        await client.alter_where(JobFilter(queue="q"))
    with pytest.raises(InvalidRequest, match="priority: must be 1 to 9, not 10"):
        await client.alter_where(JobFilter(queue="q"), priority=10, dry_run=True)
    with pytest.raises(NotFound, match="has no queue 'nope'"):
        await client.cancel_where(JobFilter(queue="nope"))
    (job,) = (await client.list_jobs("q")).jobs
    assert (job.state, job.priority) == (JobState.READY, 5)


async def test_a_wait_for_a_job_returns_its_result_or_says_that_the_time_is_over(client: Client) -> None:
    stored = await client.enqueue("q", "k")
    with pytest.raises(DeadlineExceeded, match=rf"job {stored.id} is still ready: 0\.2 s are over"):
        await client.wait(stored.id, timeout=0.2)
    waiting = asyncio.create_task(client.wait(stored.id, timeout=WAIT_S))
    (job,) = await client.dequeue("q")
    await client.ack(job, result={"sum": 6})
    ended = await waiting
    assert (ended.state, ended.result) == (JobState.SUCCEEDED, b'{"sum":6}')
    assert await client.wait(stored.id, timeout=0) == ended
    with pytest.raises(NotFound, match="has no job"):
        await client.wait(uuid7(), timeout=WAIT_S)


def test_the_sync_client_does_the_same(cluster: RunningCluster) -> None:
    with SyncClient(cluster.address, org="sync") as client:
        client.enqueue_many([NewJob("q", "k", {"n": at}) for at in range(3)])
        jobs = client.dequeue("q", max_jobs=10, worker="sync-test")
        assert sorted(job.json()["n"] for job in jobs) == [0, 1, 2]
        assert client.extend(jobs, visibility_window=timedelta(minutes=1)) == [Answer.OK] * 3
        assert client.ack(jobs[0], result="ok") is Answer.OK
        assert client.nack(jobs[1], error="no", permanent=True) is Answer.OK
        assert client.release([jobs[2]]) == [Answer.OK]
        records = client.get_jobs([job.id for job in jobs], include_payload=True)
        assert [records[job.id].state.value for job in jobs] == ["succeeded", "dead", "ready"]
        threads = [threading.Thread(target=client.enqueue, args=("many", "k")) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(client.dequeue("many", max_jobs=100)) == 8
        where = JobFilter(queue="many", states=[JobState.LEASED])
        assert client.cancel_where(where, dry_run=True).found == 8
        assert client.cancel_where(where).changed == 8


async def test_a_script_runs_until_a_signal_and_ends_well(cluster: RunningCluster, client: Client) -> None:
    environ = os.environ | {"WINDROW_ADDRESS": cluster.address}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SCRIPT, client.org, cwd=CHECKOUT, env=environ, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        stored = await client.enqueue("q", "hello", "ada")
        async with asyncio.timeout(WAIT_S):
            assert await process.stdout.readline() == b"hello ada\n"
            process.send_signal(signal.SIGTERM)
            assert await process.stdout.readline() == b"stopped\n"
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert await state(client, stored.id) is JobState.SUCCEEDED


async def test_the_readmes_examples_run(cluster: RunningCluster, app_dsn: str, collector: Collector) -> None:
    text = (CHECKOUT / "clients" / "python" / "README.md").read_text()
    examples = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    # test_readme.py runs the other examples, which are about workers and need no jobs.
    enqueue, _again, many, grouped, plain, cancel, keyed, admin, many_changed, _schedules, workflow, *rest = examples
    work, _all_orgs, _middleware, _batch, stop, _timeout, _process, _tests, relay, traced = rest
    environ = os.environ | {
        "WINDROW_ADDRESS": cluster.address,
        "PYTHONUNBUFFERED": "1",
        "OTEL_EXPORTER_OTLP_ENDPOINT": collector.endpoint,
    }

    async def run(example: str, until: bytes) -> None:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", example, cwd=CHECKOUT, env=environ, stdout=subprocess.PIPE
        )
        assert process.stdout is not None
        try:
            async with asyncio.timeout(WAIT_S):
                while until and until not in (line := await process.stdout.readline()):
                    assert line, f"it ended before it said {until!r}"
                if example in (work, stop):
                    process.send_signal(signal.SIGTERM)
                assert await process.wait() == 0
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()

    await run(enqueue, b"False")
    await run(many, b"5000 0")
    await run(grouped, b"")
    await run(plain, b"")
    await run(cancel, b"Answer.OK")
    await run(keyed, b"True")
    await run(admin, b"send_invoice")
    await run(many_changed, b"0")
    await run(workflow, b"")
    await run(work, b"to user99@example.com")
    await run(stop, b"page 3")
    await run(relay.replace("postgresql://localhost/app", app_dsn), b"sent=1")
    await run(traced, b"")
    send = await asyncio.to_thread(collector.one, "send emails")
    assert send.is_child_of(await asyncio.to_thread(collector.one, "checkout"))


async def test_a_worker_outlives_the_death_of_every_router(cluster: RunningCluster, client: Client) -> None:
    worker = Worker(client, "q", visibility_window=20.0)
    started, go_on = asyncio.Event(), asyncio.Event()
    ran: list[str] = []

    @worker.handler("k")
    async def k(job: Job) -> None:
        started.set()
        await go_on.wait()
        ran.append(job.id)

    before = await client.enqueue("q", "k")
    task = asyncio.create_task(worker.run())
    async with asyncio.timeout(WAIT_S):
        await started.wait()
    await asyncio.to_thread(cluster.kill)
    # Let the handler end while no router can be reached.
    go_on.set()
    waiting = asyncio.create_task(client.enqueue("q", "k"))
    await asyncio.to_thread(cluster.start)
    after = await waiting

    async def both_done() -> bool:
        records = await client.get_jobs([before.id, after.id])
        return {record.state for record in records.values()} == {JobState.SUCCEEDED}

    await eventually(both_done)
    await stopped(worker, task)
    assert ran == [before.id, after.id]


async def test_nothing_is_lost_while_routers_die_under_a_busy_worker(cluster: RunningCluster, client: Client) -> None:
    # If a router dies while jobs are on their way to the worker, the jobs come back when their windows end.
    worker = Worker(client, "q", visibility_window=3.0)
    ran: set[str] = set()

    @worker.handler("k")
    async def k(job: Job) -> None:
        await asyncio.sleep(0.005)
        ran.add(job.id)

    stored = await client.enqueue_many([NewJob("q", "k") for _ in range(1000)])
    task = asyncio.create_task(worker.run())

    async def ran_at_least(count: int) -> bool:
        return len(ran) >= count

    for count in (100, 400):
        await eventually(partial(ran_at_least, count))
        await asyncio.to_thread(cluster.kill)
        await asyncio.to_thread(cluster.start)

    async def all_done() -> bool:
        records = await client.get_jobs([one.id for one in stored])
        return {record.state for record in records.values()} == {JobState.SUCCEEDED}

    await eventually(all_done)
    await stopped(worker, task)
    assert ran == {one.id for one in stored}


@pytest.fixture
async def app(app_dsn: str) -> AsyncIterator[psycopg.AsyncConnection[Any]]:
    async with await psycopg.AsyncConnection.connect(app_dsn, autocommit=True) as connection:
        await connection.execute(outbox.SCHEMA)
        await connection.execute("TRUNCATE windrow_outbox")
        yield connection
        await connection.execute("TRUNCATE windrow_outbox")


async def rows(app: psycopg.AsyncConnection[Any]) -> list[tuple[str, str | None]]:
    cursor = await app.execute("SELECT id::text, error FROM windrow_outbox ORDER BY id")
    return await cursor.fetchall()


async def test_the_outbox_stores_a_job_with_the_transaction_or_not_at_all(
    app: psycopg.AsyncConnection[Any], app_dsn: str, client: Client
) -> None:
    relay = outbox.Relay(app_dsn, client)
    gone = NewJob("q", "k")
    async with app.transaction(force_rollback=True):
        await outbox.add(app, client.org, gone)
    async with app.transaction():
        ids = await outbox.add(app, client.org, NewJob("q", "k", "one"), NewJob("q", "k", "two", delay=3600))
        assert await relay.run_once() == outbox.Relayed()
    with psycopg.connect(app_dsn) as plain:
        ids += outbox.add(plain, f"{client.org}-other", NewJob("q", "k", "three"))
    assert await relay.run_once() == outbox.Relayed(sent=3)
    assert await rows(app) == []
    records = await client.get_jobs([gone.id, *ids])
    assert list(records) == ids[:2]
    assert [record.state for record in records.values()] == [JobState.READY, JobState.SCHEDULED]
    left = records[ids[1]].run_at - datetime.now(UTC)
    assert timedelta(minutes=59) < left <= timedelta(hours=1)
    assert len(await client.for_org(f"{client.org}-other").dequeue("q")) == 1


async def test_a_relay_that_dies_before_its_delete_stores_nothing_twice(
    app: psycopg.AsyncConnection[Any], app_dsn: str, client: Client
) -> None:
    class Dying(outbox.Relay):
        async def _conclude(
            self, connection: psycopg.AsyncConnection[Any], sent: Sequence[str], bad: dict[str, str]
        ) -> None:
            assert len(sent) == 2
            await connection.close()
            raise psycopg.OperationalError("killed")

    ids = await outbox.add(app, client.org, NewJob("q", "k"), NewJob("q", "k"))
    with pytest.raises(psycopg.OperationalError):
        await Dying(app_dsn, client).run_once()
    assert len(await rows(app)) == 2
    assert await outbox.Relay(app_dsn, client).run_once() == outbox.Relayed(sent=2)
    assert await rows(app) == []
    assert sorted(job.id for job in await client.dequeue("q", max_jobs=10)) == sorted(ids)


async def test_a_bad_job_in_the_outbox_is_set_aside_and_holds_up_none(
    app: psycopg.AsyncConnection[Any], app_dsn: str, client: Client
) -> None:
    old = NewJob("q", "k", id="01900000-0000-7000-8000-000000000000")
    good, bad, elsewhere = NewJob("q", "k"), NewJob("no spaces", "k"), NewJob("q", "k")
    await outbox.add(app, client.org, good)
    # A program with another release of the client, which has other rules, may have added these jobs.
    for org, job in ((client.org, old), (client.org, bad), ("x" * 200, elsewhere)):
        row = [job.id, org, enqueue_request(org, [job]).jobs[0].SerializeToString()]
        await app.execute("INSERT INTO windrow_outbox (id, org, job) VALUES (%s, %s, %s)", row)
    assert await outbox.Relay(app_dsn, client).run_once() == outbox.Relayed(sent=1, set_aside=3)
    told = dict(await rows(app))
    assert set(told) == {old.id, bad.id, elsewhere.id}
    assert "7 days" in (told[old.id] or "")
    assert (told[bad.id] or "").startswith("template.queue: must be ")
    assert "org" in (told[elsewhere.id] or "")
    assert await outbox.Relay(app_dsn, client).run_once() == outbox.Relayed()
    assert await state(client, good.id) is JobState.READY


async def test_relays_share_the_work_and_stop(app: psycopg.AsyncConnection[Any], app_dsn: str, client: Client) -> None:
    relays = [outbox.Relay(app_dsn, client, rows_max=20) for _ in range(2)]
    tasks = [asyncio.create_task(relay.run()) for relay in relays]
    ids: list[str] = []
    for _ in range(10):
        async with app.transaction():
            ids += await outbox.add(app, client.org, *(NewJob("q", "k") for _ in range(30)))

    async def empty() -> bool:
        return not await rows(app)

    await eventually(empty)
    for relay in relays:
        relay.stop()
    async with asyncio.timeout(WAIT_S):
        await asyncio.gather(*tasks)
    assert sorted(job.id for job in await client.dequeue("q", max_jobs=1000)) == sorted(ids)


async def test_an_org_that_cannot_be_reached_holds_up_only_itself(
    app: psycopg.AsyncConnection[Any], app_dsn: str, client: Client
) -> None:
    """The two orgs use a router that does not exist, so that the test can observe the pauses between tries."""
    async with Client("127.0.0.1:9", org="nobody", timeout=0.2) as away:
        relay = outbox.Relay(app_dsn, away)
        await outbox.add(app, client.org, NewJob("q", "k"))
        assert await relay.run_once() == outbox.Relayed(left=1)
        await outbox.add(app, "other", NewJob("q", "k"))
        assert await relay.run_once() == outbox.Relayed(left=1)
    assert len(await rows(app)) == 2
