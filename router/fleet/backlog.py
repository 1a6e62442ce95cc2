"""The backlog of an org or a queue under a limit, as one router process knows it
(docs/decisions/0053-backlogs-are-counted-by-those-who-add-to-them.md).

This process counts the jobs on the shard, and adds the jobs that it has let through since the count. It does not know
what other processes have let through, so it uses a count for a second only, or for longer if counting takes long.
"""

from __future__ import annotations

import asyncio
import math
import time

from shard.limits import Limit, Measure
from shard.queue.store import Store
from shard.vocabulary import OrgId

# A count is used for _USED_S, or, if this is longer, for _USED_TIMES times the time that counting took.
_USED_S = 1.0
_USED_TIMES = 50.0


class Backlog:
    """Has the methods of a Bucket that a Charge (router/fleet/limits.py) needs. A token is the right to add one job, or
    one byte, to the backlog."""

    def __init__(self, org: OrgId, limit: Limit) -> None:
        self.limit = limit
        self.in_bytes = limit.key.measure is Measure.BACKLOG_BYTES
        self._org = org
        self._counted = 0
        # Jobs or bytes that this process has let through since the count began, or that the count may have missed. The
        # backlog is the sum of this number and `_counted`.
        self._added = 0
        # Jobs or bytes that were let through, but whose enqueue the shard has not answered yet: a count may miss them.
        self._unsettled = 0
        self._used_until_s = 0.0
        self._counting: asyncio.Task[None] | None = None

    @property
    def tokens(self) -> int:
        return 0 if self._is_old else max(0, self.limit.amount - self._counted - self._added)

    @property
    def left(self) -> float:
        """Returns how many tokens there may be in addition to `tokens`."""
        return math.inf if self._is_old else 0.0

    @property
    def _is_old(self) -> bool:
        return time.monotonic() >= self._used_until_s

    @property
    def is_idle(self) -> bool:
        """Whether nothing is lost if this object is forgotten."""
        return not self._unsettled and self._counting is None

    def take(self, cost: int, store: Store) -> None:
        del store
        self._added += cost
        self._unsettled += cost

    def put_back(self, cost: int) -> None:
        self._added -= cost

    def settled(self, cost: int) -> None:
        """Call this when the shard has answered an enqueue that a `take` let through. A count that begins now includes
        the jobs of the enqueue."""
        self._unsettled -= cost

    def ready_in_s(self, lack: int) -> float:
        """Returns in how many seconds the jobs are counted again."""
        del lack
        return max(0.0, self._used_until_s - time.monotonic())

    def usage(self) -> int:
        return min(self.limit.amount, self._counted + self._added)

    async def draw(self, store: Store, lack: int) -> None:
        """Counts the backlog, or waits for the count that is running. Raises NoAnswer."""
        del lack
        if self._counting is None:
            self._counting = asyncio.get_running_loop().create_task(self._count(store))
            # Retrieve the error of the count: if all callers are cancelled, nobody else retrieves it, and asyncio would
            # log it.
            self._counting.add_done_callback(lambda task: task.cancelled() or task.exception())
        await asyncio.shield(self._counting)

    async def _count(self, store: Store) -> None:
        began_s = time.monotonic()
        # No tokens are taken before this count has ended, because the previous count is too old to be used.
        self._added = self._unsettled
        try:
            self._counted = await store.count_backlog(self._org, self.limit)
        finally:
            self._counting = None
        now_s = time.monotonic()
        self._used_until_s = now_s + max(_USED_S, _USED_TIMES * (now_s - began_s))
