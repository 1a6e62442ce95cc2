"""Jobs add nodes to their workflow while they run. Only a job that still has its lease can add nodes, and a repeated
call adds the nodes once. Callbacks wait for added nodes, even if the last end and an addition come at the same time
(I11)."""

from __future__ import annotations

import asyncio

import psycopg
import pytest

from shard.errors import (
    LeaseEnded,
    NodeExists,
    NodeMayWaitForJob,
    ShardError,
    TooManyNodes,
    UnknownNode,
    UnknownWorkflow,
    WorkflowEnded,
)
from shard.queue.settle import Settlement
from shard.vocabulary import Lease, QueueName
from shard.workflow import EDGES_MAX, NODES_MAX, Callback, NewWorkflow
from tests.effort import luck_of, trials
from tests.jobs import lease_jobs
from tests.timemachine import until_blocked
from tests.workflows import CANCEL, IGNORE, RUN, Flows, Graph, new_workflow

CALLBACKS = {"won": Callback.SUCCESS, "lost": Callback.FAILURE, "over": Callback.END}
luck = luck_of("added nodes")


# ── What an addition does ────────────────────────────────────────────────────────────────────────────────────────────


async def test_callbacks_wait_for_added_nodes(flows: Flows) -> None:
    flow = await flows.start({"a": []}, callbacks=CALLBACKS)
    await flows.claim()
    assert (await flows.add(flow, "a", {"x": [], "y": ["x"]})).stored == 2
    await flows.ack("a")
    assert await flows.run_all() == [{"x"}, {"y"}, {"won", "over"}]
    assert await flows.state(flow) == "succeeded"
    assert (await flows.admin.get(flows.org, flow.id)).nodes == 3


async def test_added_nodes_add_further_ones(flows: Flows) -> None:
    flow = await flows.start({"a": []}, callbacks=CALLBACKS)
    before = "a"
    await flows.claim()
    for name in ("b", "c", "d"):
        await flows.add(flow, before, {name: []})
        await flows.ack(before)
        assert await flows.claim() == {name}
        before = name
    await flows.ack(before)
    assert await flows.run_all() == [{"won", "over"}]


async def test_a_failed_added_node_fails_the_workflow(flows: Flows) -> None:
    flow = await flows.start({"a": []}, callbacks=CALLBACKS)
    await flows.claim()
    await flows.add(flow, "a", {"x": [], "y": ["x"], "z": [("x", RUN)]})
    await flows.ack("a")
    await flows.claim()
    await flows.kill("x")
    assert await flows.run_all() == [{"z"}, {"lost", "over"}]
    assert (await flows.states(flow))["y"] == "cancelled"


async def test_an_added_node_waits_for_nodes_that_the_workflow_has(flows: Flows) -> None:
    flow = await flows.start({"a": [], "b": [], "c": ["b"]}, callbacks=CALLBACKS)
    await flows.claim()
    await flows.add(flow, "a", {"x": ["a", "b", "c"]})
    await flows.ack("a", "b")
    assert await flows.run_all() == [{"c"}, {"x"}, {"won", "over"}]


@pytest.mark.parametrize(
    ("policy", "becomes"), [(CANCEL, "cancelled"), (IGNORE, "released"), (RUN, "released")], ids=lambda it: str(it)
)
@pytest.mark.parametrize("waits_for_another", [True, False])
async def test_an_added_node_learns_how_its_parents_have_ended(
    flows: Flows, policy: object, becomes: str, waits_for_another: bool
) -> None:
    flow = await flows.start({"a": [], "failed": [], "done": []}, callbacks=CALLBACKS)
    await flows.claim()
    await flows.kill("failed")
    await flows.ack("done")
    await flows.add(flow, "a", {"x": ["done", ("failed", policy), *(["a"] if waits_for_another else [])]})  # type: ignore[list-item]
    if waits_for_another:
        assert (await flows.states(flow))["x"] == ("blocked" if becomes == "released" else becomes)
        await flows.ack("a")
    assert (await flows.states(flow))["x"] == becomes
    if not waits_for_another:
        await flows.ack("a")
    await flows.run_all()
    assert await flows.state(flow) == "failed" if policy is not IGNORE else "succeeded"


