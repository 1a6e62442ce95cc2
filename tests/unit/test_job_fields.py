"""If a field of a job is forgotten somewhere, a test of this file or of tests/integration/test_job_fields.py fails."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from google.protobuf.message import Message

from router.codec import convert, fast_write
from shard.job_record import NOT_REPEATED, JobRecord, as_new
from shard.queue import statements
from shard.queue.pending_enqueue import Handed, Taker
from shard.queue.store import Store
from shard.schedules.statements import STORE_RUNS
from shard.vocabulary import (
    JOB_CONTENT,
    OF_SCHEDULES,
    OF_WORKFLOWS,
    REPORTED,
    SPARSE_COLUMNS,
    Claimed,
    JobId,
    Micros,
    NewJobs,
    OrgId,
    QueueName,
    ShardName,
)
from shard.workflows.statements import STORE_WORKFLOW
from tests.jobs import MINUTE_US, fullest_job
from tests.unit.test_statements import PACKAGES, SHARD, loaded
from windrow.v1 import job_pb2

ORG = OrgId("acme")
INSERT = re.compile(r"INSERT INTO windrow\.(?:job|dead|departing|finished|cold)\b(?: AS \w+)?\s*(?:\(([^)]*)\)|)")
RECORD = JobRecord(
    id=JobId("019a9f5e-7c1d-7a41-8f0e-3f2b6d1c9a55"),
    queue=QueueName("mail"),
    state="dead",
    priority=3,
    enqueued_at=Micros(1),
    run_at=Micros(2),
    expires_at=Micros(9),
    attempt=7,
    max_attempts=7,
    deadline=None,
    worker="w",
    leased_at=Micros(3),
    finished_at=Micros(4),
    result=b"result",
    reason="reason",
    history=None,
    progress='{"done": 3}',
    scheduled_run='{"schedule":"daily","at":5,"previous":4,"cause":"schedule"}',
    workflow_node="019a9f5e-7c1d-7a41-8f0e-3f2b6d1c9a55/3",
    checkpoint=b"checkpoint",
    **{
        column: getattr(fullest_job(ORG), array)[0]
        for column, array in JOB_CONTENT.items()
        if column in JobRecord._fields
    },
)
CLAIMED = Claimed(
    id=RECORD.id,
    queue=RECORD.queue,
    priority=3,
    attempt=7,
    max_attempts=7,
    enqueued_at=Micros(1),
    run_at=Micros(2),
    lease=1,
    leased_at=Micros(3),
    deadline=Micros(4),
    expired=False,
    checkpoint=b"checkpoint",
    scheduled_run=RECORD.scheduled_run,
    workflow_node=RECORD.workflow_node,
    **{
        column: getattr(fullest_job(ORG), array)[0]
        for column, array in JOB_CONTENT.items()
        if column in Claimed._fields
    },
)


@pytest.mark.parametrize("package", PACKAGES)
def test_every_insert_of_a_job_names_all_that_its_producer_gave(package: str) -> None:
    for statement in loaded(package).values():
        for columns in INSERT.findall(statement.decode()):
            if statement == statements.ENQUEUE_PLAIN:
                # This statement stores only jobs that have none of the other fields. ENQUEUE stores all other jobs.
                continue
            assert set(re.findall(r"\w+", columns)) >= set(JOB_CONTENT), statement.name


def test_every_insert_of_a_stored_job_names_what_consumers_reported() -> None:
    for package in PACKAGES:
        for statement in loaded(package).values():
            for columns in INSERT.findall(statement.decode()):
                # Only the statements that copy jobs are checked. The excluded statements make new jobs.
                if statement not in (statements.ENQUEUE, statements.ENQUEUE_PLAIN, STORE_RUNS, STORE_WORKFLOW):
                    named = set(re.findall(r"\w+", columns))
                    assert named >= {*REPORTED, *OF_SCHEDULES, *OF_WORKFLOWS}, statement.name


def test_other_inserts_of_jobs_copy_whole_rows() -> None:
    paths = [path for path in Path(SHARD).rglob("*") if path.suffix == ".py" or path.parent.name == "migrations"]
    found = [line for path in paths for line in path.read_text().splitlines() if INSERT.search(line)]
    assert {line.partition("INSERT")[2] for line in found} == {
        ' INTO windrow.cold SELECT * FROM {}", day.name)',
        # `names` has the names of the columns, which the function reads from the catalog.
        " INTO windrow.finished (' || names || ', run_at, state, reason, finished_at, retention) '",
        " INTO windrow.finished (' || names || ', run_at, state, lease, result, finished_at, retention) '",
    }


def test_every_column_of_new_jobs_is_sent_to_the_shard() -> None:
    sent = set(re.findall(r"%\((\w+)\)", statements.ENQUEUE.decode()))
    assert {column.name for column in fields(NewJobs)} - {"org", "queues"} <= sent
    assert set(JOB_CONTENT.values()) <= {column.name for column in fields(NewJobs)}


def test_plain_jobs_are_admitted_as_all_others_are() -> None:
    plain, full = (statement.decode() for statement in (statements.ENQUEUE_PLAIN, statements.ENQUEUE))
    assert plain.partition("), stored AS (")[0] == full.partition("), slots AS (")[0]


def test_psycopg_caches_how_it_parsed_the_hot_statements() -> None:
    # psycopg parses longer statements again for every call.
    for statement in (statements.ENQUEUE, statements.ENQUEUE_PLAIN, statements.CLAIM, statements.ACK):
        assert len(statement) <= 4096, statement.name


def test_a_job_that_is_stored_again_has_every_field_that_still_applies() -> None:
    jobs = as_new(ORG, [RECORD], [JobId("new")])
    without = {JOB_CONTENT[column] for column in NOT_REPEATED} | {"run_at_us", "delay_us", "expires_at_us"}
    for column in {field.name for field in fields(NewJobs)} - {"org", "dedup_window_us"}:
        found = getattr(jobs, column)
        assert bool(found) == (column not in without), column
    assert (jobs.ids, jobs.queues, jobs.priorities, jobs.max_attempts) == (["new"], ["mail"], {0: 3}, {0: 7})
    for column in set(JOB_CONTENT) - NOT_REPEATED:
        assert getattr(jobs, JOB_CONTENT[column])[0] == getattr(RECORD, column), column


@pytest.mark.parametrize("kind", [job_pb2.NewJob, job_pb2.JobTemplate, job_pb2.Dedup])
def test_a_field_of_a_new_job_is_in_its_columns(kind: type[Message]) -> None:
    def new_job() -> job_pb2.NewJob:
        return job_pb2.NewJob(id="id", dedup=job_pb2.Dedup() if kind is job_pb2.Dedup else None)

    plain = convert.new_jobs(ORG, [new_job()], trace=None)
    for field in kind.DESCRIPTOR.fields:
        if field.name == "template":
            continue
        job = new_job()
        parts: dict[type[Message], Any] = {
            job_pb2.NewJob: job,
            job_pb2.JobTemplate: job.template,
            job_pb2.Dedup: job.dedup,
        }
        part = parts[kind]
        match field.type:
            case field.TYPE_STRING:
                setattr(part, field.name, "another")
            case field.TYPE_BYTES:
                setattr(part, field.name, b"another")
            case field.TYPE_MESSAGE if field.name == "attributes":
                part.attributes["a"] = "b"
            case field.TYPE_MESSAGE if field.name == "trace":
                part.trace.traceparent = "another"
            case field.TYPE_MESSAGE:
                getattr(part, field.name).SetInParent()
            case _:
                setattr(part, field.name, 9)
        assert convert.new_jobs(ORG, [job], trace=None) != plain, field.name


@pytest.mark.parametrize(
    "column",
    [column for column in (*JOB_CONTENT, *REPORTED, *OF_SCHEDULES, *OF_WORKFLOWS) if column in JobRecord._fields],
)
def test_a_column_of_a_record_is_in_its_message(column: str) -> None:
    shard = ShardName("s1")
    nothing: Any = "" if column == "kind" else None
    without = RECORD._replace(**{column: nothing})
    assert convert.job(without, shard) != convert.job(RECORD, shard)


@pytest.mark.parametrize(
    "column",
    [column for column in (*JOB_CONTENT, *REPORTED, *OF_SCHEDULES, *OF_WORKFLOWS) if column in Claimed._fields],
)
def test_a_column_of_a_claim_is_in_its_message(column: str) -> None:
    if column in fast_write.NOT_SHARED:
        pytest.skip("fast_write adds it")
    nothing: Any = "" if column == "kind" else None
    without = CLAIMED._replace(**{column: nothing})
    assert convert.leased_job(without, OrgId("acme")) != convert.leased_job(CLAIMED, OrgId("acme"))


@pytest.mark.parametrize(
    "array", [array for column, array in JOB_CONTENT.items() if column in Claimed._fields and array in SPARSE_COLUMNS]
)
def test_jobs_that_are_handed_over_have_what_their_producer_gave(array: str) -> None:
    jobs = fullest_job(ORG)
    for name in ("ids", "queues", "kinds", "payloads"):
        getattr(jobs, name).append(getattr(jobs, name)[0])
    for name in SPARSE_COLUMNS:
        if name != array:
            getattr(jobs, name)[1] = getattr(jobs, name)[0]
    taker, handed = Taker(1, "w", MINUTE_US), Handed([0, 1], (), Micros(1), {})
    delivery = fast_write.handed(cast("Store", SimpleNamespace(name=ShardName("s1"))), jobs, [0, 1], taker, handed)
    with_it, without = delivery.jobs
    assert with_it != without


def test_every_sparse_column_is_of_texts_or_of_numbers() -> None:
    assert set(SPARSE_COLUMNS.values()) == {str, int}
