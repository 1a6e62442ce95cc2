"""Consumers of all orgs: measures how soon the jobs of small orgs are picked up while another org has a large backlog,
and what a job costs when 100,000 orgs have jobs. Both measurements use one router process and one shard."""

from __future__ import annotations

import argparse
import asyncio
import enum
import random
import struct
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass

import grpc
import psutil
import psycopg
from google.protobuf.duration_pb2 import Duration

import windrow
from bench.report import Found
from bench.scenario import Bench, Scenario
from bench.spread import percentile, spread
from bench.stage import Stage
from proof.arguments import number, positive
from proof.table import Table
from windrow import LimitMeasure, uuid7
from windrow.v1 import job_pb2, queue_pb2, queue_pb2_grpc

_PATIENCE_S = 60.0
_SMALL_ORGS = 50
# If there is a backlog, all places are taken, and about one place becomes free in each millisecond.
_HANDLER_S = 0.1
_PLACES = 100
_PRODUCERS = 20
# With the small orgs, which need 5 places, this keeps the places 80 % busy.
_LARGE_LEASES_MAX = 75
_TIME = struct.Struct(">d")
_MS = 1000.0
# Makes orgs that each have a queue of the same name, with one job that is due `in_s` seconds from now.
_FILL = (
    "INSERT INTO windrow.org (org, slot) SELECT %(name)s || n, 0 FROM generate_series(1, %(orgs)s) AS n",
    "INSERT INTO windrow.queue_name (queue) VALUES (%(name)s) ON CONFLICT DO NOTHING",
    "INSERT INTO windrow.queue (name_id, org_id, org, queue, slot) "
    "SELECT n.name_id, o.org_id, o.org, n.queue, 0 FROM windrow.org o, windrow.queue_name n "
    "WHERE starts_with(o.org, %(name)s) AND n.queue = %(name)s",
    "INSERT INTO windrow.job (id, queue_id, run_at, visible_at, priority, kind, payload) "
    "SELECT (lpad(to_hex((extract(epoch FROM now()) * 1000)::bigint), 12, '0') || '7000' || '8' || "
    "lpad(to_hex(%(first)s + o.org_id), 15, '0'))::uuid, q.queue_id, due.at, due.at, 5, 'no-op', '\\x00' "
    "FROM windrow.queue q JOIN windrow.org o USING (org_id), "
    "LATERAL (SELECT now() + %(in_s)s * interval '1 s' AS at) due WHERE q.queue = %(name)s",
)


# Inserts more jobs into the only queue of one org.
_FILL_LARGE = (
    "INSERT INTO windrow.job (id, queue_id, run_at, visible_at, priority, kind, payload) "
    "SELECT (lpad(to_hex((extract(epoch FROM now()) * 1000)::bigint), 12, '0') || '7000' || '8' || "
    "lpad(to_hex(%(first)s + n), 15, '0'))::uuid, q.queue_id, now(), now(), 5, 'no-op', '\\x00' "
    "FROM windrow.queue q, generate_series(1, %(jobs)s) n WHERE q.org = %(org)s"
)


class Beside(enum.Enum):
    """What the small orgs share the places with."""

    NOTHING = "alone"
    LIMITED = f"beside a backlog of which at most {_LARGE_LEASES_MAX} jobs are leased"
    BACKLOG = "beside a backlog that takes all places"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    seconds: float = 60.0
    # How many jobs the large org has.
    backlog: int = 1_000_000
    orgs: int = 100_000
    jobs: int = 20_000
    runs: int = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Pickup:
    run: int
    beside: Beside
    p50_ms: float
    p99_ms: float
    jobs: int
    large_jobs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    run: int
    what: str
    jobs: int
    us_a_job: float
    router_cpu_us_a_job: float


