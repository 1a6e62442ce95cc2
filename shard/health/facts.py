"""Reads the facts about a shard's Postgres from which its health is judged.

The facts are read over a separate connection, whose settings are those of the server and not those of Windrow's pools.
So the doctor sees what other sessions see. Reading changes nothing, and waits for locks only briefly.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import psycopg

from shard.errors import ShardUnavailable
from shard.health import statements
from shard.postgres import statements as postgres_statements
from shard.postgres.breaker import first_line
from shard.postgres.multi_host import first_of
from shard.postgres.partitions import DAYS_AHEAD
from shard.postgres.pooler import refuse_shared_sessions
from shard.vocabulary import CATALOG, ShardName

_T = TypeVar("_T")

# How full an index's pages are when keys are inserted in random order.
_INDEX_FILL = 0.7

_CONNECT_S_MAX = 5
_READ_S_MAX = 30.0
_SESSION = """
SELECT set_config(s.name, s.value, false) FROM (VALUES
    ('statement_timeout', '10s'), ('lock_timeout', '2s'), ('default_transaction_read_only', 'on')
) AS s (name, value)
"""
# If a table is locked exclusively, not even its size can be read.
_LOCKED = (
    "a session keeps a table of schema windrow locked; to find it: "
    "SELECT pid, relation::regclass FROM pg_locks WHERE mode = 'AccessExclusiveLock' AND granted"
)


class Server(NamedTuple):
    """Facts about the server, in the order of read_server.sql's columns."""

    version: str
    version_num: int
    database: str
    role: str
    bytes: int
    up_s: float
    is_standby: bool
    sees_others: bool
    connections: int
    connections_max: int
    # The age of the server's oldest transaction id and the database that has it, and the same for multixact ids.
    age: int
    oldest: str
    multixact_age: int
    multixact_oldest: str
    # A role that owns the schema or something in it, and whose rights this role does not have. None: there is none.
    other_owner: str | None = None


class Setting(NamedTuple):
    """One setting, in the order of read_settings.sql's columns."""

    name: str
    value: str
    unit: str | None
    shown: str
    context: str
    source: str

    @property
    def number(self) -> float:
        """The value. If the setting has a unit, the value is in bytes or seconds."""
        return float(self.value) * _UNITS[self.unit]


_UNITS = {None: 1, "B": 1, "kB": 1024, "8kB": 8192, "MB": 1024**2, "ms": 0.001, "s": 1, "min": 60}


class Table(NamedTuple):
    """One table, in the order of read_tables.sql's columns."""

    name: str
    family: str
    partitioned: bool
    rows: int
    dead_rows: int
    bytes: int
    heap_bytes: int
    index_bytes: int
    row_bytes: float | None
    vacuumed_s: float | None
    analyzed_s: float | None
    options: Sequence[str]

    @property
    def unused_bytes(self) -> int | None:
        """The estimated unused bytes of the table: those that neither live nor dead rows fill. None: the statistics do
        not know the width of a row."""
        return None if self.row_bytes is None else max(0, self.heap_bytes - int(self.versions * self.row_bytes))

    @property
    def versions(self) -> int:
        return self.rows + self.dead_rows


class Index(NamedTuple):
    """One index, in the order of read_indexes.sql's columns."""

    name: str
    table: str
    bytes: int
    valid: bool
    entry_bytes: int

    def unused_bytes(self, versions: int) -> int:
        """Estimates how many bytes of the index are unused if the table has this many row versions, including dead
        rows."""
        return max(0, self.bytes - int(versions * self.entry_bytes / _INDEX_FILL))


class Holder(NamedTuple):
    """Something that holds a snapshot or keeps WAL from being removed, in the order of read_holders.sql's columns."""

    # One of: process, prepared transaction, physical slot, logical slot, standby.
    kind: str
    name: str
    pid: int | None
    role: str | None
    application: str | None
    client: str | None
    state: str | None
    waits_for: str | None
    held_s: float | None
    query_s: float | None
    # How many transactions have begun since the holder took its snapshot. None: the holder has no snapshot.
    transactions: int | None
    wal_bytes: int | None
    query: str | None
    # Whether the role of this connection may end the holder.
    may_end: bool

    @property
    def is_slot(self) -> bool:
        return self.kind.endswith(" slot")


