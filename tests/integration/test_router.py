"""Tests what router processes answer, what they do while a shard is away or gives wrong answers, and how they start and
stop."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import itertools
import os
import signal
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import psutil
import psycopg
import pytest
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2
from psycopg.conninfo import make_conninfo

from embedded import BinariesNotFound, Cluster, Clusters, open_clusters
from embedded.ports import HOST
from router.process.supervisor import Supervisor
from router.services.server_info import server_info
from shard.placement.slots import slot_of
from shard.postgres.pool import Database
from shard.vocabulary import OrgId, ShardName
from tests.conftest import SHARD
from tests.jobs import job_id, job_message
from tests.postgres import EMPTY, Server, frozen, kill
from tests.queues import fill_queues
from tests.routers import (
    PATIENCE_S,
    Routers,
    Stubs,
    detail,
    ending,
    fields_of,
    first_line,
    running_routers,
    spawned_routers,
    stubs,
    until,
    violated_fields,
    write_cluster,
)
from windrow.v1 import admin_pb2, cluster_pb2, job_pb2, queue_pb2, server_pb2

QUEUE = "mail"
# No test waits as long as this. So a drain that ends during a test has not waited for this time.
LONG_S = 3600.0
OK, STALE, NOT_FOUND = job_pb2.JOB_ANSWER_OK, job_pb2.JOB_ANSWER_STALE, job_pb2.JOB_ANSWER_NOT_FOUND
_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A cluster under test: its databases, its routers, and a connection to them."""

    dsns: Mapping[str, str]
    routers: Routers
    stubs: Stubs

    def org_on(self, shard: str) -> str:
        """Returns a new org that lives on this shard."""
        for _ in range(1000):
            org = f"org-{next(_numbers)}"
            made = self.stubs.admin.CreateQueue(admin_pb2.CreateQueueRequest(org=org, queue="home"), timeout=PATIENCE_S)
            if made.queue.shard == shard:
                return org
        raise AssertionError(f"no org in a thousand lives on shard {shard!r}")

    def sql(self, shard: str, statement: str, *parameters: object) -> list[tuple[object, ...]]:
        with psycopg.connect(self.dsns[shard], autocommit=True) as connection:
            cursor = connection.execute(statement.encode(), parameters)
            return cursor.fetchall() if cursor.description else []


@pytest.fixture(scope="module")
def databases(postgres: Server) -> dict[str, str]:
    return {shard: postgres.create(f"router_{shard}") for shard in ("s1", "s2")}


