"""Where an org lives: org → slot → shards. Pure: no I/O, no clock, no config.

An org's slot never changes; which shard a slot lives on does, and is planned here by minimal movement: a shard gives up
only what is above its share and takes only what is below it (docs/decisions/0002-slots-instead-of-a-hash-ring.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import xxhash

from shard.vocabulary import Micros, OrgId, ShardName, Slot

SLOTS = 16_384
# Of a new cluster's placement. Who goes by it knows of no move.
FIRST_EPOCH = 1

_HOUR_US = 3_600_000_000
_IDS_KNOWN_US = 2 * _HOUR_US
KEYS_KNOWN_US = 31 * 24 * _HOUR_US


def slot_of(org: OrgId) -> Slot:
    """The top 14 bits of xxh3_64 over the org's UTF-8 bytes. Stored data depends on this: it can never change."""
    return Slot(xxhash.xxh3_64_intdigest(org.encode()) >> 50)


@dataclass(frozen=True, slots=True, kw_only=True)
class FormerOwner:
    """A shard that a slot has left: it may know ids and dedup keys of the slot's jobs, and hold finished ones."""

    shard: ShardName
    left_at: Micros

    def may_know(self, made_at_ms: int, *, keyed: bool) -> bool:
        """Whether a job whose id was made then, with a dedup key or without, may be one of which this shard has had the
        first copy. It took no id that was more than an hour ahead, and no key for more than 30 days; the rest is room
        for clocks to differ."""
        return made_at_ms * 1000 <= (self.keys_known_until if keyed else self.ids_known_until)

    @property
    def ids_known_until(self) -> Micros:
        return Micros(self.left_at + _IDS_KNOWN_US)

    @property
    def keys_known_until(self) -> Micros:
        return Micros(self.left_at + KEYS_KNOWN_US)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """One slot's shards. At rest: writes (A,), reads (A,). While it moves from A to B: writes (A,), then (B,), and
    reads (A, B), in the order in which jobs travel. `epoch`: of the latest move; before it, of the pin that made the
    slot."""

    writes: tuple[ShardName, ...]
    reads: tuple[ShardName, ...]
    epoch: int
    former: tuple[FormerOwner, ...] = ()

    @property
    def at_rest(self) -> bool:
        return len(self.reads) == 1

    @property
    def sources(self) -> tuple[ShardName, ...]:
        """The shards from which jobs still come to the writer."""
        return self.reads[: self.reads.index(self.writes[0])]

    @property
    def former_only(self) -> tuple[FormerOwner, ...]:
        """Those that have nothing of the slot any more but finished jobs, and what they remember."""
        return tuple(one for one in self.former if one.shard not in self.reads)


def shares(weights: Mapping[ShardName, float], slots: int = SLOTS) -> dict[ShardName, int]:
    """How many of so many slots each shard should hold: proportional to weight, sums to `slots`, off by less than one
    (the largest remainder method of Hamilton; ties go to the name that sorts first). Weights are ≥ 0 and not all 0."""
    total = sum(weights.values())
    if total <= 0 or min(weights.values()) < 0:
        raise ValueError(f"weights must be ≥ 0 and not all 0: {dict(weights)}")
    exact = {shard: slots * weight / total for shard, weight in weights.items()}
    share = {shard: int(value) for shard, value in exact.items()}
    by_remainder = sorted(exact, key=lambda shard: (share[shard] - exact[shard], shard))
    for shard in by_remainder[: slots - sum(share.values())]:
        share[shard] += 1
    return share


def plan(owners: Sequence[ShardName | None], weights: Mapping[ShardName, float]) -> list[ShardName]:
    """The owner of each of these slots, changing as few of `owners` (None: not placed yet) as the shares allow."""
    room = shares(weights, len(owners))
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
