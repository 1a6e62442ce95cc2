"""A job as lookups and lists return it. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from shard.vocabulary import JOB_CONTENT, SPARSE_COLUMNS, Failure, JobId, Micros, NewJobs, OrgId, Outcome, QueueName

# An answer is full when its jobs have this many bytes: then a page ends, and a lookup by id returns the later jobs
# without their large columns. The job that fills the answer may be the largest possible job. Together with that job
# (payload 1 MiB, result and checkpoint 64 KiB each, attributes 36 KiB, 50 failures of 8 KiB, 5 stacks of 32 KiB, 6 logs
# of 12 KiB) the answer stays below 4 MiB, the default limit of gRPC clients.
ANSWER_BYTES_MAX = 2 * 1024 * 1024

# Fields that a restored job does not take from the old job: the old dedup key no longer applies, and the new job gets
# the trace of the call.
NOT_REPEATED = frozenset({"dedup_key", "live_key", "trace"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One ended lease."""

    attempt: int
    worker: str
    leased_at: Micros
    ended_at: Micros
    outcome: Outcome
    failure: Failure | None = None
    # The lines that the attempt logged.
    log: str = ""


class JobRecord(NamedTuple):
    """A job from any table of a shard. The fields have the order of the columns of get_jobs.sql and list_*.sql. The
    fields of JOB_CONTENT stand together."""

    id: JobId
    queue: QueueName
    state: str
    priority: int
    enqueued_at: Micros
    run_at: Micros
    expires_at: Micros | None
    attempt: int
    max_attempts: int | None
    payload: bytes | None
    attributes: str | None
    retry: str | None
    kind: str
    dedup_key: str | None
    live_key: str | None
    max_runtime_us: int | None
    # JSON, as in shard/schedule.py.
    scheduled_run: str | None
    # The text of a NodeOf (shard/workflow.py).
    workflow_node: str | None
    group_key: str | None
    deadline: Micros | None
    worker: str | None
    leased_at: Micros | None
    finished_at: Micros | None
    result: bytes | None
    reason: str | None
    # The ended attempts that are not in the job's columns, as JSON. If the last entry has nothing but a log, this is
    # the log of the attempt that has not ended.
    history: str | None
    progress: str | None
    checkpoint: bytes | None
    # False if the answer was full before this job: then payload, attributes, result, reason, history, progress and
    # checkpoint are missing.
    whole: bool = True

    @property
    def may_await_signal(self) -> bool:
        """Whether this is the released job of a node that waits for a signal. In SQL statements, {{awaits_signal}}
        stands for the same condition (shard/postgres/sql_loader.py)."""
        return self.workflow_node is not None and self.expires_at == self.run_at

    @property
    def awaited_signal(self) -> bool:
        """Whether this ended job belongs to a node that waited for a signal. Returns True if a signal ended the job
        without a lease, or if the job was released to wait for a signal. Returns False if the job was cancelled before
        its release, because then the record does not show for what it waited."""
        was_signalled = self.state == "succeeded" and self.leased_at is None
        return self.workflow_node is not None and (was_signalled or self.may_await_signal)

    def attempts(self) -> list[Attempt]:
        """Returns the ended attempts, oldest first. The latest attempt may not be in the history: an ack adds no entry
        for an attempt that logged nothing, and only the next claim adds an entry for an expired lease. In these two
        cases, this method makes the entry from the job's columns."""
        entries, log = self._history()
        ended = [
            Attempt(
                attempt=entry["attempt"],
                worker=entry.get("worker", ""),
                leased_at=entry["leased_at_us"],
                ended_at=entry["ended_at_us"],
                outcome=Outcome(entry["outcome"]),
                failure=Failure.from_json(entry["failure"]) if "failure" in entry else None,
                log=entry.get("log", ""),
            )
            for entry in entries
        ]
        if self.leased_at is not None:
            if self.state == "succeeded" and self.finished_at is not None:
                if not ended or ended[-1].outcome is not Outcome.ACKED:
                    ended.append(self._latest(self.leased_at, self.finished_at, Outcome.ACKED))
            elif self.state == "ready" and self.deadline is not None:
                longest = self.max_runtime_us
                timed_out = longest is not None and self.deadline >= self.leased_at + longest
                outcome = Outcome.TIMED_OUT if timed_out else Outcome.EXPIRED
                ended.append(self._latest(self.leased_at, self.deadline, outcome, log))
        return ended

    def log(self) -> str:
        """Returns the log of the attempt that has not ended, as its newest extend reported it."""
        return self._history()[1] if self.state == "leased" else ""

    def _history(self) -> tuple[list[dict[str, Any]], str]:
        """Returns the entries of ended attempts, and the log of an attempt that has not ended."""
        entries = json.loads(self.history or "[]")
        if entries and "outcome" not in entries[-1]:
            return entries[:-1], entries[-1]["log"]
        return entries, ""

    def _latest(self, leased_at: Micros, ended_at: Micros, outcome: Outcome, log: str = "") -> Attempt:
        return Attempt(
            attempt=self.attempt,
            worker=self.worker or "",
            leased_at=leased_at,
            ended_at=ended_at,
            outcome=outcome,
            log=log,
        )


def as_new(org: OrgId, records: Sequence[JobRecord], ids: Sequence[JobId]) -> NewJobs:
    """Returns new jobs with these ids and the content of the old jobs. `records`: the old jobs, read with `as_stored`.
    The new jobs are due at once. They get no dedup keys, traces or expiry times, because those of the old jobs no
    longer apply."""
    jobs = NewJobs(org=org, ids=list(ids), queues=[record.queue for record in records])
    columns = {array: name for name, array in JOB_CONTENT.items() if name not in NOT_REPEATED}
    columns |= {"priorities": "priority", "max_attempts": "max_attempts"}
    for array, name in columns.items():
        column = [getattr(record, name) for record in records]
        if array in SPARSE_COLUMNS:
            setattr(jobs, array, {at: value for at, value in enumerate(column) if value is not None})
        else:
            setattr(jobs, array, column)
    return jobs
