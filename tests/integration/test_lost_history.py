"""A shard whose database has gone back in time is refused until an operator accepts the loss of history. Then the stray
jobs of the shard are moved to where their orgs live, and no job runs twice."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
from collections.abc import AsyncGenerator, Coroutine, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from balancer import differences, recovery
from balancer.recovery import Recovery, find_loss, recover
from balancer.service import balance_once
from balancer.shards import open_shards
from shard.admin.queue_admin import QueueAdmin
from shard.errors import LostHistory, Misconfigured, ShardUnavailable, UnknownSchedule, UnknownWorkflow
from shard.placement import catalog, identity, marks, move_steps, pins
from shard.placement.catalog import Move
from shard.placement.cluster_file import parse_cluster
from shard.placement.pins import OnShard
from shard.postgres.pool import Database
from shard.queue.settle import Nack, Settlement
from shard.queue_settings import QueueSettings
from shard.schedule import CatchUp, Overlap, ScheduleSpec
from shard.vocabulary import CATALOG, Answer, Failure, JobId, NewJobs, OrgId, QueueName, ShardName
from tests import timemachine
from tests.command import Done, windrow
from tests.conftest import CLUSTER
from tests.integration.test_fleet import opened, org_on, store, two, until, until_refused, up
from tests.jobs import HOUR_US, QUEUE, ids_of, job_id, lease_jobs, some_jobs
from tests.pair import A, B, Died, Fate, Mortal, Pair, deaths, open_pair
from tests.postgres import Server
from tests.routers import PATIENCE_S, running_routers, write_cluster
from tests.routers import until as wait_until
from tests.schedules import DAILY
from tests.schedules import Shard as Schedules
from tests.workflows import Flows

T = TypeVar("T")
_numbers = itertools.count(1)
DAY_MS = 24 * 3_600_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Backups:
    """Backups of s2's database. No session may be connected while a backup is made."""

    server: Server
    name: str

    @property
    def dsn(self) -> str:
        return self.server.dsn(self.name)

    def make(self) -> None:
        self.server.create(f"{self.name}_backup", template=self.name)

    def put_back(self) -> None:
        """Restores the backup. This disconnects all sessions."""
        self.server.drop(self.name)
        self.server.create(self.name, template=f"{self.name}_backup")


