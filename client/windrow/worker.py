"""The worker: takes jobs from a stream, runs their handlers, and says what became of them.

The stream is consume.py's, the leases are leases.py's, and what is said of them settle.py's; here are the handlers, how
many jobs there is room for, and the way out. Refuses to guess: a job without a handler here goes back with an error
that says so.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import itertools
import logging
import os
import secrets
import socket
import time
import traceback
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import NamedTuple, TypeVar, cast

from opentelemetry import trace

from windrow.client import Client
from windrow.consume import Line, only_cause
from windrow.errors import InvalidRequest, Kill, Retry, Span
from windrow.jobs import Job, read_leased
from windrow.leases import Held, Leases, Reach
from windrow.payloads import ERROR_BYTES_MAX, Payload, duration, encode_result, error_text, seconds
from windrow.settle import Backoff, Done, Failed, Fate, Settlements
from windrow.signals import stopped_by_signals
from windrow.tracing import fail
from windrow.v1 import job_pb2, queue_pb2

log = logging.getLogger("windrow.worker")

Handler = Callable[[Job], Awaitable[Payload]] | Callable[[Job], Payload]
_HandlerT = TypeVar("_HandlerT", bound=Handler)
_DONE = Done()

CONCURRENCY_MAX = 1000
PREFETCH_MAX = 1000
# With handlers that take no time, the way to the router and back is covered by so many jobs.
_PREFETCH_LEAST = 100
# A prefetched job waits here about this long at most, or a tenth of its window: another worker may have a free hand.
_PREFETCH_WAIT_S = 0.1
_AGAIN_FIRST_S, _AGAIN_MAX_S = 0.05, 2.0
# A deploy under way heals within minutes; by then a job with 20 attempts has used ten of them.
_NO_HANDLER_FIRST_S, _NO_HANDLER_MAX_S = 5.0, 600.0
_FLUSH_S, _FLUSH_HURRIED_S = 5.0, 1.0
# Of an error's first line: lists show it.
_WHAT_CHARS_MAX = 200


class _Registered(NamedTuple):
    function: Handler
    is_async: bool


class Worker:
    """Runs handlers for the jobs of some queues.

        worker = Worker(client, ["emails"])

        @worker.handler("send_email")
        async def send_email(job): ...

        windrow.run(worker)

    `concurrency` (1 to 1,000): handlers at the same time. Jobs come as they fall due, over one stream to one router;
    none is asked for that there is no room for. `prefetch` (0 to 1,000; default: concurrency, at least 100): how many
    may wait here beyond those that run, so that handlers need not wait for jobs. The longer handlers take the fewer it
    is: what is prefetched waits 0.1 s or so. A job that waited for a third of its window all the same goes back,
    uncounted.
    `visibility_window` (100 ms to 12 h): each lease, renewed at a third of it. `name`: in the attempt history; default
    host-pid-xxxx. `grace`: how long running handlers get to finish when the worker stops. `cancel_lost`: cancel a
    coroutine handler whose lease has ended; a `def` handler cannot be cancelled and asks job.lost.is_set(). One that
    never ends keeps its place here, and its process: Python waits for threads at its exit (see run()).

    A handler returns the job's result (see Payload; None: no result; at most 64 KiB), which acks the job. It raises to
    nack it: Retry(after=...) and Kill("why") say how; any other exception leaves it to the retry policy, and is kept as
    the error: one line that tells it, then the end of its traceback, 8 KiB in all. So does sys.exit(): it ends the
    attempt, and not the worker. A kind without a handler is nacked with a delay of 5 s, doubling up to 10 minutes:
    a worker of an older release may be the one that got the job.

    What fails is logged to `windrow.worker`, with job, kind and attempt: as WARNING (a Retry as INFO), and as ERROR
    where it was the last attempt or a Kill; with the traceback of what a handler did not raise on purpose.
    """

    def __init__(
        self,
        client: Client,
        queues: str | Iterable[str],
        *,
        concurrency: int = 10,
        prefetch: int | None = None,
        visibility_window: Span = 30.0,
        name: str | None = None,
        grace: Span = 20.0,
        cancel_lost: bool = True,
    ) -> None:
        self.client = client
        self.queues = (queues,) if isinstance(queues, str) else tuple(queues)
        self.concurrency = concurrency
        self.prefetch = min(PREFETCH_MAX, max(concurrency, _PREFETCH_LEAST)) if prefetch is None else prefetch
        self.name = name or f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(2)}"
        self._window_s = seconds(visibility_window)
        self._grace_s = seconds(grace)
        self._cancel_lost = cancel_lost
        self._check()
        self._handlers: dict[str, _Registered] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stops = 0
        self._group: asyncio.TaskGroup | None = None
        self._threads: ThreadPoolExecutor | None = None
        self._context = contextvars.Context()
        self._reach = Reach(self.name)
        self._leases = Leases(
            worker=self.name,
            window_s=self._window_s,
            extend=self._extend,
            on_waited=self._on_waited,
            on_lost=self._on_lost,
        )
        self._settlements = Settlements(self._leases, self._reach, backoff=Backoff(_AGAIN_FIRST_S, _AGAIN_MAX_S))
        self._line = Line(
            client,
            queue_pb2.ConsumeStart(
                org=client.org, queues=self.queues, visibility_window=duration(self._window_s), worker=self.name
            ),
            settlements=self._settlements,
            reach=self._reach,
            room=self._room,
            take=self._take,
        )
        self._waiting: deque[Held] = deque()
        self._running: dict[Held, None] = {}
        # Set whenever a handler has ended, or the worker is told to stop.
        self._changed = asyncio.Event()
        self._stopping = asyncio.Event()
        # No handler may be begun any more.
        self._ending = False
        # Mean duration of handlers, newer ones weighing more; unknown before the first.
        self._typical_s: float | None = None

    def handler(self, *kinds: str) -> Callable[[_HandlerT], _HandlerT]:
        """Registers a function for jobs of these kinds: `async def`, or `def`, which runs in a thread."""

        def register(function: _HandlerT) -> _HandlerT:
            registered = _Registered(function, _is_async(function))
            for kind in kinds:
                if kind in self._handlers:
                    raise InvalidRequest(f"kind {kind!r} has a handler already: {self._handlers[kind].function!r}")
                self._handlers[kind] = registered
            return function

        return register

    async def run(self) -> None:
        """Works until stop(), or, in the main thread, until SIGTERM or SIGINT. Once.

        On the way out: takes no more jobs, releases those not started, lets handlers finish for `grace`, then cancels
        and releases them, and sends the last acks. A thread that goes on is left alone, and its lease to run out: this
        returns, but the process ends only with that thread, or by a signal that comes after, when signals have their
        former effect again. A `def` handler learns from job.lost that nobody waits for it any more.

        Raises a WindrowError that time cannot heal, such as PermissionDenied or RouterTooOld. Cancelled, it cancels its
        handlers and releases their jobs.
        """
        if self._loop is not None:
            raise InvalidRequest(f"worker {self.name} has run already; make a new one")
        self._loop = asyncio.get_running_loop()
        self._context = contextvars.copy_context()
        self._threads = ThreadPoolExecutor(self.concurrency, thread_name_prefix=f"{self.name}-handler")
        self._on_stop()
        with stopped_by_signals(self.stop):
            try:
                await self._serve()
            except BaseExceptionGroup as group:
                # One cause is clearer by itself.
                raise only_cause(group) from None
            finally:
                self._threads.shutdown(wait=False, cancel_futures=True)

    def stop(self) -> None:
        """Begins to stop; a second time: at once, without waiting for handlers. From any thread. `def`: see run()."""
        self._stops += 1
        if self._loop is not None:
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
            line = services.create_task(self._line.run())
            try:
                async with asyncio.TaskGroup() as self._group:
                    try:
                        await self._stopping.wait()
                        await self._wind_down()
                    finally:
                        self._ending = True
            finally:
                # Also after an error or a cancellation: what is done is said, and what is not is given back.
                self._give_back_waiting()
                if not (keeping.done() or line.done()):
                    await self._flush(line)
                self._settlements.close()
                keeping.cancel()
                line.cancel()

    # Taking jobs.

    def _room(self) -> int:
        """How many more jobs may come."""
        if self._ending or self._stopping.is_set():
            return 0
        return max(0, self.concurrency + self._prefetch_now() - len(self._running) - len(self._waiting))

    def _prefetch_now(self) -> int:
        if self._typical_s is None:
            return 0
        wait_s = min(_PREFETCH_WAIT_S, self._window_s / 10)
        return int(min(self.prefetch, self.concurrency * wait_s / max(self._typical_s, 1e-6)))

    def _take(self, messages: Sequence[job_pb2.LeasedJob], received_at: float) -> None:
        self._waiting.extend(self._leases.hold([read_leased(message) for message in messages], received_at))
        if self._ending or self._stopping.is_set():
            # They were on their way when it was told to stop.
            self._give_back_waiting()
        else:
            self._start_waiting()

    def _extend(self, leases: Sequence[Held]) -> None:
        self._settlements.extend(leases)

    def _on_waited(self, held: Held) -> None:
        # Whoever has a free hand gets it. That handlers take long is known only when they end: this tells it before.
        self._typical_s = max(self._typical_s or 0.0, self._window_s / 3)
        self._waiting.remove(held)
        self._settlements.give_back(held)

    # Running them.

    def _start_waiting(self) -> None:
        assert self._group is not None
        if self._ending or self._stopping.is_set():
            return
        while self._waiting and len(self._running) < self.concurrency:
            held = self._waiting.popleft()
            self._running[held] = None
            # Handlers begin in the context of run(), not in that of the handler which made room for them.
            held.task = self._group.create_task(
                self._work(held), name=f"windrow job {held.job.id}", context=self._context.copy()
            )
            held.task.add_done_callback(partial(self._on_done, held))

    async def _work(self, held: Held) -> None:
        try:
            if not self._leases.ended(held):
                await self._handle(held)
            elif not held.lost:
                # The loop stood still. It is lost now, not when keep() comes to it: an answer to an extend could revive
                # it until then, and nobody would work on it. That this cancels the task as well changes nothing.
                self._leases.lose(held, "it was over before the job began")
        except asyncio.CancelledError:
            self._cut_short(held)
            raise
        except BaseException:
            # Nothing begins beside what ends the worker.
            self._ending = True
            raise
        finally:
            self._let_go(held)

    async def _handle(self, held: Held) -> None:
        began = time.monotonic()
        fate = await self._fate(held)
        taken_s = time.monotonic() - began
        self._typical_s = taken_s if self._typical_s is None else 0.8 * self._typical_s + 0.2 * taken_s
        if held.lost:
            log.warning(
                "%s: attempt %d of job %s (%s) ended after its lease; nothing is said of it",
                self.name,
                held.job.attempt,
                held.job.id,
                held.job.kind,
            )
        else:
            await self._settlements.settle(held, fate)

    def _cut_short(self, held: Held) -> None:
        """Its task was cancelled."""
        if held.lost or held.settling:
            return
        if held.threaded:
            # The thread goes on, and nobody else may get the job meanwhile.
            log.warning("%s: job %s still runs in its thread; its lease is left to end", self.name, held.job.id)
            held.job.lost.set()
        else:
            self._settlements.give_back(held)

    def _let_go(self, held: Held) -> None:
        del self._running[held]
        self._changed.set()
        self._settlements.news.set()
        self._start_waiting()

    def _on_done(self, held: Held, _: asyncio.Task[None]) -> None:
        # A task that is cancelled before its first step does nothing at all, not even what its `finally` says.
        if held in self._running:
            self._cut_short(held)
            self._let_go(held)

    async def _fate(self, held: Held) -> Fate:
        job = held.job
        handler = self._handlers.get(job.kind)
        if handler is None:
            delay_s = min(_NO_HANDLER_MAX_S, _NO_HANDLER_FIRST_S * 2 ** min(job.attempt - 1, 10))
            return self._logged(
                job, Failed(error=f"no handler for kind {job.kind!r} in worker {self.name}", delay_s=delay_s)
            )
        tracing = self.client.tracing
        if not tracing.follows(job):
            return await self._outcome(handler, held, trace.INVALID_SPAN)
        with tracing.processing(job) as span:
            return await self._outcome(handler, held, span)

    async def _outcome(self, handler: _Registered, held: Held, span: trace.Span) -> Fate:
        try:
            if handler.is_async:
                result = await cast("Awaitable[Payload]", handler.function(held.job))
            else:
                result = await self._in_thread(cast("Callable[[Job], Payload]", handler.function), held)
            return _DONE if result is None else Done(result=encode_result(result))
        except KeyboardInterrupt:
            # Nothing of the handler's: whoever sits before it wants the process to end.
            raise
        except BaseException as error:
            # Whatever a handler raises becomes its job's error.
            if isinstance(error, asyncio.CancelledError) and _is_cancelled():
                raise
            if not isinstance(error, Retry):
                fail(span, error)
            failed, why = _told(error)
            return self._logged(held.job, failed, why)

    def _logged(self, job: Job, failed: Failed, error: BaseException | None = None) -> Failed:
        """The same, after it is logged."""
        # What a handler asks for is no surprise: nobody need be told where in its code it stands.
        asked = isinstance(error, Retry | Kill)
        level = logging.INFO if asked else logging.WARNING
        what = ", killed" if failed.kill else ", its last" if job.attempt >= job.max_attempts else ""
        log.log(
            logging.ERROR if what else level,
            "%s: job %s (%s), attempt %d of %d failed%s: %s",
            self.name,
            job.id,
            job.kind,
            job.attempt,
            job.max_attempts,
            what,
            failed.error.partition("\n")[0],
            exc_info=None if error is None or asked else (type(error), error, _frames(error)),
        )
        return failed

    async def _in_thread(self, function: Callable[[Job], Payload], held: Held) -> Payload:
        context = contextvars.copy_context()

        def run() -> Payload:
            held.threaded = True
            try:
                return context.run(function, held.job)
            except (StopIteration, GeneratorExit) as error:
                # No future takes the first (PEP 479): the worker would wait for this thread, and keep its lease, for
                # ever. The second closes whatever coroutines await the future, and cannot be caught there.
                raise RuntimeError(f"the handler raised {type(error).__name__}") from error

        return await asyncio.get_running_loop().run_in_executor(self._threads, run)

    def _on_lost(self, held: Held) -> None:
        if held in self._waiting:
            self._waiting.remove(held)
            self._settlements.news.set()
        # A thread goes on whatever is cancelled; its slot stays taken until it ends.
        if held.task is not None and self._cancel_lost and not held.threaded:
            held.task.cancel()

    # The way out.

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
        if self._running:
            log.warning("%s: handlers that did not finish in time, and are cut off: %d", self.name, len(self._running))
        for held in self._running:
            if held.task is not None:
                held.task.cancel()

    def _give_back_waiting(self) -> None:
        while self._waiting:
            self._settlements.give_back(self._waiting.popleft())

    async def _flush(self, line: asyncio.Task[None]) -> None:
        """Until all is answered and the stream has ended in order."""
        self._line.close()
        await asyncio.wait([line], timeout=_FLUSH_S if self._stops < 2 else _FLUSH_HURRIED_S)
        if not self._settlements.idle.is_set():
            log.warning("%s: stopped before the fate of every job was told; their leases are left to end", self.name)

    def _check(self) -> None:
        if not self.queues:
            raise InvalidRequest("a worker needs one queue or more")
        if not 1 <= self.concurrency <= CONCURRENCY_MAX:
            raise InvalidRequest(f"concurrency must be 1 to {CONCURRENCY_MAX:,}, not {self.concurrency}")
        if not 0 <= self.prefetch <= PREFETCH_MAX:
            raise InvalidRequest(f"prefetch must be 0 to {PREFETCH_MAX:,}, not {self.prefetch}")
        if not 0.1 <= self._window_s <= 43200:
            raise InvalidRequest(f"visibility_window must be 100 ms to 12 h, not {self._window_s} s")


def _is_async(handler: Handler) -> bool:
    return inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(type(handler).__call__)


def _is_cancelled() -> bool:
    """Whether it is the task that was cancelled, and not something inside its handler."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _told(error: BaseException) -> tuple[Failed, BaseException]:
    """What a handler's error makes of its job, and the error to log. Raises nothing, whatever methods the error has."""
    try:
        match error:
            case Retry():
                # Said anew: a subclass may hold a span that no nack can carry.
                after = Retry(after=error.after).after
                told = str(error) or "the handler asked for a retry"
                return Failed(error=told, delay_s=None if after is None else seconds(after)), error
            case Kill():
                return Failed(error=str(error) or "killed by the handler", kill=True), error
            case _:
                return Failed(error=_described(error)), error
    except BaseException as worse:  # noqa: BLE001 - such as the AttributeError of a Retry whose __init__ was never called
        told = f"{type(error).__name__}, of which no more can be told"
        with suppress(BaseException):
            # With the first one, as what it came of.
            told = _described(worse)
        return Failed(error=told, kill=isinstance(error, Kill)), worse


def _described(error: BaseException) -> str:
    """What was raised, in one line, and below it the end of the traceback: 8 KiB in all."""
    described = traceback.TracebackException(type(error), error, _frames(error))
    told = "".join(described.format_exception_only()).splitlines()
    # Of a SyntaxError the place comes first.
    what = error_text(next((line for line in told if line[:1].strip()), type(error).__name__)[:_WHAT_CHARS_MAX])
    where = "".join(itertools.islice(described.format(), 10_000)).rstrip()
    return f"{what}\n{error_text(where, bytes_max=ERROR_BYTES_MAX - len(what.encode()) - 1)}"


def _frames(error: BaseException) -> TracebackType | None:
    """The traceback from the handler on: what led there is this module's, and a thread's."""
    handler = frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        if frame.tb_frame.f_code.co_filename == __file__:
            handler = frame.tb_next
        frame = frame.tb_next
    return handler
