"""The [router] table of the cluster file. Pure.

[router]
listen = "127.0.0.1:7419"
processes = 2
connections_per_shard = 4
drain_seconds = 20
memory_mib = 1024
calls_per_connection = 1000
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from shard.cluster import Cluster, ClusterFileError, known_keys

LISTEN_DEFAULT = "127.0.0.1:7419"
_MIB = 1024 * 1024
# The interpreter, the libraries, and what a thousand streams that wait take.
_PROCESS_MIB = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSettings:
    # Loopback unless the operator says otherwise: this release has no authentication.
    listen: str = LISTEN_DEFAULT
    processes: int = 2
    # Of each process, for the queue; up to two more serve lists and counts.
    connections_per_shard: int = 4
    # After SIGTERM: how long calls in flight may take to end.
    drain_seconds: float = 20.0
    # What each process may take, whatever its clients send, read or leave unfinished (docs/operations.md, "Memory").
    memory_mib: int = 1024
    # Calls and streams that one client connection may have open at a time; it is told so, and its library queues more.
    calls_per_connection: int = 1000

    @property
    def buffer_bytes(self) -> int:
        """What calls may hold, in bytes as they are on the wire. Each is in memory up to four times at the same moment:
        as gRPC has it, decoded, as columns for Postgres, and in libpq's buffer."""
        return (self.memory_mib - _PROCESS_MIB) * _MIB // 4

    @property
    def watched_bytes(self) -> int:
        """Above it, connections with unfinished requests are ended."""
        return self.memory_mib * _MIB * 7 // 8


def router_settings(cluster: Cluster, *, source: str = "cluster file") -> RouterSettings:
    """Reads the table. Raises ClusterFileError."""
    table = cluster.tables.get("router", {})
    where = f"{source}: [router]"
    known_keys(table, {field.name for field in fields(RouterSettings)}, where=where)
    settings = RouterSettings(**table)
    host_and_port(settings.listen, where=f"{where} listen")
    _within(settings.processes, 1, 256, f"{where} processes", whole=True)
    _within(settings.connections_per_shard, 1, 100, f"{where} connections_per_shard", whole=True)
    _within(settings.drain_seconds, 0, 3600, f"{where} drain_seconds", whole=False)
    _within(settings.memory_mib, 512, 1_048_576, f"{where} memory_mib", whole=True)
    _within(settings.calls_per_connection, 1, 100_000, f"{where} calls_per_connection", whole=True)
    return settings


def host_and_port(listen: object, *, where: str) -> tuple[str, int]:
    """The two parts of an address such as 127.0.0.1:7419 or [::1]:7419. Raises ClusterFileError."""
    host, colon, port = listen.rpartition(":") if isinstance(listen, str) else ("", "", "")
    if not host or not colon or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ClusterFileError(f"{where}: must be HOST:PORT, such as {LISTEN_DEFAULT}, not {listen!r}")
    return host, int(port)


def _within(value: object, low: float, high: float, where: str, *, whole: bool) -> None:
    number = isinstance(value, int) or (not whole and isinstance(value, float))
    if isinstance(value, bool) or not number or not low <= value <= high:  # type: ignore[operator]
        raise ClusterFileError(
            f"{where}: must be a {'whole ' if whole else ''}number from {low:g} to {high:g}, not {value!r}"
        )
