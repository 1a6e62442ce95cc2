"""Which principal a client's certificate names, over real TLS connections: only what gRPC has verified counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import grpc
import pytest
from cryptography import x509

from proof.certificates import Authority, Pair
from router.gate.auth.certificate_settings import CertificateEntry
from router.gate.auth.certificates import ClientCertificates
from router.gate.auth.principal import Principal, Unauthenticated
from router.gate.auth.scopes import Scope
from shard.vocabulary import OrgId


def entry(*, uri: str | None = None, subject: str | None = None, org: str = "acme") -> CertificateEntry:
    return CertificateEntry(uri=uri, subject=subject, org=OrgId(org), scopes=frozenset({Scope.READ}))


def signed(authority: Authority, name: str = "worker", *uris: str) -> Pair:
    return authority.sign(name, organization="Acme", uris=uris)


async def judged(
    authority: Authority,
    certificate: Pair | None,
    entries: Sequence[CertificateEntry],
    *,
    verifies: bool = True,
) -> Principal | Unauthenticated | None:
    """Makes a call over TLS with this certificate. Returns the principal or the error that the server found."""
    certificates = ClientCertificates(entries)
    found: list[Principal | Unauthenticated | None] = []

    async def answer(_request: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> bytes:
        try:
            found.append(certificates.principal(context.auth_context()))
        except Unauthenticated as error:
            found.append(error)
        return b""

    server = grpc.aio.server()
    handlers: dict[str, Any] = {"Call": grpc.unary_unary_rpc_method_handler(answer)}  # pyrefly: ignore[bad-argument-type]
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("tests.Tests", handlers),))
    shown = authority.sign("server")
    credentials = grpc.ssl_server_credentials(
        [(shown.key, shown.certificate)], authority.pem, require_client_auth=verifies
    )
    port = server.add_secure_port("127.0.0.1:0", credentials)
    await server.start()
    try:
        own = (None, None) if certificate is None else (certificate.key, certificate.certificate)
        trusted = grpc.ssl_channel_credentials(authority.pem, *own)
        async with grpc.aio.secure_channel(f"localhost:{port}", trusted) as channel:
            call: Any = channel.unary_unary("/tests.Tests/Call")
            await call(b"", timeout=60)
    finally:
        await server.stop(None)
    return found[0]


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


async def test_a_uri_names_the_caller_until_the_certificate_expires(authority: Authority) -> None:
    certificate = signed(authority, "worker", "spiffe://example.com/ns/jobs/worker")
    found = await judged(authority, certificate, [entry(uri="spiffe://example.com/ns/jobs/*")])
    assert isinstance(found, Principal)
    assert found.name == "certificate:spiffe://example.com/ns/jobs/worker"
    assert (found.org, found.scopes) == ("acme", frozenset({Scope.READ}))
    until = x509.load_pem_x509_certificate(certificate.certificate).not_valid_after_utc
    assert found.expires_at == until.timestamp()


async def test_a_subject_is_written_as_in_rfc_4514(authority: Authority) -> None:
    found = await judged(authority, signed(authority, "ops, Europe"), [entry(subject="CN=ops\\, Europe,O=Acme")])
    assert isinstance(found, Principal)
    assert found.name == "certificate:CN=ops\\, Europe,O=Acme"


async def test_a_certificate_that_no_entry_names_is_refused_with_its_names(authority: Authority) -> None:
    certificate = signed(authority, "worker", "spiffe://example.com/ns/other/worker")
    found = await judged(authority, certificate, [entry(uri="spiffe://example.com/ns/jobs/*")])
    assert isinstance(found, Unauthenticated)
    assert "'CN=worker,O=Acme' or its URI 'spiffe://example.com/ns/other/worker'" in str(found)


async def test_a_certificate_with_two_uris_is_not_known_by_either(authority: Authority) -> None:
    certificate = signed(authority, "worker", "spiffe://example.com/a", "spiffe://example.com/b")
    found = await judged(
        authority, certificate, [entry(uri="spiffe://example.com/a"), entry(uri="spiffe://example.com/b")]
    )
    assert isinstance(found, Unauthenticated)


async def test_a_certificate_that_the_server_did_not_ask_for_does_not_count(authority: Authority) -> None:
    entries = [entry(subject="CN=worker,O=Acme")]
    for certificate in (signed(authority, "worker"), signed(Authority(), "worker"), None):
        assert await judged(authority, certificate, entries, verifies=False) is None


async def test_a_certificate_of_another_authority_gets_no_connection(authority: Authority) -> None:
    for certificate in (signed(Authority(), "worker"), None):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await judged(authority, certificate, [entry(subject="CN=worker,O=Acme")])
        assert refused.value.code() == grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize(
    ("pattern", "uri", "matches"),
    [
        ("spiffe://e/a/*", "spiffe://e/a/b", True),
        ("spiffe://e/a/*", "spiffe://e/a/b/c", True),
        ("spiffe://e/a/*", "spiffe://e/a/", False),
        ("spiffe://e/a/*", "spiffe://e/a", False),
        ("spiffe://e/a/*", "spiffe://e/ab", False),
        ("spiffe://e/a/*", None, False),
        ("spiffe://e/a", "spiffe://e/a/b", False),
        ("spiffe://e/a", "spiffe://E/a", False),
        ("spiffe://e/a", "spiffe://e/a", True),
    ],
)
def test_a_star_stands_for_what_follows_a_slash(pattern: str, uri: str | None, matches: bool) -> None:
    assert entry(uri=pattern).matches(uri, "CN=worker") is matches
