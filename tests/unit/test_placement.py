"""Where orgs live. Stored data depends on the results of `slot_of`, so the test vectors must not be edited. New ones
may be added."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from shard.placement.slots import SLOTS, plan, shares, slot_of
from shard.vocabulary import OrgId, ShardName

GOLDEN = {
    "a": 14769,
    "acme": 4395,
    "Acme": 15523,
    "org-1": 1159,
    "org-2": 9704,
    "0": 1632,
    " ": 16133,
    "tenant:eu/1": 1863,
    "müller": 14683,
    "日本": 2821,
    "🌾": 3096,
    # These two texts look the same, because Unicode can write this letter in two ways. They are two orgs, because
    # Windrow does not normalize names.
    "e\u0301": 14082,
    "\u00e9": 15845,
    "x" * 128: 4904,
}

names = st.text("abcdefghijklmnopqrstuvwxyz0123456789-", min_size=1, max_size=8).map(ShardName)
shard_sets = st.lists(names, min_size=1, max_size=12, unique=True)
weight = st.one_of(st.just(0.0), st.floats(0.001, 1_000_000), st.integers(1, 100).map(float))


@st.composite
def weighted(draw: st.DrawFn) -> dict[ShardName, float]:
    weights = draw(st.dictionaries(names, weight, min_size=1, max_size=12))
    if not sum(weights.values()):
        weights[next(iter(weights))] = 1.0
    return weights


# There are few examples, because each example plans 16,384 slots twice.
few = settings(max_examples=25)


def new_cluster(weights: dict[ShardName, float]) -> list[ShardName]:
    return plan([None] * SLOTS, weights)


def moved(before: Sequence[ShardName], after: Sequence[ShardName]) -> list[tuple[ShardName, ShardName]]:
    return [(old, new) for old, new in zip(before, after, strict=True) if old != new]


@pytest.mark.parametrize(("org", "slot"), GOLDEN.items(), ids=lambda value: repr(value)[:20])
def test_an_orgs_slot_never_changes(org: str, slot: int) -> None:
    assert slot_of(OrgId(org)) == slot


def test_the_hash_is_the_published_xxh3() -> None:
    # https://github.com/Cyan4973/xxHash, XXH3_64bits("a") and XXH3_64bits("") with seed 0.
    assert xxhash.xxh3_64_intdigest(b"a") == 0xE6C632B61E964E1F
    assert xxhash.xxh3_64_intdigest(b"") == 0x2D06800538D394C2


@given(st.text(min_size=1, max_size=64))
def test_every_org_has_a_slot_of_the_16384(org: str) -> None:
    assert 0 <= slot_of(OrgId(org)) < SLOTS == 16_384


def test_many_orgs_spread_over_the_slots() -> None:
    counts = Counter(slot_of(OrgId(f"org-{n}")) * 16 // SLOTS for n in range(16_000))
    # Each sixteenth of the slots has 1,000 orgs, with an error of at most five standard deviations.
    assert set(counts) == set(range(16))
    assert all(abs(count - 1000) < 5 * math.sqrt(1000) for count in counts.values())


@given(weighted())
def test_shares_sum_to_all_slots_and_are_off_by_less_than_one(weights: dict[ShardName, float]) -> None:
    share = shares(weights)
    total = sum(weights.values())
    assert sum(share.values()) == SLOTS
    assert set(share) == set(weights)
    for name, slots in share.items():
        assert abs(slots - SLOTS * weights[name] / total) < 1 + 1e-6


@given(shard_sets)
def test_equal_weights_differ_by_one_slot_at_most(shards: list[ShardName]) -> None:
    share = shares(dict.fromkeys(shards, 1.0))
    assert max(share.values()) - min(share.values()) <= 1


@pytest.mark.parametrize("weights", [{}, {"a": 0.0}, {"a": 1.0, "b": -1.0}])
def test_weights_that_place_nothing_are_refused(weights: dict[ShardName, float]) -> None:
    with pytest.raises(ValueError, match="weights must be"):
        shares(weights)


@given(weighted())
@few
def test_a_plan_gives_every_shard_its_share(weights: dict[ShardName, float]) -> None:
    placed = Counter(new_cluster(weights))
    assert placed == Counter({name: n for name, n in shares(weights).items() if n})


@given(weighted(), st.integers(0, 2**32))
@few
def test_a_plan_of_a_plan_changes_nothing(weights: dict[ShardName, float], seed: int) -> None:
    owners = new_cluster(weights)
    random.Random(seed).shuffle(owners)
    assert plan(owners, weights) == owners


@given(shard_sets, names)
@few
def test_a_new_shard_takes_its_share_and_nothing_moves_between_the_old(
    shards: list[ShardName], added: ShardName
) -> None:
    old = dict.fromkeys((name for name in shards if name != added), 1.0) or {ShardName("only"): 1.0}
    before = new_cluster(old)
    after = plan(before, {**old, added: 1.0})
    moves = moved(before, after)
    assert {new for _, new in moves} == {added}
    assert len(moves) == shares({**old, added: 1.0})[added]
    assert len(moves) <= math.ceil(SLOTS / (len(old) + 1))


@given(weighted(), weighted())
@few
def test_any_change_of_weights_moves_no_more_than_the_shares_demand(
    before: dict[ShardName, float], after: dict[ShardName, float]
) -> None:
    owners = new_cluster(before)
    had, want = shares(before), shares(after)
    surplus = sum(max(0, had[name] - want.get(name, 0)) for name in had)
    assert len(moved(owners, plan(owners, after))) == surplus


@given(shard_sets.filter(lambda shards: len(shards) > 1))
@few
def test_a_shard_that_leaves_gives_its_slots_away_evenly(shards: list[ShardName]) -> None:
    before = new_cluster(dict.fromkeys(shards, 1.0))
    leaver, *rest = shards
    after = plan(before, {**dict.fromkeys(rest, 1.0), leaver: 0.0})
    assert leaver not in after
    assert {old for old, _ in moved(before, after)} == {leaver}


def test_neighbouring_slots_go_to_different_shards() -> None:
    # If each shard held one contiguous range of slots, a pattern in the hash would make the load of the shards unequal.
    owners = new_cluster(dict.fromkeys(map(ShardName, ("s1", "s2", "s3")), 1.0))
    assert owners[:6] == ["s1", "s2", "s3", "s1", "s2", "s3"]
