"""Moves slots from one shard to another. This module has the steps of docs/decisions/0017-moving-slots.md that run on
shards; each step handles many slots at once. The steps that run on the catalog are in shard/placement/catalog.py.
balancer/move.py decides which step comes next.

Each step compares epochs and chunk numbers before it writes. So a step has its effect only once, and changes nothing if
it runs late, runs twice, or runs in two processes at the same time. Every step may raise ShardUnavailable; then the
caller does not know whether the step was done.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Literal, NamedTuple, TypeVar

import psycopg

from shard.errors import Misconfigured, ShardUnavailable
from shard.placement import statements
from shard.postgres import arrays, partitions
from shard.postgres.connection import Connection
from shard.postgres.pool import Database
from shard.queue_settings import SETTING_COLUMNS, QueueSettings
from shard.vocabulary import Micros, OrgId, QueueName, Slot

T = TypeVar("T")

_ROWS_MAX = 1000
_WORKFLOWS_AT_ONCE = 100


class SlotState(NamedTuple):
    """What a shard knows about a slot, in the order of read_slots.sql's columns."""

    slot: Slot
    state: Literal["owned", "draining"]
    epoch: int
    # The last chunk that the shard exported or imported in the move of this epoch.
    chunk: int


class QueueOfSlot(NamedTuple):
    """A queue and its configuration. An org without queues has one row, in which the queue is None."""

    slot: Slot
    org: OrgId
    queue: QueueName | None
    listed: bool | None
    created_at: Micros | None
    settings: QueueSettings


class BucketOfSlot(NamedTuple):
    """The tokens that remain for an org under one of its limits (shard/queue/token_buckets.py), in the order of
    read_buckets.sql's columns."""

    org: OrgId
    queue: QueueName
    measure: str
    tokens: float
    amount: int
    interval_us: int
    version: int


class SchedulesOfSlot(NamedTuple):
    """Some of an org's rows of windrow.schedule or of windrow.schedule_run, in the text format of Postgres."""

    slot: Slot
    org: OrgId
    rows: str


class Schedules(NamedTuple):
    """The schedules of slots, and what is known of their runs."""

    schedules: Sequence[SchedulesOfSlot] = ()
    runs: Sequence[SchedulesOfSlot] = ()


class QuarantinesOfSlot(NamedTuple):
    """The quarantined kinds of a queue, as rows in the text format of Postgres."""

    slot: Slot
    org: OrgId
    queue: QueueName
    rows: str


class WorkflowOfSlot(NamedTuple):
    """A workflow with its nodes and edges, as rows in the text format of Postgres."""

    slot: Slot
    org: OrgId
    workflow: str
    nodes: str
    # None: the workflow has no edges.
    edges: str | None


class Arrival(NamedTuple):
    """The end of a node. The source has appended this end as an arrival, and has not folded it. The fields have the
    order of the columns of read_arrivals.sql."""

    number: int
    org: OrgId
    workflow: str
    node: int
    how: str


class Remaining(NamedTuple):
    """How many unfinished jobs of a slot remain on a shard, in the order of count_remaining.sql's columns."""

    slot: Slot
    # Live jobs without a valid lease, which may be exported now.
    free: int
    leased: int
    dead: int
    # Exported jobs that are not deleted yet.
    departing: int
    # How many ends of nodes have not been copied to the target yet.
    arrivals: int


class ExportedJobs(NamedTuple):
    """The jobs of one queue in one exported chunk, in the order of read_exported.sql's columns."""

    slot: Slot
    chunk: int
    org: OrgId
    queue: QueueName
    # Rows of windrow.departing, in the text format of Postgres.
    jobs: str


async def read_slots(database: Database, slots: Sequence[Slot]) -> dict[Slot, SlotState]:
    """Returns what the shard knows about these slots. Leaves out slots that the shard does not know."""
    rows = await database.run(statements.READ_SLOTS, {"slots": arrays.numbers(slots)})
    return {row[0]: SlotState._make(row) for row in rows}


