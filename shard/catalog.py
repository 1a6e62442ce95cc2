"""The catalog: which shards write and read each slot. The single authority; routers hold copies of it.

Its tables are on every shard and used on one. Here a new cluster's slots are placed for the first time, each shard is
told which it owns, and the catalog's steps of a move are taken (docs/decisions/0017-moving-slots.md): each compares the
epoch, and so changes nothing when it comes late or a second time. The steps on shards are in shard/moving.py.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from shard import arrays, statements
from shard.connection import Connection
from shard.database import NO_SCHEMA, Database, Mark
from shard.errors import Misconfigured, ShardUnavailable
from shard.placement import KEYS_KNOWN_US, SLOTS, FormerOwner, Placement, plan, slot_of
from shard.vocabulary import Micros, OrgId, ShardName, Slot

_log = logging.getLogger(__name__)

# Whoever changes the catalog otherwise than by a move takes turns on this advisory lock; any number, the same in every
# release.
_LOCK = 0x77696E64_63617461
# On which each change of the catalog is told.
CHANNEL = "windrow_catalog"


class Holding(NamedTuple):
    """What of the catalog one shard holds."""

    # That write there.
    slots: int = 0
    # That only read there: their new jobs go elsewhere by now.
    leaving: int = 0
    # Pinned orgs, either way.
    pins: int = 0

    def __str__(self) -> str:
        pins = f" and {self.pins:,} pinned orgs" if self.pins else ""
        return f"{self.slots + self.leaving:,} slots{pins}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalog:
    """One copy of the catalog, as of `epoch`."""

    epoch: int
    # By number: those of the hash, then those of pinned orgs.
    slots: tuple[Placement, ...]
    pins: Mapping[OrgId, Slot]

    def slot(self, org: OrgId) -> Slot:
        return self.pins.get(org) or slot_of(org)

    def placement(self, org: OrgId) -> Placement:
        return self.slots[self.slot(org)]

    def holdings(self) -> dict[ShardName, Holding]:
        """Of every shard that holds something."""
        hashed, pinned = self.slots[:SLOTS], self.slots[SLOTS:]
        slots = Counter(shard for placement in hashed for shard in placement.writes)
        leaving = Counter(shard for one in hashed for shard in one.reads if shard not in one.writes)
        pins = Counter(shard for one in pinned for shard in {*one.writes, *one.reads})
        return {
            shard: Holding(slots=slots[shard], leaving=leaving[shard], pins=pins[shard])
            for shard in sorted({*slots, *leaving, *pins})
        }

    def left_by(self, shard: ShardName) -> Micros | None:
        """When the last of those slots left this shard for which it may be asked still; None: there are none."""
        return max((owner.left_at for one in self.slots for owner in one.former if owner.shard == shard), default=None)

    def slots_written_by(self, shard: ShardName) -> list[Slot]:
        return [Slot(slot) for slot, placement in enumerate(self.slots) if shard in placement.writes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """Slots on their way from one shard to another, since one `begin`, which gave them their epoch."""

    epoch: int
    source: ShardName
    target: ShardName
    # Whether the target writes them by now.
    switched: bool
    # In ascending order.
    slots: tuple[Slot, ...]

    def __str__(self) -> str:
        return f"the move of {len(self.slots)} slot(s) from {self.source!r} to {self.target!r} (epoch {self.epoch})"


@contextlib.asynccontextmanager
async def turn(database: Database) -> AsyncGenerator[Connection]:
    """A transaction in which one changes the catalog alone, but for moves: whoever founds it, or pins an org."""
    async with database.transaction() as connection:
        await connection.execute(statements.WAIT_TURN, {"lock": _LOCK})
        yield connection


async def found(database: Database, *, cluster: str, weights: Mapping[ShardName, float]) -> Catalog:
    """The cluster's catalog; placed by weight if the cluster is new. Raises Misconfigured if it is another
    cluster's, or if it places slots on a shard that is not among `weights`."""
    async with turn(database) as connection:
        cursor = await connection.execute(statements.READ_CATALOG_CLUSTER)
        row = await cursor.fetchone()
        if row is None:
            if not any(weights.values()):
                raise Misconfigured(
                    "no shard of the cluster file can be dealt the slots of a new cluster: give one that is active a "
                    "weight above 0"
                )
            await connection.execute(statements.FOUND_CATALOG, {"cluster": cluster})
            await connection.execute(statements.PLACE_SLOTS, {"shards": plan([None] * SLOTS, weights)})
        else:
            _refuse_other(row[0], cluster)
    catalog = await read(database)
    _refuse_unnamed(catalog, weights)
    return catalog


async def find(
    database: Database, *, cluster: str, shards: Collection[ShardName], known: Catalog | None = None
) -> Catalog:
    """The cluster's catalog, of whatever others have made; `known`: as for `read`. Raises ShardUnavailable where there
    is none yet, Misconfigured if it is another cluster's, or places slots on a shard that is not among `shards`."""
    if not await is_founded(database, cluster=cluster):
        raise ShardUnavailable(database.name, "there is no catalog yet; the first router makes it")
    catalog = await read(database, known)
    if catalog is not known:
        _refuse_unnamed(catalog, shards)
    return catalog


def _refuse_other(found: str, cluster: str) -> None:
    if found != cluster:
        raise Misconfigured(
            f"the catalog's DSN leads to the catalog of cluster {found!r}, and this is {cluster!r}; "
            "correct the cluster file"
        )


def _refuse_unnamed(catalog: Catalog, shards: Iterable[ShardName]) -> None:
    missing = sorted(catalog.holdings().keys() - set(shards))
    if missing:
        raise Misconfigured(
            f"the catalog places slots on shard(s) {', '.join(missing)}, which the cluster file does not name"
        )


