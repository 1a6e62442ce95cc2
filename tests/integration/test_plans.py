"""Tests the plans of the hot statements: the plans use indexes and read few pages, whatever the tables contained when
Postgres made the plans.

Each statement runs as the store runs it, on a connection with the store's settings, until Postgres has chosen a generic
plan. Then EXPLAIN runs this prepared statement, and the test rolls the transaction back.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from psycopg import AsyncConnection, IsolationLevel, sql
from psycopg.adapt import Transformer
from psycopg.postgres import types
from psycopg.pq import Format

from shard.admin import statements as admin_statements
from shard.admin.job_counts import WantedCount
from shard.admin.job_pages import Wanted
from shard.admin.queue_admin import QueueAdmin
from shard.history.days import days_over, turn_cold
from shard.limits import InFlightLimits, Limit, LimitKey, Measure
from shard.placement import catalog, move_steps
from shard.placement import statements as placement_statements
from shard.placement.slots import SLOTS, slot_of
from shard.postgres import arrays
from shard.postgres.connection import Connection
from shard.postgres.pool import Database
from shard.queue import row_locks
from shard.queue import statements as queue_statements
from shard.queue.claim_floor import GUARD_US
from shard.queue.explain import COUNTED_MAX
from shard.queue.pending_enqueue import Handover, Taker
from shard.queue.settle import Nack, Settlement, _LeaseColumns
from shard.queue.store import Store
from shard.queue.token_buckets import Draw, TokenBuckets
from shard.vocabulary import (
    PRIORITIES,
    Alteration,
    Answer,
    Claimed,
    Failure,
    JobId,
    JobState,
    Lease,
    OrgId,
    QueueId,
    QueueName,
    Slot,
)
from shard.workflow import NodeOf, WorkflowId
from tests.conftest import SHARD
from tests.jobs import HOUR_US, QUEUE, ids_of, job_id, lease_jobs, some_jobs
from tests.recorder import Recorder, Run
from tests.timemachine import NO_HURRY, make_day, pass_time

# The number of queues of one org, and the number of queues of each of three other orgs.
QUEUES_OF_ORG, QUEUES_OF_OTHERS = 200, 100
QUEUES = QUEUES_OF_ORG + 3 * QUEUES_OF_OTHERS
ROWS = 100_000
BATCH = 100
GROUPS, TAKERS = 20, 64
# Postgres plans each of the first five runs for the run's parameters. After these runs it may keep a generic plan.
SETTLED = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    root: dict[str, Any]
    generic: bool

    def nodes(self) -> Iterator[dict[str, Any]]:
        todo = [self.root]
        while todo:
            node = todo.pop()
            yield node
            todo += node.get("Plans", [])

    @property
    def buffers(self) -> int:
        """Returns how many pages the statement touched, including the pages that functions and unique checks
        touched."""
        return int(self.root["Shared Hit Blocks"] + self.root["Shared Read Blocks"])

    def scans(self, relation: str) -> list[dict[str, Any]]:
        return [n for n in self.nodes() if n.get("Relation Name") == relation and "Scan" in n["Node Type"]]

    def indexes(self) -> set[str]:
        return {node["Index Name"] for node in self.nodes() if "Index Name" in node}

    def pages_of(self, index: str) -> int:
        """Returns how many pages the scans of one index touched: pages of the index, and pages of the table, which a
        scan reads to learn whether a row is visible."""
        scans = [node for node in self.nodes() if node.get("Index Name") == index]
        return sum(int(node["Shared Hit Blocks"] + node["Shared Read Blocks"]) for node in scans)

    def rows_read(self, relation: str) -> float:
        dropped = ("Rows Removed by Filter", "Rows Removed by Index Recheck", "Rows Removed by Join Filter")
        return sum(
            float(node["Actual Rows"] + sum(node.get(key, 0) for key in dropped)) * float(node["Actual Loops"])
            for node in self.scans(relation)
        )


async def explain(connection: Connection, run: Run) -> Plan:
    """Explains a statement that this connection has prepared. Executes it with these parameters."""
    statement, parameters = run
    cursor = await connection.execute(
        "SELECT name, generic_plans FROM pg_prepared_statements WHERE statement = %s "
        "ORDER BY prepare_time DESC LIMIT 1",
        [_numbered(statement)],
        prepare=False,
    )
    ((name, generic_plans),) = await cursor.fetchall()
    literals = [_literal(parameters[key]) for key in _keys(statement)]
    given = sql.SQL("({})").format(sql.SQL(", ").join(literals)) if literals else sql.SQL("")
    text = sql.SQL("EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) EXECUTE {} {}").format(sql.Identifier(name), given)
    cursor = await connection.execute(text, prepare=False)
    row = await cursor.fetchone()
    assert row is not None
    return Plan(root=row[0][0]["Plan"], generic=generic_plans > 0)


_PLACEHOLDER = re.compile(rb"%\((\w+)\)[sb]")


def _keys(statement: bytes) -> list[str]:
    """Returns the names of the parameters in the order of their numbers."""
    return list(dict.fromkeys(key.decode() for key in _PLACEHOLDER.findall(statement)))


def _numbered(statement: bytes) -> str:
    keys = _keys(statement)
    numbered = _PLACEHOLDER.sub(lambda found: b"$%d" % (keys.index(found[1].decode()) + 1), statement)
    return numbered.replace(b"%%", b"%").decode()


def _literal(value: object) -> sql.Composable:
    if isinstance(value, list) and not value:
        return sql.SQL("'{}'")
    if isinstance(value, arrays.Blobs | arrays.Texts):
        of = types["bytea" if isinstance(value, arrays.Blobs) else "text"]
        return _literal(Transformer().get_loader(of.array_oid, Format.BINARY).load(value.data))
    return sql.Literal(value)


async def run(connection: Connection, run: Run) -> None:
    await connection.run(*run)


@contextmanager
def undone(connection: Connection) -> Generator[None, None, None]:
    """Rolls back what the `with` block does. psycopg must not notice the rollback. Otherwise it would drop the prepared
    statements."""
    connection.pgconn.exec_(b"SAVEPOINT before")
    try:
        yield
    finally:
        connection.pgconn.exec_(b"ROLLBACK TO before")


# A table with many live jobs

FILL = b"""
INSERT INTO windrow.job (
    id, queue_id, run_at, visible_at, priority, kind, payload, attempt, lease, leased_at, worker, enqueued_at
)
SELECT
    (
        lpad(to_hex((extract(epoch FROM now()) * 1000)::bigint), 12, '0') || '7000' || '8' || lpad(to_hex(n), 15, '0')
    )::uuid,
    q.queue_id, due.at, due.at, 5, 'fill', '\\x00', leased.is::integer,
    CASE WHEN leased.is THEN n END, CASE WHEN leased.is THEN now() END, CASE WHEN leased.is THEN 'w' END, now()
