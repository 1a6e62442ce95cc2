"""Router processes for tests: child processes with a cluster file of the test, which end with the block."""

from __future__ import annotations

import contextlib
import os
import re
import select
import socket
import subprocess
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, cast

import grpc
import psutil
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from proof.processes import runs
from tests import preloaded
from windrow.v1 import (
    admin_pb2_grpc,
    cluster_pb2,
    cluster_pb2_grpc,
    queue_pb2_grpc,
    schedules_pb2_grpc,
    workflows_pb2_grpc,
)

CHECKOUT = Path(__file__).resolve().parents[1]
# The upper bound for all waits in a test.
PATIENCE_S = 60.0
_Detail = TypeVar("_Detail", bound=Message)


@dataclass(frozen=True, slots=True, kw_only=True)
class Routers:
    """A supervisor and its processes. The log is the standard error of all of them."""

    supervisor: subprocess.Popen[str]
    address: str
    config: Path
    log: Path

    @property
    def pids(self) -> list[int]:
        """The router processes that run now."""
        # psutil's `children` would read the files of all processes of the machine, and tests ask many times.
        found: list[int] = []
        for thread in Path("/proc", str(self.supervisor.pid), "task").iterdir():
            with contextlib.suppress(OSError):  # The thread may have ended meanwhile.
                found += map(int, Path(thread, "children").read_text().split())
        return sorted(pid for pid in found if _runs(pid))


def _runs(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return runs(psutil.Process(pid))
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Stubs:
    """The services over one channel, with blocking calls."""

    channel: grpc.Channel
    queue: queue_pb2_grpc.QueueStub
    admin: admin_pb2_grpc.AdminStub
    cluster: cluster_pb2_grpc.ClusterStub
    schedules: schedules_pb2_grpc.SchedulesStub
    workflows: workflows_pb2_grpc.WorkflowsStub

    def books(self, *shards: str) -> dict[tuple[str, str], cluster_pb2.OrgBooks]:
        """Returns the books of every org, by shard and org; asserts that they balance (I5)."""
        books: dict[tuple[str, str], cluster_pb2.OrgBooks] = {}
        for shard in shards:
            for answer in self.cluster.CheckShard(cluster_pb2.CheckShardRequest(shard=shard), timeout=PATIENCE_S):
                books.update({(shard, one.org): one for one in answer.orgs})
        assert [one for one in books.values() if not one.balanced] == []
        return books


def write_cluster(
    path: Path,
    shards: Mapping[str, str],
    *,
    name: str = "tests",
    catalog_dsn: str | None = None,
    connections: int = 4,
    drain_seconds: float = 10,
    **router: float,
) -> Path:
    """Writes a cluster file with these shards and DSNs. `router`: more keys of the table [router]."""
    path.touch(mode=0o600)
    text = f'[cluster]\nname = "{name}"\n'
    text += "".join(f"\n[[shard]]\nname = '{shard}'\ndsn = '''{dsn}'''\n" for shard, dsn in shards.items())
    if catalog_dsn is not None:
        text += f"\n[catalog]\ndsn = '''{catalog_dsn}'''\n"
    text += f"\n[router]\nconnections_per_shard = {connections}\ndrain_seconds = {drain_seconds}\n"
    text += "".join(f"{key} = {value}\n" for key, value in router.items())
    path.write_text(text)
    return path


@contextlib.contextmanager
def running_routers(
    config: Path, *, processes: int = 1, listen: str = "127.0.0.1:0", environ: Mapping[str, str] | None = None
) -> Generator[Routers, None, None]:
    """Starts routers, waits until they serve, and ends them."""
    log = config.with_suffix(".log")
    with spawned_routers(config, log, processes=processes, listen=listen, environ=environ) as supervisor:
        said = first_line(supervisor)
        assert said.startswith("listening on "), f"{said!r}; the log: {log.read_text()}"
        yield Routers(supervisor=supervisor, address=said.split()[-1], config=config, log=log)


@contextlib.contextmanager
def spawned_routers(
    config: Path, log: Path, *, processes: int = 1, listen: str, environ: Mapping[str, str] | None = None
) -> Generator[subprocess.Popen[str], None, None]:
    """Starts routers as running_routers does, but does not wait until they serve."""
    command = ("-m", "router", "--config", config, "--listen", listen, "--processes", processes)
    with (
        log.open("a") as errors,
        preloaded.start(*command, stdout=subprocess.PIPE, stderr=errors, environ=environ) as supervisor,
    ):
        try:
            yield supervisor
        finally:
            supervisor.terminate()
            try:
                supervisor.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                # When the supervisor has ended, its processes drain and end by themselves.
                supervisor.kill()
                raise


def first_line(process: subprocess.Popen[str]) -> str:
    """Returns the first line that a child prints, or "" if it ends without printing one."""
    assert process.stdout is not None
    readable, _, _ = select.select([process.stdout], [], [], PATIENCE_S)
    assert readable, f"process {process.pid} has said nothing for {PATIENCE_S:g} s"
    return process.stdout.readline().strip()


@contextlib.contextmanager
def reserved_address() -> Generator[str, None, None]:
    """Yields an address at which no program listens. Servers that share ports, as routers do, may listen at this
    address, end and listen again. Until the end of the block, no other program gets the port."""
    with socket.socket() as holder:
        for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
            holder.setsockopt(socket.SOL_SOCKET, option, 1)
        holder.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{holder.getsockname()[1]}"


@contextlib.contextmanager
def stubs(address: str, *options: tuple[str, object]) -> Generator[Stubs, None, None]:
    """Opens a channel with its own connection. Without `grpc.use_local_subchannel_pool`, channels to one address would
    share a connection."""
    with grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1), *options]) as channel:
        grpc.channel_ready_future(channel).result(PATIENCE_S)
        yield Stubs(
            channel=channel,
            queue=queue_pb2_grpc.QueueStub(channel),
            admin=admin_pb2_grpc.AdminStub(channel),
            cluster=cluster_pb2_grpc.ClusterStub(channel),
            schedules=schedules_pb2_grpc.SchedulesStub(channel),
            workflows=workflows_pb2_grpc.WorkflowsStub(channel),
        )


