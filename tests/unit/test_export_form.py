"""The format of exported days, and the locations for exports. The format must not change, because programs of users
rely on it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from archiver import parquet
from archiver.errors import Damaged
from archiver.export_location import ExportLocation
from archiver.object_store import Files
from archiver.parquet import Manifest, Reader, Writer
from shard.history.export_reader import ColdJob
from shard.vocabulary import JobId, Micros, OrgId, QueueName, ShardName

GOLDEN = """\
org: string not null
queue: string not null
id: string not null
kind: string not null
state: string not null
priority: int16 not null
attempt: int16 not null
max_attempts: int16
enqueued_at: timestamp[us, tz=UTC] not null
run_at: timestamp[us, tz=UTC] not null
leased_at: timestamp[us, tz=UTC]
finished_at: timestamp[us, tz=UTC] not null
expires_at: timestamp[us, tz=UTC]
lease: int64
worker: string
reason: string
dedup_key: string
trace: string
payload: binary not null
result: binary
attributes: string
retry: string
history: string"""
MANIFEST = {
    "cluster": "windrow",
    "shard": "s 1/ä",
    "retention": 30,
    "day": "2026-09-30",
    "file": "jobs-cafecafe.parquet",
    "rows": 1,
    "bytes": 3,
    "sha256": "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad",
    "min_id": "019a9f5e-7c1d-7a41-8f0e-3f2b6d1c9a55",
    "max_id": "019a9f5e-7c1d-7a41-8f0e-3f2b6d1c9a55",
    "rows_by_org": {"acme": 1},
    "written_at": "2026-11-01T03:00:00+00:00",
    "windrow": "0.1.0",
    "format": 1,
}
JOB = ColdJob(
    org=OrgId("acme"),
    queue=QueueName("mail"),
    id=JobId("019a9f5e-7c1d-7a41-8f0e-3f2b6d1c9a55"),
    kind="greet",
    state="succeeded",
    priority=5,
    attempt=1,
    max_attempts=None,
    enqueued_at=Micros(1_759_190_400_000_001),
    run_at=Micros(1_759_190_400_000_001),
    leased_at=Micros(1_759_190_400_000_002),
    finished_at=Micros(1_759_190_400_000_003),
    expires_at=None,
    lease=-(2**63),
    worker="w",
    reason=None,
    dedup_key=None,
    trace=None,
    payload=b"\x00\xff",
    result=b"",
    attributes='{"a": "b"}',
    retry=None,
    history=None,
)


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(ExportLocation.parse(str(tmp_path)))


def write(files: Files, path: str, jobs: list[ColdJob]) -> parquet.Written:
    writer = Writer(files.writing(path))
    writer.add(parquet.batch_of(jobs))
    return writer.commit()


def test_the_first_columns_are_as_they_always_were_and_those_that_were_added_may_be_null() -> None:
    columns = str(parquet.SCHEMA.remove_metadata()).splitlines()
    first = len(GOLDEN.splitlines())
    assert columns[:first] == GOLDEN.splitlines()
    assert not [column for column in columns[first:] if column.endswith("not null")]
    assert tuple(parquet.SCHEMA.names) == ColdJob._fields


def test_a_job_comes_back_as_it_was(files: Files, tmp_path: Path) -> None:
    written = write(files, "a/b.parquet", [JOB, JOB._replace(org=OrgId("beta"))])
    data = (tmp_path / "a/b.parquet").read_bytes()
    assert (written.bytes, written.sha256) == (len(data), hashlib.sha256(data).hexdigest())
    assert (written.rows, written.rows_by_org, written.min_id) == (2, {"acme": 1, "beta": 1}, JOB.id)
    with Reader(files, "a/b.parquet") as reader:
        assert parquet.jobs_of(next(reader.batches()))[0] == JOB


def test_groups_end_where_they_are_full_and_those_without_an_org_are_left_out(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet, "_GROUP_ROWS", 2)
    writer = Writer(files.writing("a.parquet"))
    for org in ("a", "b", "c", "d", "e"):
        writer.add(parquet.batch_of([JOB._replace(org=OrgId(org))]))
    writer.commit()
    with Reader(files, "a.parquet") as reader:
        assert [reader.groups_of(OrgId(org)) for org in ("a", "b", "c", "e", "f")] == [[0], [0], [1], [2], []]


def test_in_an_older_file_a_new_column_is_null(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    written = write(files, "old.parquet", [JOB])
    (known,) = parquet.batch_of([JOB]).to_pylist()
    new = parquet.pa.field("group_id", parquet.pa.string())
    monkeypatch.setattr(parquet, "SCHEMA", parquet.SCHEMA.append(new))
    with Reader(files, "old.parquet") as reader:
        (batch,) = reader.batches()
        assert batch.schema == parquet.SCHEMA
        assert batch.to_pylist() == [known | {"group_id": None}]
        (job,) = reader.jobs_of(JOB.org, 0, ["org", "id", "group_id"])
    assert job == {"org": JOB.org, "id": JOB.id, "group_id": None}
    # A merge or an erasure writes the rows again, with the new column.
    writer = Writer(files.writing("new.parquet"))
    writer.add(batch)
    assert writer.commit().rows == written.rows
    with Reader(files, "new.parquet") as reader:
        assert next(reader.batches()).schema.names == parquet.SCHEMA.names


def test_a_file_of_other_columns_is_none_of_ours(files: Files) -> None:
    pa, pq = parquet.pa, parquet.pq
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"org": ["acme"]}), sink)
    files.write("a.parquet", sink.getvalue().to_pybytes())
    with pytest.raises(Damaged, match="has other columns"):
        Reader(files, "a.parquet")


def test_what_is_given_up_is_never_there(files: Files) -> None:
    writer = Writer(files.writing("a.parquet"))
    writer.add(parquet.batch_of([JOB]))
    writer.give_up()
    del writer
    assert list(files.list()) == []


def test_a_manifest_says_what_it_always_said_in_a_folder_that_a_path_may_have(files: Files, tmp_path: Path) -> None:
    known = MANIFEST | {"shard": ShardName("s 1/ä"), "rows_by_org": {OrgId("acme"): 1}}
    manifest = Manifest(**known)  # type: ignore[arg-type]
    assert manifest.folder == "shard=s%201%2F%C3%A4/retention=30/day=2026-09-30"
    parquet.write_manifest(files, manifest)
    assert json.loads((tmp_path / manifest.folder / "manifest.json").read_text()) == MANIFEST
    assert parquet.read_manifest(files, manifest.folder) == manifest
    (found,) = files.list(parquet.shard_folder(manifest.shard))
    assert found.path == f"{manifest.folder}/manifest.json"
    assert parquet.day_of(found.path) == ("s 1/ä", 30, "2026-09-30")
    assert parquet.day_of("shard=s1/manifest.json") is None


@pytest.mark.parametrize("changed", [{"rows": 2}, {"shard": "s2"}, {"file": "../other"}, {"sha256": None, "day": 1}])
def test_a_manifest_that_contradicts_itself_is_refused(files: Files, changed: dict[str, object]) -> None:
    folder = parquet.folder_of(ShardName("s 1/ä"), 30, "2026-09-30")
    files.write(f"{folder}/manifest.json", json.dumps(MANIFEST | changed).encode())
    with pytest.raises(Damaged, match=r"manifest\.json contradicts itself"):
        parquet.read_manifest(files, folder)


@pytest.mark.parametrize(
    ("text", "bucket", "folder"),
    [
        ("/var/lib/windrow/export/", None, "/var/lib/windrow/export"),
        ("file:///var/lib/my%20jobs", None, "/var/lib/my jobs"),
        ("file://localhost/x", None, "/x"),
        ("s3://cold", "cold", ""),
        ("s3://cold.example/windrow/jobs/", "cold.example", "windrow/jobs"),
    ],
)
def test_a_place_is_a_directory_or_a_bucket(text: str, bucket: str | None, folder: str) -> None:
    assert ExportLocation.parse(text) == ExportLocation(bucket=bucket, folder=folder)