FROM generate_series(1, %(rows)s) AS n
JOIN (SELECT queue_id, row_number() OVER () AS turn FROM windrow.queue) q ON q.turn = 1 + n %% %(queues)s,
    -- Of ten jobs of a queue six are ready, two scheduled and two leased.
    LATERAL (SELECT n / %(queues)s %% 10 AS digit) part,
    LATERAL (SELECT digit >= 8 AS is) leased,
    LATERAL (SELECT now() + CASE WHEN digit < 6 THEN n - 3600000000 ELSE n + 3600000000 END * interval '1 us' AS at) due
"""

FILL_FINISHED = b"""
INSERT INTO windrow.finished (
    id, queue_id, enqueued_at, run_at, priority, attempt, state, kind, payload, reason, retention
)
SELECT
    (
        lpad(to_hex((extract(epoch FROM now()) * 1000)::bigint), 12, '0') || '7000' || '9' || lpad(to_hex(n), 15, '0')
    )::uuid,
    (SELECT min(queue_id) FROM windrow.queue), now(), now(), 5, 1, 'cancelled', 'fill', '', 'filled', 30
FROM generate_series(1, %(rows)s) AS n
"""


async def fill(database: Database) -> None:
    await database.run(FILL, {"rows": ROWS, "queues": QUEUES})
    await database.run(FILL_FINISHED, {"rows": ROWS // 2})


@pytest.fixture
async def recorder(fresh_dsn: str, org: OrgId) -> AsyncGenerator[Recorder, None]:
    opened = Recorder(SHARD, fresh_dsn, connections=3)
    await opened.open()
    # With autovacuum off, only the test decides which statistics the planner has.
    for table in (b"org", b"queue", b"job", b"dead", b"departing", b"dedup"):
        await opened.run(b"ALTER TABLE windrow." + table + b" SET (autovacuum_enabled = off)", {})
    await Store(opened).names.make([(org, QueueName(f"queue-{n}")) for n in range(QUEUES_OF_ORG)])
    for other in others_of(org):
        await Store(opened).names.make([(other, QueueName(f"queue-{n}")) for n in range(QUEUES_OF_OTHERS)])
    yield opened
    await opened.close()


def others_of(org: OrgId) -> list[OrgId]:
    return [OrgId(f"{org}-{n}") for n in range(3)]


async def record(recorder: Recorder, org: OrgId) -> dict[str, Run]:
    """Runs each hot statement once, as the store does for a batch of jobs. Returns the runs by name."""
    store = Store(recorder)
    jobs = some_jobs(org, BATCH, queue="queue-7", dedup_keys=[f"key-{n}" for n in range(BATCH)])
    await store.enqueue(jobs)
    enqueue = recorder.last(queue_statements.ENQUEUE)
    # These jobs have new ids. With the same ids, the jobs would be duplicates, and the plan would differ.
    fresh = {
        "ids": "{" + ",".join(job_id() for _ in range(BATCH)) + "}",
        "dedup_keys": [f"new-{n}" for n in range(BATCH)],
    }
    held = leases(await lease_jobs(store, org, queue="queue-7", max_jobs=BATCH, window_us=HOUR_US))
    claim = recorder.last(queue_statements.CLAIM)
    await store.settle(Settlement.extend(org, held, window_us=2 * HOUR_US))
    named = _LeaseColumns([org] * BATCH, held).parameters()
    await row_locks.of_jobs(recorder).find([(org, lease.job_hex) for lease in held])
    texts = ["why"] * BATCH
    await store.enqueue(jobs)
    await store.get(org, ids_of(jobs), include_payload=True)
    find_known, get_jobs = recorder.last(queue_statements.FIND_KNOWN), recorder.last(queue_statements.GET_JOBS)
    await store.find_ended([(org, lease.job_hex) for lease in held])
    await store.sweep()
    sweep = recorder.last(queue_statements.SWEEP)
    handed = some_jobs(org, BATCH, queue="queue-7")
    await store.enqueue(handed, Handover(takers=dict.fromkeys(range(BATCH), Taker(1, "w", HOUR_US)), done=ignore))
    plain_handed = recorder.last(queue_statements.ENQUEUE_PLAIN)
    handed = some_jobs(org, BATCH, queue="queue-7", max_attempts=5)
    await store.enqueue(handed, Handover(takers=dict.fromkeys(range(BATCH), Taker(1, "w", HOUR_US)), done=ignore))
    enqueue_handed = recorder.last(queue_statements.ENQUEUE)
    await store.describe(jobs, ids_of(jobs))
    of_several = await lease_of_several(store, org)
    await store.enqueue(some_jobs(org, BATCH, queue="queue-6", live_keys=[f"key-{n}" for n in range(BATCH)]))
    await store.enqueue(some_jobs(org, BATCH, queue="queue-6", live_keys=[f"key-{n}" for n in range(BATCH)]))
    enqueue_live = {**recorder.last(queue_statements.ENQUEUE)[1], "live_keys": fresh["dedup_keys"]}
    waiting = some_jobs(org, BATCH, queue="queue-6")
    await store.enqueue(waiting)
    plain = recorder.last(queue_statements.ENQUEUE_PLAIN)
    await store.alter(org, ids_of(waiting), Alteration(priority=1))
    await store.enqueue(some_jobs(org, BATCH, queue="queue-5"))
    again = leases(await lease_jobs(store, org, queue="queue-5", max_jobs=BATCH))
    await store.settle(Settlement.release(org, again))
    released = recorder.last(queue_statements.GIVE_BACK)
    again = leases(await lease_jobs(store, org, queue="queue-5", max_jobs=BATCH))
    nacks = [Nack(lease=lease, failure=Failure(message="why"), retry_after_us=5) for lease in again]
    await store.settle(Settlement.nack(org, nacks)._replace(logs=dict(enumerate(texts))))
    nacked = recorder.last(queue_statements.GIVE_BACK)
    doomed = leases(await lease_jobs(store, org, queue="queue-5", max_jobs=BATCH))
    nacks = [Nack(lease=lease, failure=Failure(message="why", permanent=True)) for lease in doomed]
    await store.settle(Settlement.nack(org, nacks)._replace(logs=dict(enumerate(texts))))
    assert len(again) == len(doomed) == BATCH
    dead = [str(uuid.UUID(lease.job_hex)) for lease in doomed]
    return {
        "enqueue": (queue_statements.ENQUEUE, {**enqueue[1], **fresh}),
        "enqueue handed": (queue_statements.ENQUEUE, {**enqueue_handed[1], "ids": fresh["ids"]}),
        "enqueue plain": (queue_statements.ENQUEUE_PLAIN, {**plain[1], "ids": fresh["ids"]}),
        "enqueue plain handed": (queue_statements.ENQUEUE_PLAIN, {**plain_handed[1], "ids": fresh["ids"]}),
        "enqueue while live": (queue_statements.ENQUEUE, enqueue_live),
        "alter": (queue_statements.ALTER, {**recorder.last(queue_statements.ALTER)[1], "priority": 2}),
        "signal": (queue_statements.SIGNAL, {"org": org, "id": waiting.ids[0], "node": "no node", "payload": b"yes"}),
        "redrive": (queue_statements.REDRIVE, {"org": org, "ids": arrays.plain(dead)}),
        "find_known": find_known,
        "find_known while live": recorder.last(queue_statements.FIND_KNOWN),
        "describe_known": recorder.last(queue_statements.DESCRIBE_KNOWN),
        "claim": claim,
        "claim together": await claim_together(recorder, store, org),
        "extend": recorder.last(queue_statements.EXTEND),
        "ack": (queue_statements.ACK, {**named, "results": [b"done"] * BATCH, "logs": texts, "jobs": BATCH}),
        "ack of several orgs": (
            queue_statements.ACK,
            {**of_several.parameters(), "results": [], "logs": [], "jobs": BATCH},
        ),
        "inspect_leases": (queue_statements.INSPECT_LEASES, of_several.parameters()),
        "give_back after a delay": (queue_statements.GIVE_BACK, {**nacked[1], **named}),
        "mark_dead": (queue_statements.MARK_DEAD, {**recorder.last(queue_statements.MARK_DEAD)[1], **named}),
        "give_back": (queue_statements.GIVE_BACK, {**released[1], **named}),
        "give_back of several orgs": (queue_statements.GIVE_BACK, {**released[1], **of_several.parameters()}),
        "cancel": (queue_statements.CANCEL, {"org": org, "ids": named["ids"], "reason": "why"}),
        "explain_miss": (
            queue_statements.EXPLAIN_MISS,
            {**of_several.parameters(), "oldest_ms": int(held[0].job_hex[:12], 16)},
        ),
        "find_locked_jobs": recorder.last(queue_statements.FIND_LOCKED_JOBS),
        "get_jobs": get_jobs,
        "find_ended": recorder.last(queue_statements.FIND_ENDED),
        "sweep": sweep,
        "probe of all queues": await probe_all(recorder, store, org),
        **await record_moving(recorder, store, others=[org, *others_of(org)]),
    }


async def record_moving(recorder: Recorder, store: Store, *, others: list[OrgId]) -> dict[str, Run]:
    """Records the statements of a move. One chunk leaves a first slot and arrives in a second slot, as if the second
    slot were on another shard. Another chunk has departed. The other jobs of the first slot have not departed yet; half
    of these jobs are dead. The first slot has no job of `others`."""
    taken = {slot_of(other) for other in others}
    names = (OrgId(f"moving-{number}") for number in itertools.count())
    org = next(name for name in names if slot_of(name) not in taken)
    for queue in ("queue-1", "queue-2"):
        await store.enqueue(some_jobs(org, 2 * BATCH, queue=queue))
    dead = leases(await lease_jobs(store, org, queue="queue-2", max_jobs=BATCH))
    await store.settle(Settlement.nack(org, [Nack(lease=lease, failure=Failure(permanent=True)) for lease in dead]))
    away, here = slot_of(org), Slot(20_000)
    assert await move_steps.close_slots(recorder, [away], epoch=2)
    await move_steps.open_slots(recorder, [here], epoch=2, queues=[])
    assert await move_steps.export_chunk(recorder, {away: 1}, epoch=2, rows_max=BATCH, bytes_max=10**6) == {away: BATCH}
    departed = await move_steps.read_exported(recorder, [away], epoch=2)
    await move_steps.import_chunk(recorder, [part._replace(slot=here) for part in departed], epoch=2)
    assert await move_steps.delete_exported(recorder, {away: 1}, epoch=2) == BATCH
    await move_steps.export_chunk(recorder, {away: 2}, epoch=2, rows_max=BATCH, bytes_max=10**6)
    departed = await move_steps.read_exported(recorder, [away], epoch=2)
    await move_steps.count_remaining(recorder, [away])
    _, taking = recorder.last(placement_statements.IMPORT_CHUNK)
    (part,) = departed
    return {
        "export_chunk": (
            placement_statements.EXPORT_CHUNK,
            {**recorder.last(placement_statements.EXPORT_CHUNK)[1], "chunks": "{3}"},
        ),
        "export_chunk of the dead": (
            placement_statements.EXPORT_CHUNK,
            {**recorder.last(placement_statements.EXPORT_CHUNK)[1], "chunks": "{3}", "rows": 3 * BATCH},
        ),
        "read_exported": recorder.last(placement_statements.READ_EXPORTED),
        "import_chunk": (placement_statements.IMPORT_CHUNK, {**taking, "chunks": "{2}", "jobs": [part.jobs]}),
        "delete_exported": (
            placement_statements.DELETE_EXPORTED,
            {**recorder.last(placement_statements.DELETE_EXPORTED)[1], "chunks": "{2}"},
        ),
        "count_remaining": recorder.last(placement_statements.COUNT_REMAINING),
    }


def ignore(_: object) -> None:
    """Ignores jobs that were handed over, because no consumer waits for them."""


async def lease_of_several(store: Store, org: OrgId) -> _LeaseColumns:
    """Returns a batch of leases of four orgs, with the orgs in turn."""
    orgs = [org, *others_of(org)]
    share = BATCH // len(orgs)
    for one in orgs:
        await store.enqueue(some_jobs(one, share, queue="queue-8"))
    held = [leases(await lease_jobs(store, one, queue="queue-8", window_us=HOUR_US, max_jobs=share)) for one in orgs]
    return _LeaseColumns(orgs * share, [lease for some in zip(*held, strict=True) for lease in some])


async def claim_together(recorder: Recorder, store: Store, org: OrgId) -> Run:
    """Claims for many takers in one statement. Each taker names two queues of one of four orgs, and all takers together
    want one batch of jobs."""
    orgs = [org, *others_of(org)]
    wishes = [1 + (taker < BATCH - TAKERS) for taker in range(TAKERS)]
    groups = [
        (orgs[n % len(orgs)], [QueueName(f"queue-{2 * n}"), QueueName(f"queue-{2 * n + 1}")]) for n in range(GROUPS)
    ]
    for taker, wish in enumerate(wishes):
        of, queues = groups[taker % GROUPS]
        await store.enqueue(some_jobs(of, wish, queue=queues[taker // GROUPS % 2]))
    before = len(recorder.runs)
    taken = await asyncio.gather(
        *(
            store.claim(*groups[taker % GROUPS], max_jobs=wish, window_us=HOUR_US, worker="w")
            for taker, wish in enumerate(wishes)
        )
    )
    assert [len(some.jobs) for some in taken] == wishes
    assert recorder.count(queue_statements.CLAIM, since=before) == 1
    return recorder.last(queue_statements.CLAIM)


async def probe_all(recorder: Recorder, store: Store, org: OrgId) -> Run:
    """Probes all queues from their floors."""
    numbers: list[QueueId] = []
    for one, count in [(org, QUEUES_OF_ORG), *((other, QUEUES_OF_OTHERS) for other in others_of(org))]:
        numbers += (await store.names.find([(one, QueueName(f"queue-{n}")) for n in range(count)])).values()
    assert len(numbers) == QUEUES
    await store.sweeper.probe(numbers)
    return recorder.last(queue_statements.PROBE)


def leases(taken: list[tuple[Claimed, Lease]]) -> list[Lease]:
    return [lease for _, lease in taken]


async def settle(connection: Connection, runs: Mapping[str, Run]) -> None:
    """Runs each statement until Postgres keeps one plan for it, and rolls each run back."""
    for each in runs.values():
        for _ in range(SETTLED):
            with undone(connection):
                await run(connection, each)


# How many pages a statement may touch for each job of a batch, to read and write the job's row and index entries.
PAGES_A_JOB = {
    "enqueue": 30,
    "enqueue handed": 30,
    "enqueue plain": 30,
    "enqueue plain handed": 30,
    "enqueue while live": 30,
    "alter": 40,
    "redrive": 40,
    "signal": 40,
    "find_known": 30,
    "find_known while live": 30,
    "describe_known": 30,
    "claim": 40,
    "claim together": 60,
    "extend": 30,
    "ack": 30,
    "ack of several orgs": 30,
    "inspect_leases": 25,
    "give_back after a delay": 30,
    "mark_dead": 30,
    "give_back": 30,
    "give_back of several orgs": 30,
    "cancel": 30,
    "explain_miss": 25,
    "find_locked_jobs": 30,
    "get_jobs": 25,
    "find_ended": 10,
    "export_chunk": 40,
    "export_chunk of the dead": 40,
    "read_exported": 25,
    "import_chunk": 40,
    "delete_exported": 25,
    "count_remaining": 25,
    # For these two statements, the number is per lane, not per job. A queue has nine lanes.
    "sweep": 9,
    "probe of all queues": 9,
}
ROWS_OF = {"export_chunk of the dead": 4 * BATCH, "count_remaining": 6 * BATCH}
LANES = {"sweep": 3 * len(PRIORITIES), "probe of all queues": QUEUES * len(PRIORITIES)}


def assert_bounded(name: str, plan: Plan) -> None:
    assert not [
        node["Node Type"] for node in plan.scans("job") if node["Node Type"] in ("Seq Scan", "Bitmap Heap Scan")
    ]
    for node in plan.nodes():
        # A sequence is a table of one tuple without an index.
        assert node["Node Type"] != "Seq Scan" or node["Relation Name"] == "clock", (name, node)
    count = LANES.get(name, ROWS_OF.get(name, BATCH))
    # Each row is read once to find it and once to change it. EXPLAIN rounds the rows that one loop reads, so the bound
    # is a little higher.
    assert plan.rows_read("job") <= (1 if name in LANES else 2) * count * 1.02, f"{name}: {plan.root}"
    assert plan.buffers <= PAGES_A_JOB[name] * count, (name, plan.buffers, plan.root)


async def nothing(_: Recorder, __: OrgId) -> None:
    """Does nothing: the tables have no statistics, as in a new database."""


async def analyze_when_full(recorder: Recorder, org: OrgId) -> None:
    await fill(recorder)
    await recorder.run(b"ANALYZE windrow.job", {})


async def vacuum_when_empty(recorder: Recorder, org: OrgId) -> None:
    """Vacuums a drained queue, as autovacuum does. Until the next vacuum, Postgres believes that the table is empty,
    even if the table has become large."""
    store = Store(recorder)
    await store.enqueue(some_jobs(org, BATCH, queue="queue-7"))
    held = leases(await lease_jobs(store, org, queue="queue-7"))
    await store.settle(Settlement.ack(org, held, [None] * len(held)))
    await recorder.run(b"VACUUM (ANALYZE, TRUNCATE off) windrow.job", {})


Knowledge = Callable[[Recorder, OrgId], Awaitable[None]]


@pytest.mark.turns(3)
@pytest.mark.parametrize("knowledge", [nothing, analyze_when_full, vacuum_when_empty], ids=lambda k: k.__name__)
async def test_hot_statements_walk_indexes_and_touch_little(
    recorder: Recorder, org: OrgId, knowledge: Knowledge
) -> None:
    """One connection plans the statements before the tables are filled. Another connection plans them afterwards."""
    await knowledge(recorder, org)
    runs = await record(recorder, org)
    async with recorder.transaction() as early:
        await early.execute(NO_HURRY)
        await settle(early, runs)
        if knowledge is not analyze_when_full:
            await fill(recorder)
        await assert_all_bounded("settled when empty", early, runs)
        async with recorder.transaction() as late:
            await late.execute(NO_HURRY)
            await settle(late, runs)
            await assert_all_bounded("settled when full", late, runs)


async def assert_all_bounded(when: str, connection: Connection, runs: Mapping[str, Run]) -> None:
    for name, each in runs.items():
        with undone(connection):
            plan = await explain(connection, each)
        rows = plan.rows_read("job")
        print(f"{when:18} {name:23} {plan.buffers:6} pages  {rows:6.0f} rows of job  {plan.generic=}")
        assert_bounded(name, plan)
        if name.startswith("claim"):
            assert plan.root["Node Type"] == "ModifyTable"
            assert plan.indexes() & {"job_ready", "job_id"} == {"job_ready"}
            assert sorted(n["Node Type"] for n in plan.scans("job")) == ["Index Scan", "Tid Scan"]


# The statements that run with leases that nobody has, or that look for locks on jobs.
OF_LEASES = ("EXTEND", "INSPECT_LEASES", "GIVE_BACK", "ACK", "EXPLAIN_MISS", "FIND_LOCKED_JOBS")


async def test_a_call_by_id_reads_no_row_of_another_org_so_its_time_does_not_tell_what_that_org_has(
    recorder: Recorder, org: OrgId
) -> None:
    store, owner = Store(recorder), others_of(org)[0]
    await store.enqueue(some_jobs(org, BATCH, queue="queue-7"))
    await fill(recorder)
    waiting, dead, finished = (some_jobs(owner, BATCH, queue=f"queue-{n}") for n in range(3))
    for jobs in (waiting, dead, finished):
        await store.enqueue(jobs)
    held = leases(await lease_jobs(store, owner, queue="queue-1", max_jobs=BATCH))
    await store.settle(Settlement.nack(owner, [Nack(lease=lease, failure=Failure(permanent=True)) for lease in held]))
    held = leases(await lease_jobs(store, owner, queue="queue-2", max_jobs=BATCH))
    await store.settle(Settlement.ack(owner, held, [None] * BATCH))
    theirs = [*ids_of(waiting), *ids_of(dead), *ids_of(finished)]
    # In each index, these unknown ids are next to the ids of the other org.
    unknown = [JobId(one[:-1] + ("0" if one[-1] != "0" else "1")) for one in theirs]

    async def runs_for(ids: list[JobId]) -> dict[str, Run]:
        await store.get(org, ids, include_payload=True)
        assert set(await store.cancel(org, ids, reason="")) == {Answer.NOT_FOUND}
        assert set(await store.alter(org, ids, Alteration(priority=1))) == {Answer.NOT_FOUND}
        assert set(await store.redrive(org, ids)) == {Answer.NOT_FOUND}
        node = NodeOf(WorkflowId(ids[0]), 0)
        assert (await store.signal(org, ids[0], node, b"")).answer is Answer.NOT_FOUND
        named = [Lease(job_hex=one.replace("-", ""), number=7) for one in ids]
        for settlement in (
            Settlement.extend(org, named, window_us=HOUR_US),
            Settlement.nack(org, [Nack(lease=lease) for lease in named]),
            Settlement.release(org, named),
            Settlement.ack(org, named),
        ):
            assert set(await store.settle(settlement)) == {Answer.NOT_FOUND}
        await row_locks.of_jobs(recorder).find([(org, lease.job_hex) for lease in named])
        names = ("GET_JOBS", "CANCEL", "ALTER", "REDRIVE", "SIGNAL", *OF_LEASES)
        return {name: recorder.last(getattr(queue_statements, name)) for name in names}

    of_owner, of_nobody = await runs_for(theirs), await runs_for(unknown)
    async with recorder.transaction() as connection:
        await connection.execute(NO_HURRY)
        await settle(connection, of_nobody)
        for name in of_owner:
            plans: list[Plan] = []
            for each in (of_owner[name], of_nobody[name]):
                with undone(connection):
                    plans.append(await explain(connection, each))
            for plan in plans:
                read = {
                    node["Relation Name"]: plan.rows_read(node["Relation Name"])
                    for node in plan.nodes()
                    if "Relation Name" in node
                }
                of_jobs = {
                    table: rows for table, rows in read.items() if table in ("job", "dead") or "finished" in table
                }
                assert set(of_jobs.values()) == {0}, (name, read)


# A snapshot that another session holds


async def test_under_a_held_snapshot_a_claim_from_its_floors_stays_cheap(
    recorder: Recorder, fresh_dsn: str, org: OrgId
) -> None:
    """20,000 jobs pass through while a snapshot keeps Postgres from removing their dead rows."""
    store = Store(recorder)
    queue = "queue-7"
    async with await AsyncConnection.connect(fresh_dsn) as holder:
        await holder.set_isolation_level(IsolationLevel.REPEATABLE_READ)
        await holder.execute("SELECT count(*) FROM windrow.job")
        for _ in range(20):
            await store.enqueue(some_jobs(org, 1000, queue=queue))
            held = leases(await lease_jobs(store, org, queue=queue))
            assert len(held) == 1000
            await store.settle(Settlement.ack(org, held, [None] * 1000))
        await pass_time(recorder, GUARD_US / 1_000_000)
        await store.sweep()
        await store.enqueue(some_jobs(org, BATCH, queue=queue))
        assert len(await lease_jobs(store, org, queue=queue, max_jobs=1)) == 1
        statement, parameters = recorder.last(queue_statements.CLAIM)
        parameters = {**parameters, "max_jobs": f"{{{BATCH}}}"}
        from_zero = {**parameters, "floors_us": "{" + ",".join(["0"] * 9) + "}"}
        assert parameters["floors_us"] != from_zero["floors_us"]
        async with recorder.transaction() as connection:
            await run(connection, (statement, {**parameters, "max_jobs": "{0}"}))
            with undone(connection):
                cheap = await explain(connection, (statement, parameters))
            with undone(connection):
                dear = await explain(connection, (statement, from_zero))
    found_cheaply, found_dearly = cheap.pages_of("job_ready"), dear.pages_of("job_ready")
    print(f"to find {BATCH} jobs: {found_cheaply} pages from the floors, {found_dearly} from the beginning of time")
    assert cheap.rows_read("job") == dear.rows_read("job") == 2 * (BATCH - 1)
    assert cheap.buffers <= PAGES_A_JOB["claim"] * BATCH
    assert found_dearly > 10 * found_cheaply


# Explanations

DEEP = 20_000
# Fills one queue with jobs of all priorities. Four of five jobs are ready, and the others are scheduled.
FILL_QUEUE = b"""
INSERT INTO windrow.job (id, queue_id, run_at, visible_at, priority, kind, payload, enqueued_at)
SELECT
    (
        lpad(to_hex((extract(epoch FROM now()) * 1000)::bigint), 12, '0') || '7000' || '9' || lpad(to_hex(n), 15, '0')
    )::uuid,
    %(queue_id)s::bigint, due.at, due.at, 1 + n %% 9, 'fill', '\\x00', now()
