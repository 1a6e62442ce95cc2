"""The SQL statements of this package, one file in sql/ each. Other packages run them only where
tests/unit/test_statements.py allows it."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from shard.postgres.sql_loader import load

_load = partial(load, Path(__file__).parent / "sql")

LOCK_SHARED = _load("lock_shared")

FIND_DAYS = _load("find_days")
FIND_PAST_IDS = _load("find_past_ids")
FIND_USERS = _load("find_users")
RAISE_COLD_UNTIL = _load("raise_cold_until")
FIND_HELD = _load("find_held")
SET_ASIDE_HELD = _load("set_aside_held")
READ_ARCHIVED = _load("read_archived")
COUNT_KEPT = _load("count_kept")
RECORD_EXPIRED_DAY = _load("record_expired_day")
EXPIRE_RELEASED = _load("expire_released")
FORGET_EMPTY_DAYS = _load("forget_empty_days")
EXPIRE_DEDUP = _load("expire_dedup")
EXPIRE_WAITING = _load("expire_waiting")
RETIRE_DEAD = _load("retire_dead")

READ_POLICIES = _load("read_policies")
READ_POLICY = _load("read_policy")
WRITE_POLICY = _load("write_policy")
DELETE_POLICY = _load("delete_policy")
RAISE_POLICIES = _load("raise_policies")
SET_POLICIES_VERSION = _load("set_policies_version")
READ_APPLIED_POLICIES = _load("read_applied_policies")
READ_POLICIES_VERSION = _load("read_policies_version")
REPLACE_POLICIES = _load("replace_policies")
APPLY_ORG_POLICIES = _load("apply_org_policies")
APPLY_QUEUE_POLICIES = _load("apply_queue_policies")

READ_KEPT = _load("read_kept")
FIND_KEPT_OTHERWISE = _load("find_kept_otherwise")
KEEP_FINISHED = _load("keep_finished")
KEEP_COLD = _load("keep_cold")

FIND_EXPORTED_ORG = _load("find_exported_org")
READ_ORG_SLOT = _load("read_org_slot")
IS_HELD = _load("is_held")
BEGIN_ERASURE = _load("begin_erasure")
FIND_ERASURES = _load("find_erasures")
READ_ERASURES = _load("read_erasures")
ERASE_LIVE = _load("erase_live")
ERASE_DEAD = _load("erase_dead")
ERASE_FINISHED = _load("erase_finished")
FIND_A_QUEUE = _load("find_a_queue")
FIND_COLD_DAY_OF = _load("find_cold_day_of")
ERASE_COLD = _load("erase_cold")
ERASE_KEYS = _load("erase_keys")
ERASE_PAST_IDS = _load("erase_past_ids")
END_ERASURE = _load("end_erasure")
DELETE_ERASED_ORG = _load("delete_erased_org")
