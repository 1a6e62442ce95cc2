"""The upper limit of Windrow's speed: the client processes run the shard's statements themselves, without routers, gRPC
and messages."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from typing import ClassVar

from bench.payloads import BYTES
from bench.system import Finished, Site, Taken, Wrong
from shard.admin.queue_admin import QueueAdmin
from shard.lease_token import parse_token, token
from shard.placement import catalog
from shard.postgres.pool import Database
from shard.queue.settle import Settlement
from shard.queue.store import Store
from shard.vocabulary import Answer, NewJobs, OrgId, QueueName, ShardName
from windrow.ids import uuid7

_QUEUE = QueueName("work")
_WINDOW_US = 30_000_000
_POLL_S = 0.002
# The most connections of one client process to one shard. More connections would only wait for each other.
_CONNECTIONS_MAX = 4


class Limit:
    title: ClassVar[str] = "limit: its statements, no gRPC"

    def __init__(self, site: Site) -> None:
        shards = [(ShardName(name), dsn) for name, dsn in site.dsns.items()]
        connections = min(site.callers, _CONNECTIONS_MAX)
        self._databases = [Database(name, dsn, connections=connections) for name, dsn in shards]
        self._books_databases = [Database(name, dsn, connections=1, may_scan=True) for name, dsn in shards]
        self._stores = {database.name: Store(database) for database in self._databases}
        self._opened = False
        self._orgs: list[tuple[OrgId, Store]] = []
        self._turns = itertools.cycle(self._orgs)

    async def prepare(self, run: str) -> None:
        if not self._opened:
            for database in (*self._databases, *self._books_databases):
                await database.open()
            self._opened = True
        placed = await catalog.read(self._books_databases[0])
        orgs: dict[ShardName, OrgId] = {}
        for number in itertools.count():
            org = OrgId(f"{run}-{number}")
            orgs.setdefault(ShardName(placed.placement(org).writes[0]), org)
            if len(orgs) == len(self._stores):
                break
        self._orgs = [(org, self._stores[shard]) for shard, org in orgs.items()]
        self._turns = itertools.cycle(self._orgs)
        for org, store in self._orgs:
            await store.names.make([(org, _QUEUE)])

    async def enqueue(self, payloads: Sequence[bytes]) -> None:
        org, store = next(self._turns)
        jobs = len(payloads)
        columns = NewJobs(
            org=org,
            ids=[uuid7() for _ in range(jobs)],
            queues=[_QUEUE] * jobs,
            kinds=["no-op"] * jobs,
            payloads=list(payloads),
        )
        if await store.enqueue(columns):
            raise Wrong("an enqueue stored less than it was sent")

    async def work(self, *, batch: int, concurrency: int, taken: Taken, finished: Finished) -> None:
        async with asyncio.TaskGroup() as group:
            for at in range(max(concurrency, len(self._orgs))):
                org, store = self._orgs[at % len(self._orgs)]
                group.create_task(self._pull(org, store, batch, taken, finished))

    async def _pull(self, org: OrgId, store: Store, batch: int, taken: Taken, finished: Finished) -> None:
        while True:
            claimed = await store.claim(org, [_QUEUE], max_jobs=batch, window_us=_WINDOW_US, worker="bench")
            prefix, jobs = claimed.prefix, claimed.jobs
            if not jobs:
                await asyncio.sleep(_POLL_S)
                continue
            at_ns = time.monotonic_ns()
            for job in jobs:
                if len(job.payload) != BYTES or job.attempt != 1:
                    raise Wrong("a claim gave a job that is not as it was stored, or gave it for the second time")
                taken(at_ns, job.payload)
            leases = [parse_token(token(prefix, job.id))[1] for job in jobs]
            if await store.settle(Settlement.ack(org, leases, [None] * len(jobs))) != [Answer.OK] * len(jobs):
                raise Wrong("an ack did not finish every job that had been claimed")
            finished(len(jobs))

    async def left(self) -> int:
        return 0 if not self._orgs else (await self._counted())[1]

    async def check(self, jobs: int) -> None:
        accepted, left, succeeded = await self._counted()
        if (accepted, left, succeeded) != (jobs, 0, jobs):
            raise Wrong(f"of {jobs} jobs, {accepted} were accepted and {succeeded} have succeeded")

    async def _counted(self) -> tuple[int, int, int]:
        orgs = {str(org) for org, _ in self._orgs}
        accepted = left = succeeded = 0
        for database in self._books_databases:
            for books in await QueueAdmin(database).check():
                if not books.balanced:
                    raise Wrong(f"shard {database.name!r}: the books of org {books.org!r} do not balance: {books}")
                if books.org in orgs:
                    accepted += books.accepted
                    left += books.scheduled + books.ready + books.leased + books.dead
                    succeeded += books.succeeded
        return accepted, left, succeeded

    async def close(self) -> None:
        for database in (*self._databases, *self._books_databases):
            await database.close()
