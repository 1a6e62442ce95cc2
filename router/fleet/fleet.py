"""The shards as this router knows them. The cluster file lists the shards, and a copy of the catalog says on which
shard each org lives. The cluster file and the catalog may change.

The copy of the catalog may be old. If a call goes to the wrong shard, that shard refuses the call (I6). The call then
waits for a newer copy, and goes to the right shard. A shard that does not answer affects only the orgs that live on it.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import TypeVar

from router.buffer import Buffer
from router.fleet.buckets import GIVE_BACK_S
from router.fleet.catalog_copy import CatalogCopy
from router.fleet.handover import Handovers
from router.fleet.limits import Limits
from router.fleet.org_pools import OrgPools
from router.fleet.periodic import every
from router.fleet.revocations import Revocations
from router.fleet.shard_handle import ShardHandle
from router.fleet.siblings.frame import QueueKey
from router.fleet.siblings.siblings import Siblings
from router.fleet.starts import Starts
from shard.admin import api_keys
from shard.admin.api_keys import FoundKeys
from shard.admin.weights import Weights
from shard.errors import (
    Misconfigured,
    NotOwned,
    PlacementChanging,
    ShardError,
    ShardUnavailable,
    UnknownNode,
    UnknownQueue,
    UnknownSchedule,
    UnknownShard,
    UnknownWorkflow,
)
from shard.lease_token import shard_tag
from shard.limits import LimitTable
from shard.placement import catalog, identity, marks, pins
from shard.placement.catalog import Catalog, Holding
from shard.placement.cluster_diff import refuse_change
from shard.placement.cluster_file import Cluster, ClusterFileError, ShardState
from shard.placement.identity import Identity
from shard.placement.marks import Made
from shard.placement.slots import Placement
from shard.postgres import schema
from shard.postgres.pool import Database, Mark
from shard.queue.revocation import Revocation
from shard.vocabulary import OrgId, ShardName

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

# How long a call waits until a shard takes the new jobs of the call's org. While a slot moves, there is a moment in
# which no shard takes new jobs of the slot's orgs.
_UNOWNED_S_MAX = 2.0
_RETRY_S = 1.0
# Each router compares the newest mark of a shard in the catalog with the newest mark of that shard that the router
# knows. If the catalog's mark is lower by more than this number, the catalog was probably restored from a backup.
_MARKS_LESS_MAX = 20
_FIRST_TRY_S_MAX = 5.0


class Fleet:
    """All shards of a cluster. `run` opens the fleet; every other method needs an open fleet. `sweep_s` is the interval
    of the sweeps of each shard. `buffer`: the memory for jobs that are on their way to consumers of sibling
    processes."""

    def __init__(self, cluster: Cluster, *, connections_per_shard: int, sweep_s: float, buffer: Buffer) -> None:
        self._cluster = cluster
        self._connections = connections_per_shard
        self._sweep_s = sweep_s
        self.revocations = Revocations()
        self.siblings = Siblings(buffer, consumers=self._consumers, ready=self._ready)
        # All limits in force.
        self.limit_table = LimitTable()
        self.limits = Limits()
        self.starts = Starts(lambda org: self.writer(self.placement(org)).store, self._end_holds)
        self.pools = OrgPools(self.shards, lambda org: self.placement(org).reads, self.starts)
        self._members: dict[ShardName, ShardHandle] = {}
        self._by_tag: dict[int, ShardHandle] = {}
        # The identity that each shard's database had when it was last checked.
        self._identities: dict[ShardName, Identity | None] = {}
        # The newest mark that each shard's history must contain, according to the catalog (shard/placement/marks.py).
        self._marks: Mapping[ShardName, Mark] = {}
        self._catalog = CatalogCopy(
            cluster.catalog_dsn, self._catalog_changed, self._marked, self._limits_changed, self.pools.reweigh
        )
        # Owns the tasks of all shard handles.
        self._group = asyncio.TaskGroup()

    async def run(self, opened: asyncio.Event) -> None:
        """Opens the fleet, sets `opened`, and keeps every shard up until cancelled. Raises Misconfigured if the fleet
        cannot be opened before an operator has corrected something."""
        try:
            await self._catalog.database.open()
            await self._found_catalog()
            async with self._group as group:
                self.pools.start(group)
                group.create_task(self._catalog.run())
                for buckets in (self.limits, self.starts):
                    group.create_task(every(GIVE_BACK_S, "give tokens back", buckets.give_back))
                self._take_up(self._cluster)
                contacted = [member for member in self._members.values() if member.entry.state is not ShardState.OFF]
                first_tries = [group.create_task(member.up.wait()) for member in contacted]
                if first_tries:
                    # Serve as soon as every shard is up. If a shard does not come up within 5 s, serve without it.
                    _, late = await asyncio.wait(first_tries, timeout=_FIRST_TRY_S_MAX)
                    for wait in late:
                        wait.cancel()
                opened.set()
        finally:
            await self._catalog.database.close()

    async def finish(self) -> None:
        """Gives unused tokens back, and then waits until the running calls of all shards have ended."""
        await asyncio.gather(self.limits.finish(), self.starts.finish())
        await asyncio.gather(*(member.finish() for member in self._members.values()))

    # ── A cluster file that changes ──────────────────────────────────────────────────────────────────────────────────

    async def change(self, cluster: Cluster) -> None:
        """Switches to a changed cluster file. Calls in flight run to their end. Raises ClusterFileError if the change
        is not allowed; in that case nothing has changed."""
        refuse_change(self._cluster, cluster)
        removed = [name for name in self._members if cluster.shard(name) is None]
        if removed:
            await self._refuse_to_remove(removed, cluster.source)
        self._take_up(cluster)

    async def _refuse_to_remove(self, removed: Sequence[ShardName], source: str) -> None:
        """Reads the catalog again. Raises ClusterFileError if one of the removed shards still holds something, if it is
        still asked about older jobs, or if the catalog does not answer."""
        try:
            await self._catalog.look()
        except ShardError as error:
            raise ClusterFileError(
                f"{source}: shard {removed[0]!r} was removed from it, but it may still hold slots: {error}"
            ) from error
        holdings = self.holdings()
        for name in removed:
            if name in holdings:
                raise ClusterFileError(
                    f"{source}: shard {name!r} was removed from it, but still holds {holdings[name]}: put it back with "
                    'state = "draining", and wait until `windrow shards` shows 0 for it'
                )
            if self._catalog.current.left_by(name) is not None:
                raise ClusterFileError(
                    f"{source}: shard {name!r} was removed from it, but is still asked about retried enqueues and "
                    f"finished jobs: put it back, or give that up with `windrow shards forget {name}`"
                )

    def _take_up(self, cluster: Cluster) -> None:
        before, members = self._members, dict[ShardName, ShardHandle]()
        # Only this loop may fail, because it changes nothing yet. After a later error, there would be new members that
        # were not started, and former members that were not dismissed.
        for entry in cluster.shards:
            member = before.get(entry.name)
            if member is None or not member.goes_on_as(entry):
                member = ShardHandle(
                    entry,
                    connections=self._connections,
                    sweep_s=self._sweep_s,
                    prove=self._prove,
                    proved=self._proved,
                    confirm=self._confirm,
                    revoked=self._revoked,
                    siblings=self.siblings,
                    elsewhere=self._elsewhere,
                    pools=self.pools,
                    starts=self.starts,
                )
            members[entry.name] = member
        self._cluster, self._members = cluster, members
        self._by_tag = {shard_tag(name): member for name, member in members.items()}
        changed: set[ShardName] = set()
        for entry in cluster.shards:
            member = members[entry.name]
            if member is not before.get(entry.name):
                changed.add(entry.name)
                member.start(self._group)
                continue
            if member.entry.state is not entry.state:
                changed.add(entry.name)
            member.update(entry, self._group)
        for name, member in before.items():
            if member is not members.get(name):
                changed.add(name)
                member.dismiss("the cluster file has changed")
        self._wake_readers_of(changed)

    # ── Routing ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def shards(self) -> Mapping[ShardName, ShardHandle]:
        """Returns all shards, in the order of the cluster file."""
        return self._members

    def holdings(self) -> dict[ShardName, Holding]:
        """Returns what each shard holds, including shards that the cluster file does not name."""
        return self._catalog.current.holdings()

    def member(self, name: str) -> ShardHandle:
        """Returns the shard with this name. Raises UnknownShard if the cluster file names no such shard, and
        ShardUnavailable while the shard is not up."""
        member = self._members.get(ShardName(name))
        if member is None:
            raise UnknownShard(ShardName(name))
        return member.require_up()

    def by_tag(self, tag: int) -> ShardHandle | None:
        """Returns the shard with this tag, or None if the cluster has no such shard. Lease tokens contain the tag of
        their shard. Raises ShardUnavailable unless the shard takes changes."""
        member = self._by_tag.get(tag)
        return None if member is None else member.require_writable()

    def placement(self, org: OrgId) -> Placement:
        """Returns where the org lives, according to this router's copy of the catalog. A call must use one placement
        throughout: for the shards that it asks, the shard that it writes to, and the epoch that it sends."""
        return self._catalog.current.placement(org)

    @property
    def has_fresh_catalog(self) -> bool:
        """Whether this process has read the catalog in the last few seconds."""
        return self._catalog.is_fresh

    async def newest_catalog(self) -> Catalog:
        """Reads the catalog. If the catalog does not answer, returns this router's copy of the catalog."""
        try:
            return await self._catalog.look()
        except ShardUnavailable:
            return self._catalog.current

    async def newest_limits(self) -> LimitTable:
        """Reads the limits, and puts them in force in this process. While the catalog does not answer, returns the
        limits that are in force."""
        await self.newest_catalog()
        return self.limit_table

    async def newest_weights(self) -> Weights:
        """Reads the weights of orgs, and puts them in force in this process. While the catalog does not answer, returns
        the weights that are in force."""
        await self.newest_catalog()
        return self.pools.weights

    async def is_current(self, org: OrgId, placement: Placement) -> bool:
        """Returns whether the org still has this placement in the catalog. Raises ShardUnavailable."""
        return await self._catalog.is_current(org, placement)

    def shards_to_claim_from(self, org: OrgId) -> list[ShardHandle]:
        """Returns the shards that may hold jobs of the org and are up, in random order. Raises ShardUnavailable if none
        of them is up."""
        names = self.placement(org).reads
        members = [member for name in names if (member := self._members.get(name)) and member.up.is_set()]
        if not members:
            return [self.placed(names[-1]).require_up()]
        if len(members) > 1:
            random.shuffle(members)
        return members

    def placed(self, name: ShardName) -> ShardHandle:
        """Returns a shard that the catalog names. Raises ShardUnavailable if this process does not know the shard. This
        can happen when another process has a newer cluster file."""
        member = self._members.get(name)
        if member is None:
            raise ShardUnavailable(name, "the cluster file of this router does not name it")
        return member

    def writer(self, placement: Placement) -> ShardHandle:
        """Returns the shard that takes the new jobs of an org with this placement, and that has the org's queue
        configurations."""
        return self.placed(placement.writes[0])

    async def read(self, org: OrgId, act: Callable[[ShardHandle], Awaitable[_T]]) -> _T:
        """Runs `act` on the shard that has the org's queue configurations, schedules and workflows. Another shard may
        have old copies of these objects, or no copies. So this function reads the catalog after `act`, and runs `act`
        again if the org has moved. While the catalog does not answer, no move makes progress, so this router's copy of
        the catalog is good enough. Raises ShardUnavailable, and every error of `act`."""
        while True:
            placement = self.placement(org)
            try:
                answer = await act(self.writer(placement).require_up())
            except (UnknownQueue, UnknownSchedule, UnknownWorkflow, UnknownNode, ShardUnavailable):
                if (await self.newest_catalog()).placement(org) == placement:
                    raise
            else:
                if (await self.newest_catalog()).placement(org) == placement:
                    return answer

    async def write(self, org: OrgId, act: Callable[[ShardHandle, Placement], Awaitable[_T]]) -> _T:
        """Runs `act` on the shard that takes the org's new jobs. If that shard refuses because the org has moved, waits
        for a newer placement and tries again. Raises ShardUnavailable. If no shard takes the jobs within 2 s, the error
        is the subclass PlacementChanging."""
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
                    raise PlacementChanging(member.name, why) from error

    def _revoked(self, shard: ShardName, revocations: Sequence[Revocation]) -> None:
        """Tells consumers that somebody else has ended leases that they had on this shard."""
        self.revocations.tell(shard, revocations)
        for revocation in revocations:
            self.pools.ended(revocation.leases)

    def _elsewhere(self, org: OrgId, name: ShardName) -> list[ShardHandle] | None:
        """Returns the shards other than `name` that may have live jobs of the org. The caller knows that the shard
        `name` takes the org's new jobs. If this router's copy of the catalog does not say so, the copy is old, and the
        result is None. Raises ShardUnavailable."""
        placement = self.placement(org)
        if name not in placement.writes:
            return None
        return [self.placed(source) for source in placement.sources]

    def _limits_changed(self, table: LimitTable) -> None:
        self.limit_table = table
        self.limits.replace(table)
        self.starts.replace(table)

    def _end_holds(self) -> None:
        """Wakes the consumers that limits held back."""
        for member in self._members.values():
            member.room.end_holds()

    def _catalog_changed(self, before: Catalog, after: Catalog) -> None:
        """Wakes the consumers of orgs whose shards have changed, because these consumers may have to wait on other
        shards now."""
        moved = {
            slot
            for slot, (old, new) in enumerate(zip(before.slots, after.slots, strict=False))
            if old is not new and old.reads != new.reads
        }
        # An org that was pinned or unpinned has another slot now, which may be on another shard.
        self._wake(lambda org: (slot := after.slot(org)) in moved or slot != before.slot(org))

    def _wake_readers_of(self, names: AbstractSet[ShardName]) -> None:
        """Wakes the consumers on these shards. Does not wake the consumers on other shards, because there may be
        thousands of them."""
        self._wake(lambda org: not names.isdisjoint(self.placement(org).reads))

    def _wake(self, is_affected: Callable[[OrgId], bool]) -> None:
        """Wakes the consumers of the affected orgs on all shards. Calls `is_affected` once for each org."""
        self.pools.wake()
        rooms = [member.room for member in self._members.values()]
        orgs = set(filter(is_affected, {org for room in rooms for org in room.orgs()}))
        for room in rooms:
            room.wake_orgs(orgs)

    @property
    def catalog_database(self) -> Database:
        """The catalog's database. It has only one connection, and this router's reads of the catalog use this
        connection too. So run only short statements on it."""
        return self._catalog.database

    # ── API keys ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def follow_revocations(self, on_revocations: Callable[[int, float], None]) -> None:
        """Calls `on_revocations` after each read of the catalog. The first argument says how often API keys have been
        revoked so far. The second argument is the time (by the event loop's clock) at which the read began."""
        self._catalog.on_revocations = on_revocations

    async def find_api_keys(self, ids: Collection[str]) -> FoundKeys:
        """Reads API keys in the catalog. Raises ShardUnavailable."""
        return await api_keys.find(self._catalog.database, ids)

    async def record_api_key_use(self, ids: Collection[str]) -> None:
        """Records that API keys were used today. Raises ShardUnavailable."""
        await api_keys.record_use(self._catalog.database, ids)

    # ── Sibling processes ────────────────────────────────────────────────────────────────────────────────────────────

    def _consumers(self, name: ShardName) -> Handovers | None:
        """Returns the object that hands jobs of this shard over to consumers of this process, or None if the shard is
        not up."""
        member = self._members.get(name)
        return member.handovers if member is not None and member.up.is_set() else None

    def _ready(self) -> Iterator[QueueKey]:
        """Returns all queues whose jobs can be handed over to consumers of this process."""
        for name, member in self._members.items():
            for org, queue in member.room.ready():
                yield QueueKey(name, org, queue)

    # ── Upkeep ───────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _found_catalog(self) -> None:
        database, entries = self._catalog.database, self._cluster.shards
        weights = {entry.name: entry.share if entry.state.takes_enqueues else 0.0 for entry in entries}
        warned = False
        while True:
            try:
                if not await catalog.is_founded(database, cluster=self._cluster.name):
                    await self._refuse_second_catalog()
                await schema.migrate(database, cluster=None)
                await self._catalog.begin(await catalog.found(database, cluster=self._cluster.name, weights=weights))
                return
            except ShardUnavailable as error:
                if not warned:
                    _log.warning("waiting for the catalog: %s", error)
                    warned = True
                await asyncio.sleep(_RETRY_S)

    async def _refuse_second_catalog(self) -> None:
        """Raises Misconfigured if a shard has slots of another catalog, or if its database is unusable."""
        for entry in self._cluster.shards:
            if entry.state is ShardState.OFF:
                continue
            shard = Database(entry.name, entry.dsn, connections=1)
            try:
                await shard.open()
                await identity.examine(shard, None, cluster=self._cluster.name)
            except Misconfigured:
                # Another router may have founded this catalog just now. Then the shard's slots belong to this catalog,
                # and nothing is wrong.
                if not await catalog.is_founded(self._catalog.database, cluster=self._cluster.name):
                    raise
            finally:
                await shard.close()

    async def _prove(self, database: Database) -> None:
        name, cluster = database.name, self._cluster
        found = await identity.read(database)
        if found is not None and found == self._identities.get(name):
            # This process knows the database already. The database may be on another server after a fail-over. These
            # statements must not need the catalog, because the catalog may be in this same database, and then it fails
            # over too.
            await marks.refuse_lost(database, self._marks.get(name))
            await schema.migrate(database, cluster=cluster.name)
            database.identity = found
        else:
            if name == cluster.catalog_shard and not await catalog.is_founded(database, cluster=cluster.name):
                raise Misconfigured(
                    f"shard {name!r}: its DSN leads to a database without a catalog ({database.address}), and this "
                    "shard has the catalog; correct the dsn"
                )
            admitted = await identity.admit(database, self._catalog.database, cluster=cluster.name)
            # Read the catalog again before slots are granted. With an old copy, this router could grant slots that have
            # left the shard since the copy was read, and a new database would not refuse these slots.
            await self._catalog.look()
            # Tell the database which orgs are pinned to this shard, because an empty database that replaces a lost one
            # does not know these orgs.
            if not await pins.adopt(database, await pins.read_on(self._catalog.database, name)):
                raise ShardUnavailable(name, "its queues are being changed")
            self._identities[name] = admitted
        if (ahead := await catalog.newest_epoch(database)) > self._catalog.current.epoch:
            _log.error(
                "shard %r knows of epoch %d, and the catalog of %d only: was the catalog restored from a backup? See "
                'docs/operations.md, "A shard was restored from an old backup"',
                *(name, ahead, self._catalog.current.epoch),
            )
        await catalog.grant_slots(database, self._catalog.current)

    def _marked(self, marks: Mapping[ShardName, Mark]) -> None:
        """Takes over the marks that the catalog has confirmed."""
        for name, mark in marks.items():
            # A mark that is only a few numbers lower is no problem, because this read of the catalog may have begun
            # before this router last confirmed a mark.
            if name in self._marks and self._marks[name].number - mark.number > _MARKS_LESS_MAX:
                _log.error(
                    "the catalog knows mark %d of shard %r, and knew %d: was it restored from a backup? See "
                    'docs/operations.md, "A shard was restored from an old backup"',
                    *(mark.number, name, self._marks[name].number),
                )
        self._marks = marks
        for name, member in self._members.items():
            member.must_have(marks.get(name))

    async def _confirm(self, name: ShardName, made: Made) -> bool:
        """Records a mark in the catalog. Returns whether the mark was recorded."""
        if not await marks.confirm(self._catalog.database, name, made):
            return False
        self._marked({**self._marks, name: Mark(made.number, made.token)})
        return True

    async def _proved(self, member: ShardHandle) -> None:
        # If the catalog is in this shard's database, use the DSN and the identity that were just verified for the
        # catalog too.
        if self._cluster.catalog_shard == member.name:
            self._catalog.database.identity = self._identities[member.name]
            await self._catalog.reconnect(member.dsn)
        self._wake_readers_of({member.name})
