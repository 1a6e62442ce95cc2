"""Slots move between two databases: with jobs in every state, while balancers die, and while producers and consumers
continue (I1–I6)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Collection, Mapping
from typing import Any

import psycopg
import pytest

from balancer.move import Progress
from shard.errors import Misconfigured, NotOwned, ShardUnavailable, UnknownQueue
from shard.job_record import JobRecord
from shard.lease_token import parse_token, token
from shard.placement import catalog, move_steps, statements
from shard.placement.catalog import Move
from shard.placement.slots import slot_of
from shard.postgres.connection import Connection
from shard.queue.doorbell import Doorbell
from shard.queue.settle import Nack, Settlement
from shard.queue_settings import SETTING_COLUMNS, QueueSettings
from shard.retry_policy import Fixed, to_json
from shard.vocabulary import Answer, Failure, JobId, Lease, OrgId, Outcome, QueueId, QueueName, ShardName
from tests import timemachine
from tests.jobs import HOUR_US, QUEUE, ids_of, lease_jobs, some_jobs
from tests.pair import A, B, Died, Fate, Pair, deaths, mortal_mover
from tests.routers import PATIENCE_S

OTHER = QueueName("other")
PAUSED, RESUMED = QueueSettings(paused=True), QueueSettings(paused=False)


async def lease_one(pair: Pair, shard: ShardName, org: OrgId, queue: str) -> tuple[JobId, Lease]:
    prefix, (job,), *_ = await pair.store(shard).claim(
        org, [QueueName(queue)], max_jobs=1, window_us=HOUR_US, worker="somebody"
    )
    return job.id, parse_token(token(prefix, job.id))[1]


async def populate(pair: Pair, shard: ShardName, org: OrgId, *, epoch: int = 1) -> dict[str, JobId]:
    """Stores jobs with different states and histories. Returns the ids of the jobs, keyed by a short description of
    each job. No job is leased."""
    store = pair.store(shard)
    made: dict[str, JobId] = {}

    async def make(what: str, **options: Any) -> JobId:
        jobs = some_jobs(org, 1, queue=what, **options)
        jobs.payloads[0] = f'{what} "\\{{,}} \x00 ü'.encode()
        jobs.attributes[0] = json.dumps({"what": what, "quotes": '\\"{},()', "": "ü\n"})
        jobs.traces[0] = "00-trace"
        assert await store.enqueue(jobs, epoch=epoch) == {}
        made[what] = ids_of(jobs)[0]
        return made[what]

    await make("scheduled", delay_us=HOUR_US, priority=9)
    await make("ready", dedup_keys=[f"key-{org}"], live_keys=[f"live-{org}"], retry=Fixed(delay_us=5), max_attempts=7)
    await make("failed", priority=1)
    _, lease = await lease_one(pair, shard, org, "failed")
    assert await store.settle(
        Settlement.nack(org, [Nack(lease=lease, failure=Failure(message='it "failed" \\ {so}'), retry_after_us=0)])
    ) == [Answer.OK]
    await make("given back")
    _, lease = await lease_one(pair, shard, org, "given back")
    assert await store.settle(Settlement.release(org, [lease])) == [Answer.OK]
    await make("lost")
    await lease_one(pair, shard, org, "lost")
    assert await timemachine.end_leases(pair.databases[shard], org) == 1
    await make("dead")
    _, lease = await lease_one(pair, shard, org, "dead")
    assert await store.settle(
        Settlement.nack(org, [Nack(lease=lease, failure=Failure(message="no", permanent=True))])
    ) == [Answer.OK]
    await make("done", dedup_keys=[f"done-{org}"])
    _, lease = await lease_one(pair, shard, org, "done")
    assert await store.settle(Settlement.ack(org, [lease], [b"result"])) == [Answer.OK]
    await make("cancelled")
    assert await store.cancel(org, [made["cancelled"]], reason="why") == [Answer.OK]
    return made


FINISHED = {"done", "cancelled"}


def told(record: JobRecord) -> JobRecord:
    """Returns the record as it looks after the shard has noticed all expired leases. So records that were read before
    and after this can be compared."""
    unseen = record.state == "ready" and record.worker is not None
    history = [(a.attempt, a.worker, a.leased_at, a.ended_at, a.outcome.value, a.failure) for a in record.attempts()]
    record = record._replace(history=json.dumps(history))
    if unseen:
        assert record.deadline is not None
        record = record._replace(run_at=record.deadline, deadline=None, worker=None, leased_at=None)
    return record


async def assert_all_there(
    pair: Pair, org: OrgId, before: dict[tuple[ShardName, JobId], JobRecord], at: ShardName, finished_at: ShardName
) -> None:
    """Asserts that every job is unchanged and on exactly one shard: live and dead jobs on `at`, finished jobs on
    `finished_at`."""
    found = await pair.jobs(org, [job for _, job in before])
    assert len(found) == len(before)
    for (_, job), record in before.items():
        home = finished_at if record.state in ("succeeded", "cancelled") else at
        assert told(found[home, job]) == told(record)
    await pair.balance()


async def take_steps(pair: Pair, move: Move, count: int) -> None:
    """Takes the next steps of a move: close, open, switch, and then chunks of jobs."""
    mover = pair.mover(move)
    for _ in range(count):
        assert await mover.step()


# Balancers that die


@pytest.mark.thorough
@pytest.mark.turns(3)
@pytest.mark.parametrize("how", ["before", "rolled back", "unheard", "cancelled", "cut"])
@pytest.mark.timeout(600)
async def test_a_move_is_finished_by_another_balancer_wherever_the_first_one_died(
    pair: Pair, org: OrgId, how: str
) -> None:
    """The org moves to the other shard and back, again and again. In each move, the first balancer dies at a later act
    than in the move before."""
    home, away, epoch = A, B, 1
    for at in deaths(how):
        before = await pair.jobs(org, list((await populate(pair, home, org, epoch=epoch)).values()))
        move = await pair.begin([org], target=away)
        fate = Fate(at=at, how=how)
        async with mortal_mover(pair, move, fate) as mover:
            try:
                await asyncio.create_task(mover.finish())
            except (Died, ShardUnavailable, asyncio.CancelledError):
                # An operator checks the books before the move continues.
                await pair.balance()
        if fate.acts < at:
            assert at > 15, fate.names
            break
        await pair.mover(move).finish()
        assert await pair.placement(org) == ((away,), (away,))
        await assert_all_there(pair, org, before, away, home)
        # End the jobs, because the next round uses the same live keys.
        for shard in (A, B):
            await pair.store(shard).cancel(org, [job for _, job in before], reason="")
            await timemachine.end_dedup_windows(pair.databases[shard], org)
        home, away, epoch = away, home, move.epoch


@pytest.mark.parametrize("steps", range(5))
async def test_a_balancer_that_is_told_to_end_at_once_leaves_the_slot_with_a_writer(
    pair: Pair, org: OrgId, steps: int
) -> None:
    await pair.store(A).enqueue(some_jobs(org, 3))
    move = await pair.begin([org], target=B)
    first = pair.mover(move)
    for _ in range(steps):
        assert await first.step()
    resumed = pair.mover(move)
    resumed.stop()
    await resumed.finish()
    (slot,) = move.slots
    (writer,) = (await pair.known()).slots[slot].writes
    assert writer == (B if steps else A)
    assert (await move_steps.read_slots(pair.databases[writer], [slot]))[slot].state == "owned"


async def test_the_books_balance_and_every_job_is_visible_once_at_most_after_every_act(pair: Pair, org: OrgId) -> None:
    made = await populate(pair, A, org)
    before = await pair.jobs(org, list(made.values()))
    live = [job for what, job in made.items() if what not in FINISHED]
    seen: list[str] = []

    async def look(name: str) -> None:
        seen.append(name)
        await pair.balance()
        found = await pair.jobs(org, list(made.values()))
        assert all(sum((shard, job) in found for shard in (A, B)) <= 1 for job in made.values())
        # No caller is told that a job does not exist.
        for job in live:
            known = [await pair.store(shard).get(org, [job], include_payload=False) for shard in (A, B)]
            assert any(known), (name, job)

    move = await pair.begin([org], target=B)
    async with mortal_mover(pair, move, Fate(at=0, how="", after=look)) as mover:
        await mover.finish()
    assert {"export_chunk", "import_chunk", "delete_exported", "switch_writer", "finish_move", "transaction"} <= set(
        seen
    )
    await assert_all_there(pair, org, before, B, A)


async def test_balancers_that_work_at_the_same_time_do_no_harm(pair: Pair, org: OrgId) -> None:
    before = {}
    orgs = [OrgId(f"{org}-{n}") for n in range(6)]
    for one in orgs:
        before[one] = await pair.jobs(one, list((await populate(pair, A, one)).values()))
    move = await pair.begin(orgs, target=B)
    async with asyncio.TaskGroup() as group:
        for _ in range(4):
            group.create_task(pair.mover(move).finish())
    for one in orgs:
        await assert_all_there(pair, one, before[one], B, A)


# Steps that come late


async def test_a_step_that_comes_late_changes_nothing(pair: Pair, org: OrgId) -> None:
    """Each step of the first two moves runs again later, as if a process had been frozen for a while."""
    made = await populate(pair, A, org)
    slots = [slot_of(org)]
    planned = await pair.known()
    first = await catalog.begin_move(pair.catalog, planned, slots, target=B)
    assert first is not None
    queues = await move_steps.read_queues(pair.databases[A], slots)
    await pair.mover(first).finish()
    second = await pair.move([org], target=A)
    # A third move is under way: the source of the first move is a source again, with a chunk that nobody has imported.
    third = await pair.begin([org], target=B)
    await take_steps(pair, third, 3)
    assert (
        await move_steps.export_chunk(pair.databases[A], {slots[0]: 1}, epoch=third.epoch, rows_max=2, bytes_max=1000)
        != {}
    )
    departed = await move_steps.read_exported(pair.databases[A], slots, epoch=third.epoch)

    async def everything() -> object:
        tables = (
            b"SELECT * FROM windrow.placement p WHERE p.epoch > 1",
            b"SELECT epoch FROM windrow.catalog",
            b"SELECT slot, shard FROM windrow.former_owner ORDER BY shard",
            b"SELECT * FROM windrow.owned_slot WHERE epoch > 1",
            b"SELECT id::text, chunk FROM windrow.departing ORDER BY id",
            b"SELECT id::text FROM windrow.job ORDER BY id",
            b"SELECT id::text FROM windrow.dead ORDER BY id",
            b"SELECT org, queue, paused, slot FROM windrow.queue ORDER BY org, queue",
            b"SELECT org_id, sum(accepted)::bigint FROM windrow.tally GROUP BY 1",
        )
        return [[await database.run(table, {}) for table in tables] for database in pair.databases.values()]

    await pair.books[A].alter_queue(org, QueueName("ready"), PAUSED, epoch=third.epoch, draining=True)
    before = await everything()
    for late in (first, second):
        source, target = pair.databases[late.source], pair.databases[late.target]
        await move_steps.close_slots(source, slots, epoch=late.epoch)
        await move_steps.open_slots(target, slots, epoch=late.epoch, queues=queues)
        await catalog.switch_writer(pair.catalog, late)
        for chunk in range(5):
            assert not await move_steps.export_chunk(
                source, {slots[0]: chunk}, epoch=late.epoch, rows_max=9, bytes_max=9999
            )
            assert not await move_steps.import_chunk(
                target, [part._replace(chunk=chunk) for part in departed], epoch=late.epoch
            )
            assert await move_steps.delete_exported(source, {slots[0]: chunk}, epoch=late.epoch) == 0
        assert await catalog.finish_move(pair.catalog, late, slots) == 0
        for shard in (A, B):
            await catalog.grant_slots(pair.databases[shard], planned)
    assert await catalog.begin_move(pair.catalog, planned, slots, target=B) is None
    # The third move has done these steps already, or is not at the chunk that they name.
    assert not await move_steps.export_chunk(
        pair.databases[A], {slots[0]: 1}, epoch=third.epoch, rows_max=9, bytes_max=9999
    )
    assert not await move_steps.export_chunk(
        pair.databases[A], {slots[0]: 3}, epoch=third.epoch, rows_max=9, bytes_max=9999
    )
    assert not await move_steps.import_chunk(
        pair.databases[B], [part._replace(chunk=2) for part in departed], epoch=third.epoch
    )
    assert await move_steps.delete_exported(pair.databases[A], {slots[0]: 2}, epoch=third.epoch) == 0
    assert await everything() == before
    await pair.mover(third).finish()
    assert len(await pair.jobs(org, list(made.values()))) == len(made)
    await pair.balance()


async def test_what_comes_late_when_the_next_move_has_only_begun_changes_nothing(pair: Pair, org: OrgId) -> None:
    slots = [slot_of(org)]
    await pair.store(A).enqueue(some_jobs(org, 1))
    planned = await pair.known()
    first = await pair.move([org], target=B)
    await pair.move([org], target=A)
    assert await catalog.begin_move(pair.catalog, planned, slots, target=B) is None, "planned by what is no more"
    third = await pair.begin([org], target=B)
    begun = await pair.known()
    await catalog.switch_writer(pair.catalog, first)
    assert await pair.known() == begun
    # A router that starts tells the shards only about slots that are not being moved. If the router told the shards
    # about this slot, the source could not close the slot.
    for shard in (A, B):
        await catalog.grant_slots(pair.databases[shard], begun)
    for shard in (A, B):
        assert (await move_steps.read_slots(pair.databases[shard], slots))[slots[0]].epoch < third.epoch
    await pair.mover(third).finish()
    assert await pair.placement(org) == ((B,), (B,))
    with pytest.raises(NotOwned):
        await pair.store(A).enqueue(some_jobs(org, 1), epoch=third.epoch)


async def test_who_opens_a_slot_late_does_not_bring_back_a_queue_that_was_deleted_since(pair: Pair, org: OrgId) -> None:
    await pair.books[A].create_queue(org, QUEUE, QueueSettings(max_attempts=3))
    move = await pair.begin([org], target=B)
    queues = await move_steps.read_queues(pair.databases[A], move.slots)
    await pair.mover(move).finish()
    await pair.books[B].delete_queue(org, QUEUE, epoch=move.epoch)
    await move_steps.open_slots(pair.databases[B], move.slots, epoch=move.epoch, queues=queues)
    assert await pair.books[B].list_queues(org, page_size=10, page_token="") == ([], "")


async def test_jobs_of_which_nobody_was_told_that_they_departed_are_the_first_to_arrive(
    pair: Pair, org: OrgId, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The source becomes unreachable after the jobs have departed, but before the source has answered."""
    first, second = sorted((OrgId(f"{org}-{n}") for n in range(2)), key=slot_of)
    jobs = {one: some_jobs(one, 9) for one in (first, second)}
    for one in jobs.values():
        await pair.store(A).enqueue(one)
    move = await pair.begin([first, second], target=B)
    await take_steps(pair, move, 3)
    run, departed = Connection.run, list[object]()

    async def run_and_go_away(
        connection: Connection, statement: bytes, parameters: Mapping[str, object]
    ) -> list[tuple[Any, ...]]:
        rows = await run(connection, statement, parameters)
        if statement == statements.EXPORT_CHUNK and not departed:
            departed.extend(rows)
            await connection.close()
            raise psycopg.OperationalError("gone")
        return rows

    monkeypatch.setattr(Connection, "run", run_and_go_away)
    mover = pair.mover(move)
    with pytest.raises(ShardUnavailable, match="the change may have been made"):
        await mover.finish()
    assert departed == [(slot_of(first), 4)]
    await mover.step()
    assert {at for at, _ in await pair.jobs(first, ids_of(jobs[first]))} == {A, B}
    assert await pair.databases[A].run(b"SELECT FROM windrow.departing", {}) == []
    assert {at for at, _ in await pair.jobs(second, ids_of(jobs[second]))} == {A}


