"""How many jobs a second go in, come out, and live from end to end, by the size of batches and the number of callers;
what each sort of process pays for one, and what the database writes for it.

Beside Windrow: the limit above it and peers; or, for calls of one job, an echo of the same messages; or routers that
trace 1 % of their calls.
"""

from __future__ import annotations

import argparse
import asyncio
from asyncio.subprocess import Process
from collections import defaultdict
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from statistics import median

from bench.arguments import add_peers, add_processes, add_runs
from bench.meter import COUNTED_S, Written
from bench.rate import Figure, Load, Timed, Turn
from bench.report import Found, Plot
from bench.scenario import Bench, Scenario
from bench.spread import ratio, spread
from bench.stage import Servers, Stage
from bench.system import CONNECTIONS, Wrong
from bench.systems import CLIENT, ECHO, LIMIT, TRACED, UNARY, WINDROW, load
from proof.arguments import number, numbers, positive
from proof.processes import serving
from proof.table import Table

# Small batches need more callers to have as many jobs under way.
_CALLERS, _CALLERS_OF_SMALL, _SMALL = 8, 64, 50
_POINTS_MIN = 2
# What a batch span processor waits at most, by default.
_EXPORT_S = 6.0


class Beside(StrEnum):
    """What Windrow is measured beside, in every round."""

    LIMIT = "limit"
    ECHO = "echo"
    TRACING = "tracing"


# The first is the one that the others are held against.
_SYSTEMS = {Beside.LIMIT: (WINDROW, LIMIT), Beside.ECHO: (UNARY, ECHO, CLIENT), Beside.TRACING: (WINDROW, TRACED)}
# None: by the size of batches.
_CALLERS_BESIDE = {Beside.LIMIT: None, Beside.ECHO: None, Beside.TRACING: (16,)}
_BATCHES = {Beside.LIMIT: (100,), Beside.ECHO: (1,), Beside.TRACING: (1, 100)}
# Their callers do one call at a time: in a whole life one half of them enqueues, and the other works.
_SHARED_CALLERS = frozenset({UNARY, ECHO})


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    shards: int
    load: Load


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """`callers` enqueue and `workers` consume, over all client processes together; None: 8 callers, and 64 for batches
    below 50; as many workers. `jobs` of a run; None: as many as take about `seconds`. `written`: what the database
    writes is counted too, which takes 22 s a run."""

    name: str = "throughput"
    beside: Beside = Beside.LIMIT
    peers: tuple[str, ...] = ()
    shards: tuple[int, ...] = (1,)
    batches: tuple[int, ...] = (100,)
    callers: tuple[int, ...] | None = None
    workers: int | None = None
    runs: int = 5
    seconds: float = 2.0
    jobs: int | None = None
    clients: int = 2
    # For each client process.
    connections: int = CONNECTIONS
    routers: int = 2
    written: bool = False

    @property
    def systems(self) -> tuple[str, ...]:
        return (*_SYSTEMS[self.beside], *self.peers)

    def cases(self, shards: int) -> Iterator[Case]:
        for batch in self.batches:
            for callers in self.callers or (_CALLERS_OF_SMALL if batch < _SMALL else _CALLERS,):
                yield Case(shards=shards, load=Load(batch=batch, callers=callers, workers=self.workers or callers))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    system: str
    case: Case
    run: int
    timed: Timed
    # For a whole life, if it was counted.
    written: Written | None = None


