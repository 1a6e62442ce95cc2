"""The leases a worker holds, and when they are prolonged. Owns their time; refuses to know what runs under them.

Time is the worker's own monotonic clock. A lease counts from the moment its job was received, or from before the extend
that prolonged it was sent: but for the way of the job it ends here no later than at the shard, and a worker that cannot
reach its router gives up a job before, or as, another worker gets it. Should both run it, fencing has the last word.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence

from windrow.errors import WindrowError
from windrow.jobs import Job

log = logging.getLogger("windrow.worker")


class Held:
    """One leased job in a worker's hands."""

    __slots__ = ("extending", "job", "over", "renewed_at", "settling", "task", "threaded")

    def __init__(self, job: Job, renewed_at: float) -> None:
        self.job = job
        # When the job was received, or before its lease was last prolonged; monotonic seconds.
        self.renewed_at = renewed_at
        # An extend waits to be sent, or is on its way.
        self.extending = False
        # Its fate is decided and waits to be sent, or is on its way.
        self.settling = False
        # The lease has ended, by the router's word or by the clock.
        self.over = False
        # Runs in a thread, which nothing can cancel.
        self.threaded = False
        self.task: asyncio.Task[None] | None = None

    @property
    def lost(self) -> bool:
        return self.job.lost.is_set()


class Reach:
    """Whether calls succeed: says so once when they stop to, and once when they do again."""

    def __init__(self, worker: str) -> None:
        self._worker = worker
        self._away_since: float | None = None

    @property
    def away_since(self) -> float | None:
        """Of the outage that goes on, by the monotonic clock; None: there is none."""
        return self._away_since

    def failed(self, error: WindrowError) -> None:
        if self._away_since is None:
            self._away_since = time.monotonic()
            log.warning(
                "%s: the queues cannot be reached; handlers go on, and it is tried again: %s", self._worker, error
            )

    def answered(self) -> None:
        if self._away_since is not None:
            away_s = time.monotonic() - self._away_since
            log.info("%s: the queues are reached again, after %.1f s", self._worker, away_s)
            self._away_since = None


class Leases:
    """Every lease from a job's receipt until its fate is answered.

    `extend` is told which to prolong, and sets their `extending`; `on_waited` of jobs that nobody has begun for a third
    of the window; `on_lost` of leases that ended before their jobs did.
    """

    def __init__(
        self,
        *,
        worker: str,
        window_s: float,
        extend: Callable[[Sequence[Held]], None],
        on_waited: Callable[[Held], None],
        on_lost: Callable[[Held], None],
    ) -> None:
        self._worker = worker
        self._window_s = window_s
        self._extend = extend
        self._on_waited = on_waited
        self._on_lost = on_lost
        self._held: dict[Held, None] = {}
        self._some = asyncio.Event()

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, held: Held) -> bool:
        return held in self._held

    def hold(self, jobs: Iterable[Job], since: float) -> list[Held]:
        """Takes over jobs that were received at `since`."""
        new = [Held(job, since) for job in jobs]
        if new:
            self._held.update(dict.fromkeys(new))
            self._some.set()
        return new

    def drop(self, held: Held) -> None:
        self._held.pop(held, None)

    def ended(self, held: Held) -> bool:
        """Whether the lease must have run out, whatever the router would say."""
        return held.over or time.monotonic() - held.renewed_at >= self._window_s

    async def keep(self) -> None:
        """Prolongs every lease at a third of its window, all that are due together. Runs until cancelled."""
        while True:
            if not self._held:
                self._some.clear()
                await self._some.wait()
            self._look_through()
            third_s = self._window_s / 3
            next_s = min(
                (held.renewed_at + (3 if held.extending or held.settling else 1) * third_s for held in self._held),
                default=0.0,
            )
            # An extend that is answered meanwhile is due again no sooner than a third of the window from now.
            pause_s = min(third_s, max(0.001, next_s - time.monotonic()))
            paused_at = time.monotonic()
            await asyncio.sleep(pause_s)
            late_s = time.monotonic() - paused_at - pause_s
            if late_s > third_s:
                log.warning(
                    "%s: the event loop stood still for %.1f s, and no lease was extended meanwhile: where a handler "
                    "blocks it, let that be a def, which runs in a thread, and no async def",
                    self._worker,
                    late_s,
                )

    def _look_through(self) -> None:
        now = time.monotonic()
        ended: list[Held] = []
        due: list[Held] = []
        for held in self._held:
            age_s = now - held.renewed_at
            if age_s >= self._window_s:
                ended.append(held)
            # Those that are nearly due come along: one message a tick, not one for each job.
            elif age_s >= self._window_s / 4 and not (held.extending or held.settling):
                due.append(held)
        for held in ended:
            self.lose(held, "it could not be extended in time")
        begun = [held for held in due if held.task is not None]
        for held in due:
            if held.task is None and now - held.renewed_at >= self._window_s / 3:
                self._on_waited(held)
        if begun:
            self._extend(begun)

    def lose(self, held: Held, why: str) -> None:
        self.drop(held)
        held.over = True
        if held.settling:
            # Perhaps by the very ack that is on its way: its own answer tells.
            return
        log.warning("%s: lost the lease of job %s (%s): %s", self._worker, held.job.id, held.job.kind, why)
        held.job.lost.set()
        self._on_lost(held)
