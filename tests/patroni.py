"""A shard whose Postgres servers are managed by Patroni: one etcd and three members on loopback, with the configuration
of deploy/patroni. Owns their processes and folders.

When this process ends, even by a kill, Patroni and etcd end too, and a watcher ends Postgres.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import urllib.error
import urllib.request
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import psycopg
import yaml
from psycopg.conninfo import make_conninfo

from embedded import find_binaries
from embedded.account import Account, server_account, spawn
from embedded.folders import temporary_root
from embedded.ports import HOST, RememberedPort
from embedded.postmaster import read_postmaster
from embedded.watcher import Watcher
from proof.postgres import ask
from proof.processes import family
from tests.routers import CHECKOUT, until

SHIPPED = CHECKOUT / "deploy" / "patroni"
INSTALL = "apt-get install --no-install-recommends etcd-server patroni python3-etcd"
PASSWORD = "of-this-test"
_ANSWER_S_MAX = 3.0
# These times are shorter than in production. Newer releases of Patroni raise the `ttl` to 20 s.
QUICK = {"ttl": 8, "loop_wait": 1, "retry_timeout": 3}
_SMALL = {"max_connections": 60, "shared_buffers": "32MB", "max_wal_size": "128MB", "min_wal_size": "32MB"}


def missing_programs() -> list[str]:
    return [name for name in ("etcd", "patroni", "setpriv") if shutil.which(name) is None]


@dataclass(kw_only=True)
class _Program:
    """A program that may be killed and started again."""

    command: Sequence[str | Path]
    log: Path
    account: Account | None
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log.open("ab") as log:
            command = ["setpriv", "--pdeathsig", "KILL", *self.command]
            self.process = spawn(command, account=self.account, output=log)

    def send(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()


@dataclass(kw_only=True)
class Member:
    """A Postgres and its Patroni."""

    name: str
    folder: Path
    port: int
    rest: int
    patroni: _Program
    watcher: Watcher

    @property
    def data(self) -> Path:
        return self.folder / "data"

    @property
    def superuser_dsn(self) -> str:
        return make_conninfo(
            host=HOST, port=self.port, user="postgres", password=PASSWORD, dbname="postgres", connect_timeout=3
        )

    def start(self) -> None:
        self.patroni.start()

    def is_(self, what: str) -> bool:
        """Asks Patroni, as load balancers do: `leader`, `sync`, `replica`."""
        try:
            with urllib.request.urlopen(f"http://{HOST}:{self.rest}/{what}", timeout=_ANSWER_S_MAX) as answer:
                return bool(answer.status == 200)
        except (OSError, urllib.error.HTTPError):
            return False

    def dcs_last_seen(self) -> int:
        """Returns the time at which this member's Patroni began its last cycle, in seconds since 1970."""
        with urllib.request.urlopen(f"http://{HOST}:{self.rest}/patroni", timeout=_ANSWER_S_MAX) as answer:
            return int(json.load(answer)["dcs_last_seen"])

    def is_in_failsafe_mode(self) -> bool:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://{HOST}:{self.rest}/metrics") as answer:
            return any(
                line.startswith(b"patroni_failsafe_mode_is_active{") and line.split()[-1] == b"1" for line in answer
            )
        return False

    def guard(self) -> int | None:
        """If this member's Postgres runs, makes the watcher end it when the tests end. Returns the postmaster's pid."""
        running = read_postmaster(self.data)
        pid = None if running is None else running.pid
        self.watcher.guard(pid)
        return pid

    def processes(self) -> list[psutil.Process]:
        """Returns the processes of this member's Postgres, the postmaster first."""
        return family(self.guard())

    def kill_postgres(self) -> None:
        """Kills all processes of this member's Postgres, so that none of them finishes its work."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        for process in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)

    @contextlib.contextmanager
    def lagging(self) -> Generator[None, None, None]:
        """During the block, freezes the process that receives WAL. So the standby stays connected, and falls behind."""
        (receiver,) = [one for one in self.processes() if "walreceiver" in " ".join(one.cmdline())]
        receiver.suspend()
        try:
            yield
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):
                receiver.resume()

    def end(self) -> None:
        self.patroni.kill()
        self._signal(signal.SIGQUIT)
        until(lambda: not self.processes(), f"{self.name} has ended")
        self.watcher.dismiss()


@dataclass(kw_only=True)
class PatroniShard:
    name: str
    etcd: _Program
    members: list[Member] = field(default_factory=list[Member])

    @property
    def dsn(self) -> str:
        """The DSN for routers."""
        return make_conninfo(
            host=",".join(HOST for _ in self.members),
            port=",".join(str(member.port) for member in self.members),
            user="windrow",
            password=PASSWORD,
            dbname="windrow",
            target_session_attrs="read-write",
            sslmode="disable",
        )

    @property
    def direct_dsn(self) -> str:
        """The DSN of the primary's database, for tests that query it directly."""
        return make_conninfo(self.leader.superuser_dsn, dbname="windrow")

    @property
    def leader(self) -> Member:
        (found,) = [member for member in self.members if member.is_("leader")]
        return found

    def has_leader(self, *, other_than: Member | None = None) -> bool:
        return any(member.is_("leader") for member in self.members if member is not other_than)

    def is_whole(self) -> bool:
        """Returns whether every member runs, and whether every standby lacks at most the last megabyte of the WAL."""
        for member in self.members:
            member.guard()
        caught_up = (
            "SELECT count(*), count(*) FILTER (WHERE sync_state = 'sync') FROM pg_stat_replication "
            "WHERE state = 'streaming' AND flush_lsn >= pg_current_wal_flush_lsn() - 1000000"
        )
        try:
            ((streaming, synchronous),) = ask(self.leader.superuser_dsn, caught_up)
        except (ValueError, psycopg.Error):
            return False
        expected = len(self.members) - 1
        # The DCS must name the synchronous standby too: otherwise no standby may be promoted.
        return streaming == expected and synchronous > 0 and any(member.is_("sync") for member in self.members)

    def logs(self) -> str:
        """Returns the last lines of all logs, for the message of a failed test."""
        return "\n".join(
            f"{one.log}:\n" + "\n".join(one.log.read_text().splitlines()[-30:])
            for one in (self.etcd, *(member.patroni for member in self.members))
        )


