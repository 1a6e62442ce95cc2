"""What is done again and again for as long as a router runs."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable

from shard.errors import ShardError

_log = logging.getLogger(__name__)


async def every(interval_s: float, what: str, act: Callable[[], Awaitable[object]]) -> None:
    """Does something again and again; a failure is logged, and the next turn tries again."""
    while True:
        await asyncio.sleep(interval_s * random.uniform(0.9, 1.1))
        await attempt(what, act)


async def attempt(what: str, act: Callable[[], Awaitable[object]]) -> None:
    """Does something that will be done again; a failure is logged."""
    try:
        await act()
    except ShardError as error:
        _log.warning("could not %s: %s", what, error)
    except Exception:  # noqa: BLE001 - one trouble must not end all other upkeep
        _log.exception("could not %s", what)
