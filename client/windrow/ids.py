"""Job ids: UUIDv7, in the order they were made. Owns this process's last id; refuses nothing.

RFC 9562, section 5.7, with the monotonic random counter of section 6.2, method 2: all 74 random bits are the counter.
It starts anew from the system's randomness every millisecond, and grows by a random step for each id within one.
"""

from __future__ import annotations

import os
import random
import secrets
import sys
import threading
import time

_lock = threading.Lock()
# The steps need only be hard to hit by chance. Not the shared generator: a user may seed that.
_steps = random.Random()
_ms = 0
# 74 bits; the top one starts clear, so that a millisecond has room for 2^41 steps.
_counter = 0
# What the ids of this millisecond begin with.
_head = ""


def uuid7() -> str:
    """A new id: a UUIDv7 in canonical lower-case text, greater than every earlier one of this process.

    Safe to call from several threads. A clock that is set back makes ids wait at the last time, not go back.
    """
    global _ms, _counter, _head
    now = time.time_ns() // 1_000_000
    with _lock:
        if now > _ms:
            _ms = now
            _counter = secrets.randbits(73)
            text = f"{now:012x}"
            _head = f"{text[:8]}-{text[8:]}-7"
        else:
            _counter += 1 + _steps.getrandbits(32)
        head, counter = _head, _counter
    return f"{head}{counter >> 62:03x}-{counter >> 48 & 0x3FFF | 0x8000:04x}-{counter & 0xFFFFFFFFFFFF:012x}"


def made_at(id: str) -> float:  # noqa: A002
    """When an id was made, by the clock that made it: seconds since 1970-01-01 UTC. ValueError: not a UUIDv7."""
    digits = id.replace("-", "")
    if len(digits) != 32 or digits[12] != "7":
        raise ValueError(f"{id!r} is not a UUIDv7")
    return int(digits[:12], 16) / 1000


def _start_anew() -> None:
    # The parent may have been forked in the middle of uuid7(), and goes on counting from the same number.
    global _lock, _ms
    _lock = threading.Lock()
    _ms = 0


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_start_anew)
