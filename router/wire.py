"""Answers that are written as bytes: where jobs go through this router by the thousand, making a message of each, field
by field, would be most of the work. What is written is what the generated code would have written, which tests compare.
Pure.

A message in a field is its tag, its length and its bytes; fields may stand in any order
(https://protobuf.dev/programming-guides/encoding).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from router import convert
from shard.enqueuing import Handed, Taker
from shard.lease import TOKEN_BYTES, lease_of, token_prefix
from shard.store import Store
from shard.vocabulary import MAX_ATTEMPTS_DEFAULT, PRIORITY_DEFAULT, Claimed, JobId, Lease, Micros, NewJobs


def _varint(number: int) -> bytes:
    written = bytearray()
    while number > 0x7F:
        written.append(number & 0x7F | 0x80)
        number >>= 7
    written.append(number)
    return bytes(written)


_VARINTS = [_varint(number) for number in range(1 << 14)]
_ID_CHARS = 36
# LeasedJob.lease, .id and .payload; and LeasedJob itself where it is field 1 of an answer.
_LEASE = b"\x0a" + _varint(TOKEN_BYTES)
_ID = b"\x12" + _varint(_ID_CHARS)
_PAYLOAD = b"\x2a"
_JOB = b"\x0a"
_FIXED_BYTES = len(_LEASE) + TOKEN_BYTES + len(_ID) + _ID_CHARS + len(_PAYLOAD)
# EnqueueResponse.results with an id alone. Tags and lengths happen to be ASCII.
_RESULT = f"\x0a{chr(_ID_CHARS + 2)}\x0a{chr(_ID_CHARS)}"


class Given(NamedTuple):
    """Jobs under one lease number, on their way to one consumer."""

    store: Store
    number: int
    deadline: Micros
    ids: Sequence[str]
    # Each as field 1 of an answer (DequeueResponse.jobs, ConsumeResponse.jobs).
    jobs: list[bytes]

    @property
    def bytes(self) -> int:
        """What its jobs are in an answer, and what they hold of the buffer until they have been sent."""
        return sum(map(len, self.jobs))

    def leases(self) -> list[Lease]:
        return [lease_of(job_id, self.number) for job_id in self.ids]

    def split(self, count: int) -> tuple[Given, Given]:
        """The first so many, and the rest."""
        return (
            self._replace(ids=self.ids[:count], jobs=self.jobs[:count]),
            self._replace(ids=self.ids[count:], jobs=self.jobs[count:]),
        )


def claimed(store: Store, jobs: Sequence[Claimed]) -> Given:
    """Jobs of one claim; there is at least one. Those that are alike but for id and payload share the rest."""
    number, deadline = jobs[0].lease, jobs[0].deadline
    prefix = token_prefix(store.name, number)
    alike: dict[tuple[object, ...], bytes] = {}
    written: list[bytes] = []
    for job in jobs:
        # All of Claimed that leased_job reads, but for id and payload.
        key = (*job[1:3], *job[4:11])
        rest = alike.get(key)
        if rest is None:
            rest = alike[key] = convert.leased_job(job).SerializeToString()
        written.append(_job(prefix, job.id, job.payload, rest))
    return Given(store, number, deadline, [job.id for job in jobs], written)


def handed(store: Store, jobs: NewJobs, positions: Iterable[int], taker: Taker, told: Handed) -> Given:
    """Jobs that were leased to a taker when they were stored."""
    prefix = token_prefix(store.name, taker.number)
    now = told.leased_at
    deadline = Micros(now + taker.window_us)
    alike: dict[tuple[object, ...], bytes] = {}
    written: list[bytes] = []
    ids: list[str] = []
    for at in positions:
        queue = jobs.queues[at]
        key = (queue, jobs.kinds[at], jobs.priorities.get(at), jobs.traces.get(at))
        rest = alike.get(key)
        if rest is None:
            job = Claimed(
                id=JobId(""),
                queue=queue,
                kind=jobs.kinds[at],
                payload=b"",
                attributes=None,
                priority=jobs.priorities.get(at, PRIORITY_DEFAULT),
                attempt=1,
                max_attempts=told.max_attempts.get((jobs.org, queue)) or MAX_ATTEMPTS_DEFAULT,
                enqueued_at=now,
                run_at=now,
                trace=jobs.traces.get(at),
                lease=taker.number,
                leased_at=now,
                deadline=deadline,
                expired=False,
            )
            rest = alike[key] = convert.leased_job(job).SerializeToString()
        ids.append(jobs.ids[at])
        written.append(_job(prefix, jobs.ids[at], jobs.payloads[at], rest))
    return Given(store, taker.number, deadline, ids, written)


def stored(ids: Sequence[str]) -> bytes:
    """An EnqueueResponse for jobs that were all stored just now."""
    return (_RESULT + _RESULT.join(ids)).encode()


def _job(prefix: bytes, job_id: str, payload: bytes, rest: bytes) -> bytes:
    length = _length(len(payload))
    size = _FIXED_BYTES + len(length) + len(payload) + len(rest)
    return b"".join(
        (
            _JOB,
            _length(size),
            _LEASE,
            prefix,
            bytes.fromhex(job_id.replace("-", "")),
            _ID,
            job_id.encode(),
            _PAYLOAD,
            length,
            payload,
            rest,
        )
    )


def _length(number: int) -> bytes:
    return _VARINTS[number] if number < len(_VARINTS) else _varint(number)
