"""Calls shared by callers who each have one thing to say. Owns who goes with which call; refuses to know what is said.

No call waits for company: while fewer than `calls_max` are under way, what was given in one turn of the event loop
leaves at its end. What is given meanwhile goes together, as soon as one returns. An idle client's call leaves at once,
a busy client's calls carry hundreds.
"""

from __future__ import annotations

import asyncio
import contextvars
import copy
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

from windrow.calls import Calls
from windrow.errors import DeadlineExceeded, InvalidRequest, WindrowError, alone, blamed

_Item = TypeVar("_Item")
_Answer = TypeVar("_Answer")

# Large requests keep others of the connection waiting, and a call must stay well below the largest message.
_BYTES_MAX = 4 * 1024 * 1024
# The call's own error says more than that time is up: it gets a moment to come first.
_LATE_S = 0.1


class _Given(Generic[_Item, _Answer]):
    """What one caller gave, until it is answered."""

    __slots__ = ("answer", "context", "deadline", "item", "size")

    def __init__(
        self, item: _Item, size: int, deadline: float, answer: asyncio.Future[_Answer], context: contextvars.Context
    ) -> None:
        self.item = item
        self.size = size
        # Of the event loop's clock.
        self.deadline = deadline
        self.answer = answer
        self.context = context


class Coalescer(Generic[_Item, _Answer]):
    """The shared calls of one kind for one org.

    `send` makes a call with several items and has an answer for each, or the error of that one; what it raises is
    everyone's, unless it is an InvalidRequest whose violations name items: then it is theirs, and the others go again.
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
        self._waiting: deque[_Given[_Item, _Answer]] = deque()
        self._under_way = 0
        self._starts = False

    async def put(self, item: _Item, size: int, loop: asyncio.AbstractEventLoop) -> _Answer:
        """The item's own answer, or its own error. Cancelled, the item stays behind if it has not left yet."""
        deadline = loop.time() + self._calls.timeout_s
        answer: asyncio.Future[_Answer] = loop.create_future()
        given = _Given(item, size, deadline, answer, contextvars.copy_context())
        self._waiting.append(given)
        if not self._starts and self._under_way < self._calls_max:
            # At the end of this turn: what else is given in it comes along.
            self._starts = True
            loop.call_soon(self._start)
        timer = loop.call_at(deadline + _LATE_S, self._expire, given)
        try:
            return await answer
        except asyncio.CancelledError:
            if answer.done() and not answer.cancelled():
                # It came in the same turn as the cancellation; asyncio complains of errors that nobody looked at.
                answer.exception()
            raise
        finally:
            timer.cancel()

    def _start(self) -> None:
        self._starts = False
        while self._under_way < self._calls_max and (batch := self._take()):
            self._under_way += 1
            # One caller's call goes under its trace; one of several belongs to no trace, and each job brings its own.
            context = batch[0].context if len(batch) == 1 else contextvars.Context()
            self._calls.spawn(self._carry(batch), context)
        if not (self._waiting or self._under_way):
            self._on_idle()

    def _take(self) -> list[_Given[_Item, _Answer]]:
        batch: list[_Given[_Item, _Answer]] = []
        size = 0
        waiting = self._waiting
        while waiting and len(batch) < self._items_max:
            given = waiting[0]
            if given.answer.done():
                waiting.popleft()
                continue
            size += given.size
            if batch and size > _BYTES_MAX:
                break
            batch.append(waiting.popleft())
        return batch

    async def _carry(self, batch: list[_Given[_Item, _Answer]]) -> None:
        try:
            # The last to come has the most time left; whoever has less is told by its own timer.
            left_s = max(0.0, batch[-1].deadline - asyncio.get_running_loop().time())
            answers = await self._send([given.item for given in batch], left_s)
            for given, answer in zip(batch, answers, strict=True):
                if isinstance(answer, WindrowError):
                    _fail(given, answer)
                elif not given.answer.done():
                    given.answer.set_result(answer)
        except InvalidRequest as error:
            self._sort_out(batch, error)
        except WindrowError as error:
            for given in batch:
                _fail(given, error)
        except BaseException as error:
            # Nobody else would tell them.
            for given in batch:
                if isinstance(error, asyncio.CancelledError):
                    given.answer.cancel()
                else:
                    _fail(given, error)
            if not isinstance(error, Exception):
                raise
        finally:
            self._under_way -= 1
            self._start()

    def _sort_out(self, batch: list[_Given[_Item, _Answer]], error: InvalidRequest) -> None:
        bad = blamed(error)
        if len(batch) == 1 or not bad:
            for given in batch:
                _fail(given, error)
            return
        for at in bad:
            _fail(batch[at], alone(error, at))
        self._waiting.extendleft(given for at, given in reversed(list(enumerate(batch))) if at not in bad)

    def _expire(self, given: _Given[_Item, _Answer]) -> None:
        _fail(given, DeadlineExceeded(f"{self._calls.address}: no answer in {self._calls.timeout_s:g} s"))


class Coalescers(Generic[_Item, _Answer]):
    """The coalescer of each org that has something under way, over the same connections."""

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


def _fail(given: _Given[_Item, _Answer], error: BaseException) -> None:
    if given.answer.done():
        return
    # Each caller its own: raising one object in several tasks would mix their tracebacks.
    own = copy.copy(error)
    own.__cause__ = error.__cause__
    given.answer.set_exception(own)
