"""At most k jobs of a group are leased at the same time, in their order. No job of a group waits for ever."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence

import psycopg
import pytest

from shard.admin.queue_admin import QueueAdmin
from shard.history.days import expire_waiting
from shard.job_record import JobRecord
from shard.postgres.pool import Database
from shard.queue.settle import Nack, Settlement, Snooze
from shard.queue.store import Store
from shard.queue_settings import QueueSettings
from shard.retry_policy import Fixed
from shard.vocabulary import Alteration, Answer, Claimed, Failure, JobId, Lease, OrgId, QueueId
from tests.conftest import SHARD
from tests.effort import luck_of, trials
from tests.jobs import HOUR_US, QUEUE, at_once, ids_of, job_id, lease_jobs, some_jobs
from tests.pair import A, B, Pair
from tests.timemachine import end_leases, make_due, until_blocked

PATIENCE_S = 30.0
PERMANENT = Failure(permanent=True)
luck = luck_of("groups")


@pytest.fixture
async def databases(module_dsn: str) -> AsyncGenerator[list[Database], None]:
    """The databases of two routers."""
    # The lock wait is long, so that no call is refused because another call is slow.
    opened = [Database(SHARD, module_dsn, connections=4, short_lock_wait_s=PATIENCE_S) for _ in range(2)]
    for database in opened:
        await database.open()
    yield opened
    for database in opened:
        await database.close()


async def enqueue(store: Store, org: OrgId, count: int = 1, *, group: str = "g", **fields: object) -> list[JobId]:
    jobs = some_jobs(org, count, group=group, **fields)  # type: ignore[arg-type]
    jobs.ids.sort()
    assert await store.enqueue(jobs) == {}
    return ids_of(jobs)


async def leased(store: Store, org: OrgId) -> list[tuple[Claimed, Lease]]:
    return await lease_jobs(store, org, window_us=HOUR_US)


def names(taken: Sequence[tuple[Claimed, Lease]]) -> list[JobId]:
    return [job.id for job, _ in taken]


async def ack(store: Store, org: OrgId, *leases: Lease) -> None:
    assert await store.settle(Settlement.ack(org, leases)) == [Answer.OK] * len(leases)


async def allow(books: QueueAdmin, org: OrgId, k: int) -> None:
    await books.alter_queue(org, QUEUE, QueueSettings(group_concurrency=k))


async def record_of(store: Store, org: OrgId, job: JobId) -> JobRecord:
    (record,) = await store.get(org, [job], include_payload=False)
    return record


# ── Order, and at most k ─────────────────────────────────────────────────────────────────────────────────────────────


async def test_the_jobs_of_a_group_run_one_after_another_in_the_order_of_enqueue(store: Store, org: OrgId) -> None:
    jobs = await enqueue(store, org, 2) + await enqueue(store, org, 2)
    for job in jobs:
        ((claimed, lease),) = await leased(store, org)
        assert (claimed.id, claimed.group_key) == (job, "g")
        assert await leased(store, org) == []
        await ack(store, org, lease)
    assert await leased(store, org) == []


async def test_groups_and_plain_jobs_do_not_hold_each_other_up(store: Store, org: OrgId) -> None:
    firsts = [(await enqueue(store, org, 3, group=group))[0] for group in ("g", "h", "ü" * 128)]
    plain = some_jobs(org, 2)
    await store.enqueue(plain)
    assert set(names(await leased(store, org))) == {*firsts, *ids_of(plain)}
    assert await leased(store, org) == []


async def test_one_key_in_two_queues_names_two_groups(store: Store, org: OrgId) -> None:
    await enqueue(store, org, 2)
    (other, _) = await enqueue(store, org, 2, queue="other")
    assert len(await leased(store, org)) == 1
    assert names(await lease_jobs(store, org, queue="other")) == [other]


async def test_a_retry_keeps_its_place(store: Store, database: Database, org: OrgId) -> None:
    first, second = await enqueue(store, org, 2)
    ways: list[Callable[[Lease], Settlement]] = [
        lambda lease: Settlement.nack(org, [Nack(lease=lease, retry_after_us=HOUR_US)]),
        lambda lease: Settlement.snooze(org, [Snooze(lease, HOUR_US)]),
        lambda lease: Settlement.release(org, [lease]),
    ]
    for back in ways:
        ((claimed, lease),) = await leased(store, org)
        assert claimed.id == first
        assert await store.settle(back(lease)) == [Answer.OK]
        await make_due(database, org)
    ((claimed, lease),) = await leased(store, org)
    assert claimed.id == first
    await ack(store, org, lease)
    assert names(await leased(store, org)) == [second]


async def test_nothing_of_a_group_runs_while_its_first_job_backs_off(store: Store, org: OrgId) -> None:
    await enqueue(store, org, 2)
    ((_, lease),) = await leased(store, org)
    await store.settle(Settlement.nack(org, [Nack(lease=lease, retry_after_us=HOUR_US)]))
    assert await leased(store, org) == []


async def test_where_several_jobs_of_a_group_may_run_one_that_backs_off_gives_its_slot_up(
    store: Store, books: QueueAdmin, database: Database, org: OrgId
) -> None:
    jobs = await enqueue(store, org, 5)
    await allow(books, org, 2)
    ways: list[Callable[[Lease], Settlement]] = [
        lambda lease: Settlement.nack(org, [Nack(lease=lease, retry_after_us=HOUR_US)]),
        lambda lease: Settlement.snooze(org, [Snooze(lease, HOUR_US)]),
    ]
    rung: list[set[QueueId]] = []
    store.on_visible = rung.append
    for (_, lease), back in zip(await leased(store, org), ways, strict=True):
        assert await store.settle(back(lease)) == [Answer.OK]
    assert len(rung) == 2
    held = await leased(store, org)
    assert names(held) == jobs[2:4]
    # The nacked job and the snoozed job become due again. They wait for slots behind the jobs that already wait.
    await make_due(database, org)
    assert await leased(store, org) == []
    await ack(store, org, held[0][1])
    last = await leased(store, org)
    assert names(last) == jobs[4:]
    await ack(store, org, held[1][1], last[0][1])
    assert names(await leased(store, org)) == jobs[:2]


async def test_a_job_that_is_given_back_at_once_keeps_its_slot(store: Store, books: QueueAdmin, org: OrgId) -> None:
    jobs = await enqueue(store, org, 4)
    await allow(books, org, 2)
    for _, lease in await leased(store, org):
        assert await store.settle(Settlement.release(org, [lease])) == [Answer.OK]
    assert names(await leased(store, org)) == jobs[:2]


async def test_a_lease_that_ended_unnoticed_keeps_its_slot(store: Store, database: Database, org: OrgId) -> None:
    first, _ = await enqueue(store, org, 2)
    await leased(store, org)
    assert await end_leases(database, org) == 1
    ((again, _),) = await leased(store, org)
    assert (again.id, again.attempt) == (first, 2)


async def test_k_jobs_of_a_group_are_leased_at_a_time(store: Store, books: QueueAdmin, org: OrgId) -> None:
    await books.create_queue(org, QUEUE, QueueSettings(group_concurrency=3))
    jobs = await enqueue(store, org, 7)
    taken = await leased(store, org)
    assert sorted(names(taken)) == jobs[:3]
    await ack(store, org, *(lease for _, lease in taken[:2]))
    assert sorted(names(await leased(store, org))) == jobs[3:5]


async def test_a_larger_k_counts_at_once_and_a_smaller_one_takes_no_lease_away(
    store: Store, books: QueueAdmin, org: OrgId
) -> None:
    jobs = await enqueue(store, org, 7)
    taken = await leased(store, org)
    await allow(books, org, 3)
    taken += await leased(store, org)
    assert sorted(names(taken)) == jobs[:3]
    await allow(books, org, 1)
    # The slots above 1 are not filled again.
    by_id = {job.id: lease for job, lease in taken}
    await ack(store, org, by_id[jobs[1]], by_id[jobs[2]])
    assert await leased(store, org) == []
    await ack(store, org, by_id[jobs[0]])
    assert names(await leased(store, org)) == jobs[3:4]


async def test_after_k_became_smaller_the_next_job_waits_until_fewer_than_k_are_leased(
    store: Store, books: QueueAdmin, org: OrgId
) -> None:
    await books.create_queue(org, QUEUE, QueueSettings(group_concurrency=3))
    jobs = await enqueue(store, org, 4)
    by_id = {job.id: lease for job, lease in await leased(store, org)}
    await allow(books, org, 1)
    await ack(store, org, by_id[jobs[0]])
    assert await leased(store, org) == []
    await ack(store, org, by_id[jobs[1]])
    assert await leased(store, org) == []
    await ack(store, org, by_id[jobs[2]])
    assert names(await leased(store, org)) == jobs[3:]


async def test_postgres_itself_refuses_a_lease_without_a_slot_and_one_slot_for_two_jobs(
    store: Store, database: Database, org: OrgId
) -> None:
    _, second = await enqueue(store, org, 2)
    with pytest.raises(psycopg.errors.UniqueViolation):
        await database.run(
            b"UPDATE windrow.job SET group_slot = 1, visible_at = now() WHERE id = %(id)s::uuid", {"id": second}
        )
    with pytest.raises(psycopg.errors.CheckViolation):
        await database.run(
            b"UPDATE windrow.job SET lease = 1, leased_at = now(), worker = 'w', attempt = 1, visible_at = now() "
            b"WHERE id = %(id)s::uuid",
            {"id": second},
        )


# ── Scheduled jobs ───────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_job_that_is_not_due_holds_nothing_up(store: Store, database: Database, org: OrgId) -> None:
    (later,) = await enqueue(store, org, delay_us=HOUR_US)
    (now,) = await enqueue(store, org)
    assert (await record_of(store, org, later)).state == "scheduled"
    ((claimed, lease),) = await leased(store, org)
    assert claimed.id == now
    # The later job becomes due while the group slot is taken, so this job waits and is not leased.
    assert await make_due(database, org) == 1
    assert await leased(store, org) == []
    assert (await record_of(store, org, later)).state == "ready"
    await ack(store, org, lease)
    assert names(await leased(store, org)) == [later]


async def test_jobs_that_become_due_run_in_the_order_in_which_they_were_due(
    store: Store, database: Database, org: OrgId
) -> None:
    jobs = await enqueue(store, org, 20, delay_us=HOUR_US)
    assert await make_due(database, org) == 20
    for job in jobs:
        ((claimed, lease),) = await leased(store, org)
        assert claimed.id == job
        await ack(store, org, lease)


async def test_a_job_that_became_due_while_no_claim_looked_is_not_overtaken(
    store: Store, database: Database, org: OrgId
) -> None:
    await enqueue(store, org)
    ((_, lease),) = await leased(store, org)
    due = await enqueue(store, org, 2, delay_us=HOUR_US)
    assert await make_due(database, org) == 2
    (now,) = await enqueue(store, org)
    await ack(store, org, lease)
    for job in (*due, now):
        ((claimed, lease),) = await leased(store, org)
        assert claimed.id == job
        await ack(store, org, lease)


async def test_a_new_job_does_not_overtake_one_that_has_become_due(
    store: Store, database: Database, org: OrgId
) -> None:
    due = await enqueue(store, org, 2, delay_us=HOUR_US)
    assert await make_due(database, org) == 2
    new = await enqueue(store, org, 2)
    for job in (*due, *new):
        ((claimed, lease),) = await leased(store, org)
        assert claimed.id == job
        await ack(store, org, lease)


async def test_a_due_job_that_another_session_has_locked_is_not_overtaken(
    store: Store, database: Database, module_dsn: str, org: OrgId
) -> None:
    (due,) = await enqueue(store, org, delay_us=HOUR_US)
    assert await make_due(database, org) == 1
    async with await psycopg.AsyncConnection.connect(module_dsn) as other:
        await other.execute("SELECT FROM windrow.job WHERE id = %s FOR UPDATE", [due])
        (new,) = await enqueue(store, org)
        assert await leased(store, org) == []
    # The next claim makes the due job wait. This fills the group.
    taken = await leased(store, org) or await leased(store, org)
    assert names(taken) == [due]
    await ack(store, org, taken[0][1])
    assert names(await leased(store, org)) == [new]


# ── Every end of a job, and every change, lets the next one run ──────────────────────────────────────────────────────


async def test_the_next_job_runs_after_every_end_of_the_first(
    store: Store, database: Database, books: QueueAdmin, org: OrgId
) -> None:
    jobs = await enqueue(store, org, 7)

    async def first() -> Lease:
        ((claimed, lease),) = await leased(store, org)
        assert claimed.id == jobs.pop(0)
        return lease

    await ack(store, org, await first())
    assert await store.settle(Settlement.nack(org, [Nack(lease=await first(), failure=PERMANENT)])) == [Answer.OK]
    await first()
    cancelled = (await store.cancel(org, await holders(database, org), reason="why"))[0]
    assert cancelled is Answer.OK
    # The next job is ready, and expires before it is leased.
    await database.run(b"UPDATE windrow.job SET expires_at = now() WHERE id = ANY (%(ids)s::uuid[])", {"ids": jobs[:1]})
    jobs.pop(0)
    await first()
    # The leased job is out of attempts, and its lease ends.
    await database.run(b"UPDATE windrow.job SET max_attempts = 1 WHERE group_slot IS NOT NULL", {})
    await end_leases(database, org)
    await first()
    assert await store.cancel(org, jobs, reason="") == [Answer.OK] * len(jobs)
    assert await leased(store, org) == []


async def holders(database: Database, org: OrgId) -> list[JobId]:
    rows = await database.run(
        b"SELECT j.id::text FROM windrow.job j JOIN windrow.queue q USING (queue_id) "
        b"WHERE q.org = %(org)s AND j.group_slot IS NOT NULL ORDER BY j.group_slot",
        {"org": org},
    )
    return [JobId(name) for (name,) in rows]


async def test_the_archiver_and_a_purge_end_jobs_of_groups(
    store: Store, database: Database, books: QueueAdmin, org: OrgId
) -> None:
    jobs = await enqueue(store, org, 3)
    await database.run(b"UPDATE windrow.job SET expires_at = now() WHERE id = %(id)s::uuid", {"id": jobs[0]})
    assert await expire_waiting(database) == 1
    assert names(await leased(store, org)) == [jobs[1]]
    await books.purge_queue(org, QUEUE, include_dead=False, limit=100)
    assert (await record_of(store, org, jobs[2])).state == "cancelled"
    assert await holders(database, org) == [jobs[1]]


async def test_a_job_that_is_put_off_gives_its_slot_up(store: Store, org: OrgId) -> None:
    first, second = await enqueue(store, org, 2)
    assert await store.alter(org, [first], Alteration(delay_us=HOUR_US)) == [Answer.OK]
    ((claimed, lease),) = await leased(store, org)
    assert claimed.id == second
    # The first job is to run now, but it waits behind the leased job.
    assert await store.alter(org, [first], Alteration(delay_us=0)) == [Answer.OK]
    assert await leased(store, org) == []
    await ack(store, org, lease)
    assert names(await leased(store, org)) == [first]


async def test_a_new_priority_leaves_a_job_that_waits_in_its_place(store: Store, org: OrgId) -> None:
    first, second, third = await enqueue(store, org, 3)
    assert await store.alter(org, [third], Alteration(priority=1)) == [Answer.OK]
    assert await store.alter(org, [first], Alteration(priority=9)) == [Answer.OK]
    for job in (first, second, third):
        ((claimed, lease),) = await leased(store, org)
        assert claimed.id == job
        await ack(store, org, lease)


async def test_a_redriven_job_waits_behind_the_others(store: Store, org: OrgId) -> None:
    first, second = await enqueue(store, org, 2)
    ((_, lease),) = await leased(store, org)
    await store.settle(Settlement.nack(org, [Nack(lease=lease, failure=PERMANENT)]))
    assert await store.redrive(org, [first]) == [Answer.OK]
    ((claimed, lease),) = await leased(store, org)
    assert claimed.id == second
    await ack(store, org, lease)
    assert names(await leased(store, org)) == [first]


async def test_a_job_that_waits_is_ready_in_every_answer(
    store: Store, books: QueueAdmin, org: OrgId, database: Database
) -> None:
    jobs = await enqueue(store, org, 5)
    assert {(await record_of(store, org, job)).state for job in jobs} == {"ready"}
    (entry,) = [entry for entry in await books.check() if entry.org == org]
    assert (entry.ready, entry.scheduled, entry.balanced) == (5, 0, True)
    due = await store.sweep()
    assert all(when <= due.now for when in due.first.values())


async def test_the_queues_in_which_slots_became_free_are_reported(store: Store, org: OrgId) -> None:
    jobs = await enqueue(store, org, 4)
    rung: list[set[QueueId]] = []
    store.on_visible = rung.append
    ((_, lease),) = await leased(store, org)
    await ack(store, org, lease)
    assert len(rung) == 1
    ((_, lease),) = await leased(store, org)
    await store.settle(Settlement.nack(org, [Nack(lease=lease, failure=PERMANENT)]))
    assert len(rung) == 2
    await store.cancel(org, jobs[2:3], reason="")
    assert len(rung) == 3
    plain = some_jobs(org)
    await store.enqueue(plain)
    for job, lease in await leased(store, org):
        if job.id == plain.ids[0]:
            await ack(store, org, lease)
    assert len(rung) == 3


# ── No group is stranded ─────────────────────────────────────────────────────────────────────────────────────────────


async def test_the_last_acks_of_a_group_and_an_enqueue_at_once_strand_nothing(
    databases: list[Database], books: QueueAdmin, org: OrgId
) -> None:
    """Two sessions see each other's jobs only after the commits. The locks of the groups' buckets make one session wait
    for the other."""
    first, second = (Store(database) for database in databases)
    await books.create_queue(org, QUEUE, QueueSettings(group_concurrency=2))
    await enqueue(first, org, 2)
    for _ in range(trials(60, thorough=2_000)):
        taken = await leased(first, org)
        assert len(taken) == 2
        (_, one), (_, other) = taken
        await at_once(
            first.settle(Settlement.ack(org, [one])),
            second.settle(Settlement.ack(org, [other])),
            enqueue(second, org),
            enqueue(first, org),
        )


@pytest.mark.parametrize("what", ["ack", "enqueue"])
@pytest.mark.parametrize("cut", [True, False])
async def test_a_connection_that_is_cut_while_slots_are_filled_strands_nothing(
    fresh_database: Database, fresh_dsn: str, org: OrgId, what: str, cut: bool
) -> None:
    """When the connection is cut, the statement has changed its rows, and waits for the lock of its group's bucket.
    None of its changes is committed."""
    store = Store(fresh_database)
    jobs = await enqueue(store, org, 2)
    ((_, lease),) = await leased(store, org)
    async with await psycopg.AsyncConnection.connect(fresh_dsn) as other:
        await other.execute("SELECT pg_advisory_xact_lock(14, bucket) FROM generate_series(0, 1023) AS bucket")
        act = asyncio.create_task(ack(store, org, lease) if what == "ack" else enqueue(store, org))
        await until_blocked(fresh_database)
        if cut:
            await other.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE wait_event_type = 'Lock' AND datname = current_database()"
            )
        await other.rollback()
    async with asyncio.timeout(PATIENCE_S):
        result = await act
    if what == "enqueue":
        assert result is not None
        jobs += result
        await ack(store, org, lease)
    for job in jobs[1:]:
        ((claimed, lease),) = await leased(store, org)
        assert claimed.id == job
        await ack(store, org, lease)


@pytest.mark.parametrize("commits", [True, False])
async def test_a_job_that_another_session_has_locked_is_not_overtaken(
    fresh_dsn: str, fresh_database: Database, org: OrgId, commits: bool
) -> None:
    store = Store(fresh_database)
    jobs = await enqueue(store, org, 3)
    ((_, lease),) = await leased(store, org)
    async with await psycopg.AsyncConnection.connect(fresh_dsn) as other:
        await other.execute("DELETE FROM windrow.job WHERE id = %s", [jobs[1]])
        await ack(store, org, lease)
        assert await leased(store, org) == []
        await (other.commit() if commits else other.rollback())
    if not commits:
        # The group's next job has to wait for a sweep only if one session rolls back while another session commits.
        await store.sweep()
    assert names(await leased(store, org)) == ([jobs[2]] if commits else [jobs[1]])


async def test_a_job_gets_the_slot_of_a_job_of_its_call_that_was_known_already(store: Store, org: OrgId) -> None:
    await store.enqueue(some_jobs(org, dedup_keys=["known"]))
    jobs = some_jobs(org, ids=sorted(job_id() for _ in range(2)), group="g", dedup_keys=["known"])
    assert (await store.enqueue(jobs)).keys() == {0}
    assert ids_of(jobs)[1] in names(await leased(store, org))


async def test_a_sweep_fills_slots_that_were_left_free(fresh_database: Database, org: OrgId) -> None:
    store = Store(fresh_database)
    await leased(store, org)
    groups = [f"g{number:04}" for number in range(2_500)]
    await fresh_database.run(b"ALTER TABLE windrow.job DISABLE TRIGGER USER", {})
    for at in range(0, len(groups), 500):
        jobs = some_jobs(org, 500)
        jobs.groups.update(enumerate(groups[at : at + 500]))
        await store.enqueue(jobs)
    await fresh_database.run(b"UPDATE windrow.job SET visible_at = 'infinity', group_slot = NULL", {})
    await fresh_database.run(b"ALTER TABLE windrow.job ENABLE TRIGGER USER", {})
    assert await leased(store, org) == []
    # Each sweep looks at 1,000 groups, and continues where the previous sweep ended.
    for expected in (1_000, 2_000, 2_500, 2_500):
        await store.sweep()
        assert len(await holders(fresh_database, org)) == expected


async def test_never_more_than_k_are_leased_whatever_consumers_do(
    databases: list[Database], books: QueueAdmin, org: OrgId
) -> None:
    """Two routers have many consumers, which end their leases in random ways. The unique index already bounds the
    slots. This test counts the leases themselves, and drains the queue in the end."""
    stores = [Store(database) for database in databases]
    await books.create_queue(org, QUEUE, QueueSettings(group_concurrency=2, max_attempts=1000))
    random = luck
    left = trials(400, thorough=10_000)

    async def work(store: Store) -> None:
        nonlocal left
        while left > 0:
            left -= 1
            match random.choice(["enqueue", "claim", "claim", "claim", "cancel", "expire", "k", "purge", "alter"]):
                case "enqueue":
                    await enqueue(
                        store, org, random.randrange(1, 5), group=random.choice("abc"), retry=Fixed(delay_us=0)
                    )
                case "claim":
                    for _, lease in await leased(store, org):
                        how = random.choice(["ack", "ack", "nack", "release", "die", "leave"])
                        match how:
                            case "ack":
                                await store.settle(Settlement.ack(org, [lease]))
                            case "nack":
                                after_us = random.choice([0, 1000])
                                await store.settle(Settlement.nack(org, [Nack(lease=lease, retry_after_us=after_us)]))
                            case "release":
                                await store.settle(Settlement.release(org, [lease]))
                            case "die":
                                await store.settle(Settlement.nack(org, [Nack(lease=lease, failure=PERMANENT)]))
                            case _:
                                pass
                case "cancel" | "alter" as how:
                    rows = await databases[0].run(
                        b"SELECT j.id::text FROM windrow.job j JOIN windrow.queue q USING (queue_id) "
                        b"WHERE q.org = %(org)s ORDER BY random() LIMIT 2",
                        {"org": org},
                    )
                    ids = [JobId(name) for (name,) in rows]
                    if ids and how == "cancel":
                        await store.cancel(org, ids, reason="")
                    elif ids:
                        await store.alter(org, ids, Alteration(delay_us=random.choice([0, 1000])))
                case "expire":
                    await end_leases(databases[0], org)
                case "k":
                    await allow(books, org, random.choice([2, 3]))
                case _:
                    if random.random() < 0.1:
                        await books.purge_queue(org, QUEUE, include_dead=False, limit=100)

    async def watch() -> None:
        while left > 0:
            rows = await databases[0].run(
                b"SELECT j.group_key, count(*) FROM windrow.job j JOIN windrow.queue q USING (queue_id) "
                b"WHERE q.org = %(org)s AND j.lease IS NOT NULL AND j.visible_at > now() GROUP BY 1",
                {"org": org},
            )
            assert all(count <= 3 for _, count in rows), rows

    async with asyncio.TaskGroup() as group:
        for at in range(8):
            group.create_task(work(stores[at % 2]))
        group.create_task(watch())
    await end_leases(databases[0], org)
    await make_due(databases[0], org)
    # Without a sweep, consumers get all jobs, so no group is forgotten.
    while taken := await leased(stores[0], org):
        await ack(stores[0], org, *(lease for _, lease in taken))
    rows = await databases[0].run(
        b"SELECT count(*) FROM windrow.job j JOIN windrow.queue q USING (queue_id) WHERE q.org = %(org)s", {"org": org}
    )
    assert rows == [(0,)]


# ── Moves ────────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_group_keeps_its_order_and_its_bound_while_its_org_moves(pair: Pair, org: OrgId) -> None:
    a, b = pair.store(A), pair.store(B)
    jobs = await enqueue(a, org, 4)
    ((_, lease),) = await leased(a, org)
    move = await pair.begin([org], target=B)
    moving = asyncio.create_task(pair.mover(move).finish())
    # All jobs except the leased one arrive.
    async with asyncio.timeout(PATIENCE_S):
        await until_there(pair.databases[B], 3)
    new = some_jobs(org, group="g")
    assert await b.enqueue(new, epoch=move.epoch) == {}
    assert await leased(b, org) == []
    # The leased job fails, and moves with its group slot, so no job overtakes it.
    assert await a.settle(Settlement.nack(org, [Nack(lease=lease, retry_after_us=0)])) == [Answer.OK]
    async with asyncio.timeout(PATIENCE_S):
        await moving
    await b.sweep()
    for job in [*jobs, *ids_of(new)]:
        b = pair.store(B)
        ((claimed, lease),) = await leased(b, org)
        assert claimed.id == job
        await ack(b, org, lease)
    await pair.balance()


async def test_a_group_goes_on_after_its_last_lease_ended_on_the_source(pair: Pair, org: OrgId) -> None:
    a = pair.store(A)
    _, second = await enqueue(a, org, 2)
    ((_, lease),) = await leased(a, org)
    move = await pair.begin([org], target=B)
    moving = asyncio.create_task(pair.mover(move).finish())
    async with asyncio.timeout(PATIENCE_S):
        await until_there(pair.databases[B], 1)
        await ack(a, org, lease)
        await moving
    b = pair.store(B)
    assert await leased(b, org) == []
    await b.sweep()
    assert names(await leased(b, org)) == [second]
    await pair.balance()


async def until_there(database: Database, jobs: int) -> None:
    """Waits until this many jobs of groups have arrived."""
    found = 0
    while found < jobs:
        ((found,),) = await database.run(b"SELECT count(*) FROM windrow.job WHERE group_key IS NOT NULL", {})
