"""Tests workflows on one shard. A node is released when the last node for which it waits has ended, and the end of each
node counts once (I11)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from uuid import uuid4

import psycopg
import pytest

from shard.admin.queue_admin import QueueAdmin
from shard.errors import IdsOutsideHorizon, NodeEnded, UnknownNode, UnknownWorkflow, WorkflowExists
from shard.history import erasure
from shard.history.days import expire_waiting
from shard.postgres.pool import Database
from shard.postgres.schema import Connection
from shard.queue.settle import Settlement
from shard.vocabulary import Alteration, Answer, JobId, OrgId, QueueName
from shard.workflow import Callback, Fault, NewWorkflow, NodeName, WorkflowId
from tests.effort import luck_of, trials
from tests.jobs import HOUR_US, QUEUE, job_id
from tests.timemachine import make_due, until_blocked
from tests.workflows import IGNORE, RUN, Flows, Graph, chain, fan_in, new_workflow

DIAMOND = {"a": [], "b": ["a"], "c": ["a"], "d": ["b", "c"]}
CALLBACKS = {"won": Callback.SUCCESS, "lost": Callback.FAILURE, "over": Callback.END}
PATIENCE_S = 30.0
luck = luck_of("workflows")


# ── Order ────────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_node_runs_after_those_that_it_waits_for(flows: Flows) -> None:
    flow = await flows.start(DIAMOND)
    assert await flows.states(flow) == {"a": "released", "b": "blocked", "c": "blocked", "d": "blocked"}
    assert await flows.run_all() == [{"a"}, {"b", "c"}, {"d"}]
    assert await flows.state(flow) == "succeeded"
    assert set((await flows.states(flow)).values()) == {"succeeded"}


async def test_the_last_parent_releases_in_its_own_transaction(flows: Flows) -> None:
    await flows.start(fan_in(3))
    assert await flows.claim() == {"p0", "p1", "p2"}
    # In this order, the node waits on each of these parents in turn.
    for parent in ("p2", "p1"):
        await flows.ack(parent)
        assert await flows.claim() == set()
    await flows.ack("p0")
    assert await flows.claim() == {"last"}


async def test_parents_that_end_in_one_statement_release_their_node(flows: Flows) -> None:
    await flows.start({**fan_in(5), "other": ["p1", "last"]})
    assert await flows.run_all() == [{f"p{n}" for n in range(5)}, {"last"}, {"other"}]


async def test_a_chain_runs_link_by_link(flows: Flows) -> None:
    flow = await flows.start(chain(20))
    assert await flows.run_all() == [{f"n{n}"} for n in range(20)]
    assert await flows.state(flow) == "succeeded"


async def test_blocked_jobs_are_counted_and_listed_as_such(flows: Flows, books: QueueAdmin) -> None:
    flow = await flows.start(DIAMOND)
    (counts,) = await books.stats(flows.org, queue=None, include_finished=False)
    assert (counts.blocked, counts.scheduled, counts.ready, counts.leased) == (3, 0, 1, 0)
    (record,) = await flows.store.get(flows.org, [flows.job(flow, "b")], include_payload=False)
    assert record.state == "blocked"
    assert await flows.store.find_ended([(flows.org, record.id.replace("-", ""))]) == []
    for entry in await books.check():
        assert entry.balanced


async def test_a_delay_counts_from_the_release(flows: Flows, database: Database) -> None:
    await flows.start(chain(2), delay_us=HOUR_US)
    assert await flows.claim() == set()
    await make_due(database, flows.org)
    assert await flows.claim() == {"n0"}
    await flows.ack("n0")
    assert await flows.claim() == set()
    await make_due(database, flows.org)
    assert await flows.claim() == {"n1"}


async def test_released_jobs_of_a_group_wait_for_their_slot(flows: Flows) -> None:
    flow = await flows.start({"a": [], "b": [], "c": ["a"], "d": ["a"], "e": ["b"]}, group="g")
    (name,) = await flows.claim()
    order = [name]
    for _ in range(4):
        assert await flows.claim() == set()
        await flows.ack(order[-1])
        (name,) = await flows.claim()
        order.append(name)
    await flows.ack(order[-1])
    assert sorted(order) == ["a", "b", "c", "d", "e"]
    assert order[0] in "ab"
    assert await flows.state(flow) == "succeeded"


async def test_retries_and_snoozes_are_no_ends(flows: Flows) -> None:
    flow = await flows.start(chain(2))
    await flows.claim()
    assert await flows.store.settle(Settlement.release(flows.org, [flows.leases.pop("n0")])) == [Answer.OK]
    assert (await flows.states(flow))["n1"] == "blocked"
    assert await flows.run_all() == [{"n0"}, {"n1"}]


# ── Failures ─────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_failure_cancels_what_comes_after_it(flows: Flows, books: QueueAdmin) -> None:
    flow = await flows.start({**DIAMOND, "e": [], "f": ["e"]})
    assert await flows.claim() == {"a", "e"}
    await flows.kill("a")
    await flows.ack("e")
    assert await flows.run_all() == [{"f"}]
    states = await flows.states(flow)
    assert [states[name] for name in "abcdef"] == ["failed", *["cancelled"] * 3, *["succeeded"] * 2]
    assert await flows.state(flow) == "failed"
    (record,) = await flows.store.get(flows.org, [flows.job(flow, "d")], include_payload=False)
    assert (record.state, record.reason) == ("cancelled", "a node that it waits for failed")
    for entry in await books.check():
        assert entry.balanced


async def test_an_ignored_failure_lets_the_workflow_succeed(flows: Flows) -> None:
    flow = await flows.start({"a": [], "b": [("a", IGNORE)]})
    await flows.claim()
    await flows.kill("a")
    assert await flows.run_all() == [{"b"}]
    assert await flows.state(flow) == "succeeded"


async def test_a_node_that_runs_anyway_does_not_save_the_workflow(flows: Flows) -> None:
    flow = await flows.start({"a": [], "b": [("a", RUN)], "c": [("a", IGNORE)]})
    await flows.claim()
    await flows.kill("a")
    assert await flows.run_all() == [{"b", "c"}]
    assert await flows.state(flow) == "failed"


async def test_a_node_after_a_cancelled_one_runs_if_it_ignores_that(flows: Flows) -> None:
    flow = await flows.start({"a": [], "b": ["a"], "c": ["b"], "e": [], "d": [("c", IGNORE), "e"]})
    assert await flows.claim() == {"a", "e"}
    await flows.kill("a")
    assert (await flows.states(flow))["d"] == "blocked"
    await flows.ack("e")
    assert await flows.run_all() == [{"d"}]
    assert await flows.state(flow) == "failed"


async def cancel_it(flows: Flows, job: JobId) -> None:
    assert await flows.store.cancel(flows.org, [job], reason="") == [Answer.OK]


async def purge_it(flows: Flows, job: JobId) -> None:
    await QueueAdmin(flows.database).purge_queue(flows.org, QueueName("first"), include_dead=True, limit=1000)


async def expire_it(flows: Flows, job: JobId) -> None:
    await flows.database.run(
        b"UPDATE windrow.job SET expires_at = now() WHERE id = %(id)s::uuid RETURNING id", {"id": job}
    )
    assert await expire_waiting(flows.database) == 1


async def expire_in_a_claim(flows: Flows, job: JobId) -> None:
    await flows.database.run(
        b"UPDATE windrow.job SET expires_at = now() WHERE id = %(id)s::uuid RETURNING id", {"id": job}
    )
    assert await flows.claim(queue="first") == set()


@pytest.mark.parametrize("end", [cancel_it, purge_it, expire_it, expire_in_a_claim])
async def test_every_end_of_a_parent_counts(flows: Flows, end: Callable[[Flows, JobId], Awaitable[None]]) -> None:
    flow = await flows.start(
        {"a": [], "b": [("a", IGNORE)], "c": ["a"]}, queue_of=lambda name: "first" if name == "a" else QUEUE
    )
    await end(flows, flows.job(flow, "a"))
    assert await flows.run_all() == [{"b"}]
    assert await flows.states(flow) == {"a": "cancelled", "b": "succeeded", "c": "cancelled"}


@pytest.mark.parametrize("end", [cancel_it, purge_it, expire_it])
async def test_a_blocked_job_that_is_cancelled_gets_a_time(
    flows: Flows, end: Callable[[Flows, JobId], Awaitable[None]]
) -> None:
    queues = {"a": QUEUE, "b": "first"}
    flow = await flows.start({"a": [], "b": ["a"]}, queue_of=queues.__getitem__)
    await end(flows, flows.job(flow, "b"))
    (record,) = await flows.store.get(flows.org, [flows.job(flow, "b")], include_payload=False)
    assert record.state == "cancelled"
    assert record.finished_at is not None
    assert abs(record.run_at - record.finished_at) < HOUR_US


async def test_a_purge_of_blocked_jobs_ends_the_workflow(flows: Flows, books: QueueAdmin) -> None:
    flow = await flows.start(DIAMOND, callbacks=CALLBACKS, queue_of=lambda name: "end" if name in CALLBACKS else QUEUE)
    assert await books.purge_queue(flows.org, QUEUE, include_dead=False, limit=1000) == 4
    assert set((await flows.states(flow)).values()) == {"cancelled", "released"}
    assert await flows.state(flow) == "failed"
    assert await flows.claim(queue="end") == {"lost", "over"}


async def test_an_end_counts_once_and_a_redrive_after_it_changes_nothing(flows: Flows) -> None:
    flow = await flows.start({"a": [], "b": [("a", IGNORE)], "c": ["a"]})
    await flows.claim()
    await flows.kill("a")
    job = flows.job(flow, "a")
    assert await flows.store.redrive(flows.org, [job]) == [Answer.OK]
    assert await flows.claim() == {"a", "b"}
    await flows.ack("a")
    states = await flows.states(flow)
    assert states == {"a": "failed", "b": "released", "c": "cancelled"}
    await flows.ack("b")
    assert await flows.state(flow) == "failed"


async def test_a_purge_of_dead_jobs_counts_them_no_second_time(flows: Flows, books: QueueAdmin) -> None:
    flow = await flows.start({"a": [], "b": [("a", IGNORE)]})
    await flows.claim()
    await flows.kill("a")
    await books.purge_queue(flows.org, QUEUE, include_dead=True, limit=1000)
    assert await flows.states(flow) == {"a": "failed", "b": "cancelled"}


async def test_a_repeated_ack_counts_once(flows: Flows) -> None:
    await flows.start({"a": [], "b": [], "c": ["a", "b"]})
    await flows.claim()
    lease = flows.leases["a"]
    await flows.ack("a")
    again = await flows.store.settle(Settlement.ack(flows.org, [lease]))
    assert again == [Answer.STALE] or again == [Answer.OK]
    assert await flows.claim() == set()
    await flows.ack("b")
    assert await flows.claim() == {"c"}


# ── The end ──────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_success_runs_its_callbacks_once(flows: Flows) -> None:
    flow = await flows.start(DIAMOND, callbacks=CALLBACKS)
    assert await flows.run_all() == [{"a"}, {"b", "c"}, {"d"}, {"won", "over"}]
    states = await flows.states(flow)
    assert [states[name] for name in CALLBACKS] == ["succeeded", "cancelled", "succeeded"]
    (record,) = await flows.store.get(flows.org, [flows.job(flow, "lost")], include_payload=False)
    assert record.reason == "the workflow succeeded"


async def test_a_failure_runs_its_callbacks_once(flows: Flows) -> None:
    await flows.start(DIAMOND, callbacks=CALLBACKS)
    await flows.claim()
    await flows.kill("a")
    assert await flows.run_all() == [{"lost", "over"}]


async def test_a_cancelled_workflow_runs_only_what_runs_at_any_end(flows: Flows) -> None:
    flow = await flows.start({**DIAMOND, "e": []}, callbacks=CALLBACKS)
    assert await flows.claim(max_jobs=1) in ({"a"}, {"e"})
    jobs = await flows.admin.doom(flows.org, flow.id, reason="not needed", epoch=1)
    assert set(jobs) == {flows.job(flow, "a"), flows.job(flow, "e")}
    assert await flows.state(flow) == "running"
    assert await flows.store.cancel(flows.org, jobs, reason="not needed") == [Answer.OK] * 2
    assert await flows.state(flow) == "cancelled"
    assert await flows.claim() == {"over"}
    (record,) = await flows.store.get(flows.org, [flows.job(flow, "d")], include_payload=False)
    assert record.reason == "not needed"
    # A repeated call does nothing.
    assert await flows.admin.doom(flows.org, flow.id, reason="again", epoch=1) == []


async def test_a_callback_of_an_old_workflow_runs(flows: Flows) -> None:
    """The ids of the workflow's jobs are older than the ids that calls may send now."""
    week_ms = 7 * 24 * 3_600_000
    with pytest.raises(IdsOutsideHorizon):
        await flows.start(chain(1), workflow=WorkflowId(job_id(ahead_ms=-week_ms - 3_600_000)))
    assert await flows.database.run(b"SELECT FROM windrow.org WHERE org = %(org)s", {"org": flows.org}) == []
    flow = await flows.start(chain(1), callbacks=CALLBACKS, workflow=WorkflowId(job_id(ahead_ms=60_000 - week_ms)))
    assert await flows.run_all() == [{"n0"}, {"won", "over"}]
    assert await flows.state(flow) == "succeeded"


