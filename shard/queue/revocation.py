"""Leases that ended without their consumer, as a hint for that consumer (I7). Pure.

A router that cancels a leased job, or leases a job again after its lease expired, learns which lease has ended. The
routers tell each other by notifications (shard/queue/doorbell.py), and each tells its own consumers.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from shard.vocabulary import Answer, Lease, OrgId

# A notification must be shorter than 8,000 bytes. A lease takes up to 57 of them, and each of the names, of 128 bytes,
# up to 768.
_LEASES_MAX = 100


class Revocation(NamedTuple):
    """Leases of one consumer. `answer` is what an extend would be answered: CANCELLED, or STALE after an expiry."""

    org: OrgId
    worker: str
    answer: Answer
    leases: Sequence[Lease]

    def texts(self) -> Iterator[str]:
        """Yields the payloads of notifications."""
        for start in range(0, len(self.leases), _LEASES_MAX):
            leases = self.leases[start : start + _LEASES_MAX]
            yield json.dumps([self.org, self.worker, self.answer.value, leases], separators=(",", ":"))

    @classmethod
    def by_worker(cls, org: OrgId, answer: Answer, ended: Iterable[tuple[str, Lease]]) -> list[Revocation]:
        """Returns one for each worker of `ended`, which has workers with their leases."""
        leases: dict[str, list[Lease]] = {}
        for worker, lease in ended:
            leases.setdefault(worker, []).append(lease)
        return [cls(org, worker, answer, of_worker) for worker, of_worker in leases.items()]

    @classmethod
    def from_text(cls, text: str) -> Revocation:
        """Raises ValueError."""
        try:
            org, worker, answer, leases = json.loads(text)
            return cls(OrgId(org), worker, Answer(answer), [Lease(job_hex, int(number)) for job_hex, number in leases])
        except TypeError as error:
            raise ValueError(str(error)) from error
