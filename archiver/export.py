"""Exports cold days before they are dropped. Checks exported files, and erases orgs from them
(docs/decisions/0025-cold-days-are-exported.md).

A day is exported in two steps, and each step is done completely or not at all. First, a file with a new name is
written, read back, and compared with the table row by row. Then the day's manifest is replaced by one that names this
file. Files that no manifest names are not part of the export.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from typing import NamedTuple

from archiver import parquet
from archiver.errors import Damaged, ExportFailed, FilesFailed, NoSuchFile
from archiver.export_location import ExportLocation
from archiver.object_store import FileInfo, Files
from archiver.parquet import MANIFEST, Batch, Manifest, Reader, Writer, Written
from shard.errors import ShardUnavailable
from shard.history import export_reader
from shard.history.days import Day
from shard.history.export_reader import ColdJob, OrgDay
from shard.postgres.pool import Database
from shard.vocabulary import OrgId, ShardName

# How many jobs one batch has when the jobs of a file and of the table are merged.
_MERGED_ROWS = 5_000

Source = Callable[[], AsyncIterator[Batch]]
# The type of LeaderSession.lead (shard/postgres/leader_lock.py).
Lead = Callable[[], Awaitable[bool]]


class Stopped(Exception):
    """The process was asked to stop. Nothing is lost: the next pass exports the day from the start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """A day whose export has at least the rows of the table."""

    partition: str
    file: str
    bytes: int
    rows_by_org: Mapping[OrgId, int]
    # How many jobs of each org the table had when it was exported. The file may have more.
    in_table: Mapping[OrgId, int]
    # False: an earlier pass wrote the file, and this pass checked it.
    written: bool
    seconds: float

    @property
    def jobs(self) -> int:
        return sum(self.rows_by_org.values())


class Checked(NamedTuple):
    """The result of checking one exported file or one manifest."""

    file: str
    # None: the manifest cannot be read.
    manifest: Manifest | None
    # Empty if nothing is wrong.
    trouble: str


class Erased(NamedTuple):
    """How many rows an org had in the exported file `file`. This file was deleted. If it also had jobs of other orgs,
    these were copied to a new file."""

    file: str
    rows: int


async def open_files(location: ExportLocation, *, make: bool) -> Files:
    """Opens a location for writing. With `make`, its directory is created if it does not exist. Raises ExportFailed."""
    return await asyncio.to_thread(Files, location, make=make)


async def export_day(
    files: Files, database: Database, day: Day, *, cluster: str, lead: Lead, stop: asyncio.Event
) -> Exported:
    """Makes sure that a cold day is exported, and that the exported file was read back during this call. `lead` raises
    ShardUnavailable if another archiver may lead. Raises ExportFailed, Stopped, ShardUnavailable."""
    began_s = time.monotonic()
    try:
        manifest, in_table, written = await _exported(files, database, day, cluster=cluster, lead=lead, stop=stop)
    except parquet.pa.ArrowException as error:
        raise ExportFailed(f"{day.name}: {' '.join(str(error).split())}") from error  # pyrefly: ignore[unknown-argument-type]
    return Exported(
        partition=day.name,
        file=files.name(manifest.path),
        bytes=manifest.bytes,
        rows_by_org=manifest.rows_by_org,
        in_table=in_table,
        written=written,
        seconds=time.monotonic() - began_s,
    )


