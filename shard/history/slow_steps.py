"""Transactions for statements that read or write a whole day of jobs. A day may have a hundred million jobs. With the
usual `statement_timeout`, a statement for such a day could fail at each try."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from shard.postgres.connection import Connection
from shard.postgres.pool import Database

_SET_TIMEOUT = "SELECT set_config('statement_timeout', '1h', true)"


@contextlib.asynccontextmanager
async def transaction(database: Database) -> AsyncGenerator[Connection]:
    """Opens a transaction in which a statement may take an hour. Raises ShardUnavailable."""
    async with database.transaction() as connection:
        await connection.execute(_SET_TIMEOUT)
        yield connection


async def run(database: Database, statement: bytes, parameters: Mapping[str, object]) -> list[Any]:
    """Runs one statement in a transaction of its own. Returns its rows. Raises ShardUnavailable."""
    async with transaction(database) as connection:
        return await connection.run(statement, parameters)
