"""The queue systems that can be measured: one file each, with one class (bench/system.py)."""

from __future__ import annotations

import importlib

from bench.system import System

WINDROW = "bench.systems.windrow:Windrow"
# What Windrow is held against in every round: the same statements without routers and gRPC.
LIMIT = "bench.systems.limit:Limit"


def load(where: str) -> type[System]:
    """The class at MODULE:CLASS."""
    module, _, name = where.partition(":")
    found: type[System] = getattr(importlib.import_module(module), name)
    return found
