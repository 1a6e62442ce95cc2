"""Limits of an org (windrow/v1/limits.proto), as the client shows them: how much it may enqueue, how many of its jobs
may start or be leased at the same time, and how large its backlog may be."""

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
    # Leases that begin in an interval. A limit of this measure refuses nothing: jobs wait until it has room.
    STARTS = "starts"
    # Jobs that are leased at the same time. A limit of this measure refuses nothing: jobs wait until a lease ends.
    IN_FLIGHT = "in_flight"
    # Jobs that have not ended, and the bytes of their payloads and attributes.
    BACKLOG = "backlog"
    BACKLOG_BYTES = "backlog_bytes"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """A limit with an interval says how much may be enqueued, or how many jobs may start, in each interval. After an
    idle time, the whole amount may be used at once. A limit without an interval says how many jobs may be leased at a
    time, or how large the backlog may be."""

    # Empty: the default for each org.
    org: str
    # Empty: all queues of the org together.
    queue: str
    measure: LimitMeasure
    amount: int
    # None: `measure` is IN_FLIGHT, BACKLOG or BACKLOG_BYTES.
    interval: timedelta | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitReached:
    """The limit that had no room for a call."""

    limit: Limit
    # How much of the amount was in use.
    usage: int
    # How much of the amount the call needed.
    asked: int

    def part_of(self, jobs: int) -> int:
        """Returns how many of the refused call's jobs to send at a time, so that the limit may have room for them. 0:
        even a single job is too much."""
        return max(1, min(jobs - 1, jobs * self.limit.amount // max(self.asked, 1))) if jobs > 1 else 0


def read_limit(message: limits_pb2.Limit) -> Limit:
    return Limit(
        org=message.org,
        queue=message.queue,
        measure=_BY_NUMBER.get(message.measure, LimitMeasure.UNKNOWN),
        amount=message.amount,
        interval=message.interval.ToTimedelta() if message.HasField("interval") else None,
    )


def read_reached(message: limits_pb2.LimitReached) -> LimitReached:
    return LimitReached(limit=read_limit(message.limit), usage=message.usage, asked=message.asked)


def measure_number(measure: LimitMeasure) -> limits_pb2.LimitMeasure.ValueType:
    """Returns the number of a measure in the proto files. Raises KeyError if the measure cannot be sent."""
    return _NUMBERS[measure]


_NUMBERS = {
    LimitMeasure.JOBS: limits_pb2.LIMIT_MEASURE_JOBS,
    LimitMeasure.BYTES: limits_pb2.LIMIT_MEASURE_BYTES,
    LimitMeasure.STARTS: limits_pb2.LIMIT_MEASURE_STARTS,
    LimitMeasure.IN_FLIGHT: limits_pb2.LIMIT_MEASURE_IN_FLIGHT,
    LimitMeasure.BACKLOG: limits_pb2.LIMIT_MEASURE_BACKLOG,
    LimitMeasure.BACKLOG_BYTES: limits_pb2.LIMIT_MEASURE_BACKLOG_BYTES,
}
_BY_NUMBER = {number: measure for measure, number in _NUMBERS.items()}