async def test_a_skipped_node_counts_as_a_success(flows: Flows) -> None:
    flow = await flows.start(DIAMOND)
    await flows.claim()
    for node in ("b", "a"):
        job = await flows.admin.skip(flows.org, flow.id, NodeName(node), epoch=1)
        assert await flows.store.cancel(flows.org, [job], reason="skipped") == [Answer.OK]
    assert await flows.run_all() == [{"c"}, {"d"}]
    assert await flows.state(flow) == "succeeded"
    assert (await flows.states(flow))["a"] == "skipped"
    with pytest.raises(NodeEnded):
        await flows.admin.skip(flows.org, flow.id, NodeName("d"), epoch=1)
    with pytest.raises(UnknownNode):
        await flows.admin.skip(flows.org, flow.id, NodeName("z"), epoch=1)


async def test_a_paused_workflow_releases_nothing(flows: Flows) -> None:
    flow = await flows.start(DIAMOND)
    await flows.admin.set_paused(flows.org, flow.id, paused=True, epoch=1)
    assert await flows.run_all() == [{"a"}]
    await flows.sweep.sweep()
    assert await flows.claim() == set()
    await flows.admin.set_paused(flows.org, flow.id, paused=False, epoch=1)
    assert await flows.run_all() == [{"b", "c"}, {"d"}]


