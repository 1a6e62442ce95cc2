"""The plans of the statements about schedules, with 200,000 schedules on the shard. While no schedule is due, the
search for due schedules reads one index entry. The planner uses this index, whatever statistics it has."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping

import pytest
import pytest_asyncio

from shard.postgres import arrays
from shard.postgres.connection import Connection
from shard.postgres.pool import Database
from shard.postgres.sql_loader import Statement
from shard.schedules import statements
from tests.conftest import SHARD
from tests.integration.test_plans import SETTLED, Plan, explain, undone

pytestmark = [pytest.mark.asyncio(loop_scope="module")]

SCHEDULES, ORGS, DUE = 50_000, 50, 100

FILL = f"""
INSERT INTO windrow.schedule (
    id, org_id, name, cron, zone, jitter_us, overlap, catch_up, note, declared_by, queue, kind, payload, next_at,
    wake_at
)
SELECT
    gen_random_uuid(), o.org_id, 's' || n, '0 8 * * *', 'UTC', 0, 'skip', 'latest', '', '', 'mail', 'send', '',
    due.at, CASE WHEN n %% 10 < 9 THEN due.at END
FROM generate_series(1, {SCHEDULES}) n
JOIN (SELECT o.org_id, row_number() OVER () AS turn FROM windrow.org o) o ON o.turn = 1 + n %% {ORGS},
    LATERAL (SELECT now() + (n - {DUE} + 0.5) * interval '1 minute' AS at) due
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def filled(module_dsn: str) -> AsyncGenerator[Database, None]:
    database = Database(SHARD, module_dsn, connections=1)
    await database.open()
    await database.run(b"ALTER TABLE windrow.schedule SET (autovacuum_enabled = off)", {})
    # Make orgs as a router does, but put each org into an owned slot that the test chooses.
    await database.run(
        f"INSERT INTO windrow.org (org, slot) SELECT 'org-' || n, n FROM generate_series(1, {ORGS}) n".encode(), {}
    )
    await database.run(b"INSERT INTO windrow.queue_name (queue) VALUES ('mail')", {})
    await database.run(
        b"INSERT INTO windrow.queue (name_id, org_id, org, queue, slot) "
        b"SELECT m.name_id, o.org_id, o.org, 'mail', o.slot FROM windrow.org o, windrow.queue_name m",
        {},
    )
    # Let Postgres make the plans that it keeps while the table is empty.
    async with database.transaction() as connection:
        await plan(connection, statements.FIND_WAKE, {})
        await plan(connection, statements.TAKE_DUE, {"rows": 500})
    await database.run(FILL.encode(), {})
    yield database
    await database.close()


async def plan(connection: Connection, statement: Statement, parameters: Mapping[str, object]) -> Plan:
    for _ in range(SETTLED):
        with undone(connection):
            await connection.run(statement, parameters)
    with undone(connection):
        return await explain(connection, (statement, dict(parameters)))


@pytest.mark.parametrize("analyzed", [False, True])
async def test_the_probe_reads_one_entry_of_an_index(filled: Database, analyzed: bool) -> None:
    if analyzed:
        await filled.run(b"ANALYZE windrow.schedule", {})
    async with filled.transaction() as connection:
        found = await plan(connection, statements.FIND_WAKE, {})
    assert "schedule_wake" in found.indexes()
    assert found.rows_read("schedule") <= 1
    assert found.buffers <= 20


async def test_what_is_due_is_taken_by_the_index_and_no_more_is_locked(filled: Database) -> None:
    async with filled.transaction() as connection:
        all_due = await plan(connection, statements.TAKE_DUE, {"rows": 500})
        some = await plan(connection, statements.TAKE_DUE, {"rows": 10})
    for found in (all_due, some):
        assert "schedule_wake" in found.indexes()
        assert {scan["Node Type"] for scan in found.scans("schedule")} == {"Index Scan"}
    assert all_due.rows_read("schedule") <= DUE
    assert some.rows_read("schedule") <= 10


async def test_what_sleeps_is_in_no_index_of_the_probe(filled: Database) -> None:
    ((entries,),) = await filled.run(b"SELECT count(*) FROM windrow.schedule WHERE wake_at IS NOT NULL", {})
    assert entries == SCHEDULES * 9 // 10
    ((condition,),) = await filled.run(
        b"SELECT pg_get_expr(i.indpred, i.indrelid) FROM pg_index i "
        b"WHERE i.indexrelid = 'windrow.schedule_wake'::regclass",
        {},
    )
    assert condition == "(wake_at IS NOT NULL)"


async def test_the_runs_of_a_schedule_are_read_and_forgotten_by_its_index(filled: Database) -> None:
    rows = await filled.run(b"SELECT id::text FROM windrow.schedule LIMIT 2", {})
    ids = [row[0] for row in rows]
    await filled.run(
        b"INSERT INTO windrow.schedule_run (schedule_id, at, cause, outcome, skipped_for) "
        b"SELECT s.id, now() - n * interval '1 minute', 'schedule', 'skipped', 'pause' "
        b"FROM (SELECT id FROM windrow.schedule LIMIT 2000) s, generate_series(1, 20) n",
        {},
    )
    async with filled.transaction() as connection:
        reads = await plan(connection, statements.READ_RUNS, {"id": ids[0], "rows": 20})
        forgets = await plan(
            connection,
            statements.FORGET_RUNS,
            {"schedules": arrays.plain(ids), "kept": 10, "backfill_us": 1},
        )
        buffered = await plan(connection, statements.FIND_BUFFERED, {"schedules": arrays.plain(ids)})
        taken = await plan(
            connection, statements.FIND_TAKEN, {"schedules": arrays.plain(ids), "ats_us": arrays.numbers([0, 0])}
        )
    for found, most in ((reads, 20), (forgets, 200), (buffered, 40), (taken, 2)):
        assert "schedule_run_pkey" in found.indexes()
        assert found.rows_read("schedule_run") <= most
