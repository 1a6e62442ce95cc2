"""The shares of a pool of workers that orgs get from the schedule. Workers, jobs and time are simulated."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.fair.schedule import Schedule
from shard.vocabulary import OrgId, ShardName
from tests.effort import trials

SHARD, OTHER = ShardName("s1"), ShardName("s2")
WINDOW_S = 1e9


@dataclass
class Pool:
    """Workers of a pool. `job_s` returns how long the next job of an org takes."""

    workers: int
    job_s: Callable[[OrgId], float]
    weights: Mapping[OrgId, float] = field(default_factory=dict[OrgId, float])
    now_s: float = 0.0

    def __post_init__(self) -> None:
        self.schedule = Schedule(lambda org: self.weights.get(org, 1.0))
        self.seconds = defaultdict[OrgId, float](float)
        self.jobs = Counter[OrgId]()
        self.backlog = Counter[OrgId]()
        self.order: list[OrgId] = []
        # An org whose new jobs are handed over as soon as its turn comes and a worker is free.
        self.hand_over: OrgId | None = None
        self._free = self.workers
        self._ends: list[tuple[float, int, OrgId, float]] = []
        self._numbers = itertools.count()

    def enqueue(self, org: OrgId, jobs: int) -> None:
        self.backlog[org] += jobs
        self.schedule.ready(org, SHARD)

    def run(self, until_s: float) -> None:
        while True:
            self.schedule.accrue(now_s=self.now_s)
            if self.hand_over is not None:
                for _ in range(self.schedule.turns(self.hand_over, at_most=self._free)):
                    number, took_s = next(self._numbers), self.job_s(self.hand_over)
                    self.schedule.began(self.hand_over, number, now_s=self.now_s, until_s=self.now_s + WINDOW_S)
                    self._free -= 1
                    heapq.heappush(self._ends, (self.now_s + took_s, number, self.hand_over, took_s))
            while self._free and (pick := self.schedule.pick([SHARD])) is not None:
                org, number, took_s = pick.org, next(self._numbers), self.job_s(pick.org)
                self.schedule.served(pick.start)
                self.schedule.began(
                    org, number, now_s=self.now_s, until_s=self.now_s + WINDOW_S, charged_s=pick.charged_s
                )
                self.order.append(org)
                self.jobs[org] += 1
                self.backlog[org] -= 1
                if not self.backlog[org]:
                    self.schedule.idle(org, SHARD)
                self._free -= 1
                heapq.heappush(self._ends, (self.now_s + took_s, number, org, took_s))
            if not self._ends or self._ends[0][0] > until_s:
                self.now_s = until_s
                return
            self.now_s, number, org, took_s = heapq.heappop(self._ends)
            self.schedule.ended(number, now_s=self.now_s)
            self.seconds[org] += took_s
            self._free += 1


def orgs(count: int) -> list[OrgId]:
    return [OrgId(f"org-{n}") for n in range(count)]


def jain(shares: Sequence[float]) -> float:
    """Returns Jain's index of fairness: 1 if all n shares are equal, and 1/n if one org has everything."""
    return sum(shares) ** 2 / (len(shares) * sum(share * share for share in shares))


@given(st.integers(0, 2**32), st.integers(1, 40))
@settings(max_examples=trials(3, thorough=100), deadline=None)
def test_fifty_equal_orgs_get_equal_worker_seconds_whatever_their_jobs_take(seed: int, workers: int) -> None:
    luck = random.Random(seed)
    typical = {org: luck.uniform(0.01, 2) for org in orgs(50)}
    pool = Pool(workers, lambda org: typical[org] * luck.uniform(0.5, 1.5))
    for org in typical:
        pool.enqueue(org, 10_000_000)
    pool.run(until_s=50 * 100 / workers)
    assert jain([pool.seconds[org] for org in typical]) >= 0.98


@pytest.mark.parametrize("workers", [1, 10])
def test_weights_of_one_two_and_four_give_shares_of_one_two_and_four(workers: int) -> None:
    a, b, c = orgs(3)
    pool = Pool(workers, lambda _: 0.1, {a: 1, b: 2, c: 4})
    for org in (a, b, c):
        pool.enqueue(org, 1_000_000)
    pool.run(until_s=2000 / workers)
    assert pool.seconds[b] / pool.seconds[a] == pytest.approx(2, rel=0.05)
    assert pool.seconds[c] / pool.seconds[a] == pytest.approx(4, rel=0.05)


