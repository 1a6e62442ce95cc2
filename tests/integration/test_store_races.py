"""Calls race for the same jobs. A job has one lease at a time (I2), each job is stored once (I3), and there is no
deadlock."""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence

import pytest

from shard.postgres import arrays
from shard.postgres.pool import Database
from shard.queue import statements
from shard.queue.settle import Nack, Settlement
from shard.queue.store import Store
from shard.vocabulary import Answer, Claimed, Failure, JobId, Lease, OrgId, QueueName
from tests.conftest import SHARD
from tests.effort import luck_of, trials
from tests.jobs import HOUR_US, MINUTE_US, QUEUE, history_of, ids_of, job_id, lease_jobs, some_jobs
from tests.timemachine import until_blocked

TRIALS = trials(400, thorough=10_000)
LANES = 4
luck = luck_of("races")
# A test searches for the length of a lease with which half of the acks come too late. These are the bounds of the
# search.
WINDOW_US_MIN, WINDOW_US_MAX = 50.0, 200_000.0
# The databases wait this long for a lock, so that no call is refused because another call is slow.
PATIENCE_S = 30.0

ClaimResult = list[tuple[Claimed, Lease]]

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(600)]


@pytest.fixture
async def wide(module_dsn: str) -> AsyncGenerator[Database, None]:
    """Opens a database with enough connections for all calls that race."""
    opened = Database(SHARD, module_dsn, connections=3 * LANES, short_lock_wait_s=PATIENCE_S)
    await opened.open()
    yield opened
    await opened.close()


def leases_of(*takings: ClaimResult) -> list[Lease]:
    return [lease for taken in takings for _, lease in taken]


async def ack(store: Store, org: OrgId, leases: Sequence[Lease]) -> list[Answer]:
    return await store.settle(Settlement.ack(org, leases, [None] * len(leases)))


async def assert_one_lease_at_a_time(database: Database, org: OrgId, takings: Sequence[ClaimResult]) -> None:
    """Asserts that the consumers' leases are the leases in the history, and that no two leases of a job overlap."""
    told = [(job.id, lease.number) for taken in takings for job, lease in taken]
    booked: list[tuple[str, int]] = []
    rows = await database.run(
        b"""
        SELECT f.id::text, f.history::text, f.lease, f.leased_at, f.finished_at, f.attempt
        FROM windrow.finished f JOIN windrow.queue q USING (queue_id)
        WHERE q.org = %(org)s
        """,
        {"org": org},
    )
    for name, history, lease, leased_at, finished_at, attempt in rows:
        spans = [
            tuple(int(str(entry[key])) for key in ("attempt", "lease", "leased_at_us", "ended_at_us"))
            for entry in history_of(history)
        ]
        spans.append((attempt, lease, leased_at, finished_at))
        assert [span[0] for span in spans] == list(range(1, len(spans) + 1))
        for (*_, ended), (_, _, began, _) in itertools.pairwise(spans):
            assert ended <= began, f"job {name} was leased again before its lease had ended"
        booked += [(name, span[1]) for span in spans]
    assert len(set(told)) == len(told), "one lease went to two consumers"
    assert Counter(told) == Counter(booked)


