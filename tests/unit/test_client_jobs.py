"""Jobs converted to messages and back, and the errors of jobs that cannot be converted."""

from __future__ import annotations

import copy
import math
import pickle
import re
from dataclasses import FrozenInstanceError, fields, replace
from datetime import UTC, datetime, timedelta, timezone
from typing import Any, cast

import pytest

from windrow import (
    Enqueued,
    ExponentialRetry,
    FixedRetry,
    InvalidJob,
    InvalidRequest,
    Job,
    JobOptions,
    JobState,
    NewJob,
    Retry,
    Unavailable,
    Violation,
    uuid7,
)
from windrow.client import _enqueued
from windrow.errors import from_code, shifted
from windrow.failures import Failure, stack_of
from windrow.jobs import read_leased, read_record
from windrow.new_jobs import batch_requests, enqueue_request
from windrow.payloads import clipped, duration, encode, encode_result, moment, timestamp
from windrow.v1 import job_pb2, queue_pb2

# In UTC, this time is before the year 1.
FIRST_HOUR = datetime(1, 1, 1, tzinfo=timezone(timedelta(hours=1)))


def sent(job: NewJob) -> job_pb2.NewJob:
    """Returns the job's message as the router gets it."""
    data = enqueue_request("acme", [job]).SerializeToString()
    return queue_pb2.EnqueueRequest.FromString(data).jobs[0]


@pytest.mark.parametrize(
    ("value", "data"),
    [
        (b"\x00\xff", b"\x00\xff"),
        (bytearray(b"ab"), b"ab"),
        (memoryview(b"ab"), b"ab"),
        ("grün", "grün".encode()),
        ({"a": [1, None, True]}, b'{"a":[1,null,true]}'),
        ([], b"[]"),
        (1.5, b"1.5"),
        (None, b"null"),
    ],
)
def test_a_payload_is_bytes_text_or_json(value: Any, data: bytes) -> None:
    assert encode(value) == data
    assert sent(NewJob("q", "k", value)).template.payload == data


def test_a_result_of_none_is_no_result_and_a_long_one_is_refused() -> None:
    assert encode_result(None) == b""
    assert encode_result({}) == b"{}"
    with pytest.raises(ValueError, match="65,536"):
        encode_result(b"x" * 65537)


@pytest.mark.parametrize("value", [math.nan, {"a": object()}, {1, 2}, "\ud800"])
def test_a_payload_without_a_form_is_refused_by_its_path(value: Any) -> None:
    with pytest.raises(InvalidJob, match=r"^jobs\[1\]\.template\.payload: ") as caught:
        enqueue_request("acme", [NewJob("q", "k"), NewJob("q", "k", value)])
    assert caught.value.violations[0].field == "jobs[1].template.payload"


