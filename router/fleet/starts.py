"""The limits of starts, as one router process enforces them: how many jobs may be leased now
(docs/decisions/0049-starts-are-held-back.md).

A start limit holds back and refuses nothing. Whoever leases jobs of a limited queue takes tokens first, then leases at
most that many, and puts back what it did not use. While there are no tokens, the queue counts as one without due jobs.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from router.fleet.buckets import PAUSE_S, Bucket, Buckets
from shard.errors import RowLocked, ShardUnavailable
from shard.limits import ALL_QUEUES, Limit, LimitTable, Measure
from shard.queue.coalescer import TooManyWaiting
from shard.queue.store import Store
from shard.vocabulary import OrgId, QueueName

# How often a claim asks the shard: other claims may take what it drew.
_TRIES_MAX = 20
# A bucket is asked again after so long, even if its next token comes later: another process may have given tokens back.
_HOLD_S_MAX = 3.0


@dataclass(frozen=True, slots=True)
class Permit:
    """Tokens for `jobs` starts. Its owner puts back what it does not use. If it never knows what has started, because
    the answer of a shard was lost, the tokens stay used."""

    buckets: Sequence[Bucket]
    jobs: int

    def claimed(self, started: int) -> None:
        """Puts back what a claim did not use. If it found few jobs, the next one takes few tokens: tokens that lie here
        for nothing hold up other processes."""
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


class SpentLimit(NamedTuple):
    """A limit without tokens. `next_s`: in how many seconds its bucket has the next one."""

    limit: Limit
    next_s: float


class Starts(Buckets):
    """The limits of starts, and the buckets from which this process draws. `store_of` returns the shard that has the
    buckets of an org, or raises ShardUnavailable. `changed` is called when these limits have changed, so that consumers
    that were held back look again."""

    def __init__(self, store_of: Callable[[OrgId], Store], changed: Callable[[], None]) -> None:
        super().__init__((Measure.STARTS,))
        self._store_of = store_of
        self._changed = changed

    def replace(self, table: LimitTable) -> None:
        before = self.table.limits
        super().replace(table)
        if self.table.limits != before:
            self._changed()

    def split(self, org: OrgId, queues: Sequence[QueueName]) -> list[tuple[Sequence[QueueName], Sequence[Bucket]]]:
        """Splits the queues of one claim into those that may share tokens: each queue with a limit of its own is by
        itself, and all others are together. With the buckets that count for them."""
        if not self.table.is_limited(org):
            return [(queues, ())]
        of_org = self.of(org, ALL_QUEUES)
        parts: list[tuple[Sequence[QueueName], Sequence[Bucket]]] = []
        others: list[QueueName] = []
        for queue in queues:
            if of_queue := self.of(org, queue):
                parts.append(((queue,), (*of_org, *of_queue)))
            else:
                others.append(queue)
        if others:
            parts.append((others, of_org))
        # Otherwise a busy queue that is named first would starve one that is named last.
        random.shuffle(parts)
        return parts

    async def draw(self, org: OrgId, buckets: Sequence[Bucket], wanted: int) -> Permit | None:
        """Takes tokens for up to `wanted` starts. Returns None if there is none now; `hold_s` then says for how long.
        Raises ShardUnavailable."""
        wanted = min(wanted, *(bucket.at_once for bucket in buckets))
        for _ in range(_TRIES_MAX):
            short = next((bucket for bucket in buckets if bucket.tokens < 1), None)
            if short is None:
                return self._take(org, buckets, wanted)
            # Nothing is drawn for a claim that another bucket holds back.
            if hold_s(buckets) > 0:
                return None
            try:
                await short.draw(self._store_of(org), 1, wanted)
            except (RowLocked, TooManyWaiting):
                return None
        return None

    def take(self, org: OrgId, queue: QueueName, wanted: int) -> Permit | None:
        """Takes tokens that this process has drawn before, for up to `wanted` starts. None: nothing limits them."""
        if not self.table.is_limited(org):
            return None
        buckets = (*self.of(org, ALL_QUEUES), *self.of(org, queue))
        return self._take(org, buckets, wanted) if buckets else None

    async def spent(self, org: OrgId, queue: QueueName) -> list[SpentLimit]:
        """Returns the limits that hold the jobs of this queue back now. A shard that does not answer has none."""
        found: list[SpentLimit] = []
        if self.table.is_limited(org):
            for bucket in (*self.of(org, ALL_QUEUES), *self.of(org, queue)):
                try:
                    tokens = await bucket.look(self._store_of(org))
                except (ShardUnavailable, TooManyWaiting):
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
