"""The schedules of a run, and the operators who pause, resume, trigger, alter and backfill them while they fire.

Schedules are created with an end, which is also the end of the faults. No call ends a schedule, because a call could
drop instants that are due but not decided yet. Each call of an operator is repeated until it is answered, and each try
is recorded: the checker must know which tries were not answered, because routers may execute them later.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import windrow
from chaos import backfills
from chaos.operator_calls import TRY_S, OperatorCalls, is_created, now_us
from chaos.steady_schedules import SteadySchedules
from proof.checker.evidence import Backfill, Change, ChangeKind, Schedule, Terms
from proof.clients import calls
from proof.clients.fates import pick_org
from proof.clients.site import QUEUE
from proof.history import payload_of
from windrow.v1 import job_pb2, schedules_pb2, schedules_pb2_grpc

_SCHEDULES = 24
# Schedules are created at random times in this first share of a run, so that some are created under faults.
_PART = 0.6
_EVERY_S = (1, 2, 3, 5)
_CHANNELS = 3
# The mean time between two changes of a schedule, and how long a pause lasts.
_REST_S = 5.0
_PAUSED_S = (1.0, 6.0)
# How long it may take to end the last pauses, after all faults are healed.
_RESUME_S_MAX = 60.0
_WINDOW_S = 5.0
# Combinations of policies, each with the reasons for which runs may be skipped.
_POLICIES: Sequence[tuple[windrow.Overlap, windrow.CatchUp, frozenset[str]]] = (
    (windrow.Overlap.ALLOW, windrow.CatchUp.ALL, frozenset()),
    (windrow.Overlap.ALLOW, windrow.CatchUp.LATEST, frozenset({"catch_up"})),
    (windrow.Overlap.SKIP, windrow.CatchUp.LATEST, frozenset({"overlap", "catch_up"})),
    (windrow.Overlap.BUFFER_ONE, windrow.CatchUp.WINDOW, frozenset({"overlap", "catch_up"})),
    (windrow.Overlap.BUFFER_ALL, windrow.CatchUp.ALL, frozenset({"overlap"})),
    (windrow.Overlap.CANCEL_RUNNING, windrow.CatchUp.ALL, frozenset({"overlap"})),
)

_Send = Callable[["schedules_pb2_grpc.SchedulesAsyncStub"], Any]


class JobSchedules:
    """All schedules of a run."""

    def __init__(self, operators: Sequence[_Operator], steady: SteadySchedules, *, end_s: float) -> None:
        self._operators = operators
        self._steady = steady
        self._end_s = end_s

    async def run(self) -> None:
        """Creates the schedules that are not steady, and changes them until they end."""
        async with asyncio.TaskGroup() as group:
            for operator in self._operators:
                group.create_task(operator.run())
        await asyncio.sleep(self._end_s - time.time())

    async def resume(self) -> None:
        """Ends all pauses that may be left. Called after all faults are healed."""
        async with asyncio.TaskGroup() as group:
            for operator in self._operators:
                group.create_task(operator.resume())

    @property
    def seen(self) -> list[Schedule]:
        return [*(operator.seen for operator in self._operators), *self._steady.seen]


@asynccontextmanager
async def open_schedules(
    address: str, orgs: Sequence[str], dsns: Sequence[str], *, seed: int, seconds: float, steady: int
) -> AsyncGenerator[JobSchedules, None]:
    """Yields the schedules of a run. `steady`: the number of further schedules, which nobody changes. These are created
    first. `seconds`: how long all schedules run after the steady ones are created. `dsns`: the DSNs of the shards'
    databases."""
    luck = random.Random(f"{seed}/schedules")
    async with AsyncExitStack() as stack:
        channels = [await stack.enter_async_context(calls.connect(address)) for _ in range(_CHANNELS)]
        stubs = [schedules_pb2_grpc.SchedulesStub(channel) for channel in channels]
        many = SteadySchedules(stubs, orgs, dsns, count=steady)
        if steady:
            await many.create()
        # The Postgres servers run on this machine, and have the same clock.
        begin_s = time.time()
        end_s = int(begin_s) + int(seconds)
        await many.set_end(end_s)
        operators = [
            _Operator(
                stubs,
                random.Random(f"{seed}/schedules/{number}"),
                org=pick_org(luck, list(orgs)),
                number=number,
                begin_s=begin_s + luck.uniform(0.0, seconds * _PART),
                end_s=end_s,
            )
            for number in range(_SCHEDULES)
        ]
        yield JobSchedules(operators, many, end_s=end_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Drawn:
    """The settings of a schedule, once as the checker's type and once as the fields of a request."""

    terms: Terms
    spec: schedules_pb2.ScheduleSpec
    job: job_pb2.JobTemplate


