"""An issuer of JSON Web Tokens for tests: it has keys of every kind, signs any claims, and publishes its keys in a file
or over HTTP."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import hmac
import json
import os
import ssl
import threading
import time
from collections.abc import Callable, Generator, Mapping
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

from joserfc import jws
from joserfc.jwa import JWSAlgModel
from joserfc.jwk import ECKey, Key, OKPKey, RSAKey

ISSUER, AUDIENCE = "https://id.example.com", "windrow-tests"


class _Registry(jws.JWSRegistry):
    """Also signs with EdDSA, the older name of Ed25519. Suppresses the warning that the library gives for this name."""

    def get_alg(self, name: str) -> JWSAlgModel:
        return self.algorithms["Ed25519" if name == "EdDSA" else name]


_REGISTRY = _Registry(strict_check_header=False)


@cache
def signing_key(algorithm: str, kid: str = "first") -> Key:
    """Returns the private key of this name. Each key is made only once, because RSA keys take long to make."""
    match algorithm:
        case "RS256":
            return RSAKey.generate_key(2048, {"kid": kid})
        case "ES256":
            return ECKey.generate_key("P-256", {"kid": kid})
        case _:
            return OKPKey.generate_key("Ed25519", {"kid": kid})


def jwks(*keys: Key) -> bytes:
    """Returns the set of the public keys."""
    return json.dumps({"keys": [key.as_dict(private=False) for key in keys]}).encode()


def claims(**more: object) -> dict[str, Any]:
    """Returns valid claims with these changes. A claim that is None is left out."""
    now = int(time.time())
    good = {
        "iss": ISSUER,
        "aud": AUDIENCE,
        "sub": "worker-1",
        "iat": now,
        "exp": now + 3600,
        "org": "acme",
        "scope": "enqueue consume read admin",
    }
    return {name: value for name, value in (good | more).items() if value is not None}


def token(
    key: Key | None = None, *, algorithm: str = "Ed25519", header: Mapping[str, Any] | None = None, **more: Any
) -> str:
    """Returns a token with these claims, signed by the key; by default with the key's kid in its header."""
    key = signing_key(algorithm) if key is None else key
    fields = {"alg": algorithm, "kid": key.kid, "typ": "JWT"} if header is None else dict(header)
    return jws.serialize_compact(fields, json.dumps(claims(**more)), key, registry=_REGISTRY)


def forged(header: Mapping[str, Any], payload: bytes, signature: bytes) -> str:
    """Returns a token of exactly these parts."""
    parts = (json.dumps(header).encode(), payload, signature)
    return b".".join(base64.urlsafe_b64encode(part).rstrip(b"=") for part in parts).decode()


def hmac_signed(secret: bytes, header: Mapping[str, Any]) -> str:
    """Returns a token that is signed by HMAC. The secret for the signature is the text of a public key, which everybody
    knows."""
    signing_input = forged(header, json.dumps(claims()).encode(), b"").rstrip(".")
    signature = hmac.new(secret, signing_input.encode(), hashlib.sha256).digest()
    return f"{signing_input}.{base64.urlsafe_b64encode(signature).rstrip(b'=').decode()}"


def put(path: Path, content: bytes) -> None:
    """Replaces a file, as deployment tools do: by renaming another one."""
    other = path.with_suffix(".new")
    other.write_bytes(content)
    os.replace(other, path)


def jwt_table(**more: object) -> str:
    """Returns the table [auth.jwt] for this issuer. `more`: more keys of the table, such as jwks_file."""
    lines = {"issuer": ISSUER, "audience": AUDIENCE} | more
    return "[auth.jwt]\n" + "".join(
        f"{key} = {json.dumps(value if isinstance(value, bool | int | float) else str(value))}\n"
        for key, value in lines.items()
    )


class KeyServer:
    """Answers every GET with the result of `answer`, which may be replaced at any time."""

    def __init__(self) -> None:
        self.answer: Callable[[BaseHTTPRequestHandler], None] = page(b"{}")
        self.asked = 0
        # Set at the end of a test. A handler that hangs waits for this event.
        self.released = threading.Event()
        self.url = ""

    def hang(self, _request: BaseHTTPRequestHandler) -> None:
        self.released.wait()


def page(
    content: bytes, *, status: int = 200, kind: str = "application/json", **headers: str
) -> Callable[[BaseHTTPRequestHandler], None]:
    def answer(request: BaseHTTPRequestHandler) -> None:
        request.send_response(status)
        request.send_header("Content-Type", kind)
        for name, value in ({"Content_Length": str(len(content))} | headers).items():
            request.send_header(name.replace("_", "-"), value)
        request.end_headers()
        request.wfile.write(content)

    return answer


