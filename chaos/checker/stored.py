"""I1: what was acknowledged is there. I3: it is there once, whoever asked how often."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from chaos.checker.evidence import Evidence, Violation


def check(evidence: Evidence) -> Iterator[Violation]:
    yield from _lost(evidence)
    yield from _doubled(evidence)
    yield from _keys(evidence)


def _lost(evidence: Evidence) -> Iterator[Violation]:
    there = {row.job for row in evidence.rows}
    acknowledged = {enqueue.answered: enqueue for enqueue in evidence.history.enqueues if enqueue.answered is not None}
    for job, enqueue in acknowledged.items():
        if job not in there:
            what = f"job {job} of {enqueue.call.org}, acknowledged to {enqueue.call.client}, is nowhere"
            yield Violation(invariant="I1", what=what)


def _doubled(evidence: Evidence) -> Iterator[Violation]:
    enqueues = evidence.history.enqueues
    for job, copies in Counter(row.job for row in evidence.rows).items():
        if copies > 1:
            yield Violation(invariant="I3", what=f"job {job} is stored {copies} times")
    # One call at most is told that it was the one which stored the job.
    news = Counter(enqueue.answered for enqueue in enqueues if enqueue.answered is not None and not enqueue.duplicate)
    for job, times in news.items():
        if times > 1:
            yield Violation(invariant="I3", what=f"{times} enqueues of job {job} were each told that it was new")
    asked = {enqueue.job for enqueue in enqueues}
    for row in evidence.rows:
        if row.job not in asked:
            yield Violation(invariant="I3", what=f"job {row.job} of {row.org} is stored, and nobody enqueued it")
    for enqueue in enqueues:
        if not enqueue.key and enqueue.answered not in {None, enqueue.job}:
            yield Violation(invariant="I3", what=f"enqueue of job {enqueue.job} was answered with {enqueue.answered}")


def _keys(evidence: Evidence) -> Iterator[Violation]:
    """The window of a key is longer than a run: one key, one job."""
    answered: defaultdict[tuple[str, str, str], set[str]] = defaultdict(set)
    for enqueue in evidence.history.enqueues:
        if enqueue.key and enqueue.answered is not None:
            answered[enqueue.call.org, enqueue.queue, enqueue.key].add(enqueue.answered)
    for row in evidence.rows:
        if row.key:
            answered[row.org, row.queue, row.key].add(row.job)
    for (org, queue, key), jobs in answered.items():
        if len(jobs) > 1:
            what = f"dedup key {key!r} of {org}/{queue} stands for {len(jobs)} jobs: {', '.join(sorted(jobs))}"
            yield Violation(invariant="I3", what=what)
