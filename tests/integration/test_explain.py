"""Why a job or a queue does not run: the tests produce each cause, and the answers name the cause with its figures.
Other tests are about the record of consumers. From this record, an answer can tell that there is no consumer."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import grpc
import psycopg
import pytest

from router.buffer import Account, Buffer
from router.codec.causes import EXPIRED_REASON
from router.fleet.fleet import Fleet
from router.fleet.shard_handle import ShardHandle
from router.route.explain import explain_job, explain_queue
from shard.errors import UnknownJob, UnknownQueue
from shard.history import erasure
from shard.placement import move_steps
from shard.placement.cluster_file import parse_cluster
from shard.placement.slots import slot_of
from shard.postgres.pool import Database
from shard.queue import statements
from shard.queue.consumers_seen import SEEN_US
from shard.queue.explain import COUNTED_MAX
from shard.queue.settle import Nack, Settlement, Snooze
from shard.queue.store import Store
from shard.queue_settings import QueueSettings
from shard.vocabulary import Failure, JobId, NewJobs, OrgId, QueueName, ShardName
from tests import timemachine
from tests.conftest import CLUSTER, SHARD
from tests.jobs import HOUR_US, MINUTE_US, QUEUE, ids_of, job_id, lease_jobs, some_jobs
from tests.pair import A, B, Pair, open_pair
from tests.postgres import Server
from tests.recorder import Recorder
from tests.routers import PATIENCE_S, Stubs, running_routers, stubs, until, write_cluster
from tests.streams import new_job, start
from tests.waiting import WaitingConsumer
from windrow import SyncClient
from windrow.causes import read_causes
from windrow.v1 import admin_pb2, cause_pb2, job_pb2, queue_pb2
from windrow.v1.cause_pb2 import Cause

NEVER_S = 3600.0
KIND = "greet"
OTHER_KIND = "digest"
FAILURE = Failure(type="SMTPError", message="no such mailbox")


@dataclass(kw_only=True)
class Scene:
    """A fleet in this process, and an org on its first shard. Jobs are enqueued and claimed by a store of another
    router, so that the fleet's own consumers are not told of the jobs."""

    fleet: Fleet
    buffer: Buffer
    database: Database
    org: OrgId

    @property
    def member(self) -> ShardHandle:
        return self.fleet.member(SHARD)

    @property
    def elsewhere(self) -> Store:
        return Store(self.database)

    async def enqueue(self, jobs: NewJobs) -> list[JobId]:
        await self.elsewhere.enqueue(jobs)
        return ids_of(jobs)

    async def one(self, **options: int) -> JobId:
        """Enqueues a job of the kind KIND. `options` are those of `some_jobs`."""
        (name,) = await self.enqueue(some_jobs(self.org, 1, **options))  # type: ignore[arg-type]
        return name

    async def lease(self) -> list[JobId]:
        """Leases all jobs that are ready."""
        return [job.id for job, _ in await lease_jobs(self.elsewhere, self.org, window_us=HOUR_US, worker="w1")]

    async def nack(self, *, permanent: bool = False, retry_us: int | None = HOUR_US) -> None:
        held = [lease for _, lease in await lease_jobs(self.elsewhere, self.org, window_us=HOUR_US)]
        failure = FAILURE._replace(permanent=permanent)
        nacks = [Nack(lease=lease, failure=failure, retry_after_us=retry_us) for lease in held]
        await self.elsewhere.settle(Settlement.nack(self.org, nacks))

    async def seen(self, *kinds: str) -> None:
        """Records that another router has seen a consumer of these kinds. Without kinds, the consumer takes all
        kinds."""
        seen = self.elsewhere.consumers_seen
        seen.note(self.org, [QUEUE], kinds)
        await seen.write()

    async def why(self, name: JobId) -> admin_pb2.ExplainJobResponse:
        return await explain_job(self.fleet, self.buffer, self.org, name)

    async def why_queue(self) -> admin_pb2.ExplainQueueResponse:
        return await explain_queue(self.fleet, self.buffer, self.org, QUEUE)

    async def set_paused(self, *, paused: bool = True) -> None:
        await self.member.queue_admin.alter_queue(self.org, QUEUE, QueueSettings(paused=paused))


