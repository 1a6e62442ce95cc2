"""A time limit for many things at once, with one timer for all of them: a timer for each call would cost more than what
else the gate does."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


class Deadlines(Generic[Key]):
    """Calls `late` with each key that has begun and has not ended after `limit_s`; its time is over then."""

    def __init__(self, limit_s: float, late: Callable[[Key], None]) -> None:
        self._limit_s = limit_s
        self._late = late
        # By when each has begun, the oldest first.
        self._since_s: OrderedDict[Key, float] = OrderedDict()
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, key: Key) -> None:
        loop = asyncio.get_running_loop()
        self._since_s[key] = loop.time()
        if self._timer is None:
            self._timer = loop.call_later(self._limit_s, self._look)

    def end(self, key: Key) -> bool:
        """Answers whether it ended in time."""
        return self._since_s.pop(key, None) is not None

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = None
        while self._since_s:
            key, since_s = next(iter(self._since_s.items()))
            if since_s + self._limit_s > loop.time():
                self._timer = loop.call_at(since_s + self._limit_s, self._look)
                return
            del self._since_s[key]
            self._late(key)
