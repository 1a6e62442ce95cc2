"""One connection, and the short way that a statement takes over it: libpq itself. psycopg's cursors, generators and
waits, which serve many more purposes, cost several times as much.

Owns what happens between a statement's bytes and its rows: parameters, prepared statements, the socket, errors, and
what a cancelled caller leaves behind. Values are psycopg's: its dumpers and loaders make them. Knows no pool and
tries nothing again on another connection (shard/database.py).
"""

from __future__ import annotations

import asyncio
import itertools
import re
import select
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

# Statements, times the types that their parameters come in. What is beyond is parsed each time that it is run.
_PREPARED_MAX = 300
# How long a statement that nobody waits for any more may take to end; its connection is closed then.
_ABANDONED_S_MAX = 5.0

_PLACEHOLDER = re.compile(rb"%(?:\((\w+)\)([sb])|(.?))", re.DOTALL)
_DONE = {ExecStatus.TUPLES_OK, ExecStatus.COMMAND_OK, ExecStatus.EMPTY_QUERY}
_COPYING = {ExecStatus.COPY_IN, ExecStatus.COPY_OUT, ExecStatus.COPY_BOTH}


class _Query(NamedTuple):
    """A statement as Postgres reads it: parameters have numbers."""

    sql: bytes
    names: list[str]
    formats: list[PyFormat]


@lru_cache(maxsize=500)
def _parse(statement: bytes) -> _Query:
    """Reads %(name)s and %(name)b, as psycopg does."""
    formats: dict[str, PyFormat] = {}
    numbers: dict[bytes, bytes] = {}

    def number(found: re.Match[bytes]) -> bytes:
        name, format_, other = found.groups()
        if name is None:
            if other != b"%":
                raise psycopg.ProgrammingError(
                    f"a parameter is %(name)s or %(name)b, a percent sign is %%: {found[0]!r}"
                )
            return b"%"
        formats.setdefault(name.decode(), PyFormat(format_.decode()))
        return numbers.setdefault(name, b"$%d" % (len(numbers) + 1))

    sql = _PLACEHOLDER.sub(number, statement)
    return _Query(sql, list(formats), list(formats.values()))


