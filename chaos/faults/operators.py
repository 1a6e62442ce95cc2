"""Changes that operators make to a running cluster: they drain shards, change weights, pin orgs, and write wrong
cluster files. This module also freezes routers while a slot moves."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace

from chaos.faults.fault import CATALOG, Fault, routers, shards
from chaos.faults.processes import FreezeServer
from chaos.stage import Cast, Stage
from shard.errors import NotPinned, ShardUnavailable, SlotMoves
from shard.placement import catalog, pins
from shard.placement.pins import OnShard
from shard.postgres.pool import Database
from shard.vocabulary import OrgId, ShardName

_WEIGHTS = (0.0, 0.2, 0.5, 2.0, 5.0)
# How many of the busiest orgs may be pinned. These orgs always have leased jobs and new jobs.
_PINNED_ORGS = 8
_PIN_S_MAX = 4.0
_PIN_AGAIN_S = 0.2
_MOVED_S_MAX = 20.0
_LOOK_S = 0.1


class _EntryChange(Fault):
    """Changes what the cluster file says about one shard. Routers get a signal about the change only sometimes. Without
    a signal, they must notice the change themselves."""

    @classmethod
    def targets(cls, cast: Cast) -> Sequence[str]:
        return [f"entry-{name}" for name in shards(cast)]

    def change(self, *, state: str = "active", weight: float = 1.0) -> None:
        entry = self.stage.file.entry(self.target.removeprefix("entry-"))
        entry.state, entry.weight = state, weight
        self.stage.file.save(hurry=self.luck.random() < 0.5)

    async def heal(self) -> None:
        self.change()


class DrainShard(_EntryChange):
    """Drains a shard, so that its slots move to other shards. Later undoes this, so that the slots move back."""

    name = "drain-shard"
    seconds = (3.0, 25.0)

    async def inject(self) -> None:
        self.change(state="draining")


class ChangeWeight(_EntryChange):
    """Changes a shard's weight, so that slots move to the shard or away from it. Later undoes this, so that the slots
    move back."""

    name = "change-weight"
    weight = 2.0
    seconds = (1.0, 15.0)

    async def inject(self) -> None:
        self.change(weight=self.luck.choice(_WEIGHTS))


class PinOrg(Fault):
    """Pins an org to a shard, and then to other shards. At the end unpins the org, or leaves it pinned."""

    name = "pin-org"
    weight = 3.0
    seconds = (1.0, 15.0)
    _pinning: asyncio.Task[None] | None = None

    @classmethod
    def targets(cls, cast: Cast) -> Sequence[str]:
        return cast.org_names[:_PINNED_ORGS]

    async def inject(self) -> None:
        await pin(self.stage, self.target, self.luck.choice(list(self.stage.shards)))
        self._pinning = asyncio.create_task(self._pin_about())

    async def heal(self) -> None:
        if self._pinning is None:
            return
        while not self._pinning.done():
            # Cancel more than once: Python 3.11 loses a cancellation that comes at the end of a wait_for, as in
            # psycopg's pool.
            self._pinning.cancel()
            await asyncio.wait({self._pinning}, timeout=1.0)
        if not self._pinning.cancelled():
            self._pinning.result()
        if self.luck.random() < 0.5:
            # If the call fails, the org stays pinned, which does no harm.
            with contextlib.suppress(ShardUnavailable):
                await unpin(self.stage, self.target)

    async def _pin_about(self) -> None:
        while True:
            await asyncio.sleep(self.luck.uniform(0.5, 6.0))
            with contextlib.suppress(ShardUnavailable, SlotMoves):
                await pin(self.stage, self.target, self.luck.choice(list(self.stage.shards)))


class FreezeRouterInMove(FreezeServer):
    """Freezes a router before an org's slot begins to move. The router stays frozen until the target shard takes the
    org's new jobs, or for a moment longer."""

    name = "freeze-router-in-move"
    seconds = (0.0, 1.0)

    @classmethod
    def targets(cls, cast: Cast) -> Sequence[str]:
        return routers(cast)

    async def inject(self) -> None:
        # Choose one of the busiest orgs, because the router probably has calls of such an org under way. It does not
        # matter if another change pins the same org.
        org = self.luck.choice(self.stage.cast.org_names[:_PINNED_ORGS])
        async with open_catalog(self.stage) as database:
            known = await catalog.read(database)
        here = known.placement(OrgId(org)).reads[-1]
        there = self.luck.choice([name for name in self.stage.shards if name != here])
        await super().inject()
        await pin(self.stage, org, there)
        async with asyncio.timeout(_MOVED_S_MAX):
            writer = await self._writer(org)
            while writer != there:
                await asyncio.sleep(_LOOK_S)
                writer = await self._writer(org)

    async def _writer(self, org: str) -> str | None:
        """Returns the shard that takes the org's new jobs. Returns None if the catalog does not answer now."""
        with contextlib.suppress(ShardUnavailable):
            async with open_catalog(self.stage) as database:
                return (await catalog.read(database)).placement(OrgId(org)).writes[0]
        return None


