"""Measures how long jobs wait for a worker while 2,000 jobs a second come in for minutes: undisturbed, during a
transaction that holds a snapshot, with readers, during and after too much load, with an archiver, and while routers are
restarted.

The load is open: each job has a planned time and is stored then, even if earlier calls have not ended. The waiting time
of a job begins at its planned time.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import secrets
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import assert_never

import grpc

from bench import pickups
from bench.arguments import add_peers
from bench.clients import Clients
from bench.disturbance import Archived, archiver, held_snapshot, readers, restarts
from bench.history import fill_day
from bench.pickups import Pickup, Waits, ms_text
from bench.report import Found, Plot
from bench.scenario import Bench, Scenario
from bench.stage import Stage, fresh_run
from bench.systems import PEERS, WINDROW, load
from proof.arguments import names, number, positive
from proof.table import Table
from shard.placement.cluster_file import read_cluster
from windrow.v1 import admin_pb2, admin_pb2_grpc

_PRODUCER, _WORKER = 0, 1
_WARM_S = 3.0
# While a producer is behind by more than this time, the system cannot handle the load, and the producer skips the jobs
# that become due.
_LATE_S_MAX = 5.0
_FINISH_S_MAX = 20.0
_OVERLOAD = 1.5
_STEP_S = 1.0
_HISTORY = "history"
_KEPT_DAYS = 30


class Beside(StrEnum):
    NOTHING = "nothing else"
    SNAPSHOT = "held snapshot"
    READERS = "four readers"
    OVERLOAD = "1.5 × load"
    ARCHIVER = "an archiver at full speed"
    RESTARTS = "rolling restarts"


# Disturbances that only Windrow can have, because peers have neither archivers nor routers.
_OF_WINDROW = frozenset({Beside.ARCHIVER, Beside.RESTARTS})


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    systems: tuple[str, ...] = (WINDROW,)
    beside: tuple[Beside, ...] = tuple(Beside)
    # The disturbances in `beside` with which peers are measured too.
    peers_beside: tuple[Beside, ...] = (Beside.SNAPSHOT,)
    jobs_per_s: int = 2000
    # How many jobs one call stores, and how many jobs a worker may fetch at once.
    batch: int = 10
    fetch: int = 100
    workers: int = 8
    before_s: float = 60.0
    during_s: float = 60.0
    after_s: float = 30.0
    routers: int = 2
    # The archiver's work: how many days there are, and how many jobs each day has. The archiver drops half of the days.
    days: int = 60
    day_jobs: int = 200_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    name: str
    began_s: float
    ended_s: float
    stored: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    system: str
    beside: Beside
    phases: tuple[Phase, ...]
    waits: dict[str, Waits | None]
    # The waits in the last quarter of the disturbance.
    last: Waits | None
    left: int
    # For each second, the p99 of the waits of the jobs that were due in this second.
    p99: list[tuple[float, float]]
    archived: Archived | None


async def measure(plan: Plan, bench: Bench) -> Found:
    samples: list[Sample] = []
    systems = await bench.ready(plan.systems)
    async with bench.stage(shards=1, routers=plan.routers) as stage:
        for beside in plan.beside:
            for system in systems:
                if system in PEERS and (beside not in plan.peers_beside or beside in _OF_WINDROW):
                    continue

                async def turn(system: str = system, beside: Beside = beside) -> None:
                    bench.say(f"{plan.jobs_per_s:,} jobs/s, {beside}: {load(system).title}")
                    servers = [stage.routers] * 2
                    # End the clients after each sample: idle clients of other systems would poll.
                    async with stage.passing_clients(system, servers=servers, callers=64) as clients:
                        samples.append(sample := await _sample(stage, clients, plan, system, beside))
                    found = [f"{name} p99 {ms_text(waits.p99)} ms" for name, waits in sample.waits.items() if waits]
                    bench.say(f"{beside}: {load(system).title}: {', '.join(found)}; {sample.left} jobs left")

                await bench.attempt(system, turn)
                await stage.clear()
    return Found(
        scenario="load",
        plan={**asdict(plan), "beside": list(map(str, plan.beside)), "peers_beside": list(map(str, plan.peers_beside))},
        samples=[_told(sample) for sample in samples],
        tables=[_table(plan, samples), *(_archived(plan, one.archived) for one in samples if one.archived)],
        plots=[_plot(plan, beside, samples) for beside in plan.beside],
    )


async def _sample(stage: Stage, clients: Clients, plan: Plan, system: str, beside: Beside) -> Sample:
    await fresh_run(clients, record=True)
    archived = Archived() if beside is Beside.ARCHIVER else None
    if archived is not None:
        await _fill(stage, plan)
    await clients.one(_WORKER, "work", batch=plan.fetch, concurrency=plan.workers)
    await _offer(clients, plan, plan.jobs_per_s, _WARM_S)
    dsns = [await stage.database(system)] if system in PEERS else list(stage.dsns.values())
    phases: list[Phase] = []

    async def phase(name: str, rate: float, seconds: float) -> None:
        began_s = time.monotonic()
        stored = await _offer(clients, plan, rate, seconds)
        phases.append(Phase(name=name, began_s=began_s, ended_s=time.monotonic(), stored=stored))

    await phase("before", plan.jobs_per_s, plan.before_s)
    async with _beside(beside, stage, dsns, archived):
        share = _OVERLOAD if beside is Beside.OVERLOAD else 1.0
        await phase("during", plan.jobs_per_s * share, plan.during_s)
    await phase("after", plan.jobs_per_s, plan.after_s)
    left = (await clients.one(_WORKER, "calm", seconds_max=_FINISH_S_MAX)).found
    file = stage.file("pickups")
    await clients.one(_WORKER, "pickups", file=str(file))
    await clients.one(_WORKER, "rest")
    taken = await asyncio.to_thread(pickups.read, file)
    waits = {one.name: _waits(taken, one) for one in phases}
    middle = phases[1]
    quarter_s = middle.ended_s - (middle.ended_s - middle.began_s) / 4
    return Sample(
        system=system,
        beside=beside,
        phases=tuple(phases),
        waits=waits,
        last=pickups.waits(pickups.due_between(taken, quarter_s, middle.ended_s)),
        left=left,
        p99=pickups.by_time(
            pickups.due_between(taken, phases[0].began_s, math.inf),
            start_s=phases[0].began_s,
            step_s=_STEP_S,
            share=0.99,
        ),
        archived=archived,
    )


async def _fill(stage: Stage, plan: Plan) -> None:
    """Inserts finished jobs of a new org. The archiver works on these jobs."""
    ((_, dsn),) = stage.dsns.items()
    channel = grpc.aio.insecure_channel(stage.routers.address)
    try:
        org = f"history-{secrets.token_hex(6)}"
        await admin_pb2_grpc.AdminStub(channel).CreateQueue(
            admin_pb2.CreateQueueRequest(org=org, queue=_HISTORY), timeout=_LATE_S_MAX
        )
        for at in range(plan.days):
            days_ago = _KEPT_DAYS + 2 + at - plan.days // 2
            await asyncio.to_thread(
                fill_day,
                dsn,
                org=org,
                queue=_HISTORY,
                days_ago=days_ago,
                retention=_KEPT_DAYS,
                count=plan.day_jobs,
            )
    finally:
        await channel.close()


def _beside(
    beside: Beside, stage: Stage, dsns: Sequence[str], archived: Archived | None
) -> contextlib.AbstractAsyncContextManager[None]:
    match beside:
        case Beside.SNAPSHOT:
            return held_snapshot(dsns)
        case Beside.READERS:
            return readers(dsns)
        case Beside.RESTARTS:
            return restarts(stage.routers.pids)
        case Beside.ARCHIVER:
            assert archived is not None
            return archiver(read_cluster(stage.cluster_file.path), archived)
        case Beside.NOTHING | Beside.OVERLOAD:
            return contextlib.nullcontext()
        case _:
            assert_never(beside)


async def _offer(clients: Clients, plan: Plan, rate: float, seconds: float) -> int:
    answered = await clients.one(
        _PRODUCER, "offer", rate=rate, seconds=seconds, batch=plan.batch, late_s_max=_LATE_S_MAX
    )
    stored: int = answered.found
    return stored


def _waits(taken: Sequence[Pickup], phase: Phase) -> Waits | None:
    due = pickups.due_between(taken, phase.began_s, phase.ended_s)
    return pickups.waits(due, never=max(0, phase.stored - len(due)))


def _table(plan: Plan, samples: Sequence[Sample]) -> Table:
    rows: list[tuple[str, ...]] = []
    for sample in samples:
        before, during, after = (sample.waits[name] for name in ("before", "during", "after"))
        offered = plan.jobs_per_s * (_OVERLOAD if sample.beside is Beside.OVERLOAD else 1.0)
        middle = sample.phases[1]
        took = middle.stored / (middle.ended_s - middle.began_s) / offered
        worse = during.p99 / before.p99 if before and during and math.isfinite(before.p99) else math.nan
        cells = (
            str(sample.beside),
            load(sample.system).title,
            f"{took:.0%}",
            *(ms_text(waits.p99) if waits else "–" for waits in (before, during, sample.last, after)),
            "–" if math.isnan(worse) else "∞" if math.isinf(worse) else f"{worse:.1f}",
            " → ".join(_median_second(sample, phase) for phase in (sample.phases[0], middle)),
            f"{sample.left:,}",
        )
        rows.append(cells)
    return Table(
        title=f"Pickup p99 at {plan.jobs_per_s:,} jobs/s offered, ms",
        head=(
            *("beside", "system", "stored", f"{plan.before_s:g} s before", f"{plan.during_s:g} s during"),
            *("the last quarter of it", f"{plan.after_s:g} s after", "during ÷ before"),
            *("the median second, before → during", "jobs left"),
        ),
        rows=rows,
        note=f"Jobs are stored when they are due, {plan.batch} in a call, and wait from then on; never: so many were "
        f"not taken within {_FINISH_S_MAX:g} s of the end. Stored: the share of what was offered meanwhile that was "
        f"stored; calls more than {_LATE_S_MAX:g} s behind are left out. The median of the seconds' own p99s does not "
        "go by the worst moments, which on a shared machine may be others'.",
    )


def _median_second(sample: Sample, phase: Phase) -> str:
    began_s = sample.phases[0].began_s
    found = [p99 for at_s, p99 in sample.p99 if phase.began_s <= began_s + at_s <= phase.ended_s - _STEP_S]
    return ms_text(statistics.median(found)) if found else "–"


def _archived(plan: Plan, archived: Archived) -> Table:
    jobs = archived.turned_cold + archived.dropped
    return Table(
        title="What the archiver did meanwhile",
        head=("jobs turned cold", "jobs dropped", "s", "of the time beside", "jobs/s", "longest lock, ms"),
        rows=[
            (
                f"{archived.turned_cold:,}",
                f"{archived.dropped:,}",
                f"{archived.seconds:.1f}",
                f"{min(1.0, archived.seconds / plan.during_s):.0%}",
                f"{jobs / archived.seconds:,.0f}",
                f"{archived.locked_s_max * 1000:.1f}",
            )
        ],
        note=f"Of {plan.days} days of {plan.day_jobs:,} jobs; lock: for which enqueues and acks may have waited.",
    )


def _plot(plan: Plan, beside: Beside, samples: Sequence[Sample]) -> Plot:
    return Plot(
        name=f"load-{beside.name.lower()}",
        title=f"{plan.jobs_per_s:,} jobs/s: {beside}",
        x="s",
        y="pickup p99 of each second, ms",
        lines={load(sample.system).title: _gaps(sample.p99) for sample in samples if sample.beside is beside},
        marks={str(beside): plan.before_s, "end of it": plan.before_s + plan.during_s},
        y_log=True,
    )


def _gaps(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Returns the points with a gap for each second in which no job was due, or in which no due job was ever taken."""
    drawn: list[tuple[float, float]] = []
    for at, value in points:
        if drawn and at - drawn[-1][0] > _STEP_S:
            drawn.append((at - _STEP_S, math.nan))
        drawn.append((at, value))
    return drawn


