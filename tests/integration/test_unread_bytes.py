"""Thousands of consumers never read what they get. The router reserves memory before it leases jobs, so it never has to
give back a leased job for lack of memory. Consumers that read are served."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import cast

from router.buffer import Account, Buffer
from router.codec.fast_write import Delivery
from router.fleet.fleet import Fleet
from router.fleet.handover import Handovers
from router.fleet.siblings.siblings import Siblings
from router.fleet.starts import Starts
from router.fleet.wait_room import WaitRoom
from router.services.consumer import Consumer
from shard.queue import statements
from shard.queue.claim import bytes_most
from shard.queue.doorbell import Doorbell
from shard.queue.store import Store
from shard.vocabulary import OrgId, ShardName
from tests.jobs import HOUR_US, QUEUE, some_jobs
from tests.pools import no_pools
from tests.recorder import Recorder
from tests.routers import PATIENCE_S

CONSUMERS = 5_000
BUFFER_BYTES = 64 * 1024 * 1024
NEVER_S = 3600.0


class _Silent:
    """A doorbell that nobody hears."""

    def ring(self, numbers: object, *, lease_ended: bool = False) -> None:
        del numbers, lease_ended


class Reader:
    """A receiver that keeps its jobs until `read` is called, like a stream whose client does not read."""

    def __init__(self, account: Account, *, reads: bool) -> None:
        self.account = account
        self.jobs = 0
        self.unread = 0
        self.got = asyncio.Event()
        self._reads = reads

    @property
    def takes_once(self) -> bool:
        return False

    def receive(self, jobs: Delivery) -> None:
        self.jobs += len(jobs.ids)
        self.unread += jobs.bytes
        self.got.set()
        if self._reads:
            self.read()

    def read(self) -> None:
        self.account.give_back(self.unread)
        self.unread = 0

    def is_full(self) -> bool:
        return False

    async def reserve(self, count: int, shard: ShardName) -> None:
        await self.account.reserve(count, patiently=True, shard=shard)


class Room:
    """The wait room of one shard, and the consumers that wait in it."""

    def __init__(self, database: Recorder, bytes_max: int = BUFFER_BYTES) -> None:
        self.store = Store(database)
        pools, ready_orgs = no_pools(self.store)
        self.room = WaitRoom(self.store, cast("Doorbell", _Silent()), pools, ready_orgs, sweep_s=NEVER_S)
        self.buffer = Buffer(bytes_max)
        siblings = Siblings(self.buffer, consumers=lambda _: None, ready=list)
        self.starts = Starts(lambda _: self.store, lambda: None)
        self.handovers = Handovers(self.store, self.room, pools, siblings, self.starts)
        self._member = SimpleNamespace(store=self.store, room=self.room)
        self._tasks = [asyncio.create_task(self.room.run())]
        self._serving: dict[Reader, tuple[Consumer, asyncio.Task[None]]] = {}

    def shards_to_claim_from(self, org: OrgId) -> list[object]:
        del org
        return [self._member]

    def consumer(self, org: OrgId, *, peer: str, credit: int, reads: bool) -> Reader:
        account = Account(self.buffer, org=org, peer=peer)
        reader = Reader(account, reads=reads)
        consumer = Consumer(
            cast("Fleet", self), reader, account, org=org, queues=[QUEUE], worker=peer, window_us=HOUR_US, credit=credit
        )
        task = asyncio.create_task(consumer.serve())
        self._tasks.append(task)
        self._serving[reader] = consumer, task
        return reader

    def end_consumer(self, reader: Reader) -> None:
        consumer, task = self._serving.pop(reader)
        task.cancel()
        consumer.close()

    async def enqueue(self, org: OrgId, count: int, payload: bytes) -> None:
        jobs = some_jobs(org, count)
        jobs.payloads = [payload] * count
        handover = await self.handovers.offer(jobs)
        duplicates = await self.store.enqueue(jobs, handover)
        self.room.stored(jobs, duplicates, handover)

    async def end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.store.finish()


async def settled(readers: Sequence[Reader]) -> None:
    """Returns when the readers no longer get jobs."""
    before = -1
    while before != (now := sum(reader.jobs for reader in readers)):
        before = now
        await asyncio.sleep(0.2)


async def test_consumers_that_never_read_fill_their_share_and_cause_no_releases(
    recorder: Recorder, org: OrgId, other_org: OrgId
) -> None:
    field = Room(recorder)
    for _ in range(8):
        jobs = some_jobs(org, 15)
        jobs.payloads = [bytes(1024 * 1024)] * 15
        await field.store.enqueue(jobs)
    try:
        unread = [field.consumer(org, peer=f"peer-{at % 10}", credit=100, reads=False) for at in range(CONSUMERS)]
        busy = field.consumer(other_org, peer="busy", credit=1_000, reads=True)
        await asyncio.wait_for(unread[0].got.wait(), PATIENCE_S)
        for _ in range(50):
            busy.got.clear()
            await field.enqueue(other_org, 1, b"small")
            await asyncio.wait_for(busy.got.wait(), PATIENCE_S)
        await settled(unread)
        held = sum(reader.unread for reader in unread)
        assert held == field.buffer.held, "exactly what they have not read"
        # An org may use as much memory as it leaves free (shard/fair_quota.py). So an org that is alone may use half of
        # the memory.
        assert abs(held - BUFFER_BYTES // 2) <= bytes_most(100)
        assert busy.jobs == 50
        assert recorder.count(statements.GIVE_BACK) == 0
        # A consumer that waits for room in the memory does not claim again and again.
        claims = recorder.count(statements.CLAIM)
        for _ in range(50):
            busy.got.clear()
            await field.enqueue(other_org, 1, b"small")
            await asyncio.wait_for(busy.got.wait(), PATIENCE_S)
        assert recorder.count(statements.CLAIM) - claims <= 50
        assert recorder.count(statements.GIVE_BACK) == 0
    finally:
        await field.end()


async def test_room_that_comes_free_goes_to_the_next_that_waits(recorder: Recorder, org: OrgId) -> None:
    """When consumers read, memory becomes free, and all jobs come without a sweep, so no wake-up is lost. The jobs are
    so large that a claim locks more rows than it leases. The claims run at the same time."""
    field = Room(recorder)
    for _ in range(6):
        jobs = some_jobs(org, 15)
        jobs.payloads = [bytes(1024 * 1024)] * 15
        await field.store.enqueue(jobs)
    try:
        readers = [field.consumer(org, peer=f"peer-{at % 10}", credit=1, reads=False) for at in range(90)]
        async with asyncio.timeout(PATIENCE_S):
            while sum(reader.jobs for reader in readers) < 90:
                for reader in readers:
                    reader.read()
                # Wait until a claim has brought more jobs.
                await asyncio.sleep(0.01)
        for reader in readers:
            reader.read()
        assert recorder.count(statements.GIVE_BACK) == 0
        assert field.buffer.held == 0
    finally:
        await field.end()
