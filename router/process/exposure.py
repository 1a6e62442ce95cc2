"""Finds out who can reach a router, and whether the cluster file protects it well enough for that."""

from __future__ import annotations

import socket

from router.errors import ListensOpenly
from router.settings import host_and_port
from shard.placement.cluster_file import Cluster
from shard.placement.loopback import is_loopback


def exposure(cluster: Cluster, listen: str, *, insecure: bool) -> str | None:
    """Returns, as text for the log, what strangers can do because the router lacks [tls] or [auth]. Returns None if the
    router has both, or if only this machine can reach it. Raises ListensOpenly if [router] insecure does not allow
    that."""
    missing = [f"[{table}]" for table in ("tls", "auth") if table not in cluster.tables]
    if not missing or not _reaches_beyond_loopback(listen):
        return None
    if "[auth]" in missing:
        danger = f"anyone who reaches {listen} can read, enqueue, take and cancel jobs of every org"
    else:
        danger = f"anyone on the network to {listen} can read the jobs, and the tokens with which to act on them"
    if not insecure:
        raise ListensOpenly(
            f"refusing to listen on {listen} without {' and '.join(missing)} in {cluster.source}: {danger}. Add what "
            'is missing (docs/operations.md, "TLS"), listen on 127.0.0.1, or, on a network where every program is '
            "trusted, set insecure = true in [router]"
        )
    return danger


def _reaches_beyond_loopback(listen: str) -> bool:
    """Returns whether other machines can reach the address. Returns False for a host that cannot be resolved: the
    listener reports that error."""
    host, port = host_and_port(listen, where="listen")
    try:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError:
        return False
    return not all(is_loopback(str(address[0])) for *_, address in found)