# What a move waits for, and what it refuses


async def test_a_move_waits_for_leases_and_moves_what_becomes_of_the_jobs(pair: Pair, org: OrgId) -> None:
    store = pair.store(A)
    fates = ["acked", "nacked", "killed", "released", "lost", "cancelled"]
    held: dict[str, Lease] = {}
    names: dict[str, JobId] = {}
    for fate in fates:
        await store.enqueue(some_jobs(org, 1, queue=fate))
        names[fate], held[fate] = await lease_one(pair, A, org, fate)
    waits = asyncio.Event()
    counted: list[int] = []

    def report(progress: Progress) -> None:
        counted.append(progress.leased)
        if progress.leased == len(fates):
            waits.set()

    move = await pair.begin([org], target=B)
    async with asyncio.TaskGroup() as group:
        group.create_task(pair.mover(move, report).finish())
        await waits.wait()
        assert await pair.placement(org) == ((B,), (A, B))
        assert await store.settle(Settlement.extend(org, [held["acked"]], window_us=2 * HOUR_US)) == [Answer.OK]
        assert await store.settle(Settlement.ack(org, [held["acked"]])) == [Answer.OK]
        assert await store.settle(Settlement.nack(org, [Nack(lease=held["nacked"], retry_after_us=HOUR_US)])) == [
            Answer.OK
        ]
        assert await store.settle(
            Settlement.nack(org, [Nack(lease=held["killed"], failure=Failure(permanent=True))])
        ) == [Answer.OK]
        assert await store.settle(Settlement.release(org, [held["released"]])) == [Answer.OK]
        assert await store.cancel(org, [names["cancelled"]], reason="") == [Answer.OK]
        await timemachine.end_leases(pair.databases[A], org)
    states = {
        name: (shard, record.state) for (shard, name), record in (await pair.jobs(org, list(names.values()))).items()
    }
    assert states == {
        names["acked"]: (A, "succeeded"),
        names["cancelled"]: (A, "cancelled"),
        names["nacked"]: (B, "scheduled"),
        names["killed"]: (B, "dead"),
        names["released"]: (B, "ready"),
        names["lost"]: (B, "ready"),
    }
    # The history that moved with the job says how a lease ended.
    after = pair.store(B)
    assert await after.settle(Settlement.ack(org, list(held.values()))) == [
        Answer.NOT_FOUND,
        Answer.STALE,
        Answer.STALE,
        Answer.STALE,
        Answer.STALE,
        Answer.NOT_FOUND,
    ]
    assert await after.settle(Settlement.release(org, [held["released"]])) == [Answer.OK]
    assert await after.settle(Settlement.nack(org, [Nack(lease=held["killed"])])) == [Answer.OK]
    (record,) = await after.get(org, [names["lost"]], include_payload=False)
    assert [(attempt.attempt, attempt.outcome) for attempt in record.attempts()] == [(1, Outcome.EXPIRED)]
    ((job, _),) = await lease_jobs(after, org, queue="lost")
    assert job.attempt == 2
    await pair.balance()


