"""Tests the method Consume: what a stream sends and in which order, how the stream ends, and which jobs the router
releases when the stream ends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import grpc
import psutil
import pytest
from google.protobuf.duration_pb2 import Duration
from google.rpc import code_pb2, error_details_pb2

from embedded import BinariesNotFound, Clusters, open_clusters
from router.buffer import Buffer
from router.codec.fast_write import Delivery
from router.codec.status import InvalidRequest
from router.fleet.fleet import Fleet
from router.fleet.org_pools import OrgPools
from router.fleet.revocations import Revocations
from router.fleet.starts import Starts
from router.gate.admission import Context, Gate
from router.gate.call import Call
from router.gate.calls import Methods, Received
from router.gate.tracing import Tracing
from router.services.consume_stream import Stream as RoutersStream
from router.services.queue import QueueService
from shard.errors import ShardUnavailable
from shard.lease_token import lease_of, token, token_prefix
from shard.placement.slots import Placement
from shard.queue.store import Store
from shard.vocabulary import Lease, Micros, ShardName
from tests.jobs import job_id
from tests.postgres import Server, kill
from tests.routers import PATIENCE_S, Routers, ending, running_routers, write_cluster
from tests.streams import (
    NOT_FOUND,
    OK,
    QUEUE,
    STALE,
    Client,
    Stream,
    acks,
    client,
    extends,
    new_job,
    refused_fields,
    retry_after_s,
    sql,
    start,
    until,
    window,
)
from windrow.v1 import admin_pb2, job_pb2, queue_pb2

SHARDS = ("s1", "s2")
# The pause between sweeps is longer than a test, so that no sweep hides a lost wake-up.
NEVER_S = 3600.0


@pytest.fixture(scope="module")
def dsns(postgres: Server) -> dict[str, str]:
    return {shard: postgres.create(f"streams_{shard}") for shard in SHARDS}


@pytest.fixture(scope="module")
def routers(dsns: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Generator[Routers, None, None]:
    """Starts one router process with two shards, which are on one server."""
    with running_routers(write_cluster(tmp_path_factory.mktemp("streams") / "cluster.toml", dsns)) as running:
        yield running


@pytest.fixture
async def near(routers: Routers) -> AsyncGenerator[Client, None]:
    async with client(routers.address) as opened:
        yield opened


@pytest.fixture(scope="module")
def unswept(dsns: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Generator[Routers, None, None]:
    """A router that never sweeps, for tests of jobs that must arrive at once."""
    config = tmp_path_factory.mktemp("unswept") / "cluster.toml"
    with running_routers(write_cluster(config, dsns, sweep_seconds=NEVER_S)) as running:
        yield running


@pytest.fixture
async def prompt(unswept: Routers) -> AsyncGenerator[Client, None]:
    async with client(unswept.address) as opened:
        yield opened


@pytest.fixture
async def org(near: Client) -> str:
    """Returns a new org on s1. The org has a queue `mail`."""
    return await near.org_on("s1")


async def states(near: Client, org: str, *ids: str) -> Counter[str]:
    return Counter(job_pb2.JobState.Name(job.state).removeprefix("JOB_STATE_") for job in await near.get(org, *ids))


async def attempts_ended(near: Client, org: str, one: str) -> list[job_pb2.AttemptOutcome.ValueType]:
    (job,) = await near.get(org, one)
    return [attempt.outcome for attempt in job.attempts]


# ── What a stream may say ────────────────────────────────────────────────────────────────────────────────────────────

TOKEN = token(token_prefix(ShardName("s1"), 7), job_id())
NACK = queue_pb2.Nack(lease=TOKEN)
BAD_STARTS: dict[str, tuple[queue_pb2.ConsumeStart, str]] = {
    "no org": (start(""), "start.org"),
    "a control character in the org": (start("a\x01b"), "start.org"),
    "an org of 129 bytes": (start("ä" * 64 + "a"), "start.org"),
    "a bad queue": (start("o", "good", "b d"), "start.queues[1]"),
    "a queue twice": (start("o", "a", "a"), "start.queues"),
    "65 queues": (start("o", *(f"q{n}" for n in range(65))), "start.queues"),
    "a window of 99 ms": (start("o", window_s=0.099), "start.visibility_window"),
    "a window of more than 12 h": (start("o", window_s=43_201), "start.visibility_window"),
    "a worker with a newline": (start("o", worker="a\nb"), "start.worker"),
    "a worker of 129 bytes": (start("o", worker="w" * 129), "start.worker"),
    "a bad kind": (start("o", kinds=["good", "b d"]), "start.kinds[1]"),
    "65 kinds": (start("o", kinds=[f"k{n}" for n in range(65)]), "start.kinds"),
}
BAD_MESSAGES: dict[str, tuple[dict[str, Any], str]] = {
    "credit below 0": ({"credit": -1}, "credit"),
    "credit above 10,000": ({"credit": 10_001}, "credit"),
    "too many acks": ({"acks": [queue_pb2.Ack(lease=TOKEN)] * 1001}, "acks"),
    "too many nacks": ({"nacks": [NACK] * 1001}, "nacks"),
    "too many extends": ({"extends": extends(TOKEN) * 1001}, "extends"),
    "too many snoozes": ({"snoozes": [queue_pb2.Snooze(lease=TOKEN)] * 1001}, "snoozes"),
    "too many releases": ({"releases": [TOKEN] * 1001}, "releases"),
    "a result of more than 64 KiB": ({"acks": [queue_pb2.Ack(lease=TOKEN, result=b"r" * 65_537)]}, "acks[0].result"),
    "an empty lease to ack": ({"acks": [queue_pb2.Ack()]}, "acks[0].lease"),
    "a malformed lease to ack": (
        {"acks": [queue_pb2.Ack(lease=TOKEN), queue_pb2.Ack(lease=b"x" * 29)]},
        "acks[1].lease",
    ),
    "a malformed lease to nack": ({"nacks": [NACK, queue_pb2.Nack(lease=TOKEN[:28])]}, "nacks[1].lease"),
    "a malformed lease to extend": ({"extends": extends(TOKEN, TOKEN + b"x")}, "extends[1].lease"),
    "a malformed lease to release": ({"releases": [TOKEN, b"x"]}, "releases[1]"),
    "a lease of more than 255 bytes to release": ({"releases": [b"x" * 256]}, "releases[0]"),
    "a delay below 0": (
        {"nacks": [queue_pb2.Nack(lease=TOKEN, retry_after=Duration(seconds=-1))]},
        "nacks[0].retry_after",
    ),
    "a permanent failure to retry": (
        {"nacks": [queue_pb2.Nack(lease=TOKEN, retry_after=Duration(), failure=job_pb2.Failure(permanent=True))]},
        "nacks[0].retry_after",
    ),
    "a message with NUL": (
        {"nacks": [queue_pb2.Nack(lease=TOKEN, failure=job_pb2.Failure(message="a\0b"))]},
        "nacks[0].failure.message",
    ),
    "a stack of more than 32 KiB": (
        {"nacks": [queue_pb2.Nack(lease=TOKEN, failure=job_pb2.Failure(stack="e" * 32_769))]},
        "nacks[0].failure.stack",
    ),
    "a window of 99 ms": ({"extends": extends(TOKEN), "visibility_window": window(0.099)}, "visibility_window"),
    "a window of more than 12 h, without extends": ({"visibility_window": window(43_201)}, "visibility_window"),
    "a lease that is acked twice": ({"acks": [queue_pb2.Ack(lease=TOKEN)] * 2}, "acks[1].lease"),
    "a lease that is acked and released": ({"acks": [queue_pb2.Ack(lease=TOKEN)], "releases": [TOKEN]}, "releases[0]"),
    "a malformed lease to snooze": ({"snoozes": [queue_pb2.Snooze(lease=TOKEN + b"x")]}, "snoozes[0].lease"),
    "a snooze of more than 3,650 days": (
        {"snoozes": [queue_pb2.Snooze(lease=TOKEN, after=Duration(seconds=315_360_001))]},
        "snoozes[0].after",
    ),
    "a lease that is released and snoozed": (
        {"releases": [TOKEN], "snoozes": [queue_pb2.Snooze(lease=TOKEN)]},
        "snoozes[0].lease",
    ),
    "a second start": ({"start": start("other")}, "start"),
}


@pytest.mark.parametrize("why", BAD_STARTS)
async def test_a_stream_that_starts_wrongly_is_refused_by_path(near: Client, why: str) -> None:
    begun, field = BAD_STARTS[why]
    stream = Stream(near.queue)
    await stream.send(start=begun, credit=1)
    error = await stream.refusal()
    assert (error.code(), refused_fields(error)) == (grpc.StatusCode.INVALID_ARGUMENT, [field])


async def test_a_stream_that_says_anything_before_its_start_is_refused(near: Client) -> None:
    stream = Stream(near.queue)
    await stream.send(credit=1)
    error = await stream.refusal()
    assert (error.code(), refused_fields(error)) == (grpc.StatusCode.INVALID_ARGUMENT, ["start"])


async def test_a_stream_that_says_nothing_and_closes_its_side_ends_in_order(near: Client) -> None:
    stream = Stream(near.queue)
    await stream.half_close()
    assert (await stream.end(), stream.messages) == (grpc.StatusCode.OK, [])


@pytest.mark.parametrize("why", BAD_MESSAGES)
async def test_a_bad_message_ends_its_stream_by_path_and_no_other(near: Client, org: str, why: str) -> None:
    fields, field = BAD_MESSAGES[why]
    async with near.stream(org, credit=1) as stream, near.stream(org, "other", credit=1) as other:
        await stream.send(request_id=1, **fields)
        error = await stream.refusal()
        assert (error.code(), refused_fields(error)) == (grpc.StatusCode.INVALID_ARGUMENT, [field])
        await near.enqueue(org, new_job(queue="other"))
        await other.until_jobs(1)


@pytest.mark.parametrize("why", [why for why in BAD_MESSAGES if "start" not in why])
async def test_a_bad_message_with_the_start_is_refused_too(near: Client, org: str, why: str) -> None:
    fields, field = BAD_MESSAGES[why]
    stream = Stream(near.queue)
    await stream.send(start=start(org), request_id=1, **fields)
    error = await stream.refusal()
    assert (error.code(), refused_fields(error)) == (grpc.StatusCode.INVALID_ARGUMENT, [field])


async def test_credit_is_counted_up_to_ten_thousand_outstanding(near: Client, org: str) -> None:
    async with near.stream(org, credit=10_000) as stream:
        await near.enqueue(org, new_job())
        await stream.until_jobs(1)
        # The job has used up one credit, so the client may send one more credit.
        await stream.send(credit=1)
        await stream.settle(1, acks=acks(stream.jobs))
        await stream.send(credit=1)
        error = await stream.refusal()
        assert (error.code(), refused_fields(error)) == (grpc.StatusCode.INVALID_ARGUMENT, ["credit"])


async def test_jobs_that_wait_to_be_sent_go_back_uncounted_when_a_stream_is_refused(near: Client, org: str) -> None:
    # The jobs have 15 MB, because on a busy machine the buffers between router and client may hold 6 MB.
    ids = await near.enqueue(org, *(new_job(payload=b"x" * 150_000) for _ in range(100)))
    async with near.stream(org, credit=1000, reads=False) as stream:
        await until(lambda: leased(near, org, ids), "the router took jobs that it cannot send")
        await stream.send(start=start(org))

        async def gave_back() -> bool:
            return not await leased(near, org, ids)

        # A client that reads before the router has seen the message above may get all jobs.
        await until(gave_back, "the router gave back what it had not sent")
        stream.read()
        error = await stream.refusal()
        assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert len(stream.jobs) < 100
        # The router has also released the jobs of the message that it was writing, no matter whether the message
        # arrived. If the message arrived, its leases are stale.
        await assert_back(near, org, ids, stream, unsure=25)


async def leased(near: Client, org: str, ids: Sequence[str]) -> bool:
    """Returns whether so many of these jobs are leased that they do not fit into a client's flow-control windows."""
    return (await states(near, org, *ids))["LEASED"] >= 60


