"""Tells KEDA how many workers are wanted (proto/router/keda/externalscaler.proto, docs/keda.md)."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
from collections.abc import AsyncGenerator
from typing import Final

from router.codec.scaler import METRIC, Target, check, target_of
from router.codec.status import RouterFull
from router.fleet.fleet import Fleet
from router.fleet.watch import Watch
from router.gate.admission import Gate
from router.gate.call import current_call
from router.gate.calls import SMALL_ANSWER_BYTES, streamed_answer, unary
from router.keda import externalscaler_pb2 as keda
from router.route.work import WorkCounts
from shard.errors import ShardError
from shard.fair_quota import FairQuota

# The most streams of one process. Each stream looks for work every few seconds while there is work.
STREAMS_MAX = 1_000
# The pause between two looks of a stream while there is work, or while this process does not know whether there is
# work, because a shard does not answer. While there is no work, the stream does not look until its watch wakes it.
_LOOK_S = 5.0
# The least time between two looks of a stream.
_PAUSE_S = 0.1
# A count stops at the jobs of _WORKERS_MAX workers, and at _COUNTED_MAX jobs at the latest.
_WORKERS_MAX = 1_000
_COUNTED_MAX = 1_000_000
# The deadline of a stream. A stream ends earlier, after router.settings.RouterSettings.stream_s_max, if that is
# shorter.
_STREAM_S_MAX: Final = 600.0


class ExternalScalerService:
    service_name = "externalscaler.ExternalScaler"

    def __init__(self, fleet: Fleet, gate: Gate, *, stream_s_max: float = math.inf) -> None:
        self._fleet = fleet
        self._gate = gate
        self._stream_s_max = min(stream_s_max, _STREAM_S_MAX)
        self._work = WorkCounts(fleet)
        self._streams = FairQuota(STREAMS_MAX)
        self._draining = asyncio.Event()

    def drain(self) -> None:
        """Ends all streams, because this router is about to end. KEDA calls again, and reaches another router."""
        self._draining.set()

    @unary(check, answer_bytes=SMALL_ANSWER_BYTES)
    async def IsActive(self, request: keda.ScaledObjectRef) -> keda.IsActiveResponse:
        target = target_of(request)
        return keda.IsActiveResponse(result=await self._work.any(target.org, target.queue))

    @streamed_answer(check, answer_bytes=SMALL_ANSWER_BYTES, deadline_s=_STREAM_S_MAX)
    async def StreamIsActive(self, request: keda.ScaledObjectRef) -> AsyncGenerator[keda.IsActiveResponse, None]:
        target = target_of(request)
        call = current_call()
        if not self._streams.take(call.org):
            raise RouterFull("streams of external scalers", STREAMS_MAX)
        watch = Watch(self._fleet, target.org, target.queue)
        # The random part prevents streams that began together from ending together.
        ending = asyncio.create_task(self._end(self._stream_s_max * random.uniform(0.7, 1.0)))
        try:
            with self._gate.waiting(call):
                told: bool | None = None
                while not ending.done():
                    watch.woken.clear()
                    watch.enter()
                    active = await self._look(target)
                    if active is not None and active != told:
                        told = active
                        yield keda.IsActiveResponse(result=active)
                    await asyncio.wait({ending}, timeout=_PAUSE_S if active is False else _LOOK_S)
                    if active is False and not ending.done():
                        await _first_of(ending, watch.woken)
        finally:
            watch.leave()
            ending.cancel()
            self._streams.give_back(call.org)

    @unary(check, answer_bytes=SMALL_ANSWER_BYTES)
    async def GetMetricSpec(self, request: keda.ScaledObjectRef) -> keda.GetMetricSpecResponse:
        target = target_of(request)
        number = target.jobs_per_worker
        spec = keda.MetricSpec(metricName=METRIC, targetSize=number, targetSizeFloat=number)
        return keda.GetMetricSpecResponse(metricSpecs=[spec])

    @unary(check, answer_bytes=SMALL_ANSWER_BYTES)
    async def GetMetrics(self, request: keda.GetMetricsRequest) -> keda.GetMetricsResponse:
        target = target_of(request)
        jobs_max = min(_WORKERS_MAX * target.jobs_per_worker, _COUNTED_MAX)
        count = await self._work.count(target.org, target.queue, jobs_max=jobs_max)
        value = keda.MetricValue(metricName=METRIC, metricValue=count, metricValueFloat=count)
        return keda.GetMetricsResponse(metricValues=[value])

    async def _look(self, target: Target) -> bool | None:
        """Returns whether there is work. None: this process does not know, because a shard does not answer."""
        try:
            return await self._work.any(target.org, target.queue)
        except ShardError:
            return None

    async def _end(self, after_s: float) -> None:
        """Waits until a stream is to end."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(after_s):
                await self._draining.wait()


async def _first_of(ending: asyncio.Task[None], woken: asyncio.Event) -> None:
    waking = asyncio.create_task(woken.wait())
    try:
        await asyncio.wait({ending, waking}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waking.cancel()
