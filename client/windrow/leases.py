"""The leases a worker holds, and the extends that keep them. Owns their time; refuses to know what runs under them.

Time is the worker's own monotonic clock: a lease counts from before the call that gave or prolonged it, so it ends here
no later than at the shard, and a worker that cannot reach its router gives up a job before another worker gets it.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Iterable

from windrow.client import JOBS_MAX, Client
from windrow.errors import TRANSIENT, InvalidRequest, WindrowError
from windrow.jobs import Answer, Job, answers
from windrow.payloads import duration
from windrow.v1 import queue_pb2

log = logging.getLogger("windrow.worker")


class Held:
    """One leased job in a worker's hands."""

    __slots__ = ("job", "over", "renewed_at", "settling", "task", "threaded")

    def __init__(self, job: Job, renewed_at: float) -> None:
        self.job = job
        # From before the call that gave or last prolonged the lease; monotonic seconds.
        self.renewed_at = renewed_at
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

    def failed(self, error: WindrowError) -> None:
        if self._away_since is None:
            self._away_since = time.monotonic()
            log.warning(
                "%s: the queues cannot be reached; handlers go on, and calls are tried again: %s", self._worker, error
            )

    def answered(self) -> None:
        if self._away_since is not None:
            away_s = time.monotonic() - self._away_since
            log.info("%s: the queues are reached again, after %.1f s", self._worker, away_s)
            self._away_since = None


class Leases:
    """Every lease from dequeue until its fate is answered. `on_lost` is told of those that ended before."""

    def __init__(
        self, client: Client, *, worker: str, window_s: float, reach: Reach, on_lost: Callable[[Held], None]
    ) -> None:
        self._client = client
        self._worker = worker
        self._window_s = window_s
        self._reach = reach
        self._on_lost = on_lost
        self._held: dict[Held, None] = {}
        self._some = asyncio.Event()

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, jobs: Iterable[Job], since: float) -> list[Held]:
        """Takes over jobs that were dequeued by a call begun at `since`."""
        new = [Held(job, since) for job in jobs]
        self._held.update(dict.fromkeys(new))
        if new:
            self._some.set()
        return new

    def drop(self, held: Held) -> None:
        self._held.pop(held, None)

    def ended(self, held: Held) -> bool:
        """Whether the lease must have run out, whatever the router would say."""
        return held.over or time.monotonic() - held.renewed_at >= self._window_s

    async def keep(self) -> None:
        """Extends every lease at a third of its window, in one call for all that are due. Runs until cancelled."""
        while True:
            if not self._held:
                self._some.clear()
                await self._some.wait()
            oldest = min(held.renewed_at for held in self._held)
            await asyncio.sleep(max(0.0, oldest + self._window_s / 3 - time.monotonic()))
            await self._extend()

    async def _extend(self) -> None:
        for held in [held for held in self._held if self.ended(held)]:
            self._lose(held, "it could not be extended in time")
        # Those that are nearly due come along: one call a tick, not one for each dequeue.
        now = time.monotonic()
        due = [held for held in self._held if now - held.renewed_at >= self._window_s / 4][:JOBS_MAX]
        if not due:
            return
        first_end_s = min(held.renewed_at for held in due) + self._window_s - now
        request = queue_pb2.ExtendRequest(
            org=self._client.org,
            leases=[held.job.lease for held in due],
            visibility_window=duration(self._window_s),
        )
        try:
            response = await self._client.calls.call(
                lambda stub: stub.Extend, request, timeout_s=max(0.05, min(self._window_s / 3, first_end_s))
            )
        except TRANSIENT as error:
            self._reach.failed(error)
            await asyncio.sleep(random.uniform(0, min(0.5, self._window_s / 12)))
            return
        except InvalidRequest as error:
            for held in due:
                self._lose(held, str(error))
            return
        self._reach.answered()
        for held, answer in zip(due, answers(response.answers), strict=True):
            if answer is Answer.OK:
                held.renewed_at = now
            elif held in self._held:
                self._lose(held, f"the router answered {answer.name}")

    def _lose(self, held: Held, why: str) -> None:
        self.drop(held)
        held.over = True
        if held.settling:
            # Perhaps by the very ack that is on its way: its own answer tells.
            return
        log.warning("%s: lost the lease of job %s (%s): %s", self._worker, held.job.id, held.job.kind, why)
        held.job.lost.set()
        self._on_lost(held)
