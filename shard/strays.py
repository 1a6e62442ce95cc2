"""Stray jobs: live, dead and departing jobs on a shard on which nobody reads their slot. A shard that lost history has
them: jobs that had moved to another shard since (docs/decisions/0028-a-shard-that-lost-history.md).

The steps on single databases. Which job is brought where is decided in balancer/recovery.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import psycopg

from shard import arrays, moving, partitions, statements
from shard.catalog import Catalog
from shard.database import Database
from shard.enqueuing import made_at_ms
from shard.errors import ShardUnavailable
from shard.moving import Left
from shard.placement import slot_of
from shard.vocabulary import JobId, OrgId, QueueName, ShardName, Slot

# Jobs that are brought to another shard at once.
ROWS_MAX = 1000


class Strays(NamedTuple):
    """Jobs of one queue that were set aside, in the order of read_strays.sql's columns."""

    org: OrgId
    queue: QueueName
    ids: list[JobId]
    # Rows of windrow.departing, as Postgres writes them.
    jobs: str


class NotTaken(Exception):
    """The shard does not take jobs of this org by this placement. Nothing was stored."""


async def fence(shard: Database, known: Catalog) -> bool:
    """Tells a shard which slots have left it, and so takes no jobs of theirs any more. What it knows of a later epoch
    stays. False: it was busy, and not everything was told; try again."""
    pins = {org: slot for org, slot in known.pins.items() if shard.name not in known.slots[slot].reads}
    if pins and not await _adopt(shard, pins):
        return False
    slots = [Slot(slot) for slot in range(len(known.slots))]
    # Of a pinned org that it has, the shard may know the slot of the hash alone.
    of_pins = {row.slot for row in await moving.read_queues(shard, sorted(pins.values()))} if pins else set[Slot]()
    states = await moving.read_slots(shard, slots)
    by_epoch: dict[int, list[Slot]] = {}
    for slot in {*states, *of_pins}:
        placement = known.slots[slot]
        epoch = states[slot].epoch if slot in states else 0
        if shard.name not in placement.reads and epoch < placement.epoch:
            by_epoch.setdefault(placement.epoch, []).append(slot)
    for epoch, some in by_epoch.items():
        if not await moving.close(shard, sorted(some), epoch=epoch):
            return False
    return True


async def _adopt(shard: Database, pins: Mapping[OrgId, Slot]) -> bool:
    """Has the shard know these orgs, those of them that it has, by their own slots. False: it was busy."""
    orgs = arrays.texts(list(pins))
    try:
        async with shard.transaction() as connection:
            await connection.execute(statements.LOCK_QUEUES, prepare=False)
            await connection.run(statements.ADOPT_ORGS, {"orgs": orgs, "slots": arrays.numbers(pins.values())})
            await connection.run(statements.ADOPT_QUEUES, {"orgs": orgs})
    except ShardUnavailable as error:
        if isinstance(error.__cause__, psycopg.errors.LockNotAvailable):
            return False
        raise
    return True


async def count(shard: Database, known: Catalog) -> list[Left]:
    """How many stray jobs a shard has, by slot."""
    foreign = [Slot(slot) for slot, placement in enumerate(known.slots) if shard.name not in placement.reads]
    return await moving.count_left(shard, foreign)


async def are_there(shard: Database, known: Catalog, slots: Sequence[Slot]) -> bool:
    """Whether a shard that does not have these slots has jobs of theirs all the same."""
    wanted = set(slots)
    of_hash = {
        slot_of(org)
        for org, slot in known.pins.items()
        # The shard may know the org by the slot of its hash alone.
        if slot in wanted and shard.name not in known.slots[slot_of(org)].reads
    }
    return bool(await moving.count_left(shard, sorted(wanted | of_hash)))


async def set_aside(shard: Database, slot: Slot) -> bool:
    """Takes stray jobs of this slot, which is fenced, out of everybody's sight: a bounded number of those that nobody
    holds. False: there are none."""
    state = (await moving.read_slots(shard, [slot])).get(slot)
    if state is None or state.state != "draining":
        return False
    departed = await moving.depart(
        shard, {slot: state.chunk + 1}, epoch=state.epoch, rows_max=ROWS_MAX, bytes_max=4 * 1024 * 1024
    )
    return bool(departed)


async def read(shard: Database, slot: Slot, *, older: bool) -> list[Strays]:
    """Jobs of this slot that were set aside. `older`: also those whose ids were made more than 7 days ago."""
    rows = await shard.run(statements.READ_STRAYS, {"slot": slot, "older": older, "rows": ROWS_MAX})
    return list(map(Strays._make, rows))


async def known(shard: Database, org: OrgId, ids: Sequence[JobId]) -> set[JobId]:
    """Those of these jobs that a shard knows in whatever state, also finished ones that are dropped since."""
    if not ids:
        return set()
    rows = await shard.run(
        statements.FIND_KNOWN,
        {
            "ids": arrays.plain(ids),
            "orgs": arrays.texts([org]),
            "turns": "{}",
            "queues": arrays.sparse_texts({}, len(ids)),
            "dedup_keys": arrays.sparse_texts({}, len(ids)),
            "oldest_ms": made_at_ms(min(ids)),
        },
    )
    return {JobId(known_as) for _, known_as in rows}


async def bring(home: Database, strays: Sequence[Strays], ids: Sequence[JobId], *, epoch: int) -> set[JobId] | None:
    """Stores these jobs, all of one org, on the shard that takes the org's jobs by the placement of this epoch. Answers
    which were stored; None, and none was: the shard knows one of them by now. Raises NotTaken, ShardUnavailable."""
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
    shard: Database, slot: Slot, org: OrgId, *, brought: set[JobId], known_on: Mapping[JobId, ShardName]
) -> tuple[int, int]:
    """Ends stray jobs that were set aside: `brought` to another shard, or known there anyway. Answers how many of the
    first sort this call has ended, and how many of the second."""
    rows = await partitions.finish(
        shard,
        statements.END_STRAYS,
        {
            "slot": slot,
            "org": org,
            "brought": arrays.plain(brought),
            "known": arrays.plain(known_on),
            "reasons": arrays.texts([f"astray: shard {name} has this job" for name in known_on.values()]),
        },
    )
    deleted, cancelled = rows[0]
    return int(deleted), int(cancelled)


async def skip_chunks(target: Database, chunks: Mapping[Slot, int], *, epoch: int) -> None:
    """Has the target of a move, which has lost chunks, go on behind these."""
    await target.run(
        statements.RAISE_CHUNKS,
        {"slots": arrays.numbers(chunks), "chunks": arrays.numbers(chunks.values()), "epoch": epoch},
    )
