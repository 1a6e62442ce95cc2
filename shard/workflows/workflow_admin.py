"""Calls about the workflows of one shard: start a workflow, add nodes, look at it, cancel or pause it, and skip a node.

A change locks the workflow first, in a statement of its own, so that the statements after it see all ends that were
taken in before (docs/decisions/0054-ends-of-nodes-are-appended-and-folded.md).
"""

from __future__ import annotations

import base64
import binascii
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import psycopg

from shard.errors import (
    BadPageToken,
    IdsOutsideHorizon,
    LeaseEnded,
    NodeEnded,
    NodeExists,
    NodeMayWaitForJob,
    NotRetryable,
    NotSignalled,
    ShardUnavailable,
    TooManyNodes,
    TooManyQueues,
    UnknownNode,
    UnknownWorkflow,
    WorkflowEnded,
    WorkflowExists,
)
from shard.job_id import from_hex, is_uuid, made_at_ms
from shard.placement import statements as placement_statements
from shard.postgres import arrays, partitions
from shard.postgres.connection import Connection
from shard.postgres.pool import Database
from shard.queue.coalescer import Coalescer, SingleCall, one_by_one
from shard.queue.enqueue import SPARSE_ENCODERS, find_refused
from shard.queue.queue_ids import QUEUES_MAX
from shard.queue.store import ID_AGE_DAYS_MAX, Store
from shard.vocabulary import SPARSE_COLUMNS, Failure, JobId, Lease, Micros, OrgId, QueueId, QueueName
from shard.workflow import (
    EDGES_MAX,
    NODES_MAX,
    AddedNodes,
    Edge,
    Fault,
    NewNodes,
    NewWorkflow,
    NodeName,
    NodeRecord,
    NodeState,
    OnFailed,
    ParentRecord,
    SignalNode,
    WorkflowId,
    WorkflowRecord,
    WorkflowState,
    job_id_of,
    node_state,
)
from shard.workflows import statements
from shard.workflows.sweep import WorkflowSweep

_T = TypeVar("_T")
_DAY_US = 86_400_000_000
_TRIES_MAX = 6
_FAULTS_MAX = 100
# Job.reason of the job of a skipped node.
SKIPPED = "its node was skipped"
# Why a node whose job was cancelled takes no signal.
UNSIGNALLED = "no signal came in time, or it was cancelled"
_LAST_ID = WorkflowId("ffffffff-ffff-7fff-bfff-ffffffffffff")
# Why the history of a job that waits for nodes says that the job was given back.
WAITS = "waits for nodes that it has added"
# Upper bound for the edges of all nodes of one page.
_PAGE_EDGES_MAX = 20_000


class _Locked(NamedTuple):
    """A workflow whose lock this transaction holds."""

    connection: Connection
    flow: int
    org_id: int
    state: WorkflowState


class _Known(NamedTuple):
    """A node that the workflow has, in the order of find_nodes.sql's columns after the name."""

    number: int
    job: JobId
    state: str
    is_callback: bool
    added_by: int | None

    @property
    def has_ended(self) -> bool:
        return self.has_failed or self.state in ("succeeded", "skipped")

    @property
    def has_failed(self) -> bool:
        return self.state in ("failed", "cancelled")


class _Size(NamedTuple):
    """The size and the state of a workflow, in the order of read_size.sql's columns. `edges` may be 0 if nobody needs
    it."""

    nodes: int
    edges: int
    is_cancelled: bool
    is_paused: bool


class _Growth(NamedTuple):
    """The workflow to which nodes are added."""

    flow: int
    is_paused: bool
    # The parent for which each new node waits, by the number of the node. Nodes without parents have no entry.
    waits_on: Mapping[int, int]


class _QueuesChanged(Exception):
    """The ids of queues have changed since they were looked up: nothing was stored."""


