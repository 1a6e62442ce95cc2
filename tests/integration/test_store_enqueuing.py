"""One statement stores the jobs of many calls and orgs. A bad call affects no other call, and each job is stored once
(I3)."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence

import psycopg
import pytest

from shard.admin.queue_admin import QueueAdmin
from shard.errors import IdsOutsideHorizon, NotOwned, ShardUnavailable
from shard.placement import statements as placement_statements
from shard.placement.slots import slot_of
from shard.postgres.pool import Database
from shard.queue import statements as queue_statements
from shard.queue.pending_enqueue import Handed, Handover, Taker
from shard.queue.settle import Nack, Settlement
from shard.queue.store import Store
from shard.vocabulary import Answer, Failure, JobId, NewJobs, OrgId, QueueName
from tests.conftest import SHARD
from tests.jobs import HOUR_US, QUEUE, at_once, ids_of, job_id, lease_jobs, some_jobs
from tests.queues import fill_queues
from tests.recorder import Recorder
from tests.routers import PATIENCE_S
from tests.timemachine import end_dedup_windows, until_blocked

DAY_MS = 24 * 3600 * 1000
A, B = QueueName("a"), QueueName("b")


async def where(database: Database, names: list[JobId]) -> dict[str, tuple[str, str]]:
    """Returns the org and the queue of each of these jobs. Asserts that no job is stored twice."""
    rows = await database.run(
        b"""
        SELECT copy.id::text, q.org, q.queue FROM (
            SELECT id, queue_id FROM windrow.job
            UNION ALL SELECT id, queue_id FROM windrow.dead
            UNION ALL SELECT id, queue_id FROM windrow.finished
        ) copy
        JOIN windrow.queue q USING (queue_id)
        WHERE copy.id = ANY (%(ids)s::uuid[])
        """,
        {"ids": names},
    )
    assert len({name for name, *_ in rows}) == len(rows)
    return {name: (org, queue) for name, org, queue in rows}


# Calls that share a statement


async def test_calls_of_several_orgs_are_one_statement_and_each_job_is_its_orgs(
    recorder: Recorder, books: QueueAdmin, org: OrgId, other_org: OrgId
) -> None:
    store = Store(recorder)
    calls = [some_jobs(one, 3, queue=queue) for queue in (A, B) for one in (org, other_org)]
    for at, jobs in enumerate(calls):
        # A sparse column of one call must not apply to the next call.
        jobs.priorities = {at % 3: 1 + at}
        jobs.payloads = [f"{at}-{n}".encode() for n in range(3)]
    # Create the queues first, so that the enqueues need no statement for this.
    await store.names.make([(one, queue) for one in (org, other_org) for queue in (A, B)])
    before = len(recorder.runs)
    assert await asyncio.gather(*map(store.enqueue, calls)) == [{}] * 4
    assert [run[0] for run in recorder.runs[before:]] == [queue_statements.ENQUEUE_PLAIN]
    for at, jobs in enumerate(calls):
        assert await where(recorder, ids_of(jobs)) == dict.fromkeys(jobs.ids, (jobs.org, jobs.queues[0]))
        found = {record.id: record for record in await store.get(jobs.org, ids_of(jobs), include_payload=True)}
        assert [found[name].payload for name in ids_of(jobs)] == jobs.payloads
        assert [found[name].priority for name in ids_of(jobs)] == [1 + at if n == at % 3 else 5 for n in range(3)]
    for entry in await books.check():
        if entry.org in (org, other_org):
            assert (entry.accepted, entry.ready, entry.balanced) == (6, 6, True)


async def test_new_queues_of_many_orgs_cost_no_more_statements_than_one(recorder: Recorder, org: OrgId) -> None:
    store = Store(recorder)
    calls = [some_jobs(OrgId(f"{org}-{n}"), 2, queue=f"{org}-new-{n % 3}") for n in range(20)]
    calls += [some_jobs(OrgId(f"{org}-0"), 1, queue=f"{org}-another-{n}") for n in range(20)]
    assert await asyncio.gather(*map(store.enqueue, calls)) == [{}] * 40
    assert [run[0] for run in recorder.runs] == [
        queue_statements.FIND_QUEUE_IDS,
        queue_statements.COUNT_QUEUES,
        placement_statements.INSERT_NAMES,
        placement_statements.INSERT_QUEUES,
        queue_statements.FIND_QUEUE_IDS,
        queue_statements.ENQUEUE_PLAIN,
    ]
    for jobs in calls:
        assert await where(recorder, ids_of(jobs)) == dict.fromkeys(jobs.ids, (jobs.org, jobs.queues[0]))


async def test_what_comes_while_enqueues_are_under_way_goes_together(module_dsn: str, org: OrgId) -> None:
    # The lock wait is long, so that a statement that waits for a lock is not cancelled and run again, even if this
    # test is slow.
    recorder = Recorder(SHARD, module_dsn, short_lock_wait_s=PATIENCE_S)
    await recorder.open()
    store = Store(recorder)
    await store.enqueue(some_jobs(org, 1))
    before = len(recorder.runs)
    async with await psycopg.AsyncConnection.connect(module_dsn) as rival:
        await rival.execute("LOCK TABLE windrow.job IN SHARE MODE")
        under_way: list[asyncio.Task[object]] = []
        for count in (1, 2):
            under_way.append(asyncio.create_task(store.enqueue(some_jobs(org, 1))))
            await until_blocked(recorder, count)
        later = [asyncio.create_task(store.enqueue(some_jobs(org, 1))) for _ in range(30)]
        await asyncio.sleep(0)
        assert recorder.count(queue_statements.ENQUEUE_PLAIN, since=before) == 2
    assert await asyncio.gather(*under_way, *later) == [{}] * 32
    assert recorder.count(queue_statements.ENQUEUE_PLAIN, since=before) == 3
    await recorder.close()


# One call fails

Spoil = Callable[[NewJobs], None]


def outside_horizon(jobs: NewJobs) -> None:
    jobs.ids[1] = job_id(ahead_ms=-8 * DAY_MS)


def in_the_future(jobs: NewJobs) -> None:
    jobs.ids[1] = job_id(ahead_ms=2 * 3_600_000)


def nul_in_an_attribute(jobs: NewJobs) -> None:
    jobs.attributes[1] = '{"a": "\\u0000"}'


def no_json(jobs: NewJobs) -> None:
    jobs.attributes[1] = "{"


def nul_in_a_key(jobs: NewJobs) -> None:
    jobs.dedup_keys[1] = "a\0b"
    jobs.dedup_window_us[1] = HOUR_US


def no_such_priority(jobs: NewJobs) -> None:
    jobs.priorities[1] = 10


SPOILS: dict[Spoil, type[Exception]] = {
    outside_horizon: IdsOutsideHorizon,
    in_the_future: IdsOutsideHorizon,
    nul_in_an_attribute: psycopg.DataError,
    no_json: psycopg.DataError,
    nul_in_a_key: psycopg.DataError,
    no_such_priority: psycopg.IntegrityError,
}


async def assert_it_fails_alone(store: Store, database: Database, bad: NewJobs, kind: type[Exception]) -> Exception:
    """Runs this call together with calls of the same org and of other orgs. Asserts that only this call fails, and that
    the jobs of the other calls are stored and handed over."""
    orgs = [bad.org, OrgId(f"{bad.org}-beside"), bad.org, OrgId(f"{bad.org}-beside-too")]
    good = [some_jobs(one, 3, queue="beside", dedup_keys=[f"key-{at}"]) for at, one in enumerate(orgs)]
    told: list[list[int]] = []
    takers = {1: Taker(7, "w", HOUR_US), 2: Taker(7, "w", HOUR_US)}
    handovers = [Handover(takers=takers, done=lambda handed: told.append(handed.positions)) for _ in good]
    refused: list[Handed] = []
    calls = [(jobs, handover) for jobs, handover in zip(good, handovers, strict=True)]
    calls.insert(random.randrange(len(calls) + 1), (bad, Handover(takers=takers, done=refused.append)))
    answers = await asyncio.gather(*(store.enqueue(*call) for call in calls), return_exceptions=True)
    (error,) = [answer for answer in answers if isinstance(answer, BaseException)]
    assert isinstance(error, kind)
    assert answers.index(error) == next(at for at, (jobs, _) in enumerate(calls) if jobs is bad)
    assert [answer for answer in answers if answer is not error] == [{}] * len(good)
    for jobs in good:
        assert await where(database, ids_of(jobs)) == dict.fromkeys(jobs.ids, (jobs.org, "beside"))
        found = {r.id: (r.state, r.worker) for r in await store.get(jobs.org, ids_of(jobs), include_payload=False)}
        assert [found[name] for name in ids_of(jobs)] == [("ready", None), ("leased", "w"), ("leased", "w")]
    assert told == [[1, 2]] * len(good)
    assert [handed.positions for handed in refused] == [[]]
    return error


@pytest.mark.parametrize("spoil", SPOILS, ids=lambda spoil: spoil.__name__)
async def test_a_call_that_will_not_do_fails_alone(
    database: Database, books: QueueAdmin, org: OrgId, spoil: Spoil
) -> None:
    store = Store(database)
    bad = some_jobs(org, 3, queue=A)
    spoil(bad)
    error = await assert_it_fails_alone(store, database, bad, SPOILS[spoil])
    if isinstance(error, IdsOutsideHorizon):
        assert error.positions == [1]
    assert await where(database, ids_of(bad)) == {}
    for entry in await books.check():
        if entry.org.startswith(f"{org}-") or entry.org == org:
            assert entry.balanced


@pytest.mark.parametrize("state", ["draining", "foreign"])
async def test_an_org_whose_slot_is_not_owned_is_refused_alone(
    fresh_database: Database, org: OrgId, state: str
) -> None:
    orgs = {slot_of(OrgId(f"{org}-{n}")): OrgId(f"{org}-{n}") for n in range(3)}
    *_, (slot, gone) = orgs.items()
    store = Store(fresh_database)
    change = {
        "draining": b"UPDATE windrow.owned_slot SET state = 'draining', epoch = 7 WHERE slot = %(slot)s",
        "foreign": b"DELETE FROM windrow.owned_slot WHERE slot = %(slot)s",
    }
    await fresh_database.run(change[state], {"slot": slot})
    bad = some_jobs(gone, 2)
    stays = [some_jobs(one, 2) for one in orgs.values() if one != gone]
    answers = await asyncio.gather(*map(store.enqueue, [stays[0], bad, *stays[1:]]), return_exceptions=True)
    error = answers.pop(1)
    assert isinstance(error, NotOwned)
    assert (error.slot, error.epoch) == (slot, 7 if state == "draining" else 0)
    assert f"{gone!r}" in str(error)
    assert answers == [{}] * len(stays)
    assert await where(fresh_database, ids_of(bad)) == {}


# What the bad calls of one org cost the others (I4)


async def too_old(store: Store, org: OrgId) -> NewJobs:
    """The id is only slightly too old, so that only the shard can notice it."""
    await store.names.make([(org, QUEUE)])
    return some_jobs(org, ids=[job_id(ahead_ms=-7 * DAY_MS - 60_000)])


async def far_too_old(_store: Store, org: OrgId) -> NewJobs:
    return some_jobs(org, ids=[job_id(ahead_ms=-8 * DAY_MS)])


async def not_owned(store: Store, org: OrgId) -> NewJobs:
    await store.names.make([(org, QUEUE)])
    await store._database.run(b"DELETE FROM windrow.owned_slot WHERE slot = %(slot)s", {"slot": slot_of(org)})
    return some_jobs(org, 1)


async def live(store: Store, org: OrgId) -> NewJobs:
    jobs = some_jobs(org, 1)
    await store.enqueue(jobs)
    return jobs


async def live_with_a_free_key(store: Store, org: OrgId) -> NewJobs:
    return some_jobs(org, ids=ids_of(await live(store, org)), dedup_keys=[f"free-{job_id()}"])


async def finished(store: Store, org: OrgId) -> NewJobs:
    jobs = await live(store, org)
    assert await store.cancel(org, ids_of(jobs), reason="") == [Answer.OK]
    return jobs


async def too_many_queues(store: Store, org: OrgId) -> NewJobs:
    await store.names.make([(org, QUEUE)])
    await fill_queues(store._database, org)
    return some_jobs(org, 1, queue="one-more")


COSTS: dict[Callable[[Store, OrgId], Awaitable[NewJobs]], list[bytes]] = {
    live: [queue_statements.ENQUEUE_PLAIN, queue_statements.FIND_KNOWN, queue_statements.ENQUEUE_PLAIN],
    live_with_a_free_key: [queue_statements.ENQUEUE, queue_statements.FIND_KNOWN, queue_statements.ENQUEUE_PLAIN],
    finished: [queue_statements.ENQUEUE_PLAIN, queue_statements.FIND_KNOWN, queue_statements.ENQUEUE_PLAIN],
    too_old: [queue_statements.ENQUEUE_PLAIN, queue_statements.ENQUEUE_PLAIN],
    far_too_old: [queue_statements.ENQUEUE_PLAIN],
    not_owned: [queue_statements.ENQUEUE_PLAIN, queue_statements.FIND_REFUSED_SLOTS, queue_statements.ENQUEUE_PLAIN],
    too_many_queues: [queue_statements.ENQUEUE_PLAIN],
}


async def among(store: Store, bad: Sequence[NewJobs], count: int) -> None:
    """Runs `count` calls in one act: these bad calls, and good calls of another org. Asserts that the good calls
    succeed and the bad calls fail."""
    beside = OrgId(f"{bad[0].org}-beside")
    await store.names.make([(beside, QUEUE)])
    calls = [*bad, *(some_jobs(beside, 1) for _ in range(count - len(bad)))]
    random.shuffle(calls)
    answers = await asyncio.gather(*map(store.enqueue, calls), return_exceptions=True)
    for jobs, answer in zip(calls, answers, strict=True):
        assert (answer == {}) == (jobs.org == beside)


@pytest.mark.parametrize("spoil", COSTS, ids=lambda spoil: spoil.__name__)
async def test_calls_whose_fault_is_known_cost_those_beside_them_a_statement_or_two(
    fresh_recorder: Recorder, org: OrgId, spoil: Callable[[Store, OrgId], Awaitable[NewJobs]]
) -> None:
    store = Store(fresh_recorder)
    bad = [await spoil(store, org) for _ in range(10)]
    # Make the bad calls once before the test, so that the store knows the queue.
    await asyncio.gather(*map(store.enqueue, bad), return_exceptions=True)
    before = len(fresh_recorder.runs)
    await among(store, bad, 100)
    asked = [run[0] for run in fresh_recorder.runs[before:]]
    named = {
        queue_statements.FIND_QUEUE_IDS,
        queue_statements.COUNT_QUEUES,
        placement_statements.INSERT_NAMES,
        placement_statements.INSERT_QUEUES,
    }
    assert [statement for statement in asked if statement not in named] == COSTS[spoil]


async def test_a_call_made_a_hundred_times_in_one_moment_is_one_statement_and_a_look(
    recorder: Recorder, org: OrgId
) -> None:
    store = Store(recorder)
    await store.names.make([(org, QUEUE)])
    again = some_jobs(org, 2)
    before = len(recorder.runs)
    answers = await asyncio.gather(*(store.enqueue(again) for _ in range(100)))
    assert answers == [{}] + [dict(enumerate(again.ids))] * 99
    assert [run[0] for run in recorder.runs[before:]] == [queue_statements.ENQUEUE_PLAIN, queue_statements.FIND_KNOWN]


@pytest.mark.parametrize(("bad", "most"), [(1, 15), (4, 45)])
async def test_a_row_that_postgres_refuses_costs_the_calls_beside_it_a_few_statements(
    recorder: Recorder, org: OrgId, bad: int, most: int
) -> None:
    store = Store(recorder)
    calls = [some_jobs(org, 2) for _ in range(bad)]
    for jobs in calls:
        no_such_priority(jobs)
    before = len(recorder.runs)
    await among(store, calls, 100)
    assert recorder.count(queue_statements.ENQUEUE_PLAIN, since=before) <= most


async def test_two_refused_calls_are_told_each_its_own_reason(
    fresh_database: Database, org: OrgId, other_org: OrgId
) -> None:
    store = Store(fresh_database)
    old, gone, fine = some_jobs(org, 3), some_jobs(OrgId(f"{org}-gone"), 2), some_jobs(other_org, 1)
    outside_horizon(old)
    change = b"UPDATE windrow.owned_slot SET state = 'draining' WHERE slot = %(slot)s"
    await fresh_database.run(change, {"slot": slot_of(gone.org)})
    one, two, three = await asyncio.gather(*map(store.enqueue, (old, gone, fine)), return_exceptions=True)
    assert isinstance(one, IdsOutsideHorizon)
    assert isinstance(two, NotOwned)
    assert (one.positions, two.slot, three) == ([1], slot_of(gone.org), {})


async def test_a_shard_that_is_away_is_everybodys_trouble(recorder: Recorder, org: OrgId, other_org: OrgId) -> None:
    store = Store(recorder)
    await asyncio.gather(store.enqueue(some_jobs(org, 1)), store.enqueue(some_jobs(other_org, 1)))
    recorder.fail(queue_statements.ENQUEUE_PLAIN)
    answers = await asyncio.gather(
        store.enqueue(some_jobs(org, 1)), store.enqueue(some_jobs(other_org, 1)), return_exceptions=True
    )
    assert [type(answer) for answer in answers] == [ShardUnavailable] * 2


# A queue number that the store remembers wrongly


@pytest.mark.parametrize("wrong_first", [True, False])
async def test_a_queue_remembered_under_another_orgs_number_never_brings_jobs_into_that_org(
    database: Database, org: OrgId, other_org: OrgId, wrong_first: bool
) -> None:
    """The store remembers a wrong queue number. This happens after a failover that lost the creation of a queue:
    another org now has the queue's number (I4, I7)."""
    store = Store(database)
    await store.enqueue(some_jobs(org, 1, queue=A))
    await store.enqueue(some_jobs(other_org, 1, queue=B))
    numbers = store.names._queue_ids
    numbers[org, A] = numbers[other_org, B]
    wrong, right = some_jobs(org, 2, queue=A), some_jobs(other_org, 2, queue=B)
    calls = (wrong, right) if wrong_first else (right, wrong)
    assert await asyncio.gather(*map(store.enqueue, calls)) == [{}, {}]
    assert await where(database, ids_of(wrong)) == dict.fromkeys(wrong.ids, (org, A))
    assert await where(database, ids_of(right)) == dict.fromkeys(right.ids, (other_org, B))


