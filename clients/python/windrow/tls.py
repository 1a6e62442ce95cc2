"""The TLS settings of a client: which certificates it trusts, and how it proves who it is. If no connection can be
made, handshake.py finds out why.

    windrow.Client("grpcs://jobs.example.com:7419", org="acme")                   # CAs of the operating system
    windrow.Client("jobs.example.com:7419", org="acme", tls="/etc/ssl/acme-ca.pem")
    windrow.Client("10.0.0.5:7419", org="acme", tls=windrow.Tls(
        ca="/etc/ssl/acme-ca.pem", certificate="tls.crt", key="tls.key", server_name="jobs.example.com"))

Without `tls`, the environment decides: WINDROW_TLS_CA, WINDROW_TLS_CERTIFICATE, WINDROW_TLS_KEY and
WINDROW_TLS_SERVER_NAME are the fields of Tls, and any of them turns TLS on.
"""

from __future__ import annotations

import contextlib
import os
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import grpc

from windrow.errors import InvalidRequest

_VARIABLES = {
    "ca": "WINDROW_TLS_CA",
    "certificate": "WINDROW_TLS_CERTIFICATE",
    "key": "WINDROW_TLS_KEY",
    "server_name": "WINDROW_TLS_SERVER_NAME",
}
# Where operating systems keep the CAs that they trust: Debian and Alpine, Fedora and RHEL, SUSE, macOS.
_SYSTEM_CAS = (
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """TLS with these PEM files. The client reads them when it connects, and again when a connection fails after the
    files have changed. So a certificate can be replaced while the program runs."""

    # The CAs that may have signed the router's certificate. None: the CAs that the operating system trusts, or the CAs
    # in the file that SSL_CERT_FILE names.
    ca: Path | str | None = None
    # The client's certificate, with the certificates that link it to a CA, and the private key of the certificate. Some
    # routers demand a client certificate.
    certificate: Path | str | None = None
    key: Path | str | None = None
    # The name in the router's certificate, if this name is not the host of the address.
    server_name: str | None = None

    def __post_init__(self) -> None:
        if (self.certificate is None) is not (self.key is None):
            raise InvalidRequest("tls: a client's certificate and its key are given together, or neither of them")


class Pem(NamedTuple):
    """The contents of the files of a Tls. `roots` None: the system has no file of CAs, so gRPC uses its own CAs."""

    roots: bytes | None
    certificate: bytes | None
    key: bytes | None


def environment() -> dict[str, str]:
    """Returns the fields of Tls that the environment sets."""
    return {field: os.environ[name] for field, name in _VARIABLES.items() if os.environ.get(name)}


def chosen(given: Tls | Path | str | bool | None, *, secure: bool) -> Tls | None:
    """Returns the TLS settings, or None for plain text. `given` is the program's argument `tls`; if it is None, the
    environment decides. `secure` says whether the address begins with grpcs://. Raises InvalidRequest."""
    match given:
        case Tls():
            return given
        case False if secure:
            raise InvalidRequest("tls: is False, and the address begins with grpcs://: leave out one of the two")
        case False:
            return None
        case Path() | str():
            return Tls(ca=given)
        case _:
            found = environment()
            return Tls(**found) if found or secure or given else None


def read(tls: Tls) -> Pem:
    """Reads the files. Raises InvalidRequest if a file cannot be used."""
    if tls.certificate is not None and tls.key is not None:
        try:
            # A key with a passphrase is refused. Without `password`, OpenSSL would ask for the passphrase on the
            # terminal.
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_cert_chain(tls.certificate, tls.key, password="")
        except OSError as error:
            # An SSLError is an OSError, too. Its strerror does not help.
            why = getattr(error, "reason", None) or error.strerror
            raise InvalidRequest(f"tls: certificate {tls.certificate} and key {tls.key}: {why}") from error
    ca = tls.ca or _system_ca()
    roots = None if ca is None else _read("ca", ca)
    # Do not check the system's own file, because it has many certificates and the check would be slow.
    if tls.ca is not None and roots is not None and not _has_certificate(roots):
        raise InvalidRequest(f"tls ca: {tls.ca}: has no certificate that can be read (-----BEGIN CERTIFICATE-----)")
    return Pem(
        roots=roots,
        certificate=None if tls.certificate is None else _read("certificate", tls.certificate),
        key=None if tls.key is None else _read("key", tls.key),
    )


def credentials(pem: Pem) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(pem.roots, pem.key, pem.certificate)


def pem_text(content: bytes) -> str:
    """Returns a PEM file as ASCII text, which `ssl` needs. Drops other characters, which may be in comments of the
    file."""
    return content.decode("ascii", "ignore")


def _has_certificate(content: bytes) -> bool:
    """Returns whether gRPC can use a file of CAs: one certificate that can be read is enough for gRPC."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    with contextlib.suppress(ssl.SSLError):
        context.load_verify_locations(cadata=pem_text(content))
    return context.cert_store_stats()["x509"] > 0


def _system_ca() -> str | None:
    """Returns the file of the CAs that the system trusts. Without this file, gRPC for Python would use CAs of its
    own."""
    named = os.environ.get("SSL_CERT_FILE") or ssl.get_default_verify_paths().cafile
    return named or next((path for path in _SYSTEM_CAS if Path(path).exists()), None)


def _read(field: str, path: Path | str) -> bytes:
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise InvalidRequest(f"tls {field}: {path}: {error.strerror}") from error
    if b"-----BEGIN" not in content:
        raise InvalidRequest(f"tls {field}: {path}: is not a PEM file (-----BEGIN …)")
    return content
