"""Measures how many jobs a second are enqueued, are finished, and go through their whole life, by the size of batches
and the number of callers. Also measures the CPU time that each kind of process spends on a job, and how much the
database writes for a job.

Windrow is compared with its upper limit and with peers. With `--beside echo`, calls of one job are compared with an
echo of the same messages. Other options compare Windrow with itself: through routers that trace 1 % of their calls,
serve metrics, or do both; through routers that speak TLS; or with jobs that have groups.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
from collections.abc import AsyncGenerator, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass, replace
from enum import StrEnum

from bench.arguments import add_peers, add_processes, add_runs
from bench.clients import Clients
from bench.counts import Counter
from bench.meter import COUNTED_S, Written
from bench.rate import Figure, Load, Turn
from bench.report import Found
from bench.scenario import Bench, Scenario
from bench.scenarios.throughput import telemetry
from bench.scenarios.throughput.tables import Case, Sample, counts_table, plots, table, written_table
from bench.share import fixed_share
from bench.stage import Servers, Stage
from bench.systems import (
    BATCHES,
    ECHO,
    GROUPS,
    GROUPS_OF_THREE,
    LIMIT,
    RAW,
    SECURE,
    SECURE_UNARY,
    TLS,
    TLS_UNARY,
    UNARY,
    WINDROW,
    load,
)
from proof.arguments import number, numbers, positive

# If batches are small, more callers are needed to have the same number of jobs under way.
_CALLERS, _CALLERS_OF_SMALL, _SMALL = 8, 64, 50


class Beside(StrEnum):
    """What Windrow is compared with in every round."""

    LIMIT = "limit"
    ECHO = "echo"
    TELEMETRY = "telemetry"
    TLS = "tls"
    TLS_UNARY = "tls-unary"
    GROUPS = "groups"


# The first system is compared with each of the other systems.
_SYSTEMS = {
    Beside.LIMIT: (WINDROW, BATCHES, RAW, LIMIT),
    Beside.ECHO: (UNARY, ECHO, WINDROW),
    Beside.TELEMETRY: (WINDROW, *telemetry.SYSTEMS),
    Beside.TLS: (WINDROW, TLS, SECURE),
    Beside.TLS_UNARY: (UNARY, TLS_UNARY, SECURE_UNARY),
    Beside.GROUPS: (WINDROW, GROUPS, GROUPS_OF_THREE),
}
# None: the number of callers depends on the size of batches.
_CALLERS_BESIDE = {
    Beside.LIMIT: None,
    Beside.ECHO: None,
    Beside.TELEMETRY: (16,),
    Beside.TLS: None,
    Beside.TLS_UNARY: None,
    Beside.GROUPS: None,
}
_BATCHES = {
    Beside.LIMIT: (100,),
    Beside.ECHO: (1,),
    Beside.TELEMETRY: (1, 100),
    Beside.TLS: (100,),
    Beside.TLS_UNARY: (1,),
    Beside.GROUPS: (100,),
}
# Comparisons in which all systems get the same number of jobs. A different number of jobs would change the result more
# than telemetry or TLS does. If jobs have groups, the number of jobs also changes how many of them wait.
_ALIKE = frozenset({Beside.TELEMETRY, Beside.TLS, Beside.TLS_UNARY, Beside.GROUPS})
# In these systems one half of the callers enqueues, and the other half works, when the whole life of jobs is measured.
_SHARED_CALLERS = frozenset({UNARY, TLS_UNARY, SECURE_UNARY, ECHO})


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """How many cores each router process gets, each shard's Postgres gets, and all client processes together get."""

    router: float
    postgres: float
    clients: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """`producers` and `workers`: numbers of client processes. If Windrow is compared with an echo, there are only
    `producers`, which enqueue and work, because an echo keeps its jobs in the process that made them. `callers`: how
    many callers enqueue in all client processes together. None: 64 for batches below 50, and 8 for other batches.
    `consumers`: how many consumers work in all client processes together. None: as many as callers. `jobs`: how many
    jobs a run has. None: so many that a run takes about `seconds`. `written`: whether to measure how much the database
    writes, which takes 22 s more for each run."""

    name: str = "throughput"
    beside: Beside = Beside.LIMIT
    peers: tuple[str, ...] = ()
    shards: tuple[int, ...] = (1,)
    batches: tuple[int, ...] = (100,)
    callers: tuple[int, ...] | None = None
    consumers: int | None = None
    runs: int = 5
    seconds: float = 2.0
    jobs: int | None = None
    producers: int = 2
    workers: int = 2
    # The connections of each client process. None: see Site.
    connections: int | None = None
    routers: tuple[int, ...] = (2,)
    # None: all processes share the machine.
    share: Share | None = None
    written: bool = False

    @property
    def systems(self) -> tuple[str, ...]:
        # With shares, the system `limit` makes no sense: it has no routers, and would get only the share of the
        # clients.
        ours = (WINDROW, BATCHES, RAW) if self.share else _SYSTEMS[self.beside]
        return (*ours, *self.peers)

    def cases(self, shards: int, routers: int) -> Iterator[Case]:
        for batch in self.batches:
            for callers in self.callers or (_CALLERS_OF_SMALL if batch < _SMALL else _CALLERS,):
                load = Load(batch=batch, callers=callers, consumers=self.consumers or callers)
                yield Case(shards=shards, routers=routers, load=load)


