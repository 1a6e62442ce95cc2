"""Tests how a statement runs on Postgres: its rows, its errors, and what happens when the connection is cut or the
caller is cancelled."""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
import struct
import threading
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import psycopg
import pytest
import uvloop
from psycopg.conninfo import conninfo_to_dict, make_conninfo

import shard.postgres.connection
import shard.postgres.session_pool
from embedded import Cluster
from shard.errors import ShardUnavailable
from shard.postgres import arrays, schema, statements
from shard.postgres.connection import Connection
from shard.postgres.pool import Database
from shard.postgres.session import Session
from tests.conftest import SHARD
from tests.postgres import Server
from tests.routers import PATIENCE_S

MIB = 1024 * 1024
SLEEP = b"SELECT pg_sleep(600)"
PID = b"SELECT pg_backend_pid()"
# This statement ends when the other session releases the lock.
WAIT = b"SELECT pg_advisory_xact_lock(%(lock)s)::text, pg_backend_pid()"


@pytest.fixture
async def single(module_dsn: str) -> AsyncGenerator[Database, None]:
    """A pool of one connection: each statement gets the connection as the previous statement left it."""
    opened = Database(SHARD, module_dsn, connections=1)
    await opened.open()
    yield opened
    await opened.close()


@pytest.fixture
async def watcher(module_dsn: str) -> AsyncGenerator[Watcher, None]:
    async with await psycopg.AsyncConnection.connect(module_dsn, autocommit=True) as connection:
        yield Watcher(connection)


class Watcher:
    """Watches the database's other connections over a connection of its own."""

    def __init__(self, connection: psycopg.AsyncConnection[tuple[Any, ...]]) -> None:
        self._connection = connection

    async def rows(self, query: str, parameters: Mapping[str, object] | None = None) -> list[tuple[Any, ...]]:
        return await (await self._connection.execute(query.encode(), parameters)).fetchall()

    async def states(self) -> dict[int, str]:
        return dict(
            await self.rows(
                "SELECT pid, coalesce(wait_event, '') || ' ' || state FROM pg_stat_activity "
                "WHERE application_name = 'windrow' AND datname = current_database()"
            )
        )

    async def until_waiting_for(self, event: str, count: int = 1) -> list[int]:
        """Waits until this many connections wait for the lock. Returns their pids."""
        async with asyncio.timeout(30):
            while True:
                found = [pid for pid, state in (await self.states()).items() if state == f"{event} active"]
                if len(found) == count:
                    return found

    async def until_idle(self) -> dict[int, str]:
        async with asyncio.timeout(30):
            while True:
                found = await self.states()
                if not any("active" in state for state in found.values()):
                    return found

    async def terminate(self, pid: int) -> None:
        await self.rows("SELECT pg_terminate_backend(%(pid)s, 30000)", {"pid": pid})

    @contextlib.asynccontextmanager
    async def holding(self, lock: int) -> AsyncGenerator[None]:
        await self.rows("SELECT pg_advisory_lock(%(lock)s)::text", {"lock": lock})
        try:
            yield
        finally:
            await self.rows("SELECT pg_advisory_unlock(%(lock)s)", {"lock": lock})


# ── Rows ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_many_calls_at_once_on_few_connections_all_get_their_own_rows(database: Database) -> None:
    async def call(number: int) -> list[Any]:
        return await database.run(
            b"SELECT %(n)s::bigint, repeat('x', %(n)s::int) FROM generate_series(1, 3)", {"n": number}
        )

    answers = await asyncio.gather(*map(call, range(300)))
    assert answers == [[(number, "x" * number)] * 3 for number in range(300)]


async def test_a_batch_of_16_mib_goes_there_and_back(single: Database) -> None:
    payloads = [bytes([at]) * MIB for at in range(16)]
    rows = await single.run(b"SELECT unnest(%(payloads)b::bytea[])", {"payloads": arrays.blobs(payloads)})
    assert [row[0] for row in rows] == payloads
    assert await single.run(b"SELECT cardinality(%(payloads)b::bytea[])", {"payloads": payloads}) == [(16,)]


async def test_values_are_those_of_psycopg_and_moments_are_microseconds(database: Database) -> None:
    statement = b"""
        SELECT
            %(int)s + 1, %(none)s::text IS NULL, %(text)s::text, %(bytes)s::bytea, NULL, 1.5::float8, '{a,b}'::text[],
            '00000000-0000-0000-0000-00000000000a'::uuid::text, timestamptz '1970-01-01 00:00:01.5+00',
            '5 %%' || %(text)s
        """
    parameters = {"int": 2**40, "none": None, "text": "naïve", "bytes": b"\0\xff", "unused": object()}
    assert await database.run(statement, parameters) == [
        (
            2**40 + 1,
            True,
            "naïve",
            b"\0\xff",
            None,
            1.5,
            ["a", "b"],
            "00000000-0000-0000-0000-00000000000a",
            1_500_000,
            "5 %naïve",
        )
    ]


