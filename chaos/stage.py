"""The processes of a run: shards behind proxies, supervised routers, balancers, clients. All processes end with the
scope."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from asyncio.subprocess import DEVNULL
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from chaos.crew import Crew, Member, open_crew
from chaos.disk import SmallDisk
from chaos.faketime import FakeTime
from proof import journal
from proof.balancers import Balancers, open_balancers
from proof.clients.site import Site
from proof.cluster_file import ClusterFile, Entry
from proof.postgres import Entrance, Shard, open_shards
from proof.processes import finish, start
from proof.routers import running
from router.process.supervisor import Supervisor

_DRAIN_S = 5.0
_CONNECTIONS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Cast:
    """How many processes of each kind a run has."""

    shards: int = 3
    # Whether the first shard has a synchronous standby.
    replicated: bool = True
    routers: int = 3
    # Only one balancer leads.
    balancers: int = 2
    producers: int = 2
    # The module in chaos/clients of each worker.
    workers: Sequence[str] = ("consumer", "consumer", "poller", "poller", "handler", "canceller")
    orgs: int = 300
    window_s: float = 3.0

    @property
    def producer_names(self) -> list[str]:
        return [f"producer-{number}" for number in range(1, self.producers + 1)]

    @property
    def balancer_names(self) -> list[str]:
        return [f"balancer-{number}" for number in range(1, self.balancers + 1)]

    @property
    def org_names(self) -> list[str]:
        """The names of all orgs, the busiest org first."""
        return [f"org-{number:03}" for number in range(self.orgs)]

    @property
    def worker_names(self) -> list[str]:
        return [f"worker-{number}-{sort}" for number, sort in enumerate(self.workers, 1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """The parts that faults hit and clients use."""

    cast: Cast
    address: str
    shards: Mapping[str, Shard]
    # Proxies in front of the first shard's database, which also has the catalog.
    catalog: Entrance
    routers: Supervisor
    balancers: Balancers
    crew: Crew
    # The cluster file that routers and balancers read.
    file: ClusterFile
    # The disk of one node. The disk is small enough to be filled. None: this machine cannot have such a disk.
    disk: SmallDisk | None
    # The clock of routers and balancers. None: the clock cannot be set.
    clock: FakeTime | None
    say: Callable[[str], None]


@contextlib.asynccontextmanager
async def open_stage(
    cast: Cast, *, seed: int, folder: Path, scratch: Path, disk: SmallDisk | None, say: Callable[[str], None]
) -> AsyncGenerator[Stage, None]:
    """Starts a cluster and clients for this scope. `folder`: for histories and logs. `scratch`: for private files that
    are deleted afterwards."""
    histories = folder / "histories"
    histories.mkdir()
    async with contextlib.AsyncExitStack() as stack:
        roots = {} if disk is None else {disk.node: disk.path}
        say("starting Postgres")
        shards = await stack.enter_async_context(open_shards(cast.shards, replicated=cast.replicated, roots=roots))
        first = next(iter(shards.values()))
        catalog = Entrance(first.nodes)
        await stack.enter_async_context(catalog.open())
        file = ClusterFile(
            path=scratch / "cluster.toml",
            name="chaos",
            catalog_dsn=catalog.dsn,
            entries=[Entry(name=name, dsn=shard.dsn) for name, shard in shards.items()],
            rest=f"[router]\nconnections_per_shard = {_CONNECTIONS}\ndrain_seconds = {_DRAIN_S}\n",
        )
        file.save()
        # Make the tables now, because the journal needs them. A router may print that it is ready before it has made
        # the tables.
        await finish(await start("cli.main", "migrate", "--config", str(file.path), stdout=DEVNULL))
        say("starting routers and balancers")
        clock = FakeTime.found(scratch)
        # Clients keep the true time, because their timestamps are evidence.
        clock_environ = {} if clock is None else clock.environ
        routers = Supervisor(
            file.path,
            listen="127.0.0.1:0",
            processes=cast.routers,
            drain_seconds=_DRAIN_S,
            environ=clock_environ,
        )
        address = await stack.enter_async_context(running(routers))
        await asyncio.to_thread(journal.install, first, shards.values())
        balancers = await stack.enter_async_context(
            open_balancers(cast.balancer_names, config=file.path, folder=folder, environ=clock_environ)
        )
        file.hurry = lambda: _hurry(routers, balancers)
        say("starting clients")
        members = _members(cast, address=address, folder=histories, seed=seed)
        crew = await stack.enter_async_context(open_crew(members, folder / "clients.log"))
        yield Stage(
            cast=cast,
            address=address,
            shards=shards,
            catalog=catalog,
            routers=routers,
            balancers=balancers,
            crew=crew,
            file=file,
            disk=disk,
            clock=clock,
            say=say,
        )


def _hurry(routers: Supervisor, balancers: Balancers) -> None:
    routers.reload()
    for pid in balancers.pids:
        # A process that has no handler yet is still starting, and will read the file anyway.
        if _catches_hangup(pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGHUP)


def _catches_hangup(pid: int) -> bool:
    """Returns whether the process has a handler for SIGHUP. Without a handler, the signal would end the process."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> signal.SIGHUP - 1 & 1)
    return False


def _members(cast: Cast, *, address: str, folder: Path, seed: int) -> list[Member]:
    def member(sort: str, name: str, mine: int, places: int) -> Member:
        site = Site(
            address=address,
            folder=str(folder),
            name=name,
            generation=0,
            seed=seed,
            orgs=cast.org_names,
            mine=mine,
            places=places,
            window_s=cast.window_s,
        )
        return Member(sort, site)

    members = [member("producer", name, at, cast.producers) for at, name in enumerate(cast.producer_names)]
    for at, (sort, name) in enumerate(zip(cast.workers, cast.worker_names, strict=True)):
        members.append(member(sort, name, cast.workers[:at].count(sort), cast.workers.count(sort)))
    return members