async def assert_back(
    near: Client, org: str, ids: Sequence[str], *streams: Stream, unsure: int = 0, being_sent: int = 0
) -> None:
    """Asserts that all jobs that these streams did not get can be claimed at once, and that no attempt was counted for
    them. Among the jobs that the streams got, up to `unsure` may be claimed too. Up to `being_sent` jobs may stay
    leased, because gRPC had already taken their messages."""
    got = {job.id for stream in streams for job in stream.jobs}
    rest = {one for one in ids if one not in got}
    found: dict[str, int] = {}

    async def take() -> bool:
        found.update((job.id, job.attempt) for job in await near.dequeue(org, max_jobs=1000))
        return len(rest - found.keys()) <= being_sent

    await until(take, "what was not sent is to be had")
    assert set(found.values()) <= {1}
    assert len(found.keys() - rest) <= unsure


# ── Credit and order ─────────────────────────────────────────────────────────────────────────────────────────────────


async def test_never_more_jobs_come_than_there_is_credit_for(near: Client, org: str) -> None:
    async with near.stream(org) as stream:
        ids = await near.enqueue(org, *(new_job() for _ in range(40)))
        seen = 0
        for credit in (1, 2, 3, 5, 8, 13):
            seen += credit
            await stream.send(credit=credit)
            await stream.until_jobs(seen)
            # The stream has no credit left. Meanwhile older jobs wait, and new jobs are enqueued.
            ids += await near.enqueue(org, *(new_job() for _ in range(3)))
            # The answer to this request comes after everything that the router was sending before.
            await stream.settle(seen, releases=[TOKEN])
            assert len(stream.jobs) == seen
        await stream.send(credit=1000)
        await stream.until_jobs(len(ids))
    # The oldest jobs come first.
    assert {job.id for job in stream.jobs[:32]} <= set(ids[:40])
    assert {job.id for job in stream.jobs} == set(ids)
    assert len(stream.jobs) == len(ids)


async def test_a_stream_without_credit_gets_nothing_and_takes_nothing_from_others(near: Client, org: str) -> None:
    async with near.stream(org) as poor, near.stream(org, credit=2) as rich:
        ids = await near.enqueue(org, new_job(), new_job())
        assert {job.id for job in await rich.until_jobs(2)} == set(ids)
        assert poor.jobs == []


async def test_a_backlog_comes_by_priority_and_then_by_time(near: Client, org: str) -> None:
    jobs = [new_job(priority=priority) for priority in (5, 9, 1, 5, 1, 9, 3)]
    for job in jobs:
        await near.enqueue(org, job)
    async with near.stream(org, credit=3) as stream:
        await stream.until_jobs(3)
        await stream.send(credit=100)
        got = await stream.until_jobs(len(jobs))
    assert [job.id for job in got] == [job.id for job in sorted(jobs, key=lambda job: job.template.priority)]
    assert [(job.priority, job.attempt, job.max_attempts, job.queue, job.kind) for job in got][:1] == [
        (1, 1, 20, QUEUE, "greet")
    ]


