"""Handles stray jobs: live, dead and exported jobs on a shard where nobody reads their slot. A shard that lost history
has stray jobs if jobs moved away from it after the point of recovery: the restored database has these jobs again
(docs/decisions/0028-a-shard-that-lost-history.md).

This module has the steps that act on one database. balancer/recovery.py decides which job goes to which shard.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import psycopg

from shard.admin import statements
from shard.errors import ShardUnavailable
from shard.job_id import made_at_ms
from shard.placement import move_steps
from shard.placement import statements as placement_statements
from shard.placement.catalog import Catalog
from shard.placement.move_steps import Remaining
from shard.placement.slots import slot_of
from shard.postgres import arrays
from shard.postgres.pool import Database
from shard.queue import statements as queue_statements
from shard.vocabulary import JobId, OrgId, QueueName, Slot

# Upper bound for the jobs that are moved to another shard together.
ROWS_MAX = 1000
_FIRST_ID = "00000000-0000-0000-0000-000000000000"


class Strays(NamedTuple):
    """Stray jobs of one queue that `set_aside` has hidden, in the order of read_strays.sql's columns."""

    org: OrgId
    queue: QueueName
    ids: list[JobId]
    # Rows of windrow.departing, in the text format of Postgres.
    jobs: str


class NotTaken(Exception):
    """The shard does not take jobs of this org under this placement. Nothing was stored."""


async def fence(shard: Database, known: Catalog) -> bool:
    """Tells a shard which slots have left it, so that it takes no more jobs of them. Does not change slots that the
    shard knows with a later epoch. Returns False if the shard was busy and not everything was done; the caller should
    try again."""
    pins = {org: slot for org, slot in known.pins.items() if shard.name not in known.slots[slot].reads}
    if pins and not await _adopt(shard, pins):
        return False
    slots = [Slot(slot) for slot in range(len(known.slots))]
    # If `_adopt` has just given an org its own slot, the shard has no state of that slot yet. Find such slots by their
    # orgs.
    of_pins = {row.slot for row in await move_steps.read_queues(shard, sorted(pins.values()))} if pins else set[Slot]()
    states = await move_steps.read_slots(shard, slots)
    by_epoch: dict[int, list[Slot]] = {}
    for slot in {*states, *of_pins}:
        placement = known.slots[slot]
        epoch = states[slot].epoch if slot in states else 0
        if shard.name not in placement.reads and epoch < placement.epoch:
            by_epoch.setdefault(placement.epoch, []).append(slot)
    for epoch, closing in by_epoch.items():
        if not await move_steps.close_slots(shard, sorted(closing), epoch=epoch):
            return False
    return True


async def _adopt(shard: Database, pins: Mapping[OrgId, Slot]) -> bool:
    """Records on the shard that these orgs have slots of their own. Leaves out orgs that the shard does not have.
    Returns False if the shard was busy."""
    orgs = arrays.texts(list(pins))
    try:
        async with shard.transaction() as connection:
            await connection.execute(placement_statements.LOCK_QUEUES, prepare=False)
            await connection.run(
                placement_statements.ADOPT_ORGS, {"orgs": orgs, "slots": arrays.numbers(pins.values())}
            )
            await connection.run(placement_statements.ADOPT_QUEUES, {"orgs": orgs})
    except ShardUnavailable as error:
        if isinstance(error.__cause__, psycopg.errors.LockNotAvailable):
            return False
        raise
    return True


async def count(shard: Database, known: Catalog) -> list[Remaining]:
    """Counts a shard's stray jobs, by slot."""
    foreign = [Slot(slot) for slot, placement in enumerate(known.slots) if shard.name not in placement.reads]
    return await move_steps.count_remaining(shard, foreign)


async def exist(shard: Database, known: Catalog, slots: Sequence[Slot]) -> bool:
    """Returns whether a shard that does not hold these slots nevertheless has jobs of these slots."""
    wanted = set(slots)
    of_hash = {
        slot_of(org)
        for org, slot in known.pins.items()
        # The shard may still have recorded the org with its hash slot, and not with its own slot.
        if slot in wanted and shard.name not in known.slots[slot_of(org)].reads
    }
    return bool(await move_steps.count_remaining(shard, sorted(wanted | of_hash)))


