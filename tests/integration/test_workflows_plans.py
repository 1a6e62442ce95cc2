"""The plans of the statements about workflows, with 200 workflows of 500 nodes on the shard. Each statement reads its
rows by indexes, whatever statistics the planner has."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import NamedTuple

import pytest
import pytest_asyncio

from shard.placement import statements as placement_statements
from shard.postgres import arrays
from shard.postgres.pool import Database
from shard.postgres.sql_loader import Statement
from shard.vocabulary import OrgId
from shard.workflows import statements
from tests.conftest import SHARD
from tests.integration.test_plans import Plan
from tests.integration.test_schedules_plans import plan
from tests.workflows import Flows

pytestmark = [pytest.mark.asyncio(loop_scope="module")]

ORGS, WORKFLOWS, NODES, PARENTS = 10, 200, 200, 10
TABLES = ("workflow", "workflow_node", "workflow_edge", "workflow_arrival")

# Half of the workflows have ended. In the other workflows, the nodes up to the middle have ended, and the next node is
# due.
FILL_WORKFLOWS = f"""
INSERT INTO windrow.workflow (org_id, id, name, digest, nodes, open_node, state, ended_at, paused_at)
SELECT
    o.org_id, ('01890000-0000-7000-8000-' || lpad(n::text, 12, '0'))::uuid, 'fill', '', {NODES},
    CASE WHEN n %% 20 >= 10 THEN {NODES} - 1 END, CASE WHEN n %% 20 >= 10 THEN 'running' ELSE 'succeeded' END,
    CASE WHEN n %% 20 < 10 THEN now() - n * interval '1 day' END, CASE WHEN n %% 20 >= 10 THEN now() END
