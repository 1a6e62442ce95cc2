"""Tests nodes that wait for signals. The first signal counts, and an early signal is kept until its node is due. No
worker ever gets the job of a node that waits for a signal, whatever happens to the job."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import psycopg
import pytest

from shard.admin.queue_admin import QueueAdmin
from shard.errors import NotSignalled, RowLocked, UnknownNode, UnknownWorkflow
from shard.history.days import expire_waiting
from shard.postgres.pool import Database
from shard.vocabulary import Alteration, Answer, JobId, OrgId, QueueName
from shard.workflow import Callback, NewWorkflow, NodeName, OnFailed, WorkflowId
from tests.effort import luck_of, trials
from tests.jobs import HOUR_US, QUEUE, job_id
from tests.pair import B, Pair
from tests.timemachine import make_due
from tests.workflows import CANCEL, IGNORE, RUN, SIGNAL_US, Flows, Graph, both, set_portion

CALLBACKS = {"won": Callback.SUCCESS, "lost": Callback.FAILURE, "over": Callback.END}
# The signal for "approve" comes from a person who approves what "build" has made.
RELEASE = {"build": [], "approve": ["build"], "deploy": ["approve"]}
luck = luck_of("signals")


async def waiting(flows: Flows) -> NewWorkflow:
    """Returns a workflow that waits for its signal."""
    flow = await flows.start(RELEASE, signals=["approve"], callbacks=CALLBACKS)
    assert await flows.run_all() == [{"build"}]
    assert (await flows.states(flow))["approve"] == "released"
    return flow


async def job_of(flows: Flows, flow: NewWorkflow, name: str) -> tuple[str, bytes | None, str | None]:
    """Returns the state of a node's job, its result and its reason."""
    (record,) = await flows.store.get(flows.org, [flows.job(flow, name)], include_payload=True)
    return record.state, record.result, record.reason


async def refusal(flows: Flows, flow: NewWorkflow, name: str) -> str:
    with pytest.raises(NotSignalled) as refused:
        await flows.signal(flow, name)
    return str(refused.value)


# ── A signal ─────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_signal_ends_its_node_and_releases_what_waits_for_it(flows: Flows, books: QueueAdmin) -> None:
    flow = await waiting(flows)
    assert await flows.claim() == set()
    (counts,) = await books.stats(flows.org, queue=None, include_finished=False)
    assert (counts.blocked, counts.scheduled, counts.ready, counts.leased) == (4, 1, 0, 0)
    assert await flows.signal(flow, "approve", b"by ann")
    assert await job_of(flows, flow, "approve") == ("succeeded", b"by ann", None)
    (record,) = await flows.store.get(flows.org, [flows.job(flow, "approve")], include_payload=True)
    assert (record.attempt, record.attempts(), record.checkpoint) == (0, [], None)
    assert await flows.run_all() == [{"deploy"}, {"won", "over"}]
    assert await flows.state(flow) == "succeeded"
    assert all(entry.balanced for entry in await books.check())


async def test_a_node_without_parents_waits_from_the_start(flows: Flows) -> None:
    flow = await flows.start({"approve": [], "deploy": ["approve"]}, signals=["approve"])
    assert await flows.claim() == set()
    assert await flows.signal(flow, "approve", b"")
    assert await job_of(flows, flow, "approve") == ("succeeded", b"", None)
    assert await flows.run_all() == [{"deploy"}]


async def test_the_first_signal_counts_also_after_the_end_of_the_workflow(flows: Flows) -> None:
    flow = await waiting(flows)
    assert await flows.signal(flow, "approve", b"first")
    assert not await flows.signal(flow, "approve", b"second")
    await flows.run_all()
    assert await flows.state(flow) == "succeeded"
    assert not await flows.signal(flow, "approve", b"third")
    assert await job_of(flows, flow, "approve") == ("succeeded", b"first", None)


