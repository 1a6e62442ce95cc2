"""The queue systems that can be measured: one file for each system, with one class for each way to use the system
(bench/system.py)."""

from __future__ import annotations

import importlib
from types import MappingProxyType

from bench.system import System

# Windrow with its Python client and worker, as users have it.
WINDROW = "windrow"
# Windrow with its Python client, and a worker whose handler takes many jobs at once.
BATCHES = "windrow-batches"
# Windrow with the generated stubs: the speed of the protocol if the client does nothing else.
RAW = "windrow-raw"
# The upper limit of Windrow's speed: the same statements without routers and gRPC.
LIMIT = "limit"
ECHO = "echo"
# Windrow with unary calls of one job each.
UNARY = "windrow-unary"
# Windrow with routers that trace, with routers that serve metrics, and with routers that do both.
TRACED, MEASURED, TELLING = "windrow-traced", "windrow-measured", "windrow-telling"
# Windrow with routers that speak TLS: as users have it, and with unary calls of one job each.
TLS, TLS_UNARY = "windrow-tls", "windrow-tls-unary"
# Windrow with routers that speak TLS and require an API key: as users have it, and with unary calls of one job each.
SECURE, SECURE_UNARY = "windrow-secure", "windrow-secure-unary"
# Windrow as users have it, with jobs of 1,000 groups.
GROUPS, GROUPS_OF_THREE = "windrow-groups", "windrow-groups-of-three"
# Windrow with a worker and a stream for each consumer.
WORKERS = "windrow-workers"

OURS = MappingProxyType(
    {
        WINDROW: "bench.systems.windrow:Windrow",
        BATCHES: "bench.systems.windrow:WindrowBatches",
        WORKERS: "bench.systems.windrow:WindrowWorkers",
        TRACED: "bench.systems.windrow:WindrowTraced",
        MEASURED: "bench.systems.windrow:WindrowMeasured",
        TELLING: "bench.systems.windrow:WindrowTelling",
        TLS: "bench.systems.windrow:WindrowTls",
        TLS_UNARY: "bench.systems.stubs:UnaryTls",
        SECURE: "bench.systems.windrow:WindrowSecure",
        SECURE_UNARY: "bench.systems.stubs:UnarySecure",
        GROUPS: "bench.systems.windrow:WindrowGroups",
        GROUPS_OF_THREE: "bench.systems.windrow:WindrowGroupsOfThree",
        RAW: "bench.systems.stubs:RawStreams",
        "windrow-pull": "bench.systems.stubs:Pulled",
        UNARY: "bench.systems.stubs:Unary",
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
        "river": "bench.systems.river:River",
    }
)


def load(name: str) -> type[System]:
    """Returns the class of a system, which is given by its name or as MODULE:CLASS."""
    module, _, member = (OURS.get(name) or PEERS.get(name) or name).partition(":")
    found: type[System] = getattr(importlib.import_module(module), member)
    return found
