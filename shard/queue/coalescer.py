"""Group commit: calls that wait at the same time share one act, which is one statement with one commit. Each coalescer
also limits how many of its acts run at the same time (`acts_max`).

When no act is running, a call begins an act at once. While acts are running, new calls wait, and the next act serves
all of them; an act never waits until more calls come. If more calls wait than one act can serve, each caller gets an
even share of the act. So a caller with a thousand calls does not delay a caller with a single call. This module does
not know what an act does.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Hashable, Sequence, Set
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from opentelemetry import trace

from shard.errors import TooManyWaiting
from shard.fair_quota import FairQuota
from shard.vocabulary import OrgId

# While an act runs, a second act begins only if calls of this total weight wait, or if a call has waited for this time.
# Otherwise the calls wait until the running act ends, and then share one act.
_SECOND_ACT_WEIGHT = 100
_SECOND_ACT_AFTER_S = 0.010
# If `acts_max` acts run, an extra act may begin after this time. The extra act serves only calls whose keys no running
# act has.
_EXTRA_ACT_AFTER_S = 0.020
# If one iteration of the event loop takes less than this, the loop is idle.
_IDLE_ITERATION_S = 0.000_060
# The longest time that a first act waits for a busy event loop.
_BUSY_S_MAX = 0.002
# How long a call waits for its act, unless the coalescer says otherwise.
_WAIT_S = 5.0

Call = TypeVar("Call")
Result = TypeVar("Result")


class SingleCall(NamedTuple):
    """A call that runs by itself and shares no statement with other calls. Such calls go through a Coalescer whose act
    is `one_by_one` (`single_calls` makes such a Coalescer), so that one org's calls leave connections for the calls of
    other orgs (invariant I4). `org`: None if the call is about no org."""

    org: OrgId | None
    weight: int
    act: Callable[[], Awaitable[Any]]


async def one_by_one(calls: Sequence[SingleCall]) -> list[Any]:
    """Runs the calls one after another. Returns the result or the error of each, in order."""
    answers: list[Any] = []
    for call in calls:
        try:
            answers.append(await call.act())
        except Exception as error:  # noqa: BLE001 - the caller handles it
            answers.append(error)
    return answers


@dataclass(slots=True, eq=False)
class _Waiting(Generic[Call, Result]):
    call: Call
    weight: int
    result: asyncio.Future[Result]
    # The caller's span, if it is recorded.
    span: trace.Span | None
    since_s: float


class InFlight:
    """Counts the running acts of several coalescers that share connections. After each act, lets the coalescers begin
    acts, one coalescer after another."""

    def __init__(self) -> None:
        self.count = 0
        # For each coalescer, the callback that begins an act. The coalescer that began an act most recently comes last.
        self._callbacks: deque[Callable[[], None]] = deque()

    def join(self, begin: Callable[[], None]) -> None:
        """Adds a coalescer. `begin` is called each time that an act of any coalescer has ended."""
        self._callbacks.append(begin)

    def began(self, begin: Callable[[], None]) -> None:
        """Notes that an act of the coalescer with this callback has begun."""
        self.count += 1
        self._callbacks.remove(begin)
        self._callbacks.append(begin)

    def ended(self) -> None:
        """Notes that an act has ended, and lets the coalescers begin another act."""
        self.count -= 1
        for begin in list(self._callbacks):
            begin()


class Coalescer(Generic[Call, Result]):
    """Runs calls together.

    `act` runs several calls and returns the result or the error of each, in order. If `act` raises an error, every call
    of the act fails with that error. `key` returns the key of a call (its org), by which calls share fairly; `weight`
    returns how much of an act the call takes. At most `acts_max` acts run at the same time. An act has up to
    `calls_max` calls with a total weight of up to `weight_max`, or a single heavier call. If `acts_max` is more than
    one, one extra act may begin for keys that no running act has. So acts that take long, for example because they wait
    for locks, delay only the calls with their own keys. If only a few light calls wait, they also wait for the acts of
    other coalescers that share `in_flight`.

    Calls with a total weight of up to `waiting_max` may wait. The waiting calls of one key may not weigh more than the
    part of `waiting_max` that is still free. A call that has waited for `wait_s` fails with the error that `on_timeout`
    makes. `on_abandoned` is called with each call that was cancelled after its act had begun, and with the call's
    result. `on_dropped` is called with each call for which no act began."""

    def __init__(
        self,
        act: Callable[[list[Call]], Awaitable[Sequence[Result | Exception]]],
        *,
        weight: Callable[[Call], int],
        key: Callable[[Call], Hashable],
        on_timeout: Callable[[], Exception],
        acts_max: int = 2,
        in_flight: InFlight | None = None,
        wait_s: float = _WAIT_S,
        weight_max: int = 1000,
        calls_max: int = 1000,
        waiting_max: int = 50_000,
        on_abandoned: Callable[[Call, Result], None] | None = None,
        on_dropped: Callable[[Call], None] | None = None,
    ) -> None:
        self._act = act
        self._weight_of = weight
        self._key_of = key
        self._on_timeout = on_timeout
        self._acts_max = acts_max
        self._wait_s = wait_s
        self._weight_max = weight_max
        self._calls_max = calls_max
        self._on_abandoned = on_abandoned
        self._on_dropped = on_dropped
        # The waiting calls of each key, in order of arrival. The key that was served most recently comes last.
        self._queues: OrderedDict[Hashable, deque[_Waiting[Call, Result]]] = OrderedDict()
        # All waiting calls, in order of arrival.
        self._by_age: OrderedDict[_Waiting[Call, Result], None] = OrderedDict()
        self._quota = FairQuota(waiting_max)
        # True while `_begin_when_idle` is scheduled.
        self._beginning = False
        self._second_act_timer: asyncio.TimerHandle | None = None
        self._extra_act_timer: asyncio.TimerHandle | None = None
        self._timeout_timer: asyncio.TimerHandle | None = None
        # The running acts, and the calls of each. The event loop keeps only weak references to its tasks.
        self._acts: dict[asyncio.Task[None], list[_Waiting[Call, Result]]] = {}
        self._in_flight = in_flight or InFlight()
        self._in_flight.join(self._begin_soon)

    def submit(self, call: Call) -> asyncio.Future[Result]:
        """Queues a call. Returns a future of its result; cancelling the future withdraws the call. A running act is
        cancelled once all its callers have cancelled, unless the coalescer has `on_abandoned`. Raises TooManyWaiting.
        """
        weight = self._weight_of(call)
        key = self._key_of(call)
        if not self._quota.take(key, weight):
            self._drop(call)
            raise TooManyWaiting(
                f"the shard is behind: at most {self._quota.places_max:,} jobs or leases may wait for it in this "
                "router process, and one org may not take more of them than remain free for others; try again, or send "
                "less"
            )
        loop = asyncio.get_running_loop()
        span = trace.get_current_span()
        result: asyncio.Future[Result] = loop.create_future()
        queue = self._queues.get(key)
        if queue is None:
            queue = self._queues[key] = deque()
        waiting = _Waiting(call, weight, result, span if span.is_recording() else None, loop.time())
        queue.append(waiting)
        self._by_age[waiting] = None
        if not self._may_begin(loop):
            self._set_timers(loop)
        else:
            self._begin_soon()
        return result

    def _begin_soon(self) -> None:
        if self._queues and not self._beginning:
            self._beginning = True
            now_s = time.perf_counter()
            asyncio.get_running_loop().call_soon(self._begin_when_idle, now_s, now_s)

    def _begin_when_idle(self, since_s: float, iteration_s: float) -> None:
        """Begins acts as soon as the event loop is idle, or the waiting calls have enough weight, or _BUSY_S_MAX has
        passed. While the loop is busy, more calls probably arrive, which can then share the act. `since_s`: the time at
        which this method was first scheduled. `iteration_s`: the time at which this run was scheduled, one iteration of
        the loop ago."""
        # Do not use the loop's clock, because it may show the same time during a whole iteration.
        now_s = time.perf_counter()
        is_idle = now_s - iteration_s < _IDLE_ITERATION_S
        if is_idle or now_s - since_s > _BUSY_S_MAX or self._quota.taken >= _SECOND_ACT_WEIGHT:
            self._begin()
        else:
            asyncio.get_running_loop().call_soon(self._begin_when_idle, since_s, now_s)

    async def finish(self) -> None:
        """Waits until no call waits and no act runs."""
        while self._acts or self._queues:
            # The acts for waiting calls begin within a few iterations of the loop, or when a running act ends.
            await (asyncio.wait(self._acts) if self._acts else asyncio.sleep(0))

    def _fail_overdue(self) -> None:
        """Fails the calls that have waited for `wait_s`."""
        loop = asyncio.get_running_loop()
        self._timeout_timer = None
        for key, queue in list(self._queues.items()):
            while queue and queue[0].since_s + self._wait_s <= loop.time():
                waiting = self._pop(key, queue)
                if not waiting.result.done():
                    waiting.result.set_exception(self._on_timeout())
                self._drop(waiting.call)
        if self._queues:
            self._timeout_timer = loop.call_at(self._oldest_s() + self._wait_s, self._fail_overdue)

    def _begin(self) -> None:
        self._beginning = False
        loop = asyncio.get_running_loop()
        while self._queues and self._may_begin(loop):
            self._begin_act(loop)
        if self._queues:
            self._set_timers(loop)

    def _begin_act(self, loop: asyncio.AbstractEventLoop, besides: Set[Hashable] = frozenset()) -> None:
        batch = self._next_batch(besides)
        if batch:
            self._in_flight.began(self._begin_soon)
            self._acts[loop.create_task(self._run(batch))] = batch

    def _may_begin(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Returns whether an act may begin. A first act may always begin. A second act may begin if the waiting calls
        weigh at least _SECOND_ACT_WEIGHT, or if the oldest call has waited for _SECOND_ACT_AFTER_S."""
        if not self._in_flight.count:
            return True
        return len(self._acts) < self._acts_max and (
            self._quota.taken >= _SECOND_ACT_WEIGHT or loop.time() - self._oldest_s() >= _SECOND_ACT_AFTER_S
        )

    def _oldest_s(self) -> float:
        """Returns the time at which the oldest waiting call was submitted."""
        return next(iter(self._by_age)).since_s

    def _set_timers(self, loop: asyncio.AbstractEventLoop) -> None:
        """Schedules a second act, an extra act for other keys, and the timeout of the oldest waiting call."""
        if self._second_act_timer is None and len(self._acts) < self._acts_max:
            self._second_act_timer = loop.call_at(self._oldest_s() + _SECOND_ACT_AFTER_S, self._begin_second)
        if self._extra_act_timer is None and len(self._acts) == self._acts_max > 1:
            self._extra_act_timer = loop.call_later(_EXTRA_ACT_AFTER_S, self._begin_extra)
        if self._timeout_timer is None:
            self._timeout_timer = loop.call_at(self._oldest_s() + self._wait_s, self._fail_overdue)

    def _begin_second(self) -> None:
        self._second_act_timer = None
        self._begin()

    def _begin_extra(self) -> None:
        """Begins an act for keys that no running act has."""
        self._extra_act_timer = None
        loop = asyncio.get_running_loop()
        if len(self._acts) == self._acts_max:
            running = {self._key_of(waiting.call) for batch in self._acts.values() for waiting in batch}
            for key in [key for key in self._queues if key in running]:
                self._queues.move_to_end(key)
            self._begin_act(loop, besides=running)
        if self._queues:
            self._set_timers(loop)

    def _next_batch(self, besides: Set[Hashable]) -> list[_Waiting[Call, Result]]:
        """Takes the calls for one act. Each key in turn gets an even share of the act, or one call that is heavier than
        the share. If there is still room, each key in turn gets another share. A key whose next call does not fit is
        the first key of the next act. The keys in `besides` come last, and get nothing."""
        batch: list[_Waiting[Call, Result]] = []
        room = self._weight_max
        sharers = max(1, len(self._queues) - len(besides & self._queues.keys()))
        share = room // sharers
        calls_share = max(1, self._calls_max // sharers)
        while self._queues and len(batch) < self._calls_max:
            key, queue = next(iter(self._queues.items()))
            if key in besides or (batch and queue[0].weight > room):
                break
            self._queues.move_to_end(key)
            enough = room - share
            last = min(len(batch) + calls_share, self._calls_max)
            while queue and len(batch) < last and (not batch or queue[0].weight <= room):
                waiting = self._pop(key, queue)
                if waiting.result.done():
                    self._drop(waiting.call)
                    continue
                batch.append(waiting)
                room -= waiting.weight
                if room <= enough:
                    break
        return batch

    def _pop(self, key: Hashable, queue: deque[_Waiting[Call, Result]]) -> _Waiting[Call, Result]:
        waiting = queue.popleft()
        del self._by_age[waiting]
        if not queue:
            del self._queues[key]
        self._quota.give_back(key, waiting.weight)
        return waiting

    def _drop(self, call: Call) -> None:
        if self._on_dropped is not None:
            self._on_dropped(call)

    async def _run(self, batch: list[_Waiting[Call, Result]]) -> None:
        task = asyncio.current_task()
        assert task is not None
        callers = len(batch)

        def on_done(result: asyncio.Future[Result]) -> None:
            nonlocal callers
            if result.cancelled():
                callers -= 1
                # All callers have cancelled their calls, so cancel the act. Do not cancel it if `on_abandoned` needs
                # its results, because the act may have committed already.
                if not callers and self._on_abandoned is None:
                    task.cancel()

        for waiting in batch:
            waiting.result.add_done_callback(on_done)
        try:
            results = await self._traced(batch)
            for waiting, result in zip(batch, results, strict=True):
                if isinstance(result, Exception):
                    if not waiting.result.done():
                        waiting.result.set_exception(result)
                elif not waiting.result.done():
                    waiting.result.set_result(result)
                elif self._on_abandoned is not None:
                    self._on_abandoned(waiting.call, result)
        except Exception as error:  # noqa: BLE001 - the callers handle it
            for waiting in batch:
                if not waiting.result.done():
                    waiting.result.set_exception(error)
        finally:
            for waiting in batch:
                waiting.result.remove_done_callback(on_done)
                waiting.result.cancel()
            del self._acts[task]
            self._in_flight.ended()

    async def _traced(self, batch: list[_Waiting[Call, Result]]) -> Sequence[Result | Exception]:
        """Runs the act in the span of the first caller that has a span. The spans of the other callers link to that
        span."""
        calls = [waiting.call for waiting in batch]
        spans = [waiting.span for waiting in batch if waiting.span is not None]
        if not spans:
            # Otherwise the act would run in the span of the call that happened to begin it.
            with trace.use_span(trace.INVALID_SPAN):
                return await self._act(calls)
        for span in spans[1:]:
            span.add_link(spans[0].get_span_context())
        with trace.use_span(spans[0]):
            return await self._act(calls)


def single_calls(
    on_timeout: Callable[[], Exception], *, acts_max: int = 1, wait_s: float = _WAIT_S
) -> Coalescer[SingleCall, Any]:
    """Returns a coalescer in which each call has an act of its own, and the orgs take turns."""
    return Coalescer(
        one_by_one,
        weight=lambda call: call.weight,
        key=lambda call: call.org,
        on_timeout=on_timeout,
        acts_max=acts_max,
        wait_s=wait_s,
        weight_max=1,
    )
