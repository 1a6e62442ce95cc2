"""A router runs while a newer release applies a breaking migration to the database of one shard. The router stops using
that shard, and continues with the other shards."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from pathlib import Path

import grpc
import psycopg
import pytest

from router.buffer import Buffer
from router.fleet.fleet import Fleet
from shard.placement.cluster_file import read_cluster
from shard.postgres import schema
from shard.postgres.pool import Database
from shard.postgres.schema import Migration
from shard.vocabulary import OrgId, ShardName
from tests.jobs import job_id, job_message, some_jobs
from tests.postgres import Server
from tests.routers import PATIENCE_S, Routers, Stubs, running_routers, stubs, until, write_cluster
from windrow.v1 import admin_pb2, cluster_pb2, queue_pb2

WHY = "its schema has migration 9000 of a newer release, which this release cannot work with; upgrade this process"
_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    dsns: Mapping[str, str]
    routers: Routers
    stubs: Stubs

    def enqueue(self, org: str) -> str:
        """Tries to store a job. Returns an empty string, or the reason why the router refused the job."""
        job = job_message(id=job_id(), queue="mail", kind="greet")
        try:
            self.stubs.queue.Enqueue(queue_pb2.EnqueueRequest(org=org, jobs=[job]), timeout=PATIENCE_S)
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise
            return str(error.details())
        return ""

    def org_on(self, shard: str) -> str:
        for number in itertools.count():
            request = admin_pb2.CreateQueueRequest(org=f"{shard}-{number}", queue="home")
            if self.stubs.admin.CreateQueue(request, timeout=PATIENCE_S).queue.shard == shard:
                return request.org
        raise AssertionError

    def shards(self) -> dict[str, cluster_pb2.ShardInfo]:
        listed = self.stubs.cluster.ListShards(cluster_pb2.ListShardsRequest(), timeout=PATIENCE_S)
        return {shard.name: shard for shard in listed.shards}

    def sql(self, database: str, statement: bytes) -> None:
        with psycopg.connect(self.dsns[database], autocommit=True) as connection:
            connection.execute(statement)


@pytest.fixture
def running(postgres: Server, tmp_path: Path) -> Generator[Running, None, None]:
    """Starts routers with two shards, and with the catalog in its own database."""
    names = {name: f"newer_{next(_numbers)}_{name}" for name in ("s1", "s2", "catalog")}
    dsns = {name: postgres.create(database) for name, database in names.items()}
    config = write_cluster(
        tmp_path / "cluster.toml", {name: dsns[name] for name in ("s1", "s2")}, catalog_dsn=dsns["catalog"]
    )
    with running_routers(config) as routers, stubs(routers.address) as both:
        yield Running(dsns=dsns, routers=routers, stubs=both)
    for database in names.values():
        postgres.drop(database)


@pytest.fixture
def newer_release(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes this process behave as a newer release: it has one more migration, after which the routers' older release
    cannot work."""
    ours = schema.migrations()
    newer = Migration(number=9000, name="later", script=b"-- BREAKING\nSELECT 1")
    monkeypatch.setattr(schema, "migrations", lambda: [*ours, newer])


async def migrate(dsn: str) -> None:
    database = Database(ShardName("s2"), dsn, connections=1)
    await database.open()
    assert [one.number for one in await schema.migrate(database, cluster=None)] == [9000]
    await database.close()


@pytest.mark.usefixtures("newer_release")
def test_a_router_that_runs_stops_using_a_shard_that_a_newer_release_has_migrated_beyond_it(running: Running) -> None:
    here, there = running.org_on("s1"), running.org_on("s2")
    assert (running.enqueue(here), running.enqueue(there)) == ("", "")
    asyncio.run(migrate(running.dsns["s2"]))
    until(lambda: running.enqueue(there), "the shard is refused")
    assert running.enqueue(there) == f"shard 's2' is unavailable: {WHY}"
    until(lambda: not running.shards()["s2"].reachable, "`windrow shards` says so")
    assert WHY in running.shards()["s2"].error
    assert running.enqueue(here) == ""
    assert running.shards()["s1"].reachable
    # An upgraded router can use the shard again.
    assert asyncio.run(enqueue_upgraded(running.routers.config, there)) == {}
    # If the old schema is restored, as from a backup, a router of the old release can use the shard again too.
    running.sql("s2", b"DELETE FROM windrow.migration WHERE number = 9000")
    until(lambda: running.enqueue(there) == "", "the shard is used again")
    until(lambda: running.shards()["s2"].reachable, "`windrow shards` says so")


async def enqueue_upgraded(config: Path, org: str) -> object:
    cluster, ready = read_cluster(config), asyncio.Event()
    fleet = Fleet(cluster, connections_per_shard=1, sweep_s=0.2, buffer=Buffer(2**20))
    running = asyncio.create_task(fleet.run(ready))
    try:
        await asyncio.wait_for(ready.wait(), PATIENCE_S)
        return await fleet.write(
            OrgId(org), lambda member, at: member.store.enqueue(some_jobs(OrgId(org), 1), epoch=at.epoch)
        )
    finally:
        running.cancel()
        await asyncio.wait({running})


def test_a_router_without_a_notification_of_a_migration_notices_it_when_it_connects(running: Running) -> None:
    there = running.org_on("s2")
    running.sql("s2", b"INSERT INTO windrow.migration VALUES (9000, 'later', 'x', true)")
    assert running.enqueue(there) == ""
    running.sql(
        "s2",
        b"SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
        b"WHERE datname = current_database() AND pid <> pg_backend_pid()",
    )
    until(lambda: running.enqueue(there), "the shard is refused")
    assert running.enqueue(there) == f"shard 's2' is unavailable: {WHY}"


@pytest.mark.usefixtures("newer_release")
def test_a_router_goes_on_by_its_copy_of_a_catalog_that_a_newer_release_has_migrated_beyond_it(
    running: Running,
) -> None:
    org = running.org_on("s2")
    asyncio.run(migrate(running.dsns["catalog"]))

    def unavailable() -> list[str]:
        request = admin_pb2.GetStatsRequest(org=org)
        return list(running.stubs.admin.GetStats(request, timeout=PATIENCE_S).unavailable_shards)

    until(lambda: unavailable() == ["catalog"], "the catalog is refused")
    assert running.enqueue(org) == ""
    assert WHY in running.routers.log.read_text()
