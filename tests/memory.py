"""If this machine has enough memory, Postgres servers that only one test needs keep their data in memory.

A database is about 400 files. A file system on a disk may take half a millisecond of CPU to make a file. For example,
ext4 without a journal takes so long, and many virtual machines use it. In a run of all tests, these times sum up to
minutes. No test depends on a disk.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import MutableMapping
from pathlib import Path

import psutil

_MEMORY = Path("/dev/shm")
# This is enough for three tests at the same time, each with three servers. A server's WAL grows to 512 MB before
# Postgres reuses its files.
_ROOM_BYTES = 6 << 30


def use_memory(environ: MutableMapping[str, str] = os.environ) -> None:
    """Makes ephemeral clusters use memory, in this process and in the processes that it starts. `tmp_path` stays on the
    disk, because pytest keeps these folders after the tests. Does nothing if TMPDIR is set."""
    if "TMPDIR" in environ or not _has_room(_MEMORY):
        return
    environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    environ["TMPDIR"] = str(_MEMORY)
    # `tempfile` reads TMPDIR only once, so it must read it again.
    tempfile.tempdir = None


def _has_room(folder: Path) -> bool:
    try:
        found = os.statvfs(folder)
    except OSError:
        return False
    usable = os.access(folder, os.W_OK | os.X_OK) and not found.f_flag & os.ST_RDONLY
    return usable and min(found.f_bavail * found.f_frsize, psutil.virtual_memory().available) >= _ROOM_BYTES