@pytest.mark.parametrize("nothing", [b"", b"CREATE TEMPORARY TABLE IF NOT EXISTS nothing ()", b"SELECT WHERE false"])
async def test_a_statement_that_returns_nothing_has_no_rows(single: Database, nothing: bytes) -> None:
    assert await single.run(nothing, {}) == []


async def test_arrays_of_bytes_and_texts_are_read_by_postgres_as_they_were(database: Database) -> None:
    blobs = [b"", None, b"\0{},\"'\\", b"x" * 300]
    texts = ["", "NULL", 'a"b\\c,{d}', "żółw \U0001f422", " "]
    sparse = {1: "NULL", 3: "żółw"}
    rows = await database.run(
        b"SELECT %(blobs)b::bytea[], %(texts)s::text[], %(sparse)s::text[],"
        b" %(no_blobs)b::bytea[], %(no_texts)s::text[]",
        {
            "blobs": arrays.blobs(blobs),
            "texts": arrays.texts(texts),
            "sparse": arrays.sparse_texts(sparse, 5),
            "no_blobs": arrays.blobs([]),
            "no_texts": arrays.texts([]),
        },
    )
    assert rows == [(blobs, texts, [None, "NULL", None, "żółw", None], [], [])]


async def test_one_statement_takes_its_parameters_in_several_types(single: Database) -> None:
    for value, expected in [("7", "7"), (7, "7"), (None, None), ("8", "8"), (8, "8")]:
        assert await single.run(b"SELECT (%(value)s::bigint)::text", {"value": value}) == [(expected,)]


async def test_more_statements_than_are_prepared_can_be_run(single: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard.postgres.connection, "_PREPARED_MAX", 3)
    for number in [*range(6), *range(6)]:
        assert await single.run(b"SELECT %d + %%(n)s" % number, {"n": 1}) == [(number + 1,)]
    assert await single.run(b"SELECT count(*) FROM pg_prepared_statements", {}) == [(3,)]


# ── Errors ───────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_an_error_has_its_code_and_the_connection_is_fit_afterwards(single: Database) -> None:
    before = await single.run(PID, {})
    for _ in range(3):
        with pytest.raises(psycopg.errors.DivisionByZero) as error:
            await single.run(b"SELECT 1 / %(n)s", {"n": 0})
        assert error.value.sqlstate == "22012"
        assert error.value.diag.message_primary == "division by zero"
    with pytest.raises(psycopg.errors.SyntaxError):
        await single.run(b"SELEC", {})
    with pytest.raises(psycopg.errors.CharacterNotInRepertoire):
        await single.run(b"SELECT %(t)s::text[]", {"t": arrays.texts(["\0"])})
    assert await single.run(PID, {}) == before


async def test_an_error_while_committing_is_an_error_though_rows_came_before_it(single: Database) -> None:
    await single.run(b"CREATE TABLE twin (id integer UNIQUE DEFERRABLE INITIALLY DEFERRED)", {})
    assert await single.run(b"INSERT INTO twin VALUES (1) RETURNING id", {}) == [(1,)]
    with pytest.raises(psycopg.errors.UniqueViolation):
        await single.run(b"INSERT INTO twin VALUES (1) RETURNING id", {})
    assert await single.run(b"SELECT id FROM twin", {}) == [(1,)]


async def test_a_statement_whose_columns_have_changed_since_is_prepared_anew(single: Database) -> None:
    await single.run(b"CREATE TABLE growing AS SELECT 1 AS a", {})
    assert await single.run(b"SELECT * FROM growing", {}) == [(1,)]
    await single.run(b"ALTER TABLE growing ADD b text DEFAULT 'two'", {})
    assert await single.run(b"SELECT * FROM growing", {}) == [(1, "two")]
    await single.run(b"DEALLOCATE ALL", {})
    assert await single.run(b"SELECT * FROM growing", {}) == [(1, "two")]
    # The session no longer has the earlier prepared statements.
    assert await single.run(b"SELECT count(*) FROM pg_prepared_statements", {}) == [(2,)]


