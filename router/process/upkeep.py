"""The tasks that run beside the calls of a router process, such as the memory watch. The process relies on each of
them. So if a task ends by itself, the process stops, and the supervisor starts another process."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, Self

_log = logging.getLogger(__name__)


class Upkeep:
    """Runs tasks until the end of its scope. If a task ends by itself before that, sets `stop`."""

    def __init__(self, stop: asyncio.Event) -> None:
        self._stop = stop
        self._tasks: list[asyncio.Task[None]] = []
        self._is_over = False
        self._error: BaseException | None = None

    def begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.append(task)
        task.add_done_callback(self._ended)

    def check(self) -> None:
        """Raises the error of the first task that has failed, if any."""
        if self._error is not None:
            raise self._error

    def _ended(self, task: asyncio.Task[None]) -> None:
        if self._is_over or task.cancelled():
            return
        self._stop.set()
        if (error := task.exception()) is not None:
            _log.error("a task that must run for as long as this process serves has ended: stopping", exc_info=error)
            self._error = self._error or error

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._is_over = True
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
