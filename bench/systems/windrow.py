"""Windrow, as its users have it: over gRPC, by the generated stubs or by the Python client."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, Sequence
from typing import ClassVar

import grpc
import psycopg
from google.protobuf.duration_pb2 import Duration

import windrow
from bench.system import Finished, Site, Taken, Wrong
from windrow.ids import uuid7
from windrow.v1 import admin_pb2, admin_pb2_grpc, cluster_pb2, cluster_pb2_grpc, job_pb2, queue_pb2, queue_pb2_grpc

QUEUE = "work"
CALL_S_MAX = 60.0
_ORG_TRIES = 1000
_WAIT = Duration(seconds=20)
_ACKS_MAX = 1000
_CREDIT_MAX = 10_000
# Messages with acks of one stream: one is answered while the other is on its way.
_UNANSWERED_MAX = 2


class WindrowPull:
    """By the stubs; workers call Dequeue, which waits, and Ack. Also what the other ways have in common."""

    title: ClassVar[str] = "Windrow, pulled"

    def __init__(self, site: Site) -> None:
        self._site = site
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1)]
        count = min(site.connections, site.callers)
        self._channels = [grpc.aio.insecure_channel(site.address, options=options) for _ in range(count)]
        self._queues = itertools.cycle([queue_pb2_grpc.QueueStub(channel) for channel in self._channels])
        self._admin = admin_pb2_grpc.AdminStub(self._channels[0])
        self._cluster = cluster_pb2_grpc.ClusterStub(self._channels[0])
        self._orgs: list[str] = []
        self._turns = itertools.cycle([""])

    async def prepare(self, run: str) -> None:
        for channel in self._channels:
            await channel.channel_ready()
        self._orgs = await self._one_org_for_each_shard(run)
        self._turns = itertools.cycle(self._orgs)

    async def enqueue(self, payloads: Sequence[bytes]) -> None:
        request = queue_pb2.EnqueueRequest(org=next(self._turns))
        add = request.jobs.add
        # As the client does it: messages that are made first and then copied in cost three times as much.
        for payload in payloads:
            job = add()
            job.id = uuid7()
            template = job.template
            template.queue, template.kind, template.payload = QUEUE, "no-op", payload
        response = await next(self._queues).Enqueue(request, timeout=CALL_S_MAX)
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
            response = await stub.Dequeue(request, timeout=CALL_S_MAX)
            if not response.jobs:
                continue
            told(response.jobs, taken)
            acks = queue_pb2.AckRequest(org=org, acks=[queue_pb2.Ack(lease=job.lease) for job in response.jobs])
            answers = (await stub.Ack(acks, timeout=CALL_S_MAX)).answers
            if list(answers) != [job_pb2.JOB_ANSWER_OK] * len(response.jobs):
                raise Wrong("an Ack did not finish every job that had been leased")
            finished(len(response.jobs))

    async def left(self) -> int:
        return sum([await _live(dsn, self._orgs) for dsn in self._site.dsns.values()])

    async def check(self, jobs: int) -> None:
        found = cluster_pb2.OrgBooks()
        for shard in self._site.dsns:
            call = self._cluster.CheckShard(cluster_pb2.CheckShardRequest(shard=shard), timeout=CALL_S_MAX)
            async for response in call:
                for books in response.orgs:
                    if not books.balanced:
                        raise Wrong(f"shard {shard!r}: the books of org {books.org!r} do not balance: {books}")
                    if books.org in self._orgs:
                        found.accepted += books.accepted
                        found.succeeded += books.succeeded
        if (found.accepted, found.succeeded) != (jobs, jobs):
            raise Wrong(f"of {jobs} jobs, {found.accepted} were accepted and {found.succeeded} have succeeded")

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close()

    async def _one_org_for_each_shard(self, run: str) -> list[str]:
        orgs: dict[str, str] = {}
        for number in range(_ORG_TRIES):
            org = f"{run}-{number}"
            orgs.setdefault(await self._shard_of(org), org)
            if len(orgs) == len(self._site.dsns):
                return list(orgs.values())
        raise Wrong(f"{_ORG_TRIES} orgs live on {len(orgs)} of {len(self._site.dsns)} shards")

    async def _shard_of(self, org: str) -> str:
        try:
            made = await self._admin.CreateQueue(admin_pb2.CreateQueueRequest(org=org, queue=QUEUE), timeout=CALL_S_MAX)
        except grpc.aio.AioRpcError as error:
            # Another client process was faster.
            if error.code() is not grpc.StatusCode.ALREADY_EXISTS:
                raise
        else:
            return made.queue.shard
        there = await self._admin.GetQueue(admin_pb2.GetQueueRequest(org=org, queue=QUEUE), timeout=CALL_S_MAX)
        return there.queue.shard


class Windrow(WindrowPull):
    """By the stubs; a few Consume streams, which have room for as many jobs as all workers together."""

    title: ClassVar[str] = "Windrow"
    # The most streams of one client process.
    streams_max: ClassVar[int] = 1

    async def work(self, *, batch: int, concurrency: int, taken: Taken, finished: Finished) -> None:
        streams = max(min(concurrency, self.streams_max), len(self._orgs))
        # Several times what is worked at a time: as many jobs are on their way meanwhile, and acks on theirs.
        credit = min(_CREDIT_MAX, max(10 * batch * concurrency // streams, 2))
        async with asyncio.TaskGroup() as group:
            for at in range(streams):
                start = queue_pb2.ConsumeStart(org=self._orgs[at % len(self._orgs)], queues=[QUEUE], worker="bench")
                group.create_task(consume(next(self._queues), start, credit, taken, finished))


class WindrowTraced(Windrow):
    """Through routers that trace."""

    title: ClassVar[str] = "Windrow, 1 % of calls traced"


class WindrowStreams(Windrow):
    """As many streams as workers."""

    streams_max: ClassVar[int] = 1_000_000


class WindrowUnary(WindrowPull):
    """One job in each call: Enqueue, Dequeue and Ack."""

    title: ClassVar[str] = "Windrow, a job a unary call"

    async def enqueue(self, payloads: Sequence[bytes]) -> None:
        for payload in payloads:
            await super().enqueue([payload])

    async def work(self, *, batch: int, concurrency: int, taken: Taken, finished: Finished) -> None:
        await super().work(batch=1, concurrency=concurrency, taken=taken, finished=finished)


class WindrowClient(WindrowPull):
    """As most users have it: `await client.enqueue(…)` for each job, and a Worker with an `async def` handler."""

    title: ClassVar[str] = "Windrow, Python client and Worker"

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self._client: windrow.Client | None = None

    async def prepare(self, run: str) -> None:
        await super().prepare(run)
        if self._client is None:
            self._client = windrow.Client(self._site.address, org=self._orgs[0], channels=len(self._channels))
        self._clients = [self._client.for_org(org) for org in self._orgs]
        self._client_turns = itertools.cycle(self._clients)

    async def enqueue(self, payloads: Sequence[bytes]) -> None:
        client = next(self._client_turns)
        await asyncio.gather(*(client.enqueue(QUEUE, "no-op", payload) for payload in payloads))

    async def work(self, *, batch: int, concurrency: int, taken: Taken, finished: Finished) -> None:
        async def no_op(job: windrow.Job) -> None:
            taken(time.monotonic_ns(), job.payload)
            finished(1)

        async with asyncio.TaskGroup() as group:
            for client in self._clients:
                worker = windrow.Worker(client, [QUEUE], concurrency=max(1, concurrency // len(self._clients)))
                worker.handler("no-op")(no_op)
                group.create_task(worker.run())

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()
        await super().close()


async def consume(
    stub: queue_pb2_grpc.QueueAsyncStub,
    start: queue_pb2.ConsumeStart,
    credit: int,
    taken: Taken,
    finished: Finished,
) -> None:
    """One stream with room for `credit` jobs, until it is cancelled.

    Acks wait for those before them to be answered, and then go together: at once when little happens, many in a message
    when much does. Windrow's own Worker does so too."""
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


async def _live(dsn: str, orgs: list[str]) -> int:
    """Jobs of these orgs that one shard still has to do."""
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
        cursor = await connection.execute(
            "SELECT (SELECT count(*) FROM windrow.job j WHERE j.queue_id = ANY (q.ids)) FROM"
            " (SELECT array_agg(queue_id) AS ids FROM windrow.queue WHERE org = ANY (%s)) q",
            [orgs],
        )
        row = await cursor.fetchone()
    return int(row[0]) if row else 0
