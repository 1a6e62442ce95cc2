"""Clients notice nothing while their org's slot moves from one shard to another. The routers are processes that learn
of moves by themselves. There is no balancer: the tests take each step of a move
(docs/decisions/0017-moving-slots.md)."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import psycopg
import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp
from google.rpc import error_details_pb2

import windrow
from tests.jobs import job_id, job_message
from tests.moves import Moving, Shards, begin_move, begin_move_of, open_shards, pin
from tests.postgres import Server
from tests.routers import (
    PATIENCE_S,
    Routers,
    Stubs,
    detail,
    running_routers,
    stubs,
    until,
    violated_fields,
    write_cluster,
)
from windrow.v1 import admin_pb2, job_pb2, queue_pb2, schedules_pb2, workflows_pb2

QUEUE = "mail"
OK, STALE, NOT_FOUND = job_pb2.JOB_ANSWER_OK, job_pb2.JOB_ANSWER_STALE, job_pb2.JOB_ANSWER_NOT_FOUND
_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Two shards, and two sets of routers that learn of moves independently."""

    dsns: Mapping[str, str]
    routers: Routers
    near: Stubs
    far: Stubs
    shards: Shards

    def org(self) -> str:
        """Returns a new org that lives on s1."""
        for _ in range(1000):
            org = f"org-m{next(_numbers)}"
            made = self.near.admin.CreateQueue(admin_pb2.CreateQueueRequest(org=org, queue=QUEUE), timeout=PATIENCE_S)
            if made.queue.shard == "s1":
                return org
        raise AssertionError("no org in a thousand lives on shard s1")

    def begin(self, org: str, *, to: str = "s2") -> Moving:
        return begin_move_of(self.shards, org, to=to)

    def sql(self, shard: str, statement: str, *parameters: object) -> None:
        with psycopg.connect(self.dsns[shard], autocommit=True) as connection:
            connection.execute(statement.encode(), parameters)


@pytest.fixture(scope="module")
def cluster(postgres: Server, tmp_path_factory: pytest.TempPathFactory) -> Generator[Cluster, None, None]:
    dsns = {shard: postgres.create(f"calls_{shard}") for shard in ("s1", "s2", "s3")}
    config = write_cluster(tmp_path_factory.mktemp("calls") / "cluster.toml", dsns)
    with (
        running_routers(config) as one,
        running_routers(config) as other,
        stubs(one.address) as near,
        stubs(other.address) as far,
        open_shards(dsns) as shards,
    ):
        yield Cluster(dsns=dsns, routers=one, near=near, far=far, shards=shards)
    for shard in dsns:
        postgres.drop(f"calls_{shard}")


@pytest.fixture
def thread() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as threads:
        yield threads


def new_job(**fields: object) -> job_pb2.NewJob:
    whole: dict[str, object] = {"id": job_id(), "queue": QUEUE, "kind": "greet", **fields}
    return job_message(**whole)


def enqueue(both: Stubs, org: str, *jobs: job_pb2.NewJob) -> list[tuple[str, bool]]:
    request = queue_pb2.EnqueueRequest(org=org, jobs=jobs or [new_job()])
    return [(one.id, one.duplicate) for one in both.queue.Enqueue(request, timeout=PATIENCE_S).results]


def dequeue(
    both: Stubs, org: str, *, max_jobs: int = 100, wait_s: int = 0, window_s: int = 0
) -> Sequence[job_pb2.LeasedJob]:
    request = queue_pb2.DequeueRequest(org=org, queues=[QUEUE], max_jobs=max_jobs)
    if wait_s:
        request.wait.CopyFrom(Duration(seconds=wait_s))
    if window_s:
        request.visibility_window.CopyFrom(Duration(seconds=window_s))
    return both.queue.Dequeue(request, timeout=PATIENCE_S).jobs


def ack(both: Stubs, org: str, *leases: bytes) -> list[job_pb2.JobAnswer.ValueType]:
    request = queue_pb2.AckRequest(org=org, acks=[queue_pb2.Ack(lease=lease) for lease in leases])
    return list(both.queue.Ack(request, timeout=PATIENCE_S).answers)


def cancel(both: Stubs, org: str, *ids: str) -> list[job_pb2.JobAnswer.ValueType]:
    return list(both.queue.CancelJobs(queue_pb2.CancelJobsRequest(org=org, ids=ids), timeout=PATIENCE_S).answers)


def states(both: Stubs, org: str, *ids: str) -> list[str]:
    """Returns the state and the shard of each job."""
    answer = both.queue.GetJobs(queue_pb2.GetJobsRequest(org=org, ids=ids), timeout=PATIENCE_S)
    assert not answer.unavailable_shards
    there = {
        job.id: f"{job_pb2.JobState.Name(job.state).removeprefix('JOB_STATE_')} {job.shard}" for job in answer.jobs
    }
    assert sorted([*there, *answer.not_found_ids]) == sorted(ids)
    return [there.get(one, "unknown") for one in ids]


def refused(call: Callable[[], object]) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as error:
        call()
    return error.value


# ── Producers ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_an_enqueue_between_close_and_switch_waits_and_is_stored(cluster: Cluster, thread: ThreadPoolExecutor) -> None:
    org, job = cluster.org(), new_job()
    move = cluster.begin(org)
    move.close()
    stored: Future[list[tuple[str, bool]]] = thread.submit(enqueue, cluster.near, org, job)
    move.open()
    assert not stored.done()
    move.switch()
    assert stored.result(PATIENCE_S) == [(job.id, False)]
    assert states(cluster.near, org, job.id) == ["READY s2"]
    move.finish()


