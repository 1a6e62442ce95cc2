"""Checks I11: each end of a node counts exactly once. So no node runs before its parents have ended, and no node waits
for ever. The same is checked for nodes that jobs have added to their workflow. Each acknowledged node exists once, and
callbacks wait for it too. If a job waits for nodes that it has added, it is not leased again before they have ended.

Clients only start workflows whose nodes run even if their parents failed. Clients record a settle or a cancel before
they make the call. So the job of a node has come too early if, for one of the node's parents, nobody has recorded a
settle or a cancel before. A job's payload names its node. The nodes of a workflow's start have the ids of their jobs as
names.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from proof.checker.backup import Backup, latest_by_job
from proof.checker.evidence import CLOCK_S, Evidence, Flow, Row, State, Violation
from proof.checker.moves import Moves
from proof.history import Addition, Call, Cancel, Enqueue, LeaseKey, Outcome, Verb
from shard.workflow import WorkflowId, job_id_of

# The state that a node's job must have, by the state of the node.
_JOBS = {
    "succeeded": State.SUCCEEDED,
    "failed": State.DEAD,
    "cancelled": State.CANCELLED,
    "skipped": State.CANCELLED,
}
# The calls that end a job. A nack ends the job at the last attempt.
_ENDING = frozenset({Verb.ACK, Verb.NACK, Verb.KILL})
# The time in an id is the first 13 characters of its text.
_TIME = 13
# Errors that an addition never gets. All jobs choose different names for nodes, each lease belongs to a node of a
# workflow that exists, and no job waits for nodes that may wait for this job. The last two codes mean the same: the
# Python client reports INVALID_ARGUMENT as InvalidRequest.
_WRONG_CODES = frozenset({"ALREADY_EXISTS", "NOT_FOUND", "INVALID_ARGUMENT", "INVALID_REQUEST"})


def check(evidence: Evidence) -> Iterator[Violation]:
    backup = Backup(evidence)
    yield from _too_early(evidence, backup)
    started: defaultdict[str, dict[str, Enqueue]] = defaultdict(dict)
    for enqueue in evidence.history.enqueues:
        if enqueue.workflow and enqueue.answered is not None:
            started[enqueue.workflow][enqueue.job] = enqueue
    additions: defaultdict[str, list[Addition]] = defaultdict(list)
    for addition in evidence.history.additions:
        additions[addition.workflow].append(addition)
    stored: defaultdict[str, list[Flow]] = defaultdict(list)
    for flow in evidence.flows:
        stored[flow.workflow].append(flow)
    rows = latest_by_job(evidence.rows, lambda row: row.departing or backup.is_second(row))
    operated = {one.workflow for one in evidence.operated if one.retry or one.cancelling_s is not None}
    for workflow, nodes in started.items():
        flows = stored[workflow]
        added = [job for one in additions[workflow] for job in one.jobs.values()]
        # A backup may lack a workflow, or bring back a copy of a workflow that moved away after the backup was made.
        moved = backup.second_flows if len(flows) == 2 else backup.lost_flows
        excused = workflow in moved or any(_was_changed(backup, job) for job in (*nodes, *added))
        if len(flows) != 1:
            yield Violation(
                invariant="I1" if not flows else "I3",
                what=f"workflow {workflow}, acknowledged, is stored {len(flows)} times",
                excused=excused,
            )
        for flow in flows:
            yield from _unfinished(evidence, flow, nodes, rows, operated=workflow in operated, excused=excused)
            yield from _wrongly_added(flow, additions[workflow], excused=excused)


def added_names(evidence: Evidence) -> dict[str, set[str]]:
    """Returns the names of the nodes that jobs have added, by the ids of the nodes' jobs. A name counts if it is in the
    tables and a client asked for it, or if it is in an answer to a client. If the tables lack the workflow, the names
    in payloads count; `check` reports this case."""
    asked = {(one.workflow, name) for one in evidence.history.additions for name in one.nodes}
    names: defaultdict[str, set[str]] = defaultdict(set)
    for flow in evidence.flows:
        for job, name in flow.added.items():
            if (flow.workflow, name) in asked:
                names[job].add(name)
    # The jobs of a retry have the payloads of the jobs that they repeat.
    retries = {one.retry for one in evidence.operated}
    for flow in evidence.flows:
        if flow.workflow in retries:
            for job, name in flow.names.items():
                names[job].add(name)
    for one in evidence.history.additions:
        for name, job in one.jobs.items():
            names[job].add(name)
    there = {flow.workflow for flow in evidence.flows}
    lost = {name for workflow, name in asked if workflow not in there}
    jobs = lost_jobs(evidence)
    for job, lost_job in jobs.items():
        if lost_job.node:
            names[job].add(lost_job.node)
    added = {name for _, name in asked}
    for delivery in evidence.history.deliveries:
        if delivery.payload_job in lost or (delivery.lease.job in jobs and delivery.payload_job in added):
            names[delivery.lease.job].add(delivery.payload_job)
    return dict(names)


class LostJob(NamedTuple):
    """A job in the tables whose workflow the tables lack."""

    workflow: str
    # The name of the job's node. Empty: a job of the workflow has added the node, so only the number of the node is
    # known.
    node: str


def lost_jobs(evidence: Evidence) -> dict[str, LostJob]:
    """Returns, by id, the jobs in the tables whose workflows the tables lack. A job of a lost workflow stayed on
    another shard, or came from there later. The ids are computed, because no client learns the ids of all jobs of a
    retry, or of all nodes that jobs add."""
    there = {flow.workflow for flow in evidence.flows}
    started: defaultdict[str, dict[str, None]] = defaultdict(dict)
    for enqueue in evidence.history.enqueues:
        if enqueue.call.verb is Verb.START:
            started[enqueue.workflow][enqueue.job] = None
    added: defaultdict[str, set[str]] = defaultdict(set)
    for addition in evidence.history.additions:
        added[addition.workflow].update(addition.nodes)
    # The nodes of a retry have the same numbers as the nodes of the retried workflow.
    origins = {workflow: workflow for workflow in (*started, *added)}
    origins |= {one.retry: one.workflow for one in evidence.operated if one.retry}
    # The id of a job begins with the same time as the id of the job's workflow.
    by_time: defaultdict[str, set[str]] = defaultdict(set)
    for row in evidence.rows:
        by_time[row.job[:_TIME]].add(row.job)
    lost: dict[str, LostJob] = {}
    for workflow, origin in origins.items():
        if workflow and workflow not in there and by_time[workflow[:_TIME]]:
            names = [*started[origin], *([""] * (len(added[origin]) + len(added[workflow])))]
            for number, name in enumerate(names):
                job = job_id_of(WorkflowId(workflow), number)
                if job in by_time[workflow[:_TIME]]:
                    lost[job] = LostJob(workflow, name)
    return lost


def by_operators(evidence: Evidence) -> Iterator[tuple[str, Cancel]]:
    """Yields the cancels that operators caused, each with the name of the cancelled job's node. An operator who cancels
    a workflow cancels its jobs, but not its callbacks. An operator who then retries the workflow cancels its dead
    callbacks. If the tables lack the workflow, its jobs are those that clients know and those of `lost_jobs`; `check`
    reports this case."""
    operated = {one.workflow: one for one in evidence.operated if one.cancelling_s is not None}
    known: defaultdict[str, dict[str, str]] = defaultdict(dict)
    for flow in evidence.flows:
        one = operated.get(flow.workflow)
        if one is not None:
            for job, state in flow.nodes.items():
                if job not in flow.callbacks or (one.retry and state == "failed"):
                    known[flow.workflow][job] = flow.added.get(job, job)
    lost = operated.keys() - {flow.workflow for flow in evidence.flows}
    for enqueue in evidence.history.enqueues:
        if enqueue.workflow in lost:
            known[enqueue.workflow][enqueue.job] = enqueue.job
    for addition in evidence.history.additions:
        if addition.workflow in lost:
            known[addition.workflow] |= {job: name for name, job in addition.jobs.items()}
    for job, lost_job in lost_jobs(evidence).items():
        if lost_job.workflow in lost:
            known[lost_job.workflow].setdefault(job, lost_job.node or job)
    for workflow, names in known.items():
        one = operated[workflow]
        assert one.cancelling_s is not None
        call = Call(client="operator", verb=Verb.CANCEL, org=one.org, began_s=one.cancelling_s)
        for job, name in names.items():
            yield name, Cancel(call=call, job=job, answer=None)


def _was_changed(backup: Backup, job: str) -> bool:
    return backup.lacks(job) or backup.rewinds(job) or backup.revives(job)


def _too_early(evidence: Evidence, backup: Backup) -> Iterator[Violation]:
    history = evidence.history
    names = {delivery.lease: delivery.payload_job for delivery in history.deliveries}
    ended_s: dict[str, float] = {}
    ends = [
        *((names.get(one.lease, one.lease.job), one.call) for one in history.settles if one.call.verb in _ENDING),
        *((one.job, one.call) for one in history.cancels),
        *((name, cancel.call) for name, cancel in by_operators(evidence)),
    ]
    for name, call in ends:
        ended_s[name] = min(call.began_s, ended_s.get(name, call.began_s))
    # The job may have died because the lease of its last attempt expired, at a time that no client knows.
    names_of = {delivery.lease.job: delivery.payload_job for delivery in history.deliveries}
    failed = {job for flow in evidence.flows for job, state in flow.nodes.items() if state == "failed"}
    for row in evidence.rows:
        is_dead = row.state is State.DEAD or row.job in failed
        if is_dead and row.past and row.past[-1].outcome == "expired":
            ended_s[names_of.get(row.job, row.job)] = float("-inf")
    _add_signals(evidence, backup, ended_s)
    after = {one.job: one.after for one in history.enqueues if one.after}
    for addition in history.additions:
        after |= addition.nodes
    # Callbacks also wait for the added nodes. But if a restored backup has set a workflow back, the workflow may have
    # ended before the restore, and some nodes may have been added only after the restore.
    after_added = {
        callback: (list(flow.added.values()), any(_was_changed(backup, job) for job in flow.nodes))
        for flow in evidence.flows
        for callback in flow.callbacks
    }
    for delivery in history.deliveries:
        name = delivery.payload_job
        added, excused = after_added.get(name, ((), False))
        for parent, is_excused in (
            *((parent, False) for parent in after.get(name, ())),
            *((parent, excused) for parent in added),
        ):
            if delivery.received_s < ended_s.get(parent, float("inf")):
                what = f"node {name} came to {delivery.call.client} before node {parent}, which it waits for, had ended"
                yield Violation(invariant="I11", what=what, excused=is_excused)
    yield from _waited_too_short(evidence, backup, ended_s)


def _add_signals(evidence: Evidence, backup: Backup, ended_s: dict[str, float]) -> None:
    """Adds the earliest times at which nodes that wait for signals may have ended. Such a node does not end before the
    nodes that it waits for, even if its signal came early. Its time to wait for the signal begins when these nodes have
    ended."""
    history = evidence.history
    signalled_s: dict[str, float] = {}
    for signal in history.signals:
        if signal.call.outcome is not Outcome.ERROR:
            signalled_s[signal.node] = min(signal.call.began_s, signalled_s.get(signal.node, float("inf")))
    names = {job: name for flow in evidence.flows for job, name in flow.names.items()}
    rows = [*evidence.rows, *backup.lost_rows]
    unsignalled = {names.get(row.job, row.job) for row in rows if row.unsignalled_us is not None}
    # If the tables lack a retry, the names of the retry's nodes are not known.
    stored = {flow.workflow for flow in evidence.flows}
    unknown = {one.workflow for one in evidence.operated if one.retry and one.retry not in stored}
    slack_s = CLOCK_S + history.drift_s
    # The history lists each node of a started workflow after the nodes that it waits for.
    for one in history.enqueues:
        if one.timeout_s is None:
            continue
        parents_s = max((ended_s.get(parent, float("inf")) for parent in one.after), default=float("-inf"))
        ends_s = [max(signalled_s.get(one.job, float("inf")), parents_s)]
        if one.job in unsignalled or one.workflow in unknown:
            ends_s.append(max(one.call.began_s, parents_s) + one.timeout_s - slack_s)
        ended_s[one.job] = min([*ends_s, ended_s.get(one.job, float("inf"))])


def _waited_too_short(evidence: Evidence, backup: Backup, ended_s: Mapping[str, float]) -> Iterator[Violation]:
    """Yields a violation for each job that had to wait for nodes, but continued before these nodes had ended.
    `ended_s`: for each node, the beginning of the first call that may have ended it."""
    rows = latest_by_job(evidence.rows, lambda row: row.departing or backup.is_second(row))
    deliveries = {delivery.lease: delivery for delivery in evidence.history.deliveries}
    moves = Moves(evidence)
    for one in evidence.history.additions:
        if not one.wait or one.call.outcome is not Outcome.OK or one.call.ended_s is None:
            continue
        job = one.lease.job
        went_on: list[tuple[float, str]] = []
        if not one.waits:
            went_on.append((one.call.ended_s, f"was told in {one.call.client} to go on"))
        elif job in rows and not moves.may_move(one.call):
            # Do not check this while the org moves: the job may then be given back, run once more on the other shard,
            # and wait there.
            for lease in _later_leases(rows[job], one.lease):
                if lease in deliveries:
                    again = deliveries[lease]
                    went_on.append((again.received_s, f"came to {again.call.client}"))
        for name in one.nodes:
            for at_s, how in went_on:
                if at_s < ended_s.get(name, float("inf")):
                    what = f"job {job}, which waits for node {name}, {how} before that node had ended"
                    excused = any(_was_changed(backup, other) for other in (job, *one.jobs.values()))
                    yield Violation(invariant="I11", what=what, excused=excused)


def _later_leases(row: Row, lease: LeaseKey) -> list[LeaseKey]:
    """Returns the leases of a job after this one. Empty if the job's history does not show them."""
    numbers = [past.lease for past in row.past]
    if lease.number not in numbers:
        return []
    if row.lease is not None and row.lease not in numbers:
        numbers.append(row.lease)
    return [LeaseKey(row.job, number) for number in numbers[numbers.index(lease.number) + 1 :]]