async def test_an_early_signal_waits_until_its_node_need_not_wait_any_longer(flows: Flows) -> None:
    flow = await flows.start({**RELEASE, "other": []}, signals=["approve"], callbacks=CALLBACKS)
    assert await flows.signal(flow, "approve", b"early")
    assert not await flows.signal(flow, "approve", b"late")
    assert (await flows.states(flow))["approve"] == "blocked"
    assert await flows.claim() == {"build", "other"}
    await flows.ack("other")
    assert await flows.claim() == set()
    await flows.check()
    await flows.ack("build")
    # The commit that ended "build" has ended "approve" too, and has released "deploy".
    assert (await flows.states(flow))["approve"] == "succeeded"
    assert await flows.run_all() == [{"deploy"}, {"won", "over"}]
    assert await job_of(flows, flow, "approve") == ("succeeded", b"early", None)
    assert not await flows.signal(flow, "approve")


async def test_early_signals_of_a_chain_end_it_in_one_commit(flows: Flows) -> None:
    graph = {"build": [], "s0": ["build"], "s1": ["s0"], "s2": ["s1"], "deploy": ["s2"]}
    flow = await flows.start(graph, signals=["s0", "s1", "s2"])
    for name in ("s2", "s0", "s1"):
        assert await flows.signal(flow, name, name.encode())
    assert await flows.run_all() == [{"build"}, {"deploy"}]
    assert [(await job_of(flows, flow, name))[1] for name in ("s0", "s1", "s2")] == [b"s0", b"s1", b"s2"]


async def test_early_signals_are_taken_in_portion_by_portion(flows: Flows, database: Database) -> None:
    await set_portion(database, 3)
    try:
        names = [f"s{at}" for at in range(10)]
        flow = await flows.start({"build": [], **{name: ["build"] for name in names}, "deploy": names}, signals=names)
        for name in names:
            assert await flows.signal(flow, name)
        await flows.claim()
        await flows.ack("build")
        await flows.sweep.sweep()
        assert await flows.run_all() == [{"deploy"}]
    finally:
        await set_portion(database, 200)


async def test_a_signal_is_refused_where_it_changes_nothing(flows: Flows) -> None:
    flow = await waiting(flows)
    assert "no node that waits for a signal" in await refusal(flows, flow, "build")
    assert "no node that waits for a signal" in await refusal(flows, flow, "won")
    with pytest.raises(UnknownNode):
        await flows.signal(flow, "nobody")
    with pytest.raises(UnknownWorkflow):
        await flows.admin.find_signal(flows.org, WorkflowId(job_id()), NodeName("approve"))
    with pytest.raises(UnknownWorkflow):
        await flows.admin.find_signal(OrgId("nobody"), flow.id, NodeName("approve"))
    await flows.admin.skip(flows.org, flow.id, NodeName("approve"), epoch=1)
    await flows.cancel(flow, "approve")
    assert "was skipped" in await refusal(flows, flow, "approve")
    assert await flows.run_all() == [{"deploy"}, {"won", "over"}]


async def test_a_cancelled_workflow_takes_no_signal(flows: Flows) -> None:
    flow = await waiting(flows)
    (job,) = await flows.admin.doom(flows.org, flow.id, reason="stop", epoch=1)
    # The router has not cancelled the job yet.
    assert "the workflow was cancelled" in await refusal(flows, flow, "approve")
    await flows.store.cancel(flows.org, [job], reason="stop")
    assert await flows.state(flow) == "cancelled"
    assert "the workflow was cancelled" in await refusal(flows, flow, "approve")


async def test_a_job_that_was_cancelled_or_purged_takes_no_signal(flows: Flows, books: QueueAdmin) -> None:
    flow, purged = await waiting(flows), await waiting(flows)
    await flows.cancel(flow, "approve")
    assert "or it was cancelled" in await refusal(flows, flow, "approve")
    assert await flows.state(flow) == "failed"
    assert await books.purge_queue(flows.org, QueueName(QUEUE), include_dead=False, limit=1000) > 0
    assert "or it was cancelled" in await refusal(flows, purged, "approve")


async def test_a_node_behind_a_failure_is_cancelled_with_its_signal(flows: Flows) -> None:
    flow = await flows.start(RELEASE, signals=["approve"])
    assert await flows.signal(flow, "approve")
    await flows.claim()
    await flows.kill("build")
    assert await flows.states(flow) == {"build": "failed", "approve": "cancelled", "deploy": "cancelled"}
    assert "or it was cancelled" in await refusal(flows, flow, "approve")


