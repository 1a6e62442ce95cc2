"""`windrow top`: the orgs of all shards, or the queues of one org, by their figures, live in a terminal.

It shows only what routers know exactly; docs/operations.md says what is missing, and why. A look at the figures counts
jobs: the more jobs there are, the longer a look takes. So the pause between two looks grows with the time that a look
takes.
"""

from __future__ import annotations

import contextlib
import select
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated

import typer

from cli import options, org_figures, output, stats, values
from cli.exits import CommandFailed, ExitCode
from cli.org_figures import Sort
from cli.output import Column

if TYPE_CHECKING:
    from cli.calls import Router
    from windrow.v1 import admin_pb2

# Looks take at most 1/`_REST` of the time, so that shards are not busy with counting, even if they have very many jobs.
_REST = 20
# How many lines of the screen are not rows: two heads, the line for trouble, and an empty line that prevents scrolling.
_HEADS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class _Figures:
    """The result of one look. `rows` are in the order in which they are shown."""

    head: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[str]]
    documents: Sequence[Mapping[str, object]]
    away: Sequence[str]


# Gets the figures. The arguments are the largest number of rows, and the largest age of the figures.
_Look = Callable[[int, timedelta], _Figures]


def top(
    org: Annotated[
        str | None,
        typer.Argument(metavar="ORG", help="The queues of this org; default all orgs.", show_default=False),
    ] = None,
    sort: Annotated[Sort, typer.Option("--sort", help=org_figures.SORT_HELP)] = Sort.BACKLOG,
    interval: Annotated[
        timedelta,
        typer.Option(
            "--interval",
            parser=values.duration,
            metavar="DURATION",
            show_default="2s",
            help="Time between two looks, if they are quick.",
        ),
    ] = timedelta(seconds=2),
    once: Annotated[bool, typer.Option("--once", help="Print the figures once, as without a terminal.")] = False,
    limit: Annotated[
        int, typer.Option("--limit", metavar="N", min=1, max=1000, help="At most N rows; also as many as fit.")
    ] = 100,
    as_json: options.Json = False,
    address: options.Address = options.ADDRESS_DEFAULT,
    timeout: options.Timeout = options.TIMEOUT_DEFAULT,
) -> None:
    """Shows which orgs, or which queues of an org, have most to do, until q or Ctrl-C.

    Rates are measured between two looks, so one printout takes as long as the interval. A look counts jobs; if that
    takes long, the looks are rarer, so that a shard counts for no more than a twentieth of the time. Exit code 3: a
    shard did not answer; its jobs are missing.
    """
    from cli.calls import connect

    if org is not None and sort is Sort.RATE:
        raise CommandFailed("--sort rate: only orgs have rates, not queues", ExitCode.USAGE)
    with connect(address, timeout) as router:

        def look(rows: int, max_age: timedelta) -> _Figures:
            if org is None:
                return _orgs(router, sort, rows, max_age)
            return _queues(router, org, sort, rows)

        if not once and not as_json and output.can_redraw():
            _show(look, interval, limit)
            return
        seen = look(limit, interval)
        if org is None:
            time.sleep(interval.total_seconds())
            seen = look(limit, interval)
    if as_json:
        output.say_json(seen.documents)
    else:
        if seen.rows:
            output.table(seen.columns, seen.rows)
        output.note(seen.head)
    output.refuse_away(seen.away)


# ── The figures ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _orgs(router: Router, sort: Sort, rows: int, max_age: timedelta) -> _Figures:
    from windrow.v1 import cluster_pb2

    request = cluster_pb2.ListOrgsRequest(sort=org_figures.sort_value(sort), page_size=rows)
    request.max_age.FromTimedelta(max_age)
    answer = router.call(router.cluster.ListOrgs, request)
    # A router may send more orgs than it was asked for.
    orgs, age = answer.orgs[:rows], answer.age.ToTimedelta()
    over = org_figures.rates_over(orgs)
    rates = "" if over is None else f", rates over {values.rough(over)}"
    return _Figures(
        head=f"orgs by {sort}, counted {values.rough(age)} ago{rates}" if orgs else "there are no orgs yet",
        columns=org_figures.columns(),
        rows=org_figures.rows(orgs),
        documents=[org_figures.as_document(one, age) for one in orgs],
        away=answer.unavailable_shards,
    )