async def _exported(
    files: Files, database: Database, day: Day, *, cluster: str, lead: Lead, stop: asyncio.Event
) -> tuple[Manifest, Mapping[OrgId, int], bool]:
    folder = parquet.folder_of(database.name, day.retention, day.first)
    # The files of earlier exports. This export deletes no other files: a file that appears later was written by another
    # archiver.
    earlier = await asyncio.to_thread(_data_files, files, folder)
    orgs = await export_reader.count(database, day)
    counts = {org.org: org.jobs for org in orgs}
    try:
        existing = await asyncio.to_thread(_manifest, files, folder)
    except Damaged as error:
        raise Damaged(f"{error}; {_repair(files, folder)}") from error

    def source() -> AsyncIterator[Batch]:
        return _table(database, day, orgs, stop)

    trouble = ""
    if existing is not None:
        if existing.cluster != cluster:
            raise Damaged(
                f"{files.name(folder)} was exported by cluster {existing.cluster!r}, and this is {cluster!r}: each "
                "cluster needs an export location of its own"
            )
        is_like = existing.rows_by_org == counts and (existing.min_id, existing.max_id) == await export_reader.ends(
            database, day
        )
        try:
            await asyncio.to_thread(parquet.check, files, existing)
        except Damaged as error:
            if not is_like:
                raise Damaged(f"{error}; {_repair(files, folder)}") from error
            trouble = f"{error}; it was written again, and the next pass drops the day"
        else:
            # Compare the rows too. If the day was dropped before, and jobs were added to it twice after that, the file
            # and the table may have equally many rows, with the same first and last id, that are not the same rows.
            if is_like and await _is_equal(files, existing.path, source):
                await asyncio.to_thread(_delete, files, earlier - {existing.path})
                return existing, counts, False

            # The file and the table have different rows. There are two possible causes. If the clock was set back, jobs
            # may have been added to a day that was already exported or dropped. Or an org was erased from the table,
            # but not yet from the file. Exported jobs must stay exported, so merge the rows of the file with the rows
            # of the table.
            def source() -> AsyncIterator[Batch]:
                return _merged(_table(database, day, orgs, stop), files, existing)

    path = f"{folder}/jobs-{secrets.token_hex(4)}.parquet"
    await asyncio.to_thread(files.tidy, folder)
    written = await _write(files, path, source)
    manifest = Manifest(
        cluster=cluster,
        shard=database.name,
        retention=day.retention,
        day=day.first,
        file=path.rpartition("/")[2],
        written_at=_now(),
        windrow=version("windrow-server"),
        **written._asdict(),
    )
    if any(manifest.rows_by_org.get(org, 0) < jobs for org, jobs in counts.items()):
        await asyncio.to_thread(files.delete, path)
        raise ExportFailed(f"{day.name} changed while it was exported; the next pass exports it again")
    try:
        # Writing the file may have taken hours. If another archiver leads now, it may have exported and dropped the
        # day. Then its manifest must stay, because this manifest names the only copy of the day's jobs.
        await lead()
    except ShardUnavailable:
        await asyncio.to_thread(files.delete, path)
        raise
    await asyncio.to_thread(parquet.write_manifest, files, manifest)
    await asyncio.to_thread(_delete, files, earlier)
    if trouble:
        raise Damaged(trouble)
    return manifest, counts, True


async def still_there(files: Files, exported: Exported, day: Day, shard: ShardName) -> None:
    """Checks that the day's manifest still names this export. Raises ExportFailed."""
    folder = parquet.folder_of(shard, day.retention, day.first)
    manifest = await asyncio.to_thread(_manifest, files, folder)
    if manifest is None or files.name(manifest.path) != exported.file:
        raise ExportFailed(f"{files.name(folder)} was changed by another process meanwhile")
    if await asyncio.to_thread(files.size, manifest.path) != manifest.bytes:
        raise Damaged(f"{exported.file} was changed by another process meanwhile")


def check_all(files: Files, *, shard: ShardName | None = None) -> Iterator[Checked]:
    """Reads all exported files (of one shard, or of all) and yields a result for each file, even for files that no
    manifest names. Raises FilesFailed if the location does not answer."""
    for folder, found in _folders(files, shard).items():
        manifest: Manifest | None = None
        try:
            manifest = _manifest(files, folder)
            if manifest is not None:
                parquet.check(files, manifest)
                yield Checked(files.name(manifest.path), manifest, "")
        except Damaged as error:
            name = f"{folder}/{MANIFEST}" if manifest is None else manifest.path
            yield Checked(files.name(name), manifest, str(error))
            if manifest is None:
                continue
        for other in found:
            if other.path.endswith(".parquet") and (manifest is None or other.path != manifest.path):
                name = files.name(other.path)
                yield Checked(name, None, f"{name} is named by no manifest: delete it, unless an archiver is at work")


