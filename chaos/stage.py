"""All that a run stands on: shards behind proxies, supervised routers, clients. All of it ends with the scope."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from chaos.clients.site import Site
from chaos.crew import Crew, Member, open_crew
from chaos.disk import SmallDisk
from chaos.faketime import FakeTime
from chaos.shards import Shard, open_shards
from router.supervisor import Supervisor

_DRAIN_S = 5.0
_CONNECTIONS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Cast:
    """How much of everything there is."""

    shards: int = 3
    # Whether the first shard has a synchronous standby.
    replicated: bool = True
    routers: int = 3
    producers: int = 2
    # By the names of modules in chaos/clients.
    workers: Sequence[str] = ("streaming", "streaming", "polling", "polling", "handling")
    orgs: int = 300
    window_s: float = 3.0

    @property
    def producer_names(self) -> list[str]:
        return [f"producer-{number}" for number in range(1, self.producers + 1)]

    @property
    def worker_names(self) -> list[str]:
        return [f"worker-{number}-{sort}" for number, sort in enumerate(self.workers, 1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """What faults strike, and clients use."""

    cast: Cast
    address: str
    shards: Mapping[str, Shard]
    routers: Supervisor
    crew: Crew
    # The cluster file that the routers read.
    config: Path
    # The disk of one node, small enough to be filled; None where none can be made.
    disk: SmallDisk | None
    # The clock of the routers; None where it cannot be set.
    clock: FakeTime | None
    say: Callable[[str], None]


@contextlib.asynccontextmanager
async def open_stage(
    cast: Cast, *, seed: int, folder: Path, scratch: Path, disk: SmallDisk | None, say: Callable[[str], None]
) -> AsyncGenerator[Stage, None]:
    """`folder` is for histories and logs, `scratch` for what is gone afterwards and nobody else may read."""
    histories = folder / "histories"
    histories.mkdir()
    async with contextlib.AsyncExitStack() as stack:
        roots = {} if disk is None else {disk.node: disk.path}
        say("starting Postgres")
        shards = await stack.enter_async_context(open_shards(cast.shards, replicated=cast.replicated, roots=roots))
        config = scratch / "cluster.toml"
        config.touch(mode=0o600)
        config.write_text(cluster_file(shards))
        say("starting routers")
        clock = FakeTime.found(scratch)
        routers = Supervisor(config, listen="127.0.0.1:0", processes=cast.routers, drain_seconds=_DRAIN_S)
        # Clients keep the right time: their stamps are evidence. Postgres does not inherit it (embedded/account.py).
        environ = dict(os.environ)
        address = await stack.enter_async_context(_running(routers, {} if clock is None else clock.environ))
        say("starting clients")
        members = _members(cast, address=address, folder=histories, seed=seed)
        crew = await stack.enter_async_context(open_crew(members, environ, folder / "clients.log"))
        yield Stage(
            cast=cast,
            address=address,
            shards=shards,
            routers=routers,
            crew=crew,
            config=config,
            disk=disk,
            clock=clock,
            say=say,
        )


def cluster_file(shards: Mapping[str, Shard]) -> str:
    entries = "".join(f"\n[[shard]]\nname = '{name}'\ndsn = '''{shard.dsn}'''\n" for name, shard in shards.items())
    router = f"\n[router]\nconnections_per_shard = {_CONNECTIONS}\ndrain_seconds = {_DRAIN_S}\n"
    return f'[cluster]\nname = "chaos"\n{entries}{router}'


def _members(cast: Cast, *, address: str, folder: Path, seed: int) -> list[Member]:
    orgs = [f"org-{number:03}" for number in range(cast.orgs)]

    def member(sort: str, name: str, mine: int, places: int) -> Member:
        site = Site(
            address=address,
            folder=str(folder),
            name=name,
            generation=0,
            seed=seed,
            orgs=orgs,
            mine=mine,
            places=places,
            window_s=cast.window_s,
        )
        return Member(sort, site)

    members = [member("producer", name, at, cast.producers) for at, name in enumerate(cast.producer_names)]
    for at, (sort, name) in enumerate(zip(cast.workers, cast.worker_names, strict=True)):
        members.append(member(sort, name, cast.workers[:at].count(sort), cast.workers.count(sort)))
    return members


@contextlib.asynccontextmanager
async def _running(routers: Supervisor, environ: Mapping[str, str]) -> AsyncGenerator[str, None]:
    """Yields their address. `environ` is added to what they inherit, those too that are started later."""
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    stop = asyncio.Event()
    os.environ.update(environ)
    running = asyncio.create_task(routers.run(ready=ready.set_result, stop=stop))
    try:
        starts: set[asyncio.Future[str] | asyncio.Future[None]] = {running, ready}
        await asyncio.wait(starts, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            await running
        yield await ready
    finally:
        stop.set()
        for name in environ:
            del os.environ[name]
        await running
