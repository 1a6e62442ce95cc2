"""Requests with too many fields are refused before they are decoded. No other request is refused."""

from __future__ import annotations

import os

import protovalidate
import pytest
from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError
from google.protobuf.timestamp_pb2 import Timestamp
from hypothesis import given
from hypothesis import strategies as st

from router.codec.fields import FIELDS_MAX, bounded, number_in
from router.codec.status import InvalidRequest
from router.codec.validate import plain_jobs, violations_of
from tests.jobs import job_message
from windrow import uuid7
from windrow.v1 import admin_pb2, cluster_pb2, job_pb2, queue_pb2

MIB = 1024 * 1024
decode = bounded(queue_pb2.EnqueueRequest.FromString, queue_pb2.EnqueueRequest.DESCRIPTOR)
# This limit is lower than the real one, so that small examples reach it.
FEW = 5_000
decode_few = bounded(queue_pb2.EnqueueRequest.FromString, queue_pb2.EnqueueRequest.DESCRIPTOR, fields_max=FEW)


# The second and the third item are longer encodings of the first item.
@pytest.mark.parametrize("item", [b"\x12\x00", b"\x92\x00\x00", b"\x12\x80\x80\x00"])
def test_millions_of_empty_items_are_refused_before_they_are_decoded(item: bytes) -> None:
    with pytest.raises(InvalidRequest, match=r"^request: must have at most 250,000 fields"):
        decode(b"\x0a\x01a" + item * (15 * MIB // len(item)))


def test_payloads_that_look_like_items_are_none() -> None:
    payloads = [bytes([0x12, 0]) * (MIB // 2), os.urandom(MIB), b"\x92" * MIB]
    jobs = [job_message(payload=payload) for payload in payloads]
    request = queue_pb2.EnqueueRequest(org="a", jobs=jobs)
    assert decode(request.SerializeToString()) == request


@given(st.integers(1, 20), st.binary(max_size=200))
def test_what_is_no_message_is_left_to_the_decoder(shift: int, end: bytes) -> None:
    # One field never ends. Even if each byte after this field began a field, the message would have fewer fields than
    # the limit.
    head = b"\x12\x00" * (FEW - 300)
    raw = head + b"\x12" + b"\xff" * 40 + end + b"\x12" * (2 * shift)
    with pytest.raises(DecodeError):
        decode_few(raw)


# The fields are, in this order: an item without fields, in three encodings; an item with a field; a field that is not
# an item; a field that is not in the contract.
FIELDS = (
    b"\x12\x00",
    b"\x92\x00\x00",
    b"\x12\x80\x00",
    b"\x12\x03\x0a\x01\x12",
    b"\x0a\x01\x12",
    b"\xb2\x3e\x02\x12\x12",
)


@given(st.integers(-3, 3), st.lists(st.sampled_from(FIELDS), min_size=20, max_size=50))
def test_a_message_is_refused_if_it_has_a_field_too_many_and_otherwise_decoded(over: int, some: list[bytes]) -> None:
    # The item FIELDS[3] contains a field, and this field counts, too.
    count = len(some) + some.count(FIELDS[3])
    raw = b"".join(some) + b"\x12\x00" * (FEW + over - count)
    if over > 0:
        with pytest.raises(InvalidRequest, match=r"^request: must have at most 5,000 fields"):
            decode_few(raw)
    else:
        assert decode_few(raw) == queue_pb2.EnqueueRequest.FromString(raw)


def test_a_list_that_is_too_long_is_refused_without_a_look_at_each_item(monkeypatch: pytest.MonkeyPatch) -> None:
    request = queue_pb2.EnqueueRequest.FromString(b"\x0a\x01a" + b"\x12\x00" * 1_001)
    assert plain_jobs(request) is None

    def looks(_: object) -> None:
        raise AssertionError("a look at each item of a request of 2 KiB takes a tenth of a second")

    monkeypatch.setattr(protovalidate, "collect_violations", looks)
    assert violations_of(request) == [("jobs", "must have at most 1,000 items, not 1,001")]


def test_a_request_that_breaks_very_many_rules_is_refused_with_values_for_the_first_ones_only() -> None:
    request = queue_pb2.EnqueueRequest(org="acme")
    for at in range(1_000):
        job = request.jobs.add(id=uuid7())
        job.template.queue, job.template.kind = f"no queue {at}", "no-op"
    found = violations_of(request)
    assert [violation.field for violation in found] == [f"jobs[{at}].template.queue" for at in range(1_000)]
    assert [f"'no queue {at}'" in violation.description for at, violation in enumerate(found)] == [
        at < 100 for at in range(1_000)
    ]


def encoded(field: FieldDescriptor, value: bytes = b"") -> bytes:
    """Returns a field with this value."""
    length, size = b"", len(value)
    while size > 127:
        length += bytes((size & 0x7F | 0x80,))
        size >>= 7
    return bytes((field.number << 3 | 2,)) + length + bytes((size,)) + value


def ways_down(of: Descriptor) -> list[list[FieldDescriptor]]:
    """Returns the path from a message to each of its fields that may take memory each time it occurs: lists, maps and
    messages, at any depth."""
    ways: list[list[FieldDescriptor]] = []
    for field in of.fields:
        if field.is_repeated or field.message_type is not None:
            ways.append([field])
        if field.message_type is not None:
            ways += [[field, *rest] for rest in ways_down(field.message_type)]
    return ways


REQUESTS = {
    method.input_type.name: method.input_type
    for file in (queue_pb2, admin_pb2, cluster_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}


@pytest.mark.parametrize("name", REQUESTS)
def test_no_request_can_have_millions_of_items_wherever_they_stand_in_it(name: str) -> None:
    request = message_factory.GetMessageClass(REQUESTS[name])
    decoded: list[bytes] = []

    def to_decoder(raw: bytes) -> object:
        decoded.append(raw)
        return request.FromString(raw)

    for way in ways_down(REQUESTS[name]):
        *parents, field = way
        # Only the last message of a `oneof` is kept.
        oneof = field.containing_oneof
        items = b"".join(encoded(one) for one in (oneof.fields if oneof is not None else [field]))
        raw = items * (FEW + 1)
        for parent in reversed(parents):
            raw = encoded(parent, raw)
        path = ".".join(one.name for one in way)
        if field.is_repeated or (oneof is not None and len(oneof.fields) > 1):
            with pytest.raises(InvalidRequest, match=r"must have at most"):
                bounded(to_decoder, REQUESTS[name], fields_max=FEW)(raw)
            assert decoded == [], path
        else:
            # The decoder merges all occurrences into one message.
            assert request.FromString(raw).ByteSize() < 100, path


def test_the_fullest_request_that_the_rules_allow_is_decoded() -> None:
    time, span = Timestamp(seconds=1, nanos=1), Duration(seconds=1, nanos=1)
    retry = job_pb2.ExponentialRetry(initial_delay=span, multiplier=2, max_delay=span, jitter=0.5)
    job = job_message(payload=b"\x12" * 100)
    template = job.template
    template.priority = template.max_attempts = 1
    template.retry.exponential.CopyFrom(retry)
    template.attributes.update({str(number): "some" for number in range(32)})
    job.run_at.CopyFrom(time)
    job.expires_at.CopyFrom(time)
    job.dedup.CopyFrom(job_pb2.Dedup(key="k", window=span))
    job.trace.CopyFrom(job_pb2.TraceContext(traceparent="00", tracestate="a=b"))
    request = queue_pb2.EnqueueRequest(org="a", jobs=[job] * 1_000, independent=True)
    raw = request.SerializeToString()
    assert len(raw) > 2 * FIELDS_MAX
    assert decode(raw) == request


@pytest.mark.parametrize("path", [b"\x0a\x00", b"\x8a\x00\x00", b"\x0a\x80\x00", b"\x0a\x01\x0a"])
@pytest.mark.parametrize("over", [0, 1])
def test_the_fields_of_inner_messages_are_counted_exactly(path: bytes, over: int) -> None:
    update = admin_pb2.UpdateQueueRequest
    mask = update.DESCRIPTOR.fields_by_name["update_mask"]
    decode_update = bounded(update.FromString, update.DESCRIPTOR, fields_max=FEW)
    # The mask counts as a field, too.
    raw = encoded(mask, b"\x0a\x01\x0a" * 100 + path * (FEW - 101 + over))
    if over > 0:
        with pytest.raises(InvalidRequest, match=r"^request: must have at most 5,000 fields"):
            decode_update(raw)
    else:
        assert decode_update(raw) == update.FromString(raw)


# number_in

REQUEST_ID = queue_pb2.ConsumeRequest.REQUEST_ID_FIELD_NUMBER


@given(st.integers(-(2**63), 2**63 - 1).filter(bool), st.integers(1, 10_000), st.permutations(range(4)))
def test_a_request_id_is_found_wherever_it_stands(request_id: int, credit: int, order: list[int]) -> None:
    parts = (
        queue_pb2.ConsumeRequest(request_id=request_id),
        queue_pb2.ConsumeRequest(credit=credit),
        queue_pb2.ConsumeRequest(acks=[queue_pb2.Ack(lease=b"\x08\x07" * 20, result=b"\x08\x05" * 200)] * 3),
        # A field of each other wire type, as a later release may send them.
        queue_pb2.ConsumeRequest(releases=[b"x" * 29]),
    )
    unknown = b"\xf9\x07" + b"\x08" * 8 + b"\xfd\x07" + b"\x08" * 4
    message = unknown + b"".join(parts[at].SerializeToString() for at in order)
    assert queue_pb2.ConsumeRequest.FromString(message).request_id == request_id
    assert number_in(message, REQUEST_ID, fields_max=8) == request_id


def test_a_message_without_a_whole_request_id_has_none() -> None:
    whole = (b"", b"\x18\x05", b"\x0a\x02\x08\x07")
    endless = (b"\x08", b"\x08\xff\xff", b"\x08" + b"\xff" * 15, b"\x08" + b"\xff" * 12 + b"\x01", b"\x22\xff")
    group = b"\x0b\x08\x07"
    assert [number_in(raw, REQUEST_ID, fields_max=8) for raw in (*whole, *endless, group)] == [0] * 9


def test_a_request_id_is_looked_for_in_a_bounded_number_of_fields() -> None:
    message = b"\x22\x00" * 100 + b"\x08\x07"
    assert [number_in(message, REQUEST_ID, fields_max=most) for most in (100, 101)] == [0, 7]
