"""Exports cold days before they are dropped, and looks after what has been exported
(docs/decisions/0025-cold-days-are-exported.md).

A day is exported in steps that are each done or not done: a file under a new name is written, read back and compared
with the table row by row, and then the day's manifest is put in place, which names the file. What no manifest names is
nothing.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from typing import NamedTuple

from archiver import parquet
from archiver.errors import Damaged, ExportFailed, NoSuchFile
from archiver.files import Files, Found
from archiver.parquet import MANIFEST, Batch, Manifest, Reader, Writer, Written
from archiver.place import Place
from shard import cold
from shard.archiving import Day
from shard.cold import ColdJob, OrgDay
from shard.database import Database
from shard.vocabulary import OrgId, ShardName

# Of a merge, which goes job by job.
_MERGED_ROWS = 5_000

Source = Callable[[], AsyncIterator[Batch]]


class Stopped(Exception):
    """Somebody wants this process to end. Nothing is lost: the next pass begins the day again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """A day that lies at the place as it does in the table."""

    partition: str
    file: str
    bytes: int
    rows_by_org: Mapping[OrgId, int]
    # False: an earlier pass had written it, and this one has checked it.
    written: bool
    seconds: float

    @property
    def jobs(self) -> int:
        return sum(self.rows_by_org.values())


class Checked(NamedTuple):
    """What a look at one exported file, or at a manifest, has come to."""

    file: str
    # None: the manifest cannot be read.
    manifest: Manifest | None
    # Empty: it is as it was written.
    trouble: str


class Erased(NamedTuple):
    """What an org had in an exported file; `file` is gone, and another has the rest."""

    file: str
    rows: int


async def open_files(place: Place) -> Files:
    """For those who write. Raises ExportFailed."""
    return await asyncio.to_thread(Files, place, make=True)


async def export_day(files: Files, database: Database, day: Day, *, cluster: str, stop: asyncio.Event) -> Exported:
    """Sees to it that a cold day is exported, and has been read back since this was called. Raises ExportFailed,
    Stopped, ShardUnavailable."""
    began_s = time.monotonic()
    try:
        manifest, written = await _exported(files, database, day, cluster=cluster, stop=stop)
    except parquet.pa.ArrowException as error:
        raise ExportFailed(f"{day.name}: {' '.join(str(error).split())}") from error
    return Exported(
        partition=day.name,
        file=files.name(manifest.path),
        bytes=manifest.bytes,
        rows_by_org=manifest.rows_by_org,
        written=written,
        seconds=time.monotonic() - began_s,
    )


async def _exported(
    files: Files, database: Database, day: Day, *, cluster: str, stop: asyncio.Event
) -> tuple[Manifest, bool]:
    folder = parquet.folder_of(database.name, day.retention, day.first)
    orgs = await cold.count(database, day)
    counts = {one.org: one.jobs for one in orgs}
    there = await asyncio.to_thread(_manifest, files, folder)

    def source() -> AsyncIterator[Batch]:
        return _table(database, day, orgs, stop)

    trouble = ""
    if there is not None:
        if there.cluster != cluster:
            raise Damaged(
                f"{files.name(folder)} has been exported by cluster {there.cluster!r}, and this is {cluster!r}: each "
                "needs a place of its own"
            )
        if there.rows_by_org == counts and (there.min_id, there.max_id) == await cold.ends(database, day):
            try:
                await asyncio.to_thread(parquet.check, files, there)
            except Damaged as error:
                trouble = f"{error}; it has been written anew, and the day goes with the next pass"
            else:
                return there, False
        else:
            # A day that had been dropped has jobs again, or one that had not has others: the clock went back. Or an org
            # was erased from the table, and not yet from the file. What was exported once stays exported.
            await asyncio.to_thread(parquet.check, files, there)

            def source() -> AsyncIterator[Batch]:
                return _merged(_table(database, day, orgs, stop), files, there)

    path = f"{folder}/jobs-{secrets.token_hex(4)}.parquet"
    await asyncio.to_thread(files.tidy, folder)
    made = await _write(files, path, source)
    manifest = Manifest(
        cluster=cluster,
        shard=database.name,
        retention=day.retention,
        day=day.first,
        file=path.rpartition("/")[2],
        written_at=_now(),
        windrow=version("windrow-server"),
        **made._asdict(),
    )
    if any(manifest.rows_by_org.get(org, 0) < jobs for org, jobs in counts.items()):
        await asyncio.to_thread(files.delete, path)
        raise ExportFailed(f"{day.name} has changed while it was exported; the next pass exports it again")
    await asyncio.to_thread(parquet.write_manifest, files, manifest)
    await asyncio.to_thread(_sweep, files, folder, manifest.file)
    if trouble:
        raise Damaged(trouble)
    return manifest, True


async def still_there(files: Files, exported: Exported, day: Day, shard: ShardName) -> None:
    """Whether that is still what the day's manifest names. Raises ExportFailed."""
    folder = parquet.folder_of(shard, day.retention, day.first)
    manifest = await asyncio.to_thread(_manifest, files, folder)
    if manifest is None or files.name(manifest.path) != exported.file:
        raise ExportFailed(f"{files.name(folder)} has been changed by somebody else meanwhile")
    if await asyncio.to_thread(files.size, manifest.path) != manifest.bytes:
        raise Damaged(f"{exported.file} has been changed by somebody else meanwhile")


