"""Writes and reads the server's output: server.log, and the previous log, server.log.1."""

import contextlib
import os
from pathlib import Path
from typing import IO

from embedded.errors import StartFailed

_LINES = 15
_TAIL_BYTES = 16 * 1024
_BYTES_MAX = 16 * 1024 * 1024


class ServerLog:
    def __init__(self, cluster: str, folder: Path) -> None:
        self._cluster = cluster
        self.path = folder / "server.log"

    def open(self) -> IO[bytes]:
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        return open(descriptor, "ab")

    def rotate(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            if self.path.stat().st_size > _BYTES_MAX:
                self.path.replace(self.path.with_name("server.log.1"))

    def failed(self, what: str) -> StartFailed:
        """Returns an error with the last lines of the log."""
        try:
            with open(self.path, "rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - _TAIL_BYTES))
                lines = log.read().decode(errors="replace").splitlines()[-_LINES:]
        except FileNotFoundError:
            lines = []
        tail = "".join(f"\n  {line}" for line in lines) or "\n  (empty)"
        return StartFailed(f"cluster {self._cluster!r}: {what}. The end of {self.path}:{tail}")
