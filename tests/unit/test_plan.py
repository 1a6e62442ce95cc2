"""Which slots must move according to the catalog and the cluster file. As few slots as possible move, and none because
of a temporary state."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from balancer.plan import blocked_reason, slots_to_go, transfers, wanted
from shard.placement.catalog import Catalog, Move
from shard.placement.cluster_file import Cluster, ShardState, parse_cluster
from shard.placement.slots import SLOTS, Placement, plan, shares
from shard.vocabulary import OrgId, ShardName, Slot

A, B, C = (ShardName(name) for name in "abc")
TAKE_PART = (ShardState.ACTIVE, ShardState.ENQUEUE_ONLY)
REST = (ShardState.DEQUEUE_ONLY, ShardState.READ_ONLY, ShardState.OFF)
few = settings(max_examples=25)


def at_rest(owners: Sequence[ShardName], pins: Mapping[OrgId, Slot] | None = None) -> Catalog:
    places = {owner: Placement(writes=(owner,), reads=(owner,), epoch=1) for owner in set(owners)}
    slots = tuple(places[owner] for owner in owners)
    return Catalog(epoch=1, slots=slots, pins=pins or {})


def even(*names: ShardName) -> list[ShardName]:
    return plan([None] * SLOTS, dict.fromkeys(names, 1.0))


def cluster(**shards: tuple[float, ShardState]) -> Cluster:
    text = "".join(
        f'[[shard]]\nname = "{name}"\ndsn = "dbname=x"\nweight = {weight}\nstate = "{state.word}"\n'
        for name, (weight, state) in shards.items()
    )
    return parse_cluster(text, source="cluster.toml")


def moved(known: Catalog, file: Cluster) -> Counter[tuple[ShardName, ShardName]]:
    return Counter({(one.source, one.target): len(one.slots) for one in transfers(known, file, {})})


def carried_out(known: Catalog, slots: Mapping[Slot, ShardName]) -> Catalog:
    owners = [slots.get(Slot(at), placement.reads[0]) for at, placement in enumerate(known.slots)]
    return at_rest(owners)


def test_where_all_is_as_it_should_be_nothing_moves() -> None:
    file = cluster(a=(1, ShardState.ACTIVE), b=(1, ShardState.ACTIVE))
    assert transfers(at_rest(even(A, B)), file, {}) == []
    assert slots_to_go(at_rest(even(A, B)), file, {}) == 0


def test_a_shard_that_is_added_gets_its_share_and_nobody_else_gets_anything() -> None:
    file = cluster(a=(1, ShardState.ACTIVE), b=(1, ShardState.ACTIVE), c=(1, ShardState.ACTIVE))
    known = at_rest(even(A, B))
    assert moved(known, file) == {(A, C): 2730, (B, C): 2731}
    assert slots_to_go(known, file, {}) == 5461


def test_a_shard_that_takes_jobs_and_gives_none_has_its_share_too() -> None:
    file = cluster(a=(1, ShardState.ACTIVE), c=(3, ShardState.ENQUEUE_ONLY))
    assert moved(at_rest([A] * SLOTS), file) == {(A, C): 12_288}


def test_a_draining_shard_gives_up_everything_and_goes_first() -> None:
    file = cluster(a=(1, ShardState.ACTIVE), b=(3, ShardState.ACTIVE), c=(5, ShardState.DRAINING))
    known = at_rest(even(A, B, C))
    assert {source for source, _ in moved(known, file)} == {C, A}
    assert transfers(known, file, {})[0].source == C
    assert shares({A: 1, B: 3}) == Counter(wanted(known, file, {}))


@pytest.mark.parametrize("state", [*TAKE_PART, *REST])
def test_no_other_state_moves_anything(state: ShardState) -> None:
    file = cluster(a=(1, ShardState.ACTIVE), b=(1, ShardState.ACTIVE), c=(1, state))
    assert transfers(at_rest(even(A, B, C)), file, {}) == []


@pytest.mark.parametrize("state", REST)
def test_a_shard_that_rests_keeps_what_it_has_and_the_others_share_what_is_left(state: ShardState) -> None:
    file = cluster(a=(1, ShardState.DRAINING), b=(1, ShardState.ACTIVE), c=(100, state))
    known = at_rest(even(A, B, C))
    assert moved(known, file) == {(A, B): 5462}
    assert Counter(wanted(known, file, {}))[C] == Counter(even(A, B, C))[C]


@pytest.mark.parametrize("state", REST)
def test_where_nobody_takes_slots_they_stay(state: ShardState) -> None:
    file = cluster(a=(1, ShardState.DRAINING), b=(0, ShardState.ACTIVE), c=(1, state))
    assert transfers(at_rest(even(A, B, C)), file, {}) == []


def test_a_shard_of_weight_0_is_emptied_without_a_state() -> None:
    file = cluster(a=(1, ShardState.ACTIVE), b=(0, ShardState.ACTIVE))
    assert moved(at_rest(even(A, B)), file) == {(B, A): 8192}


def test_what_the_file_does_not_name_stays_where_it_is() -> None:
    file = cluster(a=(1, ShardState.ACTIVE), b=(1, ShardState.ACTIVE))
    known = at_rest(even(A, B, C))
    assert C not in {name for way in moved(known, file) for name in way}


def test_a_slot_on_its_way_counts_as_arrived_and_is_not_sent_elsewhere() -> None:
    file = cluster(a=(1, ShardState.ACTIVE), b=(1, ShardState.ACTIVE))
    way = Placement(writes=(A,), reads=(A, B), epoch=2)
    rest = at_rest([A] * SLOTS).slots
    known = Catalog(epoch=2, slots=(way,) * 1000 + rest[1000:], pins={})
    assert moved(known, file) == {(A, B): 7192}
    assert all(slot >= 1000 for one in transfers(known, file, {}) for slot in one.slots)
    assert slots_to_go(known, file, {}) == 8192
    drained = cluster(a=(1, ShardState.ACTIVE), b=(1, ShardState.DRAINING))
    assert transfers(known, drained, {}) == []
    assert slots_to_go(known, drained, {}) == 1000


def test_pinned_orgs_stay_where_they_are() -> None:
    file = cluster(a=(1, ShardState.DRAINING), b=(1, ShardState.ACTIVE))
    known = at_rest([*([B] * SLOTS), A, A], {OrgId("x"): Slot(SLOTS), OrgId("y"): Slot(SLOTS + 1)})
    assert wanted(known, file, {})[SLOTS:] == [A, A]
    assert transfers(known, file, {}) == []


weights = st.integers(0, 5).map(float)
states = st.sampled_from(list(ShardState))


@few
@given(
    st.lists(st.sampled_from([A, B, C]), min_size=1, max_size=60),
    st.tuples(*([st.tuples(weights, states)] * 3)),
    st.integers(0, 2**32),
)
def test_part_after_part_the_plan_is_reached_and_no_slot_moves_twice(
    pattern: list[ShardName], entries: tuple[tuple[float, ShardState], ...], seed: int
) -> None:
    if not any(weight and state is not ShardState.DRAINING for weight, state in entries):
        entries = ((1.0, ShardState.ACTIVE), *entries[1:])
    file = cluster(**dict(zip("abc", entries, strict=True)))
    known = at_rest([pattern[slot % len(pattern)] for slot in range(SLOTS)])
    luck = random.Random(seed)
    target = Counter(wanted(known, file, {}))
    gone: set[Slot] = set()
    left = slots_to_go(known, file, {})
    while planned := transfers(known, file, {}):
        one = luck.choice(planned)
        some = one.slots[: luck.randint(1, len(one.slots))]
        assert not gone.intersection(some)
        gone.update(some)
        known = carried_out(known, dict.fromkeys(some, one.target))
        assert slots_to_go(known, file, {}) == left - len(some)
        left -= len(some)
    assert Counter(placement.reads[0] for placement in known.slots) == target
    held = {ShardName(name) for name, (_, state) in zip("abc", entries, strict=True) if state in REST}
    if any(weight for weight, state in entries if state in (*TAKE_PART,)):
        part = {
            ShardName(name): 0.0 if state is ShardState.DRAINING else weight
            for name, (weight, state) in zip("abc", entries, strict=True)
            if ShardName(name) not in held
        }
        assert {name: target[name] for name in part} == shares(part, SLOTS - sum(target[name] for name in held))


@pytest.mark.parametrize(
    ("states", "switched", "why"),
    [
        ((ShardState.DRAINING, ShardState.ACTIVE), False, None),
        ((ShardState.DEQUEUE_ONLY, ShardState.ENQUEUE_ONLY), False, None),
        # A slot cannot be sent to a third shard while it moves.
        ((ShardState.ACTIVE, ShardState.DRAINING), False, None),
        ((ShardState.ACTIVE, ShardState.DEQUEUE_ONLY), False, "the state of shard 'b' is dequeue_only"),
        ((ShardState.ACTIVE, ShardState.DEQUEUE_ONLY), True, None),
        ((ShardState.READ_ONLY, ShardState.ACTIVE), True, "the state of shard 'a' is read_only"),
        ((ShardState.ACTIVE, ShardState.OFF), True, "the state of shard 'b' is off"),
    ],
)
def test_a_move_goes_on_where_both_shards_may_be_changed(
    states: tuple[ShardState, ShardState], switched: bool, why: str | None
) -> None:
    file = cluster(a=(1, states[0]), b=(1, states[1]), c=(1, ShardState.ACTIVE))
    move = Move(epoch=2, source=A, target=B, switched=switched, slots=(Slot(1),))
    assert blocked_reason(move, file) == why


def test_a_move_from_a_shard_that_is_gone_from_the_file_waits() -> None:
    move = Move(epoch=2, source=C, target=B, switched=True, slots=(Slot(1),))
    file = cluster(a=(1, ShardState.ACTIVE), b=(1, ShardState.ACTIVE))
    assert blocked_reason(move, file) == "the cluster file does not name shard 'c'"
