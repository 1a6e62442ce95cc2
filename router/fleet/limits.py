"""The limits of enqueues, as one router process enforces them (docs/decisions/0045-tokens-are-drawn-in-blocks.md).

Each limit of an org has a bucket on the shard that takes the org's jobs. This process draws tokens from it in blocks:
what the call at hand lacks, and what the process will need in the next moment at its present pace. Tokens that are not
used within about a second are given back. Tokens of a process that dies are lost: at most one block.

What this process remembers of a bucket is a hint: an upper bound of what the bucket may have by now, so that calls
which cannot succeed yet need not ask the shard. The times here are differences of this process's own clock.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Collection, Mapping, Sequence
from typing import TypeAlias

from shard.errors import LimitReached
from shard.limits import ALL_QUEUES, Limit, LimitTable, Measure
from shard.queue.store import Store
from shard.queue.token_buckets import Draw
from shard.vocabulary import NewJobs, OrgId, QueueName

_Key: TypeAlias = tuple[OrgId, QueueName]

# A block has what the process needs for this long.
_AHEAD_S = 0.5
# But at most what the limit gives in this time. So all processes together hold little of a limit that is small, or of a
# minute of one that is large.
_BLOCK_S_MAX = 0.1
# A shorter time says too little about the pace of a process.
_PACE_S_MIN = 0.01
# While a bucket is empty, it is asked this often at most.
_PAUSE_S = 0.05
# Tokens that were drawn longer ago than this are given back. The process looks for them this often.
_HELD_S = 1.0
GIVE_BACK_S = 0.5
_FINISH_S_MAX = 1.0
# So many buckets the process remembers; above that it forgets those without tokens.
_BUCKETS_MAX = 20_000
# How often a call asks the shard: other calls may take what it drew.
_TRIES_MAX = 20


class Bucket:
    """One org's bucket of one limit, as this process knows it."""

    __slots__ = (
        "_asked_s", "_drawing", "_low", "_org", "_store", "_used", "drawn_s", "in_bytes", "left", "limit", "tokens",
        "waiting",
    )  # fmt: skip

    def __init__(self, org: OrgId, limit: Limit) -> None:
        self.limit = limit
        self.in_bytes = limit.key.measure is Measure.BYTES
        # What this process has drawn and not used.
        self.tokens = 0
        # When the latest draw was answered.
        self.drawn_s = 0.0
        # How many tokens calls wait for.
        self.waiting = 0
        # What the shard's bucket had left after the latest draw, and when that draw was sent.
        self.left = math.inf
        self._asked_s = 0.0
        self._org = org
        # How many tokens were used since then.
        self._used = 0
        # With fewer tokens than this, the next block is drawn ahead.
        self._low = 0
        self._drawing: asyncio.Task[None] | None = None
        self._store: Store | None = None

    def take(self, cost: int, store: Store) -> None:
        """Uses tokens, which must be there."""
        self.tokens -= cost
        self._used += cost
        if self.tokens < self._low and self._drawing is None:
            self._begin(store, 0)

    def put_back(self, cost: int) -> None:
        """Undoes a `take`."""
        self.tokens += cost
        self._used -= cost

    def ready_in_s(self, lack: int) -> float:
        """Returns in how many seconds the shard may have so many tokens, at the earliest."""
        if lack <= self.left or self._drawing is not None:
            return 0.0
        after_s = max(_PAUSE_S, (lack - self.left) / self.limit.tokens_per_s)
        return max(0.0, self._asked_s + after_s - time.monotonic())

    def usage(self) -> int:
        """Returns how much of the limit's amount was in use when the shard was asked last."""
        amount = self.limit.amount
        return amount if self.left == math.inf else max(0, min(amount, amount - int(self.left) - self.tokens))

    async def draw(self, store: Store, lack: int) -> None:
        """Draws what a call lacks, or waits for the draw that is under way. Raises ShardUnavailable, TooManyWaiting."""
        self.waiting += lack
        try:
            # The draw serves other calls too, so a cancelled call does not end it.
            await asyncio.shield(self._drawing or self._begin(store, lack))
        finally:
            self.waiting -= lack

    def _begin(self, store: Store, needed: int) -> asyncio.Task[None]:
        self._drawing = asyncio.get_running_loop().create_task(self._draw(store, needed))
        # A draw ahead has no caller who would see its error.
        self._drawing.add_done_callback(lambda task: task.cancelled() or task.exception())
        return self._drawing

    async def _draw(self, store: Store, needed: int) -> None:
        asked_s = time.monotonic()
        used_per_s = self._used / max(asked_s - self._asked_s, _PACE_S_MIN)
        ahead = int(min(used_per_s * _AHEAD_S, self.limit.tokens_per_s * _BLOCK_S_MAX))
        wanted = min(max(needed, self.waiting) + ahead, self.limit.amount)
        self._used = 0
        self._asked_s = asked_s
        self._store = store
        try:
            drawn = await store.draw(Draw(self._org, self.limit, needed, wanted))
        finally:
            self._drawing = None
        self.tokens += drawn.granted
        self.drawn_s = time.monotonic()
        self.left = drawn.left
        # While the bucket is empty, drawing ahead would only empty it for other processes.
        self._low = ahead // 2 if drawn.granted == wanted else 0

    @property
    def is_drawing(self) -> bool:
        return self._drawing is not None

    async def give_back(self) -> None:
        """Gives all tokens back, also those that are being drawn. Raises ShardUnavailable, TooManyWaiting; they are
        lost then."""
        if self._drawing is not None:
            await asyncio.wait({self._drawing})
        tokens, self.tokens, self._low = self.tokens, 0, 0
        if tokens > 0 and self._store is not None:
            self.left += tokens
            await self._store.draw(Draw(self._org, self.limit, -tokens, -tokens))


