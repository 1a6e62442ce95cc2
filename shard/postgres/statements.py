"""The SQL statements of this package, each from its file in sql/. Other packages may run only the statements that
tests/unit/test_statements.py names."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from shard.postgres.sql_loader import load

_load = partial(load, Path(__file__).parent / "sql")

WAIT_FOR_STANDBY = _load("wait_for_standby", short_lock_wait=True)

SHOW_TIME = _load("show_time")
RECORD_TIME = _load("record_time", short_lock_wait=True)
# Not repeatable: a second run would return, as the time that was recorded before, the time that the first run has
# recorded.
ACCEPT_CLOCK = _load("accept_clock", repeatable=False)

LOCK_EXCLUSIVE = _load("lock_exclusive")
READ_FITNESS = _load("read_fitness")
LIST_MIGRATIONS = _load("list_migrations")
RECORD_MIGRATION = _load("record_migration")
MEASURE_TABLES = _load("measure_tables")
FIND_BREAKING = _load("find_breaking")
CLAIM_IDENTITY = _load("claim_identity")
READ_IDENTITY = _load("read_identity")
PROBE_DISK = _load("probe_disk")
FIND_MISSING_PARTITIONS = _load("find_missing_partitions")
READ_RETENTIONS = _load("read_retentions")

TRY_LEADER_LOCK = _load("try_leader_lock")
RELEASE_LEADER_LOCK = _load("release_leader_lock")
READ_LEADER = _load("read_leader")

COMPARE_MARK = _load("compare_mark")