@pytest.mark.parametrize("queues", [[A, B], [B, A]])
async def test_two_queues_remembered_under_one_number_keep_each_its_own_jobs(
    database: Database, org: OrgId, queues: list[QueueName]
) -> None:
    store = Store(database)
    await store.names.make([(org, A), (org, B)])
    numbers = store.names._queue_ids
    numbers[org, B] = numbers[org, A]
    jobs = some_jobs(org, 2)
    jobs.queues = list(queues)
    assert await store.enqueue(jobs) == {}
    assert await where(database, ids_of(jobs)) == {
        name: (org, queue) for name, queue in zip(jobs.ids, queues, strict=True)
    }


# The same job in several calls


async def test_calls_with_the_same_id_store_it_once_and_all_but_one_are_told(database: Database, org: OrgId) -> None:
    store = Store(database)
    shared = job_id()
    calls = [some_jobs(org, ids=[job_id(), shared, job_id()]) for _ in range(6)]
    answers = await asyncio.gather(*map(store.enqueue, calls))
    assert sorted(map(len, answers)) == [0, 1, 1, 1, 1, 1]
    assert {known_as for known in answers for known_as in known.items()} == {(1, shared)}
    assert len(await lease_jobs(store, org)) == 13


async def test_calls_of_two_orgs_with_the_same_id_store_it_once_for_each(
    database: Database, org: OrgId, other_org: OrgId
) -> None:
    store = Store(database)
    shared = job_id()
    calls = [some_jobs(one, ids=[job_id(), shared]) for one in (org, other_org, org, other_org)]
    assert await asyncio.gather(*map(store.enqueue, calls)) == [{}, {}, {1: shared}, {1: shared}]
    for one, mine in ((org, calls[::2]), (other_org, calls[1::2])):
        assert {job.id for job, _ in await lease_jobs(store, one)} == {name for jobs in mine for name in jobs.ids}


