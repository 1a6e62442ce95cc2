"""Whether a request keeps the contract. The rules stand in proto/windrow/v1; protovalidate applies them.
 It costs 3 µs for each job of an Enqueue, which is most of what the router does with one. So the plainest batches
(id, queue, kind, payload, priority) are recognised by a handful of checks on whole columns; these accept less than
the rules do, never more, and what they do not accept the rules decide and explain.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable

import protovalidate
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp
from protovalidate import FieldPathElementPb as FieldPathElement

from router.status import InvalidRequest, Violation
from windrow.v1 import job_pb2, queue_pb2

_PAYLOAD_BYTES_MAX = 1 << 20
_JOBS_MAX = 1000
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}", re.ASCII)
_ORG = re.compile(r"[!-~]{1,128}", re.ASCII)
_UUID7S = re.compile(r"(?:[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}(?:,|\Z))+")
_TEN_YEARS_S = 3650 * 86400


def check(request: Message) -> None:
    """Applies the contract's rules. Raises InvalidRequest with every violation."""
    violations = violations_of(request)
    if violations:
        raise InvalidRequest(violations)


def violations_of(request: Message) -> list[Violation]:
    """Every violation of the contract's rules, by field path."""
    return [
        Violation(_path(found.proto.field.elements if found.proto.field else ()), found.proto.message)
        for found in protovalidate.collect_violations(request)
    ]


def enqueue_violations(request: queue_pb2.EnqueueRequest) -> list[Violation]:
    """The violations of an Enqueue: the contract's rules, and what depends on the time."""
    if _is_plain(request):
        return []
    violations = violations_of(request)
    now_s = time.time()
    for at, job in enumerate(request.jobs):
        if job.HasField("run_at"):
            violations += _time_violations(f"jobs[{at}].run_at", job.run_at, latest_s=now_s + _TEN_YEARS_S)
        if job.HasField("expires_at"):
            violations += _time_violations(f"jobs[{at}].expires_at", job.expires_at, latest_s=now_s + 2 * _TEN_YEARS_S)
        if job.HasField("dedup_window") and not job.dedup_key:
            violations.append(Violation(f"jobs[{at}].dedup_window", "is set, but dedup_key is not"))
    return violations


def _is_plain(request: queue_pb2.EnqueueRequest) -> bool:
    jobs = request.jobs
    if not _ORG.fullmatch(request.org) or not 1 <= len(jobs) <= _JOBS_MAX:
        return False
    names = {job.queue for job in jobs}
    names.update(job.kind for job in jobs)
    return (
        all(map(_NAME.fullmatch, names))
        and _UUID7S.fullmatch(",".join([job.id for job in jobs])) is not None
        and all(len(job.payload) <= _PAYLOAD_BYTES_MAX and 0 <= job.priority <= 9 for job in jobs)
        and not any(map(_has_more, jobs))
    )


def _has_more(job: job_pb2.NewJob) -> bool:
    return bool(
        job.attributes
        or job.WhichOneof("when")
        or job.max_attempts
        or job.dedup_key
        or job.HasField("trace")
        or job.HasField("expires_at")
        or job.HasField("retry")
        or job.HasField("dedup_window")
    )


def _time_violations(field: str, stamp: Timestamp, *, latest_s: float) -> Iterable[Violation]:
    if not 0 <= stamp.nanos <= 999_999_999 or stamp.seconds < -62_135_596_800:
        yield Violation(field, "is not a valid timestamp")
    elif stamp.seconds > latest_s:
        yield Violation(field, "must be at most 3,650 days ahead" if field.endswith("run_at") else "is too far ahead")


def _path(elements: Iterable[FieldPathElement]) -> str:
    """A field path in the usual notation: jobs[3].attributes["a"]."""
    path = ""
    for element in elements:
        path += f".{element.field_name}" if path else element.field_name
        subscript = element.subscript
        if subscript is not None:
            path += f"[{json.dumps(subscript.value)}]"
    return path
