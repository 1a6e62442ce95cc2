"""Gives an org as many queues as it may have, or almost as many."""

from __future__ import annotations

from shard.postgres.pool import Database
from shard.queue.queue_ids import QUEUES_MAX
from shard.vocabulary import OrgId

_FILL = (
    b"""
    INSERT INTO windrow.queue_name (queue)
    SELECT 'full-' || n FROM generate_series(1, %(count)s) n
    ON CONFLICT DO NOTHING
    """,
    b"""
    INSERT INTO windrow.queue (name_id, org_id, org, queue, slot)
    SELECT n.name_id, o.org_id, o.org, n.queue, o.slot
    FROM windrow.org o
    JOIN windrow.queue_name n ON n.queue LIKE 'full-%%'
    WHERE o.org = %(org)s AND NOT EXISTS (SELECT FROM windrow.queue q WHERE q.org = o.org AND q.queue = n.queue)
    LIMIT %(count)s - (SELECT count(*) FROM windrow.queue WHERE org = %(org)s)
    """,
)


async def fill_queues(database: Database, org: OrgId, count: int = QUEUES_MAX) -> None:
    """Adds queues to an org of this shard until it has this many. The org must exist already."""
    for statement in _FILL:
        await database.run(statement, {"org": org, "count": count})
