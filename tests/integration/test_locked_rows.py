"""A row that another session keeps locked (a forgotten BEGIN; SELECT … FOR UPDATE in psql) affects only the calls that
need the row. Other calls in the same SQL statement succeed. Each test decides when its locks are released."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any, LiteralString

import psycopg
import pytest

from shard.admin.queue_admin import QueueAdmin
from shard.errors import RowLocked
from shard.postgres.pool import Database
from shard.queue import row_locks, statements
from shard.queue.settle import Nack, Settlement
from shard.queue.store import Store
from shard.vocabulary import Answer, JobId, Lease, OrgId
from tests.conftest import SHARD
from tests.jobs import HOUR_US, at_once, ids_of, job_id, lease_jobs, some_jobs
from tests.recorder import Recorder
from tests.timemachine import end_dedup_windows, until_blocked
from tests.verbs import VERBS

OK, STALE, NOT_FOUND = Answer.OK, Answer.STALE, Answer.NOT_FOUND
OTHERS = 12

Verb = Callable[[Store, OrgId, Sequence[Lease]], Awaitable[list[Answer]]]

ACTS: dict[str, Verb] = {
    **{name: verb.act for name, verb in VERBS.items()},
    "cancel": lambda store, org, leases: store.cancel(org, [name_of(lease) for lease in leases], reason="no"),
}
STATE = {"cancel": "cancelled"} | {name: verb.state for name, verb in VERBS.items()}
verbs = pytest.mark.parametrize("verb", ACTS)

pytestmark = pytest.mark.timeout(60)


@contextlib.asynccontextmanager
async def forgotten(
    dsn: str, statement: LiteralString, *parameters: object
) -> AsyncGenerator[psycopg.AsyncConnection[Any], None]:
    """Opens a session that has run this statement and keeps its transaction open."""
    async with await psycopg.AsyncConnection.connect(dsn) as session:
        await session.execute("SET idle_in_transaction_session_timeout = 0")
        await session.execute(statement, parameters)
        yield session


def locked_job(dsn: str, lease: Lease) -> Any:
    return forgotten(dsn, "SELECT FROM windrow.job WHERE id = %s FOR UPDATE", name_of(lease))


def name_of(lease: Lease) -> JobId:
    text = lease.job_hex
    return JobId("-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:])))


async def held_by(store: Store, org: OrgId, count: int = 1) -> list[Lease]:
    await store.enqueue(some_jobs(org, count))
    return [lease for _, lease in await lease_jobs(store, org, max_jobs=count, window_us=HOUR_US)]


async def states(store: Store, org: OrgId, leases: Sequence[Lease]) -> list[str]:
    names = [name_of(lease) for lease in leases]
    found = {record.id: record.state for record in await store.get(org, names, include_payload=False)}
    return [found[name] for name in names]


def others_of(org: OrgId) -> list[OrgId]:
    return [OrgId(f"{org}-other-{number}") for number in range(OTHERS)]


async def balanced(books: QueueAdmin, org: OrgId) -> bool:
    (entry,) = [entry for entry in await books.check() if entry.org == org]
    return entry.balanced


@verbs
async def test_calls_of_other_orgs_go_on_without_a_job_that_is_locked(
    recorder: Recorder, books: QueueAdmin, module_dsn: str, org: OrgId, verb: str
) -> None:
    store, act = Store(recorder), ACTS[verb]
    (mine,) = await held_by(store, org)
    theirs = {other: await held_by(store, other, 2) for other in others_of(org)}
    async with locked_job(module_dsn, mine):
        refused, *answers = await asyncio.gather(
            act(store, org, [mine]),
            *(act(store, other, leases) for other, leases in theirs.items()),
            return_exceptions=True,
        )
        assert answers == [[OK] * 2] * OTHERS
        assert isinstance(refused, RowLocked)
        assert f"job {name_of(mine)} is locked by another session" in str(refused)
        assert "windrow doctor" in str(refused)
        for other, leases in theirs.items():
            assert await states(store, other, leases) == [STATE[verb]] * 2
        assert await states(store, org, [mine]) == ["leased"]
    assert await act(store, org, [mine]) == [OK]
    assert await states(store, org, [mine]) == [STATE[verb]]
    assert await balanced(books, org)


@verbs
async def test_a_call_that_names_a_locked_job_beside_others_settles_the_others(
    recorder: Recorder, module_dsn: str, org: OrgId, verb: str
) -> None:
    store, act = Store(recorder), ACTS[verb]
    leases = await held_by(store, org, 4)
    async with locked_job(module_dsn, leases[1]):
        with pytest.raises(RowLocked):
            await act(store, org, leases)
        assert await states(store, org, leases) == [STATE[verb], "leased", STATE[verb], STATE[verb]]
    assert await act(store, org, leases) == [OK] * 4
    assert await states(store, org, leases) == [STATE[verb]] * 4


async def test_results_stay_with_their_jobs_where_one_of_them_is_locked(
    recorder: Recorder, module_dsn: str, org: OrgId
) -> None:
    store = Store(recorder)
    leases = await held_by(store, org, 3)
    results = [b"one", b"two", b"three"]
    async with locked_job(module_dsn, leases[1]):
        with pytest.raises(RowLocked):
            await store.settle(Settlement.ack(org, leases, results))
    assert await store.settle(Settlement.ack(org, leases, results)) == [OK] * 3
    names = list(map(name_of, leases))
    found = {record.id: record.result for record in await store.get(org, names, include_payload=True)}
    assert [found[name_of(lease)] for lease in leases] == results


@verbs
async def test_a_job_that_is_known_to_be_locked_is_waited_for_no_more(
    recorder: Recorder, module_dsn: str, org: OrgId, other_org: OrgId, verb: str
) -> None:
    """Repeated calls for the locked job fail at once, and share one connection."""
    store, act = Store(recorder), ACTS[verb]
    (mine,) = await held_by(store, org)
    theirs = await held_by(store, other_org, 20)
    hot = (*(known.statement for known in VERBS.values()), statements.CANCEL)
    async with locked_job(module_dsn, mine):
        with pytest.raises(RowLocked):
            await act(store, org, [mine])
        before = len(recorder.runs)
        for lease in theirs:
            *refused, answer = await asyncio.gather(
                *(act(store, org, [mine]) for _ in range(50)), act(store, other_org, [lease]), return_exceptions=True
            )
            assert answer == [OK]
            assert {type(one) for one in refused} == {RowLocked}
        tried = [run for run in recorder.runs[before:] if run[0] in hot]
        assert tried
        assert not [run for run in tried if mine.job_hex in str(run[1]["ids"]).replace("-", "")]
    assert await act(store, org, [mine]) == [OK]


async def test_one_verb_learns_from_another_that_a_job_is_locked(
    recorder: Recorder, module_dsn: str, org: OrgId
) -> None:
    store = Store(recorder)
    (mine,) = await held_by(store, org)
    async with locked_job(module_dsn, mine):
        with pytest.raises(RowLocked):
            await store.settle(Settlement.extend(org, [mine], window_us=HOUR_US))
        before = len(recorder.runs)
        with pytest.raises(RowLocked):
            await store.settle(Settlement.ack(org, [mine]))
        assert recorder.count(statements.ACK, since=before) == 0


@verbs
async def test_a_lock_that_is_held_for_a_moment_is_waited_for(
    module_dsn: str, database: Database, org: OrgId, verb: str
) -> None:
    patient = Database(SHARD, module_dsn, short_lock_wait_s=30.0)
    await patient.open()
    try:
        store, act = Store(patient), ACTS[verb]
        (mine,) = await held_by(store, org)
        async with locked_job(module_dsn, mine) as session:
            asked = asyncio.ensure_future(act(store, org, [mine]))
            await until_blocked(database)
            await session.rollback()
            assert await asked == [OK]
    finally:
        await patient.close()


async def test_of_a_job_that_is_locked_another_org_hears_nothing(
    recorder: Recorder, module_dsn: str, org: OrgId, other_org: OrgId
) -> None:
    store = Store(recorder)
    (mine,) = await held_by(store, org)
    async with locked_job(module_dsn, mine):
        refused, answer = await asyncio.gather(
            store.settle(Settlement.ack(org, [mine])),
            store.settle(Settlement.ack(other_org, [mine])),
            return_exceptions=True,
        )
        assert isinstance(refused, RowLocked)
        assert answer == [NOT_FOUND]
        assert await store.settle(Settlement.ack(other_org, [mine])) == [NOT_FOUND]
        assert await store.cancel(other_org, [name_of(mine)], reason="") == [NOT_FOUND]


async def test_a_lease_that_has_ended_is_stale_also_while_its_job_is_deleted_elsewhere(
    recorder: Recorder, module_dsn: str, org: OrgId
) -> None:
    """Another router's ack has deleted the row. After this ack has committed, the nack finds no job."""
    store = Store(recorder)
    (mine,) = await held_by(store, org)
    async with forgotten(module_dsn, "DELETE FROM windrow.job WHERE id = %s", name_of(mine)) as session:
        with pytest.raises(RowLocked):
            await store.settle(Settlement.nack(org, [Nack(lease=mine)]))
        await session.commit()
    assert await store.settle(Settlement.nack(org, [Nack(lease=mine)])) == [NOT_FOUND]


