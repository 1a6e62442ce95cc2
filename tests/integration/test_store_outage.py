"""A server that goes away: nothing hangs, nothing is lost, and nobody waits once it is back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator

import pytest

from embedded import Cluster
from shard import catalog, schema
from shard.books import Books
from shard.database import Database
from shard.errors import ShardUnavailable
from shard.store import Store
from shard.vocabulary import Answer, OrgId
from tests.conftest import CLUSTER, SHARD
from tests.jobs import HOUR_US, lease_jobs, some_jobs

WAIT_S = 3.0
# What a machine under load may add to a wait.
SLACK_S = 3.0


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster("outage", ephemeral=True) as started:
        yield started


@pytest.fixture
async def database(cluster: Cluster) -> AsyncGenerator[Database, None]:
    opened = Database(SHARD, cluster.dsn, wait_s=WAIT_S)
    await opened.open()
    await schema.migrate(opened, cluster=CLUSTER)
    await catalog.grant(opened, await catalog.found(opened, cluster=CLUSTER, weights={SHARD: 1}))
    # Every connection of the pool has been used.
    await asyncio.gather(*(opened.run(b"SELECT pg_sleep(0.05)", {}) for _ in range(4)))
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
    # Every pooled connection is broken, and all are asked for at once.
    more = some_jobs(org, 1)
    answers, known, claimed, again = await asyncio.gather(
        store.ack(org, held, [None] * 5),
        store.enqueue(more),
        lease_jobs(store, org, max_jobs=5),
        store.enqueue(jobs),
    )
    assert answers == [Answer.OK] * 5
    assert known == {}
    assert again == dict(enumerate(jobs.ids)), "what was acknowledged before the crash was kept (I1)"
    assert len(claimed) == 5
    books = Books(database)
    assert [(b.accepted, b.succeeded, b.balanced) for b in await books.check()] == [(11, 5, True)]


async def test_while_the_server_is_away_every_call_is_told_so_in_time(
    cluster: Cluster, database: Database, org: OrgId
) -> None:
    store = Store(database)
    await store.enqueue(some_jobs(org, 1))
    cluster.kill()
    began = time.monotonic()
    answers = await asyncio.gather(
        *(store.enqueue(some_jobs(org, 1)) for _ in range(10)),
        *(lease_jobs(store, org) for _ in range(10)),
        store.sweep(),
        return_exceptions=True,
    )
    assert {type(answer) for answer in answers} == {ShardUnavailable}
    assert time.monotonic() - began < WAIT_S + SLACK_S
    for answer in answers:
        assert str(answer).startswith("shard 's1' is unavailable: ")
    cluster.start()
    # It is found again by trying, without anybody's help.
    async with asyncio.timeout(WAIT_S + SLACK_S):
        while True:
            try:
                await store.enqueue(some_jobs(org, 1))
            except ShardUnavailable:
                await asyncio.wait_for(reachable(database), WAIT_S + SLACK_S)
            else:
                break


async def reachable(database: Database) -> None:
    """Returns when the server answers on a pooled connection."""
    while database._away is not None:
        with pytest.MonkeyPatch.context():
            await asyncio.get_running_loop().run_in_executor(None, time.sleep, 0.02)


async def test_a_server_that_is_not_there_yet_is_awaited_by_the_pool_and_not_by_the_callers(
    cluster: Cluster, org: OrgId
) -> None:
    cluster.kill()
    database = Database(SHARD, cluster.dsn, wait_s=WAIT_S)
    began = time.monotonic()
    await database.open()
    assert time.monotonic() - began < SLACK_S
    with pytest.raises(ShardUnavailable):
        await database.run(b"SELECT 1", {})
    assert time.monotonic() - began < WAIT_S + SLACK_S
    await database.close()


async def test_more_callers_than_connections_wait_their_turn(database: Database) -> None:
    answers = await asyncio.gather(*(database.run(b"SELECT pg_sleep(0.01)", {}) for _ in range(40)))
    assert len(answers) == 40


async def test_a_caller_who_waits_too_long_for_a_connection_is_told_so(database: Database) -> None:
    database_full = [asyncio.create_task(database.run(b"SELECT pg_sleep(5)", {})) for _ in range(4)]
    await asyncio.gather(*(asyncio.sleep(0) for _ in range(10)))
    with pytest.raises(ShardUnavailable, match="no connection within 3 s"):
        await database.run(b"SELECT 1", {})
    for task in database_full:
        task.cancel()
    await asyncio.gather(*database_full, return_exceptions=True)
    # A cancelled caller's connection is of use to others.
    assert await database.run(b"SELECT 1", {}) == [(1,)]


async def test_a_call_that_waits_for_a_lock_ends_with_an_error_that_says_so(database: Database, org: OrgId) -> None:
    store = Store(database)
    jobs = some_jobs(org, 1)
    await store.enqueue(jobs)
    await database.run(b"ALTER DATABASE windrow SET lock_timeout = '100ms'", {})
    async with database.transaction() as connection:
        await connection.execute("SELECT FROM windrow.job FOR UPDATE")
        async with database.transaction() as other:
            await other.execute("SET LOCAL lock_timeout = '100ms'")
            with pytest.raises(Exception, match="lock timeout"):
                await other.execute("SELECT FROM windrow.job FOR UPDATE")
