"""Tests that `windrow upgrade plan` names the same locks and scans as Postgres reports when the migrations run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psycopg

from shard.postgres import schema
from shard.postgres.schema import Migration
from tests.command import windrow
from tests.postgres import Server
from tests.routers import write_cluster

# The locks that statements of routers wait for, the weakest lock first.
_MODES = ("ShareLock", "ShareRowExclusiveLock", "ExclusiveLock", "AccessExclusiveLock")
_WORDS = ("SHARE", "SHARE ROW EXCLUSIVE", "EXCLUSIVE", "ACCESS EXCLUSIVE")
_TABLES = b"""
SELECT oid, coalesce(pg_partition_root(oid), oid)::regclass::text, relkind = 'p', pg_relation_filenode(oid)
FROM pg_class WHERE relnamespace = to_regnamespace('windrow') AND relkind IN ('r', 'p')
"""
_CHILDLESS = b"""
SELECT format('CREATE TABLE %s_rest PARTITION OF %s DEFAULT', oid::regclass, oid::regclass) FROM pg_class
WHERE relnamespace = 'windrow'::regnamespace AND relkind = 'p'
    AND NOT EXISTS (SELECT FROM pg_inherits WHERE inhparent = oid)
"""
_LOCKS = b"SELECT relation, mode FROM pg_locks WHERE locktype = 'relation' AND pid = pg_backend_pid()"
_SCANS = b"SELECT relid FROM pg_stat_xact_user_tables WHERE seq_scan > 0"


def reported(dsn: str, migration: Migration) -> tuple[dict[str, str], list[str]]:
    """Runs a migration in a new session. Returns what the migration locks and reads. A session must not be used again,
    because Postgres may count scans only some time after their transaction."""
    with psycopg.connect(dsn) as connection:
        before = {oid: (str(root), node) for oid, root, _, node in connection.execute(_TABLES).fetchall()}
        connection.execute(migration.statements, prepare=False)
        locks: dict[str, int] = {}
        for oid, mode in connection.execute(_LOCKS).fetchall():
            if oid in before and mode in _MODES:
                table = before[oid][0].removeprefix("windrow.")
                locks[table] = max(locks.get(table, 0), _MODES.index(mode))
        read = {oid for (oid,) in connection.execute(_SCANS).fetchall()} & before.keys()
        after = {oid: node for oid, _, _, node in connection.execute(_TABLES).fetchall()}
        read |= {oid for oid, (_, node) in before.items() if oid in after and after[oid] != node}
        return (
            {table: _WORDS[locks[table]] for table in sorted(locks)},
            sorted({before[oid][0].removeprefix("windrow.") for oid in read}),
        )


def lines_of(locks: dict[str, str], reads: list[str]) -> str:
    """Returns the lines that a migration must have."""
    lines = [
        f"-- LOCKS {mode}: {', '.join(table for table in locks if locks[table] == mode)}"
        for mode in sorted(set(locks.values()))
    ]
    return "\n".join([*lines, *([f"-- READS: {', '.join(reads)}"] if reads else [])]) or "no such line"


def test_each_migration_says_what_postgres_reports_of_it(empty_dsn: str) -> None:
    with psycopg.connect(empty_dsn, autocommit=True) as connection:
        connection.execute("CREATE SCHEMA windrow")
    wrong: list[str] = []
    for migration in schema.migrations():
        found = reported(empty_dsn, migration)
        if (migration.locks, migration.reads) != found:
            wrong.append(f"write this into migration {migration.number:04}:\n{lines_of(*found)}")
        # Give each partitioned table a partition. Without a partition, the next migration would have nothing to read in
        # the table.
        with psycopg.connect(empty_dsn, autocommit=True) as connection:
            while made := connection.execute(_CHILDLESS).fetchall():
                for (statement,) in made:
                    connection.execute(statement.encode())
    assert not wrong, "\n".join(wrong)


def test_the_plan_of_a_newer_schema_is_refused_and_of_an_empty_or_older_one_told(
    fresh_dsn: str, empty_dsn: str, postgres: Server, tmp_path: Path
) -> None:
    config = write_cluster(tmp_path / "cluster.toml", {"s1": fresh_dsn, "s2": empty_dsn})
    newest = schema.migrations()[-1]

    def told() -> tuple[int, list[dict[str, Any]]]:
        done = windrow("upgrade", "plan", "--config", str(config), "--json")
        return done.code, done.documents

    code, (first, second) = told()
    assert (code, first["state"], second["state"]) == (1, "up to date", "empty")
    with psycopg.connect(fresh_dsn, autocommit=True) as connection:
        connection.execute("DELETE FROM windrow.migration WHERE number = %s", [newest.number])
    code, (first, _) = told()
    (step,) = first["migrations"]
    assert (code, first["state"]) == (1, "to migrate")
    assert (step["name"], step["breaking"]) == (f"{newest.number:04} {newest.name}", newest.breaking)
    assert step["locks"] == newest.locks
    assert sorted(step["reads_bytes"]) == newest.reads
    out = windrow("upgrade", "plan", "--config", str(config)).out
    assert f"{newest.number:04} {newest.name}" in out
    # The command has not run any migration.
    assert told()[1][0]["state"] == "to migrate"
    with psycopg.connect(fresh_dsn, autocommit=True) as connection:
        connection.execute("INSERT INTO windrow.migration VALUES (9000, 'later', 'x', true)")
    code, (first, _) = told()
    assert (code, first["state"]) == (5, "refused")
    assert "its schema has migration 9000 of a newer release" in str(first["error"])
    config = write_cluster(tmp_path / "cluster.toml", {"s1": "host=127.0.0.1 port=1 dbname=x"})
    assert (told()[0], told()[1][0]["state"]) == (3, "unreachable")
