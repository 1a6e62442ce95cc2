"""One router process hands jobs over to the consumers of its sibling, another router process of the same supervisor.
The tests also show what happens when one of the two processes dies, stops or sends invalid messages during a hand-over.

Each test is itself the supervisor of the processes. It chooses the process that a client calls, and may also act as the
sibling of a process."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncGenerator, Generator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import psycopg
import pytest

from router.fleet.siblings.frame import SIZES, greeting
from shard.job_id import to_hex
from tests.jobs import job_id
from tests.postgres import Server
from tests.routers import CHECKOUT, PATIENCE_S, ending, first_line, running_routers, write_cluster
from tests.streams import QUEUE, Client, Stream, acks, client, new_job, sql, until
from windrow.v1 import admin_pb2, job_pb2, queue_pb2

SHARDS = ("s1", "s2")
# No router sweeps during a test. So a job that reaches a consumer was either handed over, or announced to the
# consumer's process.
NEVER_S = 3600.0
# Numbers for the messages that `until_ready` sends.
_numbers = itertools.count(1000)


@dataclass(frozen=True, slots=True, kw_only=True)
class Router:
    """One router process, whose supervisor is the test."""

    process: subprocess.Popen[str]
    address: str
    # The supervisor's end of the socket that is the standard input of the process.
    line: socket.socket
    log: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    def connect(self, sibling: socket.socket) -> None:
        """Passes the connection to a sibling on to the process."""
        with sibling:
            socket.send_fds(self.line, [b"+"], [sibling.fileno()])

    def kill(self) -> None:
        with ending([self.pid]):
            os.kill(self.pid, signal.SIGKILL)


def connect(one: Router, other: Router) -> None:
    for router, end in zip((one, other), socket.socketpair(), strict=True):
        router.connect(end)


# The program of a router process that waits for the answers of its siblings, and keeps promises, for as long as tests
# need.
_MAIN = """
import sys
from router.process.child import main
from router.fleet.siblings import asks, promises
asks._ASK_S_MAX = {ask_s}
# A sibling that was late is asked again at once.
asks._REST_S = 0
asks._USED_S_MAX = asks.KEPT_S_MAX = promises.KEPT_S_MAX = {kept_s}
sys.exit(main())
"""


@contextlib.contextmanager
def running_router(config: Path, *, ask_s: float = PATIENCE_S) -> Generator[Router, None, None]:
    """Starts a router process. With the default of `ask_s`, the process waits for the answers of siblings even on a
    very busy machine."""
    ours, its = socket.socketpair()
    log = config.with_name(f"{job_id()}.log")
    main = _MAIN.format(ask_s=ask_s, kept_s=2 * PATIENCE_S)
    command = (sys.executable, "-c", main, "--config", config, "--listen", "127.0.0.1:0")
    with (
        ours,
        log.open("w") as errors,
        subprocess.Popen(
            command, cwd=CHECKOUT, stdin=its.fileno(), stdout=subprocess.PIPE, stderr=errors, text=True
        ) as process,
    ):
        its.close()
        try:
            said = first_line(process)
            assert said.startswith("ready "), f"{said!r}; the log: {log.read_text()}"
            yield Router(process=process, address=f"127.0.0.1:{said.split()[1]}", line=ours, log=log)
        finally:
            # A process that a test has stopped (SIGSTOP) must run again before it can end.
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)
            process.terminate()
            process.wait(PATIENCE_S)


@pytest.fixture(scope="module")
def dsns(postgres: Server) -> dict[str, str]:
    return {shard: postgres.create(f"siblings_{shard}") for shard in SHARDS}


@pytest.fixture(scope="module")
def config(dsns: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_cluster(tmp_path_factory.mktemp("siblings") / "c.toml", dsns, sweep_seconds=NEVER_S)


@pytest.fixture(scope="module")
def two(config: Path) -> Generator[tuple[Router, Router], None, None]:
    """Starts two processes that run during all tests of the module."""
    with running_router(config) as one, running_router(config) as other:
        connect(one, other)
        yield one, other


@pytest.fixture
async def near(two: tuple[Router, Router]) -> AsyncGenerator[Client, None]:
    """Yields a client of the first process, where consumers wait."""
    async with client(two[0].address) as opened:
        yield opened


@pytest.fixture
async def far(two: tuple[Router, Router]) -> AsyncGenerator[Client, None]:
    """Yields a client of the second process, through which tests enqueue jobs."""
    async with client(two[1].address) as opened:
        yield opened


@pytest.fixture
async def org(near: Client) -> str:
    return await near.org_on("s1")


def handed_over(dsns: dict[str, str], *ids: str) -> list[str]:
    """Returns the given jobs that the insert itself leased."""
    hexes = [to_hex(one) for one in ids]
    found: set[str] = set()
    for shard in dsns:
        rows = sql(
            dsns, shard, "SELECT id::text FROM windrow.job WHERE id = ANY(%s::uuid[]) AND leased_at = run_at", hexes
        )
        found |= {name for (name,) in rows}
    return [one for one in ids if one in found]


async def until_ready(producer: Client, dsns: dict[str, str], org: str, stream: Stream, *, queue: str = QUEUE) -> None:
    """Enqueues jobs through `producer` until one job is handed over to the stream. Afterwards the stream has its whole
    credit again."""
    for number in itertools.islice(_numbers, 200):
        seen = len(stream.jobs)
        (job,) = await producer.enqueue(org, new_job(queue=queue))
        await stream.until_jobs(seen + 1)
        was_handed_over = handed_over(dsns, job) == [job]
        assert await stream.settle(number, acks=acks(stream.jobs[seen:]), credit=1) == []
        if was_handed_over:
            return
    raise AssertionError("no job was handed over")


@contextlib.contextmanager
def inserts_blocked(dsns: dict[str, str], shard: str = "s1") -> Generator[psycopg.Connection, None, None]:
    """Until the `with` block ends or the yielded connection commits, no job can be stored on the shard."""
    with psycopg.connect(dsns[shard]) as rival:
        rival.execute("LOCK TABLE windrow.job IN SHARE MODE")
        yield rival


async def until_inserting(dsns: dict[str, str], count: int = 1, shard: str = "s1") -> None:
    """Waits until this many inserts are blocked. By then, their jobs have been offered to consumers."""
    statement = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
    await until(lambda: sql(dsns, shard, statement)[0][0] >= count, "the insert is blocked")


# ── What is handed over ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("shard", SHARDS)
async def test_jobs_are_leased_in_the_insert_to_a_consumer_at_a_sibling(
    near: Client, far: Client, dsns: dict[str, str], shard: str
) -> None:
    org = await near.org_on(shard)
    async with near.stream(org, credit=300) as stream:
        await until_ready(far, dsns, org, stream)
        seen = len(stream.jobs)
        sent = [new_job(payload=b"%d" % number) for number in range(100)]
        ids = await far.enqueue(org, *sent)
        got = (await stream.until_jobs(seen + 100))[seen:]
        assert handed_over(dsns, *ids) == ids
        assert {(job.id, job.payload) for job in got} == {(job.id, job.template.payload) for job in sent}
        assert {job.attempt for job in got} == {1}
        # The lease of a job that was handed over is like any other lease.
        assert await stream.settle(1, acks=acks(got)) == []
    await near.balanced(dsns)


async def test_a_call_that_waits_gets_a_job_from_a_sibling(near: Client, far: Client, org: str) -> None:
    for _ in range(3):
        waiting = asyncio.create_task(near.dequeue(org, wait_s=PATIENCE_S))
        ids = await far.enqueue(org)
        assert [job.id for job in await waiting] == ids


async def test_consumers_here_come_first_and_the_rest_goes_to_a_sibling(
    near: Client, far: Client, dsns: dict[str, str], org: str
) -> None:
    async with near.stream(org, credit=10_000) as away:
        await until_ready(far, dsns, org, away)
        async with far.stream(org, credit=30) as here:
            # No job is handed over to this stream until the stream has claimed jobs for the first time.
            while not here.jobs:
                both = here.jobs, away.jobs
                count = sum(map(len, both))
                await far.enqueue(org)
                await until(lambda: sum(map(len, both)) > count, "the job has come")  # noqa: B023
            assert await here.settle(1, acks=acks(here.jobs), credit=1) == []
            before = len(away.jobs), len(here.jobs)
            ids = await far.enqueue(org, *(new_job() for _ in range(50)))
            await here.until_jobs(before[1] + 30)
            await away.until_jobs(before[0] + 20)
            assert handed_over(dsns, *ids) == ids


async def test_another_orgs_jobs_are_not_handed_over(near: Client, far: Client, dsns: dict[str, str], org: str) -> None:
    other = await near.org_on("s1")
    async with near.stream(org, credit=10) as stream, near.stream(other, "unused", credit=10) as stranger:
        await until_ready(far, dsns, org, stream)
        seen = len(stream.jobs)
        ids = await far.enqueue(other, new_job(), new_job())
        await until_ready(far, dsns, org, stream)
        assert handed_over(dsns, *ids) == []
        assert {job.state for job in await near.get(other, *ids)} == {job_pb2.JOB_STATE_READY}
        assert not {job.id for job in [*stream.jobs[seen:], *stranger.jobs]} & set(ids)


async def test_a_paused_queue_hands_nothing_over_to_a_sibling(
    near: Client, far: Client, dsns: dict[str, str], org: str
) -> None:
    async with near.stream(org, credit=10) as stream:
        await until_ready(far, dsns, org, stream)
        seen = len(stream.jobs)
        await far.admin.PauseQueue(admin_pb2.PauseQueueRequest(org=org, queue=QUEUE))
        ids = await far.enqueue(org, new_job(), new_job())
        assert {job.state for job in await near.get(org, *ids)} == {job_pb2.JOB_STATE_READY}
        assert len(stream.jobs) == seen
        await far.admin.ResumeQueue(admin_pb2.ResumeQueueRequest(org=org, queue=QUEUE))
        got = (await stream.until_jobs(seen + 2))[seen:]
        assert sorted(job.id for job in got) == sorted(ids)
        # The stream can get as many jobs as before.
        assert await stream.settle(1, acks=acks(got), credit=2) == []
        await until_ready(far, dsns, org, stream)
        seen = len(stream.jobs)
        ids = await far.enqueue(org, *(new_job() for _ in range(10)))
        await stream.until_jobs(seen + 10)
        assert handed_over(dsns, *ids) == ids


async def test_a_job_that_is_known_already_is_not_handed_over_again(
    near: Client, far: Client, dsns: dict[str, str], org: str
) -> None:
    async with near.stream(org, credit=10) as stream:
        await until_ready(far, dsns, org, stream)
        seen = len(stream.jobs)
        known, new = new_job(), new_job()
        await far.enqueue(org, known)
        await far.enqueue(org, known, new)
        got = (await stream.until_jobs(seen + 2))[seen:]
        assert sorted(job.id for job in got) == sorted([known.id, new.id])
        assert await stream.settle(1, acks=acks(got), credit=2) == []
    await near.balanced(dsns)


# ── Credit ───────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_consumer_with_credit_for_one_job_never_gets_two_from_two_siblings(
    config: Path, two: tuple[Router, Router], near: Client, far: Client, dsns: dict[str, str], org: str
) -> None:
    with running_router(config) as third:
        connect(two[0], third)
        async with client(third.address) as also, near.stream(org, credit=1) as stream:
            for producer in (far, also):
                await until_ready(producer, dsns, org, stream)
            seen = len(stream.jobs)
            for turn in range(30):
                stored = await asyncio.gather(far.enqueue(org), also.enqueue(org), far.enqueue(org), near.enqueue(org))
                for _ in stored:
                    got = (await stream.until_jobs(seen + 1))[seen:]
                    assert len(got) == 1, f"{len(got)} jobs for one credit, in turn {turn}"
                    seen += 1
                    assert await stream.settle(seen, acks=acks(got)) == []
                    assert len(stream.jobs) == seen
                    await stream.send(credit=1)
    await near.balanced(dsns)


# ── Deaths and stops ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def pair(config: Path) -> Generator[tuple[Router, Router], None, None]:
    """Starts two processes that the test may kill."""
    with running_router(config) as one, running_router(config) as other:
        connect(one, other)
        yield one, other


async def test_jobs_of_a_process_that_is_killed_before_its_insert_has_ended_come_back(
    pair: tuple[Router, Router], near: Client, dsns: dict[str, str], org: str
) -> None:
    keeper, doomed = pair
    async with (
        client(keeper.address) as here,
        client(doomed.address) as there,
        here.stream(org, credit=10) as stream,
    ):
        await until_ready(there, dsns, org, stream)
        seen = len(stream.jobs)
        jobs = [new_job() for _ in range(3)]
        with inserts_blocked(dsns) as rival:
            enqueue = asyncio.create_task(there.enqueue(org, *jobs))
            await until_inserting(dsns)
            doomed.kill()
            with contextlib.suppress(Exception):
                await enqueue
            # Although the process has died, Postgres completes its statement. The statement leases the jobs, and no
            # process knows about these leases.
            rival.commit()
        got = (await stream.until_jobs(seen + 3))[seen:]
        assert sorted(job.id for job in got) == sorted(job.id for job in jobs)
        assert await stream.settle(1, acks=acks(got), credit=3) == []
        # The stream has its whole credit of 10 again.
        await here.enqueue(org, *(new_job() for _ in range(12)))
        await stream.until_jobs(seen + 3 + 10)
    await near.balanced(dsns)


async def test_jobs_of_a_process_that_is_killed_after_its_insert_come_back(
    pair: tuple[Router, Router], near: Client, dsns: dict[str, str], org: str
) -> None:
    keeper, doomed = pair
    async with (
        client(keeper.address) as here,
        client(doomed.address) as there,
        here.stream(org, credit=10) as stream,
    ):
        await until_ready(there, dsns, org, stream)
        seen = len(stream.jobs)
        jobs = [new_job() for _ in range(3)]
        with inserts_blocked(dsns) as rival:
            enqueue = asyncio.create_task(there.enqueue(org, *jobs))
            await until_inserting(dsns)
            # From now on, the process cannot send its sibling anything.
            os.kill(doomed.pid, signal.SIGSTOP)
            rival.commit()
        leased = "SELECT count(*) FROM windrow.job WHERE id = ANY(%s::uuid[]) AND lease IS NOT NULL"
        ids = [job.id for job in jobs]
        await until(lambda: sql(dsns, "s1", leased, ids)[0][0] == 3, "the jobs are leased")
        assert len(stream.jobs) == seen
        doomed.kill()
        with contextlib.suppress(Exception):
            await enqueue
        got = (await stream.until_jobs(seen + 3))[seen:]
        assert sorted((job.id, job.attempt) for job in got) == sorted((one, 1) for one in ids)
        assert await stream.settle(1, acks=acks(got)) == []
    await near.balanced(dsns)


@pytest.mark.parametrize("when", ["before the insert", "before it reads the outcome"])
async def test_jobs_for_a_process_that_is_killed_go_to_another_consumer(
    pair: tuple[Router, Router], near: Client, dsns: dict[str, str], org: str, when: str
) -> None:
    doomed, keeper = pair
    async with (
        client(doomed.address) as there,
        client(keeper.address) as here,
        there.stream(org, credit=10) as lost,
        here.stream(org) as stream,
    ):
        await until_ready(here, dsns, org, lost)
        jobs = [new_job() for _ in range(3)]
        with inserts_blocked(dsns) as rival:
            enqueue = asyncio.create_task(here.enqueue(org, *jobs))
            await until_inserting(dsns)
            await stream.send(credit=10)
            if when == "before the insert":
                doomed.kill()
            else:
                os.kill(doomed.pid, signal.SIGSTOP)
            rival.commit()
        ids = await asyncio.wait_for(enqueue, PATIENCE_S)
        if when != "before the insert":
            assert handed_over(dsns, *ids) == ids
            doomed.kill()
        got = await stream.until_jobs(3)
        assert sorted((job.id, job.attempt) for job in got) == sorted((one, 1) for one in ids)
        assert await stream.settle(1, acks=acks(got)) == []
    await near.balanced(dsns)


async def test_a_process_that_is_stopped_holds_up_no_enqueue_of_its_sibling(
    config: Path, near: Client, dsns: dict[str, str], org: str
) -> None:
    async with contextlib.AsyncExitStack() as stack:
        stopped, keeper = (stack.enter_context(running_router(config, ask_s=0.02)) for _ in range(2))
        connect(stopped, keeper)
        await _stopped(stopped, keeper, dsns, org)
    await near.balanced(dsns)


async def _stopped(stopped: Router, keeper: Router, dsns: dict[str, str], org: str) -> None:
    async with (
        client(stopped.address) as there,
        client(keeper.address) as here,
        there.stream(org, credit=100) as away,
    ):
        await until_ready(here, dsns, org, away)
        os.kill(stopped.pid, signal.SIGSTOP)
        ids = [one for _ in range(20) for one in await here.enqueue(org)]
        # No job was leased to the consumer of the stopped process.
        assert handed_over(dsns, *ids) == []
        async with here.stream(org, credit=100) as stream:
            got = await stream.until_jobs(20)
            assert sorted(job.id for job in got) == sorted(ids)
            assert await stream.settle(1, acks=acks(got)) == []
        os.kill(stopped.pid, signal.SIGCONT)
        # The sibling asks the process again. The process has got back the places that it promised too late.
        await until_ready(here, dsns, org, away)
        seen = len(away.jobs)
        await here.enqueue(org, *(new_job() for _ in range(100)))
        got = (await away.until_jobs(seen + 100))[seen:]
        assert await away.settle(2, acks=acks(got)) == []


@pytest.mark.parametrize("which", ["the consumer's", "the producer's"])
async def test_a_process_that_drains_leaves_no_job_behind(
    pair: tuple[Router, Router], near: Client, dsns: dict[str, str], org: str, which: str
) -> None:
    consumers, producers = pair
    async with (
        client(consumers.address) as there,
        client(producers.address) as here,
        there.stream(org, credit=10) as stream,
    ):
        await until_ready(here, dsns, org, stream)
        seen = len(stream.jobs)
        drained = consumers if which == "the consumer's" else producers
        with inserts_blocked(dsns) as rival:
            enqueue = asyncio.create_task(here.enqueue(org, new_job(), new_job()))
            await until_inserting(dsns)
            os.kill(drained.pid, signal.SIGTERM)
            if which == "the consumer's":
                await stream.until(lambda: stream.draining, "it drains")
                await stream.half_close()
            rival.commit()
        ids = await asyncio.wait_for(enqueue, PATIENCE_S)
        if which == "the consumer's":
            got = await here.dequeue(org, wait_s=PATIENCE_S)
            got += await here.dequeue(org, wait_s=PATIENCE_S) if len(got) < 2 else []
        else:
            got = (await stream.until_jobs(seen + 2))[seen:]
        assert sorted((job.id, job.attempt) for job in got) == sorted((one, 1) for one in ids)
        await near.queue.Ack(queue_pb2.AckRequest(org=org, acks=acks(got)))
    await near.balanced(dsns)


# ── A connection that does not come from a sibling ───────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\0" * 8,
        SIZES.pack(2, 0) + b"{}",
        greeting("another release"),
        greeting(version("windrow-server")) + SIZES.pack(7, 0) + b"[1,2,3]",
        greeting(version("windrow-server")) + SIZES.pack(2**32 - 1, 2**32 - 1),
        # An answer that nobody has asked for, an outcome of a promise that nobody made, and a receipt for something
        # that nobody has sent.
        greeting(version("windrow-server")) + SIZES.pack(22, 0) + b"[[],[],[[7,[]]],[],[]]",
        greeting(version("windrow-server")) + SIZES.pack(22, 0) + b"[[],[],[],[[7,[]]],[]]",
        greeting(version("windrow-server")) + SIZES.pack(15, 0) + b"[[],[],[],[],[7]]"[:15],
    ],
)
async def test_a_process_hangs_up_on_a_sibling_that_sends_nonsense_and_serves_on(
    two: tuple[Router, Router], near: Client, far: Client, dsns: dict[str, str], org: str, said: bytes
) -> None:
    ours, its = socket.socketpair()
    with ours:
        two[1].connect(its)
        ours.settimeout(PATIENCE_S)
        ours.sendall(said)
        with contextlib.suppress(ConnectionResetError):
            while ours.recv(4096):
                pass
    async with near.stream(org, credit=10) as stream:
        await until_ready(far, dsns, org, stream)


# ── Under a supervisor ───────────────────────────────────────────────────────────────────────────────────────────────


async def test_processes_find_each_other_again_when_one_was_restarted(config: Path, dsns: dict[str, str]) -> None:
    """The kernel distributes connections over the processes. Of many connections, each process gets some."""
    with running_routers(config, processes=2) as routers:
        for turn in range(2):
            async with contextlib.AsyncExitStack() as stack:
                clients = [await stack.enter_async_context(client(routers.address)) for _ in range(6)]
                org = await clients[0].org_on("s1")
                streams = [
                    await stack.enter_async_context(one.stream(org, f"q{at}", credit=10))
                    for at, one in enumerate(clients)
                ]
                for at, stream in enumerate(streams):
                    for producer in clients:
                        await until_ready(producer, dsns, org, stream, queue=f"q{at}")
            if not turn:
                before = set(routers.pids)
                with ending([min(before)]):
                    os.kill(min(before), signal.SIGKILL)
                await until(lambda: len(set(routers.pids) - before) == 1, "another has been started")  # noqa: B023
