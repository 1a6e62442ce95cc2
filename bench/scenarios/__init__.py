"""What can be measured: one file each, in the order in which `./run bench` measures them."""

from __future__ import annotations

from types import MappingProxyType

from bench.scenario import Scenario
from bench.scenarios import (
    archive,
    cost,
    depth,
    grow,
    hostile,
    idle,
    latency,
    load,
    lookup,
    outage,
    placement,
    throughput,
    tracing,
    unary,
)

SCENARIOS: MappingProxyType[str, Scenario] = MappingProxyType(
    {
        "throughput": throughput.SCENARIO,
        "latency": latency.SCENARIO,
        "unary": unary.SCENARIO,
        "load": load.SCENARIO,
        "depth": depth.SCENARIO,
        "archive": archive.SCENARIO,
        "cost": cost.SCENARIO,
        "idle": idle.SCENARIO,
        "tracing": tracing.SCENARIO,
        "grow": grow.SCENARIO,
        "outage": outage.SCENARIO,
        "hostile": hostile.SCENARIO,
        "lookup": lookup.SCENARIO,
        "placement": placement.SCENARIO,
    }
)
