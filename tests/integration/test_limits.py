"""Tests limits of what orgs may enqueue, over gRPC, with two sets of routers and two shards. Most limits in these tests
are per day, so that a bucket gets no new token while a test runs."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import psycopg
import pytest
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2

from archiver import orgs
from embedded import Cluster as OwnServer
from shard.limits import EVERY_ORG
from shard.placement.cluster_file import read_cluster
from shard.vocabulary import OrgId
from tests import streams
from tests.command import windrow
from tests.jobs import job_id, job_message
from tests.moves import begin_move
from tests.postgres import Server, kill
from tests.routers import PATIENCE_S, Routers, Stubs, detail, running_routers, stubs, until, write_cluster
from windrow import Batch, Client, InvalidRequest, LimitMeasure, NewJob, ResourceExhausted, uuid7
from windrow.v1 import admin_pb2, cluster_pb2, job_pb2, limits_pb2, queue_pb2

QUEUE, OTHER = "mail", "files"
JOBS, BYTES = limits_pb2.LIMIT_MEASURE_JOBS, limits_pb2.LIMIT_MEASURE_BYTES
DAY_S = 86_400
_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    dsns: Mapping[str, str]
    config: Path
    routers: Routers
    near: Stubs
    far: Stubs

    def org(self) -> str:
        """Returns the name of a new org that lives on s1."""
        for _ in range(1000):
            org = f"org-l{next(_numbers)}"
            made = self.near.admin.CreateQueue(admin_pb2.CreateQueueRequest(org=org, queue=QUEUE), timeout=PATIENCE_S)
            if made.queue.shard == "s1":
                return org
        raise AssertionError("no org in a thousand lives on shard s1")

    def limit(
        self,
        org: str,
        amount: int,
        *,
        per_s: int = DAY_S,
        queue: str = "",
        measure: limits_pb2.LimitMeasure.ValueType = JOBS,
    ) -> None:
        """Sets a limit, and returns when it is in force on both routers."""
        self.near.cluster.SetLimit(
            cluster_pb2.SetLimitRequest(
                org=org, queue=queue, measure=measure, amount=amount, interval=Duration(seconds=per_s)
            ),
            timeout=PATIENCE_S,
        )
        self.settle(org)

    def clear(self, org: str, *, queue: str = "", measure: limits_pb2.LimitMeasure.ValueType = JOBS) -> bool:
        request = cluster_pb2.ClearLimitRequest(org=org, queue=queue, measure=measure)
        cleared = self.near.cluster.ClearLimit(request, timeout=PATIENCE_S).cleared
        self.settle(org)
        return cleared

    def settle(self, org: str) -> None:
        """Makes both routers read the limits and put them in force. One ListLimits call to a router does this."""
        for both in (self.near, self.far):
            listed(both, org)

    def sql(self, shard: str, statement: str, *parameters: object) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.dsns[shard], autocommit=True) as connection:
            cursor = connection.execute(statement.encode(), parameters)
            return cursor.fetchall() if cursor.description else []


def listed(both: Stubs, org: str) -> list[limits_pb2.Limit]:
    return list(both.admin.ListLimits(admin_pb2.ListLimitsRequest(org=org or "any"), timeout=PATIENCE_S).limits)


@pytest.fixture(scope="module")
def cluster(postgres: Server, tmp_path_factory: pytest.TempPathFactory) -> Generator[Cluster, None, None]:
    dsns = {shard: postgres.create(f"limits_{shard}") for shard in ("s1", "s2")}
    config = write_cluster(tmp_path_factory.mktemp("limits") / "cluster.toml", dsns)
    with (
        running_routers(config) as one,
        running_routers(config) as other,
        stubs(one.address) as near,
        stubs(other.address) as far,
    ):
        yield Cluster(dsns=dsns, config=config, routers=one, near=near, far=far)
    for shard in dsns:
        postgres.drop(f"limits_{shard}")


def new_job(**fields: object) -> job_pb2.NewJob:
    return job_message(**{"id": job_id(), "queue": QUEUE, "kind": "greet", **fields})


def some(count: int, **fields: object) -> list[job_pb2.NewJob]:
    return [new_job(**fields) for _ in range(count)]


def enqueue(
    both: Stubs, org: str, jobs: Sequence[job_pb2.NewJob], *, independent: bool = False
) -> Sequence[queue_pb2.EnqueueResult]:
    request = queue_pb2.EnqueueRequest(org=org, jobs=jobs, independent=independent)
    return both.queue.Enqueue(request, timeout=PATIENCE_S).results


def refused(call: Callable[[], object]) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as error:
        call()
    assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    info = detail(error.value, error_details_pb2.ErrorInfo)
    assert info is not None
    assert info.reason == "LIMIT_REACHED"
    return error.value


def stored(cluster: Cluster, org: str, *, tries: int) -> int:
    """Sends `tries` enqueues with one job each, alternately to the two routers. Returns how many of them are stored."""
    count = 0
    for both in itertools.islice(itertools.cycle((cluster.near, cluster.far)), tries):
        with contextlib.suppress(grpc.RpcError):
            enqueue(both, org, some(1))
            count += 1
    return count


# ── Bad input ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_batch_above_the_limit_is_refused_whole_and_is_told_that_it_can_never_succeed(cluster: Cluster) -> None:
    org = cluster.org()
    cluster.limit(org, 10)
    error = refused(lambda: enqueue(cluster.near, org, some(11)))
    assert "the call has 11 and can never succeed; send at most 10 at a time" in str(error)
    assert detail(error, error_details_pb2.RetryInfo) is None
    # The refused call has not used any token.
    assert len(enqueue(cluster.far, org, some(10))) == 10


async def test_a_batch_of_the_client_above_the_limit_goes_in_calls_that_the_limit_allows(cluster: Cluster) -> None:
    org, steps = cluster.org(), list[Batch]()
    cluster.limit(org, 20, per_s=1)
    async with Client(cluster.routers.address, org=org) as client:
        jobs = [NewJob(QUEUE, "k") for _ in range(50)]
        done = await client.enqueue_batch(jobs, batch=(batch := uuid7()), on_progress=steps.append)
        assert (done, steps) == (Batch(jobs=50), [Batch(jobs=50)])
        assert (await client.enqueue_batch(jobs, batch=batch)).duplicates == 50


async def test_a_batch_of_the_client_above_a_limit_of_bytes_goes_in_parts_but_one_job_that_is_too_large_is_refused(
    cluster: Cluster,
) -> None:
    org = cluster.org()
    cluster.limit(org, 1000, per_s=1, measure=BYTES)
    async with Client(cluster.routers.address, org=org) as client:
        jobs = [NewJob(QUEUE, "k", bytes(size)) for size in (600, 10, 10, 10, 10, 900, 10)]
        assert (await client.enqueue_batch(jobs, batch=uuid7())).jobs == 7
        with pytest.raises(ResourceExhausted, match="can never succeed"):
            await client.enqueue_batch([*jobs[:2], NewJob(QUEUE, "k", bytes(1001))], batch=uuid7())
        assert (await client.stats(QUEUE)).queues[QUEUE].ready == 9


def test_lines_above_the_limit_go_in_calls_that_the_limit_allows(cluster: Cluster, tmp_path: Path) -> None:
    org, batch = cluster.org(), str(uuid7())
    cluster.limit(org, 20, per_s=3600)
    lines = tmp_path / "lines"
    lines.write_text("".join(f"{n}\n" for n in range(50)))
    command = ("enqueue", org, QUEUE, "k", "--lines", "--file", str(lines), "--batch", batch)
    at = ("--address", cluster.routers.address)
    done = windrow(*command, *at)
    # The limit has no room for more jobs within the hour. Waiting helps after this refusal. It would not help if a
    # single call were larger than the limit.
    assert (done.code, len(done.out.splitlines())) == (3, 20)
    assert "line 21 and those after it are not stored" in done.err
    again = windrow(*command, *at)
    assert (again.code, again.out) == (3, "")
    cluster.clear(org)
    assert windrow(*command, *at).code == 0
    assert int(windrow("jobs", "count", org, QUEUE, *at).out.split()[0]) == 50


def test_a_refusal_after_which_waiting_does_not_help_has_the_exit_code_of_one(cluster: Cluster) -> None:
    org = cluster.org()
    cluster.limit(org, 3, measure=BYTES)
    done = windrow("enqueue", org, QUEUE, "k", "four", "--address", cluster.routers.address)
    assert (done.code, done.out) == (5, "")
    assert "the call has 4 and can never succeed; send at most 3 at a time" in done.err


@pytest.mark.parametrize(
    ("arguments", "code", "why"),
    [
        (["set", "--jobs", "5"], 2, "give either --org ORG or --every-org"),
        (["set", "--org", "acme", "--every-org", "--jobs", "5"], 2, "give either --org ORG or --every-org"),
        (["set", "--org", "", "--jobs", "5"], 2, "--org: is empty"),
        (["set", "--org", "acme"], 2, "give either --jobs N, --bytes N"),
        (["set", "--org", "acme", "--jobs", "5", "--bytes", "5"], 2, "give either --jobs N, --bytes N"),
        (["set", "--org", "acme", "--jobs", "0"], 2, "--jobs: must be 1 to "),
        (["set", "--org", "acme", "--jobs", "-1"], 2, "--jobs: must be 1 to "),
        (["set", "--org", "acme", "--jobs", str(10**12 + 1)], 2, "--jobs: must be 1 to "),
        (["set", "--org", "acme", "--jobs", str(10**30)], 2, "is too large"),
        (["set", "--org", "acme", "--jobs", "5", "--per", "10ms"], 2, "--per"),
        (["set", "--org", "acme", "--jobs", "5", "--per", "25h"], 2, "--per"),
        (["set", "--org", "a\nb", "--jobs", "5"], 2, "ORG"),
        (["set", "--org", "acme", "--queue", "no good", "--jobs", "5"], 2, "QUEUE"),
        (["clear", "--org", "acme"], 2, "give either --jobs, --bytes"),
        (["clear", "--org", "nobody", "--jobs"], 4, "there is no such limit"),
    ],
)
def test_bad_input_of_the_command_sets_nothing(cluster: Cluster, arguments: list[str], code: int, why: str) -> None:
    before = cluster.sql("s1", "SELECT * FROM windrow.usage_limit ORDER BY 1, 2, 3")
    done = windrow("limits", *arguments, "--address", cluster.routers.address)
    assert (done.code, done.out) == (code, "")
    assert why in done.err
    assert cluster.sql("s1", "SELECT * FROM windrow.usage_limit ORDER BY 1, 2, 3") == before


# ── How much is admitted ─────────────────────────────────────────────────────────────────────────────────────────────


def test_two_routers_together_admit_exactly_the_limit(cluster: Cluster) -> None:
    org = cluster.org()
    cluster.limit(org, 10)
    assert stored(cluster, org, tries=25) == 10


def test_a_refusal_names_the_limit_its_use_and_when_to_try_again(cluster: Cluster) -> None:
    org = cluster.org()
    cluster.limit(org, 10, queue=QUEUE)
    enqueue(cluster.near, org, some(8))
    error = refused(lambda: enqueue(cluster.far, org, some(5)))
    assert f"queue 'mail' of org '{org}' may enqueue 10 jobs per 86400 s: 8 of them are in use" in str(error)
    reached = detail(error, limits_pb2.LimitReached)
    assert reached is not None
    assert (reached.usage, reached.asked) == (8, 5)
    limit = reached.limit
    assert (limit.org, limit.queue, limit.measure, limit.amount) == (org, QUEUE, JOBS, 10)
    assert limit.interval == Duration(seconds=DAY_S)
    retry = detail(error, error_details_pb2.RetryInfo)
    assert retry is not None
    # The call needs three more tokens, which take 0.3 days.
    assert 0.29 * DAY_S < retry.retry_delay.seconds <= 0.3 * DAY_S


def test_an_independent_call_stores_what_fits(cluster: Cluster) -> None:
    org = cluster.org()
    cluster.limit(org, 10)
    enqueue(cluster.far, org, some(3))
    jobs = some(1000)
    results = enqueue(cluster.near, org, jobs, independent=True)
    assert [result.id for result in results if result.id] == [job.id for job in jobs[:7]]
    refusals = [result.error for result in results if not result.id]
    assert len(refusals) == 993
    details = {packed.TypeName() for packed in refusals[0].details}
    assert details == {"google.rpc.ErrorInfo", "google.rpc.RetryInfo", "windrow.v1.LimitReached"}


def test_bytes_of_payloads_and_attributes_count(cluster: Cluster) -> None:
    org = cluster.org()
    cluster.limit(org, 1000, measure=BYTES)
    enqueue(cluster.near, org, some(1, payload=bytes(900)))
    refused(lambda: enqueue(cluster.far, org, some(1, payload=bytes(101))))
    refused(lambda: enqueue(cluster.far, org, some(1, attributes={"name": "x" * 95})))
    enqueue(cluster.far, org, some(1, payload=bytes(100)))
    # The first job alone is larger than the limit, and can never be stored. The second job has to wait.
    results = enqueue(cluster.near, org, [new_job(payload=bytes(1001)), new_job(payload=b"x")], independent=True)
    kinds = [{packed.TypeName() for packed in result.error.details} for result in results]
    assert ["google.rpc.RetryInfo" in found for found in kinds] == [False, True]


def test_the_limits_of_an_org_and_of_its_queue_both_count(cluster: Cluster) -> None:
    org = cluster.org()
    cluster.limit(org, 10)
    cluster.limit(org, 4, queue=QUEUE)
    enqueue(cluster.near, org, some(4))
    refused(lambda: enqueue(cluster.near, org, some(1)))
    enqueue(cluster.far, org, some(6, queue=OTHER))
    refused(lambda: enqueue(cluster.near, org, some(1, queue=OTHER)))


def test_a_default_limits_each_org_by_itself_and_an_org_may_have_another_limit(cluster: Cluster) -> None:
    one, two, free = cluster.org(), cluster.org(), cluster.org()
    cluster.limit(free, 7)
    cluster.limit(EVERY_ORG, 2)
    try:
        assert [stored(cluster, org, tries=9) for org in (one, two, free)] == [2, 2, 7]
        assert [(limit.org, limit.amount) for limit in listed(cluster.far, one)] == [("", 2)]
        assert [(limit.org, limit.amount) for limit in listed(cluster.far, free)] == [(free, 7)]
    finally:
        assert cluster.clear(EVERY_ORG)
    assert not cluster.clear(EVERY_ORG)
    assert stored(cluster, one, tries=5) == 5


# ── What is charged ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_repeat_of_stored_jobs_is_not_refused_and_costs_nothing(cluster: Cluster) -> None:
    org, jobs = cluster.org(), some(3)
    cluster.limit(org, 5)
    for both in (cluster.near, cluster.far, cluster.near):
        assert [result.id for result in enqueue(both, org, jobs)] == [job.id for job in jobs]
    enqueue(cluster.near, org, some(2))
    # Now the limit has no room. The repeated call succeeds nevertheless.
    results = enqueue(cluster.far, org, jobs)
    assert [(result.id, result.duplicate) for result in results] == [(job.id, True) for job in jobs]
    refused(lambda: enqueue(cluster.near, org, [*jobs, new_job()]))
    mixed = enqueue(cluster.near, org, [*jobs, new_job()], independent=True)
    assert [bool(result.id) for result in mixed] == [True, True, True, False]


async def test_a_repeat_at_a_limit_is_not_refused_while_consumers_wait(cluster: Cluster) -> None:
    org, jobs = cluster.org(), some(2)
    cluster.limit(org, 2)
    async with streams.client(cluster.routers.address) as near, near.stream(org, credit=100) as stream:
        enqueue(cluster.near, org, jobs)
        await stream.until_jobs(2)
        results = enqueue(cluster.near, org, jobs)
        assert [(result.id, result.duplicate) for result in results] == [(job.id, True) for job in jobs]


def test_a_dedup_key_that_is_taken_costs_nothing(cluster: Cluster) -> None:
    org = cluster.org()
    cluster.limit(org, 2)
    (first,) = enqueue(cluster.near, org, some(1, dedup_key="k"))
    for both in (cluster.near, cluster.far):
        (again,) = enqueue(both, org, some(1, dedup_key="k"))
        assert (again.id, again.duplicate) == (first.id, True)
    until(lambda: tokens(cluster, org) == 1, "what the repeats did not use is given back")
    assert stored(cluster, org, tries=3) == 1


def test_a_call_that_is_refused_for_another_reason_costs_nothing(cluster: Cluster) -> None:
    org = cluster.org()
    cluster.limit(org, 1)
    old = new_job(id=job_id(ahead_ms=-30 * DAY_S * 1000))
    for _ in range(3):
        with pytest.raises(grpc.RpcError) as error:
            enqueue(cluster.near, org, [old])
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    enqueue(cluster.near, org, some(1))


def test_a_restored_job_is_charged(cluster: Cluster) -> None:
    org, (job,) = cluster.org(), some(1)
    enqueue(cluster.near, org, [job])
    cluster.near.queue.CancelJobs(queue_pb2.CancelJobsRequest(org=org, ids=[job.id]), timeout=PATIENCE_S)
    cluster.limit(org, 1)
    request = admin_pb2.RestoreJobsRequest(org=org, jobs=[admin_pb2.RestoreJob(id=job.id, new_id=job_id())])
    cluster.near.admin.RestoreJobs(request, timeout=PATIENCE_S)
    # The same request again is a repeat.
    cluster.far.admin.RestoreJobs(request, timeout=PATIENCE_S)
    refused(lambda: enqueue(cluster.near, org, some(1)))


# ── Changes ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_change_is_in_force_on_every_router_without_a_call_there(cluster: Cluster) -> None:
    org = cluster.org()
    cluster.limit(org, 1)
    enqueue(cluster.near, org, some(1))
    refused(lambda: enqueue(cluster.far, org, some(1)))
    cluster.near.cluster.SetLimit(
        cluster_pb2.SetLimitRequest(org=org, measure=JOBS, amount=1_000_000, interval=Duration(seconds=1)),
        timeout=PATIENCE_S,
    )
    until(lambda: stored(cluster, org, tries=2) == 2, "both routers follow the change")


def test_a_changed_limit_scales_what_is_in_the_bucket(cluster: Cluster) -> None:
    org = cluster.org()
    cluster.limit(org, 10)
    enqueue(cluster.near, org, some(5))
    cluster.limit(org, 100)
    # Half of the old limit was used before the change, so half of the new limit is used after it.
    enqueue(cluster.far, org, some(50))
    refused(lambda: enqueue(cluster.near, org, some(1)))
    cluster.limit(org, 4)
    refused(lambda: enqueue(cluster.near, org, some(1)))


def test_the_same_rate_with_a_shorter_interval_admits_less_at_once(cluster: Cluster) -> None:
    ten_seconds, one_second = cluster.org(), cluster.org()
    cluster.limit(ten_seconds, 1000, per_s=10)
    cluster.limit(one_second, 100, per_s=1)
    assert len(enqueue(cluster.near, ten_seconds, some(1000))) == 1000
    assert "at most 100 at a time" in str(refused(lambda: enqueue(cluster.near, one_second, some(101))))


def test_a_router_with_an_older_limit_does_not_bring_it_back(cluster: Cluster) -> None:
    org = cluster.org()
    cluster.limit(org, 10)
    draw = "SELECT granted, version FROM windrow.draw_tokens(%s, '', 'jobs', %s, %s, %s, %s, %s)"
    enqueue(cluster.near, org, some(1))
    ((version,),) = cluster.sql("s1", "SELECT version FROM windrow.token_bucket WHERE org = %s", org)
    # Draw as a router does that still knows an older and much larger limit.
    assert cluster.sql("s1", draw, org, 1, 100, 1000, DAY_S * 10**6, version - 1) == [(9, version)]
    # Tokens that this router drew before the change are not given back to the bucket of the new limit.
    assert cluster.sql("s1", draw, org, -5, -5, 1000, DAY_S * 10**6, version - 1) == [(0, version)]


# ── Faults ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def tokens(cluster: Cluster, org: str) -> int:
    """Returns how many tokens the org's only bucket on s1 has."""
    ((count,),) = cluster.sql("s1", "SELECT floor(tokens + 1e-3)::int FROM windrow.token_bucket WHERE org = %s", org)
    return int(count)


