"""Reads and writes the export format: a day of jobs as a Parquet file, and the file's manifest. docs/export.md
describes the format; columns may be added, but existing columns stay as they are.

This module knows nothing about Postgres. It holds one row group in memory at a time.
"""

from __future__ import annotations

import contextlib
import importlib
import json
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import NoneType
from typing import Any, NamedTuple, TypeAlias, get_args, get_type_hints
from urllib.parse import quote, unquote

from archiver.errors import Damaged, ExportFailed, NoSuchFile
from archiver.object_store import Files, Sink, Source
from shard.history.export_reader import ColdJob, Columns
from shard.vocabulary import JobId, Micros, OrgId, ShardName

# pyarrow has no type annotations.
pa: Any = importlib.import_module("pyarrow")
pc: Any = importlib.import_module("pyarrow.compute")
pq: Any = importlib.import_module("pyarrow.parquet")
# A pyarrow.RecordBatch of SCHEMA.
Batch: TypeAlias = Any

# The version of the format. Raise it when a reader of the present version would misread the new format.
FORMAT = 1
MANIFEST = "manifest.json"
_MANIFEST_BYTES_MAX = 256 * 1024 * 1024

_ARROW_TYPES = {str: pa.string(), bytes: pa.binary(), int: pa.int64(), Micros: pa.timestamp("us", tz="UTC")}
_SMALL = {"priority", "attempt", "max_attempts"}


def _column(name: str, of: Any) -> Any:
    """Returns the Parquet column for the field `name` of ColdJob, which has the type `of`."""
    inner = [one for one in get_args(of) if one is not NoneType]
    (plain,) = inner or [of]
    # The types of org names, queue names and ids are `NewType`s of `str`.
    arrow_type = _ARROW_TYPES.get(plain) or _ARROW_TYPES[plain.__supertype__]
    return pa.field(name, pa.int16() if name in _SMALL else arrow_type, nullable=bool(inner))