# ── What is stored once ──────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_workflow_is_stored_once(flows: Flows, books: QueueAdmin) -> None:
    flow = await flows.start(DIAMOND)
    assert await flows.admin.start(flow, epoch=1) is True
    other = new_workflow(flows.org, chain(2), workflow=flow.id)
    with pytest.raises(WorkflowExists):
        await flows.admin.start(other, epoch=1)
    assert await flows.run_all() == [{"a"}, {"b", "c"}, {"d"}]
    assert await flows.admin.start(flow, epoch=1) is True
    assert await flows.claim() == set()
    for entry in await books.check():
        assert entry.balanced


async def test_calls_at_the_same_time_store_a_workflow_once(two: list[Flows], org: OrgId) -> None:
    flow = new_workflow(org, DIAMOND)
    answers = await asyncio.gather(*(flows.admin.start(flow, epoch=1) for flows in two for _ in range(3)))
    assert sorted(answers) == [False, *[True] * 5]
    two[0].know(flow)
    assert await two[0].claim() == {"a"}


async def test_two_orgs_may_use_one_id(database: Database, org: OrgId, other_org: OrgId) -> None:
    one, other = Flows(database, org), Flows(database, other_org)
    flow = await one.start(chain(2))
    await other.start(chain(3), workflow=flow.id)
    assert await one.run_all() == [{"n0"}, {"n1"}]
    assert await other.run_all() == [{"n0"}, {"n1"}, {"n2"}]


