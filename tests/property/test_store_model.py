"""Compares the store with a model, for any order of calls that Hypothesis generates: fencing (I2), idempotent enqueue
(I3), isolation (I4) and conservation (I5). The calls go through two routers that share no memory. Calls are made one by
one, or several at the same time. Some jobs are handed over.

Only tests/timemachine.py makes time pass. The guard of the floors is zero, so that a floor which is too high by one
microsecond loses a job.
"""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import itertools
from collections import Counter
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from router.codec import causes
from router.codec.causes import Surroundings
from shard.admin.queue_admin import QueueAdmin
from shard.lease_token import parse_token, token
from shard.postgres.pool import Database
from shard.queue.claim import ClaimResult
from shard.queue.pending_enqueue import Handed, Handover, Taker
from shard.queue.settle import Nack, Settlement, Snooze
from shard.queue.store import Store
from shard.queue_settings import QueueSettings
from shard.retry_policy import Fixed, to_json
from shard.schedule import TEMPLATE_COLUMNS, ScheduleName, ScheduleSpec, Timing
from shard.schedules.due_schedules import DueSchedules
from shard.schedules.schedule_admin import ScheduleAdmin
from shard.vocabulary import (
    MAX_ATTEMPTS_DEFAULT,
    Alteration,
    Answer,
    Failure,
    JobId,
    Lease,
    Micros,
    NewJobs,
    OrgId,
    Outcome,
    QueueName,
)
from tests import timemachine
from tests.conftest import SHARD
from tests.jobs import HOUR_US, at_once, job_id
from windrow.v1 import job_pb2

T = TypeVar("T")
QUEUES = (QueueName("a"), QueueName("b"))
FAR_FUTURE_US = 4_000_000_000_000_000
LIVE = ("scheduled", "ready", "leased")
# How many rounds a claim has. Each round may mark jobs dead, and the last one answers with the jobs that it has.
TURNS = 6

_numbers = itertools.count()


@dataclass(frozen=True, kw_only=True)
class Wish:
    """A job as its producer has requested it."""

    id: JobId
    org: OrgId
    queue: QueueName
    priority: int
    delayed: bool
    retry_at_once: bool
    max_attempts: int | None
    expires: bool
    key: str | None
    # Whether the key is a live key. A live key counts while its job is live, and not for a window.
    while_live: bool

    @property
    def slot(self) -> tuple[OrgId, QueueName, str | None]:
        return self.org, self.queue, self.key


@dataclass(kw_only=True)
class Job:
    wish: Wish
    state: str
    # The step that made the job visible. It orders the claims of one lane.
    since: int
    attempt: int = 0
    # The number of the latest lease. If the state is "ready", the lease has ended, but its end has not been recorded.
    lease: int | None = None
    expires: bool = False
    past_expiry: bool = False
    # Whether the job still has its live key. A redriven job has none: it gave the key up when it died.
    keyed: bool = True
    ended: dict[int, Outcome] = field(default_factory=dict[int, Outcome])
    outcomes: list[tuple[int, Outcome]] = field(default_factory=list[tuple[int, Outcome]])

    @property
    def exhausted(self) -> bool:
        return self.attempt >= (self.wish.max_attempts or MAX_ATTEMPTS_DEFAULT)

    def end(self, outcome: Outcome) -> None:
        assert self.lease is not None
        self.ended[self.lease] = outcome
        self.outcomes.append((self.attempt, outcome))

    def notice_expiry(self) -> None:
        if self.lease is not None:
            self.end(Outcome.EXPIRED)

    def cancel(self) -> None:
        if self.state == "leased":
            self.end(Outcome.CANCELLED)
        elif self.state == "ready":
            self.notice_expiry()
        self.state, self.lease = "cancelled", None


@dataclass(frozen=True)
class Held:
    """A lease as a consumer remembers it."""

    job: JobId
    number: int

    @property
    def lease(self) -> Lease:
        return Lease(job_hex=self.job.replace("-", ""), number=self.number)


class Sent(NamedTuple):
    """One call of a producer, and the result of its handover."""

    wishes: list[Wish]
    # For some positions in the call: the lease under which a waiting consumer gets the job at this position.
    takers: dict[int, int]
    told: list[Handed]

    def columns(self) -> NewJobs:
        jobs = NewJobs(org=self.wishes[0].org)
        for at, wish in enumerate(self.wishes):
            jobs.ids.append(wish.id)
            jobs.queues.append(wish.queue)
            jobs.kinds.append("k")
            jobs.payloads.append(b"x")
            jobs.priorities[at] = wish.priority
            jobs.retries[at] = to_json(Fixed(delay_us=0 if wish.retry_at_once else HOUR_US))
            if wish.delayed:
                jobs.delay_us[at] = HOUR_US
            if wish.max_attempts is not None:
                jobs.max_attempts[at] = wish.max_attempts
            if wish.expires:
                jobs.expires_at_us[at] = FAR_FUTURE_US
            if wish.key is not None and wish.while_live:
                jobs.live_keys[at] = wish.key
            elif wish.key is not None:
                jobs.dedup_keys[at] = wish.key
                jobs.dedup_window_us[at] = HOUR_US
        return jobs

    def handover(self) -> Handover | None:
        if not self.takers:
            return None
        takers = {at: Taker(number, "waiter", HOUR_US) for at, number in self.takers.items()}
        return Handover(takers=takers, done=self.told.append)


