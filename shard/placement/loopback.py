"""Tells whether a host is this machine."""

from __future__ import annotations

import ipaddress


def is_loopback(host: str) -> bool:
    """Returns whether the host is `localhost` or a loopback address. Resolves no name."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
