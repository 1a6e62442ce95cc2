"""Measures whether a shard with ten million finished jobs answers as fast as an empty shard, and what it costs to turn
a day cold, and to drop it."""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import psycopg

from archiver.run import Pass
from archiver.service import archive_once
from bench import demands
from bench.arguments import add_runs
from bench.demands import at_most
from bench.history import fill_day
from bench.probe import Compared, Probe, compare, open_probe, ratio_to_empty, table
from bench.report import Found, Plot
from bench.scenario import Bench, Scenario
from bench.spread import spread
from bench.stage import Stage
from bench.system import Wrong
from bench.systems.on_routers import QUEUE
from proof.arguments import number
from proof.table import Table
from shard.history import days
from shard.history.days import Day
from shard.placement.cluster_file import read_cluster
from shard.postgres.pool import Database
from shard.vocabulary import ShardName

_API_BATCH = 100
# The age and the retention of the jobs, in days. The retention is longer, so that no day is dropped too early.
_DAYS_AGO, _RETENTION = 40, 90
# The tables that claims and acks touch: live jobs, books, names, and the days that are not over.
_HOT = """
SELECT sum(pg_total_relation_size(c.oid))::bigint
FROM pg_class c
WHERE c.relnamespace = 'windrow'::regnamespace AND c.relkind = 'r'
    AND (c.relname IN ('job', 'dead', 'dedup', 'tally', 'queue', 'org', 'queue_name', 'owned_slot')
        OR c.relname ~ '^finished_')
"""
_DISK = "SELECT pg_database_size(current_database())"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    # The shard is measured with each of these numbers of finished jobs, one after another.
    depths: tuple[int, ...] = (0, 1_000_000, 10_000_000)
    # How many of the jobs at the greatest depth are enqueued and acked through the API. SQL inserts the other jobs.
    api: int = 100_000
    batch: int = 10
    calls: int = 1000
    runs: int = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    depth: int
    hot_bytes: int
    empty_hot_bytes: int
    whole_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """How long it took to turn a day of `jobs` jobs cold, and to drop it."""

    jobs: int
    bytes: int
    pass_s: float
    locked_ms: float
    wal_bytes: int
    drop_s: float
    drop_locked_ms: float
    disk_back: float


async def measure(plan: Plan, bench: Bench) -> Found:
    samples: list[Compared] = []
    sizes: list[Size] = []
    turns: list[Turn] = []
    async with (
        bench.stage(shards=1, routers=1) as empty,
        bench.stage(shards=1, routers=1) as deep,
        open_probe(empty) as one,
        open_probe(deep) as other,
    ):
        probes = (one, other)
        for depth in plan.depths:
            cold: tuple[Day, Pass, int] | None = None
            api = plan.api if depth == max(plan.depths) else 0
            if depth:
                cold = await _history(deep, probes[1], depth - api, bench)
            # Run the same number of jobs through both clusters, so that the days that are not over have equally many
            # jobs in both.
            for probe in probes:
                await _work(probe, api)
                await asyncio.to_thread(_settle, probe)
            for run in range(1, plan.runs + 1):
                sample = await compare(other, one, depth=depth, run=run, batch=plan.batch, calls=plan.calls)
                samples.append(sample)
                bench.say(str(sample))
            hot = [await asyncio.to_thread(probe.number, _HOT) for probe in probes]
            whole = await asyncio.to_thread(probes[1].number, _DISK)
            sizes.append(Size(depth=depth, hot_bytes=hot[1], empty_hot_bytes=hot[0], whole_bytes=whole))
            if cold is not None:
                turns.append(await _drop(probes[1], cold))
    return Found(
        scenario="archive",
        plan=asdict(plan),
        samples=[*map(asdict, samples), *map(asdict, sizes), *map(asdict, turns)],
        tables=[
            demands.table("A shard that has finished many jobs", _demands(plan, samples, sizes, turns)),
            table(
                samples,
                title=f"Claims and acks of {plan.batch} jobs beside finished ones, ms",
                note="One caller, through a router; medians over runs, and of the runs' own ratios. The history is "
                f"filled in by SQL and turned cold by one pass of the archiver, but for {plan.api:,} jobs of the "
                "deepest, which both clusters have had enqueued, leased and acked through the API.",
            ),
            _sizes(sizes),
            _turns(turns),
        ],
        plots=[_plot(samples, sizes)],
    )


