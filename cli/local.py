"""A whole cluster on this machine: Postgres for each shard, router processes in front of them, and a balancer. What
`windrow up`, the demo and the tests stand on."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from balancer.service import balance
from embedded import Cluster, EmbeddedError, default_root, open_clusters
from router.settings import LISTEN_DEFAULT
from router.supervisor import Supervisor
from shard.following import FollowedFile

_log = logging.getLogger(__name__)
_LOOK_S = 0.25
_DRAIN_S = 10.0
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalCluster:
    """A running cluster. Fault tests kill its parts: they come back by themselves."""

    # HOST:PORT of the routers.
    address: str
    # The cluster file that the routers read.
    config: Path
    postgres: Mapping[str, Cluster]
    routers: Supervisor


@contextlib.asynccontextmanager
async def local_cluster(
    *,
    shards: int = 2,
    processes: int = 2,
    listen: str = LISTEN_DEFAULT,
    root: Path | None = None,
    ephemeral: bool = False,
) -> AsyncGenerator[LocalCluster, None]:
    """Starts a cluster of `shards` Postgres servers and `processes` router processes; stops it at the end of the scope.

    Data stays below `root` (default: embedded.default_root()) and the next start goes on with it, also with more
    shards: these are filled. An ephemeral cluster leaves nothing. Raises EmbeddedError, and what
    router.supervisor.Supervisor.run raises.
    """
    names = [f"s{number}" for number in range(1, shards + 1)]
    root = root or default_root()
    async with contextlib.AsyncExitStack() as stack:
        opened = open_clusters(names, root=None if ephemeral else root, ephemeral=ephemeral)
        postgres = await stack.enter_async_context(in_thread(opened))
        # Beside the first shard's data, and gone with it; ours alone, because it holds passwords.
        config = postgres[names[0]].folder / "cluster.toml"
        config.unlink(missing_ok=True)
        config.touch(mode=0o600)
        config.write_text(_cluster_file(postgres))
        routers = Supervisor(config, listen=listen, processes=processes, drain_seconds=_DRAIN_S)
        ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        stop = asyncio.Event()
        running = asyncio.create_task(routers.run(ready=ready.set_result, stop=stop))
        watching = [asyncio.create_task(_keep(cluster)) for cluster in postgres.values()]
        try:
            starts: set[asyncio.Future[str] | asyncio.Future[None]] = {running, ready}
            await asyncio.wait(starts, return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                await running
            async with _balanced(config):
                yield LocalCluster(address=await ready, config=config, postgres=postgres, routers=routers)
        finally:
            for watcher in watching:
                watcher.cancel()
            stop.set()
            await asyncio.gather(*watching, return_exceptions=True)
            await running


@contextlib.asynccontextmanager
async def _balanced(config: Path) -> AsyncGenerator[None, None]:
    """A balancer runs within this scope."""
    file = FollowedFile(config)
    stop = asyncio.Event()
    balancing = asyncio.create_task(balance(file, file.read(), stop=stop))
    try:
        yield
    finally:
        stop.set()
        await balancing


@contextlib.asynccontextmanager
async def in_thread(scope: contextlib.AbstractContextManager[_T]) -> AsyncGenerator[_T, None]:
    """A scope that takes its time to enter and to leave, without stopping the event loop."""
    entering = asyncio.create_task(asyncio.to_thread(scope.__enter__))
    try:
        # A thread cannot be cancelled: if we are, what it starts is awaited, and stopped.
        yield await asyncio.shield(entering)
    finally:
        await asyncio.wait({entering})
        if entering.exception() is None:
            await asyncio.to_thread(scope.__exit__, None, None, None)


def _cluster_file(postgres: Mapping[str, Cluster]) -> str:
    shards = "".join(f'\n[[shard]]\nname = "{name}"\ndsn = "{cluster.dsn}"\n' for name, cluster in postgres.items())
    return f'[cluster]\nname = "local"\n{shards}\n[router]\ndrain_seconds = {_DRAIN_S}\n'


async def _keep(cluster: Cluster) -> None:
    """Starts a Postgres again that died."""
    while True:
        await asyncio.sleep(_LOOK_S)
        if not cluster.alive:
            _log.warning("Postgres %s has died; starting it again", cluster.name)
            try:
                await asyncio.to_thread(cluster.start)
            except EmbeddedError as error:
                _log.error("%s", error)