async def test_a_large_backlog_comes_in_messages_that_any_client_takes(near: Client, org: str) -> None:
    # This client accepts messages of at most 4 MiB. One more byte in a message would end the stream.
    payloads = [size * 1024 for size in (1024, 900, 1024, 1, 600, 1024, 1023, 0, 700, 1024)]
    ids = [(await near.enqueue(org, new_job(payload=b"\xff" * size)))[0] for size in payloads]
    async with near.stream(org, credit=100) as stream:
        got = await stream.until_jobs(len(payloads))
        assert [(job.id, len(job.payload)) for job in got] == list(zip(ids, payloads, strict=True))
        assert await stream.settle(1, acks=acks(got)) == []


async def test_jobs_are_handed_over_whole(near: Client, org: str) -> None:
    async with near.stream(org, credit=10, worker="me") as stream:
        await until(lambda: parked(near, org, [stream]), "it waits")
        before = len(stream.jobs)
        job = new_job(payload="päyload\0".encode(), priority=2, kind="a/b")
        await near.enqueue(org, job)
        got = (await stream.until_jobs(before + 1))[-1]
        record = await near.job(org, job.id)
        assert (got.payload, got.priority, got.kind, got.queue) == (job.template.payload, 2, "a/b", QUEUE)
        assert (got.attempt, got.max_attempts, dict(got.attributes)) == (1, 20, {})
        assert (got.enqueued_at, got.run_at) == (record.enqueued_at, record.run_at)
        assert (record.state, record.worker, record.attempt) == (job_pb2.JOB_STATE_LEASED, "me", 1)
        assert record.lease_deadline.ToNanoseconds() - got.enqueued_at.ToNanoseconds() == 60_000_000_000


async def test_jobs_with_attributes_and_traces_come_whole(near: Client, org: str) -> None:
    trace = job_pb2.TraceContext(traceparent=f"00-{'a' * 32}-{'b' * 16}-01", tracestate="k=v w=x")
    jobs = [
        new_job(attributes={"schlüssel": "wért ✓", "": ""} | {"k" * 128: "v" * 1024}, trace=trace)
        if at
        else new_job(attributes={"a": "b"}, max_attempts=3)
        for at in range(2)
    ]
    del jobs[1].template.attributes[""]
    async with near.stream(org, credit=10) as stream:
        await near.dequeue(org)
        await near.enqueue(org, *jobs)
        got = {job.id: job for job in await stream.until_jobs(2)}
    assert [dict(got[job.id].attributes) for job in jobs] == [dict(job.template.attributes) for job in jobs]
    assert got[jobs[1].id].trace == trace
    assert not got[jobs[0].id].HasField("trace")
    assert [got[job.id].max_attempts for job in jobs] == [3, 20]


async def test_one_consumer_serves_sixty_four_queues(near: Client, org: str) -> None:
    queues = [f"q{number}" for number in range(64)]
    async with near.stream(org, *queues, credit=1000) as stream:
        await near.enqueue(org, *(new_job(queue=queue) for queue in queues), new_job(queue="unheard-of"))
        await stream.until_jobs(64)
        for queue in reversed(queues):
            await near.enqueue(org, new_job(queue=queue))
        got = await stream.until_jobs(128)
    assert Counter(job.queue for job in got) == dict.fromkeys(queues, 2)


async def test_orgs_do_not_get_each_others_jobs_nor_settle_them(near: Client) -> None:
    mine, theirs, far = await near.org_on("s1"), await near.org_on("s1"), await near.org_on("s2")
    async with (
        near.stream(mine, credit=10) as stream,
        near.stream(theirs, credit=10) as other,
        near.stream(far, credit=10) as distant,
    ):
        ids = {one: (await near.enqueue(one))[0] for one in (mine, theirs, far)}
        for which, one in ((stream, mine), (other, theirs), (distant, far)):
            assert [job.id for job in await which.until_jobs(1)] == [ids[one]]
        for foreign in (other.jobs, distant.jobs):
            leases = [job.lease for job in foreign]
            assert await stream.settle(1, acks=acks(foreign)) == [NOT_FOUND]
            assert await stream.settle(
                2, nacks=[queue_pb2.Nack(lease=leases[0], failure=job_pb2.Failure(permanent=True))]
            ) == [NOT_FOUND]
            assert await stream.settle(3, extends=extends(*leases)) == [NOT_FOUND]
            assert await stream.settle(4, releases=leases) == [NOT_FOUND]
            stream.settled.clear()
        for which, one in ((stream, mine), (other, theirs), (distant, far)):
            assert [job.id for job in which.jobs] == [ids[one]]
            assert await which.settle(9, acks=acks(which.jobs)) == []


async def test_a_paused_queue_gives_nothing_until_it_is_resumed(near: Client, org: str) -> None:
    async with near.stream(org, "mail", "other", credit=10) as stream:
        await near.dequeue(org)
        await near.admin.PauseQueue(admin_pb2.PauseQueueRequest(org=org, queue=QUEUE))
        # The stream gets no jobs of the paused queue, neither by a hand-over nor by a claim. It still gets the jobs of
        # the other queue.
        paused = await near.enqueue(org, new_job(), new_job(attributes={"a": "b"}))
        ids = await near.enqueue(org, new_job(queue="other"))
        assert [job.id for job in await stream.until_jobs(1)] == ids
        ids = await near.enqueue(org, new_job(queue="other"))
        await stream.until_jobs(2)
        assert [job.queue for job in stream.jobs] == ["other"] * 2
        assert [job.attempt for job in await near.get(org, *paused)] == [0, 0]
        await near.admin.ResumeQueue(admin_pb2.ResumeQueueRequest(org=org, queue=QUEUE))
        got = await stream.until_jobs(4)
        assert {job.id: job.attempt for job in got[2:]} == dict.fromkeys(paused, 1)


# ── Several streams ──────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_batch_is_dealt_evenly_to_those_who_wait(near: Client, org: str) -> None:
    async with contextlib.AsyncExitStack() as stack:
        streams = [await stack.enter_async_context(near.stream(org, credit=1000)) for _ in range(4)]
        await until(lambda: parked(near, org, streams), "all four wait")
        before = [len(stream.jobs) for stream in streams]
        ids = await near.enqueue(org, *(new_job() for _ in range(100)))
        await until(lambda: sum(len(stream.jobs) for stream in streams) == 100 + sum(before), "all have come")
        assert [len(stream.jobs) - was for stream, was in zip(streams, before, strict=True)] == [25] * 4
        assert {job.id for stream in streams for job in stream.jobs} >= set(ids)


async def parked(near: Client, org: str, streams: Sequence[Stream]) -> bool:
    """Enqueues a batch. Returns whether every stream has got its share of the batch, which shows that the stream
    waits."""
    before = [len(stream.jobs) for stream in streams]
    count = len(streams)
    ids = await near.enqueue(org, *(new_job() for _ in range(count)))
    await until(lambda: sum(len(stream.jobs) for stream in streams) == sum(before) + count, "the probe has come")
    handed_over = [
        # A claim happens later than the enqueue, and a hand-over at the same time as the enqueue.
        job.lease_deadline.ToNanoseconds() - job.enqueued_at.ToNanoseconds() == 60_000_000_000
        for job in await near.get(org, *ids)
    ]
    return all(handed_over) and [len(stream.jobs) for stream in streams] == [was + 1 for was in before]