def _queues(router: Router, org: str, sort: Sort, rows: int) -> _Figures:
    from cli.messages import no_queues
    from windrow.v1 import admin_pb2

    answer = router.call(router.admin.GetStats, admin_pb2.GetStatsRequest(org=org))
    queues = sorted(answer.queues, key=lambda queue: (-_figure(queue, sort), queue.queue))[:rows]
    counts = stats.shown(queues, finished=False)
    return _Figures(
        head=f"queues of {org} by {sort}" if queues else no_queues(org),
        columns=stats.columns(counts),
        rows=[stats.row(queue, counts) for queue in queues],
        documents=[{"org": org, **stats.as_document(queue, finished=False)} for queue in queues],
        away=answer.unavailable_shards,
    )


def _figure(queue: admin_pb2.QueueStats, sort: Sort) -> float:
    match sort:
        case Sort.BACKLOG:
            return queue.scheduled + queue.ready
        case Sort.OLDEST:
            return queue.oldest_ready_age.ToTimedelta().total_seconds() if queue.HasField("oldest_ready_age") else -1
        case Sort.DEAD:
            return queue.dead
        case Sort.IN_FLIGHT:
            return queue.leased
        case Sort.RATE | Sort.NAME:
            return 0


# ── The screen ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _show(look: _Look, interval: timedelta, limit: int) -> None:
    """Updates the figures in place until q or Ctrl-C. Retries while the router cannot be reached."""
    from rich.console import Console, Group
    from rich.live import Live
    from rich.text import Text

    console = Console(highlight=False)
    pause, trouble = interval, ""
    seen: _Figures | None = None
    with _keys() as quits_within, Live(console=console, auto_refresh=False, screen=True) as live:
        while True:
            began_s = time.monotonic()
            try:
                seen = look(min(limit, max(1, console.height - _HEADS)), pause)
                trouble = f"not counted, because they did not answer: {', '.join(seen.away)}" if seen.away else ""
            except CommandFailed as error:
                if error.code is not ExitCode.UNAVAILABLE or seen is None:
                    raise
                trouble = str(error)
            pause = max(interval, _REST * timedelta(seconds=time.monotonic() - began_s))
            head = f"{output.visible(seen.head)}, next in {values.rough(pause)}; q quits"
            lines = output.table_lines(seen.columns, seen.rows)
            for line in lines:
                line.truncate(console.width)
            # Escape the text of the trouble, because it may come from a router whose identity was not checked.
            live.update(Group(Text(head, "dim"), *lines, Text(output.visible(trouble), "red")), refresh=True)
            if quits_within(pause.total_seconds()):
                return


@contextlib.contextmanager
def _keys() -> Generator[Callable[[float], bool], None, None]:
    """Yields a function that waits for a number of seconds, and returns True as soon as q is pressed."""
    if not sys.stdin.isatty():

        def sleep(wait_s: float) -> bool:
            time.sleep(wait_s)
            return False

        yield sleep
        return
    import os
    import termios
    import tty

    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)

    def quits_within(wait_s: float) -> bool:
        until_s = time.monotonic() + wait_s
        while (left_s := until_s - time.monotonic()) > 0:
            if select.select([terminal], [], [], left_s)[0] and os.read(terminal, 64).lower() in (b"q", b""):
                return True
        return False

    try:
        # Keys arrive without Enter, and are not echoed. Ctrl-C still interrupts.
        tty.setcbreak(terminal)
        yield quits_within
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)
