"""The shards of a test run. Starts and ends their Postgres servers, one of which may have a standby, and the proxies in
front of the servers.

This module never restarts a server by itself: the caller that stopped a server must start it again.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil
import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from tenacity import retry, retry_if_exception_message, stop_after_delay, wait_fixed

from embedded import Cluster, EmbeddedError
from proof.processes import family, runs
from proof.proxy import Proxy, postgres_answered

_WAIT_S_MAX = 60.0
_START_S_MAX = 120.0
_LOOK_S = 0.1
_DEATH_LOOK_S = 0.01
_ANSWER_S_MAX = 10
# How often to repeat a statement that needs a database without connections. The statement fails if somebody connects
# after all connections were terminated.
_TRIES_MAX = 3
# Allow few connections, so that a fault can use all of them. Keep little WAL, so that a small disk is enough.
SMALL = {
    "max_connections": "80",
    "shared_buffers": "64MB",
    "min_wal_size": "32MB",
    "max_wal_size": "128MB",
}


class Node:
    """One Postgres server. `root`: the folder for its data; None: any folder. `cluster`: an embedded server that exists
    already; None: the node makes its own server."""

    def __init__(
        self,
        name: str,
        *,
        settings: Mapping[str, str] = SMALL,
        root: Path | None = None,
        cluster: Cluster | None = None,
    ) -> None:
        self.name = name
        self._settings = settings
        self._root = root
        self.cluster = cluster or self._new(None)

    def _new(self, standby_of: Node | None) -> Cluster:
        primary = None if standby_of is None else standby_of.cluster
        return Cluster(self.name, root=self._root, ephemeral=True, settings=self._settings, standby_of=primary)

    async def start(self) -> None:
        await asyncio.to_thread(self.cluster.start, _START_S_MAX)

    async def start_anew(self, *, standby_of: Node) -> None:
        """Starts this node as the standby of another node, with a new copy of that node's data."""
        await asyncio.to_thread(self.cluster.close)
        self.cluster = self._new(standby_of)
        await self.start()

    async def close(self) -> None:
        await asyncio.to_thread(self.cluster.close)

    def processes(self) -> list[psutil.Process]:
        """Returns the postmaster, followed by its child processes."""
        return family(self.cluster.pid)

    def kill(self) -> float:
        """Kills all processes of the server, so that no backend finishes its work. Waits until the server has ended,
        because `start` does nothing while the server runs. Returns the time of the kill, by the monotonic clock."""
        processes = self.processes()
        killed_s = self._signal(signal.SIGKILL)
        while any(map(runs, processes)):
            time.sleep(_DEATH_LOOK_S)
        return killed_s

    def freeze(self) -> None:
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> float:
        processes = self.processes()
        at_s = time.monotonic()
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)
        return at_s

    def ask(self, statement: str) -> list[tuple[Any, ...]]:
        """Runs one statement as superuser, without the proxy. Raises psycopg.Error."""
        return ask(self.cluster.superuser_dsn, statement)


class Entrance:
    """A route to the servers of one shard. It has its own proxies, so network faults on this route affect no other
    route."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._nodes = nodes
        self.proxies = [Proxy(postgres_answered) for _ in nodes]

    @cached_property
    def dsn(self) -> str:
        """A DSN that leads to the node that takes writes. Use this property only after a node has been started."""
        return _writable(self._nodes[0].cluster.dsn, [proxy.port for proxy in self.proxies])

    @contextlib.contextmanager
    def closed(self) -> Generator[None, None, None]:
        """Cuts all connections, and cuts new ones at once, until the context ends."""
        for proxy in self.proxies:
            proxy.closed = True
            proxy.cut_all()
        try:
            yield
        finally:
            for proxy in self.proxies:
                proxy.closed = False

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncGenerator[None, None]:
        """Opens the proxies on free ports. For each new connection, the proxy asks for the port of the server, because
        this port may change."""
        async with contextlib.AsyncExitStack() as stack:
            for node, proxy in zip(self._nodes, self.proxies, strict=True):
                await stack.enter_async_context(_serving(node, proxy))
            yield


class Shard:
    """One shard: a primary, and perhaps a standby that takes over."""

    def __init__(self, name: str, nodes: Sequence[Node]) -> None:
        self.name = name
        self.nodes = nodes
        self.primary = nodes[0]
        self.entrance = Entrance(nodes)

    @property
    def standby(self) -> Node | None:
        return next((node for node in self.nodes if node is not self.primary), None)

    @property
    def dsn(self) -> str:
        """The DSN for routers and balancers, through the proxies."""
        return self.entrance.dsn

    @property
    def nodes_dsn(self) -> str:
        """A DSN without the proxies that leads to the node that takes writes."""
        return _writable(self.direct_dsn, [node.cluster.port for node in self.nodes])

    @property
    def direct_dsn(self) -> str:
        """A DSN without the proxies that leads to the primary."""
        return self.primary.cluster.dsn

    def dsn_of(self, database: str) -> str:
        """Returns a DSN without the proxies that leads to another database of the primary."""
        return make_conninfo(self.direct_dsn, dbname=database)

    async def start(self) -> None:
        await self.primary.start()
        if self.standby is not None:
            await self.standby.start_anew(standby_of=self.primary)
            await self.synchronize()

    async def synchronize(self) -> None:
        """Makes the standby synchronous: from then on, the standby has every commit."""
        await asyncio.to_thread(_set, self.primary, "synchronous_standby_names", "*")
        await until(lambda: self.is_synchronous, f"{self.name} has a synchronous standby", within_s=_WAIT_S_MAX)

    @property
    def is_synchronous(self) -> bool:
        """Whether the standby is connected and synchronous, and has all WAL that the primary has flushed."""
        caught_up = (
            "SELECT 1 FROM pg_stat_replication WHERE sync_state = 'sync' AND flush_lsn >= pg_current_wal_flush_lsn()"
        )
        try:
            return bool(self.primary.ask(caught_up))
        except psycopg.Error:
            return False

    async def promote(self) -> None:
        """Promotes the standby. The old primary must have ended."""
        standby = self.standby
        assert standby is not None, f"{self.name} has no standby"
        await asyncio.to_thread(standby.cluster.promote)
        self.primary = standby
        # Run without a synchronous standby until the other node runs again: otherwise all commits would wait for it.
        await asyncio.to_thread(_set, standby, "synchronous_standby_names", "")

    async def copy(self, name: str) -> None:
        """Copies the shard's database to a new database of this name. Nobody may connect to the shard's database
        meanwhile."""
        source, login = self._database
        await self._alone(source, f"CREATE DATABASE {name} TEMPLATE {source} OWNER {login}")

    async def replace_by(self, name: str, *, old: str) -> None:
        """Makes the database `name` the shard's database, and renames the present one to `old`. Nobody may connect to
        either database meanwhile."""
        own, _ = self._database
        await self._alone(own, f"ALTER DATABASE {own} RENAME TO {old}")
        try:
            await self._alone(name, f"ALTER DATABASE {name} RENAME TO {own}")
        except psycopg.Error:
            await self._alone(old, f"ALTER DATABASE {old} RENAME TO {own}")
            raise

    @property
    def _database(self) -> tuple[str, str]:
        """The name of the shard's database, and its owner."""
        login = conninfo_to_dict(self.direct_dsn)
        return str(login["dbname"]), str(login["user"])

    async def _alone(self, database: str, statement: str) -> None:
        """Terminates all connections to a database, and then runs a statement that needs a database without
        connections."""
        terminate = f"SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE datname = '{database}'"
        for tries_left in range(_TRIES_MAX, -1, -1):
            await asyncio.to_thread(self.primary.ask, terminate)
            try:
                await asyncio.to_thread(self.primary.ask, statement)
                return
            except psycopg.errors.ObjectInUse:
                if not tries_left:
                    raise

    async def rebuild(self) -> None:
        """Makes the node that is not the primary a standby again, with a new copy of the primary's data."""
        assert self.standby is not None, f"{self.name} has one node"
        await self.standby.start_anew(standby_of=self.primary)
        await self.synchronize()


