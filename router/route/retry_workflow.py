"""Makes the workflow that retries another one. The new workflow has the same nodes, edges and callbacks. It takes over
the nodes that have succeeded or were skipped. The other nodes get new jobs with the content of the old jobs, which may
be on any shard (docs/decisions/0065-a-retry-is-a-new-workflow.md)."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from typing import NamedTuple

from router.calculator import Calculator
from router.fleet.fleet import Fleet
from router.route.restore import look_up
from shard.errors import NotRetryable
from shard.job_record import JobRecord, as_new
from shard.vocabulary import LIVE, JobId, JobState, OrgId
from shard.workflow import (
    Callback,
    Edge,
    EndedNode,
    NewWorkflow,
    NodeRecord,
    NodeState,
    OnFailed,
    WorkflowId,
    WorkflowRecord,
    WorkflowState,
    job_id_of,
)
from shard.workflows.workflow_admin import WorkflowAdmin

_RETRYABLE = (WorkflowState.FAILED, WorkflowState.CANCELLED)
_DONE = (NodeState.SUCCEEDED.value, NodeState.SKIPPED.value)
_NODES_AT_ONCE = 1_000
# The most nodes that an error names.
_NAMED_MAX = 10


class Retry(NamedTuple):
    """A workflow that retries another one (None: it is stored already), and the dead jobs of the old workflow. The new
    workflow does the work of these jobs again."""

    workflow: NewWorkflow | None
    dead: Sequence[JobId]


async def retry_of(
    fleet: Fleet,
    workflows: WorkflowAdmin,
    org: OrgId,
    old: WorkflowId,
    new: WorkflowId,
    *,
    trace: str | None,
    calculator: Calculator,
    bytes_max: int,
) -> Retry:
    """Returns the workflow `new` that retries `old`. `workflows` is the WorkflowAdmin of the shard that has `old`.
    `bytes_max`: upper bound for the bytes of the payloads and attributes of the jobs that run again. This process holds
    all of them in memory. Raises UnknownWorkflow, NotRetryable, WorkflowExists, and ShardUnavailable, for example if a
    shard that may have one of the jobs does not answer. Raises what `calculator` raises."""
    record = await workflows.get(org, old)
    if WorkflowState(record.state) not in _RETRYABLE:
        raise NotRetryable(
            old, "it has succeeded" if record.ended_at is not None else "it still runs: wait for its end, or cancel it"
        )
    digest = hashlib.sha256(f"a retry of {old}".encode()).digest()
    nodes = await _nodes(workflows, org, old)
    ended = [_as_ended(node) for node in nodes if node.state in _DONE and node.callback is None]
    again = [node for node in nodes if node.callback is not None or node.state not in _DONE]
    records = await _contents(fleet, org, old, [node.job_id for node in again], bytes_max)
    if await workflows.is_known(org, new, digest):
        return Retry(None, _dead(again, records))
    running: list[NodeRecord] = []
    for node in again:
        found = records.get(node.job_id)
        if found is None:
            raise NotRetryable(
                old, f"job {node.job_id} of node {node.name!r} is not known any more: its retention is over"
            )
        if node.callback is None and JobState(found.state) in LIVE:
            raise NotRetryable(old, f"job {node.job_id} of node {node.name!r} was redriven, and has not ended yet")
        if node.callback is None and found.state == JobState.SUCCEEDED.value:
            # The job was redriven after its node had failed, and has succeeded since then.
            ended.append(_as_ended(node._replace(state=NodeState.SUCCEEDED.value)))
        else:
            running.append(node)
    if all(node.callback is not None for node in running):
        raise NotRetryable(old, "the jobs of all its nodes have succeeded by now")

    def workflow() -> NewWorkflow:
        return _workflow(org, record, new, digest, nodes, running, records, ended, trace)

    # A workflow of 100,000 edges takes half a second.
    return Retry(await calculator.run(org, workflow), _dead(running, records))


def _dead(nodes: Sequence[NodeRecord], records: Mapping[JobId, JobRecord]) -> list[JobId]:
    jobs = [node.job_id for node in nodes if node.callback is None and node.job_id in records]
    return [job for job in jobs if records[job].state == JobState.DEAD.value]


def _workflow(
    org: OrgId,
    record: WorkflowRecord,
    new: WorkflowId,
    digest: bytes,
    nodes: Sequence[NodeRecord],
    running: Sequence[NodeRecord],
    records: Mapping[JobId, JobRecord],
    ended: Sequence[EndedNode],
    trace: str | None,
) -> NewWorkflow:
    """Returns the workflow that retries `record`. Of its nodes, those in `running` run again, and those in `ended` do
    not. `records` are the jobs of `running`. Raises NotRetryable."""
    old = WorkflowId(record.id)
    jobs = as_new(org, [records[node.job_id] for node in running], [job_id_of(new, node.number) for node in running])
    for at, node in enumerate(running):
        if node.run_at is not None:
            jobs.run_at_us[at] = node.run_at
        if node.delay_us is not None:
            jobs.delay_us[at] = node.delay_us
        if trace is not None:
            jobs.traces[at] = trace
    numbers = {node.name: node.number for node in nodes}
    edges = sorted(
        Edge(node.number, numbers[parent], OnFailed(policy))
        for node in nodes
        for parent, policy in zip(node.after or (), node.policies or (), strict=True)
    )
    if cycle := _cycle(edges, {node.number for node in running}):
        names = {node.number: node.name for node in nodes}
        circle = ", ".join(repr(names[number]) for number in cycle[:_NAMED_MAX])
        raise NotRetryable(old, f"nodes that run again would wait for each other, each for the next one: {circle}")
    return NewWorkflow(
        id=new,
        name=record.name,
        digest=digest,
        numbers=[node.number for node in running],
        names=[node.name for node in running],
        jobs=jobs,
        edges=edges,
        callbacks={node.number: Callback(node.callback) for node in running if node.callback is not None},
        retry_of=old,
        ended=ended,
        added_by={node.number: node.added_by for node in nodes if node.added_by is not None},
        signals={node.number for node in running if node.is_signal},
    )


def _cycle(edges: Sequence[Edge], running: Collection[int]) -> Sequence[int]:
    """Returns nodes among `running` that wait for each other in a circle, or none. The old workflow had no circle. But
    one of its jobs may have added nodes and waited for them, and the added nodes may wait for a node that had ended by
    then. In the retry, the ended node runs again, and may itself wait for that job."""
    again = [edge for edge in edges if edge.node in running and edge.parent in running]
    if all(edge.parent < edge.node for edge in again):
        return ()
    sorter = TopologicalSorter[int]()
    for edge in again:
        sorter.add(edge.node, edge.parent)
    try:
        sorter.prepare()
    except CycleError as error:
        # In this list each node comes before the node that waits for it, and the first node is also the last one.
        return tuple(reversed(error.args[1]))
    return ()


def _as_ended(node: NodeRecord) -> EndedNode:
    return EndedNode(node.number, node.name, node.job_id, NodeState(node.state), node.is_signal)


async def _nodes(workflows: WorkflowAdmin, org: OrgId, workflow: WorkflowId) -> list[NodeRecord]:
    nodes, token = await workflows.nodes(org, workflow, page_size=_NODES_AT_ONCE, page_token="")
    while token:
        page, token = await workflows.nodes(org, workflow, page_size=_NODES_AT_ONCE, page_token=token)
        nodes += page
    return nodes


async def _contents(
    fleet: Fleet, org: OrgId, old: WorkflowId, ids: Sequence[JobId], bytes_max: int
) -> dict[JobId, JobRecord]:
    """Returns the records of the jobs, without jobs that no shard knows, and without results, checkpoints and
    histories. Raises NotRetryable if the jobs have more than `bytes_max` bytes."""
    found: dict[JobId, JobRecord] = {}
    bytes_held = 0
    for at in range(0, len(ids), _NODES_AT_ONCE):
        left = list(ids[at : at + _NODES_AT_ONCE])
        while left:
            records = await look_up(fleet, org, left)
            for job, record in records.items():
                if record.whole:
                    found[job] = record._replace(result=None, reason=None, history=None, progress=None, checkpoint=None)
                    bytes_held += len(record.payload or b"") + len(record.attributes or "")
            if bytes_held > bytes_max:
                raise NotRetryable(old, f"the jobs that would run again have more than {bytes_max:,} bytes together")
            left = [job for job in left if job in records and job not in found]
    return found