def test_when_no_shard_accepts_jobs_for_long_a_producer_gets_a_retry_delay(cluster: Cluster) -> None:
    org = cluster.org()
    move = cluster.begin(org)
    move.close()
    error = refused(lambda: enqueue(cluster.near, org))
    assert error.code() == grpc.StatusCode.UNAVAILABLE
    assert "is draining there" in (error.details() or "")
    info, retry = detail(error, error_details_pb2.ErrorInfo), detail(error, error_details_pb2.RetryInfo)
    assert info is not None
    assert info.reason == "PLACEMENT_CHANGING"
    assert retry is not None
    move.finish()
    assert [duplicate for _, duplicate in enqueue(cluster.near, org)] == [False]


def test_a_router_frozen_before_a_move_and_woken_after_it_stores_nothing_twice_and_refuses_nothing(
    cluster: Cluster, thread: ThreadPoolExecutor
) -> None:
    org = cluster.org()
    waiting, finished, keyed = new_job(), new_job(), new_job(dedup_key="k")
    enqueue(cluster.near, org, finished)
    (leased,) = dequeue(cluster.near, org)
    assert ack(cluster.near, org, leased.lease) == [OK]
    enqueue(cluster.near, org, waiting, keyed)
    (pid,) = cluster.routers.pids
    os.kill(pid, signal.SIGSTOP)
    try:
        new, again = new_job(), new_job(dedup_key="k")
        # These calls reach the router while the router is frozen. When the router runs again, it handles these calls
        # first.
        calls = [thread.submit(enqueue, cluster.near, org, job) for job in (new, waiting, finished, again)]
        cluster.begin(org).finish()
    finally:
        os.kill(pid, signal.SIGCONT)
    results = [call.result(PATIENCE_S) for call in calls]
    assert results == [[(new.id, False)], [(waiting.id, True)], [(finished.id, True)], [(keyed.id, True)]]
    assert states(cluster.near, org, new.id, waiting.id, finished.id, keyed.id) == [
        "READY s2",
        "READY s2",
        "SUCCEEDED s1",
        "READY s2",
    ]
    cluster.near.books("s1", "s2")


@pytest.mark.parametrize("step", ["begin", "close", "open", "switch", "depart", "take", "finish"])
def test_what_was_stored_before_is_known_at_every_step(cluster: Cluster, thread: ThreadPoolExecutor, step: str) -> None:
    org = cluster.org()
    scheduled = new_job(delay=Duration(seconds=3600))
    ready, keyed, finished = new_job(), new_job(dedup_key="k"), new_job()
    live = new_job(dedup_key="k", dedup_while_live=True)
    enqueue(cluster.near, org, finished)
    (leased,) = dequeue(cluster.near, org)
    ack(cluster.near, org, leased.lease)
    enqueue(cluster.near, org, scheduled, ready, keyed, live)
    move = cluster.begin(org)
    go_on(move, until_=step)
    for both in (cluster.near, cluster.far):
        jobs = (finished, scheduled, ready, new_job(dedup_key="k"), new_job(dedup_key="k", dedup_while_live=True))
        call = thread.submit(enqueue, both, org, *jobs)
        looked = states(both, org, finished.id, scheduled.id, ready.id, keyed.id)
        assert [state.split()[0] for state in looked] == ["SUCCEEDED", "SCHEDULED", "READY", "READY"]
        if step in ("close", "open"):
            move.switch()
        assert call.result(PATIENCE_S) == [(job.id, True) for job in (finished, scheduled, ready, keyed, live)]
    move.finish()
    assert states(cluster.near, org, finished.id, scheduled.id, ready.id, keyed.id) == [
        "SUCCEEDED s1",
        "SCHEDULED s2",
        "READY s2",
        "READY s2",
    ]
    cluster.near.books("s1", "s2")


def go_on(move: Moving, *, until_: str) -> None:
    if until_ in ("depart", "take"):
        move.switch()
        move.depart()
        if until_ == "take":
            move.take()
    elif until_ != "begin":
        getattr(move, until_)()


def test_of_a_batch_that_a_former_owner_knows_in_part_the_right_jobs_are_refused(cluster: Cluster) -> None:
    org, known, good = cluster.org(), new_job(), new_job()
    old = new_job(id=job_id(ahead_ms=-30 * 86_400_000))
    enqueue(cluster.near, org, known)
    (leased,) = dequeue(cluster.near, org)
    ack(cluster.near, org, leased.lease)
    cluster.begin(org).finish()
    request = queue_pb2.EnqueueRequest(org=org, jobs=[known, good, old])
    error = refused(lambda: cluster.near.queue.Enqueue(request, timeout=PATIENCE_S))
    assert violated_fields(error) == ["jobs[2].id"]
    request.independent = True
    results = cluster.near.queue.Enqueue(request, timeout=PATIENCE_S).results
    assert [(one.id, one.duplicate, bool(one.error.code)) for one in results] == [
        (known.id, True, False),
        (good.id, False, False),
        ("", False, True),
    ]


def test_an_org_that_moves_there_and_back_keeps_all_that_it_knew(cluster: Cluster) -> None:
    org, first, second = cluster.org(), new_job(dedup_key="1"), new_job(dedup_key="2")
    enqueue(cluster.near, org, first)
    (leased,) = dequeue(cluster.near, org)
    ack(cluster.near, org, leased.lease)
    cluster.begin(org).finish()
    enqueue(cluster.near, org, second)
    (leased,) = dequeue(cluster.near, org)
    ack(cluster.near, org, leased.lease)
    cluster.begin(org, to="s1").finish()
    again = [first, second, new_job(dedup_key="1"), new_job(dedup_key="2")]
    for both in (cluster.near, cluster.far):
        assert enqueue(both, org, *again) == [(job.id, True) for job in (first, second, first, second)]
        assert states(both, org, first.id, second.id) == ["SUCCEEDED s1", "SUCCEEDED s2"]


