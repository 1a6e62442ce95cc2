"""A shard's schema: forward-only numbered migrations (migrations/), and the identity of the shard's database. The
schema and the identity are checked, and made if necessary, on the first connection to a database.

functions/ has the current text of each database function. Lines of a migration such as the following install these
texts: "-- INSTALL functions/NAME.sql DIGEST". The digest is the SHA-256 that the file had when the migration was
written. Whoever changes the file must write a new migration that installs it (tests/unit/test_database_functions.py).
If the file has changed since the migration was written, the line does not replace a function that exists already. The
later migration replaces the function, and makes the changes to tables that the new text needs. If a migration changes
the result type or the arguments of a function, it has a DROP FUNCTION IF EXISTS before the line. A file must not be
deleted while a migration names it.

Lines such as "-- LOCKS SHARE: job" and "-- READS: job, queue" say what a migration locks and reads
(tests/integration/test_upgrade_plan.py measures it).
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from psycopg import AsyncConnection

from shard.errors import Misconfigured
from shard.postgres import partitions, statements
from shard.postgres.pool import Database, too_new

_FILES = Path(__file__).parent / "migrations"
_FUNCTIONS = Path(__file__).parent / "functions"
_INSTALL = re.compile(rb"^-- INSTALL functions/(\w+)\.sql ([0-9a-f]{64})$", re.MULTILINE)
_COSTS = re.compile(rb"^-- (?:LOCKS ([A-Z ]+)|READS): ([\w, ]+)\n", re.MULTILINE)
_INSTALL_NEW = b"""DO $install$ BEGIN
    IF NOT EXISTS (SELECT FROM pg_proc WHERE pronamespace = 'windrow'::regnamespace AND proname = '%b') THEN
        EXECUTE $text$%b$text$;
    END IF;
END $install$;"""
# The advisory lock of processes that migrate a shard. Any number will do, but it must be the same in every release.
_LOCK = 0x77696E64_6D696772

Connection = AsyncConnection[tuple[Any, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Migration:
    number: int
    name: str
    # The content of the migration's file.
    script: bytes

    @property
    def checksum(self) -> str:
        """The digest of the migration's file, without the texts of the functions that the migration installs, because
        these texts may change later, and without the lines about locks and reads, which change nothing."""
        return hashlib.sha256(_COSTS.sub(b"", self.script)).hexdigest()

    @property
    def installs(self) -> dict[str, str]:
        """The functions that the migration installs, with the digests that their files had when the migration was
        written."""
        return {name.decode(): digest.decode() for name, digest in _INSTALL.findall(self.script)}

    @property
    def statements(self) -> bytes:
        """The SQL that the migration runs: its script, with the texts of the functions that it installs."""
        if not self.installs:
            return self.script
        # In a new database, a text may name columns that only a later migration adds.
        return b"SET LOCAL check_function_bodies = off;\n" + _INSTALL.sub(_installed, self.script)

    @property
    def breaking(self) -> bool:
        """True if older releases must not work with this migration. Then its file begins with "-- BREAKING"."""
        return self.script.startswith(b"-- BREAKING")

    @property
    def locks(self) -> dict[str, str]:
        """For each table that existed before, the strongest lock that the migration takes. Locks for which no statement
        has to wait are left out. SHARE and SHARE ROW EXCLUSIVE block writes; ACCESS EXCLUSIVE also blocks reads. The
        migration holds its locks until it ends."""
        return dict(sorted((table, mode) for mode, tables in self._costs() if mode for table in tables))

    @property
    def reads(self) -> list[str]:
        """The tables that existed before, and of which the migration reads or rewrites every row. The time of
        everything else in a migration does not depend on the number of rows."""
        return [table for mode, tables in self._costs() if not mode for table in tables]

    def _costs(self) -> list[tuple[str, list[str]]]:
        return [(mode.decode(), tables.decode().split(", ")) for mode, tables in _COSTS.findall(self.script)]


def _installed(line: re.Match[bytes]) -> bytes:
    name, digest = line.groups()
    text = (_FUNCTIONS / f"{name.decode()}.sql").read_bytes()
    if hashlib.sha256(text).hexdigest().encode() == digest:
        return text
    return _INSTALL_NEW % (name, text)


def migrations() -> list[Migration]:
    """Returns every migration of this release, in order."""
    return [
        Migration(number=int(path.name[:4]), name=path.stem[5:], script=path.read_bytes())
        for path in sorted(_FILES.glob("[0-9][0-9][0-9][0-9]_*.sql"))
    ]


async def migrate(database: Database, *, cluster: str | None) -> list[Migration]:
    """Migrates the schema to this release. Also makes the database a shard of this cluster, and makes its partitions.
    If `cluster` is None, the database holds only the catalog, and only the schema is migrated. Many processes may call
    this at the same time.

    Returns the migrations that were run. Raises Misconfigured, ShardUnavailable."""
    done: list[Migration] = []
    await refuse_unfit(database)
    while (migration := await _next(database)) is not None:
        done.append(migration)
    database.newest_migration = migrations()[-1].number
    if cluster is not None:
        await _identify(database, cluster)
        await partitions.make_ahead(database)
    return done


async def pending(database: Database) -> list[Migration] | None:
    """Returns the migrations of this release that have not been run on this database, or None if the database has no
    schema yet. Changes nothing. Raises ShardUnavailable. Raises Misconfigured in the cases in which `migrate` raises
    it."""
    await refuse_unfit(database)
    async with database.transaction() as connection:
        if not await _has_table(connection):
            return None
        if await _missing(connection, database) is None:
            return []
        cursor = await connection.execute(statements.LIST_MIGRATIONS)
        applied = {number for number, _, _ in await cursor.fetchall()}
    return [migration for migration in migrations() if migration.number not in applied]


async def refuse_unfit(database: Database) -> None:
    """Raises Misconfigured if the database's encoding is not UTF8, or if the role may not create the schema."""
    ((encoding, may_create),) = await database.run(statements.READ_FITNESS, {})
    if encoding != "UTF8":
        raise Misconfigured(
            f"shard {database.name!r}: its database's encoding is {encoding}, and Windrow needs UTF8; "
            "make it with: createdb -T template0 -E UTF8 NAME"
        )
    if not may_create:
        raise Misconfigured(
            f"shard {database.name!r}: the role in its DSN may not create the schema windrow; make it the owner of the "
            "database, or a member of the role that is"
        )


