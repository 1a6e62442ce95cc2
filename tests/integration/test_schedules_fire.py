"""Schedules of one shard: each instant is stored once, or is recorded as skipped with its reason (I10)."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from shard.admin.queue_admin import QueueAdmin
from shard.errors import NotOwned, ScheduleExists, TooManySchedules, UnknownQueue, UnknownSchedule
from shard.history import erasure
from shard.placement.slots import slot_of
from shard.postgres.pool import Database
from shard.schedule import (
    CATCH_UP_MAX,
    RUNS_KEPT,
    CatchUp,
    Overlap,
    Run,
    RunOutcome,
    ScheduleName,
    ScheduleSpec,
    SkipReason,
    Timing,
)
from shard.schedules import calendar, lost_runs, schedule_admin
from shard.schedules.due_schedules import DueSchedules
from shard.schedules.schedule_admin import Backfilled
from shard.vocabulary import JobId, Micros, OrgId, QueueName
from tests.conftest import SHARD
from tests.schedules import DAILY, DAY_US, HALF_US, HOUR_US, Shard, template


@pytest.fixture
def shard(database: Database) -> Shard:
    return Shard(database)


def outcomes(runs: list[Run]) -> list[str]:
    return [
        run.outcome.value if run.skipped_for is None else f"{run.outcome.value} {run.skipped_for.value}" for run in runs
    ]


# ── One run ──────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_nothing_is_due_before_its_instant(shard: Shard, org: OrgId) -> None:
    created = await shard.create(org, ScheduleSpec(timing=await shard.hourly()))
    assert created.schedule.next_at is not None
    assert HALF_US - 60_000_000 < created.schedule.next_at - created.now <= HALF_US
    assert (await shard.fire()).jobs == 0


async def test_a_due_schedule_stores_a_job_like_its_template_that_knows_its_run(shard: Shard, org: OrgId) -> None:
    created = await shard.create(org, ScheduleSpec(timing=await shard.hourly()))
    at = await shard.set_back(org, HOUR_US)
    assert (await shard.fire()).jobs == 1
    (job,) = await shard.jobs(org)
    # The run was due half an hour ago.
    assert (job.at, job.previous, job.cause) == (at, None, "catch_up")
    found = await shard.admin.get(org, DAILY)
    assert (found.schedule.last_job, found.schedule.last_at) == (job.id, at)
    assert found.schedule.next_at == created.schedule.next_at
    (run,) = await shard.runs(org)
    assert (run.at, run.outcome, run.job_id) == (at, RunOutcome.STORED, job.id)
    (record,) = await shard.store.get(org, [job.id], include_payload=True)
    assert (record.queue, record.kind, record.payload, record.max_attempts) == ("mail", "send", b"hello", 3)
    assert (record.state, record.attributes) == ("ready", '{"from": "schedule"}')
    assert (await shard.fire()).jobs == 0


async def test_a_run_that_comes_in_time_is_no_catch_up(shard: Shard, org: OrgId) -> None:
    ((now,),) = await shard.database.run(b"SELECT now()", {})
    spec = ScheduleSpec(timing=Timing(interval_us=HOUR_US, start=Micros(now - HOUR_US - 1_000_000)))
    await shard.create(org, spec)
    await shard.set_back(org, 30_000_000)
    await shard.fire()
    assert [job.cause for job in await shard.jobs(org)] == ["schedule"]


async def test_a_job_knows_the_run_before(shard: Shard, org: OrgId) -> None:
    await shard.create(org, ScheduleSpec(timing=await shard.hourly(), overlap=Overlap.ALLOW, catch_up=CatchUp.ALL))
    first = await shard.set_back(org, 3 * HOUR_US)
    assert (await shard.fire()).jobs == 3
    instants = [first, first + HOUR_US, first + 2 * HOUR_US]
    assert [(job.at, job.previous) for job in await shard.jobs(org)] == list(
        zip(instants, [None, *instants[:2]], strict=True)
    )


async def test_an_instant_that_has_a_run_is_not_stored_again_whatever_next_at_says(shard: Shard, org: OrgId) -> None:
    await shard.create(org, ScheduleSpec(timing=await shard.hourly(), overlap=Overlap.ALLOW))
    await shard.set_back(org, HOUR_US)
    assert (await shard.fire()).jobs == 1
    await shard.set_back(org, HOUR_US)
    fired = await shard.fire()
    assert (fired.taken, fired.jobs) == (1, 0)
    assert len(await shard.jobs(org)) == 1


async def test_many_routers_at_once_store_each_run_once(shard: Shard, org: OrgId, module_dsn: str) -> None:
    timing = await shard.hourly()
    names = [ScheduleName(f"s{number}") for number in range(40)]
    for name in names:
        await shard.create(org, ScheduleSpec(timing=timing, overlap=Overlap.ALLOW, catch_up=CatchUp.ALL), name)
        await shard.set_back(org, 3 * HOUR_US, name)
    routers = [Shard(Database(SHARD, module_dsn, connections=1)) for _ in range(4)]
    try:
        for router in routers:
            await router.database.open()
        fired = await asyncio.gather(*(router.fire() for router in routers for _ in range(3)))
    finally:
        for router in routers:
            await router.database.close()
    assert sum(one.jobs for one in fired) == 3 * len(names)
    assert len(await shard.jobs(org)) == 3 * len(names)


async def test_a_schedule_that_cannot_be_decided_holds_up_no_other(shard: Shard, org: OrgId) -> None:
    timing = await shard.hourly()
    for name in ("a", "b", "c"):
        await shard.create(org, ScheduleSpec(timing=timing), ScheduleName(name))
        await shard.set_back(org, HOUR_US, ScheduleName(name))
    # Make it look as if the time zone database no longer had the schedule's time zone.
    await shard.database.run(
        b"UPDATE windrow.schedule s SET zone = 'Nowhere/Gone', cron = '* * * * *', interval_us = NULL, "
        b"wake_at = wake_at - interval '1 s' FROM windrow.org o "
        b"WHERE o.org_id = s.org_id AND o.org = %(org)s AND s.name = 'b'",
        {"org": org},
    )
    assert (await shard.fire()).jobs == 2
    assert await shard.runs(org, ScheduleName("b")) == []


async def test_the_books_count_the_jobs_of_schedules_as_accepted(shard: Shard, books: QueueAdmin, org: OrgId) -> None:
    await shard.create(org, ScheduleSpec(timing=await shard.hourly(), overlap=Overlap.ALLOW, catch_up=CatchUp.ALL))
    await shard.set_back(org, 5 * HOUR_US)
    await shard.fire()
    (entry,) = [entry for entry in await books.check() if entry.org == org]
    assert (entry.accepted, entry.balanced) == (5, True)


async def test_waiting_consumers_are_told_of_new_jobs(shard: Shard, org: OrgId) -> None:
    await shard.create(org, ScheduleSpec(timing=await shard.hourly()))
    await shard.set_back(org, HOUR_US)
    visible: set[int] = set()
    shard.store.on_visible = visible.update
    await shard.fire()
    (number,) = (await shard.store.names.find([(org, "mail")])).values()  # type: ignore[list-item]
    assert visible == {number}


# ── Catch-up ─────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_after_two_weeks_only_the_latest_instant_is_stored_by_default(shard: Shard, org: OrgId) -> None:
    timing = await shard.hourly()
    await shard.create(org, ScheduleSpec(timing=timing))
    first = await shard.set_back(org, 14 * DAY_US)
    assert (await shard.fire()).jobs == 1
    skipped, stored = await shard.runs(org)
    (job,) = await shard.jobs(org)
    assert job.at == stored.at == first + (14 * 24 - 1) * HOUR_US
    assert (skipped.at, skipped.through, skipped.skipped_for) == (first, stored.at - HOUR_US, SkipReason.CATCH_UP)


async def test_within_a_window_instants_are_caught_up_and_earlier_ones_are_told_as_skipped(
    shard: Shard, org: OrgId
) -> None:
    spec = ScheduleSpec(
        timing=await shard.hourly(), overlap=Overlap.ALLOW, catch_up=CatchUp.WINDOW, catch_up_window_us=5 * HOUR_US
    )
    await shard.create(org, spec)
    first = await shard.set_back(org, 14 * DAY_US)
    assert (await shard.fire()).jobs == 5
    skipped, *stored = await shard.runs(org)
    assert (skipped.at, skipped.through) == (first, stored[0].at - HOUR_US)
    assert {job.cause for job in await shard.jobs(org)} == {"catch_up"}


async def test_a_window_that_has_no_instant_leaves_the_latest(shard: Shard, org: OrgId) -> None:
    spec = ScheduleSpec(timing=await shard.hourly(), catch_up=CatchUp.WINDOW, catch_up_window_us=1_000_000)
    await shard.create(org, spec)
    await shard.set_back(org, 5 * HOUR_US)
    assert (await shard.fire()).jobs == 1


async def test_all_are_caught_up_to_a_bound(shard: Shard, org: OrgId) -> None:
    ((now,),) = await shard.database.run(b"SELECT now()", {})
    # The schedule ends now. Otherwise it would disturb other tests, which share the shard and count the instants that
    # are due there.
    minutely = Timing(interval_us=60_000_000, start=Micros(now - DAY_US - 30_000_000), end=Micros(now))
    spec = ScheduleSpec(timing=minutely, overlap=Overlap.ALLOW, catch_up=CatchUp.ALL)
    await shard.create(org, spec)
    first = await shard.set_back(org, DAY_US)
    assert (await shard.fire()).jobs == CATCH_UP_MAX
    jobs = await shard.jobs(org)
    assert [job.at for job in jobs] == [jobs[0].at + n * 60_000_000 for n in range(CATCH_UP_MAX)]
    assert jobs[0].at == first + 440 * 60_000_000
    # Only the RUNS_KEPT newest runs are kept.
    assert len(await shard.runs(org)) == RUNS_KEPT


async def test_a_schedule_ends_after_its_last_instant(shard: Shard, org: OrgId) -> None:
    timing = await shard.hourly()
    assert timing.start is not None
    end = Micros(timing.start + 960 * HOUR_US + HALF_US // 2)
    await shard.create(org, ScheduleSpec(timing=replace(timing, end=end)))
    await shard.set_back(org, HOUR_US)
    assert (await shard.fire()).jobs == 1
    found = await shard.admin.get(org, DAILY)
    assert found.schedule.next_at is None


async def test_a_single_date_fires_once(shard: Shard, org: OrgId) -> None:
    ((now,),) = await shard.database.run(b"SELECT now()", {})
    await shard.create(org, ScheduleSpec(timing=Timing(at=Micros(now - HALF_US))))
    found = await shard.admin.get(org, DAILY)
    assert found.schedule.next_at is None
    await shard.set_back(org, HOUR_US)
    assert (await shard.fire()).jobs == 1
    assert (await shard.fire()).jobs == 0


async def test_a_schedule_whose_time_zone_got_other_rules_is_decided_once(fresh_database: Database, org: OrgId) -> None:
    shard = Shard(fresh_database)
    created = await shard.create(org, ScheduleSpec(timing=await shard.hourly()))
    # By the old rules of the time zone, the next instant was one second ago. By the new rules, it is in half an hour.
    await shard.database.run(
        b"UPDATE windrow.schedule SET next_at = now() - interval '1 s' WHERE id = %(id)s::uuid",
        {"id": created.schedule.id},
    )
    await shard.wake(org)
    assert (await shard.due.fire()).taken == 1
    assert (await shard.due.fire()).taken == 0
    assert (await shard.admin.get(org, DAILY)).schedule.next_at == created.schedule.next_at


async def test_jitter_delays_a_run_by_the_same_time_whoever_asks(shard: Shard, org: OrgId) -> None:
    spec = ScheduleSpec(timing=await shard.hourly(jitter_us=HALF_US // 2))
    created = await shard.create(org, spec)
    ((wake,),) = await shard.database.run(
        b"SELECT wake_at FROM windrow.schedule WHERE id = %(id)s::uuid", {"id": created.schedule.id}
    )
    assert created.schedule.next_at is not None
    assert 0 <= wake - created.schedule.next_at < HALF_US // 2
    await shard.set_back(org, HOUR_US)
    await shard.fire()
    ((again,),) = await shard.database.run(
        b"SELECT wake_at FROM windrow.schedule WHERE id = %(id)s::uuid", {"id": created.schedule.id}
    )
    assert again == wake


# ── Overlap ──────────────────────────────────────────────────────────────────────────────────────────────────────────


async def overlapping(shard: Shard, org: OrgId, overlap: Overlap) -> list[str]:
    """Returns the outcomes of three runs that are due while the job of an earlier run is live."""
    await shard.create(org, ScheduleSpec(timing=await shard.hourly(), overlap=overlap, catch_up=CatchUp.ALL))
    await shard.admin.trigger(org, DAILY, request=None, epoch=1)
    await shard.set_back(org, 3 * HOUR_US)
    await shard.fire()
    return outcomes([run for run in await shard.runs(org) if run.cause.value != "trigger"])


async def test_with_allow_all_are_stored(shard: Shard, org: OrgId) -> None:
    assert await overlapping(shard, org, Overlap.ALLOW) == ["stored"] * 3


async def test_with_skip_none_is_stored_while_a_job_is_live_and_the_next_after_it(shard: Shard, org: OrgId) -> None:
    assert await overlapping(shard, org, Overlap.SKIP) == ["skipped overlap"] * 3
    assert len(await shard.jobs(org)) == 1
    await shard.end_job(org)
    await shard.set_back(org, 5 * HOUR_US)
    # The two earliest of the five instants have no run yet. The first of these two is stored. The second is due while
    # the job of the first is live.
    assert (await shard.fire()).jobs == 1


async def test_with_buffer_one_a_run_waits_until_the_job_has_ended(shard: Shard, org: OrgId) -> None:
    assert await overlapping(shard, org, Overlap.BUFFER_ONE) == ["buffered", "skipped overlap", "skipped overlap"]
    await shard.wake(org)
    assert (await shard.fire()).jobs == 0
    await shard.end_job(org)
    await shard.wake(org)
    assert (await shard.fire()).jobs == 1
    (job,) = await shard.jobs(org)
    stored = [run for run in await shard.runs(org) if run.job_id == job.id]
    assert [(run.at, run.outcome) for run in stored] == [(job.at, RunOutcome.STORED)]
    assert (await shard.admin.get(org, DAILY)).schedule.buffered == 0


async def test_with_buffer_all_runs_are_stored_one_after_another(shard: Shard, org: OrgId) -> None:
    assert await overlapping(shard, org, Overlap.BUFFER_ALL) == ["buffered"] * 3
    seen: list[Micros] = []
    for left in (2, 1, 0):
        await shard.end_job(org)
        await shard.wake(org)
        assert (await shard.fire()).jobs == 1
        (job,) = await shard.jobs(org)
        seen.append(job.at)
        assert (await shard.admin.get(org, DAILY)).schedule.buffered == left
    assert seen == sorted(seen)


@pytest.mark.parametrize("ends", ["before the others are due", "after"])
async def test_no_run_waits_in_vain_though_a_backfill_has_stored_an_instant_that_was_due(
    shard: Shard, org: OrgId, ends: str
) -> None:
    spec = ScheduleSpec(timing=await shard.hourly(), overlap=Overlap.BUFFER_ALL, catch_up=CatchUp.ALL)
    await shard.create(org, spec)
    await shard.admin.trigger(org, DAILY, request=None, epoch=1)
    first = await shard.set_back(org, 3 * HOUR_US)
    begin = Micros(first + HOUR_US)
    end = Micros(begin + 1)
    done = await shard.admin.backfill(org, DAILY, begin=begin, end=end, overlap=Overlap.BUFFER_ALL, epoch=1)
    assert done.buffered == 1
    if ends == "after":
        await shard.fire()
    for left in (2, 1, 0):
        await shard.end_job(org)
        await shard.wake(org)
        assert (await shard.fire()).jobs == 1
        assert (await shard.admin.get(org, DAILY)).schedule.buffered == left
    assert outcomes(await shard.runs(org)) == ["stored"] * 4


@pytest.mark.parametrize("overlap", [Overlap.ALLOW, Overlap.CANCEL_RUNNING])
async def test_an_instant_that_is_due_while_a_backfill_of_it_waits_is_stored_once_and_holds_up_no_other_schedule(
    shard: Shard, org: OrgId, other_org: OrgId, overlap: Overlap
) -> None:
    spec = ScheduleSpec(timing=await shard.hourly(), overlap=overlap, catch_up=CatchUp.ALL)
    await shard.create(org, spec)
    await shard.create(other_org, spec)
    await shard.admin.trigger(org, DAILY, request=None, epoch=1)
    first = await shard.set_back(org, 2 * HOUR_US)
    await shard.set_back(other_org, HOUR_US)
    begin = Micros(first + HOUR_US)
    end = Micros(begin + 1)
    done = await shard.admin.backfill(org, DAILY, begin=begin, end=end, overlap=Overlap.BUFFER_ALL, epoch=1)
    assert done.buffered == 1
    await shard.end_job(org)
    await shard.wake(org)
    await shard.fire()
    assert [run.outcome for run in await shard.runs(org) if run.at == begin] == [RunOutcome.STORED]
    assert [job.at for job in await shard.jobs(org)].count(begin) == 1
    assert len(await shard.jobs(other_org)) == 1
    assert (await shard.admin.get(org, DAILY)).schedule.buffered == 0


async def test_the_instants_that_are_skipped_together_with_one_that_has_waited_stay_told(
    shard: Shard, org: OrgId
) -> None:
    await shard.create(org, ScheduleSpec(timing=await shard.hourly(), overlap=Overlap.BUFFER_ALL))
    await shard.admin.trigger(org, DAILY, request=None, epoch=1)
    first = await shard.set_back(org, 4 * HOUR_US)
    begin, end = Micros(first + HOUR_US), Micros(first + HOUR_US + 1)
    done = await shard.admin.backfill(org, DAILY, begin=begin, end=end, overlap=Overlap.BUFFER_ALL, epoch=1)
    assert done.buffered == 1
    # Make the backfilled instants undecided again. With jitter this can happen: the first undecided instant may be
    # earlier than the backfilled instants, and later undecided instants may be the same as these.
    assert await shard.set_back_paused(org, 3 * HOUR_US) == begin
    await shard.end_job(org)
    await shard.wake(org)
    assert (await shard.fire()).jobs == 1
    told = [run for run in await shard.runs(org) if run.cause.value != "trigger"]
    assert [run.at for run in told] == [begin, begin + HOUR_US, begin + 2 * HOUR_US]
    assert outcomes(told) == ["stored", "skipped catch_up", "buffered"]
    # Delete the schedule. A schedule with a buffered run is due each second, and would disturb the tests after this
    # one.
    await shard.admin.delete(org, DAILY, epoch=1)


@pytest.mark.parametrize("how", ["catch up", "resume", "change", "recover"])
async def test_each_of_the_instants_that_are_skipped_together_is_told_though_the_first_ones_have_runs(
    shard: Shard, org: OrgId, how: str
) -> None:
    spec = ScheduleSpec(timing=await shard.hourly(), overlap=Overlap.ALLOW, catch_up=CatchUp.LATEST)
    await shard.create(org, spec)
    if how == "resume":
        await shard.admin.set_paused(org, DAILY, paused=True, epoch=1)
    first = await shard.set_back_paused(org, 5 * HOUR_US)
    end = Micros(first + 2 * HOUR_US)
    done = await shard.admin.backfill(org, DAILY, begin=first, end=end, overlap=Overlap.ALLOW, epoch=1)
    assert done.stored == 2
    # Make the backfilled instants undecided again. With jitter this can happen: the first undecided instant may be
    # earlier than the backfilled instants, and later undecided instants may be the same as these.
    assert await shard.set_back_paused(org, 5 * HOUR_US) == first
    match how:
        case "catch up":
            await shard.wake(org)
            await shard.fire()
        case "resume":
            await shard.admin.set_paused(org, DAILY, paused=False, epoch=1)
        case "change":
            jittered = replace(spec, timing=replace(spec.timing, jitter_us=1_000_000))
            await shard.admin.update(org, DAILY, lambda _, template: (jittered, template), epoch=1)
        case _:
            await lost_runs.skip(shard.database)
    runs = await shard.runs(org)
    assert outcomes(runs)[:2] == ["stored"] * 2
    told = [range(run.at, (run.through or run.at) + 1, HOUR_US) for run in runs]
    assert [at for instants in told for at in instants] == [first + hour * HOUR_US for hour in range(5)]


async def test_a_run_that_is_due_when_no_other_waits_any_more_is_stored_whatever_was_counted(
    shard: Shard, org: OrgId
) -> None:
    spec = ScheduleSpec(timing=await shard.hourly(), overlap=Overlap.BUFFER_ALL)
    await shard.create(org, spec)
    await shard.database.run(
        b"UPDATE windrow.schedule s SET buffered = 1 FROM windrow.org o WHERE o.org_id = s.org_id AND o.org = %(org)s",
        {"org": org},
    )
    await shard.set_back(org, HOUR_US)
    await shard.fire()
    await shard.wake(org)
    await shard.fire()
    assert outcomes(await shard.runs(org)) == ["stored"]
    assert (await shard.admin.get(org, DAILY)).schedule.buffered == 0


async def test_a_buffered_run_is_looked_at_within_a_second_by_the_shards_clock(shard: Shard, org: OrgId) -> None:
    await overlapping(shard, org, Overlap.BUFFER_ONE)
    ((left_us,),) = await shard.database.run(
        b"SELECT (extract(epoch FROM s.wake_at - now()) * 1000000)::bigint FROM windrow.schedule s "
        b"JOIN windrow.org o USING (org_id) WHERE o.org = %(org)s",
        {"org": org},
    )
    assert left_us <= 1_000_000


async def test_with_cancel_running_the_job_is_cancelled_first(shard: Shard, org: OrgId) -> None:
    spec = ScheduleSpec(timing=await shard.hourly(), overlap=Overlap.CANCEL_RUNNING)
    await shard.create(org, spec)
    running, _ = await shard.admin.trigger(org, DAILY, request=None, epoch=1)
    await shard.set_back(org, HOUR_US)
    fired = await shard.due.fire()
    assert [(one.job, one.cancel) for one in fired.needed] == [(running, True)]
    assert fired.jobs == 0
    # If the router dies now, it has changed nothing, and the next router gets the same answer.
    await shard.wake(org)
    assert [one.job for one in (await shard.due.fire()).needed] == [running]
    await shard.store.cancel(org, [running], reason="replaced")
    await shard.wake(org)
    assert (await shard.due.fire()).jobs == 1
    assert running not in [job.id for job in await shard.jobs(org)]


async def test_a_job_that_another_shard_may_have_is_asked_for_before_a_run_is_decided(shard: Shard, org: OrgId) -> None:
    await shard.create(org, ScheduleSpec(timing=await shard.hourly()))
    elsewhere = JobId("019a9f5e-7c1d-7a41-8f0e-3f2b6d1c9a55")
    for is_live, outcome in ((True, "skipped overlap"), (False, "stored")):
        await shard.set_back(org, HOUR_US)
        await shard.database.run(
            b"WITH gone AS (DELETE FROM windrow.schedule_run r USING windrow.schedule s "
            b"WHERE s.id = r.schedule_id AND s.org_id = (SELECT o.org_id FROM windrow.org o WHERE o.org = %(org)s)) "
            b"UPDATE windrow.schedule SET last_job = %(job)s::uuid "
            b"WHERE org_id = (SELECT o.org_id FROM windrow.org o WHERE o.org = %(org)s)",
            {"org": org, "job": elsewhere},
        )
        fired = await shard.due.fire(is_whole=lambda _: False)
        assert ([one.job for one in fired.needed], fired.jobs) == ([elsewhere], 0)
        assert await shard.runs(org) == []
        await shard.wake(org)
        await shard.due.fire(is_whole=lambda _: False, known={elsewhere: is_live})
        assert outcomes(await shard.runs(org)) == [outcome]


# ── Changes by hand ──────────────────────────────────────────────────────────────────────────────────────────────────


async def test_what_falls_into_a_pause_is_skipped_for_it(fresh_database: Database, org: OrgId) -> None:
    # The test uses its own database, because no schedule of another test may become due in it.
    shard = Shard(fresh_database)
    await shard.create(org, ScheduleSpec(timing=await shard.hourly()))
    await shard.admin.set_paused(org, DAILY, paused=True, epoch=1)
    await shard.set_back_paused(org, 3 * HOUR_US)
    assert (await shard.fire()).taken == 0
    resumed = await shard.admin.set_paused(org, DAILY, paused=False, epoch=1)
    assert resumed.schedule.next_at is not None
    assert resumed.schedule.next_at > resumed.now
    (run,) = await shard.runs(org)
    assert run.skipped_for is SkipReason.PAUSE
    assert run.through is not None
    assert run.through - run.at == 2 * HOUR_US
    assert (await shard.fire()).jobs == 0


async def test_a_run_whose_jitter_is_not_over_when_a_pause_ends_is_stored_then(shard: Shard, org: OrgId) -> None:
    name, at, due = DAILY, Micros(0), Micros(0)
    spec = ScheduleSpec(timing=await shard.hourly(jitter_us=DAY_US))
    (now,) = (await shard.database.run(b"SELECT now()", {}))[0]
    # The jitter depends on the random id of the schedule. Create schedules until one has a jitter that is long enough.
    while due < now + HALF_US:
        name = ScheduleName(f"{name}-again")
        created = await shard.create(org, spec, name)
        at = await shard.set_back_paused(org, HOUR_US, name)
        due = calendar.due(spec.timing, created.schedule.id, at)
    for paused in (True, False):
        await shard.admin.set_paused(org, name, paused=paused, epoch=1)
    assert await shard.runs(org, name) == []
    assert (await shard.admin.get(org, name)).schedule.next_at == at


async def test_a_paused_schedule_can_be_triggered_and_sleeps_on(shard: Shard, org: OrgId) -> None:
    await shard.create(org, ScheduleSpec(timing=await shard.hourly()))
    await shard.admin.set_paused(org, DAILY, paused=True, epoch=1)
    job, duplicate = await shard.admin.trigger(org, DAILY, request=None, epoch=1)
    assert not duplicate
    assert [one.id for one in await shard.jobs(org)] == [job]
    found = await shard.admin.get(org, DAILY)
    assert found.schedule.paused_at is not None


async def test_a_backfill_obeys_its_own_overlap_policy(shard: Shard, org: OrgId) -> None:
    created = await shard.create(org, ScheduleSpec(timing=await shard.hourly()))
    begin, end = Micros(created.now - 30 * HOUR_US), Micros(created.now - 20 * HOUR_US)
    done = await shard.admin.backfill(org, DAILY, begin=begin, end=end, overlap=Overlap.BUFFER_ALL, epoch=1)
    assert (done.stored, done.buffered, done.skipped, done.known) == (1, 9, 0, 0)
    again = await shard.admin.backfill(org, DAILY, begin=begin, end=end, overlap=Overlap.ALLOW, epoch=1)
    assert (again.stored, again.known) == (0, 10)
    seen: list[Micros] = []
    for _ in range(10):
        (job,) = await shard.jobs(org)
        assert job.cause == "backfill"
        seen.append(job.at)
        await shard.end_job(org)
        await shard.wake(org)
        await shard.fire()
    assert seen == sorted(set(seen))
    assert await shard.jobs(org) == []


@pytest.mark.parametrize("reason", ["pause", "recovered"])
async def test_a_backfill_stores_instants_that_were_skipped_together_and_the_others_stay_told(
    shard: Shard, org: OrgId, reason: str
) -> None:
    await shard.create(org, ScheduleSpec(timing=await shard.hourly()))
    if reason == "pause":
        await shard.admin.set_paused(org, DAILY, paused=True, epoch=1)
        first = await shard.set_back_paused(org, 5 * HOUR_US)
        await shard.admin.set_paused(org, DAILY, paused=False, epoch=1)
    else:
        first = await shard.set_back(org, 5 * HOUR_US)
        await lost_runs.skip(shard.database)
    (told,) = await shard.runs(org)
    assert (told.at, told.through, told.skipped_for) == (first, first + 4 * HOUR_US, SkipReason(reason))

    async def backfill(begin: int, instants: int) -> Backfilled:
        at = Micros(first + begin * HOUR_US)
        end = Micros(at + (instants - 1) * HOUR_US + 1)
        return await shard.admin.backfill(org, DAILY, begin=at, end=end, overlap=Overlap.ALLOW, epoch=1)

    assert (await backfill(1, 1)).stored == 1
    # The row of the first instant has recorded all skipped instants. Now the second instant has its own row.
    done = await backfill(0, 1)
    assert (done.stored, done.known) == (1, 0)
    runs = await shard.runs(org)
    assert [(run.at, run.through) for run in runs] == [
        (first, None),
        (first + HOUR_US, None),
        (first + 2 * HOUR_US, first + 4 * HOUR_US),
    ]
    assert outcomes(runs) == ["stored", "stored", f"skipped {reason}"]
    done = await backfill(0, 5)
    assert (done.stored, done.known) == (3, 2)
    assert outcomes(await shard.runs(org)) == ["stored"] * 5
    assert len({job.at for job in await shard.jobs(org)}) == 5


async def test_a_skip_stays_told_behind_as_many_runs_as_a_backfill_may_have(
    shard: Shard, org: OrgId, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schedule_admin, "BACKFILL_MAX", 3)
    await shard.create(org, ScheduleSpec(timing=await shard.hourly()))
    first = await shard.set_back(org, 8 * HOUR_US)
    await shard.fire()
    skipped, _ = await shard.runs(org)
    assert (skipped.at, skipped.through) == (first, first + 6 * HOUR_US)
    # Backfill the fourth instant, and then the three instants before it.
    for begin, instants in ((3, 1), (0, 3)):
        at = Micros(first + begin * HOUR_US)
        end = Micros(at + (instants - 1) * HOUR_US + 1)
        await shard.admin.backfill(org, DAILY, begin=at, end=end, overlap=Overlap.ALLOW, epoch=1)
    runs = await shard.runs(org)
    assert outcomes(runs) == [*["stored"] * 4, "skipped catch_up", "stored"]
    assert (runs[4].at, runs[4].through) == (first + 4 * HOUR_US, first + 6 * HOUR_US)


async def test_a_backfill_leaves_what_an_overlap_has_skipped(shard: Shard, org: OrgId) -> None:
    await shard.create(org, ScheduleSpec(timing=await shard.hourly(), catch_up=CatchUp.ALL))
    first = await shard.set_back(org, 2 * HOUR_US)
    await shard.fire()
    assert outcomes(await shard.runs(org)) == ["stored", "skipped overlap"]
    end = Micros(first + HOUR_US + 1)
    done = await shard.admin.backfill(org, DAILY, begin=first, end=end, overlap=Overlap.ALLOW, epoch=1)
    assert (done.stored, done.known) == (0, 2)


@pytest.mark.parametrize("ends_by", ["resume", "another timing", "catch-up"])
async def test_a_backfill_of_instants_that_are_not_decided_leaves_the_later_ones_told_as_skipped(
    shard: Shard, org: OrgId, ends_by: str
) -> None:
    await shard.create(org, ScheduleSpec(timing=await shard.hourly()))
    if ends_by != "catch-up":
        await shard.admin.set_paused(org, DAILY, paused=True, epoch=1)
    first = await shard.set_back_paused(org, 5 * HOUR_US)
    # Backfill the second instant before the first one.
    for begin in (first + HOUR_US, first):
        end = Micros(begin + 1)
        await shard.admin.backfill(org, DAILY, begin=Micros(begin), end=end, overlap=Overlap.ALLOW, epoch=1)
    match ends_by:
        case "resume":
            await shard.admin.set_paused(org, DAILY, paused=False, epoch=1)
        case "another timing":
            yearly = Timing(cron="0 0 1 1 *")
            await shard.admin.update(org, DAILY, lambda spec, had: (replace(spec, timing=yearly), had), epoch=1)
        case _:
            await shard.wake(org)
            await shard.fire()
    told = await shard.runs(org)
    reason = "catch_up" if ends_by == "catch-up" else "pause"
    assert outcomes(told[:3]) == ["stored", "stored", f"skipped {reason}"]
    last = first + (3 if ends_by == "catch-up" else 4) * HOUR_US
    assert (told[2].at, told[2].through) == (first + 2 * HOUR_US, last)


async def test_a_backfilled_run_waits_for_the_job_before_it_and_for_no_later_one(shard: Shard, org: OrgId) -> None:
    created = await shard.create(org, ScheduleSpec(timing=await shard.hourly(), overlap=Overlap.ALLOW))
    before, _ = await shard.admin.trigger(org, DAILY, request=None, epoch=1)
    begin = Micros(created.now - 30 * HOUR_US)
    end = Micros(begin + 2 * HOUR_US)
    done = await shard.admin.backfill(org, DAILY, begin=begin, end=end, overlap=Overlap.BUFFER_ALL, epoch=1)
    assert done.buffered == 2
    # The schedule's own overlap policy allows the next run. The job of this run stays live.
    await shard.set_back(org, HOUR_US)
    assert (await shard.fire()).jobs == 1
    for left in (1, 0):
        await shard.wake(org)
        assert (await shard.fire()).jobs == 0
        await shard.store.cancel(org, [before], reason="")
        await shard.wake(org)
        assert (await shard.fire()).jobs == 1
        assert (await shard.admin.get(org, DAILY)).schedule.buffered == left
        before = next(job.id for job in await shard.jobs(org) if job.at < end)


async def test_a_backfilled_run_that_has_waited_is_no_run_of_the_calendar(shard: Shard, org: OrgId) -> None:
    created = await shard.create(org, ScheduleSpec(timing=await shard.hourly()))
    last = await shard.set_back(org, HOUR_US)
    await shard.fire()
    begin, end = Micros(created.now - 30 * HOUR_US), Micros(created.now - 29 * HOUR_US)
    done = await shard.admin.backfill(org, DAILY, begin=begin, end=end, overlap=Overlap.BUFFER_ONE, epoch=1)
    assert done.buffered == 1
    await shard.end_job(org)
    await shard.wake(org)
    await shard.fire()
    assert [job.cause for job in await shard.jobs(org)] == ["backfill"]
    assert (await shard.admin.get(org, DAILY)).schedule.last_at == last


# ── A shard that lost history ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("catch_up", list(CatchUp))
async def test_what_a_lost_history_may_have_stored_is_skipped_whatever_the_catch_up_is(
    shard: Shard, org: OrgId, catch_up: CatchUp
) -> None:
    window_us = DAY_US if catch_up is CatchUp.WINDOW else None
    spec = ScheduleSpec(timing=await shard.hourly(), catch_up=catch_up, catch_up_window_us=window_us)
    created = await shard.create(org, spec)
    first = await shard.set_back(org, 4 * HOUR_US)
    await lost_runs.skip(shard.database)
    assert (await shard.fire()).jobs == 0
    (run,) = await shard.runs(org)
    assert (run.at, run.through, run.skipped_for) == (first, first + 3 * HOUR_US, SkipReason.RECOVERED)
    found = await shard.admin.get(org, DAILY)
    assert found.schedule.next_at == created.schedule.next_at
    assert await lost_runs.skip(shard.database) == (0, 0), "it may be repeated"
    assert await shard.runs(org) == [run]


async def test_runs_that_wait_may_have_been_stored_too(shard: Shard, org: OrgId) -> None:
    spec = ScheduleSpec(timing=await shard.hourly(), overlap=Overlap.BUFFER_ALL, catch_up=CatchUp.ALL)
    await shard.create(org, spec)
    await shard.set_back(org, 3 * HOUR_US)
    await shard.fire()
    assert outcomes(await shard.runs(org)) == ["stored", "buffered", "buffered"]
    assert (await lost_runs.skip(shard.database)).buffered == 2
    assert outcomes(await shard.runs(org)) == ["stored", "skipped recovered", "skipped recovered"]
    await shard.end_job(org)
    await shard.wake(org)
    assert (await shard.fire()).jobs == 0
    assert (await shard.admin.get(org, DAILY)).schedule.buffered == 0


async def test_a_paused_schedule_sleeps_on_and_one_of_another_shard_is_left(
    shard: Shard, org: OrgId, other_org: OrgId
) -> None:
    for one in (org, other_org):
        await shard.create(one, ScheduleSpec(timing=await shard.hourly()))
    await shard.admin.set_paused(org, DAILY, paused=True, epoch=1)
    await shard.set_back_paused(org, 3 * HOUR_US)
    await shard.set_back(other_org, 3 * HOUR_US)
    slot = slot_of(other_org)
    await shard.database.run(b"UPDATE windrow.owned_slot SET state = 'draining' WHERE slot = %(slot)s", {"slot": slot})
    try:
        await lost_runs.skip(shard.database)
        assert await shard.runs(org) == []
        assert await shard.runs(other_org) == []
    finally:
        await shard.database.run(b"UPDATE windrow.owned_slot SET state = 'owned' WHERE slot = %(slot)s", {"slot": slot})
    await lost_runs.skip(shard.database)
    assert outcomes(await shard.runs(other_org)) == ["skipped recovered"]
    assert await shard.runs(org) == []


async def _lose_zone(shard: Shard, org: OrgId) -> None:
    """Makes the time zone of the org's schedules one that does not exist, as an update of the system may do."""
    await shard.database.run(
        b"UPDATE windrow.schedule s SET zone = 'Mars/Olympus', cron = '0 * * * *', interval_us = NULL "
        b"FROM windrow.org o WHERE o.org_id = s.org_id AND o.org = %(org)s",
        {"org": org},
    )