@contextlib.asynccontextmanager
async def opened(dsns: Mapping[ShardName, str], more: str = "") -> AsyncGenerator[tuple[Fleet, Buffer], None]:
    """A fleet of these shards. `more`: further keys of the last shard in the cluster file."""
    shards = "".join(f"[[shard]]\nname = '{name}'\ndsn = '''{dsn}'''\n" for name, dsn in dsns.items())
    cluster = parse_cluster(f"[cluster]\nname = '{CLUSTER}'\n{shards}{more}\n", source="test")
    buffer, ready = Buffer(2**20), asyncio.Event()
    # No sweep comes while a test runs.
    fleet = Fleet(cluster, connections_per_shard=2, sweep_s=NEVER_S, buffer=buffer)
    running = asyncio.create_task(fleet.run(ready))
    try:
        await asyncio.wait_for(ready.wait(), PATIENCE_S)
        yield fleet, buffer
    finally:
        running.cancel()
        await asyncio.wait({running})


@pytest.fixture
async def scene(module_dsn: str, database: Database, org: OrgId) -> AsyncGenerator[Scene, None]:
    async with opened({SHARD: module_dsn}) as (fleet, buffer):
        yield Scene(fleet=fleet, buffer=buffer, database=database, org=org)


@contextlib.contextmanager
def waiting(scene: Scene, *kinds: str) -> Generator[None, None, None]:
    """A consumer of these kinds that waits at the fleet's router and has room, but gets no jobs by hand-over."""
    waiter, room = WaitingConsumer(scene.org, kinds=kinds, credit=10), scene.member.room
    room.enter(waiter)
    try:
        yield
    finally:
        room.leave(waiter)
    assert (waiter.credit, waiter.woken) == (10, 0)


def names(causes: Sequence[Cause]) -> list[str | None]:
    return [cause.WhichOneof("cause") for cause in causes]


# ── Jobs ─────────────────────────────────────────────────────────────────────────────────────────────────────────────

Prepare = Callable[[Scene], Awaitable[JobId]]
# For each case: the function that makes a job, the causes that the job must have (in this order), and a condition for
# the first cause.
CASES: dict[str, tuple[Prepare, list[str], Callable[[Cause], object]]] = {}


def has(*causes: str, first: Callable[[Cause], object] = lambda _: True) -> Callable[[Prepare], Prepare]:
    """`first`: what must be true of the figures of the first cause."""

    def add(prepare: Prepare) -> Prepare:
        CASES[prepare.__name__] = prepare, list(causes), first
        return prepare

    return add


@has("scheduled", first=lambda it: it.scheduled.reason == "")
async def a_job_that_is_not_due(scene: Scene) -> JobId:
    await scene.enqueue(some_jobs(scene.org, 1))
    await scene.seen()
    return await scene.one(delay_us=HOUR_US)


@has("scheduled", first=lambda it: it.scheduled.reason == "later")
async def a_job_that_was_snoozed(scene: Scene) -> JobId:
    name = await scene.one()
    held = [lease for _, lease in await lease_jobs(scene.elsewhere, scene.org)]
    snoozes = [Snooze(lease=lease, after_us=HOUR_US, reason="later") for lease in held]
    await scene.elsewhere.settle(Settlement.snooze(scene.org, snoozes))
    await scene.seen()
    return name


@has("kind_not_taken", "scheduled", first=lambda it: it.kind_not_taken.kind == KIND)
async def a_job_that_is_snoozed_for_lack_of_a_handler(scene: Scene) -> JobId:
    name = await a_job_that_was_snoozed(scene)
    await forget(scene)
    await scene.seen(OTHER_KIND)
    return name


@has(
    "backing_off",
    first=lambda it: (
        (it.backing_off.attempt, it.backing_off.max_attempts, it.backing_off.failure.type) == (1, 20, "SMTPError")
    ),
)
async def a_job_that_has_failed(scene: Scene) -> JobId:
    name = await scene.one()
    await scene.nack()
    await scene.seen()
    return name


@has("jobs_ahead", first=lambda it: it.jobs_ahead == cause_pb2.JobsAheadCause(earlier=7))
async def a_job_behind_earlier_ones(scene: Scene) -> JobId:
    await scene.enqueue(some_jobs(scene.org, 7))
    await scene.seen()
    return await scene.one()


@has("jobs_ahead", first=lambda it: it.jobs_ahead == cause_pb2.JobsAheadCause(more_urgent=5, earlier=2))
async def a_job_behind_more_urgent_ones(scene: Scene) -> JobId:
    await scene.enqueue(some_jobs(scene.org, 2))
    await scene.enqueue(some_jobs(scene.org, 9, priority=6))
    name = await scene.one()
    await scene.enqueue(some_jobs(scene.org, 3, priority=1))
    await scene.enqueue(some_jobs(scene.org, 2, priority=4))
    # None of the following jobs comes before the job `name`.
    await scene.enqueue(some_jobs(scene.org, 4, priority=1, delay_us=HOUR_US))
    await scene.enqueue(some_jobs(scene.org, 4))
    await scene.seen()
    return name


