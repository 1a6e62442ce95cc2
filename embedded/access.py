"""Gives access to a cluster: keeps passwords.json (mode 600), and creates Windrow's role and database.

Passwords are never logged, and every connection needs a password.
"""

import json
import secrets
from pathlib import Path

import psycopg
from psycopg import sql

from embedded.errors import EmbeddedError, NotCreated
from embedded.folders import read_json, write_file
from embedded.ports import HOST

ROLE = "windrow"
DATABASE = "windrow"
SUPERUSER = "postgres"

CONNECT_S = 2  # libpq's minimum. On loopback a server answers at once or not at all.
_COMPLETE_MS_MAX = 30_000  # The timeout of each statement that creates the role and the database.


class Passwords:
    def __init__(self, cluster: str, folder: Path) -> None:
        self._cluster = cluster
        self._path = folder / "passwords.json"

    def read(self) -> dict[str, str]:
        """Returns the passwords by role. Raises NotCreated or EmbeddedError."""
        match read_json(self._path):
            case {"postgres": str(superuser), "windrow": str(role)}:  # pyrefly: ignore[not-callable]
                return {SUPERUSER: superuser, ROLE: role}
            case None:
                raise NotCreated(
                    f"cluster {self._cluster!r} has no {self._path}: start it first; if it has data, "
                    "restore that file from a backup, or reset() the cluster"
                )
            case _:
                raise EmbeddedError(
                    f"{self._path} does not contain the two passwords: restore it from a backup, or reset() the cluster"
                )

    def draw(self) -> dict[str, str]:
        """Generates new passwords, saves and returns them."""
        # Use characters that need no escaping in a URL.
        passwords = {role: secrets.token_urlsafe(24) for role in (SUPERUSER, ROLE)}
        self.keep(passwords)
        return passwords

    def keep(self, passwords: dict[str, str]) -> None:
        write_file(self._path, json.dumps(passwords) + "\n", mode=0o600)

    def dsn(self, role: str, database: str, *, port: int) -> str:
        return f"postgresql://{role}:{self.read()[role]}@{HOST}:{port}/{database}"


def complete(superuser_dsn: str, *, password: str) -> None:
    """Creates the role and the database if they are missing: the process that made the cluster may have been killed
    before it created them."""
    with psycopg.connect(superuser_dsn, autocommit=True, connect_timeout=CONNECT_S) as connection:
        if connection.execute("SHOW in_hot_standby").fetchone() == ("on",):
            return
        connection.execute(sql.SQL("SET statement_timeout = {}").format(sql.Literal(_COMPLETE_MS_MAX)))
        role = connection.execute("SELECT FROM pg_roles WHERE rolname = %s", [ROLE]).fetchone()
        if role is None:
            # Hash the password before it is sent, so that no log of the server can contain the password.
            verifier = connection.pgconn.encrypt_password(password.encode(), ROLE.encode(), b"scram-sha-256")
            connection.execute(
                sql.SQL("CREATE ROLE {} LOGIN PASSWORD {}").format(sql.Identifier(ROLE), sql.Literal(verifier.decode()))
            )
        # `windrow doctor` needs this grant: without it, the role does not see how long other roles have held a
        # snapshot.
        connection.execute(sql.SQL("GRANT pg_read_all_stats TO {}").format(sql.Identifier(ROLE)))
        database = connection.execute("SELECT FROM pg_database WHERE datname = %s", [DATABASE]).fetchone()
        if database is None:
            connection.execute(
                sql.SQL("CREATE DATABASE {} OWNER {}").format(sql.Identifier(DATABASE), sql.Identifier(ROLE))
            )