async def test_a_copy_is_refused_and_harms_nobody(single: Database) -> None:
    for copy in [b"COPY (SELECT 1) TO STDOUT", b"COPY windrow.tally FROM STDIN"]:
        with pytest.raises(psycopg.ProgrammingError, match="COPY"):
            await single.run(copy, {})
        assert await single.run(b"SELECT 1", {}) == [(1,)]


@pytest.mark.parametrize("statement", [b"SELECT 5 % 3", b"SELECT %s", b"SELECT %(a)t", b"SELECT 1 %"])
async def test_a_stray_percent_sign_is_refused(single: Database, statement: bytes) -> None:
    with pytest.raises(psycopg.ProgrammingError, match="percent sign"):
        await single.run(statement, {"a": 1})


# ── Connections that break ───────────────────────────────────────────────────────────────────────────────────────────


async def test_a_statement_whose_connection_is_cut_is_tried_again(single: Database, watcher: Watcher) -> None:
    async with watcher.holding(1):
        call = asyncio.create_task(single.run(WAIT, {"lock": 1}))
        (first,) = await watcher.until_waiting_for("advisory")
        await watcher.terminate(first)
        (second,) = await watcher.until_waiting_for("advisory")
    assert first != second
    assert await call == [("", second)]


def test_the_first_statement_of_a_connection_that_has_been_cut_is_tried_again_on_the_routers_event_loop(
    module_dsn: str,
) -> None:
    """In this case the event loop reports the reset only once, before the server's last message has been read."""

    async def run() -> None:
        async with await psycopg.AsyncConnection.connect(module_dsn, autocommit=True) as connection:
            watcher = Watcher(connection)
            database = Database(SHARD, module_dsn, connections=1)
            await database.open()
            try:
                async with asyncio.timeout(30):
                    # The connection is open and set up, but it has not run a statement yet.
                    await database._pool.connected()
                    (pid,) = await watcher.states()
                    await watcher.terminate(pid)
                    ((other,),) = await database.run(PID, {})
                assert other != pid
            finally:
                await database.close()

    uvloop.run(run())


def test_a_listener_notices_a_reset_that_comes_with_a_notification(module_dsn: str) -> None:
    """In this case the event loop reports the reset only once, before the data has been read."""
    with socket.create_server(("127.0.0.1", 0)) as relay:
        was_reset = threading.Event()
        relaying = threading.Thread(
            target=_relay_until_told, args=(relay, module_dsn, b"the last words", was_reset), daemon=True
        )
        relaying.start()

        async def run() -> None:
            host, port = relay.getsockname()
            dsn = make_conninfo(module_dsn, host=host, port=port, sslmode="disable", gssencmode="disable")
            heard: asyncio.Queue[str | None] = asyncio.Queue()
            connection = await Connection.connect(dsn, autocommit=True)
            try:
                listening = asyncio.create_task(connection.listen("news", heard.put_nowait))
                assert await asyncio.wait_for(heard.get(), PATIENCE_S) is None
                with psycopg.connect(module_dsn, autocommit=True) as other:
                    other.execute("NOTIFY news, 'the last words'")
                # The reset and the notification both arrive before the event loop runs again.
                assert was_reset.wait(PATIENCE_S)
                with pytest.raises(psycopg.OperationalError):
                    await asyncio.wait_for(listening, PATIENCE_S)
                assert heard.get_nowait() == "the last words"
            finally:
                await connection.close()

        uvloop.run(run())
        relaying.join()


def _relay_until_told(relay: socket.socket, dsn: str, last: bytes, was_reset: threading.Event) -> None:
    """Passes on what one client and its server send, until the server sends the bytes `last`. Then resets the
    connection. Runs in a thread, because the event loop must see these bytes and the reset at the same time
    (proof/proxy.py runs in the loop)."""
    client, _ = relay.accept()
    # Otherwise the last bytes might not be sent before the reset.
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    told = conninfo_to_dict(dsn)
    said = b""
    with client, socket.create_connection((str(told["host"]), int(str(told["port"])))) as server:
        while last not in said:
            for one in select.select([client, server], [], [])[0]:
                data = one.recv(65536)
                (server if one is client else client).sendall(data)
                said += data if one is server else b""
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    was_reset.set()


async def test_connections_cut_while_nobody_used_them_are_not_noticed(database: Database, watcher: Watcher) -> None:
    await asyncio.gather(*(database.run(b"SELECT pg_sleep(0.01)", {}) for _ in range(8)))
    for pid in await watcher.states():
        await watcher.terminate(pid)
    assert await asyncio.gather(*(database.run(b"SELECT 1", {}) for _ in range(8))) == [[(1,)]] * 8