async def test_jobs_with_one_key_and_one_id_are_told_the_id_that_was_stored(database: Database, org: OrgId) -> None:
    one, two = job_id(), job_id()
    jobs = some_jobs(org, ids=[one, two, two], dedup_keys=["k", "k", "k"])
    assert await Store(database).enqueue(jobs) == {1: one, 2: one}
    assert await where(database, [one, two]) == {one: (org, QUEUE)}


async def test_calls_with_the_same_key_store_one_job_and_are_told_its_id(database: Database, org: OrgId) -> None:
    store = Store(database)
    calls = [some_jobs(org, 2, dedup_keys=["k"]) for _ in range(6)]
    answers = await asyncio.gather(*map(store.enqueue, calls))
    (winner,) = [jobs for jobs, known in zip(calls, answers, strict=True) if not known]
    assert sorted(map(len, answers)) == [0, 1, 1, 1, 1, 1]
    assert {known[0] for known in answers if known} == {winner.ids[0]}
    assert len(await lease_jobs(store, org)) == 7


async def test_the_same_key_of_two_orgs_or_two_queues_is_two_keys(
    recorder: Recorder, org: OrgId, other_org: OrgId
) -> None:
    store = Store(recorder)
    calls = [some_jobs(one, 1, queue=queue, dedup_keys=["k"]) for one in (org, other_org) for queue in (A, B)]
    await store.names.make([(one, queue) for one in (org, other_org) for queue in (A, B)])
    before = len(recorder.runs)
    assert await asyncio.gather(*map(store.enqueue, calls)) == [{}] * 4
    assert recorder.count(queue_statements.ENQUEUE, since=before) == 1


