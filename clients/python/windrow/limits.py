"""Limits of how much an org may enqueue, as the client shows them (windrow/v1/limits.proto)."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from datetime import timedelta

from windrow.v1 import limits_pb2

# The reason of an error that carries a LimitReached.
LIMIT_REACHED = "LIMIT_REACHED"


class LimitMeasure(enum.Enum):
    """What a limit counts."""

    JOBS = "jobs"
    # The bytes of payloads, and of attributes as JSON.
    BYTES = "bytes"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """How much may be enqueued in each interval. After a pause, the whole amount may be enqueued at once."""

    # Empty: the default for all orgs, each by itself.
    org: str
    # Empty: all queues of the org together.
    queue: str
    measure: LimitMeasure
    amount: int
    interval: timedelta


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitReached:
    """The limit that had no room for a call."""

    limit: Limit
    # How much of the amount was in use.
    usage: int
    # How much the call asked for.
    asked: int


def read_limit(message: limits_pb2.Limit) -> Limit:
    return Limit(
        org=message.org,
        queue=message.queue,
        measure=_BY_NUMBER.get(message.measure, LimitMeasure.UNKNOWN),
        amount=message.amount,
        interval=message.interval.ToTimedelta(),
    )


def read_reached(message: limits_pb2.LimitReached) -> LimitReached:
    return LimitReached(limit=read_limit(message.limit), usage=message.usage, asked=message.asked)


def measure_number(measure: LimitMeasure) -> limits_pb2.LimitMeasure.ValueType:
    """Raises KeyError if it cannot be sent."""
    return _NUMBERS[measure]


_NUMBERS = {
    LimitMeasure.JOBS: limits_pb2.LIMIT_MEASURE_JOBS,
    LimitMeasure.BYTES: limits_pb2.LIMIT_MEASURE_BYTES,
}
_BY_NUMBER = {number: measure for measure, number in _NUMBERS.items()}
