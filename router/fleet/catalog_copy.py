"""This router's copy of the catalog, which says where each org lives. The copy is refreshed after a NOTIFY, whenever a
call needs the newest placements, and every 3 s. The copy may be old at any time. This is safe, because a shard refuses
a call that was sent to it because of a copy that is too old (I6)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from router.fleet.periodic import every
from shard.admin import limits, weights
from shard.admin.weights import Weights
from shard.attempts import attempt
from shard.errors import ShardUnavailable
from shard.limits import LimitTable
from shard.placement import catalog
from shard.placement.catalog import Catalog
from shard.placement.slots import Placement
from shard.postgres.listener import Listener
from shard.postgres.pool import Database, Mark
from shard.queue.coalescer import Coalescer
from shard.vocabulary import CATALOG, OrgId, ShardName

_LOOKING = "look at the catalog"
_LOOK_S = 3.0
_LOOK_S_MAX = 5.0
# A copy that is older than this is not fresh: at least one look (a read of the catalog) has failed.
_FRESH_S = 10.0
# How many times longer than a shard the catalog may be silent before it is regarded as unavailable. This process has a
# single connection to the catalog. While a look uses this connection, only a new connection can find out whether the
# server still answers, and on a busy machine it takes long to connect. The long wait affects few calls, because few
# calls need the catalog.
_PATIENCE = 4.0
# A call that waits for a change looks at the copy again after this pause. Most often a notification ends the pause
# earlier.
_WAIT_S = 0.1


class CatalogCopy:
    """Keeps a copy of the catalog.

    `on_change` is called with the old and the new copy when the copy has changed. `on_limits` is called with the
    limits, and `on_weights` with the weights of orgs, when these have changed. `on_marks` is called after each look
    with the confirmed marks of the shards (shard/placement/marks.py). `on_revocations` is called after each look with
    how often API keys were revoked so far, and with the time (of the event loop's clock) at which the look began.
    `database` is the database of the catalog.
    """

    def __init__(
        self,
        dsn: str,
        on_change: Callable[[Catalog, Catalog], None],
        on_marks: Callable[[Mapping[ShardName, Mark]], None],
        on_limits: Callable[[LimitTable], None],
        on_weights: Callable[[Weights], None],
    ) -> None:
        self.database = Database(CATALOG, dsn, connections=1, may_scan=True, patience=_PATIENCE)
        self._dsn = dsn
        self.on_revocations: Callable[[int, float], None] = lambda _count, _since_s: None
        self._on_change = on_change
        self._on_marks = on_marks
        self._on_limits = on_limits
        self._on_weights = on_weights
        self._limits = LimitTable()
        self._weights_version = 0
        self._current: Catalog | None = None
        # When the last successful look began, by the event loop's clock.
        self._looked_s = float("-inf")
        self._notified = asyncio.Event()
        # Whether a migration was run, or the notification of a migration may have been missed.
        self._migrated = False
        self._changed = asyncio.Event()
        self._listener = Listener(dsn, catalog.CHANNEL, self._hear, application_name="windrow catalog")
        self.database.went_away = self._listener.hang_up
        # One look serves all calls that asked before the look began.
        self._looks = Coalescer[None, Catalog](
            self._look,
            weight=lambda _: 1,
            key=lambda _: None,
            on_timeout=lambda: ShardUnavailable(CATALOG, f"no answer within {_LOOK_S_MAX:g} s"),
            acts_max=1,
            wait_s=_LOOK_S_MAX,
        )

    async def begin(self, first: Catalog) -> None:
        """Sets the first copy of the catalog, and reads the limits and weights. Raises ShardUnavailable."""
        await self._read_limits(None)
        await self._read_weights()
        self._current, self._looked_s = first, asyncio.get_running_loop().time()

    @property
    def current(self) -> Catalog:
        """The newest copy. Raises ShardUnavailable if there is no copy yet."""
        if self._current is None:
            raise ShardUnavailable(CATALOG, "it has not been read yet")
        return self._current

    @property
    def is_fresh(self) -> bool:
        """Whether the catalog has been read in the last few seconds."""
        return asyncio.get_running_loop().time() - self._looked_s < _FRESH_S

    async def run(self) -> None:
        """Keeps the copy up to date until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._listener.run())
            group.create_task(self._look_when_notified())
            group.create_task(every(_LOOK_S, _LOOKING, self.look))

    async def reconnect(self, dsn: str) -> None:
        """Connects to the catalog by this DSN from now on."""
        if dsn != self._dsn:
            self._dsn = dsn
            self._listener.reconnect(dsn)
            await self.database.reconnect(dsn)

    async def look(self) -> Catalog:
        """Reads the catalog and returns the new copy. The read begins after this call. Raises ShardUnavailable."""
        return await self._looks.submit(None)

    async def is_current(self, org: OrgId, placement: Placement) -> bool:
        """Returns whether the catalog still has this placement for the org. Raises ShardUnavailable."""
        return (await self.look()).placement(org) == placement

    async def until_changed(self, org: OrgId, placement: Placement) -> None:
        """Waits until the catalog has another placement for the org. Raises ShardUnavailable."""
        while await self.is_current(org, placement):
            try:
                async with asyncio.timeout(_WAIT_S):
                    await self._changed.wait()
            except TimeoutError:
                # Look again, in case the notification was lost.
                continue

    async def _look(self, asked: Sequence[None]) -> Sequence[Catalog]:
        before, began_s = self.current, asyncio.get_running_loop().time()
        after, marks, revocations, limits_version, weights_version = await catalog.look(self.database, before)
        self._current, self._looked_s = after, began_s
        if after is not before:
            # Announce the change before any step that may fail. The next look would not announce the change, because it
            # compares the catalog with this new copy.
            self._changed.set()
            self._changed = asyncio.Event()
            self._on_change(before, after)
        self._on_marks(marks)
        self.on_revocations(revocations, began_s)
        if limits_version != self._limits.version:
            await self._read_limits(self._limits)
        if weights_version != self._weights_version:
            await self._read_weights()
        return [after] * len(asked)

    async def _read_limits(self, known: LimitTable | None) -> None:
        self._limits = await limits.read(self.database, known)
        self._on_limits(self._limits)

    async def _read_weights(self) -> None:
        read = await weights.read(self.database)
        self._weights_version = read.version
        self._on_weights(read)

    def _hear(self, epoch: str | None) -> None:
        # An empty payload means a migration (record_migration.sql). None means that notifications may have been missed.
        self._migrated = self._migrated or not epoch
        self._notified.set()

    async def _look_when_notified(self) -> None:
        while True:
            await self._notified.wait()
            self._notified.clear()
            if self._migrated:
                self._migrated = False
                await attempt("check the schema of the catalog", self.database.check_schema)
            await attempt(_LOOKING, self.look)
