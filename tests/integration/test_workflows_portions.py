"""Wide workflows on one shard. The end of one node may decide about many jobs. One transaction releases or cancels at
most a portion of these jobs, and later transactions do the rest. So no call waits for all of these jobs (I4), and a
kill between two transactions strands nothing (I7)."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator
from pathlib import Path

import psycopg
import pytest

import windrow
from shard.postgres.pool import Database
from shard.vocabulary import Answer, OrgId
from shard.workflow import NewWorkflow, NodeName, WorkflowId
from shard.workflows import statements
from tests.conftest import SHARD
from tests.jobs import job_id
from tests.routers import PATIENCE_S, running_routers, write_cluster
from tests.timemachine import until_blocked
from tests.workflows import IGNORE, Flows, Graph

# One transaction releases or cancels at most this many jobs (0022_folds_in_portions.sql).
PORTION = 200
WIDTH = 900
FAN_OUT: Graph = {"root": [], **{f"n{at}": ["root"] for at in range(WIDTH)}}


@pytest.fixture
async def flows(database: Database, org: OrgId) -> AsyncGenerator[Flows, None]:
    opened = Flows(database, org)
    yield opened
    await opened.check()


@pytest.fixture
async def other(module_dsn: str, org: OrgId) -> AsyncGenerator[Flows, None]:
    """Yields the workflows of another org, on the connections of another router."""
    database = Database(SHARD, module_dsn, connections=2)
    await database.open()
    opened = Flows(database, OrgId(f"{org}-other"))
    yield opened
    await opened.check()
    await database.close()


async def counts(flows: Flows, flow: NewWorkflow) -> Counter[str]:
    return Counter({state.value: nodes for state, nodes in (await flows.admin.count(flows.org, flow.id)).items()})


async def blocked_jobs(flows: Flows) -> int:
    ((number,),) = await flows.database.run(
        b"SELECT count(*) FROM windrow.job j JOIN windrow.org o ON o.org_id = j.queue_id & 4294967295 "
        b"WHERE o.org = %(org)s AND j.run_at = 'infinity'",
        {"org": flows.org},
    )
    return int(number)


async def bucket(flows: Flows, workflow: WorkflowId) -> int:
    """Returns the number of the workflow's lock."""
    ((number,),) = await flows.database.run(
        b"SELECT hashtextextended(%(id)s, o.org_id) & 1023 FROM windrow.org o WHERE o.org = %(org)s",
        {"id": workflow, "org": flows.org},
    )
    return int(number)


async def id_with_lock_of(flows: Flows, number: int) -> WorkflowId:
    """Returns an id for a workflow of the org, such that the workflow has the lock with this number."""
    while await bucket(flows, workflow := WorkflowId(job_id())) != number:
        pass
    return workflow


async def test_an_ack_releases_a_portion_and_the_sweep_the_rest(flows: Flows) -> None:
    flow = await flows.start(FAN_OUT)
    await flows.claim()
    await flows.ack("root")
    assert await counts(flows, flow) == {"succeeded": 1, "released": PORTION, "blocked": WIDTH - PORTION}
    await flows.check()
    # No later transaction has done the rest yet, as if the router had been killed.
    await flows.sweep.sweep()
    assert await counts(flows, flow) == {"succeeded": 1, "released": WIDTH}
    assert sum(map(len, await flows.run_all())) == WIDTH
    assert await flows.state(flow) == "succeeded"


async def test_calls_that_share_the_statement_of_a_wide_release_wait_for_a_portion_of_it(
    flows: Flows, database: Database, org: OrgId
) -> None:
    other = Flows(database, OrgId(f"{org}-other"), store=flows.store)
    wide = await flows.start({**FAN_OUT, "first": []})
    narrow = await other.start({"a": [], "b": ["a"]})
    await flows.claim()
    await other.claim()
    # The first ack begins a statement, and the other acks share the next statement.
    await asyncio.gather(flows.ack("first"), flows.ack("root"), other.ack("a"))
    assert (await counts(flows, wide))["released"] <= PORTION
    await other.sweep.sweep()
    assert await other.states(narrow) == {"a": "succeeded", "b": "released"}
    assert await counts(flows, wide) == {"succeeded": 2, "released": WIDTH}


