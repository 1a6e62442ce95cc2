"""The processes that a scenario measures: Postgres and routers, a database for each peer, and the client processes of
each system, which wait for their turns. All processes end with the scope."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import tempfile
from asyncio.subprocess import Process
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import psycopg
from psycopg import sql

from bench import meter, statements
from bench.clients import Clients, open_clients
from bench.system import Site
from bench.systems import PEERS
from cli.databases import catalog_of, read
from cli.local import in_thread
from embedded import Cluster, open_clusters
from proof.certificates import Authority
from proof.clients import site as clients_site
from proof.cluster_file import ClusterFile, Entry
from proof.environment import postgres
from proof.processes import serving
from proof.routers import running
from router.gate.auth.scopes import Scope
from router.process.supervisor import Supervisor
from router.settings import router_settings
from shard.admin import api_keys

_PAUSE_S = 0.2
_DRAIN_S = 5.0
# All systems need connections at the same time, because they stay connected while they take turns.
SETTINGS: Mapping[str, str] = {"max_connections": "1500"}
# The visibility window of leases by default.
WINDOW_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Servers:
    """Processes that serve gRPC on one address."""

    address: str
    pids: Callable[[], Sequence[int]]
    # See Site.ca and Site.token.
    ca: str | None = None
    token: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    # The Postgres server of each shard, by the shard's name.
    postgres: Mapping[str, Cluster]
    routers: Servers
    cache: Path
    # The cluster file that routers read.
    cluster_file: ClusterFile
    # The environment that client processes inherit.
    environ: Mapping[str, str]
    # Whether every server has pg_stat_statements, which counts statements.
    counts_statements: bool
    _folder: Path
    _stack: contextlib.AsyncExitStack
    _databases: dict[str, str] = field(default_factory=dict[str, str])
    _scopes: defaultdict[str, list[contextlib.AsyncExitStack]] = field(default_factory=lambda: defaultdict(list))

    @property
    def dsns(self) -> dict[str, str]:
        return {name: server.dsn for name, server in self.postgres.items()}

    async def surroundings(self) -> dict[str, object]:
        return await asyncio.to_thread(postgres, next(iter(self.dsns.values())))

    async def database(self, system: str) -> str:
        """Returns the DSN of the system's database. Windrow uses the first shard's database. Each peer gets a database
        of its own on the same server."""
        if system not in self._databases:
            first = next(iter(self.postgres.values()))
            self._databases[system] = (
                await asyncio.to_thread(create_database, first.dsn, first.superuser_dsn, system)
                if system in PEERS
                else first.dsn
            )
        return self._databases[system]

    async def clients(
        self,
        system: str,
        *,
        servers: Sequence[Servers],
        callers: int,
        connections: int | None = None,
    ) -> Clients:
        """Starts client processes for the rest of the stage's scope, one for each of `servers`. `callers` and
        `connections` are numbers for each process."""
        scope = contextlib.AsyncExitStack()
        self._stack.push_async_callback(scope.aclose)
        self._scopes[system].append(scope)
        return await scope.enter_async_context(
            self.passing_clients(system, servers=servers, callers=callers, connections=connections)
        )

    async def drop(self, system: str) -> None:
        """Ends the client processes of a system."""
        for scope in self._scopes.pop(system, []):
            await scope.aclose()

    @contextlib.asynccontextmanager
    async def passing_clients(
        self,
        system: str,
        *,
        servers: Sequence[Servers],
        callers: int,
        connections: int | None = None,
    ) -> AsyncGenerator[Clients, None]:
        """Yields client processes that end with this scope."""
        dsn = await self.database(system)
        sites = [
            Site(
                address=one.address,
                dsns=self.dsns,
                dsn=dsn,
                cache=str(self.cache),
                callers=callers,
                connections=connections,
                ca=one.ca,
                token=one.token,
            )
            for one in servers
        ]
        tally = self._folder / f"tally-{secrets.token_hex(4)}"
        async with open_clients(system, sites, tally=tally, environ=self.environ) as clients:
            yield clients

    async def more_routers(self, processes: int) -> Servers:
        """Starts further routers of the same cluster on an address of their own, for the rest of the stage's scope."""
        return await self._stack.enter_async_context(_routers(self.cluster_file.path, processes, {}))

    async def routers_with(
        self, name: str, tables: str, *, processes: int, environ: Mapping[str, str] | None = None
    ) -> tuple[Path, Servers]:
        """Starts further routers of the same cluster for the rest of the stage's scope. Their cluster file has this
        name, and contains `tables` in addition. Returns the file and the routers."""
        config = self.file(name)
        config.touch(mode=0o600)
        config.write_text(self.cluster_file.text + tables)
        return config, await self._stack.enter_async_context(_routers(config, processes, environ or {}))

    async def tls_routers(self, processes: int, *, keys: bool) -> Servers:
        """Starts further routers of the same cluster that speak TLS, for the rest of the stage's scope. With `keys`
        they also require an API key."""
        authority = Authority()
        ca, certificate, key = (self.file(name) for name in ("ca.crt", "tls.crt", "tls.key"))
        authority.saved(ca)
        authority.sign().save(certificate, key)
        tables = f"\n[tls]\ncertificate = '{certificate}'\nkey = '{key}'\n"
        if keys:
            tables += "\n[auth]\napi_keys = true\n"
        config, servers = await self.routers_with("tls-keys.toml" if keys else "tls.toml", tables, processes=processes)
        return replace(servers, ca=str(ca), token=await _new_key(config) if keys else None)

    async def echo(self, processes: int) -> Servers:
        """Starts echo servers (bench/echo_server.py) for the rest of the stage's scope."""
        return await self._stack.enter_async_context(_echo(processes))

    @property
    def histories(self) -> Path:
        return self.file("histories")

    def site(
        self, name: str, orgs: Sequence[str], *, per_s: float = 0.0, mine: int = 0, places: int = 1
    ) -> clients_site.Site:
        """Returns the orders for a client process that writes a history."""
        self.histories.mkdir(exist_ok=True)
        return clients_site.Site(
            address=self.routers.address,
            folder=str(self.histories),
            name=name,
            generation=0,
            seed=0,
            orgs=orgs,
            mine=mine,
            places=places,
            window_s=WINDOW_S,
            per_s=per_s,
        )

    def file(self, name: str) -> Path:
        """Returns the path of a temporary file of this name."""
        return self._folder / name

    def spent(self, servers: Servers, *, producers: Clients | None = None, workers: Clients) -> meter.Spent:
        return meter.spent(
            producers=producers.pids if producers is not None else (),
            workers=workers.pids,
            routers=servers.pids(),
            postgres=[server.pid for server in self.postgres.values()],
        )

    async def written(self, system: str) -> meter.Written:
        database = await self.database(system)
        servers = [[database]] if system in PEERS else [[dsn] for dsn in self.dsns.values()]
        return await asyncio.to_thread(meter.written, {str(at): dsns for at, dsns in enumerate(servers)})

    async def clear(self) -> None:
        """Deletes the finished jobs of earlier runs, also from the books, so that they do not slow down the next run.
        Does nothing on a shard that still has unfinished jobs."""
        for dsn in self.dsns.values():
            await asyncio.to_thread(_clear, dsn)


