"""A relay continues after an outage of the router or of the outbox's database. No org waits because another org is
away."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, LiteralString

import psycopg
import pytest
from grpc import StatusCode
from psycopg.conninfo import make_conninfo

from tests.unit.client_fake import WAIT_S, FakeRouter, fake_router, refuse
from windrow import (
    Client,
    ClientClosed,
    DeadlineExceeded,
    Enqueued,
    NewJob,
    PermissionDenied,
    RouterTooOld,
    TlsFailed,
    Unauthenticated,
    Unavailable,
    WindrowError,
    outbox,
)
from windrow.errors import Span
from windrow.tokens import Token
from windrow.v1 import queue_pb2

Connection = psycopg.AsyncConnection[Any]


@pytest.fixture
async def router() -> AsyncIterator[FakeRouter]:
    async with fake_router() as running:
        yield running


@pytest.fixture
async def client(router: FakeRouter) -> AsyncIterator[Client]:
    """Yields a client with a timeout that is longer than any test may take."""
    async with Client(router.address, org="acme", timeout=600, try_timeout=600) as made:
        yield made


@pytest.fixture
async def app(empty_dsn: str) -> AsyncIterator[Connection]:
    async with await psycopg.AsyncConnection.connect(empty_dsn, autocommit=True) as connection:
        await connection.execute(outbox.SCHEMA)
        yield connection


@asynccontextmanager
async def running(relay: outbox.Relay) -> AsyncGenerator[None]:
    """Runs the relay during the `with` block. The relay must end without an error."""
    async with asyncio.timeout(5 * WAIT_S):
        task = asyncio.create_task(relay.run())
        try:
            yield
            relay.stop()
            await task
        finally:
            task.cancel()


async def until_none(app: Connection, query: LiteralString, *parameters: Any) -> None:
    """Waits until the query finds no row. Polls every 20 ms, because the relay sends no signal."""
    async with asyncio.timeout(2 * WAIT_S):
        while True:
            if not (await app.execute(query, parameters)).rowcount:
                return
            await asyncio.sleep(0.02)


async def until_left(app: Connection, ids: list[str]) -> None:
    """Waits until these jobs are no longer in the outbox."""
    await until_none(app, "SELECT FROM windrow_outbox WHERE id::text = ANY (%s)", ids)


def first_with(options: str, dsn: str) -> Callable[[], Awaitable[Connection]]:
    """Returns a function that opens connections. Only the first connection gets these server options."""
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
        await until_none(app, "SELECT FROM pg_stat_activity WHERE application_name = 'first'")
        return router.plain("Enqueue", request)

    router.scripts["Enqueue"] = late
    ids = await outbox.add(app, "acme", NewJob("q", "k"))
    connect = first_with("-c idle_in_transaction_session_timeout=100", empty_dsn)
    async with running(outbox.Relay(connect, client)):
        await until_left(app, ids)
    # The first answer was lost with the transaction. The repeated enqueue sends the same ids.
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
    """PostgreSQL has this timeout since version 17."""
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
    """This database has no outbox table, and a retry would not help."""
    with pytest.raises(psycopg.errors.UndefinedTable):
        await outbox.Relay(empty_dsn, client).run()


@pytest.mark.parametrize("hangs", [False, True], ids=["refuses", "hangs"])
async def test_jobs_of_other_orgs_do_not_wait_for_one_that_cannot_be_reached(
    router: FakeRouter, client: Client, app: Connection, empty_dsn: str, hangs: bool
) -> None:
    asked, back = asyncio.Event(), asyncio.Event()

    async def enqueue(request: Any, context: Any) -> Any:
        if request.org == "away" and not back.is_set():
            asked.set()
            if hangs:
                await asyncio.Event().wait()
            await refuse(context, StatusCode.UNAVAILABLE)
        return router.plain("Enqueue", request)

    router.scripts["Enqueue"] = enqueue
    away = await outbox.add(app, "away", NewJob("q", "k"), NewJob("q", "k"))
    before = await outbox.add(app, "acme", NewJob("q", "k"))
    async with running(outbox.Relay(empty_dsn, client)):
        await until_left(app, before)
        await asked.wait()
        for org in ("acme", "other"):
            await until_left(app, await outbox.add(app, org, NewJob("q", "k")))
        back.set()
        await until_left(app, away)
    # The jobs of the org that was away were sent several times, with the same ids.
    tries = [[job.id for job in request.jobs] for request in router.of("Enqueue") if request.org == "away"]
    assert len(tries) > 1
    assert tries == [away] * len(tries)


class Sending(Client):
    """A client that returns the answers which the test has prepared, without a router."""

    def __init__(self, *, token: Token | None = None) -> None:
        super().__init__("127.0.0.1:9", org="acme", token=token)
        self.errors: dict[str, WindrowError] = {}
        self.sent: list[tuple[str, Span | None]] = []
        self.before: Callable[[], Awaitable[object]] | None = None

    async def send(self, request: queue_pb2.EnqueueRequest, *, timeout: Span | None = None) -> list[Enqueued]:
        self.sent.append((request.org, timeout))
        if self.before is not None:
            await self.before()
        if error := self.errors.get(request.org):
            raise error
        return [Enqueued(id=job.id) for job in request.jobs]


async def once_rested(relay: outbox.Relay) -> outbox.Relayed:
    for rest in relay._resting.values():
        rest.until = 0.0
    return await relay.run_once()


@pytest.mark.parametrize(
    ("error", "patience"),
    [(Unavailable("no"), [1.0] * 6), (DeadlineExceeded("no"), [1.0, 2.0, 4.0, 8.0, 10.0, 10.0])],
    ids=["away", "slow"],
)
async def test_only_an_org_that_is_slow_gets_longer(
    app: Connection, empty_dsn: str, error: WindrowError, patience: list[float]
) -> None:
    client = Sending()
    client.errors["slow"] = error
    relay = outbox.Relay(empty_dsn, client)
    await outbox.add(app, "slow", NewJob("q", "k"))
    for _ in patience:
        assert await once_rested(relay) == outbox.Relayed(left=1)
    assert client.sent == [("slow", patience_s) for patience_s in patience]
    client.errors.clear()
    assert await once_rested(relay) == outbox.Relayed(sent=1)
    await outbox.add(app, "slow", NewJob("q", "k"))
    await relay.run_once()
    assert client.sent[-1] == ("slow", 1.0)


async def test_no_org_waits_for_one_whose_call_hangs_for_longer_than_the_first_patience(
    app: Connection, empty_dsn: str
) -> None:
    hangs, back = asyncio.Event(), asyncio.Event()

    class Hanging(Sending):
        async def send(self, request: queue_pb2.EnqueueRequest, *, timeout: Span | None = None) -> list[Enqueued]:
            if request.org == "slow" and not back.is_set():
                if timeout == 1.0:
                    raise DeadlineExceeded("no")
                hangs.set()
                await back.wait()
            return await super().send(request, timeout=timeout)

    client = Hanging()
    slow = await outbox.add(app, "slow", NewJob("q", "k"))
    async with running(outbox.Relay(empty_dsn, client)):
        await hangs.wait()
        for org in ("acme", "other", "acme"):
            await until_left(app, await outbox.add(app, org, NewJob("q", "k")))
        assert "slow" not in [org for org, _ in client.sent]
        back.set()
        await until_left(app, slow)
        # The org is no longer slow, so its next call has the initial timeout again.
        await until_left(app, await outbox.add(app, "slow", NewJob("q", "k")))
    assert [timeout for org, timeout in client.sent if org == "slow"] == [2.0, 1.0]


async def test_a_slow_org_that_has_no_more_jobs_is_forgotten(app: Connection, empty_dsn: str) -> None:
    relay = outbox.Relay(empty_dsn, Sending())
    relay._resting["slow"] = outbox._Rest(until=0.0, next_s=0.5, timeout_s=2.0)
    async with asyncio.timeout(WAIT_S):
        await relay._run_slow()
    assert relay._resting == {}


async def test_an_org_that_could_not_be_reached_comes_last_the_next_time(app: Connection, empty_dsn: str) -> None:
    client = Sending()
    client.errors["away"] = Unavailable("no")
    relay = outbox.Relay(empty_dsn, client)
    await outbox.add(app, "away", NewJob("q", "k"))
    await relay.run_once()
    await outbox.add(app, "acme", NewJob("q", "k"))
    assert await once_rested(relay) == outbox.Relayed(sent=1, left=1)
    assert [org for org, _ in client.sent] == ["away", "acme", "away"]


async def test_orgs_that_had_to_wait_for_a_turn_go_with_the_next_batch(
    app: Connection, empty_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(outbox, "time", SimpleNamespace(monotonic=lambda: now, time=time.time))
    eight = asyncio.Barrier(8)

    async def take_all_the_time() -> None:
        nonlocal now
        await eight.wait()
        now += 1.0

    client = Sending()
    client.before = take_all_the_time
    relay = outbox.Relay(empty_dsn, client)
    for at in range(9):
        await outbox.add(app, f"org-{at}", NewJob("q", "k"))
    assert await relay.run_once() == outbox.Relayed(sent=8, left=1)
    client.before = None
    assert await relay.run_once() == outbox.Relayed(sent=1)
    assert [org for org, _ in client.sent] == [f"org-{at}" for at in range(9)]


def refused(reason: str) -> WindrowError:
    error = PermissionDenied("no")
    error.reason = reason
    return error


@pytest.mark.parametrize(
    "error",
    [Unauthenticated("no"), refused("SCOPE_MISSING"), TlsFailed("no"), RouterTooOld("no"), ClientClosed("no")],
    ids=["key", "scope", "TLS", "too old", "closed"],
)
async def test_an_error_that_concerns_every_org_ends_a_relay_when_what_is_stored_has_left_the_outbox(
    app: Connection, empty_dsn: str, error: WindrowError
) -> None:
    client = Sending()
    client.errors["bad"] = error
    (left,) = await outbox.add(app, "bad", NewJob("q", "k"))
    await outbox.add(app, "acme", NewJob("q", "k"))
    async with asyncio.timeout(WAIT_S):
        with pytest.raises(type(error)):
            await outbox.Relay(empty_dsn, client).run()
    assert await (await app.execute("SELECT id::text FROM windrow_outbox")).fetchall() == [(left,)]


async def test_an_org_that_is_refused_does_not_end_a_relay_and_is_told_again_after_a_minute(
    app: Connection, empty_dsn: str, caplog: pytest.LogCaptureFixture
) -> None:
    client = Sending()
    client.errors["strange"] = refused("ORG_FORBIDDEN")
    relay = outbox.Relay(empty_dsn, client)
    await outbox.add(app, "strange", NewJob("q", "k"))
    await outbox.add(app, "acme", NewJob("q", "k"))
    assert await relay.run_once() == outbox.Relayed(sent=1, left=1)
    for _ in range(3):
        assert await once_rested(relay) == outbox.Relayed(left=1)
    told = ["outbox: the jobs of org strange wait and will be retried: no"]
    assert said(caplog) == told
    relay._resting["strange"].tell_at -= 60.0
    await once_rested(relay)
    assert said(caplog) == told * 2


async def test_a_relay_waits_for_a_token_that_comes_late_but_not_for_ever(
    app: Connection, empty_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = Sending(token=lambda: "token")
    relay = outbox.Relay(empty_dsn, client)
    await outbox.add(app, "acme", NewJob("q", "k"))
    assert await relay.run_once() == outbox.Relayed(sent=1)
    client.errors["acme"] = Unauthenticated("no")
    await outbox.add(app, "acme", NewJob("q", "k"))
    for _ in range(3):
        assert await once_rested(relay) == outbox.Relayed(left=1)
    monkeypatch.setattr("windrow.tokens.RENEWAL_S_MAX", 0.0)
    with pytest.raises(Unauthenticated):
        await once_rested(relay)


def test_a_relay_that_has_ended_may_be_stopped_again() -> None:
    relay = outbox.Relay("", Sending())
    relay.stop()
    asyncio.run(relay.run())
    relay.stop()
