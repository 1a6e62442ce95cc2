"""pgqueuer, as its performance guide and its own benchmark run it. See bench/peers/README.md."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import asyncpg  # type: ignore[import-not-found]
import uvloop
from pgqueuer import PgQueuer  # type: ignore[import-not-found]
from pgqueuer.db import AsyncpgDriver, AsyncpgPoolDriver  # type: ignore[import-not-found]
from pgqueuer.queries import Queries  # type: ignore[import-not-found]

from bench.peers.python.serve import Report, serve

# A process works on about this many jobs at the same time. More consumers would only slow each other down.
_AT_A_TIME = 100


class Peer:
    async def open(self, dsn: str, connections: int) -> None:
        self._dsn = dsn
        self._pool = await asyncpg.create_pool(dsn, min_size=connections + 1, max_size=connections + 1)
        self._queries = Queries(AsyncpgPoolDriver(self._pool))
        self._consumers: list[Any] = []

    async def prepare(self, run: str) -> None:
        self._run = run
        if not await self._queries.has_table("pgqueuer"):
            await self._queries.install()
            await self._queries.optimize_autovacuum()

    async def enqueue(self, payloads: list[str]) -> None:
        count = len(payloads)
        await self._queries.enqueue([self._run] * count, [payload.encode() for payload in payloads], [0] * count)

    async def work(self, batch: int, concurrency: int, report: Report) -> None:
        async def handle(job: Any) -> None:
            report.taken(job.payload.decode())

        self._consumers.clear()
        consumers = max(1, min(concurrency, _AT_A_TIME // batch))
        connections = [await asyncpg.connect(self._dsn) for _ in range(consumers)]
        for connection in connections:
            driver = AsyncpgDriver(connection)
            consumer = PgQueuer(driver, queries=_Counted(driver, report))
            consumer.entrypoint(self._run)(handle)
            self._consumers.append(consumer)
        try:
            async with asyncio.TaskGroup() as group:
                for consumer in self._consumers:
                    group.create_task(consumer.run(batch_size=batch, dequeue_timeout=timedelta(seconds=30)))
        finally:
            for connection in connections:
                await connection.close()

    def rest(self) -> None:
        for consumer in self._consumers:
            consumer.shutdown.set()

    async def counts(self) -> dict[str, int | None]:
        left = await self._pool.fetchval("SELECT count(*) FROM pgqueuer WHERE entrypoint = $1", self._run)
        logged = dict(
            await self._pool.fetch(
                "SELECT status::text, count(*) FROM pgqueuer_log WHERE entrypoint = $1 GROUP BY status", self._run
            )
        )
        return {"left": left, "accepted": logged.get("queued", 0), "finished": logged.get("successful", 0)}

    async def close(self) -> None:
        await self._pool.close()


class _Counted(Queries):  # type: ignore[misc]
    """pgqueuer's repository object, which also reports the finished jobs that it logs."""

    def __init__(self, driver: Any, report: Report) -> None:
        super().__init__(driver)
        self._report = report

    async def log_jobs(self, job_status: list[Any]) -> None:
        await super().log_jobs(job_status)
        self._report.finished(len(job_status))


if __name__ == "__main__":
    serve(Peer(), loop=uvloop.new_event_loop)
