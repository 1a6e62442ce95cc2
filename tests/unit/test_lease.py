"""Lease tokens on the wire."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shard.lease_token import MalformedLease, parse_token, shard_tag, token, token_prefix
from shard.vocabulary import JobId, Lease, ShardName

numbers = st.integers(0, 2**63 - 1)
ids = st.uuids().map(lambda made: JobId(str(made)))
shards = st.text(min_size=1, max_size=63).map(ShardName)


@given(shards, numbers, ids)
def test_a_token_says_its_shard_its_job_and_its_number(shard: ShardName, number: int, job: JobId) -> None:
    tag, lease = parse_token(token(token_prefix(shard, number), job))
    assert tag == shard_tag(shard)
    assert lease == Lease(job_hex=job.replace("-", ""), number=number)


def test_the_bytes_of_a_token_never_change() -> None:
    # Workers have tokens while routers are upgraded, so the bytes of a token must not change.
    job = JobId("01900000-0000-7000-8000-000000000001")
    made = token(token_prefix(ShardName("s1"), 1), job)
    assert made.hex() == "012b5df013000000000000000101900000000070008000000000000001"
    assert shard_tag(ShardName("s1")) == 0x2B5DF013


@given(numbers, numbers, ids, ids)
def test_tokens_of_different_leases_differ(one: int, other: int, job: JobId, other_job: JobId) -> None:
    shard = ShardName("s1")
    made, unlike = token(token_prefix(shard, one), job), token(token_prefix(shard, other), other_job)
    assert (made == unlike) == ((one, job) == (other, other_job))


@given(st.binary(max_size=64).filter(lambda data: len(data) != 29 or data[0] != 1))
def test_bytes_that_are_no_token_are_refused(data: bytes) -> None:
    why = "29 bytes" if len(data) != 29 else "of version 1"
    with pytest.raises(MalformedLease, match=why):
        parse_token(data)


def test_a_token_of_another_version_is_refused() -> None:
    made = token(token_prefix(ShardName("s1"), 1), JobId("01900000-0000-7000-8000-000000000001"))
    with pytest.raises(MalformedLease):
        parse_token(b"\x02" + made[1:])


@given(st.binary(min_size=28, max_size=28))
def test_bytes_of_the_right_shape_name_some_lease_and_never_crash(rest: bytes) -> None:
    tag, lease = parse_token(b"\x01" + rest)
    assert 0 <= tag < 2**32
    assert len(lease.job_hex) == 32
    assert -(2**63) <= lease.number < 2**63