async def test_an_added_node_of_a_paused_workflow_waits_for_the_end_of_the_pause(flows: Flows) -> None:
    flow = await flows.start({"a": []}, callbacks=CALLBACKS)
    await flows.claim()
    await flows.admin.set_paused(flows.org, flow.id, paused=True, epoch=1)
    await flows.add(flow, "a", {"x": []})
    await flows.ack("a")
    assert await flows.claim() == set()
    await flows.admin.set_paused(flows.org, flow.id, paused=False, epoch=1)
    assert await flows.run_all() == [{"x"}, {"won", "over"}]


async def test_a_cancel_reaches_added_nodes(flows: Flows) -> None:
    flow = await flows.start({"a": []}, callbacks=CALLBACKS)
    await flows.claim()
    await flows.add(flow, "a", {"x": [], "y": ["x"]})
    jobs = await flows.admin.doom(flows.org, flow.id, reason="", epoch=1)
    assert sorted(jobs) == sorted([flows.job(flow, "a"), flows.job(flow, "x")])
    await flows.store.cancel(flows.org, jobs, reason="")
    assert await flows.run_all() == [{"over"}]
    counts = await flows.admin.count(flows.org, flow.id)
    assert {state.value: number for state, number in counts.items()} == {"cancelled": 3}


# ── The fence ────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_job_that_has_lost_its_lease_adds_nothing(flows: Flows) -> None:
    flow = await flows.start({"a": [], "b": []})
    await flows.claim()
    lease = flows.leases["a"]
    await flows.store.settle(Settlement.release(flows.org, [lease]))
    with pytest.raises(LeaseEnded):
        await flows.add(flow, lease, {"x": []})
    # By now, another consumer has leased the job.
    await flows.claim()
    with pytest.raises(LeaseEnded):
        await flows.add(flow, lease, {"x": []})
    assert (await flows.add(flow, "a", {"x": []})).stored == 1
    acked = flows.leases["b"]
    await flows.ack("b")
    with pytest.raises(LeaseEnded):
        await flows.add(flow, acked, {"y": []})


async def test_an_expired_lease_adds_nothing(flows: Flows) -> None:
    flow = await flows.start({"a": []})
    ((_, lease),) = await lease_jobs(flows.store, flows.org, window_us=1)
    with pytest.raises(LeaseEnded):
        await flows.add(flow, lease, {"x": []})


async def test_a_job_adds_nothing_to_another_workflow(flows: Flows) -> None:
    flow, other = await flows.start({"a": []}), await flows.start({"b": []})
    await flows.claim()
    with pytest.raises(LeaseEnded):
        await flows.add(other, "a", {"x": []})
    assert (await flows.add(flow, "a", {"x": []})).stored == 1


async def test_a_lease_that_ends_while_the_addition_waits_adds_nothing(
    flows: Flows, two: list[Flows], module_dsn: str
) -> None:
    """The addition waits for the workflow's lock. Meanwhile the job that adds the nodes is released."""
    flow = await flows.start({"a": [], "b": []})
    await flows.claim()
    lease = flows.leases["a"]
    async with await psycopg.AsyncConnection.connect(module_dsn) as session:
        await session.execute(
            "SELECT windrow.lock_workflows(ARRAY[o.org_id], ARRAY[%s::uuid]) FROM windrow.org o WHERE o.org = %s",
            [flow.id, flows.org],
        )
        adding = asyncio.create_task(two[0].add(flow, lease, {"x": []}))
        await until_blocked(flows.database)
        await flows.store.settle(Settlement.release(flows.org, [lease]))
        await session.rollback()
        with pytest.raises(LeaseEnded):
            await adding


