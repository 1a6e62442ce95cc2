"""`windrow shards`: what there is to see of the shards, and to say about who lives on which."""

from __future__ import annotations

import typer

from cli import cluster, options, pins
from cli.layout import App

app = App(invoke_without_command=True, no_args_is_help=False)


@app.callback()
def shards(
    context: typer.Context,
    as_json: options.Json = False,
    address: options.Address = options.ADDRESS_DEFAULT,
    timeout: options.Timeout = options.TIMEOUT_DEFAULT,
) -> None:
    """List the shards, and whether they answer.

    And which cluster file the router has in force. Exit code 1: a shard that is not off does not answer, or the file as
    it is now is refused.
    """
    if context.invoked_subcommand is None:
        cluster.shards(as_json, address, timeout)


app.command("pin")(pins.pin)
app.command("unpin")(pins.unpin)
app.command("pins")(pins.pins)
