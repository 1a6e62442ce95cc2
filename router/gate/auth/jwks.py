"""Reads a JSON Web Key Set (RFC 7517): which keys may sign tokens, and which algorithm each of these keys uses. Pure.

The key decides the algorithm, and the token's header only names it. So a token cannot turn a public RSA key into a
shared secret, and cannot choose the algorithm `none`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, cast

from joserfc.errors import JoseError
from joserfc.jwk import ECKey, Key, OKPKey, RSAKey
from joserfc.util import urlsafe_b64decode

# The most bytes and the most keys that a set may have.
JWKS_BYTES_MAX = 1024 * 1024
_KEYS_MAX = 100
_KID_CHARS_MAX = 255
_RSA_BITS_MIN, _RSA_BITS_MAX = 2048, 8192
# Reasons in messages are cut to this length, because they may quote what a stranger wrote.
_SHOWN_CHARS_MAX = 80
# The algorithms that a key may have, by its type and its curve (None: it has none). RFC 9864 gives the name Ed25519 to
# what was one case of EdDSA before. No key of this module verifies an EdDSA token of another curve.
_ALGORITHMS: Final[Mapping[tuple[str, str | None], frozenset[str]]] = {
    ("OKP", "Ed25519"): frozenset({"Ed25519", "EdDSA"}),
    ("EC", "P-256"): frozenset({"ES256"}),
    ("RSA", None): frozenset({"RS256"}),
}
ALGORITHMS: Final = frozenset[str]().union(*_ALGORITHMS.values())


class BadKeySet(Exception):
    """The answer is not a usable set of keys. The message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerificationKey:
    """A public key. `id` is its `kid`, or its thumbprint (RFC 7638) if it has none."""

    id: str
    thumbprint: str
    algorithms: frozenset[str]
    key: Key


@dataclass(frozen=True, slots=True, kw_only=True)
class KeySet:
    """The usable keys by their ids, and why the other keys are not used. `keys` is empty only if the source has
    published a set without any key."""

    keys: Mapping[str, VerificationKey]
    unusable: tuple[str, ...]


class _Unusable(Exception):
    """One key of a set cannot be used. This says nothing about the other keys of the set."""


def parse_jwks(answer: bytes, *, may_be_empty: bool = False) -> KeySet:
    """Reads a key set. Leaves out keys that cannot be used to verify tokens. A set without keys is refused, unless it
    `may_be_empty`. Raises BadKeySet."""
    if len(answer) > JWKS_BYTES_MAX:
        raise BadKeySet(f"it has more than {JWKS_BYTES_MAX:,} bytes")
    try:
        document: object = json.loads(answer)
    except (ValueError, RecursionError):
        # The answer may be the HTML page of a proxy or of a login.
        raise BadKeySet(f"it is not JSON; it begins with {shown(answer[:_SHOWN_CHARS_MAX])}") from None
    found: object = cast("dict[str, Any]", document).get("keys") if isinstance(document, dict) else None
    if not isinstance(found, list):
        raise BadKeySet("it is not a JSON Web Key Set: it has no list of keys")
    entries = cast("list[object]", found)
    if len(entries) > _KEYS_MAX:
        raise BadKeySet(f"it has {len(entries):,} keys; at most {_KEYS_MAX} are taken")
    keys: dict[str, VerificationKey] = {}
    unusable: list[str] = []
    for number, entry in enumerate(entries, 1):
        try:
            key = _key(entry)
        except _Unusable as error:
            unusable.append(f"key {number}{_named(entry)}: {error}")
            continue
        if key.id in keys:
            unusable.append(f"key {number}{_named(entry)}: an earlier key has the same kid")
        else:
            keys[key.id] = key
    if not keys and not (may_be_empty and not entries):
        raise BadKeySet(f"none of its {len(entries)} keys can be used{_listed(unusable)}")
    return KeySet(keys=keys, unusable=tuple(unusable))