async def test_jobs_that_arrive_late_and_are_the_oldest_are_announced_and_found(pair: Pair, org: OrgId) -> None:
    """A claim begins at the router's floors, and these jobs are below the floors."""
    there, told = pair.store(B), asyncio.Queue[Collection[QueueId]]()
    doorbell = Doorbell(pair.databases[B], pair.dsns[B], on_ring=lambda _: heard.set(), on_arrival=told.put_nowait)
    heard = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        listening = group.create_task(doorbell.run())
        await asyncio.wait_for(heard.wait(), PATIENCE_S)
        old = some_jobs(org, 2)
        await pair.store(A).enqueue(old)
        hour_ago = b"UPDATE windrow.job SET visible_at = visible_at - interval '1 h', run_at = run_at - interval '1 h'"
        await pair.databases[A].run(hour_ago, {})
        move = await pair.begin([org], target=B)
        mover = pair.mover(move)
        while not (await catalog.moves(pair.catalog))[0].switched:
            await mover.step()
        new = some_jobs(org, 1)
        await there.enqueue(new, epoch=move.epoch)
        assert [job.id for job, _ in await lease_jobs(there, org)] == new.ids
        await mover.step()
        assert await lease_jobs(there, org) == []
        there.arrived(await asyncio.wait_for(told.get(), PATIENCE_S))
        assert sorted(job.id for job, _ in await lease_jobs(there, org)) == sorted(old.ids)
        listening.cancel()


