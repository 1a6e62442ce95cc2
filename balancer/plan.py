"""What is to move: from the catalog as it is to the shards as the cluster file wants them. Pure: no I/O, no clock.

Shards that take enqueues share the slots by weight; one that is draining has a share of none. Those that take no
enqueues rest: what they hold stays, nothing is added, and the others share what is left. So only `draining`, weights,
and shards that come make slots move, and a state that is meant to pass moves none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shard.catalog import Catalog, Move
from shard.cluster import Cluster, ShardEntry, ShardState
from shard.placement import SLOTS, plan
from shard.vocabulary import ShardName, Slot


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """Slots at rest that belong elsewhere."""

    source: ShardName
    target: ShardName
    # In ascending order.
    slots: tuple[Slot, ...]


def wanted(known: Catalog, cluster: Cluster, pinned: Mapping[Slot, ShardName]) -> list[ShardName]:
    """The shard that each slot should be on, by number; as few as possible elsewhere than now. A slot that moves
    counts as arrived. `pinned`: where those of orgs are to be (balancer/pins.py)."""
    owners = [placement.reads[-1] for placement in known.slots]
    weights = {entry.name: entry.share for entry in cluster.shards if _takes_part(entry)}
    if any(weights.values()):
        shared = [slot for slot in range(SLOTS) if owners[slot] in weights]
        for slot, owner in zip(shared, plan([owners[slot] for slot in shared], weights), strict=True):
            owners[slot] = owner
    for slot, owner in pinned.items():
        owners[slot] = owner
    return owners


def transfers(known: Catalog, cluster: Cluster, pinned: Mapping[Slot, ShardName]) -> list[Transfer]:
    """What is to begin, all of it; from draining shards first."""
    ways: dict[tuple[ShardName, ShardName], list[Slot]] = {}
    for slot, target in _astray(known, wanted(known, cluster, pinned)):
        ways.setdefault((known.slots[slot].reads[0], target), []).append(slot)
    found = [Transfer(source=source, target=target, slots=tuple(slots)) for (source, target), slots in ways.items()]
    return sorted(found, key=lambda one: (not is_draining(cluster, one.source), one.source, one.target))


def slots_to_go(known: Catalog, cluster: Cluster, pinned: Mapping[Slot, ShardName]) -> int:
    """How many slots are not yet at rest where they should be."""
    return sum(not placement.at_rest for placement in known.slots) + len(_astray(known, wanted(known, cluster, pinned)))


def hindrance(move: Move, cluster: Cluster) -> str | None:
    """Why the cluster file keeps a move that has begun from going on; None: it does not."""
    for name in (move.source, move.target):
        entry = cluster.shard(name)
        if entry is None:
            return f"the cluster file does not name shard {name!r}"
        if not entry.state.takes_changes or (name == move.target and not move.switched and not _takes_part(entry)):
            return f"the state of shard {name!r} is {entry.state.word}"
    return None


def is_draining(cluster: Cluster, name: ShardName) -> bool:
    entry = cluster.shard(name)
    return entry is not None and entry.state is ShardState.DRAINING


def _takes_part(entry: ShardEntry) -> bool:
    return entry.state.takes_enqueues


def _astray(known: Catalog, owners: Sequence[ShardName]) -> list[tuple[Slot, ShardName]]:
    """The slots at rest that are elsewhere than they should be, and where that is."""
    return [
        (Slot(slot), owner)
        for slot, (placement, owner) in enumerate(zip(known.slots, owners, strict=True))
        if placement.reads[0] != owner and placement.at_rest
    ]
