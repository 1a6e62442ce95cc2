"""Kinds whose jobs crash their workers, on one shard: their crashes are counted, the kinds are quarantined, one job at
a time is tried, and the kinds are released."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import psycopg
import pytest

import windrow
from shard.admin.queue_admin import QueueAdmin
from shard.errors import RowLocked, ShardUnavailable
from shard.job_record import ANSWER_BYTES_MAX
from shard.postgres.pool import Database
from shard.queue import statements
from shard.queue.quarantine import KINDS_MAX, PAUSE_S, PAUSE_S_MAX
from shard.queue.settle import Nack, Settlement, Snooze
from shard.queue.store import Store
from shard.queue_settings import QueueSettings
from shard.vocabulary import Alteration, Answer, Claimed, Failure, JobId, Lease, NewJobs, OrgId
from tests.command import windrow as command
from tests.conftest import SHARD
from tests.effort import luck_of, trials
from tests.jobs import MINUTE_US, QUEUE, alter_until, history_of, ids_of, lease_jobs, some_jobs
from tests.postgres import Server
from tests.recorder import Recorder
from tests.routers import PATIENCE_S, running_routers, write_cluster
from tests.workflows import CANCEL, Flows

AFTER = 3


def jobs_of(
    kind: str, org: OrgId, count: int = 1, *, max_attempts: int | None = None, group: str | None = None
) -> NewJobs:
    jobs = some_jobs(org, count, max_attempts=max_attempts, group=group)
    jobs.kinds[:] = [kind] * count
    return jobs


async def end_leases(database: Database, org: OrgId, *, lasted_s: float = 0) -> None:
    """Makes all leases of the org expire, as if the workers had died. Each lease then looks as if it had lasted for at
    least `lasted_s` seconds."""
    await database.run(
        b"""
        UPDATE windrow.job j
        SET visible_at = now(), leased_at = least(j.leased_at, now() - %(lasted_s)s::float8 * interval '1 s')
        FROM windrow.queue q
        WHERE q.queue_id = j.queue_id AND q.org = %(org)s AND j.lease IS NOT NULL
        """,
        {"org": org, "lasted_s": str(lasted_s)},
    )


async def crash(store: Store, database: Database, org: OrgId, times: int, *kinds: str) -> None:
    """Lets `times` workers die one after another while they have leased jobs of these kinds. Before a worker dies, it
    releases its jobs of other kinds. After the last death, one more worker claims the jobs and releases all of them."""
    for _ in range(times):
        leased = await lease_jobs(store, org)
        assert {job.kind for job, _ in leased}.issuperset(kinds)
        await give_back(store, org, [(job, lease) for job, lease in leased if job.kind not in kinds])
        await end_leases(database, org)
    await give_back(store, org, await lease_jobs(store, org))


async def crashes(database: Database, org: OrgId) -> int:
    """Returns how many recorded crashes no sweep has counted yet."""
    ((count,),) = await database.run(
        b"SELECT count(*) FROM windrow.crash c JOIN windrow.queue q USING (queue_id) WHERE q.org = %(org)s",
        {"org": org},
    )
    return int(count)


async def give_back(store: Store, org: OrgId, leased: Sequence[tuple[Claimed, Lease]]) -> None:
    if leased:
        answers = await store.settle(Settlement.release(org, [lease for _, lease in leased]))
        assert set(answers) == {Answer.OK}


async def quarantined(database: Database, org: OrgId) -> dict[str, tuple[int, int, bool]]:
    """Returns, for each quarantined kind, the number of crashes, the seconds until the next trial, and whether a trial
    is under way."""
    rows = await database.run(
        b"""
        SELECT k.kind, k.crashes, k.pause_s, k.trial_id IS NOT NULL FROM windrow.quarantine k
        JOIN windrow.queue q USING (queue_id) WHERE q.org = %(org)s
        """,
        {"org": org},
    )
    return {kind: (crashes, pause_s, tries) for kind, crashes, pause_s, tries in rows}


async def pass_pause(database: Database, org: OrgId) -> None:
    await database.run(
        b"""
        UPDATE windrow.quarantine k SET next_trial_at = now() FROM windrow.queue q
        WHERE q.queue_id = k.queue_id AND q.org = %(org)s AND k.next_trial_at IS NOT NULL
        """,
        {"org": org},
    )


async def attempts(store: Store, org: OrgId, jobs: NewJobs) -> list[tuple[str, int]]:
    return [(one.state, one.attempt) for one in await store.get(org, ids_of(jobs), include_payload=False)]


async def kinds_leased(store: Store, org: OrgId) -> list[str]:
    """Leases all jobs that claims can see, and releases them. Returns the kinds of the jobs."""
    leased = await lease_jobs(store, org)
    await give_back(store, org, leased)
    return sorted(job.kind for job, _ in leased)


@pytest.fixture
async def store(database: Database, books: QueueAdmin, org: OrgId) -> Store:
    await books.create_queue(org, QUEUE, QueueSettings(quarantine_after=AFTER))
    return Store(database)


async def poisoned(store: Store, database: Database, org: OrgId, count: int = 2) -> NewJobs:
    """Stores jobs of a kind, and lets the kind be quarantined because of its crashes. Returns the jobs."""
    await store.enqueue(jobs := jobs_of("poison", org, count))
    await crash(store, database, org, AFTER + 1, "poison")
    await store.sweep()
    assert list(await quarantined(database, org)) == ["poison"]
    return jobs


async def test_a_kind_whose_jobs_crash_their_workers_is_set_aside_and_other_kinds_run(
    store: Store, database: Database, org: OrgId
) -> None:
    await store.enqueue(innocent := jobs_of("innocent", org, 3))
    jobs = await poisoned(store, database, org)
    before = [attempt for _, attempt in await attempts(store, org, jobs)]
    for _ in range(3):
        assert await kinds_leased(store, org) == ["innocent"] * 3
    # The jobs that were set aside are still ready, and have as many attempts as before.
    assert await attempts(store, org, jobs) == [("ready", attempt) for attempt in before]
    leased = await lease_jobs(store, org)
    assert await store.settle(Settlement.ack(org, [lease for _, lease in leased])) == [Answer.OK] * len(
        ids_of(innocent)
    )


async def test_fewer_crashes_than_the_queue_allows_quarantine_nothing(
    store: Store, database: Database, org: OrgId
) -> None:
    await store.enqueue(jobs_of("poison", org))
    await crash(store, database, org, AFTER, "poison")
    await store.sweep()
    assert await quarantined(database, org) == {}
    assert await kinds_leased(store, org) == ["poison"]


async def test_leases_that_max_runtime_has_ended_are_no_crashes(store: Store, database: Database, org: OrgId) -> None:
    await store.enqueue(some_jobs(org, max_runtime_us=1_000_000))
    for _ in range(AFTER + 3):
        assert len(await lease_jobs(store, org)) == 1
        await end_leases(database, org, lasted_s=2)
    assert await crashes(database, org) == 0


async def test_a_trial_that_max_runtime_has_ended_does_not_release_its_kind(
    store: Store, database: Database, org: OrgId
) -> None:
    """A trial that `max_runtime` has ended does not show that the worker survives the handler. So the next trial comes
    after a longer pause."""
    await store.enqueue(jobs := some_jobs(org, max_runtime_us=1_000_000))
    # Each of these leases ends at once, before `max_runtime`.
    await crash(store, database, org, AFTER + 1, *jobs.kinds)
    await store.sweep()
    ((kind, before),) = (await quarantined(database, org)).items()
    assert await lease_jobs(store, org) == []
    await pass_pause(database, org)
    await store.sweep()
    assert len(await lease_jobs(store, org)) == 1
    await end_leases(database, org, lasted_s=2)
    assert await lease_jobs(store, org) == []
    await store.sweep()
    assert await quarantined(database, org) == {kind: (before[0] + 1, 2 * PAUSE_S, False)}


async def test_a_queue_without_the_setting_records_no_crash(database: Database, org: OrgId) -> None:
    store = Store(database)
    await store.enqueue(jobs_of("poison", org))
    await crash(store, database, org, 8, "poison")
    assert await crashes(database, org) == 0


async def test_one_death_of_a_worker_counts_for_no_kind(store: Store, database: Database, org: OrgId) -> None:
    await store.enqueue(jobs_of("innocent", org, 3 * AFTER))
    await crash(store, database, org, 1, "innocent")
    assert await crashes(database, org) == 0


async def test_many_jobs_of_a_kind_that_one_claim_finds_are_one_crash(
    store: Store, database: Database, org: OrgId
) -> None:
    await store.enqueue(jobs_of("innocent", org, 5 * AFTER))
    await crash(store, database, org, AFTER, "innocent")
    await store.sweep()
    assert await quarantined(database, org) == {}


async def test_jobs_that_end_properly_after_their_crashes_acquit_their_kind(
    store: Store, database: Database, org: OrgId
) -> None:
    await store.enqueue(jobs_of("slow", org))
    await crash(store, database, org, AFTER + 1, "slow")
    leased = await lease_jobs(store, org)
    assert await store.settle(Settlement.ack(org, [lease for _, lease in leased])) == [Answer.OK]
    await store.sweep()
    assert await quarantined(database, org) == {}
    # The crashes of the kind are forgotten, and the count begins at zero again.
    await store.enqueue(jobs_of("slow", org))
    await crash(store, database, org, AFTER, "slow")
    await store.sweep()
    assert await quarantined(database, org) == {}


async def test_a_nack_acquits_too(store: Store, database: Database, org: OrgId) -> None:
    await store.enqueue(jobs_of("failing", org))
    await crash(store, database, org, AFTER + 1, "failing")
    leased = await lease_jobs(store, org)
    await store.settle(Settlement.nack(org, [Nack(lease=lease, retry_after_us=0) for _, lease in leased]))
    await store.sweep()
    assert await quarantined(database, org) == {}


async def test_jobs_with_more_history_than_one_answer_holds_are_acquitted_too(
    store: Store, database: Database, org: OrgId
) -> None:
    jobs = jobs_of("failing", org, AFTER + 1)
    await store.enqueue(jobs)
    for crashing in jobs.ids:
        for _ in range(2):
            leased = await lease_jobs(store, org)
            await give_back(store, org, [(job, lease) for job, lease in leased if job.id != crashing])
            await end_leases(database, org)
        await give_back(store, org, await lease_jobs(store, org))
    assert await crashes(database, org) == AFTER + 1
    failure = Failure("Large", "x" * ANSWER_BYTES_MAX)
    for _, lease in await lease_jobs(store, org):
        await store.settle(Settlement.nack(org, [Nack(lease=lease, failure=failure, retry_after_us=0)]))
    await store.sweep()
    assert await quarantined(database, org) == {}


async def test_only_the_kind_with_most_crashes_is_quarantined_and_those_of_others_are_forgotten(
    store: Store, database: Database, org: OrgId
) -> None:
    await store.enqueue(jobs_of("poison", org))
    await crash(store, database, org, 2, "poison")
    await store.enqueue(jobs_of("innocent", org))
    await crash(store, database, org, AFTER + 1, "poison", "innocent")
    await store.sweep()
    assert list(await quarantined(database, org)) == ["poison"]
    await store.sweep()
    assert list(await quarantined(database, org)) == ["poison"]


async def test_a_kind_whose_jobs_have_one_attempt_is_quarantined_too(
    store: Store, database: Database, org: OrgId
) -> None:
    for _ in range(AFTER):
        await store.enqueue(jobs := jobs_of("poison", org, max_attempts=1))
        await crash(store, database, org, 1, "poison")
        assert await attempts(store, org, jobs) == [("dead", 1)]
    await store.sweep()
    assert list(await quarantined(database, org)) == ["poison"]
    await store.enqueue(jobs := jobs_of("poison", org, max_attempts=1))
    assert await kinds_leased(store, org) == []
    assert await attempts(store, org, jobs) == [("ready", 0)]


async def test_another_router_learns_it_from_its_next_sweep(store: Store, database: Database, org: OrgId) -> None:
    other = Store(database)
    await poisoned(store, database, org)
    await store.enqueue(jobs_of("poison", org))
    await other.sweep()
    assert other.quarantine.kinds(org, QUEUE) == {"poison"}
    assert await kinds_leased(other, org) == []


async def test_a_job_that_was_leased_before_is_set_aside_when_it_is_lost(
    store: Store, database: Database, org: OrgId
) -> None:
    await store.enqueue(late := jobs_of("poison", org))
    ((_, lease),) = await lease_jobs(store, org)
    other = Store(database)
    await database.run(
        b"INSERT INTO windrow.quarantine (queue_id, kind, crashes, pause_s) "
        b"SELECT q.queue_id, 'poison', 0, 60 FROM windrow.queue q WHERE q.org = %(org)s",
        {"org": org},
    )
    await end_leases(database, org)
    # The job is set aside, although the store `other` remembers no quarantined kind.
    assert other.quarantine.kinds(org, QUEUE) == set()
    assert await kinds_leased(other, org) == []
    assert await attempts(store, org, late) == [("ready", 1)]
    assert await store.settle(Settlement.ack(org, [lease])) == [Answer.STALE]


async def test_one_job_is_let_through_and_its_ack_releases_all(store: Store, database: Database, org: OrgId) -> None:
    jobs = await poisoned(store, database, org, 5)
    assert await kinds_leased(store, org) == []
    await store.sweep()
    assert await kinds_leased(store, org) == [], "not before the pause is over"
    await pass_pause(database, org)
    await store.sweep()
    await store.sweep()
    leased = await lease_jobs(store, org)
    assert [job.kind for job, _ in leased] == ["poison"]
    assert await lease_jobs(store, org) == []
    await store.sweep()
    assert await lease_jobs(store, org) == []
    assert await store.settle(Settlement.ack(org, [leased[0][1]])) == [Answer.OK]
    await store.sweep()
    assert await quarantined(database, org) == {}
    assert store.quarantine.kinds(org, QUEUE) == {"poison"}, "a hint may be old"
    assert len(await lease_jobs(store, org)) == len(jobs) - 1


async def test_a_trial_that_crashes_is_not_leased_again_and_the_pause_doubles(
    store: Store, database: Database, org: OrgId
) -> None:
    await poisoned(store, database, org, 3)
    assert await kinds_leased(store, org) == []
    pause_s = PAUSE_S
    (before,) = (await quarantined(database, org)).values()
    for at in range(1, 9):
        await pass_pause(database, org)
        await store.sweep()
        (trial,) = await lease_jobs(store, org)
        await end_leases(database, org)
        # The job is set aside even before a sweep has seen the crash.
        assert await lease_jobs(store, org) == []
        await store.sweep()
        pause_s = min(2 * pause_s, PAUSE_S_MAX)
        assert await quarantined(database, org) == {"poison": (before[0] + at, pause_s, False)}
        assert trial[0].kind == "poison"
    assert pause_s == PAUSE_S_MAX


@pytest.mark.thorough
async def test_a_job_that_is_altered_while_its_trial_begins_is_let_through(
    store: Store, database: Database, module_dsn: str, org: OrgId
) -> None:
    kinds = sorted(f"kind-{at:02}" for at in range(60))
    ids: list[JobId] = []
    for kind in kinds:
        await store.enqueue(jobs := jobs_of(kind, org))
        ids += ids_of(jobs)
        await store.quarantine.add(org, QUEUE, kind, "", epoch=1)
    assert await kinds_leased(store, org) == []
    other = Database(SHARD, module_dsn)
    await other.open()
    for _ in range(trials(10, thorough=100)):
        await database.run(b"UPDATE windrow.quarantine SET next_trial_at = now(), trial_id = NULL, trial_at = NULL", {})
        altered, begun = asyncio.Event(), asyncio.Event()
        async with asyncio.TaskGroup() as group:
            group.create_task(alter_until(begun, Store(other), org, ids, altered))
            await altered.wait()
            await store.sweep()
            begun.set()
        tried = [kind for kind, (_, _, tries) in sorted((await quarantined(database, org)).items()) if tries]
        assert await kinds_leased(store, org) == tried
    await other.close()


async def test_a_trial_that_is_nacked_reopens_the_kind(store: Store, database: Database, org: OrgId) -> None:
    await poisoned(store, database, org)
    assert await kinds_leased(store, org) == []
    await pass_pause(database, org)
    await store.sweep()
    ((_, lease),) = await lease_jobs(store, org)
    await store.settle(Settlement.nack(org, [Nack(lease=lease, retry_after_us=10**9)]))
    await store.sweep()
    assert await quarantined(database, org) == {}


async def test_a_trial_that_is_given_back_goes_on_and_a_cancelled_one_is_replaced(
    store: Store, database: Database, org: OrgId
) -> None:
    jobs = await poisoned(store, database, org)
    assert await kinds_leased(store, org) == []
    await pass_pause(database, org)
    await store.sweep()
    ((first, lease),) = await lease_jobs(store, org)
    await give_back(store, org, [(first, lease)])
    await store.sweep()
    ((again, _),) = await lease_jobs(store, org)
    assert again.id == first.id
    await store.cancel(org, [JobId(first.id)], reason="")
    await store.sweep()
    await store.sweep()
    ((second, _),) = await lease_jobs(store, org)
    assert {first.id, second.id} == set(ids_of(jobs))


async def test_a_group_keeps_its_order_behind_a_job_that_is_set_aside(
    store: Store, database: Database, org: OrgId
) -> None:
    await poisoned(store, database, org, 1)
    await store.enqueue(first := jobs_of("poison", org, group="g"))
    await store.enqueue(second := jobs_of("innocent", org, group="g"))
    assert await kinds_leased(store, org) == []
    await store.cancel(org, ids_of(first), reason="")
    ((job, _),) = await lease_jobs(store, org)
    assert job.id == ids_of(second)[0]


async def test_a_trial_that_waits_for_a_slot_of_jobs_that_are_set_aside_is_replaced(
    store: Store, database: Database, books: QueueAdmin, org: OrgId
) -> None:
    """A snoozed job gives its group slot up. Then the jobs that have the group slots wait for the end of the trial, and
    the trial waits for a group slot."""
    await books.alter_queue(org, QUEUE, QueueSettings(group_concurrency=2))
    await store.enqueue(jobs_of("poison", org, 3, group="g"))
    await crash(store, database, org, AFTER + 1, "poison")
    await store.sweep()
    assert await kinds_leased(store, org) == []
    await pass_pause(database, org)
    await store.sweep()
    ((trial, lease),) = await lease_jobs(store, org)
    assert await store.settle(Settlement.snooze(org, [Snooze(lease, MINUTE_US)])) == [Answer.OK]
    # The jobs that have got the group slots are set aside.
    assert await kinds_leased(store, org) == []
    await store.alter(org, [trial.id], Alteration(delay_us=0))
    assert await kinds_leased(store, org) == []
    await store.sweep()
    ((second, lease),) = await lease_jobs(store, org)
    assert second.id != trial.id
    assert await store.settle(Settlement.ack(org, [lease])) == [Answer.OK]
    await store.sweep()
    assert await quarantined(database, org) == {}
    assert len(await lease_jobs(store, org)) == 2


async def test_a_trial_that_waits_for_nodes_of_its_own_kind_is_replaced(
    store: Store, database: Database, org: OrgId
) -> None:
    """The nodes are set aside until the trial has ended, and the trial waits for the nodes."""
    flows = Flows(database, org, store=store)
    flow = await flows.start({"a": []})
    await crash(store, database, org, AFTER + 1, "greet")
    await store.sweep()
    assert await flows.claim() == set()
    await pass_pause(database, org)
    await store.sweep()
    assert await flows.claim() == {"a"}
    assert (await flows.add(flow, "a", {"x": []}, wait=CANCEL)).waits
    assert await flows.claim() == set()
    await store.sweep()
    assert await flows.claim() == {"x"}
    await flows.ack("x")
    await store.sweep()
    assert await quarantined(database, org) == {}
    assert await flows.run_all() == [{"a"}]


async def test_jobs_that_are_set_aside_are_counted_cancelled_and_purged(
    store: Store, database: Database, books: QueueAdmin, org: OrgId
) -> None:
    jobs = await poisoned(store, database, org, 4)
    assert await kinds_leased(store, org) == []
    (counts,) = await books.stats(org, QUEUE, include_finished=True)
    assert (counts.ready, counts.scheduled, counts.leased) == (4, 0, 0)
    assert await store.cancel(org, ids_of(jobs)[:1], reason="") == [Answer.OK]
    assert all(one.balanced for one in await books.check())
    assert await books.purge_queue(org, QUEUE, limit=10, include_dead=False) == 3
    await books.delete_queue(org, QUEUE)
    assert await quarantined(database, org) == {}
    assert all(one.balanced for one in await books.check())


async def test_a_backlog_is_set_aside_by_claims_and_released_in_portions(
    store: Store, database: Database, org: OrgId
) -> None:
    await poisoned(store, database, org, 1)
    for _ in range(3):
        await store.enqueue(jobs_of("poison", org, 1000))
    await store.enqueue(innocent := jobs_of("innocent", org, 1))
    ((job, lease),) = await lease_jobs(store, org, max_jobs=100)
    assert job.id == ids_of(innocent)[0]
    await store.settle(Settlement.ack(org, [lease]))
    await database.run(
        b"DELETE FROM windrow.quarantine k USING windrow.queue q WHERE q.queue_id = k.queue_id AND q.org = %(org)s",
        {"org": org},
    )
    await store.sweep()
    assert len(await lease_jobs(store, org)) == 1000


async def test_claims_of_queues_without_trouble_send_no_further_statement(recorder: Recorder, org: OrgId) -> None:
    store = Store(recorder)
    await store.enqueue(some_jobs(org, 10))
    before = len(recorder.runs)
    await lease_jobs(store, org)
    assert recorder.count(statements.CONTAIN, since=before) == 0


@pytest.mark.parametrize("row_locked", [False, True], ids=["away", "locked"])
async def test_a_claim_that_cannot_look_at_lost_jobs_gives_them_back_and_the_attempt_does_not_count(
    recorder: Recorder, database: Database, books: QueueAdmin, org: OrgId, row_locked: bool
) -> None:
    await books.create_queue(org, QUEUE, QueueSettings(quarantine_after=AFTER))
    store = Store(recorder)
    await store.enqueue(jobs := jobs_of("innocent", org, 2))
    await lease_jobs(store, org)
    await end_leases(database, org)
    recorder.fail(statements.CONTAIN, error=RowLocked(SHARD, "a crash") if row_locked else None)
    with pytest.raises(ShardUnavailable):
        await lease_jobs(store, org)
    await store.finish()
    assert await attempts(store, org, jobs) == [("ready", 1)] * 2
    recorder.fail_no_more()
    assert len(await lease_jobs(store, org)) == 2


async def test_a_claim_whose_look_fails_leases_nothing_more_under_its_number(
    recorder: Recorder, database: Database, books: QueueAdmin, org: OrgId
) -> None:
    await books.create_queue(org, QUEUE, QueueSettings(quarantine_after=AFTER))
    store = Store(recorder)
    await store.enqueue(jobs_of("innocent", org))
    # A claim that finds a job which is out of attempts marks the job as dead, and then claims again.
    await store.enqueue(some_jobs(org, max_attempts=1))
    await lease_jobs(store, org)
    await end_leases(database, org)
    recorder.fail(statements.CONTAIN, error=RowLocked(SHARD, "a crash"))
    before = len(recorder.runs)
    with pytest.raises(RowLocked):
        await lease_jobs(store, org)
    assert recorder.count(statements.CLAIM, since=before) == 1


async def test_a_sweep_that_meets_a_lock_on_quarantines_finds_ready_jobs_nevertheless(
    recorder: Recorder, org: OrgId
) -> None:
    store = Store(recorder)
    await store.enqueue(jobs_of("innocent", org))
    await store.quarantine.add(org, QUEUE, "poison", "", epoch=1)
    recorder.fail(statements.FORGET_CRASHES, error=RowLocked(SHARD, "a crash"))
    (number,) = (await store.names.find([(org, QUEUE)])).values()
    assert number in (await store.sweep([number])).first


async def test_the_history_of_a_job_that_is_set_aside_has_each_crash_once(
    store: Store, database: Database, org: OrgId
) -> None:
    jobs = await poisoned(store, database, org, 1)
    assert await kinds_leased(store, org) == []
    (record,) = await store.get(org, ids_of(jobs), include_payload=False)
    outcomes = [one["outcome"] for one in history_of(record.history)]
    assert outcomes.count("expired") == AFTER + 1


@pytest.mark.thorough
async def test_nothing_is_stranded_whatever_happens(
    store: Store, database: Database, books: QueueAdmin, org: OrgId
) -> None:
    """Takes random steps of producers, of workers that ack, fail or die, of operators and of two routers. Then all
    kinds are released, and every job that has not been acked must be ready."""
    luck = luck_of("quarantine")
    routers = [store, Store(database)]
    kinds = ["poison", "innocent"]
    for _ in range(trials(60, thorough=1000)):
        router = luck.choice(routers)
        match luck.randrange(8):
            case 0:
                group = luck.choice([None, "g"])
                await router.enqueue(jobs_of(luck.choice(kinds), org, luck.randint(1, 3), group=group))
            case 1 | 2:
                held = await lease_jobs(router, org, max_jobs=luck.randint(1, 5))
                await give_back(router, org, held[::2])
                await end_leases(database, org)
            case 3:
                held = await lease_jobs(router, org, max_jobs=2)
                await router.settle(Settlement.ack(org, [lease for job, lease in held if job.kind == "innocent"]))
                await end_leases(database, org)
            case 4:
                held = await lease_jobs(router, org, max_jobs=2)
                await router.settle(Settlement.nack(org, [Nack(lease=lease, retry_after_us=0) for _, lease in held]))
            case 5:
                await router.sweep()
            case 6:
                await pass_pause(database, org)
            case _:
                if luck.random() < 0.5:
                    await router.quarantine.add(org, QUEUE, luck.choice(kinds), "", epoch=1)
                else:
                    await router.quarantine.release(org, QUEUE, luck.choice(kinds), epoch=1)
    await end_leases(database, org)
    for kind in kinds:
        await store.quarantine.release(org, QUEUE, kind, epoch=1)
    await books.alter_queue(org, QUEUE, QueueSettings(), reset=["quarantine_after"])
    for router in routers:
        await router.sweep()
    # The jobs that are out of attempts are dead now.
    while held := await lease_jobs(store, org):
        answers = await store.settle(Settlement.ack(org, [lease for _, lease in held]))
        assert set(answers) == {Answer.OK}
        await store.sweep()
    (counts,) = await books.stats(org, QUEUE, include_finished=True)
    assert (counts.ready, counts.scheduled, counts.leased) == (0, 0, 0)
    assert all(one.balanced for one in await books.check())


DEEP = b"""
INSERT INTO windrow.job (id, queue_id, run_at, visible_at, priority, kind, payload)
SELECT
    (
        lpad(to_hex((extract(epoch FROM now()) * 1000)::bigint), 12, '0') || '7000' || '8'
        || lpad(to_hex(n + %(from)s), 15, '0')
    )::uuid,
    %(queue_id)s, due.at, CASE WHEN %(set_aside)s THEN 'infinity' ELSE due.at END, 5, %(kind)s, ''