def test_a_router_that_dies_loses_a_block_at_most(cluster: Cluster) -> None:
    org = cluster.org()
    # At 100 tokens per second, a block has 10 tokens at most.
    cluster.limit(org, 100 * DAY_S)
    full = 100 * DAY_S
    with running_routers(cluster.config) as mortal, stubs(mortal.address) as there:
        for _ in range(20):
            enqueue(there, org, some(10))
        # The bucket also fills while the test runs, so the test can check only an upper bound.
        assert full - tokens(cluster, org) - 200 <= 10
        for pid in mortal.pids:
            os.kill(pid, signal.SIGKILL)
    assert full - tokens(cluster, org) - 200 <= 10
    enqueue(cluster.near, org, some(10))


def test_a_router_that_ends_in_order_gives_its_tokens_back(cluster: Cluster) -> None:
    org = cluster.org()
    cluster.limit(org, 100 * DAY_S)
    with running_routers(cluster.config) as mortal, stubs(mortal.address) as there:
        for _ in range(20):
            enqueue(there, org, some(10))
    # The bucket also fills while the test runs, but only up to the limit's amount.
    assert tokens(cluster, org) >= 100 * DAY_S - 200


def test_the_bucket_of_an_org_moves_with_it(cluster: Cluster) -> None:
    org = cluster.org()
    cluster.limit(org, 10)
    enqueue(cluster.near, org, some(6))
    move = begin_move(cluster.dsns, org, to="s2")
    with ThreadPoolExecutor(1) as threads:
        move.close()
        between = threads.submit(enqueue, cluster.far, org, some(1))
        move.switch()
        assert len(between.result(PATIENCE_S)) == 1
    move.finish()
    assert stored(cluster, org, tries=9) == 3


