"""Under load a consumer, a router process or a Postgres is killed with kill -9, a Postgres is frozen, or the cluster
file keeps changing. Nothing acknowledged is lost, no job has two leases at the same time, and the books balance (I1,
I2, I5)."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import grpc
import psutil
import pytest
import pytest_asyncio

from cli.local import LocalCluster, local_cluster
from embedded import BinariesNotFound
from tests.effort import luck_of, trials
from tests.fault.consumer import QUEUE, WINDOW_S
from tests.jobs import job_id, job_message
from tests.postgres import frozen
from tests.routers import CHECKOUT, PATIENCE_S, ending
from windrow.v1 import admin_pb2, admin_pb2_grpc, cluster_pb2, cluster_pb2_grpc, job_pb2, queue_pb2, queue_pb2_grpc

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(240)]

SHARDS = ("s1", "s2")
ORGS_A_SHARD = 2
# 20 jobs per org every 0.1 s are 800 jobs a second, if nothing slows the producers down.
BATCH, PAUSE_S = 20, 0.1
# How many more jobs each org has after a kill.
AFTER = 10 * BATCH
# How many jobs compete for how many names, and how many tasks send the jobs.
RACING, NAMES, RACERS = trials(1500, thorough=10_000), 100, 16
_numbers = itertools.count(1)
_T = TypeVar("_T")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster() -> AsyncIterator[LocalCluster]:
    """Two shards and two router processes, which are restarted automatically."""
    try:
        async with local_cluster(root=None, shards=["s1", "s2"], processes=2, listen="127.0.0.1:0") as running:
            yield running
    except BinariesNotFound as error:
        pytest.skip(str(error))


@dataclass(slots=True, kw_only=True)
class Load:
    """Producers in this process, and consumers in processes of their own. Records the answers that each of them got."""

    cluster: LocalCluster
    folder: Path
    orgs: list[str]
    # For each org, the ids of the jobs whose enqueue returned OK.
    stored: dict[str, set[str]]
    consumers: list[subprocess.Popen[bytes]] = field(default_factory=list)
    # How often a producer had to repeat a call.
    retries: int = 0

    def start_consumer(self) -> subprocess.Popen[bytes]:
        name = f"consumer-{len(self.consumers)}"
        log = self.folder / f"{name}.log"
        arguments = [self.cluster.address, str(log), name, *self.orgs]
        process = subprocess.Popen([sys.executable, "-m", "tests.fault.consumer", *arguments], cwd=CHECKOUT)
        self.consumers.append(process)
        return process

    async def produce(self, queue: queue_pb2_grpc.QueueAsyncStub, org: str, over: asyncio.Event) -> None:
        while not over.is_set():
            jobs = [job_message(id=job_id(), queue=QUEUE, kind="work") for _ in range(BATCH)]
            request = queue_pb2.EnqueueRequest(org=org, jobs=jobs)
            await self.until_answered(lambda: queue.Enqueue(request, timeout=5))  # noqa: B023
            self.stored[org].update(job.id for job in jobs)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(over.wait(), PAUSE_S)

    async def until_answered(self, call: Callable[[], Awaitable[_T]]) -> _T:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                try:
                    return await call()
                except grpc.aio.AioRpcError as error:
                    if error.code() not in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED}:
                        raise
                    self.retries += 1
                    await asyncio.sleep(0.1)

    @property
    def logs(self) -> list[Path]:
        return sorted(self.folder.glob("consumer-*.log"))

    def is_worked(self) -> bool:
        """Returns whether every consumer has got jobs."""
        return [log.stat().st_size > 0 for log in self.logs] == [True] * len(self.consumers)

    def said(self) -> list[dict[str, object]]:
        """Returns what the consumers logged. The last line of a killed consumer may be incomplete."""
        lines: list[dict[str, object]] = []
        for log in self.logs:
            whole, _, _ = log.read_text().rpartition("\n")
            lines += [json.loads(line) for line in whole.splitlines()]
        return lines

    @contextlib.contextmanager
    def consumers_running(self, count: int) -> Generator[None, None, None]:
        try:
            for _ in range(count):
                self.start_consumer()
            yield
        finally:
            for consumer in self.consumers:
                consumer.terminate()
            for consumer in self.consumers:
                consumer.wait(PATIENCE_S)


async def until(holds: Callable[[], object], what: str) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline_s, f"not within {PATIENCE_S:g} s: {what}"
        await asyncio.sleep(0.05)


async def kill_consumer(load: Load) -> None:
    victim = load.consumers[0]
    # The consumer is killed in the middle of its work: it holds leases that it has not acked.
    with ending([victim.pid]):
        os.kill(victim.pid, signal.SIGKILL)
    load.start_consumer()


async def kill_router(load: Load) -> None:
    # The processes are killed one after another, so that every connection is cut once.
    for victim in load.cluster.routers.pids:
        with ending([victim]):
            os.kill(victim, signal.SIGKILL)
        await until(lambda: len(load.cluster.routers.pids) == 2, "another process has been started")
        stored = sum(map(len, load.stored.values()))
        await until(lambda: sum(map(len, load.stored.values())) > stored + 10 * BATCH, "work goes on")  # noqa: B023


async def kill_postgres(load: Load) -> None:
    victim = load.cluster.postgres["s2"].pid
    assert victim is not None
    # Kill the backends of Postgres too, so that no backend finishes its work.
    parts = [psutil.Process(victim), *psutil.Process(victim).children(recursive=True)]
    for part in parts:
        with contextlib.suppress(psutil.NoSuchProcess):
            part.kill()
    await until(lambda: load.cluster.postgres["s2"].pid not in {None, victim}, "the server has been started again")


async def freeze_postgres(load: Load) -> None:
    pid = load.cluster.postgres["s2"].pid
    assert pid is not None
    # Postgres is frozen for longer than a lease lasts, so its next commits may come too late.
    retries = load.retries
    with frozen(pid):
        await asyncio.sleep(WINDOW_S + 1.0)
        await until(lambda: load.retries > retries, "a producer has noticed")


# States in which a shard takes no enqueues.
TAKES_NONE = ("dequeue_only", "read_only", "off")


async def rewrite_cluster_file(load: Load) -> None:
    config = load.cluster.config
    original = config.read_text()
    assert original.count('name = "s2"') == 1
    states = ("enqueue_only", "dequeue_only", "read_only", "off", "draining", "active")
    for state in [*states, *reversed(states)]:
        # Each version of the file has another DSN for the same database.
        line = f'name = "s2"\nstate = "{state}"\nweight = {next(_numbers)}'
        text = original.replace('name = "s2"', line).replace('/windrow"', f'/windrow?application_name={state}"')
        replace(config, text + ('[[shard]]\nname = "s3"\ndsn = "host=127.0.0.1 port=1"\n' if state != "active" else ""))
        for pid in load.cluster.routers.pids:
            os.kill(pid, signal.SIGHUP)
        retries = load.retries
        if state in TAKES_NONE:
            await until(lambda: load.retries > retries, f"a producer is refused: {state}")  # noqa: B023
        await asyncio.sleep(0.4)
    replace(config, original)
    load.cluster.routers.reload()


def replace(path: Path, text: str) -> None:
    other = path.with_suffix(".new")
    other.touch(mode=0o600)
    other.write_text(text)
    other.replace(path)


@pytest.mark.turns(2)
@pytest.mark.parametrize("kill", [kill_consumer, kill_router, kill_postgres, freeze_postgres, rewrite_cluster_file])
async def test_a_kill_loses_nothing_and_doubles_nothing(
    cluster: LocalCluster, tmp_path: Path, kill: Callable[[Load], Awaitable[None]]
) -> None:
    over = asyncio.Event()
    async with grpc.aio.insecure_channel(cluster.address, options=[("grpc.max_reconnect_backoff_ms", 500)]) as channel:
        queue, admin = queue_pb2_grpc.QueueStub(channel), admin_pb2_grpc.AdminStub(channel)
        operator = cluster_pb2_grpc.ClusterStub(channel)
        orgs = await orgs_on_every_shard(admin)
        load = Load(cluster=cluster, folder=tmp_path, orgs=orgs, stored={org: set() for org in orgs})
        with load.consumers_running(2):
            async with asyncio.TaskGroup() as group:
                for org in orgs:
                    group.create_task(load.produce(queue, org, over))
                await until(load.is_worked, "every consumer has got jobs")
                await kill(load)
                # There was load before, and it must continue: every producer stores this many more jobs.
                stored = {org: len(ids) for org, ids in load.stored.items()}
                await until(lambda: all(len(load.stored[org]) >= stored[org] + AFTER for org in orgs), "work goes on")
                over.set()
            await until_idle(admin, orgs)
        jobs = {org: await everything(queue, org, load.stored[org]) for org in orgs}
        books = [
            one
            for shard in SHARDS
            async for answer in operator.CheckShard(cluster_pb2.CheckShardRequest(shard=shard), timeout=PATIENCE_S)
            for one in answer.orgs
        ]
    count = sum(map(len, load.stored.values()))
    print(f"{count} jobs, {load.retries} calls asked again")
    noticed = (kill_postgres, freeze_postgres, rewrite_cluster_file)
    assert kill not in noticed or load.retries > 0, "nobody noticed"

    # Invariant I1: every acknowledged job exists and has finished.
    for org in orgs:
        assert {job.id for job in jobs[org]} == load.stored[org]
        assert {job.state for job in jobs[org]} == {job_pb2.JOB_STATE_SUCCEEDED}
    # Invariant I5: the books balance, and every stored job is known to a producer.
    assert [one for one in books if not one.balanced] == []
    assert {one.org: one.accepted for one in books if one.org in orgs} == {
        org: len(ids) for org, ids in load.stored.items()
    }
    # Invariant I2: each lease of a job began after the previous lease had ended, and belonged to one consumer.
    for job in itertools.chain(*jobs.values()):
        assert job.attempts[0].attempt == 1
        for earlier, later in itertools.pairwise(job.attempts):
            assert earlier.ended_at.ToNanoseconds() <= later.leased_at.ToNanoseconds()
            # Jobs that did not reach the consumer before it died were given back, and the attempt was not counted.
            released = earlier.outcome == job_pb2.ATTEMPT_OUTCOME_RELEASED
            assert released or earlier.outcome == job_pb2.ATTEMPT_OUTCOME_EXPIRED
            assert later.attempt == earlier.attempt + (not released)
    said = load.said()
    leases = Counter((line["leased"], line["attempt"]) for line in said if "leased" in line)
    assert [lease for lease, times in leases.items() if times > 1] == []
    # An acknowledged ack is final, so no job has two acknowledged acks. If the consumer died before it got the answer,
    # the job has no acknowledged ack.
    acks = Counter(line["acked"] for line in said if line.get("answer") == job_pb2.JOB_ANSWER_OK)
    assert [job for job, times in acks.items() if times > 1] == []
    unheard = count - len(acks)
    assert unheard <= (20 if kill is kill_consumer else 0)


@pytest.mark.thorough
@pytest.mark.parametrize("kill", [kill_router, kill_postgres])
async def test_jobs_that_race_for_a_name_under_kills_are_stored_whenever_none_of_that_name_is_live(
    cluster: LocalCluster, tmp_path: Path, kill: Callable[[Load], Awaitable[None]]
) -> None:
    luck = luck_of(kill.__name__)
    names = [f"name-{number}" for number in range(NAMES)]
    async with grpc.aio.insecure_channel(cluster.address, options=[("grpc.max_reconnect_backoff_ms", 500)]) as channel:
        queue, admin = queue_pb2_grpc.QueueStub(channel), admin_pb2_grpc.AdminStub(channel)
        # The org lives on s2, whose server is killed.
        org = (await orgs_on_every_shard(admin))[-1]
        load = Load(cluster=cluster, folder=tmp_path, orgs=[org], stored={org: set()})
        # `name_of`: the name of each stored job. `ended`: the jobs whose acks were answered, in the order of these
        # answers.
        name_of: dict[str, str] = {}
        ended: dict[str, int] = {}
        sent, over = 0, asyncio.Event()

        async def produce() -> None:
            nonlocal sent
            while sent < RACING or not over.is_set():
                sent += 3
                keys = luck.sample(names, 3)
                jobs = [
                    job_message(id=job_id(), queue=QUEUE, kind="work", dedup_key=key, dedup_while_live=True)
                    for key in keys
                ]
                turn = len(ended)
                request = queue_pb2.EnqueueRequest(org=org, jobs=jobs)
                answer = await load.until_answered(lambda: queue.Enqueue(request, timeout=5))  # noqa: B023
                for job, key, result in zip(jobs, keys, answer.results, strict=True):
                    assert ended.get(result.id, turn) >= turn, "the answer is a job that had ended before the call"
                    if result.id == job.id:
                        name_of[job.id] = key
                        load.stored[org].add(job.id)

        async def consume() -> None:
            request = queue_pb2.DequeueRequest(org=org, queues=[QUEUE], max_jobs=10)
            request.visibility_window.FromSeconds(5)
            while True:
                answer = await load.until_answered(lambda: queue.Dequeue(request, timeout=5))
                if not answer.jobs:
                    await asyncio.sleep(0.01)
                    continue
                acks = [queue_pb2.Ack(lease=job.lease) for job in answer.jobs]
                ack = queue_pb2.AckRequest(org=org, acks=acks)
                told = await load.until_answered(lambda: queue.Ack(ack, timeout=5))  # noqa: B023
                for job, one in zip(answer.jobs, told.answers, strict=True):
                    if one == job_pb2.JOB_ANSWER_OK:
                        assert ended.setdefault(job.id, len(ended)) == len(ended) - 1, "a job ends once"

        async with asyncio.TaskGroup() as group:
            consumers = [group.create_task(consume()) for _ in range(4)]
            producers = [group.create_task(produce()) for _ in range(RACERS)]
            await until(lambda: len(ended) > NAMES, "names are free again")
            await kill(load)
            over.set()
            await asyncio.wait(producers)
            await until_idle(admin, [org])
            for consumer in consumers:
                consumer.cancel()
        jobs = await everything(queue, org, set(name_of))
        books = [
            one
            async for answer in cluster_pb2_grpc.ClusterStub(channel).CheckShard(
                cluster_pb2.CheckShardRequest(shard="s2"), timeout=PATIENCE_S
            )
            for one in answer.orgs
            if one.org == org
        ]
    assert kill is kill_router or load.retries > 0, "nobody noticed"
    assert {job.state for job in jobs} == {job_pb2.JOB_STATE_SUCCEEDED}
    assert [(one.balanced, one.accepted) for one in books] == [(True, len(name_of))]
    assert Counter(name_of.values()).keys() == set(names)


async def orgs_on_every_shard(admin: admin_pb2_grpc.AdminAsyncStub) -> list[str]:
    """Returns new orgs, the same number on each shard."""
    on: dict[str, list[str]] = {shard: [] for shard in SHARDS}
    while any(len(orgs) < ORGS_A_SHARD for orgs in on.values()):
        org = f"load-{next(_numbers)}"
        made = await admin.CreateQueue(admin_pb2.CreateQueueRequest(org=org, queue=QUEUE), timeout=PATIENCE_S)
        on[made.queue.shard].append(org)
    return [org for orgs in on.values() for org in orgs[:ORGS_A_SHARD]]


async def until_idle(admin: admin_pb2_grpc.AdminAsyncStub, orgs: list[str]) -> None:
    """Waits until no job of these orgs is waiting or leased. When this function returns, the leases of dead consumers
    have ended, and other consumers have run their jobs."""
    async with asyncio.timeout(60):
        for org in orgs:
            while True:
                with contextlib.suppress(grpc.aio.AioRpcError):
                    stats = await admin.GetStats(admin_pb2.GetStatsRequest(org=org), timeout=5)
                    if not any(one.ready + one.leased + one.scheduled for one in stats.queues):
                        break
                await asyncio.sleep(0.1)


async def everything(queue: queue_pb2_grpc.QueueAsyncStub, org: str, ids: set[str]) -> list[job_pb2.Job]:
    """Returns the jobs with these ids. Asserts that no job is missing."""
    found: list[job_pb2.Job] = []
    rest = sorted(ids)
    while rest:
        answer = await queue.GetJobs(queue_pb2.GetJobsRequest(org=org, ids=rest[:1000]), timeout=PATIENCE_S)
        assert list(answer.not_found_ids) == []
        found += answer.jobs
        rest = [*answer.omitted_ids, *rest[1000:]]
    return found