FROM generate_series(1, %(rows)s) AS n,
    LATERAL (SELECT CASE WHEN n %% 5 = 0 THEN n + 3600000000 ELSE n - 3600000000 END AS in_us) later,
    LATERAL (SELECT now() + later.in_us * interval '1 us' AS at) due
"""
# How many rows each statement may read: the rows that the statement counts, and rows with the same time as a counted
# row.
ROWS_EXPLAINED = {"explain_job": 2 * COUNTED_MAX + 10, "explain_queue": COUNTED_MAX + 9 * 100 + 20}


@pytest.mark.turns(3)
@pytest.mark.parametrize("knowledge", [nothing, analyze_when_full, vacuum_when_empty], ids=lambda k: k.__name__)
async def test_to_explain_a_job_or_a_queue_no_more_is_read_than_is_counted(
    recorder: Recorder, org: OrgId, knowledge: Knowledge
) -> None:
    await knowledge(recorder, org)
    store, queue = Store(recorder), QueueName("queue-7")
    jobs = some_jobs(org, 1, queue=queue, priority=9)
    await store.enqueue(jobs)
    store.consumers_seen.note(org, [queue], ["fill"])
    await store.consumers_seen.write()
    await store.explain_job(org, ids_of(jobs)[0])
    await store.explain_queue(org, queue)
    runs = {
        "explain_job": recorder.last(queue_statements.EXPLAIN_JOB),
        "explain_queue": recorder.last(queue_statements.EXPLAIN_QUEUE),
    }
    numbers = await store.names.find([(org, queue)])
    async with recorder.transaction() as early:
        await early.execute(NO_HURRY)
        await settle(early, runs)
        await recorder.run(FILL_QUEUE, {"queue_id": numbers[org, queue], "rows": DEEP})
        await assert_read("settled when empty", early, runs)
        async with recorder.transaction() as late:
            await late.execute(NO_HURRY)
            await settle(late, runs)
            await assert_read("settled when full", late, runs)


async def assert_read(when: str, connection: Connection, runs: Mapping[str, Run]) -> None:
    for name, each in runs.items():
        plan = await explain(connection, each)
        rows = plan.rows_read("job")
        print(f"{when:18} {name:14} {plan.buffers:6} pages  {rows:6.0f} rows of job  {plan.generic=}")
        assert {node["Node Type"] for node in plan.scans("job")} <= {"Index Scan", "Index Only Scan"}
        assert not [node for node in plan.nodes() if node["Node Type"] == "Seq Scan"], plan.root
        assert plan.indexes() <= {
            *("job_ready", "job_id", "departing_id", "dead_by_death", "consumer_seen_pkey", "queue_org_queue_key"),
            # With this index the statement finds that no job waits for a group slot.
            "job_group_waits",
        }
        assert COUNTED_MAX < rows <= ROWS_EXPLAINED[name], plan.root
        # Each row may cost two pages: the page of the index entry, and the page of the row, which shows whether the row
        # is visible.
        assert plan.buffers <= 2 * ROWS_EXPLAINED[name], plan.root


# Groups

FILL_GROUPS = b"""
INSERT INTO windrow.job (id, queue_id, run_at, visible_at, priority, kind, payload, group_key)
SELECT
    (
        lpad(to_hex((extract(epoch FROM now()) * 1000)::bigint), 12, '0') || '7000' || '9' || lpad(to_hex(n), 15, '0')
    )::uuid,
    %(queue_id)s::bigint, now() - n * interval '1 us', 'infinity', 1 + n %% 9, 'fill', '\\x00',
    CASE WHEN n %% 2 = 0 THEN 'large' ELSE 'g' || n %% 100000 END
