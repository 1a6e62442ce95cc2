"""Measures limits that hold jobs back, over two routers with two processes each: how many jobs start, how many run at
the same time, and what such limits cost while they are not reached."""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field

import psycopg

import windrow
from bench.report import Found
from bench.scenario import Bench, Scenario
from bench.spread import spread
from bench.stage import Servers, Stage, fresh_run
from bench.systems.on_routers import QUEUE
from proof.arguments import number, positive
from proof.table import Table
from windrow import LimitMeasure

_PROCESSES = 2
# How many workers each router has. Each worker has its own client, because connections reach the processes of a router
# at random.
_WORKERS = 4
_PLACES = 20
_KIND = "no-op"
_PAYLOAD = bytes(200)
# The limits, as pairs: the number of jobs that may start in an interval, and the length of this interval in seconds.
_RATES = ((1000, 10), (100, 1), (10, 60))
_IN_FLIGHT = 50
_RUN_S = 0.05
# The bucket of a limit fills a little while its first jobs start. After this time the bucket is really empty.
_REST_S = 2.0
# The pause between two counts of leases.
_LOOK_S = 0.1
# The amount of a limit that is never reached.
_FAR = 10**9
_BATCH = 100
_CALLERS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    seconds: float = 60.0
    jobs: int = 60_000
    runs: int = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """How many jobs started under a limit. `wanted`: how many jobs should start under the limit in the measured time,
    if its bucket is empty at the beginning."""

    amount: int
    interval_s: int
    seconds: float
    wanted: float
    started: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """How many handlers ran at the same time, and how many jobs were leased at the same time."""

    limit: int
    most: int
    mean: float
    most_leased: int
    mean_leased: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """How many jobs a second are enqueued, delivered and acked under these limits."""

    limits: str
    run: int
    jobs_per_s: float


_LIMITS: dict[str, tuple[LimitMeasure, ...]] = {
    "none": (),
    "starts": (LimitMeasure.STARTS,),
    "in flight": (LimitMeasure.IN_FLIGHT,),
    "all": tuple(measure for measure in LimitMeasure if measure is not LimitMeasure.UNKNOWN),
}
_RATED = {LimitMeasure.JOBS, LimitMeasure.BYTES, LimitMeasure.STARTS}


async def measure(plan: Plan, bench: Bench) -> Found:
    async with bench.stage(shards=1, routers=_PROCESSES) as stage:
        both = (stage.routers, await stage.more_routers(_PROCESSES))
        started = await _started(plan, bench, both)
        running = await _running(plan, bench, stage, both)
        lives = await _lives(plan, bench, stage, both)
    return Found(
        scenario="starts",
        plan=asdict(plan),
        samples=[
            *({"sample": "started", **asdict(one)} for one in started),
            {"sample": "running", **asdict(running)},
            *({"sample": "life", **asdict(one)} for one in lives),
        ],
        tables=[_started_table(plan, started), _running_table(plan, running), _lives_table(plan, lives)],
    )


# ── How many jobs start, and run ─────────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class _Handlers:
    """Counts the handlers of one org."""

    started_at_s: list[float] = field(default_factory=list[float])
    running: int = 0
    most: int = 0
    # The sum of the seconds for which the handlers have run.
    ran_s: float = 0.0
    began: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def begin(self) -> float:
        now_s = time.monotonic()
        self.started_at_s.append(now_s)
        self.running += 1
        self.most = max(self.most, self.running)
        async with self.began:
            self.began.notify_all()
        return now_s

    def end(self, began_s: float) -> None:
        self.running -= 1
        self.ran_s += time.monotonic() - began_s

    async def until(self, count: int) -> None:
        """Waits until `count` handlers have begun."""
        async with self.began:
            await self.began.wait_for(lambda: len(self.started_at_s) >= count)


@asynccontextmanager
async def _at_work(both: Sequence[Servers], org: str, *, run_s: float) -> AsyncGenerator[_Handlers, None]:
    """Runs workers of one org at both routers during this scope. Their handlers take `run_s` seconds."""
    seen = _Handlers()

    async def handle(_: windrow.Job) -> None:
        began_s = await seen.begin()
        await asyncio.sleep(run_s)
        seen.end(began_s)

    async with AsyncExitStack() as stack, asyncio.TaskGroup() as group:
        tasks: list[asyncio.Task[None]] = []
        for servers in both:
            for _ in range(_WORKERS):
                client = await stack.enter_async_context(windrow.Client(servers.address, org=org))
                worker = windrow.Worker(client, [QUEUE], concurrency=_PLACES, prefetch=0)
                worker.handler(_KIND)(handle)
                tasks.append(group.create_task(worker.run()))
        yield seen
        for task in tasks:
            task.cancel()


