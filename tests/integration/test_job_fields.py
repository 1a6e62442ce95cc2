"""A job with a value in every field has the same values in every state, on every shard, and in the export. If a field
is added to NewJobs, JobRecord, Claimed or ColdJob, this test compares the new field without a change."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

from archiver import export
from archiver.export_location import ExportLocation
from archiver.export_search import ExportFilter, find
from archiver.object_store import Files
from shard.admin.job_pages import Wanted
from shard.history import export_reader
from shard.history.days import days_over, days_past, expire_waiting, retire_dead, turn_cold
from shard.job_record import ANSWER_BYTES_MAX, NOT_REPEATED, JobRecord, as_new
from shard.queue.settle import Nack, Settlement
from shard.vocabulary import JOB_CONTENT, Answer, Failure, JobId, JobState, NewJobs, OrgId, QueueName, ShardName
from tests.conftest import CLUSTER
from tests.jobs import fullest_job, job_id, lease_jobs
from tests.pair import A, B, Pair
from tests.timemachine import age_finished, reach_expiry

# Fields of a record that change while the job lives, or that do not belong to the job.
CHANGING = {
    *("state", "run_at", "attempt", "deadline", "worker", "leased_at", "finished_at", "result", "reason", "history"),
    "whole",
}
# A redriven job has neither an expiry nor a live key. `reach_expiry` changes the expiry of the other jobs.
RENEWED = {"expires_at", "live_key"}
# `age_finished` changes the first two fields.
AGED = {"id", "enqueued_at"} | RENEWED


async def leads() -> bool:
    return True


def content(job: NewJobs) -> dict[str, object]:
    columns = {column: getattr(job, array) for column, array in JOB_CONTENT.items()}
    return {name: column.get(0) if isinstance(column, dict) else column[0] for name, column in columns.items()}


def assert_content(found: Mapping[str, Any], job: NewJobs) -> None:
    """Asserts that these columns have the values that the producer sent."""
    expected = {column: value for column, value in content(job).items() if column in found}
    assert {column: found[column] for column in expected} == expected


def constant(record: JobRecord, *, but: AbstractSet[str] = frozenset()) -> dict[str, object]:
    return {name: value for name, value in record._asdict().items() if name not in CHANGING | but}


async def records(pair: Pair, org: OrgId, jobs: Mapping[str, NewJobs]) -> dict[str, JobRecord]:
    """Looks the jobs up. Returns their records, keyed by queue."""
    found = await pair.jobs(org, [JobId(job.ids[0]) for job in jobs.values()])
    return {record.queue: record for record in found.values()}


async def test_no_field_of_a_job_is_lost_on_its_way(pair: Pair, org: OrgId, tmp_path: Path) -> None:
    a, b = pair.store(A), pair.store(B)
    jobs = {what: fullest_job(org, queue=what) for what in ("retired", "redriven", "expired", "acked", "cancelled")}
    for job in jobs.values():
        assert await a.enqueue(job, epoch=1) == {}
    for what in ("retired", "redriven"):
        ((claimed, lease),) = await lease_jobs(a, org, queue=what)
        assert_content(claimed._asdict(), jobs[what])
        assert await a.settle(Settlement.nack(org, [Nack(lease=lease, failure=Failure(permanent=True))])) == [Answer.OK]
    before = await records(pair, org, jobs)

    async def assert_unchanged(home: ShardName) -> None:
        found = await records(pair, org, jobs)
        assert set(found) == set(jobs)
        for what, record in found.items():
            assert_content(record._asdict(), jobs[what])
            assert constant(record, but=RENEWED) == constant(before[what], but=RENEWED), what
        listed: list[JobRecord] = []
        for wanted in (
            Wanted(org=org, include_payload=True),
            Wanted(org=org, queue=QueueName("acked"), state=JobState.READY, include_payload=True),
            Wanted(org=org, queue=QueueName("acked"), state=JobState.LEASED, include_payload=True),
        ):
            listed += (await pair.books[home].list_jobs(wanted, page_size=100, page_token="")).jobs
        assert {record.queue for record in listed} == set(jobs)
        for record in listed:
            assert constant(record, but=RENEWED) == constant(before[record.queue], but=RENEWED)

    await assert_unchanged(A)
    await pair.move([org], target=B)
    await assert_unchanged(B)

    # End some of the jobs, each in another way.
    redriven = await pair.books[B].redrive(
        org, QueueName("redriven"), kind="", died_after=None, died_before=None, limit=9
    )
    assert redriven == 1
    jobs["redriven"].live_keys.clear()
    ends = {}
    for what in ("redriven", "acked"):
        ((claimed, ends[what]),) = await lease_jobs(b, org, queue=what)
        assert_content(claimed._asdict(), jobs[what])
    await assert_unchanged(B)
    assert await b.settle(Settlement.ack(org, list(ends.values()), [b"result", b"result"])) == [Answer.OK] * 2
    assert await b.cancel(org, [before["cancelled"].id], reason="why") == [Answer.OK]
    await reach_expiry(pair.databases[B], org)
    assert await expire_waiting(pair.databases[B]) == 1
    assert await retire_dead(pair.databases[B], days=0) == 1
    await assert_unchanged(B)

    # Make the finished jobs cold, export them, and restore them as new jobs.
    await age_finished(pair.databases[B], org, days=40)
    for over in await days_over(pair.databases[B]):
        await turn_cold(pair.databases[B], over)
    (day,) = await days_past(pair.databases[B])
    files = Files(ExportLocation.parse(str(tmp_path / "export")), make=True)
    await export.export_day(files, pair.databases[B], day, cluster=CLUSTER, lead=leads, stop=asyncio.Event())
    exported = {job["queue"]: job for job in find(files, ExportFilter(org=org, payloads=True))}
    orgs = await export_reader.count(pair.databases[B], day)
    pages = [page async for page in export_reader.pages(pair.databases[B], day, orgs)]
    cold = [export_reader.ColdJob._make(job) for page in pages for job in zip(*page, strict=True)]
    assert len(cold) == len(exported) == len(jobs)
    for row in cold:
        assert set(JOB_CONTENT) <= set(row._fields)
        assert_content(row._asdict(), jobs[row.queue])
        assert_content(exported[row.queue], jobs[row.queue])
        (record,) = await b.get(org, [row.id], include_payload=True, bytes_max=ANSWER_BYTES_MAX, as_stored=True)
        assert constant(record, but=AGED) == constant(before[row.queue], but=AGED)
        new_id = job_id()
        assert await b.enqueue(as_new(org, [record], [new_id]), epoch=2) == {}
        (new,) = await b.get(org, [new_id], include_payload=True, bytes_max=ANSWER_BYTES_MAX)
        but = AGED | NOT_REPEATED
        assert constant(new, but=but) == constant(before[row.queue], but=but)