async def test_the_balancer_that_finds_jobs_already_imported_announces_them(pair: Pair, org: OrgId) -> None:
    await pair.store(A).enqueue(some_jobs(org, 2))
    move = await pair.begin([org], target=B)
    await take_steps(pair, move, 3)
    assert await move_steps.export_chunk(
        pair.databases[A], {move.slots[0]: 1}, epoch=move.epoch, rows_max=9, bytes_max=10**6
    )
    departed = await move_steps.read_exported(pair.databases[A], move.slots, epoch=move.epoch)
    # Take this step as a balancer does that dies afterwards.
    assert await move_steps.import_chunk(pair.databases[B], departed, epoch=move.epoch) == set(move.slots)
    fate = Fate(at=0, how="")
    async with mortal_mover(pair, move, fate) as mover:
        await mover.finish()
    assert fate.names.index("notify_imported") < fate.names.index("delete_exported")


async def test_slots_that_are_empty_do_not_wait_for_the_others_leases(pair: Pair, org: OrgId, other_org: OrgId) -> None:
    for one in (org, other_org):
        await pair.store(A).enqueue(some_jobs(one, 2))
    await lease_one(pair, A, org, QUEUE)
    waits = asyncio.Event()

    def report(progress: Progress) -> None:
        if progress.leased and progress.move.slots == (slot_of(org),):
            waits.set()

    move = await pair.begin([org, other_org], target=B)
    async with asyncio.TaskGroup() as group:
        group.create_task(pair.mover(move, report).finish())
        await waits.wait()
        assert await pair.placement(other_org) == ((B,), (B,))
        assert await pair.placement(org) == ((B,), (A, B))
        await timemachine.end_leases(pair.databases[A], org)


