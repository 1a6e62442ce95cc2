"""The Postgres server of the tests. Only this module chooses it.

The module prefers the Postgres programs of this machine, which start within a second. If there are no such programs, or
if WINDROW_TEST_POSTGRES is "docker", it uses a container. WINDROW_PG_BIN names a folder with programs (see embedded).
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, LiteralString

import psutil
import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from embedded import BinariesNotFound, Cluster, find_binaries, open_clusters
from proof.processes import runs

IMAGE = "postgres:18"
# Templates of databases. EMPTY is an empty database. SPARE has the schema, but belongs to no shard yet.
# tests/conftest.py makes SPARE.
EMPTY, SPARE = "template1", "spare"
_END_S_MAX = 60.0
# The doctor would report findings about these settings of the server. No test on this server simulates a power failure,
# so commits need not wait for the disk. Most databases exist only for seconds. With the usual setting, autovacuum would
# start a process for each of them every 15 s.
UNSAFE = {"fsync": "off", "full_page_writes": "off", "autovacuum_naptime": "10min"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    superuser_dsn: str
    # The DSN of a role without superuser rights, as in production.
    owner_dsn: str
    # This connection stays open. With a connection for each statement, a run of all tests would start thousands of
    # processes.
    _admin: psycopg.Connection[tuple[Any, ...]]

    def dsn(self, database: str) -> str:
        """Returns the DSN of one database of this server, as its owner."""
        return make_conninfo(self.owner_dsn, dbname=database)

    def superuser_dsn_of(self, database: str) -> str:
        return make_conninfo(self.superuser_dsn, dbname=database)

    def create(self, database: str, *, template: str = SPARE) -> str:
        """Creates a database, a copy of the template. Returns its owner's DSN."""
        # A session that its client has just closed may still exist on the server.
        self._cut(template)
        self._administer(
            "CREATE DATABASE {} TEMPLATE {} OWNER {} STRATEGY file_copy",
            database,
            template,
            str(conninfo_to_dict(self.owner_dsn)["user"]),
        )
        return self.dsn(database)

    def drop(self, database: str) -> None:
        self._administer("DROP DATABASE {} WITH (FORCE)", database)

    @contextlib.contextmanager
    def away(self, database: str) -> Generator[None, None, None]:
        """Cuts all connections to a database, and allows no new ones during the block."""
        self._administer("ALTER DATABASE {} ALLOW_CONNECTIONS false", database)
        try:
            self._cut(database)
            yield
        finally:
            self._administer("ALTER DATABASE {} ALLOW_CONNECTIONS true", database)

    def _cut(self, database: str) -> None:
        self._admin.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", [database])

    def _administer(self, statement: LiteralString, *names: str) -> None:
        self._admin.execute(sql.SQL(statement).format(*map(sql.Identifier, names)))


@contextlib.contextmanager
def open_server() -> Generator[Server, None, None]:
    """Starts a server, which is removed when the block ends."""
    with _in_docker() if _wants_docker() else _on_this_machine() as server:
        yield server


def _wants_docker() -> bool:
    if os.environ.get("WINDROW_TEST_POSTGRES") == "docker":
        return True
    try:
        find_binaries()
    except BinariesNotFound:
        return "WINDROW_PG_BIN" not in os.environ
    return False


@contextlib.contextmanager
def _on_this_machine() -> Generator[Server, None, None]:
    settings = {
        "max_prepared_transactions": "4",
        # If a test leaves a connection that has not logged in yet, its database cannot be dropped until this timeout
        # ends. The default is a minute.
        "authentication_timeout": "10s",
        **UNSAFE,
    }
    with open_clusters(["tests"], ephemeral=True, settings=settings) as clusters:
        cluster = clusters["tests"]
        hash_once(cluster.superuser_dsn, cluster.superuser_dsn, cluster.dsn)
        with psycopg.connect(cluster.superuser_dsn, autocommit=True) as admin:
            yield Server(superuser_dsn=cluster.superuser_dsn, owner_dsn=cluster.dsn, _admin=admin)


def hash_once(superuser_dsn: str, *dsns: str) -> None:
    """Stores the roles' passwords with one iteration of the hash. Otherwise each of thousands of connections costs the
    client 3 ms."""
    with psycopg.connect(superuser_dsn, autocommit=True) as connection:
        if connection.info.server_version < 160_000:
            return
        connection.execute("SET scram_iterations = 1")
        for parts in map(conninfo_to_dict, dsns):
            role, password = str(parts["user"]), str(parts["password"])
            # libpq hashes the password, so that no log can contain it.
            hashed = connection.pgconn.encrypt_password(password.encode(), role.encode(), b"scram-sha-256").decode()
            connection.execute(sql.SQL("ALTER ROLE {} PASSWORD {}").format(sql.Identifier(role), sql.Literal(hashed)))


@contextlib.contextmanager
def _in_docker() -> Generator[Server, None, None]:
    # Imported only if it is used, because it takes a second.
    from testcontainers.community.postgres import PostgresContainer

    with PostgresContainer(
        IMAGE, username="postgres", password="postgres", dbname="postgres", driver=None
    ) as container:
        dsn = container.get_connection_url()
        with psycopg.connect(dsn, autocommit=True) as admin:
            admin.execute("CREATE ROLE windrow LOGIN PASSWORD 'windrow'")
            yield Server(
                superuser_dsn=dsn,
                owner_dsn=make_conninfo(dsn, user="windrow", password="windrow", dbname="postgres"),
                _admin=admin,
            )


def kill(cluster: Cluster) -> None:
    """Kills the server, and waits until its sessions have ended: a session that has not noticed the kill yet would
    still execute a statement."""
    assert cluster.pid is not None
    sessions = psutil.Process(cluster.pid).children()
    cluster.kill()
    deadline_s = time.monotonic() + _END_S_MAX
    while any(map(runs, sessions)):
        assert time.monotonic() < deadline_s, "its sessions outlive the server"
        time.sleep(0.01)


@contextlib.contextmanager
def frozen(postmaster: int) -> Generator[None, None, None]:
    """Freezes the server during the block, as a stuck disk does."""
    main = psutil.Process(postmaster)
    # The postmaster is frozen first, so that no new processes start.
    main.suspend()
    parts = [main, *main.children(recursive=True)]
    for part in parts[1:]:
        part.suspend()
    try:
        yield
    finally:
        for part in reversed(parts):
            with contextlib.suppress(psutil.NoSuchProcess):
                part.resume()
