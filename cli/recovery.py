"""`windrow shards accept` and `windrow shards recover`, for a shard that lost history. These commands read the cluster
file and connect to the databases."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from cli import databases, options, output
from cli.audit import recorded
from cli.exits import CommandFailed, ExitCode
from cli.layout import App
from cli.output import Column

if TYPE_CHECKING:
    from pathlib import Path

    from balancer.recovery import Loss, Recovery
    from shard.placement.cluster_file import Cluster
    from shard.vocabulary import Micros, ShardName


class LostRuns(StrEnum):
    """What to do about runs of schedules that the shard may have stored before it lost history."""

    SKIP = "skip"
    RUN_AGAIN = "run-again"


def add_to(shards: App) -> None:
    shards.command("accept")(accept)
    shards.command("recover")(recover)


def accept(
    shard: Annotated[str, typer.Argument(metavar="SHARD", help="The shard that lost history.", show_default=False)],
    config: options.Config,
    schedules: Annotated[
        LostRuns, typer.Option("--schedules", help="What to do with runs that the shard may have stored before.")
    ] = LostRuns.SKIP,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: options.Json = False,
) -> None:
    """Accepts that a shard lost history, so that it serves again.

    Use it when the shard's database was restored from a backup, or is a standby that lagged when it was promoted.
    Routers refuse the shard until the loss is accepted. Shows what is known about the loss and asks for confirmation.
    Lost jobs stay lost. Runs of schedules that were due before now are skipped, with the reason `recovered`. With
    `--schedules run-again`, each schedule's catch-up policy decides about them, as after an outage. Exit code 5: not
    accepted.
    """
    cluster = databases.read(config)
    loss = databases.asked(_find_loss(cluster, shard))
    said: list[str] = []
    if loss is not None:
        if not as_json:
            output.say(loss_text(loss))
            output.say(
                f"`windrow shards differences {shard} --config {config}` lists what is known, "
                "until the loss is accepted"
            )
        if not yes:
            _confirm(shard)
        said = databases.asked(
            recorded(
                cluster,
                "shards accept",
                _accept(cluster, loss, runs_again=schedules is LostRuns.RUN_AGAIN),
                shard=shard,
                schedules=str(schedules),
            )
        )
    if as_json:
        output.say_json([loss_json(shard, loss)])
        return
    if loss is None:
        output.say(f"shard {shard} has lost nothing that the catalog knows of: there is nothing to accept")
        return
    for sentence in said:
        output.say(sentence)
    output.say(
        f"shard {shard} serves again within seconds. `windrow check` shows whether it has stray jobs;\n"
        f"`windrow shards recover {shard} --config {config}` moves them to where their orgs live"
    )


def _confirm(shard: str) -> None:
    if not sys.stdin.isatty():
        raise CommandFailed(f"shard {shard!r} would serve without what it has lost: confirm with --yes", ExitCode.USAGE)
    if not typer.confirm("No server has the lost data, and the shard should serve without it. Is that right?"):
        raise CommandFailed("nothing was changed", ExitCode.REFUSED)


def loss_text(loss: Loss) -> str:
    if loss.newest_at is None:
        since = "it has no mark of its history"
    else:
        since = f"its newest mark is {loss.newest:,}, of {time_text(loss.newest_at)}"
    return (
        f"shard {loss.shard} has lost history: the catalog has confirmed its mark {loss.confirmed.number:,}, of "
        f"{time_text(loss.confirmed.at)};\n{since}. Everything done there since is lost.\n"
        f"slots that arrived since: {loss.slots_come:,} (their jobs there are lost); "
        f"slots that left since: {loss.slots_left:,} (their jobs there are stray)\n"
        "jobs that finished since will run again"
    )


def loss_json(shard: str, loss: Loss | None) -> dict[str, object]:
    if loss is None:
        return {"shard": shard, "lost_history": False}
    return {
        "shard": shard,
        "lost_history": True,
        "confirmed_mark": loss.confirmed.number,
        "confirmed_at": time_json(loss.confirmed.at),
        "newest_mark": loss.newest,
        "newest_at": None if loss.newest_at is None else time_json(loss.newest_at),
        "slots_come": loss.slots_come,
        "slots_left": loss.slots_left,
    }


async def _find_loss(cluster: Cluster, shard: str) -> Loss | None:
    from balancer.recovery import find_loss
    from balancer.shards import open_shards

    name = named(cluster, shard)
    async with open_shards(cluster) as shards:
        return await find_loss(shards.databases[name], shards.catalog, cluster=cluster.name)


async def _accept(cluster: Cluster, loss: Loss, *, runs_again: bool) -> list[str]:
    from balancer import recovery
    from balancer.shards import open_shards

    async with open_shards(cluster) as shards:
        return await recovery.accept(
            loss, shards.databases, shards.catalog, cluster=cluster.name, runs_again=runs_again
        )


def recover(
    shard: Annotated[str, typer.Argument(metavar="SHARD", help="The shard that has stray jobs.", show_default=False)],
    config: options.Config,
    older: Annotated[
        bool,
        typer.Option(
            "--older",
            help="Include jobs whose ids are older than 7 days; one may run again if its shard forgot that it ran.",
        ),
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Moves a shard's stray jobs to the shards where their orgs live.

    A job is stray if it is on a shard where no router reads it; `windrow check` lists stray jobs. A stray job that the
    org's shards know already is deleted instead, so that nothing runs twice. May be stopped and repeated at any time.
    Exit code 1: some jobs are left, such as leased jobs; repeat the command later.
    """
    cluster = databases.read(config)
    done = databases.asked(
        recorded(cluster, "shards recover", _recover(cluster, shard, older=older), shard=shard, older=older)
    )
    if as_json:
        output.say_json([_recovery_json(shard, done)])
    else:
        _print_recovery(shard, done, config)
    if done.moving or done.leased or done.older:
        raise typer.Exit(ExitCode.NO)


