"""How far claims have come in each lane, so that they need not walk past what they claimed before.

A lane is one priority of one queue. At the front of its stretch of the ready index lie the dead versions of
claimed jobs; while any transaction holds an old snapshot, nobody may remove them, and every claim would read them
all again. So a claim begins at the lane's floor. The floor is a hint (I7): it may be too high only for what
committed late, and the sweep, which looks below it, lowers it again within seconds. Jobs that come
from another shard may be older than any here. Pure: no I/O, and no clock but the shard's own times.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from shard.vocabulary import PRIORITIES, Claimed, Micros, QueueId

# How long an enqueue may take from its now() to its commit before only the sweep finds its jobs.
GUARD_US = 1_000_000
# How long it may take, and be found by every sweep. What commits later is found by those from the beginning of time.
_LATE_US = 10_000_000
# A queue that nobody has dequeued from for this long is forgotten, and begins at zero when somebody does again.
_FORGET_AFTER_S = 60.0
_QUEUES_MAX = 100_000


@dataclass(slots=True)
class _Queue:
    # By priority − 1; 0 is the beginning of time.
    floors: list[Micros] = field(default_factory=lambda: [Micros(0)] * len(PRIORITIES))
    used_s: float = 0.0
    # By the count of arrivals, when jobs last arrived here.
    arrived: int = 0


class Floors:
    """The floors of the queues that one router dequeues from on one shard."""

    def __init__(self) -> None:
        self._queues: dict[QueueId, _Queue] = {}
        # How often jobs have arrived from elsewhere: a claim that began before says nothing of what came with them.
        self.arrivals = 0

    def of(self, queue: QueueId) -> list[Micros]:
        """The queue's floors, by priority. It is in use from now on."""
        return self._held(queue, time.monotonic()).floors

    def late(self, queue: QueueId) -> list[Micros]:
        """From where to look for what has committed late. That is no use of the queue."""
        held = self._queues.get(queue)
        floors = [Micros(0)] * len(PRIORITIES) if held is None else held.floors
        return [Micros(max(0, floor - _LATE_US)) for floor in floors]

    def claimed(self, jobs: Iterable[tuple[QueueId, Claimed]], *, arrivals: int) -> None:
        """After a claim: it took each lane's first jobs, so nothing unclaimed is left before the last of them, unless
        it has arrived since the claim began, when there had been so many `arrivals`."""
        for queue_id, job in jobs:
            queue = self._queues.get(queue_id)
            if queue is not None and queue.arrived <= arrivals:
                reached = Micros(min(job.run_at, job.leased_at - GUARD_US))
                at = job.priority - 1
                if reached > queue.floors[at]:
                    queue.floors[at] = reached

    def arrived(self, queues: Iterable[QueueId]) -> None:
        """Jobs have come from another shard, whatever their age."""
        self.arrivals += 1
        for queue_id in queues:
            queue = self._queues.get(queue_id)
            if queue is not None:
                queue.arrived = self.arrivals
                queue.floors = [Micros(0)] * len(PRIORITIES)

    def to_sweep(self) -> list[QueueId]:
        """The queues in use, after forgetting those that are not."""
        now_s = time.monotonic()
        for queue_id in [q for q, held in self._queues.items() if now_s - held.used_s > _FORGET_AFTER_S]:
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
        """What the sweep found: a lane's floor is the place of its first live row, but never less than a guard behind
        now(). `arrivals`: as for `claimed`."""
        for queue_id in queues:
            queue = self._queues.get(queue_id)
            if queue is not None and queue.arrived <= arrivals:
                queue.floors = [min(guarded, first.get((queue_id, priority), guarded)) for priority in PRIORITIES]

    def _held(self, queue_id: QueueId, now_s: float) -> _Queue:
        queue = self._queues.get(queue_id)
        if queue is None:
            if len(self._queues) >= _QUEUES_MAX:
                del self._queues[next(iter(self._queues))]
            queue = self._queues[queue_id] = _Queue()
        queue.used_s = now_s
        return queue
