"""Measures the effect of hostile clients: the memory of a router process during and after an attack, and the calls of a
quiet org during the attack."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import secrets
import time
from asyncio.subprocess import Process
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from dataclasses import asdict, dataclass, replace

from bench.attacker_process import Order
from bench.attacks import Attack, AttackOutcome, description
from bench.report import Found, Plot
from bench.scenario import Bench, Scenario
from bench.stage import Stage
from bench.system import Wrong
from bench.times import Times, due_between, p99_by_time, times
from proof import history
from proof.arguments import names, number, positive
from proof.background import background
from proof.edge import running_edge
from proof.history import Outcome, Verb
from proof.memory import resident_bytes
from proof.processes import ProcessFailed, finish, serving
from proof.table import Table

_WARM_S = 3.0
_WEIGH_EVERY_S = 0.25
_STEP_S = 1.0
_MIB = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    attacks: tuple[Attack, ...] = tuple(Attack)
    before_s: float = 10.0
    # How long an attack lasts, and how long the router is watched after it.
    seconds: float = 60.0
    after_s: float = 60.0
    # The load of the quiet org. A turn is an enqueue, a dequeue and an ack.
    turns_per_s: int = 50
    routers: int = 1
    # How many streams the attack UNREAD_STREAMS opens.
    streams: int = 300
    # The largest resident memory that a router process may have. None: the report checks no bound.
    memory_mib: float | None = None
    # If set, all calls go through Envoy with deploy/envoy.yaml.
    edge: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Attacked:
    """The result of one attack. Times are in seconds since the attack began."""

    attack: Attack
    outcome: AttackOutcome
    ended_s: float
    # Pairs of a time and the resident MiB of the largest router process.
    resident: Sequence[tuple[float, float]]
    # For each second, the p99 of the quiet org's enqueues and dequeues in ms.
    p99: Sequence[tuple[float, float]]
    before: Times | None
    during: Times | None
    after: Times | None
    # How many calls of the quiet org failed, by the name of their status.
    failed: Counter[str]
    # How many router processes ended.
    died: int

    def most_mib(self, first_s: float, past_s: float) -> float:
        return max((mib for at_s, mib in self.resident if first_s <= at_s < past_s), default=0.0)

    @property
    def last_mib(self) -> float:
        return self.resident[-1][1]

    def told(self) -> dict[str, object]:
        return {
            "attack": self.attack.value,
            "attacker_saw": self.outcome.text(),
            "ended_s": self.ended_s,
            "quiet_org_ms": {
                name: one and asdict(one)
                for name, one in (("before", self.before), ("during", self.during), ("after", self.after))
            },
            "quiet_org_failed": dict(sorted(self.failed.items())),
            "processes_that_ended": self.died,
            "resident_mib": [list(point) for point in self.resident],
            "p99_ms": [list(point) for point in self.p99],
        }


async def measure(plan: Plan, bench: Bench) -> Found:
    found: list[Attacked] = []
    for attack in plan.attacks:
        # Each attack gets a cluster of its own: a router process does not give back all the memory that it has used.
        async with bench.stage(shards=1, routers=plan.routers) as stage:
            bench.say(f"{attack}: {description(attack, streams=plan.streams)}")
            with _entrance(plan, stage) as address:
                one = await _attacked(attack, plan, stage, address)
            found.append(one)
            if one.died:
                bench.broken("hostile", f"{one.died} router process(es) ended during {attack}")
    return Found(
        scenario="hostile",
        plan=asdict(plan),
        samples=[one.told() for one in found],
        tables=[_memory_table(found, plan), _calls_table(found, plan)],
        plots=[_plot(found, plan)],
    )


@contextlib.contextmanager
def _entrance(plan: Plan, stage: Stage) -> Generator[str, None, None]:
    """Yields the address that the attacker and the quiet org use."""
    if not plan.edge:
        yield stage.routers.address
        return
    folder = stage.file("edge")
    folder.mkdir()
    with running_edge(stage.routers.address, folder) as address:
        yield address


async def _attacked(attack: Attack, plan: Plan, stage: Stage, address: str) -> Attacked:
    order = Order(attack=attack, address=address, streams=plan.streams, seconds=plan.seconds)
    orgs = [f"bench-quiet-{secrets.token_hex(4)}"]
    site = replace(stage.site("quiet", orgs, per_s=float(plan.turns_per_s)), address=address)
    processes = set(stage.routers.pids())
    async with (
        serving("bench.attacker_process", order=order.to_json()) as (attacker, _),
        serving("bench.caller", order=site.to_json()) as (process, _),
        _weighed(stage.routers.pids) as resident,
    ):
        await asyncio.sleep(_WARM_S)
        start_s = time.monotonic()
        await asyncio.sleep(plan.before_s)
        began_s = time.monotonic()
        outcome = await _outcome(attacker)
        ended_s = time.monotonic()
        await asyncio.sleep(plan.after_s)
        await finish(process)
    seen = await asyncio.to_thread(history.read, stage.histories)
    calls = [call for call in seen.calls if call.verb in {Verb.ENQUEUE, Verb.DEQUEUE} and call.due_s >= start_s]
    if not calls:
        raise Wrong(f"the quiet org made no calls beside {attack}")
    return Attacked(
        attack=attack,
        outcome=outcome,
        ended_s=ended_s - began_s,
        resident=[(at_s - began_s, mib) for at_s, mib in resident if at_s >= start_s],
        p99=p99_by_time(calls, start_s=began_s, step_s=_STEP_S),
        before=times(due_between(calls, start_s, began_s)),
        during=times(due_between(calls, began_s, ended_s)),
        after=times(due_between(calls, ended_s, float("inf"))),
        failed=Counter(call.code for call in calls if call.outcome is not Outcome.OK),
        died=len(processes - set(stage.routers.pids())),
    )


async def _outcome(attacker: Process) -> AttackOutcome:
    """Tells the process to begin its attack, and waits until the attack has ended. Returns what the attacker saw."""
    assert attacker.stdin is not None
    assert attacker.stdout is not None
    attacker.stdin.write(b"attack\n")
    told = await attacker.stdout.readline()
    if not told:
        raise ProcessFailed("the attacker has ended; see above")
    return AttackOutcome.from_json(told)


@contextlib.asynccontextmanager
async def _weighed(pids: Callable[[], Sequence[int]]) -> AsyncGenerator[list[tuple[float, float]], None]:
    """Yields a list. During this scope, pairs are added to this list: a time, and the resident MiB of the largest of
    these processes."""
    course: list[tuple[float, float]] = []

    async def weigh() -> None:
        while True:
            if sizes := resident_bytes(pids()):
                course.append((time.monotonic(), max(sizes.values()) / _MIB))
            await asyncio.sleep(_WEIGH_EVERY_S)

    async with background(weigh()):
        yield course


def _memory_table(found: Sequence[Attacked], plan: Plan) -> Table:
    def bound(one: Attacked) -> str:
        if plan.memory_mib is None:
            return "–"
        return "yes" if one.most_mib(0.0, float("inf")) <= plan.memory_mib else "**no**"

    return Table(
        title="Memory of the largest router process, MiB resident",
        head=(
            *("attack", "before", "most during", f"{plan.after_s:g} s after", "within the bound"),
            *("processes that ended", "the attacker saw"),
        ),
        rows=[
            (
                description(one.attack, streams=plan.streams),
                f"{one.most_mib(float('-inf'), 0.0):,.0f}",
                f"{one.most_mib(0.0, one.ended_s):,.0f}",
                f"{one.last_mib:,.0f}",
                bound(one),
                str(one.died),
                one.outcome.text(),
            )
            for one in found
        ],
        note="No bound was given."
        if plan.memory_mib is None
        else f"The bound is {plan.memory_mib:,g} MiB, during an attack and after it.",
    )


def _calls_table(found: Sequence[Attacked], plan: Plan) -> Table:
    def cells(one: Times | None) -> tuple[str, str]:
        return ("–", "–") if one is None else (f"{one.p50:.1f}", f"{one.p99:.1f}")

    return Table(
        title=f"Enqueues and dequeues of a quiet org, {plan.turns_per_s:,} of each a second, ms",
        head=(
            *("attack", "lasted, s", "p50 before", "p99 before", "p50 during", "p99 during"),
            *("p50 after", "p99 after", "failed"),
        ),
        rows=[
            (
                one.attack.value,
                f"{one.ended_s:.1f}",
                *cells(one.before),
                *cells(one.during),
                *cells(one.after),
                ", ".join(f"{count:,} × {code}" for code, count in sorted(one.failed.items())) or "0",
            )
            for one in found
        ],
        note="A call's time counts from when it was due. The attacker shares this machine; on Linux it only gets the "
        "CPU time that others leave.",
    )


def _plot(found: Sequence[Attacked], plan: Plan) -> Plot:
    memory = {one.attack.value: one.resident for one in found}
    if plan.memory_mib is not None:
        ends = [(-plan.before_s, plan.memory_mib), (plan.seconds + plan.after_s, plan.memory_mib)]
        memory["bound"] = ends
    return Plot(
        name="hostile",
        title="A router process under attack",
        x="s since the attack began",
        y="MiB resident",
        lines=memory,
        marks={"attack": 0.0, "its end": plan.seconds},
        below=(
            Plot(
                name="quiet",
                title="Enqueues and dequeues of a quiet org",
                x="s",
                y="p99 of each second, ms",
                lines={one.attack.value: one.p99 for one in found},
                y_log=True,
            ),
        ),
    )


def _attacks(text: str) -> tuple[Attack, ...]:
    return tuple(map(Attack, names(text, list(Attack), "attack")))


def _options(parser: argparse.ArgumentParser) -> None:
    plan = Plan()
    parser.add_argument(
        "--attacks", type=_attacks, default=plan.attacks, metavar="NAME,…", help=f"all of {', '.join(Attack)}"
    )
    parser.add_argument("--seconds", type=positive, default=plan.seconds, help="of each attack; 60")
    parser.add_argument("--before-seconds", type=positive, default=plan.before_s, help="without one; 10")
    parser.add_argument("--after-seconds", type=positive, default=plan.after_s, help="after each; 60")
    parser.add_argument(
        "--rate", type=number(10**5), default=plan.turns_per_s, help="enqueues, dequeues and acks a second each; 50"
    )
    parser.add_argument("--routers", type=number(64), default=plan.routers, help="router processes; 1")
    parser.add_argument(
        "--streams", type=number(5000), default=plan.streams, help=f"of {Attack.UNREAD_STREAMS}; {plan.streams}"
    )
    parser.add_argument(
        "--memory", type=positive, default=None, metavar="MIB", help="the bound of a router process, drawn as a line"
    )
    parser.add_argument(
        "--edge", action="store_true", help="all calls go through Envoy, with deploy/envoy.yaml in front of the routers"
    )


SCENARIO = Scenario(
    help="what hostile clients cost: a router's memory under attack and after, and a quiet org's calls meanwhile",
    options=_options,
    plan=lambda given: Plan(
        attacks=given.attacks,
        before_s=given.before_seconds,
        seconds=given.seconds,
        after_s=given.after_seconds,
        turns_per_s=given.rate,
        routers=given.routers,
        streams=given.streams,
        memory_mib=given.memory,
        edge=given.edge,
    ),
    measure=measure,
    full=lambda _: Plan(seconds=15.0, after_s=15.0),
    quick=None,
)
