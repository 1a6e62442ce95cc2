"""A database server stops answering. No call hangs, nothing is lost, and calls do not have to wait once the server is
back."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Iterator
from typing import cast

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from embedded import Cluster
from proof.proxy import open_proxy_before, through
from shard.admin.queue_admin import QueueAdmin
from shard.errors import ShardUnavailable
from shard.placement import catalog
from shard.postgres import schema
from shard.postgres.pool import Database
from shard.queue.settle import Settlement
from shard.queue.store import Store
from shard.vocabulary import Answer, OrgId
from tests.conftest import CLUSTER, SHARD
from tests.jobs import HOUR_US, QUEUE, lease_jobs, some_jobs
from tests.postgres import frozen, kill
from tests.streams import until

# How long a call waits for a connection if nothing detects that the server is away. This is longer than a test waits.
WAIT_S = 3600.0
PATIENCE_S = 30.0


@pytest.fixture(scope="module")
def server() -> Iterator[Cluster]:
    with Cluster("outage", ephemeral=True) as started:
        yield started


@pytest.fixture
def cluster(server: Cluster) -> Cluster:
    """Returns the server, and starts it again if the previous test has stopped it."""
    server.start()
    return server


@pytest.fixture
async def database(cluster: Cluster) -> AsyncGenerator[Database, None]:
    opened = Database(SHARD, cluster.dsn, wait_s=WAIT_S)
    await opened.open()
    await asyncio.wait_for(opened._pool.connected(), 30)
    await schema.migrate(opened, cluster=CLUSTER)
    await catalog.grant_slots(opened, await catalog.found(opened, cluster=CLUSTER, weights={SHARD: 1}))
    yield opened
    await opened.close()


async def test_a_server_that_was_killed_and_is_back_is_not_noticed(
    cluster: Cluster, database: Database, org: OrgId
) -> None:
    store = Store(database)
    jobs = some_jobs(org, 10)
    await store.enqueue(jobs)
    held = [lease for _, lease in await lease_jobs(store, org, window_us=HOUR_US, max_jobs=5)]
    cluster.kill()
    cluster.start()
    # All connections in the pool are broken, and these calls need all of them at the same time.
    answers, known, claimed, again = await asyncio.gather(
        store.settle(Settlement.ack(org, held, [None] * 5)),
        store.enqueue(some_jobs(org, 1, queue="another")),
        lease_jobs(store, org),
        store.enqueue(jobs),
    )
    assert answers == [Answer.OK] * 5
    assert known == {}
    assert again == dict(enumerate(jobs.ids)), "what was acknowledged before the crash was kept (I1)"
    assert len(claimed) == 5
    (found,) = [entry for entry in await QueueAdmin(database).check() if entry.org == org]
    assert (found.accepted, found.succeeded, found.balanced) == (11, 5, True)


async def test_while_the_server_is_away_every_call_is_told_so_in_time(
    cluster: Cluster, database: Database, org: OrgId
) -> None:
    store = Store(database)
    await store.enqueue(some_jobs(org, 1))
    awaited = await store.names.find([(org, QUEUE)])
    kill(cluster)
    async with asyncio.timeout(PATIENCE_S):
        answers = await asyncio.gather(
            *(store.enqueue(some_jobs(org, 1)) for _ in range(10)),
            *(lease_jobs(store, org) for _ in range(10)),
            store.sweep(awaited.values()),
            store.sweeper.probe(awaited.values()),
            return_exceptions=True,
        )
    for answer in answers:
        assert isinstance(answer, ShardUnavailable)
        assert str(answer).startswith("shard 's1' is unavailable: ")
    # The store connects soon after the server is back.
    cluster.start()
    await asyncio.wait_for(database._pool.connected(), PATIENCE_S)
    assert await store.enqueue(some_jobs(org, 1)) == {}


async def test_a_server_that_is_not_there_yet_keeps_nobody_waiting(cluster: Cluster, database: Database) -> None:
    kill(cluster)
    early = Database(SHARD, cluster.dsn, wait_s=WAIT_S)
    async with asyncio.timeout(PATIENCE_S):
        await early.open()
        with pytest.raises(ShardUnavailable):
            await early.run(b"SELECT 1", {})
    await early.close()


# ── A server that says nothing ───────────────────────────────────────────────────────────────────────────────────────


def pid_of(cluster: Cluster) -> int:
    pid = cluster.pid
    assert pid is not None
    return pid


async def test_silence_is_noticed_and_so_is_its_end(cluster: Cluster, database: Database, org: OrgId) -> None:
    store = Store(database)
    await store.enqueue(some_jobs(org, 1))
    with frozen(pid_of(cluster)):
        for _ in range(3):
            calls = [store.enqueue(some_jobs(org, 1)) for _ in range(50)]
            async with asyncio.timeout(PATIENCE_S):
                answers = await asyncio.gather(*calls, lease_jobs(store, org), return_exceptions=True)
            for answer in answers:
                assert isinstance(answer, ShardUnavailable)
                assert str(answer) == "shard 's1' is unavailable: it does not answer"
            # Now the store knows that the server is silent, so it refuses a new call at once.
            late = asyncio.create_task(database.run(b"SELECT 1", {}))
            for _ in range(5):
                await asyncio.sleep(0)
            assert isinstance(late.exception(), ShardUnavailable)
    async with asyncio.timeout(PATIENCE_S):
        await database._breaker.until_closed()
        assert await store.enqueue(some_jobs(org, 1, queue="after")) == {}


async def test_a_silence_in_the_midst_of_a_transaction_ends_it(cluster: Cluster, database: Database) -> None:
    async def act() -> None:
        async with database.transaction() as connection:
            with frozen(pid_of(cluster)):
                await connection.execute("SELECT 1")

    with pytest.raises(ShardUnavailable, match="it does not answer"):
        await act()


async def test_a_transaction_that_is_cancelled_in_a_silence_stays_cancelled(
    cluster: Cluster, database: Database
) -> None:
    async def act() -> None:
        async with database.transaction() as connection:
            await connection.execute("SELECT 1")

    with frozen(pid_of(cluster)):
        acting = [asyncio.create_task(act()) for _ in range(4)]
        # The calls have begun, and none has noticed the silence.
        await asyncio.sleep(0.1)
        for task in acting:
            task.cancel()
        await asyncio.wait(acting, timeout=30)
        assert all(task.cancelled() for task in acting), "whoever ends a loop by it has ended it"


@contextlib.asynccontextmanager
async def silent_servers(count: int) -> AsyncGenerator[tuple[list[int], list[float]], None]:
    """Yields the ports of servers that accept connections and never answer, and a list of the times at which the
    servers have accepted connections."""
    taken: list[float] = []

    class Silent(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            taken.append(time.monotonic())
            stack.callback(cast("asyncio.Transport", transport).abort)

    loop = asyncio.get_running_loop()
    async with contextlib.AsyncExitStack() as stack:
        servers = [await loop.create_server(Silent, "127.0.0.1", 0) for _ in range(count)]
        for server in servers:
            stack.callback(server.close)
        yield [server.sockets[0].getsockname()[1] for server in servers], taken


async def test_the_last_of_four_silent_servers_is_found_soon_after_it_speaks_again(cluster: Cluster) -> None:
    async with silent_servers(3) as (ports, taken), open_proxy_before(cluster.dsn) as proxy:
        hosts = ",".join(["127.0.0.1"] * 4)
        dsn = make_conninfo(through(cluster.dsn, proxy), host=hosts, port=",".join(map(str, [*ports, proxy.port])))
        database = Database(SHARD, dsn, connections=2, wait_s=WAIT_S)
        await database.open()
        try:
            assert await database.run(b"SELECT 1", {}) == [(1,)]
            proxy.hold()
            proxy.cut_all()
            with pytest.raises(ShardUnavailable):
                await database.run(b"SELECT 1", {})
            assert database._breaker.trouble is not None
            # Wait until the servers have accepted many connections. By then, the database has given up the first
            # probes.
            began, before = time.monotonic(), len(taken)
            await until(lambda: len(taken) >= before + 3 * 6, "it is asked again and again")
            assert time.monotonic() - began > 2, "and not all the time"

            proxy.let_go()
            async with asyncio.timeout(PATIENCE_S):
                await database._breaker.until_closed()
                assert await database.run(b"SELECT 1", {}) == [(1,)]
        finally:
            await database.close()


async def test_a_statement_that_takes_long_is_let_be_and_so_are_the_others(
    database: Database, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A busy machine may answer late. The store must not treat this as silence.
    monkeypatch.setattr("shard.postgres.breaker._SILENCE_S", 20.0)
    # All connections are busy for so long that the store probes the server on another connection.
    assert await asyncio.gather(*(database.run(b"SELECT pg_sleep(3)::text", {}) for _ in range(4))) == [[("",)]] * 4
    assert "is unavailable" not in caplog.text
    assert database._breaker._asked_s > 0, "the server was asked"


async def test_callers_that_gave_up_on_a_silent_server_delay_no_later_caller(
    cluster: Cluster, database: Database
) -> None:
    with frozen(pid_of(cluster)):
        calls = [asyncio.create_task(database.run(b"SELECT 1", {})) for _ in range(4)]
        await asyncio.sleep(0.1)
        for call in calls:
            call.cancel()
        with pytest.raises(ShardUnavailable):
            await database.run(b"SELECT 1", {})
    await database._breaker.until_closed()
    assert await asyncio.gather(*(database.run(b"SELECT 1", {}) for _ in range(8))) == [[(1,)]] * 8
    await asyncio.gather(*calls, return_exceptions=True)


async def test_more_callers_than_connections_wait_their_turn(database: Database) -> None:
    answers = await asyncio.gather(*(database.run(b"SELECT pg_sleep(0.01)", {}) for _ in range(40)))
    assert len(answers) == 40


async def test_a_caller_that_waits_too_long_for_a_connection_gets_an_error(cluster: Cluster) -> None:
    database = Database(SHARD, cluster.dsn, wait_s=0.5)
    await database.open()
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(database.close)
        async with contextlib.AsyncExitStack() as held:
            for _ in range(4):
                await held.enter_async_context(database.transaction())
            with pytest.raises(ShardUnavailable, match=r"no connection within 0\.5 s"):
                await database.run(b"SELECT 1", {})
        assert await database.run(b"SELECT 1", {}) == [(1,)]


async def test_the_connection_of_a_cancelled_caller_is_of_use_to_others(cluster: Cluster, database: Database) -> None:
    calls = [asyncio.create_task(database.run(b"SELECT pg_sleep(60)", {})) for _ in range(4)]
    async with await psycopg.AsyncConnection.connect(cluster.superuser_dsn, autocommit=True) as watcher:
        async with asyncio.timeout(30):
            while True:
                cursor = await watcher.execute(
                    "SELECT count(*) FROM pg_stat_activity "
                    "WHERE wait_event = 'PgSleep' AND application_name = 'windrow'"
                )
                if await cursor.fetchone() == (4,):
                    break
    for call in calls:
        call.cancel()
    assert all(isinstance(end, asyncio.CancelledError) for end in await asyncio.gather(*calls, return_exceptions=True))
    assert await asyncio.gather(*(database.run(b"SELECT 1", {}) for _ in range(8))) == [[(1,)]] * 8
