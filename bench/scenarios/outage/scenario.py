"""Measures how an outage of one shard affects the orgs on this shard and all other orgs. While calls come in at a
steady pace, a shard's Postgres is killed and started again, or it is killed and its standby takes over.

The clients call the generated stubs and retry nothing, because the scenario judges each answer of a router. At the end,
every job whose enqueue was answered OK must be in the tables.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import secrets
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass

import grpc

from bench.demands import Demand, at_most, none_of
from bench.demands import table as demands_table
from bench.report import Found, Plot
from bench.scenario import Bench, Scenario
from bench.scenarios.outage.figures import Outcome, Sort, Strike, outcome
from bench.stage import SETTINGS, Stage
from bench.systems.on_routers import CALL_S_MAX, QUEUE
from bench.times import p99_by_time
from bench.verdict import Verdict, judge
from proof import history
from proof.arguments import number, positive
from proof.history import Call
from proof.postgres import Node, Shard
from proof.processes import finish, serving
from proof.table import Table
from windrow.v1 import admin_pb2, admin_pb2_grpc

_SHARDS = 3
_WARM_S = 3.0
# How long a primary is dead before its standby is promoted. In practice, the decision to promote takes time.
_NOTICE_S = 1.0
# Within this time, routers load a changed cluster file and connect. They look at the file twice a second.
_TAKEN_UP_S = 5.0
_ORGS_TRIED_MAX = 1000
_STEP_S = 1.0

_RATIO_MAX = 1.2
_SILENT_S_MAX = 1.0
_RESTARTED_S_MAX = 5.0
_FAILED_OVER_S_MAX = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    # The number of kills with a restart, and the number of kills with a fail-over.
    kills: int = 5
    # Each turn is an enqueue, a dequeue and an ack.
    turns_per_s: int = 300
    orgs: int = 30
    # How long calls run before each kill. A shard that is restarted is first down for the same time. After the restart
    # or the promotion, calls continue for half of this time and for _RESTARTED_S_MAX or _FAILED_OVER_S_MAX.
    seconds: float = 10.0
    routers: int = 2


async def measure(plan: Plan, bench: Bench) -> Found:
    async with bench.stage(shards=_SHARDS, routers=plan.routers) as stage:
        homes = await _orgs(stage, plan.orgs)
        site = stage.site("caller", list(homes), per_s=float(plan.turns_per_s))
        began_s = time.monotonic()
        async with (
            serving("bench.caller", order=site.to_json()) as (process, _),
            _nodes(stage) as (nodes, replicated),
        ):
            await asyncio.sleep(_WARM_S)
            strikes = [await _restart(nodes[turn % len(nodes)], plan, bench, turn) for turn in range(plan.kills)]
            strikes += [await _fail_over(stage, plan, bench, replicated, turn) for turn in range(plan.kills)]
            await finish(process)
            bench.say("reading tables and what clients saw")
            # A node that was rebuilt has another server than the one that the stage started.
            dsns = {node.name: node.cluster.dsn for node in nodes} | {replicated.name: replicated.direct_dsn}
            seen, verdict = await asyncio.to_thread(judge, stage.histories, dsns, address=stage.routers.address)
    outcomes = [outcome(strike, seen.calls, homes) for strike in strikes]
    if verdict.violations:
        bench.broken("outage", verdict.text())
    return Found(
        scenario="outage",
        plan=asdict(plan),
        samples=[
            *(one.told(began_s) for one in outcomes),
            {"verdict": verdict.told(), "demands": [one.told() for one in demands(outcomes, verdict)]},
        ],
        tables=[
            demands_table(
                f"One of {_SHARDS} shards is away, {plan.turns_per_s:,} × (enqueue, dequeue, ack) a second offered",
                demands(outcomes, verdict),
                "Medians over kills, but for what must be 0, which is over all. A call's time counts from when it was "
                "due. Own orgs: those of the shard that was killed; the others': all others. All share this machine: "
                "what the killed shard does not do meanwhile, the others have.",
            ),
            _strikes_table(outcomes),
        ],
        plots=_plots(seen.calls, homes, strikes, began_s),
    )


def demands(outcomes: Sequence[Outcome], verdict: Verdict) -> list[Demand]:
    """Returns the conditions that must hold, and says for each condition whether it holds."""
    restarts = [one for one in outcomes if one.strike.sort is Sort.RESTART]
    fail_overs = [one for one in outcomes if one.strike.sort is Sort.FAIL_OVER]
    return [
        at_most("others' p50 while a shard is away ÷ before", _median(restarts, lambda one: one.ratio_p50), _RATIO_MAX),
        at_most("others' p99 while a shard is away ÷ before", _median(restarts, lambda one: one.ratio_p99), _RATIO_MAX),
        none_of("others' calls that failed since a kill", sum(one.others_failed for one in outcomes)),
        at_most(
            "own orgs' calls, killed: the longest without an answer",
            _median(restarts, lambda one: one.silent_s),
            _SILENT_S_MAX,
            "s",
        ),
        none_of("own orgs' calls answered neither OK nor UNAVAILABLE", sum(sum(one.odd.values()) for one in outcomes)),
        at_most(
            "from the order to restart until every own org is served",
            _median(restarts, lambda one: one.served_s),
            _RESTARTED_S_MAX,
            "s",
        ),
        at_most(
            "from the order to promote the standby until every own org is served",
            _median(fail_overs, lambda one: one.served_s),
            _FAILED_OVER_S_MAX,
            "s",
        ),
        *verdict.demands(),
    ]


async def _orgs(stage: Stage, count: int) -> dict[str, str]:
    """Makes orgs with one queue each, spread evenly over the shards. Returns the shard of each org."""
    homes: dict[str, list[str]] = {shard: [] for shard in stage.dsns}
    most = -(-count // len(homes))
    run = secrets.token_hex(6)
    async with grpc.aio.insecure_channel(stage.routers.address) as channel:
        admin = admin_pb2_grpc.AdminStub(channel)
        for at in range(_ORGS_TRIED_MAX):
            if all(len(orgs) == most for orgs in homes.values()):
                break
            org = f"bench-{run}-{at}"
            made = await admin.CreateQueue(admin_pb2.CreateQueueRequest(org=org, queue=QUEUE), timeout=CALL_S_MAX)
            if len(homes[made.queue.shard]) < most:
                homes[made.queue.shard].append(org)
    # The shards take turns, so that each shard's orgs get calls at an even pace.
    return {org: shard for orgs in zip(*homes.values(), strict=True) for org, shard in zip(orgs, homes, strict=True)}


@asynccontextmanager
async def _nodes(stage: Stage) -> AsyncGenerator[tuple[list[Node], Shard], None]:
    """Yields a node for the server of each shard. Also yields the first shard together with its standby, to which it
    can fail over. The first shard's server has the catalog too."""
    nodes = [Node(name, settings=SETTINGS, cluster=server) for name, server in stage.postgres.items()]
    standby = Node(f"{nodes[0].name}-standby", settings=SETTINGS)
    try:
        yield nodes, Shard(nodes[0].name, [nodes[0], standby])
    finally:
        for node in (nodes[0], standby):
            await node.close()


