"""What may be written for the address of a router."""

from __future__ import annotations

import re

# gRPC's own names, for who needs them: https://github.com/grpc/grpc/blob/master/doc/naming.md
_NAME = re.compile(r"(?:dns|ipv4|ipv6|unix|unix-abstract|vsock|xds|passthrough):.+")
_HOST_AND_PORT = re.compile(r"(?:\[[0-9A-Fa-f:.%\w]+\]|[^\s\[\]:/@]+):([0-9]{1,5})")
_URL = re.compile(r"https?://")


def fault_of(address: str) -> str | None:
    """What is wrong with it, and what to write; None: nothing."""
    found = _HOST_AND_PORT.fullmatch(address)
    if _NAME.fullmatch(address) or (found is not None and 0 < int(found[1]) < 65536):
        return None
    wrong = "begins as a web page's does" if _URL.match(address) else "is no address"
    return f"{address!r} {wrong}: write HOST:PORT, such as 127.0.0.1:7419"
