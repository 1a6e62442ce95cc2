"""Measures schedules: how late runs are stored if thousands of them are due in the same second under load, with and
without jitter; how late the runs of a single schedule are; and what a hundred thousand schedules cost while none is
due."""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import asdict, dataclass

import grpc
import psycopg
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from bench.meter import Spent
from bench.report import Found
from bench.scenario import Bench, Scenario
from bench.spread import spread
from bench.stage import Stage
from bench.systems.on_routers import QUEUE
from proof.arguments import number, positive
from proof.table import Table
from windrow import uuid7
from windrow.v1 import job_pb2, queue_pb2, queue_pb2_grpc, schedules_pb2, schedules_pb2_grpc

_PROCESSES = 2
_ORGS = 10
_BATCH = 10
_AHEAD_S = 5
_PATIENCE_S = 60.0
# An org's schedules are copies of a schedule that a call created.
_COPY = """
INSERT INTO windrow.schedule (
    id, org_id, name, cron, interval_us, once_at, zone, jitter_us, overlap, catch_up, note, declared_by, queue, kind,
    payload, next_at, wake_at
)
SELECT
    gen_random_uuid(), s.org_id, s.name || '-' || n, s.cron, s.interval_us, s.once_at, s.zone, s.jitter_us, s.overlap,
    s.catch_up, s.note, s.declared_by, s.queue, s.kind, s.payload, s.next_at,
    -- A router that looks at them before knows the jitter of each.
    CASE WHEN s.jitter_us = 0 THEN s.next_at ELSE s.next_at - interval '3 s' END
FROM windrow.schedule s CROSS JOIN generate_series(2, %s) n
WHERE s.name = %s
"""
_LATENESS = """
SELECT
    extract(epoch FROM j.enqueued_at)::float8 - (j.scheduled_run::jsonb ->> 'at')::float8 / 1e6
FROM windrow.job j
WHERE j.scheduled_run::jsonb ->> 'schedule' LIKE %s
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    schedules: int = 10_000
    jitter_s: int = 10
    per_s: float = 1000.0
    idle: int = 100_000
    seconds: float = 20.0
    runs: int = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Late:
    """How late the jobs of one case were stored, in seconds after the nominal times, by the shard's clock."""

    case: str
    run: int
    jobs: int
    p50_s: float
    p99_s: float
    last_s: float
    # How many jobs a second the load enqueued during this case.
    load_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Idle:
    schedules: int
    seconds: float
    spent: Spent


async def measure(plan: Plan, bench: Bench) -> Found:
    late: list[Late] = []
    idle: list[Idle] = []
    async with bench.stage(shards=1, routers=_PROCESSES) as stage, AsyncExitStack() as stack:
        options = [("grpc.use_local_subchannel_pool", 1)]
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(stage.routers.address, options=options))
        await channel.channel_ready()
        for run in range(1, plan.runs + 1):
            for case, jitter_s, per_s in (
                ("at once, no load", 0, 0.0),
                ("at once", 0, plan.per_s),
                (f"within {plan.jitter_s} s", plan.jitter_s, plan.per_s),
            ):
                async with _load(channel, per_s) as enqueued:
                    late.append(found := await _due(stage, channel, plan, case, jitter_s, enqueued, run))
                bench.say(f"{case}: p50 {found.p50_s:.3f} s, p99 {found.p99_s:.3f} s, last {found.last_s:.3f} s")
        late.append(await _few(stage, channel, plan))
        for schedules in (0, plan.idle):
            if schedules:
                await _create(channel, stage, "idle", f"idle-{schedules}", schedules, at_s=int(time.time()) + 10**8)
            clients = await stage.clients("windrow", servers=[stage.routers], callers=1)
            for _ in range(plan.runs):
                before, began_s = stage.spent(stage.routers, workers=clients), time.monotonic()
                await asyncio.sleep(plan.seconds)
                spent = stage.spent(stage.routers, workers=clients) - before
                idle.append(Idle(schedules=schedules, seconds=time.monotonic() - began_s, spent=spent))
            await stage.drop("windrow")
    return Found(
        scenario="schedules",
        plan=asdict(plan),
        samples=[
            *({"sample": "late", **asdict(one)} for one in late),
            *({"sample": "idle", **asdict(one)} for one in idle),
        ],
        tables=[_late_table(plan, late), _idle_table(idle)],
    )


