"""Connects to the first available server of a DSN that names several servers, without waiting long for a silent server.
Also finds out whether a server that still takes writes was replaced by another server.

libpq itself waits the whole timeout for a silent server before it tries the next server. With four servers, the last
server would be tried only after the caller has given up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple, TypeVar

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

# If a server has not accepted a connection after this time, the next server is tried too.
NEXT_S = 0.5
# How long to wait for a server that may have replaced another server. This is the smallest value that libpq accepts.
_LOOK_S_MAX = 2
# Each promotion raises the timeline. The names of WAL files begin with the timeline. A standby has the same system
# identifier as its primary.
_TIMELINE = """
SELECT ('x' || substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8))::bit(32)::int, system_identifier
FROM pg_control_system()
"""
_Connection = TypeVar("_Connection", bound=psycopg.AsyncConnection[Any])


def each_of(dsn: str) -> list[str]:
    """Returns a DSN for each server that this DSN names, in order. A DSN whose lists have different lengths is returned
    as it is: libpq reports the error."""
    named = conninfo_to_dict(dsn)
    lists = {key: str(named[key]).split(",") for key in ("host", "hostaddr", "port") if named.get(key) is not None}
    count = max(map(len, lists.values()), default=1)
    if any(len(values) not in ({1, count} if key == "port" else {count}) for key, values in lists.items()):
        return [dsn]
    return [
        make_conninfo(dsn, **{key: values[at % len(values)] for key, values in lists.items()}) for at in range(count)
    ]


async def first_of(dsn: str, connect: Callable[[str], Coroutine[Any, Any, _Connection]]) -> _Connection:
    """Returns a connection to the first server of a DSN that accepts a connection. Tries the servers in order. If a
    server has not answered after NEXT_S, tries the next server too. If all servers fail, raises the error of the last
    server."""
    remaining = each_of(dsn)
    if len(remaining) == 1:
        return await connect(dsn)
    tasks: list[asyncio.Task[_Connection]] = []
    chosen: asyncio.Task[_Connection] | None = None
    try:
        while remaining or not all(task.done() for task in tasks):
            if remaining:
                tasks.append(asyncio.create_task(connect(remaining.pop(0))))
            running = [task for task in tasks if not task.done()]
            await asyncio.wait(running, timeout=NEXT_S if remaining else None, return_when=asyncio.FIRST_COMPLETED)
            chosen = next((task for task in tasks if task.done() and task.exception() is None), None)
            if chosen is not None:
                return chosen.result()
        return tasks[-1].result()
    finally:
        # Do not await the cancelled tasks: if the caller were cancelled meanwhile, the chosen connection would be lost.
        for task in tasks:
            if task is not chosen:
                task.cancel()
                task.add_done_callback(_close)


def only(dsn: str, server: psycopg.ConnectionInfo) -> str:
    """Returns the DSN with only one of its servers: the server to which a connection was made."""
    return make_conninfo(dsn, host=server.host, hostaddr=server.hostaddr or None, port=server.port)


async def replaced_by(dsn: str, own_dsn: str) -> str | None:
    """Returns the address of a server of the DSN that was promoted after the server of `own_dsn`, if both servers take
    writes. Returns None if there is no such server. A primary may keep running after a standby has replaced it. Such a
    primary acknowledges no commit that must wait for that standby."""
    every = each_of(dsn)
    if len(every) == 1:
        return None
    writable = [one for one in await asyncio.gather(*map(_promotion, every)) if one is not None]
    if len(writable) < 2:
        return None
    own = await _promotion(own_dsn)
    if own is None:
        return None
    newest = max((one for one in writable if one.system == own.system), default=own)
    return newest.address if newest.timeline > own.timeline else None


class _Promotion(NamedTuple):
    timeline: int
    system: int
    address: str


async def _promotion(dsn: str) -> _Promotion | None:
    """Returns the latest promotion of a server, or None if the server takes no writes or does not answer."""
    probe = make_conninfo(dsn, connect_timeout=_LOOK_S_MAX, application_name="windrow probe")
    try:
        async with (
            await psycopg.AsyncConnection.connect(probe, autocommit=True) as connection,
            asyncio.timeout(_LOOK_S_MAX),
        ):
            cursor = await connection.execute(_TIMELINE)
            row = await cursor.fetchone()
            assert row is not None
            timeline, system = row
            return _Promotion(timeline, system, f"{connection.info.host}:{connection.info.port}")
    except (psycopg.Error, TimeoutError):
        return None


def _close(task: asyncio.Task[_Connection]) -> None:
    if not task.cancelled() and task.exception() is None:
        task.result().pgconn.finish()