def test_a_clock_that_was_set_back_neither_fills_a_bucket_nor_keeps_it_empty(cluster: Cluster) -> None:
    org = cluster.org()
    cluster.limit(org, 10)
    assert stored(cluster, org, tries=12) == 10
    shift = "UPDATE windrow.token_bucket SET filled_at = filled_at + %s::interval WHERE org = %s"
    # Make it look as if the clock had been two days ahead before it was set back.
    cluster.sql("s1", shift, "2 days", org)
    draw = "SELECT granted FROM windrow.draw_tokens(%s, '', 'jobs', 1, 1, 10, %s, 0)"
    assert cluster.sql("s1", draw, org, DAY_S * 10**6) == [(0,)]
    # From this draw on, the bucket fills by the corrected clock.
    ((behind,),) = cluster.sql("s1", "SELECT filled_at <= now() FROM windrow.token_bucket WHERE org = %s", org)
    assert behind
    cluster.sql("s1", shift, "-1 day", org)
    assert cluster.sql("s1", draw, org, DAY_S * 10**6) == [(1,)]


def test_a_bucket_that_a_session_locks_harms_only_its_org(cluster: Cluster) -> None:
    locked, free = cluster.org(), cluster.org()
    for org in (locked, free):
        cluster.limit(org, 100)
        enqueue(cluster.near, org, some(1))
    with psycopg.connect(cluster.dsns["s1"]) as session, ThreadPoolExecutor(8) as threads:
        session.execute("SELECT FROM windrow.token_bucket WHERE org = %s FOR UPDATE", [locked])
        calls = [threads.submit(enqueue, cluster.near, org, some(1)) for org in (locked, free) * 4]
        for call in calls[1::2]:
            assert len(call.result(PATIENCE_S)) == 1
        for call in calls[::2]:
            error: Any = call.exception(PATIENCE_S)
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            info = detail(error, error_details_pb2.ErrorInfo)
            assert info is not None
            assert info.reason == "ROW_LOCKED"
        session.rollback()
    enqueue(cluster.near, locked, some(1))


