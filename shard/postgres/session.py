"""A session with a shard's Postgres as its pool uses it: its settings, and the conversion of its values."""

from __future__ import annotations

import struct
from typing import LiteralString

from psycopg.abc import Buffer
from psycopg.adapt import Dumper, Loader
from psycopg.postgres import types
from psycopg.pq import Format
from psycopg.types.numeric import Int8BinaryDumper

from shard.postgres.arrays import Blobs, Texts
from shard.postgres.connection import Connection

_EPOCH_2000_US = 946_684_800_000_000
_unpack_int8 = struct.Struct("!q").unpack

_SETTINGS = """
SELECT set_config(s.name, s.value, false) FROM (VALUES
    ('jit', 'off'), ('timezone', 'UTC'), ('lock_timeout', '10s'), ('idle_in_transaction_session_timeout', '15s'),
    -- Jobs move between shards as text.
    ('datestyle', 'ISO, YMD'),
    -- Postgres sends a warning if a commit did not wait for the standby (Connection.unreplicated).
    ('client_min_messages', 'warning'),
    -- The statements rely on these, whatever the server's defaults are: a second look within a transaction sees what
    -- was committed meanwhile, and a commit is durable.
    ('default_transaction_isolation', 'read committed'), ('default_transaction_read_only', 'off'),
    ('synchronous_commit', CASE WHEN current_setting('synchronous_commit') IN ('off', 'local') THEN 'on'
        ELSE current_setting('synchronous_commit') END),
"""
# The hot tables can grow from empty to millions of rows within seconds. So their statistics are often wrong, and
# Postgres would keep a plan that was made for an empty table. Every hot statement should scan an index, so other plans
# are disabled.
QUEUE_SETTINGS = f"""{_SETTINGS}
    ('enable_seqscan', 'off'), ('enable_bitmapscan', 'off'), ('enable_hashjoin', 'off'), ('enable_mergejoin', 'off'),
    -- Each statement is planned once: planning costs as much as running it.
    ('plan_cache_mode', 'force_generic_plan'), ('statement_timeout', '60s')
) AS s (name, value)
"""
# Statements that count and list may scan. They are planned for each run, because the best plan depends on the size of
# the org and on the days that are read. Bitmap scans are disabled, because a bitmap scan reads all index entries of an
# org, even with a small LIMIT. If statistics are missing, for example after a bulk load, the planner assumes that all
# orgs are small, and would choose a bitmap scan.
SCAN_SETTINGS = f"""{_SETTINGS}
    ('enable_bitmapscan', 'off'), ('plan_cache_mode', 'force_custom_plan'), ('statement_timeout', '300s')
) AS s (name, value)
"""
# The lock_timeout in these settings.
LOCK_WAIT_S = 10.0
_SET_LOCK_WAIT = b"SELECT set_config('lock_timeout', %(milliseconds)s, false)"
_SET_SEQSCAN = b"SELECT set_config('enable_seqscan', %(seqscan)s, false)"


class _MicrosLoader(Loader):
    """Loads a timestamptz as microseconds since 1970, so that no datetime is made on the hot path."""

    format = Format.BINARY

    def load(self, data: Buffer) -> int:
        micros: int = _unpack_int8(data)[0]
        return micros + _EPOCH_2000_US


class _BlobsDumper(Dumper):
    """Sends an array that shard.postgres.arrays has encoded already."""

    format = Format.BINARY
    oid = types["bytea"].array_oid

    def dump(self, obj: Blobs | Texts) -> bytes:
        return obj.data


class _TextsDumper(_BlobsDumper):
    oid = types["text"].array_oid


class Session(Connection):
    """A connection in a pool."""

    # The DSN by which the session was made.
    dsn = ""
    # After this time, by the event loop's clock, the pool replaces the session when it is returned.
    replace_at_s = 0.0
    # The present lock_timeout. None: unknown.
    lock_wait_s: float | None = LOCK_WAIT_S
    # With SCAN_SETTINGS: whether scans of tables are disabled at present (Statement.indexed). None: unknown.
    indexed: bool | None = False

    async def set_up(self, settings: LiteralString) -> None:
        await self.execute(settings)
        self.adapters.register_loader("timestamptz", _MicrosLoader)
        # One wire type for all ints: otherwise each size of int would need a prepared statement of its own.
        self.adapters.register_dumper(int, Int8BinaryDumper)
        self.adapters.register_dumper(Blobs, _BlobsDumper)
        self.adapters.register_dumper(Texts, _TextsDumper)

    async def set_lock_wait(self, seconds: float) -> None:
        # The setting is unknown until the statement has succeeded, because the caller may be cancelled meanwhile.
        self.lock_wait_s = None
        await self.run(_SET_LOCK_WAIT, {"milliseconds": str(round(seconds * 1000))})
        self.lock_wait_s = seconds

    async def set_indexed(self, *, indexed: bool) -> None:
        self.indexed = None
        await self.run(_SET_SEQSCAN, {"seqscan": "off" if indexed else "on"})
        self.indexed = indexed
