"""Verifies JSON Web Tokens (RFC 7519) of one issuer, and reads from them who calls.

What is checked follows the recommendations of RFC 8725: the key decides the algorithm, the issuer and the audience must
be those of the cluster file, and no claim of a token is used before the token's signature was verified. The token's
header only helps to find the key. No message contains a token or a part of its signature.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, Final, cast

from joserfc.errors import JoseError
from joserfc.jwa import JWSAlgModel
from joserfc.jws import CompactSignature, JWSRegistry, extract_compact, validate_compact

from router.gate.auth.jwks import ALGORITHMS, shown
from router.gate.auth.jwks_source import JwksFile, JwksSource, JwksUrl
from router.gate.auth.jwt_key_ring import KeyRing, UnknownKey
from router.gate.auth.jwt_settings import JwtSettings
from router.gate.auth.principal import End, Expired, Principal, Unauthenticated
from router.gate.auth.scopes import Scope
from shard.vocabulary import OrgId

# The longest token, header and signature included.
TOKEN_CHARS_MAX = 8192
# The longest subject. OpenID Connect has the same limit.
_SUBJECT_CHARS_MAX = 255
_ORG_BYTES_MAX = 128
_ALL_ORGS = "*"
# The types of tokens that are taken. The same keys also sign tokens of other types, such as logout tokens.
_TYPES = {"jwt", "at+jwt"}
_SCOPES: Final[Mapping[str, Scope]] = {scope.value: scope for scope in Scope}


class _Registry(JWSRegistry):
    """The algorithms of Windrow. A token that names EdDSA is verified as Ed25519, which is the newer name. The
    library's own EdDSA also takes other curves, and warns whenever it is used."""

    max_header_length = max_payload_length = max_signature_length = TOKEN_CHARS_MAX

    def get_alg(self, name: str) -> JWSAlgModel:
        assert name in ALGORITHMS
        return self.algorithms["Ed25519" if name == "EdDSA" else name]


_REGISTRY = _Registry(strict_check_header=False)


class JwtTokens:
    """Tokens of one issuer. `run` must run while tokens are verified, because it fetches the issuer's keys."""

    def __init__(self, settings: JwtSettings, keys: KeyRing, *, clock: Callable[[], float] = time.time) -> None:
        self._settings = settings
        self._keys = keys
        self._clock = clock

    @property
    def generation(self) -> int:
        """Rises whenever a key is no longer used: then `ended` may say something else than before."""
        return self._keys.generation

    async def run(self) -> None:
        await self._keys.run()

    async def verify(self, token: str) -> Principal:
        """Returns the caller whom the token names. Raises Unauthenticated, KeysUnavailable."""
        if len(token) > TOKEN_CHARS_MAX:
            raise Unauthenticated(f"the token has {len(token):,} characters; at most {TOKEN_CHARS_MAX:,} are taken")
        signed = _parsed(token)
        kid, algorithm = _header(signed)
        try:
            candidates = await self._keys.candidates(kid, algorithm)
        except UnknownKey as error:
            raise Unauthenticated(f"the token cannot be verified: {error}") from None
        signer = next((candidate for candidate in candidates if _is_signed_by(signed, candidate.key)), None)
        if signer is None:
            raise Unauthenticated("the token's signature is not by the key that it names: it was changed or forged")
        return self._principal(_claims(signed.payload), signer.thumbprint)

    def ended(self, principal: Principal) -> End | None:
        """Returns why the token of a principal is no longer good although it has not expired: the key that signed it is
        not in use any more. Returns None if the token is good, or if the principal has another kind of proof."""
        return self._keys.ended(principal.signed_by) if principal.signed_by else None

    def _principal(self, claims: Mapping[str, Any], signed_by: str) -> Principal:
        settings = self._settings
        issuer: object = claims.get("iss")
        if issuer != settings.issuer:
            raise Unauthenticated(f"the token's issuer is {shown(issuer)}, but expected is {settings.issuer!r}")
        self._check_audience(claims.get("aud"))
        expires_at = self._check_times(claims)
        subject: object = claims.get("sub")
        if not isinstance(subject, str) or not 1 <= len(subject) <= _SUBJECT_CHARS_MAX or not subject.isprintable():
            raise Unauthenticated(
                f"the token needs a subject, the claim sub, of 1 to {_SUBJECT_CHARS_MAX} printable characters; it has "
                f"{shown(subject)}"
            )
        org = self._org(claims.get(settings.org_claim))
        scopes = self._scopes(claims.get(settings.scopes_claim), org)
        return Principal(f"jwt:{settings.issuer} {subject}", org, scopes, expires_at, signed_by)

    def _check_audience(self, audience: object) -> None:
        audiences: list[object] = cast("list[object]", audience) if isinstance(audience, list) else [audience]
        if not any(isinstance(one, str) and one in self._settings.audiences for one in audiences):
            named = shown(audiences if len(audiences) != 1 else audiences[0])
            expected = " or ".join(map(repr, self._settings.audiences))
            raise Unauthenticated(
                f"the token is for the audience {named}, but expected is {expected}: it may be a token for another "
                "cluster"
            )

    def _check_times(self, claims: Mapping[str, Any]) -> float:
        """Returns the time from which the token is no longer good, by this machine's clock. Raises Unauthenticated."""
        now, leeway = self._clock(), self._settings.leeway_seconds
        expires, begins, issued = (_time(claims, name) for name in ("exp", "nbf", "iat"))
        if expires is None:
            raise Unauthenticated("the token has no expiry, the claim exp; tokens that never expire are not taken")
        if now >= expires + leeway:
            raise Expired(
                f"the token expired {now - expires:.0f} s ago by this router's clock ({_shown_time(now)}): get a new "
                "one; if it is new, check the clocks of the issuer and of this router"
            )
        for when, what in ((begins, "is not valid before"), (issued, "was issued at")):
            if when is not None and when > now + leeway:
                raise Unauthenticated(
                    f"the token {what} {_shown_time(when)}, {when - now:.0f} s from now by this router's clock "
                    f"({_shown_time(now)}): check the clocks of the issuer and of this router"
                )
        return expires + leeway

    def _org(self, org: object) -> OrgId | None:
        claim = self._settings.org_claim
        if not isinstance(org, str) or not 1 <= len(org.encode(errors="replace")) <= _ORG_BYTES_MAX or _controls(org):
            raise Unauthenticated(
                f"the token's claim {claim!r} must be the name of an org; it is {shown(org)}. Let the issuer add it"
            )
        if org != _ALL_ORGS:
            return OrgId(org)
        if not self._settings.all_orgs:
            raise Unauthenticated(
                f"the token's claim {claim!r} is '*', which means all orgs only with all_orgs = true in [auth.jwt] of "
                "the cluster file"
            )
        return None

    def _scopes(self, found: object, org: OrgId | None) -> frozenset[Scope]:
        """Returns the scopes that Windrow knows, at least one. The scope cluster needs all orgs."""
        names = found.split() if isinstance(found, str) else found
        listed = cast("list[object]", names) if isinstance(names, list) else []
        prefix = self._settings.scopes_prefix
        known = {
            _SCOPES[name.removeprefix(prefix)]
            for name in listed
            if isinstance(name, str) and name.startswith(prefix) and name.removeprefix(prefix) in _SCOPES
        }
        if org is not None:
            known.discard(Scope.CLUSTER)
        if not known:
            named = ", ".join(prefix + name for name in _SCOPES)
            raise Unauthenticated(
                f"the token's claim {self._settings.scopes_claim!r} has none of the scopes {named} (the last one only "
                f"for all orgs); it is {shown(found)}"
            )
        return frozenset(known)