# ── Repeated calls ───────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_repeated_call_adds_once_also_by_a_later_attempt(flows: Flows) -> None:
    flow = await flows.start({"a": []}, callbacks=CALLBACKS)
    await flows.claim()
    first = await flows.add(flow, "a", {"x": [], "y": ["x"]})
    again = await flows.add(flow, "a", {"x": [], "y": ["x"]})
    assert (again.jobs, again.stored) == (first.jobs, 0)
    await flows.store.settle(Settlement.release(flows.org, [flows.leases["a"]]))
    await flows.claim()
    # The later attempt adds one more node.
    await flows.ack("x")
    assert (await flows.add(flow, "a", {"x": [], "y": ["x"], "z": ["x", "y"]})).stored == 1
    await flows.ack("a")
    assert await flows.run_all() == [{"y"}, {"z"}, {"won", "over"}]


async def test_calls_at_the_same_time_add_once(two: list[Flows]) -> None:
    flow = await two[0].start({"a": []})
    await two[0].claim()
    lease = two[0].leases["a"]
    added = await asyncio.gather(*(two[at % 2].add(flow, lease, {"x": [], "y": []}) for at in range(8)))
    assert sorted(one.stored for one in added) == [0] * 7 + [2]
    assert len({tuple(one.jobs) for one in added}) == 1


# ── Refusals ─────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_names_of_others_are_refused(flows: Flows) -> None:
    flow = await flows.start({"a": [], "b": []}, callbacks=CALLBACKS)
    await flows.claim()
    await flows.add(flow, "a", {"x": []})
    for name in ("b", "won"):
        with pytest.raises(NodeExists, match=f"has a node '{name}' that this job has not added"):
            await flows.add(flow, "a", {"y": [], name: []})
    with pytest.raises(NodeExists):
        await flows.add(flow, "b", {"x": []})
    assert "y" not in await flows.states(flow)


@pytest.mark.parametrize("parent", ["nobody", "won"])
async def test_an_added_node_waits_for_no_unknown_node_and_no_callback(flows: Flows, parent: str) -> None:
    flow = await flows.start({"a": []}, callbacks=CALLBACKS)
    await flows.claim()
    with pytest.raises(UnknownNode):
        await flows.add(flow, "a", {"x": [parent]})
    assert "x" not in await flows.states(flow)


async def test_an_ended_workflow_takes_no_nodes(flows: Flows) -> None:
    flow = await flows.start({"a": []}, callbacks=CALLBACKS)
    await flows.claim()
    await flows.ack("a")
    await flows.claim()
    with pytest.raises(WorkflowEnded, match="has succeeded, so no nodes can be added"):
        await flows.add(flow, "won", {"x": []})
    cancelled = await flows.start({"b": []})
    await flows.claim()
    await flows.admin.begin_cancel(flows.org, cancelled.id, reason="", epoch=1)
    with pytest.raises(WorkflowEnded, match="has been cancelled"):
        await flows.add(cancelled, "b", {"x": []})


async def test_an_addition_that_is_refused_makes_no_queue(flows: Flows) -> None:
    flow = await flows.start({"a": [], "b": []}, callbacks={"over": Callback.END})
    ended = await flows.start({"z": []})
    await flows.claim()
    lost = flows.leases["z"]
    await flows.ack("z")
    refused: list[tuple[type[ShardError], NewWorkflow, str | Lease, Graph]] = [
        (UnknownNode, flow, "a", {"x": ["nobody"]}),
        (UnknownNode, flow, "a", {"x": ["over"]}),
        (NodeExists, flow, "a", {"x": [], "b": []}),
        (LeaseEnded, ended, lost, {"x": []}),
        (UnknownWorkflow, new_workflow(flows.org, {"a": []}), "a", {"x": []}),
        (TooManyNodes, flow, "a", {f"x{at}": [] for at in range(NODES_MAX)}),
    ]
    for error, workflow, adder, graph in refused:
        with pytest.raises(error):
            await flows.add(workflow, adder, graph, queue="new")
    with pytest.raises(NodeMayWaitForJob):
        await flows.add(flow, "a", {"x": ["b"]}, queue="new", wait=CANCEL)
    assert await flows.store.names.find([(flows.org, QueueName("new"))]) == {}
    assert (await flows.add(flow, "a", {"x": [], "y": ["x"]}, queue="new")).stored == 2
    assert await flows.claim(queue="new") == {"x"}


