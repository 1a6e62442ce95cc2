"""The plans of the hot statements: they walk indexes and touch little, whatever the table was when they were planned.

Each statement is run as the store runs it, on a connection set up as the store's are, until Postgres has settled on a
generic plan; then that very prepared statement is explained, and rolled back.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from psycopg import AsyncConnection, IsolationLevel, sql
from psycopg.adapt import Transformer
from psycopg.postgres import types
from psycopg.pq import Format

from shard import archiving, arrays, moving, row_locks, statements
from shard.books import Books
from shard.connection import Connection
from shard.database import Database
from shard.enqueuing import Handover, Taker
from shard.floor import GUARD_US
from shard.listing import Wanted
from shard.placement import slot_of
from shard.settling import Nack, _Named
from shard.store import Store
from shard.vocabulary import PRIORITIES, Claimed, JobState, Lease, OrgId, QueueId, QueueName, Slot
from tests.conftest import SHARD
from tests.jobs import HOUR_US, ids_of, job_id, lease_jobs, some_jobs
from tests.recorder import Recorder, Run
from tests.timemachine import NO_HURRY, make_day, pass_time

# Of one org, and of each of three more.
QUEUES_OF_ORG, QUEUES_OF_OTHERS = 200, 100
QUEUES = QUEUES_OF_ORG + 3 * QUEUES_OF_OTHERS
ROWS = 100_000
BATCH = 100
GROUPS, TAKERS = 20, 64
# More runs than Postgres's five custom plans, after which it may keep a generic one.
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
    if isinstance(value, arrays.Blobs | arrays.Texts):
        of = types["bytea" if isinstance(value, arrays.Blobs) else "text"]
        return _literal(Transformer().get_loader(of.array_oid, Format.BINARY).load(value.data))
    return sql.Literal(value)


async def run(connection: Connection, run: Run) -> None:
    await connection.run(*run)


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
    -- Of ten jobs of a queue six are ready, two scheduled and two leased.
    LATERAL (SELECT n / %(queues)s %% 10 AS digit) part,
    LATERAL (SELECT digit >= 8 AS is) leased,
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
    await opened.open()
    # Nothing but the test decides what the planner knows.
    await opened.run(b"ALTER TABLE windrow.job SET (autovacuum_enabled = off)", {})
    await Store(opened).names.make([(org, QueueName(f"queue-{n}")) for n in range(QUEUES_OF_ORG)])
    for other in others_of(org):
        await Store(opened).names.make([(other, QueueName(f"queue-{n}")) for n in range(QUEUES_OF_OTHERS)])
    yield opened
    await opened.close()


def others_of(org: OrgId) -> list[OrgId]:
    return [OrgId(f"{org}-{n}") for n in range(3)]


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
    claim = recorder.last(statements.CLAIM)
    await store.extend(org, held, window_us=2 * HOUR_US)
    named = _Named([org] * BATCH, held).parameters()
    await row_locks.of_jobs(recorder).find([(org, lease.job_hex) for lease in held])
    texts = ["why"] * BATCH
    await store.enqueue(jobs)
    await store.get(org, ids_of(jobs), include_payload=True)
    find_known, get_jobs = recorder.last(statements.FIND_KNOWN), recorder.last(statements.GET_JOBS)
    await store.sweep()
    sweep = recorder.last(statements.SWEEP)
    handed = some_jobs(org, BATCH, queue="queue-7")
    await store.enqueue(handed, Handover(takers=dict.fromkeys(range(BATCH), Taker(1, "w", HOUR_US)), done=ignore))
    enqueue_handed = recorder.last(statements.ENQUEUE)
    of_several = await lease_of_several(store, org)
    return {
        "enqueue": (statements.ENQUEUE, {**enqueue[1], **fresh}),
        "enqueue handed": (statements.ENQUEUE, {**enqueue_handed[1], "ids": fresh["ids"]}),
        "find_known": find_known,
        "claim": claim,
        "claim together": await claim_together(recorder, store, org),
        "extend": recorder.last(statements.EXTEND),
        "ack": (statements.ACK, {**named, "results": [b"done"] * BATCH, "jobs": BATCH}),
        "ack of several orgs": (statements.ACK, {**of_several.parameters(), "results": [], "jobs": BATCH}),
        "inspect_leases": (statements.INSPECT_LEASES, of_several.parameters()),
        "retry": (statements.RETRY, {**named, "delays_us": "{" + ",".join(["5"] * BATCH) + "}", "errors": texts}),
        "bury": (statements.BURY, {**named, "outcomes": ["nacked"] * BATCH, "errors": texts, "reasons": texts}),
        "release": (statements.RELEASE, named),
        "release of several orgs": (statements.RELEASE, of_several.parameters()),
        "cancel": (statements.CANCEL, {"org": org, "ids": named["ids"], "reason": "why"}),
        "explain_miss": (
            statements.EXPLAIN_MISS,
            {**of_several.parameters(), "oldest_ms": int(held[0].job_hex[:12], 16)},
        ),
        "find_locked_jobs": recorder.last(statements.FIND_LOCKED_JOBS),
        "get_jobs": get_jobs,
        "sweep": sweep,
        "probe of all queues": await probe_all(recorder, store, org),
        **await record_moving(recorder, store),
    }


async def record_moving(recorder: Recorder, store: Store) -> dict[str, Run]:
    """A chunk leaves a slot and comes to another one, as if that were on another shard; a second one has departed, and
    what is left, of which half is dead, may follow."""
    org = OrgId("moving")
    for queue in ("queue-1", "queue-2"):
        await store.enqueue(some_jobs(org, 2 * BATCH, queue=queue))
    dead = leases(await lease_jobs(store, org, queue="queue-2", max_jobs=BATCH))
    await store.nack(org, [Nack(lease=lease, kill=True) for lease in dead])
    away, here = slot_of(org), Slot(20_000)
    assert await moving.close(recorder, [away], epoch=2)
    await moving.open_slots(recorder, [here], epoch=2, queues=[])
    assert await moving.depart(recorder, {away: 1}, epoch=2, rows_max=BATCH, bytes_max=10**6) == {away: BATCH}
    departed = await moving.read_departing(recorder, [away], epoch=2)
    await moving.take(recorder, [part._replace(slot=here) for part in departed], epoch=2)
    assert await moving.forget(recorder, {away: 1}, epoch=2) == BATCH
    await moving.depart(recorder, {away: 2}, epoch=2, rows_max=BATCH, bytes_max=10**6)
    departed = await moving.read_departing(recorder, [away], epoch=2)
    await moving.count_left(recorder, [away])
    _, taking = recorder.last(statements.TAKE)
    (part,) = departed
    return {
        "depart": (statements.DEPART, {**recorder.last(statements.DEPART)[1], "chunks": "{3}"}),
        "depart of the dead": (
            statements.DEPART,
            {**recorder.last(statements.DEPART)[1], "chunks": "{3}", "rows": 3 * BATCH},
        ),
        "read_departing": recorder.last(statements.READ_DEPARTING),
        "take": (statements.TAKE, {**taking, "chunks": "{2}", "jobs": [part.jobs]}),
        "forget": (statements.FORGET, {**recorder.last(statements.FORGET)[1], "chunks": "{2}"}),
        "count_left": recorder.last(statements.COUNT_LEFT),
    }


def ignore(_: object) -> None:
    """Nobody waits for what is handed over."""


async def lease_of_several(store: Store, org: OrgId) -> _Named:
    """A batch of leases, in turn of each of four orgs."""
    orgs = [org, *others_of(org)]
    share = BATCH // len(orgs)
    for one in orgs:
        await store.enqueue(some_jobs(one, share, queue="queue-8"))
    held = [leases(await lease_jobs(store, one, queue="queue-8", window_us=HOUR_US, max_jobs=share)) for one in orgs]
    return _Named(orgs * share, [lease for some in zip(*held, strict=True) for lease in some])


async def claim_together(recorder: Recorder, store: Store, org: OrgId) -> Run:
    """What many takers get in one statement: one batch of jobs, of groups of two queues each, of four orgs."""
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
    assert recorder.count(statements.CLAIM, since=before) == 1
    return recorder.last(statements.CLAIM)


async def probe_all(recorder: Recorder, store: Store, org: OrgId) -> Run:
    """From floors of all queues."""
    numbers: list[QueueId] = []
    for one, count in [(org, QUEUES_OF_ORG), *((other, QUEUES_OF_OTHERS) for other in others_of(org))]:
        numbers += (await store.names.find([(one, QueueName(f"queue-{n}")) for n in range(count)])).values()
    assert len(numbers) == QUEUES
    await store.probe(numbers)
    return recorder.last(statements.PROBE)


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
    "enqueue handed": 30,
    "find_known": 30,
    "claim": 40,
    "claim together": 60,
    "extend": 30,
    "ack": 30,
    "ack of several orgs": 30,
    "inspect_leases": 25,
    "retry": 30,
    "bury": 30,
    "release": 30,
    "release of several orgs": 30,
    "cancel": 30,
    "explain_miss": 25,
    "find_locked_jobs": 30,
    "get_jobs": 25,
    "depart": 40,
    "depart of the dead": 40,
    "read_departing": 25,
    "take": 40,
    "forget": 25,
    "count_left": 25,
    # Not jobs but lanes: nine of each queue.
    "sweep": 9,
    "probe of all queues": 9,
}
ROWS_OF = {"depart of the dead": 4 * BATCH, "count_left": 6 * BATCH}
LANES = {"sweep": 3 * len(PRIORITIES), "probe of all queues": QUEUES * len(PRIORITIES)}


def assert_bounded(name: str, plan: Plan) -> None:
    assert not [
        node["Node Type"] for node in plan.scans("job") if node["Node Type"] in ("Seq Scan", "Bitmap Heap Scan")
    ]
    for node in plan.nodes():
        # A sequence is one tuple, and has no index.
        assert node["Node Type"] != "Seq Scan" or node["Relation Name"] == "clock", (name, node)
    count = LANES.get(name, ROWS_OF.get(name, BATCH))
    # Once to find a row, once to act on it; not one row more, but for EXPLAIN's rounding of what one loop reads.
    assert plan.rows_read("job") <= (1 if name in LANES else 2) * count * 1.02, (name, plan.root)
    assert plan.buffers <= PAGES_A_JOB[name] * count, (name, plan.buffers, plan.root)


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
        await connection.execute(NO_HURRY)
        if settled == "when empty":
            await settle(connection, runs)
        if knowledge is not analyze_when_full:
            await fill(recorder)
        if settled == "when full":
            await settle(connection, runs)
        for name, each in runs.items():
            with undone(connection):
                plan = await explain(connection, each)
            print(f"{name:23} {plan.buffers:6} pages  {plan.rows_read('job'):6.0f} rows of job  {plan.generic=}")
            assert_bounded(name, plan)
            if name.startswith("claim"):
                assert plan.root["Node Type"] == "ModifyTable"
                assert plan.indexes() & {"job_ready", "job_id"} == {"job_ready"}
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


# Lists


FILL_DAY = b"""
INSERT INTO windrow.finished (
    id, queue_id, enqueued_at, run_at, finished_at, priority, attempt, state, kind, payload, reason
)
SELECT
    (lpad(to_hex(m.ms), 12, '0') || '7000' || '9' || lpad(to_hex(n), 15, '0'))::uuid,
    CASE WHEN n %% 100 = 0 THEN %(small)s::bigint ELSE %(large)s::bigint END,
    m.made, m.made, m.made, 5, 1, 'cancelled', 'fill', '', 'filled'