@pytest.mark.parametrize("state", ["live", "finished", "dead"])
@pytest.mark.parametrize("by", ["id", "key", "id and key"])
async def test_a_known_job_is_reported_only_to_its_own_call(
    database: Database, org: OrgId, other_org: OrgId, state: str, by: str
) -> None:
    store = Store(database)
    old = some_jobs(org, 1, dedup_keys=["k"])
    await store.enqueue(old)
    if state != "live":
        ((_, lease),) = await lease_jobs(store, org)
        await (
            store.settle(Settlement.ack(org, [lease]))
            if state == "finished"
            else store.cancel(org, ids_of(old), reason="")
        )
    again = some_jobs(
        org,
        ids=[job_id(), ids_of(old)[0] if "id" in by else job_id()],
        dedup_keys=["", "k"] if "key" in by else (),
    )
    again.dedup_keys.pop(0, None)
    again.dedup_window_us.pop(0, None)
    beside = [some_jobs(one, 2) for one in (org, other_org, org)]
    answers = await asyncio.gather(*map(store.enqueue, [beside[0], again, *beside[1:]]))
    assert answers == [{}, {1: old.ids[0]}, {}, {}]
    stored = [again.ids[0], *(name for jobs in beside for name in jobs.ids)]
    assert (await where(database, [JobId(name) for name in stored])).keys() == set(stored)