async def set_aside(shard: Database, slot: Slot) -> bool:
    """Hides stray jobs of this slot: moves up to ROWS_MAX jobs without a valid lease to the table of exported jobs.
    Returns False if there are no such jobs, or if `fence` has not fenced the slot."""
    state = (await move_steps.read_slots(shard, [slot])).get(slot)
    if state is None or state.state != "draining":
        return False
    exported = await move_steps.export_chunk(
        shard, {slot: state.chunk + 1}, epoch=state.epoch, rows_max=ROWS_MAX, bytes_max=4 * 1024 * 1024
    )
    return bool(exported)


async def read(shard: Database, slot: Slot, *, older: bool) -> list[Strays]:
    """Returns stray jobs of this slot that `set_aside` has hidden. With `older`, also returns jobs whose ids were made
    more than 7 days ago."""
    rows = await shard.run(statements.READ_STRAYS, {"slot": slot, "older": older, "rows": ROWS_MAX})
    return list(map(Strays._make, rows))


async def read_unfinished(shard: Database, org: OrgId, queue: QueueName, *, behind: JobId | None = None) -> list[JobId]:
    """Returns up to ROWS_MAX ids of a queue's live and dead jobs: the first ids, or the ids that follow `behind`."""
    rows = await shard.run(
        statements.READ_UNFINISHED, {"org": org, "queue": queue, "behind": behind or _FIRST_ID, "rows": ROWS_MAX}
    )
    return [JobId(job_id) for (job_id,) in rows]


async def delete_copies(shard: Database, org: OrgId, ids: Sequence[JobId]) -> int:
    """Deletes these live and dead jobs of an org, which another shard knows. Returns how many jobs were deleted."""
    rows = await shard.run(statements.DELETE_COPIES, {"org": org, "ids": arrays.plain(ids)})
    return int(rows[0][0])


async def known(shard: Database, org: OrgId, ids: Sequence[JobId]) -> set[JobId]:
    """Returns which of these jobs a shard knows, in any state. A shard also knows finished jobs that it has dropped, as
    long as enqueues may repeat their ids."""
    if not ids:
        return set()
    rows = await shard.run(
        queue_statements.FIND_KNOWN,
        {
            "ids": arrays.plain(ids),
            "orgs": arrays.texts([org]),
            "org_positions": "{}",
            "queues": arrays.sparse_texts({}, len(ids)),
            "dedup_keys": arrays.sparse_texts({}, len(ids)),
            "live_keys": arrays.sparse_texts({}, len(ids)),
            "oldest_ms": made_at_ms(min(ids)),
        },
    )
    return {JobId(known_as) for _, known_as in rows}


async def bring(home: Database, strays: Sequence[Strays], ids: Sequence[JobId], *, epoch: int) -> set[JobId] | None:
    """Stores these jobs, all of one org, on the shard that takes the org's jobs by the placement of this epoch. Returns
    the ids of the jobs that were stored. Returns None, and stores nothing, if that shard has one of the jobs in another
    state by now. Raises NotTaken, ShardUnavailable."""
    try:
        rows = await home.run(
            statements.BRING_HOME,
            {
                "org": strays[0].org,
                "queues": arrays.names(part.queue for part in strays),
                "jobs": arrays.texts([part.jobs for part in strays]),
                "ids": arrays.plain(ids),
                "epoch": epoch,
                "oldest_ms": made_at_ms(min(ids)),
            },
        )
    except psycopg.Error as error:
        if error.sqlstate == "WD001":
            return None
        raise
    admitted, stored, *_ = rows[0]
    if admitted < len(strays):
        raise NotTaken
    return {JobId(name) for name in stored or ()}


async def end(
    shard: Database, slot: Slot, org: OrgId, *, brought: Collection[JobId], known: Collection[JobId]
) -> tuple[int, int]:
    """Deletes stray jobs that `set_aside` has hidden and that another shard has. The jobs `brought` were moved to that
    shard, and the jobs `known` were there before. Returns how many of `brought` and of `known` this call deleted."""
    rows = await shard.run(
        statements.END_STRAYS,
        {"slot": slot, "org": org, "brought": arrays.plain(brought), "known": arrays.plain(known)},
    )
    of_brought, of_known = rows[0]
    return int(of_brought), int(of_known)


async def skip_chunks(target: Database, chunks: Mapping[Slot, int], *, epoch: int) -> None:
    """Makes the target of a move continue after these chunk numbers. The target has lost chunks, which nobody can send
    again."""
    await target.run(
        statements.RAISE_CHUNKS,
        {"slots": arrays.numbers(chunks), "chunks": arrays.numbers(chunks.values()), "epoch": epoch},
    )
