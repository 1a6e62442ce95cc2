"""What a relay makes of outages on either side: it goes on, and no org waits for another one's."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import psycopg
import pytest
from grpc import StatusCode
from psycopg.conninfo import make_conninfo

from tests.unit.client_fake import WAIT_S, FakeRouter, fake_router, refuse
from windrow import Client, NewJob, outbox

Connection = psycopg.AsyncConnection[Any]


@pytest.fixture
async def router() -> AsyncIterator[FakeRouter]:
    async with fake_router() as running:
        yield running


@pytest.fixture
async def client(router: FakeRouter) -> AsyncIterator[Client]:
    """As patient as can be: whoever waits for all of its time fails."""
    async with Client(router.address, org="acme", timeout=600, try_timeout=600) as made:
        yield made


@pytest.fixture
async def app(empty_dsn: str) -> AsyncIterator[Connection]:
    async with await psycopg.AsyncConnection.connect(empty_dsn, autocommit=True) as connection:
        await connection.execute(outbox.SCHEMA)
        yield connection


@asynccontextmanager
async def running(relay: outbox.Relay) -> AsyncGenerator[None]:
    """Stops it at the end, and expects it to end well."""
    async with asyncio.timeout(3 * WAIT_S):
        task = asyncio.create_task(relay.run())
        try:
            yield
            relay.stop()
            await task
        finally:
            task.cancel()


async def until_left(app: Connection, ids: list[str]) -> None:
    """Until these are no longer in the outbox."""
    async with asyncio.timeout(WAIT_S):
        while (await app.execute("SELECT FROM windrow_outbox WHERE id::text = ANY (%s)", [ids])).rowcount:
            await asyncio.sleep(0.02)


def first_with(options: str, dsn: str) -> Callable[[], Awaitable[Connection]]:
    """Opens connections; the first one with these options of the server."""
    opened: list[Connection] = []

    async def connect() -> Connection:
        told = make_conninfo(dsn, options="" if opened else options, application_name="" if opened else "first")
        opened.append(await psycopg.AsyncConnection.connect(told))
        return opened[-1]

    return connect


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "windrow.outbox"]


async def test_a_relay_outlives_the_end_of_a_transaction_that_waited_for_the_router_too_long(
    router: FakeRouter, client: Client, app: Connection, empty_dsn: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "windrow.outbox")

    async def late(request: Any, context: Any) -> Any:
        async def ended() -> bool:
            cursor = await app.execute("SELECT FROM pg_stat_activity WHERE application_name = 'first'")
            return not cursor.rowcount

        while not await ended():
            await asyncio.sleep(0.02)
        return router.plain("Enqueue", request)

    router.scripts["Enqueue"] = late
    ids = await outbox.add(app, "acme", NewJob("q", "k"))
    connect = first_with("-c idle_in_transaction_session_timeout=100", empty_dsn)
    async with running(outbox.Relay(connect, client)):
        await until_left(app, ids)
    # The first answer was lost with the transaction: said again, it is the same job.
    assert {job.id for request in router.of("Enqueue") for job in request.jobs} == set(ids)
    first, last = said(caplog)
    assert "cannot be used; trying again: terminating connection due to idle-in-transaction timeout" in first
    assert "can be used again" in last


async def test_a_relay_outlives_the_demotion_of_its_server(
    client: Client, app: Connection, empty_dsn: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "windrow.outbox")
    ids = await outbox.add(app, "acme", NewJob("q", "k"))
    async with running(outbox.Relay(first_with("-c default_transaction_read_only=on", empty_dsn), client)):
        await until_left(app, ids)
    first, last = said(caplog)
    assert "read-only transaction" in first
    assert "can be used again" in last


async def test_a_relay_outlives_a_transaction_timeout(client: Client, app: Connection, empty_dsn: str) -> None:
    """Servers have that since PostgreSQL 17."""
    errors = [psycopg.errors.TransactionTimeout("terminating connection due to transaction timeout")]

    async def connect() -> Connection:
        if errors:
            raise errors.pop()
        return await psycopg.AsyncConnection.connect(empty_dsn)

    ids = await outbox.add(app, "acme", NewJob("q", "k"))
    async with running(outbox.Relay(connect, client)):
        await until_left(app, ids)


async def test_an_outage_is_told_once_though_a_standby_lets_connect(
    client: Client, app: Connection, empty_dsn: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "windrow.outbox")
    opened: list[int] = []

    async def connect() -> Connection:
        opened.append(len(opened))
        options = "-c default_transaction_read_only=on" if len(opened) < 3 else ""
        return await psycopg.AsyncConnection.connect(make_conninfo(empty_dsn, options=options))

    ids = await outbox.add(app, "acme", NewJob("q", "k"))
    async with running(outbox.Relay(connect, client)):
        await until_left(app, ids)
    assert len(opened) == 3
    assert len(said(caplog)) == 2


async def test_another_error_of_the_database_ends_a_relay(client: Client, empty_dsn: str) -> None:
    """There is no outbox here, and time does not bring one."""
    with pytest.raises(psycopg.errors.UndefinedTable):
        await outbox.Relay(empty_dsn, client).run()