# Enqueues


async def test_enqueues_of_other_orgs_go_on_without_a_dedup_key_that_is_locked(
    recorder: Recorder, books: QueueAdmin, module_dsn: str, org: OrgId
) -> None:
    store = Store(recorder)
    first = some_jobs(org, dedup_keys=["key"])
    await store.enqueue(first)
    await end_dedup_windows(recorder, org)
    mine = some_jobs(org, dedup_keys=["key"])
    own = some_jobs(org, dedup_keys=["another key"])
    theirs = [some_jobs(other, 2, dedup_keys=["key"]) for other in others_of(org)]
    async with forgotten(module_dsn, "SELECT FROM windrow.dedup WHERE key = 'key' FOR UPDATE"):
        refused, *answers = await asyncio.gather(
            store.enqueue(mine), store.enqueue(own), *map(store.enqueue, theirs), return_exceptions=True
        )
        assert answers == [{}] * (1 + OTHERS)
        assert isinstance(refused, RowLocked)
        assert "dedup key 'key' of queue 'mail' is locked by another session" in str(refused)
        assert await store.get(org, ids_of(mine), include_payload=False) == []
        before = len(recorder.runs)
        refused, answer = await asyncio.gather(
            store.enqueue(mine), store.enqueue(some_jobs(OrgId(f"{org}-other-0"))), return_exceptions=True
        )
        assert isinstance(refused, RowLocked)
        assert answer == {}
        assert recorder.count(statements.ENQUEUE_PLAIN, since=before) == 1
    assert await store.enqueue(mine) == {}
    assert await balanced(books, org)


