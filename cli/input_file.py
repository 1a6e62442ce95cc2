"""Reads the files and payloads that users name. An unreadable file is reported as a wrong option or argument."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import typer

_T = TypeVar("_T")


def opened(file: Path, act: Callable[[], _T], *, hint: str = "--file") -> _T:
    """Calls `act`, which opens or reads the file, and returns its result. `hint`: the option or argument that names the
    file. Raises BadParameter."""
    try:
        return act()
    except OSError as error:
        raise typer.BadParameter(f"{str(file)!r}: {error.strerror}", param_hint=f"'{hint}'") from None


def refuse_two_payloads(text: str | None, file: Path | None) -> None:
    """Raises BadParameter if a command was given both a payload and a file."""
    if file is not None and text is not None:
        raise typer.BadParameter("give the payload or --file, not both", param_hint="'PAYLOAD' / '--file'")


def payload_of(text: str | None, file: Path | None, *, bytes_max: int, into: str) -> bytes:
    """Returns the payload that a command was given: `text`, standard input if that is -, or the content of `file`.
    `into`: what the payload is for. Raises BadParameter if the payload has more than `bytes_max` bytes."""
    if file is not None:
        payload = opened(file, lambda: file.read_bytes())
    else:
        payload = sys.stdin.buffer.read() if text == "-" else (text or "").encode(errors="surrogateescape")
    if len(payload) > bytes_max:
        raise typer.BadParameter(
            f"it has {len(payload):,} bytes; at most {bytes_max:,} fit into {into}", param_hint="'PAYLOAD'"
        )
    return payload
