"""The audit log: who changed what, when, and how the change ended. The log is in the catalog's database, and the times
are those of that database's clock.

Each change has one row. The row is written before the change begins, and the outcome of the change is added to it
afterwards. If the row cannot be written, the change must not be made. Reads of the whole cluster are counted, in one
row for each minute, caller, method and outcome. The rows hold no payloads, no values of attributes and no secrets: the
code that makes an entry leaves all of these out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from uuid import uuid4

from shard.admin import statements
from shard.placement.cluster_file import Cluster, ClusterFileError, known_keys
from shard.postgres.pool import Database
from shard.vocabulary import Micros

DAYS_DEFAULT = 90
_DAYS_MAX = 3650
# Upper bounds for the bytes of all texts of an entry together, including the request, and for the bytes of a text that
# `fit` has cut.
ENTRY_BYTES_MAX = 1024
_TEXT_BYTES_MAX = 200
# Replaces the value of a request's field if the entry has no room for the value.
LEFT_OUT = "…"


class Intent(NamedTuple):
    """A change that is about to be made."""

    id: str
    principal: str
    peer: str
    # A gRPC method, or a command.
    method: str
    # Empty: the change is not about a single org or queue.
    org: str
    queue: str
    # The other fields of the request, as JSON.
    request: Mapping[str, object]


class End(NamedTuple):
    """How a change ended."""

    id: str
    # OK, or a status code and a reason.
    outcome: str
    counts: Mapping[str, int]


class Read(NamedTuple):
    """A call that read something of the whole cluster."""

    principal: str
    peer: str
    method: str
    outcome: str


class Entry(NamedTuple):
    """An entry of the log, in the order of the columns of list_audit.sql."""

    id: str
    at: Micros
    principal: str
    peer: str
    method: str
    org: str | None
    queue: str | None
    # JSON. None: the entry counts reads.
    request: str | None
    # None: the outcome is not known.
    ended_at: Micros | None
    outcome: str | None
    counts: str | None
    calls: int
    # The name of the API key with which the call was made. None: the call was made without an API key.
    key_name: str | None


def intent(
    *, principal: str, peer: str, method: str, org: str = "", queue: str = "", request: Mapping[str, object]
) -> Intent:
    """Returns an intent with a new id. Cuts long texts, and leaves out the longest fields of a long request, so that an
    entry has at most ENTRY_BYTES_MAX."""
    texts = (str(uuid4()), fit(principal), fit(peer), method, org, queue)
    room = ENTRY_BYTES_MAX - sum(len(text.encode(errors="replace")) for text in texts)
    return Intent(*texts, _fitting(request, room))


def fit(text: str) -> str:
    """Cuts a text, and replaces what Postgres cannot store."""
    start = text[:_TEXT_BYTES_MAX].replace("\0", "\ufffd").encode(errors="replace")
    return start[:_TEXT_BYTES_MAX].decode(errors="ignore")


def _fitting(request: Mapping[str, object], room: int) -> Mapping[str, object]:
    kept = dict(request)
    while _bytes_of(kept) > room:
        longest = max(kept, key=lambda name: _bytes_of(kept[name]))
        if kept[longest] == LEFT_OUT:
            # All values are left out, and there is no room even for the names.
            return {}
        kept[longest] = LEFT_OUT
    return kept


def _bytes_of(value: object) -> int:
    return len(json.dumps(value, ensure_ascii=False).encode(errors="replace"))


def days_of(cluster: Cluster) -> int:
    """Returns the number of days for which entries are kept: `days` in the table [audit] of the cluster file. Raises
    ClusterFileError."""
    table, where = cluster.tables.get("audit", {}), f"{cluster.source}: [audit]"
    known_keys(table, {"days"}, where=where)
    days = table.get("days", DAYS_DEFAULT)
    if isinstance(days, bool) or not isinstance(days, int) or not 1 <= days <= _DAYS_MAX:
        raise ClusterFileError(f"{where} days: must be a whole number from 1 to {_DAYS_MAX}, not {days!r}")
    return days


def is_on(cluster: Cluster) -> bool:
    """Returns whether the cluster keeps an audit log. It does if its cluster file has the table [auth] or [audit]."""
    return not {"auth", "audit"}.isdisjoint(cluster.tables)


async def begin(catalog: Database, intents: Sequence[Intent]) -> None:
    """Records the intents in the log. Raises ShardUnavailable; then the caller must not make any of the changes."""
    await catalog.run(statements.BEGIN_AUDIT, {"entries": _json(intents)})


async def end(catalog: Database, ends: Sequence[End]) -> None:
    """Records the outcomes in the log. Raises ShardUnavailable."""
    await catalog.run(statements.END_AUDIT, {"ends": _json(ends)})


async def record_reads(catalog: Database, reads: Mapping[Read, int]) -> None:
    """Adds reads to the log, each with the number of calls. Raises ShardUnavailable."""
    rows = [{**read._asdict(), "calls": calls} for read, calls in reads.items()]
    await catalog.run(statements.RECORD_READS, {"reads": json.dumps(rows)})


async def newest(
    catalog: Database, *, org: str | None, principal: str | None, method: str | None, since: Micros, limit: int
) -> list[Entry]:
    """Returns the newest entries that match, the newest first. `method` matches every method whose name contains this
    text. Raises ShardUnavailable."""
    rows = await catalog.run(
        statements.LIST_AUDIT,
        {"org": org, "principal": principal, "method": method, "since_us": since, "rows": limit},
    )
    return [Entry._make(row) for row in rows]


async def forget(catalog: Database, *, days: int) -> int:
    """Deletes up to 1,000 entries that are older than `days` days. Returns how many entries were deleted. Raises
    ShardUnavailable."""
    return len(await catalog.run(statements.FORGET_AUDIT, {"days": days}))


def _json(rows: Sequence[Any]) -> str:
    return json.dumps([row._asdict() for row in rows])