async def test_nothing_moves_when_a_shard_knows_of_a_later_epoch_than_the_catalog(pair: Pair, org: OrgId) -> None:
    """This happens if the catalog was restored from a backup."""
    made = await populate(pair, A, org)
    await pair.databases[B].run(
        b"INSERT INTO windrow.owned_slot (slot, state, epoch) VALUES (%(slot)s, 'draining', 40)", {"slot": slot_of(org)}
    )
    move = await pair.begin([org], target=B)
    with pytest.raises(Misconfigured, match=rf"shard 's2' knows of epoch 40 for slot {slot_of(org)}.*from a backup"):
        await pair.mover(move).finish()
    assert {shard for shard, _ in await pair.jobs(org, list(made.values()))} == {A}
    assert await pair.store(A).enqueue(some_jobs(org, 1)) == {}, "the slot is still open"


@pytest.mark.parametrize("restored", [A, B])
async def test_nothing_moves_when_a_shard_has_forgotten_chunks(pair: Pair, org: OrgId, restored: ShardName) -> None:
    await pair.store(A).enqueue(some_jobs(org, 9))
    move = await pair.begin([org], target=B)
    # The move has begun. The next steps are close, open and switch.
    await take_steps(pair, move, 3)
    change = b"UPDATE windrow.owned_slot SET chunk = %(chunk)s WHERE slot = %(slot)s"
    for shard in (A, B):
        await pair.databases[shard].run(change, {"chunk": 3 if shard == restored else 7, "slot": slot_of(org)})
    with pytest.raises(Misconfigured, match=f"shard '{restored}' is at chunk 3 of slot .* Was '{restored}' restored"):
        await pair.mover(move).finish()
    await pair.balance()


async def test_no_more_jobs_depart_once_the_target_has_forgotten_chunks(pair: Pair, org: OrgId) -> None:
    await pair.store(A).enqueue(some_jobs(org, 20))
    move = await pair.begin([org], target=B)

    async def restore(name: str) -> None:
        if name == "import_chunk":
            await pair.databases[B].run(b"UPDATE windrow.owned_slot SET chunk = 0 WHERE epoch > 1", {})

    async with mortal_mover(pair, move, Fate(at=0, how="", after=restore)) as mover:
        with pytest.raises(Misconfigured, match="Was 's2' restored"):
            await mover.finish()
    assert await pair.databases[A].run(b"SELECT count(*) FROM windrow.departing", {}) == [(4,)]