def test_an_org_whose_jobs_take_ten_times_as_long_gets_a_tenth_of_the_jobs() -> None:
    slow, fast = orgs(2)
    pool = Pool(10, lambda org: 1.0 if org == slow else 0.1)
    pool.enqueue(slow, 1_000_000)
    pool.enqueue(fast, 1_000_000)
    pool.run(until_s=1000)
    assert pool.seconds[slow] == pytest.approx(pool.seconds[fast], rel=0.05)
    assert pool.jobs[fast] / pool.jobs[slow] == pytest.approx(10, rel=0.05)


def test_an_org_alone_gets_all_workers() -> None:
    (org,) = orgs(1)
    pool = Pool(4, lambda _: 1.0, {org: 0.01})
    pool.enqueue(org, 1_000_000)
    pool.run(until_s=100)
    assert pool.seconds[org] == pytest.approx(400, rel=0.02)


def test_a_new_org_is_served_before_any_other_is_served_twice() -> None:
    old = orgs(5)
    pool = Pool(1, lambda _: 1.0)
    for org in old:
        pool.enqueue(org, 1000)
    pool.run(until_s=100)
    new = OrgId("new")
    pool.enqueue(new, 1)
    served = len(pool.order)
    pool.run(until_s=110)
    until_new = pool.order[served : pool.order.index(new)]
    assert len(until_new) < len(old)
    assert len(set(until_new)) == len(until_new)


def test_an_idle_org_saves_up_no_credit() -> None:
    idle, busy = orgs(2)
    pool = Pool(1, lambda _: 1.0)
    pool.enqueue(idle, 1)
    pool.enqueue(busy, 1_000_000)
    pool.run(until_s=1000)
    pool.enqueue(idle, 1_000_000)
    served = len(pool.order)
    pool.run(until_s=1100)
    since = Counter(pool.order[served:])
    assert abs(since[idle] - since[busy]) <= 2


def test_an_org_that_used_idle_workers_owes_nothing_for_it() -> None:
    first, second = orgs(2)
    pool = Pool(1, lambda _: 1.0)
    pool.enqueue(first, 100)
    pool.run(until_s=200)
    pool.enqueue(first, 1000)
    pool.enqueue(second, 1000)
    served = len(pool.order)
    pool.run(until_s=300)
    since = Counter(pool.order[served:])
    assert abs(since[first] - since[second]) <= 2


def test_a_changed_weight_counts_for_the_backlog_too() -> None:
    a, b = orgs(2)
    weights = {a: 1.0, b: 1.0}
    pool = Pool(1, lambda _: 1.0, weights)
    for org in (a, b):
        pool.enqueue(org, 1_000_000)
    pool.run(until_s=100)
    weights[b] = 3.0
    pool.schedule.reweigh()
    before = dict(pool.seconds)
    pool.run(until_s=500)
    assert (pool.seconds[b] - before[b]) / (pool.seconds[a] - before[a]) == pytest.approx(3, rel=0.05)


def test_an_org_whose_jobs_suddenly_take_an_hour_does_not_get_all_workers() -> None:
    hours, other = orgs(2)
    started = itertools.count()
    pool = Pool(10, lambda org: 3600.0 if org == hours and next(started) > 100 else 0.1)
    pool.enqueue(hours, 1_000_000)
    pool.enqueue(other, 1_000_000)
    pool.run(until_s=600)
    assert pool.seconds[other] > 0.2 * 6000


def test_a_lease_that_expires_is_charged_until_then() -> None:
    lost, other = orgs(2)
    schedule = Schedule()
    for org in (lost, other):
        schedule.ready(org, SHARD)
    pick = schedule.pick([SHARD])
    assert pick is not None
    assert pick.org == lost
    schedule.began(lost, "lease", now_s=0, until_s=30, charged_s=pick.charged_s)
    schedule.accrue(now_s=1000)
    assert schedule.lead(lost) == pytest.approx(30)
    schedule.ended("lease", now_s=2000)
    assert schedule.lead(lost) == pytest.approx(30)


def test_a_pick_that_found_no_job_costs_nothing() -> None:
    (org,) = orgs(1)
    schedule = Schedule()
    schedule.ready(org, SHARD)
    pick = schedule.pick([SHARD])
    assert pick is not None
    assert schedule.lead(org) > 0
    schedule.unused(org, pick.charged_s)
    assert schedule.lead(org) == 0


def test_an_org_whose_picks_found_no_job_is_not_ahead_of_one_that_becomes_ready() -> None:
    searched, new = orgs(2)
    schedule = Schedule()
    schedule.ready(searched, SHARD)
    for pick in [schedule.pick([SHARD]) for _ in range(10)]:
        assert pick is not None
        schedule.unused(searched, pick.charged_s)
    schedule.ready(new, SHARD)
    picks = [schedule.pick([SHARD]) for _ in range(2)]
    assert {pick and pick.org for pick in picks} == {searched, new}