async def test_a_schedule_that_cannot_be_decided_holds_up_no_other_after_a_loss(
    shard: Shard, org: OrgId, other_org: OrgId, caplog: pytest.LogCaptureFixture
) -> None:
    for one in (org, other_org):
        await shard.create(one, ScheduleSpec(timing=await shard.hourly()))
        await shard.set_back(one, 3 * HOUR_US)
    await _lose_zone(shard, org)
    await lost_runs.skip(shard.database)
    assert f"of org '{org}' cannot be decided" in caplog.text
    assert outcomes(await shard.runs(other_org)) == ["skipped recovered"]
    assert await shard.runs(org) == []
    await shard.admin.delete(org, DAILY, epoch=1)


async def test_a_changed_timing_counts_from_now_on(shard: Shard, org: OrgId) -> None:
    await shard.create(org, ScheduleSpec(timing=await shard.hourly()))
    await shard.set_back(org, 3 * HOUR_US)
    daily = Timing(cron="0 0 1 1 *")
    changed = await shard.admin.update(org, DAILY, lambda spec, had: (replace(spec, timing=daily), had), epoch=1)
    assert changed.schedule.next_at is not None
    assert changed.schedule.next_at > changed.now
    assert (await shard.fire()).jobs == 0


@pytest.mark.parametrize(("paused", "reason"), [(False, "catch_up"), (True, "pause")])
async def test_what_was_due_by_a_timing_that_is_changed_is_told_as_skipped(
    shard: Shard, org: OrgId, paused: bool, reason: str
) -> None:
    created = await shard.create(org, ScheduleSpec(timing=await shard.hourly(), catch_up=CatchUp.ALL))
    if paused:
        await shard.admin.set_paused(org, DAILY, paused=True, epoch=1)
    first = await shard.set_back_paused(org, 3 * HOUR_US)
    daily = Timing(cron="0 0 1 1 *")
    changed = await shard.admin.update(org, DAILY, lambda spec, had: (replace(spec, timing=daily), had), epoch=1)
    (run,) = await shard.runs(org)
    assert outcomes([run]) == [f"skipped {reason}"]
    assert (run.at, run.through) == (first, first + 2 * HOUR_US)
    # The schedule continues with the new timing, and is still paused if it was paused.
    schedule = changed.schedule
    assert schedule.next_at == calendar.following(daily, changed.now)
    assert (schedule.paused_at is not None) is paused
    # Only a change of the timing records instants as skipped.
    await shard.set_back_paused(org, 370 * DAY_US)
    await shard.admin.update(org, DAILY, lambda spec, had: (replace(spec, note="new"), had), epoch=1)
    assert await shard.admin.runs(org, created.schedule.id) == [run]