async def test_single_jobs_go_round_those_who_wait(near: Client, org: str) -> None:
    async with contextlib.AsyncExitStack() as stack:
        streams = [await stack.enter_async_context(near.stream(org, credit=1000)) for _ in range(5)]
        await until(lambda: parked(near, org, streams), "all five wait")
        before = [len(stream.jobs) for stream in streams]
        for _ in range(50):
            await near.enqueue(org)
        await until(lambda: sum(len(stream.jobs) for stream in streams) == 50 + sum(before), "all have come")
        assert [len(stream.jobs) - was for stream, was in zip(streams, before, strict=True)] == [10] * 5


async def test_no_stream_starves_while_several_share_a_backlog(near: Client, org: str) -> None:
    for _ in range(4):
        await near.enqueue(org, *(new_job() for _ in range(500)))
    async with contextlib.AsyncExitStack() as stack:
        streams = [await stack.enter_async_context(near.stream(org, credit=10)) for _ in range(4)]

        async def work(stream: Stream) -> None:
            done = 0
            # Work until one stream has enough jobs for the comparison.
            while max(len(one.jobs) for one in streams) < 800 and sum(len(one.jobs) for one in streams) < 2000:
                await stream.until(
                    lambda: len(stream.jobs) > done or sum(len(one.jobs) for one in streams) >= 2000,  # noqa: B023
                    "more jobs",
                )
                fresh, done = stream.jobs[done:], len(stream.jobs)
                await stream.send(request_id=done, acks=acks(fresh), credit=len(fresh))

        async with asyncio.timeout(PATIENCE_S):
            working = [asyncio.create_task(work(stream)) for stream in streams]
            # Do not wait for all streams: one may wait for a last job that another stream got.
            await asyncio.wait(working, return_when=asyncio.FIRST_COMPLETED)
            for one in working:
                one.cancel()
            for outcome in await asyncio.gather(*working, return_exceptions=True):
                assert outcome is None or isinstance(outcome, asyncio.CancelledError), outcome
        shares = sorted(len(stream.jobs) for stream in streams)
        assert shares[0] > shares[-1] / 4, shares
    everyone = [job.id for stream in streams for job in stream.jobs]
    assert len(set(everyone)) == len(everyone)


# ── Settling ─────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_one_message_is_answered_by_the_leases_that_are_not_ok(near: Client, org: str) -> None:
    ids = await near.enqueue(org, *(new_job() for _ in range(8)))
    unknown = [token(token_prefix(ShardName("s1"), 1), job_id()) for _ in range(2)]
    elsewhere = token(token_prefix(ShardName("no such shard"), 1), job_id())
    async with near.stream(org, credit=8) as stream:
        jobs = {job.id: job for job in await stream.until_jobs(8)}
        assert {job.org for job in jobs.values()} == {org}
        held = [jobs[one].lease for one in ids]
        acked, stale_nack, stale_extend = held[5:]
        assert await stream.settle(1, acks=[queue_pb2.Ack(lease=lease, result=b"first") for lease in held[5:]]) == []
        assert await stream.settle(
            -(2**63),
            acks=[queue_pb2.Ack(lease=lease) for lease in (held[0], unknown[0], held[1], acked)],
            nacks=[
                queue_pb2.Nack(lease=lease, failure=job_pb2.Failure(message="e")) for lease in (stale_nack, held[2])
            ],
            extends=extends(held[3], elsewhere, stale_extend),
            releases=[unknown[1], held[4]],
        ) == [OK, NOT_FOUND, OK, OK, STALE, OK, OK, NOT_FOUND, STALE, NOT_FOUND, OK]
        # If the requests are repeated, the answers are the same.
        assert (
            await stream.settle(
                2**63 - 1,
                acks=[queue_pb2.Ack(lease=held[0])],
                releases=[held[4]],
                nacks=[queue_pb2.Nack(lease=held[2])],
            )
            == []
        )
        assert await stream.settle(3, acks=[queue_pb2.Ack(lease=held[4])]) == [STALE]
    record = await near.job(org, ids[3])
    assert (record.state, record.attempt) == (job_pb2.JOB_STATE_LEASED, 1)


async def test_an_extend_of_a_lease_that_the_same_message_settles_is_left_out(near: Client, org: str) -> None:
    await near.enqueue(org, *(new_job() for _ in range(5)))
    async with near.stream(org, credit=5) as stream:
        jobs = await stream.until_jobs(5)
        held = [job.lease for job in jobs]
        await stream.send(
            request_id=1,
            acks=[queue_pb2.Ack(lease=held[0])],
            nacks=[queue_pb2.Nack(lease=held[1], retry_after=Duration(seconds=60))],
            releases=[held[2]],
            snoozes=[queue_pb2.Snooze(lease=held[4], after=Duration(seconds=60))],
            extends=extends(*held),
        )
        assert await stream.answer(1) == queue_pb2.Settled(request_id=1)
    states = [(await near.job(org, job.id)).state for job in jobs]
    assert states == [
        job_pb2.JOB_STATE_SUCCEEDED,
        job_pb2.JOB_STATE_SCHEDULED,
        job_pb2.JOB_STATE_READY,
        job_pb2.JOB_STATE_LEASED,
        job_pb2.JOB_STATE_SCHEDULED,
    ]


async def test_a_message_that_is_all_ok_is_answered_with_its_request_id_only(near: Client, org: str) -> None:
    await near.enqueue(org, *(new_job() for _ in range(1000)))
    async with near.stream(org, credit=1000) as stream:
        jobs = await stream.until_jobs(1000)
        await stream.send(request_id=77, acks=acks(jobs))
        assert await stream.answer(77) == queue_pb2.Settled(request_id=77)


@pytest.mark.parametrize(
    "fields",
    [
        {"acks": [queue_pb2.Ack(lease=TOKEN)]},
        {"nacks": [NACK]},
        {"extends": [queue_pb2.Extend(lease=TOKEN)]},
        {"releases": [TOKEN]},
    ],
    ids=lambda fields: next(iter(fields)),
)
async def test_a_message_that_names_leases_without_a_request_id_is_refused(
    near: Client, org: str, fields: dict[str, Any]
) -> None:
    async with near.stream(org) as stream:
        await stream.send(**fields)
        error = await stream.refusal()
        assert (error.code(), refused_fields(error)) == (grpc.StatusCode.INVALID_ARGUMENT, ["request_id"])


async def test_a_message_that_is_too_large_is_answered_with_the_limit_and_the_stream_goes_on(
    near: Client, org: str
) -> None:
    await near.enqueue(org, *(new_job() for _ in range(300)))
    async with near.stream(org, credit=300) as stream:
        jobs = await stream.until_jobs(300)
        large = [queue_pb2.Ack(lease=job.lease, result=b"r" * 65_536) for job in jobs]
        await stream.send(request_id=3_000_000_000, acks=large, credit=7)
        settled = await stream.answer(3_000_000_000)
        assert (settled.error.code, list(settled.not_ok)) == (code_pb2.INVALID_ARGUMENT, [])
        assert "bytes, and at most 16,777,216 are allowed" in settled.error.message
        reason = error_details_pb2.ErrorInfo()
        assert settled.error.details[0].Unpack(reason)
        assert reason.reason == "MESSAGE_TOO_LARGE"
        # No settlement of the message was executed. Each half of the message is accepted on the same stream.
        assert await stream.settle(1, acks=large[:150]) == []
        assert await stream.settle(2, acks=large[150:]) == []
    assert await states(near, org, *(job.id for job in jobs)) == {"SUCCEEDED": 300}