async def measure(plan: Plan, bench: Bench) -> Found:
    """Measures in rounds. Every system takes its turn in each round, so that other load on the machine affects all
    systems."""
    samples: list[Sample] = []
    for shards, routers in itertools.product(plan.shards, plan.routers):
        systems = await bench.ready(plan.systems)
        async with bench.stage(shards=shards, routers=routers) as stage, _listeners(plan) as listeners:
            cases = list(plan.cases(shards, routers))
            turns = {system: await _turn(stage, system, plan, cases, listeners) for system in systems}
            with _shares(plan.share, stage, turns):
                for case in cases:
                    await stage.clear()
                    samples += await rounds(plan, bench, turns, case)
            if listeners is not None:
                bench.say(await listeners.heard())
    return Found(
        scenario=plan.name,
        plan=asdict(plan) | {"systems": plan.systems},
        samples=[sample.told() for sample in samples],
        tables=[
            table(samples, over=plan.systems[0], title="Jobs a second"),
            counts_table(samples),
            *([written_table(samples)] if plan.written else []),
        ],
        plots=plots(samples),
    )


@contextmanager
def _shares(share: Share | None, stage: Stage, turns: Mapping[str, Turn]) -> Generator[None]:
    """Gives the processes their shares of the machine during this scope. Raises Wrong if that is not possible."""
    with ExitStack() as stack:
        if share is not None:
            for pid in stage.routers.pids():
                stack.enter_context(fixed_share([pid], cores=share.router))
            for server in stage.postgres.values():
                stack.enter_context(fixed_share([server.pid or 0], cores=share.postgres))
            clients = {pid for turn in turns.values() for each in (turn.producers, turn.workers) for pid in each.pids}
            stack.enter_context(fixed_share(clients, cores=share.clients))
        yield


@asynccontextmanager
async def _listeners(plan: Plan) -> AsyncGenerator[telemetry.Listeners | None, None]:
    """Yields the sink and the scraper of routers with telemetry. Yields None if the plan has no routers with
    telemetry."""
    if plan.beside is not Beside.TELEMETRY:
        yield None
        return
    async with telemetry.listening() as listeners:
        yield listeners


