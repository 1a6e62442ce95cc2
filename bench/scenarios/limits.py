"""Measures limits of enqueues over two routers with two processes each: how much the limits admit, what they cost while
they are not reached, and how soon a change is in force."""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass

import grpc
from google.protobuf.duration_pb2 import Duration

from bench.report import Found
from bench.scenario import Bench, Scenario
from bench.spread import Spread, spread
from bench.stage import Servers, Stage, fresh_run
from bench.systems.on_routers import QUEUE
from proof.arguments import number, numbers, positive
from proof.table import Table
from windrow import uuid7
from windrow.calls import CallFailure
from windrow.v1 import cluster_pb2, cluster_pb2_grpc, limits_pb2, queue_pb2, queue_pb2_grpc

_PROCESSES = 2
# The kernel spreads connections over the processes of a router at random. With this many connections, each process
# nearly always has at least one.
_CONNECTIONS = 8
_CALLERS = 4
_PATIENCE_S = 60.0
# The limits, as pairs: the number of jobs that are admitted in an interval, and the length of this interval in seconds.
_RATES = ((1000, 10), (100, 1), (10, 60))
# The amount of a limit that is never reached.
_FAR = 10**12


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    seconds: float = 60.0
    batches: tuple[int, ...] = (1, 100)
    jobs: int = 60_000
    runs: int = 7
    changes: int = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """What a limit admitted. `wanted`: the jobs that the limit should admit in the measured time, if its bucket is
    empty at the beginning."""

    amount: int
    interval_s: int
    seconds: float
    wanted: float
    admitted: int
    refused: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    batch: int
    run: int
    # Jobs a second: without limits, and under limits that are never reached.
    without: float
    under_limits: float


async def measure(plan: Plan, bench: Bench) -> Found:
    costs: list[Cost] = []
    async with bench.stage(shards=1, routers=_PROCESSES) as stage:
        both = (stage.routers, await stage.more_routers(_PROCESSES))
        admitted = await _admitted(plan, bench, both)
        changes = await _changes(plan, bench, both)
        for batch in plan.batches:
            costs += await _costs(plan, bench, stage, both, batch)
    return Found(
        scenario="limits",
        plan=asdict(plan),
        samples=[
            *({"sample": "admitted", **asdict(one)} for one in admitted),
            *({"sample": "cost", **asdict(one)} for one in costs),
            {"sample": "changes", "seconds": changes},
        ],
        tables=[_admitted_table(plan, admitted), _costs_table(plan, costs), _changes_table(changes)],
    )


# ── How much is admitted ─────────────────────────────────────────────────────────────────────────────────────────────


class _Producers:
    """Callers of one org that enqueue single jobs as fast as the limit admits them."""

    def __init__(self, org: str, stubs: Sequence[queue_pb2_grpc.QueueAsyncStub]) -> None:
        self.org = org
        self._stubs = stubs
        self.admitted_at_s: list[float] = []
        self.refused_at_s: list[float] = []

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for stub in self._stubs:
                for _ in range(_CALLERS):
                    group.create_task(self._produce(stub))

    async def _produce(self, stub: queue_pb2_grpc.QueueAsyncStub) -> None:
        while True:
            try:
                await _enqueue(stub, self.org)
                self.admitted_at_s.append(time.monotonic())
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                    raise
                self.refused_at_s.append(time.monotonic())
                await asyncio.sleep(_retry_after_s(error) * random.uniform(1.0, 1.5))


async def _admitted(plan: Plan, bench: Bench, both: Sequence[Servers]) -> list[Admitted]:
    """Measures all limits at the same time, each with an org of its own."""
    async with AsyncExitStack() as stack:
        channels = [await _channel(stack, servers) for servers in both for _ in range(_CONNECTIONS)]
        stubs = [queue_pb2_grpc.QueueStub(channel) for channel in channels]
        producers: list[_Producers] = []
        for amount, interval_s in _RATES:
            producers.append(_Producers(f"limited-{amount}-{interval_s}", stubs))
            await _set(channels[0], producers[-1].org, amount, interval_s)
        await asyncio.sleep(1.0)
        bench.say(f"enqueueing against {len(producers)} limits for {plan.seconds:g} s, after their buckets are empty")
        tasks = [asyncio.create_task(one.run()) for one in producers]
        # The buckets are full at first. Wait until each limit has refused a job.
        while not all(one.refused_at_s for one in producers):
            await asyncio.sleep(0.1)
            for task in tasks:
                if task.done():
                    task.result()
        await asyncio.sleep(2.0)
        began_s = time.monotonic()
        await asyncio.sleep(plan.seconds)
        ended_s = time.monotonic()
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    found: list[Admitted] = []
    for (amount, interval_s), one in zip(_RATES, producers, strict=True):
        result = Admitted(
            amount=amount,
            interval_s=interval_s,
            seconds=ended_s - began_s,
            wanted=amount / interval_s * (ended_s - began_s),
            admitted=sum(began_s <= at_s < ended_s for at_s in one.admitted_at_s),
            refused=sum(began_s <= at_s < ended_s for at_s in one.refused_at_s),
        )
        found.append(result)
        bench.say(f"{amount:,} per {interval_s} s: {result.admitted:,} of {result.wanted:,.1f}")
    return found


