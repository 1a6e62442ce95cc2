"""Lookups and counts use connections too. The calls of one org leave some connections for other orgs (I4)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, LiteralString

import psycopg
import pytest

from shard.admin.queue_admin import QueueAdmin
from shard.errors import UnknownWorkflow
from shard.postgres.pool import Database
from shard.queue.store import Store
from shard.vocabulary import OrgId
from shard.workflow import WorkflowId
from shard.workflows.calls import WorkflowCalls
from shard.workflows.sweep import WorkflowSweep
from shard.workflows.workflow_admin import WorkflowAdmin
from tests.conftest import SHARD
from tests.jobs import QUEUE, ids_of, job_id, lease_jobs, some_jobs
from tests.timemachine import until_blocked


@contextlib.asynccontextmanager
async def under_way(
    dsn: str,
    watcher: Database,
    calls: int,
    call: Callable[[], Coroutine[Any, Any, object]],
    *,
    at_once: int,
    lock: LiteralString = "LOCK TABLE windrow.departing IN ACCESS EXCLUSIVE MODE",
) -> AsyncGenerator[None]:
    """Runs this many slow calls during the `with` block, `at_once` of them at the same time. In production, calls are
    slow because they scan much data. In this test, the calls wait for a lock instead."""
    async with await psycopg.AsyncConnection.connect(dsn) as holder:
        await holder.execute(lock)
        tasks = [asyncio.create_task(call()) for _ in range(calls)]
        await until_blocked(watcher, at_once)
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


@pytest.fixture
async def watcher(fresh_dsn: str) -> AsyncGenerator[Database]:
    database = Database(SHARD, fresh_dsn, connections=1)
    await database.open()
    yield database
    await database.close()


@pytest.mark.parametrize("calls", [10, 1200])
async def test_lookups_that_take_long_hold_up_no_other_orgs_jobs(
    fresh_database: Database, watcher: Database, fresh_dsn: str, org: OrgId, other_org: OrgId, calls: int
) -> None:
    store, jobs = Store(fresh_database), some_jobs(other_org, 1)
    await store.enqueue(jobs)

    def look() -> Coroutine[Any, Any, object]:
        return store.get(org, [job_id()], include_payload=False)

    async with under_way(fresh_dsn, watcher, calls, look, at_once=1 if calls < 100 else 2):
        assert [job.id for job, _ in await lease_jobs(store, other_org)] == ids_of(jobs)


async def test_enqueues_that_wait_for_their_groups_hold_up_no_other_orgs_enqueue(
    fresh_database: Database, watcher: Database, fresh_dsn: str, org: OrgId, other_org: OrgId
) -> None:
    store = Store(fresh_database)

    def enqueue() -> Coroutine[Any, Any, object]:
        return store.enqueue(some_jobs(org, 600, group="g"))

    buckets: LiteralString = "SELECT pg_advisory_xact_lock(14, bucket) FROM generate_series(0, 1023) AS bucket"
    async with under_way(fresh_dsn, watcher, 5, enqueue, at_once=2, lock=buckets):
        assert await store.enqueue(some_jobs(other_org, 1)) == {}


async def test_changes_of_unknown_workflows_need_no_more_connections_than_they_have(
    fresh_database: Database, watcher: Database, fresh_dsn: str
) -> None:
    orgs = [OrgId(f"org-{number}") for number in range(3)]
    for org in orgs:
        await Store(fresh_database).enqueue(some_jobs(org, 1))
    database = Database(SHARD, fresh_dsn, connections=3)
    await database.open()
    store, workflow = Store(database), WorkflowId(job_id())
    workflows = WorkflowAdmin(database, store, WorkflowCalls(database, store), WorkflowSweep(database, store))
    try:
        async with await psycopg.AsyncConnection.connect(fresh_dsn) as holder:
            await holder.execute(
                "SELECT windrow.lock_workflows(ARRAY[o.org_id], ARRAY[%s::uuid]) FROM windrow.org o", [workflow]
            )
            calls = [asyncio.create_task(workflows.set_paused(org, workflow, paused=True, epoch=1)) for org in orgs]
            await until_blocked(watcher, len(orgs))
        answers = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(answer) for answer in answers] == [UnknownWorkflow] * len(orgs)
    finally:
        await database.close()


async def test_counts_that_take_long_hold_up_no_other_orgs_queues(
    fresh_database: Database, watcher: Database, fresh_dsn: str, org: OrgId, other_org: OrgId
) -> None:
    for one in (org, other_org):
        await Store(fresh_database).enqueue(some_jobs(one, 1))
    database = Database(SHARD, fresh_dsn, connections=2, may_scan=True)
    await database.open()
    books = QueueAdmin(database)
    try:
        async with under_way(fresh_dsn, watcher, 9, lambda: books.stats(org, None, include_finished=False), at_once=1):
            assert (await books.get_queue(other_org, QUEUE)).queue == QUEUE
    finally:
        await database.close()
