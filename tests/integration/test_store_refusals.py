"""If the store refuses a call, it stores no job of the call (I6). The store never uses an outdated queue number
(I7)."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from shard.admin import statements as admin_statements
from shard.admin.job_pages import Wanted
from shard.admin.queue_admin import QueueAdmin, QueueRecord
from shard.errors import (
    IdsOutsideHorizon,
    NotOwned,
    QueueExists,
    QueueNotEmpty,
    ShardUnavailable,
    TooManyQueues,
    UnknownQueue,
)
from shard.history import erasure
from shard.placement import statements as placement_statements
from shard.placement.slots import slot_of
from shard.postgres.pool import Database, Rows
from shard.queue import statements as queue_statements
from shard.queue.queue_ids import QUEUES_MAX
from shard.queue.settle import Nack, Settlement
from shard.queue.store import Store
from shard.queue_settings import QueueSettings
from shard.vocabulary import Answer, Failure, JobId, JobState, Lease, NewJobs, OrgId, QueueName
from tests.conftest import SHARD
from tests.jobs import HOUR_US, MINUTE_US, QUEUE, ids_of, job_id, lease_jobs, some_jobs
from tests.queues import fill_queues
from tests.recorder import Recorder
from tests.timemachine import end_dedup_windows, until_blocked

DAY_MS = 24 * 3600 * 1000
A, B = QueueName("a"), QueueName("b")


async def everything(database: Database) -> dict[str, int]:
    """Counts all rows that a refused enqueue could have written."""
    (row,) = await database.run(
        b"""
        SELECT (SELECT count(*) FROM windrow.job), (SELECT count(*) FROM windrow.dedup),
            (SELECT coalesce(sum(accepted), 0) FROM windrow.tally)::bigint
        """,
        {},
    )
    return dict(zip(("jobs", "dedup keys", "accepted"), row, strict=True))


def two_queues(org: OrgId, ids: list[JobId]) -> NewJobs:
    jobs = some_jobs(org, ids=ids, dedup_keys=[f"key-{name}" for name in ids])
    jobs.queues = [(A, B)[at % 2] for at in range(len(ids))]
    return jobs


@pytest.mark.parametrize("state", ["draining", "foreign"])
async def test_a_slot_that_is_not_owned_takes_nothing(fresh_database: Database, org: OrgId, state: str) -> None:
    store = Store(fresh_database)
    first = two_queues(org, [job_id() for _ in range(4)])
    await store.enqueue(first)
    before = await everything(fresh_database)
    change = {
        "draining": b"UPDATE windrow.owned_slot SET state = 'draining', epoch = 7 WHERE slot = %(slot)s",
        "foreign": b"DELETE FROM windrow.owned_slot WHERE slot = %(slot)s",
    }
    await fresh_database.run(change[state], {"slot": slot_of(org)})
    with pytest.raises(NotOwned) as caught:
        await store.enqueue(two_queues(org, [job_id() for _ in range(6)]))
    assert caught.value.slot == slot_of(org)
    assert caught.value.epoch == (7 if state == "draining" else 0)
    assert f"slot {slot_of(org)} is {state} there" in str(caught.value)
    assert await everything(fresh_database) == before
    # Consumers can still finish existing jobs.
    held = [lease for queue in (A, B) for _, lease in await lease_jobs(store, org, queue=queue)]
    assert await store.settle(Settlement.ack(org, held, [None] * 4)) == [Answer.OK] * 4


@pytest.mark.parametrize(
    ("ahead_ms", "fits"),
    [(-7 * DAY_MS - 60_000, False), (-7 * DAY_MS + 60_000, True), (3_540_000, True), (3_660_000, False)],
)
async def test_ids_made_outside_the_horizon_are_refused_with_their_positions(
    fresh_database: Database, org: OrgId, ahead_ms: int, fits: bool
) -> None:
    store = Store(fresh_database)
    ids = [job_id(), job_id(ahead_ms=ahead_ms), job_id(), job_id(ahead_ms=ahead_ms)]
    if fits:
        assert await store.enqueue(two_queues(org, ids)) == {}
        assert await store.enqueue(two_queues(org, ids)) == dict(enumerate(ids))
        return
    with pytest.raises(IdsOutsideHorizon) as caught:
        await store.enqueue(two_queues(org, ids))
    assert caught.value.positions == [1, 3]
    assert await everything(fresh_database) == {"jobs": 0, "dedup keys": 0, "accepted": 0}
    # The refused call has not created its queues either. This matters because an org may have only a limited number of
    # queues.
    assert await fresh_database.run(b"SELECT FROM windrow.org UNION ALL SELECT FROM windrow.queue", {}) == []


@pytest.mark.parametrize(
    ("ahead_ms", "fits"), [(-7 * DAY_MS, False), (-7 * DAY_MS + 1, True), (3_600_000, True), (3_600_001, False)]
)
async def test_an_id_at_the_very_edge_of_the_horizon_is_refused_with_its_position(
    fresh_dsn: str, org: OrgId, ahead_ms: int, fits: bool
) -> None:
    """The database compares microseconds, but an id has only milliseconds. Nevertheless, the limit must be at the same
    id."""
    inside = job_id()
    made_ms = int(inside.replace("-", "")[:12], 16)
    edge = f"{made_ms + ahead_ms:012x}"
    ids = [inside, JobId(f"{edge[:8]}-{edge[8:]}{job_id()[13:]}")]
    with psycopg.connect(fresh_dsn) as connection:
        connection.execute("CREATE SCHEMA frozen")
        connection.execute(
            f"CREATE FUNCTION frozen.now() RETURNS timestamptz LANGUAGE sql STABLE RETURN "
            f"timestamptz 'epoch' + bigint '{made_ms}500' * interval '1 us'".encode()
        )
    # The `now()` in the first schema of the search path replaces the real `now()`. So the clock stands still, half a
    # millisecond after the time in `inside`.
    database = Database(SHARD, make_conninfo(fresh_dsn, options="-c search_path=frozen,pg_catalog"), connections=1)
    await database.open()
    try:
        if fits:
            assert await Store(database).enqueue(some_jobs(org, ids=ids)) == {}
            return
        with pytest.raises(IdsOutsideHorizon) as caught:
            await Store(database).enqueue(some_jobs(org, ids=ids))
        assert caught.value.positions == [1]
    finally:
        await database.close()


async def test_a_finished_job_of_an_hours_future_id_is_still_known(database: Database, org: OrgId) -> None:
    """The client's clock is ahead. So the time in the id is later than the time at which the job finishes."""
    store = Store(database)
    jobs = some_jobs(org, ids=[job_id(ahead_ms=3_500_000)])
    await store.enqueue(jobs)
    ((_, lease),) = await lease_jobs(store, org)
    await store.settle(Settlement.ack(org, [lease], [None]))
    assert await store.enqueue(jobs) == {0: jobs.ids[0]}


