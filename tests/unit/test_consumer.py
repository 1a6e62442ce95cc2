"""Consumers reserve memory for each claim before it begins. The claims on a shard that does not answer leave room for
claims on other shards, and for enqueues."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import cast

from router.buffer import Account, Buffer
from router.codec.fast_write import Delivery
from router.fleet.fleet import Fleet
from router.fleet.shard_handle import ShardHandle
from router.fleet.starts import Starts
from router.services.consumer import Consumer
from shard.queue.claim import CLAIM_BYTES_MAX, CLAIM_BYTES_MIN, ClaimResult, bytes_most
from shard.queue.store import Store
from shard.vocabulary import Claimed, OrgId, QueueName, ShardName
from tests.jobs import MINUTE_US, QUEUE
from tests.routers import PATIENCE_S
from tests.unit.test_job_fields import CLAIMED

MIB = 1024 * 1024
ORG = OrgId("org")


class Shard:
    """A shard whose claims return these jobs as soon as it answers."""

    def __init__(self, name: str, jobs: Sequence[Claimed] = ()) -> None:
        self.name = ShardName(name)
        self.answers = asyncio.Event()
        # The bytes that each claim has asked for.
        self.claims: list[int] = []
        self.claimed = asyncio.Event()
        self._jobs = list(jobs)
        room = SimpleNamespace(gives=True)
        self.handle = cast("ShardHandle", SimpleNamespace(store=self, room=room))

    async def claim(self, org: OrgId, queues: Sequence[QueueName], *, bytes_max: int, **_: object) -> ClaimResult:
        del org, queues
        self.claims.append(bytes_max)
        self.claimed.set()
        await self.answers.wait()
        return ClaimResult(b"", self._jobs)


class Stream:
    """A receiver that reads everything without delay."""

    takes_once = False

    def __init__(self, buffer: Buffer, org: str) -> None:
        self.account = Account(buffer, org=org, peer=f"connection of {org}")

    def receive(self, jobs: Delivery) -> None:
        self.account.give_back(jobs.bytes)

    def is_full(self) -> bool:
        return False

    async def reserve(self, count: int, shard: ShardName) -> None:
        await self.account.reserve(count, patiently=True, shard=shard)


def _no_store(org: OrgId) -> Store:
    raise AssertionError(f"no limit counts for org {org!r}")


def claim(buffer: Buffer, org: str, *shards: Shard, credit: int = 100) -> asyncio.Task[bool]:
    stream = Stream(buffer, org)
    consumer = Consumer(
        cast("Fleet", SimpleNamespace(starts=Starts(_no_store, lambda: None))),
        stream,
        stream.account,
        org=OrgId(org),
        queues=[QUEUE],
        worker="w",
        window_us=MINUTE_US,
        credit=credit,
    )
    return asyncio.create_task(consumer.claim([shard.handle for shard in shards]))


async def test_claims_on_a_shard_that_does_not_answer_leave_room_for_other_shards_and_for_enqueues() -> None:
    buffer = Buffer(192 * MIB)
    hung, healthy = Shard("hung"), Shard("healthy")
    healthy.answers.set()
    stuck = [claim(buffer, f"org {at}", hung) for at in range(200)]
    await asyncio.wait_for(hung.claimed.wait(), PATIENCE_S)
    assert buffer.held <= buffer.bytes_max // 2
    # There is also room for claims on another shard, even of the orgs whose claims wait here.
    for org in ("org 0", "org 199", "another"):
        assert await asyncio.wait_for(claim(buffer, org, healthy), PATIENCE_S) is False
        enqueue = Account(buffer, org=org, peer="producer")
        await asyncio.wait_for(enqueue.reserve(16 * MIB), PATIENCE_S)
        enqueue.close()
    # No wake-up is lost: when the shard answers, each waiting claim has its turn.
    assert len(hung.claims) < len(stuck)
    hung.answers.set()
    await asyncio.wait_for(asyncio.gather(*stuck), PATIENCE_S)
    assert len(hung.claims) == len(stuck)
    assert (buffer.held, buffer.claims.taken) == (0, 0)


async def test_two_shards_that_do_not_answer_leave_room_for_a_third() -> None:
    buffer = Buffer(192 * MIB)
    hung, healthy = [Shard("first"), Shard("second")], Shard("healthy")
    healthy.answers.set()
    stuck = [claim(buffer, f"org {at}", shard) for at in range(200) for shard in hung]
    for shard in hung:
        await asyncio.wait_for(shard.claimed.wait(), PATIENCE_S)
    assert await asyncio.wait_for(claim(buffer, "another", healthy, credit=1000), PATIENCE_S) is False
    for shard in hung:
        shard.answers.set()
    await asyncio.wait_for(asyncio.gather(*stuck), PATIENCE_S)
    assert (buffer.held, buffer.claims.taken) == (0, 0)


async def test_small_claims_on_a_busy_shard_do_not_keep_a_large_one_waiting() -> None:
    """Small claims end one after another, and many other small claims wait for the memory that the ended claims
    free."""
    buffer = Buffer(64 * MIB)
    shard = ShardName("busy")

    def account(org: str) -> Account:
        return Account(buffer, org=org, peer=f"connection of {org}")

    small = [account("busy")]
    while small[-1].take_in_turn(bytes_most(1), shard=shard):
        small.append(account("busy"))
    behind = [asyncio.create_task(account("busy").reserve(bytes_most(1), shard=shard)) for _ in range(100)]
    await asyncio.sleep(0)
    large = asyncio.create_task(account("large").reserve(bytes_most(1000), shard=shard))
    await asyncio.sleep(0)
    for one in small[:8]:
        one.close()
    await asyncio.wait_for(large, PATIENCE_S)
    assert not behind[-1].done()
    for task in behind:
        task.cancel()
    await asyncio.wait(behind)


async def test_a_claim_whose_call_has_ended_leaves_nothing_reserved() -> None:
    buffer = Buffer(64 * MIB)
    account = Account(buffer, org=ORG, peer="peer")
    await account.reserve(bytes_most(1), shard=ShardName("shard"))
    account.close()
    account.give_back(bytes_most(1), shard=ShardName("shard"))
    assert (buffer.held, buffer.claims.taken) == (0, 0)


async def test_jobs_that_have_come_do_not_wait_for_a_shard_without_room() -> None:
    buffer = Buffer(64 * MIB)
    healthy, hung = Shard("healthy", [CLAIMED]), Shard("hung")
    healthy.answers.set()
    stuck = [claim(buffer, f"org {at}", hung) for at in range(20)]
    await asyncio.wait_for(hung.claimed.wait(), PATIENCE_S)
    begun = len(hung.claims)
    assert await asyncio.wait_for(claim(buffer, ORG, healthy, hung), PATIENCE_S) is True
    assert len(hung.claims) == begun
    hung.answers.set()
    await asyncio.wait_for(asyncio.gather(*stuck), PATIENCE_S)
    assert (buffer.held, buffer.claims.taken) == (0, 0)


async def test_no_claim_asks_a_second_shard_for_the_last_bytes_of_an_answer() -> None:
    buffer = Buffer(64 * MIB)
    left = CLAIM_BYTES_MIN - 1
    large = CLAIMED._replace(payload=bytes(CLAIM_BYTES_MAX - left), attributes=None, checkpoint=None)
    first, second = Shard("first", [large]), Shard("second")
    first.answers.set()
    assert await asyncio.wait_for(claim(buffer, ORG, first, second), PATIENCE_S) is True
    assert first.claims == [CLAIM_BYTES_MAX]
    assert second.claims == []
