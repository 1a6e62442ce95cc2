"""Calls that share acts (group commit): when an act may begin, it takes all that is waiting, and never waits for more.

Idle, a call is an act of its own, at once; busy, the calls that came while acts were under way go together, so that
one statement and one commit serve them all. If more is waiting than one act takes, it is dealt out: who has a thousand
calls waiting holds up nobody who has one. Knows nothing of what an act does, nor who it is that calls.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from opentelemetry import trace

from shard.places import Places

# A few calls wait for the act under way to end, and are one act then; so much weight need not, nor what has waited for
# so long.
_WORTH_AN_ACT = 100
_SLOW_S = 0.010
# A turn of the event loop that takes less has done nothing.
_QUIET_S = 0.000_060
_BUSY_S_MAX = 0.002

Call = TypeVar("Call")
Result = TypeVar("Result")


class TooManyWaiting(Exception):
    """As much is waiting as may wait, of the caller or of all; try again later."""


@dataclass(slots=True, eq=False)
class _Waiting(Generic[Call, Result]):
    call: Call
    weight: int
    result: asyncio.Future[Result]
    # The caller's, if it is recorded.
    span: trace.Span | None
    since_s: float


class Acts:
    """The acts of several coalescers that take turns, as connections are shared by calls of every sort."""

    def __init__(self) -> None:
        self.under_way = 0
        self._turns: deque[Callable[[], None]] = deque()

    def join(self, begin: Callable[[], None]) -> None:
        self._turns.append(begin)

    def began(self, begin: Callable[[], None]) -> None:
        """Whoever's act has begun is the last to be asked when one has ended."""
        self.under_way += 1
        self._turns.remove(begin)
        self._turns.append(begin)

    def ended(self) -> None:
        """Whoever waits may begin."""
        self.under_way -= 1
        for begin in list(self._turns):
            begin()