async def _restart(node: Node, plan: Plan, bench: Bench, turn: int) -> Strike:
    began_s = time.monotonic()
    await asyncio.sleep(plan.seconds)
    bench.say(f"kill {turn + 1} of {plan.kills}: {node.name}, started again after {plan.seconds:g} s")
    killed_s = await asyncio.to_thread(node.kill)
    await asyncio.sleep(killed_s + plan.seconds - time.monotonic())
    back_s = time.monotonic()
    await node.start()
    up_s = time.monotonic()
    bench.say(f"{node.name} has recovered, after {up_s - back_s:.1f} s")
    await asyncio.sleep(_RESTARTED_S_MAX + plan.seconds / 2)
    return Strike(
        sort=Sort.RESTART,
        shard=node.name,
        began_s=began_s,
        killed_s=killed_s,
        back_s=back_s,
        up_s=up_s,
        ended_s=time.monotonic(),
    )


async def _fail_over(stage: Stage, plan: Plan, bench: Bench, shard: Shard, turn: int) -> Strike:
    await shard.rebuild()
    stage.cluster_file.entry(shard.name).dsn = shard.nodes_dsn
    stage.cluster_file.save()
    await asyncio.sleep(_TAKEN_UP_S)
    began_s = time.monotonic()
    await asyncio.sleep(plan.seconds)
    bench.say(f"fail-over {turn + 1} of {plan.kills}: {shard.name}, promoted after {_NOTICE_S:g} s")
    killed_s = await asyncio.to_thread(shard.primary.kill)
    await asyncio.sleep(killed_s + _NOTICE_S - time.monotonic())
    back_s = time.monotonic()
    await shard.promote()
    up_s = time.monotonic()
    bench.say(f"{shard.name} is promoted, after {up_s - back_s:.1f} s")
    await asyncio.sleep(_FAILED_OVER_S_MAX + plan.seconds / 2)
    return Strike(
        sort=Sort.FAIL_OVER,
        shard=shard.name,
        began_s=began_s,
        killed_s=killed_s,
        back_s=back_s,
        up_s=up_s,
        ended_s=time.monotonic(),
    )


