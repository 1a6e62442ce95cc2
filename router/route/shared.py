"""Look-ups that callers share: of those who ask for one thing at the same time, one asks for all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

_KeyT = TypeVar("_KeyT", bound=Hashable)
_T = TypeVar("_T")


class Shared(Generic[_KeyT, _T]):
    """`ask` looks a key up. It runs once at a time for each key. A caller never gets what was asked for before it came:
    callers that come while it runs get the answer of the next run."""

    def __init__(self, ask: Callable[[_KeyT], Awaitable[_T]]) -> None:
        self._ask = ask
        self._running: dict[_KeyT, asyncio.Task[_T]] = {}
        # Those that have not begun.
        self._next: dict[_KeyT, asyncio.Task[_T]] = {}

    async def get(self, key: _KeyT) -> _T:
        """Raises what `ask` raises."""
        task = self._next.get(key)
        if task is None:
            task = self._next[key] = asyncio.create_task(self._run(key))
            # If all callers have left, nobody else asks for its error, and asyncio would log that.
            task.add_done_callback(_take_error)
        # A caller that leaves does not take the others' answer with it.
        return await asyncio.shield(task)

    async def _run(self, key: _KeyT) -> _T:
        if (before := self._running.get(key)) is not None:
            await asyncio.wait([before])
        self._running[key] = self._next.pop(key)
        try:
            return await self._ask(key)
        finally:
            del self._running[key]


def _take_error(task: asyncio.Task[object]) -> None:
    if not task.cancelled():
        task.exception()
