"""Checks I11: an end of a node counts once, so no node runs before those that it waits for, and none is stranded.

Clients only start workflows whose nodes run however the nodes before them ended. They record a settle or a cancel
before they make the call. So a node that arrives before any such call of a node that it waits for has come too early.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

from proof.checker.backup import Backup, latest_by_job
from proof.checker.evidence import Evidence, Flow, Row, State, Violation
from proof.history import Enqueue, Verb

# What the state of a node says of its job.
_JOBS = {
    "succeeded": State.SUCCEEDED,
    "failed": State.DEAD,
    "cancelled": State.CANCELLED,
    "skipped": State.CANCELLED,
}
# The calls that end a job. A nack does it at the last attempt.
_ENDING = frozenset({Verb.ACK, Verb.NACK, Verb.KILL})


def check(evidence: Evidence) -> Iterator[Violation]:
    backup = Backup(evidence)
    yield from _too_early(evidence)
    started: defaultdict[str, dict[str, Enqueue]] = defaultdict(dict)
    for enqueue in evidence.history.enqueues:
        if enqueue.workflow and enqueue.answered is not None:
            started[enqueue.workflow][enqueue.job] = enqueue
    stored: defaultdict[str, list[Flow]] = defaultdict(list)
    for flow in evidence.flows:
        stored[flow.workflow].append(flow)
    rows = latest_by_job(evidence.rows, lambda row: row.departing or backup.is_second(row))
    for workflow, nodes in started.items():
        flows = stored[workflow]
        # A backup may lack a workflow, or bring back a copy of one that has moved since.
        excused = any(backup.lacks(job) or backup.rewinds(job) or backup.revives(job) for job in nodes)
        if len(flows) != 1:
            yield Violation(
                invariant="I1" if not flows else "I3",
                what=f"workflow {workflow}, acknowledged, is stored {len(flows)} times",
                excused=excused,
            )
        for flow in flows:
            yield from _unfinished(evidence, flow, nodes, rows, excused=excused)


def _too_early(evidence: Evidence) -> Iterator[Violation]:
    history = evidence.history
    ended_s: dict[str, float] = {}
    ends = [
        *((one.lease.job, one.call) for one in history.settles if one.call.verb in _ENDING),
        *((one.job, one.call) for one in history.cancels),
    ]
    for job, call in ends:
        ended_s[job] = min(call.began_s, ended_s.get(job, call.began_s))
    after = {one.job: one.after for one in history.enqueues if one.after}
    for delivery in history.deliveries:
        job = delivery.lease.job
        for parent in after.get(job, ()):
            if delivery.received_s < ended_s.get(parent, float("inf")):
                what = f"job {job} came to {delivery.call.client} before job {parent}, which it waits for, had ended"
                yield Violation(invariant="I11", what=what)


def _unfinished(
    evidence: Evidence, flow: Flow, nodes: Mapping[str, Enqueue], rows: Mapping[str, Row], *, excused: bool
) -> Iterator[Violation]:
    def wrong(what: str) -> Violation:
        return Violation(invariant="I11", what=f"workflow {flow.workflow} on {flow.shard}: {what}", excused=excused)

    if flow.nodes.keys() != nodes.keys():
        yield wrong(f"it has {len(flow.nodes)} nodes, and {len(nodes)} were stored")
    for job, state in flow.nodes.items():
        row = rows.get(job)
        if state not in _JOBS:
            # Every job is done by the end of a run that was drained.
            if evidence.calm_s is not None:
                yield wrong(f"the node of job {job} is {state}, and will not end")
        elif row is not None and row.state is not _JOBS[state]:
            yield wrong(f"the node of job {job} has {state}, and the job is {row.state}")
    if evidence.calm_s is not None and flow.state == "running":
        yield wrong("it has not ended")
