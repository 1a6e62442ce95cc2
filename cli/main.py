"""The `windrow` command: registers all commands and handles their errors. Each command is in the module of its noun.

Heavy modules (grpc, rich, embedded Postgres) are imported inside the commands that need them, so that `windrow --help`
stays fast.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from cli import (
    archive,
    audit,
    clock,
    cluster,
    doctor,
    enqueue,
    job_changes,
    jobs,
    keys,
    leases,
    limits,
    login,
    moves,
    org_figures,
    orgs,
    output,
    pins,
    profiles,
    queues,
    recovery,
    schedules,
    server_info,
    servers,
    shards,
    stats,
    token,
    top,
    up,
    weights,
    workflows,
)
from cli.exits import EPILOG, CommandFailed, ExitCode
from cli.layout import App

_START = "Start"
_WORK = "Enqueue and process jobs"
_OPERATE = "Inspect and operate"

app = App(epilog=EPILOG)
job_changes.add_to(jobs.app)
org_figures.add_to(orgs.app)
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


@app.callback()
def windrow(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    token_file: Annotated[
        Path | None,
        typer.Option(
            "--token-file",
            envvar="WINDROW_TOKEN_FILE",
            metavar="FILE",
            show_default=False,
            help="A file with the token that proves who calls, such as an API key. Or set WINDROW_TOKEN.",
        ),
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option(
            "--profile",
            envvar="WINDROW_PROFILE",
            metavar="NAME",
            show_default="`default`, if there is one",
            help="Where `windrow login` has kept an address, a token and TLS files.",
        ),
    ] = None,
) -> None:
    """Windrow, a sharded multi-tenant job queue.

    Most commands talk to the router at WINDROW_ADDRESS or --address, or at that of a profile. `windrow COMMAND --help`
    explains a command. With --json, a command prints JSON.
    """
    token.use_file(token_file)
    profiles.select(profile)


app.command("up", rich_help_panel=_START)(up.up)
app.command("router", rich_help_panel=_START)(servers.router)
app.command("balancer", rich_help_panel=_START)(servers.balancer)
app.command("archiver", rich_help_panel=_START)(servers.archiver)
app.command("migrate", rich_help_panel=_START)(servers.migrate)
app.command("demo", rich_help_panel=_START)(demo)
app.command("login", rich_help_panel=_START)(login.login)
app.command("logout", rich_help_panel=_START)(login.logout)
app.command("enqueue", rich_help_panel=_WORK)(enqueue.enqueue)
for command in leases.COMMANDS:
    app.command(rich_help_panel=_WORK)(command)
app.add_typer(jobs.app, name="jobs", rich_help_panel=_OPERATE)
app.add_typer(queues.app, name="queues", rich_help_panel=_OPERATE)
app.add_typer(schedules.app, name="schedules", rich_help_panel=_OPERATE)
app.add_typer(workflows.app, name="workflows", rich_help_panel=_OPERATE)
app.add_typer(orgs.app, name="orgs", rich_help_panel=_OPERATE)
app.add_typer(limits.app, name="limits", rich_help_panel=_OPERATE)
app.add_typer(weights.app, name="weights", rich_help_panel=_OPERATE)
app.add_typer(keys.app, name="keys", rich_help_panel=_OPERATE)
app.add_typer(archive.app, name="archive", rich_help_panel=_OPERATE)
app.command("stats", rich_help_panel=_OPERATE)(stats.stats)
app.command("top", rich_help_panel=_OPERATE)(top.top)
app.add_typer(shards.app, name="shards", rich_help_panel=_OPERATE)
app.command("server", rich_help_panel=_OPERATE)(server_info.server)
app.command("check", rich_help_panel=_OPERATE)(cluster.check)
app.command("doctor", rich_help_panel=_OPERATE)(doctor.doctor)
app.command("audit", rich_help_panel=_OPERATE)(audit.audit)
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
