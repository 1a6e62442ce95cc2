"""Changes how the shards of a cluster keep the history of one org: copies a changed policy to all shards, applies
retentions to jobs that have already finished, and erases the org."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from archiver.errors import NotInstalled
from archiver.run import AnotherArchives
from archiver.service import opened
from archiver.settings import settings_of
from shard.admin import limits, weights
from shard.errors import OrgMoves, ShardError, ShardUnavailable
from shard.history import erasure, org_policies, retention_change
from shard.history.erasure import Erasure
from shard.history.org_policies import Policy
from shard.placement import catalog as catalogs
from shard.placement import identity
from shard.placement.cluster_file import Cluster, ShardEntry
from shard.postgres import partitions
from shard.postgres.leader_lock import ARCHIVER, LeaderSession, leader_session
from shard.postgres.pool import Database
from shard.vocabulary import CATALOG, OrgId, ShardName

if TYPE_CHECKING:
    from archiver.export import Erased
    from archiver.object_store import Files

# How long to wait until an archiver's pass over the shard has ended. A pass usually takes less than two minutes.
_LEAD_S_MAX = 300.0
_LEAD_PAUSE_S = 0.5
_BEGIN_TRIES = 20
_BEGIN_PAUSE_S = 0.25


class Changed(NamedTuple):
    """A changed policy."""

    policy: Policy
    # The shards that do not have the change yet, and why. Before an archiver works on such a shard, it copies the
    # change there.
    behind: Mapping[ShardName, ShardError]
    # False if all shards were asked and none has a queue of the org: perhaps its name is mistyped.
    may_have_queues: bool


async def keep(cluster: Cluster, org: OrgId, *, days: int | None) -> Changed:
    """Sets the retention of an org's finished jobs. If `days` is None, the default applies again. Returns what `change`
    returns. If a shard has no room for another retention, changes nothing and raises TooManyRetentions."""

    async def admit(entry: ShardEntry, retention: int) -> None:
        # Ignore a shard that is away: it gets the policy later, and may then have one retention more than allowed.
        with contextlib.suppress(ShardUnavailable):
            async with opened(entry.name, entry.dsn) as shard:
                await partitions.refuse_another(shard, retention)

    if days is not None:
        await asyncio.gather(*(admit(entry, days) for entry in cluster.shards if entry.state.takes_changes))
    return await change(cluster, lambda catalog: org_policies.set_retention(catalog, org, days=days))


async def change(cluster: Cluster, decide: Callable[[Database], Awaitable[Policy]]) -> Changed:
    """Changes an org's policy. `decide` makes the change in the catalog; this function copies it to the shards. Raises
    ShardError if nothing was changed."""
    with_queues: list[ShardName] = []
    async with opened(CATALOG, cluster.catalog_dsn) as catalog:
        await catalogs.find(catalog, cluster=cluster.name, shards=[entry.name for entry in cluster.shards])

        async def copy(entry: ShardEntry, org: OrgId | None = None) -> ShardError | None:
            if not entry.state.takes_changes:
                return ShardUnavailable(entry.name, f"the cluster file says that it is {entry.state.word}")
            try:
                async with opened(entry.name, entry.dsn) as shard:
                    await org_policies.copy(catalog, shard)
                    if org is not None and await org_policies.has_queues(shard, org):
                        with_queues.append(entry.name)
            except ShardError as error:
                return error
            return None

        # If the catalog was restored from a backup, the shards have newer policies than the catalog. This call copies
        # the newer policies back to the catalog. Then the version that `decide` makes is newer than all of these.
        await asyncio.gather(*map(copy, cluster.shards))
        policy = await decide(catalog)
        errors = await asyncio.gather(*(copy(entry, policy.org) for entry in cluster.shards))
    behind = {entry.name: error for entry, error in zip(cluster.shards, errors, strict=True) if error is not None}
    return Changed(policy, behind, may_have_queues=bool(with_queues or behind))


async def read(cluster: Cluster) -> list[Policy]:
    """Returns the policies of all orgs that have one, in the order of the orgs."""
    async with opened(CATALOG, cluster.catalog_dsn) as catalog:
        await catalogs.find(catalog, cluster=cluster.name, shards=[entry.name for entry in cluster.shards])
        return await org_policies.read(catalog)


async def apply_to_past(cluster: Cluster, org: OrgId, *, say: Callable[[str], None]) -> int:
    """Applies the present retention of each of the org's queues to the finished jobs of the queue. Returns how many
    jobs had another retention before. `say` is called with a text for each shard. Raises AnotherArchives, ShardError.
    If the call is interrupted, repeat it.
    """
    jobs = 0
    async with _every(cluster) as (catalog, shards):
        placement = (await catalogs.read(catalog)).placement(org)
        retentions = await retention_change.read(shards[placement.writes[-1]], org)
        for name, database in shards.items():
            async with _without_archiver(cluster, name):
                changed = await retention_change.apply(database, org, retentions)
            say(f"shard {name}: {changed:,} job(s) got another retention")
            jobs += changed
    return jobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """What was erased of an org."""

    org: OrgId
    # For each shard: the erasure of this org, and every other erasure that had not ended on all shards when this run
    # began.
    shards: Mapping[ShardName, list[Erasure]]
    # Export files that were deleted. Their jobs of other orgs were copied to new files.
    files: list[Erased]


async def erase(cluster: Cluster, org: OrgId, *, say: Callable[[str], None], erasure_id: str | None = None) -> Receipt:
    """Erases everything that the cluster's databases store about an org, and the org's jobs in the archiver's exports.
    Also ends the interrupted erasures of other orgs, but only in the databases: no shard knows the names of these orgs
    any more, so their jobs in the exports stay. `say` is called with texts about the progress. Raises LegallyHeld,
    OrgMoves, AnotherArchives, ShardError, ExportFailed. If the call is interrupted, repeat it. `erasure_id`: a UUID;
    default: a new one. If an earlier call had the same `erasure_id`, the receipt also has what the shards erased in
    that call."""
    erasure_id = erasure_id or str(uuid.uuid4())
    # Open the exports before anything is erased, so that an unreachable location is noticed now, and not at the end.
    exports = await _exports(cluster)
    erasure_ids = {erasure_id}
    files: list[Erased] = []
    async with _every(cluster) as (catalog, shards):
        # An erasure that is refused must change nothing. So check that the org is not moving before its settings are
        # deleted.
        await _home(catalog, org)
        # Delete the policy from the catalog first: then it is not copied to the shards again.
        await org_policies.delete(catalog, org)
        await limits.forget_org(catalog, org)
        await weights.set_weight(catalog, org, weights.WEIGHT_DEFAULT)
        # Copy now, so that the shards have the newest version of the policies. Then they refuse an older version that
        # another process may still be copying.
        for database in shards.values():
            await org_policies.copy(catalog, database)
        if await _begin(catalog, shards, org, erasure_id):
            say(f"org {org} does not exist any more; its data is being erased ({erasure_id})")
        for name, database in shards.items():
            async with _without_archiver(cluster, name) as session:
                for unfinished in await erasure.unfinished(database):
                    erasure_ids.add(unfinished.id)
                    while await erasure.go_on(database, unfinished):
                        pass
                if exports is not None:
                    # Erasing the tables may have taken hours. Check that this session still holds the leader lock, so
                    # that no archiver exports now.
                    await session.lead()
                    # Erase the exports after the tables, so that the org's jobs are not exported again.
                    files += await exports.erase(name, org)
            say(f"shard {name}: nothing is left")
        if exports is not None:
            for name in await exports.shards() - shards.keys():
                files += await exports.erase(name, org)
        # Read every erasure on all shards, because an interrupted erasure may have ended on some shards before this
        # run.
        read = {name: await erasure.read(database, [*erasure_ids]) for name, database in shards.items()}
    return Receipt(org=org, shards=read, files=files)


class _Exports:
    """Searches and changes the archiver's exports. Methods raise ExportFailed."""

    def __init__(self, files: Files) -> None:
        self._files = files

    async def shards(self) -> set[ShardName]:
        from archiver.export import shards_in

        return await asyncio.to_thread(shards_in, self._files)

    async def erase(self, shard: ShardName, org: OrgId) -> list[Erased]:
        from archiver.export import erase_org

        return await erase_org(self._files, shard, org)


