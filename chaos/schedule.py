"""Chooses the faults with their targets and times at random, from a seed alone. Pure.

The cluster never fails as a whole: if there are several targets of the same kind, at least one of them has no fault. A
target has one fault at a time, and a pause after each fault.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

# The mean time between the beginnings of two faults.
_EVERY_S = 2.5
_AT_ONCE_MAX = 3
_PAUSE_S = 2.0
_DRAWS_MAX = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A fault that may be chosen. `seconds`: the shortest and the longest time for which it lasts."""

    name: str
    targets: Sequence[str]
    weight: float
    seconds: tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """One planned fault. Times are in seconds since the time from which faults may begin. `number` is part of the seed
    of the fault's own random generator."""

    number: int
    fault: str
    target: str
    start_s: float
    duration_s: float

    @property
    def end_s(self) -> float:
        return self.start_s + self.duration_s


def plan(kinds: Sequence[Kind], *, seed: str, seconds: float) -> list[Planned]:
    """Returns faults that are chosen at random, in the order of their starts. All faults end within `seconds`."""
    luck = random.Random(seed)
    usable = [kind for kind in kinds if kind.targets]
    # How many targets of each kind of process there are, over all faults.
    sorts = Counter(_sort(target) for target in {target for kind in usable for target in kind.targets})
    planned: list[Planned] = []
    at_s = 0.0
    while usable:
        at_s += luck.expovariate(1 / _EVERY_S)
        if at_s >= seconds:
            break
        for _ in range(_DRAWS_MAX):
            # Take the same number of random values each time, even if some are not used.
            (kind,) = luck.choices(usable, [kind.weight for kind in usable])
            target, duration_s = luck.choice(kind.targets), luck.uniform(*kind.seconds)
            one = Planned(number=len(planned) + 1, fault=kind.name, target=target, start_s=at_s, duration_s=duration_s)
            if one.end_s <= seconds and _bearable(one, planned, sorts):
                planned.append(one)
                break
    return planned


def _bearable(one: Planned, planned: Sequence[Planned], sorts: Counter[str]) -> bool:
    # The pause counts too: healing takes time, even if the fault itself takes none.
    active = [other for other in planned if other.end_s + _PAUSE_S > one.start_s]
    if len(active) >= _AT_ONCE_MAX or any(other.target == one.target for other in active):
        return False
    sort = _sort(one.target)
    struck = sum(_sort(other.target) == sort for other in active)
    return struck + 1 < sorts[sort] or sorts[sort] == 1


def _sort(target: str) -> str:
    """Returns the kind of process of a target: worker-3-poller → worker, s2 → s."""
    return target.partition("-")[0].rstrip("0123456789")