FROM generate_series(1, %(rows)s) AS n
CROSS JOIN LATERAL (
    SELECT date_trunc('day', now()) - %(days)s * interval '1 day' + n * interval '1 s' AS made
) at
CROSS JOIN LATERAL (SELECT at.made, (extract(epoch FROM at.made) * 1000)::bigint AS ms) m
"""


@pytest.mark.parametrize("whose", ["small", "large"])
@pytest.mark.parametrize("of_queue", [True, False])
async def test_a_page_of_cold_jobs_costs_what_is_on_it(fresh_dsn: str, org: OrgId, whose: str, of_queue: bool) -> None:
    """Of one job in a hundred, and of the others."""
    page_size, days, rows = 50, 8, 20_000
    async with contextlib.AsyncExitStack() as stack:
        recorder = Recorder(SHARD, fresh_dsn, connections=2, for_books=True)
        await recorder.open()
        stack.push_async_callback(recorder.close)
        orgs = {"small": org, "large": OrgId(f"{org}-large")}
        queue = QueueName("queue-1")
        numbers = await Store(recorder).names.make([(one, queue) for one in orgs.values()])
        lanes = {name: numbers[one, queue] for name, one in orgs.items()}
        for ago in range(days + 1, 1, -1):
            await make_day(recorder, retention=30, before="now", days=ago)
            await recorder.run(FILL_DAY, {**lanes, "days": ago, "rows": rows})
        cold = [await archiving.turn_cold(recorder, day) for day in await archiving.days_over(recorder)]
        assert sum(day.jobs for day in cold) == days * rows
        wanted = Wanted(org=orgs[whose], queue=queue if of_queue else None, state=JobState.CANCELLED)
        token, seen = "", 0
        while token or not seen:
            page = await Books(recorder).list_jobs(wanted, page_size=page_size, page_token=token)
            seen += len(page.jobs)
            token = page.next_token
            async with recorder.transaction() as connection:
                await run(connection, recorder.last(statements.LIST_JOBS))
                plan = await explain(connection, recorder.last(statements.LIST_JOBS))
            # A page or two for each job, and a look into each day.
            print(f"{seen:6} {plan.buffers:6} pages")
            assert plan.buffers <= 3 * page_size + 60 * days, plan.root
            if seen >= 12 * page_size:
                # Further down it is the same.
                break
        assert seen == 12 * page_size
