"""Checks the org that a request names against the caller, and against the org in the call's metadata."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from router.codec.status import OrgMismatch
from router.gate.admission import Context
from router.gate.auth.access import Access, require_org
from router.gate.call import Call
from windrow.org_header import ORG_HEADER, org_of_header

# Returns the org that a request names; None: the request is about all orgs.
OrgOf = Callable[[Any], str | None]


def org_check(access: Access, org_of: OrgOf | None) -> Callable[[Call, Context, Any], str | None]:
    """Returns a function that checks the org of a request. That function returns the org, or None if the request names
    no org."""

    def check_field(call: Call, context: Context, request: Any) -> str | None:
        org: str | None = getattr(request, "org", None)
        if org is not None:
            check_org(call, context, org)
        return org

    def check_elsewhere(call: Call, context: Context, request: Any) -> str | None:
        assert org_of is not None
        org = org_of(request)
        if org is None:
            check_all_orgs(call, context, access)
        else:
            check_org(call, context, org)
        return org

    return check_field if org_of is None else check_elsewhere


def check_org(call: Call, context: Context, org: str, *, field: str = "org") -> None:
    """Checks the org that the field `field` of a request names. Raises OrgForbidden if the caller is of another org,
    and OrgMismatch if the call's metadata names another org."""
    if call.principal is not None:
        require_org(call.principal, org)
    for key, value in context.invocation_metadata() or ():
        # Always decode the value: a proxy that decodes it must not see a different org than this check.
        if key == ORG_HEADER and org_of_header(value) != org:
            raise OrgMismatch(field, org, value)


def check_all_orgs(call: Call, context: Context, access: Access, *, field: str = "org") -> None:
    """Checks a request that is about all orgs. Other requests of its method may be about one org. Raises ScopeMissing
    unless the caller may act for all orgs, and OrgMismatch if the call's metadata names an org."""
    if call.principal is not None:
        access.check_all_orgs(call.principal)
    for key, value in context.invocation_metadata() or ():
        if key == ORG_HEADER:
            raise OrgMismatch(field, "", value)
