"""One claim serves several takers. No taker gets another taker's jobs, and all takers together get the jobs that a
single taker would get (I2, I4)."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncGenerator, Mapping

import psycopg
import pytest

from shard.admin.queue_admin import QueueAdmin
from shard.errors import ShardUnavailable
from shard.lease_token import parse_token, token
from shard.postgres.pool import Database, Rows
from shard.queue import statements
from shard.queue.claim import CLAIM_BYTES_MAX, ClaimResult
from shard.queue.settle import Settlement
from shard.queue.store import Store
from shard.vocabulary import Answer, Lease, OrgId, Outcome, QueueId, QueueName, ShardName
from tests.conftest import SHARD
from tests.jobs import HOUR_US, MINUTE_US, QUEUE, ids_of, lease_jobs, some_jobs
from tests.recorder import Recorder
from tests.timemachine import end_leases, reach_expiry, until_blocked

A, B, C = QueueName("a"), QueueName("b"), QueueName("c")
FAR_FUTURE_US = 4_000_000_000_000_000
HALF = b"x" * (CLAIM_BYTES_MAX // 2)


def ask(
    store: Store,
    org: OrgId,
    *queues: QueueName,
    max_jobs: int = 10,
    window_us: int = MINUTE_US,
    worker: str = "w",
) -> asyncio.Task[ClaimResult]:
    """Begins a claim. The claim shares a statement with the other claims of this event loop iteration."""
    return asyncio.create_task(
        store.claim(org, queues or [QUEUE], max_jobs=max_jobs, window_us=window_us, worker=worker)
    )


def ids(taken: ClaimResult) -> list[str]:
    return [job.id for job in taken.jobs]


def leases(taken: ClaimResult) -> list[Lease]:
    return [parse_token(token(taken.prefix, job.id))[1] for job in taken.jobs]


async def enqueue_in_turn(
    store: Store, org: OrgId, count: int, *, queue: str = QUEUE, payload: bytes = b""
) -> list[str]:
    """Enqueues jobs that become visible one after another. Returns their ids in this order."""
    names: list[str] = []
    for _ in range(count):
        jobs = some_jobs(org, 1, queue=queue)
        jobs.payloads = [payload]
        await store.enqueue(jobs)
        names += jobs.ids
    return names


# How jobs are shared out


async def test_takers_of_the_same_queues_share_what_one_would_get_in_its_order(recorder: Recorder, org: OrgId) -> None:
    store = Store(recorder)
    expected: list[tuple[int, str]] = []
    for turn in range(24):
        jobs = some_jobs(org, 1, priority=(9, 1, 5)[turn % 3])
        await store.enqueue(jobs)
        expected.append((jobs.priorities[0], jobs.ids[0]))
    expected.sort(key=lambda job: job[0])
    before = len(recorder.runs)
    wishes = (3, 1, 7, 5, 2)
    taken = await asyncio.gather(*(ask(store, org, max_jobs=wish) for wish in wishes))
    assert recorder.count(statements.CLAIM, since=before) == 1
    assert [len(some.jobs) for some in taken] == list(wishes)
    assert [name for some in taken for name in ids(some)] == [name for _, name in expected[: sum(wishes)]]
    # If there are not enough jobs for all takers, the first takers get them.
    rest = await asyncio.gather(ask(store, org, max_jobs=4), ask(store, org, max_jobs=4), ask(store, org, max_jobs=4))
    assert [ids(some) for some in rest] == [
        [name for _, name in expected[18:22]],
        [name for _, name in expected[22:24]],
        [],
    ]


async def test_each_job_has_the_worker_the_window_and_the_lease_of_its_own_taker(
    recorder: Recorder, org: OrgId, other_org: OrgId
) -> None:
    store = Store(recorder)
    orgs = [org, org, other_org, org, other_org]
    for one in {org, other_org}:
        await store.enqueue(some_jobs(one, 8))
    before = len(recorder.runs)
    taken = await asyncio.gather(
        *(
            ask(store, one, max_jobs=2 + turn % 2, window_us=(turn + 1) * MINUTE_US, worker=f"worker {turn}")
            for turn, one in enumerate(orgs)
        )
    )
    assert recorder.count(statements.CLAIM, since=before) == 1
    assert len({lease.number for some in taken for lease in leases(some)}) == len(orgs)
    for turn, (one, some) in enumerate(zip(orgs, taken, strict=True)):
        assert len(some.jobs) == 2 + turn % 2
        assert {job.deadline - job.leased_at for job in some.jobs} == {(turn + 1) * MINUTE_US}
        assert {job.lease for job in some.jobs} == {lease.number for lease in leases(some)}
        assert await store.settle(Settlement.ack(one, leases(some))) == [Answer.OK] * len(some.jobs)
        records = await store.get(one, [job.id for job in some.jobs], include_payload=False)
        assert {record.worker for record in records} == {f"worker {turn}"}


async def test_takers_whose_queues_overlap_but_differ_get_each_job_once(recorder: Recorder, org: OrgId) -> None:
    store = Store(recorder)
    wanted = [(A, B), (B, C), (A,), (C,), (B, A), (A, B, C), (A, B)]
    for _ in range(5):
        stored = {queue: some_jobs(org, 11, queue=queue) for queue in (A, B, C)}
        await asyncio.gather(*map(store.enqueue, stored.values()))
        random.shuffle(wanted)
        taken = await asyncio.gather(*(ask(store, org, *queues, max_jobs=5) for queues in wanted))
        for queues, some in zip(wanted, taken, strict=True):
            assert {job.queue for job in some.jobs} <= set(queues)
            assert all(job.id in stored[job.queue].ids for job in some.jobs)
        got = Counter(name for some in taken for name in ids(some))
        assert set(got.values()) == {1}
        left = await ask(store, org, A, B, C, max_jobs=99)
        for queues, some in zip(wanted, taken, strict=True):
            assert len(some.jobs) == 5 or not {job.queue for job in left.jobs} & set(queues), "it found all there was"
        assert sorted([*got, *ids(left)]) == sorted(name for jobs in stored.values() for name in jobs.ids)
        for some in (*taken, left):
            assert set(await store.settle(Settlement.ack(org, leases(some)))) <= {Answer.OK}


async def test_takers_of_several_orgs_get_their_own_orgs_jobs_and_nothing_else(
    recorder: Recorder, org: OrgId, other_org: OrgId
) -> None:
    store = Store(recorder)
    stranger = OrgId(f"{org}-never-seen")
    stored = {one: some_jobs(one, 5) for one in (org, other_org)}
    await asyncio.gather(*map(store.enqueue, stored.values()))
    before = len(recorder.runs)
    askers = [stranger, org, other_org, stranger, org, other_org]
    taken = await asyncio.gather(*(ask(store, one, max_jobs=3) for one in askers))
    assert recorder.count(statements.CLAIM, since=before) == 1
    got: dict[OrgId, list[str]] = {}
    for one, some in zip(askers, taken, strict=True):
        got.setdefault(one, []).extend(ids(some))
    assert {one: sorted(names) for one, names in got.items()} == {
        stranger: [],
        org: sorted(stored[org].ids),
        other_org: sorted(stored[other_org].ids),
    }
    # One org's lease is not accepted in another org's call.
    assert await store.settle(Settlement.ack(other_org, leases(taken[1]))) == [Answer.NOT_FOUND] * 3


async def test_takers_of_many_orgs_learn_their_queues_numbers_by_one_statement(recorder: Recorder, org: OrgId) -> None:
    orgs = [OrgId(f"{org}-{n}") for n in range(10)]
    stored = [some_jobs(one, 2, queue=queue) for one in orgs for queue in (A, B)]
    await asyncio.gather(*map(Store(recorder).enqueue, stored))
    before = len(recorder.runs)
    store = Store(recorder)
    taken = await asyncio.gather(*(ask(store, one, A, B, C) for one in orgs))
    assert [len(some.jobs) for some in taken] == [4] * 10
    assert recorder.count(statements.FIND_QUEUE_IDS, since=before) == 1


async def test_a_wrong_memory_of_a_queue_gives_nothing_to_its_org_and_nothing_away_of_another(
    database: Database, org: OrgId, other_org: OrgId
) -> None:
    """The store remembers a wrong queue number. This happens after a failover that lost the creation of a queue:
    another org now has the queue's number (I4, I7)."""
    for wrong_first in (True, False):
        store = Store(database)
        await store.enqueue(some_jobs(other_org, 3, queue=B))
        own = some_jobs(org, 1, queue=A)
        await store.enqueue(own)
        numbers = store.names._queue_ids
        numbers[org, A] = numbers[other_org, B]
        assert ids(await ask(store, org, A)) == [], "alone it is not found out before the sweep"
        asks = [(org, A), (other_org, B)]
        taken = await asyncio.gather(
            *(ask(store, one, queue, max_jobs=3) for one, queue in (asks if wrong_first else asks[::-1]))
        )
        wrong, right = taken if wrong_first else taken[::-1]
        assert (ids(wrong), [job.queue for job in wrong.jobs]) == (own.ids, [A]), "together it is"
        assert [job.queue for job in right.jobs] == [B] * 3


