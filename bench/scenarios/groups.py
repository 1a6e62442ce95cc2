"""Measures what groups cost: the whole life of jobs of 1,000 groups, compared with jobs without groups, and the time of
a claim while a million jobs of the queue wait for a slot of their group."""

from __future__ import annotations

import argparse
import asyncio
import secrets
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass

import grpc
import psycopg

from bench.arguments import add_runs
from bench.payloads import stamped
from bench.report import Found
from bench.scenario import Bench, Scenario
from bench.spread import Spread, percentile, ratio, spread
from bench.stage import Stage
from bench.systems.on_routers import CALL_S_MAX, QUEUE
from proof.arguments import number
from proof.table import Table
from windrow import uuid7
from windrow.v1 import admin_pb2, admin_pb2_grpc, queue_pb2, queue_pb2_grpc

# The bar for the ratio of jobs a second with groups to jobs a second without groups.
_BAR = 0.85
_PRODUCERS = 4
_CONSUMERS = 4
_WARM = 50
# How many jobs of a group may be leased. None: the jobs have no groups.
_CASES: Mapping[str, int | None] = {"no groups": None, "k = 1": 1, "k = 3": 3}
# Inserts jobs of one group that wait. The triggers are disabled meanwhile: a leased job has the group's only slot, but
# the triggers would give it to the first of these jobs.
_FILL = """
INSERT INTO windrow.job (id, queue_id, kind, payload, priority, run_at, visible_at, group_key)
SELECT
    (
        lpad(to_hex((extract(epoch FROM clock_timestamp()) * 1000)::bigint), 12, '0') || '7'
        || substr(md5(n::text || 'groups'), 1, 3) || '8' || substr(md5(n::text || 'groups'), 4, 15)
    )::uuid,
    %(queue_id)s, 'no-op', %(payload)s::bytea, 5, now() - interval '1 hour' + n * interval '1 us', 'infinity', 'deep'
FROM generate_series(1, %(jobs)s) AS n
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    jobs: int = 40_000
    groups: int = 1_000
    batch: int = 100
    runs: int = 7
    waiting: int = 1_000_000
    calls: int = 1_000
    routers: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    case: str
    run: int
    # Jobs a second, from the first enqueue to the last ack.
    rate: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Claims:
    waiting: int
    run: int
    p50_ms: float
    p99_ms: float


async def measure(plan: Plan, bench: Bench) -> Found:
    lives: list[Life] = []
    async with bench.stage(shards=1, routers=plan.routers) as stage, AsyncExitStack() as stack:
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(stage.routers.address))
        for run in range(plan.runs + 1):
            # The order alternates, so that no case always comes first. The first run is a warm-up.
            for case in list(_CASES)[:: 1 if run % 2 else -1]:
                life = Life(case=case, run=run, rate=await _live(plan, channel, _CASES[case]))
                if run:
                    lives.append(life)
                    bench.say(f"{case}: {life.rate:,.0f} jobs/s")
                await stage.clear()
        claims = await _claims(plan, bench, stage, channel)
    return Found(
        scenario="groups",
        plan=asdict(plan),
        samples=[
            *({"sample": "life", **asdict(one)} for one in lives),
            *({"sample": "claims", **asdict(one)} for one in claims),
        ],
        tables=[_lives_table(plan, lives), _claims_table(plan, claims)],
    )


async def _create(channel: grpc.aio.Channel, concurrency: int | None) -> str:
    """Creates a queue in a new org, and returns the org."""
    org = f"bench-{secrets.token_hex(6)}"
    config = admin_pb2.QueueConfig(group_concurrency=concurrency)
    request = admin_pb2.CreateQueueRequest(org=org, queue=QUEUE, config=config)
    await admin_pb2_grpc.AdminStub(channel).CreateQueue(request, timeout=CALL_S_MAX)
    return org


async def _live(plan: Plan, channel: grpc.aio.Channel, concurrency: int | None) -> float:
    """Enqueues all jobs, while consumers lease and ack them in batches. Returns jobs a second."""
    org, stub = await _create(channel, concurrency), queue_pb2_grpc.QueueStub(channel)
    next_job, left = 0, plan.jobs
    payload = stamped(1)[0]

    async def produce() -> None:
        nonlocal next_job
        while next_job < plan.jobs:
            request = queue_pb2.EnqueueRequest(org=org)
            for at in range(next_job, min(next_job + plan.batch, plan.jobs)):
                job = request.jobs.add(id=uuid7())
                job.template.queue, job.template.kind, job.template.payload = QUEUE, "no-op", payload
                if concurrency is not None:
                    job.template.group = f"group-{at % plan.groups}"
            next_job += len(request.jobs)
            await stub.Enqueue(request, timeout=CALL_S_MAX)

    async def consume() -> None:
        nonlocal left
        request = queue_pb2.DequeueRequest(org=org, queues=[QUEUE], max_jobs=plan.batch, worker="bench")
        request.wait.FromMilliseconds(500)
        while left > 0:
            jobs = (await stub.Dequeue(request, timeout=CALL_S_MAX)).jobs
            if jobs:
                acks = queue_pb2.AckRequest(org=org, acks=[queue_pb2.Ack(lease=job.lease) for job in jobs])
                await stub.Ack(acks, timeout=CALL_S_MAX)
                left -= len(jobs)

    began_s = time.monotonic()
    ended_s = began_s

    async def consume_all() -> None:
        nonlocal ended_s
        await consume()
        ended_s = max(ended_s, time.monotonic()) if ended_s == began_s else ended_s

    async with asyncio.TaskGroup() as group:
        for _ in range(_PRODUCERS):
            group.create_task(produce())
        for _ in range(_CONSUMERS):
            # The measured time ends when the first consumer finds all jobs acked. Other consumers may still wait for
            # jobs.
            group.create_task(consume_all())
    return plan.jobs / (ended_s - began_s)


async def _claims(plan: Plan, bench: Bench, stage: Stage, channel: grpc.aio.Channel) -> list[Claims]:
    """Measures dequeues of one job, in turns: from a queue in which many jobs wait, and from a queue in which no job
    waits."""
    orgs = {0: await _create(channel, 1), plan.waiting: await _create(channel, 1)}
    stub = queue_pb2_grpc.QueueStub(channel)
    ((_, dsn),) = stage.dsns.items()
    # Take the group's slot, so that the further jobs of the group wait.
    await _enqueue(stub, orgs[plan.waiting], "deep")
    request = queue_pb2.DequeueRequest(org=orgs[plan.waiting], queues=[QUEUE], max_jobs=1, worker="bench")
    request.visibility_window.FromSeconds(36_000)
    await stub.Dequeue(request, timeout=CALL_S_MAX)
    bench.say(f"filling {plan.waiting:,} jobs in that wait")
    await asyncio.to_thread(_fill, dsn, orgs[plan.waiting], plan.waiting)
    found: list[Claims] = []
    for run in range(1, plan.runs + 1):
        took: dict[int, list[float]] = {waiting: [] for waiting in orgs}
        for turn in range(-_WARM, plan.calls):
            for waiting, org in orgs.items():
                await _enqueue(stub, org, f"group-{turn}")
                began_s = time.perf_counter()
                one = queue_pb2.DequeueRequest(org=org, queues=[QUEUE], max_jobs=1, worker="bench")
                (job,) = (await stub.Dequeue(one, timeout=CALL_S_MAX)).jobs
                if turn >= 0:
                    took[waiting].append((time.perf_counter() - began_s) * 1000)
                acks = queue_pb2.AckRequest(org=org, acks=[queue_pb2.Ack(lease=job.lease)])
                await stub.Ack(acks, timeout=CALL_S_MAX)
        for waiting, each in took.items():
            ordered = sorted(each)
            claims = Claims(waiting=waiting, run=run, p50_ms=percentile(ordered, 0.5), p99_ms=percentile(ordered, 0.99))
            found.append(claims)
            bench.say(f"beside {waiting:,} that wait: p50 {claims.p50_ms:.2f} ms, p99 {claims.p99_ms:.2f} ms")
    return found


async def _enqueue(stub: queue_pb2_grpc.QueueAsyncStub, org: str, group: str) -> None:
    request = queue_pb2.EnqueueRequest(org=org)
    job = request.jobs.add(id=uuid7())
    job.template.queue, job.template.kind, job.template.payload = QUEUE, "no-op", stamped(1)[0]
    job.template.group = group
    await stub.Enqueue(request, timeout=CALL_S_MAX)


def _fill(dsn: str, org: str, jobs: int) -> None:
    """Inserts jobs that wait into the queue by SQL, without a router, and adds them to the books."""
    with psycopg.connect(dsn) as connection:
        row = connection.execute(
            "SELECT queue_id FROM windrow.queue WHERE org = %s AND queue = %s", [org, QUEUE]
        ).fetchone()
        assert row is not None
        connection.execute("ALTER TABLE windrow.job DISABLE TRIGGER USER")
        connection.execute(_FILL.encode(), {"queue_id": row[0], "jobs": jobs, "payload": stamped(1)[0]})
        connection.execute("ALTER TABLE windrow.job ENABLE TRIGGER USER")
        connection.execute(
            "INSERT INTO windrow.tally (org_id, accepted) SELECT (%s & 4294967295)::integer, %s", [row[0], jobs]
        )
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("VACUUM ANALYZE windrow.job")


def _lives_table(plan: Plan, lives: list[Life]) -> Table:
    rates = {case: {one.run: one.rate for one in lives if one.case == case} for case in _CASES}
    rows: list[tuple[str, ...]] = []
    for case, own in rates.items():
        share = ratio(own, rates["no groups"])
        rows.append(
            (
                case,
                spread(own.values()).text(),
                "" if share is None else share.text(".2f"),
                "" if share is None or case == "no groups" else ("yes" if share.median >= _BAR else "no"),
            )
        )
    return Table(
        title=f"The whole life of {plan.jobs:,} jobs of {plan.groups:,} groups",
        head=("jobs", "jobs/s", "of those without groups", f"at least {_BAR:g}"),
        rows=rows,
        note=f"Unary calls with up to {plan.batch} jobs: {_PRODUCERS} producers, {_CONSUMERS} consumers, "
        f"{plan.routers} router process(es). Medians over {plan.runs} runs, which take turns.",
    )


def _claims_table(plan: Plan, claims: list[Claims]) -> Table:
    def of(waiting: int, name: str) -> Spread:
        return spread(getattr(one, name) for one in claims if one.waiting == waiting)

    return Table(
        title="A dequeue of one job beside jobs that wait for a slot of their group",
        head=("waiting jobs", "p50 ms", "p99 ms"),
        rows=[
            (f"{waiting:,}", of(waiting, "p50_ms").text(".2f"), of(waiting, "p99_ms").text(".2f"))
            for waiting in sorted({one.waiting for one in claims})
        ],
        note=f"One call after another; {plan.calls:,} of each sort in each of {plan.runs} runs, in turns.",
    )


def _options(parser: argparse.ArgumentParser) -> None:
    plan = Plan()
    parser.add_argument("--jobs", type=number(10**8), default=plan.jobs, help="of a run; 40000")
    parser.add_argument("--groups", type=number(10**6), default=plan.groups, help="of these jobs; 1000")
    parser.add_argument("--batch", type=number(1000), default=plan.batch, help="jobs a call; 100")
    parser.add_argument("--waiting", type=number(10**8), default=plan.waiting, help="jobs that wait; 1000000")
    parser.add_argument("--calls", type=number(10**6), default=plan.calls, help="dequeues of one job; 1000")
    parser.add_argument("--routers", type=number(64), default=plan.routers, help="router processes; 1")
    add_runs(parser, plan.runs)


SCENARIO = Scenario(
    help="what groups cost: the whole life of jobs with and without them, and claims beside a million that wait",
    options=_options,
    plan=lambda given: Plan(
        jobs=given.jobs,
        groups=given.groups,
        batch=given.batch,
        runs=given.runs,
        waiting=given.waiting,
        calls=given.calls,
        routers=given.routers,
    ),
    measure=measure,
    full=lambda _: Plan(runs=3, calls=300),
    quick=None,
)