async def test_twins_in_one_batch_are_stored_once(database: Database, org: OrgId) -> None:
    store = Store(database)
    one, two, three = job_id(), job_id(), job_id()
    jobs = some_jobs(org, ids=[one, two, one, three, two])
    jobs.dedup_keys = {1: "k", 3: "k"}
    jobs.dedup_window_us = {1: HOUR_US, 3: HOUR_US}
    assert await store.enqueue(jobs) == {2: one, 3: two, 4: two}
    assert {job.id for job, _ in await lease_jobs(store, org)} == {one, two}


async def test_a_new_job_is_stored_though_a_finished_job_of_its_key_is_sent_again_before_it(
    database: Database, org: OrgId
) -> None:
    store = Store(database)
    old, new = job_id(), job_id()
    await store.enqueue(some_jobs(org, ids=[old], dedup_keys=["k"]))
    ((_, lease),) = await lease_jobs(store, org)
    await store.settle(Settlement.ack(org, [lease], [None]))
    await end_dedup_windows(database, org)
    both = some_jobs(org, ids=[old, new], dedup_keys=["k", "k"])
    assert await store.enqueue(both) == {0: old}
    assert [job.id for job, _ in await lease_jobs(store, org)] == [new]
    assert await store.enqueue(both) == {0: old, 1: new}


