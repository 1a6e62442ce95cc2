"""Revocations go through notifications unchanged, in as few notifications as possible. Other texts are refused."""

from __future__ import annotations

import pytest

from shard.queue import revocation
from shard.queue.revocation import Revocation
from shard.vocabulary import Answer, Lease, OrgId


def leases(count: int) -> list[Lease]:
    return [Lease(f"{number:032x}", 2**63 - 1 - number) for number in range(count)]


def counted(count: int) -> list[Lease]:
    """Returns leases whose jobs count towards a limit of jobs in flight."""
    return [Lease(f"{number:032x}", number - 2**63) for number in range(count)]


@pytest.mark.parametrize(
    ("revocations", "notifications"),
    [
        ([], 0),
        ([Revocation(OrgId("acme"), "w", Answer.CANCELLED, leases(1))], 1),
        ([Revocation(OrgId(f"org {n}"), f"w{n}", Answer.STALE, leases(1)) for n in range(50)], 1),
        ([Revocation(OrgId("\U0001f600" * 32), "\x1f" * 128, Answer.STALE, leases(1_000))], 10),
        ([Revocation(OrgId("\U0001f600" * 32), "\x1f" * 128, Answer.STALE, counted(1_000))], 10),
    ],
)
def test_revocations_are_read_as_they_were_written(revocations: list[Revocation], notifications: int) -> None:
    texts = list(revocation.texts(revocations))
    assert len(texts) == notifications
    # A notification of Postgres must have less than 8,000 bytes, and 18 characters come before the text.
    assert all(len(text.encode()) + 18 < 8_000 for text in texts)
    read = [one for text in texts for one in revocation.from_text(text)]
    assert {one[:3] for one in read} == {one[:3] for one in revocations}
    assert [lease for one in read for lease in one.leases] == [lease for one in revocations for lease in one.leases]


def test_consumers_without_a_name_are_not_told() -> None:
    (first, second) = leases(2)
    told = Revocation.by_worker(OrgId("acme"), Answer.STALE, [("", first), ("w", second)])
    assert told == [Revocation(OrgId("acme"), "w", Answer.STALE, [second])]


@pytest.mark.parametrize(
    "text",
    ["", "7", "[7]", "[[1, 2]]", '[["o", "w", "lost", []]]', '[["o", "w", "stale", [["xx", 1]]]]']
    + [f'[["o", "w", "stale", [["{"0" * 32}", {number}]]]]' for number in (-(2**63) - 1, 2**63, "null")]
    + [f'[["o", "w", "stale", [["{"g" * 32}", 1]]]]', '[[["o"], "w", "stale", []]]'],
)
def test_what_is_no_revocation_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"\S"):
        revocation.from_text(text)
