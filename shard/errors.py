"""What can go wrong on a shard, by what the caller may do about it. router/status.py maps those that routers
meet to gRPC statuses.

ShardError
├── ShardUnavailable      nothing may have happened: try again, later
│   ├── RowLocked         the same; or have whoever holds the lock end the transaction
│   ├── ClockSetBack      the same; or, for an operator: set the server's clock right, or accept what it shows
│   └── DiskFull          an operator must make room first
├── NotOwned              this shard does not take the org's jobs, or knows of a later placement than the caller: learn
│                         the placement, then begin again (I6)
├── BadIds                make new ids
│   └── IdsOutsideHorizon these are too old, or too far in the future
├── UnknownQueue          name another, or create it
├── QueueExists           alter it instead
├── QueueNotEmpty         purge it first
├── TooManyQueues         use queues that the org has
├── UnknownShard          name one that ListShards lists
├── SlotMoves             pin the org when its slot has come to rest
├── NotPinned             nothing: the org lives where its hash slot does
├── TooManyPins           pin no more orgs: slots of their own are used up
├── OrgMoves              erase the org when its jobs are not on their way to another shard
├── LegallyHeld           release the org from its legal hold first, if it is to be
├── NotHeld               nothing: the org is under no legal hold
├── BadPageToken          begin at the first page
└── Misconfigured         an operator must look: wrong database, schema too new, catalog of another cluster
    └── LostHistory       look for a server that has all of it, or accept the loss
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import UTC, datetime

from shard.vocabulary import CATALOG, Micros, OrgId, QueueName, ShardName, Slot


def what(shard: ShardName) -> str:
    """As messages name it."""
    return "the catalog" if shard == CATALOG else f"shard {shard!r}"


class ShardError(Exception):
    """Root of the tree."""


class ShardUnavailable(ShardError):
    _what = "is unavailable"

    def __init__(self, shard: ShardName, why: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(f"{what(shard)} {self._what}: {why}")
        self.shard = shard
        self.why = why
        self.retry_after_s = retry_after_s


class RowLocked(ShardUnavailable):
    """Another session of the database holds a lock that the call needs. What needs no such lock may have been done."""

    _what = "cannot do this now"

    def __init__(self, shard: ShardName, row: str) -> None:
        super().__init__(
            shard,
            f"{row} is locked by another session of its database; try again. `windrow doctor --held-for 1s` names the "
            "sessions that keep a transaction open",
        )


class ClockSetBack(ShardUnavailable):
    _what = "takes no calls now"

    def __init__(self, shard: ShardName, why: str) -> None:
        super().__init__(shard, why, retry_after_s=5.0)


class DiskFull(ShardUnavailable):
    """`address`: of its database, as messages name it."""

    def __init__(self, shard: ShardName, address: str, said: str) -> None:
        at = f" of the {address}" if address else ""
        super().__init__(shard, f"the disk{at} is full: {said}; make room there, and the shard takes writes again")


class NotOwned(ShardError):
    """`epoch`: since which the slot is what it is there; `known`: that of the placement the caller goes by."""

    def __init__(self, shard: ShardName, org: OrgId, slot: Slot, *, state: str, epoch: int, known: int) -> None:
        late = f", and the caller knows the placement of epoch {known}" if state == "owned" else ""
        super().__init__(
            f"shard {shard!r} does not take jobs of org {org!r}: slot {slot} is {state} there (epoch {epoch}){late}"
        )
        self.slot = slot
        self.epoch = epoch


class BadIds(ShardError):
    """The ids at these positions of the batch will not do; nothing was stored."""

    positions: list[int]


class IdsOutsideHorizon(BadIds):
    def __init__(self, positions: list[int], *, now: Micros, horizon_days: float) -> None:
        shards_time = datetime.fromtimestamp(now / 1e6, UTC)
        super().__init__(
            f"its time must be at most {horizon_days:g} days before and 1 hour after the shard's, which is "
            f"{shards_time:%Y-%m-%d %H:%M:%S} UTC: make a new id, and check the clock that ids are made by"
        )
        self.positions = positions
        self.now = now


class UnknownQueue(ShardError):
    def __init__(self, org: OrgId, queue: QueueName) -> None:
        super().__init__(f"org {org!r} has no queue {queue!r}")


class QueueExists(ShardError):
    def __init__(self, org: OrgId, queue: QueueName) -> None:
        super().__init__(f"org {org!r} already has a queue {queue!r}; alter it instead")


class QueueNotEmpty(ShardError):
    def __init__(self, org: OrgId, queue: QueueName) -> None:
        super().__init__(
            f"queue {queue!r} of org {org!r} still holds live or dead jobs: purge it first, and let leased ones finish"
        )


class TooManyQueues(ShardError):
    """These queues would be too many; nothing was stored."""

    def __init__(self, shard: ShardName, org: OrgId, queues: Collection[QueueName], *, queues_max: int) -> None:
        more = f" and {len(queues) - 1} more" if len(queues) > 1 else ""
        super().__init__(
            f"org {org!r} has {queues_max:,} queues on shard {shard!r}, the most that an org may have, and so no room "
            f"for {min(queues)!r}{more}: use those it has, and tell jobs apart by kind and attributes"
        )
        self.queues = queues


class UnknownShard(ShardError):
    def __init__(self, shard: ShardName) -> None:
        super().__init__(f"the cluster has no shard {shard!r}: ListShards (`windrow shards`) names those it has")


class SlotMoves(ShardError):
    def __init__(self, org: OrgId, slot: Slot, reads: Sequence[ShardName]) -> None:
        super().__init__(
            f"org {org!r} is in slot {slot}, which moves from shard {reads[0]!r} to {reads[-1]!r}: an org is given a "
            "slot of its own where its hash slot is at rest; try again when that has come to an end"
        )


class NotPinned(ShardError):
    def __init__(self, org: OrgId) -> None:
        super().__init__(f"org {org!r} is not pinned: it lives where the slot of its hash does")


class TooManyPins(ShardError):
    def __init__(self, org: OrgId, *, pins_max: int) -> None:
        super().__init__(
            f"org {org!r} cannot be pinned: {pins_max:,} orgs have a slot of their own, the most that there can be "
            "(one that was pinned once keeps its slot)"
        )


class OrgMoves(ShardError):
    def __init__(self, org: OrgId, shards: Sequence[ShardName]) -> None:
        way = " to ".join(map(repr, shards))
        super().__init__(f"jobs of org {org!r} are on their way from shard {way}; nothing was done: try again soon")


class LegallyHeld(ShardError):
    def __init__(self, org: OrgId, reason: str | None) -> None:
        super().__init__(f"org {org!r} is under legal hold: {reason}")


class NotHeld(ShardError):
    def __init__(self, org: OrgId) -> None:
        super().__init__(f"org {org!r} is under no legal hold")


class BadPageToken(ShardError):
    def __init__(self, token: str) -> None:
        shown = token if len(token) <= 64 else f"{token[:64]}…"
        super().__init__(f"{shown!r} is none that this call gave: begin at the first page, without a token")


class Misconfigured(ShardError):
    """An operator must look; the message says at what."""


class LostHistory(Misconfigured):
    """The shard's database lacks what it had when the catalog confirmed its last mark (shard/history.py)."""

    def __init__(self, shard: ShardName, address: str) -> None:
        super().__init__(f"shard {shard!r}: {lost_history(shard, address)}")


def lost_history(shard: ShardName, address: str) -> str:
    return (
        f"its database ({address}) has lost history: it was restored from a backup, or is a standby that lagged when "
        f"it was promoted; find a server that has all of it, or accept the loss by `windrow shards accept {shard}` "
        '(docs/operations.md, "A shard was restored from an old backup")'
    )
