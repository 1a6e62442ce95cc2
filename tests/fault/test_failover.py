"""A standby that takes over has everything that was acknowledged. This holds even if a commit was interrupted while it
waited for the standby.

On the primary, other sessions see an interrupted commit, although the standby may lack it. A caller that repeats the
call must not get OK before the standby has the commit (I1, I3).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable
from typing import TypeVar

import pytest

from embedded import BinariesNotFound
from proof.postgres import Node, Shard, ask
from shard.errors import LostHistory, ShardUnavailable
from shard.placement import catalog, marks, pins
from shard.placement.pins import OnShard
from shard.postgres import schema
from shard.postgres.pool import Database
from shard.queue.settle import Settlement
from shard.queue.store import Store
from shard.vocabulary import Answer, OrgId
from tests.conftest import CLUSTER, SHARD
from tests.jobs import ids_of, lease_jobs, some_jobs
from tests.streams import until

ORG = OrgId("failover")
WAITING = "FROM pg_stat_activity WHERE wait_event = 'SyncRep' AND application_name = 'windrow'"
_T = TypeVar("_T")


@pytest.fixture
async def pair() -> AsyncGenerator[Shard, None]:
    shard = Shard(SHARD, [Node("left"), Node("right")])
    try:
        await shard.start()
        yield shard
    except BinariesNotFound as error:
        pytest.skip(str(error))
    finally:
        for node in shard.nodes:
            await node.close()


@pytest.fixture
async def database(pair: Shard) -> AsyncGenerator[Database, None]:
    database = Database(SHARD, pair.direct_dsn, connections=2)
    await database.open()
    await schema.migrate(database, cluster=CLUSTER)
    await catalog.grant_slots(database, await catalog.found(database, cluster=CLUSTER, weights={SHARD: 1}))
    yield database
    await database.close()


@pytest.fixture
def store(database: Database) -> Store:
    return Store(database)


def waiting_commits(pair: Shard) -> int:
    return int(pair.primary.ask(f"SELECT count(*) {WAITING}")[0][0])


async def until_it_waits_for_the_standby(pair: Shard, call: asyncio.Future[_T]) -> None:
    await until(lambda: call.done() or waiting_commits(pair) == 1, "a commit waits for the standby")
    assert not call.done(), "it was answered before the standby had it"


async def interrupted(pair: Shard, call: Awaitable[object]) -> None:
    """Makes the call, and cancels it while its commit waits for the standby."""
    task = asyncio.ensure_future(call)
    await until_it_waits_for_the_standby(pair, task)
    task.cancel()
    await until(lambda: waiting_commits(pair) == 0, "the server has heard of it")


async def test_a_commit_that_somebody_else_interrupts_is_not_acknowledged_before_the_standby_has_it(
    pair: Shard, store: Store
) -> None:
    await store.enqueue(some_jobs(ORG))
    standby = pair.standby
    assert standby is not None
    standby.kill()

    jobs = some_jobs(ORG)
    enqueued = asyncio.create_task(store.enqueue(jobs))
    await until_it_waits_for_the_standby(pair, enqueued)
    ((pid, since),) = pair.primary.ask(f"SELECT pid, query_start::text {WAITING}")
    pair.primary.ask(f"SELECT pg_cancel_backend({pid})")
    await until(
        lambda: enqueued.done() or pair.primary.ask(f"SELECT count(*) {WAITING} AND query_start > '{since}'") == [(1,)],
        "it waits again",
    )
    assert not enqueued.done(), "it was answered before the standby had it"
    await standby.start()
    assert await enqueued == {}


async def test_what_an_interrupted_commit_did_is_acknowledged_once_the_standby_has_it(
    pair: Shard, database: Database, store: Store
) -> None:
    leased = some_jobs(ORG)
    await store.enqueue(leased)
    ((_, lease),) = await lease_jobs(store, ORG)
    standby = pair.standby
    assert standby is not None
    standby.kill()

    jobs = some_jobs(ORG)
    await interrupted(pair, store.enqueue(jobs))
    enqueued = asyncio.create_task(store.enqueue(jobs))
    await until_it_waits_for_the_standby(pair, enqueued)
    await standby.start()
    assert await enqueued == {0: jobs.ids[0]}

    cancelled = some_jobs(ORG)
    await store.enqueue(cancelled)
    standby.kill()
    await interrupted(pair, store.cancel(ORG, ids_of(cancelled), reason="why"))
    again = asyncio.create_task(store.cancel(ORG, ids_of(cancelled), reason="why"))
    await until_it_waits_for_the_standby(pair, again)
    await standby.start()
    assert await again == [Answer.OK]

    # The pin must be on the standby before the shards learn of the pin. Otherwise, after a failover, the slot number of
    # the pin could be given to another org.
    standby.kill()
    await interrupted(pair, pins.pin(database, ORG, OnShard(SHARD)))
    read = asyncio.create_task(pins.read_on(database, SHARD))
    await until_it_waits_for_the_standby(pair, read)
    await standby.start()
    assert [pin.org for pin in await read] == [ORG]

    standby.kill()
    await interrupted(pair, store.settle(Settlement.ack(ORG, [lease])))
    acked = asyncio.create_task(store.settle(Settlement.ack(ORG, [lease])))
    await until_it_waits_for_the_standby(pair, acked)
    await standby.start()
    assert await acked == [Answer.OK]

    pair.primary.kill()
    await pair.promote()
    found = "SELECT id::text FROM windrow.job UNION ALL SELECT id::text FROM windrow.finished WHERE state = 'succeeded'"
    assert {row[0] for row in ask(pair.direct_dsn, found)} == {*jobs.ids, *leased.ids}


async def test_a_primary_that_still_runs_is_left_when_another_server_has_replaced_it(
    pair: Shard, database: Database
) -> None:
    """The old primary accepts writes, but acknowledges none of them. It is the first host in the DSN."""
    through_both = Database(SHARD, pair.nodes_dsn, connections=2)
    await through_both.open()
    store, standby, jobs = Store(through_both), pair.standby, some_jobs(ORG)
    assert standby is not None
    await store.enqueue(some_jobs(ORG))
    await asyncio.to_thread(standby.cluster.promote)

    async def enqueued() -> bool:
        with contextlib.suppress(ShardUnavailable):
            await store.enqueue(jobs)
            return True
        return False

    await until(enqueued, "the new primary has the job")
    assert pair.primary.ask("SELECT pg_is_in_recovery()") == [(False,)]
    found = ask(standby.cluster.dsn, f"SELECT 1 FROM windrow.job WHERE id = '{jobs.ids[0]}'")
    assert found == [(1,)]
    await through_both.close()


@pytest.fixture
async def catalog_elsewhere(fresh_dsn: str) -> AsyncGenerator[Database, None]:
    """A catalog in another database, which knows a shard with the pair's name."""
    database = Database(SHARD, fresh_dsn, connections=1)
    await database.open()
    yield database
    await database.close()


