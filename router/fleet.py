"""The shards as this router knows them: a copy of the catalog, one store and one set of books for each, and their
upkeep.
 What it knows may be old. A shard that is asked wrongly refuses (I6); then the catalog is read again, and the call
goes where it belongs. A shard that is away hurts only the orgs that live there.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from router.waiting import SWEEP_S, Room
from shard import catalog, schema
from shard.books import Books
from shard.catalog import Catalog
from shard.cluster import Cluster, ShardEntry
from shard.database import Database
from shard.doorbell import Doorbell
from shard.errors import Misconfigured, NotOwned, ShardError, ShardUnavailable, UnknownShard
from shard.lease import shard_tag
from shard.store import Store
from shard.vocabulary import OrgId, ShardName

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

_FOLD_TALLY_S = 60.0
_MAKE_PARTITIONS_S = 3600.0
_CATALOG_S = 3.0
_RETRY_OPEN_S = 1.0


@dataclass(slots=True, eq=False)
class Member:
    """One shard of the fleet."""

    store: Store
    books: Books
    queue_database: Database
    books_database: Database
    doorbell: Doorbell
    room: Room
    # Set once its schema is in place, it knows its slots, and it has proved to be the shard it is taken for.
    ready: asyncio.Event
    # What keeps it from being ready.
    trouble: str = "not contacted yet"


class Fleet:
    """All shards of a cluster. Use `run` to open it; every other method needs it open."""

    def __init__(self, cluster: Cluster, *, connections_per_shard: int) -> None:
        self._cluster = cluster
        self._members = {entry.name: _member(entry, connections_per_shard) for entry in cluster.shards}
        self._by_tag = {shard_tag(name): name for name in self._members}
        self._catalog_database = Database(ShardName("catalog"), cluster.catalog_dsn, connections=1, for_books=True)
        self._catalog: Catalog | None = None
        self._reading = asyncio.Lock()

    async def run(self, opened: asyncio.Event) -> None:
        """Opens the fleet, says so by `opened`, and keeps every shard up until cancelled. Raises Misconfigured where an
        operator must look before anything can work."""
        databases = [self._catalog_database]
        for member in self._members.values():
            databases += [member.queue_database, member.books_database]
        try:
            for database in databases:
                await database.open()
            await self._found_catalog()
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._keep(member)) for member in self._members.values()]
                tasks.append(group.create_task(_every(_CATALOG_S, "look at the catalog", self._follow_catalog)))
                first_tries = [group.create_task(member.ready.wait()) for member in self._members.values()]
                # Serve as soon as every shard is ready; with one away, after a moment, without it.
                _, late = await asyncio.wait(first_tries, timeout=5.0)
                for wait in late:
                    wait.cancel()
                opened.set()
                await asyncio.wait(tasks)
        finally:
            for database in databases:
                await database.close()

    async def finish(self) -> None:
        """Lets every shard do what it has been asked for: jobs that reached no consumer still go back."""
        await asyncio.gather(*(member.store.finish() for member in self._members.values()))

    # ── Routing ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def shards(self) -> dict[ShardName, Member]:
        return self._members

    def slots_of(self, shard: ShardName) -> int:
        return len(self._known().slots_written_by(shard))

    def member(self, name: str) -> Member:
        """Raises UnknownShard, and ShardUnavailable while it is not ready."""
        member = self._members.get(ShardName(name))
        if member is None:
            raise UnknownShard(ShardName(name))
        if not member.ready.is_set():
            raise ShardUnavailable(member.store.name, member.trouble)
        return member

    def by_tag(self, tag: int) -> Member | None:
        """The shard that a lease token names; None if this cluster has no such shard."""
        name = self._by_tag.get(tag)
        return None if name is None else self.member(name)

    def readers(self, org: OrgId) -> list[Member]:
        """The shards that may hold jobs of the org; the order is random where there are several."""
        members = [self._placed(name) for name in self._known().placement(org).reads]
        if len(members) > 1:
            random.shuffle(members)
        return members

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
        return self._placed(writes[0] if len(writes) == 1 else random.choice(writes)), placement.epoch

    def _placed(self, name: ShardName) -> Member:
        """A shard that the catalog names. Another process may have a newer cluster file than this one."""
        if name not in self._members:
            raise ShardUnavailable(name, "the cluster file of this router does not name it")
        return self.member(name)

    def _known(self) -> Catalog:
        if self._catalog is None:
            raise ShardUnavailable(ShardName("catalog"), "it has not been read yet")
        return self._catalog

    async def _learn(self, than_epoch: int) -> None:
        """Reads the catalog again, once for all who ask at the same time."""
        async with self._reading:
            if self._catalog is None or self._catalog.epoch <= than_epoch:
                self._catalog = await catalog.read(self._catalog_database)
                # Who waits may have to wait elsewhere.
                for member in self._members.values():
                    member.room.wake_all()

    # ── Upkeep ───────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _found_catalog(self) -> None:
        weights = {entry.name: entry.weight for entry in self._cluster.shards}
        said = False
        while True:
            try:
                await schema.migrate(self._catalog_database, cluster=None)
                if not await catalog.is_founded(self._catalog_database):
                    for member in self._members.values():
                        await catalog.refuse_second(member.queue_database)
                self._catalog = await catalog.found(self._catalog_database, cluster=self._cluster.name, weights=weights)
                return
            except ShardUnavailable as error:
                if not said:
                    _log.warning("waiting for the catalog: %s", error)
                    said = True
                await asyncio.sleep(_RETRY_OPEN_S)

    async def _keep(self, member: Member) -> None:
        """Brings one shard up and keeps it so. Its troubles end here: they are its own orgs' alone."""
        await self._bring_up(member)
        async with asyncio.TaskGroup() as group:
            group.create_task(member.doorbell.run())
            group.create_task(member.room.run())
            of_shard = f"of shard {member.store.name!r}"
            for interval_s, what, act in (
                (SWEEP_S, "sweep the lanes", member.room.sweep),
                (_FOLD_TALLY_S, "fold the tally", member.store.fold_tally),
                (_MAKE_PARTITIONS_S, "make partitions", member.books.make_partitions),
            ):
                group.create_task(_every(interval_s, f"{what} {of_shard}", act))

    async def _bring_up(self, member: Member) -> None:
        said = ""
        while True:
            try:
                await schema.migrate(member.queue_database, cluster=self._cluster.name)
                await catalog.grant(member.queue_database, self._known())
            except ShardError as error:
                member.trouble = error.why if isinstance(error, ShardUnavailable) else str(error)
                if member.trouble != said:
                    said = member.trouble
                    level = logging.ERROR if isinstance(error, Misconfigured) else logging.WARNING
                    _log.log(level, "%s", error)
                await asyncio.sleep(_RETRY_OPEN_S)
            except Exception as error:  # noqa: BLE001 - one shard's trouble must not end the others
                if str(error) != said:
                    said = str(error)
                    _log.exception("could not bring up shard %r", member.store.name)
                member.trouble = "an unexpected error; the router's log has the details"
                await asyncio.sleep(_RETRY_OPEN_S)
            else:
                member.ready.set()
                return

    async def _follow_catalog(self) -> None:
        """A refused enqueue teaches at once; a router that is only asked for jobs would never learn where they went."""
        known = self._known().epoch
        if await catalog.read_epoch(self._catalog_database) > known:
            await self._learn(known)


def _member(entry: ShardEntry, connections: int) -> Member:
    queue_database = Database(entry.name, entry.dsn, connections=connections)
    books_database = Database(entry.name, entry.dsn, connections=2, for_books=True)
    store = Store(queue_database)
    doorbell = Doorbell(queue_database, entry.dsn, lambda queues: room.heard(queues))
    room = Room(store, doorbell)
    return Member(
        store=store,
        doorbell=doorbell,
        room=room,
        books=Books(books_database),
        queue_database=queue_database,
        books_database=books_database,
        ready=asyncio.Event(),
    )


async def _every(interval_s: float, what: str, act: Callable[[], Awaitable[object]]) -> None:
    """Does something again and again; a failure is logged, and the next turn tries again."""
    while True:
        await asyncio.sleep(interval_s * random.uniform(0.9, 1.1))
        try:
            await act()
        except ShardError as error:
            _log.warning("could not %s: %s", what, error)
        except Exception:  # noqa: BLE001 - one shard's trouble must not end the upkeep of the others
            _log.exception("could not %s", what)
