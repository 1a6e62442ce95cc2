"""Streams are cut at random moments and routers are killed: no job is lost, no job has two live leases, and each job
finishes once (I1, I2, I5)."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import signal
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import pytest

from proof.proxy import Moment, Proxy, grpc_answered, open_proxy, open_proxy_before, through
from shard.admin.queue_admin import QueueAdmin
from shard.postgres.pool import Database
from shard.queue.store import Store
from shard.vocabulary import JobId, OrgId
from tests.conftest import CLUSTER, SHARD
from tests.effort import luck_of, trials
from tests.routers import Routers, ending, running_routers, write_cluster
from tests.streams import OK, QUEUE, Client, acks, answers_of, client, new_job, until
from windrow.v1 import admin_pb2, job_pb2, queue_pb2

ORG = OrgId("cut")
# How many cuts there are.
CUTS = trials(24, thorough=400)
CREDIT = 20
WINDOW_S = 1.0
_AWAY = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED}


@contextlib.asynccontextmanager
async def routers_beside(config: Path, *, processes: int = 1) -> AsyncGenerator[Routers, None]:
    """Starts and stops routers without blocking the event loop, because they may talk to a proxy that runs in it."""
    running = running_routers(config, processes=processes)
    routers = await asyncio.to_thread(running.__enter__)
    try:
        yield routers
    finally:
        await asyncio.to_thread(running.__exit__, None, None, None)


def _is_cut(error: grpc.aio.AioRpcError) -> bool:
    # This is how the client's gRPC reports a write to a broken connection. The error does not come from a router.
    return error.code() in _AWAY or error.details() == "Internal error from Core"


@dataclass(kw_only=True)
class Load:
    """Producers, and consumers on streams. Records the answers that each of them got."""

    luck: random.Random
    stored: set[str] = field(default_factory=set[str])
    # For each job, the leases whose ack was answered OK.
    acked: dict[str, set[bytes]] = field(default_factory=dict[str, set[bytes]])
    streams: int = 0
    producing: int = 0
    over: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def finished(self) -> bool:
        # Jobs may be acked before their enqueue is answered.
        return self.over.is_set() and not self.producing and len(self.acked) == len(self.stored)

    async def produce(self, to: Client) -> None:
        self.producing += 1
        while not self.over.is_set():
            # Most jobs are handed over. Jobs with attributes are claimed.
            size = self.luck.choice([0, 200, 4000])
            jobs = [
                new_job(payload=b"p" * size, attributes={"a": "b"} if self.luck.random() < 0.2 else {})
                for _ in range(self.luck.randint(1, 15))
            ]
            request = queue_pb2.EnqueueRequest(org=ORG, jobs=jobs)
            await until(lambda: self._answered(to, request), "the enqueue is answered")  # noqa: B023
            self.stored.update(job.id for job in jobs)
            # Bound the number of jobs that wait.
            await until(lambda: len(self.stored) - len(self.acked) < 2000 or self.over.is_set(), "jobs are taken")
            await asyncio.sleep(self.luck.uniform(0, 0.01))
        self.producing -= 1

    @staticmethod
    async def _answered(to: Client, request: queue_pb2.EnqueueRequest) -> bool:
        try:
            await to.queue.Enqueue(request, timeout=5)
        except grpc.aio.AioRpcError as error:
            if error.code() not in _AWAY:
                raise
            return False
        return True

    async def consume(self, at: Client, worker: str) -> None:
        """Opens one stream after another. After a cut, the next stream repeats the acks that were not answered."""
        # Leases whose ack has not been answered yet.
        owed: dict[bytes, str] = {}
        while not self.finished:
            try:
                await self._on_stream(at, worker, owed)
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
                if isinstance(error, grpc.aio.AioRpcError) and not _is_cut(error):
                    raise
            await asyncio.sleep(0.01)

    async def _on_stream(self, at: Client, worker: str, owed: dict[bytes, str]) -> None:
        self.streams += 1
        async with at.stream(ORG, credit=CREDIT, window_s=WINDOW_S, worker=worker) as stream:
            numbers = itertools.count(1)
            asked: dict[int, list[bytes]] = {}
            again = list(owed)
            read = 0
            while not self.finished:
                if again:
                    number = next(numbers)
                    asked[number], again = again, []
                    await stream.send(request_id=number, acks=[queue_pb2.Ack(lease=lease) for lease in asked[number]])
                fresh = await stream.news(read, within_s=0.2)
                read += len(fresh)
                for message in fresh:
                    for settled in message.settled:
                        leases = asked.pop(settled.request_id)
                        if settled.HasField("error"):
                            again += leases
                            continue
                        for lease, answer in zip(leases, answers_of(settled, leases), strict=True):
                            one = owed.pop(lease)
                            if answer == OK:
                                self.acked.setdefault(one, set()).add(lease)
                    # Some jobs are forgotten until their leases end.
                    kept = [job for job in message.jobs if self.luck.random() < 0.97]
                    number = next(numbers)
                    asked[number] = [job.lease for job in kept]
                    owed.update((job.lease, job.id) for job in kept)
                    if message.jobs:
                        await stream.send(request_id=number, acks=acks(kept), credit=len(message.jobs))
                if stream.ended and not fresh:
                    break
            if stream.error is not None:
                raise stream.error

    async def assert_whole(self, database: Database) -> None:
        """Asserts that each job finished once, by one lease. Asserts that each lease of a job began after the previous
        lease had ended, and that the books balance."""
        assert self.acked.keys() == self.stored
        assert [one for one, leases in self.acked.items() if len(leases) > 1] == []
        ids = [JobId(one) for one in self.stored]
        records = [
            record
            for at in range(0, len(ids), 1000)
            for record in await Store(database).get(ORG, ids[at : at + 1000], include_payload=False)
        ]
        assert sorted(record.id for record in records) == sorted(self.stored)
        assert {record.state for record in records} == {"succeeded"}
        for record in records:
            attempts = record.attempts()
            assert [attempt.outcome.value for attempt in attempts].count("acked") == 1
            assert attempts[-1].outcome.value == "acked"
            for earlier, later in itertools.pairwise(attempts):
                assert earlier.ended_at <= later.leased_at, record
        (books,) = await QueueAdmin(database).check()
        assert books.balanced
        assert (books.accepted, books.succeeded) == (len(self.stored), len(self.stored))


async def make_queue(at: Client) -> None:
    # Each claim whose answer is cut off counts as an attempt, and large answers are cut off many times.
    config = admin_pb2.QueueConfig(max_attempts=1000)
    await at.admin.CreateQueue(admin_pb2.CreateQueueRequest(org=ORG, queue=QUEUE, config=config), timeout=5)


@pytest.mark.thorough
@pytest.mark.timeout(900)
@pytest.mark.parametrize("place", ["client", "shard"])
async def test_streams_cut_at_random_lose_and_double_nothing(
    fresh_dsn: str, fresh_database: Database, tmp_path: Path, place: str
) -> None:
    load = Load(luck=luck_of(f"streams {place}"))
    async with contextlib.AsyncExitStack() as stack:
        dsn = fresh_dsn
        proxy: Proxy | None = None
        if place == "shard":
            proxy = await stack.enter_async_context(open_proxy_before(fresh_dsn))
            dsn = through(fresh_dsn, proxy)
        config = write_cluster(tmp_path / "cluster.toml", {SHARD: dsn}, name=CLUSTER)
        routers = await stack.enter_async_context(routers_beside(config))
        consumers_at = producers_at = routers.address
        if proxy is None:
            host, _, port_text = routers.address.rpartition(":")
            proxy = await stack.enter_async_context(open_proxy(host, int(port_text), grpc_answered))
            consumers_at = f"127.0.0.1:{proxy.port}"
        await make_queue(await stack.enter_async_context(client(producers_at)))
        async with asyncio.timeout(600), asyncio.TaskGroup() as group:
            for _ in range(2):
                group.create_task(load.produce(await stack.enter_async_context(client(producers_at))))
            for number in range(3):
                # Each stream has a connection of its own, so that a cut hits one stream.
                at = await stack.enter_async_context(client(consumers_at))
                group.create_task(load.consume(at, f"w{number}"))
            proxy.cut_at_random(load.luck, bytes_max=40_000)
            await proxy.until_cut(CUTS)
            proxy.cut_no_more()
            load.over.set()
    assert place == "shard" or load.streams > CUTS / 2, "streams were cut too seldom"
    await load.assert_whole(fresh_database)


@pytest.mark.thorough
@pytest.mark.timeout(900)
async def test_routers_killed_under_streams_lose_and_double_nothing(
    fresh_dsn: str, fresh_database: Database, tmp_path: Path
) -> None:
    load = Load(luck=luck_of("kills"))
    config = write_cluster(tmp_path / "cluster.toml", {SHARD: fresh_dsn}, name=CLUSTER)
    async with contextlib.AsyncExitStack() as stack:
        routers = await stack.enter_async_context(routers_beside(config, processes=2))
        async with asyncio.timeout(600), asyncio.TaskGroup() as group:
            for _ in range(2):
                group.create_task(load.produce(await stack.enter_async_context(client(routers.address))))
            for number in range(4):
                at = await stack.enter_async_context(client(routers.address))
                group.create_task(load.consume(at, f"w{number}"))
            for _ in range(max(1, CUTS // 100)):
                # The routers are killed one after another, so that every stream is cut.
                for victim in routers.pids:
                    before = len(load.acked)
                    await until(lambda: len(load.acked) > before + 100, "the consumers are at work")  # noqa: B023
                    await asyncio.sleep(load.luck.uniform(0, 0.05))
                    with ending([victim]):
                        os.kill(victim, signal.SIGKILL)
                    await until(lambda: len({*routers.pids} - {victim}) == 2, "another process is there")  # noqa: B023
            load.over.set()
    assert load.streams > 4, "no stream was cut"
    await load.assert_whole(fresh_database)


# ── Exactly between the insert and the write to the stream ───────────────────────────────────────────────────────────


@pytest.mark.thorough
@pytest.mark.timeout(900)
@pytest.mark.parametrize("moment", Moment)
async def test_a_job_whose_hand_over_was_cut_at_the_commit_comes_to_somebody_soon(
    fresh_dsn: str, fresh_database: Database, tmp_path: Path, moment: Moment
) -> None:
    luck = luck_of(f"handover {moment}")
    async with open_proxy_before(fresh_dsn) as proxy:
        config = write_cluster(
            # No sweep runs, so a job that comes was found by a notification.
            tmp_path / "cluster.toml",
            {SHARD: through(fresh_dsn, proxy)},
            name=CLUSTER,
            sweep_seconds=3600,
        )
        async with (
            routers_beside(config) as routers,
            client(routers.address) as queue,
            # The window is longer than this test. So if a job comes back, it was released and its lease has not
            # expired.
            queue.stream(ORG, credit=10_000, window_s=3600) as stream,
        ):
            await stream.until_jobs(await until_handed_over(queue))
            for _ in range(CUTS // 3):
                jobs = [new_job() for _ in range(luck.randint(1, 3))]
                before = len(stream.jobs)
                cut = proxy.cut_at(luck.choice(jobs).id.encode(), moment)
                # The router retries by itself.
                assert await queue.enqueue(ORG, *jobs) == [job.id for job in jobs]
                assert cut.done
                got = (await stream.until_jobs(before + len(jobs)))[before:]
                assert sorted(job.id for job in got) == sorted(job.id for job in jobs)
                assert {job.attempt for job in got} == {1}
                number = len(stream.jobs)
                assert await stream.settle(number, acks=acks(got), credit=len(got)) == []
            proxy.cut_no_more()
            await stream.settle(10_000_000, acks=acks(stream.jobs))
    (books,) = await QueueAdmin(fresh_database).check()
    assert books.balanced
    assert books.accepted == books.succeeded == len(stream.jobs)
    assert len({job.id for job in stream.jobs}) == len(stream.jobs)


async def until_handed_over(queue: Client) -> int:
    """Waits until the only consumer gets jobs by hand-over. Returns how many jobs it will get."""
    count = 0

    async def handed() -> bool:
        nonlocal count
        count += 1
        (one,) = await queue.enqueue(ORG, new_job())
        (job,) = await queue.get(ORG, one)
        return job.state == job_pb2.JOB_STATE_LEASED

    await until(handed, "a job is leased in its very insert")
    return count