async def read(database: Database, known: Catalog | None = None) -> Catalog:
    """The catalog as it is now, from one snapshot; only what is newer than the copy that is `known` is sent. That very
    copy, if nothing is."""
    return (await look(database, known))[0]


async def look(database: Database, known: Catalog | None = None) -> tuple[Catalog, dict[ShardName, Mark]]:
    """What `read` answers, and the mark of each shard that was confirmed last (shard/history.py)."""
    rows = await database.run(statements.READ_CATALOG, {"since": -1 if known is None else known.epoch})
    found: Mapping[ShardName, tuple[int, str]] = rows[0][-1] or {}
    marks = {shard: Mark(*mark) for shard, mark in found.items()}
    if known is not None and rows[0][0] == known.epoch:
        return known, marks
    if known is not None and rows[0][0] < known.epoch:
        _log.warning(
            "the catalog is at epoch %d, and was at %d: it was restored from a backup; it is read anew",
            *(rows[0][0], known.epoch),
        )
        return await look(database)
    slots = list(known.slots) if known is not None else []
    pins = dict(known.pins) if known is not None else {}
    # Thousands of slots are placed alike: they share one placement.
    placements: dict[object, Placement] = {}
    for _, slot, org, writes, reads, epoch, former, left_at, _ in rows:
        if slot is None:
            break
        if slot > len(slots):
            raise _unplaced(len(slots))
        alike = (*writes, None, *reads, None, epoch, *(former or ()), *(left_at or ()))
        if (placement := placements.get(alike)) is None:
            owners = zip(former or (), left_at or (), strict=True)
            placement = placements[alike] = Placement(
                writes=tuple(writes),
                reads=tuple(reads),
                epoch=epoch,
                former=tuple(FormerOwner(shard=shard, left_at=left) for shard, left in owners),
            )
        slots[slot : slot + 1] = [placement]
        if org is not None:
            pins[org] = slot
    if len(slots) < SLOTS:
        raise _unplaced(len(slots))
    return Catalog(epoch=rows[0][0], slots=tuple(slots), pins=pins), marks


def _unplaced(slot: int) -> Misconfigured:
    return Misconfigured(f"the catalog does not place slot {slot}; restore it from a backup")


async def is_founded(database: Database, *, cluster: str) -> bool:
    """Whether a catalog is here. Raises Misconfigured if it is another cluster's."""
    try:
        rows = await database.run(statements.READ_CATALOG_CLUSTER, {})
    except NO_SCHEMA:
        return False
    if rows:
        _refuse_other(rows[0][0], cluster)
    return bool(rows)


async def grant(database: Database, catalog: Catalog) -> int:
    """Tells a shard which slots it owns, of those at rest; answers how many were news to it. What it knows of a later
    epoch stays. Slots that move change hands by shard/moving.py alone."""
    slots = [slot for slot in catalog.slots_written_by(database.name) if catalog.slots[slot].at_rest]
    rows = await database.run(
        statements.GRANT_SLOTS,
        {
            "slots": arrays.numbers(slots),
            "epochs": arrays.numbers(catalog.slots[slot].epoch for slot in slots),
        },
    )
    return len(rows)


async def newest_epoch(database: Database) -> int:
    """The newest epoch of a slot that a shard knows. The catalog's is as new at least, unless it was restored."""
    rows = await database.run(statements.READ_NEWEST_EPOCH, {})
    return int(rows[0][0])


async def moves(database: Database) -> list[Move]:
    """All moves that have begun and not ended; first those whose slots nobody may be writing."""
    return [
        Move(epoch=epoch, source=source, target=target, switched=switched, slots=tuple(slots))
        for epoch, source, target, switched, slots in await database.run(statements.READ_MOVES, {})
    ]


async def begin(database: Database, known: Catalog, slots: Iterable[Slot], *, target: ShardName) -> Move | None:
    """Begins to move these slots, which are at rest on one shard by what the caller knows. What has changed since is
    left out; None if nothing is left. Nobody but readers of the catalog notices yet."""
    planned = sorted(slots)
    (source,) = {known.slots[slot].reads for slot in planned}
    rows = await database.run(
        statements.BEGIN,
        {
            "slots": arrays.numbers(planned),
            "epochs": arrays.numbers(known.slots[slot].epoch for slot in planned),
            "source": source[0],
            "target": target,
        },
    )
    if not rows:
        return None
    return Move(
        epoch=rows[0][1], source=source[0], target=target, switched=False, slots=tuple(sorted(slot for slot, _ in rows))
    )


async def switch(database: Database, move: Move) -> None:
    """From now on the target writes the slots of the move."""
    await database.run(statements.SWITCH, _of(move, move.slots))


async def leave(database: Database, move: Move, slots: Iterable[Slot]) -> int:
    """Puts slots of the move to rest on the target; answers how many were not yet. The source has no job of theirs
    left."""
    return len(await database.run(statements.LEAVE, _of(move, slots)))


async def forget_owner(database: Database, shard: ShardName, *, force: bool) -> int:
    """From now on nobody asks a shard that holds no slots any more what it remembers: ids and dedup keys of jobs, and
    finished ones. Answers of how many slots it was asked; 0, and nothing has changed, while it may know dedup keys,
    unless by `force`."""
    rows = await database.run(statements.FORGET_OWNER, {"shard": shard, "left_us": 0 if force else KEYS_KNOWN_US})
    return int(rows[0][0])


def _of(move: Move, slots: Iterable[Slot]) -> dict[str, object]:
    return {"slots": arrays.numbers(slots), "epoch": move.epoch, "source": move.source, "target": move.target}
