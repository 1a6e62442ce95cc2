"""Windrow with the generated stubs: the speed of its protocol if the client does nothing else."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, Sequence
from typing import ClassVar

from google.protobuf.duration_pb2 import Duration

from bench.system import Finished, Site, Taken, Wrong
from bench.systems.on_routers import CALL_S_MAX, QUEUE, OnRouters
from windrow.ids import uuid7
from windrow.v1 import job_pb2, queue_pb2, queue_pb2_grpc

_WAIT = Duration(seconds=20)
_ACKS_MAX = 1000
_CREDIT_MAX = 10_000
# The most unanswered messages with acks on one stream. The router answers one message while the other is on its way.
_UNANSWERED_MAX = 2


class Pulled(OnRouters):
    """Workers call Dequeue, which waits for jobs, and Ack."""

    title: ClassVar[str] = "Windrow, pulled"

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self._queues = itertools.cycle([queue_pb2_grpc.QueueStub(channel) for channel in self._channels])
        self._turns = itertools.cycle([""])

    async def prepare(self, run: str) -> None:
        await super().prepare(run)
        self._turns = itertools.cycle(self._orgs)

    async def enqueue(self, payloads: Sequence[bytes]) -> None:
        request = queue_pb2.EnqueueRequest(org=next(self._turns))
        add = request.jobs.add
        # Build the messages in place, as the client does. Making each message first and copying it afterwards would
        # take three times as long.
        for payload in payloads:
            job = add()
            job.id = uuid7()
            template = job.template
            template.queue, template.kind, template.payload = QUEUE, "no-op", payload
        response = await next(self._queues).Enqueue(request, timeout=CALL_S_MAX, metadata=self._proof)
        if [result.id for result in response.results] != [job.id for job in request.jobs]:
            raise Wrong("an Enqueue answered other ids than it was sent")
        if any(result.duplicate or result.HasField("error") for result in response.results):
            raise Wrong("an Enqueue stored less than it was sent")

    async def work(self, *, batch: int, concurrency: int, taken: Taken, finished: Finished) -> None:
        async with asyncio.TaskGroup() as group:
            for at in range(max(concurrency, len(self._orgs))):
                org = self._orgs[at % len(self._orgs)]
                group.create_task(self._pull(org, batch, taken, finished))

    async def _pull(self, org: str, batch: int, taken: Taken, finished: Finished) -> None:
        stub = next(self._queues)
        request = queue_pb2.DequeueRequest(org=org, queues=[QUEUE], max_jobs=batch, worker="bench", wait=_WAIT)
        while True:
            response = await stub.Dequeue(request, timeout=CALL_S_MAX, metadata=self._proof)
            if not response.jobs:
                continue
            told(response.jobs, taken)
            acks = queue_pb2.AckRequest(org=org, acks=[queue_pb2.Ack(lease=job.lease) for job in response.jobs])
            answers = (await stub.Ack(acks, timeout=CALL_S_MAX, metadata=self._proof)).answers
            if list(answers) != [job_pb2.JOB_ANSWER_OK] * len(response.jobs):
                raise Wrong("an Ack did not finish every job that had been leased")
            finished(len(response.jobs))


class RawStreams(Pulled):
    """Each worker process has one Consume stream for each shard. The credit is ten times the number of jobs on which
    the process works at the same time, because further jobs and acks are on their way."""

    title: ClassVar[str] = "Windrow, raw streams"

    async def work(self, *, batch: int, concurrency: int, taken: Taken, finished: Finished) -> None:
        credit = min(_CREDIT_MAX, max(10 * batch * concurrency // len(self._orgs), 2))
        async with asyncio.TaskGroup() as group:
            for org in self._orgs:
                start = queue_pb2.ConsumeStart(org=org, queues=[QUEUE], worker="bench")
                group.create_task(consume(next(self._queues), start, credit, taken, finished))


class Unary(Pulled):
    """Each call of Enqueue, Dequeue and Ack has one job."""

    title: ClassVar[str] = "Windrow, a job a unary call"

    async def enqueue(self, payloads: Sequence[bytes]) -> None:
        for payload in payloads:
            await super().enqueue([payload])

    async def work(self, *, batch: int, concurrency: int, taken: Taken, finished: Finished) -> None:
        await super().work(batch=1, concurrency=concurrency, taken=taken, finished=finished)


class UnaryTls(Unary):
    """Uses routers that speak TLS."""

    title: ClassVar[str] = "Windrow, a job a unary call, TLS"


class UnarySecure(Unary):
    """Uses routers that speak TLS and require an API key."""

    title: ClassVar[str] = "Windrow, a job a unary call, TLS and a key"


async def consume(
    stub: queue_pb2_grpc.QueueAsyncStub,
    start: queue_pb2.ConsumeStart,
    credit: int,
    taken: Taken,
    finished: Finished,
) -> None:
    """Consumes from one stream with a credit of `credit` jobs until this call is cancelled.

    Acks wait until earlier acks are answered, and are then sent in one message. Therefore an ack is sent at once under
    light load, and many acks are sent together under heavy load. Windrow's own Worker does the same."""
    requests: asyncio.Queue[queue_pb2.ConsumeRequest] = asyncio.Queue()
    requests.put_nowait(queue_pb2.ConsumeRequest(start=start, credit=credit))
    unanswered: dict[int, int] = {}
    numbers = itertools.count(1)
    done: list[bytes] = []

    async def sent() -> AsyncGenerator[queue_pb2.ConsumeRequest, None]:
        while True:
            yield await requests.get()

    call = stub.Consume(sent())
    try:
        async for response in call:
            told(response.jobs, taken)
            done += [job.lease for job in response.jobs]
            for settled in response.settled:
                if settled.HasField("error") or settled.not_ok:
                    raise Wrong(f"a stream did not finish every job that it had given: {settled}")
                finished(unanswered.pop(settled.request_id))
            while done and len(unanswered) < _UNANSWERED_MAX:
                acks = [queue_pb2.Ack(lease=lease) for lease in done[:_ACKS_MAX]]
                del done[:_ACKS_MAX]
                number = next(numbers)
                unanswered[number] = len(acks)
                requests.put_nowait(queue_pb2.ConsumeRequest(credit=len(acks), acks=acks, request_id=number))
        raise Wrong("a stream ended by itself")
    finally:
        call.cancel()


def told(jobs: Sequence[job_pb2.LeasedJob], taken: Taken) -> None:
    at_ns = time.monotonic_ns()
    for job in jobs:
        if job.attempt != 1:
            raise Wrong("a job was given for the second time")
        taken(at_ns, job.payload)
