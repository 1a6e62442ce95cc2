"""A shard that lost history: `windrow shards accept` and `windrow shards recover`. They read the cluster file and talk
to the databases."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer

from cli import databases, options, output
from cli.exits import CommandFailed, ExitCode
from cli.layout import App
from cli.output import Column

if TYPE_CHECKING:
    from pathlib import Path

    from balancer.recovery import Loss, Recovery
    from shard.cluster import Cluster
    from shard.vocabulary import Micros, ShardName


def add_to(shards: App) -> None:
    shards.command("accept")(accept)
    shards.command("recover")(recover)


def accept(
    shard: Annotated[str, typer.Argument(metavar="SHARD", help="That has lost history.", show_default=False)],
    config: options.Config,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: options.Json = False,
) -> None:
    """Let a shard serve again that has lost history.

    Its database was restored from a backup, or is a standby that lagged when it was promoted: routers refuse it until
    this is said. Shows what is known of the loss, and asks. What was lost stays lost. Exit code 5: it was not accepted.
    """
    cluster = databases.read(config)
    loss = databases.asked(_find_loss(cluster, shard))
    said: list[str] = []
    if loss is not None:
        if not as_json:
            output.say(_loss_text(loss))
        if not yes:
            _confirm(shard)
        said = databases.asked(_accept(cluster, loss))
    if as_json:
        output.say_json([_loss_json(shard, loss)])
        return
    if loss is None:
        output.say(f"shard {shard} has lost nothing that the catalog knows of: there is nothing to accept")
        return
    for sentence in said:
        output.say(sentence)
    output.say(
        f"shard {shard} serves again within seconds. `windrow check` shows whether it has stray jobs;\n"
        f"`windrow shards recover {shard} --config {config}` brings them to where their orgs live"
    )


def _confirm(shard: str) -> None:
    if not sys.stdin.isatty():
        raise CommandFailed(
            f"shard {shard!r} would serve without what it has lost: say --yes if that is meant", ExitCode.USAGE
        )
    if not typer.confirm("Is there no server that has all of it, and is the shard to serve without what is lost?"):
        raise CommandFailed("nothing was changed", ExitCode.REFUSED)


def _loss_text(loss: Loss) -> str:
    if loss.newest_at is None:
        since = "it has no mark of its history"
    else:
        since = f"its newest mark is {loss.newest:,}, of {_text(loss.newest_at)}"
    return (
        f"shard {loss.shard} has lost history: the catalog has confirmed its mark {loss.confirmed.number:,}, of "
        f"{_text(loss.confirmed.at)};\n{since}. Lost is what was done there since.\n"
        f"slots that came since: {loss.slots_come:,} (their jobs there are lost); "
        f"that left since: {loss.slots_left:,} (their jobs there are stray)\n"
        "jobs that finished since run again"
    )


def _loss_json(shard: str, loss: Loss | None) -> dict[str, object]:
    if loss is None:
        return {"shard": shard, "lost_history": False}
    return {
        "shard": shard,
        "lost_history": True,
        "confirmed_mark": loss.confirmed.number,
        "confirmed_at": _json_time(loss.confirmed.at),
        "newest_mark": loss.newest,
        "newest_at": None if loss.newest_at is None else _json_time(loss.newest_at),
        "slots_come": loss.slots_come,
        "slots_left": loss.slots_left,
    }


async def _find_loss(cluster: Cluster, shard: str) -> Loss | None:
    from balancer.recovery import find_loss
    from balancer.shards import open_shards

    name = _named(cluster, shard)
    async with open_shards(cluster) as shards:
        return await find_loss(shards.databases[name], shards.catalog, cluster=cluster.name)


async def _accept(cluster: Cluster, loss: Loss) -> list[str]:
    from balancer import recovery
    from balancer.shards import open_shards

    async with open_shards(cluster) as shards:
        return await recovery.accept(loss, shards.databases, shards.catalog, cluster=cluster.name)


def recover(
    shard: Annotated[str, typer.Argument(metavar="SHARD", help="That has stray jobs.", show_default=False)],
    config: options.Config,
    older: Annotated[
        bool,
        typer.Option(
            "--older",
            help="Also jobs whose ids were made more than 7 days ago: they run again if it is forgotten that they ran.",
        ),
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Bring the stray jobs of a shard to where their orgs live.

    Jobs are stray where nobody reads them: `windrow check` names them. One that the org's shards know already is
    cancelled on this shard instead, so that nothing runs twice. May be stopped and repeated at any time. Exit code 1:
    some are left, such as those under a lease; repeat it later.
    """
    cluster = databases.read(config)
    done = databases.asked(_recover(cluster, shard, older=older))
    if as_json:
        output.say_json([_recovery_json(shard, done)])
    else:
        _print_recovery(shard, done, config)
    if done.moving or done.leased or done.older:
        raise typer.Exit(ExitCode.NO)


async def _recover(cluster: Cluster, shard: str, *, older: bool) -> Recovery:
    from balancer import recovery
    from balancer.shards import open_shards

    name = _named(cluster, shard)
    async with open_shards(cluster) as shards:
        with output.working(f"bringing the stray jobs of {shard} home") as status:

            def report(jobs: int) -> None:
                if status is not None:
                    status.update(f"bringing the stray jobs of {shard} home: {jobs:,} done")

            return await recovery.recover(
                name, shards.databases, shards.catalog, cluster=cluster.name, older=older, report=report
            )


def _named(cluster: Cluster, shard: str) -> ShardName:
    entry = cluster.shard(shard)
    if entry is None:
        names = ", ".join(one.name for one in cluster.shards)
        raise CommandFailed(f"the cluster file names no shard {shard!r}; it names {names}", ExitCode.NOT_FOUND)
    if not entry.state.takes_changes:
        raise CommandFailed(
            f"shard {shard!r} is {entry.state.word} in the cluster file, and takes no changes", ExitCode.REFUSED
        )
    return entry.name


def _print_recovery(shard: str, done: Recovery, config: Path) -> None:
    if done.orgs:
        output.table(
            [
                Column(title="org"),
                Column(title="lives on"),
                Column(title="brought there", right=True),
                Column(title="known already", right=True),
            ],
            [(one.org, one.home, f"{one.brought:,}", f"{one.known:,}") for one in done.orgs],
        )
    elif not (done.moving or done.leased or done.older):
        output.say(f"shard {shard} has no stray jobs")
    if done.leased:
        output.note(f"{output.counted(done.leased, 'stray job')} under a lease: repeat this when the leases have ended")
    if done.moving:
        output.note(
            f"{output.counted(done.moving, 'stray job')} of orgs that move just now, or came since: repeat this"
        )
    if done.older:
        output.note(
            f"{output.counted(done.older, 'stray job')} with ids made more than 7 days ago: whether they have run may "
            f"be forgotten. `windrow shards recover {shard} --config {config} --older` brings them too"
        )


def _recovery_json(shard: str, done: Recovery) -> dict[str, object]:
    return {
        "shard": shard,
        "orgs": [
            {"org": one.org, "lives_on": one.home, "brought": one.brought, "known": one.known} for one in done.orgs
        ],
        "left_moving": done.moving,
        "left_leased": done.leased,
        "left_older": done.older,
    }


def _time(micros: Micros) -> datetime:
    return datetime.fromtimestamp(micros // 1_000_000, UTC)


def _text(micros: Micros) -> str:
    return output.time_text(_time(micros))


def _json_time(micros: Micros) -> str:
    return _time(micros).isoformat().replace("+00:00", "Z")
