"""One PostgreSQL server on this machine, with a database for Windrow. A Cluster owns the server's folder and process.

All state is in the folder: port, passwords and data. So any later process can use the cluster again. The server listens
only on 127.0.0.1, requires a password, and never runs as root. At most one process at a time owns a folder. Windows is
not supported.

    <folder>/cluster.json     the port
    <folder>/passwords.json   mode 600, never logged
    <folder>/primary.pass     a standby's password for its primary: mode 600, readable for the server's account
    <folder>/windrow.conf     settings, included by data/postgresql.conf
    <folder>/server.log       the server's output; server.log.1 is the previous log
    <folder>/owner.lock       locked by the process that started the server
    <folder>/server.lock      locked by initdb, the server and its children: free once all of them have ended
    <folder>/data/            the server's data; all other files are this package's

If an owner is killed, its server keeps running, and the next start() adopts that server. An ephemeral cluster is
removed when its owner ends.
"""

import contextlib
import os
import re
import secrets
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Literal, Self, assert_never

import psycopg

from embedded.access import CONNECT_S, DATABASE, ROLE, SUPERUSER, Passwords, complete
from embedded.account import Account, run, server_account, spawn
from embedded.binaries import Binaries, find_binaries
from embedded.data import NewData
from embedded.errors import ClusterInUse, EmbeddedError, NotCreated, StartFailed, StopTimedOut
from embedded.folders import default_root, make_folder, sync_folder, temporary_root, write_file
from embedded.locks import lock_after_orphans, lock_for_owner
from embedded.log import ServerLog
from embedded.ports import RememberedPort, is_taken
from embedded.postmaster import Postmaster, free_shared_memory, names_folder, read_postmaster
from embedded.settings import check_overrides, render
from embedded.waiting import POLL_S, holds_by
from embedded.watcher import Watcher

_NAME = re.compile(r"[a-z][a-z0-9_-]{0,39}")
# How many ports are tried. Another program may take a port between the check and the launch of the server.
_LAUNCHES_MAX = 5
_KILL_S_MAX = 10.0
_PROMOTE_S_MAX = 60
# This variable names the folder of a stopped cluster. New ephemeral clusters copy the data and passwords of that
# cluster instead of running initdb. This saves half a second of CPU per cluster, and a test run starts dozens of
# clusters.
TEMPLATE_VARIABLE = "WINDROW_CLUSTER_TEMPLATE"

StopMode = Literal["fast", "immediate"]


