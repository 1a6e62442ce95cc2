"""Runs the demo as a user does, with fewer events. The demo passes, it fails if the totals are wrong, and it always
cleans up."""

from __future__ import annotations

import asyncio
import io
import signal
import subprocess
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
import psycopg
import pytest
from rich.console import Console

from cli import demo
from examples.pushes import tables
from examples.pushes.totals import Difference, Push, key_of, read_pushes, total
from proof.processes import runs
from windrow import uuid7

# Three Postgres servers and four processes start, which takes half a minute on a busy machine.
pytestmark = pytest.mark.timeout(300)

ROOT = Path(__file__).resolve().parent.parent.parent
_RUN = "import sys; from cli.demo import run_demo; sys.exit(run_demo(events={}, faults={}, seconds={}))"


def run(*, events: int, faults: bool = False, seconds: float = 0.0, timeout_s: float = 280.0) -> tuple[int, str]:
    """Runs the demo in a process of its own. Returns its exit code and output."""
    with started(events=events, faults=faults, seconds=seconds) as process:
        output, _ = process.communicate(timeout=timeout_s)
    return process.returncode, output


@contextmanager
def started(*, events: int, faults: bool = False, seconds: float = 0.0) -> Generator[subprocess.Popen[str], None, None]:
    code = _RUN.format(events, faults, seconds)
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    with process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
                process.wait(30)


def test_every_push_is_counted_once() -> None:
    code, output = run(events=2000)
    assert code == 0, output
    assert "every acknowledged job is found, succeeded: 2,000" in output
    assert "to the last digit" in output
    assert "WRONG" not in output


def test_every_push_is_counted_once_while_everything_is_being_killed() -> None:
    code, output = run(events=2000, faults=True, seconds=6.0)
    assert code == 0, output
    assert "2 × Postgres" in output
    assert "every acknowledged job is found, succeeded: 2,000" in output


@pytest.mark.turns(3)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_running_however_the_demo_ends(number: signal.Signals) -> None:
    # The demo works slowly enough that the signal arrives in the middle of the work.
    with started(events=2000, faults=True, seconds=60.0) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if " done" in line:
                break
        family = psutil.Process(process.pid).children(recursive=True)
        # The demo's child processes: three Postgres servers with their own processes, two routers, and two workers. One
        # worker may have just been killed.
        assert len(family) >= 6
        process.send_signal(number)
        process.wait(60)
    _, alive = psutil.wait_procs(family, timeout=40)
    # Orphaned processes must have ended too, but they may still be zombies.
    assert [one for one in alive if runs(one)] == []


async def applied(database: str, jobs: Sequence[tuple[str, Push]]) -> None:
    async with tables.open_pool(database) as pool, pool.connection() as connection:
        await tables.apply(connection, jobs)


async def test_the_sums_of_the_database_equal_those_of_the_file(empty_dsn: str) -> None:
    pushes = read_pushes()
    await applied(empty_dsn, [(uuid7(), push) for push in pushes])
    assert await demo.compare(empty_dsn, pushes) == []


async def test_workers_that_got_the_same_jobs_count_each_once(empty_dsn: str) -> None:
    pushes = read_pushes(most=1000)
    jobs = [(uuid7(), push) for push in pushes]
    parts = [jobs[at : at + 200] for at in range(0, 1000, 40)]
    # The transactions lock the same rows in opposite orders.
    async with asyncio.TaskGroup() as group:
        for at, part in enumerate(parts):
            group.create_task(applied(empty_dsn, part if at % 2 else part[::-1]))
    assert await demo.compare(empty_dsn, pushes) == []
    async with tables.open_pool(empty_dsn) as pool, pool.connection() as connection:
        counted = await tables.read_applied(connection)
    assert counted == (1000, sum(map(len, parts)) - 1000)


async def test_a_sum_that_is_off_by_one_is_found_and_shown(empty_dsn: str) -> None:
    pushes = read_pushes(most=500)
    await applied(empty_dsn, [(uuid7(), push) for push in pushes])
    key = key_of(pushes[0])
    right = total(pushes)[key]
    with psycopg.connect(empty_dsn, autocommit=True) as connection:
        connection.execute(
            "UPDATE totals SET deletions = deletions + 1 WHERE (org, repo, week) = (%s, %s, %s)", tuple(key)
        )
    found = await demo.compare(empty_dsn, pushes)
    assert found == [Difference(key, right, right._replace(deletions=right.deletions + 1))]

    verdict = demo.Verdict(records={}, missing=[], imbalances=[], differences=found, rows=1, repeats=0)
    console = Console(record=True, width=200, file=io.StringIO())
    demo.report(console, demo.Run(pushes=pushes, enqueue_s=1.0, total_s=1.0), verdict)
    assert not verdict.passed
    shown = console.export_text()
    assert "WRONG not true: the totals equal those of the file" in shown
    assert " ".join(key) in shown


async def test_a_row_that_is_missing_is_found(empty_dsn: str) -> None:
    pushes = read_pushes(most=500)
    await applied(empty_dsn, [(uuid7(), push) for push in pushes])
    key = key_of(pushes[0])
    with psycopg.connect(empty_dsn, autocommit=True) as connection:
        connection.execute("DELETE FROM totals WHERE (org, repo, week) = (%s, %s, %s)", tuple(key))
    assert await demo.compare(empty_dsn, pushes) == [Difference(key, total(pushes)[key], None)]
