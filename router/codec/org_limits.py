"""Converts limits between messages and vocabulary. Pure."""

from __future__ import annotations

from google.protobuf.duration_pb2 import Duration

from shard.errors import LimitReached
from shard.limits import Limit, LimitKey, Measure
from shard.vocabulary import OrgId, QueueName
from windrow.v1 import cluster_pb2, limits_pb2

_MEASURES: dict[Measure, limits_pb2.LimitMeasure.ValueType] = {
    Measure.JOBS: limits_pb2.LIMIT_MEASURE_JOBS,
    Measure.BYTES: limits_pb2.LIMIT_MEASURE_BYTES,
    Measure.STARTS: limits_pb2.LIMIT_MEASURE_STARTS,
    Measure.IN_FLIGHT: limits_pb2.LIMIT_MEASURE_IN_FLIGHT,
    Measure.BACKLOG: limits_pb2.LIMIT_MEASURE_BACKLOG,
    Measure.BACKLOG_BYTES: limits_pb2.LIMIT_MEASURE_BACKLOG_BYTES,
}
_BY_NUMBER = {number: measure for measure, number in _MEASURES.items()}


def limit_message(limit: Limit) -> limits_pb2.Limit:
    interval: Duration | None = None
    if limit.interval_us:
        interval = Duration()
        interval.FromMicroseconds(limit.interval_us)
    return limits_pb2.Limit(
        org=limit.key.org,
        queue=limit.key.queue,
        measure=_MEASURES[limit.key.measure],
        amount=limit.amount,
        interval=interval,
    )


def reached_message(error: LimitReached) -> limits_pb2.LimitReached:
    return limits_pb2.LimitReached(limit=limit_message(error.limit), usage=error.usage, asked=error.asked)


def limit_key(request: cluster_pb2.SetLimitRequest | cluster_pb2.ClearLimitRequest) -> LimitKey:
    """Returns the key of the limit that a checked request names."""
    return LimitKey(OrgId(request.org), QueueName(request.queue), _BY_NUMBER[request.measure])
