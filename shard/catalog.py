"""The catalog: which shards write and read each slot. The single authority; routers hold copies of it.

Its tables are on every shard and used on one. Changing the placement of slots that hold jobs is the balancer's
work; here a new cluster's slots are placed for the first time, and each shard is told which it owns.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import psycopg

from shard import arrays, statements
from shard.database import Database
from shard.errors import Misconfigured
from shard.placement import SLOTS, Placement, plan, slot_of
from shard.vocabulary import OrgId, ShardName, Slot

# Whoever changes the catalog takes turns on this advisory lock; any number, the same in every release.
_LOCK = 0x77696E64_63617461


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
    slots: tuple[Placement, ...]
    pins: Mapping[OrgId, Placement]

    def placement(self, org: OrgId) -> Placement:
        return self.pins.get(org) or self.slots[slot_of(org)]

    def holdings(self) -> dict[ShardName, Holding]:
        """Of every shard that holds something."""
        slots = Counter(shard for placement in self.slots for shard in placement.writes)
        leaving = Counter(shard for one in self.slots for shard in one.reads if shard not in one.writes)
        pins = Counter(shard for pin in self.pins.values() for shard in {*pin.writes, *pin.reads})
        return {
            shard: Holding(slots=slots[shard], leaving=leaving[shard], pins=pins[shard])
            for shard in sorted({*slots, *leaving, *pins})
        }

    def slots_written_by(self, shard: ShardName) -> list[Slot]:
        return [Slot(slot) for slot, placement in enumerate(self.slots) if shard in placement.writes]


async def found(database: Database, *, cluster: str, weights: Mapping[ShardName, float]) -> Catalog:
    """The cluster's catalog; placed by weight if the cluster is new. Raises Misconfigured if it is another
    cluster's, or if it places slots on a shard that is not among `weights`."""
    async with database.transaction() as connection:
        await connection.execute(statements.WAIT_TURN, {"lock": _LOCK})
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
        elif row[0] != cluster:
            raise Misconfigured(
                f"the catalog's DSN leads to the catalog of cluster {row[0]!r}, and this is {cluster!r}; "
                "correct the cluster file"
            )
    catalog = await read(database)
    placed = {shard for shard, holding in catalog.holdings().items() if holding.slots or holding.leaving}
    missing = sorted(placed - set(weights))
    if missing:
        raise Misconfigured(
            f"the catalog places slots on shard(s) {', '.join(missing)}, which the cluster file does not name"
        )
    return catalog


async def read(database: Database) -> Catalog:
    """The catalog as it is now, from one snapshot."""
    rows = await database.run(statements.READ_CATALOG, {})
    slots: list[Placement] = []
    pins: dict[OrgId, Placement] = {}
    epoch = 0
    for catalog_epoch, _, org, writes, reads, placed_at in rows:
        placement = Placement(writes=tuple(writes), reads=tuple(reads), epoch=placed_at)
        if org is None:
            epoch = catalog_epoch
            slots.append(placement)
        else:
            pins[org] = placement
    if len(slots) != SLOTS:
        raise Misconfigured(f"the catalog places {len(slots)} slots of {SLOTS}; restore it from a backup")
    return Catalog(epoch=epoch, slots=tuple(slots), pins=pins)


async def is_founded(database: Database) -> bool:
    return bool(await database.run(statements.READ_CATALOG_CLUSTER, {}))


async def refuse_second(shard: Database) -> None:
    """Before a catalog is founded: raises Misconfigured if a catalog elsewhere has given this shard slots."""
    try:
        rows = await shard.run(statements.COUNT_OWNED_SLOTS, {})
    except (psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName):
        return
    if rows[0][0]:
        raise Misconfigured(
            f"the catalog's database is empty, but shard {shard.name!r} has slots of a catalog elsewhere: name it by "
            "[catalog] dsn in the cluster file, or put the first [[shard]] back"
        )


async def read_epoch(database: Database) -> int:
    """The number of the latest change."""
    rows = await database.run(statements.READ_CATALOG_EPOCH, {})
    return int(rows[0][0])


async def grant(database: Database, catalog: Catalog) -> int:
    """Tells a shard which slots it owns; answers how many were news to it. What it knows of a later epoch stays."""
    slots = catalog.slots_written_by(database.name)
    rows = await database.run(
        statements.GRANT_SLOTS,
        {
            "slots": arrays.numbers(slots),
            "epochs": arrays.numbers(catalog.slots[slot].epoch for slot in slots),
        },
    )
    return len(rows)
