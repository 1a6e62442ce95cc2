"""A pool: the consumers of this process that take the same queues for all orgs. The pool decides whose jobs its
consumers get (router/fair/schedule.py), claims these jobs, and measures how long each org keeps the consumers busy.

Each shard has its own claims: one at a time, for up to 64 orgs. So a shard that answers slowly delays only the orgs
that live on it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from router.buffer import Account
from router.codec import fast_write
from router.codec.fast_write import Delivery
from router.fair.schedule import Schedule
from router.fleet.shard_handle import ShardHandle
from router.fleet.shares import Share, deal
from router.fleet.starts import ClaimedPart, Held, Starts
from router.fleet.waiter import AwaitedQueue, Recipient
from shard.attempts import attempt
from shard.bounded import make_room
from shard.errors import ShardUnavailable
from shard.lease_token import lease_of
from shard.queue.claim import bytes_most
from shard.vocabulary import Lease, OrgId, QueueName, ShardName

_log = logging.getLogger(__name__)

# The most orgs and the most requests of one claim.
_ORGS_MAX = 64
_REQUESTS_MAX = 64
# At most this many ready orgs are remembered. A walk finds the other ready orgs when there is room again.
_READY_MAX = 100_000
# How long an org waits if this process has no memory for its jobs, or if its claim has failed.
_ASIDE_S = 0.1
# How long a limit of starts may hold jobs back before the pool looks at the limit again, because the limit may have
# changed.
_HELD_S_MAX = 1.0


class PoolConsumer(Recipient, Protocol):
    """A consumer that takes jobs of all orgs, as its pool sees it."""

    def take(self, jobs: Delivery) -> None:
        """Takes claimed jobs. The consumer's credit has been reduced already."""
        ...


@dataclass(slots=True)
class _Request:
    """Jobs of one org that are claimed for one consumer."""

    org: OrgId
    consumer: PoolConsumer
    # How many seconds the org was charged when these jobs were picked (router/fair/schedule.py).
    charged_s: float
    # The `start` of each job's Pick (router/fair/schedule.py).
    starts: list[float]
    # The queues that may have ready jobs. A queue is removed when a limit holds its jobs back.
    queues: set[QueueName]
    # The memory that is reserved for the jobs, and the account that holds it.
    account: Account | None = None
    reserved: int = 0
    # How many of the jobs were claimed.
    got: int = 0

    @property
    def jobs(self) -> int:
        return len(self.starts)


