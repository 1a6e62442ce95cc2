"""What a router process decides about tokens for starts of jobs, without a shard: how many tokens a claim takes, how
many it puts back, and when the process asks the shard again."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.fleet.starts import Starts, look_again_s
from shard.errors import InDoubt, RowLocked, ShardUnavailable, TooManyWaiting
from shard.limits import ALL_QUEUES, EVERY_ORG, Limit, LimitKey, LimitTable, Measure
from shard.queue.claim import ClaimResult
from shard.queue.store import Store
from shard.queue.token_buckets import Draw, Drawn
from shard.vocabulary import OrgId, QueueName, ShardName
from tests.streams import until

ACME, OTHER = OrgId("acme"), OrgId("other")
MAIL, FILES, WEB = QueueName("mail"), QueueName("files"), QueueName("web")
DAY_US = 86_400_000_000


class Shard:
    """A shard with one bucket, which does not fill."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.draws: list[Draw] = []
        self.error: Exception | None = None
        self.version = 1

    async def draw(self, draw: Draw) -> Drawn:
        self.draws.append(draw)
        await asyncio.sleep(0)
        if self.error is not None:
            raise self.error
        if draw.limit.version < self.version:
            return Drawn(0, self.tokens, self.version)
        granted = min(draw.wanted, self.tokens) if self.tokens >= draw.needed else 0
        self.tokens -= granted
        return Drawn(granted, self.tokens, 1)


def limit(
    amount: int, *, org: OrgId = ACME, queue: QueueName = ALL_QUEUES, interval_us: int = DAY_US, version: int = 1
) -> Limit:
    return Limit(LimitKey(org, queue, Measure.STARTS), amount, interval_us, version)


def starts_of(shard: Shard, *limits: Limit) -> Starts:
    starts = Starts(lambda _: cast("Store", shard), lambda: None)
    starts.replace(LimitTable(limits))
    return starts


# ── Which queues are claimed together ────────────────────────────────────────────────────────────────────────────────


def test_limits_of_enqueues_hold_no_start_back() -> None:
    of_jobs = Limit(LimitKey(ACME, MAIL, Measure.JOBS), 1, DAY_US, 1)
    starts = starts_of(Shard(0), of_jobs)
    assert starts.split(ACME, [MAIL, FILES]) == [([MAIL, FILES], (), None)]
    assert starts.take(ACME, MAIL, 5) is None


def test_each_queue_with_a_limit_of_its_own_is_claimed_by_itself() -> None:
    whole, mail, files = limit(9), limit(1, queue=MAIL), limit(2, org=EVERY_ORG, queue=FILES)
    starts = starts_of(Shard(0), whole, mail, files)
    parts = {
        tuple(queues): [one.limit for one in buckets] for queues, buckets, _ in starts.split(ACME, [MAIL, FILES, WEB])
    }
    assert parts == {(MAIL,): [whole, mail], (FILES,): [whole, files], (WEB,): [whole]}
    assert starts.split(OTHER, [MAIL, WEB])[0][0] == [MAIL, WEB]


# ── Draws ────────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_claim_takes_what_there_is_and_is_then_held_back() -> None:
    shard = Shard(3)
    starts = starts_of(shard, limit(10))
    ((_, buckets, _),) = starts.split(ACME, [MAIL])
    permit = await starts.draw(ACME, buckets, 100)
    assert permit is not None
    assert permit.jobs == 3
    permit.claimed(3)
    assert await starts.draw(ACME, buckets, 100) is None
    asked = len(shard.draws)
    # The process computes when the next token comes, and does not ask the shard until then.
    for _ in range(10):
        assert await starts.draw(ACME, buckets, 100) is None
    assert len(shard.draws) == asked
    assert 2.0 < look_again_s(buckets) <= 3.0


async def test_nothing_is_drawn_for_a_claim_that_another_bucket_holds_back() -> None:
    shard = Shard(1)
    starts = starts_of(shard, limit(10), limit(10, queue=MAIL))
    ((_, buckets, _),) = starts.split(ACME, [MAIL])
    assert await starts.draw(ACME, buckets, 1) is None
    drawn = len(shard.draws)
    assert await starts.draw(ACME, buckets, 1) is None
    assert len(shard.draws) == drawn


async def test_what_a_claim_did_not_use_goes_back_at_once_if_others_may_need_it() -> None:
    shard = Shard(10)
    starts = starts_of(shard, limit(10))
    ((_, buckets, _),) = starts.split(ACME, [MAIL])
    permit = await starts.draw(ACME, buckets, 100)
    assert permit is not None
    assert (permit.jobs, shard.tokens) == (10, 0)
    permit.claimed(1)
    await until(lambda: shard.tokens == 9, "the others are given back")
    again = await starts.draw(ACME, buckets, 100)
    assert again is not None
    # The previous claim found one job, so this claim takes two tokens.
    assert (again.jobs, shard.tokens) == (2, 7)


async def test_a_locked_bucket_holds_its_queue_back_for_a_moment() -> None:
    shard = Shard(10)
    shard.error = RowLocked(ShardName("s1"), "a bucket")
    starts = starts_of(shard, limit(10))
    ((_, buckets, _),) = starts.split(ACME, [MAIL])
    assert await starts.draw(ACME, buckets, 1) is None
    assert 0 < look_again_s(buckets) <= 3.0


