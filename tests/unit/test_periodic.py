"""Periodic and everlasting tasks of a router: what happens when they fail."""

from __future__ import annotations

import asyncio
import logging

import pytest

from router.fleet.periodic import every, keep_on
from shard.errors import ShardUnavailable
from shard.vocabulary import ShardName


async def test_a_failure_is_logged_once_until_the_task_has_succeeded_again(caplog: pytest.LogCaptureFixture) -> None:
    outcomes = iter([False, False, False, True, False, False])
    over = asyncio.Event()

    async def act() -> None:
        succeeds = next(outcomes, None)
        if succeeds is None:
            over.set()
        elif not succeeds:
            raise ShardUnavailable(ShardName("s1"), "it does not answer")

    with caplog.at_level(logging.INFO, "shard.attempts"):
        task = asyncio.create_task(every(0.001, "look at s1", act))
        await asyncio.wait_for(over.wait(), 60)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert caplog.messages == ["could not look at s1: shard 's1' is unavailable: it does not answer"] * 2


async def test_a_task_that_fails_begins_again_and_its_fault_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    runs: list[None] = []
    again = asyncio.Event()

    async def run() -> None:
        runs.append(None)
        assert len(runs) == 2, "a fault"
        again.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(keep_on("look at s1", run, pause_s=0.001))
    await asyncio.wait_for(again.wait(), 60)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    (record,) = caplog.records
    assert (record.message, record.levelname) == ("could not look at s1", "ERROR")
    assert record.exc_text is not None
    assert "a fault" in record.exc_text
