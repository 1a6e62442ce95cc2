"""The command's output: answers on standard output, everything else on standard error.

Uses colours on a terminal only. Text from jobs may contain anything: it is never interpreted as markup, and its control
characters are printed in escaped form.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import textwrap
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import typer

from cli.exits import CommandFailed, ExitCode

if TYPE_CHECKING:
    from datetime import datetime

    from rich.console import Console
    from rich.progress import Progress
    from rich.status import Status
    from rich.text import Text

_STYLES = {
    "ready": "green",
    "leased": "cyan",
    "scheduled": "blue",
    "blocked": "blue",
    "skipped": "dim",
    "running": "cyan",
    "dead": "red",
    "cancelled": "dim",
    "nacked": "yellow",
    "expired": "red",
    "released": "dim",
    "acked": "green",
    "succeeded": "green",
    "paused": "yellow",
    "up": "green",
    "unreachable": "bold red",
    "disk full": "bold red",
    "draining": "yellow",
    "enqueue_only": "yellow",
    "dequeue_only": "yellow",
    "read_only": "yellow",
    "off": "dim",
    "stale": "yellow",
    "not found": "red",
    "failed": "bold red",
    "balance": "green",
    "moving": "cyan",
    "planned": "blue",
    "there": "green",
    "waiting": "yellow",
    "stuck": "red",
    "notice": "bold blue",
    "warning": "bold yellow",
    "critical": "bold red",
}
_GAP = "  "
# The time between two lines about the progress, if no progress bar is shown.
_NOTE_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    title: str
    right: bool = False
    # Whether the cells are states or outcomes, which are printed in colours.
    coloured: bool = False
    # Print each cell of this column below its row if the table is too wide for the terminal, or if a cell has several
    # lines.
    detail: bool = False


def say(text: str) -> None:
    """Prints one or more lines on standard output. Escapes control characters, because callers and routers choose parts
    of the text."""
    _write(visible(text, keep_lines=True))


def _write(text: str) -> None:
    """Prints text whose control characters are escaped already."""
    with _writing():
        sys.stdout.write(text + "\n")
        sys.stdout.flush()


def say_json(documents: Iterable[Mapping[str, object]]) -> None:
    """Prints one JSON object per line."""
    lines = [_invisible_escaped(json.dumps(document, ensure_ascii=False)) for document in documents]
    if lines:
        _write("\n".join(lines))


def _invisible_escaped(line: str) -> str:
    """Escapes the characters of a line of JSON that a terminal might interpret. JSON itself escapes only the characters
    up to U+001F. All other characters that a terminal might interpret are inside strings of the JSON, so they may be
    escaped."""
    if line.isprintable():
        return line
    return "".join(sign if sign.isprintable() else json.dumps(sign)[1:-1] for sign in line)


def say_deleted(org: str, noun: str, name: str, *, as_json: bool) -> None:
    """Says that the org's queue or schedule of this name is deleted."""
    if as_json:
        say_json([{"org": org, noun: name, "deleted": True}])
    else:
        say(f"{noun} {name} is deleted")


def note(text: str) -> None:
    """Prints a remark on standard error."""
    with contextlib.suppress(BrokenPipeError):
        print(visible(text, keep_lines=True), file=sys.stderr, flush=True)


def refuse_away(shards: Iterable[str]) -> None:
    """Raises CommandFailed if any shards of an org, or of the cluster, did not answer: the printed answer is then
    incomplete."""
    names = ", ".join(sorted(shards))
    if names:
        why = f"incomplete: these shards are off or did not answer: {names}"
        raise CommandFailed(why, ExitCode.UNAVAILABLE)


def visible(text: str, *, keep_lines: bool = False) -> str:
    """Escapes every character of a text that a terminal might interpret."""
    if text.isprintable():
        return text
    return "".join(
        sign if sign.isprintable() or (keep_lines and sign in "\n\t") else ascii(sign)[1:-1] for sign in text
    )