async def measure(plan: Plan, bench: Bench) -> Found:
    pickups: list[Pickup] = []
    costs: list[Cost] = []
    async with bench.stage(shards=1, routers=1) as stage:
        for run in range(1, plan.runs + 1):
            for beside in list(Beside)[:: 1 if run % 2 else -1]:
                pickups += [await _pickup(plan, bench, stage, run, beside=beside)]
        for run in range(1, plan.runs + 1):
            costs += await _costs(plan, bench, stage, run)
    return Found(
        scenario="fair",
        plan=asdict(plan),
        samples=[
            *({"sample": "pickup", **asdict(one), "beside": one.beside.name.lower()} for one in pickups),
            *({"sample": "cost", **asdict(one)} for one in costs),
        ],
        tables=[_pickup_table(plan, pickups), _cost_table(plan, costs)],
    )


# ── Pickup ───────────────────────────────────────────────────────────────────────────────────────────────────────────


async def _pickup(plan: Plan, bench: Bench, stage: Stage, run: int, *, beside: Beside) -> Pickup:
    queue = f"pickup-{run}-{beside.name.lower()}"
    large = f"{queue}-large"
    waited_ms: list[float] = []
    large_jobs = 0
    (dsn,) = stage.dsns.values()
    async with AsyncExitStack() as stack:
        stub = queue_pb2_grpc.QueueStub(await _channel(stack, stage))
        if beside is not Beside.NOTHING:
            await _enqueue(stub, large, queue, 1)
            await asyncio.to_thread(_fill_large, dsn, large, plan.backlog, run)
        if beside is Beside.LIMITED:
            async with windrow.Client(stage.routers.address, org=large) as client:
                await client.set_limit(LimitMeasure.IN_FLIGHT, _LARGE_LEASES_MAX)
        call = stub.Consume()
        await call.write(_start(queue, credit=_PLACES))
        writing = asyncio.Lock()
        measured_s = time.monotonic() + 3.0

        async def work(job: job_pb2.LeasedJob, arrived_s: float) -> None:
            nonlocal large_jobs
            if job.org == large:
                large_jobs += 1
            elif arrived_s > measured_s:
                waited_ms.append((arrived_s - _TIME.unpack(job.payload)[0]) * _MS)
            await asyncio.sleep(_HANDLER_S)
            # gRPC allows only one write at the same time. While this task waited, the run may have ended the stream.
            async with writing:
                if call.done():
                    return
                await call.write(
                    queue_pb2.ConsumeRequest(request_id=1, credit=1, acks=[queue_pb2.Ack(lease=job.lease)])
                )

        async def consume(group: asyncio.TaskGroup) -> None:
            async for message in call:
                arrived_s = time.monotonic()
                for job in message.jobs:
                    group.create_task(work(job, arrived_s))

        async def produce_small(at: int) -> None:
            second_s = time.monotonic()
            while True:
                await asyncio.sleep(second_s + random.random() - time.monotonic())
                await _enqueue(stub, f"{queue}-{at}", queue, 1)
                second_s += 1.0

        async def produce_large() -> None:
            while True:
                # These are more jobs than the consumers can finish, so the backlog grows.
                await _enqueue(stub, large, queue, 10)
                await asyncio.sleep(1.0)

        try:
            async with asyncio.timeout(plan.seconds + 3.0), asyncio.TaskGroup() as group:
                if beside is not Beside.NOTHING:
                    for _ in range(_PRODUCERS):
                        group.create_task(produce_large())
                group.create_task(consume(group))
                for at in range(_SMALL_ORGS):
                    group.create_task(produce_small(at))
        except TimeoutError:
            call.cancel()
    await asyncio.to_thread(_delete, dsn, queue)
    ordered = sorted(waited_ms)
    found = Pickup(
        run=run,
        beside=beside,
        p50_ms=percentile(ordered, 0.5),
        p99_ms=percentile(ordered, 0.99),
        jobs=len(ordered),
        large_jobs=large_jobs,
    )
    bench.say(f"{beside.value}: p50 {found.p50_ms:.1f} ms, p99 {found.p99_ms:.1f} ms")
    return found


