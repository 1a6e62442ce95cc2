"""How finished jobs age: a day that is over turns cold as it is, a cold day whose time has come is dropped whole, and
what else is past its time goes in small steps (docs/decisions/0024-whole-days-turn-cold.md).

Each step is one transaction, and says by itself what is left: nothing relies on there being one archiver, nor on a pass
that came to its end. No lock that enqueues or acks wait for is waited for any longer than they may wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import LiteralString, NamedTuple

import psycopg
from psycopg import sql

from shard import policies, statements
from shard.connection import Connection
from shard.database import Database
from shard.partitions import bounds, finish, table, within
from shard.vocabulary import OrgId

# Who comes after one that waits for an exclusive lock waits too. With a lesser one only those do who write to a day
# that is over; and an autovacuum gives way to who has waited for deadlock_timeout, which is a second.
_LOCK_WAIT, _LESSER_LOCK_WAIT = "50ms", "2s"
_WAIT: LiteralString = "SELECT set_config('lock_timeout', %s, true)"
_TRIES = 10
_PAUSE_S = 0.2
_ROWS = 2_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Aged:
    """What became of one partition."""

    partition: str
    jobs: int
    bytes: int
    # For how long enqueues and acks may have waited for it.
    locked_s: float


class InUse(Exception):
    """Somebody reads or writes the partition all the time; the message says which, and who."""


class NotExported(Exception):
    """A cold day has jobs that its export does not have; the message says of whom."""


class Day(NamedTuple):
    """A partition of finished or of cold jobs: one UTC day's, of one retention. In the order of find_days.sql's
    columns."""

    name: str
    # Days that they are kept for.
    retention: int
    # YYYY-MM-DD, and the day after.
    first: str
    past: str
    # There is a cold partition of that day: of a finished one's, because the clock went back.
    cold_already: bool
    # Whether its constraint is known to hold, which says what its bounds say; None: it has none.
    proved: bool | None
    # Its ids may still be those of repeated enqueues.
    repeatable: bool

    @property
    def cold_name(self) -> str:
        return "cold" + self.name.removeprefix("finished")


async def days_over(database: Database) -> list[Day]:
    """The days that may turn cold, the oldest first."""
    return await _days(database, "finished")


async def days_past(database: Database) -> list[Day]:
    """The cold days that have been kept for their time, the oldest first."""
    return await _days(database, "cold")


async def _days(database: Database, kind: str) -> list[Day]:
    return list(map(Day._make, await database.run(statements.FIND_DAYS, {"kind": kind})))


async def turn_cold(database: Database, day: Day) -> Aged:
    """Takes a day out of the finished jobs and into the cold ones; its rows stay where they are. Drops it if there are
    none. Raises InUse, ShardUnavailable."""
    if not day.cold_already:
        await _prepare(database, day)
    async with _transaction(database) as connection:
        # Whoever still writes there has to end, and nobody is to begin.
        await _lock(connection, "SHARE ROW EXCLUSIVE", day.name)
        jobs, size = await _enter_books(connection, day), await _size(connection, day.name)
        await connection.execute(statements.RAISE_COLD_UNTIL, {"past": day.past})
        if day.cold_already:
            await _execute(connection, "INSERT INTO windrow.cold SELECT * FROM {}", day.name)
        since_s = await _exclude(connection, day.name, f"finished_{day.retention}")
        if jobs and not day.cold_already:
            await _reattach(connection, day)
        else:
            await _execute(connection, "DROP TABLE {}", day.name)
    return Aged(partition=day.name, jobs=jobs, bytes=size, locked_s=time.monotonic() - since_s)


async def drop(database: Database, day: Day, *, exported: Mapping[OrgId, int] | None = None) -> Aged:
    """Drops a cold day, but for the jobs of orgs under legal hold: those are set aside. Ids by which enqueues may be
    repeated stay known (I3). `exported`: how many jobs each org has in the export that goes before; None: there is none
    to go by. Raises InUse, NotExported, ShardUnavailable."""
    for _ in range(_TRIES):
        async with _transaction(database) as connection:
            if exported is not None:
                await _compare(connection, day, exported)
            # Their rows move, for as long as that takes, before anybody is kept waiting.
            await connection.run(statements.SET_ASIDE_HELD, _of(day))
            await connection.run(statements.FORGET_EMPTY_DAYS, {})
        async with _transaction(database, dropping=True) as connection:
            # Nobody is to join the day from here on.
            await _lock(connection, "SHARE ROW EXCLUSIVE", day.name)
            if await connection.run(statements.FIND_HELD, _of(day)):
                # Held since.
                continue
            if day.repeatable:
                await _keep_ids(connection, day)
            size = await _size(connection, day.name)
            since_s = await _exclude(connection, day.name, f"cold_{day.retention}")
            if exported is not None:
                await _compare(connection, day, exported)
            await _execute(connection, "DROP TABLE {}", day.name)
            ((jobs,),) = await connection.run(statements.STRIKE_ARCHIVED, _of(day))
        return Aged(partition=day.name, jobs=jobs, bytes=size, locked_s=time.monotonic() - since_s)
    raise InUse(f"{day.name}: its books have jobs of orgs under legal hold that it does not have: see windrow check")


async def drop_past_ids(database: Database) -> None:
    """Forgets ids that no enqueue may name any more. Raises InUse, ShardUnavailable."""
    for (name,) in await database.run(statements.FIND_PAST_IDS, {}):
        async with _transaction(database) as connection:
            await _exclude(connection, name, "past_id")
            await _execute(connection, "DROP TABLE {}", name)


async def expire_dedup(database: Database) -> int:
    """Forgets some dedup keys whose windows are over. Answers how many; 0: none are left."""
    return await _some(database, statements.EXPIRE_DEDUP)


async def expire_waiting(database: Database) -> int:
    """Cancels some jobs past their expires_at that nobody holds and no claim has come across. Answers how many."""
    return await _some(database, statements.EXPIRE_WAITING)


async def retire_dead(database: Database, *, days: int) -> int:
    """Cancels some jobs that have been dead for so long. Answers how many."""
    return await _some(database, statements.RETIRE_DEAD, days=days)


async def expire_released(database: Database) -> int:
    """Drops some jobs that were set aside for a legal hold, of orgs that have been released. Answers how many."""
    async with _transaction(database, dropping=True) as connection:
        ((jobs,),) = await connection.run(statements.EXPIRE_RELEASED, {"rows": _ROWS})
        await connection.run(statements.FORGET_EMPTY_DAYS, {})
    return int(jobs)


def _of(day: Day) -> dict[str, object]:
    return {"retention": day.retention, "day": day.first, "past": day.past}


async def _some(database: Database, statement: statements.Statement, **parameters: object) -> int:
    rows = await finish(database, statement, {"rows": _ROWS, **parameters})
    return int(rows[0][0])


async def _prepare(database: Database, day: Day) -> None:
    """What takes its time and is in nobody's way: an index by org, the proof that no row need be read to move the day,
    and statistics, without which the planner takes a cold day for an empty one."""
    async with _transaction(database) as connection:
        await _lock(connection, "SHARE ROW EXCLUSIVE", day.name)
        if day.proved is None:
            # Made by a release that gave partitions no constraint.
            await _exclude(connection, day.name, f"finished_{day.retention}")
            await connection.execute(within(day.name, day.retention, day.first, day.past))
    async with _transaction(database) as connection:
        await _lock(connection, "SHARE ROW EXCLUSIVE", day.name)
        if not day.proved:
            await _execute(connection, "ALTER TABLE {} VALIDATE CONSTRAINT of_its_day", day.name)
        await connection.execute(
            sql.SQL("CREATE INDEX IF NOT EXISTS {} ON {} ((queue_id & 4294967295), id)").format(
                sql.Identifier(f"{day.cold_name}_org"), table(day.name)
            )
        )
        await _execute(connection, "ANALYZE {}", day.name)


async def _enter_books(connection: Connection, day: Day) -> int:
    """Counts a day's jobs by org. Answers how many there are."""
    cursor = await connection.execute(
        sql.SQL(
            """
            WITH counted AS (
                SELECT (f.queue_id & 4294967295)::integer AS org_id, count(*) AS jobs FROM {} f GROUP BY 1
            ), entered AS (
                INSERT INTO windrow.archived AS a (retention, day, org_id, jobs)
                SELECT {}, {}::date, c.org_id, c.jobs FROM counted c
                ON CONFLICT (retention, day, org_id) DO UPDATE SET jobs = a.jobs + excluded.jobs
            )
            SELECT coalesce(sum(c.jobs), 0)::bigint FROM counted c
            """
        ).format(table(day.name), day.retention, day.first)
    )
    (jobs,) = (await cursor.fetchall())[0]
    return int(jobs)


