"""Lists of an org's jobs, a page at a time, by key and never by offset: one shard's, and several shards' as one.

Newest first, the key is the id, which no job ever changes: whatever state it goes to, and wherever, its place stays. So
each page has all jobs of a stretch of ids as they were at one moment, and no job is on two pages. In the order in which
jobs will be claimed the key is (priority, visible_at, id): that changes with every lease, and so may bring a job twice.
"""

from __future__ import annotations

import base64
import json
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple, TypeAlias, cast

from shard import arrays, statements
from shard.database import Database
from shard.errors import BadPageToken
from shard.records import ANSWER_BYTES_MAX, JobRecord
from shard.vocabulary import LIVE, JobState, Micros, OrgId, QueueId, QueueName, ShardName, Slot

# (id,), or (priority, visible_at, id).
Key: TypeAlias = tuple[object, ...]

_UUID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_MICROS_MAX = 2**62
# The last that a datetime has, well within what an id can tell.
_MS_MAX = 253_402_300_799_999
_LAST_UUID = "ffffffff-ffff-ffff-ffff-ffffffffffff"
_FIRST_UUID = "00000000-0000-0000-0000-000000000000"
_HOUR_MS = 3_600_000
_DAY_MS = 24 * _HOUR_MS
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
# A job may finish by another clock than the one that its id was made by.
_CLOCKS_MS = 2 * _HOUR_MS
# Ids are looked through in stretches of the time at which they were made, each longer than the one before: for a full
# page a short one will do, and leaves older days alone. What is sparse takes several, and a page ends after so long.
_STRETCH_MS, _LONGER = _HOUR_MS, 8
_LOOK_S_MAX = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Which jobs of an org a list is of; None and empty: all. `made_after` (or at that time) and `made_before`: by the
    times that ids carry."""

    org: OrgId
    queue: QueueName | None = None
    state: JobState | None = None
    kind: str = ""
    made_after: Micros | None = None
    made_before: Micros | None = None
    include_payload: bool = False

    @property
    def newest_first(self) -> bool:
        """Else in the order in which they will be claimed."""
        return self.queue is None or self.state not in LIVE

    @property
    def first_id(self) -> str:
        return _FIRST_UUID if self.made_after is None else _made_at(-(-self.made_after // 1000))

    @property
    def past_id(self) -> str:
        return _LAST_UUID if self.made_before is None else _made_at(-(-self.made_before // 1000))


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    jobs: list[JobRecord]
    # Of each job.
    keys: list[Key]
    # It has all that there is up to this key, which the last job has, or none; None: all to the end.
    until: Key | None

    @property
    def next_token(self) -> str:
        """Empty on the last page."""
        return "" if self.until is None else pack(*self.until)


class Listed(NamedTuple):
    """One job of a page that several shards have a part in."""

    shard: ShardName
    job: JobRecord
    key: Key


def merged(
    pages: Sequence[tuple[ShardName, Page]], *, page_size: int, newest_first: bool
) -> tuple[list[Listed], Key | None]:
    """One page of several shards' that begin at the same place, and the key up to which it is whole, None: to the end.
    The shards come in the order in which jobs travel: of a job that two of them know the last one is right."""
    ends = [page.until for _, page in pages if page.until is not None]
    # The order of keys: what is no further than the nearest end is whole.
    end = (max if newest_first else min)(ends, key=_sortable) if ends else None
    by_id: dict[str, Listed] = {}
    for shard, page in pages:
        for job, key in zip(page.jobs, page.keys, strict=True):
            by_id[job.id] = Listed(shard, job, key)
    found = sorted(by_id.values(), key=lambda one: _sortable(one.key), reverse=newest_first)
    if end is not None:
        last = _sortable(end)
        found = [one for one in found if (_sortable(one.key) >= last if newest_first else _sortable(one.key) <= last)]
    if len(found) > page_size:
        return found[:page_size], found[page_size - 1].key
    return found, end


def _sortable(key: Key) -> Any:
    # Keys of one list are alike, part by part.
    return key


class _Place(NamedTuple):
    """What is known of an org before its jobs are listed, in the order of find_listed.sql's columns."""

    now: Micros
    # When the oldest cold day began.
    oldest_cold: Micros | None
    org_id: int
    slot: Slot
    queue_ids: list[QueueId]