# ── Cost ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


async def _costs(plan: Plan, bench: Bench, stage: Stage, run: int) -> list[Cost]:
    """Measures three cases: one org has all the jobs; 100,000 orgs have one job each; ten orgs have all the jobs, and
    100,000 other orgs have jobs that are due in an hour."""
    costs: list[Cost] = []
    (dsn,) = stage.dsns.values()
    for what, orgs, in_s, ready in (
        ("one org", 0, 0, 1),
        (f"{plan.orgs:,} ready orgs", plan.orgs, -1, 0),
        (f"10 ready of {plan.orgs:,}", plan.orgs, 3600, 10),
    ):
        queue = f"cost-{run}-{orgs}-{in_s}"
        if orgs:
            await asyncio.to_thread(_fill, dsn, queue, orgs, in_s, run)
        async with AsyncExitStack() as stack:
            stub = queue_pb2_grpc.QueueStub(await _channel(stack, stage))
            for at in range(ready):
                for _ in range(plan.jobs // ready // 1000):
                    await _enqueue(stub, f"{queue}-ready-{at}", queue, 1000)
            jobs = plan.jobs // 1000 // max(ready, 1) * max(ready, 1) * 1000
            costs.append(await _drain(stub, stage, queue, jobs, what, run))
        bench.say(f"{what}: {costs[-1].us_a_job:,.0f} µs a job")
        await asyncio.to_thread(_delete, dsn, queue)
    return costs


async def _drain(stub: queue_pb2_grpc.QueueAsyncStub, stage: Stage, queue: str, jobs: int, what: str, run: int) -> Cost:
    """Takes and acks `jobs` jobs, as fast as one stream can. The time begins with the first job, so it excludes the
    walk that finds the orgs."""
    cpu_before = began_s = 0.0
    got = 0
    call = stub.Consume()
    await call.write(_start(queue, credit=1000))
    async for message in call:
        if not message.jobs:
            continue
        if not began_s:
            began_s, cpu_before = time.monotonic(), _router_cpu_s(stage)
        got += len(message.jobs)
        if got >= jobs:
            break
        acks = [queue_pb2.Ack(lease=job.lease) for job in message.jobs]
        await call.write(queue_pb2.ConsumeRequest(request_id=got, credit=len(acks), acks=acks))
    took_s = time.monotonic() - began_s
    call.cancel()
    cpu_s = _router_cpu_s(stage) - cpu_before
    return Cost(run=run, what=what, jobs=got, us_a_job=took_s / got * 1e6, router_cpu_us_a_job=cpu_s / got * 1e6)


def _router_cpu_s(stage: Stage) -> float:
    times = [psutil.Process(pid).cpu_times() for pid in stage.routers.pids()]
    return sum(one.user + one.system for one in times)


def _fill(dsn: str, queue: str, orgs: int, in_s: int, run: int) -> None:
    parameters = {"name": queue, "orgs": orgs, "in_s": in_s, "first": run * 10**9}
    with psycopg.connect(dsn, autocommit=True) as connection:
        for statement in _FILL:
            connection.execute(statement.encode(), parameters)
        connection.execute("ANALYZE windrow.job, windrow.queue, windrow.org")


def _fill_large(dsn: str, org: str, jobs: int, run: int) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(_FILL_LARGE.encode(), {"org": org, "jobs": jobs, "first": run * 10**9})
        connection.execute("VACUUM ANALYZE windrow.job")


def _delete(dsn: str, queue: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(
            "DELETE FROM windrow.job WHERE queue_id IN (SELECT queue_id FROM windrow.queue WHERE queue = %s)", [queue]
        )
        connection.execute("VACUUM ANALYZE windrow.job")


# ── Calls ────────────────────────────────────────────────────────────────────────────────────────────────────────────


async def _channel(stack: AsyncExitStack, stage: Stage) -> grpc.aio.Channel:
    channel = await stack.enter_async_context(grpc.aio.insecure_channel(stage.routers.address))
    await channel.channel_ready()
    return channel


def _start(queue: str, *, credit: int) -> queue_pb2.ConsumeRequest:
    window = Duration(seconds=60)
    start = queue_pb2.ConsumeStart(all_orgs=True, queues=[queue], visibility_window=window, worker="fair")
    return queue_pb2.ConsumeRequest(start=start, credit=credit)


async def _enqueue(stub: queue_pb2_grpc.QueueAsyncStub, org: str, queue: str, count: int) -> None:
    request = queue_pb2.EnqueueRequest(org=org)
    for _ in range(count):
        job = request.jobs.add(id=uuid7())
        job.template.queue, job.template.kind = queue, "no-op"
        job.template.payload = _TIME.pack(time.monotonic())
    await stub.Enqueue(request, timeout=_PATIENCE_S)


# ── Tables ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _pickup_table(plan: Plan, pickups: Sequence[Pickup]) -> Table:
    rows: list[tuple[str, ...]] = []
    for beside in Beside:
        own = [one for one in pickups if one.beside is beside]
        rows.append(
            (
                beside.value,
                spread(one.p50_ms for one in own).text(".1f"),
                spread(one.p99_ms for one in own).text(".1f"),
                f"{sum(one.jobs for one in own):,}",
                f"{sum(one.large_jobs for one in own):,}",
            )
        )
    return Table(
        title="Pickup of the jobs of 50 small orgs",
        head=("", "p50, ms", "p99, ms", "their jobs", "jobs of the large org"),
        rows=rows,
        note=f"Each enqueues a job in each second, at a random moment of it. A job takes {_HANDLER_S:g} s; there are "
        f"{_PLACES} places. The large org has {plan.backlog:,} jobs, and {_PRODUCERS} producers add to them. From the "
        "call of the enqueue to the arrival at the consumer. "
        f"Medians of {plan.runs} runs of {plan.seconds:g} s (least – greatest).",
    )


def _cost_table(plan: Plan, costs: Sequence[Cost]) -> Table:
    rows: list[tuple[str, ...]] = []
    base = spread(one.us_a_job for one in costs if one.what == "one org").median
    for what in dict.fromkeys(one.what for one in costs):
        own = [one for one in costs if one.what == what]
        took = spread(one.us_a_job for one in own)
        cpu = spread(one.router_cpu_us_a_job for one in own)
        rows.append((what, took.text(), cpu.text(), f"{took.median / base:.2f}"))
    return Table(
        title="What a job costs a consumer of all orgs",
        head=("", "µs a job", "of it CPU of the router", "against one org"),
        rows=rows,
        note=f"{plan.jobs:,} jobs are taken and acked by one stream with a credit of 1,000. Medians of {plan.runs} "
        "runs (least – greatest).",
    )


def _options(parser: argparse.ArgumentParser) -> None:
    plan = Plan()
    parser.add_argument("--seconds", type=positive, default=plan.seconds, help="of each run of small orgs; 60")
    parser.add_argument("--backlog", type=number(10**7), default=plan.backlog, help="of the large org; 1000000")
    parser.add_argument("--orgs", type=number(10**6), default=plan.orgs, help="that have jobs at the same time; 100000")
    parser.add_argument("--jobs", type=number(10**7), default=plan.jobs, help="that are taken; 20000")
    parser.add_argument("--runs", type=number(100), default=plan.runs, help="of each; 3")


SCENARIO = Scenario(
    help="consumers of all orgs: small orgs beside a backlog, and the cost of a job with 100,000 orgs",
    options=_options,
    plan=lambda given: Plan(
        seconds=given.seconds, backlog=given.backlog, orgs=given.orgs, jobs=given.jobs, runs=given.runs
    ),
    measure=measure,
    full=lambda _: Plan(),
    quick=None,
)
