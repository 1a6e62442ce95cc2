"""Erasing an org: everything that one shard has of it, wherever that is.

First the org is no more, in one transaction: its rows get a name that no org can have, so that whoever remembers their
numbers is refused, as one who remembers them wrongly, and the next job of that name makes another org. Then what it had
goes, in steps that are each done or not done, and each of which leaves the books balanced (I5). What one run leaves,
the next one finds, whoever runs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shard import arrays, statements
from shard.database import Database
from shard.errors import LegallyHeld, Misconfigured, OrgMoves
from shard.placement import SLOTS
from shard.vocabulary import Micros, OrgId

_ROWS = 2_000
# Nobody else is after those.
_ROWS_ASIDE = 50_000
_LOOKS = 3


class Erasure(NamedTuple):
    """What one shard has erased so far, in the order of read_erasures.sql's columns."""

    id: str
    begun_at: Micros
    # None: it goes on.
    ended_at: Micros | None
    live: int
    dead: int
    finished: int
    cold: int
    dedup_keys: int
    # Of jobs that had been dropped.
    past_ids: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Unfinished:
    """An erasure that is not at its end."""

    id: str
    org_id: int


async def begin(database: Database, org: OrgId, *, erasure: str) -> bool:
    """The org is no more on this shard; False: it was not there. `erasure`: a UUID. Raises OrgMoves,
    LegallyHeld, and ShardUnavailable, also where an enqueue under way did not end in time: nothing was done then."""
    async with database.transaction() as connection:
        # Alone with the slots: no enqueue is under way that found the org, and no job departs.
        await connection.execute(statements.LOCK_SLOTS, prepare=False)
        # Nor is a queue being made, which would keep the org's name.
        await connection.execute(statements.LOCK_QUEUES, prepare=False)
        if await connection.run(statements.FIND_DEPARTING_ORG, {"org": org}):
            raise OrgMoves(org, [database.name])
        slots = await connection.run(statements.READ_ORG_SLOT, {"org": org})
        if await connection.run(statements.BEGIN_ERASURE, {"org": org, "id": erasure, "slots": SLOTS}):
            ((slot,),) = slots
            if slot >= SLOTS:
                # Of its own, which the catalog keeps: whoever makes the org again is to find it in that.
                await connection.run(
                    statements.INTERN_NAMES,
                    {"orgs": arrays.texts([org]), "slots": arrays.numbers([slot]), "queues": arrays.names(())},
                )
            return True
        if await connection.run(statements.IS_HELD, {"org": org}):
            raise LegallyHeld(org, "since a moment ago")
        return False


async def unfinished(database: Database) -> list[Unfinished]:
    """The erasures that are not at their end, the oldest first."""
    return [Unfinished(id=row[0], org_id=row[1]) for row in await database.run(statements.FIND_ERASURES, {})]


async def go_on(database: Database, erasure: Unfinished) -> bool:
    """Erases some more. False: nothing is left, and the erasure is at its end. Raises Misconfigured where the org's
    books do not balance, and so do not tell when that is."""
    at: dict[str, object] = {"org_id": erasure.org_id}
    # What was under way when the org went may still end; nothing begins.
    for _ in range(_LOOKS):
        if await _erase_some(database, at):
            return True
        async with database.transaction() as connection:
            if await connection.run(statements.END_ERASURE, at):
                await connection.run(statements.DELETE_ERASED_ORG, at)
                return False
    raise Misconfigured(
        f"shard {database.name!r}: of erasure {erasure.id} nothing is left, but the books of its org say otherwise: "
        "look at them (windrow check)"
    )


async def _erase_some(database: Database, at: dict[str, object]) -> bool:
    for statement in (statements.ERASE_LIVE, statements.ERASE_DEAD):
        ((jobs,),) = await database.run(statement, {**at, "rows": _ROWS})
        if jobs:
            return True
    ((jobs,),) = await database.run(statements.ERASE_FINISHED, {**at, "rows": _ROWS_ASIDE})
    if jobs:
        return True
    for retention, day in await database.run(statements.FIND_COLD_DAY_OF, at):
        cold = {**at, "retention": retention, "day": day, "rows": _ROWS_ASIDE}
        await database.run(statements.ERASE_COLD, cold)
        return True
    await database.run(statements.ERASE_KEYS, at)
    return False


async def read(database: Database, ids: Sequence[str]) -> list[Erasure]:
    """What was erased here under these ids."""
    rows = await database.run(statements.READ_ERASURES, {"ids": "{" + ",".join(ids) + "}"})
    return [Erasure._make(row) for row in rows]
