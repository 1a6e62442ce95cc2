"""What a router process decides about tokens, without a shard: how many tokens it draws, when it asks the shard again,
and which calls it refuses until then."""

from __future__ import annotations

import asyncio
import math
from typing import Any, cast

import pytest

from router.fleet import buckets as module
from router.fleet.buckets import Bucket
from router.fleet.limits import Limits
from shard.errors import ClockSetBack, LimitReached, ShardUnavailable
from shard.limits import ALL_QUEUES, EVERY_ORG, Limit, LimitKey, LimitTable, Measure
from shard.queue.store import Store
from shard.queue.token_buckets import Draw, Drawn
from shard.vocabulary import NewJobs, OrgId, QueueName, ShardName
from tests.jobs import some_jobs

ACME, OTHER = OrgId("acme"), OrgId("other")
MAIL, FILES = QueueName("mail"), QueueName("files")
DAY_US = 86_400_000_000


def limit(
    amount: int,
    *,
    org: OrgId = ACME,
    queue: QueueName = ALL_QUEUES,
    measure: Measure = Measure.JOBS,
    interval_us: int = DAY_US,
    version: int = 1,
) -> Limit:
    return Limit(LimitKey(org, queue, measure), amount, interval_us, version)


class Shard:
    """A shard whose buckets do not fill. If a bucket is not in `buckets`, a draw takes from `tokens`."""

    def __init__(self, tokens: int, buckets: dict[LimitKey, int] | None = None) -> None:
        self.tokens = tokens
        self.buckets = buckets or {}
        self.draws: list[Draw] = []
        self.asked = asyncio.Event()
        self.opened = asyncio.Event()
        self.opened.set()
        self.error: Exception | None = None

    async def draw(self, draw: Draw) -> Drawn:
        self.draws.append(draw)
        self.asked.set()
        await self.opened.wait()
        if self.error is not None:
            raise self.error
        left = self.buckets.get(draw.limit.key, self.tokens)
        granted = min(draw.wanted, left) if left >= draw.needed else 0
        if draw.limit.key in self.buckets:
            self.buckets[draw.limit.key] -= granted
        else:
            self.tokens -= granted
        return Drawn(granted, left - granted, 1)

    @property
    def store(self) -> Store:
        return cast("Store", self)


def limits_of(*limits: Limit) -> Limits:
    opened = Limits()
    opened.replace(LimitTable(limits, version=1))
    return opened


def jobs(count: int, *, org: OrgId = ACME, queue: str = MAIL) -> NewJobs:
    return some_jobs(org, count, queue=queue)


async def charge(opened: Limits, shard: Shard, batch: NewJobs, *, independent: bool = False) -> Any:
    return await opened.charge(shard.store, batch, independent=independent)


# ── Which limits count ───────────────────────────────────────────────────────────────────────────────────────────────


def test_an_own_limit_replaces_the_default_of_the_same_queue_and_measure_only() -> None:
    default, own = limit(1, org=EVERY_ORG), limit(2)
    in_bytes, of_queue = limit(3, org=EVERY_ORG, measure=Measure.BYTES), limit(4, org=EVERY_ORG, queue=MAIL)
    table = LimitTable([default, own, in_bytes, of_queue])
    assert table.of(ACME) == [own, in_bytes]
    assert table.of(OTHER) == [default, in_bytes]
    assert table.of(ACME, MAIL) == [of_queue]
    assert table.of(ACME, FILES) == []
    assert table.all_of(ACME) == [own, in_bytes, of_queue]
    assert table.is_limited(OTHER)


def test_without_a_limit_nobody_is_limited() -> None:
    table = LimitTable([limit(1)])
    assert table.is_limited(ACME)
    assert not table.is_limited(OTHER)
    assert not table.limits_queues(ACME)
    assert not LimitTable().is_limited(ACME)


# ── Draws ────────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_of_a_small_limit_only_what_a_call_needs_is_drawn() -> None:
    opened, shard = limits_of(limit(10)), Shard(10)
    for count in (3, 1, 2):
        assert await charge(opened, shard, jobs(count)) is not None
    assert [(draw.needed, draw.wanted) for draw in shard.draws] == [(3, 3), (1, 1), (2, 2)]


