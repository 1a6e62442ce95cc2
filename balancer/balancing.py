"""Makes a cluster as its file wants it, while it leads: goes on with every move that has begun, then begins what the
plan says, and keeps looking.

What is to be done is read from the catalog and the file, each time; nothing is remembered but what would only be tried
in vain. A shard that is away holds up its own moves alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from balancer.move import Mover, Pace, Progress
from balancer.plan import Transfer, hindrance, transfers
from balancer.shards import Shards
from shard import catalog, moving, schema, strays
from shard.catalog import Catalog, Move
from shard.cluster import Cluster
from shard.errors import Misconfigured, ShardError, ShardUnavailable
from shard.vocabulary import OrgId, ShardName, Slot

_log = logging.getLogger(__name__)

# Between two looks at the catalog, where nothing else calls for one.
_LOOK_S = 3.0
# Moves that have begun and not ended. Most of them wait for leases: those that work are fewer than shards.
_OPEN_MAX = 16
# What changes hands at once. Producers of these slots wait for the queues to be copied: some 60 µs each.
_SLOTS_MAX = 1024
_QUEUES_MAX = 5000
_SLOTS_FIRST = 16
# Before a move that could not go on is tried again: doubled each time.
_PAUSE_S = 1.0
_PAUSE_S_MAX = 30.0
_TELL_S = 10.0


@dataclass(kw_only=True)
class _Carried:
    """A move that is being carried on."""

    move: Move
    mover: Mover
    since_s: float
    told_s: float
    moved: int = 0
    # Else it waits for leases to end, and others may work beside it.
    works: bool = True

    @property
    def shards(self) -> set[ShardName]:
        return {self.move.source, self.move.target}


@dataclass(kw_only=True)
class _Pause:
    """A move that could not go on."""

    why: str
    until_s: float
    next_s: float
    # Its shards, where an operator must look before anything more begins to move from or to them.
    suspect: frozenset[ShardName]


@dataclass(kw_only=True)
class _Memory:
    """What has been said, so that it is said once."""

    ways: set[tuple[ShardName, ShardName]] = field(default_factory=set[tuple[ShardName, ShardName]])
    held: set[int] = field(default_factory=set[int])
    pins: dict[OrgId, str] = field(default_factory=dict[OrgId, str])
    trouble: str = ""


class Balancing:
    """`once`: ends when nothing is left to do."""

    def __init__(self, cluster: Cluster, shards: Shards, *, pace: Pace, once: bool = False) -> None:
        # Moves that the cluster file keeps from going on, and why, as of the latest look.
        self.held: dict[Move, str] = {}
        self._cluster = cluster
        self._shards = shards
        self._pace = pace
        self._once = once
        # As of when something was read last that was new; and what follows from it.
        self._known: Catalog | None = None
        self._planned: Sequence[Transfer] = ()
        self._carried: dict[int, _Carried] = {}
        self._paused: dict[int, _Pause] = {}
        # Shards to which nothing moves, because they have stray jobs of the very slots, as of the latest look.
        self._astray: set[ShardName] = set()
        self._woken = asyncio.Event()
        self._ending = False
        self._said = _Memory()

    def end(self) -> None:
        """Has `run` return, as soon as each move has done what it must not leave half done."""
        self._ending = True
        self._woken.set()
        for carried in self._carried.values():
            carried.mover.stop()

    async def run(self) -> None:
        """Until it is told to end, or, once, until nothing is left to do; once, raises the ShardError that keeps it
        from knowing. Cancelled, it acts no more."""
        failed: ShardError | None = None
        async with asyncio.TaskGroup() as group:
            while not self._ending:
                self._woken.clear()
                try:
                    if await self._look(group) and self._once:
                        break
                    self._said.trouble = ""
                except ShardError as error:
                    if self._once:
                        failed = error
                        self.end()
                    else:
                        self._complain(str(error))
                except Exception:  # noqa: BLE001 - whatever it is, the moves under way go on, and the next look may work
                    _log.exception("could not look what is to be moved")
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_LOOK_S):
                        await self._woken.wait()
        if failed is not None:
            raise failed

    async def _look(self, group: asyncio.TaskGroup) -> bool:
        """Has everything done that can be done now. True: there is nothing, nor will there be by itself."""
        known = await self._learn()
        if not self._planned and all(placement.at_rest for placement in known.slots):
            self._said = _Memory(pins=self._said.pins)
            self.held = {}
            return True
        begun = await catalog.moves(self._shards.catalog)
        self._forget_pauses(begun)
        self.held = {move: why for move in begun if (why := hindrance(move, self._cluster)) is not None}
        self._speak_of_held()
        for move in begun:
            if move not in self.held and move.epoch not in self._carried:
                await self._go_on(group, move)
        self._speak_of_plan()
        room = _OPEN_MAX - len(begun)
        self._astray.clear()
        for transfer in self._planned:
            if room > 0 and await self._begin(group, known, transfer):
                room -= 1
        if self._astray:
            name = min(self._astray)
            raise Misconfigured(
                f"shard {name!r} has stray jobs of slots that are to move there: they would run a second time; "
                f"`windrow shards recover {name}` brings them to where their orgs live"
            )
        return not self._planned and len(self.held) == len(begun)

    async def _learn(self) -> Catalog:
        if self._known is None and await catalog.is_founded(self._shards.catalog, cluster=self._cluster.name):
            await schema.migrate(self._shards.catalog, cluster=None)
        known = await self._shards.read_catalog(self._known)
        if known is self._known:
            return known
        pinned = await self._shards.plan_pins(known)
        self._planned = transfers(known, self._cluster, pinned.owners)
        # Last: what has failed before is done again.
        self._known = known
        self._speak_of_pins(pinned.complaints)
        return known

    # ── Moves ────────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _go_on(self, group: asyncio.TaskGroup, move: Move) -> None:
        """With a move that has begun, unless it has just failed, or others keep its shards busy. Nobody takes jobs of
        slots that are not switched: they do not wait."""
        pause = self._paused.get(move.epoch)
        if self._ending or (pause is not None and asyncio.get_running_loop().time() < pause.until_s):
            return
        if move.switched and self._busy() & {move.source, move.target}:
            return
        if await self._fit(move.source, move.target) and not self._ending:
            self._carry(group, move)

    async def _begin(self, group: asyncio.TaskGroup, known: Catalog, transfer: Transfer) -> bool:
        """To move some of these slots, unless their shards are busy, away, or suspect."""
        ends = {transfer.source, transfer.target}
        if self._ending or ends & (self._busy() | self._suspect()) or not await self._fit(*ends):
            return False
        try:
            slots = await self._at_once(transfer)
            if await strays.are_there(self._shards.databases[transfer.target], known, slots):
                self._astray.add(transfer.target)
                return False
        except ShardUnavailable as error:
            # Since it was asked; it will be asked again.
            _log.warning("nothing begins to move from shard %r: %s", transfer.source, error)
            return False
        move = await catalog.begin(self._shards.catalog, known, slots, target=transfer.target)
        if move is None:
            # Something has changed since we looked.
            self._woken.set()
            return False
        # The shards are asked again: only from now on no other database can take the place of the target's.
        await self._go_on(group, move)
        return True

    async def _at_once(self, transfer: Transfer) -> Sequence[Slot]:
        """The first of the slots: as many as may change hands at once."""
        source = self._shards.databases[transfer.source]
        taken, queues = 0, 0
        while taken < min(len(transfer.slots), _SLOTS_MAX):
            some = transfer.slots[taken : 2 * taken or _SLOTS_FIRST]
            queues += len(await moving.read_queues(source, some))
            if taken and queues > _QUEUES_MAX:
                break
            taken += len(some)
        return transfer.slots[:taken]

    def _carry(self, group: asyncio.TaskGroup, move: Move) -> None:
        now_s = asyncio.get_running_loop().time()
        mover = Mover(self._shards.catalog, self._shards.databases, move.epoch, pace=self._pace, report=self._hear)
        self._carried[move.epoch] = carried = _Carried(move=move, mover=mover, since_s=now_s, told_s=now_s)
        group.create_task(self._finish(carried))

    async def _finish(self, carried: _Carried) -> None:
        """Its troubles end here: they are its own."""
        move = carried.move
        try:
            if await carried.mover.finish():
                _log.info("%s has ended: %s", move, self._pace_of(carried))
                self._paused.pop(move.epoch, None)
            else:
                _log.info("%s is left to whoever leads next: %s", move, self._pace_of(carried))
        except ShardError as error:
            self._pause(move, str(error), suspect=isinstance(error, Misconfigured))
        except Exception as error:  # noqa: BLE001 - one move's trouble must not end the others
            _log.exception("%s has met with an unexpected error", move)
            self._pause(move, str(error), suspect=True)
        finally:
            del self._carried[move.epoch]
            self._woken.set()

    def _pause(self, move: Move, why: str, *, suspect: bool) -> None:
        before = self._paused.get(move.epoch)
        pause_s = _PAUSE_S if before is None else before.next_s
        self._paused[move.epoch] = _Pause(
            why=why,
            until_s=asyncio.get_running_loop().time() + pause_s,
            next_s=min(2 * pause_s, _PAUSE_S_MAX),
            suspect=frozenset((move.source, move.target) if suspect else ()),
        )
        _log.log(logging.ERROR if suspect else logging.WARNING, "%s pauses for %g s at least: %s", move, pause_s, why)

    def _suspect(self) -> set[ShardName]:
        found = {name for pause in self._paused.values() for name in pause.suspect}
        if found and self._once:
            raise Misconfigured(next(pause.why for pause in self._paused.values() if pause.suspect))
        return found

    def _forget_pauses(self, begun: Sequence[Move]) -> None:
        epochs = {move.epoch for move in begun}
        self._paused = {epoch: pause for epoch, pause in self._paused.items() if epoch in epochs}

    def _busy(self) -> set[ShardName]:
        """The shards between which a move works now."""
        return {name for carried in self._carried.values() if carried.works for name in carried.shards}

    async def _fit(self, *names: ShardName) -> bool:
        """Whether these shards can be used. Each is asked, so that the trouble of each is told."""
        return all(await asyncio.gather(*map(self._shards.fit, names)))

    # ── What is said ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _hear(self, progress: Progress) -> None:
        carried = self._carried[progress.move.epoch]
        carried.moved = progress.moved
        now_s = asyncio.get_running_loop().time()
        if carried.works == progress.waits:
            carried.works = not progress.waits
            if progress.waits:
                _log.info("%s waits for %d lease(s) to end", progress.move, progress.leased)
                self._woken.set()
        if carried.works and now_s - carried.told_s >= _TELL_S:
            carried.told_s = now_s
            _log.info("%s goes on: %s", progress.move, self._pace_of(carried))

    def _pace_of(self, carried: _Carried) -> str:
        took_s = asyncio.get_running_loop().time() - carried.since_s
        rate = f", {carried.moved / took_s:,.0f} jobs/s" if carried.moved and took_s else ""
        return f"{carried.moved:,} jobs in {took_s:.1f} s{rate}"

    def _speak_of_plan(self) -> None:
        """When it is another one; not of each that is left when a move has begun."""
        ways = {(one.source, one.target) for one in self._planned}
        if not ways <= self._said.ways:
            parts = (f"{len(one.slots):,} slots from {one.source!r} to {one.target!r}" for one in self._planned)
            _log.info("plan: %s", ", ".join(parts))
        self._said.ways = ways

    def _speak_of_held(self) -> None:
        for move, why in self.held.items():
            if move.epoch not in self._said.held:
                _log.warning("%s does not go on: %s", move, why)
        self._said.held = {move.epoch for move in self.held}

    def _speak_of_pins(self, complaints: Mapping[OrgId, str]) -> None:
        for org, why in complaints.items():
            if self._said.pins.get(org) != why:
                _log.warning("%s", why)
        self._said.pins = dict(complaints)

    def _complain(self, trouble: str) -> None:
        if trouble != self._said.trouble:
            _log.warning("nothing begins to move: %s", trouble)
        self._said.trouble = trouble
