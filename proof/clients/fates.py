"""Chooses at random what a worker does with a job. Pure."""

from __future__ import annotations

import enum
import random


class Fate(enum.Enum):
    ACK = enum.auto()
    NACK = enum.auto()
    KILL = enum.auto()
    RELEASE = enum.auto()
    # Extends the lease, once or several times, and then acks.
    EXTEND = enum.auto()
    # Works for about the length of the window, or longer, and does not extend the lease.
    OVERSLEEP = enum.auto()
    # Makes no call about this lease.
    FORGET = enum.auto()


_WEIGHTS = {
    Fate.ACK: 82.0,
    Fate.NACK: 6.0,
    Fate.KILL: 0.5,
    Fate.RELEASE: 4.0,
    Fate.EXTEND: 3.5,
    Fate.OVERSLEEP: 2.0,
    Fate.FORGET: 2.0,
}
NACK_DELAY_S_MAX = 2.0
# The share of a workflow's jobs that add nodes. Each such job adds at most `_ADDED_MAX` nodes. An added node may add
# nodes again, for at most `_GENERATIONS_MAX` generations.
_ADDERS = 0.5
_ADDED_MAX = 3
_GENERATIONS_MAX = 2
# The share of the jobs that add nodes and wait for these nodes, among all jobs that add nodes.
_WAITERS = 0.3


def draw(luck: random.Random, *, calm: bool) -> Fate:
    """Chooses a fate at random. With `calm`, every job is acked."""
    if calm:
        return Fate.ACK
    (fate,) = luck.choices(list(_WEIGHTS), list(_WEIGHTS.values()))
    return fate


def pick_org(luck: random.Random, orgs: list[str]) -> str:
    """Chooses an org at random. A few orgs, the first in the list, are chosen most often, so they have most of the
    jobs."""
    return orgs[int(len(orgs) * luck.random() ** 3)]


def draw_added(node: str, luck: random.Random) -> dict[str, list[str]]:
    """Returns the names of the nodes that the job of `node` adds to its workflow by one call, each with the names of
    its parents. Empty: the job adds no nodes. All calls, also those of later attempts of the job, choose from the same
    nodes; `luck` only decides how many of these nodes a call names. If the job waits for these nodes, none of them has
    `node` as a parent."""
    own = random.Random(node)
    added: dict[str, list[str]] = {}
    if node.count("+") < _GENERATIONS_MAX and own.random() < _ADDERS:
        for number in range(own.randint(1, _ADDED_MAX)):
            before = [*added] if waits_for_added(node) else [node, *added]
            added[f"{node}+{number}"] = own.sample(before, own.randint(0, min(2, len(before))))
    return dict(list(added.items())[: luck.randint(1, _ADDED_MAX)])


def waits_for_added(node: str) -> bool:
    """If the job of `node` adds nodes, returns whether the last call that adds nodes also makes the job wait for them.
    The answer is the same in each attempt of the job."""
    return random.Random(f"{node} waits").random() < _WAITERS
