"""Waiting for what other processes do, which nobody tells."""

import time
from collections.abc import Callable

POLL_S = 0.01


def holds_by(deadline: float, condition: Callable[[], bool]) -> bool:
    """Whether the condition came true before the deadline; it is asked at least once."""
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(POLL_S)
    return True