async def test_a_target_that_does_not_know_a_queue_stores_nothing_and_nothing_is_lost(pair: Pair, org: OrgId) -> None:
    jobs = some_jobs(org, 2)
    await pair.store(A).enqueue(jobs)
    move = await pair.begin([org], target=B)
    await take_steps(pair, move, 3)
    await pair.databases[B].run(b"DELETE FROM windrow.queue", {})
    with pytest.raises(Misconfigured, match=r"shard 's2' refuses jobs that move there.*kept where they come from"):
        await pair.mover(move).finish()
    await pair.balance()
    await move_steps.make_queues(pair.databases[B], await move_steps.read_queues(pair.databases[A], move.slots))
    await pair.mover(move).finish()
    assert {shard for shard, _ in await pair.jobs(org, ids_of(jobs))} == {B}


async def test_a_shard_that_is_not_in_the_cluster_file_is_named(pair: Pair, org: OrgId) -> None:
    move = await pair.begin([org], target=ShardName("s9"))
    with pytest.raises(Misconfigured, match="shard 's9', which the cluster file does not name"):
        await pair.mover(move).finish()


# Producers


async def test_a_job_or_key_that_is_sent_again_is_told_its_first_id_before_during_and_after_a_move(
    pair: Pair, org: OrgId
) -> None:
    """The test does what a router does: it asks the former owners, and then stores the jobs that none of them knows."""
    made = await populate(pair, A, org)
    keyed = {made["ready"]: f"key-{org}", made["done"]: f"done-{org}"}
    queues = {job: what for what, job in made.items()}
    asked_while: set[str] = set()

    async def send_again(name: str) -> None:
        known = (await pair.known()).placement(org)
        writer = known.writes[0]
        others = [former.shard for former in known.former if former.shard != writer]
        asked_while.add("after" if known.at_rest and writer == B else "before" if not others else "during")
        for job, what in queues.items():
            again = some_jobs(org, ids=[job], queue=what)
            twins = [some_jobs(org, 1, queue=what, dedup_keys=[keyed[job]])] if job in keyed else []
            twins += [some_jobs(org, 1, queue=what, live_keys=[f"live-{org}"])] if what == "ready" else []
            for jobs in (again, *twins):
                found: dict[int, JobId] = {}
                for other in others:
                    found.update(await pair.store(other).known(jobs))
                if not found:
                    try:
                        found = await pair.store(writer).enqueue(jobs, epoch=known.epoch)
                    except NotOwned:
                        # Between close and switch no shard accepts jobs.
                        ((_, state, epoch, _),) = (await pair.slots(move.slots))[A]
                        assert (writer, state, epoch) == (A, "draining", known.epoch), name
                        continue
                assert found == {0: job}, (name, what)

    await send_again("")
    move = await pair.begin([org], target=B)
    async with mortal_mover(pair, move, Fate(at=0, how="", after=send_again)) as mover:
        await mover.finish()
    await send_again("")
    assert asked_while == {"before", "during", "after"}
    await pair.balance()


async def test_a_former_owner_is_asked_only_for_what_it_may_know(pair: Pair, org: OrgId) -> None:
    await pair.store(A).enqueue(some_jobs(org, 1))
    await pair.move([org], target=B)
    known = (await pair.known()).placement(org)
    (former,) = known.former
    assert (former.shard, known.writes) == (A, (B,))
    left_ms = former.left_at // 1000
    hour_ms = HOUR_US // 1000
    assert former.may_know(left_ms + 2 * hour_ms, keyed=False)
    assert not former.may_know(left_ms + 2 * hour_ms + 1, keyed=False)
    assert former.may_know(left_ms + 31 * 24 * hour_ms, keyed=True)
    assert not former.may_know(left_ms + 31 * 24 * hour_ms + 1, keyed=True)


async def test_a_job_whose_id_was_ahead_is_known_where_it_finished_by_a_clock_that_is_behind(
    pair: Pair, org: OrgId
) -> None:
    jobs = some_jobs(org, 1)
    await pair.store(A).enqueue(jobs)
    move = await pair.move([org], target=B)
    store = pair.store(B)
    ((_, lease),) = await lease_jobs(store, org)
    assert await store.settle(Settlement.ack(org, [lease])) == [Answer.OK]
    # The first shard stored the job an hour ago, because its id was an hour ahead. The second shard's clock is ten
    # minutes behind.
    await pair.databases[B].run(b"UPDATE windrow.finished SET finished_at = finished_at - interval '70 min'", {})
    assert await store.enqueue(jobs, epoch=move.epoch) == {0: jobs.ids[0]}
    assert await store.settle(Settlement.ack(org, [lease])) == [Answer.OK]
    assert len(await store.get(org, ids_of(jobs), include_payload=False)) == 1


