"""Chooses the account that the server runs as, and starts child processes.

This module creates no accounts. It changes no modes of folders to let an account enter them.
"""

import os
import pwd
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from embedded.errors import StartFailed

# The only variables that a child gets from our environment. Variables named `PG*` would change the behaviour of the
# server and of initdb. Root's environment may contain secrets that the account must not read.
_ENVIRONMENT_KEPT = ("PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "TZDIR")
_ACCOUNTS = ("postgres", "nobody")
_RUN_S_MAX = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    name: str
    uid: int
    gid: int


def server_account() -> Account | None:
    """Returns the account to run the server as, or None if this process is not root and needs no other account."""
    if os.geteuid() != 0:
        return None
    for name in _ACCOUNTS:
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            continue
        return Account(name=name, uid=entry.pw_uid, gid=entry.pw_gid)
    raise StartFailed(
        f"PostgreSQL refuses to run as root, and none of the accounts {', '.join(_ACCOUNTS)} exists: "
        "create one with `useradd --system postgres`, or do not run as root"
    )


def spawn(
    command: Sequence[str | Path],
    *,
    account: Account | None,
    stdin: int | IO[bytes] = subprocess.DEVNULL,
    output: int | IO[bytes] = subprocess.DEVNULL,
    pass_fds: Sequence[int] = (),
) -> subprocess.Popen[bytes]:
    """Starts a child process as `account`, in a session of its own. Stdout and stderr both go to `output`.

    Raises OSError or subprocess.SubprocessError if the command cannot be executed.
    """
    environment = {key: os.environ[key] for key in _ENVIRONMENT_KEPT if key in os.environ}
    return subprocess.Popen(
        [os.fspath(part) for part in command],
        stdin=stdin,
        stdout=output,
        stderr=output,
        cwd="/",  # The current folder may be inaccessible to the account, or deleted soon.
        env=environment | {"LC_ALL": "C"},  # Then output can be parsed, and initdb detects no other locale.
        # Ctrl-C in the terminal must reach only this process, which then stops the server cleanly.
        start_new_session=True,
        pass_fds=pass_fds,
        user=None if account is None else account.uid,
        group=None if account is None else account.gid,
        extra_groups=None if account is None else [],
    )


def run(command: Sequence[str | Path], *, account: Account | None, timeout_s: float = _RUN_S_MAX) -> tuple[bool, str]:
    """Runs a short command as `account`. Returns whether it succeeded, and its output or the reason of its failure."""
    try:
        child = spawn(command, account=account, output=subprocess.PIPE)
    except (OSError, subprocess.SubprocessError) as error:
        return False, str(error)
    with child:
        try:
            output, _ = child.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            return False, f"{command[0]} gave no answer within {timeout_s:g} s"
        finally:
            # On Ctrl-C, end the child as well, because the end of the `with` block waits for the child.
            if child.poll() is None:
                child.kill()
    return child.returncode == 0, output.decode(errors="replace").strip()


def can_enter(folder: Path, account: Account | None) -> bool:
    """Returns whether the account can traverse `folder`. Starts a process that tries this, because the modes of the
    folders alone do not show it."""
    return run(["/bin/sh", "-c", 'cd -- "$1"', "sh", folder], account=account)[0]
