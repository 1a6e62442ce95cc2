"""Reads postmaster.pid to find the server process of a data folder, and to free what a killed server has left.

A process id alone is not trusted, because ids are reused: the process must also have the data folder in its command
line.
"""

import ctypes
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

_PS_S_MAX = 10.0
_IPC_RMID = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Postmaster:
    pid: int
    port: int | None  # None until the server has opened the port.
    status: str  # "starting", "ready", "stopping", "standby", or "" until the server has written a status.


def read_postmaster(data: Path) -> Postmaster | None:
    """Returns the live server on `data`, or None. Ignores a stale postmaster.pid."""
    try:
        lines = (data / "postmaster.pid").read_text(errors="replace").splitlines()
        pid = int(lines[0])
    except (FileNotFoundError, NotADirectoryError, IndexError, ValueError):
        return None  # No server runs, or it is writing the file now: a later read finds it complete.
    if pid <= 0 or not names_folder(pid, data):
        return None
    port = lines[3] if len(lines) > 3 else ""
    return Postmaster(
        pid=pid,
        port=int(port) if port.isdigit() and port != "0" else None,
        status=lines[7].strip() if len(lines) > 7 else "",
    )


def free_shared_memory(data: Path) -> None:
    """Frees the System V segment of a server that was killed. Call this before `data` is deleted, because each killed
    server leaves a segment, and Linux allows only 4,096. If `data` stays, the next start on it frees the segment."""
    try:
        key, segment = map(int, (data / "postmaster.pid").read_text(errors="replace").splitlines()[6].split())
    except (OSError, IndexError, ValueError):
        return  # The server has ended cleanly, or before it had a segment.
    libc = ctypes.CDLL(None)
    # Free the segment only if the key still leads to it. Otherwise another server may have a segment with this id by
    # now.
    if libc.shmget(key, 0, 0) == segment:
        libc.shmctl(segment, _IPC_RMID, None)


def names_folder(pid: int, data: Path) -> bool:
    """Returns whether process `pid` lives and was started with `-D data`. A zombie is not alive."""
    if os.path.isdir("/proc/self"):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                return os.fsencode(data) in file.read().split(b"\0")
        except (FileNotFoundError, ProcessLookupError):
            return False
    listing = subprocess.run(
        ["ps", "-ww", "-o", "command=", "-p", str(pid)],
        capture_output=True,
        check=False,
        timeout=_PS_S_MAX,
    )
    return f"-D {data}" in listing.stdout.decode(errors="replace")
