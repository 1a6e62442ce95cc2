"""How orgs share places: every new org gets places, and an org that is alone gets half of all places."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shard.fair_quota import FairQuota


def fill(places: FairQuota, *callers: str) -> Counter[str]:
    """Lets all orgs take places, one after another, until no org gets more. Returns how many places each org has."""
    got = Counter[str]()
    eager = list(callers)
    while eager:
        eager = [caller for caller in eager if places.take(caller)]
        got.update(eager)
    return got


def test_an_org_that_is_alone_has_half_of_the_places() -> None:
    places = FairQuota(100)
    assert fill(places, "one") == {"one": 50}
    assert places.taken == 50


@pytest.mark.parametrize("count", [2, 3, 9])
def test_those_who_want_all_have_even_shares_and_as_much_is_left(count: int) -> None:
    callers = [f"caller {number}" for number in range(count)]
    places = FairQuota(1000)
    got = fill(places, *callers)
    even = 1000 // (count + 1)
    assert all(even - 1 <= got[caller] <= even + 1 for caller in callers)
    assert even - count <= 1000 - places.taken <= even + count


def test_who_comes_late_finds_room_however_much_the_others_want() -> None:
    places = FairQuota(1000)
    fill(places, "first")
    fill(places, "second", "first")
    assert fill(places, "third")["third"] > 100


def test_while_all_places_are_free_there_is_room_for_more_than_there_are() -> None:
    places = FairQuota(10)
    assert places.take("one", 99)
    assert not places.take("two")
    places.give_back("one", 99)
    assert places.take("two", 99)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9)), max_size=60))
def test_what_is_given_back_is_free_again(wishes: list[tuple[int, int]]) -> None:
    places = FairQuota(40)
    taken = [(caller, count) for caller, count in wishes if places.take(caller, count)]
    assert places.taken == sum(count for _, count in taken)
    for caller, count in reversed(taken):
        places.give_back(caller, count)
    assert places.taken == 0
    assert fill(places, "alone") == {"alone": 20}