@has("jobs_ahead", first=lambda it: it.jobs_ahead == cause_pb2.JobsAheadCause(earlier=COUNTED_MAX, at_least=True))
async def a_job_behind_more_than_are_counted(scene: Scene) -> JobId:
    await scene.enqueue(some_jobs(scene.org, COUNTED_MAX))
    await scene.one()
    await scene.seen()
    return await scene.one()


@has("jobs_ahead", first=lambda it: it.jobs_ahead == cause_pb2.JobsAheadCause(more_urgent=0, earlier=COUNTED_MAX))
async def a_job_behind_as_many_as_are_counted(scene: Scene) -> JobId:
    await scene.enqueue(some_jobs(scene.org, COUNTED_MAX))
    await scene.seen()
    return await scene.one()


@has("paused")
async def a_job_of_a_paused_queue(scene: Scene) -> JobId:
    name = await scene.one()
    await scene.seen()
    await scene.set_paused()
    return name


def quarantined(cause: Cause, *, set_aside: int, trial: bool = False) -> bool:
    it = cause.quarantine
    return (it.kind, it.reason, it.by_operator, it.set_aside, bool(it.trial_id)) == (
        KIND,
        "bad",
        True,
        set_aside,
        trial,
    )


@has("quarantine", first=lambda it: quarantined(it, set_aside=1))
async def a_job_that_is_set_aside(scene: Scene) -> JobId:
    name = await scene.one()
    store = scene.elsewhere
    await store.quarantine.add(scene.org, QUEUE, KIND, "bad", epoch=1)
    assert await lease_jobs(store, scene.org) == []
    await scene.seen()
    return name


@has("quarantine", first=lambda it: quarantined(it, set_aside=0))
async def a_job_of_a_quarantined_kind_that_no_claim_has_reached(scene: Scene) -> JobId:
    name = await scene.one()
    await scene.elsewhere.quarantine.add(scene.org, QUEUE, KIND, "bad", epoch=1)
    await scene.seen()
    return name


@has("due")
async def a_job_that_is_let_through_as_a_trial(scene: Scene) -> JobId:
    name = await a_job_that_is_set_aside(scene)
    await scene.database.run(b"UPDATE windrow.quarantine SET next_trial_at = now()", {})
    await scene.elsewhere.quarantine.sweep()
    return name


@has("due")
async def a_job_whose_kind_was_released_and_that_no_sweep_has_reached(scene: Scene) -> JobId:
    name = await a_job_that_is_set_aside(scene)
    await scene.elsewhere.quarantine.release(scene.org, QUEUE, KIND, epoch=1)
    return name


@has("scheduled", "paused", "no_consumer")
async def a_job_that_several_things_hold(scene: Scene) -> JobId:
    name = await scene.one(delay_us=HOUR_US)
    await scene.set_paused()
    return name


@has("leased", first=lambda it: (it.leased.worker, it.leased.attempt, it.leased.max_attempts) == ("w1", 1, 20))
async def a_job_that_a_consumer_has(scene: Scene) -> JobId:
    name = await scene.one()
    await scene.lease()
    return name


@has("due")
async def a_job_whose_lease_has_expired(scene: Scene) -> JobId:
    name = await a_job_that_a_consumer_has(scene)
    await timemachine.end_leases(scene.database, scene.org)
    await scene.seen()
    return name


@has("out_of_attempts", first=lambda it: (it.out_of_attempts.attempt, it.out_of_attempts.max_attempts) == (1, 1))
async def a_job_whose_last_lease_has_expired(scene: Scene) -> JobId:
    name = await scene.one(max_attempts=1)
    await scene.lease()
    await timemachine.end_leases(scene.database, scene.org)
    return name


@has("expired")
async def a_job_past_its_expiry(scene: Scene) -> JobId:
    jobs = some_jobs(scene.org, 1)
    jobs.expires_at_us[0] = time.time_ns() // 1000 + HOUR_US
    (name,) = await scene.enqueue(jobs)
    await timemachine.reach_expiry(scene.database, scene.org)
    return name


@has("expired")
async def a_job_that_expires_before_it_is_due(scene: Scene) -> JobId:
    jobs = some_jobs(scene.org, 1, delay_us=2 * HOUR_US)
    jobs.expires_at_us[0] = time.time_ns() // 1000 + HOUR_US
    (name,) = await scene.enqueue(jobs)
    return name


@has("no_consumer", first=lambda it: not it.no_consumer.HasField("last_seen"))
async def a_job_that_nobody_looks_for(scene: Scene) -> JobId:
    return await scene.one()


