"""How `./run chaos` parses its arguments."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from chaos.__main__ import read_order
from chaos.faults import FAULTS

PAGE = Path(__file__).resolve().parents[2] / "docs/chaos.md"


def test_minutes_seed_folder_and_faults_are_what_was_said(tmp_path: Path) -> None:
    order = read_order(
        [
            *("--minutes", "0.5", "--seed", "7", "--out", str(tmp_path / "new")),
            *("--only", "fail-over,fill-disk", "--router-memory", "512"),
        ]
    )
    assert (order.seconds, order.seed, order.out) == (30.0, 7, tmp_path / "new")
    assert order.faults == ("fail-over", "fill-disk")
    assert order.router_bytes_max == 512 * 1024 * 1024


def test_without_arguments_every_fault_may_be_drawn_and_the_seed_is_told() -> None:
    order = read_order([])
    assert set(order.faults) == set(FAULTS)
    assert str(order.seed) in order.out.name


@pytest.mark.parametrize(
    "wrong", [["--minutes", "0"], ["--only", "kill-everything"], ["--out", "/tmp"], ["--seed", "x"]]
)
def test_what_makes_no_sense_is_refused(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        read_order(wrong)
    assert ended.value.code == 2
    assert wrong[0] in capsys.readouterr().err


def test_every_command_of_the_page_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    commands = re.findall(r"^\./run chaos(.*?)(?:#.*)?$", PAGE.read_text(), re.MULTILINE)
    assert len(commands) >= 3
    for command in commands:
        read_order(shlex.split(command))


def test_the_page_names_every_fault() -> None:
    assert set(FAULTS) <= set(re.findall(r"`([a-z-]+)`", PAGE.read_text()))
