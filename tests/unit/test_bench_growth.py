"""How `./run bench grow` computes which orgs a move delayed and for how long, from calls and catalog readings."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest

from bench.demands import Demand
from bench.pickups import Pickup
from bench.scenarios.grow import scenario as grow
from bench.scenarios.grow.figures import Look, Phase, Seen, figures, longest_gap_s, moved_slots, watched
from bench.scenarios.grow.scenario import Course
from bench.verdict import Verdict
from proof.checker import Violation
from proof.history import Call, Outcome, Verb

_UNAVAILABLE = "UNAVAILABLE"


def _call(org: int, due_s: float, took_s: float = 0.01, code: str = "", verb: Verb = Verb.ENQUEUE) -> Call:
    how = Outcome.UNKNOWN if code else Outcome.OK
    ended_s = due_s + took_s
    return Call(client="c", verb=verb, org=str(org), began_s=due_s, ended_s=ended_s, outcome=how, code=code)


def _failing(demands: Sequence[Demand]) -> list[str]:
    return [one.what for one in demands if not one.holds]


PHASE = Phase(name="growing", began_s=10.0, ended_s=20.0)


def test_a_gap_is_the_longest_between_two_successes_that_touches_the_phase() -> None:
    calls = [_call(0, at) for at in (5.0, 8.0, 11.0, 16.0, 19.0, 21.0, 40.0)]
    assert longest_gap_s(calls, PHASE, ["0"]) == pytest.approx(5.0)
    # Neither a failed call nor another org's call counts as success.
    calls = [_call(0, 16.0, code=_UNAVAILABLE) if one.due_s == 16.0 else one for one in calls]
    assert longest_gap_s([*calls, _call(1, 16.0)], PHASE, ["0"]) == pytest.approx(8.0)
    assert math.isinf(longest_gap_s(calls, PHASE, ["0", "2"]))
    assert math.isnan(longest_gap_s(calls, PHASE, []))


def test_a_phase_has_what_was_due_in_it() -> None:
    seen = Seen(
        calls=[
            _call(0, 9.9, code=_UNAVAILABLE),
            _call(0, 10.0, took_s=0.5),
            _call(5, 12.0, took_s=0.1),
            _call(5, 13.0, code=_UNAVAILABLE),
            _call(0, 14.0, code=_UNAVAILABLE, verb=Verb.RETRY),
            _call(0, 15.0, code="UNKNOWN", verb=Verb.WORK),
            _call(0, 21.0),
        ],
        pickups=[Pickup(due_s=due_s, waited_ms=due_s) for due_s in (9.0, 10.0, 15.0, 20.0)],
        dequeues=[],
    )
    found = figures(seen, PHASE, moved={"5"}, watched={"0"})
    # The producers stored one job of the watched org, and ten jobs of the other org.
    assert found.stored_per_s == pytest.approx(1.1)
    assert found.pickup is not None
    assert found.pickup.jobs == 2
    # An enqueue and a call of a worker have failed. Calls that succeeded after retries are counted separately.
    assert found.failed == 2
    assert found.retries == Counter({_UNAVAILABLE: 1})
    assert (found.longest_stayed_s, found.longest_moved_s) == pytest.approx((0.5, 0.1))
    assert found.told(0.0)["gap_moved_s"] is None


def test_watched_orgs_are_spread_over_all() -> None:
    assert watched([str(number) for number in range(5000)])[:3] == ["0", "312", "625"]
    assert watched("abcdefghij") == list("abcdefghij")


def _course(slots: int) -> tuple[Course, list[str], list[str]]:
    before = ["s1", "s2"] * 8192
    after = ["s3"] * slots + before[slots:]
    return (
        Course(phases=[PHASE], looks=[Look(at_s=12.0, written=0, moving=slots)], owners=[before, after]),
        before,
        after,
    )


def test_a_move_is_told_by_slots_and_by_the_jobs_that_lay_on_them() -> None:
    course, before, after = _course(5461)
    assert moved_slots(before, after) == set(range(5461))
    found = grow.moved(course, "growing", before, after, Counter({0: 30, 5460: 50, 5461: 7}))
    assert (found.slots, found.jobs, found.seconds, found.moving_s) == (5461, 80, 10.0, 8.0)
    assert found.jobs_per_s == 10.0


def test_each_demand_on_growing_can_fail() -> None:
    course, before, after = _course(5461)
    jobs = Counter({0: 30})
    names = ("before", "growing", "after", "draining", "in the end")
    phases = [Phase(name=name, began_s=at * 10.0, ended_s=at * 10.0 + 10) for at, name in enumerate(names)]
    pickups = [Pickup(due_s=phase.began_s + at, waited_ms=5.0) for phase in phases for at in range(10)]
    seen = Seen(calls=[], pickups=pickups, dequeues=pickups)
    found = [figures(seen, phase, moved=(), watched=()) for phase in phases]
    moves = [grow.moved(course, "growing", before, after, jobs)]
    sound = Verdict(jobs=1, violations=(), faultless=True)
    assert _failing(grow.demands(found, moves, sound)) == []
    for slots in (5461 - 56, 5461 + 56):
        _, _, other = _course(slots)
        assert len(_failing(grow.demands(found, [grow.moved(course, "growing", before, other, jobs)], sound))) == 1
    assert len(_failing(grow.demands([*found[:-1], replace(found[-1], failed=1)], moves, sound))) == 1
    slow = replace(seen, pickups=[one if one.due_s != 15 else replace(one, waited_ms=11.0) for one in pickups])
    growing = figures(slow, phases[1], moved=(), watched=())
    assert _failing(grow.demands([found[0], growing, *found[2:]], moves, sound)) == ["pickup p99, growing ÷ before"]
    lost = replace(sound, violations=[Violation(invariant="I1", what="job j is nowhere")])
    assert _failing(grow.demands(found, moves, lost)) == ["Nothing acknowledged is lost: violations (I1), of 1 jobs"]
    twice = replace(sound, violations=[Violation(invariant="once", what="job j came to workers 2 times")])
    assert len(_failing(grow.demands(found, moves, twice))) == 1