async def test_a_workflow_has_room_for_so_many_nodes_in_total(flows: Flows) -> None:
    flow = await flows.start({"a": []}, callbacks={"over": Callback.END})
    await flows.claim()
    room = NODES_MAX - 2
    with pytest.raises(TooManyNodes, match=f"has 2 nodes, and {room + 1:,} more would exceed the {NODES_MAX:,}"):
        await flows.add(flow, "a", {f"x{at}": [] for at in range(room + 1)})
    assert (await flows.add(flow, "a", {f"x{at}": [] for at in range(room)})).stored == room
    with pytest.raises(TooManyNodes):
        await flows.add(flow, "a", {"one": []})
    await flows.ack("a")
    while names := await flows.claim():
        await flows.ack(*names)
    assert await flows.state(flow) == "succeeded"


async def test_a_workflow_has_room_for_so_many_edges_in_total(flows: Flows) -> None:
    parents = [f"p{at}" for at in range(1000)]
    flow = await flows.start({"a": [], **{name: [] for name in parents}})
    await flows.claim()
    # Give the workflow 1,000 edges fewer than the limit.
    await flows.database.run(
        b"INSERT INTO windrow.workflow_edge SELECT w.flow, 100000 + n, 0, 'cancel' FROM windrow.workflow w, "
        b"generate_series(1, %(edges)s::integer) n WHERE w.id = %(id)s::uuid",
        {"id": flow.id, "edges": EDGES_MAX - len(parents)},
    )
    with pytest.raises(TooManyNodes, match=f"has {EDGES_MAX - 1000:,} edges, and 1,001 more"):
        await flows.add(flow, "a", {"x": parents, "y": ["x"]})
    assert (await flows.add(flow, "a", {"x": parents})).stored == 1


# ── Races ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.thorough
async def test_an_addition_and_the_last_end_never_pass_each_other(two: list[Flows]) -> None:
    """One router adds nodes while the other router ends the job that adds them. Either the addition is refused, or
    callbacks wait for the nodes."""
    won = 0
    for _ in range(trials(150, thorough=3000)):
        flow = await two[0].start({"a": []}, callbacks=CALLBACKS)
        two[1].know(flow)
        await two[0].claim()
        two[1].leases["a"] = lease = two[0].leases["a"]

        async def add(flow: object = flow, lease: object = lease) -> bool:
            await asyncio.sleep(luck.choice((0, 0, 0.001, 0.002)))
            try:
                await two[0].add(flow, lease, {"x": [], "y": ["x"]})  # type: ignore[arg-type]
            except LeaseEnded:
                return False
            return True

        async def end() -> None:
            await asyncio.sleep(luck.choice((0, 0.001, 0.002, 0.003)))
            await two[1].ack("a")

        added, _ = await asyncio.gather(add(), end())
        won += added
        two[0].leases.clear()
        rounds = await two[0].run_all()
        assert rounds == ([{"x"}, {"y"}] if added else []) + [{"won", "over"}]
        assert await two[0].state(flow) == "succeeded"
    await two[0].check()
    assert won


@pytest.mark.thorough
async def test_an_addition_after_a_node_that_ends_at_the_same_time_is_released(two: list[Flows]) -> None:
    for _ in range(trials(100, thorough=2000)):
        flow = await two[0].start({"a": [], "b": [], "c": []}, callbacks=CALLBACKS)
        two[1].know(flow)
        await two[0].claim()
        two[1].leases |= two[0].leases
        fails = luck.random() < 0.3

        async def ends(name: str, fails: bool = fails) -> None:
            await asyncio.sleep(luck.choice((0, 0, 0.001, 0.002)))
            await (two[1].kill(name) if fails else two[1].ack(name))

        await asyncio.gather(two[0].add(flow, "a", {"x": ["b", "c"]}), ends("b"), ends("c"))
        two[0].leases = {"a": two[0].leases["a"]}
        assert await two[0].claim() == (set() if fails else {"x"})
        await two[0].ack("a", *([] if fails else ["x"]))
        assert await two[0].run_all() == [{"lost", "over"} if fails else {"won", "over"}]
    await two[0].check()
