"""Reads a cold day from beginning to end, for the export. The jobs come in the order of the names of their orgs, and
within an org in the order of their ids.

This module reads pages, each with a statement of its own. A single cursor would hold its snapshot for the whole time,
and vacuum could not remove dead rows of the hot tables meanwhile. Rows of a cold day normally do not change. If rows
appear or disappear nevertheless, the caller notices this by the number of jobs. Reading takes no lock that an enqueue
or an ack waits for.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from typing import Any, LiteralString, NamedTuple, TypeAlias

from psycopg import sql

from shard.history import slow_steps
from shard.history.days import Day
from shard.postgres.partitions import table
from shard.postgres.pool import Database
from shard.vocabulary import JobId, Micros, OrgId, QueueName

# Upper bounds for a page. A page ends with the job that fills the bytes; the largest job has 2 MiB.
_ROWS = 5_000
_BYTES = 8 * 1024 * 1024
_NIL = "00000000-0000-0000-0000-000000000000"


# The fields of ColdJob for several jobs: one tuple for each field.
Columns: TypeAlias = Sequence[tuple[Any, ...]]


class OrgDay(NamedTuple):
    """How many jobs of a day an org has."""

    org: OrgId
    org_id: int
    jobs: int


class ColdJob(NamedTuple):
    """A row of windrow.cold with the names of its org and queue. _PAGE reads these columns, and the export writes them
    (archiver/parquet.py). A new column comes last, and may be NULL."""

    org: OrgId
    queue: QueueName
    id: JobId
    kind: str
    state: str
    priority: int
    attempt: int
    max_attempts: int | None
    enqueued_at: Micros
    run_at: Micros
    leased_at: Micros | None
    finished_at: Micros
    expires_at: Micros | None
    lease: int | None
    worker: str | None
    reason: str | None
    dedup_key: str | None
    trace: str | None
    payload: bytes
    result: bytes | None
    attributes: str | None
    retry: str | None
    history: str | None
    progress: str | None = None
    checkpoint: bytes | None = None
    live_key: str | None = None
    max_runtime_us: int | None = None
    scheduled_run: str | None = None
    group_key: str | None = None
    workflow_node: str | None = None


_ID = ColdJob._fields.index("id")
_TEXTS = {"id", "attributes", "retry", "history", "progress"}
_COLUMNS = sql.SQL(", ").join(
    sql.Identifier("q" if column == "queue" else "p", column) + sql.SQL("::text" if column in _TEXTS else "")
    for column in ColdJob._fields
)
_COUNT: LiteralString = """
SELECT coalesce(o.org, 'unknown org ' || c.org_id) AS org, c.org_id, c.jobs
FROM (SELECT f.queue_id & 4294967295 AS org_id, count(*) AS jobs FROM {} f GROUP BY 1) c
LEFT JOIN windrow.org o ON o.org_id = c.org_id
WHERE o.slot IS DISTINCT FROM -1
"""
# `columns` are the columns of ColdJob. `turn` is an org's position in `org_ids`. The page begins with the org at the
# parameter `turn`, after the job `after`. Each org's jobs are read by the index by org and id.
_PAGE: LiteralString = """
SELECT {columns}, p.turn
FROM (
    SELECT
        l.*,
        sum(
            octet_length(l.payload) + coalesce(octet_length(l.result), 0) + coalesce(pg_column_size(l.attributes), 0)
            + coalesce(octet_length(l.history::text), 0) + coalesce(octet_length(l.checkpoint), 0)
            + coalesce(octet_length(l.reason), 0) + 1024
        ) OVER (ORDER BY l.turn, l.id ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS bytes_before
    FROM (
        SELECT o.turn, o.org, c.*
        FROM unnest(%(org_ids)s::bigint[], %(orgs)s::text[]) WITH ORDINALITY AS o (org_id, org, turn)
        CROSS JOIN LATERAL (
            SELECT * FROM {} f
            WHERE f.queue_id & 4294967295 = o.org_id
                AND f.id > CASE WHEN o.turn = %(turn)s THEN %(after)s::uuid ELSE %(nil)s::uuid END
            ORDER BY f.id
            LIMIT %(rows)s
        ) c
        WHERE o.turn >= %(turn)s
        ORDER BY o.turn, c.id
        LIMIT %(rows)s
    ) l
) p
CROSS JOIN LATERAL (SELECT q.queue FROM windrow.queue q WHERE q.queue_id = p.queue_id OFFSET 0) q
WHERE coalesce(p.bytes_before, 0) < %(bytes_max)s
ORDER BY p.turn, p.id
"""
_ENDS: LiteralString = """
SELECT (SELECT f.id FROM {} f ORDER BY f.id LIMIT 1)::text, (SELECT f.id FROM {} f ORDER BY f.id DESC LIMIT 1)::text
"""


async def count(database: Database, day: Day) -> list[OrgDay]:
    """Returns the orgs that have jobs of this day, in the order of their names, without orgs that are being erased.
    Reads the whole day."""
    rows = await slow_steps.run(database, _for_day(_COUNT, day), {})
    # Sort in Python, which orders texts by code points, and so by their UTF-8 bytes. The collation of the database may
    # have another order.
    return sorted(OrgDay(OrgId(org), org_id, jobs) for org, org_id, jobs in rows)


async def ends(database: Database, day: Day) -> tuple[JobId | None, JobId | None]:
    """Returns the least and the greatest id of the day, or None for both if the day is empty."""
    rows = await database.run(_for_day(_ENDS, day), {})
    first, last = rows[0]
    return first, last


async def pages(database: Database, day: Day, orgs: Sequence[OrgDay]) -> AsyncGenerator[Columns]:
    """Yields the day's jobs of these orgs as columns, in the given order of the orgs. Reads pages until it has yielded
    at least as many jobs as `count` found, or until there are no more jobs. If jobs have appeared or disappeared since
    the count, the number of yielded jobs differs from the count. So the caller must compare the two numbers. Raises
    ShardUnavailable.

    While the caller works on a page, the next page is already being read. Close the generator if you do not exhaust
    it."""
    statement = _for_day(_PAGE, day)
    for group in _grouped(orgs):
        names = {"org_ids": [org.org_id for org in group], "orgs": [org.org for org in group], "nil": _NIL}

        def read(names: Mapping[str, object] = names, **after: object) -> asyncio.Task[list[Any]]:
            bounds = {"rows": _ROWS, "bytes_max": _BYTES}
            return asyncio.create_task(database.run(statement, {**names, **bounds, **after}))

        remaining = sum(org.jobs for org in group)
        reading = read(turn=1, after=_NIL)
        try:
            while remaining > 0:
                rows = await reading
                if not rows:
                    break
                remaining -= len(rows)
                if remaining > 0:
                    reading = read(turn=rows[-1][-1], after=rows[-1][_ID])
                # Turn the rows into columns, and leave out `turn`. Making an object for each job would cost as much as
                # all other work together.
                columns = list(zip(*rows, strict=True))[:-1]
                del rows
                yield columns
        finally:
            reading.cancel()
            await asyncio.wait({reading})


def _grouped(orgs: Sequence[OrgDay]) -> Iterator[list[OrgDay]]:
    """Puts orgs together as long as their jobs fit into one page: there may be thousands of orgs with a few jobs
    each."""
    group: list[OrgDay] = []
    jobs = 0
    for org in orgs:
        if group and jobs + org.jobs > _ROWS:
            yield group
            group, jobs = [], 0
        group.append(org)
        jobs += org.jobs
    if group:
        yield group


def _for_day(statement: LiteralString, day: Day) -> bytes:
    # Name the partition itself. If the statement named windrow.cold, the planner would plan for every cold day.
    return sql.SQL(statement).format(*[table(day.name)] * statement.count("{}"), columns=_COLUMNS).as_bytes(None)
