"""The close of a slot (decision 0017) relies on an order: an enqueue takes its table locks first, and its snapshot
afterwards. So while one session holds windrow.owned_slot exclusively, no running enqueue has seen the slot open, and no
enqueue sees the slot open afterwards."""

from __future__ import annotations

import asyncio

import psycopg
import pytest

from shard.errors import NotOwned, ShardUnavailable
from shard.placement import move_steps, statements
from shard.placement.slots import slot_of
from shard.postgres import arrays
from shard.postgres.pool import Database
from shard.queue.store import Store
from shard.vocabulary import OrgId
from tests.conftest import SHARD
from tests.jobs import HOUR_US, some_jobs
from tests.timemachine import NO_HURRY, until_blocked


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
        # These statements do the same as move_steps.close_slots, but the test can check the state between two of them.
        await balancer.execute(statements.LOCK_SLOTS, prepare=False)
        await balancer.execute(NO_HURRY)
        enqueue = group.create_task(_refused_since(store, org))
        await until_blocked(fresh_database)
        await balancer.execute(statements.CLOSE_SLOTS, {"slots": arrays.numbers([slot_of(org)]), "epoch": 2})
        await balancer.commit()
    assert enqueue.result() == 2
    await database.close()


async def test_a_slot_is_not_closed_while_an_enqueue_that_found_it_open_is_under_way(
    fresh_database: Database, fresh_dsn: str, org: OrgId
) -> None:
    store = Store(fresh_database)
    await store.enqueue(some_jobs(org))
    slots = [slot_of(org)]
    async with await psycopg.AsyncConnection.connect(fresh_dsn) as rival, asyncio.TaskGroup() as group:
        # This row stops the enqueue in the middle of its statement: the enqueue must wait until it knows whether the
        # key is taken.
        await rival.execute(
            "INSERT INTO windrow.dedup SELECT q.queue_id, 'k', gen_random_uuid(), now() + interval '1 hour' "
            "FROM windrow.queue q WHERE q.org = %s",
            [org],
        )
        enqueue = group.create_task(store.enqueue(some_jobs(org, dedup_keys=["k"], dedup_window_us=HOUR_US)))
        await until_blocked(fresh_database)
        assert not await move_steps.close_slots(fresh_database, slots, epoch=2)
        # The failed close has changed nothing for other sessions either.
        assert await store.enqueue(some_jobs(org)) == {}
        await rival.rollback()
    assert enqueue.result() == {}
    assert await move_steps.close_slots(fresh_database, slots, epoch=2)
    assert await _refused_since(store, org) == 2


async def test_who_freezes_while_he_closes_a_slot_does_not_hold_up_enqueues_for_long(
    fresh_database: Database, fresh_dsn: str, org: OrgId
) -> None:
    store = Store(fresh_database)
    await store.enqueue(some_jobs(org))
    frozen = Database(SHARD, fresh_dsn, connections=1)
    await frozen.open()

    async def close_and_freeze() -> None:
        async with frozen.transaction() as balancer:
            await balancer.execute(statements.LOCK_SLOTS, prepare=False)
            # The enqueue waits until Postgres ends this idle session. An enqueue that waits for ten seconds is refused.
            assert await store.enqueue(some_jobs(org)) == {}
            await balancer.run(statements.CLOSE_SLOTS, {"slots": arrays.numbers([slot_of(org)]), "epoch": 2})

    try:
        with pytest.raises(ShardUnavailable):
            await close_and_freeze()
        assert await move_steps.close_slots(frozen, [slot_of(org)], epoch=2)
    finally:
        await frozen.close()


async def _refused_since(store: Store, org: OrgId) -> int:
    """Returns the epoch that the refusal of an enqueue names."""
    with pytest.raises(NotOwned) as caught:
        await store.enqueue(some_jobs(org))
    return caught.value.epoch
