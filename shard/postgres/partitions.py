"""The partitions of the table finished: one for each retention and UTC day, made ahead of time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import psycopg
from psycopg import sql

from shard.postgres import statements
from shard.postgres.connection import Connection
from shard.postgres.pool import Database

# Few, because a lookup by id reads every partition since the id was made, also those of future days: a clock that was
# ahead may have filled them. Routers make partitions every hour, and `finish` makes one that is missing.
DAYS_AHEAD = 3
# The advisory lock of sessions that make partitions. Any number, but the same everywhere.
_LOCK = 0x77696E64_70617274


async def make_ahead(database: Database) -> int:
    """Makes the missing partitions from yesterday to DAYS_AHEAD days ahead, by the shard's clock. Returns how many it
    made."""
    made = 0
    async with database.transaction() as connection:
        await connection.execute(statements.LOCK_EXCLUSIVE, {"lock": _LOCK})
        cursor = await connection.execute(statements.FIND_MISSING_PARTITIONS, {"days_ahead": DAYS_AHEAD})
        for name, retention, first, past in await cursor.fetchall():
            await make(connection, name, retention, first, past)
            made += 1
    return made


async def make(connection: Connection, name: str, retention: int, first: str, past: str) -> None:
    """Makes a partition for the days from `first` to before `past`. Enqueues and acks are not blocked."""
    await connection.execute(making(name, retention, first, past), prepare=False)


def making(name: str, retention: int, first: str, past: str) -> sql.Composed:
    """Returns the statements that make a partition as a separate table and then attach it. To attach a table does not
    block enqueues and acks; CREATE … PARTITION OF would. The bounds are also a CHECK constraint, so that the partition
    need not be read when it turns cold."""
    return sql.SQL(
        "CREATE TABLE {} (LIKE windrow.finished INCLUDING ALL);\n{};\nALTER TABLE {} ATTACH PARTITION {} {};"
    ).format(
        table(name),
        within(name, retention, first, past),
        table(f"finished_{retention}"),
        table(name),
        bounds(first, past),
    )


def table(name: str) -> sql.Identifier:
    return sql.Identifier("windrow", name)


def bounds(first: str, past: str) -> sql.Composed:
    """Returns the bounds of a partition: from the day `first` to before the day `past` (YYYY-MM-DD, in UTC)."""
    return sql.SQL("FOR VALUES FROM ({}) TO ({})").format(_midnight(first), _midnight(past))


def within(name: str, retention: int, first: str, past: str) -> sql.Composed:
    """Returns the statement that adds a partition's bounds as a constraint, not yet validated for existing rows."""
    return sql.SQL(
        "ALTER TABLE {} ADD CONSTRAINT of_its_day CHECK "
        "(retention = {}::smallint AND finished_at >= {} AND finished_at < {}) NOT VALID"
    ).format(table(name), retention, _midnight(first), _midnight(past))


def _midnight(day: str) -> sql.Literal:
    return sql.Literal(f"{day} 00:00:00+00")


async def finish(database: Database, statement: bytes, parameters: Mapping[str, object]) -> list[Any]:
    """Runs a statement that moves jobs to the table finished. If the day's partition is missing, makes the partitions
    and runs the statement again. Returns its rows."""
    try:
        return await database.run(statement, parameters)
    except psycopg.errors.CheckViolation as error:
        # A violated constraint has a name; a missing partition raises the same error without one.
        if error.diag.constraint_name is not None:
            raise
        await make_ahead(database)
        return await database.run(statement, parameters)
