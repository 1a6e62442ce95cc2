"""The payloads of all systems' jobs: 200 bytes, which begin with a time stamp. Pure except for the clock.

They are ASCII text, so that systems which keep JSON store as many bytes as those which keep bytes.
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
    """Returns payloads stamped with `at_ns`, or else with the current time, by the machine's monotonic clock."""
    return [b"%016x" % (time.monotonic_ns() if at_ns is None else at_ns) + _PADDING] * count


def stamp_ns(payload: bytes) -> int:
    return int(payload[:_STAMP_BYTES], 16)


def intact(payload: bytes) -> bool:
    return payload[_STAMP_BYTES:] == _PADDING