async def test_a_timing_that_has_become_invalid_can_be_changed(shard: Shard, org: OrgId) -> None:
    await shard.create(org, ScheduleSpec(timing=await shard.hourly()))
    await shard.set_back(org, 3 * HOUR_US)
    await _lose_zone(shard, org)
    daily = Timing(cron="0 0 1 1 *")
    changed = await shard.admin.update(org, DAILY, lambda spec, had: (replace(spec, timing=daily), had), epoch=1)
    assert changed.schedule.next_at == calendar.following(daily, changed.now)
    assert await shard.runs(org) == []


async def test_a_job_goes_where_the_changed_template_says(shard: Shard, org: OrgId) -> None:
    await shard.create(org, ScheduleSpec(timing=await shard.hourly()))
    await shard.admin.update(org, DAILY, lambda spec, _: (spec, template(queue="other", payload=b"new")), epoch=1)
    await shard.set_back(org, HOUR_US)
    await shard.fire()
    (job,) = await shard.jobs(org)
    (record,) = await shard.store.get(org, [job.id], include_payload=True)
    assert (record.queue, record.payload) == ("other", b"new")


async def test_a_deleted_schedule_leaves_its_jobs_and_no_runs(shard: Shard, org: OrgId) -> None:
    created = await shard.create(org, ScheduleSpec(timing=await shard.hourly()))
    await shard.set_back(org, HOUR_US)
    await shard.fire()
    await shard.admin.delete(org, DAILY, epoch=1)
    assert len(await shard.jobs(org)) == 1
    assert await shard.admin.runs(org, created.schedule.id) == []
    with pytest.raises(UnknownSchedule):
        await shard.admin.delete(org, DAILY, epoch=1)


