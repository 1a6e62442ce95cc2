"""How many jobs a second go in, come out, and live from end to end, by the size of batches and the number of callers;
and what each sort of process pays for one."""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import median

from bench.arguments import add_peers, add_processes, add_runs, number, numbers, positive
from bench.rate import Figure, Load, Timed, Turn
from bench.report import Found, Plot, Table
from bench.scenario import Bench, Scenario
from bench.spread import ratio, spread
from bench.systems import LIMIT, WINDROW, load

# Small batches need more callers to have as many jobs under way.
_CALLERS, _CALLERS_OF_SMALL, _SMALL = 8, 64, 50
_POINTS_MIN = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    shards: int
    load: Load


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """`callers` enqueue and `workers` consume, over all client processes together; None: 8 callers, and 64 for batches
    below 50; as many workers. `jobs` of a run; None: as many as take about `seconds`."""

    name: str = "throughput"
    systems: tuple[str, ...] = (WINDROW, LIMIT)
    shards: tuple[int, ...] = (1,)
    batches: tuple[int, ...] = (100,)
    callers: tuple[int, ...] | None = None
    workers: int | None = None
    runs: int = 5
    seconds: float = 2.0
    jobs: int | None = None
    clients: int = 2
    routers: int = 2

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


async def measure(plan: Plan, bench: Bench) -> Found:
    """Rounds in which every system takes its turn, so that what else the machine does hits all."""
    samples: list[Sample] = []
    for shards in plan.shards:
        systems = await bench.ready(plan.systems)
        async with bench.stage(shards=shards, routers=plan.routers) as stage:
            turns: dict[str, Turn] = {}
            for system in systems:
                addresses = [stage.routers.address] * plan.clients
                callers = -(
                    -max(max(case.load.callers, case.load.workers) for case in plan.cases(shards)) // plan.clients
                )
                clients = await stage.clients(system, addresses=addresses, callers=callers)
                turns[system] = Turn(stage=stage, clients=clients, servers=stage.routers)
            for case in plan.cases(shards):
                await stage.clear()
                samples += await rounds(plan, bench, turns, case)
    return Found(
        scenario=plan.name,
        plan=asdict(plan),
        samples=[_told(sample) for sample in samples],
        tables=[table(samples, over=WINDROW, title="Jobs a second")],
        plots=plots(samples),
    )


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
        found = [
            *await turns[system].filled_and_drained(case.load, jobs[system][0]),
            await turns[system].lived(case.load, jobs[system][1]),
        ]
        samples.extend(Sample(system=system, case=case, run=run, timed=timed) for timed in found)
        rates = " · ".join(f"{timed.figure} {timed.jobs_per_s:,.0f}/s" for timed in found)
        bench.say(f"{_named(case)}, run {run} of {plan.runs}: {load(system).title}: {rates}")

    await bench.rounds(turns, 1, warm)
    await bench.rounds(turns, plan.runs, turn)
    return samples


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
    head = ("shards", "batch", "callers", "figure", "system", "jobs/s (min – max)", "Windrow ÷ it")
    others = sorted(sample.timed.spent.others_s / sample.timed.wall_s for sample in samples)
    note = (
        "Medians. µs: CPU time for one job, all processes of a sort together. Everything else on the machine took "
        f"{median(others):.2f} of a core meanwhile ({others[0]:.2f} – {others[-1]:.2f})."
    )
    return Table(title=title, head=(*head, "client µs", "router µs", "Postgres µs"), rows=rows, note=note)


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
    return {"system": sample.system, **asdict(sample.case), "run": sample.run, **sample.timed.told()}


def _named(case: Case) -> str:
    return f"{case.shards} shard(s), batch {case.load.batch}, {case.load.callers} callers"


def _options(parser: argparse.ArgumentParser) -> None:
    plan = Plan()
    parser.add_argument("--batch", type=numbers(1000), default=plan.batches, metavar="N,N", help="jobs a call; 100")
    parser.add_argument(
        "--callers",
        type=numbers(10_000),
        metavar="N,N",
        help=f"in all; {_CALLERS}, and {_CALLERS_OF_SMALL} for batches below {_SMALL}",
    )
    parser.add_argument("--workers", type=number(10_000), help="consumers, in all; as many as callers")
    parser.add_argument("--shards", type=numbers(64), default=plan.shards, metavar="N,N", help="Postgres shards; 1")
    parser.add_argument("--jobs", type=number(10**8), help="of a run; by default as many as take --seconds")
    parser.add_argument("--seconds", type=positive, default=plan.seconds, help="that a figure is to take; 2")
    add_runs(parser, plan.runs)
    add_peers(parser)
    add_processes(parser)


def _plan(given: argparse.Namespace) -> Plan:
    return Plan(
        systems=(WINDROW, LIMIT, *given.peers),
        shards=given.shards,
        batches=given.batch,
        callers=given.callers,
        workers=given.workers,
        runs=given.runs,
        seconds=given.seconds,
        jobs=given.jobs,
        clients=given.clients,
        routers=given.routers,
    )


SCENARIO = Scenario(
    help="jobs a second by batch and by callers: enqueue, drain, whole life",
    options=_options,
    plan=_plan,
    measure=measure,
    full=lambda peers: (
        Plan(systems=(WINDROW, LIMIT, *peers), batches=(1, 10, 100, 500), seconds=1.0),
        Plan(name="throughput by callers", batches=(10,), callers=(1, 8, 64, 256), seconds=0.7),
    ),
    quick=lambda: Plan(batches=(10, 100), runs=3, seconds=0.6),
)
