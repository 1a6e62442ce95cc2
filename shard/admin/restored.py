"""Reads the jobs and the configuration of a shard that lost history, as they were at the point of recovery. Routers
refuse the database of such a shard. Each function returns one page: the entries after `behind`, or the first entries if
`behind` is None. After the last page, it returns an empty page.
"""

from __future__ import annotations

from typing import NamedTuple

from shard.admin import statements
from shard.postgres.pool import Database
from shard.queue_settings import QueueSettings
from shard.vocabulary import JobId, OrgId, QueueName

ROWS_MAX = 1000
_FIRST_ID = JobId("00000000-0000-0000-0000-000000000000")


class RestoredJob(NamedTuple):
    """An unfinished job, in the order of scan_unfinished.sql's columns."""

    id: JobId
    # None: the org is being erased.
    org: OrgId | None
    queue: QueueName
    state: str


class RestoredQueue(NamedTuple):
    org: OrgId
    queue: QueueName
    settings: QueueSettings


class RestoredQuarantine(NamedTuple):
    """A quarantined kind, in the order of scan_quarantines.sql's columns."""

    queue_id: int
    org: OrgId
    queue: QueueName
    kind: str


class RestoredWorkflow(NamedTuple):
    """A workflow that has not ended, in the order of scan_workflows.sql's columns."""

    number: int
    org: OrgId
    id: str
    name: str


async def jobs(shard: Database, behind: RestoredJob | None) -> list[RestoredJob]:
    parameters = {"behind": _FIRST_ID if behind is None else behind.id, "rows": ROWS_MAX}
    return list(map(RestoredJob._make, await shard.run(statements.SCAN_UNFINISHED, parameters)))


async def queues(shard: Database, behind: RestoredQueue | None) -> list[RestoredQueue]:
    org, queue = ("", "") if behind is None else (behind.org, behind.queue)
    rows = await shard.run(statements.SCAN_QUEUES, {"org": org, "queue": queue, "rows": ROWS_MAX})
    return [RestoredQueue(row[0], row[1], QueueSettings.from_row(row[2:])) for row in rows]


async def quarantines(shard: Database, behind: RestoredQuarantine | None) -> list[RestoredQuarantine]:
    queue_id, kind = (0, "") if behind is None else (behind.queue_id, behind.kind)
    rows = await shard.run(statements.SCAN_QUARANTINES, {"behind": queue_id, "kind": kind, "rows": ROWS_MAX})
    return list(map(RestoredQuarantine._make, rows))


async def workflows(shard: Database, behind: RestoredWorkflow | None) -> list[RestoredWorkflow]:
    parameters = {"behind": 0 if behind is None else behind.number, "rows": ROWS_MAX}
    return list(map(RestoredWorkflow._make, await shard.run(statements.SCAN_WORKFLOWS, parameters)))
