"""Stores finished and dead jobs once more, as new jobs. Each new job has an attribute that names its old job."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from router.fleet.fleet import Fleet
from router.fleet.shard_handle import ShardHandle
from router.route.by_id import find
from router.route.enqueue import store
from shard.errors import BadIds
from shard.job_record import ANSWER_BYTES_MAX, JobRecord, as_new
from shard.vocabulary import LIVE, JobId, JobState, OrgId

# The attribute in which a new job holds the id of its old job (docs/internals.md documents it).
RESTORED_FROM = "windrow.restored_from"


class Refusal(Enum):
    """Why a job is not restored."""

    NOT_FOUND = auto()
    LIVE = auto()
    NEW_ID = auto()
    SIGNAL = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """`id` is the id of the new job. `duplicate`: a job with this id was already stored."""

    id: JobId
    duplicate: bool


async def restore(
    fleet: Fleet, org: OrgId, ids: Sequence[JobId], new_ids: Sequence[JobId], *, trace: str | None
) -> list[Restored | Refusal]:
    """Restores the jobs `ids` under `new_ids`, which must differ from each other. Returns the result of each job.

    Works in batches, each as large as one answer of a shard. Raises TooManyQueues. Raises ShardUnavailable, for example
    if a shard that may have one of the jobs does not answer. Some jobs may have been restored before an error.
    """
    restored: dict[int, Restored | Refusal] = {}
    remaining = list(dict.fromkeys(ids))
    while remaining:
        records = await look_up(fleet, org, remaining)
        # Jobs that did not fit into this batch come next. The loop ends, because each shard returns at least one job in
        # full each time.
        remaining = [old for old in remaining if old in records and not records[old].whole]
        waiting = set(remaining)
        ended: dict[int, JobRecord] = {}
        for at, old in enumerate(ids):
            if at in restored or old in waiting:
                continue
            if old not in records:
                restored[at] = Refusal.NOT_FOUND
            elif JobState(records[old].state) in LIVE:
                restored[at] = Refusal.LIVE
            elif records[old].awaited_signal:
                # The old job waited for a signal. The new job would be in no workflow, so a worker would get this job.
                restored[at] = Refusal.SIGNAL
            else:
                ended[at] = records[old]
        while ended:
            try:
                jobs = as_new(org, list(ended.values()), [new_ids[at] for at in ended])
                for position, record in enumerate(ended.values()):
                    attributes = {**json.loads(record.attributes or "{}"), RESTORED_FROM: record.id}
                    jobs.attributes[position] = json.dumps(attributes)
                    if trace is not None:
                        jobs.traces[position] = trace
                duplicates = await store(fleet, jobs, hand=False)
            except BadIds as error:
                # Only the shard can tell which new ids are unusable. Drop those jobs, and send the remaining ones
                # again.
                indexes = list(ended)
                for position in error.positions:
                    restored[indexes[position]] = Refusal.NEW_ID
                    del ended[indexes[position]]
            else:
                for position, at in enumerate(ended):
                    restored[at] = Restored(id=duplicates.get(position, new_ids[at]), duplicate=position in duplicates)
                break
    return [restored[at] for at in range(len(ids))]


async def look_up(fleet: Fleet, org: OrgId, ids: Sequence[JobId]) -> dict[JobId, JobRecord]:
    """Returns jobs as they were stored, without those that the org does not have. Some may lack their large columns,
    but at least one is whole. Raises ShardUnavailable, for example if a shard that may have one of the jobs does not
    answer."""

    async def get(member: ShardHandle, positions: Sequence[int]) -> dict[int, JobRecord]:
        wanted = [ids[at] for at in positions]
        records = await member.store.get(org, wanted, include_payload=True, bytes_max=ANSWER_BYTES_MAX, as_stored=True)
        by_id = {record.id: record for record in records}
        return {at: by_id[job_id] for at, job_id in zip(positions, wanted, strict=True) if job_id in by_id}

    found = await find(fleet, org, ids, get)
    found.require(len(ids))
    return {ids[at]: record for at, record in found.answers.items()}
