"""How a router process ends if a task that the process needs has failed, or if a step of the end hangs."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from router.process import server
from router.process.upkeep import Upkeep
from tests.routers import PATIENCE_S


async def for_ever() -> None:
    await asyncio.Event().wait()


async def fail() -> None:
    raise ValueError("it cannot go on")


async def test_a_task_that_fails_stops_the_process_and_its_error_is_raised() -> None:
    stop = asyncio.Event()
    async with Upkeep(stop) as upkeep:
        upkeep.begin(for_ever())
        upkeep.begin(fail())
        await asyncio.wait_for(stop.wait(), PATIENCE_S)
    # By now, the process has ended its calls.
    with pytest.raises(ValueError, match="it cannot go on"):
        upkeep.check()


async def test_a_task_that_returns_early_stops_the_process() -> None:
    stop = asyncio.Event()
    async with Upkeep(stop) as upkeep:
        upkeep.begin(asyncio.sleep(0))
        await asyncio.wait_for(stop.wait(), PATIENCE_S)
    upkeep.check()


async def test_tasks_that_go_on_are_cancelled_at_the_end_of_the_scope() -> None:
    stop = asyncio.Event()
    async with Upkeep(stop) as upkeep:
        upkeep.begin(for_ever())
        await asyncio.sleep(0)
    upkeep.check()
    assert not stop.is_set()
    assert asyncio.all_tasks() == {asyncio.current_task()}


class Ending:
    """The objects that a process finishes at its end. `hangs`: the steps that never return."""

    def __init__(self, *hangs: str) -> None:
        self.done: list[str] = []
        self._hangs = hangs

    async def step(self, name: str) -> None:
        if name in self._hangs:
            await for_ever()
        self.done.append(name)

    async def finish(self, end_s: float) -> None:
        def of(name: str, method: str = "finish") -> Any:
            return SimpleNamespace(**{method: lambda: self.step(name)})

        fleet = of("fleet")
        fleet.siblings = of("siblings")
        await server._finish(cast("Any", of("server", "stop")), cast("Any", of("audit")), fleet, end_s)


async def test_calls_that_do_not_end_keep_a_process_from_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_STOP_S_MAX", 0.01)
    ending = Ending("server")
    await asyncio.wait_for(ending.finish(asyncio.get_running_loop().time() + 3600), PATIENCE_S)
    assert ending.done == ["audit", "siblings", "fleet"]


async def test_a_step_that_takes_too_long_ends_with_the_deadline_of_all() -> None:
    ending = Ending("fleet")
    await asyncio.wait_for(ending.finish(asyncio.get_running_loop().time() + 0.1), PATIENCE_S)
    assert ending.done == ["server", "audit", "siblings"]
