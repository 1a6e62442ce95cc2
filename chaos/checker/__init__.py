"""Whether the invariants held, by what clients saw and what the tables say. Pure: evidence in, violations out.

Never a false alarm: what may have been so without a bug is not reported. Client-side times are of one monotonic clock;
what is concluded from them, and why it is safe, stands beside each rule.
"""

from __future__ import annotations

from chaos.checker import bounds, files, leases, orgs, ownership, progress, stored
from chaos.checker.evidence import Evidence, Violation

__all__ = ["EXAMINED", "Evidence", "Violation", "check"]

# What a run looks at, by the names of docs/concepts.md; and two things more.
EXAMINED = {
    "I1": "Nothing acknowledged is lost",
    "I2": "One lease at a time",
    "I3": "Enqueue is idempotent",
    "I4": "One org never sees another",
    "I5": "Conservation",
    "I6": "Stale knowledge is refused, not obeyed",
    "I7": "Hints are never truth",
    "I9": "Bounds hold against anyone",
    "restart": "An orderly restart of a router shows clients nothing but UNAVAILABLE",
    "file": "A cluster file that cannot be used is refused",
}


def check(evidence: Evidence) -> list[Violation]:
    """Every violation that can be proved."""
    return [
        *stored.check(evidence),
        *leases.check(evidence),
        *orgs.check(evidence),
        *ownership.check(evidence),
        *progress.check(evidence),
        *files.check(evidence),
        *bounds.check(evidence),
    ]
