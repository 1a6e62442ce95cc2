"""Runs the handlers of a worker: each in a task, a thread or a process, and within its timeout. Decides the outcome of
the job, whatever the handler raises.

job_runner.py decides when each handler begins, and passes the outcomes on. processes.py has the processes.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import logging
import math
import os
import time
import types
from collections.abc import Awaitable, Callable, Collection, Coroutine, Generator, Sequence
from functools import partial
from types import CodeType, TracebackType
from typing import Any, Literal, NamedTuple, TypeVar, cast

from opentelemetry import trace

from windrow.errors import InvalidRequest, Span
from windrow.failures import TimedOut, frames_of, places_of
from windrow.handler_threads import HandlerThreads, frames_now
from windrow.jobs import Job, LostReason
from windrow.leases import HeldLease, log, named
from windrow.outcomes import DONE, Action, Done, Failed, Outcome, Snoozed, action_of
from windrow.payloads import RESULT_BYTES_MAX, Payload, encode, named_seconds
from windrow.processes import HandlerProcess, can_be_sent
from windrow.tracing import Tracing, fail
from windrow.unhandled import Unhandled

Handler = Callable[[Job], Awaitable[Payload]] | Callable[[Job], Payload]
CallNext = Callable[[Job], Awaitable[Payload]]
Middleware = Callable[[Job, CallNext], Awaitable[Payload]]
HandlerT = TypeVar("HandlerT", bound=Handler)
_Result = TypeVar("_Result")

# The files that call handlers. Their frames do not belong to a handler's traceback.
RUNNERS = frozenset(
    os.path.join(os.path.dirname(__file__), name) for name in ("batch_handlers.py", "handler_threads.py", "handlers.py")
)
# A line of the log shows at most this many characters of a failure.
SUMMARY_CHARS_MAX = 200
# A handler is stopped a little before its job's max_runtime ends: earlier by a tenth of max_runtime, but by at most
# this many seconds.
_MARGIN_S_MAX = 1.0


class Registered(NamedTuple):
    function: Callable[..., Any]
    is_async: bool
    timeout_s: float | None
    isolated: bool = False
    # Whether the coroutine of the function may be run directly, without a middleware, a timeout, a thread or a process.
    is_bare: bool = False


class Suspended(NamedTuple):
    """A handler that waits for something."""

    run: Coroutine[Any, Any, Any]
    # The object that the handler's coroutine has yielded, for which the handler waits.
    awaited: object
    # None: `run` returns the job's outcome. Otherwise `run` is the coroutine of this handler, and returns the handler's
    # result.
    handler: Registered | None


def refuse_no_kinds(decorator: str, kinds: Sequence[object]) -> None:
    """Raises InvalidRequest unless `kinds` has kinds. If the user writes the decorator without parentheses, it gets the
    function in place of the kinds."""
    if not kinds or not all(isinstance(kind, str) for kind in kinds):
        raise InvalidRequest(f'{decorator} needs the kinds of its jobs: write @worker.{decorator}("a_kind")')


class Handlers:
    """The handlers of a worker. `abandoned_ended`: see HandlerThreads."""

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
        self._by_kind: dict[str, Registered] = {}
        self.threads = HandlerThreads(worker, abandoned_ended=abandoned_ended)
        # The processes that run no job now.
        self._processes: list[HandlerProcess] = []
        # Whether a handler gets a span even if its job carries no trace.
        self.makes_spans = False

    @property
    def kinds(self) -> Collection[str]:
        """Returns the kinds that have a handler."""
        return self._by_kind.keys()

    def __contains__(self, kind: str) -> bool:
        return kind in self._by_kind

    def add(
        self, kinds: Sequence[str], *, timeout: Span | None, isolate: Literal["process"] | None
    ) -> Callable[[HandlerT], HandlerT]:
        """Returns a decorator that registers a function for jobs of these kinds: see Worker.handler()."""
        refuse_no_kinds("handler", kinds)
        timeout_s = timeout_of(timeout)
        if isolate not in (None, "process"):
            raise InvalidRequest(f'isolate must be "process" or None, not {isolate!r}')

        def register(function: HandlerT) -> HandlerT:
            bare = timeout_s is None and not self._middleware and _makes_coroutines(function)
            registered = Registered(function, is_async(function), timeout_s, isolate == "process", bare)
            if registered.is_async and registered.isolated:
                raise InvalidRequest(f"only a def can run in a process, and {function!r} is an async def")
            self.register(kinds, registered)
            return function

        return register

    def register(self, kinds: Sequence[str], handler: Registered) -> None:
        """Sets the handler of these kinds. Raises InvalidRequest if a kind has a handler already."""
        for kind in kinds:
            if kind in self._by_kind:
                raise InvalidRequest(f"kind {kind!r} has a handler already: {self._by_kind[kind].function!r}")
            self._by_kind[kind] = handler

    def open(self, concurrency: int) -> None:
        """Prepares the threads. Raises InvalidRequest if a handler with `isolate="process"` cannot be sent to a
        process."""
        if not self._by_kind:
            log.warning("worker %s has no handlers, and gives every job back", self._worker)
        for kind, handler in self._by_kind.items():
            if handler.isolated and not can_be_sent(handler.function):
                raise InvalidRequest(
                    f"kind {kind!r}: {handler.function!r} cannot be imported by name in another process; make it a "
                    "function of a module"
                )
        self.threads.open(concurrency)

    def close(self) -> None:
        """Ends the processes. Threads cannot be stopped."""
        for process in self._processes:
            process.close()
        self.threads.close()

    def on_jobs(self) -> None:
        """Call this when jobs have arrived, before their handlers run."""
        self.makes_spans = self._tracing.has_sdk()

    async def run(self, held: HeldLease) -> Action:
        """Runs the job's handler to its end, in a copy of the caller's context. Returns the job's outcome."""
        context = contextvars.copy_context()
        begun = self.begin(held, context)
        return await self.go_on(held, begun, context) if isinstance(begun, Suspended) else begun

    def begin(self, held: HeldLease, context: contextvars.Context) -> Action | Suspended:
        """Runs the job's handler in this context, until it suspends or ends. Returns the job's outcome, or the
        suspended handler for go_on()."""
        job = held.job
        handler = self._by_kind.get(job.kind)
        if handler is None:
            return self._unhandled.give_back(job)
        # Most handlers need no span, middleware, timeout or thread. The coroutine of such a handler is run directly.
        bare = handler.is_bare and job.max_runtime is None and not (job.traceparent or self.makes_spans)
        try:
            run: Coroutine[Any, Any, Any]
            run = cast("Any", handler.function)(job) if bare else self._run_whole(handler, held)
            awaited = context.run(run.send, None)
        except StopIteration as end:
            if not bare:
                return cast("Action", end.value)
            result = end.value
        except BaseException as error:
            if not bare:
                raise
            return context.run(self._failed, handler, held, error)
        else:
            return Suspended(run, awaited, handler if bare else None)
        return DONE if result is None else context.run(self.done, handler, held, result)

    async def go_on(self, held: HeldLease, suspended: Suspended, context: contextvars.Context) -> Action:
        """Runs the rest of a handler that has suspended. Returns the job's outcome."""
        handler = suspended.handler
        if handler is None:
            return cast("Action", await _in_context(context, suspended))
        try:
            result = await _in_context(context, suspended)
        except BaseException as error:  # noqa: BLE001 - _failed() raises errors that are meant for the worker
            return context.run(self._failed, handler, held, error)
        return DONE if result is None else context.run(self.done, handler, held, result)

    async def _run_whole(self, handler: Registered, held: HeldLease) -> Action:
        """Runs a handler together with what it needs: a span, middleware, a timeout, a thread or a process."""
        job = held.job
        if not (job.traceparent or self.makes_spans):
            return await self._outcome(handler, held, trace.INVALID_SPAN)
        with self._tracing.processing(job) as span:
            return await self._outcome(handler, held, span)

    async def _outcome(self, handler: Registered, held: HeldLease, span: trace.Span) -> Action:
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
            return DONE if result is None else self._done(held.job, encode(result, what="result"))
        except BaseException as error:  # noqa: BLE001 - _failed() raises errors that are meant for the worker
            return self._failed(handler, held, error, span)

    def done(self, handler: Registered, held: HeldLease, result: Payload) -> Action:
        """Returns the outcome of a job with this result. If the result cannot be encoded, the attempt has failed."""
        try:
            return self._done(held.job, encode(result, what="result"))
        except BaseException as error:  # noqa: BLE001 - _failed() raises errors that are meant for the worker
            return self._failed(handler, held, error)

    def _failed(
        self, handler: Registered, held: HeldLease, error: BaseException, span: trace.Span = trace.INVALID_SPAN
    ) -> Action:
        """Returns the outcome of a job whose handler has raised `error`, and logs it. Raises the error if it is meant
        for the worker."""
        if is_the_workers(error, handler):
            raise error
        if not isinstance(error, Outcome) or error.is_failure:
            fail(span, error)
        return self.outcome_of(held, error)

    def outcome_of(self, held: HeldLease, error: BaseException) -> Action:
        """Returns the outcome of a job with this error, and logs it."""
        process = held.process
        if process is not None and process.error is error and process.action is not None:
            # This error comes from another process. It has lost its traceback on the way, but the failure in `action`
            # has the traceback.
            action, cause, frames = process.action, error, None
        else:
            action, cause = action_of(error, runners=RUNNERS)
            # If a process has timed out, nobody knows what it was doing.
            unknown = process is not None and isinstance(cause, TimedOut)
            frames = None if unknown else frames_of(cause, runners=RUNNERS)
        if isinstance(action, Failed):
            self._log_failure(held.job, action, cause, frames)
        elif isinstance(action, Snoozed):
            self._log_snooze(held.job, action)
        return action

    async def _run_in_time(self, handler: Registered, held: HeldLease, job: Job) -> Payload:
        """Runs a handler with a timeout, or for a job with a max_runtime. Raises TimedOut if the handler takes
        longer."""
        timeout_s = math.inf if handler.timeout_s is None else handler.timeout_s
        message = f"the handler did not finish within {timeout_s:g} s"
        if job.max_runtime is not None and (runtime_s := left_s((held,))) < timeout_s:
            timeout_s = runtime_s
            message = f"the attempt has used up the job's max_runtime of {job.max_runtime.total_seconds():g} s"
        return await in_time(self._run(handler, held, job), timeout_s, message, (held,))

    async def _run(self, handler: Registered, held: HeldLease, job: Job) -> Payload:
        if handler.is_async:
            return await cast("Awaitable[Payload]", handler.function(job))
        function = cast("Callable[[Job], Payload]", handler.function)
        if not handler.isolated:
            return await self.threads.run(function, job, (held,))
        while self._processes and not self._processes[-1].is_reusable:
            self._processes.pop().close()
        held.process = process = self._processes.pop() if self._processes else HandlerProcess()
        try:
            return await self.threads.run(partial(process.run, function), job, (held,))
        finally:
            if process.is_reusable:
                self._processes.append(process)

    def _done(self, job: Job, result: bytes) -> Done:
        """Returns the outcome of a job with this encoded result. Drops a result that is too large: the work is done,
        and a failed attempt would only repeat it."""
        if len(result) <= RESULT_BYTES_MAX:
            return Done(result=result)
        log.warning(
            "%s: %s, attempt %d: its result has %s bytes and is not stored; at most %s are allowed",
            self._worker,
            named(job),
            job.attempt,
            f"{len(result):,}",
            f"{RESULT_BYTES_MAX:,}",
        )
        return DONE

    def _log_snooze(self, job: Job, snoozed: Snoozed) -> None:
        log.info(
            "%s: %s, attempt %d is snoozed for %g s%s",
            self._worker,
            named(job),
            job.attempt,
            snoozed.after_s,
            f": {snoozed.reason[:SUMMARY_CHARS_MAX]}" if snoozed.reason else "",
        )

    def _log_failure(self, job: Job, action: Failed, error: BaseException, frames: TracebackType | None) -> None:
        """Logs a failed attempt. An unexpected error is logged with its traceback, or with the stack of the failure if
        the error has no traceback."""
        failure = action.failure
        # An Outcome and a timeout are both expected: a handler raises an Outcome on purpose, and its timeout was set on
        # purpose.
        deliberate, late = isinstance(error, Outcome), isinstance(error, TimedOut)
        expected = deliberate or late
        last = job.attempt >= job.max_attempts
        final = ", permanently" if failure.permanent else ", its last" if last else ""
        again = "" if final or action.retry_after_s is None else f"; it runs again in {action.retry_after_s:g} s"
        if deliberate:
            level = logging.WARNING if failure.permanent else logging.ERROR if last else logging.INFO
        else:
            level = logging.ERROR if final else logging.WARNING
        log.log(
            level,
            "%s: %s, attempt %d of %d failed%s: %s%s%s%s",
            self._worker,
            named(job),
            job.attempt,
            job.max_attempts,
            final,
            failure.summary[:SUMMARY_CHARS_MAX],
            again,
            f"; it was {places_of(frames)}" if late and frames is not None else "",
            f"\n{failure.stack}" if frames is None and not expected and failure.stack else "",
            exc_info=None if frames is None or expected else (type(error), error, frames),
        )


