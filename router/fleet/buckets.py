"""Buckets of tokens, as one router process knows them (docs/decisions/0045-tokens-are-drawn-in-blocks.md).

Each limit of an org has a bucket on the shard that takes the org's jobs. This process draws tokens from this bucket in
blocks. A block has the tokens that the present call lacks. It also has the tokens that the process will need in the
next moment, if it continues to use tokens at its present pace. Tokens that are not used within about a second are given
back. If a process dies, the tokens that it has drawn are lost: at most one block of each bucket. Tokens are also lost
if the connection breaks before the shard has answered: then nobody knows whether these tokens were drawn or given back.

For each bucket, this process remembers the most tokens that the bucket may have by now. With this hint, a call that
cannot succeed yet need not ask the shard. All times in this module come from this process's own clock.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Collection, Coroutine, Sequence
from typing import TypeAlias

from shard.errors import InDoubt, NoAnswer
from shard.limits import Limit, LimitTable, Measure
from shard.queue.store import Store
from shard.queue.token_buckets import Draw
from shard.vocabulary import OrgId, QueueName

_Key: TypeAlias = tuple[OrgId, QueueName]

# A block has the tokens that the process will probably need within this time.
_AHEAD_S = 0.5
# In addition to the tokens that calls lack, a block has at most the tokens that the limit gives in this time. So even
# all processes together hold few tokens: for a large limit, only a small part of the tokens that the limit gives in a
# minute.
_BLOCK_S_MAX = 0.1
# The shortest time over which the pace of a process is computed.
_PACE_S_MIN = 0.01
# The shortest time between two draws from an empty bucket.
PAUSE_S = 0.05
# The process gives back tokens that were drawn longer ago than `_HELD_S`. It looks for such tokens every GIVE_BACK_S.
_HELD_S = 1.0
GIVE_BACK_S = 0.5
_FINISH_S_MAX = 1.0
# The process remembers at most this many buckets. If there are more, it forgets those without tokens.
_BUCKETS_MAX = 20_000


class Bucket:
    """One org's bucket of one limit, as this process knows it."""

    __slots__ = (
        "_asked_s", "_drawing", "_low", "_org", "_store", "_used", "at_once", "drawn_s", "in_bytes", "left", "limit",
        "tokens", "waiting",
    )  # fmt: skip

    def __init__(self, org: OrgId, limit: Limit) -> None:
        self.limit = limit
        self.in_bytes = limit.key.measure is Measure.BYTES
        # The tokens that this process has drawn and not used.
        self.tokens = 0
        # When the latest draw was answered.
        self.drawn_s = 0.0
        # The most tokens that one claim takes.
        self.at_once = limit.amount
        # How many tokens the waiting calls can use.
        self.waiting = 0
        # How many tokens the shard's bucket had after the latest draw, and when that draw was sent.
        self.left = math.inf
        self._asked_s = 0.0
        self._org = org
        # How many tokens this process has used since the latest draw was sent.
        self._used = 0
        # When this process has fewer tokens than this, it draws the next block before a call lacks tokens.
        self._low = 0
        self._drawing: asyncio.Task[None] | None = None
        self._store: Store | None = None

    @property
    def block_max(self) -> int:
        """The most tokens that are drawn before a call lacks them."""
        return int(self.limit.tokens_per_s * _BLOCK_S_MAX)

    def take(self, cost: int, store: Store) -> None:
        """Uses tokens. `tokens` must be at least `cost`."""
        self.tokens -= cost
        self._used += cost
        if self.tokens < self._low and self._drawing is None:
            self._begin(store, 0)

    def put_back(self, cost: int) -> None:
        """Undoes a `take`."""
        self.tokens += cost
        # `_used` must not fall below 0: the tokens may have been taken before the latest draw, which has set `_used` to
        # 0.
        self._used = max(0, self._used - cost)

    def ready_in_s(self, lack: int, *, within_s: float = math.inf) -> float:
        """Returns in how many seconds the shard may have `lack` tokens, at the earliest. The result is never later than
        `within_s` after the shard was last asked, because other processes may give tokens back."""
        if lack <= self.left or self._drawing is not None:
            return 0.0
        after_s = min(max(PAUSE_S, (lack - self.left) / self.limit.tokens_per_s), within_s)
        return max(0.0, self._asked_s + after_s - time.monotonic())

    def usage(self) -> int:
        """Returns how much of the limit's amount was in use when the shard was asked last."""
        amount = self.limit.amount
        return amount if self.left == math.inf else max(0, min(amount, amount - int(self.left) - self.tokens))

    async def draw(self, store: Store, lack: int, wanted: int | None = None) -> None:
        """Draws the tokens that a call lacks, or waits for the draw that is running. `wanted`: how many tokens the call
        can use; None: only those that it lacks. Raises NoAnswer."""
        wanted = lack if wanted is None else wanted
        self.waiting += wanted
        try:
            # The draw serves other calls too, so a cancelled call does not end it.
            await asyncio.shield(self._drawing or self._begin(store, lack))
        finally:
            self.waiting -= wanted

    def _begin(self, store: Store, needed: int) -> asyncio.Task[None]:
        return self._run(self._draw(store, needed))

    def _run(self, act: Coroutine[None, None, None]) -> asyncio.Task[None]:
        self._drawing = asyncio.get_running_loop().create_task(act)
        # Retrieve the error: if no call waits for the draw, nobody else retrieves it, and asyncio would log it.
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
        # If the bucket had too few tokens, do not draw again before a call lacks tokens: an early draw would only take
        # tokens from other processes.
        self._low = ahead // 2 if drawn.granted == wanted else 0

    async def look(self, store: Store) -> float:
        """Returns how many tokens the shard has now, plus those that this process has. Raises NoAnswer."""
        return (await store.draw(Draw(self._org, self.limit, 0, 0))).left + self.tokens

    def give_back_excess(self) -> None:
        """Gives the tokens of this process back now if they are more than `block_max`, and more than the shard has for
        other processes."""
        if self.tokens > max(self.left, self.block_max) and not self.waiting and self._drawing is None:
            self._run(self._give_back_now())

    async def _give_back_now(self) -> None:
        try:
            with contextlib.suppress(NoAnswer):
                await self.give_back()
        finally:
            self._drawing = None

    @property
    def is_drawing(self) -> bool:
        return self._drawing is not None

    async def drawn(self) -> None:
        """Waits until no draw is running."""
        if self._drawing is not None:
            await asyncio.wait({self._drawing})

    async def give_back(self) -> None:
        """Gives all tokens back. Raises NoAnswer. This process then still has the tokens, unless the error is InDoubt:
        in that case the tokens may have been given back."""
        tokens, self.tokens, self._low = self.tokens, 0, 0
        if tokens > 0 and self._store is not None:
            self.left += tokens
            taken = False
            try:
                answer = await self._store.draw(Draw(self._org, self.limit, -tokens, -tokens))
                taken = answer.granted < 0
            except InDoubt:
                taken = True
                raise
            finally:
                if not taken:
                    # The shard refuses the tokens if it knows a newer limit: `Buckets.replace` then decides whether to
                    # keep the tokens.
                    self.tokens += tokens
                    self.left -= tokens


