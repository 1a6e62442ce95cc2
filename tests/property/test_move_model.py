"""Visits every reachable state of the protocol that moves a slot. Then leaves out one rule of the protocol after
another, and must find a violation each time.

`-s` prints the counter-examples.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from tests.models.move import EVERY_RULE, SCENARIOS, Rule, Scenario, explore

PAUSED, LOOKED_UP, THERE_AND_BACK, CHUNKS, TWINS, RETRIED, KEY_TAKEN = SCENARIOS

# For each rule: the invariant that is violated without the rule, and the scenario that shows the violation.
BREAKS: Mapping[Rule, tuple[str, Scenario]] = {
    Rule.ENQUEUES_NEED_AN_OWNED_SLOT: ("I6", TWINS),
    Rule.ENQUEUES_COMPARE_EPOCHS: ("I3", TWINS),
    Rule.FORMER_OWNERS_ARE_ASKED: ("I3", TWINS),
    Rule.IDS_COME_FIRST: ("I3", KEY_TAKEN),
    Rule.ONE_PLACEMENT_A_CALL: ("I3", TWINS),
    Rule.LEAVING_JOBS_ARE_KNOWN: ("I3", RETRIED),
    Rule.CLOSING_WAITS: ("I6", TWINS),
    Rule.OPEN_AFTER_CLOSE: ("I6", PAUSED),
    Rule.SWITCH_AFTER_OPEN: ("I3", TWINS),
    Rule.LEAVING_JOBS_ARE_INVISIBLE: ("I2", THERE_AND_BACK),
    Rule.LEASED_JOBS_STAY: ("I2", THERE_AND_BACK),
    Rule.DEAD_JOBS_MOVE: ("I1", THERE_AND_BACK),
    Rule.COPY_BEFORE_DELETE: ("I1", CHUNKS),
    Rule.LEAVE_WHEN_EMPTY: ("I1", THERE_AND_BACK),
    Rule.BOOKS_MOVE: ("I5", THERE_AND_BACK),
    Rule.GRANTS_AT_REST: ("I1", PAUSED),
    Rule.CLOSED_STAYS_WRITTEN: ("I6", PAUSED),
    Rule.BEGIN_IS_FENCED: ("I1", PAUSED),
    Rule.CLOSE_IS_FENCED: ("I6", THERE_AND_BACK),
    Rule.OPEN_IS_FENCED: ("I6", PAUSED),
    Rule.SWITCH_IS_FENCED: ("I1", PAUSED),
    Rule.DEPARTING_COMPARES_EPOCHS: ("I1", THERE_AND_BACK),
    Rule.DEPARTING_COMPARES_CHUNKS: ("I1", CHUNKS),
    Rule.TAKING_COMPARES_EPOCHS: ("I3", THERE_AND_BACK),
    Rule.TAKING_COMPARES_CHUNKS: ("I3", THERE_AND_BACK),
    Rule.FORGETTING_IS_FENCED: ("I1", CHUNKS),
    Rule.LEAVE_IS_FENCED: ("I1", THERE_AND_BACK),
    Rule.LOOKUPS_FOLLOW_THE_JOB: ("I1", LOOKED_UP),
    Rule.NOT_FOUND_IS_CURRENT: ("I1", LOOKED_UP),
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


def test_a_counter_example_is_the_shortest_list_of_steps_that_ends_in_what_is_wrong() -> None:
    explored = explore(THERE_AND_BACK, EVERY_RULE - {Rule.COPY_BEFORE_DELETE})
    assert str(explored).splitlines() == [
        "a job moves there, back and there again:",
        "   1. begin: the catalog says that the slot goes from A to B, epoch 2",
        "   2. close: A takes no more jobs, epoch 2",
        "   3. open: B has the configuration and takes jobs, epoch 2",
        "   4. switch: the catalog says that B writes, epoch 2",
        "   5. depart: job 1 leaves A as chunk 1 of epoch 2",
        "   6. forget: A deletes chunk 1 of epoch 2",
        "   => I1: job 1 is nowhere",
    ]
