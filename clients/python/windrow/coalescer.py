"""Batches the requests of concurrent callers into shared calls. This module does not know what the requests contain.

No request waits for others to join it. While fewer than `calls_max` calls are running, the requests of one event loop
iteration are sent at its end. Later requests wait until a call returns, and are then sent together. An idle client's
call is sent at once; a busy client's calls carry hundreds of requests.
"""

from __future__ import annotations

import asyncio
import contextvars
import copy
import random
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

from windrow.calls import Calls
from windrow.errors import DeadlineExceeded, InvalidRequest, WindrowError, alone, blamed_parts
from windrow.limits import LIMIT_REACHED

_Item = TypeVar("_Item")
_Answer = TypeVar("_Answer")

# A large call delays the other calls on its connection, and a call must stay well below the largest message.
_BYTES_MAX = 4 * 1024 * 1024
# The call's own error says more than a timeout does. So wait this long after the deadline for that error.
_GRACE_S = 0.1


class _Request(Generic[_Item, _Answer]):
    """The item of one caller, until the caller is answered."""

    __slots__ = ("answer", "context", "deadline", "item", "size")

    def __init__(
        self, item: _Item, size: int, deadline: float, answer: asyncio.Future[_Answer], context: contextvars.Context
    ) -> None:
        self.item = item
        self.size = size
        # The deadline of the request, by the event loop's clock.
        self.deadline = deadline
        self.answer = answer
        self.context = context


