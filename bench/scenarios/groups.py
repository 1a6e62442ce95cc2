"""Measures the time of a dequeue while a million jobs of the queue wait for a slot of their group. `./run bench
throughput --beside groups` measures what groups cost when all jobs run."""

from __future__ import annotations

import argparse
import asyncio
import secrets
import time
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass

import grpc
import psycopg

from bench.arguments import add_runs
from bench.payloads import stamped
from bench.report import Found
from bench.scenario import Bench, Scenario
from bench.spread import Spread, percentile, spread
from bench.stage import Stage
from bench.systems.on_routers import CALL_S_MAX, QUEUE
from proof.arguments import number
from proof.table import Table
from windrow import uuid7
from windrow.v1 import admin_pb2, admin_pb2_grpc, queue_pb2, queue_pb2_grpc

_WARM = 50
# Inserts jobs of one group, which wait. The triggers are disabled meanwhile: otherwise the triggers would give the
# group's only slot to the first of these jobs, although a leased job has that slot.
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
    runs: int = 7
    waiting: int = 1_000_000
    calls: int = 1_000
    routers: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Claims:
    waiting: int
    run: int
    p50_ms: float
    p99_ms: float


async def measure(plan: Plan, bench: Bench) -> Found:
    async with bench.stage(shards=1, routers=plan.routers) as stage, AsyncExitStack() as stack:
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(stage.routers.address))
        claims = await _claims(plan, bench, stage, channel)
    return Found(
        scenario="groups",
        plan=asdict(plan),
        samples=[asdict(one) for one in claims],
        tables=[_claims_table(plan, claims)],
    )


async def _create(channel: grpc.aio.Channel) -> str:
    """Creates a queue in a new org, and returns the org."""
    org = f"bench-{secrets.token_hex(6)}"
    request = admin_pb2.CreateQueueRequest(org=org, queue=QUEUE)
    await admin_pb2_grpc.AdminStub(channel).CreateQueue(request, timeout=CALL_S_MAX)
    return org


async def _claims(plan: Plan, bench: Bench, stage: Stage, channel: grpc.aio.Channel) -> list[Claims]:
    """Measures dequeues of one job, in turns: from a queue in which many jobs wait, and from a queue in which no job
    waits."""
    orgs = {0: await _create(channel), plan.waiting: await _create(channel)}
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
    parser.add_argument("--waiting", type=number(10**8), default=plan.waiting, help="jobs that wait; 1000000")
    parser.add_argument("--calls", type=number(10**6), default=plan.calls, help="dequeues of one job; 1000")
    parser.add_argument("--routers", type=number(64), default=plan.routers, help="router processes; 1")
    add_runs(parser, plan.runs)


SCENARIO = Scenario(
    help="how long a dequeue takes beside a million jobs that wait for a slot of their group",
    options=_options,
    plan=lambda given: Plan(
        runs=given.runs,
        waiting=given.waiting,
        calls=given.calls,
        routers=given.routers,
    ),
    measure=measure,
    full=lambda _: Plan(runs=3, calls=300),
    quick=None,
)
