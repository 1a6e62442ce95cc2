"""The shards as this router knows them: which there are, by the cluster file, and a copy of the catalog, which says
where each org is. Both may change.

What the copy says may be old. A shard that is asked wrongly refuses (I6); then the catalog is read again, and the call
goes where it belongs. A shard that is away hurts only the orgs that live there.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

from router.member import Member, every
from shard import catalog, schema
from shard.catalog import Catalog, Holding
from shard.cluster import Cluster, ClusterFileError, ShardEntry, ShardState
from shard.cluster_change import refuse_change
from shard.database import Database
from shard.errors import NotOwned, ShardError, ShardUnavailable, UnknownShard
from shard.lease import shard_tag
from shard.vocabulary import OrgId, ShardName

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

_CATALOG_S = 3.0
_RETRY_S = 1.0
_FIRST_TRY_S_MAX = 5.0


class Fleet:
    """All shards of a cluster. Use `run` to open it; every other method needs it open."""

    def __init__(self, cluster: Cluster, *, connections_per_shard: int) -> None:
        self._cluster = cluster
        self._connections = connections_per_shard
        self._members: dict[ShardName, Member] = {}
        self._by_tag: dict[int, Member] = {}
        self._catalog_dsn = cluster.catalog_dsn
        self._catalog_database = Database(ShardName("catalog"), cluster.catalog_dsn, connections=1, for_books=True)
        self._catalog: Catalog | None = None
        self._reading = asyncio.Lock()
        # Owns the tasks of every member.
        self._group = asyncio.TaskGroup()

    async def run(self, opened: asyncio.Event) -> None:
        """Opens the fleet, says so by `opened`, and keeps every shard up until cancelled. Raises Misconfigured where an
        operator must look before anything can work."""
        try:
            await self._catalog_database.open()
            await self._found_catalog()
            async with self._group as group:
                group.create_task(every(_CATALOG_S, "look at the catalog", self._follow_catalog))
                self._take_up(self._cluster)
                contacted = [one for one in self._members.values() if one.entry.state is not ShardState.OFF]
                first_tries = [group.create_task(member.up.wait()) for member in contacted]
                if first_tries:
                    # Serve as soon as every shard is up; with one away, after a moment, without it.
                    _, late = await asyncio.wait(first_tries, timeout=_FIRST_TRY_S_MAX)
                    for wait in late:
                        wait.cancel()
                opened.set()
        finally:
            await self._catalog_database.close()

    async def finish(self) -> None:
        """Lets every shard do what it has been asked for."""
        await asyncio.gather(*(member.finish() for member in self._members.values()))

    # ── A cluster file that changes ──────────────────────────────────────────────────────────────────────────────────

    async def change(self, cluster: Cluster) -> None:
        """Goes over to a cluster file that has changed; calls in flight end. Raises ClusterFileError: it cannot be, and
        nothing has changed."""
        refuse_change(self._cluster, cluster)
        gone = [name for name in self._members if cluster.shard(name) is None]
        if gone:
            await self._refuse_to_forget(gone, cluster.source)
        self._take_up(cluster)

    async def _refuse_to_forget(self, gone: Sequence[ShardName], source: str) -> None:
        """A shard that holds something cannot be left out. What it holds is asked of the catalog itself."""
        try:
            await self._follow_catalog()
        except ShardError as error:
            raise ClusterFileError(
                f"{source}: shard {gone[0]!r} is gone from it, and whether it still holds slots cannot be told: {error}"
            ) from error
        holdings = self.holdings()
        for name in gone:
            if name in holdings:
                raise ClusterFileError(
                    f"{source}: shard {name!r} is gone from it, and still holds {holdings[name]}: put it back with "
                    'state = "draining", and wait until `windrow shards` shows 0 for it'
                )

    def _take_up(self, cluster: Cluster) -> None:
        before, self._members = self._members, {}
        self._cluster = cluster
        for entry in cluster.shards:
            member = before.get(entry.name)
            if member is not None and member.goes_on_as(entry):
                del before[entry.name]
                member.update(entry, self._group)
            else:
                member = Member(entry, connections=self._connections, prove=self._prove, proved=self._proved)
                member.start(self._group)
            self._members[entry.name] = member
        self._by_tag = {shard_tag(name): member for name, member in self._members.items()}
        for member in before.values():
            member.dismiss("the cluster file has changed")
        self._wake_all()

    # ── Routing ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def shards(self) -> Mapping[ShardName, Member]:
        """In the order of the cluster file."""
        return self._members

    def holdings(self) -> dict[ShardName, Holding]:
        """What each shard holds, also one that the cluster file does not name."""
        return self._known().holdings()

    def member(self, name: str) -> Member:
        """Raises UnknownShard, and ShardUnavailable while it is not up."""
        member = self._members.get(ShardName(name))
        if member is None:
            raise UnknownShard(ShardName(name))
        return member.to_look_at()

    def by_tag(self, tag: int) -> Member | None:
        """The shard that a lease token names, to change what it holds; None if this cluster has no such shard."""
        member = self._by_tag.get(tag)
        return None if member is None else member.to_change()

    def reads(self, org: OrgId) -> Sequence[ShardName]:
        """The shards that may hold jobs of the org, by name."""
        return self._known().placement(org).reads

    def readers(self, org: OrgId) -> list[Member]:
        """All of these shards, to look at; the order is random where there are several."""
        return _shuffled([self.placed(name).to_look_at() for name in self.reads(org)])

    def changers(self, org: OrgId) -> list[Member]:
        """The same, to change what they hold."""
        return _shuffled([self.placed(name).to_change() for name in self.reads(org)])

    def givers(self, org: OrgId) -> list[Member]:
        """Those of them that are up, to take jobs from. Raises ShardUnavailable if none is."""
        members = [member for name in self.reads(org) if (member := self._members.get(name)) and member.up.is_set()]
        return _shuffled(members) or self.readers(org)

    def placed(self, name: ShardName) -> Member:
        """A shard that the catalog names. Another process may have a newer cluster file than this one."""
        member = self._members.get(name)
        if member is None:
            raise ShardUnavailable(name, "the cluster file of this router does not name it")
        return member

    def epoch(self, org: OrgId) -> int:
        """Of the org's placement, as this router knows it: shards refuse who knows an older one than they do (I6)."""
        return self._known().placement(org).epoch

    async def write(self, org: OrgId, act: Callable[[Member, int], Awaitable[_T]]) -> _T:
        """Does something on a shard that takes the org's jobs, by the placement of the epoch that it is given; again,
        after learning better, if that shard refuses."""
        try:
            return await act(*self._writer(org))
        except NotOwned:
            await self._learn(self._known().epoch)
            return await act(*self._writer(org))

    def _writer(self, org: OrgId) -> tuple[Member, int]:
        placement = self._known().placement(org)
        writes = placement.writes
        return self.placed(writes[0] if len(writes) == 1 else random.choice(writes)).to_enqueue(), placement.epoch

    def _known(self) -> Catalog:
        if self._catalog is None:
            raise ShardUnavailable(ShardName("catalog"), "it has not been read yet")
        return self._catalog

    async def _learn(self, than_epoch: int) -> None:
        """Reads the catalog again, once for all who ask at the same time."""
        async with self._reading:
            if self._catalog is None or self._catalog.epoch <= than_epoch:
                self._catalog = await catalog.read(self._catalog_database)
                self._wake_all()

    def _wake_all(self) -> None:
        """Who waits may have to wait elsewhere."""
        for member in self._members.values():
            member.room.wake_all()

    # ── Upkeep ───────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _found_catalog(self) -> None:
        entries = self._cluster.shards
        weights = {entry.name: entry.share if entry.state.takes_enqueues else 0.0 for entry in entries}
        said = False
        while True:
            try:
                await schema.migrate(self._catalog_database, cluster=None)
                if not await catalog.is_founded(self._catalog_database):
                    for entry in entries:
                        if entry.state is not ShardState.OFF:
                            await _refuse_second_catalog(entry)
                self._catalog = await catalog.found(self._catalog_database, cluster=self._cluster.name, weights=weights)
                return
            except ShardUnavailable as error:
                if not said:
                    _log.warning("waiting for the catalog: %s", error)
                    said = True
                await asyncio.sleep(_RETRY_S)

    async def _follow_catalog(self) -> None:
        """A refused enqueue teaches at once; a router that is only asked for jobs would never learn where they went."""
        known = self._known().epoch
        if await catalog.read_epoch(self._catalog_database) > known:
            await self._learn(known)

    async def _prove(self, database: Database, in_use: bool) -> None:
        if in_use:
            await schema.recognize(database, cluster=self._cluster.name)
        await schema.migrate(database, cluster=self._cluster.name)
        await catalog.grant(database, self._known())

    async def _proved(self, member: Member) -> None:
        # Where the catalog is in this shard's database, it is reached as that has proved to be.
        if self._cluster.catalog_shard == member.name and self._catalog_dsn != member.dsn:
            self._catalog_dsn = member.dsn
            await self._catalog_database.reconnect(member.dsn)
        self._wake_all()


def _shuffled(members: list[Member]) -> list[Member]:
    if len(members) > 1:
        random.shuffle(members)
    return members


async def _refuse_second_catalog(entry: ShardEntry) -> None:
    database = Database(entry.name, entry.dsn, connections=1)
    try:
        await database.open()
        await catalog.refuse_second(database)
    finally:
        await database.close()
