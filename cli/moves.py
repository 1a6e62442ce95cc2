"""What moves between shards, and why: `windrow shards plan`, `rebalance` and `drain`. They read the cluster file and
the databases, as the balancer does."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer

from cli import databases, options, output
from cli.exits import CommandFailed, ExitCode
from cli.layout import App
from cli.output import Column

if TYPE_CHECKING:
    from pathlib import Path

    from balancer.plan import Transfer
    from balancer.shards import Shards
    from shard.catalog import Catalog, Move
    from shard.cluster import Cluster
    from shard.errors import ShardError
    from shard.vocabulary import Micros, ShardName, Slot

_LOOK_S = 1.0
# A balancer notices a new cluster file sooner.
_FOLLOWED_WITHIN_S = 3.0


def add_to(shards: App) -> None:
    shards.command("plan")(plan)
    shards.command("rebalance")(rebalance)
    shards.command("drain")(drain)
    shards.command("forget")(forget)


# ── plan ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True)
class _Way:
    """Slots that go from one shard to another."""

    source: str
    target: str
    slots: int
    # None: the source was not asked, or did not answer.
    jobs: int | None
    # moving or planned.
    state: str
    why: str


def plan(config: options.Config, as_json: options.Json = False) -> None:
    """Show which slots are to move, and why.

    By the cluster file, whether or not a balancer runs. Counts the jobs of these slots, and looks at the databases.
    Exit code 1: something is to move, or on its way, or cannot. 3: nothing is, and a shard did not answer. 5: a
    shard's database will not do.
    """
    cluster = databases.read(config)
    with output.working("looking what is to move"):
        ways, stuck, troubles = databases.asked(_plan(cluster))
    if as_json:
        output.say_json(
            {
                "from": way.source,
                "to": way.target,
                "slots": way.slots,
                "jobs": way.jobs,
                "state": way.state,
                "why": way.why or None,
            }
            for way in ways
        )
    elif ways:
        columns = [
            Column(title="from"),
            Column(title="to"),
            Column(title="slots", right=True),
            Column(title="jobs", right=True),
            Column(title="state", coloured=True),
            Column(title="why", detail=True),
        ]
        output.table(
            columns,
            [
                (
                    way.source,
                    way.target,
                    f"{way.slots:,}",
                    "?" if way.jobs is None else f"{way.jobs:,}",
                    way.state,
                    way.why,
                )
                for way in ways
            ],
        )
    else:
        output.say("nothing is to move: every slot is where the cluster file wants it")
    for complaint in stuck:
        output.note(complaint)
    _refuse_misfits(troubles)
    if ways or stuck:
        raise typer.Exit(ExitCode.NO)
    if troubles:
        raise typer.Exit(ExitCode.UNAVAILABLE)


def _refuse_misfits(troubles: Collection[ShardError]) -> None:
    """What does not answer now may do so when it is to."""
    from shard.errors import ShardUnavailable

    away = [str(trouble) for trouble in troubles if isinstance(trouble, ShardUnavailable)]
    misfits = [str(trouble) for trouble in troubles if not isinstance(trouble, ShardUnavailable)]
    for trouble in away:
        output.note(trouble)
    if misfits:
        raise CommandFailed(
            f"{output.counted(len(misfits), 'shard')} cannot be used by this cluster file",
            ExitCode.REFUSED,
            particulars=misfits,
        )


async def _plan(cluster: Cluster) -> tuple[list[_Way], Collection[str], Collection[ShardError]]:
    """What moves and is to, what cannot, and what is wrong with the databases."""
    from balancer.plan import hindrance, transfers
    from balancer.shards import open_shards
    from shard import catalog

    async with open_shards(cluster) as shards:
        known = await shards.read_catalog()
        pinned = await shards.plan_pins(known)
        moves = await catalog.moves(shards.catalog)
        moving = [
            _Way(
                source=move.source,
                target=move.target,
                slots=len(move.slots),
                jobs=await _count_jobs(shards, move.source, move.slots),
                state="moving",
                why=_held(hindrance(move, cluster)),
            )
            for move in moves
        ]
        planned = [
            _Way(
                source=transfer.source,
                target=transfer.target,
                slots=len(transfer.slots),
                jobs=await _count_jobs(shards, transfer.source, transfer.slots),
                state="planned",
                why=_why(transfer, cluster),
            )
            for transfer in transfers(known, cluster, pinned.owners)
        ]
        return moving + planned, pinned.complaints.values(), (await shards.troubles()).values()


def _why(transfer: Transfer, cluster: Cluster) -> str:
    from balancer.plan import is_draining
    from shard.placement import SLOTS

    pinned = sum(slot >= SLOTS for slot in transfer.slots)
    if pinned == len(transfer.slots):
        return output.counted(pinned, "pinned org")
    return f"{transfer.source} is draining" if is_draining(cluster, transfer.source) else "by weight"


def _held(why: str | None) -> str:
    return f"does not go on: {why}" if why else ""


async def _count_jobs(shards: Shards, source: ShardName, slots: Sequence[Slot]) -> int | None:
    from shard import moving
    from shard.errors import ShardUnavailable

    if source not in shards.databases:
        return None
    try:
        left = await moving.count_left(shards.databases[source], slots)
    except ShardUnavailable:
        return None
    return sum(one.free + one.leased + one.dead + one.departing for one in left)


# ── rebalance ────────────────────────────────────────────────────────────────────────────────────────────────────────


def rebalance(config: options.Config, as_json: options.Json = False) -> None:
    """Move slots to where the cluster file wants them, now.

    In this process; where a balancer leads already, that does it, and this shows how far it is. Ctrl-C ends it at a
    moment that harms nobody, and a balancer or another rebalance goes on. Exit code 1: slots stay on their way, for
    the file keeps them from moving.
    """
    cluster = databases.read(config)
    began_s = time.monotonic()
    slots, held = databases.asked(_rebalance(cluster))
    took_s = time.monotonic() - began_s
    if as_json:
        output.say_json([{"slots": slots, "seconds": round(took_s, 3), "held": [str(move) for move in held]}])
    elif not slots:
        output.say("nothing is to move: every slot is where the cluster file wants it")
    elif not held:
        output.say(f"{output.counted(slots, 'slot')} moved in {took_s:.1f}s")
    if held:
        raise CommandFailed(
            "not every slot is where the cluster file wants it",
            ExitCode.NO,
            particulars=[f"{move} does not go on: {why}" for move, why in held.items()],
        )


async def _rebalance(cluster: Cluster) -> tuple[int, Mapping[Move, str]]:
    """How many slots there were to move, and the moves that cannot go on, with the reason of each."""
    from balancer.shards import open_shards

    stop = databases.stop_on_signals()
    async with open_shards(cluster) as shards:
        total = await shards.slots_to_go()
        if not total:
            return 0, {}
        with output.counting_to(total, "slots") as show:
            moving = asyncio.create_task(_move(cluster, shards, stop))
            try:
                while not moving.done():
                    await asyncio.wait({moving}, timeout=_LOOK_S)
                    show(max(0, total - await shards.slots_to_go()))
            finally:
                moving.cancel()
                await asyncio.wait({moving})
        if stop.is_set():
            output.note("stopped; what has begun goes on with a balancer, or with another rebalance")
            raise typer.Exit(ExitCode.INTERRUPTED)
        return total, moving.result()


async def _move(cluster: Cluster, shards: Shards, stop: asyncio.Event) -> Mapping[Move, str]:
    """Does it, or waits until whoever leads has done it."""
    from balancer.service import AnotherLeads, balance_once

    said = False
    hindrances = _Hindrances(cluster, shards)
    while not stop.is_set():
        try:
            return await balance_once(cluster, stop=stop)
        except AnotherLeads as error:
            if not said:
                said = True
                output.note(f"a balancer leads already: {error}; this shows how far it is")
            await hindrances.tell(str(error))
        if not await shards.slots_to_go():
            break
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LOOK_S):
                await stop.wait()
    return {}


class _Hindrances:
    """What keeps a balancer elsewhere from moving slots, as far as it can be seen from here; each is said once."""

    def __init__(self, cluster: Cluster, shards: Shards) -> None:
        self._cluster = cluster
        self._shards = shards
        self._since_s = time.monotonic()
        self._said: set[str] = set()

    async def tell(self, leader: str) -> None:
        from balancer.plan import hindrance
        from shard import catalog

        for name, trouble in (await self._shards.troubles()).items():
            self._say(f"nothing moves from or to shard {name!r}: {trouble}")
        for move in await catalog.moves(self._shards.catalog):
            if why := hindrance(move, self._cluster):
                self._say(f"{move} does not go on: {why}")
        for complaint in (await self._shards.plan_pins(await self._shards.read_catalog())).complaints.values():
            self._say(complaint)
        if self._cluster.digest in leader:
            self._since_s = time.monotonic()
        elif time.monotonic() - self._since_s > _FOLLOWED_WITHIN_S:
            self._say(
                f"the balancer that leads does not go by this cluster file ({self._cluster.digest}): it has another, "
                "or refuses this one, as its log says then"
            )

    def _say(self, what: str) -> None:
        if what not in self._said:
            self._said.add(what)
            output.note(what)


# ── drain ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def drain(
    shard: Annotated[str, typer.Argument(metavar="SHARD", help="As the cluster file names it.", show_default=False)],
    config: options.Config,
    as_json: options.Json = False,
) -> None:
    """Wait until a draining shard holds no slots.

    The cluster file says that it is draining, and the balancer moves its slots away; this shows how far that is. Then
    it says for how long the shard is needed all the same.
    """
    from shard.cluster import ShardState

    cluster = databases.read(config)
    entry = cluster.shard(shard)
    if entry is None:
        names = ", ".join(one.name for one in cluster.shards)
        raise CommandFailed(f"{config} names no shard {shard!r}; it names {names}", ExitCode.NOT_FOUND)
    if entry.state is not ShardState.DRAINING:
        raise CommandFailed(
            f"shard {shard!r} is {entry.state.word} in {config}: to have it drained, write into its [[shard]]",
            ExitCode.USAGE,
            particulars=['state = "draining"'],
        )
    left_at = databases.asked(_drain(cluster, entry.name))
    _tell_drained(entry.name, left_at, config, as_json=as_json)


async def _drain(cluster: Cluster, name: ShardName) -> Micros | None:
    """Answers when the last of the slots that it ever held has left it."""
    from balancer.shards import open_shards
    from shard.leading import candidacy

    async with open_shards(cluster) as shards, candidacy(cluster.catalog_dsn) as onlooker:
        known = await shards.read_catalog()
        total = _held_by(known, name)
        with output.counting_to(total, "slots") as show:
            said = False
            hindrances = _Hindrances(cluster, shards)
            while left := _held_by(known, name):
                show(total - left)
                if leader := await onlooker.leader():
                    await hindrances.tell(leader)
                elif not said:
                    said = True
                    output.note(
                        "no balancer leads, so nothing moves: start `windrow balancer`, or `windrow shards rebalance`"
                    )
                await asyncio.sleep(_LOOK_S)
                known = await shards.read_catalog()
    return known.left_by(name)


def _held_by(known: Catalog, name: ShardName) -> int:
    return sum(name in placement.reads for placement in known.slots)


def _tell_drained(name: ShardName, left_at: Micros | None, config: Path, *, as_json: bool) -> None:
    from shard.placement import FormerOwner

    former = None if left_at is None else FormerOwner(shard=name, left_at=left_at)
    if as_json:
        output.say_json(
            [
                {
                    "shard": name,
                    "slots": 0,
                    "knows_ids_until": former and _json_time(former.ids_known_until),
                    "knows_dedup_keys_until": former and _json_time(former.keys_known_until),
                }
            ]
        )
    elif former is None:
        output.say(f"shard {name} holds no slots, and never did: it may be taken out of the cluster file")
    else:
        output.say(
            f"""\