@pytest.fixture
def backups(postgres: Server) -> Iterator[Backups]:
    made = Backups(server=postgres, name=f"history_{next(_numbers)}")
    postgres.create(made.name)
    yield made
    postgres.drop(made.name)
    with contextlib.suppress(psycopg.Error):
        postgres.drop(f"{made.name}_backup")


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes routers write marks often, and read the catalog often."""
    monkeypatch.setattr("router.fleet.shard_handle.MARK_S", 0.05)
    monkeypatch.setattr("router.fleet.catalog_copy._LOOK_S", 0.1)


def confirmed_mark(catalog_dsn: str, shard: str = "s2") -> int:
    with psycopg.connect(catalog_dsn) as connection:
        row = connection.execute("SELECT mark FROM windrow.shard WHERE shard = %s", [shard]).fetchone()
    return row[0] or 0 if row else 0


async def mark(catalog_dsn: str, shard_dsn: str) -> None:
    """Writes a mark as routers do. The mark covers everything that was done on s2 until now."""
    async with connected({A: catalog_dsn, B: shard_dsn}) as databases:
        await marks.mark(databases[B], databases[A])


# ── Routers ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.usefixtures("fast")
async def test_a_backup_put_back_without_a_move_is_refused_until_somebody_accepts_it(
    spare_dsn: str, backups: Backups
) -> None:
    cluster = two(spare_dsn, backups.dsn)
    async with opened(cluster) as fleet:
        await up(fleet)
        near, org = org_on(fleet, A), org_on(fleet, B)
        await store(fleet, org)
        await mark(spare_dsn, backups.dsn)
    backups.make()
    async with opened(cluster) as fleet:
        await up(fleet)
        await store(fleet, org)
        await mark(spare_dsn, backups.dsn)
        # Restore the backup while a router runs. The router may store jobs on the restored shard before it notices the
        # restore.
        backups.put_back()
        unnoticed = await until_refused(
            fleet, org, "has lost history: .* accept the loss by `windrow shards accept s2 --config FILE`"
        )
        await store(fleet, near)
    # A router that starts now refuses the shard too.
    async with opened(cluster) as fleet:
        await until_refused(fleet, org, "has lost history")
        await store(fleet, near)
        async with open_shards(cluster) as shards:
            # Write a mark, as a router may do before it has noticed the loss.
            while await marks.make(shards.databases[B]) is None:
                pass
            loss = await find_loss(shards.databases[B], shards.catalog, cluster=cluster.name)
            assert loss is not None
            assert (loss.slots_come, loss.slots_left) == (0, 0)
            assert loss.newest is not None
            assert loss.newest_at is not None
            assert loss.newest < loss.confirmed.number
            assert loss.newest_at < loss.confirmed.at
            await recovery.accept(loss, shards.databases, shards.catalog, cluster=cluster.name)
            assert await find_loss(shards.databases[B], shards.catalog, cluster=cluster.name) is None
        member = await up(fleet)
        await store(fleet, org)
        assert [(one.accepted, one.balanced) for one in await member.queue_admin.check()] == [(2 + unnoticed, True)]
        # Routers confirm marks again, now those of the new history.
        before = confirmed_mark(spare_dsn)
        await store(fleet, org)
        await until(lambda: confirmed_mark(spare_dsn) > before)


@pytest.mark.usefixtures("fast")
async def test_a_router_that_learns_of_a_mark_late_refuses_the_shard_then(spare_dsn: str, backups: Backups) -> None:
    """The router connected to the old copy before it learned of the newer mark."""
    cluster = two(spare_dsn, backups.dsn)
    async with opened(cluster) as fleet:
        await up(fleet)
        org = org_on(fleet, B)
        await store(fleet, org)
        await mark(spare_dsn, backups.dsn)
        with psycopg.connect(spare_dsn) as connection:
            # Another router confirmed this mark just before the shard went back in time.
            connection.execute(
                "UPDATE windrow.shard SET mark = mark + 5, mark_token = gen_random_uuid() WHERE shard = 's2'"
            )
        member = fleet.member(B)
        for database in member._databases:
            database.hang_up()
        await until_refused(fleet, org, "has lost history")


@pytest.mark.usefixtures("fast")
async def test_a_later_mark_is_never_confirmed_for_a_database_that_lacks_an_earlier_one(
    spare_dsn: str, backups: Backups
) -> None:
    cluster = two(spare_dsn, backups.dsn)
    async with opened(cluster) as fleet:
        await up(fleet)
        await store(fleet, org_on(fleet, B))
        await mark(spare_dsn, backups.dsn)
    backups.make()
    async with open_shards(cluster) as shards:
        shard = shards.databases[B]
        await marks.mark(shard, shards.catalog)
        lost = await marks.confirmed(shards.catalog, B)
    backups.put_back()
    async with open_shards(cluster) as shards:
        shard = shards.databases[B]
        # A process that has not noticed the loss writes marks.
        for _ in range(5):
            made = await marks.make(shard)
            assert made is not None
            assert not await marks.confirm(shards.catalog, B, made)
        assert await marks.confirmed(shards.catalog, B) == lost
        with pytest.raises(LostHistory):
            await marks.mark(shard, shards.catalog)


@pytest.mark.usefixtures("fast")
async def test_routers_mark_a_shard_that_they_change_and_no_other(
    spare_dsn: str, backups: Backups, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(two(spare_dsn, backups.dsn)) as fleet:
        await up(fleet)
        member, org = fleet.member(B), org_on(fleet, B)
        databases = [one for name in (A, B) for one in fleet.member(name)._databases]
        await until(lambda: confirmed_mark(spare_dsn) and not any(one.changed for one in databases))
        make, made = marks.make, list[Database]()

        async def record(shard: Database, *, apart_s: float) -> marks.Made | None:
            made.append(shard)
            return await make(shard, apart_s=apart_s)

        monkeypatch.setattr(marks, "make", record)
        await member.store.get(org, [job_id()], include_payload=False)
        assert await lease_jobs(member.store, org) == []
        await member.room.sweep()
        await member._mark()
        assert made == []
        # A change by an operator needs a mark too.
        await member.queue_admin.create_queue(org, QUEUE, QueueSettings(max_attempts=3))
        await until(lambda: made)


async def test_a_router_writes_no_further_mark_before_the_catalog_has_confirmed_the_last(
    spare_dsn: str, backups: Backups, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.fleet.shard_handle.MARK_S", 3600.0)

    async def away(*_: object) -> bool:
        raise ShardUnavailable(CATALOG, "it is away")

    async with opened(two(spare_dsn, backups.dsn)) as fleet:
        await up(fleet)
        member, org = fleet.member(B), org_on(fleet, B)
        await store(fleet, org)
        confirm = member._confirm
        monkeypatch.setattr(member, "_confirm", away)
        for _ in range(3):
            with pytest.raises(ShardUnavailable, match="it is away"):
                await member._mark()
        assert await member._queue_database.run(b"SELECT count(*) FROM windrow.mark", {}) == [(1,)]
        monkeypatch.setattr(member, "_confirm", confirm)
        await member._mark()
        assert confirmed_mark(spare_dsn) == 1
        # The confirmed mark does not cover what was done after the mark was written.
        assert member._queue_database.changed


@pytest.mark.usefixtures("fast")
async def test_a_catalog_that_was_restored_refuses_no_shard_and_is_reported(
    postgres: Server, backups: Backups, caplog: pytest.LogCaptureFixture
) -> None:
    """The catalog is in the database of s1, and is restored to a time before a move. So s2 knows later moves than the
    catalog."""
    shards, place = [f"history_{next(_numbers)}" for _ in range(2)]
    cluster = two(postgres.create(shards), backups.dsn)
    name = str(conninfo_to_dict(cluster.shards[0].dsn)["dbname"])
    try:
        async with opened(cluster) as fleet:
            await up(fleet)
            org = org_on(fleet, B)
            await store(fleet, org)
            await mark(cluster.catalog_dsn, backups.dsn)
        postgres.create(place, template=name)
        async with open_shards(cluster) as opened_shards:
            known = await catalog.read(opened_shards.catalog)
            move = await catalog.begin_move(opened_shards.catalog, known, [known.slot(org)], target=A)
            assert move is not None
            mover = recovery_mover(opened_shards.catalog, opened_shards.databases, move)
            await mover
            for _ in range(120):
                await marks.mark(opened_shards.databases[B], opened_shards.catalog)
        postgres.drop(name)
        postgres.create(name, template=place)
        async with opened(cluster) as fleet:
            await up(fleet)
            await until(lambda: f"shard 's2' knows of epoch {move.epoch}, and the catalog of 1 only" in caplog.text)
            # Marks are confirmed again.
            other = next(one for one in orgs_of(fleet) if one != org)
            before = confirmed_mark(cluster.catalog_dsn)
            await store(fleet, other)
            await until(lambda: confirmed_mark(cluster.catalog_dsn) > before)
        done = await asyncio.to_thread(windrow_on, cluster.catalog_dsn, backups.dsn, "doctor", "--json")
        assert "the shard knows later moves than the catalog" in done.out
    finally:
        for one in (shards, place):
            postgres.drop(one)


def orgs_of(fleet: object) -> Iterator[OrgId]:
    names = (OrgId(f"org-{number}") for number in itertools.count())
    return (name for name in names if fleet.placement(name).writes == (B,))  # type: ignore[attr-defined]


async def recovery_mover(catalog_database: Database, databases: Mapping[ShardName, Database], move: Move) -> None:
    from balancer.move import Mover, Pace

    pace = Pace(rest=0.0, poll_s=0.02)
    await Mover(catalog_database, databases, move.epoch, pace=pace, report=lambda _: None).finish()


# ── Losses around a move ─────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_backup_from_before_a_move_is_refused_though_nothing_else_was_done_since(
    fresh_dsn: str, backups: Backups, org: OrgId
) -> None:
    async with open_pair(fresh_dsn, backups.dsn) as pair:
        await pair.store(A).enqueue(some_jobs(org, 2))
        await pair.move([org], target=B)
    backups.make()
    async with open_pair(fresh_dsn, backups.dsn) as pair:
        await pair.move([org], target=A)
    backups.put_back()
    with pytest.raises(LostHistory):
        async with open_pair(fresh_dsn, backups.dsn):
            pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Gone:
    """The jobs that s2 had at the time of the backup, keyed by queue. The name of a queue says what becomes of its
    job."""

    ids: dict[str, JobId]
    # The epochs of the move to s2 and of the move back.
    epoch: int
    back: int


async def go_back_in_time(dsn: str, backups: Backups, org: OrgId) -> Gone:
    """Moves an org to s2 and back. Then restores s2 to the time between the two moves."""
    ids: dict[str, JobId] = {}
    async with open_pair(dsn, backups.dsn) as pair:
        for what in ("acked", "cancelled", "ready", "died", "scheduled", "waits"):
            jobs = some_jobs(org, 1, queue=what, delay_us=HOUR_US if what == "scheduled" else None)
            await pair.store(A).enqueue(jobs)
            (ids[what],) = ids_of(jobs)
        move = await pair.move([org], target=B)
        ((_, lease),) = await lease_jobs(pair.store(B), org, queue="died")
        assert await pair.store(B).settle(
            Settlement.nack(org, [Nack(lease=lease, failure=Failure(permanent=True))])
        ) == [Answer.OK]
    backups.make()
    async with open_pair(dsn, backups.dsn) as pair:
        back = await pair.move([org], target=A)
        ((_, lease),) = await lease_jobs(pair.store(A), org, queue="acked")
        assert await pair.store(A).settle(Settlement.ack(org, [lease])) == [Answer.OK]
        assert await pair.store(A).cancel(org, [ids["cancelled"]], reason="why") == [Answer.OK]
    backups.put_back()
    return Gone(ids=ids, epoch=move.epoch, back=back.epoch)


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The databases of both shards in a certain state. Tests use only copies of these databases."""

    server: Server
    names: tuple[str, str]

    @contextlib.contextmanager
    def copied(self) -> Iterator[tuple[str, Backups]]:
        """Copies both databases. Yields the DSN of the copy of s1, and the `Backups` of the copy of s2. Both copies are
        dropped at the end of the `with` block."""
        first, second = [f"history_{next(_numbers)}" for _ in range(2)]
        with contextlib.ExitStack() as stack:
            for name, template in zip((first, second), self.names, strict=True):
                self.server.create(name, template=template)
                stack.callback(self.server.drop, name)
            yield self.server.dsn(first), Backups(server=self.server, name=second)


