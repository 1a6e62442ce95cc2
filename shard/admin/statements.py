"""The SQL statements of this package, one file in sql/ each. Other packages run them only where
tests/unit/test_statements.py allows it."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from shard.postgres.sql_loader import load

_load = partial(load, Path(__file__).parent / "sql")

GET_QUEUE = _load("get_queue")
LIST_QUEUES = _load("list_queues")
# Not repeatable: a second run would find the queue of the first run, and refuse it.
CREATE_QUEUE = _load("create_queue", repeatable=False)
ALTER_QUEUE = _load("alter_queue")
DELETE_QUEUE = _load("delete_queue")
HOLDS_JOBS = _load("holds_jobs")
IS_EXPORTING = _load("is_exporting")
PURGE_LIVE = _load("purge_live", repeatable=False)
PURGE_DEAD = _load("purge_dead", repeatable=False)
FIND_LISTED = _load("find_listed")
FIND_SCAN_RANGE = _load("find_scan_range", indexed=True)
LIST_LIVE = _load("list_live")
COUNT_JOBS = _load("count_jobs")
LIST_JOBS = _load("list_jobs")
REDRIVE_QUEUE = _load("redrive_queue", repeatable=False)
STATS = _load("stats")
COUNT_WORK = _load("count_work")
CHECK_BOOKS = _load("check_books")
COUNT_ORGS = _load("count_orgs")
LIST_ORGS = _load("list_orgs")
READ_ORG_FIGURES = _load("read_org_figures")
MEASURE_QUEUES = _load("measure_queues")
READ_QUEUE_FIGURES = _load("read_queue_figures")

BEGIN_AUDIT = _load("begin_audit")
END_AUDIT = _load("end_audit")
RECORD_READS = _load("record_reads", repeatable=False)
LIST_AUDIT = _load("list_audit")
FORGET_AUDIT = _load("forget_audit")

READ_VERSIONS = _load("read_versions")

READ_STRAYS = _load("read_strays")
READ_UNFINISHED = _load("read_unfinished")
SCAN_UNFINISHED = _load("scan_unfinished")
SCAN_QUEUES = _load("scan_queues")
SCAN_QUARANTINES = _load("scan_quarantines")
SCAN_WORKFLOWS = _load("scan_workflows")
DELETE_COPIES = _load("delete_copies")
BRING_HOME = _load("bring_home")
END_STRAYS = _load("end_strays")
RAISE_CHUNKS = _load("raise_chunks")

CREATE_API_KEY = _load("create_api_key", repeatable=False)
LIST_API_KEYS = _load("list_api_keys")
REVOKE_API_KEY = _load("revoke_api_key")
FIND_API_KEYS = _load("find_api_keys")
RECORD_API_KEY_USE = _load("record_api_key_use")

SET_LIMIT = _load("set_limit")
CLEAR_LIMITS = _load("clear_limits")
READ_LIMITS = _load("read_limits")

SET_WEIGHT = _load("set_weight")
READ_WEIGHTS = _load("read_weights")