async def read_queues(database: Database, slots: Sequence[Slot]) -> list[QueueOfSlot]:
    """Returns the queues of these slots, sorted by org and queue name."""
    rows = await database.run(statements.READ_QUEUES, {"slots": arrays.numbers(slots)})
    return [QueueOfSlot._make([*row[:5], QueueSettings.from_row(row[5:])]) for row in rows]


async def count_nodes(database: Database, slots: Sequence[Slot]) -> dict[Slot, int]:
    """Returns how many nodes the workflows of each of these slots have. Leaves out slots without workflows."""
    return dict(await database.run(statements.COUNT_NODES, {"slots": arrays.numbers(slots)}))


async def read_buckets(database: Database, slots: Sequence[Slot]) -> list[BucketOfSlot]:
    """Returns the buckets of the orgs of these slots, as they are now."""
    rows = await database.run(statements.READ_BUCKETS, {"slots": arrays.numbers(slots)})
    return list(map(BucketOfSlot._make, rows))


async def read_schedules(database: Database, slots: Sequence[Slot]) -> Schedules:
    """Returns the schedules of the orgs of these slots."""
    parameters = {"slots": arrays.numbers(slots)}
    return Schedules(
        [SchedulesOfSlot._make(row) for row in await database.run(statements.READ_SCHEDULES, parameters)],
        [SchedulesOfSlot._make(row) for row in await database.run(statements.READ_SCHEDULE_RUNS, parameters)],
    )


async def delete_schedules(database: Database, slots: Sequence[Slot], *, epoch: int) -> None:
    """Deletes the schedules of these slots on the source. Call this after the target has opened the slots and routers
    have begun to read the schedules there. Since the source closed the slots, no router has fired these schedules on
    the source."""
    parameters = {"slots": arrays.numbers(slots), "state": "draining", "epoch": epoch}
    await database.run(statements.DELETE_SCHEDULES, parameters)


async def read_quarantines(database: Database, slots: Sequence[Slot]) -> list[QuarantinesOfSlot]:
    """Returns the quarantined kinds of the orgs of these slots. The source keeps its own quarantines for as long as it
    has jobs of these slots."""
    rows = await database.run(statements.READ_QUARANTINES, {"slots": arrays.numbers(slots)})
    return list(map(QuarantinesOfSlot._make, rows))


async def delete_quarantines(database: Database, slots: Sequence[Slot], *, epoch: int) -> None:
    """Deletes the quarantined kinds of these slots on the source. Call this after the last job of the slots has left
    the source."""
    parameters = {"slots": arrays.numbers(slots), "state": "draining", "epoch": epoch}
    await database.run(statements.DELETE_QUARANTINES, parameters)


async def read_workflows(database: Database, slots: Sequence[Slot]) -> list[WorkflowOfSlot]:
    """Returns the workflows of the orgs of these slots."""
    rows = await database.run(statements.READ_WORKFLOWS, {"slots": arrays.numbers(slots)})
    return list(map(WorkflowOfSlot._make, rows))


async def delete_workflows(database: Database, slots: Sequence[Slot], *, epoch: int) -> None:
    """Deletes the workflows of these slots on the source. Call this when routers read the workflows on the target. Even
    after the source has closed the slots, ends of nodes may be appended on the source. They remain there until
    `carry_arrivals` copies them to the target."""
    parameters = {"slots": arrays.numbers(slots), "state": "draining", "epoch": epoch}
    await database.run(statements.DELETE_WORKFLOWS, parameters)


async def carry_arrivals(source: Database, target: Database, slots: Sequence[Slot], *, epoch: int) -> int:
    """Copies the ends of nodes that were appended on the source to the target, and folds the workflows there. If an end
    is copied twice, it counts only once. Returns the number of ends."""
    rows = await source.run(statements.READ_ARRIVALS, {"slots": arrays.numbers(slots), "epoch": epoch})
    arrivals = list(map(Arrival._make, rows))
    for batch in _batches(arrivals):
        of_batch = {
            "orgs": arrays.texts([one.org for one in batch]),
            "workflows": arrays.plain(one.workflow for one in batch),
        }
        told = await target.run(
            statements.WRITE_ARRIVALS,
            of_batch
            | {
                "nodes": arrays.numbers(one.node for one in batch),
                "hows": arrays.names(one.how for one in batch),
            },
        )
        org_ids, ids = arrays.numbers(org_id for org_id, _ in told), arrays.plain(id_ for _, id_ in told)
        await partitions.finish(target, statements.FOLD_WORKFLOWS, {"org_ids": org_ids, "ids": ids})
        numbers = arrays.numbers(one.number for one in batch)
        await source.run(statements.DELETE_ARRIVALS, of_batch | {"numbers": numbers})
    return len(arrivals)


