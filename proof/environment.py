"""Describes the machine and the versions with which figures were measured."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import psycopg

_ROOT = Path(__file__).parent.parent
_PACKAGES = ("grpcio", "protobuf", "psycopg", "psycopg-pool")
# These settings have other values at every start, and do not affect the figures.
_NOT_TOLD = frozenset({"port", "cluster_name", "unix_socket_directories"})


def environment() -> dict[str, object]:
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "packages": {name: version(name) for name in _PACKAGES},
        "load_average": os.getloadavg()[0],
    }


def described(environment: Mapping[str, object]) -> str:
    """Returns the description as text for a report."""
    server = environment.get("postgres")
    # Some measurements use no Postgres.
    postgres = f", PostgreSQL {server['version']}" if isinstance(server, Mapping) else ""
    return (
        f"{environment['date']}, commit {environment['commit']}. Everything ran on one machine: {environment['cores']} "
        f"cores ({environment['cpu']}), Linux {environment['kernel']}, Python {environment['python']}{postgres}."
    )


def postgres(dsn: str) -> dict[str, object]:
    """Returns the server's version, and the settings in its configuration files."""
    with psycopg.connect(dsn) as connection:
        row = connection.execute("SELECT current_setting('server_version'), current_setting('fsync')").fetchone()
        assert row is not None
        settings: dict[str, str] = dict(
            connection.execute(
                "SELECT name, current_setting(name) FROM pg_settings WHERE source = 'configuration file' ORDER BY name"
            ).fetchall()
        )
    told = {name: value for name, value in settings.items() if name not in _NOT_TOLD}
    return {"version": row[0].split()[0], "settings": {"fsync": row[1]} | told}


def _cpu_model() -> str:
    found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return found[1] if found else platform.machine()


def _commit() -> str | None:
    """Returns the commit, with "+" if the checkout has been changed since; None outside of a checkout."""
    try:
        commit = _git("rev-parse", "--short=12", "HEAD")
        return commit + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(*arguments: str) -> str:
    command = ("git", "--no-optional-locks", "-C", str(_ROOT), *arguments)
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
