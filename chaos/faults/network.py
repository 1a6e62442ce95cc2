"""What the network does between routers, balancers and a shard, or the catalog: cut, slow, silent, closed."""

from __future__ import annotations

import random
from collections.abc import Sequence

from chaos.faults.fault import CATALOG, Fault, shards
from chaos.stage import Cast
from tests.fault.proxy import Proxy

_BYTES_MAX = 100_000
_DELAY_S = (0.02, 0.3)


class _NetworkFault(Fault):
    @classmethod
    def targets(cls, cast: Cast) -> Sequence[str]:
        return [*shards(cast), CATALOG]

    @property
    def proxies(self) -> Sequence[Proxy]:
        """Of all nodes: routers try each of them."""
        entrance = self.stage.catalog if self.target == CATALOG else self.stage.shards[self.target].entrance
        return entrance.proxies


class CutConnections(_NetworkFault):
    """Every connection, also each new one, is cut somewhere within its next bytes."""

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
    """Nothing passes, and nobody is told."""

    name = "silent-network"
    seconds = (1.0, 12.0)

    async def inject(self) -> None:
        for proxy in self.proxies:
            proxy.hold()

    async def heal(self) -> None:
        for proxy in self.proxies:
            proxy.let_go()


class ClosedNetwork(_NetworkFault):
    """All connections are cut, and no new one comes about."""

    name = "closed-network"

    async def inject(self) -> None:
        for proxy in self.proxies:
            proxy.closed = True
            proxy.cut_all()

    async def heal(self) -> None:
        for proxy in self.proxies:
            proxy.closed = False


class CutCatalog(ClosedNetwork):
    """The same, of the catalog alone: nobody learns where slots are, and no move goes on."""

    name = "cut-catalog"
    seconds = (0.0, 8.0)

    @classmethod
    def targets(cls, cast: Cast) -> Sequence[str]:
        return [CATALOG]
