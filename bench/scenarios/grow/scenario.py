"""A cluster gets a third shard, and loses this shard again, while it serves clients. The scenario edits the cluster
file, as an operator would, and the balancer moves slots. Meanwhile producers and workers of the Python client continue
to work.

Producers record every job, and workers record every run of a job. At the end the scenario compares these records with
the tables of all shards.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import secrets
import time
from asyncio.subprocess import Process
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field
from datetime import timedelta

import psycopg

import windrow
from bench import cpu, pickups
from bench.demands import Demand, at_most, none_of
from bench.demands import table as demands_table
from bench.pickups import Waits, ms_text
from bench.report import Found, Plot
from bench.scenario import Bench, Scenario
from bench.scenarios.grow.figures import (
    BATCH,
    Look,
    Phase,
    PhaseFigures,
    Seen,
    figures,
    moved_slots,
    watched,
)
from bench.scenarios.grow.producer import CHANNELS, enqueue, new_job
from bench.stage import Stage
from bench.system import Wrong
from bench.systems.on_routers import QUEUE
from bench.times import p99_by_time
from bench.verdict import Verdict, judge
from proof.arguments import number, positive
from proof.background import background
from proof.balancers import open_balancer
from proof.cluster_file import Entry
from proof.history import Outcome, Verb
from proof.processes import finish, serving
from proof.table import Table
from shard.placement.slots import SLOTS, slot_of
from shard.vocabulary import OrgId

_SHARDS = 3
_WORKERS = 2
# A queue whose ready jobs nobody takes, and its share of the jobs that exist before the growth. The other jobs are
# scheduled.
_KEPT, _KEPT_SHARE = "kept", 0.1
_LATER = timedelta(days=1)
_FILL_CALLS = 16
_FILL_JOBS_MAX = 1000
_WARM_S, _WARM_S_MAX = 5.0, 120.0
# The workers keep up while the jobs that they have not taken yet are at most the load of this many seconds.
_BEHIND_S = 0.5
_LOOK_S = 0.5
# If no move of a slot has made progress for this long, the moves are stuck.
_STUCK_S = 120.0
_DRAIN_S_MAX = 120.0
_STEP_S = 1.0

_SHARE_OFF_MAX = 0.01
_RATIO_MAX = 2.0

_OWNERS = "SELECT writes[1] FROM windrow.placement WHERE slot < %s ORDER BY slot"
_LOOK = """
SELECT count(*) FILTER (WHERE %(shard)s = ANY (writes)), count(*) FILTER (WHERE cardinality(reads) > 1)
FROM windrow.placement WHERE slot < %(slots)s
"""
_DUE = """
SELECT count(*) FROM windrow.job j JOIN windrow.queue q USING (queue_id)
WHERE q.queue = %s AND j.visible_at < now() + interval '1 hour'
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    # The jobs that exist before the growth, and that nobody takes.
    jobs: int = 1_000_000
    orgs: int = 5_000
    jobs_per_s: int = 2_000
    # The length of the phase before the growth. The phase after the growth takes half as long.
    seconds: float = 60.0
    routers: int = 3


@dataclass(slots=True, kw_only=True)
class Course:
    """The events of the run, with their times by the monotonic clock."""

    fill_s: float = 0.0
    phases: list[Phase] = field(default_factory=list[Phase])
    looks: list[Look] = field(default_factory=list[Look])
    # For each phase: the CPU use of each kind of process, in cores.
    cores: list[dict[str, float]] = field(default_factory=list[dict[str, float]])
    # The shard of each slot: before the growth, after the growth, and after the drain.
    owners: list[list[str]] = field(default_factory=list[list[str]])

    def phase(self, name: str) -> Phase:
        return next(phase for phase in self.phases if phase.name == name)


