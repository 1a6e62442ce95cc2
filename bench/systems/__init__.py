"""The queue systems that can be measured: one file each, with one class for each way to use it (bench/system.py)."""

from __future__ import annotations

import importlib
from types import MappingProxyType

from bench.system import System

# Windrow by its Python client and worker, as users have it.
WINDROW = "windrow"
# The same, with a handler that takes many jobs at once.
BATCHES = "windrow-batches"
# Windrow by its generated stubs: the speed of the protocol with a client that does nothing else.
RAW = "windrow-raw"
# The limit, with which Windrow is compared in every round: the same statements without routers and gRPC.
LIMIT = "limit"
ECHO = "echo"
# With unary calls of one job each.
UNARY = "windrow-unary"
# With routers that trace, that serve metrics, and that do both.
TRACED, MEASURED, TELLING = "windrow-traced", "windrow-measured", "windrow-telling"
# With routers that speak TLS; and with unary calls of one job each to such routers.
TLS, TLS_UNARY = "windrow-tls", "windrow-tls-unary"
# The same with routers that speak TLS and ask for an API key.
SECURE, SECURE_UNARY = "windrow-secure", "windrow-secure-unary"
# With a worker and a stream for each consumer.
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
    """The class of a system by its name, or by MODULE:CLASS."""
    module, _, member = (OURS.get(name) or PEERS.get(name) or name).partition(":")
    found: type[System] = getattr(importlib.import_module(module), member)
    return found