@pytest.mark.parametrize(
    ("options", "path"),
    [
        ({"run_at": datetime(2030, 1, 1)}, "run_at"),  # noqa: DTZ001
        ({"run_at": FIRST_HOUR}, "run_at"),
        ({"expires_at": FIRST_HOUR}, "expires_at"),
        ({"delay": math.nan}, "delay"),
        ({"delay": math.inf}, "delay"),
        ({"run_at": "2030-01-01"}, "run_at"),
        ({"retry": FixedRetry(delay=cast("Any", "5s"))}, "template.retry"),
        ({"priority": "high"}, "template.priority"),
        ({"max_attempts": 1 << 40}, "template.max_attempts"),
        ({"attributes": {"a": 1}}, "template.attributes"),
        ({"dedup_key": 7}, "dedup.key"),
        ({"id": ""}, "id"),
    ],
)
def test_what_has_no_form_on_the_wire_is_refused_by_its_path(options: dict[str, Any], path: str) -> None:
    with pytest.raises(InvalidJob) as caught:
        enqueue_request("acme", [NewJob("q", "k", **options)])
    assert caught.value.violations[0].field == f"jobs[0].{path}"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"retry": 5}, "template.retry: 5 is not a retry policy; write FixedRetry"),
        ({"attributes": {"fine": "yes", "a": 1}}, "template.attributes: key and value must both be str, not 'a': 1"),
        ({"attributes": {2: "b"}}, "template.attributes: key and value must both be str, not 2: 'b'"),
        ({"attributes": ["a"]}, "template.attributes: must be a dict of str to str, not ['a']"),
        ({"dedup_key": 7}, "dedup.key: must be a str, not 7"),
        ({"priority": 1.5}, "template.priority: must be an int, not 1.5"),
        ({"priority": 0}, "template.priority: must be 1 to 9, not 0; leave it out for the default"),
        ({"max_attempts": 0}, "template.max_attempts: must be 1 to 1,000, not 0; leave it out for the default"),
        ({"priority": "x" * 1000}, "template.priority: must be an int, not '" + "x" * 99 + "…"),
        (
            {"dedup_key": "a\ud800"},
            "dedup.key: must not have lone surrogates, which UTF-8 cannot encode, not",
        ),
        ({"attributes": {"a": "b\udc80"}}, "template.attributes: must not have lone surrogates, which UTF-8 cannot"),
        ({"payload": {"a": "\ud800"}}, "template.payload: a payload must not have lone surrogates"),
    ],
)
def test_a_field_of_the_wrong_type_or_zero_is_refused_with_its_value_and_what_it_may_be(
    options: dict[str, Any], told: str
) -> None:
    with pytest.raises(InvalidJob, match="^" + re.escape(f"jobs[0].{told}")):
        enqueue_request("acme", [NewJob("q", "k", **options)])


def test_a_priority_or_a_number_of_attempts_that_is_none_is_the_default() -> None:
    job = NewJob("q", "k", priority=None, max_attempts=None)
    (message,) = enqueue_request("acme", [job]).jobs
    assert (message.template.priority, message.template.max_attempts) == (0, 0)
    assert (NewJob("q", "k").priority, NewJob("q", "k").max_attempts) == (None, None)


def test_a_payload_or_result_that_is_no_json_is_told_with_its_type_and_what_is_taken() -> None:
    with pytest.raises(InvalidJob, match=r"a payload is bytes, str, or what JSON can hold, and this set .*: Object of"):
        enqueue_request("acme", [NewJob("q", "k", cast("Any", {1}))])
    with pytest.raises(TypeError, match=r"a result is bytes, str, or what JSON can hold, and this datetime .*: Object"):
        encode_result(cast("Any", datetime.now(UTC)))
    with pytest.raises(TypeError, match="this Retry is none of them: an exception is no result: raise it, or nack"):
        encode_result(cast("Any", Retry("later")))
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(ValueError, match=r"a result is .* this list .*: Circular reference"):
        encode_result(endless)


@pytest.mark.parametrize(("name", "path"), [("delay", "delay"), ("dedup_window", r"dedup\.window")])
def test_a_span_that_is_none_is_named_with_what_to_write(name: str, path: str) -> None:
    options: dict[str, Any] = {name: "5s"}
    with pytest.raises(InvalidJob, match=rf"^jobs\[0\]\.{path}: '5s' is neither a number of seconds nor a timedelta$"):
        enqueue_request("acme", [NewJob("q", "k", **options)])


def test_what_is_no_job_is_refused_with_its_place() -> None:
    wrong = [NewJob("q", "k"), cast("Any", {"queue": "q", "kind": "k"})]
    refused = r"^jobs\[1\]: must be a windrow\.NewJob, not \{'queue': 'q', 'kind': 'k'\}$"
    with pytest.raises(InvalidJob, match=refused):
        enqueue_request("acme", wrong)
    with pytest.raises(InvalidJob, match=refused):
        list(batch_requests("acme", wrong, uuid7(), jobs_max=10, bytes_max=1000))


def test_a_job_is_told_one_time_to_run_at() -> None:
    with pytest.raises(InvalidJob, match="run_at and delay"):
        enqueue_request("acme", [NewJob("q", "k", run_at=datetime.now(UTC), delay=1)])


