"""Measures what workflows cost: the whole life of jobs in graphs, compared with plain jobs, and acks of the 9,999
parents of one node."""

from __future__ import annotations

import argparse
import asyncio
import secrets
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass

import grpc

from bench.arguments import add_runs
from bench.payloads import stamped
from bench.report import Found
from bench.scenario import Bench, Scenario
from bench.spread import percentile, ratio, spread
from bench.systems.on_routers import CALL_S_MAX, QUEUE
from proof.arguments import number
from proof.table import Table
from windrow import uuid7
from windrow.v1 import queue_pb2, queue_pb2_grpc, workflows_pb2, workflows_pb2_grpc

# The lower bound for the ratio of jobs a second in graphs to plain jobs a second.
_BAR = 0.7
_CONSUMERS = 4
_WIDTH = 100
_FAN_IN = 10_000
# For each case, how many parents a node has. The parents are nodes of the level before the node's own level. 0: nodes
# have no edges. None: plain jobs, without a workflow.
_CASES: Mapping[str, int | None] = {
    "plain": None,
    "nodes without edges": 0,
    f"levels of {_WIDTH}, each node after one": 1,
    f"levels of {_WIDTH}, each node after ten": 10,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    jobs: int = 40_000
    # How many nodes each workflow has.
    nodes: int = 5_000
    batch: int = 100
    runs: int = 5
    routers: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    case: str
    run: int
    # Jobs a second, from the first enqueue or start to the last ack.
    rate: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Acks:
    """Acks of single jobs, which all are parents of the same node. The median time of the first tenth of these acks,
    and of the last tenth."""

    run: int
    first_ms: float
    last_ms: float


async def measure(plan: Plan, bench: Bench) -> Found:
    lives: list[Life] = []
    acks: list[Acks] = []
    async with bench.stage(shards=1, routers=plan.routers) as stage, AsyncExitStack() as stack:
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(stage.routers.address))
        for run in range(plan.runs + 1):
            for case in list(_CASES)[:: 1 if run % 2 else -1]:
                life = Life(case=case, run=run, rate=await _live(plan, channel, _CASES[case]))
                # The first run is a warm-up.
                if run:
                    lives.append(life)
                    bench.say(f"{case}: {life.rate:,.0f} jobs/s")
                await stage.clear()
        for run in range(1, plan.runs + 1):
            acks.append(await _fan_in(channel, run))
            bench.say(f"fan-in: {acks[-1].first_ms:.2f} ms, then {acks[-1].last_ms:.2f} ms")
            await stage.clear()
    return Found(
        scenario="workflows",
        plan=asdict(plan),
        samples=[
            *({"sample": "life", **asdict(one)} for one in lives),
            *({"sample": "acks", **asdict(one)} for one in acks),
        ],
        tables=[_lives_table(plan, lives), _acks_table(acks)],
    )


def _graph(org: str, nodes: int, parents: int) -> workflows_pb2.StartWorkflowRequest:
    """Returns a workflow of levels. Each node waits for `parents` nodes of the level before."""
    request = workflows_pb2.StartWorkflowRequest(org=org, id=uuid7())
    payload = stamped(1)[0]
    for at in range(nodes):
        node = request.nodes.add(name=f"n{at}")
        node.job.template.queue, node.job.template.kind, node.job.template.payload = QUEUE, "no-op", payload
        level, place = divmod(at, _WIDTH)
        if level:
            for step in range(parents):
                node.after.add(node=f"n{(level - 1) * _WIDTH + (place + step) % _WIDTH}")
    return request


