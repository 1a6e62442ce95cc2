"""The router's certificate: files that cannot be used, and what the log says about a certificate that expires."""

from __future__ import annotations

import asyncio
import base64
import logging
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, Encoding, PrivateFormat

import router.process.certificates
import shard.placement.file_watcher
from proof.certificates import Authority, Pair
from router.process.certificates import Certificates
from router.tls_settings import TlsSettings, tls_settings
from shard.placement.cluster_file import ClusterFileError, parse_cluster
from tests.routers import until

ONE = '[[shard]]\nname = "s1"\ndsn = "dbname=x"\n'
DAY = timedelta(days=1)
AUTHORITY = Authority()
PAIR, OTHER = AUTHORITY.sign(), AUTHORITY.sign()
LOCKED_KEY = ec.generate_private_key(ec.SECP256R1()).private_bytes(
    Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret")
)


# The certificate of the tests, with the identifier of an unknown elliptic curve.
STRANGE = b"".join(
    [
        b"-----BEGIN CERTIFICATE-----\n",
        base64.encodebytes(
            x509.load_pem_x509_certificate(PAIR.certificate)
            .public_bytes(Encoding.DER)
            .replace(bytes.fromhex("06082a8648ce3d030107"), bytes.fromhex("06082a8648ce3d03017f"))
        ),
        b"-----END CERTIFICATE-----\n",
    ]
)


@pytest.fixture
def settings(tmp_path: Path) -> TlsSettings:
    made = TlsSettings(
        certificate=tmp_path / "tls.crt", key=tmp_path / "tls.key", client_ca=AUTHORITY.saved(tmp_path / "ca.crt")
    )
    PAIR.save(made.certificate, made.key)
    return made


@pytest.mark.parametrize(
    ("table", "fault"),
    [
        ("", "certificate must be the path of a PEM file"),
        ("certificate = 'a'", "key must be the path of a PEM file"),
        ("certificate = 'a'\nkey = 7", "key must be the path of a PEM file"),
        ("certificate = 'a'\nkey = '-----BEGIN PRIVATE KEY-----hunter2'", "key must be the path of a PEM file"),
        ("certificate = 'a'\nkey = 'b'\nclient_cas = 'c'", "unknown key 'client_cas'; did you mean 'client_ca'?"),
    ],
)
def test_a_table_that_cannot_be_used_is_refused(table: str, fault: str) -> None:
    with pytest.raises(ClusterFileError) as refused:
        tls_settings(parse_cluster(f"{ONE}[tls]\n{table}", source="cluster.toml"))
    assert f"cluster.toml: [tls]: {fault}" in str(refused.value)
    assert "hunter2" not in str(refused.value)


def test_a_cluster_file_without_the_table_has_no_tls() -> None:
    assert tls_settings(parse_cluster(ONE, source="cluster.toml")) is None


def spoiled(name: str, content: bytes | None) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        (folder / name).unlink()
        if content is not None:
            (folder / name).write_bytes(content)

    return spoil


BAD = {
    "no certificate": (spoiled("tls.crt", None), "tls.crt: No such file or directory"),
    "no key": (spoiled("tls.key", None), "tls.key: No such file or directory"),
    "no CA": (spoiled("ca.crt", None), "ca.crt: No such file or directory"),
    "an empty certificate": (spoiled("tls.crt", b""), "tls.crt: is not a PEM certificate"),
    "half a certificate": (spoiled("tls.crt", PAIR.certificate[:200]), "tls.crt: is not a PEM certificate"),
    "a key in place of the certificate": (spoiled("tls.crt", PAIR.key), "tls.crt: is not a PEM certificate"),
    "a certificate in place of the key": (spoiled("tls.key", PAIR.certificate), "tls.key: is not a PEM private key"),
    "half a key": (spoiled("tls.key", PAIR.key[:100]), "tls.key: is not a PEM private key"),
    "a key with a passphrase": (spoiled("tls.key", LOCKED_KEY), "tls.key: has a passphrase"),
    "another key": (spoiled("tls.key", OTHER.key), "tls.key: is not the key of the first certificate in"),
    "a key of an unknown curve": (spoiled("tls.crt", STRANGE), "tls.crt: gRPC takes certificates with RSA or ECDSA"),
    "a CA that is none": (spoiled("ca.crt", b"no"), "ca.crt: is not a PEM certificate"),
}


@pytest.mark.parametrize(("spoil", "fault"), BAD.values(), ids=BAD.keys())
def test_files_that_cannot_be_used_are_refused_by_name(
    settings: TlsSettings, spoil: Callable[[Path], None], fault: str
) -> None:
    spoil(settings.key.parent)
    with pytest.raises(ClusterFileError) as refused:
        Certificates(settings)
    assert fault in str(refused.value)
    # No part of a key is shown, in the message or in its causes.
    assert "-----END" not in str(refused.value)
    assert refused.value.__cause__ is None or isinstance(refused.value.__cause__, OSError)


