"""The metadata `windrow-org`: a request's org, where proxies can read it (proto/windrow/v1/queue.proto). Pure."""

from __future__ import annotations

from functools import lru_cache
from urllib.parse import quote, unquote

ORG_HEADER = "windrow-org"
# The length of an org of 128 bytes that are all percent-encoded. A longer value can name no org.
VALUE_CHARS_MAX = 384


@lru_cache(maxsize=4096)
def org_metadata(org: str) -> tuple[tuple[str, str], ...]:
    """Returns the metadata of a call for this org, or no metadata if the name is too long for an org. gRPC refuses
    metadata above 8 KiB. Without the metadata, the call reaches the router, which refuses the name.
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
