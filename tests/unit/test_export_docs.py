"""Runs the queries of docs/export.md, and `windrow archive`, on exported files that the test writes."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import duckdb
import pytest

from archiver import parquet
from archiver.export_location import ExportLocation
from archiver.object_store import Files
from archiver.parquet import Manifest, Writer
from cli.main import main
from shard.history.export_reader import ColdJob
from shard.vocabulary import JobId, Micros, OrgId, QueueName, ShardName
from tests.unit.test_cluster_file import ONE
from tests.unit.test_export_form import JOB, MANIFEST

PAGE = (Path(__file__).resolve().parents[2] / "docs/export.md").read_text()
QUERIES = re.findall(r"^```sql\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
NAME = JobId("019a1f84-57ab-7305-ad66-e6f6eba156c2")
HISTORY = json.dumps(
    [{"failure": {"message": text}, "attempt": at + 1} for at, text in enumerate(("550 no such mailbox", "timed out"))]
)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Returns a folder with the exports of two days of s1 and one day of s2."""
    folder = tmp_path / "export"
    files = Files(ExportLocation.parse(str(folder)), make=True)
    acme = JOB._replace(id=NAME, attributes='{"plan": "pro"}', payload=b"hello", history=HISTORY)
    failed = JOB._replace(
        state="cancelled", reason="no longer\nwanted", lease=None, leased_at=None, result=None, kind="digest"
    )
    keep(files, "s1", "2026-09-29", [failed])
    keep(files, "s1", "2026-09-30", [acme, JOB, JOB._replace(org=OrgId("globex"))])
    keep(files, "s2", "2026-10-01", [JOB._replace(queue=QueueName("sms"), finished_at=at("2026-10-01"))])
    return folder


def at(day: str) -> Micros:
    return Micros((date.fromisoformat(day) - date(1970, 1, 1)).days * 86_400_000_000)


def keep(files: Files, shard: str, day: str, jobs: list[ColdJob]) -> None:
    folder = parquet.folder_of(ShardName(shard), 30, day)
    writer = Writer(files.writing(f"{folder}/jobs-cafecafe.parquet"))
    writer.add(parquet.batch_of(sorted(job._replace(finished_at=at(day)) for job in jobs)))
    about: dict[str, Any] = MANIFEST | writer.commit()._asdict() | {"shard": shard, "day": day}
    parquet.write_manifest(files, Manifest(**about))


def run(query: str, place: Path) -> list[tuple[Any, ...]]:
    # The rows go through Arrow, because DuckDB needs another package to convert times itself.
    with duckdb.connect() as connection:
        found: Any = connection.sql(query.replace("/var/lib/windrow/export", str(place)))
        return [tuple(row.values()) for row in found.to_arrow_table().to_pylist()]


# ── DuckDB ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_queries_of_the_page_answer_what_it_says(place: Path) -> None:
    days, spans, job, errors, manifests = (run(query, place) for query in QUERIES)
    assert days == [
        (date(2026, 9, 29), "mail", "digest", 1, 1),
        (date(2026, 9, 30), "mail", "greet", 2, 0),
        (date(2026, 10, 1), "sms", "greet", 1, 0),
    ]
    assert [row[:2] for row in spans] == [("greet", 3)]
    assert [(row[0], row[1], row[3], row[4]) for row in job] == [("s1", date(2026, 9, 30), "hello", "pro")]
    assert sorted(errors) == [("550 no such mailbox", 1), ("timed out", 1)]
    assert [(row[0], str(row[2]), row[3], row[5]) for row in manifests] == [
        ("s1", "2026-09-29", 1, 1),
        ("s1", "2026-09-30", 3, 2),
        ("s2", "2026-10-01", 1, 1),
    ]


