"""The leases that a worker holds, and when they are extended. This module does not know what runs under a lease.

All times come from the worker's own monotonic clock. For the worker, a lease begins when the worker receives the job,
or just before the worker sends the last extend that succeeds. So the lease usually ends for the worker before it ends
at the shard, or at the same time. At most, it ends later by the time that the job travelled to the worker. So a worker
that cannot reach its router gives up a job before another worker gets the job, or at about the same moment. If two
workers run the job nevertheless, fencing rejects the older lease.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress

from windrow.errors import WindrowError
from windrow.jobs import Answer, Job, LostReason
from windrow.processes import HandlerProcess

log = logging.getLogger("windrow.worker")


def named(job: Job) -> str:
    """Returns how the log names a job."""
    return f"job {job.id} ({job.kind}, queue {job.queue})"


class HeldLease:
    """A leased job that the worker holds."""

    # Most leases have the values of these class attributes until their jobs end. An object stores a value only if it
    # differs.

    # The lease ends at this time at the latest, no matter how often it is extended.
    until = math.inf
    # An extend waits to be sent or answered.
    extending = False
    # How many lines of the job's log have been sent.
    lines_told = 0
    # The job's outcome waits to be sent or answered.
    settling = False
    # True: the job's outcome must be sent together with the lines that the handler has logged.
    logs = False
    # The lease has ended, according to the router or to the clock.
    over = False
    # Nothing is to be reported about the job any more.
    lost = False
    # The handler was given to a thread, which cannot be cancelled.
    in_thread = False
    # The thread that runs the handler, once it has begun.
    thread: int | None = None
    # The process that runs the handler.
    process: HandlerProcess | None = None
    task: asyncio.Task[None] | None = None
    # All leases whose jobs one handler runs together, including this one.
    batch: Sequence[HeldLease] | None = None

    def __init__(self, job: Job, renewed_at: float, window_s: float) -> None:
        self.job = job
        # This is a copy, because a handler may change its job.
        self.lease = job.lease
        # The time when the job was received, or when its last successful extend was sent (monotonic seconds).
        self.renewed_at = renewed_at
        # How long the lease lasts after `renewed_at`.
        self.window_s = window_s
        if job.max_runtime is not None:
            runtime_s = job.max_runtime.total_seconds()
            self.window_s = min(window_s, runtime_s)
            self.until = renewed_at + runtime_s

    @property
    def ends_at(self) -> float:
        return min(self.renewed_at + self.window_s, self.until)


class Connectivity:
    """Whether the router can be reached. Logs the start and the end of an outage once each."""

    def __init__(self, worker: str) -> None:
        self._worker = worker
        self._away_since: float | None = None

    @property
    def away_since(self) -> float | None:
        """The time at which the current outage began (monotonic seconds), or None if there is no outage."""
        return self._away_since

    def failed(self, error: WindrowError) -> None:
        if self._away_since is None:
            self._away_since = time.monotonic()
            log.warning(
                "%s: the router cannot be reached; the worker goes on trying, and handlers that run continue: %s",
                self._worker,
                error,
            )

    def answered(self) -> None:
        if self._away_since is not None:
            away_s = time.monotonic() - self._away_since
            log.info("%s: the router can be reached again, after %.1f s", self._worker, away_s)
            self._away_since = None


class Leases:
    """Holds each lease from the receipt of its job until the router has answered the job's outcome.

    Callbacks: `extend` queues extends of leases, and sets `extending` of each. `on_waited` is called with the lease of
    a job that has waited for a third of its window and has not begun. `on_lost` is called with a lease that has ended
    before its job.
    """

    def __init__(
        self,
        *,
        worker: str,
        window_s: float,
        extend: Callable[[Sequence[HeldLease]], None],
        on_waited: Callable[[HeldLease], None],
        on_lost: Callable[[HeldLease], None],
    ) -> None:
        self._worker = worker
        self._window_s = window_s
        self._extend = extend
        self._on_waited = on_waited
        self._on_lost = on_lost
        self._held: dict[HeldLease, None] = {}
        self._not_empty = asyncio.Event()
        # A new lease must be extended sooner than the other leases.
        self._shorter = asyncio.Event()

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, held: HeldLease) -> bool:
        return held in self._held

    def hold(self, jobs: Iterable[Job], since: float) -> list[HeldLease]:
        """Adds jobs that were received at `since` (monotonic seconds), and returns their leases."""
        new = [HeldLease(job, since, self._window_s) for job in jobs]
        if new:
            self._held.update(dict.fromkeys(new))
            self._not_empty.set()
        if any(held.window_s < self._window_s for held in new):
            self._shorter.set()
        return new

    def drop(self, held: HeldLease) -> None:
        self._held.pop(held, None)

    def ended(self, held: HeldLease) -> bool:
        """Returns whether the lease has ended, even if the router has not reported it."""
        return held.over or time.monotonic() >= held.ends_at

    async def keep(self) -> None:
        """Extends each lease after a third of its window. Calls `extend` once for all leases that must be extended at
        about the same time. Runs until cancelled."""
        while True:
            if not self._held:
                self._not_empty.clear()
                await self._not_empty.wait()
            self._check_deadlines()
            third_s = self._window_s / 3
            next_s = min(
                (
                    held.ends_at if held.extending or held.settling else held.renewed_at + held.window_s / 3
                    for held in self._held
                ),
                default=0.0,
            )
            # Do not pause for longer than a third of the window: a lease that is extended during the pause must then be
            # extended again.
            pause_s = min(third_s, max(0.001, next_s - time.monotonic()))
            paused_at = time.monotonic()
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._shorter.wait()
            self._shorter.clear()
            blocked_s = time.monotonic() - paused_at - pause_s
            if blocked_s > third_s:
                log.warning(
                    "%s: the event loop was blocked for %.1f s, and no lease was extended meanwhile; if a handler "
                    "blocks it, make that a def, which runs in a thread, instead of an async def",
                    self._worker,
                    blocked_s,
                )

    def _check_deadlines(self) -> None:
        now = time.monotonic()
        ended: list[HeldLease] = []
        due: list[HeldLease] = []
        for held in self._held:
            if now >= held.ends_at:
                ended.append(held)
            # Also extend leases that must be extended soon, so that one message extends many leases.
            elif now - held.renewed_at >= held.window_s / 4 and not (held.extending or held.settling):
                due.append(held)
        for held in ended:
            self.lose(held, "it could not be extended in time")
        begun = [held for held in due if held.task is not None]
        for held in due:
            if held.task is None and now - held.renewed_at >= held.window_s / 3:
                self._on_waited(held)
        if begun:
            self._extend(begun)

    def revoked(self, answers: Mapping[bytes, Answer]) -> None:
        """Gives up the leases of `answers` that the worker holds."""
        for held in [held for held in self._held if held.lease in answers]:
            self.answered(held, answers[held.lease])

    def answered(self, held: HeldLease, answer: Answer) -> None:
        """Gives up a lease that has ended, as the router says."""
        if answer is Answer.CANCELLED:
            self._end(held, LostReason.CANCELLED)
            log.info("%s: %s was cancelled", self._worker, named(held.job))
        else:
            self.lose(held, f"the router answered {answer.name}")

    def end(self, held: HeldLease) -> None:
        """Forgets a lease that the handler itself has ended. Nothing is to be reported about its job any more."""
        self.drop(held)
        held.over = held.lost = True

    def lose(self, held: HeldLease, why: str) -> None:
        if self._end(held, LostReason.LEASE_ENDED):
            log.warning("%s: lost the lease of %s: %s", self._worker, named(held.job), why)

    def _end(self, held: HeldLease, reason: LostReason) -> bool:
        """Stops working under a lease. Returns False if the job's outcome is on its way to the router. In that case
        this outcome may have ended the lease, and the router's answer to the outcome will tell."""
        self.drop(held)
        held.over = True
        if held.settling:
            return False
        held.lost = True
        held.job.lost.set(reason)
        self._on_lost(held)
        return True
