"""Runs the archiver as a process: starts passes over all shards at the times that the schedule names. archiver/run.py
runs one pass."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Mapping
from datetime import UTC, datetime

from archiver import reporting
from archiver.errors import ExportFailed
from archiver.reporting import Listener
from archiver.run import AnotherArchives, Pass, check_export, pass_over
from archiver.settings import settings_of
from shard.admin import audit
from shard.errors import ShardError
from shard.history import org_policies
from shard.placement import identity
from shard.placement.cluster_file import Cluster, ShardEntry
from shard.placement.file_watcher import WatchedFile, next_usable
from shard.postgres import clock, schema
from shard.postgres.pool import Database
from shard.vocabulary import CATALOG, ShardName

_log = logging.getLogger(__name__)
_AUDIT_BATCHES_MAX = 1000


async def archive(
    file: WatchedFile, cluster: Cluster, *, stop: asyncio.Event, listener: Listener = reporting.log
) -> None:
    """Runs passes until `stop` is set. `cluster` is the present content of the cluster file. Changes of the file are
    applied as soon as they are noticed. If the new content cannot be used, the previous content stays in use.
    `listener` is called after each pass of a shard. A shard whose pass takes long, for example because its exports are
    slow, does not delay the passes of other shards. If the schedule names a time while a shard's pass still runs, the
    shard's next pass begins right after that pass."""
    # This machine's clock decides when to start a pass. The shard's clock decides what that pass must do (invariant
    # I8).
    last = datetime.now(UTC)
    await _check_export(cluster)
    following, stopped = (
        asyncio.create_task(next_usable(file, cluster, judge=settings_of)),
        asyncio.create_task(stop.wait()),
    )
    loop = asyncio.get_running_loop()
    # The shards whose passes are due, and the passes that run now. `None` stands for the deletion of old entries of the
    # audit log.
    due: set[ShardName | None] = set()
    under_way: dict[ShardName | None, asyncio.Task[None]] = {}
    try:
        while not stop.is_set():
            now = datetime.now(UTC)
            # Use the earlier time, because the machine's clock may have been set back since `last`.
            wait_s = (settings_of(cluster).schedule.after(min(last, now)) - now).total_seconds()
            due_s = loop.time() + max(0.0, wait_s)
            await asyncio.wait(
                {following, stopped, *under_way.values()},
                timeout=max(0.0, wait_s),
                return_when=asyncio.FIRST_COMPLETED,
            )
            for name in [name for name, task in under_way.items() if task.done()]:
                # Raise an unexpected error of the task.
                under_way.pop(name).result()
            if following.done():
                cluster = following.result()
                await _check_export(cluster)
                following = asyncio.create_task(next_usable(file, cluster, judge=settings_of))
                continue
            if stop.is_set():
                break
            if loop.time() >= due_s:
                last = datetime.now(UTC)
                due = {None, *(entry.name for entry in _entries(cluster))}
            for entry in _entries(cluster):
                if entry.name in due - under_way.keys():
                    due.discard(entry.name)
                    under_way[entry.name] = asyncio.create_task(_pass_alone(cluster, entry, stop, listener))
            if None in due - under_way.keys():
                due.discard(None)
                under_way[None] = asyncio.create_task(_forget_audit(cluster, stop))
        # Passes end soon after `stop` is set.
        await asyncio.gather(*under_way.values())
    finally:
        tasks = {following, stopped, *under_way.values()}
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def _check_export(cluster: Cluster) -> None:
    """Logs an error if exports cannot be written. Without this check, nobody would notice the error until the first day
    is exported, perhaps weeks later."""
    location = settings_of(cluster).export
    if location is None:
        return
    try:
        await check_export(location)
    except ExportFailed as error:
        _log.error("no job can be exported, so no day is dropped: %s", error)


async def archive_once(cluster: Cluster, *, stop: asyncio.Event) -> Mapping[ShardName, Pass | Exception]:
    """Runs one pass over each shard that may be changed, all at the same time. Returns the outcome for each shard: a
    Pass, AnotherArchives, a ShardError, or an unexpected exception. Raises ClusterFileError."""
    entries = _entries(cluster)
    outcomes = await asyncio.gather(*(_pass_one(cluster, entry, stop) for entry in entries))
    await _forget_audit(cluster, stop)
    return {entry.name: outcome for entry, outcome in zip(entries, outcomes, strict=True)}


def _entries(cluster: Cluster) -> list[ShardEntry]:
    return [entry for entry in cluster.shards if entry.state.takes_changes]


async def _pass_alone(cluster: Cluster, entry: ShardEntry, stop: asyncio.Event, listener: Listener) -> None:
    listener(entry.name, await _pass_one(cluster, entry, stop))


async def _pass_one(cluster: Cluster, entry: ShardEntry, stop: asyncio.Event) -> Pass | Exception:
    try:
        async with opened(entry.name, entry.dsn) as database:
            # A pass may take hours, and must not keep a connection to the catalog for that time.
            async with opened(CATALOG, cluster.catalog_dsn) as catalog:
                # `admit` also creates the partitions of the days ahead.
                await identity.admit(database, catalog, cluster=cluster.name)
                await org_policies.copy(catalog, database)
            return await pass_over(
                entry, database, settings_of(cluster), cluster=cluster.name, digest=cluster.digest, stop=stop
            )
    except (AnotherArchives, ShardError) as error:
        return error
    except Exception as error:  # noqa: BLE001 - one shard's problem must not end the passes of others
        _log.exception("shard %r: unexpected error", entry.name)
        return error


async def _forget_audit(cluster: Cluster, stop: asyncio.Event) -> None:
    """Deletes old entries of the audit log, in batches. The next call deletes the entries that remain."""
    days = settings_of(cluster).audit_days
    try:
        async with opened(CATALOG, cluster.catalog_dsn) as catalog:
            # The catalog may be in a database of its own, which no pass has migrated.
            await schema.migrate(catalog, cluster=None)
            await clock.check_difference(catalog)
            for _ in range(_AUDIT_BATCHES_MAX):
                if stop.is_set() or not await audit.forget(catalog, days=days):
                    break
    except ShardError as error:
        _log.warning("old entries of the audit log stay: %s", error)
    except Exception:  # noqa: BLE001 - a problem of the audit log must not end the passes of shards
        _log.exception("old entries of the audit log stay: unexpected error")


@contextlib.asynccontextmanager
async def opened(name: ShardName, dsn: str) -> AsyncGenerator[Database]:
    """Opens one database with a single connection, which may run long scans."""
    database = Database(name, dsn, connections=1, may_scan=True)
    await database.open()
    try:
        yield database
    finally:
        await database.close()
