"""Certificates for tests and benchmarks, and the authorities that sign them. Each run of tests or benchmarks makes new
keys, and stores them only in its own files."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

_DAY = timedelta(days=1)
HOSTS = ("localhost", "127.0.0.1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A certificate and its key, as PEM."""

    certificate: bytes
    key: bytes

    def save(self, certificate: Path, key: Path) -> None:
        """Replaces both files, each in one step. Between the two steps, the certificate and the key do not match."""
        for path, content in ((certificate, self.certificate), (key, self.key)):
            other = path.with_suffix(".new")
            other.touch(mode=0o600)
            other.write_bytes(content)
            os.replace(other, path)


class Authority:
    """A certificate authority."""

    def __init__(self, name: str = "test CA") -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        now = datetime.now(UTC)
        self._certificate = (
            x509.CertificateBuilder(self._name, self._name, self._key.public_key(), x509.random_serial_number())
            .not_valid_before(now - _DAY)
            .not_valid_after(now + 365 * _DAY)
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .sign(self._key, hashes.SHA256())
        )

    @property
    def pem(self) -> bytes:
        return self._certificate.public_bytes(Encoding.PEM)

    def saved(self, path: Path) -> Path:
        path.write_bytes(self.pem)
        return path

    def sign(
        self,
        name: str = "router",
        *,
        organization: str | None = None,
        hosts: Sequence[str] = HOSTS,
        uris: Sequence[str] = (),
        begins: timedelta = timedelta(0),
        lasts: timedelta = 60 * _DAY,
    ) -> Pair:
        """Returns a certificate with CN=`name` for these hosts and URIs. The certificate has expired if `lasts` is less
        than 0, and is not valid yet if `begins` is more than a day."""
        key = ec.generate_private_key(ec.SECP256R1())
        now = datetime.now(UTC)
        subject = [x509.NameAttribute(NameOID.COMMON_NAME, name)]
        if organization is not None:
            subject.insert(0, x509.NameAttribute(NameOID.ORGANIZATION_NAME, organization))
        names = [*map(_host, hosts), *map(x509.UniformResourceIdentifier, uris)]
        certificate = (
            x509.CertificateBuilder(self._name, x509.Name(subject), key.public_key(), x509.random_serial_number())
            .not_valid_before(now + min(lasts, begins) - _DAY)
            .not_valid_after(now + lasts)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        return Pair(
            certificate=certificate.public_bytes(Encoding.PEM),
            key=key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
        )


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
