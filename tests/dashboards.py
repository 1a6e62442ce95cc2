"""Checks Grafana's dashboards: each query names only metrics and labels that exist, and each panel has a unit and a
description.

`python -m tests.dashboards` prints what is wrong; the exit code is 1 if anything is wrong.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import Any

import yaml

from proof.dashboards import legend_labels, read_dashboards
from shard.metrics import DECLARED
from tests.alerts import PROMETHEUS

# The labels that Prometheus adds to every series.
_OF_TARGETS = frozenset({"instance", "job"})
_SERIES = re.compile(r"\b(up|windrow[a-z0-9_:]*)\b(?:\{([^}]*)\})?")
_QUOTED = re.compile(r'"[^"]*"')


def labels_of_series() -> dict[str, frozenset[str]]:
    """Returns the labels of every series that a query may name."""
    suffixes = {"counter": ("",), "gauge": ("",), "histogram": ("_sum", "_count")}
    found = {"up": _OF_TARGETS}
    for one in DECLARED:
        found |= {one.name + suffix: _OF_TARGETS | set(one.labels) for suffix in suffixes[one.kind]}
        if one.kind == "histogram":
            found[f"{one.name}_bucket"] = _OF_TARGETS | {*one.labels, "le"}
    groups = yaml.safe_load((PROMETHEUS / "rules.yml").read_text())["groups"]
    return found | {rule["record"]: frozenset() for group in groups for rule in group["rules"] if "record" in rule}


def faults_of(dashboard: dict[str, Any]) -> Iterator[str]:
    """Yields one sentence for each fault."""
    series = labels_of_series()
    for panel in dashboard["panels"]:
        title = panel["title"]
        if not panel.get("description"):
            yield f"{title}: it has no description"
        if not panel["fieldConfig"]["defaults"].get("unit"):
            yield f"{title}: it has no unit"
        for target in panel["targets"]:
            yield from (f"{title}: {fault}" for fault in _faults_of_query(target["expr"], series))
            for label in sorted(legend_labels(target["legendFormat"]) - _grouped(target["expr"])):
                yield f"{title}: its legend shows {label}, by which the query does not group"
    for variable in dashboard["templating"]["list"]:
        name, label = re.findall(r"^label_values\((\w+), (\w+)\)$", variable["query"])[0]
        if label not in series.get(name, ()):
            yield f"variable {variable['name']}: no metric {name} has the label {label}"


def _faults_of_query(query: str, series: dict[str, frozenset[str]]) -> Iterator[str]:
    common: set[str] | None = None
    for name, selectors in _SERIES.findall(_QUOTED.sub('""', query)):
        if name not in series:
            yield f"no metric is called {name}"
            continue
        common = set(series[name]) if common is None else common & series[name]
        for label in re.findall(r"(\w+)\s*[=!]", selectors):
            if label not in series[name]:
                yield f"{name} has no label {label}"
    if common is None:
        yield "the query names no metric"
    for label in sorted(_grouped(query) - (common or set())):
        yield f"the query groups by {label}, which not all of its metrics have"


def _grouped(query: str) -> set[str]:
    lists: list[str] = re.findall(r"\bby \(([^)]*)\)", query)
    return {label.strip() for one in lists for label in one.split(",")}


def main() -> int:
    found = [f"{name}: {fault}" for name, one in read_dashboards().items() for fault in faults_of(one)]
    print("\n".join(found))
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