def test_an_org_is_passed_over_on_one_shard_until_the_pass_ends() -> None:
    org, other = orgs(2)
    schedule = Schedule()
    for shard in (SHARD, OTHER):
        schedule.ready(org, shard)
    schedule.ready(other, SHARD)
    schedule.pass_over(org, SHARD)
    picks = [schedule.pick([SHARD]) for _ in range(3)]
    assert [pick and pick.org for pick in picks] == [other] * 3
    elsewhere = schedule.pick([OTHER])
    assert elsewhere is not None
    assert elsewhere.org == org
    schedule.end_pass(org, SHARD)
    pick = schedule.pick([SHARD])
    assert pick is not None
    assert pick.org == org


def test_only_shards_that_are_asked_for_are_served() -> None:
    a, b = orgs(2)
    schedule = Schedule()
    schedule.ready(a, SHARD)
    schedule.ready(b, OTHER)
    picks = [schedule.pick([OTHER]) for _ in range(3)]
    assert [pick and (pick.org, pick.shard) for pick in picks] == [(b, OTHER)] * 3
    schedule.drop_shard(OTHER)
    assert schedule.pick([OTHER]) is None
    first = schedule.pick([SHARD, OTHER])
    assert first is not None
    assert first.org == a


def test_idle_orgs_are_forgotten() -> None:
    schedule = Schedule()
    busy = OrgId("busy")
    schedule.ready(busy, SHARD)
    for n in range(20_000):
        org = OrgId(f"once-{n}")
        schedule.ready(org, SHARD)
        while (pick := schedule.pick([SHARD])) is not None:
            schedule.served(pick.start)
            schedule.began(pick.org, (n, pick.org), now_s=n, until_s=n + 1, charged_s=pick.charged_s)
            schedule.ended((n, pick.org), now_s=n + 0.5)
            if pick.org == busy:
                break
        schedule.idle(org, SHARD)
    assert schedule.size < 5_000


@given(st.integers(0, 2**32), st.integers(1, 10))
@settings(max_examples=trials(3, thorough=100), deadline=None)
def test_an_org_whose_jobs_are_handed_over_gets_no_more_than_one_with_a_backlog(seed: int, workers: int) -> None:
    draw = random.Random(seed)
    pool = Pool(workers=workers, job_s=lambda _: draw.uniform(0.1, 2.0))
    waiting, handed = orgs(2)
    pool.enqueue(waiting, 1_000_000)
    # The other org always has one more new job than may be handed over.
    pool.hand_over = handed
    pool.run(2_000.0)
    assert pool.seconds[handed] == pytest.approx(pool.seconds[waiting], abs=2 * (workers + 1) * 2.0)


def test_an_org_does_not_save_up_hand_overs_while_it_has_no_jobs() -> None:
    schedule, (idle, busy) = Schedule(), orgs(2)
    schedule.began(idle, "first", now_s=0, until_s=60)
    schedule.ended("first", now_s=0.1)
    schedule.ready(busy, SHARD)
    for n in range(1000):
        pick = schedule.pick([SHARD])
        assert pick is not None
        schedule.served(pick.start)
        schedule.began(busy, n, now_s=n, until_s=n + 60, charged_s=pick.charged_s)
        schedule.ended(n, now_s=n + 1)
    handed = 0
    while schedule.turns(idle, at_most=1) and handed < 100:
        schedule.began(idle, f"job {handed}", now_s=1000, until_s=1060)
        schedule.ended(f"job {handed}", now_s=1001)
        handed += 1
    assert handed <= 2, "it is the other org's turn after its first job"


def test_an_org_that_is_ready_on_another_shard_stays_ready_when_a_job_is_handed_over() -> None:
    schedule, (org, busy) = Schedule(), orgs(2)
    # The leases of the org take no time, so nothing is charged for its next lease.
    schedule.began(org, "first", now_s=0, until_s=60)
    schedule.ended("first", now_s=0)
    schedule.ready(org, OTHER)
    schedule.ready(busy, SHARD)
    for n in range(10):
        pick = schedule.pick([SHARD])
        assert pick is not None
        schedule.served(pick.start)
        schedule.began(busy, n, now_s=n, until_s=n + 60, charged_s=pick.charged_s)
        schedule.ended(n, now_s=n + 1)
    schedule.began(org, "handed over", now_s=10, until_s=70)
    pick = schedule.pick([OTHER])
    assert pick is not None
    assert pick.org == org