async def test_a_message_that_is_too_large_and_has_no_request_id_ends_the_stream(near: Client, org: str) -> None:
    large = [queue_pb2.Ack(lease=TOKEN, result=b"r" * 65_536)] * 300
    async with near.stream(org) as stream:
        await stream.send(acks=large)
        error = await stream.refusal()
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "bytes, and at most 16,777,216 are allowed" in (error.details() or "")
    first = Stream(near.queue)
    await first.send(start=start(org), acks=large, request_id=1)
    assert (await first.refusal()).code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_messages_with_nothing_to_settle_are_not_answered(near: Client, org: str) -> None:
    async with near.stream(org) as stream:
        await stream.send(request_id=1, credit=0)
        await stream.send(request_id=2)
        await stream.send(request_id=3, credit=5)
        assert await stream.settle(4, releases=[TOKEN]) == [NOT_FOUND]
        await stream.half_close()
    assert list(stream.settled) == [4]


async def test_leases_of_other_streams_calls_and_shards_are_settled_by_any_stream(near: Client, org: str) -> None:
    far = await near.org_on("s2")
    await near.enqueue(org, new_job(), new_job(queue="other"))
    await near.enqueue(far)
    (by_call,) = await near.dequeue(org, "other")
    async with near.stream(org, credit=1) as one, near.stream(org) as another, near.stream(far, credit=1) as distant:
        (by_stream,), (foreign,) = await one.until_jobs(1), await distant.until_jobs(1)
        # The leases of one message may be on two shards, as after a move.
        assert await another.settle(1, acks=acks([foreign, by_stream, by_call])) == [NOT_FOUND, OK, OK]
        assert await another.settle(2, releases=[foreign.lease]) == [NOT_FOUND]
        assert await distant.settle(1, acks=acks([by_stream, foreign])) == [NOT_FOUND, OK]
    assert await states(near, org, by_stream.id, by_call.id) == {"SUCCEEDED": 2}


async def test_what_a_stream_releases_or_nacks_comes_back_to_it_at_once(prompt: Client, org: str) -> None:
    (one,) = await prompt.enqueue(org)
    async with prompt.stream(org, credit=3) as stream:
        (first,) = await stream.until_jobs(1)
        assert await stream.settle(1, releases=[first.lease]) == []
        second = (await stream.until_jobs(2))[1]
        assert (second.id, second.attempt) == (one, 1)
        assert (
            await stream.settle(
                2,
                nacks=[
                    queue_pb2.Nack(lease=second.lease, failure=job_pb2.Failure(message="no"), retry_after=Duration())
                ],
            )
            == []
        )
        third = (await stream.until_jobs(3))[2]
        assert (third.id, third.attempt) == (one, 2)
        assert len({job.lease for job in stream.jobs}) == 3
        assert await stream.settle(3, acks=acks(stream.jobs)) == [STALE, STALE, OK]


async def test_an_extend_lasts_for_its_messages_window_or_the_streams(near: Client, org: str) -> None:
    (one,) = await near.enqueue(org)
    (job,) = await near.dequeue(org, window_s=10)
    async with near.stream(org, window_s=3600) as stream:
        assert await stream.settle(1, extends=extends(job.lease)) == []
        record = await near.job(org, one)
        left_s = (record.lease_deadline.ToNanoseconds() - record.run_at.ToNanoseconds()) / 1e9
        assert left_s > 3599
        assert await stream.settle(2, extends=extends(job.lease), visibility_window=window(7200)) == []
        record = await near.job(org, one)
        assert (record.lease_deadline.ToNanoseconds() - record.run_at.ToNanoseconds()) / 1e9 > 7199


# ── How a stream ends ────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_half_close_ends_in_order_after_every_answer(near: Client, org: str) -> None:
    await near.enqueue(org, *(new_job() for _ in range(300)))
    async with near.stream(org, credit=300) as stream:
        jobs = list(await stream.until_jobs(300))
        for at, job in enumerate(jobs):
            await stream.send(request_id=at + 1, acks=acks([job]))
        await stream.half_close()
        assert await stream.end() == grpc.StatusCode.OK
    assert set(stream.settled) == set(range(1, 301))
    assert [settled for settled in stream.settled.values() if settled.not_ok or settled.HasField("error")] == []
    assert await states(near, org, *(job.id for job in jobs)) == {"SUCCEEDED": 300}


@pytest.mark.parametrize("end", ["half-close", "cancel"])
async def test_jobs_that_were_not_sent_are_anothers_at_once_and_uncounted(near: Client, org: str, end: str) -> None:
    # The jobs have 15 MB, because on a busy machine the buffers between router and client may hold 6 MB.
    ids = await near.enqueue(org, *(new_job(payload=b"x" * 150_000) for _ in range(100)))
    async with near.stream(org, credit=1000, reads=False) as stream:
        await until(lambda: leased(near, org, ids), "the router took jobs that it cannot send")
        if end == "half-close":
            stream.read()
            await stream.half_close()
            assert await stream.end() == grpc.StatusCode.OK
            await assert_back(near, org, ids, stream)
        else:
            await stream.cancel()
            # Jobs that were sent but never read stay leased. There are only few of them.
            found: dict[str, int] = {}

            async def take() -> bool:
                found.update((job.id, job.attempt) for job in await near.dequeue(org, max_jobs=1000))
                return len(found) >= 40

            await until(take, "what was not sent is to be had")
            assert set(found.values()) == {1}
    assert (await near.balanced(SHARDS))[org].accepted == 100


async def test_streams_that_close_while_jobs_are_claimed_for_them_leave_none_behind(near: Client, org: str) -> None:
    ids: list[str] = []
    got: list[str] = []
    for turn in range(60):
        ids += await near.enqueue(org, *(new_job() for _ in range(3)))
        async with near.stream(org, credit=3) as stream:
            # Close the stream at various moments: before, during and after its first claim.
            await asyncio.sleep(turn % 12 / 2000)
            await stream.half_close()
            assert await stream.end() == grpc.StatusCode.OK
            got += [job.id for job in stream.jobs]
            await near.queue.Ack(queue_pb2.AckRequest(org=org, acks=acks(stream.jobs))) if stream.jobs else None
    rest = {one for one in ids if one not in got}
    found: dict[str, int] = {}

    async def take() -> bool:
        found.update((job.id, job.attempt) for job in await near.dequeue(org, max_jobs=1000))
        return found.keys() >= rest

    await until(take, "what was not sent is to be had")
    assert found == dict.fromkeys(rest, 1)
    assert len(got) == len(set(got))


async def test_a_job_that_was_sent_stays_leased_when_its_stream_ends(near: Client, org: str) -> None:
    (one,) = await near.enqueue(org)
    async with near.stream(org, credit=1) as stream:
        await stream.until_jobs(1)
    assert await near.dequeue(org) == []
    async with near.stream(org, credit=1) as other:
        assert await other.settle(1, acks=acks(stream.jobs)) == []
    assert await states(near, org, one) == {"SUCCEEDED": 1}


