"""Checks I7: after all faults are healed, every due job reaches a consumer soon.

At the latest, a job is due when its enqueue has been answered, when the delay of a nack or release is over, or when the
window of its lease is over. A due job may wait behind other jobs of its org. A job is late if it was due for longer
than the bound while no job of the org was delivered.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from proof.checker.backup import Backup
from proof.checker.evidence import Evidence, State, Violation
from proof.history import ENDED, Answer, Delivery, LeaseKey, Settle, Verb


def check(evidence: Evidence) -> Iterator[Violation]:
    if evidence.calm_s is None:
        return
    acknowledged = {enqueue.answered for enqueue in evidence.history.enqueues}
    orphans = _orphans(evidence)
    for row in evidence.rows:
        # A job whose enqueue was not answered may have been stored only a moment ago.
        if row.state is State.LIVE and (row.job in acknowledged or row.run is not None):
            where = f"on its way from {row.shard}" if row.departing else f"on {row.shard}"
            what = f"job {row.job} of {row.org} was not done by the end, and is {where}"
            yield Violation(invariant="I7", what=what, excused=row.job in orphans)
    yield from _late(evidence, evidence.calm_s)


def _orphans(evidence: Evidence) -> set[str]:
    """Returns the jobs of workflows that a restored backup broke. Such a job may wait for a node that will never end:
    the workflow is lost and the job came from another shard after the restore, or the workflow has moved to another
    shard, and the job of one of its nodes was left behind and is lost."""
    backup, history = Backup(evidence), evidence.history
    nodes: defaultdict[str, set[str]] = defaultdict(set)
    for enqueue in history.enqueues:
        if enqueue.workflow:
            nodes[enqueue.workflow].add(enqueue.job)
    for addition in history.additions:
        nodes[addition.workflow].update(addition.jobs.values())
    there = {row.job for row in evidence.rows}
    lost = backup.lost_flows - {flow.workflow for flow in evidence.flows}
    broken = [
        jobs
        for workflow, jobs in nodes.items()
        if workflow in lost or any(backup.lacks(job) and job not in there for job in jobs)
    ]
    return {job for jobs in broken for job in jobs}


def _late(evidence: Evidence, calm_s: float) -> Iterator[Violation]:
    history = evidence.history
    first_due_s: dict[str, float] = {}
    for enqueue in history.enqueues:
        if enqueue.answered == enqueue.job and enqueue.call.ended_s is not None:
            due_s = enqueue.call.ended_s + enqueue.delay_s
            first_due_s[enqueue.job] = min(first_due_s.get(enqueue.job, due_s), due_s)
    settles: defaultdict[LeaseKey, list[Settle]] = defaultdict(list)
    for settle in history.settles:
        settles[settle.lease].append(settle)
    # Leases that may have ended because the job waits for nodes. Nobody knows when such a job was due again.
    waited = {one.lease for one in history.additions if one.may_end_lease}
    came: defaultdict[str, list[float]] = defaultdict(list)
    of_jobs: defaultdict[str, list[Delivery]] = defaultdict(list)
    for delivery in sorted(history.deliveries, key=lambda one: one.received_s):
        came[delivery.call.org].append(delivery.received_s)
        of_jobs[delivery.lease.job].append(delivery)

    for job, of_job in of_jobs.items():
        # If the enqueue was not answered, it is not known when the job was due first.
        due_s = first_due_s.get(job, float("inf"))
        for delivery in of_job:
            if delivery.received_s > calm_s:
                waited_s = delivery.received_s - max(due_s, calm_s, _before(came, delivery))
                if waited_s > evidence.late_s_max:
                    what = f"job {job} of {delivery.call.org} waited {waited_s:.1f} s, while no job of the org came"
                    yield Violation(invariant="I7", what=what)
            due_s = float("inf") if delivery.lease in waited else _due_again_s(delivery, settles)


def _before(came: Mapping[str, Sequence[float]], delivery: Delivery) -> float:
    """Returns the time at which the org's previous job was delivered."""
    times = came[delivery.call.org]
    at = bisect_left(times, delivery.received_s)
    return times[at - 1] if at else 0.0


def _due_again_s(delivery: Delivery, settles: Mapping[LeaseKey, Sequence[Settle]]) -> float:
    """Returns the latest time at which the job was due again, if it was not finished. The window is counted from
    the arrival, which is later than the beginning of the lease."""
    due_s = delivery.received_s + delivery.window_s
    for settle in settles.get(delivery.lease, ()):
        ended_s = settle.call.ended_s
        verb = settle.call.verb
        if settle.answer is Answer.OK and verb in {Verb.NACK, Verb.RELEASE} and ended_s is not None:
            return ended_s + settle.span_s
        if verb in {Verb.NACK, Verb.EXTEND} and settle.answer not in ENDED:
            # The call may have been executed although it was not answered. If the client died, the time is unknown.
            due_s = max(due_s, float("inf") if ended_s is None else ended_s + settle.span_s)
    return due_s
