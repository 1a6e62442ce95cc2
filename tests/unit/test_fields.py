"""Requests with too many fields are refused before they are decoded; no others are."""

from __future__ import annotations

import os

import protovalidate
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from router.codec.fields import FIELDS_MAX, bounded
from router.codec.status import InvalidRequest
from router.codec.validate import enqueue_violations, plain_jobs
from tests.jobs import job_message
from windrow.v1 import queue_pb2

MIB = 1024 * 1024
decode = bounded(queue_pb2.EnqueueRequest.FromString, queue_pb2.EnqueueRequest.DESCRIPTOR)


# The second and third are longer encodings of the same field.
@pytest.mark.parametrize("item", [b"\x12\x00", b"\x92\x00\x00", b"\x12\x80\x80\x00"])
def test_millions_of_empty_items_are_refused_before_they_are_decoded(item: bytes) -> None:
    with pytest.raises(InvalidRequest, match=r"^jobs: must have at most 1,000 items"):
        decode(b"\x0a\x01a" + item * (15 * MIB // len(item)))


def test_payloads_that_look_like_items_are_none() -> None:
    payloads = [bytes([0x12, 0]) * (MIB // 2), os.urandom(MIB), b"\x92" * MIB]
    jobs = [job_message(payload=payload) for payload in payloads]
    request = queue_pb2.EnqueueRequest(org="a", jobs=jobs)
    assert decode(request.SerializeToString()) == request


@given(st.integers(1, 20), st.binary(max_size=200))
def test_what_is_no_message_is_left_to_the_decoder(shift: int, end: bytes) -> None:
    # So many bytes look like items that the fields are counted; and those before the one that never ends are too few.
    head = b"\x12\x00" * (FIELDS_MAX - shift)
    raw = head + b"\x12" + b"\xff" * 40 + end + b"\x12" * (2 * shift)
    with pytest.raises(DecodeError):
        decode(raw)


# An item that has no fields, in three encodings; one that has; a field that is no item; one that nobody knows.
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
    raw = b"".join(some) + b"\x12\x00" * (FIELDS_MAX + over - len(some))
    if over > 0:
        with pytest.raises(InvalidRequest, match=r"^jobs: must have at most 1,000 items"):
            decode(raw)
    else:
        assert decode(raw) == queue_pb2.EnqueueRequest.FromString(raw)


def test_a_list_that_is_far_too_long_is_refused_without_a_look_at_each_item(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    request = queue_pb2.EnqueueRequest.FromString(b"\x0a\x01a" + b"\x12\x00" * FIELDS_MAX)
    assert plain_jobs(request) is None

    def looks(_: object) -> None:
        raise AssertionError("a look at each item takes seconds")

    monkeypatch.setattr(protovalidate, "collect_violations", looks)
    assert enqueue_violations(request) == [("jobs", "must have at most 1,000 items, not 10,000")]