async def test_two_queues_remembered_under_one_number_are_not_mixed_up(database: Database, org: OrgId) -> None:
    for queues in ((A, B), (B, A)):
        store = Store(database)
        stored = {queue: some_jobs(org, 2, queue=queue) for queue in queues}
        await asyncio.gather(*map(store.enqueue, stored.values()))
        numbers = store.names._queue_ids
        numbers[org, B] = numbers[org, A]
        taken = await ask(store, org, *queues, max_jobs=4)
        assert sorted(ids(taken)) == sorted(name for jobs in stored.values() for name in jobs.ids)
        assert all(job.id in stored[job.queue].ids for job in taken.jobs)


# Jobs that fit into an answer


async def test_what_the_answers_have_no_room_for_is_left_as_it_was_and_comes_next(
    recorder: Recorder, org: OrgId
) -> None:
    store = Store(recorder)
    names = await enqueue_in_turn(store, org, 9, payload=HALF)
    got: list[str] = []
    for _ in range(9):
        taken = await asyncio.gather(*(ask(store, org, max_jobs=wish) for wish in (1, 2, 3)))
        # The claim serves the takers in their order. No taker gets a job while an older job is left that nobody has
        # got.
        now = [name for some in taken for name in ids(some)]
        got += now
        assert got == names[: len(got)]
        assert now
        for some in taken:
            assert sum(len(job.payload) for job in some.jobs) <= CLAIM_BYTES_MAX + len(HALF)
        if len(got) == len(names):
            break
    assert got == names, "without a sweep: the floors never passed what was left"


