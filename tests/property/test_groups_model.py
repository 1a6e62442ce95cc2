"""Compares groups with k = 1 with a model, for any order of calls through two routers that Hypothesis generates. A
claim gets exactly the first job of each group, and only if that job is ready. No sweep runs, so nothing repairs a
group."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Coroutine, Iterator, Sequence
from typing import Any, ClassVar, TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from shard.postgres.pool import Database
from shard.queue.settle import Nack, Settlement
from shard.queue.store import Store
from shard.vocabulary import Alteration, Answer, Failure, JobId, Lease, OrgId
from tests.conftest import SHARD
from tests.effort import trials
from tests.jobs import HOUR_US, ids_of, job_id, lease_jobs, some_jobs
from tests.timemachine import end_leases, make_due

T = TypeVar("T")
GROUPS = "ab"
_numbers = itertools.count()


class GroupsMachine(RuleBasedStateMachine):
    runner: ClassVar[asyncio.Runner]
    database: ClassVar[Database]

    @initialize()
    def begin(self) -> None:
        self.org = OrgId(f"groups-model-{next(_numbers)}")
        self.stores = [Store(self.database), Store(self.database)]
        # For each group, its due jobs in order. The first job has the group slot.
        self.lines: dict[str, list[JobId]] = {group: [] for group in GROUPS}
        # For each group, the jobs that have not been due yet, or were postponed.
        self.scheduled: dict[str, set[JobId]] = {group: set() for group in GROUPS}
        # The first jobs of groups, while they back off.
        self.later: set[JobId] = set()
        self.held: dict[JobId, Lease] = {}

    def do(self, act: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(act)

    def jobs(self) -> list[tuple[str, JobId]]:
        return [(group, job) for group in GROUPS for job in [*self.lines[group], *sorted(self.scheduled[group])]]

    def drop(self, group: str, job: JobId) -> None:
        if job in self.lines[group]:
            self.lines[group].remove(job)
        self.scheduled[group].discard(job)
        self.later.discard(job)
        self.held.pop(job, None)

    @rule(group=st.sampled_from(GROUPS), count=st.integers(1, 3), later=st.booleans(), store=st.integers(0, 1))
    def enqueue(self, group: str, count: int, later: bool, store: int) -> None:
        ids = sorted(job_id() for _ in range(count))
        jobs = some_jobs(self.org, ids=ids, group=group, delay_us=HOUR_US if later else None)
        assert self.do(self.stores[store].enqueue(jobs)) == {}
        if later:
            self.scheduled[group] |= set(ids_of(jobs))
        else:
            self.lines[group] += ids_of(jobs)

    @rule(store=st.integers(0, 1))
    def claim(self, store: int) -> None:
        taken = self.do(lease_jobs(self.stores[store], self.org, window_us=HOUR_US))
        expected = {
            line[0] for line in self.lines.values() if line and line[0] not in self.held and line[0] not in self.later
        }
        assert {job.id for job, _ in taken} == expected
        self.held |= {job.id: lease for job, lease in taken}

    @rule(how=st.sampled_from(("ack", "ack", "die", "retry", "later", "release")), number=st.integers(0, 9))
    def end(self, how: str, number: int) -> None:
        if not self.held:
            return
        job = sorted(self.held)[number % len(self.held)]
        lease = self.held.pop(job)
        call = {
            "ack": Settlement.ack(self.org, [lease]),
            "die": Settlement.nack(self.org, [Nack(lease=lease, failure=Failure(permanent=True))]),
            "retry": Settlement.nack(self.org, [Nack(lease=lease, retry_after_us=0)]),
            "later": Settlement.nack(self.org, [Nack(lease=lease, retry_after_us=HOUR_US)]),
            "release": Settlement.release(self.org, [lease]),
        }[how]
        assert self.do(self.stores[number % 2].settle(call)) == [Answer.OK]
        if how in ("ack", "die"):
            self.drop(next(group for group, one in self.jobs() if one == job), job)
        elif how == "later":
            self.later.add(job)

    @rule()
    def lose_leases(self) -> None:
        assert self.do(end_leases(self.database, self.org)) == len(self.held)
        self.held.clear()

    @rule(numbers=st.lists(st.integers(0, 99), min_size=1, max_size=3))
    def cancel(self, numbers: Sequence[int]) -> None:
        jobs = self.jobs()
        if jobs:
            chosen = {jobs[number % len(jobs)] for number in numbers}
            ids = [job for _, job in chosen]
            assert self.do(self.stores[0].cancel(self.org, ids, reason="")) == [Answer.OK] * len(ids)
            for group, job in chosen:
                self.drop(group, job)

    @rule(number=st.integers(0, 99))
    def put_off(self, number: int) -> None:
        jobs = [(group, job) for group, job in self.jobs() if job not in self.held]
        if jobs:
            group, job = jobs[number % len(jobs)]
            assert self.do(self.stores[0].alter(self.org, [job], Alteration(delay_us=HOUR_US))) == [Answer.OK]
            self.drop(group, job)
            self.scheduled[group].add(job)

    @rule(number=st.integers(0, 99))
    def reorder(self, number: int) -> None:
        """A priority does not change the order of a group."""
        jobs = [job for _, job in self.jobs() if job not in self.held]
        if jobs:
            alteration = Alteration(priority=1 + number % 9)
            assert self.do(self.stores[1].alter(self.org, [jobs[number % len(jobs)]], alteration)) == [Answer.OK]

    @rule()
    def pass_time(self) -> None:
        self.do(make_due(self.database, self.org))
        self.later.clear()
        for group in GROUPS:
            self.lines[group] += sorted(self.scheduled[group])
            self.scheduled[group].clear()
        self.claim(0)


@pytest.fixture
def machine(module_dsn: str) -> Iterator[type[GroupsMachine]]:
    database = Database(SHARD, module_dsn, connections=2)
    with asyncio.Runner() as runner:
        runner.run(database.open())
        GroupsMachine.runner, GroupsMachine.database = runner, database
        yield GroupsMachine
        runner.run(database.close())


def test_a_claim_gets_the_first_job_of_each_group(machine: type[GroupsMachine]) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=trials(40, thorough=1500),
            stateful_step_count=30,
            suppress_health_check=(HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much),
        ),
    )