@pytest.fixture(scope="module")
def running(databases: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Generator[Running, None, None]:
    """Starts routers with two shards on the server that all tests share."""
    config = write_cluster(tmp_path_factory.mktemp("router") / "cluster.toml", databases)
    with running_routers(config) as routers, stubs(routers.address) as both:
        yield Running(dsns=databases, routers=routers, stubs=both)


@pytest.fixture(scope="module")
def servers() -> Iterator[Clusters]:
    """Starts two servers that only this module uses. Its tests stop, freeze and restart these servers."""
    try:
        with open_clusters(["s1", "s2"], ephemeral=True) as clusters:
            yield clusters
    except BinariesNotFound as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def breakable(servers: Clusters, tmp_path_factory: pytest.TempPathFactory) -> Generator[Running, None, None]:
    """Starts routers with two shards on two servers. The catalog is on s1, so tests break only s2."""
    config = write_cluster(tmp_path_factory.mktemp("breakable") / "cluster.toml", servers.dsns)
    with running_routers(config) as routers, stubs(routers.address) as both:
        yield Running(dsns=servers.dsns, routers=routers, stubs=both)


def new_job(**fields: object) -> job_pb2.NewJob:
    whole: dict[str, object] = {"id": job_id(), "queue": QUEUE, "kind": "greet", **fields}
    return job_message(**whole)


def enqueue(both: Stubs, org: str, *jobs: job_pb2.NewJob, independent: bool = False) -> list[queue_pb2.EnqueueResult]:
    request = queue_pb2.EnqueueRequest(org=org, jobs=jobs or [new_job()], independent=independent)
    return list(both.queue.Enqueue(request, timeout=PATIENCE_S).results)


def dequeue(both: Stubs, org: str, max_jobs: int = 100) -> list[job_pb2.LeasedJob]:
    request = queue_pb2.DequeueRequest(org=org, queues=[QUEUE], max_jobs=max_jobs)
    return list(both.queue.Dequeue(request, timeout=PATIENCE_S).jobs)


def found(both: Stubs, org: str, *ids: str) -> queue_pb2.GetJobsResponse:
    return both.queue.GetJobs(queue_pb2.GetJobsRequest(org=org, ids=ids), timeout=PATIENCE_S)


def refusal(call: Callable[[], object]) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as refused:
        call()
    return refused.value


def succeeds(call: Callable[[], object]) -> bool:
    try:
        call()
    except grpc.RpcError:
        return False
    return True


@contextlib.contextmanager
def locked_jobs(dsn: str) -> Generator[Callable[[], int], None, None]:
    """During the `with` block, no statement can store or lease a job in this database. Yields a function that counts
    the statements that wait for this."""
    with psycopg.connect(dsn) as holder, psycopg.connect(dsn, autocommit=True) as watcher:
        holder.execute("LOCK TABLE windrow.job IN EXCLUSIVE MODE")

        def waiting() -> int:
            row = watcher.execute(
                "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
            ).fetchone()
            assert row is not None
            return int(row[0])

        yield waiting


# ── What a router answers ────────────────────────────────────────────────────────────────────────────────────────────


def test_an_independent_enqueue_answers_each_job_for_itself(running: Running) -> None:
    org, known = running.org_on("s1"), new_job(dedup_key="k")
    enqueue(running.stubs, org, known)
    good, again = new_job(), new_job(dedup_key="k")
    old, bad = new_job(id=job_id(ahead_ms=-30 * 86_400_000)), new_job(kind="no name")
    results = enqueue(running.stubs, org, bad, good, known, old, again, new_job(id=""), good, independent=True)
    assert [result.id for result in results[:5]] == ["", good.id, known.id, "", known.id]
    assert [result.duplicate for result in results] == [False, False, True, False, True, False, True]
    assert [field for result in results for field in fields_of(result.error)] == [
        "jobs[0].template.kind",
        "jobs[3].id",
    ]
    ids = {result.id for result in results if result.id}
    assert len(ids) == 3
    assert found(running.stubs, org, *ids).not_found_ids == []


def test_acks_ride_on_the_next_dequeue(running: Running) -> None:
    org, queue = running.org_on("s1"), running.stubs.queue
    jobs = [new_job() for _ in range(4)]
    enqueue(running.stubs, org, *jobs)
    first = queue.Dequeue(queue_pb2.DequeueRequest(org=org, queues=[QUEUE], max_jobs=3), timeout=PATIENCE_S).jobs
    done, stale, left = (job.lease for job in first)
    queue.Release(queue_pb2.ReleaseRequest(org=org, leases=[stale]), timeout=PATIENCE_S)
    acks = [queue_pb2.Ack(lease=done, result=b"r"), queue_pb2.Ack(lease=stale)]
    request = queue_pb2.DequeueRequest(org=org, queues=[QUEUE], acks=acks)
    second = queue.Dequeue(request, timeout=PATIENCE_S)
    assert list(second.not_ok) == [queue_pb2.LeaseAnswer(lease=stale, answer=STALE)]
    assert len(second.jobs) == 1
    # Repeat the request, as if its answer had been lost. The acks get the same answers, and the request leases another
    # job.
    third = queue.Dequeue(request, timeout=PATIENCE_S)
    assert (list(third.not_ok), len(third.jobs)) == (list(second.not_ok), 1)
    (record,) = found(running.stubs, org, first[0].id).jobs
    assert record.state == job_pb2.JOB_STATE_SUCCEEDED
    # If an ack in the request is refused, no job is leased.
    queue.Release(queue_pb2.ReleaseRequest(org=org, leases=[left]), timeout=PATIENCE_S)
    request.acks.add(lease=b"garbage")
    error = refusal(lambda: queue.Dequeue(request, timeout=PATIENCE_S))
    assert (error.code(), violated_fields(error)) == (grpc.StatusCode.INVALID_ARGUMENT, ["acks[2].lease"])
    (record,) = found(running.stubs, org, first[2].id).jobs
    assert (record.state, record.attempt) == (job_pb2.JOB_STATE_READY, 0)


def test_an_enqueue_with_one_bad_job_stores_none(running: Running) -> None:
    org, good = running.org_on("s1"), new_job()
    for bad, field in (
        (new_job(priority=10), "jobs[1].template.priority"),
        (new_job(id=job_id(ahead_ms=-30 * 86_400_000)), "jobs[1].id"),
        (new_job(id=job_id(ahead_ms=2 * 3_600_000)), "jobs[1].id"),
    ):
        error = refusal(lambda bad=bad: enqueue(running.stubs, org, good, bad))  # type: ignore[misc]
        assert (error.code(), violated_fields(error)) == (grpc.StatusCode.INVALID_ARGUMENT, [field])
    assert found(running.stubs, org, good.id).not_found_ids == [good.id]


def test_an_org_is_told_which_of_its_jobs_would_need_one_queue_too_many(running: Running) -> None:
    org = running.org_on("s1")
    enqueue(running.stubs, org)

    async def fill() -> None:
        database = Database(ShardName("s1"), running.dsns["s1"], connections=1)
        await database.open()
        await fill_queues(database, OrgId(org))
        await database.close()

    asyncio.run(fill())
    more = new_job(queue="one-more")
    for call in (
        lambda: enqueue(running.stubs, org, new_job(), more),
        lambda: running.stubs.admin.CreateQueue(admin_pb2.CreateQueueRequest(org=org, queue=more.template.queue)),
    ):
        error = refusal(call)
        assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert f"org {org!r} has 10,000 queues on shard 's1'" in (error.details() or "")
        # The answer does not suggest a retry, because a retry would not help.
        assert detail(error, error_details_pb2.RetryInfo) is None
    first, second, third, fourth = enqueue(
        running.stubs, org, more, new_job(), new_job(kind="no name"), new_job(), independent=True
    )
    assert (first.id, first.error.code) == ("", grpc.StatusCode.RESOURCE_EXHAUSTED.value[0])
    assert "no room for 'one-more'" in first.error.message
    assert (third.id, third.error.code) == ("", grpc.StatusCode.INVALID_ARGUMENT.value[0])
    assert found(running.stubs, org, second.id, fourth.id).not_found_ids == []


def test_a_job_that_is_too_old_is_named_also_behind_twins(running: Running) -> None:
    org, twin, old = running.org_on("s1"), new_job(), new_job(id=job_id(ahead_ms=-30 * 86_400_000))
    error = refusal(lambda: enqueue(running.stubs, org, twin, twin, old))
    assert violated_fields(error) == ["jobs[2].id"]
    first, second, third = enqueue(running.stubs, org, twin, twin, old, independent=True)
    assert (first.id, second.id, second.duplicate, third.id) == (twin.id, twin.id, True, "")


def test_an_enqueue_repeated_answers_the_first_ids(running: Running) -> None:
    org, jobs = running.org_on("s2"), [new_job(), new_job(dedup_key="a"), new_job(dedup_key="b")]
    first = enqueue(running.stubs, org, *jobs)
    again = enqueue(running.stubs, org, *jobs)
    others = enqueue(
        running.stubs, org, new_job(dedup_key="b"), new_job(dedup_key="a"), new_job(queue="other", dedup_key="a")
    )
    assert [result.id for result in first] == [result.id for result in again] == [job.id for job in jobs]
    assert [result.duplicate for result in first + again] == [False] * 3 + [True] * 3
    assert [result.id for result in others[:2]] == [jobs[2].id, jobs[1].id]
    assert not others[2].duplicate
    assert running.stubs.books("s2")["s2", org].accepted == 4


def test_an_enqueue_that_finds_its_job_tells_the_state_and_whether_the_id_names_another_job(running: Running) -> None:
    org, later = running.org_on("s1"), new_job(delay=Duration(seconds=3600))
    done, dead, cancelled, leased, ready = jobs = [new_job(payload=b"x", dedup_key=name) for name in "abcde"]
    for job in (done, dead):
        (stored,) = enqueue(running.stubs, org, job)
        assert (stored.state, stored.differs) == (job_pb2.JOB_STATE_UNSPECIFIED, False)
        (taken,) = dequeue(running.stubs, org)
        if job is done:
            acks = queue_pb2.AckRequest(org=org, acks=[queue_pb2.Ack(lease=taken.lease)])
            assert list(running.stubs.queue.Ack(acks, timeout=PATIENCE_S).answers) == [OK]
        else:
            nack = queue_pb2.Nack(lease=taken.lease, failure=job_pb2.Failure(permanent=True))
            running.stubs.queue.Nack(queue_pb2.NackRequest(org=org, nacks=[nack]), timeout=PATIENCE_S)
    enqueue(running.stubs, org, leased)
    assert len(dequeue(running.stubs, org)) == 1
    enqueue(running.stubs, org, cancelled, ready, later)
    running.stubs.queue.CancelJobs(queue_pb2.CancelJobsRequest(org=org, ids=[cancelled.id]), timeout=PATIENCE_S)

    def told(*sent: job_pb2.NewJob) -> list[tuple[str, bool]]:
        results = enqueue(running.stubs, org, *sent)
        return [(job_pb2.JobState.Name(one.state).removeprefix("JOB_STATE_"), one.differs) for one in results]

    states = ["SUCCEEDED", "DEAD", "CANCELLED", "LEASED", "READY"]
    assert told(*jobs, later, new_job()) == [*((state, False) for state in (*states, "SCHEDULED", "UNSPECIFIED"))]
    others = [new_job(id=job.id, payload=b"y") for job in jobs]
    assert told(*others, new_job(dedup_key="e")) == [*((state, True) for state in states), ("READY", False)]
    assert told(new_job(id=ready.id, payload=b"x", kind="another")) == [("READY", True)]
    assert told(new_job(id=ready.id, payload=b"x", queue="another")) == [("READY", True)]


def test_a_new_queue_takes_many_first_jobs_at_once(running: Running) -> None:
    with ThreadPoolExecutor(16) as threads:
        for _ in range(40):
            org = f"org-{next(_numbers)}"
            for stored in [threads.submit(enqueue, running.stubs, org) for _ in range(16)]:
                assert stored.result()[0].id


def test_lookups_and_lists_of_the_largest_jobs_fit_into_what_grpc_clients_take(running: Running) -> None:
    """The default limit of gRPC clients is 4 MiB."""
    org = running.org_on("s1")
    labels = {f"{at:0128}": "x" * 1024 for at in range(32)}
    jobs = [new_job(payload=bytes(1 << 20), attributes=labels) for _ in range(6)]
    enqueue(running.stubs, org, *jobs)
    unknown, rest = job_id(), [job.id for job in jobs]
    answered: list[str] = []
    while rest:
        request = queue_pb2.GetJobsRequest(org=org, ids=[unknown, *rest], include_payload=True)
        answer = running.stubs.queue.GetJobs(request, timeout=PATIENCE_S)
        assert answer.not_found_ids == [unknown]
        assert [*(job.id for job in answer.jobs), *answer.omitted_ids] == rest
        assert all(len(job.payload) == 1 << 20 for job in answer.jobs)
        answered += [job.id for job in answer.jobs]
        rest = list(answer.omitted_ids)
    assert answered == [job.id for job in jobs]
    assert [job.id for job in found(running.stubs, org, *answered).jobs] == answered

    listed: list[str] = []
    token = ""
    while token or not listed:
        page = running.stubs.admin.ListJobs(
            admin_pb2.ListJobsRequest(
                org=org, queue=QUEUE, state=job_pb2.JOB_STATE_READY, page_token=token, include_payload=True
            ),
            timeout=PATIENCE_S,
        )
        listed += [job.id for job in page.jobs]
        token = page.next_page_token
    assert sorted(listed) == sorted(answered)


@pytest.mark.parametrize("other_shard", ["s1", "s2"])
def test_orgs_do_not_reach_each_other(running: Running, other_shard: str) -> None:
    mine, theirs = running.org_on("s1"), running.org_on(other_shard)
    enqueue(running.stubs, mine)
    (job,) = enqueue(running.stubs, theirs)
    (leased,) = dequeue(running.stubs, theirs)
    assert [one.id for one in dequeue(running.stubs, mine)] != [job.id]
    queue = running.stubs.queue
    ack, nack = (
        queue_pb2.Ack(lease=leased.lease),
        queue_pb2.Nack(lease=leased.lease, failure=job_pb2.Failure(permanent=True)),
    )
    assert list(queue.Ack(queue_pb2.AckRequest(org=mine, acks=[ack])).answers) == [NOT_FOUND]
    assert list(queue.Nack(queue_pb2.NackRequest(org=mine, nacks=[nack])).answers) == [NOT_FOUND]
    assert list(
        queue.Extend(queue_pb2.ExtendRequest(org=mine, extends=[queue_pb2.Extend(lease=leased.lease)])).answers
    ) == [NOT_FOUND]
    assert list(queue.Release(queue_pb2.ReleaseRequest(org=mine, leases=[leased.lease])).answers) == [NOT_FOUND]
    assert list(queue.CancelJobs(queue_pb2.CancelJobsRequest(org=mine, ids=[job.id])).answers) == [NOT_FOUND]
    assert found(running.stubs, mine, job.id).not_found_ids == [job.id]
    assert found(running.stubs, theirs, job.id).jobs[0].state == job_pb2.JOB_STATE_LEASED
    assert list(queue.Ack(queue_pb2.AckRequest(org=theirs, acks=[ack])).answers) == [OK]


def test_one_ack_reaches_leases_of_several_shards(running: Running) -> None:
    # The leases of one org may be on two shards, as after a move. The shard where the org has no jobs does not know the
    # lease.
    org, other = running.org_on("s1"), running.org_on("s2")
    enqueue(running.stubs, org)
    enqueue(running.stubs, other)
    (mine,), (theirs,) = dequeue(running.stubs, org), dequeue(running.stubs, other)
    acks = [queue_pb2.Ack(lease=lease) for lease in (theirs.lease, mine.lease, mine.lease)]
    request = queue_pb2.AckRequest(org=org, acks=acks)
    assert list(running.stubs.queue.Ack(request, timeout=PATIENCE_S).answers) == [NOT_FOUND, OK, OK]


def test_a_call_whose_metadata_names_another_org_is_refused(running: Running) -> None:
    org, both = running.org_on("s1"), running.stubs
    request = queue_pb2.EnqueueRequest(org=org, jobs=[new_job()])
    begin = queue_pb2.ConsumeRequest(start=queue_pb2.ConsumeStart(org=org, queues=[QUEUE]))
    stats = admin_pb2.GetStatsRequest(org=org)
    mine, others = (("windrow-org", org),), (("windrow-org", "other"),)
    for call, field in (
        (lambda metadata: both.queue.Enqueue(request, metadata=metadata, timeout=PATIENCE_S), "org"),
        (lambda metadata: both.admin.GetStats(stats, metadata=metadata, timeout=PATIENCE_S), "org"),
        (lambda metadata: list(both.queue.Consume(iter([begin]), metadata=metadata, timeout=PATIENCE_S)), "start.org"),
    ):
        call(mine)
        error = refusal(partial(call, others))
        assert (error.code(), violated_fields(error)) == (grpc.StatusCode.INVALID_ARGUMENT, [field])
        info = detail(error, error_details_pb2.ErrorInfo)
        assert info is not None
        assert info.reason == "ORG_MISMATCH"
        assert f"is {org!r}, but the metadata windrow-org says 'other'" in (error.details() or "")
    # Only the call whose metadata names the org has stored its job.
    assert len(dequeue(both, org)) == 1


@pytest.mark.parametrize(
    ("config", "paths", "then"),
    [
        ({"max_attempts": 5}, [], (5, 90)),
        ({"max_attempts": 5}, ["max_attempts"], (5, 90)),
        # A path whose field is absent resets the field. A field that no path names does not change.
        ({"max_attempts": 5}, ["retention_days"], (3, 30)),
        ({"max_attempts": 5, "retention_days": 7}, ["retention_days"], (3, 7)),
        ({}, ["max_attempts", "retention_days"], (20, 30)),
        ({"retention_days": 0}, ["*"], (20, 0)),
        ({}, [], (3, 90)),
    ],
)
def test_an_update_changes_what_its_mask_names(
    running: Running, config: dict[str, int], paths: list[str], then: tuple[int, int]
) -> None:
    org, admin = running.org_on("s1"), running.stubs.admin
    before = admin_pb2.QueueConfig(max_attempts=3, retention_days=90)
    admin.CreateQueue(admin_pb2.CreateQueueRequest(org=org, queue=QUEUE, config=before), timeout=PATIENCE_S)
    changes = admin_pb2.QueueConfig(**config)  # type: ignore[arg-type]
    request = admin_pb2.UpdateQueueRequest(org=org, queue=QUEUE, config=changes)
    request.update_mask.paths.extend(paths)
    after = admin.UpdateQueue(request, timeout=PATIENCE_S).queue.config
    assert (after.max_attempts, after.retention_days) == then


def test_an_update_with_an_unknown_path_changes_nothing(running: Running) -> None:
    org, admin = running.org_on("s1"), running.stubs.admin
    request = admin_pb2.UpdateQueueRequest(org=org, queue="home", config=admin_pb2.QueueConfig(max_attempts=5))
    request.update_mask.paths.extend(["max_attempts", "paused"])
    error = refusal(lambda: admin.UpdateQueue(request, timeout=PATIENCE_S))
    assert violated_fields(error) == ["update_mask.paths[1]"]
    names = ", ".join(admin_pb2.QueueConfig.DESCRIPTOR.fields_by_name)
    assert f"must be one of {names} or *, not 'paused'" in (error.details() or "")
    info = admin.GetQueue(admin_pb2.GetQueueRequest(org=org, queue="home"), timeout=PATIENCE_S).queue
    assert info.config.max_attempts == 20


def test_a_router_tells_its_version_and_its_limits(running: Running) -> None:
    info = running.stubs.queue.GetServerInfo(server_pb2.GetServerInfoRequest(), timeout=PATIENCE_S)
    assert info == server_info()
    too_many = queue_pb2.EnqueueRequest(org="acme", jobs=[new_job()] * (info.limits.max_jobs_per_enqueue + 1))
    error = refusal(lambda: running.stubs.queue.Enqueue(too_many, timeout=PATIENCE_S))
    assert violated_fields(error) == ["jobs"]


@pytest.mark.parametrize("version", ["v1alpha", "v1"])
def test_reflection_lists_the_services(running: Running, version: str) -> None:
    reflect: Any = running.stubs.channel.stream_stream(
        f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )
    asked = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
    (answer,) = reflect(asked, timeout=PATIENCE_S)
    assert {service.name for service in answer.list_services_response.service} == {
        "windrow.v1.Queue",
        "windrow.v1.Admin",
        "windrow.v1.Cluster",
        "windrow.v1.Schedules",
        "windrow.v1.Workflows",
        "externalscaler.ExternalScaler",
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
    }


# ── Placement that changes (I6) ──────────────────────────────────────────────────────────────────────────────────────


def move_slot(running: Running, org: str, *, to: str, grant: bool = True) -> None:
    """Changes the catalog and the shards as a balancer does when an org's slot begins to leave s1."""
    slot = slot_of(OrgId(org))
    # Both changes are in one statement. A router that read the catalog between two statements would never learn of the
    # second change.
    ((epoch,),) = running.sql(
        "s1",
        "WITH next AS (UPDATE windrow.catalog SET epoch = epoch + 1 RETURNING epoch) "
        "UPDATE windrow.placement p SET writes = ARRAY[%s], reads = ARRAY['s1', %s], epoch = next.epoch, "
        "changed = next.epoch FROM next WHERE p.slot = %s RETURNING next.epoch",
        *(to, to, slot),
    )
    if grant:
        running.sql(to, "INSERT INTO windrow.owned_slot (slot, state, epoch) VALUES (%s, 'owned', %s)", slot, epoch)
    running.sql("s1", "UPDATE windrow.owned_slot SET state = 'draining', epoch = %s WHERE slot = %s", epoch, slot)


def test_an_enqueue_that_a_shard_refuses_goes_where_the_slot_went(running: Running) -> None:
    org, before, after = running.org_on("s1"), new_job(), new_job()
    enqueue(running.stubs, org, before)
    move_slot(running, org, to="s2")
    (result,) = enqueue(running.stubs, org, after)
    assert (result.id, result.duplicate) == (after.id, False)
    assert [job.shard for job in found(running.stubs, org, before.id, after.id).jobs] == ["s1", "s2"]
    # Consumers get the jobs of both shards. From a lease, the router knows the shard of the job.
    leased = dequeue(running.stubs, org)
    assert {job.id for job in leased} == {before.id, after.id}
    request = queue_pb2.AckRequest(org=org, acks=[queue_pb2.Ack(lease=job.lease) for job in leased])
    assert list(running.stubs.queue.Ack(request, timeout=PATIENCE_S).answers) == [OK, OK]
    running.stubs.books("s1", "s2")


def test_what_two_shards_give_fits_into_one_answer(running: Running) -> None:
    org = running.org_on("s1")
    # Two payloads of this size do not fill the answer of one shard: a third payload would fit. Four payloads are more
    # than gRPC clients accept.
    large = b"x" * (2**20 - 8)
    stored = [new_job(payload=large) for _ in range(2)]
    enqueue(running.stubs, org, *stored)
    move_slot(running, org, to="s2")
    more = [new_job(payload=large) for _ in range(2)]
    enqueue(running.stubs, org, *more)
    until(lambda: len(found(running.stubs, org, stored[0].id, more[0].id).jobs) == 2, "both shards are known")
    ids: list[str] = []
    while jobs := dequeue(running.stubs, org):
        ids += [job.id for job in jobs]
    assert sorted(ids) == sorted(job.id for job in stored + more)


def test_a_router_that_nobody_enqueues_at_learns_of_a_move_too(running: Running) -> None:
    org = running.org_on("s1")
    enqueue(running.stubs, org)
    assert len(dequeue(running.stubs, org)) == 1
    move_slot(running, org, to="s2")
    with running_routers(running.routers.config) as elsewhere, stubs(elsewhere.address) as other:
        (job,) = enqueue(other, org)
    until(
        lambda: [leased.id for leased in dequeue(running.stubs, org)] == [job.id], "a job on the new shard is dequeued"
    )


def test_while_no_shard_accepts_a_slot_an_enqueue_gets_a_retry_delay(running: Running) -> None:
    org = running.org_on("s1")
    move_slot(running, org, to="s2", grant=False)
    error = refusal(lambda: enqueue(running.stubs, org))
    info = detail(error, error_details_pb2.RetryInfo)
    assert error.code() == grpc.StatusCode.UNAVAILABLE
    assert info is not None
    assert 0 < info.retry_delay.ToNanoseconds() <= 1e9
    running.sql("s2", "INSERT INTO windrow.owned_slot VALUES (%s, 'owned', 1)", slot_of(OrgId(org)))
    enqueue(running.stubs, org)


# ── A shard that is away ─────────────────────────────────────────────────────────────────────────────────────────────


def assert_unavailable(error: grpc.RpcError) -> None:
    info = detail(error, error_details_pb2.RetryInfo)
    assert error.code() == grpc.StatusCode.UNAVAILABLE
    assert info is not None
    assert 0 < info.retry_delay.ToNanoseconds() <= 5e9


def test_a_stopped_shard_is_unavailable_at_once_and_hurts_no_other(breakable: Running, servers: Clusters) -> None:
    near, far, both = breakable.org_on("s1"), breakable.org_on("s2"), breakable.stubs
    enqueue(both, far)
    (held,) = dequeue(both, far)
    ack = queue_pb2.AckRequest(org=far, acks=[queue_pb2.Ack(lease=held.lease)])
    calls: list[Callable[[], object]] = [
        lambda: enqueue(both, far),
        lambda: dequeue(both, far),
        lambda: both.queue.Ack(ack, timeout=PATIENCE_S),
        lambda: found(both, far, held.id),
        lambda: both.admin.GetStats(admin_pb2.GetStatsRequest(org=far), timeout=PATIENCE_S),
        lambda: list(both.cluster.CheckShard(cluster_pb2.CheckShardRequest(shard="s2"), timeout=PATIENCE_S)),
    ]
    kill(servers["s2"])
    try:
        with ThreadPoolExecutor(40) as threads:
            # The first calls find the connections broken. When the later calls come, the router already knows that s2
            # is away.
            for _ in range(3):
                refused = [threads.submit(refusal, call) for call in calls * 6]
                served = [threads.submit(enqueue, both, near) for _ in range(20)]
                for one in refused:
                    assert_unavailable(one.result())
                    # The error is not that of a call that has reached its deadline.
                    assert " within " not in str(one.result().details())
                for other in served:
                    assert other.result()[0].id
        away = both.cluster.ListShards(cluster_pb2.ListShardsRequest(), timeout=PATIENCE_S).shards
        assert [(shard.name, shard.reachable) for shard in away] == [("s1", True), ("s2", False)]
        assert "refused" in away[1].error
    finally:
        servers["s2"].start()
    until(lambda: succeeds(lambda: enqueue(both, far)), "the shard is used again")
    assert list(both.queue.Ack(ack, timeout=PATIENCE_S).answers) == [OK]
    until(lambda: succeeds(lambda: both.books("s2")), "its books are open again")


def test_calls_to_a_frozen_shard_end_by_their_deadline(breakable: Running, servers: Clusters) -> None:
    near, far, both = breakable.org_on("s1"), breakable.org_on("s2"), breakable.stubs
    enqueue(both, far)
    pid = servers["s2"].pid
    assert pid is not None

    def hopeless() -> grpc.StatusCode:
        request = queue_pb2.EnqueueRequest(org=far, jobs=[new_job()])
        return refusal(lambda: both.queue.Enqueue(request, timeout=0.5)).code()

    with frozen(pid), ThreadPoolExecutor(20) as threads:
        for _ in range(3):
            stuck = [threads.submit(hopeless) for _ in range(12)]
            for one in [threads.submit(enqueue, both, near) for _ in range(8)]:
                assert one.result()[0].id
            codes = {one.result() for one in stuck}
            assert codes <= {grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE}
        # A caller with a long timeout gets the refusal soon too.
        error = refusal(lambda: enqueue(both, far))
        assert_unavailable(error)
        assert error.details() == "shard 's2' is unavailable: it does not answer"
    until(lambda: succeeds(lambda: enqueue(both, far)), "the thawed shard is used again")
    both.books("s1", "s2")


def test_an_org_on_several_shards_is_served_by_those_that_are_there(breakable: Running, servers: Clusters) -> None:
    org, both = breakable.org_on("s1"), breakable.stubs
    (before,) = enqueue(both, org)
    move_slot(breakable, org, to="s2")
    (after,) = enqueue(both, org)
    kill(servers["s2"])
    try:
        answer = found(both, org, before.id, after.id)
        assert [job.id for job in answer.jobs] == [before.id]
        assert (list(answer.not_found_ids), list(answer.unavailable_shards)) == ([], ["s2"])
        stats = both.admin.GetStats(admin_pb2.GetStatsRequest(org=org, queue=QUEUE), timeout=PATIENCE_S)
        assert (stats.queues[0].ready, list(stats.unavailable_shards)) == (1, ["s2"])
        assert [job.id for job in dequeue(both, org)] == [before.id]
    finally:
        servers["s2"].start()
    until(lambda: succeeds(lambda: enqueue(both, org)), "the other is used again")
    assert found(both, org, after.id).jobs[0].shard == "s2"


def test_many_calls_at_once_are_the_gates_to_judge_and_not_grpcs(running: Running) -> None:
    org = running.org_on("s1")
    request = queue_pb2.DequeueRequest(org=org, queues=[QUEUE])
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(stubs(running.routers.address)) for _ in range(5)]
        # If the router is slow, all of these calls wait in gRPC. gRPC refuses none of them, because in a router up to
        # 2,000 calls may wait. The default of gRPC is 1,000.
        calls = [each.queue.Dequeue.future(request, timeout=PATIENCE_S) for _ in range(390) for each in connections]
        for call in calls:
            call.exception(PATIENCE_S)
    told = Counter((call.exception(PATIENCE_S) and call.code(), detail_reason(call)) for call in calls)
    assert told.keys() <= {(None, ""), (grpc.StatusCode.RESOURCE_EXHAUSTED, "ROUTER_FULL")}


