"""Decides which new jobs of one shard are handed over, and to which waiting consumers of this process or of a sibling.
The insert that stores such a job also leases it to its consumer, so that no claim is needed
(docs/decisions/0012-an-enqueue-leases-jobs-to-those-who-wait.md)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from router.codec import fast_write
from router.codec.fast_write import Delivery
from router.fleet.all_orgs import AllOrgs
from router.fleet.shares import Share, deal
from router.fleet.siblings.asks import Promise
from router.fleet.siblings.siblings import Siblings
from router.fleet.starts import Permit, Starts
from router.fleet.wait_room import WaitRoom
from shard.lease_token import lease_of
from shard.queue.pending_enqueue import Handed, Handover, Taker
from shard.queue.store import Store
from shard.vocabulary import PRIORITY_DEFAULT, Lease, NewJobs, OrgId, QueueName

# Jobs with these columns are not handed over, but claimed. The first four columns set times that an insert with a lease
# does not look at. The last two columns are dedup keys: jobs with these keys are often stored already, and then they
# are not leased.
_CLAIMED_COLUMNS = ("run_at_us", "delay_us", "expires_at_us", "max_runtimes_us", "dedup_keys", "live_keys")
# Jobs with larger payloads are not handed over either.
_PAYLOAD_BYTES_MAX = 16 * 1024


class Handovers:
    """Finds consumers for the new jobs of one shard."""

    def __init__(self, store: Store, room: WaitRoom, pools: AllOrgs, siblings: Siblings, starts: Starts) -> None:
        self.store = store
        self._room = room
        self._pools = pools
        self._siblings = siblings
        self._starts = starts

    def deal(self, org: OrgId, queue: QueueName, sizes: Sequence[int]) -> list[Share]:
        """Keeps places for jobs with payloads of these sizes at consumers of this process."""
        return deal(self._room.queue(org, queue), org, sizes) if self._room.gives else []

    async def offer(self, jobs: NewJobs) -> Handover | None:
        """Chooses waiting consumers for new jobs. Returns None if no consumer can take any of these jobs. Offered jobs
        count against the consumers' credit until the handover is done.

        Consumers of this process come first: those of the org, then those of all orgs. Siblings are asked only if these
        consumers are too few. If a limit of starts applies to a queue, its jobs are offered only to consumers of this
        process, and at most as many jobs as this process has tokens for. All other jobs of the queue are claimed. If a
        limit of jobs in flight applies to a queue, all its jobs are claimed."""
        if self._room.is_empty and not self._pools.any and not self._siblings.any_ready():
            return None
        dealt: list[tuple[Share, Sequence[int]]] = []
        permits: list[tuple[Permit, Sequence[int]]] = []
        promises: list[Promise] = []
        try:
            left = self._take(jobs, dealt, permits)
            if left and self._siblings.any_ready():
                promises = await self._siblings.ask(self.store.name, jobs, left)
        except BaseException:
            for share, _ in dealt:
                share.end(None)
            for permit, positions in permits:
                permit.put_back(len(positions))
            raise
        takers: dict[int, Taker] = {}
        for share, positions in dealt:
            takers.update(dict.fromkeys(positions, share.taker))
        for promise in promises:
            for taker, positions in promise.takers:
                takers.update(dict.fromkeys(positions, taker))
        charged: list[tuple[Permit, Sequence[int]]] = []
        for permit, positions in permits:
            offered = [at for at in positions if at in takers]
            permit.put_back(len(positions) - len(offered))
            charged.append((permit, offered))
        if not takers:
            return None
        return Handover(
            takers=takers,
            done=lambda handed: self._end(jobs, dealt, promises, charged, handed),
            until_s=min((promise.until_s for promise in promises), default=math.inf),
        )

    def _take(
        self,
        jobs: NewJobs,
        dealt: list[tuple[Share, Sequence[int]]],
        permits: list[tuple[Permit, Sequence[int]]],
    ) -> dict[QueueName, Sequence[int]]:
        """Takes places at consumers of this process, and adds them to `dealt`; takes tokens, and adds them to
        `permits`. Returns for each queue the positions of those jobs for which siblings may have places. If this raises
        an error, the caller gives back what was added. Raises ShardUnavailable."""
        left: dict[QueueName, Sequence[int]] = {}
        positions: Sequence[int]
        for queue, positions in _by_queue(jobs, _handed_positions(jobs)).items():
            if quarantined := self.store.quarantine.kinds(jobs.org, queue):
                # Leave jobs of quarantined kinds to claims, which set them aside.
                positions = [at for at in positions if jobs.kinds[at] not in quarantined]
            permit = self._starts.take(jobs.org, queue, len(positions))
            if permit is not None:
                positions = positions[: permit.jobs]
                permits.append((permit, positions))
            start = 0
            for share in self.deal(jobs.org, queue, jobs.sizes(positions)):
                dealt.append((share, positions[start : start + share.count]))
                start += share.count
            if start < len(positions) and self._pools.serves(queue) and self._room.gives:
                for share in self._pools.deal(jobs.org, queue, jobs.sizes(positions[start:])):
                    dealt.append((share, positions[start : start + share.count]))
                    start += share.count
            awaited = self._room.queue(jobs.org, queue)
            # Jobs that need tokens are not offered to siblings: if a sibling's consumer does not get a job, the sibling
            # releases the job, and the job's token would be lost.
            if permit is None and start < len(positions) and (awaited is None or not awaited.backlog):
                left[queue] = positions[start:]
        return left

    def _end(
        self,
        jobs: NewJobs,
        dealt: Sequence[tuple[Share, Sequence[int]]],
        promises: Sequence[Promise],
        permits: Sequence[tuple[Permit, Sequence[int]]],
        handed: Handed,
    ) -> None:
        """Gives each waiter the jobs that were leased to it, and gives back credit and tokens for the other jobs."""
        leased = set(handed.positions)
        certain = leased.union(handed.waiting)
        unsure: list[Lease] = []
        permit_of = {jobs.queues[positions[0]]: permit for permit, positions in permits if positions}

        def delivery(taker: Taker, positions: Sequence[int], *, names_org: bool = False) -> Delivery | None:
            got = [at for at in positions if at in leased]
            if not handed.sure:
                unsure.extend(lease_of(jobs.ids[at], taker.number) for at in positions if at not in certain)
            return fast_write.handed(self.store, jobs, got, taker, handed, names_org=names_org) if got else None

        for share, positions in dealt:
            got = delivery(share.taker, positions, names_org=share.waiter.all_orgs)
            permit = permit_of.get(jobs.queues[positions[0]])
            if got is not None and permit is not None:
                got = got._replace(on_unsent=permit.put_back)
            share.end(got)
        for promise in promises:
            promise.end([delivery(taker, positions) for taker, positions in promise.takers])
        for permit, positions in permits:
            permit.put_back(sum(at not in leased for at in positions))
        self.store.release_soon(jobs.org, unsure)


def _handed_positions(jobs: NewJobs) -> Sequence[int]:
    """Returns the positions of the jobs that may be handed over."""
    claimed: set[int] = set()
    for name in _CLAIMED_COLUMNS:
        claimed.update(getattr(jobs, name))
    # `jobs` is empty if all jobs of a call have been stored before.
    if max(map(len, jobs.payloads), default=0) > _PAYLOAD_BYTES_MAX:
        claimed.update(at for at, payload in enumerate(jobs.payloads) if len(payload) > _PAYLOAD_BYTES_MAX)
    return [at for at in range(len(jobs)) if at not in claimed] if claimed else range(len(jobs))


def _by_queue(jobs: NewJobs, positions: Sequence[int]) -> dict[QueueName, list[int]]:
    """Groups these positions by the queues of their jobs. Within a queue, the most urgent jobs come first."""
    by_queue: dict[QueueName, list[int]] = {}
    if not positions:
        return by_queue
    if len(set(jobs.queues)) == 1:
        by_queue[jobs.queues[0]] = list(positions)
    else:
        for at in positions:
            by_queue.setdefault(jobs.queues[at], []).append(at)
    if jobs.priorities:
        for of_queue in by_queue.values():
            of_queue.sort(key=lambda at: jobs.priorities.get(at, PRIORITY_DEFAULT))
    return by_queue
