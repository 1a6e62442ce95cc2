"""Finished jobs age: past days turn cold and are dropped later. A repeated enqueue gets the same answer until the last
day on which it may be repeated."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import psycopg
import pytest

from shard.admin.job_pages import Wanted
from shard.admin.queue_admin import OrgBooks, QueueAdmin
from shard.history import days
from shard.history.days import (
    Aged,
    InUse,
    days_over,
    days_past,
    drop,
    drop_past_ids,
    expire_dedup,
    expire_waiting,
    retire_dead,
    turn_cold,
)
from shard.postgres import partitions
from shard.postgres.pool import Database
from shard.queue.settle import Nack, Settlement
from shard.queue.store import Store
from shard.vocabulary import Answer, Failure, JobId, JobState, Lease, OrgId
from tests.conftest import SHARD
from tests.jobs import QUEUE, history_of, ids_of, lease_jobs, some_jobs
from tests.timemachine import age_finished, end_dedup_windows, reach_expiry


@pytest.fixture
async def fresh_books(fresh_dsn: str) -> AsyncGenerator[QueueAdmin]:
    opened = Database(SHARD, fresh_dsn, connections=1, may_scan=True)
    await opened.open()
    yield QueueAdmin(opened)
    await opened.close()


async def keep_for(database: Database, org: OrgId, days: int) -> None:
    """Sets the retention of the org's queues. The new retention applies to jobs that finish from now on."""
    await database.run(b"UPDATE windrow.queue SET retention = %(days)s WHERE org = %(org)s", {"days": days, "org": org})


async def finish_some(store: Store, org: OrgId, count: int) -> list[Lease]:
    await store.enqueue(some_jobs(org, count))
    leases = [lease for _, lease in await lease_jobs(store, org, max_jobs=count)]
    assert await store.settle(Settlement.ack(org, leases)) == [Answer.OK] * count
    return leases


async def all_cold(database: Database) -> list[Aged]:
    """Makes all past days cold. From three o'clock on, yesterday is a past day. Returns the days that had jobs."""
    aged = [await turn_cold(database, day) for day in await days_over(database)]
    return [one for one in aged if one.jobs]


async def dropped(database: Database) -> list[Aged]:
    return [await drop(database, day) for day in await days_past(database)]


async def books_of(books: QueueAdmin, org: OrgId) -> OrgBooks:
    (found,) = [entry for entry in await books.check() if entry.org == org]
    return found


async def tables(database: Database, pattern: str) -> list[str]:
    rows = await database.run(
        b"SELECT relname FROM pg_class WHERE relkind = 'r' AND relname ~ %(pattern)s ORDER BY 1", {"pattern": pattern}
    )
    return [name for (name,) in rows]


async def file_of(database: Database, table: str) -> int:
    rows = await database.run(b"SELECT pg_relation_filenode(%(table)s::regclass)", {"table": f"windrow.{table}"})
    return int(rows[0][0])


async def test_a_day_that_is_over_turns_cold_where_it_lies_and_its_jobs_are_found_as_before(
    fresh_database: Database, fresh_books: QueueAdmin, org: OrgId
) -> None:
    store = Store(fresh_database)
    leases = await finish_some(store, org, 3)
    ids = await age_finished(fresh_database, org, days=3)
    before = await store.get(org, ids, include_payload=True)
    day, *_ = await days_over(fresh_database)
    file = await file_of(fresh_database, day.name)
    (aged,) = await all_cold(fresh_database)
    assert (aged.partition, aged.jobs) == (day.name, 3)
    assert await file_of(fresh_database, day.cold_name) == file
    assert await days_over(fresh_database) == []
    assert await store.get(org, ids, include_payload=True) == before
    found = await books_of(fresh_books, org)
    assert (found.accepted, found.succeeded, found.archived, found.balanced) == (3, 0, 3, True)
    wanted = Wanted(org=org, queue=QUEUE, state=JobState.SUCCEEDED, include_payload=True)
    page = await fresh_books.list_jobs(wanted, page_size=9, page_token="")
    assert page.jobs == before[::-1]
    (counts,) = await fresh_books.stats(org, QUEUE, include_finished=True)
    assert counts.succeeded == 3
    assert await store.cancel(org, ids, reason="") == [Answer.STALE] * 3
    # An ack whose answer was lost may be repeated even after the day has turned cold.
    late = [lease._replace(job_hex=name.replace("-", "")) for lease, name in zip(sorted(leases), ids, strict=True)]
    assert await store.settle(Settlement.ack(org, late)) == [Answer.OK] * 3