class Coalescer(Generic[_Item, _Answer]):
    """The shared calls of one method for one org.

    `send` makes a call with several items and returns an answer or an error for each. If `send` raises an error, every
    caller gets the error. The only exception is an InvalidRequest whose violations name items: only the callers of
    these items get it, and the other items are sent again.
    """

    def __init__(
        self,
        calls: Calls,
        send: Callable[[Sequence[_Item], float], Awaitable[Sequence[_Answer | WindrowError]]],
        *,
        items_max: int,
        calls_max: int,
        on_idle: Callable[[], object],
    ) -> None:
        self._calls = calls
        self._send = send
        self._on_idle = on_idle
        self._items_max = items_max
        self._calls_max = calls_max
        self._waiting: deque[_Request[_Item, _Answer]] = deque()
        self._calls_running = 0
        # How many items wait until a limit may have room for them.
        self._paused = 0
        self._start_scheduled = False

    async def put(self, item: _Item, size: int, loop: asyncio.AbstractEventLoop) -> _Answer:
        """Sends an item and returns its answer, or raises its error. If the caller is cancelled before the item is
        sent, the item is not sent."""
        deadline = loop.time() + self._calls.timeout_s
        answer: asyncio.Future[_Answer] = loop.create_future()
        request = _Request(item, size, deadline, answer, contextvars.copy_context())
        self._waiting.append(request)
        if not self._start_scheduled and self._calls_running < self._calls_max:
            # Start at the end of this event loop iteration, so that the other requests of the iteration are included.
            self._start_scheduled = True
            loop.call_soon(self._start)
        timer = loop.call_at(deadline + _GRACE_S, self._expire, request)
        try:
            return await answer
        except asyncio.CancelledError:
            if answer.done() and not answer.cancelled():
                # An error may have arrived together with the cancellation. Read the error, because asyncio would
                # otherwise log it as unhandled.
                answer.exception()
            raise
        finally:
            timer.cancel()

    def _start(self) -> None:
        self._start_scheduled = False
        while self._calls_running < self._calls_max and (batch := self._take()):
            self._calls_running += 1
            # A call for one caller belongs to that caller's trace. A shared call has no trace; each job has its own.
            context = batch[0].context if len(batch) == 1 else contextvars.Context()
            self._calls.spawn(self._carry(batch), context)
        if not (self._waiting or self._calls_running or self._paused):
            self._on_idle()

    def _take(self) -> list[_Request[_Item, _Answer]]:
        batch: list[_Request[_Item, _Answer]] = []
        size = 0
        waiting = self._waiting
        while waiting and len(batch) < self._items_max:
            request = waiting[0]
            if request.answer.done():
                waiting.popleft()
                continue
            size += request.size
            if batch and size > _BYTES_MAX:
                break
            batch.append(waiting.popleft())
        return batch

    async def _carry(self, batch: list[_Request[_Item, _Answer]]) -> None:
        try:
            # Let the call last until the latest deadline of its requests, because each request has a timer of its own.
            deadline = max(request.deadline for request in batch)
            timeout_s = max(0.0, deadline - asyncio.get_running_loop().time())
            answers = await self._send([request.item for request in batch], timeout_s)
            for request, answer in zip(batch, answers, strict=True):
                if isinstance(answer, WindrowError):
                    self._refuse(request, answer)
                elif not request.answer.done():
                    request.answer.set_result(answer)
        except InvalidRequest as error:
            self._split_refused(batch, error)
        except WindrowError as error:
            for request in batch:
                self._refuse(request, error)
        except BaseException as error:
            # Nothing else would wake these callers.
            for request in batch:
                if isinstance(error, asyncio.CancelledError):
                    request.answer.cancel()
                else:
                    _fail(request, error)
            if not isinstance(error, Exception):
                raise
        finally:
            self._calls_running -= 1
            self._start()

    def _refuse(self, request: _Request[_Item, _Answer], error: WindrowError) -> None:
        """Handles an error for one item. If a limit refused the item, and may have room for it before the deadline,
        sends the item again at the time when there may be room. Until then, other items are sent. In all other cases,
        gives the error to the caller."""
        loop = asyncio.get_running_loop()
        if error.reason == LIMIT_REACHED and error.retry_after is not None:
            # Retry at random times, because the router names the same time to many callers.
            pause_s = error.retry_after * random.uniform(1.0, 1.5)
            if loop.time() + pause_s < request.deadline:
                self._paused += 1
                # Do not start the task in the request's context, because this code may already run in it: a loop with
                # an eager task factory begins the task at once, and a context cannot be entered twice.
                self._calls.spawn(self._send_later(request, pause_s), contextvars.Context())
                return
        _fail(request, error)

    async def _send_later(self, request: _Request[_Item, _Answer], pause_s: float) -> None:
        try:
            await self._calls.pause(pause_s)
        except WindrowError as error:
            _fail(request, error)
        finally:
            self._paused -= 1
        # If the request has failed, _take() drops it.
        self._waiting.append(request)
        self._start()

    def _split_refused(self, batch: list[_Request[_Item, _Answer]], error: InvalidRequest) -> None:
        bad = blamed_parts(error)
        if len(batch) == 1 or not bad:
            for request in batch:
                _fail(request, error)
            return
        for at in bad:
            _fail(batch[at], alone(error, at))
        self._waiting.extendleft(request for at, request in reversed(list(enumerate(batch))) if at not in bad)

    def _expire(self, request: _Request[_Item, _Answer]) -> None:
        _fail(request, DeadlineExceeded(f"{self._calls.address}: no answer in {self._calls.timeout_s:g} s"))


class Coalescers(Generic[_Item, _Answer]):
    """The coalescers, one for each org that has requests under way. All of them use the same connections."""

    def __init__(self, calls: Calls, make: Callable[[str, Callable[[], object]], Coalescer[_Item, _Answer]]) -> None:
        self._calls = calls
        self._make = make
        self._by_org: dict[str, Coalescer[_Item, _Answer]] = {}

    async def put(self, org: str, item: _Item, size: int) -> _Answer:
        loop = self._calls.loop()
        coalescer = self._by_org.get(org)
        if coalescer is None:
            coalescer = self._by_org[org] = self._make(org, lambda: self._by_org.pop(org, None))
        return await coalescer.put(item, size, loop)


def _fail(request: _Request[_Item, _Answer], error: BaseException) -> None:
    if request.answer.done():
        return
    # Each caller gets a copy: raising one object in several tasks would mix their tracebacks.
    own = copy.copy(error)
    own.__cause__ = error.__cause__
    request.answer.set_exception(own)
