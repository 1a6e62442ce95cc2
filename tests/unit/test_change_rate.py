"""How many audited changes an org may make."""

from __future__ import annotations

from itertools import count

from router.gate.change_rate import ChangeRate

# The sums of the times in these tests are exact floating-point numbers.


def made(rate: ChangeRate, org: str, now_s: float) -> int:
    """Returns how many changes the org may make now."""
    return next(many for many in count() if rate.wait_s(org, now_s))


def test_an_org_makes_so_many_at_once_and_then_so_many_a_second() -> None:
    rate = ChangeRate(4, 240)
    assert made(rate, "acme", 1000.0) == 240
    assert 0.0 < rate.wait_s("acme", 1000.0) <= 0.25
    assert made(rate, "acme", 1010.0) == 40
    assert made(rate, "acme", 1010.0) == 0


def test_after_the_wait_that_it_names_a_change_is_allowed() -> None:
    rate = ChangeRate(4, 240)
    made(rate, "acme", 0.0)
    wait_s = rate.wait_s("acme", 0.05)
    assert rate.wait_s("acme", 0.05 + wait_s + 1e-6) == 0.0


def test_one_org_takes_nothing_from_another() -> None:
    rate = ChangeRate(4, 240)
    made(rate, "acme", 0.0)
    assert made(rate, "other", 0.0) == 240


def test_an_org_that_was_quiet_for_a_minute_makes_as_many_as_at_first() -> None:
    rate = ChangeRate(4, 240)
    made(rate, "acme", 0.0)
    assert made(rate, "acme", 60.0) == 240
    # Even after an hour without changes, the org may make only 240 changes.
    assert made(rate, "acme", 3600.0) == 240


def test_orgs_that_owe_nothing_are_forgotten() -> None:
    rate = ChangeRate(4, 240)
    for at in range(10_000):
        assert rate.wait_s(f"org-{at}", float(at)) == 0.0
    assert len(rate._paid_at_s) == 1
