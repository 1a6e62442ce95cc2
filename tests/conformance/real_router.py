"""A real router for the scenarios, the faults of this router, and the reference client that works on its jobs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from typing import Any

import psutil
from grpc import aio

from tests.conformance.reference import ReferenceWorker
from tests.jobs import job_id
from tests.postgres import Server
from tests.routers import PATIENCE_S, Routers
from tests.streams import OK, Client, new_job, until
from windrow.v1 import job_pb2, queue_pb2

QUEUE = "mail"
_STORED_BYTES_MAX = 8 << 20
_SUCCEEDED = job_pb2.JOB_STATE_SUCCEEDED


class Bench:
    """The router, its database and a client, for one scenario. The scenario's org lives on a shard whose database may
    stop answering."""

    def __init__(self, server: Server, database: str, routers: Routers, client: Client, org: str) -> None:
        self.org = org
        self._server = server
        self._database = database
        self._routers = routers
        self._client = client

    @contextlib.asynccontextmanager
    async def worker(self, *, queue: str = QUEUE, **options: Any) -> AsyncGenerator[ReferenceWorker, None]:
        worker = ReferenceWorker(self._routers.address, org=self.org, queue=queue, **options)
        running = asyncio.create_task(worker.run())
        try:
            yield worker
            # A job is succeeded before the client gets the answer to the ack, so wait for the answers too.
            await self.until(lambda: running.done() or not worker.unanswered, "the answers to all messages")
        finally:
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError, aio.AioRpcError):
                await running

    async def store(self, *payloads: str, kind: str = "work", **fields: Any) -> list[str]:
        """Stores jobs. Returns their ids."""
        ids: list[str] = []
        batch_max = max(1, _STORED_BYTES_MAX // max(map(len, payloads)))
        for at in range(0, len(payloads), batch_max):
            jobs = [
                new_job(queue=QUEUE, kind=kind, payload=text.encode(), **fields)
                for text in payloads[at : at + batch_max]
            ]
            ids += await self._client.enqueue(self.org, *jobs)
        return ids

    async def until(self, holds: Callable[[], object], what: str) -> None:
        await until(holds, what, every_s=0.01)

    async def until_succeeded(self, ids: Sequence[str]) -> None:
        async def finished() -> bool:
            return all(job.state == _SUCCEEDED for job in await self._client.get(self.org, *ids))

        await until(finished, "all jobs succeeded", every_s=0.05)

    async def cancel(self, *ids: str) -> None:
        request = queue_pb2.CancelJobsRequest(org=self.org, ids=ids)
        answers = (await self._client.queue.CancelJobs(request, timeout=PATIENCE_S)).answers
        assert set(answers) == {OK}

    async def release(self, *leases: bytes) -> None:
        """Ends leases, as if the leases had expired and another consumer had the jobs."""
        request = queue_pb2.ReleaseRequest(org=self.org, leases=leases)
        answers = (await self._client.queue.Release(request, timeout=PATIENCE_S)).answers
        assert set(answers) == {OK}

    @contextlib.asynccontextmanager
    async def outage(self) -> AsyncGenerator[None, None]:
        """During the block, the database of the org does not answer."""
        with self._server.away(self._database):
            yield
        await self._until_served()

    @contextlib.contextmanager
    def frozen_router(self) -> Generator[None, None, None]:
        """During the block, the process of the router is frozen."""
        processes = self._processes()
        for process in processes:
            process.suspend()
        try:
            yield
        finally:
            for process in processes:
                # The process may have been killed meanwhile.
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.resume()

    async def drain(self) -> None:
        """Ends the router process in order. Waits until its supervisor has started another one."""
        await self._replace(psutil.Process.terminate)

    async def kill(self) -> None:
        """Kills the router process. Waits until its supervisor has started another one."""
        await self._replace(psutil.Process.kill)

    async def _replace(self, end: Callable[[psutil.Process], None]) -> None:
        ended = self._processes()
        for process in ended:
            end(process)
        await until(lambda: not any(process.is_running() for process in ended), "the end of the router process")
        await self._until_served()

    def _processes(self) -> list[psutil.Process]:
        return [psutil.Process(pid) for pid in self._routers.pids]

    async def _until_served(self) -> None:
        """Waits until the org's jobs can be read."""
        request = queue_pb2.GetJobsRequest(org=self.org, ids=[job_id()])

        async def served() -> bool:
            with contextlib.suppress(aio.AioRpcError):
                return not (await self._client.queue.GetJobs(request, timeout=PATIENCE_S)).unavailable_shards
            return False

        await until(served, "an answer about the org's jobs", every_s=0.05)
