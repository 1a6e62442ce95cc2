"""The history of a job's attempts has each lease that has ended, with the log of the attempt."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from shard.admin.queue_admin import QueueAdmin
from shard.history.days import expire_waiting
from shard.job_record import JobRecord
from shard.postgres.pool import Database
from shard.queue.settle import Nack, Report, Settlement
from shard.queue.store import Store
from shard.retry_policy import Fixed
from shard.vocabulary import Alteration, Answer, Failure, JobId, Lease, NewJobs, OrgId, Outcome, Progress
from tests.jobs import HOUR_US, MINUTE_US, QUEUE, at_once, history_of, ids_of, lease_jobs, some_jobs
from tests.timemachine import end_leases, reach_expiry
from tests.verbs import VERBS

LINES = 'read 3 pages\n\t"resized" \\ ✓\n'


async def _extend(store: Store, org: OrgId, lease: Lease, log: str = "") -> None:
    call = Settlement.extend(org, [lease], window_us=MINUTE_US)._replace(logs={0: log} if log else {})
    assert await store.settle(call) == [Answer.OK]


async def _record(store: Store, org: OrgId, job_id: str) -> JobRecord:
    (record,) = await store.get(org, [JobId(job_id)], include_payload=False)
    return record


def _seen(record: JobRecord) -> list[tuple[int, Outcome, str, str]]:
    return [(one.attempt, one.outcome, one.worker, one.log) for one in record.attempts()]


# A release has only the token of a lease, so it brings no log.
TOLD = [
    (name, told)
    for name in VERBS
    for told in ("at its end", "with an extend", "with both", "never")
    if name != "release" or told in ("with an extend", "never")
]


@pytest.mark.parametrize(("name", "told"), TOLD)
async def test_what_an_attempt_logged_is_kept_however_the_attempt_ends(
    database: Database, org: OrgId, name: str, told: str
) -> None:
    store = Store(database)
    verb = VERBS[name]
    # The calls also name two other jobs, so that the test notices a log that is kept with the wrong job.
    await store.enqueue(jobs := some_jobs(org, 3, retry=Fixed(delay_us=0)))
    leases = {job.id: lease for job, lease in await lease_jobs(store, org, worker="w1")}
    quiet, logged, silent = ids_of(jobs)
    if told in ("with an extend", "with both"):
        await _extend(store, org, leases[logged], "earlier\n" if told == "with both" else LINES)
    call = verb.settlement(org, [leases[quiet], leases[logged], leases[silent]])
    if told in ("at its end", "with both"):
        call = call._replace(logs={1: LINES})
    assert await store.settle(call) == [Answer.OK] * 3
    for job_id in ids_of(jobs):
        record = await _record(store, org, job_id)
        log = LINES if job_id == logged and told != "never" else ""
        if verb.outcome is None:
            assert (record.log(), record.attempts()) == (log, [])
        else:
            assert _seen(record) == [(1, verb.outcome, "w1", log)]
            assert record.log() == ""


async def test_an_attempt_that_is_acked_without_a_log_adds_nothing_to_the_row(database: Database, org: OrgId) -> None:
    store = Store(database)
    await store.enqueue(jobs := some_jobs(org))
    ((_, lease),) = await lease_jobs(store, org)
    assert await store.settle(Settlement.ack(org, [lease])) == [Answer.OK]
    record = await _record(store, org, jobs.ids[0])
    assert record.history is None
    assert [one.outcome for one in record.attempts()] == [Outcome.ACKED]


async def test_calls_that_share_a_statement_keep_their_own_logs(database: Database, org: OrgId) -> None:
    store = Store(database)
    await store.enqueue(jobs := some_jobs(org, 6))
    held = dict(zip(sorted(jobs.ids), [lease for _, lease in sorted(await lease_jobs(store, org))], strict=True))
    leases = list(held.values())

    def kill(lease: Lease) -> Nack:
        return Nack(lease=lease, failure=Failure(permanent=True))

    calls = [
        Settlement.ack(org, leases[:2])._replace(logs={1: "of 1"}),
        Settlement.ack(org, leases[2:3]),
        Settlement.ack(org, leases[3:4])._replace(logs={0: "of 3"}),
        # This nack lets one job die and the other job be retried.
        Settlement.nack(org, [kill(leases[4]), Nack(lease=leases[5])])._replace(logs={0: "of 4", 1: "of 5"}),
    ]
    await at_once(*map(store.settle, calls))
    logs = [(await _record(store, org, job_id)).attempts()[0].log for job_id in held]
    assert logs == ["", "of 1", "", "of 3", "of 4", "of 5"]


async def test_of_several_extends_of_one_lease_the_last_log_counts_and_none_takes_it_back(
    database: Database, org: OrgId
) -> None:
    store = Store(database)
    await store.enqueue(jobs := some_jobs(org))
    ((_, lease),) = await lease_jobs(store, org)
    extend = Settlement.extend(org, [lease], window_us=MINUTE_US)
    await at_once(
        store.settle(extend._replace(logs={0: "one"})),
        store.settle(extend._replace(logs={0: "one\ntwo"})),
        store.settle(Settlement.extend(org, [lease], window_us=MINUTE_US, reports=[Report(progress=Progress(done=1))])),
    )
    record = await _record(store, org, jobs.ids[0])
    assert (record.state, record.log(), record.progress) == ("leased", "one\ntwo", '{"done": 1}')


async def test_a_log_is_of_one_attempt_and_not_of_the_next_one(database: Database, org: OrgId) -> None:
    store = Store(database)
    await store.enqueue(jobs := some_jobs(org, retry=Fixed(delay_us=0)))
    ((_, lease),) = await lease_jobs(store, org, worker="w1")
    await _extend(store, org, lease, "of 1")
    await end_leases(database, org)
    record = await _record(store, org, jobs.ids[0])
    # The lease has ended, but no claim has recorded that yet.
    assert (record.state, record.log(), _seen(record)) == ("ready", "", [(1, Outcome.EXPIRED, "w1", "of 1")])
    ((_, lease),) = await lease_jobs(store, org, worker="w2")
    assert (await _record(store, org, jobs.ids[0])).log() == ""
    assert await store.settle(Settlement.nack(org, [Nack(lease=lease)])) == [Answer.OK]
    ((_, lease),) = await lease_jobs(store, org, worker="w3")
    assert await store.settle(Settlement.ack(org, [lease])._replace(logs={0: "of 3"})) == [Answer.OK]
    # A repeated ack with another log changes nothing.
    assert await store.settle(Settlement.ack(org, [lease])._replace(logs={0: "again"})) == [Answer.OK]
    assert _seen(await _record(store, org, jobs.ids[0])) == [
        (1, Outcome.EXPIRED, "w1", "of 1"),
        (2, Outcome.NACKED, "w2", ""),
        (3, Outcome.ACKED, "w3", "of 3"),
    ]


async def test_a_lease_that_has_ended_takes_no_log(database: Database, org: OrgId) -> None:
    store = Store(database)
    await store.enqueue(jobs := some_jobs(org))
    ((_, lease),) = await lease_jobs(store, org)
    await end_leases(database, org)
    for verb in VERBS.values():
        call = verb.settlement(org, [lease])._replace(logs={0: "late"})
        assert await store.settle(call) == [Answer.STALE]
    assert [one.log for one in (await _record(store, org, jobs.ids[0])).attempts()] == [""]


async def test_the_newest_five_attempts_keep_their_logs(database: Database, org: OrgId) -> None:
    store = Store(database)
    await store.enqueue(jobs := some_jobs(org, retry=Fixed(delay_us=0)))
    for turn in range(8):
        ((_, lease),) = await lease_jobs(store, org)
        nack = Settlement.nack(org, [Nack(lease=lease, retry_after_us=0)])
        await store.settle(nack._replace(logs={0: f"{turn}" + "x" * 4095}))
    logs = [one.log[:1] for one in (await _record(store, org, jobs.ids[0])).attempts()]
    assert logs == [*[""] * 3, *"34567"]


_END: dict[str, Callable[[Store, Database, OrgId, NewJobs], Awaitable[object]]] = {
    "a cancel": lambda store, _, org, jobs: store.cancel(org, ids_of(jobs), reason="no more"),
    "a purge": lambda _, database, org, _jobs: QueueAdmin(database).purge_queue(
        org, QUEUE, limit=1000, include_dead=False
    ),
    "its expiry": lambda _, database, org, _jobs: _expire(database, org),
}


async def _expire(database: Database, org: OrgId) -> None:
    await reach_expiry(database, org)
    await expire_waiting(database)


@pytest.mark.parametrize("end", _END)
async def test_a_lease_that_ended_unnoticed_is_in_the_history_after(database: Database, org: OrgId, end: str) -> None:
    store = Store(database)
    jobs = some_jobs(org, 2)
    for at in range(2):
        jobs.expires_at_us[at] = 2**52
    await store.enqueue(jobs)
    ((job, lease),) = await lease_jobs(store, org, worker="w1", max_jobs=1)
    await _extend(store, org, lease, LINES)
    await end_leases(database, org)
    await _END[end](store, database, org, jobs)
    ran, waited = [await _record(store, org, one) for one in sorted(jobs.ids, key=lambda one: one != job.id)]
    assert (ran.state, _seen(ran)) == ("cancelled", [(1, Outcome.EXPIRED, "w1", LINES)])
    assert (waited.state, waited.attempts()) == ("cancelled", [])


async def test_a_cancel_ends_an_attempt_and_the_history_tells_by_whom_and_when(database: Database, org: OrgId) -> None:
    store = Store(database)
    await store.enqueue(jobs := some_jobs(org, 2, max_runtime_us=HOUR_US))
    ((job, lease),) = await lease_jobs(store, org, worker="w1", max_jobs=1)
    await _extend(store, org, lease, LINES)
    assert await store.cancel(org, ids_of(jobs), reason="no more") == [Answer.OK] * 2
    # After the cancel, the ack cannot add the lines that the attempt has logged since the last extend.
    assert await store.settle(Settlement.ack(org, [lease])._replace(logs={0: "late"})) == [Answer.CANCELLED]
    record = await _record(store, org, job.id)
    assert _seen(record) == [(1, Outcome.CANCELLED, "w1", LINES)]
    (attempt,) = record.attempts()
    assert (attempt.leased_at, attempt.ended_at) == (job.leased_at, record.finished_at)
    (waited,) = [one for one in jobs.ids if one != job.id]
    assert (await _record(store, org, waited)).attempts() == []


async def test_an_altered_job_keeps_the_log_of_the_lease_that_ended_before(database: Database, org: OrgId) -> None:
    store = Store(database)
    await store.enqueue(jobs := some_jobs(org))
    ((_, lease),) = await lease_jobs(store, org, worker="w1")
    await _extend(store, org, lease, LINES)
    await end_leases(database, org)
    for alteration in (Alteration(attributes='{"a": "b"}'), Alteration(delay_us=HOUR_US)):
        assert await store.alter(org, ids_of(jobs), alteration) == [Answer.OK]
        assert _seen(await _record(store, org, jobs.ids[0])) == [(1, Outcome.EXPIRED, "w1", LINES)]
    assert [entry["log"] for entry in history_of((await _record(store, org, jobs.ids[0])).history)] == [LINES]
