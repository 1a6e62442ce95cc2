"""`windrow demo`. The demo itself needs a source checkout: cli.demo."""

from __future__ import annotations

from typing import Annotated

import typer

from cli.exits import CommandFailed, ExitCode


def demo(
    faults: Annotated[
        bool, typer.Option("--faults", help="Keep killing workers, routers and a Postgres during the run.")
    ] = False,
    events: Annotated[
        int | None,
        typer.Option("--events", metavar="N", min=1, show_default=False, help="Only the first N events."),
    ] = None,
    seconds: Annotated[
        float,
        typer.Option("--seconds", metavar="S", min=1, help="With --faults: spread enqueueing over S seconds."),
    ] = 30.0,
) -> None:
    """Counts 19,349 real push events and verifies the totals.

    Starts a cluster of its own and stops it at the end. Exit code 1: jobs were lost or counted twice, or the job counts
    do not balance.
    """
    try:
        from cli.demo import run_demo
    except ModuleNotFoundError as error:
        raise CommandFailed(
            f"the demo needs a source checkout of Windrow, because it uses examples/: {error}", ExitCode.REFUSED
        ) from error

    raise typer.Exit(run_demo(events=events, faults=faults, seconds=seconds))