@contextlib.asynccontextmanager
async def open_stage(
    *, shards: int, routers: int, cache: Path, named: int | None = None
) -> AsyncGenerator[Stage, None]:
    """Starts a cluster for this scope. `named`: how many of the shards the cluster file names at first; by default
    all."""
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="windrow-bench-")))
        names = [f"s{number}" for number in range(1, shards + 1)]
        opened = open_clusters(names, ephemeral=True, settings=SETTINGS)
        clusters = await stack.enter_async_context(in_thread(opened))
        entries = [Entry(name=name, dsn=clusters[name].dsn) for name in names[:named]]
        cluster_file = ClusterFile(path=folder / "cluster.toml", name="bench", entries=entries)
        cluster_file.save()
        servers = await stack.enter_async_context(_routers(cluster_file.path, routers, {}))
        superuser_dsns = [cluster.superuser_dsn for cluster in clusters.values()]
        yield Stage(
            postgres=clusters,
            routers=servers,
            cache=cache,
            cluster_file=cluster_file,
            environ=dict(os.environ),
            counts_statements=await asyncio.to_thread(statements.count, superuser_dsns),
            _folder=folder,
            _stack=stack,
        )


async def fresh_run(*groups: Clients, record: bool = False) -> str:
    """Makes empty queues for a run of all these clients, and waits until the load that this causes is over. Returns the
    name of the run."""
    name = f"bench-{secrets.token_hex(6)}"
    for clients in groups:
        await clients.prepare(name, record=record)
    await asyncio.sleep(_PAUSE_S)
    return name


def create_database(dsn: str, superuser_dsn: str, system: str) -> str:
    name = f"bench_{system.replace('-', '_')}"
    parts = urlsplit(dsn)
    with psycopg.connect(superuser_dsn, autocommit=True) as connection:
        connection.execute(
            sql.SQL("CREATE DATABASE {} OWNER {} TEMPLATE template0 ENCODING 'UTF8'").format(
                sql.Identifier(name), sql.Identifier(parts.username or "")
            )
        )
    return urlunsplit(parts._replace(path=f"/{name}"))


def _clear(dsn: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        row = connection.execute("SELECT NOT EXISTS (SELECT FROM windrow.job)").fetchone()
        if row == (True,):
            connection.execute("TRUNCATE windrow.finished, windrow.tally")


@contextlib.asynccontextmanager
async def _routers(config: Path, processes: int, environ: Mapping[str, str]) -> AsyncGenerator[Servers, None]:
    supervisor = Supervisor(
        config,
        listen="127.0.0.1:0",
        processes=processes,
        drain_seconds=_DRAIN_S,
        metrics=router_settings(read(config)).metrics,
        environ=environ,
    )
    async with running(supervisor) as address:
        yield Servers(address=address, pids=lambda: supervisor.pids)


@contextlib.asynccontextmanager
async def _echo(count: int) -> AsyncGenerator[Servers, None]:
    async with contextlib.AsyncExitStack() as stack:
        # This socket keeps the port while the processes start and end.
        holder = stack.enter_context(socket.socket())
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{holder.getsockname()[1]}"
        processes: list[Process] = []
        for _ in range(count):
            process, _said = await stack.enter_async_context(serving("bench.echo_server", "--listen", address))
            processes.append(process)
        yield Servers(address=address, pids=lambda: [process.pid for process in processes])


async def _new_key(config: Path) -> str:
    """Creates an API key for all orgs with all scopes. Returns its text."""
    async with catalog_of(read(config)) as database:
        _, text = await api_keys.create(
            database, org=None, scopes=[scope.value for scope in Scope], name="bench", expires_in_s=None
        )
    return text
