"""Changes the retention of jobs that have already finished. These jobs get the present retention of their queue,
instead of the retention that applied when they finished.

Jobs move from the partition of one retention to the partition of another retention, one day per transaction. Enqueues,
acks and claims do not wait.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date, timedelta

from psycopg import sql

from shard.history import slow_steps, statements
from shard.postgres import arrays, partitions
from shard.postgres import statements as postgres_statements
from shard.postgres.connection import Connection
from shard.postgres.partitions import bounds, table
from shard.postgres.pool import Database
from shard.vocabulary import OrgId, QueueName


async def read(database: Database, org: OrgId) -> dict[QueueName, int]:
    """Returns for each queue of the org the retention, in days, of jobs that finish on this shard from now on."""
    return dict(await database.run(statements.READ_KEPT, {"org": org}))


async def apply(database: Database, org: OrgId, retentions: Mapping[QueueName, int]) -> int:
    """Sets the retention of all finished jobs of these queues on this shard. `retentions`: the days, for each queue.
    Returns how many jobs had another retention before. If the call is interrupted, repeat it. Raises
    ShardUnavailable."""
    parameters = {"org": org, "queues": arrays.names(retentions), "days": arrays.numbers(retentions.values())}
    jobs = 0
    # The shard may have no partitions for these retentions yet.
    await partitions.make_retentions(database, retentions.values())
    for kind, statement in (("finished", statements.KEEP_FINISHED), ("cold", statements.KEEP_COLD)):
        for retention, day in await database.run(statements.FIND_KEPT_OTHERWISE, {**parameters, "kind": kind}):
            # Make the partitions in a transaction of their own, because all other sessions that make partitions wait
            # for this lock.
            async with database.transaction() as connection:
                await connection.execute(postgres_statements.LOCK_EXCLUSIVE, {"lock": partitions.LOCK})
                for days in sorted({*retentions.values()} - {retention}):
                    await _make_day(connection, kind, days, day)
            async with slow_steps.transaction(database) as connection:
                ((moved,),) = await connection.run(statement, {**parameters, "retention": retention, "day": day})
                await connection.run(statements.FORGET_EMPTY_DAYS, {})
            jobs += moved
    return jobs


async def _make_day(connection: Connection, kind: str, retention: int, first: str) -> None:
    name = f"{kind}_{retention}_{first.replace('-', '')}"
    ((exists,),) = await connection.run(b"SELECT to_regclass(%(name)s) IS NOT NULL", {"name": f"windrow.{name}"})
    if exists:
        return
    end = str(date.fromisoformat(first) + timedelta(days=1))
    if kind == "finished":
        await partitions.make(connection, name, retention, first, end)
        return
    await connection.execute(
        sql.SQL("CREATE TABLE {} (LIKE windrow.cold INCLUDING ALL); ALTER TABLE {} ATTACH PARTITION {} {}").format(
            table(name), table(f"cold_{retention}"), table(name), bounds(first, end)
        ),
        prepare=False,
    )
