"""One PostgreSQL server on this machine, with a database for Windrow. Owns its folder and its process.

The folder is the state: port, passwords and data are read from it, so that any later process can go on with
the cluster. Refuses to listen anywhere but on 127.0.0.1, to let anyone in without a password, to run the
server as root, to serve one folder to two owners, and to run on Windows.

    <folder>/cluster.json     the port
    <folder>/passwords.json   mode 600, never logged
    <folder>/primary.pass     a standby's: mode 600, its way to the primary; the server's account reads it
    <folder>/windrow.conf     settings, included by data/postgresql.conf
    <folder>/server.log       what the server prints; server.log.1 is the one before
    <folder>/owner.lock       locked by the process that started the server
    <folder>/server.lock      locked by initdb, the server and its children: free once all of them have ended
    <folder>/data/            the server's; everything else is ours

A server outlives an owner that is killed. The next start() finds it and adopts it. An ephemeral cluster goes
with its owner instead.
"""

import contextlib
import errno
import fcntl
import json
import os
import random
import re
import secrets
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Literal, Self, assert_never

import psycopg
from psycopg import sql

from embedded.account import Account, run, server_account, spawn
from embedded.binaries import Binaries, find_binaries
from embedded.errors import (
    ClusterInUse,
    EmbeddedError,
    NotCreated,
    PortTaken,
    StartFailed,
    StopTimedOut,
)
from embedded.folders import default_root, make_folder, sync_folder, temporary_root, write_file
from embedded.postmaster import Postmaster, names_folder, read_postmaster
from embedded.settings import check_overrides, render
from embedded.watcher import Watcher

ROLE = "windrow"
DATABASE = "windrow"
SUPERUSER = "postgres"
HOST = "127.0.0.1"

_NAME = re.compile(r"[a-z][a-z0-9_-]{0,39}")
# Below those that systems give to outgoing connections: one could take ours while we are stopped.
_PORTS = range(20_000, 32_000)
_PORT_TRIES = 100
_LAUNCHES_MAX = 5  # How often a port that was free may turn out taken, before we give up.
_POLL_S = 0.01
_KILL_S_MAX = 10.0
_CONNECT_S = 2  # libpq's own minimum; on loopback it answers at once or is not there.
_COMPLETE_MS_MAX = 30_000  # For each statement that makes role and database.
_LOG_LINES = 15
_LOG_TAIL_BYTES = 16 * 1024
_LOG_BYTES_MAX = 16 * 1024 * 1024

StopMode = Literal["fast", "immediate"]


