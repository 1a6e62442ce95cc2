"""One shard's Postgres: a bounded pool of prepared connections, and what its errors mean.
 Every statement runs in a transaction of its own (autocommit), so that a statement is an act: done or not done. A
broken connection is tried again here, a few times, because every statement of the queue may be repeated: it names
the ids or the lease it is about.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Mapping
from contextlib import AbstractContextManager
from typing import Any, LiteralString

import psycopg
from opentelemetry import trace
from psycopg import AsyncConnection
from psycopg.abc import Buffer
from psycopg.adapt import Loader
from psycopg.pq import Format
from psycopg.types.numeric import Int8BinaryDumper
from psycopg_pool import AsyncConnectionPool, PoolClosed, PoolTimeout, TooManyRequests

from shard.errors import ShardUnavailable
from shard.vocabulary import ShardName

_TRACER = trace.get_tracer("windrow.shard")
_EPOCH_2000_US = 946_684_800_000_000

# The hot tables swing between empty and millions of rows within seconds, so that statistics are always wrong, and a
# plan made on an empty table would stay. Every hot statement is a walk along an index: nothing else is allowed
# here.
_QUEUE_SETTINGS = """
SELECT set_config(s.name, s.value, false) FROM (VALUES
    ('enable_seqscan', 'off'), ('enable_bitmapscan', 'off'), ('enable_hashjoin', 'off'), ('enable_mergejoin', 'off'),
    ('jit', 'off'), ('timezone', 'UTC'), ('lock_timeout', '10s'), ('statement_timeout', '60s'),
    ('idle_in_transaction_session_timeout', '15s')
) AS s (name, value)
"""
# Counting and listing may scan; they must not be stopped from planning well.
_BOOKS_SETTINGS = """
SELECT set_config(s.name, s.value, false) FROM (VALUES
    ('jit', 'off'), ('timezone', 'UTC'), ('lock_timeout', '10s'), ('statement_timeout', '300s'),
    ('idle_in_transaction_session_timeout', '15s')
) AS s (name, value)
"""


class _MicrosLoader(Loader):
    """timestamptz → microseconds since 1970, as an int: no datetime is made on the hot path."""

    format = Format.BINARY

    def load(self, data: Buffer) -> int:
        return int.from_bytes(data, "big", signed=True) + _EPOCH_2000_US


class Database:
    """A pool of connections to one shard.

    `run` and `transaction` raise ShardUnavailable when the server cannot be reached or has no connection free within
    `wait_s`; other database errors pass as psycopg made them.
    """

    def __init__(
        self, name: ShardName, dsn: str, *, connections: int = 4, wait_s: float = 5.0, for_books: bool = False
    ) -> None:
        self.name = name
        self._wait_s = wait_s
        self._tries = connections + 2
        self._settings: LiteralString = _BOOKS_SETTINGS if for_books else _QUEUE_SETTINGS
        self._pool: AsyncConnectionPool[AsyncConnection[tuple[Any, ...]]] = AsyncConnectionPool(
            dsn,
            min_size=1 if for_books else connections,
            max_size=connections,
            open=False,
            timeout=wait_s,
            max_waiting=1000,
            reconnect_timeout=60.0,
            configure=self._configure,
            name=f"{name}/{'books' if for_books else 'queue'}",
            kwargs={
                "autocommit": True,
                "application_name": "windrow",
                "connect_timeout": 5,
                # A silent network is a dead one after ten seconds.
                "keepalives_idle": 5,
                "keepalives_interval": 2,
                "keepalives_count": 3,
                "tcp_user_timeout": 10_000,
                "prepare_threshold": 0,
            },
        )

    async def open(self) -> None:
        """Starts connecting; does not wait for the server, which may come later."""
        await self._pool.open(wait=False)

    async def close(self) -> None:
        await self._pool.close(timeout=2.0)

    async def run(self, statement: bytes, parameters: Mapping[str, object]) -> list[Any]:
        """Runs one statement in its own transaction and fetches its rows (none for a statement that returns none)."""
        for tries_left in range(self._tries, -1, -1):
            try:
                async with self._connection() as connection:
                    if trace.get_current_span().is_recording():
                        with self._span(statement):
                            return await _fetch(connection, statement, parameters)
                    return await _fetch(connection, statement, parameters)
            except (psycopg.errors.DeadlockDetected, psycopg.errors.SerializationFailure):
                if not tries_left:
                    raise
            except psycopg.OperationalError as error:
                if not tries_left or not _connection_lost(error):
                    raise self._unavailable(error) from error
                # The server went away under this connection, and so most likely under the pooled ones.
                await self._pool.check()
        raise AssertionError("unreachable")

    @contextlib.asynccontextmanager
    async def transaction(self) -> AsyncGenerator[AsyncConnection[tuple[Any, ...]]]:
        """Several statements, one transaction. Not tried again: the caller knows whether it may be."""
        try:
            async with self._connection() as connection, connection.transaction():
                yield connection
        except psycopg.OperationalError as error:
            raise self._unavailable(error) from error

    @contextlib.asynccontextmanager
    async def _connection(self) -> AsyncGenerator[AsyncConnection[tuple[Any, ...]]]:
        try:
            connection = await self._pool.getconn()
        except PoolTimeout as error:
            raise ShardUnavailable(self.name, f"no connection within {self._wait_s:g} s") from error
        except TooManyRequests as error:
            raise ShardUnavailable(self.name, "too many calls are waiting for a connection") from error
        except PoolClosed as error:
            raise ShardUnavailable(self.name, "this router is shutting down") from error
        try:
            yield connection
        finally:
            # Also when the caller was cancelled: the pool looks at the connection's state and mends or drops it.
            await asyncio.shield(self._pool.putconn(connection))

    async def _configure(self, connection: AsyncConnection[tuple[Any, ...]]) -> None:
        await connection.execute(self._settings)
        connection.adapters.register_loader("timestamptz", _MicrosLoader)
        # One wire type for every int: else each magnitude would make a prepared statement of its own.
        connection.adapters.register_dumper(int, Int8BinaryDumper)

    def _span(self, statement: bytes) -> AbstractContextManager[trace.Span]:
        name = getattr(statement, "name", "statement")
        return _TRACER.start_as_current_span(
            f"{name} {self.name}",
            kind=trace.SpanKind.CLIENT,
            attributes={
                "db.system.name": "postgresql",
                "db.operation.name": name,
                "db.query.summary": name,
                "windrow.shard": self.name,
            },
        )

    def _unavailable(self, error: psycopg.Error) -> ShardUnavailable:
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        return ShardUnavailable(self.name, first_line)


async def _fetch(
    connection: AsyncConnection[tuple[Any, ...]], statement: bytes, parameters: Mapping[str, object]
) -> list[Any]:
    cursor = connection.cursor(binary=True)
    await cursor.execute(statement, parameters)
    return await cursor.fetchall() if cursor.description else []


def _connection_lost(error: psycopg.OperationalError) -> bool:
    """Whether trying again on another connection can help: the server went away, restarted, or is a standby by now."""
    state = error.sqlstate
    return state is None or state.startswith("08") or state in {"57P01", "57P02", "57P03", "25006"}
