"""The metadata `windrow-org`: which values the client sends, and which values the router accepts."""

from __future__ import annotations

from typing import cast

import pytest

import windrow.org_header
from router.buffer import Buffer
from router.codec.status import OrgMismatch
from router.gate.admission import Context
from router.gate.call import Call
from router.gate.org_check import check_org
from windrow.org_header import ORG_HEADER, org_metadata, org_of_header


class Caller:
    """The gRPC context of a call with this metadata."""

    def __init__(self, *metadata: tuple[str, str]) -> None:
        self._metadata = metadata

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return self._metadata


def check(org: str, *values: str) -> None:
    caller = cast("Context", Caller(("user-agent", "x"), *((ORG_HEADER, value) for value in values)))
    check_org(Call(Buffer(1), peer=""), caller, org)


@pytest.mark.parametrize("org", ["acme", "a.b-c_d~e", "Über uns", "a/b?c=d&e+f", "100%", "%41", "🦊", " ", "\x80"])
def test_every_org_passes_through_the_header_as_ascii(org: str) -> None:
    ((name, value),) = org_metadata(org)
    assert (name, name.islower(), value.isascii()) == ("windrow-org", True, True)
    assert " " not in value
    assert org_of_header(value) == org
    check(org, value)


def test_an_org_of_plain_characters_is_sent_as_it_is() -> None:
    assert org_metadata("acme-1.eu_x~") == (("windrow-org", "acme-1.eu_x~"),)
    assert org_metadata("Über uns") == (("windrow-org", "%C3%9Cber%20uns"),)


def test_a_value_that_no_org_can_have_is_neither_sent_nor_kept() -> None:
    assert org_metadata("ä" * 64) == ((ORG_HEADER, "%C3%A4" * 64),)
    assert org_metadata("ä" * 65) == ()
    kept = windrow.org_header._decoded.cache_info().currsize
    with pytest.raises(OrgMismatch) as refused:
        check("o" * 1_000_000, "x" * 1_000_000)
    assert len(str(refused.value)) < 400
    assert windrow.org_header._decoded.cache_info().currsize == kept


def test_a_call_without_the_header_is_served() -> None:
    check("acme")


@pytest.mark.parametrize(
    ("org", "values"),
    [
        ("acme", ["other"]),
        ("acme", ["acme", "other"]),
        ("acme", [""]),
        ("acme", ["ACME"]),
        # If a proxy decodes this value, the proxy sees the org aA.
        ("a%41", ["a%41"]),
        ("a b", ["a+b"]),
        ("\ufffd", ["%FF"]),
    ],
)
def test_a_header_of_another_org_is_refused_with_both_names(org: str, values: list[str]) -> None:
    with pytest.raises(OrgMismatch) as refused:
        check(org, *values)
    (violation,) = refused.value.violations
    assert violation.field == "org"
    assert repr(org) in violation.description
    assert repr(values[-1]) in violation.description
