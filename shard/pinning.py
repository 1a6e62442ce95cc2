"""Pinned orgs: each has a slot of its own (docs/decisions/0017-moving-slots.md), and the catalog says where it is to
live.

To pin is one transaction in the catalog. What follows from it on shards is due no sooner than the org's slot, or its
hash slot, leaves the one where both are: `settle`, before that shard is closed. Who brings a slot to where it is to be
is no business of this module.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import psycopg

from shard import arrays, catalog, statements
from shard.database import Database
from shard.errors import NotPinned, ShardUnavailable, SlotMoves, TooManyPins
from shard.placement import slot_of
from shard.vocabulary import OrgId, ShardName, Slot

# What numbers of two bytes leave beside the slots of the hash.
PINS_MAX = 16_384


@dataclass(frozen=True, slots=True)
class OnShard:
    """To live on the shard of this name."""

    shard: ShardName

    def __str__(self) -> str:
        return f"shard {self.shard}"


@dataclass(frozen=True, slots=True)
class WithLabel:
    """To live on any shard with this label."""

    label: str
    value: str

    def __str__(self) -> str:
        return f"{self.label}={self.value}"


Wish: TypeAlias = OnShard | WithLabel


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """An org with a slot of its own, which it keeps for ever."""

    org: OrgId
    slot: Slot
    # By which the shard where the org lived when it got its slot owns that.
    epoch: int
    # None: no longer pinned. It lives where its hash slot does.
    wish: Wish | None


async def pin(database: Database, org: OrgId, wish: Wish) -> Pin:
    """Has the org live where it is wished for from now on, in a slot of its own. Done again it changes nothing; of two
    that are done at once, the later holds. `database` is the catalog's. Raises SlotMoves while the org's hash slot
    moves, TooManyPins; nothing has changed then. ShardUnavailable: do it again."""
    async with catalog.turn(database) as connection:
        wished = {"org": org, **_columns(wish)}
        rows = await connection.run(statements.WISH, wished)
        if not rows:
            slot = slot_of(org)
            # First, and by itself: what is copied from it is then read after the latest move.
            ((reads,),) = await connection.run(statements.LOCK_PLACEMENT, {"slot": slot})
            if len(reads) > 1:
                raise SlotMoves(org, slot, reads)
            rows = await connection.run(statements.PIN, {"hash_slot": slot, **wished})
        if not rows:
            raise TooManyPins(org, pins_max=PINS_MAX)
        return _pin(*rows[0])


async def unpin(database: Database, org: OrgId) -> Pin:
    """Has the org live where its hash slot does; it keeps its slot. Raises NotPinned, if it does so already."""
    async with catalog.turn(database) as connection:
        rows = await connection.run(statements.READ_PIN, {"org": org})
        if not rows or _pin(*rows[0]).wish is None:
            raise NotPinned(org)
        rows = await connection.run(statements.WISH, {"org": org, **_columns(None)})
        return _pin(*rows[0])


async def read(database: Database) -> list[Pin]:
    """All orgs that have a slot of their own, by its number; those too that are no longer pinned."""
    return [_pin(*row) for row in await database.run(statements.READ_PINS, {})]


async def read_on(database: Database, shard: ShardName) -> list[Pin]:
    """Those of them whose jobs this shard takes, by name."""
    return [_pin(*row) for row in await database.run(statements.READ_PINS_ON, {"shard": shard})]


async def settle(shard: Database, pins: Sequence[Pin]) -> bool:
    """Has the shard know these orgs by their own slots: those that it takes jobs of, by any reading of the catalog
    since they were pinned. False: queues were being made or changed, and nothing was done; try again. Done late or
    twice it changes nothing. Raises ShardUnavailable."""
    rows = await shard.run(
        statements.FIND_UNSETTLED,
        {
            "orgs": arrays.texts([pin.org for pin in pins]),
            "slots": arrays.numbers(pin.slot for pin in pins),
            "epochs": arrays.numbers(pin.epoch for pin in pins),
        },
    )
    if not rows:
        return True
    orgs, slots, epochs = zip(*rows, strict=True)
    named = {"orgs": arrays.texts(orgs), "slots": arrays.numbers(slots)}
    try:
        async with shard.transaction() as connection:
            await connection.execute(statements.LOCK_QUEUES, prepare=False)
            await connection.run(
                statements.GRANT_SLOTS, {"slots": arrays.numbers(slots), "epochs": arrays.numbers(epochs)}
            )
            # Who is not known here is made known: a router would make its row by the hash.
            await connection.run(statements.INTERN_NAMES, {**named, "queues": arrays.names(())})
            await connection.run(statements.ADOPT_ORGS, named)
            await connection.run(statements.ADOPT_QUEUES, {"orgs": named["orgs"]})
    except ShardUnavailable as error:
        if isinstance(error.__cause__, psycopg.errors.LockNotAvailable):
            return False
        raise
    return True


def _columns(wish: Wish | None) -> dict[str, str | None]:
    return {
        "shard": wish.shard if isinstance(wish, OnShard) else None,
        "label": wish.label if isinstance(wish, WithLabel) else None,
        "value": wish.value if isinstance(wish, WithLabel) else None,
    }


def _pin(org: OrgId, slot: Slot, epoch: int, shard: ShardName | None, label: str | None, value: str | None) -> Pin:
    wish: Wish | None = None
    if shard is not None:
        wish = OnShard(shard)
    elif label is not None and value is not None:
        wish = WithLabel(label, value)
    return Pin(org=org, slot=slot, epoch=epoch, wish=wish)
