"""The [archiver] table of the cluster file. Pure.

[archiver]
schedule = "10m"        # or a cron expression: "15 3 * * *"
time_zone = "UTC"       # in which the cron expression is read
dead_days = 90          # dead jobs are cancelled after this many days
export = "/var/lib/windrow/export"  # cold days are written there before they are dropped; or s3://bucket/prefix
"""

from __future__ import annotations

from dataclasses import dataclass
from zoneinfo import ZoneInfo, available_timezones

from archiver.export_location import ExportLocation
from archiver.schedule import Schedule
from shard.admin import audit
from shard.placement.cluster_file import Cluster, ClusterFileError, Faults, known_keys


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    schedule: Schedule
    dead_days: int
    # For how many days the audit log is kept, as the table [audit] says.
    audit_days: int
    # None: cold days are dropped without an export.
    export: ExportLocation | None


def settings_of(cluster: Cluster) -> Settings:
    """Returns the archiver's settings from the table [archiver] of the cluster file, with defaults for missing keys.
    Raises ClusterFileError with all faults, one per line."""
    table = cluster.tables.get("archiver", {})
    where = f"{cluster.source}: [archiver]"
    faults = Faults()
    faults.of(lambda: known_keys(table, {"schedule", "time_zone", "dead_days", "export"}, where=where))
    zone = faults.of(lambda: _time_zone(table.get("time_zone", "UTC"), f"{where} time_zone"))
    schedule = faults.of(lambda: _schedule(table.get("schedule", "10m"), zone or ZoneInfo("UTC"), f"{where} schedule"))
    dead_days = faults.of(lambda: _dead_days(table.get("dead_days", 90), f"{where} dead_days"))
    export = faults.of(lambda: _export(table.get("export"), f"{where} export"))
    audit_days = faults.of(lambda: audit.days_of(cluster))
    faults.refuse()
    assert schedule is not None
    assert dead_days is not None
    assert audit_days is not None
    return Settings(schedule=schedule, dead_days=dead_days, audit_days=audit_days, export=export)


def _time_zone(value: object, where: str) -> ZoneInfo:
    if not isinstance(value, str) or value not in available_timezones():
        raise ClusterFileError(f'{where}: no time zone is called {value!r}; one is "Europe/Berlin"')
    return ZoneInfo(value)


def _schedule(value: object, zone: ZoneInfo, where: str) -> Schedule:
    if not isinstance(value, str):
        raise ClusterFileError(f'{where}: must be a text such as "10m", not {value!r}')
    try:
        return Schedule.parse(value, zone=zone)
    except ValueError as error:
        raise ClusterFileError(f"{where}: {error}") from error


def _dead_days(value: object, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 36_500:
        raise ClusterFileError(f"{where}: must be a whole number from 1 to 36500, not {value!r}")
    return value


def _export(value: object, where: str) -> ExportLocation | None:
    if value is None:
        return None
    if not isinstance(value, str):
        raise ClusterFileError(f'{where}: must be a text such as "/var/lib/windrow/export", not {value!r}')
    try:
        return ExportLocation.parse(value)
    except ValueError as error:
        raise ClusterFileError(f"{where}: {error}") from error
