"""Any whole number of days may be a retention. The partitions for a retention are made when it is first used, and no
other call waits for this."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack

import psycopg
import pytest

from shard.admin.job_pages import Wanted
from shard.admin.queue_admin import QueueAdmin
from shard.errors import ShardUnavailable, TooManyRetentions, UnknownQueue
from shard.history.days import days_over, days_past, drop, turn_cold
from shard.postgres import partitions
from shard.postgres.pool import Database
from shard.queue.settle import Settlement
from shard.queue.store import Store
from shard.queue_settings import QueueSettings
from shard.vocabulary import RETENTION_MAX, RETENTIONS_MAX, Answer, Lease, OrgId, QueueName
from tests.conftest import SHARD
from tests.jobs import QUEUE, ids_of, lease_jobs, some_jobs
from tests.timemachine import age_finished, until_blocked

MADE_BY_MIGRATIONS = [0, 1, 7, 30, 90, 365, 2557]


@pytest.fixture
async def books(fresh_database: Database) -> QueueAdmin:
    return QueueAdmin(fresh_database)


@pytest.fixture
async def others(fresh_dsn: str) -> AsyncGenerator[list[Database], None]:
    """Opens the shard's database four more times, as four more processes do."""
    async with AsyncExitStack() as stack:
        opened = [Database(SHARD, fresh_dsn, connections=1) for _ in range(4)]
        for database in opened:
            await database.open()
            stack.push_async_callback(database.close)
        yield opened


async def set_unnoticed(database: Database, org: OrgId, days: int) -> None:
    """Sets the retention of the org's queues without making the partitions, as the import of a move does."""
    await database.run(b"UPDATE windrow.queue SET retention = %(days)s WHERE org = %(org)s", {"days": days, "org": org})


async def lease_some(store: Store, org: OrgId, count: int = 1) -> list[Lease]:
    await store.enqueue(some_jobs(org, count))
    return [lease for _, lease in await lease_jobs(store, org, max_jobs=count)]


async def retentions_of(database: Database, table: str = "finished") -> list[int]:
    rows = await database.run(
        b"""
        SELECT split_part(relname, '_', 2)::integer AS days
        FROM pg_inherits JOIN pg_class ON pg_class.oid = inhrelid
        WHERE inhparent = %(table)s::regclass AND relname <> 'cold_held'
        ORDER BY days
        """,
        {"table": f"windrow.{table}"},
    )
    return [days for (days,) in rows]


async def kept(database: Database, org: OrgId) -> list[int]:
    rows = await database.run(
        b"""
        SELECT f.retention FROM windrow.finished f JOIN windrow.queue q USING (queue_id)
        WHERE q.org = %(org)s ORDER BY f.retention
        """,
        {"org": org},
    )
    return [days for (days,) in rows]


@pytest.mark.parametrize("days", [2, 14, RETENTION_MAX])
async def test_a_job_is_kept_for_as_many_days_as_its_queue_says_and_is_found_until_then(
    fresh_database: Database, books: QueueAdmin, org: OrgId, days: int
) -> None:
    store = Store(fresh_database)
    await books.create_queue(org, QUEUE, QueueSettings(retention_days=days))
    assert await store.settle(Settlement.ack(org, await lease_some(store, org))) == [Answer.OK]
    assert await kept(fresh_database, org) == [days]
    assert (await books.get_queue(org, QUEUE)).settings.retention_days == days
    (job,) = await age_finished(fresh_database, org, days=days)
    for day in await days_over(fresh_database):
        await turn_cold(fresh_database, day)
    # Less than `days` days and three hours have passed since the end of the job's day.
    assert await days_past(fresh_database) == []
    page = await books.list_jobs(
        Wanted(org=org, queue=QUEUE, state=None, include_payload=False), page_size=9, page_token=""
    )
    assert [found.id for found in page.jobs] == [job]
    assert [found.id for found in await store.get(org, [job], include_payload=False)] == [job]


async def test_a_cold_day_of_any_retention_is_dropped_when_its_time_is_over(
    fresh_database: Database, books: QueueAdmin, org: OrgId
) -> None:
    store = Store(fresh_database)
    await books.create_queue(org, QUEUE, QueueSettings(retention_days=3))
    assert await store.settle(Settlement.ack(org, await lease_some(store, org))) == [Answer.OK]
    await age_finished(fresh_database, org, days=5)
    for day in await days_over(fresh_database):
        await turn_cold(fresh_database, day)
    assert [(await drop(fresh_database, day)).jobs for day in await days_past(fresh_database)] == [1]
    (found,) = [entry for entry in await books.check() if entry.org == org]
    assert (found.expired, found.balanced) == (1, True)


async def test_an_ack_makes_the_partitions_of_a_retention_that_the_shard_has_never_seen(
    fresh_database: Database, org: OrgId
) -> None:
    store = Store(fresh_database)
    leases = await lease_some(store, org, 3)
    await set_unnoticed(fresh_database, org, 14)
    assert await store.settle(Settlement.ack(org, leases)) == [Answer.OK] * 3
    assert await kept(fresh_database, org) == [14] * 3
    for table in ("finished", "cold"):
        assert await retentions_of(fresh_database, table) == sorted([*MADE_BY_MIGRATIONS, 14])


async def test_of_many_acks_that_need_the_same_new_retention_at_once_none_fails(
    fresh_database: Database, others: list[Database], org: OrgId
) -> None:
    leases = await lease_some(Store(fresh_database), org, len(others))
    await set_unnoticed(fresh_database, org, 14)
    answers = await asyncio.gather(
        *(Store(database).settle(Settlement.ack(org, [lease])) for database, lease in zip(others, leases, strict=True))
    )
    assert answers == [[Answer.OK]] * len(others)
    assert await kept(fresh_database, org) == [14] * len(others)


