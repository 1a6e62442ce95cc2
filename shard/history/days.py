"""Moves finished jobs out of the hot tables, and later drops them. When a day is over, its partition turns cold as a
whole. When the retention of a cold day has passed, its partition is dropped as a whole. Everything else that expires is
removed in small steps (docs/decisions/0024-whole-days-turn-cold.md).

Each step is one transaction, and begins by reading what remains to be done. So several archivers may run at the same
time, and a pass may stop at any point. A step waits for a lock only for a bounded time, because enqueues and acks may
queue behind the step.
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

from shard.history import org_policies, slow_steps, statements
from shard.postgres.connection import Connection
from shard.postgres.partitions import bounds, finish, table, within
from shard.postgres.pool import Database
from shard.postgres.sql_loader import Statement
from shard.vocabulary import OrgId

# The wait for an exclusive lock must be short, because all statements on the table queue behind the session that waits.
# The wait for a weaker lock may be longer, because only writers of a past day queue behind the session that waits. This
# wait must also exceed deadlock_timeout, which is one second: an autovacuum gives way only to a session that has waited
# for that long.
_EXCLUSIVE_LOCK_WAIT, _WEAKER_LOCK_WAIT = "50ms", "2s"
_SET_LOCK_WAIT: LiteralString = "SELECT set_config('lock_timeout', %s, true)"
_TRIES = 10
_PAUSE_S = 0.2
_ROWS = 2_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Aged:
    """What happened to one partition."""

    partition: str
    jobs: int
    bytes: int
    # For how long the partition was locked exclusively. Enqueues and acks may have waited for that time.
    locked_s: float


class InUse(Exception):
    """Other sessions use the partition all the time, another archiver has changed it, or other objects depend on it.
    The message names the partition, the objects and, if they are known, the sessions."""


class NotExported(Exception):
    """A cold day has jobs that its export lacks. The message names the org."""


class Day(NamedTuple):
    """A partition of finished or cold jobs, for one UTC day and one retention, in the order of find_days.sql's
    columns."""

    name: str
    # For how many days the jobs are kept.
    retention: int
    # The day as YYYY-MM-DD, and the day after it.
    first: str
    past: str
    # Whether this partition has finished jobs, and the day already has a partition of cold jobs as well. This happens
    # if the clock was set back.
    cold_already: bool
    # Whether the CHECK constraint that repeats the partition's bounds is validated. None: the partition has no such
    # constraint.
    proved: bool | None
    # Whether an enqueue may still repeat the ids of the day's jobs.
    repeatable: bool

    @property
    def cold_name(self) -> str:
        return "cold" + self.name.removeprefix("finished")


async def days_over(database: Database) -> list[Day]:
    """Returns the days that may turn cold, the oldest first."""
    return await _days(database, "finished")


async def days_past(database: Database) -> list[Day]:
    """Returns the cold days whose retention has passed, the oldest first."""
    return await _days(database, "cold")


async def _days(database: Database, kind: str) -> list[Day]:
    return list(map(Day._make, await database.run(statements.FIND_DAYS, {"kind": kind})))


async def count_kept(database: Database) -> tuple[int, str | None]:
    """Returns how many finished jobs the shard has, and the newest day on which a job finished, as YYYY-MM-DD."""
    ((jobs, newest),) = await database.run(statements.COUNT_KEPT, {})
    return jobs, newest


async def turn_cold(database: Database, day: Day) -> Aged:
    """Moves a day's partition from the finished jobs to the cold jobs, without copying its rows. If the day already has
    a cold partition, copies the rows there. Drops the partition if it is empty or copied. Raises InUse,
    ShardUnavailable."""
    if not day.cold_already:
        await _prepare(database, day)
    async with _transaction(database, day.name) as connection:
        # Wait until the transactions that write to the partition now have ended, and keep new writers out.
        await _lock(connection, "SHARE ROW EXCLUSIVE", day.name)
        if not day.cold_already:
            # Attaching the day to this table takes the same lock, which an ANALYZE of the table also takes.
            await _lock(connection, "SHARE UPDATE EXCLUSIVE", f"cold_{day.retention}")
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
    """Drops a cold day. Before that, moves the jobs of orgs under legal hold to the partition of held jobs. The day's
    ids stay known if an enqueue may still repeat them (invariant I3). `exported` says how many of the day's jobs
    of each org are in its export. None: the day is not compared with an export. Raises InUse, NotExported,
    ShardUnavailable."""
    for _ in range(_TRIES):
        async with _transaction(database, day.name) as connection:
            if exported is not None:
                await _compare(connection, day, exported)
            # Moving the rows may take long, so move them before this function takes a lock that others wait for.
            await connection.run(statements.SET_ASIDE_HELD, _parameters(day))
            await connection.run(statements.FORGET_EMPTY_DAYS, {})
        async with _transaction(database, day.name, dropping=True) as connection:
            # From here on, nobody can add rows.
            await _lock(connection, "SHARE ROW EXCLUSIVE", day.name)
            if await connection.run(statements.FIND_HELD, _parameters(day)):
                # Try again: an org was put under hold after the rows of the other held orgs were moved.
                continue
            if day.repeatable:
                await _keep_ids(connection, day)
            size = await _size(connection, day.name)
            since_s = await _exclude(connection, day.name, f"cold_{day.retention}")
            if exported is not None:
                await _compare(connection, day, exported)
            await _execute(connection, "DROP TABLE {}", day.name)
            ((jobs,),) = await connection.run(statements.RECORD_EXPIRED_DAY, _parameters(day))
        return Aged(partition=day.name, jobs=jobs, bytes=size, locked_s=time.monotonic() - since_s)
    raise InUse(
        f"{day.name}: its books show jobs of orgs under legal hold, but the table has none; see `windrow check`"
    )


async def drop_past_ids(database: Database) -> None:
    """Forgets ids that are so old that enqueues with them are refused. Raises InUse, ShardUnavailable."""
    for (name,) in await database.run(statements.FIND_PAST_IDS, {}):
        async with _transaction(database, name) as connection:
            await _exclude(connection, name, "past_id")
            await _execute(connection, "DROP TABLE {}", name)


async def expire_dedup(database: Database) -> int:
    """Forgets some dedup keys whose windows are over. Returns how many keys were forgotten; 0 means that there are no
    more such keys."""
    return await _run_step(database, statements.EXPIRE_DEDUP)


async def expire_waiting(database: Database) -> int:
    """Cancels some jobs whose `expires_at` has passed, which have no valid lease, and which no claim has reached.
    Returns how many jobs were cancelled."""
    return await _run_step(database, statements.EXPIRE_WAITING)


async def retire_dead(database: Database, *, days: int) -> int:
    """Cancels some jobs that have been dead for `days` days. Returns how many jobs were cancelled."""
    return await _run_step(database, statements.RETIRE_DEAD, days=days)


async def expire_released(database: Database) -> int:
    """Drops some held jobs whose orgs are not under legal hold any more. Returns how many jobs were dropped. Raises
    InUse."""
    async with _transaction(database, "cold_held", dropping=True) as connection:
        ((jobs,),) = await connection.run(statements.EXPIRE_RELEASED, {"rows": _ROWS})
        await connection.run(statements.FORGET_EMPTY_DAYS, {})
    return int(jobs)


def _parameters(day: Day) -> dict[str, object]:
    return {"retention": day.retention, "day": day.first, "past": day.past}


async def _run_step(database: Database, statement: Statement, **parameters: object) -> int:
    rows = await finish(database, statement, {"rows": _ROWS, **parameters})
    return int(rows[0][0])


async def _prepare(database: Database, day: Day) -> None:
    """Does the slow steps before the day is moved. Only writers of this past day wait for these steps. Creates an index
    by org. Validates the CHECK constraint, so that Postgres need not scan the partition when it is attached. Collects
    statistics, because without them the planner assumes that a cold day is empty."""
    async with _transaction(database, day.name) as connection:
        await _lock(connection, "SHARE ROW EXCLUSIVE", day.name)
        if day.proved is None:
            # An earlier release created the partition, without the constraint.
            await _exclude(connection, day.name, f"finished_{day.retention}")
            await connection.execute(within(day.name, day.retention, day.first, day.past))
    async with _transaction(database, day.name) as connection:
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
    """Records a day's jobs by org in the books of cold days. Returns the number of jobs."""
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
    """Turns the day cold: detaches its partition from the finished jobs, and attaches it to the cold jobs."""
    # Send all statements together. Otherwise enqueues and acks, which wait for the locks, would also wait for more
    # round trips.
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
    """Compares the day with its export. Reads from the books how many jobs the day has. The books change in the same
    transactions as the rows, so no rows have to be counted while other sessions wait. It is no error if an org has
    fewer jobs than were exported, because then the drop loses nothing. Raises NotExported."""
    for org, jobs in await connection.run(statements.READ_ARCHIVED, _parameters(day)):
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
async def _transaction(database: Database, name: str, *, dropping: bool = False) -> AsyncGenerator[Connection]:
    """Opens a transaction for slow steps on the partition `name`. With `dropping`, no org is put under legal hold until
    the transaction ends. Raises InUse."""
    async with slow_steps.transaction(database) as connection:
        if dropping:
            await org_policies.lock_holds(connection)
        await connection.execute(
            # Counting and indexing a large day takes long, and should use no more than one core, so that the queue can
            # work meanwhile.
            "SELECT set_config('lock_timeout', %s, true), "
            "set_config('max_parallel_maintenance_workers', '0', true), "
            "set_config('max_parallel_workers_per_gather', '0', true)",
            [_EXCLUSIVE_LOCK_WAIT],
        )
        try:
            yield connection
        except psycopg.errors.LockNotAvailable as error:
            # One partition that is locked must not end the whole pass.
            raise InUse(f"{name} is in use: another session has locked a table that this step changes") from error
        except (psycopg.errors.UndefinedTable, psycopg.errors.DuplicateTable) as error:
            raise InUse(f"{name} was changed by another archiver meanwhile") from error
        except psycopg.errors.DependentObjectsStillExist as error:
            detail = " ".join((error.diag.message_detail or str(error)).split())
            raise InUse(f"{name} cannot be dropped; drop first what depends on it: {detail}") from error


