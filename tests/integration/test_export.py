"""Cold days are exported to a directory or a bucket before they are dropped. Exports are read back, and no day is
dropped without an export.

With `./run test --thorough`, the day of the largest test has a million jobs. `-s` shows the figures of this test.
"""

# ruff: noqa: ASYNC240 - the files are small, and nobody waits

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import resource
import secrets
import shutil
import socket
import time
import uuid
from collections.abc import AsyncGenerator, Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import pytest

from archiver import export, parquet, service
from archiver.errors import Damaged, ExportFailed, FilesFailed
from archiver.export_location import ExportLocation
from archiver.export_search import ExportFilter, find
from archiver.object_store import Files
from archiver.run import Pass
from shard.admin.queue_admin import QueueAdmin
from shard.errors import ShardUnavailable
from shard.history import erasure, export_reader
from shard.history.days import Day, NotExported, days_over, days_past, drop, turn_cold
from shard.postgres import partitions
from shard.postgres.pool import Database
from shard.queue.settle import Settlement
from shard.queue.store import Store
from shard.vocabulary import JobId, OrgId, ShardName
from tests.balancers import Field, open_field
from tests.conftest import CLUSTER, SHARD
from tests.effort import trials
from tests.jobs import lease_jobs, some_jobs
from tests.postgres import Server
from tests.timemachine import age_finished, make_day

A, B = ShardName("s1"), ShardName("s2")
STOP = asyncio.Event()
ROWS = trials(20_000, thorough=1_000_000)


@pytest.fixture
async def field(tmp_path: Path, fresh_dsn: str, postgres: Server) -> AsyncGenerator[Field, None]:
    async with open_field(tmp_path, fresh_dsn, postgres, B) as opened:
        yield opened


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "export"


@pytest.fixture
def files(place: Path) -> Files:
    return Files(ExportLocation.parse(str(place)), make=True)


@pytest.fixture
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="module")
def s3_server() -> Generator[str, None, None]:
    """An S3 server in this process. Importing the module takes seconds. So the import must not happen while connections
    with a timeout of five seconds are being made."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def bucket(s3_server: str, credentials: None, monkeypatch: pytest.MonkeyPatch) -> str:
    import boto3  # type: ignore[import-untyped]

    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server)
    name = f"cold-{secrets.token_hex(4)}"
    boto3.client("s3", endpoint_url=s3_server).create_bucket(Bucket=name)
    return f"s3://{name}/windrow/export"


async def finish(database: Database, org: OrgId, count: int, *, queue: str = "mail") -> None:
    store = Store(database)
    await store.enqueue(some_jobs(org, count, queue=queue))
    await store.settle(
        Settlement.ack(
            org,
            [lease for _, lease in await lease_jobs(store, org, queue=queue, max_jobs=count)],
        )
    )


async def make_cold_day(database: Database, *orgs: OrgId, jobs: int = 2, days: int = 40) -> Day:
    """Makes a cold day, whose jobs belong to `orgs` and finished `days` days ago."""
    for org in orgs:
        await finish(database, org, jobs)
        await age_finished(database, org, days=days)
    for over in await days_over(database):
        await turn_cold(database, over)
    (day,) = await days_past(database)
    return day


async def once(field: Field) -> Pass:
    outcome = dict(await service.archive_once(field.cluster, stop=asyncio.Event()))[A]
    assert isinstance(outcome, Pass), outcome
    return outcome


async def leads() -> bool:
    return True


async def run_export(files: Files, database: Database, day: Day, *, cluster: str = CLUSTER) -> export.Exported:
    return await export.export_day(files, database, day, cluster=cluster, lead=leads, stop=STOP)


def manifests(place: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(place.rglob("manifest.json"))]


def data_files(place: Path) -> list[Path]:
    return sorted(place.rglob("*.parquet*"))


def spoil(path: Path) -> None:
    """Flips one bit in the middle of the file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def ask(query: str) -> list[tuple[Any, ...]]:
    """Returns the rows that DuckDB finds."""
    with duckdb.connect() as connection:
        rows: list[tuple[Any, ...]] = connection.execute(query).fetchall()
    return rows


async def tables(database: Database) -> list[str]:
    rows = await database.run(b"SELECT relname FROM pg_class WHERE relkind = 'r' AND relname ~ '^cold_30_'", {})
    return [name for (name,) in rows]


# ── A pass exports what it drops ─────────────────────────────────────────────────────────────────────────────────────