def _median(outcomes: Sequence[Outcome], figure: Callable[[Outcome], float]) -> float:
    values = [figure(one) for one in outcomes]
    return statistics.median(values) if values and not any(map(math.isnan, values)) else math.nan


def _strikes_table(outcomes: Sequence[Outcome]) -> Table:
    return Table(
        title="Each kill",
        head=(
            *("", "shard", "others' p50, p99 before, ms", "while away", "while it comes back", "others failed"),
            *("first UNAVAILABLE, s", "longest without an answer, s", "Postgres back, s", "all served, s"),
        ),
        rows=[
            (
                str(one.strike.sort),
                one.strike.shard,
                *(
                    "–" if times is None else f"{times.p50:.2f}, {times.p99:.2f}"
                    for times in (one.before, one.away, one.back)
                ),
                f"{one.others_failed:,}",
                f"{one.first_refused_s:.3f}",
                f"{one.silent_s:.3f}",
                f"{one.strike.up_s - one.strike.back_s:.2f}",
                f"{one.served_s:.2f}",
            )
            for one in outcomes
        ],
        note="The last two since the order to start or to promote. s1 has the catalog.",
    )


def _plots(calls: Sequence[Call], homes: Mapping[str, str], strikes: Sequence[Strike], start_s: float) -> list[Plot]:
    of_shard: defaultdict[str, list[Call]] = defaultdict(list)
    for call in calls:
        of_shard[homes[call.org]].append(call)
    marks = {
        f"{'kill' if strike.sort is Sort.RESTART else 'fail-over'} {strike.shard} ({at})": strike.killed_s - start_s
        for at, strike in enumerate(strikes, 1)
    }
    steps = range(int((max((call.due_s for call in calls), default=start_s) - start_s) / _STEP_S) + 1)
    return [
        Plot(
            name="outage",
            title="Calls of the orgs of each shard",
            x="s",
            y="p99 of each second, ms",
            lines={
                shard: p99_by_time(mine, start_s=start_s, step_s=_STEP_S) for shard, mine in sorted(of_shard.items())
            },
            marks=marks,
            y_log=True,
            below=(
                Plot(
                    name="failed",
                    title="",
                    x="s",
                    y="failed calls/s",
                    lines={
                        shard: [(at * _STEP_S, count) for at, count in _failed(mine, start_s, steps)]
                        for shard, mine in sorted(of_shard.items())
                    },
                ),
            ),
        )
    ]


def _failed(calls: Sequence[Call], start_s: float, steps: range) -> list[tuple[int, int]]:
    counts = Counter(int((call.due_s - start_s) // _STEP_S) for call in calls if call.outcome is not history.Outcome.OK)
    return [(at, counts[at]) for at in steps]


def _options(parser: argparse.ArgumentParser) -> None:
    plan = Plan()
    parser.add_argument("--kills", type=number(1000), default=plan.kills, help="of each sort; 5")
    parser.add_argument(
        "--rate", type=number(10**5), default=plan.turns_per_s, help="enqueues, dequeues and acks a second each; 300"
    )
    parser.add_argument("--orgs", type=number(900), default=plan.orgs, help="dealt to the three shards; 30")
    parser.add_argument(
        "--seconds", type=positive, default=plan.seconds, help="before a kill, and away before a restart; 10"
    )


SCENARIO = Scenario(
    help="what one shard's outage is for its orgs and for all others: a kill and a restart, a fail-over",
    options=_options,
    plan=lambda given: Plan(kills=given.kills, turns_per_s=given.rate, orgs=given.orgs, seconds=given.seconds),
    measure=measure,
    full=lambda _: Plan(kills=3),
    quick=None,
)