def _port(place: Path) -> int:
    place.mkdir()
    remembered = RememberedPort(place.name, place)
    port = remembered.pick()
    remembered.write(port)
    return port


def _configuration(changes: dict[str, Any]) -> str:
    """Returns the configuration of deploy/patroni with short times and small servers."""
    shipped = yaml.safe_load((SHIPPED / "patroni.yml").read_text())
    dcs = shipped["bootstrap"]["dcs"]
    dcs |= QUICK | changes
    dcs["postgresql"]["parameters"] |= _SMALL
    shipped["postgresql"]["parameters"]["unix_socket_directories"] = ""
    return yaml.safe_dump(shipped)


def _environment(member: str, port: int, rest: int, data: Path, etcd: int) -> list[str]:
    """Returns the variables of deploy/patroni/member.env.example with the values of this machine."""
    own = {
        "PATRONI_NAME": member,
        "PATRONI_ETCD3_HOSTS": f"{HOST}:{etcd}",
        "PATRONI_RESTAPI_LISTEN": f"{HOST}:{rest}",
        "PATRONI_RESTAPI_CONNECT_ADDRESS": f"{HOST}:{rest}",
        "PATRONI_POSTGRESQL_LISTEN": f"{HOST}:{port}",
        "PATRONI_POSTGRESQL_CONNECT_ADDRESS": f"{HOST}:{port}",
        "PATRONI_POSTGRESQL_DATA_DIR": str(data),
        "PATRONI_POSTGRESQL_BIN_DIR": str(find_binaries().folder),
    }
    lines = (SHIPPED / "member.env.example").read_text().splitlines()
    shipped = dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
    assert own.keys() <= shipped.keys()
    passwords = dict.fromkeys((name for name in shipped if name.endswith("_PASSWORD")), PASSWORD)
    return [f"{name}={value}" for name, value in (shipped | own | passwords).items()]


@contextlib.contextmanager
def patroni_shard(name: str, **changes: Any) -> Generator[PatroniShard, None, None]:
    """Starts a shard of three members, with Windrow's role and database. `changes`: keys of `bootstrap.dcs`. Raises
    BinariesNotFound if there is no Postgres."""
    account = server_account()
    find_binaries()
    with contextlib.ExitStack() as stack:
        root = Path(tempfile.mkdtemp(prefix="windrow-patroni-", dir=temporary_root(account)))
        stack.callback(shutil.rmtree, root)
        root.chmod(0o755)
        etcd, peer = (_port(root / name) for name in ("etcd-client", "etcd-peer"))
        shard = PatroniShard(name=name, etcd=_etcd(root / "etcd", etcd, peer, account))
        stack.callback(shard.etcd.kill)
        shard.etcd.start()
        config = root / "patroni.yml"
        config.write_text(_configuration(changes))
        for member_name in ("db1a", "db1b", "db1c"):
            member = _member(member_name, root, config, etcd, account)
            stack.callback(member.end)
            shard.members.append(member)
            member.start()
        try:
            # Each check costs Patroni some milliseconds of CPU.
            until(shard.is_whole, "every member runs", every_s=0.3)
            for statement in (
                f"CREATE ROLE windrow LOGIN PASSWORD '{PASSWORD}'",
                "CREATE DATABASE windrow OWNER windrow",
            ):
                ask(shard.leader.superuser_dsn, statement)
            yield shard
        except BaseException:
            print(shard.logs())
            raise


def _etcd(folder: Path, client: int, peer: int, account: Account | None) -> _Program:
    folder.mkdir()
    if account is not None:
        os.chown(folder, account.uid, account.gid)
    clients, peers = (f"http://{HOST}:{port}" for port in (client, peer))
    command = (
        "etcd", f"--data-dir={folder}/data", "--name=etcd", f"--initial-cluster=etcd={peers}", "--unsafe-no-fsync",
        f"--listen-client-urls={clients}", f"--advertise-client-urls={clients}", f"--listen-peer-urls={peers}",
        f"--initial-advertise-peer-urls={peers}",
    )  # fmt: skip
    return _Program(command=command, log=folder.with_suffix(".log"), account=account)


def _member(name: str, root: Path, config: Path, etcd: int, account: Account | None) -> Member:
    port, rest = _port(root / name), _port(root / f"{name}-rest")
    folder = root / name
    if account is not None:
        os.chown(folder, account.uid, account.gid)
    command = ["env", f"HOME={folder}", *_environment(name, port, rest, folder / "data", etcd), "patroni", str(config)]
    patroni = _Program(command=command, log=root / f"{name}.log", account=account)
    return Member(name=name, folder=folder, port=port, rest=rest, patroni=patroni, watcher=Watcher(folder))
