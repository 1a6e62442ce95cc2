"""The worker: dequeues jobs, runs their handlers, and says what became of them.

The leases themselves are leases.py's, the calls that end them settle.py's; here are the handlers, the polling and the
way out. Refuses to guess: a job without a handler here goes back with an error that says so.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import itertools
import logging
import os
import random
import secrets
import socket
import time
import traceback
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar, cast

from windrow.calls import NEVER_RETRIED
from windrow.client import JOBS_MAX, Client, dequeue_request
from windrow.errors import TRANSIENT, InvalidRequest, Kill, Retry, Span
from windrow.jobs import Job, read_leased
from windrow.leases import Held, Leases, Reach
from windrow.payloads import Payload, duration, encode_result, seconds
from windrow.settle import Done, Failed, Fate, Settlements
from windrow.signals import stopped_by_signals
from windrow.tracing import fail

log = logging.getLogger("windrow.worker")

Handler = Callable[[Job], Awaitable[Payload]] | Callable[[Job], Payload]
_HandlerT = TypeVar("_HandlerT", bound=Handler)

_IDLE_FIRST_S, _IDLE_MAX_S = 0.02, 0.5
_AWAY_FIRST_S, _AWAY_MAX_S = 0.05, 2.0
_POLL_TIMEOUT_S = 10.0
# A deploy under way heals within minutes; by then a job with 20 attempts has used ten of them.
_NO_HANDLER_FIRST_S, _NO_HANDLER_MAX_S = 5.0, 600.0
# While handlers take longer, a prefetched job would wait here longer than it takes to fetch it when there is room.
_PREFETCH_WHILE_BELOW_S = 1.0
_FLUSH_S, _FLUSH_HURRIED_S = 5.0, 1.0


class Worker:
    """Runs handlers for the jobs of some queues.

        worker = Worker(client, ["emails"])

        @worker.handler("send_email")
        async def send_email(job): ...

        windrow.run(worker)

    `concurrency`: handlers at the same time. `prefetch` (0 to concurrency; default: concurrency): jobs leased beyond
    that so that none is waited for, as long as handlers take less than a second on average. `visibility_window`: each
    lease, renewed at a third of it. `name`: in the attempt history; default host-pid-xxxx. `grace`: how long running
    handlers get to finish when the worker stops. `cancel_lost`: cancel a coroutine handler whose lease has ended; a
    `def` handler cannot be cancelled and asks job.lost.is_set().

    A handler returns the job's result (see Payload; None: no result; at most 64 KiB), which acks the job. It raises to
    nack it: Retry(after=...) and Kill("why") say how; any other exception leaves it to the retry policy, with the last
    8 KiB of the traceback as the error. A kind without a handler is nacked with a delay of 5 s, doubling up to 10
    minutes: a worker of an older release may be the one that got the job.
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
        self.prefetch = concurrency if prefetch is None else prefetch
        self.name = name or f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(2)}"
        self._window_s = seconds(visibility_window)
        self._grace_s = seconds(grace)
        self._cancel_lost = cancel_lost
        self._check()
        self._handlers: dict[str, Handler] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stops = 0
        self._group: asyncio.TaskGroup | None = None
        self._threads: ThreadPoolExecutor | None = None
        self._context = contextvars.Context()
        self._reach = Reach(self.name)
        self._leases = Leases(
            client, worker=self.name, window_s=self._window_s, reach=self._reach, on_lost=self._on_lost
        )
        self._settlements = Settlements(client, self._leases, self._reach)
        self._waiting: deque[Held] = deque()
        self._running: dict[Held, None] = {}
        # Set whenever there may be room, or the worker is told to stop.
        self._changed = asyncio.Event()
        self._stopping = asyncio.Event()
        self._idle = _Pauses(_IDLE_FIRST_S, _IDLE_MAX_S)
        self._away = _Pauses(_AWAY_FIRST_S, _AWAY_MAX_S)
        # Mean duration of handlers, newer ones weighing more; unknown before the first.
        self._typical_s: float | None = None

    def handler(self, *kinds: str) -> Callable[[_HandlerT], _HandlerT]:
        """Registers a function for jobs of these kinds: `async def`, or `def`, which runs in a thread."""

        def register(function: _HandlerT) -> _HandlerT:
            for kind in kinds:
                if kind in self._handlers:
                    raise InvalidRequest(f"kind {kind!r} has a handler already: {self._handlers[kind]!r}")
                self._handlers[kind] = function
            return function

        return register

    async def run(self) -> None:
        """Works until stop(), or, in the main thread, until SIGTERM or SIGINT. Once.

        On the way out: takes no more jobs, releases those not started, lets handlers finish for `grace`, then cancels
        and releases them, and sends the last acks. A thread that goes on is left alone, and its lease to run out.

        Raises a WindrowError that time cannot heal, such as PermissionDenied. Cancelled, it cancels its handlers and
        releases their jobs.
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
                raise _only_cause(group) from None
            finally:
                self._threads.shutdown(wait=False, cancel_futures=True)

    def stop(self) -> None:
        """Begins to stop; a second time: at once, without waiting for handlers. From any thread."""
        self._stops += 1
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._on_stop)

    def _on_stop(self) -> None:
        if self._stops:
            self._stopping.set()
            self._changed.set()

    async def _serve(self) -> None:
        async with asyncio.TaskGroup() as services:
            running = [services.create_task(run()) for run in (self._leases.keep, *self._settlements.runs())]
            try:
                async with asyncio.TaskGroup() as self._group:
                    await self._poll()
                    await self._wind_down()
            finally:
                # Also after an error or a cancellation: what is done is said, and what is not is given back.
                self._give_back_waiting()
                if not any(task.done() for task in running):
                    await self._flush()
                for task in running:
                    task.cancel()

    # Taking jobs.

    async def _poll(self) -> None:
        while room := await self._wait_for_room():
            # Before the call: from here on the clock of its leases runs.
            since = time.monotonic()
            self._waiting.extend(self._leases.hold(await self._fetch(room), since))
            self._start_waiting()

    async def _fetch(self, max_jobs: int) -> list[Job]:
        """Asks once for jobs; if there are none, waits a little before it says so."""
        request = dequeue_request(
            self.client.org, self.queues, max_jobs=max_jobs, window=duration(self._window_s), worker=self.name
        )
        try:
            response = await self.client.calls.call(
                lambda stub: stub.Dequeue, request, retried=NEVER_RETRIED, timeout_s=_POLL_TIMEOUT_S
            )
        except TRANSIENT as error:
            self._reach.failed(error)
            await self._pause(max(self._away.next_s(), error.retry_after or 0.0))
            return []
        self._reach.answered()
        self._away.reset()
        if not response.jobs:
            await self._pause(self._idle.next_s())
            return []
        self._idle.reset()
        return [read_leased(job) for job in response.jobs]

    async def _wait_for_room(self) -> int:
        """How many jobs to ask for; 0: none, the worker stops."""
        while not self._stopping.is_set():
            quick = self._typical_s is not None and self._typical_s < _PREFETCH_WHILE_BELOW_S
            prefetch = self.prefetch if quick else 0
            room = self.concurrency + prefetch - len(self._running) - len(self._waiting)
            # Half of what is prefetched goes in one call; one call for each job would be many.
            if room >= max(1, prefetch // 2):
                return min(room, JOBS_MAX)
            self._changed.clear()
            await self._changed.wait()
        return 0

    async def _pause(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stopping.wait()

    # Running them.

    def _start_waiting(self) -> None:
        assert self._group is not None
        while self._waiting and len(self._running) < self.concurrency and not self._stopping.is_set():
            held = self._waiting.popleft()
            if not held.lost:
                self._running[held] = None
                # Handlers begin in the context of run(), not in that of the handler which made room for them.
                held.task = self._group.create_task(
                    self._work(held), name=f"windrow job {held.job.id}", context=self._context.copy()
                )

    async def _work(self, held: Held) -> None:
        began = time.monotonic()
        ending = False
        try:
            fate = await self._fate(held)
            taken_s = time.monotonic() - began
            self._typical_s = taken_s if self._typical_s is None else 0.8 * self._typical_s + 0.2 * taken_s
            if held.lost:
                log.warning("%s: job %s ended after its lease; nothing is said of it", self.name, held.job.id)
            else:
                await self._settlements.settle(held, fate)
        except asyncio.CancelledError:
            ending = not held.lost
            if held.threaded and not held.lost:
                # The thread goes on, and nobody else may get the job meanwhile.
                log.warning("%s: job %s still runs in its thread; its lease is left to end", self.name, held.job.id)
                held.job.lost.set()
            elif not held.lost and not held.settling:
                self._settlements.give_back(held)
            raise
        finally:
            del self._running[held]
            self._changed.set()
            if not ending:
                self._start_waiting()

    async def _fate(self, held: Held) -> Fate:
        job = held.job
        handler = self._handlers.get(job.kind)
        if handler is None:
            delay_s = min(_NO_HANDLER_MAX_S, _NO_HANDLER_FIRST_S * 2 ** min(job.attempt - 1, 10))
            log.warning("%s: no handler for kind %r; job %s again in %.0f s", self.name, job.kind, job.id, delay_s)
            return Failed(error=f"no handler for kind {job.kind!r} in worker {self.name}", delay_s=delay_s)
        with self.client.tracing.processing(job) as span:
            try:
                return Done(result=encode_result(await self._call(handler, held)))
            except Retry as again:
                after_s = None if again.after is None else seconds(again.after)
                return Failed(error=str(again) or "the handler asked for a retry", delay_s=after_s)
            except Kill as end:
                fail(span, end)
                return Failed(error=str(end) or "killed by the handler", kill=True)
            except asyncio.CancelledError as error:
                task = asyncio.current_task()
                if task is not None and task.cancelling():
                    raise
                # Of something inside the handler, not of the handler.
                fail(span, error)
                return Failed(error=_last_lines(error))
            except Exception as error:  # noqa: BLE001 - whatever a handler raises becomes its job's error
                fail(span, error)
                log.info("%s: job %s (%s), attempt %d failed: %r", self.name, job.id, job.kind, job.attempt, error)
                return Failed(error=_last_lines(error))

    async def _call(self, handler: Handler, held: Held) -> Payload:
        if _is_async(handler):
            return await cast("Callable[[Job], Awaitable[Payload]]", handler)(held.job)
        context = contextvars.copy_context()
        plain = cast("Callable[[Job], Payload]", handler)

        def run() -> Payload:
            held.threaded = True
            try:
                return context.run(plain, held.job)
            except StopIteration as error:
                # No future takes one (PEP 479): the worker would wait for this thread, and keep its lease, for ever.
                raise RuntimeError("the handler raised StopIteration") from error

        return await asyncio.get_running_loop().run_in_executor(self._threads, run)

    def _on_lost(self, held: Held) -> None:
        if held in self._waiting:
            self._waiting.remove(held)
            self._changed.set()
        # A thread goes on whatever is cancelled; its slot stays taken until it ends.
        if held.task is not None and self._cancel_lost and not held.threaded:
            held.task.cancel()

    # The way out.

    async def _wind_down(self) -> None:
        self._give_back_waiting()
        with suppress(TimeoutError):
            async with asyncio.timeout(self._grace_s):
                while self._running and self._stops < 2:
                    self._changed.clear()
                    await self._changed.wait()
        for held in self._running:
            if held.task is not None:
                held.task.cancel()

    def _give_back_waiting(self) -> None:
        while self._waiting:
            self._settlements.give_back(self._waiting.popleft())

    async def _flush(self) -> None:
        try:
            async with asyncio.timeout(_FLUSH_S if self._stops < 2 else _FLUSH_HURRIED_S):
                await self._settlements.flushed()
        except TimeoutError:
            log.warning("%s: stopped before the fate of every job was told; their leases are left to end", self.name)

    def _check(self) -> None:
        if not self.queues:
            raise InvalidRequest("a worker needs one queue or more")
        if not 1 <= self.concurrency <= JOBS_MAX:
            raise InvalidRequest(f"concurrency must be 1 to {JOBS_MAX:,}, not {self.concurrency}")
        if not 0 <= self.prefetch <= self.concurrency:
            raise InvalidRequest(f"prefetch must be 0 to concurrency ({self.concurrency}), not {self.prefetch}")
        if not 0.1 <= self._window_s <= 43200:
            raise InvalidRequest(f"visibility_window must be 100 ms to 12 h, not {self._window_s} s")


class _Pauses:
    """Growing pauses with jitter: 2, 4, 8 ... times the first, up to a maximum, each between its half and its whole."""

    def __init__(self, first_s: float, max_s: float) -> None:
        self._first_s = first_s
        self._max_s = max_s
        self._count = 0

    def next_s(self) -> float:
        whole = min(self._max_s, self._first_s * 2.0 ** min(self._count, 16))
        self._count += 1
        return whole * random.uniform(0.5, 1.0)

    def reset(self) -> None:
        self._count = 0


def _only_cause(error: BaseException) -> BaseException:
    match error:
        case BaseExceptionGroup(exceptions=(one,)):
            return _only_cause(cast("BaseException", one))
        case _:
            return error


def _is_async(handler: Handler) -> bool:
    return inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(type(handler).__call__)


def _last_lines(error: BaseException) -> str:
    """The traceback without this module's own frames; settle.py keeps its last 8 KiB."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__ and frames.tb_next is not None:
        frames = frames.tb_next
    lines = traceback.TracebackException(type(error), error, frames).format()
    return "".join(itertools.islice(lines, 10_000)).rstrip()
