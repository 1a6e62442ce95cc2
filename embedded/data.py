"""Makes a data folder: with initdb, or as a copy of a primary or of a stopped server.

This module starts no processes: the caller runs the commands, with the lock, the log and the watcher of the caller.
"""

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from embedded.access import SUPERUSER
from embedded.account import Account
from embedded.binaries import Binaries
from embedded.folders import write_file
from embedded.ports import HOST


@dataclass(frozen=True, slots=True, kw_only=True)
class NewData:
    folder: Path
    binaries: Binaries
    account: Account | None
    # Whether to wait until the data is synced to disk.
    durable: bool
    run: Callable[[list[str | Path]], None]

    def make(self, *, password: str) -> None:
        """Makes a new server's data. `password`: the password of the superuser."""
        self._empty()
        password_file = self.folder.with_name("initdb.password")
        command: list[str | Path] = [
            self.binaries.program("initdb"),
            *("-D", self.folder),
            f"--username={SUPERUSER}",
            f"--pwfile={password_file}",
            "--auth=scram-sha-256",
            "--data-checksums",
            "--encoding=UTF8",
            "--locale-provider=libc",
            "--locale=C",
            "--no-instructions",
            *([] if self.durable else ["--no-sync"]),
        ]
        try:
            self._write_secret(password_file, password)
            self.run(command)
        finally:
            password_file.unlink(missing_ok=True)
        # Follow no links: the server's account can write to the folder, and this process may be root.
        descriptor = os.open(self.folder / "postgresql.conf", os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW)
        with open(descriptor, "w", encoding="utf-8") as conf:
            conf.write("\ninclude '../windrow.conf'\n")
            conf.flush()
            os.fsync(descriptor)

    def copy(self, data: Path) -> None:
        """Copies the data of a server that was stopped cleanly."""
        self._empty()
        self.run(["cp", "-R", f"{data}/.", self.folder])

    def follow(self, *, port: int, password: str) -> None:
        """Copies the data of the primary on `port`, which the new server will follow. `password`: the password of the
        superuser."""
        self._empty()
        # Keep this file: the standby needs it to connect for as long as it follows the primary.
        password_file = self.folder.with_name("primary.pass")
        self._write_secret(password_file, f"*:*:*:{SUPERUSER}:{password}")
        command: list[str | Path] = [
            self.binaries.program("pg_basebackup"),
            *("-D", self.folder),
            *("-d", f"host={HOST} port={port} user={SUPERUSER} passfile='{password_file}'"),
            "--write-recovery-conf",
            "--checkpoint=fast",
            *([] if self.durable else ["--no-sync"]),
        ]
        self.run(command)

    def _empty(self) -> None:
        if self.folder.exists():
            shutil.rmtree(self.folder)
        self.folder.mkdir(mode=0o700)
        if self.account is not None:
            os.chown(self.folder, self.account.uid, self.account.gid)

    def _write_secret(self, path: Path, text: str) -> None:
        """Writes a file that only the server's account can read."""
        write_file(path, text + "\n", mode=0o600)
        if self.account is not None:
            os.chown(path, self.account.uid, self.account.gid)