async def test_a_repeated_enqueue_of_a_cold_job_stores_nothing(fresh_database: Database, org: OrgId) -> None:
    store = Store(fresh_database)
    await finish_some(store, org, 2)
    ids = await age_finished(fresh_database, org, days=3)
    await all_cold(fresh_database)
    again = some_jobs(org, ids=[*ids, *ids_of(some_jobs(org, 1))])
    assert await store.known(again) == dict(enumerate(ids))
    assert await store.enqueue(again) == dict(enumerate(ids))
    # A job of another org that has the same id is a different job.
    other = OrgId(f"{org}-other")
    assert await store.enqueue(some_jobs(other, ids=ids)) == {}


@pytest.mark.parametrize("kept", [0, 1])
async def test_the_ids_of_jobs_that_are_gone_are_known_for_as_long_as_an_enqueue_may_be_repeated(
    fresh_database: Database, fresh_books: QueueAdmin, org: OrgId, kept: int
) -> None:
    store = Store(fresh_database)
    await store.enqueue(some_jobs(org, 1))
    await keep_for(fresh_database, org, kept)
    await partitions.make_ahead(fresh_database)
    await finish_some(store, org, 2)
    ids = await age_finished(fresh_database, org, days=6)
    await all_cold(fresh_database)
    (gone,) = await dropped(fresh_database)
    assert gone.jobs == 2
    assert await store.get(org, ids, include_payload=False) == []
    assert await store.enqueue(some_jobs(org, ids=ids)) == dict(enumerate(ids))
    found = await books_of(fresh_books, org)
    assert (found.accepted, found.ready, found.archived, found.expired, found.balanced) == (3, 1, 0, 2, True)
    # The known ids of a day are dropped when enqueues with ids of that day are refused anyway.
    await drop_past_ids(fresh_database)
    (known,) = await tables(fresh_database, r"^past_id_\d+$")
    await fresh_database.run(f"ALTER TABLE windrow.{known} RENAME TO past_id_20200101".encode(), {})
    await drop_past_ids(fresh_database)
    assert await tables(fresh_database, r"^past_id_\d+$") == []


async def test_jobs_are_kept_for_as_long_as_their_queue_said_when_they_finished_and_no_longer(
    fresh_database: Database, fresh_books: QueueAdmin, org: OrgId
) -> None:
    store = Store(fresh_database)
    await finish_some(store, org, 1)
    await keep_for(fresh_database, org, 90)
    await finish_some(store, org, 1)
    ids = await age_finished(fresh_database, org, days=40)
    assert [aged.jobs for aged in await all_cold(fresh_database)] == [1, 1]
    assert [aged.jobs for aged in await dropped(fresh_database)] == [1]
    (left,) = await store.get(org, ids, include_payload=False)
    assert left.id == ids[1]
    found = await books_of(fresh_books, org)
    assert (found.archived, found.expired, found.balanced) == (1, 1, True)


async def test_the_day_that_goes_on_and_the_one_that_has_just_ended_stay_hot(
    fresh_database: Database, org: OrgId
) -> None:
    store = Store(fresh_database)
    await finish_some(store, org, 1)
    names = await tables(fresh_database, r"^finished_30_\d+$")
    over = {day.name for day in await days_over(fresh_database)}
    rows = await fresh_database.run(
        b"""
        SELECT 'finished_30_' || to_char(day, 'YYYYMMDD')
        FROM generate_series(
            ((now() - interval '3 hours') AT TIME ZONE 'UTC')::date, now() + interval '4 days', interval '1 day'
        ) day
        """,
        {},
    )
    assert over.isdisjoint(name for (name,) in rows)
    # Partitions without jobs are dropped.
    await all_cold(fresh_database)
    assert await tables(fresh_database, r"^finished_30_\d+$") == [name for name in names if name not in over]
    assert await tables(fresh_database, r"^cold_\d") == []
    # The dropped partitions are not created again either.
    assert await partitions.make_ahead(fresh_database) == 0


