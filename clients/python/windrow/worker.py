"""The worker: takes jobs from a stream, runs their handlers, and reports the outcomes.

consume_stream.py has the stream, leases.py the leases, handlers.py the handlers, and settlements.py the reports.
job_runner.py decides how many jobs to ask for and when each job begins. This module has the methods that a program
calls. It also shuts the worker down.
"""

from __future__ import annotations

import asyncio
import enum
import os
import secrets
import socket
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Literal

from opentelemetry import metrics

from windrow.batch_handlers import BatchHandlers, BatchHandlerT
from windrow.client import Client
from windrow.consume_stream import ConsumeStream, only_cause
from windrow.declarations import Declarations
from windrow.errors import InvalidRequest, Span
from windrow.handlers import Handlers, HandlerT, Middleware
from windrow.job_runner import Interrupted, JobRunner
from windrow.jobs import Job, WorkflowNode, read_leased
from windrow.leases import Connectivity, log
from windrow.new_jobs import NewJob
from windrow.payloads import Payload, checked_count, checked_functions, checked_text, duration, named_seconds
from windrow.processes import is_handler_process
from windrow.reports import Report, Reporter
from windrow.schedules import Schedule
from windrow.signals import stopped_by_signals
from windrow.unhandled import Unhandled
from windrow.v1 import job_pb2, queue_pb2

CONCURRENCY_MAX = 1000
# The contract's limit for one stream.
QUEUES_MAX = 64
PREFETCH_MAX = 5000
# This number of jobs is enough for the time of a round trip to the router, even if handlers take almost no time.
_PREFETCH_MIN = 100
_FLUSH_S, _FLUSH_HURRIED_S = 5.0, 1.0


class AllOrgs(enum.Enum):
    """The value of `orgs` with which a worker takes the jobs of all orgs of the cluster."""

    ALL = "all"


ALL = AllOrgs.ALL


