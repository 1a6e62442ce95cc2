"""A cluster of real processes: Postgres from embedded/, and router processes with an operator's arguments."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import psutil
import pytest

from embedded import open_clusters
from tests import preloaded
from tests.collector import Collector, collecting
from tests.routers import reserved_address
from windrow import Client, uuid7

CHECKOUT = Path(__file__).resolve().parents[2]
# The longest time for which a test waits. A test reaches this limit only if something hangs.
WAIT_S = 60.0


class RunningCluster:
    """Shards that keep running, and routers that a test may kill and start again on the same port."""

    def __init__(self, folder: Path, dsns: dict[str, str], address: str) -> None:
        self.dsns = dsns
        self.address = address
        self._config = folder / "cluster.toml"
        self._log = folder / "router.log"
        self._router: subprocess.Popen[str] | None = None

    def start(self) -> None:
        shards = "".join(f'[[shard]]\nname = "{name}"\ndsn = "{dsn}"\n' for name, dsn in self.dsns.items())
        self._config.write_text(f'{shards}[router]\nlisten = "{self.address}"\nprocesses = 1\ndrain_seconds = 2\n')
        with self._log.open("a") as log:
            self._router = preloaded.start("-m", "router", "--config", self._config, stdout=subprocess.PIPE, stderr=log)
        assert self._router.stdout is not None
        for line in self._router.stdout:
            if line.startswith("listening on "):
                return
        pytest.fail(f"the router did not start:\n{self._log.read_text()}")

    def kill(self) -> None:
        """Kills all router processes at the same time with SIGKILL."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        self._end(signal.SIGTERM)

    def _end(self, number: signal.Signals) -> None:
        router, self._router = self._router, None
        if router is None:
            return
        supervisor = psutil.Process(router.pid)
        processes = supervisor.children(recursive=True)
        supervisor.send_signal(number)
        if number == signal.SIGKILL:
            for process in processes:
                process.kill()
        try:
            router.wait(WAIT_S)
            psutil.wait_procs(processes, WAIT_S)
        except subprocess.TimeoutExpired:
            router.kill()
            router.wait(WAIT_S)
            raise
        finally:
            if router.stdout is not None:
                router.stdout.close()


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    with open_clusters(["s1", "s2"], ephemeral=True) as shards, reserved_address() as address:
        running = RunningCluster(tmp_path_factory.mktemp("cluster"), shards.dsns, address)
        running.start()
        try:
            yield running
        finally:
            running.stop()


@pytest.fixture
async def client(cluster: RunningCluster) -> AsyncIterator[Client]:
    """A client of an org that no other test uses."""
    async with Client(cluster.address, org=f"org-{uuid7()}") as made:
        yield made


@pytest.fixture
def collector() -> Iterator[Collector]:
    yield from collecting(0)


@pytest.fixture(scope="session")
def app_dsn() -> Iterator[str]:
    """Yields the DSN of the database of the user's application."""
    with open_clusters(["app"], ephemeral=True) as own:
        yield own.dsns["app"]


async def eventually(holds: Callable[[], Awaitable[object]]) -> None:
    """Repeats the check until it succeeds."""
    deadline = time.monotonic() + WAIT_S
    while not await holds():
        assert time.monotonic() < deadline, "it never held"
        await asyncio.sleep(0.05)
