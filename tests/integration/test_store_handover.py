"""The insert itself leases jobs to waiting consumers. These leases are like any other leases (I2), and each job is
reported exactly once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import psycopg
import pytest

from shard.admin.queue_admin import QueueAdmin
from shard.errors import IdsOutsideHorizon, NotOwned, ShardUnavailable, TooManyWaiting
from shard.fair_quota import FairQuota
from shard.placement.slots import slot_of
from shard.postgres.pool import Database
from shard.queue import statements
from shard.queue.claim_floor import GUARD_US
from shard.queue.pending_enqueue import NOTHING_HANDED, Handed, Handover, Taker
from shard.queue.settle import Nack, Settlement
from shard.queue.store import Store
from shard.queue_settings import QueueSettings
from shard.vocabulary import Answer, Failure, JobId, Lease, NewJobs, OrgId, Outcome, QueueName
from tests.jobs import HOUR_US, MINUTE_US, QUEUE, SHORT_US, at_once, ids_of, job_id, lease_jobs, some_jobs
from tests.recorder import Recorder
from tests.timemachine import end_leases, make_due, pass_time, until_blocked

A, B = QueueName("a"), QueueName("b")


@dataclass(kw_only=True)
class Told:
    """The `done` function of a hand-over. Records its calls: in the end there is exactly one call."""

    calls: list[Handed] = field(default_factory=list[Handed])
    heard: asyncio.Event = field(default_factory=asyncio.Event)

    def __call__(self, handed: Handed) -> None:
        self.calls.append(handed)
        self.heard.set()

    @property
    def positions(self) -> list[int]:
        (handed,) = self.calls
        return handed.positions

    async def in_the_end(self) -> list[int]:
        await asyncio.wait_for(self.heard.wait(), 30)
        # A second call would have happened before this moment.
        for _ in range(20):
            await asyncio.sleep(0)
        return self.positions


def handover(takers: dict[int, Taker]) -> tuple[Handover, Told]:
    told = Told()
    return Handover(takers=takers, done=told), told


def to_all(jobs: NewJobs, *, number: int = 42, window_us: int = HOUR_US, worker: str = "waiter") -> dict[int, Taker]:
    return dict.fromkeys(range(len(jobs)), Taker(number, worker, window_us))


def lease_of(name: str, number: int = 42) -> Lease:
    return Lease(job_hex=name.replace("-", ""), number=number)


def leases_of(jobs: NewJobs, number: int = 42) -> list[Lease]:
    return [lease_of(name, number) for name in jobs.ids]


# What is handed over


async def test_a_job_handed_over_is_leased_to_its_taker(recorder: Recorder, books: QueueAdmin, org: OrgId) -> None:
    store = Store(recorder)
    jobs = some_jobs(org, 4)
    takers = {0: Taker(1, "one", MINUTE_US), 1: Taker(2, "two", HOUR_US), 3: Taker(1, "one", MINUTE_US)}
    handed, told = handover(takers)
    await store.names.make([(org, QUEUE)])
    before = len(recorder.runs)
    assert await store.enqueue(jobs, handed) == {}
    assert [run[0] for run in recorder.runs[before:]] == [statements.ENQUEUE_PLAIN]
    assert told.positions == [0, 1, 3]
    assert told.calls[0].max_attempts == {(org, QUEUE): None}
    found = {record.id: record for record in await store.get(org, ids_of(jobs), include_payload=False)}
    for at, taker in takers.items():
        record = found[JobId(jobs.ids[at])]
        assert (record.state, record.attempt, record.worker) == ("leased", 1, taker.worker)
        assert record.deadline == told.calls[0].leased_at + taker.window_us
        assert record.attempts() == []
    assert found[JobId(jobs.ids[2])].state == "ready"
    (entry,) = [entry for entry in await books.check() if entry.org == org]
    assert (entry.accepted, entry.leased, entry.ready, entry.balanced) == (4, 3, 1, True)
    # While the leases last, no other claim gets the leased jobs.
    assert [job.id for job, _ in await lease_jobs(store, org)] == [jobs.ids[2]]
    assert await lease_jobs(Store(recorder), org) == []


async def test_an_insert_that_begins_too_late_hands_nothing_over(database: Database, org: OrgId) -> None:
    store = Store(database)
    late, in_time = some_jobs(org, 2), some_jobs(org, 2)
    first, told_first = handover(to_all(late))
    first.until_s = time.monotonic() - 1
    second, told_second = handover(to_all(in_time))
    second.until_s = time.monotonic() + 3600
    await asyncio.gather(store.enqueue(late, first), store.enqueue(in_time, second))
    assert (told_first.calls, told_second.positions) == ([NOTHING_HANDED], [0, 1])
    assert {job.id for job, _ in await lease_jobs(store, org)} == set(late.ids)


async def test_a_lease_that_was_handed_over_is_ended_and_extended_like_any_other(
    database: Database, books: QueueAdmin, org: OrgId, other_org: OrgId
) -> None:
    store = Store(database)
    jobs = some_jobs(org, 5)
    handed, told = handover(to_all(jobs))
    await store.enqueue(jobs, handed)
    assert told.positions == [0, 1, 2, 3, 4]
    one, two, three, four, five = leases_of(jobs)
    assert await store.settle(Settlement.ack(other_org, [one])) == [Answer.NOT_FOUND]
    assert await store.settle(Settlement.ack(org, [lease_of(jobs.ids[0], 43)])) == [Answer.STALE]
    for _ in range(2):
        assert await store.settle(Settlement.ack(org, [one], [b"done"])) == [Answer.OK]
        assert await store.settle(
            Settlement.nack(org, [Nack(lease=two, failure=Failure(message="no"), retry_after_us=HOUR_US)])
        ) == [Answer.OK]
        assert await store.settle(Settlement.nack(org, [Nack(lease=three, failure=Failure(permanent=True))])) == [
            Answer.OK
        ]
        assert await store.settle(Settlement.extend(org, [four], window_us=2 * HOUR_US)) == [Answer.OK]
        assert await store.settle(Settlement.release(org, [five])) == [Answer.OK]
    found = {record.id: record for record in await store.get(org, ids_of(jobs), include_payload=True)}
    ended = [found[name] for name in ids_of(jobs)]
    assert [record.state for record in ended] == ["succeeded", "scheduled", "dead", "leased", "ready"]
    assert ended[0].result == b"done"
    assert ended[3].deadline is not None
    assert ended[3].deadline > told.calls[0].leased_at + HOUR_US
    assert [[(a.outcome, a.worker) for a in record.attempts()] for record in ended] == [
        [(Outcome.ACKED, "waiter")],
        [(Outcome.NACKED, "waiter")],
        [(Outcome.NACKED, "waiter")],
        [],
        [(Outcome.RELEASED, "waiter")],
    ]
    assert [record.attempt for record in ended] == [1, 1, 1, 1, 0]
    (entry,) = [entry for entry in await books.check() if entry.org == org]
    assert entry.balanced


async def test_a_job_handed_over_that_expires_comes_back_with_its_attempt_counted(
    database: Database, org: OrgId
) -> None:
    store = Store(database)
    jobs = some_jobs(org, 2, max_attempts=2)
    handed, told = handover(to_all(jobs, window_us=SHORT_US))
    await store.enqueue(jobs, handed)
    assert await lease_jobs(store, org) == []
    await database.run(
        b"SELECT pg_sleep(greatest(0, %(deadline)s / 1e6::float8 - extract(epoch FROM clock_timestamp())::float8))",
        {"deadline": told.calls[0].leased_at + SHORT_US},
    )
    again = await lease_jobs(store, org)
    assert sorted((job.id, job.attempt) for job, _ in again) == sorted((name, 2) for name in jobs.ids)
    for record in await store.get(org, ids_of(jobs), include_payload=False):
        assert [(a.attempt, a.outcome, a.worker) for a in record.attempts()] == [(1, Outcome.EXPIRED, "waiter")]
    assert await store.settle(Settlement.ack(org, leases_of(jobs))) == [Answer.STALE] * 2
    # This attempt was the last one: after another expiry the jobs are dead.
    await end_leases(database, org)
    assert await lease_jobs(store, org) == []
    assert {r.state for r in await store.get(org, ids_of(jobs), include_payload=False)} == {"dead"}


@pytest.mark.parametrize("sweeps", [False, True], ids=["without a sweep", "after sweeps"])
async def test_a_job_handed_over_that_expires_is_ahead_of_every_floor(
    database: Database, org: OrgId, sweeps: bool
) -> None:
    stores = Store(database), Store(database)
    await stores[0].enqueue(some_jobs(org, 2))
    jobs = some_jobs(org, 2)
    handed, told = handover(to_all(jobs))
    await stores[0].enqueue(jobs, handed)
    assert told.positions == [0, 1]
    # The floors of both routers move as far beyond the insert as possible.
    for store in stores:
        await pass_time(database, GUARD_US / 1_000_000 + 0.1)
        await store.enqueue(some_jobs(org, 2))
        await lease_jobs(store, org)
        if sweeps:
            queue_id = (await store.names.find([(org, QUEUE)]))[org, QUEUE]
            due = await store.sweep()
            assert due.first[queue_id] > due.now, "all that is there is leased"
    await pass_time(database, GUARD_US / 1_000_000 + 0.1)
    await stores[0].enqueue(some_jobs(org, 1))
    assert len(await lease_jobs(stores[0], org)) == 1
    await end_leases(database, org)
    if sweeps:
        for store in stores:
            assert (await store.sweep()).first
    found = await lease_jobs(stores[1], org, max_jobs=4)
    found += await lease_jobs(stores[0], org)
    assert set(jobs.ids) <= {job.id for job, _ in found}
    assert len(found) == 9


async def test_a_probe_tells_when_the_lease_of_a_job_handed_over_ends(database: Database, org: OrgId) -> None:
    store = Store(database)
    jobs = some_jobs(org, 2)
    handed, told = handover({0: Taker(1, "w", HOUR_US), 1: Taker(2, "w", MINUTE_US)})
    await store.enqueue(jobs, handed)
    queue_id = (await store.names.find([(org, QUEUE)]))[org, QUEUE]
    due = await store.sweeper.probe([queue_id])
    assert due.first == {queue_id: told.calls[0].leased_at + MINUTE_US}
    assert due.now >= told.calls[0].leased_at


async def test_jobs_of_a_group_are_handed_over_as_far_as_the_group_has_slots(
    database: Database, books: QueueAdmin, org: OrgId, other_org: OrgId
) -> None:
    store = Store(database)
    await store.names.make([(org, QUEUE)])
    await books.alter_queue(org, QUEUE, QueueSettings(group_concurrency=2))
    jobs = some_jobs(org, 7)
    jobs.ids.sort()
    jobs.groups = {0: "g", 1: "h", 2: "g", 4: "g", 5: "g"}
    handed, told = handover(to_all(jobs))
    # The jobs of another call come first in the statement, so the positions of these jobs in the statement are not
    # those in their own call.
    beside = some_jobs(other_org, 3, group="g")
    handed_beside, told_beside = handover(to_all(beside, number=43))
    await at_once(store.enqueue(beside, handed_beside), store.enqueue(jobs, handed))
    assert (told.positions, told.calls[0].waiting) == ([0, 1, 2, 3, 6], {4, 5})
    assert handed.is_complete
    assert (len(told_beside.positions), len(told_beside.calls[0].waiting)) == (1, 2)
    found = {record.id: record for record in await store.get(org, ids_of(jobs), include_payload=False)}
    assert [found[name].attempt for name in ids_of(jobs)] == [1, 1, 1, 1, 0, 0, 1]
    # No job of a group whose slots are taken is handed over.
    later = some_jobs(org, 1, group="g")
    handed_later, told_later = handover(to_all(later, number=44))
    await store.enqueue(later, handed_later)
    assert (told_later.positions, told_later.calls[0].waiting) == ([], {0})
    assert await lease_jobs(store, org) == []
    for at in (0, 2):
        assert await store.settle(Settlement.ack(org, [lease_of(jobs.ids[at])])) == [Answer.OK]
    assert {job.id for job, _ in await lease_jobs(store, org)} == {jobs.ids[4], jobs.ids[5]}


async def test_after_k_became_smaller_a_new_job_is_not_handed_over_beside_the_leases_of_its_group(
    database: Database, books: QueueAdmin, org: OrgId
) -> None:
    store = Store(database)
    await store.names.make([(org, QUEUE)])
    await books.alter_queue(org, QUEUE, QueueSettings(group_concurrency=3))
    jobs = some_jobs(org, 3, group="g")
    jobs.ids.sort()
    handed, _ = handover(to_all(jobs))
    await store.enqueue(jobs, handed)
    await books.alter_queue(org, QUEUE, QueueSettings(group_concurrency=1))
    # Slot 1 is free. The jobs in the slots 2 and 3 are still leased.
    assert await store.settle(Settlement.ack(org, [lease_of(jobs.ids[0])])) == [Answer.OK]
    later = some_jobs(org, 1, group="g")
    handed_later, told_later = handover(to_all(later, number=44))
    await store.enqueue(later, handed_later)
    assert (told_later.positions, told_later.calls[0].waiting) == ([], {0})


async def test_a_job_of_a_group_behind_one_that_has_become_due_is_not_handed_over(
    database: Database, org: OrgId
) -> None:
    store = Store(database)
    scheduled = some_jobs(org, 1, group="g", delay_us=MINUTE_US)
    await store.enqueue(scheduled)
    await make_due(database, org)
    jobs = some_jobs(org, 1, group="g")
    handed, told = handover(to_all(jobs))
    await store.enqueue(jobs, handed)
    assert (told.positions, told.calls[0].waiting) == ([], {0})
    ((job, lease),) = await lease_jobs(store, org)
    assert job.id == scheduled.ids[0]
    await store.settle(Settlement.ack(org, [lease]))
    assert [job.id for job, _ in await lease_jobs(store, org)] == jobs.ids


async def test_a_job_that_gets_the_slot_of_a_known_job_is_ready_and_its_hand_over_is_not_complete(
    database: Database, org: OrgId
) -> None:
    store = Store(database)
    known = some_jobs(org, 1, group="other")
    await store.enqueue(known)
    jobs = some_jobs(org, ids=[JobId(known.ids[0]), job_id()], group="g")
    jobs.ids.sort()
    handed, told = handover(to_all(jobs))
    await store.enqueue(jobs, handed)
    assert told.positions == []
    assert not handed.is_complete
    assert {job.id for job, _ in await lease_jobs(store, org)} == set(jobs.ids)


async def test_an_enqueue_that_stores_nothing_gives_no_slots(database: Database, org: OrgId) -> None:
    """An enqueue that stores nothing must not lock the groups."""
    store = Store(database)
    first, second = some_jobs(org, 1, group="g"), some_jobs(org, 1, group="g")
    await store.enqueue(first)
    await store.enqueue(second)
    (((_, lease),)) = await lease_jobs(store, org)
    async with database.transaction() as connection:
        # Make the group slot free, without a trigger that gives it to the next job.
        await connection.run(b"ALTER TABLE windrow.job DISABLE TRIGGER USER", {})
        await connection.run(b"DELETE FROM windrow.job WHERE id = %(id)s::uuid", {"id": lease.job_hex})
        await connection.run(b"ALTER TABLE windrow.job ENABLE TRIGGER USER", {})
    refused = some_jobs(org, 1, group="g")
    handed, told = handover(to_all(refused))
    with pytest.raises(NotOwned):
        await store.enqueue(refused, handed, epoch=-1)
    assert told.positions == []
    assert await lease_jobs(store, org) == []


async def test_an_enqueue_that_is_refused_looks_at_no_group(database: Database, org: OrgId) -> None:
    """The enqueue neither waits for a group nor gives a group slot to a job that has become due."""
    store = Store(database)
    scheduled = some_jobs(org, 1, group="g", delay_us=MINUTE_US)
    await store.enqueue(scheduled)
    await make_due(database, org)
    refused = some_jobs(org, 1, group="g")
    async with database.transaction() as rival:
        await rival.run(b"SELECT pg_advisory_xact_lock(14, bucket) FROM generate_series(0, 1023) AS bucket", {})
        with pytest.raises(NotOwned):
            await store.enqueue(refused, epoch=-1)
    with pytest.raises(NotOwned):
        await store.enqueue(refused, epoch=-1)
    slots = await database.run(b"SELECT group_slot FROM windrow.job WHERE id = %(id)s::uuid", {"id": scheduled.ids[0]})
    assert slots == [(None,)]


# What is not handed over


async def test_a_paused_queue_hands_nothing_over_and_its_jobs_are_ready(
    database: Database, books: QueueAdmin, org: OrgId, other_org: OrgId
) -> None:
    store = Store(database)
    await store.names.make([(org, A), (org, B)])
    await store.names.make([(other_org, A)])
    await books.alter_queue(org, A, QueueSettings(paused=True))
    jobs, others = some_jobs(org, 4), some_jobs(other_org, 2, queue=A)
    jobs.queues = [A, B, A, B]
    handed, told = handover(to_all(jobs))
    handed_too, told_too = handover(to_all(others, number=43))
    assert await at_once(store.enqueue(jobs, handed), store.enqueue(others, handed_too)) == [{}, {}]
    assert told.positions == [1, 3]
    assert told_too.positions == [0, 1], "the other org's queue of this name is not paused"
    found = {record.id: record for record in await store.get(org, ids_of(jobs), include_payload=False)}
    assert [found[name].state for name in ids_of(jobs)] == ["ready", "leased", "ready", "leased"]
    assert [found[name].attempt for name in ids_of(jobs)] == [0, 1, 0, 1]
    assert await store.settle(Settlement.release(org, [lease_of(jobs.ids[0])])) == [Answer.STALE]
    await books.alter_queue(org, A, QueueSettings(paused=False))
    assert sorted(job.id for job, _ in await lease_jobs(store, org, queue=A)) == sorted([jobs.ids[0], jobs.ids[2]])


@pytest.mark.parametrize("state", ["ready", "leased", "finished", "dead"])
@pytest.mark.parametrize("alone", [True, False], ids=["alone", "beside others"])
async def test_a_job_known_already_is_not_handed_over(
    database: Database, org: OrgId, other_org: OrgId, state: str, alone: bool
) -> None:
    store = Store(database)
    old = some_jobs(org, 2, dedup_keys=["", "k"])
    del old.dedup_keys[0]
    await store.enqueue(old)
    if state != "ready":
        held = [lease for _, lease in await lease_jobs(store, org)]
        if state == "finished":
            await store.settle(Settlement.ack(org, held))
        elif state == "dead":
            await store.settle(
                Settlement.nack(org, [Nack(lease=lease, failure=Failure(permanent=True)) for lease in held])
            )
    before = {record.id: record for record in await store.get(org, ids_of(old), include_payload=False)}
    jobs = some_jobs(org, ids=[JobId(old.ids[0]), job_id(), job_id()], dedup_keys=["", "k"])
    del jobs.dedup_keys[0]
    handed, told = handover(to_all(jobs))
    beside = some_jobs(other_org, 2)
    handed_beside, told_beside = handover(to_all(beside, number=43))
    if alone:
        known = await store.enqueue(jobs, handed)
    else:
        known, _ = await asyncio.gather(store.enqueue(jobs, handed), store.enqueue(beside, handed_beside))
        assert told_beside.positions == [0, 1]
    assert known == {0: old.ids[0], 1: old.ids[1]}
    after = {record.id: record for record in await store.get(org, ids_of(old), include_payload=False)}
    assert after == before
    assert told.positions == [2]
    assert set(await store.settle(Settlement.release(org, leases_of(jobs)[:1]))) <= {Answer.STALE}
    (new,) = await store.get(org, [JobId(jobs.ids[2])], include_payload=False)
    assert new.state == "leased"


async def test_what_is_told_as_handed_over_is_what_is_leased_when_calls_share_jobs(
    database: Database, org: OrgId
) -> None:
    """If several calls have the same job, only the call that stored the job learns that it was leased."""
    store = Store(database)
    for _ in range(20):
        shared = [job_id(), job_id()]
        calls: list[tuple[NewJobs, Handover, Told]] = []
        for number in range(4):
            jobs = some_jobs(org, ids=[job_id(), *shared[number % 2 :]])
            calls.append((jobs, *handover(to_all(jobs, number=100 + number))))
        answers = await asyncio.gather(*(store.enqueue(jobs, handed) for jobs, handed, _ in calls))
        owners: dict[str, int] = {}
        for number, ((jobs, _, told), known) in enumerate(zip(calls, answers, strict=True)):
            assert set(told.positions) == set(range(len(jobs))) - known.keys()
            for at in told.positions:
                assert owners.setdefault(jobs.ids[at], 100 + number) == 100 + number
        for number, (jobs, _, _) in enumerate(calls):
            expected = [Answer.OK if owners[name] == 100 + number else Answer.STALE for name in jobs.ids]
            assert (
                await store.settle(Settlement.extend(org, leases_of(jobs, 100 + number), window_us=HOUR_US)) == expected
            )
        for number, (jobs, _, _) in enumerate(calls):
            await store.settle(Settlement.ack(org, leases_of(jobs, 100 + number)))


# Each job is reported exactly once


async def assert_nothing_was_handed(store: Store, jobs: NewJobs) -> None:
    assert set(await store.settle(Settlement.release(jobs.org, leases_of(jobs)))) <= {Answer.NOT_FOUND, Answer.STALE}


def old_ids(jobs: NewJobs) -> None:
    jobs.ids[0] = job_id(ahead_ms=-8 * 24 * 3600 * 1000)


def no_json(jobs: NewJobs) -> None:
    jobs.attributes[0] = "{"


def twins(jobs: NewJobs) -> None:
    jobs.ids[1] = jobs.ids[0]


def nothing(jobs: NewJobs) -> None:
    for column in (jobs.ids, jobs.queues, jobs.kinds, jobs.payloads):
        column.clear()


Spoil = Callable[[NewJobs], None]


@pytest.mark.parametrize("beside", [0, 2], ids=["alone", "beside others"])
@pytest.mark.parametrize(
    ("spoil", "error"),
    [(old_ids, IdsOutsideHorizon), (no_json, psycopg.DataError), (twins, None), (nothing, None)],
    ids=lambda value: getattr(value, "__name__", ""),
)
async def test_a_handover_is_told_when_its_call_will_not_do(
    database: Database, org: OrgId, other_org: OrgId, spoil: Spoil, error: type[Exception] | None, beside: int
) -> None:
    store = Store(database)
    jobs = some_jobs(org, 3)
    spoil(jobs)
    handed, told = handover(to_all(jobs))
    calls = [store.enqueue(some_jobs(other_org, 1)) for _ in range(beside)]
    answer, *_ = await asyncio.gather(store.enqueue(jobs, handed), *calls, return_exceptions=True)
    assert isinstance(answer, error or dict)
    assert await told.in_the_end() == []
    await assert_nothing_was_handed(store, jobs)


async def test_a_handover_is_told_when_the_shard_does_not_own_the_slot(fresh_database: Database, org: OrgId) -> None:
    store = Store(fresh_database)
    await fresh_database.run(b"DELETE FROM windrow.owned_slot WHERE slot = %(slot)s", {"slot": slot_of(org)})
    jobs = some_jobs(org, 2)
    handed, told = handover(to_all(jobs))
    with pytest.raises(NotOwned):
        await store.enqueue(jobs, handed)
    assert await told.in_the_end() == []


@pytest.mark.parametrize("statement", [statements.ENQUEUE_PLAIN, statements.FIND_QUEUE_IDS], ids=lambda s: s.name)
async def test_a_handover_is_told_when_the_shard_is_away(
    recorder: Recorder, org: OrgId, other_org: OrgId, statement: bytes
) -> None:
    store = Store(recorder)
    calls: list[tuple[NewJobs, Handover, Told]] = []
    for one in (org, other_org):
        jobs = some_jobs(one, 2)
        calls.append((jobs, *handover(to_all(jobs))))
    recorder.fail(statement)
    answers = await asyncio.gather(*(store.enqueue(jobs, h) for jobs, h, _ in calls), return_exceptions=True)
    assert [type(answer) for answer in answers] == [ShardUnavailable] * 2
    for _, _, told in calls:
        assert await told.in_the_end() == []


async def test_a_handover_is_told_when_too_much_is_waiting(database: Database, module_dsn: str, org: OrgId) -> None:
    store = Store(database)
    await store.enqueue(some_jobs(org, 1))
    store._enqueues._quota = FairQuota(1)
    async with await psycopg.AsyncConnection.connect(module_dsn) as rival:
        await rival.execute("LOCK TABLE windrow.job IN SHARE MODE")
        under_way: list[asyncio.Task[object]] = []
        for count in (1, 2):
            under_way.append(asyncio.create_task(store.enqueue(some_jobs(org, 1))))
            await until_blocked(database, count)
        under_way.append(asyncio.create_task(store.enqueue(some_jobs(org, 1))))
        await asyncio.sleep(0)
        jobs = some_jobs(org, 2)
        handed, told = handover(to_all(jobs))
        with pytest.raises(TooManyWaiting):
            await store.enqueue(jobs, handed)
        assert await told.in_the_end() == []
    await asyncio.gather(*under_way)


async def test_a_handover_is_told_when_its_call_has_waited_too_long(
    database: Database, module_dsn: str, org: OrgId
) -> None:
    store = Store(database)
    await store.enqueue(some_jobs(org, 1))
    async with await psycopg.AsyncConnection.connect(module_dsn) as rival:
        await rival.execute("LOCK TABLE windrow.job IN SHARE MODE")
        under_way: list[asyncio.Task[object]] = []
        for count in (1, 2):
            under_way.append(asyncio.create_task(store.enqueue(some_jobs(org, 1))))
            await until_blocked(database, count)
        store._enqueues._wait_s = 0.01
        jobs = some_jobs(org, 2)
        handed, told = handover(to_all(jobs))
        with pytest.raises(ShardUnavailable):
            await store.enqueue(jobs, handed)
        assert await told.in_the_end() == []
    await asyncio.gather(*under_way)
    await assert_nothing_was_handed(store, jobs)


@pytest.mark.parametrize("when", ["before it begins", "while it waits", "while it is under way"])
async def test_a_handover_is_told_though_its_caller_has_left(
    database: Database, module_dsn: str, org: OrgId, when: str
) -> None:
    store = Store(database)
    await store.enqueue(some_jobs(org, 1))
    jobs = some_jobs(org, 2)
    handed, told = handover(to_all(jobs))
    async with await psycopg.AsyncConnection.connect(module_dsn) as rival:
        others: list[asyncio.Task[object]] = []
        if when != "before it begins":
            await rival.execute("LOCK TABLE windrow.job IN SHARE MODE")
        for count in (1, 2) if when == "while it waits" else ():
            others.append(asyncio.create_task(store.enqueue(some_jobs(org, 1))))
            await until_blocked(database, count)
        caller = asyncio.create_task(store.enqueue(jobs, handed))
        await asyncio.sleep(0)
        if when == "while it is under way":
            await until_blocked(database)
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
    positions = await told.in_the_end()
    assert len(told.calls) == 1
    await asyncio.gather(*others)
    # Either the call has been executed and reported, or it has not been executed. Only if its answer was lost, jobs may
    # be leased without a report. Then a release ends these leases.
    assert positions in ([0, 1], [])
    if positions:
        assert await store.settle(Settlement.ack(org, leases_of(jobs))) == [Answer.OK] * 2
    else:
        assert len(set(await store.settle(Settlement.release(org, leases_of(jobs))))) == 1
        assert {r.state for r in await store.get(org, ids_of(jobs), include_payload=False)} <= {"ready"}


async def test_nothing_is_handed_over_twice_by_a_call_that_is_repeated(database: Database, org: OrgId) -> None:
    """A producer that has not got the answer repeats the call. Consumers wait during both calls."""
    store = Store(database)
    jobs = some_jobs(org, 3)
    first, told_first = handover(to_all(jobs, number=1))
    again, told_again = handover(to_all(jobs, number=2))
    answers = await asyncio.gather(store.enqueue(jobs, first), store.enqueue(jobs, again))
    assert sorted(map(len, answers)) == [0, 3]
    assert sorted([told_first.positions, told_again.positions]) == [[], [0, 1, 2]]
    owner, other = (1, 2) if told_first.positions else (2, 1)
    assert await store.settle(Settlement.ack(org, leases_of(jobs, other))) == [Answer.STALE] * 3
    assert await store.settle(Settlement.ack(org, leases_of(jobs, owner))) == [Answer.OK] * 3
