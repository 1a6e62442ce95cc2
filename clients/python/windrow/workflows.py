"""The classes in which a user sees workflows (graphs of jobs), and the conversion of these classes from and to
protobuf. No I/O."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Unpack

from windrow.errors import InvalidJob, InvalidRequest, Span, Violation, invalid_argument, renamed
from windrow.ids import uuid7
from windrow.new_jobs import JobOptions, NewJob, new_message
from windrow.payloads import Payload, moment, named_seconds
from windrow.v1 import workflows_pb2

# The kind of the jobs of nodes that wait for signals. No handler gets these jobs.
SIGNAL_KIND = "signal"


class FailurePolicy(enum.Enum):
    """What happens to a node if a node that it waits for fails. A node fails if its job dies or is cancelled."""

    # The node is cancelled. So the nodes that wait for it with this policy are cancelled, too.
    CANCEL = "cancel"
    # The node runs as if the failed node had succeeded. If all nodes that wait for a failed node ignore its failure,
    # the workflow does not fail because of it.
    IGNORE = "ignore"
    # The node runs, and the workflow fails.
    RUN = "run"
    UNKNOWN = "unknown"


CANCEL = FailurePolicy.CANCEL
IGNORE = FailurePolicy.IGNORE
RUN_ANYWAY = FailurePolicy.RUN


class Callback(enum.Enum):
    """After which outcome of the workflow a callback runs."""

    ON_SUCCESS = "on_success"
    ON_FAILURE = "on_failure"
    ON_END = "on_end"
    UNKNOWN = "unknown"


class WorkflowState(enum.Enum):
    """Whether a workflow runs, or how it has ended."""

    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    UNKNOWN = "unknown"


class NodeState(enum.Enum):
    """The state of a node."""

    # The node waits for other nodes. A callback waits for the end of the workflow.
    BLOCKED = "blocked"
    # The node's job is scheduled, ready or leased.
    RELEASED = "released"
    SUCCEEDED = "succeeded"
    # The node's job became dead.
    FAILED = "failed"
    CANCELLED = "cancelled"
    SKIPPED = "skipped"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """A node of a Workflow that a program is building."""

    name: str
    job: NewJob = field(repr=False)
    # All nodes of one Workflow or Nodes object have the same mark. A reference to the object itself would make a
    # reference cycle.
    mark: object = field(repr=False)
    callback: Callback | None = None
    # Whether the node has a default name, because nobody has given it a name.
    is_unnamed: bool = field(default=False, repr=False)
    # Whether the node waits for Client.signal.
    is_signal: bool = False
    # The nodes that this node waits for, by name.
    waits_for: dict[str, FailurePolicy] = field(default_factory=dict[str, FailurePolicy], repr=False)

    def after(self, *nodes: Node | str, on_failed: FailurePolicy = FailurePolicy.CANCEL) -> Node:
        """Makes this node wait for these nodes, too. Each of `nodes` is a node of the same workflow, or its name.
        Returns this node. Raises InvalidRequest for a node of another Workflow or Nodes."""
        for node in nodes:
            # Refuse a node of another object, because this node would wait for it by name. The name may belong to a
            # different node here, and a default name gets a prefix when the other object is sent.
            if isinstance(node, Node) and node.mark is not self.mark:
                raise invalid_argument(
                    "after",
                    f"node {node.name!r} is of another Workflow or Nodes than node {self.name!r}: to wait for a node "
                    "that the workflow has already, give its name",
                )
        self.waits_for.update((node if isinstance(node, str) else node.name, on_failed) for node in nodes)
        return self


class Nodes:
    """Jobs to be added to the workflow of a running job by Client.add_nodes."""

    def __init__(self) -> None:
        self._nodes: list[Node] = []
        self._names: dict[str, int] = {}
        self._mark = object()

    @property
    def nodes(self) -> Sequence[Node]:
        """All nodes, in the order in which they were added."""
        return self._nodes

    def job(
        self,
        queue: str,
        kind: str,
        payload: Payload = b"",
        *,
        name: str = "",
        after: Node | str | Iterable[Node | str] = (),
        on_failed: FailurePolicy = FailurePolicy.CANCEL,
        **options: Unpack[JobOptions],
    ) -> Node:
        """Adds a job that runs after other nodes. `on_failed` says what happens to the job if one of these nodes fails.
        `options`: the other fields of NewJob, except `id` and the dedup key. A `delay` counts from the end of the last
        node that the job waits for.

        `name` names the node in answers, and must be unique in the workflow. The default is the job's kind, for example
        "resize"; the second node of this kind is then "resize-2". If a job adds the node (Client.add_nodes), the
        default begins with two numbers: the number of that job's node, and the number of the call."""
        node = self._add(NewJob(queue, kind, payload, **options), name, None)
        return node.after(*([after] if isinstance(after, Node | str) else after), on_failed=on_failed)

    def signal(
        self,
        name: str,
        queue: str,
        *,
        timeout: Span,
        after: Node | str | Iterable[Node | str] = (),
        on_failed: FailurePolicy = FailurePolicy.CANCEL,
        payload: Payload = b"",
        attributes: Mapping[str, str] | None = None,
    ) -> Node:
        """Adds a node that waits for other nodes, and for a call of Client.signal. Nodes that wait for this node find
        the payload of the signal with Client.parents.

        `timeout`: for how long the node waits for the signal, counted from the end of the last node that it waits for.
        If no signal arrives in this time, the node fails. `queue`: the queue of the node's job. The job never runs, but
        workers of this queue notice when the timeout is over. `payload` and `attributes` are stored with this job, for
        people to read. Raises InvalidRequest."""
        named_seconds("timeout", timeout)
        job = NewJob(queue, SIGNAL_KIND, payload, delay=timeout, attributes=attributes)
        node = self._add(job, name, None, is_signal=True)
        return node.after(*([after] if isinstance(after, Node | str) else after), on_failed=on_failed)

    def _add(self, job: NewJob, name: str, callback: Callback | None, *, is_signal: bool = False) -> Node:
        is_unnamed = not name
        if is_unnamed:
            count = self._names[job.kind] = self._names.get(job.kind, 0) + 1
            name = job.kind if count == 1 else f"{job.kind}-{count}"
        node = Node(name, job, self._mark, callback, is_unnamed, is_signal)
        self._nodes.append(node)
        return node

    def messages(self, prefix: str = "") -> list[workflows_pb2.NewNode]:
        """Returns the nodes for a request. Default names begin with `prefix`. Raises InvalidJob, InvalidRequest."""
        names = {node.name: f"{prefix}{node.name}" for node in self._nodes if node.is_unnamed}
        messages: list[workflows_pb2.NewNode] = []
        for at, node in enumerate(self._nodes):
            try:
                job = new_message(node.job)
            except InvalidJob as error:
                # Name the field as a router does.
                places = {field: field.replace("jobs[0]", f"nodes[{at}].job") for field, _ in error.violations}
                raise renamed(error, places) from error
            # The router makes the job's id from the workflow's id.
            job.ClearField("id")
            message = workflows_pb2.NewNode(name=names.get(node.name, node.name), job=job, signal=node.is_signal)
            if node.callback is not None:
                message.callback = _CALLBACK_NUMBERS[node.callback]
            for other, policy in node.waits_for.items():
                message.after.add(node=names.get(other, other), on_failed=policy_number(policy))
            messages.append(message)
        return messages


