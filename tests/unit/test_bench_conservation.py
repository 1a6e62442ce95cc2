"""What `./run bench grow` and `./run bench outage` hold against the tables, and that each thing that can be wrong is
found: records are doctored here, one at a time."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from uuid import UUID

import pytest

from bench import evidence
from bench.conservation import (
    ACKED_TWICE,
    DOUBLED,
    LOST,
    STRANGE,
    TAKEN_TWICE,
    UNDONE,
    UNFINISHED,
    UNTAKEN,
    Kept,
    judge,
)
from bench.evidence import Recorder, Seen, Sight, Verb, id_of, key_of
from windrow.ids import uuid7

DONE, WAITING, UNANSWERED = (key_of(uuid7()) for _ in range(3))


def sound() -> tuple[Seen, Kept]:
    """One job done, one that waits, and one whose enqueue nobody answered, and which was stored."""
    seen = Seen(offered={DONE, WAITING, UNANSWERED}, stored={DONE: 1.0, WAITING: 1.0}, taken=Counter([DONE]))
    return seen, Kept(left=Counter([WAITING, UNANSWERED]), succeeded=Counter([DONE]))


def test_what_is_sound_is_not_blamed() -> None:
    seen, kept = sound()
    found = judge(seen, kept, faultless=True)
    assert found.holds
    assert found.text() == "2 jobs, each where it must be"
    # An enqueue that nobody answered may also have stored nothing.
    del kept.left[UNANSWERED]
    assert judge(seen, kept, faultless=True).holds


Doctor = Callable[[Seen, Kept], object]


@pytest.mark.parametrize(
    ("doctored", "what"),
    [
        (lambda _, kept: kept.left.clear(), LOST),
        (lambda _, kept: kept.left.update([WAITING]), DOUBLED),
        (lambda _, kept: kept.left.update([DONE]), DOUBLED),
        (lambda _, kept: kept.left.update([key_of(uuid7())]), STRANGE),
        (lambda seen, _: seen.acked.update([WAITING]), UNDONE),
        (lambda seen, _: seen.acked.update([DONE, DONE]), ACKED_TWICE),
        (lambda seen, _: seen.taken.update([DONE]), TAKEN_TWICE),
        (lambda seen, _: seen.taken.update([WAITING]), UNFINISHED),
        (lambda seen, _: seen.taken.clear(), UNTAKEN),
    ],
)
def test_each_thing_that_is_wrong_is_found_and_no_other(doctored: Doctor, what: str) -> None:
    seen, kept = sound()
    doctored(seen, kept)
    found = judge(seen, kept, faultless=True)
    assert not found.holds
    assert {name for name, jobs in found.violations.items() if jobs} == {what}
    assert found.count(what) == 1
    assert what in found.text()


def test_books_that_do_not_balance_are_told() -> None:
    seen, kept = sound()
    found = judge(seen, Kept(left=kept.left, succeeded=kept.succeeded, unbalanced=["org 'o' on 's1'"]), faultless=True)
    assert not found.holds
    assert "org 'o' on 's1'" in found.text()


def test_after_faults_a_job_may_come_again_until_an_ack_is_answered() -> None:
    seen, kept = sound()
    seen.taken.update([DONE, WAITING])
    assert judge(seen, kept, faultless=False).holds
    seen.acked.update([WAITING])
    assert not judge(seen, kept, faultless=False).holds


def test_what_is_written_down_is_read_again_from_all_processes(tmp_path: Path) -> None:
    first, second = uuid7(), uuid7()
    with Recorder(tmp_path, "producer") as recorder:
        recorder.saw(Sight.OFFERED, first)
        recorder.saw(Sight.OFFERED, second)
        recorder.saw(Sight.STORED, first, at_ns=1_500_000_000)
        recorder.called(Verb.ENQUEUE, 7, due_ns=1_000_000_000, ended_ns=1_250_000_000, code=14)
    with Recorder(tmp_path, "worker") as recorder:
        recorder.saw(Sight.TAKEN, first, at_ns=3_000_000_000, due_ns=1_000_000_000)
        recorder.saw(Sight.TAKEN, first, at_ns=4_000_000_000, due_ns=1_000_000_000)
        recorder.saw(Sight.ACKED, first)
    seen = evidence.read(tmp_path)
    assert seen.offered == {key_of(first), key_of(second)}
    assert seen.stored == {key_of(first): 1.5}
    assert seen.taken == {key_of(first): 2}
    assert seen.acked == {key_of(first): 1}
    assert [pickup.waited_ms for pickup in seen.pickups] == [2000.0, 3000.0]
    assert [dequeue.waited_ms for dequeue in seen.dequeues] == [1500.0, 2500.0]
    (call,) = seen.calls
    assert (call.verb, call.org, call.due_s, call.took_s, call.code) == (Verb.ENQUEUE, 7, 1.0, 0.25, 14)
    assert id_of(key_of(first)) == first == str(UUID(first))


def test_a_torn_record_is_no_evidence(tmp_path: Path) -> None:
    with Recorder(tmp_path, "worker") as recorder:
        recorder.saw(Sight.STORED, uuid7())
    file = tmp_path / "worker.jobs"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(struct.error):
        evidence.read(tmp_path)