async def test_a_block_is_a_tenth_of_a_second_of_the_limit_at_most() -> None:
    # The limit allows 1,000 jobs a second.
    opened, shard = limits_of(limit(10_000, interval_us=10_000_000)), Shard(10_000)
    for _ in range(50):
        await charge(opened, shard, jobs(20))
    # A draw asks for a block of at most 100 tokens, and for the tokens that its call lacks.
    assert max(draw.wanted for draw in shard.draws) <= 100 + 20
    # All calls came at the same time, so the blocks grew to the largest allowed size. Therefore there are fewer draws
    # than calls.
    assert len(shard.draws) < 25


async def test_calls_that_lack_tokens_at_the_same_time_share_a_draw() -> None:
    opened, shard = limits_of(limit(100)), Shard(100)
    await asyncio.gather(*(charge(opened, shard, jobs(1)) for _ in range(50)))
    assert [(draw.needed, draw.wanted) for draw in shard.draws] == [(1, 50)]


async def test_calls_that_come_during_a_draw_share_the_next_one() -> None:
    opened, shard = limits_of(limit(100)), Shard(100)
    shard.opened.clear()
    first = asyncio.create_task(charge(opened, shard, jobs(1)))
    await shard.asked.wait()
    others = [asyncio.create_task(charge(opened, shard, jobs(1))) for _ in range(50)]
    await asyncio.sleep(0)
    shard.opened.set()
    await asyncio.gather(first, *others)
    assert [draw.wanted for draw in shard.draws] == [1, 50]