class Cluster:
    """One local server, named; several share a root folder. A context manager, or start() and stop().

    `name`      lower-case letters, digits, `_` and `-`; also the name of its folder below `root`.
    `root`      default: see default_root(). With `ephemeral`: where its temporary folder is made.
    `ephemeral` a fresh cluster, removed by stop() and after the death of this process, kill -9 included.
    `settings`  lines for postgresql.conf that override ours; applied by the next start of the server.
    `binaries`  a bin folder; default: see find_binaries(). Existing data asks for the version that made it.
    `standby_of` a running cluster: the first start copies its data, and from then on follows it, until promote().

    Raises ValueError on a bad name or setting. Methods are safe to call from several threads.
    """

    def __init__(
        self,
        name: str,
        *,
        root: Path | None = None,
        ephemeral: bool = False,
        settings: Mapping[str, str] | None = None,
        binaries: Path | None = None,
        standby_of: "Cluster | None" = None,
    ) -> None:
        if not _NAME.fullmatch(name):
            raise ValueError(
                f"cluster name {name!r} is not usable: start with a letter a-z, then up to 39 of a-z, 0-9, '_' and '-'"
            )
        self._name = name
        self._ephemeral = ephemeral
        self._settings = check_overrides(settings or {})
        self._wanted_binaries = binaries
        self._standby_of = standby_of
        self._account: Account | None = server_account()
        if ephemeral:
            place = temporary_root(self._account) if root is None else root
            # The name is drawn, not made, so that nothing is on disk before start().
            folder = place / f"windrow-{name}-{secrets.token_hex(6)}"
            self._copies = default_root().parent / "binaries"
        else:
            place = default_root() if root is None else root
            folder = place / name
            self._copies = place.absolute().parent / "binaries"
        # Resolved: a live server is recognized by the path that it was started with.
        self._folder = folder.resolve()
        self._data = self._folder / "data"
        self._process: subprocess.Popen[bytes] | None = None
        self._owner: IO[str] | None = None
        self._watcher: Watcher | None = None
        self._mutex = threading.RLock()

    def __repr__(self) -> str:
        return f"<Cluster {self._name!r} in {self._folder}, pid {self.pid}>"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def name(self) -> str:
        return self._name

    @property
    def folder(self) -> Path:
        return self._folder

    @property
    def pid(self) -> int | None:
        """The server's process id, whoever started it; None when it does not run."""
        process = self._process
        if process is not None and process.poll() is None:
            return process.pid
        found = read_postmaster(self._data)
        return None if found is None else found.pid

    @property
    def alive(self) -> bool:
        return self.pid is not None

    @property
    def port(self) -> int:
        """The loopback port. Raises NotCreated before the first start."""
        port = self._read_port()
        if port is None:
            raise NotCreated(f"cluster {self._name!r} has no data in {self._folder}: start it first")
        return port

    @property
    def dsn(self) -> str:
        """For Windrow: a role without superuser rights, owner of its database. Holds the password."""
        return self._dsn(ROLE, DATABASE)

    @property
    def superuser_dsn(self) -> str:
        """For administration and fault tests. Holds the password."""
        return self._dsn(SUPERUSER, "postgres")

    def start(self, timeout_s: float = 60) -> None:
        """Start the server, or adopt the one that a killed owner left, and wait until it answers.

        Does nothing when it already runs for this object. After a crash it first waits for the old server's
        orphans to end. Raises BinariesNotFound, ClusterInUse, PortTaken or StartFailed; then nothing is left
        running that this call has started.
        """
        deadline = time.monotonic() + timeout_s
        with self._mutex:
            if self._owner is not None and self.alive:
                return
            owned_before = self._owner is not None
            self._own()
            try:
                running = self._running_before(deadline)
                if running is None:
                    self._start_new(deadline)
                else:
                    self._remember_port(running)
                    self._await_answer(deadline)
            except BaseException:
                # A server that we adopted is not ours to end; one that we started is.
                self._abandon_launch()
                if self._ephemeral and not owned_before:
                    self._remove()
                self._disown()
                raise

    def stop(self, mode: StopMode = "fast", timeout_s: float = 30) -> None:
        """Stop the server and wait until it has ended; an ephemeral cluster is then removed.

        fast: ends connections, writes a checkpoint. immediate: ends at once, recovers on the next start.
        Does nothing when it does not run. Raises ClusterInUse when another process owns it, and StopTimedOut.
        """
        deadline = time.monotonic() + timeout_s
        with self._mutex:
            if not self._folder.is_dir():
                self._disown()
                return
            self._own()
            match mode:
                case "fast":
                    self._signal(signal.SIGINT)
                case "immediate":
                    self._signal(signal.SIGQUIT)
                case _:
                    assert_never(mode)
            if not _holds_by(deadline, lambda: not self.alive):
                raise StopTimedOut(
                    f"cluster {self._name!r} (pid {self.pid}) runs {timeout_s:g} s after a {mode} stop; "
                    f'see {self._log}, and try stop(mode="immediate") or kill()'
                )
            # Nothing is left of a killed server either, once this lock is free.
            if self._folder.is_dir():
                self._await_orphans(deadline, StopTimedOut).close()
            self._process = None
            if self._ephemeral:
                self._remove()
            self._disown()

    def close(self) -> None:
        """Stop, whatever it takes. The checkpoint is spared where the data is thrown away."""
        try:
            self.stop("immediate" if self._ephemeral else "fast")
        except StopTimedOut:
            self.stop("immediate")

    def kill(self) -> None:
        """SIGKILL the postmaster alone, as a fault would, and wait until it is gone; start() recovers."""
        deadline = time.monotonic() + _KILL_S_MAX
        with self._mutex:
            if self._folder.is_dir():
                self._own()
            self._signal(signal.SIGKILL)
            if not _holds_by(deadline, lambda: not self.alive):
                raise StopTimedOut(
                    f"cluster {self._name!r} (pid {self.pid}) is there {_KILL_S_MAX:g} s after SIGKILL: "
                    "the kernel holds it, most likely for its disk; see its state with `ps`"
                )
            if self._watcher is not None:
                self._watcher.guard(None)

    def promote(self, timeout_s: float = 60) -> None:
        """Make a standby a primary, and wait until it is one. The old primary must not run any more: nothing here
        keeps two of them apart. Raises StartFailed."""
        with psycopg.connect(self.superuser_dsn, autocommit=True, connect_timeout=_CONNECT_S) as connection:
            if connection.execute("SELECT pg_promote(true, %s)", [max(1, round(timeout_s))]).fetchone() != (True,):
                raise self._failed(f"the standby was not promoted within {timeout_s:g} s")

    def reset(self) -> None:
        """Delete all data of this cluster. Raises ClusterInUse while it runs or another process owns it."""
        with self._mutex:
            if not self._folder.is_dir():
                return
            owned_before = self._owner is not None
            self._own()
            try:
                self.refuse_while_alive()
                # Also not while orphans of a killed server may write.
                self._await_orphans(time.monotonic() + _KILL_S_MAX, ClusterInUse).close()
                self._remove()
            except BaseException:
                if not owned_before:
                    self._disown()
                raise
            self._disown()

    def refuse_while_alive(self) -> None:
        """Raises ClusterInUse while the server runs, whoever started it."""
        if (pid := self.pid) is not None:
            raise ClusterInUse(
                f"cluster {self._name!r} runs as pid {pid}: stop it before its data in {self._folder} is deleted"
            )

    # Starting

    def _running_before(self, deadline: float) -> Postmaster | None:
        """The live server found here, if one can be adopted."""
        found = read_postmaster(self._data)
        if found is None or found.status != "stopping":
            return found
        if not _holds_by(deadline, lambda: not names_folder(found.pid, self._data)):
            raise StartFailed(
                f"cluster {self._name!r}: the old server (pid {found.pid}) was told to stop and has not: "
                'end its connections, or call stop(mode="immediate")'
            )
        return None

    def _remember_port(self, running: Postmaster) -> None:
        # Its owner may have been killed before it wrote the port down.
        if running.port is not None and running.port != self._read_port():
            self._write_port(running.port)

    def _start_new(self, deadline: float) -> None:
        lock = self._await_orphans(deadline, StartFailed)
        try:
            existing = self._existing_major()
            binaries = find_binaries(self._wanted_binaries, major=existing, copies=self._copies)
            if existing is None:
                self._initialize(binaries, deadline, lock)
            # No process of this cluster lives: whatever the file names is someone else who got the id.
            (self._data / "postmaster.pid").unlink(missing_ok=True)
            self._rotate_log()
            self._launch_on_a_free_port(binaries, deadline, lock)
        finally:
            lock.close()

    def _existing_major(self) -> int | None:
        try:
            return int((self._data / "PG_VERSION").read_text())
        except FileNotFoundError:
            return None

    def _initialize(self, binaries: Binaries, deadline: float, lock: IO[str]) -> None:
        """Make the data folder under another name first: what is called `data` is whole."""
        new = self._folder / "data.new"
        if new.exists():
            shutil.rmtree(new)
        new.mkdir(mode=0o700)
        if self._account is not None:
            os.chown(new, self._account.uid, self._account.gid)
        if self._standby_of is None:
            self._make_data(new, binaries, deadline, lock)
        else:
            self._copy_data(self._standby_of, new, binaries, deadline, lock)
        new.rename(self._data)
        sync_folder(self._folder)

    def _make_data(self, new: Path, binaries: Binaries, deadline: float, lock: IO[str]) -> None:
        passwords = {role: secrets.token_urlsafe(24) for role in (SUPERUSER, ROLE)}
        write_file(self._passwords, json.dumps(passwords) + "\n", mode=0o600)
        password_file = self._folder / "initdb.password"
        command: list[str | Path] = [
            binaries.program("initdb"),
            *("-D", new),
            f"--username={SUPERUSER}",
            f"--pwfile={password_file}",
            "--auth=scram-sha-256",
            "--data-checksums",
            "--encoding=UTF8",
            "--locale-provider=libc",
            "--locale=C",
            "--no-instructions",
            # What a power failure would cost is thrown away anyway.
            *(["--no-sync"] if self._ephemeral else []),
        ]
        try:
            self._write_secret(password_file, passwords[SUPERUSER])
            self._fill(command, deadline, lock)
        finally:
            password_file.unlink(missing_ok=True)
        # No link is followed: the folder is writable for the server's account, and we may be root.
        descriptor = os.open(new / "postgresql.conf", os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW)
        with open(descriptor, "w", encoding="utf-8") as conf:
            conf.write("\ninclude '../windrow.conf'\n")
            conf.flush()
            os.fsync(descriptor)

    def _copy_data(self, primary: "Cluster", new: Path, binaries: Binaries, deadline: float, lock: IO[str]) -> None:
        passwords = primary._read_passwords()
        write_file(self._passwords, json.dumps(passwords) + "\n", mode=0o600)
        # It stays: the standby connects with it for as long as it follows.
        password_file = self._folder / "primary.pass"
        self._write_secret(password_file, f"*:*:*:{SUPERUSER}:{passwords[SUPERUSER]}")
        command: list[str | Path] = [
            binaries.program("pg_basebackup"),
            *("-D", new),
            *("-d", f"host={HOST} port={primary.port} user={SUPERUSER} passfile='{password_file}'"),
            "--write-recovery-conf",
            "--checkpoint=fast",
            *(["--no-sync"] if self._ephemeral else []),
        ]
        self._fill(command, deadline, lock)

    def _write_secret(self, path: Path, text: str) -> None:
        """For the server's account to read, and nobody else."""
        write_file(path, text + "\n", mode=0o600)
        if self._account is not None:
            os.chown(path, self._account.uid, self._account.gid)

    def _fill(self, command: list[str | Path], deadline: float, lock: IO[str]) -> None:
        """Run what fills the data folder. Raises StartFailed."""
        name = Path(command[0]).name
        with self._open_log() as log:
            # With the lock: were we killed now, the next start would wait for this child to end.
            child = spawn(command, account=self._account, output=log, pass_fds=(lock.fileno(),))
        if self._watcher is not None:
            self._watcher.guard(child.pid)
        with child:
            try:
                child.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise self._failed(f"{name} did not finish in time: give start() a longer timeout_s") from None
            finally:
                # Also on Ctrl-C. Leaving the with block waits for it.
                if child.poll() is None:
                    child.kill()
        if child.returncode != 0:
            raise self._failed(f"{name} ended with status {child.returncode}")

    def _launch_on_a_free_port(self, binaries: Binaries, deadline: float, lock: IO[str]) -> None:
        remembered = self._read_port()
        # A DSN that was handed out must stay true; nobody keeps one of an ephemeral cluster for long.
        fixed = remembered is not None and not self._ephemeral
        port = remembered
        for attempt in range(_LAUNCHES_MAX):
            if port is None or (_is_taken(port) and not fixed):
                port = self._pick_port()
            if _is_taken(port):
                raise self._port_taken(port)
            self._write_port(port)
            self._write_conf(binaries, port)
            self._launch(binaries, lock)
            try:
                self._await_answer(deadline)
            except StartFailed as error:
                # Someone may have been faster than the server, between our look and its own.
                if self.alive or not _is_taken(port):
                    raise
                if fixed:
                    raise self._port_taken(port) from error
                if attempt + 1 == _LAUNCHES_MAX:
                    raise
                continue
            return

    def _write_conf(self, binaries: Binaries, port: int) -> None:
        # The server itself is asked: how it was built is written nowhere else that is always there.
        def accepts(setting: str) -> bool:
            answered, _ = run(
                [binaries.program("postgres"), "-D", self._data, "-c", setting, "-C", setting.split("=")[0]],
                account=self._account,
            )
            return answered

        conf = self._folder / "windrow.conf"
        if not conf.exists():
            write_file(conf, "", mode=0o644)  # The question needs a complete configuration.
        text = render(
            name=self._name,
            port=port,
            lz4=accepts("wal_compression=lz4"),
            statistics=binaries.has_library("pg_stat_statements"),
            overrides=self._settings,
        )
        write_file(conf, text, mode=0o600 if self._account is None else 0o644)

    def _launch(self, binaries: Binaries, lock: IO[str]) -> None:
        with self._open_log() as log:
            try:
                self._process = spawn(
                    [binaries.program("postgres"), "-D", self._data],
                    account=self._account,
                    output=log,
                    pass_fds=(lock.fileno(),),
                )
            except (OSError, subprocess.SubprocessError) as error:
                raise self._failed(f"{binaries.program('postgres')} cannot be executed: {error}") from error
        if self._watcher is not None:
            self._watcher.guard(self._process.pid)

    def _await_answer(self, deadline: float) -> None:
        """Wait until the server lets its superuser in, and see that role and database are there."""
        refusal = "it has not opened its port"
        while True:
            process = self._process
            found = read_postmaster(self._data)
            if process is not None and process.poll() is not None:
                raise self._failed(f"the server ended with status {process.returncode}")
            if process is None and found is None:
                raise self._failed("the server that was found running has ended: start again")
            if found is not None and found.status in ("ready", "standby"):
                try:
                    self._complete()
                    return
                except psycopg.OperationalError as error:
                    refusal = str(error)
            if time.monotonic() >= deadline:
                raise self._failed(
                    "the server does not answer in time; if it is still recovering, give start() a longer "
                    f"timeout_s. Its last word: {refusal}"
                )
            time.sleep(_POLL_S)

    def _complete(self) -> None:
        """Make role and database where they are missing: an owner may have been killed before it did."""
        with psycopg.connect(self.superuser_dsn, autocommit=True, connect_timeout=_CONNECT_S) as connection:
            if connection.execute("SHOW in_hot_standby").fetchone() == ("on",):
                return
            connection.execute(sql.SQL("SET statement_timeout = {}").format(sql.Literal(_COMPLETE_MS_MAX)))
            role = connection.execute("SELECT FROM pg_roles WHERE rolname = %s", [ROLE]).fetchone()
            if role is None:
                # Hashed here, so that no log ever holds the password itself.
                verifier = connection.pgconn.encrypt_password(
                    self._read_passwords()[ROLE].encode(), ROLE.encode(), b"scram-sha-256"
                )
                connection.execute(
                    sql.SQL("CREATE ROLE {} LOGIN PASSWORD {}").format(
                        sql.Identifier(ROLE), sql.Literal(verifier.decode())
                    )
                )
            database = connection.execute("SELECT FROM pg_database WHERE datname = %s", [DATABASE]).fetchone()
            if database is None:
                connection.execute(
                    sql.SQL("CREATE DATABASE {} OWNER {}").format(sql.Identifier(DATABASE), sql.Identifier(ROLE))
                )

    # Locks and the process

    def _own(self) -> None:
        """Take the owner's lock, and make the folder if need be."""
        if self._owner is not None:
            return
        if self._ephemeral and not self._folder.exists():
            make_folder(self._folder.parent, account=self._account)
            # The mode is narrow for ourselves; the server's account must pass through.
            self._folder.mkdir(mode=0o700)
            self._folder.chmod(0o700 if self._account is None else 0o755)
            self._watcher = Watcher(self._folder)
        make_folder(self._folder, account=self._account)
        path = self._folder / "owner.lock"
        lock = _open_lock(path)
        if not _lock(lock) or not _is_still_at(lock, path):
            holder = lock.read().strip() or "unknown"
            lock.close()
            raise ClusterInUse(
                f"cluster {self._name!r} in {self._folder} is in use by process {holder}: "
                "connect with its DSN, or stop it there"
            )
        lock.truncate(0)
        lock.seek(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        self._owner = lock

    def _disown(self) -> None:
        if self._owner is not None:
            self._owner.close()
            self._owner = None

    def _await_orphans(self, deadline: float, failure: type[EmbeddedError]) -> IO[str]:
        """Wait until no process of an earlier server lives; returns their lock, for the next one to inherit.

        They end by themselves soon after their postmaster. The lock is held through a descriptor that every
        child inherits, so it tells of all of them, and process ids, which are reused, play no part.
        """
        path = self._folder / "server.lock"
        lock = _open_lock(path)
        if not _holds_by(deadline, lambda: _lock(lock)):
            lock.close()
            raise failure(
                f"cluster {self._name!r}: processes of an earlier server still hold {path}: "
                f"find them with `fuser {path}` and end them"
            )
        return lock

    def _signal(self, number: signal.Signals) -> None:
        process = self._process
        if process is not None and process.poll() is None:
            process.send_signal(number)
        elif (pid := self.pid) is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _abandon_launch(self) -> None:
        process = self._process
        if process is not None and process.poll() is None:
            process.send_signal(signal.SIGQUIT)
            try:
                process.wait(_KILL_S_MAX)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(_KILL_S_MAX)
        self._process = None
        if self._watcher is not None:
            self._watcher.guard(None)

    def _remove(self) -> None:
        with contextlib.suppress(FileNotFoundError):  # Someone may have deleted it already.
            shutil.rmtree(self._folder)
        if self._watcher is not None:
            self._watcher.dismiss()
            self._watcher = None

    # Files

    @property
    def _passwords(self) -> Path:
        return self._folder / "passwords.json"

    @property
    def _log(self) -> Path:
        return self._folder / "server.log"

    def _dsn(self, role: str, database: str) -> str:
        # Passwords are drawn from signs that need no escaping in a URL.
        return f"postgresql://{role}:{self._read_passwords()[role]}@{HOST}:{self.port}/{database}"

    def _read_passwords(self) -> dict[str, str]:
        match _read_json(self._passwords):
            case {"postgres": str(superuser), "windrow": str(role)}:
                return {SUPERUSER: superuser, ROLE: role}
            case None:
                raise NotCreated(
                    f"cluster {self._name!r} has no {self._passwords}: start it first; if it has data, "
                    "restore that file from a backup, or reset() the cluster"
                )
            case _:
                raise EmbeddedError(
                    f"{self._passwords} does not hold the two passwords: restore it from a backup, or "
                    "reset() the cluster"
                )

    def _read_port(self) -> int | None:
        path = self._folder / "cluster.json"
        match _read_json(path):
            case {"port": int(port)} if 0 < port < 65_536:
                return port
            case None:
                return None
            case _:
                raise EmbeddedError(f'{path} holds no valid port: write {{"port": <number>}} or delete it')

    def _write_port(self, port: int) -> None:
        write_file(self._folder / "cluster.json", json.dumps({"port": port}) + "\n", mode=0o644)

    def _pick_port(self) -> int:
        # A stopped neighbour's port is free to bind, and still not ours to take.
        kept: set[int] = set()
        for path in self._folder.parent.glob("*/cluster.json"):
            # A temporary folder may hold strangers' files, unreadable or unlike ours.
            with contextlib.suppress(OSError):
                match _read_json(path):
                    case {"port": int(neighbour)}:
                        kept.add(neighbour)
                    case _:
                        pass
        for port in random.sample(_PORTS, _PORT_TRIES):
            if port not in kept and not _is_taken(port):
                return port
        raise StartFailed(
            f"cluster {self._name!r} found no free port on {HOST}: {_PORT_TRIES} between {_PORTS.start} and "
            f"{_PORTS.stop - 1} were tried; stop some of their listeners"
        )

    def _port_taken(self, port: int) -> PortTaken:
        return PortTaken(
            f"port {port} of cluster {self._name!r} is taken by another program on {HOST}: stop that program "
            f"(`ss -ltnp 'sport = :{port}'` names it), or delete {self._folder / 'cluster.json'} to have a "
            "new port chosen, which changes the DSN"
        )

    def _open_log(self) -> IO[bytes]:
        descriptor = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        return open(descriptor, "ab")

    def _rotate_log(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            if self._log.stat().st_size > _LOG_BYTES_MAX:
                self._log.replace(self._log.with_name("server.log.1"))

    def _failed(self, what: str) -> StartFailed:
        try:
            with open(self._log, "rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - _LOG_TAIL_BYTES))
                lines = log.read().decode(errors="replace").splitlines()[-_LOG_LINES:]
        except FileNotFoundError:
            lines = []
        tail = "".join(f"\n  {line}" for line in lines) or "\n  (empty)"
        return StartFailed(f"cluster {self._name!r}: {what}. The end of {self._log}:{tail}")


def _holds_by(deadline: float, condition: Callable[[], bool]) -> bool:
    """Whether the condition came true before the deadline; it is asked at least once."""
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(_POLL_S)
    return True


def _read_json(path: Path) -> object:
    """What the file holds; None when there is no file, and its text when it is not JSON."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    try:
        stored: object = json.loads(text)
    except ValueError:
        return text
    return stored


def _open_lock(path: Path) -> IO[str]:
    return open(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+", encoding="utf-8")


def _lock(file: IO[str]) -> bool:
    # flock, not lockf: it belongs to the open file, and so passes to a child with the descriptor.
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_still_at(file: IO[str], path: Path) -> bool:
    """Whether the locked file is still the one at `path`: a reset may have deleted it meanwhile."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    return False


def _is_taken(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As the server does: connections that linger from its last run are no obstacle.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return True
            raise
    return False
