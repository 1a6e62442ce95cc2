"""Plans the upgrade of a database to this release: which migrations will run, and how they will affect users of the
database (docs/decisions/0068-what-an-upgrade-locks.md). Changes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shard.postgres import schema, statements
from shard.postgres.pool import Database
from shard.postgres.schema import Migration


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    migration: Migration
    # The size in bytes of each table that is read, with its partitions.
    reads: Mapping[str, int]


async def plan(database: Database) -> list[Step] | None:
    """Returns the steps of the upgrade. Returns None if the database has no schema yet, because then the upgrade
    affects nobody. Raises ShardUnavailable. Raises Misconfigured if this release cannot work with the schema."""
    pending = await schema.pending(database)
    if not pending:
        return None if pending is None else []
    rows = await database.run(statements.MEASURE_TABLES, {})
    sizes = {str(table).removeprefix("windrow."): int(size) for table, size in rows}
    return [
        Step(
            migration=migration,
            # The table may not exist yet, because a migration that has not run yet makes it.
            reads={table: sizes.get(table, 0) for table in migration.reads},
        )
        for migration in pending
    ]