async def test_jobs_come_to_nobody_after_a_half_close(prompt: Client, org: str) -> None:
    async with prompt.stream(org, credit=100) as stream, prompt.stream(org, credit=100) as other:
        await until(lambda: parked(prompt, org, [stream, other]), "both wait")
        await stream.half_close()
        before = len(stream.jobs), len(other.jobs)
        await prompt.enqueue(org, *(new_job() for _ in range(10)))
        await other.until_jobs(before[1] + 10)
        assert len(stream.jobs) == before[0]


# ── A consumer that does not read ────────────────────────────────────────────────────────────────────────────────────


async def test_a_consumer_that_does_not_read_neither_grows_the_router_nor_blocks_others(
    unswept: Routers, prompt: Client, org: str
) -> None:
    (pid,) = unswept.pids
    router = psutil.Process(pid)
    async with (
        client(unswept.address) as apart,
        prompt.stream(org, "other", credit=1000) as other,
        apart.stream(org, credit=10_000, reads=False),
    ):
        # The consumer that does not read waits for jobs, so that jobs are handed over to it.
        await until(lambda: handed(prompt, org), "the consumer that does not read has been handed a job")
        before_mb = router.memory_info().rss / 1e6
        for turn in range(50):
            # The jobs have 80 MB in total.
            await prompt.enqueue(org, *(new_job(payload=b"x" * 16_000) for _ in range(100)))
            await prompt.enqueue(org, new_job(queue="other"))
            await other.until_jobs(turn + 1)
        grown_mb = router.memory_info().rss / 1e6 - before_mb
        assert grown_mb < 50, f"the router grew by {grown_mb:.0f} MB"
        # A consumer that reads gets the jobs for which the other consumer has no room.
        async with prompt.stream(org, credit=10_000) as reader:
            await reader.until_jobs(3000)


async def handed(near: Client, org: str) -> bool:
    (one,) = await near.enqueue(org, new_job(payload=b"x"))
    return (await near.job(org, one)).attempt == 1


@dataclass(kw_only=True)
class Blocked:
    """A gRPC context whose writes never finish. It has only the methods that a stream uses."""

    writing: asyncio.Event

    async def send_initial_metadata(self, metadata: object) -> None:
        del metadata

    async def write(self, message: bytes) -> None:
        del message
        self.writing.set()
        await asyncio.Event().wait()


class _NoShards:
    """A fleet in which no token names a shard, so that every lease is answered NOT_FOUND at once."""

    def __init__(self) -> None:
        self.revocations = Revocations()
        self.starts = Starts(self._store_of, lambda: None)
        self.pools = OrgPools(dict, lambda _: (), self.starts)

    def _store_of(self, org: str) -> Store:
        raise ShardUnavailable(ShardName("none"), "there are no shards")

    def by_tag(self, tag: int) -> None:
        del tag

    def shards_to_claim_from(self, org: str) -> list[object]:
        del org
        return []

    def placement(self, org: str) -> Placement:
        del org
        return Placement(writes=(), reads=(), epoch=1)

    async def is_current(self, org: str, placement: Placement) -> bool:
        del org, placement
        return True


def a_gate() -> Gate:
    return Gate(Tracing(), Buffer(2**30))


def a_stream(
    first: queue_pb2.ConsumeRequest,
    messages: AsyncGenerator[Received, None],
    context: Blocked,
    fleet: _NoShards | None = None,
) -> RoutersStream:
    """Returns a stream of a router that has no shards."""
    gate = a_gate()
    call = Call(gate.buffer, peer="ipv4:127.0.0.1:1")
    told = Received(first, 0)
    return RoutersStream(cast("Fleet", fleet or _NoShards()), gate, call, told, messages, cast("Context", context))


@dataclass(kw_only=True)
class Read(Blocked):
    """A context whose client reads everything at once."""

    messages: asyncio.Queue[queue_pb2.ConsumeResponse] = field(default_factory=asyncio.Queue)

    async def write(self, message: bytes) -> None:
        self.messages.put_nowait(queue_pb2.ConsumeResponse.FromString(message))


class _Mute(_NoShards):
    """A fleet whose catalog does not answer, so that no lease is answered."""

    async def is_current(self, org: str, placement: Placement) -> bool:
        del org, placement
        await asyncio.Event().wait()
        return True


