"""Lease tokens on the wire. Pure.

A token names the shard, the job and the lease, so that an ack finds its shard wherever the org has moved since,
and fits one lease only. 29 bytes: version 1, the shard's tag, the lease's number, the job's id; integers
big-endian.
"""

from __future__ import annotations

import struct

import xxhash

from shard.vocabulary import JobId, Lease, ShardName

TOKEN_VERSION = 1
_ADVICE = "send `lease` unchanged, as Dequeue or Consume gave it"
_PREFIX = struct.Struct(">BIq")
TOKEN_BYTES = _PREFIX.size + 16


class MalformedLease(ValueError):
    """These bytes were never a lease token of this cluster."""


def shard_tag(shard: ShardName) -> int:
    """32 bits that stand for a shard in tokens. A cluster file whose shards collide is refused (shard/cluster.py)."""
    return xxhash.xxh32_intdigest(shard.encode())


def token_prefix(shard: ShardName, number: int) -> bytes:
    """What the tokens of all jobs of one claim begin with."""
    return _PREFIX.pack(TOKEN_VERSION, shard_tag(shard), number)


def token(prefix: bytes, job: JobId) -> bytes:
    return prefix + bytes.fromhex(job.replace("-", ""))


def lease_of(job: str, number: int) -> Lease:
    """The lease of this number on a job, by the job's id."""
    return Lease(job_hex=job.replace("-", ""), number=number)


def parse_token(data: bytes) -> tuple[int, Lease]:
    """The shard's tag and the lease. Raises MalformedLease."""
    if len(data) != TOKEN_BYTES:
        raise MalformedLease(f"is no lease token, which has {TOKEN_BYTES} bytes, not {len(data)}: {_ADVICE}")
    if data[0] != TOKEN_VERSION:
        raise MalformedLease(f"is no lease token of version {TOKEN_VERSION}, but begins with {data[0]}: {_ADVICE}")
    _, tag, number = _PREFIX.unpack_from(data)
    return tag, Lease(job_hex=data[_PREFIX.size :].hex(), number=number)