async def test_an_empty_batch_is_nothing(database: Database, org: OrgId) -> None:
    assert await Store(database).enqueue(NewJobs(org=org)) == {}


# A queue number that the store remembers wrongly


def swap(store: Store, org: OrgId) -> None:
    numbers = store.names._queue_ids
    numbers[org, A], numbers[org, B] = numbers[org, B], numbers[org, A]


async def queues_of(store: Store, org: OrgId, ids: list[JobId]) -> dict[str, str]:
    return {record.id: record.queue for record in await store.get(org, ids, include_payload=False)}


async def test_an_enqueue_finds_out_that_it_remembers_queues_wrongly(database: Database, org: OrgId) -> None:
    store = Store(database)
    await store.enqueue(two_queues(org, [job_id(), job_id()]))
    swap(store, org)
    ids = [job_id() for _ in range(4)]
    jobs = two_queues(org, ids)
    assert await store.enqueue(jobs) == {}
    assert await queues_of(store, org, ids) == dict(zip(ids, jobs.queues, strict=True))


async def test_a_store_that_knows_an_org_from_before_a_restore_never_touches_the_org_that_has_its_number_now(
    fresh_database: Database, org: OrgId, other_org: OrgId
) -> None:
    """I4, I7: the backup is older than the org. After the restore, the next new org gets the org's number."""
    numbers = b"SELECT org_id, org FROM windrow.org"
    store = Store(fresh_database)
    await store.enqueue(some_jobs(org, 1))
    await store.cancel(org, [job_id()], reason="")
    ((number, _),) = await fresh_database.run(numbers, {})
    await fresh_database.run(b"TRUNCATE windrow.job, windrow.queue, windrow.org RESTART IDENTITY CASCADE", {})
    restored = Store(fresh_database)
    jobs = some_jobs(other_org, 2)
    await restored.enqueue(jobs)
    assert await fresh_database.run(numbers, {}) == [(number, other_org)]
    held = [lease for _, lease in await lease_jobs(restored, other_org)]
    before = sorted(await restored.get(other_org, ids_of(jobs), include_payload=True))
    assert await store.settle(Settlement.ack(org, held, [None] * 2)) == [Answer.NOT_FOUND] * 2
    assert await store.settle(Settlement.extend(org, held, window_us=HOUR_US)) == [Answer.NOT_FOUND] * 2
    assert await store.cancel(org, ids_of(jobs), reason="") == [Answer.NOT_FOUND] * 2
    assert sorted(await restored.get(other_org, ids_of(jobs), include_payload=True)) == before
    assert await restored.settle(Settlement.ack(other_org, held, [None] * 2)) == [Answer.OK] * 2


async def test_a_batch_of_which_one_queue_is_remembered_wrongly_is_stored_once_and_told_so(
    database: Database, org: OrgId, other_org: OrgId
) -> None:
    store = Store(database)
    await store.enqueue(two_queues(org, [job_id(), job_id()]))
    (foreign,) = (await store.names.make([(other_org, A)])).values()
    store.names._queue_ids[org, B] = foreign
    ids = [job_id() for _ in range(4)]
    jobs = two_queues(org, ids)
    # The store needs several tries to store the jobs. Nevertheless it does not report them as duplicates, because they
    # are new.
    assert await store.enqueue(jobs) == {}
    assert await queues_of(store, org, ids) == dict(zip(ids, jobs.queues, strict=True))
    assert await store.get(other_org, ids, include_payload=False) == []


async def test_a_claim_never_obeys_a_wrong_memory_of_a_queue(database: Database, org: OrgId, other_org: OrgId) -> None:
    store = Store(database)
    await store.enqueue(two_queues(org, [job_id(), job_id()]))
    await store.enqueue(some_jobs(other_org, 1, queue=A))
    swap(store, org)
    for queue in (A, B):
        _, claimed, *_ = await store.claim(org, [queue], max_jobs=10, window_us=MINUTE_US, worker="w")
        assert {job.queue for job in claimed} <= {queue}
    store.names._queue_ids[org, A] = store.names._queue_ids[other_org, A]
    assert await lease_jobs(store, org, queue=A) == []
    assert len(await lease_jobs(store, other_org, queue=A)) == 1