async def test_a_hand_over_uses_only_tokens_that_are_here() -> None:
    shard = Shard(1000)
    # A tenth of a second of this limit is 100 tokens.
    starts = starts_of(shard, limit(1000, interval_us=1_000_000))
    nothing = starts.take(ACME, MAIL, 5)
    assert nothing is not None
    assert (nothing.jobs, shard.draws) == (0, [])
    ((_, buckets, _),) = starts.split(ACME, [MAIL])
    permit = await starts.draw(ACME, buckets, 50)
    assert permit is not None
    permit.claimed(10)
    handed = starts.take(ACME, MAIL, 100)
    assert handed is not None
    assert handed.jobs == 40
    handed.put_back(15)
    again = starts.take(ACME, MAIL, 100)
    assert again is not None
    assert again.jobs == 15


def test_a_change_of_start_limits_is_reported_once() -> None:
    changes: list[int] = []
    starts = Starts(lambda _: cast("Store", Shard(0)), lambda: changes.append(1))
    starts.replace(LimitTable([limit(5)], version=1))
    of_jobs = Limit(LimitKey(ACME, MAIL, Measure.JOBS), 1, DAY_US, 2)
    starts.replace(LimitTable([limit(5), of_jobs], version=2))
    assert changes == [1]
    starts.replace(LimitTable([of_jobs], version=3))
    assert changes == [1, 1]


# ── What did not start ───────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_claim_that_fails_or_is_cancelled_puts_all_its_tokens_back() -> None:
    shard = Shard(10)
    starts = starts_of(shard, limit(10))
    for end in (_fail, _hang):
        ((_, buckets, _),) = starts.split(ACME, [MAIL])
        permit = await starts.draw(ACME, buckets, 10)
        assert permit is not None
        assert permit.jobs == 10
        claim = asyncio.create_task(permit.spend(end()))
        await asyncio.sleep(0)
        claim.cancel()
        await asyncio.gather(claim, return_exceptions=True)
        await starts.finish()
        assert shard.tokens == 10


async def _fail() -> ClaimResult:
    raise ShardUnavailable(ShardName("s1"), "the test says so")


async def _hang() -> ClaimResult:
    await asyncio.Event().wait()
    raise AssertionError("it is cancelled")


@pytest.mark.parametrize("error", [RowLocked(ShardName("s1"), "a bucket"), TooManyWaiting()])
async def test_tokens_that_the_shard_does_not_take_back_now_are_given_back_later(error: Exception) -> None:
    shard = Shard(10)
    starts = starts_of(shard, limit(10))
    ((_, buckets, _),) = starts.split(ACME, [MAIL])
    permit = await starts.draw(ACME, buckets, 10)
    assert permit is not None
    shard.error = error
    permit.claimed(4)
    await starts.finish()
    shard.error = None
    await starts.finish()
    assert shard.tokens == 6


async def test_tokens_whose_return_is_in_doubt_are_not_given_back_twice() -> None:
    shard = Shard(10)
    starts = starts_of(shard, limit(10))
    ((_, buckets, _),) = starts.split(ACME, [MAIL])
    permit = await starts.draw(ACME, buckets, 10)
    assert permit is not None
    permit.put_back(4)
    shard.error = InDoubt(ShardName("s1"), "the test says so")
    await starts.finish()
    shard.error = None
    asked = len(shard.draws)
    await starts.finish()
    assert len(shard.draws) == asked


@pytest.mark.parametrize("shard_first", [False, True])
async def test_the_removal_of_another_limit_costs_no_tokens(shard_first: bool) -> None:
    shard = Shard(10)
    starts = starts_of(shard, limit(10))
    ((_, buckets, _),) = starts.split(ACME, [MAIL])
    permit = await starts.draw(ACME, buckets, 10)
    assert permit is not None
    permit.put_back(10)
    if shard_first:
        # Another router has told the shard of the newer version.
        shard.version = 2
        await starts.finish()
    starts.replace(LimitTable([limit(10, version=2)], version=2))
    shard.version = 2
    await starts.finish()
    assert shard.tokens == 10


# ── Any order of claims ──────────────────────────────────────────────────────────────────────────────────────────────

# Each claim is a tuple of: the process, how many jobs the claim wants, which share of these jobs it finds (None: the
# claim fails), whether the claim is a hand-over, and whether the bucket is locked when tokens are given back.
_CLAIMS = st.lists(
    st.tuples(st.integers(0, 2), st.integers(1, 30), st.none() | st.floats(0, 1), st.booleans(), st.booleans()),
    max_size=40,
)


@given(amount=st.integers(1, 100), claims=_CLAIMS)
def test_in_any_order_of_claims_no_token_is_used_twice_or_lost(
    amount: int, claims: list[tuple[int, int, float | None, bool, bool]]
) -> None:
    async def run() -> None:
        shard = Shard(amount)
        processes = [starts_of(shard, limit(amount)) for _ in range(3)]
        started = 0
        for process, wanted, share, hands, locked in claims:
            starts = processes[process]
            ((_, buckets, _),) = starts.split(ACME, [MAIL])
            permit = starts.take(ACME, MAIL, wanted) if hands else await starts.draw(ACME, buckets, wanted)
            if permit is None:
                continue
            assert permit.jobs <= wanted
            used = int(permit.jobs * (share or 0))
            started += used
            shard.error = RowLocked(ShardName("s1"), "a bucket") if locked else None
            if hands:
                permit.put_back(permit.jobs - used)
            elif share is None:
                await asyncio.gather(permit.spend(_fail()), return_exceptions=True)
            else:
                permit.claimed(used)
            # Tokens that are given back now may arrive before or after the next claim.
            for _ in range(wanted % 4):
                await asyncio.sleep(0)
            shard.error = None
        for starts in processes:
            await starts.finish()
        assert started + shard.tokens == amount

    asyncio.run(run())
