"""Tests the signs that a shard needs an operator. Routers read these signs and export them as metrics."""

from __future__ import annotations

import psycopg

from shard.health import signs
from shard.history import days
from shard.postgres import partitions
from shard.postgres.pool import Database
from shard.schedule import ScheduleSpec
from shard.vocabulary import RETENTION_DEFAULT, OrgId
from tests.routers import PATIENCE_S
from tests.schedules import Shard

DAY_S = 86_400
HOUR_S = 3_600


async def test_a_shard_that_needs_nobody_shows_no_sign(fresh_database: Database) -> None:
    await partitions.make_ahead(fresh_database)
    found = await signs.read(fresh_database)
    assert (found.schedule_late_s, found.partitions_missing) == (0, 0)
    # These two figures need not be 0: autovacuum may be at work, and yesterday's partition waits for the archiver's
    # pass.
    assert found.snapshot_s < PATIENCE_S
    assert found.archive_late_s < DAY_S


async def test_a_snapshot_that_a_session_holds_grows_older_until_the_session_ends(
    fresh_database: Database, fresh_dsn: str
) -> None:
    with psycopg.connect(fresh_dsn) as session:
        session.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        session.execute("SELECT")
        first = (await signs.read(fresh_database)).snapshot_s
        ((waited_s,),) = session.execute("SELECT extract(epoch FROM clock_timestamp() - now())::float8").fetchall()
        second = (await signs.read(fresh_database)).snapshot_s
        assert 0 < first < second
        assert second >= waited_s
    assert (await signs.read(fresh_database)).snapshot_s < second


async def test_a_schedule_that_nobody_fires_is_late(fresh_database: Database, org: OrgId) -> None:
    shard = Shard(fresh_database)
    await shard.create(org, ScheduleSpec(timing=await shard.hourly()))
    assert (await signs.read(fresh_database)).schedule_late_s == 0
    await fresh_database.run(b"UPDATE windrow.schedule SET wake_at = now() - interval '90 s'", {})
    assert 90 <= (await signs.read(fresh_database)).schedule_late_s < 90 + PATIENCE_S
    await shard.fire()
    assert (await signs.read(fresh_database)).schedule_late_s == 0


async def test_a_schedule_of_a_slot_that_has_left_the_shard_is_not_late_there(
    fresh_database: Database, org: OrgId
) -> None:
    shard = Shard(fresh_database)
    await shard.create(org, ScheduleSpec(timing=await shard.hourly()))
    await fresh_database.run(b"UPDATE windrow.schedule SET wake_at = now() - interval '90 s'", {})
    await fresh_database.run(b"DELETE FROM windrow.owned_slot", {})
    assert (await signs.read(fresh_database)).schedule_late_s == 0


async def test_a_day_that_no_archiver_has_taken_is_late_when_it_is_over_and_again_when_its_retention_has_passed(
    fresh_database: Database,
) -> None:
    await partitions.make_ahead(fresh_database)
    now_s, over, past = await _some_days(fresh_database, 5, 4)
    async with fresh_database.transaction() as connection:
        name = f"finished_{RETENTION_DEFAULT}_{over.replace('-', '')}"
        await partitions.make(connection, name, RETENTION_DEFAULT, over, past)
    # The day ended four whole days ago, plus the time since midnight today. Of this time, the first three hours do not
    # count as late.
    late_s = (await signs.read(fresh_database)).archive_late_s
    assert 0 <= late_s - (4 * DAY_S + now_s % DAY_S - 3 * HOUR_S) < PATIENCE_S
    day, *_ = await days.days_over(fresh_database)
    assert day.name == name
    await days.turn_cold(fresh_database, day)
    assert (await signs.read(fresh_database)).archive_late_s < DAY_S

    now_s, kept, past = await _some_days(fresh_database, RETENTION_DEFAULT + 5, RETENTION_DEFAULT + 4)
    old = f"windrow.cold_{RETENTION_DEFAULT}_{kept.replace('-', '')}"
    await fresh_database.run(
        f"CREATE TABLE {old} PARTITION OF windrow.cold_{RETENTION_DEFAULT} "
        f"FOR VALUES FROM ('{kept} 00:00+00') TO ('{past} 00:00+00')".encode(),
        {},
    )
    late_s = (await signs.read(fresh_database)).archive_late_s
    assert 0 <= late_s - (4 * DAY_S + now_s % DAY_S - 3 * HOUR_S) < PATIENCE_S
    (day,) = await days.days_past(fresh_database)
    await days.drop(fresh_database, day)
    assert (await signs.read(fresh_database)).archive_late_s < DAY_S


async def _some_days(database: Database, *ago: int) -> tuple[float, str, str]:
    """Returns the shard's time, and two days as YYYY-MM-DD. Each day is the given number of days before today."""
    ((now_s, first, second),) = await database.run(
        b"SELECT extract(epoch FROM now())::float8, ((now() AT TIME ZONE 'UTC')::date - %(first)s::integer)::text, "
        b"((now() AT TIME ZONE 'UTC')::date - %(second)s::integer)::text",
        {"first": ago[0], "second": ago[1]},
    )
    return now_s, first, second


async def test_a_partition_that_nobody_has_made_is_missing(fresh_database: Database) -> None:
    await partitions.make_ahead(fresh_database)
    ((tomorrow,),) = await fresh_database.run(b"SELECT to_char((now() AT TIME ZONE 'UTC')::date + 1, 'YYYYMMDD')", {})
    await fresh_database.run(f"DROP TABLE windrow.finished_{RETENTION_DEFAULT}_{tomorrow}".encode(), {})
    assert (await signs.read(fresh_database)).partitions_missing == 1