@pytest.mark.parametrize("policy", [IGNORE, RUN])
async def test_an_early_signal_counts_if_the_failure_before_it_does_not_cancel(flows: Flows, policy: OnFailed) -> None:
    flow = await flows.start({"build": [], "approve": [("build", policy)], "deploy": ["approve"]}, signals=["approve"])
    assert await flows.signal(flow, "approve")
    await flows.claim()
    await flows.kill("build")
    assert await flows.run_all() == [{"deploy"}]
    assert await flows.state(flow) == ("succeeded" if policy is IGNORE else "failed")


async def test_a_signal_in_a_pause_is_kept(flows: Flows) -> None:
    released = await waiting(flows)
    blocked = await flows.start(RELEASE, signals=["approve"])
    await flows.claim()
    for flow in (released, blocked):
        await flows.admin.set_paused(flows.org, flow.id, paused=True, epoch=1)
    await flows.ack("build")
    for flow in (released, blocked):
        assert await flows.signal(flow, "approve")
    assert (await flows.states(released))["approve"] == "succeeded"
    assert (await flows.states(blocked))["approve"] == "blocked"
    await flows.sweep.sweep()
    assert await flows.claim() == set()
    for flow in (released, blocked):
        await flows.admin.set_paused(flows.org, flow.id, paused=False, epoch=1)
        assert (await flows.states(flow))["approve"] == "succeeded"
        assert (await flows.run_all())[0] == {"deploy"}


async def test_a_job_adds_nodes_that_wait_for_signals(flows: Flows) -> None:
    flow = await flows.start({"a": [], "b": []}, callbacks=CALLBACKS)
    await flows.claim()
    await flows.ack("b")
    graph = {"s": [], "t": ["b"], "u": ["s", "a"], "last": ["t", "u"]}
    assert (await flows.add(flow, "a", graph, signals=["s", "t", "u"])).stored == 4
    assert await flows.claim() == set()
    for name in ("s", "t", "u"):
        assert await flows.signal(flow, name)
    assert (await flows.states(flow))["u"] == "blocked"
    await flows.ack("a")
    assert await flows.run_all() == [{"last"}, {"won", "over"}]


# ── The time limit ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("policy", "runs", "state"), [(CANCEL, [{"lost", "over"}], "failed"), (IGNORE, [{"deploy"}], "succeeded")]
)
async def test_without_a_signal_in_time_the_node_fails(
    flows: Flows, database: Database, policy: OnFailed, runs: list[set[str]], state: str
) -> None:
    graph: Graph = {"build": [], "approve": ["build"], "deploy": [("approve", policy)]}
    flow = await flows.start(graph, signals=["approve"], callbacks=CALLBACKS)
    await flows.run_all()
    assert await make_due(database, flows.org) == 1
    assert (await flows.run_all())[0] == runs[0]
    assert await job_of(flows, flow, "approve") == ("cancelled", None, "no signal came in time")
    assert await flows.state(flow) == state
    assert "no signal came in time" in await refusal(flows, flow, "approve")


async def test_a_node_that_runs_anyway_runs_without_the_signal(flows: Flows, database: Database) -> None:
    flow = await flows.start({"approve": [], "deploy": [("approve", RUN)]}, signals=["approve"])
    await make_due(database, flows.org)
    assert await flows.run_all() == [{"deploy"}]
    assert await flows.state(flow) == "failed"


async def test_the_time_counts_from_the_release(flows: Flows) -> None:
    flow = await flows.start(RELEASE, signals=["approve"])
    (blocked,) = await flows.store.get(flows.org, [flows.job(flow, "approve")], include_payload=False)
    assert blocked.expires_at is None
    await flows.run_all()
    ((released_at,),) = await flows.database.run(
        b"SELECT n.ended_at FROM windrow.workflow_node n JOIN windrow.workflow w USING (flow) "
        b"WHERE w.id = %(id)s::uuid AND n.name = 'build'",
        {"id": flow.id},
    )
    (record,) = await flows.store.get(flows.org, [flows.job(flow, "approve")], include_payload=False)
    assert record.expires_at == record.run_at
    assert 0 <= record.run_at - released_at - SIGNAL_US < HOUR_US


async def test_the_archiver_ends_a_node_of_a_queue_that_nobody_consumes(flows: Flows, database: Database) -> None:
    flow = await waiting(flows)
    await make_due(database, flows.org)
    assert await expire_waiting(database) == 1
    assert await job_of(flows, flow, "approve") == ("cancelled", None, "no signal came in time")
    assert await flows.run_all() == [{"lost", "over"}]