async def test_an_orgs_large_payloads_leave_room_for_another_orgs_jobs(
    recorder: Recorder, org: OrgId, other_org: OrgId
) -> None:
    """I4: each org gets jobs when it calls alone, so each org must get jobs when several orgs share a statement."""
    store = Store(recorder)
    await enqueue_in_turn(store, org, 6, payload=HALF)
    small = await enqueue_in_turn(store, other_org, 2)
    large, others = await asyncio.gather(ask(store, org), ask(store, other_org))
    assert len(large.jobs) >= 2
    assert ids(others) == small


async def test_a_taker_with_little_room_left_does_not_hold_up_the_others(
    recorder: Recorder, org: OrgId, other_org: OrgId
) -> None:
    """The answer to one org has room for only one more byte. This must not limit the jobs of another org (I4)."""
    store = Store(recorder)
    large = await enqueue_in_turn(store, org, 1, payload=HALF)
    large += await enqueue_in_turn(store, org, 1, payload=HALF[:-1])
    await store.enqueue(some_jobs(other_org, 500))
    before = len(recorder.runs)
    first, second = await asyncio.gather(ask(store, org), ask(store, other_org, max_jobs=500))
    assert ids(first) == large
    assert len(second.jobs) == 500
    assert recorder.count(statements.CLAIM, since=before) == 2


