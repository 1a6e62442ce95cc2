"""The [archiver] table: when passes are due, and the messages about invalid tables."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from archiver.settings import settings_of
from shard.placement.cluster_file import ClusterFileError
from tests.unit.test_cluster_file import ONE, parse

NOON = datetime(2026, 11, 20, 12, 0, tzinfo=UTC)


def due(table: str, after: datetime = NOON) -> datetime:
    return settings_of(parse(f"{ONE}[archiver]\n{table}\n")).schedule.after(after)


def test_without_a_table_there_is_a_pass_every_ten_minutes_and_dead_jobs_stay_for_ninety_days() -> None:
    settings = settings_of(parse(ONE))
    assert settings.schedule.after(NOON) == NOON + timedelta(minutes=10)
    assert settings.dead_days == 90
    assert settings.export is None


@pytest.mark.parametrize(
    ("schedule", "wait"),
    [("90s", timedelta(seconds=90)), ("2h", timedelta(hours=2)), ("15 * * * *", timedelta(minutes=15))],
)
def test_a_schedule_is_an_interval_or_a_cron_expression(schedule: str, wait: timedelta) -> None:
    assert due(f'schedule = "{schedule}"') == NOON + wait


def test_a_cron_expression_is_meant_in_its_time_zone_in_summer_and_in_winter() -> None:
    table = 'schedule = "0 3 * * *"\ntime_zone = "Europe/Berlin"'
    assert due(table) == datetime(2026, 11, 21, 2, 0, tzinfo=UTC)
    assert due(table, datetime(2026, 7, 1, 12, 0, tzinfo=UTC)) == datetime(2026, 7, 2, 1, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("table", "complaint"),
    [
        ('schedule = "often"', "schedule: 'often' is neither an interval, such as 10m, nor a cron expression"),
        ('schedule = "0s"', "schedule: '0s' is no interval: the shortest is 1s"),
        ('schedule = "0 0 31 2 *"', "schedule: '0 0 31 2 [*]' is neither .*: Bad day-of-month"),
        ("schedule = 10", 'schedule: must be a text such as "10m", not 10'),
        ('time_zone = "Berlin"', "time_zone: no time zone is called 'Berlin'; one is \"Europe/Berlin\""),
        ('time_zone = "/etc/passwd"', "time_zone: no time zone is called '/etc/passwd'"),
        ("time_zone = 1", "time_zone: no time zone is called 1"),
        ("dead_days = 0", "dead_days: must be a whole number from 1 to 36500, not 0"),
        ("dead_days = true", "dead_days: must be a whole number from 1 to 36500, not True"),
        ("export = 1", 'export: must be a text such as "/var/lib/windrow/export", not 1'),
        ('export = "var/export"', "export: 'var/export' is no absolute path: write a directory"),
        ('export = ""', "export: '' is no absolute path"),
        ('export = "/var/../etc"', "export: '/var/../etc' has .. in it"),
        ('export = "gs://cold/x"', "export: 'gs://cold/x' is neither a directory nor an S3 bucket"),
        ('export = "file://db1/x"', r"export: 'file://db1/x' names a file on another machine \(db1\)"),
        ('export = "s3://"', r"export: 's3://' names no bucket \(''\): write"),
        ('export = "s3://cold/a//b"', "export: 's3://cold/a//b' has an empty part, or dots"),
        ('export = "s3://key:hunter2@cold/x"', "export: must have no credentials and no options in it"),
        ('export = "s3://cold/x?secret=hunter2"', "export: must have no credentials and no options in it"),
        ('scedule = "1h"', "did you mean 'schedule'"),
    ],
)
def test_a_table_that_cannot_be_used_is_refused_with_its_place_and_value(table: str, complaint: str) -> None:
    with pytest.raises(ClusterFileError, match=rf"cluster.toml: \[archiver\].*{complaint}"):
        due(table)


def test_a_secret_in_a_place_is_not_shown() -> None:
    with pytest.raises(ClusterFileError) as caught:
        due('export = "s3://key:hunter2@cold/x"')
    assert "hunter2" not in str(caught.value)


def test_all_faults_of_the_table_are_told_at_once() -> None:
    with pytest.raises(ClusterFileError) as caught:
        due('schedul = "1h"\nschedule = 10\ntime_zone = "Berlin"\ndead_days = 0\nexport = 1')
    faults = str(caught.value).splitlines()
    assert [fault.partition("[archiver]")[2].partition(":")[0].strip() for fault in faults] == [
        "",
        "time_zone",
        "schedule",
        "dead_days",
        "export",
    ]
