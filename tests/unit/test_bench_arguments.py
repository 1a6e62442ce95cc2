"""How `./run bench` parses its arguments."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from bench.__main__ import read_order
from bench.catalog import SCENARIOS
from bench.scenarios.load import Beside
from bench.scenarios.throughput.scenario import Share
from bench.systems import PEERS

_ROOT = Path(__file__).parent.parent.parent


def _plan(*arguments: str) -> Any:
    ((_, plan),) = read_order([*arguments]).parts
    return plan


def test_without_a_name_every_scenario_is_measured_with_every_peer() -> None:
    parts = read_order([]).parts
    # The scenario `dashboards` is left out, because it measures nothing.
    assert list(dict.fromkeys(name for name, _ in parts)) == [name for name in SCENARIOS if name != "dashboards"]
    assert set(PEERS) <= set(parts[0][1].systems)


def test_quick_measures_no_peers() -> None:
    parts = read_order(["--quick"]).parts
    assert 1 < len(parts) < len(SCENARIOS)
    assert not [plan for _, plan in parts if set(getattr(plan, "systems", ())) & set(PEERS)]


def test_a_scenario_is_chosen_by_its_name_and_takes_its_own_options() -> None:
    plan = _plan("throughput", "--batch", "10,100", "--peers", "all", "--runs", "7")
    assert plan.batches == (10, 100)
    assert plan.runs == 7
    assert set(PEERS) < set(plan.systems)
    plan = _plan("load", "--hold-minutes", "10", "--beside", "snapshot,readers", "--peers", "pgmq,awa")
    assert plan.during_s == 600
    assert plan.beside == plan.peers_beside == (Beside.SNAPSHOT, Beside.READERS)
    assert plan.systems == ("windrow", "pgmq", "awa")


def test_windrow_is_measured_beside_a_limit_an_echo_or_telemetry() -> None:
    assert _plan("throughput", "--peers", "pgmq").systems == (
        "windrow",
        "windrow-batches",
        "windrow-raw",
        "limit",
        "pgmq",
    )
    echo = _plan("throughput", "--beside", "echo")
    assert (echo.systems, echo.batches) == (("windrow-unary", "echo", "windrow"), (1,))
    telemetry = _plan("throughput", "--beside", "telemetry")
    assert telemetry.systems == ("windrow", "windrow-traced", "windrow-measured", "windrow-telling")
    assert telemetry.batches == (1, 100)
    assert _plan("throughput", "--beside", "echo", "--batch", "10").batches == (10,)


def test_routers_and_shards_vary_while_every_process_keeps_its_share() -> None:
    plan = _plan("throughput", "--routers", "1,2", "--shards", "1,4", "--share", "0.1,0.2,0.8")
    assert (plan.routers, plan.shards) == ((1, 2), (1, 4))
    assert plan.share == Share(router=0.1, postgres=0.2, clients=0.8)
    assert plan.systems == ("windrow", "windrow-batches", "windrow-raw")
    with pytest.raises(SystemExit):
        _plan("throughput", "--share", "0.1,0.2")


def _commands() -> list[str]:
    """Returns each `./run bench …` command of the pages, except commands with placeholders."""
    pages = [_ROOT / "bench" / "README.md", *(_ROOT / "docs").rglob("*.md")]
    found = {
        command.strip()
        for page in pages
        for line in page.read_text().replace("\n--", " --").splitlines()
        for command in re.findall(r"\./run bench\b([^`#|)]*)", line)
    }
    return sorted(command for command in found if "SCENARIO" not in command)


@pytest.mark.parametrize("command", _commands())
def test_every_command_of_a_page_is_understood(command: str) -> None:
    assert read_order(shlex.split(command)).parts


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_scenario_has_a_plan_without_options(name: str) -> None:
    assert _plan(name) is not None


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["nothing"], "invalid choice"),
        (["throughput", "--batch", "0"], "must be a whole number from 1 to 1,000, not '0'"),
        (["throughput", "--batch", "ten"], "not 'ten'"),
        (["throughput", "--peers", "kafka"], "there is no peer 'kafka'; there are: pgmq"),
        (["load", "--beside", "noise"], "there is no disturbance 'noise'; there are: nothing"),
        (["load", "--hold-minutes", "-1"], "must be a number above 0"),
        (["hostile", "--attacks", "words"], "there is no attack 'words'; there are: unread-answers"),
        (["--quick", "throughput"], "--quick is for all scenarios together"),
        (["throughput", "--out", "/no/such/folder"], "there is no folder /no/such for --out"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_a_reason(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        read_order(arguments)
    assert ended.value.code == 2
    assert told in capsys.readouterr().err


def test_results_go_to_the_given_folder(tmp_path: Path) -> None:
    assert read_order(["idle", "--out", str(tmp_path / "new")]).out == tmp_path / "new"
    assert read_order(["--out", str(tmp_path)]).out == tmp_path
    assert read_order(["--out", str(tmp_path), "idle"]).out == tmp_path
    assert read_order(["idle"]).out.name.endswith("-idle")


@pytest.mark.parametrize("of", [[], *([name] for name in SCENARIOS)])
def test_help_is_shown_as_it_is_written(of: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        read_order([*of, "--help"])
    assert ended.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    for name in of or SCENARIOS:
        assert SCENARIOS[name].help in shown