async def test_a_late_signal_counts_until_somebody_has_found_that_the_time_is_over(
    flows: Flows, database: Database
) -> None:
    flow = await waiting(flows)
    await make_due(database, flows.org)
    assert await flows.signal(flow, "approve")
    assert await flows.run_all() == [{"deploy"}, {"won", "over"}]


async def test_a_signal_counts_although_a_claim_has_just_leased_the_expired_job(
    flows: Flows, database: Database
) -> None:
    """The router that claimed the job has died between its two statements, so the job is still leased."""
    flow = await waiting(flows)
    await make_due(database, flows.org)
    await database.run(
        b"UPDATE windrow.job SET lease = 1, leased_at = now(), attempt = 1, worker = 'w', "
        b"visible_at = now() + interval '1 hour' WHERE id = %(id)s::uuid",
        {"id": flows.job(flow, "approve")},
    )
    assert await flows.signal(flow, "approve")
    (record,) = await flows.store.get(flows.org, [flows.job(flow, "approve")], include_payload=False)
    assert (record.state, record.attempt, record.attempts()) == ("succeeded", 0, [])
    assert await flows.run_all() == [{"deploy"}, {"won", "over"}]


# ── Which of two calls comes first ───────────────────────────────────────────────────────────────────────────────────


async def test_a_signal_for_a_job_that_somebody_else_ends_is_not_answered_before(
    flows: Flows, database: Database, module_dsn: str
) -> None:
    flow, other_flow = await waiting(flows), await waiting(flows)
    await make_due(database, flows.org)
    job = flows.job(flow, "approve")
    async with await psycopg.AsyncConnection.connect(module_dsn) as other:
        await other.execute("SELECT FROM windrow.job WHERE id = %s::uuid FOR UPDATE", [job])
        with pytest.raises(RowLocked):
            await flows.signal(flow, "approve")
        # Meanwhile calls about other jobs succeed, and other nodes of the same workflow can end.
        assert await flows.signal(other_flow, "approve")
        await other.rollback()
    assert await flows.signal(flow, "approve")
    assert await flows.run_all() == [{"deploy"}, {"won", "over"}]


async def test_a_signal_and_the_end_of_its_time_never_both_count(two: list[Flows]) -> None:
    for _ in range(trials(20, thorough=500)):
        flow = await two[0].start({"approve": [], "deploy": ["approve"]}, signals=["approve"])
        two[1].know(flow)
        await make_due(two[0].database, two[0].org)
        calls = [two[0].signal(flow, "approve"), two[1].claim(), two[1].signal(flow, "approve", b"other")]
        luck.shuffle(calls)
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        firsts = [one for one in outcomes if one is True]
        refused = [one for one in outcomes if isinstance(one, NotSignalled)]
        assert not any(isinstance(one, BaseException) and one not in refused for one in outcomes), outcomes
        state = (await two[0].states(flow))["approve"]
        assert (state, len(firsts), bool(refused)) in (("succeeded", 1, False), ("cancelled", 0, True)), outcomes
        await two[0].run_all()
        for flows in two:
            flows.leases.clear()
        await two[0].store.cancel(two[0].org, [two[0].job(flow, "deploy")], reason="over")
        await two[0].check()


async def test_of_signals_at_the_same_time_one_counts(two: list[Flows]) -> None:
    for early in (False, True) * trials(5, thorough=100):
        flow = await two[0].start(RELEASE, signals=["approve"])
        two[1].know(flow)
        if not early:
            await two[0].run_all()
        payloads = [b"%d" % at for at in range(6)]
        firsts = await asyncio.gather(
            *(two[at % 2].signal(flow, "approve", payload) for at, payload in enumerate(payloads))
        )
        assert firsts.count(True) == 1
        rounds = await two[0].run_all()
        assert rounds[-1] == {"deploy"}
        assert (await job_of(two[0], flow, "approve"))[1] == payloads[firsts.index(True)]


