"""Where an org lives: org → slot → shards. Pure: no I/O, no clock, no config.

An org's slot never changes; which shard a slot lives on does, and is planned here by minimal movement: a shard gives up
only what is above its share and takes only what is below it (docs/decisions/0002-slots-instead-of-a-hash-ring.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import xxhash

from shard.vocabulary import OrgId, ShardName, Slot

SLOTS = 16_384


def slot_of(org: OrgId) -> Slot:
    """The top 14 bits of xxh3_64 over the org's UTF-8 bytes. Stored data depends on this: it can never change."""
    return Slot(xxhash.xxh3_64_intdigest(org.encode()) >> 50)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """One slot's (or pinned org's) shards. While it moves from A to B: writes (B,), reads (A, B)."""

    writes: tuple[ShardName, ...]
    reads: tuple[ShardName, ...]
    epoch: int


def shares(weights: Mapping[ShardName, float]) -> dict[ShardName, int]:
    """How many slots each shard should hold: proportional to weight, sums to SLOTS, off by less than one (the largest
    remainder method of Hamilton; ties go to the name that sorts first). Weights are ≥ 0 and not all 0."""
    total = sum(weights.values())
    if total <= 0 or min(weights.values()) < 0:
        raise ValueError(f"weights must be ≥ 0 and not all 0: {dict(weights)}")
    exact = {shard: SLOTS * weight / total for shard, weight in weights.items()}
    share = {shard: int(value) for shard, value in exact.items()}
    by_remainder = sorted(exact, key=lambda shard: (share[shard] - exact[shard], shard))
    for shard in by_remainder[: SLOTS - sum(share.values())]:
        share[shard] += 1
    return share


def plan(owners: Sequence[ShardName | None], weights: Mapping[ShardName, float]) -> list[ShardName]:
    """The owner of every slot, changing as few of `owners` (None: not placed yet) as the shares allow."""
    room = shares(weights)
    planned: list[ShardName | None] = []
    for owner in owners:
        keeps = owner is not None and room.get(owner, 0) > 0
        if keeps and owner is not None:
            room[owner] -= 1
        planned.append(owner if keeps else None)
    # Dealt evenly: the k-th of a shard's n free slots sorts at (k + ½) / n, so that every stretch of slots is mixed.
    turns = sorted(((k + 0.5) / n, shard) for shard, n in room.items() for k in range(n))
    takers = iter(shard for _, shard in turns)
    return [owner if owner is not None else next(takers) for owner in planned]
