"""Checks I11 for nodes that wait for signals. The first signal ends its node as succeeded, once, and its payload is the
result of the node's job. A node without a signal fails only after its time is over. No consumer gets the job.

A signal that was answered OK may have no effect. This happens if the signal came before the parents of its node had
ended, and if somebody then cancelled the job or the workflow. A cancel that was not answered may be executed at any
later time.

A node's time counts from the transaction that releases it, by the shard's clock. This transaction does not begin before
the node's job was stored.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from proof.checker.backup import Backup, latest_by_job
from proof.checker.evidence import CLOCK_US, Evidence, Row, State, Violation
from proof.checker.workflows import LostJob, by_operators, lost_jobs
from proof.history import Answer, Outcome, Signal

# Errors that a signal never gets, because each signal is given to a node that exists and waits for a signal.
_WRONG_CODES = frozenset({"NOT_FOUND", "INVALID_ARGUMENT"})
# The error for a signal to a node that has ended, or will end, without a signal.
_REFUSED = "FAILED_PRECONDITION"


def check(evidence: Evidence) -> Iterator[Violation]:
    history = evidence.history
    backup = Backup(evidence)
    lost = lost_jobs(evidence)
    timeouts_s = _timeouts(evidence, lost)
    given = _by_job(evidence)
    rows = latest_by_job(evidence.rows, lambda row: row.departing or backup.is_second(row))
    cancelled = {
        *(one.job for one in history.cancels if one.answer in {Answer.OK, None}),
        *(cancel.job for _, cancel in by_operators(evidence)),
    }
    released_us: dict[str, int] = {}
    for release in evidence.releases:
        released_us[release.job] = min(release.began_us, released_us.get(release.job, release.began_us))
    moved = backup.lost_flows | backup.second_flows
    restored = {job for flow in evidence.flows if flow.workflow in moved for job in flow.nodes}
    restored |= {job for job, one in lost.items() if one.workflow in moved}
    restored |= {job for job, signals in given.items() if any(one.workflow in moved for one in signals)}
    for delivery in history.deliveries:
        if delivery.lease.job in timeouts_s:
            yield _wrong(delivery.lease.job, f"came to {delivery.call.client}, although it waits for a signal")
    for job, timeout_s in timeouts_s.items():
        signals = given.get(job, ())
        excused = job in restored or backup.lacks(job) or backup.rewinds(job) or backup.revives(job)
        if sum(one.is_first for one in signals) > 1:
            yield _wrong(job, "had several signals that were told to be the first", excused=excused)
        for one in signals:
            if one.call.code in _WRONG_CODES:
                yield _wrong(job, f"waits for a signal, which got {one.call.code}", excused=excused)
        # Other checks report jobs that are missing, or that have not ended.
        if job in rows and rows[job].state is not State.LIVE:
            begins_us = max(rows[job].stored_us, released_us.get(job, 0))
            until_us = begins_us + round(timeout_s * 1e6)
            for what in _wrong_end(rows[job], signals, until_us=until_us, was_cancelled=job in cancelled):
                yield _wrong(job, what, excused=excused)
    for row in evidence.rows:
        if row.job not in timeouts_s and (row.signal is not None or row.unsignalled_us is not None):
            yield _wrong(row.job, "waits for no signal, and ended as if it did")


def _wrong_end(row: Row, signals: Sequence[Signal], *, until_us: int, was_cancelled: bool) -> Iterator[str]:
    """Yields what is wrong with the end of a node that waits for a signal. `until_us`: the earliest time at which the
    node may fail without a signal."""
    answered = [one for one in signals if one.call.outcome is Outcome.OK]
    if row.state is State.SUCCEEDED:
        if row.signal is None:
            yield "succeeded without a signal"
            return
        winners = [one for one in signals if one.call.outcome is not Outcome.ERROR and one.payload == row.signal]
        if not winners:
            yield f"succeeded with the signal {row.signal!r}, which nobody gave"
        elif any(one.payload != row.signal for one in answered if one.is_first):
            yield f"succeeded with the signal {row.signal!r}, and another one was told to be the first"
        elif any(
            one.call.ended_s is not None and min(other.call.began_s for other in winners) > one.call.ended_s
            for one in answered
        ):
            yield f"succeeded with the signal {row.signal!r}, which came after another one was answered"
        if not was_cancelled and any(one.call.code == _REFUSED for one in signals):
            yield "succeeded, and a signal was refused"
    elif row.state is State.DEAD:
        yield "waits for a signal, and is dead"
    elif row.unsignalled_us is not None:
        if answered:
            yield "failed because no signal came in time, and a signal was answered OK"
        if row.unsignalled_us < until_us - CLOCK_US:
            yield "failed before its time was over"
    elif answered and not was_cancelled:
        yield "was cancelled, and a signal was answered OK"


def _timeouts(evidence: Evidence, lost: Mapping[str, LostJob]) -> dict[str, float]:
    """Returns for how long nodes wait for signals, by the ids of their jobs. A retry has the same nodes as the workflow
    that it retries."""
    by_name = {one.job: one.timeout_s for one in evidence.history.enqueues if one.timeout_s is not None}
    of_flows = {job: name for flow in evidence.flows for job, name in flow.names.items() if name in by_name}
    of_lost = {job: one.node for job, one in lost.items() if one.node in by_name}
    return by_name | {job: by_name[name] for job, name in (of_flows | of_lost).items()}


def _by_job(evidence: Evidence) -> dict[str, list[Signal]]:
    """Returns the signals by the jobs of their nodes."""
    jobs = {(flow.workflow, name): job for flow in evidence.flows for job, name in flow.names.items()}
    retries = {one.retry for one in evidence.operated}
    given: defaultdict[str, list[Signal]] = defaultdict(list)
    for one in evidence.history.signals:
        # Nodes of a workflow's start have the ids of their jobs as names. If the tables lack a retry, its jobs are not
        # known.
        if (one.workflow, one.node) in jobs or one.workflow not in retries:
            given[jobs.get((one.workflow, one.node), one.node)].append(one)
    return dict(given)


def _wrong(job: str, what: str, *, excused: bool = False) -> Violation:
    return Violation(invariant="I11", what=f"job {job} {what}", excused=excused)