async def test_a_message_that_is_not_settled_in_time_is_answered_with_a_delay_for_its_repeat(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("router.services.consume_stream._SETTLE_S_MAX", 0.01)
    first = queue_pb2.ConsumeRequest(start=start("org"), request_id=7, releases=[TOKEN])
    context = Read(writing=asyncio.Event())
    serving = asyncio.create_task(a_stream(first, said(), context, _Mute()).run(asyncio.Event()))
    try:
        (settled,) = (await asyncio.wait_for(context.messages.get(), PATIENCE_S)).settled
    finally:
        serving.cancel()
        await asyncio.wait({serving})
    assert (settled.request_id, settled.error.code) == (7, code_pb2.DEADLINE_EXCEEDED)
    told = error_details_pb2.RetryInfo()
    assert any(detail.Unpack(told) for detail in settled.error.details)
    assert told.retry_delay.ToMilliseconds() == 1000


class _Faulty(_NoShards):
    def shards_to_claim_from(self, org: str) -> list[object]:
        raise ZeroDivisionError(f"a fault while jobs of org {org!r} are claimed")


async def test_a_fault_is_not_hidden_by_an_error_of_the_client_at_the_same_time(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def wrong() -> AsyncGenerator[Received, None]:
        yield Received(queue_pb2.ConsumeRequest(start=start("org")), 0)

    first = queue_pb2.ConsumeRequest(start=start("org"), credit=1)
    stream = a_stream(first, wrong(), Read(writing=asyncio.Event()), _Faulty())
    with caplog.at_level(logging.DEBUG, "router.services.consume_stream"), pytest.raises(ZeroDivisionError):
        await stream.run(asyncio.Event())
    (record,) = caplog.records
    assert record.levelno == logging.DEBUG
    assert record.exc_text is not None
    assert "InvalidRequest: start: is set again" in record.exc_text


async def test_a_consumer_that_sends_and_does_not_read_is_not_heard_any_more() -> None:
    heard = 0

    async def endless() -> AsyncGenerator[Received, None]:
        nonlocal heard
        while heard < 20_000:
            heard += 1
            # A message from the network also arrives only in a later event loop iteration.
            await asyncio.sleep(0)
            yield Received(queue_pb2.ConsumeRequest(request_id=heard, releases=[TOKEN]), 0)

    blocked = Blocked(writing=asyncio.Event())
    first = queue_pb2.ConsumeRequest(start=start("org"), credit=1)
    stream = a_stream(first, endless(), blocked)
    serving = asyncio.create_task(stream.run(asyncio.Event()))
    try:
        await asyncio.wait_for(blocked.writing.wait(), PATIENCE_S)
        before = -1
        while heard != before:
            before = heard
            for _ in range(50):
                await asyncio.sleep(0)
        assert heard < 1000, "the answers that it does not read are kept for it without bound"
    finally:
        serving.cancel()
        await asyncio.wait({serving})


@dataclass(kw_only=True)
class Slow(Blocked):
    """A stream's context that ends the write of a message only when the test lets the client read."""

    reads: asyncio.Semaphore

    async def write(self, message: bytes) -> None:
        del message
        self.writing.set()
        await self.reads.acquire()
        self.writing.clear()


@dataclass
class _Released:
    """A store that records released jobs."""

    released: asyncio.Queue[list[Lease]]

    def release_soon(self, org: str, leases: list[Lease]) -> None:
        assert org == "org"
        self.released.put_nowait(leases)


def some_given(store: _Released, *ids: str) -> Delivery:
    return Delivery(cast("Store", store), 7, Micros(0), ids, [b"job"] * len(ids))


async def test_jobs_that_wait_half_their_window_for_a_consumer_that_does_not_read_go_back() -> None:
    store = _Released(asyncio.Queue())
    context = Slow(writing=asyncio.Event(), reads=asyncio.Semaphore(0))
    first = queue_pb2.ConsumeRequest(start=start("org", window_s=2), credit=10)
    stream = a_stream(first, said(), context)
    serving = asyncio.create_task(stream.run(asyncio.Event()))
    consumer = stream._consumer
    try:
        await asyncio.sleep(0)
        sent, late, later = job_id(), [job_id(), job_id()], job_id()
        stream.receive(some_given(store, sent))
        await asyncio.wait_for(context.writing.wait(), PATIENCE_S)
        consumer.credit = 0
        began_s = asyncio.get_running_loop().time()
        stream.receive(some_given(store, *late))
        # The job of the message that is being written is not released, because the message may have arrived.
        gone = await asyncio.wait_for(store.released.get(), PATIENCE_S)
        assert gone == [lease_of(name, 7) for name in late]
        assert asyncio.get_running_loop().time() - began_s >= 1 * 0.99
        # The consumer has got the credit of the released jobs back, but gets no job before it has read.
        assert (consumer.credit, stream.is_full()) == (2, True)
        context.reads.release()
        await asyncio.wait_for(stream.reserve(0, ShardName("shard")), PATIENCE_S)
        stream.receive(some_given(store, later))
        await asyncio.wait_for(context.writing.wait(), PATIENCE_S)
    finally:
        serving.cancel()
        await asyncio.wait({serving})
    # The stream ended while this message was being written. The job is not released, because the message may have
    # arrived.
    assert store.released.empty()


async def test_what_a_slow_consumer_does_not_read_is_anothers_before_its_window_is_over(near: Client, org: str) -> None:
    # The router takes the jobs back after half of the window. The test allows the whole window, because a router on a
    # busy machine may be late.
    async with near.stream(org, credit=10_000, reads=False, window_s=10) as slow:
        await until(lambda: handed(near, org), "jobs are handed to the consumer that does not read")
        for _ in range(7):
            await near.enqueue(org, *(new_job(payload=b"x" * 16_000) for _ in range(100)))
        async with near.stream(org, credit=10_000, worker="reader") as reader:
            # The first stream's buffers hold the other jobs, or held them while this stream waited.
            await reader.until_jobs(200)
            assert {job.attempt for job in reader.jobs[:200]} == {1}
        assert slow.jobs == []


async def test_a_stream_is_refused_without_any_shard_too() -> None:
    with pytest.raises(InvalidRequest):
        a_stream(queue_pb2.ConsumeRequest(credit=1), said(), Blocked(writing=asyncio.Event()))


async def said(*requests: queue_pb2.ConsumeRequest) -> AsyncGenerator[Received, None]:
    """Yields the consumer's messages one after another, and then waits without end."""
    for request in requests:
        yield Received(request, 0)
    await asyncio.Event().wait()


@dataclass(kw_only=True)
class Counted(Blocked):
    """A stream's context that records whether it was admitted."""

    let_in: asyncio.Future[bool]
    says: list[queue_pb2.ConsumeRequest]
    connection: str = "one"
    refusal: Any = None

    def peer(self) -> str:
        return self.connection

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return ()

    async def read(self) -> bytes:
        """Returns the consumer's messages one after another, and then waits for ever."""
        if not self.says:
            await asyncio.Event().wait()
        return self.says.pop(0).SerializeToString()

    async def send_initial_metadata(self, metadata: object) -> None:
        del metadata
        self.let_in.set_result(True)

    async def abort_with_status(self, status: Any) -> None:
        self.refusal = status
        self.let_in.set_result(False)


def guarded_consume() -> Callable[[object, Context], Coroutine[Any, Any, None]]:
    """Returns the method Consume of a router without shards. The method includes the admission of calls."""
    gate = a_gate()
    methods = Methods(gate)
    methods.add(QueueService(cast("Fleet", _NoShards()), gate), queue_pb2.DESCRIPTOR.services_by_name["Queue"])
    details = SimpleNamespace(method="/windrow.v1.Queue/Consume", invocation_metadata=())
    handler: Any = methods.service(cast("grpc.HandlerCallDetails", details))
    consume: Callable[[object, Context], Coroutine[Any, Any, None]] = handler.stream_stream
    return consume


async def test_streams_of_one_org_leave_as_many_places_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.gate.admission.STREAMS_MAX", 6)
    consume = guarded_consume()
    async with asyncio.TaskGroup() as group:
        tasks: list[asyncio.Task[None]] = []
        contexts: list[Counted] = []
        for org in ("a", "a", "a", "a", "b", "b", "b", "c"):
            says = [queue_pb2.ConsumeRequest(start=start(org), credit=1)]
            context = Counted(writing=asyncio.Event(), let_in=asyncio.get_running_loop().create_future(), says=says)
            tasks.append(group.create_task(consume(None, cast("Context", context))))
            contexts.append(context)
            await asyncio.wait_for(context.let_in, PATIENCE_S)
        # An org gets another place only if it has fewer places than are free.
        assert [context.let_in.result() for context in contexts] == [True, True, True, False, True, True, False, True]
        assert contexts[3].refusal.code == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "takes 6 streams and waiting calls at a time, and from one org never more" in contexts[3].refusal.details
        for task in tasks:
            task.cancel()


async def test_streams_that_do_not_say_whose_they_are_keep_no_other_connection_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("router.gate.admission.STREAMS_MAX", 6)
    monkeypatch.setattr("router.services.consume_stream._START_S_MAX", 0.2)
    consume = guarded_consume()

    def begin(connection: str, *says: queue_pb2.ConsumeRequest) -> Counted:
        let_in = asyncio.get_running_loop().create_future()
        context = Counted(writing=asyncio.Event(), connection=connection, let_in=let_in, says=list(says))
        tasks.append(group.create_task(consume(None, cast("Context", context))))
        return context

    tasks: list[asyncio.Task[None]] = []
    async with asyncio.TaskGroup() as group:
        silent = [begin("one") for _ in range(6)]
        other = begin("other", queue_pb2.ConsumeRequest(start=start("org"), credit=1))
        assert await asyncio.wait_for(other.let_in, PATIENCE_S)
        # The silent streams held half of the places, but only for a short time.
        assert [await asyncio.wait_for(one.let_in, PATIENCE_S) for one in silent] == [False] * 6
        late, full = grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.RESOURCE_EXHAUSTED
        assert [one.refusal.code for one in silent] == [late] * 3 + [full] * 3
        assert silent[0].refusal.details == "the first message of the stream did not arrive completely within 0.2 s"
        tasks[-1].cancel()


# ── A router that ends ───────────────────────────────────────────────────────────────────────────────────────────────


def locked(dsns: dict[str, str], shard: str) -> contextlib.AbstractContextManager[Any]:
    import psycopg

    @contextlib.contextmanager
    def lock() -> Generator[None, None, None]:
        with psycopg.connect(dsns[shard]) as holder:
            holder.execute("LOCK TABLE windrow.job IN EXCLUSIVE MODE")
            yield

    return lock()


def waiting_for_lock(dsns: dict[str, str], shard: str) -> int:
    ((count,),) = sql(
        dsns,
        shard,
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'",
    )
    return int(count)


async def test_a_router_that_ends_answers_what_it_owes_and_then_says_where_to_go(
    routers: Routers, near: Client, org: str, dsns: dict[str, str]
) -> None:
    (one,) = await near.enqueue(org)
    with running_routers(routers.config) as ends:
        async with client(ends.address) as other, other.stream(org, credit=1) as stream:
            jobs = await stream.until_jobs(1)
            with locked(dsns, "s1"):
                await stream.send(request_id=5, acks=acks(jobs))
                await until(lambda: waiting_for_lock(dsns, "s1"), "the ack waits for the lock")
                ends.supervisor.terminate()
                await until(lambda: "draining" in ends.log.read_text(), "the router drains")
                assert not stream.ended
            error = await stream.refusal()
            assert error.code() == grpc.StatusCode.UNAVAILABLE
            assert retry_after_s(error) is not None
            assert stream.settled == {5: queue_pb2.Settled(request_id=5)}
            await asyncio.to_thread(ends.supervisor.wait, PATIENCE_S)
    assert await states(near, org, one) == {"SUCCEEDED": 1}


async def test_streams_of_all_sorts_end_with_their_router(
    near: Client, org: str, dsns: dict[str, str], tmp_path: Path
) -> None:
    ids = await near.enqueue(org, *(new_job(payload=b"x" * 100_000) for _ in range(100)))
    # With this drain time, the drain would last longer than this test waits if a stream delayed the drain.
    with running_routers(write_cluster(tmp_path / "cluster.toml", dsns, drain_seconds=3600)) as ends:
        async with (
            client(ends.address) as other,
            other.stream(org, "idle", credit=1) as idle,
            other.stream(org) as poor,
            contextlib.AsyncExitStack() as stack,
        ):
            silent = Stream(other.queue)
            stack.push_async_callback(silent.cancel)
            waiting = asyncio.create_task(other.dequeue(org, "idle", wait_s=30))
            async with other.stream(org, credit=1000) as busy:
                await busy.until_jobs(10)
                await other.dequeue(org, "idle")
                with ending(ends.pids):
                    ends.supervisor.terminate()
                    for stream in (idle, poor, busy, silent):
                        error = await stream.refusal()
                        assert error.code() == grpc.StatusCode.UNAVAILABLE
                        assert retry_after_s(error) is not None
                    assert await waiting == []
            await assert_back(near, org, ids, busy)


async def test_a_router_that_ends_gives_back_what_a_consumer_never_read(
    routers: Routers, near: Client, org: str, dsns: dict[str, str], tmp_path: Path
) -> None:
    ids = await near.enqueue(org, *(new_job(payload=b"x" * 100_000) for _ in range(100)))
    config = write_cluster(tmp_path / "cluster.toml", dsns, drain_seconds=1)
    with running_routers(config) as ends:
        # This option keeps the connection's flow-control windows small: otherwise gRPC may enlarge them until they hold
        # all the jobs.
        small = ("grpc.http2.bdp_probe", 0)
        async with client(ends.address, small) as other, other.stream(org, credit=1000, reads=False) as stream:
            await until(lambda: leased(near, org, ids), "the router took jobs that it cannot send")
            with ending(ends.pids):
                ends.supervisor.terminate()
            stream.read()
            await stream.end()
            # A message of 2 MiB was being sent. The router does not know whether the client has read this message.
            await assert_back(near, org, ids, stream, being_sent=21)


# ── A shard that is away ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def servers() -> Iterator[Clusters]:
    """Two servers of this module, which tests stop and start again."""
    try:
        with open_clusters(list(SHARDS), ephemeral=True) as clusters:
            yield clusters
    except BinariesNotFound as error:
        pytest.skip(str(error))


async def test_streams_of_a_shard_that_is_away_end_and_those_of_others_go_on(servers: Clusters, tmp_path: Path) -> None:
    with running_routers(write_cluster(tmp_path / "cluster.toml", servers.dsns, sweep_seconds=NEVER_S)) as breakable:
        async with client(breakable.address) as both:
            here, away = await both.org_on("s1"), await both.org_on("s2")
            ids = await both.enqueue(away, new_job(), new_job())
            async with (
                both.stream(here, credit=1000) as near,
                both.stream(away, credit=1) as far,
                both.stream(away) as poor,
            ):
                (held,) = await far.until_jobs(1)
                kill(servers["s2"])
                try:
                    # Settlements are answered on the stream, which continues.
                    await poor.send(request_id=1, acks=acks([held]))
                    settled = await poor.answer(1)
                    assert (settled.error.code, list(settled.not_ok)) == (code_pb2.UNAVAILABLE, [])
                    # A stream that wants jobs ends at once.
                    await far.send(credit=1)
                    error = await far.refusal(within_s=5)
                    assert error.code() == grpc.StatusCode.UNAVAILABLE
                    assert 0 < (retry_after_s(error) or 0) <= 5
                    async with both.stream(away, credit=1) as late:
                        error = await late.refusal(within_s=5)
                        assert error.code() == grpc.StatusCode.UNAVAILABLE
                    for turn in range(20):
                        await both.enqueue(here)
                        await near.until_jobs(turn + 1)
                finally:
                    servers["s2"].start()

                async def acked() -> bool:
                    number = 2 + len(poor.settled)
                    await poor.send(request_id=number, acks=acks([held]))
                    settled = await poor.answer(number)
                    return not settled.HasField("error") and not settled.not_ok

                # The stream that stayed open asks for jobs again.
                await until(acked, "the shard is used again")
                await poor.send(credit=1)
                assert [job.id for job in await poor.until_jobs(1)] == [one for one in ids if one != held.id]
                assert not near.ended
            await both.balanced(SHARDS)


async def test_a_shard_that_fails_in_an_unforeseen_way_while_consumers_wait_hurts_no_other(
    postgres: Server, tmp_path: Path
) -> None:
    dsns = {shard: postgres.create(f"streams_unforeseen_{shard}") for shard in SHARDS}
    with running_routers(write_cluster(tmp_path / "cluster.toml", dsns, sweep_seconds=NEVER_S)) as running:
        async with client(running.address) as both:
            here, away = await both.org_on("s1"), await both.org_on("s2")
            async with both.stream(here, credit=10) as near, both.stream(away, credit=100) as far:
                # Wait until the stream waits. Otherwise a claim of the stream may find the table missing, and end the
                # stream.
                await until(lambda: parked(both, away, [far]), "it waits")
                waited_with, before = len(far.jobs), running.pids
                sql(dsns, "s2", "ALTER TABLE windrow.job RENAME TO lost")
                # Ring the doorbell, so that the router looks for jobs.
                sql(dsns, "s2", "SELECT pg_notify('windrow_work', 'somebody *')")
                sql(dsns, "s2", "SELECT pg_notify('windrow_work', 'nobody''s number, x')")
                for turn in range(10):
                    await both.enqueue(here)
                    await near.until_jobs(turn + 1)
                    # These pauses together are longer than the pause between two probes.
                    await asyncio.sleep(0.02)
                sql(dsns, "s2", "ALTER TABLE windrow.lost RENAME TO job")
                assert running.pids == before
                await both.enqueue(away)
                await far.until_jobs(waited_with + 1)
                assert not near.ended
