"""The backfills that operators of schedules ask for: ranges of the recent past, which may begin before the schedule was
created."""

from __future__ import annotations

import random

from proof.checker.evidence import Backfill
from windrow.v1 import schedules_pb2

_SPAN_S = (1.0, 15.0)
# A range ended at most this many seconds ago.
_AGO_S_MAX = 20.0
# Overlap policies, and whether they may skip an instant. BUFFER_ALL may skip too: a schedule buffers up to 100 runs. A
# range has fewer instants, but other runs of the schedule may be buffered already.
_OVERLAPS = (
    (None, False),
    (schedules_pb2.OVERLAP_POLICY_ALLOW, False),
    (schedules_pb2.OVERLAP_POLICY_SKIP, True),
    (schedules_pb2.OVERLAP_POLICY_BUFFER_ONE, True),
    (schedules_pb2.OVERLAP_POLICY_BUFFER_ALL, True),
)


def draw(luck: random.Random, *, org: str, name: str, now_us: int) -> schedules_pb2.BackfillScheduleRequest:
    # Half of the ranges end now, so they contain instants that are due but not decided yet.
    ago_s = 0.0 if luck.random() < 0.5 else luck.uniform(0.0, _AGO_S_MAX)
    end_us = now_us - round(ago_s * 1_000_000)
    overlap, _ = luck.choice(_OVERLAPS)
    request = schedules_pb2.BackfillScheduleRequest(org=org, name=name, overlap=overlap)
    request.begin.FromMicroseconds(end_us - round(luck.uniform(*_SPAN_S) * 1_000_000))
    request.end.FromMicroseconds(end_us)
    return request


def seen(
    request: schedules_pb2.BackfillScheduleRequest,
    began_us: int,
    ended_us: int | None,
    answer: schedules_pb2.BackfillScheduleResponse | None,
) -> Backfill:
    """Returns what the checker learns about one call."""
    instants = None if answer is None else answer.stored + answer.buffered + answer.skipped + answer.known
    return Backfill(
        begin_us=request.begin.ToMicroseconds(),
        end_us=request.end.ToMicroseconds(),
        may_skip=dict(_OVERLAPS)[request.overlap if request.HasField("overlap") else None],
        began_us=began_us,
        ended_us=ended_us,
        instants=instants,
    )
