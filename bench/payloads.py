"""The payloads of all systems' jobs: 200 bytes, which begin with the time when they were made. Pure except for the
clock.

They are ASCII text, so that systems which keep JSON store as many bytes as those which keep bytes.
"""

from __future__ import annotations

import random
import string
import time

BYTES = 200
_STAMP_BYTES = 16
# The same bytes in every process; they hardly compress.
_PADDING = "".join(random.Random(7).choices(string.ascii_letters + string.digits, k=BYTES - _STAMP_BYTES)).encode()


def stamped(count: int, *, at_ns: int | None = None) -> list[bytes]:
    """Payloads stamped with `at_ns`, or else with now, by the machine's monotonic clock."""
    return [b"%016x" % (time.monotonic_ns() if at_ns is None else at_ns) + _PADDING] * count


def stamp_ns(payload: bytes) -> int:
    return int(payload[:_STAMP_BYTES], 16)


def intact(payload: bytes) -> bool:
    return payload[_STAMP_BYTES:] == _PADDING