async def test_a_day_is_exported_and_read_back_before_it_is_dropped(field: Field, org: OrgId, place: Path) -> None:
    field.write(f"[archiver]\nexport = '{place}'\n", s1={}, s2={})
    await finish(field.databases[A], org, 3)
    ids = await age_finished(field.databases[A], org, days=40)
    records = await Store(field.databases[A]).get(org, ids, include_payload=True)
    done = await once(field)
    assert [aged.jobs for aged in done.dropped] == [3]
    assert (len(done.exported), done.not_exported) == (1, [])
    assert "1 day(s) exported: 3 job(s)" in str(done)
    (manifest,) = manifests(place)
    (file,) = data_files(place)
    assert file.parent.relative_to(place).as_posix() == f"shard=s1/retention=30/day={manifest['day']}"
    assert manifest["rows_by_org"] == {org: 3}
    assert (manifest["min_id"], manifest["max_id"]) == (ids[0], ids[-1])
    assert (manifest["bytes"], manifest["sha256"]) == (
        file.stat().st_size,
        hashlib.sha256(file.read_bytes()).hexdigest(),
    )
    found = list(find(Files(ExportLocation.parse(str(place))), ExportFilter(org=org, payloads=True)))
    assert [job["id"] for job in found] == ids[::-1]
    for job, record in zip(found, records[::-1], strict=True):
        assert (job["queue"], job["kind"], job["state"], job["payload"]) == (
            record.queue,
            record.kind,
            record.state,
            record.payload,
        )
        assert job["finished_at"].timestamp() * 1e6 == pytest.approx(record.finished_at)
    (books,) = [entry for entry in await QueueAdmin(field.databases[A]).check() if entry.org == org]
    assert (books.expired, books.balanced) == (3, True)


async def test_what_is_not_to_be_kept_is_not_exported(field: Field, org: OrgId, place: Path) -> None:
    field.write(f"[archiver]\nexport = '{place}'\n", s1={}, s2={})
    database = field.databases[A]
    await Store(database).enqueue(some_jobs(org, 1))
    await database.run(b"UPDATE windrow.queue SET retention = 0 WHERE org = %(org)s", {"org": org})
    await partitions.make_ahead(database)
    await finish(database, org, 1)
    await age_finished(database, org, days=3)
    done = await once(field)
    assert (len(done.dropped), done.exported, data_files(place)) == (1, [], [])


async def test_a_damaged_file_blocks_the_drop_and_is_named_and_the_next_pass_goes_on(
    field: Field, org: OrgId, place: Path, files: Files
) -> None:
    field.write(f"[archiver]\nexport = '{place}'\n", s1={}, s2={})
    day = await make_cold_day(field.databases[A], org)
    await run_export(files, field.databases[A], day)
    (file,) = data_files(place)
    spoil(file)
    done = await once(field)
    assert done.dropped == []
    (why,) = done.not_exported
    assert why.startswith(f"{day.name} stays: {file} is damaged: its SHA-256 is ")
    assert await tables(field.databases[A]) == [day.name]
    done = await once(field)
    assert ([aged.partition for aged in done.dropped], done.not_exported) == ([day.name], [])
    assert [one.trouble for one in export.check_all(files)] == [""]


@pytest.mark.parametrize("what", ["the file", "the manifest"])
async def test_a_damaged_export_of_a_day_that_has_changed_says_how_to_go_on(
    field: Field, org: OrgId, other_org: OrgId, place: Path, files: Files, what: str
) -> None:
    field.write(f"[archiver]\nexport = '{place}'\n", s1={}, s2={})
    day = await make_cold_day(field.databases[A], org, other_org)
    await run_export(files, field.databases[A], day)
    (file,) = data_files(place)
    (manifest,) = place.rglob("manifest.json")
    if what == "the file":
        file.unlink()
        assert await erasure.begin(field.databases[A], org, erasure="0198c0de-0000-7000-8000-000000000001")
    else:
        manifest.write_text("{")
    (why,) = (await once(field)).not_exported
    assert f"restore it from a copy; if there is none, move {manifest.parent} out of the exports" in why
    manifest.parent.rename(place.with_name("damaged"))
    done = await once(field)
    assert (len(done.dropped), done.not_exported) == (1, [])
    assert len(list(find(files, ExportFilter(org=other_org)))) == 2


@pytest.mark.parametrize("how", ["missing", "shorter", "no Parquet"])
async def test_a_file_that_is_not_as_its_manifest_says_blocks_the_drop(
    fresh_database: Database, org: OrgId, place: Path, files: Files, how: str
) -> None:
    day = await make_cold_day(fresh_database, org)
    await run_export(files, fresh_database, day)
    (file,) = data_files(place)
    match how:
        case "missing":
            file.unlink()
        case "shorter":
            file.write_bytes(file.read_bytes()[:-1])
        case _:
            file.write_bytes(b"x" * file.stat().st_size)
    with pytest.raises(Damaged, match=str(file)):
        await run_export(files, fresh_database, day)


