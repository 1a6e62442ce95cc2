"""Searches exported jobs. This is much slower than a search of the tables. There is no index, so each file that may
have matching jobs is read from the export location. A file or a row group is skipped if the folder name, the manifest
or the Parquet statistics show that it has no matching jobs."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from archiver import parquet
from archiver.errors import Damaged, NoSuchFile
from archiver.object_store import Files
from archiver.parquet import LARGE, MANIFEST, SCHEMA, Manifest, Reader
from shard.job_id import made_at_ms
from shard.vocabulary import JobId, OrgId, ShardName

# An id is made before its job finishes. But the time in the id comes from another clock, which may be ahead by up to
# this time. Enqueues allow the same difference.
_CLOCKS = timedelta(hours=2)
# The start of the year 9999.
_LATEST_MS = int(datetime(9999, 1, 1, tzinfo=UTC).timestamp() * 1000)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportFilter:
    """Which jobs of one org to find. An empty field matches all jobs."""

    org: OrgId
    shard: ShardName | None = None
    queue: str = ""
    kind: str = ""
    states: Collection[str] = ()
    ids: Collection[JobId] = ()
    # Find only jobs that finished at `since` or later, and before `until`.
    since: datetime | None = None
    until: datetime | None = None
    payloads: bool = False

    @property
    def earliest(self) -> datetime | None:
        """The time before which no matching job can have finished, or None if it is not known."""
        made_ms = [made_at_ms(name) for name in self.ids]
        # An id can hold a later time than a datetime can.
        made = [datetime.fromtimestamp(min(min(made_ms), _LATEST_MS) / 1000, UTC) - _CLOCKS] if made_ms else []
        return max((moment for moment in (self.since, *made) if moment is not None), default=None)

    def fits(self, job: dict[str, Any]) -> bool:
        return (
            (not self.queue or job["queue"] == self.queue)
            and (not self.kind or job["kind"] == self.kind)
            and (not self.states or job["state"] in self.states)
            and (not self.ids or job["id"] in self.ids)
            and (self.since is None or job["finished_at"] >= self.since)
            and (self.until is None or job["finished_at"] < self.until)
        )


def find(files: Files, wanted: ExportFilter) -> Iterator[dict[str, Any]]:
    """Yields the matching jobs with the columns of SCHEMA and with `shard`, `retention` and `day`. The latest day comes
    first, and within a file the greatest id. Raises ExportFailed."""
    columns = [name for name in SCHEMA.names if wanted.payloads or name not in LARGE]
    for folder in _days(files, wanted):
        opened = _open(files, folder, wanted)
        if opened is None:
            continue
        manifest, reader = opened
        day = {"shard": manifest.shard, "retention": manifest.retention, "day": manifest.day}
        with reader:
            for group in reversed(reader.groups_of(wanted.org)):
                for job in reversed(reader.jobs_of(wanted.org, group, columns)):
                    if wanted.fits(job):
                        yield job | day


def _open(files: Files, folder: str, wanted: ExportFilter) -> tuple[Manifest, Reader] | None:
    """Opens the file of a day. Returns None if the day has no matching jobs."""
    for tries_left in (1, 0):
        try:
            manifest = parquet.read_manifest(files, folder)
        except NoSuchFile:
            return None
        if wanted.org not in manifest.rows_by_org or not _may_have(manifest, wanted):
            return None
        try:
            return manifest, Reader(files, manifest.path)
        except NoSuchFile as error:
            # Since the files were listed, the day may have been exported again, under a new file name.
            if not tries_left:
                raise Damaged(str(error)) from error
    raise AssertionError("unreachable")


def _days(files: Files, wanted: ExportFilter) -> list[str]:
    found: list[tuple[str, str]] = []
    prefix = "" if wanted.shard is None else parquet.shard_folder(wanted.shard)
    for file in files.list(prefix):
        partition = parquet.day_of(file.path)
        if partition is None or not file.path.endswith(f"/{MANIFEST}"):
            continue
        folder = file.path.rpartition("/")[0]
        try:
            first = datetime.fromisoformat(partition[2]).replace(tzinfo=UTC)
        except ValueError as error:
            # For example, somebody has copied the folder of a day.
            raise Damaged(f"{files.name(folder)} is named after no day: move it out of the exports") from error
        # The end of the day may lie after the last moment that a datetime can have.
        if wanted.earliest is not None and wanted.earliest - first >= timedelta(days=1):
            continue
        if wanted.until is not None and first >= wanted.until:
            continue
        found.append((partition[2], folder))
    return [folder for _, folder in sorted(found, reverse=True)]


def _may_have(manifest: Manifest, wanted: ExportFilter) -> bool:
    if not wanted.ids or manifest.min_id is None or manifest.max_id is None:
        return True
    return any(manifest.min_id <= name <= manifest.max_id for name in wanted.ids)
