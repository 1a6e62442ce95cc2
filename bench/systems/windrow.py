"""Windrow as its users have it: `windrow.Client` and `windrow.Worker`."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Sequence
from typing import ClassVar

import windrow
from bench.system import Finished, Site, Taken, Wrong
from bench.systems.on_routers import QUEUE, OnRouters
from windrow.v1 import admin_pb2

KIND = "no-op"
# How many handlers a worker process runs at the same time. The peers' own benchmarks have 512 to 2,000
# (bench/peers/README.md).
PLACES = 500
_JOBS_AT_ONCE = 100
_GROUPS = 1_000


class Windrow(OnRouters):
    """Calls `client.enqueue_many` for a batch, or `client.enqueue` for one job, and runs a Worker with an `async def`
    handler.

    Each run has a new client, because chance decides which router process a connection reaches."""

    title: ClassVar[str] = "Windrow"

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self._client: windrow.Client | None = None
        self._clients: list[windrow.Client] = []
        self._turns = itertools.cycle(self._clients)

    async def prepare(self, run: str) -> None:
        await super().prepare(run)
        await self._close_client()
        self._client = self._new_client(self._orgs[0])
        await self._client.server_info()
        self._clients = [self._client.for_org(org) for org in self._orgs]
        self._turns = itertools.cycle(self._clients)

    async def enqueue(self, payloads: Sequence[bytes]) -> None:
        client = next(self._turns)
        if len(payloads) == 1:
            stored = [await client.enqueue(QUEUE, KIND, payloads[0], group=self._group())]
        else:
            jobs = [windrow.NewJob(QUEUE, KIND, payload, group=self._group()) for payload in payloads]
            stored = await client.enqueue_many(jobs)
        if len(stored) != len(payloads) or any(one.duplicate for one in stored):
            raise Wrong("an enqueue stored less than it was given")

    def _group(self) -> str:
        """Returns the group of the next job. An empty text means that the job has no group."""
        return ""

    async def work(self, *, batch: int, concurrency: int, taken: Taken, finished: Finished) -> None:
        places = max(1, PLACES // len(self._clients))
        await self._run(
            [windrow.Worker(client, [QUEUE], concurrency=places) for client in self._clients], taken, finished
        )

    async def _run(self, workers: Sequence[windrow.Worker], taken: Taken, finished: Finished) -> None:
        async with asyncio.TaskGroup() as group:
            for worker in workers:
                self._register(worker, taken, finished)
                group.create_task(worker.run())

    def _register(self, worker: windrow.Worker, taken: Taken, finished: Finished) -> None:
        # A worker does not report when acks are answered. Therefore settle() in client_process.py asks the database at
        # the end.
        @worker.handler(KIND)
        async def no_op(job: windrow.Job) -> None:
            taken(time.monotonic_ns(), job.payload)
            finished(1)

    async def close(self) -> None:
        await self._close_client()
        await super().close()

    def _new_client(self, org: str) -> windrow.Client:
        site = self._site
        if site.connections is None:
            return windrow.Client(site.address, org=org, tls=site.ca, token=site.token)
        return windrow.Client(site.address, org=org, tls=site.ca, token=site.token, channels=site.connections)

    async def _close_client(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.close()


class WindrowTraced(Windrow):
    """Uses routers that trace."""

    title: ClassVar[str] = "Windrow, 1 % of calls traced"


class WindrowMeasured(Windrow):
    """Uses routers that serve metrics."""

    title: ClassVar[str] = "Windrow, metrics"


class WindrowTelling(Windrow):
    """Uses routers that trace and serve metrics."""

    title: ClassVar[str] = "Windrow, 1 % of calls traced, metrics"


class WindrowTls(Windrow):
    """Uses routers that speak TLS."""

    title: ClassVar[str] = "Windrow, TLS"


class WindrowSecure(Windrow):
    """Uses routers that speak TLS and require an API key."""

    title: ClassVar[str] = "Windrow, TLS and a key"


class WindrowWorkers(Windrow):
    """Runs as many workers as `concurrency`, each with one place and a stream of its own."""

    async def work(self, *, batch: int, concurrency: int, taken: Taken, finished: Finished) -> None:
        turns = itertools.cycle(self._clients)
        workers = [windrow.Worker(next(turns), [QUEUE], concurrency=1) for _ in range(concurrency)]
        await self._run(workers, taken, finished)


class WindrowBatches(Windrow):
    """Uses a handler that takes up to 100 jobs at once."""

    title: ClassVar[str] = "Windrow, batch handlers"

    def _register(self, worker: windrow.Worker, taken: Taken, finished: Finished) -> None:
        @worker.batch_handler(KIND, max_jobs=_JOBS_AT_ONCE)
        async def no_op(jobs: Sequence[windrow.Job]) -> None:
            at_ns = time.monotonic_ns()
            for job in jobs:
                taken(at_ns, job.payload)
            finished(len(jobs))


class WindrowGroups(Windrow):
    """The jobs of each group run one after another."""

    title: ClassVar[str] = "Windrow, groups of one"

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        # Each process begins with another group, so that the processes do not enqueue for the same groups all the time.
        self._next_group = itertools.count(random.randrange(_GROUPS))

    def _group(self) -> str:
        return f"group-{next(self._next_group) % _GROUPS}"


class WindrowGroupsOfThree(WindrowGroups):
    """Up to three jobs of each group run at the same time."""

    title: ClassVar[str] = "Windrow, groups of three"
    queue: ClassVar[admin_pb2.QueueConfig] = admin_pb2.QueueConfig(group_concurrency=3)