async def measure(plan: Plan, bench: Bench) -> Found:
    """Rounds in which every system takes its turn, so that what else the machine does hits all."""
    samples: list[Sample] = []
    for shards in plan.shards:
        systems = await bench.ready(plan.systems)
        callers = max(max(case.load.callers, case.load.workers) for case in plan.cases(shards))
        async with bench.stage(shards=shards, routers=plan.routers) as stage, _sink(plan) as sink:
            turns: dict[str, Turn] = {}
            for system in systems:
                servers = await _servers(stage, system, plan, sink)
                clients = await stage.clients(
                    system,
                    addresses=[servers.address] * plan.clients,
                    callers=-(-callers // plan.clients),
                    connections=plan.connections,
                )
                turns[system] = Turn(stage=stage, clients=clients, servers=servers)
            for case in plan.cases(shards):
                await stage.clear()
                samples += await rounds(plan, bench, turns, case)
            if sink is not None:
                bench.say(f"the sink got {await _spans(sink[0]):,} spans")
    return Found(
        scenario=plan.name,
        plan=asdict(plan) | {"systems": plan.systems},
        samples=[_told(sample) for sample in samples],
        tables=[
            table(samples, over=plan.systems[0], title="Jobs a second"),
            *([_written_table(samples)] if plan.written else []),
        ],
        plots=plots(samples),
    )


@asynccontextmanager
async def _sink(plan: Plan) -> AsyncGenerator[tuple[Process, str] | None, None]:
    """Where traces go, and its port; None: nothing is traced."""
    if plan.beside is not Beside.TRACING:
        yield None
        return
    async with serving("bench.otlp_sink") as sink:
        yield sink


async def _servers(stage: Stage, system: str, plan: Plan, sink: tuple[Process, str] | None) -> Servers:
    """What the system's clients call."""
    if system == ECHO:
        return await stage.echo(plan.routers)
    if system != TRACED:
        return stage.routers
    assert sink is not None
    environ = {
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": f"http://127.0.0.1:{sink[1]}",
        "OTEL_EXPORTER_OTLP_TRACES_INSECURE": "true",
        "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
        "OTEL_TRACES_SAMPLER_ARG": "0.01",
    }
    return await stage.more_routers(plan.routers, environ)


async def _spans(sink: Process) -> int:
    """How many have arrived. Raises Wrong if none has."""
    await asyncio.sleep(_EXPORT_S)
    assert sink.stdin is not None
    assert sink.stdout is not None
    sink.stdin.write(b"?\n")
    spans = int(await sink.stdout.readline())
    if not spans:
        raise Wrong("the sink got no span: nothing was traced")
    return spans


async def rounds(plan: Plan, bench: Bench, turns: dict[str, Turn], case: Case) -> list[Sample]:
    jobs: dict[str, tuple[int, int]] = {}
    samples: list[Sample] = []

    async def warm(system: str, _: int) -> None:
        bench.say(f"{_named(case)}, warm-up: {load(system).title}")
        if plan.jobs is None:
            jobs[system] = await turns[system].warmed(case.load, plan.seconds)
        else:
            jobs[system] = (plan.jobs, plan.jobs)
            await turns[system].lived(case.load, plan.jobs)

    async def turn(system: str, run: int) -> None:
        drained, lived = _alike(jobs) if plan.beside is Beside.TRACING else jobs[system]
        found = [*await turns[system].filled_and_drained(case.load, drained)]
        written: Written | None = None
        if plan.written:
            await asyncio.sleep(COUNTED_S)
            written = await turns[system].stage.written(system)
        found.append(await turns[system].lived(_life(system, case.load), lived))
        if written is not None:
            await asyncio.sleep(COUNTED_S)
            written = await turns[system].stage.written(system) - written
        samples.extend(
            Sample(
                system=system,
                case=case,
                run=run,
                timed=timed,
                written=written if timed.figure is Figure.LIFE else None,
            )
            for timed in found
        )
        rates = " · ".join(f"{timed.figure} {timed.jobs_per_s:,.0f}/s" for timed in found)
        bench.say(f"{_named(case)}, run {run} of {plan.runs}: {load(system).title}: {rates}")

    await bench.rounds(turns, 1, warm)
    await bench.rounds(turns, plan.runs, turn)
    return samples


def _alike(jobs: dict[str, tuple[int, int]]) -> tuple[int, int]:
    """As many jobs for every system: tracing makes less of a difference than the number of jobs."""
    return max(drained for drained, _ in jobs.values()), max(lived for _, lived in jobs.values())


def _life(system: str, load: Load) -> Load:
    if system not in _SHARED_CALLERS:
        return load
    return replace(load, callers=max(1, load.callers // 2), workers=max(1, load.workers // 2))


def table(samples: Sequence[Sample], *, over: str, title: str) -> Table:
    """Medians over each case's runs; the ratio is that of `over` to each other system, round by round."""
    grouped: dict[tuple[Case, Figure], dict[str, list[Sample]]] = defaultdict(lambda: defaultdict(list))
    for sample in samples:
        grouped[sample.case, sample.timed.figure][sample.system].append(sample)
    rows: list[tuple[str, ...]] = []
    for (case, figure), by_system in grouped.items():
        ours = {sample.run: sample.timed.jobs_per_s for sample in by_system.get(over, [])}
        for system, found in by_system.items():
            rates = {sample.run: sample.timed.jobs_per_s for sample in found}
            times = None if system == over else ratio(ours, rates)
            cells = (
                f"{case.shards}",
                f"{case.load.batch}",
                f"{case.load.callers}",
                f"{figure}",
                load(system).title,
                spread(rates.values()).text(),
                "" if times is None else f"{times.median:.2f}",
                *(f"{each:.1f}" for each in costs(found)),
            )
            rows.append(cells)
    head = ("shards", "batch", "callers", "figure", "system", "jobs/s (min – max)", f"{load(over).title} ÷ it")
    others = sorted(sample.timed.spent.others_s / sample.timed.wall_s for sample in samples)
    note = (
        "Medians. µs: CPU time for one job, all processes of a sort together. Everything else on the machine took "
        f"{median(others):.2f} of a core meanwhile ({others[0]:.2f} – {others[-1]:.2f})."
    )
    return Table(title=title, head=(*head, "client µs", "router µs", "Postgres µs"), rows=rows, note=note)


def _written_table(samples: Sequence[Sample]) -> Table:
    grouped: dict[tuple[Case, str], list[tuple[Written, int]]] = defaultdict(list)
    for sample in samples:
        if sample.written is not None:
            grouped[sample.case, sample.system].append((sample.written, sample.timed.jobs))
    rows: list[tuple[str, ...]] = []
    for (case, system), found in grouped.items():
        wal, commits, dead, hot = (
            spread(getattr(written, name) / jobs for written, jobs in found)
            for name in ("wal_bytes", "commits", "dead_rows", "dead_rows_hot")
        )
        cells = (
            f"{case.load.batch}",
            f"{case.load.callers}",
            load(system).title,
            wal.text(),
            f"{commits.median:.3f}",
            f"{dead.median:.2f}",
            f"{hot.median:.2f}",
        )
        rows.append(cells)
    return Table(
        title="What the database writes for one job's whole life",
        head=("batch", "callers", "system", "WAL bytes (min – max)", "commits", "dead rows", "of HOT updates"),
        rows=rows,
        note="WAL: of the whole server, by its insert position. Commits: transactions in the system's database, by "
        "pg_stat_database. Dead rows: deletes, and updates that were not HOT, of all its tables, by "
        "pg_stat_all_tables; HOT updates leave one too, which needs no vacuum.",
    )


def costs(samples: Sequence[Sample]) -> tuple[float, float, float]:
    """CPU-µs a job of client, router and Postgres."""
    spent = [(sample.timed.spent, sample.timed.jobs) for sample in samples]
    return (
        median(one.client_s / jobs * 1e6 for one, jobs in spent),
        median(one.router_s / jobs * 1e6 for one, jobs in spent),
        median(one.postgres_s / jobs * 1e6 for one, jobs in spent),
    )


def plots(samples: Sequence[Sample]) -> list[Plot]:
    """Whole life by batch, and by callers, wherever several were measured."""
    found: list[Plot] = []
    lives = [sample for sample in samples if sample.timed.figure is Figure.LIFE]
    if not lives:
        return []
    shards = lives[0].case.shards
    lives = [sample for sample in lives if sample.case.shards == shards]
    for axis, other in (("batch", "callers"), ("callers", "batch")):
        # Where callers go by the batch, a line crosses them.
        fixed = {getattr(sample.case.load, other) for sample in lives}
        crossed = len({sample.case.load for sample in lives}) == len(
            {getattr(sample.case.load, axis) for sample in lives}
        )
        for chosen in (
            [lives]
            if crossed
            else [[one for one in lives if getattr(one.case.load, other) == at] for at in sorted(fixed)]
        ):
            lines: dict[str, list[tuple[float, float]]] = defaultdict(list)
            places = sorted({getattr(sample.case.load, axis) for sample in chosen})
            if len(places) < _POINTS_MIN:
                continue
            for system in dict.fromkeys(sample.system for sample in chosen):
                for at in places:
                    rates = [
                        sample.timed.jobs_per_s
                        for sample in chosen
                        if sample.system == system and getattr(sample.case.load, axis) == at
                    ]
                    if rates:
                        lines[load(system).title].append((at, median(rates)))
            suffix = "" if crossed else f", {other} {getattr(chosen[0].case.load, other)}"
            found.append(
                Plot(
                    name=f"throughput-by-{axis}" + suffix.replace(", ", "-").replace(" ", "-"),
                    title=f"Whole life by {axis}{suffix}",
                    x=axis,
                    y="jobs/s",
                    lines=lines,
                    x_log=True,
                    y_log=True,
                )
            )
        if crossed and found:
            break
    return found


def _told(sample: Sample) -> dict[str, object]:
    written = sample.written and asdict(sample.written)
    return {
        "system": sample.system,
        **asdict(sample.case),
        "run": sample.run,
        **sample.timed.told(),
        **({"written": written} if written else {}),
    }


def _named(case: Case) -> str:
    return f"{case.shards} shard(s), batch {case.load.batch}, {case.load.callers} callers"


def _options(parser: argparse.ArgumentParser) -> None:
    plan = Plan()
    parser.add_argument(
        "--beside",
        type=Beside,
        choices=list(Beside),
        default=plan.beside,
        help="limit: the same statements without gRPC; echo: one job a unary call beside an echo of the same messages, "
        "and one job a client.enqueue(); tracing: routers that trace 1 %% of their calls; limit",
    )
    parser.add_argument(
        "--batch", type=numbers(1000), metavar="N,N", help="jobs a call; 100, beside echo 1, beside tracing 1,100"
    )
    parser.add_argument(
        "--callers",
        type=numbers(10_000),
        metavar="N,N",
        help=f"in all; {_CALLERS}, and {_CALLERS_OF_SMALL} for batches below {_SMALL}; beside tracing 16",
    )
    parser.add_argument("--workers", type=number(10_000), help="consumers, in all; as many as callers")
    parser.add_argument("--shards", type=numbers(64), default=plan.shards, metavar="N,N", help="Postgres shards; 1")
    parser.add_argument("--jobs", type=number(10**8), help="of a run; by default as many as take --seconds")
    parser.add_argument("--seconds", type=positive, default=plan.seconds, help="that a figure is to take; 2")
    parser.add_argument("--written", action="store_true", help="count WAL, commits and dead rows too: 22 s more a run")
    parser.add_argument("--connections", type=number(1000), default=plan.connections, help="of each client process; 4")
    add_runs(parser, plan.runs)
    add_peers(parser)
    add_processes(parser)


def _plan(given: argparse.Namespace) -> Plan:
    return Plan(
        beside=given.beside,
        peers=given.peers,
        shards=given.shards,
        batches=given.batch or _BATCHES[given.beside],
        callers=given.callers or _CALLERS_BESIDE[given.beside],
        workers=given.workers,
        runs=given.runs,
        seconds=given.seconds,
        jobs=given.jobs,
        clients=given.clients,
        connections=given.connections,
        routers=given.routers,
        written=given.written,
    )


SCENARIO = Scenario(
    help="jobs a second by batch and by callers: enqueue, drain, whole life; CPU time, and what is written",
    options=_options,
    plan=_plan,
    measure=measure,
    full=lambda peers: (
        Plan(peers=peers, batches=(1, 10, 100, 500), seconds=1.0),
        Plan(name="throughput by callers", batches=(10,), callers=(1, 8, 64, 256), seconds=0.7),
        Plan(name="throughput beside an echo", beside=Beside.ECHO, batches=(1,), seconds=1.0),
        Plan(name="what is written", peers=peers, batches=(100,), runs=1, seconds=1.5, written=True),
        Plan(name="tracing", beside=Beside.TRACING, batches=(1, 100), callers=(16,), runs=7, seconds=1.0),
    ),
    quick=lambda: (
        Plan(batches=(10, 100), runs=3, seconds=0.6),
        Plan(name="throughput beside an echo", beside=Beside.ECHO, batches=(1,), runs=3, seconds=0.6),
    ),
)
