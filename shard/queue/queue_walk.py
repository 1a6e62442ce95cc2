"""Finds which orgs have jobs in the queues of one name on one shard, by steps in the ready index. The queues of one
name are a range of the index, because a queue's id begins with the id of its name
(docs/decisions/0010-queue-numbers-are-name-and-org.md)."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from shard.postgres import arrays
from shard.postgres.pool import Database
from shard.queue import statements
from shard.queue.queue_ids import QueueIds
from shard.vocabulary import Micros, OrgId, QueueId, QueueName

# How many low bits of a queue's id hold the id of its org. The bits above them hold the id of its name.
_ORG_BITS = 32


class Found(NamedTuple):
    """A queue that has live jobs. `first_us`: the time, by the shard's clock, at which the first of these jobs became
    or becomes visible. None: the queue gives no jobs."""

    queue_id: QueueId
    org: OrgId
    first_us: Micros | None


class Walked(NamedTuple):
    """A part of a walk. `after`: the id after which the next part begins. None: this was the last part."""

    now: Micros
    found: list[Found]
    after: QueueId | None


class QueueWalk:
    """Walks over the queues of one shard. `names` remembers the queues that a walk finds. All methods raise
    ShardUnavailable."""

    def __init__(self, database: Database, names: QueueIds) -> None:
        self._database = database
        self._names = names

    async def name_ids(self, queues: Collection[QueueName]) -> dict[QueueName, int]:
        """Returns the ids of these queue names. Leaves out names that the shard does not have."""
        rows = await self._database.run(statements.FIND_NAME_IDS, {"queues": arrays.names(queues)})
        return dict(rows)

    async def walk(self, queue: QueueName, name_id: int, *, after: QueueId | None, queues_max: int) -> Walked:
        """Returns the next queues of this name that have live jobs. The walk continues after the queue with the id
        `after`. If `after` is None, the walk begins with the first queue."""
        last = (name_id + 1 << _ORG_BITS) - 1
        parameters = {
            "first": (name_id << _ORG_BITS) if after is None else after + 1,
            "last": last,
            "queues": queues_max,
        }
        rows = await self._database.run(statements.WALK_QUEUES, parameters)
        found: list[Found] = []
        for _, queue_id, org, gives_jobs, first_us in rows:
            self._names.remember(queue_id, org, queue)
            found.append(Found(queue_id, org, first_us if gives_jobs else None))
        now = rows[0][0] if rows else Micros(0)
        return Walked(now, found, QueueId(rows[-1][1]) if len(rows) == queues_max else None)


def name_id_of(queue_id: QueueId) -> int:
    """Returns the id of a queue's name."""
    return queue_id >> _ORG_BITS


def org_number(queue_id: QueueId) -> int:
    """Returns the id of the org that the queue belongs to."""
    return queue_id & (1 << _ORG_BITS) - 1