async def test_a_place_that_is_away_leaves_the_day_and_stops_no_other_work(
    field: Field, org: OrgId, other_org: OrgId, credentials: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{nobody.getsockname()[1]}")
        monkeypatch.setattr("archiver.object_store._RETRIES", 0)
        field.write("[archiver]\nexport = 's3://cold/windrow'\n", s1={}, s2={})
        day = await make_cold_day(field.databases[A], org)
        await Store(field.databases[A]).enqueue(some_jobs(other_org, 1, dedup_keys=["a"]))
        await field.databases[A].run(b"UPDATE windrow.dedup SET until = now()", {})
        outcomes = dict(await service.archive_once(field.cluster, stop=asyncio.Event()))
    done = outcomes[A]
    assert isinstance(done, Pass)
    assert done.not_exported[0].startswith(f"{day.name} stays: s3://cold/windrow/shard=s1/")
    assert (done.dropped, done.dedup_keys) == ([], 1)
    assert isinstance(outcomes[B], Pass)
    assert await tables(field.databases[A]) == [day.name]


async def test_a_directory_that_cannot_be_written_to_leaves_the_day(field: Field, org: OrgId, place: Path) -> None:
    place.write_text("a file")
    field.write(f"[archiver]\nexport = '{place}'\n", s1={}, s2={})
    day = await make_cold_day(field.databases[A], org)
    done = await once(field)
    assert done.not_exported[0].startswith(f"{day.name} stays: {place}")
    assert await tables(field.databases[A]) == [day.name]


# ── The file has exactly the rows of the table ───────────────────────────────────────────────────────────────────────


async def test_every_column_of_a_cold_job_is_exported(fresh_database: Database) -> None:
    rows = await fresh_database.run(
        b"""
        SELECT a.attname FROM pg_attribute a
        WHERE a.attrelid = 'windrow.cold'::regclass AND a.attnum > 0 AND NOT a.attisdropped
        """,
        {},
    )
    # The folder names contain the retention, so the file has no column for it. The file stores org and queue by name.
    assert {name for (name,) in rows} - {"queue_id", "retention"} == set(parquet.SCHEMA.names) - {"org", "queue"}


async def test_orgs_and_ids_come_in_their_order_however_many_pages_it_takes(
    fresh_database: Database, monkeypatch: pytest.MonkeyPatch, files: Files
) -> None:
    monkeypatch.setattr(export_reader, "_ROWS", 4)
    orgs = [OrgId(name) for name in ("zebra", "Äther", "acme", "Zebra")]
    for org, count in zip(orgs, (9, 1, 3, 2), strict=True):
        await finish(fresh_database, org, count)
        await age_finished(fresh_database, org, days=40)
    day = await make_cold_day(fresh_database)
    exported = await run_export(files, fresh_database, day)
    assert exported.rows_by_org == {"Zebra": 2, "acme": 3, "zebra": 9, "Äther": 1}
    (one,) = export.check_all(files)
    assert one.manifest is not None
    with parquet.Reader(files, one.manifest.path) as reader:
        keys = [(job.org, job.id) for batch in reader.batches() for job in parquet.jobs_of(batch)]
    assert (len(keys), keys) == (15, sorted(keys))


async def test_a_page_ends_before_it_fills_the_memory(
    fresh_database: Database, org: OrgId, monkeypatch: pytest.MonkeyPatch, files: Files
) -> None:
    monkeypatch.setattr(export_reader, "_BYTES", 3 * 1024)
    day = await make_cold_day(fresh_database, org, jobs=10)
    orgs = await export_reader.count(fresh_database, day)
    assert [len(page[0]) async for page in export_reader.pages(fresh_database, day, orgs)] == [3, 3, 3, 1]
    assert (await run_export(files, fresh_database, day)).jobs == 10


async def test_a_row_that_is_not_what_the_table_has_is_found(
    fresh_database: Database, org: OrgId, files: Files, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mistake happens while the file is written. So the checksum of the file matches the wrong content."""
    day = await make_cold_day(fresh_database, org, jobs=3)

    async def lossy(*arguments: Any) -> AsyncGenerator[Any]:
        async for batch in table(*arguments):
            yield batch if list(files.list()) else batch.slice(1)

    table = export._table
    monkeypatch.setattr(export, "_table", lossy)
    with pytest.raises(Damaged, match="has another row than the day"):
        await run_export(files, fresh_database, day)
    assert (data_files(place), manifests(place)) == ([], [])


async def test_a_day_that_changes_after_it_was_exported_is_not_dropped_and_the_export_keeps_all(
    fresh_database: Database, org: OrgId, other_org: OrgId, files: Files
) -> None:
    day = await make_cold_day(fresh_database, org)
    exported = await run_export(files, fresh_database, day)
    # A job of this day comes late, because the clock was set back.
    await finish(fresh_database, other_org, 1)
    await age_finished(fresh_database, other_org, days=40)
    for over in await days_over(fresh_database):
        await turn_cold(fresh_database, over)
    with pytest.raises(NotExported, match=f"has 1 job.s. of org '{other_org}', and its export 0"):
        await drop(fresh_database, day, exported=exported.in_table)
    exported = await run_export(files, fresh_database, day)
    assert exported.rows_by_org == {org: 2, other_org: 1}
    await drop(fresh_database, day, exported=exported.in_table)
    # Export the day once more after it was dropped.
    await finish(fresh_database, org, 1)
    await age_finished(fresh_database, org, days=40)
    day = await make_cold_day(fresh_database)
    exported = await run_export(files, fresh_database, day)
    assert exported.rows_by_org == {org: 3, other_org: 1}
    assert [one.trouble for one in export.check_all(files)] == [""]


async def test_a_day_that_was_dropped_and_exported_again_keeps_jobs_that_come_after_that(
    fresh_database: Database, org: OrgId, files: Files
) -> None:
    """The clock is set back twice. The file and the table then have equally many jobs, and the same first and last job,
    but one job of each is not in the other."""

    async def add(*digits: str) -> Day:
        await finish(fresh_database, org, len(digits))
        await age_finished(fresh_database, org, days=40)
        newest = b"(SELECT f.id FROM windrow.finished f ORDER BY f.id DESC LIMIT 1)"
        for digit in digits:
            await fresh_database.run(
                b"UPDATE windrow.finished SET id = %(id)s WHERE id = " + newest,
                {"id": f"00000000-0000-7000-8000-00000000000{digit}"},
            )
        return await make_cold_day(fresh_database)

    day = await add("5")
    exported = await run_export(files, fresh_database, day)
    await drop(fresh_database, day, exported=exported.in_table)
    await run_export(files, fresh_database, await add("1", "9"))
    day = await add("6")
    exported = await run_export(files, fresh_database, day)
    assert exported.rows_by_org == {org: 4}
    assert [one.trouble for one in export.check_all(files)] == [""]


async def test_an_org_that_is_being_erased_is_not_exported(
    fresh_database: Database, org: OrgId, other_org: OrgId, files: Files
) -> None:
    day = await make_cold_day(fresh_database, org, other_org)
    assert await erasure.begin(fresh_database, org, erasure=str(uuid.uuid4()))
    exported = await run_export(files, fresh_database, day)
    assert exported.rows_by_org == {other_org: 2}
    assert (await drop(fresh_database, day, exported=exported.in_table)).jobs == 4


async def test_jobs_under_legal_hold_are_exported_before_they_are_set_aside(
    fresh_database: Database, org: OrgId, other_org: OrgId, files: Files
) -> None:
    day = await make_cold_day(fresh_database, org, other_org)
    await fresh_database.run(b"UPDATE windrow.org SET held = true WHERE org = %(org)s", {"org": org})
    exported = await run_export(files, fresh_database, day)
    assert (await drop(fresh_database, day, exported=exported.in_table)).jobs == 2
    assert exported.rows_by_org == {org: 2, other_org: 2}
    assert await fresh_database.run(b"SELECT count(*) FROM windrow.cold_held", {}) == [(2,)]


async def test_what_another_cluster_has_exported_there_is_left_alone(
    fresh_database: Database, org: OrgId, files: Files
) -> None:
    day = await make_cold_day(fresh_database, org)
    await run_export(files, fresh_database, day, cluster="another")
    with pytest.raises(Damaged, match="was exported by cluster 'another', and this is 'tests'"):
        await run_export(files, fresh_database, day)


async def test_a_release_that_knows_a_later_format_is_not_misread(
    fresh_database: Database, org: OrgId, files: Files
) -> None:
    day = await make_cold_day(fresh_database, org)
    await run_export(files, fresh_database, day)
    (one,) = export.check_all(files)
    assert one.manifest is not None
    parquet.write_manifest(files, replace(one.manifest, format=2, windrow="9.9"))
    with pytest.raises(Damaged, match=r"was written by a later release, 9\.9"):
        await run_export(files, fresh_database, day)


# ── Exports that are interrupted ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("step", ["the manifest", "the drop"])
async def test_a_pass_that_ends_between_its_steps_is_taken_up_by_the_next(
    field: Field, org: OrgId, place: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    field.write(f"[archiver]\nexport = '{place}'\n", s1={}, s2={})
    day = await make_cold_day(field.databases[A], org)

    def killed(*_: object) -> None:
        raise RuntimeError("the end")

    with monkeypatch.context() as patch:
        if step == "the manifest":
            patch.setattr(parquet, "write_manifest", killed)
        else:
            patch.setattr(export, "still_there", killed)
        outcome = dict(await service.archive_once(field.cluster, stop=asyncio.Event()))[A]
        assert isinstance(outcome, RuntimeError)
    assert len(data_files(place)) == 1
    assert await tables(field.databases[A]) == [day.name]
    done = await once(field)
    assert (done.not_exported, len(done.dropped)) == ([], 1)
    assert len(data_files(place)) == 1
    assert [one.trouble for one in export.check_all(Files(ExportLocation.parse(str(place))))] == [""]


async def test_what_a_killed_process_had_begun_to_write_is_no_file_and_goes(
    fresh_database: Database, org: OrgId, files: Files, place: Path
) -> None:
    day = await make_cold_day(fresh_database, org)
    sink = files.writing(f"{parquet.folder_of(SHARD, 30, day.first)}/jobs-cafecafe.parquet")
    sink.write(b"x" * 20_000_000)
    assert [path.name for path in data_files(place)] == ["jobs-cafecafe.parquet#1"]
    assert list(export.check_all(files)) == []
    await run_export(files, fresh_database, day)
    assert [path.name.endswith(".parquet") for path in data_files(place)] == [True]


async def test_what_an_interrupted_export_has_left_beside_a_good_one_goes(
    fresh_database: Database, org: OrgId, files: Files, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    day = await make_cold_day(fresh_database, org)
    exported = await run_export(files, fresh_database, day)
    # Leave a file that no manifest names, as if an archiver was killed before it deleted the file of an earlier
    # manifest.
    left = f"{parquet.folder_of(SHARD, 30, day.first)}/jobs-cafecafe.parquet"
    files.write(left, data_files(place)[0].read_bytes())

    def forbidden(_: str) -> None:
        raise FilesFailed("403")

    with monkeypatch.context() as patch:
        # The file cannot be deleted, but the day can be dropped.
        patch.setattr(files, "delete", forbidden)
        assert not (await run_export(files, fresh_database, day)).written
    assert len(data_files(place)) == 2
    assert not (await run_export(files, fresh_database, day)).written
    assert [str(path) for path in data_files(place)] == [exported.file]


async def test_an_export_that_is_stopped_leaves_no_file(field: Field, org: OrgId, place: Path, files: Files) -> None:
    day = await make_cold_day(field.databases[A], org)
    stop = asyncio.Event()
    stop.set()
    with pytest.raises(export.Stopped):
        await export.export_day(files, field.databases[A], day, cluster=CLUSTER, lead=leads, stop=stop)
    assert (data_files(place), manifests(place)) == ([], [])


async def test_an_archiver_that_stalls_and_is_replaced_does_not_touch_the_export_of_the_next_one(
    field: Field, org: OrgId, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    field.write(f"[archiver]\nexport = '{place}'\n", s1={})
    await make_cold_day(field.databases[A], org)
    stalled, goes_on = asyncio.Event(), asyncio.Event()
    write = export._write  # pyright: ignore[reportPrivateUsage]

    async def stall_once(*arguments: Any) -> parquet.Written:
        written = await write(*arguments)
        if not stalled.is_set():
            stalled.set()
            await goes_on.wait()
        return written

    monkeypatch.setattr(export, "_write", stall_once)
    first = asyncio.create_task(service.archive_once(field.cluster, stop=asyncio.Event()))
    await stalled.wait()
    # The first archiver loses its session, as in a failover. The next archiver exports the day and drops it.
    assert await field.databases[A].run(
        b"SELECT pg_terminate_backend(pid, 10000) FROM pg_locks WHERE locktype = 'advisory' AND granted", {}
    ) == [(True,)]
    assert [aged.jobs for aged in (await once(field)).dropped] == [2]
    goes_on.set()
    assert isinstance((await first)[A], ShardUnavailable)
    files = Files(ExportLocation.parse(str(place)))
    assert [one.trouble for one in export.check_all(files)] == [""]
    assert len(list(find(files, ExportFilter(org=org)))) == 2


# ── Erasures, look-ups and checks ────────────────────────────────────────────────────────────────────────────────────


async def test_an_erased_org_is_in_no_file_and_the_others_are_as_before(
    fresh_database: Database, org: OrgId, other_org: OrgId, files: Files, place: Path
) -> None:
    day = await make_cold_day(fresh_database, org, other_org, jobs=3)
    await run_export(files, fresh_database, day)
    (before,) = data_files(place)
    kept = list(find(files, ExportFilter(org=other_org, payloads=True)))
    erased = await export.erase_org(files, SHARD, org)
    assert erased == [(str(before), 3)]
    assert list(find(files, ExportFilter(org=other_org, payloads=True))) == kept
    (after,) = data_files(place)
    assert org.encode() not in after.read_bytes()
    (manifest,) = manifests(place)
    assert (manifest["rows_by_org"], manifest["file"]) == ({other_org: 3}, after.name)
    assert [one.trouble for one in export.check_all(files)] == [""]
    assert await export.erase_org(files, SHARD, org) == []
    assert await export.erase_org(files, SHARD, other_org) == [(str(after), 3)]
    assert [path for path in place.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize("last", [False, True])
async def test_an_erasure_that_was_cut_short_is_ended_by_the_next(
    fresh_database: Database,
    org: OrgId,
    other_org: OrgId,
    files: Files,
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    last: bool,
) -> None:
    """The erasure is interrupted after the manifest was changed, and before the file was deleted."""
    day = await make_cold_day(fresh_database, org, *([] if last else [other_org]))
    await run_export(files, fresh_database, day)
    (before,) = data_files(place)
    delete = files.delete

    def cut_short(path: str) -> None:
        if path.endswith(".parquet"):
            raise FilesFailed("away")
        delete(path)

    with monkeypatch.context() as patch:
        patch.setattr(files, "delete", cut_short)
        with pytest.raises(FilesFailed):
            await export.erase_org(files, SHARD, org)
    assert before in data_files(place)
    await export.erase_org(files, SHARD, org)
    assert before not in data_files(place)
    assert not any(org.encode() in path.read_bytes() for path in place.rglob("*") if path.is_file())


async def test_an_erasure_names_a_damaged_file(fresh_database: Database, org: OrgId, files: Files, place: Path) -> None:
    day = await make_cold_day(fresh_database, org)
    await run_export(files, fresh_database, day)
    (file,) = data_files(place)
    spoil(file)
    with pytest.raises(Damaged, match=rf"org '{org}' may still have jobs in what is damaged: {file}"):
        await export.erase_org(files, SHARD, org)


async def test_jobs_are_found_by_what_is_asked_for_and_other_orgs_files_are_not_read(
    fresh_database: Database, org: OrgId, other_org: OrgId, files: Files, place: Path
) -> None:
    for queue in ("mail", "sms"):
        await finish(fresh_database, org, 2, queue=queue)
    await age_finished(fresh_database, org, days=40)
    day = await make_cold_day(fresh_database, other_org)
    await run_export(files, fresh_database, day)
    jobs = list(find(files, ExportFilter(org=org)))
    assert [(job["queue"], job["shard"], job["day"]) for job in jobs] == [
        (queue, SHARD, day.first) for queue in ("sms", "sms", "mail", "mail")
    ]
    assert "payload" not in jobs[0]
    assert list(find(files, ExportFilter(org=org, queue="sms"))) == jobs[:2]
    assert list(find(files, ExportFilter(org=org, ids=[JobId(jobs[3]["id"])]))) == jobs[3:]
    assert list(find(files, ExportFilter(org=org, states=["cancelled"]))) == []
    assert list(find(files, ExportFilter(org=org, kind="greet", shard=SHARD))) == jobs
    # The two jobs of each queue were acked at the same moment.
    assert list(find(files, ExportFilter(org=org, since=jobs[1]["finished_at"]))) == jobs[:2]
    assert list(find(files, ExportFilter(org=org, until=jobs[1]["finished_at"]))) == jobs[2:]
    assert list(find(files, ExportFilter(org=org, shard=B))) == []
    (file,) = data_files(place)
    file.unlink()
    assert list(find(files, ExportFilter(org=OrgId("nobody")))) == []
    with pytest.raises(Damaged, match=str(file)):
        list(find(files, ExportFilter(org=org)))


async def test_a_search_for_an_id_of_a_far_future_finds_nothing(
    fresh_database: Database, org: OrgId, files: Files
) -> None:
    await run_export(files, fresh_database, await make_cold_day(fresh_database, org))
    assert list(find(files, ExportFilter(org=org, ids=[JobId("ffffffff-ffff-7fff-bfff-ffffffffffff")]))) == []


async def test_a_search_passes_over_the_folder_of_the_last_day_that_a_date_can_have(
    fresh_database: Database, org: OrgId, files: Files, place: Path
) -> None:
    await run_export(files, fresh_database, await make_cold_day(fresh_database, org))
    (job, *_) = jobs = list(find(files, ExportFilter(org=org)))
    (manifest,) = place.rglob("manifest.json")
    last = manifest.parent.with_name("day=9999-12-31")
    last.mkdir()
    (last / "manifest.json").write_text(
        json.dumps(
            json.loads(manifest.read_text())
            | {"rows_by_org": {}, "rows": 0}
            | {"folder": last.relative_to(place).as_posix(), "day": "9999-12-31"}
        )
    )
    assert list(find(files, ExportFilter(org=org, since=job["finished_at"]))) == [
        one for one in jobs if one["finished_at"] >= job["finished_at"]
    ]


async def test_a_search_names_a_folder_that_is_not_a_days(
    fresh_database: Database, org: OrgId, files: Files, place: Path
) -> None:
    await run_export(files, fresh_database, await make_cold_day(fresh_database, org))
    (manifest,) = place.rglob("manifest.json")
    copy = manifest.parent.with_name(f"{manifest.parent.name}.bak")
    shutil.copytree(manifest.parent, copy)
    with pytest.raises(Damaged, match=f"{copy} is named after no day"):
        list(find(files, ExportFilter(org=org)))


@pytest.mark.parametrize(
    "change", [{"rows_by_org": [2]}, {"rows_by_org": {"a": "2"}}, {"file": 5}, {"bytes": "many"}, {"sha256": None}]
)
async def test_a_manifest_with_values_of_other_types_keeps_its_day_and_stops_no_other_work(
    field: Field, org: OrgId, place: Path, files: Files, change: dict[str, object]
) -> None:
    field.write(f"[archiver]\nexport = '{place}'\n", s1={}, s2={})
    day = await make_cold_day(field.databases[A], org)
    await run_export(files, field.databases[A], day)
    (manifest,) = place.rglob("manifest.json")
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | change))
    (why,) = (await once(field)).not_exported
    assert why.startswith(f"{day.name} stays: {place}")
    assert await tables(field.databases[A]) == [day.name]


async def test_a_look_at_all_files_names_those_that_are_damaged_and_those_that_no_manifest_names(
    fresh_database: Database, org: OrgId, files: Files, place: Path
) -> None:
    day = await make_cold_day(fresh_database, org)
    await run_export(files, fresh_database, day)
    (file,) = data_files(place)
    stray = file.with_name("jobs-cafecafe.parquet")
    stray.write_bytes(file.read_bytes())
    (place / "notes.txt").write_text("mine")
    assert [(one.file, "named by no manifest" in one.trouble) for one in export.check_all(files)] == [
        (str(file), False),
        (str(stray), True),
    ]
    stray.unlink()
    spoil(file)
    (one,) = export.check_all(files)
    assert one.trouble.startswith(f"{file} is damaged: ")
    (manifest,) = place.rglob("manifest.json")
    manifest.write_text(manifest.read_text()[:-9])
    assert [one.trouble.startswith(f"{manifest} cannot be read") for one in export.check_all(files)] == [True]
    assert list(export.check_all(files, shard=B)) == []


def test_a_directory_that_nothing_was_exported_to_is_named_with_what_may_be_the_cause(place: Path) -> None:
    with pytest.raises(FilesFailed, match=f"{place}/none: there is no such directory: nothing was exported yet"):
        Files(ExportLocation(bucket=None, folder=f"{place}/none"))


# ── Exports to a bucket ──────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_bucket_does_as_well(field: Field, org: OrgId, other_org: OrgId, bucket: str) -> None:
    field.write(f"[archiver]\nexport = '{bucket}'\n", s1={}, s2={})
    day = await make_cold_day(field.databases[A], org, other_org)
    files = Files(ExportLocation.parse(bucket))
    await run_export(files, field.databases[A], day)
    (one,) = export.check_all(files)
    assert one.manifest is not None
    assert one.file.startswith(f"{bucket}/shard=s1/retention=30/day={day.first}/jobs-")
    data = bytearray(files.read(one.manifest.path))
    data[len(data) // 2] ^= 1
    files.write(one.manifest.path, bytes(data))
    done = await once(field)
    assert (done.dropped, one.file in done.not_exported[0]) == ([], True)
    done = await once(field)
    assert ([aged.jobs for aged in done.dropped], done.not_exported) == ([4], [])
    assert len(list(find(files, ExportFilter(org=org)))) == 2
    assert [rows for _, rows in await export.erase_org(files, A, org)] == [2]
    assert list(find(files, ExportFilter(org=org))) == []
    assert len(list(find(files, ExportFilter(org=other_org)))) == 2
    assert [one.trouble for one in export.check_all(files)] == [""]


async def test_a_file_of_many_parts_is_whole_in_a_bucket(bucket: str) -> None:
    files = Files(ExportLocation.parse(bucket))
    sink = files.writing("a/b")
    block = os.urandom(1024 * 1024)
    for _ in range(20):
        sink.write(block)
    with pytest.raises(ExportFailed, match=f"{bucket}/a/b: there is no such file"):
        files.size("a/b")
    sink.commit()
    assert files.digest("a/b") == (20 * len(block), sink.sha256)


# ── Many jobs ────────────────────────────────────────────────────────────────────────────────────────────────────────

_MANY = b"""
INSERT INTO windrow.finished (
    id, queue_id, enqueued_at, run_at, finished_at, lease, leased_at, priority, attempt, state, kind, payload,
    attributes, worker, retention
)
SELECT
    (lpad(to_hex((extract(epoch FROM f.at) * 1000)::bigint), 12, '0') || '7' || substr(f.noise, 1, 3) || '8'
        || substr(f.noise, 4, 15))::uuid,
    f.queue_id, f.at, f.at, f.at + interval '20 ms', ('x' || substr(f.noise, 1, 15))::bit(60)::bigint,
    f.at + interval '10 ms', 5, 1, 'succeeded', 'send_email',
    convert_to('{"to": "' || f.noise || '@example.com", "text": "' || repeat(f.noise, 4) || '"}', 'UTF8'),
    '{"plan": "pro"}', 'worker-' || f.turn %% 20, 30
FROM (
    SELECT
        q.queue_id, n.turn, md5(n.turn::text) AS noise,
        (now() AT TIME ZONE 'UTC')::date::timestamp AT TIME ZONE 'UTC' - interval '40 days' + n.turn * interval '70 ms'
            AS at
    FROM generate_series(1, %(rows)s) AS n (turn)
    JOIN (
        SELECT q.queue_id, row_number() OVER (ORDER BY q.queue_id) - 1 AS place, count(*) OVER () AS queues
        FROM windrow.queue q
    ) q ON q.place = n.turn %% q.queues
) f
"""


@pytest.mark.thorough
@pytest.mark.timeout(1800)
async def test_of_many_jobs_rows_and_checksums_are_equal(fresh_database: Database, files: Files) -> None:
    store = Store(fresh_database)
    for number in range(100):
        await store.enqueue(some_jobs(OrgId(f"org-{number}"), 1))
    await make_day(fresh_database, retention=30, before="now", days=40)
    await fresh_database.run(_MANY, {"rows": ROWS})
    day = await make_cold_day(fresh_database)
    rows = await fresh_database.run(
        f"SELECT pg_table_size('windrow.{day.name}'), pg_total_relation_size('windrow.{day.name}')".encode(), {}
    )
    table_bytes, with_indexes = rows[0]
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    exported = await run_export(files, fresh_database, day)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory
    assert (exported.jobs, exported.written) == (ROWS, True)
    began_s = time.monotonic()
    (one,) = export.check_all(files)
    check_s = time.monotonic() - began_s
    assert one.trouble == ""
    began_s = time.monotonic()
    assert len(list(find(files, ExportFilter(org=OrgId("org-7"))))) == ROWS / 100
    find_s = time.monotonic() - began_s
    answer = ask(f"SELECT count(*), count(DISTINCT id), count(DISTINCT org) FROM '{exported.file}'")
    assert answer == [(ROWS, ROWS, 100)]
    print(
        f"\n{ROWS:,} jobs: written, read back and compared in {exported.seconds:.1f} s "
        f"({ROWS / exported.seconds:,.0f} jobs/s), {exported.bytes / ROWS:.0f} bytes a job in Parquet, "
        f"{table_bytes / ROWS:.0f} in the table ({with_indexes / ROWS:.0f} with indexes), "
        f"{memory / 1024:.0f} MiB more of memory; checked again in {check_s:.1f} s; "
        f"one org's {ROWS // 100:,} jobs found in {find_s:.2f} s"
    )
