"""The databases of a cluster file that moves go through: the catalog's, and those of the shards that may be changed.
Whether one can be used now is found out when it is to be."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Collection, Mapping

from balancer import plan
from balancer.pins import PlannedPins
from balancer.pins import plan as plan_pins
from shard import catalog, identity, pinning, policies
from shard.catalog import Catalog
from shard.cluster import Cluster
from shard.database import Database
from shard.errors import Misconfigured, ShardError
from shard.vocabulary import CATALOG, ShardName

_log = logging.getLogger(__name__)

# One for the move that works, and one for those that wait for leases to end.
_CONNECTIONS = 2


class Shards:
    """Made by `open_shards`."""

    def __init__(self, cluster: Cluster, catalog_database: Database, databases: Mapping[ShardName, Database]) -> None:
        self.catalog = catalog_database
        self.databases = databases
        self._cluster = cluster
        self._proved: set[ShardName] = set()
        # Why shards cannot be used, of which that has been said.
        self._troubles: dict[ShardName, str] = {}

    async def read_catalog(self, known: Catalog | None = None) -> Catalog:
        """Sent is what is newer than `known`; that very one, if nothing is. Raises ShardUnavailable, Misconfigured."""
        names = [entry.name for entry in self._cluster.shards]
        return await catalog.find(self.catalog, cluster=self._cluster.name, shards=names, known=known)

    async def slots_to_go(self) -> int:
        """How many slots are not yet at rest where they should be. Raises what `read_catalog` does."""
        known = await self.read_catalog()
        pinned = await self.plan_pins(known)
        return plan.slots_to_go(known, self._cluster, pinned.owners)

    async def plan_pins(self, known: Catalog) -> PlannedPins:
        """Where pinned orgs are to live, by what is wished for now. Raises ShardUnavailable."""
        return plan_pins(known, await pinning.read(self.catalog), self._cluster.shards)

    async def troubles(self) -> dict[ShardName, ShardError]:
        """What is wrong with the databases, each asked now and none changed; of which ShardUnavailable may pass by
        itself."""
        found: dict[ShardName, ShardError] = {}
        shard_at: dict[object, ShardName] = {}
        for name, place in zip(self.databases, await asyncio.gather(*map(self._examine, self.databases)), strict=True):
            if isinstance(place, ShardError):
                found[name] = place
            elif (twin := shard_at.setdefault(place, name)) != name:
                found[name] = Misconfigured(
                    f"shard {name!r}: its DSN leads to the database of shard {twin!r} too "
                    f"({self.databases[name].address}); give each a database of its own"
                )
        return found

    async def _examine(self, name: ShardName) -> object:
        """Where the database is; or a ShardError, which says why it will not do."""
        try:
            await identity.examine(self.databases[name], self.catalog, cluster=self._cluster.name)
            return await identity.place(self.databases[name])
        except ShardError as error:
            return error

    async def fit(self, name: ShardName) -> bool:
        """Whether a shard answers and runs a schema that knows moves; a change of that is logged."""
        try:
            await self._prove(name)
        except ShardError as error:
            if self._troubles.get(name) != str(error):
                self._troubles[name] = str(error)
                _log.warning("nothing moves from or to shard %r: %s", name, error)
            return False
        if self._troubles.pop(name, None) is not None:
            _log.info("shard %r answers: its moves go on", name)
        return True

    async def _prove(self, name: ShardName) -> None:
        database, cluster = self.databases[name], self._cluster.name
        if name not in self._proved or not await identity.examine(database, self.catalog, cluster=cluster):
            await identity.admit(database, self.catalog, cluster=cluster)
            # Before it is given slots, of whose orgs it is to finish jobs as they were told.
            await policies.copy(self.catalog, database)
            self._proved.add(name)


@contextlib.asynccontextmanager
async def open_shards(cluster: Cluster) -> AsyncGenerator[Shards, None]:
    """Opens them, and waits for none."""
    databases = {
        entry.name: Database(entry.name, entry.dsn, connections=_CONNECTIONS)
        for entry in cluster.shards
        if entry.state.takes_changes
    }
    catalog_database = Database(CATALOG, cluster.catalog_dsn, connections=_CONNECTIONS, for_books=True)
    every: Collection[Database] = (catalog_database, *databases.values())
    try:
        for database in every:
            await database.open()
        yield Shards(cluster, catalog_database, databases)
    finally:
        for database in every:
            await database.close()