async def _reattach(connection: Connection, day: Day) -> None:
    # At once: each answer that is waited for is waited for by enqueues and acks.
    await connection.execute(
        sql.SQL(
            "ALTER TABLE {finished} DETACH PARTITION {day}; ALTER TABLE {day} RENAME TO {cold_name}; "
            "ALTER TABLE {cold} ATTACH PARTITION {cold_day} {bounds}"
        ).format(
            finished=table(f"finished_{day.retention}"),
            day=table(day.name),
            cold_name=sql.Identifier(day.cold_name),
            cold=table(f"cold_{day.retention}"),
            cold_day=table(day.cold_name),
            bounds=bounds(day.first, day.past),
        ),
        prepare=False,
    )


async def _compare(connection: Connection, day: Day, exported: Mapping[OrgId, int]) -> None:
    """By the books, which are changed with the rows: nobody waits for a count. An org that has fewer than were exported
    loses nothing. Raises NotExported."""
    for org, jobs in await connection.run(statements.READ_ARCHIVED, _of(day)):
        if jobs > exported.get(org, 0):
            raise NotExported(f"{day.name} has {jobs:,} job(s) of org {org!r}, and its export {exported.get(org, 0):,}")


async def _keep_ids(connection: Connection, day: Day) -> None:
    name = f"past_id_{day.first.replace('-', '')}"
    cursor = await connection.execute("SELECT to_regclass(%s) IS NULL", [f"windrow.{name}"])
    if (await cursor.fetchall())[0][0]:
        await _execute(connection, "CREATE TABLE {} (LIKE windrow.past_id INCLUDING ALL)", name)
        await connection.execute(
            sql.SQL("ALTER TABLE windrow.past_id ATTACH PARTITION {} FOR VALUES IN ({})").format(
                table(name), sql.Literal(day.first)
            )
        )
    await connection.execute(
        sql.SQL("INSERT INTO {} (day, id, org_id) SELECT {}, c.id, c.queue_id & 4294967295 FROM {} c").format(
            table(name), sql.Literal(day.first), table(day.name)
        )
    )


