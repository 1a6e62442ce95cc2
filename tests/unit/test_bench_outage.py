"""How `./run bench outage` computes which orgs an outage affected and for how long, from calls."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from bench.demands import Demand, at_most, none_of, table
from bench.scenarios.outage import scenario as outage
from bench.scenarios.outage.figures import Outcome, Sort, Strike, outcome
from bench.times import times
from bench.verdict import Verdict
from proof import history
from proof.checker import Violation
from proof.history import Call, Verb

OK, UNAVAILABLE, DEADLINE = "", "UNAVAILABLE", "DEADLINE_EXCEEDED"
HOMES = {"0": "s1", "1": "s2", "2": "s2"}
STRIKE = Strike(sort=Sort.RESTART, shard="s2", began_s=100.0, killed_s=110.0, back_s=120.0, up_s=120.5, ended_s=130.0)


def call(org: int, due_s: float, took_s: float = 0.01, code: str = OK, verb: Verb = Verb.ENQUEUE) -> Call:
    how = history.Outcome.OK if code == OK else history.Outcome.UNKNOWN
    ended_s = due_s + took_s
    return Call(client="c", verb=verb, org=str(org), began_s=due_s, ended_s=ended_s, outcome=how, code=code)


def an_outage() -> list[Call]:
    """Returns one call per org and second. The calls of the orgs on s2 fail without delay, from the kill until 2 s
    after the restart."""
    calls: list[Call] = []
    for at in range(100, 130):
        calls.append(call(0, at + 0.1))
        calls += [call(org, at + 0.1, code=UNAVAILABLE if 110 <= at < 122 else OK) for org in (1, 2)]
    return calls


def test_an_outage_is_told_apart_for_those_whose_shard_it_was() -> None:
    found = outcome(STRIKE, an_outage(), HOMES)
    assert found.before is not None
    assert found.away is not None
    assert found.back is not None
    assert (found.before.calls, found.away.calls, found.back.calls) == (10, 10, 10)
    assert found.ratio_p50 == pytest.approx(1.0)
    assert found.ratio_p99 == pytest.approx(1.0)
    assert found.others_failed == 0
    assert found.odd == {}
    assert found.first_refused_s == pytest.approx(0.11)
    assert found.silent_s == pytest.approx(0.01)
    assert found.served_s == pytest.approx(2.11)


def test_a_failed_call_of_another_shard_counts() -> None:
    calls = [*an_outage(), call(0, 115.5, code=UNAVAILABLE), call(0, 109.9, took_s=0.2, code=DEADLINE)]
    assert outcome(STRIKE, calls, HOMES).others_failed == 2


def test_a_call_that_was_under_way_waits_from_the_kill_on() -> None:
    calls = [*an_outage(), call(1, 105.0, took_s=8.0, code=UNAVAILABLE)]
    assert outcome(STRIKE, calls, HOMES).silent_s == pytest.approx(3.0)


def test_an_answer_that_is_neither_ok_nor_unavailable_is_odd() -> None:
    calls = [*an_outage(), call(2, 112.0, code=DEADLINE), call(2, 105.0, code=DEADLINE)]
    assert outcome(STRIKE, calls, HOMES).odd == {DEADLINE: 1}


def test_an_org_is_served_again_when_nothing_fails_any_more() -> None:
    # One org has another failure, long after the outage.
    calls = [*an_outage(), call(1, 127.5, code=UNAVAILABLE)]
    assert outcome(STRIKE, calls, HOMES).served_s == pytest.approx(8.11)
    calls = [*an_outage(), call(1, 129.5, code=UNAVAILABLE)]
    assert math.isinf(outcome(STRIKE, calls, HOMES).served_s)
    # An org without any later call counts as not served.
    calls = [one for one in an_outage() if one.org != "2" or one.due_s < 120]
    assert math.isinf(outcome(STRIKE, calls, HOMES).served_s)


def test_slower_calls_of_others_show_in_the_ratio() -> None:
    calls = [
        replace(one, ended_s=one.due_s + 0.03) if one.org == "0" and one.due_s > 110 else one for one in an_outage()
    ]
    found = outcome(STRIKE, calls, HOMES)
    assert found.ratio_p99 == pytest.approx(3.0)
    before, away = found.by_verb["enqueue"]
    assert before is not None
    assert away is not None
    assert (before.p99, away.p99) == pytest.approx((10.0, 30.0))


def _failing(demands: Sequence[Demand]) -> list[str]:
    return [one.what for one in demands if not one.holds]


def _judged(outcomes: Sequence[Outcome], *violations: Violation) -> list[str]:
    return _failing(outage.demands(outcomes, Verdict(jobs=1, violations=violations, faultless=False)))


def test_each_demand_on_an_outage_can_fail() -> None:
    fine = outcome(STRIKE, an_outage(), HOMES)
    over = replace(fine, strike=replace(STRIKE, sort=Sort.FAIL_OVER))
    assert _judged([fine, over]) == []
    # A time is judged by the median of the three restarts, but every failed call counts.
    slow = replace(fine, silent_s=1.5, served_s=6.0)
    assert _judged([fine, fine, slow, over]) == []
    assert len(_judged([fine, slow, slow, over])) == 2
    assert len(_judged([fine, fine, replace(fine, others_failed=1), over])) == 1
    assert len(_judged([fine, replace(over, odd={DEADLINE: 1})])) == 1
    assert len(_judged([fine, replace(over, served_s=math.inf)])) == 1
    assert _failing([at_most("x", math.nan, 1.0)]) == ["x"]
    # A value that was not measured fails the check.
    assert len(_judged([fine])) == 1
    lost = Violation(invariant="I1", what="job j is nowhere")
    assert _judged([fine, over], lost) == ["Nothing acknowledged is lost: violations (I1), of 1 jobs"]


def test_a_demand_is_told_with_its_bound() -> None:
    told = table("t", [at_most("a", 1.234, 1.2, "s"), none_of("b", 0)]).markdown()
    assert "| a | 1.23 s | ≤ 1.2 s | **no** |" in told
    assert "| b | 0 | 0 | yes |" in told


def test_times_are_of_failed_calls_too() -> None:
    assert times([]) is None
    found = times([call(0, 1.0, 0.001), call(0, 1.0, 0.5, code=UNAVAILABLE)])
    assert found is not None
    assert (found.calls, found.p50, found.worst) == pytest.approx((2, 1.0, 500.0))
