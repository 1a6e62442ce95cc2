"""Draws what a worker does with a job. Pure."""

from __future__ import annotations

import enum
import random


class Fate(enum.Enum):
    ACK = enum.auto()
    NACK = enum.auto()
    KILL = enum.auto()
    RELEASE = enum.auto()
    # Works for longer than its window, and keeps the lease meanwhile.
    EXTEND = enum.auto()
    # Works longer than its window, and does not extend the lease.
    OVERSLEEP = enum.auto()
    # Never calls anything for this lease.
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
# How many of the jobs of workflows add nodes, how many at most, and through how many generations.
_ADDERS = 0.6
_ADDED_MAX = 3
_GENERATIONS_MAX = 2


def draw(luck: random.Random, *, calm: bool) -> Fate:
    """`calm`: every job is finished now."""
    if calm:
        return Fate.ACK
    (fate,) = luck.choices(list(_WEIGHTS), list(_WEIGHTS.values()))
    return fate


def pick_org(luck: random.Random, orgs: list[str]) -> str:
    """A few orgs have most of the jobs."""
    return orgs[int(len(orgs) * luck.random() ** 3)]


def draw_added(node: str, luck: random.Random) -> dict[str, list[str]]:
    """Returns the nodes that the job of a workflow's node adds to it, and what each waits for, by names. They are the
    same in each attempt of the job; only how many of them a call names is drawn by `luck`. Empty: the job adds none."""
    own = random.Random(node)
    added: dict[str, list[str]] = {}
    if node.count("+") < _GENERATIONS_MAX and own.random() < _ADDERS:
        for number in range(own.randint(1, _ADDED_MAX)):
            before = [node, *added]
            added[f"{node}+{number}"] = own.sample(before, own.randint(0, min(2, len(before))))
    return dict(list(added.items())[: luck.randint(1, _ADDED_MAX)])