async def test_when_an_answer_is_full_only_the_queues_that_may_have_been_skipped_are_looked_at_again(
    recorder: Recorder, org: OrgId, other_org: OrgId
) -> None:
    store = Store(recorder)
    seen: set[QueueId] = set()
    store.on_visible = seen.update
    await store.enqueue(some_jobs(other_org, 2))
    large = await enqueue_in_turn(store, org, 3, payload=HALF)
    numbers = await store.names.find([(org, QUEUE), (other_org, QUEUE)])
    first, second = await asyncio.gather(ask(store, other_org), ask(store, org))
    assert len(first.jobs) == 2
    assert ids(second) == large[:2]
    assert seen == {numbers[org, QUEUE]}, "the first group had got all its jobs"


async def test_many_takers_of_large_payloads_each_get_one(recorder: Recorder, org: OrgId) -> None:
    store = Store(recorder)
    names = await enqueue_in_turn(store, org, 12, payload=HALF)
    taken = await asyncio.gather(*(ask(store, org, max_jobs=1) for _ in range(12)))
    assert [len(some.jobs) for some in taken] == [1] * 12
    assert sorted(name for some in taken for name in ids(some)) == sorted(names)


async def test_an_answer_keeps_its_bound_though_jobs_were_set_aside_on_the_way(recorder: Recorder, org: OrgId) -> None:
    store = Store(recorder)
    for _ in range(4):
        await enqueue_in_turn(store, org, 1, payload=HALF[:-1000])
        expired = some_jobs(org, 1)
        expired.expires_at_us = {0: FAR_FUTURE_US}
        await store.enqueue(expired)
    await reach_expiry(recorder, org)
    taken = await ask(store, org, max_jobs=100)
    assert len(taken.jobs) >= 2
    assert sum(len(job.payload) for job in taken.jobs) <= CLAIM_BYTES_MAX + len(HALF)


# Jobs that are found after their time


async def test_jobs_past_their_time_are_set_aside_in_their_own_orgs_and_the_rest_is_delivered(
    recorder: Recorder, books: QueueAdmin, org: OrgId, other_org: OrgId
) -> None:
    store = Store(recorder)
    orgs = (org, other_org)
    expired, exhausted, fit = {}, {}, {}
    for one in orgs:
        exhausted[one] = some_jobs(one, 3, max_attempts=1)
        await store.enqueue(exhausted[one])
        assert len(await lease_jobs(store, one)) == 3
        await end_leases(recorder, one)
        expired[one] = some_jobs(one, 4)
        expired[one].expires_at_us = dict.fromkeys(range(4), FAR_FUTURE_US)
        await store.enqueue(expired[one])
        await reach_expiry(recorder, one)
        fit[one] = some_jobs(one, 5)
        await store.enqueue(fit[one])
    before = len(recorder.runs)
    taken = await asyncio.gather(*(ask(store, one, max_jobs=wish) for one in orgs for wish in (2, 3)))
    assert [len(some.jobs) for some in taken] == [2, 3, 2, 3]
    assert recorder.count(statements.CLAIM, since=before) <= 6
    for turn, one in enumerate(orgs):
        got = taken[2 * turn : 2 * turn + 2]
        assert sorted(name for some in got for name in ids(some)) == sorted(fit[one].ids)
        records = await store.get(one, ids_of(expired[one]) + ids_of(exhausted[one]), include_payload=False)
        assert Counter(record.state for record in records) == {"cancelled": 4, "dead": 3}
        for record in records:
            assert [attempt.outcome for attempt in record.attempts()] == (
                [Outcome.EXPIRED] if record.state == "dead" else []
            )
        (entry,) = [entry for entry in await books.check() if entry.org == one]
        assert (entry.leased, entry.dead, entry.cancelled, entry.balanced) == (5, 3, 4, True)


