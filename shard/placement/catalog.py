"""The catalog says for each slot on which shards its jobs are written and read, and so where an org lives
(`Catalog.placement`). The catalog is the only authority; routers hold copies of it.

Every shard's schema has the catalog's tables, but only one database uses them. This module places the slots of a new
cluster, tells each shard which slots it owns, and makes the catalog's changes during a move
(docs/decisions/0017-moving-slots.md). Each change during a move compares the epoch first, so it has no effect if it
runs too late or a second time. The steps of a move that run on shards are in shard/placement/move_steps.py.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from shard.errors import Misconfigured, ShardUnavailable
from shard.placement import statements
from shard.placement.slots import KEYS_KNOWN_US, SLOTS, FormerOwner, Placement, plan, slot_of
from shard.postgres import arrays
from shard.postgres import statements as postgres_statements
from shard.postgres.connection import Connection
from shard.postgres.pool import NO_SCHEMA, Database, Mark
from shard.vocabulary import Micros, OrgId, ShardName, Slot

_log = logging.getLogger(__name__)

# The key of the advisory lock for every change of the catalog except moves. Any number would do, but it must be the
# same in every release.
_LOCK = 0x77696E64_63617461
# The NOTIFY channel that announces each change of the catalog.
CHANNEL = "windrow_catalog"


class Holding(NamedTuple):
    """What one shard holds according to the catalog."""

    # Slots whose new jobs the shard takes.
    slots: int = 0
    # Slots whose jobs are only read from the shard, because their new jobs already go to another shard.
    leaving: int = 0
    # Pinned orgs whose new jobs the shard takes, and pinned orgs whose jobs are only read from the shard.
    pins: int = 0

    def __str__(self) -> str:
        pins = f" and {self.pins:,} pinned orgs" if self.pins else ""
        return f"{self.slots + self.leaving:,} slots{pins}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalog:
    """One copy of the catalog, as of `epoch`."""

    epoch: int
    # Indexed by slot number: first the hash slots, then the slots of pinned orgs.
    slots: tuple[Placement, ...]
    pins: Mapping[OrgId, Slot]

    def slot(self, org: OrgId) -> Slot:
        """Returns the org's own slot if it has one, otherwise its hash slot."""
        return self.pins.get(org) or slot_of(org)

    def placement(self, org: OrgId) -> Placement:
        return self.slots[self.slot(org)]

    def holdings(self) -> dict[ShardName, Holding]:
        """Returns what each shard holds. Leaves out shards that hold nothing."""
        hashed, pinned = self.slots[:SLOTS], self.slots[SLOTS:]
        slots = Counter(shard for placement in hashed for shard in placement.writes)
        leaving = Counter(shard for placement in hashed for shard in placement.reads if shard not in placement.writes)
        pins = Counter(shard for placement in pinned for shard in {*placement.writes, *placement.reads})
        return {
            shard: Holding(slots=slots[shard], leaving=leaving[shard], pins=pins[shard])
            for shard in sorted({*slots, *leaving, *pins})
        }

    def left_by(self, shard: ShardName) -> Micros | None:
        """Returns the latest time at which a slot left this shard, among the slots for which routers may still ask the
        shard as a former owner. Returns None if there are no such slots."""
        left_at = (owner.left_at for placement in self.slots for owner in placement.former if owner.shard == shard)
        return max(left_at, default=None)

    def slots_written_by(self, shard: ShardName) -> list[Slot]:
        return [Slot(slot) for slot, placement in enumerate(self.slots) if shard in placement.writes]


class Look(NamedTuple):
    """What one statement reads from the catalog's database, from one snapshot."""

    catalog: Catalog
    # For each shard the mark that was confirmed last (shard/placement/marks.py).
    marks: Mapping[ShardName, Mark]
    # How many revocations of API keys the catalog has counted (shard/admin/api_keys.py).
    revocations: int
    # The version of the limits (shard/admin/limits.py).
    limits: int
    # The version of the weights (shard/admin/weights.py).
    weights: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """Slots on their way from one shard to another. One call of `begin_move` starts a move and gives it its epoch."""

    epoch: int
    source: ShardName
    target: ShardName
    # Whether new jobs of the slots already go to the target.
    switched: bool
    # In ascending order.
    slots: tuple[Slot, ...]

    def __str__(self) -> str:
        return f"the move of {len(self.slots)} slot(s) from {self.source!r} to {self.target!r} (epoch {self.epoch})"


