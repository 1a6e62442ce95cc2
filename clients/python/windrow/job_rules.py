"""The rules of proto/windrow/v1 for new jobs. The outbox needs them, because it takes jobs before a router can check
them. No I/O.

Only a router's decision is final. tests/unit/test_job_rules.py compares this module with a router's rules.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

from google.protobuf.duration_pb2 import Duration

from windrow.errors import Violation
from windrow.ids import made_at
from windrow.rules import Rule, limit
from windrow.v1 import job_pb2

# The contract's limit on the jobs, leases or ids of one call.
JOBS_MAX = 1000
PAYLOAD_BYTES_MAX = 1024 * 1024
# A router refuses an id that is older than this, because the router could not recognise duplicates of the job.
HORIZON_DAYS = 7
_DAY_S = 86_400
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}")
_UUID7 = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_RUN_AT_DAYS_MAX, _EXPIRES_AT_DAYS_MAX = 3650, 7300
_DEDUP_WINDOW_DAYS_MAX = _MAX_RUNTIME_DAYS = 30
# The upper bound of each text of a template, except the queue and the kind, which are names.
_TEXT_BYTES_MAX = {
    field.name: limit(job_pb2.JobTemplate, field.name, Rule.STRING_MAX_BYTES)
    for field in job_pb2.JobTemplate.DESCRIPTOR.fields
    if field.type == field.TYPE_STRING and field.name not in ("queue", "kind")
}
_SPAN_S_MAX = _RUN_AT_DAYS_MAX * _DAY_S


def org_fault(org: str) -> str:
    """Returns why a router would refuse an org's name, or an empty text."""
    if _CONTROL.search(org):
        return f"must not have control characters, not {org!r}"
    return "" if 1 <= len(org.encode()) <= 128 else f"must be 1 to 128 bytes, not {len(org.encode())}"


def job_faults(job: job_pb2.NewJob) -> Iterator[Violation]:
    """Yields the faults for which a router would refuse a job. The paths of the faults begin at the job."""
    template = job.template
    if _UUID7.fullmatch(job.id) is None:
        yield Violation("id", f"must be a UUID of version 7 in lower case, not {job.id!r}")
    elif (fault := age_fault(job.id)) is not None:
        yield Violation("id", fault)
    for name, value in (("queue", template.queue), ("kind", template.kind)):
        if _NAME.fullmatch(value) is None:
            words = "must be 1 to 128 of A–Z a–z 0–9 . _ : / -, the first a letter or digit"
            yield Violation(f"template.{name}", f"{words}, not {value:.128}" if value else "must not be empty")
    if len(template.payload) > PAYLOAD_BYTES_MAX:
        yield Violation(
            "template.payload", f"must be at most {PAYLOAD_BYTES_MAX:,} bytes, not {len(template.payload):,}"
        )
    if len(template.attributes) > 32:
        yield Violation("template.attributes", f"must have at most 32 entries, not {len(template.attributes):,}")
    for key, value in template.attributes.items():
        if not _is_text(key, 1, 128):
            yield Violation("template.attributes", f"a key must be 1 to 128 bytes without NUL, not {key!r:.128}")
        if not _is_text(value, 0, 1024):
            yield Violation("template.attributes", f"the value of {key!r:.128} must be at most 1,024 bytes without NUL")
    for name, number, largest in (
        ("priority", template.priority, 9),
        ("max_attempts", template.max_attempts, 1000),
    ):
        if not 0 <= number <= largest:
            yield Violation(f"template.{name}", f"must be 1 to {largest:,}, not {number}")
    if template.HasField("max_runtime") and not 1 <= _s(template.max_runtime) <= _MAX_RUNTIME_DAYS * _DAY_S:
        yield Violation("template.max_runtime", f"must be 1 s to 30 days, not {_s(template.max_runtime):g} s")
    for name, bytes_max in _TEXT_BYTES_MAX.items():
        if not _is_text(getattr(template, name), 0, bytes_max):
            yield Violation(f"template.{name}", f"must be at most {bytes_max:,} bytes without NUL")
    yield from _retry_faults(template.retry)
    if not 0 <= _s(job.delay) <= _SPAN_S_MAX:
        yield Violation("delay", f"must be 0 s to 3,650 days, not {_s(job.delay):g} s")
    for name, stamp, days_max in (
        ("run_at", job.run_at, _RUN_AT_DAYS_MAX),
        ("expires_at", job.expires_at, _EXPIRES_AT_DAYS_MAX),
    ):
        if stamp.seconds > time.time() + days_max * _DAY_S:
            yield Violation(name, f"must be at most {days_max:,} days ahead")
    if job.HasField("dedup"):
        if not _is_text(job.dedup.key, 1, 256):
            yield Violation("dedup.key", "must be 1 to 256 bytes without NUL")
        if job.dedup.HasField("window") and not 1 <= _s(job.dedup.window) <= _DEDUP_WINDOW_DAYS_MAX * _DAY_S:
            yield Violation("dedup.window", f"must be 1 s to 30 days, not {_s(job.dedup.window):g} s")
        elif job.dedup.HasField("window") and job.dedup.while_live:
            yield Violation("dedup.window", "must not be set if while_live is")


def age_fault(id: str) -> str | None:  # noqa: A002
    """Returns a text that says why an id is too old for a router, or None if it is not too old."""
    age_days = (time.time() - made_at(id)) / _DAY_S
    if age_days <= HORIZON_DAYS:
        return None
    return (
        f"was made {age_days:.1f} days ago; ids older than {HORIZON_DAYS} days are refused, because duplicates of them "
        "cannot be recognised"
    )


def _retry_faults(retry: job_pb2.RetryPolicy) -> Iterator[Violation]:
    growing = retry.exponential
    spans = {"fixed.delay": retry.fixed.delay, "exponential.max_delay": growing.max_delay}
    spans["exponential.initial_delay"] = growing.initial_delay
    outside = [(path, span) for path, span in spans.items() if not 0 <= _s(span) <= _SPAN_S_MAX]
    for path, span in outside:
        yield Violation(f"template.retry.{path}", f"must be 0 s to 3,650 days, not {_s(span):g} s")
    first_s, cap_s = (
        _s(span) if given else default_s
        for span, given, default_s in (
            (growing.initial_delay, growing.HasField("initial_delay"), 1.0),
            (growing.max_delay, growing.HasField("max_delay"), 3600.0),
        )
    )
    if cap_s < first_s and not outside:
        yield Violation("template.retry.exponential.max_delay", f"must not be below initial_delay, {first_s:g} s")
    if growing.multiplier and not 1 <= growing.multiplier <= 100:
        yield Violation("template.retry.exponential.multiplier", f"must be 1 to 100, not {growing.multiplier:g}")
    if not 0 <= growing.jitter <= 1:
        yield Violation("template.retry.exponential.jitter", f"must be 0 to 1, not {growing.jitter:g}")


def _is_text(text: str, shortest: int, longest: int) -> bool:
    """Returns whether the text has `shortest` to `longest` bytes and no NUL."""
    return shortest <= len(text.encode()) <= longest and "\0" not in text


def _s(span: Duration) -> float:
    return span.ToNanoseconds() / 1e9
