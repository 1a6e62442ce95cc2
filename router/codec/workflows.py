"""Converts between the messages of workflows.proto and the records of the shard, and checks what protovalidate cannot
check: that the nodes and edges of a new workflow make a graph without cycles. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence, Set
from graphlib import CycleError, TopologicalSorter

from router.codec import convert
from router.codec.convert import timestamp
from router.codec.status import InvalidRequest, Violation
from router.codec.validate import violations_of
from shard.job_record import JobRecord
from shard.vocabulary import JobId, NewJobs, OrgId, ShardName
from shard.workflow import (
    ADDED_EDGES_MAX,
    ADDED_NODES_MAX,
    CALLBACKS_MAX,
    DEPTH_MAX,
    EDGES_MAX,
    NODES_MAX,
    Callback,
    Edge,
    NewNodes,
    NewWorkflow,
    NodeName,
    NodeRecord,
    NodeState,
    OnFailed,
    ParentRecord,
    WorkflowId,
    WorkflowRecord,
    WorkflowState,
    job_id_of,
    node_state,
)
from windrow.v1 import workflows_pb2

_VIOLATIONS_MAX = 20
_CYCLE_SHOWN_MAX = 10
_STATES = {state: workflows_pb2.WorkflowState.Value(f"WORKFLOW_STATE_{state.name}") for state in WorkflowState}
_STATES_BY_NUMBER: Mapping[int, WorkflowState] = {number: state for state, number in _STATES.items()}
_NODE_STATES = {state: workflows_pb2.NodeState.Value(f"NODE_STATE_{state.name}") for state in NodeState}
_POLICIES = {policy: workflows_pb2.FailurePolicy.Value(f"FAILURE_POLICY_{policy.name}") for policy in OnFailed}
_POLICIES_BY_NUMBER: Mapping[int, OnFailed] = {number: policy for policy, number in _POLICIES.items()}
_CALLBACKS = {callback: workflows_pb2.Callback.Value(f"CALLBACK_ON_{callback.name}") for callback in Callback}
_CALLBACKS_BY_NUMBER: Mapping[int, Callback] = {number: callback for callback, number in _CALLBACKS.items()}


# ── In ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


def check_size(request: workflows_pb2.StartWorkflowRequest | workflows_pb2.AddNodesRequest) -> None:
    """Raises InvalidRequest if there are too many nodes or edges. Unlike all other checks, this one is fast for any
    number of nodes."""
    adds = isinstance(request, workflows_pb2.AddNodesRequest)
    nodes_max, edges_max = (ADDED_NODES_MAX, ADDED_EDGES_MAX) if adds else (NODES_MAX, EDGES_MAX)
    if (nodes := len(request.nodes)) > nodes_max:
        raise InvalidRequest([Violation("nodes", f"must have at most {nodes_max:,} items, not {nodes:,}")])
    if (edges := count_edges(request)) > edges_max:
        raise InvalidRequest(
            [Violation("nodes", f"must wait for at most {edges_max:,} others together, not {edges:,}")]
        )


def count_edges(request: workflows_pb2.StartWorkflowRequest | workflows_pb2.AddNodesRequest) -> int:
    return sum(len(node.after) for node in request.nodes)


def _check(request: workflows_pb2.StartWorkflowRequest | workflows_pb2.AddNodesRequest) -> None:
    """Raises InvalidRequest with the violations of the contract's rules, or else with those of the graph."""
    check_size(request)
    adds = isinstance(request, workflows_pb2.AddNodesRequest)
    nodes_max = ADDED_NODES_MAX if adds else NODES_MAX
    nodes = list(request.nodes)
    violations = violations_of(request, items_max=nodes_max) or _job_violations(nodes)
    violations = violations or _node_violations(nodes, adds=adds) or _graph_violations(nodes)
    if violations:
        raise InvalidRequest(violations[:_VIOLATIONS_MAX])


def _job_violations(nodes: Sequence[workflows_pb2.NewNode]) -> list[Violation]:
    violations: list[Violation] = []
    for at, node in enumerate(nodes):
        for field, is_set in (("id", bool(node.job.id)), ("dedup", node.job.HasField("dedup"))):
            if is_set:
                violations.append(Violation(f"nodes[{at}].job.{field}", "must not be set in a node of a workflow"))
    return violations


