"""Measures how long the first page of a search takes in an org with many jobs, and how much an operator's change of
many jobs slows down the claims of another org on the same shard."""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import signal
import statistics
import sys
import time
from asyncio.subprocess import DEVNULL, Process
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

import grpc
import psycopg

from bench.payloads import stamped
from bench.report import Found
from bench.scenario import Bench, Scenario
from bench.spread import percentile
from bench.system import Wrong
from bench.systems.on_routers import CALL_S_MAX, QUEUE
from proof.arguments import number
from proof.table import Table
from windrow.v1 import admin_pb2, admin_pb2_grpc, queue_pb2, queue_pb2_grpc

# The upper bound for the ratio of the p99 of claims during the cancel to the p99 of undisturbed claims.
_BAR = 1.2
# The upper bound for the p99 of a first page.
_PAGE_BAR_MS = 50.0
# The page size of `windrow jobs list`.
_PAGE = 50
_WARM_CALLS = 10
_COMMON = "one job in ten"
# The attributes that the searches look for.
_SEARCHES: Mapping[str, Mapping[str, str]] = {
    _COMMON: {"campaign": "3"},
    "a single job": {"customer": "1"},
    "none": {"campaign": "unknown"},
}
# The longest time until the cancel has changed its first jobs, and the pause between two looks for changed jobs.
_BEGINS_S_MAX = 60.0
_LOOK_S = 0.1
# One job in ten has the campaign that is cancelled.
_FILL = """
INSERT INTO windrow.job (id, queue_id, kind, payload, attributes, priority, run_at, visible_at, enqueued_at)
SELECT
    (
        lpad(to_hex((extract(epoch FROM clock_timestamp()) * 1000)::bigint), 12, '0') || '7'
        || substr(md5(n::text || %(salt)s), 1, 3) || '8' || substr(md5(n::text || %(salt)s), 4, 15)
    )::uuid,
    %(queue_id)s, 'no-op', %(payload)s::bytea, jsonb_build_object('campaign', (n %% 10)::text, 'customer', n::text),
    5, now(), now(), now()
FROM generate_series(1, %(jobs)s) AS n
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    # How many jobs the org has that cancels a tenth of its jobs.
    jobs: int = 1_000_000
    searches: int = 200
    consumers: int = 4
    rounds: int = 5
    # The length of each measurement, undisturbed or beside the cancel.
    seconds: int = 10
    routers: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    round: int
    beside: bool
    # How long each claim took, in ms.
    claims: list[float]
    # How many jobs were cancelled, and how many seconds the command took.
    cancelled: int
    took_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    wanted: str
    # How long each first page took, in ms.
    took: list[float]


async def measure(plan: Plan, bench: Bench) -> Found:
    large, other = (f"bench-{name}-{secrets.token_hex(4)}" for name in ("large", "other"))
    samples: list[Sample] = []
    async with bench.stage(shards=1, routers=plan.routers) as stage:
        ((_, dsn),) = stage.dsns.items()
        address = stage.routers.address
        async with grpc.aio.insecure_channel(address) as channel:
            admin = admin_pb2_grpc.AdminStub(channel)
            for org in (large, other):
                await admin.CreateQueue(admin_pb2.CreateQueueRequest(org=org, queue=QUEUE), timeout=CALL_S_MAX)
            bench.say(f"filling {plan.jobs:,} jobs in")
            await asyncio.to_thread(_fill, dsn, large, plan.jobs)
            searches = await _searches(plan, bench, admin, large)
            queue = queue_pb2_grpc.QueueStub(channel)
            for turn in range(plan.rounds):
                # Every second round begins with the cancel, so that a drift of the machine's speed affects both
                # measurements equally.
                for beside in (False, True) if turn % 2 else (True, False):
                    # Insert enough jobs for the fastest consumers, even if the last measurement left none.
                    await asyncio.to_thread(_fill, dsn, other, plan.seconds * plan.consumers * 500)
                    before, began_s = await asyncio.to_thread(_cancelled, dsn, large), time.perf_counter()
                    async with _cancelling(address, dsn, large) if beside else nullcontext():
                        claims = await _claims(plan, queue, other)
                    took_s = time.perf_counter() - began_s
                    cancelled = await asyncio.to_thread(_cancelled, dsn, large) - before
                    samples.append(Sample(round=turn, beside=beside, claims=claims, cancelled=cancelled, took_s=took_s))
                    ordered = sorted(claims)
                    which = "beside the cancel" if beside else "undisturbed"
                    bench.say(
                        f"round {turn + 1}, {which}: {len(ordered):,} claims, "
                        f"p50 {percentile(ordered, 0.5):.2f} ms, p99 {percentile(ordered, 0.99):.2f} ms, "
                        f"{cancelled:,} cancelled"
                    )
    return Found(
        scenario="bulk",
        plan=asdict(plan),
        samples=[
            *({"sample": "search", **asdict(search)} for search in searches),
            *({"sample": "claims", **asdict(sample)} for sample in samples),
        ],
        tables=[_searches_table(plan, searches), _table(plan, samples)],
    )


async def _searches(plan: Plan, bench: Bench, admin: admin_pb2_grpc.AdminAsyncStub, org: str) -> list[Search]:
    took: dict[str, list[float]] = {name: [] for name in _SEARCHES}
    # The searches take turns, so that other load on the machine affects all of them.
    for turn in range(-_WARM_CALLS, plan.searches):
        for name, wanted in _SEARCHES.items():
            request = admin_pb2.ListJobsRequest(org=org, attributes=wanted, page_size=_PAGE)
            began_s = time.perf_counter()
            page = await admin.ListJobs(request, timeout=CALL_S_MAX)
            one = (time.perf_counter() - began_s) * 1000
            if any(job.attributes[key] != value for job in page.jobs for key, value in wanted.items()):
                raise Wrong(f"a search for {name} found another job")
            if name == _COMMON and not page.jobs:
                raise Wrong(f"a search for {name} found none")
            # The first calls make connections and cached plans, and do not count.
            if turn >= 0:
                took[name].append(one)
    for name, found in took.items():
        ordered = sorted(found)
        p50, p99 = percentile(ordered, 0.5), percentile(ordered, 0.99)
        bench.say(f"first page of a search for {name}: p50 {p50:.2f} ms, p99 {p99:.2f} ms")
    return [Search(wanted=name, took=found) for name, found in took.items()]


@asynccontextmanager
async def _cancelling(address: str, dsn: str, org: str) -> AsyncGenerator[None, None]:
    """Runs `windrow jobs cancel` during this scope, as an operator would. The scope begins when the first jobs have
    been cancelled."""
    before = await asyncio.to_thread(_cancelled, dsn, org)
    command = [str(Path(sys.executable).parent / "windrow"), "jobs", "cancel", org, "--where", "campaign=3", "--yes"]
    process: Process = await asyncio.create_subprocess_exec(
        *command, env=os.environ | {"WINDROW_ADDRESS": address}, stdout=DEVNULL, stderr=DEVNULL
    )
    try:
        began_s = time.perf_counter()
        while process.returncode is None and await asyncio.to_thread(_cancelled, dsn, org) == before:
            if time.perf_counter() - began_s > _BEGINS_S_MAX:
                raise Wrong(f"the cancel has cancelled nothing for {_BEGINS_S_MAX:g} s")
            await asyncio.sleep(_LOOK_S)
        yield
        if process.returncode is not None:
            raise Wrong(f"the cancel ended with code {process.returncode} before the measurement: give more --jobs")
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGKILL)
        await process.wait()


async def _claims(plan: Plan, queue: queue_pb2_grpc.QueueAsyncStub, org: str) -> list[float]:
    """Runs some consumers, which claim and ack one job after another. Returns how long each claim took."""
    took: list[float] = []
    until_s = time.perf_counter() + plan.seconds

    async def consume() -> None:
        request = queue_pb2.DequeueRequest(org=org, queues=[QUEUE], max_jobs=1, worker="bench")
        while time.perf_counter() < until_s:
            began_s = time.perf_counter()
            jobs = (await queue.Dequeue(request, timeout=CALL_S_MAX)).jobs
            took.append((time.perf_counter() - began_s) * 1000)
            if not jobs:
                raise Wrong("the consumers have no jobs left")
            await queue.Ack(
                queue_pb2.AckRequest(org=org, acks=[queue_pb2.Ack(lease=jobs[0].lease)]), timeout=CALL_S_MAX
            )

    async with asyncio.TaskGroup() as group:
        for _ in range(plan.consumers):
            group.create_task(consume())
    return took


def _fill(dsn: str, org: str, jobs: int) -> None:
    """Inserts jobs into the org's queue by SQL, without a router, and adds them to the books."""
    with psycopg.connect(dsn) as connection:
        queue_id = _queue_id(connection, org)
        connection.execute(
            _FILL.encode(),
            {"queue_id": queue_id, "jobs": jobs, "payload": stamped(1)[0], "salt": secrets.token_hex(4)},
        )
        connection.execute(
            "INSERT INTO windrow.tally (org_id, accepted) SELECT (%s & 4294967295)::integer, %s", [queue_id, jobs]
        )
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("VACUUM ANALYZE windrow.job")