def jwt_tokens(settings: JwtSettings) -> JwtTokens:
    """Returns the verifier of the settings."""
    source: JwksSource
    if settings.jwks_file is not None:
        source = JwksFile(settings.jwks_file)
    else:
        assert settings.jwks_url is not None
        source = JwksUrl(settings.jwks_url)
    keys = KeyRing(source, refresh_s=settings.refresh_seconds, valid_s=settings.keys_valid_seconds)
    return JwtTokens(settings, keys)


def _parsed(token: str) -> CompactSignature:
    try:
        return extract_compact(token.encode("ascii"), registry=_REGISTRY)
    except (JoseError, ValueError, TypeError, RecursionError, AttributeError):
        # The cause is dropped: it may quote the token.
        raise Unauthenticated(
            "the token is malformed: it is not a signed JSON Web Token of three parts (header.claims.signature)"
        ) from None


def _header(signed: CompactSignature) -> tuple[str | None, str]:
    """Returns the header's key id and algorithm. Raises Unauthenticated for headers that are not taken."""
    header = cast("object", signed.headers())
    if not isinstance(header, dict):
        raise Unauthenticated("the token is malformed: its header is not a JSON object")
    fields = cast("dict[str, Any]", header)
    algorithm, kid, kind = fields.get("alg"), fields.get("kid"), fields.get("typ")
    if not isinstance(algorithm, str) or algorithm not in ALGORITHMS:
        raise Unauthenticated(
            f"the token's algorithm is {shown(algorithm)}; taken are {', '.join(sorted(ALGORITHMS))}. Let the issuer "
            "sign with one of them"
        )
    if "crit" in fields or "b64" in fields:
        raise Unauthenticated("the token's header has extensions that this router must know and does not (crit)")
    if kid is not None and not isinstance(kid, str):
        raise Unauthenticated("the token is malformed: the kid in its header is not a text")
    if kind is not None and (not isinstance(kind, str) or kind.lower().removeprefix("application/") not in _TYPES):
        raise Unauthenticated(f"the token's type is {shown(kind)}; taken are JWT and at+jwt")
    return kid, algorithm


def _is_signed_by(signed: CompactSignature, key: Any) -> bool:
    try:
        return validate_compact(signed, key, registry=_REGISTRY)
    except (JoseError, ValueError, TypeError):
        return False


def _claims(payload: bytes) -> Mapping[str, Any]:
    try:
        claims: object = json.loads(payload)
    except (ValueError, RecursionError):
        claims = None
    if not isinstance(claims, dict):
        raise Unauthenticated("the token's claims are not a JSON object")
    return cast("dict[str, Any]", claims)


def _time(claims: Mapping[str, Any], name: str) -> float | None:
    """Returns a time in seconds since 1970-01-01 UTC, or None if the token has none."""
    value: object = claims.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e11 or math.isnan(value):
        raise Unauthenticated(f"the token's claim {name} must be a number of seconds since 1970-01-01 UTC")
    return float(value)


def _shown_time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _controls(text: str) -> bool:
    return any(char < " " or char == "\x7f" for char in text)
