"""Reads from pg_stat_statements how often routers ran each statement, and how many rows the statement returned. The
statements have the names of their files in shard/queue/sql."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import psycopg

from shard.postgres.sql_loader import Statement
from shard.queue import statements

# Matches parameters, and constants, which pg_stat_statements replaces by parameters. pg_stat_statements replaces a list
# of constants by one parameter.
_VALUE = re.compile(
    r"%\(\w+\)[sb]|'(?:[^']|'')*'|\$\d+(?: /\*, \.\.\. \*/)?"
    r"|\b(?:NULL|true|false)\b|(?<![\w.])\d+(?:\.\d+)?(?:e\d+)?\b",
    re.IGNORECASE,
)
_COUNTS = """
SELECT query, sum(calls)::bigint, sum(rows)::bigint
FROM pg_stat_statements s JOIN pg_roles r ON r.oid = s.userid
WHERE r.rolname <> current_user
GROUP BY 1
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    calls: int = 0
    rows: int = 0

    def __add__(self, other: Runs) -> Runs:
        return Runs(calls=self.calls + other.calls, rows=self.rows + other.rows)

    def __sub__(self, before: Runs) -> Runs:
        return Runs(calls=self.calls - before.calls, rows=self.rows - before.rows)


def count(superuser_dsns: Iterable[str]) -> bool:
    """Creates the extension that counts statements on these servers. Returns False if one of the servers does not have
    this extension."""
    try:
        for dsn in superuser_dsns:
            with psycopg.connect(dsn, autocommit=True) as connection:
                connection.execute("CREATE EXTENSION IF NOT EXISTS pg_stat_statements")
                connection.execute("SELECT pg_stat_statements_reset()")
    except psycopg.Error:
        return False
    return True


def counted(superuser_dsns: Iterable[str]) -> dict[str, Runs]:
    """Returns the runs of each statement so far, on all these servers together, by the statement's name. Statements of
    packages other than shard/queue have the name ""."""
    found: dict[str, Runs] = {}
    for dsn in superuser_dsns:
        with psycopg.connect(dsn, autocommit=True) as connection:
            for query, calls, rows in connection.execute(_COUNTS).fetchall():
                name = _NAMES.get(shape(query), "")
                found[name] = found.get(name, Runs()) + Runs(calls=calls, rows=rows)
    return found


def since(before: Mapping[str, Runs], after: Mapping[str, Runs]) -> dict[str, Runs]:
    return {name: runs - before.get(name, Runs()) for name, runs in after.items()}


def shape(query: str) -> str:
    """Returns the statement without its constants and parameters. The result is the same for a statement's file and for
    its text in pg_stat_statements."""
    return " ".join(_VALUE.sub("?", query.replace("%%", "%")).split())


_NAMES = {shape(one.decode()): one.name for one in vars(statements).values() if isinstance(one, Statement)}
