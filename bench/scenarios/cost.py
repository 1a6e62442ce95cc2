"""What one job's whole life costs: CPU time in client, router and Postgres; WAL, commits and dead rows in the
database."""

from __future__ import annotations

import argparse
import asyncio
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from bench.arguments import add_peers, add_processes, add_runs, number, numbers, positive
from bench.meter import COUNTED_S, Written
from bench.rate import Load, Timed, Turn
from bench.report import Found, Table
from bench.scenario import Bench, Scenario
from bench.spread import spread
from bench.systems import LIMIT, WINDROW, load


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    systems: tuple[str, ...] = (WINDROW, LIMIT)
    batches: tuple[int, ...] = (1, 10, 100)
    callers: int = 8
    runs: int = 5
    seconds: float = 2.0
    clients: int = 2
    routers: int = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    system: str
    batch: int
    run: int
    timed: Timed
    written: Written


async def measure(plan: Plan, bench: Bench) -> Found:
    samples: list[Sample] = []
    systems = await bench.ready(plan.systems)
    async with bench.stage(shards=1, routers=plan.routers) as stage:
        turns: dict[str, Turn] = {}
        for system in systems:
            callers = -(-plan.callers // plan.clients)
            addresses = [stage.routers.address] * plan.clients
            clients = await stage.clients(system, addresses=addresses, callers=callers)
            turns[system] = Turn(stage=stage, clients=clients, servers=stage.routers)
        for batch in plan.batches:
            how = Load(batch=batch, callers=plan.callers, workers=plan.callers)
            jobs: dict[str, int] = {}

            async def warm(system: str, _: int, how: Load = how, jobs: dict[str, int] = jobs) -> None:
                bench.say(f"batch {how.batch}, warm-up: {load(system).title}")
                jobs[system] = (await turns[system].warmed(how, plan.seconds))[1]

            async def turn(system: str, run: int, how: Load = how, jobs: dict[str, int] = jobs) -> None:
                await asyncio.sleep(COUNTED_S)
                before = await stage.written(system)
                timed = await turns[system].lived(how, jobs[system])
                await asyncio.sleep(COUNTED_S)
                found = await stage.written(system) - before
                samples.append(Sample(system=system, batch=how.batch, run=run, timed=timed, written=found))
                bench.say(
                    f"batch {how.batch}, run {run} of {plan.runs}: {load(system).title}: "
                    f"{found.wal_bytes / timed.jobs:,.0f} bytes of WAL a job"
                )

            await bench.rounds(systems, 1, warm)
            await bench.rounds(systems, plan.runs, turn)
            await stage.clear()
    return Found(
        scenario="cost",
        plan=asdict(plan),
        samples=[
            {
                "system": sample.system,
                "batch": sample.batch,
                "run": sample.run,
                **sample.timed.told(),
                "written": asdict(sample.written),
            }
            for sample in samples
        ],
        tables=[_table(samples)],
    )


def _table(samples: Sequence[Sample]) -> Table:
    grouped: dict[tuple[int, str], list[Sample]] = defaultdict(list)
    for sample in samples:
        grouped[sample.batch, sample.system].append(sample)
    rows: list[tuple[str, ...]] = []
    for (batch, system), found in grouped.items():
        cpu = [
            [getattr(sample.timed.spent, name) / sample.timed.jobs * 1e6 for sample in found]
            for name in ("client_s", "router_s", "postgres_s")
        ]
        database = [
            spread(getattr(sample.written, name) / sample.timed.jobs for sample in found)
            for name in ("wal_bytes", "commits", "dead_rows", "dead_rows_hot")
        ]
        wal, commits, dead, hot = database
        cells = (
            f"{batch}",
            load(system).title,
            *(spread(values).text(",.1f") for values in cpu),
            spread(sum(values) for values in zip(*cpu, strict=True)).text(",.1f"),
            wal.text(),
            f"{commits.median:.3f}",
            f"{dead.median:.2f}",
            f"{hot.median:.2f}",
        )
        rows.append(cells)
    return Table(
        title="Cost of one job's whole life",
        head=(
            *("batch", "system", "client µs", "router µs", "Postgres µs", "all µs", "WAL bytes"),
            *("commits", "dead rows", "of HOT updates"),
        ),
        rows=rows,
        note="CPU: median (min – max). WAL: of the whole server, by its insert position. Commits: transactions in the "
        "system's database, by pg_stat_database. Dead rows: deletes, and updates that were not HOT, of all its tables, "
        "by pg_stat_all_tables; HOT updates leave one too, which needs no vacuum.",
    )


def _options(parser: argparse.ArgumentParser) -> None:
    plan = Plan()
    parser.add_argument(
        "--batch", type=numbers(1000), default=plan.batches, metavar="N,N", help="jobs a call; 1,10,100"
    )
    parser.add_argument("--callers", type=number(10_000), default=plan.callers, help="in all; 8")
    parser.add_argument("--seconds", type=positive, default=plan.seconds, help="that a run is to take; 2")
    add_runs(parser, plan.runs)
    add_peers(parser)
    add_processes(parser)


SCENARIO = Scenario(
    help="CPU time, WAL, commits and dead rows of one job's whole life",
    options=_options,
    plan=lambda given: Plan(
        systems=(WINDROW, LIMIT, *given.peers),
        batches=given.batch,
        callers=given.callers,
        runs=given.runs,
        seconds=given.seconds,
        clients=given.clients,
        routers=given.routers,
    ),
    measure=measure,
    full=lambda peers: Plan(systems=(WINDROW, LIMIT, *peers), batches=(100,), runs=1, seconds=1.5),
    quick=None,
)