class Cluster:
    """One local server with a name. Several clusters may share a root folder. Use it as a context manager, or call
    start() and stop().

    `name`       lower-case letters, digits, `_` and `-`; also the name of its folder below `root`.
    `root`       default: see default_root(). With `ephemeral`: the parent of the temporary folder.
    `ephemeral`  makes a new cluster, which is removed by stop() or after the death of this process, even by kill -9.
    `settings`   lines for postgresql.conf that override the defaults; the next start of the server applies them.
    `binaries`   a bin folder; default: see find_binaries(). Existing data needs the version that made it.
    `standby_of` a running cluster: the first start copies the data of that cluster and then follows it until promote().

    Raises ValueError for an invalid name or setting. Thread-safe.
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
            # Only choose the name here: start() makes the folder.
            folder = place / f"windrow-{name}-{secrets.token_hex(6)}"
            self._copies = default_root().parent / "binaries"
        else:
            place = default_root() if root is None else root
            folder = place / name
            self._copies = place.absolute().parent / "binaries"
        # Resolve the path, because a live server is recognised by the path in its command line.
        self._folder = folder.resolve()
        self._data = self._folder / "data"
        self._port = RememberedPort(name, self._folder)
        self._passwords = Passwords(name, self._folder)
        self._log = ServerLog(name, self._folder)
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
        """The server's process id, even if another process started the server. None if the server does not run."""
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
        port = self._port.read()
        if port is None:
            raise NotCreated(f"cluster {self._name!r} has no data in {self._folder}: start it first")
        return port

    @property
    def dsn(self) -> str:
        """The DSN for Windrow, whose role owns the database and is not a superuser. Contains the password."""
        return self._passwords.dsn(ROLE, DATABASE, port=self.port)

    @property
    def superuser_dsn(self) -> str:
        """The superuser's DSN, for administration and fault tests. Contains the password."""
        return self._passwords.dsn(SUPERUSER, "postgres", port=self.port)

    def start(self, timeout_s: float = 60) -> None:
        """Starts the server, or adopts a server that a killed owner left running, and waits until it answers.

        Does nothing if this object's server already runs. After a crash, start() first waits until the old server's
        orphaned children have ended. If the start fails, stops everything that this call has started, and raises
        BinariesNotFound, ClusterInUse, PortTaken or StartFailed.
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
                # Stop a server that this call started, but not one that it adopted.
                self._abandon_launch()
                if self._ephemeral and not owned_before:
                    self._remove()
                self._disown()
                raise

    def stop(self, mode: StopMode = "fast", timeout_s: float = 30) -> None:
        """Stops the server and waits until it has ended; then removes an ephemeral cluster.

        fast: closes connections and writes a checkpoint. immediate: ends at once and recovers at the next start. Does
        nothing if the server does not run. Raises StopTimedOut. Raises ClusterInUse if another process owns the
        cluster.
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
            if not holds_by(deadline, lambda: not self.alive):
                raise StopTimedOut(
                    f"cluster {self._name!r} (pid {self.pid}) still runs {timeout_s:g} s after a {mode} stop; "
                    f'see {self._log.path}, and try stop(mode="immediate") or kill()'
                )
            # The children of a killed server may live longer than the server. They hold server.lock, so wait until it
            # is free.
            if self._folder.is_dir():
                self._await_orphans(deadline, StopTimedOut).close()
            self._process = None
            if self._ephemeral:
                self._remove()
            self._disown()

    def close(self) -> None:
        """Stops the server, with an immediate stop if a fast stop takes too long. For an ephemeral cluster the first
        stop is immediate, because such a cluster needs no checkpoint."""
        try:
            self.stop("immediate" if self._ephemeral else "fast")
        except StopTimedOut:
            self.stop("immediate")

    def kill(self) -> None:
        """Simulates a fault: kills only the postmaster, with SIGKILL, and waits until it has ended. The next start()
        recovers the data."""
        deadline = time.monotonic() + _KILL_S_MAX
        with self._mutex:
            if self._folder.is_dir():
                self._own()
            self._signal(signal.SIGKILL)
            if not holds_by(deadline, lambda: not self.alive):
                raise StopTimedOut(
                    f"cluster {self._name!r} (pid {self.pid}) still exists {_KILL_S_MAX:g} s after SIGKILL: "
                    "it is blocked in the kernel, most likely waiting for a disk; see its state with `ps`"
                )
            if self._watcher is not None:
                self._watcher.guard(None)

    def promote(self) -> None:
        """Promotes a standby to primary, and waits until it is the primary. Raises StartFailed.

        Stop the old primary first: this method does not prevent two primaries.
        """
        with psycopg.connect(self.superuser_dsn, autocommit=True, connect_timeout=CONNECT_S) as connection:
            if connection.execute("SELECT pg_promote(true, %s)", [_PROMOTE_S_MAX]).fetchone() != (True,):
                raise self._log.failed(f"the standby was not promoted within {_PROMOTE_S_MAX} s")

    def reset(self) -> None:
        """Deletes all data of this cluster. Raises ClusterInUse if the cluster runs or another process owns the
        cluster."""
        with self._mutex:
            if not self._folder.is_dir():
                return
            owned_before = self._owner is not None
            self._own()
            try:
                self.refuse_while_alive()
                # Children of a killed server may still write: wait for them.
                self._await_orphans(time.monotonic() + _KILL_S_MAX, ClusterInUse).close()
                self._remove()
            except BaseException:
                if not owned_before:
                    self._disown()
                raise
            self._disown()

    def refuse_while_alive(self) -> None:
        """Raises ClusterInUse if the server runs, even if another process started it."""
        if (pid := self.pid) is not None:
            raise ClusterInUse(
                f"cluster {self._name!r} runs as pid {pid}: stop it before its data in {self._folder} is deleted"
            )

    # Starting

    def _running_before(self, deadline: float) -> Postmaster | None:
        """Returns the live server to adopt, or None if there is none. If the server is stopping, waits for its end."""
        found = read_postmaster(self._data)
        if found is None or found.status != "stopping":
            return found
        if not holds_by(deadline, lambda: not names_folder(found.pid, self._data)):
            raise StartFailed(
                f"cluster {self._name!r}: the old server (pid {found.pid}) was told to stop and has not: "
                'end its connections, or call stop(mode="immediate")'
            )
        return None

    def _remember_port(self, running: Postmaster) -> None:
        # The owner that started the server may have been killed before it wrote the port to the file.
        if running.port is not None and running.port != self._port.read():
            self._port.write(running.port)

    def _start_new(self, deadline: float) -> None:
        lock = self._await_orphans(deadline, StartFailed)
        try:
            existing = self._existing_major()
            binaries = find_binaries(self._wanted_binaries, major=existing, copies=self._copies)
            if existing is None:
                self._initialize(binaries, deadline, lock)
            # No process of this cluster lives, so the process id in postmaster.pid is stale. Delete that file, because
            # another program may have the same id by now.
            (self._data / "postmaster.pid").unlink(missing_ok=True)
            self._log.rotate()
            self._launch_on_a_free_port(binaries, deadline, lock)
        finally:
            lock.close()

    def _existing_major(self) -> int | None:
        try:
            return int((self._data / "PG_VERSION").read_text())
        except FileNotFoundError:
            return None

    def _initialize(self, binaries: Binaries, deadline: float, lock: IO[str]) -> None:
        """Makes the data folder under another name and renames it, so that a folder named `data` is always complete."""
        new = NewData(
            folder=self._folder / "data.new",
            binaries=binaries,
            account=self._account,
            durable=not self._ephemeral,
            run=lambda command: self._fill(command, deadline, lock),
        )
        primary = self._standby_of
        # Copy the template only if the caller named no binaries: a server needs data that its own version has made.
        template = os.environ.get(TEMPLATE_VARIABLE) if self._ephemeral and self._wanted_binaries is None else None
        if primary is not None:
            passwords = primary._passwords.read()  # noqa: SLF001 - of the same class
            self._passwords.keep(passwords)
            new.follow(port=primary.port, password=passwords[SUPERUSER])
        elif template:
            self._passwords.keep(Passwords(self._name, Path(template)).read())
            new.copy(Path(template, "data"))
        else:
            new.make(password=self._passwords.draw()[SUPERUSER])
        new.folder.rename(self._data)
        sync_folder(self._folder)

    def _fill(self, command: list[str | Path], deadline: float, lock: IO[str]) -> None:
        """Runs a command that fills the data folder. Raises StartFailed."""
        name = Path(command[0]).name
        with self._log.open() as log:
            # The child inherits the lock: if this process is killed now, the next start waits for the child.
            child = spawn(command, account=self._account, output=log, pass_fds=(lock.fileno(),))
        if self._watcher is not None:
            self._watcher.guard(child.pid)
        with child:
            try:
                child.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise self._log.failed(f"{name} did not finish in time: give start() a longer timeout_s") from None
            finally:
                # On Ctrl-C, kill the child as well, because the end of the `with` block waits for the child.
                if child.poll() is None:
                    child.kill()
        if child.returncode != 0:
            raise self._log.failed(f"{name} ended with status {child.returncode}")

    def _launch_on_a_free_port(self, binaries: Binaries, deadline: float, lock: IO[str]) -> None:
        remembered = self._port.read()
        # A DSN that was handed out must stay valid. Only the DSN of an ephemeral cluster may change, because nobody
        # keeps it for long.
        fixed = remembered is not None and not self._ephemeral
        port = remembered
        for attempt in range(_LAUNCHES_MAX):
            if port is None or (is_taken(port) and not fixed):
                port = self._port.pick()
            if is_taken(port):
                raise self._port.taken(port)
            self._port.write(port)
            self._write_conf(binaries, port)
            self._launch(binaries, lock)
            try:
                self._await_answer(deadline)
            except StartFailed as error:
                # Another program may have taken the port after our check and before the server's start.
                if self.alive or not is_taken(port):
                    raise
                if fixed:
                    raise self._port.taken(port) from error
                if attempt + 1 == _LAUNCHES_MAX:
                    raise
                continue
            return

    def _write_conf(self, binaries: Binaries, port: int) -> None:
        # Ask the server binary which settings it accepts. There may be no file that says how the binary was built.
        def accepts(setting: str) -> bool:
            answered, _ = run(
                [binaries.program("postgres"), "-D", self._data, "-c", setting, "-C", setting.split("=")[0]],
                account=self._account,
            )
            return answered

        conf = self._folder / "windrow.conf"
        if not conf.exists():
            write_file(conf, "", mode=0o644)  # `postgres -C` needs this file, because postgresql.conf includes it.
        text = render(
            name=self._name,
            port=port,
            lz4=accepts("wal_compression=lz4"),
            statistics=binaries.has_library("pg_stat_statements"),
            ephemeral=self._ephemeral,
            overrides=self._settings,
        )
        write_file(conf, text, mode=0o600 if self._account is None else 0o644)

    def _launch(self, binaries: Binaries, lock: IO[str]) -> None:
        with self._log.open() as log:
            try:
                self._process = spawn(
                    [binaries.program("postgres"), "-D", self._data],
                    account=self._account,
                    output=log,
                    pass_fds=(lock.fileno(),),
                )
            except (OSError, subprocess.SubprocessError) as error:
                raise self._log.failed(f"{binaries.program('postgres')} cannot be executed: {error}") from error
        if self._watcher is not None:
            self._watcher.guard(self._process.pid)

    def _await_answer(self, deadline: float) -> None:
        """Waits until the superuser can connect, then creates Windrow's role and database if they are missing."""
        refusal = "it has not opened its port"
        while True:
            process = self._process
            found = read_postmaster(self._data)
            if process is not None and process.poll() is not None:
                raise self._log.failed(f"the server ended with status {process.returncode}")
            if process is None and found is None:
                raise self._log.failed("the server that was found running has ended: start again")
            if found is not None and found.status in ("ready", "standby"):
                try:
                    complete(self.superuser_dsn, password=self._passwords.read()[ROLE])
                    return
                except psycopg.OperationalError as error:
                    refusal = str(error)
            if time.monotonic() >= deadline:
                raise self._log.failed(
                    "the server does not answer in time; if it is still recovering, give start() a longer "
                    f"timeout_s. Last error: {refusal}"
                )
            time.sleep(POLL_S)

    # The folder and the process

    def _own(self) -> None:
        """Takes the owner's lock. Makes the folder if it does not exist."""
        if self._owner is not None:
            return
        if self._ephemeral and not self._folder.exists():
            make_folder(self._folder.parent, account=self._account)
            # Use mode 700 if the server runs as this user. Otherwise, the server's account must be able to traverse the
            # folder.
            self._folder.mkdir(mode=0o700)
            self._folder.chmod(0o700 if self._account is None else 0o755)
            self._watcher = Watcher(self._folder)
        make_folder(self._folder, account=self._account)
        self._owner = lock_for_owner(self._name, self._folder)

    def _disown(self) -> None:
        if self._owner is not None:
            self._owner.close()
            self._owner = None

    def _await_orphans(self, deadline: float, failure: type[EmbeddedError]) -> IO[str]:
        return lock_after_orphans(self._name, self._folder, deadline, failure)

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
        free_shared_memory(self._data)
        with contextlib.suppress(FileNotFoundError):  # Someone may have deleted it already.
            shutil.rmtree(self._folder)
        if self._watcher is not None:
            self._watcher.dismiss()
            self._watcher = None
