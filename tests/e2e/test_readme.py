"""Runs the examples of the READMEs against a cluster."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import RunningCluster
from windrow import NodeState, SyncClient

ROOT = Path(__file__).resolve().parents[2]
RUN_S = 120.0
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def blocks(page: str, language: str) -> list[str]:
    return [text for kind, text in FENCE.findall((ROOT / page).read_text()) if kind == language]


def run(command: list[str], cluster: RunningCluster, **more: str) -> subprocess.CompletedProcess[str]:
    environ = os.environ | {"WINDROW_ADDRESS": cluster.address} | more
    return subprocess.run(command, env=environ, cwd=ROOT, capture_output=True, text=True, timeout=RUN_S, check=False)


def test_every_windrow_command_of_the_readme_does_what_it_says(cluster: RunningCluster) -> None:
    lines = [line for block in blocks("README.md", "console") for line in block.splitlines()]
    commands = [line.removeprefix("$ ./run windrow ") for line in lines if line.startswith("$ ./run windrow ")]
    assert len(commands) >= 5
    for command in commands:
        done = run([str(Path(sys.executable).parent / "windrow"), *shlex.split(command)], cluster)
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"


def test_every_run_command_of_the_readme_exists() -> None:
    named = set(re.findall(r"\./run (\w+)", (ROOT / "README.md").read_text()))
    listed = subprocess.run([str(ROOT / "run"), "help"], capture_output=True, text=True, check=True).stdout
    assert named >= {"up", "demo", "test"}
    assert named <= set(re.findall(r"\w+", listed))


def test_the_program_of_the_readme_stores_a_job_and_works_it(cluster: RunningCluster) -> None:
    (program,) = blocks("README.md", "python")
    done = run([sys.executable, "-c", program], cluster)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^stored [0-9a-f-]{36}$", done.stdout, re.MULTILINE)
    assert "sending to ada@example.com attempt 1" in done.stdout


@pytest.mark.parametrize("at", range(len(blocks("clients/python/README.md", "python"))))
def test_every_program_of_the_clients_readme_runs(at: int, cluster: RunningCluster, app_dsn: str) -> None:
    program = blocks("clients/python/README.md", "python")[at].replace("postgresql://localhost/app", app_dsn)
    if "windrow.run(worker)" in program:
        # Normally the worker runs until a signal comes. A `stop()` before `run()` ends the worker in its first
        # iteration.
        program = program.replace("windrow.run(worker)", "worker.stop(); windrow.run(worker)")
    # No collector is running.
    done = run([sys.executable, "-c", program], cluster, OTEL_SDK_DISABLED="true")
    assert done.returncode == 0, done.stderr


def test_the_programs_of_the_page_about_schedules_declare_them(cluster: RunningCluster) -> None:
    program, deploy = blocks("docs/schedules.md", "python")
    # Other tests cover what a worker does. The worker of this test ends when its schedules are declared.
    declare = "import asyncio; asyncio.run(worker._declarations.keep())"
    done = run([sys.executable, "-c", program.replace("windrow.run(worker)", declare)], cluster)
    assert done.returncode == 0, done.stderr
    with SyncClient(cluster.address, org="shop") as client:
        assert [one.name for one in client.list_schedules(declared_by="shop-worker")] == [
            "refresh-prices",
            "send_digest",
        ]
        done = run([sys.executable, "-c", deploy], cluster)
        assert done.returncode == 0, done.stderr
        assert [one.name for one in client.list_schedules(declared_by="shop-deploy")] == ["digest"]


def test_the_program_of_the_page_about_workflows_starts_one(cluster: RunningCluster) -> None:
    program = blocks("docs/workflows.md", "python")[0]
    done = run([sys.executable, "-c", program], cluster)
    assert done.returncode == 0, done.stderr
    with SyncClient(cluster.address, org="acme") as client:
        workflow, counts = client.get_workflow(done.stdout.strip())
        assert (workflow.name, workflow.nodes, counts[NodeState.BLOCKED]) == ("nightly", 101, 1)
        client.cancel_workflow(workflow.id)


@pytest.mark.parametrize(("at", "says"), [(0, "the stream ended with OK"), (1, "a card to ada")])
def test_every_program_of_the_page_about_streams_works_its_jobs(at: int, says: str, cluster: RunningCluster) -> None:
    programs = blocks("docs/streams.md", "python")
    assert len(programs) == 2
    done = run([sys.executable, "-c", programs[at]], cluster)
    assert done.returncode == 0, done.stderr
    assert says in done.stdout