async def _turn(
    stage: Stage, system: str, plan: Plan, cases: Sequence[Case], listeners: telemetry.Listeners | None
) -> Turn:
    """Starts the system's client processes."""
    servers = await _servers(stage, system, cases[0].routers, listeners)
    callers = max(case.load.callers for case in cases)
    consumers = max(case.load.consumers for case in cases)

    async def clients(processes: int, calls: int) -> Clients:
        return await stage.clients(
            system,
            servers=[servers] * processes,
            callers=-(-calls // processes),
            connections=plan.connections,
        )

    if plan.beside in {Beside.ECHO, Beside.TLS_UNARY}:
        producers = None
        workers = await clients(plan.producers, max(callers, consumers))
    else:
        producers = await clients(plan.producers, callers)
        workers = await clients(plan.workers, consumers)
    return Turn(
        stage=stage,
        producers=producers or workers,
        workers=workers,
        servers=servers,
        counter=Counter(stage=stage, system=system, producers=producers, workers=workers, servers=servers),
    )


async def _servers(stage: Stage, system: str, routers: int, listeners: telemetry.Listeners | None) -> Servers:
    """Returns the servers that the system's clients call. Starts them if the stage does not have them."""
    if system == ECHO:
        return await stage.echo(routers)
    if system in {TLS, TLS_UNARY}:
        return await stage.tls_routers(routers, keys=False)
    if system in {SECURE, SECURE_UNARY}:
        return await stage.tls_routers(routers, keys=True)
    if system in telemetry.SYSTEMS:
        assert listeners is not None
        return await listeners.routers(stage, system, routers)
    return stage.routers


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
        drained, lived = _alike(jobs) if plan.beside in _ALIKE else jobs[system]
        found = [*await turns[system].filled_and_drained(case.load, drained)]
        written: Written | None = None
        if plan.written:
            await asyncio.sleep(COUNTED_S)
            written = await turns[system].stage.written(system)
        found.append(await turns[system].lived(_life(system, case.load), lived))
        if written is not None:
            await asyncio.sleep(COUNTED_S)
            written = await turns[system].stage.written(system) - written
        samples.extend(
            Sample(
                system=system,
                case=case,
                run=run,
                timed=timed,
                written=written if timed.figure is Figure.LIFE else None,
            )
            for timed in found
        )
        rates = " · ".join(f"{timed.figure} {timed.jobs_per_s:,.0f}/s" for timed in found)
        bench.say(f"{_named(case)}, run {run} of {plan.runs}: {load(system).title}: {rates}")

    await bench.rounds(turns, 1, warm)
    await bench.rounds(turns, plan.runs, turn)
    return samples


def _alike(jobs: dict[str, tuple[int, int]]) -> tuple[int, int]:
    """Returns the largest numbers of jobs of any system. Every system then gets these numbers."""
    return max(drained for drained, _ in jobs.values()), max(lived for _, lived in jobs.values())


def _life(system: str, load: Load) -> Load:
    if system not in _SHARED_CALLERS:
        return load
    return replace(load, callers=max(1, load.callers // 2), consumers=max(1, load.consumers // 2))


def _named(case: Case) -> str:
    return f"{case.shards} shard(s), {case.routers} router(s), batch {case.load.batch}, {case.load.callers} callers"


def _options(parser: argparse.ArgumentParser) -> None:
    plan = Plan()
    parser.add_argument(
        "--beside",
        type=Beside,
        choices=list(Beside),
        default=plan.beside,
        help="limit: raw streams, and the same statements without gRPC; echo: one job a unary call beside an echo of "
        "the same messages, and one job a client.enqueue(); telemetry: routers that trace 1 %% of their calls, that "
        "serve metrics, and that do both; tls (by one job a unary call: tls-unary): routers that speak TLS, and "
        "such that also ask for an API key; groups: jobs of 1,000 groups, of which one or three run at a time; limit",
    )
    parser.add_argument(
        "--batch",
        type=numbers(1000),
        metavar="N,N",
        help="jobs a call; 100, beside echo 1, beside telemetry 1,100",
    )
    parser.add_argument(
        "--callers",
        type=numbers(10_000),
        metavar="N,N",
        help=f"in all; {_CALLERS}, and {_CALLERS_OF_SMALL} for batches below {_SMALL}; beside telemetry 16",
    )
    parser.add_argument("--consumers", type=number(10_000), help="in all; as many as callers")
    parser.add_argument("--shards", type=numbers(64), default=plan.shards, metavar="N,N", help="Postgres shards; 1")
    parser.add_argument(
        "--share",
        type=_share,
        metavar="N,N,N",
        help="cores of each router process, of each shard's Postgres, and of all client processes together, such as "
        "0.1,0.2,0.8: what grows with routers and shards where the others do not get less; needs control groups",
    )
    parser.add_argument("--jobs", type=number(10**8), help="of a run; by default as many as take --seconds")
    parser.add_argument("--seconds", type=positive, default=plan.seconds, help="that a figure is to take; 2")
    parser.add_argument("--written", action="store_true", help="count WAL, commits and dead rows too: 22 s more a run")
    parser.add_argument(
        "--connections", type=number(64), help="of each client process; 4 by the stubs, 1 by windrow.Client"
    )
    add_runs(parser, plan.runs)
    add_peers(parser)
    add_processes(parser)


def _share(text: str) -> Share:
    """Parses three numbers with commas between them."""
    try:
        router, postgres, clients = map(positive, text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be three numbers such as 0.1,0.2,0.8, not {text!r}") from None
    return Share(router=router, postgres=postgres, clients=clients)


def _plan(given: argparse.Namespace) -> Plan:
    return Plan(
        beside=given.beside,
        peers=given.peers,
        shards=given.shards,
        batches=given.batch or _BATCHES[given.beside],
        callers=given.callers or _CALLERS_BESIDE[given.beside],
        consumers=given.consumers,
        runs=given.runs,
        seconds=given.seconds,
        jobs=given.jobs,
        producers=given.producers,
        workers=given.workers,
        connections=given.connections,
        routers=given.routers,
        share=given.share,
        written=given.written,
    )


SCENARIO = Scenario(
    help="jobs a second by batch and by callers: enqueue, drain, whole life; CPU time, and what is written",
    options=_options,
    plan=_plan,
    measure=measure,
    full=lambda peers: (
        Plan(peers=peers, batches=(1, 10, 100, 500), seconds=1.0),
        Plan(name="throughput by callers", batches=(10,), callers=(1, 8, 64, 256), seconds=0.7),
        Plan(name="throughput beside an echo", beside=Beside.ECHO, batches=(1,), seconds=1.0),
        Plan(name="what is written", peers=peers, batches=(100,), runs=1, seconds=1.5, written=True),
        Plan(name="telemetry", beside=Beside.TELEMETRY, batches=(1, 100), callers=(16,), runs=7, seconds=1.0),
    ),
    quick=lambda: (
        Plan(batches=(10, 100), runs=3, seconds=0.6),
        Plan(name="throughput beside an echo", beside=Beside.ECHO, batches=(1,), runs=3, seconds=0.6),
    ),
)