def end_windows(cluster: Cluster, shard: str, *jobs: job_pb2.NewJob) -> None:
    """Ends the windows of these jobs' dedup keys on this shard."""
    for job in jobs:
        cluster.sql(shard, "UPDATE windrow.dedup SET until = now() WHERE job_id = %s::uuid", job.id)


def finish(both: Stubs, org: str) -> None:
    """Leases and acks all ready jobs of the org."""
    leased = dequeue(both, org)
    assert set(ack(both, org, *[job.lease for job in leased])) == {OK}


@pytest.mark.parametrize("path", ["s1 s2 s1", "s1 s2 s3", "s2 s1 s3", "s1 s2 s3 s1"])
@pytest.mark.parametrize("state", ["live", "finished"])
def test_a_job_sent_again_is_itself_also_where_another_job_has_its_key_on_another_shard(
    cluster: Cluster, state: str, path: str
) -> None:
    """The window of the job's key ends on the first shard. Another job takes the key on the second shard, and then the
    org moves to the next shard."""
    org, old = cluster.org(), new_job(dedup_key="k")
    first, second, *others = path.split()
    if first != "s1":
        cluster.begin(org, to=first).finish()
    enqueue(cluster.near, org, old)
    if state == "finished":
        finish(cluster.near, org)
    end_windows(cluster, first, old)
    cluster.begin(org, to=second).finish()
    new = new_job(dedup_key="k")
    assert enqueue(cluster.near, org, new) == [(new.id, False)]
    for target in others:
        cluster.begin(org, to=target).finish()
    for both in (cluster.near, cluster.far):
        jobs = (new_job(dedup_key="k"), old, new, new_job())
        assert enqueue(both, org, *jobs) == [(new.id, True), (old.id, True), (new.id, True), (jobs[3].id, False)]
    cluster.near.books("s1", "s2", "s3")


@pytest.mark.parametrize("step", ["begin", "close", "open", "switch", "depart", "take", "finish"])
def test_a_job_sent_again_is_itself_at_every_step_of_a_move_where_another_job_has_its_key(
    cluster: Cluster, thread: ThreadPoolExecutor, step: str
) -> None:
    org, live, finished = cluster.org(), new_job(dedup_key="1"), new_job(dedup_key="2")
    enqueue(cluster.near, org, finished)
    finish(cluster.near, org)
    enqueue(cluster.near, org, live)
    end_windows(cluster, "s1", live, finished)
    cluster.begin(org, to="s2").finish()
    one, two = new_job(dedup_key="1"), new_job(dedup_key="2")
    assert enqueue(cluster.near, org, one, two) == [(one.id, False), (two.id, False)]
    move = cluster.begin(org, to="s3")
    go_on(move, until_=step)
    for both in (cluster.near, cluster.far):
        call = thread.submit(enqueue, both, org, live, finished, new_job(dedup_key="1"), new_job(dedup_key="2"))
        if step in ("close", "open"):
            move.switch()
        assert call.result(PATIENCE_S) == [(job.id, True) for job in (live, finished, one, two)]
    move.finish()


def test_an_id_that_a_former_owner_knows_takes_no_key_of_the_writer(cluster: Cluster) -> None:
    org, live, finished = cluster.org(), new_job(), new_job()
    enqueue(cluster.near, org, finished)
    finish(cluster.near, org)
    enqueue(cluster.near, org, live)
    cluster.begin(org).finish()
    again = [new_job(id=live.id, dedup_key="1"), new_job(id=finished.id, dedup_key="2")]
    new = [new_job(dedup_key="1"), new_job(dedup_key="2")]
    assert enqueue(cluster.near, org, *again, *new) == [
        *((job.id, True) for job in again),
        *((job.id, False) for job in new),
    ]


def test_a_key_that_counts_while_its_job_is_live_is_taken_for_as_long_as_the_job_is_leased_where_the_slot_was(
    cluster: Cluster,
) -> None:
    org, live, finished = cluster.org(), new_job(dedup_key="k", dedup_while_live=True), new_job()
    enqueue(cluster.near, org, finished)
    finish(cluster.near, org)
    enqueue(cluster.near, org, live)
    (leased,) = dequeue(cluster.near, org, window_s=3600)
    move = cluster.begin(org)
    move.switch()
    leave_long_ago(cluster.dsns["s1"], shard="s1", slot=move.slot)
    until(
        lambda: enqueue(cluster.near, org, finished) == [(finished.id, False)],
        "the router does not ask the former owner for ids any more",
    )
    new = new_job(dedup_key="k", dedup_while_live=True)
    assert enqueue(cluster.near, org, new) == [(live.id, True)]
    assert ack(cluster.near, org, leased.lease) == [OK]
    assert enqueue(cluster.near, org, new) == [(new.id, False)]
    move.finish()