@types.coroutine
def _in_context(context: contextvars.Context, suspended: Suspended) -> Generator[Any, Any, Any]:
    """Awaits the rest of a coroutine in the current task, but in the context `context`. Returns the coroutine's
    result."""
    work, awaited = suspended.run, suspended.awaited
    while True:
        try:
            argument = yield awaited
            step: Callable[[Any], Any] = work.send
        except BaseException as error:  # noqa: BLE001 - the coroutine decides
            # Leave this frame out of the traceback, because it does not show what the handler was doing.
            argument, step = error.with_traceback(None), work.throw
        try:
            awaited = context.run(step, argument)
        except StopIteration as end:
            return end.value


def timeout_of(timeout: Span | None) -> float | None:
    """Returns a timeout in seconds, or None for no timeout. Raises InvalidRequest."""
    timeout_s = None if timeout is None else named_seconds("timeout", timeout)
    if timeout_s is not None and not 0 < timeout_s < math.inf:
        raise InvalidRequest(f"timeout must be more than 0 s, not {timeout_s} s; None: no timeout")
    return timeout_s


def left_s(helds: Sequence[HeldLease]) -> float:
    """Returns for how many seconds a handler may still run, because of the max_runtime of its jobs. This time ends
    before the shard ends a lease, so that the shard still accepts the failure."""
    ends = [
        held.until - min(held.job.max_runtime.total_seconds() / 10, _MARGIN_S_MAX)
        for held in helds
        if held.job.max_runtime is not None
    ]
    return min(ends) - time.monotonic() if ends else math.inf