async def test_a_signal_and_the_release_of_its_node_never_miss_each_other(two: list[Flows]) -> None:
    for _ in range(trials(20, thorough=500)):
        flow = await two[0].start(RELEASE, signals=["approve"])
        two[1].know(flow)
        assert await two[0].claim() == {"build"}
        calls: list[Awaitable[object]] = [two[0].ack("build"), two[1].signal(flow, "approve")]
        luck.shuffle(calls)
        await asyncio.gather(*calls)
        # If the signal has locked the job, the fold does not release the job. A sweep releases it later.
        await two[0].sweep.sweep()
        assert await two[0].run_all() == [{"deploy"}]
        await two[0].check()


async def test_a_signal_and_a_fold_that_meet_at_the_row_lose_nothing(flows: Flows, module_dsn: str) -> None:
    flow = await flows.start(RELEASE, signals=["approve"])
    await flows.claim()
    async with await psycopg.AsyncConnection.connect(module_dsn) as other:
        # This transaction acts like a signal that has not committed yet.
        await other.execute(
            "UPDATE windrow.job SET checkpoint = 'early' WHERE id = %s::uuid", [flows.job(flow, "approve")]
        )
        await flows.ack("build")
        assert (await flows.states(flow))["approve"] == "blocked"
        await other.commit()
    await flows.sweep.sweep()
    assert await flows.run_all() == [{"deploy"}]


async def test_a_signal_that_waits_for_a_row_holds_up_no_end_of_its_workflow(flows: Flows, module_dsn: str) -> None:
    flow = await flows.start({"a": [], "s": [], "last": ["a", "s"]}, signals=["s"])
    await flows.claim()
    async with await psycopg.AsyncConnection.connect(module_dsn) as other:
        await other.execute("SELECT FROM windrow.job WHERE id = %s::uuid FOR UPDATE", [flows.job(flow, "s")])
        signal = asyncio.create_task(flows.signal(flow, "s"))
        # This end needs the lock of the workflow.
        await flows.ack("a")
        with pytest.raises(RowLocked):
            await signal
    assert await flows.signal(flow, "s")
    assert await flows.run_all() == [{"last"}]


# ── No worker gets the job ───────────────────────────────────────────────────────────────────────────────────────────


async def due_now(flows: Flows, job: JobId) -> None:
    assert await flows.store.alter(flows.org, [job], Alteration(run_at_us=0)) == [Answer.OK]


async def urgent(flows: Flows, job: JobId) -> None:
    assert await flows.store.alter(flows.org, [job], Alteration(priority=1)) == [Answer.OK]
    await make_due(flows.database, flows.org)


async def urgent_when_due(flows: Flows, job: JobId) -> None:
    await make_due(flows.database, flows.org)
    assert await flows.store.alter(flows.org, [job], Alteration(priority=1)) == [Answer.OK]


async def later(flows: Flows, job: JobId) -> None:
    assert await flows.store.alter(flows.org, [job], Alteration(delay_us=50 * HOUR_US)) == [Answer.OK]
    await make_due(flows.database, flows.org)


async def later_when_due(flows: Flows, job: JobId) -> None:
    await make_due(flows.database, flows.org)
    await later(flows, job)


async def sooner(flows: Flows, job: JobId) -> None:
    assert await flows.store.alter(flows.org, [job], Alteration(delay_us=0)) == [Answer.OK]


@pytest.mark.parametrize("change", [due_now, urgent, urgent_when_due, later, later_when_due, sooner])
async def test_no_change_of_a_job_hands_it_to_a_worker(
    flows: Flows, change: Callable[[Flows, JobId], Awaitable[None]]
) -> None:
    flow = await waiting(flows)
    await change(flows, flows.job(flow, "approve"))
    assert await flows.claim() == {"lost", "over"}
    assert await job_of(flows, flow, "approve") == ("cancelled", None, "no signal came in time")


async def test_a_change_of_its_time_changes_for_how_long_the_node_waits(flows: Flows) -> None:
    flow = await waiting(flows)
    job = flows.job(flow, "approve")
    (before,) = await flows.store.get(flows.org, [job], include_payload=False)
    await flows.store.alter(flows.org, [job], Alteration(delay_us=50 * HOUR_US))
    (after,) = await flows.store.get(flows.org, [job], include_payload=False)
    assert after.expires_at == after.run_at >= before.run_at + 47 * HOUR_US
    assert await flows.claim() == set()
    assert await flows.signal(flow, "approve")