async def test_a_call_with_twins_among_others_stores_each_of_its_jobs_once(database: Database, org: OrgId) -> None:
    store = Store(database)
    old, new = job_id(), job_id()
    await store.enqueue(some_jobs(org, ids=[old], dedup_keys=["k"]))
    ((_, lease),) = await lease_jobs(store, org)
    await store.settle(Settlement.ack(org, [lease]))
    await end_dedup_windows(database, org)
    one = job_id()
    twins = some_jobs(org, ids=[old, new, one, one], dedup_keys=["k", "k"])
    beside = some_jobs(org, 2)
    assert await at_once(store.enqueue(twins), store.enqueue(beside)) == [{0: old, 3: one}, {}]
    assert {job.id for job, _ in await lease_jobs(store, org)} == {new, one, *beside.ids}


# An enqueue that stores nothing changes nothing

Known = Callable[[Store, OrgId, list[JobId]], Awaitable[None]]


async def _live(_store: Store, _org: OrgId, _ids: list[JobId]) -> None:
    """The job stays live."""


async def _leased(store: Store, org: OrgId, _ids: list[JobId]) -> None:
    await lease_jobs(store, org)


async def _finished(store: Store, org: OrgId, _ids: list[JobId]) -> None:
    await store.settle(Settlement.ack(org, [lease for _, lease in await lease_jobs(store, org)]))