class Connection(AsyncConnection[tuple[Any, ...]]):
    """A connection of psycopg's that can also `run`. One caller at a time."""

    def __init__(self, pgconn: PGconn, *args: Any, **kwargs: Any) -> None:
        super().__init__(pgconn, *args, **kwargs)
        self._loop = asyncio.get_running_loop()
        self._transformer = Transformer(self)
        self._names: dict[tuple[bytes, tuple[int, ...]], bytes] = {}
        self._numbers = itertools.count(1)
        # The socket while `_receive` listens to it. That is also between statements: to begin and to end listening
        # costs half as much as a small statement does.
        self._heard = -1
        # Who waits for the answer to what was sent last, or to be notified, and what has come of it.
        self._answered: asyncio.Future[None] | None = None
        self._results: list[PGresult] = []
        self._lost: psycopg.Error | None = None
        # A commit was reported as done that the synchronous standby may not have: somebody has cancelled the wait for
        # it. It is set here, and taken back by whoever lends the connection.
        self.unreplicated = False
        self.add_notice_handler(self._hear_notice)

    async def run(self, statement: bytes, parameters: Mapping[str, object]) -> list[tuple[Any, ...]]:
        """Runs one statement; answers its rows. Raises what a cursor of psycopg's would.

        When the caller is cancelled, the server is told to stop; after that the connection is fit for use, or closed.
        """
        try:
            try:
                return await self._run(statement, parameters)
            except (psycopg.errors.FeatureNotSupported, psycopg.errors.InvalidSqlStatementName):
                # A migration has changed what a prepared statement returns, or somebody deallocated it. Nothing was
                # done, and prepared anew it may well run.
                self._names.clear()
                self.pgconn.send_query_params(b"DEALLOCATE ALL", None)
                await self._answer()
                return await self._run(statement, parameters)
        except psycopg.Error:
            if self.closed:
                self._stop_listening()
            raise

    async def listen(self, channel: str, heard: Callable[[str | None], None]) -> NoReturn:
        """Tells `heard` what is notified on a channel, until the connection is lost; raises why it was. None first:
        what was said before was not heard."""
        await self.run(b"LISTEN " + channel.encode(), {})
        heard(None)
        while True:
            while (notification := self.pgconn.notifies()) is not None:
                heard(notification.extra.decode())
            if self._lost is not None:
                raise self._lost
            self._answered = self._loop.create_future()
            await self._answered

    async def wait(self, gen: PQGen[_T], *args: Any, **kwargs: Any) -> _T:
        # What psycopg itself does on this connection, it does with a reader of its own, which would displace ours.
        self._stop_listening()
        return await super().wait(gen, *args, **kwargs)

    async def close(self) -> None:
        self._stop_listening()
        await super().close()

    async def _run(self, statement: bytes, parameters: Mapping[str, object]) -> list[tuple[Any, ...]]:
        pgconn, transformer = self.pgconn, self._transformer
        sql, names, wanted = _parse(statement)
        values = transformer.dump_sequence([parameters[name] for name in names], wanted)
        types, formats = transformer.types or (), transformer.formats
        key = statement, types
        name = self._names.get(key)
        if name is None and len(self._names) < _PREPARED_MAX:
            # A number is never used again: a caller cancelled meanwhile does not know whether it has been.
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
        # Else it would stay in memory until the next one comes.
        transformer.set_pgresult(None)
        return rows

    async def _answer(self) -> PGresult:
        """Waits until the server has answered what was sent, and is ready for more."""
        self._answered = answered = self._loop.create_future()
        self._results.clear()
        self._lost = None
        if self._heard < 0:
            self._heard = self.pgconn.socket
            self._loop.add_reader(self._heard, self._receive)
        if self.pgconn.flush():
            self._loop.add_writer(self._heard, self._send)
        try:
            await answered
        except asyncio.CancelledError:
            await self._abandon()
            raise
        # Also an error after the rows counts: they were not committed then.
        for result in self._results:
            if result.status == ExecStatus.FATAL_ERROR:
                raise error_from_result(result)
            if result.status not in _DONE:
                raise psycopg.ProgrammingError(f"this is no place for {ExecStatus(result.status).name}")
        # The server's own last words, if there were any, tell more than that it is gone.
        if self._lost is not None:
            raise self._lost
        return self._results.pop()

    def _receive(self) -> None:
        """Takes in what has come; ends the wait once it is a whole answer, or nothing more can come."""
        pgconn, results = self.pgconn, self._results
        try:
            pgconn.consume_input()
            while True:
                busy = pgconn.is_busy()
                result = None if busy else pgconn.get_result()
                if result is not None:
                    results.append(result)
                    if result.status in _COPYING:
                        # This result would come again and again. The connection is of no more use.
                        break
                elif _has_more(self._heard):
                    # uvloop tells of a reset connection once, and then listens no more: also where the server's last
                    # words were still to be read, and what comes after them.
                    pgconn.consume_input()
                elif busy:
                    return
                else:
                    break
        except psycopg.Error as error:
            # Also between two statements: whoever sends the next one finds out.
            self._lost = error
            self._stop_listening()
        if self._answered is not None and not self._answered.done():
            self._answered.set_result(None)

    def _hear_notice(self, said: psycopg.errors.Diagnostic) -> None:
        # Its text is in the server's language, and it has no code of its own.
        if said.source_function == "SyncRepWaitForLSN":
            self.unreplicated = True

    def _send(self) -> None:
        """Goes on with a statement that did not fit into the socket's buffer."""
        try:
            if self.pgconn.flush():
                return
        except psycopg.Error:
            # Reading tells why.
            pass
        self._loop.remove_writer(self._heard)

    async def _abandon(self) -> None:
        """Ends the statement that nobody waits for any more, so that the connection is of use to others."""
        if self.pgconn.transaction_status != TransactionStatus.ACTIVE:
            return
        self._answered = answered = self._loop.create_future()
        cancelling = asyncio.create_task(self.cancel_safe())
        try:
            async with asyncio.timeout(_ABANDONED_S_MAX):
                await asyncio.wait({cancelling, answered}, return_when=asyncio.FIRST_COMPLETED)
                # One that broke meanwhile has nothing left to cancel; else what is on its way must not meet the next.
                if self._lost is None:
                    await cancelling
                    await answered
        except BaseException as error:
            await self.close()
            if not isinstance(error, psycopg.Error | TimeoutError):
                raise
        finally:
            # Whatever becomes of it, nobody is interested any more.
            cancelling.add_done_callback(lambda done: done.cancelled() or done.exception())
            cancelling.cancel()

    def _stop_listening(self) -> None:
        if self._heard >= 0:
            self._loop.remove_reader(self._heard)
            self._loop.remove_writer(self._heard)
            self._heard = -1


def _has_more(socket: int) -> bool:
    """Whether there is something to read: bytes, an error, or the end."""
    poll = select.poll()
    poll.register(socket, select.POLLIN)
    return bool(poll.poll(0))
