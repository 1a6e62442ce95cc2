"""One connection that runs statements directly through libpq. psycopg's cursors, generators and waits serve many more
purposes, and cost several times as much.

Handles parameters, prepared statements, the socket, errors, and cancelled callers. psycopg's dumpers and loaders
convert the values. This module knows no pool, and never repeats a statement on another connection;
shard/postgres/pool.py does that.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import re
import select
import socket
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple, NoReturn, TypeVar

import psycopg
from psycopg import AsyncConnection
from psycopg.abc import PQGen
from psycopg.adapt import PyFormat, Transformer
from psycopg.errors import error_from_result
from psycopg.pq import ExecStatus, Format, TransactionStatus
from psycopg.pq.abc import PGconn, PGresult

_T = TypeVar("_T")

# The options of every connection to Postgres. A connection that gets no answer at all is lost after about ten seconds.
CONNECT_S_MAX = 5
CONNECT_OPTIONS: Mapping[str, Any] = {
    "autocommit": True,
    "client_encoding": "utf8",
    "connect_timeout": CONNECT_S_MAX,
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": 10_000,
}

# The most prepared statements of a connection. There is one for each statement and each list of its parameters' types.
# Postgres parses all other statements each time that they run.
_PREPARED_MAX = 300
# How long a statement may take to end after its caller was cancelled. If the statement takes longer, its connection is
# closed.
_ABANDONED_S_MAX = 5.0

_PLACEHOLDER = re.compile(rb"%(?:\((\w+)\)([sb])|(.?))", re.DOTALL)
_DONE = {ExecStatus.TUPLES_OK, ExecStatus.COMMAND_OK, ExecStatus.EMPTY_QUERY}
_COPYING = {ExecStatus.COPY_IN, ExecStatus.COPY_OUT, ExecStatus.COPY_BOTH}


class _Query(NamedTuple):
    """A statement in the form that Postgres takes: its parameters have numbers."""

    sql: bytes
    names: list[str]
    formats: list[PyFormat]


@lru_cache(maxsize=500)
def _parse(statement: bytes) -> _Query:
    """Replaces %(name)s and %(name)b by $1, $2, … as psycopg does."""
    formats: dict[str, PyFormat] = {}
    numbers: dict[bytes, bytes] = {}

    def number(found: re.Match[bytes]) -> bytes:
        name, format_, other = found.groups()
        if name is None:
            if other != b"%":
                raise psycopg.ProgrammingError(
                    f"write a parameter as %(name)s or %(name)b, and a percent sign as %%: {found[0]!r}"
                )
            return b"%"
        formats.setdefault(name.decode(), PyFormat(format_.decode()))
        return numbers.setdefault(name, b"$%d" % (len(numbers) + 1))

    sql = _PLACEHOLDER.sub(number, statement)
    return _Query(sql, list(formats), list(formats.values()))


class Connection(AsyncConnection[tuple[Any, ...]]):
    """A psycopg connection with the additional methods `run` and `listen`. Only one caller may use the connection at a
    time."""

    def __init__(self, pgconn: PGconn, *args: Any, **kwargs: Any) -> None:
        super().__init__(pgconn, *args, **kwargs)
        self._loop = asyncio.get_running_loop()
        self._transformer = Transformer(self)
        self._names: dict[tuple[bytes, tuple[int, ...]], bytes] = {}
        self._numbers = itertools.count(1)
        # The socket while the event loop has `_receive` as the socket's reader, and −1 otherwise. The reader is not
        # removed between statements, because adding and removing it costs half as much as a small statement.
        self._socket = -1
        # Gets its result when the answer to the latest request, or a notification, has arrived.
        self._answered: asyncio.Future[None] | None = None
        self._results: list[PGresult] = []
        self._lost: psycopg.Error | None = None
        # True after a commit that the synchronous standby may not have, because somebody cancelled the wait for it. The
        # pool sets this to False again.
        self.unreplicated = False
        self.add_notice_handler(self._on_notice)

    async def run(self, statement: bytes, parameters: Mapping[str, object]) -> list[tuple[Any, ...]]:
        """Runs one statement. Returns its rows. Raises the errors that a psycopg cursor would raise.

        If the caller is cancelled, the statement is cancelled on the server. Afterwards the connection is either ready
        for other statements, or closed."""
        try:
            try:
                return await self._run(statement, parameters)
            except (psycopg.errors.FeatureNotSupported, psycopg.errors.InvalidSqlStatementName):
                # A migration has changed the columns of a prepared statement, or somebody has deallocated it. The
                # statement has done nothing, so prepare it again.
                self._names.clear()
                self.pgconn.send_query_params(b"DEALLOCATE ALL", None)
                await self._answer()
                return await self._run(statement, parameters)
        except psycopg.Error:
            if self.closed:
                self._remove_reader()
            raise

    async def listen(self, channel: str, on_message: Callable[[str | None], None]) -> NoReturn:
        """Calls `on_message` with the payload of each notification on a channel. If the connection is lost, raises the
        reason. The first call of `on_message` passes None, because earlier notifications may have been missed."""
        await self.run(b"LISTEN " + channel.encode(), {})
        on_message(None)
        while True:
            while (notification := self.pgconn.notifies()) is not None:
                on_message(notification.extra.decode())
            if self._lost is not None:
                raise self._lost
            self._answered = self._loop.create_future()
            await self._answered

    async def wait(self, gen: PQGen[_T], *args: Any, **kwargs: Any) -> _T:
        # psycopg adds a reader of its own to the socket, which would replace ours.
        self._remove_reader()
        return await super().wait(gen, *args, **kwargs)

    async def close(self) -> None:
        self.discard()

    def discard(self) -> None:
        """Closes the connection at once."""
        self._remove_reader()
        self.pgconn.finish()

    async def _run(self, statement: bytes, parameters: Mapping[str, object]) -> list[tuple[Any, ...]]:
        pgconn, transformer = self.pgconn, self._transformer
        sql, names, wanted = _parse(statement)
        values = transformer.dump_sequence([parameters[name] for name in names], wanted)
        types, formats = transformer.types or (), transformer.formats
        key = statement, types
        name = self._names.get(key)
        if name is None and len(self._names) < _PREPARED_MAX:
            # A name is never used twice: if the caller is cancelled during this step, it is unknown whether the server
            # has the name.
            name = b"w%d" % next(self._numbers)
            pgconn.send_prepare(name, sql, types)
            await self._answer()
            self._names[key] = name
        if name is None:
            pgconn.send_query_params(sql, values, types, formats, Format.BINARY)
        else:
            pgconn.send_query_prepared(name, values, formats, Format.BINARY)
        result = await self._answer()
        transformer.set_pgresult(result)
        rows = transformer.load_rows(0, result.ntuples, tuple)
        # Release the result. Otherwise it would stay in memory until the next result.
        transformer.set_pgresult(None)
        return rows

    async def _answer(self) -> PGresult:
        """Waits until the server has answered, and is ready for the next statement. Returns the last result."""
        self._answered = answered = self._loop.create_future()
        self._results.clear()
        self._lost = None
        if self._socket < 0:
            self._socket = self.pgconn.socket
            self._loop.add_reader(self._socket, self._receive)
        if self.pgconn.flush():
            self._loop.add_writer(self._socket, self._send)
        try:
            await answered
        except asyncio.CancelledError:
            await self._abandon()
            raise
        # An error can follow the rows. Then the statement was not committed, so raise the error.
        for result in self._results:
            if result.status == ExecStatus.FATAL_ERROR:
                raise error_from_result(result)
            if result.status not in _DONE:
                raise psycopg.ProgrammingError(f"unexpected result of a statement: {ExecStatus(result.status).name}")
        # Check this last, because an error that the server sent before it closed the connection is more precise.
        if self._lost is not None:
            raise self._lost
        return self._results.pop()

    def _receive(self) -> None:
        """Reads from the socket. Sets `_answered` once the answer is complete, or the connection is lost."""
        pgconn, results = self.pgconn, self._results
        try:
            pgconn.consume_input()
            while True:
                busy = pgconn.is_busy()
                result = None if busy else pgconn.get_result()
                if result is not None:
                    results.append(result)
                    if result.status in _COPYING:
                        # libpq would return this result again and again. The connection cannot be used any more.
                        break
                elif _has_more(self._socket):
                    # uvloop reports a reset connection only once, even if the server's last messages have not been read
                    # yet. So read them now.
                    pgconn.consume_input()
                elif busy:
                    return
                else:
                    break
        except psycopg.Error as error:
            # Record the loss even if no statement runs now, because `listen` raises it.
            self._lost = error
            self._remove_reader()
        if self._answered is not None and not self._answered.done():
            self._answered.set_result(None)

    def _on_notice(self, notice: psycopg.errors.Diagnostic) -> None:
        # Recognise the notice by the function of the server that sent it, because the notice has no error code of its
        # own, and its text is in the server's language.
        if notice.source_function == "SyncRepWaitForLSN":
            self.unreplicated = True

    def _send(self) -> None:
        """Sends the rest of a statement that did not fit into the socket's buffer."""
        try:
            if self.pgconn.flush():
                return
        except psycopg.Error:
            # The reader will get the error.
            pass
        self._loop.remove_writer(self._socket)

    async def _abandon(self) -> None:
        """Cancels the statement of a cancelled caller on the server, so that other callers can use the connection."""
        if self.pgconn.transaction_status != TransactionStatus.ACTIVE:
            return
        self._answered = answered = self._loop.create_future()
        cancelling = asyncio.create_task(self.cancel_safe())
        try:
            async with asyncio.timeout(_ABANDONED_S_MAX):
                await asyncio.wait({cancelling, answered}, return_when=asyncio.FIRST_COMPLETED)
                # If the connection was lost, there is no statement to cancel. Otherwise wait until the cancel request
                # has ended, so that it cannot cancel the next statement.
                if self._lost is None:
                    await cancelling
                    await answered
        except BaseException as error:
            await self.close()
            if not isinstance(error, psycopg.Error | TimeoutError):
                raise
        finally:
            # Retrieve the result, so that asyncio does not log it.
            cancelling.add_done_callback(lambda done: done.cancelled() or done.exception())
            cancelling.cancel()

    def _remove_reader(self) -> None:
        if self._socket >= 0:
            self._loop.remove_reader(self._socket)
            self._loop.remove_writer(self._socket)
            self._socket = -1


def hang_up(connection: AsyncConnection[Any]) -> None:
    """Shuts down a connection's socket. The connection's user finds the connection closed, as if the server had closed
    it."""
    with contextlib.suppress(psycopg.Error, OSError), socket.socket(fileno=os.dup(connection.fileno())) as end:
        end.shutdown(socket.SHUT_RDWR)


def _has_more(file: int) -> bool:
    """Returns whether there is something to read: bytes, an error, or the end of the stream."""
    poll = select.poll()
    poll.register(file, select.POLLIN)
    return bool(poll.poll(0))
