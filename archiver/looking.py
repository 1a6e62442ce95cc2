"""Looks jobs up among those that have been exported. Slower than the tables by far: there is no index, and each file
that may have one is read from where it lies. What a manifest, a folder's name or statistics rule out is not read."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from archiver import parquet
from archiver.errors import Damaged, NoSuchFile
from archiver.files import Files
from archiver.parquet import LARGE, MANIFEST, SCHEMA, Manifest, Reader
from shard.vocabulary import JobId, OrgId, ShardName

# An id was made before its job finished, but for clocks that differ; enqueues allow for as much.
_CLOCKS = timedelta(hours=2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Jobs of one org. Empty: any will do."""

    org: OrgId
    shard: ShardName | None = None
    queue: str = ""
    kind: str = ""
    states: Collection[str] = ()
    ids: Collection[JobId] = ()
    # When they finished: not earlier, and earlier.
    since: datetime | None = None
    until: datetime | None = None
    payloads: bool = False

    @property
    def earliest(self) -> datetime | None:
        """They cannot have finished before."""
        made = [datetime.fromtimestamp(int(name.replace("-", "")[:12], 16) / 1000, UTC) - _CLOCKS for name in self.ids]
        known = [moment for moment in (self.since, min(made, default=None)) if moment is not None]
        return max(known, default=None)

    def fits(self, job: dict[str, Any]) -> bool:
        return (
            (not self.queue or job["queue"] == self.queue)
            and (not self.kind or job["kind"] == self.kind)
            and (not self.states or job["state"] in self.states)
            and (not self.ids or job["id"] in self.ids)
            and (self.since is None or job["finished_at"] >= self.since)
            and (self.until is None or job["finished_at"] < self.until)
        )


def find(files: Files, wanted: Wanted) -> Iterator[dict[str, Any]]:
    """The jobs, by the names of SCHEMA's columns, with `shard`, `retention` and `day` besides: the latest day first,
    and of a file the greatest id. Raises ExportFailed."""
    columns = [name for name in SCHEMA.names if wanted.payloads or name not in LARGE]
    for folder in _days(files, wanted):
        opened = _opened(files, folder, wanted)
        if opened is None:
            continue
        manifest, reader = opened
        about = {"shard": manifest.shard, "retention": manifest.retention, "day": manifest.day}
        with reader:
            for group in reversed(reader.groups_of(wanted.org)):
                for job in reversed(reader.jobs_of(wanted.org, group, columns)):
                    if wanted.fits(job):
                        yield job | about


def _opened(files: Files, folder: str, wanted: Wanted) -> tuple[Manifest, Reader] | None:
    """None: it has no such jobs."""
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
            # It may have been written anew meanwhile.
            if not tries_left:
                raise Damaged(str(error)) from error
    raise AssertionError("unreachable")


def _days(files: Files, wanted: Wanted) -> list[str]:
    found: list[tuple[str, str]] = []
    prefix = "" if wanted.shard is None else parquet.shard_folder(wanted.shard)
    for file in files.list(prefix):
        place = parquet.day_of(file.path)
        if place is None or not file.path.endswith(f"/{MANIFEST}"):
            continue
        first = datetime.fromisoformat(place[2]).replace(tzinfo=UTC)
        if wanted.earliest is not None and first + timedelta(days=1) <= wanted.earliest:
            continue
        if wanted.until is not None and first >= wanted.until:
            continue
        found.append((place[2], file.path.rpartition("/")[0]))
    return [folder for _, folder in sorted(found, reverse=True)]


def _may_have(manifest: Manifest, wanted: Wanted) -> bool:
    if not wanted.ids or manifest.min_id is None or manifest.max_id is None:
        return True
    return any(manifest.min_id <= name <= manifest.max_id for name in wanted.ids)