@has(
    "no_consumer",
    "jobs_ahead",
    first=lambda it: it.no_consumer.HasField("last_seen") and it.no_consumer.seen_within.ToMicroseconds() == SEEN_US,
)
async def a_job_whose_consumers_have_left(scene: Scene) -> JobId:
    await scene.one()
    name = await scene.one()
    await scene.seen()
    await forget(scene, by_us=SEEN_US + MINUTE_US)
    return name


@has(
    "kind_not_taken",
    first=lambda it: (it.kind_not_taken.kind, list(it.kind_not_taken.taken_kinds)) == (KIND, [OTHER_KIND, "other"]),
)
async def a_job_of_a_kind_that_nobody_takes(scene: Scene) -> JobId:
    name = await scene.one()
    await scene.seen(OTHER_KIND, "other")
    return name


@has("due", first=lambda it: not it.due.consumer_waits)
async def a_job_that_is_the_next_one(scene: Scene) -> JobId:
    name = await scene.one()
    await scene.seen(KIND)
    return name


@has("finished", first=lambda it: it.finished.state == job_pb2.JOB_STATE_SUCCEEDED and it.finished.HasField("at"))
async def a_job_that_has_succeeded(scene: Scene) -> JobId:
    name = await scene.one()
    held = [lease for _, lease in await lease_jobs(scene.elsewhere, scene.org)]
    await scene.elsewhere.settle(Settlement.ack(scene.org, held, [b""]))
    return name


@has(
    "finished",
    first=lambda it: (it.finished.state, it.finished.reason) == (job_pb2.JOB_STATE_CANCELLED, "not needed"),
)
async def a_job_that_was_cancelled(scene: Scene) -> JobId:
    name = await scene.one()
    await scene.elsewhere.cancel(scene.org, [name], reason="not needed")
    return name


@has("expired", "finished")
async def a_job_that_was_cancelled_because_it_had_expired(scene: Scene) -> JobId:
    name = await a_job_past_its_expiry(scene)
    assert await scene.lease() == []
    return name


@has("finished", first=lambda it: it.finished == cause_pb2.FinishedCause())
async def a_job_that_was_deleted_after_its_retention(scene: Scene) -> JobId:
    # Make the org exist.
    await scene.one()
    name = job_id()
    async with scene.database.transaction() as connection:
        day = f"past_id_{scene.org.replace('-', '_')}"
        await connection.execute(f"CREATE TABLE windrow.{day} (LIKE windrow.past_id INCLUDING ALL)".encode())
        await connection.execute(
            f"INSERT INTO windrow.{day} SELECT '2020-01-01', %s, org_id FROM windrow.org WHERE org = %s".encode(),
            [name, scene.org],
        )
        await connection.execute(
            f"ALTER TABLE windrow.past_id ATTACH PARTITION windrow.{day} FOR VALUES IN ('2020-01-01')".encode()
        )
    return name


@has(
    "dead",
    first=lambda it: (
        (it.dead.attempt, it.dead.max_attempts, it.dead.last_outcome, it.dead.failure.permanent)
        == (1, 1, job_pb2.ATTEMPT_OUTCOME_NACKED, False)
    ),
)
async def a_job_that_is_dead_without_attempts(scene: Scene) -> JobId:
    name = await scene.one(max_attempts=1)
    await scene.nack(retry_us=None)
    return name


@has("dead", first=lambda it: it.dead.failure.permanent and it.dead.reason)
async def a_job_that_was_killed(scene: Scene) -> JobId:
    name = await scene.one()
    await scene.nack(permanent=True)
    return name


@has("dead", first=lambda it: it.dead.last_outcome == job_pb2.ATTEMPT_OUTCOME_EXPIRED)
async def a_job_that_is_dead_after_its_last_lease_expired(scene: Scene) -> JobId:
    name = await a_job_whose_last_lease_has_expired(scene)
    assert await scene.lease() == []
    return name


@has("moving", first=lambda it: it.moving.on_its_way and it.moving.source == SHARD)
async def a_job_that_is_on_its_way(scene: Scene) -> JobId:
    name = await scene.one()
    slot = slot_of(scene.org)
    assert await move_steps.close_slots(scene.database, [slot], epoch=2)
    assert await move_steps.export_chunk(scene.database, {slot: 1}, epoch=2, rows_max=9, bytes_max=10**6)
    return name


async def forget(scene: Scene, *, by_us: int = 2 * SEEN_US) -> None:
    """Makes the record of the org's consumers older."""
    await scene.database.run(
        b"UPDATE windrow.consumer_seen s SET at = at - %(by_us)s * interval '1 us' FROM windrow.queue q "
        b"WHERE q.queue_id = s.queue_id AND q.org = %(org)s",
        {"org": scene.org, "by_us": by_us},
    )


def test_there_are_at_least_twenty_cases() -> None:
    assert len(CASES) >= 20


