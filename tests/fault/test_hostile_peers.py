"""Hostile clients attack a router process while a quiet org uses it: the process stays below its memory limit, gives
the memory back, and the quiet org's calls succeed. `./run bench hostile` measures the same for longer."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator, Awaitable, Generator

import grpc
import psutil
import pytest
from google.protobuf.duration_pb2 import Duration

from proof.hostile_peer import (
    Seen,
    leave_answers_unread,
    leave_requests_unfinished,
    open_peer,
    reset_rapidly,
)
from tests.jobs import job_id
from tests.postgres import Server
from tests.routers import PATIENCE_S, Routers, Stubs, running_routers, stubs, until, write_cluster
from tests.streams import new_job, start
from windrow.v1 import job_pb2, queue_pb2, queue_pb2_grpc

MIB = 1024 * 1024
MEMORY_MIB = 512
# Of one attack. It ends sooner where the router ends the connections.
ATTACK_S = 8.0
# What may come between two looks of the router at its memory, and the grain of ours.
SLACK_MIB = 256
ENQUEUE, GET_JOBS, CONSUME = (f"/windrow.v1.Queue/{name}" for name in ("Enqueue", "GetJobs", "Consume"))
RESOURCE_EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]


@pytest.fixture(scope="module")
def routers(postgres: Server, tmp_path_factory: pytest.TempPathFactory) -> Generator[Routers, None, None]:
    config = write_cluster(
        tmp_path_factory.mktemp("hostile") / "cluster.toml",
        {"s1": postgres.create("hostile_peers")},
        memory_mib=MEMORY_MIB,
    )
    with running_routers(config) as running:
        yield running


@pytest.fixture(scope="module")
def both(routers: Routers) -> Generator[Stubs, None, None]:
    with stubs(routers.address) as made:
        yield made


def resident_mib(routers: Routers) -> int:
    (pid,) = routers.pids
    return int(psutil.Process(pid).memory_info().rss) // MIB


def store(both: Stubs, org: str, *, count: int, payload_bytes: int) -> list[job_pb2.NewJob]:
    jobs = [new_job(id=job_id(), payload=os.urandom(payload_bytes)) for _ in range(count)]
    for job in jobs:
        both.queue.Enqueue(queue_pb2.EnqueueRequest(org=org, jobs=[job]), timeout=PATIENCE_S)
    return jobs


@contextlib.asynccontextmanager
async def quiet_org(address: str) -> AsyncGenerator[None, None]:
    """Enqueues, dequeues and acks all the time, three times at least. Fails if one of the calls does."""
    rounds, served = 0, asyncio.Event()

    async def use(queue: queue_pb2_grpc.QueueAsyncStub) -> None:
        nonlocal rounds
        while True:
            job = new_job()
            await queue.Enqueue(queue_pb2.EnqueueRequest(org="quiet", jobs=[job]), timeout=PATIENCE_S)
            request = queue_pb2.DequeueRequest(org="quiet", queues=[job.queue], wait=Duration(seconds=5))
            taken = await queue.Dequeue(request, timeout=PATIENCE_S)
            acks = [queue_pb2.Ack(lease=one.lease) for one in taken.jobs]
            answers = await queue.Ack(queue_pb2.AckRequest(org="quiet", acks=acks), timeout=PATIENCE_S)
            assert list(answers.answers) == [job_pb2.JOB_ANSWER_OK]
            rounds += 1
            if rounds == 3:
                served.set()

    async with grpc.aio.insecure_channel(address) as channel:
        using = asyncio.create_task(use(queue_pb2_grpc.QueueStub(channel)))
        enough = asyncio.create_task(served.wait())
        try:
            yield
            await asyncio.wait({using, enough}, timeout=PATIENCE_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (using, enough):
                task.cancel()
            await asyncio.wait({using, enough})
    if not using.cancelled():
        using.result()
    assert served.is_set()


async def peak_mib(routers: Routers, attack: Awaitable[list[Seen]]) -> tuple[int, list[Seen]]:
    """The most memory that the router had during an attack, with a quiet org beside it, and what the attackers saw."""
    attacking = asyncio.ensure_future(attack)
    peak = 0
    async with quiet_org(routers.address):
        while not attacking.done():
            peak = max(peak, resident_mib(routers))
            await asyncio.wait({attacking}, timeout=0.1)
    return peak, attacking.result()


async def test_answers_that_are_never_read_stay_within_the_memory_of_the_router(routers: Routers, both: Stubs) -> None:
    jobs = store(both, "noisy", count=2, payload_bytes=MIB)
    before = resident_mib(routers)
    request = queue_pb2.GetJobsRequest(org="noisy", ids=[job.id for job in jobs], include_payload=True)
    attack = leave_answers_unread(routers.address, GET_JOBS, request.SerializeToString(), calls=900, seconds=ATTACK_S)
    peak, (seen,) = await peak_mib(routers, attack)
    assert peak < MEMORY_MIB
    # Those for which there was no memory were refused.
    assert seen.statuses.keys() == {RESOURCE_EXHAUSTED}
    until(lambda: resident_mib(routers) < before + 64, "the memory is given back")


async def test_requests_whose_last_byte_never_comes_stay_within_the_memory_of_the_router(routers: Routers) -> None:
    before = resident_mib(routers)
    attack = leave_requests_unfinished(
        routers.address, ENQUEUE, size_bytes=15 * MIB, calls=120, connections=4, seconds=4 * ATTACK_S
    )
    peak, seen = await peak_mib(routers, attack)
    assert peak < MEMORY_MIB + SLACK_MIB
    assert any(one.closed_after_s is not None for one in seen)
    until(lambda: resident_mib(routers) < before + 64, "the memory is given back")


async def test_streams_that_never_read_stay_within_the_memory_of_the_router(routers: Routers, both: Stubs) -> None:
    store(both, "streams", count=300, payload_bytes=MIB)
    before = resident_mib(routers)
    first = queue_pb2.ConsumeRequest(start=start("streams"), credit=1000)
    attack = leave_answers_unread(
        routers.address, CONSUME, first.SerializeToString(), calls=300, connections=6, seconds=ATTACK_S, ends=False
    )
    peak, _ = await peak_mib(routers, attack)
    assert peak < MEMORY_MIB
    until(lambda: resident_mib(routers) < before + 64, "the memory is given back")


async def test_calls_that_are_reset_at_once_are_refused_and_do_not_fill_the_event_loop(routers: Routers) -> None:
    before = resident_mib(routers)
    attack = reset_rapidly(routers.address, ENQUEUE, count=20_000, connections=2, seconds=PATIENCE_S)
    peak, seen = await peak_mib(routers, attack)
    assert peak < before + 128
    # gRPC refuses what is beyond the calls of a connection, or the router has ended the connection.
    assert all(one.closed_after_s is not None or sum(one.resets.values()) > 15_000 for one in seen)


async def test_a_connection_is_told_how_many_calls_it_may_have(routers: Routers) -> None:
    async with open_peer(routers.address) as peer:
        await peer.until(lambda seen: seen.settings, within_s=PATIENCE_S)
        assert {code: value for code, value in peer.seen.settings.items() if value == 1000}


def test_what_attackers_do_is_no_error_in_the_log(routers: Routers) -> None:
    assert "Traceback" not in routers.log.read_text()