async def _exclude(connection: Connection, name: str, parent: str) -> float:
    """Locks a partition and its parent exclusively until the transaction ends. Returns the time at which both were
    locked, by time.monotonic(). Raises InUse."""
    # Lock the parent first, because statements that use the parent lock it first, too.
    await _lock(connection, "ACCESS EXCLUSIVE", parent, name)
    return time.monotonic()


async def _lock(connection: Connection, mode: LiteralString, *names: str) -> None:
    """Locks these tables until the transaction ends. Raises InUse if other sessions keep one of them locked."""
    lock = sql.SQL("LOCK TABLE ONLY {} IN {} MODE").format(sql.SQL(", ONLY ").join(map(table, names)), sql.SQL(mode))
    for tries_left in reversed(range(_TRIES)):
        try:
            async with connection.transaction():
                if mode == "ACCESS EXCLUSIVE":
                    await connection.execute(lock)
                else:
                    await connection.execute(_SET_LOCK_WAIT, [_WEAKER_LOCK_WAIT])
                    await connection.execute(lock)
                    await connection.execute(_SET_LOCK_WAIT, [_EXCLUSIVE_LOCK_WAIT])
                return
        except psycopg.errors.LockNotAvailable as error:
            if not tries_left:
                cursor = await connection.execute(
                    statements.FIND_USERS, {"tables": [f"windrow.{name}" for name in names]}
                )
                users = ", ".join(f"process {pid} ({name})" for pid, name in await cursor.fetchall())
                raise InUse(f"{names[-1]} is in use by {users or 'sessions that come and go'}") from error
            await asyncio.sleep(_PAUSE_S)


async def _execute(connection: Connection, statement: LiteralString, *names: str) -> None:
    await connection.execute(sql.SQL(statement).format(*map(table, names)))


async def _size(connection: Connection, name: str) -> int:
    cursor = await connection.execute("SELECT pg_total_relation_size(%s::regclass)", [f"windrow.{name}"])
    (size,) = (await cursor.fetchall())[0]
    return int(size)