async def test_workflows_are_listed_by_their_age_and_state(flows: Flows) -> None:
    ids = [(await flows.start({f"f{number}": []})).id for number in range(3)]
    await flows.run_all()
    ids.append((await flows.start(chain(1))).id)
    page, token = await flows.admin.list_workflows(flows.org, state=None, page_size=3, page_token="")
    rest, last = await flows.admin.list_workflows(flows.org, state=None, page_size=3, page_token=token)
    assert [one.id for one in [*page, *rest]] == sorted(ids, reverse=True)
    assert last == ""
    running, _ = await flows.admin.list_workflows(flows.org, state=None, page_size=1000, page_token="")
    assert [one.id for one in running if one.state == "running"] == ids[3:]
    with pytest.raises(UnknownWorkflow):
        await flows.admin.get(flows.org, WorkflowId(job_id()))


async def test_old_workflows_are_forgotten(flows: Flows, database: Database) -> None:
    kept, old = await flows.start({"kept": []}), await flows.start({"old": []})
    await flows.run_all()
    await database.run(
        b"UPDATE windrow.workflow SET ended_at = now() - interval '31 days' WHERE id = %(id)s::uuid RETURNING id",
        {"id": old.id},
    )
    await flows.sweep.forget()
    assert await flows.state(kept) == "succeeded"
    with pytest.raises(UnknownWorkflow):
        await flows.state(old)


