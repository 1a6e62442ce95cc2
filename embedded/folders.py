"""Where data lives on this machine, and how files and folders are made and read there.

Refuses to change the mode or the owner of a folder that was there before.
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

# Clusters start in parallel: none may look at a folder between its making and its mode.
_making = threading.Lock()


def default_root() -> Path:
    """Where clusters live unless told otherwise: one folder per cluster."""
    if os.geteuid() == 0:
        # Not below root's home: that has mode 700, and the unprivileged server could not traverse it.
        return Path("/var/lib/windrow/postgres")
    return platformdirs.user_data_path("windrow") / "postgres"


def temporary_root(account: Account | None) -> Path:
    """A place for ephemeral clusters that the account can reach."""
    chosen = Path(tempfile.gettempdir()).resolve()
    return chosen if account is None or can_enter(chosen, account) else Path("/tmp")


def make_folder(path: Path, *, account: Account | None) -> None:
    """Make `path` and its missing parents; those already there stay as they are.

    Raises StartFailed when the account cannot traverse an older parent.
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
                continue  # A cluster that starts beside this one was faster; it sets the mode.
            # Under another account the server must pass through; what is secret is so by its own mode.
            folder.chmod(0o700 if account is None else 0o755)
    if account is None or can_enter(path, account):
        return
    # Outermost first: the first one that cannot be entered is the one to name.
    shut = next((one for one in (*reversed(path.parents), path) if not can_enter(one, account)), path)
    raise StartFailed(
        f"the server runs as account {account.name!r}, which cannot enter {shut}: choose a root outside "
        f"it (default: {default_root()}), or let others traverse it with `chmod o+x {shut}`"
    )


def read_json(path: Path) -> object:
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


def write_file(path: Path, text: str, *, mode: int) -> None:
    """Replace `path` by `text`, whole or not at all, and durably: a crash must not cost a password."""
    new = path.with_name(path.name + ".new")
    new.unlink(missing_ok=True)
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with open(descriptor, "w", encoding="utf-8") as file:
        os.fchmod(descriptor, mode)  # The mode given to open() is cut by the umask.
        file.write(text)
        file.flush()
        os.fsync(descriptor)
    new.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make names created or renamed in `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    # Some file systems cannot sync a folder; they offer nothing better.
    with contextlib.suppress(OSError):
        os.fsync(descriptor)
    os.close(descriptor)
