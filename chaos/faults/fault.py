"""The base of all faults: something that is done to a target for a while, and then undone."""

from __future__ import annotations

import abc
import random
from collections.abc import Sequence
from typing import ClassVar

from chaos.stage import Cast, Stage
from proof.checker.evidence import Restored


class Fault(abc.ABC):
    """One occurrence of a fault; or of a change that operators make, which harms nothing and is drawn beside the
    faults. Each kind is a subclass, listed in chaos/faults/__init__.py.

    `luck` is the occurrence's own random generator, so its draws do not change those of others.
    """

    name: ClassVar[str]
    # Whether it is drawn at random; otherwise it is run once, alone, at the end.
    drawn: ClassVar[bool] = True
    # How often it is drawn, relative to the others.
    weight: ClassVar[float] = 1.0
    # How long it lasts.
    seconds: ClassVar[tuple[float, float]] = (1.0, 6.0)
    # Whether it is run once more at the end, alone, so that the checker can say what clients may notice of it.
    alone: ClassVar[bool] = False
    # The orgs that it affected, once it is injected; empty: it makes no difference between orgs.
    orgs: Sequence[str] = ()
    # The database that it restored, once that is accepted. None: it restored none.
    restored: Restored | None = None

    def __init__(self, stage: Stage, target: str, luck: random.Random) -> None:
        self.stage = stage
        self.target = target
        self.luck = luck

    @classmethod
    @abc.abstractmethod
    def targets(cls, cast: Cast) -> Sequence[str]:
        """Returns its possible targets, of which it hits one; empty if the cast has none."""

    @classmethod
    def missing(cls, stage: Stage) -> str | None:
        """Returns what this machine or release lacks for it."""
        return None

    @abc.abstractmethod
    async def inject(self) -> None:
        """Begins the fault. Returns when it has begun, not when it is over."""

    @abc.abstractmethod
    async def heal(self) -> None:
        """Undoes it. Also called if `inject` failed half-way. Afterwards the target works again."""


def shards(cast: Cast) -> list[str]:
    return [f"s{number}" for number in range(1, cast.shards + 1)]


# The target of faults on connections to the catalog. These have proxies of their own, beside those of its shard.
CATALOG = "catalog"


def routers(cast: Cast) -> list[str]:
    return [f"router-{number}" for number in range(1, cast.routers + 1)]


def pid_of(stage: Stage, target: str) -> int | None:
    """Returns the current process of this router or balancer; None while it is being restarted."""
    if target in stage.balancers.names:
        return stage.balancers.pid(target)
    pids = sorted(stage.routers.pids)
    at = int(target.removeprefix("router-")) - 1
    return pids[at] if at < len(pids) else None