class WorkflowAdmin:
    """The workflows of one shard. All methods may raise ShardUnavailable and TooManyWaiting. Methods that change
    something may also raise NotOwned and ClockSetBack. `epoch`: the epoch of the placement by which new jobs of the org
    are written to this shard."""

    def __init__(self, database: Database, store: Store, sweep: WorkflowSweep) -> None:
        self._database = database
        self._store = store
        self._sweep = sweep
        # Serves the orgs in turn (I4). At most three acts run at the same time, and each uses one connection at a time.
        self._calls = Coalescer[SingleCall, Any](
            one_by_one,
            weight=lambda call: call.weight,
            key=lambda call: call.org,
            on_timeout=lambda: ShardUnavailable(database.name, "earlier calls about workflows take long"),
            acts_max=2,
            weight_max=1,
        )

    # ── Start ────────────────────────────────────────────────────────────────────────────────────────────────────────

    async def start(self, workflow: NewWorkflow, *, epoch: int) -> bool:
        """Stores a workflow. Returns whether it was stored before. Raises WorkflowExists, NotRetryable,
        IdsOutsideHorizon, TooManyQueues."""
        return await self._in_turn(workflow.jobs.org, partial(self._start, workflow, epoch))

    async def _start(self, workflow: NewWorkflow, epoch: int) -> bool:
        self._store.clock.check()
        org = workflow.jobs.org
        if await self._is_known(workflow):
            return True
        await self._refuse_unowned(org, epoch)
        queues = sorted(set(workflow.jobs.queues))
        for _ in range(_TRIES_MAX):
            ids = await self._queue_ids(org, queues)
            try:
                rows = await self._database.run(statements.STORE_WORKFLOW, _parameters(workflow, ids, epoch=epoch))
            except psycopg.errors.UniqueViolation as error:
                if error.diag.constraint_name == "workflow_retry":
                    await self._refuse_second_retry(workflow)
                # Another call stores the same workflow now, or somebody has taken the id of one of its jobs.
                if await self._is_known(workflow):
                    return True
                raise WorkflowExists(org, workflow.id) from error
            ((now, id_fits, admitted, was_stored),) = rows
            if was_stored:
                self._store.jobs_stored(set(ids.values()))
                return False
            if not id_fits:
                raise IdsOutsideHorizon([0], now=Micros(now), horizon_days=ID_AGE_DAYS_MAX)
            if admitted == len(queues):
                if not await self._is_known(workflow):
                    raise ShardUnavailable(self._database.name, f"org {org!r} was moved or erased meanwhile")
                return True
            await self._refuse_unowned(org, epoch)
            self._store.names.forget()
        raise ShardUnavailable(self._database.name, "the ids of its queues keep changing")

    async def _queue_ids(self, org: OrgId, queues: Sequence[QueueName]) -> dict[QueueName, QueueId]:
        """Returns the ids of the queues, and makes the queues that do not exist. Raises TooManyQueues."""
        numbers = await self._store.names.make([(org, queue) for queue in queues])
        if len(numbers) < len(queues):
            missing = [queue for queue in queues if (org, queue) not in numbers]
            raise TooManyQueues(self._database.name, org, missing, queues_max=QUEUES_MAX)
        return {queue: numbers[org, queue] for queue in queues}

    async def _refuse_second_retry(self, workflow: NewWorkflow) -> None:
        """Raises NotRetryable if a different workflow already retries the old workflow."""
        assert workflow.retry_of is not None
        found = await self._database.run(statements.FIND_RETRY, {"org": workflow.jobs.org, "id": workflow.retry_of})
        if found and found[0][0] != workflow.id:
            raise NotRetryable(workflow.retry_of, f"workflow {found[0][0]} retries it")

    async def is_known(self, workflow: NewWorkflow) -> bool:
        """Returns whether the workflow is stored. Raises WorkflowExists if the org has another workflow with this
        id."""
        return await self._in_turn(workflow.jobs.org, partial(self._is_known, workflow))

    async def _is_known(self, workflow: NewWorkflow) -> bool:
        parameters = {"org": workflow.jobs.org, "id": workflow.id}
        rows = await self._database.run(statements.FIND_DIGEST, parameters)
        if rows and bytes(rows[0][0]) != workflow.digest:
            raise WorkflowExists(workflow.jobs.org, workflow.id)
        return bool(rows)

    # ── Add ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    async def node_of(self, org: OrgId, workflow: WorkflowId, lease: Lease) -> int:
        """Returns the number of the node whose job has this lease. The job must be on this shard, and the node in this
        workflow. Raises LeaseEnded."""
        parameters = _lease_parameters(org, workflow, lease)
        return _node_of(await self._read(org, statements.FIND_LEASE, parameters), workflow, lease)

    async def unknown(self, nodes: NewNodes) -> list[int]:
        """Returns the positions of those nodes that the workflow does not have."""
        parameters = _names_parameters(nodes.jobs.org, nodes.workflow, nodes.names)
        known = {row[0] for row in await self._read(nodes.jobs.org, statements.FIND_NODES, parameters)}
        return [at for at, name in enumerate(nodes.names) if name not in known]

    async def add(self, nodes: NewNodes, *, adder: Lease | int, epoch: int) -> AddedNodes:
        """Adds nodes to a workflow that runs. Nodes that the same job has added before stay as they are. If the job
        must wait for the nodes, ends its lease, and blocks the job.

        `adder`: the lease of the job that adds the nodes. If that job is on another shard, which has checked its lease,
        `adder` is the number of the job's node. Then the caller must give back a job that must wait: it runs again on
        this shard, and waits. Raises LeaseEnded, UnknownWorkflow, WorkflowEnded, NodeEnded, NodeExists,
        NodeMayWaitForJob, UnknownNode, TooManyNodes, TooManyQueues."""
        org = nodes.jobs.org
        for _ in range(_TRIES_MAX):
            ids = await self._in_turn(org, partial(self._queues_for, nodes, epoch))
            added: list[tuple[AddedNodes, set[QueueId]]] = []

            async def act(
                locked: _Locked,
                ids: Mapping[QueueName, QueueId] = ids,
                added: list[tuple[AddedNodes, set[QueueId]]] = added,
            ) -> None:
                added[:] = [await self._add(locked, nodes, ids, adder, epoch)]

            try:
                await self._change(org, nodes.workflow, act, epoch=epoch)
            except _QueuesChanged:
                self._store.names.forget()
                continue
            ((answer, freed_in),) = added
            if answer.stored:
                freed_in |= set(ids.values())
            if freed_in:
                self._store.jobs_stored(freed_in)
            return answer
        raise ShardUnavailable(self._database.name, "the ids of its queues keep changing")

    async def _queues_for(self, nodes: NewNodes, epoch: int) -> dict[QueueName, QueueId]:
        """Returns the ids of the nodes' queues, and makes the queues that do not exist. Refuses first what cannot be
        stored, because a queue would be a trace of the org on a shard that does not own its slot."""
        org = nodes.jobs.org
        await self._refuse_unowned(org, epoch)
        if not await self._database.run(statements.GET_WORKFLOW, {"org": org, "id": nodes.workflow}):
            # The workflow may have moved away with its org meanwhile.
            await self._refuse_unowned(org, epoch)
            raise UnknownWorkflow(org, nodes.workflow)
        return await self._queue_ids(org, sorted(set(nodes.jobs.queues)))

    async def _add(
        self,
        locked: _Locked,
        nodes: NewNodes,
        ids: Mapping[QueueName, QueueId],
        adder: Lease | int,
        epoch: int,
    ) -> tuple[AddedNodes, set[QueueId]]:
        """Adds nodes under the workflow's lock. So either the last end was taken in before, and the workflow has ended,
        or that end will find these nodes. The end of the job that adds the nodes is taken in under this lock, too. Also
        returns the queue in which a job has given up its place because it waits."""
        connection, workflow, org = locked.connection, nodes.workflow, nodes.jobs.org
        lease = None if isinstance(adder, int) else adder
        has_waited = False
        if not isinstance(adder, int):
            parameters = _lease_parameters(org, workflow, adder)
            rows = await connection.run(statements.FIND_LEASE, parameters)
            if not rows and nodes.wait is not None:
                # The answer of an earlier call, which has ended the lease, may have been lost.
                rows = await connection.run(statements.FIND_WAIT, parameters)
                has_waited = bool(rows)
            adder = _node_of(rows, workflow, adder)
        parents = {parent for after in nodes.after.values() for parent, _ in after}
        parameters = _names_parameters(org, workflow, sorted({*nodes.names, *parents}))
        rows = await connection.run(statements.FIND_NODES, parameters)
        known = {NodeName(row[0]): _Known._make(row[1:]) for row in rows}
        for name in nodes.names:
            if name in known and known[name].added_by != adder:
                raise NodeExists(workflow, name)
        new = [at for at, name in enumerate(nodes.names) if name not in known]
        if has_waited and new:
            assert lease is not None
            raise LeaseEnded(from_hex(lease.job_hex), workflow)
        if has_waited or (not new and nodes.wait is None):
            return AddedNodes([known[name].job for name in nodes.names], 0, has_waited), set()
        stored = [known[name] for name in nodes.names if name in known]
        is_doomed = nodes.wait is OnFailed.CANCEL and any(node.has_failed for node in stored)
        goes_on = not new and not is_doomed and all(node.has_ended for node in stored)
        # A job that was redriven may go on after the end of its workflow, because it changes nothing there.
        size = await self._size(locked, nodes, new, must_run=not goes_on)
        if nodes.wait is not None:
            await self._refuse_cycles(locked, nodes, new, known)
        if new:
            await self._store_nodes(locked, nodes, new, known, ids, adder, size, epoch)
        waits, freed_in = False, set[QueueId]()
        if nodes.wait is not None:
            await self._add_edges(locked, nodes, nodes.wait, [known[name] for name in nodes.names], adder, size)
            waits = not goes_on
            if waits and lease is not None:
                freed_in = {await self._wait(locked, workflow, adder, lease, is_doomed=is_doomed)}
        return AddedNodes([known[name].job for name in nodes.names], len(new), waits), freed_in

    async def _size(self, locked: _Locked, nodes: NewNodes, new: Sequence[int], *, must_run: bool) -> _Size:
        """Returns the size that the workflow has with the nodes at the positions `new`. Raises WorkflowEnded if the
        workflow must run and does not, and TooManyNodes if it has no room for these nodes."""
        more_edges = sum(len(nodes.after.get(at, ())) for at in new)
        parameters = {"flow": locked.flow, "edges": more_edges > 0 or nodes.wait is not None}
        size = _Size._make((await locked.connection.run(statements.READ_SIZE, parameters))[0])
        if must_run and (locked.state is not WorkflowState.RUNNING or size.is_cancelled):
            raise WorkflowEnded(nodes.workflow, "been cancelled" if size.is_cancelled else locked.state.value)
        if size.nodes + len(new) > NODES_MAX:
            raise TooManyNodes(nodes.workflow, "nodes", present=size.nodes, more=len(new), bound=NODES_MAX)
        if size.edges + more_edges > EDGES_MAX:
            raise TooManyNodes(nodes.workflow, "edges", present=size.edges, more=more_edges, bound=EDGES_MAX)
        return size._replace(nodes=size.nodes + len(new), edges=size.edges + more_edges)

    async def _refuse_cycles(
        self, locked: _Locked, nodes: NewNodes, new: Sequence[int], known: Mapping[NodeName, _Known]
    ) -> None:
        """Refuses nodes that wait for a node which may itself wait for the job. All nodes of the call, new ones and
        those that this job has added before, may wait only for each other, for nodes that have ended, and for nodes
        that their own jobs have added. The same holds for the latter. So the job is not among the nodes for which they
        wait: it was there before all of these. Raises NodeMayWaitForJob."""
        names = set(nodes.names)
        for at in new:
            for parent, _ in nodes.after.get(at, ()):
                if parent not in names and parent in known and not known[parent].has_ended:
                    raise NodeMayWaitForJob(nodes.workflow, nodes.names[at], parent)
        open_nodes = [known[name].number for name in nodes.names if name in known and not known[name].has_ended]
        if open_nodes:
            parameters = {"flow": locked.flow, "nodes": arrays.numbers(open_nodes)}
            for node, parent in await locked.connection.run(statements.FIND_OPEN_PARENT, parameters):
                raise NodeMayWaitForJob(nodes.workflow, node, parent)

    async def _add_edges(
        self, locked: _Locked, nodes: NewNodes, policy: OnFailed, waited_for: Sequence[_Known], adder: int, size: _Size
    ) -> None:
        """Adds edges from the node `adder` to these nodes. Raises TooManyNodes."""
        parameters = {
            "flow": locked.flow,
            "node": adder,
            "parents": arrays.numbers(node.number for node in waited_for),
            "on_failed": policy.value,
        }
        more_edges = len(await locked.connection.run(statements.ADD_EDGES, parameters))
        if size.edges + more_edges > EDGES_MAX:
            raise TooManyNodes(nodes.workflow, "edges", present=size.edges, more=more_edges, bound=EDGES_MAX)

    async def _wait(
        self, locked: _Locked, workflow: WorkflowId, adder: int, lease: Lease, *, is_doomed: bool
    ) -> QueueId:
        """Blocks the job of the node `adder`, and ends its lease. Returns the queue of the job. `is_doomed`: the job
        will never run again, because a node that it waits for has failed."""
        parameters = {
            "flow": locked.flow,
            "node": adder,
            "is_doomed": is_doomed,
            "org_id": locked.org_id,
            "job": from_hex(lease.job_hex),
            "lease": lease.number,
            "failure": Failure(message=WAITS).to_json(),
        }
        rows = await locked.connection.run(statements.WAIT_FOR_NODES, parameters)
        if not rows:
            raise ShardUnavailable(self._database.name, f"job {from_hex(lease.job_hex)} is locked; try again")
        ((queue_id, changed, name),) = rows
        if not changed:
            raise NodeEnded(workflow, name)
        return QueueId(queue_id)

    async def _store_nodes(
        self,
        locked: _Locked,
        nodes: NewNodes,
        new: Sequence[int],
        known: dict[NodeName, _Known],
        ids: Mapping[QueueName, QueueId],
        adder: int,
        size: _Size,
        epoch: int,
    ) -> None:
        """Stores the nodes at the positions `new`, and adds them to `known`. `size`: the size that
        the workflow then has."""
        connection, flow, workflow, org = locked.connection, locked.flow, nodes.workflow, nodes.jobs.org
        numbers = range(size.nodes - len(new), size.nodes)
        for number, at in zip(numbers, new, strict=True):
            known[nodes.names[at]] = _Known(number, job_id_of(workflow, number), "blocked", False, adder)
        edges: list[Edge] = []
        for number, at in zip(numbers, new, strict=True):
            for parent, policy in nodes.after.get(at, ()):
                if parent not in known or known[parent].is_callback:
                    raise UnknownNode(org, workflow, parent, is_callback=parent in known)
                edges.append(Edge(number, known[parent].number, policy))
        edges.sort()
        ended = {node.number for node in known.values() if node.has_ended}
        # A node waits for its last parent that has not ended. If all its parents have ended, it waits for the last one,
        # whose end is appended once more (below).
        waits_on = {edge.node: edge.parent for edge in edges}
        waits_on |= {edge.node: edge.parent for edge in edges if edge.parent not in ended}
        jobs = nodes.jobs.only(new)
        jobs.ids = [job_id_of(workflow, number) for number in numbers]
        growth = NewWorkflow(
            id=workflow,
            name="",
            digest=b"",
            numbers=numbers,
            names=[nodes.names[at] for at in new],
            jobs=jobs,
            edges=edges,
            callbacks={},
            added_by=dict.fromkeys(numbers, adder),
            signals={number for number, at in zip(numbers, new, strict=True) if at in nodes.signals},
        )
        parameters = _parameters(growth, ids, epoch=epoch, grows=_Growth(flow, size.is_paused, waits_on))
        try:
            ((_, _, admitted, _),) = await connection.run(statements.STORE_WORKFLOW, parameters)
        except psycopg.errors.UniqueViolation as error:
            # Somebody has taken the id of one of the jobs.
            raise WorkflowExists(org, workflow) from error
        if admitted < len(ids):
            raise _QueuesChanged
        told = {edge.parent for edge in edges} & ended
        if told:
            parameters = {"org_id": locked.org_id, "id": workflow, "flow": flow, "nodes": arrays.numbers(told)}
            await connection.run(statements.TELL_AGAIN, parameters)

    # ── Look ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    async def get(self, org: OrgId, workflow: WorkflowId) -> WorkflowRecord:
        """Returns a workflow. Raises UnknownWorkflow."""
        rows = await self._read(org, statements.GET_WORKFLOW, {"org": org, "id": workflow})
        if not rows:
            raise UnknownWorkflow(org, workflow)
        return WorkflowRecord._make(rows[0])

    async def count(self, org: OrgId, workflow: WorkflowId) -> dict[NodeState, int]:
        """Counts the nodes of a workflow by state, without callbacks. Returns an empty dict if the workflow is not
        known."""
        counts: dict[NodeState, int] = {}
        for stored, nodes in await self._read(org, statements.COUNT_NODES, {"org": org, "id": workflow}):
            state = node_state(stored)
            counts[state] = counts.get(state, 0) + nodes
        return counts

    async def list_workflows(
        self, org: OrgId, *, state: WorkflowState | None, page_size: int, page_token: str
    ) -> tuple[list[WorkflowRecord], str]:
        """Returns a page of workflows, the newest first, and the token of the next page (empty on the last one). Raises
        BadPageToken."""
        parameters = {
            "org": org,
            "before": _unpack_id(page_token) if page_token else _LAST_ID,
            "state": "" if state is None else state.value,
            "rows": page_size + 1,
        }
        found = list(map(WorkflowRecord._make, await self._read(org, statements.LIST_WORKFLOWS, parameters)))
        page = found[:page_size]
        return page, _pack(page[-1].id) if len(found) > page_size else ""

    async def nodes(
        self, org: OrgId, workflow: WorkflowId, *, page_size: int, page_token: str
    ) -> tuple[list[NodeRecord], str]:
        """Returns a page of nodes by number, and the token of the next page. Raises UnknownWorkflow, BadPageToken."""
        first = _unpack_number(page_token) if page_token else 0
        parameters = {"org": org, "id": workflow, "from_node": first, "rows": page_size + 1}
        rows = await self._read(org, statements.LIST_NODES, parameters)
        if not rows:
            await self.get(org, workflow)
        page: list[NodeRecord] = []
        edges = 0
        for row in rows:
            node = NodeRecord._make(row)
            edges += len(node.after or ())
            if page and (len(page) == page_size or edges > _PAGE_EDGES_MAX):
                return page, _pack(str(node.number))
            page.append(node)
        return page, ""

    async def parents(
        self, org: OrgId, workflow: WorkflowId, node: int, *, from_node: int, rows: int
    ) -> list[ParentRecord]:
        """Returns the parents of a node, ordered by number, from the number `from_node` on."""
        parameters = {"org": org, "id": workflow, "node": node, "from_node": from_node, "rows": rows}
        return list(map(ParentRecord._make, await self._read(org, statements.LIST_PARENTS, parameters)))

    async def find_signal(self, org: OrgId, workflow: WorkflowId, node: NodeName) -> SignalNode:
        """Returns a node that has had its signal, or may still get it. Raises UnknownWorkflow, UnknownNode,
        NotSignalled."""
        rows = await self._read(org, statements.FIND_SIGNAL, {"org": org, "id": workflow, "name": node})
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
        """Returns the faults of the workflows of this shard, at most 100. Reads all open workflows."""
        return list(map(Fault._make, await self._database.run(statements.CHECK_WORKFLOWS, {"rows": _FAULTS_MAX})))

    # ── Change ───────────────────────────────────────────────────────────────────────────────────────────────────────

    async def set_paused(self, org: OrgId, workflow: WorkflowId, *, paused: bool, epoch: int) -> None:
        """Pauses a workflow, or ends its pause. Does not pause a workflow that has ended. Raises UnknownWorkflow."""

        async def act(locked: _Locked) -> None:
            await locked.connection.run(statements.SET_PAUSED, {"flow": locked.flow, "paused": paused})

        await self._change(org, workflow, act, epoch=epoch)

    async def doom(self, org: OrgId, workflow: WorkflowId, *, reason: str, epoch: int) -> list[JobId]:
        """Cancels the blocked jobs of a workflow. Returns its other jobs that have not ended, for the caller to cancel:
        they may be on another shard. Raises UnknownWorkflow."""
        org_id = await self.begin_cancel(org, workflow, reason=reason, epoch=epoch)
        await self._in_turn(org, partial(self._sweep.finish, org_id, workflow))
        rows = await self._read(org, statements.FIND_RELEASED, {"org": org, "id": workflow})
        return [JobId(job) for (job,) in rows]

    async def begin_cancel(self, org: OrgId, workflow: WorkflowId, *, reason: str, epoch: int) -> int:
        """Cancels a workflow, and a portion of its blocked jobs. Sweeps cancel the other blocked jobs. Returns the
        number of the org. Raises UnknownWorkflow."""

        async def act(locked: _Locked) -> None:
            await locked.connection.run(statements.CANCEL_WORKFLOW, {"flow": locked.flow, "reason": reason or None})

        return await self._change(org, workflow, act, epoch=epoch)

    async def skip(self, org: OrgId, workflow: WorkflowId, node: NodeName, *, epoch: int) -> JobId:
        """Ends a node as if it had succeeded; does nothing if it was skipped before. Cancels the job of the node if the
        job is blocked. Returns the job: if it was released, the caller cancels it. Raises UnknownWorkflow, UnknownNode,
        NodeEnded. Also raises ShardUnavailable if another session has locked the blocked job, or if the job is on its
        way from another shard."""
        found: list[JobId] = []

        async def act(locked: _Locked) -> None:
            rows = await locked.connection.run(statements.FIND_NODE, {"flow": locked.flow, "name": node})
            if not rows:
                raise UnknownNode(org, workflow, node)
            ((number, job, state),) = rows
            if state in ("succeeded", "failed", "cancelled"):
                raise NodeEnded(workflow, node)
            found.append(JobId(job))
            if state == "skipped":
                return
            parameters = {"org_id": locked.org_id, "id": workflow, "node": number}
            await locked.connection.run(statements.APPEND_SKIP, parameters)
            if state != "released":
                # The job is cancelled in this transaction, because nothing else would find it later. It is cancelled
                # after the skip, because the first end of a node counts.
                parameters = {"org_id": locked.org_id, "job_id": job, "reason": SKIPPED}
                ((cancelled,),) = await locked.connection.run(statements.CANCEL_BLOCKED_JOB, parameters)
                if not cancelled:
                    raise ShardUnavailable(
                        self._database.name, f"job {job} is locked, or on its way from another shard; try again"
                    )

        await self._change(org, workflow, act, epoch=epoch)
        return found[0]

    async def _change(
        self, org: OrgId, workflow: WorkflowId, act: Callable[[_Locked], Awaitable[None]], *, epoch: int
    ) -> int:
        """Runs `act` under the workflow's lock, and folds a portion of the workflow in the same transaction. Returns
        the number of the org."""

        async def change() -> tuple[int, set[QueueId]]:
            async with self._locked(org, workflow, epoch=epoch) as locked:
                await act(locked)
                parameters = {"org_ids": arrays.numbers([locked.org_id]), "ids": arrays.plain([workflow])}
                ((released,),) = await locked.connection.run(placement_statements.FOLD_WORKFLOWS, parameters)
            return locked.org_id, set(released)

        org_id, released = await self._in_turn(org, partial(self._with_partitions, change))
        if released:
            self._store.jobs_stored(released)
        return org_id

    async def _with_partitions(self, change: Callable[[], Awaitable[_T]]) -> _T:
        try:
            return await change()
        except psycopg.errors.CheckViolation as error:
            # An error without the name of a constraint says that a partition is missing. It is made, as in
            # partitions.finish.
            if error.diag.constraint_name is not None:
                raise
            await partitions.make_ahead(self._database)
            return await change()

    @contextlib.asynccontextmanager
    async def _locked(self, org: OrgId, workflow: WorkflowId, *, epoch: int) -> AsyncGenerator[_Locked, None]:
        self._store.clock.check()
        parameters = {"org": org, "id": workflow, "epoch": epoch}
        async with self._database.transaction() as connection:
            await connection.run(statements.BEGIN_CHANGE, parameters)
            rows = await connection.run(statements.FIND_FLOW, parameters)
            if rows:
                ((flow, org_id, state),) = rows
                yield _Locked(connection, flow, org_id, WorkflowState(state))
                return
        # Look only after the transaction has ended. Acts that hold a connection and need a second one would wait for
        # each other.
        await self._refuse_unowned(org, epoch)
        raise UnknownWorkflow(org, workflow)

    async def _refuse_unowned(self, org: OrgId, epoch: int) -> None:
        for error in (await find_refused(self._database, [(org, epoch)])).values():
            raise error

    async def _read(self, org: OrgId, statement: bytes, parameters: Mapping[str, object]) -> list[Any]:
        return await self._in_turn(org, partial(self._database.run, statement, parameters))

    async def _in_turn(self, org: OrgId, act: Callable[[], Awaitable[_T]]) -> _T:
        answer: _T = await self._calls.submit(SingleCall(org, 1, act))
        return answer