async def make_queues(database: Database, queues: Sequence[QueueOfSlot]) -> None:
    """Creates the queues that do not exist on this shard, with the default configuration. Does not change existing
    queues, not even deleted queues, so this may be called at any time."""
    for batch in _batches(queues):
        orgs = {row.org: row.slot for row in batch}
        named = [row for row in batch if row.queue is not None]
        await database.run(
            statements.INSERT_NAMES,
            {
                "orgs": arrays.texts(list(orgs)),
                "slots": arrays.numbers(orgs.values()),
                "queues": arrays.names({row.queue for row in named if row.queue is not None}),
            },
        )
        await database.run(statements.INSERT_QUEUES, {**_names(named), "relisted": False})


async def close_slots(database: Database, slots: Sequence[Slot], *, epoch: int) -> bool:
    """Stops the source from taking jobs of these slots. Afterwards, not even an enqueue that had already begun can
    store jobs there. Returns False if an enqueue that had begun did not end in time; then nothing was done, and the
    caller may try again. New enqueues wait for at most 0.1 s, plus the time of the update."""
    try:
        async with database.transaction() as connection:
            await connection.execute(statements.LOCK_SLOTS, prepare=False)
            await connection.run(statements.CLOSE_SLOTS, {"slots": arrays.numbers(slots), "epoch": epoch})
    except ShardUnavailable as error:
        if isinstance(error.__cause__, psycopg.errors.LockNotAvailable):
            return False
        raise
    return True


async def open_slots(
    database: Database,
    slots: Sequence[Slot],
    *,
    epoch: int,
    queues: Sequence[QueueOfSlot],
    buckets: Sequence[BucketOfSlot] = (),
    schedules: Schedules | None = None,
    workflows: Sequence[WorkflowOfSlot] = (),
    quarantines: Sequence[QuarantinesOfSlot] = (),
) -> None:
    """Lets the target take jobs of these slots. Stores there what the caller has read on the closed source: the
    configuration of the queues, and the buckets, schedules, workflows and quarantines."""
    await make_queues(database, queues)
    async with database.transaction() as connection:
        # OPEN_SLOTS runs first because it locks the slots: a second caller then finds nothing to do.
        rows = await connection.run(statements.OPEN_SLOTS, {"slots": arrays.numbers(slots), "epoch": epoch})
        opened = {slot for (slot,) in rows}
        of_opened = {row.org for row in queues if row.slot in opened}
        for part in _batches([bucket for bucket in buckets if bucket.org in of_opened]):
            await connection.run(statements.WRITE_BUCKETS, _columns(part))
        for batch in _batches([row for row in queues if row.slot in opened]):
            orgs = {row.org: row.slot for row in batch}
            names = arrays.texts(list(orgs))
            await connection.run(statements.ADOPT_ORGS, {"orgs": names, "slots": arrays.numbers(orgs.values())})
            await connection.run(statements.ADOPT_QUEUES, {"orgs": names})
            await connection.run(
                statements.CONFIGURE_QUEUES, _configuration([row for row in batch if row.queue is not None])
            )
        if opened:
            await _write_schedules(connection, sorted(opened), schedules or Schedules(), epoch=epoch)
            await _write_workflows(connection, sorted(opened), workflows, epoch=epoch)
            await _write_quarantines(connection, sorted(opened), quarantines, epoch=epoch)


