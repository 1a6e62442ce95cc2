"""The base of all faults. Each fault does something to a target for a while, and then undoes it."""

from __future__ import annotations

import abc
import random
from collections.abc import Sequence
from typing import ClassVar

from chaos.stage import Cast, Stage
from proof.checker.evidence import Restored


class Fault(abc.ABC):
    """One occurrence of a fault, or of a change that operators make. A change harms nothing, and is chosen in addition
    to the faults. Each kind is a subclass, listed in chaos/faults/__init__.py.

    Each occurrence has a random generator of its own, `luck`, so that its random choices do not change those of other
    occurrences.
    """

    name: ClassVar[str]
    # Whether the fault is chosen at random. If this is False, the fault is run once at the end, without other faults.
    drawn: ClassVar[bool] = True
    # How often the fault is chosen, relative to the others.
    weight: ClassVar[float] = 1.0
    # The shortest and the longest time for which the fault lasts.
    seconds: ClassVar[tuple[float, float]] = (1.0, 6.0)
    # Whether the fault is run once more at the end, without other faults. The checker then knows which effects of the
    # fault clients may notice.
    alone: ClassVar[bool] = False
    # The orgs that the fault affects; known after inject(). Empty: the fault affects all orgs equally.
    orgs: Sequence[str] = ()
    # The database that the fault restored; known after an operator has accepted it. None: there is none.
    restored: Restored | None = None

    def __init__(self, stage: Stage, target: str, luck: random.Random) -> None:
        self.stage = stage
        self.target = target
        self.luck = luck

    @classmethod
    @abc.abstractmethod
    def targets(cls, cast: Cast) -> Sequence[str]:
        """Returns the possible targets, one of which the fault hits. Empty if the cast has no target for it."""

    @classmethod
    def missing(cls, stage: Stage) -> str | None:
        """Returns what this machine or release lacks for the fault. Returns None if nothing is missing."""
        return None

    @abc.abstractmethod
    async def inject(self) -> None:
        """Begins the fault. Returns when the fault has begun, not when the fault is over."""

    @abc.abstractmethod
    async def heal(self) -> None:
        """Undoes the fault. Also called if `inject` failed half-way. Afterwards the target works again."""


def shards(cast: Cast) -> list[str]:
    return [f"s{number}" for number in range(1, cast.shards + 1)]


# The target of faults on connections to the catalog. These connections have proxies of their own, which are not the
# proxies of the shard that has the catalog.
CATALOG = "catalog"


def routers(cast: Cast) -> list[str]:
    return [f"router-{number}" for number in range(1, cast.routers + 1)]


def pid_of(stage: Stage, target: str) -> int | None:
    """Returns the current process of this router or balancer. Returns None while the process is being restarted."""
    if target in stage.balancers.names:
        return stage.balancers.pid(target)
    pids = sorted(stage.routers.pids)
    at = int(target.removeprefix("router-")) - 1
    return pids[at] if at < len(pids) else None