# The columns of ColdJob.
SCHEMA = pa.schema(
    [_column(name, of) for name, of in get_type_hints(ColdJob).items()], metadata={"windrow.format": str(FORMAT)}
)
# Every file of this format has at least the first _FIRST_COLUMNS columns of SCHEMA. Later releases added the other
# columns. If a file lacks a column, its values are read as null.
_FIRST_COLUMNS = 23
LARGE = ("payload", "result", "checkpoint")
# A row group ends with the batch with which it reaches one of these sizes. Readers skip row groups without jobs of the
# wanted org.
_GROUP_ROWS, _GROUP_BYTES = 50_000, 32 * 1024 * 1024
_DICTIONARY_COLUMNS = [
    "org",
    "queue",
    "kind",
    "state",
    "priority",
    "attempt",
    "max_attempts",
    "worker",
    "reason",
    "retry",
]
_STATISTICS_COLUMNS = ["org", "queue", "id", "kind", "state", "enqueued_at", "finished_at"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a day's file contains. The manifest is written after the file has been read back. A file that no manifest
    names is not part of an export."""

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
    """What was written to a file."""

    rows: int
    bytes: int
    sha256: str
    min_id: JobId | None
    max_id: JobId | None
    rows_by_org: dict[OrgId, int]


def folder_of(shard: ShardName, retention: int, day: str) -> str:
    """Returns the path of a day's folder. The path names partitions as Hive does; DuckDB, Spark and other programs can
    read such paths."""
    return f"{shard_folder(shard)}/retention={retention}/day={day}"


def shard_folder(shard: ShardName) -> str:
    return f"shard={quote(shard, safe='')}"


def shard_of(folder: str) -> ShardName:
    """Returns the shard of a path that `folder_of` made."""
    return ShardName(unquote(folder.partition("/")[0].removeprefix("shard=")))


def day_of(path: str) -> tuple[ShardName, int, str] | None:
    """Returns the shard, retention and day (YYYY-MM-DD) of a file, or None if the file does not belong to an export."""
    match [part.partition("=") for part in path.split("/")]:
        case [("shard", "=", shard), ("retention", "=", retention), ("day", "=", day), _] if retention.isdigit():
            return ShardName(unquote(shard)), int(retention), day
        case _:
            return None


def read_manifest(files: Files, folder: str) -> Manifest:
    """Returns the manifest of a day's folder. Raises Damaged, NoSuchFile, FilesFailed."""
    path = f"{folder}/{MANIFEST}"
    size = files.size(path)
    if size > _MANIFEST_BYTES_MAX:
        raise Damaged(f"{files.name(path)} has {size:,} bytes: it is no manifest")
    data = files.read(path)
    try:
        document = json.loads(data)
        if document["format"] > FORMAT:
            raise Damaged(f"{files.name(path)} was written by a later release, {document['windrow']}")
        fields = {name: document[name] for name in Manifest.__dataclass_fields__}
        manifest = Manifest(**fields)
        is_sound = _is_sound(manifest, folder)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise Damaged(f"{files.name(path)} cannot be read: {error!r}") from error
    if not is_sound:
        raise Damaged(f"{files.name(path)} contradicts itself, or belongs in another folder")
    return manifest


def _is_sound(manifest: Manifest, folder: str) -> bool:
    """Returns whether a manifest that was read can be right. May raise AttributeError, TypeError or ValueError if a
    value has the wrong type."""
    numbers = [manifest.rows, manifest.bytes, *manifest.rows_by_org.values()]
    return (
        manifest.folder == folder
        and "/" not in manifest.file
        and all(type(number) is int for number in numbers)
        and sum(manifest.rows_by_org.values()) == manifest.rows
    )


def write_manifest(files: Files, manifest: Manifest) -> None:
    text = json.dumps(asdict(manifest), ensure_ascii=False, indent=1)
    files.write(f"{manifest.folder}/{MANIFEST}", f"{text}\n".encode())


def check(files: Files, manifest: Manifest) -> None:
    """Reads a whole file, and compares its size, SHA-256 and number of rows with the manifest. Does not look at the
    rows. Raises Damaged, FilesFailed."""
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
    return batch_of_columns(list(zip(*jobs, strict=True)))


def batch_of_columns(columns: Columns) -> Batch:
    arrays = [pa.array(column, field.type) for column, field in zip(columns, SCHEMA, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)


class Writer:
    """Writes one file. The file appears only after `commit` has returned."""

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
            use_dictionary=_DICTIONARY_COLUMNS,
            write_statistics=_STATISTICS_COLUMNS,
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
            sum(pending.num_rows for pending in self._pending) >= _GROUP_ROWS
            or sum(pending.nbytes for pending in self._pending) >= _GROUP_BYTES
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
    """Reads one file, one row group at a time. Raises FilesFailed. Raises Damaged if the file does not have this
    format."""

    def __init__(self, files: Files, path: str) -> None:
        self._name = files.name(path)
        source = Source(files, path)
        with _damage(self._name):
            self._parquet = pq.ParquetFile(pa.PythonFile(source, mode="r"))
            found = list(self._parquet.schema_arrow)
            if len(found) < _FIRST_COLUMNS or found != list(SCHEMA)[: len(found)]:
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
        """Yields all rows in the order of the file. Columns that the file lacks are null."""
        for group in range(self._parquet.num_row_groups):
            with _damage(self._name):
                table = self._parquet.read_row_group(group)
            for column in list(SCHEMA)[table.num_columns :]:
                table = table.append_column(column, pa.nulls(table.num_rows, column.type))
            yield from table.to_batches()

    def groups_of(self, org: OrgId) -> list[int]:
        """Returns the row groups that may have jobs of an org."""
        column = SCHEMA.get_field_index("org")
        found: list[int] = []
        for group in range(self._parquet.num_row_groups):
            statistics = self._parquet.metadata.row_group(group).column(column).statistics
            if statistics is None or not statistics.has_min_max or statistics.min <= org <= statistics.max:
                found.append(group)
        return found

    def jobs_of(self, org: OrgId, group: int, columns: Sequence[str]) -> list[dict[str, Any]]:
        """Returns the given columns of an org's jobs in a row group. `org` must be one of the columns. Columns that the
        file lacks are None."""
        with _damage(self._name):
            table = self._parquet.read_row_group(group, columns=list(columns))
            rows: list[dict[str, Any]] = table.filter(pc.equal(table.column("org"), org)).to_pylist()
        return [dict.fromkeys(columns) | row for row in rows]


@contextlib.contextmanager
def _damage(name: str) -> Generator[None, None, None]:
    """Turns the exceptions that Arrow raises for a broken file into Damaged. Lets an ExportFailed pass."""
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