async def _write_schedules(connection: Connection, slots: Sequence[Slot], schedules: Schedules, *, epoch: int) -> None:
    """Stores the schedules of slots that were opened in this transaction."""
    # A shard that was restored from a backup may have schedules from a time when it held these slots before.
    parameters = {"slots": arrays.numbers(slots), "state": "owned", "epoch": epoch}
    await connection.run(statements.DELETE_SCHEDULES, parameters)
    for part in schedules.schedules:
        if part.slot in slots:
            await connection.run(
                statements.WRITE_SCHEDULES, {"orgs": arrays.texts([part.org]), "rows": arrays.texts([part.rows])}
            )
    for part in schedules.runs:
        if part.slot in slots:
            await connection.run(statements.WRITE_SCHEDULE_RUNS, {"rows": arrays.texts([part.rows])})


async def _write_workflows(
    connection: Connection, slots: Sequence[Slot], workflows: Sequence[WorkflowOfSlot], *, epoch: int
) -> None:
    """Stores the workflows of slots that were opened in this transaction."""
    # A shard that was restored from a backup may have workflows from a time when it held these slots before.
    parameters = {"slots": arrays.numbers(slots), "state": "owned", "epoch": epoch}
    await connection.run(statements.DELETE_WORKFLOWS, parameters)
    opened = [one for one in workflows if one.slot in slots]
    for at in range(0, len(opened), _WORKFLOWS_AT_ONCE):
        part = opened[at : at + _WORKFLOWS_AT_ONCE]
        await connection.run(
            statements.WRITE_WORKFLOWS,
            {
                "orgs": arrays.texts([one.org for one in part]),
                "workflows": arrays.texts([one.workflow for one in part]),
                "nodes": arrays.texts([one.nodes for one in part]),
                "edges": arrays.texts([one.edges or "{}" for one in part]),
            },
        )


async def _write_quarantines(
    connection: Connection, slots: Sequence[Slot], quarantines: Sequence[QuarantinesOfSlot], *, epoch: int
) -> None:
    """Stores the quarantines of slots that were opened in this transaction."""
    # A shard that was restored from a backup may have quarantines from a time when it held these slots before.
    parameters = {"slots": arrays.numbers(slots), "state": "owned", "epoch": epoch}
    await connection.run(statements.DELETE_QUARANTINES, parameters)
    for batch in _batches([one for one in quarantines if one.slot in slots]):
        await connection.run(
            statements.WRITE_QUARANTINES,
            {
                "orgs": arrays.texts([one.org for one in batch]),
                "queues": arrays.names(one.queue for one in batch),
                "rows": arrays.texts([one.rows for one in batch]),
            },
        )


async def count_remaining(database: Database, slots: Sequence[Slot]) -> list[Remaining]:
    """Counts the unfinished jobs of these slots that remain on this shard, in slot order. Leaves out slots of which
    nothing remains."""
    remaining: list[Remaining] = []
    for batch in _batches(slots):
        rows = await database.run(statements.COUNT_REMAINING, {"slots": arrays.numbers(batch)})
        remaining += map(Remaining._make, rows)
    return remaining


async def end_arrival(database: Database, slots: Sequence[Slot], *, epoch: int) -> None:
    """Lets the target give group slots to jobs of these slots. Call this when the source has no more jobs of these
    slots, and before the catalog ends the move: after that end, nobody would repeat this step if it failed."""
    await database.run(statements.END_ARRIVAL, {"slots": arrays.numbers(slots), "epoch": epoch})


async def export_chunk(
    database: Database, chunks: Mapping[Slot, int], *, epoch: int, rows_max: int, bytes_max: int
) -> dict[Slot, int]:
    """Exports jobs of these slots for the target: moves them to the table windrow.departing. `chunks` has, for each
    slot, the number of its next chunk. Takes jobs of the slots in ascending order of the slots, until it has `rows_max`
    jobs or `bytes_max` bytes. Returns how many jobs of each slot were exported."""
    slots = sorted(chunks)
    rows = await database.run(
        statements.EXPORT_CHUNK,
        {
            "slots": arrays.numbers(slots),
            "chunks": arrays.numbers(chunks[slot] for slot in slots),
            "epoch": epoch,
            "rows": rows_max,
            "bytes": bytes_max,
        },
    )
    return dict(rows)