class Buckets:
    """The buckets of the limits that have one of the measures `measures`."""

    def __init__(self, measures: Collection[Measure]) -> None:
        self._measures = measures
        # The limits in force.
        self.table = LimitTable()
        # The buckets of an org as a whole (ALL_QUEUES), and of single queues.
        self._buckets: dict[_Key, list[Bucket]] = {}

    def replace(self, table: LimitTable) -> None:
        """Puts these limits in force. Tokens that were drawn under a limit with another amount or interval are dropped.
        If only the version of a limit is newer, its tokens stay, because the removal of any limit gives a newer version
        to all limits."""
        self.table = table.only(self._measures)
        before, self._buckets = self._buckets, {}
        for (org, queue), buckets in before.items():
            known = {_terms(bucket.limit): bucket for bucket in buckets}
            if limits := self.table.of(org, queue):
                now: list[Bucket] = []
                self._buckets[org, queue] = now
                for limit in limits:
                    bucket = known.get(_terms(limit)) or Bucket(org, limit)
                    bucket.limit = limit
                    now.append(bucket)

    async def give_back(self) -> None:
        """Gives back the tokens that were drawn a while ago. If a shard does not take the tokens now, they are offered
        to it again the next time."""
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
        await asyncio.gather(*map(_return, unused))

    def of(self, org: OrgId, queue: QueueName) -> Sequence[Bucket]:
        """Returns the buckets of an org as a whole (ALL_QUEUES), or of one of its queues."""
        buckets = self._buckets.get((org, queue))
        if buckets is None:
            buckets = [Bucket(org, limit) for limit in self.table.of(org, queue)]
            if buckets:
                if len(self._buckets) >= _BUCKETS_MAX:
                    self._forget()
                self._buckets[org, queue] = buckets
        return buckets

    def _forget(self) -> None:
        """Forgets the buckets without tokens. If too many buckets remain, also forgets the oldest ones. For each bucket
        with tokens that is forgotten, at most one block of tokens is lost. Everything else that this process knows of a
        bucket is a hint."""
        used = {key: buckets for key, buckets in self._buckets.items() if any(b.tokens or b.waiting for b in buckets)}
        for key in list(used)[: max(0, len(used) - _BUCKETS_MAX // 2)]:
            del used[key]
        self._buckets = used


async def _return(bucket: Bucket) -> None:
    """Gives all tokens back, also those that are being drawn."""
    await bucket.drawn()
    with contextlib.suppress(NoAnswer):
        await bucket.give_back()


def _terms(limit: Limit) -> tuple[Measure, int, int]:
    """Returns what must not change if a bucket is to keep its tokens: the measure, the amount and the interval of its
    limit. The org of the limit may change, because a default may replace an org's own limit."""
    return limit.key.measure, limit.amount, limit.interval_us
