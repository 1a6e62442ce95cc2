"""Checks the invariants, using what clients saw and what the tables contain. Pure: takes evidence, and returns
violations.

The checker never raises a false alarm: it reports only what cannot happen without a bug. All times that clients
recorded come from one monotonic clock. Each rule says what it concludes from these times, and why the conclusion is
safe.

The checker reports separately the violations that a restored backup explains (proof/checker/backup.py).
"""

from __future__ import annotations

from proof.checker import (
    bounds,
    faultless,
    files,
    leases,
    orgs,
    ownership,
    progress,
    refusal,
    schedules,
    signals,
    stored,
    workflow_changes,
    workflows,
)
from proof.checker.evidence import Evidence, Violation

__all__ = ["EXAMINED", "Evidence", "Violation", "check", "examine"]

# The checks of a run: the invariants by their names in docs/concepts.md, and three further checks.
EXAMINED = {
    "I1": "Nothing acknowledged is lost",
    "I2": "One lease at a time",
    "I3": "Enqueue is idempotent",
    "I4": "One org never sees another",
    "I5": "Conservation",
    "I6": "Stale knowledge is refused, not obeyed",
    "I7": "Hints are never truth",
    "I9": "Bounds hold against anyone",
    "I10": "A run is stored once",
    "I11": "An end of a node counts once",
    "restart": "An orderly restart of a router shows clients nothing but UNAVAILABLE",
    "restore": "A shard that lost history is refused until that is accepted, and no other shard is",
    "file": "A cluster file that cannot be used is refused",
}


def check(evidence: Evidence) -> list[Violation]:
    """Returns every violation that can be proved."""
    return [one for one in examine(evidence) if not one.excused]


def examine(evidence: Evidence) -> list[Violation]:
    """Returns the violations, including the excused ones."""
    return [
        *stored.check(evidence),
        *leases.check(evidence),
        *orgs.check(evidence),
        *ownership.check(evidence),
        *progress.check(evidence),
        *files.check(evidence),
        *bounds.check(evidence),
        *refusal.check(evidence),
        *faultless.check(evidence),
        *schedules.check(evidence),
        *workflows.check(evidence),
        *workflow_changes.check(evidence),
        *signals.check(evidence),
    ]
