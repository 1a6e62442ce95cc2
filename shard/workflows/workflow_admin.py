"""Starts, reads, cancels and pauses workflows, and skips their nodes."""

from __future__ import annotations

from functools import partial

import psycopg

from shard.errors import (
    IdsOutsideHorizon,
    NodeEnded,
    NotRetryable,
    NotSignalled,
    ShardUnavailable,
    UnknownNode,
    UnknownWorkflow,
    WorkflowExists,
)
from shard.job_id import bounds_ms, made_at_ms
from shard.postgres.pool import Database
from shard.queue.store import Store
from shard.vocabulary import JobId, Micros, OrgId
from shard.workflow import (
    Fault,
    NewWorkflow,
    NodeName,
    NodeRecord,
    NodeState,
    ParentRecord,
    SignalNode,
    WorkflowId,
    WorkflowRecord,
    WorkflowState,
    node_state,
)
from shard.workflows import statements
from shard.workflows.calls import LockedWorkflow, WorkflowCalls
from shard.workflows.page_tokens import pack, unpack_id, unpack_number
from shard.workflows.store_parameters import store_parameters
from shard.workflows.sweep import WorkflowSweep

_TRIES_MAX = 6
_FAULTS_MAX = 100
# The `Job.reason` of the job of a skipped node.
SKIPPED = "its node was skipped"
# Why a node whose job was cancelled takes no signal.
UNSIGNALLED = "no signal came in time, or it was cancelled"
_LAST_ID = WorkflowId("ffffffff-ffff-7fff-bfff-ffffffffffff")
# Upper bound for the edges of all nodes of one page.
_PAGE_EDGES_MAX = 20_000


