"""A pool of consumers of all orgs, without shards."""

from __future__ import annotations

import asyncio

import pytest

from router.fleet.org_pool import OrgPool
from router.fleet.shard_handle import ShardHandle
from router.fleet.starts import Starts
from shard.errors import ShardUnavailable
from shard.queue.store import Store
from shard.vocabulary import OrgId, QueueName, ShardName

PATIENCE_S = 30.0


def no_store(_: OrgId) -> Store:
    raise ShardUnavailable(ShardName("s1"), "there is no shard")


async def test_an_org_that_was_held_back_is_not_ready_on_a_shard_that_has_gone_away() -> None:
    pool = OrgPool(
        [QueueName("mail")],
        shards=dict,
        reads=lambda _: (),
        weight_of=lambda _: 1.0,
        starts=Starts(no_store, lambda: None),
    )
    pool._set_aside(OrgId("acme"), ShardName("s1"), [QueueName("mail")], for_s=0)
    looked = asyncio.Event()
    asyncio.get_running_loop().call_later(0, looked.set)
    await looked.wait()
    assert pool.schedule.ready_count == 0
    assert pool.quiet.is_set()


async def test_a_pool_goes_on_after_a_fault(caplog: pytest.LogCaptureFixture) -> None:
    failed, went_on = asyncio.Event(), asyncio.Event()

    def shards() -> dict[ShardName, ShardHandle]:
        if not failed.is_set():
            failed.set()
            raise AssertionError("a fault")
        went_on.set()
        return {}

    pool = OrgPool(
        [QueueName("mail")],
        shards=shards,
        reads=lambda _: (),
        weight_of=lambda _: 1.0,
        starts=Starts(no_store, lambda: None),
    )
    running = asyncio.create_task(pool.run())
    pool.wake()
    await asyncio.wait_for(failed.wait(), PATIENCE_S)
    pool.wake()
    await asyncio.wait_for(went_on.wait(), PATIENCE_S)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert caplog.messages == ["could not hand out jobs of all orgs"]
