"""A job as the books have it: what lookups and lists answer. Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import NamedTuple

from shard.vocabulary import JobId, Micros, Outcome, QueueName

# An answer ends with the job that fills so much. With the largest job added (payload 1 MiB, result 64 KiB, attributes
# 36 KiB, 50 errors of 8 KiB) it stays below 4 MiB, which is the most that gRPC clients take unless told otherwise.
ANSWER_BYTES_MAX = 2 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One ended lease."""

    attempt: int
    worker: str
    leased_at: Micros
    ended_at: Micros
    outcome: Outcome
    error: str = ""


class JobRecord(NamedTuple):
    """In the order of the columns of get_jobs.sql and the list_*.sql."""

    id: JobId
    queue: QueueName
    kind: str
    state: str
    payload: bytes | None
    attributes: str | None
    priority: int
    enqueued_at: Micros
    run_at: Micros
    expires_at: Micros | None
    attempt: int
    max_attempts: int | None
    retry: str | None
    dedup_key: str | None
    deadline: Micros | None
    worker: str | None
    leased_at: Micros | None
    finished_at: Micros | None
    result: bytes | None
    reason: str | None
    history: str | None
    # An answer that was full has no room for payload, attributes, result, reason and history.
    whole: bool = True

    def attempts(self) -> list[Attempt]:
        """Ended attempts, oldest first. The latest may stand in the row alone: an ack writes no history, and an
        expired lease is written down by the next claim."""
        ended = [
            Attempt(
                attempt=entry["attempt"],
                worker=entry.get("worker", ""),
                leased_at=entry["leased_at_us"],
                ended_at=entry["ended_at_us"],
                outcome=Outcome(entry["outcome"]),
                error=entry.get("error", ""),
            )
            for entry in json.loads(self.history or "[]")
        ]
        if self.leased_at is not None:
            if self.state == "succeeded" and self.finished_at is not None:
                ended.append(self._latest(self.leased_at, self.finished_at, Outcome.ACKED))
            elif self.state == "ready" and self.deadline is not None:
                ended.append(self._latest(self.leased_at, self.deadline, Outcome.EXPIRED))
        return ended

    def _latest(self, leased_at: Micros, ended_at: Micros, outcome: Outcome) -> Attempt:
        return Attempt(
            attempt=self.attempt, worker=self.worker or "", leased_at=leased_at, ended_at=ended_at, outcome=outcome
        )
