"""What tracing costs: jobs through routers that sample 1 % of their calls and send the spans to a sink on this machine,
beside routers of the same cluster that do not trace."""

from __future__ import annotations

import argparse
import asyncio
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from bench.arguments import add_processes, add_runs, number, numbers, positive
from bench.processes import serving
from bench.rate import Figure, Load, Timed, Turn
from bench.report import Found, Table
from bench.scenario import Bench, Scenario
from bench.spread import ratio, spread
from bench.system import Wrong
from bench.systems import WINDROW

_ON, _OFF = "1 % sampled", "no tracing"
# What a batch span processor keeps at most, by default.
_EXPORT_S = 6.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    batches: tuple[int, ...] = (1, 100)
    callers: int = 16
    runs: int = 7
    seconds: float = 2.0
    clients: int = 2
    routers: int = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    batch: int
    tracing: str
    run: int
    timed: Timed


async def measure(plan: Plan, bench: Bench) -> Found:
    samples: list[Sample] = []
    async with serving("bench.otlp_sink") as (sink, port), bench.stage(shards=1, routers=plan.routers) as stage:
        environ = {
            "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": f"http://127.0.0.1:{port}",
            "OTEL_EXPORTER_OTLP_TRACES_INSECURE": "true",
            "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
            "OTEL_TRACES_SAMPLER_ARG": "0.01",
        }
        turns: dict[str, Turn] = {}
        for name, servers in {_OFF: stage.routers, _ON: await stage.more_routers(plan.routers, environ)}.items():
            callers = -(-plan.callers // plan.clients)
            clients = await stage.clients(WINDROW, addresses=[servers.address] * plan.clients, callers=callers)
            turns[name] = Turn(stage=stage, clients=clients, servers=servers)
        for batch in plan.batches:
            how = Load(batch=batch, callers=plan.callers, workers=plan.callers)
            bench.say(f"batch {batch}, warm-up")
            # As many jobs for both.
            warmed = [await turns[name].warmed(how, plan.seconds) for name in turns]
            drained, lived = (max(jobs) for jobs in zip(*warmed, strict=True))

            async def turn(name: str, run: int, how: Load = how, drained: int = drained, lived: int = lived) -> None:
                # In a whole life more jobs or fewer are handed over to workers that wait, by luck, which makes more of
                # a difference than tracing. In a fill and a drain none is.
                found = [*await turns[name].filled_and_drained(how, drained), await turns[name].lived(how, lived)]
                samples.extend(Sample(batch=how.batch, tracing=name, run=run, timed=timed) for timed in found)
                rates = " · ".join(f"{timed.figure} {timed.jobs_per_s:,.0f}/s" for timed in found)
                bench.say(f"batch {how.batch}, run {run} of {plan.runs}: {name}: {rates}")

            await bench.rounds(turns, plan.runs, turn)
            await stage.clear()
        await asyncio.sleep(_EXPORT_S)
        assert sink.stdin is not None
        assert sink.stdout is not None
        sink.stdin.write(b"?\n")
        spans = int(await sink.stdout.readline())
    if not spans:
        raise Wrong("the sink got no span: nothing was traced")
    return Found(
        scenario="tracing",
        plan=asdict(plan),
        samples=[
            {"batch": sample.batch, "tracing": sample.tracing, "run": sample.run, **sample.timed.told()}
            for sample in samples
        ],
        tables=[_table(samples, spans=spans)],
    )


def _table(samples: Sequence[Sample], *, spans: int) -> Table:
    grouped: dict[tuple[int, Figure], dict[str, list[Sample]]] = defaultdict(lambda: defaultdict(list))
    for sample in samples:
        grouped[sample.batch, sample.timed.figure][sample.tracing].append(sample)
    rows: list[tuple[str, ...]] = []
    for (batch, figure), by_tracing in grouped.items():
        rates = {name: {sample.run: sample.timed.jobs_per_s for sample in by_tracing[name]} for name in (_OFF, _ON)}
        for name, by_run in rates.items():
            cpu = spread(sample.timed.spent.router_s / sample.timed.jobs * 1e6 for sample in by_tracing[name])
            times = ratio(by_run, rates[_OFF]) if name == _ON else None
            rows.append(
                (
                    f"{batch}",
                    f"{figure}",
                    name,
                    spread(by_run.values()).text(),
                    times.text(".1%") if times else "",
                    f"{cpu.median:.1f}",
                )
            )
    return Table(
        title="Jobs a second with tracing",
        head=("batch", "figure", "routers", "jobs/s (min – max)", "of no tracing (min – max)", "router µs a job"),
        rows=rows,
        note=f"The routers' spans, sent by OTLP over gRPC to a sink on this machine, which got {spans:,} of them; its "
        "own work is in the figures too.",
    )


def _options(parser: argparse.ArgumentParser) -> None:
    plan = Plan()
    parser.add_argument("--batch", type=numbers(1000), default=plan.batches, metavar="N,N", help="jobs a call; 1,100")
    parser.add_argument("--callers", type=number(10_000), default=plan.callers, help="in all; 16")
    parser.add_argument("--seconds", type=positive, default=plan.seconds, help="that a run is to take; 2")
    add_runs(parser, plan.runs)
    add_processes(parser)


SCENARIO = Scenario(
    help="jobs a second through routers that trace 1 % of their calls, against routers that do not",
    options=_options,
    plan=lambda given: Plan(
        batches=given.batch,
        callers=given.callers,
        runs=given.runs,
        seconds=given.seconds,
        clients=given.clients,
        routers=given.routers,
    ),
    measure=measure,
    full=lambda _: Plan(seconds=1.0),
    quick=None,
)
