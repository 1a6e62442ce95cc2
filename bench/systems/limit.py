"""The limit: the store's own statements, called where the clients are. No router, no gRPC, no messages."""

from __future__ import annotations

import itertools
from typing import ClassVar

from bench.system import Site, Wrong
from shard import catalog
from shard.books import Books
from shard.database import Database
from shard.lease import parse_token, token
from shard.store import Store
from shard.vocabulary import Answer, NewJobs, OrgId, QueueName, ShardName
from windrow.ids import uuid7

_QUEUE = QueueName("work")
_WINDOW_US = 30_000_000


class Limit:
    title: ClassVar[str] = "limit: its statements, no gRPC"

    def __init__(self, site: Site) -> None:
        shards = [(ShardName(name), dsn) for name, dsn in site.dsns.items()]
        self._databases = [Database(name, dsn, connections=site.callers) for name, dsn in shards]
        self._books_databases = [Database(name, dsn, connections=1, for_books=True) for name, dsn in shards]
        self._stores = {database.name: Store(database) for database in self._databases}
        self._payload = site.payload_bytes
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
            await store.names.make(org, [_QUEUE])

    async def enqueue(self, jobs: int) -> None:
        org, store = next(self._turns)
        columns = NewJobs(
            org=org,
            ids=[uuid7() for _ in range(jobs)],
            queues=[_QUEUE] * jobs,
            kinds=["no-op"] * jobs,
            payloads=[self._payload] * jobs,
        )
        if await store.enqueue(columns):
            raise Wrong("an enqueue stored less than it was sent")

    async def drain(self, jobs_max: int) -> int:
        for _ in self._orgs:
            org, store = next(self._turns)
            prefix, taken = await store.claim(org, [_QUEUE], max_jobs=jobs_max, window_us=_WINDOW_US, worker="bench")
            if not taken:
                continue
            if any(job.payload != self._payload or job.attempt != 1 for job in taken):
                raise Wrong("a claim gave a job that is not as it was stored, or gave it for the second time")
            leases = [parse_token(token(prefix, job.id))[1] for job in taken]
            if await store.ack(org, leases, [None] * len(taken)) != [Answer.OK] * len(taken):
                raise Wrong("an ack did not finish every job that had been claimed")
            return len(taken)
        return 0

    async def check(self, jobs: int) -> None:
        orgs = {str(org) for org, _ in self._orgs}
        accepted = succeeded = 0
        for database in self._books_databases:
            for books in await Books(database).check():
                if not books.balanced:
                    raise Wrong(f"shard {database.name!r}: the books of org {books.org!r} do not balance: {books}")
                if books.org in orgs:
                    accepted += books.accepted
                    succeeded += books.succeeded
        if (accepted, succeeded) != (jobs, jobs):
            raise Wrong(f"of {jobs} jobs, {accepted} were accepted and {succeeded} have succeeded")

    async def close(self) -> None:
        for database in (*self._databases, *self._books_databases):
            await database.close()