def detail_reason(call: Any) -> str:
    error = call.exception()
    info = detail(error, error_details_pb2.ErrorInfo) if error is not None else None
    return "" if info is None else info.reason


def test_two_hundred_cancelled_calls_cost_no_connection(running: Running) -> None:
    org, both = running.org_on("s1"), running.stubs
    jobs = [new_job() for _ in range(200)]
    requests = [queue_pb2.EnqueueRequest(org=org, jobs=[job]) for job in jobs]
    enqueue(both, org)
    for at in range(0, 200, 20):
        with locked_jobs(running.dsns["s1"]) as waiting:
            calls = [both.queue.Enqueue.future(request) for request in requests[at : at + 20]]
            until(lambda waiting=waiting: waiting() == 2, "as many enqueues as may be under way wait for the lock")  # type: ignore[misc]
            for call in calls:
                call.cancel()
            until(lambda waiting=waiting: waiting() == 0, "the cancelled statements have ended")  # type: ignore[misc]
    # All connections to the shard still work.
    with locked_jobs(running.dsns["s1"]) as waiting:
        calls = [both.queue.Enqueue.future(request) for request in requests]
        until(lambda: waiting() == 2, "as many enqueues as may be under way wait for the lock")
    # A cancelled call may have stored its job. Nevertheless, each job is stored only once.
    assert [call.result(PATIENCE_S).results[0].id for call in calls] == [job.id for job in jobs]
    assert running.stubs.books("s1")["s1", org].accepted == 201