FROM generate_series(1, %(rows)s) AS n
"""
# Inserts jobs of the same groups that are not due.
FILL_GROUPS_LATER = b"""
INSERT INTO windrow.job (id, queue_id, run_at, visible_at, priority, kind, payload, group_key)
SELECT
    gen_random_uuid(), %(queue_id)s::bigint, later.at, later.at, 5, 'fill', '\\x00',
    CASE WHEN n %% 2 = 0 THEN 'large' ELSE 'g' || n %% 100000 END
FROM generate_series(1, %(rows)s) AS n
CROSS JOIN LATERAL (SELECT now() + interval '1 hour' + n * interval '1 us' AS at) later
"""
# How many jobs one large group has. 50,000 small groups together have the same number of jobs.
DEEP_GROUP = 200_000


@pytest.mark.turns(3)
@pytest.mark.parametrize("knowledge", [nothing, analyze_when_full, vacuum_when_empty], ids=lambda k: k.__name__)
async def test_to_fill_a_slot_or_to_explain_a_group_a_few_rows_are_read(
    recorder: Recorder, org: OrgId, knowledge: Knowledge
) -> None:
    """One group has 200,000 jobs that wait and 100,000 that are not due, and 50,000 other groups have six jobs each."""
    await knowledge(recorder, org)
    store, queue = Store(recorder), QueueName("groups")
    jobs = some_jobs(org, 2, queue=queue, group="large")
    jobs.ids.sort()
    await store.enqueue(jobs)
    ((_, lease),) = await lease_jobs(store, org, queue=queue)
    await store.explain_job(org, ids_of(jobs)[1])
    await store.explain_queue(org, queue)
    await store.sweep()
    runs = {
        "explain_group": recorder.last(queue_statements.EXPLAIN_GROUP),
        "explain_queue": recorder.last(queue_statements.EXPLAIN_QUEUE),
        "find_waiting_groups": recorder.last(queue_statements.FIND_WAITING_GROUPS),
        "claim": recorder.last(queue_statements.CLAIM),
        "sweep": recorder.last(queue_statements.SWEEP),
        "ack": (
            queue_statements.ACK,
            {
                **_LeaseColumns([org], [lease]).parameters(),
                "results": arrays.blobs(()),
                "logs": arrays.texts(()),
                "jobs": 1,
            },
        ),
    }
    numbers = await store.names.find([(org, queue)])
    queue_id = numbers[org, queue]
    async with recorder.transaction() as connection:
        await connection.execute(NO_HURRY)
        with undone(connection):
            await settle(connection, runs)
        # With the triggers, the insert would take minutes, and the jobs would take the group slots.
        await connection.execute("ALTER TABLE windrow.job DISABLE TRIGGER USER", prepare=False)
        await connection.run(FILL_GROUPS, {"queue_id": queue_id, "rows": 2 * DEEP_GROUP})
        await connection.run(FILL_GROUPS_LATER, {"queue_id": queue_id, "rows": DEEP_GROUP})
        await connection.execute("ALTER TABLE windrow.job ENABLE TRIGGER USER", prepare=False)
        pages = {}
        for name, each in runs.items():
            with undone(connection):
                pages[name] = (await explain(connection, each)).buffers
        fill = (
            "EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) "
            "SELECT windrow.fill_group_slots(ARRAY[%s, %s], ARRAY['large', 'g1'])"
        )
        with undone(connection):
            await connection.execute("UPDATE windrow.queue SET group_concurrency = 3 WHERE queue_id = %s", [queue_id])
            cursor = await connection.execute(fill.encode(), [queue_id, queue_id])
            ((found,),) = await cursor.fetchall()
            pages["fill"] = Plan(root=found[0]["Plan"], generic=True).buffers
        take = (
            "EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) SELECT windrow.take_group_slots("
            "ARRAY[gen_random_uuid(), gen_random_uuid()], ARRAY[%s, %s], ARRAY['large', 'new'], '{}', '{}')"
        )
        with undone(connection):
            cursor = await connection.execute(take.encode(), [queue_id, queue_id])
            ((found,),) = await cursor.fetchall()
            pages["take"] = Plan(root=found[0]["Plan"], generic=True).buffers
    print(pages)
    # Two jobs of the first group and three jobs of the second group get group slots.
    assert pages["fill"] < 300
    # A scan of all the cluster's slots would read 100 pages.
    assert pages["take"] < 60
    assert pages["claim"] < 200
    assert pages["ack"] < 100
    assert pages["sweep"] < 30 * QUEUES
    assert pages["explain_group"] <= 3 * COUNTED_MAX
    assert pages["explain_queue"] <= 3 * COUNTED_MAX
    # The sweep finds 1,000 groups. Each group needs two lookups: one for the group, and one for its slots.
    assert pages["find_waiting_groups"] <= 12 * 1_000 + 10 * QUEUES


# Lists


FILL_DAY = b"""
INSERT INTO windrow.finished (
    id, queue_id, enqueued_at, run_at, finished_at, priority, attempt, state, kind, payload, reason, retention
)
SELECT
    (lpad(to_hex(m.ms), 12, '0') || '7000' || '9' || lpad(to_hex(n), 15, '0'))::uuid,
    CASE WHEN n %% 100 = 0 THEN %(small)s::bigint ELSE %(large)s::bigint END,
    m.made, m.made, m.made, 5, 1, 'cancelled', 'fill', '', 'filled', 30
