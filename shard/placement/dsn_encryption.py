"""Tells whether a connection by a DSN may send passwords and jobs over a network in plain text. Pure; libpq itself
encrypts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shard.placement.loopback import is_loopback

# Modes with which libpq never falls back to plain text. `require` without a root certificate accepts any server.
_ENCRYPTED = frozenset({"require", "verify-ca", "verify-full"})
# libpq's own default: TLS if the server offers it.
_DEFAULT = "prefer"


def may_be_plain_text(dsn: Mapping[str, Any], environ: Mapping[str, str]) -> str | None:
    """Returns the sslmode of a parsed DSN if it allows plain text on the way to another machine, and None otherwise."""
    mode = str(dsn.get("sslmode") or "")
    # libpq takes the mode from the DSN first, then from a service file, and then from the environment. This module does
    # not read service files, so the mode may remain unknown.
    if not mode and not _service(dsn, environ):
        mode = environ.get("PGSSLMODE") or _DEFAULT
    if mode in _ENCRYPTED or not _leaves_this_machine(dsn, environ):
        return None
    return mode or "unknown, in a service file"


def names_host(dsn: Mapping[str, Any], environ: Mapping[str, str]) -> bool:
    """Returns whether the host of a parsed DSN is known without a service file."""
    return bool(dsn.get("hostaddr") or dsn.get("host") or not _service(dsn, environ))


def _leaves_this_machine(dsn: Mapping[str, Any], environ: Mapping[str, str]) -> bool:
    if not names_host(dsn, environ):
        return True
    # libpq connects to `hostaddr` if there is one.
    named = dsn.get("hostaddr") or dsn.get("host") or environ.get("PGHOSTADDR") or environ.get("PGHOST") or ""
    return not all(map(_is_here, str(named).split(",")))


def _is_here(host: str) -> bool:
    """Returns whether the host is a Unix socket (a path, an abstract name, or the default), or a loopback address."""
    return not host or host[0] in "/@" or is_loopback(host)


def _service(dsn: Mapping[str, Any], environ: Mapping[str, str]) -> bool:
    return bool(dsn.get("service") or environ.get("PGSERVICE"))
