"""Workflows, which are graphs of jobs: how a program makes one, the methods of Client for them, and their answers."""

from __future__ import annotations

import enum
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import TypeVar, Unpack

from google.protobuf.message import Message

from windrow.calls import ADMIN_FINAL, Calls, Method
from windrow.channels import Stub
from windrow.errors import InvalidJob, InvalidRequest, Span, Violation, invalid_argument, renamed
from windrow.ids import uuid7
from windrow.jobs import Job, JobOptions, JobRecord, NewJob, WorkflowNode, new_message
from windrow.outcomes import Waiting
from windrow.payloads import Payload, encode, moment, named_seconds
from windrow.v1 import workflows_pb2

_PAGE_MAX = 1000
# The kind of the jobs of nodes that wait for signals. No handler gets these jobs.
SIGNAL_KIND = "signal"

_Request = TypeVar("_Request", bound=Message)
_Response = TypeVar("_Response")


class FailurePolicy(enum.Enum):
    """What becomes of a node if a node that it waits for fails. A node fails if its job dies or is cancelled."""

    # The node is cancelled, and so are nodes that wait for it with this policy.
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
    """For which end of the workflow a callback runs."""

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
    """How far a node is."""

    # It waits for other nodes. A callback waits for the end of the workflow.
    BLOCKED = "blocked"
    # Its job is scheduled, ready or leased.
    RELEASED = "released"
    SUCCEEDED = "succeeded"
    # Its job died.
    FAILED = "failed"
    CANCELLED = "cancelled"
    SKIPPED = "skipped"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """A node of a Workflow that is being written."""

    name: str
    job: NewJob = field(repr=False)
    # Nodes of one Workflow or Nodes have the same mark. A reference to that object itself would be a cycle.
    mark: object = field(repr=False)
    callback: Callback | None = None
    # Whether nobody has given it a name.
    is_unnamed: bool = field(default=False, repr=False)
    # Whether it waits for Client.signal.
    is_signal: bool = False
    # The nodes that it waits for, by name.
    waits_for: dict[str, FailurePolicy] = field(default_factory=dict[str, FailurePolicy], repr=False)

    def after(self, *nodes: Node | str, on_failed: FailurePolicy = FailurePolicy.CANCEL) -> Node:
        """Lets this node wait for these nodes of its workflow too, given as nodes or by name. Returns this node. Raises
        InvalidRequest for a node of another Workflow or Nodes."""
        for node in nodes:
            # Its name may be that of another node here, or may still get a prefix there.
            if isinstance(node, Node) and node.mark is not self.mark:
                raise invalid_argument(
                    "after",
                    f"node {node.name!r} is of another Workflow or Nodes than node {self.name!r}: to wait for a node "
                    "that the workflow has already, give its name",
                )
        self.waits_for.update((node if isinstance(node, str) else node.name, on_failed) for node in nodes)
        return self


class Nodes:
    """Jobs that Client.add_nodes is to add to the workflow of a running job."""

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
        """Adds a job that runs after other nodes. `on_failed` says what becomes of it if one of them fails. `options`:
        the other fields of NewJob, except `id` and the dedup key. A `delay` counts from the end of the last node that
        the job waits for.

        `name` names the node in answers, and must be unique in the workflow. The default is the job's kind; from the
        second node of that kind on, a number follows. If a job adds the node (Client.add_nodes), the default begins
        with the numbers of that job's node and of the call."""
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
        """Adds a node that waits for Client.signal, after other nodes. Nodes that wait for it find the payload of the
        signal with Client.parents.

        `timeout`: for how long it waits, counted from the end of the last node that it waits for. If no signal has come
        by then, the node fails. `queue`: its job never runs, but is in this queue, and a worker of this queue finds
        that the time is over. `payload` and `attributes` are those of this job, for people. Raises InvalidRequest."""
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
        """Returns the nodes for a request. `prefix` is put before default names. Raises InvalidJob, InvalidRequest."""
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
                message.after.add(node=names.get(other, other), on_failed=_policy_number(policy))
            messages.append(message)
        return messages


