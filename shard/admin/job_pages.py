"""Lists an org's jobs page by page, by key and never by offset. Lists the jobs of one shard, and merges the pages of
several shards.

If the newest job comes first, the key is the id. A job's id never changes, so its position stays the same in every
state and on every shard. A page has one or more ranges of ids. One statement reads all jobs of a range, as they were at
one moment. So no job is missed, and no job is on two pages. In the order in which jobs will be claimed, the key is
(priority, visible_at, id). This key changes with every lease, so a job may be on two pages.
"""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple, TypeAlias, cast
from uuid import UUID

from shard.admin import statements
from shard.errors import BadPageToken
from shard.job_id import is_uuid
from shard.job_record import ANSWER_BYTES_MAX, JobRecord
from shard.postgres import arrays
from shard.postgres.pool import Database
from shard.vocabulary import LIVE, JobState, Micros, OrgId, QueueId, QueueName, ShardName, Slot

# (id,), or (priority, visible_at, id).
Key: TypeAlias = tuple[object, ...]

_MICROS_MAX = 2**62
# The latest time that a datetime can hold, which is well within the range of ids.
_MS_MAX = 253_402_300_799_999
_LAST_UUID = "ffffffff-ffff-ffff-ffff-ffffffffffff"
_FIRST_UUID = "00000000-0000-0000-0000-000000000000"
_HOUR_MS = 3_600_000
_DAY_MS = 24 * _HOUR_MS
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
# How far the clock that times a job's end may be behind the clock that made the job's id.
_CLOCKS_MS = 2 * _HOUR_MS
# A search goes through the ids in ranges, by the time at which the ids were made. Each range is longer than the range
# before. A short range is usually enough for a full page, and then older days are not read. If jobs are sparse, the
# search reads several ranges; after _SEARCH_S_MAX the page ends early.
_RANGE_MS, _RANGE_GROWTH = _HOUR_MS, 8
_SEARCH_S_MAX = 1.0
# Conditions may match few of an org's jobs, or none, and no index finds the jobs that match. A search by conditions
# begins with longer ranges, but no range has more than about _SCAN_ROWS jobs. If a range has that many, its page ends
# after _SCAN_S_MAX, so that a search of a million jobs takes many short calls
# (docs/decisions/0033-attributes-have-no-index.md). A small org has no such range, so its pages are full, however busy
# the machine is.
_SCAN_RANGE_MS = _DAY_MS
_SCAN_ROWS = 5_000
# The first range of a page has at most _SCAN_FIRST jobs for each job of a full page, which is often enough. The share
# of matches in a range tells how long the next range must be to find the missing jobs. The next range is made
# _SCAN_MARGIN times longer than that, because beginning another range costs as much as looking at some thousand jobs.
_SCAN_FIRST, _SCAN_MARGIN = 20, 4
_SCAN_S_MAX = 0.020


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Which jobs of an org to list. A field that is None or empty matches all jobs. `made_after` (inclusive) and
    `made_before` (exclusive) are compared with the times in job ids."""

    org: OrgId
    queue: QueueName | None = None
    # List only jobs in this state. With a queue, a live state and no attributes, the list is in the order in which jobs
    # will be claimed.
    state: JobState | None = None
    # If this is not empty, it replaces `state`: jobs in any of these states are listed, the newest first.
    states: frozenset[JobState] = frozenset()
    kind: str = ""
    made_after: Micros | None = None
    made_before: Micros | None = None
    # The attributes that a job must have, as JSON. None matches all jobs.
    attributes: str | None = None
    include_payload: bool = False

    @property
    def all_states(self) -> frozenset[JobState]:
        """The states in which a job is listed."""
        return self.states or frozenset(JobState if self.state is None else (self.state,))

    @property
    def newest_first(self) -> bool:
        """Whether the newest job comes first. Otherwise the list is in the order in which jobs will be claimed."""
        return self.queue is None or self.state not in LIVE or self.attributes is not None

    @property
    def has_conditions(self) -> bool:
        """Whether there are conditions, so that the search also reads jobs of the org that do not match."""
        return bool(self.queue or self.state or self.states or self.kind) or self.attributes is not None

    @property
    def first_id(self) -> str:
        return _FIRST_UUID if self.made_after is None else _made_at(-(-self.made_after // 1000))

    @property
    def past_id(self) -> str:
        return _LAST_UUID if self.made_before is None else _made_at(-(-self.made_before // 1000))


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    jobs: list[JobRecord]
    # The key of each job.
    keys: list[Key]
    # The page is complete up to this key, which is the key of the last job or comes after it. None: it is the last
    # page.
    until: Key | None

    @property
    def next_token(self) -> str:
        """The token of the next page; empty on the last page."""
        return "" if self.until is None else pack(*self.until)


class Listed(NamedTuple):
    """One job of a page that was merged from several shards."""

    shard: ShardName
    job: JobRecord
    key: Key


def merged(
    pages: Sequence[tuple[ShardName, Page]], *, page_size: int, newest_first: bool
) -> tuple[list[Listed], Key | None]:
    """Merges pages of several shards, which all begin at the same place of the list, into one page. Returns the jobs of
    this page and the key up to which it is complete (None: to the end). Pass the shards in the order in which jobs
    move: if a job is on two of these pages, the later shard is right."""
    ends = [page.until for _, page in pages if page.until is not None]
    # The merged page is complete only up to the end of the page that ends first.
    end = (max if newest_first else min)(ends, key=_sortable) if ends else None
    by_id: dict[str, Listed] = {}
    for shard, page in pages:
        for job, key in zip(page.jobs, page.keys, strict=True):
            by_id[job.id] = Listed(shard, job, key)
    found = sorted(by_id.values(), key=lambda listed: _sortable(listed.key), reverse=newest_first)
    if end is not None:
        last = _sortable(end)
        found = [
            listed
            for listed in found
            if (_sortable(listed.key) >= last if newest_first else _sortable(listed.key) <= last)
        ]
    if len(found) > page_size:
        return found[:page_size], found[page_size - 1].key
    return found, end


def _sortable(key: Key) -> Any:
    # The keys of a list can be compared with each other, because their parts have the same types.
    return key


class OrgLookup(NamedTuple):
    """What is read about an org before its jobs are listed, in the order of find_listed.sql's columns."""

    now: Micros
    # The beginning of the oldest cold day. None: there is no cold day.
    oldest_cold: Micros | None
    org_id: int
    slot: Slot
    queue_ids: list[QueueId]


