"""A pool of consumers of all orgs, without shards."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from router.buffer import Buffer
from router.fleet.org_pool import OrgPool
from router.fleet.shard_handle import ShardHandle
from router.fleet.starts import ClaimedPart, Part, Starts
from shard.errors import ShardUnavailable
from shard.limits import InFlightLimits
from shard.queue.claim import ClaimResult
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
    """Gives an org this many new jobs. Returns how many of them get places."""
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


class ConsumerOfPool(WaitingConsumer):
    """A consumer that tells its pool when it has credit again, as streams do."""

    def __init__(self, pool: OrgPool) -> None:
        super().__init__(OrgId(""), credit=10, all_orgs=True, buffer=Buffer(2**30))
        self.pool = pool

    def free_places(self, unused: int) -> None:
        super().free_places(unused)
        self.pool.able(self)


class LimitedStarts:
    """Limits of starts, for which every org has a limit of jobs in flight. The first `empty` claims get no job. The
    next `full` claims get all jobs that they ask for. The other claims never end."""

    def __init__(self, *, empty: int, full: int = 0) -> None:
        self.empty, self.full = empty, full
        self.claims = 0
        self.asked = asyncio.Queue[int]()

    def is_limited(self, _: OrgId) -> bool:
        return True

    def split(self, _: OrgId, queues: Sequence[QueueName]) -> list[Part]:
        return [Part(queues, in_flight=InFlightLimits(5, None))]

    async def claim(self, *_: object, max_jobs: int, **__: object) -> ClaimedPart:
        self.claims += 1
        self.asked.put_nowait(max_jobs)
        if self.claims > self.empty + self.full:
            await asyncio.Event().wait()
        jobs: list[Any] = [] if self.claims <= self.empty else [None] * max_jobs
        return ClaimedPart(ClaimResult(b"", jobs), max_jobs, None)


@contextlib.asynccontextmanager
async def limited_pool(starts: LimitedStarts, *, consumers: int) -> AsyncGenerator[OrgPool]:
    """Runs a pool with one shard. Jobs of claims are counted, and not delivered."""

    async def has_room(*_: object) -> bool:
        return False

    def count(_: ShardHandle, request: Any, claimed: ClaimedPart) -> None:
        request.got += len(claimed.result.jobs)

    up = asyncio.Event()
    up.set()
    room = SimpleNamespace(gives=True, hold_if_full=has_room)
    ready_orgs = SimpleNamespace(emptied=lambda *_: None)
    handle = SimpleNamespace(name=S1, up=up, room=room, store=None, ready_orgs=ready_orgs)
    pool = OrgPool(
        [MAIL],
        shards=lambda: {S1: cast("ShardHandle", handle)},
        reads=lambda _: [S1],
        weight_of=lambda _: 1.0,
        starts=cast("Starts", starts),
    )
    cast("Any", pool)._deliver = count
    for _ in range(consumers):
        pool.enter(ConsumerOfPool(pool))
    running = asyncio.create_task(pool.run())
    pool.found(S1, LARGE, MAIL)
    try:
        async with asyncio.timeout(PATIENCE_S):
            yield pool
    finally:
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running


async def test_while_a_claim_of_an_org_at_its_limit_runs_other_orgs_get_places() -> None:
    starts = LimitedStarts(empty=1)
    async with limited_pool(starts, consumers=1) as pool:
        assert await starts.asked.get() == 10
        pool.found(S1, LARGE, MAIL)
        assert await starts.asked.get() == 1
        assert dealt(pool, ACME, 1) == 1


async def test_claims_of_an_org_below_its_limit_grow_although_many_consumers_share_them() -> None:
    consumers = 8
    starts = LimitedStarts(empty=consumers, full=1 + 2 + 4 + 8)
    async with limited_pool(starts, consumers=consumers) as pool:
        assert [await starts.asked.get() for _ in range(consumers)] == [10] * consumers
        pool.found(S1, LARGE, MAIL)
        assert [await starts.asked.get() for _ in range(starts.full)] == [1] * starts.full
        # Each of the 8 consumers shares in the next claim.
        assert [await starts.asked.get() for _ in range(consumers)] == [2] * consumers


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
