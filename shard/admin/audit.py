"""The audit log: who changed what, when, and how it ended. It is in the catalog's database, and that database's clock
says when.

A change has one row, which is written before the change begins; its outcome is added afterwards. If the row cannot be
written, the change must not be made. Reads of the whole cluster are counted, in one row for each caller and minute. The
rows hold no payloads, no values of attributes and no secrets: whoever makes an entry leaves them out.
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
# Upper bounds: for all texts of an entry together, its request included, and for each text.
ENTRY_BYTES_MAX = 1024
_TEXT_BYTES_MAX = 200
# Stands for a field of a request for which an entry has no room.
LEFT_OUT = "…"


class Intent(NamedTuple):
    """A change that is about to be made."""

    id: str
    principal: str
    peer: str
    # A method of the contract, or a command.
    method: str
    # Empty: it is about no single org or queue.
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
    # JSON; None if there is nothing to say.
    request: str | None
    # None: the outcome is not known.
    ended_at: Micros | None
    outcome: str | None
    counts: str | None
    calls: int
    # The name of the API key that called; None if it was none.
    key_name: str | None


def intent(
    *, principal: str, peer: str, method: str, org: str = "", queue: str = "", request: Mapping[str, object]
) -> Intent:
    """Returns an intent with an id of its own. Long texts are cut, and of a long request the longest fields are left
    out: an entry has at most ENTRY_BYTES_MAX."""
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
            # There is no room even for the names.
            return {}
        kept[longest] = LEFT_OUT
    return kept


def _bytes_of(value: object) -> int:
    return len(json.dumps(value, ensure_ascii=False).encode(errors="replace"))


def days_of(cluster: Cluster) -> int:
    """Returns for how many days entries are kept: `days` of the table [audit]. Raises ClusterFileError."""
    table, where = cluster.tables.get("audit", {}), f"{cluster.source}: [audit]"
    known_keys(table, {"days"}, where=where)
    days = table.get("days", DAYS_DEFAULT)
    if isinstance(days, bool) or not isinstance(days, int) or not 1 <= days <= _DAYS_MAX:
        raise ClusterFileError(f"{where} days: must be a whole number from 1 to {_DAYS_MAX}, not {days!r}")
    return days


def is_on(cluster: Cluster) -> bool:
    """Whether the cluster keeps an audit log: if its file has the table [auth] or [audit]."""
    return not {"auth", "audit"}.isdisjoint(cluster.tables)


async def begin(catalog: Database, intents: Sequence[Intent]) -> None:
    """Writes intents down. Raises ShardUnavailable: then none of the changes may be made."""
    await catalog.run(statements.BEGIN_AUDIT, {"entries": _json(intents)})


async def end(catalog: Database, ends: Sequence[End]) -> None:
    """Writes outcomes down. Raises ShardUnavailable."""
    await catalog.run(statements.END_AUDIT, {"ends": _json(ends)})


async def record_reads(catalog: Database, reads: Mapping[Read, int]) -> None:
    """Adds reads, each with how many there were. Raises ShardUnavailable."""
    rows = [{**read._asdict(), "calls": calls} for read, calls in reads.items()]
    await catalog.run(statements.RECORD_READS, {"reads": json.dumps(rows)})


async def newest(
    catalog: Database, *, org: str | None, principal: str | None, method: str | None, since: Micros, limit: int
) -> list[Entry]:
    """Returns the newest entries that match, the newest first. `method` matches a part of the name. Raises
    ShardUnavailable."""
    rows = await catalog.run(
        statements.LIST_AUDIT,
        {"org": org, "principal": principal, "method": method, "since_us": since, "rows": limit},
    )
    return [Entry._make(row) for row in rows]


async def forget(catalog: Database, *, days: int) -> int:
    """Deletes up to 1,000 entries that are older than `days`, and returns how many. Raises ShardUnavailable."""
    return len(await catalog.run(statements.FORGET_AUDIT, {"days": days}))


def _json(rows: Sequence[Any]) -> str:
    return json.dumps([row._asdict() for row in rows])
