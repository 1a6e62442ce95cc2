"""The SQL statements of this package, each from its file in sql/. Other packages may run only the statements that
tests/unit/test_statements.py names."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from shard.postgres.sql_loader import load

_load = partial(load, Path(__file__).parent / "sql")

FIND_WAKE = _load("find_wake")
TAKE_DUE = _load("take_due")
FIND_BUFFERED = _load("find_buffered")
FIND_TAKEN = _load("find_taken")
STORE_RUNS = _load("store_runs")
ADVANCE = _load("advance")
FORGET_RUNS = _load("forget_runs")
SCAN_SCHEDULES = _load("scan_schedules")
TAKE_OVERDUE = _load("take_overdue")
SKIP_BUFFERED = _load("skip_buffered")

READ_TIME = _load("read_time")
FIND_ROOM = _load("find_room")
LOCK_SCHEDULE = _load("lock_schedule")
GET_SCHEDULE = _load("get_schedule")
LIST_SCHEDULES = _load("list_schedules")
INSERT_SCHEDULE = _load("insert_schedule")
UPDATE_SCHEDULE = _load("update_schedule")
DELETE_SCHEDULE = _load("delete_schedule")
READ_RUNS = _load("read_runs")
FIND_RUNS = _load("find_runs")
FIND_REQUEST = _load("find_request")
