"""The payloads of all systems' jobs: 200 bytes, which begin with a time stamp. Pure except for the clock.

The payloads are ASCII text, so that systems that store JSON store as many bytes as systems that store bytes.
"""

from __future__ import annotations

import random
import string
import time

BYTES = 200
_STAMP_BYTES = 16
# Random bytes that are the same in every process, and that hardly compress.
_PADDING = "".join(random.Random(7).choices(string.ascii_letters + string.digits, k=BYTES - _STAMP_BYTES)).encode()


def stamped(count: int, *, at_ns: int | None = None) -> list[bytes]:
    """Returns payloads stamped with `at_ns`. If `at_ns` is None, the stamp is the current time by the machine's
    monotonic clock."""
    return [b"%016x" % (time.monotonic_ns() if at_ns is None else at_ns) + _PADDING] * count


def stamp_ns(payload: bytes) -> int:
    return int(payload[:_STAMP_BYTES], 16)


def intact(payload: bytes) -> bool:
    return payload[_STAMP_BYTES:] == _PADDING
