"""The jobs that wait for a batch handler. Decides when a batch of these jobs should begin. No I/O, no clock."""

from __future__ import annotations

import asyncio
import math
from collections import deque

from windrow.leases import HeldLease


class Gathering:
    """The jobs of one handler that have not begun, the oldest first."""

    def __init__(self, *, jobs_max: int, wait_s_max: float) -> None:
        self.jobs_max = jobs_max
        self.wait_s_max = wait_s_max
        self.waiting: deque[HeldLease] = deque()
        # A task is about to take a batch.
        self.is_starting = False
        # Set while a batch waits for more jobs.
        self.timer: asyncio.TimerHandle | None = None

    def due_at(self, *, places: int) -> float | None:
        """Returns the time from which a batch should begin (monotonic seconds), or None if no batch can begin. A batch
        does not wait for more jobs if it already has `jobs_max` jobs, or a job for each of the `places`."""
        if not self.waiting or places <= 0:
            return None
        if len(self.waiting) >= min(self.jobs_max, places):
            return -math.inf
        return self.waiting[0].renewed_at + self.wait_s_max

    def take(self, *, places: int) -> list[HeldLease]:
        """Returns the jobs of the next batch."""
        return [self.waiting.popleft() for _ in range(min(len(self.waiting), self.jobs_max, places))]
