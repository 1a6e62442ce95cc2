"""Runs long calculations in a thread of their own, so that the event loop serves other calls meanwhile. The threads of
asyncio.to_thread stay free for work that must not wait, such as the work of the memory watch."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from shard.errors import TooManyWaiting
from shard.queue.coalescer import SingleCall, single_calls
from shard.vocabulary import OrgId

_T = TypeVar("_T")


class Calculator:
    """Runs one calculation at a time; orgs take turns (I4). `what` names the calculations in errors, such as "previews
    of schedules"."""

    def __init__(self, what: str) -> None:
        # A calculation runs to its end even if its caller has left. The next calculation waits until then for the
        # thread.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="calculator")
        self._calls = single_calls(lambda: TooManyWaiting(f"earlier {what} take long; try again"))

    async def run(self, org: OrgId, calculate: Callable[[], _T]) -> _T:
        """Returns the result of `calculate`, or raises its error. Raises TooManyWaiting after 5 s."""
        loop = asyncio.get_running_loop()
        act = partial(loop.run_in_executor, self._thread, calculate)
        result: _T = await self._calls.submit(SingleCall(org, 1, act))
        return result