async def _live(plan: Plan, channel: grpc.aio.Channel, parents: int | None) -> float:
    """Stores all jobs, while consumers lease and ack them in batches. Returns how many jobs a second were acked."""
    org = f"bench-{secrets.token_hex(6)}"
    stub, workflows = queue_pb2_grpc.QueueStub(channel), workflows_pb2_grpc.WorkflowsStub(channel)
    requests = [] if parents is None else [_graph(org, plan.nodes, parents) for _ in range(plan.jobs // plan.nodes)]
    left = plan.jobs
    payload = stamped(1)[0]

    async def produce() -> None:
        for request in requests:
            await workflows.StartWorkflow(request, timeout=CALL_S_MAX)
        for first in range(0, plan.jobs if parents is None else 0, plan.batch):
            enqueue = queue_pb2.EnqueueRequest(org=org)
            for _ in range(first, min(first + plan.batch, plan.jobs)):
                job = enqueue.jobs.add(id=uuid7())
                job.template.queue, job.template.kind, job.template.payload = QUEUE, "no-op", payload
            await stub.Enqueue(enqueue, timeout=CALL_S_MAX)

    async def consume() -> float:
        nonlocal left
        request = queue_pb2.DequeueRequest(org=org, queues=[QUEUE], max_jobs=plan.batch, worker="bench")
        request.wait.FromMilliseconds(500)
        ended_s = time.monotonic()
        while left > 0:
            jobs = (await stub.Dequeue(request, timeout=CALL_S_MAX)).jobs
            if jobs:
                acks = queue_pb2.AckRequest(org=org, acks=[queue_pb2.Ack(lease=job.lease) for job in jobs])
                await stub.Ack(acks, timeout=CALL_S_MAX)
                left -= len(jobs)
                ended_s = time.monotonic()
        return ended_s

    began_s = time.monotonic()
    async with asyncio.TaskGroup() as group:
        group.create_task(produce())
        consumers = [group.create_task(consume()) for _ in range(_CONSUMERS)]
    return plan.jobs / (max(one.result() for one in consumers) - began_s)


async def _fan_in(channel: grpc.aio.Channel, run: int) -> Acks:
    org = f"bench-{secrets.token_hex(6)}"
    stub, workflows = queue_pb2_grpc.QueueStub(channel), workflows_pb2_grpc.WorkflowsStub(channel)
    request = _graph(org, _FAN_IN - 1, 0)
    last = request.nodes.add(name="last")
    last.job.CopyFrom(request.nodes[0].job)
    for at in range(_FAN_IN - 1):
        last.after.add(node=f"n{at}")
    await workflows.StartWorkflow(request, timeout=CALL_S_MAX)
    took: list[float] = []
    dequeue = queue_pb2.DequeueRequest(org=org, queues=[QUEUE], max_jobs=1000, worker="bench")
    dequeue.visibility_window.FromSeconds(3600)
    leases: list[bytes] = []
    while jobs := (await stub.Dequeue(dequeue, timeout=CALL_S_MAX)).jobs:
        leases += [job.lease for job in jobs]
    # Ack the parents from the last to the first, which is the worst order. A node looks at one parent at a time: the
    # last one that has not ended. So each ack changes the parent at which the node looks.
    for lease in reversed(leases[: len(leases) // 10 * 10]):
        began_s = time.perf_counter()
        await stub.Ack(queue_pb2.AckRequest(org=org, acks=[queue_pb2.Ack(lease=lease)]), timeout=CALL_S_MAX)
        took.append((time.perf_counter() - began_s) * 1000)
    tenth = len(took) // 10
    return Acks(run=run, first_ms=percentile(sorted(took[:tenth]), 0.5), last_ms=percentile(sorted(took[-tenth:]), 0.5))


def _lives_table(plan: Plan, lives: list[Life]) -> Table:
    rates = {case: {one.run: one.rate for one in lives if one.case == case} for case in _CASES}
    rows: list[tuple[str, ...]] = []
    for case, own in rates.items():
        share = ratio(own, rates["plain"])
        is_plain = share is None or case == "plain"
        rows.append(
            (
                case,
                spread(own.values()).text(),
                "" if share is None else share.text(".2f"),
                "" if is_plain or share is None else ("yes" if share.median >= _BAR else "no"),
            )
        )
    return Table(
        title=f"The whole life of {plan.jobs:,} jobs in workflows of {plan.nodes:,} nodes",
        head=("jobs", "jobs/s", "of plain ones", f"at least {_BAR:g}"),
        rows=rows,
        note=f"Unary calls with up to {plan.batch} jobs: one producer, {_CONSUMERS} consumers, {plan.routers} router "
        f"process(es). Medians over {plan.runs} runs, which take turns.",
    )


def _acks_table(acks: list[Acks]) -> Table:
    return Table(
        title=f"Acks of single jobs, which are the {_FAN_IN - 1:,} parents of one node",
        head=("acks", "p50 ms"),
        rows=[
            ("the first tenth", spread(one.first_ms for one in acks).text(".2f")),
            ("the last tenth", spread(one.last_ms for one in acks).text(".2f")),
        ],
        note="One call after another, the last parent first.",
    )


def _options(parser: argparse.ArgumentParser) -> None:
    plan = Plan()
    parser.add_argument("--jobs", type=number(10**7), default=plan.jobs, help="of a run; 40000")
    parser.add_argument("--nodes", type=number(10_000), default=plan.nodes, help="of a workflow; 5000")
    parser.add_argument("--batch", type=number(1000), default=plan.batch, help="jobs a call; 100")
    parser.add_argument("--routers", type=number(64), default=plan.routers, help="router processes; 1")
    add_runs(parser, plan.runs)


SCENARIO = Scenario(
    help="what workflows cost: the whole life of jobs in graphs and of plain ones, and a node with 10,000 parents",
    options=_options,
    plan=lambda given: Plan(
        jobs=given.jobs, nodes=given.nodes, batch=given.batch, runs=given.runs, routers=given.routers
    ),
    measure=measure,
    full=lambda _: Plan(runs=3),
    quick=None,
)