# What jobs of a call cost in one bucket: the bucket, the positions of the jobs (None: all of them), and the tokens. A
# plain tuple, because each call makes some.
_Cost: TypeAlias = tuple[Bucket, Sequence[int] | None, int]


class Charge:
    """The tokens that a call has used."""

    __slots__ = ("_costs", "_jobs")

    def __init__(self, costs: Sequence[_Cost], jobs: NewJobs) -> None:
        self._costs = costs
        self._jobs = jobs

    def refund(self) -> None:
        """Puts all tokens back: nothing was stored."""
        for bucket, _, tokens in self._costs:
            bucket.put_back(tokens)

    def refund_jobs(self, known: Collection[int]) -> None:
        """Puts the tokens of the jobs at these positions back: they had been stored before."""
        for bucket, positions, _ in self._costs:
            of_bucket = known if positions is None else [at for at in positions if at in known]
            bucket.put_back(_cost(bucket, self._jobs, of_bucket))


class Limits:
    """The limits of a cluster, and the buckets from which this process draws."""

    def __init__(self) -> None:
        # The limits in force.
        self.table = LimitTable()
        # For an org as a whole (ALL_QUEUES), and for single queues.
        self._buckets: dict[_Key, list[Bucket]] = {}

    def replace(self, table: LimitTable) -> None:
        """Puts these limits in force. Tokens that were drawn under a changed limit are dropped."""
        self.table = table
        before, self._buckets = self._buckets, {}
        for (org, queue), buckets in before.items():
            known = {bucket.limit: bucket for bucket in buckets}
            if limits := table.of(org, queue):
                self._buckets[org, queue] = [known.get(limit) or Bucket(org, limit) for limit in limits]

    async def charge(self, store: Store, jobs: NewJobs, *, independent: bool) -> Charge | None:
        """Uses the tokens that these jobs cost, in all buckets that count for them. Returns None if nothing limits
        them. `independent`: each job may be stored alone. Raises LimitReached, RowLocked, ShardUnavailable,
        TooManyWaiting; no tokens are used then."""
        costs = self._costs(jobs)
        if not costs:
            return None
        worst = costs[0]
        for _ in range(_TRIES_MAX):
            short = [cost for cost in costs if cost[0].tokens < cost[2]]
            if not short:
                for bucket, _, tokens in costs:
                    bucket.take(tokens, store)
                return Charge(costs, jobs)
            # Nothing is drawn for a call that another bucket refuses.
            worst = max(short, key=_wait_s)
            if _wait_s(worst) > 0:
                break
            bucket, _, tokens = worst
            await bucket.draw(store, tokens - bucket.tokens)
        bucket, positions, tokens = worst
        raise _reached(jobs, bucket, positions, tokens, independent=independent)

    async def give_back(self) -> None:
        """Gives back the tokens that were drawn a while ago. If a shard does not take them, they are lost."""
        await self._give_back(drawn_before_s=time.monotonic() - _HELD_S)

    async def finish(self) -> None:
        """Gives all tokens back, because this process ends. Takes a second at most."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FINISH_S_MAX):
                await self._give_back(drawn_before_s=math.inf)

    async def _give_back(self, *, drawn_before_s: float) -> None:
        unused = [
            bucket
            for buckets in self._buckets.values()
            for bucket in buckets
            if (bucket.tokens > 0 or bucket.is_drawing) and bucket.drawn_s < drawn_before_s
        ]
        await asyncio.gather(*(bucket.give_back() for bucket in unused), return_exceptions=True)

    def _costs(self, jobs: NewJobs) -> list[_Cost]:
        """Returns what these jobs cost, for each bucket that counts for them."""
        org, table = jobs.org, self.table
        if not table.is_limited(org):
            return []
        costs: list[_Cost] = [(bucket, None, _cost(bucket, jobs)) for bucket in self._of(org, ALL_QUEUES)]
        if table.limits_queues(org):
            queues = jobs.queues
            for queue in dict.fromkeys(queues):
                buckets = self._of(org, queue)
                if buckets:
                    positions = None
                    if queues.count(queue) < len(queues):
                        positions = [at for at, of in enumerate(queues) if of == queue]
                    costs += [(bucket, positions, _cost(bucket, jobs, positions)) for bucket in buckets]
        return costs

    def _of(self, org: OrgId, queue: QueueName) -> Sequence[Bucket]:
        buckets = self._buckets.get((org, queue))
        if buckets is None:
            buckets = [Bucket(org, limit) for limit in self.table.of(org, queue)]
            if buckets:
                if len(self._buckets) >= _BUCKETS_MAX:
                    self._forget()
                self._buckets[org, queue] = buckets
        return buckets

    def _forget(self) -> None:
        """Forgets buckets without tokens, and then the oldest ones: what this process knows of them is a hint, and of
        the tokens that are lost there is at most one block for each."""
        used = {key: buckets for key, buckets in self._buckets.items() if any(b.tokens or b.waiting for b in buckets)}
        for key in list(used)[: max(0, len(used) - _BUCKETS_MAX // 2)]:
            del used[key]
        self._buckets = used


def _wait_s(cost: _Cost) -> float:
    """Returns in how many seconds the shard may have the tokens that are lacking, at the earliest; inf: never."""
    bucket, _, tokens = cost
    return math.inf if tokens > bucket.limit.amount else bucket.ready_in_s(tokens - bucket.tokens)


def _reached(
    jobs: NewJobs, bucket: Bucket, positions: Sequence[int] | None, asked: int, *, independent: bool
) -> LimitReached:
    limit = bucket.limit
    if positions is None:
        positions = range(len(jobs))
    retry_after_s = bucket.ready_in_s(asked - bucket.tokens) if asked <= limit.amount else None
    if independent:
        each = {at: _cost(bucket, jobs, [at]) for at in positions}
        # Those that no later call could store are refused first, by themselves: to wait does not help them.
        positions = [at for at in positions if each[at] > limit.amount]
        if positions:
            asked, retry_after_s = max(each[at] for at in positions), None
        else:
            positions = _without_room(each, min(limit.amount, bucket.tokens + bucket.left))
            asked = min(each[at] for at in positions)
            # The others take what is left now.
            retry_after_s = max(_PAUSE_S, asked / limit.tokens_per_s)
    if retry_after_s is not None:
        # The shard computes with other rounding errors.
        retry_after_s = max(retry_after_s, 0.001)
    return LimitReached(
        jobs.org, limit, asked=asked, usage=bucket.usage(), retry_after_s=retry_after_s, positions=positions
    )


def _without_room(each: Mapping[int, int], room: float) -> list[int]:
    """Returns the positions of the jobs that do not fit into `room` beside those before them; at least one."""
    left: list[int] = []
    for at, tokens in each.items():
        if tokens <= room:
            room -= tokens
        else:
            left.append(at)
    return left or list(each)[-1:]


def _cost(bucket: Bucket, jobs: NewJobs, positions: Collection[int] | None = None) -> int:
    """Returns how many tokens of this bucket the jobs at these positions cost. None: all jobs."""
    if not bucket.in_bytes:
        return len(jobs.ids if positions is None else positions)
    payloads, attributes = jobs.payloads, jobs.attributes
    tokens = sum(map(len, payloads if positions is None else [payloads[at] for at in positions]))
    if attributes:
        of = attributes if positions is None else attributes.keys() & positions
        tokens += sum(len(attributes[at].encode()) for at in of)
    return tokens