@contextlib.asynccontextmanager
async def exclusive(database: Database) -> AsyncGenerator[Connection]:
    """Opens a transaction in which nobody else changes the catalog, except for steps of moves."""
    async with database.transaction() as connection:
        await connection.execute(postgres_statements.LOCK_EXCLUSIVE, {"lock": _LOCK})
        yield connection


async def found(database: Database, *, cluster: str, weights: Mapping[ShardName, float]) -> Catalog:
    """Creates the cluster's catalog if there is none, and places the slots by weight. Returns the catalog. Raises
    Misconfigured if the database holds another cluster's catalog, or if the catalog places slots on a shard that is not
    among `weights`."""
    # Look without a lock first, because nearly always there is a catalog. Then routers that start at the same moment
    # need not wait for each other.
    if not await is_founded(database, cluster=cluster):
        await _found(database, cluster, weights)
    catalog = await read(database)
    _refuse_unnamed(catalog, weights)
    return catalog


async def _found(database: Database, cluster: str, weights: Mapping[ShardName, float]) -> None:
    async with exclusive(database) as connection:
        cursor = await connection.execute(statements.READ_CATALOG_CLUSTER)
        row = await cursor.fetchone()
        if row is None:
            if not any(weights.values()):
                raise Misconfigured(
                    "no shard of the cluster file can take the slots of a new cluster; give an active shard a weight "
                    "above 0"
                )
            await connection.execute(statements.FOUND_CATALOG, {"cluster": cluster})
            await connection.execute(statements.PLACE_SLOTS, {"shards": plan([None] * SLOTS, weights)})
        else:
            _refuse_other(row[0], cluster)


async def find(
    database: Database, *, cluster: str, shards: Collection[ShardName], known: Catalog | None = None
) -> Catalog:
    """Reads the cluster's catalog, which a router must have created. `known` has the same meaning as for `read`. Raises
    ShardUnavailable if there is no catalog yet. Raises Misconfigured if the database holds another cluster's catalog,
    or if the catalog places slots on a shard that is not among `shards`."""
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
            f"the catalog places slots on shard(s) {', '.join(missing)}, which the cluster file does not name: put "
            "them back; before a shard leaves the file it must hold no slot, so drain it first with state = 'draining'"
        )


async def read(database: Database, known: Catalog | None = None) -> Catalog:
    """Reads the catalog from one snapshot. If `known` is an earlier copy, the database sends only newer placements. If
    nothing is newer, returns `known` itself."""
    return (await look(database, known)).catalog


async def look(database: Database, known: Catalog | None = None) -> Look:
    """Reads the catalog like `read`, and returns it with everything else that the same statement reads."""
    rows = await database.run(statements.READ_CATALOG, {"since": -1 if known is None else known.epoch})
    found: Mapping[ShardName, tuple[int, str]] = rows[0][-4] or {}
    marks = {shard: Mark(*mark) for shard, mark in found.items()}
    versions = tuple(version or 0 for version in rows[0][-3:])
    if known is not None and rows[0][0] == known.epoch:
        return Look(known, marks, *versions)
    if known is not None and rows[0][0] < known.epoch:
        _log.warning(
            "the catalog is at epoch %d and was at %d before: it was restored from a backup; reading all of it again",
            *(rows[0][0], known.epoch),
        )
        return await look(database)
    slots = list(known.slots) if known is not None else []
    pins = dict(known.pins) if known is not None else {}
    changed: dict[int, Placement] = {}
    for _, numbers, pinned, orgs, writes, reads, epoch, former, left_at, *_ in rows:
        if numbers is None:
            break
        owners = zip(former or (), left_at or (), strict=True)
        placement = Placement(
            writes=tuple(writes),
            reads=tuple(reads),
            epoch=epoch,
            former=tuple(FormerOwner(shard=shard, left_at=left) for shard, left in owners),
        )
        changed.update(dict.fromkeys(numbers, placement))
        pins.update(zip(orgs or (), pinned or (), strict=True))
    for slot in sorted(changed):
        if slot > len(slots):
            raise _unplaced(len(slots))
        slots[slot : slot + 1] = [changed[slot]]
    if len(slots) < SLOTS:
        raise _unplaced(len(slots))
    return Look(Catalog(epoch=rows[0][0], slots=tuple(slots), pins=pins), marks, *versions)


