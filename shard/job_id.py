"""Reads ids of jobs: UUIDv7s, as canonical lower-case text. Pure. router/codec/validate.py checks the ids in requests.

As text, UUIDv7s sort by the time when they were made.
"""

from __future__ import annotations

import re
from uuid import UUID

from shard.vocabulary import HORIZON_DAYS, HOUR_US, JobId

# How far the time in an id may be ahead of the shard's clock.
_AHEAD_US_MAX = HOUR_US
HORIZON_US = HORIZON_DAYS * 24 * HOUR_US
_UUID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def is_uuid(text: str) -> bool:
    """Returns whether this is a UUID of any version, as canonical lower-case text."""
    return _UUID.fullmatch(text) is not None


def made_at_ms(job_id: str) -> int:
    """Returns the milliseconds since 1970 with which a UUIDv7 begins."""
    return int(job_id[:8] + job_id[9:13], 16)


def bounds_ms(now_us: int) -> tuple[int, int]:
    """Returns the first and the last millisecond in which the id of a new job or workflow may have been made. The
    statements that store jobs and workflows have the same rule."""
    return -(-(now_us - HORIZON_US) // 1000), (now_us + _AHEAD_US_MAX) // 1000


def to_hex(job_id: str) -> str:
    """Returns the id as 32 hex digits, without dashes."""
    return job_id.replace("-", "")


def from_hex(digits: str) -> JobId:
    """Returns the id of these 32 hex digits."""
    return JobId(str(UUID(hex=digits)))
