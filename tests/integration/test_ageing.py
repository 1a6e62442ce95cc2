"""Priorities that age: a ready job that has waited long enough is moved to priority 1, on a shard and by routers."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest

import windrow
from shard.admin.queue_admin import QueueAdmin
from shard.lease_token import lease_of
from shard.postgres.pool import Database
from shard.queue import statements
from shard.queue.explain import LiveFacts
from shard.queue.settle import Settlement
from shard.queue.store import Store
from shard.queue.sweep import _AGED_MAX
from shard.queue_settings import QueueSettings
from shard.vocabulary import PRIORITIES, Answer, JobId, NewJobs, OrgId, QueueName
from tests.command import windrow as command
from tests.jobs import QUEUE, history_of, ids_of, lease_jobs, some_jobs
from tests.postgres import Server
from tests.recorder import Recorder
from tests.routers import PATIENCE_S, running_routers, write_cluster

AGEING_S = 100


async def wait(database: Database, org: OrgId, seconds: int) -> None:
    """Makes the org's visible jobs older: moves the time at which they became visible back by `seconds`."""
    await database.run(
        b"""
        UPDATE windrow.job j
        SET run_at = j.run_at - %(seconds)s * interval '1 s', visible_at = j.visible_at - %(seconds)s * interval '1 s',
            leased_at = j.leased_at - %(seconds)s * interval '1 s'
        FROM windrow.queue q
        WHERE q.queue_id = j.queue_id AND q.org = %(org)s AND j.visible_at <= now()
        """,
        {"org": org, "seconds": seconds},
    )


async def priorities(database: Database, org: OrgId) -> dict[JobId, int]:
    rows = await database.run(
        b"SELECT j.id::text, j.priority FROM windrow.job j JOIN windrow.queue q USING (queue_id) WHERE q.org = %(org)s",
        {"org": org},
    )
    return dict(rows)


async def sweep(store: Store, org: OrgId) -> None:
    await store.sweep((await store.names.find([(org, QueueName(QUEUE))])).values())


async def test_a_job_is_moved_after_as_many_times_the_ageing_as_its_priority_is_above_one(
    database: Database, books: QueueAdmin, org: OrgId
) -> None:
    store = Store(database)
    await books.create_queue(org, QUEUE, QueueSettings(ageing_seconds=AGEING_S))
    of = {priority: some_jobs(org, 1, priority=priority) for priority in PRIORITIES}
    for jobs in of.values():
        await store.enqueue(jobs)
    for waited in range(9):
        await sweep(store, org)
        found = await priorities(database, org)
        assert [found[JobId(of[p].ids[0])] for p in PRIORITIES] == [1 if p - 1 <= waited else p for p in PRIORITIES]
        await wait(database, org, AGEING_S)
    # A moved job comes after the jobs that already had priority 1. Moved jobs come in the order in which they were
    # moved.
    assert [job.id for job, _ in await lease_jobs(store, org)] == [of[p].ids[0] for p in PRIORITIES]


async def test_without_ageing_no_job_is_moved_and_no_statement_is_sent(recorder: Recorder, org: OrgId) -> None:
    store = Store(recorder)
    await store.enqueue(jobs := some_jobs(org, 3, priority=9))
    await wait(recorder, org, 10_000_000)
    before = len(recorder.runs)
    await sweep(store, org)
    assert recorder.count(statements.SWEEP, since=before) == 1
    assert recorder.count(statements.MOVE_AGED, since=before) == 0
    assert await priorities(recorder, org) == dict.fromkeys(ids_of(jobs), 9)


async def test_a_job_keeps_the_time_at_which_it_was_due(database: Database, books: QueueAdmin, org: OrgId) -> None:
    store = Store(database)
    await books.create_queue(org, QUEUE, QueueSettings(ageing_seconds=1))
    await store.enqueue(jobs := some_jobs(org, 1, priority=2))
    (job_id,) = ids_of(jobs)
    (before,) = await store.get(org, [job_id], include_payload=False)
    await wait(database, org, 50)
    await sweep(store, org)
    (after,) = await store.get(org, [job_id], include_payload=False)
    assert before is not None
    assert after is not None
    assert (after.priority, before.run_at - after.run_at) == (1, 50_000_000)
    (claimed, _), *_ = await lease_jobs(store, org)
    assert (claimed.id, claimed.priority) == (job_id, 1)