class Checkpoints(NamedTuple):
    timed: int
    requested: int
    wal_bytes: int


class Clock(NamedTuple):
    # How far the clock is behind the latest time that it has shown.
    behind_s: float
    # How far the clock is ahead of the clock of the doctor's machine. Negative: how far it is behind.
    ahead_s: float

    @classmethod
    def read(cls, behind_s: float, shown_s: float) -> Clock:
        """Makes a Clock from a row of read_clock.sql. `shown_s` is the time that the server's clock shows now, in
        seconds since 1970."""
        return cls(behind_s, shown_s - time.time())


class MissingPartition(NamedTuple):
    """A partition that is missing, in the order of find_missing_partitions.sql's columns."""

    name: str
    retention: int
    # None: the partition is that of a whole retention, which itself has a partition for each day.
    first: str | None
    past: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    server: Server
    settings: Mapping[str, Setting]
    tables: Sequence[Table]
    indexes: Sequence[Index]
    # The oldest first.
    holders: Sequence[Holder]
    checkpoints: Checkpoints
    clock: Clock
    # Empty for a database that holds only the catalog, or nothing of Windrow.
    missing: Sequence[MissingPartition]
    # The server's error if it cannot write to its disk. None: the server can write.
    disk_full: str | None = None


async def read(name: ShardName, dsn: str) -> Facts:
    """Reads the facts. Raises ShardUnavailable. A session that keeps one of Windrow's tables locked for seconds causes
    this error too."""
    connect = partial(
        psycopg.AsyncConnection.connect,
        autocommit=True,
        application_name="windrow doctor",
        client_encoding="utf8",
        connect_timeout=_CONNECT_S_MAX,
    )
    try:
        async with asyncio.timeout(_READ_S_MAX):
            connection = await first_of(dsn, connect)
            async with connection:
                await refuse_shared_sessions(connection, dsn)
                await connection.execute(_SESSION)
                return await _read(connection, name)
    except psycopg.errors.LockNotAvailable as error:
        raise ShardUnavailable(name, _LOCKED) from error
    except (psycopg.Error, TimeoutError) as error:
        raise ShardUnavailable(name, first_line(error)) from error


async def _read(connection: psycopg.AsyncConnection[Any], name: ShardName) -> Facts:
    async def rows(make: Callable[..., _T], statement: bytes, **parameters: object) -> list[_T]:
        cursor = await connection.execute(statement, parameters or None)
        return [make(*row) for row in await cursor.fetchall()]

    (server,) = await rows(Server, statements.READ_SERVER)
    since_17 = server.version_num >= 170_000
    checkpoints = statements.READ_CHECKPOINTS if since_17 else statements.READ_CHECKPOINTS_16
    tables = await rows(Table, statements.READ_TABLES)
    return Facts(
        server=server,
        settings={setting.name: setting for setting in await rows(Setting, statements.READ_SETTINGS)},
        tables=tables,
        indexes=await rows(Index, statements.READ_INDEXES),
        holders=await rows(Holder, statements.READ_HOLDERS),
        checkpoints=(await rows(Checkpoints, checkpoints))[0],
        clock=(await rows(Clock.read, statements.READ_CLOCK))[0],
        missing=[]
        if name == CATALOG or not tables
        else await rows(MissingPartition, postgres_statements.FIND_MISSING_PARTITIONS, days_ahead=DAYS_AHEAD),
        disk_full=await _probe_disk(connection),
    )


async def _probe_disk(connection: psycopg.AsyncConnection[Any]) -> str | None:
    try:
        await connection.execute(postgres_statements.PROBE_DISK)
    except psycopg.errors.DiskFull as error:
        return first_line(error)
    except psycopg.errors.ConfigurationLimitExceeded:
        # temp_file_limit is too low for this check.
        return None
    return None
