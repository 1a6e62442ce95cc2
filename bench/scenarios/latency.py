"""Measures how long an idle cluster takes to deliver one job to a waiting worker: from the start of the enqueue call
until the worker's handler has the job."""

from __future__ import annotations

import argparse
import asyncio
from collections import defaultdict
from dataclasses import asdict, dataclass

from bench import pickups
from bench.arguments import add_peers, add_runs
from bench.clients import Clients
from bench.pickups import Waits, ms_text
from bench.report import Found, Plot
from bench.scenario import Bench, Scenario
from bench.spread import spread
from bench.stage import Stage, fresh_run
from bench.system import Wrong
from bench.systems import PEERS, WORKERS, load
from proof.arguments import number, numbers
from proof.table import Table

_SAME, _ACROSS = "same router", "another router"
# Within this time, every worker begins to wait.
_PARK_S = 0.5
_WARM_JOBS = 20
_PAUSE_S = 0.01
_FINISH_S_MAX = 20.0
_PRODUCER, _WORKER = 0, 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    systems: tuple[str, ...] = (WORKERS,)
    workers: tuple[int, ...] = (1, 8, 64)
    # How many jobs a run has. Systems that poll finish fewer jobs within `seconds_max`.
    jobs: int = 200
    seconds_max: float = 8.0
    runs: int = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    system: str
    workers: int
    place: str
    run: int
    waits: Waits


async def measure(plan: Plan, bench: Bench) -> Found:
    samples: list[Sample] = []
    systems = await bench.ready(plan.systems)
    async with bench.stage(shards=1, routers=1) as stage:
        other = await stage.more_routers(1)
        here, there = stage.routers, other
        pairs: dict[tuple[str, str], Clients] = {}
        for system in systems:
            callers = max(plan.workers)
            pairs[system, _SAME] = await stage.clients(system, servers=[here, here], callers=callers)
            if system not in PEERS:
                pairs[system, _ACROSS] = await stage.clients(system, servers=[here, there], callers=callers)

        for workers in plan.workers:

            async def turn(system: str, run: int, workers: int = workers) -> None:
                for place in (_SAME, _ACROSS):
                    if clients := pairs.get((system, place)):
                        waits = await _waited(stage, clients, plan, workers)
                        samples.append(Sample(system=system, workers=workers, place=place, run=run, waits=waits))
                        figures = f"p50 {ms_text(waits.p50)} ms, p99 {ms_text(waits.p99)} ms of {waits.jobs}"
                        bench.say(f"{workers} worker(s), {place}, run {run}: {load(system).title}: {figures}")

            await bench.rounds(systems, plan.runs, turn)
    return Found(
        scenario="latency",
        plan=asdict(plan),
        samples=[{**asdict(sample), "waits": sample.waits.told()} for sample in samples],
        tables=[_table(samples)],
        plots=_plots(samples),
    )


async def _waited(stage: Stage, clients: Clients, plan: Plan, workers: int) -> Waits:
    await fresh_run(clients, record=True)
    await clients.one(_WORKER, "work", batch=1, concurrency=workers)
    await asyncio.sleep(_PARK_S)
    file = str(stage.file("pickups"))
    warm = (await clients.one(_PRODUCER, "ping", jobs=_WARM_JOBS, seconds_max=plan.seconds_max, pause_s=0.0)).found
    await clients.one(_WORKER, "pickups", file=file)
    jobs = (await clients.one(_PRODUCER, "ping", jobs=plan.jobs, seconds_max=plan.seconds_max, pause_s=_PAUSE_S)).found
    await clients.one(_WORKER, "pickups", file=file)
    if left := (await clients.one(_WORKER, "calm", seconds_max=_FINISH_S_MAX)).found:
        raise Wrong(f"{left} jobs were not finished within {_FINISH_S_MAX:g} s")
    await clients.one(_WORKER, "rest")
    await clients.one(_WORKER, "check", jobs=warm + jobs)
    waits = pickups.waits(await asyncio.to_thread(pickups.read, stage.file("pickups")))
    if waits is None or waits.jobs != jobs:
        raise Wrong(f"of {jobs} jobs, a worker had {0 if waits is None else waits.jobs}")
    return waits


def _table(samples: list[Sample]) -> Table:
    rows: list[tuple[str, ...]] = []
    for (system, workers, place), found in _grouped(samples).items():
        p50, p99 = (spread(getattr(waits, name) for waits in found) for name in ("p50", "p99"))
        worst = max(waits.worst for waits in found)
        rows.append((f"{workers}", place, load(system).title, p50.text(",.2f"), p99.text(",.2f"), ms_text(worst)))
    return Table(
        title="Pickup when idle, ms",
        head=("workers", "enqueued through", "system", "p50 (min – max)", "p99 (min – max)", "worst"),
        rows=sorted(rows, key=lambda row: (int(row[0]), row[1] != _SAME)),
        note="Medians over runs of one job at a time, each with a pause after it. From the start of the enqueue call: "
        "its commit is in it.",
    )


def _plots(samples: list[Sample]) -> list[Plot]:
    lines: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for (system, workers, place), found in _grouped(samples).items():
        label = load(system).title + ("" if system in PEERS else f", {place}")
        lines[label].append((workers, spread(waits.p99 for waits in found).median))
    if all(len(points) < 2 for points in lines.values()):
        return []
    title = "Pickup of one job when idle, p99"
    return [Plot(name="latency-idle", title=title, x="workers", y="ms", lines=lines, x_log=True, y_log=True)]


def _grouped(samples: list[Sample]) -> dict[tuple[str, int, str], list[Waits]]:
    grouped: dict[tuple[str, int, str], list[Waits]] = defaultdict(list)
    for sample in samples:
        grouped[sample.system, sample.workers, sample.place].append(sample.waits)
    return grouped


def _options(parser: argparse.ArgumentParser) -> None:
    plan = Plan()
    parser.add_argument("--workers", type=numbers(10_000), default=plan.workers, metavar="N,N", help="1,8,64")
    parser.add_argument("--jobs", type=number(10**6), default=plan.jobs, help="of a run; 200")
    add_runs(parser, plan.runs)
    add_peers(parser)


SCENARIO = Scenario(
    help="how long one job waits for an idle worker, on the same router and on another",
    options=_options,
    plan=lambda given: Plan(systems=(WORKERS, *given.peers), workers=given.workers, jobs=given.jobs, runs=given.runs),
    measure=measure,
    full=lambda peers: Plan(systems=(WORKERS, *peers), workers=(1, 64), jobs=100, seconds_max=4.0),
    quick=lambda: Plan(workers=(8,), runs=3),
)
