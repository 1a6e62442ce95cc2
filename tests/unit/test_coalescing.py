"""Calls that share acts: no call waits longer than necessary, and each call gets exactly one answer, its own."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shard.errors import TooManyWaiting
from shard.queue.coalescer import Coalescer, InFlight


class Late(Exception):
    """The call has waited too long."""


class Refused(Exception):
    """Only this call is refused."""


@dataclass
class Acts:
    """The acts that a coalescer begins; each continues until the test ends it."""

    begun: list[list[int]] = field(default_factory=list[list[int]])
    ended: list[list[int]] = field(default_factory=list[list[int]])
    cancelled: list[list[int]] = field(default_factory=list[list[int]])
    abandoned: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    dropped: list[int] = field(default_factory=list[int])
    under_way_max: int = 0
    _one_more: asyncio.Event = field(default_factory=asyncio.Event)
    _ends: list[asyncio.Future[Sequence[int | Exception] | None]] = field(default_factory=list)

    async def act(self, calls: list[int]) -> Sequence[int | Exception]:
        self.begun.append(calls)
        self._one_more.set()
        end: asyncio.Future[Sequence[int | Exception] | None] = asyncio.get_running_loop().create_future()
        self._ends.append(end)
        self.under_way_max = max(self.under_way_max, self.under_way)
        try:
            answers = await end
        except asyncio.CancelledError:
            self.cancelled.append(calls)
            raise
        except Refused:
            self.ended.append(calls)
            raise
        self.ended.append(calls)
        return [-call for call in calls] if answers is None else answers

    async def until_begun(self) -> None:
        """Waits until one more act has begun."""
        await self._one_more.wait()
        self._one_more.clear()

    @property
    def under_way(self) -> int:
        return len(self.begun) - len(self.ended) - len(self.cancelled)

    def open(self) -> list[int]:
        """Returns the calls of an act that have not ended and are not being cancelled."""
        return [act for act, end in enumerate(self._ends) if not end.done()]

    def end(self, act: int, answers: Sequence[int | Exception] | Exception | None = None) -> None:
        """Ends an act. The answer to each call is the negative of the call's number, unless `answers` is given."""
        if isinstance(answers, Exception):
            self._ends[act].set_exception(answers)
        else:
            self._ends[act].set_result(answers)

    def coalescer(
        self,
        *,
        acts_max: int = 2,
        weight: Callable[[int], int] = lambda _: 1,
        key: Callable[[int], Hashable] = lambda _: "everybody",
        wait_s: float = 1000.0,
        weight_max: int = 1000,
        calls_max: int = 1000,
        waiting_max: int = 50_000,
        gives_back: bool = True,
        in_flight: InFlight | None = None,
    ) -> Coalescer[int, int]:
        return Coalescer(
            self.act,
            weight=weight,
            key=key,
            on_timeout=Late,
            acts_max=acts_max,
            in_flight=in_flight,
            wait_s=wait_s,
            weight_max=weight_max,
            calls_max=calls_max,
            waiting_max=waiting_max,
            on_abandoned=(lambda call, result: self.abandoned.append((call, result))) if gives_back else None,
            on_dropped=self.dropped.append,
        )


async def turns(count: int = 5) -> None:
    """Lets the event loop run until nothing is left to do."""
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.fixture
def acts() -> Acts:
    return Acts()


