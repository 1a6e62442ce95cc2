"""The base of all faults: something that is done to a target for a while, and then undone."""

from __future__ import annotations

import abc
import random
from collections.abc import Sequence
from typing import ClassVar

from chaos.stage import Cast, Stage
from proof.checker.evidence import Restored


class Fault(abc.ABC):
    """One occurrence of a fault, or of a change that operators make: that harms nothing, and is drawn beside the
    faults. A kind of either is a subclass, listed in chaos/faults/__init__.py.

    `luck` is the occurrence's own: what it draws does not change what others draw.
    """

    name: ClassVar[str]
    # Whether it is drawn at random; otherwise it is run once, alone, at the end.
    drawn: ClassVar[bool] = True
    # How often it is drawn, relative to the others.
    weight: ClassVar[float] = 1.0
    # How long it lasts.
    seconds: ClassVar[tuple[float, float]] = (1.0, 6.0)
    # Whether it is done once more by itself at the end, so that the checker can say what clients may see of it.
    alone: ClassVar[bool] = False
    # The orgs that it affected, once it is injected; empty: it makes no difference between orgs.
    orgs: Sequence[str] = ()
    # The database that it restored, once that is accepted; None: none.
    restored: Restored | None = None

    def __init__(self, stage: Stage, target: str, luck: random.Random) -> None:
        self.stage = stage
        self.target = target
        self.luck = luck

    @classmethod
    @abc.abstractmethod
    def targets(cls, cast: Cast) -> Sequence[str]:
        """Returns its possible targets, of which it takes one; none if the cast has nothing suitable."""

    @classmethod
    def missing(cls, stage: Stage) -> str | None:
        """Returns what it needs and this machine or release does not have."""
        return None

    @abc.abstractmethod
    async def inject(self) -> None:
        """Does it. Returns when it is done, not when it is over."""

    @abc.abstractmethod
    async def heal(self) -> None:
        """Undoes it. Also called if `inject` failed half-way; afterwards the target is repaired."""


def shards(cast: Cast) -> list[str]:
    return [f"s{number}" for number in range(1, cast.shards + 1)]


# The way to the catalog, which is beside that to the shard that has it.
CATALOG = "catalog"


def routers(cast: Cast) -> list[str]:
    return [f"router-{number}" for number in range(1, cast.routers + 1)]


def pid_of(stage: Stage, target: str) -> int | None:
    """Returns the process that is now this router or balancer; None while it is being restarted."""
    if target in stage.balancers.names:
        return stage.balancers.pid(target)
    pids = sorted(stage.routers.pids)
    at = int(target.removeprefix("router-")) - 1
    return pids[at] if at < len(pids) else None
