"""The benchmark, with numbers so small that its figures mean nothing: whether it measures at all, and whether it would
notice jobs that were lost."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import pytest

from bench.client_process import Client
from bench.system import Site, Wrong
from bench.tally import Tally

_ROOT = Path(__file__).parent.parent.parent
_TINY = ("--jobs", "2000", "--runs", "1", "--shards", "2", "--batch", "100")


def _command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "bench", *_TINY, *arguments]


def test_a_run_ends_with_a_table_and_with_all_samples_as_json(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    done = subprocess.run(
        _command("--json", str(file)), cwd=_ROOT, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr

    rows = [line for line in done.stdout.splitlines() if line.startswith("|")]
    # A head, a rule, and three figures of two systems.
    assert len(rows) == 2 + 6
    assert all(row.count("|") == rows[0].count("|") for row in rows)

    told = json.loads(file.read_text())
    assert {"cpu", "cores", "kernel", "python", "commit", "date", "postgres"} <= told["environment"].keys()
    assert told["environment"]["postgres"]["settings"]["fsync"] == "on"
    assert {sample["figure"] for sample in told["samples"]} == {"enqueue", "drain", "whole life"}
    assert all(sample["jobs"] == 2000 and sample["jobs_per_s"] > 0 for sample in told["samples"])
    assert len(told["summary"]) == 6


def test_a_stopped_run_leaves_no_process_behind() -> None:
    # A process group of its own, which gets the signal as from a terminal: this process, its clients, and the routers.
    running = subprocess.Popen(
        _command("--jobs", "1000000"),
        cwd=_ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert running.stderr is not None
    with running.stderr:
        for line in running.stderr:
            if "warm-up" in line:
                break
        family = _descendants(running.pid)
        assert len(family) >= 2 + 4 + 2
        os.killpg(running.pid, signal.SIGINT)
        running.stderr.read()
    assert running.wait(timeout=60) == 130
    assert not [pid for pid in family if Path(f"/proc/{pid}").exists()]


async def test_jobs_that_never_come_out_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.client_process.STUCK_S", 0.05)
    with pytest.raises(BaseExceptionGroup) as caught:
        await _drained(90, tmp_path, total=100)
    assert caught.group_contains(Wrong, match="only 90 of 100 jobs came out")


async def test_jobs_that_come_out_twice_are_noticed(tmp_path: Path) -> None:
    with pytest.raises(Wrong, match="110 jobs came out, and 100 had gone in"):
        await _drained(110, tmp_path, total=100)


async def _drained(given: int, folder: Path, *, total: int) -> None:
    """Drains a system that gives so many jobs, where there should be `total`."""
    system = _Loser(Site(address="", dsns={}, callers=2, payload=""))
    system.left = given
    file = folder / "tally"
    file.touch()
    client = Client(system, Tally(file, places=1, mine=0), callers=2)
    async with asyncio.timeout(30):
        await client.drain(total, batch=55)


class _Loser:
    """Gives another number of jobs than it was given."""

    title: ClassVar[str] = "loser"

    def __init__(self, site: Site) -> None:
        self.left = 0

    async def prepare(self, run: str) -> None: ...

    async def enqueue(self, jobs: int) -> None: ...

    async def drain(self, jobs_max: int) -> int:
        given = min(jobs_max, self.left)
        self.left -= given
        await asyncio.sleep(0)
        return given

    async def check(self, jobs: int) -> None: ...

    async def close(self) -> None: ...


def _descendants(root: int) -> set[int]:
    """Every process below this one."""
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
