"""Runs the benchmark with very small numbers. These tests check that the benchmark measures, and which files and
processes remain after it. The measured figures have no meaning here."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from proof.dashboards import read_dashboards
from proof.prometheus import INSTALL

_ROOT = Path(__file__).parent.parent.parent
# The longest time for which a test waits. A test reaches this limit only if something hangs.
_PATIENCE_S = 280.0
# More processes would take more CPU to start than to measure.
_FEW = ("--producers", "1", "--workers", "1", "--routers", "1")


def _command(scenario: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "bench", scenario, "--runs", "1", *arguments]


@pytest.mark.turns(6)
def test_a_run_ends_with_a_table_and_with_all_samples_as_json(tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = subprocess.run(
        _command("throughput", *_FEW, "--jobs", "1000", "--shards", "2", "--batch", "10,100", "--out", str(out)),
        cwd=_ROOT,
        capture_output=True,
        text=True,
        timeout=_PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr

    rows = [line for line in done.stdout.splitlines() if line.startswith("|")]
    # There are two tables. Each has a heading, a rule, and three figures for each of four systems in two batch sizes.
    assert len(rows) == 2 * (2 + 24)
    assert len({row.count("|") for row in rows}) == 2
    assert rows[-1] in (out / "bench.md").read_text()
    assert [file.name for file in out.glob("*.png")] == ["throughput-by-batch.png"]

    told = json.loads((out / "bench.json").read_text())
    assert {"cpu", "cores", "kernel", "python", "commit", "date", "postgres"} <= told["environment"].keys()
    assert told["environment"]["postgres"]["settings"]["fsync"] == "on"
    samples = told["scenarios"]["throughput"]["samples"]
    assert {sample["figure"] for sample in samples} == {"enqueue", "drain", "whole life"}
    assert all(sample["jobs"] == 1000 and sample["jobs_per_s"] > 0 for sample in samples)
    for sample in samples:
        acts, messages = sample["counts"]["acts"], sample["counts"]["messages"]
        if sample["figure"] != "enqueue":
            assert acts["ack"]["calls"] > 0
            assert messages["jobs"] == messages["acks"] == (0 if sample["system"] == "limit" else 1000)
        if sample["figure"] != "drain":
            assert acts["enqueue_plain"]["calls"] > 0
        if sample["figure"] == "drain":
            assert acts["claim"]["rows"] == 1000


def _told(out: Path, *arguments: str) -> Any:
    """Returns the benchmark's results, read from its JSON file."""
    command = [sys.executable, "-m", "bench", *arguments, "--out", str(out)]
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=_PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads((out / "bench.json").read_text())


@pytest.mark.turns(6)
def test_small_calls_are_measured_beside_an_echo(tmp_path: Path) -> None:
    told = _told(tmp_path, "throughput", "--beside", "echo", *_FEW, "--runs", "1", "--jobs", "200", "--callers", "16")
    systems = {sample["system"] for sample in told["scenarios"]["throughput"]["samples"]}
    assert systems == {"windrow-unary", "echo", "windrow"}


@pytest.mark.turns(6)
def test_a_history_is_measured_turned_cold_and_dropped(tmp_path: Path) -> None:
    told = _told(tmp_path, "archive", "--runs", "1", "--jobs", "4000", "--api", "400", "--calls", "50")
    samples = told["scenarios"]["archive"]["samples"]
    assert [sample["depth"] for sample in samples if "run" in sample] == [0, 400, 4000]
    assert [sample["jobs"] for sample in samples if "drop_s" in sample] == [400, 3600]
    assert {file.name for file in tmp_path.glob("*.png")} == {"archive-depth.png"}


@pytest.mark.turns(6)
def test_an_archiver_beside_the_load_is_measured(tmp_path: Path) -> None:
    seconds = ("--before-seconds", "2", "--hold-minutes", "0.05", "--after-seconds", "1")
    command = ("load", "--beside", "archiver", "--peers", "none", "--rate", "100", "--days", "4", "--day-jobs", "500")
    told = _told(tmp_path, *command, *seconds)
    (sample,) = told["scenarios"]["load"]["samples"]
    assert sample["archived"]["turned_cold"] == 2000
    # The second number is for runs after three o'clock, when the jobs of 31 days ago are dropped too.
    assert sample["archived"]["dropped"] in (1000, 1500)


