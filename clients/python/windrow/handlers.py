"""The handlers of a worker, and how each is run: in a task, a thread or a process, within its time. Tells what becomes
of the job, whatever the handler raises.

Takes no jobs and reports nothing: that is the worker's (worker.py). processes.py has the processes.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import logging
import math
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any, Literal, NamedTuple, TypeVar, cast

from opentelemetry import trace

from windrow.errors import InvalidRequest, Span
from windrow.failures import Failure, TimedOut, frames_of
from windrow.jobs import Job, LostReason
from windrow.leases import HeldLease, log
from windrow.outcomes import Action, Done, Failed, Outcome, Snoozed, action_of
from windrow.payloads import RESULT_BYTES_MAX, Payload, encode, seconds
from windrow.processes import HandlerProcess, can_be_sent
from windrow.tracing import Tracing, fail
from windrow.unhandled import Unhandled

Handler = Callable[[Job], Awaitable[Payload]] | Callable[[Job], Payload]
CallNext = Callable[[Job], Awaitable[Payload]]
Middleware = Callable[[Job, CallNext], Awaitable[Payload]]
HandlerT = TypeVar("HandlerT", bound=Handler)
_DONE = Done()

# Threads of handlers that timed out. Each may run for ever, and cannot be stopped.
_ABANDONED_MAX = 1000
# How much of a failure a line of the log shows.
_SUMMARY_CHARS_MAX = 200
# A handler is stopped a tenth of its job's max_runtime before its end, and at most by so much.
_MARGIN_S_MAX = 1.0


class _Registered(NamedTuple):
    function: Handler
    is_async: bool
    timeout_s: float | None
    isolated: bool


class Handlers:
    """`abandoned_ended` is called when a thread that was left alone has ended: there may be one more place."""

    def __init__(
        self,
        worker: str,
        *,
        middleware: Sequence[Middleware],
        tracing: Tracing,
        unhandled: Unhandled,
        abandoned_ended: Callable[[], None],
    ) -> None:
        self._worker = worker
        self._middleware = tuple(middleware)
        self._tracing = tracing
        self._unhandled = unhandled
        self._abandoned_ended = abandoned_ended
        self._by_kind: dict[str, _Registered] = {}
        self._threads: ThreadPoolExecutor | None = None
        # Those that run no job.
        self._processes: list[HandlerProcess] = []
        # Whether a handler has a span although its job carries no trace.
        self._makes_spans = False
        # How many threads of handlers that timed out still run.
        self._abandoned = 0

    def __contains__(self, kind: str) -> bool:
        return kind in self._by_kind

    def add(
        self, kinds: Sequence[str], *, timeout: Span | None, isolate: Literal["process"] | None
    ) -> Callable[[HandlerT], HandlerT]:
        """Returns a decorator that registers a function for jobs of these kinds: see Worker.handler()."""
        timeout_s = None if timeout is None else seconds(timeout)
        if timeout_s is not None and not 0 < timeout_s < math.inf:
            raise InvalidRequest(f"timeout must be more than 0 s, not {timeout_s} s; None: no timeout")
        if isolate not in (None, "process"):
            raise InvalidRequest(f'isolate must be "process" or None, not {isolate!r}')

        def register(function: HandlerT) -> HandlerT:
            registered = _Registered(function, _is_async(function), timeout_s, isolate == "process")
            if registered.is_async and registered.isolated:
                raise InvalidRequest(f"only a def can run in a process, and {function!r} is an async def")
            for kind in kinds:
                if kind in self._by_kind:
                    raise InvalidRequest(f"kind {kind!r} has a handler already: {self._by_kind[kind].function!r}")
                self._by_kind[kind] = registered
            return function

        return register

    def open(self, concurrency: int) -> None:
        """Raises InvalidRequest if a handler cannot run in a process."""
        for kind, handler in self._by_kind.items():
            if handler.isolated and not can_be_sent(handler.function):
                raise InvalidRequest(
                    f"kind {kind!r}: {handler.function!r} cannot be imported by name in another process; make it a "
                    "function of a module"
                )
        # A pool makes threads only as it needs them.
        self._threads = ThreadPoolExecutor(concurrency + _ABANDONED_MAX, thread_name_prefix=f"{self._worker}-handler")

    def close(self) -> None:
        """Ends the processes. Threads cannot be stopped."""
        for process in self._processes:
            process.close()
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    @property
    def places_lost(self) -> int:
        """How many places threads of handlers that timed out keep."""
        return max(0, self._abandoned - _ABANDONED_MAX)

    def on_jobs(self) -> None:
        """To be called when jobs have come, before their handlers run."""
        self._makes_spans = self._tracing.has_sdk()

    async def run(self, held: HeldLease) -> Action:
        """Runs the job's handler. Returns what becomes of the job."""
        job = held.job
        handler = self._by_kind.get(job.kind)
        if handler is None:
            return self._unhandled.give_back(job)
        if not (job.traceparent or self._makes_spans):
            return await self._outcome(handler, held, trace.INVALID_SPAN)
        with self._tracing.processing(job) as span:
            return await self._outcome(handler, held, span)

    async def _outcome(self, handler: _Registered, held: HeldLease, span: trace.Span) -> Action:
        job = held.job
        run = self._run if handler.timeout_s is None and job.max_runtime is None else self._run_in_time
        try:
            if self._middleware:
                call: CallNext = partial(run, handler, held)
                for middleware in reversed(self._middleware):
                    call = _around(middleware, call)
                result = await call(job)
            else:
                result = await run(handler, held, job)
            return _DONE if result is None else self._done(held.job, encode(result, what="result"))
        except BaseException as error:
            # Whatever a handler raises becomes its job's error. But Ctrl-C is meant for the worker: Python raises its
            # KeyboardInterrupt in the main thread. One from another thread or process is the handler's own.
            if isinstance(error, KeyboardInterrupt) and handler.is_async:
                raise
            if isinstance(error, asyncio.CancelledError) and _is_cancelled():
                raise
            if not isinstance(error, Outcome) or error.is_failure:
                fail(span, error)
            process = held.process
            if process is not None and process.error is error and process.action is not None:
                # The traceback is in the failure: errors lose theirs on their way from another process.
                action, cause, frames = process.action, error, None
            else:
                action, cause = action_of(error, runner=__file__)
                frames = frames_of(cause, runner=__file__)
            if isinstance(action, Failed):
                self._log_failure(held.job, action.failure, cause, frames)
            elif isinstance(action, Snoozed):
                self._log_snooze(held.job, action)
            return action

    async def _run_in_time(self, handler: _Registered, held: HeldLease, job: Job) -> Payload:
        """Runs a handler that has a timeout, or whose job has. Raises TimedOut if it does not finish in time."""
        timeout_s = math.inf if handler.timeout_s is None else handler.timeout_s
        message = f"the handler did not finish within {timeout_s:g} s"
        if job.max_runtime is not None:
            # Earlier than the shard ends the lease, so that it still takes the failure.
            runtime_s = job.max_runtime.total_seconds()
            left_s = held.until - min(runtime_s / 10, _MARGIN_S_MAX) - time.monotonic()
            if left_s < timeout_s:
                timeout_s, message = left_s, f"the attempt has used up the job's max_runtime of {runtime_s:g} s"
        # It never ends by itself: on_timeout() ends it, once the handler can see why.
        scope = asyncio.timeout(None)
        loop = asyncio.get_running_loop()

        def on_timeout() -> None:
            held.job.lost.set(LostReason.TIMED_OUT)
            scope.reschedule(loop.time())

        timer = loop.call_later(timeout_s, on_timeout)
        try:
            async with scope:
                return await self._run(handler, held, job)
        except TimeoutError as error:
            cancelled = error.__cause__
            if not (scope.expired() and isinstance(cancelled, asyncio.CancelledError)):
                raise
            if held.thread is not None:
                frames = _frames_now(held.thread)
            else:
                frames = None if held.process is not None else frames_of(cancelled, runner=__file__)
            raise TimedOut(message).with_traceback(frames) from None
        finally:
            timer.cancel()

    async def _run(self, handler: _Registered, held: HeldLease, job: Job) -> Payload:
        if handler.is_async:
            return await cast("Awaitable[Payload]", handler.function(job))
        function = cast("Callable[[Job], Payload]", handler.function)
        if not handler.isolated:
            return await self._in_thread(function, held, job)
        while self._processes and not self._processes[-1].is_reusable:
            self._processes.pop().close()
        held.process = process = self._processes.pop() if self._processes else HandlerProcess()
        try:
            return await self._in_thread(partial(process.run, function), held, job)
        finally:
            if process.is_reusable:
                self._processes.append(process)

    def _done(self, job: Job, result: bytes) -> Done:
        """Drops a result that is too large. The work is done: to fail the attempt would only do it again."""
        if len(result) <= RESULT_BYTES_MAX:
            return Done(result=result)
        log.warning(
            "%s: job %s (%s), attempt %d: its result has %s bytes and is not stored; at most %s are allowed",
            self._worker,
            job.id,
            job.kind,
            job.attempt,
            f"{len(result):,}",
            f"{RESULT_BYTES_MAX:,}",
        )
        return _DONE

    def _log_snooze(self, job: Job, snoozed: Snoozed) -> None:
        log.info(
            "%s: job %s (%s), attempt %d is snoozed for %g s%s",
            self._worker,
            job.id,
            job.kind,
            job.attempt,
            snoozed.after_s,
            f": {snoozed.reason[:_SUMMARY_CHARS_MAX]}" if snoozed.reason else "",
        )

    def _log_failure(self, job: Job, failure: Failure, error: BaseException, frames: TracebackType | None) -> None:
        """Logs a failed attempt, with the error's traceback; if it has none, with the stack that the failure has."""
        # A handler raises an Outcome on purpose: its traceback is of no use.
        deliberate = isinstance(error, Outcome)
        level = logging.INFO if deliberate else logging.WARNING
        final = ", permanently" if failure.permanent else ", its last" if job.attempt >= job.max_attempts else ""
        log.log(
            logging.ERROR if final else level,
            "%s: job %s (%s), attempt %d of %d failed%s: %s%s",
            self._worker,
            job.id,
            job.kind,
            job.attempt,
            job.max_attempts,
            final,
            failure.summary[:_SUMMARY_CHARS_MAX],
            f"\n{failure.stack}" if frames is None and not deliberate and failure.stack else "",
            exc_info=None if frames is None or deliberate else (type(error), error, frames),
        )

    async def _in_thread(self, function: Callable[[Job], Payload], held: HeldLease, job: Job) -> Payload:
        assert self._threads is not None
        context = contextvars.copy_context()

        def run() -> tuple[Payload, BaseException | None]:
            if held.process is None:
                held.thread = threading.get_ident()
            try:
                return context.run(function, job), None
            except BaseException as error:  # noqa: BLE001 - the caller raises it
                # Returned, not raised: a future replaces a TimeoutError or a CancelledError by a new one without its
                # traceback, and it refuses StopIteration (PEP 479).
                return None, error

        thread = self._threads.submit(run)
        try:
            result, error = await asyncio.wrap_future(thread)
        except asyncio.CancelledError:
            if held.process is None:
                self._abandon(thread)
            else:
                held.process.kill()
            raise
        held.thread = None
        try:
            match error:
                case None:
                    return result
                case StopIteration() | GeneratorExit():
                    # Neither may be raised in a coroutine: StopIteration ends it, and GeneratorExit closes it.
                    raise RuntimeError(f"the handler raised {type(error).__name__}") from error
                case _:
                    raise error
        finally:
            # The error's traceback refers to this frame: the garbage collector need not find the cycle.
            del error

    def _abandon(self, thread: Future[Any]) -> None:
        """Leaves a thread alone of which nobody awaits the end."""
        loop = asyncio.get_running_loop()

        def on_end(_: Future[Any]) -> None:
            # A thread may outlive the worker, whose event loop is then closed.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(self._on_abandoned_end)

        self._abandoned += 1
        if self._abandoned == _ABANDONED_MAX + 1:
            log.error(
                "%s: more than %s threads of handlers that timed out still run; from now on each keeps its place until "
                "it ends; restart the worker, and find out why the handlers hang",
                self._worker,
                f"{_ABANDONED_MAX:,}",
            )
        thread.add_done_callback(on_end)

    def _on_abandoned_end(self) -> None:
        self._abandoned -= 1
        self._abandoned_ended()


def _around(middleware: Middleware, call_next: CallNext) -> CallNext:
    return lambda job: middleware(job, call_next)


def _is_async(handler: Handler) -> bool:
    return inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(type(handler).__call__)


def _is_cancelled() -> bool:
    """Whether the current task was cancelled, and not something inside its handler."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _frames_now(thread: int) -> TracebackType | None:
    """Returns what a thread does now, as a traceback from the handler on."""
    traceback: TracebackType | None = None
    frame = sys._current_frames().get(thread)  # pyright: ignore[reportPrivateUsage]
    while frame is not None and frame.f_code.co_filename != __file__:
        traceback = TracebackType(traceback, frame, frame.f_lasti, frame.f_lineno)
        frame = frame.f_back
    return traceback