def test_full_buckets_have_no_rows_after_a_while(cluster: Cluster) -> None:
    org = cluster.org()
    cluster.limit(org, 5)
    enqueue(cluster.near, org, some(1))
    forget = (Path(__file__).resolve().parents[2] / "shard/queue/sql/forget_full_buckets.sql").read_text()
    cluster.sql("s1", forget)
    assert tokens(cluster, org) == 4
    cluster.sql("s1", "UPDATE windrow.token_bucket SET filled_at = filled_at - interval '1 day' WHERE org = %s", org)
    cluster.sql("s1", forget)
    assert cluster.sql("s1", "SELECT FROM windrow.token_bucket WHERE org = %s", org) == []
    assert stored(cluster, org, tries=7) == 5


async def test_erasure_leaves_neither_limits_nor_buckets(cluster: Cluster) -> None:
    org, other = await asyncio.to_thread(cluster.org), await asyncio.to_thread(cluster.org)
    for name in (org, other):
        await asyncio.to_thread(cluster.limit, name, 5)
        await asyncio.to_thread(enqueue, cluster.near, name, some(5))
    await orgs.erase(read_cluster(cluster.config), OrgId(org), say=lambda _: None)
    assert cluster.sql("s1", "SELECT FROM windrow.usage_limit WHERE org = %s", org) == []
    assert cluster.sql("s1", "SELECT FROM windrow.token_bucket WHERE org = %s", org) == []
    await asyncio.to_thread(cluster.settle, org)
    # The new org of this name has no limit.
    assert await asyncio.to_thread(stored, cluster, org, tries=7) == 7
    assert await asyncio.to_thread(stored, cluster, other, tries=2) == 0


