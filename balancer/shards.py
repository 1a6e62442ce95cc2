"""The databases of a cluster file that moves go through: the catalog's, and those of the shards that may be changed.
Whether one can be used now is found out when it is to be."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncGenerator, Collection, Mapping

from balancer import pins, plan
from shard import catalog, pinning, schema
from shard.catalog import Catalog
from shard.cluster import Cluster
from shard.database import Database
from shard.errors import ShardError
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
        pinned = pins.plan(known, await pinning.read(self.catalog), self._cluster.shards)
        return plan.slots_to_go(known, self._cluster, pinned.owners)

    async def fit(self, name: ShardName, *, in_use: bool) -> bool:
        """Whether a shard answers and runs a schema that knows moves; a change of that is logged. `in_use`: it holds
        slots, so that no new database will do."""
        try:
            await self._prove(name, in_use=in_use)
        except ShardError as error:
            if self._troubles.get(name) != str(error):
                self._troubles[name] = str(error)
                _log.warning("nothing moves from or to shard %r: %s", name, error)
            return False
        if self._troubles.pop(name, None) is not None:
            _log.info("shard %r answers: its moves go on", name)
        return True

    async def _prove(self, name: ShardName, *, in_use: bool) -> None:
        database = self.databases[name]
        if in_use or name in self._proved:
            await schema.recognize(database, cluster=self._cluster.name)
        if name not in self._proved:
            await schema.migrate(database, cluster=self._cluster.name)
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
