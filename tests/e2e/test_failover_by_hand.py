"""Runs the failover commands of docs/operations.md on a shard with two servers. Checks the manifests for Kubernetes."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import sys
import tempfile
import tomllib
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pytest
import yaml
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from embedded import BinariesNotFound, find_binaries, open_clusters
from embedded.account import Account, run, server_account
from embedded.folders import temporary_root
from embedded.ports import HOST, RememberedPort
from embedded.postmaster import read_postmaster
from embedded.watcher import Watcher
from tests.e2e.test_cli import Step, environ, steady, steps
from tests.e2e.test_operations import PAGE, Place
from tests.routers import CHECKOUT, running_routers, until, write_cluster

SECTION = PAGE.partition("\n## Failover\n")[2].partition("\n## ")[0]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PASSWORD = "of-this-test"
INITDB_S_MAX = 120.0
# These programs work on folders of the server's account. The programs of Postgres refuse to run as root.
OF_THE_SERVER = ("pg_basebackup", "pg_ctl", "pg_rewind", "mkdir")
# This program prints the ids of acknowledged jobs. org-1 lives on s2, and org-2 lives on s1.
ENQUEUE = "for number in 1 2; do windrow enqueue org-$number mail greet; done"
AS_ACCOUNT = """#!{python}
import os, sys
os.setgroups([])
os.setgid({gid})
os.setuid({uid})
os.execv({program!r}, [{program!r}, *sys.argv[1:]])
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A simulated machine: a folder, a port and a shell (`place`)."""

    name: str
    place: Place
    port: int
    watcher: Watcher

    @property
    def data(self) -> Path:
        return self.place.folder / "data"

    @property
    def dsn(self) -> str:
        """The DSN of the superuser."""
        return f"host={HOST} port={self.port} user=postgres password={PASSWORD} dbname=postgres"

    def do(self, script: str) -> None:
        code, out = self.place.run(script)
        running = read_postmaster(self.data)
        self.watcher.guard(None if running is None else running.pid)
        log = self.place.folder / "server.log"
        assert code == 0, f"{script}\n{out}\n{log.read_text() if log.exists() else ''}"


@contextlib.contextmanager
def machine(name: str, path: str, account: Account | None) -> Generator[Machine]:
    """Yields a machine without a server. A server that was started on it is stopped after the block."""
    folder = Path(tempfile.mkdtemp(prefix=f"windrow-{name}-", dir=temporary_root(account)))
    watcher = Watcher(folder)
    remembered = RememberedPort(name, folder)
    port = remembered.pick()
    remembered.write(port)
    if account is not None:
        os.chown(folder, account.uid, account.gid)
    shell = Place(folder=folder, environ=environ(PATH=path, PGDATA=str(folder / "data"), PGPORT=str(port)))
    made = Machine(name=name, place=shell, port=port, watcher=watcher)
    try:
        yield made
    finally:
        if (running := read_postmaster(made.data)) is not None:
            os.kill(running.pid, signal.SIGQUIT)
            until(lambda: read_postmaster(made.data) is None, f"{name} has ended")
        watcher.dismiss()
        shutil.rmtree(folder)


def search_path(folder: Path, programs: Path, account: Account | None) -> str:
    """Returns a PATH where a shell finds the server's programs, wrapped so that they run as the server's account."""
    if account is not None:
        for name in OF_THE_SERVER:
            program = shutil.which(name, path=os.pathsep.join((str(programs), environ()["PATH"])))
            text = AS_ACCOUNT.format(python=sys.executable, gid=account.gid, uid=account.uid, program=program)
            (folder / name).write_text(text)
            (folder / name).chmod(0o700)
    return os.pathsep.join((str(folder), str(programs), environ()["PATH"]))


def begin(server: Machine, initdb: Path, account: Account | None) -> None:
    """Creates a primary with Windrow's role and database."""
    secret = server.place.folder / "password"
    secret.write_text(PASSWORD)
    access = ("--username=postgres", f"--pwfile={secret}", "--auth=scram-sha-256")
    options = ("--data-checksums", "--encoding=UTF8", "--locale=C", "--no-sync")
    made, said = run([initdb, "-D", server.data, *access, *options], account=account, timeout_s=INITDB_S_MAX)
    assert made, said
    with (server.data / "postgresql.conf").open("a") as settings:
        settings.write(f"listen_addresses = '{HOST}'\nunix_socket_directories = ''\n")
    server.do('pg_ctl -D "$PGDATA" --log=server.log start')
    with psycopg.connect(server.dsn, autocommit=True) as connection:
        connection.execute(sql.SQL("CREATE ROLE windrow LOGIN PASSWORD {}").format(sql.Literal(PASSWORD)))
        connection.execute("CREATE DATABASE windrow OWNER windrow")


