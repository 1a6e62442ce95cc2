"""Tests what callers see over gRPC, and operators on the command line, when a row is locked or a clock was set back."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import grpc
import psycopg
import pytest
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2

from cli.main import main
from tests.conftest import SHARD
from tests.jobs import job_id, job_message
from tests.routers import PATIENCE_S, Routers, Stubs, detail, running_routers, stubs, until, write_cluster
from tests.streams import client, new_job
from tests.streams import until as until_true
from tests.timemachine import SetClock
from windrow.v1 import admin_pb2, cluster_pb2, job_pb2, queue_pb2

OK = job_pb2.JOB_ANSWER_OK


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    dsn: str
    clock: SetClock
    routers: Routers
    stubs: Stubs

    def shard(self) -> cluster_pb2.ShardInfo:
        (shard,) = self.stubs.cluster.ListShards(cluster_pb2.ListShardsRequest(), timeout=PATIENCE_S).shards
        return shard

    def enqueue(self, org: str) -> str:
        job = job_message(id=job_id(), queue="q", kind="k")
        request = queue_pb2.EnqueueRequest(org=org, jobs=[job])
        (result,) = self.stubs.queue.Enqueue(request, timeout=PATIENCE_S).results
        return result.id

    def lease(self, org: str) -> job_pb2.LeasedJob:
        self.enqueue(org)
        request = queue_pb2.DequeueRequest(org=org, queues=["q"], max_jobs=1)
        request.visibility_window.FromSeconds(36000)
        (job,) = self.stubs.queue.Dequeue(request, timeout=PATIENCE_S).jobs
        return job

    def ack(self, org: str, lease: bytes) -> list[int]:
        request = queue_pb2.AckRequest(org=org, acks=[queue_pb2.Ack(lease=lease)])
        return list(self.stubs.queue.Ack(request, timeout=PATIENCE_S).answers)


@pytest.fixture
def running(fresh_dsn: str, tmp_path: Path) -> Generator[Running, None, None]:
    clock = SetClock.of(fresh_dsn)
    config = write_cluster(tmp_path / "cluster.toml", {SHARD: clock.dsn})
    with running_routers(config) as routers, stubs(routers.address) as both:
        yield Running(dsn=fresh_dsn, clock=clock, routers=routers, stubs=both)


Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def windrow(running: Running, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["windrow", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        told = capsys.readouterr()
        return int(ended.value.code or 0), told.out, told.err

    return run


def refusal(call: Callable[[], object], reason: str) -> grpc.RpcError:
    """Asserts that the call is refused with this reason. Returns the error."""
    with pytest.raises(grpc.RpcError) as caught:
        call()
    error = caught.value
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    info, retry = detail(error, error_details_pb2.ErrorInfo), detail(error, error_details_pb2.RetryInfo)
    assert info is not None
    assert info.reason == reason
    assert retry is not None
    assert retry.retry_delay.ToMilliseconds() > 0
    return error


def test_the_ack_of_a_locked_job_names_the_blocker_and_other_calls_succeed(running: Running) -> None:
    mine, theirs = running.lease("mine"), [(f"org-{n}", running.lease(f"org-{n}")) for n in range(12)]
    with psycopg.connect(running.dsn) as forgotten, ThreadPoolExecutor(13) as threads:
        forgotten.execute("SET idle_in_transaction_session_timeout = 0")
        forgotten.execute("SELECT FROM windrow.job WHERE id = %s FOR UPDATE", [mine.id])
        refused = threads.submit(refusal, lambda: running.ack("mine", mine.lease), "ROW_LOCKED")
        served = [threads.submit(running.ack, org, job.lease) for org, job in theirs]
        assert [one.result() for one in served] == [[OK]] * 12
        assert f"job {mine.id} is locked by another session" in str(refused.result().details())
    assert running.ack("mine", mine.lease) == [OK]


@pytest.mark.parametrize("what", ["stream", "stream of all orgs", "dequeue"])
async def test_consumers_wait_while_the_bucket_of_a_group_is_locked(running: Running, what: str) -> None:
    """A job of a group falls due. So the claim needs the bucket of the group, which another session has locked."""
    async with client(running.routers.address) as near, AsyncExitStack() as stack:
        (job,) = await near.enqueue("mine", new_job(group="g", delay=Duration(seconds=3600)))
        holder = await stack.enter_async_context(await psycopg.AsyncConnection.connect(running.dsn))
        await holder.execute("SELECT pg_advisory_xact_lock(14, bucket) FROM generate_series(0, 1023) AS bucket")
        running.clock.set(timedelta(hours=2))
        if what == "dequeue":
            call = asyncio.create_task(near.dequeue("mine", wait_s=PATIENCE_S))
            await until_claims_waited(running.dsn, lambda: call.done())
            await holder.rollback()
            jobs = await call
        else:
            stream = await stack.enter_async_context(
                near.stream(None if what == "stream of all orgs" else "mine", credit=1)
            )
            await until_claims_waited(running.dsn, lambda: stream.ended)
            await holder.rollback()
            jobs = await stream.until_jobs(1)
        assert [one.id for one in jobs] == [job]


async def test_a_dequeue_that_does_not_wait_is_told_that_a_row_is_locked(running: Running) -> None:
    """An answer without jobs would mean that no job is due."""
    async with client(running.routers.address) as near:
        await near.enqueue("mine", new_job(group="g", delay=Duration(seconds=3600)))
        async with await psycopg.AsyncConnection.connect(running.dsn) as holder:
            await holder.execute("SELECT pg_advisory_xact_lock(14, bucket) FROM generate_series(0, 1023) AS bucket")
            running.clock.set(timedelta(hours=2))
            with pytest.raises(grpc.aio.AioRpcError, match="locked by another session"):
                await near.dequeue("mine")


async def until_claims_waited(dsn: str, ended: Callable[[], bool]) -> None:
    """Waits until three claims, one after another, have waited for the lock of a bucket, or until the consumer's call
    has ended."""
    waits = "SELECT query_start FROM pg_stat_activity WHERE datname = current_database() AND wait_event = 'advisory'"
    began: set[object] = set()
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as watcher:

        async def waited() -> bool:
            began.update([row[0] async for row in await watcher.execute(waits)])
            return len(began) >= 3 or ended()

        await until_true(waited, "claims wait again and again")


def test_doctor_names_the_session_that_keeps_a_row_locked(running: Running, windrow: Command) -> None:
    mine = running.lease("mine")
    with psycopg.connect(running.dsn, application_name="forgotten psql") as forgotten:
        forgotten.execute("SELECT FROM windrow.job WHERE id = %s FOR UPDATE", [mine.id])
        _, out, _ = windrow("doctor", "--held-for", "0s", "--json", "--config", str(running.routers.config))
        (finding,) = [one for one in json.loads(out)["findings"] if "forgotten psql" in one["finding"]]
        assert "rows that it has locked stay locked" in finding["why"]
        assert finding["fix"] == f"SELECT pg_terminate_backend({forgotten.info.backend_pid});"


def test_a_clock_that_was_set_back_is_reported_until_an_operator_accepts_it(running: Running, windrow: Command) -> None:
    config = str(running.routers.config)
    held = running.lease("mine")
    # Set the clock ahead, and then correct it.
    running.clock.set(timedelta(hours=2))
    until(lambda: time_is_recorded(running, hours=1), "the router has recorded the time")
    running.clock.set(timedelta(0))
    until(lambda: not running.shard().reachable, "the router has noticed")
    assert "its clock was set back" in running.shard().error
    admin = running.stubs.admin
    refused: list[Callable[[], object]] = [
        lambda: running.ack("mine", held.lease),
        lambda: running.enqueue("mine"),
        lambda: admin.PurgeQueue(admin_pb2.PurgeQueueRequest(org="mine", queue="q"), timeout=PATIENCE_S),
        lambda: running.stubs.queue.RedriveJobs(
            queue_pb2.RedriveJobsRequest(org="mine", ids=[held.id]), timeout=PATIENCE_S
        ),
        lambda: admin.RedriveQueue(admin_pb2.RedriveQueueRequest(org="mine", queue="q"), timeout=PATIENCE_S),
        lambda: admin.PauseQueue(admin_pb2.PauseQueueRequest(org="mine", queue="q"), timeout=PATIENCE_S),
    ]
    for call in refused:
        assert "windrow shards accept-clock s1" in str(refusal(call, "CLOCK_SET_BACK").details())
    code, out, _ = windrow("shards", "--address", running.routers.address)
    assert code == 1
    assert "its clock was set back" in " ".join(out.split())
    code, out, _ = windrow("doctor", "--json", "--config", config)
    assert code == 1
    (finding,) = [one for one in json.loads(out)["findings"] if one["about"] == "clock"]
    assert finding["severity"] == "critical"
    code, out, err = windrow("shards", "accept-clock", "s9", "--config", config)
    assert (code, out) == (4, "")
    assert "names no shard 's9'; it names s1" in err
    code, out, _ = windrow("shards", "accept-clock", "s1", "--config", config)
    assert code == 0
    assert out.startswith("shard s1: clock accepted at ")
    until(lambda: running.shard().reachable, "the router has noticed that too")
    assert running.ack("mine", held.lease) == [OK]
    code, out, _ = windrow("shards", "accept-clock", "s1", "--config", config)
    assert (code, out) == (0, "shard s1: nothing to accept, because its clock was not set back\n")
    assert running.routers.log.read_text().count("its clock was set back") == 1


def test_a_router_that_starts_while_the_clock_is_behind_takes_no_calls(
    running: Running, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with psycopg.connect(running.dsn) as connection:
        three_hours_ahead = "(extract(epoch FROM now() + interval '3 hours') * 1000000)::bigint"
        connection.execute(f"SELECT setval('windrow.clock', {three_hours_ahead})".encode())
    config = write_cluster(tmp_path_factory.mktemp("second") / "cluster.toml", {SHARD: running.clock.dsn})
    with running_routers(config) as routers, stubs(routers.address) as both:
        second = Running(dsn=running.dsn, clock=running.clock, routers=routers, stubs=both)
        refusal(lambda: second.enqueue("mine"), "CLOCK_SET_BACK")


def time_is_recorded(running: Running, *, hours: int) -> bool:
    with psycopg.connect(running.dsn) as connection:
        query = "SELECT to_timestamp(last_value / 1000000.0) > now() + make_interval(hours => %s) FROM windrow.clock"
        ((recorded,),) = connection.execute(query, [hours]).fetchall()
    return bool(recorded)