async def test_enqueues_of_other_orgs_go_on_without_a_job_that_is_being_deleted(
    recorder: Recorder, module_dsn: str, org: OrgId, other_org: OrgId
) -> None:
    store = Store(recorder)
    jobs = some_jobs(org, live_keys=["key"])
    await store.enqueue(jobs)
    async with forgotten(module_dsn, "DELETE FROM windrow.job WHERE id = %s", jobs.ids[0]) as session:
        refused, refused_too, *answers = await asyncio.gather(
            store.enqueue(jobs),
            store.enqueue(some_jobs(org, live_keys=["key"])),
            store.enqueue(some_jobs(other_org, live_keys=["key"])),
            store.enqueue(some_jobs(org, live_keys=["other key"])),
            return_exceptions=True,
        )
        assert isinstance(refused, RowLocked)
        assert isinstance(refused_too, RowLocked)
        assert "dedup key 'key' of queue 'mail' is locked by another session" in str(refused_too)
        assert answers == [{}, {}]
        await session.rollback()
    assert await store.enqueue(jobs) == {0: jobs.ids[0]}


LOCK_NAMES: dict[str, LiteralString] = {
    "org": "SELECT FROM windrow.org WHERE org = %s FOR UPDATE",
    "name": "SELECT FROM windrow.queue_name WHERE queue = %s FOR UPDATE",
}


@pytest.mark.parametrize("which", LOCK_NAMES)
async def test_enqueues_of_other_orgs_go_on_without_a_queue_that_cannot_be_made_now(
    recorder: Recorder, module_dsn: str, org: OrgId, other_org: OrgId, which: str
) -> None:
    store = Store(recorder)
    await store.enqueue(some_jobs(org))
    await store.enqueue(some_jobs(OrgId(f"{org}-before"), queue=f"new-{org}"))
    mine = some_jobs(org, queue=f"new-{org}")
    lock = LOCK_NAMES[which]
    async with forgotten(module_dsn, lock, org if which == "org" else f"new-{org}"):
        for _ in range(2):
            refused, known, answer = await asyncio.gather(
                store.enqueue(mine),
                store.enqueue(some_jobs(org)),
                store.enqueue(some_jobs(other_org, queue=f"other-{job_id()}")),
                return_exceptions=True,
            )
            assert isinstance(refused, RowLocked), refused
            assert f"queue 'new-{org}' of org '{org}', which does not exist yet, is locked" in str(refused)
            assert known == answer == {}
    assert await store.enqueue(mine) == {}


@pytest.mark.parametrize("table", ["queue", "owned_slot", "org", "queue_name"])
async def test_what_is_known_of_queues_and_slots_is_read_past_locks(
    fresh_dsn: str, org: OrgId, table: LiteralString
) -> None:
    """Every verb works while every row of the table is locked."""
    database = Database(SHARD, fresh_dsn)
    await database.open()
    try:
        store = Store(database)
        await store.enqueue(some_jobs(org))
        async with forgotten(fresh_dsn, "SELECT FROM windrow." + table + " FOR UPDATE"):
            jobs = some_jobs(org, dedup_keys=["key"])
            assert await store.enqueue(jobs) == {}
            (one, other) = [lease for _, lease in await lease_jobs(store, org)]
            assert await store.settle(Settlement.extend(org, [one], window_us=HOUR_US)) == [OK]
            assert await store.settle(Settlement.ack(org, [one])) == [OK]
            assert await store.settle(Settlement.release(org, [other])) == [OK]
            assert await store.cancel(org, ids_of(jobs), reason="") == [OK]
    finally:
        await database.close()