@pytest.mark.parametrize("case", CASES)
async def test_each_cause_is_named_with_its_figures(scene: Scene, case: str) -> None:
    prepare, expected, fits = CASES[case]
    name = await prepare(scene)
    found = await scene.why(name)
    assert names(found.causes) == expected, found
    assert fits(found.causes[0]), found
    # The fleet knows only the id of a deleted job.
    if found.state != job_pb2.JOB_STATE_UNSPECIFIED:
        assert (found.queue, found.kind, found.shard) == (QUEUE, KIND, SHARD)


async def test_a_job_that_no_shard_knows_is_not_found(scene: Scene, other_org: OrgId) -> None:
    with pytest.raises(UnknownJob):
        await scene.why(job_id())
    theirs = some_jobs(other_org, 1)
    await scene.enqueue(theirs)
    with pytest.raises(UnknownJob):
        await scene.why(ids_of(theirs)[0])
    with pytest.raises(UnknownQueue):
        await scene.why_queue()


async def test_it_is_said_when_a_job_runs_only_if_nothing_else_holds_it(scene: Scene) -> None:
    scheduled = await scene.one(delay_us=HOUR_US)
    assert not (await scene.why(scheduled)).HasField("runs_at"), "nobody was seen to run it"
    await scene.seen()
    found = await scene.why(scheduled)
    assert found.runs_at == found.causes[0].scheduled.until
    await scene.set_paused()
    assert not (await scene.why(scheduled)).HasField("runs_at")
    await scene.set_paused(paused=False)
    ready = await scene.one()
    assert (await scene.why(ready)).HasField("runs_at")
    assert not (await scene.why(await scene.one())).HasField("runs_at"), "other jobs come first"


async def test_a_consumer_that_waits_here_is_known_without_a_record(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scene.member.store.consumers_seen, "note", lambda *_: None)
    name = await scene.one()
    with waiting(scene, OTHER_KIND):
        found = await scene.why(name)
        assert names(found.causes) == ["kind_not_taken"]
        assert list(found.causes[0].kind_not_taken.taken_kinds) == [OTHER_KIND]
        with waiting(scene, KIND, "more"):
            found = await scene.why(name)
            assert names(found.causes) == ["due"]
            assert found.causes[0].due.consumer_waits
            assert (await scene.why_queue()).causes[0].backlog.consumer_waits