@contextlib.contextmanager
def ending(pids: Sequence[int]) -> Generator[None, None, None]:
    """Asserts that these processes, which run now, end soon after the block."""
    with contextlib.ExitStack() as stack:
        handles = [os.pidfd_open(pid) for pid in pids]
        for handle in handles:
            stack.callback(os.close, handle)
        yield
        for pid, handle in zip(pids, handles, strict=True):
            poll = select.poll()
            poll.register(handle, select.POLLIN)
            assert poll.poll(PATIENCE_S * 1000), f"process {pid} still runs"


def metrics_of(routers: Routers) -> str:
    """Returns the address at which routers serve their metrics, which their log names."""
    found = re.search(r"metrics are at (http://\S+)", routers.log.read_text())
    assert found is not None
    return found[1]


def until(condition: Callable[[], object], what: str, *, within_s: float = PATIENCE_S, every_s: float = 0.05) -> None:
    """Waits until the condition holds. Checks the condition again and again, because no signal announces it."""
    deadline_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline_s, f"not within {within_s:g} s: {what}"
        time.sleep(every_s)


def detail(error: grpc.RpcError, kind: type[_Detail]) -> _Detail | None:
    """Returns one of the google.rpc details of a refused call."""
    status = rpc_status.from_call(cast("grpc.Call", error))
    for packed in status.details if status is not None else ():
        found = kind()
        if packed.Unpack(found):
            return found
    return None


def fields_of(status: status_pb2.Status) -> list[str]:
    """Returns the fields that the BadRequest in a status names. The status is a field of an answer, and not the status
    of a call."""
    bad = error_details_pb2.BadRequest()
    return [found.field for packed in status.details if packed.Unpack(bad) for found in bad.field_violations]


def violated_fields(error: grpc.RpcError) -> list[str]:
    bad = detail(error, error_details_pb2.BadRequest)
    return [] if bad is None else [violation.field for violation in bad.field_violations]
