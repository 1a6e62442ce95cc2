"""Finds groups that have a free slot and a job that waits for it, and gives the slots to the jobs.

Triggers fill a slot in the transaction that frees it (migrations/0014_groups.sql). So groups with a free slot and a
waiting job are rare. They exist after the queue's group_concurrency was raised, and after a move. They also exist if a
transaction has skipped the first waiting job because another transaction had locked it, and that other transaction was
then rolled back.
"""

from __future__ import annotations

from collections.abc import Sequence

from shard.postgres import arrays
from shard.postgres.pool import Database
from shard.queue import statements
from shard.vocabulary import QueueId

# Upper bound for the groups in one statement. Each group costs two index lookups.
_GROUPS_MAX = 1_000


class Groups:
    """The groups of one shard."""

    def __init__(self, database: Database) -> None:
        self._database = database
        # The last group that the latest sweep reached. None: the sweep reached all groups.
        self._reached: tuple[QueueId, str] | None = None

    async def sweep(self, queues: Sequence[QueueId]) -> set[QueueId]:
        """Fills the free slots of up to 1,000 groups of these queues. The next sweep begins after the last of these
        groups. Returns the queues in which this sweep has filled slots. Raises ShardUnavailable."""
        ordered = sorted(queues)
        after = ""
        if self._reached is not None:
            queue, after = self._reached
            behind = [one for one in ordered if one < queue]
            ordered = [one for one in ordered if one >= queue] + behind
            if not ordered or ordered[0] != queue:
                after = ""
        self._reached, filled = await self._fill(ordered, after)
        return filled

    async def fill_queue(self, queue: QueueId) -> None:
        """Fills the free slots of all groups of a queue. Raises ShardUnavailable."""
        reached: tuple[QueueId, str] | None = (queue, "")
        while reached is not None:
            reached, _ = await self._fill([queue], reached[1])

    async def _fill(self, queues: Sequence[QueueId], after: str) -> tuple[tuple[QueueId, str] | None, set[QueueId]]:
        """Fills the free slots of up to _GROUPS_MAX groups. Returns the last of these groups, or None if no more groups
        follow. Also returns the queues of the groups that had a free slot."""
        if not queues:
            return None, set()
        rows: list[tuple[QueueId, str, bool]] = await self._database.run(
            statements.FIND_WAITING_GROUPS,
            {"queue_ids": arrays.numbers(queues), "after": after, "groups_max": _GROUPS_MAX},
        )
        unfilled = [(queue, group) for queue, group, has_free in rows if has_free]
        if unfilled:
            await self._database.run(
                statements.FILL_GROUPS,
                {
                    "queue_ids": arrays.numbers(queue for queue, _ in unfilled),
                    "groups": arrays.texts([group for _, group in unfilled]),
                },
            )
        reached = rows[-1][:2] if len(rows) == _GROUPS_MAX else None
        return reached, {queue for queue, _ in unfilled}
