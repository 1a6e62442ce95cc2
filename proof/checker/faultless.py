"""Checks runs without faults: each job comes to a worker at most once, and exactly the jobs that came to a worker have
succeeded.

A cluster promises less: a job may come again after a lease has ended. But if no process is killed and every worker ends
in an orderly way, no lease ends before its job is settled.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from proof.checker.evidence import Evidence, State, Violation


def check(evidence: Evidence) -> Iterator[Violation]:
    if not evidence.faultless:
        return
    came = Counter(delivery.lease.job for delivery in evidence.history.deliveries)
    for job, times in came.items():
        if times > 1:
            yield _violation(f"job {job} came to workers {times} times")
    succeeded = {row.job for row in evidence.rows if row.state is State.SUCCEEDED}
    for job in came.keys() - succeeded:
        yield _violation(f"job {job} came to a worker, and has not succeeded")
    for job in succeeded - came.keys():
        yield _violation(f"job {job} has succeeded, and came to no worker")


def _violation(what: str) -> Violation:
    return Violation(invariant="once", what=what)
