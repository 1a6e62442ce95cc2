"""The [auth.jwt] table of the cluster file. Pure.

[auth.jwt]
issuer = "https://id.example.com/realms/main"
audience = "windrow-production"
jwks_url = "https://id.example.com/realms/main/protocol/openid-connect/certs"
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

from shard.placement.cluster_file import ClusterFileError, Faults, known_keys, only_key
from shard.placement.loopback import is_loopback

_TEXT_CHARS_MAX = 255
_AUDIENCES_MAX = 16
# The lowest and the highest value of each number.
_BOUNDS = {
    "leeway_seconds": (0, 300),
    "refresh_seconds": (10, 86_400),
    "keys_valid_seconds": (60, 2_592_000),
}
_FLAG, _TEXTS = "all_orgs", ("org_claim", "scopes_claim")


@dataclass(frozen=True, slots=True, kw_only=True)
class JwtSettings:
    # Exactly what the claim `iss` must be.
    issuer: str
    # One of these must be in the claim `aud`. Clusters that share an issuer have different audiences.
    audiences: tuple[str, ...]
    # Where the public keys of the issuer are. Exactly one of these two is set.
    jwks_file: Path | None = None
    jwks_url: str | None = None
    # The claims that hold the org and the scopes.
    org_claim: str = "org"
    scopes_claim: str = "scope"
    # Only scopes that begin with this prefix count, and the prefix is removed from them.
    scopes_prefix: str = ""
    # Whether the org "*" means all orgs.
    all_orgs: bool = False
    # By how much the clock of the issuer may differ from this machine's.
    leeway_seconds: float = 30.0
    # How often the keys are fetched again, plus or minus 10 %.
    refresh_seconds: float = 600.0
    # How long keys are used while their file or URL gives no usable keys.
    keys_valid_seconds: float = 86_400.0


def jwt_settings(table: object, *, where: str) -> JwtSettings:
    """Reads and checks the table. `where` begins each message. Raises ClusterFileError with all faults, one a line."""
    if not isinstance(table, dict):
        raise ClusterFileError(f"{where}: must be a table")
    given = cast("dict[str, Any]", table)
    faults = Faults()
    known = {field.name for field in fields(JwtSettings)} - {"audiences"} | {"audience"}
    faults.of(lambda: known_keys(given, known, where=where))
    issuer = faults.of(lambda: _text(given.get("issuer"), f"{where} issuer", blanks=False))
    audiences = faults.of(lambda: _audiences(given.get("audience"), f"{where} audience"))
    jwks_file, jwks_url = faults.of(lambda: _source(given, where)) or (None, None)
    values: dict[str, Any] = {}
    for key in (*_TEXTS, "scopes_prefix", _FLAG, *_BOUNDS):
        if key in given:
            values[key] = faults.of(partial(_value, key, given[key], f"{where} {key}"))
    faults.refuse()
    return JwtSettings(issuer=issuer or "", audiences=audiences or (), jwks_file=jwks_file, jwks_url=jwks_url, **values)


def _value(key: str, value: object, where: str) -> str | bool | float:
    if key in _TEXTS:
        return _text(value, where)
    if key == "scopes_prefix":
        return "" if value == "" else _text(value, where, blanks=False)
    if key == _FLAG:
        if not isinstance(value, bool):
            raise ClusterFileError(f"{where}: must be true or false, not {value!r}")
        return value
    low, high = _BOUNDS[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise ClusterFileError(f"{where}: must be a number from {low} to {high}, not {value!r}")
    return float(value)


def _text(value: object, where: str, *, blanks: bool = True) -> str:
    fits = isinstance(value, str) and 1 <= len(value) <= _TEXT_CHARS_MAX and value.isprintable()
    if not isinstance(value, str) or not fits or (not blanks and " " in value):
        kind = "printable characters" if blanks else "printable characters without blanks"
        given = "is missing" if value is None else f"must be text of 1 to {_TEXT_CHARS_MAX} {kind}, not {value!r}"
        raise ClusterFileError(f"{where}: {given}")
    return value


def _audiences(value: object, where: str) -> tuple[str, ...]:
    values = cast("list[object]", value) if isinstance(value, list) else [value]
    if not 1 <= len(values) <= _AUDIENCES_MAX:
        raise ClusterFileError(f"{where}: must be text, or a list of 1 to {_AUDIENCES_MAX} texts")
    return tuple(_text(audience, where) for audience in values)


def _source(table: Mapping[str, Any], where: str) -> tuple[Path | None, str | None]:
    key = only_key(table, ("jwks_file", "jwks_url"), where=where)
    value: object = table[key]
    if not isinstance(value, str) or not 1 <= len(value) <= 2048 or not value.isprintable():
        raise ClusterFileError(f"{where} {key}: must be text of 1 to 2048 printable characters, not {value!r}")
    if key == "jwks_file":
        return Path(value), None
    return None, _url(value, f"{where} jwks_url")


def _url(value: str, where: str) -> str:
    try:
        url = urlsplit(value)
        host, _ = url.hostname or "", url.port
    except ValueError:
        raise ClusterFileError(f"{where}: is not a URL: {value!r}") from None
    if url.username is not None or url.password is not None:
        # Do not show the URL: it holds a password.
        raise ClusterFileError(f"{where}: must not hold a user name or a password: public keys need none")
    if url.scheme == "http" and not is_loopback(host):
        raise ClusterFileError(f"{where}: must begin with https://; http:// is for a server on this machine's loopback")
    if url.scheme not in {"https", "http"} or not host or " " in value or not value.isascii():
        raise ClusterFileError(f"{where}: must be an https:// URL, not {value!r}")
    return value
