"""What the service of schedules computes by itself."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any, cast

import pytest

from router.fleet.fleet import Fleet
from router.services.schedules import SchedulesService
from shard.schedule import Timing
from shard.schedules import calendar
from shard.vocabulary import Micros
from windrow.v1 import schedules_pb2


class FleetAtNoon:
    async def read(self, *_: Any) -> Micros:
        return Micros(43_200_000_000)


async def test_previews_are_computed_one_at_a_time_in_a_thread_so_that_the_process_serves_other_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads: list[int] = []
    busy = threading.Lock()
    after = calendar.after

    def noted(timing: Timing, moment: Micros) -> Iterator[Micros]:
        assert busy.acquire(blocking=False)
        threads.append(threading.get_ident())
        yield from list(after(timing, moment))[:3]
        busy.release()

    spec = schedules_pb2.ScheduleSpec(cron="0 0 1 1 *")
    spec.end.FromSeconds(400_000_000)
    service = SchedulesService(cast("Fleet", FleetAtNoon()))
    monkeypatch.setattr(calendar, "after", noted)
    requests = [schedules_pb2.PreviewScheduleRequest(org=f"org-{n}", spec=spec, count=100) for n in range(20)]
    answers = await asyncio.gather(*map(service.PreviewSchedule, requests))
    assert {len(answer.times) for answer in answers} == {3}
    assert len(threads) == 20
    assert threading.get_ident() not in threads
