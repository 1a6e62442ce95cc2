"""Runs statements on one shard's Postgres, and translates its errors.

Every statement runs in a transaction of its own (autocommit), so it is done completely or not at all. If a connection
is lost, the pool repeats the statement a few times. Nearly every statement of the queue may be repeated, because it
names the ids or the lease that it changes. Rows.ran_before tells the caller that the statement may have been done
before. If a statement must not be repeated, the caller gets InDoubt, because the statement may have been done. A server
that does not answer gets no statements until it answers again (shard/postgres/breaker.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, LiteralString, NamedTuple, TypeVar

import psycopg
from opentelemetry import trace
from psycopg.conninfo import make_conninfo

from shard.errors import DiskFull, InDoubt, Misconfigured, RowLocked, ShardUnavailable, lost_history, what
from shard.postgres import statements
from shard.postgres.breaker import OVERDUE_S, Breaker, first_line
from shard.postgres.connection import CONNECT_OPTIONS, CONNECT_S_MAX, Connection, hang_up
from shard.postgres.multi_host import first_of, only, replaced_by
from shard.postgres.pooler import SESSIONS_ARE_SHARED, refuse_shared_sessions
from shard.postgres.session import LOCK_WAIT_S, QUEUE_SETTINGS, SCAN_SETTINGS, Session
from shard.postgres.session_pool import SessionPool
from shard.vocabulary import ShardName

_AnyConnection = TypeVar("_AnyConnection", bound=psycopg.AsyncConnection[Any])
_TRACER = trace.get_tracer("windrow.shard")
# How long a statement with `short_lock_wait` waits for a lock. One such statement serves many calls, and all of these
# calls wait with it.
SHORT_LOCK_WAIT_S = 0.2
# The pause between two tries to connect while the server still answers on other connections.
_RECONNECT_S = 0.5
# How long a probe tries to connect to each server. This is the smallest value that libpq accepts. While one probe
# waits, the breaker may send more probes.
_PROBE_CONNECT_S_MAX = 2
# The errors of a statement in a database that has no schema yet.
NO_SCHEMA = (psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName)
# While statements are slow, the pool checks this often whether another server has replaced the server that runs them.
_COMPARE_S = 2.0


class Mark(NamedTuple):
    """A point in the history of a shard (shard/placement/marks.py)."""

    number: int
    token: str


class Rows(list[Any]):
    """The rows that a statement has returned."""

    # True if an earlier run of the statement may have been done, whose answer was lost with its connection. The rows
    # then show only what the last run has found and done.
    ran_before = False


class Database:
    """A shard's Postgres, used through at most `connections` connections. `kept` connections are made at the start and
    stay open. The pool makes the other connections when calls wait for a connection.

    `run` and `transaction` raise ShardUnavailable if the server cannot be reached or does not answer, or if no
    connection is free within `wait_s` seconds. While the server is known to be unavailable, they raise this error at
    once. They raise Misconfigured if the role lacks a right. Other errors of the database are raised as psycopg's
    exceptions.

    With `may_scan`, the connections are for statements that count and list: they have other planner settings and a
    longer timeout. `patience` is how many times longer than usual this server may be silent before it counts as
    unavailable (shard/postgres/breaker.py).
    """

    def __init__(
        self,
        name: ShardName,
        dsn: str,
        *,
        connections: int = 4,
        kept: int = 1,
        wait_s: float = 5.0,
        short_lock_wait_s: float = SHORT_LOCK_WAIT_S,
        may_scan: bool = False,
        patience: float = 1.0,
    ) -> None:
        self.name = name
        # The identity that was read from the database when it was checked (shard/placement/identity.py). A connection
        # to a database with another identity is refused. None: the identity is not checked.
        self.identity: tuple[Any, ...] | None = None
        # A mark that the database must have; a connection to a database without the mark is refused. None: no mark is
        # checked.
        self.mark: Mark | None = None
        # True if something may have been written since somebody set this attribute to False.
        self.changed = False
        # True if a connection was made since somebody set this attribute to False.
        self.reconnected = False
        # The newest migration of this release; a schema with a newer, breaking migration is refused. None: this process
        # has not migrated the schema yet, so the schema is not checked.
        self.newest_migration: int | None = None
        # The server and the database of the latest connection, without secrets.
        self.address = ""
        # Called when the server becomes unavailable, so that other connections to it can be closed too.
        self.went_away: Callable[[], None] = _ignore
        # Called after a connection was lost before the answer to a change had arrived. The change may have been made.
        # In this case, nobody was told which jobs became visible by the change, or what it ended (invariant I7).
        self.hints_lost: Callable[[], None] = _ignore
        self._wait_s = wait_s
        self._short_lock_wait_s = short_lock_wait_s
        self._tries = connections + 2
        self._may_scan = may_scan
        self._settings: LiteralString = SCAN_SETTINGS if may_scan else QUEUE_SETTINGS
        self._dsn = dsn
        self._breaker = Breaker(name, ask=self._ask, opened=self._went_away, patience=patience)
        # Why the latest try to connect failed. None: it succeeded.
        self._connect_error: str | None = None
        # The sessions in use, each with the time since which it is in use. The session that has been in use for the
        # longest time comes first.
        self._busy: dict[Session, float] = {}
        self._overdue_timer: asyncio.TimerHandle | None = None
        self._check_task: asyncio.Task[None] | None = None
        # True after a server was found that still takes writes although another server has replaced it. From then on,
        # each new connection is refused if its server was replaced in this way.
        self._was_replaced = False
        self._compare_task: asyncio.Task[None] | None = None
        self._compared_s = -math.inf
        self._pool = SessionPool(name, self._connect, sessions_min=kept, sessions_max=connections)

    @property
    def is_away(self) -> bool:
        """Whether statements are refused at once, because the server does not answer."""
        return self._breaker.trouble is not None

    async def open(self) -> None:
        """Starts to connect. Does not wait for the server, which may start later."""
        self._pool.open()

    async def close(self) -> None:
        if self._overdue_timer is not None:
            self._overdue_timer.cancel()
        if self._compare_task is not None:
            self._compare_task.cancel()
        await self._pool.close()
        await self._breaker.end()

    async def reconnect(self, dsn: str) -> None:
        """Changes to another DSN. Running statements end on the connections that they have."""
        self._dsn = dsn
        self._was_replaced = False
        self._pool.replace_all()

    def hang_up(self) -> None:
        """Breaks all connections. The code that uses a connection then finds that it is lost. New connections are
        checked before use."""
        for session in self._pool.sessions:
            hang_up(session)

    async def check_schema(self) -> None:
        """Opens the breaker if a newer release has run a breaking migration. Then all statements are refused while the
        schema has that migration. Raises ShardUnavailable if the server does not answer."""
        if self.newest_migration is None:
            return
        rows = await self.run(statements.FIND_BREAKING, {"known": self.newest_migration})
        if rows[0][0] is not None:
            self._breaker.open(too_new(rows[0][0]))

    async def run(self, statement: bytes, parameters: Mapping[str, object]) -> Rows:
        """Runs one statement in a transaction of its own. Returns its rows. Raises ShardUnavailable, DiskFull,
        Misconfigured. Raises RowLocked if a statement with `short_lock_wait` does not get a lock in time; the statement
        has then done nothing."""
        short_lock_wait = getattr(statement, "short_lock_wait", False)
        lock_wait_s = self._short_lock_wait_s if short_lock_wait else LOCK_WAIT_S
        indexed = getattr(statement, "indexed", False)
        writes = getattr(statement, "writes", True)
        ran_before = False
        try:
            for tries_left in range(self._tries, -1, -1):
                try:
                    async with self._connection() as connection:
                        if connection.lock_wait_s != lock_wait_s:
                            await connection.set_lock_wait(lock_wait_s)
                        if self._may_scan and connection.indexed is not indexed:
                            await connection.set_indexed(indexed=indexed)
                        if trace.get_current_span().is_recording():
                            with self._span(statement):
                                rows = Rows(await connection.run(statement, parameters))
                        else:
                            rows = Rows(await connection.run(statement, parameters))
                    rows.ran_before = ran_before
                    return rows
                except (psycopg.errors.DeadlockDetected, psycopg.errors.SerializationFailure):
                    if not tries_left:
                        raise
                except (psycopg.OperationalError, psycopg.errors.ReadOnlySqlTransaction) as error:
                    if short_lock_wait and isinstance(error, psycopg.errors.LockNotAvailable):
                        raise RowLocked(self.name, "something that this needs") from error
                    ran_before = ran_before or _in_doubt(error)
                    if not getattr(statement, "repeatable", True) and _in_doubt(error):
                        raise InDoubt(
                            self.name, f"{first_line(error)}; the change may have been made nevertheless"
                        ) from error
                    if isinstance(error, psycopg.errors.DiskFull):
                        raise DiskFull(self.name, self.address, first_line(error)) from error
                    if not tries_left or not _connection_lost(error) or self._breaker.trouble is not None:
                        raise self._unavailable(first_line(error)) from error
                    # This connection was lost, so most likely the idle connections to the same server were lost too.
                    await self._check_idle()
            raise AssertionError("unreachable")
        finally:
            if writes:
                self.changed = True
                if ran_before:
                    self.hints_lost()

    @contextlib.asynccontextmanager
    async def transaction(self) -> AsyncGenerator[Connection]:
        """Runs the block in one transaction. Does not repeat it after an error, because only the caller knows whether
        the block may be repeated. Raises ShardUnavailable, DiskFull, Misconfigured."""
        try:
            async with self._connection() as connection:
                if connection.lock_wait_s != LOCK_WAIT_S:
                    await connection.set_lock_wait(LOCK_WAIT_S)
                if self._may_scan and connection.indexed is not False:
                    await connection.set_indexed(indexed=False)
                async with connection.transaction():
                    yield connection
        except psycopg.errors.DiskFull as error:
            raise DiskFull(self.name, self.address, first_line(error)) from error
        except (
            psycopg.OperationalError,
            psycopg.errors.ReadOnlySqlTransaction,
            psycopg.errors.IdleInTransactionSessionTimeout,
        ) as error:
            if _in_doubt(error):
                self.hints_lost()
            raise self._unavailable(first_line(error)) from error
        finally:
            self.changed = True

    @contextlib.asynccontextmanager
    async def _connection(self) -> AsyncGenerator[Session]:
        if self._breaker.trouble is not None:
            raise ShardUnavailable(self.name, self._breaker.trouble)
        connection = await self._pool.take(wait_s=self._wait_s)
        loop = asyncio.get_running_loop()
        self._busy[connection] = loop.time()
        if self._overdue_timer is None:
            self._overdue_timer = loop.call_later(OVERDUE_S, self._check_overdue)
        connection.unreplicated = False
        try:
            yield connection
            while connection.unreplicated:
                # Somebody has cancelled a commit's wait for the synchronous standby. The caller must get no answer
                # before the standby has what was committed (invariant I1).
                connection.unreplicated = False
                await connection.run(statements.WAIT_FOR_STANDBY, {})
        except psycopg.errors.ReadOnlySqlTransaction as error:
            # This connection does not lead to the primary. Another connection may.
            await connection.close()
            raise _standby(error) from error
        except psycopg.errors.InternalError_ as error:
            # wait_for_standby.sql writes no row. If the statement runs on a server that has become a standby, it ends
            # with this error. Postgres does not translate the text of this error.
            if "during recovery" not in str(error):
                raise
            await connection.close()
            raise _standby(error) from error
        except psycopg.errors.DuplicatePreparedStatement as error:
            # A connection never uses a name twice, so another client has prepared the statement in this session.
            await connection.close()
            raise psycopg.OperationalError(SESSIONS_ARE_SHARED) from error
        except psycopg.errors.InsufficientPrivilege as error:
            raise Misconfigured(
                f"{what(self.name)}: the role in its DSN lacks a right: {first_line(error)}; make it the owner of the "
                "database and of everything in the schema windrow, or a member of the role that is"
            ) from error
        finally:
            del self._busy[connection]
            if connection.closed:
                self._check_cut_off()
            else:
                self._breaker.answers += 1
            self._pool.give_back(connection)

    async def _connect(self) -> Session:
        """Returns a new session. Tries until a try succeeds. When the breaker closes, tries at once."""
        connect = partial(Session.connect, application_name="windrow", prepare_threshold=None, **CONNECT_OPTIONS)
        while True:
            dsn = self._dsn
            try:
                session = await first_of(dsn, partial(self._connect_unless_replaced, connect))
                try:
                    async with asyncio.timeout(CONNECT_S_MAX):
                        await self._set_up(session)
                except BaseException:
                    session.discard()
                    raise
                if dsn == self._dsn:
                    return session
                # The DSN was changed meanwhile.
                session.discard()
            except (psycopg.Error, OSError) as error:
                self._connect_failed(error)
                if self._breaker.trouble is None:
                    await asyncio.sleep(_RECONNECT_S * random.uniform(0.5, 1.0))
                await self._breaker.until_closed()

    def _connect_failed(self, error: Exception) -> None:
        self._connect_error = first_line(error)
        self._check_cut_off()

    def _check_cut_off(self) -> None:
        """Opens the breaker if all connections are closed and the latest try to connect failed, so that no call waits
        in vain."""
        if self._connect_error is not None and all(session.closed for session in self._pool.sessions):
            self._breaker.open(self._connect_error)

    def _check_overdue(self) -> None:
        """Asks the breaker to check the server if a statement takes long."""
        self._overdue_timer = None
        if self._busy:
            loop = asyncio.get_running_loop()
            session, since_s = next(iter(self._busy.items()))
            if loop.time() - since_s >= OVERDUE_S:
                self._breaker.doubt()
                self._compare(session)
            self._overdue_timer = loop.call_later(OVERDUE_S / 2, self._check_overdue)

    def _compare(self, session: Session) -> None:
        """Checks in a task of its own whether another server has replaced the server of this session."""
        now_s = asyncio.get_running_loop().time()
        busy = self._compare_task is not None and not self._compare_task.done()
        if not busy and not session.closed and now_s - self._compared_s >= _COMPARE_S:
            self._compared_s = now_s
            self._compare_task = asyncio.create_task(self._leave_if_replaced(only(self._dsn, session.info)))

    async def _leave_if_replaced(self, own_dsn: str) -> None:
        newer = await replaced_by(self._dsn, own_dsn)
        if newer is not None:
            self._was_replaced = True
            self._breaker.open(_replaced(newer))

    async def _connect_unless_replaced(
        self, connect: Callable[[str], Coroutine[Any, Any, _AnyConnection]], dsn: str
    ) -> _AnyConnection:
        connection = await connect(dsn)
        try:
            own_dsn = only(self._dsn, connection.info)
            newer = await replaced_by(self._dsn, own_dsn) if self._was_replaced else None
        except BaseException:
            connection.pgconn.finish()
            raise
        if newer is None:
            return connection
        connection.pgconn.finish()
        raise psycopg.OperationalError(_replaced(newer))

    async def _ask(self) -> None:
        """Sends the server a small statement, and returns when the server has answered. Raises TimeoutError. Raises
        psycopg.Error if the connection is refused."""
        if self._pool.has_idle and self._breaker.trouble is None:
            async with self._connection() as idle:
                await idle.run(b"SELECT 1", {})
            return
        dsn = make_conninfo(self._dsn, connect_timeout=_PROBE_CONNECT_S_MAX, application_name="windrow probe")
        busy = next((connection for connection in self._busy if not connection.closed), None)
        if busy is not None and self._breaker.trouble is None:
            # Ask the server that is in doubt, and not another server that the DSN names before it.
            dsn = only(dsn, busy.info)
        try:
            connect = partial(psycopg.AsyncConnection.connect, autocommit=True)
            async with await first_of(dsn, partial(self._connect_unless_replaced, connect)) as new:
                await new.execute("SELECT 1")
                await self._recognize(new)
        except psycopg.errors.ConnectionTimeout as error:
            raise TimeoutError from error

    def _went_away(self) -> None:
        self._pool.refuse_waiting(self._breaker.trouble or "it does not answer")
        self.hang_up()
        self.went_away()
        self._pool.replace_all()

    async def _check_idle(self) -> None:
        """Drops the idle sessions that are broken. The check runs in a task of its own, so that it is not cancelled
        with a caller."""
        # The check may get no answer, so let the breaker ask the server too.
        self._breaker.doubt()
        if self._check_task is None or self._check_task.done():
            self._check_task = asyncio.create_task(self._check())
        await asyncio.shield(self._check_task)

    async def _check(self) -> None:
        async def check(session: Session) -> None:
            try:
                with contextlib.suppress(psycopg.Error):
                    await session.run(b"SELECT 1", {})
            finally:
                self._pool.give_back(session)

        await asyncio.gather(*map(check, self._pool.take_all_idle()))
        self._check_cut_off()

    async def _set_up(self, session: Session) -> None:
        await session.set_up(self._settings)
        self.address = f"database {session.info.dbname!r} at {session.info.host}:{session.info.port}"
        await self._recognize(session)
        self.reconnected = True
        self._connect_error = None

    async def _recognize(self, connection: psycopg.AsyncConnection[Any]) -> None:
        """Refuses a database that this process must not use. The DSN may lead to another database than before, or to a
        pooler that shares sessions. Or a newer release may have migrated the database."""
        await refuse_shared_sessions(connection, self._dsn)
        if self.identity is not None:
            await self._compare_identity(connection)
        if self.newest_migration is not None:
            cursor = await connection.execute(statements.FIND_BREAKING, {"known": self.newest_migration})
            row = await cursor.fetchone()
            if row is not None and row[0] is not None:
                # The other connections lead to the same schema, so refuse the statements of all connections.
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
                f"its DSN leads to another database ({self.address}) than it did before; restore this shard's backup "
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
        """Returns the error for callers. If the breaker is open, its reason is used, because it is more precise than
        the error of one connection."""
        return ShardUnavailable(self.name, self._breaker.trouble or why)


async def _has(connection: psycopg.AsyncConnection[Any], mark: Mark) -> bool:
    """Returns whether the database has this mark, or keeps only newer marks."""
    try:
        cursor = await connection.execute(statements.COMPARE_MARK, mark._asdict())
        found = await cursor.fetchone()
    except NO_SCHEMA:
        return False
    return found is not None and bool(found[0] or found[1])


def too_new(migration: int) -> str:
    """Returns why a schema with this breaking migration of a newer release is refused."""
    return (
        f"its schema has migration {migration:04} of a newer release, which this release cannot work with; "
        "upgrade this process"
    )


def _replaced(newer: str) -> str:
    return f"a server that still takes writes has been replaced by {newer}; stop the old one"


def _standby(error: psycopg.Error) -> psycopg.errors.ReadOnlySqlTransaction:
    # Sessions turn default_transaction_read_only off, so only a standby refuses writes.
    return psycopg.errors.ReadOnlySqlTransaction(
        f"the server is a standby: {first_line(error)}; target_session_attrs=read-write in the DSN finds the primary"
    )


def _ignore() -> None:
    """The default of Database.went_away and Database.hints_lost."""


def _connection_lost(error: psycopg.Error) -> bool:
    """Returns whether another connection may succeed: the server went away, restarted, or has become a standby."""
    return _in_doubt(error) or error.sqlstate == "25006"


def _in_doubt(error: psycopg.Error) -> bool:
    """Returns whether the connection was lost, so that nobody knows whether the statement was done."""
    state = error.sqlstate
    return state is None or state.startswith("08") or state in {"57P01", "57P02", "57P03"}
