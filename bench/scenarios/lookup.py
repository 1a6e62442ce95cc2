"""Measures how long it takes to find finished jobs through a router: a job by its id, and pages of lists. The shard has
many finished jobs, most of them cold."""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass

import grpc

from bench.report import Found
from bench.scenario import Bench, Scenario
from bench.spread import percentile
from bench.system import Wrong
from proof.arguments import number, numbers
from proof.table import Table
from shard.history.days import Day, InUse, days_over, turn_cold
from shard.postgres import partitions
from shard.postgres.pool import Database
from shard.queue.queue_ids import QueueIds
from shard.vocabulary import RETENTION_DEFAULT, OrgId, QueueName, ShardName
from windrow.v1 import admin_pb2, admin_pb2_grpc, job_pb2, queue_pb2, queue_pb2_grpc

_QUEUE = QueueName("work")
_LARGE = OrgId("bench-large")
_DAY_MS = 86_400_000
# The page size of `windrow jobs list`.
_PAGE = 50
_PATIENCE_S = 60.0
_TRIES = 20
_SEED = 20_240_229

# The id and the org of a job follow from its position in its day: every second job belongs to the large org.
_FILL = b"""
INSERT INTO windrow.finished (
    id, queue_id, enqueued_at, run_at, finished_at, lease, leased_at, priority, attempt, state, kind, payload, worker,
    retention
)
SELECT
    (lpad(to_hex(m.ms), 12, '0') || '7000' || '8' || lpad(to_hex(n), 15, '0'))::uuid,
    (%(queue_ids)s::bigint[])[CASE WHEN n %% 2 = 0 THEN 1 ELSE 2 + n / 2 %% %(small)s::integer END],
    m.made, m.made, m.made + interval '1 s', n, m.made, 5, 1, 'succeeded', 'noop', %(payload)s, 'w', %(retention)s
FROM generate_series(0, %(jobs)s - 1) AS n
CROSS JOIN LATERAL (SELECT %(first_ms)s + n * 86000000::bigint / %(jobs)s AS ms) at
CROSS JOIN LATERAL (SELECT at.ms, timestamptz 'epoch' + at.ms * interval '1 ms' AS made) m
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    days: int = 30
    # How many jobs finished on each day with each retention.
    jobs: int = 100_000
    # Retentions in days. Each retention has partitions of its own.
    retentions: tuple[int, ...] = (RETENTION_DEFAULT,)
    # The large org has one half of the jobs. This many orgs share the other half.
    small_orgs: int = 1000
    calls: int = 2000
    routers: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    call: str
    # How long each call took, in ms.
    took: list[float]


class _Shard:
    """The jobs that the shard has."""

    def __init__(self, plan: Plan, today_ms: int) -> None:
        self.plan = plan
        self.today_ms = today_ms
        self.luck = random.Random(_SEED)

    def day_ms(self, ago: int) -> int:
        return self.today_ms - ago * _DAY_MS

    def small(self, number: int) -> OrgId:
        return OrgId(f"bench-small-{number}")

    def job(self, *, cold: bool = True) -> tuple[OrgId, str]:
        """Returns the org and the id of a random job."""
        day = self.luck.randint(2, self.plan.days + 1) if cold else self.luck.randint(0, 1)
        n = self.luck.randrange(self.plan.jobs)
        ms = self.day_ms(day) + n * 86_000_000 // self.plan.jobs
        digits = f"{ms:012x}70008{n:015x}"
        org = _LARGE if n % 2 == 0 else self.small(n // 2 % self.plan.small_orgs)
        return org, "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))


async def measure(plan: Plan, bench: Bench) -> Found:
    samples: list[Sample] = []
    async with bench.stage(shards=1, routers=plan.routers) as stage:
        shard = await _fill(plan, bench, next(iter(stage.dsns.values())))
        async with grpc.aio.insecure_channel(stage.routers.address) as channel:
            calls = _calls(shard, channel)
            for count in dict.fromkeys(count for _, count in calls.values()):
                # The kinds of calls take turns, so that other load on the machine affects all of them.
                together = {name: call for name, (call, wanted) in calls.items() if wanted == count}
                took: dict[str, list[float]] = {name: [] for name in together}
                for turn in range(-20, count):
                    for name, call in together.items():
                        one = await _timed(call)
                        # The first calls make connections and cached plans, and do not count.
                        if turn >= 0:
                            took[name].append(one)
                for name, found in took.items():
                    samples.append(Sample(call=name, took=found))
                    ordered = sorted(found)
                    bench.say(f"{name}: p50 {percentile(ordered, 0.5):.2f} ms, p99 {percentile(ordered, 0.99):.2f} ms")
    return Found(
        scenario="lookup",
        plan=asdict(plan),
        samples=[asdict(sample) for sample in samples],
        tables=[_table(plan, samples)],
    )


async def _timed(call: Callable[[], Awaitable[None]]) -> float:
    began_s = time.perf_counter()
    await call()
    return (time.perf_counter() - began_s) * 1000


def _calls(shard: _Shard, channel: grpc.aio.Channel) -> dict[str, tuple[Callable[[], Awaitable[None]], int]]:
    queue, admin = queue_pb2_grpc.QueueStub(channel), admin_pb2_grpc.AdminStub(channel)
    plan = shard.plan

    async def get(*, cold: bool = True) -> None:
        org, job_id = shard.job(cold=cold)
        answer = await queue.GetJobs(queue_pb2.GetJobsRequest(org=org, ids=[job_id]), timeout=_PATIENCE_S)
        if [job.id for job in answer.jobs] != [job_id]:
            raise Wrong(f"job {job_id} of org {org} was not found")

    async def get_unknown() -> None:
        org, job_id = shard.job()
        unknown = job_id[:14] + "7fff" + job_id[18:]
        answer = await queue.GetJobs(queue_pb2.GetJobsRequest(org=org, ids=[unknown]), timeout=_PATIENCE_S)
        if list(answer.not_found_ids) != [unknown]:
            raise Wrong(f"job {unknown} of org {org} was found")

    async def page(request: admin_pb2.ListJobsRequest) -> None:
        request.page_size = _PAGE
        answer = await admin.ListJobs(request, timeout=_PATIENCE_S)
        if not answer.jobs:
            raise Wrong(f"an empty page: {request}")

    async def first_page(org: OrgId) -> None:
        await page(admin_pb2.ListJobsRequest(org=org))

    async def cancelled(org: OrgId) -> None:
        request = admin_pb2.ListJobsRequest(org=org, state=job_pb2.JOB_STATE_CANCELLED, page_size=_PAGE)
        await admin.ListJobs(request, timeout=_PATIENCE_S)

    async def any_page(org: OrgId) -> None:
        """Reads a page of jobs made before a random moment."""
        request = admin_pb2.ListJobsRequest(org=org, queue=_QUEUE, state=job_pb2.JOB_STATE_SUCCEEDED)
        request.created_before.FromMilliseconds(shard.day_ms(shard.luck.randint(1, plan.days)))
        await page(request)

    def small() -> OrgId:
        return shard.small(shard.luck.randrange(plan.small_orgs))

    lists = max(20, plan.calls // 20)
    return {
        "GetJobs, a cold one": (get, plan.calls),
        "GetJobs, one that is not cold": (lambda: get(cold=False), plan.calls),
        "GetJobs, an unknown one": (get_unknown, plan.calls),
        "ListJobs, the large org's newest": (lambda: first_page(_LARGE), lists),
        "ListJobs, a small org's newest": (lambda: first_page(small()), lists),
        "ListJobs, the large org's of any day": (lambda: any_page(_LARGE), lists),
        "ListJobs, a small org's of any day": (lambda: any_page(small()), lists),
        "ListJobs, a small org's that are in no such state": (lambda: cancelled(small()), lists),
        # The large org has no jobs in this state, so the search reads all of its jobs. This takes long, so this kind of
        # call comes last.
        "ListJobs, the large org's that are in no such state": (lambda: cancelled(_LARGE), 5),
    }


async def _fill(plan: Plan, bench: Bench, dsn: str) -> _Shard:
    """Inserts finished jobs of `plan.days` days, and turns these days cold. Also inserts finished jobs of the two days
    that follow, and does not turn these two cold."""
    database = Database(ShardName("s1"), dsn, connections=1, may_scan=True)
    await database.open()
    try:
        ((now_us,),) = await database.run(b"SELECT now()", {})
        shard = _Shard(plan, now_us // 1000 // _DAY_MS * _DAY_MS)
        orgs = [_LARGE, *map(shard.small, range(plan.small_orgs))]
        numbers_of = await QueueIds(database).make([(org, _QUEUE) for org in orgs])
        queue_ids = "{" + ",".join(str(numbers_of[org, _QUEUE]) for org in orgs) + "}"
        bench.say(
            f"finishing {plan.jobs:,} jobs a day on {plan.days + 2} days, for each of {len(plan.retentions)} retentions"
        )
        for retention in plan.retentions:
            for ago in range(plan.days + 1, -1, -1):
                await _fill_day(database, shard, retention, ago, queue_ids)
        bench.say("turning days cold")
        for day in await days_over(database):
            if day.first < time.strftime("%Y-%m-%d", time.gmtime(shard.day_ms(1) / 1000)):
                await _turn_cold(database, day)
        await database.run(b"ANALYZE windrow.finished", {})
        return shard
    finally:
        await database.close()


async def _turn_cold(database: Database, day: Day) -> None:
    for tries_left in reversed(range(_TRIES)):
        try:
            await turn_cold(database, day)
            return
        except InUse:
            # Autovacuum may hold the lock, because it vacuums the tables that were just filled.
            if not tries_left:
                raise


async def _fill_day(database: Database, shard: _Shard, retention: int, ago: int, queue_ids: str) -> None:
    first, past = (time.strftime("%Y-%m-%d", time.gmtime(shard.day_ms(day) / 1000)) for day in (ago, ago - 1))
    name = f"finished_{retention}_{first.replace('-', '')}"
    ((is_missing,),) = await database.run(b"SELECT to_regclass('windrow.' || %(name)s) IS NULL", {"name": name})
    if is_missing:
        async with database.transaction() as connection:
            await partitions.make(connection, name, retention, first, past)
    await database.run(
        _FILL,
        {
            "queue_ids": queue_ids,
            "small": shard.plan.small_orgs,
            "payload": bytes(200),
            "retention": retention,
            "jobs": shard.plan.jobs,
            "first_ms": shard.day_ms(ago),
        },
    )


def _table(plan: Plan, samples: list[Sample]) -> Table:
    rows: list[tuple[str, ...]] = []
    for sample in samples:
        ordered = sorted(sample.took)
        shares = [percentile(ordered, share) for share in (0.5, 0.99)]
        rows.append((sample.call, f"{len(ordered):,}", *(f"{took:.2f}" for took in (*shares, ordered[-1]))))
    return Table(
        title="Finding finished jobs",
        head=("call", "calls", "p50 ms", "p99 ms", "worst ms"),
        rows=rows,
        note=f"One call after another, {plan.routers} router process(es). {plan.jobs:,} jobs of 200 bytes a day, kept "
        f"for {' and '.join(map(str, plan.retentions))} days each: {plan.days} days cold, two not. Half of them are of "
        f"one org, the others of {plan.small_orgs:,}. Unknown ids are as old as known ones. A page: {_PAGE} jobs.",
    )


def _options(parser: argparse.ArgumentParser) -> None:
    plan = Plan()
    parser.add_argument("--days", type=number(2500), default=plan.days, help="that have turned cold; 30")
    parser.add_argument("--jobs", type=number(10**8), default=plan.jobs, help="of each day and retention; 100000")
    parser.add_argument(
        "--retentions", type=numbers(2557), default=plan.retentions, metavar="DAYS,DAYS", help="30, 90, 365, 2557; 30"
    )
    parser.add_argument("--orgs", type=number(9999), default=plan.small_orgs, help="small ones; 1000")
    parser.add_argument("--calls", type=number(10**6), default=plan.calls, help="of each sort of lookup; 2000")
    parser.add_argument("--routers", type=number(64), default=plan.routers, help="router processes; 1")


SCENARIO = Scenario(
    help="how long it takes to find jobs among those that have finished in 30 days",
    options=_options,
    plan=lambda given: Plan(
        days=given.days,
        jobs=given.jobs,
        retentions=given.retentions,
        small_orgs=given.orgs,
        calls=given.calls,
        routers=given.routers,
    ),
    measure=measure,
    full=lambda _: Plan(jobs=20_000),
    quick=None,
)
