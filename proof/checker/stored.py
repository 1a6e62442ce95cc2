"""Checks I1 (every acknowledged job exists, and a router finds it) and I3 (every job exists once, no matter how often
it was enqueued).

If a backup was restored, the jobs that the backup lacks may be missing, and may be stored again
(proof/checker/backup.py).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from proof.checker.backup import Backup
from proof.checker.evidence import Evidence, Key, Row, Violation
from proof.checker.workflows import added_names, lost_jobs
from proof.history import Answer, Call, Enqueue, Outcome


def check(evidence: Evidence) -> Iterator[Violation]:
    backup = Backup(evidence)
    yield from _lost(evidence, backup)
    yield from _overlooked(evidence, backup)
    yield from _found(evidence, backup)
    yield from _doubled(evidence, backup)
    yield from _keys(evidence, backup)


def _lost(evidence: Evidence, backup: Backup) -> Iterator[Violation]:
    # A cancelled copy that a backup brought back counts as the job only if a client may have cancelled the job.
    cancelled = {one.job for one in evidence.history.cancels if one.answer in {Answer.OK, None}}
    there = {row.job for row in evidence.rows if row.job in cancelled or not backup.is_second(row)}
    acknowledged: defaultdict[str, list[Enqueue]] = defaultdict(list)
    for enqueue in evidence.history.enqueues:
        if enqueue.answered is not None:
            acknowledged[enqueue.answered].append(enqueue)
    for job, enqueues in acknowledged.items():
        if job not in there:
            call = enqueues[-1].call
            yield Violation(
                invariant="I1",
                what=f"job {job} of {call.org}, acknowledged to {call.client}, is nowhere",
                excused=backup.lacks(job) and not any(map(backup.promises, enqueues)),
            )


def _overlooked(evidence: Evidence, backup: Backup) -> Iterator[Violation]:
    """Yields a violation for each call that was answered NOT_FOUND although the job had been acknowledged or delivered
    before."""
    history = evidence.history
    known_s: dict[str, float] = {}
    # For each job that was stored again after a restore, the time from which clients knew this.
    known_again_s: dict[str, float] = {}
    for job, again, at_s in (
        *((one.answered, backup.promises(one), one.call.ended_s) for one in history.enqueues if one.answered),
        *((one.lease.job, backup.came_after(one.call), one.received_s) for one in history.deliveries),
    ):
        if at_s is not None:
            known_s[job] = min(at_s, known_s.get(job, at_s))
            if again:
                known_again_s[job] = min(at_s, known_again_s.get(job, at_s))
    missed: list[tuple[Call, str]] = [
        *((one.call, one.lease.job) for one in history.settles if one.answer is Answer.NOT_FOUND),
        *((one.call, one.job) for one in history.cancels if one.answer is Answer.NOT_FOUND),
        *((one.call, one.job) for one in history.lookups if one.call.outcome is Outcome.OK and not one.found),
    ]
    for call, job in missed:
        if call.began_s > known_s.get(job, float("inf")):
            yield Violation(
                invariant="I1",
                what=f"a {call.verb} of job {job} of {call.org} was told there is no such job",
                excused=backup.may_be_unknown(job, call) and call.began_s <= known_again_s.get(job, float("inf")),
            )


def _found(evidence: Evidence, backup: Backup) -> Iterator[Violation]:
    """Yields a violation for each job that a router does not find, finds more than once, or finds in another state than
    the tables."""
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
            if backup.is_second(row) and any(other.job == row.job and other is not row for other in mine):
                continue
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


def _doubled(evidence: Evidence, backup: Backup) -> Iterator[Violation]:
    enqueues = evidence.history.enqueues
    # A departing job may have arrived on the other shard already.
    there = [row for row in evidence.rows if not row.departing]
    seconds = Counter(row.job for row in there if backup.is_second(row))
    for job, copies in Counter(row.job for row in there).items():
        if copies > 1:
            what = f"job {job} is stored {copies} times"
            # Excused if the job had left the shard, the backup brought a copy back, and the copy was then cancelled.
            yield Violation(invariant="I3", what=what, excused=seconds[job] == 1 and copies == 2)
    # Only one call may get the answer that it has stored the job.
    news: defaultdict[str, list[Call]] = defaultdict(list)
    for enqueue in enqueues:
        if enqueue.answered is not None and not enqueue.duplicate:
            news[enqueue.answered].append(enqueue.call)
    for job, calls in news.items():
        if len(calls) > 1:
            before, after = sum(map(backup.was_answered_before, calls)), sum(map(backup.came_after, calls))
            what = f"{len(calls)} enqueues of job {job} were each told that it was new"
            # The replaced database may have given one of the two answers, and the backup the other.
            once_each = len(calls) == 2 and before <= 1 and after <= 1
            yield Violation(invariant="I3", what=what, excused=backup.lacks(job) and once_each)
    asked = {enqueue.job for enqueue in enqueues} | added_names(evidence).keys() | lost_jobs(evidence).keys()
    for row in evidence.rows:
        # schedules.py checks the jobs of schedules.
        if row.job not in asked and row.run is None:
            yield Violation(invariant="I3", what=f"job {row.job} of {row.org} is stored, and nobody enqueued it")
    # An enqueue may be answered with its own job, or with a job that was sent with the same key.
    of_key: defaultdict[tuple[str, str, str], set[str]] = defaultdict(set)
    for enqueue in enqueues:
        if enqueue.key:
            of_key[enqueue.call.org, enqueue.queue, enqueue.key].add(enqueue.job)
    for enqueue in enqueues:
        same_key = of_key.get((enqueue.call.org, enqueue.queue, enqueue.key), set())
        if enqueue.answered is not None and enqueue.answered not in {enqueue.job, *same_key}:
            yield Violation(invariant="I3", what=f"enqueue of job {enqueue.job} was answered with {enqueue.answered}")


def _keys(evidence: Evidence, backup: Backup) -> Iterator[Violation]:
    """Yields a violation for each dedup key that stands for several jobs. The window of a key is longer than the whole
    test run, so there must be only one job."""
    answered: defaultdict[tuple[str, str, str], set[str]] = defaultdict(set)
    # For each key, the jobs for which the key must still count after the restore, even though the backup lacks some
    # jobs.
    standing: defaultdict[tuple[str, str, str], set[str]] = defaultdict(set)
    for enqueue in evidence.history.enqueues:
        if enqueue.key and enqueue.answered is not None:
            place = (enqueue.call.org, enqueue.queue, enqueue.key)
            answered[place].add(enqueue.answered)
            if backup.came_after(enqueue.call) or not backup.lacks_key(Key(*place, enqueue.answered)):
                standing[place].add(enqueue.answered)
    for row in evidence.rows:
        if row.key:
            place = (row.org, row.queue, row.key)
            answered[place].add(row.job)
            if not backup.lacks_key(Key(*place, row.job)):
                standing[place].add(row.job)
    for place, jobs in answered.items():
        if len(jobs) > 1:
            org, queue, key = place
            what = f"dedup key {key!r} of {org}/{queue} stands for {len(jobs)} jobs: {', '.join(sorted(jobs))}"
            yield Violation(invariant="I3", what=what, excused=len(standing[place]) <= 1)
