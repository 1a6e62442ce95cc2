"""The plans of the hot statements: they walk indexes and touch little, whatever the table was when they were planned.

Each statement is run as the store runs it, on a connection set up as the store's are, until Postgres has settled on a
generic plan; then that very prepared statement is explained, and rolled back.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from psycopg import AsyncConnection, IsolationLevel, sql

from shard import statements
from shard.database import Database
from shard.floor import GUARD_US
from shard.store import Store
from shard.vocabulary import Claimed, Lease, OrgId, QueueName
from tests.conftest import SHARD
from tests.jobs import HOUR_US, ids_of, job_id, lease_jobs, some_jobs
from tests.timemachine import pass_time

QUEUES = 200
ROWS = 100_000
BATCH = 100
# More runs than Postgres's five custom plans, after which it may keep a generic one.
SETTLED = 8

Connection = AsyncConnection[tuple[Any, ...]]
Run = tuple[bytes, Mapping[str, object]]


class Recorder(Database):
    """Remembers what the store runs: the statements with the parameters it gave them."""

    runs: list[Run]

    async def run(self, statement: bytes, parameters: Mapping[str, object]) -> list[Any]:
        self.runs.append((statement, dict(parameters)))
        return await super().run(statement, parameters)

    def last(self, statement: bytes) -> Run:
        return next(run for run in reversed(self.runs) if run[0] == statement)


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
        """Pages touched, those of functions and of unique checks included."""
        return int(self.root["Shared Hit Blocks"] + self.root["Shared Read Blocks"])

    def scans(self, relation: str) -> list[dict[str, Any]]:
        return [n for n in self.nodes() if n.get("Relation Name") == relation and "Scan" in n["Node Type"]]

    def indexes(self) -> set[str]:
        return {node["Index Name"] for node in self.nodes() if "Index Name" in node}

    def pages_of(self, index: str) -> int:
        """Pages touched by the scans of one index: its own, and the table's to see which rows are alive."""
        scans = [node for node in self.nodes() if node.get("Index Name") == index]
        return sum(int(node["Shared Hit Blocks"] + node["Shared Read Blocks"]) for node in scans)

    def rows_read(self, relation: str) -> float:
        dropped = ("Rows Removed by Filter", "Rows Removed by Index Recheck", "Rows Removed by Join Filter")
        return sum(
            float(node["Actual Rows"] + sum(node.get(key, 0) for key in dropped)) * float(node["Actual Loops"])
            for node in self.scans(relation)
        )


async def explain(connection: Connection, run: Run) -> Plan:
    """The plan of a statement that this connection has prepared, as it is executed with these parameters."""
    statement, parameters = run
    cursor = await connection.execute(
        "SELECT name, generic_plans FROM pg_prepared_statements WHERE statement = %s "
        "ORDER BY prepare_time DESC LIMIT 1",
        [_numbered(statement)],
        prepare=False,
    )
    ((name, generic_plans),) = await cursor.fetchall()
    literals = sql.SQL(", ").join(_literal(parameters[key]) for key in _keys(statement))
    text = sql.SQL("EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) EXECUTE {} ({})").format(sql.Identifier(name), literals)
    cursor = await connection.execute(text, prepare=False)
    row = await cursor.fetchone()
    assert row is not None
    return Plan(root=row[0][0]["Plan"], generic=generic_plans > 0)


_PLACEHOLDER = re.compile(rb"%\((\w+)\)[sb]")


def _keys(statement: bytes) -> list[str]:
    """The parameters in the order of their numbers."""
    return list(dict.fromkeys(key.decode() for key in _PLACEHOLDER.findall(statement)))


def _numbered(statement: bytes) -> str:
    keys = _keys(statement)
    numbered = _PLACEHOLDER.sub(lambda found: b"$%d" % (keys.index(found[1].decode()) + 1), statement)
    return numbered.replace(b"%%", b"%").decode()


def _literal(value: object) -> sql.Composable:
    if isinstance(value, list) and not value:
        return sql.SQL("'{}'")
    return sql.Literal(value)


async def run(connection: Connection, run: Run) -> None:
    await connection.cursor(binary=True).execute(*run)


@contextmanager
def undone(connection: Connection) -> Generator[None, None, None]:
    """What the block does is rolled back, behind psycopg's back: it would drop the prepared statements."""
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
    -- Of ten jobs of a queue six are ready, three scheduled and one leased.
    LATERAL (SELECT n / %(queues)s %% 10 AS digit) part,
    LATERAL (SELECT digit = 9 AS is) leased,
    LATERAL (SELECT now() + CASE WHEN digit < 6 THEN n - 3600000000 ELSE n + 3600000000 END * interval '1 us' AS at) due
