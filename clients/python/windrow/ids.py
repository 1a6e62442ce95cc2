"""Makes job ids. They are UUIDv7s, and each id is greater than the ids that this process made before. This module keeps
the last id of the process.

The ids follow RFC 9562, section 5.7, with the monotonic random counter of section 6.2, method 2. The last 48 bits are
the counter. In every millisecond, all random bits get new values from the system's random source. Only the counter's
top bit starts as 0. Within a millisecond the counter grows by a random step.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import sys
import threading
from collections.abc import Callable
from functools import lru_cache
from itertools import count
from time import time_ns

_NS_PER_MS = 1_000_000
# A bit above the 48 bits of the counter, so that the counter's hexadecimal text always has the same length.
_MARK = 1 << 48
_FULL = _MARK << 1
# The top bit of the counter starts as 0, and a step has 32 bits, so there is room for at least 2^15 ids. Python cannot
# make that many in 1 ms.
_START_MAX = (1 << 47) - 1

# The GIL makes next() of a count atomic. Without a GIL, that is guaranteed only from Python 3.14 on.
_LOCK_FREE = sys.version_info >= (3, 14) or getattr(sys, "_is_gil_enabled", lambda: True)()

_lock = threading.Lock()
_ms = 0
# The end of the current millisecond (ns since 1970), the prefix of its ids, and its counter. The whole tuple is
# replaced at once, so that a thread never sees parts of two tuples.
_current: tuple[int, str, Callable[[], int]] = (0, "", count().__next__)


def uuid7() -> str:
    """Returns a new UUIDv7 in canonical lower-case text, greater than every id that this process returned before.

    Thread-safe. If the clock is set back, ids keep the last time until the clock passes it.
    """
    while True:
        until, head, following = seen = _current
        if time_ns() < until:
            number = following()
            if number < _FULL:
                return head + hex(number)[3:]
        _begin(seen)


def nth_id(batch: str, n: int) -> str:
    """Returns the id of job `n` (0 to 4,294,967,295) of a batch, always the same for the same `batch` and `n`. `batch`
    is a UUIDv7 from uuid7(). The id begins with the batch's time, so routers accept it until the batch is 7 days old.
    Then come 42 bits of a hash of the batch, and then `n`, so the ids of a batch are in order. Raises ValueError."""
    if not 0 <= n < 1 << 32:
        raise ValueError(f"n must be 0 to 4,294,967,295, not {n}")
    return f"{_batch_head(batch)}{n:08x}"


@lru_cache(maxsize=16)
def _batch_head(batch: str) -> str:
    time = f"{round(made_at(batch) * 1000):012x}"
    luck = int.from_bytes(hashlib.blake2b(batch.encode(), digest_size=6).digest()) >> 6
    return f"{time[:8]}-{time[8:]}-{0x7000 | luck >> 30:04x}-{0x8000 | luck >> 16 & 0x3FFF:04x}-{luck & 0xFFFF:04x}"


def made_at(id: str) -> float:  # noqa: A002
    """Returns the time at which an id was made, by the clock of the process that made it: seconds since 1970-01-01 UTC.
    Raises ValueError for an id that is not a UUIDv7."""
    digits = id.replace("-", "")
    if len(digits) != 32 or digits[12] != "7":
        raise ValueError(f"{id!r} is not a UUIDv7")
    return int(digits[:12], 16) / 1000


def _begin(seen: tuple[int, str, Callable[[], int]]) -> None:
    """Begins the next millisecond. If the counter of the current millisecond is used up, the next millisecond begins
    ahead of the clock."""
    global _ms, _current
    with _lock:
        if _current is not seen:
            return
        _ms = max(time_ns() // _NS_PER_MS, _ms + 1)
        luck = secrets.randbits(12 + 14 + 47 + 32)
        step, start = 1 + (luck & 0xFFFFFFFF), _MARK | luck >> 32 & _START_MAX
        first, rest = 0x7000 | luck >> 93, 0x8000 | luck >> 79 & 0x3FFF
        time = f"{_ms:012x}"
        head = f"{time[:8]}-{time[8:]}-{first:04x}-{rest:04x}-"
        numbers = count(start, step).__next__
        _current = ((_ms + 1) * _NS_PER_MS, head, numbers if _LOCK_FREE else _locked(numbers))


def _locked(numbers: Callable[[], int]) -> Callable[[], int]:
    def following() -> int:
        with _lock:
            return numbers()

    return following


def _start_anew() -> None:
    # Make a new lock, because the fork may have happened inside _begin(). Forget the counter, because the parent
    # continues with it.
    global _lock, _current
    _lock = threading.Lock()
    _current = (0, "", count().__next__)


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_start_anew)
