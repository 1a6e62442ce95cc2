"""The work that a queue has on all its shards: ready and leased jobs, of one org or of all orgs."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import NamedTuple, TypeVar

from router.fleet.fleet import Fleet
from router.fleet.shard_handle import ShardHandle
from router.route.shared import Shared
from shard.admin.queue_admin import Work
from shard.errors import NoAnswer
from shard.placement.cluster_file import ShardState
from shard.vocabulary import OrgId, QueueName, ShardName

_T = TypeVar("_T")
# A count is used for _USED_S, or, if this is longer, for _USED_TIMES times the time that counting took. So counting a
# queue takes at most 2 % of a connection's time.
_USED_S = 1.0
_USED_TIMES = 50.0
_REMEMBERED_MAX = 10_000


class _Queue(NamedTuple):
    # None: all orgs.
    org: OrgId | None
    queue: QueueName
    jobs_max: int = 0


class WorkCounts:
    """Callers that ask for the same thing at the same time share the answer."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._any = Shared(self._look)
        self._counts = Shared(self._count)
        # The last counts, each with the time (by time.monotonic) until which it is used.
        self._used: OrderedDict[_Queue, tuple[float, int]] = OrderedDict()

    async def any(self, org: OrgId | None, queue: QueueName) -> bool:
        """Returns whether there is work. Raises NoAnswer if no work was seen but a shard does not answer: that
        shard may have work."""
        return await self._any.get(_Queue(org, queue))

    async def count(self, org: OrgId | None, queue: QueueName, *, jobs_max: int) -> int:
        """Returns how many ready and leased jobs there are, counting at most `jobs_max` on each shard. A shard that
        does not answer is left out: nobody can work on its jobs. Raises NoAnswer if no shard answers."""
        wanted = _Queue(org, queue, jobs_max)
        used = self._used.get(wanted)
        if used is not None and time.monotonic() < used[0]:
            return used[1]
        return await self._counts.get(wanted)

    async def _look(self, wanted: _Queue) -> bool:
        answers, away = await self._ask(
            wanted.org, lambda member: member.queue_admin.has_work(wanted.org, wanted.queue)
        )
        if not any(answers) and away is not None:
            raise away
        return any(answers)

    async def _count(self, wanted: _Queue) -> int:
        began_s = time.monotonic()

        async def count(member: ShardHandle) -> Work:
            return await member.queue_admin.count_work(wanted.org, wanted.queue, jobs_max=wanted.jobs_max)

        answers, away = await self._ask(wanted.org, count)
        if not answers and away is not None:
            raise away
        counted = sum(map(sum, answers))
        now_s = time.monotonic()
        self._used[wanted] = now_s + max(_USED_S, _USED_TIMES * (now_s - began_s)), counted
        self._used.move_to_end(wanted)
        if len(self._used) > _REMEMBERED_MAX:
            self._used.popitem(last=False)
        return counted

    async def _ask(
        self, org: OrgId | None, ask: Callable[[ShardHandle], Awaitable[_T]]
    ) -> tuple[list[_T], NoAnswer | None]:
        """Asks all shards that may have the org's jobs. Returns their answers, and the error of a shard that gave no
        answer, if there is one."""

        async def one(name: ShardName) -> _T | NoAnswer:
            try:
                return await ask(self._fleet.placed(name).require_up())
            except NoAnswer as error:
                return error

        if org is None:
            names = [name for name, member in self._fleet.shards().items() if member.entry.state is not ShardState.OFF]
        else:
            names = list(self._fleet.placement(org).reads)
        asked = await asyncio.gather(*map(one, names))
        answers = [answer for answer in asked if not isinstance(answer, NoAnswer)]
        return answers, next((answer for answer in asked if isinstance(answer, NoAnswer)), None)
