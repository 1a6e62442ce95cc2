"""The databases that moves use: the catalog's, and those of all shards that may be changed. Each database is checked
only when it is needed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Collection, Mapping

from balancer import plan
from balancer.pins import PlannedPins
from balancer.pins import plan as plan_pins
from shard.errors import Misconfigured, ShardError
from shard.history import org_policies
from shard.placement import catalog, identity, pins
from shard.placement.catalog import Catalog
from shard.placement.cluster_file import Cluster
from shard.postgres.pool import Database
from shard.vocabulary import CATALOG, ShardName

_log = logging.getLogger(__name__)

# How many connections a database gets: one for the move that moves jobs, and one for moves that wait for leases to end.
_CONNECTIONS = 2


class Shards:
    """Created by `open_shards`."""

    def __init__(self, cluster: Cluster, catalog_database: Database, databases: Mapping[ShardName, Database]) -> None:
        self.catalog = catalog_database
        self.databases = databases
        self._cluster = cluster
        self._admitted: set[ShardName] = set()
        # Why a shard cannot be used, as it was logged last.
        self._troubles: dict[ShardName, str] = {}

    async def read_catalog(self, known: Catalog | None = None) -> Catalog:
        """Reads what has changed in the catalog since `known` was read, and returns the new copy. If nothing has
        changed, returns `known` itself. Raises ShardUnavailable, Misconfigured."""
        names = [entry.name for entry in self._cluster.shards]
        return await catalog.find(self.catalog, cluster=self._cluster.name, shards=names, known=known)

    async def slots_to_go(self) -> int:
        """Returns how many slots are in a move, or are not where they should be. Raises what `read_catalog` raises."""
        known = await self.read_catalog()
        pinned = await self.plan_pins(known)
        return plan.slots_to_go(known, self._cluster, pinned.owners)

    async def plan_pins(self, known: Catalog) -> PlannedPins:
        """Plans where pinned orgs should live, from the pins as they are now. Raises ShardUnavailable."""
        return plan_pins(known, await pins.read(self.catalog), self._cluster.shards)

    async def troubles(self) -> dict[ShardName, ShardError]:
        """Checks every shard's database without changing it. Returns the error of each database that has one. A
        ShardUnavailable may be temporary."""
        found: dict[ShardName, ShardError] = {}
        shard_at: dict[object, ShardName] = {}
        for name, location in zip(
            self.databases, await asyncio.gather(*map(self._examine, self.databases)), strict=True
        ):
            if isinstance(location, ShardError):
                found[name] = location
            elif (other := shard_at.setdefault(location, name)) != name:
                found[name] = Misconfigured(
                    f"shard {name!r}: its DSN leads to the database of shard {other!r} too "
                    f"({self.databases[name].address}); give each a database of its own"
                )
        return found

    async def _examine(self, name: ShardName) -> object:
        """Returns where the database is, or the ShardError that says why it cannot be used."""
        try:
            await identity.examine(self.databases[name], self.catalog, cluster=self._cluster.name)
            return await identity.locate(self.databases[name])
        except ShardError as error:
            return error

    async def check_usable(self, name: ShardName) -> bool:
        """Returns whether a shard answers and its schema is up to date. Logs each change of the answer."""
        try:
            await self._admit(name)
        except ShardError as error:
            if self._troubles.get(name) != str(error):
                self._troubles[name] = str(error)
                _log.warning("nothing moves from or to shard %r: %s", name, error)
            return False
        if self._troubles.pop(name, None) is not None:
            _log.info("shard %r answers again: its moves go on", name)
        return True

    async def _admit(self, name: ShardName) -> None:
        database, cluster = self.databases[name], self._cluster.name
        if name not in self._admitted or not await identity.examine(database, self.catalog, cluster=cluster):
            await identity.admit(database, self.catalog, cluster=cluster)
            # The shard needs the org policies before it gets slots, because it applies these policies when jobs finish.
            await org_policies.copy(self.catalog, database)
            self._admitted.add(name)


@contextlib.asynccontextmanager
async def open_shards(cluster: Cluster) -> AsyncGenerator[Shards, None]:
    """Opens the databases. Does not wait for connections."""
    databases = {
        entry.name: Database(entry.name, entry.dsn, connections=_CONNECTIONS)
        for entry in cluster.shards
        if entry.state.takes_changes
    }
    catalog_database = Database(CATALOG, cluster.catalog_dsn, connections=_CONNECTIONS, may_scan=True)
    every: Collection[Database] = (catalog_database, *databases.values())
    try:
        for database in every:
            await database.open()
        yield Shards(cluster, catalog_database, databases)
    finally:
        for database in every:
            await database.close()
