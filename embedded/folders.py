"""Finds and makes the folders for the data on this machine, and reads and writes files in them.

Never changes the mode or the owner of an existing folder.
"""

import contextlib
import json
import os
import tempfile
import threading
from pathlib import Path

import platformdirs

from embedded.account import Account, can_enter
from embedded.errors import StartFailed

# Clusters start in parallel, and none may use a new folder before its mode is set.
_making = threading.Lock()


def default_root() -> Path:
    """Returns the default parent of the clusters' folders."""
    if os.geteuid() == 0:
        # Do not use root's home: it has mode 700, and the unprivileged server could not traverse it.
        return Path("/var/lib/windrow/postgres")
    return platformdirs.user_data_path("windrow") / "postgres"


def temporary_root(account: Account | None) -> Path:
    """Returns a folder for ephemeral clusters that the account can reach."""
    chosen = Path(tempfile.gettempdir()).resolve()
    return chosen if account is None or can_enter(chosen, account) else Path("/tmp")


def make_folder(path: Path, *, account: Account | None) -> None:
    """Makes `path` and its missing parents. Does not change existing folders.

    Raises StartFailed if the account cannot traverse an existing parent.
    """
    missing: list[Path] = []
    for folder in (path, *path.parents):
        if folder.is_dir():
            break
        missing.append(folder)
    with _making:
        for folder in reversed(missing):
            try:
                folder.mkdir()
            except FileExistsError:
                continue  # Another cluster that starts now was faster, and sets the mode.
            # A server with another account must be able to traverse the folder. Secret files have modes of their own.
            folder.chmod(0o700 if account is None else 0o755)
    if account is None or can_enter(path, account):
        return
    # Check the outermost folder first, so that the error names the folder whose mode must change.
    closed = next((folder for folder in (*reversed(path.parents), path) if not can_enter(folder, account)), path)
    raise StartFailed(
        f"the server runs as account {account.name!r}, which cannot enter {closed}: choose a root outside "
        f"it (default: {default_root()}), or let others traverse it with `chmod o+x {closed}`"
    )


def read_json(path: Path) -> object:
    """Returns the parsed JSON of a file; its text if it is not JSON; None if there is no file."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    try:
        stored: object = json.loads(text)
    except ValueError:
        return text
    return stored


def write_file(path: Path, text: str, *, mode: int) -> None:
    """Replaces a file's content atomically and durably, so that a crash cannot lose a password."""
    new = path.with_name(path.name + ".new")
    new.unlink(missing_ok=True)
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with open(descriptor, "w", encoding="utf-8") as file:
        os.fchmod(descriptor, mode)  # The umask may have removed bits of the mode.
        file.write(text)
        file.flush()
        os.fsync(descriptor)
    new.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Syncs a folder, so that files that were created or renamed in it survive a crash."""
    descriptor = os.open(folder, os.O_RDONLY)
    # Some file systems cannot sync a folder, and have no alternative.
    with contextlib.suppress(OSError):
        os.fsync(descriptor)
    os.close(descriptor)