@pytest.mark.parametrize(
    ("lasts", "level", "words"),
    [
        (31 * DAY, None, ""),
        (29 * DAY, logging.WARNING, "expires on"),
        (6 * DAY, logging.WARNING, "expires on"),
        (-DAY, logging.ERROR, "expired on"),
    ],
)
def test_a_certificate_that_expires_soon_is_reported(
    settings: TlsSettings, caplog: pytest.LogCaptureFixture, lasts: timedelta, level: int | None, words: str
) -> None:
    AUTHORITY.sign(lasts=lasts).save(settings.certificate, settings.key)
    Certificates(settings)
    assert [record.levelno for record in caplog.records] == ([] if level is None else [level])
    assert words in caplog.text


def test_a_certificate_that_is_not_valid_yet_is_reported(
    settings: TlsSettings, caplog: pytest.LogCaptureFixture
) -> None:
    AUTHORITY.sign(begins=3 * DAY).save(settings.certificate, settings.key)
    Certificates(settings)
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    assert "is valid only from" in caplog.text


async def test_a_certificate_that_is_looked_at_often_is_reported_once(
    settings: TlsSettings, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard.placement.file_watcher, "_POLL_S", 0.001)
    monkeypatch.setattr(router.process.certificates, "_CLOCK_S", 0.001)
    caplog.set_level(logging.INFO)
    AUTHORITY.sign(lasts=20 * DAY).save(settings.certificate, settings.key)
    certificates = Certificates(settings)
    following = asyncio.create_task(certificates.run())
    try:
        AUTHORITY.sign("new", lasts=5 * DAY).save(settings.certificate, settings.key)
        await said(caplog, "new TLS files are in use: CN=new", 1)
        await said(caplog, "no restart is needed", 2)
        AUTHORITY.sign("newest").save(settings.certificate, settings.key)
        await said(caplog, "new TLS files are in use: CN=newest", 1)
        assert caplog.text.count("no restart is needed") == 2
    finally:
        following.cancel()
        await asyncio.wait({following})


async def test_new_files_that_cannot_be_used_are_reported_once_and_the_old_ones_stay(
    settings: TlsSettings, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard.placement.file_watcher, "_POLL_S", 0.001)
    monkeypatch.setattr(router.process.certificates, "_RETRY_S", 0.001)
    caplog.set_level(logging.INFO)
    certificates = Certificates(settings)
    following = asyncio.create_task(certificates.run())
    try:
        settings.key.write_bytes(OTHER.key)
        await said(caplog, "the previous ones stay in use", 1)
        new: Pair = AUTHORITY.sign("new")
        new.save(settings.certificate, settings.key)
        await said(caplog, "new TLS files are in use: CN=new", 1)
        # The router has tried to read the files many times by now.
        assert caplog.text.count("is not the key of the first certificate") <= 2
    finally:
        following.cancel()
        await asyncio.wait({following})


async def said(caplog: pytest.LogCaptureFixture, words: str, times: int) -> None:
    await asyncio.to_thread(until, lambda: caplog.text.count(words) >= times, f"the log says {words!r}")


def test_a_certificate_with_a_key_that_grpc_does_not_take_is_refused(settings: TlsSettings) -> None:
    key = ed25519.Ed25519PrivateKey.generate()
    name = x509.Name([])
    now = datetime.now(UTC)
    made = x509.CertificateBuilder(name, name, key.public_key(), 1, now - DAY, now + DAY).sign(key, None)
    settings.certificate.write_bytes(made.public_bytes(Encoding.PEM))
    with pytest.raises(ClusterFileError, match=r"tls\.crt: gRPC takes certificates with RSA or ECDSA keys only"):
        Certificates(settings)


async def test_files_are_followed_again_when_threads_can_be_started_again(
    settings: TlsSettings, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard.placement.file_watcher, "_POLL_S", 0.001)
    monkeypatch.setattr(router.process.certificates, "_RETRY_S", 0.001)
    caplog.set_level(logging.INFO)
    failures = [RuntimeError("can't start new thread") for _ in range(3)]
    in_thread = asyncio.to_thread

    async def to_thread(*arguments: Any) -> Any:
        if failures and arguments[0].__name__ in fail_in:
            raise failures.pop()
        return await in_thread(*arguments)

    fail_in = {"_load", "_stat_all"}
    monkeypatch.setattr(asyncio, "to_thread", to_thread)
    following = asyncio.create_task(Certificates(settings).run())
    try:
        for name in ("_stat_all", "_load"):
            fail_in = {name}
            failures[:] = [RuntimeError("can't start new thread") for _ in range(3)]
            AUTHORITY.sign(name).save(settings.certificate, settings.key)
            await said(caplog, f"new TLS files are in use: CN={name}", 1)
            assert not failures
    finally:
        following.cancel()
        await asyncio.wait({following})
    assert following.cancelled()
