"""The jobs that a worker holds: how many to ask for, when the handler of each begins, and what happens to jobs whose
handlers are interrupted."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from windrow.batch_handlers import BatchHandlers
from windrow.gathering import Gathering
from windrow.handlers import Handlers, Suspended
from windrow.jobs import Job, LostReason
from windrow.leases import Connectivity, HeldLease, Leases, log, named
from windrow.outcomes import DONE, Action, Waits, is_chosen
from windrow.settlements import Backoff, Settlements

# A prefetched job waits in the worker for at most about this long, or for a tenth of its window if that is shorter,
# because another worker may be idle.
_PREFETCH_WAIT_S = 0.1
# Roughly the time that the worker itself needs for a job, without its handler.
_JOB_S_MIN = 0.000_02
# Handlers that do not suspend run one after another for at most this time. Then the other tasks of the program can run.
_BUSY_S_MAX = 0.005
_AGAIN_FIRST_S, _AGAIN_MAX_S = 0.05, 2.0
_TOO_LATE = "it had ended before the job began"


class Interrupted(Exception):
    """An `async def` handler has raised KeyboardInterrupt, which is the cause of this error. A task that ended with a
    KeyboardInterrupt would end the event loop at once, before the worker could release its jobs."""


class JobRunner:
    """Holds the jobs of a worker from the moment when they arrive until their outcomes are on their way to the router.

    `concurrency`: how many handlers run at the same time. `prefetch`: how many more jobs may wait for a handler.
    """

    def __init__(
        self,
        *,
        worker: str,
        handlers: Handlers,
        batch_handlers: BatchHandlers,
        connectivity: Connectivity,
        concurrency: int,
        prefetch: int,
        window_s: float,
        grace_s: float,
        cancel_lost: bool,
    ) -> None:
        self._worker = worker
        self._handlers = handlers
        self._batch_handlers = batch_handlers
        self._concurrency = concurrency
        self._prefetch = prefetch
        self._window_s = window_s
        self._grace_s = grace_s
        self._cancel_lost = cancel_lost
        self.leases = Leases(
            worker=worker,
            window_s=window_s,
            extend=self._extend,
            on_waited=self._on_waited,
            on_lost=self._on_lost,
        )
        self.settlements = Settlements(self.leases, connectivity, backoff=Backoff(_AGAIN_FIRST_S, _AGAIN_MAX_S))
        # The task of Worker.run(), and the context in which it runs.
        self._task: asyncio.Task[Any] | None = None
        self._context = contextvars.Context()
        self._group: asyncio.TaskGroup | None = None
        # Jobs that have not begun, except the jobs of batch handlers.
        self._waiting: deque[HeldLease] = deque()
        self._running: dict[HeldLease, None] = {}
        # A task is about to run waiting jobs.
        self._is_starting = False
        # An event that is set whenever a handler ends or stop() is called.
        self._changed = asyncio.Event()
        # Set by stop().
        self.stopping = asyncio.Event()
        # stop() was called for the second time: do not wait for handlers.
        self.hurried = False
        # No handler may start any more.
        self._ending = False
        # Exponentially weighted mean of the worker's time for one job (s); None until the first handler ends, or a job
        # has waited too long. Handlers that suspend run side by side, so the time of each is divided by `concurrency`.
        self._mean_job_s: float | None = None

    def open(self) -> None:
        """Call this once, in the task of Worker.run()."""
        self._task = asyncio.current_task()
        self._context = contextvars.copy_context()

    async def run(self) -> None:
        """Runs handlers until stop() is called and every handler has ended or is cancelled."""
        async with asyncio.TaskGroup() as self._group:
            try:
                await self.stopping.wait()
                await self._wind_down()
            finally:
                self._ending = True

    def stop(self, *, hurried: bool) -> None:
        """Makes run() end. `hurried`: run() does not wait for handlers."""
        self.hurried = hurried
        self.stopping.set()
        self._changed.set()

    def running_under(self, lease: bytes) -> HeldLease | None:
        """Returns the held lease with this token if the handler of its job runs; otherwise returns None."""
        return next((held for held in self._running if held.lease == lease), None)

    # The jobs that the worker takes.

    def jobs_wanted(self) -> int:
        """Returns how many more jobs the worker would take now."""
        if self._ending or self.stopping.is_set():
            return 0
        waiting = len(self._waiting)
        for gathering in self._batch_handlers.gatherings:
            waiting += len(gathering.waiting)
        return max(0, self._places + self._prefetch_now() - len(self._running) - waiting)

    @property
    def _places(self) -> int:
        """How many handlers may run now."""
        return self._concurrency - self._handlers.threads.places_lost

    def _prefetch_now(self) -> int:
        if self._mean_job_s is None:
            return 0
        wait_s = min(_PREFETCH_WAIT_S, self._window_s / 10)
        return int(min(self._prefetch, wait_s / max(self._mean_job_s, _JOB_S_MIN)))

    def take(self, jobs: Sequence[Job], received_at: float) -> None:
        helds = self.leases.hold(jobs, received_at)
        if self._batch_handlers.by_kind:
            for held in helds:
                self._waiting_with(held).append(held)
        else:
            self._waiting.extend(helds)
        if self._ending or self.stopping.is_set():
            # The jobs were on their way when stop() was called.
            self.give_back_waiting()
        else:
            self._start_waiting()

    def _waiting_with(self, held: HeldLease) -> deque[HeldLease]:
        """Returns the waiting jobs that this job belongs to: the jobs of its batch handler, or the other jobs."""
        gathering = self._batch_handlers.by_kind.get(held.job.kind)
        return self._waiting if gathering is None else gathering.waiting

    def _extend(self, leases: Sequence[HeldLease]) -> None:
        self.settlements.extend(leases)

    def _on_waited(self, held: HeldLease) -> None:
        # Release the job, so that an idle worker can take it. The handlers that run have taken this long without
        # ending, so the mean does not contain them yet: raise the mean here, so that fewer jobs are prefetched.
        self._mean_job_s = max(self._mean_job_s or 0.0, self._window_s / 3 / self._concurrency)
        self._waiting_with(held).remove(held)
        self.settlements.give_back(held)

    # The handlers that run.

    def _start_waiting(self) -> None:
        """Starts a task that runs waiting jobs, if there is a place for one more handler."""
        assert self._group is not None
        if self._ending or self.stopping.is_set():
            return
        for gathering in self._batch_handlers.gatherings:
            self._start_batch(gathering)
        if self._waiting and len(self._running) < self._places and not self._is_starting:
            self._is_starting = True
            self._group.create_task(self._run_waiting(), name=f"windrow handlers of {self._worker}")

    def _start_batch(self, gathering: Gathering) -> None:
        """Starts a task that runs a batch, if a batch is due. Otherwise sets a timer for the time when the batch will
        be due."""
        due_at = gathering.due_at(places=self._places - len(self._running))
        if due_at is None or gathering.is_starting:
            return
        left_s = due_at - time.monotonic()
        if left_s <= 0:
            assert self._group is not None
            gathering.is_starting = True
            self._group.create_task(
                self._run_batch(gathering), name=f"windrow batch of {self._worker}", context=self._context.copy()
            )
        elif gathering.timer is None:
            gathering.timer = asyncio.get_running_loop().call_later(left_s, self._on_batch_due, gathering)

    def _on_batch_due(self, gathering: Gathering) -> None:
        gathering.timer = None
        self._start_waiting()

    async def _run_batch(self, gathering: Gathering) -> None:
        task = asyncio.current_task()
        assert task is not None
        gathering.is_starting = False
        began = time.monotonic()
        batch: list[HeldLease] = []
        for held in () if self._ending else gathering.take(places=self._places - len(self._running)):
            if began >= held.ends_at:
                self.leases.lose(held, _TOO_LATE)
                continue
            batch.append(held)
            self._running[held] = None
            held.task, held.batch = task, batch
        # There may be jobs and places for another batch. Do not start it at once: see _start_waiting_soon().
        asyncio.get_running_loop().call_soon(self._start_waiting)
        if not batch:
            return
        try:
            fates = await self._batch_handlers.run(gathering, batch)
            self._measure((time.monotonic() - began) / self._concurrency)
            for held, fate in zip(batch, fates, strict=True):
                self._settle(held, fate)
            await self.settlements.room()
        except BaseException as error:
            self._on_broken_off(batch, error)
            raise
        finally:
            for held in batch:
                # The batch refers to all its leases. Break the cycle, so that the garbage collector need not do so.
                held.task = held.batch = None
                del self._running[held]
            self._changed.set()
            self.settlements.wake.set()
            self._start_waiting()

    async def _run_waiting(self) -> None:
        """Runs waiting jobs, one after another, until a handler suspends: that handler keeps the task for itself, and
        another task continues with the jobs that wait. So a new task is needed only for a handler that suspends."""
        task = asyncio.current_task()
        assert task is not None
        self._is_starting = False
        places = self._places
        turn_began = now = time.monotonic()
        try:
            while self._waiting and len(self._running) < places and not self._ending:
                held = self._waiting.popleft()
                if now >= held.ends_at:
                    # The event loop was blocked. Drop the lease now, not when keep() finds it: until then, the answer
                    # to an extend could renew a lease that nobody works on.
                    self.leases.lose(held, _TOO_LATE)
                    continue
                began, suspended = now, False
                self._running[held] = None
                held.task = task
                try:
                    # Handlers start in the context of run(), not in that of the handler before them.
                    context = self._context.copy()
                    fate = self._handlers.begin(held, context)
                    if isinstance(fate, Suspended):
                        suspended = True
                        self._start_waiting_soon()
                        fate = await self._handlers.go_on(held, fate, context)
                    now = time.monotonic()
                    if fate is DONE or held.job.kind in self._handlers:
                        self._measure((now - began) / self._concurrency if suspended else now - began)
                    self._settle(held, fate)
                    if self.settlements.is_full:
                        # Handlers must not run faster than the router answers.
                        suspended = True
                        self._start_waiting_soon()
                        await self.settlements.room()
                except BaseException as error:
                    self._on_broken_off((held,), error)
                    raise
                finally:
                    held.task = None
                    del self._running[held]
                    self._changed.set()
                    self.settlements.wake.set()
                if suspended or task.cancelling():
                    # The handler may have left something in the task, such as a late cancellation: end the task, so
                    # that this cannot affect another job.
                    return
                if now - turn_began > _BUSY_S_MAX:
                    await asyncio.sleep(0)
                    places = self._places
                    turn_began = now = time.monotonic()
        finally:
            self._start_waiting()

    def _start_waiting_soon(self) -> None:
        # Do not start the task at once: a loop with an eager task factory would run the next handler inside this one.
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._start_waiting)

    def _measure(self, job_s: float) -> None:
        mean_s = self._mean_job_s
        self._mean_job_s = job_s if mean_s is None else 0.8 * mean_s + 0.2 * job_s

    def _settle(self, held: HeldLease, fate: Action) -> None:
        if held.lost:
            # If the handler ends because its job was cancelled, it does what it should, so log no warning.
            log.log(
                logging.INFO if held.job.lost.reason is LostReason.CANCELLED else logging.WARNING,
                "%s: attempt %d of %s ended after its lease; its outcome is dropped",
                self._worker,
                held.job.attempt,
                named(held.job),
            )
        elif isinstance(fate, Waits):
            self.leases.end(held)
        elif held.task is not None and held.task.cancelling() and self._stops_handlers() and not is_chosen(fate):
            # The handler has caught its cancellation and returned, so its work may not be done. Or its clean-up has
            # failed, for example because it used a connection that the cancellation had interrupted.
            log.warning(
                "%s: attempt %d of %s was cancelled; its outcome is dropped, and the job is released",
                self._worker,
                held.job.attempt,
                named(held.job),
            )
            self.settlements.give_back(held)
        else:
            self.settlements.settle(held, fate)

    def _on_broken_off(self, broken_off: Sequence[HeldLease], error: BaseException) -> None:
        """Handles the jobs of a task that was cancelled, or that has raised an error that ends the worker. Raises
        Interrupted in place of a KeyboardInterrupt."""
        if not isinstance(error, asyncio.CancelledError):
            # No other handler may start.
            self._ending = True
        if isinstance(error, asyncio.CancelledError | KeyboardInterrupt):
            for held in broken_off:
                self._on_cancelled(held, error)
        if isinstance(error, KeyboardInterrupt):
            raise Interrupted from error

    def _on_cancelled(self, held: HeldLease, error: BaseException) -> None:
        """Handles a job whose task was cancelled, or whose handler was interrupted."""
        if held.lost or held.settling:
            return
        if held.in_thread:
            # The thread continues: do not release the job, so that no other worker gets it before the lease ends.
            log.warning("%s: %s still runs in its thread; its lease will expire", self._worker, named(held.job))
            held.lost = True
            held.job.lost.set(LostReason.STOPPED)
            self.leases.drop(held)
        elif self._stops_handlers():
            self.settlements.give_back(held)
        else:
            # The handler's own code has cancelled the task, and would do so again: this attempt counts.
            self.settlements.settle(held, self._handlers.outcome_of(held, error))

    def _stops_handlers(self) -> bool:
        """Whether the worker cancels the handlers that still run."""
        return self._ending or (self._task is not None and self._task.cancelling() > 0)

    def on_place(self) -> None:
        """Starts waiting jobs, because a place may have become free."""
        self._start_waiting()
        self.settlements.wake.set()

    def _on_lost(self, held: HeldLease) -> None:
        self.settlements.tell_stored(held)
        if held.task is None:
            with suppress(ValueError):
                self._waiting_with(held).remove(held)
            self.settlements.wake.set()
        # Do not cancel a handler in a thread: this is impossible, and the handler occupies its place until it ends or
        # times out.
        elif self._cancel_lost and not held.in_thread and all(one.lost for one in held.batch or (held,)):
            held.task.cancel()

    # Shutdown.

    async def _wind_down(self) -> None:
        self.give_back_waiting()
        if self._running:
            log.info(
                "%s: stopping; handlers that have %g s to finish: %d", self._worker, self._grace_s, len(self._running)
            )
        with suppress(TimeoutError):
            async with asyncio.timeout(self._grace_s):
                while self._running and not self.hurried:
                    self._changed.clear()
                    await self._changed.wait()
        # Do not count handlers in threads: they cannot be cancelled, and _on_cancelled() logs each of them.
        if cancelled := sum(not held.in_thread for held in self._running):
            log.warning("%s: cancelling handlers that did not finish in time: %d", self._worker, cancelled)
        for held in self._running:
            held.job.lost.set(LostReason.STOPPED)
        for task in {held.task for held in self._running}:
            if task is not None:
                task.cancel()

    def give_back_waiting(self) -> None:
        for waiting in (self._waiting, *(gathering.waiting for gathering in self._batch_handlers.gatherings)):
            while waiting:
                self.settlements.give_back(waiting.popleft())
