"""Checks the alert rules: they name only metrics that exist, and each alert has a runbook entry and a unit test.

`python -m tests.alerts` prints what is wrong; the exit code is 1 if anything is wrong.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from shard.metrics import DECLARED

ROOT = Path(__file__).resolve().parent.parent
PROMETHEUS = ROOT / "deploy" / "prometheus"
TESTS = ("rules.test.yml", "rules.hours.test.yml")
_METRIC = re.compile(r"\bwindrow[a-z0-9_:]*")


def series_names() -> set[str]:
    """Returns the names of all series of the metrics."""
    suffixes = {"counter": ("",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
    return {one.name + suffix for one in DECLARED for suffix in suffixes[one.kind]}


def faults(rules: dict[str, Any], tests: dict[str, Any], runbook: str) -> Iterator[str]:
    """Yields one sentence for each fault."""
    every = [rule for group in rules["groups"] for rule in group["rules"]]
    known = series_names() | {rule["record"] for rule in every if "record" in rule}
    tested = {
        case["alertname"] for test in tests["tests"] for case in test.get("alert_rule_test", ()) if case["exp_alerts"]
    }
    headings = set(re.findall(r"^## (\w+)$", runbook, re.MULTILINE))
    alerts = {rule["alert"] for rule in every if "alert" in rule}
    for rule in every:
        name = rule.get("alert", rule.get("record"))
        # The text in quotes is the value of a label, and not the name of a metric.
        for unknown in sorted(set(_METRIC.findall(re.sub(r'"[^"]*"', "", rule["expr"]))) - known):
            yield f"{name}: no metric is called {unknown}"
    for name in sorted(alerts):
        if name not in headings:
            yield f"{name}: docs/runbook.md has no heading of this name"
        if name not in tested:
            yield f"{name}: {' and '.join(TESTS)} have no case in which it fires"
    for rule in every:
        if "alert" in rule and rule["annotations"].get("runbook") != f"docs/runbook.md#{rule['alert'].lower()}":
            yield f"{rule['alert']}: its annotation `runbook` does not link its entry"
    for name in sorted((headings | tested) - alerts):
        yield f"{name}: there is no such alert"


def main() -> int:
    found = list(
        faults(
            yaml.safe_load((PROMETHEUS / "rules.yml").read_text()),
            {"tests": [test for file in TESTS for test in yaml.safe_load((PROMETHEUS / file).read_text())["tests"]]},
            (ROOT / "docs" / "runbook.md").read_text(),
        )
    )
    print("\n".join(found))
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