async def test_a_workflow_whose_callback_waits_for_the_end_of_a_pause_is_not_forgotten(
    flows: Flows, database: Database
) -> None:
    flow = await flows.start(chain(1), callbacks={"over": Callback.END})
    await flows.claim()
    await flows.admin.set_paused(flows.org, flow.id, paused=True, epoch=1)
    await flows.ack("n0")
    await database.run(
        b"UPDATE windrow.workflow SET ended_at = now() - interval '31 days' WHERE id = %(id)s::uuid RETURNING id",
        {"id": flow.id},
    )
    await flows.sweep.forget()
    assert await flows.state(flow) == "succeeded"
    await flows.admin.set_paused(flows.org, flow.id, paused=False, epoch=1)
    assert await flows.run_all() == [{"over"}]
    await flows.sweep.forget()
    with pytest.raises(UnknownWorkflow):
        await flows.state(flow)


async def test_an_erasure_leaves_nothing_of_a_workflow(flows: Flows, database: Database) -> None:
    await flows.start(DIAMOND, callbacks=CALLBACKS)
    await flows.claim()
    await flows.ack("a")
    assert await erasure.begin(database, flows.org, erasure=str(uuid4()))
    for one in await erasure.unfinished(database):
        while await erasure.go_on(database, one):
            pass
    ((org_id,),) = await database.run(
        b"SELECT count(*) FROM windrow.workflow w LEFT JOIN windrow.org o USING (org_id) WHERE o.org_id IS NULL", {}
    )
    assert org_id == 0
    rows = await database.run(
        b"SELECT count(*) FROM windrow.workflow_node n LEFT JOIN windrow.workflow w USING (flow) WHERE w.flow IS NULL",
        {},
    )
    assert rows == [(0,)]


