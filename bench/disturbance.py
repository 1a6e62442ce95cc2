"""What else goes on in a database while a queue works in it: a transaction left open, or readers. Both end with their
scope."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence

import psycopg
from psycopg import sql

_READERS = 4
# A reader keeps its snapshot for so long; they begin in turns, so that there is always an old one.
_READ_S = 20.0
_SCAN_EVERY_S = 1.0

# The tables whose rows change and go: a queue's hot ones. What it only appends to is not scanned.
_HOT_TABLES = """
SELECT schemaname, relname
FROM pg_stat_user_tables
WHERE n_tup_upd + n_tup_del > 0
ORDER BY n_tup_upd + n_tup_del DESC
LIMIT 2
"""


@contextlib.asynccontextmanager
async def held_snapshot(dsns: Sequence[str]) -> AsyncGenerator[None, None]:
    """One transaction in each database that holds a snapshot, and has an xid."""
    async with contextlib.AsyncExitStack() as stack:
        for dsn in dsns:
            connection = await psycopg.AsyncConnection.connect(dsn)
            stack.push_async_callback(connection.close)
            await connection.set_isolation_level(psycopg.IsolationLevel.REPEATABLE_READ)
            await connection.execute("SELECT pg_current_xact_id()")
        yield


@contextlib.asynccontextmanager
async def readers(dsns: Sequence[str]) -> AsyncGenerator[None, None]:
    """Four in each database, which read its hot tables from end to end once a second, for 20 s on one snapshot."""
    tasks = [asyncio.create_task(_read(dsn, begin_s=at * _READ_S / _READERS)) for dsn in dsns for at in range(_READERS)]
    try:
        yield
        for task in tasks:
            if task.done():
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def _read(dsn: str, *, begin_s: float) -> None:
    await asyncio.sleep(begin_s)
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
        cursor = await connection.execute(_HOT_TABLES)
        tables = [sql.Identifier(schema, name) for schema, name in await cursor.fetchall()]
        await connection.set_autocommit(False)
        await connection.set_isolation_level(psycopg.IsolationLevel.REPEATABLE_READ)
        while True:
            for _ in range(round(_READ_S / _SCAN_EVERY_S)):
                for table in tables:
                    await connection.execute(sql.SQL("SELECT count(*) FROM {}").format(table))
                await asyncio.sleep(_SCAN_EVERY_S)
            await connection.commit()