def _queue_id(connection: psycopg.Connection, org: str) -> int:
    row = connection.execute(
        "SELECT queue_id FROM windrow.queue WHERE org = %s AND queue = %s", [org, QUEUE]
    ).fetchone()
    assert row is not None
    return int(row[0])


def _cancelled(dsn: str, org: str) -> int:
    with psycopg.connect(dsn) as connection:
        row = connection.execute(
            "SELECT count(*) FROM windrow.finished WHERE queue_id = %s AND state = 'cancelled'",
            [_queue_id(connection, org)],
        ).fetchone()
        assert row is not None
        return int(row[0])


def _searches_table(plan: Plan, searches: list[Search]) -> Table:
    rows: list[tuple[str, ...]] = []
    for search in searches:
        ordered = sorted(search.took)
        p99 = percentile(ordered, 0.99)
        bar = "yes" if p99 <= _PAGE_BAR_MS else "no"
        rows.append((search.wanted, f"{percentile(ordered, 0.5):.2f}", f"{p99:.2f}", f"{ordered[-1]:.2f}", bar))
    return Table(
        title=f"First page of a search by an attribute in {plan.jobs:,} jobs, ms",
        head=("wanted", "p50", "p99", "worst", f"p99 at most {_PAGE_BAR_MS:g} ms"),
        rows=rows,
        note=f"{plan.searches} calls of each, in turns, of pages of {_PAGE} jobs, in all states. A page ends after "
        "about 20 ms, also with no job, and has a token with which the search goes on.",
    )