async def test_an_erasure_takes_many_workflows_and_keys_in_small_steps(
    flows: Flows, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(erasure, "_HISTORY_ROWS", 2)
    monkeypatch.setattr(erasure, "_WHOLES", 1)
    for _ in range(3):
        await flows.start({"only": []})
    ((org_id,),) = await database.run(b"SELECT o.org_id FROM windrow.org o WHERE o.org = %(org)s", {"org": flows.org})
    at = {"org_id": org_id}
    await database.run(
        b"INSERT INTO windrow.dedup (queue_id, key, job_id, until) "
        b"SELECT q.queue_id, k::text, gen_random_uuid(), now() FROM windrow.queue q, generate_series(1, 5) k "
        b"WHERE q.queue_id & 4294967295 = %(org_id)s RETURNING 1",
        at,
    )
    assert await erasure.begin(database, flows.org, erasure=str(uuid4()))
    (one,) = [found for found in await erasure.unfinished(database) if found.org_id == org_id]
    left: list[tuple[int, int]] = []
    is_more = True
    while is_more:
        is_more = await erasure.go_on(database, one)
        (counts,) = await database.run(
            b"SELECT (SELECT count(*) FROM windrow.workflow w WHERE w.org_id = %(org_id)s), "
            b"(SELECT count(*) FROM windrow.dedup d WHERE d.queue_id & 4294967295 = %(org_id)s)",
            at,
        )
        left.append(counts)
    assert list(dict.fromkeys(left)) == [(3, 5), (2, 3), (1, 1), (0, 0)]


# ── Races ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.thorough
async def test_the_last_two_parents_never_miss_each_other(two: list[Flows], org: OrgId) -> None:
    first, second = two
    for _ in range(trials(40, thorough=2000)):
        width = luck.choice((2, 2, 3))
        flow = await first.start(fan_in(width))
        second.know(flow)
        parents = sorted(await first.claim())
        calls = [
            flows.store.settle(Settlement.ack(org, [first.leases.pop(name)]))
            for name, flows in zip(parents, (first, second, first), strict=False)
        ]
        luck.shuffle(calls)
        assert await asyncio.gather(*calls) == [[Answer.OK]] * width
        assert await second.run_all() == [{"last"}]
        assert await first.state(flow) == "succeeded"


async def test_a_parent_waits_for_the_commit_of_the_other_one(
    flows: Flows, database: Database, module_dsn: str
) -> None:
    await flows.start({"a": [], "b": [], "c": ["a", "b"]})
    await flows.claim()
    async with await psycopg.AsyncConnection.connect(module_dsn) as other:
        # This session acts like an ack that has folded the workflow but has not committed yet.
        await other.execute("SET CONSTRAINTS ALL IMMEDIATE")
        await other.execute(
            "WITH gone AS (DELETE FROM windrow.job WHERE id = %s::uuid RETURNING *) "
            "INSERT INTO windrow.finished (id, queue_id, enqueued_at, run_at, priority, attempt, state, kind, payload, "
            "retention, lease, workflow_node) "
            "SELECT id, queue_id, enqueued_at, run_at, priority, attempt, 'succeeded', kind, payload, 30, lease, "
            "workflow_node FROM gone",
            [job_of(flows, "a")],
        )
        ack = asyncio.create_task(flows.ack("b"))
        await until_blocked(database)
        assert not ack.done()
        await other.commit()
        await ack
    assert await flows.claim() == {"c"}


def job_of(flows: Flows, name: str) -> str:
    digits = flows.leases[name].job_hex
    return f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"


async def test_a_node_whose_job_is_locked_is_released_by_the_sweep(
    flows: Flows, database: Database, module_dsn: str
) -> None:
    flow = await flows.start({"a": [], "b": ["a"], "c": [], "d": ["c"]})
    await flows.claim()
    async with await psycopg.AsyncConnection.connect(module_dsn) as other:
        ids = [flows.job(flow, name) for name in "bd"]
        await other.execute("SELECT FROM windrow.job WHERE id = ANY (%s::uuid[]) FOR UPDATE", [ids])
        # The ack and the kill do not wait for the locked rows.
        async with asyncio.timeout(PATIENCE_S):
            await flows.ack("a")
            await flows.kill("c")
        assert await flows.claim() == set()
        assert (await flows.states(flow))["d"] == "blocked"
        await flows.sweep.sweep()
        assert await flows.claim() == set()
    await flows.sweep.sweep()
    assert await flows.run_all() == [{"b"}]
    assert (await flows.states(flow))["d"] == "cancelled"


async def test_a_blocked_job_keeps_its_place_when_it_is_altered(flows: Flows) -> None:
    flow = await flows.start(chain(2))
    job = flows.job(flow, "n1")
    assert await flows.store.alter(flows.org, [job], Alteration(priority=1)) == [Answer.OK]
    assert await flows.store.alter(flows.org, [job], Alteration(delay_us=0)) == [Answer.STALE]
    assert await flows.run_all() == [{"n0"}, {"n1"}]


@pytest.mark.thorough
async def test_acks_cancels_and_alterations_at_the_same_time_deadlock_never(two: list[Flows], org: OrgId) -> None:
    graph: Graph = {**fan_in(6), **{f"after{n}": [("last", IGNORE)] for n in range(4)}}
    for _ in range(trials(15, thorough=500)):
        flow = await two[0].start(graph, group="g" if luck.random() < 0.5 else None)
        two[1].know(flow)
        while await two[0].state(flow) == "running":
            names = sorted(await two[0].claim())
            calls: list[Awaitable[object]] = [
                luck.choice(two).store.settle(Settlement.ack(org, [two[0].leases.pop(name)])) for name in names
            ]
            victims = luck.sample(flow.jobs.ids, 2)
            calls.append(luck.choice(two).store.cancel(org, [JobId(victims[0])], reason=""))
            calls.append(
                luck.choice(two).store.alter(org, [JobId(victims[1])], Alteration(priority=luck.randint(1, 9)))
            )
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PATIENCE_S):
                    await asyncio.gather(*calls)
                    await two[1].sweep.sweep()
                    continue
            pytest.fail("the calls block each other")
    await two[0].check()


