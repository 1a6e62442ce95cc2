"""A worker's stream to a router, and the next one when it breaks.

Owns the credit: how many jobs the router may send. Refuses to know what becomes of jobs, and what is said of them:
those are worker.py's and settle.py's.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn, cast

from grpc import aio

from windrow.calls import patient_pause_s
from windrow.client import Client
from windrow.errors import TRANSIENT, ClientClosed, InvalidRequest, Unavailable, WindrowError
from windrow.leases import Reach
from windrow.settle import Backoff, Settlements
from windrow.v1 import job_pb2, queue_pb2

if TYPE_CHECKING:
    _Call = aio.StreamStreamCall[queue_pb2.ConsumeRequest, queue_pb2.ConsumeResponse]

AWAY_FIRST_S, AWAY_MAX_S = 0.05, 2.0


_REFUSED_S_MAX = 0.1


class Line:
    """The consumer's side of Consume.

    `room` says how many more jobs the worker would take now; `take` gets jobs, and when they came (monotonic seconds).
    """

    def __init__(
        self,
        client: Client,
        start: queue_pb2.ConsumeStart,
        *,
        settlements: Settlements,
        reach: Reach,
        room: Callable[[], int],
        take: Callable[[Sequence[job_pb2.LeasedJob], float], None],
    ) -> None:
        self._client = client
        self._start = start
        self._settlements = settlements
        self._reach = reach
        self._room = room
        self._take = take
        # How many jobs the router may still send on this stream.
        self._credit = 0
        self._closing = asyncio.Event()
        self._backoff = Backoff(AWAY_FIRST_S, AWAY_MAX_S)

    async def run(self) -> None:
        """Until close(). Raises a WindrowError that time cannot heal."""
        while not (self._closing.is_set() and self._settlements.idle.is_set()):
            began = time.monotonic()
            try:
                await self._session()
            except TRANSIENT as error:
                self._settlements.cut()
                self._reach.failed(error)
                if time.monotonic() - began > AWAY_MAX_S:
                    self._backoff.reset()
                await self._pause(patient_pause_s(error, own_s=self._backoff.next_s()))
            except InvalidRequest as error:
                if not self._settlements.suspect(error):
                    raise
                await self._pause(self._backoff.next_s())

    def close(self) -> None:
        """Ends the stream in order, when everything is said and answered."""
        self._closing.set()
        self._settlements.news.set()

    async def _session(self) -> None:
        """One stream, from its start to its end in order. Raises WindrowError for any other end."""
        began = time.monotonic()
        self._credit = 0
        call = self._client.calls.open(lambda stub: stub.Consume)
        try:
            async with asyncio.TaskGroup() as group:
                beside = [group.create_task(work) for work in (self._write(call), self._greet(call), self._watch())]
                await self._read(call)
                for task in beside:
                    task.cancel()
        except BaseExceptionGroup as errors:
            self._raise(errors, began)
        finally:
            call.cancel()

    async def _read(self, call: _Call) -> None:
        try:
            # Not call.read(): that one leaves unread what came before the end of a stream, and with it jobs.
            async for response in call:
                self._hear(response)
        except asyncio.CancelledError:
            # Closing a channel cancels its streams; a cancellation of this task passes through.
            task = asyncio.current_task()
            if self._client.calls.closed and task is not None and not task.cancelling():
                raise ClientClosed(f"Consume at {self._client.calls.address}: the client was closed") from None
            raise
        if not self._closing.is_set():
            raise Unavailable(f"Consume at {self._client.calls.address}: the router ended the stream")

    def _hear(self, response: queue_pb2.ConsumeResponse) -> None:
        received_at = time.monotonic()
        self._backoff.reset()
        if jobs := response.jobs:
            self._reach.answered()
            self._credit = max(0, self._credit - len(jobs))
            self._take(jobs, received_at)
        for settled in response.settled:
            self._settlements.answered(settled)
        self._settlements.news.set()

    async def _write(self, call: _Call) -> None:
        news, settlements = self._settlements.news, self._settlements
        request = queue_pb2.ConsumeRequest(start=self._start)
        while True:
            news.clear()
            says = settlements.fill(request) or request.HasField("start")
            room = self._room()
            more = room - self._credit
            # In halves of the room: a message for each job would be many. What leaves anyway takes along any.
            if more > 0 and (says or self._credit * 2 <= room):
                request.credit = more
                self._credit += more
                says = True
            if says:
                try:
                    await call.write(request)
                except (aio.AioRpcError, asyncio.InvalidStateError):
                    # The stream is over; where it is read it says why.
                    return
                request = queue_pb2.ConsumeRequest()
            elif self._closing.is_set() and settlements.idle.is_set():
                await call.done_writing()
                return
            else:
                await news.wait()

    async def _greet(self, call: _Call) -> None:
        away_since = self._reach.away_since
        await call.initial_metadata()
        # A refused stream has that, too, and its end right behind.
        await asyncio.sleep(_REFUSED_S_MAX)
        if not call.done() and self._reach.away_since == away_since:
            self._reach.answered()

    async def _watch(self) -> None:
        """Breaks a stream whose router has stopped to answer."""
        answer_s_max = self._client.calls.try_s
        while True:
            since = self._settlements.unanswered_since()
            left_s = answer_s_max if since is None else since + answer_s_max - time.monotonic()
            if left_s <= 0:
                raise Unavailable(
                    f"Consume at {self._client.calls.address}: no answer to a message in {answer_s_max:g} s"
                )
            await asyncio.sleep(left_s)

    def _raise(self, errors: BaseExceptionGroup[BaseException], began: float) -> NoReturn:
        known, others = errors.split((WindrowError, aio.AioRpcError))
        if known is None or others is not None:
            raise only_cause(errors) from None
        # Several at once: they have one cause, and any of them tells it.
        cause = known.exceptions[0]
        if isinstance(cause, aio.AioRpcError):
            raise self._client.calls.stream_error("Consume", cause, spent_s=time.monotonic() - began) from cause
        raise cause from None

    async def _pause(self, pause_s: float) -> None:
        """Shorter if the line is closed, and there is nothing left to say."""
        with suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await self._closing.wait()
                await self._settlements.idle.wait()


def only_cause(error: BaseException) -> BaseException:
    """The one error inside an exception group: it is clearer by itself."""
    match error:
        case BaseExceptionGroup(exceptions=(one,)):
            return only_cause(cast("BaseException", one))
        case _:
            return error
