"""Waits for changes by other processes, by polling."""

import time
from collections.abc import Callable

POLL_S = 0.01


def holds_by(deadline: float, condition: Callable[[], bool]) -> bool:
    """Waits until the condition is true. Returns False after the deadline. Checks the condition at least once."""
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(POLL_S)
    return True