def test_a_shard_that_became_a_standby_is_unavailable_and_then_found_again(running: Running) -> None:
    # The trigger raises the same error as a standby.
    org, both = running.org_on("s2"), running.stubs
    running.sql(
        "s2",
        """
        CREATE FUNCTION windrow.be_a_standby() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            RAISE 'cannot execute INSERT in a read-only transaction' USING ERRCODE = 'read_only_sql_transaction';
        END $$
        """,
    )
    running.sql("s2", "CREATE TRIGGER standby BEFORE INSERT ON windrow.job EXECUTE FUNCTION windrow.be_a_standby()")
    try:
        error = refusal(lambda: enqueue(both, org))
        assert_unavailable(error)
        assert "read-only" in (error.details() or "")
        # Reads still succeed, on new connections.
        assert found(both, org, job_id()).jobs == []
    finally:
        running.sql("s2", "DROP FUNCTION windrow.be_a_standby() CASCADE")
    enqueue(both, org)


# ── A shard that is not what the cluster file says ───────────────────────────────────────────────────────────────────


def test_swapped_shards_are_refused_and_the_right_one_works(postgres: Server, tmp_path: Path) -> None:
    dsns = {shard: postgres.create(f"swapped_{shard}") for shard in ("s1", "s2", "s3")}
    with running_routers(write_cluster(tmp_path / "right.toml", dsns)) as routers, stubs(routers.address) as both:
        right = Running(dsns=dsns, routers=routers, stubs=both)
        orgs = {shard: right.org_on(shard) for shard in dsns}
    swapped = {"s1": dsns["s1"], "s2": dsns["s3"], "s3": dsns["s2"]}
    with running_routers(write_cluster(tmp_path / "wrong.toml", swapped)) as routers, stubs(routers.address) as both:
        enqueue(both, orgs["s1"])
        for shard, other in (("s2", "s3"), ("s3", "s2")):
            error = refusal(lambda shard=shard: enqueue(both, orgs[shard]))  # type: ignore[misc]
            assert_unavailable(error)
            assert f"leads to the database of shard {other!r} of cluster 'tests'" in (error.details() or "")
        told = both.cluster.ListShards(cluster_pb2.ListShardsRequest(), timeout=PATIENCE_S).shards
        assert [shard.reachable for shard in told] == [True, False, False]
        assert "correct the dsn or the names in the cluster file" in routers.log.read_text()
    for shard in ("s2", "s3"):
        assert right.sql(shard, "SELECT count(*) FROM windrow.job") == [(0,)]