def _names_parameters(org: OrgId, workflow: WorkflowId, names: Sequence[NodeName]) -> dict[str, object]:
    return {"org": org, "id": workflow, "names": arrays.texts(list(names))}


def _lease_parameters(org: OrgId, workflow: WorkflowId, lease: Lease) -> dict[str, object]:
    return {"org": org, "id": workflow, "job": from_hex(lease.job_hex), "lease": lease.number}


def _node_of(rows: Sequence[Any], workflow: WorkflowId, lease: Lease) -> int:
    if not rows:
        raise LeaseEnded(from_hex(lease.job_hex), workflow)
    return int(rows[0][0])


def _parameters(
    workflow: NewWorkflow, ids: Mapping[QueueName, QueueId], *, epoch: int, grows: _Growth | None = None
) -> dict[str, object]:
    """Returns the parameters of store_workflow.sql. `grows`: the stored workflow to which these nodes are added. None:
    the workflow is new."""
    jobs = workflow.jobs
    count = len(jobs)
    positions = {number: at for at, number in enumerate(workflow.numbers)}
    # The edges are in the order of nodes and parents. So each node gets the last of its parents that has not ended.
    waits_on = {
        positions[edge.node]: edge.parent
        for edge in workflow.edges
        if edge.node in positions and edge.parent in positions
    }
    if grows is not None:
        waits_on = {positions[node]: parent for node, parent in grows.waits_on.items()}
    callbacks = {positions[number]: callback.value for number, callback in workflow.callbacks.items()}
    added_by = {positions[number]: adder for number, adder in workflow.added_by.items() if number in positions}
    ended_added_by = {
        at: workflow.added_by[node.number] for at, node in enumerate(workflow.ended) if node.number in workflow.added_by
    }
    signals = {at: 1 for number, at in positions.items() if number in workflow.signals}
    ended_signals = {at: 1 for at, node in enumerate(workflow.ended) if node.is_signal}
    plain = count + len(workflow.ended) - len(callbacks)
    # Nodes that were added have higher numbers than the callbacks.
    nodes = min(workflow.callbacks, default=plain)
    return {
        "made_ms": made_at_ms(workflow.id),
        "horizon_us": round(ID_AGE_DAYS_MAX * _DAY_US),
        "org": jobs.org,
        "epoch": epoch,
        "id": workflow.id,
        "flow": None if grows is None else grows.flow,
        "is_paused": grows is not None and grows.is_paused,
        "name": workflow.name,
        "digest": workflow.digest,
        "nodes": nodes,
        "added": plain - nodes if grows is None else count,
        "open_node": max(positions.keys() - workflow.callbacks.keys()),
        "retry_of": workflow.retry_of,
        "ended_nodes": arrays.numbers(node.number for node in workflow.ended),
        "ended_names": arrays.texts([node.name for node in workflow.ended]),
        "ended_jobs": arrays.plain(node.job_id for node in workflow.ended),
        "ended_states": arrays.plain(node.state.value for node in workflow.ended),
        "ended_added_by": arrays.sparse_numbers(ended_added_by, len(workflow.ended)),
        "ended_signals": arrays.sparse_numbers(ended_signals, len(workflow.ended)),
        "numbers": arrays.numbers(workflow.numbers),
        "lane_ids": arrays.numbers(ids.values()),
        "lane_queues": arrays.names(ids),
        "names": arrays.texts(list(workflow.names)),
        "ids": arrays.plain(jobs.ids),
        "callbacks": arrays.sparse_texts(callbacks, count),
        "waits_on": arrays.sparse_numbers(waits_on, count),
        "added_by": arrays.sparse_numbers(added_by, count),
        "signals": arrays.sparse_numbers(signals, count),
        "queue_ids": arrays.numbers(ids[queue] for queue in jobs.queues),
        "kinds": arrays.names(jobs.kinds),
        "payloads": arrays.blobs(jobs.payloads),
        "edge_nodes": arrays.numbers(edge.node for edge in workflow.edges),
        "edge_parents": arrays.numbers(edge.parent for edge in workflow.edges),
        "edge_policies": arrays.names(edge.on_failed.value for edge in workflow.edges),
        **{name: SPARSE_ENCODERS[name](getattr(jobs, name), count) for name in SPARSE_COLUMNS},
    }


def _pack(key: str) -> str:
    return base64.urlsafe_b64encode(key.encode()).decode()


def _unpack(token: str) -> str:
    """Returns the text in a page token, which a caller may have forged. Raises BadPageToken."""
    try:
        return base64.urlsafe_b64decode(token.encode()).decode()
    except (ValueError, binascii.Error) as error:
        raise BadPageToken(token) from error


def _unpack_id(token: str) -> WorkflowId:
    text = _unpack(token)
    if not is_uuid(text):
        raise BadPageToken(token)
    return WorkflowId(text)


def _unpack_number(token: str) -> int:
    text = _unpack(token)
    if not text.isascii() or not text.isdigit() or len(text) > len("10000"):
        raise BadPageToken(token)
    return int(text)


def parents_token(parents: Sequence[ParentRecord]) -> str:
    """Returns the token of the page that begins with the first of these parents."""
    return _pack(str(parents[0].number)) if parents else ""


def parents_from(token: str) -> int:
    """Returns the number with which a page of parents begins. Raises BadPageToken."""
    return _unpack_number(token) if token else 0
