"""The scenarios, in the order in which `./run bench` measures them."""

from __future__ import annotations

from types import MappingProxyType

from bench.scenario import Scenario
from bench.scenarios import (
    archive,
    bulk,
    dashboards,
    depth,
    fair,
    groups,
    hostile,
    idle,
    latency,
    limits,
    load,
    lookup,
    placement,
    rotations,
    schedules,
    starts,
    wakeups,
    why,
    workflows,
)
from bench.scenarios.grow import scenario as grow
from bench.scenarios.outage import scenario as outage
from bench.scenarios.scale import scenario as scale
from bench.scenarios.throughput import scenario as throughput

SCENARIOS: MappingProxyType[str, Scenario] = MappingProxyType(
    {
        "throughput": throughput.SCENARIO,
        "latency": latency.SCENARIO,
        "load": load.SCENARIO,
        "depth": depth.SCENARIO,
        "archive": archive.SCENARIO,
        "idle": idle.SCENARIO,
        "grow": grow.SCENARIO,
        "outage": outage.SCENARIO,
        "hostile": hostile.SCENARIO,
        "rotations": rotations.SCENARIO,
        "lookup": lookup.SCENARIO,
        "why": why.SCENARIO,
        "wakeups": wakeups.SCENARIO,
        "bulk": bulk.SCENARIO,
        "placement": placement.SCENARIO,
        "limits": limits.SCENARIO,
        "starts": starts.SCENARIO,
        "schedules": schedules.SCENARIO,
        "groups": groups.SCENARIO,
        "workflows": workflows.SCENARIO,
        "fair": fair.SCENARIO,
        "scale": scale.SCENARIO,
        "dashboards": dashboards.SCENARIO,
    }
)
