"""Where pinned orgs should live, for any cluster file. The tests use no database and no clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from balancer.pins import fits, plan, takes_pins, why_not
from shard.placement.catalog import Catalog
from shard.placement.cluster_file import ShardEntry, ShardState
from shard.placement.pins import OnShard, Pin, PinTarget, WithLabel
from shard.placement.slots import SLOTS, Placement, slot_of
from shard.vocabulary import OrgId, ShardName, Slot

A, B, C = map(ShardName, ("a", "b", "c"))
EU = WithLabel("region", "eu")


def entry(name: ShardName, state: ShardState = ShardState.ACTIVE, *, weight: float = 1.0, **labels: str) -> ShardEntry:
    return ShardEntry(name=name, dsn="", weight=weight, state=state, labels=labels)


def at(*reads: ShardName) -> Placement:
    return Placement(writes=reads[:1], reads=reads, epoch=1)


def pinned(
    wishes: Mapping[str, PinTarget | None], homes: Mapping[str, Placement], *, hashes: Placement | None = None
) -> tuple[Catalog, list[Pin]]:
    """Makes a catalog with pinned orgs, which live on the shards in `homes`. The placement of all hash slots is
    `hashes`."""
    pins = [
        Pin(org=OrgId(org), slot=Slot(SLOTS + n), epoch=1, target=wish) for n, (org, wish) in enumerate(wishes.items())
    ]
    slots = (hashes or at(A),) * SLOTS + tuple(homes[pin.org] for pin in pins)
    return Catalog(epoch=1, slots=slots, pins={pin.org: pin.slot for pin in pins}), pins


def planned(
    wishes: Mapping[str, PinTarget | None],
    homes: Mapping[str, Placement],
    *entries: ShardEntry,
    hashes: Placement | None = None,
) -> dict[str, ShardName]:
    """Returns the planned shard of each org. Asserts that there are no complaints."""
    catalog, pins = pinned(wishes, homes, hashes=hashes)
    found = plan(catalog, pins, entries)
    assert found.complaints == {}
    return {pin.org: found.owners[pin.slot] for pin in pins}


def test_an_org_goes_to_the_shard_that_is_named() -> None:
    assert planned({"x": OnShard(B)}, {"x": at(A)}, entry(A), entry(B)) == {"x": B}


def test_an_org_goes_to_a_shard_with_the_label_and_stays_on_one_that_has_it() -> None:
    shards = [entry(A, region="us"), entry(B, region="eu"), entry(C, region="eu")]
    assert planned({"x": EU, "y": EU}, {"x": at(A), "y": at(C)}, *shards) == {"x": B, "y": C}


def test_an_org_that_is_no_longer_pinned_lives_where_its_hash_slot_does() -> None:
    assert planned({"x": None}, {"x": at(B)}, entry(A), entry(B)) == {"x": A}
    assert planned({"x": None}, {"x": at(B)}, entry(A), entry(B), entry(C), hashes=at(A, C)) == {"x": C}


def test_what_moves_is_where_it_goes_to() -> None:
    shards = [entry(A, region="us"), entry(B, region="eu"), entry(C, region="eu")]
    assert planned({"x": EU}, {"x": at(A, C)}, *shards) == {"x": C}
    assert planned({"x": EU}, {"x": at(B, A)}, *shards) == {"x": B}


def test_orgs_that_come_are_spread_by_weight() -> None:
    wishes = {f"org-{n}": EU for n in range(30)}
    shards = [entry(A), entry(B, region="eu"), entry(C, region="eu", weight=2.0)]
    found = planned(wishes, dict.fromkeys(wishes, at(A)), *shards)
    assert Counter(found.values()) == {B: 10, C: 20}


def test_shards_of_weight_0_are_for_pinned_orgs_alone() -> None:
    wishes = {f"org-{n}": EU for n in range(4)}
    shards = [entry(A), entry(B, region="eu", weight=0), entry(C, region="eu", weight=0)]
    assert Counter(planned(wishes, dict.fromkeys(wishes, at(A)), *shards).values()) == {B: 2, C: 2}
    assert planned({"x": OnShard(B)}, {"x": at(A)}, *shards) == {"x": B}


def test_an_org_leaves_a_shard_that_is_drained_and_no_other() -> None:
    for state in ShardState:
        shards = [entry(A), entry(B, state, region="eu"), entry(C, region="eu")]
        home = planned({"x": EU}, {"x": at(B)}, *shards)["x"]
        assert home == (C if state is ShardState.DRAINING else B), state


@pytest.mark.parametrize(
    ("wish", "why"),
    [
        (OnShard(ShardName("z")), "the cluster file names no shard 'z'; it has a, b, c"),
        (OnShard(B), "shard 'b' is draining, and so takes no orgs; change that in the cluster file"),
        (WithLabel("region", "eu"), "shard 'b' is draining, shard 'c' is read_only, and so takes no orgs"),
        (WithLabel("region", "asia"), "no shard with the label region=asia; there is region=eu, region=us"),
        (WithLabel("disk", "fast"), "no shard with the label disk=fast; none has a label 'disk'"),
    ],
)
def test_an_org_for_which_nothing_will_do_stays_where_it_is_and_the_reason_is_told(wish: PinTarget, why: str) -> None:
    shards = [
        entry(A, region="us"),
        entry(B, ShardState.DRAINING, region="eu"),
        entry(C, ShardState.READ_ONLY, region="eu"),
    ]
    catalog, pins = pinned({"x": wish}, {"x": at(A)})
    found = plan(catalog, pins, shards)
    assert found.owners == {pins[0].slot: A}
    assert found.complaints[OrgId("x")].startswith("org 'x' stays on shard 'a': ")
    assert why in found.complaints[OrgId("x")]


@pytest.mark.parametrize("wish", [OnShard(C), WithLabel("disk", "fast"), None])
def test_an_org_does_not_leave_a_shard_that_may_not_be_changed(wish: PinTarget | None) -> None:
    """The plan begins no move that could not be continued."""
    others = [entry(A), entry(C, disk="fast")]
    catalog, pins = pinned({"x": wish}, {"x": at(B)})
    for state in ShardState:
        found = plan(catalog, pins, [entry(B, state), *others])
        if state.takes_changes:
            assert (found.owners[pins[0].slot], found.complaints) == (C if wish else A, {})
        else:
            why = f"org 'x' stays on shard 'b': the state of shard 'b' is {state.word}"
            assert (found.owners, found.complaints) == ({pins[0].slot: B}, {"x": why})
    found = plan(catalog, pins, others)
    assert found.owners == {pins[0].slot: B}
    assert found.complaints == {"x": "org 'x' stays on shard 'b': the cluster file does not name shard 'b'"}


def test_an_org_that_is_no_longer_pinned_waits_until_the_shard_of_its_hash_takes_jobs() -> None:
    for state in ShardState:
        catalog, pins = pinned({"x": None}, {"x": at(B)})
        found = plan(catalog, pins, [entry(A, state), entry(B)])
        assert found.owners == {pins[0].slot: A if state.takes_enqueues else B}
        assert bool(found.complaints) != state.takes_enqueues


def test_a_pin_that_is_newer_than_the_copy_of_the_catalog_waits() -> None:
    catalog, pins = pinned({"x": EU}, {"x": at(A)})
    newer = Pin(org=OrgId("y"), slot=Slot(SLOTS + 1), epoch=2, target=EU)
    assert set(plan(catalog, [*pins, newer], [entry(A, region="eu")]).owners) == {pins[0].slot}


@given(
    st.lists(
        st.tuples(st.sampled_from(ShardState), st.sampled_from([0.0, 1.0, 3.0]), st.sampled_from(["eu", "us", "asia"])),
        min_size=1,
        max_size=5,
    ),
    st.lists(
        st.tuples(
            st.one_of(
                st.sampled_from(["eu", "us", "asia"]).map(lambda value: WithLabel("region", value)),
                st.integers(0, 6).map(lambda n: OnShard(ShardName(f"s{n}"))),
            ),
            st.integers(0, 6),
        ),
        max_size=12,
    ),
)
def test_no_org_is_ever_sent_to_a_shard_that_it_was_not_wished_to_be_on(
    kinds: list[tuple[ShardState, float, str]], orgs: list[tuple[PinTarget, int]]
) -> None:
    shards = [
        entry(ShardName(f"s{n}"), state, weight=weight, region=region)
        for n, (state, weight, region) in enumerate(kinds)
    ]
    by_name = {shard.name: shard for shard in shards}
    homes = {f"org-{n}": at(ShardName(f"s{home}")) for n, (_, home) in enumerate(orgs)}
    catalog, pins = pinned({f"org-{n}": wish for n, (wish, _) in enumerate(orgs)}, homes)
    found = plan(catalog, pins, shards)
    assert set(found.owners) == {pin.slot for pin in pins}
    for pin in pins:
        assert pin.target is not None
        here, there = homes[pin.org].reads[0], found.owners[pin.slot]
        if there != here:
            assert fits(by_name[there], pin.target)
            assert takes_pins(by_name[there])
            assert pin.org not in found.complaints
            assert by_name[here].state.takes_changes
        elif pin.org in found.complaints:
            fixed = here not in by_name or not by_name[here].state.takes_changes
            assert fixed or why_not(pin.target, shards) is not None
        else:
            assert fits(by_name[here], pin.target)
    # A second plan, made after the first one was executed, moves nothing.
    after, _ = pinned({pin.org: pin.target for pin in pins}, {pin.org: at(found.owners[pin.slot]) for pin in pins})
    assert plan(after, pins, shards).owners == found.owners


def test_slots_of_the_hash_are_not_planned_here() -> None:
    catalog, pins = pinned({"x": EU}, {"x": at(A)})
    assert slot_of(OrgId("x")) not in plan(catalog, pins, [entry(A, region="eu")]).owners
