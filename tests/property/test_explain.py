"""For any order of enqueues and attempts that Hypothesis generates, every live job has a cause. For each ready job, the
jobs that are reported to be ahead of it are the jobs that claims take before it."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.codec import causes
from router.codec.causes import Surroundings
from shard.postgres.pool import Database
from shard.queue.explain import JobFacts
from shard.queue.settle import Nack, Settlement, Snooze
from shard.queue.store import Store
from shard.vocabulary import JobId, OrgId
from tests import timemachine
from tests.conftest import SHARD
from tests.jobs import HOUR_US, ids_of, lease_jobs, some_jobs

_numbers = itertools.count()
_HOW = ("keep", "ack", "nack at once", "nack later", "release", "snooze")


@dataclass(frozen=True, kw_only=True)
class World:
    runner: asyncio.Runner
    database: Database


@pytest.fixture(scope="module")
def world(module_dsn: str) -> Iterator[World]:
    database = Database(SHARD, module_dsn, connections=1)
    with asyncio.Runner() as runner:
        runner.run(database.open())
        yield World(runner=runner, database=database)
        runner.run(database.close())


batches = st.lists(
    st.tuples(st.sampled_from((5, 5, 1, 9)), st.integers(1, 5), st.sampled_from((None, None, None, HOUR_US))),
    min_size=1,
    max_size=4,
)
# Attempts after each batch of enqueues, for some of the jobs that are ready at that time.
attempts = st.lists(st.tuples(st.integers(0, 4), st.sampled_from(_HOW)), min_size=1, max_size=4)


async def _attempt(store: Store, org: OrgId, how: str, count: int) -> None:
    held = [lease for _, lease in await lease_jobs(store, org, max_jobs=count, window_us=HOUR_US)] if count else []
    if not held:
        return
    match how:
        case "ack":
            await store.settle(Settlement.ack(org, held))
        case "nack at once":
            await store.settle(Settlement.nack(org, [Nack(lease=lease, retry_after_us=0) for lease in held]))
        case "nack later":
            await store.settle(Settlement.nack(org, [Nack(lease=lease, retry_after_us=HOUR_US) for lease in held]))
        case "release":
            await store.settle(Settlement.release(org, held))
        case "snooze":
            await store.settle(Settlement.snooze(org, [Snooze(lease=lease, after_us=HOUR_US) for lease in held]))
        case _:
            # The consumer keeps the leases.
            pass


async def _explained(store: Store, org: OrgId, ids: list[JobId]) -> dict[JobId, JobFacts]:
    found = {name: await store.explain_job(org, name) for name in ids}
    return {name: facts for name, facts in found.items() if facts is not None}


async def _check(
    database: Database,
    org: OrgId,
    of_batches: list[tuple[int, int, int | None]],
    tries: list[tuple[int, str]],
    *,
    end: bool,
) -> None:
    store = Store(database)
    ids: list[JobId] = []
    for (priority, count, delay_us), (taken, how) in zip(of_batches, itertools.cycle(tries)):
        jobs = some_jobs(org, count, priority=priority, delay_us=delay_us)
        await store.enqueue(jobs)
        ids += ids_of(jobs)
        await _attempt(store, org, how, taken)
    if end:
        await timemachine.end_leases(database, org)
    explained = await _explained(store, org, ids)
    assert explained.keys() == set(ids)
    ahead: dict[JobId, int] = {}
    for name, facts in explained.items():
        told = causes.of_job(facts, SHARD, Surroundings())
        assert told.causes, facts
        assert all(cause.WhichOneof("cause") for cause in told.causes)
        if facts.live is not None and facts.live.visible_at <= facts.live.now:
            ahead[name] = facts.live.more_urgent + facts.live.earlier
    # Another router claims the jobs one by one.
    claimed = [(await lease_jobs(Store(database), org, max_jobs=1))[0][0].id for _ in ahead]
    assert [ahead[name] for name in claimed] == list(range(len(ahead)))
    assert await lease_jobs(Store(database), org) == []


@given(of_batches=batches, tries=attempts, end=st.booleans())
def test_every_live_job_has_a_cause_and_those_ahead_are_claimed_first(
    world: World, of_batches: list[tuple[int, int, int | None]], tries: list[tuple[int, str]], end: bool
) -> None:
    org = OrgId(f"explained-{next(_numbers)}")
    world.runner.run(_check(world.database, org, of_batches, tries, end=end))