class WorkflowAdmin:
    """The workflows of one shard. All methods may raise ShardUnavailable and TooManyWaiting. Methods that change
    something may also raise NotOwned and ClockSetBack. `epoch`: the epoch of the placement by which new jobs of the org
    are written to this shard."""

    def __init__(self, database: Database, store: Store, calls: WorkflowCalls, sweep: WorkflowSweep) -> None:
        self._database = database
        self._store = store
        self._sweep = sweep
        self._calls = calls

    # ── Start ────────────────────────────────────────────────────────────────────────────────────────────────────────

    async def start(self, workflow: NewWorkflow, *, epoch: int) -> bool:
        """Stores a workflow. Returns whether the workflow was stored before. Raises WorkflowExists, NotRetryable,
        IdsOutsideHorizon, TooManyQueues."""
        return await self._calls.in_turn(workflow.jobs.org, partial(self._start, workflow, epoch))

    async def _start(self, workflow: NewWorkflow, epoch: int) -> bool:
        self._store.clock.check()
        org = workflow.jobs.org
        if await self._is_known(org, workflow.id, workflow.digest):
            return True
        await self._calls.refuse_unowned(org, epoch)
        queues = sorted(set(workflow.jobs.queues))
        for _ in range(_TRIES_MAX):
            ids = await self._calls.queue_ids(org, queues, check=partial(self._check_id, workflow.id))
            try:
                rows = await self._database.run(statements.STORE_WORKFLOW, store_parameters(workflow, ids, epoch=epoch))
            except psycopg.errors.UniqueViolation as error:
                if error.diag.constraint_name == "workflow_retry":
                    await self._refuse_second_retry(workflow)
                # Another call stores the same workflow now, or another job already has the id of one of its jobs.
                if await self._is_known(org, workflow.id, workflow.digest):
                    return True
                raise WorkflowExists(org, workflow.id) from error
            ((now, id_fits, admitted, was_stored),) = rows
            if was_stored:
                self._store.jobs_stored(set(ids.values()))
                return False
            if not id_fits:
                raise IdsOutsideHorizon([0], now=Micros(now))
            if admitted == len(queues):
                if not await self._is_known(org, workflow.id, workflow.digest):
                    raise ShardUnavailable(self._database.name, f"org {org!r} was moved or erased meanwhile")
                return True
            await self._calls.refuse_unowned(org, epoch)
            self._store.names.forget()
        raise ShardUnavailable(self._database.name, "the ids of its queues keep changing")

    async def _check_id(self, workflow: WorkflowId, now: Micros) -> None:
        """Refuses an id that STORE_WORKFLOW would refuse. This check comes before queues are created, so that a refused
        call creates no queues. Raises IdsOutsideHorizon."""
        oldest_ms, newest_ms = bounds_ms(now)
        if not oldest_ms <= made_at_ms(workflow) <= newest_ms:
            raise IdsOutsideHorizon([0], now=now)

    async def _refuse_second_retry(self, workflow: NewWorkflow) -> None:
        """Raises NotRetryable if a different workflow already retries the old workflow."""
        assert workflow.retry_of is not None
        found = await self._database.run(statements.FIND_RETRY, {"org": workflow.jobs.org, "id": workflow.retry_of})
        if found and found[0][0] != workflow.id:
            raise NotRetryable(workflow.retry_of, f"workflow {found[0][0]} retries it")

    async def is_known(self, org: OrgId, workflow: WorkflowId, digest: bytes) -> bool:
        """Returns whether the workflow with this digest is stored. Raises WorkflowExists if the org has another
        workflow with this id."""
        return await self._calls.in_turn(org, partial(self._is_known, org, workflow, digest))

    async def _is_known(self, org: OrgId, workflow: WorkflowId, digest: bytes) -> bool:
        rows = await self._database.run(statements.FIND_DIGEST, {"org": org, "id": workflow})
        if rows and bytes(rows[0][0]) != digest:
            raise WorkflowExists(org, workflow)
        return bool(rows)

    # ── Look ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    async def get(self, org: OrgId, workflow: WorkflowId) -> WorkflowRecord:
        """Returns a workflow. Raises UnknownWorkflow."""
        rows = await self._calls.read(org, statements.GET_WORKFLOW, {"org": org, "id": workflow})
        if not rows:
            raise UnknownWorkflow(org, workflow)
        return WorkflowRecord._make(rows[0])

    async def count(self, org: OrgId, workflow: WorkflowId) -> dict[NodeState, int]:
        """Counts the nodes of a workflow by state, without callbacks. Returns an empty dict if the workflow is not
        known."""
        counts: dict[NodeState, int] = {}
        for stored, nodes in await self._calls.read(org, statements.COUNT_NODES, {"org": org, "id": workflow}):
            state = node_state(stored)
            counts[state] = counts.get(state, 0) + nodes
        return counts

    async def list_workflows(
        self, org: OrgId, *, state: WorkflowState | None, page_size: int, page_token: str
    ) -> tuple[list[WorkflowRecord], str]:
        """Returns a page of workflows, the newest first, and the token of the next page (empty on the last page).
        Raises BadPageToken."""
        parameters = {
            "org": org,
            "before": unpack_id(page_token) if page_token else _LAST_ID,
            "state": "" if state is None else state.value,
            "rows": page_size + 1,
        }
        found = list(map(WorkflowRecord._make, await self._calls.read(org, statements.LIST_WORKFLOWS, parameters)))
        page = found[:page_size]
        return page, pack(page[-1].id) if len(found) > page_size else ""

    async def nodes(
        self, org: OrgId, workflow: WorkflowId, *, page_size: int, page_token: str
    ) -> tuple[list[NodeRecord], str]:
        """Returns a page of nodes by number, and the token of the next page. Raises UnknownWorkflow, BadPageToken."""
        first = unpack_number(page_token) if page_token else 0
        parameters = {"org": org, "id": workflow, "from_node": first, "rows": page_size + 1}
        rows = await self._calls.read(org, statements.LIST_NODES, parameters)
        if not rows:
            await self.get(org, workflow)
        page: list[NodeRecord] = []
        edges = 0
        for row in rows:
            node = NodeRecord._make(row)
            edges += len(node.after or ())
            if page and (len(page) == page_size or edges > _PAGE_EDGES_MAX):
                return page, pack(str(node.number))
            page.append(node)
        return page, ""

    async def parents(
        self, org: OrgId, workflow: WorkflowId, node: int, *, from_node: int, rows: int
    ) -> list[ParentRecord]:
        """Returns the parents of a node, ordered by number, from the number `from_node` on."""
        parameters = {"org": org, "id": workflow, "node": node, "from_node": from_node, "rows": rows}
        return list(map(ParentRecord._make, await self._calls.read(org, statements.LIST_PARENTS, parameters)))

    async def find_signal(self, org: OrgId, workflow: WorkflowId, node: NodeName) -> SignalNode:
        """Returns a node that has got its signal, or may still get it. Raises UnknownWorkflow, UnknownNode,
        NotSignalled."""
        rows = await self._calls.read(org, statements.FIND_SIGNAL, {"org": org, "id": workflow, "name": node})
        if not rows:
            raise UnknownWorkflow(org, workflow)
        ((number, job, state, is_signal, flow_state, is_cancelled),) = rows
        if number is None:
            raise UnknownNode(org, workflow, node)
        if not is_signal:
            raise NotSignalled(workflow, node, "it is no node that waits for a signal")
        if state == "skipped":
            raise NotSignalled(workflow, node, "it was skipped")
        if state != "succeeded" and (is_cancelled or WorkflowState(flow_state) is WorkflowState.CANCELLED):
            raise NotSignalled(workflow, node, "the workflow was cancelled")
        if state == "doomed":
            raise NotSignalled(workflow, node, "a node that it waits for has failed")
        if state in ("failed", "cancelled"):
            raise NotSignalled(workflow, node, UNSIGNALLED)
        return SignalNode(number, JobId(job), has_succeeded=state == "succeeded")

    async def check(self) -> list[Fault]:
        """Returns the faults of the workflows of this shard, at most 100. Reads all stored workflows of orgs that do
        not move."""
        return list(map(Fault._make, await self._database.run(statements.CHECK_WORKFLOWS, {"rows": _FAULTS_MAX})))

    # ── Change ───────────────────────────────────────────────────────────────────────────────────────────────────────

    async def set_paused(self, org: OrgId, workflow: WorkflowId, *, paused: bool, epoch: int) -> None:
        """Pauses a workflow, or ends its pause. Does not pause a workflow that has ended. Raises UnknownWorkflow."""

        async def act(locked: LockedWorkflow) -> None:
            await locked.connection.run(statements.SET_PAUSED, {"flow": locked.flow, "paused": paused})

        await self._calls.change(org, workflow, act, epoch=epoch)

    async def doom(self, org: OrgId, workflow: WorkflowId, *, reason: str, epoch: int) -> list[JobId]:
        """Cancels the blocked jobs of a workflow. Returns the other jobs of the workflow that have not ended. The
        caller must cancel these jobs, because they may be on another shard. Raises UnknownWorkflow."""
        org_id = await self.begin_cancel(org, workflow, reason=reason, epoch=epoch)
        await self._calls.in_turn(org, partial(self._sweep.finish, org_id, workflow))
        rows = await self._calls.read(org, statements.FIND_RELEASED, {"org": org, "id": workflow})
        return [JobId(job) for (job,) in rows]

    async def begin_cancel(self, org: OrgId, workflow: WorkflowId, *, reason: str, epoch: int) -> int:
        """Cancels a workflow, and a portion of its blocked jobs. Sweeps cancel the other blocked jobs. Returns the
        number of the org. Raises UnknownWorkflow."""

        async def act(locked: LockedWorkflow) -> int:
            await locked.connection.run(statements.CANCEL_WORKFLOW, {"flow": locked.flow, "reason": reason or None})
            return locked.org_id

        return await self._calls.change(org, workflow, act, epoch=epoch)

    async def skip(self, org: OrgId, workflow: WorkflowId, node: NodeName, *, epoch: int) -> JobId:
        """Ends a node as if it had succeeded. Does nothing if the node was skipped before. Cancels the job of the node
        if the job is blocked. Returns the job. If the job was released, the caller must cancel it. Raises
        UnknownWorkflow, UnknownNode, NodeEnded. Also raises ShardUnavailable if another session has locked the blocked
        job, or if the job is on its way from another shard."""

        async def act(locked: LockedWorkflow) -> JobId:
            rows = await locked.connection.run(statements.FIND_NODE, {"flow": locked.flow, "name": node})
            if not rows:
                raise UnknownNode(org, workflow, node)
            ((number, job, state),) = rows
            if state in ("succeeded", "failed", "cancelled"):
                raise NodeEnded(workflow, node)
            if state == "skipped":
                return JobId(job)
            parameters = {"org_id": locked.org_id, "id": workflow, "node": number}
            await locked.connection.run(statements.APPEND_SKIP, parameters)
            if state != "released":
                # Cancel the job in this transaction, because nothing else would find the job later. The skip was
                # appended before that, because only the first end of a node counts.
                parameters = {"org_id": locked.org_id, "job_id": job, "reason": SKIPPED}
                ((cancelled,),) = await locked.connection.run(statements.CANCEL_BLOCKED_JOB, parameters)
                if not cancelled:
                    raise ShardUnavailable(
                        self._database.name, f"job {job} is locked, or on its way from another shard; try again"
                    )
            return JobId(job)

        return await self._calls.change(org, workflow, act, epoch=epoch)
