"""The worker: takes jobs from a stream, runs their handlers, and reports the outcomes.

consume_stream.py has the stream, leases.py the leases, handlers.py the handlers, and settlements.py the reports. This
module decides how many jobs to ask for and when each job begins, and shuts the worker down.
"""

from __future__ import annotations

import asyncio
import contextvars
import enum
import logging
import os
import secrets
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from opentelemetry import metrics

from windrow.batch_handlers import BatchHandlers, BatchHandlerT
from windrow.client import Client
from windrow.consume_stream import ConsumeStream, only_cause
from windrow.declarations import Declarations
from windrow.errors import InvalidRequest, Span
from windrow.gathering import Gathering
from windrow.handlers import Handlers, HandlerT, Middleware, Suspended
from windrow.jobs import Job, LostReason, WorkflowNode, read_leased
from windrow.leases import Connectivity, HeldLease, Leases, log, named
from windrow.new_jobs import NewJob
from windrow.outcomes import DONE, Action, Waits, is_chosen
from windrow.payloads import Payload, checked_text, duration, named_seconds
from windrow.processes import is_handler_process
from windrow.reports import Report, Reporter
from windrow.schedules import Schedule
from windrow.settlements import Backoff, Settlements
from windrow.signals import stopped_by_signals
from windrow.unhandled import Unhandled
from windrow.v1 import job_pb2, queue_pb2

CONCURRENCY_MAX = 1000
# The contract's limit for one stream.
QUEUES_MAX = 64
PREFETCH_MAX = 5000
# Enough jobs to cover the round trip to the router when handlers take almost no time.
_PREFETCH_MIN = 100
# A prefetched job waits in the worker for at most about this long, or for a tenth of its window if that is shorter,
# because another worker may be idle.
_PREFETCH_WAIT_S = 0.1
# Roughly the time that the worker itself needs for a job, without its handler.
_JOB_S_MIN = 0.000_02
# Handlers that do not suspend run one after another for this long; then the rest of the program has its turn.
_BUSY_S_MAX = 0.005
_AGAIN_FIRST_S, _AGAIN_MAX_S = 0.05, 2.0
_FLUSH_S, _FLUSH_HURRIED_S = 5.0, 1.0
_TOO_LATE = "it had ended before the job began"


class AllOrgs(enum.Enum):
    """The value of `orgs` with which a worker takes the jobs of all orgs of the cluster."""

    ALL = "all"


ALL = AllOrgs.ALL


class _Interrupted(Exception):
    """An `async def` has raised KeyboardInterrupt, which is the cause of this error. A task that ends with a
    KeyboardInterrupt ends the event loop at once, before the worker can give its jobs back."""