async def test_a_store_that_remembers_queues_wrongly_recovers_within_a_sweep(database: Database, org: OrgId) -> None:
    """The store remembers wrong queue numbers, as after a failover that lost the creation of a queue. No job waits
    longer than the sweep interval (I7)."""
    store = Store(database)
    ids = [job_id(), job_id()]
    await store.enqueue(two_queues(org, ids))
    swap(store, org)
    await lease_jobs(store, org, queue=A)
    await store.sweep()
    assert [job.id for job, _ in await lease_jobs(store, org, queue=A)] == ids[:1]


async def test_names_that_look_like_null_or_numbers_are_names(database: Database, org: OrgId) -> None:
    store = Store(database)
    names = ["null", "NULL", "1", "a:b/c.d_e-f", "x" * 128]
    jobs = some_jobs(org, len(names))
    jobs.queues = [QueueName(name) for name in names]
    jobs.kinds = list(names)
    await store.enqueue(jobs)
    for name in names:
        ((job, _),) = await lease_jobs(store, org, queue=name)
        assert (job.queue, job.kind) == (name, name)


# Another org's jobs (I4)


async def test_one_org_cannot_touch_anothers_jobs(database: Database, org: OrgId, other_org: OrgId) -> None:
    store = Store(database)
    jobs = some_jobs(org, 1)
    await store.enqueue(jobs)
    await store.enqueue(some_jobs(other_org, 1))
    ((job, lease),) = await lease_jobs(store, org)
    ids = [job.id]
    assert await store.settle(Settlement.ack(other_org, [lease], [None])) == [Answer.NOT_FOUND]
    assert await store.settle(Settlement.nack(other_org, [Nack(lease=lease, failure=Failure(permanent=True))])) == [
        Answer.NOT_FOUND
    ]
    assert await store.settle(Settlement.extend(other_org, [lease], window_us=HOUR_US)) == [Answer.NOT_FOUND]
    assert await store.settle(Settlement.release(other_org, [lease])) == [Answer.NOT_FOUND]
    assert await store.cancel(other_org, ids, reason="") == [Answer.NOT_FOUND]
    assert await store.get(other_org, ids, include_payload=True) == []
    assert await store.settle(Settlement.ack(org, [lease], [b"done"])) == [Answer.OK]
    assert await store.get(other_org, ids, include_payload=True) == []
    assert await store.cancel(other_org, ids, reason="") == [Answer.NOT_FOUND]


@pytest.mark.parametrize("state", ["live", "finished", "dead"])
async def test_an_id_is_an_orgs_own(database: Database, org: OrgId, other_org: OrgId, state: str) -> None:
    """Two orgs may have the same ids, for example if one environment is a copy of another. Neither org sees or changes
    the other org's jobs."""
    store = Store(database)
    theirs = some_jobs(other_org, 1, dedup_keys=["k"])
    await store.enqueue(theirs)
    if state != "live":
        ((_, lease),) = await lease_jobs(store, other_org)
        await (
            store.settle(Settlement.ack(other_org, [lease]))
            if state == "finished"
            else store.settle(Settlement.nack(other_org, [killed(lease)]))
        )
    ours = some_jobs(org, ids=[job_id(), *ids_of(theirs)], dedup_keys=["a", "k"])
    assert await store.known(ours) == {}
    assert await store.enqueue(ours) == {}
    assert await store.enqueue(ours) == await store.known(ours) == dict(enumerate(ours.ids))
    assert await store.enqueue(theirs) == {0: theirs.ids[0]}
    held = {job.id: lease for job, lease in await lease_jobs(store, org)}
    assert held.keys() == set(ours.ids)
    twin = held[ids_of(theirs)[0]]
    assert await store.settle(Settlement.ack(other_org, [twin])) == [Answer.STALE], (
        "a lease of the other org's job is none of its own"
    )
    assert await store.settle(Settlement.nack(org, [killed(lease) for lease in held.values()])) == [Answer.OK] * 2
    assert await store.enqueue(ours) == dict(enumerate(ours.ids))
    (record,) = await store.get(other_org, ids_of(theirs), include_payload=False)
    assert record.state == {"live": "ready", "finished": "succeeded", "dead": "dead"}[state]


