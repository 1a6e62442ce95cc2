"""The SQL statements of this package, each from its file in sql/. Other packages may run only the statements that
tests/unit/test_statements.py names."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from shard.postgres.sql_loader import load

_load = partial(load, Path(__file__).parent / "sql")

STORE_WORKFLOW = _load("store_workflow")
FIND_DIGEST = _load("find_digest")
GET_WORKFLOW = _load("get_workflow")
COUNT_NODES = _load("count_nodes")
LIST_WORKFLOWS = _load("list_workflows")
LIST_NODES = _load("list_nodes")
LIST_PARENTS = _load("list_parents")
FIND_RETRY = _load("find_retry")
FIND_SIGNAL = _load("find_signal")

BEGIN_CHANGE = _load("begin_change")
FIND_FLOW = _load("find_flow")
FIND_NODE = _load("find_node")
FIND_LEASE = _load("find_lease")
FIND_WAIT = _load("find_wait")
FIND_NODES = _load("find_nodes")
FIND_OPEN_PARENT = _load("find_open_parent")
READ_SIZE = _load("read_size")
TELL_AGAIN = _load("tell_again")
ADD_EDGES = _load("add_edges")
WAIT_FOR_NODES = _load("wait_for_nodes")
SET_PAUSED = _load("set_paused")
CANCEL_WORKFLOW = _load("cancel_workflow")
FIND_RELEASED = _load("find_released")
APPEND_SKIP = _load("append_skip")
CANCEL_BLOCKED_JOB = _load("cancel_blocked_job")

FIND_UNFOLDED = _load("find_unfolded")
FOLD_MORE = _load("fold_more")
FORGET_WORKFLOWS = _load("forget_workflows")
CHECK_WORKFLOWS = _load("check_workflows")