FROM generate_series(1, %(rows)s) AS n
CROSS JOIN LATERAL (
    SELECT date_trunc('day', now()) - %(days)s * interval '1 day' + n * interval '1 s' AS made
) at
CROSS JOIN LATERAL (SELECT at.made, (extract(epoch FROM at.made) * 1000)::bigint AS ms) m
"""


async def test_a_page_of_cold_jobs_costs_what_is_on_it(fresh_dsn: str, org: OrgId) -> None:
    """The small org has one job in a hundred, and the large org has the others."""
    page_size, days, rows = 50, 8, 20_000
    async with recording(fresh_dsn, may_scan=True) as recorder:
        small, large = org, OrgId(f"{org}-large")
        queue = QueueName("queue-1")
        numbers = await Store(recorder).names.make([(small, queue), (large, queue)])
        lanes = {"small": numbers[small, queue], "large": numbers[large, queue]}
        for ago in range(days + 1, 1, -1):
            await make_day(recorder, retention=30, before="now", days=ago)
            await recorder.run(FILL_DAY, {**lanes, "days": ago, "rows": rows})
        cold = [await turn_cold(recorder, day) for day in await days_over(recorder)]
        assert sum(day.jobs for day in cold) == days * rows
        for whose, of_queue in itertools.product((small, large), (queue, None)):
            wanted = Wanted(org=whose, queue=of_queue, state=JobState.CANCELLED)
            token, seen = "", 0
            # Later pages must not cost more than the first page.
            while seen < 12 * page_size:
                page = await QueueAdmin(recorder).list_jobs(wanted, page_size=page_size, page_token=token)
                assert len(page.jobs) == page_size
                seen += page_size
                token = page.next_token
                async with recorder.transaction() as connection:
                    await run(connection, recorder.last(admin_statements.LIST_JOBS))
                    plan = await explain(connection, recorder.last(admin_statements.LIST_JOBS))
                # Each job may cost two pages, and each day may cost one lookup.
                print(f"{whose} {of_queue} {seen:6} {plan.buffers:6} pages")
                assert plan.buffers <= 3 * page_size + 60 * days, plan.root


SEARCHES = {"range": admin_statements.FIND_SCAN_RANGE, "list": admin_statements.LIST_JOBS}

FILL_LANE = b"""
INSERT INTO windrow.job (id, queue_id, run_at, visible_at, priority, kind, payload, attributes, enqueued_at)
SELECT
    (
        lpad(to_hex((extract(epoch FROM now()) * 1000)::bigint + %(later_ms)s + n), 12, '0')
        || '70008' || lpad(to_hex(n), 15, '0')
    )::uuid,
    %(lane)s, now(), now(), 5, 'fill', '', '{"campaign": "1"}', now()