def killed(lease: Lease) -> Nack:
    return Nack(lease=lease, failure=Failure(permanent=True))


async def test_what_is_redriven_or_purged_is_one_orgs_though_two_have_the_id(
    database: Database, books: QueueAdmin, org: OrgId, other_org: OrgId
) -> None:
    store = Store(database)
    ids = [job_id(), job_id()]
    for one in (org, other_org):
        await store.enqueue(some_jobs(one, ids=ids))
        await store.settle(Settlement.nack(one, [killed(lease) for _, lease in await lease_jobs(store, one)]))
    assert await books.redrive(org, QUEUE, kind="", died_after=None, died_before=None, limit=1) == 1
    assert await books.purge_queue(org, QUEUE, limit=10, include_dead=True) == 2
    states = {record.state for record in await store.get(other_org, ids, include_payload=False)}
    assert states == {"dead"}


async def test_calls_of_two_orgs_with_the_same_ids_and_keys_are_stored_in_one_statement(
    recorder: Recorder, org: OrgId, other_org: OrgId
) -> None:
    store = Store(recorder)
    await store.names.make([(org, QUEUE), (other_org, QUEUE)])
    ids = [job_id(), job_id()]
    before = len(recorder.runs)
    calls = [some_jobs(one, ids=ids, dedup_keys=["k", "l"]) for one in (org, other_org)]
    assert await asyncio.gather(*map(store.enqueue, calls)) == [{}, {}]
    assert recorder.count(queue_statements.ENQUEUE, since=before) == 1


async def test_two_orgs_with_the_same_ids_each_see_only_their_own_jobs_and_keys(
    database: Database, org: OrgId, other_org: OrgId
) -> None:
    """One statement has the jobs of two orgs, with the same ids and key. It stores both jobs of the first org. It does
    not store the first job of the second org, because an earlier job of that org has the key."""
    store = Store(database)
    holder = some_jobs(other_org, 1, dedup_keys=["k"])
    await store.enqueue(holder)
    ids = [job_id(), job_id()]
    calls = [some_jobs(one, ids=ids, dedup_keys=["k"]) for one in (org, other_org)]
    assert await asyncio.gather(*map(store.enqueue, calls)) == [{}, {0: holder.ids[0]}]
    assert {job.id for job, _ in await lease_jobs(store, org)} == set(ids)
    assert {job.id for job, _ in await lease_jobs(store, other_org)} == {holder.ids[0], ids[1]}


async def test_another_orgs_job_that_ends_meanwhile_holds_up_no_enqueue_of_its_id(
    fresh_database: Database, fresh_dsn: str, org: OrgId, other_org: OrgId
) -> None:
    """The enqueue waits at its second job. Meanwhile the other org's job, which has the id of the first job,
    finishes."""
    store = Store(fresh_database)
    await store.enqueue(some_jobs(org, 1))
    (queue_id,) = (await store.names.find([(org, QUEUE)])).values()
    # Jobs are stored in the order of their ids. So the id of the other org's job comes first.
    twin, own = job_id(ahead_ms=-1000), job_id()
    await store.enqueue(some_jobs(other_org, ids=[twin]))
    ((_, lease),) = await lease_jobs(store, other_org)
    async with asyncio.TaskGroup() as group, await psycopg.AsyncConnection.connect(fresh_dsn) as rival:
        await rival.execute(
            "INSERT INTO windrow.job (id, queue_id, run_at, visible_at, priority, kind, payload) "
            "VALUES (%s, %s, now(), now(), 5, 'k', '')",
            (own, queue_id),
        )
        batch = group.create_task(store.enqueue(some_jobs(org, ids=[twin, own], dedup_keys=["k"])))
        await until_blocked(fresh_database)
        assert await store.settle(Settlement.ack(other_org, [lease], [None])) == [Answer.OK]
        await rival.rollback()
    assert batch.result() == {}


