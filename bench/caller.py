"""`python -m bench.caller`: enqueues, dequeues and acks job after job, for one org after the other, and writes down
each call. This process retries nothing, because the benchmark measures the routers' answers.

The load is open: each turn has a planned time and begins then, even if earlier turns have not ended.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import grpc

from bench.payloads import BYTES
from bench.systems.on_routers import QUEUE
from proof.clients import calls
from proof.clients.site import Orders, Site, main
from proof.history import Outcome, Recorder, Verb, asked_to_store, payload_of
from windrow.ids import uuid7
from windrow.v1 import job_pb2, queue_pb2, queue_pb2_grpc

_CALL_S_MAX = 10.0
# The kernel distributes connections over the router processes. With several connections, it is unlikely that one router
# process gets all calls.
_CHANNELS = 4
# The most turns that are under way at the same time. Further turns wait, and the figures include this wait.
_TURNS_MAX = 1000
# The most jobs of one dequeue. Because a dequeue takes several jobs, the backlog of an outage is soon gone.
_JOBS_MAX = 10

_T = TypeVar("_T")


class Caller:
    def __init__(self, site: Site, orders: Orders, recorder: Recorder) -> None:
        self._site = site
        self._orders = orders
        self._recorder = recorder
        options = [("grpc.use_local_subchannel_pool", 1)]
        self._channels = [grpc.aio.insecure_channel(site.address, options=options) for _ in range(_CHANNELS)]
        self._stubs = itertools.cycle([queue_pb2_grpc.QueueStub(channel) for channel in self._channels])
        self._turns = asyncio.Semaphore(_TURNS_MAX)

    async def run(self) -> None:
        """Makes calls until this process is told to end. Then waits for the turns that are under way."""
        for channel in self._channels:
            await channel.channel_ready()
        began_s = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for number in itertools.count():
                due_s = began_s + number / self._site.per_s
                await self._orders.pause(due_s - time.monotonic())
                if self._orders.over.is_set():
                    break
                group.create_task(self._turn(self._site.orgs[number % len(self._site.orgs)], due_s))
        for channel in self._channels:
            await channel.close()

    async def _turn(self, org: str, due_s: float) -> None:
        async with self._turns:
            await self._enqueue(org, due_s)
            await self._work(org)

    async def _enqueue(self, org: str, due_s: float) -> None:
        job = uuid7()
        request = queue_pb2.EnqueueRequest(org=org)
        payload = payload_of(org, job, BYTES - len(org) - len(job))
        request.jobs.add(id=job, template=job_pb2.JobTemplate(queue=QUEUE, kind="no-op", payload=payload))
        number = self._recorder.begin(Verb.ENQUEUE, org, [asked_to_store(job=job, queue=QUEUE)], due_s=due_s)
        stub = next(self._stubs)
        response = await self._answered(number, lambda: stub.Enqueue(request, timeout=_CALL_S_MAX))
        if response is not None:
            answered = [{"job": one.id, "duplicate": one.duplicate} for one in response.results]
            self._recorder.end(number, Outcome.OK, answered=answered)

    async def _work(self, org: str) -> None:
        request = queue_pb2.DequeueRequest(org=org, queues=[QUEUE], max_jobs=_JOBS_MAX, worker=self._site.name)
        request.visibility_window.CopyFrom(calls.duration(self._site.window_s))
        number = self._recorder.begin(Verb.DEQUEUE, org, {"window_s": self._site.window_s})
        stub = next(self._stubs)
        taken = await self._answered(number, lambda: stub.Dequeue(request, timeout=_CALL_S_MAX))
        if taken is None:
            return
        self._recorder.got(number, [calls.told(job) for job in taken.jobs])
        self._recorder.end(number, Outcome.OK)
        if taken.jobs:
            await self._ack(org, [job.lease for job in taken.jobs])

    async def _ack(self, org: str, leases: list[bytes]) -> None:
        request = queue_pb2.AckRequest(org=org, acks=[queue_pb2.Ack(lease=lease) for lease in leases])
        number = self._recorder.begin(Verb.ACK, org, {"leases": [lease.hex() for lease in leases]})
        stub = next(self._stubs)
        settled = await self._answered(number, lambda: stub.Ack(request, timeout=_CALL_S_MAX))
        if settled is not None:
            answered = [calls.answer_of(answer) for answer in settled.answers]
            self._recorder.end(number, Outcome.OK, answered=answered)

    async def _answered(self, number: int, send: Callable[[], Awaitable[_T]]) -> _T | None:
        """Returns the answer to a call. Returns None if the call failed."""
        try:
            return await send()
        except grpc.aio.AioRpcError as error:
            outcome, code = calls.outcome_of(error)
            self._recorder.end(number, outcome, code=code)
            return None


async def _work(site: Site, orders: Orders) -> None:
    with site.recorder() as recorder:
        await Caller(site, orders, recorder).run()


if __name__ == "__main__":
    main(_work)