async def erase_org(files: Files, shard: ShardName, org: OrgId) -> list[Erased]:
    """Replaces each exported file of a shard that has jobs of the org by a new file without these jobs. Returns an
    Erased for each replaced file. The caller must have deleted the org's rows from the tables before, and must hold the
    archiver's leader lock on the shard (shard/postgres/leader_lock.py). After a crash, call this function again. A file
    that cannot be read stays, and the error names it. Raises ExportFailed."""
    erased: list[Erased] = []
    damaged: list[str] = []
    for folder, found in (await asyncio.to_thread(_folders, files, shard)).items():
        try:
            erased += await _erase(files, folder, found, org)
        except Damaged as error:
            damaged.append(str(error))
    if damaged:
        raise Damaged(
            f"org {org!r} may still have jobs in what is damaged: {'; '.join(damaged)}; restore each file from a copy, "
            "or delete it and the manifest beside it, and repeat the command"
        )
    return erased


async def _erase(files: Files, folder: str, found: list[FileInfo], org: OrgId) -> list[Erased]:
    manifest = await asyncio.to_thread(_manifest, files, folder)
    erased: list[Erased] = []
    if manifest is not None and org in manifest.rows_by_org:
        await asyncio.to_thread(parquet.check, files, manifest)
        erased.append(Erased(files.name(manifest.path), manifest.rows_by_org[org]))
        remaining = {other: rows for other, rows in manifest.rows_by_org.items() if other != org}
        if remaining:
            manifest = await _rewrite(files, manifest, org, remaining)
        else:
            await asyncio.to_thread(files.delete, f"{folder}/{MANIFEST}")
            await asyncio.to_thread(files.delete, manifest.path)
            return erased
    await asyncio.to_thread(files.tidy, folder)
    # An interrupted erasure or export may have left other files. If the day has a manifest, delete all these files. If
    # not, delete only those that have jobs of the org.
    for other in found:
        if not other.path.endswith(".parquet") or (manifest is not None and other.path == manifest.path):
            continue
        if manifest is not None or await asyncio.to_thread(_holds, files, other.path, org):
            await asyncio.to_thread(files.delete, other.path)
    return erased


async def _rewrite(files: Files, manifest: Manifest, org: OrgId, remaining: Mapping[OrgId, int]) -> Manifest:
    async def source() -> AsyncGenerator[Batch]:
        async for batch in _stored(files, manifest.path):
            yield parquet.without(batch, org)

    path = f"{manifest.folder}/jobs-{secrets.token_hex(4)}.parquet"
    written = await _write(files, path, source)
    if written.rows_by_org != remaining:
        await asyncio.to_thread(files.delete, path)
        raise Damaged(f"{files.name(manifest.path)} has other orgs than its manifest")
    new = replace(manifest, file=path.rpartition("/")[2], written_at=_now(), **written._asdict())
    await asyncio.to_thread(parquet.write_manifest, files, new)
    await asyncio.to_thread(files.delete, manifest.path)
    return new


async def _write(files: Files, path: str, source: Source) -> Written:
    """Writes a file, reads it back, and compares it with the source. Raises Damaged."""
    writer = await asyncio.to_thread(lambda: Writer(files.writing(path)))
    try:
        async for batch in source():
            await asyncio.to_thread(writer.add, batch)
        written = await asyncio.to_thread(writer.commit)
    except BaseException:
        writer.give_up()
        raise
    try:
        found = await asyncio.to_thread(files.digest, path)
        if found != (written.bytes, written.sha256):
            raise Damaged(f"{files.name(path)} is not what was written: {found[0]:,} bytes with SHA-256 {found[1]}")
        await _compare(files, path, source)
    except ExportFailed:
        await asyncio.to_thread(files.delete, path)
        raise
    return written


async def _compare(files: Files, path: str, source: Source) -> None:
    """Compares a file with the source row by row. The batches of the file and of the source may have different sizes.
    Raises Damaged."""
    at, theirs = 0, _stored(files, path)
    held: Batch = None
    async for batch in source():
        rest = batch
        while rest.num_rows:
            if held is None or not held.num_rows:
                held = await anext(theirs, None)
                if held is None:
                    raise Damaged(f"{files.name(path)} ends after {at:,} rows, and the day does not")
            rows = min(rest.num_rows, held.num_rows)
            if not rest.slice(0, rows).equals(held.slice(0, rows)):
                raise Damaged(f"{files.name(path)} has another row than the day, among the {rows:,} after {at:,}")
            at, rest, held = at + rows, rest.slice(rows), held.slice(rows)
    while held is not None:
        if held.num_rows:
            raise Damaged(f"{files.name(path)} goes on after {at:,} rows, and the day does not")
        held = await anext(theirs, None)