class Workflow(Nodes):
    """A graph of jobs, to be stored by Client.start.

    - `name`: for people; need not be unique.
    - `org`: if given, must be the client's org.
    - `id`: a UUIDv7; default: a new one. A workflow is stored once, however often and by whomever it is started.
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
        """Adds a job that runs once when all nodes have ended, also if the workflow was cancelled."""
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
    # True: it was stored before.
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
    """A workflow as a shard has it."""

    id: str
    name: str
    state: WorkflowState
    paused: bool
    created_at: datetime
    ended_at: datetime | None
    # How many nodes it has, without callbacks.
    nodes: int
    shard: str
    # The workflow that it retries; empty: it retries none.
    retry_of: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRecord:
    """A node as a shard has it."""

    number: int
    name: str
    job_id: str
    state: NodeState
    # The nodes that it waits for, by name.
    after: Mapping[str, FailurePolicy]
    callback: Callback | None
    ended_at: datetime | None
    # Whether it waits, or waited, for a signal.
    is_signal: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Parent:
    """A node that another node waited for."""

    name: str
    job_id: str
    state: NodeState
    # What its handler returned, or the payload of its signal, as bytes.
    result: bytes
    # Why it failed or was cancelled.
    reason: str


class WorkflowCalls:
    """The workflows of one org."""

    org: str
    calls: Calls

    async def start(self, workflow: Workflow) -> Started:
        """Stores a workflow with all its jobs, at most 10,000 (16 MiB). The call may be repeated: the workflow is
        stored once. Raises InvalidJob. Raises InvalidRequest, for example for a cycle. Raises AlreadyExists if another
        workflow has its id."""
        request = workflow.request(self.org)
        response = await self._ask_workflows(lambda stub: stub.StartWorkflow, request)
        ids = dict(zip((node.name for node in workflow.nodes), response.job_ids, strict=True))
        return Started(id=workflow.id, duplicate=response.duplicate, job_ids=ids)

    async def add_nodes(self, job: Job, nodes: Nodes) -> Added:
        """Adds nodes to the workflow of a leased job: the workflow's callbacks then wait for these nodes too. Stores
        all of them, or none. If this job has added a name before, also in an earlier attempt, the node of that name
        stays as it is. So a handler should choose names that are the same in each attempt, or add nodes in the same
        order. One call takes at most 1,000 nodes, with at most 10,000 edges; a handler may call it again and again.

        Raises InvalidJob, InvalidRequest; FailedPrecondition if the lease or the workflow has ended; AlreadyExists if
        another node has one of the names; NotFound if a node is to wait for a node that does not exist;
        ResourceExhausted if the workflow would have more than 10,000 nodes or 100,000 edges."""
        request = self._addition(job, nodes)
        if not request.nodes:
            return Added(job_ids={}, stored=0)
        response = await self._ask_workflows(lambda stub: stub.AddNodes, request)
        ids = dict(zip((node.name for node in nodes.nodes), response.job_ids, strict=True))
        return Added(job_ids=ids, stored=response.added)

    async def wait_for(
        self, job: Job, nodes: Nodes, *, on_failed: FailurePolicy = FailurePolicy.CANCEL
    ) -> list[Parent]:
        """Adds nodes to the workflow of a leased job like add_nodes, and lets the job wait for them. If all of them
        have ended, or if there are none, returns them with their results, in the order of `nodes`. Otherwise raises
        Waiting, which the handler must not catch: the attempt ends without counting, and the handler runs again from
        its beginning when the nodes have ended. `on_failed` says what becomes of the job if one of the nodes fails.

        The nodes may wait for each other, and for nodes that have ended. Raises what add_nodes raises, and
        InvalidRequest if one of the nodes waits for any other node, because that node might wait for the job."""
        request = self._addition(job, nodes)
        request.wait = True
        request.on_failed = _policy_number(on_failed)
        if not request.nodes:
            return []
        # The router takes no report about a lease that has ended.
        await job.reporter.stored(job.lease)
        response = await self._ask_workflows(lambda stub: stub.AddNodes, request)
        if response.waits:
            raise Waiting(len(request.nodes))
        ended = {parent.name: parent for parent in await self.parents(job)}
        return [ended[node.name] for node in request.nodes]

    def _addition(self, job: Job, nodes: Nodes) -> workflows_pb2.AddNodesRequest:
        if not isinstance(job, Job):
            raise invalid_argument(
                "job", f"must be the Job that a handler or Client.dequeue got, not a {type(job).__name__}"
            )
        if not isinstance(nodes, Nodes):
            raise invalid_argument("nodes", f"must be a windrow.Nodes, not a {type(nodes).__name__}")
        of = job.workflow
        if of is None:
            raise invalid_argument(
                "job",
                f"{job.id} is in no workflow: start it as the only node of a windrow.Workflow to let it add nodes",
            )
        if nodes not in of.added:
            of.added.append(nodes)
        # Nodes without names get the same names in each attempt, if the calls come in the same order.
        messages = nodes.messages(f"{of.node}.{of.added.index(nodes) + 1}.")
        return workflows_pb2.AddNodesRequest(org=self.org, id=of.workflow_id, lease=job.lease, nodes=messages)

    async def get_workflow(self, workflow_id: str) -> tuple[WorkflowRecord, dict[NodeState, int]]:
        """Returns a workflow, and how many of its nodes are in each state. Raises NotFound."""
        request = workflows_pb2.GetWorkflowRequest(org=self.org, id=workflow_id)
        response = await self._ask_workflows(lambda stub: stub.GetWorkflow, request)
        known = [state for state in NodeState if state is not NodeState.UNKNOWN]
        counts: dict[NodeState, int] = {state: getattr(response.counts, state.value) for state in known}
        return _read(response.workflow), counts

    async def list_nodes(self, workflow_id: str) -> list[NodeRecord]:
        """Returns all nodes of a workflow, each after the nodes that it waits for, except those that its own job has
        added. Raises NotFound."""
        nodes: list[NodeRecord] = []
        token = ""
        while True:
            request = workflows_pb2.ListNodesRequest(
                org=self.org, id=workflow_id, page_size=_PAGE_MAX, page_token=token
            )
            response = await self._ask_workflows(lambda stub: stub.ListNodes, request)
            nodes += map(_read_node, response.nodes)
            token = response.next_page_token
            if not token:
                return nodes

    async def list_workflows(self, *, state: WorkflowState | None = None, limit: int = 1000) -> list[WorkflowRecord]:
        """Returns the newest workflows of the org, at most `limit`. `state`: only workflows in this state."""
        number = workflows_pb2.WORKFLOW_STATE_UNSPECIFIED
        if state is not None:
            try:
                number = _STATE_NUMBERS[state]
            except KeyError as error:
                raise invalid_argument("state", f"must be a WorkflowState, not {state!r}") from error
        found: list[WorkflowRecord] = []
        token = ""
        while len(found) < limit:
            request = workflows_pb2.ListWorkflowsRequest(
                org=self.org, state=number, page_size=min(limit - len(found), _PAGE_MAX), page_token=token
            )
            response = await self._ask_workflows(lambda stub: stub.ListWorkflows, request)
            found += map(_read, response.workflows)
            token = response.next_page_token
            if not token:
                break
        return found

    async def cancel_workflow(self, workflow_id: str, *, reason: str = "") -> WorkflowRecord:
        """Cancels all jobs of a workflow that have not ended. Running handlers are told, as by cancel_jobs. Raises
        NotFound."""
        request = workflows_pb2.CancelWorkflowRequest(org=self.org, id=workflow_id, reason=reason)
        return _read((await self._ask_workflows(lambda stub: stub.CancelWorkflow, request)).workflow)

    async def pause_workflow(self, workflow_id: str) -> WorkflowRecord:
        """Releases no more jobs of a workflow until resume_workflow. Raises NotFound."""
        request = workflows_pb2.PauseWorkflowRequest(org=self.org, id=workflow_id)
        return _read((await self._ask_workflows(lambda stub: stub.PauseWorkflow, request)).workflow)

    async def resume_workflow(self, workflow_id: str) -> WorkflowRecord:
        """Ends the pause of a workflow. Raises NotFound."""
        request = workflows_pb2.ResumeWorkflowRequest(org=self.org, id=workflow_id)
        return _read((await self._ask_workflows(lambda stub: stub.ResumeWorkflow, request)).workflow)

    async def skip_node(self, workflow_id: str, node: str) -> WorkflowRecord:
        """Ends a node as if it had succeeded, and cancels its job. Raises NotFound. Raises FailedPrecondition if the
        node has ended, also if the first try of this call skipped it and its answer was lost."""
        request = workflows_pb2.SkipNodeRequest(org=self.org, id=workflow_id, node=node)
        return _read((await self._ask_workflows(lambda stub: stub.SkipNode, request)).workflow)

    async def signal(self, workflow_id: str, node: str, payload: Payload = b"") -> bool:
        """Gives a signal to a node that waits for one (Nodes.signal). The payload, at most 64 KiB, becomes the
        node's result. The node ends when the nodes that it waits for have ended, too. The first signal counts: returns
        False if there was one before, perhaps by an earlier try of this call whose answer was lost.

        Raises NotFound. Raises FailedPrecondition if the node waits for no signal, or has ended without one: none came
        in time, or it was cancelled or skipped."""
        try:
            content = encode(payload)
        except (TypeError, ValueError) as error:
            raise invalid_argument("payload", str(error)) from error
        request = workflows_pb2.SignalNodeRequest(org=self.org, id=workflow_id, node=node, payload=content)
        return (await self._ask_workflows(lambda stub: stub.SignalNode, request)).accepted

    async def retry_workflow(self, workflow_id: str, *, new_id: str = "") -> WorkflowRecord:
        """Starts a failed or cancelled workflow once more, as a new workflow. The new workflow takes over the nodes
        that have succeeded or were skipped, and runs the other nodes again. Returns the new workflow.

        `new_id`: the id of the new workflow, a UUIDv7, so that the call may be repeated; default: a new one. Raises
        NotFound. Raises FailedPrecondition if the workflow runs, has succeeded or was retried already, or if a job that
        is to run again is live, or no longer exists."""
        request = workflows_pb2.RetryWorkflowRequest(org=self.org, id=workflow_id, new_id=new_id or uuid7())
        return _read((await self._ask_workflows(lambda stub: stub.RetryWorkflow, request)).workflow)

    async def parents(self, job: Job | JobRecord | WorkflowNode) -> list[Parent]:
        """Returns the nodes that the node of this job waited for, with the results of their jobs. Returns an empty list
        if the job is in no workflow, or if its node is a callback."""
        of = job if isinstance(job, WorkflowNode) else job.workflow
        return [] if of is None else [parent async for parent in self._parents(of)]

    async def _parents(self, of: WorkflowNode) -> AsyncIterator[Parent]:
        token = ""
        while True:
            request = workflows_pb2.ListParentsRequest(org=self.org, id=of.workflow_id, node=of.node, page_token=token)
            response = await self._ask_workflows(lambda stub: stub.ListParents, request)
            for message in response.parents:
                yield Parent(
                    name=message.name,
                    job_id=message.job_id,
                    state=_NODE_STATES.get(message.state, NodeState.UNKNOWN),
                    result=message.result,
                    reason=message.reason,
                )
            token = response.next_page_token
            if not token:
                return

    async def _ask_workflows(
        self, method: Callable[[Stub], Method[_Request, _Response]], request: _Request
    ) -> _Response:
        return await self.calls.call(method, request, final=ADMIN_FINAL)


def _policy_number(policy: FailurePolicy) -> workflows_pb2.FailurePolicy.ValueType:
    try:
        return _POLICY_NUMBERS[policy]
    except KeyError as error:
        raise invalid_argument("on_failed", f"must be windrow.CANCEL, IGNORE or RUN_ANYWAY, not {policy!r}") from error


def _read(message: workflows_pb2.WorkflowInfo) -> WorkflowRecord:
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


def _read_node(message: workflows_pb2.NodeInfo) -> NodeRecord:
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


# The numbers are those of the contract's enums. The names there are the same after a prefix.
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
