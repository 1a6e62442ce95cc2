"""`windrow shards pin`, `unpin` and `pins`: for orgs that live on the shard that an operator has chosen, and not on the
shard of their hash.

The commands change the wanted shard in the catalog. A balancer then moves the orgs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from cli import databases, options, output
from cli.audit import recorded
from cli.exits import CommandFailed, ExitCode
from cli.layout import App
from cli.output import Column

if TYPE_CHECKING:
    from pathlib import Path

    from shard.placement.cluster_file import Cluster
    from shard.placement.pins import Pin, PinTarget
    from shard.postgres.pool import Database
    from shard.vocabulary import OrgId


def add_to(shards: App) -> None:
    shards.command("pin")(pin)
    shards.command("unpin")(unpin)
    shards.command("pins")(pins)


def pin(
    org: options.Org,
    config: options.Config,
    to: Annotated[
        str | None,
        typer.Option("--to", metavar="SHARD", show_default=False, help="Move the org to this shard."),
    ] = None,
    label: Annotated[
        str | None,
        typer.Option(
            "--label",
            metavar="LABEL=VALUE",
            show_default=False,
            help="Move the org to a shard that has this label, such as region=eu.",
        ),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Pins an org to a shard, or to the shards with a label.

    This moves one org: it gets a slot of its own, and a balancer moves that slot to the shard. An org may be pinned
    before its first job, and pinned again to move it elsewhere. Exit code 5: the slot of its hash is being moved, or no
    shard can take the org; nothing was changed.
    """
    from shard.placement import pins

    target = _target(to, label)
    cluster, name = _cluster(config), options.org_id(org)
    _require_shard_for(target, cluster)

    async def change() -> _Shown:
        async with databases.catalog_of(cluster) as database:
            await pins.pin(database, name, target)
            return await _one(database, cluster, name)

    changed = recorded(cluster, "shards pin", change(), org=name, to=to, label=label)
    _say(databases.asked(changed), as_json=as_json)


def unpin(org: options.Org, config: options.Config, as_json: options.Json = False) -> None:
    """Unpins an org, so that it lives on the shard of its hash again.

    The org keeps its own slot; a balancer moves that slot to the shard. Exit code 4: the org is not pinned.
    """
    from shard.placement import pins

    cluster, name = _cluster(config), options.org_id(org)

    async def change() -> _Shown:
        async with databases.catalog_of(cluster) as database:
            await pins.unpin(database, name)
            return await _one(database, cluster, name)

    _say(databases.asked(recorded(cluster, "shards unpin", change(), org=name)), as_json=as_json)


def pins(config: options.Config, as_json: options.Json = False) -> None:
    """Lists the orgs that have a slot of their own.

    This includes orgs that are no longer pinned. Exit code 1: an org cannot be moved to the shard where it should live.
    """
    cluster = _cluster(config)

    async def look() -> list[_Shown]:
        async with databases.catalog_of(cluster) as database:
            return await _all(database, cluster)

    found = asyncio.run(look())
    if as_json:
        output.say_json(map(_json, found))
    elif not found:
        output.note("no org is pinned")
    else:
        columns = [
            Column(title="org"),
            Column(title="target"),
            Column(title="lives on"),
            Column(title="slot", right=True),
            Column(title="state", coloured=True),
        ]
        output.table(columns, [_row(one) for one in found])
    for one in found:
        if one.trouble:
            output.note(one.trouble)
    if any(one.trouble for one in found):
        raise typer.Exit(ExitCode.NO)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shown:
    """An org with its own slot: the shard where it should live, and the shard where it lives."""

    pin: Pin
    # The shard where the org lives; during a move, the source and then the target.
    shards: tuple[str, ...]
    # The shard that the current plan has for the org.
    planned: str
    # Why the org cannot be moved to the shard where it should live. Empty if it can be moved there, or if it lives
    # there already.
    trouble: str

    @property
    def state(self) -> str:
        if len(self.shards) > 1:
            return "moving"
        if self.trouble:
            return "stuck"
        return "there" if self.shards == (self.planned,) else "waiting"


def _target(to: str | None, label: str | None) -> PinTarget:
    from shard.placement.pins import OnShard, WithLabel
    from shard.vocabulary import ShardName

    if (to is None) == (label is None):
        raise CommandFailed("give either --to SHARD or --label LABEL=VALUE", ExitCode.USAGE)
    if to is not None:
        return OnShard(ShardName(to))
    name, equals, value = (label or "").partition("=")
    if not (name and equals and value):
        raise CommandFailed(f"--label {label!r}: write it as LABEL=VALUE, such as region=eu", ExitCode.USAGE)
    return WithLabel(name, value)


def _cluster(config: Path) -> Cluster:
    from shard.placement.cluster_file import ClusterFileError, read_cluster

    try:
        return read_cluster(config)
    except ClusterFileError as error:
        raise CommandFailed(str(error), ExitCode.USAGE) from error


def _require_shard_for(target: PinTarget, cluster: Cluster) -> None:
    from balancer.pins import fits, why_not

    why = why_not(target, cluster.shards)
    if why is not None:
        named = any(fits(entry, target) for entry in cluster.shards)
        raise CommandFailed(f"{cluster.source}: {why}", ExitCode.REFUSED if named else ExitCode.NOT_FOUND)


async def _all(database: Database, cluster: Cluster) -> list[_Shown]:
    from balancer.pins import plan
    from shard.placement import catalog, pins

    # Read the pins before the rest of the catalog, so that the rest contains the slots of all these pins.
    found = await pins.read(database)
    known = await catalog.read(database)
    planned = plan(known, found, cluster.shards)
    return [
        _Shown(
            pin=one,
            shards=known.slots[one.slot].reads,
            planned=planned.owners[one.slot],
            trouble=planned.complaints.get(one.org, ""),
        )
        for one in found
    ]


async def _one(database: Database, cluster: Cluster, org: OrgId) -> _Shown:
    return next(one for one in await _all(database, cluster) if one.pin.org == org)


def _say(shown: _Shown, *, as_json: bool) -> None:
    if as_json:
        output.say_json([_json(shown)])
        return
    status = f"is pinned to {shown.pin.target}" if shown.pin.target else "is no longer pinned"
    where = {
        "there": f"lives on {shown.planned}, and stays there",
        "moving": f"moves from {shown.shards[0]} to {shown.shards[-1]}",
        "waiting": f"lives on {shown.shards[0]}; a balancer moves it to {shown.planned}",
        "stuck": shown.trouble,
    }[shown.state]
    output.say(output.visible(f"org {shown.pin.org} {status}: {where}"))


def _row(shown: _Shown) -> Sequence[str]:
    return (
        shown.pin.org,
        str(shown.pin.target) if shown.pin.target else "its hash",
        " → ".join(shown.shards),
        f"{shown.pin.slot:,}",
        shown.state,
    )


def _json(shown: _Shown) -> dict[str, object]:
    from shard.placement.pins import OnShard, WithLabel

    target = shown.pin.target
    return {
        "org": shown.pin.org,
        "to": target.shard if isinstance(target, OnShard) else None,
        "label": str(target) if isinstance(target, WithLabel) else None,
        "shards": list(shown.shards),
        "slot": shown.pin.slot,
        "state": shown.state,
        "planned": shown.planned,
        "trouble": shown.trouble or None,
    }