async def test_a_job_whose_window_ends_between_two_turns_is_given_once(recorder: Recorder, org: OrgId) -> None:
    store = Store(recorder)
    expired = some_jobs(org, 1)
    expired.expires_at_us = {0: FAR_FUTURE_US}
    await store.enqueue(expired)
    await reach_expiry(recorder, org)
    await store.enqueue(some_jobs(org, 1))
    before = len(recorder.runs)
    taken = await store.claim(org, [QUEUE], max_jobs=3, window_us=1, worker="w")
    assert recorder.count(statements.CLAIM, since=before) == 2
    assert [job.attempt for job in taken.jobs] == [2]


async def test_when_setting_aside_fails_for_one_taker_all_have_what_fits(
    recorder: Recorder, org: OrgId, other_org: OrgId
) -> None:
    store = Store(recorder)
    await store.enqueue(some_jobs(org, 1, max_attempts=1))
    await lease_jobs(store, org)
    await end_leases(recorder, org)
    fit = {one: some_jobs(one, 2) for one in (org, other_org)}
    await asyncio.gather(*map(store.enqueue, fit.values()))
    recorder.fail(statements.MARK_DEAD)
    one, two = await asyncio.gather(ask(store, org, max_jobs=5), ask(store, other_org, max_jobs=5))
    assert sorted(ids(one)) == sorted(fit[org].ids)
    assert sorted(ids(two)) == sorted(fit[other_org].ids)


async def test_when_setting_aside_fails_in_an_unforeseen_way_all_have_what_fits_and_who_has_none_is_told(
    recorder: Recorder, org: OrgId, other_org: OrgId
) -> None:
    store = Store(recorder)
    third = OrgId(f"{org}-third")
    for one in (org, third):
        await store.enqueue(some_jobs(one, 1, max_attempts=1))
        await lease_jobs(store, one)
        await end_leases(recorder, one)
    fit = {one: some_jobs(one, 2) for one in (org, other_org)}
    await asyncio.gather(*map(store.enqueue, fit.values()))
    recorder.fail(statements.MARK_DEAD, error=psycopg.InternalError("out of order"))
    failing = ask(store, third)
    first, second = await asyncio.gather(ask(store, org), ask(store, other_org))
    assert sorted(ids(first)) == sorted(fit[org].ids)
    assert sorted(ids(second)) == sorted(fit[other_org].ids)
    with pytest.raises(psycopg.InternalError):
        await failing


async def test_a_taker_whom_postgres_refuses_costs_those_beside_it_nothing(
    recorder: Recorder, org: OrgId, other_org: OrgId
) -> None:
    store = Store(recorder)
    stored = {one: some_jobs(one, 20) for one in (org, other_org)}
    await asyncio.gather(*map(store.enqueue, stored.values()))
    before = len(recorder.runs)
    good = [ask(store, one, max_jobs=2) for one in (org, other_org) for _ in range(10)]
    bad = ask(store, org, max_jobs=2, worker="\0")
    with pytest.raises(psycopg.DataError):
        await bad
    got = Counter(name for some in await asyncio.gather(*good) for name in ids(some))
    assert got == Counter(name for jobs in stored.values() for name in jobs.ids)
    assert recorder.count(statements.CLAIM, since=before) <= 11


