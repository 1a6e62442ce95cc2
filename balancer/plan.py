"""Plans which slots have to move, so that they are where the cluster file wants them. Pure: no I/O, no clock.

Shards that take enqueues share the slots by weight; a draining shard has a share of 0. A shard that takes no enqueues
keeps the slots that it holds and gets no more, and the other shards share the other slots. So slots move only because
of `draining`, changed weights and new shards, and not because of a state that is meant to be temporary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shard.placement.catalog import Catalog, Move
from shard.placement.cluster_file import Cluster, ShardEntry, ShardState
from shard.placement.slots import SLOTS, plan
from shard.vocabulary import ShardName, Slot


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """Slots that are in no move and should be on another shard."""

    source: ShardName
    target: ShardName
    # In ascending order.
    slots: tuple[Slot, ...]


def wanted(known: Catalog, cluster: Cluster, pinned: Mapping[Slot, ShardName]) -> list[ShardName]:
    """Returns, at the index of each slot, the shard on which this slot should be. As few slots as possible change their
    shard. A slot that moves now counts as if it had arrived. `pinned`: where the slots of pinned orgs should be
    (balancer/pins.py)."""
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
    """Returns all transfers that should begin. Transfers from draining shards come first."""
    routes: dict[tuple[ShardName, ShardName], list[Slot]] = {}
    for slot, target in _misplaced(known, wanted(known, cluster, pinned)):
        routes.setdefault((known.slots[slot].reads[0], target), []).append(slot)
    found = [Transfer(source=source, target=target, slots=tuple(slots)) for (source, target), slots in routes.items()]
    return sorted(found, key=lambda found: (not is_draining(cluster, found.source), found.source, found.target))


def slots_to_go(known: Catalog, cluster: Cluster, pinned: Mapping[Slot, ShardName]) -> int:
    """Returns how many slots are in a move, or are not where they should be."""
    return sum(not placement.at_rest for placement in known.slots) + len(
        _misplaced(known, wanted(known, cluster, pinned))
    )


def blocked_reason(move: Move, cluster: Cluster) -> str | None:
    """Returns why the cluster file blocks a move that has begun, or None if it does not."""
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


def _misplaced(known: Catalog, owners: Sequence[ShardName]) -> list[tuple[Slot, ShardName]]:
    """Returns the slots that are in no move and not where they should be, each with the shard where it should be."""
    return [
        (Slot(slot), owner)
        for slot, (placement, owner) in enumerate(zip(known.slots, owners, strict=True))
        if placement.reads[0] != owner and placement.at_rest
    ]
