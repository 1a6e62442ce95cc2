"""The finished table's partitions: one for each retention and UTC day, made ahead of time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import psycopg
from psycopg import sql

from shard import statements
from shard.connection import Connection
from shard.database import Database

# Few, because a look for an id goes into every partition since the id was made, also into those of days to come: a
# clock that was ahead may have filled them. A router makes them every hour, and a statement that lacks one makes it
# itself.
DAYS_AHEAD = 3
# Any number, the same everywhere: makers of partitions take turns.
_LOCK = 0x77696E64_70617274


async def make_ahead(database: Database) -> int:
    """Makes the partitions from yesterday to three days ahead that do not exist yet, by the shard's clock. Answers
    how many."""
    made = 0
    async with database.transaction() as connection:
        await connection.execute(statements.WAIT_TURN, {"lock": _LOCK})
        cursor = await connection.execute(statements.FIND_MISSING_PARTITIONS, {"days_ahead": DAYS_AHEAD})
        for name, retention, first, past in await cursor.fetchall():
            await make(connection, name, retention, first, past)
            made += 1
    return made


async def make(connection: Connection, name: str, retention: int, first: str, past: str) -> None:
    """Makes a partition; enqueues and acks go on meanwhile."""
    await connection.execute(making(name, retention, first, past), prepare=False)


def making(name: str, retention: int, first: str, past: str) -> sql.Composed:
    """The statements that make a partition as a table of its own, and then attach it: attaching lets enqueues and acks
    go on, where CREATE … PARTITION OF would lock them out. It has its bounds as a constraint too, so that turning cold
    need not read it."""
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
    """A partition's, from one day (YYYY-MM-DD) to another, in UTC."""
    return sql.SQL("FOR VALUES FROM ({}) TO ({})").format(_midnight(first), _midnight(past))


def within(name: str, retention: int, first: str, past: str) -> sql.Composed:
    """Gives a partition its bounds as a constraint, which is yet to be proved for rows that are there."""
    return sql.SQL(
        "ALTER TABLE {} ADD CONSTRAINT of_its_day CHECK "
        "(retention = {}::smallint AND finished_at >= {} AND finished_at < {}) NOT VALID"
    ).format(table(name), retention, _midnight(first), _midnight(past))


def _midnight(day: str) -> sql.Literal:
    return sql.Literal(f"{day} 00:00:00+00")


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
