"""The SQL statements of this package, one file in sql/ each. Other packages run them only where
tests/unit/test_statements.py allows it."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from shard.postgres.sql_loader import load

_load = partial(load, Path(__file__).parent / "sql")

READ_CLOCK = _load("read_clock")

READ_SIGNS = _load("read_signs")

READ_SERVER = _load("read_server")
READ_SETTINGS = _load("read_settings")
READ_TABLES = _load("read_tables")
READ_INDEXES = _load("read_indexes")
READ_HOLDERS = _load("read_holders")
READ_CHECKPOINTS = _load("read_checkpoints")
READ_CHECKPOINTS_16 = _load("read_checkpoints_16")
