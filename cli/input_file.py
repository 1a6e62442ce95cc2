"""Opens files that users name. If a file cannot be opened, its option or argument has a wrong value."""

from __future__ import annotations

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