async def read_exported(database: Database, slots: Sequence[Slot], *, epoch: int) -> list[ExportedJobs]:
    """Returns the jobs that were exported from the source and not deleted there yet. A slot has at most one such chunk,
    because the next chunk is exported only after this chunk is deleted."""
    rows = await database.run(statements.READ_EXPORTED, {"slots": arrays.numbers(slots), "epoch": epoch})
    return list(map(ExportedJobs._make, rows))


async def import_chunk(database: Database, exported: Sequence[ExportedJobs], *, epoch: int) -> set[Slot]:
    """Stores exported jobs on the target. A chunk is stored only if it is the next chunk of its slot. Returns the slots
    whose chunks were stored. Raises Misconfigured if the target refuses the rows."""
    chunks = {part.slot: part.chunk for part in exported}
    slots = sorted(chunks)
    try:
        rows = await database.run(
            statements.IMPORT_CHUNK,
            {
                "slots": arrays.numbers(slots),
                "chunks": arrays.numbers(chunks[slot] for slot in slots),
                "epoch": epoch,
                "of_slots": arrays.numbers(part.slot for part in exported),
                "orgs": arrays.texts([part.org for part in exported]),
                "queues": arrays.names(part.queue for part in exported),
                "jobs": arrays.texts([part.jobs for part in exported]),
            },
        )
    except (psycopg.IntegrityError, psycopg.DataError) as error:
        raise Misconfigured(
            f"shard {database.name!r} refuses jobs that move there: {error.diag.message_primary}; they are kept where "
            "they come from. Its schema differs from theirs, or it was restored from a backup: see that both run the "
            "same migrations, and check the books of both"
        ) from error
    return {slot for (slot,) in rows}


async def notify_imported(database: Database, exported: Sequence[ExportedJobs]) -> None:
    """Notifies the routers whose consumers wait for jobs of these queues. These routers then claim again, from the
    oldest job on. The notification is only a hint (invariant I7)."""
    queues = {(part.org, part.queue): None for part in exported}
    await database.run(
        statements.NOTIFY_IMPORTED,
        {"orgs": arrays.texts([org for org, _ in queues]), "queues": arrays.names(queue for _, queue in queues)},
    )


async def delete_exported(database: Database, chunks: Mapping[Slot, int], *, epoch: int) -> int:
    """Deletes exported chunks on the source, after the target has stored them. Returns how many jobs were deleted."""
    rows = await database.run(
        statements.DELETE_EXPORTED,
        {"slots": arrays.numbers(chunks), "chunks": arrays.numbers(chunks.values()), "epoch": epoch},
    )
    return int(rows[0][0])


def _batches(rows: Sequence[T]) -> Iterator[Sequence[T]]:
    iterator = iter(rows)
    while batch := list(islice(iterator, _ROWS_MAX)):
        yield batch


def _columns(buckets: Sequence[BucketOfSlot]) -> dict[str, object]:
    return {
        "orgs": arrays.texts([bucket.org for bucket in buckets]),
        "queues": arrays.texts([bucket.queue for bucket in buckets]),
        "measures": arrays.names(bucket.measure for bucket in buckets),
        "tokens": arrays.plain(str(bucket.tokens) for bucket in buckets),
        "amounts": arrays.numbers(bucket.amount for bucket in buckets),
        "intervals_us": arrays.numbers(bucket.interval_us for bucket in buckets),
        "versions": arrays.numbers(bucket.version for bucket in buckets),
    }


def _names(queues: Sequence[QueueOfSlot]) -> dict[str, object]:
    return {
        "orgs": arrays.texts([row.org for row in queues]),
        "queues": arrays.names(row.queue for row in queues if row.queue is not None),
    }


def _configuration(queues: Sequence[QueueOfSlot]) -> dict[str, object]:
    settings = {name: [getattr(row.settings, name) for row in queues] for name in SETTING_COLUMNS}
    return {
        **_names(queues),
        **{
            name: arrays.sparse_texts({at: str(v) for at, v in enumerate(values) if v is not None}, len(queues))
            for name, values in settings.items()
        },
        "listed": arrays.names(str(row.listed) for row in queues),
        "created_at_us": arrays.numbers(row.created_at or 0 for row in queues),
        "of_slots": arrays.numbers(row.slot for row in queues),
    }
