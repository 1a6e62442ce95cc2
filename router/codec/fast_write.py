"""Encodes answers with many jobs directly as protobuf bytes. Building a message for each job, field by field, would be
most of the router's work. The bytes are what the generated code would write; tests compare the two. Pure.

An embedded message is its tag, its length and its bytes; fields may be in any order
(https://protobuf.dev/programming-guides/encoding).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

from router.codec import convert
from shard.job_id import to_hex
from shard.lease_token import TOKEN_BYTES, lease_of, token_prefix
from shard.queue.pending_enqueue import Handed, Taker
from shard.queue.store import Store
from shard.vocabulary import (
    JOB_CONTENT,
    PRIORITY_DEFAULT,
    SPARSE_COLUMNS,
    Claimed,
    JobId,
    Lease,
    Micros,
    NewJobs,
    OrgId,
)


def _varint(number: int) -> bytes:
    written = bytearray()
    while number > 0x7F:
        written.append(number & 0x7F | 0x80)
        number >>= 7
    written.append(number)
    return bytes(written)


_VARINTS = [_varint(number) for number in range(1 << 14)]
_ID_CHARS = 36
# Tags of LeasedJob.lease, .id, .payload and .group, and of a LeasedJob as field 1 of an answer.
_LEASE = b"\x0a" + _varint(TOKEN_BYTES)
_ID = b"\x12" + _varint(_ID_CHARS)
_PAYLOAD = b"\x2a"
_GROUP = b"\x8a\x01"
_JOB = b"\x0a"
_FIXED_BYTES = len(_ID) + _ID_CHARS + len(_PAYLOAD)
# Start of an EnqueueResponse.results entry that has only an id. By chance, these tags and lengths are ASCII characters.
_RESULT = f"\x0a{chr(_ID_CHARS + 2)}\x0a{chr(_ID_CHARS)}"
# Fields of Claimed that convert.leased_job does not read. All other fields are shared fields: jobs that have the same
# values in these fields share one encoding of them. A new field of Claimed is a shared field unless it is added here.
NOT_SHARED = frozenset(
    {"id", "payload", "group_key", "lease", "leased_at", "deadline", "expired", "expired_lease", "expired_worker"}
)
_shared_fields = attrgetter(*(field for field in Claimed._fields if field not in NOT_SHARED))
# The sparse columns of NewJobs that fill shared fields of Claimed, by the names of these fields.
_SPARSE_CONTENT = {
    column: array
    for column, array in JOB_CONTENT.items()
    if column in Claimed._fields and column not in NOT_SHARED and array in SPARSE_COLUMNS
}


class Delivery(NamedTuple):
    """Jobs with one lease number, on their way to one consumer."""

    store: Store
    number: int
    deadline: Micros
    ids: Sequence[str]
    # The jobs, each encoded as field 1 of an answer (DequeueResponse.jobs, ConsumeResponse.jobs).
    jobs: list[bytes]
    # The org of the jobs. Only consumers of all orgs need it.
    org: OrgId = OrgId("")
    # Called with the number of jobs that are released because they were not sent. None: nobody needs to know.
    on_unsent: Callable[[int], None] | None = None

    @property
    def bytes(self) -> int:
        """The size of the encoded jobs. The jobs hold this many bytes of the buffer until they have been sent."""
        return sum(map(len, self.jobs))

    def leases(self) -> list[Lease]:
        return [lease_of(job_id, self.number) for job_id in self.ids]

    def split(self, count: int) -> tuple[Delivery, Delivery]:
        """Returns the first `count` jobs, and the remaining ones."""
        return (
            self._replace(ids=self.ids[:count], jobs=self.jobs[:count]),
            self._replace(ids=self.ids[count:], jobs=self.jobs[count:]),
        )


def claimed(store: Store, org: OrgId, jobs: Sequence[Claimed], *, names_org: bool = False) -> Delivery:
    """Encodes the jobs of one claim, which are of one org; there must be at least one. `names_org`: their leases name
    the org, for a consumer of all orgs."""
    # Leases of jobs with a max_runtime may end before this deadline.
    number, deadline = jobs[0].lease, max([job.deadline for job in jobs])
    lease = _Lease.of(store, number, org if names_org else None)
    encodings: dict[tuple[object, ...], bytes] = {}
    written: list[bytes] = []
    for job in jobs:
        key = _shared_fields(job)
        shared = encodings.get(key)
        if shared is None:
            shared = encodings[key] = convert.leased_job(job, org).SerializeToString()
        written.append(_job(lease, job.id, job.payload, job.group_key, shared))
    return Delivery(store, number, deadline, [job.id for job in jobs], written, org)


def handed(
    store: Store, jobs: NewJobs, positions: Iterable[int], taker: Taker, outcome: Handed, *, names_org: bool = False
) -> Delivery:
    """Encodes the new jobs at these positions, which were leased to `taker` in the same insert. `names_org`: as for
    `claimed`."""
    lease = _Lease.of(store, taker.number, jobs.org if names_org else None)
    now = outcome.leased_at
    deadline = Micros(now + taker.window_us)
    # The columns that these jobs use, by the names of the fields of Claimed. Most batches use none.
    used: dict[str, dict[int, Any]] = {
        field: column for field, array in _SPARSE_CONTENT.items() if (column := getattr(jobs, array))
    }
    encodings: dict[tuple[object, ...], bytes] = {}
    written: list[bytes] = []
    ids: list[str] = []
    for at in positions:
        queue = jobs.queues[at]
        values = [column.get(at) for column in used.values()]
        key = (queue, jobs.kinds[at], jobs.priorities.get(at), jobs.max_attempts.get(at), *values)
        shared = encodings.get(key)
        if shared is None:
            job = Claimed(
                id=JobId(""),
                queue=queue,
                kind=jobs.kinds[at],
                payload=b"",
                priority=jobs.priorities.get(at, PRIORITY_DEFAULT),
                attempt=1,
                max_attempts=jobs.max_attempts.get(at) or outcome.max_attempts.get((jobs.org, queue)),
                enqueued_at=now,
                run_at=now,
                lease=taker.number,
                leased_at=now,
                deadline=deadline,
                expired=False,
                **dict(zip(used, values, strict=True)),
            )
            shared = encodings[key] = convert.leased_job(job, jobs.org).SerializeToString()
        ids.append(jobs.ids[at])
        written.append(_job(lease, jobs.ids[at], jobs.payloads[at], jobs.groups.get(at), shared))
    return Delivery(store, taker.number, deadline, ids, written, jobs.org)


def stored(ids: Sequence[str]) -> bytes:
    """Encodes the EnqueueResponse for jobs that are all newly stored."""
    return (_RESULT + _RESULT.join(ids)).encode()


class _Lease(NamedTuple):
    """The parts of the field LeasedJob.lease that all jobs of one claim share: the bytes before the job's id, and the
    bytes after it."""

    before: bytes
    after: bytes
    # The size of the whole field, with its tag and its length.
    size: int

    @classmethod
    def of(cls, store: Store, number: int, org: OrgId | None) -> _Lease:
        prefix = token_prefix(store.name, number, names_org=org is not None)
        after = b"" if org is None else org.encode()
        tag = _LEASE if org is None else b"\x0a" + _length(TOKEN_BYTES + len(after))
        return cls(tag + prefix, after, len(tag) + TOKEN_BYTES + len(after))


def _job(lease: _Lease, job_id: str, payload: bytes, group: str | None, shared: bytes) -> bytes:
    if group is not None:
        encoded = group.encode()
        shared = b"".join((_GROUP, _length(len(encoded)), encoded, shared))
    length = _length(len(payload))
    size = lease.size + _FIXED_BYTES + len(length) + len(payload) + len(shared)
    return b"".join(
        (
            _JOB,
            _length(size),
            lease.before,
            bytes.fromhex(to_hex(job_id)),
            lease.after,
            _ID,
            job_id.encode(),
            _PAYLOAD,
            length,
            payload,
            shared,
        )
    )


def _length(number: int) -> bytes:
    return _VARINTS[number] if number < len(_VARINTS) else _varint(number)
