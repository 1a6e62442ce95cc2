"""How a router fires the schedules of a shard: when the router looks for due schedules, and what it asks other
shards."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from router.fleet.schedules import Scheduler
from router.fleet.shard_handle import ShardHandle
from shard.errors import ShardUnavailable
from shard.queue.store import Store
from shard.schedules.due_schedules import DueSchedules, Fired, Needed, Wake
from shard.vocabulary import Answer, JobId, Micros, OrgId, ShardName

ACME, JOB = OrgId("acme"), JobId("019a9f5e-7c1d-7a41-8f0e-3f2b6d1c9a55")
PATIENCE_S = 30.0
HOUR_US = 3_600_000_000


class Shard:
    """A shard with one due schedule, which needs `needed` or nothing. After it fires, none is due for an hour."""

    name = ShardName("s1")

    def __init__(self, needed: Needed | None = None) -> None:
        self.needed = needed
        self.looks = 0
        self.told: list[Mapping[JobId, bool]] = []
        self.whole: list[bool] = []
        self.answer = Answer.OK
        self.ended: list[int] = [0]
        self.cancelled: list[JobId] = []
        self.asleep = asyncio.Event()
        self.failures = 0
        self.postponed = False

    async def next_wake(self) -> Wake:
        self.looks += 1
        if self.failures:
            self.failures -= 1
            raise ShardUnavailable(self.name, "as the test wants")
        due = not self.told or self.needed is not None
        if due and self.told and not self.postponed:
            # A moment later, the router looks at the waiting schedule again.
            self.postponed = True
            return Wake(Micros(0), Micros(1_000))
        if not due:
            self.asleep.set()
        return Wake(Micros(0), Micros(0) if due else Micros(HOUR_US))

    async def fire(self, *, is_whole: Callable[[OrgId], bool], known: Mapping[JobId, bool]) -> Fired:
        self.told.append(dict(known))
        self.whole.append(is_whole(ACME))
        if self.needed is not None and self.needed.job not in known:
            return Fired(taken=1, needed=[self.needed])
        self.needed = None
        return Fired(taken=1, jobs=1)

    async def find_ended(self, jobs: Sequence[tuple[OrgId, str]]) -> list[int]:
        assert jobs == [(ACME, JOB.replace("-", ""))]
        return self.ended

    async def cancel(self, _: OrgId, ids: Sequence[JobId], *, reason: str) -> list[Answer]:
        assert reason
        self.cancelled += ids
        return [self.answer]


def handle(shard: Shard) -> ShardHandle:
    up = SimpleNamespace(store=shard)
    return cast("ShardHandle", SimpleNamespace(require_up=lambda: up, require_writable=lambda: up))


async def until_asleep(
    shard: Shard,
    others: Sequence[Shard] | None = (),
    *,
    may_fire: Callable[[], bool] = lambda: True,
    sweep_s: float = 3600,
) -> None:
    scheduler = Scheduler(
        cast("DueSchedules", shard),
        cast("Store", shard),
        sweep_s=sweep_s,
        may_fire=may_fire,
        elsewhere=lambda _: None if others is None else [handle(other) for other in others],
    )
    task = asyncio.create_task(scheduler.run())
    try:
        await asyncio.wait_for(shard.asleep.wait(), PATIENCE_S)
    finally:
        task.cancel()


async def test_what_is_due_is_fired_and_then_the_router_sleeps() -> None:
    shard = Shard()
    await until_asleep(shard)
    assert (shard.told, shard.whole, shard.looks) == ([{}], [True], 2)


async def test_a_shard_that_takes_no_jobs_is_left_alone() -> None:
    shard = Shard()
    asked: list[bool] = []

    def may_fire() -> bool:
        asked.append(True)
        if len(asked) == 3:
            shard.asleep.set()
        return False

    await until_asleep(shard, may_fire=may_fire, sweep_s=0.01)
    assert (shard.looks, shard.told) == (0, [])


async def test_after_a_failure_it_tries_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.fleet.schedules._PAUSE_S", 0.001)
    shard = Shard()
    shard.failures = 2
    await until_asleep(shard)
    assert shard.looks == 4


async def test_a_change_wakes_it() -> None:
    shard = Shard()
    scheduler = Scheduler(
        cast("DueSchedules", shard), cast("Store", shard), sweep_s=3600, may_fire=lambda: True, elsewhere=lambda _: ()
    )
    task = asyncio.create_task(scheduler.run())
    await asyncio.wait_for(shard.asleep.wait(), PATIENCE_S)
    shard.asleep.clear()
    scheduler.look()
    await asyncio.wait_for(shard.asleep.wait(), PATIENCE_S)
    task.cancel()
    assert shard.looks == 3


@pytest.mark.parametrize(("ended", "is_live"), [([0], False), ([], True)])
async def test_the_shards_that_an_org_is_leaving_are_asked_whether_its_job_is_live(
    ended: list[int], is_live: bool
) -> None:
    shard, source = Shard(Needed(ACME, JOB, cancel=False)), Shard()
    source.ended = ended
    await until_asleep(shard, [source])
    assert (shard.told, shard.whole) == ([{}, {JOB: is_live}], [False, False])


async def test_a_job_is_cancelled_where_it_is_before_the_run_is_decided() -> None:
    shard, source = Shard(Needed(ACME, JOB, cancel=True)), Shard()
    source.answer = Answer.NOT_FOUND
    await until_asleep(shard, [source])
    assert (source.cancelled, shard.cancelled) == ([JOB], [JOB])
    assert shard.told == [{}, {JOB: False}]


async def test_a_job_that_has_succeeded_meanwhile_needs_no_cancel() -> None:
    shard = Shard(Needed(ACME, JOB, cancel=True))
    shard.answer = Answer.STALE
    await until_asleep(shard)
    assert shard.told == [{}, {JOB: False}]


async def test_while_the_placement_is_not_known_nothing_is_decided() -> None:
    shard = Shard(Needed(ACME, JOB, cancel=False))
    tried = asyncio.Event()
    fire = shard.fire

    async def counted(**options: Any) -> Fired:
        if len(shard.told) == 2:
            tried.set()
        return await fire(**options)

    shard.fire = counted  # type: ignore[method-assign]
    trying = asyncio.create_task(until_asleep(shard, None))
    await asyncio.wait_for(tried.wait(), PATIENCE_S)
    trying.cancel()
    assert set(map(str, shard.told)) == {"{}"}
    assert not any(shard.whole)