async def in_time(work: Awaitable[_Result], timeout_s: float, message: str, helds: Sequence[HeldLease]) -> _Result:
    """Awaits a handler's work on the jobs of these leases. Raises TimedOut if the work does not finish in time."""
    # This scope never ends by itself. on_timeout() ends it, after it has set job.lost, where the handler can read the
    # reason.
    scope = asyncio.timeout(None)
    loop = asyncio.get_running_loop()

    def on_timeout() -> None:
        for held in helds:
            held.job.lost.set(LostReason.TIMED_OUT)
        scope.reschedule(loop.time())

    timer = loop.call_later(timeout_s, on_timeout)
    try:
        async with scope:
            return await work
    except TimeoutError as error:
        # Python 3.11.2 does not set the cause.
        cancelled = error.__cause__ or error.__context__
        if not (scope.expired() and isinstance(cancelled, asyncio.CancelledError)):
            raise
        thread, process = helds[0].thread, helds[0].process
        if thread is not None:
            frames = frames_now(thread, runners=RUNNERS)
        else:
            frames = None if process is not None else frames_of(cancelled, runners=RUNNERS)
        raise TimedOut(message).with_traceback(frames) from None
    finally:
        timer.cancel()


def _around(middleware: Middleware, call_next: CallNext) -> CallNext:
    return lambda job: middleware(job, call_next)


def is_async(handler: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(type(handler).__call__)


def _makes_coroutines(handler: Handler) -> bool:
    """Returns whether the handler itself is an `async def`, so that calling it runs none of its code."""
    code = getattr(handler, "__code__", None)
    return isinstance(code, CodeType) and bool(code.co_flags & inspect.CO_COROUTINE)


def is_the_workers(error: BaseException, handler: Registered) -> bool:
    """Returns whether an error that a handler has raised is meant for the worker. Any other error decides the outcome
    of the job."""
    if isinstance(error, KeyboardInterrupt):
        # At Ctrl-C, Python raises KeyboardInterrupt in the main thread, where only async handlers run. A handler in
        # another thread or process has raised this error itself.
        return handler.is_async
    # Find out whether the current task itself was cancelled. Otherwise only something inside the handler was cancelled.
    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0
