"""What a schedule does at a moment: which instants are stored, and which are skipped."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shard.schedule import CatchUp, Overlap, RunCause, RunOutcome, ScheduleId, ScheduleSpec, Timing
from shard.schedules import calendar, plan
from shard.schedules.plan import Present
from shard.vocabulary import Micros

_ID = ScheduleId("8d7f8c0e-6f0b-4f0e-9d38-1f3c5a3f2b11")
_SECOND_US = 1_000_000
_MINUTE_US = 60 * _SECOND_US
_BEGIN = Micros(29_000_000 * _MINUTE_US)


@pytest.mark.parametrize("catch_up", list(CatchUp))
@pytest.mark.parametrize("jitter_us", [0, _SECOND_US, _MINUTE_US, 5 * _MINUTE_US, 100 * _MINUTE_US, 1440 * _MINUTE_US])
def test_jitter_delays_each_run_and_skips_none(jitter_us: int, catch_up: CatchUp) -> None:
    spec = ScheduleSpec(
        timing=Timing(interval_us=_MINUTE_US, jitter_us=jitter_us),
        overlap=Overlap.ALLOW,
        catch_up=catch_up,
        catch_up_window_us=_SECOND_US if catch_up is CatchUp.WINDOW else None,
    )
    first = calendar.following(spec.timing, _BEGIN)
    assert first is not None
    next_at = first
    stored: list[Micros] = []
    while len(stored) < 300:
        # The router fires the schedule as soon as the run is due.
        now = Micros(calendar.due(spec.timing, _ID, next_at) + 5_000)
        planned = plan.plan(_ID, spec, Present(now=now, next_at=next_at, running=False, buffered=0))
        assert planned.runs
        for run in planned.runs:
            assert (run.outcome, run.cause) == (RunOutcome.STORED, RunCause.SCHEDULE)
            assert calendar.due(spec.timing, _ID, run.at) <= now <= run.at + jitter_us + 5_000
        stored += [run.at for run in planned.runs]
        assert planned.next_at is not None
        assert planned.wake_at is not None
        assert planned.wake_at > now - 5_000
        next_at = planned.next_at
    assert stored == [first + at * _MINUTE_US for at in range(len(stored))]


def test_after_an_outage_with_jitter_only_what_is_late_is_skipped() -> None:
    spec = ScheduleSpec(timing=Timing(interval_us=_MINUTE_US, jitter_us=10 * _MINUTE_US), overlap=Overlap.ALLOW)
    now = Micros(_BEGIN + 1000 * _MINUTE_US)
    planned = plan.plan(_ID, spec, Present(now=now, next_at=Micros(_BEGIN), running=False, buffered=0))
    skipped, *stored = planned.runs
    assert (skipped.outcome, skipped.at) == (RunOutcome.SKIPPED, _BEGIN)
    assert skipped.through == stored[0].at - _MINUTE_US
    assert stored[0].at == now - 10 * _MINUTE_US
    assert [run.at for run in stored] == list(range(stored[0].at, stored[-1].at + 1, _MINUTE_US))
    assert {run.outcome for run in stored} == {RunOutcome.STORED}
    assert planned.wake_at is not None
    assert planned.wake_at > now


@pytest.mark.parametrize("catch_up", list(CatchUp))
@pytest.mark.parametrize("zone", ["Etc/GMT", "Etc/GMT-2"], ids=["later", "earlier"])
def test_a_run_is_stored_once_if_its_time_zone_gets_other_rules_before_it(zone: str, catch_up: CatchUp) -> None:
    old = ScheduleSpec(
        timing=Timing(cron="0 8 * * *", zone="Etc/GMT-1"),
        overlap=Overlap.ALLOW,
        catch_up=catch_up,
        catch_up_window_us=_MINUTE_US if catch_up is CatchUp.WINDOW else None,
    )
    spec = replace(old, timing=replace(old.timing, zone=zone))
    next_at = calendar.following(old.timing, _BEGIN)
    assert next_at is not None
    stored: list[Micros] = []
    now, end = next_at, next_at + 720 * _MINUTE_US
    while now < end:
        planned = plan.plan(_ID, spec, Present(now=now, next_at=next_at, running=False, buffered=0))
        stored += [run.at for run in planned.runs if run.outcome is RunOutcome.STORED]
        assert planned.next_at is not None
        assert planned.wake_at is not None
        assert planned.wake_at > now
        next_at, now = planned.next_at, planned.wake_at
    assert len(stored) == 1