async def _create(
    channel: grpc.aio.Channel, stage: Stage, org: str, name: str, count: int, *, at_s: int, jitter_s: int = 0
) -> None:
    """Creates `count` schedules of one org. Each of them fires once, at `at_s`."""
    spec = schedules_pb2.ScheduleSpec(at=Timestamp(seconds=at_s), jitter=Duration(seconds=jitter_s))
    request = schedules_pb2.CreateScheduleRequest(
        org=org, name=name, spec=spec, job=job_pb2.JobTemplate(queue="due", kind="no-op", payload=bytes(200))
    )
    await schedules_pb2_grpc.SchedulesStub(channel).CreateSchedule(request, timeout=_PATIENCE_S)
    (dsn,) = stage.dsns.values()
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
        await connection.execute(_COPY, (count, name))


async def _due(
    stage: Stage,
    channel: grpc.aio.Channel,
    plan: Plan,
    case: str,
    jitter_s: int,
    enqueued: list[int],
    run: int,
) -> Late:
    name = f"{case.replace(' ', '-').replace(',', '')}-{run}"
    at_s = int(time.time()) + _AHEAD_S + 10
    for org in range(_ORGS):
        await _create(
            channel, stage, f"org-{org}", f"{name}-{org}", plan.schedules // _ORGS, at_s=at_s, jitter_s=jitter_s
        )
    if time.time() > at_s:
        raise RuntimeError("the schedules were due before all of them were there")
    await asyncio.sleep(at_s - time.time() - 1)
    before, began_s = sum(enqueued), time.monotonic()
    found = await _lateness(stage, f"{name}-%", plan.schedules)
    return _late(case, run, found, (sum(enqueued) - before) / (time.monotonic() - began_s))


async def _lateness(stage: Stage, like: str, jobs: int) -> list[float]:
    """Waits until these jobs are stored. Returns how late each job was."""
    (dsn,) = stage.dsns.values()
    deadline_s = time.monotonic() + _PATIENCE_S
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
        while True:
            await asyncio.sleep(1.0)
            rows = await (await connection.execute(_LATENESS, (like,))).fetchall()
            if len(rows) >= jobs:
                return sorted(row[0] for row in rows)
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"only {len(rows):,} of {jobs:,} runs were stored within {_PATIENCE_S:g} s")


async def _few(stage: Stage, channel: grpc.aio.Channel, plan: Plan) -> Late:
    """Measures a schedule that is due each second, without other load."""
    spec = schedules_pb2.ScheduleSpec(interval=Duration(seconds=1), overlap=schedules_pb2.OVERLAP_POLICY_ALLOW)
    job = job_pb2.JobTemplate(queue="due", kind="no-op")
    stub = schedules_pb2_grpc.SchedulesStub(channel)
    request = schedules_pb2.CreateScheduleRequest(org="few", name="few-1", spec=spec, job=job)
    await stub.CreateSchedule(request, timeout=_PATIENCE_S)
    await asyncio.sleep(plan.seconds)
    await stub.DeleteSchedule(schedules_pb2.DeleteScheduleRequest(org="few", name="few-1"), timeout=_PATIENCE_S)
    return _late("one each second", 1, await _lateness(stage, "few-%", 1), 0.0)


