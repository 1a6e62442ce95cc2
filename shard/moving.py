"""How slots leave one shard and come to another: the steps of docs/decisions/0017-moving-slots.md that are taken on
shards, many slots at a time. The catalog's are in shard/catalog.py. What is to be done next is for others to decide.

Each step compares epochs, and chunks' numbers, before it writes: taken late, again, or by two at once, it changes
nothing. All raise ShardUnavailable, after which a step may or may not have been taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Literal, NamedTuple, TypeVar

import psycopg

from shard import arrays, statements
from shard.database import Database
from shard.errors import Misconfigured, ShardUnavailable
from shard.vocabulary import Micros, OrgId, QueueName, Slot

T = TypeVar("T")

_ROWS_AT_ONCE = 1000


class SlotState(NamedTuple):
    """What a shard knows of a slot, in the order of read_slots.sql's columns."""

    slot: Slot
    state: Literal["owned", "draining"]
    epoch: int
    # The last that departed from here, or was taken here, in the move of that epoch.
    chunk: int


class QueueOfSlot(NamedTuple):
    """A queue and its configuration, in the order of read_queues.sql's columns. An org without queues has one row, with
    no name."""

    slot: Slot
    org: OrgId
    queue: QueueName | None
    paused: bool | None
    retry: str | None
    max_attempts: int | None
    retention: int | None
    listed: bool | None
    created_at: Micros | None


class Left(NamedTuple):
    """How many jobs of a slot are left on a shard, in the order of count_left.sql's columns."""

    slot: Slot
    # That may leave now.
    free: int
    leased: int
    dead: int
    departing: int


class Departed(NamedTuple):
    """The jobs of one queue that have departed in one chunk, in the order of read_departing.sql's columns."""

    slot: Slot
    chunk: int
    org: OrgId
    queue: QueueName
    # Rows of windrow.departing, as Postgres writes them.
    jobs: str


async def read_slots(database: Database, slots: Sequence[Slot]) -> dict[Slot, SlotState]:
    """What the shard knows of these slots; nothing of those of which it never heard."""
    rows = await database.run(statements.READ_SLOTS, {"slots": arrays.numbers(slots)})
    return {row[0]: SlotState._make(row) for row in rows}


async def read_queues(database: Database, slots: Sequence[Slot]) -> list[QueueOfSlot]:
    """The queues of these slots, sorted by org and name."""
    rows = await database.run(statements.READ_QUEUES, {"slots": arrays.numbers(slots)})
    return list(map(QueueOfSlot._make, rows))


async def make_queues(database: Database, queues: Sequence[QueueOfSlot]) -> None:
    """Brings into being, with the default configuration, what of these queues does not exist here. Changes nothing that
    does, not even a deleted queue, and so may be done at any time."""
    for some in _parts(queues):
        orgs = {row.org: row.slot for row in some}
        named = [row for row in some if row.queue is not None]
        await database.run(
            statements.INTERN_NAMES,
            {
                "orgs": arrays.texts(list(orgs)),
                "slots": arrays.numbers(orgs.values()),
                "queues": arrays.names({row.queue for row in named if row.queue is not None}),
            },
        )
        await database.run(statements.MAKE_QUEUES, {**_names(named), "relisted": False})


async def close(database: Database, slots: Sequence[Slot], *, epoch: int) -> bool:
    """The source takes no more jobs of these slots, nor is it about to. False: an enqueue under way did not end in
    time, and nothing was done; try again. Other enqueues wait for 0.1 s at most, and for the update."""
    try:
        async with database.transaction() as connection:
            await connection.execute(statements.LOCK_SLOTS, prepare=False)
            await connection.run(statements.CLOSE_SLOTS, {"slots": arrays.numbers(slots), "epoch": epoch})
    except ShardUnavailable as error:
        if isinstance(error.__cause__, psycopg.errors.LockNotAvailable):
            return False
        raise
    return True


async def open_slots(database: Database, slots: Sequence[Slot], *, epoch: int, queues: Sequence[QueueOfSlot]) -> None:
    """The target takes jobs of these slots, in queues that are configured as the closed source's are."""
    await make_queues(database, queues)
    async with database.transaction() as connection:
        # First, because it locks the slots: who comes second finds nothing to do.
        rows = await connection.run(statements.OPEN_SLOTS, {"slots": arrays.numbers(slots), "epoch": epoch})
        opened = {slot for (slot,) in rows}
        for some in _parts([row for row in queues if row.slot in opened]):
            orgs = {row.org: row.slot for row in some}
            names = arrays.texts(list(orgs))
            await connection.run(statements.ADOPT_ORGS, {"orgs": names, "slots": arrays.numbers(orgs.values())})
            await connection.run(statements.ADOPT_QUEUES, {"orgs": names})
            await connection.run(
                statements.CONFIGURE_QUEUES, _configuration([row for row in some if row.queue is not None])
            )


