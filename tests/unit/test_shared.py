"""Callers that ask for one value at the same time share one look-up. No caller gets an answer that was read before the
caller asked."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter

import pytest

from router.route.shared import Shared


class Source:
    """A source that answers each question with its current value."""

    def __init__(self) -> None:
        self.value = 0
        self.asked = Counter[str]()
        self.begun = asyncio.Event()
        self.answering = asyncio.Event()

    async def ask(self, key: str) -> int:
        self.asked[key] += 1
        value = self.value
        self.begun.set()
        await self.answering.wait()
        if value < 0:
            raise LookupError(f"{key} is away")
        return value


async def test_callers_that_come_together_ask_once() -> None:
    source = Source()
    source.answering.set()
    shared = Shared(source.ask)
    answers = await asyncio.gather(*(shared.get("a") for _ in range(1000)), *(shared.get("b") for _ in range(10)))
    assert (set(answers), source.asked) == ({0}, {"a": 1, "b": 1})
    assert await shared.get("a") == 0
    assert source.asked["a"] == 2


async def test_those_who_come_while_somebody_asks_get_a_later_answer_and_share_it() -> None:
    source = Source()
    shared = Shared(source.ask)
    first = asyncio.create_task(shared.get("a"))
    await source.begun.wait()
    source.value = 1
    later = [asyncio.create_task(shared.get("a")) for _ in range(100)]
    await asyncio.sleep(0)
    source.answering.set()
    assert await first == 0
    assert set(await asyncio.gather(*later)) == {1}
    assert source.asked["a"] == 2


async def test_a_caller_that_leaves_takes_nobodys_answer_with_it() -> None:
    source = Source()
    shared = Shared(source.ask)
    leaving, staying = (asyncio.create_task(shared.get("a")) for _ in range(2))
    await source.begun.wait()
    leaving.cancel()
    source.answering.set()
    assert await staying == 0
    assert leaving.cancelled()


async def test_an_error_reaches_all_who_asked_and_not_the_next() -> None:
    source = Source()
    source.answering.set()
    source.value = -1
    shared = Shared(source.ask)
    answers = await asyncio.gather(*(shared.get("a") for _ in range(3)), return_exceptions=True)
    assert [str(answer) for answer in answers] == ["a is away"] * 3
    with pytest.raises(LookupError):
        await shared.get("a")
    source.value = 1
    assert await shared.get("a") == 1


@pytest.mark.parametrize("running", [True, False])
async def test_a_look_up_ends_when_its_last_caller_leaves(running: bool) -> None:
    source = Source()
    shared = Shared(source.ask)
    first = asyncio.create_task(shared.get("a"))
    await source.begun.wait()
    later = [asyncio.create_task(shared.get("a")) for _ in range(100)]
    await asyncio.sleep(0)
    leaving = [first] if running else later
    for caller in leaving:
        caller.cancel()
    await asyncio.wait(leaving)
    source.answering.set()
    assert set(await asyncio.gather(*(later if running else [first]))) == {0}
    assert source.asked["a"] == (2 if running else 1)
    assert await shared.get("a") == 0


def test_an_error_that_nobody_waits_for_any_more_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def leave() -> None:
        source = Source()
        source.value = -1
        leaving = asyncio.create_task(Shared(source.ask).get("a"))
        await source.begun.wait()
        leaving.cancel()
        source.answering.set()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.wait(others)

    asyncio.run(leave())
    gc.collect()
    assert caplog.records == []
