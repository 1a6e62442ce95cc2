"""One timer for many equal time limits, such as those of router/gate/admission.py. A timer for each call would cost
more than all other work of the gate."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


class Deadlines(Generic[Key]):
    """Calls `on_timeout` with each key that `end` has not removed within `limit_s` seconds after `begin`."""

    def __init__(self, limit_s: float, on_timeout: Callable[[Key], None]) -> None:
        self._limit_s = limit_s
        self._on_timeout = on_timeout
        # When each key began; the oldest is first.
        self._since_s: OrderedDict[Key, float] = OrderedDict()
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, key: Key) -> None:
        loop = asyncio.get_running_loop()
        self._since_s[key] = loop.time()
        if self._timer is None:
            self._timer = loop.call_later(self._limit_s, self._look)

    def end(self, key: Key) -> bool:
        """Removes the key. Returns False if its time was already over, or if it never began."""
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
            self._on_timeout(key)
