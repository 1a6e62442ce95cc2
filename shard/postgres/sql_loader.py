"""Reads SQL statements from files, as the bytes that psycopg takes.

Text that several statements share is written only in this module. Statements include it by its name:

    {{job_columns}}      the columns that the tables job, dead and finished have in common
    {{columns_but_history}}  job_columns without the last column, history
    {{cancelled_columns(e)}}  columns_but_history of the live job e, which is cancelled now
    {{cancelled_run_at(e)}}  the run_at of the live job e, which is cancelled now: a blocked job has no time, so it gets
                         the present time
    {{job_content}}      the job_columns that the producer filled: JOB_CONTENT in shard/vocabulary.py
    {{kept_content}}     job_content and further columns: everything that a job keeps wherever it goes
    {{unkeyed_content(e)}}  kept_content of row e, with NULL instead of the live key, which the row has given up
    {{new_job_arrays}}   job_content as the parameters of enqueue.sql: an array for each column
    {{new_job_values(n)}}  job_content of row n, which is made from new_job_arrays. Casts the texts of JSON columns
    {{claimed_content}}  the columns of job_content that a claim returns: the fields that Claimed has
    {{answer_columns}}   the columns of a job that lookups and lists read in every table
    {{short_content}}    the answer_columns that are texts or numbers. Each statement says how it returns the other
                         columns (payload, attributes, retry, progress, checkpoint)
    {{setting_columns}}  the settings of a queue: the columns of SETTING_COLUMNS in shard/queue_settings.py
    {{queue_settings(q)}}  the settings of row q of windrow.queue, as QueueSettings.from_row takes them
    {{effective_settings(q)}}  queue_settings, but with the org's retention if the queue has no retention
    {{setting_arrays}}   setting_columns as parameters, for many queues: an array of texts for each setting
    {{new_settings}}     setting_columns of a new queue, from the given settings
    {{altered_settings(q)}}  the SET items that change the given settings, and reset the settings that `reset` names
    {{default_settings}}  the SET items that reset all settings to their defaults
    {{claim_room}}       the most jobs that the takers with one set of queues get from claim.sql
    {{gives_jobs(q)}}    GIVES_JOBS in shard/queue_settings.py: whether the queue q gives jobs now
    {{is_due(j)}}        whether the row j of windrow.job is due: it is visible, or it waits for a group slot, or
                         is set aside
    {{is_blocked(j)}}    whether the row j waits for other nodes of its workflow
    {{awaits_signal(j)}}  whether the row j is the released job of a node that waits for a signal: it is due when it
                         expires, so it never runs
    {{expiry_reason(e)}}  the reason of the job e, which is cancelled because it has expired
    {{is_paused(w)}}     whether the workflow w releases no jobs until its pause ends
    {{is_set_aside(j)}}  whether the row j is set aside, because its kind is quarantined
    {{may_quarantine(q)}}  whether the org of the queue q has fewer than `kinds_max` quarantined kinds (a bound,
                         because routers remember all of them). Concurrent statements may exceed it by a few
    {{is_later(j)}}      whether the row j becomes visible later, by its time or at the end of its lease
    {{history_with_lost(j)}}  the history of row j, with an entry for its lease if no claim has noticed its expiry
    {{seen_history(j)}}  the history of row j, and the log of the attempt that has not ended (JobRecord.history)
    {{org_of(e)}}        the id of the org to which the queue e.queue_id belongs
    {{org_id_of(n)}}     the id of the org that must own row n: `orgs` is a list of names, and n.org_position is a
                         position in it; NULL means the first name
    {{retention_of(e)}}  the retention in days of jobs in the queue e.queue_id
    {{retention_default}}  the retention in days of jobs whose queue and org have none
    {{schedule_spec(s)}}  the columns of SPEC_COLUMNS in shard/schedule.py
    {{schedule_spec_values}}  schedule_spec as parameters
    {{template_columns}}  the columns of TEMPLATE_COLUMNS in shard/schedule.py
    {{template_values}}  template_columns as parameters
    {{template_content(s)}}  job_content of a new job of the schedule s
    {{schedule_record(s)}}  the columns of the schedule s that lookups and lists read, except the payload
    {{is_fired_here(s)}}  whether this shard owns the slot of the schedule s, and so fires it. OFFSET 0 makes Postgres
                         look up the org and the slot of each schedule by number, and never join the whole tables
    {{holds_snapshot(a)}}  whether the session a of pg_stat_activity holds a snapshot of this database. A vacuum does
                         not count, because its snapshot does not hold back other vacuums
    {{connections_max}}  how many connections ordinary roles may open on the server
    {{finish_time}}      the time at which a job finishes: now, but never before the latest recorded time. Otherwise, if
                         the clock was set back, a lookup by id would not find the job (shard/postgres/clock.py)

`{{job_content(e)}}` is a column list with each column qualified: `e.kind, e.payload, …`. A new column of JOB_CONTENT is
included in these lists without other changes, so every statement stores and moves the column. Claims return the column
if Claimed has a field of its name. Lookups and lists return it if JobRecord has a field of its name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from shard.job_record import JobRecord
from shard.queue_settings import GIVES_JOBS, SETTING_COLUMNS
from shard.schedule import SPEC_COLUMNS, TEMPLATE_COLUMNS
from shard.vocabulary import JOB_CONTENT, OF_SCHEDULES, OF_WORKFLOWS, REPORTED, RETENTION_DEFAULT, Claimed

_KEPT = (*JOB_CONTENT, *REPORTED, *OF_SCHEDULES, *OF_WORKFLOWS)
# The columns of _KEPT that are not texts, by their types.
_BINARY, _JSON, _NUMBERS = {"payload", "checkpoint"}, {"attributes", "retry", "progress"}, {"max_runtime_us"}
_CLAIMED = tuple(column for column in Claimed._fields if column in JOB_CONTENT)
_ANSWERED = tuple(column for column in JobRecord._fields if column in _KEPT)
_SETTINGS = tuple(f"{c.name}::text" if c.type == "jsonb" else c.name for c in SETTING_COLUMNS.values())
_BUT_HISTORY = (
    *("id", "queue_id", "enqueued_at", "run_at", "lease", "leased_at", "expires_at", "priority", "attempt"),
    *("max_attempts", *_KEPT, "worker"),
)
_COLUMN_LISTS = {
    "job_columns": (*_BUT_HISTORY, "history"),
    "columns_but_history": _BUT_HISTORY,
    "job_content": tuple(JOB_CONTENT),
    "kept_content": _KEPT,
    "new_job_values": tuple(f"{column}::jsonb" if column in _JSON else column for column in JOB_CONTENT),
    "claimed_content": tuple(f"{column}::text" if column in _JSON else column for column in _CLAIMED),
    "answer_columns": ("priority", "enqueued_at", "run_at", "expires_at", "attempt", "max_attempts", *_ANSWERED),
    "short_content": tuple(column for column in _ANSWERED if column not in _BINARY | _JSON),
    "setting_columns": tuple(column.name for column in SETTING_COLUMNS.values()),
    "queue_settings": _SETTINGS,
    "schedule_spec": tuple(SPEC_COLUMNS),
    "template_columns": TEMPLATE_COLUMNS,
    "schedule_record": (
        *("id::text", "name", *SPEC_COLUMNS),
        *(f"{name}::text" if name in _JSON else name for name in TEMPLATE_COLUMNS if name not in _BINARY),
        *("created_at", "paused_at", "next_at", "last_at", "last_job::text", "buffered"),
    ),
    # `kept` is the queue's retention or, if the queue has none, the org's retention.
    "effective_settings": tuple("kept" if column == "retention" else column for column in _SETTINGS),
}


def _type_of(column: str) -> str:
    kinds = {"bytea": _BINARY, "jsonb": _JSON, "bigint": _NUMBERS, "smallint": {"priority", "max_attempts"}}
    return next((type_ for type_, columns in kinds.items() if column in columns), "text")


_CANCELLED_RUN_AT = "CASE WHEN {0}.run_at = 'infinity' THEN now() ELSE {0}.run_at END"
# Also true for the job of an ordinary node whose expires_at equals its run_at. Such a job never runs either.
_AWAITS_SIGNAL = "({0}.workflow_node > '' AND {0}.expires_at = {0}.run_at)"
_EXPRESSIONS = {
    "cancelled_run_at": _CANCELLED_RUN_AT,
    "cancelled_columns": ", ".join(
        f"{_CANCELLED_RUN_AT} AS run_at" if column == "run_at" else f"{{0}}.{column}" for column in _BUT_HISTORY
    ),
    "unkeyed_content": ", ".join("NULL" if column == "live_key" else f"{{0}}.{column}" for column in _KEPT),
    "new_job_arrays": ", ".join(
        f"%({array})b::bytea[]"
        if column in _BINARY
        else f"%({array})s::bigint[]"
        if column in _NUMBERS
        else f"%({array})s::text[]"
        for column, array in JOB_CONTENT.items()
    ),
    "setting_arrays": ", ".join(f"%({name})s::text[]::{column.type}[]" for name, column in SETTING_COLUMNS.items()),
    "default_settings": ", ".join(f"{column.name} = {column.default}" for column in SETTING_COLUMNS.values()),
    "new_settings": ", ".join(
        f"coalesce(%({name})s::{column.type}, {column.default})" for name, column in SETTING_COLUMNS.items()
    ),
    "altered_settings": ", ".join(
        f"{column.name} = CASE WHEN '{name}' = ANY (%(reset)s::text[]) THEN {column.default} "
        f"ELSE coalesce(%({name})s::{column.type}, {{0}}.{column.name}) END"
        for name, column in SETTING_COLUMNS.items()
    ),
    "schedule_spec_values": ", ".join(
        f"timestamptz 'epoch' + %({name})s::bigint * interval '1 us'"
        if type_ == "timestamptz"
        else f"%({name})s::{type_}"
        for name, type_ in SPEC_COLUMNS.items()
    ),
    "template_values": ", ".join(f"%({name})s::{_type_of(name)}" for name in TEMPLATE_COLUMNS),
    "template_content": ", ".join(f"{{0}}.{name}" if name in TEMPLATE_COLUMNS else "NULL" for name in JOB_CONTENT),
    "claim_room": "(%(max_jobs)s::integer[])[source.grp]",
    "gives_jobs": GIVES_JOBS,
    "is_due": "({0}.visible_at <= now() OR {0}.visible_at = 'infinity' AND {0}.run_at < 'infinity')",
    "is_blocked": "{0}.run_at = 'infinity'",
    "awaits_signal": _AWAITS_SIGNAL,
    "expiry_reason": f"CASE WHEN {_AWAITS_SIGNAL} THEN 'no signal came in time' ELSE 'past its expires_at' END",
    # A workflow may end while it is paused. Then it still counts as paused if one of its callbacks waits for the end of
    # the pause.
    "is_paused": (
        "({0}.paused_at IS NOT NULL AND ({0}.ended_at IS NULL OR EXISTS "
        "(SELECT FROM windrow.workflow_node n WHERE n.flow = {0}.flow AND n.is_left AND n.state = 'due')))"
    ),
    "may_quarantine": (
        "(SELECT count(*) FROM (SELECT FROM windrow.queue o JOIN windrow.quarantine h ON h.queue_id = o.queue_id "
        "WHERE o.org = {0}.org LIMIT %(kinds_max)s) counted) < %(kinds_max)s"
    ),
    # This condition must be the same as in the index job_set_aside.
    "is_set_aside": (
        "NOT isfinite({0}.visible_at) AND isfinite({0}.run_at) "
        "AND ({0}.group_key IS NULL OR {0}.group_slot IS NOT NULL)"
    ),
    "is_later": "({0}.visible_at > now() AND {0}.visible_at < 'infinity')",
    "history_with_lost": (
        "CASE WHEN {0}.lease IS NULL THEN {0}.history ELSE windrow.remember({0}.history, {0}.attempt, {0}.worker, "
        "{0}.leased_at, {0}.visible_at, "
        "CASE WHEN {0}.visible_at >= {0}.leased_at + {0}.max_runtime_us * interval '1 us' THEN 'timed_out' "
        "ELSE 'expired' END, {0}.lease, NULL, {0}.log) END"
    ),
    "seen_history": (
        "CASE WHEN {0}.log IS NULL THEN {0}.history "
        "ELSE coalesce({0}.history, '[]') || jsonb_build_object('log', {0}.log) END"
    ),
    "org_of": "{}.queue_id & 4294967295",
    "org_id_of": "(SELECT windrow.org_ids(%(orgs)s::text[]))[coalesce({}.org_position, 1)]",
    "retention_of": (
        "coalesce((SELECT q.kept FROM windrow.queue q WHERE q.queue_id = {}.queue_id AND q.kept IS NOT NULL), "  # noqa: S608
        f"{RETENTION_DEFAULT})"
    ),
    "retention_default": str(RETENTION_DEFAULT),
    "is_fired_here": (
        "(SELECT w.state = 'owned' FROM (SELECT o.slot FROM windrow.org o WHERE o.org_id = {0}.org_id OFFSET 0) o "
        "CROSS JOIN LATERAL (SELECT w.state FROM windrow.owned_slot w WHERE w.slot = o.slot OFFSET 0) w)"
    ),
    "holds_snapshot": (
        "{0}.datname = current_database() AND {0}.pid <> pg_backend_pid() "
        "AND ({0}.backend_xmin IS NOT NULL OR {0}.backend_xid IS NOT NULL) "
        "AND NOT EXISTS (SELECT FROM pg_stat_progress_vacuum v WHERE v.pid = {0}.pid)"
    ),
    "connections_max": (
        "(current_setting('max_connections')::integer - current_setting('superuser_reserved_connections')::integer "
        "- coalesce(current_setting('reserved_connections', true)::integer, 0))"
    ),
    "finish_time": (
        "greatest(now(), (SELECT timestamptz 'epoch' + c.last_value * interval '1 us' FROM windrow.clock c))"
    ),
}
_INCLUDE = re.compile(r"\{\{(\w+)(?:\((\w+)\))?\}\}")
_WRITES = re.compile(rb"\b(?:INSERT INTO|UPDATE|DELETE FROM) windrow\.")


class Statement(bytes):
    """One SQL statement, and how it may be run."""

    # Traces use it as the name of the operation.
    name: str
    # The name of the statement's file. The file's name differs from `name` if several statements come from one file.
    file: str
    # True if the statement may run again after a lost connection, when nobody knows whether the first run committed.
    # Most statements may: they name the ids or the lease that they change. The answer of the second run must be as good
    # as the answer of the first run. So either a statement returns the new state, and not what it has changed, or its
    # caller checks Rows.ran_before (shard/postgres/pool.py). If the answer of the first run is lost, only hints
    # (Database.hints_lost) and counts for reports may be lost with it.
    repeatable: bool
    # True if the statement waits only briefly for a lock. If it does not get the lock, it changes nothing, and the
    # caller gets RowLocked. Statements that serve calls of several orgs at once have this flag. After RowLocked, their
    # callers find out which rows are locked (shard/queue/row_locks.py). Statements that would delay such statements by
    # their own locks have the flag too.
    short_lock_wait: bool
    # True if the statement must not scan tables, not even in a Database with `may_scan`. With a LIMIT, the planner may
    # choose a scan, because it assumes that the rows of an org are spread over the whole table. But all of them may be
    # at the end of the table.
    indexed: bool
    # True if the statement writes to tables, and its writes must not be lost with the server.
    writes: bool


def load(
    folder: Path,
    name: str,
    *,
    repeatable: bool = True,
    short_lock_wait: bool = False,
    indexed: bool = False,
    hint: bool = False,
    file: str | None = None,
    includes: Mapping[str, str] | None = None,
) -> Statement:
    """Reads `folder`/`name`.sql, or `folder`/`file`.sql, and expands its includes. Removes comments, because psycopg
    caches the parsed form of a statement only if the statement has at most 4,096 bytes. With `hint`, the writes of the
    statement may be lost with the server, so they do not count as writes (Statement.writes). `includes` has texts for
    includes of this statement that differ from the usual texts. Raises KeyError for an unknown include."""
    file = file or name
    lines = (folder / f"{file}.sql").read_text().splitlines()
    text = "\n".join(bare for line in lines if not (bare := line.strip()).startswith("--"))
    for include, other in (includes or {}).items():
        text = text.replace(f"{{{{{include}}}}}", other)
    statement = Statement(_INCLUDE.sub(_expand, text).encode())
    statement.name = name
    statement.file = file
    statement.repeatable = repeatable
    statement.short_lock_wait = short_lock_wait
    statement.indexed = indexed
    statement.writes = not hint and _WRITES.search(statement) is not None
    return statement


def _expand(include: re.Match[str]) -> str:
    name, alias = include.groups()
    if name in _EXPRESSIONS:
        return _EXPRESSIONS[name].format(alias)
    return ", ".join(f"{alias}.{column}" if alias else column for column in _COLUMN_LISTS[name])
