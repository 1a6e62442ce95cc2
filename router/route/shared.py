"""Look-ups that callers share: if several callers ask for the same thing at the same time, one look-up serves all of
them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

_KeyT = TypeVar("_KeyT", bound=Hashable)
_T = TypeVar("_T")


@dataclass(slots=True)
class _Run(Generic[_T]):
    task: asyncio.Task[_T]
    callers: int = 0


class Shared(Generic[_KeyT, _T]):
    """`ask` looks a key up. For each key, only one run of `ask` happens at a time. A caller that comes during a run
    gets the answer of the next run, because an answer must not be older than the question. A run ends when its last
    caller leaves."""

    def __init__(self, ask: Callable[[_KeyT], Awaitable[_T]]) -> None:
        self._ask = ask
        self._running: dict[_KeyT, asyncio.Task[_T]] = {}
        # The runs that have not begun.
        self._next: dict[_KeyT, _Run[_T]] = {}

    async def get(self, key: _KeyT) -> _T:
        """Raises what `ask` raises."""
        run = self._next.get(key)
        if run is None:
            run = self._next[key] = _Run(asyncio.create_task(self._run(key)))
        task = run.task
        run.callers += 1
        try:
            # If a caller leaves, the others still get their answer.
            return await asyncio.shield(task)
        finally:
            run.callers -= 1
            if not run.callers and not task.done():
                if self._next.get(key) is run:
                    del self._next[key]
                # Retrieve the error of the run, if it raises one: asyncio logs errors that nobody has retrieved.
                task.add_done_callback(_take_error)
                task.cancel()

    async def _run(self, key: _KeyT) -> _T:
        if (before := self._running.get(key)) is not None:
            await asyncio.wait([before])
        self._running[key] = self._next.pop(key).task
        try:
            return await self._ask(key)
        finally:
            del self._running[key]


def _take_error(task: asyncio.Task[object]) -> None:
    if not task.cancelled():
        task.exception()