async def test_another_org_with_the_same_lock_waits_for_one_portion(
    flows: Flows, other: Flows, module_dsn: str, database: Database
) -> None:
    wide = await flows.start(FAN_OUT)
    lock = await bucket(flows, wide.id)
    await other.start({"first": []})
    narrow = await other.start({"a": [], "b": ["a"]}, workflow=await id_with_lock_of(other, lock))
    await other.claim()
    await flows.claim()
    async with await psycopg.AsyncConnection.connect(module_dsn) as holder:
        await holder.execute("SELECT pg_advisory_xact_lock(17, %s)", [lock])
        release = asyncio.create_task(release_all(flows))
        await until_blocked(database)
        ack = asyncio.create_task(other.ack("a"))
        await until_blocked(database, sessions=2)
        await holder.commit()
    done, waiting = await asyncio.wait({release, ack}, timeout=PATIENCE_S, return_when=asyncio.FIRST_COMPLETED)
    assert (done, waiting) == ({ack}, {release})
    await release
    assert await other.states(narrow) == {"a": "succeeded", "b": "released"}
    assert await counts(flows, wide) == {"succeeded": 1, "released": WIDTH}


async def release_all(flows: Flows) -> None:
    await flows.ack("root")
    await flows.sweep.sweep()


async def test_a_failure_cancels_a_portion_and_the_sweep_the_rest(flows: Flows) -> None:
    # After each of these nodes comes a node that is cancelled too. One last node ignores their failures.
    graph = dict(FAN_OUT)
    graph |= {f"after{at}": [f"n{at}"] for at in range(WIDTH)}
    graph["last"] = [(f"n{at}", IGNORE) for at in range(WIDTH)]
    flow = await flows.start(graph)
    await flows.claim()
    await flows.kill("root")
    assert await blocked_jobs(flows) == 2 * WIDTH + 1 - PORTION
    await flows.check()
    await flows.sweep.sweep()
    assert await counts(flows, flow) == {"failed": 1, "cancelled": 2 * WIDTH, "released": 1}
    assert await flows.run_all() == [{"last"}]
    assert await flows.state(flow) == "failed"


async def test_ends_of_which_everybody_was_told_are_not_taken_in_again(flows: Flows, database: Database) -> None:
    flow = await flows.start(FAN_OUT)
    await flows.claim()
    await flows.kill("root")
    arrivals = b"""
        SELECT w.org_id, (SELECT count(*) FROM windrow.workflow_arrival a WHERE a.workflow = w.id)
        FROM windrow.workflow w
        WHERE w.id = %(id)s::uuid
        """
    for _ in range(3):
        ((org_id, number),) = await database.run(arrivals, {"id": flow.id})
        # The arrivals are those of the root and of the jobs that the last portion has cancelled.
        assert number == 1 + PORTION
        await database.run(statements.FOLD_MORE, {"org_id": org_id, "id": flow.id})
    await flows.sweep.sweep()
    assert await counts(flows, flow) == {"failed": 1, "cancelled": WIDTH}


async def test_a_node_is_never_released_before_a_failure_has_reached_it(flows: Flows) -> None:
    # Each node waits for a parent that fails, and for a parent with a greater number that succeeds.
    graph: dict[str, list[str]] = {"bad": [], "good": []}
    graph |= {f"n{at}": ["bad", "good"] for at in range(WIDTH)}
    flow = await flows.start(graph)
    await flows.claim()
    await flows.kill("bad")
    await flows.ack("good")
    assert (await counts(flows, flow))["released"] == 0
    await flows.sweep.sweep()
    assert await counts(flows, flow) == {"failed": 1, "succeeded": 1, "cancelled": WIDTH}


async def test_nodes_with_many_parents_are_few_in_a_portion(flows: Flows) -> None:
    parents = [f"p{at}" for at in range(500)]
    flow = await flows.start({**{name: [] for name in parents}, **{f"n{at}": parents for at in range(20)}})
    await flows.claim()
    await flows.ack(*parents[:-1])
    await flows.ack(parents[-1])
    assert 1 <= (await counts(flows, flow))["released"] < 20
    await flows.check()
    await flows.sweep.sweep()
    assert await flows.run_all() == [{f"n{at}" for at in range(20)}]


