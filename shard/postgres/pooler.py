"""Recognizes a pooler that gives a session to other clients after each transaction, such as PgBouncer in transaction
mode.

With such a pooler, settings, prepared statements, advisory locks and LISTEN would get lost or would affect the sessions
of other clients. Some calls would fail, and commits might not wait for the disk. PgBouncer does not tell its mode, so
this module makes a test. If other clients use the pooler during the test, the test may not recognize the pooler. Then
shard/postgres/pool.py recognizes it later, by a prepared statement that another client has made.
"""

from __future__ import annotations

import asyncio
from typing import Any

import psycopg

from shard.postgres.connection import CONNECT_OPTIONS, hang_up
from shard.postgres.multi_host import only

# How long to wait for a second session. If a pooler has no other session free, it has not given our session to another
# client.
_SECOND_S_MAX = 1.0
SESSIONS_ARE_SHARED = (
    "its DSN leads to a pooler that gives sessions to others after each transaction; use session mode, or no pooler "
    '(deploy/README.md, "Postgres")'
)


async def refuse_shared_sessions(connection: psycopg.AsyncConnection[Any], dsn: str) -> None:
    """Raises psycopg.OperationalError if other connections share this connection's session. `dsn` is the DSN by which
    the connection was made. Without a pooler, the check is one small statement."""
    first = await _session_of(connection)
    if first == connection.info.backend_pid:
        return
    # When a connection is made, a pooler answers with a process id that it has made up. Sessions are shared if another
    # client gets this session while both are connected, or if this client gets another session.
    try:
        second = await psycopg.AsyncConnection.connect(only(dsn, connection.info), **CONNECT_OPTIONS)
        timer = asyncio.get_running_loop().call_later(_SECOND_S_MAX, hang_up, second)
        try:
            shared = await _session_of(second) == first
            if not shared:
                # This transaction keeps the second connection's session, so that our connection cannot get that session
                # now.
                async with second.transaction():
                    shared = await _session_of(second) == first or await _session_of(connection) != first
        finally:
            timer.cancel()
            second.pgconn.finish()
    except psycopg.Error:
        return
    if shared:
        raise psycopg.OperationalError(SESSIONS_ARE_SHARED)


async def _session_of(connection: psycopg.AsyncConnection[Any]) -> int:
    cursor = await connection.execute("SELECT pg_backend_pid()")
    row = await cursor.fetchone()
    assert row is not None
    return int(row[0])
