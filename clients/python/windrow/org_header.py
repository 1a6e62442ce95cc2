"""The metadata `windrow-org`. It names a request's org, so that proxies can read it (proto/windrow/v1/queue.proto). No
I/O."""

from __future__ import annotations

from functools import lru_cache
from urllib.parse import quote, unquote

ORG_HEADER = "windrow-org"
# The length of an org's name of 128 bytes, all of them percent-encoded. A longer value cannot name an org.
VALUE_CHARS_MAX = 384


@lru_cache(maxsize=4096)
def org_metadata(org: str) -> tuple[tuple[str, str], ...]:
    """Returns the metadata of a call for this org. If the name is too long for an org, returns no metadata, because
    gRPC refuses metadata above 8 KiB. The call then reaches the router, which refuses the name.
    """
    # ASCII letters, digits and - . _ ~ stay as they are. Every other byte of the UTF-8 text becomes %XX.
    value = quote(org, safe="")
    return ((ORG_HEADER, value),) if len(value) <= VALUE_CHARS_MAX else ()


def org_of_header(value: str | bytes) -> str | None:
    """Returns the org that a value of the header names; None if the value is too long, or not percent-encoded UTF-8."""
    # The cache must not keep long values.
    return _decoded(value) if len(value) <= VALUE_CHARS_MAX else None


@lru_cache(maxsize=4096)
def _decoded(value: str | bytes) -> str | None:
    try:
        return unquote(value, errors="strict")
    except UnicodeDecodeError:
        return None