@contextlib.contextmanager
def key_server(tls: ssl.SSLContext | None = None) -> Generator[KeyServer, None, None]:
    """Serves on loopback until the end of the block."""
    served = KeyServer()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            served.asked += 1
            with contextlib.suppress(OSError):
                served.answer(self)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name of the library
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        if tls is not None:
            server.socket = tls.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
        served.url = f"{'http' if tls is None else 'https'}://127.0.0.1:{server.server_port}/jwks"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield served
        finally:
            served.released.set()
            server.shutdown()
            thread.join()


class FixedSource:
    """A source of keys. It returns `answer`, or raises `answer` if this is an error. It does so at once, or as soon as
    `open` is set."""

    place = "https://id.example.com/keys"

    def __init__(self, answer: bytes | Exception, *, is_deliberate: bool = False) -> None:
        self.answer = answer
        self.is_deliberate = is_deliberate
        self.asked = 0
        self.open = asyncio.Event()
        self.open.set()
        self.asked_again = asyncio.Event()
        self._changed = asyncio.Event()

    async def get(self) -> bytes:
        self.asked += 1
        if self.asked > 1:
            self.asked_again.set()
        await self.open.wait()
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    async def changed(self) -> None:
        await self._changed.wait()
        self._changed.clear()

    def change(self, answer: bytes | Exception) -> None:
        self.answer = answer
        self._changed.set()


class BadToken(NamedTuple):
    make: Callable[[], str]
    # A part of the message with which the token is refused.
    message: str


def _now(more_s: float) -> int:
    return int(time.time() + more_s)


# A key that does not belong to the issuer, but has the same `kid` as the issuer's key.
_STRANGER = OKPKey.generate_key("Ed25519", {"kid": "first"})
# Tokens that a router must refuse with UNAUTHENTICATED if it knows only `signing_key("Ed25519")`.
BAD_TOKENS: Mapping[str, BadToken] = {
    "no token at all": BadToken(lambda: "x", "malformed"),
    "two parts": BadToken(lambda: token().rpartition(".")[0], "malformed"),
    "an encrypted token": BadToken(lambda: "eyJhbGciOiJkaXIiLCJlbmMiOiJBMTI4R0NNIn0.a.b.c.d", "malformed"),
    "a header that is no JSON": BadToken(lambda: "AAAA.AAAA.AAAA", "malformed"),
    "a header that is nested too deeply": BadToken(lambda: f"{'W1tb' * 1500}.AAAA.AAAA", "malformed"),
    "oversized": BadToken(lambda: token(padding="x" * 9000), "at most 8,192"),
    "claims that are no object": BadToken(lambda: _signed(b"[]"), "claims are not a JSON object"),
    "claims that are nested too deeply": BadToken(lambda: _signed(b"[" * 5000), "claims are not a JSON object"),
    "expired": BadToken(lambda: token(exp=_now(-40)), "s ago by this router's clock"),
    "without expiry": BadToken(lambda: token(exp=None), "has no expiry"),
    "an expiry that is no number": BadToken(lambda: token(exp="2030-01-01"), "claim exp must be a number"),
    "an infinite expiry": BadToken(lambda: _signed(json.dumps(claims(exp=float("inf"))).encode()), "claim exp must be"),
    "not yet valid": BadToken(lambda: token(nbf=_now(600)), "is not valid before"),
    "issued in the future": BadToken(lambda: token(iat=_now(600)), "was issued at"),
    "another cluster's": BadToken(
        lambda: token(aud="windrow-b"), f"audience 'windrow-b', but expected is '{AUDIENCE}'"
    ),
    "without audience": BadToken(lambda: token(aud=None), "for the audience 'None'"),
    "another issuer's": BadToken(lambda: token(iss="https://evil.example"), f"but expected is '{ISSUER}'"),
    "without subject": BadToken(lambda: token(sub=None), "needs a subject"),
    "a subject that is no text": BadToken(lambda: token(sub="a\nb"), "needs a subject"),
    "an unknown key": BadToken(lambda: token(signing_key("Ed25519", "other")), "its key 'other' is not among the 1"),
    "a wrong key of the same name": BadToken(lambda: token(_STRANGER), "changed or forged"),
    "unsigned": BadToken(lambda: forged({"alg": "none"}, json.dumps(claims()).encode(), b""), "algorithm is 'none'"),
    "signed with the public key": BadToken(
        lambda: hmac_signed(jwks(signing_key("Ed25519")), {"alg": "HS256", "kid": "first"}), "algorithm is 'HS256'"
    ),
    "without scopes": BadToken(lambda: token(scope=None), "none of the scopes"),
    "unknown scopes": BadToken(lambda: token(scope="openid profile"), "none of the scopes"),
    "without org": BadToken(lambda: token(org=None), "claim 'org' must be the name of an org"),
    "an org that is no text": BadToken(lambda: token(org=["acme"]), "claim 'org' must be the name of an org"),
    "all orgs": BadToken(lambda: token(org="*"), "all_orgs = true"),
}


def _signed(payload: bytes) -> str:
    return jws.serialize_compact(
        {"alg": "Ed25519", "kid": "first"}, payload, signing_key("Ed25519"), registry=_REGISTRY
    )
