"""Medians, spreads, ratios and percentiles. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """A median with the least and the greatest of `runs` values."""

    median: float
    low: float
    high: float
    runs: int

    def text(self, form: str = ",.0f") -> str:
        if self.runs == 1:
            return f"{self.median:{form}}"
        return f"{self.median:{form}} ({self.low:{form}} – {self.high:{form}})"


def spread(values: Iterable[float]) -> Spread:
    """Returns the spread of these values. Raises ValueError if there are no values."""
    found = list(values)
    if not found:
        raise ValueError("no values have no spread")
    return Spread(median=statistics.median(found), low=min(found), high=max(found), runs=len(found))


def ratio(above: Mapping[int, float], below: Mapping[int, float]) -> Spread | None:
    """Returns the spread of the rounds' ratios. Returns None if no round has both values."""
    both = [above[run] / below[run] for run in above if below.get(run)]
    return spread(both) if both else None


def percentile(ordered: Sequence[float], share: float) -> float:
    """Returns a percentile by the nearest rank: the least value such that at least `share` (0 to 1) of all values are
    not greater. Raises ValueError if there are no values."""
    if not ordered:
        raise ValueError("no values have no percentile")
    # Round first, because 0.07 * 100 is 7.000000000000001.
    rank = -int(-round(share * len(ordered), 6) // 1)
    return ordered[max(0, rank - 1)]
