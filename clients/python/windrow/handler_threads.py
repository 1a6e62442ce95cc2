"""The threads in which handlers run. If the caller of run() is cancelled, for example after a timeout, the thread
continues. The callers measure the time."""

from __future__ import annotations

import asyncio
import contextvars
import sys
import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from types import TracebackType
from typing import Any, TypeVar

from windrow.leases import HeldLease, log

_Argument = TypeVar("_Argument")
_Result = TypeVar("_Result")

# Up to this many threads of handlers that timed out occupy no place of the worker. Each further thread keeps its place
# until it ends. None of these threads can be stopped, and each may run for ever.
_ABANDONED_MAX = 1000


class HandlerThreads:
    """The threads of one worker's handlers. `abandoned_ended` is called when a thread that was left running has ended,
    because the worker may have one more place then."""

    def __init__(self, worker: str, *, abandoned_ended: Callable[[], None]) -> None:
        self._worker = worker
        self._abandoned_ended = abandoned_ended
        self._threads: ThreadPoolExecutor | None = None
        # A thread that kills processes. Hundreds of kills in the event loop would delay the loop, and so the extends of
        # the leases.
        self._killer: ThreadPoolExecutor | None = None
        # How many threads still run although nobody waits for their handlers any more.
        self._abandoned = 0
        # The handlers that run in threads now.
        self._running: set[Future[Any]] = set()

    def open(self, concurrency: int) -> None:
        # A pool makes threads only when it needs them.
        self._killer = ThreadPoolExecutor(1, thread_name_prefix=f"{self._worker}-killer")
        self._threads = ThreadPoolExecutor(concurrency + _ABANDONED_MAX, thread_name_prefix=f"{self._worker}-handler")

    def close(self) -> None:
        """Ends the threads without waiting. Logs how many handler threads still run, because they cannot be stopped.
        Processes that are to be killed are still killed."""
        if self._running:
            log.warning(
                "%s: has stopped; %d handler thread(s) still run, and keep the process alive; another signal ends it",
                self._worker,
                len(self._running),
            )
        if self._killer is not None:
            self._killer.shutdown(wait=False)
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    @property
    def places_lost(self) -> int:
        """How many places are taken by threads of handlers that timed out."""
        return max(0, self._abandoned - _ABANDONED_MAX)

    async def run(
        self, function: Callable[[_Argument], _Result], argument: _Argument, helds: Sequence[HeldLease]
    ) -> _Result:
        """Runs a function in a thread, in a copy of the caller's context, for the jobs of these leases. Raises what the
        function raises. If the caller is cancelled, kills the process that runs the handler; if there is no process,
        lets the thread continue."""
        assert self._threads is not None
        context = contextvars.copy_context()
        process = helds[0].process

        def run() -> tuple[_Result | None, BaseException | None]:
            if process is None:
                thread_id = threading.get_ident()
                for held in helds:
                    held.thread = thread_id
            try:
                return context.run(function, argument), None
            except BaseException as error:  # noqa: BLE001 - the caller raises it
                # Return the error instead of raising it: a future replaces a TimeoutError or a CancelledError by a new
                # one without its traceback, and it refuses StopIteration (PEP 479).
                return None, error

        # Do not use the pool's own future, because submit() returns no future if it fails.
        thread: Future[tuple[_Result | None, BaseException | None]] = Future()

        def begin() -> None:
            if thread.set_running_or_notify_cancel():
                thread.set_result(run())

        # Mark the jobs before the thread begins, because they must not be released after it has begun.
        _mark(helds, in_thread=process is None)
        try:
            self._threads.submit(begin)
        except RuntimeError:
            # No thread can be started now, for example at the limit of the process. The pool keeps the handler for the
            # next thread that becomes free. But the attempt fails now, so no thread may begin the handler.
            if thread.cancel():
                _mark(helds, in_thread=False)
                raise
            # A thread has become free meanwhile, and has begun the handler.
        if process is None:
            self._running.add(thread)
            thread.add_done_callback(self._running.discard)
        try:
            result, error = await asyncio.wrap_future(thread)
        except asyncio.CancelledError:
            if thread.cancel() or thread.done():
                # The thread had not begun the handler, or the handler has just ended. In both cases, no handler still
                # runs.
                _mark(helds, in_thread=False)
            elif process is None:
                self._abandon(thread)
            else:
                assert self._killer is not None
                # Another job must not get this process before the killer thread has killed it.
                process.retire()
                self._killer.submit(process.kill)
            raise
        _mark(helds, in_thread=False)
        try:
            match error:
                case None:
                    return result  # type: ignore[return-value]
                case StopIteration() | GeneratorExit():
                    # Neither of these two errors may be raised in a coroutine: StopIteration ends it, and GeneratorExit
                    # closes it.
                    raise RuntimeError(f"the handler raised {type(error).__name__}") from error
                case _:
                    raise error
        finally:
            # The error's traceback refers to this frame. Break the cycle, so that the garbage collector need not do so.
            del error

    def _abandon(self, thread: Future[Any]) -> None:
        """Counts a thread for whose end nobody waits any more."""
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


def _mark(helds: Sequence[HeldLease], *, in_thread: bool) -> None:
    for held in helds:
        held.in_thread = in_thread
        held.thread = None


def frames_now(thread: int, *, runners: Collection[str]) -> TracebackType | None:
    """Returns the current stack of a thread, as a traceback that begins at the handler. `runners`: the files that call
    handlers."""
    traceback: TracebackType | None = None
    frame = sys._current_frames().get(thread)  # noqa: SLF001
    while frame is not None and frame.f_code.co_filename not in runners:
        traceback = TracebackType(traceback, frame, frame.f_lasti, frame.f_lineno)
        frame = frame.f_back
    return traceback
