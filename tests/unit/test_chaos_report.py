"""The report of a chaos run names every violation."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from chaos import report
from chaos.run import Order, Told
from proof.checker import EXAMINED, Evidence, Violation
from proof.environment import environment
from proof.history import History

TOLD = Told(
    evidence=Evidence(history=History(), rows=[], books=[]),
    strikes=[],
    skipped=Counter(),
    unhealed=[],
    began_s=0.0,
    healed_s=1.0,
    ended_s=2.0,
)


@pytest.mark.parametrize("excused", [False, True])
@pytest.mark.parametrize("invariant", ["I1", "once", "a check that is new"])
def test_a_violation_of_any_invariant_is_in_the_report(tmp_path: Path, invariant: str, excused: bool) -> None:
    found = [Violation(invariant=invariant, what="job j is wrong", excused=excused)]
    report.write(tmp_path, Order(seed=1, seconds=1.0, out=tmp_path), TOLD, found, environment())
    document = json.loads((tmp_path / "report.json").read_text())
    markdown = (tmp_path / "report.md").read_text()
    verdict = {name: one["violations"] for name, one in document["verdict"].items() if not one["held"]}
    if excused:
        assert verdict == {}
        assert document["excused"] == {invariant: ["job j is wrong"]}
        assert "every invariant held" in markdown
    else:
        assert verdict == {invariant: ["job j is wrong"]}
        assert document["excused"] == {}
        assert f"### Violations of {invariant}\n\n- job j is wrong\n" in markdown
        assert "every invariant held" not in markdown
    assert document["verdict"].keys() == EXAMINED.keys() | verdict.keys()