class Worker:
    """Runs handlers for the jobs of 1 to 64 queues.

        worker = Worker(client, ["emails"])

        @worker.handler("send_email")
        async def send_email(job): ...

        windrow.run(worker)

    Jobs arrive as they fall due, over one stream to one router. The worker asks only for as many jobs as it has room
    for.

    - `orgs` (default: the client's org): `windrow.ALL` takes jobs of every org of the cluster; job.org names the org.
      The client needs a key for all orgs with the scopes `consume` and `cluster`. Orgs share the time of these workers
      by their weights (`windrow weights`): an org is charged for the time for which its jobs are leased, even if the
      jobs only wait in a worker. So the default of `prefetch` is 0 for such a worker: it takes a job only when the job
      can begin.
    - `concurrency` (1 to 1,000; default 10): how many handlers run at the same time.
    - `prefetch` (0 to 5,000; default: 5 × concurrency, at least 100): how many jobs may wait in the worker besides the
      jobs that run, so that handlers need not wait for jobs. The longer handlers take, the fewer jobs the worker
      prefetches, so that a job waits for about 0.1 s. The worker releases a job that has waited for a third of its
      window. This lease does not count as an attempt.
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
      longer declared. If this is False, a WARNING names these schedules. If a worker of an older release starts again
      during a deploy, it also deletes the schedules that only the new release declares.

    A handler that runs for long can report its progress to people, and a checkpoint to the job's next attempt (see
    Job.report). A job that is cancelled loses its lease: see `cancel_lost`.

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
        if not isinstance(queues, Iterable):
            raise InvalidRequest(f"queues must be names of queues, not {queues!r}")
        self.queues = (queues,) if isinstance(queues, str) else tuple(queues)
        self.concurrency = checked_count("concurrency", concurrency, 1, CONCURRENCY_MAX)
        if prefetch is None:
            prefetch = max(5 * concurrency, _PREFETCH_MIN) if orgs is None else 0
        self.prefetch = checked_count("prefetch", prefetch, 0, PREFETCH_MAX)
        self.name = name or f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(2)}"
        self._window_s = named_seconds("visibility_window", visibility_window)
        grace_s = named_seconds("grace", grace)
        if not grace_s >= 0:
            raise InvalidRequest(f"grace must be 0 s or more, not {grace_s} s")
        self._check()
        self._handlers = Handlers(
            self.name,
            middleware=checked_functions("middleware", middleware),
            tracing=client.tracing,
            unhandled=Unhandled(self.name, meter_provider),
            abandoned_ended=lambda: self._runner.on_place(),
        )
        self._batch_handlers = BatchHandlers(self.name, self._handlers, client.tracing)
        self._declarations = Declarations(
            client=client, declared_by=declares_as or f"worker:{self.queues[0]}", removes=removes_undeclared
        )
        connectivity = Connectivity(self.name)
        self._runner = JobRunner(
            worker=self.name,
            handlers=self._handlers,
            batch_handlers=self._batch_handlers,
            connectivity=connectivity,
            concurrency=self.concurrency,
            prefetch=self.prefetch,
            window_s=self._window_s,
            grace_s=grace_s,
            cancel_lost=cancel_lost,
        )
        self._stream = ConsumeStream(
            client,
            self._start(),
            settlements=self._runner.settlements,
            connectivity=connectivity,
            jobs_wanted=self._runner.jobs_wanted,
            take=self._take,
            revoked=self._runner.leases.revoked,
        )
        self._reporter = Reporter(self._report, self._when_stored)
        # The event loop of run().
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stops = 0

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
        attempt runs. At most 1,000 threads continue without a place; each further thread keeps its place until it ends.

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
        the order of the jobs: the value that a handler of single jobs would return, or an exception for this job alone,
        such as Retry("why"). If the batch handler raises, all its jobs fail, or are snoozed, in the same way.

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
        Schedule. The kind of the jobs is the function's name. The name of the schedule is `name`, or the function's
        name if `name` is not given. The jobs go into the worker's first queue unless `queue` names another one of its
        queues. job.scheduled_run has the nominal time. `timeout` and `isolate` are as in handler().

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

        To shut down, the worker takes no more jobs and releases the jobs that have not begun. It waits up to `grace`
        for the handlers. Then it cancels the handlers that still run, releases their jobs, and sends the last acks. It
        also releases the job if a cancelled handler returns, or fails during its clean-up. But if a cancelled handler
        raises Snooze, Kill or a Retry with a delay, that is the job's outcome. The worker cannot stop a `def` handler:
        it sets job.lost, lets the lease expire, and run() returns. The process then ends when the handler's thread
        ends, or at the next signal, because run() has restored the old signal handlers. After a second signal, run()
        restores the old signal handlers at once, so a third signal ends the process even if a handler does not end when
        it is cancelled.

        Raises a WindrowError that no retry can fix, such as PermissionDenied or RouterTooOld. If the task of run() is
        cancelled, the worker cancels its handlers and releases their jobs. If routers refuse the token after they have
        accepted one, and `token` is a function, the worker does not give up for a minute: it calls the function again
        and again, and tries the tokens that it gets. Meanwhile handlers continue, and an error of the function is only
        logged.
        """
        if self._loop is not None:
            raise InvalidRequest(f"worker {self.name} has run already; make a new one")
        if is_handler_process():
            # This process runs a handler. It has imported the program's module, which calls run(): do nothing.
            return
        self._handlers.open(self.concurrency)
        self._stream.tell_kinds(self._handlers.kinds)
        self._loop = asyncio.get_running_loop()
        self._runner.open()
        self._on_stop()
        with stopped_by_signals(self.stop):
            try:
                await self._serve()
            except BaseExceptionGroup as group:
                cause = only_cause(group)
                if isinstance(cause, Interrupted) and cause.__cause__ is not None:
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
            self._runner.stop(hurried=self._stops > 1)

    async def _serve(self) -> None:
        if self._runner.stopping.is_set():
            return
        async with asyncio.TaskGroup() as services:
            keeping = services.create_task(self._runner.leases.keep())
            stream = services.create_task(self._stream.run())
            declaring = services.create_task(self._declarations.keep())
            try:
                await self._runner.run()
            finally:
                # Report the outcomes and release the other jobs, also after an error or a cancellation.
                self._runner.give_back_waiting()
                if not (keeping.done() or stream.done()):
                    await self._flush(stream)
                if not self._runner.settlements.idle.is_set():
                    log.warning("%s: stopped before every outcome was reported; those leases will expire", self.name)
                self._runner.settlements.close()
                keeping.cancel()
                stream.cancel()
                declaring.cancel()

    def _read(self, message: job_pb2.LeasedJob) -> Job:
        job = read_leased(message, reporter=self._reporter)
        if job.workflow is not None:
            client = self.client.for_org(job.org) if job.org else self.client
            caller = partial(_calls_of, client, job.lease, self._reporter)
            return replace(job, workflow=replace(job.workflow, caller=caller))
        return job

    def _take(self, messages: Sequence[job_pb2.LeasedJob], received_at: float) -> None:
        self._handlers.on_jobs()
        self._runner.take([self._read(message) for message in messages], received_at)

    def _report(self, lease: bytes, report: Report) -> None:
        """Takes a handler's report. The handler may run in a thread."""
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
        if held := self._runner.running_under(lease):
            self._runner.settlements.report(held, report)

    def _when_stored(self, lease: bytes) -> Future[None]:
        """Returns a future that is completed when no report about this lease is on its way to the router.
        Thread-safe."""
        stored = Future[None]()
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(self._on_when_stored, lease, stored)
        except RuntimeError:
            # A thread may outlive the worker, whose event loop is then closed.
            stored.set_result(None)
        return stored

    def _on_when_stored(self, lease: bytes, stored: Future[None]) -> None:
        if held := self._runner.running_under(lease):
            self._runner.settlements.when_stored(held, stored)
        elif stored.set_running_or_notify_cancel():
            stored.set_result(None)

    async def _flush(self, stream: asyncio.Task[None]) -> None:
        """Closes the stream. Waits a few seconds at most until every report is answered and the stream has ended."""
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


def _calls_of(client: Client, lease: bytes, reporter: Reporter, of: WorkflowNode) -> tuple[Client, Job]:
    """Serves WorkflowNode.caller. Takes the lease and not the job, because a job that referred to itself would keep its
    payload until the garbage collector runs."""
    return client, Job(lease=lease, workflow=of, reporter=reporter)