@contextlib.asynccontextmanager
async def _transaction(database: Database, *, dropping: bool = False) -> AsyncGenerator[Connection]:
    """`dropping`: no org is put under legal hold meanwhile."""
    async with database.transaction() as connection:
        if dropping:
            await policies.wait_for_holds(connection)
        await connection.execute(
            # To count and to index a large day takes its time, and is to take no more than one core of those who work.
            "SELECT set_config('statement_timeout', '1h', true), set_config('lock_timeout', %s, true), "
            "set_config('max_parallel_maintenance_workers', '0', true), "
            "set_config('max_parallel_workers_per_gather', '0', true)",
            [_LOCK_WAIT],
        )
        yield connection


async def _exclude(connection: Connection, name: str, parent: str) -> float:
    """Keeps all others from a partition until the transaction ends; answers since when, by time.monotonic. Raises
    InUse."""
    # The parent first, as statements do that go through it.
    await _lock(connection, "ACCESS EXCLUSIVE", parent, name)
    return time.monotonic()


async def _lock(connection: Connection, mode: LiteralString, *names: str) -> None:
    """Raises InUse when others hold one of them all the time."""
    lock = sql.SQL("LOCK TABLE ONLY {} IN {} MODE").format(sql.SQL(", ONLY ").join(map(table, names)), sql.SQL(mode))
    for tries_left in reversed(range(_TRIES)):
        try:
            async with connection.transaction():
                if mode == "ACCESS EXCLUSIVE":
                    await connection.execute(lock)
                else:
                    await connection.execute(_WAIT, [_LESSER_LOCK_WAIT])
                    await connection.execute(lock)
                    await connection.execute(_WAIT, [_LOCK_WAIT])
                return
        except psycopg.errors.LockNotAvailable as error:
            if not tries_left:
                cursor = await connection.execute(
                    statements.FIND_USERS, {"tables": [f"windrow.{name}" for name in names]}
                )
                users = ", ".join(f"process {pid} ({name})" for pid, name in await cursor.fetchall())
                raise InUse(f"{names[-1]} is in use by {users or 'some that come and go'}") from error
            await asyncio.sleep(_PAUSE_S)


async def _execute(connection: Connection, statement: LiteralString, *names: str) -> None:
    await connection.execute(sql.SQL(statement).format(*map(table, names)))


async def _size(connection: Connection, name: str) -> int:
    cursor = await connection.execute("SELECT pg_total_relation_size(%s::regclass)", [f"windrow.{name}"])
    (size,) = (await cursor.fetchall())[0]
    return int(size)