FROM generate_series(1, %(rows)s) AS n
"""


async def test_right_after_a_load_a_search_and_a_count_read_a_range_and_not_all_jobs_of_the_org(
    fresh_dsn: str, org: OrgId
) -> None:
    """Without statistics, the planner believes that an org has few jobs, and would read all jobs of the org."""
    async with recording(fresh_dsn, may_scan=True) as recorder:
        await recorder.run(b"ALTER TABLE windrow.job SET (autovacuum_enabled = off)", {})
        queue = QueueName("queue-1")
        lane = (await Store(recorder).names.make([(org, queue)]))[org, queue]
        await recorder.run(FILL_LANE, {"lane": lane, "rows": ROWS, "later_ms": 0})
        admin = QueueAdmin(recorder)
        page = await admin.list_jobs(Wanted(org=org, attributes='{"campaign": "2"}'), page_size=50, page_token="")
        assert (page.jobs, page.until is None) == ([], False)
        searches = {name: recorder.last(statement) for name, statement in SEARCHES.items()}
        part = await admin.count_jobs(WantedCount(org=org), page_token="", with_ids=False)
        assert part.until is not None
        searches["count"] = recorder.last(admin_statements.COUNT_JOBS)
        for name, search in searches.items():
            async with recorder.transaction() as connection:
                await run(connection, search)
                plan = await explain(connection, search)
            read = max(float(node["Actual Rows"]) * float(node["Actual Loops"]) for node in plan.nodes())
            assert read <= 10_001, (name, plan.root)


async def test_a_search_and_a_count_do_not_read_the_newer_jobs_of_another_org(fresh_dsn: str, org: OrgId) -> None:
    """The other org has most of the jobs in the table. If a range contained all of them, the planner would read the
    whole table."""
    async with recording(fresh_dsn, may_scan=True) as recorder:
        queue, other = QueueName("queue-1"), OrgId(f"{org}-other")
        lanes = await Store(recorder).names.make([(org, queue), (other, queue)])
        await recorder.run(FILL_LANE, {"lane": lanes[org, queue], "rows": ROWS, "later_ms": 0})
        await recorder.run(FILL_LANE, {"lane": lanes[other, queue], "rows": ROWS, "later_ms": ROWS})
        await recorder.run(b"ANALYZE windrow.job", {})
        admin = QueueAdmin(recorder)
        page = await admin.list_jobs(Wanted(org=org, attributes='{"campaign": "2"}'), page_size=50, page_token="")
        assert (page.jobs, page.until is None) == ([], False)
        await admin.count_jobs(WantedCount(org=org), page_token="", with_ids=False)
        searches = [one for one in recorder.runs if one[0] in {admin_statements.LIST_JOBS, admin_statements.COUNT_JOBS}]
        assert len(searches) >= 3
        for search in searches:
            async with recorder.transaction() as connection:
                await run(connection, search)
                plan = await explain(connection, search)
            assert plan.rows_read("job") <= 10_001, plan.root


async def test_to_find_a_range_no_older_jobs_of_another_org_are_read(fresh_dsn: str, org: OrgId) -> None:
    """The planner believes that the jobs of the org are spread over the whole table. So it expects that a scan soon
    finds enough of them."""
    async with recording(fresh_dsn, may_scan=True) as recorder:
        queue, other = QueueName("queue-1"), OrgId(f"{org}-other")
        lanes = await Store(recorder).names.make([(org, queue), (other, queue)])
        await recorder.run(FILL_LANE, {"lane": lanes[other, queue], "rows": ROWS, "later_ms": 0})
        await recorder.run(FILL_LANE, {"lane": lanes[org, queue], "rows": ROWS // 20, "later_ms": ROWS})
        await recorder.run(b"ANALYZE windrow.job", {})
        admin = QueueAdmin(recorder)
        await admin.list_jobs(Wanted(org=org, attributes='{"campaign": "2"}'), page_size=50, page_token="")
        await admin.list_jobs(Wanted(org=org, queue=queue, kind="other"), page_size=50, page_token="")
        await admin.count_jobs(WantedCount(org=org), page_token="", with_ids=False)
        ranges = [one for one in recorder.runs if one[0] == admin_statements.FIND_SCAN_RANGE]
        assert len(ranges) >= 3
        for search in ranges:
            async with recorder.transaction() as connection:
                if getattr(search[0], "indexed", False):
                    await connection.execute("SET LOCAL enable_seqscan = off")
                await run(connection, search)
                plan = await explain(connection, search)
            # The statement may read each job of the org twice.
            assert plan.rows_read("job") <= ROWS // 10, plan.root


# Sets the placements of 128 slots to another shard, as a balancer does.
MOVE_SLOTS = b"""
WITH next AS (
    UPDATE windrow.catalog SET epoch = epoch + 1 RETURNING epoch
), moved AS (
    UPDATE windrow.placement p SET writes = '{s2}', reads = '{s2}', epoch = next.epoch, changed = next.epoch
    FROM next WHERE p.slot %% 128 = %(part)s
    RETURNING p.slot
)
INSERT INTO windrow.former_owner (slot, shard, left_at) SELECT slot, 's1', now() FROM moved
"""


@pytest.mark.parametrize("analyzed", ["before", "after", "never"])
async def test_a_look_at_the_catalog_reads_each_row_a_few_times_whatever_the_statistics_say(
    fresh_dsn: str, analyzed: str
) -> None:
    async with contextlib.AsyncExitStack() as stack:
        recorder = Recorder(SHARD, fresh_dsn, connections=1, may_scan=True)
        await recorder.open()
        stack.push_async_callback(recorder.close)
        for table in ("placement", "former_owner"):
            await recorder.run(f"ALTER TABLE windrow.{table} SET (autovacuum_enabled = off)".encode(), {})
        first = await catalog.look(recorder)
        if analyzed == "before":
            await recorder.run(b"ANALYZE windrow.placement, windrow.former_owner", {})
        for part in range(64):
            await recorder.run(MOVE_SLOTS, {"part": part})
        if analyzed == "after":
            await recorder.run(b"ANALYZE windrow.placement, windrow.former_owner", {})
        newest = (await catalog.look(recorder, first.catalog)).catalog.epoch
        statement = placement_statements.READ_CATALOG
        assert newest == first.catalog.epoch + 64
        for since in (newest, newest - 1, newest - 40, first.catalog.epoch, -1):
            async with recorder.transaction() as connection:
                await run(connection, (statement, {"since": since}))
                plan = await explain(connection, (statement, {"since": since}))
            read = max(float(node["Actual Rows"]) * float(node["Actual Loops"]) for node in plan.nodes())
            assert read <= 2 * SLOTS, (since, plan.root)
            assert plan.rows_read("placement") <= SLOTS, (since, plan.root)
            assert plan.rows_read("former_owner") <= (SLOTS if since < newest else 0), (since, plan.root)


# Buckets


async def test_a_draw_reads_only_its_buckets(fresh_dsn: str) -> None:
    async with recording(fresh_dsn) as recorder, recorder.transaction() as connection:
        await connection.execute(NO_HURRY)
        await recorder.run(
            b"INSERT INTO windrow.token_bucket SELECT 'org-' || n, '', 'starts', 5, now(), 0, 10, 86400000000, 1 "
            b"FROM generate_series(1, 50000) AS n",
            {},
        )
        draws = [Draw(OrgId(f"org-{n * 1000}"), _limit(n), 1, 3) for n in range(1, 21)]
        assert not any(isinstance(drawn, Exception) for drawn in await TokenBuckets(recorder).draw(draws))
        drawn = recorder.last(queue_statements.DRAW_TOKENS)
        for _ in range(SETTLED):
            await run(connection, drawn)
        plan = await explain(connection, drawn)
    assert plan.scans("token_bucket") == []
    # Each draw touches the index pages from the root to the entry, the page of the row, and a page for the row's new
    # version.
    assert plan.buffers <= 15 * len(draws), plan.root


async def test_a_claim_within_limits_reads_its_leases_and_no_job_that_waits(fresh_dsn: str) -> None:
    org, leased_max = OrgId("acme"), 20
    async with recording(fresh_dsn) as recorder:
        store = Store(recorder)
        for _ in range(3):
            await store.enqueue(some_jobs(org, 1000))
        await recorder.run(
            b"INSERT INTO windrow.job (id, queue_id, run_at, visible_at, priority, kind, payload) "
            b"SELECT gen_random_uuid(), q.queue_id, now() + interval '1 hour', now() + interval '1 hour', 5, 'k', '' "
            b"FROM windrow.queue q CROSS JOIN generate_series(1, 20000)",
            {},
        )

        async def claim() -> int:
            result = await store.claim(
                org, [QUEUE], max_jobs=100, window_us=HOUR_US, worker="w", in_flight=InFlightLimits(None, leased_max)
            )
            return len(result.jobs)

        assert await claim() == leased_max
        assert await claim() == 0
        full = recorder.last(queue_statements.CLAIM_WITHIN_LIMITS)
        assert await store.count_in_flight(org, QUEUE, InFlightLimits(leased_max, None)) == (leased_max, None)
        async with recorder.transaction() as connection:
            await connection.execute(NO_HURRY)
            for _ in range(SETTLED):
                await run(connection, full)
            plan = await explain(connection, full)
    assert plan.rows_read("job") == 0, plan.root
    # Each lease touches the pages of an index entry, of its row, and of the queue.
    assert plan.buffers <= 4 * leased_max, plan.root


def _limit(number: int) -> Limit:
    return Limit(LimitKey(OrgId(f"org-{number * 1000}"), QueueName(""), Measure.STARTS), 10, 86_400_000_000, 1)


@contextlib.asynccontextmanager
async def recording(dsn: str, *, may_scan: bool = False) -> AsyncGenerator[Recorder, None]:
    recorder = Recorder(SHARD, dsn, connections=3, may_scan=may_scan)
    await recorder.open()
    try:
        yield recorder
    finally:
        await recorder.close()


@pytest.mark.parametrize("analyzed", [False, True])
async def test_a_page_of_the_jobs_of_a_restored_shard_reads_no_job_besides_them(
    recorder: Recorder, fresh_dsn: str, analyzed: bool
) -> None:
    """The list of differences reads all unfinished jobs in the order of their ids."""
    await fill(recorder)
    if analyzed:
        await recorder.run(b"ANALYZE windrow.job, windrow.queue, windrow.dead, windrow.departing", {})
    ((middle,),) = await recorder.run(b"SELECT id::text FROM windrow.job ORDER BY id OFFSET 50000 LIMIT 1", {})
    page = (admin_statements.SCAN_UNFINISHED, {"behind": middle, "rows": 1000})
    scanning = Database(SHARD, fresh_dsn, connections=1, may_scan=True)
    await scanning.open()
    try:
        async with scanning.transaction() as connection:
            for _ in range(SETTLED):
                await run(connection, page)
            plan = await explain(connection, page)
    finally:
        await scanning.close()
    assert "job_id" in plan.indexes()
    assert plan.rows_read("job") <= 1000, plan.root