def test_the_page_has_every_column() -> None:
    table = PAGE.partition("| column | type |")[2].partition("\n\n")[0]
    named = {name for row in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert named == set(parquet.SCHEMA.names)
    form = PAGE.partition("| in `manifest.json` |")[2].partition("\n\n")[0]
    named = {name for row in form.splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert named == set(Manifest.__dataclass_fields__)


# ── The command ──────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True)
class Shell:
    folder: Path
    capture: pytest.CaptureFixture[str]
    patch: pytest.MonkeyPatch

    def windrow(self, *arguments: str, export: str | None = None) -> tuple[int, str, str]:
        file = self.folder / "cluster.toml"
        file.write_text(ONE + (f'[archiver]\nexport = "{export}"\n' if export else ""))
        self.patch.setattr(sys, "argv", ["windrow", "archive", *arguments, "--config", str(file)])
        with pytest.raises(SystemExit) as ended:
            main()
        told = self.capture.readouterr()
        return int(ended.value.code or 0), told.out, told.err


@pytest.fixture
def shell(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Shell:
    return Shell(folder=tmp_path, capture=capsys, patch=monkeypatch)


def test_who_exports_nothing_is_told_so(shell: Shell) -> None:
    code, out, err = shell.windrow("list", "acme")
    assert (code, out) == (2, "")
    assert "cluster.toml: [archiver] sets no export, so nothing is exported" in err


def test_a_place_that_is_not_there_is_told_from_one_that_is_empty(shell: Shell, tmp_path: Path) -> None:
    code, out, err = shell.windrow("verify", export=str(tmp_path / "nowhere"))
    assert (code, out) == (3, "")
    assert str(tmp_path / "nowhere") in err
    assert not (tmp_path / "nowhere").exists()
    (tmp_path / "empty").mkdir()
    assert shell.windrow("verify", export=str(tmp_path / "empty")) == (0, "0 files verified: 0 jobs, 0 bytes\n", "")


def test_exported_jobs_are_listed_the_latest_first(shell: Shell, place: Path) -> None:
    code, out, err = shell.windrow("list", "acme", export=str(place))
    assert (code, err) == (0, "")
    assert [line.split()[0] for line in out.splitlines() if line[:2] == "01"] == [JOB.id, JOB.id, NAME, JOB.id]
    assert "2026-10-01 00:00:00Z  sms    greet   s2" in out
    code, out, err = shell.windrow("list", "acme", "--limit", "1", "--shard", "s1", export=str(place))
    assert (code, out.count("2026-09-30"), "raise --limit" in err) == (0, 1, True)
    assert shell.windrow("list", "nobody", export=str(place)) == (0, "", "no such jobs of org 'nobody' were exported\n")


def test_an_exported_job_as_json_has_all_its_fields(shell: Shell, place: Path) -> None:
    code, out, _ = shell.windrow("list", "acme", "--id", NAME, "--payload", "--json", export=str(place))
    document = json.loads(out)
    assert (code, document["payload"], document["result"]) == (0, "hello", "")
    assert (document["id"], document["attributes"], document["day"]) == (NAME, {"plan": "pro"}, "2026-09-30")
    assert (document["shard"], document["retention_days"], document["max_attempts"]) == ("s1", 30, None)
    assert document["finished_at"] == "2026-09-30T00:00:00Z"
    assert [attempt["failure"]["message"] for attempt in document["history"]] == ["550 no such mailbox", "timed out"]


def test_damaged_files_are_named_with_exit_code_1(shell: Shell, place: Path) -> None:
    code, out, err = shell.windrow("verify", export=str(place))
    assert (code, err) == (0, "")
    assert out.startswith("3 files verified: 5 jobs, ")
    file = place / "shard=s1/retention=30/day=2026-09-30/jobs-cafecafe.parquet"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    code, out, err = shell.windrow("verify", export=str(place))
    assert (code, out[:17]) == (1, "2 files verified:")
    assert err.startswith(f"{file} is damaged: its SHA-256 is ")
    code, out, _ = shell.windrow("verify", "--shard", "s1", "--json", export=str(place))
    troubles = {document["day"]: document["trouble"] for document in map(json.loads, out.splitlines())}
    assert (code, troubles["2026-09-29"], "is damaged" in troubles["2026-09-30"]) == (1, None, True)
