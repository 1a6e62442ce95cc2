"""Work continues while slots move between two shards, orgs get their own slots, and balancers die. Each job is stored
once and acked once, even if the placements that routers have are old (I1, I2, I3, I5, I6). The order of events depends
on a seed, and on the timing of the databases."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

import pytest

from shard.errors import NotOwned, ShardUnavailable
from shard.lease_token import parse_token, token
from shard.placement import catalog, pins
from shard.placement.catalog import Catalog
from shard.placement.pins import OnShard
from shard.placement.slots import slot_of
from shard.queue.settle import Nack, Settlement
from shard.queue.store import Store
from shard.vocabulary import Answer, JobId, NewJobs, OrgId, QueueName, ShardName
from tests.effort import luck_of, trials
from tests.jobs import HOUR_US, job_id
from tests.pair import A, B, Died, Fate, Pair, mortal_mover, open_pair

ORGS, QUEUES, KEYS = 3, ("a", "b"), 8
MOVES = trials(4, thorough=20)
# Producers add no new jobs while this many jobs are open. Otherwise, on a slow machine, the only consumer would fall
# further and further behind.
OPEN_MAX = 200
PATIENCE_S = 60.0


@pytest.fixture
async def pair(fresh_dsn: str, spare_dsn: str) -> AsyncGenerator[Pair, None]:
    async with open_pair(fresh_dsn, spare_dsn) as opened:
        yield opened


@dataclass(kw_only=True)
class Router:
    """Does what a router does, with a copy of the catalog that may be old."""

    pair: Pair
    known: Catalog
    stores: dict[ShardName, Store]
    refused: int = 0

    async def learn(self) -> None:
        self.known = await catalog.read(self.pair.catalog, self.known)

    async def enqueue(self, jobs: NewJobs) -> dict[int, JobId]:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                placement = self.known.placement(jobs.org)
                (writer,) = placement.writes
                found: dict[int, JobId] = {}
                for former in placement.former:
                    if former.shard != writer:
                        found.update(await self.stores[former.shard].known(jobs))
                rest = [at for at in range(len(jobs)) if at not in found]
                try:
                    late = await self.stores[writer].enqueue(jobs.only(rest), epoch=placement.epoch)
                except NotOwned:
                    self.refused += 1
                    await self.learn()
                else:
                    return found | {rest[at]: name for at, name in late.items()}


@dataclass(kw_only=True)
class Told:
    """The answers that producers and consumers got."""

    # Every job that an enqueue reported as stored, with the number of its acks.
    stored: Counter[tuple[OrgId, str]] = field(default_factory=Counter[tuple[OrgId, str]])
    acked: Counter[tuple[OrgId, str]] = field(default_factory=Counter[tuple[OrgId, str]])
    # All job ids that were ever answered for a dedup key.
    keyed: dict[tuple[OrgId, str, str], set[str]] = field(default_factory=dict[tuple[OrgId, str, str], set[str]])


async def produce(router: Router, orgs: list[OrgId], told: Told, luck: random.Random, over: asyncio.Event) -> None:
    """Enqueues new jobs while fewer than OPEN_MAX are open. Repeats earlier jobs and keys through this router or
    another one, sometimes after a long time."""
    sent: list[NewJobs] = []
    while not over.is_set():
        full = len(told.stored) - len(told.acked) > OPEN_MAX
        if sent and (full or luck.random() < 0.5):
            jobs = luck.choice(sent)
        else:
            jobs = NewJobs(org=luck.choice(orgs))
            for at in range(luck.randint(1, 4)):
                jobs.ids.append(job_id())
                jobs.queues.append(QueueName(luck.choice(QUEUES)))
                jobs.kinds.append("k")
                jobs.payloads.append(b"x")
                if luck.random() < 0.4:
                    jobs.dedup_keys[at] = f"key-{luck.randrange(KEYS)}"
                    jobs.dedup_window_us[at] = 24 * HOUR_US
            sent.append(jobs)
        known = await router.enqueue(jobs)
        for at, name in enumerate(jobs.ids):
            if at not in known:
                told.stored[jobs.org, name] += 1
            if at in jobs.dedup_keys:
                key = jobs.org, jobs.queues[at], jobs.dedup_keys[at]
                told.keyed.setdefault(key, set()).add(known.get(at, JobId(name)))


async def consume(router: Router, org: OrgId, told: Told, luck: random.Random) -> int:
    """Claims on every shard that may have jobs. Ends each lease in some way, or leaves it to expire."""
    claimed = 0
    for shard in router.known.placement(org).reads:
        store = router.stores[shard]
        queues = [QueueName(queue) for queue in QUEUES]
        prefix, jobs, *_ = await store.claim(
            org, queues, max_jobs=5, window_us=luck.choice((30_000, HOUR_US)), worker="w"
        )
        claimed += len(jobs)
        for job in jobs:
            _, lease = parse_token(token(prefix, job.id))
            how = luck.random()
            if how < 0.6 or job.attempt > 10:
                if await store.settle(Settlement.ack(org, [lease])) == [Answer.OK]:
                    told.acked[org, job.id] += 1
            elif how < 0.75:
                await store.settle(Settlement.nack(org, [Nack(lease=lease, retry_after_us=luck.choice((0, 50_000)))]))
            elif how < 0.85:
                await store.settle(Settlement.release(org, [lease]))
            elif job.deadline - job.leased_at > 1_000_000:
                await store.settle(Settlement.nack(org, [Nack(lease=lease, retry_after_us=0)]))
    return claimed


async def move_about(pair: Pair, orgs: list[OrgId], luck: random.Random) -> None:
    for turn in range(MOVES):
        target = (B, A)[turn % 2]
        # All orgs but the last are pinned, one after another. The own slot of an org then moves independently of its
        # hash slot.
        pinned = orgs[turn % len(orgs)]
        if pinned is not orgs[-1]:
            await pins.pin(pair.catalog, pinned, OnShard(target))
        known = await pair.known()
        slots = {known.slot(org) for org in orgs}.union(map(slot_of, orgs))
        move = await catalog.begin_move(pair.catalog, known, slots, target=target)
        assert move is not None
        while any(each.epoch == move.epoch for each in await catalog.moves(pair.catalog)):
            fate = Fate(at=luck.randint(1, 22), how=luck.choice(("before", "rolled back", "unheard", "cancelled")))
            async with mortal_mover(pair, move, fate) as mortal, asyncio.timeout(PATIENCE_S):
                others = [asyncio.create_task(pair.mover(move).step()) for _ in range(luck.randint(0, 1))]
                with contextlib.suppress(Died, ShardUnavailable, asyncio.CancelledError):
                    await asyncio.create_task(mortal.finish())
                await asyncio.gather(*others)
            await pair.balance()


@pytest.mark.thorough
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(trials(1, thorough=10)))
async def test_each_job_is_stored_once_and_acked_once_while_slots_move(pair: Pair, org: OrgId, seed: int) -> None:
    luck = luck_of(str(seed))
    orgs = [OrgId(f"{org}-{n}") for n in range(ORGS)]
    assert len(set(map(slot_of, orgs))) == ORGS
    told = Told()
    over = asyncio.Event()
    stores = {shard: pair.store(shard) for shard in (A, B)}
    routers = [Router(pair=pair, known=await pair.known(), stores=dict(stores)) for _ in range(3)]
    # Two routers read the catalog now and then. The third one reads it only when it is refused.
    *current, late = routers

    async def keep_consuming() -> None:
        while not over.is_set():
            router = luck.choice(current)
            await router.learn()
            await consume(router, luck.choice(orgs), told, luck)

    async with asyncio.TaskGroup() as group:
        for router in routers:
            group.create_task(produce(router, orgs, told, luck, over))
        group.create_task(keep_consuming())
        try:
            await move_about(pair, orgs, luck)
        finally:
            over.set()
    assert late.refused
    # Finishes all remaining jobs, including the leased ones.
    left = {job for job in told.stored if not told.acked[job]}
    await current[0].learn()
    async with asyncio.timeout(PATIENCE_S):
        while left:
            for one in orgs:
                await consume(current[0], one, told, luck)
            for store in stores.values():
                await store.sweep()
            left = {job for job in told.stored if not told.acked[job]}
    assert set(told.stored.values()) == {1}
    assert told.acked == told.stored
    assert all(len(names) == 1 for names in told.keyed.values()), told.keyed
    accepted: Counter[str] = Counter()
    for books in pair.books.values():
        for entry in await books.check():
            assert entry.balanced
            accepted[entry.org] += entry.accepted
    assert accepted == Counter(one for one, _ in told.stored)
    print(f"{len(told.stored)} jobs, {sum(router.refused for router in routers)} enqueues refused")
