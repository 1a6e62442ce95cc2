"""Chooses the port of a cluster, and stores it in cluster.json, so that DSNs stay valid.

Never picks a port that another program listens on, or that a stopped neighbour cluster has stored.
"""

import contextlib
import errno
import json
import random
import socket
from pathlib import Path

from embedded.errors import EmbeddedError, PortTaken, StartFailed
from embedded.folders import read_json, write_file

HOST = "127.0.0.1"

# These ports are below the range that the system uses for outgoing connections. If a cluster had a port of that range,
# an outgoing connection could take the port while the cluster is stopped.
_PORTS = range(20_000, 32_000)
_PORT_TRIES = 100


class RememberedPort:
    def __init__(self, cluster: str, folder: Path) -> None:
        self._cluster = cluster
        self._folder = folder
        self._path = folder / "cluster.json"

    def read(self) -> int | None:
        """Returns the port, or None before the first start. Raises EmbeddedError for an invalid file."""
        match read_json(self._path):
            case {"port": int(port)} if 0 < port < 65_536:  # pyrefly: ignore[not-callable]
                return port
            case None:
                return None
            case _:
                raise EmbeddedError(f'{self._path} holds no valid port: write {{"port": <number>}} or delete it')

    def write(self, port: int) -> None:
        write_file(self._path, json.dumps({"port": port}) + "\n", mode=0o644)

    def pick(self) -> int:
        """Returns a free port. Raises StartFailed."""
        # The port of a stopped neighbour cluster can be bound now, but must stay free for that cluster.
        reserved: set[int] = set()
        for path in self._folder.parent.glob("*/cluster.json"):
            # A temporary folder may contain unrelated files, which may be unreadable or have other content.
            with contextlib.suppress(OSError):
                match read_json(path):
                    case {"port": int(neighbour)}:  # pyrefly: ignore[not-callable]
                        reserved.add(neighbour)
                    case _:
                        pass
        for port in random.sample(_PORTS, _PORT_TRIES):
            if port not in reserved and not is_taken(port):
                return port
        raise StartFailed(
            f"cluster {self._cluster!r} found no free port on {HOST}: {_PORT_TRIES} between {_PORTS.start} and "
            f"{_PORTS.stop - 1} were tried; stop some of their listeners"
        )

    def taken(self, port: int) -> PortTaken:
        return PortTaken(
            f"port {port} of cluster {self._cluster!r} is taken by another program on {HOST}: stop that program "
            f"(`ss -ltnp 'sport = :{port}'` names it), or delete {self._path} to choose a "
            "new port, which changes the DSN"
        )


def is_taken(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # Set SO_REUSEADDR as the server does: then connections in TIME_WAIT from its last run do not matter.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return True
            raise
    return False
