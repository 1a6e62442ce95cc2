"""Runs actions that somebody repeats anyway, such as periodic actions. A failure of such an action is only logged."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from shard.errors import ShardError

_log = logging.getLogger(__name__)


async def attempt(what: str, act: Callable[[], Awaitable[object]], *, level: int = logging.WARNING) -> bool:
    """Runs `act` once, and returns whether it succeeded. A failure is logged and not raised, because the next run will
    try again."""
    try:
        await act()
    except ShardError as error:
        _log.log(level, "could not %s: %s", what, error)
    except Exception:  # noqa: BLE001 - one failure must not stop the other work
        _log.exception("could not %s", what)
    else:
        return True
    return False