def leave_long_ago(catalog: str, *, shard: str, slot: int) -> None:
    """Makes it look as if the slot had left this shard three hours ago."""
    with psycopg.connect(catalog, autocommit=True) as connection:
        connection.execute(
            "UPDATE windrow.former_owner SET left_at = left_at - interval '3 hours' WHERE shard = %s AND slot = %s",
            [shard, slot],
        )
        # Both changes are in one statement. A router that read the catalog between two statements would never learn of
        # the second change.
        connection.execute(
            "WITH next AS (UPDATE windrow.catalog SET epoch = epoch + 1 RETURNING epoch) "
            "UPDATE windrow.placement SET changed = next.epoch FROM next WHERE slot = %s",
            [slot],
        )
        connection.execute("SELECT pg_notify('windrow_catalog', '')")


# ── Consumers ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_job_that_was_due_long_since_is_taken_soon_after_it_has_come(cluster: Cluster) -> None:
    """On the target, the routers have already claimed jobs that fell due later than the jobs that arrive by the
    move."""
    org, old = cluster.org(), [new_job() for _ in range(3)]
    enqueue(cluster.near, org, *old)
    move = cluster.begin(org)
    move.switch()
    for both in (cluster.near, cluster.far):
        enqueue(both, org)
    leased = [job for both in (cluster.near, cluster.far) for job in dequeue(both, org)]
    # Jobs that have not moved yet are delivered too. A released job keeps its old due time.
    assert {job.id for job in leased} >= {job.id for job in old}
    cluster.near.queue.Release(
        queue_pb2.ReleaseRequest(org=org, leases=[job.lease for job in leased]), timeout=PATIENCE_S
    )
    move.finish()
    taken = {job.id for job in dequeue(cluster.far, org)}
    assert taken == {job.id for job in leased}


def test_an_org_on_two_shards_has_its_jobs_in_the_order_of_priority_on_each_of_them(cluster: Cluster) -> None:
    org, before, after = (
        cluster.org(),
        [new_job(priority=one) for one in (9, 5)],
        [new_job(priority=one) for one in (7, 1)],
    )
    enqueue(cluster.near, org, *before)
    cluster.begin(org).switch()
    enqueue(cluster.near, org, *after)
    there, here = ([job.id for job in reversed(jobs)] for jobs in (before, after))
    assert [job.id for job in dequeue(cluster.far, org)] in (there + here, here + there)


def test_a_waiting_consumer_gets_jobs_that_arrive_by_a_move(cluster: Cluster, thread: ThreadPoolExecutor) -> None:
    # The delay is so long that the job becomes due only after the move, even on a slow machine.
    org, job = cluster.org(), new_job(delay=Duration(seconds=5))
    move = cluster.begin(org)
    waiting = thread.submit(dequeue, cluster.near, org, wait_s=60)
    enqueue(cluster.far, org, job)
    move.switch()
    move.depart()
    move.take()
    assert [one.id for one in waiting.result(PATIENCE_S)] == [job.id]
    move.finish()


def test_a_wait_for_the_end_of_a_job_goes_on_where_the_job_has_moved(
    cluster: Cluster, thread: ThreadPoolExecutor
) -> None:
    org, job = cluster.org(), new_job()
    enqueue(cluster.far, org, job)
    move = cluster.begin(org)
    request = queue_pb2.WaitJobRequest(org=org, id=job.id, wait=Duration(seconds=60))
    waiting = thread.submit(cluster.near.queue.WaitJob, request, timeout=2 * PATIENCE_S)
    move.switch()
    move.depart()
    move.take()
    move.finish()
    cancel(cluster.far, org, job.id)
    assert waiting.result(PATIENCE_S).job.state == job_pb2.JOB_STATE_CANCELLED


def test_who_waits_through_a_router_that_slept_while_the_org_was_pinned_and_moved_is_served_where_it_lives(
    cluster: Cluster, thread: ThreadPoolExecutor
) -> None:
    org, job = cluster.org(), new_job()
    (pid,) = cluster.routers.pids
    waiting = thread.submit(dequeue, cluster.near, org, wait_s=60)
    until(lambda: waiting.running(), "a consumer waits")
    os.kill(pid, signal.SIGSTOP)
    try:
        pin(cluster.dsns, org, to="s2")
        begin_move(cluster.dsns, org, to="s2").finish()
    finally:
        os.kill(pid, signal.SIGCONT)
    enqueue(cluster.far, org, job)
    assert [one.id for one in waiting.result(PATIENCE_S)] == [job.id]


def test_leases_outlive_a_move_begun_and_end_where_they_began(cluster: Cluster) -> None:
    org, jobs = cluster.org(), [new_job() for _ in range(4)]
    enqueue(cluster.near, org, *jobs)
    leased = {job.id: job.lease for job in dequeue(cluster.near, org)}
    done, nacked, lost, kept = (leased[job.id] for job in jobs)
    move = cluster.begin(org)
    move.switch()
    assert ack(cluster.far, org, done) == [OK]
    nack = queue_pb2.Nack(lease=nacked, failure=job_pb2.Failure(message="later"), retry_after=Duration(seconds=3600))
    request = queue_pb2.NackRequest(org=org, nacks=[nack])
    assert list(cluster.far.queue.Nack(request, timeout=PATIENCE_S).answers) == [OK]
    # Make it look as if the window of this lease had ended.
    cluster.sql("s1", "UPDATE windrow.job SET visible_at = now() - interval '1 s' WHERE id = %s::uuid", jobs[2].id)
    extend = queue_pb2.ExtendRequest(
        org=org, extends=[queue_pb2.Extend(lease=kept)], visibility_window=Duration(seconds=600)
    )
    assert list(cluster.near.queue.Extend(extend, timeout=PATIENCE_S).answers) == [OK]
    move.depart()
    move.take()
    # These calls come late, or they are repeats because the first answers were lost. The job's history, which moved
    # with the job, says what the first calls did.
    assert list(cluster.near.queue.Nack(request, timeout=PATIENCE_S).answers) == [OK]
    assert ack(cluster.near, org, done, lost) == [OK, STALE]
    assert ack(cluster.far, org, kept) == [OK]
    move.finish()
    assert list(cluster.far.queue.Nack(request, timeout=PATIENCE_S).answers) == [OK]
    assert ack(cluster.near, org, done, lost, kept, nacked) == [OK, STALE, OK, STALE]
    assert [job.id for job in dequeue(cluster.near, org)] == [jobs[2].id]
    cluster.near.books("s1", "s2")


