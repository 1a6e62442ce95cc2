"""Checks the address of a router."""

from __future__ import annotations

import re

# gRPC's own name syntax is allowed, too: https://github.com/grpc/grpc/blob/master/doc/naming.md
_NAME = re.compile(r"(?:dns|ipv4|ipv6|unix|unix-abstract|vsock|xds|passthrough):.+")
_HOST_AND_PORT = re.compile(r"(?:\[[0-9A-Fa-f:.%\w]+\]|[^\s\[\]:/@]+):([0-9]{1,5})")
_URL = re.compile(r"[a-z]+://")
_SECURE = "grpcs://"
_LOOPBACK = re.compile(r"(?:localhost|127\.[0-9.]+|\[::1\]):[0-9]+")


def split_scheme(address: str) -> tuple[str, bool]:
    """Returns the address without grpcs://, and whether it began with grpcs://, which means TLS."""
    return address.removeprefix(_SECURE), address.startswith(_SECURE)


def address_fault(address: str) -> str | None:
    """Returns a text that says what is wrong with an address (without grpcs://), or None if the address is valid."""
    found = _HOST_AND_PORT.fullmatch(address)
    if _NAME.fullmatch(address) or (found is not None and 0 < int(found[1]) < 65536):
        return None
    fault = "is a web address" if _URL.match(address) else "is not an address"
    return f"{address!r} {fault}: write HOST:PORT, such as 127.0.0.1:7419, or grpcs://HOST:PORT for TLS"


def stays_here(address: str) -> bool:
    """Returns whether data that is sent to this address stays on this machine."""
    return not uses_proxy(address) or address.startswith(("unix:", "unix-abstract:"))


def uses_proxy(address: str) -> bool:
    """Returns whether a proxy from the environment may be used. For a loopback address the answer is no, because no
    proxy can reach the loopback address of this machine."""
    return _LOOPBACK.fullmatch(address) is None