async def _recover(cluster: Cluster, shard: str, *, older: bool) -> Recovery:
    from balancer import recovery
    from balancer.shards import open_shards

    name = named(cluster, shard)
    async with open_shards(cluster) as shards:
        with output.working(f"moving the stray jobs of {shard}") as status:

            def report(jobs: int) -> None:
                if status is not None:
                    status.update(f"moving the stray jobs of {shard}: {jobs:,} done")

            return await recovery.recover(
                name, shards.databases, shards.catalog, cluster=cluster.name, older=older, report=report
            )


def named(cluster: Cluster, shard: str) -> ShardName:
    entry = cluster.shard(shard)
    if entry is None:
        names = ", ".join(one.name for one in cluster.shards)
        raise CommandFailed(f"the cluster file names no shard {shard!r}; it names {names}", ExitCode.NOT_FOUND)
    if not entry.state.takes_changes:
        raise CommandFailed(
            f"shard {shard!r} is {entry.state.word} in the cluster file, and accepts no changes", ExitCode.REFUSED
        )
    return entry.name


def _print_recovery(shard: str, done: Recovery, config: Path) -> None:
    if done.orgs:
        output.table(
            [
                Column(title="org"),
                Column(title="lives on"),
                Column(title="moved there", right=True),
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
            f"{output.counted(done.moving, 'stray job')} of orgs that are moving or arrived meanwhile: repeat this"
        )
    if done.older:
        output.note(
            f"{output.counted(done.older, 'stray job')} with ids older than 7 days: their shards may have forgotten "
            f"that they ran. `windrow shards recover {shard} --config {config} --older` moves them too"
        )


def _recovery_json(shard: str, done: Recovery) -> dict[str, object]:
    return {
        "shard": shard,
        "orgs": [
            {"org": one.org, "home_shard": one.home, "brought": one.brought, "known": one.known} for one in done.orgs
        ],
        "left_moving": done.moving,
        "left_leased": done.leased,
        "left_older": done.older,
    }


def _time(micros: Micros) -> datetime:
    return datetime.fromtimestamp(micros // 1_000_000, UTC)


def time_text(micros: Micros) -> str:
    return output.time_text(_time(micros))


def time_json(micros: Micros) -> str:
    return _time(micros).isoformat().replace("+00:00", "Z")