async def page(database: Database, wanted: Wanted, *, page_size: int, page_token: str) -> Page:
    """Returns the next page of one shard's jobs. The page ends early with the job that fills ANSWER_BYTES_MAX, or when
    the search takes long. Raises BadPageToken, ShardUnavailable."""
    after = unpack(page_token, newest_first=wanted.newest_first) if page_token else None
    org_lookup = await look_up(database, wanted)
    if org_lookup is None:
        return Page(jobs=[], keys=[], until=None)
    parameters = search_parameters(wanted, org_lookup) | {"include_payload": wanted.include_payload}
    if not wanted.newest_first:
        return await _in_claim_order(database, wanted, org_lookup, parameters, after, page_size=page_size)
    return await _newest_first(database, wanted, org_lookup, parameters, after, page_size=page_size)


async def look_up(database: Database, wanted: Wanted) -> OrgLookup | None:
    """Reads what a list must know about the org. Returns None if this shard has no such org or queue."""
    rows = await database.run(statements.FIND_LISTED, {"org": wanted.org, "queue": wanted.queue or ""})
    found = OrgLookup._make(rows[0]) if rows else None
    return found if found is not None and found.queue_ids else None


def search_parameters(wanted: Wanted, org_lookup: OrgLookup) -> dict[str, object]:
    return {
        "org": wanted.org,
        "slot": org_lookup.slot,
        "states": arrays.plain(state.value for state in wanted.all_states),
        "kind": wanted.kind,
        "attributes": wanted.attributes,
        "queue": wanted.queue or "",
        "org_id": org_lookup.org_id,
        "queue_ids": arrays.numbers(org_lookup.queue_ids),
    }


async def scan_range(
    database: Database, parameters: dict[str, object], first_id: str, below: str, *, rows: int
) -> tuple[str, str]:
    """Returns the beginning and the end of a range of ids. Each table has at most about `rows` jobs of the org in the
    range, and no jobs of the org between the end of the range and `below`."""
    bounds = {"from_id": first_id, "before_id": below, "since": finished_since(first_id), "rows": rows}
    ((end, newest),) = cast(
        "list[tuple[str | None, str | None]]", await database.run(statements.FIND_SCAN_RANGE, {**parameters, **bounds})
    )
    return end or first_id, first_id if newest is None else min(below, _next_id(newest))


def finished_since(from_id: str) -> datetime:
    """Returns the earliest time at which a job with this id, or with a later id, can have finished."""
    return _EPOCH + timedelta(milliseconds=_made_ms(from_id) - _CLOCKS_MS)


async def _in_claim_order(
    database: Database,
    wanted: Wanted,
    org_lookup: OrgLookup,
    parameters: dict[str, object],
    after: Key | None,
    *,
    page_size: int,
) -> Page:
    parameters |= {
        "state": cast("JobState", wanted.state).value,
        "queue_id": org_lookup.queue_ids[0],
        "from_id": wanted.first_id,
        "before_id": wanted.past_id,
        "rows": page_size + 1,
        "bytes_max": ANSWER_BYTES_MAX,
    }
    parameters.update(zip(("after_priority", "after_us", "after_id"), after or (0, 0, _FIRST_UUID), strict=True))
    rows = (await database.run(statements.LIST_LIVE, parameters))[:page_size]
    jobs = [JobRecord(*row[:-2]) for row in rows]
    keys: list[Key] = [(job.priority, row[-2], job.id) for job, row in zip(jobs, rows, strict=True)]
    more = bool(rows) and rows[0][-1] > len(jobs)
    return Page(jobs=jobs, keys=keys, until=keys[-1] if more else None)