# ── How soon a change is in force ────────────────────────────────────────────────────────────────────────────────────


async def _changes(plan: Plan, bench: Bench, both: Sequence[Servers]) -> list[float]:
    """Sets a limit of one job a day for one org after another. These orgs had no limit before. Returns how long after
    each change a job was still admitted."""
    bench.say(f"changing a limit {plan.changes} times")
    async with AsyncExitStack() as stack:
        channels = [await _channel(stack, servers) for servers in both for _ in range(_CONNECTIONS)]
        return [await _change(channels, f"changed-{turn}") for turn in range(plan.changes)]


async def _change(channels: Sequence[grpc.aio.Channel], org: str) -> float:
    # The time at which the latest admitted call began.
    admitted_s = 0.0
    left = set(range(len(channels)))

    async def produce(at: int, channel: grpc.aio.Channel) -> None:
        nonlocal admitted_s
        stub = queue_pb2_grpc.QueueStub(channel)
        refusals = 0
        while left:
            began_s = time.monotonic()
            try:
                await _enqueue(stub, org)
                admitted_s = max(admitted_s, began_s)
                refusals = 0
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                    raise
                refusals += 1
            if refusals == 10:
                left.discard(at)
            await asyncio.sleep(0.002)

    async with asyncio.TaskGroup() as group:
        for at, channel in enumerate(channels):
            group.create_task(produce(at, channel))
        await asyncio.sleep(0.2)
        sent_s = time.monotonic()
        await _set(channels[0], org, 1, 86_400)
    return max(0.0, admitted_s - sent_s)


# ── What a limit costs while it is not reached ───────────────────────────────────────────────────────────────────────


