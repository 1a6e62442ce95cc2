"""One shard's Postgres: a bounded pool of prepared connections, and what its errors mean.

Every statement runs in a transaction of its own (autocommit), so that a statement is an act: done or not done. A
broken connection is tried again here, a few times, because every statement of the queue may be repeated: it names
the ids or the lease it is about.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import struct
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, LiteralString, Self

import psycopg
from opentelemetry import trace
from psycopg.abc import Buffer
from psycopg.adapt import Dumper, Loader
from psycopg.postgres import types
from psycopg.pq import Format, TransactionStatus
from psycopg.types.numeric import Int8BinaryDumper
from psycopg_pool import AsyncConnectionPool, PoolClosed, PoolTimeout

from shard.arrays import Blobs, Texts
from shard.connection import Connection
from shard.errors import ShardUnavailable
from shard.vocabulary import ShardName

_log = logging.getLogger(__name__)
_TRACER = trace.get_tracer("windrow.shard")
_EPOCH_2000_US = 946_684_800_000_000
_unpack_int8 = struct.Struct("!q").unpack

_SETTINGS = """
SELECT set_config(s.name, s.value, false) FROM (VALUES
    ('jit', 'off'), ('timezone', 'UTC'), ('lock_timeout', '10s'), ('idle_in_transaction_session_timeout', '15s'),
    -- What the statements count on, whatever the server's defaults are: a second look sees what was committed
    -- meanwhile, and a commit is durable.
    ('default_transaction_isolation', 'read committed'), ('default_transaction_read_only', 'off'),
    ('synchronous_commit', CASE WHEN current_setting('synchronous_commit') IN ('off', 'local') THEN 'on'
        ELSE current_setting('synchronous_commit') END),
"""
# The hot tables swing between empty and millions of rows within seconds, so that statistics are always wrong, and a
# plan made on an empty table would stay. Every hot statement is a walk along an index: nothing else is allowed
# here.
_QUEUE_SETTINGS = f"""{_SETTINGS}
    ('enable_seqscan', 'off'), ('enable_bitmapscan', 'off'), ('enable_hashjoin', 'off'), ('enable_mergejoin', 'off'),
    -- One plan for each statement, made once: planning one anew costs as much as running it.
    ('plan_cache_mode', 'force_generic_plan'), ('statement_timeout', '60s')
) AS s (name, value)
"""
# Counting and listing may scan; they must not be stopped from planning well.
_BOOKS_SETTINGS = f"""{_SETTINGS}
    ('statement_timeout', '300s')
) AS s (name, value)
"""


class _MicrosLoader(Loader):
    """timestamptz → microseconds since 1970, as an int: no datetime is made on the hot path."""

    format = Format.BINARY

    def load(self, data: Buffer) -> int:
        micros: int = _unpack_int8(data)[0]
        return micros + _EPOCH_2000_US


class _BlobsDumper(Dumper):
    """An array that shard.arrays has made as Postgres reads it."""

    format = Format.BINARY
    oid = types["bytea"].array_oid

    def dump(self, obj: Blobs | Texts) -> bytes:
        return obj.data


class _TextsDumper(_BlobsDumper):
    oid = types["text"].array_oid


# Between two tries to connect: an outage is over for us this soon after it is over, however long it was.
_RECONNECT_S = 1.0
_CONNECT_S_MAX = 5
# Then the pool has a connection back for a moment, to put a new one in the place of an old one.
_KEPT_S_MAX = 60.0
_WAITING_MAX = 1000


class _Connection(Connection):
    """Tries until it is connected and ready for statements, and says each time that it is not. The pool's own pauses
    would double up to minutes."""

    kept_until_s = 0.0

    @classmethod
    async def connect(  # type: ignore[override]
        cls,
        conninfo: str = "",
        *,
        configure: Callable[[Self], Awaitable[None]],
        failed: Callable[[Exception], None],
        closing: asyncio.Event,
        **kwargs: Any,
    ) -> Self:
        while True:
            try:
                connection = await super().connect(conninfo, **kwargs)
                try:
                    async with asyncio.timeout(_CONNECT_S_MAX):
                        await configure(connection)
                except BaseException:
                    await connection.close()
                    raise
                return connection
            except (psycopg.Error, TimeoutError) as error:
                failed(error)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(closing.wait(), _RECONNECT_S * random.uniform(0.5, 1.0))
                if closing.is_set():
                    raise


class Database:
    """A pool of connections to one shard.

    `run` and `transaction` raise ShardUnavailable when the server cannot be reached or has no connection free within
    `wait_s`, at once while it is known to be away; other database errors pass as psycopg made them.
    """

    def __init__(
        self, name: ShardName, dsn: str, *, connections: int = 4, wait_s: float = 5.0, for_books: bool = False
    ) -> None:
        self.name = name
        self._wait_s = wait_s
        self._tries = connections + 2
        self._settings: LiteralString = _BOOKS_SETTINGS if for_books else _QUEUE_SETTINGS
        # Why the latest try to connect failed; None once one has succeeded since.
        self._away: str | None = None
        self._alive: weakref.WeakSet[_Connection] = weakref.WeakSet()
        self._waiting: set[asyncio.Timeout] = set()
        # Connections stay here between two statements: taking one from the pool and giving it back costs more than a
        # statement does. `_unclaimed` is how many more the pool has for us, or will have.
        self._kept: list[_Connection] = []
        self._unclaimed = connections
        # First come, first served: a connection, or None for the right to claim one from the pool. Nobody is in line
        # while one of the two is left.
        self._line: deque[asyncio.Future[_Connection | None]] = deque()
        self._checking: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()
        self._pool: AsyncConnectionPool[_Connection] = AsyncConnectionPool(
            dsn,
            connection_class=_Connection,
            min_size=1 if for_books else connections,
            max_size=connections,
            open=False,
            timeout=wait_s,
            name=f"{name}/{'books' if for_books else 'queue'}",
            kwargs={
                "configure": self._configure,
                "failed": self._connect_failed,
                "closing": self._closing,
                "autocommit": True,
                "application_name": "windrow",
                "client_encoding": "utf8",
                "connect_timeout": _CONNECT_S_MAX,
                # A silent network is a dead one after ten seconds.
                "keepalives_idle": 5,
                "keepalives_interval": 2,
                "keepalives_count": 3,
                "tcp_user_timeout": 10_000,
                # `Connection.run` prepares what is run often. Were psycopg to do it too, it would now and then
                # deallocate everything.
                "prepare_threshold": None,
            },
        )

    async def open(self) -> None:
        """Starts connecting; does not wait for the server, which may come later."""
        await self._pool.open(wait=False)

    async def close(self) -> None:
        self._closing.set()
        await self._pool.close(timeout=2.0)
        await self._return_kept()

    async def run(self, statement: bytes, parameters: Mapping[str, object]) -> list[Any]:
        """Runs one statement in its own transaction and fetches its rows (none for a statement that returns none)."""
        for tries_left in range(self._tries, -1, -1):
            try:
                async with self._connection() as connection:
                    if trace.get_current_span().is_recording():
                        with self._span(statement):
                            return await connection.run(statement, parameters)
                    return await connection.run(statement, parameters)
            except (psycopg.errors.DeadlockDetected, psycopg.errors.SerializationFailure):
                if not tries_left:
                    raise
            except (psycopg.OperationalError, psycopg.errors.ReadOnlySqlTransaction) as error:
                if not tries_left or not _connection_lost(error):
                    raise self._unavailable(error) from error
                # The server went away under this connection, and so most likely under the pooled ones.
                await self._check_pool()
        raise AssertionError("unreachable")

    @contextlib.asynccontextmanager
    async def transaction(self) -> AsyncGenerator[Connection]:
        """Several statements, one transaction. Not tried again: the caller knows whether it may be."""
        try:
            async with self._connection() as connection, connection.transaction():
                yield connection
        except (psycopg.OperationalError, psycopg.errors.ReadOnlySqlTransaction) as error:
            raise self._unavailable(error) from error

    @contextlib.asynccontextmanager
    async def _connection(self) -> AsyncGenerator[_Connection]:
        connection = await self._take()
        try:
            yield connection
        except psycopg.errors.ReadOnlySqlTransaction:
            # A standby by now: another connection may find the primary, this one never will.
            await connection.close()
            raise
        finally:
            await self._give_back(connection)

    async def _take(self) -> _Connection:
        if self._closing.is_set():
            raise ShardUnavailable(self.name, "this router is shutting down")
        if self._is_away():
            raise ShardUnavailable(self.name, self._away or "")
        if self._kept:
            return self._kept.pop()
        if len(self._waiting) >= _WAITING_MAX:
            raise ShardUnavailable(self.name, "too many calls are waiting for a connection")
        try:
            async with asyncio.timeout(self._wait_s) as patience:
                self._waiting.add(patience)
                try:
                    return await self._wait_in_line()
                finally:
                    self._waiting.discard(patience)
        except (PoolTimeout, TimeoutError) as error:
            why = self._away if self._is_away() else f"no connection within {self._wait_s:g} s"
            raise ShardUnavailable(self.name, why or "it went away") from error
        except PoolClosed as error:
            raise ShardUnavailable(self.name, "this router is shutting down") from error

    async def _wait_in_line(self) -> _Connection:
        connection = None
        if self._unclaimed:
            self._unclaimed -= 1
        else:
            turn = asyncio.get_running_loop().create_future()
            self._line.append(turn)
            try:
                connection = await turn
            except asyncio.CancelledError:
                if not turn.cancelled():
                    # It came at the same moment.
                    self._pass_on(turn.result())
                raise
        if connection is None:
            try:
                connection = await self._pool.getconn()
            except BaseException:
                self._pass_on(None)
                raise
            connection.kept_until_s = asyncio.get_running_loop().time() + _KEPT_S_MAX
        return connection

    def _pass_on(self, connection: _Connection | None) -> None:
        """To who is first in line; kept, if nobody is."""
        while self._line:
            turn = self._line.popleft()
            if not turn.done():
                turn.set_result(connection)
                return
        if connection is None:
            self._unclaimed += 1
        else:
            self._kept.append(connection)

    async def _give_back(self, connection: _Connection) -> None:
        if (
            connection.pgconn.transaction_status == TransactionStatus.IDLE
            and not self._closing.is_set()
            and asyncio.get_running_loop().time() < connection.kept_until_s
        ):
            self._pass_on(connection)
            return
        if connection.closed:
            self._give_up_waiting()
        # Also when the caller was cancelled: the pool looks at the connection's state and mends or drops it.
        await asyncio.shield(self._return(connection))

    async def _return(self, connection: _Connection) -> None:
        try:
            await self._pool.putconn(connection)
        finally:
            self._pass_on(None)

    async def _return_kept(self) -> None:
        while self._kept:
            await self._return(self._kept.pop())

    def _is_away(self) -> bool:
        """No connection is left, and the latest try to make one has failed: nobody need wait to know."""
        return self._away is not None and all(connection.closed for connection in self._alive)

    def _connect_failed(self, error: Exception) -> None:
        if self._away is None:
            _log.warning("shard %r cannot be reached: %s", self.name, _first_line(error))
        self._away = _first_line(error)
        self._give_up_waiting()

    def _give_up_waiting(self) -> None:
        if self._is_away():
            now = asyncio.get_running_loop().time()
            for patience in self._waiting:
                if not patience.expired():
                    patience.reschedule(now)
            self._waiting.clear()

    async def _check_pool(self) -> None:
        """Drops what is broken of the connections that nobody uses. In a task of its own, which nobody's cancellation
        reaches: the pool would lose the connection that it is looking at, and the cancellation with it."""
        if self._checking is None or self._checking.done():
            self._checking = asyncio.create_task(self._check())
        await asyncio.shield(self._checking)

    async def _check(self) -> None:
        await self._return_kept()
        await self._pool.check()

    async def _configure(self, connection: _Connection) -> None:
        await connection.execute(self._settings)
        connection.adapters.register_loader("timestamptz", _MicrosLoader)
        # One wire type for every int: else each magnitude would make a prepared statement of its own.
        connection.adapters.register_dumper(int, Int8BinaryDumper)
        connection.adapters.register_dumper(Blobs, _BlobsDumper)
        connection.adapters.register_dumper(Texts, _TextsDumper)
        self._alive.add(connection)
        if self._away is not None:
            _log.info("shard %r is reached again", self.name)
        self._away = None

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
        return ShardUnavailable(self.name, _first_line(error))


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _connection_lost(error: psycopg.Error) -> bool:
    """Whether trying again on another connection can help: the server went away, restarted, or is a standby by now."""
    state = error.sqlstate
    return state is None or state.startswith("08") or state in {"57P01", "57P02", "57P03", "25006"}
