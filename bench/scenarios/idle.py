"""Measures the cost of an idle cluster: CPU time and statements while 1,000 consumers wait on 500 queues."""

from __future__ import annotations

import argparse
import asyncio
import time
from dataclasses import asdict, dataclass

from bench import statements
from bench.clients import Clients
from bench.meter import Spent
from bench.report import Found
from bench.scenario import Bench, Scenario
from bench.spread import spread
from bench.stage import Stage, fresh_run
from proof.arguments import number, positive
from proof.table import Table

_PARKED = "windrow-parked"
_PARK_S = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    # The number of consumers, on 500 queues (bench/systems/parked.py). The first sample is taken without consumers.
    consumers: int = 1000
    shards: int = 2
    seconds: float = 20.0
    runs: int = 3
    clients: int = 2
    routers: int = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    consumers: int
    seconds: float
    spent: Spent
    # Statements a second on each shard. Empty if the server does not count statements.
    statements_per_s: dict[str, float]


async def measure(plan: Plan, bench: Bench) -> Found:
    samples: list[Sample] = []
    async with bench.stage(shards=plan.shards, routers=plan.routers) as stage:
        if not stage.counts_statements:
            bench.say("statements are not counted: this Postgres has no pg_stat_statements")
        clients = await stage.clients(
            _PARKED,
            servers=[stage.routers] * plan.clients,
            callers=-(-plan.consumers // plan.clients),
        )
        for consumers in (0, plan.consumers):
            await fresh_run(clients)
            share = consumers // plan.clients
            if share:
                await clients.all("work", lambda _, share=share: {"batch": 1, "concurrency": share})  # type: ignore[misc]
            await asyncio.sleep(_PARK_S)
            for run in range(1, plan.runs + 1):
                samples.append(sample := await _sample(stage, clients, plan.seconds, consumers))
                busy = (sample.spent.router_s + sample.spent.postgres_s) / sample.seconds
                bench.say(f"{consumers} consumers parked, run {run} of {plan.runs}: {busy:.1%} of a core")
            # This raises the error of a consumer that has failed.
            await clients.all("counts")
            await clients.all("rest")
    return Found(
        scenario="idle", plan=asdict(plan), samples=[asdict(sample) for sample in samples], tables=[_table(samples)]
    )


async def _sample(stage: Stage, clients: Clients, seconds: float, consumers: int) -> Sample:
    counted = await asyncio.to_thread(_statements, stage)
    before, began_s = stage.spent(stage.routers, workers=clients), time.monotonic()
    await asyncio.sleep(seconds)
    spent, took_s = stage.spent(stage.routers, workers=clients) - before, time.monotonic() - began_s
    after = await asyncio.to_thread(_statements, stage)
    rates = {shard: (after[shard] - count) / took_s for shard, count in counted.items()}
    return Sample(consumers=consumers, seconds=took_s, spent=spent, statements_per_s=rates)


def _statements(stage: Stage) -> dict[str, int]:
    if not stage.counts_statements:
        return {}
    return {
        name: sum(runs.calls for runs in statements.counted([server.superuser_dsn]).values())
        for name, server in stage.postgres.items()
    }


def _table(samples: list[Sample]) -> Table:
    rows: list[tuple[str, ...]] = []
    for consumers in dict.fromkeys(sample.consumers for sample in samples):
        found = [sample for sample in samples if sample.consumers == consumers]
        shares = [
            spread(getattr(sample.spent, name) / sample.seconds * 100 for sample in found)
            for name in ("router_s", "postgres_s", "worker_s")
        ]
        both = spread((one.spent.router_s + one.spent.postgres_s) / one.seconds * 100 for one in found)
        rates = [rate for sample in found for rate in sample.statements_per_s.values()]
        cells = (
            f"{consumers:,}",
            *(f"{share.median:.1f}" for share in shares[:2]),
            both.text(".1f"),
            f"{shares[2].median:.1f}",
            spread(rates).text(".1f") if rates else "not counted",
        )
        rows.append(cells)
    return Table(
        title="An idle cluster",
        head=(
            *("consumers waiting", "routers, % of a core", "Postgres, % of a core"),
            *("both (min – max)", "clients, % of a core", "statements/s a shard (min – max)"),
        ),
        rows=rows,
        note="Statements by pg_stat_statements, of Windrow's role.",
    )


def _options(parser: argparse.ArgumentParser) -> None:
    plan = Plan()
    parser.add_argument("--consumers", type=number(100_000), default=plan.consumers, help="on 500 queues; 1000")
    parser.add_argument("--shards", type=number(64), default=plan.shards, help="Postgres shards; 2")
    parser.add_argument("--seconds", type=positive, default=plan.seconds, help="of a run; 20")
    parser.add_argument("--runs", type=number(1000), default=plan.runs, help="3")


SCENARIO = Scenario(
    help="CPU time and statements of a cluster in which 1,000 consumers wait and nothing comes",
    options=_options,
    plan=lambda given: Plan(consumers=given.consumers, shards=given.shards, seconds=given.seconds, runs=given.runs),
    measure=measure,
    full=lambda _: Plan(),
    quick=lambda: Plan(seconds=5.0, runs=1),
)
