"""Enqueue calls that have not been answered yet, and the hand-over of their jobs to waiting consumers. No I/O."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shard.queue.queue_ids import Name
from shard.vocabulary import JobId, Micros, NewJobs, OrgId, QueueName


class Taker(NamedTuple):
    """A consumer that waits for a job, and the lease that it would get."""

    number: int
    worker: str
    window_us: int


class Handed(NamedTuple):
    """The result of a hand-over."""

    # The positions of the jobs that are now leased to their takers. For the other jobs see Handover.
    positions: list[int]
    # The positions of the jobs that were not leased, because they wait for slots of their groups.
    waiting: Collection[int]
    leased_at: Micros
    # The max_attempts setting of each queue. None: the default.
    max_attempts: Mapping[tuple[OrgId, QueueName], int | None]
    # True if it is certain that none of the other jobs was leased to its taker.
    sure: bool = False


@dataclass(slots=True, kw_only=True)
class Handover:
    """Leases jobs to waiting consumers while the jobs are enqueued. `takers` maps positions of jobs that are due at
    once to their takers. `done` is called exactly once with the result, even if the caller was cancelled.

    A job that is in neither `Handed.positions` nor `Handed.waiting` was not leased, unless the shard's answer was lost.
    The caller does not know whether the answer was lost. So it releases the job's lease, unless the result is
    `sure`."""

    takers: Mapping[int, Taker]
    done: Callable[[Handed], None]
    # An insert that begins after this time (by time.monotonic) leases nothing to the takers.
    until_s: float = math.inf
    _is_done: bool = False
    # True if each job of `takers` was handed over, or waits for a slot of its group. Then nobody need wake a consumer
    # for these jobs.
    is_complete: bool = False

    def tell(self, handed: Handed) -> None:
        """Calls `done`, unless it was called before."""
        if not self._is_done:
            self._is_done = True
            self.is_complete = len(handed.positions) + len(handed.waiting) == len(self.takers)
            self.done(handed)


class Call(NamedTuple):
    jobs: NewJobs
    handover: Handover | None
    # The epoch of the placement that named this shard to the caller.
    epoch: int


class Inserted(NamedTuple):
    """The result of one run of the enqueue statement."""

    # The jobs that were stored. None: all of them.
    stored: set[tuple[OrgId, str]] | None
    now: Micros
    # The queues that give jobs.
    giving: set[Name]
    # The max_attempts setting of each queue. None: the default.
    max_attempts: dict[Name, int | None]
    # The slot of each job in its group, by its position in the statement. None: no job has a group.
    group_slots: Sequence[int | None] | None


class PendingEnqueue:
    """A call that has not been answered yet, and what is known of its jobs."""

    __slots__ = ("call", "duplicates", "error", "known", "remaining")

    def __init__(self, call: Call) -> None:
        # The call. Its `handover` is set to None as soon as the hand-over is done.
        self.call = call
        # The positions of its jobs that are neither stored nor known yet.
        self.remaining: Sequence[int] = range(len(call.jobs.ids))
        self.known: dict[int, JobId] = {}
        self.error: Exception | None = None
        # Positions whose id occurs earlier in this call, each with the first position of that id. An id stands for one
        # job. So only the first position is sent to the shard, and the later positions get the same answer.
        self.duplicates: dict[int, int] = {}
        ids = call.jobs.ids
        if len(set(ids)) < len(ids):
            first: dict[str, int] = {}
            for at, job_id in enumerate(ids):
                if first.setdefault(job_id, at) != at:
                    self.duplicates[at] = first[job_id]
            self.remaining = list(first.values())
            # A call that names an id twice hands nothing over, because releasing the lease of the second position would
            # end the lease of the first position.
            self.call = call._replace(handover=None)

    @property
    def jobs(self) -> NewJobs:
        return self.call.jobs

    def end_late_handover(self, now_s: float) -> None:
        """Ends the hand-over if its takers no longer wait for the jobs. `now_s`: the time by time.monotonic."""
        handover = self.call.handover
        if handover is not None and handover.until_s < now_s:
            self.call = self.call._replace(handover=None)
            handover.tell(NOTHING_HANDED)

    def remaining_call(self) -> Call:
        """Returns a call with the remaining jobs only."""
        jobs, handover, epoch = self.call
        if len(self.remaining) == len(jobs.ids):
            return self.call
        if handover is not None:
            takers = {new: handover.takers[old] for new, old in enumerate(self.remaining) if old in handover.takers}
            handover = Handover(takers=takers, done=handover.done)
        return Call(jobs.only(self.remaining), handover, epoch)

    def answer(self) -> dict[int, JobId] | Exception:
        if self.error is not None:
            return self.error
        for at, first in self.duplicates.items():
            self.known[at] = self.known.get(first, JobId(self.call.jobs.ids[first]))
        return self.known

    def add_stored(self, inserted: Inserted, first: int) -> None:
        """Removes the stored jobs from `remaining`, and completes the hand-over. `first`: the position, in the
        statement, of this call's first remaining job."""
        jobs, handover, epoch = self.call
        if inserted.stored is None:
            stored = self.remaining
        else:
            stored = [at for at in self.remaining if (jobs.org, jobs.ids[at]) in inserted.stored]
        if handover is not None:
            self.call = Call(jobs, None, epoch)
            leased = [at for at in stored if at in handover.takers and (jobs.org, jobs.queues[at]) in inserted.giving]
            waiting: Collection[int] = ()
            if jobs.groups and inserted.group_slots is not None:
                slots = dict(zip(self.remaining, inserted.group_slots[first:], strict=False))
                slotless = {at for at in leased if at in jobs.groups and slots[at] is None}
                leased = [at for at in leased if at not in slotless]
                # If the statement did not store one of its jobs, because that job was known already, one of the jobs
                # without a slot may have got that job's slot.
                waiting = slotless if inserted.stored is None else ()
            handover.tell(Handed(leased, waiting, inserted.now, inserted.max_attempts))
        if stored is self.remaining:
            self.remaining = ()
        else:
            done = set(stored)
            self.remaining = [at for at in self.remaining if at not in done]

    def refuse(self, error: Exception) -> None:
        self.error = error
        self.remaining = ()


NOTHING_HANDED = Handed([], (), Micros(0), {}, sure=True)
RESULT_UNKNOWN = Handed([], (), Micros(0), {})
