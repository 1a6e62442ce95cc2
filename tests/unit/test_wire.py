"""The router writes some answers as bytes itself. The generated code can read these answers, and would write the same
bytes, except for an empty payload: the router writes it in two bytes, and the generated code leaves it out. Readers
treat an empty payload like an absent one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.codec import convert, fast_write
from shard.lease_token import parse_token, token, token_prefix
from shard.queue.pending_enqueue import Handed, Taker
from shard.queue.store import Store
from shard.schedule import RunCause, ScheduledRun, ScheduleName
from shard.vocabulary import Claimed, JobId, Lease, Micros, NewJobs, OrgId, QueueName, ShardName
from tests.jobs import job_id
from windrow.v1 import job_pb2, queue_pb2

SHARD = ShardName("s1")
ORG = OrgId("org")
# Lengths near the values at which the varint of a length, of a field or of the whole job, becomes one byte longer.
EDGES = (0, 1, 30, 60, 127, 128, 129, 16_280, 16_383, 16_384, 16_385)
LARGEST = 1_048_576


class _Shard:
    """A shard that has only a name, because the bytes do not depend on anything else of the shard."""

    name = SHARD


STORE = cast("Store", _Shard())

MICROS = st.integers(-62_135_596_800_000_000, 253_402_300_799_999_999).map(Micros)
NUMBERS = st.integers(0, 2**63 - 1)
# Texts that Postgres can store: without NUL and without half a surrogate pair.
TEXTS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=300)
ASCII = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=300)
PAYLOADS = st.one_of(
    st.binary(max_size=300),
    st.sampled_from(EDGES).map(lambda size: b"\xff" * size),
    st.integers(0, 20_000).map(lambda size: b"p" * size),
)
NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}", fullmatch=True)
TRACES = st.builds(
    lambda parent, state: f"{parent} {state}" if state else parent,
    st.from_regex(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}", fullmatch=True),
    ASCII,
)
ATTRIBUTES = st.dictionaries(TEXTS, TEXTS, max_size=5).map(json.dumps)
IDS = st.integers(0, 2**128 - 1).map(lambda number: dashed(f"{number:032x}"))


def dashed(text: str) -> JobId:
    return JobId("-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:])))


RUNS = st.builds(
    ScheduledRun,
    schedule=st.sampled_from(["daily", "s" * 128]).map(ScheduleName),
    at=MICROS,
    previous=st.none() | MICROS,
    cause=st.sampled_from(RunCause),
).map(ScheduledRun.to_json)


def claimed_jobs(lease: int) -> st.SearchStrategy[Claimed]:
    return st.builds(
        Claimed,
        id=IDS,
        queue=st.sampled_from(["mail", "a/b", "q" * 128]).map(QueueName),
        kind=st.sampled_from(["greet", "k" * 128]),
        payload=PAYLOADS,
        attributes=st.none() | ATTRIBUTES,
        priority=st.integers(1, 9),
        attempt=st.integers(1, 1000),
        max_attempts=st.none() | st.integers(1, 1000),
        enqueued_at=MICROS,
        run_at=MICROS,
        trace=st.none() | TRACES,
        lease=st.just(lease),
        leased_at=MICROS,
        deadline=MICROS,
        expired=st.just(False),
        max_runtime_us=st.none() | st.integers(1_000_000, 2_592_000_000_000),
        group_key=st.none() | TEXTS.filter(bool),
        checkpoint=st.none() | PAYLOADS,
        scheduled_run=st.none() | RUNS,
        workflow_node=st.none() | st.builds("{}/{}".format, IDS, st.integers(0, 10_000)),
    )


def as_message(job: Claimed) -> job_pb2.LeasedJob:
    """Builds the message of a claimed job, field by field."""
    parent, _, state = (job.trace or "").partition(" ")
    return job_pb2.LeasedJob(
        org=ORG,
        lease=token(token_prefix(SHARD, job.lease), job.id),
        id=job.id,
        queue=job.queue,
        kind=job.kind,
        payload=job.payload,
        attributes=json.loads(job.attributes or "{}"),
        priority=job.priority,
        attempt=job.attempt,
        max_attempts=20 if job.max_attempts is None else job.max_attempts,
        enqueued_at=convert.timestamp(job.enqueued_at),
        run_at=convert.timestamp(job.run_at),
        trace=job_pb2.TraceContext(traceparent=parent, tracestate=state) if job.trace is not None else None,
        max_runtime=None if job.max_runtime_us is None else convert.duration(job.max_runtime_us),
        checkpoint=job.checkpoint or b"",
        scheduled_run=None if job.scheduled_run is None else convert.scheduled_run(job.scheduled_run),
        workflow=None if job.workflow_node is None else convert.workflow_node(job.workflow_node),
        group=job.group_key or "",
    )


def written(jobs: Sequence[bytes]) -> bytes:
    return b"".join(jobs)


def assert_written(given_: fast_write.Delivery, expected: Sequence[job_pb2.LeasedJob]) -> None:
    """Asserts that a DequeueResponse and a ConsumeResponse with these jobs are read back as expected. Asserts that they
    have as many bytes as the responses that the generated code writes."""
    data = written(given_.jobs)
    for kind in (queue_pb2.DequeueResponse, queue_pb2.ConsumeResponse):
        message = kind(jobs=expected)
        assert kind.FromString(data) == message
        if all(one.payload for one in expected):
            assert len(data) == message.ByteSize()
    for job, one in zip(given_.jobs, expected, strict=True):
        assert queue_pb2.ConsumeResponse.FromString(job).jobs[0] == one
    assert given_.ids == [one.id for one in expected]
    assert given_.leases() == [parse_token(one.lease)[1] for one in expected]


@settings(max_examples=60)
@given(st.data(), NUMBERS)
def test_claimed_jobs_are_written_as_the_generated_code_would(data: st.DataObject, lease: int) -> None:
    jobs = data.draw(st.lists(claimed_jobs(lease), min_size=1, max_size=6))
    given_ = fast_write.claimed(STORE, ORG, jobs)
    assert_written(given_, [as_message(job) for job in jobs])
    assert (given_.number, given_.deadline) == (lease, max(job.deadline for job in jobs))


@settings(max_examples=25)
@given(st.data(), NUMBERS)
def test_jobs_that_differ_in_one_field_are_not_written_as_alike(data: st.DataObject, lease: int) -> None:
    one, other = data.draw(claimed_jobs(lease)), data.draw(claimed_jobs(lease))
    shared = ("lease", "leased_at", "deadline", "expired")
    both = [one]
    for field in Claimed._fields:
        if field not in shared:
            both += [one._replace(**{field: getattr(other, field)}), one]
    assert_written(fast_write.claimed(STORE, ORG, both), [as_message(job) for job in both])


@settings(max_examples=25)
@given(st.data(), NUMBERS, NUMBERS)
def test_what_is_encoded_once_for_alike_jobs_reads_none_of_the_fields_that_differ(
    data: st.DataObject, lease: int, other_lease: int
) -> None:
    one, other = data.draw(claimed_jobs(lease)), data.draw(claimed_jobs(other_lease))
    # The conversion would raise if it read these fields, because their values are wrong.
    useless: dict[str, Any] = dict.fromkeys(fast_write.NOT_SHARED)
    assert convert.leased_job(one._replace(**useless), ORG) == convert.leased_job(one, ORG)
    mixed = one._replace(**{field: getattr(other, field) for field in fast_write.NOT_SHARED})
    assert convert.leased_job(mixed, ORG) == convert.leased_job(one, ORG)


def test_every_column_of_a_claim_that_is_encoded_once_for_alike_jobs_tells_them_apart() -> None:
    # If Claimed gets a column that convert.leased_job reads, the column must not be in this list.
    differ = {"id", "payload", "group_key", "lease", "leased_at", "deadline"}
    differ |= {"expired", "expired_lease", "expired_worker"}
    assert differ == fast_write.NOT_SHARED
    assert set(Claimed._fields) > fast_write.NOT_SHARED


@pytest.mark.parametrize("size", [*EDGES, LARGEST])
def test_lengths_around_a_longer_varint_are_right(size: int) -> None:
    base = Claimed(
        id=job_id(),
        queue=QueueName("q"),
        kind="k",
        payload=b"",
        attributes=None,
        priority=5,
        attempt=1,
        max_attempts=None,
        enqueued_at=Micros(1),
        run_at=Micros(1),
        trace=None,
        lease=7,
        leased_at=Micros(2),
        deadline=Micros(2),
        expired=False,
    )
    # The payload grows byte by byte, so that the length of the whole job also crosses these edges.
    jobs = [base._replace(payload=b"x" * max(0, size - less)) for less in range(140 if size < LARGEST else 1)]
    assert_written(fast_write.claimed(STORE, ORG, jobs), [as_message(job) for job in jobs])


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(
            IDS,
            st.sampled_from(["a", "b"]),
            NAMES,
            PAYLOADS,
            st.none() | st.integers(1, 9),
            st.none() | TRACES,
            st.none() | st.sampled_from(["{}", '{"plan": "pro"}']),
            st.none() | st.integers(1, 100),
            st.none() | NAMES,
        ),
        min_size=1,
        max_size=6,
    ),
    st.data(),
)
def test_jobs_handed_over_are_written_as_the_generated_code_would(
    rows: list[tuple[JobId, str, str, bytes, int | None, str | None, str | None, int | None, str | None]],
    data: st.DataObject,
) -> None:
    jobs = NewJobs(org=ORG)
    for at, (name, queue, kind, payload, *options) in enumerate(rows):
        jobs.ids.append(name)
        jobs.queues.append(QueueName(queue))
        jobs.kinds.append(kind)
        jobs.payloads.append(payload)
        columns: list[dict[int, Any]]
        columns = [jobs.priorities, jobs.traces, jobs.attributes, jobs.max_attempts, jobs.groups]
        for column, value in zip(columns, options, strict=True):
            if value is not None:
                column[at] = value
    positions = data.draw(st.lists(st.sampled_from(range(len(rows))), unique=True, min_size=1))
    taker = Taker(data.draw(NUMBERS), "w", data.draw(st.integers(100_000, 43_200_000_000)))
    now = data.draw(st.integers(0, 2**52).map(Micros))
    told = Handed(positions, (), now, {(ORG, QueueName("a")): 3, (ORG, QueueName("b")): None})
    given_ = fast_write.handed(STORE, jobs, positions, taker, told)
    expected: list[job_pb2.LeasedJob] = []
    for at in positions:
        name, queue, kind, payload, priority, trace, attributes, max_attempts, group = rows[at]
        job = Claimed(
            id=name,
            queue=QueueName(queue),
            kind=kind,
            payload=payload,
            attributes=attributes,
            priority=priority or 5,
            attempt=1,
            max_attempts=max_attempts or {"a": 3, "b": None}[queue],
            enqueued_at=now,
            run_at=now,
            trace=trace,
            group_key=group,
            lease=taker.number,
            leased_at=now,
            deadline=Micros(now + taker.window_us),
            expired=False,
        )
        expected.append(as_message(job))
    assert_written(given_, expected)
    assert (given_.number, given_.deadline) == (taker.number, now + taker.window_us)


@settings(max_examples=30)
@given(st.lists(claimed_jobs(3), min_size=2, max_size=8), st.data())
def test_jobs_split_in_two_are_the_same_jobs_and_leases(jobs: list[Claimed], data: st.DataObject) -> None:
    whole = fast_write.claimed(STORE, ORG, jobs)
    first, rest = whole.split(data.draw(st.integers(1, len(jobs) - 1)))
    assert first.jobs + rest.jobs == whole.jobs
    assert (
        [*first.leases(), *rest.leases()]
        == whole.leases()
        == [Lease(job_hex=job.id.replace("-", ""), number=3) for job in jobs]
    )
    assert (first.number, first.deadline) == (rest.number, rest.deadline) == (whole.number, whole.deadline)


@settings(max_examples=30)
@given(claimed_jobs(3), st.lists(st.integers(0, 3), max_size=300), st.integers(-(2**63), 2**63 - 1))
def test_jobs_and_answers_make_one_message(job: Claimed, answers: list[int], number: int) -> None:
    not_ok = [
        queue_pb2.LeaseAnswer(lease=b"%d" % at, answer=cast("job_pb2.JobAnswer.ValueType", answer))
        for at, answer in enumerate(answers)
    ]
    settled = queue_pb2.Settled(request_id=number, not_ok=not_ok)
    rest = queue_pb2.ConsumeResponse(settled=[settled]).SerializeToString()
    message = queue_pb2.ConsumeResponse.FromString(written(fast_write.claimed(STORE, ORG, [job]).jobs) + rest)
    assert message == queue_pb2.ConsumeResponse(jobs=[as_message(job)], settled=[settled])


@pytest.mark.parametrize("count", [1, 2, 127, 128, 1000])
def test_stored_jobs_are_answered_byte_for_byte_as_the_generated_code_would(count: int) -> None:
    ids = [str(job_id()) for _ in range(count)]
    results = [queue_pb2.EnqueueResult(id=one) for one in ids]
    assert fast_write.stored(ids) == queue_pb2.EnqueueResponse(results=results).SerializeToString()