async def _started(plan: Plan, bench: Bench, both: Sequence[Servers]) -> list[Started]:
    """Measures all limits at the same time, each with an org of its own."""
    async with AsyncExitStack() as stack:
        seen: list[_Handlers] = []
        for amount, interval_s in _RATES:
            org = f"starts-{amount}-{interval_s}"
            async with windrow.Client(both[0].address, org=org) as client:
                await client.set_limit(LimitMeasure.STARTS, amount, per=interval_s)
                await _store(client, int(2 * amount + 2 * plan.seconds * amount / interval_s))
            seen.append(await stack.enter_async_context(_at_work(both, org, run_s=0)))
        bench.say(f"starting jobs under {len(seen)} limits for {plan.seconds:g} s, after their buckets are empty")
        # The buckets are full at first. Wait until each limit has let as many jobs start as its bucket holds.
        for one, (amount, _) in zip(seen, _RATES, strict=True):
            await one.until(amount)
        await asyncio.sleep(_REST_S)
        began_s = time.monotonic()
        await asyncio.sleep(plan.seconds)
        ended_s = time.monotonic()
    found: list[Started] = []
    for (amount, interval_s), one in zip(_RATES, seen, strict=True):
        result = Started(
            amount=amount,
            interval_s=interval_s,
            seconds=ended_s - began_s,
            wanted=amount / interval_s * (ended_s - began_s),
            started=sum(began_s <= at_s < ended_s for at_s in one.started_at_s),
        )
        found.append(result)
        bench.say(f"{amount:,} per {interval_s} s: {result.started:,} of {result.wanted:,.1f}")
    return found


async def _running(plan: Plan, bench: Bench, stage: Stage, both: Sequence[Servers]) -> Running:
    ((_, dsn),) = stage.dsns.items()
    org = "in-flight"
    async with windrow.Client(both[0].address, org=org) as client:
        await client.set_limit(LimitMeasure.IN_FLIGHT, _IN_FLIGHT)
        # Store more jobs than can run in the measured time.
        await _store(client, int(1.2 * plan.seconds * _IN_FLIGHT / _RUN_S))
    bench.say(f"running {_IN_FLIGHT} handlers of {_RUN_S * 1000:g} ms at a time for {plan.seconds:g} s")
    async with _at_work(both, org, run_s=_RUN_S) as seen:
        await seen.until(1)
        began_s, ran_s = time.monotonic(), seen.ran_s
        leased = await _counted_leases(dsn, plan.seconds)
        mean = (seen.ran_s - ran_s) / (time.monotonic() - began_s)
    found = Running(
        limit=_IN_FLIGHT, most=seen.most, mean=mean, most_leased=max(leased), mean_leased=statistics.fmean(leased)
    )
    bench.say(f"{found.most} at most, {found.mean:.1f} in the mean; leased: {found.mean_leased:.1f} in the mean")
    return found


async def _counted_leases(dsn: str, seconds: float) -> list[int]:
    """Counts the leases again and again for `seconds`. Returns all counts."""
    counts: list[int] = []
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
        ends_s = time.monotonic() + seconds
        while time.monotonic() < ends_s:
            cursor = await connection.execute(
                "SELECT count(*) FROM windrow.job WHERE lease < 0 AND visible_at > clock_timestamp()"
            )
            counts += [int(count) for (count,) in await cursor.fetchall()]
            await asyncio.sleep(_LOOK_S)
    return counts


async def _store(client: windrow.Client, count: int) -> None:
    for stored in range(0, count, 1000):
        await client.enqueue_many([windrow.NewJob(QUEUE, _KIND, _PAYLOAD) for _ in range(min(1000, count - stored))])


# ── What a limit costs while it is not reached ───────────────────────────────────────────────────────────────────────