@pytest.mark.turns(6)
def test_an_outage_is_measured_and_loses_nothing(tmp_path: Path) -> None:
    samples = _samples("outage", "--kills", "2", "--rate", "10", "--orgs", "6", "--seconds", "1", out=tmp_path)
    assert [sample["sort"] for sample in samples[:-1]] == ["restart", "restart", "fail-over", "fail-over"]
    assert all(sample["served_s"] > 0 for sample in samples[:-1])
    _must_hold(samples[-1])
    assert samples[-1]["verdict"]["jobs"] > 0
    assert (tmp_path / "outage.png").exists()


@pytest.mark.turns(6)
def test_a_router_under_attack_is_measured_with_a_quiet_org_beside_it(tmp_path: Path) -> None:
    attacks = ["unread-answers", "malformed", "old-ids"]
    short = ("--before-seconds", "1", "--seconds", "2", "--after-seconds", "1", "--rate", "20", "--memory", "2000")
    samples = _samples("hostile", "--attacks", ",".join(attacks), *short, out=tmp_path)
    assert [sample["attack"] for sample in samples] == attacks
    assert all(sample["resident_mib"] for sample in samples)
    assert all(sample["quiet_org_ms"]["before"]["calls"] > 0 for sample in samples)
    # The only status is INVALID_ARGUMENT.
    assert "status 3" in samples[-1]["attacker_saw"]
    assert "status 0" not in samples[-1]["attacker_saw"]
    assert "seed" in samples[1]["attacker_saw"]
    assert all(sample["processes_that_ended"] == 0 for sample in samples)
    assert (tmp_path / "hostile.png").exists()


@pytest.mark.turns(6)
def test_proofs_are_replaced_under_load_and_nothing_fails(tmp_path: Path) -> None:
    (sample,) = _samples(
        "rotations", "--rotations", "24", "--rate", "100", "--pause", "0.6", "--routers", "1", out=tmp_path
    )
    assert sample["rotations"] == {"API keys": 8, "JWKS": 8, "certificates": 8}
    # For each kind of proof, at least one old proof was refused before the run ended.
    assert all(sample["effect_s"].values())
    assert sample["stored"] > 0
    assert (sample["failed"], sample["missing"]) == ({}, 0)


@pytest.mark.turns(6)
def test_a_cluster_that_grows_is_measured_and_loses_nothing(tmp_path: Path) -> None:
    samples = _samples("grow", "--jobs", "1000", "--orgs", "100", "--rate", "30", "--seconds", "2", out=tmp_path)
    first, *phases, over_time, last = samples
    assert [move["slots"] for move in first["moves"]] == [5461, 5461]
    assert 0 < first["moves"][0]["jobs"] == first["moves"][1]["jobs"] < 1000
    assert [phase["name"] for phase in phases] == ["before", "growing", "after", "draining", "in the end"]
    assert all(phase["failed"] == 0 and phase["pickup"]["jobs"] > 0 for phase in phases)
    assert {slots for _, slots in over_time["over_time"]["slots: of the third shard"]} >= {0, 5461}
    _must_hold(last)
    assert last["verdict"]["jobs"] > 1000
    assert (tmp_path / "grow.png").exists()


@pytest.mark.turns(6)
def test_the_parts_of_many_routers_are_measured(tmp_path: Path) -> None:
    few = ("--shards", "20", "--routers", "3", "--members", "2", "--listeners", "3", "--rings", "20", "--jobs", "5")
    short = ("--changes", "3", "--seconds", "1", "--settle-seconds", "1", "--processes", "1")
    catalog, bells, shard, jobs, router = _samples("scale", *few, *short, out=tmp_path)
    assert [change["seen"] for change in catalog["changes"]] == [3] * 3
    whole, nothing, one_slot = (read["bytes"] for read in catalog["reads"])
    assert whole > one_slot > nothing > 0
    assert bells["rings"] > 0
    # Each process has one connection for the queue, one for lists and one that listens.
    backends = {one["application"]: one["count"] for one in shard["backends"]}
    assert backends["windrow"] >= 6
    assert backends["windrow doorbell"] == 3
    assert jobs["jobs"] == len(jobs["late_us"]) == 5
    assert router["shards"] == 2
    assert router["files"] >= 12


