"""awa through its Python SDK, with direct COPY and wide workers. See bench/peers/README.md."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import Any

import awa  # type: ignore[import-not-found]
import psycopg

from bench.peers.python.serve import Report, serve

# The workers of this process. A worker is busy until its job has finished in the database, so there must be many. With
# at least this number of workers, awa writes over four connections at the same time.
_WORKERS = 512
_CLAIM_JOBS_MAX = 512
_CONNECTIONS = 20
# If nothing has happened for this long, the peer asks the database whether jobs are left.
_QUIET_S = 0.01
# The first worker of a new installation would run this statement, but producers need its effect earlier.
_ACTIVATE = b"SELECT awa.storage_auto_finalize_if_fresh('awa')"
# Counts like awa's exact counts, but reads only the small tables. These tables suffice, because this benchmark retries
# and deletes no job.
_COUNTS = b"""
SELECT
    (SELECT coalesce(sum(awa.sequence_next_value(seq_name) - 1), 0) FROM awa.queue_enqueue_heads WHERE queue = %s),
    (SELECT coalesce(sum(pruned_completed_count), 0) FROM awa.queue_terminal_rollups WHERE queue = %s)
    + (SELECT coalesce(sum(live_terminal_count), 0) FROM awa.queue_terminal_live_counts WHERE queue = %s)
    + (SELECT coalesce(sum(terminal_delta), 0) FROM awa.queue_terminal_count_deltas WHERE queue = %s)
    + (SELECT coalesce(sum(completed_count), 0) FROM awa.receipt_completion_batches WHERE queue = %s)
"""
_KIND = "no-op"


@dataclass
class _NoOp:
    p: str


class Peer:
    async def open(self, dsn: str, connections: int) -> None:
        self._dsn = dsn
        self._client = awa.AsyncClient(dsn, max_connections=connections + 1)
        self._connection = await psycopg.AsyncConnection.connect(dsn, autocommit=True)
        self._stop = asyncio.Event()

    async def prepare(self, run: str) -> None:
        self._run = run
        await self._client.migrate()
        await self._connection.execute(_ACTIVATE)

    async def enqueue(self, payloads: list[str]) -> None:
        jobs = [{"p": payload} for payload in payloads]
        stored = await self._client.enqueue_many_copy(jobs, kind=_KIND, queue=self._run)
        if stored != len(payloads):
            raise RuntimeError(f"stored {stored} of {len(payloads)} jobs")

    async def work(self, batch: int, concurrency: int, report: Report) -> None:
        self._stop = asyncio.Event()
        returned = told = 0

        async def handle(job: Any) -> None:
            nonlocal returned
            report.taken(job.args.p)
            returned += 1

        client = awa.AsyncClient(self._dsn, max_connections=_CONNECTIONS)
        client.task(_NoOp, kind=_KIND, queue=self._run)(handle)
        await client.start([{"name": self._run, "max_workers": _WORKERS, "claim_batch_size": _CLAIM_JOBS_MAX}])
        # awa does not report when a job has finished in the database. But a worker takes its next job only after its
        # last job has finished in the database. So at most as many jobs are under way as there are workers, and no job
        # is under way when no job is left.
        before = -1
        while not self._stop.is_set():
            sure = returned - _WORKERS
            if returned == before and returned > told and not (await self.counts())["left"]:
                sure = returned
            before = returned
            if sure > told:
                report.finished(sure - told)
                told = sure
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_QUIET_S):
                    await self._stop.wait()
        await client.shutdown(timeout_ms=5000)
        await client.close()
        if returned > told:
            report.finished(returned - told)

    def rest(self) -> None:
        self._stop.set()

    async def counts(self) -> dict[str, int | None]:
        cursor = await self._connection.execute(_COUNTS, [self._run] * 5)
        row = await cursor.fetchone()
        assert row is not None
        accepted, finished = map(int, row)
        return {"left": accepted - finished, "accepted": accepted, "finished": finished}

    async def close(self) -> None:
        await self._connection.close()
        await self._client.close()


if __name__ == "__main__":
    serve(Peer())