async def _lives(plan: Plan, bench: Bench, stage: Stage, both: Sequence[Servers]) -> list[Life]:
    clients = await stage.clients("windrow", servers=both, callers=_CALLERS)

    async def rate(limits: str) -> float:
        org = f"{await fresh_run(clients)}-0"
        async with windrow.Client(both[0].address, org=org) as client:
            for one in _LIMITS[limits]:
                await client.set_limit(one, _FAR, per=1 if one in _RATED else None)
        await asyncio.sleep(1.0)
        order: dict[str, object] = {
            "jobs": plan.jobs // 2,
            "total": plan.jobs,
            "batch": _BATCH,
            "callers": _CALLERS,
            "concurrency": 1,
        }
        answers = await clients.all("live", lambda _: order)
        settled = (await clients.one(0, "settle", total=plan.jobs)).found
        await clients.all("rest")
        await clients.one(0, "check", jobs=plan.jobs)
        await stage.clear()
        began_s: float = min(answer.found[0] for answer in answers)
        ended_s: float = max(settled or 0.0, *(answer.found[1] for answer in answers))
        return plan.jobs / (ended_s - began_s)

    await rate("none")
    lives: list[Life] = []
    for run in range(1, plan.runs + 1):
        # The order alternates, so that no case always comes first.
        for limits in sorted(_LIMITS, reverse=run % 2 == 0):
            life = Life(limits=limits, run=run, jobs_per_s=await rate(limits))
            lives.append(life)
            bench.say(f"limits: {limits}: {life.jobs_per_s:,.0f} jobs/s")
    return lives


# ── Tables ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _started_table(plan: Plan, found: Sequence[Started]) -> Table:
    return Table(
        title="What limits of starts let start",
        head=("limit", "wanted", "started", "difference"),
        rows=[
            (
                f"{one.amount:,} per {one.interval_s} s",
                f"{one.wanted:,.1f}",
                f"{one.started:,}",
                f"{one.started / one.wanted - 1:+.2%}",
            )
            for one in found
        ],
        note=f"Jobs in {plan.seconds:g} s, counted by their handlers from when the bucket is empty. Two routers with "
        f"{_PROCESSES} processes each, and {_WORKERS} workers at each for each limit. All limits at the same time, "
        "each of an org of its own, whose jobs are there before.",
    )


def _running_table(plan: Plan, found: Running) -> Table:
    return Table(
        title="What a limit of jobs in flight lets run",
        head=("limit", "most handlers", "mean", "most leases", "mean", "mean leases of the limit"),
        rows=[
            (
                f"{found.limit}",
                f"{found.most}",
                f"{found.mean:.1f}",
                f"{found.most_leased}",
                f"{found.mean_leased:.1f}",
                f"{found.mean_leased / found.limit:.1%}",
            )
        ],
        note=f"Handlers of {_RUN_S * 1000:g} ms that ran at a time in {plan.seconds:g} s. A lease lasts longer than "
        "its handler: from the claim to the ack. The same routers and workers.",
    )


def _lives_table(plan: Plan, lives: Sequence[Life]) -> Table:
    without = {life.run: life.jobs_per_s for life in lives if life.limits == "none"}
    rows: list[tuple[str, ...]] = []
    for limits in _LIMITS:
        own = [life for life in lives if life.limits == limits]
        rows.append(
            (
                limits,
                spread(life.jobs_per_s for life in own).text(),
                spread(life.jobs_per_s / without[life.run] for life in own).text(".1%"),
            )
        )
    return Table(
        title="The whole life of jobs under limits that are not reached",
        head=("limits of the org", "jobs/s", "of those without, each round"),
        rows=rows,
        note=f"Medians of {plan.runs} rounds in turn (least – greatest), {plan.jobs:,} jobs, enqueued by {_BATCH}. Two "
        f"client processes, two routers with {_PROCESSES} processes each.",
    )


def _options(parser: argparse.ArgumentParser) -> None:
    plan = Plan()
    parser.add_argument("--seconds", type=positive, default=plan.seconds, help="to measure what limits let start; 60")
    parser.add_argument("--jobs", type=number(10**8), default=plan.jobs, help="of each run; 60000")
    parser.add_argument("--runs", type=number(100), default=plan.runs, help="with and without limits; 5")


SCENARIO = Scenario(
    help="how many jobs limits of starts and in flight let start, and what they cost",
    options=_options,
    plan=lambda given: Plan(seconds=given.seconds, jobs=given.jobs, runs=given.runs),
    measure=measure,
    full=lambda _: Plan(),
    quick=None,
)