def _node_violations(nodes: Sequence[workflows_pb2.NewNode], *, adds: bool) -> list[Violation]:
    """`adds`: the nodes are added to a workflow, and may wait for nodes that it has already."""
    violations: list[Violation] = []
    numbers: dict[str, int] = {}
    callbacks = 0
    for at, node in enumerate(nodes):
        first = numbers.setdefault(node.name, at)
        if first != at:
            violations.append(Violation(f"nodes[{at}].name", f"is that of nodes[{first}] too: {node.name!r}"))
        if node.callback and adds:
            violations.append(Violation(f"nodes[{at}].callback", "must not be set: callbacks start with the workflow"))
        elif node.callback:
            callbacks += 1
            if node.after:
                violations.append(Violation(f"nodes[{at}].after", "must be empty: the node is a callback"))
        if node.signal:
            violations += _signal_violations(at, node)
    if callbacks > CALLBACKS_MAX:
        violations.append(Violation("nodes", f"must have at most {CALLBACKS_MAX} callbacks, not {callbacks:,}"))
    if callbacks == len(nodes):
        violations.append(Violation("nodes", "must have at least one that is not a callback"))
    no_parents = {node.name for node in nodes if node.callback}
    for at, node in enumerate(nodes):
        name, seen = node.name, set[str]()
        # Read each edge once: each access to a field of a message creates a Python object, and there may be 100,000
        # edges.
        for number, parent in enumerate([edge.node for edge in node.after]):
            if parent != name and parent not in seen and (parent in numbers or adds) and parent not in no_parents:
                seen.add(parent)
                continue
            field = f"nodes[{at}].after[{number}].node"
            if parent == name:
                violations.append(Violation(field, f"is the node itself: {parent!r}"))
            elif parent in no_parents:
                violations.append(Violation(field, f"is a callback, which runs after the workflow: {parent!r}"))
            elif parent in seen:
                violations.append(Violation(field, f"is named twice: {parent!r}"))
            else:
                violations.append(Violation(field, f"names no node of the workflow: {parent!r}"))
            seen.add(parent)
            if len(violations) >= _VIOLATIONS_MAX:
                return violations
    return violations


def _signal_violations(at: int, node: workflows_pb2.NewNode) -> list[Violation]:
    job = node.job
    violations: list[Violation] = []
    if node.callback:
        violations.append(Violation(f"nodes[{at}].signal", "must not be set: the node is a callback"))
    if job.WhichOneof("when") != "delay":
        why = "must be set: the node waits for a signal, and this says for how long"
        violations.append(Violation(f"nodes[{at}].job.delay", why))
    for field, is_set in (("expires_at", job.HasField("expires_at")), ("template.group", bool(job.template.group))):
        if is_set:
            violations.append(Violation(f"nodes[{at}].job.{field}", "must not be set: the node waits for a signal"))
    return violations


def _graph_violations(nodes: Sequence[workflows_pb2.NewNode]) -> list[Violation]:
    """Returns the violation of a graph with a cycle, or with a chain that is too long. If an edge names a node that is
    not in `nodes`, the workflow already has this node."""
    numbers = {node.name: at for at, node in enumerate(nodes)}
    try:
        order = _ordered(nodes)
    except CycleError as error:
        # Each node of the path waits for the next one. The first node is at the end again.
        path: list[str] = error.args[1][::-1]
        shown = path if len(path) <= _CYCLE_SHOWN_MAX else [*path[: _CYCLE_SHOWN_MAX - 1], "…", path[-1]]
        why = "waits for itself: " + " after ".join(map(repr, shown))
        return [Violation(f"nodes[{numbers[path[0]]}].after", why)]
    depths: dict[str, int] = {}
    for at in order:
        node = nodes[at]
        depths[node.name] = depth = 1 + max((depths.get(edge.node, 0) for edge in node.after), default=0)
        if depth > DEPTH_MAX:
            return [Violation(f"nodes[{at}].after", f"ends a chain of more than {DEPTH_MAX:,} nodes: {node.name!r}")]
    return []


def _ordered(nodes: Sequence[workflows_pb2.NewNode]) -> list[int]:
    """Returns the positions of the nodes in an order in which each node comes after those that it waits for; callbacks
    come last. An order that is right already stays as it is. Raises CycleError."""
    numbers = {node.name: at for at, node in enumerate(nodes)}
    callbacks = [at for at, node in enumerate(nodes) if node.callback]
    plain = [at for at, node in enumerate(nodes) if not node.callback]
    if all(numbers.get(edge.node, -1) < at for at in plain for edge in nodes[at].after):
        return [*plain, *callbacks]
    sorter = TopologicalSorter(
        {nodes[at].name: [edge.node for edge in nodes[at].after if edge.node in numbers] for at in plain}
    )
    return [*(numbers[name] for name in sorter.static_order()), *callbacks]


