"""Which JSON Web Tokens are accepted, which callers they name, and what the messages about refused tokens say."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from hypothesis import given
from hypothesis import strategies as st
from joserfc.jwk import Key, RSAKey

from router.gate.auth.jwt_key_ring import KeyRing
from router.gate.auth.jwt_settings import JwtSettings
from router.gate.auth.jwt_tokens import JwtTokens
from router.gate.auth.principal import Expired, Unauthenticated
from router.gate.auth.scopes import Scope
from tests.issuers import (
    AUDIENCE,
    BAD_TOKENS,
    ISSUER,
    FixedSource,
    claims,
    forged,
    hmac_signed,
    jwks,
    signing_key,
    token,
)

ALGORITHMS = ("Ed25519", "EdDSA", "ES256", "RS256")
KEYS = [signing_key("Ed25519", "ed"), signing_key("ES256", "ec"), signing_key("RS256", "rsa")]
KEY_OF = {"Ed25519": KEYS[0], "EdDSA": KEYS[0], "ES256": KEYS[1], "RS256": KEYS[2]}
URL_SAFE = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"


async def verifier(*keys: Key, clock: Callable[[], float] = time.time, **settings: Any) -> JwtTokens:
    """Returns a verifier that knows these keys."""
    fields: dict[str, Any] = {
        "issuer": ISSUER,
        "audiences": (AUDIENCE,),
        "jwks_url": "https://id.example.com/keys",
    } | settings
    ring = KeyRing(FixedSource(jwks(*keys or KEYS)), refresh_s=600, valid_s=3600)
    await ring.refresh()
    return JwtTokens(JwtSettings(**fields), ring, clock=clock)


async def refusal(tokens: JwtTokens, sent: str) -> str:
    with pytest.raises(Unauthenticated) as refused:
        await tokens.verify(sent)
    # No message shows a token, or a signature that would complete a token without one.
    signature = sent.rpartition(".")[2]
    assert len(signature) < 20 or signature not in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
async def test_a_token_of_every_algorithm_names_its_org_its_scopes_and_its_end(algorithm: str) -> None:
    tokens = await verifier()
    until = int(time.time()) + 60
    principal = await tokens.verify(token(KEY_OF[algorithm], algorithm=algorithm, exp=until))
    assert principal.name == f"jwt:{ISSUER} worker-1"
    assert principal.org == "acme"
    assert principal.scopes == {Scope.ENQUEUE, Scope.CONSUME, Scope.READ, Scope.ADMIN}
    assert principal.expires_at == until + 30
    assert tokens.ended(principal) is None


@pytest.mark.parametrize("name", BAD_TOKENS)
async def test_a_bad_token_is_refused_and_told_why(name: str) -> None:
    bad = BAD_TOKENS[name]
    message = await refusal(await verifier(signing_key("Ed25519")), bad.make())
    assert bad.message in message


async def test_the_public_key_is_no_shared_secret() -> None:
    tokens = await verifier()
    rsa = KEYS[2]
    assert isinstance(rsa, RSAKey)
    for secret in (
        rsa.as_pem(private=False),
        rsa.public_key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo),
        json.dumps(rsa.as_dict(private=False)).encode(),
    ):
        said = await refusal(tokens, hmac_signed(secret, {"alg": "HS256", "kid": "rsa"}))
        assert "algorithm is 'HS256'; taken are ES256, Ed25519, EdDSA, RS256" in said
        # The header now names an algorithm that is accepted, but the signature is still an HMAC.
        assert "signature" in await refusal(tokens, hmac_signed(secret, {"alg": "RS256", "kid": "rsa"}))


async def test_a_token_cannot_choose_another_algorithm_than_its_keys() -> None:
    tokens = await verifier()
    for algorithm, key in (("RS256", "ed"), ("ES256", "rsa"), ("EdDSA", "ec")):
        sent = forged({"alg": algorithm, "kid": key}, json.dumps(claims()).encode(), b"x" * 64)
        assert "but its key signs by" in await refusal(tokens, sent)


@pytest.mark.parametrize(
    "header",
    [{"alg": "none"}, {"alg": "None"}, {"alg": ""}, {"alg": None}, {"alg": 1}, {"alg": ["RS256"]}, {"alg": "PS256"}],
    ids=str,
)
async def test_an_algorithm_that_is_not_taken_is_refused(header: dict[str, object]) -> None:
    tokens = await verifier()
    for signature in (b"", b"x" * 64):
        sent = forged(header | {"kid": "ed"}, json.dumps(claims()).encode(), signature)
        assert "algorithm" in await refusal(tokens, sent)


@pytest.mark.parametrize("extension", [{"crit": ["b64"], "b64": False}, {"crit": ["x"], "x": 1}, {"crit": []}], ids=str)
async def test_a_header_with_critical_extensions_is_refused(extension: dict[str, object]) -> None:
    header = {"alg": "Ed25519", "kid": "ed"} | extension
    said = await refusal(await verifier(), forged(header, json.dumps(claims()).encode(), b"x" * 64))
    assert "extensions" in said or "malformed" in said


async def test_a_token_of_another_type_is_refused() -> None:
    tokens = await verifier()
    for kind in ("logout+jwt", "dpop+jwt", 7):
        sent = forged({"alg": "Ed25519", "kid": "ed", "typ": kind}, json.dumps(claims()).encode(), b"x" * 64)
        assert "type is" in await refusal(tokens, sent)
    for header in ({"typ": "at+jwt"}, {"typ": "application/at+JWT"}, {}):
        await tokens.verify(token(KEYS[0], header={"alg": "Ed25519", "kid": "ed"} | header))


async def test_a_token_needs_no_kid_if_there_is_one_key() -> None:
    sent = token(KEYS[0], header={"alg": "Ed25519"})
    assert (await (await verifier(KEYS[0])).verify(sent)).org == "acme"
    assert "no kid" in await refusal(await verifier(), sent)


@pytest.mark.parametrize("off_s", [600, -600])
async def test_a_clock_that_is_10_minutes_off_is_named(off_s: float) -> None:
    tokens = await verifier(clock=lambda: time.time() + off_s)
    said = await refusal(tokens, token(KEYS[0], algorithm="Ed25519", exp=int(time.time()) + 300))
    assert "by this router's clock" in said
    assert "check the clocks of the issuer and of this router" in said
    # Time passes during the test, so the seconds are not exact.
    assert re.search(r"expired 3\d\d s ago" if off_s > 0 else r"(600|5\d\d) s from now", said)


async def test_the_leeway_is_between_the_clocks_of_issuer_and_router() -> None:
    now = time.time()
    tokens = await verifier(clock=lambda: now)
    for good in (token(KEYS[0], exp=now - 29), token(KEYS[0], nbf=now + 30), token(KEYS[0], iat=now + 30)):
        await tokens.verify(good)
    for bad in (token(KEYS[0], exp=now - 30), token(KEYS[0], nbf=now + 31), token(KEYS[0], iat=now + 31)):
        await refusal(tokens, bad)
    strict = await verifier(clock=lambda: now, leeway_seconds=0.0)
    await refusal(strict, token(KEYS[0], exp=now))


async def test_only_all_orgs_can_have_the_scope_cluster() -> None:
    allowed = await verifier(all_orgs=True)
    principal = await allowed.verify(token(KEYS[0], org="*", scope="cluster read"))
    assert (principal.org, principal.scopes) == (None, frozenset({Scope.CLUSTER, Scope.READ}))
    assert "all_orgs = true" in await refusal(await verifier(), token(KEYS[0], org="*"))
    assert (await allowed.verify(token(KEYS[0], scope="cluster read"))).scopes == {Scope.READ}
    assert "has none of the scopes" in await refusal(allowed, token(KEYS[0], scope="cluster"))


async def test_claims_and_prefix_are_the_configured_ones() -> None:
    tokens = await verifier(org_claim="https://example.com/org", scopes_claim="permissions", scopes_prefix="windrow:")
    more: dict[str, Any] = {
        "https://example.com/org": "globex",
        "permissions": ["windrow:enqueue", "consume", "windrow:fly", 7],
    }
    sent = token(KEYS[0], org=None, scope="admin", **more)
    principal = await tokens.verify(sent)
    assert (principal.org, principal.scopes) == ("globex", frozenset({Scope.ENQUEUE}))


async def test_one_audience_of_several_is_enough() -> None:
    tokens = await verifier(audiences=("a", "b"))
    await tokens.verify(token(KEYS[0], aud=["x", "b"]))
    assert "expected is 'a' or 'b'" in await refusal(tokens, token(KEYS[0], aud=["x", 3, None]))


@pytest.fixture(scope="module")
def known() -> JwtTokens:
    return asyncio.run(verifier())


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@given(data=st.data())
def test_no_change_of_a_good_token_is_taken(known: JwtTokens, algorithm: str, data: st.DataObject) -> None:
    good = token(KEY_OF[algorithm], algorithm=algorithm, iat=1_800_000_000, exp=4_000_000_000)
    at = data.draw(st.integers(0, len(good) - 1))
    length = data.draw(st.integers(0, 3))
    put = data.draw(st.text(alphabet=URL_SAFE + ".=+/ \n", max_size=3))
    changed = good[:at] + put + good[at + length :]
    if changed == good:
        return
    with pytest.raises(Unauthenticated):
        asyncio.run(known.verify(changed))


@given(changes=st.dictionaries(st.sampled_from(["org", "scope", "sub", "exp"]), st.text(max_size=9), min_size=1))
def test_no_claims_are_taken_under_the_signature_of_others(known: JwtTokens, changes: dict[str, str]) -> None:
    header, _, signature = token(KEYS[0]).split(".")
    payload = base64.urlsafe_b64encode(json.dumps(claims() | changes).encode()).rstrip(b"=").decode()
    with pytest.raises(Unauthenticated):
        asyncio.run(known.verify(f"{header}.{payload}.{signature}"))


@given(st.one_of(st.text(max_size=200), st.text(alphabet=URL_SAFE + ".", max_size=200)))
def test_whatever_is_no_token_is_refused_with_a_message(known: JwtTokens, sent: str) -> None:
    with pytest.raises(Unauthenticated) as refused:
        asyncio.run(known.verify(sent))
    assert 10 < len(str(refused.value)) < 500
    assert str(refused.value).isprintable()


@given(st.recursive(st.none() | st.booleans() | st.floats() | st.text(max_size=9), lambda of: st.lists(of, max_size=4)))
def test_signed_claims_of_any_type_are_judged_without_a_fault(known: JwtTokens, value: Any) -> None:
    for name in ("iss", "aud", "sub", "iat", "nbf", "exp", "org", "scope"):
        with contextlib.suppress(Unauthenticated):
            changed: dict[str, Any] = {name: value}
            asyncio.run(known.verify(token(KEYS[0], **changed)))


async def test_an_expired_token_is_told_apart_for_clients_that_can_get_another() -> None:
    with pytest.raises(Expired):
        await (await verifier()).verify(token(KEYS[0], exp=int(time.time()) - 3600))
