"""What is to be known of a shard's Postgres to judge its health: the facts, and how they are read.

Over a connection of its own, which is set up as anybody's is: what is seen is what others get. Changes nothing, and
waits for no lock for long.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import psycopg

from shard import statements
from shard.breaker import first_line
from shard.errors import ShardUnavailable
from shard.partitions import DAYS_AHEAD
from shard.servers import first_of
from shard.vocabulary import CATALOG, ShardName

_T = TypeVar("_T")

# How full the pages of an index are where keys come in no order.
_INDEX_FILL = 0.7

_CONNECT_S_MAX = 5
_READ_S_MAX = 30.0
_SESSION = """
SELECT set_config(s.name, s.value, false) FROM (VALUES
    ('statement_timeout', '10s'), ('lock_timeout', '2s'), ('default_transaction_read_only', 'on')
) AS s (name, value)
"""
# Not even its size can be asked for then.
_LOCKED = (
    "somebody keeps a table of schema windrow locked; who that is, says: "
    "SELECT pid, relation::regclass FROM pg_locks WHERE mode = 'AccessExclusiveLock' AND granted"
)


class Server(NamedTuple):
    """In the order of read_server.sql's columns."""

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
    age: int
    multixact_age: int


class Setting(NamedTuple):
    """In the order of read_settings.sql's columns."""

    name: str
    value: str
    unit: str | None
    shown: str
    context: str
    source: str

    @property
    def number(self) -> float:
        """In bytes or seconds, where it has a unit."""
        return float(self.value) * _UNITS[self.unit]


_UNITS = {None: 1, "B": 1, "kB": 1024, "8kB": 8192, "MB": 1024**2, "ms": 0.001, "s": 1, "min": 60}


class Table(NamedTuple):
    """In the order of read_tables.sql's columns."""

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
        """About: what its rows, dead ones too, do not fill, by what the statistics know of their width. None: not
        known."""
        return None if self.row_bytes is None else max(0, self.heap_bytes - int(self.versions * self.row_bytes))

    @property
    def versions(self) -> int:
        return self.rows + self.dead_rows


class Index(NamedTuple):
    """In the order of read_indexes.sql's columns."""

    name: str
    table: str
    bytes: int
    valid: bool
    entry_bytes: int

    def unused_bytes(self, versions: int) -> int:
        """About, with so many rows in the table, dead ones too."""
        return max(0, self.bytes - int(versions * self.entry_bytes / _INDEX_FILL))


class Holder(NamedTuple):
    """Who holds a snapshot, or WAL, in the order of read_holders.sql's columns."""

    # process, prepared transaction, physical slot, logical slot or standby.
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
    # How many have begun since. None: it holds no snapshot.
    transactions: int | None
    wal_bytes: int | None
    query: str | None
    # Whether the role that asks may end it.
    may_end: bool

    @property
    def is_slot(self) -> bool:
        return self.kind.endswith(" slot")


class Checkpoints(NamedTuple):
    timed: int
    requested: int
    wal_bytes: int


class Clock(NamedTuple):
    # By how much it is behind the latest time that it has shown.
    behind_s: float


class MissingPartition(NamedTuple):
    """In the order of find_missing_partitions.sql's columns."""

    name: str
    retention: int
    first: str
    past: str


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
    # Empty for a database that holds the catalog alone.
    missing: Sequence[MissingPartition]
    # What the server says when it is to write to its disk; None: it can.
    disk_full: str | None = None


async def read(name: ShardName, dsn: str) -> Facts:
    """Raises ShardUnavailable; also where somebody keeps one of our tables from everybody for seconds."""
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
    return Facts(
        server=server,
        settings={setting.name: setting for setting in await rows(Setting, statements.READ_SETTINGS)},
        tables=await rows(Table, statements.READ_TABLES),
        indexes=await rows(Index, statements.READ_INDEXES),
        holders=await rows(Holder, statements.READ_HOLDERS),
        checkpoints=(await rows(Checkpoints, checkpoints))[0],
        clock=(await rows(Clock, statements.READ_CLOCK))[0],
        missing=[]
        if name == CATALOG
        else await rows(MissingPartition, statements.FIND_MISSING_PARTITIONS, days_ahead=DAYS_AHEAD),
        disk_full=await _probe_disk(connection),
    )


async def _probe_disk(connection: psycopg.AsyncConnection[Any]) -> str | None:
    try:
        await connection.execute(statements.PROBE_DISK)
    except psycopg.errors.DiskFull as error:
        return first_line(error)
    except psycopg.errors.ConfigurationLimitExceeded:
        # temp_file_limit is too low for the question to be asked.
        return None
    return None
