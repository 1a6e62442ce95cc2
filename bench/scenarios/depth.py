"""Measures whether a dequeue takes longer when the same tables hold many other jobs, compared with an empty cluster.
The tables first hold a million finished jobs, then also a million scheduled jobs, and then also a million ready
jobs."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import psycopg

from bench.arguments import add_runs
from bench.payloads import stamped
from bench.probe import Compared, Probe, compare, open_probe, table
from bench.report import Found
from bench.scenario import Bench, Scenario
from bench.systems.on_routers import QUEUE
from proof.arguments import number

_CONNECTIONS = 1
_WARM = 100

# Inserts `count` jobs in one queue of one org. Their rows are as an enqueue would have left them; those of finished
# jobs are as an enqueue, a claim and an ack would have left them.
_LIVE = """
INSERT INTO windrow.job (id, queue_id, kind, payload, priority, run_at, visible_at, enqueued_at)
SELECT
    {id}, %(queue_id)s, 'no-op', %(payload)s::bytea, 5, due, due, due - interval '1 minute'
FROM generate_series(1, %(count)s) AS n
CROSS JOIN LATERAL (SELECT now() + ({due}) AS due) d
"""
_FINISHED = """
INSERT INTO windrow.finished (
    id, queue_id, enqueued_at, run_at, finished_at, lease, leased_at, priority, attempt, state, kind, payload, worker,
    retention
)
SELECT
    {id}, %(queue_id)s, now(), now(), now(), n, now(), 5, 1, 'succeeded', 'no-op', %(payload)s::bytea, 'bench', 30
FROM generate_series(1, %(count)s) AS n
"""
# A UUIDv7 of this moment.
_ID = """(
    lpad(to_hex((extract(epoch FROM clock_timestamp()) * 1000)::bigint), 12, '0') || '7'
    || substr(md5(n::text || %(salt)s), 1, 3) || '8' || substr(md5(n::text || %(salt)s), 4, 15)
)::uuid"""
_FILLS: Mapping[str, str] = {
    "finished": _FINISHED.format(id=_ID),
    "scheduled": _LIVE.format(id=_ID, due="interval '1 day' + n * interval '1 millisecond'"),
    "ready": _LIVE.format(id=_ID, due="(n - %(count)s - 60000) * interval '1 millisecond'"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    jobs: int = 1_000_000
    # How many jobs each call has, and how many calls each run has.
    batch: int = 10
    calls: int = 1000
    runs: int = 5


async def measure(plan: Plan, bench: Bench) -> Found:
    samples: list[Compared] = []
    async with (
        bench.stage(shards=1, routers=_CONNECTIONS) as empty,
        bench.stage(shards=1, routers=_CONNECTIONS) as deep,
        open_probe(empty) as one,
        open_probe(deep) as other,
    ):
        depth = "nothing"
        for fill in (None, *_FILLS):
            if fill is not None:
                depth = fill if depth == "nothing" else f"{depth} + {fill}"
                bench.say(f"filling {plan.jobs:,} {fill} jobs in")
                await asyncio.to_thread(_fill, other, fill, plan.jobs)
            for probe in (one, other):
                await probe.cycles(plan.batch, _WARM)
            for run in range(1, plan.runs + 1):
                sample = await compare(other, one, depth=depth, run=run, batch=plan.batch, calls=plan.calls)
                samples.append(sample)
                bench.say(str(sample))
    return Found(
        scenario="depth",
        plan=asdict(plan),
        samples=[asdict(sample) for sample in samples],
        tables=[
            table(
                samples,
                title=f"Claims and acks of {plan.batch} beside {plan.jobs:,} jobs of each sort in the same queue, ms",
                note="One caller; medians over runs. The jobs are filled in by SQL, past the router, and stay from row "
                "to row.",
            )
        ],
    )


def _fill(probe: Probe, what: str, count: int) -> None:
    """Inserts jobs into the probed queue by SQL, without a router, and adds them to the books."""
    with psycopg.connect(probe.dsn) as connection:
        row = connection.execute(
            "SELECT queue_id FROM windrow.queue WHERE org = %s AND queue = %s", [probe.org, QUEUE]
        ).fetchone()
        assert row is not None
        parameters = {"queue_id": row[0], "count": count, "payload": stamped(1)[0], "salt": what}
        connection.execute(_FILLS[what].encode(), parameters)
        connection.execute(
            "INSERT INTO windrow.tally (org_id, accepted) SELECT (%s & 4294967295)::integer, %s", [row[0], count]
        )
    with psycopg.connect(probe.dsn, autocommit=True) as connection:
        connection.execute("VACUUM ANALYZE windrow.job")
        connection.execute("ANALYZE windrow.finished")
        connection.execute("VACUUM windrow.finished")


def _options(parser: argparse.ArgumentParser) -> None:
    plan = Plan()
    parser.add_argument("--jobs", type=number(10**8), default=plan.jobs, help="of each sort; 1000000")
    parser.add_argument("--batch", type=number(1000), default=plan.batch, help="jobs a call; 10")
    parser.add_argument("--calls", type=number(10**6), default=plan.calls, help="of a run; 1000")
    add_runs(parser, plan.runs)


SCENARIO = Scenario(
    help="a dequeue's time beside millions of finished, scheduled and ready jobs, against an empty cluster",
    options=_options,
    plan=lambda given: Plan(jobs=given.jobs, batch=given.batch, calls=given.calls, runs=given.runs),
    measure=measure,
    full=lambda _: Plan(calls=500),
    quick=None,
)
