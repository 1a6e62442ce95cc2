"""Handles jobs for which a worker has no handler: decides when these jobs run again, and logs them. No I/O except the
log.

Such a job is usually newer than its worker: a rolling deploy has updated the producers first. So the job is snoozed,
which does not count as an attempt. The pauses grow until a newer worker runs."""

from __future__ import annotations

import random
import time
from collections import Counter

from opentelemetry import metrics

from windrow.jobs import Job
from windrow.leases import log
from windrow.outcomes import Snoozed
from windrow.payloads import REASON_BYTES_MAX, clipped

PAUSE_S_MIN, PAUSE_S_MAX = 5.0, 300.0
# A worker logs at most one line in this time, with at most this many kinds.
_LOG_EVERY_S = 60.0
_KINDS_MAX = 10


class Unhandled:
    def __init__(self, worker: str, meters: metrics.MeterProvider | None) -> None:
        self._worker = worker
        self._jobs = metrics.get_meter("windrow", meter_provider=meters).create_counter(
            "windrow.worker.unhandled_jobs",
            unit="{job}",
            description="Jobs given back because their kind has no handler.",
        )
        self._since_logged: Counter[str] = Counter()
        self._logged_at: float | None = None

    def give_back(self, job: Job) -> Snoozed:
        """Counts and logs the job. Returns its outcome."""
        self._jobs.add(1, {"messaging.destination.name": job.queue})
        kind = job.kind if job.kind in self._since_logged or len(self._since_logged) < _KINDS_MAX else "others"
        self._since_logged[kind] += 1
        now = time.monotonic()
        if self._logged_at is None or now - self._logged_at >= _LOG_EVERY_S:
            log.warning(
                "%s: no handler for jobs of these kinds; they are given back uncounted, and run again within %g s: %s",
                self._worker,
                PAUSE_S_MAX,
                ", ".join(f"{count:,} of {kind!r}" for kind, count in self._since_logged.items()),
            )
            self._since_logged.clear()
            self._logged_at = now
        reason = f"no handler for kind {job.kind!r} in worker {self._worker}"
        return Snoozed(after_s=pause_s(job, luck=random.random()), reason=clipped(reason, REASON_BYTES_MAX))


def pause_s(job: Job, *, luck: float) -> float:
    """Returns the pause before the job runs again: 5 s to 5 min, times 0.5 to 1.0 as `luck` (0.0 to 1.0) decides.

    The pause grows with the time from `enqueued_at` to `run_at`, because each earlier pause has moved `run_at` to a
    later time. So the pause nearly doubles each time, and all workers compute the same pause (except for `luck`),
    although no pause is stored. Both times come from the shard's clock."""
    known_s = (job.run_at - job.enqueued_at).total_seconds()
    return min(PAUSE_S_MAX, max(PAUSE_S_MIN, known_s)) * (0.5 + luck / 2)
