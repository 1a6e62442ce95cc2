"""All parts of a workflow move with their org to another shard, while nodes end on the source."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from shard.errors import LeaseEnded, NotOwned, UnknownWorkflow
from shard.postgres.pool import Database
from shard.queue.enqueue import find_refused
from shard.queue.settle import Settlement
from shard.vocabulary import Answer, OrgId
from shard.workflow import Callback
from shard.workflows import calls
from tests.pair import A, B, Died, Fate, Pair, deaths, mortal_mover
from tests.workflows import IGNORE, Graph, both, chain, fan_in, new_nodes, new_workflow, set_portion

GRAPH: Graph = {"a": [], "b": [], "c": ["a"], "d": ["c", ("b", IGNORE)], "e": ["b"]}


async def test_a_move_takes_whole_workflows_and_back(pair: Pair, org: OrgId) -> None:
    source, target = both(pair, org)
    flow = await source.start(GRAPH, callbacks={"over": Callback.END})
    ended = await source.start(chain(1))
    retry = replace(new_workflow(org, chain(1)), retry_of=ended.id)
    await source.admin.start(retry, epoch=1)
    source.know(retry)
    await source.cancel(retry, "n0")
    await source.claim()
    await source.ack("a", "n0")
    states = {"a": "succeeded", "b": "released", "c": "released", "d": "blocked", "e": "blocked", "over": "blocked"}
    await source.store.settle(Settlement.release(org, [source.leases.pop("b")]))
    move = await pair.move([org], target=B)
    assert await target.states(flow) == states
    assert await target.state(ended) == "succeeded"
    assert (await target.admin.get(org, retry.id)).retry_of == ended.id
    with pytest.raises(UnknownWorkflow):
        await source.state(flow)
    with pytest.raises(NotOwned):
        await source.admin.start(new_workflow(org, chain(1)), epoch=1)
    assert await target.admin.start(flow, epoch=move.epoch) is True
    await pair.move([org], target=A)
    assert await source.states(flow) == states
    assert await source.run_all() == [{"b", "c"}, {"d", "e"}, {"over"}]
    await pair.balance()
    await source.check()
    for database in pair.databases.values():
        assert await database.run(b"SELECT count(*) FROM windrow.workflow_arrival", {}) == [(0,)]
    assert await pair.databases[B].run(b"SELECT count(*) FROM windrow.workflow_node", {}) == [(0,)]


async def test_at_each_step_the_shard_that_the_catalog_names_has_the_workflows(pair: Pair, org: OrgId) -> None:
    source, target = both(pair, org)
    flow = await source.start(chain(2))
    mover = pair.mover(await pair.begin([org], target=B))
    named: list[str] = []
    while True:
        ((name,), _) = await pair.placement(org)
        assert await {A: source, B: target}[name].state(flow) == "running"
        named.append(name)
        if not await mover.step():
            break
    assert set(named) == {A, B}
    with pytest.raises(UnknownWorkflow):
        await source.state(flow)


async def test_an_end_on_the_source_releases_on_the_target(pair: Pair, org: OrgId) -> None:
    source, target = both(pair, org)
    flow = await source.start(GRAPH)
    assert await source.claim() == {"a", "b"}
    move = await pair.begin([org], target=B)
    mover = pair.mover(move)
    while (await pair.placement(org))[0] != (B,):
        assert await mover.step()
    await source.ack("a")
    await source.kill("b")
    # Nobody has told the target about these ends.
    assert await target.states(flow) == {
        "a": "released",
        "b": "released",
        "c": "blocked",
        "d": "blocked",
        "e": "blocked",
    }
    await mover.finish()
    await target.sweep.sweep()
    assert await target.run_all() == [{"c"}, {"d"}]
    assert await target.states(flow) == {
        "a": "succeeded", "b": "failed", "c": "succeeded", "d": "succeeded", "e": "cancelled"
    }  # fmt: skip
    await target.check()
    await pair.balance()


async def test_a_job_on_the_source_adds_nodes_on_the_target(pair: Pair, org: OrgId) -> None:
    source, target = both(pair, org)
    flow = await source.start({"a": [], "b": []}, callbacks={"over": Callback.END})
    await source.claim()
    await source.add(flow, "a", {"w": ["a"]})
    move = await pair.begin([org], target=B)
    mover = pair.mover(move)
    while (await pair.placement(org))[0] != (B,):
        assert await mover.step()
    # The target has the workflow but not the job. The source has the job but not the workflow.
    with pytest.raises(LeaseEnded):
        await target.add(flow, source.leases["a"], {"x": []}, epoch=move.epoch)
    with pytest.raises(NotOwned):
        await source.add(flow, "a", {"x": []})
    by = await source.adder.node_of(org, flow.id, source.leases["a"])
    again = await target.adder.add(new_nodes(org, flow, {"w": ["a"]}), adder=by, epoch=move.epoch)
    assert again.stored == 0
    added = await target.adder.add(new_nodes(org, flow, {"x": ["a", "w"]}), adder=by, epoch=move.epoch)
    target.names[added.jobs[0]] = "x"
    acked = source.leases["a"]
    await source.ack("a", "b")
    with pytest.raises(LeaseEnded):
        await source.adder.node_of(org, flow.id, acked)
    await mover.finish()
    await target.sweep.sweep()
    assert await target.run_all() == [{"w"}, {"x"}, {"over"}]
    await pair.balance()
    await target.check()


async def test_a_job_that_is_released_before_it_arrives_is_released_then(pair: Pair, org: OrgId) -> None:
    source, target = both(pair, org)
    await source.start({"a": [], **{f"b{n}": ["a"] for n in range(20)}})
    assert await source.claim() == {"a"}
    move = await pair.begin([org], target=B)
    mover = pair.mover(move)
    while (await pair.placement(org))[0] != (B,):
        assert await mover.step()
    await source.ack("a")
    # The mover tells the target about the end at once. The jobs arrive later.
    await mover.finish()
    await target.sweep.sweep()
    assert await target.claim() == {f"b{n}" for n in range(20)}
    await target.check()


@pytest.mark.parametrize("failed", [False, True])
async def test_a_move_between_portions_takes_the_rest_along(pair: Pair, org: OrgId, failed: bool) -> None:
    await set_portion(pair.databases[A], 3)
    source, target = both(pair, org)
    nodes = {f"b{n}" for n in range(20)}
    flow = await source.start({"a": [], **{node: ["a"] for node in nodes}})
    assert await source.claim() == {"a"}
    await (source.kill("a") if failed else source.ack("a"))
    assert Counter((await source.states(flow)).values())["blocked"] >= 17
    await pair.move([org], target=B)
    await target.sweep.sweep()
    assert await target.run_all() == ([] if failed else [nodes])
    assert await target.states(flow) == {"a": "failed" if failed else "succeeded"} | dict.fromkeys(
        nodes, "cancelled" if failed else "succeeded"
    )
    await target.check()
    await pair.balance()
    for database in pair.databases.values():
        assert await database.run(b"SELECT count(*) FROM windrow.workflow_arrival", {}) == [(0,)]


@pytest.mark.parametrize("how", ["rolled back", "unheard"])
async def test_balancers_die_at_every_step_and_every_end_counts_once(pair: Pair, org: OrgId, how: str) -> None:
    source, target = both(pair, org)
    flow = await source.start({**fan_in(4), "ignores": [("p0", IGNORE), "p1"]})
    await source.claim()
    move = await pair.begin([org], target=B)
    ends = iter(["p0", "p1", "p2"])
    for at in deaths(how):
        fate = Fate(at=at, how=how)
        async with mortal_mover(pair, move, fate) as mover:
            with contextlib.suppress(Died):
                # Each balancer waits for leases that do not end, so the test stops the balancer after some steps.
                for _ in range(12):
                    if not await mover.step():
                        break
        if at > 4 and (name := next(ends, None)) is not None:
            await (source.kill(name) if name == "p0" else source.ack(name))
        if fate.acts < at:
            break
    for name in ends:
        await (source.kill(name) if name == "p0" else source.ack(name))
    if "p3" in source.leases:
        answers = await source.store.settle(Settlement.ack(org, [source.leases.pop("p3")]))
        assert answers == [Answer.OK]
    await pair.mover(move).finish()
    await target.sweep.sweep()
    assert await target.run_all() == [{"ignores"}]
    assert await target.states(flow) == {
        "p0": "failed",
        "p1": "succeeded",
        "p2": "succeeded",
        "p3": "succeeded",
        "last": "cancelled",
        "ignores": "succeeded",
    }
    assert await target.state(flow) == "failed"
    await target.check()
    await pair.balance()


async def test_an_addition_to_a_workflow_that_moves_away_meanwhile_is_sent_on(
    pair: Pair, org: OrgId, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, _ = both(pair, org)
    flow = await source.start({"a": []})
    await source.claim()
    checks = 0

    async def then_move(database: Database, callers: Sequence[tuple[OrgId, int]]) -> Mapping[int, NotOwned]:
        nonlocal checks
        checks += 1
        refused = await find_refused(database, callers)
        if checks == 1:
            mover = pair.mover(await pair.begin([org], target=B))
            while (await pair.placement(org))[0] != (B,):
                assert await mover.step()
        return refused

    # The call checks that the shard owns the slot, and then reads the workflow. Between these two steps, the workflow
    # leaves the shard.
    monkeypatch.setattr(calls, "find_refused", then_move)
    with pytest.raises(NotOwned):
        await source.add(flow, "a", {"x": []})
    assert checks == 2