async def count_left(database: Database, slots: Sequence[Slot]) -> list[Left]:
    """What is left of the jobs of these slots, by slot, without slots of which nothing is."""
    left: list[Left] = []
    for some in _parts(slots):
        left += map(Left._make, await database.run(statements.COUNT_LEFT, {"slots": arrays.numbers(some)}))
    return left


async def depart(
    database: Database, chunks: Mapping[Slot, int], *, epoch: int, rows_max: int, bytes_max: int
) -> dict[Slot, int]:
    """Sets jobs of these slots aside, to be taken by the target: each slot's under the number given, which is the next.
    Goes through the slots in ascending order, until `rows_max` jobs are found or `bytes_max` filled. Answers how many
    jobs of which slots."""
    slots = sorted(chunks)
    rows = await database.run(
        statements.DEPART,
        {
            "slots": arrays.numbers(slots),
            "chunks": arrays.numbers(chunks[slot] for slot in slots),
            "epoch": epoch,
            "rows": rows_max,
            "bytes": bytes_max,
        },
    )
    return dict(rows)


async def read_departing(database: Database, slots: Sequence[Slot], *, epoch: int) -> list[Departed]:
    """What has departed from the source and is not forgotten there. Of a slot that is one chunk: the next departs only
    when this one is forgotten."""
    rows = await database.run(statements.READ_DEPARTING, {"slots": arrays.numbers(slots), "epoch": epoch})
    return list(map(Departed._make, rows))


async def take(database: Database, departed: Sequence[Departed], *, epoch: int) -> set[Slot]:
    """Stores on the target what has departed from the source. Answers whose chunks were the next, and so were stored.
    Raises Misconfigured."""
    chunks = {part.slot: part.chunk for part in departed}
    slots = sorted(chunks)
    try:
        rows = await database.run(
            statements.TAKE,
            {
                "slots": arrays.numbers(slots),
                "chunks": arrays.numbers(chunks[slot] for slot in slots),
                "epoch": epoch,
                "of_slots": arrays.numbers(part.slot for part in departed),
                "orgs": arrays.texts([part.org for part in departed]),
                "queues": arrays.names(part.queue for part in departed),
                "jobs": arrays.texts([part.jobs for part in departed]),
            },
        )
    except (psycopg.IntegrityError, psycopg.DataError) as error:
        raise Misconfigured(
            f"shard {database.name!r} refuses jobs that move there: {error.diag.message_primary}; they are kept where "
            "they come from. Its schema differs from theirs, or it was restored from a backup: see that both run the "
            "same migrations, and check the books of both"
        ) from error
    return {slot for (slot,) in rows}


async def tell_arrivals(database: Database, departed: Sequence[Departed]) -> None:
    """Has routers that wait on the target for work of these queues look, however old it is. A hint (I7)."""
    queues = {(part.org, part.queue): None for part in departed}
    await database.run(
        statements.RING_ARRIVALS,
        {"orgs": arrays.texts([org for org, _ in queues]), "queues": arrays.names(queue for _, queue in queues)},
    )


async def forget(database: Database, chunks: Mapping[Slot, int], *, epoch: int) -> int:
    """Deletes on the source what the target has taken, and answers how many jobs that were."""
    rows = await database.run(
        statements.FORGET,
        {"slots": arrays.numbers(chunks), "chunks": arrays.numbers(chunks.values()), "epoch": epoch},
    )
    return int(rows[0][0])


def _parts(rows: Sequence[T]) -> Iterator[Sequence[T]]:
    rest = iter(rows)
    while part := list(islice(rest, _ROWS_AT_ONCE)):
        yield part


def _names(queues: Sequence[QueueOfSlot]) -> dict[str, object]:
    return {
        "orgs": arrays.texts([row.org for row in queues]),
        "queues": arrays.names(row.queue for row in queues if row.queue is not None),
    }


def _configuration(queues: Sequence[QueueOfSlot]) -> dict[str, object]:
    count = len(queues)
    return {
        **_names(queues),
        "paused": arrays.names(str(row.paused) for row in queues),
        "retries": arrays.sparse_texts({at: row.retry for at, row in enumerate(queues) if row.retry}, count),
        "max_attempts": arrays.sparse_numbers(
            {at: row.max_attempts for at, row in enumerate(queues) if row.max_attempts}, count
        ),
        "retentions": arrays.sparse_numbers(
            {at: row.retention for at, row in enumerate(queues) if row.retention is not None}, count
        ),
        "listed": arrays.names(str(row.listed) for row in queues),
        "created_at_us": arrays.numbers(row.created_at or 0 for row in queues),
        "of_slots": arrays.numbers(row.slot for row in queues),
    }
