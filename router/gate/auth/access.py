"""Decides who may call which method, by the scope that each method names in the contract
(proto/windrow/v1/access.proto), and by the org that its requests name. Pure."""

from __future__ import annotations

from typing import NamedTuple

from google.protobuf.descriptor import Descriptor, MethodDescriptor

from router.codec.status import AccessRefused
from router.gate.auth.principal import Principal
from router.gate.auth.scopes import Scope
from windrow.v1 import access_pb2, errors_pb2

_SHOWN_CHARS_MAX = 128
_SCOPES = {
    access_pb2.SCOPE_ENQUEUE: Scope.ENQUEUE,
    access_pb2.SCOPE_CONSUME: Scope.CONSUME,
    access_pb2.SCOPE_READ: Scope.READ,
    access_pb2.SCOPE_ADMIN: Scope.ADMIN,
    access_pb2.SCOPE_CLUSTER: Scope.CLUSTER,
}


class ScopeMissing(AccessRefused):
    """The caller lacks the scope that the method needs. `besides`: a scope that the caller needs in addition to
    `scope`."""

    reason = errors_pb2.ERROR_REASON_SCOPE_MISSING

    def __init__(self, method: str, scope: Scope, principal: Principal, *, besides: Scope | None = None) -> None:
        if scope is Scope.CLUSTER and principal.org is not None:
            scopes = [one.value for one in (besides, scope) if one is not None]
            named = " and ".join(map(repr, scopes))
            options = " ".join(f"--scope {one}" for one in scopes)
            why = (
                f"is for org {principal.org!r}, and this call is about all orgs; it takes a key for all orgs with the "
                f"scope{'s' if besides else ''} {named} (windrow keys create --all-orgs {options})"
            )
        else:
            has = ", ".join(sorted(principal.scopes)) or "none"
            why = f"needs the scope {scope.value!r} for it, and has {has}"
        super().__init__(f"{principal.name} may not call {method}: it {why}")


class OrgForbidden(AccessRefused):
    """The request names another org than the caller's."""

    reason = errors_pb2.ERROR_REASON_ORG_FORBIDDEN

    def __init__(self, org: str, principal: Principal) -> None:
        # The request has not been checked yet, so its org may have any length.
        super().__init__(
            f"{principal.name} is for org {principal.org!r}, and the request names {org[:_SHOWN_CHARS_MAX]!r}"
        )


class Access(NamedTuple):
    """A method, and what its callers must be allowed to do."""

    method: str
    # None: any caller who has proved who it is.
    scope: Scope | None

    def check(self, principal: Principal) -> None:
        """Raises ScopeMissing."""
        if self.scope is not None and not _has(principal, self.scope):
            raise ScopeMissing(self.method, self.scope, principal)

    def check_all_orgs(self, principal: Principal) -> None:
        """Checks the caller of a request that is about all orgs. Other requests of its method may be about one org.
        Raises ScopeMissing."""
        if not _has(principal, Scope.CLUSTER):
            raise ScopeMissing(self.method, Scope.CLUSTER, principal, besides=self.scope)


def access_of(method: MethodDescriptor, *, org_elsewhere: bool = False) -> Access:
    """Returns what the contract says about a method. `org_elsewhere`: the gate finds the org of its requests elsewhere
    than in a field `org`. Raises ValueError if a mistake in the contract would let anybody call the method: the method
    names no scope, or it is about one org and its request does not name that org."""
    name = f"{method.containing_service.full_name}/{method.name}"
    scope: access_pb2.Scope.ValueType = method.GetOptions().Extensions[access_pb2.scope]
    if scope == access_pb2.SCOPE_ANY:
        return Access(name, None)
    if scope not in _SCOPES:
        raise ValueError(f"{name} has no (scope) in its .proto: say who may call it")
    if scope != access_pb2.SCOPE_CLUSTER and not org_elsewhere and not _names_org(method.input_type):
        raise ValueError(f"{name}: its request has no org, so every org could call it for all others")
    return Access(name, _SCOPES[scope])


def require_org(principal: Principal, org: str) -> None:
    """Raises OrgForbidden if the principal may act only for an org that is not `org`."""
    if principal.org is not None and principal.org != org:
        raise OrgForbidden(org, principal)


def _has(principal: Principal, scope: Scope) -> bool:
    """Whether the principal may use this scope. Only a principal of all orgs may use the scope `cluster`."""
    return scope in principal.scopes and (scope is not Scope.CLUSTER or principal.org is None)


def _names_org(request: Descriptor) -> bool:
    """Whether a request names its org, or the first message of a stream does so in `start`."""
    start = request.fields_by_name.get("start")
    named = request if start is None or start.message_type is None else start.message_type
    return "org" in named.fields_by_name
