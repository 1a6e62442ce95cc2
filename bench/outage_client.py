"""`python -m bench.outage_client SITE`: enqueues, dequeues and acks job after job, for one org after the other, and
writes down each call. Retries nothing: what routers answer is what is measured.

The load is open: each turn is due when it is due, whatever became of those before. Ends with its input.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import grpc

from bench.evidence import Recorder, Sight, Verb
from bench.payloads import stamp_ns, stamped
from bench.systems.windrow import QUEUE
from windrow.ids import uuid7
from windrow.v1 import job_pb2, queue_pb2, queue_pb2_grpc

_CALL_S_MAX = 10.0
# The kernel deals connections out to the router processes: several, or all might go to one.
_CHANNELS = 4
# Turns under way. More wait, and it counts: they are due all the same.
_TURNS_MAX = 1000
# Of one dequeue: what outages have left behind is caught up with.
_JOBS_MAX = 10

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    address: str
    # Their numbers in the evidence are their positions.
    orgs: Sequence[str]
    turns_per_s: float
    folder: str

    def to_json(self) -> str:
        return json.dumps(asdict(self))


class Caller:
    def __init__(self, site: Site, recorder: Recorder) -> None:
        self._site = site
        self._recorder = recorder
        options = [("grpc.use_local_subchannel_pool", 1)]
        self._channels = [grpc.aio.insecure_channel(site.address, options=options) for _ in range(_CHANNELS)]
        self._stubs = itertools.cycle([queue_pb2_grpc.QueueStub(channel) for channel in self._channels])
        self._turns = asyncio.Semaphore(_TURNS_MAX)

    async def run(self, over: asyncio.Event) -> None:
        """Until it is over. Turns under way end."""
        for channel in self._channels:
            await channel.channel_ready()
        print("ready", flush=True)
        began_s = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for number in itertools.count():
                due_s = began_s + number / self._site.turns_per_s
                if not await _pause_until(due_s, over):
                    break
                group.create_task(self._turn(number % len(self._site.orgs), round(due_s * 1e9)))
        for channel in self._channels:
            await channel.close()

    async def _turn(self, org: int, due_ns: int) -> None:
        async with self._turns:
            await self._enqueue(org, due_ns)
            await self._work(org)

    async def _enqueue(self, org: int, due_ns: int) -> None:
        job = job_pb2.NewJob(id=uuid7(), queue=QUEUE, kind="no-op", payload=stamped(1, at_ns=due_ns)[0])
        request = queue_pb2.EnqueueRequest(org=self._site.orgs[org], jobs=[job])
        self._recorder.saw(Sight.OFFERED, job.id)
        stub = next(self._stubs)
        response = await self._call(Verb.ENQUEUE, org, lambda: stub.Enqueue(request, timeout=_CALL_S_MAX), due_ns)
        if response is not None and [result.id for result in response.results] == [job.id]:
            self._recorder.saw(Sight.STORED, job.id, at_ns=time.monotonic_ns())

    async def _work(self, org: int) -> None:
        name = self._site.orgs[org]
        request = queue_pb2.DequeueRequest(org=name, queues=[QUEUE], max_jobs=_JOBS_MAX, worker="bench")
        stub = next(self._stubs)
        taken = await self._call(Verb.DEQUEUE, org, lambda: stub.Dequeue(request, timeout=_CALL_S_MAX))
        if taken is None or not taken.jobs:
            return
        at_ns = time.monotonic_ns()
        for job in taken.jobs:
            self._recorder.saw(Sight.TAKEN, job.id, at_ns=at_ns, due_ns=stamp_ns(job.payload))
        acks = queue_pb2.AckRequest(org=name, acks=[queue_pb2.Ack(lease=job.lease) for job in taken.jobs])
        stub = next(self._stubs)
        settled = await self._call(Verb.ACK, org, lambda: stub.Ack(acks, timeout=_CALL_S_MAX))
        if settled is not None:
            for job, answer in zip(taken.jobs, settled.answers, strict=True):
                if answer == job_pb2.JOB_ANSWER_OK:
                    self._recorder.saw(Sight.ACKED, job.id)

    async def _call(
        self, verb: Verb, org: int, send: Callable[[], Awaitable[_T]], due_ns: int | None = None
    ) -> _T | None:
        """None: it failed."""
        began_ns = time.monotonic_ns() if due_ns is None else due_ns
        code = 0
        try:
            return await send()
        except grpc.aio.AioRpcError as error:
            status: Any = error.code()
            code = status.value[0]
            return None
        finally:
            self._recorder.called(verb, org, due_ns=began_ns, ended_ns=time.monotonic_ns(), code=code)


async def _pause_until(at_s: float, over: asyncio.Event) -> bool:
    """False: it is over."""
    left_s = at_s - time.monotonic()
    if left_s > 0 and not over.is_set():
        try:
            async with asyncio.timeout(left_s):
                await over.wait()
        except TimeoutError:
            pass
    return not over.is_set()


async def main() -> None:
    site = Site(**json.loads(sys.argv[1]))
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    over = asyncio.Event()

    async def listen() -> None:
        await lines.read()
        over.set()

    with Recorder(Path(site.folder), "caller") as recorder:
        async with asyncio.TaskGroup() as group:
            group.create_task(listen())
            group.create_task(Caller(site, recorder).run(over))


if __name__ == "__main__":
    asyncio.run(main())
