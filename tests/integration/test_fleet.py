"""Shards are added to a fleet and removed from it. Nothing of a removed shard remains in the process."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from embedded import Cluster as Server
from router.buffer import Buffer
from router.fleet.end_waits import EndWaits
from router.fleet.fleet import Fleet
from router.fleet.ready_orgs import ReadyOrgs
from router.fleet.schedules import Scheduler
from router.fleet.shard_handle import ShardHandle
from router.fleet.wait_room import WaitRoom
from shard.errors import Misconfigured, ShardUnavailable, UnknownQueue
from shard.placement import catalog
from shard.placement.cluster_file import Cluster, ShardEntry, parse_cluster
from shard.placement.slots import SLOTS, slot_of
from shard.postgres.pool import Database
from shard.queue.doorbell import Doorbell
from shard.vocabulary import OrgId, QueueName, ShardName
from shard.workflows.sweep import WorkflowSweep
from tests.jobs import lease_jobs, some_jobs
from tests.postgres import EMPTY, SPARE, frozen
from tests.postgres import Server as Postgres

OPERATIONS = Path(__file__).resolve().parents[2] / "docs/operations.md"
PATIENCE_S = 30.0
_numbers = itertools.count(1)
S1, S2 = ShardName("s1"), ShardName("s2")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server("fleet", ephemeral=True) as started:
        yield started


def cluster_of(server: Server, spare_dsn: str, second: str | None) -> Cluster:
    """s1 is on the server of all tests, and s2 is on the server of this module. `second` None: there is no s2."""
    return two(spare_dsn, server.dsn, second)


def two(first_dsn: str, second_dsn: str, second: str | None = "") -> Cluster:
    text = f"[[shard]]\nname = 's1'\ndsn = '''{first_dsn}'''\n"
    if second is not None:
        text += f"[[shard]]\nname = 's2'\ndsn = '''{second_dsn}'''\n{second}\n"
    return parse_cluster(text, source="test")


@contextlib.asynccontextmanager
async def opened(cluster: Cluster) -> AsyncGenerator[Fleet, None]:
    fleet, ready = Fleet(cluster, connections_per_shard=2, sweep_s=0.2, buffer=Buffer(2**20)), asyncio.Event()
    running = asyncio.create_task(fleet.run(ready))
    try:
        await asyncio.wait_for(ready.wait(), PATIENCE_S)
        yield fleet
    finally:
        running.cancel()
        await asyncio.wait({running})


async def until(condition: Callable[[], object]) -> None:
    """Polls a condition until it holds, because nothing signals a change of the condition."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s
        await asyncio.sleep(0.01)


async def up(fleet: Fleet) -> ShardHandle:
    await asyncio.wait_for(fleet.shards()[S2].up.wait(), PATIENCE_S)
    return fleet.member(S2)


async def test_of_a_shard_that_has_gone_no_task_is_left(server: Server, spare_dsn: str) -> None:
    alone, both = cluster_of(server, spare_dsn, None), cluster_of(server, spare_dsn, "weight = 0")
    async with opened(alone) as fleet:
        before = asyncio.all_tasks()
        for _ in range(3):
            await fleet.change(both)
            member = await up(fleet)
            assert asyncio.all_tasks() - before
            call = member.store.get(OrgId("o"), [], include_payload=False)
            await fleet.change(alone)
            assert S2 not in fleet.shards()
            assert await call == []
            await until(lambda: asyncio.all_tasks() <= before)
            with pytest.raises(ShardUnavailable, match="the cluster file has changed"):
                member.require_up()
            with pytest.raises(ShardUnavailable, match="has closed its connections"):
                await member.store.enqueue(some_jobs(OrgId("o"), 1))
    assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.mark.parametrize("task", [Doorbell, WaitRoom, ReadyOrgs, EndWaits, Scheduler], ids=lambda task: task.__name__)
async def test_a_fault_in_one_task_of_a_shard_does_not_end_the_router(
    spare_dsn: str, server: Server, monkeypatch: pytest.MonkeyPatch, task: type[Doorbell | WaitRoom]
) -> None:
    run, begun = task.run, asyncio.Event()
    faults = iter([AssertionError("a fault")])

    async def run_with_a_fault(self: Any) -> None:
        for fault in faults:
            raise fault
        begun.set()
        await run(self)

    monkeypatch.setattr(task, "run", run_with_a_fault)
    async with opened(cluster_of(server, spare_dsn, None)) as fleet:
        await asyncio.wait_for(begun.wait(), PATIENCE_S)
        assert fleet.member(S1).is_usable


