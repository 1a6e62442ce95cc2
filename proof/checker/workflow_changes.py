"""Checks I11 for workflows that operators change. A paused workflow releases no node. After a workflow is cancelled, it
runs only nodes that were leased before. A retry runs the nodes that had not succeeded, and no other nodes.

The shards record each release of a node in the transaction of the release. A pause is certain from the answer to its
call until the beginning of the call that ends it. Times are of the shards' clock.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

from proof.checker.backup import Backup
from proof.checker.evidence import CLOCK_US, ChangeKind, Evidence, Flow, OperatedFlow, Release, Row, Violation
from proof.checker.schedule_terms import certain_pauses
from proof.history import Addition, Outcome

_TAKEN_OVER = frozenset({"succeeded", "skipped"})


def check(evidence: Evidence) -> Iterator[Violation]:
    backup = Backup(evidence)
    stored: defaultdict[str, list[Flow]] = defaultdict(list)
    for flow in evidence.flows:
        stored[flow.workflow].append(flow)
    releases: defaultdict[str, list[Release]] = defaultdict(list)
    for release in evidence.releases:
        releases[release.workflow].append(release)
    rows: defaultdict[str, list[Row]] = defaultdict(list)
    for row in evidence.rows:
        rows[row.job].append(row)
    after = {one.job: one.after for one in evidence.history.enqueues if one.after}
    for addition in evidence.history.additions:
        after |= addition.nodes
    added = {name for one in evidence.history.additions for name in one.nodes}
    waits: defaultdict[str, list[Addition]] = defaultdict(list)
    for addition in evidence.history.additions:
        if addition.wait and addition.call.outcome is Outcome.OK:
            waits[addition.workflow].append(addition)
    for one in evidence.operated:
        for flow in stored[one.workflow]:
            yield from _changed(one, flow, releases[one.workflow], rows, excused=_excused(backup, flow))
        if one.retry:
            retries = stored[one.retry]
            if len(retries) > 1 or (one.retried and not retries):
                yield Violation(
                    invariant="I11",
                    what=f"the retry {one.retry} of workflow {one.workflow} is stored {len(retries)} times",
                    excused=one.retry in (backup.second_flows if retries else backup.lost_flows),
                )
            for old in stored[one.workflow]:
                for flow in retries:
                    excused = _excused(backup, flow) or _excused(backup, old)
                    edges = after | _edges_of_waits(old, waits[old.workflow], after)
                    yield from _retried(evidence, old, flow, rows, edges, added, excused=excused)
    cancelled = {one.workflow for one in evidence.operated if one.cancelling_s is not None}
    retried = {one.retry: one.workflow for one in evidence.operated if one.retry}
    for flow in evidence.flows:
        if flow.state == "cancelled" and flow.workflow not in cancelled:
            yield _wrong(flow, "it was cancelled, and nobody said so")
        if flow.retry_of and retried.get(flow.workflow) != flow.retry_of:
            yield _wrong(flow, f"it retries {flow.retry_of}, and nobody asked for that")


def _excused(backup: Backup, flow: Flow) -> bool:
    return flow.workflow in {*backup.lost_flows, *backup.second_flows} or any(
        backup.lacks(job) or backup.rewinds(job) or backup.revives(job) for job in flow.nodes
    )


def _changed(
    one: OperatedFlow,
    flow: Flow,
    releases: Sequence[Release],
    rows: Mapping[str, Sequence[Row]],
    *,
    excused: bool,
) -> Iterator[Violation]:
    pauses = certain_pauses(one.changes)
    for release in releases:
        if any(begin < release.at_us < end for begin, end in pauses):
            yield _wrong(flow, f"job {release.job} was released during a pause", excused=excused)
    if not one.ended_as:
        return
    ended_as = "cancelled" if one.ended_as == "running" else one.ended_as
    if flow.state not in {ended_as, "running"}:
        yield _wrong(flow, f"its cancel was told that it is {one.ended_as}, and it is {flow.state}", excused=excused)
    if one.ended_as != "cancelled":
        return
    answered_us = min(
        change.ended_us for change in one.changes if change.kind is ChangeKind.CANCEL and change.ended_us is not None
    )
    for job in sorted(flow.nodes.keys() - flow.callbacks):
        if any(leased_us > answered_us + CLOCK_US for row in rows.get(job, ()) for leased_us in _leases(row)):
            yield _wrong(flow, f"job {job} was leased after the workflow had been cancelled", excused=excused)


def _edges_of_waits(
    old: Flow, waits: Sequence[Addition], after: Mapping[str, Sequence[str]]
) -> dict[str, Sequence[str]]:
    """Returns the new edges of nodes whose jobs have waited for nodes that they had added: for each of these nodes, the
    names of all nodes that it waits for. A retry of the workflow repeats these edges."""
    edges: dict[str, Sequence[str]] = {}
    for wait in waits:
        name = old.names.get(wait.lease.job)
        if name is not None:
            edges[name] = [*edges.get(name, after.get(name, ())), *wait.nodes]
    return edges


def _leases(row: Row) -> list[int]:
    """Returns the times at which the job's leases began."""
    last = [] if row.leased_at_us is None else [row.leased_at_us]
    return [*(past.leased_at_us for past in row.past), *last]


def _retried(
    evidence: Evidence,
    old: Flow,
    flow: Flow,
    rows: Mapping[str, Sequence[Row]],
    after: Mapping[str, Sequence[str]],
    added: set[str],
    *,
    excused: bool,
) -> Iterator[Violation]:
    if old.state not in {"failed", "cancelled"}:
        yield _wrong(flow, f"it retries a workflow that is {old.state}", excused=excused)
    jobs = {name: job for job, name in flow.names.items()}
    for name, count in Counter(flow.names.values()).items():
        if count > 1:
            yield _wrong(flow, f"it has node {name} {count} times", excused=excused)
    for name in sorted(jobs.keys() - set(old.names.values()) - added):
        yield _wrong(flow, f"it has node {name}, which the workflow that it retries has not", excused=excused)
    for job, name in old.names.items():
        is_taken = old.nodes[job] in _TAKEN_OVER and job not in old.callbacks
        if name not in jobs:
            yield _wrong(flow, f"it lacks node {name} of the workflow that it retries", excused=excused)
        elif (jobs[name] == job) is not is_taken:
            what = "runs again" if is_taken else "does not run again"
            yield _wrong(flow, f"node {name}, which was {old.nodes[job]}, {what}", excused=excused)
    if evidence.calm_s is not None:
        for job, state in flow.nodes.items():
            if state in {"blocked", "due", "released"}:
                yield _wrong(flow, f"the node of job {job} is {state}, and will not end", excused=excused)
        if flow.state == "running":
            yield _wrong(flow, "it has not ended", excused=excused)
    for name, job in jobs.items():
        # Skip a node that this workflow took over: it ran in the other workflow, perhaps after the parent had failed
        # there. It does not wait for the parent, which runs again in this workflow.
        if job in old.nodes:
            continue
        first_us = min((at_us for row in rows.get(job, ()) for at_us in _leases(row)), default=None)
        for parent in after.get(name, ()):
            ended = [past.ended_at_us for row in rows.get(jobs.get(parent, ""), ()) for past in row.past]
            if first_us is not None and ended and first_us < max(ended) - CLOCK_US:
                what = f"node {name} was leased before node {parent}, which it waits for, had ended"
                yield _wrong(flow, what, excused=excused)


def _wrong(flow: Flow, what: str, *, excused: bool = False) -> Violation:
    what = f"workflow {flow.workflow} on {flow.shard}: {what}"
    return Violation(invariant="I11", what=what, excused=excused)