def _unplaced(slot: int) -> Misconfigured:
    return Misconfigured(f"the catalog does not place slot {slot}; restore it from a backup")


async def is_founded(database: Database, *, cluster: str) -> bool:
    """Returns whether this database holds a catalog. Raises Misconfigured if it is the catalog of another cluster."""
    try:
        rows = await database.run(statements.READ_CATALOG_CLUSTER, {})
    except NO_SCHEMA:
        return False
    if rows:
        _refuse_other(rows[0][0], cluster)
    return bool(rows)


async def grant_slots(database: Database, catalog: Catalog) -> int:
    """Tells a shard which slots it owns. Leaves out slots that are moving, because only shard/placement/move_steps.py
    changes their owner. Does not change a slot that the shard knows with a later epoch. Returns how many slots were new
    to the shard."""
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
    """Returns the newest epoch of any slot that the shard knows. The catalog's epoch is at least as new, unless the
    catalog was restored from a backup."""
    rows = await database.run(statements.READ_NEWEST_EPOCH, {})
    return int(rows[0][0])


async def moves(database: Database) -> list[Move]:
    """Returns all moves that have begun and not ended. Moves that are not `switched` come first, because perhaps no
    shard takes new jobs of their slots."""
    return [
        Move(epoch=epoch, source=source, target=target, switched=switched, slots=tuple(slots))
        for epoch, source, target, switched, slots in await database.run(statements.READ_MOVES, {})
    ]


async def begin_move(database: Database, known: Catalog, slots: Iterable[Slot], *, target: ShardName) -> Move | None:
    """Begins to move slots. According to the copy `known`, all of these slots must be on one shard and must not be
    moving. Leaves out slots whose placement has changed since `known` was read. Returns None if no slot remains. Until
    the next step of the move, the shards take enqueues and give jobs to claims as before; only the catalog and its
    copies change."""
    planned = sorted(slots)
    (source,) = {known.slots[slot].reads for slot in planned}
    rows = await database.run(
        statements.BEGIN_MOVE,
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


async def switch_writer(database: Database, move: Move) -> None:
    """Makes new jobs of the move's slots go to the target."""
    await database.run(statements.SWITCH_WRITER, _parameters(move, move.slots))


async def finish_move(database: Database, move: Move, slots: Iterable[Slot]) -> int:
    """Ends the move of these slots: from now on, only the target is read. Call it when the source has no more jobs of
    these slots. Returns for how many slots this call ended the move."""
    return len(await database.run(statements.FINISH_MOVE, _parameters(move, slots)))


async def forget_owner(database: Database, shard: ShardName, *, force: bool) -> int:
    """Makes routers stop asking a shard that holds no slots. Until now, routers have asked the shard for job ids, dedup
    keys and finished jobs, because it is a former owner of slots. Returns the number of these slots. Without `force`,
    if the shard may still know dedup keys that count, changes nothing and returns 0. Raises InDoubt."""
    rows = await database.run(statements.FORGET_OWNER, {"shard": shard, "left_us": 0 if force else KEYS_KNOWN_US})
    return int(rows[0][0])


def _parameters(move: Move, slots: Iterable[Slot]) -> dict[str, object]:
    return {"slots": arrays.numbers(slots), "epoch": move.epoch, "source": move.source, "target": move.target}