async def test_a_shard_that_says_nothing_can_be_switched_off(server: Server, spare_dsn: str) -> None:
    both, off = (cluster_of(server, spare_dsn, f'weight = 0\nstate = "{state}"') for state in ("active", "off"))
    async with opened(off) as fleet:
        before = asyncio.all_tasks()
        await fleet.change(both)
        member = await up(fleet)
        pid = server.pid
        assert pid is not None
        with frozen(pid):
            stuck = asyncio.create_task(lease_jobs(member.store, OrgId("o")))
            await asyncio.sleep(0.1)
            await fleet.change(off)
            with pytest.raises(ShardUnavailable, match="its state is off"):
                fleet.member(S2)
            with pytest.raises(ShardUnavailable):
                await asyncio.wait_for(stuck, PATIENCE_S)
            await until(lambda: asyncio.all_tasks() <= before)
        await fleet.change(both)
        await up(fleet)


async def test_a_dsn_that_changes_while_it_is_being_proved_is_gone_over_to(
    server: Server, spare_dsn: str, fresh_dsn: str
) -> None:
    both = cluster_of(server, spare_dsn, "weight = 0")
    text_of = {"wrong": fresh_dsn, "right": f"{server.dsn}?application_name=other"}

    def with_dsn(which: str) -> Cluster:
        return two(spare_dsn, text_of[which], "weight = 0")

    async with opened(both) as fleet:
        member = await up(fleet)
        await fleet.change(with_dsn("wrong"))
        await until(lambda: "leads to the database of shard 's1'" in member.trouble)
        await fleet.change(with_dsn("right"))
        await until(lambda: member.dsn == text_of["right"])
        assert (fleet.member(S2), member.trouble) == (member, "")
        # Change the DSN, and change it back before the new DSN was checked.
        await fleet.change(with_dsn("wrong"))
        await fleet.change(with_dsn("right"))
        assert (fleet.member(S2), member.trouble, member.dsn) == (member, "", text_of["right"])


# ── A database that is not the shard's ───────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def dsns(postgres: Postgres) -> Iterator[list[str]]:
    """Two migrated databases that belong to no shard yet, and an empty database."""
    names = [f"fleet_{next(_numbers)}" for _ in range(3)]
    yield [postgres.create(name, template=of) for name, of in zip(names, (SPARE, SPARE, EMPTY), strict=True)]
    for name in names:
        postgres.drop(name)


def is_empty(dsn: str) -> bool:
    with psycopg.connect(dsn) as connection:
        return connection.execute("SELECT to_regnamespace('windrow') IS NULL").fetchone() == (True,)


def org_on(fleet: Fleet, shard: ShardName) -> OrgId:
    orgs = (OrgId(f"org-{number}") for number in itertools.count())
    return next(org for org in orgs if fleet.placement(org).writes == (shard,))


async def store(fleet: Fleet, org: OrgId) -> None:
    placement = fleet.placement(org)
    assert await fleet.writer(placement).require_open().store.enqueue(some_jobs(org, 1), epoch=placement.epoch) == {}


async def until_refused(fleet: Fleet, org: OrgId, why: str) -> int:
    """Stores jobs until a job is refused for this reason. Returns how many jobs were stored."""
    stored = 0
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                await store(fleet, org)
                stored += 1
            except ShardUnavailable as error:
                if re.search(why, str(error)):
                    return stored
            await asyncio.sleep(0.05)


