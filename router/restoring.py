"""Jobs that have finished or are dead, stored once more: as new jobs that say which ones they are made from."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from router.fleet import Fleet
from router.lookups import find
from router.member import Member
from router.storing import store
from shard.errors import BadIds
from shard.records import ANSWER_BYTES_MAX, JobRecord
from shard.vocabulary import LIVE, JobId, JobState, NewJobs, OrgId

# The attribute of the new job that has the old one's id. docs/concepts.md says so.
RESTORED_FROM = "windrow.restored_from"


class Refusal(Enum):
    """Why a job is not restored."""

    NOT_FOUND = auto()
    LIVE = auto()
    NEW_ID = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """`id`: the new job's. `duplicate`: a job of that id was there already."""

    id: JobId
    duplicate: bool


async def restore(
    fleet: Fleet, org: OrgId, ids: Sequence[JobId], new_ids: Sequence[JobId], *, trace: str | None
) -> list[Restored | Refusal]:
    """What becomes of each. `new_ids` differ from each other. As many at a time as an answer has room for. Raises
    ShardUnavailable, also where a shard that may have one of them does not answer, and TooManyQueues: then some may
    have been restored."""
    restored: dict[int, Restored | Refusal] = {}
    rest = list(dict.fromkeys(ids))
    while rest:
        records = await _look_up(fleet, org, rest)
        # Those that there was no room for come next. There is room for the first one of each shard.
        rest = [old for old in rest if old in records and not records[old].whole]
        waiting = set(rest)
        ended: dict[int, JobRecord] = {}
        for at, old in enumerate(ids):
            if at in restored or old in waiting:
                continue
            if old not in records:
                restored[at] = Refusal.NOT_FOUND
            elif JobState(records[old].state) in LIVE:
                restored[at] = Refusal.LIVE
            else:
                ended[at] = records[old]
        while ended:
            try:
                known = await store(fleet, _again(org, ended, new_ids, trace=trace), hand=False)
            except BadIds as error:
                # Only the shard knows which ids will not do: those fall out, and the others go again.
                places = list(ended)
                for position in error.positions:
                    restored[places[position]] = Refusal.NEW_ID
                    del ended[places[position]]
            else:
                for position, at in enumerate(ended):
                    restored[at] = Restored(id=known.get(position, new_ids[at]), duplicate=position in known)
                break
    return [restored[at] for at in range(len(ids))]


async def _look_up(fleet: Fleet, org: OrgId, ids: Sequence[JobId]) -> dict[JobId, JobRecord]:
    async def get(member: Member, positions: Sequence[int]) -> dict[int, JobRecord]:
        wanted = [ids[at] for at in positions]
        records = await member.store.get(org, wanted, include_payload=True, bytes_max=ANSWER_BYTES_MAX, as_stored=True)
        by_id = {record.id: record for record in records}
        return {at: by_id[job_id] for at, job_id in zip(positions, wanted, strict=True) if job_id in by_id}

    found = await find(fleet, org, ids, get)
    found.require(len(ids))
    return {ids[at]: record for at, record in found.answers.items()}


def _again(org: OrgId, ended: Mapping[int, JobRecord], new_ids: Sequence[JobId], *, trace: str | None) -> NewJobs:
    """As they were enqueued, but for dedup key and expiry, which are of the past."""
    columns = NewJobs(org=org)
    for position, (at, record) in enumerate(ended.items()):
        columns.ids.append(new_ids[at])
        columns.queues.append(record.queue)
        columns.kinds.append(record.kind)
        columns.payloads.append(record.payload or b"")
        columns.priorities[position] = record.priority
        columns.attributes[position] = json.dumps({**json.loads(record.attributes or "{}"), RESTORED_FROM: record.id})
        if record.max_attempts is not None:
            columns.max_attempts[position] = record.max_attempts
        if record.retry is not None:
            columns.retries[position] = record.retry
        if trace is not None:
            columns.traces[position] = trace
    return columns
