"""Adds pushes to the totals in the application's own Postgres, each exactly once. Any number of workers may run.

DATABASE_URL=postgresql://... python -m examples.pushes.worker --address 127.0.0.1:7419
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import windrow
from examples.pushes import tables
from examples.pushes.producer import KIND, QUEUE
from examples.pushes.totals import Push, read_pushes

# How many handlers of each org run at the same time. Most handlers only wait for the transaction that they share.
CONCURRENCY = 100


@dataclass(slots=True)
class _Batch:
    # The pushes by job id: if a job is delivered again while its push waits, the push is still here only once.
    pushes: dict[str, Push] = field(default_factory=dict[str, Push])
    applied: bool = False


class Totals:
    """Applies all waiting pushes in one transaction. If no transaction runs, a push does not wait for other pushes.
    While a transaction runs, new pushes are collected for the next one."""

    def __init__(self, pool: tables.Pool) -> None:
        self._pool = pool
        self._lock = asyncio.Lock()
        self._filling = _Batch()

    async def add(self, job_id: str, push: Push) -> None:
        """Adds a push to the totals. Returns after the commit."""
        batch = self._filling
        batch.pushes[job_id] = push
        async with self._lock:
            # The first handler that gets the lock applies the batch for all handlers in it.
            if batch.applied:
                return
            if self._filling is batch:
                self._filling = _Batch()
            async with self._pool.connection() as connection:
                await tables.apply(connection, list(batch.pushes.items()))
            batch.applied = True


def make_worker(
    client: windrow.Client, totals: Totals, *, visibility_window_s: float, name: str | None
) -> windrow.Worker:
    """Makes a worker for the client's org."""
    worker = windrow.Worker(client, QUEUE, concurrency=CONCURRENCY, visibility_window=visibility_window_s, name=name)

    @worker.handler(KIND)
    async def push(job: windrow.Job) -> None:
        # The job is acked when this handler returns, so only after the commit.
        await totals.add(job.id, Push.from_json(job.payload))

    return worker


async def work(
    address: str,
    database: str,
    orgs: Sequence[str],
    *,
    visibility_window_s: float = 30.0,
    name: str | None = None,
) -> None:
    """Runs workers for all orgs over the same connections, until SIGTERM or Ctrl-C."""
    async with (
        windrow.Client(address, org=orgs[0], channels=2) as client,
        tables.open_pool(database) as pool,
        asyncio.TaskGroup() as group,
    ):
        totals = Totals(pool)
        workers = [
            make_worker(client.for_org(org), totals, visibility_window_s=visibility_window_s, name=name) for org in orgs
        ]
        for worker in workers:
            group.create_task(worker.run())


def _end_with_stdin() -> None:
    """Ends this process when its parent process ends, no matter how the parent ends. Standard input ends with the
    parent, because it is a pipe whose other end the parent holds."""
    while os.read(0, 4096):
        pass
    # SIGTERM stops running workers gracefully. If no worker runs yet, SIGTERM ends the process.
    os.kill(os.getpid(), signal.SIGTERM)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.pushes.worker")
    parser.add_argument("--address", default="127.0.0.1:7419", help="HOST:PORT of the routers")
    parser.add_argument("--database", default=os.environ.get("DATABASE_URL"), help="DSN; default: $DATABASE_URL")
    parser.add_argument("--orgs", nargs="+", help="default: the orgs of the recorded pushes")
    parser.add_argument("--visibility-window", type=float, default=30.0, help="length of each lease, in seconds")
    parser.add_argument("--name", help="the worker's name in the attempt history")
    parser.add_argument("--until-stdin-closes", action="store_true", help="stop when standard input ends")
    arguments = parser.parse_args()
    if not arguments.database:
        parser.error("no database: give --database, or set DATABASE_URL")
    if arguments.until_stdin_closes:
        threading.Thread(target=_end_with_stdin, daemon=True).start()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    asyncio.run(
        work(
            arguments.address,
            arguments.database,
            arguments.orgs or sorted({push.org for push in read_pushes()}),
            visibility_window_s=arguments.visibility_window,
            name=arguments.name,
        )
    )


if __name__ == "__main__":
    main()
