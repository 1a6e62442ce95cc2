"""This router's copy of the catalog, which says where each org lives, and how it learns what has changed: it is told,
it asks when it has to know, and it looks every few seconds. A copy may be old at any time: shards refuse who goes by
one that is too old (I6)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from router.upkeep import attempt, every
from shard import catalog
from shard.catalog import Catalog
from shard.coalescing import Coalescer
from shard.database import Database, Mark
from shard.errors import ShardUnavailable
from shard.listening import Listener
from shard.placement import Placement
from shard.vocabulary import CATALOG, OrgId, ShardName

_LOOKING = "look at the catalog"
_LOOK_S = 3.0
_LOOK_S_MAX = 5.0
# Between two looks of who waits for a change. Most often it is told before.
_WAIT_S = 0.1


class CatalogCopy:
    """`learned` is told the copy before and the one from now on; `marked`, after each look, the confirmed marks of the
    shards (shard/history.py). `database` is the catalog's."""

    def __init__(
        self,
        dsn: str,
        learned: Callable[[Catalog, Catalog], None],
        marked: Callable[[Mapping[ShardName, Mark]], None],
    ) -> None:
        self.database = Database(CATALOG, dsn, connections=1, for_books=True)
        self._dsn = dsn
        self._learned = learned
        self._marked = marked
        self._known: Catalog | None = None
        self._told = asyncio.Event()
        # A migration was run, or that may have been missed.
        self._migrated = False
        self._changed = asyncio.Event()
        self._listener = Listener(dsn, catalog.CHANNEL, self._hear, application_name="windrow catalog")
        self.database.went_away = self._listener.hang_up
        # A look serves all who asked before it began.
        self._looks = Coalescer[None, Catalog](
            self._look,
            weigh=lambda _: 1,
            whose=lambda _: None,
            late=lambda: ShardUnavailable(CATALOG, f"no answer within {_LOOK_S_MAX:g} s"),
            acts_max=1,
            wait_s=_LOOK_S_MAX,
        )

    def begin(self, known: Catalog) -> None:
        """The first copy."""
        self._known = known

    @property
    def known(self) -> Catalog:
        """Raises ShardUnavailable before there is a first one."""
        if self._known is None:
            raise ShardUnavailable(CATALOG, "it has not been read yet")
        return self._known

    async def run(self) -> None:
        """Keeps the copy new until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._listener.run())
            group.create_task(self._look_when_told())
            group.create_task(every(_LOOK_S, _LOOKING, self.look))

    async def reconnect(self, dsn: str) -> None:
        """From now on the catalog is reached by another DSN."""
        if dsn != self._dsn:
            self._dsn = dsn
            self._listener.reconnect(dsn)
            await self.database.reconnect(dsn)

    async def look(self) -> Catalog:
        """What the catalog says now: read after this was asked. Raises ShardUnavailable."""
        return await self._looks.submit(None)

    async def is_current(self, org: OrgId, placement: Placement) -> bool:
        """Whether the org is still placed so. Raises ShardUnavailable."""
        return (await self.look()).placement(org) == placement

    async def until_changed(self, org: OrgId, placement: Placement) -> None:
        """Returns once this router knows another placement of the org. Raises ShardUnavailable."""
        while await self.is_current(org, placement):
            try:
                async with asyncio.timeout(_WAIT_S):
                    await self._changed.wait()
            except TimeoutError:
                # Told or not.
                continue

    async def _look(self, asked: Sequence[None]) -> Sequence[Catalog]:
        before = self.known
        after, marks = await catalog.look(self.database, before)
        self._known = after
        self._marked(marks)
        if after is not before:
            self._changed.set()
            self._changed = asyncio.Event()
            self._learned(before, after)
        return [after] * len(asked)

    def _hear(self, epoch: str | None) -> None:
        # An empty message tells of a migration (record_migration.sql), and None that messages may have been missed.
        self._migrated = self._migrated or not epoch
        self._told.set()

    async def _look_when_told(self) -> None:
        while True:
            await self._told.wait()
            self._told.clear()
            if self._migrated:
                self._migrated = False
                await attempt("check the schema of the catalog", self.database.check_schema)
            await attempt(_LOOKING, self.look)