@pytest.mark.parametrize("error", [None, psycopg.InternalError("out of order")], ids=["away", "unforeseen"])
async def test_what_is_leased_is_handed_out_though_the_shard_fails_before_a_second_turn(
    recorder: Recorder, org: OrgId, other_org: OrgId, error: Exception | None
) -> None:
    """The claim leases the jobs before the shard fails. So no other consumer could get the jobs before their windows
    end."""
    store = Store(recorder)
    expired = some_jobs(org, 1)
    expired.expires_at_us = {0: FAR_FUTURE_US}
    await store.enqueue(expired)
    await reach_expiry(recorder, org)
    fit = {one: some_jobs(one, 2) for one in (org, other_org)}
    await asyncio.gather(*map(store.enqueue, fit.values()))
    recorder.fail(statements.CLAIM, after=1, error=error)
    one, two = await asyncio.gather(ask(store, org), ask(store, other_org))
    assert sorted(ids(one)) == sorted(fit[org].ids)
    assert sorted(ids(two)) == sorted(fit[other_org].ids)


async def test_takers_who_were_served_have_their_jobs_though_the_shard_goes_away_before_the_others_turn(
    recorder: Recorder, org: OrgId
) -> None:
    store = Store(recorder)
    await store.enqueue(some_jobs(org, 2, queue=A))
    await store.enqueue(some_jobs(org, 2, queue=B))
    recorder.fail(statements.CLAIM, after=1)
    first, second = await asyncio.gather(ask(store, org, A), ask(store, org, A, B), return_exceptions=True)
    assert isinstance(second, ShardUnavailable)
    assert isinstance(first, ClaimResult)
    assert len(first.jobs) == 2
    recorder.fail_no_more()
    assert await store.settle(Settlement.ack(org, leases(first))) == [Answer.OK] * 2


# Takers that have left


class Answered(Recorder):
    """Delays the answer to a claim. When the delay begins, the claim has committed."""

    def __init__(self, name: ShardName, dsn: str) -> None:
        super().__init__(name, dsn)
        self.holds = False
        self.committed = asyncio.Event()
        self.let_go = asyncio.Event()

    async def run(self, statement: bytes, parameters: Mapping[str, object]) -> Rows:
        rows = await super().run(statement, parameters)
        if self.holds and statement == statements.CLAIM:
            self.committed.set()
            await self.let_go.wait()
        return rows


@pytest.fixture
async def answered(module_dsn: str) -> AsyncGenerator[Answered, None]:
    opened = Answered(SHARD, module_dsn)
    await opened.open()
    yield opened
    await opened.close()


def given_back(store: Store) -> asyncio.Future[set[QueueId]]:
    """Returns a future. When the store releases jobs the next time, the queues of these jobs become the future's
    result."""
    told: asyncio.Future[set[QueueId]] = asyncio.get_running_loop().create_future()
    store.on_visible = lambda queues: None if told.done() else told.set_result(queues)
    return told


async def test_a_claim_cancelled_before_it_begins_takes_nothing(recorder: Recorder, org: OrgId) -> None:
    store = Store(recorder)
    await store.enqueue(some_jobs(org, 2))
    before = len(recorder.runs)
    claim = ask(store, org)
    await asyncio.sleep(0)
    claim.cancel()
    with pytest.raises(asyncio.CancelledError):
        await claim
    assert len((await ask(store, org)).jobs) == 2
    assert recorder.count(statements.CLAIM, since=before) == 1