def test_after_a_crash_of_postgres_buckets_are_full(tmp_path: Path) -> None:
    with OwnServer("limits-crash", ephemeral=True) as server:
        config = write_cluster(tmp_path / "cluster.toml", {"s1": server.dsn})
        with running_routers(config) as routers, stubs(routers.address) as both:
            request = cluster_pb2.SetLimitRequest(org="acme", measure=JOBS, amount=3, interval=Duration(seconds=DAY_S))
            both.cluster.SetLimit(request, timeout=PATIENCE_S)
            listed(both, "acme")
            enqueue(both, "acme", some(3))
        kill(server)
        server.start()
        with running_routers(config) as routers, stubs(routers.address) as both:
            # The limit is in force at once, and its bucket is full.
            until(lambda: _stores(both, "acme"), "the shard is up again")
            enqueue(both, "acme", some(2))
            refused(lambda: enqueue(both, "acme", some(1)))


def _stores(both: Stubs, org: str) -> bool:
    try:
        enqueue(both, org, some(1))
    except grpc.RpcError:
        return False
    return True


# ── The Python client ────────────────────────────────────────────────────────────────────────────────────────────────


async def test_an_interval_that_is_wrong_is_named_as_the_argument_is(cluster: Cluster) -> None:
    org = await asyncio.to_thread(cluster.org)
    async with Client(cluster.routers.address, org=org) as client:
        for measure, per, why in (
            (LimitMeasure.STARTS, None, "is missing"),
            (LimitMeasure.IN_FLIGHT, 1, "is given"),
            (LimitMeasure.JOBS, 90_000, "must be"),
        ):
            with pytest.raises(InvalidRequest, match=rf"^SetLimit at \S+: per: {why}") as refused:
                await client.set_limit(measure, 2, per=per)
            assert [violation.field for violation in refused.value.violations] == ["per"]


