"""The base of every way to use Windrow: makes an org for each shard, and checks the books after a run."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import grpc
import psycopg

from bench import messages
from bench.system import CONNECTIONS, Site, Wrong
from windrow.v1 import admin_pb2, admin_pb2_grpc, cluster_pb2, cluster_pb2_grpc

QUEUE = "work"
CALL_S_MAX = 60.0
_ORG_TRIES = 1000


class OnRouters:
    """The connections of a client process, and the orgs of the process's run. Subclasses enqueue and work."""

    title: ClassVar[str]
    # The settings of each org's queue.
    queue: ClassVar[admin_pb2.QueueConfig] = admin_pb2.QueueConfig()

    def __init__(self, site: Site) -> None:
        self._site = site
        messages.watch()
        count = min(site.connections or CONNECTIONS, site.callers)
        self._channels = [_channel(site) for _ in range(count)]
        self._admin = admin_pb2_grpc.AdminStub(self._channels[0])
        self._cluster = cluster_pb2_grpc.ClusterStub(self._channels[0])
        self._orgs: list[str] = []
        # The metadata of every call.
        self._proof = None if site.token is None else (("authorization", f"Bearer {site.token}"),)

    async def prepare(self, run: str) -> None:
        for channel in self._channels:
            await channel.channel_ready()
        self._orgs = await self._one_org_for_each_shard(run)

    async def left(self) -> int:
        return sum([await _live(dsn, self._orgs) for dsn in self._site.dsns.values()])

    async def check(self, jobs: int) -> None:
        found = cluster_pb2.OrgBooks()
        for shard in self._site.dsns:
            request = cluster_pb2.CheckShardRequest(shard=shard)
            call = self._cluster.CheckShard(request, timeout=CALL_S_MAX, metadata=self._proof)
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
        create = admin_pb2.CreateQueueRequest(org=org, queue=QUEUE, config=self.queue)
        try:
            made = await self._admin.CreateQueue(create, timeout=CALL_S_MAX, metadata=self._proof)
        except grpc.aio.AioRpcError as error:
            # Another client process has created the queue.
            if error.code() is not grpc.StatusCode.ALREADY_EXISTS:
                raise
        else:
            return made.queue.shard
        get = admin_pb2.GetQueueRequest(org=org, queue=QUEUE)
        there = await self._admin.GetQueue(get, timeout=CALL_S_MAX, metadata=self._proof)
        return there.queue.shard


def _channel(site: Site) -> grpc.aio.Channel:
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1)]
    if site.ca is None:
        return grpc.aio.insecure_channel(site.address, options=options)
    credentials = grpc.ssl_channel_credentials(Path(site.ca).read_bytes())
    return grpc.aio.secure_channel(site.address, credentials, options=options)


async def _live(dsn: str, orgs: list[str]) -> int:
    """Returns how many jobs of these orgs are unfinished on one shard."""
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
        cursor = await connection.execute(
            "SELECT (SELECT count(*) FROM windrow.job j WHERE j.queue_id = ANY (q.ids)) FROM"
            " (SELECT array_agg(queue_id) AS ids FROM windrow.queue WHERE org = ANY (%s)) q",
            [orgs],
        )
        row = await cursor.fetchone()
    return int(row[0]) if row else 0
