"""Visits every reachable state of the protocol that gives an org a slot of its own. Then leaves out one rule of the
protocol after another, and must find a violation each time.

`-s` prints the counter-examples.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from tests.models.pins import EVERY_RULE, SCENARIOS, Rule, Scenario, explore

ENQUEUED, LIVED_ELSEWHERE, COMES_AND_GOES, PAUSED = SCENARIOS

# For each rule: the invariant that is violated without the rule, and the scenario that shows the violation.
BREAKS: Mapping[Rule, tuple[str, Scenario]] = {
    Rule.PINNED_AT_REST: ("I1", ENQUEUED),
    Rule.FORMER_OWNERS_ARE_INHERITED: ("I3", LIVED_ELSEWHERE),
    Rule.ADOPTED_BEFORE_CLOSE: ("I1", ENQUEUED),
    Rule.ADOPTED_WHERE_IT_LIVES: ("I6", COMES_AND_GOES),
    Rule.SETTLING_COMPARES_EPOCHS: ("I6", ENQUEUED),
    Rule.NEW_QUEUES_ARE_WAITED_FOR: ("I1", ENQUEUED),
    Rule.UNKNOWN_ORGS_ARE_ADOPTED: ("I1", ENQUEUED),
    Rule.QUEUES_FOLLOW_THEIR_ORG: ("I1", ENQUEUED),
    Rule.SLOTS_ONLY_RISE: ("I1", LIVED_ELSEWHERE),
    Rule.CONFIGURATION_IS_THE_SLOTS: ("I6", PAUSED),
}


# This test runs only code of the model. So a change of the product cannot break it.
@pytest.mark.turns(3)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_no_interleaving_breaks_an_invariant(scenario: Scenario) -> None:
    explored = explore(scenario)
    assert explored.broken is None, explored
    print(f"\n{explored}")


@pytest.mark.parametrize("rule", Rule, ids=lambda rule: rule.value)
def test_each_rule_is_missed_when_it_is_left_out(rule: Rule) -> None:
    invariant, scenario = BREAKS[rule]
    explored = explore(scenario, EVERY_RULE - {rule})
    assert explored.broken is not None, f"nothing shows that {rule.value}"
    assert explored.broken.startswith(invariant), explored
    print(f"\nWithout the rule that {rule.value}:\n{explored}")
