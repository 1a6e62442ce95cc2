"""Consumers that wait on empty queues: many streams over many queues. They show what waiting costs."""

from __future__ import annotations

import asyncio
import itertools
from typing import ClassVar

from bench.system import Finished, Taken
from bench.systems.stubs import Pulled, consume
from windrow.v1 import queue_pb2

_QUEUES = 500


class Parked(Pulled):
    title: ClassVar[str] = "Windrow, parked"

    async def work(self, *, batch: int, concurrency: int, taken: Taken, finished: Finished) -> None:
        orgs = itertools.cycle(self._orgs)
        async with asyncio.TaskGroup() as group:
            for at in range(concurrency):
                start = queue_pb2.ConsumeStart(org=next(orgs), queues=[f"parked-{at % _QUEUES}"], worker="bench")
                group.create_task(consume(next(self._queues), start, 2 * batch, taken, finished))
