"""procrastinate, with its bulk call, LISTEN/NOTIFY and concurrent workers. See bench/peers/README.md."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import procrastinate  # type: ignore[import-not-found]

from bench.peers.python.serve import Report, serve

_KIND = "no-op"
_COUNTS = """
SELECT status::text AS status, count(*) AS jobs FROM procrastinate_jobs WHERE queue_name = %(run)s GROUP BY status
"""
# How many jobs one worker runs at the same time.
_JOBS_AT_A_TIME = 10


class Peer:
    async def open(self, dsn: str, connections: int) -> None:
        # One connection for LISTEN, and some for the workers' own calls.
        size = 2 * connections + 2
        self._connector = procrastinate.PsycopgConnector(conninfo=dsn, min_size=size, max_size=size)
        self._app = procrastinate.App(connector=self._connector)
        self._report: Report | None = None
        self._task = self._app.task(name=_KIND)(self._handle)
        self._workers: list[asyncio.Task[None]] = []
        await self._app.open_async()
        finish = self._app.job_manager.finish_job

        async def counted(*arguments: Any, **named: Any) -> None:
            await finish(*arguments, **named)
            if self._report is not None:
                self._report.finished(1)

        self._app.job_manager.finish_job = counted

    async def prepare(self, run: str) -> None:
        self._run = run
        self._deferrer = self._task.configure(queue=run)
        there = await self._connector.execute_query_one_async("SELECT to_regclass('procrastinate_jobs') AS name")
        if there["name"] is None:
            await self._app.schema_manager.apply_schema_async()

    async def enqueue(self, payloads: list[str]) -> None:
        if len(payloads) == 1:
            await self._deferrer.defer_async(p=payloads[0])
        else:
            await self._deferrer.batch_defer_async(*({"p": payload} for payload in payloads))

    async def _handle(self, p: str) -> None:
        assert self._report is not None
        self._report.taken(p)

    async def work(self, batch: int, concurrency: int, report: Report) -> None:
        self._report = report
        options = {
            "queues": [self._run],
            "concurrency": _JOBS_AT_A_TIME,
            "listen_notify": True,
            "install_signal_handlers": False,
        }
        workers = [self._app.run_worker_async(**options) for _ in range(concurrency)]
        self._workers = [asyncio.create_task(worker) for worker in workers]
        await asyncio.gather(*self._workers, return_exceptions=True)
        for worker in self._workers:
            if not worker.cancelled():
                worker.result()

    def rest(self) -> None:
        # According to procrastinate's documentation, a cancelled worker first finishes the jobs that it runs.
        for worker in self._workers:
            worker.cancel()

    async def counts(self) -> dict[str, int | None]:
        rows = await self._connector.execute_query_all_async(_COUNTS, run=self._run)
        jobs = {row["status"]: row["jobs"] for row in rows}
        left = jobs.get("todo", 0) + jobs.get("doing", 0)
        return {"left": left, "accepted": sum(jobs.values()), "finished": jobs.get("succeeded", 0)}

    async def close(self) -> None:
        await self._app.close_async()


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    # procrastinate warns about task names made from the module's name, __main__. Our task has a name of its own.
    logging.getLogger("procrastinate.blueprints").setLevel(logging.ERROR)
    serve(Peer())