async def test_a_claim_cancelled_while_it_is_done_gives_its_jobs_back_uncounted(
    database: Database, module_dsn: str, org: OrgId, other_org: OrgId
) -> None:
    store = Store(database)
    stored = {one: some_jobs(one, 4) for one in (org, other_org)}
    await asyncio.gather(*map(store.enqueue, stored.values()))
    async with await psycopg.AsyncConnection.connect(module_dsn) as rival:
        await rival.execute("LOCK TABLE windrow.queue IN ACCESS EXCLUSIVE MODE")
        taken = [ask(store, org, max_jobs=2), ask(store, org, max_jobs=2), ask(store, other_org)]
        await until_blocked(database)
        told = given_back(store)
        taken[0].cancel()
        await asyncio.wait(taken[:1])
    stays, others = await taken[1], await taken[2]
    assert (len(stays.jobs), len(others.jobs)) == (2, 4)
    queue_ids = await store.names.find([(org, QUEUE)])
    assert await asyncio.wait_for(told, 30) == set(queue_ids.values())
    again = await ask(store, org)
    assert sorted([*ids(again), *ids(stays)]) == sorted(stored[org].ids)
    assert [job.attempt for job in again.jobs] == [1, 1]
    for record in await store.get(org, [job.id for job in again.jobs], include_payload=False):
        assert [attempt.outcome for attempt in record.attempts()] == [Outcome.RELEASED]


@pytest.mark.parametrize("alone", [True, False], ids=["alone", "beside another"])
async def test_a_claim_that_had_committed_when_its_caller_left_gives_its_jobs_back(
    answered: Answered, org: OrgId, other_org: OrgId, alone: bool
) -> None:
    """The caller leaves before the answer arrives. Without the release, no other consumer could get the jobs before
    their windows end."""
    store = Store(answered)
    jobs = some_jobs(org, 2)
    await store.enqueue(jobs)
    told = given_back(store)
    answered.holds = True
    claims = [ask(store, one, window_us=HOUR_US) for one in ([org] if alone else [org, other_org])]
    await asyncio.wait_for(answered.committed.wait(), 30)
    claims[0].cancel()
    await asyncio.wait(claims[:1])
    answered.holds = False
    answered.let_go.set()
    await asyncio.gather(*claims[1:])
    await asyncio.wait_for(told, 30)
    again = await ask(store, org)
    assert sorted(ids(again)) == sorted(jobs.ids)
    assert [job.attempt for job in again.jobs] == [1, 1]


async def test_a_claim_cancelled_in_the_very_turn_that_answers_it_gives_its_jobs_back(
    database: Database, org: OrgId
) -> None:
    """The answer has arrived, but the caller will not read it. Without the release, no other consumer could get the
    jobs before their windows end."""
    store = Store(database)
    jobs = some_jobs(org, 2)
    await store.enqueue(jobs)
    told = given_back(store)
    claims = store._claims
    answered = claims.submit

    def submit(call: object) -> object:
        future = answered(call)  # type: ignore[arg-type]
        # This callback runs when the answer has arrived. The caller's own callback comes after it.
        future.add_done_callback(lambda _: claim.cancel())
        return future

    claims.submit = submit  # type: ignore[method-assign, assignment]
    claim = ask(store, org, window_us=HOUR_US)
    with pytest.raises(asyncio.CancelledError):
        await claim
    claims.submit = answered  # type: ignore[method-assign]
    await asyncio.wait_for(told, 30)
    again = await ask(store, org)
    assert sorted(ids(again)) == sorted(jobs.ids)
    assert [job.attempt for job in again.jobs] == [1, 1]


async def test_no_claim_waits_until_many_large_jobs_have_been_claimed(
    recorder: Recorder, org: OrgId, other_org: OrgId
) -> None:
    store = Store(recorder)
    large = 60
    for _ in range(large // 15):
        jobs = some_jobs(org, 15)
        jobs.payloads = [bytes(1024 * 1024)] * 15
        await store.enqueue(jobs)
    await store.enqueue(some_jobs(other_org, 1))
    before = len(recorder.runs)
    claims = [ask(store, org, max_jobs=1) for _ in range(large)]
    (small,) = (await ask(store, other_org, max_jobs=1)).jobs
    assert small.payload == b"0"
    # The act of this claim has at most eight statements. An act that runs at the same time has at most eight more. All
    # large jobs together would take thirty statements.
    assert recorder.count(statements.CLAIM, since=before) <= 16
    found = [job for claim in await asyncio.gather(*claims) for job in ids(claim)]
    assert len(found) == len(set(found)) == large
