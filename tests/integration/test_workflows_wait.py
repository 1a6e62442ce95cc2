"""A job waits for nodes that it adds to its workflow, and runs again when they have ended. Only a job that still has
its lease can wait. No job waits without end, even if the last of these nodes ends while the wait begins (I7, I11)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Generator, Sequence

import psycopg
import pytest

import windrow
import windrow.testing
from shard.admin.queue_admin import QueueAdmin
from shard.errors import LeaseEnded, NodeEnded, NodeMayWaitForJob, ShardUnavailable, TooManyNodes, WorkflowEnded
from shard.queue.settle import Settlement
from shard.queue_settings import QueueSettings
from shard.vocabulary import Answer, OrgId, QueueName
from shard.workflow import EDGES_MAX, Callback, NewWorkflow, OnFailed
from tests.conftest import SHARD
from tests.effort import luck_of, trials
from tests.integration.test_workflows_calls import until_ended
from tests.jobs import HOUR_US, lease_jobs
from tests.pair import B, Pair
from tests.routers import Routers, running_routers, write_cluster
from tests.workflows import CANCEL, IGNORE, RUN, Flows, Graph, both, new_nodes, set_portion

CALLBACKS = {"won": Callback.SUCCESS, "lost": Callback.FAILURE, "over": Callback.END}
luck = luck_of("jobs that wait")


# ── What a wait does ─────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_job_runs_again_when_the_nodes_that_it_has_added_have_ended(flows: Flows) -> None:
    flow = await flows.start({"a": [], "b": ["a"]}, callbacks=CALLBACKS, max_attempts=1)
    await flows.claim()
    added = await flows.add(flow, "a", {"x": [], "y": ["x"]}, wait=CANCEL)
    assert (added.stored, added.waits) == (2, True)
    assert await flows.states(flow) == {
        "a": "blocked", "b": "blocked", "x": "released", "y": "blocked", **dict.fromkeys(CALLBACKS, "blocked")
    }  # fmt: skip
    assert await flows.claim() == {"x"}
    await flows.ack("x")
    assert await flows.claim() == {"y"}
    await flows.ack("y")
    # The attempt of the waiting job was not counted, and the node that waits for this job still waits.
    ((job, lease),) = await lease_jobs(flows.store, flows.org, window_us=HOUR_US)
    assert (flows.name_of(job), job.attempt) == ("a", 1)
    flows.leases["a"] = lease
    added = await flows.add(flow, "a", {"x": [], "y": ["x"]}, wait=CANCEL)
    assert (added.stored, added.waits) == (0, False)
    await flows.ack("a")
    assert await flows.run_all() == [{"b"}, {"won", "over"}]
    assert await flows.state(flow) == "succeeded"


async def test_a_job_waits_again_and_again(flows: Flows) -> None:
    flow = await flows.start({"a": []}, callbacks=CALLBACKS)
    for at in range(3):
        assert await flows.claim() == {"a"}
        for before in range(at):
            assert not (await flows.add(flow, "a", {f"x{before}": []}, wait=CANCEL)).waits
        # The new node may wait for nodes that have ended.
        after = {f"x{at}": [f"x{before}" for before in range(at)]}
        assert (await flows.add(flow, "a", after, wait=CANCEL)).waits
        assert await flows.claim() == {f"x{at}"}
        await flows.ack(f"x{at}")
    assert await flows.run_all() == [{"a"}, {"won", "over"}]


async def test_nodes_that_a_job_waits_for_wait_for_nodes_that_they_add(flows: Flows) -> None:
    flow = await flows.start({"a": []}, callbacks=CALLBACKS)
    await flows.claim()
    await flows.add(flow, "a", {"x": []}, wait=CANCEL)
    await flows.claim()
    await flows.add(flow, "x", {"deep": []}, wait=CANCEL)
    assert await flows.run_all() == [{"deep"}, {"x"}, {"a"}, {"won", "over"}]


@pytest.mark.parametrize(
    ("policy", "becomes", "ends"),
    [(CANCEL, "cancelled", "failed"), (IGNORE, "released", "succeeded"), (RUN, "released", "failed")],
    ids=lambda it: str(it),
)
@pytest.mark.parametrize("when", ["before the wait", "the last to end", "not the last to end"])
async def test_the_policy_says_what_becomes_of_a_job_if_such_a_node_fails(
    flows: Flows, policy: OnFailed, becomes: str, ends: str, when: str
) -> None:
    flow = await flows.start({"a": []}, callbacks=CALLBACKS)
    await flows.claim()
    nodes: Graph = {"x": [], "y": []}
    if when == "before the wait":
        await flows.add(flow, "a", nodes)
        await flows.claim()
        await flows.kill("x")
        await flows.add(flow, "a", nodes, wait=policy)
    else:
        await flows.add(flow, "a", nodes, wait=policy)
        await flows.claim()
        if when == "the last to end":
            await flows.ack("y")
        await flows.kill("x")
    if "y" in flows.leases:
        assert (await flows.states(flow))["a"] == ("cancelled" if becomes == "cancelled" else "blocked")
        await flows.ack("y")
    assert (await flows.states(flow))["a"] == becomes
    await flows.run_all()
    assert await flows.state(flow) == ends


async def test_a_failure_that_all_nodes_had_seen_before_the_wait_cancels_the_job(flows: Flows) -> None:
    flow = await flows.start({"a": []}, callbacks=CALLBACKS)
    await flows.claim()
    await flows.add(flow, "a", {"x": [], "y": []})
    await flows.claim()
    await flows.kill("y")
    await flows.ack("x")
    assert (await flows.add(flow, "a", {"x": [], "y": []}, wait=CANCEL)).waits
    assert (await flows.states(flow))["a"] == "cancelled"
    assert await flows.run_all() == [{"lost", "over"}]


async def test_the_policy_of_the_last_wait_counts(flows: Flows) -> None:
    """Earlier versions had a bug. If a job's first wait ignored a failure and its second wait did not, the job ran
    again at once, without end."""
    for policy, ends in ((CANCEL, "cancelled"), (RUN, "released")):
        flow = await flows.start({"a": []}, callbacks=CALLBACKS)
        await flows.claim()
        await flows.add(flow, "a", {"x": []}, wait=IGNORE)
        await flows.claim()
        await flows.kill("x")
        assert await flows.claim() == {"a"}
        assert not (await flows.add(flow, "a", {"x": []}, wait=IGNORE)).waits
        assert (await flows.add(flow, "a", {"x": []}, wait=policy)).waits is (policy is CANCEL)
        assert (await flows.states(flow))["a"] == ends
        if policy is RUN:
            await flows.ack("a")
        assert await flows.run_all() == [{"lost", "over"}]


async def test_a_failure_that_is_still_told_to_other_nodes_cancels_the_job(flows: Flows) -> None:
    flow = await flows.start({"a": []}, callbacks=CALLBACKS)
    await flows.claim()
    await flows.add(flow, "a", {"x": [], **{f"d{number}": ["x"] for number in range(5)}})
    await flows.claim()
    await set_portion(flows.database, 2)
    try:
        await flows.kill("x")
        assert (await flows.add(flow, "a", {"x": []}, wait=CANCEL)).waits
        await flows.sweep.sweep()
    finally:
        await set_portion(flows.database, 200)
    assert (await flows.states(flow))["a"] == "cancelled"
    assert await flows.run_all() == [{"lost", "over"}]


async def test_a_job_whose_nodes_had_ended_before_the_wait_keeps_its_lease(flows: Flows) -> None:
    flow = await flows.start({"a": []}, callbacks=CALLBACKS)
    await flows.claim()
    await flows.add(flow, "a", {"x": []})
    await flows.claim()
    await flows.ack("x")
    assert not (await flows.add(flow, "a", {"x": []}, wait=CANCEL)).waits
    parents = await flows.admin.parents(flows.org, flow.id, 0, from_node=0, rows=10)
    assert [parent.name for parent in parents] == ["x"]
    await flows.ack("a")
    assert await flows.run_all() == [{"won", "over"}]


async def test_a_job_whose_delay_is_over_is_not_delayed_again(flows: Flows) -> None:
    flow = await flows.start({"a": []}, delay_us=1)
    await flows.database.run(b"UPDATE windrow.workflow_node SET delay_us = 3600000000", {})
    await flows.claim()
    await flows.add(flow, "a", {"x": []}, wait=CANCEL)
    assert await flows.run_all() == [{"x"}, {"a"}]
    assert await flows.state(flow) == "succeeded"


async def test_a_job_of_a_paused_workflow_waits_for_the_end_of_the_pause_too(flows: Flows) -> None:
    flow = await flows.start({"a": []}, callbacks=CALLBACKS)
    await flows.claim()
    await flows.add(flow, "a", {"x": []}, wait=CANCEL)
    await flows.claim()
    await flows.admin.set_paused(flows.org, flow.id, paused=True, epoch=1)
    await flows.ack("x")
    assert await flows.claim() == set()
    await flows.admin.set_paused(flows.org, flow.id, paused=False, epoch=1)
    assert await flows.run_all() == [{"a"}, {"won", "over"}]


async def test_a_cancel_reaches_a_job_that_waits(flows: Flows) -> None:
    flow = await flows.start({"a": []}, callbacks=CALLBACKS)
    await flows.claim()
    await flows.add(flow, "a", {"x": []}, wait=CANCEL)
    jobs = await flows.admin.doom(flows.org, flow.id, reason="", epoch=1)
    assert jobs == [flows.job(flow, "x")]
    await flows.store.cancel(flows.org, jobs, reason="")
    assert await flows.run_all() == [{"over"}]
    assert (await flows.states(flow))["a"] == "cancelled"


async def test_a_job_that_waits_gives_its_place_in_its_group_to_the_next_one(flows: Flows) -> None:
    await QueueAdmin(flows.database).create_queue(flows.org, QueueName("g"), QueueSettings(group_concurrency=1))
    flow = await flows.start({"a": []}, queue_of=lambda _: "g", group="one")
    other = await flows.start({"b": []}, queue_of=lambda _: "g", group="one")
    assert await flows.claim(queue="g") == {"a"}
    await flows.add(flow, "a", {"x": []}, wait=CANCEL)
    assert await flows.claim(queue="g") == {"b"}
    assert await flows.run_all() == [{"x"}]
    # The job is due, and waits for a group slot.
    assert await flows.claim(queue="g") == set()
    await flows.ack("b")
    assert await flows.run_all(queue="g") == [{"a"}]
    assert (await flows.state(flow), await flows.state(other)) == ("succeeded", "succeeded")


# ── Refusals ─────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_job_that_has_lost_its_lease_waits_for_nothing(flows: Flows) -> None:
    flow = await flows.start({"a": [], "b": []})
    await flows.claim()
    lost, waits = flows.leases["a"], flows.leases["b"]
    await flows.store.settle(Settlement.release(flows.org, [lost]))
    with pytest.raises(LeaseEnded):
        await flows.add(flow, lost, {"x": []}, wait=CANCEL)
    assert "x" not in await flows.states(flow)
    await flows.add(flow, waits, {"y": []}, wait=CANCEL)
    # The answer to this call may have been lost. A repeated call gets the same answer and changes nothing.
    again = await flows.add(flow, waits, {"y": []}, wait=CANCEL)
    assert (again.stored, again.waits) == (0, True)
    for graph, wait in (({"y": [], "z": []}, CANCEL), ({"y": []}, None)):
        with pytest.raises(LeaseEnded):
            await flows.add(flow, waits, graph, wait=wait)
    assert await flows.store.settle(Settlement.ack(flows.org, [waits])) == [Answer.STALE]
    assert await flows.run_all() == [{"a", "y"}, {"b"}]


@pytest.mark.parametrize("parent", ["a", "b", "c"])
async def test_a_node_that_a_job_waits_for_does_not_wait_for_nodes_that_may_wait_for_the_job(
    flows: Flows, parent: str
) -> None:
    flow = await flows.start({"a": [], "b": ["a"], "c": []})
    await flows.claim()
    with pytest.raises(NodeMayWaitForJob, match=f"the job waits for node 'y', so .* cannot wait for node '{parent}'"):
        await flows.add(flow, "a", {"x": [], "y": ["x", parent]}, wait=CANCEL)
    assert "x" not in await flows.states(flow)
    await flows.ack("c")
    if parent == "c":
        assert (await flows.add(flow, "a", {"x": [], "y": ["x", parent]}, wait=CANCEL)).waits
        assert await flows.run_all() == [{"x"}, {"y"}, {"a"}, {"b"}]


@pytest.mark.parametrize("parent", ["a", "b"])
async def test_a_job_does_not_wait_for_a_node_that_an_earlier_call_lets_wait_for_the_job(
    flows: Flows, parent: str
) -> None:
    flow = await flows.start({"a": [], "b": ["a"]})
    await flows.claim()
    await flows.add(flow, "a", {"x": [], "y": ["x", parent]})
    refused: list[Graph] = [{"x": [], "y": ["x", parent]}, {"y": []}, {"y": [], "z": ["y"]}]
    for graph in refused:
        with pytest.raises(NodeMayWaitForJob, match=f"so this node cannot wait for node '{parent}'"):
            await flows.add(flow, "a", graph, wait=CANCEL)
    assert (await flows.add(flow, "a", {"x": []}, wait=CANCEL)).waits
    assert await flows.run_all() == [{"x"}, {"a"}, *([{"b"}, {"y"}] if parent == "b" else [{"b", "y"}])]


async def test_a_job_waits_for_nodes_that_wait_for_each_other_and_for_what_they_have_added(flows: Flows) -> None:
    flow = await flows.start({"a": []})
    await flows.claim()
    await flows.add(flow, "a", {"x": [], "y": ["x"]})
    assert await flows.claim() == {"x"}
    assert (await flows.add(flow, "x", {"deep": []}, wait=CANCEL)).waits
    assert (await flows.add(flow, "a", {"x": [], "y": [], "z": ["y"]}, wait=CANCEL)).waits
    assert await flows.run_all() == [{"deep"}, {"x"}, {"y"}, {"z"}, {"a"}]


async def test_a_redriven_job_whose_node_has_ended_waits_for_nothing(flows: Flows) -> None:
    flow = await flows.start({"a": [], "b": []})
    await flows.claim()
    await flows.kill("a")
    await flows.store.redrive(flows.org, [flows.job(flow, "a")])
    assert await flows.claim() == {"a"}
    with pytest.raises(NodeEnded, match="node 'a'"):
        await flows.add(flow, "a", {"x": []}, wait=CANCEL)
    assert "x" not in await flows.states(flow)
    await flows.ack("a", "b")


async def test_a_redriven_job_goes_on_with_nodes_that_have_ended(flows: Flows) -> None:
    """The handler of the job runs from the beginning, even after the end of the workflow."""
    flow = await flows.start({"a": []}, callbacks=CALLBACKS)
    await flows.claim()
    await flows.add(flow, "a", {"x": []}, wait=CANCEL)
    assert await flows.claim() == {"x"}
    await flows.ack("x")
    assert await flows.claim() == {"a"}
    await flows.kill("a")
    assert await flows.run_all() == [{"lost", "over"}]
    await flows.store.redrive(flows.org, [flows.job(flow, "a")])
    assert await flows.claim() == {"a"}
    assert not (await flows.add(flow, "a", {"x": []}, wait=CANCEL)).waits
    with pytest.raises(WorkflowEnded):
        await flows.add(flow, "a", {"x": [], "y": []}, wait=CANCEL)
    await flows.ack("a")
    assert await flows.state(flow) == "failed"


async def test_nobody_waits_in_a_workflow_that_was_cancelled(flows: Flows) -> None:
    flow = await flows.start({"a": []})
    await flows.claim()
    await flows.add(flow, "a", {"x": []})
    await flows.admin.begin_cancel(flows.org, flow.id, reason="", epoch=1)
    with pytest.raises(WorkflowEnded):
        await flows.add(flow, "a", {"x": []}, wait=CANCEL)
    await flows.ack("a")


async def test_edges_of_jobs_that_wait_count_once(flows: Flows) -> None:
    flow = await flows.start({"a": []})
    await flows.claim()
    # Give the workflow two edges fewer than the limit.
    await flows.database.run(
        b"INSERT INTO windrow.workflow_edge SELECT w.flow, 100000 + n, 0, 'cancel' FROM windrow.workflow w, "
        b"generate_series(1, %(edges)s::integer) n WHERE w.id = %(id)s::uuid",
        {"id": flow.id, "edges": EDGES_MAX - 2},
    )
    with pytest.raises(TooManyNodes, match=f"has {EDGES_MAX - 2:,} edges, and 3 more"):
        await flows.add(flow, "a", {"x": [], "y": [], "z": []}, wait=CANCEL)
    for waits in (True, False):
        assert (await flows.add(flow, "a", {"x": [], "y": []}, wait=CANCEL)).waits is waits
        await flows.claim()
        if waits:
            await flows.ack("x", "y")
            assert await flows.claim() == {"a"}
    await flows.ack("a")


# ── Locks, races and moves ───────────────────────────────────────────────────────────────────────────────────────────


async def test_a_job_that_another_session_has_locked_does_not_wait(flows: Flows, module_dsn: str) -> None:
    """The call holds the lock of the workflow. So it must not wait for the session that keeps a row locked."""
    flow = await flows.start({"a": []})
    await flows.claim()
    async with await psycopg.AsyncConnection.connect(module_dsn) as session:
        await session.execute("SELECT FROM windrow.job WHERE id = %s FOR UPDATE", [flows.job(flow, "a")])
        with pytest.raises(ShardUnavailable, match="is locked; try again"):
            await flows.add(flow, "a", {"x": []}, wait=CANCEL)
        await session.rollback()
    assert "x" not in await flows.states(flow)
    assert (await flows.add(flow, "a", {"x": []}, wait=CANCEL)).waits
    assert await flows.run_all() == [{"x"}, {"a"}]


@pytest.mark.thorough
async def test_a_wait_and_the_last_end_never_pass_each_other(two: list[Flows]) -> None:
    """One router lets a job wait while the other router ends the last node that it waits for."""
    waited: list[bool] = []
    for _ in range(trials(100, thorough=2000)):
        flow = await two[0].start({"a": []}, callbacks=CALLBACKS)
        await two[0].claim()
        await two[0].add(flow, "a", {"x": []})
        await two[0].claim()
        two[1].leases["x"] = two[0].leases.pop("x")

        async def wait(flow: NewWorkflow = flow) -> bool:
            await asyncio.sleep(luck.choice((0, 0, 0.001, 0.002)))
            return (await two[0].add(flow, "a", {"x": []}, wait=CANCEL)).waits

        async def end() -> None:
            await asyncio.sleep(luck.choice((0, 0.001, 0.002, 0.003)))
            await two[1].ack("x")

        waits, _ = await asyncio.gather(wait(), end())
        waited.append(waits)
        if waits:
            assert await two[0].claim() == {"a"}
        await two[0].ack("a")
        assert await two[0].run_all() == [{"won", "over"}]
    await two[0].check()
    assert True in waited


@pytest.mark.thorough
async def test_no_job_waits_for_ever_whatever_jobs_add_and_wait_for(flows: Flows) -> None:
    """Jobs add nodes that wait for random other nodes. The jobs then wait for nodes that they add now or have added
    before. Every node that was not refused ends, even if folds are done in small portions."""
    for _ in range(trials(8, thorough=300)):
        await set_portion(flows.database, luck.choice((1, 2, 200)))
        try:
            flow = await flows.start(drawn_graph("n", [], luck.randint(1, 5)), callbacks=CALLBACKS)
            for turn in range(40):
                await flows.sweep.sweep()
                await flows.claim(max_jobs=luck.choice((1, 1000)))
                jobs = sorted(flows.leases.keys() - CALLBACKS.keys())
                if not jobs:
                    break
                await act(flows, flow, luck.choice(jobs), turn)
            await flows.admin.set_paused(flows.org, flow.id, paused=False, epoch=1)
            await flows.sweep.sweep()
            while await flows.claim() or flows.leases:
                await flows.ack(*flows.leases)
                await flows.sweep.sweep()
        finally:
            await set_portion(flows.database, 200)
        await flows.check()
        state, states = await flows.state(flow), await flows.states(flow)
        ends = {"won": state == "succeeded", "lost": state == "failed", "over": True}
        assert {name: states[name] == "succeeded" for name in CALLBACKS} == ends, states
        assert not {"blocked", "released"} & set(states.values()), states


def drawn_graph(prefix: str, others: Sequence[str], count: int) -> dict[str, list[tuple[str, OnFailed]]]:
    """Returns new nodes that wait for some of each other and for some of the other nodes."""
    graph: dict[str, list[tuple[str, OnFailed]]] = {}
    for number in range(count):
        parents = [*others, *graph]
        chosen = luck.sample(parents, min(len(parents), luck.randint(0, 2)))
        graph[f"{prefix}{number}"] = [(parent, luck.choice((CANCEL, CANCEL, IGNORE, RUN))) for parent in chosen]
    return graph


async def act(flows: Flows, flow: NewWorkflow, job: str, turn: int) -> None:
    """Takes a random step with a leased job."""
    nodes, _ = await flows.admin.nodes(flows.org, flow.id, page_size=1000, page_token="")
    names = [node.name for node in nodes if node.callback is None]
    own = [name for name in names if name.rpartition("-")[0] == job]
    what = luck.choices(("ack", "kill", "add", "wait", "cancel", "pause"), (4, 1, 3, 6, 0.5, 0.5))[0]
    match what:
        case "ack":
            await flows.ack(job)
        case "kill":
            await flows.kill(job)
        case "cancel":
            name = luck.choice(names)
            await flows.store.cancel(flows.org, [flows.job(flow, name)], reason="")
            flows.leases.pop(name, None)
        case "pause":
            await flows.admin.set_paused(flows.org, flow.id, paused=luck.random() < 0.5, epoch=1)
        case _:
            known = luck.sample(own, luck.randint(0, len(own)))
            new = drawn_graph(f"{job}-{turn}.", luck.choice((names, known, [])), luck.randint(0 if known else 1, 3))
            policy = luck.choice((CANCEL, IGNORE, RUN)) if what == "wait" else None
            with contextlib.suppress(NodeMayWaitForJob):
                if (await flows.add(flow, job, {**dict.fromkeys(known, ()), **new}, wait=policy)).waits:
                    del flows.leases[job]


async def test_an_ack_and_a_wait_of_the_same_job_never_block_each_other(two: list[Flows]) -> None:
    outcomes: set[str] = set()
    for _ in range(trials(60, thorough=1000)):
        flow = await two[0].start({"a": []})
        await two[0].claim()
        lease = two[0].leases.pop("a")

        async def wait(flow: NewWorkflow = flow, lease: object = lease) -> str:
            try:
                return "waits" if (await two[0].add(flow, lease, {"x": []}, wait=CANCEL)).waits else "goes on"  # type: ignore[arg-type]
            except (LeaseEnded, WorkflowEnded, ShardUnavailable) as error:
                return type(error).__name__

        settling = two[1].store.settle(Settlement.ack(two[1].org, [lease]))
        outcome, (answer,) = await asyncio.gather(wait(), settling)
        outcomes.add(outcome)
        assert (outcome == "waits") == (answer is not Answer.OK)
        assert await two[0].run_all() == ([{"x"}, {"a"}] if outcome == "waits" else [])
        assert await two[0].state(flow) == "succeeded"
    await two[0].check()
    assert outcomes - {"waits"}


async def test_a_job_on_the_shard_that_its_org_leaves_waits_on_the_other_shard(pair: Pair, org: OrgId) -> None:
    source, target = both(pair, org)
    flow = await source.start({"a": []}, callbacks={"over": Callback.END})
    await source.claim()
    move = await pair.begin([org], target=B)
    mover = pair.mover(move)
    while (await pair.placement(org))[0] != (B,):
        assert await mover.step()
    by = await source.adder.node_of(org, flow.id, source.leases["a"])
    added = await target.adder.add(new_nodes(org, flow, {"x": []}, wait=CANCEL), adder=by, epoch=move.epoch)
    target.names[added.jobs[0]] = "x"
    assert added.waits
    # The router releases the job, because only the target of the move can block it.
    await source.store.settle(Settlement.release(org, [source.leases["a"]]))
    await mover.finish()
    assert await target.claim() == {"a", "x"}
    assert (await target.add(flow, "a", {"x": []}, wait=CANCEL, epoch=move.epoch)).waits
    await target.ack("x")
    assert await target.run_all() == [{"a"}, {"over"}]
    await pair.balance()
    await target.check()


async def test_a_move_takes_a_job_that_waits_along(pair: Pair, org: OrgId) -> None:
    source, target = both(pair, org)
    flow = await source.start({"a": []}, callbacks={"over": Callback.END})
    await source.claim()
    await source.add(flow, "a", {"x": [], "y": ["x"]}, wait=CANCEL)
    await source.claim()
    move = await pair.begin([org], target=B)
    mover = pair.mover(move)
    while (await pair.placement(org))[0] != (B,):
        assert await mover.step()
    await source.ack("x")
    await mover.finish()
    await target.sweep.sweep()
    assert await target.run_all() == [{"y"}, {"a"}, {"over"}]
    await pair.balance()
    await target.check()


# ── Through a router ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def routers(module_dsn: str, tmp_path_factory: pytest.TempPathFactory) -> Generator[Routers, None, None]:
    config = write_cluster(tmp_path_factory.mktemp("waits") / "cluster.toml", {SHARD: module_dsn})
    with running_routers(config) as running:
        yield running


@pytest.fixture
async def client(routers: Routers, org: OrgId) -> AsyncGenerator[windrow.Client, None]:
    async with windrow.Client(routers.address, org=org) as opened:
        yield opened


async def test_a_handler_gets_the_results_of_the_nodes_that_it_waits_for(
    client: windrow.Client, caplog: pytest.LogCaptureFixture
) -> None:
    worker = windrow.Worker(client, "crawl")
    runs: list[int] = []

    @worker.handler("crawl_site")
    async def crawl_site(job: windrow.Job) -> int:
        assert job.workflow is not None
        runs.append(job.attempt)
        pages = windrow.Nodes()
        for number in range(3):
            pages.job("crawl", "fetch", {"page": number})
        results = await job.workflow.wait_for(pages)
        return sum(int(page.result) for page in results)

    @worker.handler("fetch")
    def fetch(job: windrow.Job) -> str:
        return str(10 + job.json()["page"])

    flow = windrow.Workflow("site")
    site = flow.job("crawl", "crawl_site", max_attempts=1)
    flow.job("crawl", "fetch", {"page": 9}, after=site, name="later")
    with caplog.at_level(logging.WARNING):
        running = asyncio.create_task(worker.run())
        started = await client.start(flow)
        assert (await until_ended(client, started.id)).state is windrow.WorkflowState.SUCCEEDED
        running.cancel()
        await asyncio.wait({running})
    assert runs == [1, 1]
    (job,) = (await client.get_jobs([started.job_ids["crawl_site"]], include_payload=True)).values()
    assert job.result == b"33"
    outcomes = [attempt.outcome for attempt in job.attempts]
    assert outcomes == [windrow.AttemptOutcome.RELEASED, windrow.AttemptOutcome.ACKED]
    assert caplog.messages == []


@pytest.mark.thorough
@pytest.mark.parametrize("is_async", [True, False])
async def test_a_report_that_comes_before_a_wait_is_stored(
    client: windrow.Client, routers: Routers, is_async: bool
) -> None:
    """The second report is sent when the first report has been answered. The wait ends the lease. In earlier versions
    the wait could reach the router before the second report."""
    worker = windrow.Worker(client, "q")
    checkpoints: list[bytes] = []

    def nodes_of(job: windrow.Job) -> windrow.Nodes:
        checkpoints.append(job.checkpoint)
        nodes = windrow.Nodes()
        nodes.job("q", "leaf")
        if not job.checkpoint:
            for done in range(20):
                job.report(windrow.Progress(done=done), checkpoint=f"{done}")
        return nodes

    with windrow.SyncClient(routers.address, org=client.org) as blocking:

        async def waits(job: windrow.Job) -> None:
            assert job.workflow is not None
            nodes = nodes_of(job)
            await asyncio.sleep(0)
            job.report(checkpoint="last")
            await job.workflow.wait_for(nodes)

        def blocks(job: windrow.Job) -> None:
            nodes = nodes_of(job)
            job.report(checkpoint="last")
            blocking.wait_for(job, nodes)

        worker.handler("k")(waits if is_async else blocks)

        @worker.handler("leaf")
        async def leaf(_: windrow.Job) -> None:
            pass

        running = asyncio.create_task(worker.run())
        for _ in range(trials(20, thorough=100)):
            flow = windrow.Workflow()
            flow.job("q", "k")
            started = await client.start(flow)
            assert (await until_ended(client, started.id)).state is windrow.WorkflowState.SUCCEEDED
            assert checkpoints == [b"", b"last"]
            checkpoints.clear()
        worker.stop()
        await running


@pytest.mark.parametrize("is_async", [True, False])
async def test_lines_that_come_before_a_wait_are_stored(
    client: windrow.Client, routers: Routers, is_async: bool
) -> None:
    worker = windrow.Worker(client, "q")

    def nodes_of(job: windrow.Job) -> windrow.Nodes:
        job.log(f"attempt {job.attempt} begins")
        nodes = windrow.Nodes()
        nodes.job("q", "leaf")
        return nodes

    with windrow.SyncClient(routers.address, org=client.org) as blocking:

        async def waits(job: windrow.Job) -> None:
            assert job.workflow is not None
            await job.workflow.wait_for(nodes_of(job))

        def blocks(job: windrow.Job) -> None:
            blocking.wait_for(job, nodes_of(job))

        worker.handler("k")(waits if is_async else blocks)

        @worker.handler("leaf")
        async def leaf(_: windrow.Job) -> None:
            pass

        flow = windrow.Workflow()
        flow.job("q", "k")
        running = asyncio.create_task(worker.run())
        started = await client.start(flow)
        assert (await until_ended(client, started.id)).state is windrow.WorkflowState.SUCCEEDED
        worker.stop()
        await running
    (job,) = (await client.get_jobs(started.job_ids.values())).values()
    assert [attempt.log for attempt in job.attempts] == ["attempt 1 begins", "attempt 1 begins"]


async def test_a_handler_that_waits_for_no_nodes_goes_on(client: windrow.Client) -> None:
    """The number of nodes is often known only when the handler runs."""
    flow = windrow.Workflow()
    flow.job("q", "k")
    started = await client.start(flow)
    (job,) = await client.dequeue("q")
    assert await client.wait_for(job, windrow.Nodes()) == []
    assert await client.add_nodes(job, windrow.Nodes()) == windrow.Added(job_ids={}, stored=0)
    await client.ack(job)
    assert (await client.get_workflow(started.id))[0].state is windrow.WorkflowState.SUCCEEDED


async def test_a_handler_waits_for_a_signal(client: windrow.Client) -> None:
    worker = windrow.Worker(client, "ci")
    is_asked = asyncio.Event()

    @worker.handler("deploy")
    async def deploy(job: windrow.Job) -> bytes:
        assert job.workflow is not None
        approval = windrow.Nodes()
        approval.signal("approved", "ci", timeout=3600)
        try:
            (approved,) = await job.workflow.wait_for(approval)
        finally:
            is_asked.set()
        return approved.result

    flow = windrow.Workflow()
    flow.job("ci", "deploy")
    running = asyncio.create_task(worker.run())
    started = await client.start(flow)
    await is_asked.wait()
    assert await client.signal(started.id, "approved", "by ann")
    assert (await until_ended(client, started.id)).state is windrow.WorkflowState.SUCCEEDED
    running.cancel()
    await asyncio.wait({running})
    (job,) = (await client.get_jobs([started.job_ids["deploy"]], include_payload=True)).values()
    assert job.result == b"by ann"


async def test_a_def_handler_waits_by_a_client(client: windrow.Client, routers: Routers) -> None:
    worker = windrow.Worker(client, "crawl")
    told: list[str] = []

    with windrow.SyncClient(routers.address, org=client.org) as blocking:

        @worker.handler("crawl_site")
        def crawl_site(job: windrow.Job) -> None:
            assert job.workflow is not None
            nodes = windrow.Nodes()
            nodes.job("crawl", "fetch", name="x")
            with pytest.raises(RuntimeError, match="use wait_for of a client"):
                job.workflow.wait_for(nodes)
            told.extend(one.name for one in blocking.wait_for(job, nodes, on_failed=windrow.IGNORE))

        @worker.handler("fetch")
        def fetch(_: windrow.Job) -> None:
            raise windrow.Kill("there is no such page")

        flow = windrow.Workflow()
        flow.job("crawl", "crawl_site")
        running = asyncio.create_task(worker.run())
        started = await client.start(flow)
        assert (await until_ended(client, started.id)).state is windrow.WorkflowState.SUCCEEDED
        running.cancel()
        await asyncio.wait({running})
    assert told == ["x"]


async def test_a_handler_that_swallows_the_wait_runs_again_all_the_same(client: windrow.Client) -> None:
    worker = windrow.Worker(client, "crawl")
    results: list[str] = []

    @worker.handler("crawl_site")
    async def crawl_site(job: windrow.Job) -> str:
        assert job.workflow is not None
        nodes = windrow.Nodes()
        nodes.job("crawl", "fetch")
        try:
            await job.workflow.wait_for(nodes)
        except Exception as error:  # noqa: BLE001 - as users write it
            results.append(str(error))
        else:
            results.append("ended")
        return results[-1]

    @worker.handler("fetch")
    async def fetch(_: windrow.Job) -> None:
        pass

    flow = windrow.Workflow()
    flow.job("crawl", "crawl_site")
    running = asyncio.create_task(worker.run())
    started = await client.start(flow)
    assert (await until_ended(client, started.id)).state is windrow.WorkflowState.SUCCEEDED
    running.cancel()
    await asyncio.wait({running})
    assert results == ["waits for nodes that it has added (1)", "ended"]
    (job,) = (await client.get_jobs([started.job_ids["crawl_site"]], include_payload=True)).values()
    assert job.result == b"ended"


async def test_a_job_that_waits_says_why_it_does_not_run(client: windrow.Client) -> None:
    flow = windrow.Workflow()
    flow.job("q", "k")
    started = await client.start(flow)
    (job,) = await client.dequeue("q")
    nodes = windrow.Nodes()
    nodes.job("q", "other", name="x")
    with pytest.raises(windrow.Waiting):
        await client.wait_for(job, nodes)
    # The answer may be lost. Then the client repeats the call.
    with pytest.raises(windrow.Waiting):
        await client.wait_for(job, nodes)
    found = (await client.get_jobs([job.id]))[job.id]
    assert found.state is windrow.JobState.BLOCKED
    assert found.attempts[-1].outcome is windrow.AttemptOutcome.RELEASED
    assert "waits for 1 node: 'x'" in str((await client.explain_job(job.id)).causes[0])
    nodes.job("q", "other", name="y", after="k")
    with pytest.raises(windrow.FailedPrecondition):
        await client.wait_for(job, nodes)
    (other,) = await client.dequeue("q")
    await client.ack(other, result="found")
    (again,) = await client.dequeue("q")
    assert again.id == started.job_ids["k"]
    with pytest.raises(windrow.InvalidRequest, match="might wait for the job"):
        await client.wait_for(again, nodes)
    only = windrow.Nodes()
    only.job("q", "other", name="x")
    (ended,) = await client.wait_for(again, only)
    assert (ended.name, ended.state, ended.result) == ("x", windrow.NodeState.SUCCEEDED, b"found")
    await client.ack(again)


async def test_a_retry_waits_for_such_nodes_again(client: windrow.Client) -> None:
    flow = windrow.Workflow()
    flow.job("q", "k", "a", name="a")
    started = await client.start(flow)

    async def work(*, dies: str) -> list[str]:
        seen: list[str] = []
        while jobs := await client.dequeue("q", max_jobs=1, wait=0):
            (job,) = jobs
            seen.append(job.text())
            nodes = windrow.Nodes()
            for name in ("x", "y"):
                nodes.job("q", "k", name, name=name)
            try:
                if job.text() == "a":
                    await client.wait_for(job, nodes)
            except windrow.Waiting:
                continue
            if job.text() == dies:
                await client.nack(job, permanent=True)
            else:
                await client.ack(job)
        return seen

    assert sorted(await work(dies="x")) == ["a", "x", "y"]
    assert (await client.get_workflow(started.id))[0].state is windrow.WorkflowState.FAILED
    retry = await client.retry_workflow(started.id)
    assert await work(dies="") == ["x", "a"]
    assert (await client.get_workflow(retry.id))[0].state is windrow.WorkflowState.SUCCEEDED


def test_the_outcome_of_a_handler_that_waits_can_be_tested_without_a_router() -> None:
    worker = windrow.Worker(windrow.testing.RecordingClient(org="acme"), "q")

    @worker.handler("k")
    async def handler(_: windrow.Job) -> None:
        raise windrow.Waiting(2)

    result = asyncio.run(windrow.testing.run_job(worker, windrow.NewJob("q", "k")))
    assert (result.outcome, result.state) == (windrow.AttemptOutcome.RELEASED, windrow.JobState.BLOCKED)
