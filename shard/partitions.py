"""The finished table's partitions: one for each UTC day, made ahead of time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import psycopg
from psycopg import sql

from shard import statements
from shard.database import Database

# Few, because a look for an id goes into every partition since the id was made, also into those of days to come: a
# clock that was ahead may have filled them. A router makes them every hour, and a statement that lacks one makes it
# itself.
_DAYS_AHEAD = 3
# Any number, the same everywhere: makers of partitions take turns.
_LOCK = 0x77696E64_70617274


async def make_ahead(database: Database) -> int:
    """Makes the partitions from yesterday to three days ahead that do not exist yet, by the shard's clock. Answers
    how many.

    Each is made as a table of its own and then attached: attaching lets enqueues and acks go on, where CREATE …
    PARTITION OF would lock them out.
    """
    made = 0
    async with database.transaction() as connection:
        await connection.execute(statements.WAIT_TURN, {"lock": _LOCK})
        cursor = await connection.execute(statements.FIND_MISSING_PARTITIONS, {"days_ahead": _DAYS_AHEAD})
        for name, first, past in await cursor.fetchall():
            table = sql.Identifier("windrow", name)
            bounds = (sql.Literal(f"{first} 00:00:00+00"), sql.Literal(f"{past} 00:00:00+00"))
            await connection.execute(sql.SQL("CREATE TABLE {} (LIKE windrow.finished INCLUDING ALL)").format(table))
            await connection.execute(
                sql.SQL("ALTER TABLE windrow.finished ATTACH PARTITION {} FOR VALUES FROM ({}) TO ({})").format(
                    table, *bounds
                )
            )
            made += 1
    return made


async def finish(database: Database, statement: bytes, parameters: Mapping[str, object]) -> list[Any]:
    """Runs a statement that moves jobs to the finished table; makes the day's partition first should it be missing."""
    try:
        return await database.run(statement, parameters)
    except psycopg.errors.CheckViolation as error:
        # A constraint of ours has a name; the lack of a partition has none.
        if error.diag.constraint_name is not None:
            raise
        await make_ahead(database)
        return await database.run(statement, parameters)
