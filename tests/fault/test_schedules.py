"""kill -9 of router processes and of a Postgres while schedules fire every second: each instant is stored exactly once
(I10)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable

import grpc
import psutil
import pytest
import pytest_asyncio
from google.protobuf.duration_pb2 import Duration

from cli.local import LocalCluster, local_cluster
from embedded import BinariesNotFound
from tests.postgres import frozen
from tests.routers import PATIENCE_S, ending
from windrow.v1 import admin_pb2, admin_pb2_grpc, cluster_pb2, cluster_pb2_grpc, job_pb2, schedules_pb2_grpc
from windrow.v1 import schedules_pb2 as pb

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(240)]

SCHEDULES = 20
AFTER_RUNS = 3
# How long Postgres is frozen. This is longer than a router waits for a silent server.
FROZEN_S = 4.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster() -> AsyncIterator[LocalCluster]:
    try:
        async with local_cluster(root=None, shards=["s1"], processes=2, listen="127.0.0.1:0") as running:
            yield running
    except BinariesNotFound as error:
        pytest.skip(str(error))


async def until(holds: Callable[[], Awaitable[object]], what: str) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not await holds():
        assert time.monotonic() < deadline_s, f"not within {PATIENCE_S:g} s: {what}"
        await asyncio.sleep(0.05)


async def kill_routers(cluster: LocalCluster) -> None:
    for victim in cluster.routers.pids:
        with ending([victim]):
            os.kill(victim, signal.SIGKILL)

        async def restarted() -> bool:
            return len(cluster.routers.pids) == 2

        await until(restarted, "another process has been started")


async def kill_postgres(cluster: LocalCluster) -> None:
    victim = cluster.postgres["s1"].pid
    assert victim is not None
    for part in [psutil.Process(victim), *psutil.Process(victim).children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            part.kill()

    async def restarted() -> bool:
        return cluster.postgres["s1"].pid not in {None, victim}

    await until(restarted, "the server has been started again")


async def freeze_postgres(cluster: LocalCluster) -> None:
    pid = cluster.postgres["s1"].pid
    assert pid is not None
    with frozen(pid):
        await asyncio.sleep(FROZEN_S)


async def patiently(call: Callable[[], Awaitable[object]]) -> object:
    deadline_s = time.monotonic() + PATIENCE_S
    while True:
        try:
            return await call()
        except grpc.aio.AioRpcError as error:
            may_succeed = error.code() in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED}
            if not may_succeed or time.monotonic() > deadline_s:
                raise
            await asyncio.sleep(0.1)


@pytest.mark.turns(3)
@pytest.mark.parametrize("kill", [kill_routers, kill_postgres, freeze_postgres])
async def test_a_kill_loses_no_run_and_doubles_none(
    cluster: LocalCluster, kill: Callable[[LocalCluster], Awaitable[None]]
) -> None:
    org = kill.__name__
    spec = pb.ScheduleSpec(
        interval=Duration(seconds=1), overlap=pb.OVERLAP_POLICY_ALLOW, catch_up=pb.CATCH_UP_POLICY_ALL
    )
    job = job_pb2.JobTemplate(queue="ticks", kind="tick")
    names = [f"s{number}" for number in range(SCHEDULES)]
    async with grpc.aio.insecure_channel(cluster.address) as channel:
        schedules = schedules_pb2_grpc.SchedulesStub(channel)
        admin = admin_pb2_grpc.AdminStub(channel)

        async def last(name: str) -> int:
            request = pb.GetScheduleRequest(org=org, name=name)
            found = await patiently(lambda: schedules.GetSchedule(request, timeout=5))
            assert isinstance(found, pb.GetScheduleResponse)
            return found.schedule.last.seconds

        async def all_after(moment: dict[str, int]) -> None:
            for name in names:
                wanted = moment[name]

                async def has_fired(name: str = name, wanted: int = wanted) -> bool:
                    return await last(name) >= wanted

                await until(has_fired, f"{name} fires")

        for name in names:
            create = pb.CreateScheduleRequest(org=org, name=name, spec=spec, job=job)
            await patiently(lambda: schedules.CreateSchedule(create, timeout=5))  # noqa: B023
        await all_after(dict.fromkeys(names, 1))
        await kill(cluster)
        await all_after({name: await last(name) + AFTER_RUNS for name in names})
        for name in names:
            pause = pb.PauseScheduleRequest(org=org, name=name)
            await patiently(lambda: schedules.PauseSchedule(pause, timeout=5))  # noqa: B023
        stored: dict[str, list[int]] = defaultdict(list)
        token = ""
        while True:
            listing = admin_pb2.ListJobsRequest(org=org, page_size=1000, page_token=token)
            page = await patiently(lambda: admin.ListJobs(listing, timeout=5))  # noqa: B023
            assert isinstance(page, admin_pb2.ListJobsResponse)
            for found in page.jobs:
                stored[found.scheduled_run.schedule].append(found.scheduled_run.at.seconds)
            token = page.next_page_token
            if not token:
                break
        assert set(stored) == set(names)
        for instants in stored.values():
            instants.sort()
            # No instant is missing, and none comes twice.
            assert instants == list(range(instants[0], instants[-1] + 1))
        check = cluster_pb2_grpc.ClusterStub(channel)
        async for answer in check.CheckShard(cluster_pb2.CheckShardRequest(shard="s1"), timeout=PATIENCE_S):
            assert all(books.balanced for books in answer.orgs)