class Coalescer(Generic[Call, Result]):
    """`act` does several calls together and answers each one's result or error, in their order; what it raises is
    every caller's error. At most `acts_max` are under way at a time, each of up to `calls_max` calls, and of up to
    `weight_max` by `weigh` (or one call that is heavier); few calls also wait for those `beside` them. Up to
    `waiting_max` wait, of one caller (`whose`) no more than are left free, and none for longer than `wait_s`: then
    `late` makes its error. `abandoned` gets the results of calls that were cancelled when their act had begun,
    `dropped` the calls of which no act began."""

    def __init__(
        self,
        act: Callable[[list[Call]], Awaitable[Sequence[Result | Exception]]],
        *,
        weigh: Callable[[Call], int],
        whose: Callable[[Call], Hashable],
        late: Callable[[], Exception],
        acts_max: int = 2,
        beside: Acts | None = None,
        wait_s: float = 5.0,
        weight_max: int = 1000,
        calls_max: int = 1000,
        waiting_max: int = 50_000,
        abandoned: Callable[[Call, Result], None] | None = None,
        dropped: Callable[[Call], None] | None = None,
    ) -> None:
        self._act = act
        self._weigh = weigh
        self._whose = whose
        self._late = late
        self._acts_max = acts_max
        self._wait_s = wait_s
        self._weight_max = weight_max
        self._calls_max = calls_max
        self._abandoned = abandoned
        self._dropped = dropped
        # Each one's calls that wait, in their order; who was served last comes last.
        self._lines: OrderedDict[Hashable, deque[_Waiting[Call, Result]]] = OrderedDict()
        # All of them, as they came.
        self._by_age: OrderedDict[_Waiting[Call, Result], None] = OrderedDict()
        self._places = Places(waiting_max)
        self._beginning = False
        self._hurry: asyncio.TimerHandle | None = None
        self._patience: asyncio.TimerHandle | None = None
        # The acts under way; the event loop alone would forget them.
        self._acts: set[asyncio.Task[None]] = set()
        self._beside = beside or Acts()
        self._beside.join(self._begin_soon)

    def submit(self, call: Call) -> asyncio.Future[Result]:
        """The call's result, some time. Cancelling it takes the call out; an act that has begun ends when all its
        callers have left, unless somebody takes what is abandoned. Raises TooManyWaiting."""
        weight = self._weigh(call)
        whose = self._whose(call)
        if not self._places.take(whose, weight):
            self._drop(call)
            raise TooManyWaiting(
                f"the shard is behind: {self._places.places_max:,} jobs or leases may wait for it in this router "
                "process, and never more of one org than there is room left for others; try again, or send less"
            )
        loop = asyncio.get_running_loop()
        span = trace.get_current_span()
        result: asyncio.Future[Result] = loop.create_future()
        line = self._lines.get(whose)
        if line is None:
            line = self._lines[whose] = deque()
        waiting = _Waiting(call, weight, result, span if span.is_recording() else None, loop.time())
        line.append(waiting)
        self._by_age[waiting] = None
        if not self._may_begin(loop):
            self._watch(loop)
        else:
            self._begin_soon()
        return result

    def _begin_soon(self) -> None:
        if self._lines and not self._beginning:
            self._beginning = True
            now_s = time.perf_counter()
            asyncio.get_running_loop().call_soon(self._begin_when_quiet, now_s, now_s)

    def _begin_when_quiet(self, since_s: float, turn_s: float) -> None:
        """Lets a busy event loop first do what else it has to do, though not for long: most likely it is taking in more
        calls, which then go together. An idle one has nothing to do."""
        # Not by the loop's clock, which may stand still within a turn.
        now_s = time.perf_counter()
        if now_s - turn_s < _QUIET_S or now_s - since_s > _BUSY_S_MAX or self._places.taken >= _WORTH_AN_ACT:
            self._begin()
        else:
            asyncio.get_running_loop().call_soon(self._begin_when_quiet, since_s, now_s)

    async def finish(self) -> None:
        """Returns once nothing waits and nothing is under way."""
        while self._acts or self._lines:
            # What waits, and has not begun, begins within a few turns of the loop, or when an act ends.
            await (asyncio.wait(self._acts) if self._acts else asyncio.sleep(0))

    def _give_up(self) -> None:
        """On calls that have waited too long."""
        loop = asyncio.get_running_loop()
        self._patience = None
        for whose, line in list(self._lines.items()):
            while line and line[0].since_s + self._wait_s <= loop.time():
                waiting = self._pop(whose, line)
                if not waiting.result.done():
                    waiting.result.set_exception(self._late())
                self._drop(waiting.call)
        if self._lines:
            self._patience = loop.call_at(self._oldest_s() + self._wait_s, self._give_up)

    def _begin(self) -> None:
        self._beginning = False
        loop = asyncio.get_running_loop()
        while self._lines and self._may_begin(loop):
            batch = self._next()
            if batch:
                self._beside.began(self._begin_soon)
                self._acts.add(loop.create_task(self._do(batch)))
        if self._lines:
            self._watch(loop)

    def _may_begin(self, loop: asyncio.AbstractEventLoop) -> bool:
        """A first act always; another beside it for much, or because others take their time."""
        if not self._beside.under_way:
            return True
        return len(self._acts) < self._acts_max and (
            self._places.taken >= _WORTH_AN_ACT or loop.time() - self._oldest_s() >= _SLOW_S
        )

    def _oldest_s(self) -> float:
        """Since when the first of those that wait has waited."""
        return next(iter(self._by_age)).since_s

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Sees to it that what waits does not wait for too long."""
        if self._hurry is None and len(self._acts) < self._acts_max:
            self._hurry = loop.call_at(self._oldest_s() + _SLOW_S, self._begin_another)
        if self._patience is None:
            self._patience = loop.call_at(self._oldest_s() + self._wait_s, self._give_up)

    def _begin_another(self) -> None:
        self._hurry = None
        self._begin()

    def _next(self) -> list[_Waiting[Call, Result]]:
        """Fills an act: everyone in turn has an even share of it, or one call that is heavier, and again while there is
        room. Whose next call does not fit is the first in the next act."""
        batch: list[_Waiting[Call, Result]] = []
        room = self._weight_max
        share = room // len(self._lines)
        calls_share = max(1, self._calls_max // len(self._lines))
        while self._lines and len(batch) < self._calls_max:
            whose, line = next(iter(self._lines.items()))
            if batch and line[0].weight > room:
                break
            self._lines.move_to_end(whose)
            enough = room - share
            last = min(len(batch) + calls_share, self._calls_max)
            while line and len(batch) < last and (not batch or line[0].weight <= room):
                waiting = self._pop(whose, line)
                if waiting.result.done():
                    self._drop(waiting.call)
                    continue
                batch.append(waiting)
                room -= waiting.weight
                if room <= enough:
                    break
        return batch

    def _pop(self, whose: Hashable, line: deque[_Waiting[Call, Result]]) -> _Waiting[Call, Result]:
        waiting = line.popleft()
        del self._by_age[waiting]
        if not line:
            del self._lines[whose]
        self._places.give_back(whose, waiting.weight)
        return waiting

    def _drop(self, call: Call) -> None:
        if self._dropped is not None:
            self._dropped(call)

    async def _do(self, batch: list[_Waiting[Call, Result]]) -> None:
        task = asyncio.current_task()
        assert task is not None
        staying = len(batch)

        def left(result: asyncio.Future[Result]) -> None:
            """Nobody waits for this act once all its callers have left."""
            nonlocal staying
            if result.cancelled():
                staying -= 1
                # What an act has to give back it must hear of: it may have committed.
                if not staying and self._abandoned is None:
                    task.cancel()

        for waiting in batch:
            waiting.result.add_done_callback(left)
        try:
            results = await self._traced(batch)
            for waiting, result in zip(batch, results, strict=True):
                if isinstance(result, Exception):
                    if not waiting.result.done():
                        waiting.result.set_exception(result)
                elif not waiting.result.done():
                    waiting.result.set_result(result)
                elif self._abandoned is not None:
                    self._abandoned(waiting.call, result)
        except Exception as error:  # noqa: BLE001 - it is the callers' to handle
            for waiting in batch:
                if not waiting.result.done():
                    waiting.result.set_exception(error)
        finally:
            for waiting in batch:
                waiting.result.remove_done_callback(left)
                waiting.result.cancel()
            self._acts.discard(task)
            self._beside.ended()

    async def _traced(self, batch: list[_Waiting[Call, Result]]) -> Sequence[Result | Exception]:
        """The act's spans are the first recorded caller's; the others link to it."""
        calls = [waiting.call for waiting in batch]
        spans = [waiting.span for waiting in batch if waiting.span is not None]
        if not spans:
            # Nor are they those of whoever happened to begin the act.
            with trace.use_span(trace.INVALID_SPAN):
                return await self._act(calls)
        for span in spans[1:]:
            span.add_link(spans[0].get_span_context())
        with trace.use_span(spans[0]):
            return await self._act(calls)