FROM generate_series(1, 20000) AS n
CROSS JOIN LATERAL (SELECT now() - interval '1 day' + n * interval '1 us' AS at) due
"""

# Reads three counters: the job rows that scans of the table have read, and the entries that were read in each of two
# indexes.
READS = b"""
SELECT
    pg_stat_get_xact_tuples_returned('windrow.job'::regclass::oid)::bigint,
    pg_stat_get_xact_tuples_returned('windrow.job_ready'::regclass::oid)::bigint,
    pg_stat_get_xact_tuples_returned('windrow.job_set_aside'::regclass::oid)::bigint
"""


async def test_sweeps_and_explanations_read_no_more_with_many_jobs(fresh_recorder: Recorder, org: OrgId) -> None:
    """Counts what the statements read while 20,000 jobs are ready and 20,000 jobs are set aside. Postgres has planned
    the statements for empty tables."""
    store = Store(fresh_recorder)
    await QueueAdmin(fresh_recorder).create_queue(org, QUEUE, QueueSettings(quarantine_after=AFTER))
    await store.quarantine.add(org, QUEUE, "poison", "", epoch=1)
    for _ in range(8):
        await store.quarantine.sweep()
        await store.quarantines(org, None)
    ((_, queue_id),) = (await store.names.find([(org, QUEUE)])).items()
    parameters = {"queue_id": queue_id, "from": 0, "kind": "innocent", "set_aside": False}
    await fresh_recorder.run(DEEP, parameters)
    await fresh_recorder.run(DEEP, {**parameters, "from": 20_000, "kind": "poison", "set_aside": True})
    await pass_pause(fresh_recorder, org)
    await store.quarantine.sweep()
    await store.quarantines(org, None)
    for statement in (
        statements.READ_QUARANTINES,
        statements.FIND_SUSPECTS,
        statements.BEGIN_TRIALS,
        statements.RELEASE_SET_ASIDE,
        statements.LIST_QUARANTINES,
    ):
        _, sent = fresh_recorder.last(statement)
        async with fresh_recorder.transaction() as connection:
            # Read the counters of this transaction, which the session has not reported yet.
            before = (await connection.run(READS, {}))[0]
            await connection.run(statement, sent)
            after = (await connection.run(READS, {}))[0]
        rows, ready, entries = (now - then for now, then in zip(after, before, strict=True))
        most = 1_001 if statement is statements.LIST_QUARANTINES else 3
        assert (statement.name, rows, ready, entries <= most) == (statement.name, 0, 0, True), entries


async def test_operators_quarantine_and_release_a_kind_by_the_client_and_the_command(
    postgres: Server, tmp_path_factory: pytest.TempPathFactory
) -> None:
    database = postgres.create("quarantine")
    # Jobs are set aside without a sweep, but only a sweep carries out a release.
    config = write_cluster(tmp_path_factory.mktemp("quarantine") / "cluster.toml", {"s1": database}, sweep_seconds=1)
    with running_routers(config) as routers:
        address = ("--address", routers.address)
        async with windrow.Client(routers.address, org="acme") as client:
            queue = await client.put_queue("mail", quarantine_after=7)
            assert queue.quarantine_after == 7
            poisoned = await client.enqueue("mail", "poison", b"")
            done = command("queues", "quarantine", "acme", "mail", "poison", "--reason", "bad", *address)
            assert done.lines == ["kind 'poison' of queue 'mail' of org 'acme' is quarantined"]
            assert [job.kind for job in await client.dequeue("mail", max_jobs=10)] == []
            (listed,) = await client.list_quarantines("mail")
            assert (listed.kind, listed.reason, listed.by_operator, listed.set_aside) == ("poison", "bad", True, 1)
            (document,) = command("queues", "quarantined", "acme", "--json", *address).documents
            assert (document["kind"], document["set_aside"], document["next_trial_at"]) == ("poison", 1, None)
            shown = command("queues", "quarantined", "acme", *address).lines
            assert shown[1].split() == ["mail", "poison", *shown[1].split()[2:4], "0", "1", "bad"]
            why = command("jobs", "why", "acme", poisoned.id, *address)
            assert "quarantined since" in why.out
            assert "by an operator: bad; 1 job set aside, until somebody releases it" in why.out
            assert "quarantined since" in command("queues", "why", "acme", "mail", *address).out
            done = command("queues", "release", "acme", "mail", "poison", *address)
            assert done.lines == ["kind 'poison' of queue 'mail' of org 'acme' is released"]
            async with asyncio.timeout(PATIENCE_S):
                (job,) = await client.dequeue("mail", max_jobs=1, wait=20)
            assert job.id == poisoned.id
            assert await client.release_kind("mail", "poison") is False
            assert await client.list_quarantines() == []
            with pytest.raises(windrow.NotFound):
                await client.quarantine_kind("none", "poison")
            assert command("queues", "release", "acme", "none", "poison", *address).code == 4
            reset = ("queues", "update", "acme", "mail", "--reset", "quarantine_after", "--json")
            assert command(*reset, *address).documents[0]["quarantine_after"] is None
            assert command("queues", "update", "acme", "mail", "--quarantine-after", "0", *address).code == 2


async def test_an_org_has_a_bounded_number_of_quarantined_kinds(
    postgres: Server, tmp_path_factory: pytest.TempPathFactory
) -> None:
    database = postgres.create("quarantine_bound")
    config = write_cluster(tmp_path_factory.mktemp("bound") / "cluster.toml", {"s1": database}, sweep_seconds=3600)
    with running_routers(config) as routers:
        async with windrow.Client(routers.address, org="acme") as client:
            for queue in ("mail", "images"):
                await client.create_queue(queue)
            await client.quarantine_kind("images", "kind")
            with psycopg.connect(database) as connection:
                connection.execute(
                    "INSERT INTO windrow.quarantine (queue_id, kind, crashes, pause_s)"
                    " SELECT q.queue_id, 'kind-' || n, 0, 1 FROM windrow.queue q, generate_series(2, %s) AS n"
                    " WHERE q.org = 'acme' AND q.queue = 'mail'",
                    [KINDS_MAX],
                )
            with pytest.raises(windrow.ResourceExhausted, match="acme' has 1,000 quarantined kinds") as refused:
                await client.quarantine_kind("mail", "another")
            assert refused.value.reason == "LIMIT_REACHED"
            # A kind that is quarantined already may get another reason, and each org may have its own 1,000 quarantined
            # kinds.
            await client.quarantine_kind("images", "kind", reason="still bad")
            await client.release_kind("images", "kind")
            await client.quarantine_kind("mail", "another")
        async with windrow.Client(routers.address, org="other") as client:
            await client.create_queue("mail")
            await client.quarantine_kind("mail", "kind")


async def test_other_routers_are_told_of_a_quarantine_before_they_sweep(
    postgres: Server, tmp_path_factory: pytest.TempPathFactory
) -> None:
    database = postgres.create("quarantine_told")
    config = write_cluster(tmp_path_factory.mktemp("told") / "cluster.toml", {"s1": database}, sweep_seconds=3600)
    with running_routers(config) as one, running_routers(config) as two:
        async with (
            windrow.Client(one.address, org="acme") as first,
            windrow.Client(two.address, org="acme") as second,
        ):
            await first.create_queue("mail")
            await first.quarantine_kind("mail", "poison")
            async with asyncio.timeout(PATIENCE_S):
                while True:
                    await first.enqueue("mail", "poison", b"")
                    got = await second.dequeue("mail", max_jobs=10)
                    if not got:
                        break
                    await second.ack(*got)
            assert (await second.list_quarantines())[0].set_aside == 1