class Asked(NamedTuple):
    """One call of a consumer for jobs."""

    org: OrgId
    queues: list[QueueName]
    max_jobs: int


@dataclass(kw_only=True)
class Memory:
    """The model: the state that should be the result of the calls of producers and consumers."""

    model: dict[JobId, Job] = field(default_factory=dict[JobId, Job])
    # For each dedup key: the job that holds it, and whether its window still lasts.
    keys: dict[tuple[OrgId, QueueName, str | None], tuple[JobId, bool]] = field(
        default_factory=dict[tuple[OrgId, QueueName, str | None], tuple[JobId, bool]]
    )
    queues: set[tuple[OrgId, QueueName]] = field(default_factory=set[tuple[OrgId, QueueName]])
    # Every lease that a consumer has ever got, whether or not it is still live.
    given: list[Held] = field(default_factory=list[Held])


@dataclass(frozen=True, kw_only=True)
class World:
    runner: asyncio.Runner
    database: Database
    books: QueueAdmin

    def do(self, act: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(act)


@pytest.fixture
def world(module_dsn: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr("shard.queue.claim_floor.GUARD_US", 0)
    monkeypatch.setattr("shard.queue.sweep.GUARD_US", 0)
    database = Database(SHARD, module_dsn, connections=1)
    reader = Database(SHARD, module_dsn, connections=1, may_scan=True)
    with asyncio.Runner() as runner:
        for each in (database, reader):
            runner.run(each.open())
        yield World(runner=runner, database=database, books=QueueAdmin(reader))
        for each in (database, reader):
            runner.run(each.close())


# The values that Hypothesis generates must not depend on the state. Otherwise two runs of one example could differ,
# because Postgres may return equal rows in another order, or two stores may run in another order. So Hypothesis
# generates numbers. A number modulo the number of candidates selects a candidate.
numbers = st.integers(0, 999)
given_picks = st.lists(
    st.tuples(st.sampled_from(("live", "overtaken", "ended", "any")), numbers), min_size=1, max_size=4
)
hows = st.sampled_from(("policy", "at once", "later", "kill"))


def pick(pool: Sequence[T], number: int) -> T:
    return pool[number % len(pool)]


wishes: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {
        "queue": st.sampled_from(QUEUES),
        "priority": st.sampled_from((5, 1, 9)),
        "delayed": st.sampled_from((False, False, True)),
        "retry_at_once": st.sampled_from((True, False)),
        "max_attempts": st.sampled_from((None, 1, 2)),
        "expires": st.sampled_from((False, False, True)),
        "key": st.sampled_from((None, None, "k1", "k2")),
        "while_live": st.booleans(),
    }
)
# The fields that a repeated job changes. In most cases it changes no field.
changed: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.just({}),
    st.fixed_dictionaries(
        {},
        optional={
            "key": st.sampled_from((None, "k1", "k2")),
            "while_live": st.booleans(),
            "queue": st.sampled_from(QUEUES),
        },
    ),
)
alterations = st.builds(
    Alteration,
    priority=st.sampled_from((None, 1, 9)),
    run_at_us=st.none(),
    delay_us=st.sampled_from((None, 0, HOUR_US)),
    attributes=st.sampled_from((None, "{}")),
)
stores_ = st.integers(0, 1)
queue_lists = st.one_of(st.just(list(QUEUES)), st.lists(st.sampled_from(QUEUES), min_size=1, unique=True))
# The first org is chosen more often, because interesting histories need many calls to one org.
orgs = st.sampled_from((0, 0, 0, 1))
seldom = st.sampled_from((False, False, False, False, True))


