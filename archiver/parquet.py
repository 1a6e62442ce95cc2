"""A day of jobs as a Parquet file, and the manifest beside it: the form that others rely on, written and read. It is
described in docs/export.md; what is there stays, more columns may come.

Knows nothing of Postgres. All that is in memory at once is one row group.
"""

from __future__ import annotations

import contextlib
import importlib
import json
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, TypeAlias
from urllib.parse import quote, unquote

from archiver.errors import Damaged, ExportFailed, NoSuchFile
from archiver.files import Files, Sink, Source
from shard.cold import ColdJob
from shard.vocabulary import JobId, OrgId, ShardName

# It has no types.
pa: Any = importlib.import_module("pyarrow")
pc: Any = importlib.import_module("pyarrow.compute")
pq: Any = importlib.import_module("pyarrow.parquet")
# A pyarrow.RecordBatch of SCHEMA.
Batch: TypeAlias = Any

# Rises when a reader of this one would misread what is written.
FORMAT = 1
MANIFEST = "manifest.json"
_MANIFEST_BYTES_MAX = 256 * 1024 * 1024

_TIME = pa.timestamp("us", tz="UTC")
# As ColdJob has them.
SCHEMA = pa.schema(
    [
        pa.field("org", pa.string(), nullable=False),
        pa.field("queue", pa.string(), nullable=False),
        pa.field("id", pa.string(), nullable=False),
        pa.field("kind", pa.string(), nullable=False),
        pa.field("state", pa.string(), nullable=False),
        pa.field("priority", pa.int16(), nullable=False),
        pa.field("attempt", pa.int16(), nullable=False),
        pa.field("max_attempts", pa.int16()),
        pa.field("enqueued_at", _TIME, nullable=False),
        pa.field("run_at", _TIME, nullable=False),
        pa.field("leased_at", _TIME),
        pa.field("finished_at", _TIME, nullable=False),
        pa.field("expires_at", _TIME),
        pa.field("lease", pa.int64()),
        pa.field("worker", pa.string()),
        pa.field("reason", pa.string()),
        pa.field("dedup_key", pa.string()),
        pa.field("trace", pa.string()),
        pa.field("payload", pa.binary(), nullable=False),
        pa.field("result", pa.binary()),
        pa.field("attributes", pa.string()),
        pa.field("retry", pa.string()),
        pa.field("history", pa.string()),
    ],
    metadata={"windrow.format": str(FORMAT)},
)
LARGE = ("payload", "result")
# A row group ends with the batch that fills one of these. Readers skip groups without the org that they look for.
_GROUP_ROWS, _GROUP_BYTES = 50_000, 32 * 1024 * 1024
_ALIKE = ["org", "queue", "kind", "state", "priority", "attempt", "max_attempts", "worker", "reason", "retry"]
_COMPARED = ["org", "queue", "id", "kind", "state", "enqueued_at", "finished_at"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a day's file has in it. It is written when the file has been read back, and names it: a file that no
    manifest names is none."""

    cluster: str
    shard: ShardName
    retention: int
    # YYYY-MM-DD.
    day: str
    file: str
    rows: int
    bytes: int
    sha256: str
    min_id: JobId | None
    max_id: JobId | None
    rows_by_org: Mapping[OrgId, int]
    # ISO 8601, by the clock of the archiver's machine.
    written_at: str
    windrow: str
    format: int = FORMAT

    @property
    def folder(self) -> str:
        return folder_of(self.shard, self.retention, self.day)

    @property
    def path(self) -> str:
        return f"{self.folder}/{self.file}"


class Written(NamedTuple):
    """What has been written to a file."""

    rows: int
    bytes: int
    sha256: str
    min_id: JobId | None
    max_id: JobId | None
    rows_by_org: dict[OrgId, int]


def folder_of(shard: ShardName, retention: int, day: str) -> str:
    """As Hive names partitions, which DuckDB, Spark and others read."""
    return f"{shard_folder(shard)}/retention={retention}/day={day}"


def shard_folder(shard: ShardName) -> str:
    return f"shard={quote(shard, safe='')}"


def shard_of(folder: str) -> ShardName:
    """That `folder_of` was given."""
    return ShardName(unquote(folder.partition("/")[0].removeprefix("shard=")))


def day_of(path: str) -> tuple[ShardName, int, str] | None:
    """The shard, retention and day (YYYY-MM-DD) of a file; None: it is none of ours."""
    match [part.partition("=") for part in path.split("/")]:
        case [("shard", "=", shard), ("retention", "=", retention), ("day", "=", day), _] if retention.isdigit():
            return ShardName(unquote(shard)), int(retention), day
        case _:
            return None


def read_manifest(files: Files, folder: str) -> Manifest:
    """Raises Damaged, NoSuchFile, FilesFailed."""
    path = f"{folder}/{MANIFEST}"
    found = files.size(path)
    if found > _MANIFEST_BYTES_MAX:
        raise Damaged(f"{files.name(path)} has {found:,} bytes: it is no manifest")
    data = files.read(path)
    try:
        document = json.loads(data)
        if document["format"] > FORMAT:
            raise Damaged(f"{files.name(path)} was written by a later release, {document['windrow']}")
        known = {name: document[name] for name in Manifest.__dataclass_fields__}
        manifest = Manifest(**known)
    except (ValueError, KeyError, TypeError) as error:
        raise Damaged(f"{files.name(path)} cannot be read: {error!r}") from error
    if manifest.folder != folder or "/" in manifest.file or sum(manifest.rows_by_org.values()) != manifest.rows:
        raise Damaged(f"{files.name(path)} contradicts itself, or lies where another does")
    return manifest


def write_manifest(files: Files, manifest: Manifest) -> None:
    text = json.dumps(asdict(manifest), ensure_ascii=False, indent=1)
    files.write(f"{manifest.folder}/{MANIFEST}", f"{text}\n".encode())


def check(files: Files, manifest: Manifest) -> None:
    """Reads all of a file, and does not look into it but for its count of rows. Raises Damaged, FilesFailed."""
    name = files.name(manifest.path)
    try:
        size, sha256 = files.digest(manifest.path)
    except NoSuchFile as error:
        raise Damaged(f"{name} is missing") from error
    if size != manifest.bytes:
        raise Damaged(f"{name} has {size:,} bytes, not the {manifest.bytes:,} of its manifest")
    if sha256 != manifest.sha256:
        raise Damaged(f"{name} is damaged: its SHA-256 is {sha256}, not the {manifest.sha256} of its manifest")
    with Reader(files, manifest.path) as reader:
        if reader.rows != manifest.rows:
            raise Damaged(f"{name} has {reader.rows:,} rows, not the {manifest.rows:,} of its manifest")


def batch_of(jobs: Sequence[ColdJob]) -> Batch:
    columns = zip(*jobs, strict=True)
    arrays = [pa.array(column, field.type) for column, field in zip(columns, SCHEMA, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)


class Writer:
    """Writes one file. It is there once `commit` has returned; else never."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._pending: list[Batch] = []
        self._rows_by_org: dict[OrgId, int] = {}
        self._ids: list[str] = []
        self._parquet = pq.ParquetWriter(
            pa.PythonFile(sink, mode="w"),
            SCHEMA,
            compression="zstd",
            compression_level=3,
            use_dictionary=_ALIKE,
            write_statistics=_COMPARED,
            sorting_columns=[pq.SortingColumn(SCHEMA.get_field_index(name)) for name in ("org", "id")],
        )

    def add(self, batch: Batch) -> None:
        if not batch.num_rows:
            return
        for entry in batch.column("org").value_counts().to_pylist():
            org = OrgId(entry["values"])
            self._rows_by_org[org] = self._rows_by_org.get(org, 0) + entry["counts"]
        ends = pc.min_max(batch.column("id"))
        self._ids = sorted([*self._ids, ends["min"].as_py(), ends["max"].as_py()])[:: len(self._ids) + 1]
        self._pending.append(batch)
        if (
            sum(one.num_rows for one in self._pending) >= _GROUP_ROWS
            or sum(one.nbytes for one in self._pending) >= _GROUP_BYTES
        ):
            self._flush()

    def commit(self) -> Written:
        self._flush()
        self._parquet.close()
        self._sink.commit()
        first, last = self._ids or (None, None)
        return Written(
            rows=sum(self._rows_by_org.values()),
            bytes=self._sink.bytes,
            sha256=self._sink.sha256,
            min_id=None if first is None else JobId(first),
            max_id=None if last is None else JobId(last),
            rows_by_org=dict(sorted(self._rows_by_org.items())),
        )

    def give_up(self) -> None:
        self._sink.give_up()

    def _flush(self) -> None:
        if self._pending:
            table = pa.Table.from_batches(self._pending, SCHEMA)
            self._parquet.write_table(table, row_group_size=table.num_rows)
            self._pending.clear()


class Reader:
    """Reads one file, a row group at a time. Raises Damaged where it is no such file, and FilesFailed."""

    def __init__(self, files: Files, path: str) -> None:
        self._name = files.name(path)
        source = Source(files, path)
        with _damage(self._name):
            self._parquet = pq.ParquetFile(pa.PythonFile(source, mode="r"))
            if not self._parquet.schema_arrow.equals(SCHEMA):
                raise Damaged(f"{self._name} has other columns than a file of this format")

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._parquet.close()

    @property
    def rows(self) -> int:
        return int(self._parquet.metadata.num_rows)

    def batches(self) -> Iterator[Batch]:
        """All rows, in their order."""
        for group in range(self._parquet.num_row_groups):
            with _damage(self._name):
                table = self._parquet.read_row_group(group)
            yield from table.to_batches()

    def groups_of(self, org: OrgId) -> list[int]:
        """The row groups that may have jobs of an org."""
        column = SCHEMA.get_field_index("org")
        found: list[int] = []
        for group in range(self._parquet.num_row_groups):
            known = self._parquet.metadata.row_group(group).column(column).statistics
            if known is None or not known.has_min_max or known.min <= org <= known.max:
                found.append(group)
        return found

    def jobs_of(self, org: OrgId, group: int, columns: Sequence[str]) -> list[dict[str, Any]]:
        """Some columns (`org` among them) of an org's jobs in a row group, by their names."""
        with _damage(self._name):
            table = self._parquet.read_row_group(group, columns=list(columns))
            rows: list[dict[str, Any]] = table.filter(pc.equal(table.column("org"), org)).to_pylist()
        return rows


@contextlib.contextmanager
def _damage(name: str) -> Generator[None, None, None]:
    """What Arrow makes of a broken file is damage; what keeps the file from being read is not."""
    try:
        yield
    except ExportFailed:
        raise
    except (pa.ArrowException, OSError, ValueError) as error:
        raise Damaged(f"{name} is damaged: {' '.join(str(error).split())[:300]}") from error


def jobs_of(batch: Batch) -> list[ColdJob]:
    columns = [
        (column.cast(pa.int64()) if pa.types.is_timestamp(column.type) else column).to_pylist()
        for column in batch.columns
    ]
    return list(map(ColdJob._make, zip(*columns, strict=True)))


def without(batch: Batch, org: OrgId) -> Batch:
    return batch.filter(pc.not_equal(batch.column("org"), org))