# A placement that is older than what the shard knows (I6)


async def test_an_enqueue_by_an_older_placement_than_the_slots_is_refused_and_stores_nothing(
    fresh_database: Database, org: OrgId
) -> None:
    store = Store(fresh_database)
    await store.names.make([(org, A), (org, B)])
    await fresh_database.run(b"UPDATE windrow.owned_slot SET epoch = 7 WHERE slot = %(slot)s", {"slot": slot_of(org)})
    before = await everything(fresh_database)
    jobs = two_queues(org, [job_id() for _ in range(4)])
    for epoch in (1, 6):
        with pytest.raises(NotOwned) as caught:
            await store.enqueue(jobs, epoch=epoch)
        assert (caught.value.slot, caught.value.epoch) == (slot_of(org), 7)
        assert f"owned there (epoch 7), and the caller knows the placement of epoch {epoch}" in str(caught.value)
    assert await everything(fresh_database) == before
    assert await store.enqueue(jobs, epoch=7) == {}
    assert await store.enqueue(two_queues(org, [job_id() for _ in range(4)]), epoch=9) == {}


async def test_of_calls_in_one_statement_those_by_an_older_placement_are_refused_alone(
    fresh_recorder: Recorder, org: OrgId, other_org: OrgId
) -> None:
    store = Store(fresh_recorder)
    await store.names.make([(one, QUEUE) for one in (org, other_org)])
    await fresh_recorder.run(b"UPDATE windrow.owned_slot SET epoch = 7 WHERE slot = %(slot)s", {"slot": slot_of(org)})
    before = len(fresh_recorder.runs)
    old, new, beside = some_jobs(org, 2), some_jobs(org, 2), some_jobs(other_org, 2)
    one, two, three = await asyncio.gather(
        store.enqueue(new, epoch=8), store.enqueue(old, epoch=6), store.enqueue(beside), return_exceptions=True
    )
    assert isinstance(two, NotOwned)
    assert (one, three) == ({}, {})
    asked = [run[0] for run in fresh_recorder.runs[before:]]
    enqueue = queue_statements.ENQUEUE_PLAIN
    assert asked == [enqueue, queue_statements.FIND_REFUSED_SLOTS, enqueue]
    assert {job.id for job, _ in await lease_jobs(store, org)} == set(new.ids)


async def test_an_org_that_was_never_seen_finds_nothing(database: Database, org: OrgId, other_org: OrgId) -> None:
    store = Store(database)
    await store.enqueue(some_jobs(org, 1))
    ((job, lease),) = await lease_jobs(store, org)
    assert await lease_jobs(store, other_org) == []
    assert await store.settle(Settlement.ack(other_org, [lease], [None])) == [Answer.NOT_FOUND]
    assert await store.settle(Settlement.nack(other_org, [Nack(lease=lease)])) == [Answer.NOT_FOUND]
    assert await store.cancel(other_org, [job.id], reason="") == [Answer.NOT_FOUND]


async def test_a_lease_and_the_lease_before_it_are_answered_apart_in_one_call(database: Database, org: OrgId) -> None:
    store = Store(database)
    await store.enqueue(some_jobs(org, 1))
    ((_, old),) = await lease_jobs(store, org)
    await store.settle(Settlement.release(org, [old]))
    ((_, live),) = await lease_jobs(store, org)
    assert await store.settle(Settlement.extend(org, [old, live], window_us=HOUR_US)) == [Answer.STALE, Answer.OK]
    assert await store.settle(Settlement.ack(org, [live, old, live], [None] * 3)) == [
        Answer.OK,
        Answer.STALE,
        Answer.OK,
    ]


# The largest number of queues of an org


