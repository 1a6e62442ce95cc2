"""PGMQ, by direct calls of its SQL functions. Its configuration: bench/peers/README.md."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import psycopg
from psycopg_pool import AsyncConnectionPool

from bench.peers.install import pgmq_sql
from bench.system import Finished, Site, Taken, Wrong

_SEND = b"SELECT * FROM pgmq.send_batch(%b, %t::jsonb[])"
_READ = b"SELECT msg_id, message->>'p' FROM pgmq.read(%b, %b, %b)"
_POLL = b"SELECT msg_id, message->>'p' FROM pgmq.read_with_poll(%b, %b, %b, %b, %b)"
_DELETE = b"SELECT * FROM pgmq.delete(%b, %b)"
_METRICS = b"SELECT queue_length, total_messages FROM pgmq.metrics(%b)"
_INSTALLED = b"SELECT to_regprocedure('pgmq.metrics(text)') IS NOT NULL"
_EXISTS = b"SELECT count(*) > 0 FROM pgmq.meta WHERE queue_name = %b"
_CREATE = b"SELECT pgmq.create(%b)"
# This lock prevents two client processes from creating the same thing at the same time.
_LOCK = b"SELECT pg_advisory_lock(hashtext('pgmq'))"
_UNLOCK = b"SELECT pg_advisory_unlock(hashtext('pgmq'))"

_VISIBLE_AGAIN_S = 30
# The server looks for jobs every _POLL_MS. If it finds no jobs, it answers after _POLL_S_MAX.
_POLL_MS = 5
_POLL_S_MAX = 1


class Pgmq:
    """PGMQ needs no process of its own: it consists of SQL functions, and no client of it is faster than a driver."""

    title: ClassVar[str] = "PGMQ 1.13 (SQL functions)"

    def __init__(self, site: Site) -> None:
        self._sql = pgmq_sql(Path(site.cache))
        self._dsn = site.dsn
        self._pool = AsyncConnectionPool(
            site.dsn,
            min_size=site.callers + 1,
            max_size=site.callers + 1,
            kwargs={"autocommit": True, "prepare_threshold": 0},
            open=False,
        )
        self._opened = False
        self._queue = ""

    async def prepare(self, run: str) -> None:
        if not self._opened:
            await self._pool.open(wait=True)
            self._opened = True
        self._queue = run.replace("-", "_")
        async with self._pool.connection() as connection:
            await connection.execute(_LOCK)
            try:
                if not (await _all(connection, _INSTALLED))[0][0]:
                    # The file has several statements. Only the simple protocol, which has no parameters, takes several
                    # at once.
                    await connection.execute(self._sql.read_bytes(), prepare=False)
                if not (await _all(connection, _EXISTS, self._queue))[0][0]:
                    await connection.execute(_CREATE, [self._queue])
            finally:
                await connection.execute(_UNLOCK)

    async def enqueue(self, payloads: Sequence[bytes]) -> None:
        if not all(map(bytes.isascii, payloads)):
            raise Wrong(f"{self.title} keeps payloads as JSON, and can be compared only where they are ASCII text")
        messages = [json.dumps({"p": payload.decode()}) for payload in payloads]
        async with self._pool.connection() as connection:
            if len(await _all(connection, _SEND, self._queue, messages)) != len(payloads):
                raise Wrong("a send_batch stored less than it was sent")

    async def work(self, *, batch: int, concurrency: int, taken: Taken, finished: Finished) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(self._consume(batch, taken, finished))

    async def left(self) -> int:
        length: int = (await self._metrics())[0]
        return length

    async def check(self, jobs: int) -> None:
        length, total = await self._metrics()
        if (length, total) != (0, jobs):
            raise Wrong(f"of {jobs} jobs, {total} were accepted and {length} are left")

    async def close(self) -> None:
        await self._pool.close()

    async def _consume(self, batch: int, taken: Taken, finished: Finished) -> None:
        read = [self._queue, _VISIBLE_AGAIN_S, batch]
        async with await psycopg.AsyncConnection.connect(self._dsn, autocommit=True, prepare_threshold=0) as connection:
            while True:
                # The polling function takes rows one by one. Use the polling function only if no job can be taken now.
                messages = await _all(connection, _READ, *read)
                if not messages:
                    messages = await _all(connection, _POLL, *read, _POLL_S_MAX, _POLL_MS)
                if not messages:
                    continue
                at_ns = time.monotonic_ns()
                for _, payload in messages:
                    taken(at_ns, payload.encode())
                deleted = await _all(connection, _DELETE, self._queue, [message for message, _ in messages])
                if len(deleted) != len(messages):
                    raise Wrong("a delete found less messages than had been read")
                finished(len(deleted))

    async def _metrics(self) -> tuple[Any, ...]:
        async with self._pool.connection() as connection:
            return (await _all(connection, _METRICS, self._queue))[0]


async def _all(connection: psycopg.AsyncConnection[Any], statement: bytes, *values: object) -> list[tuple[Any, ...]]:
    cursor = connection.cursor(binary=True)
    await cursor.execute(statement, values)
    return await cursor.fetchall()
