"""The queue systems that can be measured: one file each, with one class for each way to use it (bench/system.py)."""

from __future__ import annotations

import importlib
from types import MappingProxyType

from bench.system import System

WINDROW = "windrow"
# What Windrow is held against in every round: the same statements without routers and gRPC.
LIMIT = "limit"
ECHO = "echo"
# One job a unary call; one job a client.enqueue(); and by routers that trace.
UNARY, CLIENT, TRACED = "windrow-unary", "windrow-client", "windrow-traced"
# Windrow with a stream for each worker.
STREAMS = "windrow-streams"

OURS = MappingProxyType(
    {
        WINDROW: "bench.systems.windrow:Windrow",
        STREAMS: "bench.systems.windrow:WindrowStreams",
        "windrow-pull": "bench.systems.windrow:WindrowPull",
        UNARY: "bench.systems.windrow:WindrowUnary",
        CLIENT: "bench.systems.windrow:WindrowClient",
        TRACED: "bench.systems.windrow:WindrowTraced",
        "windrow-parked": "bench.systems.parked:Parked",
        LIMIT: "bench.systems.limit:Limit",
        ECHO: "bench.systems.echo:Echo",
    }
)
PEERS = MappingProxyType(
    {
        "pgmq": "bench.systems.pgmq:Pgmq",
        "graphile-worker": "bench.systems.graphile_worker:GraphileWorker",
        "pg-boss": "bench.systems.pg_boss:PgBoss",
        "procrastinate": "bench.systems.procrastinate:Procrastinate",
        "pgqueuer": "bench.systems.pgqueuer:PgQueuer",
        "awa": "bench.systems.awa:Awa",
    }
)


def load(name: str) -> type[System]:
    """The class of a system by its name, or by MODULE:CLASS."""
    module, _, member = (OURS.get(name) or PEERS.get(name) or name).partition(":")
    found: type[System] = getattr(importlib.import_module(module), member)
    return found
