"""Makes time pass for the jobs of one org, as the shard's clock would: what was to come is now. Never goes back before
now(), where no visible_at ever lies (shard/floor.py); waits by the database's clock, or for a state, never by ours."""

from __future__ import annotations

import asyncio

from shard.database import Database
from shard.vocabulary import OrgId

_PATIENCE_S = 30.0


async def end_leases(database: Database, org: OrgId) -> int:
    """Every lease that is held ends. Answers how many did."""
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
    """Every scheduled job becomes due. Answers how many did."""
    rows = await database.run(
        b"""
        UPDATE windrow.job j SET visible_at = now(), run_at = now() FROM windrow.queue q
        WHERE q.queue_id = j.queue_id AND q.org = %(org)s AND j.lease IS NULL AND j.visible_at > now()
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
    """Every job that has an expires_at is past it."""
    await database.run(
        b"""
        UPDATE windrow.job j SET expires_at = now() FROM windrow.queue q
        WHERE q.queue_id = j.queue_id AND q.org = %(org)s AND j.expires_at > now()
        """,
        {"org": org},
    )


async def pass_time(database: Database, seconds: float) -> None:
    """Lets the database's clock go on; for what is counted from now() and cannot be moved."""
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