async def _history(stage: Stage, probe: Probe, count: int, bench: Bench) -> tuple[Day, Pass, int]:
    """Inserts a day of `count` finished jobs, and turns it cold with one pass of the archiver. Returns the day, the
    pass, and the WAL bytes that the pass wrote."""
    bench.say(f"{count:,} finished jobs of one day")
    day = await asyncio.to_thread(
        fill_day, probe.dsn, org=probe.org, queue=QUEUE, days_ago=_DAYS_AGO, retention=_RETENTION, count=count
    )
    await asyncio.to_thread(_settle, probe)
    before = await asyncio.to_thread(probe.number, "SELECT pg_current_wal_insert_lsn() - '0/0'")
    ((_, done),) = (await archive_once(read_cluster(stage.cluster_file.path), stop=asyncio.Event())).items()
    if not isinstance(done, Pass) or [aged.jobs for aged in done.turned_cold] != [count]:
        raise Wrong(f"the archiver's pass was to turn one day of {count:,} jobs cold: {done}")
    bench.say(str(done))
    after = await asyncio.to_thread(probe.number, "SELECT pg_current_wal_insert_lsn() - '0/0'")
    return day, done, after - before


async def _drop(probe: Probe, cold: tuple[Day, Pass, int]) -> Turn:
    day, done, wal = cold
    (aged,) = done.turned_cold
    database = Database(ShardName("s1"), probe.dsn, connections=1, may_scan=True)
    await database.open()
    try:
        before = await asyncio.to_thread(probe.number, _DISK)
        began_s = time.monotonic()
        dropped = await days.drop(database, day)
        drop_s = time.monotonic() - began_s
        after = await asyncio.to_thread(probe.number, _DISK)
    finally:
        await database.close()
    return Turn(
        jobs=aged.jobs,
        bytes=aged.bytes,
        pass_s=done.seconds,
        locked_ms=aged.locked_s * 1000,
        wal_bytes=wal,
        drop_s=drop_s,
        drop_locked_ms=dropped.locked_s * 1000,
        disk_back=(before - after) / dropped.bytes,
    )


def _settle(probe: Probe) -> None:
    """Vacuums, so that the measurement does not include the cleanup of earlier work."""
    with psycopg.connect(probe.dsn, autocommit=True) as connection:
        connection.execute("VACUUM ANALYZE windrow.job")
        connection.execute("VACUUM windrow.tally")


