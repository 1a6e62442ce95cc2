"""I1: what was acknowledged is there, and a router finds it. I3: it is there once, whoever asked how often."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from chaos.checker.evidence import Evidence, Row, Violation
from chaos.history import Answer, Call, Outcome


def check(evidence: Evidence) -> Iterator[Violation]:
    yield from _lost(evidence)
    yield from _overlooked(evidence)
    yield from _found(evidence)
    yield from _doubled(evidence)
    yield from _keys(evidence)


def _lost(evidence: Evidence) -> Iterator[Violation]:
    there = {row.job for row in evidence.rows}
    acknowledged = {enqueue.answered: enqueue for enqueue in evidence.history.enqueues if enqueue.answered is not None}
    for job, enqueue in acknowledged.items():
        if job not in there:
            what = f"job {job} of {enqueue.call.org}, acknowledged to {enqueue.call.client}, is nowhere"
            yield Violation(invariant="I1", what=what)


def _overlooked(evidence: Evidence) -> Iterator[Violation]:
    """Calls that were told there is no such job, although it had been acknowledged, or been given out, before."""
    history = evidence.history
    known_s: dict[str, float] = {}
    for job, at_s in (
        *((one.answered, one.call.ended_s) for one in history.enqueues if one.answered is not None),
        *((one.lease.job, one.received_s) for one in history.deliveries),
    ):
        if at_s is not None:
            known_s[job] = min(at_s, known_s.get(job, at_s))
    missed: list[tuple[Call, str]] = [
        *((one.call, one.lease.job) for one in history.settles if one.answer is Answer.NOT_FOUND),
        *((one.call, one.job) for one in history.cancels if one.answer is Answer.NOT_FOUND),
        *((one.call, one.job) for one in history.lookups if one.call.outcome is Outcome.OK and not one.found),
    ]
    for call, job in missed:
        if call.began_s > known_s.get(job, float("inf")):
            yield Violation(
                invariant="I1", what=f"a {call.verb} of job {job} of {call.org} was told there is no such job"
            )


def _found(evidence: Evidence) -> Iterator[Violation]:
    """Every job once, and as the tables have it."""
    if evidence.found is None:
        return
    rows: defaultdict[str, list[Row]] = defaultdict(list)
    for row in evidence.rows:
        rows[row.org].append(row)
    for found in evidence.found:
        times = Counter(job for job, _ in found.jobs)
        said = dict(found.jobs)
        mine = rows.pop(found.org, [])
        for row in mine:
            if times[row.job] != 1:
                what = f"a router finds job {row.job} of {row.org}, on {row.shard}, {times[row.job]} times"
                yield Violation(invariant="I1", what=what)
            elif said[row.job] is not row.state:
                what = f"a router says that job {row.job} is {said[row.job]}, and on {row.shard} it is {row.state}"
                yield Violation(invariant="I1", what=what)
        stored = Counter(row.state for row in mine)
        for state in sorted({*stored, *found.counted}):
            counted = found.counted.get(state, 0)
            if stored[state] != counted:
                what = f"a router counts {counted} {state} jobs of {found.org}, and the tables have {stored[state]}"
                yield Violation(invariant="I5", what=what)
    for org in rows:
        yield Violation(invariant="I1", what=f"no router was asked for the jobs of {org}")


def _doubled(evidence: Evidence) -> Iterator[Violation]:
    enqueues = evidence.history.enqueues
    # One that departs may have arrived by now.
    for job, copies in Counter(row.job for row in evidence.rows if not row.departing).items():
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
    # An enqueue is answered with its own job, or with one that was sent under the same key.
    of_key: defaultdict[tuple[str, str, str], set[str]] = defaultdict(set)
    for enqueue in enqueues:
        if enqueue.key:
            of_key[enqueue.call.org, enqueue.queue, enqueue.key].add(enqueue.job)
    for enqueue in enqueues:
        same_key = of_key.get((enqueue.call.org, enqueue.queue, enqueue.key), set())
        if enqueue.answered is not None and enqueue.answered not in {enqueue.job, *same_key}:
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
