"""The checker reads exactly what a client recorded, even if the client was killed in the middle of a line."""

from __future__ import annotations

import math
import time
from pathlib import Path

from proof.history import (
    Answer,
    LeaseKey,
    Outcome,
    Recorder,
    Verb,
    asked_to_add,
    asked_to_signal,
    asked_to_start,
    leased,
    payload_of,
    read,
)
from shard.lease_token import token, token_prefix
from shard.vocabulary import JobId, ShardName

JOB = JobId("0198d2c4-7a11-7abc-8def-0123456789ab")
LEASE = token(token_prefix(ShardName("s1"), 42), JOB)


def test_an_enqueue_is_read_as_it_was_written(tmp_path: Path) -> None:
    asked = [{"job": name, "queue": "q", "key": "k", "delay_s": 1.5} for name in ("a", "b")]
    with Recorder(tmp_path, "producer-1.0") as recorder:
        number = recorder.begin(Verb.ENQUEUE, "acme", asked)
        recorder.end(number, Outcome.OK, answered=[{"job": "a", "duplicate": False}, None])
    first, second = read(tmp_path).enqueues
    assert (first.job, first.queue, first.key, first.delay_s) == ("a", "q", "k", 1.5)
    assert (first.answered, first.duplicate, second.answered) == ("a", False, None)
    assert (first.call.client, first.call.org, first.call.outcome) == ("producer-1.0", "acme", Outcome.OK)
    assert first.call.ended_s is not None
    assert first.call.began_s <= first.call.ended_s


def test_an_addition_is_read_as_it_was_written_and_its_jobs_are_stored_ones(tmp_path: Path) -> None:
    nodes = {"a": ["w"], "b": ["w", "a"]}
    asked = asked_to_add(workflow="w", lease=LEASE, nodes=nodes)
    with Recorder(tmp_path, "worker-1.0") as recorder:
        recorder.begin(Verb.ADD, "acme", asked)
        for stored in (2, 1):
            number = recorder.begin(Verb.ADD, "acme", asked)
            recorder.end(number, Outcome.OK, answered={"jobs": {"a": "j1", "b": "j2"}, "stored": stored})
    history = read(tmp_path)
    unanswered, first, second = history.additions
    assert (unanswered.nodes, unanswered.jobs, unanswered.stored) == (nodes, {}, 0)
    assert (first.workflow, first.lease, first.jobs) == ("w", LeaseKey(JOB, 42), {"a": "j1", "b": "j2"})
    # The answer to the second call does not say which jobs were new.
    assert [(one.answered, one.duplicate) for one in history.enqueues] == [
        *(("j1", False), ("j2", False)),
        *(("j1", True), ("j2", True)),
    ]
    assert second.stored == 1


def test_a_wait_is_read_with_what_is_known_of_the_lease(tmp_path: Path) -> None:
    def begin(*, wait: bool) -> int:
        return recorder.begin(Verb.ADD, "acme", asked_to_add(workflow="w", lease=LEASE, nodes={"a": []}, wait=wait))

    with Recorder(tmp_path, "worker-1.0") as recorder:
        begin(wait=False)
        begin(wait=True)
        recorder.end(begin(wait=True), Outcome.ERROR, code="FAILED_PRECONDITION")
        recorder.end(begin(wait=True), Outcome.OK, answered={"waits": True})
        recorder.end(begin(wait=True), Outcome.OK, answered={"jobs": {"a": "j1"}, "stored": 0, "waits": False})
    history = read(tmp_path)
    assert [(one.wait, one.waits, one.may_end_lease) for one in history.additions] == [
        (False, False, False),
        (True, False, True),
        (True, False, False),
        (True, True, True),
        (True, False, False),
    ]
    # The history of the Python client does not say for which jobs the client waits.
    assert [one.answered for one in history.enqueues] == ["j1"]


