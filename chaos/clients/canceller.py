"""`python -m chaos.clients.canceller`: a worker that cancels its stream as soon as it has read jobs, and acks these
jobs by separate calls. The leases of this worker stay valid until their windows end, although the stream has ended."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

import grpc

from proof.clients import calls
from proof.clients.fates import pick_org
from proof.clients.site import QUEUE, Orders, Site, main
from proof.history import Outcome, Recorder, Verb
from windrow.v1 import job_pb2, queue_pb2, queue_pb2_grpc

_CALLERS = 4
_CHANNELS = 3
_CREDIT = 5
_PATIENCE_S = 2.0
_WORK_S = 0.05
_AGAIN_S_MAX = 0.2


class Canceller:
    def __init__(self, site: Site, orders: Orders, channels: Sequence[grpc.aio.Channel], recorder: Recorder) -> None:
        self._site = site
        self._orders = orders
        self._orgs = list(site.orgs)
        self._stubs = [queue_pb2_grpc.QueueStub(channel) for channel in channels]
        self._calls = calls.Calls(channels, recorder)
        self._recorder = recorder

    async def call_on(self, luck: random.Random) -> None:
        while not self._orders.over.is_set():
            org = pick_org(luck, self._orgs)
            jobs = await self._read_once(luck.choice(self._stubs), org)
            if jobs:
                await self._orders.pause(luck.expovariate(1 / _WORK_S))
                await self._calls.settle(Verb.ACK, org, [job.lease for job in jobs])
            await self._orders.pause(luck.uniform(0.0, _AGAIN_S_MAX))

    async def _read_once(self, stub: queue_pb2_grpc.QueueAsyncStub, org: str) -> Sequence[job_pb2.LeasedJob]:
        """Opens a stream, and cancels it after its first message. Returns the jobs of this message, or no jobs if no
        message comes soon."""
        number = self._recorder.begin(Verb.CONSUME, org, {"window_s": self._site.window_s})
        start = queue_pb2.ConsumeStart(
            org=org,
            queues=[QUEUE],
            visibility_window=calls.duration(self._site.window_s),
            worker=self._site.name,
        )
        call: Any = stub.Consume(timeout=_PATIENCE_S)
        jobs: Sequence[job_pb2.LeasedJob] = []
        try:
            await call.write(queue_pb2.ConsumeRequest(start=start, credit=_CREDIT))
            message = await calls.read(call)
            if message is not grpc.aio.EOF:
                jobs = message.jobs
                self._recorder.got(number, [calls.told(job) for job in jobs])
        except grpc.aio.AioRpcError as error:
            _, code = calls.outcome_of(error)
            self._recorder.end(number, Outcome.UNKNOWN, code=code)
        except asyncio.InvalidStateError:
            self._recorder.end(number, Outcome.UNKNOWN, code=calls.WRITE_FAILED)
        else:
            self._recorder.end(number, Outcome.OK)
        finally:
            call.cancel()
        return jobs


async def _work(site: Site, orders: Orders) -> None:
    async with AsyncExitStack() as stack:
        channels = [await stack.enter_async_context(calls.connect(site.address)) for _ in range(_CHANNELS)]
        recorder = stack.enter_context(site.recorder())
        canceller = Canceller(site, orders, channels, recorder)
        async with asyncio.TaskGroup() as group:
            for caller in range(_CALLERS):
                group.create_task(canceller.call_on(site.luck(str(caller))))


if __name__ == "__main__":
    main(_work)