async def test_statements_and_transactions_take_turns_on_one_connection(single: Database) -> None:
    for number in range(3):
        pid = await single.run(PID, {})
        async with single.transaction() as connection:
            cursor = await connection.execute("SELECT pg_backend_pid()")
            assert await cursor.fetchall() == pid
            await connection.execute("CREATE TEMPORARY TABLE scratch (a int); DROP TABLE scratch")
        with pytest.raises(psycopg.errors.UndefinedTable):
            async with single.transaction() as connection:
                await connection.execute("SELECT * FROM scratch")
        assert await single.run(b"SELECT %(n)s::bigint", {"n": number}) == [(number,)]


async def test_old_connections_are_replaced(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard.postgres.session_pool, "_AGE_S_MAX", 0.0)
    answers = await asyncio.gather(*(database.run(b"SELECT %(n)s", {"n": n}) for n in range(20)))
    assert answers == [[(n,)] for n in range(20)]
    await asyncio.wait_for(database._pool.connected(), 30)


# ── Another DSN ──────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_another_dsn_holds_for_the_next_statement_and_lets_the_running_ones_end(
    postgres: Server, fresh_dsn: str, module_dsn: str, watcher: Watcher
) -> None:
    where = b"SELECT current_database()::text"
    database = Database(SHARD, module_dsn, connections=2)
    await database.open()
    ((before,),) = await database.run(where, {})
    async with watcher.holding(4):
        running = asyncio.create_task(
            database.run(b"SELECT pg_advisory_xact_lock(4)::text, current_database()::text", {})
        )
        await watcher.until_waiting_for("advisory")
        await database.reconnect(fresh_dsn)
        ((after,),) = await database.run(where, {})
        assert after != before
    assert await running == [("", before)]
    # Now every connection leads to the new server.
    answers = await asyncio.gather(*(database.run(where, {}) for _ in range(8)))
    assert {row for rows in answers for (row,) in rows} == {after}
    await database.close()


