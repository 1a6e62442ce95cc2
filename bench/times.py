"""How long calls took. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from bench.spread import percentile
from proof.history import Call


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Percentiles in ms. Failed calls count too."""

    calls: int
    p50: float
    p99: float
    worst: float


def times(calls: Iterable[Call]) -> Times | None:
    """Returns the times of these calls. Returns None if there are no calls."""
    ordered = sorted(call.took_s * 1000 for call in calls)
    if not ordered:
        return None
    return Times(calls=len(ordered), p50=percentile(ordered, 0.5), p99=percentile(ordered, 0.99), worst=ordered[-1])


def due_between(calls: Iterable[Call], first_s: float, past_s: float) -> list[Call]:
    return [call for call in calls if first_s <= call.due_s < past_s]


def p99_by_time(calls: Iterable[Call], *, start_s: float, step_s: float) -> list[tuple[float, float]]:
    """Returns the p99 of the calls that were due in each step: the step's start in seconds, and the p99 in ms."""
    steps: defaultdict[int, list[float]] = defaultdict(list)
    for call in calls:
        steps[int((call.due_s - start_s) // step_s)].append(call.took_s * 1000)
    return [(at * step_s, percentile(sorted(found), 0.99)) for at, found in sorted(steps.items())]
