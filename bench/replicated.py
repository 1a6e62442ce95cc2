"""A shard with a synchronous standby that takes over: Postgres's own replication, and nobody who decides by himself."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from bench.stage import SETTINGS
from bench.system import Wrong
from embedded import Cluster

_SYNCHRONOUS_S_MAX = 60.0
_LOOK_S = 0.1
_CONNECT_S_MAX = 10
_IS_SYNCHRONOUS = (
    "SELECT 1 FROM pg_stat_replication WHERE sync_state = 'sync' AND flush_lsn >= pg_current_wal_flush_lsn()"
)


@asynccontextmanager
async def replicated(name: str, primary: Cluster) -> AsyncGenerator[Replicated, None]:
    """A shard that has a standby once it is told to `follow`. Ends, with the scope, every server that it has made."""
    async with AsyncExitStack() as stack:
        yield Replicated(name, primary, stack)


class Replicated:
    """`primary` is the server that is it now."""

    def __init__(self, name: str, primary: Cluster, stack: AsyncExitStack) -> None:
        self.name = name
        self.primary = primary
        self._standby: Cluster | None = None
        # Ends every server that was made here.
        self._stack = stack
        self._numbers = itertools.count(2)

    @property
    def dsn(self) -> str:
        """To whichever of the two takes writes."""
        nodes = [self.primary] if self._standby is None else [self.primary, self._standby]
        login = conninfo_to_dict(self.primary.dsn)
        return make_conninfo(
            "",
            user=login["user"],
            password=login["password"],
            dbname=login["dbname"],
            host=",".join("127.0.0.1" for _ in nodes),
            port=",".join(str(node.port) for node in nodes),
            target_session_attrs="read-write",
        )

    async def follow(self) -> None:
        """Makes a standby, from nothing. When this returns, what is committed is on both. Raises EmbeddedError, Wrong
        and psycopg.Error."""
        name = f"{self.name}-{next(self._numbers)}"
        standby = Cluster(name, ephemeral=True, settings=SETTINGS, standby_of=self.primary)
        self._stack.push_async_callback(asyncio.to_thread, standby.close)
        await asyncio.to_thread(standby.start)
        self._standby = standby
        # Of the primary alone: the standby was copied before, so that it will not wait for anybody when it takes over.
        await asyncio.to_thread(self._ask, "ALTER SYSTEM SET synchronous_standby_names = '*'")
        await asyncio.to_thread(self._ask, "SELECT pg_reload_conf()")
        until_s = time.monotonic() + _SYNCHRONOUS_S_MAX
        while not await asyncio.to_thread(self._ask, _IS_SYNCHRONOUS):
            if time.monotonic() > until_s:
                raise Wrong(f"{name} did not become a synchronous standby within {_SYNCHRONOUS_S_MAX:g} s")
            await asyncio.sleep(_LOOK_S)

    async def promote(self) -> None:
        """The standby takes over. The primary must have ended."""
        assert self._standby is not None
        await asyncio.to_thread(self._standby.promote)
        self.primary, self._standby = self._standby, None

    def _ask(self, statement: str) -> list[tuple[Any, ...]]:
        dsn = self.primary.superuser_dsn
        with psycopg.connect(dsn, autocommit=True, connect_timeout=_CONNECT_S_MAX) as connection:
            cursor = connection.execute(statement.encode())
            return cursor.fetchall() if cursor.description else []
