"""Bounds how many client connections this process has ([router] client_connections).

Above the bound, the process closes one connection after another, always of the host that has the most connections at
that moment. Of a host's connections, it first closes those without a call. Among these, the connection that has sent
least is the first. So a host that opens more and more connections takes none away from the clients of other hosts. gRPC
itself accepts no more connections than the bound plus a quarter of it: this limits how many connections can come
between two looks at their number.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import resource
from collections import defaultdict
from collections.abc import Container, Mapping

from router.gate import connections
from router.gate.admission import Gate

_log = logging.getLogger(__name__)

_LOOK_S = 0.25
_LOG_S = 60.0
# The descriptors that a process needs for other things than client connections: for databases, siblings and files.
_OTHER_FILES = 1_000


class ConnectionLimit:
    """Keeps a process at `connections_max` connections or fewer while `run` runs."""

    def __init__(self, connections_max: int) -> None:
        self._connections_max = connections_max
        # How many of the process's descriptors did not belong to client connections at the last listing.
        self._others = 0
        self._closed = 0
        self._log_again_s = 0.0

    async def run(self, gate: Gate, port: int) -> None:
        """Until cancelled, closes connections of `port` when there are too many."""
        while True:
            await asyncio.sleep(_LOOK_S)
            try:
                await self._look(gate, port)
            except (OSError, RuntimeError) as error:
                # Most likely this process cannot open more files, or start a thread. Try again until it can.
                self._log("could not look at the connections: %s", error)

    async def _look(self, gate: Gate, port: int) -> None:
        # Counting descriptors is cheap, listing connections is not.
        files = connections.open_files()
        if files - self._others <= self._connections_max:
            return
        received = await asyncio.to_thread(connections.received_bytes, port)
        self._others = files - len(received)
        closing = surplus(received, gate.arrivals.inside, self._connections_max)
        if closing:
            self._closed += await asyncio.to_thread(connections.hang_up, port, set(closing))
            self._log(
                "there are more than %d client connections, most of them of %s: closed %d since the start",
                self._connections_max,
                connections.host_of(closing[0]),
                self._closed,
            )

    def _log(self, message: str, *values: object) -> None:
        """Logs a warning, at most once a minute."""
        now_s = asyncio.get_running_loop().time()
        if now_s >= self._log_again_s:
            self._log_again_s = now_s + _LOG_S
            _log.warning(message, *values)


def accepted_max(connections_max: int) -> int:
    """Returns how many connections gRPC may accept: more than the bound, because the process counts them only now and
    then."""
    return connections_max + -(-connections_max // 4)


def allow_files(connections_max: int) -> int:
    """Increases the process's limit of open files, so that the process can have this many connections, but not beyond
    the hard limit. Returns how many connections the process can have, and logs a warning if that is fewer than
    `connections_max`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = accepted_max(connections_max) + _OTHER_FILES
    files = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
    if files == wanted:
        return connections_max
    # Even if there are few descriptors, use some of them for connections.
    allowed = max((files - _OTHER_FILES) * 4 // 5, files // 4)
    _log.warning(
        "this process may open %d files, so it takes %d client connections, and not %d as [router] client_connections "
        "says: raise the limit (ulimit -n, LimitNOFILE)",
        hard,
        allowed,
        connections_max,
    )
    return allowed


def surplus(received: Mapping[str, int], busy: Container[str], connections_max: int) -> list[str]:
    """Returns which connections to close, so that `connections_max` remain. `received`: how many bytes each connection
    has sent, by peer. `busy`: the peers with calls."""
    by_host = defaultdict[str, list[tuple[bool, int, str]]](list)
    for peer, count in received.items():
        by_host[connections.host_of(peer)].append((peer in busy, count, peer))
    # A heap: how many connections each host has, and which of them to close next. The host with the most connections
    # comes first.
    hosts: list[tuple[int, tuple[bool, int, str], list[tuple[bool, int, str]]]] = []
    for others in by_host.values():
        others.sort(reverse=True)
        hosts.append((-len(others), others.pop(), others))
    heapq.heapify(hosts)
    closing: list[str] = []
    while len(received) - len(closing) > connections_max:
        _, (_, _, peer), others = heapq.heappop(hosts)
        closing.append(peer)
        if others:
            heapq.heappush(hosts, (-len(others), others.pop(), others))
    return closing
