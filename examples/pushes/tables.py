"""The application's own tables: the totals, and the ids of the jobs that the totals include. These tables are in the
application's database, which Windrow does not know.

A queue delivers a job at least once. With these tables, a job has its effect exactly once: the id of the job and the
effect are committed together, and a job whose id is already in the table changes nothing.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from psycopg import AsyncConnection
from psycopg_pool import AsyncConnectionPool

from examples.pushes.totals import Key, Push, Sums

CREATE = """
-- Two workers that start at the same time must not both create a table.
SELECT pg_advisory_xact_lock(hashtext('pushes'));
CREATE TABLE IF NOT EXISTS applied (
    job_id uuid PRIMARY KEY,
    -- 2 or more: the job was delivered again after its effect was committed; it is still counted only once.
    deliveries integer NOT NULL DEFAULT 1
);
CREATE TABLE IF NOT EXISTS totals (
    org text, repo text, week text,
    pushes bigint NOT NULL, files bigint NOT NULL, insertions bigint NOT NULL, deletions bigint NOT NULL,
    PRIMARY KEY (org, repo, week)
);
"""

# This is one statement, and so one transaction. Both INSERTs lock their rows in a fixed order: otherwise two workers
# that change the same rows could deadlock.
APPLY = """
WITH push AS (
    SELECT *
    FROM unnest(%s::uuid[], %s::text[], %s::text[], %s::bigint[], %s::bigint[], %s::bigint[], %s::bigint[])
        AS given (job_id, org, repo, at, files, insertions, deletions)
), seen AS (
    INSERT INTO applied AS a (job_id)
    SELECT job_id FROM push ORDER BY job_id
    ON CONFLICT (job_id) DO UPDATE SET deliveries = a.deliveries + 1
    RETURNING job_id, deliveries
)
INSERT INTO totals AS t (org, repo, week, pushes, files, insertions, deletions)
SELECT
    org, repo, to_char(to_timestamp(at) AT TIME ZONE 'UTC', 'IYYY-"W"IW') AS week,
    count(*), sum(files), sum(insertions), sum(deletions)
FROM push
JOIN seen USING (job_id)
WHERE deliveries = 1
GROUP BY org, repo, week
ORDER BY org, repo, week
ON CONFLICT (org, repo, week) DO UPDATE SET
    pushes = t.pushes + excluded.pushes,
    files = t.files + excluded.files,
    insertions = t.insertions + excluded.insertions,
    deletions = t.deletions + excluded.deletions
"""


class Applied(NamedTuple):
    jobs: int
    # Deliveries of jobs whose effect was committed already.
    repeats: int


Connection = AsyncConnection[tuple[Any, ...]]
Pool = AsyncConnectionPool[Connection]


@asynccontextmanager
async def open_pool(database: str) -> AsyncGenerator[Pool, None]:
    """Opens a pool of one connection in autocommit mode. The pool replaces the connection if it breaks. Creates the
    tables. `database`: the DSN."""
    async with AsyncConnectionPool[Connection](
        database, min_size=1, max_size=1, kwargs={"autocommit": True}, open=False
    ) as pool:
        async with pool.connection() as connection:
            await connection.execute(CREATE)
        yield pool


async def apply(connection: Connection, pushes: Sequence[tuple[str, Push]]) -> None:
    """Adds pushes, each with the id of its job, to the totals. Adds all or none, and skips an id that an earlier call
    has added. The ids of one call must differ. Returns after the commit."""
    await connection.execute(
        APPLY,
        (
            [job_id for job_id, _ in pushes],
            [push.org for _, push in pushes],
            [push.repo for _, push in pushes],
            [push.at for _, push in pushes],
            [push.files for _, push in pushes],
            [push.insertions for _, push in pushes],
            [push.deletions for _, push in pushes],
        ),
    )


async def read_totals(connection: Connection) -> dict[Key, Sums]:
    rows = await (
        await connection.execute("SELECT org, repo, week, pushes, files, insertions, deletions FROM totals")
    ).fetchall()
    return {Key(*row[:3]): Sums(*row[3:]) for row in rows}


async def read_applied(connection: Connection) -> Applied:
    row = await (
        await connection.execute("SELECT count(*), coalesce(sum(deliveries - 1), 0)::bigint FROM applied")
    ).fetchone()
    assert row is not None
    return Applied(*row)