async def test_the_client_waits_until_the_limit_has_room(cluster: Cluster) -> None:
    org = await asyncio.to_thread(cluster.org)
    async with Client(cluster.routers.address, org=org) as client:
        await client.set_limit(LimitMeasure.JOBS, 2, per=1)
        assert [limit.amount for limit in await client.list_limits()] == [2]
        enqueued = await asyncio.gather(*(client.enqueue(QUEUE, "greet") for _ in range(6)))
        assert len({one.id for one in enqueued}) == 6
        await client.enqueue_many([NewJob(QUEUE, "greet"), NewJob(QUEUE, "greet")])
        assert await client.clear_limit(LimitMeasure.JOBS)


async def test_the_client_gives_up_if_the_limit_has_no_room_before_its_timeout(cluster: Cluster) -> None:
    org = await asyncio.to_thread(cluster.org)
    await asyncio.to_thread(cluster.limit, org, 2)
    async with Client(cluster.routers.address, org=org) as client:
        results = await asyncio.gather(*(client.enqueue(QUEUE, "greet") for _ in range(4)), return_exceptions=True)
        errors = [one for one in results if isinstance(one, ResourceExhausted)]
        assert len(errors) == 2
        for error in errors:
            assert error.reason == "LIMIT_REACHED"
            assert error.retry_after is not None
            assert error.limit is not None
            assert (error.limit.limit.amount, error.limit.usage, error.limit.asked) == (2, 2, 1)
        many = await client.enqueue_many([NewJob(QUEUE, "greet"), NewJob(QUEUE, "greet")], independent=True)
        assert [type(one.error) for one in many] == [ResourceExhausted] * 2


