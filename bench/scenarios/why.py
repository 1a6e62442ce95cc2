"""Measures how long ExplainJob and ExplainQueue take for an org with a million jobs in one queue, compared with a call
that uses no shard."""

from __future__ import annotations

import argparse
import random
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass

import grpc
import psycopg

from bench.payloads import stamped
from bench.report import Found
from bench.scenario import Bench, Scenario
from bench.spread import percentile
from bench.system import Wrong
from bench.systems.on_routers import CALL_S_MAX, QUEUE
from proof.arguments import number
from proof.table import Table
from windrow.v1 import admin_pb2, admin_pb2_grpc, cause_pb2, queue_pb2, queue_pb2_grpc, server_pb2

# The upper bound for each call's p99.
_BAR_MS = 10.0
_WARM = 50
_LEASED = 200
# The calls choose at random among this many jobs of each of the _SORTS.
_SAMPLE = 1000
# Nine of ten jobs are ready, and the other jobs are scheduled. All priorities occur. The oldest jobs come first.
_FILL = """
INSERT INTO windrow.job (id, queue_id, kind, payload, priority, run_at, visible_at, enqueued_at)
SELECT
    (
        lpad(to_hex((extract(epoch FROM clock_timestamp()) * 1000)::bigint), 12, '0') || '7'
        || substr(md5(n::text || 'why'), 1, 3) || '8' || substr(md5(n::text || 'why'), 4, 15)
    )::uuid,
    %(queue_id)s, 'no-op', %(payload)s::bytea, 1 + n %% 9, due, due, now()
FROM generate_series(1, %(jobs)s) AS n
CROSS JOIN LATERAL (
    SELECT CASE
        WHEN n %% 10 = 0 THEN now() + interval '1 day' + n * interval '1 millisecond'
        ELSE now() - interval '1 hour' + n * interval '1 millisecond'
    END AS due
) d
"""
_SOME = "SELECT id::text FROM windrow.job WHERE queue_id = %s AND {} ORDER BY visible_at {} LIMIT %s"
_SORTS: Mapping[str, tuple[str, str]] = {
    "first": ("lease IS NULL AND visible_at <= now() AND priority = 1", ""),
    "last": ("lease IS NULL AND visible_at <= now() AND priority = 9", "DESC"),
    "scheduled": ("lease IS NULL AND visible_at > now()", ""),
    "leased": ("lease IS NOT NULL", ""),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    jobs: int = 1_000_000
    # How many calls of each kind there are.
    calls: int = 2000
    routers: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    call: str
    # How long each call took, in ms.
    took: list[float]


async def measure(plan: Plan, bench: Bench) -> Found:
    org = f"bench-{secrets.token_hex(6)}"
    async with bench.stage(shards=1, routers=plan.routers) as stage:
        ((_, dsn),) = stage.dsns.items()
        async with grpc.aio.insecure_channel(stage.routers.address) as channel:
            admin, queue = admin_pb2_grpc.AdminStub(channel), queue_pb2_grpc.QueueStub(channel)
            await admin.CreateQueue(admin_pb2.CreateQueueRequest(org=org, queue=QUEUE), timeout=CALL_S_MAX)
            bench.say(f"filling {plan.jobs:,} jobs in")
            _fill(dsn, org, plan.jobs)
            request = queue_pb2.DequeueRequest(org=org, queues=[QUEUE], max_jobs=_LEASED, worker="bench")
            request.visibility_window.seconds = 3600
            await queue.Dequeue(request, timeout=CALL_S_MAX)
            calls = _calls(org, _ids(dsn, org), admin, queue)
            took: dict[str, list[float]] = {name: [] for name in calls}
            # The calls take turns, so that other load on the machine affects all of them.
            for turn in range(-_WARM, plan.calls):
                for name, call in calls.items():
                    began_s = time.perf_counter()
                    await call()
                    if turn >= 0:
                        took[name].append((time.perf_counter() - began_s) * 1000)
    samples = [Sample(call=name, took=found) for name, found in took.items()]
    for sample in samples:
        ordered = sorted(sample.took)
        bench.say(f"{sample.call}: p50 {percentile(ordered, 0.5):.2f} ms, p99 {percentile(ordered, 0.99):.2f} ms")
    return Found(
        scenario="why",
        plan=asdict(plan),
        samples=[asdict(sample) for sample in samples],
        tables=[_table(plan, samples)],
    )


def _calls(
    org: str, ids: Mapping[str, list[str]], admin: admin_pb2_grpc.AdminAsyncStub, queue: queue_pb2_grpc.QueueAsyncStub
) -> dict[str, Callable[[], Awaitable[None]]]:
    luck = random.Random(20_240_229)

    def names(cause: cause_pb2.Cause, *expected: str) -> None:
        if cause.WhichOneof("cause") not in expected:
            raise Wrong(f"{' or '.join(expected)} was expected, and not {cause.WhichOneof('cause')}")

    async def nothing() -> None:
        await queue.GetServerInfo(server_pb2.GetServerInfoRequest(), timeout=CALL_S_MAX)

    async def get() -> None:
        job_id = luck.choice(ids["last"])
        await queue.GetJobs(queue_pb2.GetJobsRequest(org=org, ids=[job_id]), timeout=CALL_S_MAX)

    def job(sort: str, *expected: str) -> Callable[[], Awaitable[None]]:
        async def explain() -> None:
            request = admin_pb2.ExplainJobRequest(org=org, id=luck.choice(ids[sort]))
            names((await admin.ExplainJob(request, timeout=CALL_S_MAX)).causes[0], *expected)

        return explain

    async def explain_queue() -> None:
        request = admin_pb2.ExplainQueueRequest(org=org, queue=QUEUE)
        found = await admin.ExplainQueue(request, timeout=CALL_S_MAX)
        names(found.causes[-1], "scheduled")

    return {
        "GetServerInfo: touches nothing": nothing,
        "GetJobs: one of them": get,
        "ExplainJob: the first ones": job("first", "jobs_ahead", "due"),
        "ExplainJob: those behind all others": job("last", "jobs_ahead"),
        "ExplainJob: a scheduled one": job("scheduled", "scheduled"),
        "ExplainJob: a leased one": job("leased", "leased"),
        "ExplainQueue": explain_queue,
    }


def _queue_id(connection: psycopg.Connection, org: str) -> int:
    row = connection.execute(
        "SELECT queue_id FROM windrow.queue WHERE org = %s AND queue = %s", [org, QUEUE]
    ).fetchone()
    assert row is not None
    return int(row[0])


def _fill(dsn: str, org: str, jobs: int) -> None:
    """Inserts jobs into the queue by SQL, without a router, and adds them to the books."""
    with psycopg.connect(dsn) as connection:
        queue_id = _queue_id(connection, org)
        connection.execute(_FILL.encode(), {"queue_id": queue_id, "jobs": jobs, "payload": stamped(1)[0]})
        connection.execute(
            "INSERT INTO windrow.tally (org_id, accepted) SELECT (%s & 4294967295)::integer, %s", [queue_id, jobs]
        )
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("VACUUM ANALYZE windrow.job")


def _ids(dsn: str, org: str) -> dict[str, list[str]]:
    """Returns the ids of some jobs of each of the _SORTS."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        queue_id = _queue_id(connection, org)
        return {
            sort: [
                job_id
                for (job_id,) in connection.execute(_SOME.format(where, order).encode(), [queue_id, _SAMPLE]).fetchall()
            ]
            for sort, (where, order) in _SORTS.items()
        }


def _table(plan: Plan, samples: list[Sample]) -> Table:
    rows: list[tuple[str, ...]] = []
    for sample in samples:
        ordered = sorted(sample.took)
        shares = [percentile(ordered, share) for share in (0.5, 0.99)]
        rows.append((sample.call, f"{len(ordered):,}", *(f"{took:.2f}" for took in (*shares, ordered[-1]))))
    return Table(
        title=f"Why a job does not run, of {plan.jobs:,} in its queue",
        head=("call", "calls", "p50 ms", "p99 ms", "worst ms"),
        rows=rows,
        note=f"One call after another, {plan.routers} router process(es). Nine of ten jobs are ready, in nine "
        f"priorities, {_LEASED} are leased, the others scheduled. The bar for each p99 is {_BAR_MS:g} ms.",
    )


def _options(parser: argparse.ArgumentParser) -> None:
    plan = Plan()
    parser.add_argument("--jobs", type=number(10**8), default=plan.jobs, help="in the queue; 1000000")
    parser.add_argument("--calls", type=number(10**6), default=plan.calls, help="of each sort; 2000")
    parser.add_argument("--routers", type=number(64), default=plan.routers, help="router processes; 1")


SCENARIO = Scenario(
    help="how long it takes to say why a job or a queue does not run, beside a million jobs",
    options=_options,
    plan=lambda given: Plan(jobs=given.jobs, calls=given.calls, routers=given.routers),
    measure=measure,
    full=lambda _: Plan(calls=500),
    quick=None,
)
