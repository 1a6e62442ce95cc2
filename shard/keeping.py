"""For how long what has finished already is kept: as its queue says now, instead of as it said then.

Jobs go from one retention's partition to another's, a day a transaction. Nobody who enqueues, acks or claims waits.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date, timedelta

from psycopg import sql

from shard import arrays, partitions, statements
from shard.connection import Connection
from shard.database import Database
from shard.partitions import bounds, table
from shard.vocabulary import OrgId, QueueName


async def read(database: Database, org: OrgId) -> dict[QueueName, int]:
    """For how many days each of the org's queues keeps what it finishes from now on, by this shard's word."""
    return dict(await database.run(statements.READ_KEPT, {"org": org}))


async def apply(database: Database, org: OrgId, kept: Mapping[QueueName, int]) -> int:
    """Has all that these queues have finished on this shard be kept for so many days, from when it finished. Answers
    for how many jobs that is a change; done again, it goes on. Raises ShardUnavailable."""
    told = {"org": org, "queues": arrays.names(kept), "days": arrays.numbers(kept.values())}
    jobs = 0
    for kind, statement in (("finished", statements.KEEP_FINISHED), ("cold", statements.KEEP_COLD)):
        for retention, day in await database.run(statements.FIND_KEPT_OTHERWISE, {**told, "kind": kind}):
            async with database.transaction() as connection:
                for days in sorted({*kept.values()} - {retention}):
                    await _make_day(connection, kind, days, day)
                ((some,),) = await connection.run(statement, {**told, "retention": retention, "day": day})
                await connection.run(statements.FORGET_EMPTY_DAYS, {})
            jobs += some
    return jobs


async def _make_day(connection: Connection, kind: str, retention: int, first: str) -> None:
    name = f"{kind}_{retention}_{first.replace('-', '')}"
    ((there,),) = await connection.run(b"SELECT to_regclass(%(name)s) IS NOT NULL", {"name": f"windrow.{name}"})
    if there:
        return
    past = str(date.fromisoformat(first) + timedelta(days=1))
    if kind == "finished":
        await partitions.make(connection, name, retention, first, past)
        return
    await connection.execute(
        sql.SQL("CREATE TABLE {} (LIKE windrow.cold INCLUDING ALL); ALTER TABLE {} ATTACH PARTITION {} {}").format(
            table(name), table(f"cold_{retention}"), table(name), bounds(first, past)
        ),
        prepare=False,
    )
