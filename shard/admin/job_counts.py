"""Counts an org's jobs that meet conditions, in parts. Counts on one shard, and merges the counts of several shards.

Each part has all jobs of one or more ranges of ids. One statement counts the jobs of a range, as they were at one
moment. The part with the newest jobs comes first, as with the pages of job_pages.py. A job's id never changes, so no
job is counted in two parts.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from uuid import UUID

from shard.admin import job_pages, statements
from shard.admin.job_pages import Wanted
from shard.postgres.pool import Database
from shard.vocabulary import JobState, Micros

# A part reads ranges of about _ROWS jobs, and ends after _S_MAX, because other lists and counts wait for it.
_ROWS = 10_000
_S_MAX = 0.040
_ID_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedCount(Wanted):
    """Which jobs of an org to count. Only dead jobs can meet the conditions that this class adds."""

    died_after: Micros | None = None
    died_before: Micros | None = None
    not_killed: bool = False

    @property
    def all_states(self) -> frozenset[JobState]:
        # Do not use super(): `dataclass(slots=True)` makes a second class, and super() would look for the first class.
        states = self.states or frozenset(JobState)
        only_dead = self.not_killed or self.died_after is not None or self.died_before is not None
        return states & {JobState.DEAD} if only_dead else states


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    count: int
    # The ids of the jobs, if they were asked for.
    ids: bytes
    # The part has all jobs down to this id. None: it is the last part.
    until: str | None

    @property
    def next_token(self) -> str:
        """The token of the next part; empty after the last part."""
        return "" if self.until is None else job_pages.pack(self.until)


def merged(parts: Sequence[Part]) -> Part:
    """Merges the parts of several shards into one part. The parts must begin at the same id, and must have the ids of
    their jobs. A job that is on two shards, because it moves, is counted once."""
    if len(parts) == 1:
        return parts[0]
    # The merged part has all jobs only down to the highest `until` of the parts.
    until = max((part.until for part in parts if part.until is not None), default=None)
    least = b"" if until is None else UUID(until).bytes
    ids = {
        job_id
        for part in parts
        for at in range(0, len(part.ids), _ID_BYTES)
        if (job_id := part.ids[at : at + _ID_BYTES]) >= least
    }
    return Part(count=len(ids), ids=b"", until=until)


async def count(database: Database, wanted: WantedCount, *, page_token: str, with_ids: bool) -> Part:
    """Returns the next part of one shard's count. Raises BadPageToken, ShardUnavailable."""
    after = job_pages.unpack(page_token, newest_first=True) if page_token else None
    first_id, below = wanted.first_id, wanted.past_id
    if after is not None:
        below = min(below, str(after[0]))
    found, ids = 0, b""
    looked_up = await job_pages.look_up(database, wanted)
    if looked_up is None or not wanted.all_states:
        return Part(count=0, ids=b"", until=None)
    parameters: dict[str, object] = {
        **job_pages.search_parameters(wanted, looked_up),
        "died_after_us": wanted.died_after,
        "died_before_us": wanted.died_before,
        "not_killed": wanted.not_killed,
        "with_ids": with_ids,
    }
    ends_s = time.monotonic() + _S_MAX
    while first_id < below:
        from_id, before_id = await job_pages.scan_range(database, parameters, first_id, below, rows=_ROWS)
        bounds = {"from_id": from_id, "before_id": before_id, "since": job_pages.finished_since(from_id)}
        rows: list[tuple[int, bytes | None]] = await database.run(statements.COUNT_JOBS, {**parameters, **bounds})
        ((more, more_ids),) = rows
        found += more
        ids += more_ids or b""
        below = from_id
        if below > first_id and time.monotonic() > ends_s:
            return Part(count=found, ids=ids, until=below)
    return Part(count=found, ids=ids, until=None)
