"""Schedules of one shard: each instant is stored once or is told as skipped, whatever happens (I10)."""

from __future__ import annotations

import json

import pytest

from shard.postgres.pool import Database
from shard.schedule import CatchUp, Overlap, RunCause, RunOutcome, ScheduleSpec, SkipReason
from shard.vocabulary import OrgId
from tests.schedules import DAILY, DAY_US, HOUR_US, HOURLY, Shard


@pytest.fixture
def shard(database: Database) -> Shard:
    return Shard(database)


async def test_a_due_schedule_stores_a_job_that_knows_its_run(shard: Shard, org: OrgId) -> None:
    created = await shard.create(org, ScheduleSpec(timing=HOURLY))
    assert created.schedule.next_at == (created.now // HOUR_US + 1) * HOUR_US
    assert (await shard.fire()).jobs == 0
    at = await shard.set_back(org, HOUR_US)
    assert (await shard.fire()).jobs == 1
    ((job, told),) = await shard.jobs(org)
    cause = json.loads(told)["cause"]
    assert json.loads(told) == {"schedule": "daily", "at": at, "cause": cause}
    found = await shard.admin.get(org, DAILY)
    assert found.schedule.last_job == job
    assert found.schedule.next_at == created.schedule.next_at
    (run,) = await shard.admin.runs(org, found.schedule.id)
    assert (run.at, run.outcome, run.job_id) == (at, RunOutcome.STORED, job)
    (record,) = await shard.store.get(org, [job], include_payload=True)
    assert (record.queue, record.kind, record.payload, record.max_attempts) == ("mail", "send", b"hello", 3)
    assert record.scheduled_run == told
    # Its next instant is in the future.
    assert (await shard.fire()).jobs == 0


async def test_after_an_outage_only_the_latest_instant_is_stored_by_default(shard: Shard, org: OrgId) -> None:
    await shard.create(org, ScheduleSpec(timing=HOURLY))
    first = await shard.set_back(org, 14 * DAY_US)
    assert (await shard.fire()).jobs == 1
    found = await shard.admin.get(org, DAILY)
    stored, skipped = await shard.admin.runs(org, found.schedule.id)
    latest = found.now // HOUR_US * HOUR_US
    assert (stored.at, stored.outcome) == (latest, RunOutcome.STORED)
    assert (skipped.at, skipped.through) == (first, latest - HOUR_US)
    assert skipped.skipped_for is SkipReason.CATCH_UP


async def test_within_its_window_a_schedule_catches_up(shard: Shard, org: OrgId) -> None:
    spec = ScheduleSpec(
        timing=HOURLY, overlap=Overlap.ALLOW, catch_up=CatchUp.WINDOW, catch_up_window_us=5 * HOUR_US + HOUR_US // 2
    )
    await shard.create(org, spec)
    await shard.set_back(org, 14 * DAY_US)
    fired = await shard.fire()
    assert fired.jobs in (5, 6)
    causes = {json.loads(told)["cause"] for _, told in await shard.jobs(org)}
    assert RunCause.CATCH_UP.value in causes
