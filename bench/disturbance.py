"""Disturbs a queue that is in use: by an open transaction, by readers, by an archiver with much to do, or by restarts
of the routers. Each disturbance ends with its scope."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field

import psycopg
from psycopg import sql

from archiver.run import Pass
from archiver.service import archive_once
from bench.system import Wrong
from proof.background import background
from shard.placement.cluster_file import Cluster

_READERS = 4
# How long a reader keeps its snapshot. The readers begin one after another, so that there is always an old snapshot.
_READ_S = 20.0
_SCAN_EVERY_S = 1.0
# The time from one restart of a router process to the next.
_START_S = 6.0

# The tables whose rows are changed and deleted: a queue's hot tables. Tables that are only appended to are not scanned.
_HOT_TABLES = """
SELECT schemaname, relname
FROM pg_stat_user_tables
WHERE n_tup_upd + n_tup_del > 0
ORDER BY n_tup_upd + n_tup_del DESC
LIMIT 2
"""


@contextlib.asynccontextmanager
async def held_snapshot(dsns: Sequence[str]) -> AsyncGenerator[None, None]:
    """Holds a transaction open in each database, with a snapshot and an xid."""
    async with contextlib.AsyncExitStack() as stack:
        for dsn in dsns:
            connection = await psycopg.AsyncConnection.connect(dsn)
            stack.push_async_callback(connection.close)
            await connection.set_isolation_level(psycopg.IsolationLevel.REPEATABLE_READ)
            await connection.execute("SELECT pg_current_xact_id()")
        yield


@contextlib.asynccontextmanager
async def readers(dsns: Sequence[str]) -> AsyncGenerator[None, None]:
    """Runs four readers in each database. Each reader reads all rows of the hot tables once a second, and takes a new
    snapshot every 20 s."""
    async with background(*(_read(dsn, begin_s=at * _READ_S / _READERS) for dsn in dsns for at in range(_READERS))):
        yield


async def _read(dsn: str, *, begin_s: float) -> None:
    await asyncio.sleep(begin_s)
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
        cursor = await connection.execute(_HOT_TABLES)
        tables = [sql.Identifier(schema, name) for schema, name in await cursor.fetchall()]
        await connection.set_autocommit(False)
        await connection.set_isolation_level(psycopg.IsolationLevel.REPEATABLE_READ)
        while True:
            for _ in range(round(_READ_S / _SCAN_EVERY_S)):
                for table in tables:
                    await connection.execute(sql.SQL("SELECT count(*) FROM {}").format(table))
                await asyncio.sleep(_SCAN_EVERY_S)
            await connection.commit()


@contextlib.asynccontextmanager
async def restarts(pids: Callable[[], Sequence[int]]) -> AsyncGenerator[None, None]:
    """Again and again, ends one router process by SIGTERM, so that another process replaces it. Each new process has
    some seconds to start before the next old process ends."""

    async def restart() -> None:
        while True:
            # The first process is the one that has run longest.
            victim = pids()[0]
            os.kill(victim, signal.SIGTERM)
            await asyncio.sleep(_START_S)
            if victim in pids():
                raise Wrong(f"router process {victim} has not ended {_START_S:g} s after SIGTERM")

    async with background(restart()):
        yield


@dataclass(slots=True)
class Archived:
    """What the passes of an archiver have done. The function `archiver` runs the passes."""

    passes: list[Pass] = field(default_factory=list[Pass])
    # The time from the start of the first pass to the end of the last pass.
    seconds: float = 0.0

    @property
    def turned_cold(self) -> int:
        return sum(aged.jobs for done in self.passes for aged in done.turned_cold)

    @property
    def dropped(self) -> int:
        return sum(aged.jobs for done in self.passes for aged in done.dropped)

    @property
    def locked_s_max(self) -> float:
        return max((done.locked_s_max for done in self.passes), default=0.0)


@contextlib.asynccontextmanager
async def archiver(cluster: Cluster, found: Archived) -> AsyncGenerator[None, None]:
    """Runs passes of an archiver one after another, and adds each pass to `found`. Stops when a pass finds nothing to
    do, or when the scope ends. The end of the scope waits for the pass that is running."""
    stop = asyncio.Event()

    async def passes() -> None:
        began_s = time.monotonic()
        while not stop.is_set():
            ((_, done),) = (await archive_once(cluster, stop=asyncio.Event())).items()
            if not isinstance(done, Pass):
                raise Wrong(f"no pass of the archiver: {done}")
            found.passes.append(done)
            found.seconds = time.monotonic() - began_s
            if not done.did_something:
                break

    task = asyncio.create_task(passes())
    try:
        yield
    finally:
        stop.set()
        await task
