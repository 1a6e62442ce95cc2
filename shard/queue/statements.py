"""The SQL statements of this package, each from its file in sql/. Other packages may run only the statements that
tests/unit/test_statements.py names."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from shard.postgres.sql_loader import load

_load = partial(load, Path(__file__).parent / "sql")

ENQUEUE = _load("enqueue", short_lock_wait=True)
ENQUEUE_PLAIN = _load("enqueue_plain", short_lock_wait=True)
FIND_KNOWN = _load("find_known", short_lock_wait=True)
DESCRIBE_KNOWN = _load("describe_known", short_lock_wait=True)
FIND_REFUSED_SLOTS = _load("find_refused_slots", short_lock_wait=True)
COUNT_QUEUES = _load("count_queues", short_lock_wait=True)
FIND_QUEUE_IDS = _load("find_queue_ids", short_lock_wait=True)
FIND_WRONG_NAMES = _load("find_wrong_names", short_lock_wait=True)
FIND_NAME_IDS = _load("find_name_ids", short_lock_wait=True)
NAME_QUEUES = _load("name_queues", short_lock_wait=True)
WALK_QUEUES = _load("walk_queues", short_lock_wait=True)

CLAIM = _load("claim", short_lock_wait=True)
# Claims from the queues of one org if the org has a limit of jobs in flight, or from a single queue that has such a
# limit.
CLAIM_WITHIN_LIMITS = _load(
    "claim_within_limits",
    file="claim",
    short_lock_wait=True,
    includes={
        "claim_room": (
            "least((%(max_jobs)s::integer[])[source.grp], windrow.room_in_flight((%(queue_ids)s::bigint[])[1], "
            "%(of_org)s::bigint, %(of_queue)s::bigint))"
        )
    },
)
COUNT_IN_FLIGHT = _load("count_in_flight", short_lock_wait=True)
COUNT_BACKLOG = _load("count_backlog", short_lock_wait=True)
PROBE = _load("probe", short_lock_wait=True)
SWEEP = _load("sweep", short_lock_wait=True)
MOVE_AGED = _load("move_aged", short_lock_wait=True)
CONTAIN = _load("contain", short_lock_wait=True)
READ_QUARANTINES = _load("read_quarantines", short_lock_wait=True)
FIND_SUSPECTS = _load("find_suspects", short_lock_wait=True)
FORGET_CRASHES = _load("forget_crashes", short_lock_wait=True)
ACQUIT = _load("acquit", short_lock_wait=True)
QUARANTINE_KIND = _load("quarantine_kind", short_lock_wait=True)
BEGIN_TRIALS = _load("begin_trials", short_lock_wait=True)
END_TRIAL = _load("end_trial", short_lock_wait=True)
REOPEN_KIND = _load("reopen_kind", short_lock_wait=True)
LIST_QUARANTINES = _load("list_quarantines", short_lock_wait=True)
ADD_QUARANTINE = _load("add_quarantine", short_lock_wait=True)
RELEASE_QUARANTINE = _load("release_quarantine", short_lock_wait=True)
RELEASE_SET_ASIDE = _load("release_set_aside", short_lock_wait=True)
FIND_WAITING_GROUPS = _load("find_waiting_groups", short_lock_wait=True)
FILL_GROUPS = _load("fill_groups", short_lock_wait=True)
NOTIFY_WORK = _load("notify_work", short_lock_wait=True)
ACK = _load("ack", short_lock_wait=True)
EXTEND = _load("extend", short_lock_wait=True)
GIVE_BACK = _load("give_back", short_lock_wait=True)
INSPECT_LEASES = _load("inspect_leases", short_lock_wait=True)
MARK_DEAD = _load("mark_dead", short_lock_wait=True)
EXPIRE_UNRUN = _load("expire_unrun", short_lock_wait=True)
FIND_LOCKED_JOBS = _load("find_locked_jobs", short_lock_wait=True)
FIND_LOCKED_KEYS = _load("find_locked_keys", short_lock_wait=True)
FIND_LOCKED_NAMES = _load("find_locked_names", short_lock_wait=True)
EXPLAIN_MISS = _load("explain_miss", short_lock_wait=True)
CANCEL = _load("cancel", short_lock_wait=True)
ALTER = _load("alter", short_lock_wait=True)
REDRIVE = _load("redrive", short_lock_wait=True)
SIGNAL = _load("signal", short_lock_wait=True)
GET_JOBS = _load("get_jobs", short_lock_wait=True)
FIND_ENDED = _load("find_ended", short_lock_wait=True)
EXPLAIN_JOB = _load("explain_job", short_lock_wait=True)
EXPLAIN_QUEUE = _load("explain_queue", short_lock_wait=True)
EXPLAIN_GROUP = _load("explain_group", short_lock_wait=True)
EXPLAIN_BLOCKED = _load("explain_blocked", short_lock_wait=True)
FIND_PAST_ID = _load("find_past_id", short_lock_wait=True)
RECORD_CONSUMERS = _load("record_consumers", hint=True)
RECORD_CONSUMERS_OF_ALL = _load("record_consumers_of_all", hint=True)
FORGET_CONSUMERS = _load("forget_consumers", hint=True)

FOLD_TALLY = _load("fold_tally")

DRAW_TOKENS = _load("draw_tokens", short_lock_wait=True)
# Tokens must not be given back twice.
RETURN_TOKENS = _load("return_tokens", file="draw_tokens", short_lock_wait=True, repeatable=False)
FORGET_FULL_BUCKETS = _load("forget_full_buckets")
