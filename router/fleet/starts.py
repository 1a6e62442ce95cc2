"""The limits that hold jobs back, as one router process enforces them: how many jobs may start in an interval
(docs/decisions/0049-starts-are-held-back.md), and how many may be leased at a time
(docs/decisions/0052-leases-in-flight-are-counted.md).

A limit of starts refuses nothing: it holds jobs back. A claim of a queue with such a limit first takes tokens. Then it
leases at most one job for each token, and puts back the tokens that it did not use. While there are no tokens, the
queue counts as a queue without due jobs.

A limit of jobs in flight is enforced by the claim itself, on the shard. This module only says which limits a claim must
obey.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from router.fleet.buckets import PAUSE_S, Bucket, Buckets
from shard.errors import NoAnswer, RowLocked, TooManyWaiting
from shard.limits import ALL_QUEUES, InFlightLimits, Limit, LimitTable, Measure
from shard.queue.claim import CLAIM_BYTES_MAX, ClaimResult
from shard.queue.store import Store
from shard.vocabulary import OrgId, QueueName

# A claim draws tokens at most this many times. It draws again if other claims have taken the tokens that it drew.
_TRIES_MAX = 20
# A bucket is asked again after this time, even if its next token comes later, because another process may give tokens
# back.
_HOLD_S_MAX = 3.0


@dataclass(frozen=True, slots=True)
class Permit:
    """Tokens for `jobs` starts. A job has started when it was leased and its consumer may have received it. The owner
    of the permit puts back the tokens of jobs that have not started. If the shard's answer was lost, nobody knows which
    jobs were leased. Then all tokens are put back: no consumer has the leased jobs, and they are claimed again when
    their leases end."""

    buckets: Sequence[Bucket]
    jobs: int

    async def spend(self, claim: Awaitable[ClaimResult]) -> ClaimResult:
        """Makes a claim of up to `jobs` jobs. If the claim fails or is cancelled, no consumer gets a job from the
        claim, so all tokens are put back."""
        try:
            result = await claim
        except BaseException:
            self.put_back(self.jobs)
            raise
        self.claimed(len(result.jobs))
        return result

    def claimed(self, started: int) -> None:
        """Puts back the tokens that a claim did not use. If the claim found few jobs, the next claim takes few tokens,
        because tokens that are unused in this process delay other processes."""
        for bucket in self.buckets:
            if started < self.jobs:
                bucket.at_once = max(1, 2 * started, bucket.block_max)
            else:
                bucket.at_once = max(bucket.at_once, 2 * started)
        self.put_back(self.jobs - started)

    def put_back(self, jobs: int) -> None:
        for bucket in self.buckets:
            bucket.put_back(jobs)
            bucket.give_back_excess()


class Part(NamedTuple):
    """Queues of one org that a claim may take together, and the limits of that claim."""

    queues: Sequence[QueueName]
    buckets: Sequence[Bucket] = ()
    in_flight: InFlightLimits | None = None


class ClaimedPart(NamedTuple):
    """The result of a claim of a part."""

    result: ClaimResult
    # The most jobs that the claim could lease.
    max_jobs: int
    # Puts back the tokens of jobs that do not reach their consumer. None: no limit of starts applies.
    put_back: Callable[[int], None] | None

    @property
    def is_short(self) -> bool:
        """Whether the claim has found fewer jobs than it could lease, so that there are no more jobs for now."""
        return len(self.result.jobs) < self.max_jobs and not self.result.cut


class Held(NamedTuple):
    """For how long a limit, or a lock, holds back the jobs of a part of a claim."""

    for_s: float
    # The error, if another session of the shard holds a lock that the claim needs. None: a limit holds the jobs back.
    locked: RowLocked | None = None


class SpentLimit(NamedTuple):
    """A limit without tokens. `next_s`: in how many seconds its bucket has the next token."""

    limit: Limit
    next_s: float


class Starts(Buckets):
    """Has the limits of starts, with the buckets from which this process draws, and the limits of jobs in flight.
    `store_of` returns the store of the shard that has the buckets of an org, or raises ShardUnavailable. `changed` is
    called when these limits have changed, so that consumers that were held back look for jobs again."""

    def __init__(self, store_of: Callable[[OrgId], Store], changed: Callable[[], None]) -> None:
        super().__init__((Measure.STARTS,))
        self._store_of = store_of
        self._changed = changed
        self._in_flight = LimitTable()

    def replace(self, table: LimitTable) -> None:
        before = self.table.limits, self._in_flight.limits
        super().replace(table)
        self._in_flight = table.only((Measure.IN_FLIGHT,))
        if (self.table.limits, self._in_flight.limits) != before:
            self._changed()

    def is_limited(self, org: OrgId) -> bool:
        """Returns whether a limit of either kind applies to the org or to one of its queues."""
        return self.table.is_limited(org) or self._in_flight.is_limited(org)

    def split(self, org: OrgId, queues: Sequence[QueueName]) -> list[Part]:
        """Splits the queues of one claim into parts. All queues of a part have the same limits. Each queue with a limit
        of its own is a part by itself, and all other queues are one part."""
        if not self.is_limited(org):
            return [Part(queues)]
        of_org = self.of(org, ALL_QUEUES)
        parts: list[Part] = []
        others: list[QueueName] = []
        for queue in queues:
            of_queue = self.of(org, queue)
            if of_queue or self._in_flight.of(org, queue):
                parts.append(Part((queue,), (*of_org, *of_queue), self.in_flight(org, queue)))
            else:
                others.append(queue)
        if others:
            parts.append(Part(others, of_org, self.in_flight(org, ALL_QUEUES)))
        # In a fixed order, a busy queue that is named first would starve a queue that is named last.
        random.shuffle(parts)
        return parts

    def in_flight(self, org: OrgId, queue: QueueName) -> InFlightLimits | None:
        """Returns the limits of jobs in flight that apply to a queue. None: there are none."""
        if not self._in_flight.is_limited(org):
            return None
        of_org = next((limit.amount for limit in self._in_flight.of(org)), None)
        of_queue = next((limit.amount for limit in self._in_flight.of(org, queue)), None) if queue else None
        return None if of_org is None and of_queue is None else InFlightLimits(of_org, of_queue)

    async def claim(
        self,
        store: Store,
        org: OrgId,
        part: Part,
        *,
        max_jobs: int,
        window_us: int,
        worker: str,
        bytes_max: int = CLAIM_BYTES_MAX,
    ) -> ClaimedPart | Held:
        """Claims jobs of a part, as many as its limits allow. Raises NoAnswer if the shard of `store`, or the shard
        that has the org's buckets, does not answer."""
        permit = None
        if part.buckets:
            permit = await self.draw(org, part.buckets, max_jobs)
            if permit is None:
                return Held(look_again_s(part.buckets))
            max_jobs = permit.jobs
        claim = store.claim(
            org,
            part.queues,
            max_jobs=max_jobs,
            window_us=window_us,
            worker=worker,
            bytes_max=bytes_max,
            in_flight=part.in_flight,
        )
        try:
            result = await (claim if permit is None else permit.spend(claim))
        except RowLocked as error:
            # If the claim has a limit of jobs in flight, most often another claim of this org takes long, and the
            # leases of that claim must be counted first. Without such a limit, another session holds, for example, the
            # bucket of a group whose job falls due.
            return Held(PAUSE_S, locked=error if part.in_flight is None else None)
        return ClaimedPart(result, max_jobs, None if permit is None else permit.put_back)

    async def draw(self, org: OrgId, buckets: Sequence[Bucket], wanted: int) -> Permit | None:
        """Takes tokens for up to `wanted` starts. Returns None if there are no tokens now; then `hold_s` returns in how
        many seconds there may be tokens. Raises ShardUnavailable."""
        wanted = min(wanted, *(bucket.at_once for bucket in buckets))
        for _ in range(_TRIES_MAX):
            short = next((bucket for bucket in buckets if bucket.tokens < 1), None)
            if short is None:
                return self._take(org, buckets, wanted)
            # If one bucket holds the claim back, draw from no bucket.
            if hold_s(buckets) > 0:
                return None
            try:
                await short.draw(self._store_of(org), 1, wanted)
            except (RowLocked, TooManyWaiting):
                return None
        return None

    def take(self, org: OrgId, queue: QueueName, wanted: int) -> Permit | None:
        """Takes tokens that this process has drawn before, for up to `wanted` starts of a hand-over. Returns None if
        neither a limit of starts nor a limit of jobs in flight applies to the queue. Returns an empty permit if the
        queue has a limit of jobs in flight: its jobs are not handed over, because only a claim counts the leased
        jobs."""
        if self.in_flight(org, queue) is not None:
            return Permit((), 0)
        if not self.table.is_limited(org):
            return None
        buckets = (*self.of(org, ALL_QUEUES), *self.of(org, queue))
        return self._take(org, buckets, wanted) if buckets else None

    async def spent(self, org: OrgId, queue: QueueName) -> list[SpentLimit]:
        """Returns the limits that hold the jobs of this queue back now. Leaves out limits whose shard does not
        answer."""
        found: list[SpentLimit] = []
        if self.table.is_limited(org):
            for bucket in (*self.of(org, ALL_QUEUES), *self.of(org, queue)):
                try:
                    tokens = await bucket.look(self._store_of(org))
                except NoAnswer:
                    continue
                if tokens < 1:
                    found.append(SpentLimit(bucket.limit, (1 - tokens) / bucket.limit.tokens_per_s))
        return found

    def _take(self, org: OrgId, buckets: Sequence[Bucket], wanted: int) -> Permit:
        jobs = min(wanted, *(bucket.tokens for bucket in buckets))
        if jobs <= 0:
            return Permit((), 0)
        store = self._store_of(org)
        for bucket in buckets:
            bucket.take(jobs, store)
        return Permit(buckets, jobs)


def hold_s(buckets: Sequence[Bucket]) -> float:
    """Returns in how many seconds all of these buckets may have a token, as far as this process knows; at most 3 s."""
    return max((bucket.ready_in_s(1, within_s=_HOLD_S_MAX) for bucket in buckets if bucket.tokens < 1), default=0.0)


def look_again_s(buckets: Sequence[Bucket]) -> float:
    """Returns in how many seconds to look again after a draw that got nothing."""
    return max(hold_s(buckets), PAUSE_S)