# ── Operators ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_cancel_of_a_job_on_its_way_waits_for_it(cluster: Cluster, thread: ThreadPoolExecutor) -> None:
    org, jobs = cluster.org(), [new_job(), new_job()]
    enqueue(cluster.near, org, *jobs)
    move = cluster.begin(org)
    move.switch()
    move.depart()
    unknown = job_id()
    cancelling = thread.submit(cancel, cluster.near, org, jobs[0].id, unknown, jobs[1].id)
    until(lambda: cancelling.running(), "the cancel is under way")
    move.take()
    assert cancelling.result(PATIENCE_S) == [OK, NOT_FOUND, OK]
    move.finish()
    assert states(cluster.near, org, jobs[0].id, jobs[1].id) == ["CANCELLED s2", "CANCELLED s2"]
    cluster.near.books("s1", "s2")


def test_a_signal_for_a_job_on_its_way_waits_for_it(cluster: Cluster, thread: ThreadPoolExecutor) -> None:
    org, flow = cluster.org(), windrow.Workflow()
    flow.job(QUEUE, "deploy", after=flow.signal("approved", QUEUE, timeout=3600))
    early = flow.signal("early", QUEUE, after="deploy", timeout=3600)
    flow.job(QUEUE, "tell", after=early)
    cluster.near.workflows.StartWorkflow(flow.request(org), timeout=PATIENCE_S)

    def signal(both: Stubs, node: str, payload: bytes) -> bool:
        request = workflows_pb2.SignalNodeRequest(org=org, id=flow.id, node=node, payload=payload)
        return both.workflows.SignalNode(request, timeout=PATIENCE_S).accepted

    move = cluster.begin(org)
    move.switch()
    # The workflow is on s2, and the jobs are on s1.
    assert signal(cluster.near, "early", b"first")
    assert not signal(cluster.far, "early", b"second")
    move.depart()
    signalling = thread.submit(signal, cluster.near, "approved", b"yes")
    until(lambda: signalling.running(), "the signal is under way")
    move.take()
    assert signalling.result(PATIENCE_S)
    move.finish()
    assert not signal(cluster.far, "approved", b"no")
    assert not signal(cluster.far, "early", b"third")
    request = workflows_pb2.ListNodesRequest(org=org, id=flow.id)
    nodes = cluster.near.workflows.ListNodes(request, timeout=PATIENCE_S).nodes
    found = {node.name: workflows_pb2.NodeState.Name(node.state).removeprefix("NODE_STATE_") for node in nodes}
    assert found == {"approved": "SUCCEEDED", "deploy": "RELEASED", "early": "BLOCKED", "tell": "BLOCKED"}
    cluster.near.books("s1", "s2")


def test_the_cancel_of_a_locked_job_of_an_org_that_has_moved_says_what_is_locked(cluster: Cluster) -> None:
    org = cluster.org()
    move = cluster.begin(org)
    move.finish()
    ((one, _),) = enqueue(cluster.near, org)
    with psycopg.connect(cluster.dsns["s2"]) as forgotten:
        forgotten.execute("SELECT FROM windrow.job WHERE id = %s FOR UPDATE", [one])
        error = refused(lambda: cancel(cluster.near, org, one))
        info = detail(error, error_details_pb2.ErrorInfo)
        assert info is not None
        assert info.reason == "ROW_LOCKED"
        assert f"job {one} is locked by another session" in str(error.details())
    assert cancel(cluster.near, org, one) == [OK]


def test_a_pause_during_a_move_holds_on_both_shards_and_so_does_its_end(cluster: Cluster) -> None:
    org = cluster.org()
    enqueue(cluster.near, org)
    move = cluster.begin(org)
    move.switch()
    enqueue(cluster.near, org)
    cluster.near.admin.PauseQueue(admin_pb2.PauseQueueRequest(org=org, queue=QUEUE), timeout=PATIENCE_S)
    assert not dequeue(cluster.far, org)
    answer = cluster.far.admin.GetQueue(admin_pb2.GetQueueRequest(org=org, queue=QUEUE), timeout=PATIENCE_S)
    assert (answer.queue.paused, answer.queue.shard) == (True, "s2")
    cluster.far.admin.ResumeQueue(admin_pb2.ResumeQueueRequest(org=org, queue=QUEUE), timeout=PATIENCE_S)
    leased = dequeue(cluster.near, org)
    assert ack(cluster.near, org, *(job.lease for job in leased)) == [OK, OK]
    move.finish()


@pytest.mark.parametrize("paused", [True, False])
def test_a_pause_is_told_at_every_step_as_it_is_whatever_former_owners_remember(cluster: Cluster, paused: bool) -> None:
    org = cluster.org()
    enqueue(cluster.near, org)
    # Let s1 remember the opposite value.
    set_paused(cluster, org, not paused)
    cluster.begin(org).finish()
    set_paused(cluster, org, paused)
    assert told_paused(cluster, org) == {paused}
    back = cluster.begin(org, to="s1")
    assert told_paused(cluster, org) == {paused}
    for step in ("close", "open", "switch", "depart", "take", "finish"):
        getattr(back, step)()
        assert (step, told_paused(cluster, org)) == (step, {paused})
    # From now on, s2 remembers the opposite value.
    set_paused(cluster, org, not paused)
    assert told_paused(cluster, org) == {not paused}


