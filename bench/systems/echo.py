"""The upper limit for unary calls. Exchanges the same messages with the same number of server processes, which do
nothing but answer (bench/echo_server.py)."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from typing import ClassVar

import grpc

from bench.payloads import stamped
from bench.system import CONNECTIONS, Finished, Site, Taken, Wrong
from bench.systems.on_routers import CALL_S_MAX, QUEUE
from windrow.ids import uuid7
from windrow.v1 import job_pb2, queue_pb2, queue_pb2_grpc


class Echo:
    title: ClassVar[str] = "gRPC echo of the same messages"

    def __init__(self, site: Site) -> None:
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1)]
        count = min(site.connections or CONNECTIONS, site.callers)
        self._channels = [grpc.aio.insecure_channel(site.address, options=options) for _ in range(count)]
        self._queues = itertools.cycle([queue_pb2_grpc.QueueStub(channel) for channel in self._channels])
        self._org = ""
        # Counts the jobs that this process has enqueued but not taken yet. Workers take at most this many jobs, as if
        # the jobs came from a queue.
        self._stored = asyncio.Semaphore(0)
        self._unfinished = 0

    async def prepare(self, run: str) -> None:
        self._org = f"{run}-0"
        self._stored = asyncio.Semaphore(0)
        for channel in self._channels:
            await channel.channel_ready()

    async def enqueue(self, payloads: Sequence[bytes]) -> None:
        request = queue_pb2.EnqueueRequest(
            org=self._org,
            jobs=[
                job_pb2.NewJob(id=uuid7(), template=job_pb2.JobTemplate(queue=QUEUE, kind="no-op", payload=payload))
                for payload in payloads
            ],
        )
        response = await next(self._queues).Enqueue(request, timeout=CALL_S_MAX)
        if len(response.results) != len(request.jobs):
            raise Wrong("the echo answered with less than it was asked for")
        self._unfinished += len(payloads)
        for _ in payloads:
            self._stored.release()

    async def work(self, *, batch: int, concurrency: int, taken: Taken, finished: Finished) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(self._pull(batch, taken, finished))

    async def _pull(self, batch: int, taken: Taken, finished: Finished) -> None:
        stub = next(self._queues)
        while True:
            await self._stored.acquire()
            count = 1
            while count < batch and not self._stored.locked():
                await self._stored.acquire()
                count += 1
            request = queue_pb2.DequeueRequest(org=self._org, queues=[QUEUE], max_jobs=count, worker="bench")
            jobs = (await stub.Dequeue(request, timeout=CALL_S_MAX)).jobs
            if len(jobs) != count:
                raise Wrong("the echo answered with less than it was asked for")
            at_ns = time.monotonic_ns()
            for _ in jobs:
                taken(at_ns, stamped(1)[0])
            acks = queue_pb2.AckRequest(org=self._org, acks=[queue_pb2.Ack(lease=job.lease) for job in jobs])
            answers = (await stub.Ack(acks, timeout=CALL_S_MAX)).answers
            if list(answers) != [job_pb2.JOB_ANSWER_OK] * count:
                raise Wrong("the echo answered with less than it was asked for")
            self._unfinished -= count
            finished(count)

    async def left(self) -> int:
        return self._unfinished

    async def check(self, jobs: int) -> None:
        """Checks nothing, because an echo stores nothing."""

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close()
