"""Faults of the network between routers or balancers and a shard or the catalog: cut, slow, silent or closed
connections."""

from __future__ import annotations

import random
from collections.abc import Sequence

from chaos.faults.fault import CATALOG, Fault, shards
from chaos.stage import Cast
from proof.proxy import Proxy

_BYTES_MAX = 100_000
_DELAY_S = (0.02, 0.3)


class _NetworkFault(Fault):
    @classmethod
    def targets(cls, cast: Cast) -> Sequence[str]:
        return [*shards(cast), CATALOG]

    @property
    def proxies(self) -> Sequence[Proxy]:
        """Returns the proxies of the target. There is one proxy in front of each Postgres server of the target, because
        routers try all of these servers."""
        entrance = self.stage.catalog if self.target == CATALOG else self.stage.shards[self.target].entrance
        return entrance.proxies


class CutConnections(_NetworkFault):
    """Cuts every connection, including each new one, after a random number of further bytes."""

    name = "cut-connections"
    weight = 2.0

    async def inject(self) -> None:
        for proxy in self.proxies:
            proxy.cut_at_random(random.Random(self.luck.random()), bytes_max=_BYTES_MAX)

    async def heal(self) -> None:
        for proxy in self.proxies:
            proxy.cut_no_more()


class SlowNetwork(_NetworkFault):
    name = "slow-network"

    async def inject(self) -> None:
        delay_s = self.luck.uniform(*_DELAY_S)
        for proxy in self.proxies:
            proxy.delay_s = delay_s

    async def heal(self) -> None:
        for proxy in self.proxies:
            proxy.delay_s = 0.0


class SilentNetwork(_NetworkFault):
    """Lets no data pass, but closes no connection."""

    name = "silent-network"
    seconds = (1.0, 12.0)

    async def inject(self) -> None:
        for proxy in self.proxies:
            proxy.hold()

    async def heal(self) -> None:
        for proxy in self.proxies:
            proxy.let_go()


class ClosedNetwork(_NetworkFault):
    """Cuts all connections, and refuses new ones."""

    name = "closed-network"

    async def inject(self) -> None:
        for proxy in self.proxies:
            proxy.closed = True
            proxy.cut_all()

    async def heal(self) -> None:
        for proxy in self.proxies:
            proxy.closed = False


class CutCatalog(ClosedNetwork):
    """Cuts only the connections to the catalog: no process learns of new placements, and no move continues."""

    name = "cut-catalog"
    seconds = (0.0, 8.0)

    @classmethod
    def targets(cls, cast: Cast) -> Sequence[str]:
        return [CATALOG]