def set_paused(cluster: Cluster, org: str, paused: bool) -> None:
    if paused:
        cluster.near.admin.PauseQueue(admin_pb2.PauseQueueRequest(org=org, queue=QUEUE), timeout=PATIENCE_S)
    else:
        cluster.near.admin.ResumeQueue(admin_pb2.ResumeQueueRequest(org=org, queue=QUEUE), timeout=PATIENCE_S)


def told_paused(cluster: Cluster, org: str) -> set[bool]:
    """Returns the value of `paused` of the queue from every call that reports this value, through both routers."""
    told: set[bool] = set()
    for both in (cluster.near, cluster.far):
        told.add(both.admin.GetQueue(admin_pb2.GetQueueRequest(org=org, queue=QUEUE), timeout=PATIENCE_S).queue.paused)
        told.update(one.paused for one in both.admin.ListQueues(admin_pb2.ListQueuesRequest(org=org)).queues)
        for finished in (False, True):
            request = admin_pb2.GetStatsRequest(org=org, queue=QUEUE, include_finished=finished)
            told.update(one.paused for one in both.admin.GetStats(request, timeout=PATIENCE_S).queues)
    return told


def test_a_router_that_slept_during_a_move_tells_of_a_queue_as_its_new_shard_has_it(
    cluster: Cluster, thread: ThreadPoolExecutor
) -> None:
    org = cluster.org()
    (pid,) = cluster.routers.pids
    os.kill(pid, signal.SIGSTOP)
    try:
        get = admin_pb2.GetQueueRequest(org=org, queue=QUEUE)
        getting = thread.submit(cluster.near.admin.GetQueue, get, timeout=PATIENCE_S)
        listing = thread.submit(cluster.near.admin.ListQueues, admin_pb2.ListQueuesRequest(org=org), timeout=PATIENCE_S)
        cluster.begin(org).finish()
        cluster.far.admin.PauseQueue(admin_pb2.PauseQueueRequest(org=org, queue=QUEUE), timeout=PATIENCE_S)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert getting.result(PATIENCE_S).queue.paused
    assert [queue.paused for queue in listing.result(PATIENCE_S).queues] == [True]


def test_a_queue_that_is_created_while_its_slot_has_no_writer_has_the_configuration_that_was_asked_for(
    cluster: Cluster, thread: ThreadPoolExecutor
) -> None:
    org = cluster.org()
    move = cluster.begin(org)
    move.close()
    config = admin_pb2.QueueConfig(max_attempts=3)
    request = admin_pb2.CreateQueueRequest(org=org, queue="new", config=config)
    creating = thread.submit(cluster.near.admin.CreateQueue, request, timeout=PATIENCE_S)
    until(lambda: creating.running(), "a queue is being created")
    move.open()
    move.switch()
    made = creating.result(PATIENCE_S).queue
    assert (made.shard, made.config.max_attempts) == ("s2", 3)
    move.finish()


def test_a_queue_is_not_deleted_while_its_jobs_are_on_their_way(cluster: Cluster) -> None:
    org, job = cluster.org(), new_job()
    enqueue(cluster.near, org, job)
    move = cluster.begin(org)
    move.switch()
    request = admin_pb2.DeleteQueueRequest(org=org, queue=QUEUE)
    for step in ("switch", "depart", "take", "finish"):
        getattr(move, step)()
        error = refused(lambda: cluster.near.admin.DeleteQueue(request, timeout=PATIENCE_S))
        assert error.code() == grpc.StatusCode.FAILED_PRECONDITION
    cancel(cluster.near, org, job.id)
    cluster.near.admin.DeleteQueue(request, timeout=PATIENCE_S)


def test_counts_lists_redrive_and_purge_reach_both_shards(cluster: Cluster) -> None:
    org = cluster.org()

    def kill(job: job_pb2.NewJob) -> None:
        enqueue(cluster.near, org, job)
        (leased,) = dequeue(cluster.near, org)
        nack = queue_pb2.Nack(lease=leased.lease, failure=job_pb2.Failure(message="no", permanent=True))
        cluster.near.queue.Nack(queue_pb2.NackRequest(org=org, nacks=[nack]), timeout=PATIENCE_S)

    dead = [new_job(), new_job()]
    kill(dead[0])
    enqueue(cluster.near, org, new_job(delay=Duration(seconds=3600)))
    move = cluster.begin(org)
    move.switch()
    kill(dead[1])
    for both in (cluster.near, cluster.far):
        (counts,) = both.admin.GetStats(admin_pb2.GetStatsRequest(org=org), timeout=PATIENCE_S).queues
        assert (counts.dead, counts.scheduled) == (2, 1)
        listed: list[str] = []
        token = ""
        while token or not listed:
            page = both.admin.ListJobs(
                admin_pb2.ListJobsRequest(org=org, queue=QUEUE, state=job_pb2.JOB_STATE_DEAD, page_token=token),
                timeout=PATIENCE_S,
            )
            listed += [job.id for job in page.jobs]
            token = page.next_page_token
        assert sorted(listed) == sorted(job.id for job in dead)
    named = queue_pb2.RedriveJobsRequest(org=org, ids=[dead[0].id])
    assert cluster.far.queue.RedriveJobs(named, timeout=PATIENCE_S).answers == [OK]
    redriven = cluster.near.admin.RedriveQueue(
        admin_pb2.RedriveQueueRequest(org=org, queue=QUEUE), timeout=PATIENCE_S
    ).redriven
    assert redriven == 1
    purged = cluster.near.admin.PurgeQueue(admin_pb2.PurgeQueueRequest(org=org, queue=QUEUE), timeout=PATIENCE_S)
    assert purged.cancelled == 3
    move.finish()
    (counts,) = cluster.far.admin.GetStats(
        admin_pb2.GetStatsRequest(org=org, include_finished=True), timeout=PATIENCE_S
    ).queues
    assert counts.cancelled == 3
    cluster.near.books("s1", "s2")


