"""Finished and dead jobs are stored again as new jobs, which name the old jobs. A repeat with the same new ids stores
nothing."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from shard.history import days
from shard.postgres.pool import Database
from shard.vocabulary import JobId, OrgId, ShardName
from tests.jobs import job_id, job_message
from tests.moves import begin_move
from tests.postgres import Server
from tests.routers import PATIENCE_S, Stubs, running_routers, stubs, violated_fields, write_cluster
from tests.timemachine import age_finished
from windrow.v1 import admin_pb2, job_pb2, queue_pb2

QUEUE = "mail"
NOT_FOUND = admin_pb2.RESTORE_REFUSAL_NOT_FOUND
LIVE, NEW_ID = admin_pb2.RESTORE_REFUSAL_LIVE, admin_pb2.RESTORE_REFUSAL_BAD_NEW_ID
_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    dsns: Mapping[str, str]
    stubs: Stubs

    def org(self) -> str:
        """Returns a new org that lives on s1."""
        for _ in range(1000):
            org = f"org-r{next(_numbers)}"
            request = admin_pb2.CreateQueueRequest(org=org, queue=QUEUE, config=admin_pb2.QueueConfig(max_attempts=7))
            if self.stubs.admin.CreateQueue(request, timeout=PATIENCE_S).queue.shard == "s1":
                return org
        raise AssertionError("no org in a thousand lives on shard s1")

    def enqueue(self, org: str, *jobs: job_pb2.NewJob) -> None:
        self.stubs.queue.Enqueue(queue_pb2.EnqueueRequest(org=org, jobs=jobs), timeout=PATIENCE_S)

    def dequeue(self, org: str) -> Sequence[job_pb2.LeasedJob]:
        request = queue_pb2.DequeueRequest(org=org, queues=[QUEUE], max_jobs=100)
        return self.stubs.queue.Dequeue(request, timeout=PATIENCE_S).jobs

    def finish(self, org: str, *jobs: job_pb2.NewJob) -> None:
        self.enqueue(org, *jobs)
        left = len(jobs)
        while left:
            # One call may return fewer jobs than are ready, because a claim has its own limit.
            leased = self.dequeue(org)
            acks = [queue_pb2.Ack(lease=job.lease, result=b"done") for job in leased]
            self.stubs.queue.Ack(queue_pb2.AckRequest(org=org, acks=acks), timeout=PATIENCE_S)
            left -= len(leased)

    def kill(self, org: str, *jobs: job_pb2.NewJob) -> None:
        self.enqueue(org, *jobs)
        nacks = [
            queue_pb2.Nack(lease=job.lease, failure=job_pb2.Failure(message="no", permanent=True))
            for job in self.dequeue(org)
        ]
        self.stubs.queue.Nack(queue_pb2.NackRequest(org=org, nacks=nacks), timeout=PATIENCE_S)

    def get(self, org: str, name: str) -> job_pb2.Job:
        request = queue_pb2.GetJobsRequest(org=org, ids=[name], include_payload=True)
        (job,) = self.stubs.queue.GetJobs(request, timeout=PATIENCE_S).jobs
        return job

    def restore(self, org: str, *jobs: tuple[str, str]) -> list[admin_pb2.RestoreResult]:
        wanted = [admin_pb2.RestoreJob(id=old, new_id=new) for old, new in jobs]
        request = admin_pb2.RestoreJobsRequest(org=org, jobs=wanted)
        return list(self.stubs.admin.RestoreJobs(request, timeout=PATIENCE_S).results)


@pytest.fixture(scope="module")
def cluster(postgres: Server, tmp_path_factory: pytest.TempPathFactory) -> Generator[Cluster, None, None]:
    dsns = {shard: postgres.create(f"restoring_{shard}") for shard in ("s1", "s2")}
    config = write_cluster(tmp_path_factory.mktemp("restoring") / "cluster.toml", dsns)
    with running_routers(config) as routers, stubs(routers.address) as both:
        yield Cluster(dsns=dsns, stubs=both)
    for shard in dsns:
        postgres.drop(f"restoring_{shard}")


def new_job(**fields: object) -> job_pb2.NewJob:
    whole: dict[str, object] = {"id": job_id(), "queue": QUEUE, "kind": "greet", **fields}
    return job_message(**whole)


def result(job: str, *, duplicate: bool = False) -> admin_pb2.RestoreResult:
    return admin_pb2.RestoreResult(restored=admin_pb2.RestoredJob(id=job, duplicate=duplicate))


def refused(why: admin_pb2.RestoreRefusal.ValueType) -> admin_pb2.RestoreResult:
    return admin_pb2.RestoreResult(refusal=why)


def test_what_cannot_be_restored_is_told_one_by_one_and_the_rest_is(cluster: Cluster) -> None:
    org, other = cluster.org(), cluster.org()
    ended, live, theirs = new_job(), new_job(delay=Duration(seconds=3600)), new_job()
    cluster.finish(org, ended)
    cluster.enqueue(org, live)
    cluster.finish(other, theirs)
    new, old, far = job_id(), job_id(ahead_ms=-8 * 86_400_000), job_id(ahead_ms=2 * 3_600_000)
    results = cluster.restore(
        org, (job_id(), ""), (ended.id, old), (live.id, ""), (theirs.id, ""), (ended.id, new), (ended.id, far)
    )
    assert results == [*map(refused, (NOT_FOUND, NEW_ID, LIVE, NOT_FOUND)), result(new), refused(NEW_ID)]
    assert [job.id for job in cluster.dequeue(org)] == [new]


@pytest.mark.parametrize("end", ["finish", "kill"])
def test_a_restored_job_is_as_the_old_one_was_and_says_which_that_is(cluster: Cluster, end: str) -> None:
    org = cluster.org()
    old = new_job(
        payload=b"\0\xff",
        attributes={"plan": "pro", "windrow.restored_from": "another"},
        priority=3,
        max_attempts=2,
        retry={"fixed": {"delay": Duration(seconds=9)}},
        dedup_key="k",
        expires_at=Timestamp(seconds=int(time.time()) + 3600),
    )
    getattr(cluster, end)(org, old)
    before = cluster.get(org, old.id)
    (restored,) = cluster.restore(org, (old.id, ""))
    job = cluster.get(org, restored.restored.id)
    for field in ("queue", "kind", "payload", "priority", "max_attempts", "retry"):
        assert getattr(job, field) == getattr(before, field), field
    assert dict(job.attributes) == {"plan": "pro", "windrow.restored_from": old.id}
    assert (job.state, job.attempt, len(job.attempts), job.dedup_key) == (job_pb2.JOB_STATE_READY, 0, 0, "")
    assert (job.HasField("expires_at"), job.result, job.reason) == (False, b"", "")
    # The old job has not changed.
    assert cluster.get(org, old.id) == before


def test_what_its_queue_said_it_goes_on_saying(cluster: Cluster) -> None:
    org, old = cluster.org(), new_job()
    cluster.finish(org, old)
    (restored,) = cluster.restore(org, (old.id, ""))
    assert cluster.get(org, restored.restored.id).max_attempts == 7
    config = admin_pb2.QueueConfig(max_attempts=8)
    cluster.stubs.admin.UpdateQueue(
        admin_pb2.UpdateQueueRequest(org=org, queue=QUEUE, config=config), timeout=PATIENCE_S
    )
    assert cluster.get(org, restored.restored.id).max_attempts == 8


def test_a_restore_that_is_repeated_stores_nothing_also_when_the_new_job_has_finished(cluster: Cluster) -> None:
    org, old, new = cluster.org(), [new_job(), new_job()], [job_id(), job_id()]
    cluster.finish(org, *old)
    wanted = [(one.id, other) for one, other in zip(old, new, strict=True)]
    assert cluster.restore(org, *wanted[:1]) == [result(new[0])]
    assert cluster.restore(org, *wanted) == [result(new[0], duplicate=True), result(new[1])]
    (first, second) = cluster.dequeue(org)
    acks = [queue_pb2.Ack(lease=job.lease) for job in (first, second)]
    cluster.stubs.queue.Ack(queue_pb2.AckRequest(org=org, acks=acks), timeout=PATIENCE_S)
    assert cluster.restore(org, *wanted) == [result(one, duplicate=True) for one in new]
    assert not cluster.dequeue(org)
    cluster.stubs.books("s1", "s2")


def test_large_jobs_are_restored_however_many_answers_they_take(cluster: Cluster) -> None:
    org, old, new = cluster.org(), [new_job(payload=bytes(1 << 20)) for _ in range(5)], [job_id() for _ in range(5)]
    cluster.finish(org, *old)
    unknown = (job_id(), "")
    wanted = [(one.id, other) for one, other in zip(old, new, strict=True)]
    assert cluster.restore(org, unknown, *wanted) == [refused(NOT_FOUND), *map(result, new)]
    assert all(len(cluster.get(org, one).payload) == 1 << 20 for one in new)


def test_a_cold_job_is_restored_where_its_org_lives_by_now(cluster: Cluster) -> None:
    org = cluster.org()
    cluster.finish(org, new_job(payload=b"cold"), new_job(payload=b"cold"))

    async def age() -> list[JobId]:
        database = Database(ShardName("s1"), cluster.dsns["s1"], connections=1, may_scan=True)
        await database.open()
        try:
            ids = await age_finished(database, OrgId(org), days=9)
            for day in await days.days_over(database):
                await days.turn_cold(database, day)
            return ids
        finally:
            await database.close()

    here, there = asyncio.run(age())
    (restored,) = cluster.restore(org, (here, ""))
    assert (cluster.get(org, restored.restored.id).shard, cluster.get(org, restored.restored.id).payload) == (
        "s1",
        b"cold",
    )
    move = begin_move(cluster.dsns, org, to="s2")
    move.switch()
    (restored,) = cluster.restore(org, (there, ""))
    job = cluster.get(org, restored.restored.id)
    assert (job.shard, job.payload, dict(job.attributes)) == ("s2", b"cold", {"windrow.restored_from": there})
    move.finish()
    (again,) = cluster.restore(org, (there, ""))
    assert cluster.get(org, again.restored.id).shard == "s2"
    assert cluster.get(org, there).shard == "s1"
    cluster.stubs.books("s1", "s2")


def test_a_new_id_that_another_job_has_is_refused(cluster: Cluster) -> None:
    one, other = job_id(), job_id()
    with pytest.raises(grpc.RpcError) as error:
        cluster.restore("nobody", (one, other), (one, one), (one, other))
    assert violated_fields(error.value) == ["jobs[1].new_id", "jobs[2].new_id"]