def test_a_shard_that_fails_in_an_unforeseen_way_hurts_no_other(postgres: Server, tmp_path: Path) -> None:
    dsns = {shard: postgres.create(f"unforeseen_{shard}") for shard in ("s1", "s2")}
    config = write_cluster(tmp_path / "cluster.toml", dsns)
    with running_routers(config) as routers, stubs(routers.address) as both:
        running = Running(dsns=dsns, routers=routers, stubs=both)
        near, far = running.org_on("s1"), running.org_on("s2")
    running.sql("s2", "ALTER TABLE windrow.identity RENAME TO lost")
    with running_routers(config) as routers, stubs(routers.address) as both:
        enqueue(both, near)
        assert_unavailable(refusal(lambda: enqueue(both, far)))
        running.sql("s2", "ALTER TABLE windrow.lost RENAME TO identity")
        until(lambda: succeeds(lambda: enqueue(both, far)), "the mended shard is used")


def test_a_shard_that_cannot_be_reached_says_why(running: Running, postgres: Server, tmp_path: Path) -> None:
    dsns = {"s1": running.dsns["s1"], "s2": postgres.dsn("no_such_database")}
    with running_routers(write_cluster(tmp_path / "c.toml", dsns)) as routers, stubs(routers.address) as both:
        _, away = both.cluster.ListShards(cluster_pb2.ListShardsRequest(), timeout=PATIENCE_S).shards
        assert 'database "no_such_database" does not exist' in away.error
        assert 'database "no_such_database" does not exist' in routers.log.read_text()


