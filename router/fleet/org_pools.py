"""The pools of this process (router/fleet/org_pool.py): one for each set of queues that consumers take for all orgs.
Also the watchers of all orgs: they take no jobs, and only want to know when a queue of any org may have ready jobs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from router.fair.schedule import WEIGHT_DEFAULT
from router.fleet.org_pool import OrgPool, PoolConsumer
from router.fleet.shard_handle import ShardHandle
from router.fleet.shares import Share
from router.fleet.starts import Starts
from router.fleet.waiter import Watcher
from shard.admin.weights import Weights
from shard.queue.store import Store
from shard.vocabulary import Lease, OrgId, QueueName, ShardName

# How long a pool without consumers is kept at most. Such a pool is kept because streams end from time to time, and then
# their consumers connect again.
_KEPT_S = 60.0


class OrgPools:
    """`shards` returns the shards, and `reads` the shards that may have jobs of an org. `starts`: the limits of starts.
    Call `start` before consumers enter."""

    def __init__(
        self,
        shards: Callable[[], Mapping[ShardName, ShardHandle]],
        reads: Callable[[OrgId], Sequence[ShardName]],
        starts: Starts,
    ) -> None:
        self._starts = starts
        self._shards = shards
        self._reads = reads
        self._group: asyncio.TaskGroup | None = None
        self._pools: dict[tuple[QueueName, ...], OrgPool] = {}
        self._by_queue: dict[QueueName, list[OrgPool]] = {}
        self._watchers: dict[QueueName, set[Watcher]] = {}
        self.weights = Weights(0, {})

    def start(self, group: asyncio.TaskGroup) -> None:
        """Makes pools run their tasks in this group from now on."""
        self._group = group

    # ── Consumers ────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def any(self) -> bool:
        """Whether anybody takes jobs of all orgs."""
        return bool(self._pools)

    @property
    def queues(self) -> list[QueueName]:
        """The queues that are taken or watched for all orgs."""
        return list(self._by_queue | self._watchers)

    def serves(self, queue: QueueName) -> bool:
        """Returns whether somebody takes or watches this queue for all orgs."""
        return queue in self._by_queue or queue in self._watchers

    def watch(self, queue: QueueName, watcher: Watcher) -> None:
        """From now on, wakes this watcher whenever any org may have ready jobs in this queue."""
        self._watchers.setdefault(queue, set()).add(watcher)
        for member in self._shards().values():
            member.ready_orgs.serve([queue])

    def unwatch(self, queue: QueueName, watcher: Watcher) -> None:
        watchers = self._watchers.get(queue)
        if watchers is not None:
            watchers.discard(watcher)
            if not watchers:
                del self._watchers[queue]
                self._leave_unless_served(queue)

    def _leave_unless_served(self, queue: QueueName) -> None:
        if not self.serves(queue):
            for member in self._shards().values():
                member.ready_orgs.leave([queue])

    def enter(self, consumer: PoolConsumer) -> OrgPool:
        """Adds a consumer to the pool of its queues, and returns the pool."""
        key = tuple(sorted(consumer.queues))
        pool = self._pools.get(key)
        if pool is None:
            assert self._group is not None
            pool = self._pools[key] = OrgPool(
                key,
                shards=self._shards,
                reads=self._reads,
                weight_of=lambda org: self.weights.of.get(org, WEIGHT_DEFAULT),
                starts=self._starts,
            )
            for queue in key:
                self._by_queue.setdefault(queue, []).append(pool)
            task = self._group.create_task(pool.run())
            asyncio.get_running_loop().call_later(_KEPT_S, self._end_unused, key, task)
        for member in self._shards().values():
            member.ready_orgs.serve(key)
            member.store.consumers_seen.note(None, key, consumer.kinds)
        pool.enter(consumer)
        return pool

    def _end_unused(self, key: tuple[QueueName, ...], task: asyncio.Task[None]) -> None:
        pool = self._pools[key]
        if pool.consumers and not task.done():
            asyncio.get_running_loop().call_later(_KEPT_S, self._end_unused, key, task)
            return
        task.cancel()
        del self._pools[key]
        for queue in key:
            self._by_queue[queue].remove(pool)
            if not self._by_queue[queue]:
                del self._by_queue[queue]
                self._leave_unless_served(queue)

    def waiters(self, queue: QueueName) -> Iterator[PoolConsumer]:
        """Returns the consumers that take this queue for all orgs."""
        for pool in self._by_queue.get(queue, ()):
            yield from pool.consumers

    def note(self, store: Store) -> None:
        """Records on a shard that all consumers of the pools were seen (shard/queue/consumers_seen.py)."""
        for pool in self._pools.values():
            for consumer in pool.consumers:
                store.consumers_seen.note(None, consumer.queues, consumer.kinds)

    # ── Jobs ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def found(self, shard: ShardName, org: OrgId, queue: QueueName) -> None:
        """Tells the pools and watchers of this queue that the org may have ready jobs in it on the shard."""
        for pool in self._by_queue.get(queue, ()):
            pool.found(shard, org, queue)
        for watcher in self._watchers.get(queue, ()):
            watcher.wake()

    def room(self, queue: QueueName, jobs: int) -> int:
        """Returns for how many jobs of this queue the consumers that take jobs of all orgs have room. Each pool stops
        counting at `jobs`."""
        return sum(pool.room(jobs) for pool in self._by_queue.get(queue, ()))

    def deal(self, org: OrgId, queue: QueueName, sizes: Sequence[int]) -> list[Share]:
        """Keeps places for new jobs with payloads of these sizes: see router.fleet.shares."""
        shares: list[Share] = []
        dealt = 0
        for pool in self._by_queue.get(queue, ()):
            if dealt < len(sizes):
                more = pool.deal(org, sizes[dealt:])
                dealt += sum(share.count for share in more)
                shares += more
        return shares

    def ended(self, leases: Iterable[Lease]) -> None:
        """Tells the pools that these leases have ended. Ignores leases that are not of a pool."""
        now_s = asyncio.get_running_loop().time()
        for lease in leases:
            for pool in self._pools.values():
                pool.schedule.ended(lease, now_s=now_s)

    def extended(self, leases: Iterable[Lease], *, window_us: int) -> None:
        """Tells the pools that these leases last for `window_us` from now on. Ignores leases that are not of a pool."""
        until_s = asyncio.get_running_loop().time() + window_us / 1_000_000
        for lease in leases:
            for pool in self._pools.values():
                pool.schedule.extended(lease, until_s=until_s)

    def lost(self, shard: ShardName) -> None:
        """Call this when a shard is not used any more, or does not answer. Tells this to all pools."""
        for pool in self._pools.values():
            pool.lost(shard)

    def wake(self) -> None:
        """Wakes all pools and watchers. Call this when the shards or the placements of orgs have changed."""
        for pool in self._pools.values():
            pool.wake()
        for watchers in self._watchers.values():
            for watcher in watchers:
                watcher.wake()

    # ── Shares ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def reweigh(self, weights: Weights) -> None:
        """Puts these weights in force. An org that is not named has the weight 1."""
        self.weights = weights
        for pool in self._pools.values():
            pool.schedule.reweigh()
            pool.wake()

    def ahead(self, org: OrgId, queue: QueueName) -> tuple[float, float] | None:
        """Returns how many seconds the tag of an org is above the floor of virtual time, and the org's weight. Returns
        None if the org has no ready jobs, or if its tag is not above the floor."""
        for pool in self._by_queue.get(queue, ()):
            lead_s = pool.schedule.lead(org)
            if pool.schedule.is_ready(org) and lead_s > 0:
                return lead_s, pool.schedule.weight(org)
        return None