def _late(case: str, run: int, found: Sequence[float], load_per_s: float) -> Late:
    return Late(
        case=case,
        run=run,
        jobs=len(found),
        p50_s=found[len(found) // 2],
        p99_s=found[len(found) * 99 // 100],
        last_s=found[-1],
        load_per_s=load_per_s,
    )


@asynccontextmanager
async def _load(channel: grpc.aio.Channel, per_s: float) -> AsyncGenerator[list[int], None]:
    """Enqueues `per_s` jobs a second, and works on them, during this scope. Yields a list to which each enqueue adds
    its number of jobs."""
    stub = queue_pb2_grpc.QueueStub(channel)
    enqueued: list[int] = []

    async def produce() -> None:
        began_s = time.monotonic()
        while True:
            request = queue_pb2.EnqueueRequest(org="load")
            for _ in range(_BATCH):
                job = request.jobs.add(id=uuid7())
                job.template.queue, job.template.kind, job.template.payload = QUEUE, "no-op", bytes(200)
            await stub.Enqueue(request, timeout=_PATIENCE_S)
            enqueued.append(_BATCH)
            await asyncio.sleep(max(0.0, began_s + sum(enqueued) / per_s - time.monotonic()))

    async def work() -> None:
        acks: list[queue_pb2.Ack] = []
        while True:
            request = queue_pb2.DequeueRequest(
                org="load", queues=[QUEUE], max_jobs=100, wait=Duration(seconds=5), acks=acks
            )
            jobs = (await stub.Dequeue(request, timeout=_PATIENCE_S)).jobs
            acks = [queue_pb2.Ack(lease=job.lease) for job in jobs]

    tasks = [asyncio.create_task(produce()), asyncio.create_task(work())] if per_s else []
    try:
        yield enqueued
    finally:
        for task in tasks:
            task.cancel()
        for task in tasks:
            with suppress(asyncio.CancelledError):
                await task


def _late_table(plan: Plan, late: Sequence[Late]) -> Table:
    rows: list[tuple[str, ...]] = []
    for case in dict.fromkeys(one.case for one in late):
        own = [one for one in late if one.case == case]
        rows.append(
            (
                case,
                f"{own[0].jobs:,}",
                *(spread(getattr(one, name) for one in own).text(".3f") for name in ("p50_s", "p99_s", "last_s")),
                spread(one.load_per_s for one in own).text(",.0f"),
            )
        )
    return Table(
        title="How late runs are stored",
        head=("due", "runs", "p50 s", "p99 s", "last s", "load, jobs/s"),
        rows=rows,
        note=f"After the nominal time, by the shard's clock; medians (least – greatest) of {plan.runs} runs. One "
        f"shard, {_PROCESSES} router processes, {_ORGS} orgs.",
    )


def _idle_table(idle: Sequence[Idle]) -> Table:
    rows: list[tuple[str, ...]] = []
    for schedules in dict.fromkeys(one.schedules for one in idle):
        own = [one for one in idle if one.schedules == schedules]
        shares = [
            spread(getattr(one.spent, name) / one.seconds * 100 for one in own) for name in ("router_s", "postgres_s")
        ]
        rows.append((f"{schedules:,}", *(share.text(".2f") for share in shares)))
    return Table(
        title="Schedules of which none is due",
        head=("schedules", "routers, % of a core", "Postgres, % of a core"),
        rows=rows,
        note="Beside finished schedules of the runs before; medians (least – greatest).",
    )


def _options(parser: argparse.ArgumentParser) -> None:
    plan = Plan()
    parser.add_argument("--schedules", type=number(10**6), default=plan.schedules, help="due together; 10000")
    parser.add_argument("--per-s", type=positive, default=plan.per_s, help="jobs/s of the load; 1000")
    parser.add_argument("--idle", type=number(10**7), default=plan.idle, help="schedules that are not due; 100000")
    parser.add_argument("--seconds", type=positive, default=plan.seconds, help="of a run while none is due; 20")
    parser.add_argument("--runs", type=number(100), default=plan.runs, help="3")


SCENARIO = Scenario(
    help="how late runs of schedules are stored, and what schedules cost while none is due",
    options=_options,
    plan=lambda given: Plan(
        schedules=given.schedules, per_s=given.per_s, idle=given.idle, seconds=given.seconds, runs=given.runs
    ),
    measure=measure,
    full=lambda _: Plan(),
    quick=None,
)
