"""The alerts that wake somebody, with real faults: a real Prometheus scrapes real routers with the configuration that
is shipped. Each alert fires within a minute after its fault begins, and stops after the fault ends. Without a fault no
alert fires."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Generator
from pathlib import Path

import grpc
import pytest

from cli.local import in_thread
from embedded import BinariesNotFound
from proof.postgres import Entrance, open_shards
from tests.effort import THOROUGH
from tests.jobs import job_id, job_message
from tests.prometheus import asked, scraping
from tests.routers import PATIENCE_S, reserved_address, running_routers, write_cluster
from tests.streams import until
from windrow.v1 import queue_pb2, queue_pb2_grpc

# The longest time that a fault may last before its alert fires.
FIRES_S = 60.0
# WindrowEnqueuesFailFast looks five minutes back.
ENDS_S = 420.0
HEALTHY_S = 60.0
# Enough orgs that some live on each shard.
ORGS = 20
_PAUSE_S = 0.02


@pytest.mark.thorough
@pytest.mark.skipif(not THOROUGH, reason="takes ten minutes, most of which Prometheus waits: ./run test --thorough")
@pytest.mark.timeout(1200)
async def test_each_page_comes_within_a_minute_of_its_fault_and_ends_after_it(tmp_path: Path) -> None:
    async with contextlib.AsyncExitStack() as stack:
        try:
            shards = await stack.enter_async_context(open_shards(2, replicated=False, roots={}))
        except BinariesNotFound as error:
            pytest.skip(str(error))
        # Routers reach the catalog through a separate proxy. So the catalog can be unreachable while the shard on the
        # same server answers.
        catalog = Entrance(shards["s1"].nodes)
        await stack.enter_async_context(catalog.open())
        scraped = [stack.enter_context(reserved_address()) for _ in "ab"]
        configs = [
            write_cluster(
                tmp_path / f"{address.rpartition(':')[2]}.toml",
                {name: shard.dsn for name, shard in shards.items()},
                catalog_dsn=catalog.dsn,
            )
            for address in scraped
        ]
        for config, address in zip(configs, scraped, strict=True):
            config.write_text(config.read_text() + f'metrics = "{address}"\n')
        routers = await stack.enter_async_context(in_thread(running_routers(configs[0], processes=2)))
        second = await stack.enter_async_context(contextlib.AsyncExitStack())
        await second.enter_async_context(in_thread(running_routers(configs[1])))
        firing = stack.enter_context(_prometheus(tmp_path, scraped))
        await stack.enter_async_context(_load(routers.address))

        healthy_until_s = time.monotonic() + HEALTHY_S
        while time.monotonic() < healthy_until_s:
            assert await asyncio.to_thread(firing) == set()
            await asyncio.sleep(1)

        with shards["s2"].entrance.closed():
            await _until_firing(firing, "WindrowShardDown", "WindrowEnqueuesFailFast")
        with catalog.closed():
            await _until_firing(firing, "WindrowCatalogAway")
        await second.aclose()
        await _until_firing(firing, "WindrowRouterDown")
        await second.enter_async_context(in_thread(running_routers(configs[1])))

        repaired_s = time.monotonic()
        # The alert WindrowEnqueuesFailSlowly looks half an hour back. It makes a ticket and does not wake anybody.
        await until(
            lambda: asyncio.to_thread(lambda: firing() <= {"WindrowEnqueuesFailSlowly"}),
            "no page fires",
            within_s=ENDS_S,
            every_s=1.0,
        )
        print(f"no page fired {time.monotonic() - repaired_s:.0f} s after the last repair")


async def _until_firing(firing: Callable[[], set[str]], *names: str) -> None:
    began_s = time.monotonic()
    missing = list(names)
    while missing:
        took_s = time.monotonic() - began_s
        assert took_s < FIRES_S, f"not within {FIRES_S:g} s: {missing}"
        for name in set(missing) & await asyncio.to_thread(firing):
            print(f"{name} fired {took_s:.0f} s after its fault")
            missing.remove(name)
        await asyncio.sleep(0.5)


@contextlib.contextmanager
def _prometheus(folder: Path, scraped: list[str]) -> Generator[Callable[[], set[str]], None, None]:
    """Runs Prometheus with the shipped configuration and rules. Yields a function that returns the names of the alerts
    that fire."""
    with scraping(folder, *scraped) as address:

        def firing() -> set[str]:
            found = asked(address, "query", query='ALERTS{alertstate="firing"}')
            return set() if found is None else {one["metric"]["alertname"] for one in found["result"]}

        yield firing


@contextlib.asynccontextmanager
async def _load(address: str) -> AsyncGenerator[None, None]:
    """Stores jobs of one org after another during the block, and acks the jobs that are ready. The metrics report the
    errors, so they are ignored here."""
    async with grpc.aio.insecure_channel(address) as channel:
        queue = queue_pb2_grpc.QueueStub(channel)

        async def once(org: str) -> None:
            job = job_message(id=job_id(), queue="load", kind="work")
            await queue.Enqueue(queue_pb2.EnqueueRequest(org=org, jobs=[job]), timeout=PATIENCE_S)
            jobs = (
                await queue.Dequeue(queue_pb2.DequeueRequest(org=org, queues=["load"], max_jobs=10), timeout=PATIENCE_S)
            ).jobs
            acks = [queue_pb2.Ack(lease=one.lease) for one in jobs]
            await queue.Ack(queue_pb2.AckRequest(org=org, acks=acks), timeout=PATIENCE_S)

        async def run() -> None:
            while True:
                for number in range(ORGS):
                    with contextlib.suppress(grpc.RpcError):
                        await once(f"org-{number}")
                    await asyncio.sleep(_PAUSE_S)

        task = asyncio.create_task(run())
        try:
            yield
            assert not task.done()
        finally:
            task.cancel()
            await asyncio.wait({task})