def check_all(files: Files, *, shard: ShardName | None = None) -> Iterator[Checked]:
    """Reads all that has been exported (of one shard, or of all), and says of each file whether it is as it was
    written; also files that no manifest names. Raises FilesFailed where the place does not answer."""
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
    """Writes each exported file of a shard that has jobs of an org anew without them. Answers what went. To be said
    after the org has gone from the tables, by who holds the office of the archiver at the shard (shard.leading), and
    again after a crash. What cannot be read stays, and is told at the end. Raises ExportFailed."""
    erased: list[Erased] = []
    damaged: list[str] = []
    for folder, found in (await asyncio.to_thread(_folders, files, shard)).items():
        try:
            erased += await _erase(files, folder, found, org)
        except Damaged as error:
            damaged.append(str(error))
    if damaged:
        raise Damaged(f"org {org!r} may still have jobs in what is damaged: {'; '.join(damaged)}")
    return erased


async def _erase(files: Files, folder: str, found: list[Found], org: OrgId) -> list[Erased]:
    manifest = await asyncio.to_thread(_manifest, files, folder)
    erased: list[Erased] = []
    if manifest is not None and org in manifest.rows_by_org:
        await asyncio.to_thread(parquet.check, files, manifest)
        erased.append(Erased(files.name(manifest.path), manifest.rows_by_org[org]))
        left = {other: rows for other, rows in manifest.rows_by_org.items() if other != org}
        if left:
            manifest = await _rewrite(files, manifest, org, left)
        else:
            await asyncio.to_thread(files.delete, f"{folder}/{MANIFEST}")
            await asyncio.to_thread(files.delete, manifest.path)
            return erased
    await asyncio.to_thread(files.tidy, folder)
    # What an erasure that was cut short has left, or an export.
    for other in found:
        if not other.path.endswith(".parquet") or (manifest is not None and other.path == manifest.path):
            continue
        if manifest is not None or await asyncio.to_thread(_holds, files, other.path, org):
            await asyncio.to_thread(files.delete, other.path)
    return erased


async def _rewrite(files: Files, manifest: Manifest, org: OrgId, left: Mapping[OrgId, int]) -> Manifest:
    async def source() -> AsyncGenerator[Batch]:
        async for batch in _stored(files, manifest.path):
            yield parquet.without(batch, org)

    path = f"{manifest.folder}/jobs-{secrets.token_hex(4)}.parquet"
    made = await _write(files, path, source)
    if made.rows_by_org != left:
        await asyncio.to_thread(files.delete, path)
        raise Damaged(f"{files.name(manifest.path)} has other orgs than its manifest")
    new = replace(manifest, file=path.rpartition("/")[2], written_at=_now(), **made._asdict())
    await asyncio.to_thread(parquet.write_manifest, files, new)
    await asyncio.to_thread(files.delete, manifest.path)
    return new


async def _write(files: Files, path: str, source: Source) -> Written:
    """Writes a file, reads it back, and compares it with what it is to be. Raises Damaged."""
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
    """Row by row, whatever the batches are. Raises Damaged."""
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


async def _table(database: Database, day: Day, orgs: list[OrgDay], stop: asyncio.Event) -> AsyncGenerator[Batch]:
    async for page in cold.pages(database, day, orgs):
        if stop.is_set():
            raise Stopped
        yield await asyncio.to_thread(parquet.batch_of, page)


async def _stored(files: Files, path: str) -> AsyncGenerator[Batch]:
    reader = await asyncio.to_thread(Reader, files, path)
    try:
        batches = reader.batches()
        while (batch := await asyncio.to_thread(next, batches, None)) is not None:
            yield batch
    finally:
        reader.close()


async def _merged(ours: AsyncIterator[Batch], files: Files, there: Manifest) -> AsyncGenerator[Batch]:
    """What the table has, and what a file has besides, in their order."""
    theirs = _jobs(_stored(files, there.path))
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


def _folders(files: Files, shard: ShardName | None) -> dict[str, list[Found]]:
    """The files of each day."""
    folders: dict[str, list[Found]] = {}
    for found in files.list("" if shard is None else parquet.shard_folder(shard)):
        if parquet.day_of(found.path) is not None:
            folders.setdefault(found.path.rpartition("/")[0], []).append(found)
    return folders


def shards_in(files: Files) -> set[ShardName]:
    """Those that have exported something; also such as the cluster does not have any more. Raises ExportFailed."""
    return {parquet.shard_of(folder) for folder in _folders(files, None)}


def _sweep(files: Files, folder: str, keep: str) -> None:
    """Files that a manifest has named before, or that a pass has left that did not come to its manifest."""
    for found in files.list(folder):
        if found.path.endswith(".parquet") and found.path != f"{folder}/{keep}":
            files.delete(found.path)


def _holds(files: Files, path: str, org: OrgId) -> bool:
    with Reader(files, path) as reader:
        return any(reader.jobs_of(org, group, ["org"]) for group in reader.groups_of(org))


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