async def test_a_cancelled_call_leaves_the_draw_to_the_others() -> None:
    opened, shard = limits_of(limit(100)), Shard(100)
    shard.opened.clear()
    first, second = (asyncio.create_task(charge(opened, shard, jobs(2))) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait({first})
    shard.opened.set()
    assert await second is not None
    await opened.finish()
    assert shard.tokens == 98


async def test_if_the_shard_does_not_answer_no_token_is_used() -> None:
    opened, shard = limits_of(limit(5)), Shard(5)
    shard.error = ShardUnavailable(ShardName("s1"), "no answer")
    with pytest.raises(ShardUnavailable):
        await charge(opened, shard, jobs(2))
    shard.error = None
    await charge(opened, shard, jobs(5))


# ── Refusals ─────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_while_a_bucket_cannot_have_room_the_shard_is_not_asked() -> None:
    opened, shard = limits_of(limit(2)), Shard(2)
    await charge(opened, shard, jobs(2))
    for _ in range(10):
        with pytest.raises(LimitReached) as refused:
            await charge(opened, shard, jobs(1))
        assert refused.value.retry_after_s is not None
        # A token comes every half day.
        assert refused.value.retry_after_s == pytest.approx(43_200, rel=0.01)
    # The answer to the first call's draw said that no token is left.
    assert len(shard.draws) == 1


async def test_a_call_above_the_amount_asks_nobody() -> None:
    opened, shard = limits_of(limit(10)), Shard(10)
    with pytest.raises(LimitReached, match="can never succeed; send at most 10 at a time") as refused:
        await charge(opened, shard, jobs(11))
    assert (refused.value.retry_after_s, refused.value.asked) == (None, 11)
    assert shard.draws == []


async def test_an_independent_call_is_told_which_jobs_have_no_room() -> None:
    opened, shard = limits_of(limit(10)), Shard(4)
    with pytest.raises(LimitReached) as refused:
        await charge(opened, shard, jobs(12), independent=True)
    # The call asks for more than the amount, so the shard is not asked. Even a full bucket has no room for two jobs.
    assert refused.value.positions == [10, 11]
    with pytest.raises(LimitReached) as refused:
        await charge(opened, shard, jobs(10), independent=True)
    assert refused.value.positions == [4, 5, 6, 7, 8, 9]
    assert await charge(opened, shard, jobs(4), independent=True) is not None


async def test_if_one_of_several_limits_has_no_room_the_others_are_not_charged() -> None:
    of_queue = limit(2, queue=MAIL)
    opened, shard = limits_of(limit(10), of_queue), Shard(10, {of_queue.key: 2})
    await charge(opened, shard, jobs(2))
    with pytest.raises(LimitReached) as refused:
        await charge(opened, shard, jobs(1))
    assert refused.value.limit.key.queue == MAIL
    assert shard.tokens == 8
    await charge(opened, shard, jobs(8, queue=FILES))


# ── What is given back ───────────────────────────────────────────────────────────────────────────────────────────────


async def test_what_is_refunded_is_used_by_the_next_call_or_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    opened, shard = limits_of(limit(5)), Shard(5)
    charged = await charge(opened, shard, jobs(3))
    charged.refund_jobs({0: "known", 2: "known"})
    await charge(opened, shard, jobs(1))
    assert shard.tokens == 2
    await opened.give_back()
    # The tokens have not been held for long enough.
    assert shard.tokens == 2
    monkeypatch.setattr(module, "_HELD_S", -1.0)
    await opened.give_back()
    assert shard.tokens == 3


async def test_enqueues_that_a_shard_refuses_while_its_clock_is_set_back_use_up_no_limit() -> None:
    opened, shard = limits_of(limit(5)), Shard(5)
    for _ in range(10):
        with pytest.raises(ClockSetBack), await charge(opened, shard, jobs(5)):
            raise ClockSetBack(ShardName("s1"), "its clock was set back")


async def test_a_process_that_ends_gives_everything_back() -> None:
    opened, shard = limits_of(limit(5)), Shard(5)
    charged = await charge(opened, shard, jobs(3))
    charged.refund()
    await opened.finish()
    assert shard.tokens == 5


async def test_a_process_that_ends_gives_back_what_is_being_drawn() -> None:
    may_answer = asyncio.Event()

    class SlowShard(Shard):
        async def draw(self, draw: Draw) -> Drawn:
            drawn = await super().draw(draw)
            if not draw.needed:
                # No call waits for this draw, because it was made before its tokens were needed.
                await may_answer.wait()
            return drawn

    # The limit allows 1,000 jobs a second, so the process draws blocks before it needs them.
    opened, shard = limits_of(limit(10_000, interval_us=10_000_000)), SlowShard(10_000)
    used = 0
    while all(draw.needed for draw in shard.draws):
        await charge(opened, shard, jobs(20))
        used += 20
        await asyncio.sleep(0)
    ending = asyncio.create_task(opened.finish())
    await asyncio.sleep(0)
    may_answer.set()
    await ending
    assert shard.tokens == 10_000 - used


# ── Changes ──────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_change_forgets_what_was_known_of_the_old_limit_and_nothing_else() -> None:
    opened, shard = limits_of(limit(1), limit(1, org=OTHER)), Shard(2)
    await charge(opened, shard, jobs(1))
    await charge(opened, shard, jobs(1, org=OTHER))
    shard.tokens = 5
    opened.replace(LimitTable([limit(6, version=2), limit(1, org=OTHER)], version=2))
    await charge(opened, shard, jobs(5))
    with pytest.raises(LimitReached):
        await charge(opened, shard, jobs(1, org=OTHER))
    opened.replace(LimitTable(version=3))
    asked = len(shard.draws)
    await charge(opened, shard, jobs(1000))
    assert len(shard.draws) == asked


async def test_many_buckets_do_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BUCKETS_MAX", 10)
    opened, shard = limits_of(limit(1000, org=EVERY_ORG)), Shard(10**6)
    for at in range(100):
        charged = await charge(opened, shard, jobs(1, org=OrgId(f"org-{at}")))
        # Every other bucket keeps a token.
        if at % 2:
            charged.refund()
    assert len(opened._buckets) <= 10


def test_an_unknown_bucket_is_asked_at_once() -> None:
    bucket = Bucket(ACME, limit(1))
    assert bucket.left == math.inf
    assert (bucket.ready_in_s(1), bucket.usage()) == (0.0, 1)