def test_a_catalog_of_another_cluster_is_refused_for_good(
    databases: dict[str, str], running: Running, tmp_path: Path
) -> None:
    del running
    config = write_cluster(tmp_path / "cluster.toml", databases, name="other")
    log = tmp_path / "router.log"
    with spawned_routers(config, log, listen="127.0.0.1:0") as supervisor:
        assert supervisor.wait(PATIENCE_S) == 1
        assert first_line(supervisor) == ""
    assert "the catalog of cluster 'tests', and this is 'other'; correct the cluster file" in log.read_text()


def test_a_cluster_file_whose_first_shard_changed_founds_no_second_catalog(postgres: Server, tmp_path: Path) -> None:
    dsns = {shard: postgres.create(f"first_{shard}", template=EMPTY) for shard in ("s2", "s1")}
    with running_routers(write_cluster(tmp_path / "before.toml", {"s1": dsns["s1"]})):
        pass
    # Without [catalog] the catalog is in the first shard's database.
    log = tmp_path / "router.log"
    with spawned_routers(write_cluster(tmp_path / "after.toml", dsns), log, listen="127.0.0.1:0") as supervisor:
        assert supervisor.wait(PATIENCE_S) == 1
        assert first_line(supervisor) == ""
    assert "shard 's1' has slots of a catalog elsewhere: name it by [catalog] dsn" in log.read_text()
    with psycopg.connect(dsns["s2"]) as connection:
        assert connection.execute("SELECT to_regnamespace('windrow')").fetchall() == [(None,)], "it was only looked at"
    named = write_cluster(tmp_path / "named.toml", dsns, catalog_dsn=dsns["s1"])
    with running_routers(named) as routers, stubs(routers.address) as both:
        enqueue(both, "org")


