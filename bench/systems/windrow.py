"""Windrow, as its users have it: generated stubs, gRPC, routers, shards."""

from __future__ import annotations

import itertools
from typing import ClassVar

import grpc

from bench.system import Site, Wrong
from windrow.ids import uuid7
from windrow.v1 import admin_pb2, admin_pb2_grpc, job_pb2, queue_pb2, queue_pb2_grpc

_CALL_S_MAX = 60.0
_QUEUE = "work"
_ORG_TRIES = 1000


class Windrow:
    title: ClassVar[str] = "Windrow"

    def __init__(self, site: Site) -> None:
        # The kernel deals connections out to the router processes: several, or all might go to one.
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1)]
        self._channels = [grpc.aio.insecure_channel(site.address, options=options) for _ in range(site.callers)]
        self._queues = itertools.cycle([queue_pb2_grpc.QueueStub(channel) for channel in self._channels])
        self._admin = admin_pb2_grpc.AdminStub(self._channels[0])
        self._payload = site.payload_bytes
        self._shards = tuple(site.dsns)
        self._orgs: list[str] = []
        self._turns = itertools.cycle([""])

    async def prepare(self, run: str) -> None:
        for channel in self._channels:
            await channel.channel_ready()
        self._orgs = await self._one_org_for_each_shard(run)
        self._turns = itertools.cycle(self._orgs)

    async def enqueue(self, jobs: int) -> None:
        request = queue_pb2.EnqueueRequest(
            org=next(self._turns),
            jobs=[job_pb2.NewJob(id=uuid7(), queue=_QUEUE, kind="no-op", payload=self._payload) for _ in range(jobs)],
        )
        response = await next(self._queues).Enqueue(request, timeout=_CALL_S_MAX)
        if [result.id for result in response.results] != [job.id for job in request.jobs]:
            raise Wrong("an Enqueue answered other ids than it was sent")
        if any(result.duplicate or result.HasField("error") for result in response.results):
            raise Wrong("an Enqueue stored less than it was sent")

    async def drain(self, jobs_max: int) -> int:
        for _ in self._orgs:
            org = next(self._turns)
            stub = next(self._queues)
            taken = await stub.Dequeue(
                queue_pb2.DequeueRequest(org=org, queues=[_QUEUE], max_jobs=jobs_max, worker="bench"),
                timeout=_CALL_S_MAX,
            )
            if not taken.jobs:
                continue
            if any(job.payload != self._payload or job.attempt != 1 for job in taken.jobs):
                raise Wrong("a Dequeue gave a job that is not as it was stored, or gave it for the second time")
            request = queue_pb2.AckRequest(org=org, acks=[queue_pb2.Ack(lease=job.lease) for job in taken.jobs])
            response = await stub.Ack(request, timeout=_CALL_S_MAX)
            if list(response.answers) != [job_pb2.JOB_ANSWER_OK] * len(taken.jobs):
                raise Wrong("an Ack did not finish every job that had been leased")
            return len(taken.jobs)
        return 0

    async def check(self, jobs: int) -> None:
        found = admin_pb2.OrgBooks()
        for shard in self._shards:
            call = self._admin.CheckShard(admin_pb2.CheckShardRequest(shard=shard), timeout=_CALL_S_MAX)
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
            if len(orgs) == len(self._shards):
                return list(orgs.values())
        raise Wrong(f"{_ORG_TRIES} orgs live on {len(orgs)} of {len(self._shards)} shards")

    async def _shard_of(self, org: str) -> str:
        try:
            made = await self._admin.CreateQueue(
                admin_pb2.CreateQueueRequest(org=org, queue=_QUEUE), timeout=_CALL_S_MAX
            )
        except grpc.aio.AioRpcError as error:
            # Another client process was faster.
            if error.code() is not grpc.StatusCode.ALREADY_EXISTS:
                raise
        else:
            return made.queue.shard
        there = await self._admin.GetQueue(admin_pb2.GetQueueRequest(org=org, queue=_QUEUE), timeout=_CALL_S_MAX)
        return there.queue.shard
