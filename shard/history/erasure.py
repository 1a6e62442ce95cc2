"""Erases everything that one shard stores about an org.

First, in one transaction, the org gets a name that no org can have. A process that still uses the org's numeric ids is
then refused, like every process that uses stale ids. The next job for the old name creates a new org. Then the org's
data is deleted in small steps. Each step is done completely or not at all, and leaves the books balanced (invariant
I5). If a process stops early, another process can find what remains, and continue.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shard.errors import LegallyHeld, Misconfigured, OrgMoves
from shard.history import slow_steps, statements
from shard.placement import statements as placement_statements
from shard.placement.slots import SLOTS
from shard.postgres import arrays
from shard.postgres.pool import Database
from shard.vocabulary import Micros, OrgId

_ROWS = 2_000
# A step may erase more finished and cold jobs, because no other session waits for their rows.
_HISTORY_ROWS = 50_000
# How many schedules, and how many workflows, one step erases. Each is erased with all of its rows, and a workflow may
# have 110,000 rows.
_WHOLES = 10
_CHECKS = 3


class Erasure(NamedTuple):
    """What one shard has erased so far, in the order of read_erasures.sql's columns."""

    id: str
    begun_at: Micros
    # None: the erasure has not ended.
    ended_at: Micros | None
    live: int
    dead: int
    finished: int
    cold: int
    dedup_keys: int
    # Ids of dropped jobs that the shard still remembered.
    past_ids: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Unfinished:
    """An erasure that has not ended."""

    id: str
    org_id: int


async def begin(database: Database, org: OrgId, *, erasure: str) -> bool:
    """Renames the org on this shard, and so begins the erasure of the org. Returns False if the shard does not have the
    org. `erasure` is a UUID. Raises OrgMoves, LegallyHeld, ShardUnavailable. If an enqueue that has begun does not end
    in time, does nothing and raises ShardUnavailable."""
    async with database.transaction() as connection:
        # While the slots are locked, no enqueue that has read the org's ids is running, and no job is being exported.
        await connection.execute(placement_statements.LOCK_SLOTS, prepare=False)
        # While the queues are locked, no queue can be created under the org's old name.
        await connection.execute(placement_statements.LOCK_QUEUES, prepare=False)
        if await connection.run(statements.FIND_EXPORTED_ORG, {"org": org}):
            raise OrgMoves(org, [database.name])
        slots = await connection.run(statements.READ_ORG_SLOT, {"org": org})
        if await connection.run(statements.BEGIN_ERASURE, {"org": org, "id": erasure, "slots": SLOTS}):
            # If READ_ORG_SLOT found no row, the org was inserted after that statement. That org has no queue, because
            # no queue can be created now. BEGIN_ERASURE erases an org without a queue only if the org has no slot of
            # its own. So its slot was a hash slot. The number 0 stands for any hash slot.
            slot = slots[0][0] if slots else 0
            if slot >= SLOTS:
                # The org has a slot of its own, which the catalog keeps. Insert a new org in that slot, for the next
                # job of this name.
                await connection.run(
                    placement_statements.INSERT_NAMES,
                    {"orgs": arrays.texts([org]), "slots": arrays.numbers([slot]), "queues": arrays.names(())},
                )
            return True
        if await connection.run(statements.IS_HELD, {"org": org}):
            raise LegallyHeld(org, "since a moment ago")
        return False


async def unfinished(database: Database) -> list[Unfinished]:
    """Returns the erasures that have not ended, the oldest first."""
    return [Unfinished(id=row[0], org_id=row[1]) for row in await database.run(statements.FIND_ERASURES, {})]


async def go_on(database: Database, erasure: Unfinished) -> bool:
    """Erases some more of the org's data. Returns False if all of it is erased and the erasure has ended. Raises
    Misconfigured if the org's books do not balance, because such books do not show whether all data is erased."""
    at: dict[str, object] = {"org_id": erasure.org_id}
    # Statements that were running when the org was renamed may still add rows. No statement that begins later adds
    # rows. So it is enough to look a few times.
    for _ in range(_CHECKS):
        if await _erase_some(database, at):
            return True
        async with database.transaction() as connection:
            if await connection.run(statements.END_ERASURE, at):
                await connection.run(statements.DELETE_ERASED_ORG, at)
                return False
    raise Misconfigured(
        f"shard {database.name!r}: erasure {erasure.id} finds nothing more, but the books of its org "
        "show jobs that are left; see `windrow check`"
    )


async def _erase_some(database: Database, at: dict[str, object]) -> bool:
    for statement in (statements.ERASE_LIVE, statements.ERASE_DEAD):
        ((jobs,),) = await database.run(statement, {**at, "rows": _ROWS})
        if jobs:
            return True
    ((jobs,),) = await slow_steps.run(database, statements.ERASE_FINISHED, {**at, "rows": _HISTORY_ROWS})
    if jobs:
        return True
    for retention, day in await database.run(statements.FIND_COLD_DAY_OF, at):
        cold = {**at, "retention": retention, "day": day, "rows": _HISTORY_ROWS}
        await database.run(statements.ERASE_COLD, cold)
        return True
    ((erased,),) = await database.run(statements.ERASE_KEYS, {**at, "rows": _HISTORY_ROWS, "wholes": _WHOLES})
    if erased:
        return True
    await slow_steps.run(database, statements.ERASE_PAST_IDS, at)
    return False


async def read(database: Database, ids: Sequence[str]) -> list[Erasure]:
    """Returns the erasures with these ids, with counts of what was erased on this shard."""
    rows = await database.run(statements.READ_ERASURES, {"ids": "{" + ",".join(ids) + "}"})
    return [Erasure._make(row) for row in rows]
