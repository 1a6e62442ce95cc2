"""The bearer token of a command's calls: the content of --token-file, or WINDROW_TOKEN.

There is no option for the token itself, because every program of the machine can read the arguments of a command.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from cli.exits import CommandFailed, ExitCode

_VARIABLE = "WINDROW_TOKEN"
_BYTES_MAX = 16 * 1024
# The file with the token for this run of the command. None: the command uses WINDROW_TOKEN, if this variable is set.
_file: Path | None = None


def use_file(path: Path | None) -> None:
    """Makes `token` read this file. None: `token` reads the environment variable."""
    global _file
    _file = path


def token() -> str | None:
    """Returns the token, or None if there is none. Raises CommandFailed, whose message does not show the token."""
    if _file is not None:
        return read(_file)
    found = os.environ.get(_VARIABLE, "").strip()
    return checked(found, where=_VARIABLE) if found else None


def source() -> str | None:
    """Returns the option or the variable that gives the token, or None if there is no token. Does not read the file,
    because standard input can be read only once."""
    if _file is not None:
        return _option(_file)
    return _VARIABLE if os.environ.get(_VARIABLE, "").strip() else None


def read(file: Path) -> str:
    """Returns the token that a file holds; `-` is standard input. Raises CommandFailed."""
    where = _option(file)
    try:
        content = sys.stdin.buffer.read(_BYTES_MAX + 1) if str(file) == "-" else file.read_bytes()
        found = content.decode("ascii").strip()
    except OSError as error:
        raise CommandFailed(f"{where}: {error.strerror}", ExitCode.USAGE) from error
    except UnicodeDecodeError:
        # Raise without the cause, because the cause would show bytes of the token.
        raise CommandFailed(f"{where}: is not a token: it is not ASCII", ExitCode.USAGE) from None
    if not found:
        raise CommandFailed(f"{where}: is empty", ExitCode.USAGE)
    return checked(found, where=where)


def _option(file: Path) -> str:
    return f"--token-file {file}"


def checked(token: str, *, where: str) -> str:
    """Returns the token. Raises CommandFailed if the text cannot be a token."""
    if len(token) > _BYTES_MAX or not token.isascii() or not token.isprintable() or " " in token:
        raise CommandFailed(
            f"{where}: is not a token: it must be one line of ASCII without spaces, of at most {_BYTES_MAX:,} bytes",
            ExitCode.USAGE,
        )
    return token