def test_a_signal_is_read_with_what_it_was_told(tmp_path: Path) -> None:
    asked = asked_to_signal(workflow="w", node=JOB, payload="yes")
    with Recorder(tmp_path, "producer-1.0") as recorder:
        node = asked_to_start(job=JOB, queue="load", workflow="w", after=[], timeout_s=5.0)
        recorder.begin(Verb.START, "acme", [node])
        recorder.begin(Verb.SIGNAL, "acme", asked)
        for is_first in (True, False):
            recorder.end(recorder.begin(Verb.SIGNAL, "acme", asked), Outcome.OK, answered={"is_first": is_first})
        recorder.end(recorder.begin(Verb.SIGNAL, "acme", asked), Outcome.ERROR, code="FAILED_PRECONDITION")
    history = read(tmp_path)
    assert [(one.call.outcome, one.is_first) for one in history.signals] == [
        (Outcome.UNKNOWN, False),
        (Outcome.OK, True),
        (Outcome.OK, False),
        (Outcome.ERROR, False),
    ]
    assert {(one.workflow, one.node, one.payload) for one in history.signals} == {("w", JOB, "yes")}
    (waiting,) = history.enqueues
    # The job is not due before it ends.
    assert (waiting.timeout_s, waiting.delay_s) == (5.0, math.inf)


def test_a_call_that_was_planned_is_late_since_it_was_due(tmp_path: Path) -> None:
    with Recorder(tmp_path, "producer-1.0") as recorder:
        began_s = time.monotonic()
        recorder.end(recorder.begin(Verb.CANCEL, "acme", [JOB], due_s=began_s - 5.0), Outcome.OK)
        recorder.begin(Verb.CANCEL, "acme", [JOB])
    late, open_one = read(tmp_path).calls
    assert late.due_s == began_s - 5.0
    assert 5.0 <= late.took_s < 60.0
    assert open_one.due_s == open_one.began_s
    assert math.isinf(open_one.took_s)


def test_deliveries_and_what_was_said_of_them_name_one_lease(tmp_path: Path) -> None:
    with Recorder(tmp_path, "worker-1.0") as recorder:
        stream = recorder.begin(Verb.CONSUME, "acme", {"window_s": 3.0})
        recorder.got(stream, [leased(lease=LEASE, attempt=2, payload=payload_of("acme", JOB, 100))])
        nack = recorder.begin(Verb.NACK, "acme", {"leases": [LEASE.hex()], "span_s": 1.0})
        recorder.end(nack, Outcome.OK, answered=[Answer.STALE])
    history = read(tmp_path)
    (delivery,), (settle,) = history.deliveries, history.settles
    assert delivery.lease == settle.lease == LeaseKey(JOB, 42)
    assert (delivery.attempt, delivery.window_s) == (2, 3.0)
    assert (delivery.payload_org, delivery.payload_job) == ("acme", JOB)
    assert delivery.call.began_s <= delivery.received_s
    assert (settle.answer, settle.span_s) == (Answer.STALE, 1.0)


def test_a_client_that_was_killed_leaves_calls_without_an_end(tmp_path: Path) -> None:
    with Recorder(tmp_path, "worker-1.0") as recorder:
        recorder.begin(Verb.ACK, "acme", {"leases": [LEASE.hex()], "span_s": 0.0})
        cancel = recorder.begin(Verb.CANCEL, "acme", [JOB])
    with (tmp_path / "worker-1.0.jsonl").open("a") as file:
        file.write(f'{{"at":1.0,"wall":1.0,"of":{cancel},"outc')
    history = read(tmp_path)
    assert [call.outcome for call in history.calls] == [Outcome.UNKNOWN] * 2
    assert [call.ended_s for call in history.calls] == [None] * 2
    assert history.settles[0].answer is history.cancels[0].answer is None


def test_clients_are_read_together_and_a_clock_that_jumped_shows(tmp_path: Path) -> None:
    for client, wall_s in (("a.0", 100.0), ("b.0", 160.0)):
        line = f'{{"at":1.0,"wall":{wall_s},"call":1,"verb":"cancel","org":"acme","asked":["{JOB}"]}}\n'
        (tmp_path / f"{client}.jsonl").write_text(line)
    history = read(tmp_path)
    assert {call.client for call in history.calls} == {"a.0", "b.0"}
    assert history.drift_s == 60.0