async def test_jobs_that_are_scheduled_or_leased_do_not_age(database: Database, books: QueueAdmin, org: OrgId) -> None:
    store = Store(database)
    await books.create_queue(org, QUEUE, QueueSettings(ageing_seconds=1))
    await store.enqueue(leased := some_jobs(org, 1, priority=5))
    ((_, lease),) = await lease_jobs(store, org)
    await store.enqueue(scheduled := some_jobs(org, 1, priority=5, delay_us=60_000_000))
    await database.run(b"UPDATE windrow.job SET leased_at = leased_at - interval '1 day'", {})
    await sweep(store, org)
    assert await priorities(database, org) == dict.fromkeys([*ids_of(leased), *ids_of(scheduled)], 5)
    assert await store.settle(Settlement.ack(org, [lease])) == [Answer.OK]


async def test_an_expired_lease_is_recorded_when_its_job_is_moved_and_stays_ended(
    database: Database, books: QueueAdmin, org: OrgId
) -> None:
    store = Store(database)
    await books.create_queue(org, QUEUE, QueueSettings(ageing_seconds=1))
    await store.enqueue(jobs := some_jobs(org, 1, priority=3))
    ((claimed, lease),) = await lease_jobs(store, org, worker="gone")
    await database.run(b"UPDATE windrow.job SET visible_at = now() WHERE lease IS NOT NULL", {})
    await wait(database, org, 50)
    await sweep(store, org)
    assert await store.settle(Settlement.ack(org, [lease])) == [Answer.STALE]
    (record,) = await store.get(org, ids_of(jobs), include_payload=False)
    assert record is not None
    assert [(attempt["outcome"], attempt["worker"]) for attempt in history_of(record.history)] == [("expired", "gone")]
    ((again, _),) = await lease_jobs(store, org)
    assert (again.id, again.attempt, again.priority) == (claimed.id, 2, 1)
    assert lease_of(again.id, again.lease) != lease
    # The claim does not record the expired attempt a second time.
    (record,) = await store.get(org, ids_of(jobs), include_payload=False)
    assert record is not None
    assert len(history_of(record.history)) == 1


async def test_a_sweep_moves_so_many_jobs_at_most_and_the_next_one_goes_on(
    database: Database, books: QueueAdmin, org: OrgId
) -> None:
    store = Store(database)
    await books.create_queue(org, QUEUE, QueueSettings(ageing_seconds=1))
    for priority in (4, 9):
        await store.enqueue(some_jobs(org, _AGED_MAX + 5, priority=priority))
    await wait(database, org, 50)
    for moved in (2 * _AGED_MAX, 2 * _AGED_MAX + 10):
        await sweep(store, org)
        assert sum(priority == 1 for priority in (await priorities(database, org)).values()) == moved


async def test_a_paused_queue_does_not_age(database: Database, books: QueueAdmin, org: OrgId) -> None:
    store = Store(database)
    await books.create_queue(org, QUEUE, QueueSettings(ageing_seconds=1, paused=True))
    await store.enqueue(jobs := some_jobs(org, 1, priority=9))
    await wait(database, org, 50)
    await sweep(store, org)
    assert await priorities(database, org) == dict.fromkeys(ids_of(jobs), 9)


async def test_an_explanation_says_when_the_job_is_moved_before_the_others(
    database: Database, books: QueueAdmin, org: OrgId
) -> None:
    store = Store(database)
    await store.enqueue(urgent := some_jobs(org, 1, priority=1))
    await store.enqueue(jobs := some_jobs(org, 1, priority=3))

    async def explained(of: NewJobs) -> LiveFacts:
        facts = await store.explain_job(org, *ids_of(of))
        assert facts is not None
        assert facts.live is not None
        return facts.live

    live = await explained(jobs)
    assert (live.more_urgent, live.goes_first_at) == (1, None)
    await books.alter_queue(org, QUEUE, QueueSettings(ageing_seconds=AGEING_S))
    live = await explained(jobs)
    assert live.goes_first_at == live.visible_at + 2 * AGEING_S * 1_000_000
    assert (await explained(urgent)).goes_first_at is None