async def test_a_router_that_does_not_know_of_the_move_is_refused_by_both(pair: Pair, org: OrgId) -> None:
    await pair.store(A).enqueue(some_jobs(org, 1))
    move = await pair.move([org], target=B)
    for shard in (A, B):
        with pytest.raises(NotOwned) as caught:
            await pair.store(shard).enqueue(some_jobs(org, 1), epoch=move.epoch - 1)
        assert caught.value.epoch == move.epoch
    with pytest.raises(NotOwned):
        await pair.store(A).enqueue(some_jobs(org, 1), epoch=move.epoch)
    assert await pair.store(B).enqueue(some_jobs(org, 1), epoch=move.epoch) == {}


# Configuration


async def test_a_moved_queues_retention_is_kept_on_a_shard_that_has_never_seen_it(pair: Pair, org: OrgId) -> None:
    await pair.books[A].create_queue(org, QUEUE, QueueSettings(retention_days=14))
    await pair.store(A).enqueue(some_jobs(org, 1))
    await pair.move([org], target=B)
    _, lease = await lease_one(pair, B, org, QUEUE)
    assert await pair.store(B).settle(Settlement.ack(org, [lease])) == [Answer.OK]
    assert await pair.databases[B].run(b"SELECT retention FROM windrow.finished", {}) == [(14,)]


async def test_a_column_of_a_queue_is_a_setting_or_is_named_here(pair: Pair) -> None:
    rows = await pair.databases[A].run(
        b"SELECT attname FROM pg_attribute WHERE attrelid = 'windrow.queue'::regclass AND attnum > 0", {}
    )
    no_settings = {"name_id", "org_id", "queue_id", "org", "queue", "slot", "listed", "created_at"}
    assert {name for (name,) in rows} == no_settings | {"org_retention", "kept"} | {
        column.name for column in SETTING_COLUMNS.values()
    }


async def test_queues_move_with_their_configuration(pair: Pair, org: OrgId) -> None:
    books = pair.books[A]
    numbers = [name for name in SETTING_COLUMNS if name not in ("retry", "paused")]
    every = QueueSettings(
        retry=to_json(Fixed(delay_us=7)), paused=True, **{name: at for at, name in enumerate(numbers, 3)}
    )
    assert (await books.create_queue(org, QUEUE, every)).settings == every
    await books.create_queue(org, OTHER, QueueSettings())
    await books.alter_queue(org, OTHER, PAUSED)
    await books.create_queue(org, QueueName("gone"), QueueSettings(max_attempts=5))
    await books.delete_queue(org, QueueName("gone"))
    before, _ = await books.list_queues(org, page_size=10, page_token="")
    move = await pair.move([org], target=B)
    after, _ = await pair.books[B].list_queues(org, page_size=10, page_token="")
    assert after == before
    assert [queue.settings for queue in after] == [every, PAUSED]
    assert [row.settings for row in await move_steps.read_queues(pair.databases[B], move.slots)] == [
        RESUMED,
        every,
        PAUSED,
    ]
    # Move the org back to the shard that still has the org's old configuration.
    await pair.books[B].alter_queue(org, OTHER, RESUMED, epoch=move.epoch)
    reset = await pair.books[B].alter_queue(org, QUEUE, QueueSettings(), reset=list(SETTING_COLUMNS), epoch=move.epoch)
    assert reset.settings == RESUMED
    changed, _ = await pair.books[B].list_queues(org, page_size=10, page_token="")
    await pair.move([org], target=A)
    back, _ = await books.list_queues(org, page_size=10, page_token="")
    assert back == changed != before


async def test_a_configuration_is_changed_on_its_writer_alone_and_on_the_source_while_that_drains(
    pair: Pair, org: OrgId
) -> None:
    a, b = pair.books[A], pair.books[B]
    await pair.store(A).enqueue(some_jobs(org, 1))
    await lease_one(pair, A, org, QUEUE)
    move = await pair.begin([org], target=B)
    assert (await a.alter_queue(org, QUEUE, PAUSED, epoch=move.epoch)).settings.paused, "its source takes jobs yet"
    await take_steps(pair, move, 4)
    assert (await b.get_queue(org, QUEUE)).settings.paused
    for books, epoch in ((a, move.epoch), (a, 1), (b, 1)):
        for change in (
            books.alter_queue(org, QUEUE, RESUMED, epoch=epoch),
            books.create_queue(org, QueueName(f"new-{epoch}-{books.name}"), QueueSettings(max_attempts=2), epoch=epoch),
            books.delete_queue(org, QUEUE, epoch=epoch),
        ):
            with pytest.raises(NotOwned) as caught:
                await change
            assert caught.value.epoch == move.epoch
    assert not (await b.alter_queue(org, QUEUE, RESUMED, epoch=move.epoch)).settings.paused
    assert not (await a.alter_queue(org, QUEUE, RESUMED, epoch=move.epoch, draining=True)).settings.paused
    with pytest.raises(UnknownQueue):
        await b.alter_queue(org, QueueName("nowhere"), PAUSED, epoch=move.epoch)
    await timemachine.end_leases(pair.databases[A], org)
    await pair.mover(move).finish()
    back = await pair.move([org], target=A)
    # A change that was meant for the first move comes late. The shard is no longer the source.
    with pytest.raises(NotOwned):
        await a.alter_queue(org, QUEUE, PAUSED, epoch=move.epoch, draining=True)
    assert not (await a.get_queue(org, QUEUE)).settings.paused
    assert (await a.alter_queue(org, QUEUE, PAUSED, epoch=back.epoch)).settings.paused