@pytest.fixture(autouse=True, scope="module")
def patience() -> Iterator[None]:
    """Makes sure that no act counts as slow, and that every iteration of the event loop counts as idle, even on a slow
    machine. So only the test decides when acts begin."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("shard.queue.coalescer._IDLE_ITERATION_S", math.inf)
        patched.setattr("shard.queue.coalescer._SECOND_ACT_AFTER_S", 1000.0)
        yield


# When acts begin


async def test_an_idle_coalescer_begins_at_once(acts: Acts) -> None:
    result = acts.coalescer().submit(1)
    # The task of the act begins in the next iteration of the event loop. The coalescer does not wait for more calls.
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert acts.begun == [[1]]
    acts.end(0)
    assert await result == -1


async def test_calls_of_one_turn_go_together(acts: Acts) -> None:
    coalescer = acts.coalescer()

    async def call(number: int) -> int:
        return await coalescer.submit(number)

    calls = asyncio.gather(*map(call, range(1, 6)))
    await turns()
    assert acts.begun == [[1, 2, 3, 4, 5]]
    acts.end(0)
    assert await calls == [-1, -2, -3, -4, -5]


async def test_a_few_calls_wait_for_the_act_under_way_and_then_go_together(acts: Acts) -> None:
    coalescer = acts.coalescer()
    results = []
    for number in range(1, 8):
        results.append(coalescer.submit(number))
        await turns()
    assert acts.begun == [[1]]
    acts.end(0)
    await turns()
    assert acts.begun == [[1], [2, 3, 4, 5, 6, 7]]
    acts.end(1)
    assert await asyncio.gather(*results) == [-number for number in range(1, 8)]
    # The coalescer is idle again, so the next call begins at once.
    last = coalescer.submit(8)
    await turns()
    assert acts.begun[2:] == [[8]]
    acts.end(2)
    assert await last == -8


async def test_calls_of_two_kinds_take_turns(acts: Acts) -> None:
    in_flight = InFlight()
    odd, even = acts.coalescer(in_flight=in_flight), acts.coalescer(in_flight=in_flight)
    results = [odd.submit(1)]
    for act in range(6):
        await turns()
        # While an act runs, calls of both kinds arrive.
        results += [odd.submit(2 * act + 3), even.submit(2 * act + 2)]
        await turns()
        acts.end(act)
    await turns()
    assert [calls[0] % 2 for calls in acts.begun] == [1, 0, 1, 0, 1, 0, 1]
    acts.end(6)
    await turns()
    acts.end(7)
    await asyncio.gather(*results)


async def test_much_need_not_wait_until_as_many_acts_as_may_be_are_under_way(acts: Acts) -> None:
    coalescer = acts.coalescer(acts_max=2, weight=lambda call: call)
    results = []
    for number in (1, 99, 1, 100, 2, 500):
        results.append(coalescer.submit(number))
        await turns()
    assert acts.begun == [[1], [99, 1]]
    acts.end(0)
    await turns()
    assert acts.begun[2:] == [[100, 2, 500]]
    acts.end(1)
    acts.end(2)
    assert await asyncio.gather(*results) == [-1, -99, -1, -100, -2, -500]


async def test_nobody_waits_for_an_act_that_takes_its_time(acts: Acts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shard.queue.coalescer._SECOND_ACT_AFTER_S", 0.005)
    coalescer = acts.coalescer(acts_max=2)
    first = coalescer.submit(1)
    await turns()
    second = coalescer.submit(2)
    async with asyncio.timeout(60):
        while len(acts.begun) < 2:
            await acts.until_begun()
    acts.end(1)
    assert await second == -2
    acts.end(0)
    assert await first == -1


async def test_a_caller_whose_acts_hang_delays_no_other_caller(acts: Acts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shard.queue.coalescer._EXTRA_ACT_AFTER_S", 0.001)
    coalescer = acts.coalescer(acts_max=2, key=lambda call: call // 1000, weight=lambda call: 100 if call < 1000 else 1)
    results = [coalescer.submit(1)]
    await turns()
    results.append(coalescer.submit(2))
    await turns()
    assert acts.begun == [[1], [2]]
    results += [coalescer.submit(call) for call in (3, 1001, 4, 1002, 2001)]
    async with asyncio.timeout(60):
        while len(acts.begun) < 3:
            await acts.until_begun()
    assert acts.begun[2:] == [[1001, 1002, 2001]]
    # Only one act may be added in this way, and the first caller keeps its turn.
    results.append(coalescer.submit(3001))
    await turns()
    acts.end(0)
    await turns()
    assert acts.begun[3:] == []
    acts.end(2)
    await turns()
    assert acts.begun[3:] == [[3, 4, 3001]]
    acts.end(1)
    acts.end(3)
    assert await asyncio.gather(*results) == [-1, -2, -3, -1001, -4, -1002, -2001, -3001]


async def test_one_act_at_a_time_stays_one_though_another_caller_waits(
    acts: Acts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shard.queue.coalescer._EXTRA_ACT_AFTER_S", 0.0)
    coalescer = acts.coalescer(acts_max=1, key=lambda call: call)
    results = [coalescer.submit(1)]
    await turns()
    results.append(coalescer.submit(2))
    await turns(20)
    assert acts.begun == [[1]]
    acts.end(0)
    await turns()
    acts.end(1)
    assert await asyncio.gather(*results) == [-1, -2]


async def test_an_act_takes_no_more_than_its_weight_in_the_order_of_the_calls(acts: Acts) -> None:
    coalescer = acts.coalescer(acts_max=1, weight=lambda call: call, weight_max=10)
    # A call that is heavier than the limit gets an act of its own. No call overtakes another call to fill an act.
    results = [coalescer.submit(weight) for weight in (4, 6, 1, 99, 3, 5, 4)]
    for turn, expected in enumerate([[4, 6], [1], [99], [3, 5], [4]]):
        await turns()
        assert acts.begun[turn:] == [expected]
        acts.end(turn)
    assert await asyncio.gather(*results) == [-4, -6, -1, -99, -3, -5, -4]


async def test_a_call_too_many_is_told_so_at_once_and_costs_the_others_nothing(acts: Acts) -> None:
    coalescer = acts.coalescer(acts_max=1, weight=lambda call: call, waiting_max=20)
    first = coalescer.submit(3)
    await turns()
    waiting = [coalescer.submit(7), coalescer.submit(3)]
    with pytest.raises(
        TooManyWaiting,
        match="20 jobs or leases may wait for it in this router process, and one org may not take more of them than",
    ):
        coalescer.submit(1)
    assert acts.dropped == [1]
    acts.end(0)
    await turns()
    # No call is waiting now, so there is room again, even for a heavy call.
    waiting.append(coalescer.submit(99))
    acts.end(1)
    await turns()
    acts.end(2)
    assert await asyncio.gather(first, *waiting) == [-3, -7, -3, -99]


async def test_one_caller_leaves_others_as_many_places_as_it_takes(acts: Acts) -> None:
    coalescer = acts.coalescer(acts_max=1, key=lambda call: call // 1000, waiting_max=20)
    under_way = coalescer.submit(1)
    await turns()
    results: list[asyncio.Future[int]] = []
    refused: list[int] = []
    for call in (*range(1000, 1020), *range(2000, 2020), *range(3000, 3001)):
        try:
            results.append(coalescer.submit(call))
        except TooManyWaiting:
            refused.append(call)
    assert [sum(call // 1000 == caller for call in refused) for caller in (1, 2, 3)] == [10, 15, 0]
    acts.end(0)
    await turns()
    acts.end(1)
    await asyncio.gather(under_way, *results)
    # Callers whose calls have ended have places again.
    again = coalescer.submit(1000)
    await turns()
    acts.end(2)
    assert await again == -1000


# Turns of callers


async def test_one_call_waits_for_one_act_and_not_for_the_thousands_of_another_caller(acts: Acts) -> None:
    coalescer = acts.coalescer(acts_max=1, key=lambda call: call >= 5000, weight_max=10)
    results = [coalescer.submit(call) for call in range(5000)]
    await turns()
    results.append(coalescer.submit(5000))
    acts.end(0)
    await turns()
    assert acts.begun[1] == [*range(10, 15), 5000, *range(15, 19)]
    for result in results:
        result.cancel()
    acts.end(1)


async def test_an_act_is_dealt_out_evenly_by_weight_and_to_each_in_the_order_of_its_calls(acts: Acts) -> None:
    coalescer = acts.coalescer(acts_max=1, weight=lambda call: call % 10, key=lambda call: call // 100, weight_max=12)
    under_way = coalescer.submit(1)
    await turns()
    calls = (101, 111, 121, 131, 141, 151, 161, 203, 213, 223, 302)
    results = [coalescer.submit(call) for call in calls]
    for turn, expected in enumerate(
        # Each of the three callers gets four places, or fewer if it asks for fewer. The remaining places go to the next
        # callers in turn.
        ([1], [101, 111, 121, 131, 203, 213, 302], [141, 151, 161, 223])
    ):
        assert acts.begun[turn:] == [expected]
        acts.end(turn)
        await turns()
    assert await asyncio.gather(under_way, *results) == [-1, *(-call for call in calls)]


async def test_an_act_takes_so_many_calls_at_most_and_as_many_of_each_caller(acts: Acts) -> None:
    coalescer = acts.coalescer(calls_max=4, acts_max=1, key=lambda call: call // 100)
    first = coalescer.submit(0)
    await turns()
    # One caller has five calls waiting, and another caller has two.
    results = [coalescer.submit(call) for call in (101, 102, 103, 104, 105, 201, 202)]
    for act in range(3):
        acts.end(act)
        await turns()
    assert acts.begun == [[0], [101, 102, 201, 202], [103, 104, 105]]
    assert await asyncio.gather(first, *results) == [0, *(-call for call in (101, 102, 103, 104, 105, 201, 202))]


async def test_a_call_that_an_act_has_no_room_for_is_the_next_ones_first(acts: Acts) -> None:
    coalescer = acts.coalescer(acts_max=1, weight=lambda call: call % 10, key=lambda call: call // 100, weight_max=9)
    under_way = coalescer.submit(1)
    await turns()
    results = [coalescer.submit(call) for call in (101, 111, 209, 219, 301, 121)]
    for turn, expected in enumerate(([1], [101, 111, 121], [209], [301], [219])):
        assert acts.begun[turn:] == [expected]
        acts.end(turn)
        await turns()
    await asyncio.gather(under_way, *results)


async def test_callers_that_wait_too_long_get_an_error_whoever_else_is_served(acts: Acts) -> None:
    coalescer = acts.coalescer(acts_max=1, key=lambda call: call % 3, wait_s=0.01)
    under_way = coalescer.submit(0)
    await turns()
    late = [coalescer.submit(call) for call in (1, 2, 3, 4)]
    assert [type(answer) for answer in await asyncio.gather(*late, return_exceptions=True)] == [Late] * 4
    assert sorted(acts.dropped) == [1, 2, 3, 4]
    acts.end(0)
    assert await under_way == 0


async def test_a_call_that_waits_too_long_is_told_so_and_is_not_done(acts: Acts) -> None:
    coalescer = acts.coalescer(acts_max=1, wait_s=0.01)
    under_way = coalescer.submit(1)
    await turns()
    late = coalescer.submit(2)
    with pytest.raises(Late):
        await late
    assert acts.dropped == [2]
    acts.end(0)
    assert await under_way == -1
    await turns()
    assert acts.begun == [[1]]


async def test_a_call_that_came_with_those_under_way_but_had_no_room_waits_no_longer_than_others(acts: Acts) -> None:
    coalescer = acts.coalescer(acts_max=1, wait_s=0.01, weight_max=1)
    first, second = coalescer.submit(1), coalescer.submit(2)
    async with asyncio.timeout(60):
        with pytest.raises(Late):
            await second
    acts.end(0)
    assert await first == -1


# Errors


async def test_one_calls_error_is_its_own(acts: Acts) -> None:
    coalescer = acts.coalescer()
    results = [coalescer.submit(number) for number in (1, 2, 3)]
    await turns()
    acts.end(0, [-1, Refused("two"), -3])
    answers = await asyncio.gather(*results, return_exceptions=True)
    assert (answers[0], answers[2]) == (-1, -3)
    assert isinstance(answers[1], Refused)


async def test_what_an_act_raises_is_everybodys_and_nobody_elses(acts: Acts) -> None:
    coalescer = acts.coalescer(weight=lambda _: 100)
    first = [coalescer.submit(number) for number in (1, 2)]
    await turns()
    second = coalescer.submit(3)
    await turns()
    acts.end(0, Refused("all"))
    for result in first:
        with pytest.raises(Refused):
            await result
    acts.end(1)
    assert await second == -3


async def test_an_act_that_answers_too_few_leaves_nobody_without_an_answer(acts: Acts) -> None:
    coalescer = acts.coalescer()
    results = [coalescer.submit(number) for number in (1, 2, 3)]
    await turns()
    acts.end(0, [-1])
    answers = await asyncio.wait_for(asyncio.gather(*results, return_exceptions=True), 60)
    assert [isinstance(answer, ValueError) for answer in answers[1:]] == [True, True]


# Callers that leave


async def test_a_call_cancelled_while_it_waits_is_not_done(acts: Acts) -> None:
    coalescer = acts.coalescer(acts_max=1)
    first = coalescer.submit(1)
    await turns()
    results = [coalescer.submit(number) for number in (2, 3, 4)]
    results[1].cancel()
    acts.end(0)
    await turns()
    acts.end(1)
    assert await asyncio.gather(*[first, results[0], results[2]]) == [-1, -2, -4]
    assert acts.begun == [[1], [2, 4]]
    assert (acts.abandoned, acts.dropped) == ([], [3])


async def test_when_all_that_wait_have_left_nothing_is_begun(acts: Acts) -> None:
    coalescer = acts.coalescer()
    for number in (1, 2):
        coalescer.submit(number).cancel()
    await turns()
    assert (acts.begun, acts.dropped) == ([], [1, 2])
    result = coalescer.submit(3)
    await turns()
    assert acts.begun == [[3]]
    acts.end(0)
    assert await result == -3


async def test_the_result_of_a_call_that_left_an_act_under_way_is_abandoned(acts: Acts) -> None:
    coalescer = acts.coalescer()
    leaves, stays, fails = coalescer.submit(1), coalescer.submit(2), coalescer.submit(3)
    await turns()
    leaves.cancel()
    fails.cancel()
    await turns()
    assert acts.cancelled == []
    acts.end(0, [-1, -2, Refused("nobody hears")])
    assert await stays == -2
    assert acts.abandoned == [(1, -1)]


async def test_an_act_that_may_have_something_to_give_back_goes_on_without_its_callers(acts: Acts) -> None:
    coalescer = acts.coalescer(acts_max=1)
    leaving = [coalescer.submit(1), coalescer.submit(2)]
    await turns()
    for each in leaving:
        each.cancel()
    await turns()
    assert acts.cancelled == []
    acts.end(0)
    await turns()
    assert acts.abandoned == [(1, -1), (2, -2)]


async def test_an_act_that_nobody_waits_for_any_more_ends_and_makes_room(acts: Acts) -> None:
    coalescer = acts.coalescer(acts_max=1, gives_back=False)
    leaving = [coalescer.submit(1), coalescer.submit(2)]
    await turns()
    next_one = coalescer.submit(3)
    leaving[0].cancel()
    await turns()
    assert acts.cancelled == []
    leaving[1].cancel()
    await turns()
    assert (acts.cancelled, acts.begun) == ([[1, 2]], [[1, 2], [3]])
    acts.end(1)
    assert await next_one == -3


# Any order of events


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(1, 6)),
        st.tuples(st.sampled_from(("cancel", "end", "end partly", "fail", "turn")), st.integers(0, 1000)),
    ),
    max_size=60,
)


@given(
    steps=STEPS,
    acts_max=st.integers(1, 3),
    weight_max=st.integers(1, 8),
    waiting_max=st.integers(1, 30),
    gives_back=st.booleans(),
    worth=st.integers(1, 12),
    slow_s=st.sampled_from((0.0, 1000.0)),
    extra_s=st.sampled_from((0.0, 1000.0)),
)
def test_no_call_is_lost_or_answered_twice(
    steps: list[tuple[str, int]],
    acts_max: int,
    weight_max: int,
    waiting_max: int,
    gives_back: bool,
    worth: int,
    slow_s: float,
    extra_s: float,
) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("shard.queue.coalescer._SECOND_ACT_WEIGHT", worth)
        patched.setattr("shard.queue.coalescer._SECOND_ACT_AFTER_S", slow_s)
        patched.setattr("shard.queue.coalescer._EXTRA_ACT_AFTER_S", extra_s)
        asyncio.run(_play(steps, acts_max, weight_max, waiting_max, gives_back))


_CALLERS = 3


def _caller(call: int) -> int:
    return call * call % 7 % _CALLERS


async def _play(
    steps: list[tuple[str, int]], acts_max: int, weight_max: int, waiting_max: int, gives_back: bool
) -> None:
    acts = Acts()
    weights: dict[int, int] = {}
    coalescer = acts.coalescer(
        acts_max=acts_max,
        weight=weights.__getitem__,
        key=_caller,
        weight_max=weight_max,
        waiting_max=waiting_max,
        gives_back=gives_back,
    )
    results: dict[int, asyncio.Future[int]] = {}
    refused: set[int] = set()
    # The expected outcome of each call.
    told: dict[int, int | type[Exception]] = {}

    def end(act: int, how: str) -> None:
        calls = acts.begun[act]
        if how == "fail":
            told.update(dict.fromkeys(calls, Refused))
            acts.end(act, Refused("all"))
        else:
            answers = [Refused("one") if how == "end partly" and call % 2 else -call for call in calls]
            told.update(
                (call, Refused if isinstance(a, Exception) else a) for call, a in zip(calls, answers, strict=True)
            )
            acts.end(act, answers)

    for step, number in steps:
        match step:
            case "submit":
                call = len(weights) + 1
                weights[call] = number
                try:
                    results[call] = coalescer.submit(call)
                except TooManyWaiting:
                    refused.add(call)
            case "cancel" if results:
                list(results.values())[number % len(results)].cancel()
            case "turn":
                await asyncio.sleep(0)
            case "end" | "end partly" | "fail" if acts.open():
                end(acts.open()[number % len(acts.open())], step)
            case _:
                pass
    for _ in range(len(weights) + 1):
        await turns(6)
        for act in acts.open():
            end(act, "end")
    await turns(6)
    assert acts.under_way == 0
    assert acts.under_way_max <= (acts_max if acts_max == 1 else acts_max + 1)
    assert not (gives_back and acts.cancelled)
    begun = [call for calls in acts.begun for call in calls]
    # Each caller's calls are in order, and no call is in two acts.
    for caller in range(_CALLERS):
        own = [call for call in begun if _caller(call) == caller]
        assert own == sorted(own)
    assert set(Counter(begun).values()) <= {1}
    for calls in acts.begun:
        assert len(calls) == 1 or sum(weights[call] for call in calls) <= weight_max
    assert set(acts.dropped).isdisjoint(begun)
    assert set(Counter(acts.dropped).values()) <= {1}
    assert {*acts.dropped, *begun} == weights.keys()
    assert refused <= set(acts.dropped)
    for call, result in results.items():
        assert result.done()
        if result.cancelled():
            # The result is not lost: `on_abandoned` gets it, unless all callers of the act had left.
            continue
        expected = told[call]
        error = result.exception()
        assert (result.result() == expected) if error is None else isinstance(error, Refused) and expected is Refused
    for call, answer in acts.abandoned:
        assert results[call].cancelled()
        assert told[call] == answer
    assert set(Counter(call for call, _ in acts.abandoned).values()) <= {1}
    done = {call for calls in acts.ended for call in calls}
    for call in done:
        if gives_back and results[call].cancelled() and isinstance(told[call], int):
            assert (call, told[call]) in acts.abandoned
