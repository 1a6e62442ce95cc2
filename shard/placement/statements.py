"""The SQL statements of this package. Each statement is one file in sql/. Other packages run them only where
tests/unit/test_statements.py allows it."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from shard.postgres.sql_loader import load

_load = partial(load, Path(__file__).parent / "sql")

INSERT_NAMES = _load("insert_names", short_lock_wait=True)
INSERT_QUEUES = _load("insert_queues", short_lock_wait=True)

LOCATE_DATABASE = _load("locate_database")

READ_CATALOG_CLUSTER = _load("read_catalog_cluster")
FOUND_CATALOG = _load("found_catalog")
PLACE_SLOTS = _load("place_slots")
READ_CATALOG = _load("read_catalog")
GRANT_SLOTS = _load("grant_slots")
COUNT_OWNED_SLOTS = _load("count_owned_slots")
READ_SHARD = _load("read_shard")
READ_NEWEST_EPOCH = _load("read_newest_epoch")
LOCK_CATALOG = _load("lock_catalog")
RECORD_SHARD = _load("record_shard")
READ_MOVES = _load("read_moves")
BEGIN_MOVE = _load("begin_move")
SWITCH_WRITER = _load("switch_writer")
FINISH_MOVE = _load("finish_move")
# Not repeatable: a second run would return 0, as if the statement had run too early.
FORGET_OWNER = _load("forget_owner", repeatable=False)
READ_PIN = _load("read_pin")
READ_PINS = _load("read_pins")
READ_PINS_ON = _load("read_pins_on")
LOCK_PLACEMENT = _load("lock_placement")
INSERT_PIN = _load("insert_pin")
SET_PIN_TARGET = _load("set_pin_target")

MAKE_MARK = _load("make_mark")
FIND_MARK_BEFORE = _load("find_mark_before")
# Marks are made because other statements have written something. So MAKE_MARK itself must not count as a write.
MAKE_MARK.writes = False
CONFIRM_MARK = _load("confirm_mark")
READ_MARK = _load("read_mark")

READ_SLOTS = _load("read_slots")
READ_QUEUES = _load("read_queues")
COUNT_NODES = _load("count_nodes")
FIND_UNADOPTED = _load("find_unadopted")
LOCK_QUEUES = _load("lock_queues")
LOCK_SLOTS = _load("lock_slots")
CLOSE_SLOTS = _load("close_slots")
OPEN_SLOTS = _load("open_slots")
END_ARRIVAL = _load("end_arrival")
ADOPT_ORGS = _load("adopt_orgs")
ADOPT_QUEUES = _load("adopt_queues")
CONFIGURE_QUEUES = _load("configure_queues")
READ_QUARANTINES = _load("read_quarantines")
READ_BUCKETS = _load("read_buckets")
READ_SCHEDULES = _load("read_schedules")
READ_SCHEDULE_RUNS = _load("read_schedule_runs")
WRITE_SCHEDULES = _load("write_schedules")
WRITE_SCHEDULE_RUNS = _load("write_schedule_runs")
DELETE_SCHEDULES = _load("delete_schedules")
READ_WORKFLOWS = _load("read_workflows")
WRITE_WORKFLOWS = _load("write_workflows")
DELETE_WORKFLOWS = _load("delete_workflows")
READ_ARRIVALS = _load("read_arrivals")
WRITE_ARRIVALS = _load("write_arrivals")
FOLD_WORKFLOWS = _load("fold_workflows")
DELETE_ARRIVALS = _load("delete_arrivals")
WRITE_QUARANTINES = _load("write_quarantines")
DELETE_QUARANTINES = _load("delete_quarantines")
WRITE_BUCKETS = _load("write_buckets")
COUNT_REMAINING = _load("count_remaining")
# Not repeatable: a second run would export other jobs, and would not return the jobs of the first run. Nobody would see
# those jobs for a long time.
EXPORT_CHUNK = _load("export_chunk", repeatable=False)
READ_EXPORTED = _load("read_exported")
IMPORT_CHUNK = _load("import_chunk")
NOTIFY_IMPORTED = _load("notify_imported")
DELETE_EXPORTED = _load("delete_exported")
