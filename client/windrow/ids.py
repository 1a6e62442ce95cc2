"""Job ids: UUIDv7 (RFC 9562, section 5.7), which begin with the time they were made.

Ids of one process sort in the order in which they were made: within a millisecond, and should the clock step back, each is a
random step above the one before (RFC 9562, section 6.2, method 2).
"""

from __future__ import annotations

import os
import secrets
import threading
import time

_VERSION_7 = 0x7 << 76
_VARIANT = 0b10 << 62
_lock = threading.Lock()
# Milliseconds and 74 random bits of the newest id, as one number.
_newest = 0


def new_id() -> str:
    """A new id as canonical lower-case text. Safe in threads, and after a fork."""
    global _newest
    with _lock:
        fresh = (time.time_ns() // 1_000_000) << 74 | secrets.randbits(73)
        _newest = fresh if fresh >> 74 > _newest >> 74 else _newest + 1 + secrets.randbits(32)
        number = _newest
    tail = number & ((1 << 74) - 1)
    value = (number >> 74) << 80 | _VERSION_7 | (tail >> 62) << 64 | _VARIANT | (tail & ((1 << 62) - 1))
    text = f"{value:032x}"
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


def _after_fork() -> None:
    """A child must not go on where its parent goes on, nor wait for a lock that a thread of the parent's held."""
    global _lock, _newest
    _lock = threading.Lock()
    _newest = 0


os.register_at_fork(after_in_child=_after_fork)