async def test_a_process_that_is_killed_while_it_makes_a_retention_leaves_it_to_the_next(
    fresh_database: Database, others: list[Database], fresh_dsn: str, org: OrgId
) -> None:
    leases = await lease_some(Store(fresh_database), org)
    await set_unnoticed(fresh_database, org, 14)
    killed = await psycopg.AsyncConnection.connect(fresh_dsn)
    await killed.execute("SELECT pg_advisory_xact_lock(%s)", [partitions.LOCK])
    await killed.execute(partitions.making("finished_14", 14, None, None), prepare=False)
    acking = asyncio.create_task(Store(others[0]).settle(Settlement.ack(org, leases)))
    await until_blocked(fresh_database)
    await fresh_database.run(b"SELECT pg_terminate_backend(%(pid)s::integer)", {"pid": killed.info.backend_pid})
    assert await acking == [Answer.OK]
    await killed.close()
    assert await kept(fresh_database, org) == [14]


async def test_nobody_waits_while_the_partitions_of_a_retention_are_made(
    fresh_database: Database, books: QueueAdmin, fresh_dsn: str, org: OrgId
) -> None:
    store = Store(fresh_database)
    leases = await lease_some(store, org, 2)
    async with await psycopg.AsyncConnection.connect(fresh_dsn) as making:
        await making.execute(partitions.making("finished_14", 14, None, None), prepare=False)
        # The transaction that makes the partitions has not committed yet. Each of the following calls fails if it waits
        # for a lock.
        more = some_jobs(org, 1)
        assert await store.enqueue(more) == {}
        assert len(await lease_jobs(store, org)) == 1
        assert await store.settle(Settlement.ack(org, leases)) == [Answer.OK] * 2
        assert len(await store.get(org, ids_of(more), include_payload=False)) == 1
        await making.commit()
    assert 14 in await retentions_of(fresh_database, "cold")


async def test_a_shard_takes_no_more_than_so_many_retentions_and_refuses_without_a_change(
    fresh_database: Database, books: QueueAdmin, org: OrgId
) -> None:
    await books.create_queue(org, QUEUE, QueueSettings(max_attempts=3))
    further = range(100, 100 + RETENTIONS_MAX - len(MADE_BY_MIGRATIONS))
    for days in further:
        await books.alter_queue(org, QUEUE, QueueSettings(retention_days=days))
    assert len(await retentions_of(fresh_database)) == RETENTIONS_MAX
    # The message does not name retentions such as 100, which may belong to another org.
    words = rf"shard '{SHARD}' has 32 different .* no room for 14 days: use one of 0, 1, 7, 30, 90, 365, 2557 days"
    with pytest.raises(TooManyRetentions, match=words):
        await books.alter_queue(org, QUEUE, QueueSettings(retention_days=14, max_attempts=9))
    with pytest.raises(TooManyRetentions):
        await books.create_queue(org, QueueName("another"), QueueSettings(retention_days=14))
    with pytest.raises(UnknownQueue):
        await books.get_queue(org, QueueName("another"))
    settings = (await books.get_queue(org, QUEUE)).settings
    assert (settings.retention_days, settings.max_attempts) == (further[-1], 3)
    assert 14 not in await retentions_of(fresh_database)
    # Retentions that the shard already has are still accepted.
    await books.alter_queue(org, QUEUE, QueueSettings(retention_days=100))
    # A move may bring one more retention to the shard. No ack is refused because of the new retention.
    store = Store(fresh_database)
    leases = await lease_some(store, org)
    await set_unnoticed(fresh_database, org, 14)
    assert await store.settle(Settlement.ack(org, leases)) == [Answer.OK]
    assert await kept(fresh_database, org) == [14]


async def test_queues_that_race_for_the_last_retentions_get_no_more_than_there_are(
    fresh_database: Database, fresh_dsn: str, org: OrgId
) -> None:
    async with contextlib.AsyncExitStack() as stack:
        admins: list[QueueAdmin] = []
        for _ in range(4):
            database = Database(SHARD, fresh_dsn, connections=1, may_scan=True)
            await database.open()
            stack.push_async_callback(database.close)
            admins.append(QueueAdmin(database))

        async def create(n: int) -> bool:
            """Returns whether the queue was created."""
            while True:
                try:
                    await admins[n % 4].create_queue(org, QueueName(f"q{n}"), QueueSettings(retention_days=100 + n))
                except TooManyRetentions:
                    return False
                except ShardUnavailable:
                    # The first use of a retention makes tables, and calls do this one after another. On a slow machine,
                    # a call may wait too long for its turn.
                    continue
                return True

        created = await asyncio.gather(*map(create, range(60)))
    assert sum(created) == RETENTIONS_MAX - len(MADE_BY_MIGRATIONS)
    assert len(await retentions_of(fresh_database)) == RETENTIONS_MAX


async def test_a_queue_that_does_not_exist_gives_the_shard_no_retention(
    fresh_database: Database, books: QueueAdmin, org: OrgId
) -> None:
    with pytest.raises(UnknownQueue):
        await books.alter_queue(org, QUEUE, QueueSettings(retention_days=14))
    assert await retentions_of(fresh_database) == MADE_BY_MIGRATIONS


@pytest.mark.parametrize("days", [-1, RETENTION_MAX + 1])
@pytest.mark.parametrize("table", ["queue", "org"])
async def test_a_number_of_days_beyond_the_limits_is_refused_by_the_schema_too(
    fresh_database: Database, org: OrgId, table: str, days: int
) -> None:
    await Store(fresh_database).enqueue(some_jobs(org, 1))
    with pytest.raises(psycopg.errors.CheckViolation):
        await fresh_database.run(f"UPDATE windrow.{table} SET retention = {days}".encode(), {})
