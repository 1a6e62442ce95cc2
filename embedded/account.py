"""Whom the server runs as. Owns the choice of account and the way child processes are started.

Refuses to touch accounts: it creates none, and changes no folder so that an account could reach it.
"""

import os
import pwd
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from embedded.errors import StartFailed

# What a child may know of our environment. Not PG*, which would change the server and initdb behind our
# back, and nothing else either: root's environment may hold secrets, and the account must not read them.
_ENVIRONMENT_KEPT = ("PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "TZDIR")
_ACCOUNTS = ("postgres", "nobody")
_RUN_S_MAX = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    name: str
    uid: int
    gid: int


def server_account() -> Account | None:
    """The account to drop to, or None when we are not root and run the server as ourselves."""
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
    """Start a child as `account`, in its own session; stdout and stderr both go to `output`.

    Raises OSError or subprocess.SubprocessError when it cannot be executed.
    """
    environment = {key: os.environ[key] for key in _ENVIRONMENT_KEPT if key in os.environ}
    return subprocess.Popen(
        [os.fspath(part) for part in command],
        stdin=stdin,
        stdout=output,
        stderr=output,
        cwd="/",  # Ours may be a folder that the account cannot enter, or one that is about to be deleted.
        env=environment | {"LC_ALL": "C"},  # C, so that output can be parsed and initdb guesses nothing.
        # Ctrl-C in the terminal must reach only us: we then stop the server in order.
        start_new_session=True,
        pass_fds=pass_fds,
        user=None if account is None else account.uid,
        group=None if account is None else account.gid,
        extra_groups=None if account is None else [],
    )


def run(command: Sequence[str | Path], *, account: Account | None, timeout_s: float = _RUN_S_MAX) -> tuple[bool, str]:
    """Run a short command as `account`: whether it succeeded, and what it printed or why it failed."""
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
            # Also on Ctrl-C: leaving the with block waits for the child, which must therefore be on its way.
            if child.poll() is None:
                child.kill()
    return child.returncode == 0, output.decode(errors="replace").strip()


def can_enter(folder: Path, account: Account | None) -> bool:
    """Whether the account may traverse `folder`: asked by doing it, since modes alone do not tell."""
    return run(["/bin/sh", "-c", 'cd -- "$1"', "sh", folder], account=account)[0]