def _table(plan: Plan, samples: list[Sample]) -> Table:
    rows: list[tuple[str, ...]] = []
    for share in (0.5, 0.99):
        found = {
            beside: {one.round: percentile(sorted(one.claims), share) for one in samples if one.beside is beside}
            for beside in (False, True)
        }
        ratios = [found[True][turn] / found[False][turn] for turn in sorted(found[True])]
        rows.append(
            (
                f"p{share * 100:g} of a claim",
                f"{statistics.median(found[False].values()):.2f}",
                f"{statistics.median(found[True].values()):.2f}",
                f"{statistics.median(ratios):.2f}",
                f"{min(ratios):.2f} to {max(ratios):.2f}",
            )
        )
    pace = statistics.median(one.cancelled / one.took_s for one in samples if one.beside)
    return Table(
        title=f"Claims beside a cancel by conditions of {plan.jobs // 10:,} of {plan.jobs:,} jobs",
        head=("", "undisturbed, ms", "beside it, ms", "ratio", "of the rounds"),
        rows=rows,
        note=f"Medians of {plan.rounds} rounds of {plan.seconds} s each way, in turns. {plan.consumers} consumers of "
        f"another org claim and ack one job after another, {plan.routers} router process(es). `windrow jobs cancel` "
        f"cancelled {pace:,.0f} jobs/s. The bar for p99 is {_BAR:g}.",
    )


def _options(parser: argparse.ArgumentParser) -> None:
    plan = Plan()
    parser.add_argument("--jobs", type=number(10**8), default=plan.jobs, help="of the org; 1000000")
    parser.add_argument("--searches", type=number(10**6), default=plan.searches, help="of each kind; 200")
    parser.add_argument("--consumers", type=number(1000), default=plan.consumers, help="of another org; 4")
    parser.add_argument("--rounds", type=number(100), default=plan.rounds, help="5")
    parser.add_argument("--seconds", type=number(600), default=plan.seconds, help="of each measurement; 10")
    parser.add_argument("--routers", type=number(64), default=plan.routers, help="router processes; 1")


SCENARIO = Scenario(
    help="the first page of a search in a million jobs, and claims of another org beside a cancel of 100,000",
    options=_options,
    plan=lambda given: Plan(
        jobs=given.jobs,
        searches=given.searches,
        consumers=given.consumers,
        rounds=given.rounds,
        seconds=given.seconds,
        routers=given.routers,
    ),
    measure=measure,
    full=lambda _: Plan(jobs=600_000, seconds=5),
    quick=None,
)
