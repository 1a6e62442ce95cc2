"""The scenarios, in the order in which `./run bench` measures them."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping

from bench.scenario import Scenario

_MODULES = {
    "throughput": "throughput.scenario",
    "latency": "latency",
    "load": "load",
    "depth": "depth",
    "archive": "archive",
    "idle": "idle",
    "grow": "grow.scenario",
    "outage": "outage.scenario",
    "hostile": "hostile",
    "rotations": "rotations",
    "lookup": "lookup",
    "why": "why",
    "wakeups": "wakeups",
    "bulk": "bulk",
    "placement": "placement",
    "limits": "limits",
    "starts": "starts",
    "schedules": "schedules",
    "groups": "groups",
    "workflows": "workflows",
    "fair": "fair",
    "scale": "scale.scenario",
    "dashboards": "dashboards",
}


class _Scenarios(Mapping[str, Scenario]):
    """Imports a scenario when it is asked for: the imports of all scenarios take half a second of CPU."""

    def __getitem__(self, name: str) -> Scenario:
        found: Scenario = importlib.import_module(f"bench.scenarios.{_MODULES[name]}").SCENARIO
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(_MODULES)

    def __len__(self) -> int:
        return len(_MODULES)


SCENARIOS: Mapping[str, Scenario] = _Scenarios()
