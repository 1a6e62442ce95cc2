"""`windrow shards plan`, `rebalance`, `drain` and `forget`: moves of slots between shards. These commands read the
cluster file and the databases, as the balancer does."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer

from cli import databases, options, output
from cli.audit import recorded
from cli.exits import CommandFailed, ExitCode
from cli.layout import App
from cli.output import Column

if TYPE_CHECKING:
    from pathlib import Path

    from balancer.plan import Transfer
    from balancer.shards import Shards
    from shard.errors import ShardError
    from shard.placement.catalog import Catalog, Move
    from shard.placement.cluster_file import Cluster
    from shard.vocabulary import Micros, ShardName, Slot

_LOOK_S = 1.0
# A balancer that starts, or takes over from another balancer, may take this long until it leads.
_LEADERLESS_S = 3.0
# The largest number of orgs that are named because they cannot leave a draining shard.
_STUCK_SHOWN_MAX = 10
# A balancer notices a new cluster file in less than this time.
_FOLLOWED_WITHIN_S = 3.0


def add_to(shards: App) -> None:
    shards.command("plan")(plan)
    shards.command("rebalance")(rebalance)
    shards.command("drain")(drain)
    shards.command("forget")(forget)


# ── plan ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True)
class _Transfer:
    """Slots that are being moved from one shard to another, or will be moved."""

    source: str
    target: str
    slots: int
    # None if the source was not asked, or did not answer.
    jobs: int | None
    # "moving" or "planned".
    state: str
    why: str


def plan(config: options.Config, as_json: options.Json = False) -> None:
    """Shows which slots have to move to match the cluster file, and why.

    Needs no running balancer. Counts the jobs of these slots, and checks the databases. Exit code 1: slots have to
    move, are moving, or cannot move; 3: no slots have to move, and a shard did not answer; 5: a shard's database cannot
    be used, or a shard that is still needed is not in the file.
    """
    cluster = databases.read(config)
    with output.working("planning moves"):
        shown, stuck, troubles = databases.asked(_plan(cluster))
    if as_json:
        output.say_json(
            {
                "from": transfer.source,
                "to": transfer.target,
                "slots": transfer.slots,
                "jobs": transfer.jobs,
                "state": transfer.state,
                "why": transfer.why or None,
            }
            for transfer in shown
        )
    elif shown:
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
                    transfer.source,
                    transfer.target,
                    f"{transfer.slots:,}",
                    "?" if transfer.jobs is None else f"{transfer.jobs:,}",
                    transfer.state,
                    transfer.why,
                )
                for transfer in shown
            ],
        )
    elif stuck:
        output.say("nothing can move now: the slots of these orgs are not where the cluster file wants them")
    else:
        output.say("nothing to move: every slot is where the cluster file wants it")
    _note_left_out(cluster)
    for complaint in stuck:
        output.note(complaint)
    _refuse_misfits(troubles)
    if shown or stuck:
        raise typer.Exit(ExitCode.NO)
    if troubles:
        raise typer.Exit(ExitCode.UNAVAILABLE)


def _note_left_out(cluster: Cluster) -> None:
    """Prints a note for each shard that the plan leaves out because of its state (balancer/plan.py)."""
    for entry in cluster.shards:
        if not entry.state.takes_enqueues:
            output.note(
                f"shard {entry.name!r} keeps the slots that it has and gets no more: its state is {entry.state.word}"
            )


def _refuse_misfits(troubles: Collection[ShardError]) -> None:
    """Raises CommandFailed if databases cannot be used. If databases do not answer, only prints a note: they may be up
    again when slots move."""
    from shard.errors import ShardUnavailable

    away = [str(trouble) for trouble in troubles if isinstance(trouble, ShardUnavailable)]
    misfits = [str(trouble) for trouble in troubles if not isinstance(trouble, ShardUnavailable)]
    for trouble in away:
        output.note(trouble)
    if misfits:
        raise CommandFailed(
            f"{output.counted(len(misfits), 'shard')} cannot be used with this cluster file",
            ExitCode.REFUSED,
            particulars=misfits,
        )


async def _plan(cluster: Cluster) -> tuple[list[_Transfer], Collection[str], Collection[ShardError]]:
    """Returns three things: the current and planned transfers, a text for each thing that cannot move, and the errors
    of databases and of the cluster file."""
    from balancer.plan import blocked_reason, transfers
    from balancer.shards import open_shards
    from shard.placement import catalog

    async with open_shards(cluster) as shards:
        known = await shards.read_catalog()
        pinned = await shards.plan_pins(known)
        moves = await catalog.moves(shards.catalog)
        moving = [
            _Transfer(
                source=move.source,
                target=move.target,
                slots=len(move.slots),
                jobs=await _count_jobs(shards, move.source, move.slots),
                state="moving",
                why=_held(blocked_reason(move, cluster)),
            )
            for move in moves
        ]
        planned = [
            _Transfer(
                source=transfer.source,
                target=transfer.target,
                slots=len(transfer.slots),
                jobs=await _count_jobs(shards, transfer.source, transfer.slots),
                state="planned",
                why=_why(transfer, cluster),
            )
            for transfer in transfers(known, cluster, pinned.owners)
        ]
        troubles = (await shards.troubles()).values()
        return moving + planned, pinned.complaints.values(), [*_removed_too_early(known, cluster), *troubles]


def _removed_too_early(known: Catalog, cluster: Cluster) -> Iterator[ShardError]:
    """Yields an error for each former owner that the file lacks. A former owner holds no slots, but routers still ask
    it about jobs, and refuse a file that lacks it. A file that lacks a shard with slots is refused when the catalog is
    read."""
    from shard.errors import Misconfigured

    for name in sorted({owner.shard for placement in known.slots for owner in placement.former}):
        if cluster.shard(name) is None:
            yield Misconfigured(
                f"shard {name!r}: routers refuse a file without it, because they still ask it about retried enqueues "
                f"and finished jobs: put it back, or give that up with `windrow shards forget {name}`"
            )


def _why(transfer: Transfer, cluster: Cluster) -> str:
    from balancer.plan import is_draining
    from shard.placement.slots import SLOTS

    pinned = sum(slot >= SLOTS for slot in transfer.slots)
    if pinned == len(transfer.slots):
        return output.counted(pinned, "pinned org")
    return f"{transfer.source} is draining" if is_draining(cluster, transfer.source) else "by weight"


def _held(why: str | None) -> str:
    return f"does not go on: {why}" if why else ""


async def _count_jobs(shards: Shards, source: ShardName, slots: Sequence[Slot]) -> int | None:
    from shard.errors import ShardUnavailable
    from shard.placement.move_steps import count_remaining

    if source not in shards.databases:
        return None
    try:
        left = await count_remaining(shards.databases[source], slots)
    except ShardUnavailable:
        return None
    return sum(one.free + one.leased + one.dead + one.departing for one in left)


# ── rebalance ────────────────────────────────────────────────────────────────────────────────────────────────────────


def rebalance(config: options.Config, as_json: options.Json = False) -> None:
    """Moves slots now, until all are where the cluster file wants them.

    If a balancer leads already, the balancer moves them, and this command shows its progress. Ctrl-C stops it at a safe
    point; a balancer or another rebalance continues from there. Exit code 1: the cluster file blocks moves that have
    begun.
    """
    cluster = databases.read(config)
    began_s = time.monotonic()
    slots, held = databases.asked(recorded(cluster, "shards rebalance", _rebalance(cluster)))
    took_s = time.monotonic() - began_s
    if as_json:
        output.say_json([{"slots": slots, "seconds": round(took_s, 3), "held": [str(move) for move in held]}])
    elif not slots:
        output.say("nothing to move: every slot is where the cluster file wants it")
    elif not held:
        output.say(f"{output.counted(slots, 'slot')} moved in {took_s:.1f}s")
    if held:
        raise CommandFailed(
            "not every slot is where the cluster file wants it",
            ExitCode.NO,
            particulars=[f"{move} does not go on: {why}" for move, why in held.items()],
        )


async def _rebalance(cluster: Cluster) -> tuple[int, Mapping[Move, str]]:
    """Moves all slots. Returns how many slots there were to move, and the moves that cannot continue, with their
    reasons."""
    from balancer.shards import open_shards

    stop = databases.stop_on_signals()
    _note_left_out(cluster)
    async with open_shards(cluster) as shards:
        total = await shards.slots_to_go()
        if not total:
            # No slot has to move. If slots had to move, the balancing itself would name the shards that it cannot use.
            for trouble in (await shards.troubles()).values():
                output.note(str(trouble))
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
            output.note("stopped; a balancer or another rebalance continues the moves that have begun")
            raise typer.Exit(ExitCode.INTERRUPTED)
        return total, moving.result()


async def _move(cluster: Cluster, shards: Shards, stop: asyncio.Event) -> Mapping[Move, str]:
    """Moves the slots, or waits until the balancer that leads has moved them."""
    from balancer.service import AnotherLeads, balance_once

    noted = False
    obstacles = _Obstacles(cluster, shards)
    while not stop.is_set():
        try:
            return await balance_once(cluster, stop=stop)
        except AnotherLeads as error:
            if not noted:
                noted = True
                output.note(f"a balancer leads already: {error}; this command shows its progress")
            await obstacles.report(str(error))
        if not await shards.slots_to_go():
            break
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LOOK_S):
                await stop.wait()
    return {}


class _Obstacles:
    """Reports obstacles that stop the balancer of another process from moving slots, if this process can see them.
    Reports each obstacle once."""

    def __init__(self, cluster: Cluster, shards: Shards) -> None:
        self._cluster = cluster
        self._shards = shards
        self._since_s = time.monotonic()
        self._noted: set[str] = set()

    async def report(self, leader: str) -> None:
        from balancer.plan import blocked_reason
        from shard.placement import catalog

        for name, trouble in (await self._shards.troubles()).items():
            self._say(f"nothing moves from or to shard {name!r}: {trouble}")
        for move in await catalog.moves(self._shards.catalog):
            if why := blocked_reason(move, self._cluster):
                self._say(f"{move} does not go on: {why}")
        for complaint in (await self._shards.plan_pins(await self._shards.read_catalog())).complaints.values():
            self._say(complaint)
        if self._cluster.digest in leader:
            self._since_s = time.monotonic()
        elif time.monotonic() - self._since_s > _FOLLOWED_WITHIN_S:
            self._say(
                f"the balancer that leads does not use this cluster file ({self._cluster.digest}): it has another one, "
                "or refuses this one (see its log)"
            )

    def _say(self, text: str) -> None:
        if text not in self._noted:
            self._noted.add(text)
            output.note(text)


# ── drain ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def drain(
    shard: Annotated[
        str, typer.Argument(metavar="SHARD", help="A draining shard of the cluster file.", show_default=False)
    ],
    config: options.Config,
    as_json: options.Json = False,
) -> None:
    """Waits until a draining shard holds no slots.

    The shard must be set to draining in the cluster file. A balancer moves its slots away; this command shows the
    progress. At the end it prints how long the shard must stay in the cluster file. Exit code 1: the only orgs that are
    left are pinned to this shard, or cannot move for another reason.
    """
    from shard.placement.cluster_file import ShardState

    cluster = databases.read(config)
    entry = cluster.shard(shard)
    if entry is None:
        names = ", ".join(one.name for one in cluster.shards)
        raise CommandFailed(f"{config} names no shard {shard!r}; it names {names}", ExitCode.NOT_FOUND)
    if entry.state is not ShardState.DRAINING:
        raise CommandFailed(
            f"shard {shard!r} is {entry.state.word} in {config}: to drain it, write into its [[shard]]",
            ExitCode.USAGE,
            particulars=['state = "draining"'],
        )
    left_at = databases.asked(_drain(cluster, entry.name, config))
    _report_drained(entry.name, left_at, config, as_json=as_json)


async def _drain(cluster: Cluster, name: ShardName, config: Path) -> Micros | None:
    """Waits until the shard holds no slots. Returns the time at which the last slot left the shard, or None if the
    shard never held a slot."""
    from balancer.shards import open_shards
    from shard.postgres.leader_lock import leader_session

    async with open_shards(cluster) as shards, leader_session(cluster.catalog_dsn) as observer:
        known = await shards.read_catalog()
        total = _held_by(known, name)
        with output.counting_to(total, "slots") as show:
            noted = False
            led_s = time.monotonic()
            obstacles = _Obstacles(cluster, shards)
            while remaining := _held_by(known, name):
                show(total - remaining)
                await _refuse_stuck(shards, known, name, config)
                if leader := await observer.leader():
                    led_s = time.monotonic()
                    await obstacles.report(leader)
                elif not noted and time.monotonic() - led_s > _LEADERLESS_S:
                    noted = True
                    output.note(
                        "no balancer leads, so nothing moves: start `windrow balancer`, or `windrow shards rebalance`"
                    )
                await asyncio.sleep(_LOOK_S)
                known = await shards.read_catalog()
    return known.left_by(name)


async def _refuse_stuck(shards: Shards, known: Catalog, name: ShardName, config: Path) -> None:
    """Raises CommandFailed if the shard holds only orgs' own slots, and none of them can move."""
    from shard.placement.slots import SLOTS

    held = {slot for slot, placement in enumerate(known.slots) if name in placement.reads}
    if min(held) < SLOTS or not all(known.slots[slot].at_rest for slot in held):
        return
    complaints = (await shards.plan_pins(known)).complaints
    stuck = [why for org, why in complaints.items() if known.pins.get(org) in held]
    if len(stuck) == len(held):
        if (more := len(stuck) - _STUCK_SHOWN_MAX) > 0:
            stuck[_STUCK_SHOWN_MAX:] = [f"and {more:,} more: see `windrow shards pins --config {config}`"]
        raise CommandFailed(
            f"shard {name!r} still holds {output.counted(len(held), 'org')} that cannot move. Pin each to another "
            f"shard (`windrow shards pin ORG --to SHARD --config {config}`), or unpin it (`windrow shards unpin ORG "
            f"--config {config}`)",
            ExitCode.NO,
            particulars=stuck,
        )


