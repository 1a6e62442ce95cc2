"""The client connections of this process, through the operating system. Linux only.

gRPC offers no way to see how many bytes a connection has received, or to close a single connection. The operating
system offers both for a socket. This module finds the sockets among the file descriptors of the process.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket
import struct
from collections.abc import Collection, Generator
from urllib.parse import unquote

# tcpi_bytes_received in `struct tcp_info` (linux/tcp.h): an unsigned 64-bit number.
_BYTES_RECEIVED_AT = 128
_unpack_u64 = struct.Struct("=Q").unpack_from


def received_bytes(port: int) -> dict[str, int]:
    """Returns how many bytes each connection to this port has received so far, by the canonical name of its peer."""
    received: dict[str, int] = {}
    for peer, connection in _accepted(port):
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_RECEIVED_AT + 8)
        if len(info) == _BYTES_RECEIVED_AT + 8:
            received[peer] = _unpack_u64(info, _BYTES_RECEIVED_AT)[0]
    return received


def hang_up(port: int, peers: Collection[str]) -> int:
    """Shuts down the connections of these peers. gRPC then behaves as if the clients had left: it ends their calls and
    frees their memory. Returns the number of connections."""
    count = 0
    for peer, connection in _accepted(port):
        if peer in peers:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
                count += 1
    return count


def stop_listening(port: int) -> None:
    """Stops accepting connections on this port. With SO_REUSEPORT the kernel gives new connections to the other
    processes."""
    for candidate in _sockets():
        with contextlib.suppress(OSError):
            if candidate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) and candidate.getsockname()[1] == port:
                candidate.shutdown(socket.SHUT_RDWR)


def peers(port: int) -> set[str]:
    """Returns the peers that are connected to this port."""
    return {peer for peer, _ in _accepted(port)}


def open_files() -> int:
    """Returns how many file descriptors this process has."""
    # Since Linux 6.2, the size of this folder is the number of descriptors. On older versions, the size is 0.
    return os.stat("/proc/self/fd").st_size or len(os.listdir("/proc/self/fd"))


def canonical(peer: str) -> str:
    """Returns a peer's name as this module writes it: without gRPC's escapes for the brackets of IPv6 addresses."""
    return unquote(peer)


def host_of(peer: str) -> str:
    """Returns the host of a peer with a canonical name: its IPv4 address, or the /64 network of its IPv6 address,
    because one host may use a whole /64 network."""
    kind, _, rest = peer.partition(":")
    address = rest.rpartition(":")[0]
    if kind != "ipv6":
        return address
    network = ipaddress.IPv6Network((address.strip("[]").partition("%")[0], 64), strict=False)
    return str(network)


def _accepted(port: int) -> Generator[tuple[str, socket.socket], None, None]:
    for connection in _sockets():
        try:
            local, remote = connection.getsockname(), connection.getpeername()
        except OSError:
            # The socket is not connected, or is a listening one.
            continue
        if local[1] == port:
            # A dual-stack socket shows an IPv4 address in its IPv6-mapped form.
            host = remote[0].removeprefix("::ffff:")
            yield f"ipv6:[{host}]:{remote[1]}" if ":" in host else f"ipv4:{host}:{remote[1]}", connection


def _sockets() -> Generator[socket.socket, None, None]:
    """Yields the TCP sockets of this process, each with a duplicated descriptor, since the original may be closed and
    reused at any time. Raises OSError if the process cannot open more descriptors."""
    for name in os.listdir("/proc/self/fd"):
        try:
            number = os.dup(int(name))
        except OSError as error:
            if error.errno != errno.EBADF:
                raise
            # It has been closed since the listing.
            continue
        try:
            found = socket.socket(fileno=number)
        except OSError:
            # It is a file or a pipe.
            os.close(number)
            continue
        with found:
            if found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM:
                yield found
