"""The [auth] table of the cluster file. Without it, everybody who reaches the router may do everything. Pure.

[auth]
api_keys = true
api_keys_trusted_seconds = 300

[auth.jwt]                # router/gate/auth/jwt_settings.py

[[auth.certificate]]      # router/gate/auth/certificate_settings.py
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from router.gate.auth.certificate_settings import CertificateEntry, certificate_entries
from router.gate.auth.jwt_settings import JwtSettings, jwt_settings
from shard.placement.cluster_file import Cluster, ClusterFileError, Faults, known_keys

_TRUSTED_S_MAX = 86_400


@dataclass(frozen=True, slots=True, kw_only=True)
class AuthSettings:
    # Whether callers may prove who they are with an API key.
    api_keys: bool = True
    # For how long the API keys that a router process knows stay good while the catalog does not answer.
    api_keys_trusted_seconds: float = 300.0
    # None: no JSON Web Tokens are taken.
    jwt: JwtSettings | None = None
    # The callers whom client certificates name. Empty: no certificates are taken.
    certificates: tuple[CertificateEntry, ...] = ()


def auth_settings(cluster: Cluster) -> AuthSettings | None:
    """Reads and checks the [auth] table; None if the file has none. Raises ClusterFileError with all faults, one a
    line."""
    table = cluster.tables.get("auth")
    if table is None:
        return None
    where = f"{cluster.source}: [auth]"
    plain = {"api_keys", "api_keys_trusted_seconds"}
    faults = Faults()
    faults.of(lambda: known_keys(table, plain | {"jwt", "certificate"}, where=where))
    jwt: JwtSettings | None = None
    certificates: tuple[CertificateEntry, ...] = ()
    if "jwt" in table:
        jwt = faults.of(lambda: jwt_settings(table["jwt"], where=f"{cluster.source}: [auth.jwt]"))
    if "certificate" in table:
        certificates = faults.of(lambda: _certificates(cluster, table["certificate"])) or ()
    settings = AuthSettings(
        **{key: value for key, value in table.items() if key in plain}, jwt=jwt, certificates=certificates
    )
    faults.of(lambda: _check(settings, where))
    faults.refuse()
    return settings


def _certificates(cluster: Cluster, tables: object) -> tuple[CertificateEntry, ...]:
    where = f"{cluster.source}: [[auth.certificate]]"
    entries = certificate_entries(tables, where=where)
    if "client_ca" not in cluster.tables.get("tls", {}):
        raise ClusterFileError(f"{where}: needs client_ca in [tls]: without it, routers ask clients for no certificate")
    return entries


def _check(settings: AuthSettings, where: str) -> None:
    # A TOML file may have a value of any type.
    keys = cast("object", settings.api_keys)
    seconds = cast("object", settings.api_keys_trusted_seconds)
    if not isinstance(keys, bool):
        raise ClusterFileError(f"{where} api_keys: must be true or false, not {keys!r}")
    if not keys and settings.jwt is None and not settings.certificates:
        raise ClusterFileError(
            f"{where}: nobody could call: set api_keys = true, add [auth.jwt] or [[auth.certificate]], or remove the "
            "table"
        )
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds <= _TRUSTED_S_MAX:
        raise ClusterFileError(
            f"{where} api_keys_trusted_seconds: must be a number from 0 to {_TRUSTED_S_MAX}, not {seconds!r}"
        )