def _unfinished(
    evidence: Evidence,
    flow: Flow,
    nodes: Mapping[str, Enqueue],
    rows: Mapping[str, Row],
    *,
    operated: bool,
    excused: bool,
) -> Iterator[Violation]:
    def wrong(what: str) -> Violation:
        return Violation(invariant="I11", what=f"workflow {flow.workflow} on {flow.shard}: {what}", excused=excused)

    of_start = flow.nodes.keys() - flow.added.keys()
    if of_start != nodes.keys():
        yield wrong(f"it has {len(of_start)} nodes, and {len(nodes)} were stored")
    for job, state in flow.nodes.items():
        row = rows.get(job)
        if state not in _JOBS:
            # If a test run waits at its end until no jobs are left, every job has ended.
            if evidence.calm_s is not None:
                pause = ", because it is paused" if flow.is_paused else ""
                yield wrong(f"the node of job {job} is {state}, and will not end{pause}")
        # A retry of a workflow cancels the dead jobs of the workflow. A job that dies while the workflow is being
        # cancelled is cancelled too.
        elif operated and state == "failed" and row is not None and row.state is State.CANCELLED:
            continue
        elif row is not None and row.state is not _JOBS[state]:
            yield wrong(f"the node of job {job} has {state}, and the job is {row.state}")
    if evidence.calm_s is not None and flow.state == "running":
        yield wrong("it has not ended")


def _wrongly_added(flow: Flow, additions: Sequence[Addition], *, excused: bool) -> Iterator[Violation]:
    def wrong(invariant: str, what: str) -> Violation:
        what = f"workflow {flow.workflow} on {flow.shard}: {what}"
        return Violation(invariant=invariant, what=what, excused=excused)

    for name, job in {node for one in additions for node in one.jobs.items()}:
        if flow.added.get(job) != name:
            yield wrong("I1", f"it has no node {name} with job {job}, which was acknowledged")
    asked = {name for one in additions for name in one.nodes}
    for name, count in Counter(flow.added.values()).items():
        if count > 1:
            yield wrong("I3", f"node {name} was added {count} times")
        if name not in asked:
            yield wrong("I3", f"it has node {name}, which nobody added")
    for one in additions:
        if one.call.code in _WRONG_CODES:
            yield wrong("I11", f"job {one.lease.job} got {one.call.code} when it added nodes")
