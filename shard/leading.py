"""Who leads, of several balancers, or of the archivers at one shard: the one whose session in the catalog's database,
or the shard's, holds an advisory lock. It ends with the session, however that ends.

Leading saves work and noise. Nothing relies on there being one leader (docs/decisions/0017-moving-slots.md).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncGenerator, Generator
from typing import Any, NamedTuple

import psycopg

from shard import statements
from shard.breaker import first_line
from shard.database import hang_up
from shard.errors import ShardUnavailable
from shard.vocabulary import CATALOG, ShardName


class Office(NamedTuple):
    """What is led."""

    holder: str
    # Any number, the same in every release.
    lock: int


BALANCER = Office("balancer", 0x77696E64_62616C61)
ARCHIVER = Office("archiver", 0x77696E64_61726368)
_ASK_S = 1.0
_SILENCE_S_MAX = 5.0

# The server too is to find out soon that a leader has vanished without a word: nobody else leads until then.
_SETTINGS = """
SELECT set_config(s.name, s.value, false) FROM (VALUES
    ('tcp_keepalives_idle', '5'), ('tcp_keepalives_interval', '2'), ('tcp_keepalives_count', '3'),
    ('tcp_user_timeout', '10000'), ('idle_session_timeout', '0'), ('statement_timeout', '5s')
) AS s (name, value)
"""


class Candidate:
    """One session. Every method raises ShardUnavailable once it is lost."""

    def __init__(self, connection: psycopg.AsyncConnection[Any], office: Office, shard: ShardName) -> None:
        self._connection = connection
        self._office = office
        self._shard = shard

    async def lead(self) -> bool:
        """Whether this one leads from now on. False: another does."""
        row = await self._ask(statements.LEAD, {"lock": self._office.lock})
        return bool(row and row[0])

    async def leader(self) -> str | None:
        """Who leads, in words; None: nobody."""
        row = await self._ask(statements.READ_LEADER, {"lock": self._office.lock})
        if row is None:
            return None
        name, address, pid = row
        where = "the catalog" if self._shard == CATALOG else f"shard {self._shard!r}"
        who = name or f"another {self._office.holder}"
        return f"{who}{f' at {address}' if address else ''} (process {pid} of {where}'s Postgres)"

    async def hold(self) -> None:
        """Never returns. Raises ShardUnavailable as soon as the session is lost: then others may lead."""
        while True:
            with _losses(self._shard):
                # Nobody notifies: what ends the wait early is the end of the connection.
                async for _ in self._connection.notifies(timeout=_ASK_S):
                    pass
            await self._ask(b"SELECT 1", {})

    async def _ask(self, statement: bytes, parameters: dict[str, object]) -> tuple[Any, ...] | None:
        silence = asyncio.get_running_loop().call_later(_SILENCE_S_MAX, hang_up, self._connection)
        try:
            with _losses(self._shard):
                cursor = await self._connection.execute(statement, parameters)
                return await cursor.fetchone()
        finally:
            silence.cancel()


@contextlib.asynccontextmanager
async def candidacy(
    dsn: str, digest: str = "", *, office: Office = BALANCER, shard: ShardName = CATALOG
) -> AsyncGenerator[Candidate, None]:
    """A session in the database where the office is held; whoever leads by it, does so until the block ends at the
    latest. `digest`: of the cluster file, for others to see. Raises ShardUnavailable."""
    holder = f"windrow {office.holder} {socket.gethostname()[:20]} {os.getpid()}"
    with _losses(shard):
        connection = await psycopg.AsyncConnection.connect(
            dsn,
            autocommit=True,
            # Of which Postgres keeps 63 bytes.
            application_name=f"{holder}{digest and f' by {digest}'}",
            client_encoding="utf8",
            connect_timeout=5,
            # As for the shards' connections: a silent network is a dead one after ten seconds.
            keepalives_idle=5,
            keepalives_interval=2,
            keepalives_count=3,
            tcp_user_timeout=10_000,
        )
    async with connection:
        with _losses(shard):
            async with asyncio.timeout(_SILENCE_S_MAX):
                await connection.execute(_SETTINGS)
        yield Candidate(connection, office, shard)


@contextlib.contextmanager
def _losses(shard: ShardName) -> Generator[None, None, None]:
    try:
        yield
    except (psycopg.Error, TimeoutError) as error:
        raise ShardUnavailable(shard, first_line(error)) from error
