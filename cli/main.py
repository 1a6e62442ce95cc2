"""The `windrow` command: names all commands and handles their errors. Each module has the commands about one noun.

A command's module is imported when the command is needed. Heavy modules (grpc, rich, embedded Postgres) are imported
inside the commands that use them, so that `windrow --help` stays fast.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from cli import leases, output, profiles, token
from cli.exits import EPILOG, CommandFailed
from cli.layout import App, Commands

app = App(epilog=EPILOG)

# The commands below each heading, each with the place of its function or of its `App`.
_START = {
    "up": "cli.up:up",
    "router": "cli.servers:router",
    "balancer": "cli.servers:balancer",
    "archiver": "cli.servers:archiver",
    "migrate": "cli.servers:migrate",
    "upgrade": "cli.upgrade:app",
    "demo": "cli.demo_command:demo",
    "login": "cli.login:login",
    "logout": "cli.login:logout",
}
_WORK = {
    "enqueue": "cli.enqueue:enqueue",
    **{name: f"cli.leases:{name}" for name in leases.COMMANDS},
}
_OPERATE = {
    "jobs": "cli.jobs:app",
    "queues": "cli.queues:app",
    "schedules": "cli.schedules:app",
    "workflows": "cli.workflows:app",
    "orgs": "cli.orgs:app",
    "limits": "cli.limits:app",
    "weights": "cli.weights:app",
    "keys": "cli.keys:app",
    "archive": "cli.archive:app",
    "stats": "cli.stats:stats",
    "top": "cli.top:top",
    "shards": "cli.shards:app",
    "server": "cli.server_info:server",
    "check": "cli.cluster:check",
    "doctor": "cli.doctor:doctor",
    "audit": "cli.audit:audit",
    "health": "cli.cluster:health",
}
_HEADINGS = {"Start": _START, "Enqueue and process jobs": _WORK, "Inspect and operate": _OPERATE}


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        output.say(f"windrow {version('windrow-server')}")
        raise typer.Exit


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

    Most commands talk to the router at WINDROW_ADDRESS or --address, or at the address of a profile. With --json, a
    command prints JSON. `windrow COMMAND --help` explains a command.
    """
    token.use_file(token_file)
    profiles.select(profile)


@functools.cache
def commands() -> Any:
    """Returns the tree of commands."""
    tree: Any = typer.main.get_command(app)
    tree.commands = Commands(_HEADINGS)
    return tree


def main() -> None:
    """The entry point."""
    try:
        commands()(prog_name="windrow")
    except CommandFailed as error:
        output.note("\n".join([f"windrow: {error}", *(f"  {line}" for line in error.particulars)]))
        sys.exit(error.code)


if __name__ == "__main__":
    main()
