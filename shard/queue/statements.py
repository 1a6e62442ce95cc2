"""The SQL statements of this package, each from its file in sql/. Other packages may run only those that
tests/unit/test_statements.py names."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from shard.postgres.sql_loader import load

_load = partial(load, Path(__file__).parent / "sql")

ENQUEUE = _load("enqueue", shared=True)
ENQUEUE_PLAIN = _load("enqueue_plain", shared=True)
FIND_KNOWN = _load("find_known", shared=True)
DESCRIBE_KNOWN = _load("describe_known", shared=True)
FIND_REFUSED_SLOTS = _load("find_refused_slots", shared=True)
COUNT_QUEUES = _load("count_queues", shared=True)
FIND_QUEUE_IDS = _load("find_queue_ids", shared=True)
FIND_WRONG_NAMES = _load("find_wrong_names", shared=True)
FIND_NAME_IDS = _load("find_name_ids", shared=True)
NAME_QUEUES = _load("name_queues", shared=True)
WALK_QUEUES = _load("walk_queues", shared=True)

CLAIM = _load("claim", shared=True)
# For a single group, whose org or queue has a limit of jobs in flight.
CLAIM_WITHIN_LIMITS = _load(
    "claim_within_limits",
    file="claim",
    shared=True,
    includes={
        "claim_room": (
            "least((%(max_jobs)s::integer[])[source.grp], windrow.room_in_flight((%(queue_ids)s::bigint[])[1], "
            "%(of_org)s::bigint, %(of_queue)s::bigint))"
        )
    },
)
COUNT_IN_FLIGHT = _load("count_in_flight", shared=True)
COUNT_BACKLOG = _load("count_backlog", shared=True)
PROBE = _load("probe", shared=True)
SWEEP = _load("sweep", shared=True)
MOVE_AGED = _load("move_aged", shared=True)
CONTAIN = _load("contain", shared=True)
READ_QUARANTINES = _load("read_quarantines", shared=True)
FIND_SUSPECTS = _load("find_suspects", shared=True)
FORGET_CRASHES = _load("forget_crashes", shared=True)
ACQUIT = _load("acquit", shared=True)
QUARANTINE_KIND = _load("quarantine_kind", shared=True)
BEGIN_TRIALS = _load("begin_trials", shared=True)
END_TRIAL = _load("end_trial", shared=True)
REOPEN_KIND = _load("reopen_kind", shared=True)
LIST_QUARANTINES = _load("list_quarantines", shared=True)
ADD_QUARANTINE = _load("add_quarantine", shared=True)
RELEASE_QUARANTINE = _load("release_quarantine", shared=True)
RELEASE_SET_ASIDE = _load("release_set_aside", shared=True)
FIND_WAITING_GROUPS = _load("find_waiting_groups", shared=True)
FILL_GROUPS = _load("fill_groups", shared=True)
NOTIFY_WORK = _load("notify_work", shared=True)
ACK = _load("ack", shared=True)
EXTEND = _load("extend", shared=True)
GIVE_BACK = _load("give_back", shared=True)
INSPECT_LEASES = _load("inspect_leases", shared=True)
MARK_DEAD = _load("mark_dead", shared=True)
EXPIRE_UNRUN = _load("expire_unrun", shared=True)
FIND_LOCKED_JOBS = _load("find_locked_jobs", shared=True)
FIND_LOCKED_KEYS = _load("find_locked_keys", shared=True)
FIND_LOCKED_NAMES = _load("find_locked_names", shared=True)
EXPLAIN_MISS = _load("explain_miss", shared=True)
CANCEL = _load("cancel", shared=True)
ALTER = _load("alter", shared=True)
REDRIVE = _load("redrive", shared=True)
SIGNAL = _load("signal", shared=True)
GET_JOBS = _load("get_jobs", shared=True)
FIND_ENDED = _load("find_ended", shared=True)
EXPLAIN_JOB = _load("explain_job", shared=True)
EXPLAIN_QUEUE = _load("explain_queue", shared=True)
EXPLAIN_GROUP = _load("explain_group", shared=True)
EXPLAIN_BLOCKED = _load("explain_blocked", shared=True)
FIND_PAST_ID = _load("find_past_id", shared=True)
RECORD_CONSUMERS = _load("record_consumers", hint=True)
RECORD_CONSUMERS_OF_ALL = _load("record_consumers_of_all", hint=True)
FORGET_CONSUMERS = _load("forget_consumers", hint=True)

FOLD_TALLY = _load("fold_tally")

DRAW_TOKENS = _load("draw_tokens", shared=True)
# Tokens must not be given back twice.
RETURN_TOKENS = _load("return_tokens", file="draw_tokens", shared=True, repeatable=False)
FORGET_FULL_BUCKETS = _load("forget_full_buckets")