async def _next(database: Database) -> Migration | None:
    """Runs the first migration that has not been run yet, in a transaction of its own. Returns the migration, or None
    if all have been run."""
    # Look without the lock first. Hundreds of processes may start at the same moment. If there is nothing to do, they
    # need not wait for each other's locks.
    async with database.transaction() as connection:
        if await _has_table(connection) and await _missing(connection, database) is None:
            return None
    async with database.transaction() as connection:
        await connection.execute(statements.LOCK_EXCLUSIVE, {"lock": _LOCK})
        if not await _has_table(connection):
            await connection.execute("CREATE SCHEMA IF NOT EXISTS windrow")
            # While this session waited for the lock, another session may have made the table. `_has_table` may not see
            # that table, because Postgres has cached the result of the first look.
            await connection.execute(
                """
                CREATE TABLE IF NOT EXISTS windrow.migration (
                    number integer PRIMARY KEY, name text NOT NULL, checksum text NOT NULL, breaking boolean NOT NULL,
                    applied_at timestamptz NOT NULL DEFAULT now()
                )
                """
            )
        migration = await _missing(connection, database)
        if migration is not None:
            # The session's timeout is made for the statements of calls. Making an index on a large table takes longer.
            # After a timeout, each process that starts would try again, and would fail again.
            await connection.execute("SET LOCAL statement_timeout = 0")
            # A script has several statements. Only the simple protocol, without prepared statements, can run it.
            await connection.execute(migration.statements, prepare=False)
            await connection.execute(
                statements.RECORD_MIGRATION,
                {
                    "number": migration.number,
                    "name": migration.name,
                    "checksum": migration.checksum,
                    "breaking": migration.breaking,
                },
            )
    return migration


async def _has_table(connection: Connection) -> bool:
    cursor = await connection.execute("SELECT to_regclass('windrow.migration') IS NOT NULL")
    row = await cursor.fetchone()
    return row is not None and bool(row[0])


async def _missing(connection: Connection, database: Database) -> Migration | None:
    """Returns the first migration of this release that has not been run. Raises Misconfigured if a migration was
    changed after it had been run, or if a newer release has run a breaking migration."""
    cursor = await connection.execute(statements.LIST_MIGRATIONS)
    rows = await cursor.fetchall()
    ours = migrations()
    numbers = {migration.number for migration in ours}
    newer = sorted(number for number, _, breaking in rows if breaking and number not in numbers)
    if newer:
        raise Misconfigured(f"shard {database.name!r}: {too_new(newer[0])}")
    applied = {number: checksum for number, checksum, _ in rows}
    for migration in ours:
        checksum = applied.get(migration.number)
        if checksum is None:
            return migration
        if checksum != migration.checksum:
            raise Misconfigured(
                f"shard {database.name!r}: migration {migration.number:04} ({migration.name}) was changed after "
                "it had been run there; migrations are forward-only: restore the file, and write a new migration"
            )
    return None


async def _identify(database: Database, cluster: str) -> None:
    async with database.transaction() as connection:
        await connection.execute(statements.CLAIM_IDENTITY, {"cluster": cluster, "shard": database.name})
        cursor = await connection.execute(statements.READ_IDENTITY)
        row = await cursor.fetchone()
        if row is None or row[:2] != (cluster, database.name):
            found = f"shard {row[1]!r} of cluster {row[0]!r}" if row else "no shard"
            raise Misconfigured(
                f"shard {database.name!r} of cluster {cluster!r}: its DSN leads to the database of {found}; "
                "correct the dsn or the names in the cluster file"
            )
