"""An org with schedules moves to another shard, and routers and balancers die. Each instant is stored once (I10), and
only the shard that accepts the org's new jobs fires schedules (I6)."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Sequence

import pytest

from shard.errors import NotOwned, ShardUnavailable, UnknownSchedule
from shard.postgres.pool import Database
from shard.schedule import CatchUp, Overlap, RunOutcome, ScheduleName, ScheduleSpec
from shard.schedules import due_schedules
from shard.vocabulary import Micros, OrgId
from tests.conftest import SHARD
from tests.pair import A, B, Died, Fate, Mortal, Pair, deaths, mortal_mover
from tests.schedules import DAILY, HOUR_US, Shard, jobs_of

RUNS = 3


async def make_due(shard: Shard, org: OrgId, count: int) -> list[ScheduleName]:
    """Makes schedules with RUNS due instants each."""
    timing = await shard.hourly()
    names = [ScheduleName(f"s{number}") for number in range(count)]
    for name in names:
        await shard.create(org, ScheduleSpec(timing=timing, overlap=Overlap.ALLOW, catch_up=CatchUp.ALL), name)
        await shard.set_back(org, RUNS * HOUR_US, name)
    return names


async def stored(databases: Sequence[Database], org: OrgId) -> Counter[Micros]:
    """Returns how many jobs were stored for each instant."""
    return Counter([job.at for database in databases for job in await jobs_of(database, org)])


async def test_a_move_takes_schedules_with_their_runs_and_nothing_is_left(pair: Pair, org: OrgId) -> None:
    source, target = Shard(pair.databases[A]), Shard(pair.databases[B])
    timing = await source.hourly()
    await source.create(org, ScheduleSpec(timing=timing, overlap=Overlap.BUFFER_ALL, note="keep me"))
    await source.set_back(org, HOUR_US)
    await source.fire()
    before, runs = await source.admin.get(org, DAILY), await source.runs(org)
    await pair.move([org], target=B)
    after = await target.admin.get(org, DAILY)
    assert after.schedule == before.schedule
    assert await target.runs(org) == runs
    with pytest.raises(UnknownSchedule):
        await source.admin.get(org, DAILY)
    # A router that does not know of the move yet is refused.
    with pytest.raises(NotOwned):
        await source.admin.update(org, DAILY, lambda spec, had: (spec, had), epoch=1)
    assert await pair.databases[A].run(b"SELECT count(*) FROM windrow.schedule_run", {}) == [(0,)]
    # The org moves back to a shard that may still have rows of the org from before.
    await pair.move([org], target=A)
    assert (await source.admin.get(org, DAILY)).schedule == before.schedule
    assert await source.runs(org) == runs


async def test_both_shards_fire_at_every_step_of_a_move_and_each_run_is_stored_once(
    pair: Pair, org: OrgId, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(due_schedules, "BATCH_MAX", 2)
    shards = [Shard(pair.databases[name]) for name in (A, B)]
    names = await make_due(shards[0], org, 20)
    move = await pair.begin([org], target=B)
    mover = pair.mover(move)
    going = True
    fired = [0, 0]
    while going:
        for at, shard in enumerate(shards):
            fired[at] += (await shard.due.fire()).jobs
        going = await mover.step()
    fired[1] += (await shards[1].fire()).jobs
    assert min(fired) > 0
    assert sum(fired) == RUNS * len(names)
    assert set((await stored([shard.database for shard in shards], org)).values()) == {len(names)}
    await pair.balance()


@pytest.mark.parametrize("how", ["rolled back", "unheard"])
async def test_balancers_die_at_every_step_and_each_run_is_stored_once(
    pair: Pair, org: OrgId, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(due_schedules, "BATCH_MAX", 1)
    shards = [Shard(pair.databases[name]) for name in (A, B)]
    names = await make_due(shards[0], org, 12)
    move = await pair.begin([org], target=B)
    for at in deaths(how):
        fate = Fate(at=at, how=how)
        async with mortal_mover(pair, move, fate) as mover:
            with contextlib.suppress(Died):
                await mover.finish()
        for shard in shards:
            await shard.due.fire()
        if fate.acts < at:
            break
    await shards[1].fire()
    counts = await stored([shard.database for shard in shards], org)
    assert (len(counts), set(counts.values())) == (RUNS, {len(names)})
    assert (await shards[0].due.next_wake()).at is None


@pytest.mark.parametrize("how", ["before", "rolled back", "unheard", "cancelled", "cut"])
async def test_a_router_dies_while_it_fires_and_each_run_is_stored_once(
    module_dsn: str, database: Database, org: OrgId, how: str
) -> None:
    other = Shard(database)
    names = await make_due(other, org, 5)
    fate = Fate(at=1, how=how)
    dying = Mortal(SHARD, module_dsn, fate)
    await dying.open()
    try:
        router = Shard(dying)
        task = asyncio.create_task(router.due.fire())
        with contextlib.suppress(Died, asyncio.CancelledError, ShardUnavailable):
            await task
    finally:
        await dying.close()
    assert fate.acts >= 1
    # A cancellation may come too late to prevent the commit.
    whole = RUNS * len(names)
    possible = {"unheard": {whole}, "cancelled": {0, whole}}.get(how, {0})
    assert len(await jobs_of(database, org)) in possible
    while (await other.fire()).taken:
        pass
    assert set((await stored([database], org)).values()) == {len(names)}
    assert len(await stored([database], org)) == RUNS


async def test_a_commit_that_nobody_heard_of_is_found_done(module_dsn: str, database: Database, org: OrgId) -> None:
    shard = Shard(database)
    await make_due(shard, org, 1)
    name = ScheduleName("s0")
    dying = Mortal(SHARD, module_dsn, Fate(at=1, how="unheard"))
    await dying.open()
    try:
        with pytest.raises(Died):
            await Shard(dying).due.fire()
    finally:
        await dying.close()
    runs = await shard.runs(org, name)
    assert [run.outcome for run in runs] == [RunOutcome.STORED] * RUNS
    assert (await shard.fire()).jobs == 0


async def test_a_leased_job_that_stays_on_the_source_counts_as_running(pair: Pair, org: OrgId) -> None:
    source, target = Shard(pair.databases[A]), Shard(pair.databases[B])
    await source.create(org, ScheduleSpec(timing=await source.hourly()))
    await source.set_back(org, HOUR_US)
    await source.fire()
    (job,) = await source.jobs(org)
    await source.store.claim(org, ["mail"], max_jobs=1, window_us=HOUR_US, worker="w")  # type: ignore[list-item]
    move = await pair.begin([org], target=B)
    mover = pair.mover(move)
    while (await pair.placement(org))[0] != (B,):
        assert await mover.step()
    await target.set_back(org, 2 * HOUR_US)
    await target.database.run(b"DELETE FROM windrow.schedule_run", {})
    needed = (await target.due.fire(is_whole=lambda _: False)).needed
    assert [one.job for one in needed] == [job.id]
    # The router asks the source, where the job is live.
    assert await source.store.find_ended([(org, job.id.replace("-", ""))]) == []
    await target.wake(org)
    assert (await target.due.fire(is_whole=lambda _: False, known={job.id: True})).jobs == 0
    assert [run.outcome for run in await target.runs(org)][-1] is RunOutcome.SKIPPED