async def _is_equal(files: Files, path: str, source: Source) -> bool:
    try:
        await _compare(files, path, source)
    except Damaged:
        return False
    return True


async def _table(database: Database, day: Day, orgs: list[OrgDay], stop: asyncio.Event) -> AsyncGenerator[Batch]:
    async with contextlib.aclosing(export_reader.pages(database, day, orgs)) as pages:
        async for page in pages:
            if stop.is_set():
                raise Stopped
            yield await asyncio.to_thread(parquet.batch_of_columns, page)


async def _stored(files: Files, path: str) -> AsyncGenerator[Batch]:
    reader = await asyncio.to_thread(Reader, files, path)
    try:
        batches = reader.batches()
        while (batch := await asyncio.to_thread(next, batches, None)) is not None:
            yield batch
    finally:
        reader.close()


async def _merged(ours: AsyncIterator[Batch], files: Files, existing: Manifest) -> AsyncGenerator[Batch]:
    """Yields the table's jobs, and the jobs that only the file has, ordered by org and id."""
    theirs = _jobs(_stored(files, existing.path))
    held = await anext(theirs, None)
    out: list[ColdJob] = []
    async for job in _jobs(ours):
        while held is not None and _key(held) <= _key(job):
            if _key(held) != _key(job):
                out.append(held)
            held = await anext(theirs, None)
        out.append(job)
        if len(out) >= _MERGED_ROWS:
            yield parquet.batch_of(out)
            out = []
    while held is not None:
        out.append(held)
        held = await anext(theirs, None)
        if len(out) >= _MERGED_ROWS:
            yield parquet.batch_of(out)
            out = []
    if out:
        yield parquet.batch_of(out)


def _key(job: ColdJob) -> tuple[str, str]:
    return job.org, job.id


async def _jobs(batches: AsyncIterator[Batch]) -> AsyncGenerator[ColdJob]:
    async for batch in batches:
        for job in parquet.jobs_of(batch):
            yield job


def _manifest(files: Files, folder: str) -> Manifest | None:
    try:
        return parquet.read_manifest(files, folder)
    except NoSuchFile:
        return None


def _repair(files: Files, folder: str) -> str:
    """Returns a text that says what an operator can do about a damaged export while the table still has the day."""
    return (
        "it may have jobs that the table does not have: restore it from a copy; if there is none, move "
        f"{files.name(folder)} out of the exports, and the next pass exports what the table has"
    )


def _folders(files: Files, shard: ShardName | None) -> dict[str, list[FileInfo]]:
    """Returns the files of each folder that belongs to a day."""
    folders: dict[str, list[FileInfo]] = {}
    for found in files.list("" if shard is None else parquet.shard_folder(shard)):
        if parquet.day_of(found.path) is not None:
            folders.setdefault(found.path.rpartition("/")[0], []).append(found)
    return folders


def shards_in(files: Files) -> set[ShardName]:
    """Returns the shards that have exports, including shards that are no longer in the cluster. Raises ExportFailed."""
    return {parquet.shard_of(folder) for folder in _folders(files, None)}


def _data_files(files: Files, folder: str) -> set[str]:
    return {found.path for found in files.list(folder) if found.path.endswith(".parquet")}


def _delete(files: Files, paths: Iterable[str]) -> None:
    """Deletes files that are not the day's valid export. A file that cannot be deleted stays: `windrow archive verify`
    names it."""
    for path in sorted(paths):
        with contextlib.suppress(FilesFailed):
            files.delete(path)


def _holds(files: Files, path: str, org: OrgId) -> bool:
    with Reader(files, path) as reader:
        return any(reader.jobs_of(org, group, ["org"]) for group in reader.groups_of(org))


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
