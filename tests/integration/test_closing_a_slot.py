"""What decision 0017 counts on when it closes a slot: an enqueue takes its snapshot after its locks on tables. So who
holds windrow.owned_slot alone for a moment has no enqueue beside it that found the slot open, and none after it."""

from __future__ import annotations

import asyncio

import psycopg
import pytest

from shard.database import Database
from shard.errors import NotOwned
from shard.placement import slot_of
from shard.store import Store
from shard.vocabulary import OrgId
from tests.conftest import SHARD
from tests.jobs import HOUR_US, some_jobs
from tests.timemachine import until_blocked

_CLOSE_ALONE = "LOCK TABLE windrow.owned_slot IN ACCESS EXCLUSIVE MODE"
_CLOSE = "UPDATE windrow.owned_slot SET state = 'draining', epoch = 2 WHERE slot = %s"


@pytest.mark.parametrize("prepared", [True, False], ids=["on a connection that knows it", "on a new connection"])
async def test_an_enqueue_that_waits_while_a_slot_is_closed_is_refused(
    fresh_database: Database, fresh_dsn: str, org: OrgId, prepared: bool
) -> None:
    database = Database(SHARD, fresh_dsn, connections=1)
    await database.open()
    store = Store(database)
    if prepared:
        await store.enqueue(some_jobs(org))
    else:
        await store.names.make({(org, queue) for queue in some_jobs(org).queues})
    balancer = await psycopg.AsyncConnection.connect(fresh_dsn)
    async with balancer, asyncio.TaskGroup() as group:
        await balancer.execute(_CLOSE_ALONE)
        enqueue = group.create_task(_refused_since(store, org))
        await until_blocked(fresh_database)
        await balancer.execute(_CLOSE, [slot_of(org)])
        await balancer.commit()
    assert enqueue.result() == 2
    await database.close()


async def test_a_slot_is_not_closed_while_an_enqueue_that_found_it_open_is_under_way(
    fresh_database: Database, fresh_dsn: str, org: OrgId
) -> None:
    store = Store(fresh_database)
    await store.enqueue(some_jobs(org))
    rival = await psycopg.AsyncConnection.connect(fresh_dsn)
    balancer = await psycopg.AsyncConnection.connect(fresh_dsn)
    async with rival, balancer, asyncio.TaskGroup() as group:
        # Holds up the enqueue in the midst of its statement: it must wait to see whether the key is taken.
        await rival.execute(
            "INSERT INTO windrow.dedup SELECT q.queue_id, 'k', gen_random_uuid(), now() + interval '1 hour' "
            "FROM windrow.queue q WHERE q.org = %s",
            [org],
        )
        enqueue = group.create_task(store.enqueue(some_jobs(org, dedup_keys=["k"], dedup_window_us=HOUR_US)))
        await until_blocked(fresh_database)
        await balancer.execute("SET LOCAL lock_timeout = '100ms'")
        with pytest.raises(psycopg.errors.LockNotAvailable):
            await balancer.execute(_CLOSE_ALONE)
        await balancer.rollback()
        await rival.rollback()
    assert enqueue.result() == {}


async def _refused_since(store: Store, org: OrgId) -> int:
    """The epoch by which an enqueue is refused."""
    with pytest.raises(NotOwned) as caught:
        await store.enqueue(some_jobs(org))
    return caught.value.epoch