async def test_a_pause_between_portions_holds_the_rest_back(flows: Flows) -> None:
    flow = await flows.start(FAN_OUT)
    await flows.claim()
    await flows.ack("root")
    await flows.admin.set_paused(flows.org, flow.id, paused=True, epoch=1)
    await flows.sweep.sweep()
    assert (await counts(flows, flow))["released"] == PORTION
    await flows.check()
    await flows.admin.set_paused(flows.org, flow.id, paused=False, epoch=1)
    assert PORTION < (await counts(flows, flow))["released"] < WIDTH
    await flows.sweep.sweep()
    assert (await counts(flows, flow))["released"] == WIDTH


async def test_a_cancel_between_portions_cancels_what_was_released_and_what_was_not(flows: Flows) -> None:
    flow = await flows.start(FAN_OUT)
    await flows.claim()
    await flows.ack("root")
    jobs = await flows.admin.doom(flows.org, flow.id, reason="enough", epoch=1)
    assert len(jobs) == PORTION
    assert await counts(flows, flow) == {"succeeded": 1, "released": PORTION, "cancelled": WIDTH - PORTION}
    assert set(await flows.store.cancel(flows.org, jobs, reason="enough")) == {Answer.OK}
    assert await flows.state(flow) == "cancelled"


async def test_a_cancel_that_was_cut_off_between_portions_is_ended_by_the_sweep(flows: Flows) -> None:
    flow = await flows.start(FAN_OUT)
    # Run only the first transaction of a cancel.
    await flows.admin.begin_cancel(flows.org, flow.id, reason="enough", epoch=1)
    assert await blocked_jobs(flows) == WIDTH - PORTION
    await flows.check()
    await flows.sweep.sweep()
    assert await counts(flows, flow) == {"released": 1, "cancelled": WIDTH}


async def test_a_skip_between_portions_ends_the_node_once(flows: Flows) -> None:
    flow = await flows.start(FAN_OUT)
    await flows.claim()
    await flows.ack("root")
    blocked = [name for name, state in (await flows.states(flow)).items() if state == "blocked"]
    await flows.admin.skip(flows.org, flow.id, NodeName(blocked[-1]), epoch=1)
    await flows.sweep.sweep()
    assert await counts(flows, flow) == {"succeeded": 1, "skipped": 1, "released": WIDTH - 1}
    assert await flows.run_all()
    assert await flows.state(flow) == "succeeded"


async def test_two_routers_that_go_on_at_the_same_time_release_each_job_once(flows: Flows, module_dsn: str) -> None:
    database = Database(SHARD, module_dsn, connections=2)
    await database.open()
    second = Flows(database, flows.org)
    flow = await flows.start(FAN_OUT)
    await flows.claim()
    await flows.ack("root")
    await asyncio.gather(flows.sweep.sweep(), second.sweep.sweep(), flows.sweep.sweep())
    assert await counts(flows, flow) == {"succeeded": 1, "released": WIDTH}
    assert sum(map(len, await flows.run_all())) == WIDTH
    await database.close()


async def test_routers_go_on_at_once(module_dsn: str, org: OrgId, tmp_path: Path) -> None:
    """No router sweeps, so only a notification can make the routers continue."""
    config = write_cluster(tmp_path / "cluster.toml", {SHARD: module_dsn}, sweep_seconds=3600)
    with running_routers(config, processes=2) as routers:
        async with windrow.Client(routers.address, org=org) as client:
            flow = windrow.Workflow("wide", org=org)
            root = flow.job("first", "work")
            for _ in range(WIDTH):
                flow.job("rest", "work", after=[root])
            await client.start(flow)
            (job,) = await client.dequeue("first", wait=PATIENCE_S)
            await client.ack(job)
            async with asyncio.timeout(PATIENCE_S):
                taken = 0
                while taken < WIDTH:
                    jobs = await client.dequeue("rest", max_jobs=1000, wait=PATIENCE_S)
                    taken += len(jobs)
                    await client.ack(jobs)
            record, _ = await client.get_workflow(flow.id)
            assert record.state is windrow.WorkflowState.SUCCEEDED
