"""Remembers the time that claims have reached in each lane, so that claims need not read the index entries of claimed
jobs again.

A lane is one priority of one queue. In the ready index, a lane begins with the entries of dead row versions of claimed
jobs. While any transaction holds an old snapshot, vacuum cannot remove these entries, and every claim would read all of
them again. Therefore a claim begins at the lane's floor, a point in time. The floor is a hint (invariant I7), and can
be too high only for jobs that committed late. The sweep looks below the floor and lowers it within seconds. Jobs that
arrive from another shard may be older than all jobs of this shard, so they set the floor back to zero. A claim that
locked more rows than it leased sets the floor back to the time at which that claim began to search. Pure: no I/O. Times
of jobs are compared only with times of the shard's clock.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from shard.bounded import make_room
from shard.vocabulary import PRIORITIES, Claimed, Micros, QueueId

# Claims find the jobs of an enqueue whose transaction takes at most this long, from its now() to its commit. If the
# enqueue takes longer, only the sweep finds its jobs.
GUARD_US = 1_000_000
# Every sweep finds the jobs of an enqueue that takes at most this long. If the enqueue takes longer, only a full sweep
# (from the beginning of time) finds its jobs.
_LATE_US = 10_000_000
# A queue is forgotten if no claim or probe has used its floors for this long. The next claim then begins at zero.
_FORGET_AFTER_S = 60.0
_QUEUES_MAX = 100_000
# If more queues than this are remembered, a queue that a claim has emptied is forgotten at once, because each sweep
# looks into all remembered queues.
_EMPTIED_KEPT_MAX = 2_000


@dataclass(slots=True)
class _Queue:
    # Indexed by priority − 1. A floor of 0 is the beginning of time.
    floors: list[Micros] = field(default_factory=lambda: [Micros(0)] * len(PRIORITIES))
    used_s: float = 0.0
    # The value of Floors.arrivals when jobs last arrived or were missed in this queue.
    arrived: int = 0


class Floors:
    """The floors that one router remembers for one shard: the floors of the queues from which it claims."""

    def __init__(self) -> None:
        self._queues: dict[QueueId, _Queue] = {}
        # How many times jobs have arrived from another shard, or were missed. A claim or sweep that began before such
        # an event has not seen the jobs of this event.
        self.arrivals = 0

    def of(self, queue_id: QueueId) -> list[Micros]:
        """Returns the queue's floors, by priority, and counts this as a use of the queue."""
        queue = self._queues.get(queue_id)
        if queue is None:
            make_room(self._queues, _QUEUES_MAX)
            queue = self._queues[queue_id] = _Queue()
        queue.used_s = time.monotonic()
        return queue.floors

    def late(self, queue_id: QueueId) -> list[Micros]:
        """Returns the times from which to look for jobs that committed late, by priority. This does not count as a use
        of the queue."""
        queue = self._queues.get(queue_id)
        floors = [Micros(0)] * len(PRIORITIES) if queue is None else queue.floors
        return [Micros(max(0, floor - _LATE_US)) for floor in floors]

    def claimed(self, jobs: Iterable[tuple[QueueId, Claimed]], *, arrivals: int) -> None:
        """Raises the floors after a claim. A claim takes the first jobs of each lane. So there is no unclaimed job
        before the last claimed job, unless it arrived after the claim began. `arrivals`: the value of `Floors.arrivals`
        when the claim began."""
        for queue_id, job in jobs:
            queue = self._queues.get(queue_id)
            if queue is not None and queue.arrived <= arrivals:
                reached = Micros(min(job.run_at, job.leased_at - GUARD_US))
                at = job.priority - 1
                if reached > queue.floors[at]:
                    queue.floors[at] = reached

    def arrived(self, queues: Iterable[QueueId]) -> None:
        """Sets the floors of these queues to zero, because jobs of any age have arrived from another shard."""
        self.arrivals += 1
        for queue_id in queues:
            queue = self._queues.get(queue_id)
            if queue is not None:
                queue.arrived = self.arrivals
                queue.floors = [Micros(0)] * len(PRIORITIES)

    def missed(self, before: Mapping[QueueId, Sequence[Micros]]) -> None:
        """Lowers floors after a claim that locked rows and did not lease them: claims that ran at the same time have
        skipped these rows. `before`: the floors at which that claim began. A floor that is higher now is set back to
        the floor in `before`."""
        self.arrivals += 1
        for queue_id, floors in before.items():
            queue = self._queues.get(queue_id)
            if queue is not None:
                # Other claims, which have not ended, may have skipped these rows too. `arrived` prevents those claims
                # from raising the lowered floors.
                queue.arrived = self.arrivals
                queue.floors = [min(pair) for pair in zip(queue.floors, floors, strict=True)]

    def emptied(self, queues: Iterable[QueueId]) -> None:
        """Forgets these queues if many queues are remembered. Call this when a claim for consumers of all orgs has
        probably taken the last jobs of these queues. There may be a hundred thousand such queues, and most of them get
        no job soon."""
        if len(self._queues) > _EMPTIED_KEPT_MAX:
            for queue_id in queues:
                self._queues.pop(queue_id, None)

    def to_sweep(self) -> list[QueueId]:
        """Forgets the queues that are no longer in use, and returns the others."""
        now_s = time.monotonic()
        for queue_id in [key for key, queue in self._queues.items() if now_s - queue.used_s > _FORGET_AFTER_S]:
            del self._queues[queue_id]
        return list(self._queues)

    def swept(
        self,
        queues: Iterable[QueueId],
        guarded: Micros,
        first: Mapping[tuple[QueueId, int], Micros],
        *,
        arrivals: int,
    ) -> None:
        """Sets the floors after a sweep. A lane's floor is the time of its first live row, but at most `guarded` (now()
        minus the guard). `arrivals`: the value of `Floors.arrivals` when the sweep began."""
        for queue_id in queues:
            queue = self._queues.get(queue_id)
            if queue is not None and queue.arrived <= arrivals:
                queue.floors = [min(guarded, first.get((queue_id, priority), guarded)) for priority in PRIORITIES]
