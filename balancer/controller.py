"""The balancer's control loop. While this process leads, it brings the cluster into the state that the cluster file
describes. It continues every move that has begun, then begins the moves that the plan asks for, and then keeps polling.

Each pass reads the state from the catalog. After the cluster file has changed, balancer/service.py replaces the
Controller by a new one. The loop remembers only which moves have just failed, so that it does not retry them at once. A
shard that is unreachable delays only its own moves.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from balancer.move import Mover, Pace, Progress
from balancer.plan import Transfer, blocked_reason, transfers
from balancer.shards import Shards
from shard.admin import strays
from shard.errors import Misconfigured, ShardError, ShardUnavailable
from shard.placement import catalog, move_steps
from shard.placement.catalog import Catalog, Move
from shard.placement.cluster_file import Cluster
from shard.postgres import schema
from shard.vocabulary import OrgId, ShardName, Slot

_log = logging.getLogger(__name__)

# Time between two polls of the catalog, unless something wakes the loop earlier.
_POLL_S = 3.0
# Upper bound for the number of moves that have begun and not ended. Most of them only wait for leases to end. The
# number of moves that do more than wait is smaller than the number of shards.
_OPEN_MAX = 16
# Upper bounds for a move of more than one slot. While the queues and workflows of these slots are copied, the producers
# wait: about 60 µs for each queue, and 0.1 ms for each node. Queues and nodes are counted for the first _SLOTS_FIRST
# slots, and then for twice as many slots with each further query.
_SLOTS_MAX = 1024
_QUEUES_MAX = 5000
_NODES_MAX = 10_000
_SLOTS_FIRST = 16
# Time before a failed move is tried again. If the move's target is already the writer of the slots, this time doubles
# after each failure. Before that, the time does not grow, because perhaps no shard accepts new jobs of the slots.
_PAUSE_S = 1.0
_PAUSE_S_MAX = 30.0
_LOG_S = 10.0


@dataclass(kw_only=True)
class _RunningMove:
    """A move that this process is carrying out."""

    move: Move
    mover: Mover
    since_s: float
    logged_s: float
    moved: int = 0
    # False: the move only waits for leases to end, and other moves may use its shards.
    works: bool = True

    @property
    def shards(self) -> set[ShardName]:
        return {self.move.source, self.move.target}


@dataclass(kw_only=True)
class _Pause:
    """A move that failed and is not tried again yet."""

    why: str
    until_s: float
    next_s: float
    # The shards that an operator must look at. While the move is paused, no other move from or to them begins.
    suspect: frozenset[ShardName]


@dataclass(kw_only=True)
class _Logged:
    """What has been logged already, so that nothing is logged twice."""

    routes: set[tuple[ShardName, ShardName]] = field(default_factory=set[tuple[ShardName, ShardName]])
    held: set[int] = field(default_factory=set[int])
    pins: dict[OrgId, str] = field(default_factory=dict[OrgId, str])
    problem: str = ""


class Controller:
    """Moves slots to where the cluster file and the pins want them. With `once`, `run` returns as soon as nothing is
    left to do."""

    def __init__(self, cluster: Cluster, shards: Shards, *, pace: Pace, once: bool = False) -> None:
        # Moves that the cluster file blocks, and why, as of the latest pass.
        self.held: dict[Move, str] = {}
        self._cluster = cluster
        self._shards = shards
        self._pace = pace
        self._once = once
        # The latest copy of the catalog, and the transfers planned from it.
        self._known: Catalog | None = None
        self._planned: Sequence[Transfer] = ()
        self._running: dict[int, _RunningMove] = {}
        self._paused: dict[int, _Pause] = {}
        # The shards to which the latest pass moved no slots, because these shards still have stray jobs of the slots
        # that should move there.
        self._with_strays: set[ShardName] = set()
        self._woken = asyncio.Event()
        self._ending = False
        self._logged = _Logged()

    def end(self) -> None:
        """Makes `run` return as soon as each move is at a point where the move can be interrupted."""
        self._ending = True
        self._woken.set()
        for running in self._running.values():
            running.mover.stop()

    async def run(self) -> None:
        """Runs until `end` is called or, with `once`, until nothing is left to do. With `once`, raises the ShardError
        that prevented a pass from reading the state. If `run` is cancelled, its moves are cancelled too."""
        failed: ShardError | None = None
        async with asyncio.TaskGroup() as group:
            while not self._ending:
                self._woken.clear()
                try:
                    if await self._pass(group) and self._once:
                        break
                    self._logged.problem = ""
                except ShardError as error:
                    if self._once:
                        failed = error
                        self.end()
                    else:
                        self._log_problem(str(error))
                except Exception:  # noqa: BLE001 - whatever it is, the moves under way go on, and the next pass may work
                    _log.exception("unexpected error in the control loop; it goes on")
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._idle_s()):
                        await self._woken.wait()
        if failed is not None:
            raise failed

    async def _pass(self, group: asyncio.TaskGroup) -> bool:
        """Starts everything that can be done now. Returns True if nothing is left to do, except moves that the cluster
        file blocks."""
        known = await self._read_catalog()
        if not self._planned and all(placement.at_rest for placement in known.slots):
            self._logged = _Logged(pins=self._logged.pins)
            self.held = {}
            return True
        begun = await catalog.moves(self._shards.catalog)
        self._forget_pauses(begun)
        self.held = {move: why for move in begun if (why := blocked_reason(move, self._cluster)) is not None}
        self._log_held()
        for move in begun:
            if move not in self.held and move.epoch not in self._running:
                await self._resume(group, move)
        self._log_plan()
        room = _OPEN_MAX - len(begun)
        self._with_strays.clear()
        for transfer in self._planned:
            if room > 0 and await self._begin(group, known, transfer):
                room -= 1
        if self._with_strays:
            name = min(self._with_strays)
            raise Misconfigured(
                f"shard {name!r} has stray jobs of slots that are to move there: they would run a second time; "
                f"`windrow shards recover {name} --config FILE` brings them to where their orgs live"
            )
        return not self._planned and len(self.held) == len(begun)

    async def _read_catalog(self) -> Catalog:
        if self._known is None and await catalog.is_founded(self._shards.catalog, cluster=self._cluster.name):
            await schema.migrate(self._shards.catalog, cluster=None)
        known = await self._shards.read_catalog(self._known)
        if known is self._known:
            return known
        pinned = await self._shards.plan_pins(known)
        self._planned = transfers(known, self._cluster, pinned.owners)
        # Set `_known` last: if an earlier step fails, the next pass repeats all steps.
        self._known = known
        self._log_pins(pinned.complaints)
        return known

    # ── Moves ────────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _resume(self, group: asyncio.TaskGroup, move: Move) -> None:
        """Starts carrying out a move that has begun, unless the move failed a moment ago or its shards are busy. As
        long as the target is not the writer, the move does not wait for busy shards, because perhaps no shard accepts
        new jobs of the slots."""
        pause = self._paused.get(move.epoch)
        if self._ending or (pause is not None and asyncio.get_running_loop().time() < pause.until_s):
            return
        if move.switched and self._busy() & {move.source, move.target}:
            return
        if await self._usable(move.source, move.target) and not self._ending:
            self._start(group, move)

    async def _begin(self, group: asyncio.TaskGroup, known: Catalog, transfer: Transfer) -> bool:
        """Begins to move the first slots of the transfer, unless one of its shards is busy, unreachable or suspect.
        Returns whether a move began."""
        ends = {transfer.source, transfer.target}
        if self._ending or ends & (self._busy() | self._suspect()) or not await self._usable(*ends):
            return False
        try:
            slots = await self._first_slots(transfer)
            if await strays.exist(self._shards.databases[transfer.target], known, slots):
                self._with_strays.add(transfer.target)
                return False
        except ShardUnavailable as error:
            # The shard was usable a moment ago, and will be checked again in the next pass.
            _log.warning("nothing begins to move from shard %r: %s", transfer.source, error)
            return False
        move = await catalog.begin_move(self._shards.catalog, known, slots, target=transfer.target)
        if move is None:
            # The slots changed after the catalog was read.
            self._woken.set()
            return False
        # The move is recorded now. From now on, no other database can take the target's place, so check the shards once
        # more.
        await self._resume(group, move)
        return True

    async def _first_slots(self, transfer: Transfer) -> Sequence[Slot]:
        """Returns the first slots of the transfer: as many as one move may take, and at least one."""
        source = self._shards.databases[transfer.source]
        count, queues, nodes = 0, 0, 0
        while count < min(len(transfer.slots), _SLOTS_MAX):
            more = transfer.slots[count : 2 * count or _SLOTS_FIRST]
            queues_of = Counter(row.slot for row in await move_steps.read_queues(source, more))
            nodes_of = await move_steps.count_nodes(source, more)
            for slot in more:
                queues += queues_of[slot]
                nodes += nodes_of.get(slot, 0)
                if count and (queues > _QUEUES_MAX or nodes > _NODES_MAX):
                    return transfer.slots[:count]
                count += 1
        return transfer.slots[:count]

    def _start(self, group: asyncio.TaskGroup, move: Move) -> None:
        now_s = asyncio.get_running_loop().time()
        mover = Mover(
            self._shards.catalog, self._shards.databases, move.epoch, pace=self._pace, report=self._on_progress
        )
        self._running[move.epoch] = running = _RunningMove(move=move, mover=mover, since_s=now_s, logged_s=now_s)
        group.create_task(self._finish(running))

    async def _finish(self, running: _RunningMove) -> None:
        """Runs a move to its end. Raises none of the move's errors, because they must not disturb other moves."""
        move = running.move
        try:
            if await running.mover.finish():
                _log.info("%s has ended: %s", move, self._moved_text(running))
                self._paused.pop(move.epoch, None)
            else:
                _log.info("%s is left to the next leader: %s", move, self._moved_text(running))
        except ShardError as error:
            self._pause(move, str(error), suspect=isinstance(error, Misconfigured))
        except Exception as error:  # noqa: BLE001 - one move's problem must not end the others
            _log.exception("unexpected error in %s", move)
            self._pause(move, str(error), suspect=True)
        finally:
            del self._running[move.epoch]
            self._woken.set()

    def _pause(self, move: Move, why: str, *, suspect: bool) -> None:
        before = self._paused.get(move.epoch)
        pause_s = _PAUSE_S if before is None else before.next_s
        self._paused[move.epoch] = _Pause(
            why=why,
            until_s=asyncio.get_running_loop().time() + pause_s,
            next_s=min(2 * pause_s, _PAUSE_S_MAX) if move.switched else _PAUSE_S,
            suspect=frozenset((move.source, move.target) if suspect else ()),
        )
        _log.log(
            logging.ERROR if suspect else logging.WARNING,
            "%s is tried again in %g s at the earliest: %s",
            move,
            pause_s,
            why,
        )

    def _idle_s(self) -> float:
        """Returns the time until the next pass: until the next poll, or until the first pause ends if that is
        earlier."""
        now_s = asyncio.get_running_loop().time()
        ends = (pause.until_s - now_s for pause in self._paused.values())
        return min([_POLL_S, *(left_s for left_s in ends if left_s > 0)])

    def _suspect(self) -> set[ShardName]:
        found = {name for pause in self._paused.values() for name in pause.suspect}
        if found and self._once:
            raise Misconfigured(next(pause.why for pause in self._paused.values() if pause.suspect))
        return found

    def _forget_pauses(self, begun: Sequence[Move]) -> None:
        epochs = {move.epoch for move in begun}
        self._paused = {epoch: pause for epoch, pause in self._paused.items() if epoch in epochs}

    def _busy(self) -> set[ShardName]:
        """Returns the shards of all moves that run now, except moves that only wait for leases to end."""
        return {name for running in self._running.values() if running.works for name in running.shards}

    async def _usable(self, *names: ShardName) -> bool:
        """Returns whether all of these shards can be used. Checks every shard, even if another one fails, so that every
        problem is logged."""
        return all(await asyncio.gather(*map(self._shards.check_usable, names)))

    # ── Logging ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _on_progress(self, progress: Progress) -> None:
        running = self._running[progress.move.epoch]
        running.moved = progress.moved
        now_s = asyncio.get_running_loop().time()
        if running.works == progress.waits:
            running.works = not progress.waits
            if progress.waits:
                _log.info("%s waits for %d lease(s) to end", progress.move, progress.leased)
                self._woken.set()
        if running.works and now_s - running.logged_s >= _LOG_S:
            running.logged_s = now_s
            _log.info("%s: %s so far", progress.move, self._moved_text(running))

    def _moved_text(self, running: _RunningMove) -> str:
        took_s = asyncio.get_running_loop().time() - running.since_s
        rate = f", {running.moved / took_s:,.0f} jobs/s" if running.moved and took_s else ""
        return f"{running.moved:,} jobs in {took_s:.1f} s{rate}"

    def _log_plan(self) -> None:
        """Logs the plan only if it has new routes. A plan that has only become shorter, because a move has begun, is
        not logged."""
        routes = {(transfer.source, transfer.target) for transfer in self._planned}
        if not routes <= self._logged.routes:
            parts = (
                f"{len(transfer.slots):,} slots from {transfer.source!r} to {transfer.target!r}"
                for transfer in self._planned
            )
            _log.info("plan: %s", ", ".join(parts))
        self._logged.routes = routes

    def _log_held(self) -> None:
        for move, why in self.held.items():
            if move.epoch not in self._logged.held:
                _log.warning("%s does not go on: %s", move, why)
        self._logged.held = {move.epoch for move in self.held}

    def _log_pins(self, complaints: Mapping[OrgId, str]) -> None:
        for org, why in complaints.items():
            if self._logged.pins.get(org) != why:
                _log.warning("%s", why)
        self._logged.pins = dict(complaints)

    def _log_problem(self, problem: str) -> None:
        if problem != self._logged.problem:
            _log.warning("nothing begins to move: %s", problem)
        self._logged.problem = problem