async def measure(plan: Plan, bench: Bench) -> Found:
    run = secrets.token_hex(6)
    orgs = [f"bench-{run}-{number}" for number in range(plan.orgs)]
    async with bench.stage(shards=_SHARDS, routers=plan.routers, named=_SHARDS - 1) as stage:
        course = Course()
        bench.say(f"enqueuing {plan.jobs:,} jobs of {plan.orgs:,} orgs, for later")
        course.fill_s = await _fill(stage, plan, orgs)
        bench.say(f"they are there, after {course.fill_s:.0f} s")
        async with (
            open_balancer(stage.cluster_file.path) as balancer,
            _clients(stage, plan, orgs) as (producer, workers),
        ):
            meter = _Meter(stage, clients=[producer.pid, *(worker.pid for worker in workers)], balancer=balancer.pid)
            await _warmed(stage, plan)
            await _run(stage, plan, bench, course, meter)
            await finish(producer)
            await _drained(stage)
            for worker in workers:
                await finish(worker)
        bench.say("reading tables and what clients saw")
        history, verdict = await asyncio.to_thread(
            judge, stage.histories, stage.dsns, address=stage.routers.address, faultless=True
        )
    if verdict.violations:
        bench.broken("grow", verdict.text())
    return _found(plan, orgs, course, Seen.of(history, since_s=course.phases[0].began_s), verdict)