async def _dead(store: Store, org: OrgId, _ids: list[JobId]) -> None:
    await store.settle(
        Settlement.nack(
            org, [Nack(lease=lease, failure=Failure(permanent=True)) for _, lease in await lease_jobs(store, org)]
        )
    )


async def _cancelled(store: Store, org: OrgId, ids: list[JobId]) -> None:
    await store.cancel(org, ids, reason="")


KNOWN: list[Known] = [_live, _leased, _finished, _dead, _cancelled]


async def where_live(database: Database, job: str) -> bool:
    return await database.run(b"SELECT 1 FROM windrow.job WHERE id = %(id)s", {"id": job}) != []


async def keys_of(database: Database, org: OrgId) -> dict[tuple[str, str], str]:
    """Returns the dedup keys whose windows have not ended: for each queue and key, the id of the job that has the
    key."""
    rows = await database.run(
        b"""
        SELECT q.queue, d.key, d.job_id::text FROM windrow.dedup d JOIN windrow.queue q USING (queue_id)
        WHERE q.org = %(org)s AND d.until > now()
        """,
        {"org": org},
    )
    return {(queue, key): job for queue, key, job in rows}


@pytest.mark.parametrize("become", KNOWN, ids=lambda become: become.__name__.strip("_"))
async def test_a_job_sent_again_after_its_window_does_not_renew_it(
    database: Database, org: OrgId, become: Known
) -> None:
    store = Store(database)
    old = some_jobs(org, 1, dedup_keys=["k"])
    await store.enqueue(old)
    await become(store, org, ids_of(old))
    await end_dedup_windows(database, org)
    assert await store.enqueue(old) == {0: old.ids[0]}
    assert await keys_of(database, org) == {}
    new = some_jobs(org, 1, dedup_keys=["k"])
    assert await store.enqueue(new) == {}
    assert await store.enqueue(some_jobs(org, 1, dedup_keys=["k"])) == {0: new.ids[0]}


@pytest.mark.parametrize("become", KNOWN, ids=lambda become: become.__name__.strip("_"))
@pytest.mark.parametrize("queue", [QUEUE, A])
async def test_a_job_sent_again_with_another_key_does_not_take_that_key(
    database: Database, org: OrgId, become: Known, queue: QueueName
) -> None:
    store = Store(database)
    old = some_jobs(org, 1, dedup_keys=["k"])
    await store.enqueue(old)
    await become(store, org, ids_of(old))
    assert await store.enqueue(some_jobs(org, queue=queue, ids=ids_of(old), dedup_keys=["other"])) == {0: old.ids[0]}
    assert await keys_of(database, org) == {(QUEUE, "k"): old.ids[0]}
    new = some_jobs(org, 1, queue=queue, dedup_keys=["other"])
    assert await store.enqueue(new) == {}
    assert await where(database, ids_of(new)) == {new.ids[0]: (org, queue)}


@pytest.mark.parametrize("become", KNOWN, ids=lambda become: become.__name__.strip("_"))
@pytest.mark.parametrize("calls", ["one call", "two calls"])
@pytest.mark.parametrize(
    "order", ["old new plain", "old plain new", "new old plain", "new plain old", "plain old new", "plain new old"]
)
async def test_a_new_job_beside_a_known_one_that_names_the_same_key_is_stored_in_one_statement_with_the_others(
    recorder: Recorder, org: OrgId, become: Known, calls: str, order: str
) -> None:
    store = Store(recorder)
    names = order.split()
    ids = {name: job_id() for name in names}
    await store.enqueue(some_jobs(org, ids=[ids["old"]], dedup_keys=["k"]))
    await become(store, org, [ids["old"]])
    await end_dedup_windows(recorder, org)
    jobs = some_jobs(org, ids=[ids[name] for name in names])
    keyed = [at for at, name in enumerate(names) if name != "plain"]
    jobs.dedup_keys, jobs.dedup_window_us = dict.fromkeys(keyed, "k"), dict.fromkeys(keyed, HOUR_US)
    parts = [[0, 1, 2]] if calls == "one call" else [[0], [1, 2]]
    answers = await at_once(*[store.enqueue(jobs.only(part)) for part in parts])
    found = {part[at]: job for part, known in zip(parts, answers, strict=True) for at, job in known.items()}
    assert found == {names.index("old"): ids["old"]}
    assert await keys_of(recorder, org) == {(QUEUE, "k"): ids["new"]}
    rows = await recorder.run(
        b"SELECT count(DISTINCT xmin::text) FROM windrow.job WHERE id = ANY (%(ids)s::uuid[])",
        {"ids": [ids["new"], ids["plain"]]},
    )
    assert rows == [(1,)], "both were stored by one transaction"


