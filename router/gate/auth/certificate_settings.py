"""The [[auth.certificate]] tables of the cluster file. Pure.

[[auth.certificate]]
uri = "spiffe://example.com/ns/jobs/*"
org = "acme"
scopes = ["enqueue", "consume"]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from router.gate.auth.scopes import Scope
from shard.placement.cluster_file import ClusterFileError, Faults, known_keys, only_key, unknown
from shard.vocabulary import OrgId

_TEXT_CHARS_MAX = 2048
_ENTRIES_MAX = 1000
_KEYS = {"uri", "subject", "org", "all_orgs", "scopes"}


@dataclass(frozen=True, slots=True, kw_only=True)
class CertificateEntry:
    """The caller that a matching certificate proves. Exactly one of `uri` and `subject` is set."""

    # The only URI among the certificate's alternative names, as SPIFFE demands. It may end with `/*`.
    uri: str | None
    # The subject, as RFC 4514 writes it: CN=worker,O=Acme.
    subject: str | None
    # None: all orgs.
    org: OrgId | None
    scopes: frozenset[Scope]

    def matches(self, uri: str | None, subject: str) -> bool:
        if self.uri is None:
            return subject == self.subject
        if uri is not None and self.uri.endswith("/*"):
            # Something must follow the slash. The slash itself is compared too: `…/jobs/*` does not match
            # `…/jobs2/worker`.
            return uri.startswith(self.uri[:-1]) and len(uri) >= len(self.uri)
        return uri == self.uri


def certificate_entries(tables: object, *, where: str) -> tuple[CertificateEntry, ...]:
    """Reads and checks the tables. `where` begins each message. Raises ClusterFileError with all faults, one a line."""
    if not isinstance(tables, list) or len(cast("list[object]", tables)) > _ENTRIES_MAX:
        raise ClusterFileError(f"{where}: must be a list of at most {_ENTRIES_MAX:,} tables, [[auth.certificate]]")
    faults = Faults()
    found = [
        faults.of(partial(_entry, table, f"{where} number {number}"))
        for number, table in enumerate(cast("list[object]", tables), 1)
    ]
    faults.refuse()
    return tuple(entry for entry in found if entry is not None)


def _entry(value: object, where: str) -> CertificateEntry:
    if not isinstance(value, dict):
        raise ClusterFileError(f"{where}: must be a table")
    table = cast("dict[str, Any]", value)
    faults = Faults()
    faults.of(lambda: known_keys(table, _KEYS, where=where))
    uri, subject = faults.of(lambda: _match(table, where)) or (None, None)
    org = faults.of(lambda: _org(table, where))
    scopes = faults.of(lambda: _scopes(table.get("scopes"), where)) or frozenset()
    if Scope.CLUSTER in scopes and table.get("all_orgs") is not True:
        faults.add(f"{where} scopes: cluster needs all_orgs = true instead of an org")
    faults.refuse()
    return CertificateEntry(uri=uri, subject=subject, org=org, scopes=scopes)


def _match(table: Mapping[str, Any], where: str) -> tuple[str | None, str | None]:
    key = only_key(table, ("uri", "subject"), where=where)
    value: object = table[key]
    if not isinstance(value, str) or not 1 <= len(value) <= _TEXT_CHARS_MAX or not value.isprintable():
        raise ClusterFileError(f"{where} {key}: must be text of 1 to {_TEXT_CHARS_MAX} printable characters")
    if key == "subject":
        return None, value
    scheme, _, rest = value.partition("://")
    if not scheme or not rest:
        raise ClusterFileError(
            f"{where} uri: must be a URI, such as spiffe://example.com/ns/jobs/worker, not {value!r}"
        )
    if "*" in value and (value.count("*") > 1 or not value.endswith("/*") or rest == "/*"):
        raise ClusterFileError(
            f"{where} uri: a * may only be at the end, after a /, as in spiffe://example.com/ns/jobs/*, not {value!r}"
        )
    return value, None


def _org(table: Mapping[str, Any], where: str) -> OrgId | None:
    all_orgs: object = table.get("all_orgs", False)
    if not isinstance(all_orgs, bool):
        raise ClusterFileError(f"{where} all_orgs: must be true or false, not {all_orgs!r}")
    if all_orgs == ("org" in table):
        raise ClusterFileError(f"{where}: needs exactly one of org and all_orgs = true")
    if all_orgs:
        return None
    org: object = table["org"]
    if not isinstance(org, str) or not 1 <= len(org.encode()) <= 128 or not org.isprintable():
        raise ClusterFileError(f"{where} org: must be text of 1 to 128 bytes of printable characters, not {org!r}")
    return OrgId(org)


def _scopes(value: object, where: str) -> frozenset[Scope]:
    known = [scope.value for scope in Scope]
    if not isinstance(value, list) or not value:
        raise ClusterFileError(f"{where} scopes: must be a list of some of {', '.join(known)}")
    faults = Faults()
    for name in cast("list[object]", value):
        if name not in known:
            faults.add(unknown("scope", name, known, where=f"{where} scopes"))
    faults.refuse()
    return frozenset(Scope(name) for name in cast("list[str]", value))
