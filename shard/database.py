"""One shard's Postgres: a bounded pool of prepared connections, and what its errors mean.

Every statement runs in a transaction of its own (autocommit), so that a statement is an act: done or not done. A
broken connection is tried again here, a few times, because nearly every statement of the queue may be repeated: it
names the ids or the lease it is about. Of the others whoever asks is told that they may have been done. A server that
does not answer is left alone until it does (shard/breaker.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import socket
import struct
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, LiteralString, NamedTuple, Self

import psycopg
from opentelemetry import trace
from psycopg.abc import Buffer
from psycopg.adapt import Dumper, Loader
from psycopg.conninfo import make_conninfo
from psycopg.postgres import types
from psycopg.pq import Format, TransactionStatus
from psycopg.types.numeric import Int8BinaryDumper
from psycopg_pool import AsyncConnectionPool, PoolClosed, PoolTimeout

from shard import statements
from shard.arrays import Blobs, Texts
from shard.breaker import OVERDUE_S, Breaker, first_line
from shard.connection import Connection
from shard.errors import DiskFull, RowLocked, ShardUnavailable, lost_history
from shard.servers import first_of
from shard.vocabulary import ShardName

_TRACER = trace.get_tracer("windrow.shard")
_EPOCH_2000_US = 946_684_800_000_000
_unpack_int8 = struct.Struct("!q").unpack

_SETTINGS = """
SELECT set_config(s.name, s.value, false) FROM (VALUES
    ('jit', 'off'), ('timezone', 'UTC'), ('lock_timeout', '10s'), ('idle_in_transaction_session_timeout', '15s'),
    -- Jobs travel between shards as text.
    ('datestyle', 'ISO, YMD'),
    -- That a commit did not wait for the standby is a warning.
    ('client_min_messages', 'warning'),
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
# Counting and listing may scan; they must not be stopped from planning well. That is for each run: for orgs large and
# small, and for the days that it is about.
_BOOKS_SETTINGS = f"""{_SETTINGS}
    ('plan_cache_mode', 'force_custom_plan'), ('statement_timeout', '300s')
) AS s (name, value)
"""


# How long a statement waits for a lock. The first is in the settings of every connection; the second is for statements
# that serve many calls, of which two may be about one job and meet.
_LOCK_WAIT_S = 10.0
_SHARED_LOCK_WAIT_S = 0.2
_SET_LOCK_WAIT = b"SELECT set_config('lock_timeout', %(milliseconds)s, false)"


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


# Between two tries to connect, where connecting fails and the server is there for the connections that stand.
_RECONNECT_S = 0.5
# For each server.
_CONNECT_S_MAX = 5
# For each server, and the least that libpq knows. A probe that takes longer has others beside it.
_PROBE_CONNECT_S_MAX = 2
# Then the pool has a connection back for a moment, to put a new one in the place of an old one.
_KEPT_S_MAX = 60.0
_WAITING_MAX = 1000
# What a statement meets in a database that is nobody's shard yet.
NO_SCHEMA = (psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName)
_CLOSED = "this router has closed its connections to it"


class Mark(NamedTuple):
    """A point in the history of a shard (shard/history.py)."""

    number: int
    token: str


class _ClosedMeanwhile(psycopg.OperationalError):
    """The pool is closed before this connection could be made: nothing to warn of, which the pool would do."""


logging.getLogger("psycopg.pool").addFilter(
    # Nor of each connection that went with a server: the breaker says once that it is away.
    lambda record: (
        not record.msg.startswith("discarding closed connection")
        and not any(isinstance(part, _ClosedMeanwhile) for part in record.args or ())
    )
)


class _Connection(Connection):
    """Tries until it is connected and ready for statements, and says each time that it is not. The pool's own pauses
    would double up to minutes."""

    dsn = ""
    kept_until_s = 0.0
    # As lock_timeout is set. None: not known.
    lock_wait_s: float | None = _LOCK_WAIT_S

    @classmethod
    async def connect(  # type: ignore[override]
        cls,
        conninfo: str = "",
        *,
        dsn: Callable[[], str],
        configure: Callable[[Self], Awaitable[None]],
        failed: Callable[[Exception], None],
        breaker: Breaker,
        closing: asyncio.Event,
        **kwargs: Any,
    ) -> Self:
        connect = partial(super().connect, **kwargs)
        while not closing.is_set():
            try:
                conninfo = dsn()
                connection = await first_of(conninfo, connect)
                try:
                    async with asyncio.timeout(_CONNECT_S_MAX):
                        await configure(connection)
                except BaseException:
                    await connection.close()
                    raise
                if conninfo == dsn():
                    connection.dsn = conninfo
                    return connection
                # Meanwhile the database has gone over to another server.
                await connection.close()
            except (psycopg.Error, TimeoutError) as error:
                failed(error)
                if breaker.trouble is None:
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(closing.wait(), _RECONNECT_S * random.uniform(0.5, 1.0))
                await breaker.until_closed()
        raise _ClosedMeanwhile


class Database:
    """A pool of connections to one shard.

    `run` and `transaction` raise ShardUnavailable when the server cannot be reached, does not answer, or has no
    connection free within `wait_s`; at once while it is known to be away. Other database errors pass as psycopg made
    them.
    """

    def __init__(
        self,
        name: ShardName,
        dsn: str,
        *,
        connections: int = 4,
        wait_s: float = 5.0,
        shared_lock_wait_s: float = _SHARED_LOCK_WAIT_S,
        for_books: bool = False,
    ) -> None:
        self.name = name
        # What it has proved to be (shard/identity.py); from then on a connection to another is none. None: any will do.
        self.identity: tuple[Any, ...] | None = None
        # A mark that it must have; a connection to a database without it is none. None: no mark is asked for.
        self.mark: Mark | None = None
        # Whether something may have been written since this was set to False, and whether there are new connections.
        self.changed = False
        self.reconnected = False
        # The newest migration that this release knows. None: the schema was not brought up to it yet. Afterwards a
        # schema with a newer, breaking migration is refused.
        self.newest_migration: int | None = None
        # The server and the database that were connected to last, without secrets.
        self.address = ""
        # Told when the server is away from now on: who has connections of his own may have them to that one.
        self.went_away: Callable[[], None] = _ignore
        self._wait_s = wait_s
        self._shared_lock_wait_s = shared_lock_wait_s
        self._tries = connections + 2
        self._settings: LiteralString = _BOOKS_SETTINGS if for_books else _QUEUE_SETTINGS
        self._dsn = dsn
        self._breaker = Breaker(name, ask=self._ask, opened=self._went_away)
        # Why the latest try to connect failed; None once one has succeeded since.
        self._refused: str | None = None
        self._alive: weakref.WeakSet[_Connection] = weakref.WeakSet()
        # Those that somebody uses, and since when; the longest first.
        self._busy: dict[_Connection, float] = {}
        self._watch: asyncio.TimerHandle | None = None
        self._waiting: set[asyncio.Timeout] = set()
        # Connections stay here between two statements: taking one from the pool and giving it back costs more than a
        # statement does. `_unclaimed` is how many more the pool has for us, or will have.
        self._kept: list[_Connection] = []
        self._unclaimed = connections
        # First come, first served: a connection, or None for the right to claim one from the pool. Nobody is in line
        # while one of the two is left.
        self._line: deque[asyncio.Future[_Connection | None]] = deque()
        self._checking: asyncio.Task[None] | None = None
        self._renewing: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()
        self._pool: AsyncConnectionPool[_Connection] = AsyncConnectionPool(
            connection_class=_Connection,
            min_size=1 if for_books else connections,
            max_size=connections,
            open=False,
            timeout=wait_s,
            name=f"{name}/{'books' if for_books else 'queue'}",
            kwargs={
                "dsn": lambda: self._dsn,
                "configure": self._configure,
                "failed": self._connect_failed,
                "breaker": self._breaker,
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
        if self._watch is not None:
            self._watch.cancel()
        await self._breaker.end()
        await self._pool.close(timeout=2.0)
        await self._return_kept()

    async def reconnect(self, dsn: str) -> None:
        """Goes over to another DSN. Statements under way end where they are."""
        self._dsn = dsn
        await self._renew()

    def hang_up(self) -> None:
        """Ends all connections: whoever uses one finds it lost, and new ones are looked at."""
        for connection in list(self._alive):
            hang_up(connection)

    async def check_schema(self) -> None:
        """Refuses every statement from now on, if a newer release has run a breaking migration; until it is gone
        again. Raises ShardUnavailable if the server does not answer."""
        if self.newest_migration is None:
            return
        rows = await self.run(statements.FIND_BREAKING, {"known": self.newest_migration})
        if rows[0][0] is not None:
            self._breaker.open(too_new(rows[0][0]))

    async def run(self, statement: bytes, parameters: Mapping[str, object]) -> list[Any]:
        """Runs one statement in its own transaction and fetches its rows (none for a statement that returns none).
        Raises RowLocked where a shared statement does not get a lock in a moment: it has done nothing."""
        shared = getattr(statement, "shared", False)
        lock_wait_s = self._shared_lock_wait_s if shared else _LOCK_WAIT_S
        try:
            for tries_left in range(self._tries, -1, -1):
                try:
                    async with self._connection() as connection:
                        if connection.lock_wait_s != lock_wait_s:
                            await _set_lock_wait(connection, lock_wait_s)
                        if trace.get_current_span().is_recording():
                            with self._span(statement):
                                return await connection.run(statement, parameters)
                        return await connection.run(statement, parameters)
                except (psycopg.errors.DeadlockDetected, psycopg.errors.SerializationFailure):
                    if not tries_left:
                        raise
                except (psycopg.OperationalError, psycopg.errors.ReadOnlySqlTransaction) as error:
                    if shared and isinstance(error, psycopg.errors.LockNotAvailable):
                        raise RowLocked(self.name, "something that this needs") from error
                    if not getattr(statement, "repeatable", True) and _in_doubt(error):
                        raise ShardUnavailable(
                            self.name, f"{first_line(error)}; what was asked may have been done"
                        ) from error
                    if isinstance(error, psycopg.errors.DiskFull):
                        raise DiskFull(self.name, self.address, first_line(error)) from error
                    if not tries_left or not _connection_lost(error) or self._breaker.trouble is not None:
                        raise self._unavailable(first_line(error)) from error
                    # The server went away under this connection, and so most likely under the pooled ones.
                    await self._check_pool()
            raise AssertionError("unreachable")
        finally:
            if getattr(statement, "writes", True):
                self.changed = True

    @contextlib.asynccontextmanager
    async def transaction(self) -> AsyncGenerator[Connection]:
        """Several statements, one transaction. Not tried again: the caller knows whether it may be."""
        try:
            async with self._connection() as connection:
                if connection.lock_wait_s != _LOCK_WAIT_S:
                    await _set_lock_wait(connection, _LOCK_WAIT_S)
                async with connection.transaction():
                    yield connection
        except psycopg.errors.DiskFull as error:
            raise DiskFull(self.name, self.address, first_line(error)) from error
        except (
            psycopg.OperationalError,
            psycopg.errors.ReadOnlySqlTransaction,
            psycopg.errors.IdleInTransactionSessionTimeout,
        ) as error:
            raise self._unavailable(first_line(error)) from error
        finally:
            self.changed = True

    @contextlib.asynccontextmanager
    async def _connection(self) -> AsyncGenerator[_Connection]:
        connection = await self._take()
        loop = asyncio.get_running_loop()
        self._busy[connection] = loop.time()
        if self._watch is None:
            self._watch = loop.call_later(OVERDUE_S, self._look_for_overdue)
        connection.unreplicated = False
        try:
            yield connection
            while connection.unreplicated:
                # Somebody has cancelled the wait for the synchronous standby. Nothing is answered before that has what
                # was committed (I1).
                connection.unreplicated = False
                await connection.run(statements.WAIT_FOR_STANDBY, {})
        except psycopg.errors.ReadOnlySqlTransaction:
            # A standby by now: another connection may find the primary, this one never will.
            await connection.close()
            raise
        finally:
            del self._busy[connection]
            await self._give_back(connection)

    async def _take(self) -> _Connection:
        if self._closing.is_set():
            raise ShardUnavailable(self.name, _CLOSED)
        if self._breaker.trouble is not None:
            raise ShardUnavailable(self.name, self._breaker.trouble)
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
            raise self._unavailable(f"no connection within {self._wait_s:g} s") from error
        except PoolClosed as error:
            raise ShardUnavailable(self.name, _CLOSED) from error

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
            if connection.dsn == self._dsn:
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
            self._breaker.answers += 1
            self._pass_on(connection)
            return
        if connection.closed:
            self._look_whether_cut_off()
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

    def _connect_failed(self, error: Exception) -> None:
        self._refused = first_line(error)
        self._look_whether_cut_off()

    def _look_whether_cut_off(self) -> None:
        """No connection is left, and the latest try to make one has failed: nobody need wait to know."""
        if self._refused is not None and all(connection.closed for connection in self._alive):
            self._breaker.open(self._refused)

    def _look_for_overdue(self) -> None:
        self._watch = None
        if self._busy:
            loop = asyncio.get_running_loop()
            if loop.time() - next(iter(self._busy.values())) >= OVERDUE_S:
                self._breaker.doubt()
            self._watch = loop.call_later(OVERDUE_S / 2, self._look_for_overdue)

    async def _ask(self) -> None:
        """Returns once the server has answered. Raises TimeoutError, and what psycopg raises where it is refused."""
        if self._kept and self._breaker.trouble is None:
            async with self._connection() as kept:
                await kept.run(b"SELECT 1", {})
            return
        dsn = make_conninfo(self._dsn, connect_timeout=_PROBE_CONNECT_S_MAX, application_name="windrow probe")
        busy = next((connection for connection in self._busy if not connection.closed), None)
        if busy is not None and self._breaker.trouble is None:
            # The very server that is in doubt, and none that the DSN names before it.
            server = busy.info
            dsn = make_conninfo(dsn, host=server.host, hostaddr=server.hostaddr or None, port=server.port)
        try:
            async with await first_of(dsn, partial(psycopg.AsyncConnection.connect, autocommit=True)) as new:
                await new.execute("SELECT 1")
                await self._recognize(new)
        except psycopg.errors.ConnectionTimeout as error:
            raise TimeoutError from error

    def _went_away(self) -> None:
        now_s = asyncio.get_running_loop().time()
        for patience in self._waiting:
            if not patience.expired():
                patience.reschedule(now_s)
        self._waiting.clear()
        self.hang_up()
        self.went_away()
        self._renewing = asyncio.create_task(self._renew())

    async def _renew(self) -> None:
        """Has the connections that nobody uses made anew, and the others when they are given back."""
        await self._pool.drain()
        for connection in list(self._alive):
            connection.kept_until_s = 0.0
        await self._return_kept()

    async def _check_pool(self) -> None:
        """Drops what is broken of the connections that nobody uses. In a task of its own, which nobody's cancellation
        reaches: the pool would lose the connection that it is looking at, and the cancellation with it."""
        # Also the check may meet with silence.
        self._breaker.doubt()
        if self._checking is None or self._checking.done():
            self._checking = asyncio.create_task(self._check())
        await asyncio.shield(self._checking)

    async def _check(self) -> None:
        await self._return_kept()
        await self._pool.check()
        self._look_whether_cut_off()

    async def _configure(self, connection: _Connection) -> None:
        await connection.execute(self._settings)
        connection.adapters.register_loader("timestamptz", _MicrosLoader)
        # One wire type for every int: else each magnitude would make a prepared statement of its own.
        connection.adapters.register_dumper(int, Int8BinaryDumper)
        connection.adapters.register_dumper(Blobs, _BlobsDumper)
        connection.adapters.register_dumper(Texts, _TextsDumper)
        info = connection.info
        self.address = f"database {info.dbname!r} at {info.host}:{info.port}"
        await self._recognize(connection)
        self._alive.add(connection)
        self.reconnected = True
        self._refused = None

    async def _recognize(self, connection: psycopg.AsyncConnection[Any]) -> None:
        """Refuses a database that this process must not use: the DSN may lead to another one by now, and a newer
        release may have migrated this one."""
        if self.identity is not None:
            await self._compare_identity(connection)
        if self.newest_migration is not None:
            cursor = await connection.execute(statements.FIND_BREAKING, {"known": self.newest_migration})
            row = await cursor.fetchone()
            if row is not None and row[0] is not None:
                # The connections that stand lead to the same schema.
                self._breaker.open(too_new(row[0]))
                raise psycopg.OperationalError(too_new(row[0]))

    async def _compare_identity(self, connection: psycopg.AsyncConnection[Any]) -> None:
        try:
            cursor = await connection.execute(statements.READ_IDENTITY)
            found = await cursor.fetchone()
        except NO_SCHEMA:
            found = None
        if found != self.identity:
            raise psycopg.OperationalError(
                f"its DSN leads to another database by now ({self.address}) than it did; restore this shard's backup "
                '(docs/operations.md, "A database that is refused")'
            )
        if self.mark is not None and not await _has(connection, self.mark):
            raise psycopg.OperationalError(lost_history(self.name, self.address))

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

    def _unavailable(self, why: str) -> ShardUnavailable:
        """What the breaker knows goes before what one connection has met with."""
        return ShardUnavailable(self.name, self._breaker.trouble or why)


async def _set_lock_wait(connection: _Connection, seconds: float) -> None:
    # A cancelled caller does not know whether it was set.
    connection.lock_wait_s = None
    await connection.run(_SET_LOCK_WAIT, {"milliseconds": str(round(seconds * 1000))})
    connection.lock_wait_s = seconds


def hang_up(connection: psycopg.AsyncConnection[Any]) -> None:
    """Ends a connection from outside: whoever waits on it finds it closed, as though the server had done it."""
    with contextlib.suppress(psycopg.Error, OSError), socket.socket(fileno=os.dup(connection.fileno())) as end:
        end.shutdown(socket.SHUT_RDWR)


async def _has(connection: psycopg.AsyncConnection[Any], mark: Mark) -> bool:
    """Also where it keeps newer marks only."""
    try:
        cursor = await connection.execute(statements.COMPARE_MARK, mark._asdict())
        found = await cursor.fetchone()
    except NO_SCHEMA:
        return False
    return found is not None and bool(found[0] or found[1])


def too_new(migration: int) -> str:
    """Why a schema with this breaking migration of a newer release is refused."""
    return (
        f"its schema has migration {migration:04} of a newer release, which this release cannot work with; "
        "upgrade this process"
    )


def _ignore() -> None:
    """Nobody has."""


def _connection_lost(error: psycopg.Error) -> bool:
    """Whether trying again on another connection can help: the server went away, restarted, or is a standby by now."""
    return _in_doubt(error) or error.sqlstate == "25006"


def _in_doubt(error: psycopg.Error) -> bool:
    """Whether the server went away without saying what became of the statement."""
    state = error.sqlstate
    return state is None or state.startswith("08") or state in {"57P01", "57P02", "57P03"}