async def test_a_name_is_taken_once_in_an_org(shard: Shard, org: OrgId, other_org: OrgId) -> None:
    spec = ScheduleSpec(timing=await shard.hourly())
    await shard.create(org, spec)
    with pytest.raises(ScheduleExists):
        await shard.create(org, spec)
    await shard.create(other_org, spec)
    await shard.admin.delete(other_org, DAILY, epoch=1)
    assert (await shard.admin.get(org, DAILY)).schedule.org == org


async def test_an_org_may_have_so_many_schedules(shard: Shard, org: OrgId, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule_admin, "SCHEDULES_MAX", 1)
    spec = ScheduleSpec(timing=await shard.hourly())
    await shard.create(org, spec)
    with pytest.raises(TooManySchedules):
        await shard.create(org, spec, ScheduleName("second"), queue="new")
    assert await shard.store.names.find([(org, QueueName("new"))]) == {}
    # A create with the name of the first schedule is refused because that schedule exists.
    with pytest.raises(ScheduleExists):
        await shard.create(org, spec)


async def test_a_shard_that_does_not_own_the_slot_neither_fires_nor_changes(
    fresh_database: Database, org: OrgId
) -> None:
    shard = Shard(fresh_database)
    await shard.create(org, ScheduleSpec(timing=await shard.hourly()))
    await shard.set_back(org, HOUR_US)
    await fresh_database.run(b"UPDATE windrow.owned_slot SET state = 'draining', epoch = 7", {})
    assert (await shard.due.next_wake()).at is None
    assert (await shard.fire()).taken == 0
    for refused in (
        shard.admin.trigger(org, DAILY, request=None, epoch=7),
        shard.admin.set_paused(org, DAILY, paused=True, epoch=7),
        shard.admin.delete(org, DAILY, epoch=7),
        shard.create(org, ScheduleSpec(timing=await shard.hourly()), ScheduleName("new"), epoch=7),
    ):
        with pytest.raises(NotOwned):
            await refused


