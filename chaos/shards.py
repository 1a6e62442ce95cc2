"""The shards of a run: Postgres servers, of which one may have a standby, and the proxies before them. Owns both.

Nothing here brings a server back by itself: whoever struck it heals it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil
import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from bench.processes import family
from embedded import Cluster, EmbeddedError
from tests.fault.proxy import Proxy, postgres_answered

_WAIT_S_MAX = 60.0
_START_S_MAX = 120.0
_LOOK_S = 0.1
_ANSWER_S_MAX = 10
# Few, so that all of them can be taken; little WAL, so that a small disk will do.
_SETTINGS = {
    "max_connections": "80",
    "shared_buffers": "64MB",
    "min_wal_size": "32MB",
    "max_wal_size": "128MB",
}


class Node:
    """One Postgres server."""

    def __init__(self, name: str, root: Path | None) -> None:
        self.name = name
        self._root = root
        self.cluster = self._new(None)

    def _new(self, standby_of: Node | None) -> Cluster:
        primary = None if standby_of is None else standby_of.cluster
        return Cluster(self.name, root=self._root, ephemeral=True, settings=_SETTINGS, standby_of=primary)

    async def start(self) -> None:
        await asyncio.to_thread(self.cluster.start, _START_S_MAX)

    async def start_anew(self, *, standby_of: Node) -> None:
        """From nothing, as the standby of another."""
        await asyncio.to_thread(self.cluster.close)
        self.cluster = self._new(standby_of)
        await self.start()

    async def close(self) -> None:
        await asyncio.to_thread(self.cluster.close)

    def processes(self) -> list[psutil.Process]:
        """The postmaster first, then its children."""
        return family(self.cluster.pid)

    def kill(self) -> None:
        """The whole server: no backend finishes what it was about to do."""
        self._signal(signal.SIGKILL)

    def freeze(self) -> None:
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        for process in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)

    def ask(self, statement: str) -> list[tuple[Any, ...]]:
        """As superuser, past the proxy. Raises psycopg.Error."""
        return ask(self.cluster.superuser_dsn, statement)


class Entrance:
    """A way to the servers of one shard, by proxies of its own: what the network does to those who come this way, it
    does to nobody else."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._nodes = nodes
        self.proxies = [Proxy(postgres_answered) for _ in nodes]

    @cached_property
    def dsn(self) -> str:
        """To whichever node takes writes. Asked for the first time when the first of them runs."""
        login = conninfo_to_dict(self._nodes[0].cluster.dsn)
        places: dict[str, str] = {
            "host": ",".join("127.0.0.1" for _ in self._nodes),
            "port": ",".join(str(proxy.port) for proxy in self.proxies),
        }
        if len(self._nodes) > 1:
            places["target_session_attrs"] = "read-write"
        user, password, database = login["user"], login["password"], login["dbname"]
        # The proxy must be able to read along.
        plain = {"sslmode": "disable", "gssencmode": "disable"}
        return make_conninfo("", user=user, password=password, dbname=database, **places, **plain)

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncGenerator[None, None]:
        """On free ports. Where a server listens by then is asked for each connection."""
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
        """For routers and balancers: by way of the proxies."""
        return self.entrance.dsn

    @property
    def direct_dsn(self) -> str:
        """Past the proxies, to the primary."""
        return self.primary.cluster.dsn

    async def start(self) -> None:
        await self.primary.start()
        if self.standby is not None:
            await self.standby.start_anew(standby_of=self.primary)
            await self.synchronize()

    async def synchronize(self) -> None:
        """From here on, what is committed is on the standby too."""
        await asyncio.to_thread(_set, self.primary, "synchronous_standby_names", "*")
        await until(lambda: self.is_synchronous, f"{self.name} has a synchronous standby", within_s=_WAIT_S_MAX)

    @property
    def is_synchronous(self) -> bool:
        """Whether the standby follows, and has all there is to have."""
        caught_up = (
            "SELECT 1 FROM pg_stat_replication WHERE sync_state = 'sync' AND flush_lsn >= pg_current_wal_flush_lsn()"
        )
        try:
            return bool(self.primary.ask(caught_up))
        except psycopg.Error:
            return False

    async def promote(self) -> None:
        """The standby takes over. The old primary must have ended."""
        standby = self.standby
        assert standby is not None, f"{self.name} has no standby"
        await asyncio.to_thread(standby.cluster.promote)
        self.primary = standby
        # Alone until the other is back: commits must not wait for nobody.
        await asyncio.to_thread(_set, standby, "synchronous_standby_names", "")

    async def rebuild(self) -> None:
        """The node that is not the primary becomes its standby, from nothing."""
        assert self.standby is not None, f"{self.name} has one node"
        await self.standby.start_anew(standby_of=self.primary)
        await self.synchronize()


def ask(dsn: str, statement: str) -> list[tuple[Any, ...]]:
    with psycopg.connect(dsn, autocommit=True, connect_timeout=_ANSWER_S_MAX) as connection:
        cursor = connection.execute(statement.encode())
        return cursor.fetchall() if cursor.description else []


def _set(node: Node, setting: str, value: str) -> None:
    node.ask(f"ALTER SYSTEM SET {setting} = '{value}'")
    node.ask("SELECT pg_reload_conf()")


async def until(holds: Callable[[], object], what: str, *, within_s: float) -> None:
    """Waits for what has no signal of its own; asks in a thread. Raises TimeoutError."""
    deadline_s = time.monotonic() + within_s
    while not await asyncio.to_thread(holds):
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"not within {within_s:g} s: {what}")
        await asyncio.sleep(_LOOK_S)


@contextlib.asynccontextmanager
async def open_shards(
    count: int, *, replicated: bool, roots: Mapping[str, Path]
) -> AsyncGenerator[Mapping[str, Shard], None]:
    """Shards s1, s2, …, started. `replicated`: s1 has a standby. `roots`: where a node's data is, if it matters."""
    shards: dict[str, Shard] = {}
    async with contextlib.AsyncExitStack() as stack:
        for name in (f"s{number}" for number in range(1, count + 1)):
            names = [f"{name}a", f"{name}b"] if replicated and not shards else [name]
            shards[name] = Shard(name, [Node(node, roots.get(node)) for node in names])
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
            # It is being made anew.
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