class Worker:
    """Runs handlers for the jobs of 1 to 64 queues.

        worker = Worker(client, ["emails"])

        @worker.handler("send_email")
        async def send_email(job): ...

        windrow.run(worker)

    Jobs arrive as they fall due, over one stream to one router. The worker asks only for as many jobs as it has room
    for.

    - `orgs` (default: the client's org): `windrow.ALL` takes jobs of every org of the cluster; job.org names the org.
      The client needs a key for all orgs with the scopes `consume` and `cluster`. Orgs share the time of such workers
      by their weights (`windrow weights`): an org is charged for as long as its jobs are leased, even if they only wait
      in a worker. So the default of `prefetch` is 0 for such a worker: it takes a job only when the job can begin.
    - `concurrency` (1 to 1,000; default 10): how many handlers run at the same time.
    - `prefetch` (0 to 5,000; default: 5 × concurrency, at least 100): how many jobs may wait in the worker besides the
      jobs that run, so that handlers need not wait for jobs. The longer handlers take, the fewer jobs the worker
      prefetches, so that a job waits for about 0.1 s. The worker releases a job that has waited for a third of its
      window; that does not count as an attempt.
    - `visibility_window` (100 ms to 12 h; default 30 s): the length of each lease. The worker extends a lease after a
      third of this time.
    - `name` (default host-pid-xxxx): the worker's name in the attempt history.
    - `grace` (s, or timedelta; default 20 s): how long running handlers may take to finish when the worker stops.
    - `cancel_lost` (default True): cancels a coroutine handler when its lease ends. A `def` handler cannot be
      cancelled: it should check job.lost.is_set(). If the handler never returns, it occupies its place, unless it has a
      timeout (see handler()). It also keeps the process alive, because Python waits for threads at exit (see run()).
    - `middleware`: functions `async def middleware(job, call_next)` that run around every handler, for example for
      metrics or an error reporter. The first function is the outermost. `await call_next(job)` runs the handler; it
      returns what the handler returns and raises what the handler raises, including TimedOut and Crashed.

    - `declares_as` (default "worker:" and the first queue): the name under which every() declares schedules. Programs
      that declare different schedules need different names.
    - `removes_undeclared` (default False): deletes the schedules that were declared under this name before and are no
      longer declared. If this is False, a WARNING names these schedules. A worker of an older release that starts again
      during a deploy also deletes what only the new release declares.

    A handler that runs for long can report how far it has come, for people, and a checkpoint for the job's next attempt
    (see Job.report). A job that is cancelled loses its lease: see `cancel_lost`.

    A handler returns the job's result (see Payload; None: no result); the worker then acks the job. A result of more
    than 64 KiB is dropped: the job succeeds without it, and the worker logs a WARNING. If the handler raises, the
    worker nacks the job. Retry(after=...), Snooze(after=...) and Kill("why") set the outcome; after any other exception
    the retry policy decides. The exception's type, message (8 KiB) and traceback (the newest frames, 32 KiB) are stored
    with the attempt. sys.exit() in a handler also ends only the attempt, not the worker. A KeyboardInterrupt in an
    `async def` ends the worker, as Ctrl-C would: the worker releases its jobs, and run() raises the KeyboardInterrupt.

    If the worker has no handler for the kind of a job, the worker's program may be of an older release. So the worker
    snoozes the job for 5 s to 5 min, longer each time; the attempt does not count. A WARNING says so once a minute, and
    the counter `windrow.worker.unhandled_jobs` counts these jobs (OpenTelemetry, with `meter_provider` or the global
    provider).

    Failures are logged to `windrow.worker`, with job, kind, queue and attempt: as WARNING (a Retry or Snooze as INFO),
    or as ERROR if the attempt was the last one. A TimedOut is logged with one line that says what the handler was
    doing. Exceptions other than Retry, Snooze, Kill and TimedOut are logged with their traceback.
    """

    def __init__(
        self,
        client: Client,
        queues: str | Iterable[str],
        *,
        orgs: AllOrgs | None = None,
        concurrency: int = 10,
        prefetch: int | None = None,
        visibility_window: Span = 30.0,
        name: str | None = None,
        grace: Span = 20.0,
        cancel_lost: bool = True,
        middleware: Sequence[Middleware] = (),
        meter_provider: metrics.MeterProvider | None = None,
        declares_as: str | None = None,
        removes_undeclared: bool = False,
    ) -> None:
        self.client = client
        self._orgs = orgs
        self.queues = (queues,) if isinstance(queues, str) else tuple(queues)
        self.concurrency = _checked_count("concurrency", concurrency, 1, CONCURRENCY_MAX)
        if prefetch is None:
            prefetch = max(5 * concurrency, _PREFETCH_MIN) if orgs is None else 0
        self.prefetch = _checked_count("prefetch", prefetch, 0, PREFETCH_MAX)
        self.name = name or f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(2)}"
        self._window_s = named_seconds("visibility_window", visibility_window)
        self._grace_s = named_seconds("grace", grace)
        self._cancel_lost = cancel_lost
        self._check()
        self._handlers = Handlers(
            self.name,
            middleware=middleware,
            tracing=client.tracing,
            unhandled=Unhandled(self.name, meter_provider),
            abandoned_ended=self._on_place,
        )
        self._batch_handlers = BatchHandlers(self.name, self._handlers, client.tracing)
        self._declarations = Declarations(
            client=client, declared_by=declares_as or f"worker:{self.queues[0]}", removes=removes_undeclared
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        # The task of run().
        self._task: asyncio.Task[Any] | None = None
        self._stops = 0
        self._group: asyncio.TaskGroup | None = None
        self._context = contextvars.Context()
        self._connectivity = Connectivity(self.name)
        self._leases = Leases(
            worker=self.name,
            window_s=self._window_s,
            extend=self._extend,
            on_waited=self._on_waited,
            on_lost=self._on_lost,
        )
        self._settlements = Settlements(self._leases, self._connectivity, backoff=Backoff(_AGAIN_FIRST_S, _AGAIN_MAX_S))
        self._stream = ConsumeStream(
            client,
            self._start(),
            settlements=self._settlements,
            connectivity=self._connectivity,
            jobs_wanted=self._jobs_wanted,
            take=self._take,
            revoked=self._leases.revoked,
        )
        self._reporter = Reporter(self._report, self._when_stored)
        # Jobs that have not begun, except the jobs of batch handlers.
        self._waiting: deque[HeldLease] = deque()
        self._running: dict[HeldLease, None] = {}
        # A task is about to run waiting jobs.
        self._is_starting = False
        # Set whenever a handler ends or stop() is called.
        self._changed = asyncio.Event()
        self._stopping = asyncio.Event()
        # No handler may start any more.
        self._ending = False
        # Exponentially weighted mean of the worker's time for one job (s); None until the first handler ends, or a job
        # has waited too long. Handlers that suspend run side by side, so the time of each is divided by `concurrency`.
        self._mean_job_s: float | None = None

    def _start(self) -> queue_pb2.ConsumeStart:
        start = queue_pb2.ConsumeStart(queues=self.queues, visibility_window=duration(self._window_s), worker=self.name)
        if self._orgs is ALL:
            start.all_orgs = True
        else:
            start.org = self.client.org
        return start

    def handler(
        self, *kinds: str, timeout: Span | None = None, isolate: Literal["process"] | None = None
    ) -> Callable[[HandlerT], HandlerT]:
        """Registers a function for jobs of these kinds: an `async def`, or a `def`, which runs in a thread.

        A handler that takes longer than `timeout` (s, or timedelta; None: for ever) is stopped, and its attempt fails
        as `windrow.TimedOut`, with the handler's stack. An `async def` is cancelled. A thread cannot be stopped:
        job.lost is set, another job gets its place, and the thread continues without a place, even while the job's next
        attempt runs. At most 1,000 such threads have no place; each further thread keeps its place until it ends.

        `isolate="process"` runs a `def` in a process of its own, for code that may hang, crash or leak: the process is
        killed when the handler times out, when its job is lost, and when the worker stops. If the process ends by
        itself, only this job's attempt fails, as `windrow.Crashed`. A process runs one job at a time, and at most 1,000
        jobs in all. It imports the handler's module by name, so the handler must be a function of a module. It also
        imports the program's own module. If that module calls run(), run() returns at once. job.lost is never set in
        the process.

        Raises InvalidRequest if no kind is given, if a kind already has a handler, if `timeout` is not more than 0 s,
        for an unknown `isolate`, or for an `async def` in a process.
        """
        return self._handlers.add(kinds, timeout=timeout, isolate=isolate)

    def batch_handler(
        self, *kinds: str, max_jobs: int = 100, max_wait: Span = 0.01, timeout: Span | None = None
    ) -> Callable[[BatchHandlerT], BatchHandlerT]:
        """Registers a function that takes many jobs of these kinds at once, as a sequence: an `async def`, or a `def`,
        which runs in a thread.

            @worker.batch_handler("index_page", max_jobs=100)
            async def index_pages(jobs): ...

        The function returns None if all jobs are done. Otherwise it returns a sequence with one result for each job, in
        their order: the value that a handler of single jobs would return, or an exception for this job alone, such as
        Retry("why"). If the batch handler raises, all its jobs fail, or are snoozed, in the same way.

        A batch has 1 to `max_jobs` (1 to 1,000) jobs. Each job takes one of the worker's places, so `concurrency`
        should be a few times `max_jobs`. A batch begins at once if it is full, or if there is no place for more jobs.
        Otherwise it waits for more jobs, until its first job has been in the worker for `max_wait` (s, or timedelta; at
        most 60 s).

        If the lease of a job is lost, its job.lost is set, and its result is dropped; the handler continues for the
        other jobs. The handler is cancelled when the leases of all its jobs are lost (see `cancel_lost`). The whole
        batch fails as `windrow.TimedOut` after `timeout`, or sooner if the max_runtime of one of its jobs is over.
        Middleware is not called, because it takes single jobs.

        Raises InvalidRequest if no kind is given, if a kind already has a handler, or if a number is out of range.
        """
        return self._batch_handlers.add(kinds, max_jobs=max_jobs, max_wait=max_wait, timeout=timeout)

    def every(
        self,
        when: str | Span | Schedule,
        *,
        tz: str = "UTC",
        name: str | None = None,
        queue: str | None = None,
        payload: Payload = b"",
        timeout: Span | None = None,
        isolate: Literal["process"] | None = None,
    ) -> Callable[[HandlerT], HandlerT]:
        """Declares a schedule, and registers the function as the handler of its jobs.

            @worker.every("0 8 * * 1-5", tz="Europe/Paris")
            async def send_digest(job): ...

        `when` is a cron expression, read in the time zone `tz`, or the time between two runs (s, or timedelta), or a
        Schedule. The kind of the jobs is the function's name, and so is the schedule's name unless `name` is given.
        The jobs go into the worker's first queue unless `queue` names another one of its queues. job.scheduled_run has
        the nominal time. `timeout` and `isolate` are as in handler().

        run() creates the schedule, or changes it if it differs; a paused schedule stays paused. Any number of processes
        may declare the same schedules. See `removes_undeclared` about schedules that are no longer declared. The client
        needs the scopes `read` and `admin`. run() raises InvalidRequest if it cannot read `when` or `tz`.

        Raises InvalidRequest if the name is declared already, if the kind has a handler, if the worker does not take
        jobs of the queue, or for a Schedule or payload that cannot be sent."""
        schedule = when
        if isinstance(schedule, str):
            schedule = Schedule(cron=schedule, tz=tz)
        elif not isinstance(schedule, Schedule):
            schedule = Schedule(every=schedule, tz=tz)
        of_queue = self.queues[0] if queue is None else queue
        if of_queue not in self.queues:
            raise InvalidRequest(f"worker {self.name} does not take jobs of queue {of_queue!r}")

        def register(handler: HandlerT) -> HandlerT:
            kind: str = getattr(handler, "__name__")  # noqa: B009 - callables need not have one
            registered = self.handler(kind, timeout=timeout, isolate=isolate)(handler)
            self._declarations.add(name or kind, schedule, NewJob(of_queue, kind, payload))
            return registered

        return register

    async def run(self) -> None:
        """Works until stop(), or, in the main thread, until SIGTERM or SIGINT. The worker does not handle these signals
        if the program handles SIGTERM itself, as a web server does. A worker can run only once.

        To shut down, the worker takes no more jobs and releases the jobs that have not begun. It gives handlers `grace`
        to finish, then cancels them and releases their jobs, and sends the last acks. It also releases the job of a
        handler that catches its cancellation and returns, or whose clean-up fails; but if the handler raises Snooze,
        Kill or a Retry with a delay, that is the job's outcome. The worker cannot stop a `def` handler: it sets
        job.lost, lets the lease expire, and run() returns. The process then ends when the handler's thread ends, or by
        the next signal, because run() has restored the old signal handlers. After a second signal, it restores them at
        once, so a third signal ends the process even if a handler does not end when it is cancelled.

        Raises a WindrowError that no retry can fix, such as PermissionDenied or RouterTooOld. If the task of run() is
        cancelled, the worker cancels its handlers and releases their jobs. If routers refuse the token after they have
        accepted one, and `token` is a function, the worker does not give up for a minute: it calls the function again
        and again, and tries the tokens that it gets. Meanwhile handlers continue, and an error of the function is only
        logged.
        """
        if self._loop is not None:
            raise InvalidRequest(f"worker {self.name} has run already; make a new one")
        if is_handler_process():
            # This process of a handler has imported the program, which runs its worker: do nothing.
            return
        self._handlers.open(self.concurrency)
        self._stream.tell_kinds(self._handlers.kinds)
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._context = contextvars.copy_context()
        self._on_stop()
        with stopped_by_signals(self.stop):
            try:
                await self._serve()
            except BaseExceptionGroup as group:
                cause = only_cause(group)
                if isinstance(cause, _Interrupted) and cause.__cause__ is not None:
                    raise cause.__cause__ from None
                of = f"org {self.client.org!r}" if self._orgs is None else "all orgs"
                cause.add_note(f"worker {self.name} of {of} has ended with this error")
                raise cause from None
            finally:
                self._handlers.close()

    def stop(self) -> None:
        """Begins a graceful shutdown (see run()); a second call ends the worker without waiting for handlers. Does
        nothing if the worker has ended. Thread-safe."""
        self._stops += 1
        if self._loop is not None:
            # A loop that is closed has no worker to stop.
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._on_stop)

    def _on_stop(self) -> None:
        if self._stops:
            self._stopping.set()
            self._changed.set()

    async def _serve(self) -> None:
        if self._stopping.is_set():
            return
        async with asyncio.TaskGroup() as services:
            keeping = services.create_task(self._leases.keep())
            stream = services.create_task(self._stream.run())
            declaring = services.create_task(self._declarations.keep())
            try:
                async with asyncio.TaskGroup() as self._group:
                    try:
                        await self._stopping.wait()
                        await self._wind_down()
                    finally:
                        self._ending = True
            finally:
                # Report the outcomes and release the other jobs, also after an error or a cancellation.
                self._give_back_waiting()
                if not (keeping.done() or stream.done()):
                    await self._flush(stream)
                if not self._settlements.idle.is_set():
                    log.warning("%s: stopped before every outcome was reported; those leases will expire", self.name)
                self._settlements.close()
                keeping.cancel()
                stream.cancel()
                declaring.cancel()

    # The jobs that the worker takes.

    def _jobs_wanted(self) -> int:
        """Returns how many more jobs the worker would take now."""
        if self._ending or self._stopping.is_set():
            return 0
        waiting = len(self._waiting)
        for gathering in self._batch_handlers.gatherings:
            waiting += len(gathering.waiting)
        return max(0, self._places + self._prefetch_now() - len(self._running) - waiting)

    @property
    def _places(self) -> int:
        """How many handlers may run now."""
        return self.concurrency - self._handlers.threads.places_lost

    def _prefetch_now(self) -> int:
        if self._mean_job_s is None:
            return 0
        wait_s = min(_PREFETCH_WAIT_S, self._window_s / 10)
        return int(min(self.prefetch, wait_s / max(self._mean_job_s, _JOB_S_MIN)))

    def _read(self, message: job_pb2.LeasedJob) -> Job:
        job = read_leased(message, reporter=self._reporter)
        if job.workflow is not None:
            client = self.client.for_org(job.org) if job.org else self.client
            caller = partial(_calls_of, client, job.lease, self._reporter)
            return replace(job, workflow=replace(job.workflow, caller=caller))
        return job

    def _take(self, messages: Sequence[job_pb2.LeasedJob], received_at: float) -> None:
        self._handlers.on_jobs()
        helds = self._leases.hold([self._read(message) for message in messages], received_at)
        if self._batch_handlers.by_kind:
            for held in helds:
                self._waiting_with(held).append(held)
        else:
            self._waiting.extend(helds)
        if self._ending or self._stopping.is_set():
            # The jobs were on their way when stop() was called.
            self._give_back_waiting()
        else:
            self._start_waiting()

    def _waiting_with(self, held: HeldLease) -> deque[HeldLease]:
        """Returns the waiting jobs that this job belongs to: the jobs of its batch handler, or the other jobs."""
        gathering = self._batch_handlers.by_kind.get(held.job.kind)
        return self._waiting if gathering is None else gathering.waiting

    def _extend(self, leases: Sequence[HeldLease]) -> None:
        self._settlements.extend(leases)

    def _on_waited(self, held: HeldLease) -> None:
        # Release the job, so that an idle worker can take it. The handlers that run have taken this long without
        # ending, so the mean does not contain them yet: raise the mean here, so that fewer jobs are prefetched.
        self._mean_job_s = max(self._mean_job_s or 0.0, self._window_s / 3 / self.concurrency)
        self._waiting_with(held).remove(held)
        self._settlements.give_back(held)

    # The handlers that run.

    def _start_waiting(self) -> None:
        """Lets a task run waiting jobs, if there is a place for one more handler."""
        assert self._group is not None
        if self._ending or self._stopping.is_set():
            return
        for gathering in self._batch_handlers.gatherings:
            self._start_batch(gathering)
        if self._waiting and len(self._running) < self._places and not self._is_starting:
            self._is_starting = True
            self._group.create_task(self._run_waiting(), name=f"windrow handlers of {self.name}")

    def _start_batch(self, gathering: Gathering) -> None:
        """Lets a task run a batch if there are enough jobs for one. Otherwise sets a timer to try again in time."""
        due_at = gathering.due_at(places=self._places - len(self._running))
        if due_at is None or gathering.is_starting:
            return
        left_s = due_at - time.monotonic()
        if left_s <= 0:
            assert self._group is not None
            gathering.is_starting = True
            self._group.create_task(
                self._run_batch(gathering), name=f"windrow batch of {self.name}", context=self._context.copy()
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
                self._leases.lose(held, _TOO_LATE)
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
            self._measure((time.monotonic() - began) / self.concurrency)
            for held, fate in zip(batch, fates, strict=True):
                self._settle(held, fate)
            await self._settlements.room()
        except BaseException as error:
            self._on_broken_off(batch, error)
            raise
        finally:
            for held in batch:
                # The batch refers to all its leases. Break the cycle, so that the garbage collector need not do so.
                held.task = held.batch = None
                del self._running[held]
            self._changed.set()
            self._settlements.wake.set()
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
                    self._leases.lose(held, _TOO_LATE)
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
                        self._measure((now - began) / self.concurrency if suspended else now - began)
                    self._settle(held, fate)
                    if self._settlements.is_full:
                        # Handlers must not run faster than the router answers.
                        suspended = True
                        self._start_waiting_soon()
                        await self._settlements.room()
                except BaseException as error:
                    self._on_broken_off((held,), error)
                    raise
                finally:
                    held.task = None
                    del self._running[held]
                    self._changed.set()
                    self._settlements.wake.set()
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
            # A handler that ends because its job was cancelled does what it should: no warning.
            log.log(
                logging.INFO if held.job.lost.reason is LostReason.CANCELLED else logging.WARNING,
                "%s: attempt %d of %s ended after its lease; its outcome is dropped",
                self.name,
                held.job.attempt,
                named(held.job),
            )
        elif isinstance(fate, Waits):
            self._leases.end(held)
        elif held.task is not None and held.task.cancelling() and self._stops_handlers() and not is_chosen(fate):
            # The handler has caught its cancellation and returned, so its work may not be done. Or its clean-up has
            # failed, for example because it used a connection that the cancellation had interrupted.
            log.warning(
                "%s: attempt %d of %s was cancelled; its outcome is dropped, and the job is released",
                self.name,
                held.job.attempt,
                named(held.job),
            )
            self._settlements.give_back(held)
        else:
            self._settlements.settle(held, fate)

    def _report(self, lease: bytes, report: Report) -> None:
        """Takes a report of a handler, which may run in a thread."""
        assert self._loop is not None
        try:
            is_here = asyncio.get_running_loop() is self._loop
        except RuntimeError:
            is_here = False
        if is_here:
            self._on_report(lease, report)
        else:
            # A thread may outlive the worker, whose event loop is then closed.
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._on_report, lease, report)

    def _on_report(self, lease: bytes, report: Report) -> None:
        for held in self._running:
            if held.lease == lease:
                self._settlements.report(held, report)
                return

    def _when_stored(self, lease: bytes) -> Future[None]:
        """Returns a future that ends when no report about this lease is on its way. Thread-safe."""
        stored = Future[None]()
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(self._on_when_stored, lease, stored)
        except RuntimeError:
            # A thread may outlive the worker, whose event loop is then closed.
            stored.set_result(None)
        return stored

    def _on_when_stored(self, lease: bytes, stored: Future[None]) -> None:
        for held in self._running:
            if held.lease == lease:
                self._settlements.when_stored(held, stored)
                return
        if stored.set_running_or_notify_cancel():
            stored.set_result(None)

    def _on_broken_off(self, broken_off: Sequence[HeldLease], error: BaseException) -> None:
        """Handles jobs whose task was cancelled, or has got an error that ends the worker. Raises _Interrupted in place
        of a KeyboardInterrupt."""
        if not isinstance(error, asyncio.CancelledError):
            # No other handler may start.
            self._ending = True
        if isinstance(error, asyncio.CancelledError | KeyboardInterrupt):
            for held in broken_off:
                self._on_cancelled(held, error)
        if isinstance(error, KeyboardInterrupt):
            raise _Interrupted from error

    def _on_cancelled(self, held: HeldLease, error: BaseException) -> None:
        """Handles a job whose task was cancelled, or whose handler was interrupted."""
        if held.lost or held.settling:
            return
        if held.in_thread:
            # The thread continues: do not release the job, so that no other worker gets it before the lease ends.
            log.warning("%s: %s still runs in its thread; its lease will expire", self.name, named(held.job))
            held.lost = True
            held.job.lost.set(LostReason.STOPPED)
            self._leases.drop(held)
        elif self._stops_handlers():
            self._settlements.give_back(held)
        else:
            # The handler's own code has cancelled the task, and would do so again: this attempt counts.
            self._settlements.settle(held, self._handlers.outcome_of(held, error))

    def _stops_handlers(self) -> bool:
        """Whether the worker cancels the handlers that still run."""
        return self._ending or (self._task is not None and self._task.cancelling() > 0)

    def _on_place(self) -> None:
        """Starts waiting jobs, because a place may have become free."""
        self._start_waiting()
        self._settlements.wake.set()

    def _on_lost(self, held: HeldLease) -> None:
        self._settlements.tell_stored(held)
        if held.task is None:
            with suppress(ValueError):
                self._waiting_with(held).remove(held)
            self._settlements.wake.set()
        # Leave out a handler in a thread. It cannot be cancelled, and occupies its place until it ends or times out.
        elif self._cancel_lost and not held.in_thread and all(one.lost for one in held.batch or (held,)):
            held.task.cancel()

    # Shutdown.

    async def _wind_down(self) -> None:
        self._give_back_waiting()
        if self._running:
            log.info(
                "%s: stopping; handlers that have %g s to finish: %d", self.name, self._grace_s, len(self._running)
            )
        with suppress(TimeoutError):
            async with asyncio.timeout(self._grace_s):
                while self._running and self._stops < 2:
                    self._changed.clear()
                    await self._changed.wait()
        # Leave out handlers in threads: these cannot be cancelled, and _on_cancelled() logs each of them.
        if cancelled := sum(not held.in_thread for held in self._running):
            log.warning("%s: cancelling handlers that did not finish in time: %d", self.name, cancelled)
        for held in self._running:
            held.job.lost.set(LostReason.STOPPED)
        for task in {held.task for held in self._running}:
            if task is not None:
                task.cancel()

    def _give_back_waiting(self) -> None:
        for waiting in (self._waiting, *(gathering.waiting for gathering in self._batch_handlers.gatherings)):
            while waiting:
                self._settlements.give_back(waiting.popleft())

    async def _flush(self, stream: asyncio.Task[None]) -> None:
        """Waits, for a few seconds at most, until every report is answered and the stream has ended."""
        self._stream.close()
        await asyncio.wait([stream], timeout=_FLUSH_S if self._stops < 2 else _FLUSH_HURRIED_S)

    def _check(self) -> None:
        client: object = self.client
        if not isinstance(client, Client):
            raise InvalidRequest(f"a worker needs a windrow.Client, not a {type(client).__name__}")
        if self._orgs is not None and self._orgs is not ALL:
            raise InvalidRequest(
                f"orgs must be windrow.ALL, or None for the client's org, not {self._orgs!r}: "
                "for some orgs, start a worker for each"
            )
        if not 1 <= len(self.queues) <= QUEUES_MAX:
            raise InvalidRequest(f"a worker needs 1 to {QUEUES_MAX} queues, not {len(self.queues)}")
        for queue in self.queues:
            if not isinstance(queue, str):
                raise InvalidRequest(f"queues must be names of queues, not {queue!r}")
            checked_text("queues", queue)
        checked_text("name", self.name)
        if not 0.1 <= self._window_s <= 43200:
            raise InvalidRequest(f"visibility_window must be 100 ms to 12 h, not {self._window_s} s")


def _checked_count(name: str, count: object, least: int, most: int) -> int:
    if not isinstance(count, int):
        raise InvalidRequest(f"{name} must be an int, not {count!r}")
    if not least <= count <= most:
        raise InvalidRequest(f"{name} must be {least} to {most:,}, not {count}")
    return count


def _calls_of(client: Client, lease: bytes, reporter: Reporter, of: WorkflowNode) -> tuple[Client, Job]:
    """Serves WorkflowNode.caller. Takes the lease and not the job, because a job that referred to itself would keep its
    payload until the garbage collector runs."""
    return client, Job(lease=lease, workflow=of, reporter=reporter)