def listed(both: Stubs, org: str, *states: job_pb2.JobState.ValueType | None) -> list[str]:
    """Returns the ids of the queue's jobs in these states (None: in any), two per page."""
    found: list[str] = []
    for state in states:
        request = admin_pb2.ListJobsRequest(org=org, queue=QUEUE, state=state, page_size=2)
        while True:
            page = both.admin.ListJobs(request, timeout=PATIENCE_S)
            assert not page.unavailable_shards
            found += [job.id for job in page.jobs]
            request.page_token = page.next_page_token
            if not request.page_token:
                break
    return found


def counted(both: Stubs, org: str, **conditions: Any) -> int:
    request, count = admin_pb2.CountJobsRequest(org=org, **conditions), 0
    while True:
        part = both.admin.CountJobs(request, timeout=PATIENCE_S)
        count += part.count
        request.page_token = part.next_page_token
        if not request.page_token:
            return count


def found(both: Stubs, org: str, key: str) -> str:
    """Returns the id of the job that has this dedup key, or "" if no job has it."""
    request = queue_pb2.FindJobRequest(org=org, queue=QUEUE, dedup_key=key)
    return both.queue.FindJob(request, timeout=PATIENCE_S).job.id


def test_a_job_is_found_by_its_key_at_every_step(cluster: Cluster) -> None:
    org = cluster.org()
    for_a_window = new_job(dedup_key="a", dedup_window=Duration(seconds=3600))
    while_live, both_ways = new_job(dedup_key="b", dedup_while_live=True), new_job(dedup_key="a", dedup_while_live=True)
    enqueue(cluster.near, org, for_a_window, while_live)
    move = cluster.begin(org)
    for step in ("close", "switch", "depart", "take", "finish"):
        getattr(move, step)()
        for both in (cluster.near, cluster.far):
            keyed = [found(both, org, key) for key in ("a", "b", "c")]
            assert (step, keyed) == (step, [for_a_window.id, while_live.id, ""])
    cancel(cluster.near, org, for_a_window.id, while_live.id)
    # A dedup window may end later than its job. A live key ends with its job.
    assert [found(cluster.far, org, key) for key in ("a", "b")] == [for_a_window.id, ""]
    enqueue(cluster.near, org, both_ways)
    assert found(cluster.far, org, "a") == both_ways.id


UNFINISHED = (job_pb2.JOB_STATE_READY, job_pb2.JOB_STATE_SCHEDULED, job_pb2.JOB_STATE_LEASED, job_pb2.JOB_STATE_DEAD)


def kill(both: Stubs, org: str, *jobs: job_pb2.NewJob) -> None:
    enqueue(both, org, *jobs)
    nacks = [
        queue_pb2.Nack(lease=job.lease, failure=job_pb2.Failure(message="no", permanent=True))
        for job in dequeue(both, org)
    ]
    both.queue.Nack(queue_pb2.NackRequest(org=org, nacks=nacks), timeout=PATIENCE_S)


def test_jobs_on_their_way_are_listed_and_counted_once_at_every_step(cluster: Cluster) -> None:
    org = cluster.org()
    dead, ready = [new_job() for _ in range(3)], [new_job() for _ in range(3)]
    scheduled = new_job(delay=Duration(seconds=3600))
    kill(cluster.near, org, *dead)
    enqueue(cluster.near, org, *ready, scheduled)
    move = cluster.begin(org)
    for step in ("close", "switch", "depart", "take", "finish"):
        getattr(move, step)()
        for both in (cluster.near, cluster.far):
            (counts,) = both.admin.GetStats(admin_pb2.GetStatsRequest(org=org), timeout=PATIENCE_S).queues
            assert (step, counts.dead, counts.ready, counts.scheduled) == (step, 3, 3, 1)
            assert (counts.HasField("oldest_ready_age"), counts.HasField("next_due")) == (True, True)
            assert sorted(listed(both, org, *UNFINISHED)) == sorted(job.id for job in (*dead, *ready, scheduled))
            assert (step, counted(both, org), counted(both, org, not_killed=True)) == (step, 7, 0)
            whatever = listed(both, org, None)
            assert whatever == sorted((job.id for job in (*dead, *ready, scheduled)), reverse=True)


def test_a_router_that_slept_during_a_move_lists_and_counts_where_the_jobs_are(
    cluster: Cluster, thread: ThreadPoolExecutor
) -> None:
    org, jobs = cluster.org(), [new_job() for _ in range(3)]
    enqueue(cluster.near, org, *jobs)
    (pid,) = cluster.routers.pids
    os.kill(pid, signal.SIGSTOP)
    try:
        listing = thread.submit(listed, cluster.near, org, *UNFINISHED)
        request = admin_pb2.GetStatsRequest(org=org)
        counting = thread.submit(cluster.near.admin.GetStats, request, timeout=PATIENCE_S)
        cluster.begin(org).finish()
    finally:
        os.kill(pid, signal.SIGCONT)
    assert sorted(listing.result(PATIENCE_S)) == sorted(job.id for job in jobs)
    assert [one.ready for one in counting.result(PATIENCE_S).queues] == [3]


