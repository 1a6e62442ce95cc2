"""Calls pause, skip and cancel workflows. The calls are repeated, interrupted, or made at the same time."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import psycopg
import pytest

from shard.errors import NodeEnded, ShardUnavailable
from shard.postgres.pool import Database
from shard.queue.store import Store
from shard.vocabulary import Answer, OrgId
from shard.workflow import Callback, NodeName
from shard.workflows import sweep as sweep_module
from tests.workflows import Flows, chain

DIAMOND = {"a": [], "b": ["a"], "c": ["a"], "d": ["b", "c"]}
CALLBACKS = {"won": Callback.SUCCESS, "lost": Callback.FAILURE, "over": Callback.END}


@pytest.fixture
async def flows(database: Database, store: Store, org: OrgId) -> AsyncGenerator[Flows, None]:
    opened = Flows(database, org, store=store)
    yield opened
    await opened.check()


# ── Pause ────────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_workflow_that_ended_in_its_pause_runs_its_callbacks_when_it_is_resumed(flows: Flows) -> None:
    flow = await flows.start(chain(1), callbacks=CALLBACKS)
    await flows.admin.set_paused(flows.org, flow.id, paused=True, epoch=1)
    assert await flows.run_all() == [{"n0"}]
    assert await flows.state(flow) == "succeeded"
    await flows.admin.set_paused(flows.org, flow.id, paused=False, epoch=1)
    assert await flows.run_all() == [{"won", "over"}]


async def test_a_cancel_ends_the_pause(flows: Flows) -> None:
    flow = await flows.start(DIAMOND, callbacks=CALLBACKS)
    await flows.claim()
    await flows.admin.set_paused(flows.org, flow.id, paused=True, epoch=1)
    await flows.ack("a")
    assert await flows.admin.doom(flows.org, flow.id, reason="stop", epoch=1) == []
    assert await flows.state(flow) == "cancelled"
    assert await flows.run_all() == [{"over"}]


async def test_paused_workflows_hide_nothing_from_the_sweep(
    flows: Flows, module_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many nodes wait for the end of a pause, the sweep finds the other nodes."""
    monkeypatch.setattr(sweep_module, "_ROWS", 10)
    for _ in range(2):
        paused = await flows.start({"root": [], **{f"n{at}": ["root"] for at in range(20)}})
        await flows.claim()
        await flows.admin.set_paused(flows.org, paused.id, paused=True, epoch=1)
        await flows.ack("root")
    flow = await flows.start(chain(2))
    await flows.claim()
    async with await psycopg.AsyncConnection.connect(module_dsn) as other:
        await other.execute("SELECT FROM windrow.job WHERE id = %s::uuid FOR UPDATE", [flows.job(flow, "n1")])
        await flows.ack("n0")
    await flows.sweep.sweep()
    assert await flows.claim() == {"n1"}


async def test_more_workflows_than_a_sweep_visits_hide_none_of_them(
    flows: Flows, module_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep_module, "_ROWS", 2)
    first = await flows.start({"a": [], "b": ["a"]})
    for _ in range(5):
        paused = await flows.start({"root": [], "next": ["root"]})
        await flows.claim()
        await flows.admin.set_paused(flows.org, paused.id, paused=True, epoch=1)
        await flows.ack("root")
    last = await flows.start({"y": [], "z": ["y"]})
    await flows.claim()
    # The workflows of other tests of this module may wait too.
    waiting = b"SELECT DISTINCT flow FROM windrow.workflow_node WHERE state IN ('due', 'doomed')"
    async with await psycopg.AsyncConnection.connect(module_dsn) as other:
        locked = [flows.job(first, "b"), flows.job(last, "z")]
        await other.execute("SELECT FROM windrow.job WHERE id = ANY (%s::uuid[]) FOR UPDATE", [locked])
        await flows.ack("a", "y")
        sweeps = -(-len(await flows.database.run(waiting, {})) // 2)
        assert sweeps > 3
        # Stop one sweep before the sweep that visits the last workflow.
        for _ in range(sweeps - 1):
            await flows.sweep.sweep()
    await flows.sweep.sweep()
    assert await flows.claim() == {"z"}
    # After the last workflow, the sweeps begin again with the first workflow.
    for _ in range(sweeps):
        await flows.sweep.sweep()
    assert await flows.claim() == {"b"}


# ── Skip ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_skip_leaves_no_blocked_job_although_the_router_dies_after_it(flows: Flows) -> None:
    """The router cancels the job of a skipped node in a second step. In this test the router dies before this step."""
    flow = await flows.start(DIAMOND)
    await flows.admin.skip(flows.org, flow.id, NodeName("b"), epoch=1)
    await flows.check()
    assert await flows.run_all() == [{"a"}, {"c"}, {"d"}]
    assert (await flows.states(flow))["b"] == "skipped"


async def test_a_skip_may_be_repeated(flows: Flows) -> None:
    flow = await flows.start(DIAMOND)
    job = await flows.admin.skip(flows.org, flow.id, NodeName("a"), epoch=1)
    assert await flows.admin.skip(flows.org, flow.id, NodeName("a"), epoch=1) == job
    assert await flows.store.cancel(flows.org, [job], reason="skipped") == [Answer.OK]
    assert await flows.admin.skip(flows.org, flow.id, NodeName("a"), epoch=1) == job
    assert await flows.run_all() == [{"b", "c"}, {"d"}]
    with pytest.raises(NodeEnded):
        await flows.admin.skip(flows.org, flow.id, NodeName("b"), epoch=1)


async def test_a_skip_of_a_node_whose_job_is_locked_does_nothing(flows: Flows, module_dsn: str) -> None:
    flow = await flows.start(DIAMOND)
    async with await psycopg.AsyncConnection.connect(module_dsn) as other:
        await other.execute("SELECT FROM windrow.job WHERE id = %s::uuid FOR UPDATE", [flows.job(flow, "b")])
        with pytest.raises(ShardUnavailable):
            await flows.admin.skip(flows.org, flow.id, NodeName("b"), epoch=1)
    assert await flows.run_all() == [{"a"}, {"b", "c"}, {"d"}]


async def test_a_skipped_callback_never_runs(flows: Flows) -> None:
    flow = await flows.start(chain(1), callbacks=CALLBACKS)
    await flows.admin.skip(flows.org, flow.id, NodeName("won"), epoch=1)
    assert await flows.run_all() == [{"n0"}, {"over"}]
    assert await flows.state(flow) == "succeeded"
