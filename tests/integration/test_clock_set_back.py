"""If a shard's clock is set back, no finished job is hidden. If the clock is set back far, the shard refuses calls.

In these tests the correct time is three hours ahead of the server's own clock, so that a test can set the clock back to
the server's time.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest

from shard.admin.queue_admin import QueueAdmin
from shard.errors import ClockSetBack
from shard.postgres import clock, partitions
from shard.postgres.pool import Database
from shard.queue.settle import Nack, Settlement
from shard.queue.store import Store
from shard.queue_settings import QueueSettings
from shard.vocabulary import Answer, Failure, Lease, NewJobs, OrgId, QueueName
from tests.conftest import SHARD
from tests.jobs import HOUR_US, QUEUE, ids_of, job_id, lease_jobs, some_jobs
from tests.timemachine import SetClock
from tests.verbs import VERBS

RIGHT = timedelta(hours=3)
AHEAD_MS = 3 * 3600 * 1000
SHARD_SOURCES = Path(__file__).resolve().parents[2] / "shard"


@pytest.fixture
def set_clock(fresh_dsn: str) -> SetClock:
    made = SetClock.of(fresh_dsn)
    made.set(RIGHT)
    return made


@pytest.fixture
async def shard(set_clock: SetClock) -> AsyncGenerator[Database, None]:
    opened = Database(SHARD, set_clock.dsn)
    await opened.open()
    yield opened
    await opened.close()


def jobs_of(org: OrgId, count: int = 1) -> NewJobs:
    """Returns jobs whose ids contain the correct time."""
    return some_jobs(org, ids=[job_id(ahead_ms=AHEAD_MS) for _ in range(count)])


async def held_by(store: Store, org: OrgId, count: int = 1) -> tuple[NewJobs, list[Lease]]:
    jobs = jobs_of(org, count)
    assert await store.enqueue(jobs) == {}
    return jobs, [lease for _, lease in await lease_jobs(store, org, window_us=9 * HOUR_US)]


Finish = Callable[[Database, OrgId, NewJobs, list[Lease]], Awaitable[object]]

FINISH: dict[str, Finish] = {
    "ack": lambda database, org, _, leases: Store(database).settle(Settlement.ack(org, leases)),
    "cancel": lambda database, org, jobs, _: Store(database).cancel(org, ids_of(jobs), reason=""),
    "purge": lambda database, org, _, leases: purge(database, org, leases),
    "purge of the dead": lambda database, org, _, leases: purge_dead(database, org, leases),
}


async def purge(database: Database, org: OrgId, leases: list[Lease]) -> None:
    assert await Store(database).settle(Settlement.release(org, leases)) == [Answer.OK]
    # By the clock that was set back, the job is due only in three hours.
    await database.run(b"UPDATE windrow.job SET visible_at = now(), run_at = now()", {})
    assert await QueueAdmin(database).purge_queue(org, QUEUE, limit=10, include_dead=False) == 1


async def purge_dead(database: Database, org: OrgId, leases: list[Lease]) -> None:
    assert await Store(database).settle(
        Settlement.nack(org, [Nack(lease=lease, failure=Failure(permanent=True)) for lease in leases])
    ) == [Answer.OK]
    assert await QueueAdmin(database).purge_queue(org, QUEUE, limit=10, include_dead=True) == 1


@pytest.mark.parametrize("how", FINISH)
async def test_a_job_that_finished_while_the_clock_was_set_back_is_known_when_it_is_enqueued_again(
    set_clock: SetClock, shard: Database, org: OrgId, how: str
) -> None:
    """The router that finishes the jobs has not noticed yet that the clock was set back."""
    store = Store(shard)
    jobs, leases = await held_by(store, org)
    await store.clock.record()
    set_clock.set(timedelta(0))
    await FINISH[how](shard, org, jobs, leases)
    set_clock.set(RIGHT)
    assert await store.enqueue(jobs) == {0: jobs.ids[0]}
    (record,) = await store.get(org, ids_of(jobs), include_payload=False)
    assert record.state in ("succeeded", "cancelled")


@pytest.mark.parametrize("ahead", [timedelta(days=3), timedelta(days=4000)], ids=["3 days", "years"])
async def test_a_job_finishes_on_a_shard_whose_clock_was_days_ahead(
    set_clock: SetClock, shard: Database, org: OrgId, ahead: timedelta
) -> None:
    """The router that finishes the job has not noticed yet that the clock was set back."""
    store = Store(shard)
    _, leases = await held_by(store, org)
    await partitions.make_ahead(shard)
    before = await partitions_of(shard)
    set_clock.set(RIGHT + ahead)
    await store.clock.record()
    set_clock.set(RIGHT)
    assert await Store(shard).settle(Settlement.ack(org, leases)) == [Answer.OK]
    # Only the two days that need partitions have got them: the day of the recorded time, and the next day.
    assert len(await partitions_of(shard) - before) == 2


async def partitions_of(database: Database) -> set[str]:
    rows = await database.run(b"SELECT c.relname FROM pg_class c WHERE c.relname ~ '^finished_\\d+_\\d{8}$'", {})
    return {name for (name,) in rows}


async def test_a_shard_whose_clock_was_set_back_takes_no_calls_until_it_has_caught_up(
    set_clock: SetClock, shard: Database, org: OrgId, caplog: pytest.LogCaptureFixture
) -> None:
    store = Store(shard)
    admin = QueueAdmin(shard, store.clock)
    jobs, (lease,) = await held_by(store, org)
    await store.clock.record()
    set_clock.set(timedelta(0))
    calls: list[Callable[[], Awaitable[object]]] = [
        lambda: store.enqueue(jobs_of(org)),
        lambda: store.claim(org, [QUEUE], max_jobs=1, window_us=HOUR_US, worker="w"),
        *(partial(verb.act, store, org, [lease]) for verb in VERBS.values()),
        lambda: store.cancel(org, ids_of(jobs), reason=""),
        lambda: admin.purge_queue(org, QUEUE, limit=10, include_dead=True),
        lambda: admin.redrive(org, QUEUE, kind="", died_after=None, died_before=None, limit=10),
        lambda: admin.create_queue(org, QueueName("new"), QueueSettings()),
        lambda: admin.alter_queue(org, QUEUE, QueueSettings(paused=True)),
        lambda: admin.delete_queue(org, QUEUE),
    ]
    with caplog.at_level(logging.WARNING, "shard.postgres.clock"):
        for _ in range(3):
            await store.clock.record()
            for call in calls:
                with pytest.raises(
                    ClockSetBack, match=r"its clock was set back: .* 3h .*windrow shards accept-clock s1"
                ):
                    await call()
        assert len(caplog.records) == 1
        # The router still answers reads.
        assert (await admin.get_queue(org, QUEUE)).queue == QUEUE
        (counts,) = await admin.stats(org, QUEUE, include_finished=True)
        assert counts.leased == 1
        # No caller waits for the answer of `release_soon`, so this release may happen later, when the clock is right
        # again.
        (record,) = await store.get(org, ids_of(jobs), include_payload=False)
        assert record.state == "leased"
        store.release_soon(org, [lease])
        await store.sweep()
        set_clock.set(RIGHT)
        await store.clock.record()
        assert "right again" in caplog.records[-1].message
        await store.sweep()
        await store.finish()
    (record,) = await store.get(org, ids_of(jobs), include_payload=False)
    assert record.state == "ready"
    assert await store.enqueue(jobs_of(org)) == {}


async def test_a_clock_that_was_set_forward_and_is_right_again_is_accepted_by_an_operator(
    set_clock: SetClock, shard: Database, org: OrgId
) -> None:
    store = Store(shard)
    await store.clock.record()
    set_clock.set(RIGHT + timedelta(hours=5))
    await store.clock.record()
    set_clock.set(RIGHT)
    await store.clock.record()
    with pytest.raises(ClockSetBack):
        await store.enqueue(jobs_of(org))
    now, latest = await clock.accept(shard)
    assert (latest - now) // HOUR_US in (4, 5)
    await store.clock.record()
    jobs, leases = await held_by(store, org)
    assert await store.settle(Settlement.ack(org, leases)) == [Answer.OK]
    (record,) = await store.get(org, ids_of(jobs), include_payload=False)
    assert now <= (record.finished_at or 0) < latest
    assert await store.enqueue(jobs) == {0: jobs.ids[0]}


@pytest.mark.parametrize(("back_s", "serves"), [(30, True), (90, False)])
async def test_a_small_step_back_is_harmless(
    set_clock: SetClock, shard: Database, org: OrgId, back_s: int, serves: bool
) -> None:
    store = Store(shard)
    await store.clock.record()
    set_clock.set(RIGHT - timedelta(seconds=back_s))
    await store.clock.record()
    assert (store.clock.trouble is None) is serves


async def test_an_enqueue_before_the_clock_change_is_noticed_is_not_asked_for_new_ids(
    set_clock: SetClock, shard: Database, org: OrgId
) -> None:
    store = Store(shard)
    await store.clock.record()
    set_clock.set(timedelta(0))
    with pytest.raises(ClockSetBack):
        await store.enqueue(jobs_of(org))
    set_clock.set(RIGHT)
    await store.clock.record()
    assert await store.enqueue(jobs_of(org)) == {}


async def test_the_time_is_recorded_once_a_second_at_most_and_never_an_earlier_one(
    set_clock: SetClock, shard: Database
) -> None:
    one, other = Store(shard), Store(shard)

    async def recorded() -> int:
        ((latest,),) = await shard.run(b"SELECT last_value FROM windrow.clock", {})
        return int(latest)

    # The server's clock advances meanwhile, but not by minutes.
    set_clock.set(RIGHT + timedelta(minutes=10))
    await one.clock.record()
    first = await recorded()
    set_clock.set(RIGHT)
    for store in (one, other):
        await store.clock.record()
        assert await recorded() == first
    set_clock.set(RIGHT + timedelta(minutes=20))
    await other.clock.record()
    assert await recorded() > first


def test_every_statement_that_finishes_jobs_minds_the_latest_time() -> None:
    texts = [path.read_text() for path in SHARD_SOURCES.glob("*/sql/*.sql")]
    finishing = [text for text in texts if "INSERT INTO windrow.finished (" in text]
    assert len(finishing) == 8
    assert all("{{finish_time}}" in text for text in finishing)