async def page(database: Database, wanted: Wanted, *, page_size: int, page_token: str) -> Page:
    """The next page of one shard's; it ends early with the job that fills ANSWER_BYTES_MAX, or where it takes long.
    Raises BadPageToken, ShardUnavailable."""
    after = unpack(page_token, newest_first=wanted.newest_first) if page_token else None
    rows = await database.run(statements.FIND_LISTED, {"org": wanted.org, "queue": wanted.queue or ""})
    if not rows or not (place := _Place._make(rows[0])).queue_ids:
        return Page(jobs=[], keys=[], until=None)
    parameters: dict[str, object] = {
        "org": wanted.org,
        "slot": place.slot,
        "state": "" if wanted.state is None else wanted.state.value,
        "kind": wanted.kind,
        "include_payload": wanted.include_payload,
    }
    if not wanted.newest_first:
        return await _in_claim_order(database, wanted, place, parameters, after, page_size=page_size)
    parameters |= {"queue": wanted.queue or "", "org_id": place.org_id, "queue_ids": arrays.numbers(place.queue_ids)}
    return await _newest_first(database, wanted, place, parameters, after, page_size=page_size)


async def _in_claim_order(
    database: Database,
    wanted: Wanted,
    place: _Place,
    parameters: dict[str, object],
    after: Key | None,
    *,
    page_size: int,
) -> Page:
    parameters |= {
        "queue_id": place.queue_ids[0],
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
    place: _Place,
    parameters: dict[str, object],
    after: Key | None,
    *,
    page_size: int,
) -> Page:
    now_ms = place.now // 1000
    # Whoever looks further back looks into all days there are.
    oldest_ms = now_ms - _DAY_MS if place.oldest_cold is None else place.oldest_cold // 1000
    first_id, below = wanted.first_id, wanted.past_id
    if after is not None:
        (name,) = after
        below = min(below, cast("str", name))
    jobs: list[JobRecord] = []
    bytes_left, stretch_ms = ANSWER_BYTES_MAX, _STRETCH_MS
    began_s = time.monotonic()
    until: Key | None = None
    while first_id < below:
        from_id = _made_at(min(_made_ms(below), now_ms) - stretch_ms)
        if from_id <= first_id or _made_ms(from_id) <= oldest_ms:
            from_id = first_id
        # To a full page nothing is added; whether it is the last one is yet to be known.
        wish = 0 if bytes_left <= 0 else page_size - len(jobs)
        rows = await database.run(
            statements.LIST_JOBS,
            {
                **parameters,
                "from_id": from_id,
                "before_id": below,
                "since": _EPOCH + timedelta(milliseconds=_made_ms(from_id) - _CLOCKS_MS),
                "rows": wish + 1,
                "bytes_max": bytes_left if wish else 1,
            },
        )
        jobs += [JobRecord(*row[:-2]) for row in rows[:wish]]
        if rows and rows[0][-1] > min(len(rows), wish):
            until = (jobs[-1].id,)
            break
        below = from_id
        if rows:
            bytes_left -= rows[-1][-2]
        if below > first_id and time.monotonic() - began_s > _LOOK_S_MAX:
            until = (below,)
            break
        stretch_ms *= _LONGER
    return Page(jobs=jobs, keys=[(job.id,) for job in jobs], until=until)


def _made_at(ms: int) -> str:
    """The least id that can have been made then."""
    digits = f"{min(max(ms, 0), _MS_MAX):012x}"
    return f"{digits[:8]}-{digits[8:]}{_FIRST_UUID[13:]}"


def _made_ms(job_id: str) -> int:
    return int(job_id[:8] + job_id[9:13], 16)


def pack(*key: object) -> str:
    return base64.urlsafe_b64encode(json.dumps(key).encode()).decode()


def unpack(token: str, *, newest_first: bool) -> Key:
    """The key in a token. A caller may have made it up. Raises BadPageToken."""
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
    return isinstance(part, str) and _UUID.fullmatch(part) is not None


def _is_priority(part: object) -> bool:
    return type(part) is int and 0 <= part <= 9


def _is_micros(part: object) -> bool:
    return type(part) is int and 0 <= part <= _MICROS_MAX
