"""Routers end old connections and streams. Clients move to new connections and streams, and no job is lost or runs
twice."""

from __future__ import annotations

import asyncio
import logging
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Generator
from subprocess import PIPE

import grpc
import psutil
import pytest
from google.rpc import error_details_pb2

from router.gate.admission import RECEIVE_S_MAX, UNREAD_S_MAX
from router.gate.calls import DEADLINE_S_MAX
from router.settings import RouterSettings
from tests.postgres import Server
from tests.routers import CHECKOUT, PATIENCE_S, first_line, write_cluster
from tests.streams import OK, QUEUE, acks, client, detail, new_job, retry_after_s, until
from windrow import Client, Job, JobState, Worker
from windrow.v1 import queue_pb2

# The router asks clients to leave a connection after 3.6 to 4.4 s, and breaks it 1.3 s later. Streams end much sooner,
# after 0.8 to 1.2 s, so that even on a busy machine a stream ends before its connection breaks.
AGE_S = 4.0
CONNECTIONS = 3
# The program of a router process whose grace has no minimum. Otherwise the streams would last for minutes.
IMPATIENT = """
import sys
from router import settings
settings._GRACE_S_MIN = 0
from router.process.child import main
sys.exit(main())
"""
PAUSE_S = 0.05


@pytest.fixture(scope="module")
def address(postgres: Server, tmp_path_factory: pytest.TempPathFactory) -> Generator[str, None, None]:
    config = tmp_path_factory.mktemp("age") / "cluster.toml"
    write_cluster(config, {"s1": postgres.create("connection_age")}, connection_age_seconds=AGE_S)
    command = [sys.executable, "-c", IMPATIENT, "--config", str(config), "--listen", "127.0.0.1:0"]
    # The process serves as long as the supervisor's end of the socket is open.
    supervisor, its = socket.socketpair()
    with (
        supervisor,
        its,
        subprocess.Popen(command, cwd=CHECKOUT, stdin=its.fileno(), stdout=PIPE, text=True) as router,
    ):
        try:
            said, port = first_line(router).split()
            assert said == "ready"
            yield f"127.0.0.1:{port}"
        finally:
            router.terminate()
            router.wait(PATIENCE_S)


def connections_to(address: str) -> set[int]:
    """Returns the local ports of this process's connections to a router."""
    port = int(address.rpartition(":")[2])
    open_ones = [one for one in psutil.Process().net_connections("tcp") if one.status == psutil.CONN_ESTABLISHED]
    return {one.laddr.port for one in open_ones if one.raddr.port == port}


def test_the_default_grace_is_longer_than_any_call_with_a_deadline() -> None:
    settings = RouterSettings()
    assert settings.connection_grace_s == 600
    # A CheckShard may take five times as long as other calls.
    assert 5 * DEADLINE_S_MAX < settings.connection_grace_s < settings.connection_age_seconds


@pytest.mark.parametrize("age_s", [1.0, 200.0, 540.0, 1800.0, 86_400.0])
def test_no_age_breaks_a_unary_call_and_streams_end_within_the_grace(age_s: float) -> None:
    settings = RouterSettings(connection_age_seconds=age_s)
    assert settings.connection_grace_s > RECEIVE_S_MAX + DEADLINE_S_MAX + UNREAD_S_MAX
    assert settings.connection_grace_s <= 600
    assert settings.stream_s_max < settings.connection_grace_s


async def test_an_old_stream_ends_in_order_and_its_job_can_be_acked(address: str) -> None:
    async with client(address) as near, near.stream("streams", credit=1) as stream:
        await near.enqueue("streams", new_job(), new_job())
        refused = await stream.refusal()
        info = detail(refused, error_details_pb2.ErrorInfo())
        assert (refused.code(), info.reason) == (grpc.StatusCode.UNAVAILABLE, "STREAM_EXPIRED")
        assert retry_after_s(refused) == 0
        # Either the job came before the stream ended, or the stream ended before the job was stored.
        jobs = stream.jobs or await near.dequeue("streams", max_jobs=1)
        acked = await near.queue.Ack(queue_pb2.AckRequest(org="streams", acks=acks(jobs)), timeout=PATIENCE_S)
        assert list(acked.answers) == [OK]
        (left,) = await near.dequeue("streams", wait_s=PATIENCE_S / 2)
        assert left.attempt == 1


async def test_a_worker_follows_to_new_connections_and_works_each_job_once(
    address: str, caplog: pytest.LogCaptureFixture
) -> None:
    worked = Counter[str]()
    stored: list[str] = []
    ports: set[int] = set()
    async with Client(address, org="workers") as producer:
        worker = Worker(producer, [QUEUE], concurrency=5, visibility_window=PATIENCE_S / 2)

        @worker.handler("greet")
        async def greet(job: Job) -> None:
            worked[job.id] += 1

        with caplog.at_level(logging.INFO, "windrow.worker"):
            running = asyncio.create_task(worker.run())
            async with asyncio.timeout(PATIENCE_S):
                while len(ports) < CONNECTIONS:
                    stored += [(await producer.enqueue(QUEUE, "greet")).id for _ in range(5)]
                    ports |= connections_to(address)
                    await asyncio.sleep(PAUSE_S)
            await until(lambda: len(worked) == len(stored), "every job was worked")

            async def finished() -> bool:
                records = await producer.get_jobs(stored)
                return {record.state for record in records.values()} == {JobState.SUCCEEDED}

            await until(finished, "every job is finished")
            worker.stop()
            await asyncio.wait_for(running, PATIENCE_S)
    assert worked == Counter(stored)
    # The expiry of a stream is not an outage.
    assert [record.message for record in caplog.records if record.levelno >= logging.WARNING] == []
