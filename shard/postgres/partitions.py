"""Makes the partitions of the table finished ahead of time. The table has a partition for each retention, and that
partition has a partition for each UTC day. The table cold gets its partition for a retention at the same time."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Iterable, Mapping

import psycopg
from psycopg import sql

from shard.errors import TooManyRetentions
from shard.postgres import statements
from shard.postgres.connection import Connection
from shard.postgres.pool import Database, Rows
from shard.vocabulary import RETENTIONS_MAX

# One day is enough: routers make partitions every hour, and `finish` makes a partition that is missing. More days would
# make every lookup by id slower. A lookup reads all partitions from the day on which the id was made, even the
# partitions of future days, because jobs may be there if a clock was ahead.
DAYS_AHEAD = 1
_AHEAD = {"days_ahead": DAYS_AHEAD}
# The advisory lock of sessions that make partitions. Any number will do, but it must be the same in every release.
LOCK = 0x77696E64_70617274


async def make_ahead(database: Database) -> int:
    """Makes the missing partitions from yesterday to DAYS_AHEAD days ahead, by the shard's clock. If this clock was set
    back, also makes the partitions for the day of the latest time that the clock has shown, and for DAYS_AHEAD days
    after that day. Returns how many partitions it made."""
    # Look without the lock first. Usually no partition is missing. Then processes that start at the same moment need
    # not wait for each other's locks.
    if not await database.run(statements.FIND_MISSING_PARTITIONS, _AHEAD):
        return 0
    made = 0
    async with database.transaction() as connection:
        await connection.execute(statements.LOCK_EXCLUSIVE, {"lock": LOCK})
        cursor = await connection.execute(statements.FIND_MISSING_PARTITIONS, _AHEAD)
        for name, retention, first, past in await cursor.fetchall():
            await make(connection, name, retention, first, past)
            made += 1
    return made


async def refuse_another(database: Database, retention: int) -> None:
    """Raises TooManyRetentions if the shard has no room for jobs with this retention."""
    async with room_for(database, retention):
        pass


@contextlib.asynccontextmanager
async def room_for(database: Database, retention: int) -> AsyncGenerator[Connection, None]:
    """Opens a transaction that may set this retention. Until the transaction ends, no other session can set a
    retention. Raises TooManyRetentions."""
    async with database.transaction() as connection:
        await connection.execute(statements.LOCK_EXCLUSIVE, {"lock": LOCK})
        present = [days for (days,) in await connection.run(statements.READ_RETENTIONS, {})]
        if retention not in present and len(present) >= RETENTIONS_MAX:
            raise TooManyRetentions(database.name, retention, present=len(present))
        yield connection


async def make_retentions(database: Database, retentions: Iterable[int]) -> None:
    """Makes the missing partitions of these retentions. Makes no partitions of days."""
    async with database.transaction() as connection:
        await connection.execute(statements.LOCK_EXCLUSIVE, {"lock": LOCK})
        for retention in sorted({*retentions}):
            name = f"finished_{retention}"
            ((exists,),) = await connection.run(
                b"SELECT to_regclass(%(name)s) IS NOT NULL", {"name": f"windrow.{name}"}
            )
            if not exists:
                await make(connection, name, retention, None, None)


async def make(connection: Connection, name: str, retention: int, first: str | None, past: str | None) -> None:
    """Makes a partition for the days from `first` (included) to `past` (excluded). If these are None, makes the
    partition of the whole retention. Does not block enqueues and acks."""
    await connection.execute(making(name, retention, first, past), prepare=False)


def making(name: str, retention: int, first: str | None, past: str | None) -> sql.Composed:
    """Returns the statements that make a partition as a separate table and then attach it. Attaching a table does not
    block enqueues and acks; CREATE … PARTITION OF would block them. The bounds are also a CHECK constraint, so that the
    partition need not be read when it turns cold."""
    if first is None or past is None:
        return sql.SQL("\n").join(
            sql.SQL(
                "CREATE TABLE {} (LIKE {} INCLUDING ALL) PARTITION BY RANGE (finished_at);\n"
                "ALTER TABLE {} ATTACH PARTITION {} FOR VALUES IN ({});"
            ).format(table(of_retention), table(parent), table(parent), table(of_retention), retention)
            for parent, of_retention in (("finished", name), ("cold", f"cold_{retention}"))
        )
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
    """Returns the bounds of a partition: from the day `first` (included) to the day `past` (excluded), as YYYY-MM-DD in
    UTC."""
    return sql.SQL("FOR VALUES FROM ({}) TO ({})").format(_midnight(first), _midnight(past))


def within(name: str, retention: int, first: str, past: str) -> sql.Composed:
    """Returns the statement that adds a partition's bounds as a constraint, not yet validated for existing rows."""
    return sql.SQL(
        "ALTER TABLE {} ADD CONSTRAINT of_its_day CHECK "
        "(retention = {}::smallint AND finished_at >= {} AND finished_at < {}) NOT VALID"
    ).format(table(name), retention, _midnight(first), _midnight(past))


def _midnight(day: str) -> sql.Literal:
    return sql.Literal(f"{day} 00:00:00+00")


async def finish(database: Database, statement: bytes, parameters: Mapping[str, object]) -> Rows:
    """Runs a statement that moves jobs to the table finished. If the partition of the retention or of the day is
    missing, makes the partitions and runs the statement again. Returns its rows."""
    try:
        return await database.run(statement, parameters)
    except psycopg.errors.CheckViolation as error:
        # A violated constraint has a name; a missing partition raises the same error without a name.
        if error.diag.constraint_name is not None:
            raise
        await make_ahead(database)
        return await database.run(statement, parameters)