async def test_an_erased_org_has_no_schedules(fresh_database: Database, org: OrgId) -> None:
    shard = Shard(fresh_database)
    await shard.create(org, ScheduleSpec(timing=await shard.hourly()))
    await shard.set_back(org, HOUR_US)
    await shard.fire()
    await shard.set_back(org, HOUR_US)
    assert await erasure.begin(fresh_database, org, erasure="00000000-0000-4000-8000-000000000001")
    assert (await shard.fire()).taken == 0
    (unfinished,) = await erasure.unfinished(fresh_database)
    while await erasure.go_on(fresh_database, unfinished):
        pass
    for table in (b"schedule", b"schedule_run", b"job"):
        assert await fresh_database.run(b"SELECT count(*) FROM windrow." + table, {}) == [(0,)]


@pytest.mark.parametrize("act", ["trigger", "backfill"])
@pytest.mark.parametrize("remembered", ["of an erased org", "of another org"])
async def test_a_router_that_remembers_a_wrong_queue_stores_the_run_in_the_right_one(
    fresh_database: Database, org: OrgId, other_org: OrgId, remembered: str, act: str
) -> None:
    shard = Shard(fresh_database)
    mail = QueueName("mail")
    if remembered == "of an erased org":
        await shard.create(org, ScheduleSpec(timing=await shard.hourly()))
        assert await erasure.begin(fresh_database, org, erasure="00000000-0000-4000-8000-000000000001")
        (unfinished,) = await erasure.unfinished(fresh_database)
        while await erasure.go_on(fresh_database, unfinished):
            pass
    else:
        # The store remembers a wrong queue number, as it may after the shard was restored from a backup.
        ids = await shard.store.names.make([(other_org, mail)])
        shard.store.names.remember(ids[other_org, mail], org, mail)
    # Another router makes the schedule.
    created = await Shard(fresh_database).create(org, ScheduleSpec(timing=await shard.hourly()))
    stored: JobId | None
    if act == "trigger":
        stored, _ = await shard.admin.trigger(org, DAILY, request=None, epoch=1)
    else:
        begin, end = Micros(created.now - 2 * HOUR_US), Micros(created.now - HOUR_US)
        await shard.admin.backfill(org, DAILY, begin=begin, end=end, overlap=Overlap.ALLOW, epoch=1)
        stored = (await shard.runs(org))[0].job_id
    assert [job.id for job in await shard.jobs(org)] == [stored]
    assert await fresh_database.run(b"SELECT count(*) FROM windrow.job", {}) == [(1,)]


