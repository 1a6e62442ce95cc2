"""Programs as deploy/ starts them: the exact command, environment and files of a container or a unit, under a temporary
root.

Paths are mapped into the root, `windrow` is the installed command, and the DSNs lead to databases of the tests' server.
The router gets a free port, and the archiver a short interval.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import grpc
import psycopg
from grpc_health.v1 import health_pb2

from shard.placement.slots import SLOTS, plan, slot_of
from shard.vocabulary import OrgId, ShardName
from tests.jobs import job_id, job_message
from tests.postgres import Server
from tests.routers import PATIENCE_S, until
from windrow.v1 import job_pb2, queue_pb2, queue_pb2_grpc

BIN = Path(sys.executable).parent
SHARDS = ("shard1", "shard2")


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """`command` begins with `windrow`, and has the paths of the deployed program. `dsns`: the DSN of each shard."""

    root: Path
    command: list[str]
    environment: dict[str, str]
    dsns: Mapping[str, str]

    @property
    def role(self) -> str:
        return self.command[1]

    def path(self, inside: str) -> Path:
        return self.root / inside.lstrip("/")

    def resolved(self, command: list[str]) -> list[str]:
        """Returns a command with paths mapped into the root, and with the installed `windrow`."""
        assert command[0] == "windrow"
        mapped = (str(self.path(part)) if part.startswith("/") else part for part in command[1:])
        return [str(BIN / "windrow"), *mapped]

    def put(self, inside: str, text: str) -> None:
        self.path(inside).parent.mkdir(parents=True, exist_ok=True)
        self.path(inside).write_text(text)

    def put_cluster_file(self, inside: str, text: str) -> None:
        """Writes the cluster file. Its addresses, and the default one, become free ports of loopback, because other
        programs of this machine may use the original ports. Its paths are mapped into the root."""
        if not re.search(r"^listen = ", text, re.MULTILINE):
            text = text.replace("[router]\n", '[router]\nlisten = ""\n')
        text = re.sub(r'^(listen|metrics) = ".*"', r'\1 = "127.0.0.1:0"', text, flags=re.MULTILINE)
        text = re.sub(r'= "(/[^"]+)"', lambda found: f'= "{self.path(found[1])}"', text)
        self.put(inside, f'{text}\n[archiver]\nschedule = "1s"\n' if "[archiver]" not in text else text)

    @contextmanager
    def running(self) -> Generator[tuple[subprocess.Popen[str], str], None, None]:
        """Starts the program and waits until it works. Yields the process, and the address at which it serves if it is
        a router."""
        with subprocess.Popen(
            self.resolved(self.command),
            cwd=self.root,
            env={"PATH": f"{BIN}{os.pathsep}{os.defpath}"} | self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                yield process, self._wait(process)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)

    def _wait(self, process: subprocess.Popen[str]) -> str:
        if self.role == "archiver":
            # An archiver prints nothing until it has something to do. Its first pass creates the schema.
            until(lambda: all(_has_schema(dsn) for dsn in self.dsns.values()), "the archiver has made a pass")
            return ""
        sign = {"router": "listening on ", "balancer": "leads, with cluster file"}[self.role]
        said: list[str] = []
        assert process.stdout is not None
        for line in process.stdout:
            said.append(line)
            if sign in line:
                return line.split()[-1]
        raise AssertionError(f"{self.command} ended with {process.wait(PATIENCE_S)}: {''.join(said)}")


@contextmanager
def databases(postgres: Server, prefix: str) -> Generator[dict[str, str], None, None]:
    """Yields the DSN of an empty database for each shard."""
    names = {shard: f"{prefix}_{shard}" for shard in SHARDS}
    try:
        yield {shard: postgres.create(name, template="template0") for shard, name in names.items()}
    finally:
        for name in names.values():
            postgres.drop(name)


def start_work_and_stop(
    program: Program,
    *,
    stop: signal.Signals,
    grace_s: float,
    connect: Callable[[str], grpc.Channel] = grpc.insecure_channel,
) -> None:
    """Starts a program, and asserts that the signal ends it within `grace_s`. If it is a router, first runs a job on
    each shard, over a channel that `connect` opens to the router's address."""
    with program.running() as (process, address):
        if program.role == "router":
            with connect(address) as channel:
                run_a_job_on_each_shard(channel)
        process.send_signal(stop)
        said, _ = process.communicate(timeout=grace_s)
        assert process.returncode == 0, f"ended with {process.returncode}: {said}"


def run_a_job_on_each_shard(channel: grpc.Channel) -> None:
    _wait_until_serving(channel)
    queue = queue_pb2_grpc.QueueStub(channel)
    for shard in SHARDS:
        org = _an_org_of(shard)
        job = job_message(id=job_id(), queue="mail", kind="greet", payload=b"hello")
        queue.Enqueue(queue_pb2.EnqueueRequest(org=org, jobs=[job]), timeout=PATIENCE_S)
        (leased,) = queue.Dequeue(queue_pb2.DequeueRequest(org=org, queues=["mail"]), timeout=PATIENCE_S).jobs
        assert (leased.id, leased.payload) == (job.id, b"hello")
        acks = [queue_pb2.Ack(lease=leased.lease)]
        answers = queue.Ack(queue_pb2.AckRequest(org=org, acks=acks), timeout=PATIENCE_S).answers
        assert answers == [job_pb2.JOB_ANSWER_OK]
        (found,) = queue.GetJobs(queue_pb2.GetJobsRequest(org=org, ids=[job.id]), timeout=PATIENCE_S).jobs
        assert found.shard == shard


def _wait_until_serving(channel: grpc.Channel) -> None:
    # Called by name, because the generated stub's types have no such method.
    check = channel.unary_unary(
        "/grpc.health.v1.Health/Check",
        request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
        response_deserializer=health_pb2.HealthCheckResponse.FromString,
    )
    deadline_s = time.monotonic() + PATIENCE_S
    while True:
        with suppress(grpc.RpcError):
            answer = check(health_pb2.HealthCheckRequest(), timeout=5, wait_for_ready=True)
            if answer.status == health_pb2.HealthCheckResponse.SERVING:
                return
        assert time.monotonic() < deadline_s, "never became healthy"


def _an_org_of(shard: str) -> str:
    owners = plan([None] * SLOTS, {ShardName(name): 1.0 for name in SHARDS})
    return next(org for org in map(str, range(1000)) if owners[slot_of(OrgId(org))] == shard)


def _has_schema(dsn: str) -> bool:
    with psycopg.connect(dsn) as connection:
        return connection.execute("SELECT to_regclass('windrow.job') IS NOT NULL").fetchone() == (True,)
