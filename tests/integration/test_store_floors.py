"""Floors are only hints (I7). A claim may find a job late if the job was committed late, but no job is lost."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

import pytest

from shard.errors import ShardUnavailable
from shard.postgres.pool import Database
from shard.queue import statements
from shard.queue.claim_floor import GUARD_US
from shard.queue.settle import Settlement
from shard.queue.store import Store
from shard.queue.sweep import Due
from shard.vocabulary import OrgId, QueueId, QueueName
from tests.conftest import SHARD
from tests.jobs import QUEUE, job_id, lease_jobs, some_jobs
from tests.recorder import Recorder
from tests.timemachine import end_leases, make_due, pass_time

LATE = """
INSERT INTO windrow.job (id, queue_id, run_at, visible_at, priority, kind, payload)
VALUES (%s, %s, now(), now(), 5, 'late', '')
"""


async def test_a_job_that_commits_below_the_floor_is_missed_by_a_claim_and_found_after_a_sweep(
    database: Database, org: OrgId
) -> None:
    store = Store(database)
    await store.enqueue(some_jobs(org, 1))
    queue_id = (await store.names.find([(org, QUEUE)]))[org, QUEUE]
    late = job_id()
    async with database.transaction() as connection:
        # The `now()` of this transaction is the current time, but the transaction commits later than the guard time
        # allows.
        await connection.execute(LATE, [late, queue_id])
        await pass_time(database, GUARD_US / 1_000_000 + 0.1)
        await store.enqueue(some_jobs(org, 3))
        assert len(await lease_jobs(store, org)) == 4
    assert await lease_jobs(store, org) == []
    assert (await store.sweep()).first
    assert [job.id for job, _ in await lease_jobs(store, org)] == [late]


async def test_after_a_sweep_that_took_long_the_next_one_passes_by_what_was_claimed_and_finds_what_commits_late(
    fresh_dsn: str, org: OrgId, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shard.queue.sweep._FULL_SWEEP_S_MAX", 0.0)
    monkeypatch.setattr("shard.queue.sweep._FULL_SWEEP_PAUSE", 1e9)
    recorder = Recorder(SHARD, fresh_dsn, connections=2)
    await recorder.open()
    store = Store(recorder)
    await store.enqueue(some_jobs(org, 3))
    assert len(await lease_jobs(store, org)) == 3
    await store.sweep()
    queue_id = (await store.names.find([(org, QUEUE)]))[org, QUEUE]
    late = job_id()
    async with recorder.transaction() as connection:
        await connection.execute(LATE, [late, queue_id])
        await pass_time(recorder, 5)
        await store.enqueue(some_jobs(org, 3))
        assert len(await lease_jobs(store, org)) == 3
    assert await lease_jobs(store, org) == []
    before = len(recorder.runs)
    assert (await store.sweep()).first
    assert recorder.count(statements.SWEEP, since=before) == 0
    _, asked = recorder.last(statements.PROBE)
    assert min(as_numbers(asked["floors_us"])) > 0
    assert [job.id for job, _ in await lease_jobs(store, org)] == [late]
    await recorder.close()


def as_numbers(numbers: object) -> list[int]:
    assert isinstance(numbers, str)
    return [int(number) for number in numbers.strip("{}").split(",")]


async def test_a_job_that_commits_within_the_guard_is_found_without_a_sweep(database: Database, org: OrgId) -> None:
    store = Store(database)
    await store.enqueue(some_jobs(org, 1))
    queue_id = (await store.names.find([(org, QUEUE)]))[org, QUEUE]
    late = job_id()
    async with database.transaction() as connection:
        await connection.execute(LATE, [late, queue_id])
        await store.enqueue(some_jobs(org, 3))
        assert len(await lease_jobs(store, org)) == 4
    assert [job.id for job, _ in await lease_jobs(store, org)] == [late]


async def test_a_job_that_another_claim_had_locked_and_let_go_is_found_after_a_sweep(
    database: Database, org: OrgId
) -> None:
    """A claim skips rows that other transactions have locked. If those transactions roll back, the rows are then below
    the floor."""
    store = Store(database)
    jobs = some_jobs(org, 5)
    await store.enqueue(jobs)
    await pass_time(database, GUARD_US / 1_000_000 + 0.1)
    await store.enqueue(some_jobs(org, 2))
    async with database.transaction() as connection:
        await connection.execute("SELECT FROM windrow.job WHERE id = %s FOR UPDATE", [jobs.ids[0]])
        assert len(await lease_jobs(store, org)) == 6
    await store.sweep()
    assert [job.id for job, _ in await lease_jobs(store, org)] == [jobs.ids[0]]


async def test_floors_never_hide_what_becomes_due(database: Database, org: OrgId) -> None:
    """Retried jobs, expired leases and scheduled jobs all become visible ahead of the floors of two routers."""
    stores = Store(database), Store(database)
    for turn in range(4):
        one, other = stores if turn % 2 else stores[::-1]
        await one.enqueue(some_jobs(org, 2))
        await one.enqueue(some_jobs(org, 1, delay_us=3_600_000_000))
        await pass_time(database, 0.4)
        held = await lease_jobs(one, org)
        assert len(held) == 2
        await one.settle(Settlement.release(org, [held[0][1]]))
        assert len(await lease_jobs(other, org)) == 1
        await other.sweep()
        assert await end_leases(database, org) == 2
        assert await make_due(database, org) == 1
        found = await lease_jobs(other, org)
        assert len(found) == 3
        await other.settle(Settlement.ack(org, [lease for _, lease in found], [None] * 3))
        await one.sweep()


async def test_a_fresh_store_finds_everything(database: Database, org: OrgId) -> None:
    await Store(database).enqueue(some_jobs(org, 3))
    await pass_time(database, 0.01)
    assert len(await lease_jobs(Store(database), org)) == 3


async def test_queues_of_one_priority_are_served_in_turn(database: Database, org: OrgId) -> None:
    store = Store(database)
    queues = [QueueName(f"q{n}") for n in range(3)]
    for queue in queues:
        await store.enqueue(some_jobs(org, 40, queue=queue))
    firsts: set[str] = set()
    async with asyncio.timeout(30):
        while len(firsts) < 3:
            _, (job,), *_ = await store.claim(org, queues, max_jobs=1, window_us=60_000_000, worker="w")
            firsts.add(job.queue)


async def test_a_lower_priority_waits_for_all_higher_ones_of_every_queue(database: Database, org: OrgId) -> None:
    store = Store(database)
    queues = [QueueName(f"q{n}") for n in range(3)]
    for queue in queues:
        for priority in (9, 1, 5):
            await store.enqueue(some_jobs(org, 2, queue=queue, priority=priority))
    got: list[int] = []
    while True:
        _, claimed, *_ = await store.claim(org, queues, max_jobs=4, window_us=60_000_000, worker="w")
        if not claimed:
            break
        assert [job.priority for job in claimed] == sorted(job.priority for job in claimed)
        got += [job.priority for job in claimed]
    assert got == [1] * 6 + [5] * 6 + [9] * 6


@pytest.mark.parametrize("error", [ShardUnavailable(SHARD, "its connection broke"), KeyError("a fault")])
async def test_what_a_sweep_has_found_is_told_although_something_else_of_it_fails(
    store: Store, org: OrgId, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    await store.enqueue(some_jobs(org, 1))
    queue_id = (await store.names.find([(org, QUEUE)]))[org, QUEUE]
    look = store.sweeper._look

    async def look_and_more(queues: list[QueueId]) -> Due:
        return replace(await look(queues), groups_wait=True, ages=True, quarantines=True)

    async def fail(*_: object) -> set[QueueId]:
        raise error

    monkeypatch.setattr(store.sweeper, "_look", look_and_more)
    monkeypatch.setattr(store.sweeper, "_move_aged", fail)
    monkeypatch.setattr(store.sweeper._groups, "sweep", fail)
    monkeypatch.setattr(store.quarantine, "sweep", fail)
    for _ in range(2):
        assert queue_id in (await store.sweep([queue_id])).first
    if isinstance(error, ShardUnavailable):
        # Only the first failure of each step is logged as a warning.
        failed = ["fill slots of groups", "move jobs that have aged", "look after quarantined kinds"]
        warned = [record.message for record in caplog.records if record.levelno == logging.WARNING]
        assert [words in text for words, text in zip(failed, warned, strict=True)] == [True] * 3
