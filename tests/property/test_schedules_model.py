"""Schedules fire, operators make calls and jobs end in any order, through two routers at the same time. No instant is
stored twice, no instant is forgotten (I10), and no run waits for ever."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator
from dataclasses import replace

import pytest

from shard.postgres.pool import Database
from shard.queue.settle import Settlement
from shard.schedule import CatchUp, Overlap, Run, RunCause, RunOutcome, ScheduleSpec
from shard.vocabulary import Micros, OrgId
from tests.conftest import SHARD
from tests.effort import luck_of, trials
from tests.jobs import lease_jobs
from tests.schedules import DAILY, HOUR_US, Shard

# With this jitter, an instant may be decided later than the instant after it.
_JITTER_US = 3 * HOUR_US
_WINDOW_US = 2 * HOUR_US
_ACTS = ("fire", "fire", "fire", "trigger", "backfill", "backfill", "end one", "end all", "wake", "pause", "change")


@pytest.fixture
async def routers(module_dsn: str, monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[list[Shard], None]:
    # The test looks at all runs, so the shard must keep them all.
    for module in ("schedule_admin", "run_writer", "due_schedules"):
        monkeypatch.setattr(f"shard.schedules.{module}.RUNS_KEPT", 10_000)
    databases = [Database(SHARD, module_dsn, connections=3) for _ in range(2)]
    for database in databases:
        await database.open()
    yield [Shard(database) for database in databases]
    for database in databases:
        await database.close()


@pytest.mark.thorough
async def test_each_instant_is_stored_once_or_told_as_skipped(routers: list[Shard]) -> None:
    for number in range(trials(40, thorough=1500)):
        luck = luck_of(f"schedules model {number}")
        play = _Play(routers, OrgId(f"schedules-model-{number}"), luck)
        await play.create()
        for _ in range(luck.randint(10, 30)):
            if luck.random() < 0.4:
                await play.pass_time(luck.randint(1, 6))
            else:
                await asyncio.gather(*(play.act(luck.choice(_ACTS)) for _ in range(luck.randint(1, 3))))
            await play.check()
        await play.end()


class _Play:
    """One schedule, and what happens to it."""

    def __init__(self, routers: list[Shard], org: OrgId, luck: random.Random) -> None:
        self._routers = routers
        self._first = routers[0]
        self._org = org
        self._luck = luck
        self._by_org = {"org": org}

    async def create(self) -> None:
        await self._first.create(self._org, self._changed(ScheduleSpec(timing=await self._first.hourly())))
        self._created_us = (await self._first.admin.get(self._org, DAILY)).now

    def _changed(self, spec: ScheduleSpec) -> ScheduleSpec:
        catch_up = self._luck.choice(list(CatchUp))
        return replace(
            spec,
            timing=replace(spec.timing, jitter_us=self._luck.choice((0, _JITTER_US, _JITTER_US))),
            overlap=self._luck.choice(list(Overlap)),
            catch_up=catch_up,
            catch_up_window_us=_WINDOW_US if catch_up is CatchUp.WINDOW else None,
        )

    async def act(self, act: str) -> None:
        router, org, luck = self._luck.choice(self._routers), self._org, self._luck
        match act:
            case "fire":
                await router.due.fire()
            case "trigger":
                await router.admin.trigger(org, DAILY, request=None, epoch=1)
            case "backfill":
                now = (await router.admin.get(org, DAILY)).now
                begin = now - luck.randint(0, 6 * HOUR_US)
                end = min(now, begin + luck.randint(1, 3) * HOUR_US)
                overlap = luck.choice(list(Overlap))
                await router.admin.backfill(org, DAILY, begin=Micros(begin), end=Micros(end), overlap=overlap, epoch=1)
            case "end one" | "end all":
                await self._end_jobs(router, 1 if act == "end one" else 1000)
            case "wake":
                await self._wake()
            case "pause":
                await router.admin.set_paused(org, DAILY, paused=luck.random() < 0.4, epoch=1)
            case _:
                await router.admin.update(org, DAILY, lambda spec, template: (self._changed(spec), template), epoch=1)

    async def _end_jobs(self, router: Shard, count: int) -> int:
        leased = await lease_jobs(router.store, self._org, queue="mail", max_jobs=count)
        if leased:
            await router.store.settle(Settlement.ack(self._org, [lease for _, lease in leased], [b""] * len(leased)))
        return len(leased)

    async def _wake(self) -> None:
        await self._first.database.run(
            b"UPDATE windrow.schedule s SET wake_at = now() FROM windrow.org o "
            b"WHERE o.org_id = s.org_id AND o.org = %(org)s AND s.paused_at IS NULL",
            self._by_org,
        )

    async def pass_time(self, hours: int) -> None:
        """Moves all times of the schedule and of its runs into the past by this many hours."""
        by_us = hours * HOUR_US
        self._created_us = Micros(self._created_us - by_us)
        # Move the instants far away first. Otherwise an instant could become equal to another one that is not moved
        # yet.
        for step_us in (10_000 * HOUR_US, -10_000 * HOUR_US - by_us):
            await self._first.database.run(
                b"UPDATE windrow.schedule_run r SET at = at + %(by)s * interval '1 us', "
                b"through = through + %(by)s * interval '1 us' "
                b"FROM windrow.schedule s JOIN windrow.org o USING (org_id) "
                b"WHERE r.schedule_id = s.id AND o.org = %(org)s",
                {"by": step_us, **self._by_org},
            )
        await self._first.database.run(
            b"UPDATE windrow.schedule s SET starts_at = starts_at - d, next_at = next_at - d, last_at = last_at - d, "
            b"wake_at = wake_at - d FROM windrow.org o, (SELECT %(by)s * interval '1 us') AS by (d) "
            b"WHERE o.org_id = s.org_id AND o.org = %(org)s",
            {"by": by_us, **self._by_org},
        )

    async def check(self) -> list[Run]:
        """Asserts that the counts are right, and that each run that is stored has a job of its own. Returns the
        runs."""
        schedule = (await self._first.admin.get(self._org, DAILY)).schedule
        runs = await self._first.runs(self._org)
        assert schedule.buffered == sum(run.outcome is RunOutcome.BUFFERED for run in runs)
        jobs = {run.job_id for run in runs if run.outcome is RunOutcome.STORED}
        ((accepted,),) = await self._first.database.run(
            b"SELECT coalesce(sum(t.accepted), 0) FROM windrow.tally t JOIN windrow.org o USING (org_id) "
            b"WHERE o.org = %(org)s",
            self._by_org,
        )
        assert accepted == len(jobs) == sum(run.outcome is RunOutcome.STORED for run in runs)
        return runs

    async def end(self) -> None:
        """Ends all jobs. Asserts that no run waits after that, and that each instant since the beginning is stored or
        reported as skipped."""
        await self._first.admin.set_paused(self._org, DAILY, paused=False, epoch=1)
        for _ in range(1000):
            ended = await self._end_jobs(self._first, 1000)
            await self._wake()
            fired = await self._first.due.fire()
            assert not fired.needed, "all jobs have ended"
            if not ended and not fired.jobs:
                break
        runs = await self.check()
        assert all(run.outcome is not RunOutcome.BUFFERED for run in runs)
        schedule = (await self._first.admin.get(self._org, DAILY)).schedule
        assert schedule.next_at is not None
        told = {
            at
            for run in runs
            if run.cause is not RunCause.TRIGGER
            for at in range(run.at, (run.through or run.at) + 1, HOUR_US)
        }
        expected = range(schedule.next_at - HOUR_US, self._created_us, -HOUR_US)
        assert not [at for at in expected if at not in told]
