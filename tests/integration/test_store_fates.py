"""How attempts and jobs end: jobs are retried, run out of attempts or expire. Their histories are kept, and jobs can
end even if a partition is missing."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import psycopg
import pytest

from shard.admin.queue_admin import QueueAdmin
from shard.job_record import JobRecord
from shard.postgres.pool import Database
from shard.queue.settle import Nack, Settlement, Snooze
from shard.queue.store import Store
from shard.retry_policy import Fixed
from shard.vocabulary import Alteration, Answer, Failure, JobId, Lease, OrgId, Outcome, QueueName
from tests.conftest import SHARD
from tests.jobs import HOUR_US, MINUTE_US, QUEUE, SHORT_US, history_of, ids_of, job_id, lease_jobs, some_jobs
from tests.timemachine import end_leases, make_due, reach_expiry


async def test_a_job_whose_leases_all_expire_is_dead_with_its_history(database: Database, org: OrgId) -> None:
    store = Store(database)
    jobs = some_jobs(org, 1, max_attempts=2)
    await store.enqueue(jobs)
    held: list[Lease] = []
    for attempt in (1, 2):
        ((job, lease),) = await lease_jobs(store, org, worker=f"worker {attempt}")
        assert job.attempt == attempt
        held.append(lease)
        await end_leases(database, org)
    await store.enqueue(some_jobs(org, 1))
    # The claim marks the first job dead, and continues with the next job.
    ((behind, _),) = await lease_jobs(store, org, max_jobs=1)
    assert behind.id != jobs.ids[0]
    (record,) = await store.get(org, ids_of(jobs), include_payload=False)
    assert (record.state, record.attempt) == ("dead", 2)
    assert record.reason == "out of attempts (2), the last one expired"
    assert [(a.attempt, a.outcome, a.worker) for a in record.attempts()] == [
        (1, Outcome.EXPIRED, "worker 1"),
        (2, Outcome.EXPIRED, "worker 2"),
    ]
    assert await store.settle(Settlement.ack(org, held, [None] * 2)) == [Answer.STALE] * 2


async def test_an_attempt_lasts_no_longer_than_its_job_may_run_however_often_it_is_extended(
    database: Database, org: OrgId
) -> None:
    store = Store(database)
    jobs = some_jobs(org, 1, max_runtime_us=MINUTE_US)
    await store.enqueue(jobs)
    ((job, lease),) = await lease_jobs(store, org, window_us=MINUTE_US // 4)
    assert (job.max_runtime_us, job.deadline) == (MINUTE_US, job.leased_at + MINUTE_US // 4)
    for window_us, lasts_us in ((MINUTE_US // 2, None), (HOUR_US, MINUTE_US), (HOUR_US, MINUTE_US)):
        assert await store.settle(Settlement.extend(org, [lease], window_us=window_us)) == [Answer.OK]
        (record,) = await store.get(org, ids_of(jobs), include_payload=False)
        assert record.deadline is not None
        assert job.deadline < record.deadline <= job.leased_at + MINUTE_US
        assert lasts_us in (None, record.deadline - job.leased_at)
    await lease_ran_out(database, org)
    assert await store.settle(Settlement.extend(org, [lease], window_us=HOUR_US)) == [Answer.STALE]
    (record,) = await store.get(org, ids_of(jobs), include_payload=False)
    assert [(a.outcome, a.ended_at - a.leased_at) for a in record.attempts()] == [(Outcome.TIMED_OUT, MINUTE_US)]
    # A window that is longer than `max_runtime` is shortened to `max_runtime`. A lease that ends before `max_runtime`
    # has passed is expired, not timed out.
    ((again, _),) = await lease_jobs(store, org, window_us=HOUR_US)
    assert again.deadline == again.leased_at + MINUTE_US
    await end_leases(database, org)
    await lease_jobs(store, org)
    (record,) = await store.get(org, ids_of(jobs), include_payload=False)
    assert [a.outcome for a in record.attempts()] == [Outcome.TIMED_OUT, Outcome.EXPIRED]


async def lease_ran_out(database: Database, org: OrgId) -> None:
    """Moves the beginning and the deadline of every lease back by the same time, so that the lease has just ended."""
    await database.run(
        b"""
        UPDATE windrow.job j SET leased_at = j.leased_at - (j.visible_at - now()), visible_at = now()
        FROM windrow.queue q
        WHERE q.queue_id = j.queue_id AND q.org = %(org)s AND j.lease IS NOT NULL
        """,
        {"org": org},
    )


async def test_when_setting_aside_fails_the_jobs_that_fit_are_handed_out(fresh_dsn: str, org: OrgId) -> None:
    """The claim has already leased the jobs that fit. So no other consumer could get these jobs before their windows
    end."""
    # The database has one connection, so that the short timeout affects only this connection.
    database = Database(SHARD, fresh_dsn, connections=1)
    await database.open()
    try:
        store = Store(database)
        exhausted = some_jobs(org, 1, max_attempts=1)
        await store.enqueue(exhausted)
        await lease_jobs(store, org)
        await end_leases(database, org)
        fit = some_jobs(org, 2, max_attempts=1)
        await store.enqueue(fit)
        await database.run(b"SET lock_timeout = '50ms'", {})
        async with await psycopg.AsyncConnection.connect(fresh_dsn) as rival:
            await rival.execute("LOCK TABLE windrow.dead IN SHARE MODE")
            held = await lease_jobs(store, org)
        assert {job.id for job, _ in held} == set(fit.ids)
        assert await store.settle(Settlement.ack(org, [lease for _, lease in held], [None] * 2)) == [Answer.OK] * 2
        await end_leases(database, org)
        assert await lease_jobs(store, org) == []
        (record,) = await store.get(org, ids_of(exhausted), include_payload=False)
        assert record.state == "dead"
    finally:
        await database.close()


async def test_a_nack_of_the_last_attempt_buries_the_job(database: Database, org: OrgId) -> None:
    store = Store(database)
    jobs = some_jobs(org, 1, max_attempts=2, retry=Fixed(delay_us=0))
    await store.enqueue(jobs)
    for attempt in (1, 2):
        ((job, lease),) = await lease_jobs(store, org, worker="w")
        assert job.attempt == attempt
        # A job that has no attempts left is dead, although the nack asks for a delay.
        nack = Nack(
            lease=lease, failure=Failure(message=f"error {attempt}"), retry_after_us=0 if attempt == 2 else None
        )
        assert await store.settle(Settlement.nack(org, [nack])) == [Answer.OK]
        assert await store.settle(Settlement.nack(org, [nack])) == [Answer.OK], (
            "the same call again is answered the same"
        )
        assert await store.settle(Settlement.ack(org, [lease], [None])) == [Answer.STALE]
    assert await lease_jobs(store, org) == []
    (record,) = await store.get(org, ids_of(jobs), include_payload=False)
    assert (record.state, record.reason) == ("dead", "out of attempts (2 of 2)")
    assert [(a.outcome, a.failure) for a in record.attempts()] == [
        (Outcome.NACKED, Failure(message="error 1")),
        (Outcome.NACKED, Failure(message="error 2")),
    ]


async def test_a_failure_is_stored_as_it_was_reported_and_none_if_there_was_none(
    database: Database, org: OrgId
) -> None:
    store = Store(database)
    jobs = some_jobs(org, 1, retry=Fixed(delay_us=0))
    await store.enqueue(jobs)
    told = Failure(type="net.Timeout", message='no "answer" \\ ✓ \x01\n', stack="File a\n  File b")
    failures = [told, None, told._replace(permanent=True)]
    for failure in failures:
        ((_, lease),) = await lease_jobs(store, org)
        assert await store.settle(Settlement.nack(org, [Nack(lease=lease, failure=failure)])) == [Answer.OK]
    (record,) = await store.get(org, ids_of(jobs), include_payload=False)
    assert (record.state, record.reason) == ("dead", "failed permanently")
    assert [attempt.failure for attempt in record.attempts()] == failures
    assert "failure" not in history_of(record.history)[1]


async def test_the_newest_five_attempts_keep_their_stacks(database: Database, org: OrgId) -> None:
    store = Store(database)
    jobs = some_jobs(org, 1, retry=Fixed(delay_us=0))
    await store.enqueue(jobs)
    for turn in range(8):
        ((_, lease),) = await lease_jobs(store, org)
        failure = Failure(message=f"error {turn}", stack="s" * 32_768)
        await store.settle(Settlement.nack(org, [Nack(lease=lease, failure=failure)]))
    (record,) = await store.get(org, ids_of(jobs), include_payload=False)
    failures = [attempt.failure or Failure() for attempt in record.attempts()]
    assert [failure.message for failure in failures] == [f"error {turn}" for turn in range(8)]
    assert [len(failure.stack) for failure in failures] == [0] * 3 + [32_768] * 5


async def test_a_policy_delays_a_retry_and_a_nacks_own_delay_wins(database: Database, org: OrgId) -> None:
    store = Store(database)
    jobs = some_jobs(org, 2, retry=Fixed(delay_us=HOUR_US))
    await store.enqueue(jobs)
    (_, one), (_, other) = await lease_jobs(store, org)
    assert (
        await store.settle(Settlement.nack(org, [Nack(lease=one), Nack(lease=other, retry_after_us=0)]))
        == [Answer.OK] * 2
    )
    ((job, _),) = await lease_jobs(store, org)
    assert (job.id.replace("-", ""), job.attempt) == (other.job_hex, 2)
    assert await make_due(database, org) == 1
    ((job, _),) = await lease_jobs(store, org)
    assert (job.id.replace("-", ""), job.attempt) == (one.job_hex, 2)


async def test_a_release_does_not_count_the_attempt(database: Database, org: OrgId) -> None:
    store = Store(database)
    jobs = some_jobs(org, 1, max_attempts=1)
    await store.enqueue(jobs)
    for _ in range(3):
        ((job, lease),) = await lease_jobs(store, org)
        assert job.attempt == 1
        assert await store.settle(Settlement.release(org, [lease])) == [Answer.OK]
        assert await store.settle(Settlement.release(org, [lease])) == [Answer.OK]
    (record,) = await store.get(org, ids_of(jobs), include_payload=False)
    assert [a.outcome for a in record.attempts()] == [Outcome.RELEASED] * 3


async def test_a_snooze_gives_a_job_back_for_a_while_and_does_not_count_the_attempt(
    database: Database, org: OrgId
) -> None:
    store = Store(database)
    jobs = some_jobs(org, 2, max_attempts=1)
    await store.enqueue(jobs)
    for _ in range(3):
        (one, lease), (other, other_lease) = await lease_jobs(store, org)
        # Each snooze has its own delay, and the call may be repeated.
        snoozes = Settlement.snooze(org, [Snooze(lease, HOUR_US, "not yet"), Snooze(other_lease, 2 * HOUR_US)])
        for _ in range(2):
            assert await store.settle(snoozes) == [Answer.OK] * 2
        assert await lease_jobs(store, org) == []
        records = {record.id: record for record in await store.get(org, ids_of(jobs), include_payload=False)}
        first, second = (records[job.id] for job in (one, other))
        assert (first.state, first.attempt, second.run_at - first.run_at) == ("scheduled", 0, HOUR_US)
        reasons = [record.attempts()[-1].failure for record in (first, second)]
        assert reasons == [Failure(message="not yet"), None]
        assert await make_due(database, org) == 2
    (record, _) = await store.get(org, ids_of(jobs), include_payload=False)
    assert [attempt.outcome for attempt in record.attempts()] == [Outcome.RELEASED] * 3


async def test_the_newest_fifty_attempts_are_remembered(database: Database, org: OrgId) -> None:
    store = Store(database)
    jobs = some_jobs(org, 1, max_attempts=1000, retry=Fixed(delay_us=0))
    await store.enqueue(jobs)
    numbers: list[int] = []
    for turn in range(56):
        ((_, lease),) = await lease_jobs(store, org, worker=f"w{turn}")
        numbers.append(lease.number)
        match turn % 3:
            case 0:
                await store.settle(Settlement.nack(org, [Nack(lease=lease, failure=Failure(message=f"error {turn}"))]))
            case 1:
                await store.settle(Settlement.release(org, [lease]))
            case _:
                await end_leases(database, org)
    # The last lease has expired, but its end is not recorded yet. The next claim records this end, and drops the oldest
    # attempt.
    ((_, lease),) = await lease_jobs(store, org)
    assert await store.settle(Settlement.ack(org, [lease], [None])) == [Answer.OK]
    (record,) = await store.get(org, ids_of(jobs), include_payload=False)
    history = history_of(record.history)
    assert [int(str(entry["lease"])) for entry in history] == numbers[6:]
    assert history[-1]["worker"] == "w55"
    assert len(record.attempts()) == 51, "and the one that finished it"


async def test_a_job_that_did_not_run_before_its_expiry_is_cancelled_and_those_behind_it_run(
    database: Database, org: OrgId
) -> None:
    store = Store(database)
    jobs = some_jobs(org, 3)
    jobs.expires_at_us = {0: 4_000_000_000_000_000, 2: 4_000_000_000_000_000}
    await store.enqueue(jobs)
    await reach_expiry(database, org)
    ((job, _),) = await lease_jobs(store, org, max_jobs=1)
    assert job.id == jobs.ids[1]
    assert await lease_jobs(store, org) == []
    for record in await store.get(org, [JobId(jobs.ids[0]), JobId(jobs.ids[2])], include_payload=False):
        assert (record.state, record.reason) == ("cancelled", "past its expires_at")
        assert (record.attempt, record.attempts()) == (0, [])


async def test_a_job_that_runs_when_its_expiry_comes_may_finish(database: Database, org: OrgId) -> None:
    store = Store(database)
    jobs = some_jobs(org, 1)
    jobs.expires_at_us = {0: 4_000_000_000_000_000}
    await store.enqueue(jobs)
    ((_, lease),) = await lease_jobs(store, org)
    await reach_expiry(database, org)
    assert await store.settle(Settlement.extend(org, [lease], window_us=HOUR_US)) == [Answer.OK]
    assert await store.settle(Settlement.ack(org, [lease], [b"done"])) == [Answer.OK]
    (record,) = await store.get(org, ids_of(jobs), include_payload=True)
    assert (record.state, record.result) == ("succeeded", b"done")


async def test_a_lease_lasts_as_long_as_its_window_by_the_databases_clock(database: Database, org: OrgId) -> None:
    store = Store(database)
    await store.enqueue(some_jobs(org, 1))
    ((job, lease),) = await lease_jobs(store, org, window_us=SHORT_US)
    assert job.deadline - job.leased_at == SHORT_US
    assert await lease_jobs(store, org) == []
    await database.run(
        b"SELECT pg_sleep(greatest(0, %(deadline)s / 1e6::float8 - extract(epoch FROM clock_timestamp())::float8))",
        {"deadline": job.deadline},
    )
    ((again, _),) = await lease_jobs(store, org)
    assert (again.id, again.attempt) == (job.id, 2)
    assert await store.settle(Settlement.ack(org, [lease], [None])) == [Answer.STALE]


async def test_an_extension_never_shortens_a_lease(database: Database, org: OrgId) -> None:
    store = Store(database)
    await store.enqueue(some_jobs(org, 1))
    ((job, lease),) = await lease_jobs(store, org, window_us=HOUR_US)
    assert await store.settle(Settlement.extend(org, [lease], window_us=1)) == [Answer.OK]
    (record,) = await store.get(org, [job.id], include_payload=False)
    assert record.deadline == job.deadline
    assert await store.settle(Settlement.extend(org, [lease], window_us=2 * HOUR_US)) == [Answer.OK]
    (record,) = await store.get(org, [job.id], include_payload=False)
    assert record.deadline is not None
    assert record.deadline >= job.deadline + HOUR_US


async def test_cancelling_ends_a_lease_and_is_answered_ok_again(database: Database, org: OrgId) -> None:
    store = Store(database)
    jobs = some_jobs(org, 1)
    await store.enqueue(jobs)
    ((job, lease),) = await lease_jobs(store, org)
    assert await store.cancel(org, [job.id, job_id()], reason="no more") == [Answer.OK, Answer.NOT_FOUND]
    assert await store.cancel(org, [job.id], reason="again") == [Answer.OK]
    assert await store.settle(Settlement.ack(org, [lease], [None])) == [Answer.CANCELLED]
    assert await store.settle(Settlement.nack(org, [Nack(lease=lease)])) == [Answer.CANCELLED]
    (record,) = await store.get(org, [job.id], include_payload=False)
    assert (record.state, record.reason) == ("cancelled", "no more")


async def test_jobs_that_wait_are_changed_and_all_others_stay_as_they_are(database: Database, org: OrgId) -> None:
    store = Store(database)
    jobs = some_jobs(org, 7, priority=5)
    jobs.queues = [QueueName(name) for name in ("scheduled", "ready", "lost", "leased", "dead", "done", "cancelled")]
    scheduled, ready, lost = ids_of(jobs)[:3]
    jobs.delay_us = {0: HOUR_US}
    jobs.attributes = {0: '{"a": "b"}', 1: '{"a": "b"}'}
    await store.enqueue(jobs)
    await lease_jobs(store, org, queue="lost")
    await end_leases(database, org)
    held = {queue: (await lease_jobs(store, org, queue=queue))[0][1] for queue in ("leased", "dead", "done")}
    await store.settle(Settlement.nack(org, [Nack(lease=held["dead"], failure=Failure(permanent=True))]))
    await store.settle(Settlement.ack(org, [held["done"]]))
    await store.cancel(org, ids_of(jobs)[6:], reason="")
    before = {record.id: record for record in await store.get(org, ids_of(jobs), include_payload=False)}
    assert [before[job].state for job in ids_of(jobs)] == [
        *("scheduled", "ready", "ready", "leased", "dead", "succeeded", "cancelled")
    ]
    names = [*ids_of(jobs), job_id()]
    answers = [Answer.OK] * 3 + [Answer.STALE] * 3 + [Answer.CANCELLED, Answer.NOT_FOUND]

    async def altered(change: Alteration) -> list[JobRecord]:
        assert await store.alter(org, names, change) == answers
        records = await store.get(org, names, include_payload=False)
        assert records[3:] == [before[job] for job in names[3:-1]], "the others stay as they are"
        return records[:3]

    # A call in the name of another org changes nothing.
    assert await store.alter(OrgId(f"{org}-2"), names, Alteration(priority=1)) == [Answer.NOT_FOUND] * 8
    for record in await altered(Alteration(attributes='{"c": "d"}')):
        assert record == before[record.id]._replace(attributes='{"c": "d"}')
    assert [record.attributes for record in await altered(Alteration(attributes="{}"))] == [None] * 3
    of_priority = await altered(Alteration(priority=1))
    assert [(record.priority, record.state) for record in of_priority] == [(1, "scheduled"), (1, "ready"), (1, "ready")]
    assert of_priority[0].run_at == before[scheduled].run_at
    assert [attempt.outcome for attempt in of_priority[2].attempts()] == [Outcome.EXPIRED]
    # A change to the priority that a job already has does not move the job.
    assert await altered(Alteration(priority=1)) == of_priority
    assert {record.state for record in await altered(Alteration(delay_us=HOUR_US))} == {"scheduled"}
    assert {record.state for record in await altered(Alteration(run_at_us=1))} == {"ready"}
    claimed = [job.id for queue in jobs.queues[:3] for job, _ in await lease_jobs(store, org, queue=queue)]
    assert claimed == [scheduled, ready, lost]


async def test_only_dead_jobs_are_redriven_by_their_ids(database: Database, org: OrgId) -> None:
    store = Store(database)
    jobs = some_jobs(org, 6)
    jobs.queues = list(map(QueueName, ("dead", "ready", "scheduled", "leased", "done", "cancelled")))
    jobs.delay_us = {2: HOUR_US}
    await store.enqueue(jobs)
    held = {queue: (await lease_jobs(store, org, queue=queue))[0][1] for queue in ("dead", "leased", "done")}
    await store.settle(Settlement.nack(org, [Nack(lease=held["dead"], failure=Failure(permanent=True))]))
    await store.settle(Settlement.ack(org, [held["done"]]))
    await store.cancel(org, ids_of(jobs)[5:], reason="")
    before = await store.get(org, ids_of(jobs), include_payload=False)
    names = [*ids_of(jobs), job_id()]
    # A call for another org changes nothing.
    assert await store.redrive(OrgId(f"{org}-2"), names) == [Answer.NOT_FOUND] * 7
    others = [Answer.STALE] * 4 + [Answer.CANCELLED, Answer.NOT_FOUND]
    assert await store.redrive(org, names) == [Answer.OK, *others]
    redriven, *rest = await store.get(org, ids_of(jobs), include_payload=False)
    assert rest == before[1:]
    assert (redriven.state, redriven.attempt, redriven.history) == ("ready", 0, before[0].history)
    assert await store.redrive(org, names) == [Answer.STALE, *others]
    ((again, _),) = await lease_jobs(store, org, queue="dead")
    assert (again.id, again.attempt) == (jobs.ids[0], 1)


async def test_a_job_that_is_altered_is_found_in_its_new_lane_behind_what_was_claimed_there(
    database: Database, org: OrgId, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shard.queue.claim_floor.GUARD_US", 0)
    store = Store(database)
    old = some_jobs(org, 1, priority=5)
    await store.enqueue(old)
    # Claim a newer job in the other lane, so that the floor of that lane is above the `visible_at` of the old job.
    await store.enqueue(some_jobs(org, 1, priority=1))
    assert len(await lease_jobs(store, org, max_jobs=1)) == 1
    assert await store.alter(org, ids_of(old), Alteration(priority=1)) == [Answer.OK]
    ((job, _),) = await lease_jobs(store, org)
    assert (job.id, job.priority) == (old.ids[0], 1)


# The day's partition is missing

End = Callable[[Store, OrgId, JobId, Lease], Awaitable[object]]


async def _ack(store: Store, org: OrgId, job: JobId, lease: Lease) -> object:
    return await store.settle(Settlement.ack(org, [lease], [None])) == [Answer.OK]


async def _cancel(store: Store, org: OrgId, job: JobId, lease: Lease) -> object:
    return await store.cancel(org, [job], reason="") == [Answer.OK]


async def _expire(store: Store, org: OrgId, job: JobId, lease: Lease) -> object:
    await store._database.run(b"UPDATE windrow.job SET expires_at = now()", {})
    await store.settle(Settlement.release(org, [lease]))
    return await lease_jobs(store, org) == []


@pytest.mark.parametrize("end", [_ack, _cancel, _expire], ids=["ack", "cancel", "expires_at"])
async def test_the_partition_of_the_day_is_made_when_it_is_missing(
    fresh_database: Database, org: OrgId, end: End
) -> None:
    store = Store(fresh_database)
    await store.enqueue(some_jobs(org, 1))
    ((job, lease),) = await lease_jobs(store, org)
    rows = await fresh_database.run(
        b"SELECT inhrelid::regclass::text FROM pg_inherits WHERE inhparent = 'windrow.finished_30'::regclass", {}
    )
    assert len(rows) == 3
    for (name,) in rows:
        await fresh_database.run(f"DROP TABLE {name}".encode(), {})
    assert await end(store, org, job.id, lease)
    (record,) = await store.get(org, [job.id], include_payload=False)
    assert record.state in {"succeeded", "cancelled"}


async def test_a_result_is_kept_with_the_job_that_has_one(database: Database, org: OrgId) -> None:
    store = Store(database)
    jobs = some_jobs(org, 3)
    await store.enqueue(jobs)
    held = await lease_jobs(store, org, window_us=MINUTE_US)
    results = [b"one", None, b""]
    assert await store.settle(Settlement.ack(org, [lease for _, lease in held], results)) == [Answer.OK] * 3
    found = {r.id: r.result for r in await store.get(org, [job.id for job, _ in held], include_payload=True)}
    assert found == {job.id: result for (job, _), result in zip(held, results, strict=True)}


async def test_purge_and_redrive_touch_no_more_than_their_limit(
    database: Database, books: QueueAdmin, org: OrgId
) -> None:
    store = Store(database)
    await store.enqueue(some_jobs(org, 7))
    held = await lease_jobs(store, org, max_jobs=5)
    await store.settle(
        Settlement.nack(org, [Nack(lease=lease, failure=Failure(permanent=True)) for _, lease in held[:4]])
    )
    assert await books.redrive(org, QUEUE, kind="another", died_after=None, died_before=None, limit=9) == 0
    assert await books.redrive(org, QUEUE, kind="", died_after=None, died_before=None, limit=1) == 1
    # Now three jobs are ready, one is leased, and three are dead.
    assert await books.purge_queue(org, QUEUE, limit=2, include_dead=True) == 2
    assert await books.purge_queue(org, QUEUE, limit=9, include_dead=False) == 1
    assert await books.purge_queue(org, QUEUE, limit=2, include_dead=True) == 2
    (found,) = [entry for entry in await books.check() if entry.org == org]
    assert (found.leased, found.dead, found.cancelled, found.balanced) == (1, 1, 5, True)