async def test_a_day_that_somebody_reads_is_left_alone_and_enqueues_and_acks_go_on(
    fresh_database: Database, fresh_dsn: str, org: OrgId, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(days, "_PAUSE_S", 0.001)
    store = Store(fresh_database)
    await finish_some(store, org, 1)
    await age_finished(fresh_database, org, days=3)
    day, *_ = await days_over(fresh_database)
    async with await psycopg.AsyncConnection.connect(fresh_dsn, application_name="a report") as reader:
        await reader.execute("SELECT count(*) FROM windrow.finished")
        with pytest.raises(InUse, match=rf"{day.name} is in use by process {reader.info.backend_pid} \(a report\)"):
            await turn_cold(fresh_database, day)
        await finish_some(store, org, 1)
    (aged,) = await all_cold(fresh_database)
    assert aged.jobs == 1


async def test_a_day_that_another_session_locks_is_in_use_whatever_step_needs_the_lock(
    fresh_database: Database, fresh_dsn: str, org: OrgId, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(days, "_PAUSE_S", 0.001)
    monkeypatch.setattr(days, "_WEAKER_LOCK_WAIT", "10ms")
    await finish_some(Store(fresh_database), org, 1)
    await age_finished(fresh_database, org, days=40)
    day, *_ = await days_over(fresh_database)
    async with await psycopg.AsyncConnection.connect(fresh_dsn, application_name="a report") as other:
        # Like an operator's `ANALYZE` of all tables, this `ANALYZE` locks the table for a while.
        await other.execute("ANALYZE windrow.cold_30")
        users = rf"cold_30 is in use by process {other.info.backend_pid} \(a report\)"
        with pytest.raises(InUse, match=users):
            await turn_cold(fresh_database, day)
        await other.rollback()
        (aged,) = await all_cold(fresh_database)
        assert aged.jobs == 1
        (past,) = await days_past(fresh_database)
        # The jobs of a held org are moved out of the day before it is dropped.
        await fresh_database.run(b"UPDATE windrow.org SET held = true WHERE org = %(org)s", {"org": org})
        await other.execute(f"LOCK TABLE windrow.{past.name} IN SHARE MODE".encode())
        with pytest.raises(InUse, match=f"{past.name} is in use: another session has locked a table"):
            await drop(fresh_database, past)


async def test_a_day_on_which_a_view_depends_is_named_with_the_view(fresh_database: Database, org: OrgId) -> None:
    await finish_some(Store(fresh_database), org, 1)
    await age_finished(fresh_database, org, days=40)
    await all_cold(fresh_database)
    (past,) = await days_past(fresh_database)
    await fresh_database.run(f"CREATE VIEW public.report AS SELECT id FROM windrow.{past.name}".encode(), {})
    with pytest.raises(InUse, match=f"{past.name} cannot be dropped; .*: view report depends on table {past.name}"):
        await drop(fresh_database, past)
    await fresh_database.run(b"DROP VIEW public.report", {})
    assert (await drop(fresh_database, past)).jobs == 1


async def test_a_late_job_of_a_day_that_has_turned_cold_joins_it(
    fresh_database: Database, fresh_books: QueueAdmin, org: OrgId
) -> None:
    """The clock was set back after the day had ended."""
    store = Store(fresh_database)
    ids: list[JobId] = []
    for _ in range(2):
        await finish_some(store, org, 1)
        ids += await age_finished(fresh_database, org, days=3)
        (aged,) = await all_cold(fresh_database)
        assert aged.jobs == 1
    assert [record.id for record in await store.get(org, ids, include_payload=False)] == ids
    assert len(await tables(fresh_database, r"^cold_30_\d+$")) == 1
    found = await books_of(fresh_books, org)
    assert (found.archived, found.balanced) == (2, True)


async def test_two_archivers_at_one_day_turn_it_cold_once(
    fresh_database: Database, fresh_books: QueueAdmin, org: OrgId
) -> None:
    store = Store(fresh_database)
    await finish_some(store, org, 5)
    await age_finished(fresh_database, org, days=3)
    day, *_ = await days_over(fresh_database)
    outcomes = await asyncio.gather(*(turn_cold(fresh_database, day) for _ in range(2)), return_exceptions=True)
    assert [outcome.jobs for outcome in outcomes if isinstance(outcome, Aged)] == [5]
    # An archiver that comes too late reports this, and continues its pass.
    with pytest.raises(InUse, match=f"{day.name} was changed by another archiver meanwhile"):
        await turn_cold(fresh_database, day)
    found = await books_of(fresh_books, org)
    assert (found.archived, found.balanced) == (5, True)


async def test_what_is_past_its_time_is_forgotten_or_cancelled(
    fresh_database: Database, fresh_books: QueueAdmin, org: OrgId
) -> None:
    store = Store(fresh_database)
    await store.enqueue(some_jobs(org, 3, dedup_keys=["a", "b", "c"]))
    await fresh_database.run(b"UPDATE windrow.job SET expires_at = now() + interval '1 hour'", {})
    ((dying_job, dying), (_, held)) = await lease_jobs(store, org, max_jobs=2)
    await store.settle(Settlement.nack(org, [Nack(lease=dying, failure=Failure(permanent=True))]))
    assert await expire_dedup(fresh_database) == 0
    assert await expire_waiting(fresh_database) == 0
    assert await retire_dead(fresh_database, days=1) == 0
    await end_dedup_windows(fresh_database, org)
    await reach_expiry(fresh_database, org)
    await fresh_database.run(b"UPDATE windrow.dead SET finished_at = now() - interval '2 days'", {})
    assert await expire_dedup(fresh_database) == 3
    # The leased job is past its expires_at too, but it is not cancelled.
    assert await expire_waiting(fresh_database) == 1
    assert await retire_dead(fresh_database, days=1) == 1
    assert await store.settle(Settlement.ack(org, [held])) == [Answer.OK]
    found = await books_of(fresh_books, org)
    assert (found.accepted, found.cancelled, found.succeeded, found.balanced) == (3, 2, 1, True)
    (dead,) = await store.get(org, [dying_job.id], include_payload=False)
    assert (dead.state, (dead.reason or "").startswith("dead for 1 days: ")) == ("cancelled", True)


async def test_an_expired_job_whose_lease_had_ended_has_that_attempt_in_its_history(
    fresh_database: Database, org: OrgId
) -> None:
    store = Store(fresh_database)
    await store.enqueue(some_jobs(org, 1))
    ((job, _),) = await lease_jobs(store, org)
    await fresh_database.run(b"UPDATE windrow.job SET visible_at = now(), expires_at = now()", {})
    assert await expire_waiting(fresh_database) == 1
    (record,) = await store.get(org, [job.id], include_payload=False)
    assert [attempt["outcome"] for attempt in history_of(record.history)] == ["expired"]
    assert (record.state, record.reason) == ("cancelled", "past its expires_at")


async def test_a_day_of_a_release_that_gave_days_no_constraint_turns_cold_too(
    fresh_database: Database, org: OrgId
) -> None:
    store = Store(fresh_database)
    await finish_some(store, org, 1)
    ids = await age_finished(fresh_database, org, days=3)
    day, *_ = await days_over(fresh_database)
    await fresh_database.run(f"ALTER TABLE windrow.{day.name} DROP CONSTRAINT of_its_day".encode(), {})
    assert next(found.proved for found in await days_over(fresh_database)) is None
    (aged,) = await all_cold(fresh_database)
    assert aged.jobs == 1
    assert [record.id for record in await store.get(org, ids, include_payload=False)] == ids
