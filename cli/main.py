"""The `windrow` command: what there is, and how it ends. Each command lives in the module of its noun.

Heavy modules (grpc, rich, embedded Postgres) are imported inside the commands that need them: `windrow --help` must
come at once.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from cli import (
    archive,
    clock,
    cluster,
    doctor,
    enqueue,
    jobs,
    leases,
    moves,
    orgs,
    output,
    pins,
    queues,
    recovery,
    servers,
    shards,
    stats,
    up,
)
from cli.exits import EPILOG, CommandFailed, ExitCode
from cli.layout import App

_START = "Start"
_WORK = "Queue and work jobs"
_OPERATE = "Look and mend"

app = App(epilog=EPILOG)
moves.add_to(shards.app)
pins.add_to(shards.app)
clock.add_to(shards.app)
recovery.add_to(shards.app)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        output.say(f"windrow {version('windrow-server')}")
        raise typer.Exit


def demo(
    faults: Annotated[
        bool, typer.Option("--faults", help="Kill workers, routers and a Postgres all the while.")
    ] = False,
    events: Annotated[
        int | None, typer.Option("--events", metavar="N", min=1, show_default=False, help="Only the first N events.")
    ] = None,
    seconds: Annotated[
        float,
        typer.Option("--seconds", metavar="S", min=1, help="With --faults: spread the enqueueing over this time."),
    ] = 30.0,
) -> None:
    """Count 19,349 real push events, and prove the totals.

    On a cluster of its own, which it starts and stops. Exit code 1: something was lost, repeated or out of balance.
    """
    try:
        from cli.demo import run_demo
    except ModuleNotFoundError as error:
        raise CommandFailed(
            f"the demo needs a checkout of Windrow, for its examples: {error}", ExitCode.REFUSED
        ) from error

    raise typer.Exit(run_demo(events=events, faults=faults, seconds=seconds))


@app.callback()
def windrow(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Windrow, a sharded multi-tenant job queue.

    Most commands talk to a router, which WINDROW_ADDRESS or their --address names. `windrow COMMAND --help` explains
    each; all print JSON with --json.
    """


app.command("up", rich_help_panel=_START)(up.up)
app.command("router", rich_help_panel=_START)(servers.router)
app.command("balancer", rich_help_panel=_START)(servers.balancer)
app.command("archiver", rich_help_panel=_START)(servers.archiver)
app.command("migrate", rich_help_panel=_START)(servers.migrate)
app.command("demo", rich_help_panel=_START)(demo)
app.command("enqueue", rich_help_panel=_WORK)(enqueue.enqueue)
app.command("dequeue", rich_help_panel=_WORK)(leases.dequeue)
app.command("ack", rich_help_panel=_WORK)(leases.ack)
app.command("nack", rich_help_panel=_WORK)(leases.nack)
app.command("extend", rich_help_panel=_WORK)(leases.extend)
app.command("release", rich_help_panel=_WORK)(leases.release)
app.add_typer(jobs.app, name="jobs", rich_help_panel=_OPERATE)
app.add_typer(queues.app, name="queues", rich_help_panel=_OPERATE)
app.add_typer(orgs.app, name="orgs", rich_help_panel=_OPERATE)
app.add_typer(archive.app, name="archive", rich_help_panel=_OPERATE)
app.command("stats", rich_help_panel=_OPERATE)(stats.stats)
app.add_typer(shards.app, name="shards", rich_help_panel=_OPERATE)
app.command("check", rich_help_panel=_OPERATE)(cluster.check)
app.command("doctor", rich_help_panel=_OPERATE)(doctor.doctor)
app.command("health", rich_help_panel=_OPERATE)(cluster.health)


def main() -> None:
    """The entry point."""
    try:
        app(prog_name="windrow")
    except CommandFailed as error:
        output.note("\n".join([f"windrow: {error}", *(f"  {line}" for line in error.particulars)]))
        sys.exit(error.code)


if __name__ == "__main__":
    main()