async def _newest_first(
    database: Database,
    wanted: Wanted,
    org_lookup: OrgLookup,
    parameters: dict[str, object],
    after: Key | None,
    *,
    page_size: int,
) -> Page:
    now_ms = org_lookup.now // 1000
    # A range that reaches further back than this time is extended to the beginning, so that one statement reads all
    # older days.
    oldest_ms = now_ms - _DAY_MS if org_lookup.oldest_cold is None else org_lookup.oldest_cold // 1000
    first_id, below = wanted.first_id, wanted.past_id
    if after is not None:
        (last_id,) = after
        below = min(below, cast("str", last_id))
    jobs: list[JobRecord] = []
    bytes_left = ANSWER_BYTES_MAX
    range_ms = _SCAN_RANGE_MS if wanted.has_conditions else _RANGE_MS
    began_s, search_s_max = time.monotonic(), _SEARCH_S_MAX
    scan_rows = min(_SCAN_ROWS, _SCAN_FIRST * page_size)
    until: Key | None = None
    while first_id < below:
        from_id = _made_at(min(_made_ms(below), now_ms) - range_ms)
        if from_id <= first_id or _made_ms(from_id) <= oldest_ms:
            from_id = first_id
        range_ms *= _RANGE_GROWTH
        before_id = below
        if wanted.has_conditions:
            end, before_id = await scan_range(database, parameters, from_id, below, rows=scan_rows)
            if end != from_id:
                from_id, range_ms = end, _SCAN_RANGE_MS
                if scan_rows == _SCAN_ROWS:
                    search_s_max = _SCAN_S_MAX
        # A full page gets no more jobs, but the search must still find out whether it is the last page.
        missing = 0 if bytes_left <= 0 else page_size - len(jobs)
        rows = await database.run(
            statements.LIST_JOBS,
            {
                **parameters,
                "from_id": from_id,
                "before_id": before_id,
                "since": finished_since(from_id),
                "rows": missing + 1,
                "bytes_max": bytes_left if missing else 1,
            },
        )
        jobs += [JobRecord(*row[:-2]) for row in rows[:missing]]
        if rows and rows[0][-1] > min(len(rows), missing):
            until = (jobs[-1].id,)
            break
        below = from_id
        if rows:
            bytes_left -= rows[-1][-2]
            scan_rows = min(_SCAN_ROWS, _SCAN_MARGIN * (page_size - len(jobs) + 1) * scan_rows // len(rows))
        else:
            scan_rows = _SCAN_ROWS
        if below > first_id and time.monotonic() - began_s > search_s_max:
            until = (below,)
            break
    return Page(jobs=jobs, keys=[(job.id,) for job in jobs], until=until)


def _made_at(ms: int) -> str:
    """Returns the least id that can have been made at this time."""
    digits = f"{min(max(ms, 0), _MS_MAX):012x}"
    return f"{digits[:8]}-{digits[8:]}{_FIRST_UUID[13:]}"


def _next_id(job_id: str) -> str:
    return str(UUID(int=min(UUID(job_id).int + 1, UUID(_LAST_UUID).int)))


def _made_ms(job_id: str) -> int:
    return int(job_id[:8] + job_id[9:13], 16)


def pack(*key: object) -> str:
    return base64.urlsafe_b64encode(json.dumps(key).encode()).decode()


def unpack(token: str, *, newest_first: bool) -> Key:
    """Returns the key in a page token, which a caller may have forged. Raises BadPageToken."""
    try:
        key: Any = json.loads(base64.urlsafe_b64decode(token.encode()))
    except (ValueError, RecursionError) as error:
        raise BadPageToken(token) from error
    fits = (_is_uuid,) if newest_first else (_is_priority, _is_micros, _is_uuid)
    if not isinstance(key, list) or len(parts := cast("list[object]", key)) != len(fits):
        raise BadPageToken(token)
    if not all(fit(part) for fit, part in zip(fits, parts, strict=True)):
        raise BadPageToken(token)
    return tuple(parts)


def _is_uuid(part: object) -> bool:
    return isinstance(part, str) and is_uuid(part)


def _is_priority(part: object) -> bool:
    return type(part) is int and 0 <= part <= 9


def _is_micros(part: object) -> bool:
    return type(part) is int and 0 <= part <= _MICROS_MAX