async def _costs(plan: Plan, bench: Bench, stage: Stage, both: Sequence[Servers], batch: int) -> list[Cost]:
    jobs = plan.jobs if batch > 1 else plan.jobs // 4
    clients = await stage.clients("windrow", servers=both, callers=16)
    costs: list[Cost] = []
    async with AsyncExitStack() as stack:
        channel = await _channel(stack, both[0])

        async def rate(*, limited: bool) -> float:
            run = await fresh_run(clients)
            if limited:
                for measure in (limits_pb2.LIMIT_MEASURE_JOBS, limits_pb2.LIMIT_MEASURE_BYTES):
                    await _set(channel, f"{run}-0", _FAR, 1, measure=measure)
                    await _set(channel, f"{run}-0", _FAR, 1, measure=measure, queue=QUEUE)
                await asyncio.sleep(1.0)
            answers = await clients.all("enqueue", lambda _: {"jobs": jobs // 2, "batch": batch, "callers": 16})
            await stage.clear()
            return jobs / (max(one.ended_s for one in answers) - min(one.began_s for one in answers))

        await rate(limited=False)
        for run in range(1, plan.runs + 1):
            # The order alternates, so that neither case always comes first.
            rates = {limited: await rate(limited=limited) for limited in ((False, True) if run % 2 else (True, False))}
            cost = Cost(batch=batch, run=run, without=rates[False], under_limits=rates[True])
            costs.append(cost)
            bench.say(f"batch {batch}: {cost.without:,.0f} jobs/s without, {cost.under_limits:,.0f} under limits")
    await stage.drop("windrow")
    return costs


# ── Calls ────────────────────────────────────────────────────────────────────────────────────────────────────────────


async def _channel(stack: AsyncExitStack, servers: Servers) -> grpc.aio.Channel:
    options = [("grpc.use_local_subchannel_pool", 1)]
    channel = await stack.enter_async_context(grpc.aio.insecure_channel(servers.address, options=options))
    await channel.channel_ready()
    return channel


async def _enqueue(stub: queue_pb2_grpc.QueueAsyncStub, org: str) -> None:
    request = queue_pb2.EnqueueRequest(org=org)
    job = request.jobs.add(id=uuid7())
    job.template.queue, job.template.kind, job.template.payload = QUEUE, "no-op", bytes(200)
    await stub.Enqueue(request, timeout=_PATIENCE_S)


async def _set(
    channel: grpc.aio.Channel,
    org: str,
    amount: int,
    interval_s: int,
    *,
    measure: limits_pb2.LimitMeasure.ValueType = limits_pb2.LIMIT_MEASURE_JOBS,
    queue: str = "",
) -> None:
    request = cluster_pb2.SetLimitRequest(
        org=org, queue=queue, measure=measure, amount=amount, interval=Duration(seconds=interval_s)
    )
    await cluster_pb2_grpc.ClusterStub(channel).SetLimit(request, timeout=_PATIENCE_S)


def _retry_after_s(error: grpc.aio.AioRpcError) -> float:
    retry_after_s = CallFailure.of(error).retry_after_s
    if retry_after_s is None:
        raise error
    return retry_after_s


# ── Tables ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _admitted_table(plan: Plan, found: Sequence[Admitted]) -> Table:
    return Table(
        title="What limits admit",
        head=("limit", "wanted", "admitted", "difference", "refused calls"),
        rows=[
            (
                f"{one.amount:,} per {one.interval_s} s",
                f"{one.wanted:,.1f}",
                f"{one.admitted:,}",
                f"{one.admitted / one.wanted - 1:+.2%}",
                f"{one.refused:,}",
            )
            for one in found
        ],
        note=f"Jobs in {plan.seconds:g} s, counted from when the bucket is empty. Two routers with {_PROCESSES} "
        f"processes each; {2 * _CONNECTIONS * _CALLERS} callers for each limit, who wait as long as a refusal says. "
        "All limits at the same time, each of an org of its own.",
    )


def _costs_table(plan: Plan, costs: Sequence[Cost]) -> Table:
    rows: list[tuple[str, ...]] = []
    for batch in plan.batches:
        own = [cost for cost in costs if cost.batch == batch]
        shares = spread(cost.under_limits / cost.without for cost in own)
        rows.append(
            (
                f"{batch:,}",
                spread(cost.without for cost in own).text(),
                spread(cost.under_limits for cost in own).text(),
                _ratio_of_medians(own),
                shares.text(".1%"),
            )
        )
    return Table(
        title="Enqueueing under limits that are not reached",
        head=("batch", "no limit, jobs/s", "four limits, jobs/s", "ratio of medians", "ratio of each round"),
        rows=rows,
        note=f"Medians of {plan.runs} rounds in turn (least – greatest). Four limits: jobs and bytes, of the org and "
        f"of its queue. Two routers with {_PROCESSES} processes each.",
    )


def _ratio_of_medians(costs: Sequence[Cost]) -> str:
    without, under = spread(cost.without for cost in costs), spread(cost.under_limits for cost in costs)
    return f"{under.median / without.median:.1%}"


def _changes_table(changes: Sequence[float]) -> Table:
    found: Spread = spread(seconds * 1000 for seconds in changes)
    return Table(
        title="How long a change takes",
        head=("changes", "ms until all processes refuse"),
        rows=[(f"{len(changes)}", found.text(".1f"))],
        note="From SetLimit until the latest call that a process of either router admits; median (least – greatest).",
    )


def _options(parser: argparse.ArgumentParser) -> None:
    plan = Plan()
    parser.add_argument("--seconds", type=positive, default=plan.seconds, help="to measure what limits admit; 60")
    parser.add_argument("--batches", type=numbers(1000), default=plan.batches, metavar="N,N", help="jobs a call; 1,100")
    parser.add_argument("--jobs", type=number(10**8), default=plan.jobs, help="of each run under a limit; 60000")
    parser.add_argument("--runs", type=number(100), default=plan.runs, help="with and without limits; 7")
    parser.add_argument("--changes", type=number(1000), default=plan.changes, help="of a limit; 20")


SCENARIO = Scenario(
    help="how much limits admit, what they cost, and how soon a change of one is in force",
    options=_options,
    plan=lambda given: Plan(
        seconds=given.seconds, batches=given.batches, jobs=given.jobs, runs=given.runs, changes=given.changes
    ),
    measure=measure,
    full=lambda _: Plan(),
    quick=None,
)
