"""What small calls cost: one job in each unary call beside an echo of the same messages, and one job in each
`client.enqueue()` of the Python client."""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from bench.arguments import add_processes, add_runs, number, positive
from bench.rate import Figure, Load, Timed, Turn
from bench.report import Found, Table
from bench.scenario import Bench, Scenario
from bench.spread import ratio, spread
from bench.system import CONNECTIONS
from bench.systems import ECHO, load

_UNARY, _CLIENT = "windrow-unary", "windrow-client"
_CALLS_A_JOB = {Figure.ENQUEUE: 1, Figure.DRAIN: 2, Figure.LIFE: 3}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """`callers`: calls under way at a time, over all client processes."""

    systems: tuple[str, ...] = (_UNARY, ECHO, _CLIENT)
    callers: int = 64
    # Of each client process.
    connections: int = CONNECTIONS
    runs: int = 5
    seconds: float = 2.0
    jobs: int | None = None
    clients: int = 2
    routers: int = 2

    def life(self, system: str) -> Load:
        """The unary systems' callers are shared between enqueuing and working: there are never more calls under way.
        The client's callers enqueue, and a Worker for each process runs as many handlers."""
        if system == _CLIENT:
            return Load(batch=1, callers=self.callers, workers=self.callers)
        return Load(batch=1, callers=max(1, self.callers // 2), workers=max(1, self.callers // 2))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    system: str
    run: int
    timed: Timed


async def measure(plan: Plan, bench: Bench) -> Found:
    samples: list[Sample] = []
    async with bench.stage(shards=1, routers=plan.routers) as stage:
        turns: dict[str, Turn] = {}
        for system in plan.systems:
            servers = await stage.echo(plan.routers) if system == ECHO else stage.routers
            callers = -(-plan.callers // plan.clients)
            clients = await stage.clients(
                system, addresses=[servers.address] * plan.clients, callers=callers, connections=plan.connections
            )
            turns[system] = Turn(stage=stage, clients=clients, servers=servers)
        whole = Load(batch=1, callers=plan.callers, workers=plan.callers)
        jobs: dict[str, tuple[int, int]] = {}

        async def warm(system: str, _: int) -> None:
            bench.say(f"{plan.callers} callers, warm-up: {load(system).title}")
            jobs[system] = (plan.jobs, plan.jobs) if plan.jobs else await turns[system].warmed(whole, plan.seconds)

        async def turn(system: str, run: int) -> None:
            life = await turns[system].lived(plan.life(system), jobs[system][1])
            found = [*await turns[system].filled_and_drained(whole, jobs[system][0]), life]
            samples.extend(Sample(system=system, run=run, timed=timed) for timed in found)
            rates = " · ".join(f"{timed.figure} {timed.jobs_per_s:,.0f}/s" for timed in found)
            bench.say(f"{plan.callers} callers, run {run} of {plan.runs}: {load(system).title}: {rates}")

        await bench.rounds(turns, 1, warm)
        await bench.rounds(turns, plan.runs, turn)
    return Found(
        scenario="unary",
        plan=asdict(plan),
        samples=[{"system": sample.system, "run": sample.run, **sample.timed.told()} for sample in samples],
        tables=[table(samples, callers=plan.callers, connections=plan.connections * plan.clients)],
    )


def table(samples: Sequence[Sample], *, callers: int, connections: int) -> Table:
    grouped: dict[Figure, dict[str, list[Sample]]] = defaultdict(lambda: defaultdict(list))
    for sample in samples:
        grouped[sample.timed.figure][sample.system].append(sample)
    rows: list[tuple[str, ...]] = []
    for figure, by_system in grouped.items():
        rates = {
            system: {sample.run: sample.timed.jobs_per_s for sample in found} for system, found in by_system.items()
        }
        for system, by_run in rates.items():
            # The client puts several jobs into one call: its calls are not counted here.
            unary = system != _CLIENT
            times = ratio(by_run, rates.get(ECHO, {})) if system == _UNARY else None
            calls = spread(rate * _CALLS_A_JOB[figure] for rate in by_run.values())
            spent = [(sample.timed.spent, sample.timed.jobs) for sample in by_system[system]]
            cells = (
                f"{figure}",
                load(system).title,
                spread(by_run.values()).text(),
                calls.text() if unary else "",
                times.text(".0%") if times else "",
                f"{spread(one.client_s / jobs * 1e6 for one, jobs in spent).median:.0f}",
                f"{spread(one.router_s / jobs * 1e6 for one, jobs in spent).median:.0f}",
                f"{spread(one.postgres_s / jobs * 1e6 for one, jobs in spent).median:.0f}",
            )
            rows.append(cells)
    return Table(
        title=f"One job a call, {callers} callers over {connections} connections",
        head=(
            "figure",
            "system",
            "jobs/s (min – max)",
            "calls/s",
            "of the echo",
            "client µs",
            "server µs",
            "Postgres µs",
        ),
        rows=rows,
        note="Calls a job: enqueue 1, drain 2 (Dequeue, Ack), whole life 3. In whole life the unary systems' callers "
        "are shared: one half enqueues, the other dequeues and acks.",
    )


def _options(parser: argparse.ArgumentParser) -> None:
    plan = Plan()
    parser.add_argument("--callers", type=number(10_000, least=2), default=plan.callers, help="64")
    parser.add_argument("--connections", type=number(1000), default=plan.connections, help="of each client process; 4")
    parser.add_argument("--jobs", type=number(10**8), help="of a run; by default as many as take --seconds")
    parser.add_argument("--seconds", type=positive, default=plan.seconds, help="that a figure is to take; 2")
    add_runs(parser, plan.runs)
    add_processes(parser)


SCENARIO = Scenario(
    help="one job a unary call against an echo of the same messages, and one job a client.enqueue()",
    options=_options,
    plan=lambda given: Plan(
        callers=given.callers,
        connections=given.connections,
        runs=given.runs,
        seconds=given.seconds,
        jobs=given.jobs,
        clients=given.clients,
        routers=given.routers,
    ),
    measure=measure,
    full=lambda _: Plan(seconds=1.0),
    quick=lambda: Plan(runs=3, seconds=0.6),
)