async def test_jobs_that_wait_for_a_limit_do_not_hold_others_up(cluster: Cluster) -> None:
    org = await asyncio.to_thread(cluster.org)
    # The next token comes after half an hour.
    await asyncio.to_thread(lambda: cluster.limit(org, 1, per_s=1800, queue=QUEUE))
    async with Client(cluster.routers.address, org=org, timeout=3600) as client:
        await client.enqueue(QUEUE, "greet")
        waiting = [asyncio.create_task(client.enqueue(QUEUE, "greet")) for _ in range(20)]
        for _ in range(20):
            await asyncio.wait_for(client.enqueue(OTHER, "greet"), PATIENCE_S)
        assert not any(one.done() for one in waiting)
        for one in waiting:
            one.cancel()
        await asyncio.wait(waiting)


# ── The command ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_command_sets_lists_and_clears(cluster: Cluster) -> None:
    org, at = cluster.org(), ("--address", cluster.routers.address)
    done = windrow("limits", "set", "--org", org, "--jobs", "1000", "--per", "10s", *at)
    assert (done.code, done.out) == (0, f"org {org}: 1,000 jobs per 10s\n")
    done = windrow("limits", "set", "--org", org, "--queue", QUEUE, "--bytes", "5000000", "--json", *at)
    wanted = {"org": org, "queue": QUEUE, "measure": "bytes", "amount": 5_000_000, "interval_s": 1.0}
    assert done.documents == [wanted]
    assert windrow("limits", "list", "--org", org, "--json", *at).documents[1] == wanted
    assert f"{org}" in windrow("limits", "list", *at).out
    assert windrow("limits", "clear", "--org", org, "--jobs", *at).code == 0
    assert windrow("limits", "list", "--org", org, "--json", *at).documents == [wanted]


def test_the_command_says_once_when_to_try_a_refused_enqueue_again(cluster: Cluster) -> None:
    org, at = cluster.org(), ("--address", cluster.routers.address)
    cluster.limit(org, 1)
    assert windrow("enqueue", org, QUEUE, "greet", *at).code == 0
    refused = windrow("enqueue", org, QUEUE, "greet", *at)
    assert refused.code != 0
    assert refused.err.count("try again in") == 1, refused.err
