"""The client for synchronous code. It owns a thread with an event loop. Each method runs a call in that thread and
waits for the result."""

from __future__ import annotations

import asyncio
import functools
import os
import sys
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Concatenate, ParamSpec, Self, TypeVar, Unpack

from opentelemetry import trace

from windrow.admin import JobConditions, refuse_away
from windrow.batches import Batch, calls_of, progress
from windrow.calls import TRY_S
from windrow.client import Client, Middleware
from windrow.errors import ClientClosed, Span
from windrow.jobs import JobRecord
from windrow.new_jobs import NewJob
from windrow.tls import Tls
from windrow.tokens import Token

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")
_CLOSE_S = 10.0


def _blocking(
    method: Callable[Concatenate[Client, _Parameters], Coroutine[Any, Any, _Result]],
) -> Callable[Concatenate[SyncClient, _Parameters], _Result]:
    """Makes a method of SyncClient from a method of Client, with the same signature and docstring."""

    @functools.wraps(method)
    def act(self: SyncClient, /, *arguments: _Parameters.args, **options: _Parameters.kwargs) -> _Result:
        # This function is a method of SyncClient, so it may use what is private there.
        return self._run(method(self._client, *arguments, **options))

    return act


class SyncClient:
    """Client without `await`: arguments, return values and errors are the same.

    Any number of threads may share a SyncClient. It also works in notebooks, where an event loop runs in the calling
    thread. Do not call it from a coroutine, because the call would block the event loop. The first call ties the client
    to its process. So a client that is made before a fork, and that is not used before the fork, works in every child
    process. Close a used client before a fork, and make a new one in the child: gRPC does not work in a process that
    was forked while a client was open.
    """

    # testing.py sets another class.
    _client_class: ClassVar[type[Client]] = Client

    def __init__(
        self,
        address: str | None = None,
        *,
        org: str,
        timeout: Span = 30.0,
        try_timeout: Span = TRY_S,
        channels: int = 1,
        tls: Tls | Path | str | bool | None = None,
        token: Token | None = None,
        create_spans: bool = True,
        tracer_provider: trace.TracerProvider | None = None,
        middleware: Sequence[Middleware] = (),
    ) -> None:
        self._client = self._client_class(
            address,
            org=org,
            timeout=timeout,
            try_timeout=try_timeout,
            channels=channels,
            tls=tls,
            token=token,
            create_spans=create_spans,
            tracer_provider=tracer_provider,
            middleware=middleware,
        )
        self.org = org
        self._owns_loop = True
        self._begin = self._begin_call
        # The process of the first call. None: there was no call.
        self._pid: int | None = None
        # Reentrant, because a signal handler may use the client in the thread that holds the lock.
        self._lock = threading.RLock()
        # The runner's event loop runs in the thread.
        self._runner: asyncio.Runner | None = None
        self._thread: threading.Thread | None = None
        self._closed = False

    def for_org(self, org: str) -> Self:
        """Returns a client of another org that uses the same connections and thread, which remain until this client is
        closed. Closing the returned client does nothing."""
        other = object.__new__(type(self))
        client = self._client.for_org(org)
        other._client = client
        other.org = client.org
        other._owns_loop = False
        other._begin = self._begin
        return other

    def close(self) -> None:
        """Closes the connections and ends the thread. Calls that are under way raise ClientClosed. A second close does
        nothing."""
        # Do nothing in a forked process, where the lock may be held for ever: a thread of the parent may have held it
        # at the fork. Do nothing while the interpreter shuts down, because it has ended the client's thread.
        if not self._owns_loop or not self._claim() or sys.is_finalizing():
            return
        with self._lock:
            self._closed = True
            runner, thread = self._runner, self._thread
            self._runner = self._thread = None
        if runner is None or thread is None:
            return
        loop = runner.get_loop()
        try:
            asyncio.run_coroutine_threadsafe(self._client.close(), loop).result(_CLOSE_S)
        except TimeoutError:
            # Middleware blocks the thread. Raise nothing, and let the thread end as soon as it can.
            self._client.calls.refuse()
        loop.call_soon_threadsafe(loop.stop)
        thread.join(_CLOSE_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    enqueue = _blocking(Client.enqueue)
    enqueue_many = _blocking(Client.enqueue_many)
    dequeue = _blocking(Client.dequeue)
    ack = _blocking(Client.ack)
    nack = _blocking(Client.nack)
    extend = _blocking(Client.extend)
    release = _blocking(Client.release)
    snooze = _blocking(Client.snooze)
    get_jobs = _blocking(Client.get_jobs)
    find_job = _blocking(Client.find_job)
    wait = _blocking(Client.wait)
    cancel_jobs = _blocking(Client.cancel_jobs)
    alter_jobs = _blocking(Client.alter_jobs)
    count_jobs = _blocking(Client.count_jobs)
    redrive_jobs = _blocking(Client.redrive_jobs)
    cancel_where = _blocking(Client.cancel_where)
    alter_where = _blocking(Client.alter_where)
    redrive_where = _blocking(Client.redrive_where)
    server_info = _blocking(Client.server_info)
    list_queues = _blocking(Client.list_queues)
    get_queue = _blocking(Client.get_queue)
    create_queue = _blocking(Client.create_queue)
    update_queue = _blocking(Client.update_queue)
    put_queue = _blocking(Client.put_queue)
    pause_queue = _blocking(Client.pause_queue)
    resume_queue = _blocking(Client.resume_queue)
    delete_queue = _blocking(Client.delete_queue)
    list_quarantines = _blocking(Client.list_quarantines)
    quarantine_kind = _blocking(Client.quarantine_kind)
    release_kind = _blocking(Client.release_kind)
    purge_queue = _blocking(Client.purge_queue)
    list_jobs = _blocking(Client.list_jobs)
    redrive_queue = _blocking(Client.redrive_queue)
    restore_jobs = _blocking(Client.restore_jobs)
    stats = _blocking(Client.stats)
    explain_job = _blocking(Client.explain_job)
    explain_queue = _blocking(Client.explain_queue)
    list_limits = _blocking(Client.list_limits)
    create_schedule = _blocking(Client.create_schedule)
    update_schedule = _blocking(Client.update_schedule)
    put_schedule = _blocking(Client.put_schedule)
    get_schedule = _blocking(Client.get_schedule)
    list_schedules = _blocking(Client.list_schedules)
    delete_schedule = _blocking(Client.delete_schedule)
    pause_schedule = _blocking(Client.pause_schedule)
    resume_schedule = _blocking(Client.resume_schedule)
    trigger_schedule = _blocking(Client.trigger_schedule)
    backfill_schedule = _blocking(Client.backfill_schedule)
    preview_schedule = _blocking(Client.preview_schedule)
    declare_schedules = _blocking(Client.declare_schedules)
    start = _blocking(Client.start)
    add_nodes = _blocking(Client.add_nodes)
    wait_for = _blocking(Client.wait_for)
    get_workflow = _blocking(Client.get_workflow)
    list_nodes = _blocking(Client.list_nodes)
    list_workflows = _blocking(Client.list_workflows)
    cancel_workflow = _blocking(Client.cancel_workflow)
    pause_workflow = _blocking(Client.pause_workflow)
    resume_workflow = _blocking(Client.resume_workflow)
    skip_node = _blocking(Client.skip_node)
    signal = _blocking(Client.signal)
    retry_workflow = _blocking(Client.retry_workflow)
    parents = _blocking(Client.parents)
    set_limit = _blocking(Client.set_limit)
    clear_limit = _blocking(Client.clear_limit)
    list_all_limits = _blocking(Client.list_all_limits)

    def iter_jobs(self, queue: str = "", **conditions: Unpack[JobConditions]) -> Iterator[JobRecord]:
        """Yields the jobs of all pages of list_jobs, as Client.iter_jobs does."""
        token = ""
        while True:
            page = self.list_jobs(queue, page_token=token, **conditions)
            refuse_away(self.org, page.unavailable_shards, "did not list its jobs")
            yield from page.jobs
            token = page.next_page_token
            if not token:
                return

    def enqueue_batch(
        self, jobs: Iterable[NewJob], *, batch: str, on_progress: Callable[[Batch], object] | None = None
    ) -> Batch:
        """Stores a batch like Client.enqueue_batch. Reads `jobs` and calls `on_progress` in the caller's thread, so
        both may use that thread's database connections, and this client."""
        done = Batch()
        for calls in calls_of(self.org, jobs, batch):
            outcomes = self._run(self._client.send_together(calls))
            for step in progress(done, calls, outcomes):
                done = step
                if on_progress is not None:
                    on_progress(done)
        return done

    def _run(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        try:
            future = self._begin(work)
        except BaseException:
            work.close()
            raise
        try:
            return future.result()
        except CancelledError:
            if self._client.calls.closed:
                raise ClientClosed(
                    f"this SyncClient of {self._client.calls.address} was closed before its call ended"
                ) from None
            raise
        except BaseException:
            # Ctrl-C ends the wait. Cancel the call, because nobody would get its result.
            future.cancel()
            raise

    def _begin_call(self, work: Coroutine[Any, Any, _Result]) -> Future[_Result]:
        """Starts a call in the thread. Raises ClientClosed."""
        if not self._claim():
            # Do not take the lock: a thread of the parent may have held it at the fork.
            raise self._refusal("was used before a fork")
        if sys.is_finalizing():
            # The client's thread has ended, and a call from __del__ would never end.
            raise ClientClosed("the interpreter shuts down, and a SyncClient has no thread any more; use atexit")
        with self._lock:
            if self._closed:
                raise self._refusal("is closed")
            if self._runner is None:
                # With a factory, the runner does not change the event loop of this thread.
                runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
                # The runner makes its loop here, before the thread uses it.
                runner.get_loop()
                # A daemon thread, so that a program that forgets close() can still exit.
                thread = threading.Thread(target=_serve, args=(runner,), name="windrow-sync-client", daemon=True)
                # Set these two fields before the thread starts, because a signal handler that makes a call now must use
                # the same thread.
                self._runner, self._thread = runner, thread
                try:
                    thread.start()
                except RuntimeError:
                    # The process may have no more threads now.
                    self._runner = self._thread = None
                    runner.close()
                    raise
            # Hold the lock until the call is passed to the loop, because the loop runs no call after close() has
            # stopped it.
            return asyncio.run_coroutine_threadsafe(work, self._runner.get_loop())

    def _claim(self) -> bool:
        """Ties the client to this process, unless the client is tied to a process already. Returns whether the client
        belongs to this process. Call this before you take the lock. Then nobody has taken the lock of a client that is
        not tied yet, so a forked process can safely claim that client."""
        if self._pid is None:
            self._pid = os.getpid()
        return self._pid == os.getpid()

    def _refusal(self, why: str) -> ClientClosed:
        return ClientClosed(f"this SyncClient of {self._client.calls.address} {why}; make a new one")


def _serve(runner: asyncio.Runner) -> None:
    # At its end, the runner cancels calls that still run, such as a call in the pause before its next try. Otherwise
    # their callers would wait for ever.
    with runner:
        loop = runner.get_loop()
        asyncio.set_event_loop(loop)
        while True:
            try:
                loop.run_forever()
            except (SystemExit, KeyboardInterrupt):
                # Middleware, or a function that returns tokens, has raised this error. The caller whose call ran it
                # gets the error; other calls continue.
                continue
            break
