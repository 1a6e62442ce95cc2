"""Every metric of Windrow, declared once: docs/metrics.md is generated from this module, and the alert rules are
checked against it.

Metrics are recorded per call or per act, never per job. Their labels are method, code, shard, act and the like, whose
values are few; never an org, a job or a payload. If PROMETHEUS_MULTIPROC_DIR is set when this module is imported, the
values are in files of that folder, so that those of several processes can be added up, and those of a killed process
are not lost (router/process/metrics.py). Otherwise they are in memory, where nobody reads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0)
_SIZES = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)


class Declared(NamedTuple):
    """One metric as Prometheus shows it."""

    # A histogram has series with the suffixes _bucket, _sum and _count.
    name: str
    kind: Literal["counter", "gauge", "histogram"]
    labels: tuple[str, ...]
    unit: str
    meaning: str


DECLARED: list[Declared] = []
_REGISTRY = CollectorRegistry()


def _counter(name: str, unit: str, meaning: str, *labels: str) -> Counter:
    DECLARED.append(Declared(name, "counter", labels, unit, meaning))
    return Counter(name, meaning, labels, registry=_REGISTRY)


def _histogram(name: str, unit: str, meaning: str, *labels: str, buckets: Sequence[float]) -> Histogram:
    DECLARED.append(Declared(name, "histogram", labels, unit, meaning))
    return Histogram(name, meaning, labels, buckets=buckets, registry=_REGISTRY)


def _lowest(name: str, unit: str, meaning: str, *labels: str) -> Gauge:
    """A gauge: the lowest value of the processes that run."""
    DECLARED.append(Declared(name, "gauge", labels, unit, meaning))
    return Gauge(name, meaning, labels, registry=_REGISTRY, multiprocess_mode="livemin")


CALLS = _counter(
    "windrow_calls_total", "calls", "Calls and streams that have ended, by the status that they ended with.",
    "method", "code",
)  # fmt: skip
CALL_SECONDS = _histogram(
    "windrow_call_duration_seconds", "seconds",
    "Time from the beginning of a unary call to its answer, refused ones included. For Dequeue it includes the time "
    "for which the call waited for jobs.",
    "method", buckets=_SECONDS,
)  # fmt: skip
ACT_SECONDS = _histogram(
    "windrow_act_duration_seconds", "seconds",
    "Time that an act takes: the calls that share its statements wait for all of it, their wait for a connection "
    "included.",
    "shard", "act", buckets=_SECONDS,
)  # fmt: skip
ACT_CALLS = _histogram(
    "windrow_act_calls", "calls", "Calls that shared an act.", "shard", "act", buckets=_SIZES
)  # fmt: skip
ENQUEUED = _counter(
    "windrow_jobs_enqueued_total", "jobs", "Jobs of enqueues: new ones, and duplicates, which were known before.",
    "shard", "outcome",
)  # fmt: skip
CLAIMED = _counter(
    "windrow_jobs_claimed_total", "jobs",
    "Jobs leased by claims. Jobs that an enqueue hands over to a waiting consumer are not claimed.", "shard",
)  # fmt: skip
SETTLED = _counter(
    "windrow_leases_settled_total", "leases",
    "Leases named by acks, nacks, extends, releases and snoozes, by the answer. stale: the lease had ended.",
    "shard", "verb", "answer",
)  # fmt: skip
SHARD_UP = _lowest(
    "windrow_shard_up", "0 or 1",
    "1 if every process of this router can use the shard; 0 if it is away for one of them. NaN once the cluster file "
    "no longer names it, or says that it is off.",
    "shard",
)  # fmt: skip
QUARANTINED_KINDS = _lowest(
    "windrow_quarantined_kinds", "kinds",
    "Kinds of jobs that are quarantined on the shard, because they crashed their workers or an operator did it.",
    "shard",
)  # fmt: skip
CERTIFICATE_EXPIRY = _lowest(
    "windrow_certificate_expiry_timestamp_seconds",
    "Unix time",
    "When the router's TLS certificate expires; 0 without TLS.",
)