async def _run(stage: Stage, plan: Plan, bench: Bench, course: Course, meter: _Meter) -> None:
    """Runs the phases: with two shards, with three, and with two again."""
    *_, last = stage.dsns
    async with _looking(stage, last, course):
        course.owners.append(await asyncio.to_thread(_owners, stage))
        bench.say(f"before, for {plan.seconds:g} s")
        async with _phase(course, "before", meter):
            await asyncio.sleep(plan.seconds)
        bench.say(f"{last} is added to the cluster file")
        async with _phase(course, "growing", meter):
            stage.cluster_file.entries.append(Entry(name=last, dsn=stage.dsns[last]))
            stage.cluster_file.save()
            await _until_moved(course, SLOTS // _SHARDS, bench)
        course.owners.append(await asyncio.to_thread(_owners, stage))
        bench.say(f"moved in {course.phase('growing').seconds:.1f} s; after, for {plan.seconds / 2:g} s")
        async with _phase(course, "after", meter):
            await asyncio.sleep(plan.seconds / 2)
        bench.say(f"{last} is draining, by the cluster file")
        async with _phase(course, "draining", meter):
            stage.cluster_file.entry(last).state = "draining"
            stage.cluster_file.save()
            await _until_moved(course, 0, bench)
        course.owners.append(await asyncio.to_thread(_owners, stage))
        bench.say(f"drained in {course.phase('draining').seconds:.1f} s; in the end, for {plan.seconds / 4:g} s")
        async with _phase(course, "in the end", meter):
            await asyncio.sleep(plan.seconds / 4)
        # Continue until each watched org has been called again.
        await asyncio.sleep(_WARM_S)


@asynccontextmanager
async def _phase(course: Course, name: str, meter: _Meter) -> AsyncGenerator[None, None]:
    began_s, before = time.monotonic(), meter.seconds()
    yield
    phase = Phase(name=name, began_s=began_s, ended_s=time.monotonic())
    course.phases.append(phase)
    course.cores.append({sort: (after - before[sort]) / phase.seconds for sort, after in meter.seconds().items()})


@dataclass(frozen=True, slots=True)
class _Meter:
    stage: Stage
    clients: Sequence[int]
    balancer: int

    def seconds(self) -> dict[str, float]:
        """Returns the CPU seconds of each kind of process."""
        return {
            "clients": cpu.of_processes(self.clients),
            "routers": cpu.of_processes(self.stage.routers.pids()),
            "Postgres": cpu.of_trees(filter(None, (server.pid for server in self.stage.postgres.values())))[0],
            "balancer": cpu.of_processes([self.balancer]),
        }


# ── What happens ─────────────────────────────────────────────────────────────────────────────────────────────────────


async def _fill(stage: Stage, plan: Plan, orgs: Sequence[str]) -> float:
    """Enqueues the jobs that exist before the growth, with the Python client, in batches. Returns how long that
    took."""
    began_s = time.monotonic()
    with stage.site("fill", orgs).recorder() as recorder:
        async with (
            windrow.Client(stage.routers.address, org=orgs[0], channels=CHANNELS, create_spans=False) as client,
            asyncio.TaskGroup() as group,
        ):
            numbers = iter(range(plan.orgs))

            async def fill() -> None:
                # All tasks share the iterator: each takes the next org.
                for number in numbers:
                    mine = client.for_org(orgs[number])
                    count = _jobs_of(number, plan)
                    kept = round(count * _KEPT_SHARE)
                    for queue, jobs, delay in ((_KEPT, kept, None), (QUEUE, count - kept, _LATER)):
                        for first in range(0, jobs, _FILL_JOBS_MAX):
                            some = [
                                new_job(mine.org, queue, delay=delay) for _ in range(min(_FILL_JOBS_MAX, jobs - first))
                            ]
                            await enqueue(mine, recorder, some)

            for _ in range(_FILL_CALLS):
                group.create_task(fill())
    return time.monotonic() - began_s


def _jobs_of(org: int, plan: Plan) -> int:
    """Returns how many jobs of an org exist before the growth. A tenth of them are ready, in a queue that nobody works
    on. The other jobs are scheduled, in the queue that the workers serve."""
    return plan.jobs * (org + 1) // plan.orgs - plan.jobs * org // plan.orgs


@asynccontextmanager
async def _clients(
    stage: Stage, plan: Plan, orgs: Sequence[str]
) -> AsyncGenerator[tuple[Process, list[Process]], None]:
    """Runs a producer and the workers for this scope."""
    async with AsyncExitStack() as stack:
        workers: list[Process] = []
        for at in range(_WORKERS):
            site = stage.site(f"worker-{at}", orgs, mine=at, places=_WORKERS)
            started = serving("bench.scenarios.grow.worker", order=site.to_json())
            workers.append((await stack.enter_async_context(started))[0])
        site = stage.site("producer", orgs, per_s=float(plan.jobs_per_s))
        producer, _ = await stack.enter_async_context(serving("bench.scenarios.grow.producer", order=site.to_json()))
        yield producer, workers


async def _warmed(stage: Stage, plan: Plan) -> None:
    """Waits until workers keep up. Raises Wrong."""
    began_s = time.monotonic()
    await asyncio.sleep(_WARM_S)
    while (waiting := await asyncio.to_thread(_due, stage)) > _BEHIND_S * plan.jobs_per_s:
        if time.monotonic() > began_s + _WARM_S_MAX:
            raise Wrong(
                f"after {_WARM_S_MAX:g} s {waiting:,} jobs wait for workers: this machine does not keep up with "
                f"{plan.jobs_per_s:,} a second; give a lower --rate"
            )
        await asyncio.sleep(_LOOK_S)


@asynccontextmanager
async def _looking(stage: Stage, shard: str, course: Course) -> AsyncGenerator[None, None]:
    """Reads the catalog again and again during this scope."""

    async def look_on() -> None:
        catalog = next(iter(stage.dsns.values()))
        async with await psycopg.AsyncConnection.connect(catalog, autocommit=True) as connection:
            while True:
                cursor = await connection.execute(_LOOK.encode(), {"shard": shard, "slots": SLOTS})
                row = await cursor.fetchone()
                assert row is not None
                course.looks.append(Look(at_s=time.monotonic(), written=row[0], moving=row[1]))
                await asyncio.sleep(_LOOK_S)

    async with background(look_on()):
        yield


async def _until_moved(course: Course, wanted: int, bench: Bench) -> None:
    """Waits until the shard has `wanted` slots, and no slot is moving. Raises Wrong if the moves make no progress for
    _STUCK_S."""
    moved_s, seen, said_s = time.monotonic(), (-1, -1), 0.0
    while True:
        await asyncio.sleep(_LOOK_S)
        look = course.looks[-1]
        # The share is rounded to a whole number: allow one slot more or less.
        if abs(look.written - wanted) <= (wanted > 0) and not look.moving:
            return
        now_s = time.monotonic()
        if (look.written, look.moving) != seen:
            moved_s, seen = now_s, (look.written, look.moving)
        if now_s - moved_s > _STUCK_S:
            raise Wrong(
                f"for {_STUCK_S:g} s nothing has moved: the shard writes {look.written:,} slots, {look.moving:,} are "
                f"on their way, and {wanted:,} were to be there"
            )
        if now_s - said_s > 10:
            said_s = now_s
            bench.say(f"the shard writes {look.written:,} slots, {look.moving:,} are on their way")


async def _drained(stage: Stage) -> None:
    """Waits until workers have finished all due jobs. Raises Wrong."""
    until_s = time.monotonic() + _DRAIN_S_MAX
    while left := await asyncio.to_thread(_due, stage):
        if time.monotonic() > until_s:
            raise Wrong(f"{_DRAIN_S_MAX:g} s after the last enqueue {left:,} jobs are not finished")
        await asyncio.sleep(_LOOK_S)


def _due(stage: Stage) -> int:
    found = 0
    for entry in stage.cluster_file.entries:
        with psycopg.connect(entry.dsn) as connection:
            row = connection.execute(_DUE.encode(), [QUEUE]).fetchone()
            assert row is not None
            found += row[0]
    return found


def _owners(stage: Stage) -> list[str]:
    with psycopg.connect(next(iter(stage.dsns.values()))) as connection:
        return [shard for (shard,) in connection.execute(_OWNERS.encode(), [SLOTS]).fetchall()]


# ── What the report says ─────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """The slots and jobs that one change of the cluster file moved. `jobs` counts only jobs that existed before the
    growth."""

    name: str
    slots: int
    jobs: int
    # How long it takes until the last slot is at rest. `seconds` counts from the change of the file, and `moving_s`
    # from the time at which the first slot moves.
    seconds: float
    moving_s: float

    @property
    def jobs_per_s(self) -> float:
        return self.jobs / self.moving_s if self.moving_s else math.nan


def moved(course: Course, name: str, before: Sequence[str], after: Sequence[str], jobs: Counter[int]) -> Moved:
    """Computes what one phase moved. `jobs`: the number of jobs on each slot."""
    slots = moved_slots(before, after)
    phase = course.phase(name)
    under_way = [look.at_s for look in course.looks if look.moving and phase.began_s <= look.at_s < phase.ended_s]
    return Moved(
        name=name,
        slots=len(slots),
        jobs=sum(jobs[slot] for slot in slots),
        seconds=phase.seconds,
        moving_s=phase.ended_s - min(under_way, default=phase.began_s),
    )


def demands(found: Sequence[PhaseFigures], moves: Sequence[Moved], verdict: Verdict) -> list[Demand]:
    """Returns the conditions that must hold, and says for each condition whether it holds."""
    by_name = {one.phase.name: one for one in found}
    before = by_name["before"]
    grown = moves[0]
    share = grown.slots / SLOTS
    ratios = [
        at_most(f"{what} {label}, {name} ÷ before", _ratio(waits(by_name[name]), waits(before), label), _RATIO_MAX)
        for what, waits in _WAITS.items()
        for name in ("growing", "after", "draining", "in the end")
        for label in ("p50", "p99")
    ]
    return [
        Demand(
            what="slots that moved to the new shard, of all",
            found=f"{grown.slots:,} ({share:.2%})",
            bound="a third ± 1 %",
            holds=abs(share * _SHARDS - 1) <= _SHARE_OFF_MAX,
        ),
        none_of("failed calls of producers, and what workers could not do", sum(one.failed for one in found)),
        *ratios,
        *verdict.demands(),
    ]


_WAITS: Mapping[str, Callable[[PhaseFigures], Waits | None]] = {
    "dequeue": lambda figures: figures.dequeue,
    "pickup": lambda figures: figures.pickup,
}


def _ratio(waits: Waits | None, before: Waits | None, label: str) -> float:
    if waits is None or before is None:
        return math.nan
    above: float = getattr(waits, label)
    below: float = getattr(before, label)
    # A ratio to a wait of 0 is not defined.
    return above / below if below else math.nan


def _found(plan: Plan, orgs: Sequence[str], course: Course, seen: Seen, verdict: Verdict) -> Found:
    slots = [slot_of(OrgId(org)) for org in orgs]
    jobs: Counter[int] = Counter()
    for org, slot in enumerate(slots):
        jobs[slot] += _jobs_of(org, plan)
    two, three, again = course.owners
    moves = [moved(course, "growing", two, three, jobs), moved(course, "draining", three, again, jobs)]
    went = moved_slots(two, three) | moved_slots(three, again)
    moving = {org for org, slot in zip(orgs, slots, strict=True) if slot in went}
    looked_at = watched(orgs)
    found = [figures(seen, phase, moved=moving, watched=looked_at) for phase in course.phases]
    what_must_hold = demands(found, moves, verdict)
    start_s = course.phases[0].began_s
    plot = _plot(looked_at, course, seen, start_s)
    return Found(
        scenario="grow",
        plan=asdict(plan),
        samples=[
            {"fill_s": course.fill_s, "moves": [{**asdict(one), "jobs_per_s": one.jobs_per_s} for one in moves]},
            *(one.told(start_s) | {"cores": cores} for one, cores in zip(found, course.cores, strict=True)),
            {
                "over_time": {
                    f"{one.y}: {label}": line for one in (plot, *plot.below) for label, line in one.lines.items()
                }
            },
            {"verdict": verdict.told(), "demands": [one.told() for one in what_must_hold]},
        ],
        tables=[
            demands_table(
                f"From two shards to three and back, {plan.jobs:,} jobs of {plan.orgs:,} orgs there, "
                f"{plan.jobs_per_s:,} jobs/s offered",
                what_must_hold,
                f"The {plan.jobs:,} jobs were enqueued by the Python client, in {course.fill_s:.0f} s: a tenth ready, "
                "in a queue without workers, the others scheduled for later.",
            ),
            _moves_table(moves),
            _phases_table(found, course.cores),
        ],
        plots=[plot],
    )


def _moves_table(moves: Sequence[Moved]) -> Table:
    return Table(
        title="Moves",
        head=("", "slots", "of all", "jobs of those there before", "from the file, s", "of it moving, s", "jobs/s"),
        rows=[
            (
                one.name,
                f"{one.slots:,}",
                f"{one.slots / SLOTS:.2%}",
                f"{one.jobs:,}",
                f"{one.seconds:.1f}",
                f"{one.moving_s:.1f}",
                f"{one.jobs_per_s:,.0f}",
            )
            for one in moves
        ],
        note="From the rewritten cluster file, or the first slot on its way, until the last is at rest.",
    )


def _phases_table(found: Sequence[PhaseFigures], cores: Sequence[Mapping[str, float]]) -> Table:
    return Table(
        title="What clients saw",
        head=(
            *("", "s", "jobs/s stored", "enqueue p50, p99, ms", "dequeue", "pickup", "longest pickup", "failed"),
            *("tries repeated inside the client", "no enqueue of a watched org, slot moves, s", "slot stays, s"),
            *("longest enqueue, slot moves, s", "slot stays, s", f"cores: {', '.join(cores[0])}"),
        ),
        rows=[
            (
                one.phase.name,
                f"{one.phase.seconds:.1f}",
                f"{one.stored_per_s:,.0f}",
                *(
                    f"{ms_text(times.p50)}, {ms_text(times.p99)}" if times else "–"
                    for times in (one.enqueue, one.dequeue, one.pickup)
                ),
                ms_text(one.pickup.worst) if one.pickup else "–",
                f"{one.failed:,}",
                ", ".join(f"{count:,} {code}" for code, count in sorted(one.retries.items())) or "none",
                *(
                    "–" if math.isnan(value) else f"{value:.2f}"
                    for value in (
                        one.gap_moved_s,
                        one.gap_stayed_s,
                        one.longest_moved_s,
                        one.longest_stayed_s,
                    )
                ),
                ", ".join(f"{share:.2f}" for share in busy.values()),
            )
            for one, busy in zip(found, cores, strict=True)
        ],
        note="Enqueue and pickup count from when a job was due to be stored, dequeue from when its enqueue was "
        "answered, until a worker had it. No enqueue: the longest time between two successful enqueues of one of the "
        "watched orgs, which are called at a steady pace.",
    )


def _plot(looked_at: Collection[str], course: Course, seen: Seen, start_s: float) -> Plot:
    def rate(times_s: Iterator[tuple[float, int]]) -> list[tuple[float, float]]:
        counts: Counter[int] = Counter()
        for at_s, jobs in times_s:
            counts[int((at_s - start_s) // _STEP_S)] += jobs
        # Leave out the last second, which is not complete.
        return [(step * _STEP_S, counts[step] / _STEP_S) for step in range(max(counts, default=0))]

    enqueues = [call for call in seen.calls if call.verb is Verb.ENQUEUE]
    return Plot(
        name="grow",
        title="A cluster grows by a shard, and gives it up again",
        x="s",
        y="jobs/s",
        lines={
            "stored": rate(
                (call.due_s + call.took_s, 1 if call.org in looked_at else BATCH)
                for call in enqueues
                if call.outcome is Outcome.OK
            ),
            "taken by workers": rate((pickup.due_s + pickup.waited_ms / 1000, 1) for pickup in seen.pickups),
        },
        marks={phase.name: phase.began_s - start_s for phase in course.phases},
        below=(
            Plot(
                name="p99",
                title="",
                x="s",
                y="p99 of each second, ms",
                lines={
                    "dequeue": pickups.by_time(seen.dequeues, start_s=start_s, step_s=_STEP_S, share=0.99),
                    "pickup": pickups.by_time(seen.pickups, start_s=start_s, step_s=_STEP_S, share=0.99),
                    "enqueue": p99_by_time(enqueues, start_s=start_s, step_s=_STEP_S),
                },
                y_log=True,
            ),
            Plot(
                name="slots",
                title="",
                x="s",
                y="slots",
                lines={
                    "of the third shard": [(look.at_s - start_s, look.written) for look in course.looks],
                    "on their way": [(look.at_s - start_s, look.moving) for look in course.looks],
                },
            ),
        ),
    )


def _options(parser: argparse.ArgumentParser) -> None:
    plan = Plan()
    parser.add_argument("--jobs", type=number(10**8), default=plan.jobs, help="there before; 1000000")
    parser.add_argument("--orgs", type=number(10**6, 100), default=plan.orgs, help="5000")
    parser.add_argument("--rate", type=number(10**6), default=plan.jobs_per_s, help="jobs a second; 2000")
    parser.add_argument("--seconds", type=positive, default=plan.seconds, help="before; half of it after; 60")


SCENARIO = Scenario(
    help="a third shard under load: what moves, how fast, and what clients see of it; and the same shard drained",
    options=_options,
    plan=lambda given: Plan(jobs=given.jobs, orgs=given.orgs, jobs_per_s=given.rate, seconds=given.seconds),
    measure=measure,
    full=lambda _: Plan(jobs=300_000, seconds=20.0),
    quick=None,
)
