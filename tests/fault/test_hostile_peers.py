"""Hostile clients attack a router process while a quiet org uses it: the process stays below its memory limit, gives
the memory back, and the quiet org's calls succeed. `./run bench hostile` makes these attacks for longer, and measures
them."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Generator
from pathlib import Path

import grpc
import psutil
import pytest
from google.protobuf.duration_pb2 import Duration

from proof.edge import running_edge
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
# The duration of one attack. The attack ends sooner if the router closes the connections, or if `enough` holds.
ATTACK_S = 8.0
# The pause of the quiet org between two rounds.
PAUSE_S = 0.03
ENQUEUE, GET_JOBS, CONSUME = (f"/windrow.v1.Queue/{name}" for name in ("Enqueue", "GetJobs", "Consume"))
INVALID_ARGUMENT = grpc.StatusCode.INVALID_ARGUMENT.value[0]
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


def padding(mib: int) -> bytes:
    """Returns a field of this many MiB that is in no message of the contract."""
    return b"\xc2\x3e" + bytes((0x80, 0x80, 0x80 | mib << 6 & 0x7F, mib >> 1)) + bytes(mib * MIB)


def store(both: Stubs, org: str, *, count: int, payload_bytes: int) -> list[job_pb2.NewJob]:
    jobs = [new_job(id=job_id(), payload=os.urandom(payload_bytes)) for _ in range(count)]
    for job in jobs:
        both.queue.Enqueue(queue_pb2.EnqueueRequest(org=org, jobs=[job]), timeout=PATIENCE_S)
    return jobs


@contextlib.asynccontextmanager
async def quiet_org(address: str) -> AsyncGenerator[None, None]:
    """Keeps enqueuing, dequeuing and acking, at least three times. Fails if one of the calls fails."""
    rounds, served = 0, asyncio.Event()

    async def use(queue: queue_pb2_grpc.QueueAsyncStub) -> None:
        nonlocal rounds
        while True:
            job = new_job()
            await queue.Enqueue(queue_pb2.EnqueueRequest(org="quiet", jobs=[job]), timeout=PATIENCE_S)
            request = queue_pb2.DequeueRequest(
                org="quiet",
                queues=[job.template.queue],
                wait=Duration(seconds=60),
                visibility_window=Duration(seconds=600),
            )
            taken = await queue.Dequeue(request, timeout=2 * PATIENCE_S)
            acks = [queue_pb2.Ack(lease=one.lease) for one in taken.jobs]
            answers = await queue.Ack(queue_pb2.AckRequest(org="quiet", acks=acks), timeout=PATIENCE_S)
            assert list(answers.answers) == [job_pb2.JOB_ANSWER_OK]
            rounds += 1
            if rounds == 3:
                served.set()
            # The org is quiet, so it pauses.
            await asyncio.sleep(PAUSE_S)

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
    """Returns the router's peak memory during an attack, and what the attackers saw. During the attack, a quiet org
    makes calls."""
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
    attack = leave_answers_unread(
        routers.address,
        GET_JOBS,
        request.SerializeToString(),
        calls=900,
        seconds=PATIENCE_S,
        # At the end of the attack, each call was refused, or the router has an answer that the attacker does not read.
        enough=lambda seen: seen.statuses.total() + len(seen.answering) >= 900,
    )
    peak, (seen,) = await peak_mib(routers, attack)
    assert peak < MEMORY_MIB
    # The calls for which the router had no memory were refused.
    assert seen.statuses.keys() == {RESOURCE_EXHAUSTED}
    until(lambda: resident_mib(routers) < before + 64, "the memory is given back")


async def test_requests_whose_last_byte_never_comes_stay_within_the_memory_of_the_router(routers: Routers) -> None:
    before = resident_mib(routers)
    attack = leave_requests_unfinished(
        routers.address, ENQUEUE, size_bytes=15 * MIB, calls=120, connections=4, seconds=PATIENCE_S
    )
    peak, seen = await peak_mib(routers, attack)
    assert peak < MEMORY_MIB
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


async def test_streams_that_wait_for_many_queues_take_more_places(routers: Routers) -> None:
    first = queue_pb2.ConsumeRequest(start=start("waiting", *(f"queue-{at}" for at in range(64))), credit=1)
    attack = leave_answers_unread(
        routers.address,
        CONSUME,
        first.SerializeToString(),
        calls=1_200,
        connections=2,
        seconds=PATIENCE_S,
        ends=False,
        # At the end of the attack each call of a connection was refused, or has become a stream.
        enough=lambda seen: seen.statuses.total() + len(seen.answering) >= 600,
    )
    _, seen = await peak_mib(routers, attack)
    # One org has half of the 10,000 places, and each of these streams takes five places.
    assert sum(len(one.answering) for one in seen) <= 1_000
    refused = sum((one.statuses for one in seen), Counter[int]())
    assert refused.keys() == {RESOURCE_EXHAUSTED}


async def test_streams_keep_nothing_of_messages_that_are_done_with(routers: Routers) -> None:
    before = resident_mib(routers)
    first = queue_pb2.ConsumeRequest(start=start("padded")).SerializeToString() + padding(6)
    # The total size of the messages is larger than the allowed growth of the router's memory.
    attack = leave_answers_unread(
        routers.address,
        CONSUME,
        first,
        calls=120,
        connections=3,
        seconds=PATIENCE_S,
        ends=False,
        enough=lambda seen: seen.request_bytes_sent > 80 * MIB,
    )
    peak, seen = await peak_mib(routers, attack)
    assert sum(one.request_bytes_sent for one in seen) > 160 * MIB
    assert peak < before + 150
    until(lambda: resident_mib(routers) < before + 64, "the memory is given back")


# EMPTY_ITEMS: field 2 with length 0, again and again. EMPTY_PATHS: a field mask with the same number of empty paths.
EMPTY_ITEMS = b"\x0a\x04many" + b"\x12\x00" * (15 * MIB // 2)
EMPTY_PATHS = b"\x22" + bytes((0x80, 0x80, 0x80 | 15 << 6 & 0x7F, 15 >> 1)) + b"\x0a\x00" * (15 * MIB // 2)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/windrow.v1.Queue/Enqueue", EMPTY_ITEMS),
        ("/windrow.v1.Queue/GetJobs", EMPTY_ITEMS),
        ("/windrow.v1.Queue/Ack", EMPTY_ITEMS),
        ("/windrow.v1.Admin/UpdateQueue", EMPTY_PATHS),
    ],
)
async def test_a_request_of_millions_of_empty_items_costs_no_more_than_any_other(
    routers: Routers, path: str, message: bytes
) -> None:
    before = resident_mib(routers)
    attack = leave_answers_unread(
        routers.address, path, message, calls=2, seconds=PATIENCE_S, enough=lambda seen: seen.statuses.total() == 2
    )
    peak, (seen,) = await peak_mib(routers, attack)
    assert seen.statuses == {INVALID_ARGUMENT: 2}
    assert peak < before + 128


async def test_calls_that_are_reset_at_once_are_refused_and_do_not_fill_the_event_loop(routers: Routers) -> None:
    before = resident_mib(routers)
    attack = reset_rapidly(routers.address, ENQUEUE, count=20_000, connections=2, seconds=PATIENCE_S)
    peak, seen = await peak_mib(routers, attack)
    assert peak < before + 128
    # Either gRPC refuses the calls above the limit of a connection, or the router closes the connection.
    assert all(one.closed_after_s is not None or sum(one.resets.values()) > 15_000 for one in seen)


async def test_an_edge_closes_connections_that_reset_their_calls(routers: Routers, tmp_path: Path) -> None:
    with running_edge(routers.address, tmp_path) as edge:
        async with quiet_org(edge):
            seen = await reset_rapidly(edge, ENQUEUE, count=20_000, connections=2, seconds=PATIENCE_S)
            # The quiet org's calls go through the same edge, and all succeed.
    assert all(one.closed_after_s is not None for one in seen)


async def test_a_connection_is_told_how_many_calls_it_may_have(routers: Routers) -> None:
    async with open_peer(routers.address) as peer:
        await peer.until(lambda seen: seen.settings, within_s=PATIENCE_S)
        assert {code: value for code, value in peer.seen.settings.items() if value == 1000}


def test_what_attackers_do_is_no_error_in_the_log(routers: Routers) -> None:
    assert "Traceback" not in routers.log.read_text()