DEEP = b"""
INSERT INTO windrow.job (id, queue_id, run_at, visible_at, priority, kind, payload)
SELECT
    (
        lpad(to_hex((extract(epoch FROM now()) * 1000)::bigint), 12, '0') || '7000' || '8' || lpad(to_hex(n), 15, '0')
    )::uuid,
    %(queue_id)s, due.at, due.at, 2 + n %% 8, 'fill', ''
FROM generate_series(1, %(rows)s) AS n
CROSS JOIN LATERAL (SELECT now() - interval '1 day' + n * interval '1 us' AS at) due
"""


async def test_a_sweep_costs_no_more_with_many_jobs_that_have_aged_or_have_not(
    fresh_recorder: Recorder, org: OrgId
) -> None:
    """Counts the rows that the statement reads, by the statistics of the ready index."""
    store = Store(fresh_recorder)
    await QueueAdmin(fresh_recorder).create_queue(org, QUEUE, QueueSettings(ageing_seconds=604_800))
    ((_, queue_id),) = (await store.names.find([(org, QUEUE)])).items()
    await fresh_recorder.run(DEEP, {"queue_id": queue_id, "rows": 20_000})
    for ageing_s, moved in ((604_800, 0), (1, 8 * _AGED_MAX)):
        await QueueAdmin(fresh_recorder).alter_queue(org, QUEUE, QueueSettings(ageing_seconds=ageing_s))
        await sweep(store, org)
        statement, parameters = fresh_recorder.last(statements.MOVE_AGED)
        async with fresh_recorder.transaction() as connection:
            # These statistics show at once what this transaction has read, and nothing else.
            await connection.execute("UPDATE windrow.queue SET ageing_seconds = ageing_seconds")
            reads = b"SELECT pg_stat_get_xact_tuples_returned('windrow.job'::regclass::oid)::bigint"
            indexed = b"SELECT pg_stat_get_xact_tuples_returned('windrow.job_ready'::regclass::oid)::bigint"
            await connection.run(statement, parameters)
            ((scanned,),), ((read,),) = await connection.run(reads, {}), await connection.run(indexed, {})
        print(ageing_s, moved, scanned, read)
        assert scanned == 0
        # This run has moved a second batch. It has also read the dead row versions that remain of the first batch.
        assert read <= 4 * moved + 50


async def test_an_urgent_stream_does_not_starve_the_least_urgent_job(
    postgres: Server, tmp_path_factory: pytest.TempPathFactory
) -> None:
    database = postgres.create("ageing")
    config = write_cluster(tmp_path_factory.mktemp("ageing") / "cluster.toml", {"s1": database}, sweep_seconds=0.05)
    with running_routers(config) as routers:
        async with windrow.Client(routers.address, org="acme") as client:
            queue = await client.put_queue("mail", ageing_seconds=1)
            assert queue.ageing_seconds == 1
            starving = await client.enqueue("mail", "k", priority=2)
            for _ in range(4):
                await client.enqueue("mail", "k", priority=1)
            explained = await client.explain_job(starving.id)
            ahead = next(cause for cause in explained.causes if cause.name == "jobs_ahead")
            assert "it is moved before them at" in str(ahead)
            async with asyncio.timeout(PATIENCE_S):
                while True:
                    # There are always more urgent jobs than the consumer takes.
                    await client.enqueue("mail", "k", priority=1)
                    (job,) = await client.dequeue("mail", max_jobs=1, wait=1)
                    await client.ack(job)
                    if job.id == starving.id:
                        break
            assert (await client.stats("mail")).queues["mail"].ready >= 1
        done = command("queues", "update", "acme", "mail", "--ageing", "10m", "--json", "--address", routers.address)
        assert done.documents[0]["ageing_seconds"] == timedelta(minutes=10).total_seconds()
        shown = command("queues", "list", "acme", "--address", routers.address)
        assert "10m" in shown.lines[1]
        reset = ("queues", "update", "acme", "mail", "--reset", "ageing_seconds", "--json", "--address")
        assert command(*reset, routers.address).documents[0]["ageing_seconds"] is None
        assert command("queues", "update", "acme", "mail", "--ageing", "1500ms").code == 2
