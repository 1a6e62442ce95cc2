"""Many schedules that nobody changes. Each fires every 15 minutes, at instants of its own, and skips none."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from chaos.operator_calls import TRY_S, is_created
from proof.checker.evidence import Schedule, Terms
from proof.clients import calls
from proof.clients.site import QUEUE
from proof.history import payload_of
from windrow.v1 import job_pb2, schedules_pb2, schedules_pb2_grpc

_EVERY_S = 900
# From when on intervals are counted. The contract takes no time before 1971.
_FIRST_S = 1_000_000_000
_AT_A_TIME = 32
# How many are created in a second before the faults begin. If that takes longer, the others are created under faults.
PER_SECOND = 400


class SteadySchedules:
    """All of them."""

    def __init__(
        self,
        stubs: Sequence[schedules_pb2_grpc.SchedulesAsyncStub],
        orgs: Sequence[str],
        *,
        count: int,
        end_s: int,
    ) -> None:
        self._stubs = stubs
        self._orgs = orgs
        self._count = count
        self._end_s = end_s
        # Whether a router said that it exists, by number. One that was not tried to be created is not here.
        self._created: dict[int, bool] = {}

    @property
    def seen(self) -> list[Schedule]:
        return [self._seen(number, created) for number, created in self._created.items()]

    @property
    def created(self) -> int:
        """How many exist."""
        return sum(self._created.values())

    async def create(self, *, until_s: float) -> None:
        """Creates those that do not exist, until this time."""
        async with asyncio.TaskGroup() as group:
            for first in range(_AT_A_TIME):
                group.create_task(self._create_every_nth(first, until_s))

    async def _create_every_nth(self, first: int, until_s: float) -> None:
        for number in range(first, self._count, _AT_A_TIME):
            while not self._created.get(number):
                if time.time() >= until_s:
                    return
                self._created.setdefault(number, False)
                self._created[number] = await self._create(number)

    async def _create(self, number: int) -> bool:
        spec = schedules_pb2.ScheduleSpec(
            interval=calls.duration(_EVERY_S),
            overlap=schedules_pb2.OVERLAP_POLICY_ALLOW,
            catch_up=schedules_pb2.CATCH_UP_POLICY_ALL,
        )
        # Intervals are counted from the start.
        spec.start.FromSeconds(self._offset_s(number))
        spec.end.FromSeconds(self._end_s)
        org, name = self._org(number), _name(number)
        job = job_pb2.JobTemplate(queue=QUEUE, kind="work", payload=payload_of(org, name, 0), attributes={"terms": "0"})
        request = schedules_pb2.CreateScheduleRequest(org=org, name=name, spec=spec, job=job)
        stub = self._stubs[number % len(self._stubs)]
        return await is_created(stub.CreateSchedule(request, timeout=TRY_S))

    def _seen(self, number: int, created: bool) -> Schedule:
        terms = Terms(
            every_us=_EVERY_S * 1_000_000, offset_us=self._offset_s(number) * 1_000_000, skips_for=frozenset()
        )
        return Schedule(
            org=self._org(number),
            name=_name(number),
            terms=terms,
            ends_us=self._end_s * 1_000_000,
            acknowledged=created,
        )

    def _org(self, number: int) -> str:
        return self._orgs[number % len(self._orgs)]

    def _offset_s(self, number: int) -> int:
        return _FIRST_S + number * _EVERY_S // self._count


def _name(number: int) -> str:
    return f"steady-{number}"
