"""The workflows of one shard, for tests. The functions do what a router does."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence

from shard.errors import NotSignalled
from shard.postgres.pool import Database
from shard.queue.settle import Nack, Settlement
from shard.queue.store import Store
from shard.vocabulary import Answer, Claimed, Failure, JobId, Lease, OrgId, QueueName
from shard.workflow import (
    AddedNodes,
    Callback,
    Edge,
    NewNodes,
    NewWorkflow,
    NodeName,
    NodeOf,
    OnFailed,
    WorkflowId,
    job_id_of,
    node_state,
)
from shard.workflows.additions import NodeAdder
from shard.workflows.calls import WorkflowCalls
from shard.workflows.sweep import WorkflowSweep
from shard.workflows.workflow_admin import WorkflowAdmin
from tests.jobs import HOUR_US, QUEUE, job_id, lease_jobs, some_jobs
from tests.pair import A, B, Pair

# For how long nodes wait for their signals.
SIGNAL_US = 2 * HOUR_US
CANCEL, IGNORE, RUN = OnFailed.CANCEL, OnFailed.IGNORE, OnFailed.RUN
# For each node, the nodes for which it waits. A node comes after all nodes for which it waits.
Graph = Mapping[str, Sequence[str | tuple[str, OnFailed]]]


def new_workflow(
    org: OrgId,
    graph: Graph,
    *,
    callbacks: Mapping[str, Callback] | None = None,
    workflow: WorkflowId | None = None,
    queue_of: Callable[[str], str] = lambda _: QUEUE,
    signals: Collection[str] = (),
    **fields: object,
) -> NewWorkflow:
    """Returns a workflow whose jobs have these fields of `some_jobs`. The nodes `signals` wait for signals."""
    workflow = workflow or WorkflowId(job_id())
    names = [*graph, *(callbacks or {})]
    numbers = {name: at for at, name in enumerate(names)}
    ids = [job_id_of(workflow, number) for number in range(len(names))]
    jobs = some_jobs(org, ids=ids, **fields)  # type: ignore[arg-type]
    jobs.queues = [QueueName(queue_of(name)) for name in names]
    for name in signals:
        jobs.groups.pop(numbers[name], None)
    jobs.delay_us |= dict.fromkeys((numbers[name] for name in signals), SIGNAL_US)
    edges = [
        Edge(numbers[name], numbers[other], policy)
        for name, after in graph.items()
        for other, policy in ((one, CANCEL) if isinstance(one, str) else one for one in after)
    ]
    return NewWorkflow(
        id=workflow,
        name="test",
        digest=hashlib.sha256(repr((sorted(graph.items()), sorted(signals), fields)).encode()).digest(),
        numbers=range(len(names)),
        names=[NodeName(name) for name in names],
        jobs=jobs,
        edges=sorted(edges),
        callbacks={numbers[name]: callback for name, callback in (callbacks or {}).items()},
        signals={numbers[name] for name in signals},
    )


def new_nodes(
    org: OrgId,
    flow: NewWorkflow,
    graph: Graph,
    *,
    wait: OnFailed | None = None,
    signals: Collection[str] = (),
    **fields: object,
) -> NewNodes:
    """Returns nodes to be added to a workflow. Their jobs have these fields of `some_jobs`. The nodes `signals` wait
    for signals. `wait`: the job waits for the nodes, with this policy."""
    waiting = {at for at, name in enumerate(graph) if name in signals}
    jobs = some_jobs(org, ids=[JobId("")] * len(graph), **fields)  # type: ignore[arg-type]
    jobs.delay_us |= dict.fromkeys(waiting, SIGNAL_US)
    return NewNodes(
        workflow=flow.id,
        names=[NodeName(name) for name in graph],
        jobs=jobs,
        signals=waiting,
        after={
            at: [(NodeName(one), CANCEL) if isinstance(one, str) else (NodeName(one[0]), one[1]) for one in after]
            for at, after in enumerate(graph.values())
            if after
        },
        wait=wait,
    )


class Flows:
    """The workflows of one org on one shard. Methods name a claimed job by the name of its node."""

    def __init__(self, database: Database, org: OrgId, *, store: Store | None = None) -> None:
        self.database = database
        self.org = org
        self.store = store or Store(database)
        self.sweep = WorkflowSweep(database, self.store)
        calls = WorkflowCalls(database, self.store)
        self.admin = WorkflowAdmin(database, self.store, calls, self.sweep)
        self.adder = NodeAdder(database, self.store, calls)
        # `names`: the name of each job's node. `added`: the job of each added node.
        self.names: dict[str, str] = {}
        self.added: dict[tuple[WorkflowId, str], JobId] = {}
        self.leases: dict[str, Lease] = {}

    async def start(self, graph: Graph, *, epoch: int = 1, **fields: object) -> NewWorkflow:
        flow = new_workflow(self.org, graph, **fields)  # type: ignore[arg-type]
        assert await self.admin.start(flow, epoch=epoch) is False
        self.know(flow)
        return flow

    async def add(
        self, flow: NewWorkflow, adder: str | Lease, graph: Graph, *, epoch: int = 1, **fields: object
    ) -> AddedNodes:
        """Adds nodes from the job of the node with this name, or with this lease."""
        nodes = new_nodes(self.org, flow, graph, **fields)  # type: ignore[arg-type]
        lease = self.leases[adder] if isinstance(adder, str) else adder
        added = await self.adder.add(nodes, adder=lease, epoch=epoch)
        self.names |= dict(zip(added.jobs, graph, strict=True))
        self.added |= {(flow.id, name): job for job, name in zip(added.jobs, graph, strict=True)}
        return added

    def know(self, flow: NewWorkflow) -> None:
        self.names |= dict(zip(flow.jobs.ids, flow.names, strict=True))

    async def learn(self, flow: NewWorkflow) -> None:
        """Reads the names of nodes that others have added."""
        nodes, _ = await self.admin.nodes(self.org, flow.id, page_size=1000, page_token="")
        self.names |= {node.job_id: node.name for node in nodes}

    def name_of(self, job: Claimed) -> str:
        return self.names[job.id]

    async def claim(self, *, queue: str = QUEUE, max_jobs: int = 1000) -> set[str]:
        """Leases the ready jobs. Returns the names of their nodes."""
        taken = await lease_jobs(self.store, self.org, queue=queue, window_us=HOUR_US, max_jobs=max_jobs)
        self.leases |= {self.name_of(job): lease for job, lease in taken}
        return {self.name_of(job) for job, _ in taken}

    async def ack(self, *names: str) -> None:
        leases = [self.leases.pop(name) for name in names]
        assert await self.store.settle(Settlement.ack(self.org, leases)) == [Answer.OK] * len(leases)

    async def kill(self, *names: str) -> None:
        nacks = [Nack(lease=self.leases.pop(name), failure=Failure(permanent=True)) for name in names]
        assert await self.store.settle(Settlement.nack(self.org, nacks)) == [Answer.OK] * len(nacks)

    async def cancel(self, flow: NewWorkflow, *names: str) -> None:
        """Cancels jobs of nodes."""
        ids = [self.job(flow, name) for name in names]
        assert await self.store.cancel(self.org, ids, reason="by hand") == [Answer.OK] * len(ids)

    async def signal(self, flow: NewWorkflow, name: str, payload: bytes = b"yes", *, at: Store | None = None) -> bool:
        """Gives a signal to a node, as a router does. `at`: the store of the shard that has the job. Returns whether
        the signal counts."""
        node = await self.admin.find_signal(self.org, flow.id, NodeName(name))
        signalled = await (at or self.store).signal(self.org, node.job_id, NodeOf(flow.id, node.number), payload)
        if signalled.answer is not Answer.OK:
            raise NotSignalled(flow.id, name, signalled.answer.value)
        return signalled.is_first

    def job(self, flow: NewWorkflow, name: str) -> JobId:
        return self.added.get((flow.id, name)) or JobId(flow.jobs.ids[list(flow.names).index(NodeName(name))])

    async def run_all(self, *, queue: str = QUEUE) -> list[set[str]]:
        """Claims and acks until nothing is ready. Returns the names of the nodes that each round claimed."""
        rounds: list[set[str]] = []
        while names := await self.claim(queue=queue):
            await self.ack(*names)
            rounds.append(names)
        return rounds

    async def state(self, flow: NewWorkflow) -> str:
        return (await self.admin.get(self.org, flow.id)).state

    async def states(self, flow: NewWorkflow) -> dict[str, str]:
        """Returns the state of each node."""
        nodes, _ = await self.admin.nodes(self.org, flow.id, page_size=1000, page_token="")
        return {node.name: node_state(node.state).value for node in nodes}

    async def check(self) -> None:
        """Asserts that nothing is wrong with the workflows of this org."""
        faults = [fault for fault in await self.admin.check() if fault.org == self.org]
        assert not faults, faults


def both(pair: Pair, org: OrgId) -> tuple[Flows, Flows]:
    """Returns the workflows of one org on two shards. The two objects share the names of nodes."""
    source, target = Flows(pair.databases[A], org), Flows(pair.databases[B], org)
    target.names = source.names
    return source, target


def fan_in(width: int) -> dict[str, list[str]]:
    parents = [f"p{number}" for number in range(width)]
    return {**{name: [] for name in parents}, "last": parents}


def chain(length: int) -> dict[str, list[str]]:
    names = [f"n{number}" for number in range(length)]
    return {names[0]: [], **{name: [before] for before, name in itertools.pairwise(names)}}


async def set_portion(database: Database, jobs: int) -> None:
    """Lets each fold release and cancel only this many jobs."""
    function = f"windrow.fold_room() RETURNS integer LANGUAGE sql STABLE AS 'SELECT {jobs}'"
    await database.run(f"CREATE OR REPLACE FUNCTION {function}".encode(), {})
