"""Adds pushes to the totals in the application's own Postgres, each exactly once. Run as many of these as you like.

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

# Of each org: handlers at the same time, most of which only wait for the transaction that they share.
CONCURRENCY = 100


@dataclass(slots=True)
class _Batch:
    # By job id: a job that came a second time while it waits is the same push.
    pushes: dict[str, Push] = field(default_factory=dict[str, Push])
    applied: bool = False


class Totals:
    """Applies pushes in transactions of whatever is waiting: one push alone does not wait for more, and while a
    transaction is under way the next one fills."""

    def __init__(self, pool: tables.Pool) -> None:
        self._pool = pool
        self._turn = asyncio.Lock()
        self._filling = _Batch()

    async def add(self, job_id: str, push: Push) -> None:
        """Returns when the push is in the totals, and that is committed."""
        batch = self._filling
        batch.pushes[job_id] = push
        async with self._turn:
            # Whoever has the first turn applies the batch for all who are in it.
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
    """A worker for one org: the client's."""
    worker = windrow.Worker(client, QUEUE, concurrency=CONCURRENCY, visibility_window=visibility_window_s, name=name)

    @worker.handler(KIND)
    async def push(job: windrow.Job) -> None:  # pyright: ignore[reportUnusedFunction]
        # When this returns the job is acknowledged, and so only after the commit.
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
    """Works for all orgs, over the same connections, until SIGTERM or Ctrl-C."""
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
    """Whoever started this process holds the other end of its standard input, and we end with it, however it ends."""
    while os.read(0, 4096):
        pass
    # Ends a process that has no worker running yet; running workers take it as the sign to stop in order.
    os.kill(os.getpid(), signal.SIGTERM)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.pushes.worker")
    parser.add_argument("--address", default="127.0.0.1:7419", help="of the routers, HOST:PORT")
    parser.add_argument("--database", default=os.environ.get("DATABASE_URL"), help="DSN; default: $DATABASE_URL")
    parser.add_argument("--orgs", nargs="+", help="default: those of the recorded pushes")
    parser.add_argument("--visibility-window", type=float, default=30.0, help="of each lease, in seconds")
    parser.add_argument("--name", help="kept in the attempt history")
    parser.add_argument("--until-stdin-closes", action="store_true", help="stop when standard input ends")
    arguments = parser.parse_args()
    if not arguments.database:
        parser.error("which database? Give --database, or set DATABASE_URL")
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
