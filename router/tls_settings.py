"""The [tls] table of the cluster file. Pure: router/process/certificates.py reads the files.

[tls]
certificate = "/etc/windrow/tls/tls.crt"
key = "/etc/windrow/tls/tls.key"
client_ca = "/etc/windrow/tls/clients.crt"
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from shard.placement.cluster_file import Cluster, ClusterFileError, Faults, known_keys


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsSettings:
    """Paths of PEM files."""

    # The router's certificate, then the certificates that link it to a CA that its clients know.
    certificate: Path
    # The private key of the certificate.
    key: Path
    # The CAs of clients: each client must show a certificate from one of them. None: clients need no certificate.
    client_ca: Path | None = None

    @property
    def paths(self) -> tuple[Path, ...]:
        return (self.certificate, self.key) if self.client_ca is None else (self.certificate, self.key, self.client_ca)


def tls_settings(cluster: Cluster) -> TlsSettings | None:
    """Reads and checks the [tls] table; None if there is none. Raises ClusterFileError with all faults, one a line."""
    table = cluster.tables.get("tls")
    if table is None:
        return None
    where = f"{cluster.source}: [tls]"
    faults = Faults()
    faults.of(lambda: known_keys(table, {"certificate", "key", "client_ca"}, where=where))
    certificate, key = (faults.of(partial(_path, table, name, where)) for name in ("certificate", "key"))
    client_ca = faults.of(lambda: _path(table, "client_ca", where)) if "client_ca" in table else None
    faults.refuse()
    assert certificate is not None
    assert key is not None
    return TlsSettings(certificate=certificate, key=key, client_ca=client_ca)


def _path(table: Mapping[str, Any], name: str, where: str) -> Path:
    value: object = table.get(name)
    if not isinstance(value, str) or not value or "-----BEGIN" in value:
        # Do not show the value, which may be the key itself.
        raise ClusterFileError(f"{where}: {name} must be the path of a PEM file")
    return Path(value)
