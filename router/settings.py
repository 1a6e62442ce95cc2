"""The [router] table of the cluster file. Pure.

[router]
listen = "127.0.0.1:7419"
insecure = false
processes = 2
connections_per_shard = 4
drain_seconds = 20
memory_mib = 1024
client_connections = 5000
calls_per_connection = 1000
sweep_seconds = 3
connection_age_seconds = 1800
metrics = "127.0.0.1:9464"
metrics_queues = 0
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import partial

from shard.admin.queue_figures import NAMED_MAX
from shard.placement.cluster_file import Cluster, ClusterFileError, Faults, known_keys

LISTEN_DEFAULT = "127.0.0.1:7419"
_MIB = 1024 * 1024
# Memory of the interpreter, the libraries and a thousand waiting streams.
_PROCESS_MIB = 256
# Longer than a unary call can take: 60 s to arrive, 75 s in the router, 30 s until its answer is read.
_GRACE_S_MIN, _GRACE_S_MAX = 180.0, 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSettings:
    listen: str = LISTEN_DEFAULT
    # Allows an address beyond loopback without [tls] or [auth] (router/process/exposure.py).
    insecure: bool = False
    processes: int = 2
    # How many connections each process has for queue calls. Up to two more connections serve lists and counts, and one
    # more listens.
    connections_per_shard: int = 4
    # How long calls in flight may take to end after SIGTERM.
    drain_seconds: float = 20.0
    # The memory limit of each process, whatever its clients send, read or leave unfinished (docs/operations.md,
    # "Memory").
    memory_mib: int = 1024
    # How many client connections each process may have. If there are more, the process closes connections of the host
    # that has most of them, idle ones first.
    client_connections: int = 5000
    # How many calls and streams one client connection may have open. The router announces the limit by HTTP/2, and the
    # client's gRPC library queues further calls.
    calls_per_connection: int = 1000
    # The interval of sweeps: a job whose lease has expired, or that every hint has missed, is found after this time at
    # the latest.
    sweep_seconds: float = 3.0
    # After this time, plus or minus 10 %, a client is asked to connect again, so that new routers get work from old
    # clients.
    connection_age_seconds: float = 1800.0
    # Where the metrics of all processes of this machine are served, as HOST:PORT. None: nowhere.
    metrics: str | None = None
    # The metrics name this many queues of each shard, the largest ones, with their orgs. All other queues are added up.
    metrics_queues: int = 0

    @property
    def connection_grace_s(self) -> float:
        """How long calls may still take after their client was asked to connect again. Then gRPC breaks the connection.
        This is longer than any unary call takes, and by default longer than any call with a deadline."""
        return min(_GRACE_S_MAX, max(_GRACE_S_MIN, self.connection_age_seconds / 3))

    @property
    def stream_s_max(self) -> float:
        """How long a Consume stream lasts at most. The router ends every stream before gRPC can break its connection:
        jobs that were on their way through a broken connection would stay leased until their windows end."""
        return self.connection_grace_s * 0.9

    @property
    def buffer_bytes(self) -> int:
        """How many bytes calls may hold, counted as on the wire. Each byte is in memory up to four times at once: in
        gRPC, decoded, as columns for Postgres, and in libpq's buffer."""
        return (self.memory_mib - _PROCESS_MIB) * _MIB // 4

    @property
    def watched_bytes(self) -> int:
        """The process size above which connections with unfinished requests are closed."""
        return self.memory_mib * _MIB * 7 // 8


# How long a router process may take to end after its drain. In this time it ends its calls, gives back or writes down
# what it still holds, and closes its connections. After this time the supervisor kills it.
END_S_MAX = 15.0

# The lowest and the highest value of each number.
_BOUNDS = {
    "processes": (1, 256),
    "connections_per_shard": (1, 100),
    "drain_seconds": (0, 3600),
    "memory_mib": (512, 1_048_576),
    "client_connections": (1, 1_000_000),
    "calls_per_connection": (1, 100_000),
    "sweep_seconds": (0.05, 3600),
    "connection_age_seconds": (1, 86_400),
    "metrics_queues": (0, NAMED_MAX),
}


def router_settings(cluster: Cluster, *, source: str = "cluster file") -> RouterSettings:
    """Reads and checks the [router] table. Raises ClusterFileError with all faults, one a line."""
    table = cluster.tables.get("router", {})
    where = f"{source}: [router]"
    known = {field.name for field in fields(RouterSettings)}
    faults = Faults()
    faults.of(lambda: known_keys(table, known, where=where))
    settings = RouterSettings(**{key: value for key, value in table.items() if key in known})
    faults.of(lambda: host_and_port(settings.listen, where=f"{where} listen"))
    if settings.metrics is not None:
        faults.of(lambda: host_and_port(settings.metrics, where=f"{where} metrics"))
    faults.of(lambda: _true_or_false(settings.insecure, f"{where} insecure"))
    for key, (low, high) in _BOUNDS.items():
        whole = not key.endswith("_seconds")
        faults.of(partial(_within, getattr(settings, key), low, high, f"{where} {key}", whole=whole))
    faults.refuse()
    return settings


def host_and_port(listen: object, *, where: str) -> tuple[str, int]:
    """Splits an address such as 127.0.0.1:7419 or [::1]:7419 into host and port. Raises ClusterFileError."""
    host, colon, port = listen.rpartition(":") if isinstance(listen, str) else ("", "", "")
    if not host or not colon or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ClusterFileError(f"{where}: must be HOST:PORT, such as {LISTEN_DEFAULT}, not {listen!r}")
    return host, int(port)


def _true_or_false(value: object, where: str) -> None:
    if not isinstance(value, bool):
        raise ClusterFileError(f"{where}: must be true or false, not {value!r}")


def _within(value: object, low: float, high: float, where: str, *, whole: bool) -> None:
    number = isinstance(value, int) or (not whole and isinstance(value, float))
    if isinstance(value, bool) or not number or not low <= value <= high:  # type: ignore[operator]
        raise ClusterFileError(
            f"{where}: must be a {'whole ' if whole else ''}number from {low:g} to {high:g}, not {value!r}"
        )
