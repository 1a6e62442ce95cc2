"""The same client for plain code. Owns one thread with an event loop; every method hands its work to it and waits."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine, Iterable
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack, overload

import grpc
from opentelemetry import trace

from windrow.calls import TRY_S
from windrow.client import Client
from windrow.errors import ClientClosed, Span
from windrow.jobs import Answer, Enqueued, Job, JobOptions, JobRecord, NewJob
from windrow.payloads import Payload

_Result = TypeVar("_Result")
_CLOSE_S = 10.0


class SyncClient:
    """Client without `await`: arguments, answers and errors are the same.

    For any number of threads, and for notebooks, where an event loop runs in the calling thread. Not for a coroutine:
    it would hold up the loop. Does not survive a fork: make one in each process.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        org: str,
        timeout: Span = 30.0,
        try_timeout: Span = TRY_S,
        channels: int = 1,
        credentials: grpc.ChannelCredentials | None = None,
        create_spans: bool = True,
        tracer_provider: trace.TracerProvider | None = None,
    ) -> None:
        self._client = Client(
            address,
            org=org,
            timeout=timeout,
            try_timeout=try_timeout,
            channels=channels,
            credentials=credentials,
            create_spans=create_spans,
            tracer_provider=tracer_provider,
        )
        self.org = org
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._closed = False

    def close(self) -> None:
        """Ends the connections and the thread. A second close does nothing."""
        with self._lock:
            self._closed = True
            loop, thread = self._loop, self._thread
            self._loop = self._thread = None
        if loop is None or thread is None or self._pid != os.getpid():
            return
        asyncio.run_coroutine_threadsafe(self._client.close(), loop).result(_CLOSE_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(_CLOSE_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def enqueue(self, queue: str, kind: str, payload: Payload = b"", **options: Unpack[JobOptions]) -> Enqueued:
        """See Client.enqueue."""
        return self._run(self._client.enqueue(queue, kind, payload, **options))

    def enqueue_many(self, jobs: Iterable[NewJob], *, independent: bool = False) -> list[Enqueued]:
        """See Client.enqueue_many."""
        return self._run(self._client.enqueue_many(jobs, independent=independent))

    def dequeue(
        self,
        queues: str | Iterable[str],
        *,
        max_jobs: int = 1,
        visibility_window: Span = 30.0,
        worker: str = "",
        wait: Span = 0.0,
    ) -> list[Job]:
        """See Client.dequeue."""
        return self._run(
            self._client.dequeue(
                queues, max_jobs=max_jobs, visibility_window=visibility_window, worker=worker, wait=wait
            )
        )

    @overload
    def ack(self, jobs: Job, *, result: Payload = None) -> Answer: ...
    @overload
    def ack(self, jobs: Iterable[Job], *, result: Payload = None) -> list[Answer]: ...
    def ack(self, jobs: Job | Iterable[Job], *, result: Payload = None) -> Answer | list[Answer]:
        """See Client.ack."""
        return self._run(self._client.ack(jobs, result=result))

    @overload
    def nack(self, jobs: Job, *, error: str = "", delay: Span | None = None, kill: bool = False) -> Answer: ...
    @overload
    def nack(
        self, jobs: Iterable[Job], *, error: str = "", delay: Span | None = None, kill: bool = False
    ) -> list[Answer]: ...
    def nack(
        self, jobs: Job | Iterable[Job], *, error: str = "", delay: Span | None = None, kill: bool = False
    ) -> Answer | list[Answer]:
        """See Client.nack."""
        return self._run(self._client.nack(jobs, error=error, delay=delay, kill=kill))

    @overload
    def extend(self, jobs: Job, *, visibility_window: Span = 30.0) -> Answer: ...
    @overload
    def extend(self, jobs: Iterable[Job], *, visibility_window: Span = 30.0) -> list[Answer]: ...
    def extend(self, jobs: Job | Iterable[Job], *, visibility_window: Span = 30.0) -> Answer | list[Answer]:
        """See Client.extend."""
        return self._run(self._client.extend(jobs, visibility_window=visibility_window))

    @overload
    def release(self, jobs: Job) -> Answer: ...
    @overload
    def release(self, jobs: Iterable[Job]) -> list[Answer]: ...
    def release(self, jobs: Job | Iterable[Job]) -> Answer | list[Answer]:
        """See Client.release."""
        return self._run(self._client.release(jobs))

    def get_jobs(self, ids: Iterable[str], *, include_payload: bool = False) -> dict[str, JobRecord]:
        """See Client.get_jobs."""
        return self._run(self._client.get_jobs(ids, include_payload=include_payload))

    def cancel_jobs(self, ids: Iterable[str], *, reason: str = "") -> list[Answer]:
        """See Client.cancel_jobs."""
        return self._run(self._client.cancel_jobs(ids, reason=reason))

    def _run(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        try:
            future = asyncio.run_coroutine_threadsafe(work, self._running_loop())
        except BaseException:
            work.close()
            raise
        try:
            return future.result()
        except BaseException:
            # Ctrl-C ends the wait here; the call must not go on without anyone to tell.
            future.cancel()
            raise

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._closed or self._pid != os.getpid():
                why = "is closed" if self._closed else "was made before a fork"
                raise ClientClosed(f"this SyncClient of {self._client.calls.address} {why}; make a new one")
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                # A daemon: a program that forgets close() can still end.
                self._thread = threading.Thread(
                    target=_serve, args=(self._loop,), name="windrow-sync-client", daemon=True
                )
                self._thread.start()
            return self._loop


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        loop.close()