class _Operator:
    """Creates one schedule and changes it."""

    def __init__(
        self,
        stubs: Sequence[schedules_pb2_grpc.SchedulesAsyncStub],
        luck: random.Random,
        *,
        org: str,
        number: int,
        begin_s: float,
        end_s: int,
    ) -> None:
        self._calls = OperatorCalls(stubs, luck, end_s=end_s)
        self._luck = luck
        self._org = org
        self._name = f"schedule-{number}"
        self._number = number
        self._begin_s = begin_s
        self._end_s = end_s
        self._is_cron = bool(number % 2)
        self._every_s = _EVERY_S[number // len(_POLICIES) % len(_EVERY_S)]
        self._drawn = self._draw(0, _POLICIES[number % len(_POLICIES)])
        self._latest = 0
        self._created = False
        self._changes: list[Change] = []
        self._triggers: defaultdict[str, list[str]] = defaultdict(list)
        self._backfills: list[Backfill] = []

    @property
    def seen(self) -> Schedule:
        return Schedule(
            org=self._org,
            name=self._name,
            terms=self._drawn.terms,
            ends_us=self._end_s * 1_000_000,
            changes=self._changes,
            triggers=self._triggers,
            backfills=self._backfills,
            denied=self._calls.denied,
            acknowledged=self._created,
        )

    async def run(self) -> None:
        await asyncio.sleep(self._begin_s - time.time())
        while not self._created and not self._is_over():
            self._created = await self._create()
        while not self._is_over():
            await asyncio.sleep(min(self._luck.expovariate(1 / _REST_S), self._end_s - time.time()))
            dice = self._luck.random()
            if self._is_over():
                return
            if dice < 0.25:
                await self._trigger()
            elif dice < 0.5:
                await self._backfill()
            elif dice < 0.7:
                await self._alter()
            else:
                await self._pause()

    async def resume(self) -> None:
        if any(one.kind is ChangeKind.PAUSE for one in self._changes):
            await self._change(ChangeKind.RESUME, self._resume, until_s=time.time() + _RESUME_S_MAX)

    def _is_over(self) -> bool:
        return time.time() >= self._end_s

    async def _create(self) -> bool:
        request = schedules_pb2.CreateScheduleRequest(
            org=self._org, name=self._name, spec=self._drawn.spec, job=self._drawn.job
        )
        return await is_created(self._calls.stub().CreateSchedule(request, timeout=TRY_S))

    async def _pause(self) -> None:
        request = schedules_pb2.PauseScheduleRequest(org=self._org, name=self._name)
        await self._change(ChangeKind.PAUSE, lambda stub: stub.PauseSchedule(request, timeout=TRY_S))
        await asyncio.sleep(min(self._luck.uniform(*_PAUSED_S), max(0.0, self._end_s - time.time())))
        match self._luck.randrange(4):
            case 0:
                await self._trigger()
            case 1:
                await self._alter()
            case 2:
                await self._backfill()
            case _:
                pass
        await self._change(ChangeKind.RESUME, self._resume)

    def _resume(self, stub: schedules_pb2_grpc.SchedulesAsyncStub) -> Any:
        request = schedules_pb2.ResumeScheduleRequest(org=self._org, name=self._name)
        return stub.ResumeSchedule(request, timeout=TRY_S)

    async def _alter(self) -> None:
        self._latest += 1
        # Change the timing of only half of the schedules, so that no call makes the instants of the other half
        # uncertain.
        if self._number % 4 < 2:
            self._every_s = self._luck.choice(_EVERY_S)
            self._is_cron = self._luck.random() < 0.5
        drawn = self._draw(self._latest, self._luck.choice(_POLICIES))
        request = schedules_pb2.UpdateScheduleRequest(org=self._org, name=self._name, spec=drawn.spec, job=drawn.job)
        await self._change(
            ChangeKind.ALTER, lambda stub: stub.UpdateSchedule(request, timeout=TRY_S), terms=drawn.terms
        )

    async def _trigger(self) -> None:
        """Triggers one run, and may repeat the call."""
        request = schedules_pb2.TriggerScheduleRequest(org=self._org, name=self._name, request_id=windrow.uuid7())
        answered = self._triggers[request.request_id]
        for _ in range(self._luck.randint(1, 2)):
            answer = await self._calls.until_answered(lambda stub: stub.TriggerSchedule(request, timeout=TRY_S))
            if answer is not None:
                answered.append(answer.job_id)

    async def _backfill(self) -> None:
        """Backfills a range, and may repeat the call."""
        request = backfills.draw(self._luck, org=self._org, name=self._name, now_us=now_us())

        def record(began_us: int, ended_us: int | None, answer: schedules_pb2.BackfillScheduleResponse | None) -> None:
            self._backfills.append(backfills.seen(request, began_us, ended_us, answer))

        for _ in range(self._luck.randint(1, 2)):
            await self._calls.until_answered(lambda stub: stub.BackfillSchedule(request, timeout=TRY_S), record)

    async def _change(
        self, kind: ChangeKind, send: _Send, *, terms: Terms | None = None, until_s: float | None = None
    ) -> None:
        def record(began_us: int, ended_us: int | None, _answer: object) -> None:
            self._changes.append(Change(kind=kind, began_us=began_us, ended_us=ended_us, terms=terms))

        await self._calls.until_answered(send, record, until_s=until_s)

    def _draw(self, number: int, policies: tuple[windrow.Overlap, windrow.CatchUp, frozenset[str]]) -> _Drawn:
        overlap, catch_up, skips_for = policies
        spec = schedules_pb2.ScheduleSpec(
            overlap=schedules_pb2.OverlapPolicy.Value(f"OVERLAP_POLICY_{overlap.name}"),
            catch_up=schedules_pb2.CatchUpPolicy.Value(f"CATCH_UP_POLICY_{catch_up.name}"),
            catch_up_window=calls.duration(_WINDOW_S),
        )
        spec.end.FromSeconds(self._end_s)
        # The cron expression and the interval have the same instants.
        if self._is_cron:
            spec.cron = f"*/{self._every_s} * * * * *"
        else:
            spec.interval.CopyFrom(calls.duration(self._every_s))
        job = job_pb2.JobTemplate(
            queue=QUEUE, kind="work", payload=payload_of(self._org, self._name, 0), attributes={"terms": str(number)}
        )
        terms = Terms(
            number=number,
            every_us=self._every_s * 1_000_000,
            skips_for=skips_for,
            cancels=overlap is windrow.Overlap.CANCEL_RUNNING,
        )
        return _Drawn(terms=terms, spec=spec, job=job)
