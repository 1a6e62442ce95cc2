"""The functions of the example that do no I/O: pushes, their totals, and the delay of each job."""

from __future__ import annotations

import dataclasses

import pytest

from examples.pushes.producer import DELAY_S_MAX, DELAYED_EVERY, delays_s, job_of
from examples.pushes.totals import Difference, Key, Push, Sums, differences, key_of, read_pushes, total

PUSH = Push(org="acme", repo="acme/site", sha="c0ffee", at=1767225600, files=1, insertions=20, deletions=3)


def test_a_push_survives_its_payload() -> None:
    assert Push.from_json(PUSH.to_json()) == PUSH
    assert Push.from_json(job_of(PUSH, 0.0).payload) == PUSH  # type: ignore[arg-type]


@pytest.mark.parametrize("text", [b"", b"[]", b"{}", b'{"org":"acme","more":1}'])
def test_a_payload_that_is_no_push_is_refused(text: bytes) -> None:
    with pytest.raises((ValueError, TypeError)):
        Push.from_json(text)


@pytest.mark.parametrize(
    ("at", "week"),
    [
        # The year of an ISO week is the year of its Thursday.
        (1767225600, "2026-W01"),  # Thursday, 1 January 2026
        (1766966399, "2025-W52"),  # Sunday, 28 December 2025: its last second
        (1766966400, "2026-W01"),  # Monday, 29 December 2025: the next second
        (1609459199, "2020-W53"),  # Thursday, 31 December 2020
        (1609545600, "2020-W53"),  # Saturday, 2 January 2021
    ],
)
def test_the_week_is_the_iso_week_in_utc(at: int, week: str) -> None:
    assert key_of(dataclasses.replace(PUSH, at=at)) == Key("acme", "acme/site", week)


def test_totals_add_up_by_org_repo_and_week() -> None:
    next_week = dataclasses.replace(PUSH, at=PUSH.at + 7 * 86400)
    other_repo = dataclasses.replace(PUSH, repo="acme/docs")
    assert total([PUSH, next_week, PUSH, other_repo]) == {
        Key("acme", "acme/site", "2026-W01"): Sums(2, 2, 40, 6),
        Key("acme", "acme/site", "2026-W02"): Sums(1, 1, 20, 3),
        Key("acme", "acme/docs", "2026-W01"): Sums(1, 1, 20, 3),
    }


def test_differences_are_rows_that_miss_that_are_too_many_and_that_are_off_by_one() -> None:
    right = total([PUSH])
    (key,) = right
    other = Key("acme", "acme/site", "1999-W01")
    assert differences(right, right) == []
    assert differences(right, {}) == [Difference(key, right[key], None)]
    assert differences({}, right) == [Difference(key, None, right[key])]
    off = {key: right[key]._replace(deletions=4)}
    assert differences({**right, other: Sums(1, 1, 1, 1)}, off) == [
        Difference(other, Sums(1, 1, 1, 1), None),
        Difference(key, right[key], off[key]),
    ]


def test_the_recorded_pushes_are_complete_and_in_order() -> None:
    pushes = read_pushes()
    assert len(pushes) == 19_349
    assert len({push.sha for push in pushes}) == len(pushes)
    assert len({push.org for push in pushes}) == 16
    assert [push.at for push in pushes] == sorted(push.at for push in pushes)
    assert sum(sums.pushes for sums in total(pushes).values()) == len(pushes)
    assert read_pushes(most=10) == pushes[:10]


def test_delays_are_the_recorded_gaps_compressed() -> None:
    pushes = read_pushes()
    delays = delays_s(pushes)
    assert len(delays) == len(pushes)
    assert all(delay == 0 for number, delay in enumerate(delays, start=1) if number % DELAYED_EVERY)
    assert max(delays) <= DELAY_S_MAX
    assert sum(delay > 1 for delay in delays) > 1000


def test_the_longest_gap_is_the_longest_delay() -> None:
    late = dataclasses.replace(PUSH, at=PUSH.at + 10**6)
    delays = delays_s([PUSH] * (DELAYED_EVERY - 1) + [late])
    assert delays[-1] == pytest.approx(DELAY_S_MAX)
    assert delays_s([PUSH] * 50) == [0.0] * 50
    assert delays_s([]) == []