async def test_of_new_jobs_with_one_key_the_one_that_is_named_first_is_stored(database: Database, org: OrgId) -> None:
    ids = sorted((job_id() for _ in range(8)), reverse=True)
    for keys in (some_jobs(org, ids=ids, dedup_keys=["k"] * 8), some_jobs(org, 8, live_keys=["k"] * 8)):
        keys.ids.sort(reverse=True)
        assert await Store(database).enqueue(keys) == dict.fromkeys(range(1, 8), keys.ids[0])


@pytest.mark.parametrize("become", KNOWN, ids=lambda become: become.__name__.strip("_"))
async def test_a_key_that_counts_while_its_job_is_live_is_free_when_that_ended(
    database: Database, org: OrgId, become: Known
) -> None:
    store = Store(database)
    old = some_jobs(org, 1, live_keys=["k"])
    assert await store.enqueue(old) == {}
    assert await store.enqueue(some_jobs(org, 1, live_keys=["k"])) == {0: old.ids[0]}
    # These three are different keys: a key that counts for a window, a key of another queue, and a key of another org.
    others = [some_jobs(org, 1, dedup_keys=["k"]), some_jobs(org, 1, queue=A, live_keys=["k"])]
    assert await at_once(*map(store.enqueue, [*others, some_jobs(OrgId(f"{org}-2"), 1, live_keys=["k"])])) == [{}] * 3
    await become(store, org, ids_of(old))
    live = await where_live(database, old.ids[0])
    new = some_jobs(org, 1, live_keys=["k"])
    # A known id decides, not the key, no matter which job has the key.
    again = some_jobs(org, ids=[*ids_of(new), *ids_of(old)], live_keys=["k", "k"])
    assert await store.enqueue(again) == ({0: old.ids[0], 1: old.ids[0]} if live else {1: old.ids[0]})
    holder = old if live else new
    assert await store.enqueue(some_jobs(org, 1, live_keys=["k"])) == {0: holder.ids[0]}


async def test_a_job_that_another_call_stores_meanwhile_leaves_no_key(database: Database, org: OrgId) -> None:
    """In the snapshot of the enqueue, the job is new. While the enqueue waits for the key, another call stores the
    job."""
    one, other = Store(database), Store(database)
    ids = await one.names.make([(org, QUEUE)])
    job = job_id()
    plain, keyed = some_jobs(org, ids=[job]), some_jobs(org, ids=[job_id(), job], dedup_keys=["beside", "k"])
    async with asyncio.TaskGroup() as group, database.transaction() as connection:
        await connection.execute(
            "INSERT INTO windrow.dedup VALUES (%s, 'k', %s, now() - interval '1 s')", [ids[org, QUEUE], job_id()]
        )
        enqueue = group.create_task(one.enqueue(keyed))
        await until_blocked(database)
        assert await other.enqueue(plain) == {}
    assert enqueue.result() == {1: job}
    assert await keys_of(database, org) == {(QUEUE, "beside"): keyed.ids[0]}
    assert await store_one(one, org, "k") == {}


async def store_one(store: Store, org: OrgId, key: str) -> dict[int, JobId]:
    return await store.enqueue(some_jobs(org, 1, dedup_keys=[key]))


async def test_an_id_that_a_call_names_twice_is_one_job_as_it_was_named_first(database: Database, org: OrgId) -> None:
    store = Store(database)
    first = some_jobs(org, 1, queue=A, dedup_keys=["held"])
    await store.enqueue(first)
    twice, new = job_id(), job_id()
    jobs = some_jobs(org, queue=A, ids=[twice, twice, new], dedup_keys=["held", "free", "free"])
    assert await store.enqueue(jobs) == {0: first.ids[0], 1: first.ids[0]}
    assert await keys_of(database, org) == {(A, "held"): first.ids[0], (A, "free"): new}


async def test_what_is_new_in_a_call_is_stored_by_one_statement_also_beside_calls_that_name_the_same_ids(
    recorder: Recorder, org: OrgId
) -> None:
    store = Store(recorder)
    first = some_jobs(org, 1, dedup_keys=["held"])
    await store.enqueue(first)
    shared, new = job_id(), job_id()
    keyed, plain = some_jobs(org, ids=[shared], dedup_keys=["held"]), some_jobs(org, ids=[shared, new])
    recorder.fail(queue_statements.ENQUEUE_PLAIN)
    answers = await asyncio.gather(store.enqueue(keyed), store.enqueue(plain), return_exceptions=True)
    assert answers[0] == {0: first.ids[0]}
    assert isinstance(answers[1], ShardUnavailable)
    assert await where(recorder, [shared, new]) == {}, "all or none"
    recorder.fail_no_more()
    assert await store.enqueue(plain) == {}


