"""Opens files that users name. One that cannot be opened is a wrong value of its option or argument."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import typer

_T = TypeVar("_T")


def opened(file: Path, act: Callable[[], _T], *, hint: str = "--file") -> _T:
    """Returns what `act` returns, which opens or reads the file. `hint`: the option or argument that names the file.
    Raises BadParameter."""
    try:
        return act()
    except OSError as error:
        raise typer.BadParameter(f"{str(file)!r}: {error.strerror}", param_hint=f"'{hint}'") from None