async def test_an_org_with_as_many_queues_as_it_may_have_gets_no_more_and_no_name_is_kept(
    recorder: Recorder, books: QueueAdmin, org: OrgId
) -> None:
    store, new = Store(recorder), [QueueName(f"{org}-{at}") for at in range(3)]
    await store.enqueue(two_queues(org, [job_id(), job_id()]))
    await fill_queues(recorder, org, QUEUES_MAX - 1)
    await store.enqueue(some_jobs(org, 1, queue=new[0]))
    before = await everything(recorder)
    jobs = two_queues(org, [job_id() for _ in range(4)])
    jobs.queues = [A, new[2], new[1], new[0]]
    with pytest.raises(
        TooManyQueues, match=f"org '{org}' has 10,000 queues .*, and so no room for '{new[1]}' and 1 more"
    ):
        await store.enqueue(jobs)
    with pytest.raises(TooManyQueues):
        await books.create_queue(org, new[1], QueueSettings())
    assert await everything(recorder) == before
    assert (
        await recorder.run(
            b"SELECT FROM windrow.queue_name WHERE queue = ANY (%(queues)s::text[])", {"queues": new[1:]}
        )
        == []
    )
    # Jobs can still be enqueued in existing queues, and a deleted queue can be created again. The store counts the
    # queues only when it must create a queue.
    runs = len(recorder.runs)
    await store.enqueue(two_queues(org, [job_id(), job_id()]))
    await Store(recorder).enqueue(some_jobs(org, 1, queue="full-1"))
    assert recorder.count(queue_statements.COUNT_QUEUES, since=runs) == 0
    await books.delete_queue(org, QueueName("full-2"))
    assert (await books.create_queue(org, QueueName("full-2"), QueueSettings())).queue == "full-2"


async def test_of_several_calls_those_of_an_org_that_may_have_no_more_queues_are_refused_alone(
    database: Database, org: OrgId, other_org: OrgId
) -> None:
    store = Store(database)
    await store.enqueue(some_jobs(org, 1, queue=A))
    await fill_queues(database, org, QUEUES_MAX - 1)
    calls = [some_jobs(org, 1, queue=A), some_jobs(other_org, 1, queue=B)]
    rivals = [some_jobs(org, 1, queue=f"{org}-{at}") for at in range(5)]
    answers = await asyncio.gather(*map(store.enqueue, [*calls, *rivals]), return_exceptions=True)
    assert answers[:2] == [{}, {}]
    # One of the concurrent calls has created the last queue that the org may have.
    assert sorted(map(type, answers[2:]), key=str) == sorted([dict, *[TooManyQueues] * 4], key=str)


# A queue that was deleted


async def test_a_deleted_queue_comes_back_with_its_next_job_even_if_that_dies(
    database: Database, books: QueueAdmin, org: OrgId
) -> None:
    store = Store(database)
    await store.enqueue(some_jobs(org, 1, queue=A))
    with pytest.raises(QueueNotEmpty):
        await books.delete_queue(org, A)
    held = [lease for _, lease in await lease_jobs(store, org, queue=A)]
    await store.settle(Settlement.ack(org, held, [None]))
    await books.delete_queue(org, A)
    with pytest.raises(UnknownQueue):
        await books.get_queue(org, A)
    # This router still remembers the queue's number, so it does not create the queue again.
    await store.enqueue(some_jobs(org, 1, queue=A))
    assert (await books.get_queue(org, A)).queue == A
    held = [lease for _, lease in await lease_jobs(store, org, queue=A)]
    await store.settle(Settlement.nack(org, [Nack(lease=held[0], failure=Failure(permanent=True))]))
    assert [q.queue for q in (await books.list_queues(org, page_size=9, page_token=""))[0]] == [A]
    page = await books.list_jobs(Wanted(org=org, queue=A, state=JobState.DEAD), page_size=9, page_token="")
    assert len(page.jobs) == 1
    assert await books.redrive(org, A, kind="", died_after=None, died_before=None, limit=9) == 1


