"""The certificate that a router process shows. The process follows changes of the certificate's files while it runs.

New files take effect with the next handshake; open connections stay open. If one of the files cannot be used, all of
them are refused, and the previous ones stay in use. This module does not decide what a client may do.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import cast

import grpc
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

from router.tls_settings import TlsSettings
from shard import metrics
from shard.placement.cluster_file import ClusterFileError
from shard.placement.file_watcher import WatchedFiles

_log = logging.getLogger(__name__)

# The pause before refused files are read again: they may be complete soon.
_RETRY_S = 1.0
# The pause between two comparisons of the expiry with the clock.
_CLOCK_S = 600.0
# For each of these times, the log says once that a certificate expires in less than that time.
_REPORTED_AT = (timedelta(days=30), timedelta(days=7), timedelta(0))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Loaded:
    """The contents of the files when they were last found usable."""

    contents: tuple[bytes, ...]
    configuration: grpc.ServerCertificateConfiguration
    subject: str
    begins_at: datetime
    expires_at: datetime


class Certificates:
    """The files in use. `credentials` is for the server; `run` follows the files. The constructor raises
    ClusterFileError if the files cannot be used."""

    def __init__(self, settings: TlsSettings) -> None:
        self._settings = settings
        self._files = WatchedFiles(*settings.paths)
        self._loaded = self._load()
        # The configuration that gRPC has.
        self._given = self._loaded.configuration
        self._reported: timedelta | None = None
        self._report_beginning()
        self._report_expiry()

    def credentials(self) -> grpc.ServerCredentials:
        return grpc.dynamic_ssl_server_credentials(
            self._given,
            # The published types do not allow None, which means "no change".
            cast("Callable[[], grpc.ServerCertificateConfiguration]", self._new_configuration),
            # gRPC for Python can only require a client's certificate, and cannot make it optional.
            require_client_authentication=self._settings.client_ca is not None,
        )

    def hurry(self) -> None:
        """Makes `run` read the files now."""
        self._files.hurry()

    async def run(self) -> None:
        """Follows changes of the files until cancelled."""
        refused = ""
        while True:
            await self._files.changed(within_s=_RETRY_S if refused else _CLOCK_S)
            try:
                loaded = await asyncio.to_thread(self._load)
            # RuntimeError: no thread can be started now.
            except (ClusterFileError, RuntimeError) as error:
                if str(error) != refused:
                    refused = str(error)
                    _log.error("the new TLS files are refused, and the previous ones stay in use: %s", refused)
            else:
                refused = ""
                if loaded.contents != self._loaded.contents:
                    self._loaded, self._reported = loaded, None
                    _log.info("new TLS files are in use: %s, until %s", loaded.subject, _shown(loaded.expires_at))
                    self._report_beginning()
            self._report_expiry()

    def _new_configuration(self) -> grpc.ServerCertificateConfiguration | None:
        """Returns the configuration for the next handshakes, or None if it has not changed. gRPC calls this before
        every handshake, in a thread of its own."""
        configuration = self._loaded.configuration
        if configuration is self._given:
            return None
        self._given = configuration
        return configuration

    def _load(self) -> _Loaded:
        # Look before reading: a write in between must count as a change.
        self._files.look()
        contents = tuple(map(_read, self._settings.paths))
        certificate, key = contents[:2]
        own, *_ = _certificates(certificate, self._settings.certificate)
        try:
            public_key = own.public_key()
        except (ValueError, UnsupportedAlgorithm):
            public_key = None
        if not isinstance(public_key, rsa.RSAPublicKey | ec.EllipticCurvePublicKey):
            # gRPC would start with such files, and then fail in every handshake.
            raise ClusterFileError(f"{self._settings.certificate}: gRPC takes certificates with RSA or ECDSA keys only")
        if _public_key(key, self._settings.key) != public_key.public_bytes(
            Encoding.DER, PublicFormat.SubjectPublicKeyInfo
        ):
            raise ClusterFileError(
                f"{self._settings.key}: is not the key of the first certificate in {self._settings.certificate}"
            )
        client_ca = None
        if self._settings.client_ca is not None:
            client_ca = contents[2]
            _certificates(client_ca, self._settings.client_ca)
        return _Loaded(
            contents=contents,
            configuration=grpc.ssl_server_certificate_configuration([(key, certificate)], root_certificates=client_ca),
            subject=own.subject.rfc4514_string() or f"serial number {own.serial_number:x}",
            begins_at=own.not_valid_before_utc,
            expires_at=own.not_valid_after_utc,
        )

    def _report_beginning(self) -> None:
        loaded = self._loaded
        if loaded.begins_at > datetime.now(UTC):
            _log.error(
                "the TLS certificate %s is valid only from %s: clients refuse it until then; is this machine's clock "
                "right?",
                loaded.subject,
                _shown(loaded.begins_at),
            )

    def _report_expiry(self) -> None:
        metrics.CERTIFICATE_EXPIRY.set(self._loaded.expires_at.timestamp())
        left = self._loaded.expires_at - datetime.now(UTC)
        reached = min((each for each in _REPORTED_AT if left <= each), default=None)
        if reached is None or reached == self._reported:
            return
        self._reported = reached
        if left <= timedelta(0):
            level, what = logging.ERROR, "expired on %s: clients refuse it"
        else:
            level, what = logging.WARNING, f"expires on %s, in {left.days} days"
        _log.log(
            level,
            f"the TLS certificate %s {what}; replace %s and its key, no restart is needed",
            self._loaded.subject,
            _shown(self._loaded.expires_at),
            self._settings.certificate,
        )


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ClusterFileError(f"{path}: {error.strerror}") from error


def _certificates(pem: bytes, path: Path) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(pem)
    except ValueError:
        raise ClusterFileError(f"{path}: is not a PEM certificate (-----BEGIN CERTIFICATE-----)") from None


def _public_key(pem: bytes, path: Path) -> bytes:
    # Drop the causes of these errors: a parser's message may quote what the parser has read.
    try:
        key = load_pem_private_key(pem, None)
    except TypeError:
        raise ClusterFileError(f"{path}: has a passphrase; store the key without one, in a file of mode 600") from None
    except (ValueError, UnsupportedAlgorithm):
        raise ClusterFileError(f"{path}: is not a PEM private key (-----BEGIN PRIVATE KEY-----)") from None
    return key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


def _shown(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%d %H:%M UTC")