def blocks(kind: str) -> list[str]:
    return [text for found, text in BLOCK.findall(SECTION) if found == kind]


def dsn_of_the_page(*machines: Machine) -> str:
    """Returns the page's DSN with these machines' addresses, and without TLS."""
    (text,) = blocks("toml")
    (entry,) = tomllib.loads(text)["shard"]
    parts: dict[str, Any] = conninfo_to_dict(entry["dsn"])
    assert parts["host"].split(",") == [one.name for one in machines]
    assert parts["target_session_attrs"] == "read-write"
    parts["host"] = ",".join(HOST for _ in machines)
    parts["port"] = ",".join(str(one.port) for one in machines)
    return make_conninfo("", **parts | {"password": PASSWORD, "sslmode": "disable"})


def shows(at: Machine, step: Step) -> None:
    """Waits until the command prints what the page shows, because the servers need a moment to find each other."""

    def is_shown() -> bool:
        code, out = at.place.run(step.command)
        print(f"$ {step.command}\n{out}")
        return (code, steady(out)) == (step.code, steady(step.output))

    until(is_shown, f"$ {step.command}")


@contextlib.contextmanager
def two_machines(folder: Path) -> Generator[tuple[Machine, Machine]]:
    """Yields two machines: the first is the primary of shard s1, and the second is empty. Routers use the page's DSN,
    which names both machines, and a second shard."""
    account = server_account()
    try:
        programs = find_binaries().folder
    except BinariesNotFound as error:
        pytest.skip(str(error))
    path = search_path(folder, programs, account)
    with (
        machine("db1a", path, account) as first,
        machine("db1b", path, account) as second,
        open_clusters(["s2"], ephemeral=True) as others,
    ):
        begin(first, programs / "initdb", account)
        shards = {"s1": dsn_of_the_page(first, second), "s2": others.dsns["s2"]}
        with running_routers(write_cluster(folder / "cluster.toml", shards)) as routers:
            for one in (first, second):
                one.place.environ.update(WINDROW_ADDRESS=routers.address, DB1A=first.dsn, DB1B=second.dsn)
            yield first, second


@pytest.mark.timeout(300)
@pytest.mark.turns(2)
@pytest.mark.parametrize("mode", ["immediate", "fast"])
def test_a_failover_by_hand_goes_as_the_page_says(tmp_path: Path, mode: str) -> None:
    """The mode `fast` is the page's variant for a planned switchover."""
    with two_machines(tmp_path) as (first, second):
        for kind, text in BLOCK.findall(SECTION):
            if kind == "console":
                for step in steps(f"```console\n{text}```\n"):
                    shows(first, step)
            elif kind == "sh":
                if "--mode=immediate stop" in text:
                    first.do(ENQUEUE)
                (at,) = (one for one in (first, second) if text.startswith(f"# on {one.name}\n"))
                at.do(text.replace("--mode=immediate", f"--mode={mode}"))
        synchronous = 'psql "$DB1B" -Atc "SELECT application_name, sync_state FROM pg_stat_replication"'
        shows(first, Step(command=synchronous, output="db1a|sync", code=0))
        first.do(ENQUEUE)
        code, out = first.place.run("windrow check")
        assert code == 0, out
        assert "s1 1 2 2 balance\ns2 1 2 2 balance" in steady(out)
        assert "found: 0 scheduled, 4 ready, 0 leased, 0 succeeded" in out


def test_a_shard_in_kubernetes_acknowledges_only_what_two_of_three_servers_have() -> None:
    cluster, store, backup = yaml.safe_load_all((CHECKOUT / "deploy" / "cloudnativepg" / "s1.yaml").read_text())
    assert cluster["spec"]["instances"] == 3
    assert cluster["spec"]["enablePDB"]
    initdb = cluster["spec"]["bootstrap"]["initdb"]
    assert initdb["postInitApplicationSQL"] == [f"GRANT pg_read_all_stats TO {initdb['owner']}"]
    synchronous = {"method": "any", "number": 1, "dataDurability": "required", "failoverQuorum": True}
    assert cluster["spec"]["postgresql"]["synchronous"] == synchronous
    (plugin,) = cluster["spec"]["plugins"]
    assert plugin["isWALArchiver"]
    assert plugin["parameters"] == {"barmanObjectName": store["metadata"]["name"]}
    assert backup["spec"]["cluster"]["name"] == cluster["metadata"]["name"]
    assert backup["spec"]["pluginConfiguration"] == {"name": plugin["name"]}