def new_workflow(request: workflows_pb2.StartWorkflowRequest, *, trace: str | None) -> tuple[NewWorkflow, list[int]]:
    """Returns the workflow of a request, and the number of each of the request's nodes. Raises InvalidRequest."""
    _check(request)
    nodes = list(request.nodes)
    order = _ordered(nodes)
    numbers = {nodes[at].name: number for number, at in enumerate(order)}
    workflow = WorkflowId(request.id)
    jobs = convert.new_jobs(OrgId(request.org), [nodes[at].job for at in order], trace=trace)
    jobs.ids = [job_id_of(workflow, number) for number in range(len(order))]
    signals = {number for number, at in enumerate(order) if nodes[at].signal}
    _put_first(jobs, signals)
    edges = [
        Edge(number, numbers[edge.node], _POLICIES_BY_NUMBER.get(edge.on_failed, OnFailed.CANCEL))
        for number, at in enumerate(order)
        for edge in nodes[at].after
    ]
    new = NewWorkflow(
        id=workflow,
        name=request.name,
        digest=hashlib.sha256(request.SerializeToString(deterministic=True)).digest(),
        numbers=range(len(order)),
        names=[NodeName(nodes[at].name) for at in order],
        jobs=jobs,
        edges=sorted(edges),
        callbacks={
            number: _CALLBACKS_BY_NUMBER[nodes[at].callback] for number, at in enumerate(order) if nodes[at].callback
        },
        signals=signals,
    )
    return new, [numbers[node.name] for node in nodes]


def new_nodes(request: workflows_pb2.AddNodesRequest, *, trace: str | None) -> tuple[NewNodes, list[int]]:
    """Returns the nodes of a request, sorted as by `_ordered`, and the position in this order for each of the request's
    nodes. Raises InvalidRequest."""
    _check(request)
    nodes = list(request.nodes)
    order = _ordered(nodes)
    places = {nodes[at].name: place for place, at in enumerate(order)}
    jobs = convert.new_jobs(OrgId(request.org), [nodes[at].job for at in order], trace=trace)
    signals = {place for place, at in enumerate(order) if nodes[at].signal}
    _put_first(jobs, signals)
    new = NewNodes(
        workflow=WorkflowId(request.id),
        names=[NodeName(nodes[at].name) for at in order],
        jobs=jobs,
        after={
            place: [
                (NodeName(edge.node), _POLICIES_BY_NUMBER.get(edge.on_failed, OnFailed.CANCEL))
                for edge in nodes[at].after
            ]
            for place, at in enumerate(order)
            if nodes[at].after
        },
        wait=_POLICIES_BY_NUMBER.get(request.on_failed, OnFailed.CANCEL) if request.wait else None,
        signals=signals,
    )
    return new, [places[node.name] for node in nodes]


def _put_first(jobs: NewJobs, signals: Set[int]) -> None:
    """Gives priority 1 to the jobs of nodes that wait for signals, unless a job has another priority. A claim that
    finds such a job ends it, and does not give it to a consumer. So the job delays no other job, and should not wait
    behind other jobs."""
    for at in signals:
        jobs.priorities.setdefault(at, 1)


def wanted_state(number: int) -> WorkflowState | None:
    return _STATES_BY_NUMBER.get(number)


# ── Out ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def info(record: WorkflowRecord, shard: ShardName) -> workflows_pb2.WorkflowInfo:
    return workflows_pb2.WorkflowInfo(
        org=record.org,
        id=record.id,
        name=record.name,
        state=_STATES[WorkflowState(record.state)],
        paused=record.paused,
        created_at=timestamp(record.created_at),
        ended_at=None if record.ended_at is None else timestamp(record.ended_at),
        nodes=record.nodes,
        shard=shard,
        retry_of=record.retry_of or "",
    )


def counts(found: Mapping[NodeState, int]) -> workflows_pb2.NodeCounts:
    return workflows_pb2.NodeCounts(**{state.value: nodes for state, nodes in found.items()})


def node(record: NodeRecord) -> workflows_pb2.NodeInfo:
    return workflows_pb2.NodeInfo(
        number=record.number,
        name=record.name,
        job_id=record.job_id,
        state=_NODE_STATES[node_state(record.state)],
        after=[
            workflows_pb2.WorkflowEdge(node=name, on_failed=_POLICIES[OnFailed(policy)])
            for name, policy in zip(record.after or (), record.policies or (), strict=True)
        ],
        callback=workflows_pb2.CALLBACK_UNSPECIFIED
        if record.callback is None
        else _CALLBACKS[Callback(record.callback)],
        ended_at=None if record.ended_at is None else timestamp(record.ended_at),
        signal=record.is_signal,
    )


def parent(record: ParentRecord, jobs: Mapping[JobId, JobRecord]) -> workflows_pb2.ParentInfo:
    job = jobs.get(record.job_id)
    return workflows_pb2.ParentInfo(
        name=record.name,
        job_id=record.job_id,
        state=_NODE_STATES[node_state(record.state)],
        result=b"" if job is None else job.result or b"",
        reason="" if job is None else job.reason or "",
    )
