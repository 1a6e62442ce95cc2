"""Plans the upgrade of a database to this release: which migrations will run, and how they will affect users of the
database (docs/decisions/0068-what-an-upgrade-locks.md). Changes nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from shard.postgres import schema, statements
from shard.postgres.pool import Database
from shard.postgres.schema import Migration

_FILE = Path(__file__).parent / "migrations" / "locks.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What Postgres reported about the existing tables when the migration ran on the schema of the previous
    migration."""

    # For each table, the strongest lock that the migration takes. Locks for which no statement has to wait are left
    # out. SHARE and SHARE ROW EXCLUSIVE block writes; ACCESS EXCLUSIVE also blocks reads. The migration holds its locks
    # until it ends.
    locks: Mapping[str, str]
    # Tables of which the migration reads or rewrites every row. The time of everything else in a migration does not
    # depend on the number of rows.
    reads: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    migration: Migration
    cost: Cost
    # The size in bytes of each table that is read, with its partitions.
    reads: Mapping[str, int]


def costs() -> dict[int, Cost]:
    """Returns the cost of every migration of this release, by number."""
    found = cast("dict[str, dict[str, object]]", json.loads(_FILE.read_text()))
    return {
        int(number): Cost(
            locks=cast("dict[str, str]", cost["locks"]),
            reads=cast("list[str]", cost["reads"]),
        )
        for number, cost in found.items()
    }


async def plan(database: Database) -> list[Step] | None:
    """Returns the steps of the upgrade. Returns None if the database has no schema yet, because then the upgrade
    affects nobody. Raises ShardUnavailable. Raises Misconfigured if this release cannot work with the schema."""
    pending = await schema.pending(database)
    if not pending:
        return None if pending is None else []
    rows = await database.run(statements.MEASURE_TABLES, {})
    sizes = {str(table).removeprefix("windrow."): int(size) for table, size in rows}
    known = costs()
    return [
        Step(
            migration=migration,
            cost=known[migration.number],
            # The table may not exist yet, because a migration that has not run yet makes it.
            reads={table: sizes.get(table, 0) for table in known[migration.number].reads},
        )
        for migration in pending
    ]
