"""A router process sends no claims for a queue while the queue's limit of starts has no tokens left."""

from __future__ import annotations

import asyncio

from shard.errors import RowLocked
from shard.limits import Limit, LimitKey, LimitTable, Measure
from shard.queue import statements
from shard.vocabulary import OrgId
from tests.integration.test_unread_bytes import Room
from tests.jobs import QUEUE
from tests.recorder import Recorder
from tests.routers import PATIENCE_S
from tests.streams import until

DAY_US = 86_400_000_000


async def test_jobs_that_a_spent_limit_holds_back_are_neither_claimed_nor_drawn_for_again_and_again(
    recorder: Recorder, org: OrgId
) -> None:
    room = Room(recorder)
    room.starts.replace(LimitTable([Limit(LimitKey(org, QUEUE, Measure.STARTS), 2, DAY_US, 1)], version=1))
    try:
        consumers = [room.consumer(org, peer=f"peer-{at}", credit=100, reads=True) for at in range(10)]
        await room.enqueue(org, 5, b"")
        await until(lambda: sum(one.jobs for one in consumers) == 2, "both tokens are used")
        began_s = asyncio.get_running_loop().time()
        claims, draws = recorder.count(statements.CLAIM), recorder.count(statements.DRAW_TOKENS)
        for _ in range(100):
            await room.enqueue(org, 5, b"")
        # Consumers that begin to wait later get no jobs either.
        consumers += [room.consumer(org, peer="late", credit=100, reads=True) for _ in range(10)]
        for _ in range(100):
            await room.enqueue(org, 5, b"")
        seconds = asyncio.get_running_loop().time() - began_s
        assert recorder.count(statements.CLAIM) == claims
        # At most one draw in 3 s, besides the draw that found the bucket empty.
        assert recorder.count(statements.DRAW_TOKENS) - draws <= 2 + seconds / 3
        assert sum(one.jobs for one in consumers) == 2
    finally:
        await room.end()


async def test_claims_that_fail_or_are_cancelled_start_nothing_and_cost_nothing(recorder: Recorder, org: OrgId) -> None:
    room = Room(recorder)
    room.starts.replace(LimitTable([Limit(LimitKey(org, QUEUE, Measure.STARTS), 20, DAY_US, 1)], version=1))
    try:
        await room.enqueue(org, 30, b"")
        recorder.fail(statements.CLAIM)
        failed = [room.consumer(org, peer=f"failed-{at}", credit=7, reads=True) for at in range(5)]
        await until(lambda: recorder.count(statements.CLAIM) > 0, "claims fail")
        for one in failed:
            room.end_consumer(one)
        recorder.fail_no_more()
        # A consumer ends after its claim has been sent to the shard.
        sent, goes_on = asyncio.Event(), asyncio.Event()

        async def wait() -> None:
            sent.set()
            await goes_on.wait()

        recorder.before(statements.CLAIM, wait)
        cancelled = room.consumer(org, peer="cancelled", credit=20, reads=True)
        await asyncio.wait_for(sent.wait(), PATIENCE_S)
        room.end_consumer(cancelled)
        goes_on.set()
        # Another session keeps the tokens locked for a moment.
        recorder.fail(statements.RETURN_TOKENS, error=RowLocked(recorder.name, "a bucket"))
        consumers = [room.consumer(org, peer=f"peer-{at}", credit=9, reads=True) for at in range(2)]
        for _ in range(3):
            await room.enqueue(org, 1, b"")
        recorder.fail_no_more()
        consumers += [room.consumer(org, peer=f"late-{at}", credit=9, reads=True) for at in range(5)]
        jobs = [*failed, cancelled, *consumers]
        await until(lambda: sum(one.jobs for one in jobs) >= 20, "the whole limit starts")
        await room.starts.give_back()
        await room.enqueue(org, 5, b"")
        assert sum(one.jobs for one in jobs) == 20
    finally:
        await room.end()


async def test_idle_consumers_are_handed_jobs_only_for_tokens(recorder: Recorder, org: OrgId) -> None:
    room = Room(recorder)
    # The bucket gets ten tokens in a tenth of a second.
    limit = Limit(LimitKey(org, QUEUE, Measure.STARTS), 100, 1_000_000, 1)
    room.starts.replace(LimitTable([limit], version=1))
    try:
        consumer = room.consumer(org, peer="peer", credit=1000, reads=True)
        # The consumer has looked for jobs, and has found none.
        await until(
            lambda: (awaited := room.room.queue(org, QUEUE)) is not None and next(iter(awaited.waiters)).idle,
            "the consumer waits",
        )
        for _ in range(30):
            await room.enqueue(org, 10, b"")
        await until(lambda: consumer.jobs == 300, "all jobs have started")
        ((seconds,),) = await recorder.run(
            b"SELECT extract(epoch FROM max(leased_at) - min(leased_at))::float8 FROM windrow.job", {}
        )
        # The bucket gave 100 tokens at once, and 200 tokens at a rate of 100 per second.
        assert seconds >= 1.9
    finally:
        await room.end()