async def test_a_blocked_job_gets_no_time_and_no_second_life(flows: Flows) -> None:
    flow = await flows.start(RELEASE, signals=["approve"])
    job = flows.job(flow, "approve")
    assert await flows.store.alter(flows.org, [job], Alteration(delay_us=0)) == [Answer.STALE]
    assert await flows.store.alter(flows.org, [job], Alteration(priority=1)) == [Answer.OK]
    assert await flows.store.redrive(flows.org, [job]) == [Answer.STALE]
    assert await flows.run_all() == [{"build"}]
    assert await flows.signal(flow, "approve")
    assert await flows.run_all() == [{"deploy"}]


async def test_an_ordinary_job_keeps_its_expiry_when_it_is_altered(flows: Flows) -> None:
    flow = await flows.start({"a": []}, delay_us=HOUR_US)
    job = flows.job(flow, "a")
    await flows.database.run(
        b"UPDATE windrow.job SET expires_at = run_at + interval '1 hour' WHERE id = %(id)s::uuid", {"id": job}
    )
    (before,) = await flows.store.get(flows.org, [job], include_payload=False)
    await flows.store.alter(flows.org, [job], Alteration(delay_us=0))
    (after,) = await flows.store.get(flows.org, [job], include_payload=False)
    assert after.expires_at == before.expires_at
    assert await flows.run_all() == [{"a"}]


# ── Moves ────────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_move_takes_nodes_that_wait_along(pair: Pair, org: OrgId) -> None:
    source, target = both(pair, org)
    released = await source.start({"approve": [], "deploy": ["approve"]}, signals=["approve"])
    blocked = await source.start(RELEASE, signals=["approve"])
    early = await source.start({"make": [], "sign": ["make"], "ship": ["sign"]}, signals=["sign"])
    assert await source.signal(early, "sign", b"early")
    await pair.move([org], target=B)
    assert await target.signal(released, "approve")
    assert not await target.signal(early, "sign")
    nodes, _ = await target.admin.nodes(org, blocked.id, page_size=10, page_token="")
    assert [node.is_signal for node in nodes] == [False, True, False]
    assert await target.run_all() == [{"deploy", "build", "make"}, {"ship"}]
    assert (await target.states(blocked))["approve"] == "released"
    assert await target.state(early) == "succeeded"
    assert await job_of(target, early, "sign") == ("succeeded", b"early", None)
    await make_due(target.database, org)
    assert await target.claim() == set()
    assert await target.state(blocked) == "failed"
    await target.check()
    await pair.balance()


@pytest.mark.parametrize("early", [False, True])
async def test_a_signal_finds_a_job_that_is_still_on_the_source(pair: Pair, org: OrgId, early: bool) -> None:
    source, target = both(pair, org)
    graph = (
        {"build": [], "approve": ["build"], "deploy": ["approve"]} if early else {"approve": [], "deploy": ["approve"]}
    )
    flow = await source.start(graph, signals=["approve"])
    await source.claim()
    move = await pair.begin([org], target=B)
    mover = pair.mover(move)
    while (await pair.placement(org))[0] != (B,):
        assert await mover.step()
    assert await target.signal(flow, "approve", b"meanwhile", at=source.store)
    assert not await target.signal(flow, "approve", at=source.store)
    if early:
        await source.ack("build")
    await mover.finish()
    await target.sweep.sweep()
    assert await target.run_all() == [{"deploy"}]
    assert (await target.states(flow))["approve"] == "succeeded"
    await target.check()
    await pair.balance()


async def test_a_job_that_arrives_after_its_release_waits_for_its_signal_then(pair: Pair, org: OrgId) -> None:
    source, target = both(pair, org)
    flow = await source.start(RELEASE, signals=["approve"])
    await source.claim()
    move = await pair.begin([org], target=B)
    mover = pair.mover(move)
    while (await pair.placement(org))[0] != (B,):
        assert await mover.step()
    await source.ack("build")
    await mover.finish()
    await target.sweep.sweep()
    assert (await target.states(flow))["approve"] == "released"
    assert await target.claim() == set()
    await make_due(target.database, org)
    assert await target.claim() == set()
    assert await target.state(flow) == "failed"
    await target.check()
    await pair.balance()
