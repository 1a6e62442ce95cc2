"""How the client and the command describe causes: each cause has a sentence, even without figures, and the page for
operators says what to do about it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from cli.messages import causes_json, causes_shown
from windrow import AttemptOutcome, Failure, JobState
from windrow.causes import read_causes
from windrow.v1 import cause_pb2, job_pb2
from windrow.v1.cause_pb2 import Cause

NAMES = [field.name for field in Cause.DESCRIPTOR.oneofs_by_name["cause"].fields]
PAGE = (Path(__file__).resolve().parents[2] / "docs/operations.md").read_text()
TIME = Timestamp(seconds=1_767_225_600)
THEN = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize("name", NAMES)
def test_each_cause_has_a_sentence_and_advice_also_without_figures(name: str) -> None:
    message = Cause()
    getattr(message, name).SetInParent()
    (cause,) = read_causes([message])
    assert cause.name == name
    assert "upgrade" not in str(cause)
    assert causes_shown([message]) == str(cause)
    (told,) = causes_json([message])
    assert told["cause"] == name
    _, _, section = PAGE.partition("\n## Why does it not run?\n")
    assert f"`{name}`" in section.partition("\n## ")[0]


def test_the_cause_of_a_later_release_is_unknown_and_no_error() -> None:
    later = Cause.FromString(b"\x8a\x03\x02\x08\x01")
    (cause,) = read_causes([later])
    assert (cause.name, dict(cause.figures)) == ("unknown", {})
    assert "upgrade the client" in str(cause)
    assert causes_json([later]) == [{"cause": "unknown"}]


def test_figures_are_times_spans_words_and_failures() -> None:
    dead = cause_pb2.DeadCause(
        at=TIME,
        attempt=3,
        max_attempts=3,
        last_outcome=job_pb2.ATTEMPT_OUTCOME_NACKED,
        failure=job_pb2.Failure(type="E", message="two\nlines"),
        reason="out of attempts (3 of 3)",
    )
    seen = cause_pb2.NoConsumerCause(seen_within=Duration(seconds=180), last_seen=TIME)
    finished = cause_pb2.FinishedCause(state=job_pb2.JOB_STATE_SUCCEEDED, at=TIME)
    messages = [Cause(dead=dead), Cause(no_consumer=seen), Cause(finished=finished)]
    first, second, third = read_causes(messages)
    assert dict(first.figures) == {
        "at": THEN,
        "attempt": 3,
        "max_attempts": 3,
        "last_outcome": AttemptOutcome.NACKED,
        "failure": Failure(type="E", message="two\nlines"),
        "reason": "out of attempts (3 of 3)",
    }
    assert dict(second.figures) == {"seen_within": timedelta(minutes=3), "last_seen": THEN}
    assert third.figures["state"] is JobState.SUCCEEDED
    assert [str(one) for one in (first, second, third)] == [
        "the job died at 2026-01-01 00:00:00Z, after attempt 3 of 3: out of attempts (3 of 3): E: two",
        "no consumer of the queue was seen in the last 3 min; the last one was seen at 2026-01-01 00:00:00Z",
        "the job succeeded at 2026-01-01 00:00:00Z",
    ]
    assert causes_json(messages)[:2] == [
        {
            "cause": "dead",
            "at": "2026-01-01T00:00:00Z",
            "attempt": 3,
            "max_attempts": 3,
            "last_outcome": "nacked",
            "failure": {"type": "E", "message": "two\nlines", "permanent": False},
            "reason": "out of attempts (3 of 3)",
        },
        {"cause": "no_consumer", "seen_within_s": 180.0, "last_seen": "2026-01-01T00:00:00Z"},
    ]


def test_jobs_ahead_are_told_as_they_were_counted() -> None:
    def shown(**figures: int) -> str:
        return causes_shown([Cause(jobs_ahead=cause_pb2.JobsAheadCause(**figures))])  # type: ignore[arg-type]

    assert shown(more_urgent=1) == "these come first: 1 job more urgent"
    assert shown(more_urgent=2, earlier=1200) == (
        "these come first: 2 jobs more urgent and 1,200 jobs of the same priority, earlier"
    )
    assert shown(earlier=1000, at_least=1) == "more than 1,000 jobs of the queue come first"


def test_a_job_that_was_cancelled_without_a_reason_says_so_once() -> None:
    def shown(reason: str) -> str:
        finished = cause_pb2.FinishedCause(state=job_pb2.JOB_STATE_CANCELLED, at=TIME, reason=reason)
        return causes_shown([Cause(finished=finished)])

    assert shown("cancelled") == shown("") == "the job was cancelled at 2026-01-01 00:00:00Z"
    assert shown("too late") == "the job was cancelled at 2026-01-01 00:00:00Z: too late"


def test_a_job_that_waits_for_its_group_says_what_the_places_of_the_group_do() -> None:
    def shown(**figures: object) -> str:
        group = cause_pb2.GroupCause(group="g", concurrency=2, **figures)  # type: ignore[arg-type]
        return causes_shown([Cause(group=group)])

    held = "waits for group 'g', of which 2 jobs may run at a time: "
    assert shown(taken=2, holder_id="x", ahead=3) == (
        f"{held}job x has a place, and is ready or waits for its retry; 3 jobs before it"
    )
    assert shown(taken=2, leased=2, holder_id="x", worker="w", until=TIME) == (
        f"{held}worker 'w' has job x until 2026-01-01 00:00:00Z; 0 jobs before it"
    )


def test_a_queue_says_that_its_scheduled_jobs_are_others_than_those_that_are_ready() -> None:
    scheduled = [Cause(scheduled=cause_pb2.ScheduledCause(until=TIME))]
    assert causes_shown(scheduled) == "not due before 2026-01-01 00:00:00Z"
    assert (
        causes_shown(scheduled, of_queue=True) == "the next job that waits for its time is due at 2026-01-01 00:00:00Z"
    )


def test_a_small_share_is_not_told_as_none() -> None:
    fair = cause_pb2.FairShareCause(weight=1, ahead=Duration(nanos=300))
    assert "has had less than 1 s more of the time" in causes_shown([Cause(fair_share=fair)])


def test_the_jobs_that_wait_for_their_groups_are_told_by_their_number() -> None:
    def told(jobs: int, *, at_least: bool = False) -> str:
        return causes_shown([Cause(group_backlog=cause_pb2.GroupBacklogCause(jobs=jobs, at_least=at_least))])

    assert told(1) == "1 job waits for others of its group to end"
    assert told(2) == "2 jobs wait for others of their groups to end"
    assert told(1000, at_least=True) == "more than 1,000 jobs wait for others of their groups to end"


def test_a_quarantine_is_told_by_the_number_of_its_crashes() -> None:
    def told(crashes: int) -> str:
        return causes_shown([Cause(quarantine=cause_pb2.QuarantineCause(kind="k", since=TIME, crashes=crashes))])

    assert "after 1 crash of its workers" in told(1)
    assert "after 3 crashes of its workers" in told(3)