async def test_no_other_database_is_taken_for_a_shard_that_holds_slots(postgres: Postgres, dsns: list[str]) -> None:
    first, second, *_ = dsns
    name, copy = str(conninfo_to_dict(second)["dbname"]), f"fleet_{next(_numbers)}"
    async with opened(two(first, second)) as fleet:
        await up(fleet)
        near, org = org_on(fleet, S1), org_on(fleet, S2)
        await store(fleet, org)
    kept = postgres.create(copy, template=name)
    try:
        async with opened(two(first, second)) as fleet:
            await up(fleet)
            # Make it look as if the volume of s2 was lost.
            await asyncio.to_thread(postgres.drop, name)
            await asyncio.to_thread(postgres.create, name, template=EMPTY)
            with pytest.raises(ShardUnavailable):
                await store(fleet, org)
            await until_refused(fleet, org, "its DSN leads to another database .* than it did before")
            await store(fleet, near)
        async with opened(two(first, second)) as fleet:
            await until_refused(fleet, org, "its DSN leads to the database of no shard .* holds 8,192 slots")
            await store(fleet, near)
            assert is_empty(second), "it was only looked at"
            # In this case, the operator finds a backup.
            await fleet.change(two(first, kept))
            member = await up(fleet)
            assert [one.accepted for one in await member.queue_admin.check()] == [1]
            # In this case, the operator finds no backup and gives up the old database.
            await fleet.change(two(first, second))
            await until(lambda: "holds 8,192 slots" in member.trouble)
            await store(fleet, org)
            (statement,) = re.findall(r"^```sql\n(.*?)^```$", OPERATIONS.read_text(), re.DOTALL | re.MULTILINE)
            with psycopg.connect(first) as connection:
                assert connection.execute(statement).rowcount == 1
            await until(lambda: member.dsn == second)
            await store(fleet, org)
            assert [one.accepted for one in await member.queue_admin.check()] == [1]
        async with opened(two(first, kept)) as fleet:
            await until_refused(fleet, org, "the database of another shard of these very names")
    finally:
        await asyncio.to_thread(postgres.drop, copy)


@pytest.mark.parametrize("whose", ["nobody's", "another cluster's"])
async def test_no_other_catalog_is_taken_for_the_one_that_was_there(
    postgres: Postgres, dsns: list[str], whose: str
) -> None:
    first, second, third = dsns
    name, another = (str(conninfo_to_dict(dsn)["dbname"]) for dsn in (first, third))
    if whose != "nobody's":
        # The shards of the other cluster have the same names, and its s2 has no data.
        async with opened(two(third, second, 'state = "off"')):
            pass
    async with opened(two(first, second)) as fleet:
        await up(fleet)
        near, org = org_on(fleet, S1), org_on(fleet, S2)
        await asyncio.to_thread(postgres.drop, name)
        await asyncio.to_thread(postgres.create, name, template=another)
        await until_refused(fleet, near, "its DSN leads to another database .* than it did before")
        refusal = "the catalog is unavailable: its DSN leads to another database .* than it did before"
        with pytest.raises(ShardUnavailable, match=refusal):
            await fleet.is_current(org, fleet.placement(org))
        # The other shard answers and has its data.
        assert fleet.placement(org).writes == (S2,)
        await store(fleet, org)


