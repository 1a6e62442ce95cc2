"""The identity that a caller has proved, for all kinds of proof. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from router.codec.status import AccessRefused
from router.gate.auth.scopes import Scope
from shard.vocabulary import OrgId
from windrow.v1 import errors_pb2


class Principal(NamedTuple):
    """The caller.

    `name` names the caller in logs and in the audit log, and holds no secret: `key:wr_7f3a`, `jwt:ISSUER SUBJECT`,
    `certificate:spiffe://...`. `org` None: all orgs. `expires_at`: the time from which the proof is no longer good, in
    seconds since 1970-01-01 UTC by this machine's clock. `signed_by`: the thumbprint of the issuer's key that signed
    the token; empty for other proofs.
    """

    name: str
    org: OrgId | None
    scopes: frozenset[Scope]
    expires_at: float = math.inf
    signed_by: str = ""


# Makes the error with which a call ends. Each call gets an error of its own, because errors are changed when they are
# sent.
End = Callable[[], Exception]


class Unauthenticated(AccessRefused):
    """The caller did not prove who it is. The message says what is wrong and what to do, and holds no secret."""

    reason = errors_pb2.ERROR_REASON_CREDENTIALS_INVALID


class NoCredentials(Unauthenticated):
    """The call has no bearer token, and its connection no certificate that names a caller."""

    reason = errors_pb2.ERROR_REASON_CREDENTIALS_MISSING


class Expired(Unauthenticated):
    """The proof was good, and has expired. A client that has a source of tokens asks it for another one."""

    reason = errors_pb2.ERROR_REASON_CREDENTIALS_EXPIRED


class Revoked(Unauthenticated):
    """The proof is no longer good: it was revoked, or the issuer no longer has the key that signed it."""

    reason = errors_pb2.ERROR_REASON_CREDENTIALS_REVOKED
