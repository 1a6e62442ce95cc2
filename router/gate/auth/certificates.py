"""Reads from a client's certificate who calls, by the [[auth.certificate]] tables of the cluster file. No I/O.

A certificate counts only if gRPC has verified it against `client_ca` of [tls] in the connection's handshake. Without
`client_ca`, gRPC asks for no certificate. gRPC shows the verified certificate in the call's authentication context.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

from cryptography import x509

from router.gate.auth.certificate_settings import CertificateEntry
from router.gate.auth.principal import Principal, Unauthenticated

_REMEMBERED_MAX = 10_000
# The longest id that SPIFFE allows.
_NAME_CHARS_MAX = 2048
# The authentication context of gRPC has the certificate under this key.
_PEM = "x509_pem_cert"


class ClientCertificates:
    """Finds the callers whom certificates name. The first entry that matches a certificate decides."""

    def __init__(self, entries: Sequence[CertificateEntry]) -> None:
        self._entries = tuple(entries)
        # A cache, because reading a certificate takes longer than all other checks of a small call.
        self._remembered = lru_cache(maxsize=_REMEMBERED_MAX)(self._named)

    def principal(self, auth_context: Mapping[str, Iterable[bytes]]) -> Principal | None:
        """Returns the caller whom the certificate of a call's connection names, or None if there is no certificate. The
        principal expires with the certificate. Raises Unauthenticated if no entry matches."""
        certificates = tuple(auth_context.get(_PEM, ()))
        return self._remembered(certificates[0]) if len(certificates) == 1 else None

    def _named(self, pem: bytes) -> Principal:
        uri, subject, expires_at = _read(pem)
        named = subject if uri is None else uri
        for entry in self._entries:
            if entry.matches(uri, subject) and len(named) <= _NAME_CHARS_MAX and named.isprintable():
                return Principal(f"certificate:{named}", entry.org, entry.scopes, expires_at)
        raise Unauthenticated(
            f"the client's certificate is good, but no [[auth.certificate]] of the cluster file has its subject "
            f"{subject[:200]!r}{f' or its URI {uri[:200]!r}' if uri else ''}"
        )


def _read(pem: bytes) -> tuple[str | None, str, float]:
    """Returns the URI of a verified certificate (None unless it has exactly one), its subject, and until when it is
    good."""
    try:
        certificate = x509.load_pem_x509_certificate(pem)
        uris = _uris(certificate)
        subject, expires_at = certificate.subject.rfc4514_string(), certificate.not_valid_after_utc.timestamp()
    except (ValueError, x509.DuplicateExtension, x509.UnsupportedGeneralNameType):
        raise Unauthenticated("the client's certificate is good, but its names cannot be read") from None
    return uris[0] if len(uris) == 1 else None, subject, expires_at


def _uris(certificate: x509.Certificate) -> list[str]:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    return names.get_values_for_type(x509.UniformResourceIdentifier)