def shown(value: object) -> str:
    """Quotes a value that a stranger chose: short, and printable."""
    try:
        text = value.decode(errors="replace") if isinstance(value, bytes) else str(value)
    except RecursionError:
        text = "a deeply nested value"
    return repr(text if len(text) <= _SHOWN_CHARS_MAX else f"{text[:_SHOWN_CHARS_MAX]}…")


def _key(entry: object) -> VerificationKey:
    if not isinstance(entry, dict):
        raise _Unusable("it is not a JSON object")
    jwk = cast("dict[str, Any]", entry)
    kty, crv = jwk.get("kty"), jwk.get("crv")
    if not isinstance(kty, str) or not isinstance(crv, str | None):
        raise _Unusable("kty and crv must be texts")
    algorithms = _ALGORITHMS.get((kty, None if kty == "RSA" else crv))
    if algorithms is None:
        other = "shared secrets" if kty == "oct" else shown(kty if crv is None else f"{kty} {crv}")
        raise _Unusable(f"tokens are verified with RSA, P-256 and Ed25519 keys, not with {other}")
    if "d" in jwk:
        raise _Unusable("it is a private key. Whoever can read it can sign tokens: replace it, and publish public keys")
    if jwk.get("use", "sig") != "sig":
        raise _Unusable("it is not for signatures")
    operations: object = jwk.get("key_ops", ["verify"])
    if not isinstance(operations, list) or "verify" not in operations:
        raise _Unusable("it is not for verifying")
    alg = jwk.get("alg")
    if alg is not None and (not isinstance(alg, str) or alg not in algorithms):
        raise _Unusable(f"its algorithm {shown(alg)} is not taken; taken are {', '.join(sorted(ALGORITHMS))}")
    kid: object = jwk.get("kid")
    if kid is not None and (not isinstance(kid, str) or not 1 <= len(kid) <= _KID_CHARS_MAX):
        raise _Unusable(f"its kid must be text of 1 to {_KID_CHARS_MAX} characters")
    imported = _imported({name: jwk[name] for name in ("kty", "crv", "n", "e", "x", "y") if name in jwk})
    thumbprint = imported.thumbprint()
    return VerificationKey(id=kid or thumbprint, thumbprint=thumbprint, algorithms=algorithms, key=imported)


def _imported(jwk: dict[str, Any]) -> Key:
    """Imports only the fields that make the public key: with `alg`, the library would refuse EdDSA tokens of Ed25519
    keys."""
    if not all(isinstance(value, str) for value in jwk.values()):
        raise _Unusable("its numbers must be text in base64url")
    if len(jwk.get("n", "")) > 2 * _RSA_BITS_MAX // 8:
        raise _Unusable(f"RSA keys must have {_RSA_BITS_MIN} to {_RSA_BITS_MAX} bits")
    try:
        match jwk["kty"]:
            case "RSA":
                return _bounded_rsa(jwk)
            case "EC":
                return ECKey.import_key(jwk)
            case _:
                return OKPKey.import_key(jwk)
    except (JoseError, ValueError, TypeError, KeyError, OverflowError) as error:
        raise _Unusable("its numbers are not those of a key") from error


def _bounded_rsa(jwk: dict[str, Any]) -> RSAKey:
    # Count the bits before the import, which only warns about a short key.
    bits = int.from_bytes(urlsafe_b64decode(jwk["n"].encode())).bit_length()
    if not _RSA_BITS_MIN <= bits <= _RSA_BITS_MAX:
        raise _Unusable(f"RSA keys must have {_RSA_BITS_MIN} to {_RSA_BITS_MAX} bits, and it has {bits}")
    return RSAKey.import_key(jwk)


def _named(entry: object) -> str:
    kid: object = cast("dict[str, Any]", entry).get("kid") if isinstance(entry, dict) else None
    return "" if kid is None else f" (kid {shown(kid)})"


def _listed(unusable: list[str]) -> str:
    more = f"; and {len(unusable) - 3} more" if len(unusable) > 3 else ""
    return f": {'; '.join(unusable[:3])}{more}" if unusable else ""
