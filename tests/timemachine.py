"""Makes time pass for the jobs of one org: scheduled jobs become visible now. Never sets a visible_at before now(),
because the product never does (shard/queue/claim_floor.py). Waits use the database's clock."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from datetime import timedelta

import psycopg
from psycopg.conninfo import make_conninfo

from shard.postgres import partitions
from shard.postgres.pool import Database
from shard.vocabulary import JobId, OrgId

_PATIENCE_S = 30.0
# Needed by a test whose transaction has locked a table and stays idle for a while. Otherwise Postgres would end the
# session.
NO_HURRY = "SET LOCAL idle_in_transaction_session_timeout = 0"


async def end_leases(database: Database, org: OrgId) -> int:
    """Makes every live lease expire. Returns the number of leases."""
    rows = await database.run(
        b"""
        UPDATE windrow.job j SET visible_at = now() FROM windrow.queue q
        WHERE q.queue_id = j.queue_id AND q.org = %(org)s AND j.lease IS NOT NULL AND j.visible_at > now()
        RETURNING j.id
        """,
        {"org": org},
    )
    return len(rows)


async def make_due(database: Database, org: OrgId) -> int:
    """Makes every scheduled job due. Returns the number of jobs."""
    rows = await database.run(
        b"""
        UPDATE windrow.job j
        SET
            visible_at = now(), run_at = now(),
            -- The job of a node that waits for a signal expires when it becomes due.
            expires_at = CASE WHEN j.workflow_node > '' AND j.expires_at = j.run_at THEN now() ELSE j.expires_at END
        FROM windrow.queue q
        WHERE q.queue_id = j.queue_id AND q.org = %(org)s AND j.lease IS NULL AND j.visible_at > now()
            -- A job that waits for a slot of its group is due.
            AND j.visible_at < 'infinity'
        RETURNING j.id
        """,
        {"org": org},
    )
    return len(rows)


async def end_dedup_windows(database: Database, org: OrgId) -> None:
    await database.run(
        b"""
        UPDATE windrow.dedup d SET until = now() FROM windrow.queue q
        WHERE q.queue_id = d.queue_id AND q.org = %(org)s AND d.until > now()
        """,
        {"org": org},
    )


async def reach_expiry(database: Database, org: OrgId) -> None:
    """Makes every job with an expires_at expire."""
    await database.run(
        b"""
        UPDATE windrow.job j SET expires_at = now() FROM windrow.queue q
        WHERE q.queue_id = j.queue_id AND q.org = %(org)s AND j.expires_at > now()
        """,
        {"org": org},
    )


async def make_day(database: Database, *, retention: int, before: str, days: int) -> None:
    """Creates the partition for the finished jobs of one UTC day: the day that is `days` days before `before`
    (YYYY-MM-DD; the default is today)."""
    rows = await database.run(
        b"""
        SELECT 'finished_' || %(retention)s || '_' || to_char(d.day, 'YYYYMMDD'), d.day::text, (d.day + 1)::text
        FROM (SELECT (%(before)s::timestamptz AT TIME ZONE 'UTC')::date - %(days)s::integer AS day) d
        """,
        {"retention": retention, "before": before, "days": days},
    )
    ((name, first, past),) = rows
    if await database.run(b"SELECT to_regclass('windrow.' || %(name)s) IS NULL", {"name": name}) == [(True,)]:
        async with database.transaction() as connection:
            await partitions.make(connection, name, retention, first, past)


async def age_finished(database: Database, org: OrgId, *, days: int) -> list[JobId]:
    """Makes finished jobs that are not cold older by this many days, as if they had been enqueued and finished earlier.
    Their ids contain the time, so the ids change. Returns the new ids, in the order of the old ones."""
    rows = await database.run(
        b"""
        SELECT DISTINCT f.retention, (f.finished_at AT TIME ZONE 'UTC')::date::text FROM windrow.finished f
        """,
        {},
    )
    for retention, day in rows:
        await make_day(database, retention=retention, before=day, days=days)
    rows = await database.run(
        b"""
        UPDATE windrow.finished f
        SET finished_at = f.finished_at - a.age, enqueued_at = f.enqueued_at - a.age, run_at = f.run_at - a.age,
            id = (lpad(to_hex(('x' || left(a.hex, 12))::bit(48)::bigint - a.ms), 12, '0') || substr(a.hex, 13))::uuid
        FROM (
            SELECT f.id, replace(f.id::text, '-', '') AS hex, %(days)s * interval '1 day' AS age,
                %(days)s::bigint * 86400000 AS ms
            FROM windrow.finished f JOIN windrow.queue q ON q.queue_id = f.queue_id
            WHERE q.org = %(org)s
        ) a
        WHERE a.id = f.id
        RETURNING f.id::text
        """,
        {"days": days, "org": org},
    )
    return sorted(JobId(name) for (name,) in rows)


async def pass_time(database: Database, seconds: float) -> None:
    """Waits until the database's clock has advanced by this much. Meant for tests of times that Postgres computes with
    `now()`."""
    await database.run(b"SELECT pg_sleep(%(seconds)s::float8)", {"seconds": str(seconds)})


async def until_blocked(database: Database, sessions: int = 1) -> None:
    """Waits until this many sessions of the database wait for a lock."""
    async with asyncio.timeout(_PATIENCE_S):
        while True:
            rows = await database.run(
                b"""
                SELECT count(*) FROM pg_stat_activity
                WHERE datname = current_database() AND wait_event_type = 'Lock'
                """,
                {},
            )
            if rows[0][0] >= sessions:
                return


@dataclass(frozen=True, slots=True, kw_only=True)
class SetClock:
    """A clock of one database that can be set: a function `now()` in the first schema of the search_path replaces the
    real `now()`. Objects that the migrations created still use the server's clock."""

    _dsn: str

    @classmethod
    def of(cls, dsn: str) -> SetClock:
        with psycopg.connect(dsn) as connection:
            connection.execute("CREATE SCHEMA timemachine")
            connection.execute("CREATE TABLE timemachine.clock (ahead interval NOT NULL)")
            connection.execute("INSERT INTO timemachine.clock VALUES ('0')")
            connection.execute(
                "CREATE FUNCTION timemachine.now() RETURNS timestamptz LANGUAGE sql STABLE "
                "AS 'SELECT pg_catalog.now() + c.ahead FROM timemachine.clock c'"
            )
        return cls(_dsn=dsn)

    @property
    def dsn(self) -> str:
        """Returns a DSN with which the database uses this clock."""
        return make_conninfo(self._dsn, options="-c search_path=timemachine,pg_catalog")

    def set(self, ahead: timedelta) -> None:
        """Sets the clock ahead of the server's own by this much."""
        with psycopg.connect(self._dsn) as connection:
            connection.execute("UPDATE timemachine.clock SET ahead = %s", [ahead])
