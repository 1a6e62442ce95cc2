"""Pins orgs. Each pinned org gets a slot of its own (docs/decisions/0017-moving-slots.md). The catalog says on which
shard the org should live, or which label its shard should have.

Pinning is one transaction in the catalog. Afterwards, the shard that holds the org records the org's own slot
(`adopt`). `adopt` may run late, but must run before the org's own slot or its hash slot leaves that shard. So `adopt`
runs before the shard closes one of these slots. The balancer moves the org's own slot to its target shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import psycopg

from shard.errors import NotPinned, ShardUnavailable, SlotMoves, TooManyPins
from shard.placement import catalog, statements
from shard.placement.slots import slot_of
from shard.postgres import arrays
from shard.postgres.pool import Database
from shard.vocabulary import OrgId, ShardName, Slot

# A slot number is a signed 16-bit integer (up to 32,767), and the hash slots use the numbers below 16,384.
PINS_MAX = 16_384


@dataclass(frozen=True, slots=True)
class OnShard:
    """The org should live on the shard of this name."""

    shard: ShardName

    def __str__(self) -> str:
        return f"shard {self.shard}"


@dataclass(frozen=True, slots=True)
class WithLabel:
    """The org should live on any shard with this label."""

    label: str
    value: str

    def __str__(self) -> str:
        return f"{self.label}={self.value}"


PinTarget: TypeAlias = OnShard | WithLabel


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """An org with a slot of its own. The org keeps that slot for ever, even when it is unpinned."""

    org: OrgId
    slot: Slot
    # The epoch under which the org's shard owned the slot when the slot was created.
    epoch: int
    # None: the org is no longer pinned, and should live where its hash slot is.
    target: PinTarget | None


async def pin(database: Database, org: OrgId, target: PinTarget) -> Pin:
    """Sets where the org should live, and gives the org a slot of its own if it has none. `database` is the catalog's
    database. A second call with the same target changes nothing. If two calls run at the same time, the later call
    wins. Raises TooManyPins. Raises SlotMoves while the org's hash slot moves. After either error, nothing has changed.
    After ShardUnavailable, call this function again.
    """
    async with catalog.exclusive(database) as connection:
        parameters = {"org": org, **_columns(target)}
        rows = await connection.run(statements.SET_PIN_TARGET, parameters)
        if not rows:
            slot = slot_of(org)
            # Lock the hash slot's placement in a statement of its own, so that INSERT_PIN copies the placement that the
            # latest move has left.
            ((reads,),) = await connection.run(statements.LOCK_PLACEMENT, {"slot": slot})
            if len(reads) > 1:
                raise SlotMoves(org, slot, reads)
            rows = await connection.run(statements.INSERT_PIN, {"hash_slot": slot, **parameters})
        if not rows:
            raise TooManyPins(org, pins_max=PINS_MAX)
        return _pin(*rows[0])


async def unpin(database: Database, org: OrgId) -> Pin:
    """Lets the org live where its hash slot is. The org keeps its own slot. Raises NotPinned if the org is not
    pinned."""
    async with catalog.exclusive(database) as connection:
        rows = await connection.run(statements.READ_PIN, {"org": org})
        if not rows or _pin(*rows[0]).target is None:
            raise NotPinned(org)
        rows = await connection.run(statements.SET_PIN_TARGET, {"org": org, **_columns(None)})
        return _pin(*rows[0])


async def read(database: Database) -> list[Pin]:
    """Returns all orgs that have a slot of their own, including orgs that are no longer pinned, ordered by slot."""
    return [_pin(*row) for row in await database.run(statements.READ_PINS, {})]


async def read_on(database: Database, shard: ShardName) -> list[Pin]:
    """Returns the orgs with a slot of their own whose jobs this shard takes, ordered by org."""
    return [_pin(*row) for row in await database.run(statements.READ_PINS_ON, {"shard": shard})]


async def adopt(shard: Database, pins: Sequence[Pin]) -> bool:
    """Makes the shard record these orgs' own slots. `pins` are pinned orgs whose jobs the shard takes, read from the
    catalog after they were pinned. Returns False if queues were being created or changed; then nothing was done, and
    the caller may try again. A late or second call changes nothing. Raises ShardUnavailable."""
    rows = await shard.run(
        statements.FIND_UNADOPTED,
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
            # Lock the slots before the queues, as an erasure does (docs/internals.md, "Locks, and their order").
            await connection.run(
                statements.GRANT_SLOTS, {"slots": arrays.numbers(slots), "epochs": arrays.numbers(epochs)}
            )
            await connection.execute(statements.LOCK_QUEUES, prepare=False)
            # Insert orgs that the shard does not know: a router would otherwise insert them with their hash slots.
            await connection.run(statements.INSERT_NAMES, {**named, "queues": arrays.names(())})
            await connection.run(statements.ADOPT_ORGS, named)
            await connection.run(statements.ADOPT_QUEUES, {"orgs": named["orgs"]})
    except ShardUnavailable as error:
        if isinstance(error.__cause__, psycopg.errors.LockNotAvailable):
            return False
        raise
    return True


def _columns(target: PinTarget | None) -> dict[str, str | None]:
    return {
        "shard": target.shard if isinstance(target, OnShard) else None,
        "label": target.label if isinstance(target, WithLabel) else None,
        "value": target.value if isinstance(target, WithLabel) else None,
    }


def _pin(org: OrgId, slot: Slot, epoch: int, shard: ShardName | None, label: str | None, value: str | None) -> Pin:
    target: PinTarget | None = None
    if shard is not None:
        target = OnShard(shard)
    elif label is not None and value is not None:
        target = WithLabel(label, value)
    return Pin(org=org, slot=slot, epoch=epoch, target=target)