async def test_claims_that_wait_for_memory_are_told(scene: Scene) -> None:
    name = await scene.one()
    await scene.seen()
    holder = Account(scene.buffer, org=scene.org, peer="p")
    assert holder.take(scene.buffer.bytes_max // 2)
    claim = asyncio.create_task(
        Account(scene.buffer, org=scene.org, peer="q").reserve(2**19, patiently=True, shard=SHARD)
    )
    await asyncio.sleep(0)
    found = await scene.why(name)
    assert names(found.causes) == ["router_share", "due"]
    share = found.causes[0].router_share
    assert (share.held_bytes, share.all_held_bytes, share.max_bytes) == (2**19, 2**19, 2**20)
    assert not found.HasField("runs_at")
    claim.cancel()
    await asyncio.wait({claim})
    assert names((await scene.why(name)).causes) == ["due"]


async def test_a_shard_whose_clock_was_set_back_gives_no_jobs(scene: Scene) -> None:
    name = await scene.one()
    await scene.seen()
    scene.member.store.clock.trouble = "its clock was set back"
    found = await scene.why(name)
    assert names(found.causes) == ["shard_down"]
    assert found.causes[0].shard_down == cause_pb2.ShardDownCause(shard=SHARD, reason="its clock was set back")


# ── Queues ───────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_queue_says_what_it_has_and_what_holds_it(scene: Scene) -> None:
    await scene.member.queue_admin.create_queue(scene.org, QUEUE, QueueSettings())
    assert names((await scene.why_queue()).causes) == ["empty", "no_consumer"]
    await scene.seen()
    await scene.set_paused()
    assert names((await scene.why_queue()).causes) == ["empty", "paused"]
    await scene.set_paused(paused=False)
    await scene.enqueue(some_jobs(scene.org, 2, delay_us=HOUR_US))
    found = await scene.why_queue()
    assert names(found.causes) == ["scheduled"]
    assert found.runs_at == found.causes[0].scheduled.until
    leased = await scene.one()
    await scene.lease()
    found = await scene.why_queue()
    assert names(found.causes) == ["in_flight", "scheduled"]
    assert (found.causes[0].in_flight.leased, found.causes[0].in_flight.at_least) == (1, False)
    later = await scene.enqueue(some_jobs(scene.org, 3))
    (urgent,) = await scene.enqueue(some_jobs(scene.org, 1, priority=2))
    found = await scene.why_queue()
    assert names(found.causes) == ["backlog", "in_flight", "scheduled"]
    backlog = found.causes[0].backlog
    assert (backlog.ready, backlog.at_least, backlog.first_id) == (4, False, urgent)
    assert found.HasField("runs_at")
    await scene.set_paused()
    found = await scene.why_queue()
    assert names(found.causes) == ["paused", "backlog", "in_flight", "scheduled"]
    assert not found.HasField("runs_at")
    assert leased not in later


async def test_a_job_that_waits_for_its_group_says_for_which_job(scene: Scene) -> None:
    jobs = await scene.enqueue(some_jobs(scene.org, 3, group="g", ids=sorted(job_id() for _ in range(3))))
    await scene.seen()
    assert names((await scene.why(jobs[0])).causes) == ["due"]
    found = await scene.why(jobs[2])
    assert (found.state, names(found.causes)) == (job_pb2.JOB_STATE_READY, ["group"])
    group = found.causes[0].group
    assert (group.concurrency, group.taken, group.leased, group.holder_id) == (1, 1, 0, jobs[0])
    assert not group.HasField("until")
    await scene.lease()
    group = (await scene.why(jobs[2])).causes[0].group
    assert (group.group, group.leased, group.worker, group.holder_id) == ("g", 1, "w1", jobs[0])
    assert group.HasField("until")
    assert (group.ahead, group.at_least) == (1, False)
    sentence = str(read_causes((await scene.why(jobs[2])).causes)[0])
    assert sentence.startswith(
        f"waits for group 'g', of which 1 job may run at a time: worker 'w1' has job {jobs[0]} until "
    )
    assert sentence.endswith("; 1 job before it")
    waiting = (await scene.why_queue()).causes
    assert names(waiting) == ["group_backlog", "in_flight"]
    assert (waiting[0].group_backlog.jobs, waiting[0].group_backlog.at_least) == (2, False)


async def test_a_queue_names_its_quarantined_kinds(scene: Scene) -> None:
    await a_job_that_is_set_aside(scene)
    causes = (await scene.why_queue()).causes
    assert names(causes) == ["quarantine"]
    assert quarantined(causes[0], set_aside=1)
    await a_job_that_is_let_through_as_a_trial(scene)
    backlog, trial = (await scene.why_queue()).causes
    assert quarantined(trial, set_aside=1, trial=True)
    assert backlog.backlog.ready == 1


async def test_a_queue_is_counted_up_to_a_bound(scene: Scene) -> None:
    await scene.enqueue(some_jobs(scene.org, COUNTED_MAX))
    await scene.seen()
    backlog = (await scene.why_queue()).causes[0].backlog
    assert (backlog.ready, backlog.at_least) == (COUNTED_MAX, False)
    await scene.one()
    backlog = (await scene.why_queue()).causes[0].backlog
    assert (backlog.ready, backlog.at_least) == (COUNTED_MAX, True)
    await scene.lease()
    in_flight = next(cause.in_flight for cause in (await scene.why_queue()).causes if cause.HasField("in_flight"))
    assert (in_flight.leased, in_flight.at_least) == (100, True)


async def test_a_queue_whose_first_job_nobody_takes_says_so(scene: Scene) -> None:
    await scene.one()
    await scene.seen(OTHER_KIND)
    found = await scene.why_queue()
    assert names(found.causes) == ["kind_not_taken", "backlog"]
    assert found.causes[0].kind_not_taken.kind == KIND


# ── Several shards ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
async def pair(fresh_dsn: str, spare_dsn: str) -> AsyncGenerator[Pair, None]:
    async with open_pair(fresh_dsn, spare_dsn) as opened_pair:
        yield opened_pair


@pytest.mark.parametrize("state", ["off", "read_only", "enqueue_only"])
async def test_a_shard_that_is_away_or_gives_no_jobs_is_the_cause(pair: Pair, org: OrgId, state: str) -> None:
    jobs = some_jobs(org, 1)
    await pair.store(A).enqueue(jobs)
    await pair.move([org], target=B)
    async with opened(pair.dsns, f'state = "{state}"') as (fleet, buffer):
        found = await explain_job(fleet, buffer, org, ids_of(jobs)[0])
        of_queue = await explain_queue(fleet, buffer, org, QUEUE)
        for causes in (found.causes, of_queue.causes):
            assert names(causes)[0] == "shard_down"
            assert causes[0].shard_down.shard == B
            assert state.replace("_", "-") in causes[0].shard_down.reason.replace("_", "-")
        assert (found.state == job_pb2.JOB_STATE_UNSPECIFIED) == (state == "off")


async def test_while_an_org_moves_the_shards_are_named(pair: Pair, org: OrgId) -> None:
    jobs = some_jobs(org, 1)
    await pair.store(A).enqueue(jobs)
    await pair.begin([org], target=B)
    async with opened(pair.dsns) as (fleet, buffer):
        found = await explain_job(fleet, buffer, org, ids_of(jobs)[0])
        assert names(found.causes) == ["no_consumer", "moving"]
        assert found.causes[1].moving == cause_pb2.MovingCause(source=A, target=B)
        assert "moving" in names((await explain_queue(fleet, buffer, org, QUEUE)).causes)


# ── The record of consumers ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
async def recorded(recorder: Recorder, org: OrgId) -> Store:
    store = Store(recorder)
    await store.enqueue(some_jobs(org, 1))
    return store


async def rows(database: Database, org: OrgId) -> list[tuple[str, str]]:
    return await database.run(
        b"SELECT q.queue, s.kind FROM windrow.consumer_seen s JOIN windrow.queue q USING (queue_id) "
        b"WHERE q.org = %(org)s ORDER BY 1, 2",
        {"org": org},
    )


async def test_a_queue_and_kind_is_written_once_a_minute_at_most(
    recorder: Recorder, recorded: Store, org: OrgId
) -> None:
    seen = recorded.consumers_seen
    assert not seen.noted.is_set(), "nothing is to be written while no consumer is there"
    for _ in range(1000):
        seen.note(org, [QUEUE], [KIND, OTHER_KIND])
    recorder.changed = False
    await seen.write()
    assert not recorder.changed, "the history of the shard would get a mark each minute"
    assert recorder.count(statements.RECORD_CONSUMERS) == 1
    assert await rows(recorder, org) == [(QUEUE, OTHER_KIND), (QUEUE, KIND)]
    seen.note(org, [QUEUE], [KIND, OTHER_KIND])
    assert not seen.noted.is_set()
    # If the row is young, another router does not write it again.
    written = b"SELECT xmin::text, kind FROM windrow.consumer_seen ORDER BY kind"
    before = await recorder.run(written, {})
    other = Store(recorder).consumers_seen
    other.note(org, [QUEUE], [KIND])
    await other.write()
    assert await recorder.run(written, {}) == before


async def test_a_queue_that_does_not_exist_yet_is_recorded_when_it_does(
    recorder: Recorder, recorded: Store, org: OrgId
) -> None:
    seen, later = recorded.consumers_seen, QueueName("later")
    seen.note(org, [later], ())
    await seen.write()
    assert await rows(recorder, org) == []
    await recorded.enqueue(some_jobs(org, 1, queue=later))
    seen.note(org, [later], ())
    await seen.write()
    assert await rows(recorder, org) == [(later, "")]


async def test_a_queue_has_rows_of_a_bounded_number_of_kinds(recorder: Recorder, recorded: Store, org: OrgId) -> None:
    for first in range(0, 300, 50):
        recorded.consumers_seen.note(org, [QUEUE], [f"kind-{number}" for number in range(first, first + 50)])
        await recorded.consumers_seen.write()
    found = [kind for _, kind in await rows(recorder, org)]
    assert len(found) == 101
    # Consumers of further kinds are recorded as consumers of all kinds.
    assert found[0] == ""


async def test_an_org_with_many_consumers_leaves_room_for_the_consumers_of_others(
    recorder: Recorder, recorded: Store, org: OrgId, other_org: OrgId
) -> None:
    await recorded.enqueue(some_jobs(other_org, 1))
    kinds = [f"kind-{number}" for number in range(64)]
    for number in range(300):
        recorded.consumers_seen.note(org, [QueueName(f"queue-{number}")], kinds)
    recorded.consumers_seen.note(other_org, [QUEUE], [KIND])
    await recorded.consumers_seen.write()
    assert await rows(recorder, other_org) == [(QUEUE, KIND)]


async def test_what_was_not_seen_for_a_day_is_forgotten_and_an_erased_org_leaves_nothing(
    fresh_recorder: Recorder, org: OrgId, other_org: OrgId
) -> None:
    store = Store(fresh_recorder)
    for one in (org, other_org):
        await store.enqueue(some_jobs(one, 1))
        store.consumers_seen.note(one, [QUEUE], [KIND])
    await store.consumers_seen.write()
    await erasure.begin(fresh_recorder, org, erasure="019a9f5e-7c1d-7a41-8f0e-3f2b6d1c9a55")
    for unfinished in await erasure.unfinished(fresh_recorder):
        while await erasure.go_on(fresh_recorder, unfinished):
            pass
    left = await fresh_recorder.run(
        b"SELECT q.org FROM windrow.consumer_seen s LEFT JOIN windrow.queue q USING (queue_id)", {}
    )
    assert left == [(other_org,)]
    await fresh_recorder.run(b"UPDATE windrow.consumer_seen SET at = at - interval '25 hours'", {})
    another = Store(fresh_recorder)
    await another.consumers_seen.write()
    assert await fresh_recorder.run(b"SELECT FROM windrow.consumer_seen", {}) == []


# ── Over gRPC ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def dsn(postgres: Server) -> str:
    return postgres.create("explain_s1")


@pytest.fixture(scope="module")
def address(dsn: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    config = write_cluster(tmp_path_factory.mktemp("explain") / "cluster.toml", {"s1": dsn})
    with running_routers(config, processes=2) as routers:
        yield routers.address


@pytest.fixture
def router(address: str) -> Iterator[Stubs]:
    with stubs(address) as opened:
        yield opened


def test_a_router_records_consumers_and_explains(router: Stubs, address: str, org: OrgId) -> None:
    job = new_job(kind=KIND)
    router.queue.Enqueue(queue_pb2.EnqueueRequest(org=org, jobs=[job]), timeout=PATIENCE_S)

    def why() -> list[str | None]:
        request = admin_pb2.ExplainJobRequest(org=org, id=job.id)
        return names(router.admin.ExplainJob(request, timeout=PATIENCE_S).causes)

    assert why() == ["no_consumer"]
    router.admin.PauseQueue(admin_pb2.PauseQueueRequest(org=org, queue=QUEUE), timeout=PATIENCE_S)
    request = queue_pb2.DequeueRequest(org=org, queues=[QUEUE], kinds=[OTHER_KIND])
    assert not router.queue.Dequeue(request, timeout=PATIENCE_S).jobs
    until(lambda: why() == ["paused", "kind_not_taken"], "the consumer is recorded")
    with SyncClient(address, org=org) as client:
        explained = client.explain_job(job.id)
        assert [cause.name for cause in explained.causes] == ["paused", "kind_not_taken"]
        figures = explained.causes[1].figures
        assert (figures["kind"], figures["taken_kinds"], figures["seen_within"]) == (
            *(KIND, [OTHER_KIND]),
            timedelta(microseconds=SEEN_US),
        )
        assert str(explained.causes[0]) == "the queue is paused"
        assert [cause.name for cause in client.explain_queue(QUEUE).causes] == ["paused", "kind_not_taken", "backlog"]


def test_a_stream_is_recorded_with_its_kinds(router: Stubs, dsn: str, org: OrgId) -> None:
    job = new_job(kind=KIND)
    router.queue.Enqueue(queue_pb2.EnqueueRequest(org=org, jobs=[job]), timeout=PATIENCE_S)
    router.admin.PauseQueue(admin_pb2.PauseQueueRequest(org=org, queue=QUEUE), timeout=PATIENCE_S)
    over = threading.Event()

    def messages() -> Iterator[queue_pb2.ConsumeRequest]:
        yield queue_pb2.ConsumeRequest(start=start(org, kinds=[OTHER_KIND]), credit=1)
        over.wait(PATIENCE_S)

    stream = router.queue.Consume(messages(), timeout=PATIENCE_S)
    with psycopg.connect(dsn, autocommit=True) as shard:
        recorded = "SELECT s.kind FROM windrow.consumer_seen s JOIN windrow.queue q USING (queue_id) WHERE q.org = %s"
        until(lambda: shard.execute(recorded, [org]).fetchall() == [(OTHER_KIND,)], "the stream is recorded")
    over.set()
    assert list(stream) == []
    # The stream has ended, but its consumer was seen a moment ago.
    found = router.admin.ExplainJob(admin_pb2.ExplainJobRequest(org=org, id=job.id), timeout=PATIENCE_S)
    assert names(found.causes) == ["paused", "kind_not_taken"]
    assert list(found.causes[1].kind_not_taken.taken_kinds) == [OTHER_KIND]


def test_what_does_not_exist_is_not_found(router: Stubs, org: OrgId) -> None:
    for act in (
        lambda: router.admin.ExplainJob(admin_pb2.ExplainJobRequest(org=org, id=job_id()), timeout=PATIENCE_S),
        lambda: router.admin.ExplainQueue(admin_pb2.ExplainQueueRequest(org=org, queue=QUEUE), timeout=PATIENCE_S),
    ):
        with pytest.raises(grpc.RpcError) as refused:
            act()
        assert refused.value.code() is grpc.StatusCode.NOT_FOUND


def test_the_reason_of_an_expired_job_is_that_of_the_statements() -> None:
    assert EXPIRED_REASON in statements.EXPIRE_UNRUN.decode()
