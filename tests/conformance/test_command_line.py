"""The command line, as README.md and docs/clients.md show it. The Python client is a client under test here, too."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conformance.__main__ import main
from tests.conformance.scenarios import SCENARIOS
from tests.routers import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "tests/conformance/README.md").read_text()
PAGE = (ROOT / "docs/clients.md").read_text()
NAMES = [scenario.name for scenario in SCENARIOS]
PYTHON_CLIENT = ("-m", "tests.conformance.python_worker")
REFERENCE = (sys.executable, "-m", "tests.conformance.reference")
BLOCK = re.compile(r"^```sh\n(.*?)^```$", re.DOTALL | re.MULTILINE)
RUN_S = 240.0


def commands(text: str) -> list[list[str]]:
    """Returns the lines of the first block of commands. In these lines, `python` is the Python that runs this test."""
    found = BLOCK.search(text)
    assert found is not None
    return [shlex.split(line.replace(".venv/bin/python", sys.executable)) for line in found[1].splitlines()]


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=RUN_S, check=False
    )


@pytest.fixture(scope="module")
def of_python_client() -> dict[str, dict[str, object]]:
    """Returns the outcomes of the command that docs/clients.md shows."""
    (command,) = commands(PAGE.partition("## Check a client library\n")[2])
    assert tuple(command[-2:]) == PYTHON_CLIENT
    done = run([*command[:3], "--json", *command[3:]])
    outcomes = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == (0 if all(outcome["passed"] for outcome in outcomes) else 1), done.stderr
    return {outcome["scenario"]: outcome for outcome in outcomes}


@pytest.mark.parametrize("name", NAMES)
def test_the_python_client_passes(name: str, of_python_client: dict[str, dict[str, object]]) -> None:
    outcome = of_python_client[name]
    assert outcome["passed"], f"expected: {outcome['expected']}; seen: {outcome['seen']}"


def test_the_list_has_every_scenario_with_what_it_asks_for() -> None:
    listed = run(commands(README)[0])
    assert listed.returncode == 0, listed.stderr
    assert [line.split()[0] for line in listed.stdout.splitlines()] == NAMES
    assert all(scenario.what in listed.stdout for scenario in SCENARIOS)


def test_a_client_that_ends_at_once_fails_with_what_it_printed(capsys: pytest.CaptureFixture[str]) -> None:
    client = [sys.executable, "-c", "raise SystemExit('no such library')"]
    assert main(["--run", "--only", "work", "--only", "stop", "--", *client]) == 1
    told = " ".join(capsys.readouterr().out.split())
    assert "FAIL work" in told
    assert "FAIL stop" in told
    assert "expected: an ack of each job" in told
    assert "the client ended with code 1" in told
    assert "it printed: …no such library" in told
    assert "0 of 2 passed" in told


def test_a_command_that_cannot_be_started_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--run", "--only", "work", "--", "no-such-program-at-all"]) == 1
    assert "No such file" in capsys.readouterr().out


@pytest.mark.parametrize("line", ["--run", "--run --only nothing -- true", "--serve nothing", "--list --run", ""])
def test_a_command_line_without_sense_is_refused(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        main(line.split())
    assert refused.value.code == 2
    assert "usage" in capsys.readouterr().err


def test_the_chosen_scenarios_run_and_are_told_as_json() -> None:
    command = commands(README)[2]
    done = run([*command[: command.index("--")], "--", *REFERENCE])
    assert done.returncode == 0, done.stdout
    outcomes = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(outcome["scenario"], outcome["passed"]) for outcome in outcomes] == [("drain", True), ("half-open", True)]
    assert all(outcome["expected"] and outcome["seen"] for outcome in outcomes)


def test_one_scenario_is_served_to_a_client_that_is_started_by_hand() -> None:
    command = commands(README)[3]
    address = command.index("--address") + 1
    # The page's port may be in use.
    command[address] = "127.0.0.1:0"
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as serving:
        assert serving.stderr is not None
        told = next(line for line in serving.stderr if line.startswith("env "))
        with subprocess.Popen([*shlex.split(told)[:-1], *REFERENCE], cwd=ROOT) as client:
            out, _ = serving.communicate(timeout=PATIENCE_S)
            client.kill()
    assert serving.returncode == 0, out
    assert out.startswith("pass  drain ")


def test_the_readme_shows_these_four_commands() -> None:
    assert [command[3] for command in commands(README)] == ["--list", "--run", "--run", "--serve"]
    assert README.count("```sh") == 1