async def _exports(cluster: Cluster) -> _Exports | None:
    """Returns None if the cluster exports nothing."""
    location = settings_of(cluster).export
    if location is None:
        return None
    try:
        # Import this only when it is needed, because the library is large.
        from archiver.export import open_files
    except ModuleNotFoundError as error:
        raise NotInstalled(error.name) from error
    # Do not make a directory that does not exist. The exports are probably on another machine, and an empty directory
    # on this machine would wrongly show that the org has no exports.
    return _Exports(await open_files(location, make=False))


async def _home(catalog: Database, org: OrgId) -> ShardName:
    """Waits until the org lives on one shard only, and returns that shard. After a short time, raises OrgMoves."""
    for tries_left in reversed(range(_BEGIN_TRIES)):
        reads = (await catalogs.read(catalog)).placement(org).reads
        if len(reads) == 1:
            return reads[0]
        if not tries_left:
            raise OrgMoves(org, reads)
        await asyncio.sleep(_BEGIN_PAUSE_S)
    raise AssertionError("unreachable")


async def _begin(catalog: Database, shards: Mapping[ShardName, Database], org: OrgId, erasure_id: str) -> bool:
    """Begins the erasure on all shards, and repeats this until no shard has the org. Stops after some tries, because
    producers may create a new org of this name again and again. Returns whether any shard had the org. Raises
    OrgMoves."""
    found = False
    for tries_left in reversed(range(_BEGIN_TRIES)):
        # Begin with the shard where the org lives, and go through the shards one after another. Once the org is gone
        # from the shard where it lives, no move takes jobs of the org to other shards.
        home = await _home(catalog, org)
        order = (home, *(name for name in shards if name != home))
        try:
            if not any([await _begin_on(shards[name], org, erasure_id) for name in order]):
                break
            found = True
        except OrgMoves:
            if not tries_left:
                raise
            await asyncio.sleep(_BEGIN_PAUSE_S)
    return found