async def _work(probe: Probe, jobs: int) -> None:
    """Enqueues, leases and acks `jobs` jobs."""
    await probe.cycles(_API_BATCH, jobs // _API_BATCH)


def _demands(
    plan: Plan, samples: Sequence[Compared], sizes: Sequence[Size], turns: Sequence[Turn]
) -> list[demands.Demand]:
    deepest = max(plan.depths)
    last = [sample for sample in samples if sample.depth == deepest]
    (size,) = [one for one in sizes if one.depth == deepest]
    turn = max(turns, key=lambda one: one.jobs)
    return [
        at_most(
            f"hot tables and indexes with {deepest:,} finished jobs ÷ without",
            size.hot_bytes / size.empty_hot_bytes,
            1.1,
        ),
        at_most("claim p99 there ÷ empty", ratio_to_empty(last, "claim", 1).median, 1.2),
        at_most("ack p99 there ÷ empty", ratio_to_empty(last, "ack", 1).median, 1.2),
        at_most(f"drop of a day of {turn.jobs:,} jobs", turn.drop_s, 1, "s"),
        at_most("disk that the drop has not given back", max(0.0, 1 - turn.disk_back) * 100, 1, "%"),
        at_most("for which enqueues and acks may have waited, turning it cold", turn.locked_ms, 50, "ms"),
    ]


def _sizes(sizes: Sequence[Size]) -> Table:
    return Table(
        title="Sizes, MiB",
        head=("finished", "what claims and acks touch", "the same, empty cluster", "the whole database"),
        rows=[
            (
                f"{one.depth:,}",
                *(f"{size / 2**20:,.1f}" for size in (one.hot_bytes, one.empty_hot_bytes, one.whole_bytes)),
            )
            for one in sizes
        ],
        note="job, dead, dedup, tally, queue, org and finished jobs of days that are not over; with their indexes.",
    )


def _turns(turns: Sequence[Turn]) -> Table:
    return Table(
        title="A day turned cold, and dropped",
        head=(
            *("jobs", "MiB", "the pass, s", "jobs/s", "WAL bytes a job", "locked, ms"),
            *("the drop, s", "locked, ms", "of its disk given back"),
        ),
        rows=[
            (
                *(f"{one.jobs:,}", f"{one.bytes / 2**20:,.0f}", f"{one.pass_s:.2f}", f"{one.jobs / one.pass_s:,.0f}"),
                *(f"{one.wal_bytes / one.jobs:.1f}", f"{one.locked_ms:.1f}", f"{one.drop_s:.3f}"),
                *(f"{one.drop_locked_ms:.1f}", f"{one.disk_back:.1%}"),
            )
            for one in turns
        ],
        note="WAL: of the whole pass, which makes an index by org for the day. Locked: when enqueues and acks may have "
        "waited.",
    )


def _plot(samples: Sequence[Compared], sizes: Sequence[Size]) -> Plot:
    def curve(verb: str, *, empty: bool) -> list[tuple[float, float]]:
        points: list[tuple[float, float]] = []
        for size in sizes:
            found = [one.empty_ms if empty else one.there_ms for one in samples if one.depth == size.depth]
            points.append((max(size.depth, 1) / 1e6, spread(times[verb][1] for times in found).median))
        return points

    return Plot(
        name="archive-depth",
        title="Claims and acks beside finished jobs",
        x="million finished jobs",
        y="p99, ms",
        lines={
            "claim": curve("claim", empty=False),
            "ack": curve("ack", empty=False),
            "claim, empty cluster": curve("claim", empty=True),
            "ack, empty cluster": curve("ack", empty=True),
        },
        below=[
            Plot(
                name="archive-size",
                title="Sizes",
                x="million finished jobs",
                y="MiB",
                lines={
                    "hot tables and indexes": [(max(one.depth, 1) / 1e6, one.hot_bytes / 2**20) for one in sizes],
                    "the whole database": [(max(one.depth, 1) / 1e6, one.whole_bytes / 2**20) for one in sizes],
                },
                y_log=True,
            )
        ],
    )


def _options(parser: argparse.ArgumentParser) -> None:
    plan = Plan()
    parser.add_argument("--jobs", type=number(10**9), default=max(plan.depths), help="of the deepest; 10000000")
    parser.add_argument("--api", type=number(10**8), default=plan.api, help="of them through the API; 100000")
    parser.add_argument("--batch", type=number(1000), default=plan.batch, help="jobs a call; 10")
    parser.add_argument("--calls", type=number(10**6), default=plan.calls, help="of a run; 1000")
    add_runs(parser, plan.runs)


def _plan(given: argparse.Namespace) -> Plan:
    return Plan(
        depths=(0, given.jobs // 10, given.jobs),
        api=min(given.api, given.jobs // 2),
        batch=given.batch,
        calls=given.calls,
        runs=given.runs,
    )


SCENARIO = Scenario(
    help="claims and acks beside ten million finished jobs, and what it takes to turn a day cold and to drop it",
    options=_options,
    plan=_plan,
    measure=measure,
    full=lambda _: Plan(depths=(0, 1_000_000), calls=500),
    quick=None,
)