async def in_lanes(lane: Callable[[str, int], Awaitable[None]]) -> None:
    """Runs the trials in several lanes at the same time. Each lane has its own queue."""
    async with asyncio.TaskGroup() as group:
        for number in range(LANES):
            group.create_task(_as_coroutine(lane(f"lane-{number}", TRIALS // LANES)))


async def _as_coroutine(awaitable: Awaitable[None]) -> None:
    await awaitable


async def test_an_ack_that_races_with_its_deadline_wins_or_is_stale(wide: Database, org: OrgId) -> None:
    """Two consumers also try to claim the jobs. For each job, either the ack or one claim wins, and the other calls
    change nothing."""
    takings: list[ClaimResult] = []
    outcomes: Counter[Answer] = Counter()

    async def lane(queue: str, left: int) -> None:
        owner, one, two = Store(wide), Store(wide), Store(wide)
        window_us = 3000.0
        while left > 0:
            count = min(left, luck.randint(1, 6))
            left -= count
            await owner.enqueue(some_jobs(org, count, queue=queue))
            first = await lease_jobs(owner, org, queue=queue, window_us=round(window_us), worker="owner")
            assert len(first) == count
            leases = leases_of(first)
            some, others, hunted, hunted_too = await asyncio.gather(
                ack(owner, org, leases[: count // 2]),
                ack(owner, org, leases[count // 2 :]),
                lease_jobs(one, org, queue=queue, worker="one"),
                lease_jobs(two, org, queue=queue, worker="two"),
            )
            answers = [*some, *others]
            assert set(answers) <= {Answer.OK, Answer.STALE}
            late = [lease for lease, answer in zip(leases, answers, strict=True) if answer is Answer.STALE]
            # If an ack was too late, the lease has ended. So this claim finds the job, unless one of the earlier claims
            # has found it.
            rest = await lease_jobs(one, org, queue=queue, worker="one")
            second = leases_of(hunted, hunted_too, rest)
            assert sorted(lease.job_hex for lease in second) == sorted(lease.job_hex for lease in late)
            assert set(await ack(owner, org, late)) <= {Answer.STALE}
            assert set(await owner.settle(Settlement.extend(org, late, window_us=MINUTE_US))) <= {Answer.STALE}
            assert set(await ack(two, org, second)) <= {Answer.OK}
            assert set(await ack(owner, org, late)) <= {Answer.STALE}
            takings.extend((first, hunted, hunted_too, rest))
            outcomes.update(answers)
            window_us *= 1.25 if len(late) > count / 2 else 0.8
            window_us = min(max(window_us, WINDOW_US_MIN), WINDOW_US_MAX)

    await in_lanes(lane)
    await assert_one_lease_at_a_time(wide, org, takings)
    print(f"\n{outcomes[Answer.OK]} acks in time, {outcomes[Answer.STALE]} too late")
    # Acks and claims must both have won often. Otherwise there was no race.
    assert min(outcomes[Answer.OK], outcomes[Answer.STALE]) > TRIALS // 10


async def test_two_consumers_never_get_one_job(wide: Database, org: OrgId) -> None:
    takings: list[ClaimResult] = []
    contested = 0

    async def lane(queue: str, left: int) -> None:
        nonlocal contested
        stores = [Store(wide), Store(wide), Store(wide)]
        while left > 0:
            count = min(left, luck.randint(1, 6))
            left -= count
            await stores[0].enqueue(some_jobs(org, count, queue=queue))
            found = await asyncio.gather(
                *(
                    lease_jobs(store, org, queue=queue, max_jobs=luck.randint(1, count), worker=f"w{number}")
                    for number, store in enumerate(stores)
                )
            )
            contested += sum(map(bool, found)) > 1
            found.append(await lease_jobs(stores[0], org, queue=queue))
            assert len(leases_of(*found)) == count
            answers = await asyncio.gather(*(ack(stores[0], org, leases_of(taken)) for taken in found))
            assert {answer for part in answers for answer in part} == {Answer.OK}
            takings.extend(found)

    await in_lanes(lane)
    await assert_one_lease_at_a_time(wide, org, takings)
    assert contested > TRIALS // 50


async def test_a_lease_that_is_extended_at_its_end_is_not_given_away(wide: Database, org: OrgId) -> None:
    takings: list[ClaimResult] = []
    outcomes: Counter[Answer] = Counter()

    async def lane(queue: str, left: int) -> None:
        owner, other = Store(wide), Store(wide)
        window_us = 2000.0
        for _ in range(left // 4):
            await owner.enqueue(some_jobs(org, 1, queue=queue))
            first = await lease_jobs(owner, org, queue=queue, window_us=round(window_us))
            (answer,), hunted = await asyncio.gather(
                owner.settle(Settlement.extend(org, leases_of(first), window_us=MINUTE_US)),
                lease_jobs(other, org, queue=queue),
            )
            rest = await lease_jobs(other, org, queue=queue)
            outcomes[answer] += 1
            assert bool(hunted or rest) == (answer is Answer.STALE)
            assert await ack(owner, org, leases_of(first)) == [answer]
            assert set(await ack(other, org, leases_of(hunted, rest))) <= {Answer.OK}
            takings.extend((first, hunted, rest))
            window_us *= 1.25 if answer is Answer.STALE else 0.8
            window_us = min(max(window_us, WINDOW_US_MIN), WINDOW_US_MAX)

    await in_lanes(lane)
    await assert_one_lease_at_a_time(wide, org, takings)
    assert min(outcomes[Answer.OK], outcomes[Answer.STALE]) > TRIALS // 40


# One copy of each job (I3)

COPIES = b"""
SELECT copy.id::text, count(*) FROM (
    SELECT id, queue_id FROM windrow.job
    UNION ALL SELECT id, queue_id FROM windrow.dead
    UNION ALL SELECT id, queue_id FROM windrow.finished
) copy
JOIN windrow.queue q USING (queue_id)
WHERE q.org = %(org)s GROUP BY 1
"""


async def copies(database: Database, org: OrgId) -> dict[str, int]:
    return dict(await database.run(COPIES, {"org": org}))


End = Callable[[Store, OrgId, list[Lease]], Awaitable[list[Answer]]]


async def _kill(store: Store, org: OrgId, leases: list[Lease]) -> list[Answer]:
    return await store.settle(
        Settlement.nack(org, [Nack(lease=lease, failure=Failure(permanent=True)) for lease in leases])
    )


async def _cancel(store: Store, org: OrgId, leases: list[Lease]) -> list[Answer]:
    return await store.cancel(org, [JobId(str(uuid.UUID(lease.job_hex))) for lease in leases], reason="")


ENDS: dict[str, End] = {"acked": ack, "killed": _kill, "cancelled": _cancel}


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS.keys())
async def test_a_retried_enqueue_that_races_with_the_end_of_its_job_stores_no_second_copy(
    wide: Database, org: OrgId, end: End
) -> None:
    producer, consumer = Store(wide), Store(wide)
    everything: list[str] = []
    for _ in range(max(20, TRIALS // 40)):
        jobs = some_jobs(org, luck.randint(1, 8))
        await producer.enqueue(jobs)
        leases = leases_of(await lease_jobs(consumer, org))
        fresh = some_jobs(org, luck.randint(0, 3), queue="other")
        retried = some_jobs(org, ids=luck.sample([*ids_of(jobs), *ids_of(fresh)], len(jobs) + len(fresh)))
        known, answers = await asyncio.gather(producer.enqueue(retried), end(consumer, org, leases))
        assert set(answers) == {Answer.OK}
        # Only the jobs of the first call are recognised by their ids.
        assert known == {at: name for at, name in enumerate(retried.ids) if name in jobs.ids}
        left = leases_of(await lease_jobs(consumer, org))
        assert sorted(lease.job_hex for lease in left) == sorted(name.replace("-", "") for name in fresh.ids)
        await ack(consumer, org, left)
        everything += retried.ids
    assert await copies(wide, org) == dict.fromkeys(everything, 1)


@pytest.mark.parametrize("refuses", [True, False], ids=["as it is", "without windrow.refuse_settled"])
@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS.keys())
async def test_an_enqueue_whose_snapshot_is_older_than_the_end_of_its_job_looks_again(
    fresh_database: Database, org: OrgId, end: End, refuses: bool
) -> None:
    """This test forces the race of the previous test: the enqueue has its snapshot and waits for a dedup key while the
    job ends. Without windrow.refuse_settled, the enqueue does not look for the job again and stores a second copy. This
    shows that the test forces the race."""
    database = fresh_database
    store = Store(database)
    if not refuses:
        await database.run(
            b"""
            CREATE OR REPLACE FUNCTION windrow.refuse_settled(ids uuid[], queue_ids bigint[], since timestamptz)
            RETURNS boolean LANGUAGE plpgsql VOLATILE AS 'BEGIN RETURN false; END'
            """,
            {},
        )
    jobs = some_jobs(org, 1)
    await store.enqueue(jobs)
    leases = leases_of(await lease_jobs(store, org))
    retried = some_jobs(org, ids=[job_id(), *ids_of(jobs)], dedup_keys=["held"])
    ids = await store.names.make([(org, QUEUE)])
    async with asyncio.TaskGroup() as group, database.transaction() as connection:
        await connection.execute(
            "INSERT INTO windrow.dedup VALUES (%s, 'held', %s, now() - interval '1 s')",
            [ids[org, QUEUE], job_id()],
        )
        enqueue = group.create_task(store.enqueue(retried))
        await until_blocked(database)
        assert await end(store, org, leases) == [Answer.OK]
    found = await copies(database, org)
    if refuses:
        assert enqueue.result() == {1: jobs.ids[0]}
        assert found == dict.fromkeys(retried.ids, 1)
    else:
        assert enqueue.result() == {}
        assert found == {retried.ids[0]: 1, jobs.ids[0]: 2}


async def test_of_jobs_that_race_for_one_live_key_one_is_live_at_a_time(wide: Database, org: OrgId) -> None:
    names = [f"name-{n}" for n in range(TRIALS // 100)]
    # The jobs whose end was reported to consumers, and for each job the round in which this happened.
    ended: dict[str, int] = {}
    stored: list[str] = []
    producers = LANES

    async def produce() -> None:
        nonlocal producers
        store = Store(wide)
        for _ in range(TRIALS // LANES):
            keys = luck.sample(names, luck.randint(1, 3))
            jobs = some_jobs(org, len(keys), live_keys=keys)
            turns = len(ended)
            known = await store.enqueue(jobs)
            stored.extend(job for at, job in enumerate(jobs.ids) if at not in known)
            for job in known.values():
                assert ended.get(job, turns) >= turns, "the answer is a job that had ended before the call"
        producers -= 1

    async def consume() -> None:
        store = Store(wide)
        while producers:  # pyrefly: ignore[redundant-condition]
            taken = await lease_jobs(store, org, max_jobs=luck.randint(1, len(names)))
            if taken:
                end = luck.choice(list(ENDS.values()))
                assert set(await end(store, org, leases_of(taken))) == {Answer.OK}
                for job, _ in taken:
                    ended[job.id] = len(ended)
            assert set((await live_keys(wide, org)).values()) <= {1}

    async with asyncio.TaskGroup() as group:
        for racer in [produce] * LANES + [consume] * 2:
            group.create_task(racer())
    assert len(ended) > TRIALS // 20, "there was a race"
    last = some_jobs(org, len(names), live_keys=names)
    known = await Store(wide).enqueue(last)
    stored.extend(job for at, job in enumerate(last.ids) if at not in known)
    assert await live_keys(wide, org) == dict.fromkeys(names, 1)
    assert await copies(wide, org) == dict.fromkeys(stored, 1)


async def live_keys(database: Database, org: OrgId) -> dict[str, int]:
    """Returns how many live jobs have each live key."""
    rows = await database.run(
        b"""
        SELECT j.live_key, count(*) FROM windrow.job j JOIN windrow.queue q USING (queue_id)
        WHERE q.org = %(org)s GROUP BY 1
        """,
        {"org": org},
    )
    return dict(rows)


async def test_an_enqueue_waits_for_the_ack_that_has_its_job_in_hand(database: Database, org: OrgId) -> None:
    store = Store(database)
    jobs = some_jobs(org, 1)
    await store.enqueue(jobs)
    (lease,) = leases_of(await lease_jobs(store, org))
    parameters = {
        "ids": arrays.plain([lease.job_hex]),
        "leases": arrays.numbers([lease.number]),
        "orgs": [org],
        "org_positions": "{}",
        "results": [],
        "logs": [],
        "jobs": 1,
    }
    async with asyncio.TaskGroup() as group, database.transaction() as connection:
        await connection.execute(statements.ACK, parameters)
        enqueue = group.create_task(store.enqueue(jobs))
        await until_blocked(database)
        assert not enqueue.done()
    assert enqueue.result() == {0: jobs.ids[0]}
    assert await copies(database, org) == {jobs.ids[0]: 1}


async def test_producers_that_race_for_one_dedup_key_are_told_one_id(wide: Database, org: OrgId) -> None:
    stores = [Store(wide) for _ in range(4)]
    for turn in range(max(10, TRIALS // 40)):
        keys = [f"{turn}-{n}" for n in range(5)]
        batches = [some_jobs(org, 5, dedup_keys=luck.sample(keys, 5)) for _ in stores]
        answers = await asyncio.gather(*(s.enqueue(b) for s, b in zip(stores, batches, strict=True)))
        told: dict[str, set[str]] = {key: set() for key in keys}
        for jobs, known in zip(batches, answers, strict=True):
            for at, name in enumerate(jobs.ids):
                told[jobs.dedup_keys[at]].add(known.get(at, JobId(name)))
        assert [len(ids) for ids in told.values()] == [1] * 5
        held = await lease_jobs(stores[0], org)
        assert {job.id for job, _ in held} == set().union(*told.values())
        await ack(stores[0], org, leases_of(held))


# Deadlocks


@pytest.fixture
async def impatient(module_dsn: str) -> AsyncGenerator[Database, None]:
    """A database that raises an error after a deadlock, and does not try again."""
    opened = Database(SHARD, module_dsn, connections=8, short_lock_wait_s=PATIENCE_S)
    opened._tries = 0
    await opened.open()
    yield opened
    await opened.close()


@pytest.mark.parametrize("share", ["ids", "dedup keys", "both"])
async def test_enqueues_that_overlap_in_any_order_never_deadlock(impatient: Database, org: OrgId, share: str) -> None:
    stores = [Store(impatient) for _ in range(6)]
    await stores[0].names.make([(org, QUEUE)])
    for turn in range(15):
        ids = [job_id() for _ in range(40)]
        keys = [f"{turn}-{n}" for n in range(40)]
        batches = [
            some_jobs(
                org,
                40,
                ids=luck.sample(ids, 40) if share != "dedup keys" else None,
                dedup_keys=luck.sample(keys, 40) if share != "ids" else (),
                dedup_window_us=luck.choice([1, HOUR_US]),
            )
            for _ in stores
        ]
        await asyncio.gather(*(store.enqueue(jobs) for store, jobs in zip(stores, batches, strict=True)))


async def test_calls_on_the_same_leases_in_any_order_never_deadlock(impatient: Database, org: OrgId) -> None:
    stores = [Store(impatient) for _ in range(8)]
    for _ in range(15):
        await stores[0].enqueue(some_jobs(org, 60))
        leases = leases_of(await lease_jobs(stores[0], org))

        def shuffled(held: list[Lease] = leases) -> list[Lease]:
            return luck.sample(held, len(held))

        acks = [ack(store, org, shuffled()) for store in stores[:2]]
        extends = [store.settle(Settlement.extend(org, shuffled(), window_us=MINUTE_US)) for store in stores[2:4]]
        nacks = [
            store.settle(Settlement.nack(org, [Nack(lease=lease) for lease in shuffled()])) for store in stores[4:5]
        ]
        releases = [store.settle(Settlement.release(org, shuffled())) for store in stores[5:6]]
        cancels = [_cancel(store, org, shuffled()) for store in stores[6:8]]
        await asyncio.gather(*acks, *extends, *nacks, *releases, *cancels)
        await ack(stores[0], org, leases_of(await lease_jobs(stores[0], org)))
        await _cancel(stores[0], org, leases)


async def test_routers_that_make_the_same_new_queues_in_any_order_never_deadlock(
    impatient: Database, org: OrgId
) -> None:
    stores = [Store(impatient) for _ in range(6)]
    for turn in range(15):
        queues = [(OrgId(f"{org}-{turn}-{n % 5}"), QueueName(f"{org}-{turn}-{n}")) for n in range(20)]
        made = await asyncio.gather(*(store.names.make(luck.sample(queues, 20)) for store in stores))
        assert made == [made[0]] * len(stores)
        assert set(made[0]) == set(queues)