async def _begin_on(database: Database, org: OrgId, erasure_id: str) -> bool:
    for tries_left in reversed(range(_BEGIN_TRIES)):
        try:
            return await erasure.begin(database, org, erasure=erasure_id)
        except ShardUnavailable:
            # The cause is probably a running enqueue that held a lock.
            if not tries_left:
                raise
            await asyncio.sleep(_BEGIN_PAUSE_S)
    raise AssertionError


@contextlib.asynccontextmanager
async def _every(cluster: Cluster) -> AsyncGenerator[tuple[Database, dict[ShardName, Database]]]:
    """Opens the catalog and all shards, and checks that each is the database that the cluster file names. Raises
    ShardError if one of them cannot be used, because an org's history may be on any shard."""
    async with AsyncExitStack() as stack:
        catalog = await stack.enter_async_context(opened(CATALOG, cluster.catalog_dsn))
        await catalogs.find(catalog, cluster=cluster.name, shards=[entry.name for entry in cluster.shards])
        shards: dict[ShardName, Database] = {}
        for entry in cluster.shards:
            if not entry.state.takes_changes:
                raise ShardUnavailable(entry.name, f"the cluster file says that it is {entry.state.word}")
            database = await stack.enter_async_context(opened(entry.name, entry.dsn))
            await identity.admit(database, catalog, cluster=cluster.name)
            await org_policies.copy(catalog, database)
            shards[entry.name] = database
        yield catalog, shards


@contextlib.asynccontextmanager
async def _without_archiver(cluster: Cluster, name: ShardName) -> AsyncGenerator[LeaderSession]:
    """Prevents archivers from working on the shard while the block runs, unless the session is lost. Raises
    AnotherArchives if a pass does not end in time."""
    entry = next(entry for entry in cluster.shards if entry.name == name)
    async with leader_session(entry.dsn, cluster.digest, role=ARCHIVER, shard=name) as session:
        give_up_s = asyncio.get_running_loop().time() + _LEAD_S_MAX
        while not await session.lead():
            if asyncio.get_running_loop().time() > give_up_s:
                who = await session.leader() or "it has just ended"
                raise AnotherArchives(f"shard {name!r}: an archiver is at work: {who}")
            await asyncio.sleep(_LEAD_PAUSE_S)
        yield session
