"""Consume streams of all orgs: two shards, and two routers that know of each other only by the doorbell."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import AsyncGenerator, Generator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from tests.postgres import Server
from tests.routers import PATIENCE_S, Routers, running_routers, write_cluster
from tests.streams import NOT_FOUND, STALE, Client, acks, client, new_job, sql, start, until, window
from windrow.v1 import admin_pb2, job_pb2, queue_pb2

SHARDS = ("s1", "s2")
# Longer than a test takes: no sweep hides a lost wake-up.
NEVER_S = 3600.0
_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    dsns: dict[str, str]
    config: Path
    near: Routers
    far: Routers


@pytest.fixture(scope="module")
def cluster(postgres: Server, tmp_path_factory: pytest.TempPathFactory) -> Generator[Cluster, None, None]:
    dsns = {shard: postgres.create(f"all_{shard}") for shard in SHARDS}
    config = write_cluster(tmp_path_factory.mktemp("all") / "cluster.toml", dsns, sweep_seconds=NEVER_S)
    with running_routers(config) as near, running_routers(config) as far:
        yield Cluster(dsns=dsns, config=config, near=near, far=far)


@pytest.fixture
async def near(cluster: Cluster) -> AsyncGenerator[Client, None]:
    async with client(cluster.near.address) as opened:
        yield opened


@pytest.fixture
async def far(cluster: Cluster) -> AsyncGenerator[Client, None]:
    async with client(cluster.far.address) as opened:
        yield opened


@pytest.fixture
def queue() -> str:
    """A queue name that no other test uses: streams of all orgs get the jobs of every org of the cluster."""
    return f"mail-{next(_numbers)}"


def orgs(count: int) -> list[str]:
    return [f"org-a{next(_numbers)}" for _ in range(count)]






async def test_jobs_that_were_there_before_come_from_all_orgs_of_all_shards(near: Client, queue: str) -> None:
    of = orgs(30)
    for org in of:
        await near.enqueue(org, new_job(queue=queue), new_job(queue=queue))
    async with near.stream(None, queue, credit=100) as stream:
        jobs = await stream.until_jobs(60)
        assert Counter(job.org for job in jobs) == dict.fromkeys(of, 2)
        assert await stream.settle(1, acks=acks(jobs)) == []