class StoreMachine(RuleBasedStateMachine):
    world: ClassVar[World]

    def __init__(self) -> None:
        super().__init__()
        example = next(_numbers)
        self.orgs = OrgId(f"model-{example}-a"), OrgId(f"model-{example}-b")
        self.stores = [Store(self.world.database), Store(self.world.database)]
        self.memory = Memory()
        self.paused: set[tuple[OrgId, QueueName]] = set()
        self.handed = itertools.count(1)
        self.step = 0

    @property
    def model(self) -> dict[JobId, Job]:
        return self.memory.model

    @property
    def given(self) -> list[Held]:
        return self.memory.given

    @property
    def queues(self) -> set[tuple[OrgId, QueueName]]:
        return self.memory.queues

    def some_given(self, picks: Sequence[tuple[str, int]]) -> list[Held]:
        """Returns leases for one call. Each lease is of one of four types: live, replaced by a newer lease, ended
        without a later claim, or any."""
        pools: dict[str, list[Held]] = {}
        for held in self.given:
            job = self.model[held.job]
            if job.state in ("leased", "ready") and job.lease is not None:
                live = "live" if job.state == "leased" else "ended"
                pools.setdefault(live if job.lease == held.number else "overtaken", []).append(held)
        return [pick(pools.get(pool, self.given), number) for pool, number in picks]

    def do(self, act: Coroutine[Any, Any, T]) -> T:
        self.step += 1
        return self.world.do(act)

    def of(self, org: OrgId, *states: str) -> list[Job]:
        return [job for job in self.model.values() if job.wish.org == org and job.state in states]

    # Producers

    # There are only two rules here, because Hypothesis leaves out rules at random, and without claims nothing
    # interesting happens.

    @initialize(store=stores_, data=st.data())
    def begin(self, store: int, data: st.DataObject) -> None:
        for org in (0, 1):
            self.enqueue([store], [org], data)

    @rule(
        call=st.sampled_from(("enqueue", "claim", "claim", "end", "end", "end", "cancel", "alter")),
        callers=st.lists(st.tuples(stores_, orgs, seldom), min_size=1, max_size=4),
        data=st.data(),
    )
    def work(self, call: str, callers: list[tuple[int, int, bool]], data: st.DataObject) -> None:
        stores = [store for store, _, _ in callers]
        tenants = [org for _, org, _ in callers]
        match call:
            case "claim":
                self.claim(
                    stores,
                    [
                        Asked(self.orgs[org], data.draw(queue_lists), data.draw(st.sampled_from((100, 1, 2, 3))))
                        for org in tenants
                    ],
                )
            case "end":
                self.end_or_extend(stores, [foreign for _, _, foreign in callers], data)
            case "cancel":
                picks = data.draw(st.lists(numbers, min_size=1, max_size=2))
                self.cancel(stores[0], callers[0][2], [pick(list(self.model), number) for number in picks])
            case "alter":
                picks = data.draw(st.lists(numbers, min_size=1, max_size=2))
                change = data.draw(alterations)
                self.alter(stores[0], callers[0][2], [pick(list(self.model), number) for number in picks], change)
            case _:
                self.enqueue(stores, tenants, data)

    def enqueue(self, stores: Sequence[int], tenants: Sequence[int], data: st.DataObject) -> None:
        """Enqueues new jobs. Also repeats jobs that were sent before, or that other calls send at the same time, like a
        producer that did not get the answer. Some of the repeated jobs have another key or another queue. Consumers
        wait for some of the jobs."""
        calls: list[Sent] = []
        for org in tenants:
            tenant = self.orgs[org]
            batch = [
                Wish(id=job_id(), org=tenant, **wish) for wish in data.draw(st.lists(wishes, min_size=1, max_size=4))
            ]
            sent_before = [job.wish for job in self.of(tenant, *LIVE, "succeeded", "dead", "cancelled")]
            sent_before += [wish for sent in calls for wish in sent.wishes if wish.org == tenant] + batch
            again = [
                dataclasses.replace(pick(sent_before, number), **changes)
                for number, changes in data.draw(st.lists(st.tuples(numbers, changed), max_size=3))
            ]
            wishes_ = data.draw(st.permutations([*batch, *again]))
            # Only jobs that are due at once, and cannot have expired, are promised to a consumer.
            due = [at for at, wish in enumerate(wishes_) if not wish.delayed and not wish.expires]
            promised = [pick(due, number) for number in data.draw(st.lists(numbers, max_size=4)) if due]
            number = next(self.handed)
            calls.append(Sent(wishes_, dict.fromkeys(promised, number), []))
        answers = self.do(
            at_once(
                *[
                    self.stores[store].enqueue(sent.columns(), sent.handover())
                    for store, sent in zip(stores, calls, strict=True)
                ]
            )
        )
        for sent in calls:
            assert len(sent.told) == bool(sent.takers), "told exactly once"
        # The result must be as if these calls had been made one after another, in some order.
        before = self.memory
        for order in itertools.permutations(range(len(calls))):
            self.memory = copy.deepcopy(before)
            if all(self.enqueued(calls[turn], answers[turn], before.model) for turn in order):
                assert all(name in self.model for known in answers for name in known.values())
                return
        raise AssertionError(f"no order of calls explains these answers: {answers} to {calls}")

    def enqueued(self, sent: Sent, answer: dict[int, JobId], before: Mapping[JobId, Job]) -> bool:
        """Applies a batch to the model. Returns whether the model explains the answer and the report of the handover.
        `before`: the jobs that were stored before any of the simultaneous calls."""
        holders = [self.holder(wish) for wish in sent.wishes]
        known, handed = self.stored(sent.wishes, sent.takers)
        told = {at for each in sent.told for at in each.positions}
        if told != handed or known.keys() != answer.keys():
            return False
        # Another call may store the job at the same moment. In this case, there are two possible answers. This call may
        # find the job by its id and not by its key, because a call afterwards looks up the jobs that it did not store,
        # and an id has precedence over a key. Or this call may find the job by its key, if it looked the key up just
        # before the other call stored the id with another key.
        return all(
            answer[at] in (known_as, sent.wishes[at].id)
            or (answer[at] == holders[at] and sent.wishes[at].id not in before)
            for at, known_as in known.items()
        )

    def stored(self, wishes_: Sequence[Wish], takers: dict[int, int]) -> tuple[dict[int, JobId], set[int]]:
        """Returns the positions of known jobs with their ids, and the positions of jobs that were leased to their
        takers. A job that is not stored has no effect."""
        known: dict[int, JobId] = {}
        handed: set[int] = set()
        # If a call names a job twice, none of its jobs is promised.
        takers = takers if len({wish.id for wish in wishes_}) == len(wishes_) else {}
        named: dict[JobId, JobId] = {}
        for at, wish in enumerate(wishes_):
            if wish.id in named:
                # The answer is the one for the position at which the call named the job first.
                known[at] = named[wish.id]
            elif wish.id in self.model:
                known[at] = wish.id
            elif (holder := self.holder(wish)) is not None:
                known[at] = holder
            else:
                self.queues.add((wish.org, wish.queue))
                if wish.key is not None and not wish.while_live:
                    self.memory.keys[wish.slot] = (wish.id, True)
                state = "scheduled" if wish.delayed else "ready"
                job = self.model[wish.id] = Job(wish=wish, state=state, since=self.step, expires=wish.expires)
                if at in takers and (wish.org, wish.queue) not in self.paused:
                    handed.add(at)
                    job.state, job.attempt, job.lease = "leased", 1, takers[at]
                    self.given.append(Held(wish.id, takers[at]))
            named.setdefault(wish.id, known.get(at, wish.id))
        return known, handed

    def holder(self, wish: Wish) -> JobId | None:
        """Returns the job that has the dedup key of the wish."""
        if wish.key is None:
            return None
        if wish.while_live:
            return self.live_keys().get(wish.slot)
        name, lasts = self.memory.keys.get(wish.slot, (None, False))
        return name if lasts else None

    def live_keys(self) -> dict[tuple[OrgId, QueueName, str | None], JobId]:
        holders = [job.wish for job in self.model.values() if job.keyed and job.wish.while_live and job.state in LIVE]
        return {wish.slot: wish.id for wish in holders if wish.key is not None}

    # Consumers

    def claim(self, stores: Sequence[int], asks: Sequence[Asked]) -> None:
        answers = self.do(
            at_once(
                *[
                    self.stores[store].claim(org, queues, max_jobs=most, window_us=HOUR_US, worker=f"w{store}")
                    for store, (org, queues, most) in zip(stores, asks, strict=True)
                ]
            )
        )
        ready = {
            job.wish.id: job
            for org in self.orgs
            for job in self.of(org, "ready")
            if (org, job.wish.queue) not in self.paused
        }
        unfit = {name: job for name, job in ready.items() if job.past_expiry or job.exhausted}
        aside: set[JobId] = set()
        for org in self.orgs:
            names = [name for name, job in unfit.items() if job.wish.org == org]
            records = self.world.do(self.stores[0].get(org, names, include_payload=False))
            aside |= {record.id for record in records if record.state not in LIVE}
        claimed = [job.id for taken in answers for job in taken.jobs]
        assert len(set(claimed)) == len(claimed)
        left = [job for name, job in ready.items() if name not in aside and name not in claimed]
        for ask, taken in zip(asks, answers, strict=True):
            self.check_claim(ask, taken, ready, left, complete=len(aside) < TURNS)
        asked = {(ask.org, queue) for ask in asks for queue in ask.queues}
        assert {(ready[name].wish.org, ready[name].wish.queue) for name in aside} <= asked
        assert not unfit.keys() & set(claimed)
        for name in aside:
            job = ready[name]
            job.notice_expiry()
            job.state, job.lease = "cancelled" if job.past_expiry else "dead", None
        for taken in answers:
            for answer in taken.jobs:
                job = ready[answer.id]
                job.notice_expiry()
                _, lease = parse_token(token(taken.prefix, answer.id))
                assert lease.number not in job.ended
                assert answer.attempt == job.attempt + 1
                assert (answer.queue, answer.priority) == (job.wish.queue, job.wish.priority)
                job.attempt, job.state, job.lease = job.attempt + 1, "leased", lease.number
                self.given.append(Held(answer.id, lease.number))

    def check_claim(
        self, ask: Asked, taken: ClaimResult, ready: dict[JobId, Job], left: Sequence[Job], *, complete: bool
    ) -> None:
        """Checks one answer. `left`: the jobs that were ready during the whole call and that no consumer got."""
        jobs = [ready[job.id] for job in taken.jobs]
        assert all(job.wish.org == ask.org and job.wish.queue in ask.queues for job in jobs)
        left = [job for job in left if job.wish.org == ask.org and job.wish.queue in ask.queues]
        # A call gets as many jobs as there are, up to its limit.
        assert len(jobs) <= ask.max_jobs
        if complete and len(jobs) < ask.max_jobs:
            assert left == []
        # Jobs of higher priorities come first. In each lane, the oldest jobs come first. The answer has this order.
        for job in jobs:
            assert all(job.wish.priority <= other.wish.priority for other in left)
            lane = job.wish.queue, job.wish.priority
            assert all(job.since <= other.since for other in left if (other.wish.queue, other.wish.priority) == lane)
        order = [(job.priority, job.run_at) for job in taken.jobs]
        assert order == sorted(order)

    def is_live(self, held: Held, org: OrgId) -> bool:
        job = self.model[held.job]
        return job.wish.org == org and job.state == "leased" and job.lease == held.number

    def missed(self, held: Held, org: OrgId, same: Outcome | None) -> Answer:
        """Returns the answer for a lease that is not live. The answer is OK if an earlier call of this verb has ended
        the lease."""
        job = self.model[held.job]
        if job.wish.org != org:
            return Answer.NOT_FOUND
        if same is not None and job.ended.get(held.number) is same:
            return Answer.OK
        return Answer.CANCELLED if job.state == "cancelled" else Answer.STALE

    def caller(self, held: Sequence[Held], foreign: bool) -> OrgId:
        org = self.model[held[0].job].wish.org
        return self.orgs[self.orgs.index(org) - 1] if foreign else org

    def end_or_extend(self, stores: Sequence[int], foreign: Sequence[bool], data: st.DataObject) -> None:
        """Makes consumers' calls with leases, which may be live or not. A few calls name another org."""
        how = data.draw(st.sampled_from(("ack", "nack", "extend", "release", "snooze")))
        picks = [data.draw(given_picks) for _ in stores]
        drawn = data.draw(st.lists(hows, min_size=4, max_size=4))
        if not self.given:
            return
        calls: list[tuple[Store, OrgId, list[Held]]] = []
        for store, is_foreign, each in zip(stores, foreign, picks, strict=True):
            held = self.some_given(each)
            calls.append((self.stores[store], self.caller(held, is_foreign), held))
        match how:
            case "ack":
                self.ack(calls)
            case "nack":
                # If a lease were nacked in two ways at once, either result would be correct.
                named = dict.fromkeys(each for _, _, held in calls for each in held)
                self.nack(calls, dict(zip(named, itertools.cycle(drawn))))
            case "extend":
                self.extend(calls)
            case _:
                self.release(calls, later=how == "snooze")

    def expected(self, calls: Sequence[tuple[Store, OrgId, list[Held]]], same: Outcome | None) -> list[list[Answer]]:
        """Returns the expected answers. A lease that several calls name is ended once, and all calls of its org get
        OK."""
        return [
            [Answer.OK if self.is_live(each, org) else self.missed(each, org, same) for each in held]
            for _, org, held in calls
        ]

    def live(self, calls: Sequence[tuple[Store, OrgId, list[Held]]]) -> list[Held]:
        return list(dict.fromkeys(each for _, org, held in calls for each in held if self.is_live(each, org)))

    def ack(self, calls: Sequence[tuple[Store, OrgId, list[Held]]]) -> None:
        expected, live = self.expected(calls, Outcome.ACKED), self.live(calls)
        assert (
            self.do(at_once(*[s.settle(Settlement.ack(org, [h.lease for h in held])) for s, org, held in calls]))
            == expected
        )
        for each in live:
            job = self.model[each.job]
            job.end(Outcome.ACKED)
            job.state = "succeeded"

    def nack(self, calls: Sequence[tuple[Store, OrgId, list[Held]]], how_of: dict[Held, str]) -> None:
        expected, live = self.expected(calls, Outcome.NACKED), self.live(calls)
        delays = {"policy": None, "at once": 0, "later": HOUR_US, "kill": None}
        nacks = {
            held: Nack(
                lease=held.lease,
                failure=Failure(message="e", permanent=how == "kill"),
                retry_after_us=delays[how],
            )
            for held, how in how_of.items()
        }
        assert (
            self.do(at_once(*[s.settle(Settlement.nack(org, [nacks[h] for h in held])) for s, org, held in calls]))
            == expected
        )
        for held in live:
            how = how_of[held]
            job = self.model[held.job]
            job.end(Outcome.NACKED)
            at_once_ = how == "at once" or (how == "policy" and job.wish.retry_at_once)
            if how == "kill" or job.exhausted:
                job.state = "dead"
            else:
                job.state = "ready" if at_once_ else "scheduled"
                job.since = self.step
            job.lease = None

    def extend(self, calls: Sequence[tuple[Store, OrgId, list[Held]]]) -> None:
        expected = self.expected(calls, None)
        acts = [
            s.settle(Settlement.extend(org, [h.lease for h in held], window_us=2 * HOUR_US)) for s, org, held in calls
        ]
        assert self.do(at_once(*acts)) == expected

    def release(self, calls: Sequence[tuple[Store, OrgId, list[Held]]], *, later: bool) -> None:
        expected, live = self.expected(calls, Outcome.RELEASED), self.live(calls)

        def settlement(org: OrgId, held: Sequence[Held]) -> Settlement:
            if later:
                return Settlement.snooze(org, [Snooze(each.lease, HOUR_US, "not yet") for each in held])
            return Settlement.release(org, [each.lease for each in held])

        assert self.do(at_once(*[s.settle(settlement(org, held)) for s, org, held in calls])) == expected
        for each in live:
            job = self.model[each.job]
            job.end(Outcome.RELEASED)
            job.attempt -= 1
            job.state, job.lease, job.since = "scheduled" if later else "ready", None, self.step

    # Operators

    def alter(self, store: int, foreign: bool, names: list[JobId], change: Alteration) -> None:
        org = self.model[names[0]].wish.org
        if foreign:
            org = self.orgs[self.orgs.index(org) - 1]
        expected: list[Answer] = []
        for name in names:
            job = self.model[name]
            if job.wish.org != org:
                expected.append(Answer.NOT_FOUND)
            elif job.state in ("scheduled", "ready"):
                expected.append(Answer.OK)
            else:
                expected.append(Answer.CANCELLED if job.state == "cancelled" else Answer.STALE)
        assert self.do(self.stores[store].alter(org, names, change)) == expected
        for name in dict.fromkeys(names):
            job = self.model[name]
            if job.wish.org != org or job.state not in ("scheduled", "ready"):
                continue
            goes_on = change.delay_us is None and change.priority in (None, job.wish.priority)
            if goes_on:
                continue
            job.wish = dataclasses.replace(job.wish, priority=change.priority or job.wish.priority)
            job.notice_expiry()
            job.lease, job.since = None, self.step
            if change.delay_us is not None:
                job.state = "scheduled" if change.delay_us else "ready"

    def cancel(self, store: int, foreign: bool, names: list[JobId]) -> None:
        org = self.model[names[0]].wish.org
        if foreign:
            org = self.orgs[self.orgs.index(org) - 1]
        expected: list[Answer] = []
        for name in names:
            job = self.model[name]
            if job.wish.org != org:
                expected.append(Answer.NOT_FOUND)
            else:
                expected.append(Answer.STALE if job.state == "succeeded" else Answer.OK)
        assert self.do(self.stores[store].cancel(org, names, reason="no")) == expected
        for name in names:
            job = self.model[name]
            if job.wish.org == org and job.state != "succeeded":
                job.cancel()

    @rule(
        call=st.sampled_from(
            (
                "time",
                "time",
                "time",
                "redrive",
                "redrive",
                "purge",
                "pause",
                "resume",
                "fire",
                "sweep",
                "fold",
                "restart",
                "explain",
            )
        ),
        org=orgs,
        queue=st.sampled_from(QUEUES),
        store=stores_,
        what=st.sampled_from(("leases", "leases", "scheduled", "scheduled", "expiries", "dedup windows")),
    )
    def operate(self, call: str, org: int, queue: QueueName, store: int, what: str) -> None:
        match call:
            case "time":
                self.time_passes(what, org)
            case "redrive":
                self.redrive(org, queue, by_ids=self.stores[store] if what == "leases" else None)
            case "purge":
                self.purge(org, queue, include_dead=store == 0)
            case "pause" | "resume":
                self.pause_or_resume(org, queue, paused=call == "pause")
            case "fire":
                self.fire(org, queue, self.stores[store])
            case "sweep":
                self.do(self.stores[store].sweep())
            case "fold":
                self.do(self.stores[store].fold_tally())
            case "explain":
                self.explain(org, self.stores[store])
            case _:
                # A router restarts, and loses the numbers and floors that it remembered.
                self.stores[store] = Store(self.world.database)

    def explain(self, org: int, store: Store) -> None:
        """Checks that every job has a cause, and that the first cause fits the state of the job."""
        tenant = self.orgs[org]
        for job in self.of(tenant, *LIVE, "succeeded", "dead", "cancelled"):
            facts = self.do(store.explain_job(tenant, job.wish.id))
            assert facts is not None
            told = causes.of_job(facts, SHARD, Surroundings())
            assert job_pb2.JobState.Name(told.state) == f"JOB_STATE_{job.state.upper()}"
            assert all(cause.WhichOneof("cause") for cause in told.causes)
            assert told.causes[0].WhichOneof("cause") in self.decisive(job)

    def decisive(self, job: Job) -> set[str]:
        if job.state == "leased":
            return {"leased"}
        if job.state in LIVE and (job.past_expiry or job.exhausted):
            return {"expired" if job.past_expiry else "out_of_attempts"}
        match job.state:
            case "scheduled":
                return {"scheduled", "backing_off"}
            case "ready":
                # No consumer is recorded, because stores claim without routers.
                return {"paused" if (job.wish.org, job.wish.queue) in self.paused else "no_consumer"}
            case "dead":
                return {"dead"}
            case _:
                return {"finished", "expired"} if job.state == "cancelled" else {"finished"}

    def redrive(self, org: int, queue: QueueName, *, by_ids: Store | None) -> None:
        tenant = self.orgs[org]
        if (tenant, queue) not in self.queues:
            return
        dead = [job for job in self.of(tenant, "dead") if job.wish.queue == queue]
        if by_ids is None or not dead:
            call = self.world.books.redrive(tenant, queue, kind="", died_after=None, died_before=None, limit=1000)
            assert self.do(call) == len(dead)
        else:
            assert self.do(by_ids.redrive(tenant, [job.wish.id for job in dead])) == [Answer.OK] * len(dead)
        for job in dead:
            job.state, job.attempt, job.lease, job.since = "ready", 0, None, self.step
            job.expires = job.past_expiry = job.keyed = False

    def purge(self, org: int, queue: QueueName, include_dead: bool) -> None:
        tenant = self.orgs[org]
        if (tenant, queue) not in self.queues:
            return
        states = ("scheduled", "ready", "dead") if include_dead else ("scheduled", "ready")
        chosen = [job for job in self.of(tenant, *states) if job.wish.queue == queue]
        call = self.world.books.purge_queue(tenant, queue, limit=1000, include_dead=include_dead)
        assert self.do(call) == len(chosen)
        for job in chosen:
            job.cancel()

    def fire(self, org: int, queue: QueueName, store: Store) -> None:
        """A schedule stores a job. A router that comes later finds nothing to do."""
        tenant, name = self.orgs[org], ScheduleName(f"s{next(_numbers)}")
        admin, schedules = ScheduleAdmin(self.world.database, store), DueSchedules(self.world.database, store)
        spec = ScheduleSpec(timing=Timing(at=Micros(1_700_000_000_000_000)))
        template = {
            **dict.fromkeys(TEMPLATE_COLUMNS),
            "queue": queue,
            "kind": "k",
            "payload": b"x",
            "retry": to_json(Fixed(delay_us=HOUR_US)),
        }
        self.do(admin.create(tenant, name, spec, template, paused=False, epoch=1))
        due = b"UPDATE windrow.schedule SET next_at = once_at, wake_at = now() WHERE name = %(name)s"
        self.do(self.world.database.run(due, {"name": name}))
        assert self.do(schedules.fire()).jobs == 1
        assert self.do(schedules.fire()).jobs == 0
        stored = self.do(admin.get(tenant, name)).schedule.last_job
        assert stored is not None
        self.queues.add((tenant, queue))
        made = Wish(
            id=stored,
            org=tenant,
            queue=queue,
            priority=5,
            delayed=False,
            retry_at_once=False,
            max_attempts=None,
            expires=False,
            key=None,
            while_live=False,
        )
        self.model[stored] = Job(wish=made, state="ready", since=self.step)
        self.do(admin.delete(tenant, name, epoch=1))

    def pause_or_resume(self, org: int, queue: QueueName, paused: bool) -> None:
        name = self.orgs[org], queue
        if name in self.queues:
            self.do(self.world.books.alter_queue(*name, QueueSettings(paused=paused)))
            self.paused = self.paused | {name} if paused else self.paused - {name}

    # Time

    def time_passes(self, what: str, org: int) -> None:
        match what:
            case "leases":
                self.leases_end(org)
            case "scheduled":
                self.scheduled_jobs_become_due(org)
            case "expiries":
                self.expiries_come(org)
            case _:
                self.dedup_windows_end(org)

    def leases_end(self, org: int) -> None:
        tenant = self.orgs[org]
        leased = self.of(tenant, "leased")
        assert self.do(timemachine.end_leases(self.world.database, tenant)) == len(leased)
        for job in leased:
            job.state, job.since = "ready", self.step

    def scheduled_jobs_become_due(self, org: int) -> None:
        tenant = self.orgs[org]
        scheduled = self.of(tenant, "scheduled")
        assert self.do(timemachine.make_due(self.world.database, tenant)) == len(scheduled)
        for job in scheduled:
            job.state, job.since = "ready", self.step

    def expiries_come(self, org: int) -> None:
        tenant = self.orgs[org]
        self.do(timemachine.reach_expiry(self.world.database, tenant))
        for job in self.of(tenant, *LIVE):
            job.past_expiry = job.expires

    def dedup_windows_end(self, org: int) -> None:
        tenant = self.orgs[org]
        self.do(timemachine.end_dedup_windows(self.world.database, tenant))
        keys = self.memory.keys
        self.memory.keys = {slot: (name, alive and slot[0] != tenant) for slot, (name, alive) in keys.items()}

    # What must hold after every step

    @invariant()
    def the_books_balance_and_agree_with_the_model(self) -> None:
        books = {entry.org: entry for entry in self.world.do(self.world.books.check())}
        for org in self.orgs:
            counts = Counter(job.state for job in self.model.values() if job.wish.org == org)
            if org not in books:
                assert not counts
                continue
            entry = books[org]
            assert entry.balanced
            assert entry.accepted == counts.total()
            found = {state: getattr(entry, state) for state in (*LIVE, "succeeded", "dead", "cancelled")}
            assert +Counter(found) == counts

    @invariant()
    def every_job_is_where_the_model_has_it(self) -> None:
        for org in self.orgs:
            names = [name for name, job in self.model.items() if job.wish.org == org]
            records = self.world.do(self.stores[0].get(org, names, include_payload=False))
            assert sorted(record.id for record in records) == sorted(names)
            for record in records:
                job = self.model[record.id]
                assert (record.state, record.attempt, record.queue) == (job.state, job.attempt, job.wish.queue)
                ended = [(attempt.attempt, attempt.outcome) for attempt in record.attempts()]
                unseen = [(job.attempt, Outcome.EXPIRED)] if job.state == "ready" and job.lease is not None else []
                assert ended == job.outcomes + unseen

    @invariant()
    def only_stored_jobs_hold_keys(self) -> None:
        rows = self.world.do(
            self.world.database.run(
                b"""
                SELECT q.org, q.queue, d.key, d.job_id::text, d.until > now()
                FROM windrow.dedup d JOIN windrow.queue q USING (queue_id)
                WHERE q.org = ANY (%(orgs)s)
                """,
                {"orgs": list(self.orgs)},
            )
        )
        assert {(org, queue, key): (job, lives) for org, queue, key, job, lives in rows} == self.memory.keys
        rows = self.world.do(
            self.world.database.run(
                b"""
                SELECT q.org, q.queue, j.live_key, j.id::text
                FROM windrow.job j JOIN windrow.queue q USING (queue_id)
                WHERE q.org = ANY (%(orgs)s) AND j.live_key IS NOT NULL
                """,
                {"orgs": list(self.orgs)},
            )
        )
        assert len(rows) == len(self.live_keys())
        assert {(org, queue, key): job for org, queue, key, job in rows} == self.live_keys()

    def teardown(self) -> None:
        # The next example counts from zero.
        for table in ("job", "dead", "finished", "dedup"):
            statement = (
                f"DELETE FROM windrow.{table} WHERE queue_id IN "
                "(SELECT queue_id FROM windrow.queue WHERE org = ANY (%(orgs)s))"
            )
            self.world.do(self.world.database.run(statement.encode(), {"orgs": list(self.orgs)}))
        self.world.do(
            self.world.database.run(
                b"DELETE FROM windrow.tally t USING windrow.org o WHERE o.org_id = t.org_id AND o.org = ANY (%(orgs)s)",
                {"orgs": list(self.orgs)},
            )
        )


@pytest.mark.thorough
@pytest.mark.timeout(3600)
def test_the_store_does_what_the_model_does(world: World) -> None:
    class Bound(StoreMachine):
        pass

    Bound.world = world
    run_state_machine_as_test(
        Bound,
        settings=settings(
            max_examples=settings().max_examples * 3 // 10,
            stateful_step_count=30,
            suppress_health_check=(HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much),
        ),
    )
