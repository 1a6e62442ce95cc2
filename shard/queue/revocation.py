"""Leases that ended although their consumer did not end them. A revocation is a hint for that consumer (invariant I7).
Pure.

A router that cancels a leased job, or leases a job again after its lease expired, learns which lease has ended. The
routers tell each other by notifications (shard/queue/doorbell.py), and each router tells its own consumers.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from shard.vocabulary import Answer, Lease, OrgId

# A notification must be shorter than 8,000 bytes, and its sender's name comes before the text.
_TEXT_BYTES_MAX = 7_900
# Upper bound for the leases in one part of a notification. A lease takes up to 58 bytes. The names of the org and of
# the worker have up to 128 bytes each, which take up to 768 bytes each as JSON.
_LEASES_MAX = 100


class Revocation(NamedTuple):
    """Leases of one consumer. `answer` is the answer that an extend would get: CANCELLED, or STALE after an expiry."""

    org: OrgId
    worker: str
    answer: Answer
    leases: Sequence[Lease]

    @classmethod
    def by_worker(cls, org: OrgId, answer: Answer, ended: Iterable[tuple[str, Lease]]) -> list[Revocation]:
        """Returns one revocation for each worker of `ended`, which has pairs of a worker and a lease. Leaves out leases
        of consumers without a name, because the revocation would reach all consumers of the org that have no name."""
        leases: dict[str, list[Lease]] = {}
        for worker, lease in ended:
            if worker:
                leases.setdefault(worker, []).append(lease)
        return [cls(org, worker, answer, of_worker) for worker, of_worker in leases.items()]


def texts(revocations: Iterable[Revocation]) -> Iterator[str]:
    """Yields the payloads of as few notifications as needed."""
    waiting: list[str] = []
    size = 2
    for written in _parts(revocations):
        if waiting and size + len(written) > _TEXT_BYTES_MAX:
            yield f"[{','.join(waiting)}]"
            waiting, size = [], 2
        waiting.append(written)
        size += len(written) + 1
    if waiting:
        yield f"[{','.join(waiting)}]"


def from_text(text: str) -> list[Revocation]:
    """Returns the revocations in the payload of a notification. Raises ValueError."""
    match json.loads(text):
        case [*parts]:
            return [_read(part) for part in parts]
        case _:
            raise ValueError(f"is no list of revocations: {text:.100}")


def _parts(revocations: Iterable[Revocation]) -> Iterator[str]:
    for org, worker, answer, leases in revocations:
        for start in range(0, len(leases), _LEASES_MAX):
            part = [org, worker, answer.value, leases[start : start + _LEASES_MAX]]
            yield json.dumps(part, separators=(",", ":"))


def _read(part: Any) -> Revocation:
    match part:
        case [str(org), str(worker), str(answer), [*leases]]:
            return Revocation(OrgId(org), worker, Answer(answer), [_read_lease(lease) for lease in leases])
        case _:
            raise ValueError(f"is no revocation: {part!r:.100}")


def _read_lease(lease: Any) -> Lease:
    match lease:
        case [str(job_hex), int(number)] if len(job_hex) == 32 and -(2**63) <= number < 2**63:
            # Raises ValueError if these are not hexadecimal digits.
            int(job_hex, 16)
            return Lease(job_hex, number)
        case _:
            raise ValueError(f"is no lease: {lease!r:.100}")
