"""Computes the hash slot of an org, and plans which shard gets which slots. Pure: no I/O, no clock, no config.
`Catalog.placement` (shard/placement/catalog.py) returns the shards of an org, even of a pinned org.

An org's hash slot never changes. The shard on which a slot lives may change. The plan moves as few slots as possible: a
shard gives up only slots that exceed its share, and takes only slots that it lacks
(docs/decisions/0002-slots-instead-of-a-hash-ring.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import xxhash

from shard.vocabulary import HOUR_US, Micros, OrgId, ShardName, Slot

SLOTS = 16_384
# The epoch of a new cluster's placement. A caller with this epoch knows of no move.
FIRST_EPOCH = 1

_IDS_KNOWN_US = 2 * HOUR_US
KEYS_KNOWN_US = 31 * 24 * HOUR_US


def slot_of(org: OrgId) -> Slot:
    """Returns the top 14 bits of xxh3_64 over the org's UTF-8 bytes. Stored data depends on this rule, so the rule can
    never change."""
    return Slot(xxhash.xxh3_64_intdigest(org.encode()) >> 50)


@dataclass(frozen=True, slots=True, kw_only=True)
class FormerOwner:
    """A shard that a slot has left. The shard may still know ids and dedup keys of the slot's jobs, and have finished
    jobs."""

    shard: ShardName
    left_at: Micros

    def may_know(self, made_at_ms: int, *, keyed: bool) -> bool:
        """Returns whether this shard may have stored the first copy of a job whose id was made at `made_at_ms`. `keyed`
        says whether the job has a dedup key. A shard accepts no id that was made more than one hour ahead of its clock,
        and no dedup window over 30 days. This method uses 2 hours and 31 days instead, because clocks differ."""
        return made_at_ms * 1000 <= (self.keys_known_until if keyed else self.ids_known_until)

    @property
    def ids_known_until(self) -> Micros:
        return Micros(self.left_at + _IDS_KNOWN_US)

    @property
    def keys_known_until(self) -> Micros:
        return Micros(self.left_at + KEYS_KNOWN_US)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The shards of one slot. While the slot is on shard A and does not move (is at rest), `writes` and `reads` are
    both (A,). During a move from A to B, `writes` is first (A,) and then (B,), and `reads` is (A, B): jobs move from
    the first to the last shard. `epoch` is the epoch of the latest move. Before the first move, it is FIRST_EPOCH, or
    the epoch of the pin that created the slot."""

    writes: tuple[ShardName, ...]
    reads: tuple[ShardName, ...]
    epoch: int
    former: tuple[FormerOwner, ...] = ()

    @property
    def at_rest(self) -> bool:
        return len(self.reads) == 1

    @property
    def sources(self) -> tuple[ShardName, ...]:
        """The shards from which jobs still move to the writer."""
        return self.reads[: self.reads.index(self.writes[0])]

    @property
    def former_only(self) -> tuple[FormerOwner, ...]:
        """The former owners that are not read any more: they have only finished jobs, remembered ids and dedup keys."""
        return tuple(owner for owner in self.former if owner.shard not in self.reads)


def shares(weights: Mapping[ShardName, float], slots: int = SLOTS) -> dict[ShardName, int]:
    """Returns how many of `slots` each shard should hold: proportional to its weight, rounded up or down, so that the
    sum is `slots` (Hamilton's largest remainder method; of equal remainders, the one of the first name in sorted order
    counts as the largest). Raises ValueError unless all weights are ≥ 0 and at least one is above 0."""
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
    """Returns the new owner of each slot. `owners` are the present owners (None: the slot is not placed yet). As few
    slots change their owner as the shares allow."""
    room = shares(weights, len(owners))
    planned: list[ShardName | None] = []
    for owner in owners:
        keeps = owner is not None and room.get(owner, 0) > 0
        if keeps and owner is not None:
            room[owner] -= 1
        planned.append(owner if keeps else None)
    # Distribute free slots evenly. The k-th of the n slots that a shard gets has the sort key (k + ½) / n. So every
    # range of slots has a mix of shards.
    turns = sorted(((k + 0.5) / n, shard) for shard, n in room.items() for k in range(n))
    takers = iter(shard for _, shard in turns)
    return [owner if owner is not None else next(takers) for owner in planned]