# ── How processes start and stop ─────────────────────────────────────────────────────────────────────────────────────


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


def test_every_process_of_a_port_serves(running: Running) -> None:
    with running_routers(running.routers.config, processes=2) as routers, contextlib.ExitStack() as stack:
        # The kernel distributes connections over the processes. In about one of 10^12 runs, all 40 connections go to
        # the same process.
        for _ in range(40):
            enqueue(stack.enter_context(stubs(routers.address)), "org-1")
        assert len(routers.pids) == 2
        for pid in routers.pids:
            assert [
                one
                for one in psutil.Process(pid).net_connections("tcp")
                if one.status == psutil.CONN_ESTABLISHED and one.laddr[1] == port_of(routers.address)
            ]


def test_a_second_supervisor_on_a_taken_port_is_refused(running: Running, tmp_path: Path) -> None:
    log = tmp_path / "second.log"
    with spawned_routers(running.routers.config, log, listen=running.routers.address) as second:
        assert second.wait(PATIENCE_S) == 1
    assert f"cannot listen on {running.routers.address}: Address already in use; stop what" in log.read_text()
    enqueue(running.stubs, "org-1")


def test_a_killed_process_is_replaced_and_the_others_serve(running: Running) -> None:
    with running_routers(running.routers.config, processes=2) as routers:
        before = set(routers.pids)
        victim = min(before)
        with ending([victim]):
            os.kill(victim, signal.SIGKILL)
        with stubs(routers.address) as both:
            enqueue(both, "org-1")
        until(lambda: len(set(routers.pids) - before) == 1, "another process has been started")
        (new,) = set(routers.pids) - before
        until(
            lambda: [one for one in psutil.Process(new).net_connections("tcp") if one.status == psutil.CONN_LISTEN],
            "the new process listens",
        )


