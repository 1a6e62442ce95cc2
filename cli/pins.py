"""`windrow shards pin`, `unpin` and `pins`: orgs that live where their operator wants them, whatever their hash.

They change what is wished for, in the catalog that the cluster file names. A balancer brings the orgs there.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from cli import databases, options, output
from cli.exits import CommandFailed, ExitCode
from cli.layout import App
from cli.output import Column

if TYPE_CHECKING:
    from pathlib import Path

    from shard.cluster import Cluster
    from shard.database import Database
    from shard.pinning import Pin, Wish
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
        typer.Option("--to", metavar="SHARD", show_default=False, help="Live on this shard: move the org there."),
    ] = None,
    label: Annotated[
        str | None,
        typer.Option(
            "--label",
            metavar="LABEL=VALUE",
            show_default=False,
            help="Live on any shard that has this label, such as region=eu.",
        ),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Pin an org to a shard, or to shards with a label.

    This is how one org is moved: it gets a slot of its own, which a balancer brings there. An org that has never been
    heard of may be pinned before its first job. Pinned again, it goes elsewhere. Exit code 5: the slot of its hash
    moves just now, or no shard can take it; nothing was changed.
    """
    from shard import pinning

    wish = _wish(to, label)
    cluster, name = _cluster(config), options.org_id(org)
    _refuse_vain(wish, cluster)

    async def change() -> _Shown:
        async with _catalog(cluster) as database:
            await pinning.pin(database, name, wish)
            return await _one(database, cluster, name)

    _say(asyncio.run(change()), as_json=as_json)


def unpin(org: options.Org, config: options.Config, as_json: options.Json = False) -> None:
    """Have an org live where its hash has it live.

    It keeps the slot that it got when it was pinned; a balancer brings that there. Exit code 4: it is not pinned.
    """
    from shard import pinning

    cluster, name = _cluster(config), options.org_id(org)

    async def change() -> _Shown:
        async with _catalog(cluster) as database:
            await pinning.unpin(database, name)
            return await _one(database, cluster, name)

    _say(asyncio.run(change()), as_json=as_json)


def pins(config: options.Config, as_json: options.Json = False) -> None:
    """List the orgs that have a slot of their own.

    Also those that are no longer pinned. Exit code 1: one cannot be brought to where it is to live.
    """
    cluster = _cluster(config)

    async def look() -> list[_Shown]:
        async with _catalog(cluster) as database:
            return await _all(database, cluster)

    found = asyncio.run(look())
    if as_json:
        output.say_json(map(_json, found))
    elif not found:
        output.note("no org is pinned")
    else:
        columns = [
            Column(title="org"),
            Column(title="wish"),
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
    """An org with a slot of its own: where it is to live, and where it does."""

    pin: Pin
    # In the order in which its jobs travel: one, or two while it moves.
    lives_on: tuple[str, ...]
    # Where it is to be, as things are.
    planned: str
    # Why it cannot be brought to where it is to live; empty: it can, or is there.
    trouble: str

    @property
    def state(self) -> str:
        if len(self.lives_on) > 1:
            return "moving"
        if self.trouble:
            return "stuck"
        return "there" if self.lives_on == (self.planned,) else "waiting"


def _wish(to: str | None, label: str | None) -> Wish:
    from shard.pinning import OnShard, WithLabel
    from shard.vocabulary import ShardName

    if (to is None) == (label is None):
        raise CommandFailed("say where the org is to live: either --to SHARD or --label LABEL=VALUE", ExitCode.USAGE)
    if to is not None:
        return OnShard(ShardName(to))
    name, equals, value = (label or "").partition("=")
    if not (name and equals and value):
        raise CommandFailed(f"--label {label!r}: write it as LABEL=VALUE, such as region=eu", ExitCode.USAGE)
    return WithLabel(name, value)


def _cluster(config: Path) -> Cluster:
    from shard.cluster import ClusterFileError, read_cluster

    try:
        return read_cluster(config)
    except ClusterFileError as error:
        raise CommandFailed(str(error), ExitCode.USAGE) from error


def _refuse_vain(wish: Wish, cluster: Cluster) -> None:
    from balancer.pins import fits, why_not

    why = why_not(wish, cluster.shards)
    if why is not None:
        named = any(fits(entry, wish) for entry in cluster.shards)
        raise CommandFailed(f"{cluster.source}: {why}", ExitCode.REFUSED if named else ExitCode.NOT_FOUND)


@asynccontextmanager
async def _catalog(cluster: Cluster) -> AsyncGenerator[Database]:
    """The catalog's database, once it has proved to be this cluster's."""
    from shard import catalog
    from shard.database import Database
    from shard.errors import NotPinned, ShardError, ShardUnavailable
    from shard.vocabulary import CATALOG

    databases.quiet()
    database = Database(CATALOG, cluster.catalog_dsn, connections=1, for_books=True)
    try:
        await database.open()
        await catalog.find(database, cluster=cluster.name, shards=[entry.name for entry in cluster.shards])
        yield database
    except ShardUnavailable as error:
        raise databases.unavailable(error) from error
    except NotPinned as error:
        raise CommandFailed(str(error), ExitCode.NOT_FOUND) from error
    except ShardError as error:
        raise CommandFailed(str(error), ExitCode.REFUSED) from error
    finally:
        await database.close()


async def _all(database: Database, cluster: Cluster) -> list[_Shown]:
    from balancer.pins import plan
    from shard import catalog, pinning

    # In this order, so that the catalog has every one of them.
    found = await pinning.read(database)
    known = await catalog.read(database)
    planned = plan(known, found, cluster.shards)
    return [
        _Shown(
            pin=one,
            lives_on=known.slots[one.slot].reads,
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
    wish = f"is pinned to {shown.pin.wish}" if shown.pin.wish else "is not pinned any more"
    where = {
        "there": f"lives on {shown.planned}, and stays there",
        "moving": f"moves from {shown.lives_on[0]} to {shown.lives_on[-1]}",
        "waiting": f"lives on {shown.lives_on[0]}; a balancer moves it to {shown.planned}",
        "stuck": shown.trouble,
    }[shown.state]
    output.say(output.visible(f"org {shown.pin.org} {wish}: {where}"))


def _row(shown: _Shown) -> Sequence[str]:
    return (
        shown.pin.org,
        str(shown.pin.wish) if shown.pin.wish else "its hash",
        " → ".join(shown.lives_on),
        f"{shown.pin.slot:,}",
        shown.state,
    )


def _json(shown: _Shown) -> dict[str, object]:
    from shard.pinning import OnShard, WithLabel

    wish = shown.pin.wish
    return {
        "org": shown.pin.org,
        "to": wish.shard if isinstance(wish, OnShard) else None,
        "label": str(wish) if isinstance(wish, WithLabel) else None,
        "lives_on": list(shown.lives_on),
        "slot": shown.pin.slot,
        "state": shown.state,
        "planned": shown.planned,
        "trouble": shown.trouble or None,
    }