async def test_a_run_for_a_queue_that_is_gone_is_refused_and_leaves_nothing(shard: Shard, org: OrgId) -> None:
    created = await shard.create(org, ScheduleSpec(timing=await shard.hourly()))
    await shard.database.run(b"DELETE FROM windrow.queue WHERE org = %(org)s", {"org": org})
    begin, end = Micros(created.now - 2 * HOUR_US), Micros(created.now - HOUR_US)
    for refused in (
        shard.admin.trigger(org, DAILY, request=None, epoch=1),
        shard.admin.backfill(org, DAILY, begin=begin, end=end, overlap=Overlap.ALLOW, epoch=1),
    ):
        with pytest.raises(UnknownQueue):
            await refused
    assert await shard.runs(org) == []


async def test_runs_beyond_the_newest_are_forgotten_but_not_those_of_backfills(shard: Shard, org: OrgId) -> None:
    created = await shard.create(org, ScheduleSpec(timing=await shard.hourly(), overlap=Overlap.ALLOW))
    begin = Micros(created.now - 300 * HOUR_US)
    backfill = {"begin": begin, "end": Micros(begin + 30 * HOUR_US), "overlap": Overlap.ALLOW, "epoch": 1}
    assert (await shard.admin.backfill(org, DAILY, **backfill)).stored == 30  # type: ignore[arg-type]
    for back in range(2 * RUNS_KEPT, 0, -1):
        await shard.set_back(org, back * HOUR_US)
        await shard.fire()
    rows = await shard.database.run(
        b"SELECT cause, count(*) FROM windrow.schedule_run WHERE schedule_id = %(id)s::uuid GROUP BY cause",
        {"id": created.schedule.id},
    )
    kept = dict(rows)
    assert kept["backfill"] == 30
    assert kept["catch_up"] < 2 * RUNS_KEPT
    assert (await shard.admin.backfill(org, DAILY, **backfill)).known == 30  # type: ignore[arg-type]


