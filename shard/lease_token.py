"""Lease tokens on the wire. Pure.

A token names the shard, the job and the lease. The shard is named so that a router finds the lease even if the org has
moved since. The lease is named so that an ack never ends another lease of the job. A token has 29 bytes: version 1, the
shard's tag, the lease's number, the job's id; integers are big-endian. A token of version 2 also names the org, in
UTF-8 after these bytes. Consumers that take jobs of all orgs get such tokens, because their streams name no org.
"""

from __future__ import annotations

import secrets
import struct

import xxhash

from shard.job_id import to_hex
from shard.vocabulary import JobId, Lease, OrgId, ShardName

TOKEN_VERSION = 1
ORG_TOKEN_VERSION = 2
_ORG_BYTES_MAX = 128
_ADVICE = "send `lease` unchanged, as Dequeue or Consume gave it"
_PREFIX = struct.Struct(">BIq")
TOKEN_BYTES = _PREFIX.size + 16


class MalformedLease(ValueError):
    """These bytes are not a lease token of this cluster."""


def shard_tag(shard: ShardName) -> int:
    """Returns the 32 bits that name a shard in tokens. shard/placement/cluster_file.py refuses shards with equal
    tags."""
    return xxhash.xxh32_intdigest(shard.encode())


def draw_number(*, counted: bool = False) -> int:
    """Returns a number for new leases. The number is random, so that a lease that was lost in a failover never matches
    a later lease. `counted`: the leases count towards a limit of jobs in flight. Their numbers are negative, because
    the index by which leases are counted has only negative numbers."""
    number = secrets.randbits(63)
    return -1 - number if counted else number


def token_prefix(shard: ShardName, number: int, *, names_org: bool = False) -> bytes:
    """Returns the prefix that the tokens of all jobs of one claim have in common. `number`: the lease's number.
    `names_org`: in the tokens, the org follows the job."""
    return _PREFIX.pack(ORG_TOKEN_VERSION if names_org else TOKEN_VERSION, shard_tag(shard), number)


def token(prefix: bytes, job: JobId, org: OrgId | None = None) -> bytes:
    """Returns the lease token of one job of a claim. Give `org` if, and only if, the prefix says that an org
    follows."""
    return prefix + bytes.fromhex(to_hex(job)) + (b"" if org is None else org.encode())


def lease_of(job: str, number: int) -> Lease:
    """Returns the lease with this number on the job with this id."""
    return Lease(job_hex=to_hex(job), number=number)


def parse_token(data: bytes) -> tuple[int, Lease]:
    """Returns the shard's tag and the lease. Raises MalformedLease."""
    if len(data) != TOKEN_BYTES and org_of_token(data) is None:
        raise MalformedLease(f"is no lease token, which has {TOKEN_BYTES} bytes, not {len(data)}: {_ADVICE}")
    if len(data) == TOKEN_BYTES and data[0] != TOKEN_VERSION:
        raise MalformedLease(f"is no lease token of version {TOKEN_VERSION}, but begins with {data[0]}: {_ADVICE}")
    _, tag, number = _PREFIX.unpack_from(data)
    return tag, Lease(job_hex=data[_PREFIX.size : TOKEN_BYTES].hex(), number=number)


def org_of_token(data: bytes) -> OrgId | None:
    """Returns the org that a token names, or None if the bytes name no org or are not a token."""
    if not TOKEN_BYTES < len(data) <= TOKEN_BYTES + _ORG_BYTES_MAX or data[0] != ORG_TOKEN_VERSION:
        return None
    try:
        return OrgId(data[TOKEN_BYTES:].decode())
    except UnicodeDecodeError:
        return None
