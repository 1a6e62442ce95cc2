"""What is done with one org's history on all shards of a cluster at once: a policy is spread, applied to the past, or
all of it is erased."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from archiver.errors import NotInstalled
from archiver.passing import AnotherArchives
from archiver.service import opened
from archiver.settings import settings_of
from shard import catalog as catalogs
from shard import erasing, identity, keeping, policies
from shard.cluster import Cluster, ShardEntry
from shard.database import Database
from shard.erasing import Erasure
from shard.errors import OrgMoves, ShardError, ShardUnavailable
from shard.leading import ARCHIVER, candidacy
from shard.policies import Policy
from shard.vocabulary import CATALOG, OrgId, ShardName

if TYPE_CHECKING:
    from archiver.exporting import Erased
    from archiver.files import Files

# For a pass, which ends within a minute or two, to let others at the shard.
_OFFICE_S_MAX = 300.0
_OFFICE_PAUSE_S = 0.5
_BEGIN_TRIES = 20
_BEGIN_PAUSE_S = 0.25


async def change(
    cluster: Cluster, decide: Callable[[Database], Awaitable[Policy]]
) -> tuple[Policy, Mapping[ShardName, ShardError]]:
    """Has an org be told otherwise: `decide` changes the catalog. Answers what the org is told now, and on which shards
    that is not known yet, and why: there it will be before an archiver does anything. Raises ShardError where nothing
    was changed."""
    async with opened(CATALOG, cluster.catalog_dsn) as catalog:
        await catalogs.find(catalog, cluster=cluster.name, shards=[entry.name for entry in cluster.shards])
        policy = await decide(catalog)

        async def copy(entry: ShardEntry) -> ShardError | None:
            if not entry.state.takes_changes:
                return ShardUnavailable(entry.name, f"the cluster file says that it is {entry.state.word}")
            try:
                async with opened(entry.name, entry.dsn) as shard:
                    await policies.copy(catalog, shard)
            except ShardError as error:
                return error
            return None

        errors = await asyncio.gather(*map(copy, cluster.shards))
    behind = zip(cluster.shards, errors, strict=True)
    return policy, {entry.name: error for entry, error in behind if error is not None}


async def read(cluster: Cluster) -> list[Policy]:
    """What all orgs are told that are told anything, by org."""
    async with opened(CATALOG, cluster.catalog_dsn) as catalog:
        await catalogs.find(catalog, cluster=cluster.name, shards=[entry.name for entry in cluster.shards])
        return await policies.read(catalog)


async def apply_to_past(cluster: Cluster, org: OrgId, *, say: Callable[[str], None]) -> int:
    """Has all that the org has finished be kept as its queues say now. Answers for how many jobs that was a change.
    `say` hears of each shard. Raises AnotherArchives, ShardError; done again, it goes on."""
    jobs = 0
    async with _every(cluster) as (catalog, shards):
        placement = (await catalogs.read(catalog)).placement(org)
        kept = await keeping.read(shards[placement.writes[-1]], org)
        for name, database in shards.items():
            async with _alone(cluster, name):
                some = await keeping.apply(database, org, kept)
            say(f"shard {name}: {some:,} job(s) are kept for another time now")
            jobs += some
    return jobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """What was erased of an org."""

    org: OrgId
    # Of this erasure, and of earlier ones that had not come to their end.
    shards: Mapping[ShardName, list[Erasure]]
    # Files of exports that are gone; what others had in them is in new ones.
    files: list[Erased]


async def erase(cluster: Cluster, org: OrgId, *, say: Callable[[str], None]) -> Receipt:
    """Erases all that the cluster's databases have of an org, and what the archiver has exported of it. `say` hears how
    it goes. Raises LegallyHeld, OrgMoves, AnotherArchives, ShardError, ExportFailed; done again, it goes on."""
    erasure = str(uuid.uuid4())
    # Before anything is erased: a place that cannot be reached is not to be found out in the end.
    exports = await _exports(cluster)
    receipts: dict[ShardName, list[Erasure]] = {}
    files: list[Erased] = []
    async with _every(cluster) as (catalog, shards):
        # Whatever is told of the org is told no more, and so the shards' copies are made of a catalog without it.
        await policies.forget(catalog, org)
        # No copy that is under way, of the catalog as it was, is newer than what the shards have then.
        for database in shards.values():
            await policies.copy(catalog, database)
        if await _begin(catalog, shards, org, erasure):
            say(f"org {org} is no more; what it had is being erased ({erasure})")
        for name, database in shards.items():
            async with _alone(cluster, name):
                found = await erasing.unfinished(database)
                for one in found:
                    while await erasing.go_on(database, one):
                        pass
                if exports is not None:
                    # After the tables: what is not there is not exported any more.
                    files += await exports.erase(name, org)
            receipts[name] = await erasing.read(database, [*{erasure, *(one.id for one in found)}])
            say(f"shard {name}: nothing is left")
        if exports is not None:
            for name in await exports.shards() - shards.keys():
                files += await exports.erase(name, org)
    return Receipt(org=org, shards=receipts, files=files)


class _Exports:
    """What the archiver has exported. Raises ExportFailed."""

    def __init__(self, files: Files) -> None:
        self._files = files

    async def shards(self) -> set[ShardName]:
        from archiver import exporting

        return await asyncio.to_thread(exporting.shards_in, self._files)

    async def erase(self, shard: ShardName, org: OrgId) -> list[Erased]:
        from archiver import exporting

        return await exporting.erase_org(self._files, shard, org)


async def _exports(cluster: Cluster) -> _Exports | None:
    """None: there are none."""
    place = settings_of(cluster).export
    if place is None:
        return None
    try:
        # Large, and needed by few.
        from archiver import exporting
    except ModuleNotFoundError as error:
        raise NotInstalled(error.name) from error
    return _Exports(await exporting.open_files(place))


async def _begin(catalog: Database, shards: Mapping[ShardName, Database], org: OrgId, erasure: str) -> bool:
    """Whether the org was somewhere. Until it is nowhere, or comes again and again: that is its producers' doing, and
    another org. In the order in which jobs travel: from a shard where it is no more, none depart."""
    there = False
    for tries_left in reversed(range(_BEGIN_TRIES)):
        reads = (await catalogs.read(catalog)).placement(org).reads
        try:
            if not await _begin_on_all(shards, reads, org, erasure):
                break
            there = True
        except OrgMoves:
            if not tries_left:
                raise
            await asyncio.sleep(_BEGIN_PAUSE_S)
    return there


async def _begin_on_all(
    shards: Mapping[ShardName, Database], reads: Sequence[ShardName], org: OrgId, erasure: str
) -> bool:
    """Whether it was somewhere."""
    if len(reads) > 1:
        raise OrgMoves(org, reads)
    order = (*reads, *(name for name in shards if name not in reads))
    return any([await _begin_on(shards[name], org, erasure) for name in order])


async def _begin_on(database: Database, org: OrgId, erasure: str) -> bool:
    for tries_left in reversed(range(_BEGIN_TRIES)):
        try:
            return await erasing.begin(database, org, erasure=erasure)
        except ShardUnavailable:
            # An enqueue under way, most likely.
            if not tries_left:
                raise
            await asyncio.sleep(_BEGIN_PAUSE_S)
    raise AssertionError


@contextlib.asynccontextmanager
async def _every(cluster: Cluster) -> AsyncGenerator[tuple[Database, dict[ShardName, Database]]]:
    """The catalog and all shards, each proved to be what the file says. Raises ShardError if one will not do: an org's
    history may lie on any."""
    async with AsyncExitStack() as stack:
        catalog = await stack.enter_async_context(opened(CATALOG, cluster.catalog_dsn))
        await catalogs.find(catalog, cluster=cluster.name, shards=[entry.name for entry in cluster.shards])
        shards: dict[ShardName, Database] = {}
        for entry in cluster.shards:
            if not entry.state.takes_changes:
                raise ShardUnavailable(entry.name, f"the cluster file says that it is {entry.state.word}")
            database = await stack.enter_async_context(opened(entry.name, entry.dsn))
            await identity.admit(database, catalog, cluster=cluster.name)
            await policies.copy(catalog, database)
            shards[entry.name] = database
        yield catalog, shards


@contextlib.asynccontextmanager
async def _alone(cluster: Cluster, name: ShardName) -> AsyncGenerator[None]:
    """Without an archiver that passes over the shard meanwhile. Raises AnotherArchives if one does not end."""
    entry = next(entry for entry in cluster.shards if entry.name == name)
    async with candidacy(entry.dsn, cluster.digest, office=ARCHIVER, shard=name) as candidate:
        give_up_s = asyncio.get_running_loop().time() + _OFFICE_S_MAX
        while not await candidate.lead():
            if asyncio.get_running_loop().time() > give_up_s:
                who = await candidate.leader() or "it has just ended"
                raise AnotherArchives(f"shard {name!r}: an archiver is at work: {who}")
            await asyncio.sleep(_OFFICE_PAUSE_S)
        yield
