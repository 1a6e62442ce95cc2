"""The methods of Client about workflows: starts, changes and lists them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import TypeVar

from google.protobuf.message import Message

from windrow.calls import ADMIN_FINAL, Calls, Method
from windrow.channels import Stub
from windrow.errors import invalid_argument
from windrow.ids import uuid7
from windrow.jobs import Job, JobRecord, WorkflowNode
from windrow.outcomes import Waiting
from windrow.payloads import Payload, checked_text, encode
from windrow.v1 import workflows_pb2
from windrow.workflows import (
    Added,
    FailurePolicy,
    NodeRecord,
    Nodes,
    NodeState,
    Parent,
    Started,
    Workflow,
    WorkflowRecord,
    WorkflowState,
    policy_number,
    read_node,
    read_parent,
    read_workflow,
    state_number,
)

_PAGE_MAX = 1000

_Request = TypeVar("_Request", bound=Message)
_Response = TypeVar("_Response")


class WorkflowCalls:
    """The workflows of one org."""

    org: str
    calls: Calls

    async def start(self, workflow: Workflow) -> Started:
        """Stores a workflow with all its jobs: at most 10,000 jobs, with at most 16 MiB in total. The call may be
        repeated: the workflow is stored once. Raises InvalidJob. Raises InvalidRequest, for example for a cycle. Raises
        AlreadyExists if another workflow has its id."""
        request = workflow.request(self.org)
        response = await self._ask_workflows(lambda stub: stub.StartWorkflow, request)
        ids = dict(zip((node.name for node in workflow.nodes), response.job_ids, strict=True))
        return Started(id=workflow.id, duplicate=response.duplicate, job_ids=ids)

    async def add_nodes(self, job: Job, nodes: Nodes) -> Added:
        """Adds nodes to the workflow of a leased job: the workflow's callbacks then wait for these nodes too. Stores
        all of them, or none. If this job has already added a node of the same name, in this attempt or an earlier one,
        that node stays as it is. So a handler should give each node the same name in each attempt, or add the nodes in
        the same order. One call takes at most 1,000 nodes, with at most 10,000 edges; a handler may make several calls.

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
        """Adds nodes to the workflow of a leased job like add_nodes, and lets the job wait for them. If all nodes in
        `nodes` have ended, or if `nodes` is empty, returns the nodes with their results, in the order of `nodes`.
        Otherwise raises Waiting, which the handler must not catch. This attempt then ends and is not counted, and the
        handler runs again from its beginning when the nodes have ended. `on_failed` says what happens to the job if one
        of the nodes fails.

        The nodes may wait for each other, and for nodes that have ended. They must not wait for any other node, because
        that node might wait for the job: wait_for then raises InvalidRequest. Also raises what add_nodes raises."""
        request = self._addition(job, nodes)
        request.wait = True
        request.on_failed = policy_number(on_failed)
        if not request.nodes:
            return []
        # Wait for the job's reports first: this call may end the lease, and the router refuses a report about an ended
        # lease.
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
        # Nodes without names get the same names in each attempt if the handler makes its calls in the same order.
        messages = nodes.messages(f"{of.node}.{of.added.index(nodes) + 1}.")
        org = job.org or self.org
        return workflows_pb2.AddNodesRequest(org=org, id=of.workflow_id, lease=job.lease, nodes=messages)

    async def get_workflow(self, workflow_id: str) -> tuple[WorkflowRecord, dict[NodeState, int]]:
        """Returns a workflow, and how many of its nodes are in each state. Raises NotFound."""
        request = workflows_pb2.GetWorkflowRequest(org=self.org, id=checked_text("workflow_id", workflow_id))
        response = await self._ask_workflows(lambda stub: stub.GetWorkflow, request)
        known = [state for state in NodeState if state is not NodeState.UNKNOWN]
        counts: dict[NodeState, int] = {state: getattr(response.counts, state.value) for state in known}
        return read_workflow(response.workflow), counts

    async def list_nodes(self, workflow_id: str) -> list[NodeRecord]:
        """Returns all nodes of a workflow. Each node comes after the nodes that it waits for. The only exception: nodes
        that a node's own job has added come after that node. Raises NotFound."""
        nodes: list[NodeRecord] = []
        token = ""
        while True:
            request = workflows_pb2.ListNodesRequest(
                org=self.org, id=checked_text("workflow_id", workflow_id), page_size=_PAGE_MAX, page_token=token
            )
            response = await self._ask_workflows(lambda stub: stub.ListNodes, request)
            nodes += map(read_node, response.nodes)
            token = response.next_page_token
            if not token:
                return nodes

    async def list_workflows(self, *, state: WorkflowState | None = None, limit: int = 1000) -> list[WorkflowRecord]:
        """Returns the newest workflows of the org, at most `limit`. `state`: only workflows in this state."""
        number = workflows_pb2.WORKFLOW_STATE_UNSPECIFIED
        if state is not None:
            number = state_number(state)
        found: list[WorkflowRecord] = []
        token = ""
        while len(found) < limit:
            request = workflows_pb2.ListWorkflowsRequest(
                org=self.org, state=number, page_size=min(limit - len(found), _PAGE_MAX), page_token=token
            )
            response = await self._ask_workflows(lambda stub: stub.ListWorkflows, request)
            found += map(read_workflow, response.workflows)
            token = response.next_page_token
            if not token:
                break
        return found

    async def cancel_workflow(self, workflow_id: str, *, reason: str = "") -> WorkflowRecord:
        """Cancels all jobs of a workflow that have not ended. Running handlers lose their leases, as with cancel_jobs.
        Raises NotFound."""
        request = workflows_pb2.CancelWorkflowRequest(
            org=self.org, id=checked_text("workflow_id", workflow_id), reason=checked_text("reason", reason)
        )
        return read_workflow((await self._ask_workflows(lambda stub: stub.CancelWorkflow, request)).workflow)

    async def pause_workflow(self, workflow_id: str) -> WorkflowRecord:
        """Pauses a workflow: no more of its jobs are released until resume_workflow is called. Raises NotFound."""
        request = workflows_pb2.PauseWorkflowRequest(org=self.org, id=checked_text("workflow_id", workflow_id))
        return read_workflow((await self._ask_workflows(lambda stub: stub.PauseWorkflow, request)).workflow)

    async def resume_workflow(self, workflow_id: str) -> WorkflowRecord:
        """Ends the pause of a workflow. Raises NotFound."""
        request = workflows_pb2.ResumeWorkflowRequest(org=self.org, id=checked_text("workflow_id", workflow_id))
        return read_workflow((await self._ask_workflows(lambda stub: stub.ResumeWorkflow, request)).workflow)

    async def skip_node(self, workflow_id: str, node: str) -> WorkflowRecord:
        """Ends a node as if it had succeeded, and cancels its job. Does nothing if the node was skipped before. Raises
        NotFound. Raises FailedPrecondition if the node has ended in any other way."""
        request = workflows_pb2.SkipNodeRequest(
            org=self.org, id=checked_text("workflow_id", workflow_id), node=checked_text("node", node)
        )
        return read_workflow((await self._ask_workflows(lambda stub: stub.SkipNode, request)).workflow)

    async def signal(self, workflow_id: str, node: str, payload: Payload = b"") -> bool:
        """Gives a signal to a node that waits for one (Nodes.signal). The payload, at most 64 KiB, becomes the node's
        result. The node ends when it has the signal and the nodes that it waits for have ended. Only the first signal
        counts. Returns False if the node has a signal already, perhaps from an earlier try of this call whose answer
        was lost.

        Raises NotFound. Raises FailedPrecondition if the node waits for no signal, or has ended without one: no signal
        came in time, or the node was cancelled or skipped."""
        try:
            content = encode(payload)
        except (TypeError, ValueError) as error:
            raise invalid_argument("payload", str(error)) from error
        request = workflows_pb2.SignalNodeRequest(
            org=self.org, id=checked_text("workflow_id", workflow_id), node=checked_text("node", node), payload=content
        )
        return (await self._ask_workflows(lambda stub: stub.SignalNode, request)).accepted

    async def retry_workflow(self, workflow_id: str, *, new_id: str = "") -> WorkflowRecord:
        """Starts a failed or cancelled workflow once more, as a new workflow. The new workflow takes over the nodes
        that have succeeded or were skipped, and runs the other nodes again. Returns the new workflow.

        `new_id`: a UUIDv7, the id of the new workflow. With the same `new_id`, the call may be repeated. Default: a new
        UUIDv7. Raises NotFound. Raises FailedPrecondition if the workflow runs, has succeeded or was retried already,
        if a job that is to run again is live or was deleted, or if the jobs that are to run again have more than 16 MiB
        together."""
        request = workflows_pb2.RetryWorkflowRequest(
            org=self.org, id=checked_text("workflow_id", workflow_id), new_id=checked_text("new_id", new_id) or uuid7()
        )
        return read_workflow((await self._ask_workflows(lambda stub: stub.RetryWorkflow, request)).workflow)

    async def parents(self, job: Job | JobRecord | WorkflowNode) -> list[Parent]:
        """Returns the nodes that the node of this job waited for, with the results of their jobs. Returns an empty list
        if the job is in no workflow, or if its node is a callback."""
        of = job if isinstance(job, WorkflowNode) else job.workflow
        org = (job.org if isinstance(job, Job) else "") or self.org
        return [] if of is None else [parent async for parent in self._parents(org, of)]

    async def _parents(self, org: str, of: WorkflowNode) -> AsyncIterator[Parent]:
        token = ""
        while True:
            request = workflows_pb2.ListParentsRequest(org=org, id=of.workflow_id, node=of.node, page_token=token)
            response = await self._ask_workflows(lambda stub: stub.ListParents, request)
            for message in response.parents:
                yield read_parent(message)
            token = response.next_page_token
            if not token:
                return

    async def _ask_workflows(
        self, method: Callable[[Stub], Method[_Request, _Response]], request: _Request
    ) -> _Response:
        return await self.calls.call(method, request, final=ADMIN_FINAL)