async def test_a_new_database_is_given_no_slot_that_has_left_the_shard_and_told_of_orgs_that_are_pinned_to_it(
    dsns: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, empty = dsns
    monkeypatch.setattr("router.fleet.catalog_copy._LOOK_S", 3600)
    async with opened(two(first, second)) as fleet:
        await up(fleet)
        slot, pinned = slot_of(org_on(fleet, S2)), org_on(fleet, S1)
    async with opened(two(first, empty)) as fleet:
        await until(lambda: "holds 8,192 slots" in fleet.shards()[S2].trouble)
        with psycopg.connect(first) as connection:
            connection.execute("UPDATE windrow.catalog SET epoch = 2")
            connection.execute(
                "UPDATE windrow.placement SET writes = '{s1}', reads = '{s1}', epoch = 2, changed = 2 WHERE slot = %s",
                [slot],
            )
            connection.execute(
                "INSERT INTO windrow.placement (slot, writes, reads, epoch, changed) VALUES (%s, '{s2}', '{s2}', 2, 2)",
                [SLOTS],
            )
            connection.execute(
                "INSERT INTO windrow.pin (org, slot, epoch, shard) VALUES (%s, %s, 2, 's2')", [pinned, SLOTS]
            )
            connection.execute("DELETE FROM windrow.shard WHERE shard = 's2'")
        await up(fleet)
        with psycopg.connect(empty) as connection:
            owned = {number for (number,) in connection.execute("SELECT slot FROM windrow.owned_slot")}
        assert (len(owned), slot in owned, SLOTS in owned) == (8192, False, True)
        await store(fleet, pinned)


@pytest.mark.parametrize("finds_none", [True, False])
async def test_a_read_of_an_org_that_moves_meanwhile_is_repeated_where_it_is_then(
    dsns: list[str], finds_none: bool
) -> None:
    first, second, _ = dsns
    asked: list[ShardName] = []
    async with opened(two(first, second)) as fleet:
        await up(fleet)
        org = org_on(fleet, S1)

        async def look(member: ShardHandle) -> list[str]:
            asked.append(member.name)
            if asked == [S1]:
                with psycopg.connect(first) as connection:
                    connection.execute("UPDATE windrow.catalog SET epoch = 2")
                    connection.execute(
                        "UPDATE windrow.placement SET writes = '{s2}', reads = '{s2}', epoch = 2, changed = 2 "
                        "WHERE slot = %s",
                        [slot_of(org)],
                    )
            if finds_none:
                raise UnknownQueue(org, QueueName("mail"))
            return [member.name]

        if finds_none:
            with pytest.raises(UnknownQueue):
                await fleet.read(org, look)
        else:
            assert await fleet.read(org, look) == [S2]
    assert asked == [S1, S2]


async def test_no_cluster_is_founded_beside_a_shard_of_another(dsns: list[str]) -> None:
    first, second, empty = dsns
    async with opened(two(first, second)) as fleet:
        await up(fleet)
    ready = asyncio.Event()
    with pytest.raises(Misconfigured, match=r"the catalog's database is empty, but shard 's2' has slots"):
        await Fleet(two(empty, second), connections_per_shard=1, sweep_s=0.2, buffer=Buffer(2**20)).run(ready)
    assert is_empty(empty)
    # The router does not contact a shard that is off. When the shard is switched on, the router checks it, and refuses
    # it.
    async with opened(two(empty, second, 'state = "off"')) as fleet:
        await fleet.change(two(empty, second))
        await until(lambda: "another shard of these very names" in fleet.shards()[S2].trouble)


async def test_a_shard_whose_database_lost_the_catalog_is_refused(dsns: list[str]) -> None:
    first, second, empty = dsns
    async with opened(two(first, second)) as fleet:
        await up(fleet)
        await fleet.change(two(empty, second))
        await until(lambda: "a database without a catalog" in fleet.shards()[S1].trouble)
        await store(fleet, org_on(fleet, S1))
    assert is_empty(empty)


async def test_routers_that_found_a_cluster_at_once_all_come_up(
    dsns: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, *_ = dsns
    async with opened(two(first, second)) as fleet:
        await up(fleet)
        looks, is_founded = itertools.count(), catalog.is_founded

        async def founded_later(database: Database, *, cluster: str) -> bool:
            """Simulates a process that reads the catalog just before another process founds the catalog, and that reads
            the shards afterwards."""
            return next(looks) > 0 and await is_founded(database, cluster=cluster)

        monkeypatch.setattr(catalog, "is_founded", founded_later)
        async with opened(two(first, second)) as late:
            await up(late)
    assert next(looks) > 1


async def test_a_cluster_file_that_cannot_be_taken_up_leaves_the_shards_as_they_were(
    server: Server, spare_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    off, both = (cluster_of(server, spare_dsn, f'weight = 0\nstate = "{state}"') for state in ("off", "active"))
    make = ShardHandle.__init__

    def fail(member: ShardHandle, entry: ShardEntry, **options: Any) -> None:
        if entry.name == S2:
            raise MemoryError
        make(member, entry, **options)

    async with opened(off) as fleet:
        before = dict(fleet.shards())
        with monkeypatch.context() as patch:
            patch.setattr(ShardHandle, "__init__", fail)
            with pytest.raises(MemoryError):
                await fleet.change(both)
        assert fleet.shards() == before
        assert await fleet.member(S1).store.get(OrgId("o"), [], include_payload=False) == []
        # The next try succeeds.
        await fleet.change(both)
        await up(fleet)


async def test_workflows_with_much_work_do_not_hold_up_the_sweeps_of_the_lanes(
    server: Server, spare_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, lanes = asyncio.Event(), asyncio.Semaphore(0)

    async def sweep_workflows(_: WorkflowSweep) -> None:
        begun.set()
        await asyncio.Event().wait()

    async def sweep_lanes(_: WaitRoom) -> bool:
        lanes.release()
        return True

    monkeypatch.setattr(WorkflowSweep, "sweep", sweep_workflows)
    monkeypatch.setattr(WaitRoom, "sweep", sweep_lanes)
    async with opened(cluster_of(server, spare_dsn, None)):
        await asyncio.wait_for(begun.wait(), PATIENCE_S)
        for _ in range(3):
            await asyncio.wait_for(lanes.acquire(), PATIENCE_S)
