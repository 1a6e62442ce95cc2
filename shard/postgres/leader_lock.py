"""Leader election by an advisory lock. Among several balancers, or several archivers of one shard, the process whose
session holds the lock leads. Balancers use a lock in the catalog's database, and archivers use a lock in the shard's
database. The lock ends with the session.

A single leader avoids repeated work and repeated log lines. Correctness does not depend on having only one leader
(docs/decisions/0017-moving-slots.md).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncGenerator, Generator
from typing import Any, NamedTuple

import psycopg

from shard.errors import ShardUnavailable
from shard.postgres import statements
from shard.postgres.breaker import first_line
from shard.postgres.connection import CONNECT_OPTIONS, hang_up
from shard.vocabulary import CATALOG, ShardName


class LeaderRole(NamedTuple):
    """A role that only one process should have at a time."""

    holder: str
    # Any number will do, but it must be the same in every release.
    lock: int


BALANCER = LeaderRole("balancer", 0x77696E64_62616C61)
ARCHIVER = LeaderRole("archiver", 0x77696E64_61726368)
_ASK_S = 1.0
_SILENCE_S_MAX = 5.0

# The server must notice soon that a leader has vanished, because no other process can lead until then.
_SETTINGS = """
SELECT set_config(s.name, s.value, false) FROM (VALUES
    ('tcp_keepalives_idle', '5'), ('tcp_keepalives_interval', '2'), ('tcp_keepalives_count', '3'),
    ('tcp_user_timeout', '10000'), ('idle_session_timeout', '0'), ('statement_timeout', '5s')
) AS s (name, value)
"""


class LeaderSession:
    """A session that can lead. Every method raises ShardUnavailable once the session is lost."""

    def __init__(self, connection: psycopg.AsyncConnection[Any], role: LeaderRole, shard: ShardName) -> None:
        self._connection = connection
        self._role = role
        self._shard = shard

    async def lead(self) -> bool:
        """Tries to become the leader. Returns False if another session leads."""
        row = await self._ask(statements.TRY_LEADER_LOCK, {"lock": self._role.lock})
        return bool(row and row[0])

    async def leader(self) -> str | None:
        """Returns a description of the present leader, or None if there is no leader."""
        row = await self._ask(statements.READ_LEADER, {"lock": self._role.lock})
        if row is None:
            return None
        name, address, pid = row
        where = "the catalog" if self._shard == CATALOG else f"shard {self._shard!r}"
        who = name or f"another {self._role.holder}"
        return f"{who}{f' at {address}' if address else ''} (process {pid} of {where}'s Postgres)"

    async def hold(self) -> None:
        """Waits until the session is lost, and then raises ShardUnavailable. From then on, other sessions may lead.
        Never returns."""
        while True:
            with _losses(self._shard):
                # No notifications are sent. Only a lost connection ends this wait early.
                async for _ in self._connection.notifies(timeout=_ASK_S):
                    pass
            await self._ask(b"SELECT 1", {})

    async def release(self) -> None:
        """Ends the leadership. Another session can lead as soon as this call returns. Without this call, another
        session could lead only after Postgres has noticed that this session has ended."""
        await self._ask(statements.RELEASE_LEADER_LOCK, {})

    async def _ask(self, statement: bytes, parameters: dict[str, object]) -> tuple[Any, ...] | None:
        timer = asyncio.get_running_loop().call_later(_SILENCE_S_MAX, hang_up, self._connection)
        try:
            with _losses(self._shard):
                cursor = await self._connection.execute(statement, parameters)
                return await cursor.fetchone()
        finally:
            timer.cancel()


@contextlib.asynccontextmanager
async def leader_session(
    dsn: str, digest: str = "", *, role: LeaderRole = BALANCER, shard: ShardName = CATALOG
) -> AsyncGenerator[LeaderSession, None]:
    """Opens a session in the database where the role's lock is held. If the session becomes the leader, it stops
    leading when the block ends, or earlier if the session is lost. `digest` is the digest of the cluster file, which
    other processes see in application_name. Raises ShardUnavailable."""
    holder = f"windrow {role.holder} {socket.gethostname()[:20]} {os.getpid()}"
    with _losses(shard):
        connection = await psycopg.AsyncConnection.connect(
            dsn,
            # Postgres keeps only the first 63 bytes of the name.
            application_name=f"{holder}{digest and f' by {digest}'}",
            **CONNECT_OPTIONS,
        )
    async with connection:
        with _losses(shard):
            async with asyncio.timeout(_SILENCE_S_MAX):
                await connection.execute(_SETTINGS)
        session = LeaderSession(connection, role, shard)
        try:
            yield session
        finally:
            with contextlib.suppress(ShardUnavailable):
                await session.release()


@contextlib.contextmanager
def _losses(shard: ShardName) -> Generator[None, None, None]:
    try:
        yield
    except (psycopg.Error, TimeoutError) as error:
        raise ShardUnavailable(shard, first_line(error)) from error
