"""Takes the locks of a cluster's folder, owner.lock and server.lock. The kernel frees a lock when its holder ends."""

import contextlib
import fcntl
import os
from pathlib import Path
from typing import IO

from embedded.errors import ClusterInUse, EmbeddedError
from embedded.waiting import holds_by


def lock_for_owner(cluster: str, folder: Path) -> IO[str]:
    """Takes the owner's lock, which is held until the returned file is closed. Raises ClusterInUse."""
    path = folder / "owner.lock"
    lock = _open(path)
    if not _lock(lock) or not _is_still_at(lock, path):
        holder = lock.read().strip() or "unknown"
        lock.close()
        raise ClusterInUse(
            f"the Postgres server {cluster!r} in {folder} is in use by process {holder}: connect with its DSN, or stop "
            "that process"
        )
    lock.truncate(0)
    lock.seek(0)
    lock.write(f"{os.getpid()}\n")
    lock.flush()
    return lock


def lock_after_orphans(cluster: str, folder: Path, deadline: float, failure: type[EmbeddedError]) -> IO[str]:
    """Waits until all processes of an earlier server have ended. Returns their lock, which the next server inherits.

    The processes of an earlier server end soon after their postmaster. Every child inherits the lock's descriptor, so a
    free lock proves that all have ended. Process ids would not prove this, because the system reuses ids.
    """
    path = folder / "server.lock"
    lock = _open(path)
    if not holds_by(deadline, lambda: _lock(lock)):
        lock.close()
        raise failure(
            f"cluster {cluster!r}: processes of an earlier server still hold {path}: "
            f"find them with `fuser {path}` and end them"
        )
    return lock


def _open(path: Path) -> IO[str]:
    return open(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+", encoding="utf-8")


def _lock(file: IO[str]) -> bool:
    # Use `flock` and not `lockf`: a lock of `flock` belongs to the open file, so a child inherits the lock with the
    # descriptor.
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_still_at(file: IO[str], path: Path) -> bool:
    """Returns whether the locked file is still the one at `path`: a reset may have deleted it meanwhile."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    return False