# ── The check ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("damage", "node", "what"),
    [
        ("DELETE FROM windrow.workflow", 1, "its job is blocked, and nothing will release it"),
        (
            "UPDATE windrow.workflow_node SET state = 'succeeded', ended_at = now(), waits_on = NULL WHERE name = 'b'",
            1,
            "its job is blocked, and nothing will release it",
        ),
        ("UPDATE windrow.workflow_node SET waits_on = 5 WHERE name = 'b'", 1, "it waits for node 5 instead of 0"),
        (
            "DELETE FROM windrow.job WHERE workflow_node LIKE '%/0'",
            0,
            "it was released, and its job is nowhere to be found",
        ),
        ("DELETE FROM windrow.job WHERE workflow_node LIKE '%/1'", 1, "it is blocked, and its job is not"),
        (
            "UPDATE windrow.workflow_node SET state = 'blocked', waits_on = 1 WHERE name = 'a'",
            0,
            "it waits for nodes that wait for it",
        ),
        ("UPDATE windrow.workflow SET open_node = 0", -1, "it is running, and node 1 has not ended"),
        (
            "INSERT INTO windrow.workflow_arrival (org_id, workflow, node, how) "
            "SELECT w.org_id, w.id, 0, 'succeeded' FROM windrow.workflow w",
            0,
            "its job has ended, and no fold has processed that",
        ),
        (
            "UPDATE windrow.workflow_node SET is_signal = true WHERE name = 'a'",
            0,
            "it waits for a signal, and its job would run",
        ),
    ],
)
async def test_a_check_finds_what_is_wrong(
    fresh_database: Database, fresh_dsn: str, org: OrgId, damage: str, node: int, what: str
) -> None:
    flows = Flows(fresh_database, org)
    flow = await flows.start({"a": [], "b": ["a"]})
    assert await flows.admin.check() == []
    async with await psycopg.AsyncConnection.connect(fresh_dsn) as session:
        # No trigger may repair the damage.
        for table in ("job", "workflow_arrival"):
            await session.execute(f"ALTER TABLE windrow.{table} DISABLE TRIGGER USER".encode())
        await session.execute(damage.encode())
    assert Fault(org, flow.id, node, what) in await flows.admin.check()


async def test_a_node_whose_job_is_lost_is_ended_by_a_skip(
    fresh_database: Database, fresh_dsn: str, org: OrgId
) -> None:
    flows = Flows(fresh_database, org)
    flow = await flows.start({"a": [], "b": ["a"]})
    async with await psycopg.AsyncConnection.connect(fresh_dsn) as session:
        await session.execute("DELETE FROM windrow.job WHERE workflow_node LIKE '%/0'")
    await flows.admin.skip(org, flow.id, NodeName("a"), epoch=1)
    assert await flows.run_all() == [{"b"}]
    assert await flows.admin.check() == []


# ── What an end writes ───────────────────────────────────────────────────────────────────────────────────────────────


async def end(connection: Connection, flows: Flows, flow: NewWorkflow, *names: str) -> None:
    """Ends the jobs of these nodes in the transaction of the connection."""
    await connection.execute(
        b"SELECT windrow.cancel_blocked(array_agg(j.ctid), array_agg('ended'::text)) FROM windrow.job j "
        b"WHERE j.id = ANY (%s::uuid[])",
        [[flows.job(flow, name) for name in names]],
    )


async def test_an_end_writes_its_node_without_its_indexes_and_releases_the_next_one_with_one_write(
    database: Database, flows: Flows
) -> None:
    flow = await flows.start({"a": [], "b": [("a", IGNORE)]})
    written = (
        b"SELECT n_tup_upd - n_tup_hot_upd, n_tup_hot_upd FROM pg_stat_xact_user_tables WHERE relname = 'workflow_node'"
    )
    async with database.transaction() as connection:
        ((indexed, heap_only),) = await (await connection.execute(written)).fetchall()
        await end(connection, flows, flow, "a")
        await connection.execute(b"SET CONSTRAINTS ALL IMMEDIATE")
        assert await (await connection.execute(written)).fetchall() == [(indexed + 1, heap_only + 1)]
    assert await flows.states(flow) == {"a": "cancelled", "b": "released"}


async def test_the_first_end_that_is_not_rolled_back_lets_the_transaction_fold(
    database: Database, flows: Flows
) -> None:
    flow = await flows.start({"a": [], "b": [], "c": [], "d": [("b", IGNORE), ("c", IGNORE)]})
    async with database.transaction() as connection:
        await connection.execute(b"SAVEPOINT before")
        await end(connection, flows, flow, "a")
        await connection.execute(b"ROLLBACK TO before")
        await end(connection, flows, flow, "b")
        await connection.execute(b"RELEASE before")
        await end(connection, flows, flow, "c")
        cursor = await connection.execute(b"SELECT a.is_first FROM windrow.workflow_arrival a ORDER BY a.number")
        assert await cursor.fetchall() == [(True,), (False,)]
    assert await flows.states(flow) == {"a": "released", "b": "cancelled", "c": "cancelled", "d": "released"}