# Jobs that are departing


async def test_a_departing_job_is_looked_up_but_not_touched(pair: Pair, org: OrgId) -> None:
    made = await populate(pair, A, org)
    before = await pair.jobs(org, list(made.values()))
    move = await pair.begin([org], target=B)
    await take_steps(pair, move, 3)
    await move_steps.export_chunk(pair.databases[A], {move.slots[0]: 1}, epoch=move.epoch, rows_max=99, bytes_max=10**6)
    store = pair.store(A)
    found = {record.id: record for record in await store.get(org, list(made.values()), include_payload=True)}
    assert {name: told(record) for name, record in found.items()} == {
        name: told(record) for (_, name), record in before.items()
    }
    for what, job in made.items():
        assert await store.known(some_jobs(org, ids=[job], queue=what)) == {0: job}
        if what not in FINISHED:
            assert await store.cancel(org, [job], reason="") == [Answer.DEPARTING]
            assert await lease_jobs(store, org, queue=what) == []
    await pair.balance()
    await pair.mover(move).finish()
    await assert_all_there(pair, org, before, B, A)


async def test_a_chunk_is_bounded_in_bytes(pair: Pair, org: OrgId) -> None:
    jobs = some_jobs(org, 10)
    jobs.payloads = [b"x" * 1000] * 10
    await pair.store(A).enqueue(jobs)
    await move_steps.close_slots(pair.databases[A], [slot_of(org)], epoch=5)
    for chunk, bytes_max, count in ((1, 2500, 3), (2, 1, 1), (3, 99_999, 6)):
        slots = {slot_of(org): chunk}
        departed = await move_steps.export_chunk(pair.databases[A], slots, epoch=5, rows_max=99, bytes_max=bytes_max)
        assert departed == {slot_of(org): count}


# Kinds that are quarantined


async def test_a_quarantine_moves_with_its_org_and_so_do_the_jobs_that_are_set_aside(pair: Pair, org: OrgId) -> None:
    source = pair.store(A)
    await source.enqueue(jobs := some_jobs(org, 3))
    held, reason = jobs.kinds[0], "bad"
    await source.quarantine.add(org, QUEUE, held, reason, epoch=1)
    assert await lease_jobs(source, org) == []
    before = await source.quarantines(org, None)
    assert [(one.kind, one.reason, one.set_aside) for one in before] == [(held, reason, 3)]
    move = await pair.move([org], target=B)
    store = pair.store(B)
    await store.quarantine.refresh()
    assert await lease_jobs(store, org) == []
    assert await store.quarantines(org, None) == before
    assert await pair.databases[A].run(b"SELECT FROM windrow.quarantine", {}) == []
    with pytest.raises(NotOwned):
        await source.quarantine.release(org, QUEUE, held, epoch=move.epoch)
    assert await store.quarantine.release(org, QUEUE, held, epoch=move.epoch)
    await store.sweep()
    assert {job.id for job, _ in await lease_jobs(store, org)} == set(ids_of(jobs))
    await pair.balance()


async def test_while_an_org_moves_its_trial_on_the_source_is_the_only_one(pair: Pair, org: OrgId) -> None:
    source, target = pair.store(A), pair.store(B)
    await source.enqueue(jobs := some_jobs(org, 3))
    await source.quarantine.add(org, QUEUE, jobs.kinds[0], "bad", epoch=1)
    assert await lease_jobs(source, org) == []
    await pair.databases[A].run(b"UPDATE windrow.quarantine SET next_trial_at = now()", {})
    await source.sweep()
    ((_, trial),) = await lease_jobs(source, org, window_us=HOUR_US)
    mover = pair.mover(await pair.begin([org], target=B))
    while await pair.databases[B].run(b"SELECT count(*) FROM windrow.job", {}) != [(2,)]:
        assert await mover.step()
    await target.quarantine.refresh()
    # The claim sets the two jobs aside.
    assert await lease_jobs(target, org) == []
    await target.sweep()
    assert await lease_jobs(target, org) == []
    assert await source.settle(Settlement.ack(org, [trial])) == [Answer.OK]
    await mover.finish()
    # The target does not know how the trial on the source ended, and begins another trial.
    await target.sweep()
    assert len(await lease_jobs(target, org)) == 1
    await pair.balance()
