"""Reads a few signs that a shard needs an operator, for the metrics of routers. Reading these signs is cheap; `windrow
doctor` reads more, and says what to do (shard/health/facts.py)."""

from __future__ import annotations

from typing import NamedTuple

from shard.health import statements
from shard.postgres import statements as postgres_statements
from shard.postgres.partitions import DAYS_AHEAD
from shard.postgres.pool import Database


class Signs(NamedTuple):
    """The signs, in the order of read_signs.sql's columns. A number of seconds is 0 if nothing is wrong."""

    # For how long the oldest snapshot has been held.
    snapshot_s: float
    # How late the most overdue schedule is.
    schedule_late_s: float
    # How late the archiver is: for how long the most overdue day should have turned cold, or should have been dropped.
    archive_late_s: float
    # The age of the oldest transaction id or multixact id that is not frozen.
    transaction_age: int
    # The share of the server's connections that is used.
    connections_used: float
    # Partitions of finished jobs that should have been made ahead.
    partitions_missing: int


async def read(database: Database) -> Signs:
    """Reads the signs. Raises ShardUnavailable."""
    (found,) = await database.run(statements.READ_SIGNS, {})
    missing = await database.run(postgres_statements.FIND_MISSING_PARTITIONS, {"days_ahead": DAYS_AHEAD})
    return Signs._make([*found, len(missing)])