@pytest.fixture
async def impatient(module_dsn: str) -> AsyncGenerator[Database, None]:
    """Opens a database that raises an error after a deadlock, and does not run the statement again."""
    opened = Database(SHARD, module_dsn, connections=8)
    opened._tries = 0
    await opened.open()
    yield opened
    await opened.close()


@pytest.mark.parametrize("share", ["ids", "dedup keys", "both", "live keys"])
async def test_batches_of_two_routers_that_overlap_in_any_order_never_deadlock(
    impatient: Database, books: QueueAdmin, org: OrgId, other_org: OrgId, share: str
) -> None:
    """The calls of one router name different jobs, so that these calls share statements. The other routers send the
    same jobs in other calls."""
    stores = [Store(impatient) for _ in range(3)]
    orgs = (org, other_org)
    accepted: Counter[str] = Counter()
    for turn in range(12):
        ids = {one: [job_id() for _ in range(60)] for one in orgs}
        calls: list[list[NewJobs]] = []
        for _ in stores:
            mine: list[NewJobs] = []
            for one in orgs:
                order = random.sample(range(60), 60)
                for at in range(0, 60, 12):
                    part = order[at : at + 12]
                    mine.append(
                        some_jobs(
                            one,
                            12,
                            ids=[ids[one][n] for n in part] if share in ("ids", "both") else None,
                            dedup_keys=[f"{turn}-{n}" for n in part] if share in ("dedup keys", "both") else (),
                            dedup_window_us=random.choice([1, HOUR_US]) if share == "both" else HOUR_US,
                            live_keys=[f"{turn}-{n}" for n in part] if share == "live keys" else (),
                        )
                    )
            random.shuffle(mine)
            calls.append(mine)
        answers = await asyncio.gather(
            *(store.enqueue(jobs) for store, mine in zip(stores, calls, strict=True) for jobs in mine)
        )
        for jobs, known in zip([jobs for mine in calls for jobs in mine], answers, strict=True):
            accepted[jobs.org] += len(jobs) - len(known)
    found = {entry.org: entry for entry in await books.check()}
    for one in orgs:
        assert found[one].balanced
        assert found[one].accepted == accepted[one] == 12 * 60


async def test_a_call_that_is_stored_plain_and_beside_options_by_two_routers_does_not_deadlock(
    module_dsn: str, org: OrgId
) -> None:
    """The two routers use different statements. Both statements lock the jobs in the same order, even if the queues
    have another order."""
    # The lock wait is long. Otherwise a statement that gives up its wait could end a deadlock, and the test would not
    # see the deadlock.
    database = Database(SHARD, module_dsn, connections=8, short_lock_wait_s=PATIENCE_S)
    database._tries = 0
    await database.open()
    try:
        one, other = Store(database), Store(database)
        made = await one.names.make([(org, QueueName(name)) for name in "abc"])
        newest_first = sorted(made, key=lambda name: made[name], reverse=True)
        jobs = some_jobs(org, ids=sorted(job_id() for _ in newest_first))
        jobs.queues = [queue for _, queue in newest_first]
        beside = some_jobs(org, 1, max_attempts=3)
        async with asyncio.TaskGroup() as group, database.transaction() as connection:
            # This transaction stores the job in the middle. So an enqueue waits at this job, and holds the locks of the
            # jobs before it.
            await connection.execute(
                "INSERT INTO windrow.job (id, queue_id, run_at, visible_at, priority, kind, payload) "
                "VALUES (%s, %s, now(), now(), 5, 'greet', '')",
                [jobs.ids[1], made[newest_first[1]]],
            )
            plain = group.create_task(one.enqueue(jobs))
            mixed = [group.create_task(other.enqueue(call)) for call in (jobs, beside)]
            await until_blocked(database, sessions=2)
            await connection.execute("DELETE FROM windrow.job WHERE id = %s", [jobs.ids[1]])
        known = dict(enumerate(jobs.ids))
        assert [plain.result(), mixed[0].result()] in ([{}, known], [known, {}])
        assert mixed[1].result() == {}
    finally:
        await database.close()


async def test_a_caller_that_leaves_costs_nobody_anything(database: Database, org: OrgId, other_org: OrgId) -> None:
    store = Store(database)
    gone, stays = some_jobs(org, 2), some_jobs(other_org, 2)
    leaver = asyncio.create_task(store.enqueue(gone))
    stayer = asyncio.create_task(store.enqueue(stays))
    await asyncio.sleep(0)
    leaver.cancel()
    assert await stayer == {}
    with pytest.raises(asyncio.CancelledError):
        await leaver
    # A repeated call gets an answer, whether or not the first call has stored the jobs.
    assert await store.enqueue(gone) in ({}, dict(enumerate(gone.ids)))
    held = [lease for _, lease in await lease_jobs(store, org)]
    assert await store.settle(Settlement.ack(org, held)) == [Answer.OK] * 2