def test_every_field_of_a_new_job_arrives() -> None:
    at = datetime(2030, 1, 2, 3, 4, 5, 678901, UTC)
    job = NewJob(
        "q",
        "k",
        b"p",
        attributes={"a": "b"},
        priority=3,
        delay=timedelta(milliseconds=1500),
        expires_at=at,
        max_attempts=7,
        retry=ExponentialRetry(initial_delay=0.5, multiplier=3, max_delay=timedelta(minutes=1), jitter=0),
        dedup_key="d",
        dedup_window=60,
    )
    message = sent(job)
    assert message.id == job.id
    template = message.template
    assert (template.queue, template.kind, template.payload, dict(template.attributes)) == ("q", "k", b"p", {"a": "b"})
    assert (template.priority, template.max_attempts, message.dedup.key) == (3, 7, "d")
    assert message.delay.ToTimedelta() == timedelta(seconds=1.5)
    assert moment(message.expires_at) == at
    assert message.dedup.window.seconds == 60
    told = template.retry.exponential
    assert (told.initial_delay.nanos, told.multiplier, told.max_delay.seconds) == (500_000_000, 3, 60)
    assert told.HasField("jitter")
    assert told.jitter == 0


def test_a_delay_of_nothing_is_still_said() -> None:
    assert sent(NewJob("q", "k", delay=0)).WhichOneof("when") == "delay"
    assert sent(NewJob("q", "k")).WhichOneof("when") is None


def test_a_time_in_another_zone_is_the_same_moment() -> None:
    there = datetime.fromisoformat("2030-01-02T03:04:05.678901+05:30")
    assert moment(timestamp(there)) == there


def test_spans_are_timedeltas_or_seconds() -> None:
    assert duration(0.1).nanos == 100_000_000
    assert duration(timedelta(hours=1)).seconds == 3600


def test_a_new_job_is_frozen_has_its_defaults_and_takes_no_other_option() -> None:
    job = NewJob("q", "k", priority=3)
    with pytest.raises(FrozenInstanceError):
        cast("Any", job).kind = "other"
    with pytest.raises(TypeError, match="unexpected keyword argument 'colour'"):
        cast("Any", NewJob)("q", "k", colour="red")
    assert (job.payload, job.delay, job.dedup_key) == (b"", None, "")
    changed = replace(job, attributes={"a": "b"})
    assert (changed.id, changed.priority, changed.attributes) == (job.id, 3, {"a": "b"})
    for twin in (pickle.loads(pickle.dumps(job)), copy.deepcopy(job), replace(changed, attributes=None)):
        assert (twin, hash(twin)) == (job, hash(job))
    assert job != NewJob("q", "k", priority=3)
    assert {field.name for field in fields(NewJob)} == {"queue", "kind", "payload", *JobOptions.__annotations__}


def test_what_says_more_than_an_id_is_read_whole() -> None:
    new, known = uuid7(), uuid7()
    request = queue_pb2.EnqueueRequest(jobs=[job_pb2.NewJob(id=new), job_pb2.NewJob(id=known)])
    plain = queue_pb2.EnqueueResponse(results=[queue_pb2.EnqueueResult(id=new), queue_pb2.EnqueueResult(id=known)])
    assert _enqueued(request, plain, first=0) == [Enqueued(id=new), Enqueued(id=known)]
    assert [one.duplicate for one in _enqueued(request, plain, first=0)] == [False, False]
    told = queue_pb2.EnqueueResponse()
    told.CopyFrom(plain)
    told.results[1].duplicate = True
    assert _enqueued(request, told, first=0) == [Enqueued(id=new), Enqueued(id=known, duplicate=True)]
    # These two results together have as many bytes as two results with only an id. But one of them has no id, and the
    # other has an id and another field.
    told.results[0].id = ""
    assert _enqueued(request, told, first=0) == [Enqueued(id=""), Enqueued(id=known, duplicate=True)]
    long = queue_pb2.EnqueueResponse(results=[queue_pb2.EnqueueResult(id="i" * 200)] * 2)
    assert _enqueued(request, long, first=0) == [Enqueued(id="i" * 200)] * 2