# ── A catalog that cannot be read ────────────────────────────────────────────────────────────────────────────────────


def purge(router: Stubs, org: str) -> int:
    return router.admin.PurgeQueue(admin_pb2.PurgeQueueRequest(org=org, queue=QUEUE), timeout=PATIENCE_S).cancelled


def test_a_purge_waits_for_jobs_on_their_way(cluster: Cluster, thread: ThreadPoolExecutor) -> None:
    org, jobs = cluster.org(), [new_job(), new_job()]
    enqueue(cluster.near, org, *jobs)
    move = cluster.begin(org)
    move.switch()
    move.depart()
    purging = thread.submit(purge, cluster.near, org)
    until(lambda: purging.running(), "the purge is under way")
    move.finish()
    assert purging.result(PATIENCE_S) == 2
    cluster.near.books("s1", "s2")


def test_a_backfill_during_a_move_knows_that_the_job_of_the_run_before_is_leased_on_the_source(
    cluster: Cluster,
) -> None:
    org, calls = cluster.org(), cluster.near.schedules
    spec = schedules_pb2.ScheduleSpec(interval=Duration(seconds=3600))
    job = job_pb2.JobTemplate(queue=QUEUE, kind="greet")
    create = schedules_pb2.CreateScheduleRequest(org=org, name="hourly", spec=spec, job=job)
    calls.CreateSchedule(create, timeout=PATIENCE_S)
    calls.TriggerSchedule(schedules_pb2.TriggerScheduleRequest(org=org, name="hourly"), timeout=PATIENCE_S)
    (leased,) = dequeue(cluster.near, org)
    move = cluster.begin(org)
    move.switch()
    now_s = int(time.time())
    request = schedules_pb2.BackfillScheduleRequest(
        org=org,
        name="hourly",
        begin=Timestamp(seconds=now_s - 3 * 3600),
        end=Timestamp(seconds=now_s - 60),
        overlap=schedules_pb2.OVERLAP_POLICY_SKIP,
    )
    done = calls.BackfillSchedule(request, timeout=PATIENCE_S)
    assert done.stored == 0
    assert done.skipped >= 2
    assert ack(cluster.near, org, leased.lease) == [OK]
    move.finish()


def test_a_router_serves_on_with_its_old_catalog_when_it_cannot_read_a_change(cluster: Cluster) -> None:
    org, job, pids = cluster.org(), new_job(), cluster.routers.pids
    cluster.sql("s1", "ALTER TABLE windrow.former_owner RENAME TO hidden")
    try:
        cluster.sql("s1", "NOTIFY windrow_catalog, '7'")
        until(lambda: "could not look at the catalog" in cluster.routers.log.read_text(), "the router has tried")
        assert enqueue(cluster.near, org, job) == [(job.id, False)]
        # Reads are answered too.
        answer = cluster.near.queue.GetJobs(queue_pb2.GetJobsRequest(org=org, ids=[job.id]), timeout=PATIENCE_S)
        assert [one.id for one in answer.jobs] == [job.id]
    finally:
        cluster.sql("s1", "ALTER TABLE windrow.hidden RENAME TO former_owner")
    assert cluster.routers.pids == pids


# ── Shards that are away ─────────────────────────────────────────────────────────────────────────────────────────────


def test_what_a_former_owner_may_know_is_refused_while_it_is_not_named_and_all_else_stored(
    postgres: Server, tmp_path: Path
) -> None:
    dsns = {shard: postgres.create(f"former_{shard}") for shard in ("s1", "s2", "s3")}
    org = "an-org"
    with running_routers(write_cluster(tmp_path / "all.toml", dsns)) as routers, stubs(routers.address) as all_:
        made = all_.admin.CreateQueue(admin_pb2.CreateQueueRequest(org=org, queue=QUEUE), timeout=PATIENCE_S)
        if made.queue.shard != "s3":
            begin_move(dsns, org, to="s3").finish()
        job = new_job()
        enqueue(all_, org, job)
        begin_move(dsns, org, to="s1").finish()
        # Make it look as if the slot had left s3 three hours ago.
        with psycopg.connect(dsns["s1"], autocommit=True) as connection:
            catalog_said = connection.execute(
                "UPDATE windrow.former_owner SET left_at = left_at - interval '3 hours' "
                "WHERE shard = 's3' RETURNING slot"
            ).fetchall()
            # Both changes are in one statement. A router that read the catalog between two statements would never learn
            # of the second change.
            connection.execute(
                "WITH next AS (UPDATE windrow.catalog SET epoch = epoch + 1 RETURNING epoch) "
                "UPDATE windrow.placement SET changed = next.epoch FROM next WHERE slot = ANY (%s)",
                [[slot for (slot,) in catalog_said]],
            )
        postgres.drop("former_s3")
        # These jobs are newer than any job that s3 can have stored. So the router stores them as soon as it knows how
        # long ago the slot left s3.
        until(lambda: ask(all_, org, new_job()), "a job that the former owner cannot know is stored")
        assert not ask(all_, org, new_job(dedup_key="k"))
    for shard in ("s1", "s2"):
        postgres.drop(f"former_{shard}")


def ask(both: Stubs, org: str, job: job_pb2.NewJob) -> bool:
    try:
        enqueue(both, org, job)
    except grpc.RpcError:
        return False
    return True
