"""Runs a router's periodic tasks, and the tasks that never end. Logs their failures and runs them again."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable

from shard.attempts import attempt

_RESTART_S = 1.0


async def every(interval_s: float, what: str, act: Callable[[], Awaitable[object]]) -> None:
    """Runs `act` about every `interval_s` seconds (±10 %), for ever. Failures are logged as "could not {what}",
    and only the first of several failures in a row as a warning."""
    failing = False
    while True:
        await asyncio.sleep(interval_s * random.uniform(0.9, 1.1))
        failing = not await attempt(what, act, level=logging.DEBUG if failing else logging.WARNING)


async def keep_on(what: str, run: Callable[[], Awaitable[object]], *, pause_s: float = _RESTART_S) -> None:
    """Runs `run`, which is to run until it is cancelled. If `run` fails, runs it again after a pause: an error in one
    task must not end the router, which also serves other shards and orgs."""
    while True:
        await attempt(what, run)
        await asyncio.sleep(pause_s)
