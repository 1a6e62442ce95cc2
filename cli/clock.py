"""`windrow shards accept-clock`: what an operator says of a shard's clock. It reads the cluster file and talks to the
shard's database."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from cli import databases, options, output
from cli.exits import CommandFailed, ExitCode
from cli.layout import App

if TYPE_CHECKING:
    from shard.cluster import Cluster
    from shard.vocabulary import Micros


def add_to(shards: App) -> None:
    shards.command("accept-clock")(accept_clock)


def accept_clock(
    shard: Annotated[str, typer.Argument(metavar="SHARD", help="Whose clock is right now.", show_default=False)],
    config: options.Config,
    as_json: options.Json = False,
) -> None:
    """Say that a shard's clock is right, although it has shown a later time.

    A shard whose clock goes back by more than a minute takes no calls until the clock has caught up. After this command
    it takes calls within seconds. Use it when the clock was ahead for a while and is right now. While the clock is
    still behind, set the server's clock right instead.
    """
    now, latest = databases.asked(_accept(databases.read(config), shard))
    from shard.clock import time_text

    behind_s = max(0, latest - now) / 1_000_000
    if as_json:
        output.say_json([{"shard": shard, "behind_s": behind_s}])
    elif behind_s:
        output.say(
            f"shard {shard} goes by its clock again: it shows {time_text(now)}, and had shown {time_text(latest)}"
        )
    else:
        output.say(f"shard {shard} goes by its clock, as before: it was not set back")


async def _accept(cluster: Cluster, shard: str) -> tuple[Micros, Micros]:
    from shard import clock, identity
    from shard.database import Database
    from shard.vocabulary import ShardName

    entry = cluster.shard(ShardName(shard))
    if entry is None:
        names = ", ".join(one.name for one in cluster.shards)
        raise CommandFailed(f"{cluster.source} names no shard {shard!r}; it names {names}", ExitCode.NOT_FOUND)
    database = Database(entry.name, entry.dsn, connections=1, for_books=True)
    try:
        await database.open()
        found = await identity.read(database)
        if found is None or found[:2] != (cluster.name, entry.name):
            raise CommandFailed(
                f"shard {shard!r}: its DSN leads to a database that is not this shard's ({database.address})",
                ExitCode.REFUSED,
            )
        return await clock.accept(database)
    finally:
        await database.close()
