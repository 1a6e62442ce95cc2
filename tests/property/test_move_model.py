"""The protocol that moves a slot, in every state that it can reach; and without each of its rules, which must show.

`-s` prints the counter-examples."""

from __future__ import annotations

import pytest

from balancer.model import EVERY_RULE, SCENARIOS, Explored, Rule, Scenario, explore

# What is broken first, in the smallest scenario that shows it.
BREAKS = {
    Rule.ENQUEUES_NEED_AN_OWNED_SLOT: "I6",
    Rule.ENQUEUES_COMPARE_EPOCHS: "I3",
    Rule.FORMER_OWNERS_ARE_ASKED: "I3",
    Rule.ONE_PLACEMENT_A_CALL: "I3",
    Rule.LEAVING_JOBS_ARE_KNOWN: "I1",
    Rule.CLOSING_WAITS: "I6",
    Rule.OPEN_AFTER_CLOSE: "I6",
    Rule.SWITCH_AFTER_OPEN: "I3",
    Rule.LEAVING_JOBS_ARE_INVISIBLE: "I2",
    Rule.LEASED_JOBS_STAY: "I2",
    Rule.DEAD_JOBS_MOVE: "I1",
    Rule.COPY_BEFORE_DELETE: "I1",
    Rule.LEAVE_WHEN_EMPTY: "I1",
    Rule.BOOKS_MOVE: "I5",
    Rule.GRANTS_AT_REST: "I1",
    Rule.CLOSED_STAYS_WRITTEN: "I6",
    Rule.BEGIN_IS_FENCED: "I1",
    Rule.CLOSE_IS_FENCED: "I6",
    Rule.OPEN_IS_FENCED: "I6",
    Rule.SWITCH_IS_FENCED: "I1",
    Rule.DEPARTING_COMPARES_EPOCHS: "I1",
    Rule.DEPARTING_COMPARES_CHUNKS: "I1",
    Rule.TAKING_COMPARES_EPOCHS: "I3",
    Rule.TAKING_COMPARES_CHUNKS: "I3",
    Rule.FORGETTING_IS_FENCED: "I1",
    Rule.LEAVE_IS_FENCED: "I1",
    Rule.LOOKUPS_FOLLOW_THE_JOB: "I1",
    Rule.NOT_FOUND_IS_CURRENT: "I1",
}


def without(rule: Rule, scenarios: tuple[Scenario, ...] = SCENARIOS) -> Explored:
    """The first scenario in which something goes wrong if this rule is left out."""
    for scenario in scenarios:
        explored = explore(scenario, EVERY_RULE - {rule})
        if explored.broken is not None:
            print(f"\nWithout the rule that {rule.value}:\n{explored}")
            return explored
    raise AssertionError(f"nobody needs the rule that {rule.value}")


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_no_interleaving_breaks_an_invariant(scenario: Scenario) -> None:
    explored = explore(scenario)
    assert explored.broken is None, explored
    print(f"\n{explored}")


@pytest.mark.parametrize("rule", Rule, ids=lambda rule: rule.value)
def test_each_rule_is_missed_when_it_is_left_out(rule: Rule) -> None:
    explored = without(rule)
    assert explored.broken is not None
    assert explored.broken.startswith(BREAKS[rule]), explored


@pytest.mark.parametrize("rule", [Rule.LEAVING_JOBS_ARE_KNOWN, Rule.CLOSE_IS_FENCED, Rule.OPEN_IS_FENCED], ids=str)
def test_rules_that_a_lookup_or_a_configuration_needs_keep_jobs_from_being_stored_twice(rule: Rule) -> None:
    explored = without(rule, tuple(scenario for scenario in SCENARIOS if scenario.calls == scenario.frozen == 2))
    assert explored.broken is not None
    assert explored.broken.startswith(("I3", "I6: both")), explored


def test_a_counter_example_is_the_shortest_list_of_steps_that_ends_in_what_is_wrong() -> None:
    assert str(without(Rule.COPY_BEFORE_DELETE)).splitlines() == [
        "a job is looked up:",
        "   1. begin: the catalog says that the slot goes from A to B, epoch 2",
        "   2. close: A takes no more jobs, epoch 2",
        "   3. open: B has the configuration and takes jobs, epoch 2",
        "   4. switch: the catalog says that B writes, epoch 2",
        "   5. depart: job 1 leaves A as chunk 1 of epoch 2",
        "   6. forget: A deletes chunk 1 of epoch 2",
        "   => I1: job 1 is nowhere",
    ]
