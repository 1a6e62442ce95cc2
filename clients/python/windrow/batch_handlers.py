"""Runs batch handlers, which take many jobs at once, and decides the outcome of each job.

gathering.py collects the jobs of a batch, and job_runner.py decides when the batch begins.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import TypeVar, cast

from opentelemetry import trace

from windrow.errors import InvalidRequest, Span
from windrow.failures import Failure, TimedOut, frames_of, places_of
from windrow.gathering import Gathering
from windrow.handlers import (
    RUNNERS,
    SUMMARY_CHARS_MAX,
    Handlers,
    Registered,
    in_time,
    is_async,
    is_the_workers,
    left_s,
    refuse_no_kinds,
    timeout_of,
)
from windrow.jobs import Job
from windrow.leases import HeldLease, log, named
from windrow.outcomes import DONE, Action, Failed, Outcome, Released, Snoozed, Waits, action_of
from windrow.payloads import Payload, checked_count, named_seconds
from windrow.tracing import Tracing, fail

Results = Sequence[Payload | BaseException] | None
BatchHandler = Callable[[Sequence[Job]], Awaitable[Results]] | Callable[[Sequence[Job]], Results]
BatchHandlerT = TypeVar("BatchHandlerT", bound=BatchHandler)

# The highest `concurrency` of a worker.
BATCH_JOBS_MAX = 1000
_WAIT_S_MAX = 60.0


class BatchHandlers:
    """The batch handlers of a worker. The kinds of batch handlers are registered in `handlers` too, so that no kind
    gets two handlers."""

    def __init__(self, worker: str, handlers: Handlers, tracing: Tracing) -> None:
        self._worker = worker
        self._handlers = handlers
        self._tracing = tracing
        self._by_gathering: dict[Gathering, Registered] = {}
        # Where the jobs of each kind wait.
        self.by_kind: dict[str, Gathering] = {}

    def add(
        self, kinds: Sequence[str], *, max_jobs: int, max_wait: Span, timeout: Span | None
    ) -> Callable[[BatchHandlerT], BatchHandlerT]:
        """Returns a decorator that registers a function for jobs of these kinds: see Worker.batch_handler()."""
        refuse_no_kinds("batch_handler", kinds)
        wait_s, timeout_s = named_seconds("max_wait", max_wait), timeout_of(timeout)
        checked_count("max_jobs", max_jobs, 1, BATCH_JOBS_MAX)
        if not 0 <= wait_s <= _WAIT_S_MAX:
            raise InvalidRequest(f"max_wait must be 0 s to {_WAIT_S_MAX:g} s, not {wait_s} s")

        def register(function: BatchHandlerT) -> BatchHandlerT:
            handler = Registered(function, is_async(function), timeout_s)
            self._handlers.register(kinds, handler)
            gathering = Gathering(jobs_max=max_jobs, wait_s_max=wait_s)
            self._by_gathering[gathering] = handler
            self.by_kind.update(dict.fromkeys(kinds, gathering))
            return function

        return register

    @property
    def gatherings(self) -> Sequence[Gathering]:
        return tuple(self._by_gathering)

    async def run(self, gathering: Gathering, batch: Sequence[HeldLease]) -> Sequence[Action]:
        """Runs the handler. Returns the outcome of each job."""
        handler = self._by_gathering[gathering]
        if not self._handlers.makes_spans:
            return await self._outcomes(handler, batch, trace.INVALID_SPAN)
        with self._tracing.processing_batch([held.job for held in batch]) as span:
            return await self._outcomes(handler, batch, span)

    async def _outcomes(self, handler: Registered, batch: Sequence[HeldLease], span: trace.Span) -> Sequence[Action]:
        try:
            results = await self._results(handler, batch)
            if results is None:
                return [DONE] * len(batch)
            _check(results, len(batch))
        except BaseException as error:
            if is_the_workers(error, handler):
                raise
            return [self._all_failed(batch, error, span)] * len(batch)
        return [
            DONE
            if result is None
            else self._handlers.outcome_of(held, result)
            if isinstance(result, BaseException)
            else self._handlers.done(handler, held, result)
            for held, result in zip(batch, results, strict=True)
        ]

    async def _results(self, handler: Registered, batch: Sequence[HeldLease]) -> Results:
        timeout_s = math.inf if handler.timeout_s is None else handler.timeout_s
        message = f"the handler did not finish a batch within {timeout_s:g} s"
        runtime_s = left_s(batch)
        if runtime_s < timeout_s:
            timeout_s, message = runtime_s, "the batch has used up the max_runtime of one of its jobs"
        work = self._run(handler, batch)
        return await (work if timeout_s == math.inf else in_time(work, timeout_s, message, batch))

    async def _run(self, handler: Registered, batch: Sequence[HeldLease]) -> Results:
        jobs = [held.job for held in batch]
        if handler.is_async:
            return await cast("Callable[[Sequence[Job]], Awaitable[Results]]", handler.function)(jobs)
        return await self._handlers.threads.run(
            cast("Callable[[Sequence[Job]], Results]", handler.function), jobs, batch
        )

    def _all_failed(self, batch: Sequence[HeldLease], error: BaseException, span: trace.Span) -> Action:
        """Returns the outcome that every job of a batch gets if the handler has raised `error`. Logs the error once."""
        if not isinstance(error, Outcome) or error.is_failure:
            fail(span, error)
        action, cause = action_of(error, runners=RUNNERS)
        if isinstance(action, Waits):
            # One of the jobs now waits for nodes that it has added, so its lease has ended. Only the other jobs are
            # given back.
            action = Released()
        if isinstance(action, Failed):
            self._log_failure(batch, action.failure, cause, frames_of(cause, runners=RUNNERS))
        elif isinstance(action, Snoozed):
            reason = f": {action.reason[:SUMMARY_CHARS_MAX]}" if action.reason else ""
            log.info("%s: a batch of %d jobs is snoozed for %g s%s", self._worker, len(batch), action.after_s, reason)
        return action

    def _log_failure(
        self, batch: Sequence[HeldLease], failure: Failure, error: BaseException, frames: TracebackType | None
    ) -> None:
        # An Outcome and a timeout are both expected: a handler raises an Outcome on purpose, and its timeout was set on
        # purpose.
        deliberate, late = isinstance(error, Outcome), isinstance(error, TimedOut)
        last = sum(held.job.attempt >= held.job.max_attempts for held in batch)
        final = ", permanently" if failure.permanent else f", {last} of them in their last attempt" if last else ""
        if deliberate:
            level = logging.WARNING if failure.permanent else logging.ERROR if last else logging.INFO
        else:
            level = logging.ERROR if final else logging.WARNING
        first = batch[0].job
        log.log(
            level,
            "%s: a batch of %d jobs failed%s; the first is %s, attempt %d of %d: %s%s",
            self._worker,
            len(batch),
            final,
            named(first),
            first.attempt,
            first.max_attempts,
            failure.summary[:SUMMARY_CHARS_MAX],
            f"; it was {places_of(frames)}" if late and frames is not None else "",
            exc_info=None if frames is None or deliberate or late else (type(error), error, frames),
        )


def _check(results: object, jobs: int) -> None:
    """Raises TypeError or ValueError unless `results` has one result for each of the `jobs` jobs."""
    wanted = f"a handler of batches returns None, or one result for each of its {jobs} jobs in a list or tuple"
    if not isinstance(results, list | tuple):
        raise TypeError(f"{wanted}; this one returned a {type(results).__name__}")
    if (count := len(cast("Sequence[object]", results))) != jobs:
        raise ValueError(f"{wanted}; this one returned {count}")