FROM generate_series(1, {WORKFLOWS}) n
JOIN (SELECT o.org_id, row_number() OVER (ORDER BY o.org) AS turn FROM windrow.org o) o ON o.turn = 1 + n %% {ORGS}
"""
FILL_NODES = f"""
INSERT INTO windrow.workflow_node (flow, node, name, job_id, waits_on, state, ended_at)
SELECT
    w.flow, n, 'n' || n, gen_random_uuid(), CASE WHEN open.is AND n > {NODES // 2} THEN n - 1 END,
    CASE WHEN NOT open.is OR n < {NODES // 2} THEN 'succeeded' WHEN n = {NODES // 2} THEN 'due' ELSE 'blocked' END,
    CASE WHEN NOT open.is OR n < {NODES // 2} THEN now() END
FROM windrow.workflow w
CROSS JOIN generate_series(0, {NODES - 1}) n, LATERAL (SELECT w.state = 'running' AS is) open
"""
FILL_EDGES = f"""
INSERT INTO windrow.workflow_edge (flow, node, parent, on_failed)
SELECT w.flow, n, p, 'cancel'
FROM windrow.workflow w
CROSS JOIN generate_series(1, {NODES - 1}) n
CROSS JOIN LATERAL generate_series(greatest(0, n - {PARENTS}), n - 1) p
"""


class One(NamedTuple):
    """A workflow that has not ended."""

    flow: int
    org_id: int
    org: str
    id: str


@pytest_asyncio.fixture(
    scope="module", loop_scope="module", params=[False, True], ids=["of an empty table", "analyzed"]
)
async def filled(module_dsn: str, request: pytest.FixtureRequest) -> AsyncGenerator[tuple[Database, One], None]:
    database = Database(SHARD, module_dsn, connections=1)
    await database.open()
    for table in TABLES:
        await database.run(f"ALTER TABLE windrow.{table} SET (autovacuum_enabled = off)".encode(), {})
    await database.run(
        f"INSERT INTO windrow.org (org, slot) SELECT 'org-' || n, n FROM generate_series(1, {ORGS}) n "
        "ON CONFLICT DO NOTHING".encode(),
        {},
    )
    nobody = One(0, 0, "nobody", "01890000-0000-7000-8000-000000000000")
    if not request.param:
        # Let Postgres make the plans that it keeps while the tables are empty.
        await database.run(b"TRUNCATE windrow.workflow, windrow.workflow_node, windrow.workflow_edge", {})
        async with database.transaction() as connection:
            for statement, parameters, *_ in statements_about(nobody).values():
                await plan(connection, statement, parameters)
    # Make the rows only once, and use them for both kinds of plans, because it takes longer to make the rows than to
    # run all tests.
    if await database.run(b"SELECT WHERE NOT EXISTS (SELECT FROM windrow.workflow)", {}):
        for fill in (FILL_WORKFLOWS, FILL_NODES, FILL_EDGES):
            await database.run(fill.encode(), {})
    if request.param:
        for table in TABLES:
            await database.run(f"ANALYZE windrow.{table}".encode(), {})
    ((row),) = await database.run(
        b"SELECT w.flow, w.org_id, o.org, w.id::text FROM windrow.workflow w JOIN windrow.org o USING (org_id) "
        b"WHERE w.state = 'running' ORDER BY w.flow LIMIT 1",
        {},
    )
    yield database, One._make(row)
    await database.close()


def statements_about(one: One) -> Mapping[str, tuple[Statement, Mapping[str, object], int]]:
    """Returns each statement, its parameters, and how many pages it may touch. Each node of a workflow may be on a
    different page."""
    named = {"org": one.org, "id": one.id}
    return {
        "get_workflow": (statements.GET_WORKFLOW, named, 20),
        "find_digest": (statements.FIND_DIGEST, named, 20),
        "find_retry": (statements.FIND_RETRY, named, 20),
        "count_nodes": (statements.COUNT_NODES, named, NODES + 20),
        "list_nodes": (statements.LIST_NODES, {**named, "from_node": 100, "rows": 10}, 600),
        "list_parents": (statements.LIST_PARENTS, {**named, "node": 50, "from_node": 0, "rows": 100}, 80),
        "list_workflows": (
            statements.LIST_WORKFLOWS,
            {"org": one.org, "before": "ffffffff-ffff-7fff-bfff-ffffffffffff", "state": "", "rows": 10},
            60,
        ),
        "find_released": (statements.FIND_RELEASED, named, NODES + 20),
        "find_node": (statements.FIND_NODE, {"flow": one.flow, "name": "n77"}, 10),
        "find_signal": (statements.FIND_SIGNAL, {**named, "name": "n77"}, 20),
        "find_nodes": (statements.FIND_NODES, {**named, "names": arrays.texts(["n77", "n78"])}, 20),
        "read_size": (statements.READ_SIZE, {"flow": one.flow, "edges": True}, 6_000),
        "tell_again": (
            statements.TELL_AGAIN,
            {"org_id": one.org_id, "id": one.id, "flow": one.flow, "nodes": arrays.numbers([7, 8])},
            40,
        ),
        "find_lease": (
            statements.FIND_LEASE,
            {**named, "job": "01890000-0000-7000-8000-000000000000", "lease": 1},
            20,
        ),
        "find_wait": (
            statements.FIND_WAIT,
            {**named, "job": "01890000-0000-7000-8000-000000000000", "lease": 1},
            20,
        ),
        "find_open_parent": (
            statements.FIND_OPEN_PARENT,
            {"flow": one.flow, "nodes": arrays.numbers([150, 151])},
            200,
        ),
        "add_edges": (
            statements.ADD_EDGES,
            {"flow": one.flow, "node": 50, "parents": arrays.numbers([49, 150]), "on_failed": "ignore"},
            40,
        ),
        "wait_for_nodes": (
            statements.WAIT_FOR_NODES,
            {
                "flow": one.flow,
                "node": 50,
                "is_doomed": False,
                "org_id": one.org_id,
                "job": "01890000-0000-7000-8000-000000000000",
                "lease": 1,
                "failure": "{}",
            },
            20,
        ),
        "cancel_workflow": (statements.CANCEL_WORKFLOW, {"flow": one.flow, "reason": "why"}, 20),
        "find_unfolded": (
            statements.FIND_UNFOLDED,
            {"after_org": 0, "after_workflow": "00000000-0000-0000-0000-000000000000", "after_flow": 0, "rows": 1000},
            3_000,
        ),
        "forget_workflows": (statements.FORGET_WORKFLOWS, {"days": 30, "rows": 1}, 30_000),
        "fold_workflows": (
            placement_statements.FOLD_WORKFLOWS,
            {"org_ids": arrays.numbers([one.org_id]), "ids": arrays.plain([one.id])},
            300,
        ),
        "fold_more": (statements.FOLD_MORE, {"org_id": one.org_id, "id": one.id}, 300),
    }


@pytest.mark.parametrize("name", statements_about(One(0, 0, "", "")))
async def test_a_statement_reads_its_workflow_by_indexes(filled: tuple[Database, One], name: str) -> None:
    database, one = filled
    statement, parameters, pages_max = statements_about(one)[name]
    async with database.transaction() as connection:
        found = await plan(connection, statement, parameters)
    assert not any("Seq" in scan["Node Type"] for table in TABLES for scan in found.scans(table))
    assert found.buffers <= pages_max, explained(found)


@pytest.mark.asyncio(loop_scope="function")
async def test_a_check_looks_each_node_of_a_large_workflow_up_without_statistics(
    fresh_database: Database, org: OrgId
) -> None:
    flows, nodes = Flows(fresh_database, org), 3_000
    # All nodes but the first are blocked, and so are their jobs.
    await flows.start({"n0": [], **{f"n{at}": ["n0"] for at in range(1, nodes)}})
    async with fresh_database.transaction() as connection:
        found = await plan(connection, statements.CHECK_WORKFLOWS, {"rows": 100})
    assert found.rows_read("workflow_node") <= 10 * nodes


def explained(plan: Plan) -> list[str]:
    return [f"{node['Node Type']} {node.get('Index Name', '')} {node['Shared Hit Blocks']}" for node in plan.nodes()]