class BreakClusterFile(Fault):
    """Replaces the cluster file by a wrong file, which every process must refuse. Later restores the old file. All
    processes must continue to work as before."""

    name = "break-cluster-file"

    @classmethod
    def targets(cls, cast: Cast) -> Sequence[str]:
        return ["cluster-file"]

    async def inject(self) -> None:
        self.stage.file.spoil(await self._wrong_text())

    async def heal(self) -> None:
        self.stage.file.mend()

    async def _wrong_text(self) -> str:
        file = self.stage.file
        match self.luck.randrange(7):
            case 0:
                return file.text.replace("[[shard]]", "[[shrad]]", 1)
            case 1:
                # Cut the file off within a quoted text, as if the disk was full. A file that is cut off at another
                # place, before [router], could be valid.
                return file.text[: file.text.rindex("dsn = ") + 12]
            case 2:
                return file.text.replace("state = 'active'", "state = 'activ'").replace("'draining'", "'drained'")
            case 3:
                return file.described([replace(entry, state="draining") for entry in file.entries])
            case 4:
                return file.described(file.entries, cluster="another")
            case 5:
                return file.described(file.entries, catalog_dsn=file.entries[-1].dsn)
            case _:
                missed = self.luck.choice(await self._that_hold_slots())
                return file.described([entry for entry in file.entries if entry.name != missed])

    async def _that_hold_slots(self) -> Sequence[str]:
        """Returns the active shards that hold slots. They keep their slots while the file is wrong."""
        async with open_catalog(self.stage) as database:
            holdings = (await catalog.read(database)).holdings()
        return [
            entry.name
            for entry in self.stage.file.entries
            if entry.state == "active"
            and entry.weight
            and entry.name in holdings
            and holdings[ShardName(entry.name)].slots
        ]


async def pin(stage: Stage, org: str, shard: str) -> None:
    """Pins an org. Tries again for a while if the org's hash slot moves, or if the catalog does not answer. Raises
    SlotMoves and ShardUnavailable."""
    give_up_s = asyncio.get_running_loop().time() + _PIN_S_MAX
    while True:
        try:
            async with open_catalog(stage) as database:
                await pins.pin(database, OrgId(org), OnShard(ShardName(shard)))
                return
        except (SlotMoves, ShardUnavailable):
            if asyncio.get_running_loop().time() > give_up_s:
                raise
        await asyncio.sleep(_PIN_AGAIN_S)


async def unpin(stage: Stage, org: str) -> None:
    """Unpins an org. Raises ShardUnavailable."""
    async with open_catalog(stage) as database:
        # An earlier try whose answer was lost may have unpinned the org.
        with contextlib.suppress(NotPinned):
            await pins.unpin(database, OrgId(org))


@contextlib.asynccontextmanager
async def open_catalog(stage: Stage) -> AsyncGenerator[Database, None]:
    """Opens the catalog through the proxies, as routers and balancers do. Raises ShardUnavailable."""
    database = Database(ShardName(CATALOG), stage.catalog.dsn, connections=1)
    try:
        await database.open()
        yield database
    finally:
        await database.close()