"""

FILL_FINISHED = b"""
INSERT INTO windrow.finished (
    id, queue_id, enqueued_at, run_at, priority, attempt, state, kind, payload, reason
)
SELECT
    (
        lpad(to_hex((extract(epoch FROM now()) * 1000)::bigint), 12, '0') || '7000' || '9' || lpad(to_hex(n), 15, '0')
    )::uuid,
    (SELECT min(queue_id) FROM windrow.queue), now(), now(), 5, 1, 'cancelled', 'fill', '', 'filled'
FROM generate_series(1, %(rows)s) AS n
"""


async def fill(database: Database) -> None:
    await database.run(FILL, {"rows": ROWS, "queues": QUEUES})
    await database.run(FILL_FINISHED, {"rows": ROWS // 2})


@pytest.fixture
async def recorder(fresh_dsn: str, org: OrgId) -> AsyncGenerator[Recorder, None]:
    opened = Recorder(SHARD, fresh_dsn, connections=2)
    opened.runs = []
    await opened.open()
    # Nothing but the test decides what the planner knows.
    await opened.run(b"ALTER TABLE windrow.job SET (autovacuum_enabled = off)", {})
    await Store(opened).names.make(org, [QueueName(f"queue-{n}") for n in range(QUEUES)])
    yield opened
    await opened.close()


async def record(recorder: Recorder, org: OrgId) -> dict[str, Run]:
    """One run of each hot statement, as the store makes them for a batch of jobs: name → run."""
    store = Store(recorder)
    jobs = some_jobs(org, BATCH, queue="queue-7", dedup_keys=[f"key-{n}" for n in range(BATCH)])
    await store.enqueue(jobs)
    enqueue = recorder.last(statements.ENQUEUE)
    # Enqueued again they would be known: the plan is of jobs that are new.
    fresh = {
        "ids": "{" + ",".join(job_id() for _ in range(BATCH)) + "}",
        "dedup_keys": [f"new-{n}" for n in range(BATCH)],
    }
    held = leases(await lease_jobs(store, org, queue="queue-7", max_jobs=BATCH, window_us=HOUR_US))
    await store.extend(org, held, window_us=2 * HOUR_US)
    named = {"ids": "{" + ",".join(lease.job_hex for lease in held) + "}"}
    named["leases"] = "{" + ",".join(str(lease.number) for lease in held) + "}"
    of_org = {"org": org}
    texts = ["why"] * BATCH
    await store.sweep()
    await store.enqueue(jobs)
    await store.get(org, ids_of(jobs), include_payload=True)
    return {
        "enqueue": (statements.ENQUEUE, {**enqueue[1], **fresh}),
        "find_known": recorder.last(statements.FIND_KNOWN),
        "claim": recorder.last(statements.CLAIM),
        "extend": recorder.last(statements.EXTEND),
        "ack": (statements.ACK, {**named, **of_org, "results": [b"done"] * BATCH, "jobs": BATCH}),
        "inspect_leases": (statements.INSPECT_LEASES, {**named, **of_org}),
        "retry": (
            statements.RETRY,
            {**named, **of_org, "delays_us": "{" + ",".join(["5"] * BATCH) + "}", "errors": texts},
        ),
        "bury": (
            statements.BURY,
            {**named, **of_org, "outcomes": ["nacked"] * BATCH, "errors": texts, "reasons": texts},
        ),
        "release": (statements.RELEASE, {**named, **of_org}),
        "cancel": (statements.CANCEL, {**of_org, "ids": named["ids"], "reason": "why"}),
        "explain_miss": (statements.EXPLAIN_MISS, {**named, **of_org, "oldest_ms": int(held[0].job_hex[:12], 16)}),
        "get_jobs": recorder.last(statements.GET_JOBS),
        "sweep": recorder.last(statements.SWEEP),
    }


def leases(taken: list[tuple[Claimed, Lease]]) -> list[Lease]:
    return [lease for _, lease in taken]


async def settle(connection: Connection, runs: Mapping[str, Run]) -> None:
    """Runs each so often that Postgres keeps one plan for it, and undoes it."""
    for each in runs.values():
        for _ in range(SETTLED):
            with undone(connection):
                await run(connection, each)


# Pages that one job of a batch may touch: reading the row and its index entries, and writing them anew.
PAGES_A_JOB = {
    "enqueue": 30,
    "find_known": 30,
    "claim": 40,
    "extend": 30,
    "ack": 30,
    "inspect_leases": 25,
    "retry": 30,
    "bury": 30,
    "release": 30,
    "cancel": 30,
    "explain_miss": 25,
    "get_jobs": 25,
    # For each of nine lanes, whatever the batch.
    "sweep": 3,
}


def assert_bounded(name: str, plan: Plan) -> None:
    assert not [
        node["Node Type"] for node in plan.scans("job") if node["Node Type"] in ("Seq Scan", "Bitmap Heap Scan")
    ]
    for node in plan.nodes():
        assert node["Node Type"] != "Seq Scan", (name, node)
    # Once to find a row, once to act on it; not one row more.
    assert plan.rows_read("job") <= 2 * BATCH, (name, plan.root)
    assert plan.buffers <= PAGES_A_JOB[name] * BATCH, (name, plan.buffers, plan.root)


async def nothing(_: Recorder, __: OrgId) -> None:
    """As a fresh database has it: tables that nobody has ever analyzed."""


async def analyze_when_full(recorder: Recorder, org: OrgId) -> None:
    await fill(recorder)
    await recorder.run(b"ANALYZE windrow.job", {})


async def vacuum_when_empty(recorder: Recorder, org: OrgId) -> None:
    """What autovacuum does to a queue that has been drained: Postgres then believes that the table has no rows, however
    long it grows, until the next vacuum."""
    store = Store(recorder)
    await store.enqueue(some_jobs(org, BATCH, queue="queue-7"))
    held = leases(await lease_jobs(store, org, queue="queue-7"))
    await store.ack(org, held, [None] * len(held))
    await recorder.run(b"VACUUM (ANALYZE, TRUNCATE off) windrow.job", {})


Knowledge = Callable[[Recorder, OrgId], Awaitable[None]]


@pytest.mark.parametrize("knowledge", [nothing, analyze_when_full, vacuum_when_empty], ids=lambda k: k.__name__)
@pytest.mark.parametrize("settled", ["when empty", "when full"])
async def test_hot_statements_walk_indexes_and_touch_little(
    recorder: Recorder, org: OrgId, knowledge: Knowledge, settled: str
) -> None:
    await knowledge(recorder, org)
    runs = await record(recorder, org)
    async with recorder.transaction() as connection:
        if settled == "when empty":
            await settle(connection, runs)
        if knowledge is not analyze_when_full:
            await fill(recorder)
        if settled == "when full":
            await settle(connection, runs)
        for name, each in runs.items():
            with undone(connection):
                plan = await explain(connection, each)
            print(f"{name:15} {plan.buffers:6} pages  {plan.rows_read('job'):6.0f} rows of job  {plan.generic=}")
            assert_bounded(name, plan)
            if name == "claim":
                assert plan.root["Node Type"] == "ModifyTable"
                assert plan.indexes() & {"job_ready", "job_pkey"} == {"job_ready"}
                assert sorted(n["Node Type"] for n in plan.scans("job")) == ["Index Scan", "Tid Scan"]


# A snapshot that somebody holds


async def test_under_a_held_snapshot_a_claim_from_its_floors_stays_cheap(
    recorder: Recorder, fresh_dsn: str, org: OrgId
) -> None:
    """20,000 jobs are churned through while a snapshot keeps Postgres from removing any of their dead versions."""
    store = Store(recorder)
    queue = "queue-7"
    async with await AsyncConnection.connect(fresh_dsn) as holder:
        await holder.set_isolation_level(IsolationLevel.REPEATABLE_READ)
        await holder.execute("SELECT count(*) FROM windrow.job")
        for _ in range(20):
            await store.enqueue(some_jobs(org, 1000, queue=queue))
            held = leases(await lease_jobs(store, org, queue=queue))
            assert len(held) == 1000
            await store.ack(org, held, [None] * 1000)
        await pass_time(recorder, GUARD_US / 1_000_000)
        await store.sweep()
        await store.enqueue(some_jobs(org, BATCH, queue=queue))
        assert len(await lease_jobs(store, org, queue=queue, max_jobs=1)) == 1
        statement, parameters = recorder.last(statements.CLAIM)
        parameters = {**parameters, "max_jobs": BATCH}
        from_zero = {**parameters, "lane_floors_us": "{" + ",".join(["0"] * 9) + "}"}
        assert parameters["lane_floors_us"] != from_zero["lane_floors_us"]
        async with recorder.transaction() as connection:
            await run(connection, (statement, {**parameters, "max_jobs": 0}))
            with undone(connection):
                cheap = await explain(connection, (statement, parameters))
            with undone(connection):
                dear = await explain(connection, (statement, from_zero))
    found_cheaply, found_dearly = cheap.pages_of("job_ready"), dear.pages_of("job_ready")
    print(f"to find {BATCH} jobs: {found_cheaply} pages from the floors, {found_dearly} from the beginning of time")
    assert cheap.rows_read("job") == dear.rows_read("job") == 2 * (BATCH - 1)
    assert cheap.buffers <= PAGES_A_JOB["claim"] * BATCH
    assert found_dearly > 10 * found_cheaply