class Workflow(Nodes):
    """A graph of jobs, to be stored by Client.start.

    - `name`: for people; need not be unique.
    - `org`: if given, must be the client's org.
    - `id`: a UUIDv7; default: a new UUIDv7. A workflow with this id is stored once, even if it is started several
      times.
    """

    def __init__(self, name: str = "", *, org: str = "", id: str = "") -> None:  # noqa: A002 - as in NewJob
        super().__init__()
        self.name = name
        self.org = org
        self.id = id or uuid7()

    def on_success(
        self, queue: str, kind: str, payload: Payload = b"", *, name: str = "", **options: Unpack[JobOptions]
    ) -> Node:
        """Adds a job that runs once when all nodes have ended and none has failed."""
        return self._add(NewJob(queue, kind, payload, **options), name, Callback.ON_SUCCESS)

    def on_failure(
        self, queue: str, kind: str, payload: Payload = b"", *, name: str = "", **options: Unpack[JobOptions]
    ) -> Node:
        """Adds a job that runs once when all nodes have ended and at least one has failed."""
        return self._add(NewJob(queue, kind, payload, **options), name, Callback.ON_FAILURE)

    def on_end(
        self, queue: str, kind: str, payload: Payload = b"", *, name: str = "", **options: Unpack[JobOptions]
    ) -> Node:
        """Adds a job that runs once when all nodes have ended, even if the workflow was cancelled."""
        return self._add(NewJob(queue, kind, payload, **options), name, Callback.ON_END)

    def request(self, org: str) -> workflows_pb2.StartWorkflowRequest:
        """Returns the request that stores the workflow. Raises InvalidJob, InvalidRequest."""
        if self.org not in ("", org):
            why = f"is {self.org!r}, and the client is of org {org!r}"
            raise InvalidRequest(f"org: {why}", [Violation("org", why)])
        return workflows_pb2.StartWorkflowRequest(org=org, id=self.id, name=self.name, nodes=self.messages())


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A workflow that is stored."""

    id: str
    # True: the workflow was stored by an earlier call.
    duplicate: bool
    # The id of each node's job, by the node's name.
    job_ids: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Added:
    """Nodes that a job has added to its workflow."""

    # The id of each node's job, by the node's name in Nodes.
    job_ids: Mapping[str, str]
    # How many of the nodes this call has stored. The other nodes were added before.
    stored: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkflowRecord:
    """A workflow as a shard stores it."""

    id: str
    name: str
    state: WorkflowState
    paused: bool
    created_at: datetime
    ended_at: datetime | None
    # How many nodes the workflow has, without callbacks.
    nodes: int
    shard: str
    # The id of the workflow that this workflow retries. Empty: this workflow is not a retry.
    retry_of: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRecord:
    """A node as a shard stores it."""

    number: int
    name: str
    job_id: str
    state: NodeState
    # The nodes that this node waits for, by name.
    after: Mapping[str, FailurePolicy]
    callback: Callback | None
    ended_at: datetime | None
    # Whether the node waits, or waited, for a signal.
    is_signal: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Parent:
    """A node that another node waited for."""

    name: str
    job_id: str
    state: NodeState
    # What the node's handler returned, or the payload of its signal, as bytes.
    result: bytes
    # Why the node failed or was cancelled.
    reason: str


def policy_number(policy: FailurePolicy) -> workflows_pb2.FailurePolicy.ValueType:
    """Returns the number of a policy. Raises InvalidRequest, which names the argument on_failed."""
    try:
        return _POLICY_NUMBERS[policy]
    except KeyError as error:
        raise invalid_argument("on_failed", f"must be windrow.CANCEL, IGNORE or RUN_ANYWAY, not {policy!r}") from error


def state_number(state: WorkflowState) -> workflows_pb2.WorkflowState.ValueType:
    """Returns the number of a state. Raises InvalidRequest, which names the argument state."""
    try:
        return _STATE_NUMBERS[state]
    except KeyError as error:
        raise invalid_argument("state", f"must be a WorkflowState, not {state!r}") from error


def read_workflow(message: workflows_pb2.WorkflowInfo) -> WorkflowRecord:
    return WorkflowRecord(
        id=message.id,
        name=message.name,
        state=_STATES.get(message.state, WorkflowState.UNKNOWN),
        paused=message.paused,
        created_at=moment(message.created_at),
        ended_at=moment(message.ended_at) if message.HasField("ended_at") else None,
        nodes=message.nodes,
        shard=message.shard,
        retry_of=message.retry_of,
    )


def read_node(message: workflows_pb2.NodeInfo) -> NodeRecord:
    return NodeRecord(
        number=message.number,
        name=message.name,
        job_id=message.job_id,
        state=_NODE_STATES.get(message.state, NodeState.UNKNOWN),
        after={edge.node: _POLICIES.get(edge.on_failed, FailurePolicy.UNKNOWN) for edge in message.after},
        callback=_CALLBACKS.get(message.callback, Callback.UNKNOWN) if message.callback else None,
        ended_at=moment(message.ended_at) if message.HasField("ended_at") else None,
        is_signal=message.signal,
    )


def read_parent(message: workflows_pb2.ParentInfo) -> Parent:
    return Parent(
        name=message.name,
        job_id=message.job_id,
        state=_NODE_STATES.get(message.state, NodeState.UNKNOWN),
        result=message.result,
        reason=message.reason,
    )


# The numbers are the numbers of the enum values in the proto files. In the proto files, the names have a prefix.
_POLICY_NUMBERS: dict[FailurePolicy, workflows_pb2.FailurePolicy.ValueType] = {
    policy: workflows_pb2.FailurePolicy.Value(f"FAILURE_POLICY_{policy.name}")
    for policy in FailurePolicy
    if policy is not FailurePolicy.UNKNOWN
}
_CALLBACK_NUMBERS: dict[Callback, workflows_pb2.Callback.ValueType] = {
    callback: workflows_pb2.Callback.Value(f"CALLBACK_{callback.name}")
    for callback in Callback
    if callback is not Callback.UNKNOWN
}
_STATE_NUMBERS: dict[WorkflowState, workflows_pb2.WorkflowState.ValueType] = {
    state: workflows_pb2.WorkflowState.Value(f"WORKFLOW_STATE_{state.name}")
    for state in WorkflowState
    if state is not WorkflowState.UNKNOWN
}
_POLICIES: dict[int, FailurePolicy] = {number: policy for policy, number in _POLICY_NUMBERS.items()}
_CALLBACKS: dict[int, Callback] = {number: callback for callback, number in _CALLBACK_NUMBERS.items()}
_STATES: dict[int, WorkflowState] = {number: state for state, number in _STATE_NUMBERS.items()}
_NODE_STATES: dict[int, NodeState] = {
    workflows_pb2.NodeState.Value(f"NODE_STATE_{state.name}"): state
    for state in NodeState
    if state is not NodeState.UNKNOWN
}
