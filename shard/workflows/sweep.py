"""Finds workflows of one shard that have something left to take in, and forgets old ones.

The transaction that ends a job also takes its end in (migrations/0019_workflows.sql). So there are few such workflows:
after a job was locked in the moment when it was to be released, and after moves (I7).
"""

from __future__ import annotations

from shard.placement import statements as placement_statements
from shard.postgres import arrays, partitions
from shard.postgres.pool import Database
from shard.queue.store import Store
from shard.workflow import KEPT_DAYS
from shard.workflows import statements

_ROWS = 1_000
# Workflows in one statement, which holds their locks.
_WORKFLOWS_AT_ONCE = 100
_FORGOTTEN_AT_ONCE = 100


class WorkflowSweep:
    """All methods may raise ShardUnavailable."""

    def __init__(self, database: Database, store: Store) -> None:
        self._database = database
        self._store = store

    async def sweep(self) -> None:
        """Takes in what up to some hundred workflows have left."""
        found = await self._database.run(statements.FIND_UNFOLDED, {"rows": _ROWS})
        for at in range(0, len(found), _WORKFLOWS_AT_ONCE):
            part = found[at : at + _WORKFLOWS_AT_ONCE]
            parameters = {
                "org_ids": arrays.numbers(org for org, _ in part),
                "ids": arrays.plain(id_ for _, id_ in part),
            }
            ((released,),) = await partitions.finish(self._database, placement_statements.FOLD_WORKFLOWS, parameters)
            if released:
                self._store.jobs_stored(set(released))

    async def forget(self) -> None:
        """Forgets the workflows that ended long ago."""
        parameters = {"days": KEPT_DAYS, "rows": _FORGOTTEN_AT_ONCE}
        while (await self._database.run(statements.FORGET_WORKFLOWS, parameters))[0][0] == _FORGOTTEN_AT_ONCE:
            pass