@pytest.mark.turns(6)
def test_wakeups_by_operators_are_measured(tmp_path: Path) -> None:
    samples = _samples("wakeups", "--tries", "2", out=tmp_path)
    calls = {sample["call"]: sample["took"] for sample in samples}
    assert set(calls) == {"Enqueue", "RedriveQueue", "RedriveJobs", "RestoreJobs", "ResumeQueue", "AlterJobs"}
    assert all(len(took) == 2 and min(took) > 0 for took in calls.values())


@pytest.mark.turns(6)
def test_searches_and_claims_beside_a_cancel_are_measured(tmp_path: Path) -> None:
    short = ("--jobs", "20000", "--searches", "2", "--rounds", "1", "--seconds", "1", "--consumers", "1")
    samples = _samples("bulk", *short, out=tmp_path)
    searches = {sample["wanted"]: sample["took"] for sample in samples if sample["sample"] == "search"}
    assert {wanted: len(took) for wanted, took in searches.items()} == {
        "one job in ten": 2,
        "a single job": 2,
        "none": 2,
    }
    beside = {sample["beside"]: sample for sample in samples if sample["sample"] == "claims"}
    assert beside[True]["cancelled"] > 0 == beside[False]["cancelled"]
    assert all(sample["claims"] for sample in beside.values())


@pytest.mark.turns(6)
@pytest.mark.skipif(shutil.which("prometheus") is None, reason=f"prometheus is not installed: {INSTALL}")
def test_every_panel_of_the_dashboards_is_drawn_from_what_prometheus_answers(tmp_path: Path) -> None:
    _, *drawn = _samples("dashboards", "--minutes", "0.3", out=tmp_path)
    shipped = {
        (f"dashboard-{Path(name).stem}", panel["title"])
        for name, one in read_dashboards().items()
        for panel in one["panels"]
    }
    assert {(panel["dashboard"], panel["panel"]) for panel in drawn} == shipped
    assert len(drawn) == len(shipped)
    # A query that is refused or not answered fails the run. In so short a run some panels have no data yet.
    told = {panel["panel"] for panel in drawn if any(value for line in panel["lines"].values() for _, value in line)}
    assert told >= {"Routers", "Jobs", "Calls", "Shards that can be used", "Jobs enqueued", "Acts", "Leases settled"}
    assert {file.stem for file in tmp_path.glob("*.png")} == {name for name, _ in shipped}


def _samples(*command: str, out: Path) -> list[Any]:
    done = subprocess.run(
        [sys.executable, "-m", "bench", *command, "--out", str(out)],
        cwd=_ROOT,
        capture_output=True,
        text=True,
        timeout=_PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: list[Any] = json.loads((out / "bench.json").read_text())["scenarios"][command[0]]["samples"]
    return found


def _must_hold(sample: Any) -> None:
    """Asserts that the figures that must be 0 or a given share of the slots have these values. Does not check
    durations."""
    assert [one for one in sample["demands"] if not one["holds"] and not one["must_be"].startswith("≤")] == []


def test_a_stopped_run_leaves_no_process_behind() -> None:
    # The run gets a process group of its own, to which the test sends the signal as a terminal does.
    running = subprocess.Popen(
        _command("throughput", *_FEW, "--jobs", "1000000"),
        cwd=_ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert running.stderr is not None
        for line in running.stderr:
            if "warm-up" in line:
                break
        family = _descendants(running.pid)
        # Postgres may be a child process with children. Besides Postgres there are two clients of four systems, and one
        # router with its supervisor.
        assert len(family) >= 2 + 8
        os.killpg(running.pid, signal.SIGINT)
        _, told = running.communicate(timeout=60)
    finally:
        # Kill the run even if the test is interrupted: otherwise the benchmark would run for minutes.
        if running.poll() is None:
            os.killpg(running.pid, signal.SIGKILL)
    assert running.returncode == 130, told
    assert not [pid for pid in family if Path(f"/proc/{pid}").exists()]


def _descendants(root: int) -> set[int]:
    """Returns all descendants of this process."""
    parents = dict(_parents())
    found = {root}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {root}


def _parents() -> list[tuple[int, int]]:
    pairs: list[tuple[int, int]] = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = stat.read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        pairs.append((int(stat.parent.name), int(text.rpartition(")")[2].split()[1])))
    return pairs
