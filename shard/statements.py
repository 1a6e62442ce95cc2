"""The shard's statements: one file in shard/sql each, one verb each. Loaded once, as bytes, which is what psycopg
takes."""

from __future__ import annotations

import re
from pathlib import Path

_SQL = Path(__file__).parent / "sql"
_WRITES = re.compile(rb"\b(?:INSERT INTO|UPDATE|DELETE FROM) windrow\.")


class Statement(bytes):
    """SQL as psycopg takes it, and the verb that traces know it by."""

    name: str
    # Whether it may be run again where nobody knows if it was done. Most may: they name the ids or the lease they are
    # about.
    repeatable: bool
    # Whether callers of several orgs wait for it: then it waits only a moment for a lock, and does nothing if it does
    # not get it (shard/row_locks.py).
    shared: bool
    # Whether it writes to tables.
    writes: bool


def _load(name: str, *, repeatable: bool = True, shared: bool = False) -> Statement:
    # Without comments: psycopg remembers how it has read a statement only up to 4,096 bytes.
    lines = (_SQL / f"{name}.sql").read_bytes().splitlines()
    statement = Statement(b"\n".join(bare for line in lines if not (bare := line.strip()).startswith(b"--")))
    statement.name = name
    statement.repeatable = repeatable
    statement.shared = shared
    statement.writes = _WRITES.search(statement) is not None
    return statement


ENQUEUE = _load("enqueue", shared=True)
FIND_KNOWN = _load("find_known", shared=True)
FIND_REFUSED_SLOTS = _load("find_refused_slots", shared=True)
COUNT_QUEUES = _load("count_queues", shared=True)
INTERN_NAMES = _load("intern_names", shared=True)
MAKE_QUEUES = _load("make_queues", shared=True)
FIND_QUEUE_IDS = _load("find_queue_ids", shared=True)
FIND_WRONG_NAMES = _load("find_wrong_names", shared=True)

CLAIM = _load("claim", shared=True)
PROBE = _load("probe", shared=True)
SWEEP = _load("sweep", shared=True)
RING = _load("ring", shared=True)
ACK = _load("ack", shared=True)
EXTEND = _load("extend", shared=True)
RELEASE = _load("release", shared=True)
INSPECT_LEASES = _load("inspect_leases", shared=True)
RETRY = _load("retry", shared=True)
BURY = _load("bury", shared=True)
EXPIRE_UNRUN = _load("expire_unrun", shared=True)
FIND_LOCKED_JOBS = _load("find_locked_jobs", shared=True)
FIND_LOCKED_KEYS = _load("find_locked_keys", shared=True)
FIND_LOCKED_NAMES = _load("find_locked_names", shared=True)
EXPLAIN_MISS = _load("explain_miss", shared=True)
CANCEL = _load("cancel", shared=True)
GET_JOBS = _load("get_jobs", shared=True)
WAIT_FOR_STANDBY = _load("wait_for_standby", shared=True)

GET_QUEUE = _load("get_queue")
LIST_QUEUES = _load("list_queues")
ALTER_QUEUE = _load("alter_queue")
DELETE_QUEUE = _load("delete_queue")
HOLDS_JOBS = _load("holds_jobs")
DEPARTS = _load("departs")
PURGE_LIVE = _load("purge_live", repeatable=False)
PURGE_DEAD = _load("purge_dead", repeatable=False)
FIND_LISTED = _load("find_listed")
LIST_LIVE = _load("list_live")
LIST_JOBS = _load("list_jobs")
REDRIVE = _load("redrive", repeatable=False)
RECORD_TIME = _load("record_time", shared=True)
ACCEPT_CLOCK = _load("accept_clock")
READ_CLOCK = _load("read_clock")
STATS = _load("stats")
CHECK_BOOKS = _load("check_books")
FOLD_TALLY = _load("fold_tally")

WAIT_TURN = _load("wait_turn")
SHARE_TURN = _load("share_turn")
READ_ENCODING = _load("read_encoding")
LIST_MIGRATIONS = _load("list_migrations")
RECORD_MIGRATION = _load("record_migration")
FIND_BREAKING = _load("find_breaking")
CLAIM_IDENTITY = _load("claim_identity")
READ_IDENTITY = _load("read_identity")
READ_VERSIONS = _load("read_versions")
PROBE_DISK = _load("probe_disk")
FIND_PLACE = _load("find_place")
FIND_MISSING_PARTITIONS = _load("find_missing_partitions")

