"""How a router judges the trial of a quarantined kind: by a lookup of the trial's job."""

from __future__ import annotations

import json

import pytest

from shard.queue.quarantine import Verdict, verdict
from shard.vocabulary import Micros
from tests.unit.test_job_fields import RECORD

TRIAL_AT = Micros(100)


@pytest.mark.parametrize(
    ("state", "outcomes", "expected"),
    [
        ("ready", [], Verdict.WAITS),
        ("leased", [], Verdict.WAITS),
        ("ready", ["released"], Verdict.WAITS),
        ("succeeded", ["acked"], Verdict.PROPER),
        ("scheduled", ["nacked"], Verdict.PROPER),
        # The trial failed without a crash, and the next attempt of its job crashed.
        ("ready", ["nacked", "expired"], Verdict.PROPER),
        ("dead", ["nacked"], Verdict.PROPER),
        ("ready", ["expired"], Verdict.CRASHED),
        ("ready", ["timed_out"], Verdict.CRASHED),
        ("ready", ["released", "expired"], Verdict.CRASHED),
        ("dead", ["expired"], Verdict.CRASHED),
        ("cancelled", ["expired"], Verdict.GONE),
        ("dead", [], Verdict.GONE),
        (None, [], Verdict.GONE),
    ],
)
def test_a_trial_is_judged_by_how_its_attempts_ended(state: str | None, outcomes: list[str], expected: Verdict) -> None:
    history = [
        {"attempt": at, "outcome": outcome, "leased_at_us": 100 + at, "ended_at_us": 101 + at}
        for at, outcome in enumerate(outcomes)
    ]
    # Attempts before the trial do not count.
    before = [
        {"attempt": 0, "outcome": outcome, "leased_at_us": 1, "ended_at_us": 99} for outcome in ("nacked", "expired")
    ]
    record = RECORD._replace(state=state or "", history=json.dumps(before + history), leased_at=None, deadline=None)
    assert verdict(record if state else None, TRIAL_AT) is expected
