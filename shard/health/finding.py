"""Describes what is wrong with a shard's Postgres, and makes the SQL that fixes it."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from psycopg import sql


class Severity(enum.IntEnum):
    OK = 0
    # Nothing is wrong yet.
    NOTICE = 1
    WARNING = 2
    # Jobs may be lost, or the shard is about to stop working.
    CRITICAL = 3

    @property
    def word(self) -> str:
        return self.name.lower()


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    severity: Severity
    # One word on which scripts may rely.
    about: str
    what: str
    why: str
    # SQL that can be pasted into psql as it is. Comments say who must run it and what it costs.
    fix: str


def worst(findings: Sequence[Finding]) -> Severity:
    return max((finding.severity for finding in findings), default=Severity.OK)


# ── SQL ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def system(*names_and_values: str, restart: bool = False) -> str:
    """Returns the SQL that changes settings of the whole server."""
    pairs = zip(names_and_values[::2], names_and_values[1::2], strict=True)
    changes = "".join(f"ALTER SYSTEM SET {name} = {literal(value)};\n" for name, value in pairs)
    if restart:
        return f"{comment('as a superuser; it takes a restart of Postgres')}{changes}".rstrip()
    return f"{comment('as a superuser')}{changes}SELECT pg_reload_conf();"


def comment(text: str) -> str:
    return f"-- {text}\n"


def literal(text: str) -> str:
    return sql.Literal(text).as_string(None)