# All tests that copy the snapshot use this org. They do not disturb each other, because each test has its own
# databases.
LOST_ORG = OrgId("lost-org")


@pytest.fixture(scope="module")
def gone(postgres: Server, template: str) -> Iterator[tuple[Gone, Snapshot]]:
    """s2 has gone back in time. The test module makes this state once and copies it, because a copy takes far less
    time."""
    made = Snapshot(server=postgres, names=("history_first", "history_second"))
    first, second = made.names
    backups = Backups(server=postgres, name=second)
    try:
        postgres.create(first, template=template)
        postgres.create(second)
        yield in_thread(go_back_in_time(postgres.dsn(first), backups, LOST_ORG)), made
    finally:
        for name in (first, second, f"{second}_backup"):
            with contextlib.suppress(psycopg.Error):
                postgres.drop(name)


@pytest.fixture(scope="module")
def accepted(gone: tuple[Gone, Snapshot]) -> Iterator[Snapshot]:
    """Yields both databases as they are after an operator has accepted the loss."""
    with gone[1].copied() as (dsn, backups):
        in_thread(accept_all(dsn, backups))
        yield Snapshot(server=backups.server, names=(str(conninfo_to_dict(dsn)["dbname"]), backups.name))


def in_thread(work: Coroutine[Any, Any, T]) -> T:
    """Runs the coroutine in another thread, because an event loop may already run in this one."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, work).result()


async def accept_all(dsn: str, backups: Backups) -> None:
    async with connected({A: dsn, B: backups.dsn}) as databases:
        loss = await find_loss(databases[B], databases[A], cluster=CLUSTER)
        assert loss is not None
        await recovery.accept(loss, databases, databases[A], cluster=CLUSTER)


@contextlib.asynccontextmanager
async def connected(dsns: Mapping[ShardName, str]) -> AsyncGenerator[dict[ShardName, Database]]:
    databases = {name: Database(name, dsn, connections=2) for name, dsn in dsns.items()}
    try:
        for database in databases.values():
            await database.open()
        yield databases
    finally:
        for database in databases.values():
            await database.close()


def windrow_on(first: str, second: str, *arguments: str) -> Done:
    path = Path(os.environ.get("TMPDIR", "/tmp")) / f"windrow-history-{os.getpid()}-{next(_numbers)}.toml"
    try:
        return windrow(*arguments, "--config", str(write_cluster(path, {"s1": first, "s2": second}, name="windrow")))
    finally:
        path.unlink()


@pytest.fixture
def lost(gone: tuple[Gone, Snapshot]) -> Iterator[tuple[Gone, str, Backups]]:
    """s2 has gone back in time, and nobody has accepted the loss."""
    jobs, snapshot = gone
    with snapshot.copied() as (dsn, backups):
        yield jobs, dsn, backups


@pytest.mark.timeout(300)
def test_operators_accept_a_loss_see_stray_jobs_and_recover_them(
    tmp_path: Path, lost: tuple[Gone, str, Backups]
) -> None:
    org, (gone, dsn, backups) = LOST_ORG, lost
    config = write_cluster(tmp_path / "cluster.toml", {"s1": dsn, "s2": backups.dsn})
    at = ("--config", str(config))
    with running_routers(config) as routers:
        to = ("--address", routers.address)
        listed = windrow("shards", *to)
        assert listed.code == 1
        assert "accept the loss by `windrow shards accept s2 --config FILE`" in " ".join(listed.out.split())
        examined = windrow("doctor", "--json", "--shard", "s2", *at)
        assert "the shard has lost history" in examined.out
        planned = windrow("shards", "plan", *at)
        assert planned.code == 5
        assert "has lost history" in planned.err
        refused = windrow("shards", "accept", "s2", *at)
        assert refused.code == 2
        assert "slots that arrived since: 0" in refused.out
        assert "that left since: 1" in refused.out
        assert "confirm with --yes" in refused.err
        assert windrow("shards", "recover", "s2", *at).code == 5
        told = windrow("shards", "differences", "s2", *at, "--json")
        assert told.code == 0, told.err
        loss, *differences = told.documents
        assert (loss["lost_history"], loss["slots_left"]) == (True, 1)
        fates = {one["id"]: (one["org"], one["fate"], one["known_on"]) for one in differences}
        assert fates == dict.fromkeys(gone.ids.values(), (org, "deleted", "s1"))
        shown = windrow("shards", "differences", "s2", *at)
        assert "a copy that another shard knows is deleted" in " ".join(shown.out.split())
        assert [line.split() for line in shown.lines if "acked" in line] == [
            [org, "acked", "ready", "deleted", "s1", "1"]
        ]
        accepted = windrow("shards", "accept", "s2", *at, "--yes")
        assert accepted.code == 0, accepted.err
        again = windrow("shards", "differences", "s2", *at)
        assert (again.code, "has lost nothing" in again.out) == (0, True)
        again = windrow("shards", "accept", "s2", *at)
        assert (again.code, "nothing to accept" in again.out) == (0, True)
        wait_until(lambda: windrow("shards", *to).code == 0, "all shards are up")

        checked = windrow("check", "--json", *to)
        assert checked.code == 1
        assert f'"stray": [{{"org": "{org}", "jobs": 6, "home_shard": "s1"}}]' in checked.out
        told = windrow("check", *to)
        assert "6 stray: the org lives on s1" in " ".join(told.out.split())
        assert "shard s2 has 6 stray jobs" in told.err
        recovered = windrow("shards", "recover", "s2", *at, "--json")
        assert recovered.code == 0, recovered.err
        assert f'{{"org": "{org}", "home_shard": "s1", "brought": 0, "known": 6}}' in recovered.out
        assert windrow("check", *to).code == 0
        assert "no stray jobs" in windrow("shards", "recover", "s2", *at).out
        job = windrow("jobs", "get", org, gone.ids["acked"], "--json", *to)
        assert '"state": "succeeded"' in job.out


# ── Bringing jobs home ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
async def pair(accepted: Snapshot) -> AsyncGenerator[Pair, None]:
    """s2 has gone back in time, and the loss was accepted."""
    with accepted.copied() as (dsn, backups):
        async with open_pair(dsn, backups.dsn) as opened_pair:
            yield opened_pair


async def run(pair: Pair, *, older: bool = False) -> Recovery:
    return await recover(B, pair.databases, pair.catalog, cluster=CLUSTER, older=older)


async def stray(pair: Pair, jobs: NewJobs) -> None:
    """Stores jobs on s2 as routers with an old placement may have done before they were refused."""
    slot = (await pair.known()).slot(jobs.org)
    ((epoch,),) = await pair.databases[B].run(
        b"UPDATE windrow.owned_slot SET state = 'owned' WHERE slot = %(slot)s RETURNING epoch", {"slot": slot}
    )
    assert await pair.store(B).enqueue(jobs, epoch=epoch) == {}
    await pair.databases[B].run(
        b"UPDATE windrow.owned_slot SET state = 'draining' WHERE slot = %(slot)s", {"slot": slot}
    )


async def enqueue(pair: Pair, jobs: NewJobs) -> None:
    assert await pair.store(A).enqueue(jobs, epoch=(await pair.known()).placement(jobs.org).epoch) == {}


def counts(done: Recovery) -> tuple[int, int]:
    return sum(one.brought for one in done.orgs), sum(one.known for one in done.orgs)


async def states(pair: Pair, org: OrgId, ids: list[JobId]) -> dict[tuple[str, JobId], str]:
    return {key: record.state for key, record in (await pair.jobs(org, ids)).items()}


async def test_jobs_that_nobody_else_knows_are_brought_home_whole(pair: Pair) -> None:
    org = LOST_ORG
    await run(pair)
    jobs = some_jobs(org, 3, dedup_keys=["a", "b", "c"], priority=2)
    await stray(pair, jobs)
    later = some_jobs(org, 1, delay_us=HOUR_US, queue="another")
    await stray(pair, later)
    before = await pair.jobs(org, [*ids_of(jobs), *ids_of(later)])
    assert counts(await run(pair)) == (4, 0)
    after = await pair.jobs(org, [*ids_of(jobs), *ids_of(later)])
    assert {(A, job): record for (_, job), record in before.items()} == after
    await pair.balance()
    assert len(await lease_jobs(pair.store(A), org, max_jobs=10)) == 3
    assert counts(await run(pair)) == (0, 0)


@pytest.mark.parametrize("has_ended", [True, False])
async def test_a_blocked_job_whose_node_has_ended_at_home_runs_again(pair: Pair, has_ended: bool) -> None:
    """In the backup the job is blocked. The workflow has moved away since. If `has_ended`, the job has also run since,
    and its end was lost with the shard."""
    org = LOST_ORG
    await run(pair)
    home = Flows(pair.databases[A], org)
    flow = await home.start({"a": [], "b": ["a"]}, epoch=(await pair.known()).placement(org).epoch)
    lost = home.job(flow, "b")
    if has_ended:
        assert await home.run_all() == [{"a"}, {"b"}]
    await pair.databases[A].run(b"DELETE FROM windrow.finished WHERE id = %(id)s::uuid", {"id": lost})
    await pair.databases[A].run(b"DELETE FROM windrow.job WHERE id = %(id)s::uuid", {"id": lost})
    await stray(pair, some_jobs(org, ids=[lost]))
    await pair.databases[B].run(
        b"UPDATE windrow.job SET run_at = 'infinity', visible_at = 'infinity', workflow_node = %(node)s "
        b"WHERE id = %(id)s::uuid",
        {"id": lost, "node": f"{flow.id}/1"},
    )
    assert counts(await run(pair)) == (1, 0)
    assert await home.run_all() == ([{"b"}] if has_ended else [{"a"}, {"b"}])
    assert await home.state(flow) == "succeeded"
    await home.check()


async def test_a_blocked_job_whose_node_waits_for_a_signal_at_home_never_runs(pair: Pair) -> None:
    org = LOST_ORG
    await run(pair)
    home = Flows(pair.databases[A], org)
    epoch = (await pair.known()).placement(org).epoch
    flow = await home.start({"a": [], "b": ["a"]}, epoch=epoch, signals=["b"])
    lost = home.job(flow, "b")
    assert await home.run_all() == [{"a"}]
    await pair.databases[A].run(b"DELETE FROM windrow.job WHERE id = %(id)s::uuid", {"id": lost})
    await stray(pair, some_jobs(org, ids=[lost]))
    await pair.databases[B].run(
        b"UPDATE windrow.job SET run_at = 'infinity', visible_at = 'infinity', workflow_node = %(node)s "
        b"WHERE id = %(id)s::uuid",
        {"id": lost, "node": f"{flow.id}/1"},
    )
    assert counts(await run(pair)) == (1, 0)
    assert await home.claim() == set()
    await home.check()
    assert await home.signal(flow, "b")
    assert await home.state(flow) == "succeeded"


async def test_a_job_that_has_finished_where_its_org_lives_never_runs_again(pair: Pair) -> None:
    org = LOST_ORG
    await run(pair)
    jobs = some_jobs(org, 2)
    await stray(pair, jobs)
    await enqueue(pair, jobs)
    ((_, lease),) = await lease_jobs(pair.store(A), org, max_jobs=1)
    assert await pair.store(A).settle(Settlement.ack(org, [lease])) == [Answer.OK]
    assert counts(await run(pair)) == (0, 2)
    found = await states(pair, org, ids_of(jobs))
    assert {shard for shard, _ in found} == {A}
    assert sorted(found.values()) == ["ready", "succeeded"]
    await pair.balance()


async def test_jobs_that_were_known_at_home_have_one_record_each_when_their_org_comes_back(pair: Pair) -> None:
    org = LOST_ORG
    await run(pair)
    jobs = some_jobs(org, 3)
    await stray(pair, jobs)
    await enqueue(pair, jobs)
    ((job, lease),) = await lease_jobs(pair.store(A), org, max_jobs=1)
    assert await pair.store(A).settle(Settlement.ack(org, [lease])) == [Answer.OK]
    assert counts(await run(pair)) == (0, 3)
    await pair.move([org], target=B)
    ((_, other),) = await lease_jobs(pair.store(B), org, max_jobs=1)
    for _ in range(2):
        # Repeat the ack, as if the first answer had been lost.
        assert await pair.store(B).settle(Settlement.ack(org, [other])) == [Answer.OK]
    found = await states(pair, org, ids_of(jobs))
    assert found.pop((A, job.id)) == "succeeded"
    assert {shard for shard, _ in found} == {B}
    assert sorted(found.values()) == ["ready", "succeeded"]
    await pair.balance()


async def test_jobs_that_finish_while_they_are_being_brought_home_are_not_brought(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recovery asks the org's shard about the jobs. Only afterwards, the jobs reach that shard, and one of them
    finishes there."""
    org = LOST_ORG
    await run(pair)
    jobs = some_jobs(org, 2)
    await stray(pair, jobs)
    await stray(pair, dead := some_jobs(org, 1, queue="dead"))
    await pair.databases[B].run(
        b"""
        WITH gone AS (DELETE FROM windrow.job j WHERE j.id = ANY (%(ids)s::uuid[]) RETURNING j.*)
        INSERT INTO windrow.dead (id, queue_id, enqueued_at, run_at, priority, attempt, kind, payload, reason)
        SELECT id, queue_id, enqueued_at, run_at, priority, 1, kind, payload, 'killed' FROM gone
        """,
        {"ids": ids_of(dead)},
    )
    from shard.admin import strays

    bring, tried = strays.bring, list[object]()

    async def late(*arguments: object, **named: object) -> object:
        tried.append(None)
        if len(tried) == 1:
            await enqueue(pair, jobs)
            await enqueue(pair, dead)
            for _, lease in await lease_jobs(pair.store(A), org, max_jobs=1):
                assert await pair.store(A).settle(Settlement.ack(org, [lease])) == [Answer.OK]
        return await bring(*arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(strays, "bring", late)
    assert counts(await run(pair)) == (0, 3)
    found = await states(pair, org, [*ids_of(jobs), *ids_of(dead)])
    assert sorted(state for (shard, _), state in found.items() if shard == A) == ["ready", "ready", "succeeded"]
    await pair.balance()


async def test_jobs_under_a_lease_wait_until_it_ends_and_old_ones_until_it_is_asked_for(pair: Pair) -> None:
    org = LOST_ORG
    await run(pair)
    await stray(pair, some_jobs(org, 1))
    ((_, _),) = await lease_jobs(pair.store(B), org)
    done = await run(pair)
    assert (done.leased, counts(done)) == (1, (0, 0))
    await timemachine.end_leases(pair.databases[B], org)
    old = some_jobs(org, 1, ids=[job_id(ahead_ms=-6 * DAY_MS)])
    await stray(pair, old)
    past = job_id(ahead_ms=-8 * DAY_MS)
    await pair.databases[B].run(
        b"UPDATE windrow.job SET id = %(past)s::uuid WHERE id = %(id)s::uuid", {"past": past, "id": old.ids[0]}
    )
    done = await run(pair)
    assert (done.leased, done.moving, done.older, counts(done)) == (0, 0, 1, (1, 0))
    assert counts(await run(pair, older=True)) == (1, 0)
    assert await states(pair, org, [past]) == {(A, past): "ready"}
    await pair.balance()


async def test_jobs_of_an_org_that_was_pinned_elsewhere_since_go_there(pair: Pair) -> None:
    """On the restored shard, the org is still in its hash slot."""
    org = LOST_ORG
    pinned = OrgId(f"{org}-pinned")
    await enqueue(pair, some_jobs(pinned))
    await pair.move([pinned], target=B)
    jobs = some_jobs(pinned)
    await pair.store(B).enqueue(jobs, epoch=(await pair.known()).placement(pinned).epoch)
    await pins.pin(pair.catalog, pinned, OnShard(A))
    slots = await pair.slots([(await pair.known()).slot(pinned)])
    assert slots[B] == []
    # Make the catalog say that the org had moved to s1, as if the backup were older than that move.
    await pair.catalog.run(
        b"UPDATE windrow.placement SET writes = '{s1}', reads = '{s1}', epoch = epoch + 1 WHERE slot = %(slot)s",
        {"slot": (await pair.known()).slot(pinned)},
    )
    await pair.catalog.run(b"UPDATE windrow.catalog SET epoch = epoch + 1", {})
    await pair.catalog.run(
        b"UPDATE windrow.placement SET changed = (SELECT epoch FROM windrow.catalog) WHERE slot = %(slot)s",
        {"slot": (await pair.known()).slot(pinned)},
    )
    known = await pair.known()
    assert await pins.adopt(pair.databases[A], await pins.read_on(pair.catalog, A))
    await catalog.grant_slots(pair.databases[A], known)
    done = await run(pair)
    assert {one.org: (one.home, one.brought) for one in done.orgs}[pinned] == (A, 2)
    await pair.balance()


async def test_no_slot_moves_to_a_shard_that_has_stray_jobs_of_it(pair: Pair) -> None:
    """Otherwise the stray jobs would be claimed on that shard, although they may have run on another shard."""
    org = LOST_ORG
    await pins.pin(pair.catalog, org, OnShard(B))
    text = f'[cluster]\nname = "{CLUSTER}"\n'
    text += "".join(
        f"[[shard]]\nname = '{name}'\ndsn = '''{dsn}'''\nweight = {int(name == A)}\n" for name, dsn in pair.dsns.items()
    )
    cluster = parse_cluster(text, source="test")
    with pytest.raises(
        Misconfigured, match=r"'s2' has stray jobs of slots .* `windrow shards recover s2 --config FILE`"
    ):
        await asyncio.wait_for(balance_once(cluster, stop=asyncio.Event()), PATIENCE_S)
    assert await pair.placement(org) == ((A,), (A,))
    assert counts(await run(pair)) == (0, 6)
    await asyncio.wait_for(balance_once(cluster, stop=asyncio.Event()), PATIENCE_S)
    assert await pair.placement(org) == ((B,), (B,))
    await pair.balance()


@pytest.mark.thorough
@pytest.mark.turns(2)
@pytest.mark.parametrize("how", ["unheard", "cut"])
@pytest.mark.timeout(600)
async def test_a_recovery_is_finished_by_another_wherever_the_first_one_died(pair: Pair, how: str) -> None:
    org = LOST_ORG
    await run(pair)
    for at in deaths(how):
        unknown, known = some_jobs(org, 3), some_jobs(org, 2)
        await stray(pair, unknown)
        await stray(pair, known)
        await enqueue(pair, known)
        fate = Fate(at=at, how=how)
        catalog_database = Mortal(A, pair.dsns[A], fate)
        mortals = {name: Mortal(name, dsn, fate) for name, dsn in pair.dsns.items()}
        for database in (catalog_database, *mortals.values()):
            await database.open()
        try:
            await asyncio.create_task(recover(B, mortals, catalog_database, cluster=CLUSTER))
        except (Died, ShardUnavailable, asyncio.CancelledError):
            await pair.balance()
        finally:
            for database in (catalog_database, *mortals.values()):
                await database.close()
        await run(pair)
        found = await states(pair, org, [*ids_of(unknown), *ids_of(known)])
        live = sorted(key for key, state in found.items() if state == "ready")
        assert live == sorted((A, job) for job in [*ids_of(unknown), *ids_of(known)])
        await pair.balance()
        if fate.acts < at:
            assert at > 6, fate.names
            break
        await pair.store(A).cancel(org, [*ids_of(unknown), *ids_of(known)], reason="")


async def test_operators_that_recover_at_the_same_time_move_each_job_once(pair: Pair) -> None:
    org = LOST_ORG
    await run(pair)
    stored: dict[OrgId, NewJobs] = {}
    for number in range(4):
        stored[OrgId(f"{org}-{number}")] = some_jobs(org, 40, queue=f"q{number}")
    for jobs in stored.values():
        await stray(pair, jobs)
    async with contextlib.AsyncExitStack() as stack:
        operators = [await stack.enter_async_context(connected(pair.dsns)) for _ in range(3)]
        await asyncio.gather(*(recover(B, databases, databases[A], cluster=CLUSTER) for databases in operators))
    ids = [job for jobs in stored.values() for job in ids_of(jobs)]
    found = await states(pair, org, ids)
    assert sorted(key for key, state in found.items() if state == "ready") == sorted((A, job) for job in ids)
    await pair.balance()


async def test_two_operators_who_accept_at_the_same_time_begin_one_history(lost: tuple[Gone, str, Backups]) -> None:
    org, (_, dsn, backups) = LOST_ORG, lost
    await asyncio.gather(*(accept_all(dsn, backups) for _ in range(3)), return_exceptions=True)
    async with connected({A: dsn, B: backups.dsn}) as databases:
        assert await identity.examine(databases[B], databases[A], cluster=CLUSTER)
        known = await catalog.read(databases[A])
        states_of = await move_steps.read_slots(databases[B], [known.slot(org)])
        assert [(one.state, one.epoch) for one in states_of.values()] == [("draining", known.placement(org).epoch)]


async def test_a_move_under_way_goes_on_after_its_target_was_restored_and_ends_after_its_source_was(
    fresh_dsn: str, backups: Backups, org: OrgId, other_org: OrgId
) -> None:
    async with open_pair(fresh_dsn, backups.dsn) as pair:
        await pair.store(A).enqueue(some_jobs(org, 10))
        await pair.store(A).enqueue(some_jobs(other_org, 10))
        await pair.move([other_org], target=B)
    backups.make()
    async with open_pair(fresh_dsn, backups.dsn) as pair:
        for orgs, target, steps in (([org], B, 3), ([other_org], A, 3)):
            move = await pair.begin(orgs, target=target)
            mover = pair.mover(move)
            for _ in range(steps):
                assert await mover.step()
            source = pair.databases[move.source]
            for chunk in (1, 2):
                chunks = {move.slots[0]: chunk}
                assert await move_steps.export_chunk(source, chunks, epoch=move.epoch, rows_max=3, bytes_max=10**6)
                departed = await move_steps.read_exported(source, move.slots, epoch=move.epoch)
                assert await move_steps.import_chunk(pair.databases[target], departed, epoch=move.epoch)
                if chunk == 1:
                    await move_steps.delete_exported(source, chunks, epoch=move.epoch)
        await marks.mark(pair.databases[B], pair.catalog)
    backups.put_back()
    await accept_all(fresh_dsn, backups)
    async with open_pair(fresh_dsn, backups.dsn) as pair:
        for move in await catalog.moves(pair.catalog):
            await pair.mover(move).finish()
        assert await pair.placement(org) == ((B,), (B,))
        assert await pair.placement(other_org) == ((A,), (A,))
        done = await run(pair)
        assert {one.org: (one.brought, one.known) for one in done.orgs} == {other_org: (4, 6)}
        assert len(await lease_jobs(pair.store(B), org, max_jobs=20)) == 7, "the first chunk is lost"
        assert len(await lease_jobs(pair.store(A), other_org, max_jobs=20)) == 10
        await pair.balance()


async def come_again(dsn: str, backups: Backups, org: OrgId) -> dict[str, JobId]:
    """Moves an org with jobs to s2, and makes a backup of s2. Then moves the org back to s1, and finishes one of its
    jobs there. Returns the jobs."""
    ids: dict[str, JobId] = {}
    async with open_pair(dsn, backups.dsn) as pair:
        for what in ("acked", "ready"):
            jobs = some_jobs(org, 1, queue=what)
            await pair.store(A).enqueue(jobs)
            (ids[what],) = ids_of(jobs)
        await pair.move([org], target=B)
    backups.make()
    async with open_pair(dsn, backups.dsn) as pair:
        await pair.move([org], target=A)
        ((_, lease),) = await lease_jobs(pair.store(A), org, queue="acked")
        assert await pair.store(A).settle(Settlement.ack(org, [lease])) == [Answer.OK]
    return ids


@pytest.mark.parametrize("steps", [0, 2, 3, None])
async def test_jobs_that_had_left_a_restored_shard_do_not_run_there_again_when_their_slot_comes_back(
    fresh_dsn: str, backups: Backups, org: OrgId, steps: int | None
) -> None:
    """The shard is lost while the slot moves to it. By then the move has only begun, has opened the slot on the target,
    has switched, or has moved all jobs."""
    ids = await come_again(fresh_dsn, backups, org)
    async with open_pair(fresh_dsn, backups.dsn) as pair:
        move = await pair.begin([org], target=B)
        mover = pair.mover(move)
        if steps is None:
            await mover.finish()
        for _ in range(steps or 0):
            assert await mover.step()
        await marks.mark(pair.databases[B], pair.catalog)
    backups.put_back()
    await accept_all(fresh_dsn, backups)
    async with open_pair(fresh_dsn, backups.dsn) as pair:
        # Routers read the shard as soon as the loss is accepted.
        assert await lease_jobs(pair.store(B), org, queue="acked") == []
        if steps is not None:
            assert await lease_jobs(pair.store(B), org, queue="ready") == []
            await pair.mover(move).finish()
        assert await pair.placement(org) == ((B,), (B,))
        ((job, lease),) = await lease_jobs(pair.store(B), org, queue="ready", max_jobs=9)
        # If the job had come back to s2, the restore has removed that copy. The backup has the only copy.
        assert job.id == ids["ready"]
        for _ in range(2):
            assert await pair.store(B).settle(Settlement.ack(org, [lease])) == [Answer.OK]
        (record,) = await pair.store(B).get(org, [job.id], include_payload=False)
        assert record.state == "succeeded"
        assert await lease_jobs(pair.store(B), org, queue="acked", max_jobs=9) == []
        assert await states(pair, org, [ids["acked"]]) == {(A, ids["acked"]): "succeeded"}
        await pair.balance()


async def test_a_slot_that_had_left_before_is_not_told_as_one_that_left_since(
    fresh_dsn: str, backups: Backups, org: OrgId
) -> None:
    async with open_pair(fresh_dsn, backups.dsn) as pair:
        await pair.store(A).enqueue(some_jobs(org, 1))
        for target in (B, A):
            await pair.move([org], target=target)
    backups.make()
    async with open_pair(fresh_dsn, backups.dsn) as pair:
        for target in (B, A):
            await pair.move([org], target=target)
        await marks.mark(pair.databases[B], pair.catalog)
    backups.put_back()
    async with connected({A: fresh_dsn, B: backups.dsn}) as databases:
        loss = await find_loss(databases[B], databases[A], cluster=CLUSTER)
    assert loss is not None
    assert (loss.slots_come, loss.slots_left) == (0, 0)


@pytest.mark.parametrize("is_back", [False, True])
async def test_the_list_names_each_job_once_and_says_what_becomes_of_it(
    fresh_dsn: str, backups: Backups, org: OrgId, is_back: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each page has one row."""
    monkeypatch.setattr("shard.admin.restored.ROWS_MAX", 1)
    ids = await come_again(fresh_dsn, backups, org)
    async with open_pair(fresh_dsn, backups.dsn) as pair:
        if is_back:
            await pair.move([org], target=B)
        await marks.mark(pair.databases[B], pair.catalog)
    backups.put_back()
    async with connected({A: fresh_dsn, B: backups.dsn}) as databases:
        loss = await find_loss(databases[B], databases[A], cluster=CLUSTER)
        assert loss is not None
        found = await differences.find(loss, databases[B], databases, databases[A], cluster=CLUSTER)
        jobs = [job async for page in found.jobs() for job in page]
        came = [one async for page in found.came() for one in page]
        slot = (await catalog.read(databases[A])).slot(org)
        await recovery.accept(loss, databases, databases[A], cluster=CLUSTER)
    # If the job went to s1 and came back, the restore has removed that copy. Then the backup has the only copy.
    fate, known_on = (differences.Fate.MAY_RUN_AGAIN, None) if is_back else (differences.Fate.DELETED, A)
    assert {(job.id, job.queue, job.state, job.fate, job.known_on) for job in jobs} == {
        (ids["acked"], "acked", "ready", differences.Fate.DELETED, A),
        (ids["ready"], "ready", "ready", fate, known_on),
    }
    assert len(jobs) == 2
    assert came == ([(org, slot, A)] if is_back else [])
    async with open_pair(fresh_dsn, backups.dsn) as pair:
        await run(pair)
        assert await lease_jobs(pair.store(B), org, queue="acked") == []
        assert len(await lease_jobs(pair.store(B if is_back else A), org, queue="ready", max_jobs=9)) == 1


async def test_a_job_that_no_shard_knows_is_listed_as_one_that_moves_home(lost: tuple[Gone, str, Backups]) -> None:
    """Routers with an old placement may have stored the job before they were refused."""
    gone, dsn, backups = lost
    unknown = JobId(job_id())
    async with connected({A: dsn, B: backups.dsn}) as databases:
        await databases[B].run(
            b"UPDATE windrow.job SET id = %(lost)s::uuid WHERE id = %(id)s::uuid",
            {"lost": unknown, "id": gone.ids["waits"]},
        )
        loss = await find_loss(databases[B], databases[A], cluster=CLUSTER)
        assert loss is not None
        found = await differences.find(loss, databases[B], databases, databases[A], cluster=CLUSTER)
        fates = {job.id: (job.fate, job.known_on) async for page in found.jobs() for job in page}
        assert fates.pop(unknown) == (differences.Fate.MOVED, None)
        assert set(fates.values()) == {(differences.Fate.DELETED, A)}
        await recovery.accept(loss, databases, databases[A], cluster=CLUSTER)
    async with open_pair(dsn, backups.dsn) as pair:
        assert counts(await run(pair)) == (1, 5)


@pytest.mark.parametrize("runs_again", [False, True])
async def test_runs_of_schedules_are_skipped_when_a_loss_is_accepted_unless_they_are_to_run_again(
    fresh_dsn: str, backups: Backups, org: OrgId, runs_again: bool
) -> None:
    async with open_pair(fresh_dsn, backups.dsn) as pair:
        move = await pair.move([org], target=B)
        shard = Schedules(pair.databases[B])
        spec = ScheduleSpec(timing=await shard.hourly(), catch_up=CatchUp.ALL, overlap=Overlap.ALLOW)
        await shard.create(org, spec, epoch=move.epoch)
        first = await shard.set_back(org, 3 * HOUR_US)
    backups.make()
    async with open_pair(fresh_dsn, backups.dsn) as pair:
        assert (await Schedules(pair.databases[B]).fire()).jobs == 3
        await marks.mark(pair.databases[B], pair.catalog)
    backups.put_back()
    async with connected({A: fresh_dsn, B: backups.dsn}) as databases:
        loss = await find_loss(databases[B], databases[A], cluster=CLUSTER)
        assert loss is not None
        found = await differences.find(loss, databases[B], databases, databases[A], cluster=CLUSTER)
        ((listed,),) = [page async for page in found.schedules()]
        assert (listed.org, listed.first, listed.through) == (org, first, first + 2 * HOUR_US)
        said = await recovery.accept(loss, databases, databases[A], cluster=CLUSTER, runs_again=runs_again)
        assert [sentence for sentence in said if sentence.startswith("1 schedule(s) skip")] == said
        assert bool(said) is not runs_again
        assert (await Schedules(databases[B]).fire()).jobs == (3 if runs_again else 0)


async def test_schedules_workflows_and_configurations_that_came_with_an_org_are_gone_with_its_jobs(
    fresh_dsn: str, backups: Backups, org: OrgId
) -> None:
    """The only copy of the schedules, workflows and configurations was on the shard, as docs/operations.md says."""
    queue, paused = QueueName("mail"), QueueSettings(paused=True)
    async with open_pair(fresh_dsn, backups.dsn) as pair:
        pass
    backups.make()
    async with open_pair(fresh_dsn, backups.dsn) as pair:
        await QueueAdmin(pair.databases[A]).create_queue(org, queue, paused)
        shard = Schedules(pair.databases[A])
        await shard.create(org, ScheduleSpec(timing=await shard.hourly()))
        flow = await Flows(pair.databases[A], org).start({"a": []})
        move = await pair.move([org], target=B)
        assert (await Schedules(pair.databases[B]).admin.get(org, DAILY)).schedule.org == org, "it came"
        await marks.mark(pair.databases[B], pair.catalog)
    backups.put_back()
    await accept_all(fresh_dsn, backups)
    async with open_pair(fresh_dsn, backups.dsn) as pair:
        for database in pair.databases.values():
            with pytest.raises(UnknownSchedule):
                await Schedules(database).admin.get(org, DAILY)
            with pytest.raises(UnknownWorkflow):
                await Flows(database, org).state(flow)
        await pair.store(B).enqueue(some_jobs(org, 1, queue=queue), epoch=move.epoch)
        assert len(await lease_jobs(pair.store(B), org, queue=queue)) == 1, "the queue is not paused"


async def test_a_loss_that_was_accepted_is_not_accepted_again_over_a_move_that_began_since(
    fresh_dsn: str, backups: Backups, org: OrgId
) -> None:
    """Two operators have seen the loss. The second operator accepts it only after a move has begun."""
    async with open_pair(fresh_dsn, backups.dsn) as pair:
        await pair.store(A).enqueue(some_jobs(org, 3))
        await pair.move([org], target=B)
    backups.make()
    async with open_pair(fresh_dsn, backups.dsn) as pair:
        await marks.mark(pair.databases[B], pair.catalog)
    backups.put_back()
    async with connected({A: fresh_dsn, B: backups.dsn}) as databases:
        loss = await find_loss(databases[B], databases[A], cluster=CLUSTER)
        assert loss is not None
    await accept_all(fresh_dsn, backups)
    async with open_pair(fresh_dsn, backups.dsn) as pair:
        move = await pair.begin([org], target=A)
        for _ in range(3):
            assert await pair.mover(move).step()
        await recovery.accept(loss, pair.databases, pair.catalog, cluster=CLUSTER)
        assert await pair.placement(org) == ((A,), (B, A))
        await pair.mover(move).finish()
        assert len(await lease_jobs(pair.store(A), org, max_jobs=9)) == 3
        await pair.balance()
