"""Reads the dashboards of deploy/grafana, for benchmarks and tests. Pure except for reading the files."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

GRAFANA = Path(__file__).resolve().parent.parent / "deploy" / "grafana"
_LABEL = re.compile(r"\{\{(\w+)\}\}")


def read_dashboards() -> dict[str, Any]:
    """Returns the dashboards by the names of their files."""
    return {file.name: json.loads(file.read_text()) for file in sorted(GRAFANA.glob("*.json"))}


def filled(query: str, variables: Mapping[str, str]) -> str:
    """Replaces $variables by their values, as Grafana does. Raises KeyError for an unknown variable."""
    return re.sub(r"\$(\w+)", lambda found: variables[found[1]], query)


def legend(form: str, labels: Mapping[str, str]) -> str:
    """Returns the legend of a line with these labels. Leaves out a label that the line does not have, as Grafana
    does."""
    return _LABEL.sub(lambda found: labels.get(found[1], ""), form).strip()


def legend_labels(form: str) -> set[str]:
    return {*_LABEL.findall(form)}