async def test_a_process_that_cannot_be_started_again_is_tried_again_and_the_other_serves(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    listening, stop = asyncio.get_running_loop().create_future(), asyncio.Event()
    supervisor = Supervisor(running.routers.config, listen="127.0.0.1:0", processes=2, drain_seconds=5)
    supervising = asyncio.create_task(supervisor.run(ready=listening.set_result, stop=stop))
    try:
        await asyncio.wait_for(listening, PATIENCE_S)
        before = set(supervisor.pids)
        start, refusals = asyncio.create_subprocess_exec, itertools.count()

        async def refuse_once(*command: Any, **options: Any) -> Any:
            if next(refusals) == 0:
                raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
            return await start(*command, **options)

        monkeypatch.setattr(asyncio, "create_subprocess_exec", refuse_once)
        os.kill(min(before), signal.SIGKILL)
        async with asyncio.timeout(PATIENCE_S):
            while len(set(supervisor.pids) - before) < 1:
                assert not supervising.done()
                await asyncio.sleep(0.02)
        assert max(before) in supervisor.pids
    finally:
        stop.set()
        await supervising


def test_processes_end_with_their_supervisor(running: Running) -> None:
    with running_routers(running.routers.config, processes=2) as routers:
        assert len(routers.pids) == 2
        with ending(routers.pids):
            routers.supervisor.kill()
    with pytest.raises(psycopg.OperationalError):
        psycopg.connect(f"host=127.0.0.1 port={port_of(routers.address)} connect_timeout=2 dbname=x user=x")


def test_a_drain_lets_calls_in_flight_end_and_takes_no_new_ones(running: Running) -> None:
    org, job = running.org_on("s1"), new_job()
    enqueue(running.stubs, org)
    with running_routers(running.routers.config) as routers, stubs(routers.address) as both:
        (live,) = enqueue(both, org)
        request = queue_pb2.WaitJobRequest(org=org, id=live.id, wait=Duration(seconds=60))
        waiting_job = both.queue.WaitJob.future(request, timeout=2 * PATIENCE_S)
        with locked_jobs(running.dsns["s1"]) as waiting:
            call = both.queue.Enqueue.future(queue_pb2.EnqueueRequest(org=org, jobs=[job]), timeout=PATIENCE_S)
            until(lambda: waiting() == 1, "the call is in flight")
            routers.supervisor.terminate()
            until(lambda: not accepts_connections(routers.address), "the port is closed")
            for refused in (
                lambda: both.queue.Dequeue(queue_pb2.DequeueRequest(org=org, queues=[QUEUE]), timeout=PATIENCE_S),
                lambda: list(both.cluster.CheckShard(cluster_pb2.CheckShardRequest(shard="s1"), timeout=PATIENCE_S)),
            ):
                # For a short time after the stop, a client may still begin calls on a connection that has calls in
                # flight.
                until(functools.partial(is_refused, refused), "the call is refused")
            assert not call.done()
        assert call.result(PATIENCE_S).results[0].id == job.id
        # The call that waits for the end of a job is answered before its wait is over.
        assert waiting_job.result(PATIENCE_S).job.state == job_pb2.JOB_STATE_READY
        assert routers.supervisor.wait(PATIENCE_S) == 0
    assert found(running.stubs, org, job.id).not_found_ids == []


def is_refused(call: Callable[[], object]) -> bool:
    try:
        call()
    except grpc.RpcError as error:
        return error.code() is grpc.StatusCode.UNAVAILABLE
    return False


def accepts_connections(address: str) -> bool:
    return any(
        one.status == psutil.CONN_LISTEN and one.laddr and one.laddr.port == port_of(address)
        for one in psutil.net_connections("tcp")
    )


def test_health_is_serving_until_the_drain_which_no_watcher_holds_up(running: Running, tmp_path: Path) -> None:
    services = ("", "windrow.v1.Queue", "windrow.v1.Admin", "windrow.v1.Cluster")
    config = write_cluster(tmp_path / "cluster.toml", running.dsns, drain_seconds=LONG_S)
    with running_routers(config) as routers, stubs(routers.address) as both:
        health: Any = health_pb2_grpc.HealthStub(both.channel)
        for service in services:
            request = health_pb2.HealthCheckRequest(service=service)
            assert health.Check(request, timeout=PATIENCE_S).status == health_pb2.HealthCheckResponse.SERVING
        watches = [health.Watch(health_pb2.HealthCheckRequest(service=service)) for service in services]
        for watch in watches:
            assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        watches.append(health.Watch(health_pb2.HealthCheckRequest(service="no.such.Service")))
        assert next(watches[-1]).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        routers.supervisor.terminate()
        for watch in watches:
            assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
        # If the drain waited for the watchers, the supervisor would not end within this wait.
        assert routers.supervisor.wait(PATIENCE_S) == 0


def test_a_drain_ends_while_a_shard_is_away(breakable: Running, servers: Clusters, tmp_path: Path) -> None:
    config = write_cluster(tmp_path / "cluster.toml", breakable.dsns, drain_seconds=LONG_S)
    with running_routers(config) as routers, stubs(routers.address) as both:
        far = breakable.org_on("s2")
        kill(servers["s2"])
        try:
            assert_unavailable(refusal(lambda: enqueue(both, far)))
            routers.supervisor.terminate()
            assert routers.supervisor.wait(PATIENCE_S) == 0
        finally:
            servers["s2"].start()


def test_a_router_starts_without_a_shard_and_takes_it_in_when_it_comes(breakable: Running, servers: Clusters) -> None:
    near, far = breakable.org_on("s1"), breakable.org_on("s2")
    kill(servers["s2"])
    try:
        with running_routers(breakable.routers.config) as routers, stubs(routers.address) as both:
            enqueue(both, near)
            assert_unavailable(refusal(lambda: enqueue(both, far)))
            servers["s2"].start()
            until(lambda: succeeds(lambda: enqueue(both, far)), "the shard that came is used")
    finally:
        servers["s2"].start()


def test_a_lease_that_ended_is_stale_over_the_wire(running: Running) -> None:
    org, both = running.org_on("s1"), running.stubs
    enqueue(both, org)
    (first,) = dequeue(both, org)
    release = queue_pb2.ReleaseRequest(org=org, leases=[first.lease])
    assert list(both.queue.Release(release, timeout=PATIENCE_S).answers) == [OK]
    (second,) = dequeue(both, org)
    nack = queue_pb2.NackRequest(org=org, nacks=[queue_pb2.Nack(lease=first.lease, retry_after=Duration())])
    assert list(both.queue.Nack(nack, timeout=PATIENCE_S).answers) == [STALE]
    assert list(both.queue.Release(release, timeout=PATIENCE_S).answers) == [OK]
    ack = queue_pb2.AckRequest(org=org, acks=[queue_pb2.Ack(lease=one.lease) for one in (first, second)])
    assert list(both.queue.Ack(ack, timeout=PATIENCE_S).answers) == [STALE, OK]


def test_a_router_that_stops_says_so_and_writes_no_traceback(tmp_path: Path, fresh_dsn: str) -> None:
    with running_routers(write_cluster(tmp_path / "cluster.toml", {"s1": fresh_dsn})) as routers:
        pass
    said = routers.log.read_text()
    assert "draining: calls in flight have" in said
    assert "Traceback" not in said


def test_a_shard_whose_server_is_a_standby_is_not_called_reachable(empty_dsn: str, tmp_path: Path) -> None:
    with Cluster("left", ephemeral=True) as primary, Cluster("right", ephemeral=True, standby_of=primary) as standby:
        both = make_conninfo(primary.dsn, host=f"{HOST},{HOST}", port=f"{primary.port},{standby.port}")
        config = write_cluster(tmp_path / "cluster.toml", {SHARD: both}, catalog_dsn=empty_dsn)
        with running_routers(config) as routers, stubs(routers.address) as calls:

            def look() -> cluster_pb2.ShardInfo:
                (shard,) = calls.cluster.ListShards(cluster_pb2.ListShardsRequest(), timeout=PATIENCE_S).shards
                return shard

            until(lambda: look().reachable, "the primary answers")
            # The DSN has no `target_session_attrs`, so the router connects to the standby.
            primary.kill()
            until(lambda: "its server is a standby" in look().error, "the standby answers")
            assert not look().reachable