async def test_a_failover_to_a_synchronous_standby_loses_no_history(
    pair: Shard, database: Database, store: Store, catalog_elsewhere: Database
) -> None:
    await marks.mark(database, catalog_elsewhere)
    await store.enqueue(some_jobs(ORG))
    await marks.mark(database, catalog_elsewhere)
    confirmed = await marks.confirmed(catalog_elsewhere, SHARD)
    assert confirmed is not None
    # A mark that was written but not confirmed does no harm on either server.
    standby = pair.standby
    assert standby is not None
    standby.kill()
    await interrupted(pair, marks.make(database))
    await standby.start()
    pair.primary.kill()
    await pair.promote()
    after = Database(SHARD, pair.direct_dsn, connections=1)
    await after.open()
    assert not (await marks.compare(after, confirmed.mark)).lost
    await marks.mark(after, catalog_elsewhere)
    await after.close()


async def test_a_standby_that_lagged_is_noticed_when_it_is_promoted(
    pair: Shard, database: Database, store: Store, catalog_elsewhere: Database
) -> None:
    await marks.mark(database, catalog_elsewhere)
    standby = pair.standby
    assert standby is not None
    # From now on the standby is asynchronous, and far behind.
    pair.primary.ask("ALTER SYSTEM SET synchronous_standby_names = ''")
    pair.primary.ask("SELECT pg_reload_conf()")
    standby.kill()
    await store.enqueue(some_jobs(ORG))
    await marks.mark(database, catalog_elsewhere)
    pair.primary.kill()
    await standby.start()
    await pair.promote()
    after = Database(SHARD, pair.direct_dsn, connections=1)
    await after.open()
    with pytest.raises(LostHistory):
        await marks.mark(after, catalog_elsewhere)
    await after.close()
