"""How long jobs waited for a worker: reads the records of client processes, and sorts them by time. Pure except for
reading files."""

from __future__ import annotations

import math
from array import array
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.spread import percentile
from proof.history import History


@dataclass(frozen=True, slots=True, kw_only=True)
class Pickup:
    # When the job was due to be stored, by the machine's monotonic clock.
    due_s: float
    waited_ms: float


def since_due(history: History) -> list[Pickup]:
    """Returns for each delivery how long its job had waited since its enqueue was due."""
    enqueues = {one.job: one.call for one in history.enqueues}
    return [
        Pickup(due_s=call.due_s, waited_ms=(one.received_s - call.due_s) * 1000)
        for one in history.deliveries
        if (call := enqueues.get(one.lease.job)) is not None
    ]


def since_stored(history: History) -> list[Pickup]:
    """Returns for each delivery how long its job had waited since its enqueue was answered OK."""
    stored_s = {one.job: one.call.ended_s for one in history.enqueues if one.answered is not None}
    return [
        # A worker may have the job before its producer gets the answer.
        Pickup(due_s=at_s, waited_ms=max(0.0, (one.received_s - at_s) * 1000))
        for one in history.deliveries
        if (at_s := stored_s.get(one.lease.job)) is not None
    ]


def read(file: Path) -> list[Pickup]:
    """Reads the pickups of a file, in the order in which the jobs were taken."""
    numbers = array("q")
    numbers.frombytes(file.read_bytes())
    pairs = zip(numbers[::2], numbers[1::2], strict=True)
    return [Pickup(due_s=(at_ns - waited_ns) / 1e9, waited_ms=waited_ns / 1e6) for at_ns, waited_ns in pairs]


@dataclass(frozen=True, slots=True, kw_only=True)
class Waits:
    """Percentiles in ms. The wait of a job that was never taken counts as infinite."""

    jobs: int
    p50: float
    p99: float
    worst: float

    def told(self) -> dict[str, float | None]:
        """Returns the values for JSON, which has no infinity."""
        numbers = {"p50_ms": self.p50, "p99_ms": self.p99, "worst_ms": self.worst}
        return {"jobs": self.jobs, **{name: None if math.isinf(ms) else ms for name, ms in numbers.items()}}


def waits(pickups: Iterable[Pickup], *, never: int = 0) -> Waits | None:
    """Returns the waits of these pickups, and of `never` more jobs that were not taken at all. Returns None if there
    are no jobs."""
    ordered = sorted(pickup.waited_ms for pickup in pickups) + [math.inf] * never
    if not ordered:
        return None
    return Waits(jobs=len(ordered), p50=percentile(ordered, 0.5), p99=percentile(ordered, 0.99), worst=ordered[-1])


def by_time(pickups: Iterable[Pickup], *, start_s: float, step_s: float, share: float) -> list[tuple[float, float]]:
    """Returns a percentile of the waits for each step of time, as pairs: when the step begins, in seconds since the
    start, and the percentile in ms. A job belongs to the step in which it was due."""
    steps: dict[int, list[float]] = defaultdict(list)
    for pickup in pickups:
        steps[int((pickup.due_s - start_s) // step_s)].append(pickup.waited_ms)
    return [(step * step_s, percentile(sorted(found), share)) for step, found in sorted(steps.items())]


def due_between(pickups: Sequence[Pickup], first_s: float, past_s: float) -> list[Pickup]:
    return [pickup for pickup in pickups if first_s <= pickup.due_s < past_s]


def ms_text(ms: float) -> str:
    return "never" if math.isinf(ms) else f"{ms:,.2f}" if ms < 100 else f"{ms:,.0f}"
