"""The [archiver] table of the cluster file. Pure.

[archiver]
schedule = "10m"        # or a cron expression: "15 3 * * *"
time_zone = "UTC"       # in which the cron expression is read
dead_days = 90          # after so many days, dead jobs are cancelled
export = "/var/lib/windrow/export"      # cold days are written there before they are dropped; or s3://bucket/prefix
"""

from __future__ import annotations

from dataclasses import dataclass
from zoneinfo import ZoneInfo, available_timezones

from archiver.export_location import ExportLocation
from archiver.schedule import Schedule
from shard.placement.cluster_file import Cluster, ClusterFileError, known_keys


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    schedule: Schedule
    dead_days: int
    # None: cold days are dropped without an export.
    export: ExportLocation | None


def settings_of(cluster: Cluster) -> Settings:
    """Returns the archiver's settings: the table's, or the defaults. Raises ClusterFileError."""
    table = cluster.tables.get("archiver", {})
    where = f"{cluster.source}: [archiver]"
    known_keys(table, {"schedule", "time_zone", "dead_days", "export"}, where=where)
    zone: object = table.get("time_zone", "UTC")
    if not isinstance(zone, str) or zone not in available_timezones():
        raise ClusterFileError(f'{where} time_zone: no time zone is called {zone!r}; one is "Europe/Berlin"')
    text: object = table.get("schedule", "10m")
    if not isinstance(text, str):
        raise ClusterFileError(f'{where} schedule: must be a text such as "10m", not {text!r}')
    try:
        schedule = Schedule.parse(text, zone=ZoneInfo(zone))
    except ValueError as error:
        raise ClusterFileError(f"{where} schedule: {error}") from error
    dead_days: object = table.get("dead_days", 90)
    if isinstance(dead_days, bool) or not isinstance(dead_days, int) or not 1 <= dead_days <= 36_500:
        raise ClusterFileError(f"{where} dead_days: must be a whole number from 1 to 36500, not {dead_days!r}")
    return Settings(
        schedule=schedule,
        dead_days=dead_days,
        export=_export(table.get("export"), f"{where} export"),
    )


def _export(value: object, where: str) -> ExportLocation | None:
    if value is None:
        return None
    if not isinstance(value, str):
        raise ClusterFileError(f'{where}: must be a text such as "/var/lib/windrow/export", not {value!r}')
    try:
        return ExportLocation.parse(value)
    except ValueError as error:
        raise ClusterFileError(f"{where}: {error}") from error
