"""The connections that clients have to this process, seen through the operating system.

gRPC neither tells how many bytes a connection has received, nor ends a single connection. The socket does both: this
module finds it among the process's own file descriptors. Linux only.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Collection, Generator
from urllib.parse import unquote

# tcpi_bytes_received in `struct tcp_info` (linux/tcp.h): an unsigned 64-bit number.
_BYTES_RECEIVED_AT = 128
_unpack_u64 = struct.Struct("=Q").unpack_from


def received_bytes(port: int) -> dict[str, int]:
    """How many bytes each connection to this port has received so far, by its peer as gRPC names it."""
    received: dict[str, int] = {}
    for peer, connection in _accepted(port):
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_RECEIVED_AT + 8)
        if len(info) == _BYTES_RECEIVED_AT + 8:
            received[peer] = _unpack_u64(info, _BYTES_RECEIVED_AT)[0]
    return received


def hang_up(port: int, peers: Collection[str]) -> int:
    """Ends the connections of these peers, as though the peers had gone away: gRPC then ends their calls and frees what
    they hold. Answers how many there were."""
    count = 0
    for peer, connection in _accepted(port):
        if peer in peers:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
                count += 1
    return count


def stop_listening(port: int) -> None:
    """No connection is accepted any more; with SO_REUSEPORT the kernel gives new ones to the other processes."""
    for candidate in _sockets():
        with contextlib.suppress(OSError):
            if candidate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) and candidate.getsockname()[1] == port:
                candidate.shutdown(socket.SHUT_RDWR)


def peers(port: int) -> set[str]:
    """The peers that are connected to this port."""
    return {peer for peer, _ in _accepted(port)}


def canonical(peer: str) -> str:
    """A peer as this module names it: gRPC escapes the brackets of an IPv6 address."""
    return unquote(peer)


def _accepted(port: int) -> Generator[tuple[str, socket.socket], None, None]:
    for connection in _sockets():
        try:
            local, remote = connection.getsockname(), connection.getpeername()
        except OSError:
            # It is not connected, or listens.
            continue
        if local[1] == port:
            # A socket for both families has IPv4 addresses as mapped ones.
            host = remote[0].removeprefix("::ffff:")
            yield f"ipv6:[{host}]:{remote[1]}" if ":" in host else f"ipv4:{host}:{remote[1]}", connection


def _sockets() -> Generator[socket.socket, None, None]:
    """The TCP sockets of this process, each by a descriptor of its own: the first one may be closed and used anew
    meanwhile."""
    for name in os.listdir("/proc/self/fd"):
        try:
            number = os.dup(int(name))
        except OSError:
            continue
        try:
            found = socket.socket(fileno=number)
        except OSError:
            # A file, a pipe.
            os.close(number)
            continue
        with found:
            if found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM:
                yield found
