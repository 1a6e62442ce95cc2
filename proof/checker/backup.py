"""Finds which violations a restored backup explains. Pure.

The run keeps the replaced database and the backup. What the backup lacks is found by a comparison of the two databases,
job by job, and not from times. Only what the backup lacks is excused. A job that the backup has must also exist at the
end of the test run. If the replaced database lacks an ack that was answered OK, the ack was lost before the
replacement, which is a violation. Everything that was done after the replacement must be in the databases at the end.

Times are used only to separate what happened before the database was replaced from what happened afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from proof.checker.evidence import Evidence, Key, Row, State, Version
from proof.history import Answer, Call, Cancel, Delivery, Enqueue, Settle, Verb

_BOOKED = {Verb.NACK: "nacked", Verb.KILL: "nacked", Verb.RELEASE: "released"}
_PAST_MAX = 50
_NOTHING = Version(rows=(), keys=frozenset(), owned=())


class Backup:
    """The restored backup of a test run, if there is one. If there is none, no violation is explained."""

    def __init__(self, evidence: Evidence) -> None:
        restored = evidence.restored
        self.shard = "" if restored is None else restored.shard
        self.swapped_s = float("inf") if restored is None else restored.swapped_s
        self._accepting_s = float("inf") if restored is None else restored.accepting_s
        backup = _NOTHING if restored is None else restored.backup
        replaced = _NOTHING if restored is None else restored.replaced
        self._kept, self._replaced = _by_job(backup), _by_job(replaced)
        # Jobs that were on the shard, and were not departing, when the database was replaced.
        self._stayed = {row.job for row in replaced.rows if not row.departing}
        self._to_cancel = {one.job for one in evidence.history.cancels}
        self._keys = replaced.keys | backup.keys
        self._lost_keys = replaced.keys - backup.keys
        # `lost_…`: schedules and workflows that came to the shard after the backup was made. `second_…`: schedules and
        # workflows that left the shard after the backup was made, so that each of them exists twice now.
        self.lost_schedules = set(replaced.schedules) - set(backup.schedules)
        self.second_schedules = set(backup.schedules) - set(replaced.schedules)
        self.lost_flows = replaced.flows - backup.flows
        self.second_flows = backup.flows - replaced.flows

    # ── Jobs ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def lacks(self, job: str) -> bool:
        """Returns whether the shard had this job when its database was replaced, but the backup has no trace of it."""
        return job in self._replaced and job not in self._kept

    def rewinds(self, job: str) -> bool:
        """Returns whether the backup has an older state of this job, or lacks the job. Also true if the job was leased
        in both databases, because the lease may have been extended after the backup was made."""
        row, kept = self._replaced.get(job), self._kept.get(job)
        return row is not None and (row != kept or (row.state is State.LIVE and row.lease is not None))

    def revives(self, job: str) -> bool:
        """Returns whether the job had left the shard after the backup was made, so that the restore brought a copy of
        the job back."""
        kept = self._kept.get(job)
        return kept is not None and kept.state in {State.LIVE, State.DEAD} and job not in self._stayed

    @property
    def lost_rows(self) -> list[Row]:
        """The rows of the replaced database that differ from those in the backup, or that the backup lacks."""
        return [row for job, row in self._replaced.items() if row != self._kept.get(job)]

    def is_second(self, row: Row) -> bool:
        """Returns whether this row is a second copy of a job that lives on another shard. The backup brought the copy
        back, and the copy was cancelled because a client asked to cancel the job."""
        ended = row.shard == self.shard and row.state is State.CANCELLED
        return ended and row.job in self._to_cancel and self.revives(row.job)

    def lacks_key(self, key: Key) -> bool:
        return key in self._lost_keys

    def promises(self, enqueue: Enqueue) -> bool:
        """Returns whether the job in this answer must exist. The job may be missing in three cases. The call began
        before the database was replaced, so the backup may lack the job. Or another shard gave the answer because it
        knew the dedup key, and the job of this key had moved to the restored shard and is lost. Or another shard gave
        the answer because a workflow had left the restored shard, but the finished job of an added node had stayed
        there and is lost."""
        elsewhere = (
            enqueue.duplicate
            and bool(enqueue.key)
            and Key(enqueue.call.org, enqueue.queue, enqueue.key, enqueue.answered or "") not in self._keys
        )
        elsewhere |= enqueue.duplicate and enqueue.call.verb is Verb.ADD
        return self.came_after(enqueue.call) and not elsewhere

    # ── What was done to jobs ────────────────────────────────────────────────────────────────────────────────────────

    def forgot(self, settle: Settle) -> bool:
        """Returns whether the replaced database has this settle in its history, but the backup does not."""
        row, kept = self._replaced.get(settle.lease.job), self._kept.get(settle.lease.job)
        return (
            not self.came_after(settle.call)
            and row is not None
            and books_have(row, settle)
            and not (kept is not None and books_have(kept, settle))
        )

    def forgot_cancel(self, cancel: Cancel) -> bool:
        row, kept = self._replaced.get(cancel.job), self._kept.get(cancel.job)
        return (
            not self.came_after(cancel.call)
            and row is not None
            and row.state is State.CANCELLED
            and not (kept is not None and kept.state is State.CANCELLED)
        )

    def was_given_before(self, delivery: Delivery) -> bool:
        """Returns whether the lease was given before the backup was restored. True for all leases of a job that the
        restore did not change. The checker needs to know this because attempts after the restore are counted from the
        state in the backup."""
        row = self._replaced.get(delivery.lease.job)
        if row is None or not self.rewinds(delivery.lease.job) or delivery.received_s < self.swapped_s:
            return True
        return delivery.lease.number in {row.lease, *(past.lease for past in row.past)}

    # ── Times ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def came_after(self, call: Call) -> bool:
        """Returns whether the call began when the replaced database could not be reached any more."""
        return call.began_s >= self.swapped_s

    def was_answered_before(self, call: Call) -> bool:
        return call.ended_s is not None and call.ended_s < self.swapped_s

    def may_be_unknown(self, job: str, call: Call) -> bool:
        """Returns whether the call may be answered NOT_FOUND: the backup lacks the job, and the call ended after
        somebody had begun to accept the loss. Until then routers must refuse the shard."""
        return self.lacks(job) and call.ended_s is not None and call.ended_s >= self._accepting_s

    def ends_by(self, job: str, began_s: float) -> float:
        """Returns the time at which a lease of this job ended because the database was replaced. `began_s`: the time at
        which the call that got the lease began. Infinity: the replacement did not end the lease."""
        return self.swapped_s if began_s < self.swapped_s and self.rewinds(job) else float("inf")


def books_have(row: Row, settle: Settle) -> bool:
    """Returns whether a job's row agrees with a settle that was answered OK. Also true if the row cannot show this
    settle."""
    verb, number = settle.call.verb, settle.lease.number
    if verb is Verb.EXTEND:
        return True
    if verb is Verb.ACK:
        return row.state is State.SUCCEEDED and row.lease == number
    if len(row.past) >= _PAST_MAX:
        return True
    return any(past.lease == number and past.outcome == _BOOKED[verb] for past in row.past)


def answered_ok(settle: Settle) -> bool:
    return settle.answer is Answer.OK and settle.call.verb is not Verb.EXTEND


def _by_job(version: Version) -> dict[str, Row]:
    return latest_by_job(version.rows, lambda row: row.departing)


def latest_by_job(rows: Iterable[Row], is_old: Callable[[Row], bool]) -> dict[str, Row]:
    """Returns one row for each job: an old row only if the job has no other row. For example, the row of a departing
    job is old, because the job may have changed on the other shard since it arrived there."""
    return {row.job: row for row in sorted(rows, key=lambda row: not is_old(row))}
