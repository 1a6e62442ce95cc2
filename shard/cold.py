"""A cold day, read from beginning to end for those who keep it elsewhere: org by org in the order of their names, and
by id.

In pages, each a statement of its own. One cursor for all of it would hold a snapshot for as long as the whole takes,
and no dead row of the hot tables could be removed meanwhile. Rows of a cold day do not change; if some come or go all
the same, the counts tell. What is read holds no lock that an enqueue or an ack waits for.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import LiteralString, NamedTuple

from psycopg import sql

from shard.archiving import Day
from shard.database import Database
from shard.partitions import table
from shard.vocabulary import JobId, Micros, OrgId, QueueName

# Of one page: it ends with the job that fills so much, and the largest job has 2 MiB.
_ROWS = 5_000
_BYTES = 8 * 1024 * 1024
_NIL = "00000000-0000-0000-0000-000000000000"


class OrgDay(NamedTuple):
    """What an org has of a day."""

    org: OrgId
    org_id: int
    jobs: int


class ColdJob(NamedTuple):
    """A row of windrow.cold, its org and queue by their names; in the order of _PAGE's columns."""

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


_COUNT: LiteralString = """
SELECT coalesce(o.org, 'unknown org ' || c.org_id) AS org, c.org_id, c.jobs
FROM (SELECT f.queue_id & 4294967295 AS org_id, count(*) AS jobs FROM {} f GROUP BY 1) c
LEFT JOIN windrow.org o ON o.org_id = c.org_id
WHERE o.slot IS DISTINCT FROM -1
"""
# `turn` is an org's place in `org_ids`. Each org is a walk along the index by org and id, from `after` on.
_PAGE: LiteralString = """
SELECT
    p.org, q.queue, p.id::text, p.kind, p.state, p.priority, p.attempt, p.max_attempts, p.enqueued_at, p.run_at,
    p.leased_at, p.finished_at, p.expires_at, p.lease, p.worker, p.reason, p.dedup_key, p.trace, p.payload, p.result,
    p.attributes::text, p.retry::text, p.history::text, p.turn
FROM (
    SELECT
        l.*,
        sum(
            octet_length(l.payload) + coalesce(octet_length(l.result), 0) + coalesce(pg_column_size(l.attributes), 0)
            + coalesce(octet_length(l.history::text), 0) + coalesce(octet_length(l.reason), 0) + 1024
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
    """The orgs that have jobs of this day, in the order of their names; not those that are being erased. Reads all of
    it."""
    rows = await database.run(_about(_COUNT, day), {})
    # As bytes are ordered, which is how Python orders text.
    return sorted(OrgDay(OrgId(org), org_id, jobs) for org, org_id, jobs in rows)


async def ends(database: Database, day: Day) -> tuple[JobId | None, JobId | None]:
    """The least and the greatest id of the day; None: it is empty."""
    rows = await database.run(_about(_ENDS, day), {})
    first, last = rows[0]
    return first, last


async def pages(database: Database, day: Day, orgs: Sequence[OrgDay]) -> AsyncGenerator[list[ColdJob]]:
    """The jobs of these orgs (in this order) and of this day; of each as many as it is said to have. Fewer come where
    there are fewer: whoever compares finds out. Raises ShardUnavailable."""
    statement = _about(_PAGE, day)
    for group in _grouped(orgs):
        turn, after, left = 1, _NIL, sum(one.jobs for one in group)
        while left > 0:
            rows = await database.run(
                statement,
                {
                    "org_ids": [one.org_id for one in group],
                    "orgs": [one.org for one in group],
                    "turn": turn,
                    "after": after,
                    "nil": _NIL,
                    "rows": _ROWS,
                    "bytes_max": _BYTES,
                },
            )
            if not rows:
                break
            page = [ColdJob._make(row[:-1]) for row in rows]
            yield page
            turn, after, left = rows[-1][-1], page[-1].id, left - len(page)


def _grouped(orgs: Sequence[OrgDay]) -> Iterator[list[OrgDay]]:
    """Orgs whose jobs fit into one page are read together: there may be thousands that have a few each."""
    group: list[OrgDay] = []
    jobs = 0
    for one in orgs:
        if group and jobs + one.jobs > _ROWS:
            yield group
            group, jobs = [], 0
        group.append(one)
        jobs += one.jobs
    if group:
        yield group


def _about(statement: LiteralString, day: Day) -> bytes:
    # By its own name: through windrow.cold every cold day there is would be planned for.
    return sql.SQL(statement).format(*[table(day.name)] * statement.count("{}")).as_bytes(None)