async def test_a_firing_needs_no_more_than_one_connection(module_dsn: str, shard: Shard, org: OrgId) -> None:
    await shard.create(org, ScheduleSpec(timing=await shard.hourly()))
    await shard.set_back(org, HOUR_US)
    single = Database(SHARD, module_dsn, connections=1)
    await single.open()
    try:
        router = Shard(single)
        assert (await DueSchedules(single, router.store).fire()).jobs >= 1
    finally:
        await single.close()


async def test_a_backfill_asks_other_shards_while_it_holds_neither_its_schedule_nor_a_connection(
    module_dsn: str, shard: Shard, org: OrgId
) -> None:
    created = await shard.create(org, ScheduleSpec(timing=await shard.hourly()))
    first, _ = await shard.admin.trigger(org, DAILY, request=None, epoch=1)
    single = Database(SHARD, module_dsn, connections=1)
    await single.open()
    asked: list[JobId] = []

    async def ended_elsewhere(job: JobId) -> bool:
        asked.append(job)
        if len(asked) == 1:
            await single.run(b"SELECT 1", {})
            # While the backfill asks, another router starts the next run.
            await shard.end_job(org)
            await shard.admin.trigger(org, DAILY, request=None, epoch=1)
        return True

    begin, end = Micros(created.now - 3 * HOUR_US), Micros(created.now - HOUR_US)
    try:
        done = await Shard(single).admin.backfill(
            org, DAILY, begin=begin, end=end, overlap=Overlap.SKIP, epoch=1, ended_elsewhere=ended_elsewhere
        )
    finally:
        await single.close()
    # The only live job is that of the run which the other router has started.
    (running,) = await shard.jobs(org)
    assert asked == [first, running.id]
    assert (done.stored, done.skipped) == (0, 2)


async def test_a_trigger_needs_no_more_than_one_connection(module_dsn: str, org: OrgId) -> None:
    single = Database(SHARD, module_dsn, connections=1)
    await single.open()
    try:
        router = Shard(single)
        await router.create(org, ScheduleSpec(timing=await router.hourly()))
        other = Shard(single)
        await other.admin.trigger(org, DAILY, request=None, epoch=1)
        with pytest.raises(UnknownSchedule):
            await other.admin.trigger(org, ScheduleName("none"), request=None, epoch=1)
    finally:
        await single.close()
