"""Every metric of Windrow, declared once: docs/metrics.md is generated from this module, and the alert rules are
checked against it.

Metrics are recorded per call or per act, never per job. Their labels, such as method, code, shard and act, have few
values. No label names a job or a payload. Only the gauges of the largest queues name orgs and queues. If
PROMETHEUS_MULTIPROC_DIR is set when this module is imported, the values are in files of that folder, so that the values
of several processes can be added up, and the values of a killed process are not lost (router/process/metrics.py). If
PROMETHEUS_MULTIPROC_DIR is not set, the values stay in the memory of this process, and nothing exports them. Acts are
recorded by shard/queue/act_metrics.py, and calls by router/gate/calls.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

# Buckets for how long calls and acts take, in seconds.
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0)
# Buckets for how long jobs wait for workers, in seconds.
_WAITS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0, 3600.0)
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
    """Declares a gauge that shows the lowest value of the running processes."""
    DECLARED.append(Declared(name, "gauge", labels, unit, meaning))
    return Gauge(name, meaning, labels, registry=_REGISTRY, multiprocess_mode="livemin")


def _at_once(name: str, unit: str, meaning: str, *labels: str) -> Declared:
    """Declares a gauge whose values a process replaces all at once, in a file (router/fleet/shard_gauges.py). So a
    queue that is no longer among the largest loses its series."""
    DECLARED.append(declared := Declared(name, "gauge", labels, unit, meaning))
    return declared


CALLS = _counter(
    "windrow_calls_total", "calls", "Calls and streams that have ended, by the status that they ended with.",
    "method", "code",
)  # fmt: skip
CALL_SECONDS = _histogram(
    "windrow_call_duration_seconds", "seconds",
    "Time from the beginning of a unary call to its answer, refused ones included. For Dequeue it includes the time "
    "for which the call waited for jobs.",
    "method", buckets=SECONDS,
)  # fmt: skip
ACT_SECONDS = _histogram(
    "windrow_act_duration_seconds", "seconds",
    "Time that an act takes: the calls that share its statements wait for all of it, their wait for a connection "
    "included.",
    "shard", "act", buckets=SECONDS,
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
PICKUP_SECONDS = _histogram(
    "windrow_pickup_seconds", "seconds",
    "How long the job of a claim that had been due longest had waited, for each claim that got jobs. Jobs that an "
    "enqueue hands over do not wait.",
    "shard", buckets=_WAITS,
)  # fmt: skip
LEASES_EXPIRED = _counter(
    "windrow_leases_expired_total", "leases",
    "Leases that had expired, found when their jobs were leased again.", "shard",
)  # fmt: skip
DEAD = _counter(
    "windrow_jobs_dead_total", "jobs",
    "Jobs that died: they failed permanently, or had no attempt left.", "shard",
)  # fmt: skip
SETTLED = _counter(
    "windrow_leases_settled_total", "leases",
    "Leases named by calls that settle or extend them, by the answer. stale: the lease had ended.",
    "shard", "verb", "answer",
)  # fmt: skip
SHARD_UP = _lowest(
    "windrow_shard_up", "0 or 1",
    "1 if every process of this router can use the shard; 0 if it is away for one of them. NaN once the cluster file "
    "no longer names it, or says that it is off.",
    "shard",
)  # fmt: skip
CATALOG_UP = _lowest(
    "windrow_catalog_up", "0 or 1",
    "1 if every process of this router has read the catalog within 10 seconds; 0 if one of them has not.",
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
QUEUE_JOBS = _at_once(
    "windrow_queue_jobs", "jobs",
    "Unfinished jobs of a queue by state, as they were counted last, about every minute. Only the largest queues of a "
    "shard are named, and none by default; the series without org and queue has the sums of all others.",
    "shard", "org", "queue", "state",
)  # fmt: skip
QUEUE_OLDEST_SECONDS = _at_once(
    "windrow_queue_oldest_ready_seconds", "seconds",
    "How long the oldest job that a claim would get had been ready; 0 if there was none, or the queue is paused.",
    "shard", "org", "queue",
)  # fmt: skip
SLOTS = _at_once(
    "windrow_slots", "slots",
    "Slots by shard, without those of pinned orgs. owned: the shard takes their jobs. leaving: they move away, and the "
    "shard is only read for them.",
    "shard", "state",
)  # fmt: skip
SNAPSHOT_SECONDS = _at_once(
    "windrow_oldest_snapshot_seconds", "seconds",
    "How long the oldest snapshot has been held on the shard, which keeps dead rows from being removed; 0 if there is "
    "none. Sessions of other roles are seen only with pg_read_all_stats.",
    "shard",
)  # fmt: skip
SCHEDULE_LATE_SECONDS = _at_once(
    "windrow_schedule_late_seconds", "seconds",
    "How late the schedule of the shard is that is the latest; 0 if none is.", "shard",
)  # fmt: skip
ARCHIVE_LATE_SECONDS = _at_once(
    "windrow_archive_late_seconds", "seconds",
    "For how long the archiver could have moved a day of finished jobs to the cold tables, or dropped one; 0 if none.",
    "shard",
)  # fmt: skip
TRANSACTION_AGE = _at_once(
    "windrow_transaction_age", "transactions",
    "How many transactions ago the oldest row on the shard's server was written that is not frozen. Postgres refuses "
    "writes shortly before it is 2,147,483,648.",
    "shard",
)  # fmt: skip
CONNECTIONS_USED = _at_once(
    "windrow_connections_used_ratio", "0 to 1",
    "The share of the connections that ordinary roles may open on the shard's server that is used.", "shard",
)  # fmt: skip
PARTITIONS_MISSING = _at_once(
    "windrow_partitions_missing", "partitions",
    "Partitions of finished jobs, from yesterday to tomorrow, that no router has made ahead.", "shard",
)  # fmt: skip
