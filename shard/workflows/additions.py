"""Adds nodes to workflows that run, and lets a job wait for the nodes that it has added."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import psycopg

from shard.errors import (
    LeaseEnded,
    NodeEnded,
    NodeExists,
    NodeMayWaitForJob,
    ShardUnavailable,
    TooManyNodes,
    UnknownNode,
    UnknownWorkflow,
    WorkflowEnded,
    WorkflowExists,
)
from shard.job_id import from_hex
from shard.postgres import arrays
from shard.postgres.pool import Database
from shard.queue.store import Store
from shard.vocabulary import Failure, JobId, Lease, OrgId, QueueId, QueueName
from shard.workflow import (
    EDGES_MAX,
    NODES_MAX,
    AddedNodes,
    Edge,
    NewNodes,
    NewWorkflow,
    NodeName,
    OnFailed,
    WorkflowId,
    WorkflowState,
    job_id_of,
)
from shard.workflows import statements
from shard.workflows.calls import LockedWorkflow, WorkflowCalls
from shard.workflows.store_parameters import Growth, store_parameters

_TRIES_MAX = 6
# The reason in the history of a job that has given up its lease to wait for nodes.
WAITS = "waits for nodes that it has added"


class _Known(NamedTuple):
    """A node that the workflow has. The fields have the order of the columns of find_nodes.sql, except the first
    column, which is the name."""

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
    """The size and the state of a workflow, in the order of read_size.sql's columns. `edges` is 0 if the number of
    edges is not needed."""

    nodes: int
    edges: int
    is_cancelled: bool
    is_paused: bool

    def plus(self, workflow: WorkflowId, *, nodes: int = 0, edges: int = 0) -> _Size:
        """Returns the size with these numbers of nodes and edges added. Raises TooManyNodes."""
        if self.nodes + nodes > NODES_MAX:
            raise TooManyNodes(workflow, "nodes", present=self.nodes, more=nodes, bound=NODES_MAX)
        if self.edges + edges > EDGES_MAX:
            raise TooManyNodes(workflow, "edges", present=self.edges, more=edges, bound=EDGES_MAX)
        return self._replace(nodes=self.nodes + nodes, edges=self.edges + edges)


class _QueuesChanged(Exception):
    """The ids of queues have changed since they were looked up: nothing was stored."""


class _QueuesMissing(Exception):
    """The new nodes can be stored, but some of their queues do not exist: nothing was stored."""


class NodeAdder:
    """Adds nodes to the workflows of one shard. All methods may raise ShardUnavailable and TooManyWaiting; `add` may
    also raise NotOwned and ClockSetBack."""

    def __init__(self, database: Database, store: Store, calls: WorkflowCalls) -> None:
        self._database = database
        self._store = store
        self._calls = calls

    async def node_of(self, org: OrgId, workflow: WorkflowId, lease: Lease) -> int:
        """Returns the number of the node whose job has this lease. The job must be on this shard, and the node must be
        in this workflow. Raises LeaseEnded."""
        parameters = _lease_parameters(org, workflow, lease)
        return _node_of(await self._calls.read(org, statements.FIND_LEASE, parameters), workflow, lease)

    async def unknown(self, nodes: NewNodes) -> list[int]:
        """Returns the positions, in `nodes`, of the nodes that the workflow does not have."""
        parameters = _names_parameters(nodes.jobs.org, nodes.workflow, nodes.names)
        known = {row[0] for row in await self._calls.read(nodes.jobs.org, statements.FIND_NODES, parameters)}
        return [at for at, name in enumerate(nodes.names) if name not in known]

    async def add(self, nodes: NewNodes, *, adder: Lease | int, epoch: int) -> AddedNodes:
        """Adds nodes to a workflow that runs. Does not change nodes that the same job has added before. If the job must
        wait for the nodes, ends the job's lease and blocks the job.

        `adder`: the lease of the job that adds the nodes. If that job is on another shard, the caller has checked the
        job's lease there, and `adder` is the number of the job's node. Then this method cannot end the lease. If the
        job must wait, the caller must give the job back on the other shard. The job later runs again, on this shard,
        and then waits. Raises LeaseEnded, UnknownWorkflow, WorkflowEnded, NodeEnded, NodeExists, NodeMayWaitForJob,
        UnknownNode, TooManyNodes, TooManyQueues."""
        org = nodes.jobs.org
        # Queues are made only after a try has shown that the nodes can be stored: a call that is refused must change
        # nothing.
        make = False
        for _ in range(_TRIES_MAX):
            ids = await self._calls.in_turn(org, partial(self._queues_for, nodes, epoch, make=make))
            act = partial(self._add, nodes=nodes, ids=ids, adder=adder, epoch=epoch)
            try:
                answer, freed_in = await self._calls.change(org, nodes.workflow, act, epoch=epoch)
            except _QueuesChanged:
                self._store.names.forget()
                continue
            except _QueuesMissing:
                make = True
                continue
            if answer.stored:
                freed_in |= set(ids.values())
            if freed_in:
                self._store.jobs_stored(freed_in)
            return answer
        raise ShardUnavailable(self._database.name, "the ids of its queues keep changing")

    async def _queues_for(self, nodes: NewNodes, epoch: int, *, make: bool) -> dict[QueueName, QueueId]:
        """Returns the ids of the nodes' queues that exist. With `make`, makes the other queues too. Before that,
        refuses nodes that cannot be stored, because a shard that does not own the org's slot must not get a queue of
        this org."""
        org, queues = nodes.jobs.org, sorted(set(nodes.jobs.queues))
        await self._calls.refuse_unowned(org, epoch)
        if not await self._database.run(statements.GET_WORKFLOW, {"org": org, "id": nodes.workflow}):
            # The workflow may have moved away with its org meanwhile.
            await self._calls.refuse_unowned(org, epoch)
            raise UnknownWorkflow(org, nodes.workflow)
        if make:
            return await self._calls.queue_ids(org, queues)
        found = await self._store.names.find([(org, queue) for queue in queues])
        return {queue: number for (_, queue), number in found.items()}

    async def _add(
        self,
        locked: LockedWorkflow,
        *,
        nodes: NewNodes,
        ids: Mapping[QueueName, QueueId],
        adder: Lease | int,
        epoch: int,
    ) -> tuple[AddedNodes, set[QueueId]]:
        """Adds nodes under the workflow's lock, which every fold needs too. So there are two cases. If the end of the
        last node was folded before this call, the workflow has ended. Otherwise, the fold of that end will find the new
        nodes. Likewise, the end of the job that adds the nodes was folded before this call, or its fold will find the
        new nodes. If that job has given up its lease to wait, also returns its queue."""
        connection, workflow, org = locked.connection, nodes.workflow, nodes.jobs.org
        lease = None if isinstance(adder, int) else adder
        has_waited = False
        if not isinstance(adder, int):
            parameters = _lease_parameters(org, workflow, adder)
            rows = await connection.run(statements.FIND_LEASE, parameters)
            if not rows and nodes.wait is not None:
                # An earlier call may have ended the lease, and the answer of that call may have been lost.
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
        # If the job goes on, the call changes nothing in the workflow, so the workflow need not run. A job that was
        # redriven may make such a call after the end of its workflow.
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

    async def _size(self, locked: LockedWorkflow, nodes: NewNodes, new: Sequence[int], *, must_run: bool) -> _Size:
        """Returns the size that the workflow has with the nodes at the positions `new`. With `must_run`, raises
        WorkflowEnded if the workflow does not run. Raises TooManyNodes if the workflow has no room for these nodes."""
        more_edges = sum(len(nodes.after.get(at, ())) for at in new)
        parameters = {"flow": locked.flow, "edges": more_edges > 0 or nodes.wait is not None}
        size = _Size._make((await locked.connection.run(statements.READ_SIZE, parameters))[0])
        if must_run and (locked.state is not WorkflowState.RUNNING or size.is_cancelled):
            raise WorkflowEnded(nodes.workflow, "been cancelled" if size.is_cancelled else locked.state.value)
        return size.plus(nodes.workflow, nodes=len(new), edges=more_edges)

    async def _refuse_cycles(
        self, locked: LockedWorkflow, nodes: NewNodes, new: Sequence[int], known: Mapping[NodeName, _Known]
    ) -> None:
        """Refuses cycles. The job that adds the nodes waits for them, so none of these nodes may wait for the job's own
        node. The nodes of the call are new, or this job added them before. They may wait only for each other, for nodes
        that have ended, and for nodes that their own jobs have added. The same rule applies to the nodes that those
        jobs have added. So every node that has not ended and for which one of these nodes waits was added later than
        the job's own node, and cannot be that node. Raises NodeMayWaitForJob."""
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
        self,
        locked: LockedWorkflow,
        nodes: NewNodes,
        policy: OnFailed,
        waited_for: Sequence[_Known],
        adder: int,
        size: _Size,
    ) -> None:
        """Adds edges from the node `adder` to these nodes. Raises TooManyNodes."""
        parameters = {
            "flow": locked.flow,
            "node": adder,
            "parents": arrays.numbers(node.number for node in waited_for),
            "on_failed": policy.value,
        }
        added = await locked.connection.run(statements.ADD_EDGES, parameters)
        size.plus(nodes.workflow, edges=len(added))

    async def _wait(
        self, locked: LockedWorkflow, workflow: WorkflowId, adder: int, lease: Lease, *, is_doomed: bool
    ) -> QueueId:
        """Blocks the job of the node `adder`, and ends its lease. Returns the queue of the job. `is_doomed`: the job
        will never run again, because a node for which it waits has failed."""
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
        locked: LockedWorkflow,
        nodes: NewNodes,
        new: Sequence[int],
        known: dict[NodeName, _Known],
        ids: Mapping[QueueName, QueueId],
        adder: int,
        size: _Size,
        epoch: int,
    ) -> None:
        """Stores the nodes at the positions `new`, and adds them to `known`. `size`: the size of the workflow with
        these nodes."""
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
        # The column `waits_on` of a node names one parent: of the parents that have not ended, the parent with the
        # highest number. If all parents have ended, it names the parent with the highest number of all. The ends of
        # parents that have ended are appended again below, so that the fold finds the node.
        waits_on = {edge.node: edge.parent for edge in edges}
        waits_on |= {edge.node: edge.parent for edge in edges if edge.parent not in ended}
        jobs = nodes.jobs.only(new)
        if not ids.keys() >= set(jobs.queues):
            raise _QueuesMissing
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
        parameters = store_parameters(growth, ids, epoch=epoch, grows=Growth(flow, size.is_paused, waits_on))
        try:
            ((_, _, admitted, _),) = await connection.run(statements.STORE_WORKFLOW, parameters)
        except psycopg.errors.UniqueViolation as error:
            # Another job already has the id of one of these jobs.
            raise WorkflowExists(org, workflow) from error
        if admitted < len(ids):
            raise _QueuesChanged
        told = {edge.parent for edge in edges} & ended
        if told:
            parameters = {"org_id": locked.org_id, "id": workflow, "flow": flow, "nodes": arrays.numbers(told)}
            await connection.run(statements.TELL_AGAIN, parameters)


def _names_parameters(org: OrgId, workflow: WorkflowId, names: Sequence[NodeName]) -> dict[str, object]:
    return {"org": org, "id": workflow, "names": arrays.texts(list(names))}


def _lease_parameters(org: OrgId, workflow: WorkflowId, lease: Lease) -> dict[str, object]:
    return {"org": org, "id": workflow, "job": from_hex(lease.job_hex), "lease": lease.number}


def _node_of(rows: Sequence[Any], workflow: WorkflowId, lease: Lease) -> int:
    if not rows:
        raise LeaseEnded(from_hex(lease.job_hex), workflow)
    return int(rows[0][0])