async def test_another_dsn_is_used_even_if_a_connection_was_made_a_moment_ago(
    module_dsn: str, fresh_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = asyncio.Event()
    hand_out = shard.postgres.session_pool.SessionPool._hand_out

    def tell(pool: shard.postgres.session_pool.SessionPool, session: Session) -> None:
        hand_out(pool, session)
        made.set()

    monkeypatch.setattr(shard.postgres.session_pool.SessionPool, "_hand_out", tell)
    database = Database(SHARD, module_dsn, connections=1)
    await database.open()
    await made.wait()
    # The task that has made this connection has not ended yet.
    await database.reconnect(fresh_dsn)
    assert await database.run(b"SELECT current_database()::text", {}) == [(conninfo_to_dict(fresh_dsn)["dbname"],)]
    await database.close()


async def test_under_load_nothing_fails_and_nothing_stays_at_the_old_dsn(
    module_dsn: str, fresh_dsn: str, watcher: Watcher
) -> None:
    database = Database(SHARD, module_dsn, connections=4)
    await database.open()
    over = asyncio.Event()
    done = [0] * 16

    async def load(at: int) -> None:
        while not over.is_set():
            await database.run(b"SELECT pg_sleep(0.001)::text", {})
            done[at] += 1

    loads = [asyncio.create_task(load(at)) for at in range(len(done))]
    for dsn in [fresh_dsn, module_dsn] * 5 + [fresh_dsn]:
        await asyncio.sleep(0.03)
        await database.reconnect(dsn)
    async with asyncio.timeout(30):
        while await watcher.states() or min(done) < 2:
            pass
    over.set()
    await asyncio.gather(*loads)
    await database._pool.connected()
    assert len(database._pool._idle) == 4
    await database.close()


async def test_a_database_that_could_not_be_reached_goes_over_to_where_it_can(postgres: Server, fresh_dsn: str) -> None:
    database = Database(SHARD, postgres.dsn("nowhere"), connections=2)
    await database.open()
    with pytest.raises(ShardUnavailable, match="does not exist"):
        await database.run(b"SELECT 1", {})
    await database.reconnect(fresh_dsn)
    await asyncio.wait_for(database._breaker.until_closed(), 10)
    assert await database.run(b"SELECT 1", {}) == [(1,)]
    await database.close()


# ── Callers that are cancelled ───────────────────────────────────────────────────────────────────────────────────────


async def test_a_cancelled_statement_ends_on_the_server_and_leaves_the_pool_whole(
    database: Database, watcher: Watcher
) -> None:
    calls = [asyncio.create_task(database.run(SLEEP, {})) for _ in range(4)]
    before = await watcher.until_waiting_for("PgSleep", 4)
    for call in calls:
        call.cancel()
    assert all(isinstance(end, asyncio.CancelledError) for end in await asyncio.gather(*calls, return_exceptions=True))
    # These are the same connections as before, and none of them is busy.
    assert sorted(await watcher.until_idle()) == sorted(before)
    answers = await asyncio.gather(*(database.run(WAIT, {"lock": at}) for at in range(20)))
    assert {pid for ((_, pid),) in answers} <= set(before)


async def test_a_call_cancelled_at_any_moment_harms_no_other(database: Database) -> None:
    async def call(number: int) -> list[Any]:
        return await database.run(b"SELECT %(n)s, pg_sleep(0.001)::text", {"n": number})

    for turn in range(60):
        doomed = [asyncio.create_task(call(number)) for number in range(8)]
        safe = [asyncio.create_task(call(number)) for number in range(8)]
        for _ in range(turn):
            await asyncio.sleep(0)
        for task in doomed:
            task.cancel()
        assert await asyncio.gather(*safe) == [[(number, "")] for number in range(8)]
        await asyncio.gather(*doomed, return_exceptions=True)
    await database._pool.connected()
    assert len(database._pool._idle) == 4
    assert not database._pool._waiting


async def test_a_statement_that_will_not_end_loses_its_connection(
    single: Database, watcher: Watcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def unheard(*_: object, **__: object) -> None: ...

    monkeypatch.setattr(shard.postgres.connection, "_ABANDONED_S_MAX", 0.1)
    monkeypatch.setattr(shard.postgres.connection.Connection, "cancel_safe", unheard)
    call = asyncio.create_task(single.run(SLEEP, {}))
    (pid,) = await watcher.until_waiting_for("PgSleep")
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert await single.run(PID, {}) != [(pid,)]
    await watcher.terminate(pid)


async def test_a_caller_cancelled_twice_does_not_wait_for_the_server(
    single: Database, watcher: Watcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    cancelling = asyncio.Event()

    async def unheard(*_: object, **__: object) -> None:
        cancelling.set()

    monkeypatch.setattr(shard.postgres.connection.Connection, "cancel_safe", unheard)
    call = asyncio.create_task(single.run(SLEEP, {}))
    (pid,) = await watcher.until_waiting_for("PgSleep")
    call.cancel()
    await cancelling.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert await single.run(b"SELECT 1", {}) == [(1,)]
    await watcher.terminate(pid)


async def test_a_caller_cancelled_in_line_gives_its_turn_to_the_next(single: Database, watcher: Watcher) -> None:
    async with watcher.holding(2):
        first = asyncio.create_task(single.run(WAIT, {"lock": 2}))
        await watcher.until_waiting_for("advisory")
        second, third = (asyncio.create_task(single.run(b"SELECT 1", {})) for _ in range(2))
        await asyncio.sleep(0)
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
    assert await third == [(1,)]
    await first


async def test_after_closing_callers_are_told_so_and_no_connection_is_left(module_dsn: str, watcher: Watcher) -> None:
    closing = Database(SHARD, module_dsn, connections=2)
    await closing.open()
    pids = {row[0] for rows in await asyncio.gather(closing.run(PID, {}), closing.run(PID, {})) for row in rows}
    async with watcher.holding(3):
        running = asyncio.create_task(closing.run(WAIT, {"lock": 3}))
        pids.update(await watcher.until_waiting_for("advisory"))
        await closing.close()
        with pytest.raises(ShardUnavailable, match="has closed its connections"):
            await closing.run(b"SELECT 1", {})
    assert len(await running) == 1, "what runs may end"
    async with asyncio.timeout(30):
        while pids & set(await watcher.states()):
            pass


async def test_a_standby_that_is_written_to_is_named_with_what_finds_the_primary() -> None:
    with Cluster("left", ephemeral=True) as primary, Cluster("right", ephemeral=True, standby_of=primary) as standby:
        database = Database(SHARD, standby.dsn, connections=1)
        await database.open()
        try:
            told = "the server is a standby: .*; target_session_attrs=read-write in the DSN finds the primary"
            with pytest.raises(ShardUnavailable, match=told):
                await database.run(statements.WAIT_FOR_STANDBY, {})
            with pytest.raises(ShardUnavailable, match=told):
                await schema.migrate(database, cluster="main")
        finally:
            await database.close()
