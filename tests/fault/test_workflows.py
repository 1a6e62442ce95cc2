"""kill -9 of router processes and of a Postgres while workflows run: each node runs after its parents, each callback is
stored once, and no node is stranded (I11)."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable

import grpc
import pytest
import pytest_asyncio

import windrow
from cli.local import LocalCluster, local_cluster
from embedded import BinariesNotFound
from tests.effort import luck_of, trials
from tests.fault.test_schedules import freeze_postgres, kill_postgres, kill_routers, until
from tests.routers import PATIENCE_S
from windrow.v1 import cluster_pb2, cluster_pb2_grpc

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(240)]

FLOWS = trials(3, thorough=30)
LEVELS, WIDTH = 5, 6
luck = luck_of("workflow faults")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster() -> AsyncIterator[LocalCluster]:
    try:
        async with local_cluster(root=None, shards=["s1"], processes=2, listen="127.0.0.1:0") as running:
            yield running
    except BinariesNotFound as error:
        pytest.skip(str(error))


def random_flow() -> windrow.Workflow:
    flow = windrow.Workflow("faults")
    before: list[windrow.Node] = []
    for level in range(LEVELS):
        nodes = [flow.job("work", "node", name=f"{level}-{at}") for at in range(WIDTH)]
        for node in nodes:
            node.after(*luck.sample(before, min(len(before), luck.randint(1, 3))))
        signal = flow.signal(f"{level}-signal", "work", timeout=3600, after=luck.sample(before, min(len(before), 1)))
        before = [*nodes, signal]
    flow.on_success("work", "callback", name="won")
    flow.on_end("work", "callback", name="over")
    return flow


async def give_signals(client: windrow.Client, flow: windrow.Workflow) -> None:
    """Gives each signal twice: first before or after its node is due, and then again."""
    names = [node.name for node in flow.nodes if node.is_signal]
    for name in luck.sample(names, len(names)):
        await client.signal(flow.id, name, name)
        assert not await client.signal(flow.id, name, "too late")


@pytest.mark.turns(3)
@pytest.mark.parametrize("kill", [kill_routers, kill_postgres, freeze_postgres])
async def test_a_kill_strands_no_node_and_doubles_no_callback(
    cluster: LocalCluster, kill: Callable[[LocalCluster], Awaitable[None]]
) -> None:
    async with windrow.Client(cluster.address, org=kill.__name__, timeout=PATIENCE_S) as client:
        worker = windrow.Worker(client, "work", concurrency=8)
        ended: list[str] = []

        @worker.handler("node", "callback")
        async def run(job: windrow.Job) -> None:
            await asyncio.sleep(0.01)
            ended.append(job.id)

        running = asyncio.create_task(worker.run())
        flows = [random_flow() for _ in range(FLOWS)]
        started = await asyncio.gather(*(client.start(flow) for flow in flows))
        signalling = asyncio.gather(*(give_signals(client, flow) for flow in flows))
        await asyncio.sleep(0.1)
        await kill(cluster)
        await signalling

        async def have_ended() -> bool:
            states = [(await client.get_workflow(flow.id))[0].state for flow in flows]
            ids = [one.job_ids[name] for one in started for name in ("won", "over")]
            jobs = await client.get_jobs(ids)
            return windrow.WorkflowState.RUNNING not in states and {jobs[one].state.value for one in ids} == {
                "succeeded"
            }

        await until(have_ended, "all workflows and callbacks have ended")
        first = {job: at for at, job in reversed(list(enumerate(ended)))}
        for flow, one in zip(flows, started, strict=True):
            states = Counter(node.state for node in await client.list_nodes(flow.id))
            assert states == {windrow.NodeState.SUCCEEDED: LEVELS * (WIDTH + 1) + 2}
            signals = {node.name: one.job_ids[node.name] for node in flow.nodes if node.is_signal}
            jobs = await client.get_jobs(signals.values(), include_payload=True)
            assert {name: jobs[job].result for name, job in signals.items()} == {
                name: name.encode() for name in signals
            }
            assert signals.values() & first.keys() == set(), "no worker gets such a job"
            for node in flow.nodes:
                for parent in node.waits_for:
                    if parent not in signals and node.name not in signals:
                        assert first[one.job_ids[parent]] < first[one.job_ids[node.name]]
        worker.stop()
        await running
    async with grpc.aio.insecure_channel(cluster.address) as channel:
        stub = cluster_pb2_grpc.ClusterStub(channel)
        async for answer in stub.CheckShard(cluster_pb2.CheckShardRequest(shard="s1"), timeout=PATIENCE_S):
            assert list(answer.workflow_faults) == []
            assert all(books.balanced for books in answer.orgs)
