"""The balancer moves slots to where the cluster file wants them: it does not matter which of several balancers leads,
which shard is away, or where an earlier balancer stopped."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections import Counter
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path

import psycopg
import pytest

from balancer.move import Mover, Pace
from balancer.plan import transfers
from balancer.service import AnotherLeads
from balancer.service import balance_once as balance_until
from proof.proxy import Proxy, open_proxy_before, through
from shard.errors import Misconfigured, ShardUnavailable
from shard.placement import move_steps, pins
from shard.placement.catalog import Move
from shard.placement.cluster_file import Cluster
from shard.placement.pins import OnShard
from shard.placement.slots import SLOTS, slot_of
from shard.postgres import schema
from shard.postgres.leader_lock import leader_session
from shard.queue.store import Store
from shard.vocabulary import OrgId, ShardName, Slot
from tests import timemachine
from tests.balancers import Field, balanced, balancer_process, open_field, until
from tests.jobs import HOUR_US, lease_jobs
from tests.postgres import Server
from tests.routers import PATIENCE_S

A, B, C = (ShardName(name) for name in ("s1", "s2", "s3"))
HALF = SLOTS // 2
# The slots that s2 gets from s1. One move takes all of them, to save time.
PART = range(SLOTS - 1024, SLOTS)
BUT_A_PART = {"weight": 15}
LEFT = SLOTS - len(PART)
# With this limit, a move takes long enough to be observed.
SLOWLY = "[balancer]\njobs_per_second = 40\n"
MORE_SLOWLY = "[balancer]\njobs_per_second = 10\n"
Log = pytest.LogCaptureFixture


@pytest.fixture
async def field(tmp_path: Path, fresh_dsn: str, postgres: Server) -> AsyncGenerator[Field, None]:
    async with open_field(tmp_path, fresh_dsn, postgres, "s2", "s3") as opened:
        yield opened


@pytest.fixture
def log(caplog: Log) -> Log:
    caplog.set_level(logging.INFO)
    return caplog


async def says(log: Log, words: str, *, times: int = 1) -> None:
    async def text() -> str:
        return log.text

    await until(text, lambda said: said.count(words) >= times)


async def balance_once(cluster: Cluster) -> Mapping[Move, str]:
    return await balance_until(cluster, stop=asyncio.Event())


async def leader(field: Field) -> str | None:
    async with leader_session(field.dsns[A]) as onlooker:
        return await onlooker.leader()


# ── Where the slots are in the end ───────────────────────────────────────────────────────────────────────────────────


async def test_shards_are_filled_by_weight_and_emptied_again(field: Field, log: Log) -> None:
    field.write(s1={})
    stored = await field.enqueue(60, jobs=3)
    assert await balance_once(field.write(s1={}, s2={}, s3={"weight": 2})) == {}
    assert await field.slots() == {"s1": 4096, "s2": 4096, "s3": HALF}
    await field.assert_all_there(stored)
    assert "plan: 4,096 slots from 's1' to 's2', 8,192 slots from 's1' to 's3'" in log.text
    field.write(s1={}, s2={"weight": 0}, s3={"state": "draining"})
    assert await balance_once(field.cluster) == {}
    assert await field.slots() == {"s1": SLOTS}
    await field.assert_all_there(stored)
    log.clear()
    assert await balance_once(field.cluster) == {}
    assert [record.message for record in log.records if record.name.startswith("balancer")] == [
        f"leads, with cluster file {field.cluster.digest}"
    ]


async def test_slots_with_many_nodes_of_workflows_move_a_few_at_a_time(
    field: Field, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("balancer.controller._NODES_MAX", 25)
    field.write(s1={})
    stored = await field.enqueue(20, among=PART)
    await field.databases[A].run(
        b"""
        WITH flow AS (
            INSERT INTO windrow.workflow (org_id, id, name, digest, nodes, state, ended_at)
            SELECT o.org_id, gen_random_uuid(), 'nightly', '', n.nodes, 'succeeded', now()
            FROM windrow.org o CROSS JOIN (VALUES (3), (7)) AS n (nodes)
            RETURNING flow, nodes
        )
        INSERT INTO windrow.workflow_node (flow, node, name, job_id, state, ended_at)
        SELECT flow.flow, n.node, n.node::text, gen_random_uuid(), 'succeeded', now()
        FROM flow CROSS JOIN LATERAL generate_series(0, flow.nodes - 1) AS n (node)
        """,
        {},
    )
    slots = sorted({slot_of(org) for org in stored})
    assert await move_steps.count_nodes(field.databases[A], [Slot(slots[0]), Slot(0)]) == {slots[0]: 10}
    assert await balance_once(field.write(s1=BUT_A_PART, s2={})) == {}
    assert await field.slots() == {"s1": LEFT, "s2": len(PART)}
    known = await field.known()
    # Each move takes two slots with workflows.
    assert max(Counter(known.slots[slot].epoch for slot in slots).values()) == 2
    await field.assert_all_there(stored)


async def test_a_shard_that_is_added_while_it_runs_is_filled(field: Field, log: Log) -> None:
    field.write(s1={})
    stored = await field.enqueue(20, among=PART)
    async with balanced(field):
        await says(log, "leads, with cluster file")
        field.config.write_text("[[shard]]\n")
        await says(log, "is refused")
        field.write('[balancer]\njobs_per_second = "many"\n', s1={}, s2={})
        await says(log, "jobs_per_second: must be a whole number", times=1)
        field.write(s1=BUT_A_PART, s2={})
        await field.until(lambda slots: slots == {"s1": LEFT, "s2": len(PART)})
        field.write(s1={}, s2={"state": "draining"})
        await field.until(lambda slots: slots == {"s1": SLOTS})
    await field.assert_all_there(stored)
    assert await leader(field) is None
    assert log.text.count("is refused") == 2


async def test_what_somebody_else_changes_in_the_catalog_is_noticed(field: Field, log: Log) -> None:
    field.write(s1={}, s2={"weight": 0})
    await field.admit(B)
    async with balanced(field):
        await says(log, "leads, with cluster file")
        move = await field.begin(A, B, range(100))
        await says(log, f"{move} has ended")
        await field.until(lambda slots: slots == {"s1": SLOTS})


@pytest.mark.parametrize("steps", range(5))
async def test_a_move_that_another_balancer_left_is_taken_to_its_end(field: Field, steps: int) -> None:
    cluster = field.write(s1={}, s2={"weight": 0})
    stored = await field.enqueue(20, jobs=5, among=PART)
    await field.admit(B)
    move = await field.begin(A, B, PART)
    mover = Mover(field.catalog, field.databases, move.epoch, pace=Pace(rows_max=7), report=lambda _: None)
    for _ in range(steps):
        assert await mover.step()
    assert await balance_once(cluster) == {}
    # The slots have moved to s2, and then back because of the weights.
    assert await field.slots() == {"s1": SLOTS}
    assert {owner.shard for one in (await field.known()).slots[PART.start :] for owner in one.former} == {A, B}
    await field.assert_all_there(stored)


async def test_jobs_under_leases_hold_up_nobody_else(field: Field, log: Log) -> None:
    field.write(s1={})
    stored = await field.enqueue(20, among=PART)
    org = next(iter(stored))
    await lease_jobs(Store(field.databases[A]), org, window_us=HOUR_US)
    field.write(s1=BUT_A_PART, s2={})
    async with balanced(field):
        await says(log, "waits for 1 lease(s) to end")
        await field.until(lambda slots: slots == {"s1": LEFT, "s2": len(PART) - 1, "moving": 1})
        # Meanwhile the shards of this move accept other moves.
        field.write(s1={"weight": 7}, s2={})
        await field.until(lambda slots: slots == {"s1": LEFT - 1024, "s2": len(PART) + 1023, "moving": 1})
        assert await timemachine.end_leases(field.databases[A], org) == 1
        await field.until(lambda slots: not slots["moving"])
    await field.assert_all_there(stored)


# ── Who leads ────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_once_is_refused_where_another_leads(field: Field) -> None:
    cluster = field.write(s1={}, s2={})
    async with leader_session(field.dsns[A], cluster.digest) as other:
        assert await other.lead()
        with pytest.raises(
            AnotherLeads, match=r"windrow balancer \S+ \d+ by [0-9a-f]{12} at 127\.0\.0\.1 \(process \d+ of the catalog"
        ):
            await balance_once(cluster)
    assert await field.slots() == {"s1": SLOTS}


async def test_another_session_can_lead_as_soon_as_the_leader_has_ended(field: Field) -> None:
    async with leader_session(field.dsns[A]) as next_leader:
        async with leader_session(field.dsns[A]) as first:
            assert await first.lead()
            assert not await next_leader.lead()
        assert await next_leader.lead()


async def test_where_the_leader_is_killed_another_goes_on(field: Field) -> None:
    field.write(s1={})
    stored = await field.enqueue(40, jobs=5, among=PART)
    field.write(SLOWLY, s1=BUT_A_PART, s2={})
    with balancer_process(field.config) as first:
        await first.says("leads, with cluster file")
        with balancer_process(field.config) as second:
            told = await second.says("stands by: ")
            assert f" {first.process.pid} " in told
            await until(lambda: field.count_jobs("s2"), bool)
            first.process.kill()
            await second.says("leads, with cluster file")
            field.write(s1=BUT_A_PART, s2={})
            await field.until(lambda slots: slots == {"s1": LEFT, "s2": len(PART)})
            assert "Traceback" not in second.log.read_text()
    await field.assert_all_there(stored)


async def test_a_leader_that_loses_its_session_stops_at_once(field: Field, log: Log) -> None:
    field.write(s1={})
    stored = await field.enqueue(40, jobs=5, among=PART)
    field.write(SLOWLY, s1=BUT_A_PART, s2={})
    async with balanced(field):
        await until(lambda: field.count_jobs("s2"), bool)
        async with leader_session(field.dsns[A]) as other:
            rows = await field.catalog.run(
                b"SELECT pg_terminate_backend(pid, 10000) FROM pg_locks WHERE locktype = 'advisory' AND granted", {}
            )
            assert rows == [(True,)]
            assert await other.lead()
            await says(log, "cannot lead")
            await says(log, "stands by: ")
            left = await field.count_jobs("s1")
            await timemachine.pass_time(field.catalog, 1.5)
            assert await field.count_jobs("s1") == left > 0
        await says(log, "leads, with cluster file", times=2)
        field.write(s1=BUT_A_PART, s2={})
        await field.until(lambda slots: slots == {"s1": LEFT, "s2": len(PART)})
    await field.assert_all_there(stored)


async def test_a_leader_that_is_cut_off_from_the_catalog_stops_and_comes_back(field: Field, log: Log) -> None:
    async with proxied(field, A) as proxy:
        field.write(s1={})
        stored = await field.enqueue(40, jobs=5, among=PART)
        field.write(f"[catalog]\ndsn = '''{through(field.dsns[A], proxy)}'''\n{MORE_SLOWLY}", s1=BUT_A_PART, s2={})
        async with balanced(field):
            await until(lambda: field.count_jobs("s2"), bool)
            # The proxy accepts connections but passes no data.
            proxy.hold()
            await says(log, "cannot lead")
            left = await field.count_jobs("s1")
            await timemachine.pass_time(field.catalog, 1.5)
            assert await field.count_jobs("s1") == left > 0
            proxy.let_go()
            proxy.cut_all()
            await says(log, "leads, with cluster file", times=2)
            await until(lambda: field.count_jobs("s1"), lambda jobs: jobs < left)
    assert sum([await field.count_jobs("s1"), await field.count_jobs("s2")]) == sum(map(len, stored.values()))


async def test_a_balancer_that_is_told_to_end_leaves_nothing_half_done(field: Field) -> None:
    field.write(s1={})
    stored = await field.enqueue(40, jobs=5, among=PART)
    field.write(SLOWLY, s1=BUT_A_PART, s2={})
    with balancer_process(field.config) as process:
        await until(lambda: field.count_jobs("s2"), bool)
        process.process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.process.wait, PATIENCE_S) == 0
        assert "is left to the next leader" in process.log.read_text()
    assert await field.databases[A].run(b"SELECT FROM windrow.departing", {}) == []
    assert await leader(field) is None
    field.write(s1=BUT_A_PART, s2={})
    with balancer_process(field.config, "--once") as process:
        assert await asyncio.to_thread(process.process.wait, PATIENCE_S) == 0
    assert await field.slots() == {"s1": LEFT, "s2": len(PART)}
    await field.assert_all_there(stored)


# ── Shards that are away, or are not what they seem ──────────────────────────────────────────────────────────────────


def proxied(field: Field, shard: ShardName) -> contextlib.AbstractAsyncContextManager[Proxy]:
    return open_proxy_before(field.dsns[shard])


async def test_a_shard_that_is_away_gets_nothing_and_holds_up_nobody(field: Field, log: Log) -> None:
    async with proxied(field, C) as proxy:
        proxy.closed = True
        field.write(s1={"weight": 14}, s2={}, s3={"dsn": through(field.dsns[C], proxy)})
        async with balanced(field):
            await field.until(lambda slots: slots == {"s1": LEFT, "s2": len(PART)})
            await says(log, "nothing moves from or to shard 's3'")
            proxy.closed = False
            await field.until(lambda slots: slots == {"s1": 14 * 1024, "s2": 1024, "s3": 1024})
            assert "shard 's3' answers again: its moves go on" in log.text
            # An obstacle is logged once, although the balancer meets it many times.
            assert log.text.count("nothing moves from or to shard 's3'") <= 2


async def test_the_moves_of_a_shard_that_goes_away_pause_alone(field: Field, log: Log) -> None:
    async with proxied(field, C) as proxy:
        cluster = field.write(s1={"weight": 14}, s2={}, s3={"dsn": through(field.dsns[C], proxy)})
        stored = await field.enqueue(40, jobs=2, among=range(14 * 1024, SLOTS))
        await field.admit(C)
        slots = next(one.slots for one in transfers(await field.known(), cluster, {}) if one.target == C)
        move = await field.begin(A, C, slots)
        mover = Mover(field.catalog, field.databases, move.epoch, pace=Pace(), report=lambda _: None)
        for _ in range(3):
            assert await mover.step()
        proxy.closed = True
        async with balanced(field):
            await field.until(lambda slots: slots == {"s1": 14 * 1024, "s2": 1024, "moving": 1024})
            proxy.closed = False
            await field.until(lambda slots: slots == {"s1": 14 * 1024, "s2": 1024, "s3": 1024})
        await field.assert_all_there(stored)


async def test_a_shard_that_may_not_be_changed_is_left_alone_until_it_may(field: Field, log: Log) -> None:
    field.write(s1={}, s2={})
    await field.admit(B)
    move = await field.begin(A, B, range(100))
    cluster = field.write(s1={}, s2={"state": "read_only"})
    assert await balance_once(cluster) == {move: "the state of shard 's2' is read_only"}
    assert await field.slots() == {"s1": SLOTS - 100, "moving": 100}
    async with balanced(field):
        await says(log, f"{move} does not go on: the state of shard 's2' is read_only", times=2)
        field.write(s1=BUT_A_PART, s2={})
        await field.until(lambda slots: slots == {"s1": LEFT, "s2": len(PART)})


async def test_nothing_goes_to_a_database_that_is_another_shards(field: Field, log: Log) -> None:
    await schema.migrate(field.databases[B], cluster="other")
    field.write(s1={}, s2={})
    async with balanced(field):
        await says(log, "its DSN leads to the database of shard 's2' of cluster 'other'")
    assert await field.slots() == {"s1": SLOTS}


async def test_a_shard_in_use_is_never_taken_for_a_new_one(field: Field, log: Log, empty_dsn: str) -> None:
    await balance_once(field.write(s1=BUT_A_PART, s2={}))
    field.write(s1={}, s2={"dsn": empty_dsn, "state": "draining"})
    async with balanced(field):
        await says(log, "shard 's2' of cluster 'tests': its DSN leads to the database of no shard")
    assert await field.slots() == {"s1": LEFT, "s2": len(PART)}


@pytest.mark.parametrize("state", ["read_only", "off"])
async def test_an_org_on_a_shard_that_may_not_be_changed_waits_and_holds_up_no_other(
    field: Field, log: Log, state: str
) -> None:
    org = OrgId("org-0")
    await balance_once(field.write(s1={}, s2={"weight": 0}))
    await pins.pin(field.catalog, org, OnShard(B))
    await balance_once(field.cluster)
    await pins.pin(field.catalog, org, OnShard(C))
    field.write(s1=BUT_A_PART, s2={"weight": 0, "state": state}, s3={})
    async with balanced(field):
        await field.until(lambda slots: slots == {"s1": LEFT, "s3": len(PART)})
        await says(log, f"org 'org-0' stays on shard 's2': the state of shard 's2' is {state}")
        assert (await field.known()).placement(org).reads == (B,)
        field.write(s1=BUT_A_PART, s2={"weight": 0}, s3={})
        await until(field.known, lambda known: known.placement(org).reads == (C,))
    assert "unexpected" not in log.text
    assert "could not look" not in log.text


async def test_a_shard_that_holds_nothing_but_a_pinned_org_is_missed_too(field: Field) -> None:
    await balance_once(field.write(s1={}, s2={"weight": 0}))
    await pins.pin(field.catalog, OrgId("org-0"), OnShard(B))
    await balance_once(field.cluster)
    with pytest.raises(Misconfigured, match=r"places slots on shard\(s\) s2, which the cluster file does not name"):
        await balance_once(field.write(s1={}))


async def test_an_org_that_is_unpinned_waits_for_the_shard_of_its_hash(field: Field, log: Log) -> None:
    await balance_once(field.write(s1={}))
    await balance_once(field.write(s1=BUT_A_PART, s2={}))
    known = await field.known()
    org = next(org for org in map(OrgId, map(str, range(10_000))) if known.placement(org).reads == (B,))
    await pins.pin(field.catalog, org, OnShard(A))
    await balance_once(field.cluster)
    # Now the org's hash slot is on s2, but the org is not.
    assert (await field.known()).slots[slot_of(org)].reads == (B,)
    await pins.unpin(field.catalog, org)
    field.write(s1={}, s2={"state": "dequeue_only"})
    async with balanced(field):
        await says(log, f"org {org!r} stays on shard 's1': the state of shard 's2' is dequeue_only")
    assert "could not look" not in log.text


async def test_a_shard_that_is_missing_in_the_file_stops_everything(field: Field, log: Log) -> None:
    await balance_once(field.write(s1=BUT_A_PART, s2={}))
    field.write(s1=BUT_A_PART, s3={})
    with pytest.raises(Misconfigured, match=r"places slots on shard\(s\) s2, which the cluster file does not name"):
        await balance_once(field.cluster)
    async with balanced(field):
        await says(log, "nothing begins to move: the catalog places slots on shard(s) s2")
        field.write(s1=BUT_A_PART, s2={"state": "draining"}, s3={})
        await field.until(lambda slots: slots == {"s1": LEFT, "s3": len(PART)})


async def test_a_move_between_shards_of_which_one_was_restored_stops_those_shards(field: Field, log: Log) -> None:
    field.write(s1={}, s2={}, s3={})
    await field.admit(B)
    move = await field.begin(A, B, range(10))
    await field.databases[B].run(
        b"INSERT INTO windrow.owned_slot (slot, state, epoch) VALUES (1, 'owned', %(epoch)s)", {"epoch": move.epoch + 9}
    )
    with pytest.raises(Misconfigured, match="later than the catalog does"):
        await balance_once(field.cluster)
    async with balanced(field):
        await says(log, "later than the catalog does")
        await timemachine.pass_time(field.catalog, 1)
    assert await field.slots() == {"s1": SLOTS - 10, "moving": 10}


async def test_it_waits_for_the_first_router_to_make_the_catalog(field: Field, log: Log, empty_dsn: str) -> None:
    field.dsns[A] = empty_dsn
    field.write(s1={}, s2={})
    with pytest.raises(ShardUnavailable, match="there is no catalog yet; the first router makes it"):
        await balance_once(field.cluster)
    async with await psycopg.AsyncConnection.connect(empty_dsn) as connection:
        cursor = await connection.execute("SELECT to_regnamespace('windrow')")
        assert await cursor.fetchall() == [(None,)], "it was only looked at"