def counted(number: int, noun: str) -> str:
    """Returns "1 job", "2 jobs"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}{'es' if noun.endswith('s') else 's'}"


def time_text(value: datetime) -> str:
    """Formats a UTC time for people."""
    return value.strftime("%Y-%m-%d %H:%M:%SZ")


def table(columns: Sequence[Column], rows: Sequence[Sequence[str]], *, indent: int = 0) -> None:
    """Prints rows below headings. Never truncates a cell."""
    _print(table_lines(columns, rows, indent=indent))


def table_lines(columns: Sequence[Column], rows: Sequence[Sequence[str]], *, indent: int = 0) -> list[Text]:
    """Returns the lines of a table, for a caller that prints them itself."""
    from rich.cells import cell_len
    from rich.text import Text

    cells = [
        [visible(cell, keep_lines=column.detail) for cell, column in zip(row, columns, strict=True)] for row in rows
    ]
    widths = [max([cell_len(column.title), *(cell_len(row[at]) for row in cells)]) for at, column in enumerate(columns)]
    # Leave out a detail column that is empty in every row.
    across = [at for at, column in enumerate(columns) if not column.detail or any(row[at] for row in cells)]
    below: list[int] = []
    several_lines = any("\n" in cell for row in cells for cell in row)
    if several_lines or indent + sum(widths[at] + len(_GAP) for at in across) - len(_GAP) > _stdout().width:
        below = [at for at in across if columns[at].detail]
        across = [at for at in across if not columns[at].detail]

    def line(row: Sequence[str], style: str | None) -> Text:
        text = Text(" " * indent)
        for at in across:
            gap = " " * (widths[at] - cell_len(row[at]))
            text.append(_GAP if at != across[0] else "")
            text.append(gap if columns[at].right else "")
            text.append(row[at], style or (_STYLES.get(row[at], "") if columns[at].coloured else ""))
            text.append("" if columns[at].right else gap)
        text.rstrip()
        return text

    lines = [line([column.title for column in columns], "bold")]
    for row in cells:
        lines.append(line(row, None))
        parts = [part for at in below for part in row[at].splitlines()]
        lines += [Text((" " * indent + _GAP + part).rstrip(), "dim") for part in parts]
    return lines


def wrapped(text: str, *, indent: int) -> str:
    """Wraps a text to the terminal's width minus an indent. If standard output is not a terminal, the text stays on one
    line."""
    return textwrap.fill(text, max(40, _stdout().width - indent), break_long_words=False, break_on_hyphens=False)


def facts(pairs: Iterable[tuple[str, str]], *, indent: int = 0, width_min: int = 0) -> None:
    """Prints names and values. Leaves out empty values, and aligns the lines of a multi-line value. `width_min` is the
    minimum width of the names, to align several blocks."""
    from rich.text import Text

    shown = [(name, value) for name, value in pairs if value]
    width = max([width_min, *(len(name) for name, _ in shown)])
    lines: list[Text] = []
    for name, value in shown:
        first, *more = visible(value, keep_lines=True).split("\n")
        style = _STYLES.get(value, "") if name == "state" else ""
        name_style = _STYLES.get(name, "bold")
        lines.append(Text(" " * indent).append(name.ljust(width), name_style).append(_GAP).append(first, style))
        lines += [Text(" " * (indent + width) + _GAP + rest, style) for rest in more]
    _print(lines)


def heading(text: str) -> None:
    from rich.text import Text

    _print([Text(visible(text), "bold")])


@contextlib.contextmanager
def working(text: str) -> Generator[Status | None, None, None]:
    """Shows a spinner on standard error if that is a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console

    with Console(stderr=True).status(text) as status:
        yield status


@contextlib.contextmanager
def counting(what: str) -> Generator[Progress | None, None, None]:
    """Shows a progress bar on standard error for a count whose total is not known yet. Shows no bar if standard error
    is not a terminal. Also shows no bar if standard output is a terminal, because the answers on this terminal show the
    progress."""
    if not sys.stderr.isatty() or sys.stdout.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns: tuple[ProgressColumn, ...] = (
        SpinnerColumn(),
        TextColumn("{task.fields[count]:,} " + what),
        BarColumn(bar_width=30),
        TimeElapsedColumn(),
    )
    with Progress(
        *columns,
        console=Console(stderr=True),
        transient=True,
        # Answers must go to standard output, not to the console of the bar.
        redirect_stdout=False,
    ) as progress:
        yield progress


@contextlib.contextmanager
def counting_to(total: int | None, what: str) -> Generator[Callable[[int], None], None, None]:
    """Shows a progress bar on standard error if that is a terminal, and otherwise a line from time to time. Yields a
    function that sets how many items are done. `total`: how many items there are; None if that is unknown."""
    if not sys.stderr.isatty():
        yield _noting(total, what)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeElapsedColumn

    columns: tuple[ProgressColumn, ...] = (
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TextColumn(what),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True, redirect_stdout=False) as progress:
        task = progress.add_task("", total=total)
        yield lambda done: progress.update(task, completed=done)


def _noting(total: int | None, what: str) -> Callable[[int], None]:
    noted_s = time.monotonic()

    def show(done: int) -> None:
        nonlocal noted_s
        if time.monotonic() - noted_s >= _NOTE_S:
            noted_s = time.monotonic()
            note(f"{done:,}{f' of {total:,}' if total is not None else ''} {what} so far")

    return show


def _print(lines: Iterable[Text]) -> None:
    with _writing():
        console = _stdout()
        with console.capture() as captured:
            for line in lines:
                console.print(line, soft_wrap=True)
    text = captured.get().rstrip("\n")
    if text:
        _write(text)


def can_redraw() -> bool:
    """Returns whether standard output is a terminal that can show new figures in the place of old ones. On a terminal
    that cannot do this, such as one with TERM=dumb, the user would see nothing."""
    return sys.stdout.isatty() and not _stdout().is_dumb_terminal


def _stdout() -> Console:
    from rich.console import Console

    _refuse_closed()
    # In a pipe, a table is as wide as it needs to be.
    return Console(width=None if sys.stdout.isatty() else 100_000, highlight=False, emoji=False)


@contextlib.contextmanager
def _writing() -> Generator[None, None, None]:
    """Ends the command if a write to standard output fails. Prints no message if the reader has closed the pipe."""
    _refuse_closed()
    try:
        yield
    except OSError as error:
        # Discard the rest of the output: otherwise the interpreter would try to write it when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            raise typer.Exit(ExitCode.PIPE_CLOSED) from error
        raise CommandFailed(f"standard output: {error.strerror}", ExitCode.UNAVAILABLE) from error


def _refuse_closed() -> None:
    if sys.stdout is None:
        raise CommandFailed("standard output is closed", ExitCode.UNAVAILABLE)
