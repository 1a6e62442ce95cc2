"""The shards as this router knows them: which there are, by the cluster file, and where each org is, by a copy of the
catalog. Both may change.

What the copy says may be old. A shard that is asked wrongly refuses (I6); then the call waits until this router knows
better, and goes where it belongs. A shard that is away hurts only the orgs that live there.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import TypeVar

from router.catalog_copy import CatalogCopy
from router.member import Member
from shard import catalog, history, identity, pinning, schema
from shard.catalog import Catalog, Holding
from shard.cluster import Cluster, ClusterFileError, ShardState
from shard.cluster_change import refuse_change
from shard.database import Database, Mark
from shard.errors import Misconfigured, NotOwned, ShardError, ShardUnavailable, UnknownShard
from shard.history import Made
from shard.identity import Identity
from shard.lease import shard_tag
from shard.placement import Placement
from shard.vocabulary import OrgId, ShardName

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

# How long a call waits for its org to have a shard that takes its jobs: a slot that moves has none for a moment.
_UNOWNED_S_MAX = 2.0
_RETRY_S = 1.0
_MARKS_LESS = 20
_FIRST_TRY_S_MAX = 5.0


class Fleet:
    """All shards of a cluster. Use `run` to open it; every other method needs it open."""

    def __init__(self, cluster: Cluster, *, connections_per_shard: int) -> None:
        self._cluster = cluster
        self._connections = connections_per_shard
        self._members: dict[ShardName, Member] = {}
        self._by_tag: dict[int, Member] = {}
        # What the databases have proved to be.
        self._identities: dict[ShardName, Identity | None] = {}
        # The marks that shards must have, by the catalog (shard/history.py).
        self._marks: Mapping[ShardName, Mark] = {}
        self._catalog = CatalogCopy(cluster.catalog_dsn, self._learned, self._marked)
        # Owns the tasks of every member.
        self._group = asyncio.TaskGroup()

    async def run(self, opened: asyncio.Event) -> None:
        """Opens the fleet, says so by `opened`, and keeps every shard up until cancelled. Raises Misconfigured where an
        operator must look before anything can work."""
        try:
            await self._catalog.database.open()
            await self._found_catalog()
            async with self._group as group:
                group.create_task(self._catalog.run())
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
            await self._catalog.database.close()

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
            await self._catalog.look()
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
            if self._catalog.known.left_by(name) is not None:
                raise ClusterFileError(
                    f"{source}: shard {name!r} is gone from it, and is still asked for jobs that are sent again and "
                    f"for finished ones: put it back, or have that given up by `windrow shards forget {name}`"
                )

    def _take_up(self, cluster: Cluster) -> None:
        before, self._members = self._members, {}
        self._cluster = cluster
        others: set[ShardName] = set()
        for entry in cluster.shards:
            member = before.get(entry.name)
            if member is not None and member.goes_on_as(entry):
                del before[entry.name]
                if member.entry.state is not entry.state:
                    others.add(entry.name)
                member.update(entry, self._group)
            else:
                others.add(entry.name)
                member = Member(
                    entry,
                    connections=self._connections,
                    prove=self._prove,
                    proved=self._proved,
                    confirm=self._confirm,
                )
                member.start(self._group)
            self._members[entry.name] = member
        self._by_tag = {shard_tag(name): member for name, member in self._members.items()}
        for member in before.values():
            member.dismiss("the cluster file has changed")
        self._wake_readers_of(others | before.keys())

    # ── Routing ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def shards(self) -> Mapping[ShardName, Member]:
        """In the order of the cluster file."""
        return self._members

    def holdings(self) -> dict[ShardName, Holding]:
        """What each shard holds, also one that the cluster file does not name."""
        return self._catalog.known.holdings()

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

    def placement(self, org: OrgId) -> Placement:
        """Where the org is, as this router knows it. A call goes by one placement: whom it asks, where it writes, and
        which epoch it names."""
        return self._catalog.known.placement(org)

    async def newest_catalog(self) -> Catalog:
        """As of now, or, while the catalog is away, as this router knows it."""
        try:
            return await self._catalog.look()
        except ShardUnavailable:
            return self._catalog.known

    async def is_current(self, org: OrgId, placement: Placement) -> bool:
        """Whether the catalog says so still. Raises ShardUnavailable."""
        return await self._catalog.is_current(org, placement)

    def givers(self, org: OrgId) -> list[Member]:
        """The shards that may hold jobs of the org and are up, to take jobs from; the order is random. Raises
        ShardUnavailable if none is."""
        names = self.placement(org).reads
        members = [member for name in names if (member := self._members.get(name)) and member.up.is_set()]
        if not members:
            return [self.placed(names[-1]).to_look_at()]
        if len(members) > 1:
            random.shuffle(members)
        return members

    def placed(self, name: ShardName) -> Member:
        """A shard that the catalog names. Another process may have a newer cluster file than this one."""
        member = self._members.get(name)
        if member is None:
            raise ShardUnavailable(name, "the cluster file of this router does not name it")
        return member

    def writer(self, placement: Placement) -> Member:
        """The shard that takes an org's jobs, and keeps its queues."""
        return self.placed(placement.writes[0])

    async def write(self, org: OrgId, act: Callable[[Member, Placement], Awaitable[_T]]) -> _T:
        """Does something on the shard that takes the org's jobs; again, by what this router has learnt, if that shard
        refuses. Raises ShardUnavailable, also where no shard takes them for long."""
        give_up_s: float | None = None
        while True:
            placement = self.placement(org)
            member = self.writer(placement)
            try:
                return await act(member, placement)
            except NotOwned as error:
                give_up_s = give_up_s or asyncio.get_running_loop().time() + _UNOWNED_S_MAX
                try:
                    async with asyncio.timeout_at(give_up_s):
                        await self._catalog.until_changed(org, placement)
                except TimeoutError:
                    why = f"{error}; no other shard was found to take them within {_UNOWNED_S_MAX:g} s"
                    raise ShardUnavailable(member.name, why) from error

    def _learned(self, before: Catalog, after: Catalog) -> None:
        """Who waits may have to wait elsewhere too."""
        moved = {
            slot
            for slot, (old, new) in enumerate(zip(before.slots, after.slots, strict=False))
            if old is not new and old.reads != new.reads
        }
        # An org that has got a slot of its own since may have moved with it.
        self._wake(lambda org: (slot := after.slot(org)) in moved or slot != before.slot(org))

    def _wake_readers_of(self, names: AbstractSet[ShardName]) -> None:
        """Something is different about these shards. The others' consumers, who may be thousands, are left alone."""
        self._wake(lambda org: not names.isdisjoint(self.placement(org).reads))

    def _wake(self, whose: Callable[[OrgId], bool]) -> None:
        """Has those who wait look about, on all shards; each org is asked about once."""
        rooms = [member.room for member in self._members.values()]
        orgs = set(filter(whose, {org for room in rooms for org in room.orgs()}))
        for room in rooms:
            room.wake_those(orgs)

    # ── Upkeep ───────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _found_catalog(self) -> None:
        database, entries = self._catalog.database, self._cluster.shards
        weights = {entry.name: entry.share if entry.state.takes_enqueues else 0.0 for entry in entries}
        said = False
        while True:
            try:
                if not await catalog.is_founded(database, cluster=self._cluster.name):
                    await self._refuse_second_catalog()
                await schema.migrate(database, cluster=None)
                self._catalog.begin(await catalog.found(database, cluster=self._cluster.name, weights=weights))
                return
            except ShardUnavailable as error:
                if not said:
                    _log.warning("waiting for the catalog: %s", error)
                    said = True
                await asyncio.sleep(_RETRY_S)

    async def _refuse_second_catalog(self) -> None:
        """Raises Misconfigured if a shard has slots of a catalog elsewhere, or its database will not do at all."""
        for entry in self._cluster.shards:
            if entry.state is ShardState.OFF:
                continue
            shard = Database(entry.name, entry.dsn, connections=1)
            try:
                await shard.open()
                await identity.examine(shard, None, cluster=self._cluster.name)
            except Misconfigured:
                # Unless these slots are of the catalog that another router has just founded.
                if not await catalog.is_founded(self._catalog.database, cluster=self._cluster.name):
                    raise
            finally:
                await shard.close()

    async def _prove(self, database: Database) -> None:
        name, cluster = database.name, self._cluster
        found = await identity.read(database)
        if found is not None and found == self._identities.get(name):
            # On another server by now: that needs no catalog, which may be on its way with this very database.
            await history.refuse_lost(database, self._marks.get(name))
            await schema.migrate(database, cluster=cluster.name)
            database.identity = found
        else:
            if name == cluster.catalog_shard and not await catalog.is_founded(database, cluster=cluster.name):
                raise Misconfigured(
                    f"shard {name!r}: its DSN leads to a database without a catalog ({database.address}), and this "
                    "shard has the catalog; correct the dsn"
                )
            admitted = await identity.admit(database, self._catalog.database, cluster=cluster.name)
            # A new one does not know which slots have left the shard since this router has looked.
            await self._catalog.look()
            # An empty one in the place of one that is lost has never heard of the orgs that are pinned to it.
            if not await pinning.settle(database, await pinning.read_on(self._catalog.database, name)):
                raise ShardUnavailable(name, "its queues are being changed")
            self._identities[name] = admitted
        if (ahead := await catalog.newest_epoch(database)) > self._catalog.known.epoch:
            _log.error(
                "shard %r knows of epoch %d, and the catalog of %d only: was the catalog restored from a backup? See "
                'docs/operations.md, "A shard was restored from an old backup"',
                *(name, ahead, self._catalog.known.epoch),
            )
        await catalog.grant(database, self._catalog.known)

    def _marked(self, marks: Mapping[ShardName, Mark]) -> None:
        """The catalog has confirmed these."""
        for name, mark in marks.items():
            # A look that was under way while this router had a mark confirmed knows a few less.
            if name in self._marks and self._marks[name].number - mark.number > _MARKS_LESS:
                _log.error(
                    "the catalog knows mark %d of shard %r, and knew %d: was it restored from a backup? See "
                    'docs/operations.md, "A shard was restored from an old backup"',
                    *(mark.number, name, self._marks[name].number),
                )
        self._marks = marks
        for name, member in self._members.items():
            member.must_have(marks.get(name))

    async def _confirm(self, name: ShardName, made: Made) -> bool:
        """Whether the catalog has taken note of a mark."""
        if not await history.confirm(self._catalog.database, name, made):
            return False
        self._marked({**self._marks, name: Mark(made.number, made.token)})
        return True

    async def _proved(self, member: Member) -> None:
        # Where the catalog is in this shard's database, it is reached as that has proved to be.
        if self._cluster.catalog_shard == member.name:
            self._catalog.database.identity = self._identities[member.name]
            await self._catalog.reconnect(member.dsn)
        self._wake_readers_of({member.name})