FIND_DAYS = _load("find_days")
FIND_PAST_IDS = _load("find_past_ids")
FIND_USERS = _load("find_users")
RAISE_COLD_UNTIL = _load("raise_cold_until")
FIND_HELD = _load("find_held")
SET_ASIDE_HELD = _load("set_aside_held")
READ_ARCHIVED = _load("read_archived")
STRIKE_ARCHIVED = _load("strike_archived")
EXPIRE_RELEASED = _load("expire_released")
FORGET_EMPTY_DAYS = _load("forget_empty_days")
EXPIRE_DEDUP = _load("expire_dedup")
EXPIRE_WAITING = _load("expire_waiting")
RETIRE_DEAD = _load("retire_dead")

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
BEGIN = _load("begin")
SWITCH = _load("switch")
LEAVE = _load("leave")
FORGET_OWNER = _load("forget_owner")
LEAD = _load("lead")
READ_LEADER = _load("read_leader")
READ_PIN = _load("read_pin")
READ_PINS = _load("read_pins")
READ_PINS_ON = _load("read_pins_on")
LOCK_PLACEMENT = _load("lock_placement")
PIN = _load("pin")
WISH = _load("wish")

READ_POLICIES = _load("read_policies")
READ_POLICY = _load("read_policy")
WRITE_POLICY = _load("write_policy")
DELETE_POLICY = _load("delete_policy")
RAISE_POLICIES = _load("raise_policies")
READ_TOLD = _load("read_told")
READ_POLICIES_VERSION = _load("read_policies_version")
TAKE_POLICIES = _load("take_policies")
TELL_ORGS = _load("tell_orgs")
TELL_QUEUES = _load("tell_queues")

READ_KEPT = _load("read_kept")
FIND_KEPT_OTHERWISE = _load("find_kept_otherwise")
KEEP_FINISHED = _load("keep_finished")
KEEP_COLD = _load("keep_cold")

FIND_DEPARTING_ORG = _load("find_departing_org")
READ_ORG_SLOT = _load("read_org_slot")
IS_HELD = _load("is_held")
BEGIN_ERASURE = _load("begin_erasure")
FIND_ERASURES = _load("find_erasures")
READ_ERASURES = _load("read_erasures")
ERASE_LIVE = _load("erase_live")
ERASE_DEAD = _load("erase_dead")
ERASE_FINISHED = _load("erase_finished")
FIND_COLD_DAY_OF = _load("find_cold_day_of")
ERASE_COLD = _load("erase_cold")
ERASE_KEYS = _load("erase_keys")
END_ERASURE = _load("end_erasure")
DELETE_ERASED_ORG = _load("delete_erased_org")

MAKE_MARK = _load("make_mark")
# It tells of what others write.
MAKE_MARK.writes = False
CONFIRM_MARK = _load("confirm_mark")
COMPARE_MARK = _load("compare_mark")
READ_MARK = _load("read_mark")
READ_STRAYS = _load("read_strays")
BRING_HOME = _load("bring_home")
END_STRAYS = _load("end_strays")
RAISE_CHUNKS = _load("raise_chunks")

READ_SLOTS = _load("read_slots")
READ_QUEUES = _load("read_queues")
FIND_UNSETTLED = _load("find_unsettled")
LOCK_QUEUES = _load("lock_queues")
LOCK_SLOTS = _load("lock_slots")
CLOSE_SLOTS = _load("close_slots")
OPEN_SLOTS = _load("open_slots")
ADOPT_ORGS = _load("adopt_orgs")
ADOPT_QUEUES = _load("adopt_queues")
CONFIGURE_QUEUES = _load("configure_queues")
COUNT_LEFT = _load("count_left")
# Run again, it would set aside other jobs, and say nothing of those of the first run: they would be nowhere for long.
DEPART = _load("depart", repeatable=False)
READ_DEPARTING = _load("read_departing")
TAKE = _load("take")
RING_ARRIVALS = _load("ring_arrivals")
FORGET = _load("forget")

READ_SERVER = _load("read_server")
READ_SETTINGS = _load("read_settings")
READ_TABLES = _load("read_tables")
READ_INDEXES = _load("read_indexes")
READ_HOLDERS = _load("read_holders")
READ_CHECKPOINTS = _load("read_checkpoints")
READ_CHECKPOINTS_16 = _load("read_checkpoints_16")
