"""Computes how evenly slots, orgs and their jobs are spread over 10 to 1,000 shards, and what moves when shards are
added, removed or get another weight.

Starts no cluster: a plan needs no database (shard/placement/slots.py), and the time of a move at a given rate can be
calculated.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import random
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from bench.report import Found, Plot
from bench.scenario import Bench, Scenario
from bench.system import Wrong
from proof.arguments import number, numbers, positive
from proof.table import Table
from shard.placement.slots import SLOTS, plan, shares, slot_of
from shard.vocabulary import OrgId, ShardName

# The exponents of Pareto distributions that say how unequal orgs are: the largest fifth of the orgs has 45 % or 80 % of
# all jobs.
_TAILS: Mapping[str, float] = {"45/20": 2.0, "80/20": 1.161}
_SEED = 20_240_229
_ORGS_A_TURN = 200_000
# An org with more than this share of a shard's mean load is left out, as if it were pinned to a shard of its own. At
# most _PINNED_MAX orgs are left out.
_PINNED_ABOVE = 0.1
_PINNED_MAX = 1000

Weights = Mapping[ShardName, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    shards: tuple[int, ...] = (10, 30, 100, 300, 1000)
    orgs: int = 10_000_000
    # How many live jobs the whole cluster has, and how many jobs a second one shard can give away or receive.
    jobs: int = 100_000_000
    rate: float = 10_000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What moves when a cluster of equal shards gets new weights."""

    shards: int
    what: str
    moved: int
    # The smallest number of slots that must move: the slots that shards hold in excess of their shares.
    least: int
    # The largest difference in slots between two shards of the same weight, before and after the change.
    apart: tuple[int, int]
    # How many slots the busiest shard gives or takes.
    busiest: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The loads of the least and the most loaded shard, as shares of the mean load. All shards have the same weight."""

    shards: int
    slots: tuple[float, float]
    orgs: tuple[float, float]
    # The keys are those of _TAILS.
    jobs: Mapping[str, tuple[float, float]]
    # How many orgs have a load above _PINNED_ABOVE, and the loads of the shards without these orgs.
    pinned: Mapping[str, int]
    jobs_of_others: Mapping[str, tuple[float, float]]


@dataclass(slots=True, kw_only=True)
class Population:
    """The load of each slot."""

    orgs: array[int]
    # The keys are those of _TAILS.
    jobs: Mapping[str, array[float]]
    # The orgs with the most jobs: how many jobs each org has, and the org's slot.
    largest: Mapping[str, list[tuple[float, int]]]


async def measure(given: Plan, bench: Bench) -> Found:
    population = await populate(given.orgs, bench)
    changes: list[Change] = []
    loads: list[Load] = []
    for count in given.shards:
        found = changes_of(count, jobs=given.jobs, rate=given.rate)
        changes += found
        loads.append(load_of(count, population))
        bench.say(f"{count:,} shards: " + ", ".join(f"{change.what}: {change.moved:,} slots move" for change in found))
    return Found(
        scenario="placement",
        plan=asdict(given),
        samples=[
            *({"sample": "change", **asdict(change)} for change in changes),
            *({"sample": "load", **asdict(load)} for load in loads),
        ],
        tables=[_changes_table(given, changes), _loads_table(given, loads)],
        plots=[_plot(loads)] if len(loads) > 1 else [],
    )


async def populate(orgs: int, bench: Bench) -> Population:
    """Puts orgs on their slots, and gives each a random number of jobs."""
    bench.say(f"hashing {orgs:,} orgs")
    luck = random.Random(_SEED)
    counts = array("L", bytes(SLOTS * array("L").itemsize))
    jobs = {tail: array("d", bytes(SLOTS * array("d").itemsize)) for tail in _TAILS}
    largest: dict[str, list[tuple[float, int]]] = {tail: [(0.0, 0)] * _PINNED_MAX for tail in _TAILS}
    for first in range(0, orgs, _ORGS_A_TURN):
        # Let the event loop run, so that Ctrl-C can end this function.
        await asyncio.sleep(0)
        for n in range(first, min(orgs, first + _ORGS_A_TURN)):
            slot = slot_of(OrgId(f"org-{n}"))
            counts[slot] += 1
            above = 1.0 - luck.random()
            for tail, exponent in _TAILS.items():
                size: float = above ** (-1 / exponent)
                jobs[tail][slot] += size
                if size > largest[tail][0][0]:
                    heapq.heapreplace(largest[tail], (size, slot))
    return Population(orgs=counts, jobs=jobs, largest=largest)


def changes_of(count: int, *, jobs: int, rate: float) -> list[Change]:
    """Returns the effects of three changes: one more shard, one drained shard, and twice the weight for every second
    shard. Raises Wrong if a plan is not balanced, or moves more slots than it must."""
    names = [ShardName(f"s{n}") for n in range(1, count + 1)]
    alike: Weights = dict.fromkeys(names, 1.0)
    owners = plan([None] * SLOTS, alike)
    wishes: Mapping[str, Weights] = {
        "one more": {**alike, ShardName(f"s{count + 1}"): 1.0},
        "one drained": {**alike, names[-1]: 0.0},
        "half of them twice as heavy": {name: 1.0 + at % 2 for at, name in enumerate(names)},
    }
    return [
        _change(what, owners, alike, weights, jobs=jobs, rate=rate)
        for what, weights in wishes.items()
        # The only shard cannot be drained.
        if any(weights.values())
    ]


def _change(
    what: str, owners: Sequence[ShardName], before: Weights, after: Weights, *, jobs: int, rate: float
) -> Change:
    planned = plan(owners, after)
    moves = [(old, new) for old, new in zip(owners, planned, strict=True) if old != new]
    given, taken = Counter(old for old, _ in moves), Counter(new for _, new in moves)
    had, wanted = Counter(owners), shares(after)
    busiest = max([*given.values(), *taken.values()], default=0)
    change = Change(
        shards=len(before),
        what=what,
        moved=len(moves),
        least=sum(max(0, slots - wanted[shard]) for shard, slots in had.items()),
        apart=(_apart(owners, before), _apart(planned, after)),
        busiest=busiest,
        seconds=busiest * jobs / SLOTS / rate,
    )
    if max(change.apart) > 1 or change.moved > change.least:
        raise Wrong(f"a plan is not balanced, or moves more than it must: {change}")
    added = len(after) - len(before)
    if added and change.moved > 1.05 * added / len(after) * SLOTS:
        raise Wrong(f"more moves to a new shard than its share: {change}")
    return change


def _apart(owners: Sequence[ShardName], weights: Weights) -> int:
    held = Counter(owners)
    alike: dict[float, list[int]] = {}
    for shard, weight in weights.items():
        alike.setdefault(weight, []).append(held[shard])
    return max(max(slots) - min(slots) for slots in alike.values())


def load_of(count: int, population: Population) -> Load:
    owners = plan([None] * SLOTS, {ShardName(f"s{n}"): 1.0 for n in range(1, count + 1)})
    pinned: dict[str, int] = {}
    others: dict[str, tuple[float, float]] = {}
    for tail, jobs in population.jobs.items():
        most = _PINNED_ABOVE * sum(jobs) / count
        large = [(size, slot) for size, slot in population.largest[tail] if size > most]
        rest = array("d", jobs)
        for size, slot in large:
            rest[slot] -= size
        pinned[tail] = len(large)
        others[tail] = _ends(owners, rest)
    return Load(
        shards=count,
        slots=_ends(owners, [1] * SLOTS),
        orgs=_ends(owners, population.orgs),
        jobs={tail: _ends(owners, jobs) for tail, jobs in population.jobs.items()},
        pinned=pinned,
        jobs_of_others=others,
    )


def _ends(owners: Sequence[ShardName], on_slot: Sequence[float]) -> tuple[float, float]:
    """Returns the loads of the least and the most loaded shard, as shares of the mean."""
    held: dict[ShardName, float] = dict.fromkeys(owners, 0.0)
    for owner, there in zip(owners, on_slot, strict=True):
        held[owner] += there
    mean = sum(held.values()) / len(held)
    return min(held.values()) / mean, max(held.values()) / mean


def _changes_table(given: Plan, changes: Sequence[Change]) -> Table:
    return Table(
        title="What moves",
        head=(
            "shards",
            "change",
            "slots that move",
            "of all",
            "the least that can",
            "slots apart",
            "busiest shard",
            "time",
        ),
        rows=[
            (
                f"{change.shards:,}",
                change.what,
                f"{change.moved:,}",
                f"{change.moved / SLOTS:.2%}",
                f"{change.least:,}",
                f"{change.apart[0]} → {change.apart[1]}",
                f"{change.busiest:,}",
                _span(change.seconds),
            )
            for change in changes
        ],
        note=f"Of {SLOTS:,} slots, from equal weights. Slots apart: the most and the least of shards of one weight, "
        f"before and after. Time: with {given.jobs:,} live jobs in the cluster, spread evenly, and {given.rate:,.0f} a "
        "second that one shard gives or takes, until the busiest is done.",
    )


def _loads_table(given: Plan, loads: Sequence[Load]) -> Table:
    rows: list[list[str]] = []
    for load in loads:
        cells = [f"{load.shards:,}", _between(load.slots), _between(load.orgs)]
        for tail in _TAILS:
            cells += [_between(load.jobs[tail]), f"{load.pinned[tail]:,}", _between(load.jobs_of_others[tail])]
        rows.append(cells)
    return Table(
        title=f"Where {given.orgs:,} orgs lie: least – greatest shard, ÷ the mean",
        head=(
            "shards",
            "slots",
            "orgs",
            *(f"{what}, {tail}" for tail in _TAILS for what in ("jobs", "pins", "others")),
        ),
        rows=rows,
        note="Jobs of orgs by Pareto distributions; 80/20: the largest fifth has 80 % of them. Pins: how many orgs "
        f"have more than {_PINNED_ABOVE:.0%} of a shard's mean ({_PINNED_MAX:,} are counted at most). Others: the "
        "shards without those.",
    )


def _between(ends: tuple[float, float]) -> str:
    return f"{ends[0]:.3f} – {ends[1]:.3f}"


def _plot(loads: Sequence[Load]) -> Plot:
    lines = {
        "slots": [(load.shards, load.slots[1]) for load in loads],
        "orgs": [(load.shards, load.orgs[1]) for load in loads],
    }
    for tail in _TAILS:
        lines[f"jobs, {tail}"] = [(load.shards, load.jobs[tail][1]) for load in loads]
        lines[f"jobs of others, {tail}"] = [(load.shards, load.jobs_of_others[tail][1]) for load in loads]
    return Plot(
        name="placement-load",
        title="The fullest shard",
        x="shards",
        y="÷ mean of all shards",
        lines=lines,
        x_log=True,
        y_log=True,
    )


def _span(seconds: float) -> str:
    return f"{seconds:,.0f} s" if seconds < 600 else f"{seconds / 60:,.0f} min"


def _options(parser: argparse.ArgumentParser) -> None:
    default = Plan()
    parser.add_argument(
        "--shards", type=numbers(1000), default=default.shards, metavar="N,N", help="10,30,100,300,1000"
    )
    parser.add_argument("--orgs", type=number(10**8), default=default.orgs, help="10000000")
    parser.add_argument("--jobs", type=number(10**12), default=default.jobs, help="live ones, in all; 100000000")
    parser.add_argument(
        "--rate", type=positive, default=default.rate, help="jobs/s that one shard gives or takes; 10000"
    )


SCENARIO = Scenario(
    help="how evenly slots, orgs and jobs lie on 10 to 1,000 shards, and what a change of shards moves",
    options=_options,
    plan=lambda given: Plan(shards=given.shards, orgs=given.orgs, jobs=given.jobs, rate=given.rate),
    measure=measure,
    full=lambda _: Plan(),
    quick=None,
)
