"""When a nacked job runs again."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shard import retry_policy
from shard.retry_policy import Exponential, Fixed, MarkDead, Policy, RetryAfter

SECOND_US = 1_000_000
TEN_YEARS_US = 3650 * 24 * 3600 * SECOND_US

luck = st.floats(0, 1, exclude_max=True)
attempts = st.integers(1, 1000)
delays = st.integers(0, TEN_YEARS_US)
exponentials = st.builds(
    Exponential,
    initial_us=delays,
    multiplier=st.floats(1, 100),
    max_us=delays,
    jitter=st.floats(0, 1),
)
policies: st.SearchStrategy[Policy] = st.one_of(st.builds(Fixed, delay_us=delays), exponentials)


@pytest.mark.parametrize(
    ("attempt", "delay_us"),
    [
        (1, 1_000_000),
        (2, 2_000_000),
        (3, 4_000_000),
        (12, 2_048_000_000),
        (13, 3_600_000_000),
        (1000, 3_600_000_000),
    ],
)
def test_the_default_doubles_from_a_second_to_an_hour(attempt: int, delay_us: int) -> None:
    # A random value of ½ means no jitter.
    assert retry_policy.delay_us(retry_policy.DEFAULT, attempt=attempt, luck=0.5) == delay_us


@pytest.mark.parametrize(("luck", "delay_us"), [(0.0, 900_000), (0.25, 950_000), (0.75, 1_050_000)])
def test_jitter_takes_or_adds_up_to_its_share(luck: float, delay_us: int) -> None:
    assert retry_policy.delay_us(Exponential(jitter=0.1), attempt=1, luck=luck) == delay_us


@given(exponentials, attempts, luck)
def test_a_delay_stays_within_the_jitter_around_the_formula(policy: Exponential, attempt: int, luck: float) -> None:
    grown = min(policy.max_us, policy.initial_us * policy.multiplier ** min(attempt - 1, 150))
    delay = retry_policy.delay_us(policy, attempt=attempt, luck=luck)
    assert math.floor(grown * (1 - policy.jitter)) <= delay <= math.ceil(grown * (1 + policy.jitter))
    assert delay >= 0


@given(exponentials, attempts)
def test_no_delay_shrinks_from_one_attempt_to_the_next(policy: Exponential, attempt: int) -> None:
    assert retry_policy.delay_us(policy, attempt=attempt, luck=0.5) <= retry_policy.delay_us(
        policy, attempt=attempt + 1, luck=0.5
    )


@given(delays, attempts, luck)
def test_a_fixed_delay_depends_neither_on_the_attempt_nor_on_chance(delay_us: int, attempt: int, luck: float) -> None:
    assert retry_policy.delay_us(Fixed(delay_us=delay_us), attempt=attempt, luck=luck) == delay_us


@pytest.mark.parametrize(
    ("attempt", "max_attempts", "reason"),
    [
        (20, None, "out of attempts (20 of 20)"),
        (1, 1, "out of attempts (1 of 1)"),
        (5, 3, "out of attempts (5 of 3)"),
    ],
)
def test_a_job_out_of_attempts_is_buried_with_the_reason(attempt: int, max_attempts: int | None, reason: str) -> None:
    assert retry_policy.fate(Fixed(delay_us=1), attempt=attempt, max_attempts=max_attempts, luck=0.5) == MarkDead(
        reason=reason
    )


@pytest.mark.parametrize(("attempt", "max_attempts"), [(19, None), (2, 3), (999, 1000)])
def test_a_job_with_attempts_left_runs_again(attempt: int, max_attempts: int | None) -> None:
    fate = retry_policy.fate(Fixed(delay_us=7), attempt=attempt, max_attempts=max_attempts, luck=0.5)
    assert fate == RetryAfter(delay_us=7)


@given(policies)
def test_a_policy_survives_its_json(policy: Policy) -> None:
    assert retry_policy.from_json(retry_policy.to_json(policy)) == policy


def test_no_policy_means_the_default() -> None:
    assert retry_policy.from_json(None) == Exponential(
        initial_us=SECOND_US, multiplier=2.0, max_us=3600 * SECOND_US, jitter=0.1
    )


def test_json_whose_numbers_postgres_has_shortened_is_read() -> None:
    # jsonb keeps 2.0 as 2.0, but an operator may have written a policy with 2.
    text = '{"exponential": {"initial_us": 5, "multiplier": 2, "max_us": 9, "jitter": 0}}'
    assert retry_policy.from_json(text) == Exponential(initial_us=5, multiplier=2.0, max_us=9, jitter=0.0)


@pytest.mark.parametrize(
    "text",
    ["{}", "[]", '{"fixed": {}}', '{"fixed": {"delay_us": "1"}}', '{"exponential": {"initial_us": 1}}'],
)
def test_json_that_is_no_policy_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a retry policy"):
        retry_policy.from_json(text)
