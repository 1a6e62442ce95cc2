"""Two routers ack, fail, cancel, skip, signal, pause, resume, alter and add nodes of the workflows of one org at the
same time, while connections are cut. Each node runs after its parents, and each callback runs once, after all nodes. No
job waits for ever, and no two sessions deadlock (I11)."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Mapping
from functools import partial

import psycopg
import pytest

from shard.errors import LeaseEnded, NodeEnded, NotSignalled, ShardUnavailable, WorkflowEnded
from shard.postgres.pool import Database
from shard.queue.settle import Nack, Settlement
from shard.vocabulary import Alteration, Answer, Failure, JobId, Lease, OrgId
from shard.workflow import Callback, NewWorkflow, OnFailed
from tests.conftest import SHARD
from tests.effort import luck_of, trials
from tests.jobs import alter_until
from tests.workflows import CANCEL, IGNORE, RUN, Flows, new_workflow, set_portion

luck = luck_of("workflows storm")
PATIENCE_S = 60.0
ENDED = {"succeeded", "failed", "cancelled", "skipped"}
CALLBACKS = {"won": Callback.SUCCESS, "lost": Callback.FAILURE, "over": Callback.END}
EXPECTED = {"succeeded": {"won", "over"}, "failed": {"lost", "over"}, "cancelled": {"over"}}
QUEUES = ("q1", "q2")
NODES_MAX = 30
ADDED_MAX = 20


@pytest.fixture
async def two(module_dsn: str, org: OrgId) -> AsyncGenerator[list[Flows], None]:
    # The lock wait is long, so that no call is refused because another call is slow.
    databases = [Database(SHARD, module_dsn, connections=4, short_lock_wait_s=PATIENCE_S) for _ in range(2)]
    for database in databases:
        await database.open()
    yield [Flows(database, org) for database in databases]
    for database in databases:
        await database.close()


def random_graph() -> dict[str, list[tuple[str, OnFailed]]]:
    names: list[str] = []
    graph: dict[str, list[tuple[str, OnFailed]]] = {}
    for at in range(luck.randint(2, NODES_MAX)):
        parents = luck.sample(names, min(len(names), luck.choice((0, 1, 1, 2, 5))))
        graph[f"n{at}"] = [(name, luck.choice((CANCEL, IGNORE, IGNORE, RUN))) for name in sorted(parents)]
        names.append(f"n{at}")
    return graph


class Storm:
    def __init__(self, two: list[Flows], org: OrgId) -> None:
        self.two = two
        self.org = org
        self.ran: Counter[str] = Counter()
        # For each node, how many of its signals got the answer that the signal counts.
        self.firsts: Counter[str] = Counter()
        self.had_round = asyncio.Event()
        # For each added node, the nodes for which it waits. A node is listed here even if nobody knows whether it was
        # added.
        self.added: dict[str, list[str]] = {}

    async def run(self, flow: NewWorkflow) -> None:
        """Works until the workflow has ended and its callbacks have run."""
        while True:
            try:
                state = await self.two[0].state(flow)
                await self.two[0].admin.set_paused(self.org, flow.id, paused=False, epoch=1)
                if state != "running" and await self._callbacks_ran(flow, state):
                    return
                await self._round(flow)
                self.had_round.set()
            except ShardUnavailable:
                await asyncio.sleep(0.01)

    async def _callbacks_ran(self, flow: NewWorkflow, state: str) -> bool:
        states = await self.two[0].states(flow)
        return all(states[name] == "succeeded" for name in EXPECTED[state])

    async def _round(self, flow: NewWorkflow) -> None:
        flows = luck.choice(self.two)
        await flows.learn(flow)
        for queue in QUEUES:
            await flows.claim(queue=queue)
        signals = {flow.names[number] for number in flow.signals}
        assert not flows.leases.keys() & signals, "no worker gets the job of a node that waits for a signal"
        states = await flows.states(flow)
        parents: dict[str, list[str]] = {**{name: [] for name in flow.names}, **self.added}
        open_nodes = {name for name, state in states.items() if state not in ENDED} - CALLBACKS.keys()
        for edge in flow.edges:
            parents[flow.names[edge.node]].append(flow.names[edge.parent])
        calls: list[Awaitable[object]] = []
        for name, lease in sorted(flows.leases.items()):
            assert all(states[parent] in ENDED for parent in parents[name]), (name, states)
            assert not (name in CALLBACKS and open_nodes), (name, states)
            if name not in CALLBACKS and luck.random() < 0.3 and len(self.added) < ADDED_MAX:
                calls.append(self._add(flow, lease, sorted(states.keys() - CALLBACKS.keys())))
            calls += self._settle(flow, name, lease)
        flows.leases.clear()
        victim = JobId(luck.choice(flow.jobs.ids[: len(flow.jobs.ids) - len(CALLBACKS)]))
        other = luck.choice(self.two)
        calls.append(other.store.alter(self.org, [victim], Alteration(priority=luck.randint(1, 9))))
        if luck.random() < 0.2:
            calls.append(other.store.cancel(self.org, [victim], reason="storm"))
        if luck.random() < 0.3:
            node = luck.choice(flow.names[: -len(CALLBACKS)])
            calls.append(other.admin.skip(self.org, flow.id, node, epoch=1))
        for name in sorted(signals):
            if luck.random() < 0.3:
                calls += [self._signal(flow, name) for _ in range(luck.choice((1, 1, 2)))]
            if luck.random() < 0.1:
                calls.append(other.store.alter(self.org, [other.job(flow, name)], Alteration(delay_us=0)))
        if luck.random() < 0.3:
            calls.append(other.admin.set_paused(self.org, flow.id, paused=luck.random() < 0.7, epoch=1))
        if luck.random() < 0.03:
            calls.append(other.admin.doom(self.org, flow.id, reason="", epoch=1))
        luck.shuffle(calls)
        for outcome in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(outcome, BaseException) and not isinstance(outcome, NodeEnded | ShardUnavailable):
                raise outcome

    async def _add(self, flow: NewWorkflow, lease: Lease, names: list[str]) -> None:
        """Adds nodes. Meanwhile other calls may end this lease."""
        graph = {
            f"m{len(self.added) + at}": [
                (name, luck.choice((CANCEL, IGNORE, IGNORE, RUN)))
                for name in luck.sample(names, min(len(names), luck.choice((0, 1, 2))))
            ]
            for at in range(luck.randint(1, 3))
        }
        self.added |= {node: [name for name, _ in after] for node, after in graph.items()}
        with contextlib.suppress(LeaseEnded, WorkflowEnded, ShardUnavailable):
            await luck.choice(self.two).add(flow, lease, graph, queue=luck.choice(QUEUES))

    async def _signal(self, flow: NewWorkflow, name: str) -> None:
        with contextlib.suppress(NotSignalled, ShardUnavailable):
            self.firsts[f"{flow.id}/{name}"] += await luck.choice(self.two).signal(flow, name)

    def _settle(self, flow: NewWorkflow, name: str, lease: Lease) -> list[Awaitable[object]]:
        if name not in CALLBACKS and luck.random() < 0.2:
            nack = Nack(lease=lease, failure=Failure(permanent=True))
            return [self._answer_to(Settlement.nack(self.org, [nack]))]
        return [self._ack(flow, name, lease) for _ in range(luck.choice((1, 1, 2)))]

    async def _ack(self, flow: NewWorkflow, name: str, lease: Lease) -> None:
        answer = await self._answer_to(Settlement.ack(self.org, [lease]))
        self.ran[f"{flow.id}/{name}"] += answer is Answer.OK

    async def _answer_to(self, settlement: Settlement) -> Answer:
        """Repeats the call until it is answered, even if nobody knows whether an earlier try was executed. Otherwise
        the job would stay leased for longer than the test lasts."""
        while True:
            with contextlib.suppress(ShardUnavailable):
                (answer,) = await luck.choice(self.two).store.settle(settlement)
                return answer


async def cut_connections(dsn: str, storm: Storm, *, pause_s: float) -> None:
    """Cuts at most one connection in each round, so that even a slow machine makes progress."""
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
        while True:
            await storm.had_round.wait()
            storm.had_round.clear()
            await asyncio.sleep(luck.random() * pause_s)
            await connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE pid <> pg_backend_pid() AND datname = current_database() AND state <> 'idle' "
                "AND backend_type = 'client backend' ORDER BY random() LIMIT 1"
            )


async def deadlocks(dsn: str) -> int:
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
        cursor = await connection.execute("SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()")
        row = await cursor.fetchone()
        assert row is not None
        return int(row[0])


@pytest.mark.thorough
@pytest.mark.parametrize(("cut", "portion"), [(False, 200), (True, 200), (True, 3)])
async def test_whatever_happens_at_once_strands_nothing(
    two: list[Flows], org: OrgId, module_dsn: str, cut: bool, portion: int
) -> None:
    await set_portion(two[0].database, portion)
    before = await deadlocks(module_dsn)
    storm = Storm(two, org)
    cutter = asyncio.create_task(cut_connections(module_dsn, storm, pause_s=0.1)) if cut else None
    for _ in range(trials(8, thorough=400)):
        storm.added.clear()
        queues = {f"n{at}": luck.choice(QUEUES) for at in range(NODES_MAX)}
        graph = random_graph()
        flow = new_workflow(
            org,
            graph,
            callbacks=CALLBACKS,
            signals=luck.sample(sorted(graph), min(len(graph), luck.choice((0, 1, 3)))),
            group="g" if luck.random() < 0.3 else None,
            queue_of=partial(queue_of, queues),
        )
        await started(two[0], flow)
        two[1].know(flow)
        async with asyncio.timeout(PATIENCE_S):
            sweeps = asyncio.create_task(sweep(two[1]))
            await storm.run(flow)
            sweeps.cancel()
        assert max(storm.firsts.values(), default=0) <= 1
    if cutter is not None:
        cutter.cancel()
    while True:
        with contextlib.suppress(ShardUnavailable):
            await two[0].check()
            break
    assert await deadlocks(module_dsn) == before


@pytest.mark.thorough
async def test_jobs_that_are_altered_while_they_are_released_do_not_stay_blocked(two: list[Flows]) -> None:
    flows, other = two
    await set_portion(flows.database, 200)
    names = [f"n{at}" for at in range(150)]
    for _ in range(trials(6, thorough=100)):
        flow = await flows.start({"root": [], **{name: ["root"] for name in names}})
        await flows.claim()
        acked, altered = asyncio.Event(), asyncio.Event()
        async with asyncio.TaskGroup() as group:
            for turn in range(4):
                ids = [flows.job(flow, name) for name in names[turn::4]]
                group.create_task(alter_until(acked, other.store, other.org, ids, altered))
            await altered.wait()
            await flows.ack("root")
            acked.set()
        # The sweep releases the jobs that were locked.
        await flows.sweep.sweep()
        assert await flows.claim() == set(names)
        await flows.ack(*names)
    await flows.check()


def queue_of(queues: Mapping[str, str], name: str) -> str:
    return queues.get(name, QUEUES[0])


async def started(flows: Flows, flow: NewWorkflow) -> None:
    while True:
        with contextlib.suppress(ShardUnavailable):
            await flows.admin.start(flow, epoch=1)
            flows.know(flow)
            return


async def sweep(flows: Flows) -> None:
    while True:
        with contextlib.suppress(ShardUnavailable):
            await flows.sweep.sweep()
        await asyncio.sleep(0.5)
