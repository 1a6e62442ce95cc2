"""A pool of consumers of all orgs, without shards."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import pytest

from router.fleet.org_pool import OrgPool
from router.fleet.shard_handle import ShardHandle
from router.fleet.starts import Starts
from shard.errors import ShardUnavailable
from shard.queue.store import Store
from shard.vocabulary import OrgId, QueueName, ShardName
from tests.waiting import WaitingConsumer

PATIENCE_S = 30.0
MAIL, S1 = QueueName("mail"), ShardName("s1")
ACME, LARGE = OrgId("acme"), OrgId("large")


def no_store(_: OrgId) -> Store:
    raise ShardUnavailable(S1, "there is no shard")


def pool_of(shards: Callable[[], Mapping[ShardName, ShardHandle]] = dict) -> OrgPool:
    return OrgPool(
        [MAIL], shards=shards, reads=lambda _: (), weight_of=lambda _: 1.0, starts=Starts(no_store, lambda: None)
    )


def dealt(pool: OrgPool, org: OrgId, jobs: int) -> int:
    """Returns how many of these new jobs of an org get places."""
    return sum(share.count for share in pool.deal(org, [100] * jobs))


async def test_an_org_that_was_held_back_is_not_ready_on_a_shard_that_has_gone_away() -> None:
    pool = pool_of()
    pool._set_aside(ACME, S1, [MAIL], for_s=0)
    looked = asyncio.Event()
    asyncio.get_running_loop().call_later(0, looked.set)
    await looked.wait()
    assert pool.schedule.ready_count == 0


async def test_new_jobs_are_handed_over_beside_the_backlog_of_another_org_until_it_is_that_orgs_turn() -> None:
    pool = pool_of()
    pool.enter(WaitingConsumer(OrgId(""), credit=10, all_orgs=True))
    pool.found(S1, LARGE, MAIL)
    assert dealt(pool, LARGE, 1) == 0, "its older jobs come first"
    assert dealt(pool, ACME, 3) == 1, "only one job before the other org's"
    pool.schedule.began(ACME, "lease", now_s=0.0, until_s=60.0)
    assert dealt(pool, ACME, 1) == 0, "the other org is next now"
    pool.schedule.idle(LARGE, S1)
    assert dealt(pool, ACME, 3) == 3, "nobody else waits"
    assert dealt(pool, LARGE, 9) == 6, "as many as there are places"


async def test_while_a_claim_of_an_org_waits_for_its_next_try_no_newer_job_of_the_org_is_handed_over() -> None:
    pool = pool_of()
    pool.enter(WaitingConsumer(OrgId(""), credit=10, all_orgs=True))
    pool._set_aside(ACME, S1, [MAIL], for_s=0)
    assert dealt(pool, ACME, 1) == 0
    assert dealt(pool, LARGE, 1) == 1
    looked = asyncio.Event()
    asyncio.get_running_loop().call_later(0, looked.set)
    await looked.wait()
    assert dealt(pool, ACME, 1) == 1


async def test_a_pool_goes_on_after_a_fault(caplog: pytest.LogCaptureFixture) -> None:
    failed, went_on = asyncio.Event(), asyncio.Event()

    def shards() -> dict[ShardName, ShardHandle]:
        if not failed.is_set():
            failed.set()
            raise AssertionError("a fault")
        went_on.set()
        return {}

    pool = pool_of(shards)
    running = asyncio.create_task(pool.run())
    pool.wake()
    await asyncio.wait_for(failed.wait(), PATIENCE_S)
    pool.wake()
    await asyncio.wait_for(went_on.wait(), PATIENCE_S)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert caplog.messages == ["could not hand out jobs of all orgs"]