def _told(sample: Sample) -> dict[str, object]:
    start_s = sample.phases[0].began_s
    return {
        "system": sample.system,
        "beside": str(sample.beside),
        "phases": [
            {
                "name": phase.name,
                "from_s": phase.began_s - start_s,
                "to_s": phase.ended_s - start_s,
                "stored": phase.stored,
                **(waits.told() if (waits := sample.waits[phase.name]) else {}),
            }
            for phase in sample.phases
        ],
        "last_quarter_during": sample.last.told() if sample.last else None,
        "left": sample.left,
        "archived": sample.archived
        and {
            "turned_cold": sample.archived.turned_cold,
            "dropped": sample.archived.dropped,
            "seconds": sample.archived.seconds,
            "locked_s_max": sample.archived.locked_s_max,
        },
        "p99_ms_by_second": sample.p99,
    }


def _options(parser: argparse.ArgumentParser) -> None:
    plan = Plan()
    parser.add_argument(
        "--beside",
        type=_read_beside,
        default=plan.beside,
        metavar="NAME,…",
        help=f"what goes on beside it: {', '.join(each.name.lower() for each in Beside)}; all",
    )
    parser.add_argument("--rate", type=number(10**6), default=plan.jobs_per_s, help="jobs a second; 2000")
    parser.add_argument("--batch", type=number(1000), default=plan.batch, help="jobs a call; 10")
    parser.add_argument(
        "--fetch", type=number(1000), default=plan.fetch, help="jobs that a worker may get at once; 100"
    )
    parser.add_argument("--workers", type=number(1000), default=plan.workers, help="8")
    parser.add_argument("--before-seconds", type=positive, default=plan.before_s, help="undisturbed; 60")
    parser.add_argument("--hold-minutes", type=positive, default=plan.during_s / 60, help="disturbed; 1")
    parser.add_argument("--after-seconds", type=positive, default=plan.after_s, help="undisturbed again; 30")
    parser.add_argument("--days", type=number(80), default=plan.days, help="that an archiver finds to do; 60")
    parser.add_argument("--day-jobs", type=number(10**8), default=plan.day_jobs, help="of each; 200000")
    parser.add_argument("--routers", type=number(64), default=plan.routers, help="router processes; 2")
    add_peers(parser)


def _read_beside(text: str) -> tuple[Beside, ...]:
    return tuple(Beside[name.upper()] for name in names(text, [each.name.lower() for each in Beside], "disturbance"))


def _plan(given: argparse.Namespace) -> Plan:
    return Plan(
        systems=(WINDROW, *given.peers),
        beside=given.beside,
        # If peers are named, measure them with every disturbance that is asked for.
        peers_beside=given.beside,
        jobs_per_s=given.rate,
        batch=given.batch,
        fetch=given.fetch,
        workers=given.workers,
        before_s=given.before_seconds,
        during_s=given.hold_minutes * 60,
        after_s=given.after_seconds,
        routers=given.routers,
        days=given.days,
        day_jobs=given.day_jobs,
    )


SCENARIO = Scenario(
    help="how long jobs wait at a steady 2,000 a second, undisturbed and disturbed",
    options=_options,
    plan=_plan,
    measure=measure,
    full=lambda peers: Plan(systems=(WINDROW, *peers), before_s=15.0, during_s=30.0, after_s=5.0, day_jobs=50_000),
    quick=lambda: Plan(beside=(Beside.SNAPSHOT,), before_s=8.0, during_s=10.0, after_s=4.0),
)
