"""`windrow shards accept-clock`: accepts a clock that was set back. The command reads the cluster file and connects to
the shard's database."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from cli import databases, options, output
from cli.audit import recorded
from cli.exits import CommandFailed, ExitCode
from cli.layout import App

if TYPE_CHECKING:
    from shard.placement.cluster_file import Cluster
    from shard.vocabulary import Micros


def add_to(shards: App) -> None:
    shards.command("accept-clock")(accept_clock)


def accept_clock(
    shard: Annotated[
        str, typer.Argument(metavar="SHARD", help="The shard whose clock is correct now.", show_default=False)
    ],
    config: options.Config,
    as_json: options.Json = False,
) -> None:
    """Accepts a shard's clock that was set back.

    A shard whose clock goes back by more than a minute accepts no calls until the clock has caught up. After this
    command it accepts calls within seconds. Use it when the clock was ahead for a while and is correct now. If the
    clock is behind, correct the server's clock instead.
    """
    cluster = databases.read(config)
    now, latest = databases.asked(recorded(cluster, "shards accept-clock", _accept(cluster, shard), shard=shard))
    from shard.postgres.clock import time_text

    behind_s = max(0, latest - now) / 1_000_000
    if as_json:
        output.say_json([{"shard": shard, "behind_s": behind_s}])
    elif behind_s:
        output.say(f"shard {shard}: clock accepted at {time_text(now)}; it had shown {time_text(latest)}")
    else:
        output.say(f"shard {shard}: nothing to accept, because its clock was not set back")


async def _accept(cluster: Cluster, shard: str) -> tuple[Micros, Micros]:
    from shard.placement import identity
    from shard.postgres import clock
    from shard.postgres.pool import Database
    from shard.vocabulary import ShardName

    entry = cluster.shard(ShardName(shard))
    if entry is None:
        names = ", ".join(one.name for one in cluster.shards)
        raise CommandFailed(f"{cluster.source} names no shard {shard!r}; it names {names}", ExitCode.NOT_FOUND)
    database = Database(entry.name, entry.dsn, connections=1, may_scan=True)
    try:
        await database.open()
        found = await identity.read(database)
        if found is None or found[:2] != (cluster.name, entry.name):
            raise CommandFailed(
                f"shard {shard!r}: the database at its DSN is not this shard's ({database.address})",
                ExitCode.REFUSED,
            )
        return await clock.accept(database)
    finally:
        await database.close()
