"""The archiver as a process: passes over all shards, each at the times that the schedule names. What a pass does is
archiver/passing.py's."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Mapping
from datetime import UTC, datetime

from archiver import telling
from archiver.passing import AnotherArchives, Pass, pass_over
from archiver.settings import settings_of
from archiver.telling import Listener
from shard import identity, policies
from shard.cluster import Cluster, ShardEntry
from shard.database import Database
from shard.errors import ShardError
from shard.following import FollowedFile, next_usable
from shard.vocabulary import CATALOG, ShardName

_log = logging.getLogger(__name__)


async def archive(file: FollowedFile, cluster: Cluster, *, stop: asyncio.Event, heard: Listener = telling.log) -> None:
    """Passes, until `stop` is set. `cluster` is what the file said; a change is taken up when it is noticed, unless it
    cannot be used: then the one before stays in force. `heard` hears of each pass."""
    # Our clock decides when to look. What is due then, the shard's does (I8).
    last = datetime.now(UTC)
    following, stopped = (
        asyncio.create_task(next_usable(file, cluster, judge=settings_of)),
        asyncio.create_task(stop.wait()),
    )
    try:
        while not stop.is_set():
            wait_s = (settings_of(cluster).schedule.after(last) - datetime.now(UTC)).total_seconds()
            await asyncio.wait({following, stopped}, timeout=max(0.0, wait_s), return_when=asyncio.FIRST_COMPLETED)
            if following.done():
                cluster = following.result()
                following = asyncio.create_task(next_usable(file, cluster, judge=settings_of))
            elif not stop.is_set():
                last = datetime.now(UTC)
                for shard, outcome in (await archive_once(cluster, stop=stop)).items():
                    heard(shard, outcome)
    finally:
        for task in (following, stopped):
            task.cancel()
        await asyncio.wait({following, stopped})


async def archive_once(cluster: Cluster, *, stop: asyncio.Event) -> Mapping[ShardName, Pass | Exception]:
    """One pass over each shard that may be changed, all at the same time; answers what came of each: AnotherArchives,
    ShardError, or what was not expected. Raises ClusterFileError."""
    settings = settings_of(cluster)
    entries = [entry for entry in cluster.shards if entry.state.takes_changes]

    async def one(entry: ShardEntry, catalog: Database) -> Pass | Exception:
        try:
            async with opened(entry.name, entry.dsn) as database:
                # It has partitions for the days ahead then, too.
                await identity.admit(database, catalog, cluster=cluster.name)
                await policies.copy(catalog, database)
                return await pass_over(
                    entry, database, settings, cluster=cluster.name, digest=cluster.digest, stop=stop
                )
        except (AnotherArchives, ShardError) as error:
            return error
        except Exception as error:  # noqa: BLE001 - one shard's trouble must not end the others' passes
            _log.exception("shard %r has met with an unexpected error", entry.name)
            return error

    async with opened(CATALOG, cluster.catalog_dsn) as catalog:
        outcomes = await asyncio.gather(*(one(entry, catalog) for entry in entries))
    return {entry.name: outcome for entry, outcome in zip(entries, outcomes, strict=True)}


@contextlib.asynccontextmanager
async def opened(name: ShardName, dsn: str) -> AsyncGenerator[Database]:
    """One database, for one who counts and looks through it."""
    database = Database(name, dsn, connections=1, for_books=True)
    await database.open()
    try:
        yield database
    finally:
        await database.close()