class OrgPool:
    """`shards` returns the shards, `reads` the shards that may have jobs of an org, and `weight_of` an org's weight.
    `starts`: the limits of starts."""

    def __init__(
        self,
        queues: Collection[QueueName],
        *,
        shards: Callable[[], Mapping[ShardName, ShardHandle]],
        reads: Callable[[OrgId], Sequence[ShardName]],
        weight_of: Callable[[OrgId], float],
        starts: Starts,
    ) -> None:
        self.queues = queues
        self._starts = starts
        self.schedule = Schedule(weight_of)
        self._shards = shards
        self._reads = reads
        # `_next_consumer` removes a consumer from `able` if the consumer has no credit, or if its client does not read.
        self._waiting = AwaitedQueue[PoolConsumer]()
        # The queues that may have ready jobs, by org and shard.
        self._ready: dict[OrgId, dict[ShardName, set[QueueName]]] = {}
        # How many failed or held-back claims of each org wait for another try. An org with such a claim has older jobs,
        # and these jobs come before its new ones.
        self._aside = Counter[OrgId]()
        # The shards on which a claim runs.
        self._claiming: set[ShardName] = set()
        # The most jobs that the next claim asks for, by org. Only orgs with a limit that holds jobs back have an entry.
        self._at_once: dict[OrgId, int] = {}
        self._woken = asyncio.Event()

    # ── Consumers ────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def consumers(self) -> Collection[PoolConsumer]:
        return self._waiting.waiters.keys()

    def enter(self, consumer: PoolConsumer) -> None:
        self._waiting.enter(consumer)
        self.able(consumer)

    def leave(self, consumer: PoolConsumer) -> None:
        self._waiting.leave(consumer)

    def able(self, consumer: PoolConsumer) -> None:
        """Call this when the consumer may have credit and room again."""
        if consumer.credit > 0 and consumer in self._waiting.waiters:
            self._waiting.has_credit(consumer)
            if self.schedule.ready_count:
                self.wake()

    def deal(self, org: OrgId, sizes: Sequence[int]) -> list[Share]:
        """Keeps places for new jobs of an org with payloads of these sizes, unless older jobs of the org may wait. If
        jobs of other orgs wait, only as many new jobs get places as the schedule would hand out before the jobs of the
        other orgs."""
        # `found` remembers at most _READY_MAX ready orgs. If that many are remembered, this org may have older jobs
        # although it is not among them.
        if self.schedule.is_ready(org) or org in self._aside or len(self._ready) >= _READY_MAX:
            return []
        return deal(self._waiting, org, sizes[: self.schedule.turns(org, at_most=len(sizes))])

    def room(self, jobs: int) -> int:
        """Returns for how many jobs the consumers have room. Stops counting at `jobs`."""
        room = 0
        for consumer in self._waiting.able:
            if room >= jobs:
                break
            if not consumer.full:
                room += consumer.credit
        return room

    # ── Leases ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def handed(self, jobs: Delivery, window_us: int) -> None:
        """Records jobs that an enqueue has leased to a consumer of the pool."""
        self._began(jobs.org, jobs.leases(), window_us, charged_s=None)

    def returned(self, jobs: Delivery) -> None:
        """Charges nothing for jobs that are released because they did not reach their consumer."""
        for lease in jobs.leases():
            self.schedule.returned(lease)

    def _began(self, org: OrgId, leases: Iterable[Lease], window_us: int, *, charged_s: float | None) -> None:
        now_s = asyncio.get_running_loop().time()
        until_s = now_s + window_us / 1_000_000
        for lease in leases:
            self.schedule.began(org, lease, now_s=now_s, until_s=until_s, charged_s=charged_s)

    # ── Ready jobs ───────────────────────────────────────────────────────────────────────────────────────────────────

    def found(self, shard: ShardName, org: OrgId, queue: QueueName) -> None:
        """Records that the org may have ready jobs in this queue of the shard, and wakes consumers."""
        by_shard = self._ready.get(org)
        if by_shard is None:
            if len(self._ready) >= _READY_MAX:
                return
            by_shard = self._ready[org] = {}
        by_shard.setdefault(shard, set()).add(queue)
        self.schedule.ready(org, shard)
        self.wake()

    def lost(self, shard: ShardName) -> None:
        """Forgets the ready jobs of a shard that does not answer. The jobs are found again when the shard answers."""
        for org, by_shard in list(self._ready.items()):
            by_shard.pop(shard, None)
            if not by_shard:
                del self._ready[org]
        self.schedule.drop_shard(shard)

    def _take_queues(self, org: OrgId, shard: ShardName) -> set[QueueName]:
        """Returns the queues of an org that may have ready jobs on a shard, and removes them from `_ready`."""
        by_shard = self._ready.get(org, {})
        queues = by_shard.pop(shard, set())
        if not by_shard:
            self._ready.pop(org, None)
        return queues

    def _is_found(self, org: OrgId, shard: ShardName) -> bool:
        return shard in self._ready.get(org, ())

    # ── Claims ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def wake(self) -> None:
        """Tries again to hand jobs out. Call this after a change that may have made this possible."""
        self._woken.set()

    async def run(self) -> None:
        """Hands jobs out until cancelled."""
        async with asyncio.TaskGroup() as group:

            async def hand_out() -> None:
                for shard, requests in self._pick().items():
                    self._claiming.add(shard)
                    claim = partial(self._claim, self._shards()[shard], requests)
                    group.create_task(attempt(f"claim jobs of all orgs on shard {shard!r}", claim))

            while True:
                await self._woken.wait()
                self._woken.clear()
                await attempt("hand out jobs of all orgs", hand_out)

    def _pick(self) -> dict[ShardName, list[_Request]]:
        """Decides whose jobs are claimed now, and for which consumers."""
        self.schedule.accrue(now_s=asyncio.get_running_loop().time())
        shards = {
            name
            for name, member in self._shards().items()
            if name not in self._claiming and member.up.is_set() and member.room.gives
        }
        picked: dict[ShardName, dict[tuple[OrgId, PoolConsumer], _Request]] = {}
        taken: dict[tuple[OrgId, ShardName], set[QueueName]] = {}
        orgs: dict[ShardName, set[OrgId]] = {}
        asked = Counter[tuple[OrgId, ShardName]]()
        try:
            while shards and (consumer := self._next_consumer()) is not None:
                pick = self.schedule.pick(shards)
                if pick is None:
                    break
                org, shard, charged_s, start = pick
                requests, here = picked.setdefault(shard, {}), orgs.setdefault(shard, set())
                full = len(requests) >= _REQUESTS_MAX or (len(here) >= _ORGS_MAX and org not in here)
                if full or shard not in self._reads(org):
                    self.schedule.unused(org, charged_s)
                    if full:
                        shards.discard(shard)
                    else:
                        # The org has moved to another shard. If this shard still has jobs of the org, they are strays.
                        self._take_queues(org, shard)
                        self.schedule.idle(org, shard)
                    continue
                if (org, shard) not in taken:
                    taken[org, shard] = self._take_queues(org, shard)
                here.add(org)
                consumer.keep_places(1)
                self._waiting.served(consumer)
                request = requests.get((org, consumer))
                if request is None:
                    request = requests[org, consumer] = _Request(org, consumer, 0.0, [], taken[org, shard])
                request.starts.append(start)
                request.charged_s += charged_s
                asked[org, shard] += 1
                if asked[org, shard] == self._at_once.get(org):
                    self.schedule.pass_over(org, shard)
        finally:
            for org, shard in asked:
                self.schedule.end_pass(org, shard)
        return {shard: affordable for shard, of in picked.items() if (affordable := self._reserve(shard, of.values()))}

    def _next_consumer(self) -> PoolConsumer | None:
        able = self._waiting.able
        while able:
            consumer = next(iter(able))
            if consumer.credit > 0 and not consumer.full:
                return consumer
            del able[consumer]
        return None

    def _reserve(self, shard: ShardName, requests: Iterable[_Request]) -> list[_Request]:
        """Reserves the memory that the jobs may take, before the jobs are leased. The memory belongs to the shares of
        the jobs' orgs. If an org's share has no room, the org's request waits for a moment, and the other requests
        continue."""
        reserved: list[_Request] = []
        for request in requests:
            size, account = bytes_most(request.jobs), request.consumer.account_of(request.org)
            if account.take_in_turn(size, shard=shard):
                request.account, request.reserved = account, size
                reserved.append(request)
            else:
                self._give_back(request)
                self._set_aside(request.org, shard, request.queues)
        return reserved

    def _give_back(self, request: _Request) -> None:
        """Gives back the credit and the charges of those picks for which no job came."""
        missing = request.jobs - request.got
        if missing:
            self.schedule.unused(request.org, request.charged_s * missing / request.jobs)
        request.consumer.free_places(missing)

    def _set_aside(
        self, org: OrgId, shard: ShardName, queues: Collection[QueueName], *, for_s: float = _ASIDE_S
    ) -> None:
        """Tries these queues of an org again later."""

        self._aside[org] += 1

        def again() -> None:
            self._aside[org] -= 1
            if not self._aside[org]:
                del self._aside[org]
            # If the shard is away or removed by now, its orgs are found again when the shard answers again. Until then
            # these orgs must not count as ready, because new jobs of an org that counts as ready are not handed over.
            member = self._shards().get(shard)
            if member is not None and member.up.is_set():
                for queue in queues:
                    self.found(shard, org, queue)

        if not self._is_found(org, shard):
            self.schedule.idle(org, shard)
        asyncio.get_running_loop().call_later(for_s, again)

    async def _claim(self, member: ShardHandle, requests: Sequence[_Request]) -> None:
        shard = member.name
        try:
            results = await asyncio.gather(
                *(self._lease(member, request) for request in requests), return_exceptions=True
            )
            self._claimed(member, requests, results)
        finally:
            self._claiming.discard(shard)
            for request in requests:
                if request.account is not None:
                    request.account.give_back(request.reserved, shard=shard)
            self.wake()

    async def _lease(self, member: ShardHandle, request: _Request) -> bool:
        """Leases the jobs of a request, and delivers them. Queues that a limit of starts holds back are tried again
        later. Returns whether there may be more jobs."""
        is_more = False
        for part in self._starts.split(request.org, list(request.queues)):
            queues, room = part.queues, request.jobs - request.got
            if room <= 0:
                return True
            try:
                claimed = await self._starts.claim(
                    member.store,
                    request.org,
                    part,
                    max_jobs=room,
                    window_us=request.consumer.window_us,
                    worker=request.consumer.worker,
                )
            except ShardUnavailable as error:
                if error.shard == member.name:
                    raise
                # The shard that has the org's buckets does not answer.
                claimed = Held(_ASIDE_S)
            if isinstance(claimed, Held):
                request.queues.difference_update(queues)
                self._set_aside(request.org, member.name, list(queues), for_s=min(claimed.for_s, _HELD_S_MAX))
                continue
            if claimed.result.jobs:
                self._deliver(member, request, claimed)
            if part.in_flight is not None and claimed.is_short:
                if await member.room.hold_if_full(request.org, queues, part.in_flight):
                    request.queues.difference_update(queues)
                else:
                    # Another request of the org may have removed these queues, because a limit of jobs in flight held
                    # their jobs back: add the queues again.
                    request.queues.update(queues)
            # If this claim has used up its permit, there may be more jobs, and the next permit may be larger.
            is_more = is_more or claimed.result.cut or (not claimed.is_short and claimed.max_jobs < room)
        return is_more or request.got == request.jobs

    def _claimed(
        self, member: ShardHandle, requests: Sequence[_Request], results: Sequence[bool | BaseException]
    ) -> None:
        """Gives back the credit and the charges of jobs that did not come, and records which orgs may have more
        jobs."""
        shard = member.name
        # Whether the queues of each org may have more jobs.
        more: dict[OrgId, bool] = {}
        away = False
        for request, result in zip(requests, results, strict=True):
            if isinstance(result, bool):
                more[request.org] = more.get(request.org, True) and result
            elif isinstance(result, ShardUnavailable):
                away = True
            else:
                _log.warning("could not claim jobs of org %r on shard %r: %s", request.org, shard, result)
                self._set_aside(request.org, shard, request.queues)
            self._give_back(request)
        if away:
            self.lost(shard)
            member.ready_orgs.walk_again()
        self._limit_next(requests)
        queues = {request.org: request.queues for request in requests}
        for org, is_more in more.items():
            if is_more and not away and self.schedule.ready_count < _ORGS_MAX:
                for queue in queues[org]:
                    self.found(shard, org, queue)
            elif not away:
                # If many orgs are ready, each claim takes few jobs of an org, and most orgs have no more jobs after the
                # claim. So probe first: a probe is cheaper than a claim that finds nothing.
                member.ready_orgs.emptied(org, queues[org])
            if not self._is_found(org, shard):
                self.schedule.idle(org, shard)

    def _limit_next(self, requests: Iterable[_Request]) -> None:
        """Decides how many jobs the next claim of each org asks for. A claim keeps a place for each job that it asks
        for, and new jobs of other orgs cannot get these places meanwhile. If a limit holds an org's jobs back, most of
        these places would stay empty. So the next claim of an org with a limit asks for twice as many jobs as this one
        got."""
        got = Counter[OrgId]()
        for request in requests:
            got[request.org] += request.got
        for org, jobs in got.items():
            self._at_once.pop(org, None)
            if self._starts.is_limited(org):
                make_room(self._at_once, _READY_MAX)
                self._at_once[org] = max(1, 2 * jobs)

    def _deliver(self, member: ShardHandle, request: _Request, claimed: ClaimedPart) -> None:
        result = claimed.result
        leases = [lease_of(job.id, job.lease) for job in result.jobs]
        charged_s = request.charged_s / request.jobs
        self._began(request.org, leases, request.consumer.window_us, charged_s=charged_s)
        delivery = fast_write.claimed(member.store, request.org, result.jobs, names_org=True)
        if claimed.put_back is not None:
            delivery = delivery._replace(on_unsent=claimed.put_back)
        request.got += len(result.jobs)
        self.schedule.served(request.starts[request.got - 1])
        request.consumer.account_of(request.org).hold(delivery.bytes)
        request.consumer.take(delivery)