def _held_by(known: Catalog, name: ShardName) -> int:
    return sum(name in placement.reads for placement in known.slots)


def _report_drained(name: ShardName, left_at: Micros | None, config: Path, *, as_json: bool) -> None:
    from shard.placement.slots import FormerOwner

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
        output.say(f"shard {name} holds no slots, and never did: it may be removed from the cluster file")
    else:
        output.say(
            f"""\
shard {name} holds no slots any more. Keep it in the cluster file
  until {output.time_text(_time(former.ids_known_until))}, so that repeated enqueues are recognised
  until {output.time_text(_time(former.keys_known_until))}, if its orgs use dedup keys
  until the archiver has dropped its finished jobs, or you do not need them any more
Then run `windrow shards forget {name} --config {config}`, and remove it."""
        )


# ── forget ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def forget(
    shard: Annotated[
        str, typer.Argument(metavar="SHARD", help="A shard that holds no slots any more.", show_default=False)
    ],
    config: options.Config,
    force: Annotated[
        bool, typer.Option("--force", help="Do it even if the shard may still be needed to recognise duplicates.")
    ] = False,
    lose_history: Annotated[
        bool,
        typer.Option("--lose-history", help="Do it even if its finished jobs cannot be found afterwards."),
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Stops all lookups on a drained shard, so that it may be removed from the cluster file.

    Its finished jobs cannot be found afterwards; so the command refuses (exit code 5) while the shard has any, unless
    --lose-history is given. A repeated enqueue of a job that was stored there would store it again; so the command
    refuses for 31 days after the last slot left, unless --force is given.
    """
    cluster = databases.read(config)
    work = _forget(cluster, shard, force=force, lose_history=lose_history)
    slots = databases.asked(
        recorded(cluster, "shards forget", work, shard=shard, force=force, lose_history=lose_history)
    )
    if as_json:
        output.say_json([{"shard": shard, "slots": slots}])
    elif slots:
        output.say(f"shard {shard} is no longer used: remove it from the cluster file")
    else:
        output.say(f"shard {shard} is not used: it may be removed from the cluster file")


async def _forget(cluster: Cluster, shard: str, *, force: bool, lose_history: bool) -> int:
    from balancer.shards import open_shards
    from shard.placement import catalog
    from shard.placement.slots import FormerOwner
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
        if left_at is not None and not lose_history:
            await _refuse_history(shards, name)
        slots = await catalog.forget_owner(shards.catalog, name, force=force)
        if left_at is not None and not slots:
            until = output.time_text(_time(FormerOwner(shard=name, left_at=left_at).keys_known_until))
            raise CommandFailed(
                f"shard {shard!r} may know dedup keys until {until}: a repeated enqueue of a job that was stored there "
                "would store it again; wait, or give --force",
                ExitCode.REFUSED,
            )
        return slots


async def _refuse_history(shards: Shards, name: ShardName) -> None:
    """Raises CommandFailed if the shard has finished jobs, or does not say whether it has any."""
    from shard.errors import ShardError
    from shard.history import days

    database = shards.databases.get(name)
    try:
        jobs, newest = (None, None) if database is None else await days.count_kept(database)
    except ShardError as error:
        raise CommandFailed(
            f"{error}; nobody knows whether it has finished jobs: try again, or give --lose-history",
            ExitCode.UNAVAILABLE,
        ) from error
    if jobs is None:
        raise CommandFailed(
            f"the cluster file does not let this command ask shard {name!r} whether it has finished jobs: give the "
            "shard the state draining, or give --lose-history",
            ExitCode.REFUSED,
        )
    if jobs:
        raise CommandFailed(
            f"shard {name!r} has {output.counted(jobs, 'finished job')}, of {newest} and before, which nobody would "
            "find any more: wait until the archiver has dropped them, or give --lose-history",
            ExitCode.REFUSED,
        )


def _time(micros: Micros) -> datetime:
    return datetime.fromtimestamp(micros // 1_000_000, UTC)


def _json_time(micros: Micros) -> str:
    return _time(micros).isoformat().replace("+00:00", "Z")