shard {name} holds no slots any more. It stays in the cluster file
  until {output.time_text(_time(former.ids_known_until))}, so that enqueues that are sent again are recognised
  until {output.time_text(_time(former.keys_known_until))}, where its orgs use dedup keys
  for as long as its finished jobs are to be found
Then `windrow shards forget {name} --config {config}`, and take it out."""
        )


# ── forget ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def forget(
    shard: Annotated[str, typer.Argument(metavar="SHARD", help="That holds no slots any more.", show_default=False)],
    config: options.Config,
    force: Annotated[bool, typer.Option("--force", help="Although it may still know what is sent again.")] = False,
    as_json: options.Json = False,
) -> None:
    """Ask a drained shard nothing any more, so that it may be taken out of the cluster file.

    Its finished jobs are not found from then on. Jobs that were stored there and are sent again would be stored again:
    refused (exit code 5) for 31 days after the last slot has left, unless --force is given.
    """
    slots = databases.asked(_forget(databases.read(config), shard, force=force))
    if as_json:
        output.say_json([{"shard": shard, "slots": slots}])
    elif slots:
        output.say(f"shard {shard} is asked for nothing any more: take it out of the cluster file")
    else:
        output.say(f"shard {shard} is asked for nothing: it may be taken out of the cluster file")


async def _forget(cluster: Cluster, shard: str, *, force: bool) -> int:
    from balancer.shards import open_shards
    from shard import catalog
    from shard.placement import FormerOwner
    from shard.vocabulary import ShardName

    name = ShardName(shard)
    async with open_shards(cluster) as shards:
        known = await shards.read_catalog()
        left_at = known.left_by(name)
        if cluster.shard(shard) is None and left_at is None:
            names = ", ".join(one.name for one in cluster.shards)
            raise CommandFailed(f"there is no shard {shard!r}; the cluster file names {names}", ExitCode.NOT_FOUND)
        if held := _held_by(known, name):
            raise CommandFailed(
                f"shard {shard!r} still holds {output.counted(held, 'slot')}: drain it first", ExitCode.REFUSED
            )
        slots = await catalog.forget_owner(shards.catalog, name, force=force)
        if left_at is not None and not slots:
            until = output.time_text(_time(FormerOwner(shard=name, left_at=left_at).keys_known_until))
            raise CommandFailed(
                f"shard {shard!r} may know dedup keys until {until}: what has been stored there and is sent again "
                "would be stored again; wait, or give --force",
                ExitCode.REFUSED,
            )
        return slots


def _time(micros: Micros) -> datetime:
    return datetime.fromtimestamp(micros // 1_000_000, UTC)


def _json_time(micros: Micros) -> str:
    return _time(micros).isoformat().replace("+00:00", "Z")
