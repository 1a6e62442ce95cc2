"""Runs `windrow` in the test's process, because a process for each of a hundred commands would be slow."""

from __future__ import annotations

import contextlib
import io
import json
import sys
import tempfile
from dataclasses import dataclass
from typing import Any

import pytest

from cli.main import main


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """The result of one run of the command."""

    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        return self.out.splitlines()

    @property
    def documents(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.lines]


def windrow(*arguments: str, stdin: str = "", together: bool = False) -> Done:
    """Runs the command as in a terminal of 80 columns. `together`: `out` also has what the command writes to standard
    error."""
    out = io.StringIO()
    err = out if together else io.StringIO()
    with (
        tempfile.TemporaryFile("w+") as file,
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        file.write(stdin)
        file.seek(0)
        patch.setenv("COLUMNS", "80")
        patch.setattr(sys, "stdin", file)
        patch.setattr(sys, "argv", ["windrow", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
    code = ended.value.code
    return Done(code=code if isinstance(code, int) else 0, out=out.getvalue(), err=err.getvalue())