async def test_many_calls_for_locked_jobs_leave_others_the_connections(
    fresh_dsn: str, org: OrgId, other_org: OrgId
) -> None:
    """One session locks all of an org's jobs, and every verb asks for each of them."""
    database = Database(SHARD, fresh_dsn, connections=2)
    await database.open()
    try:
        store = Store(database)
        mine = await held_by(store, org, 40)
        theirs = await held_by(store, other_org, 20)
        names = list(map(name_of, mine))
        async with forgotten(fresh_dsn, "SELECT FROM windrow.job WHERE id = ANY (%s) FOR UPDATE", names):
            asking = [asyncio.ensure_future(act(store, org, [lease])) for lease in mine for act in ACTS.values()]
            for lease in theirs:
                assert await at_once(
                    store.settle(Settlement.ack(other_org, [lease])),
                    store.get(other_org, [name_of(lease)], include_payload=False),
                )
                jobs = some_jobs(other_org)
                assert await store.enqueue(jobs) == {}
                assert await store.cancel(other_org, ids_of(jobs), reason="") == [OK]
            refused = await asyncio.gather(*asking, return_exceptions=True)
            assert {type(one) for one in refused} == {RowLocked}
        assert await store.settle(Settlement.ack(org, mine)) == [OK] * 40
    finally:
        await database.close()


async def test_where_nothing_is_locked_nobody_looks_for_locks(recorder: Recorder, module_dsn: str, org: OrgId) -> None:
    """The store looks for locks only after a call has met a lock, and stops when the lock has been released."""
    store = Store(recorder)
    leases = await held_by(store, org, 3)
    before = len(recorder.runs)
    assert await store.settle(Settlement.ack(org, leases[:1])) == [OK]
    assert recorder.count(statements.FIND_LOCKED_JOBS, since=before) == 0
    async with locked_job(module_dsn, leases[1]):
        with pytest.raises(RowLocked):
            await store.settle(Settlement.ack(org, leases[1:2]))
    # The store has looked twice: the second look confirms that the job is locked.
    assert recorder.count(statements.FIND_LOCKED_JOBS, since=before) == 2
    # The store looks for locks once more, now for any job of the org.
    assert await store.settle(Settlement.ack(org, leases[2:])) == [OK]
    assert recorder.count(statements.FIND_LOCKED_JOBS, since=before) == 3
    assert await store.settle(Settlement.ack(org, leases[1:2])) == [OK]
    assert recorder.count(statements.FIND_LOCKED_JOBS, since=before) == 3


async def test_a_job_that_is_deleted_while_locks_are_looked_for_is_not_locked(
    fresh_dsn: str, fresh_database: Database, org: OrgId
) -> None:
    store = Store(fresh_database)
    (lease,) = await held_by(store, org)
    # The statement that looks for locks takes its snapshot. Then it waits in this function, before it looks at the job.
    await fresh_database.run(
        b"""
        CREATE OR REPLACE FUNCTION windrow.org_ids(orgs text[]) RETURNS integer[]
        LANGUAGE plpgsql STABLE SET lock_timeout = 0 AS $$
        BEGIN
            PERFORM pg_advisory_xact_lock(4711);
            RETURN array_agg((SELECT o.org_id FROM windrow.org o WHERE o.org = n.org) ORDER BY n.position)
                FROM unnest(orgs) WITH ORDINALITY AS n (org, position);
        END
        $$
        """,
        {},
    )
    async with forgotten(fresh_dsn, "SELECT pg_advisory_xact_lock(4711)") as session:
        looking = asyncio.create_task(row_locks.of_jobs(fresh_database).find([(org, lease.job_hex)]))
        await until_blocked(fresh_database)
        async with await psycopg.AsyncConnection.connect(fresh_dsn) as other:
            await other.execute("DELETE FROM windrow.job")
        await session.rollback()
        assert await looking == set()


def test_statements_that_take_turns_on_a_connection_wait_alike() -> None:
    """Otherwise the connection would have to set `lock_timeout` between two statements, which costs a round trip."""
    hot = (
        statements.ENQUEUE,
        statements.ENQUEUE_PLAIN,
        statements.CLAIM,
        statements.ACK,
        statements.NOTIFY_WORK,
        statements.PROBE,
        statements.SWEEP,
    )
    assert all(one.short_lock_wait for one in hot)