@pytest.mark.parametrize(
    "moment", [placement_statements.INSERT_QUEUES, queue_statements.FIND_QUEUE_IDS], ids=["made", "found"]
)
async def test_an_org_that_is_erased_while_it_gets_a_queue_has_not_too_many(
    fresh_recorder: Recorder, org: OrgId, moment: bytes
) -> None:
    """The job is stored for the new org that has the name after the erasure, no matter whether the queue was created
    for the erased org or for the new org."""
    store = Store(fresh_recorder)
    for number in range(20):
        await store.enqueue(some_jobs(org, queue=f"queue-{number}"))

    async def erase() -> None:
        assert await erasure.begin(fresh_recorder, org, erasure=str(uuid.uuid4()))

    async def erase_once_made() -> None:
        fresh_recorder.before(queue_statements.FIND_QUEUE_IDS, erase)

    if moment == placement_statements.INSERT_QUEUES:
        fresh_recorder.before(placement_statements.INSERT_QUEUES, erase)
    else:
        fresh_recorder.before(placement_statements.INSERT_QUEUES, erase_once_made)
    jobs = some_jobs(org, queue="one-more")
    assert await store.enqueue(jobs) == {}
    (job,) = await store.get(org, ids_of(jobs), include_payload=False)
    assert (job.queue, job.state) == ("one-more", "ready")


async def test_an_org_that_is_erased_while_an_operator_makes_it_a_queue_has_not_too_many(
    fresh_dsn: str, org: OrgId
) -> None:
    recorder = Recorder(SHARD, fresh_dsn, connections=2, may_scan=True)
    await recorder.open()
    try:
        await Store(recorder).enqueue(some_jobs(org))

        async def erase() -> None:
            assert await erasure.begin(recorder, org, erasure=str(uuid.uuid4()))

        recorder.before(admin_statements.CREATE_QUEUE, erase)
        made = await QueueAdmin(recorder).create_queue(org, QueueName("one-more"), QueueSettings())
        assert made.queue == "one-more"
    finally:
        await recorder.close()


# A queue that an operator creates


class Dying(Database):
    """A database that fails after `left` statements, as if the process that uses it had ended."""

    def __init__(self, dsn: str) -> None:
        super().__init__(SHARD, dsn, may_scan=True)
        self.left = 0

    async def run(self, statement: bytes, parameters: Mapping[str, object]) -> Rows:
        if not self.left:
            raise ShardUnavailable(self.name, "the test says so")
        self.left -= 1
        return await super().run(statement, parameters)


async def test_a_queue_whose_creation_is_cut_short_has_its_settings_or_does_not_exist(
    fresh_dsn: str, fresh_database: Database, org: OrgId
) -> None:
    dying = Dying(fresh_dsn)
    await dying.open()
    settings = QueueSettings(max_attempts=3, paused=True)
    books = QueueAdmin(fresh_database)
    made: QueueRecord | None = None
    steps = 0
    try:
        while made is None:
            steps, dying.left = steps + 1, steps + 1
            try:
                made = await QueueAdmin(dying).create_queue(org, A, settings)
            except ShardUnavailable:
                with pytest.raises(UnknownQueue):
                    await books.get_queue(org, A)
    finally:
        await dying.close()
    assert steps > 3
    assert made == await books.get_queue(org, A)
    assert (made.settings.max_attempts, made.settings.paused) == (3, True)


async def test_of_two_creations_of_a_queue_the_later_one_is_refused_and_changes_nothing(
    fresh_recorder: Recorder, org: OrgId
) -> None:
    async def create_first() -> None:
        await QueueAdmin(fresh_recorder).create_queue(org, A, QueueSettings(max_attempts=3))

    fresh_recorder.before(admin_statements.CREATE_QUEUE, create_first)
    with pytest.raises(QueueExists):
        await QueueAdmin(fresh_recorder).create_queue(org, A, QueueSettings(paused=True))
    record = await QueueAdmin(fresh_recorder).get_queue(org, A)
    assert (record.settings.max_attempts, record.settings.paused) == (3, False)


async def test_a_deleted_queue_is_created_again_with_its_new_settings(fresh_database: Database, org: OrgId) -> None:
    books = QueueAdmin(fresh_database)
    await books.create_queue(org, A, QueueSettings(max_attempts=3, retention_days=7))
    await books.delete_queue(org, A)
    again = await books.create_queue(org, A, QueueSettings(group_concurrency=2, retention_days=14))
    assert again == await books.get_queue(org, A)
    assert again.settings == QueueSettings(group_concurrency=2, retention_days=14, paused=False)
