"""A whole cluster on this machine: a Postgres server for each shard, router processes, a balancer and an archiver.
`windrow up`, the demo and the tests use it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from archiver.service import archive
from balancer.service import balance
from cli import local_file
from embedded import Cluster, EmbeddedError, open_clusters
from router.process.exposure import exposure
from router.process.supervisor import Supervisor
from router.settings import LISTEN_DEFAULT, router_settings
from shard.placement.cluster_file import read_cluster
from shard.placement.file_watcher import WatchedFile

_log = logging.getLogger(__name__)
_LOOK_S = 0.25
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalCluster:
    """A running cluster. Processes that die, as in fault tests, are restarted automatically."""

    # HOST:PORT of the routers.
    address: str
    # The cluster file that the routers read.
    config: Path
    # All shards of the cluster file.
    shards: Sequence[str]
    # The Postgres servers that run on this machine, by shard.
    postgres: Mapping[str, Cluster]
    routers: Supervisor


@contextlib.asynccontextmanager
async def local_cluster(
    *,
    root: Path | None,
    shards: Sequence[str],
    processes: int = 2,
    listen: str = LISTEN_DEFAULT,
    secure: bool = False,
) -> AsyncGenerator[LocalCluster, None]:
    """Starts a cluster with Postgres servers for `shards` and with `processes` router processes. Stops it at the end.
    `secure`: the cluster file demands that callers prove who they are, also in later starts.

    Keeps the data below `root` for the next start; local_file.servers lists the shards to start then. `root` None: an
    ephemeral cluster, which leaves no data. Raises EmbeddedError, ClusterFileError, ListensOpenly, and what
    router.process.supervisor.Supervisor.run raises.
    """
    async with contextlib.AsyncExitStack() as stack:
        opened = open_clusters(shards, root=root, ephemeral=root is None)
        postgres = await stack.enter_async_context(in_thread(opened))
        home = postgres[local_file.FIRST].folder if root is None else root / local_file.FIRST
        config = home / local_file.FILE
        local_file.keep(config, {name: server.dsn for name, server in postgres.items()}, secure=secure)
        cluster = read_cluster(config)
        settings = router_settings(cluster, source=str(config))
        routers = Supervisor(
            config,
            listen=listen,
            processes=processes,
            drain_seconds=settings.drain_seconds,
            metrics=settings.metrics,
            exposed=exposure(cluster, listen, insecure=settings.insecure),
        )
        ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        stop = asyncio.Event()
        running = asyncio.create_task(routers.run(ready=ready.set_result, stop=stop))
        watching = [asyncio.create_task(_keep(cluster)) for cluster in postgres.values()]
        try:
            starts: set[asyncio.Future[str] | asyncio.Future[None]] = {running, ready}
            await asyncio.wait(starts, return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                await running
            async with _services(config):
                yield LocalCluster(
                    address=await ready,
                    config=config,
                    shards=[entry.name for entry in cluster.shards],
                    postgres=postgres,
                    routers=routers,
                )
        finally:
            for watcher in watching:
                watcher.cancel()
            stop.set()
            await asyncio.gather(*watching, return_exceptions=True)
            await running


@contextlib.asynccontextmanager
async def _services(config: Path) -> AsyncGenerator[None, None]:
    """Runs a balancer and an archiver within this scope."""
    stop = asyncio.Event()
    running: list[asyncio.Task[None]] = []
    for serve in (balance, archive):
        file = WatchedFile(config)
        running.append(asyncio.create_task(serve(file, file.read(), stop=stop)))
    try:
        yield
    finally:
        stop.set()
        await asyncio.gather(*running)


@contextlib.asynccontextmanager
async def in_thread(scope: contextlib.AbstractContextManager[_T]) -> AsyncGenerator[_T, None]:
    """Enters and leaves a blocking context manager in a thread, so that it does not block the event loop."""
    entering = asyncio.create_task(asyncio.to_thread(scope.__enter__))
    try:
        # A thread cannot be cancelled. If this task is cancelled, wait until the scope has been entered, and then leave
        # it.
        yield await asyncio.shield(entering)
    finally:
        await asyncio.wait({entering})
        if entering.exception() is None:
            await asyncio.to_thread(scope.__exit__, None, None, None)


async def _keep(cluster: Cluster) -> None:
    """Restarts a Postgres server that died. Runs until cancelled."""
    while True:
        await asyncio.sleep(_LOOK_S)
        if not cluster.alive:
            _log.warning("Postgres %s has died; restarting it", cluster.name)
            try:
                await asyncio.to_thread(cluster.start)
            except EmbeddedError as error:
                _log.error("%s", error)
