"""A small disk that can be filled: a tmpfs in a mount namespace of this process. The disk disappears when the process
ends. Needs Linux and root."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
import tempfile
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

_BYTES = 768 * 1024 * 1024
_CLONE_NEWNS = 0x20000
_CHUNK_BYTES = 1 << 20
_MOUNT_S_MAX = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallDisk:
    """`node` is the server whose data is on the disk."""

    path: Path
    node: str

    def fill(self) -> int:
        """Fills all free space of the disk, and returns how many bytes it wrote. May be called again."""
        taken = 0
        with self._ballast.open("ab", buffering=0) as ballast, contextlib.suppress(OSError):
            while True:
                taken += ballast.write(b"\0" * _CHUNK_BYTES)
        return taken

    def empty(self) -> None:
        self._ballast.unlink(missing_ok=True)

    @property
    def _ballast(self) -> Path:
        return self.path / "ballast"


@contextlib.contextmanager
def small_disk(node: str) -> Generator[SmallDisk | None, None, None]:
    """Yields a small disk for this node, or None if this machine cannot have one. Call it before the first thread is
    started: a mount namespace belongs to a thread and its children."""
    if os.geteuid() != 0 or not hasattr(os, "pidfd_open"):
        yield None
        return
    # Postgres runs as another account, so the disk must not be below a folder that only root can enter.
    path = Path(tempfile.mkdtemp(prefix="windrow-chaos-disk-", dir="/tmp"))
    try:
        mounted = ctypes.CDLL(None).unshare(_CLONE_NEWNS) == 0 and _mount(path)
        yield SmallDisk(path=path, node=node) if mounted else None
        if mounted:
            subprocess.run(["umount", "--lazy", path], check=False, timeout=_MOUNT_S_MAX)
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _mount(path: Path) -> bool:
    commands = (
        # Mounts in this namespace must not be visible elsewhere.
        ["mount", "--make-rprivate", "/"],
        ["mount", "-t", "tmpfs", "-o", f"size={_BYTES},mode=755", "tmpfs", str(path)],
    )
    for command in commands:
        done = subprocess.run(command, capture_output=True, check=False, timeout=_MOUNT_S_MAX)
        if done.returncode != 0:
            return False
    return True