def _writable(login_dsn: str, ports: Sequence[int]) -> str:
    """Returns a DSN for the servers on these local ports. It leads to the server that takes writes."""
    login = conninfo_to_dict(login_dsn)
    places: dict[str, str] = {
        "host": ",".join("127.0.0.1" for _ in ports),
        "port": ",".join(map(str, ports)),
    }
    if len(ports) > 1:
        places["target_session_attrs"] = "read-write"
    user, password, database = login["user"], login["password"], login["dbname"]
    # The proxies must be able to read the traffic.
    plain = {"sslmode": "disable", "gssencmode": "disable"}
    return make_conninfo("", user=user, password=password, dbname=database, **places, **plain)


_connect = retry(
    retry=retry_if_exception_message(match=r"(?s).*too many clients"),
    stop=stop_after_delay(_WAIT_S_MAX),
    wait=wait_fixed(_LOOK_S),
    reraise=True,
)(psycopg.connect)


def ask(dsn: str, statement: str) -> list[tuple[Any, ...]]:
    """Runs one statement on a connection of its own. Waits while the server has no free connection: a fault may use all
    connections, and for a moment even those that are reserved for superusers."""
    with _connect(dsn, autocommit=True, connect_timeout=_ANSWER_S_MAX) as connection:
        cursor = connection.execute(statement.encode())
        return cursor.fetchall() if cursor.description else []


def _set(node: Node, setting: str, value: str) -> None:
    node.ask(f"ALTER SYSTEM SET {setting} = '{value}'")
    node.ask("SELECT pg_reload_conf()")


async def until(holds: Callable[[], object], what: str, *, within_s: float) -> None:
    """Waits until `holds` returns true. Calls `holds` again and again, in a thread. Raises TimeoutError."""
    deadline_s = time.monotonic() + within_s
    while not await asyncio.to_thread(holds):
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"not within {within_s:g} s: {what}")
        await asyncio.sleep(_LOOK_S)


@contextlib.asynccontextmanager
async def open_shards(
    count: int, *, replicated: bool, roots: Mapping[str, Path]
) -> AsyncGenerator[Mapping[str, Shard], None]:
    """Starts the shards s1, s2, … for this scope. `replicated`: whether s1 has a standby. `roots`: folders for data, by
    the node's name. A node without an entry gets any folder."""
    shards: dict[str, Shard] = {}
    async with contextlib.AsyncExitStack() as stack:
        for name in (f"s{number}" for number in range(1, count + 1)):
            names = [f"{name}a", f"{name}b"] if replicated and not shards else [name]
            shards[name] = Shard(name, [Node(node, root=roots.get(node)) for node in names])
            for node in shards[name].nodes:
                stack.push_async_callback(node.close)
            await stack.enter_async_context(shards[name].entrance.open())
        await asyncio.gather(*(shard.start() for shard in shards.values()))
        yield shards


@contextlib.asynccontextmanager
async def _serving(node: Node, proxy: Proxy) -> AsyncGenerator[None, None]:
    async def serve(client: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            port = node.cluster.port
        except EmbeddedError:
            # The node's server is being replaced by a new one.
            writer.transport.abort()
        else:
            await proxy.serve("127.0.0.1", port, client, writer)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    proxy.port = server.sockets[0].getsockname()[1]
    try:
        yield
    finally:
        server.close()
        await proxy.end()
