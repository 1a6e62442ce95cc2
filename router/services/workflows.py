"""Calls about the workflows of one org (proto/windrow/v1/workflows.proto)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from router.calculator import Calculator
from router.codec import convert
from router.codec import workflows as codec
from router.codec.status import InvalidRequest, Violation
from router.fleet.fleet import Fleet
from router.fleet.shard_handle import ShardHandle
from router.gate.admission import MESSAGE_BYTES_MAX
from router.gate.calls import ANSWER_HELD_BYTES, LISTED_ID_BYTES, SMALL_ANSWER_BYTES, for_each, unary
from router.gate.tracing import current_trace
from router.route import by_id
from router.route.retry_workflow import retry_of
from shard.errors import BadIds, LimitReached, NotSignalled, UnknownJob
from shard.job_record import ANSWER_BYTES_MAX, JobRecord
from shard.placement.slots import Placement
from shard.queue.settle import Settlement, Snooze
from shard.vocabulary import Answer, JobId, Lease, OrgId
from shard.workflow import AddedNodes, NewNodes, NewWorkflow, NodeName, NodeOf, WorkflowId
from shard.workflows.additions import WAITS
from shard.workflows.page_tokens import parents_from, parents_token
from shard.workflows.workflow_admin import SKIPPED, UNSIGNALLED
from windrow.v1 import workflows_pb2

_PAGE_DEFAULT = 100
_NODES_DEFAULT = 1000
_PARENTS_DEFAULT = 100
# The most jobs that are cancelled at once.
_JOBS_AT_ONCE = 1000
# The memory of a retry: the content of the jobs that run again, and a page of these jobs while they are looked up.
_RETRY_BYTES = MESSAGE_BYTES_MAX + ANSWER_HELD_BYTES
# A calculator checks and converts requests with more nodes or more edges than this. 10,000 nodes, or 100,000 edges,
# take half a second.
_NODES_HERE_MAX, _EDGES_HERE_MAX = 200, 1000
# The most fields of a new workflow: 100,000 edges have 300,000, and 10,000 nodes may have 20 each.
_FIELDS_MAX = 500_000
# How much memory is reserved for a request that waits for the calculator, in addition to its bytes. Decoded, each field
# may take 86 bytes. A reserved byte stands for four bytes of memory (docs/internals.md).
_WAITING_BYTES = _FIELDS_MAX * 86 // 4

# A job that must wait for nodes, but is on a shard that its org leaves, is snoozed for this long.
_AWAY_US = 1_000_000

_Nodes = workflows_pb2.StartWorkflowRequest | workflows_pb2.AddNodesRequest
_Decoded = TypeVar("_Decoded")


def _is_large(request: _Nodes) -> bool:
    return len(request.nodes) > _NODES_HERE_MAX or codec.count_edges(request) > _EDGES_HERE_MAX


def _nodes_bytes(of: type[_Nodes]) -> Callable[[_Nodes], int]:
    """Returns a function that computes how much memory a call needs: for the answer, which has the ids of the nodes,
    and for the request, if the request may have to wait for the calculator."""
    answer_bytes = for_each(of, "nodes", LISTED_ID_BYTES)
    return lambda request: answer_bytes(request) + (_WAITING_BYTES if _is_large(request) else 0)


class WorkflowsService:
    service_name = "windrow.v1.Workflows"

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._calculator = Calculator("large workflows")

    async def _decoded(self, decode: Callable[..., _Decoded], request: _Nodes) -> _Decoded:
        decoded = partial(decode, request, trace=current_trace())
        if _is_large(request):
            return await self._calculator.run(OrgId(request.org), decoded)
        return decoded()

    # The decorator checks only the size. `new_workflow` makes the other checks; for a large request it runs in a
    # calculator.
    @unary(codec.check_size, answer_bytes=_nodes_bytes(workflows_pb2.StartWorkflowRequest), fields_max=_FIELDS_MAX)
    async def StartWorkflow(self, request: workflows_pb2.StartWorkflowRequest) -> workflows_pb2.StartWorkflowResponse:
        workflow, numbers = await self._decoded(codec.new_workflow, request)
        duplicate = await self._store(workflow, field="id")
        ids = workflow.jobs.ids
        return workflows_pb2.StartWorkflowResponse(duplicate=duplicate, job_ids=[ids[number] for number in numbers])

    async def _store(self, workflow: NewWorkflow, *, field: str) -> bool:
        """Stores a workflow. Returns whether it was stored before. `field`: the name of the request's field that has
        the workflow's id."""

        async def start(member: ShardHandle, placement: Placement) -> bool:
            return await self._start(member.require_open(), placement, workflow)

        try:
            return await self._fleet.write(workflow.jobs.org, start)
        except BadIds as error:
            raise InvalidRequest([Violation(field, error.about(workflow.id))]) from error

    async def _start(self, member: ShardHandle, placement: Placement, workflow: NewWorkflow) -> bool:
        try:
            charge = await self._fleet.limits.charge(member.store, workflow.jobs, independent=False)
        except LimitReached:
            # A repeated call costs nothing, so it must not be refused.
            if await member.workflows.is_known(workflow.jobs.org, workflow.id, workflow.digest):
                return True
            raise
        with charge:
            duplicate = await member.workflows.start(workflow, epoch=placement.epoch)
            if duplicate:
                charge.refund()
            return duplicate

    @unary(codec.check_size, answer_bytes=_nodes_bytes(workflows_pb2.AddNodesRequest))
    async def AddNodes(self, request: workflows_pb2.AddNodesRequest) -> workflows_pb2.AddNodesResponse:
        nodes, places = await self._decoded(codec.new_nodes, request)
        ((tag, lease),) = convert.leases([request.lease], field="lease")

        async def add(member: ShardHandle, placement: Placement) -> AddedNodes:
            return await self._add(member.require_open(), placement, nodes, tag, lease)

        added = await self._fleet.write(nodes.jobs.org, add)
        return workflows_pb2.AddNodesResponse(
            job_ids=[added.jobs[place] for place in places], added=added.stored, waits=added.waits
        )

    async def _add(
        self, member: ShardHandle, placement: Placement, nodes: NewNodes, tag: int, lease: Lease
    ) -> AddedNodes:
        adder: Lease | int = lease
        holder = self._fleet.by_tag(tag)
        if holder is not None and holder is not member:
            # The org has moved since the job was leased, and leased jobs stay where they are.
            adder = await holder.require_up().node_adder.node_of(nodes.jobs.org, nodes.workflow, lease)
        # Nodes that were added before cost nothing.
        new = nodes.jobs.only(await member.node_adder.unknown(nodes))
        charge = await self._fleet.limits.charge(member.store, new, independent=False)
        with charge:
            added = await member.node_adder.add(nodes, adder=adder, epoch=placement.epoch)
            if not added.stored:
                charge.refund()
        if added.waits:
            # The job has no lease while it waits.
            self._fleet.pools.ended([lease])
        if added.waits and holder is not None and holder is not member:
            # The job cannot wait for nodes on a shard that its org leaves. It runs again on the org's new shard, and
            # waits there.
            snooze = Snooze(lease, _AWAY_US, WAITS)
            await holder.require_up().store.settle(Settlement.snooze(nodes.jobs.org, [snooze]))
        return added

    @unary(answer_bytes=SMALL_ANSWER_BYTES)
    async def GetWorkflow(self, request: workflows_pb2.GetWorkflowRequest) -> workflows_pb2.GetWorkflowResponse:
        info, counts = await self._counted(OrgId(request.org), WorkflowId(request.id))
        return workflows_pb2.GetWorkflowResponse(workflow=info, counts=counts)

    @unary(answer_bytes=ANSWER_HELD_BYTES)
    async def ListNodes(self, request: workflows_pb2.ListNodesRequest) -> workflows_pb2.ListNodesResponse:
        org, workflow, rows = OrgId(request.org), WorkflowId(request.id), request.page_size or _NODES_DEFAULT
        nodes, token = await self._fleet.read(
            org,
            lambda member: member.workflows.nodes(org, workflow, page_size=rows, page_token=request.page_token),
        )
        return workflows_pb2.ListNodesResponse(nodes=map(codec.node, nodes), next_page_token=token)

    @unary(answer_bytes=ANSWER_HELD_BYTES)
    async def ListWorkflows(self, request: workflows_pb2.ListWorkflowsRequest) -> workflows_pb2.ListWorkflowsResponse:
        org = OrgId(request.org)

        async def list_workflows(member: ShardHandle) -> workflows_pb2.ListWorkflowsResponse:
            found, token = await member.workflows.list_workflows(
                org,
                state=codec.wanted_state(request.state),
                page_size=request.page_size or _PAGE_DEFAULT,
                page_token=request.page_token,
            )
            return workflows_pb2.ListWorkflowsResponse(
                workflows=[codec.info(record, member.name) for record in found], next_page_token=token
            )

        return await self._fleet.read(org, list_workflows)

    @unary(answer_bytes=SMALL_ANSWER_BYTES)
    async def CancelWorkflow(
        self, request: workflows_pb2.CancelWorkflowRequest
    ) -> workflows_pb2.CancelWorkflowResponse:
        org, workflow = OrgId(request.org), WorkflowId(request.id)
        reason = request.reason or "cancelled"

        async def doom(member: ShardHandle, placement: Placement) -> list[JobId]:
            admin = member.require_writable().workflows
            return await admin.doom(org, workflow, reason=reason, epoch=placement.epoch)

        await self._cancel(org, await self._fleet.write(org, doom), reason)
        return workflows_pb2.CancelWorkflowResponse(workflow=await self._info(org, workflow))

    @unary(answer_bytes=SMALL_ANSWER_BYTES)
    async def PauseWorkflow(self, request: workflows_pb2.PauseWorkflowRequest) -> workflows_pb2.PauseWorkflowResponse:
        info = await self._set_paused(request.org, request.id, paused=True)
        return workflows_pb2.PauseWorkflowResponse(workflow=info)

    @unary(answer_bytes=SMALL_ANSWER_BYTES)
    async def ResumeWorkflow(
        self, request: workflows_pb2.ResumeWorkflowRequest
    ) -> workflows_pb2.ResumeWorkflowResponse:
        info = await self._set_paused(request.org, request.id, paused=False)
        return workflows_pb2.ResumeWorkflowResponse(workflow=info)

    @unary(answer_bytes=SMALL_ANSWER_BYTES)
    async def SkipNode(self, request: workflows_pb2.SkipNodeRequest) -> workflows_pb2.SkipNodeResponse:
        org, workflow = OrgId(request.org), WorkflowId(request.id)

        async def skip(member: ShardHandle, placement: Placement) -> JobId:
            admin = member.require_writable().workflows
            return await admin.skip(org, workflow, NodeName(request.node), epoch=placement.epoch)

        job = await self._fleet.write(org, skip)
        await self._cancel(org, [job], SKIPPED)
        return workflows_pb2.SkipNodeResponse(workflow=await self._info(org, workflow))

    @unary(answer_bytes=SMALL_ANSWER_BYTES)
    async def SignalNode(self, request: workflows_pb2.SignalNodeRequest) -> workflows_pb2.SignalNodeResponse:
        org, workflow, name = OrgId(request.org), WorkflowId(request.id), NodeName(request.node)
        node = await self._fleet.read(org, lambda member: member.workflows.find_signal(org, workflow, name))
        of, is_first = NodeOf(workflow, node.number), False

        async def signal(member: ShardHandle, _: Sequence[int]) -> list[Answer]:
            nonlocal is_first
            signalled = await member.store.signal(org, node.job_id, of, request.payload)
            is_first = is_first or signalled.is_first
            return [signalled.answer]

        # While the org moves, the job may still be on the shard that the workflow has left.
        (answer,) = await by_id.decide(self._fleet, org, [node.job_id], signal)
        if answer is Answer.NOT_FOUND and not node.has_succeeded:
            raise UnknownJob(org, node.job_id)
        if answer in (Answer.CANCELLED, Answer.STALE):
            raise NotSignalled(workflow, name, UNSIGNALLED)
        return workflows_pb2.SignalNodeResponse(accepted=is_first)

    @unary(answer_bytes=_RETRY_BYTES)
    async def RetryWorkflow(self, request: workflows_pb2.RetryWorkflowRequest) -> workflows_pb2.RetryWorkflowResponse:
        org, old, new = OrgId(request.org), WorkflowId(request.id), WorkflowId(request.new_id)
        trace = current_trace()
        retry = await self._fleet.read(
            org,
            lambda member: retry_of(
                self._fleet,
                member.workflows,
                org,
                old,
                new,
                trace=trace,
                calculator=self._calculator,
                bytes_max=MESSAGE_BYTES_MAX,
            ),
        )
        duplicate = retry.workflow is None or await self._store(retry.workflow, field="new_id")
        await self._cancel(org, retry.dead, f"retried by workflow {new}")
        info, counts = await self._counted(org, new)
        return workflows_pb2.RetryWorkflowResponse(workflow=info, counts=counts, duplicate=duplicate)

    @unary(answer_bytes=ANSWER_HELD_BYTES)
    async def ListParents(self, request: workflows_pb2.ListParentsRequest) -> workflows_pb2.ListParentsResponse:
        org, workflow = OrgId(request.org), WorkflowId(request.id)
        rows, from_node = request.page_size or _PARENTS_DEFAULT, parents_from(request.page_token)
        parents = await self._fleet.read(
            org,
            lambda member: member.workflows.parents(org, workflow, request.node, from_node=from_node, rows=rows + 1),
        )
        jobs = await self._jobs(org, [parent.job_id for parent in parents[:rows]])
        # The page ends before the first job whose result did not fit.
        whole = next((at for at, one in enumerate(parents[:rows]) if not _is_whole(jobs, one.job_id)), rows)
        return workflows_pb2.ListParentsResponse(
            parents=[codec.parent(parent, jobs) for parent in parents[:whole]],
            next_page_token=parents_token(parents[whole:]),
        )

    async def _jobs(self, org: OrgId, ids: Sequence[JobId]) -> dict[JobId, JobRecord]:
        """Returns the jobs that were found. Raises ShardUnavailable, for example if a shard that may have a missing job
        does not answer."""

        async def ask(member: ShardHandle, positions: Sequence[int]) -> dict[int, JobRecord]:
            wanted = [ids[at] for at in positions]
            records = await member.store.get(org, wanted, include_payload=True, bytes_max=ANSWER_BYTES_MAX)
            return {ids.index(record.id): record for record in records}

        if not ids:
            return {}
        found = await by_id.find(self._fleet, org, ids, ask)
        found.require(len(ids))
        return {record.id: record for record in found.answers.values()}

    async def _cancel(self, org: OrgId, ids: Sequence[JobId], reason: str) -> None:
        for at in range(0, len(ids), _JOBS_AT_ONCE):
            await self._cancel_part(org, ids[at : at + _JOBS_AT_ONCE], reason)

    async def _cancel_part(self, org: OrgId, ids: Sequence[JobId], reason: str) -> None:
        async def cancel(member: ShardHandle, positions: Sequence[int]) -> list[Answer]:
            return await member.store.cancel(org, [ids[at] for at in positions], reason=reason)

        await by_id.decide(self._fleet, org, ids, cancel)

    async def _set_paused(self, org: str, workflow: str, *, paused: bool) -> workflows_pb2.WorkflowInfo:
        async def act(member: ShardHandle, placement: Placement) -> None:
            admin = member.require_writable().workflows
            await admin.set_paused(OrgId(org), WorkflowId(workflow), paused=paused, epoch=placement.epoch)

        await self._fleet.write(OrgId(org), act)
        return await self._info(OrgId(org), WorkflowId(workflow))

    async def _counted(
        self, org: OrgId, workflow: WorkflowId
    ) -> tuple[workflows_pb2.WorkflowInfo, workflows_pb2.NodeCounts]:
        async def get(member: ShardHandle) -> tuple[workflows_pb2.WorkflowInfo, workflows_pb2.NodeCounts]:
            record = await member.workflows.get(org, workflow)
            counts = await member.workflows.count(org, workflow)
            return codec.info(record, member.name), codec.counts(counts)

        return await self._fleet.read(org, get)

    async def _info(self, org: OrgId, workflow: WorkflowId) -> workflows_pb2.WorkflowInfo:
        async def get(member: ShardHandle) -> workflows_pb2.WorkflowInfo:
            return codec.info(await member.workflows.get(org, workflow), member.name)

        return await self._fleet.read(org, get)


def _is_whole(jobs: dict[JobId, JobRecord], job: JobId) -> bool:
    return job not in jobs or jobs[job].whole