def test_a_leased_job_is_read_whole() -> None:
    at = datetime(2030, 1, 2, 3, 4, 5, 678901, UTC)
    message = job_pb2.LeasedJob(
        lease=b"l", id="i", queue="q", kind="k", payload=b'{"a":1}', attributes={"x": "y"}, priority=5, attempt=2
    )
    message.enqueued_at.CopyFrom(timestamp(at))
    job = read_leased(message)
    assert (job.lease, job.id, job.attempt, job.attributes) == (b"l", "i", 2, {"x": "y"})
    assert job.enqueued_at == at
    assert job.json() == {"a": 1}
    assert job.text() == '{"a":1}'
    assert not job.lost.is_set()


def test_a_test_of_a_handler_can_make_a_job() -> None:
    assert Job(kind="k", payload=b"1").json() == 1


def test_a_record_is_read_with_its_retry_policy_and_a_state_of_the_future() -> None:
    message = job_pb2.Job(id="i", state=job_pb2.JOB_STATE_DEAD)
    message.retry.fixed.delay.seconds = 9
    message.attempts.add(attempt=1, outcome=job_pb2.ATTEMPT_OUTCOME_NACKED, failure=job_pb2.Failure(message="e"))
    record = read_record(message, with_payload=False)
    assert record.state is JobState.DEAD
    assert record.retry == FixedRetry(timedelta(seconds=9))
    assert record.attempts[0].failure == Failure(message="e")
    assert record.finished_at is None
    newer = job_pb2.Job.FromString(b"\x20\x63")
    assert read_record(newer, with_payload=False).state is JobState.UNKNOWN


def test_a_record_has_payload_and_result_only_if_they_were_asked_for() -> None:
    left_out = read_record(job_pb2.Job(id="i"), with_payload=False)
    assert (left_out.payload, left_out.result) == (None, None)
    empty = read_record(job_pb2.Job(id="i", payload=b"p"), with_payload=True)
    assert (empty.payload, empty.result) == (b"p", b"")


def test_a_text_that_is_too_long_keeps_whole_characters_and_no_nul() -> None:
    assert clipped("a\0b", 100) == "a\N{REPLACEMENT CHARACTER}b"
    text = "start" + "ä" * 100 + "end"
    assert clipped(text, 100, keep_end=True) == "ä" * 48 + "end"
    assert clipped(text, 100) == "start" + "ä" * 47


def test_a_long_stack_keeps_its_newest_frames_as_whole_lines() -> None:
    stack = cut = ""

    def fall(depth: int) -> None:
        if depth:
            fall(depth - 1)
        else:
            raise ValueError("x" * 30_000)

    try:
        fall(1)
    except ValueError as error:
        stack = stack_of(error, error.__traceback__)
        assert stack.startswith("Traceback (most recent call last):")
        for at in range(5000):
            error.add_note(f"note {at}")
        cut = stack_of(error, error.__traceback__)
    first, second, *_, last = cut.splitlines()
    assert (first, last) == ("... (older frames are left out)", "note 4999")
    assert second.startswith("note ")
    assert 32_000 < len(cut.encode()) <= 32_768


def test_an_invalid_request_says_what_and_where_and_survives_pickling() -> None:
    error = from_code(3, "2 violations", [Violation("jobs[3].queue", "is empty"), Violation("org", "is long")])
    assert isinstance(error, InvalidJob)
    assert "jobs[3].queue: is empty; org: is long" in str(error)
    assert pickle.loads(pickle.dumps(error)).violations == error.violations
    assert type(from_code(3, "no", [Violation("org", "is long")])) is InvalidRequest
    assert type(from_code(14, "no")) is Unavailable


def test_violations_of_a_part_are_told_by_the_place_in_the_whole() -> None:
    told = shifted([Violation("jobs[3].attributes[a]", "x"), Violation("org", "y")], 1000)
    assert told == [("jobs[1003].attributes[a]", "x"), ("org", "y")]


@pytest.mark.parametrize("after", [-1, math.nan, math.inf, timedelta(days=-1)])
def test_a_retry_cannot_be_asked_for_at_no_time(after: Any) -> None:
    with pytest.raises(ValueError, match="after must be"):
        Retry(after=after)
