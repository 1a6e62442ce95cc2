"""One caller of one cluster, who takes part in what is compared call by call: enqueues, dequeues and acks."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import AsyncGenerator
from typing import NamedTuple

import grpc
import psycopg

from bench.payloads import stamped
from bench.stage import Stage
from bench.system import Wrong
from bench.systems.windrow import CALL_S_MAX, QUEUE
from windrow.ids import uuid7
from windrow.v1 import admin_pb2, admin_pb2_grpc, job_pb2, queue_pb2, queue_pb2_grpc


class Cycle(NamedTuple):
    """How long the calls of one batch took."""

    claim_ms: float
    ack_ms: float


class Probe:
    """Of a cluster with one shard; made by `open_probe`. Its jobs are an org's of its own."""

    def __init__(self, stage: Stage, channel: grpc.aio.Channel) -> None:
        ((_, self.dsn),) = stage.dsns.items()
        self.org = f"bench-{secrets.token_hex(6)}"
        self._queue = queue_pb2_grpc.QueueStub(channel)

    async def cycles(self, batch: int, calls: int) -> list[Cycle]:
        """Has so many batches live their whole lives, one after the other."""
        request = queue_pb2.DequeueRequest(org=self.org, queues=[QUEUE], max_jobs=batch, worker="bench")
        cycles: list[Cycle] = []
        for _ in range(calls):
            jobs = [
                job_pb2.NewJob(id=uuid7(), queue=QUEUE, kind="no-op", payload=payload) for payload in stamped(batch)
            ]
            await self._queue.Enqueue(queue_pb2.EnqueueRequest(org=self.org, jobs=jobs), timeout=CALL_S_MAX)
            began_s = time.monotonic()
            taken = (await self._queue.Dequeue(request, timeout=CALL_S_MAX)).jobs
            claim_ms = (time.monotonic() - began_s) * 1000
            if len(taken) != batch:
                raise Wrong(f"a Dequeue of {batch} gave {len(taken)} jobs, where at least {batch} were ready")
            acks = queue_pb2.AckRequest(org=self.org, acks=[queue_pb2.Ack(lease=job.lease) for job in taken])
            began_s = time.monotonic()
            await self._queue.Ack(acks, timeout=CALL_S_MAX)
            cycles.append(Cycle(claim_ms, (time.monotonic() - began_s) * 1000))
        return cycles

    def number(self, query: str) -> int:
        """What the shard's database answers."""
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            ((found,),) = connection.execute(query.encode()).fetchall()
        return int(found)


@contextlib.asynccontextmanager
async def open_probe(stage: Stage) -> AsyncGenerator[Probe, None]:
    channel = grpc.aio.insecure_channel(stage.routers.address)
    async with channel:
        probe = Probe(stage, channel)
        request = admin_pb2.CreateQueueRequest(org=probe.org, queue=QUEUE)
        await admin_pb2_grpc.AdminStub(channel).CreateQueue(request, timeout=CALL_S_MAX)
        yield probe
