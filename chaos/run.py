"""One run. Starts load, and runs the scheduled faults and changes. Then waits until all faults are healed, no slot
moves and no job is live, and collects the evidence."""

from __future__ import annotations

import asyncio
import contextlib
import random
import tempfile
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import grpc
import psutil
import psycopg

from balancer.shards import open_shards
from chaos.disk import SmallDisk
from chaos.faults import CHANGES, FAULTS
from chaos.job_schedules import open_schedules
from chaos.job_workflows import open_workflows
from chaos.progress import Progress
from chaos.schedule import Kind, Planned, plan
from chaos.stage import Cast, Stage, open_stage
from embedded import EmbeddedError
from proof import history, journal, tables
from proof.background import background
from proof.checker.evidence import Alone, Evidence, Files, InForce, OperatedFlow, Restored, Row, Schedule, Violation
from proof.history import History
from proof.memory import resident_bytes
from proof.postgres import Shard
from router.settings import RouterSettings
from shard.errors import ShardError
from shard.placement.cluster_file import read_cluster

_WARM_UP_S = 4.0
_SAY_EVERY_S = 5.0
_LOOK_S = 0.2
# The pause between two counts. Shorter pauses would load the shards, because each count connects to every shard.
_COUNT_S = 0.5
# How long it may take on an idle machine, beyond the interval of sweeps, until clients have reconnected and restarted.
_SLACK_S = 7.0
# The bounds for answers and deliveries grow by the longest stall of this process times this number, because other
# processes stall too.
_STALLS = 3.0
_DRAIN_S_MAX = 300.0
_STUCK_S_MAX = 30.0
# How long moves may take after all faults are over. Several thousand slots have to move back, and a move that could not
# continue pauses for half a minute.
_REST_S_MAX = 180.0
_REST_LOOK_S = 1.0
# The pause before a fault that is run without other faults. In this pause delayed calls end, and clients reconnect.
_PEACE_S = 8.0
# How long a call may take if nothing delays it.
_ANSWER_S = 2.0
_WEIGH_EVERY_S = 0.5
_ASK_EVERY_S = 0.7
_ASK_S_MAX = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """The options of the command. `faults`: the names of the faults that may be run."""

    seed: int
    seconds: float
    out: Path
    faults: Sequence[str] = tuple(FAULTS)
    cast: Cast = field(default_factory=Cast)
    # The largest resident memory that a router process may have. None: this is not checked.
    router_bytes_max: int | None = None
    # How many further schedules there are, which nobody changes.
    steady_schedules: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """One fault that was run. Times are of the monotonic clock."""

    fault: str
    target: str
    began_s: float
    healed_s: float
    # Why the fault did not work as planned. Empty: the fault worked as planned.
    trouble: str = ""
    # The orgs that the fault affected, if it affects only some orgs.
    orgs: Sequence[str] = ()
    # Whether no other fault or change was under way during the fault.
    alone: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """The result of a run."""

    evidence: Evidence
    strikes: Sequence[Strike]
    # How many planned faults were not run, by fault and reason.
    skipped: Counter[tuple[str, str]]
    # Targets and slots that did not recover.
    unhealed: Sequence[Violation]
    began_s: float
    healed_s: float
    ended_s: float


async def run(order: Order, *, disk: SmallDisk | None, say: Callable[[str], None]) -> Told:
    """Makes one run. Raises ClientFailed, and the errors of Postgres, routers and clients that cannot be started."""
    with tempfile.TemporaryDirectory(prefix="windrow-chaos-") as scratch:
        stage_scope = open_stage(
            order.cast, seed=order.seed, folder=order.out, scratch=Path(scratch), disk=disk, say=say
        )
        async with (
            stage_scope as stage,
            _telling(stage, order, say) as stalls,
            _asking(stage) as in_force,
            _weighing(stage) as resident,
        ):
            await asyncio.sleep(_WARM_UP_S)
            schedules_scope = open_schedules(
                stage.address,
                order.cast.org_names,
                [shard.direct_dsn for shard in stage.shards.values()],
                seed=order.seed,
                seconds=order.seconds,
                steady=order.steady_schedules,
            )
            async with contextlib.AsyncExitStack() as operators:
                if order.steady_schedules:
                    say(f"creating {order.steady_schedules:,} more schedules")
                schedules = await operators.enter_async_context(schedules_scope)
                began_s = time.monotonic()
                striker = _Striker(stage, order, began_s)
                workflows_scope = open_workflows(
                    stage.address,
                    order.cast.org_names,
                    order.out / "histories",
                    seed=order.seed,
                    seconds=order.seconds,
                )
                workflows = await operators.enter_async_context(workflows_scope)
                async with asyncio.TaskGroup() as group:
                    group.create_task(schedules.run())
                    group.create_task(workflows.run())
                    group.create_task(striker.run())
                say("all is healed; waiting until no slot moves")
                unrested = await _rested(stage)
                await schedules.resume()
                await workflows.resume()
            await _until_still(stage, tables.open_runs)
            stalls.clear()
            await striker.run_alone()
            unrested += await _rested(stage)
            answer_s_max = _ANSWER_S + _STALLS * max(stalls, default=0.0)
            healed_s = time.monotonic()
            stage.crew.tell_all("calm")
            say("draining")
            stalls.clear()
            await _drained(stage)
            # Wait until the leases that began under faults have ended. A lease is as long as the window, and nobody
            # extends leases any more.
            calm_s = max(time.monotonic(), healed_s + 2 * order.cast.window_s)
            await asyncio.sleep(calm_s - time.monotonic())
            say("one job for every org")
            stage.crew.tell_all("probe")
            await _drained(stage)
            await stage.crew.end(order.cast.producer_names)
            await _drained(stage)
            late_s_max = RouterSettings().sweep_seconds + _SLACK_S + _STALLS * max(stalls, default=0.0)
            await stage.crew.end(order.cast.worker_names)
            ended_s = time.monotonic()
            say("reading tables and histories")
            evidence = await asyncio.to_thread(
                _read,
                stage,
                order,
                schedules.seen,
                workflows.seen,
                in_force=in_force,
                calm_s=calm_s,
                late_s_max=late_s_max,
            )
            evidence = replace(
                evidence,
                alone=[
                    Alone(fault=one.fault, began_s=one.began_s, ended_s=one.healed_s, orgs=one.orgs)
                    for one in striker.strikes
                    if one.alone and not one.trouble
                ],
                restored=striker.restored,
                answer_s_max=answer_s_max,
                resident_bytes=resident,
                resident_bytes_max=order.router_bytes_max,
            )
    return Told(
        evidence=evidence,
        strikes=striker.strikes,
        skipped=striker.skipped,
        unhealed=[*striker.unhealed, *unrested],
        began_s=began_s,
        healed_s=healed_s,
        ended_s=ended_s,
    )


def _read(
    stage: Stage,
    order: Order,
    schedules: Sequence[Schedule],
    operated: Sequence[OperatedFlow],
    *,
    in_force: Sequence[InForce],
    calm_s: float,
    late_s_max: float,
) -> Evidence:
    shards, catalog = stage.shards.values(), next(iter(stage.shards.values()))
    seen, rows = history.read(order.out / "histories"), tables.read_rows(shards)
    return Evidence(
        history=seen,
        rows=rows,
        books=tables.read_books(stage.address, stage.shards),
        flows=tables.read_flows(shards),
        operated=operated,
        releases=journal.read_releases(shards),
        schedules=schedules,
        stored_schedules=tables.read_schedules(shards),
        runs=journal.read_runs(shards),
        placed=journal.read_placed(catalog),
        owned=journal.read_owned(shards),
        pins=journal.read_pins(catalog),
        found=tables.read_found(stage.address, _by_org(rows, seen)),
        files=Files(in_force=in_force, unusable=frozenset(stage.file.unusable), last=stage.file.digest),
        calm_s=calm_s,
        late_s_max=late_s_max,
    )


def _by_org(rows: Iterable[Row], seen: History) -> dict[str, list[str]]:
    """Returns, by org, the ids of all jobs that are in the tables or that a client was told about."""
    jobs = {row.job: row.org for row in rows}
    jobs |= {one.answered: one.call.org for one in seen.enqueues if one.answered is not None}
    by_org: dict[str, list[str]] = {}
    for job, org in jobs.items():
        by_org.setdefault(org, []).append(job)
    return by_org


def planned(order: Order) -> list[Planned]:
    """Returns a random schedule. Changes may begin at any time, independently of the faults: changes harm nothing, so
    any number of them may be under way."""
    faults = [kind for kind in kinds(order) if kind.name not in CHANGES]
    changes = [kind for kind in kinds(order) if kind.name in CHANGES]
    return [
        *plan(faults, seed=f"{order.seed}/faults", seconds=order.seconds),
        *plan(changes, seed=f"{order.seed}/changes", seconds=order.seconds),
    ]


def kinds(order: Order) -> list[Kind]:
    """Returns the kinds of faults and changes that may be chosen. These kinds are the same on every machine, so that a
    seed always gives the same schedule."""
    chosen = [FAULTS[name] for name in order.faults if FAULTS[name].drawn]
    return [
        Kind(name=kind.name, targets=kind.targets(order.cast), weight=kind.weight, seconds=kind.seconds)
        for kind in chosen
    ]


class _Striker:
    """Runs the scheduled faults and changes."""

    def __init__(self, stage: Stage, order: Order, began_s: float) -> None:
        self._stage = stage
        self._order = order
        self._began_s = began_s
        self._busy: set[str] = set()
        self.strikes: list[Strike] = []
        self.skipped: Counter[tuple[str, str]] = Counter()
        self.unhealed: list[Violation] = []
        self.restored: Restored | None = None

    async def run(self) -> None:
        """Runs the whole schedule, until all of its faults are healed."""
        seconds = self._order.seconds
        async with asyncio.TaskGroup() as group:
            for one in planned(self._order):
                group.create_task(self._strike(one))
            await asyncio.sleep(seconds)

    async def _strike(self, planned: Planned) -> None:
        await asyncio.sleep(max(0.0, self._began_s + planned.start_s - time.monotonic()))
        kind = FAULTS[planned.fault]
        reason = kind.missing(self._stage)
        if reason is None and planned.target in self._busy:
            reason = "its target was not whole yet"
        if reason is not None:
            self.skipped[planned.fault, reason] += 1
            return
        self._busy.add(planned.target)
        try:
            await self._do(planned)
        finally:
            self._busy.discard(planned.target)

    async def run_alone(self) -> None:
        """Runs the faults with `alone` set, one after another. The checker knows which effects of each such fault
        clients may notice."""
        # Keep the order of FAULTS, not the order of the command line.
        alone = [kind for kind in FAULTS.values() if kind.alone and kind.name in self._order.faults]
        for number, kind in enumerate(alone, 1):
            luck = random.Random(f"{self._order.seed}/{kind.name}/alone")
            targets = kind.targets(self._stage.cast)
            if not targets:
                continue
            target, duration_s = luck.choice(targets), luck.uniform(*kind.seconds)
            await asyncio.sleep(_PEACE_S)
            await self._do(
                Planned(number=-number, fault=kind.name, target=target, start_s=0.0, duration_s=duration_s), alone=True
            )

    async def _do(self, planned: Planned, *, alone: bool = False) -> None:
        luck = random.Random(f"{self._order.seed}/{planned.fault}/{planned.number}")
        fault = FAULTS[planned.fault](self._stage, planned.target, luck)
        began_s = time.monotonic()
        trouble = ""
        try:
            await fault.inject()
            self._stage.say(f"{planned.fault} {planned.target}, for {planned.duration_s:.1f} s")
            await asyncio.sleep(planned.duration_s)
        except (psycopg.Error, psutil.Error, EmbeddedError, ShardError, OSError) as error:
            # Other faults are active at the same time, and may make this fault impossible. TimeoutError is an OSError.
            trouble = f"{type(error).__name__}: {error}"
        finally:
            # Heal the fault even if the run is stopped: nothing may stay frozen.
            try:
                await fault.heal()
            except TimeoutError as error:
                what = f"{planned.target} was not whole again after {planned.fault}: {error}"
                self.unhealed.append(Violation(invariant="I7", what=what))
        self.restored = fault.restored or self.restored
        strike = Strike(
            fault=planned.fault,
            target=planned.target,
            began_s=began_s,
            healed_s=time.monotonic(),
            trouble=trouble,
            orgs=fault.orgs,
            alone=alone,
        )
        self.strikes.append(strike)


async def _rested(stage: Stage) -> list[Violation]:
    """Waits until every slot is where the cluster file and the pins want it. Returns a violation if that takes too
    long."""
    deadline_s = time.monotonic() + _REST_S_MAX
    left = "nobody could tell"
    async with open_shards(await asyncio.to_thread(read_cluster, stage.file.path)) as shards:
        while time.monotonic() < deadline_s:
            stage.crew.check()
            try:
                slots = await shards.slots_to_go()
                if not slots:
                    return []
                left = f"{slots} slots were not where they belong"
            except ShardError as error:
                left = str(error)
            # Do not look too often, because each look reads the whole catalog.
            await asyncio.sleep(_REST_LOOK_S)
    what = f"slots had not come to rest {_REST_S_MAX:g} s after all was healed: {left}"
    return [Violation(invariant="I7", what=what)]


async def _drained(stage: Stage) -> None:
    """Waits until no job is live, no run of a schedule is buffered, and no schedule has instants left to decide."""
    await _until_still(stage, _unfinished)


def _unfinished(shards: Iterable[Shard]) -> int:
    # Count the jobs after the runs, so that a run that becomes a job between the two counts is not missed.
    return tables.open_runs(shards) + tables.live_jobs(shards)


async def _until_still(stage: Stage, count: Callable[[Iterable[Shard]], int]) -> None:
    """Waits until the count is 0, or until the count has not changed for a while. In the second case the checker
    reports what is left."""
    left, moved_s = -1, time.monotonic()
    deadline_s = moved_s + _DRAIN_S_MAX
    while time.monotonic() < deadline_s and time.monotonic() - moved_s < _STUCK_S_MAX:
        stage.crew.check()
        now = await asyncio.to_thread(count, stage.shards.values())
        if now == 0:
            return
        if now != left:
            left, moved_s = now, time.monotonic()
        await asyncio.sleep(_COUNT_S)


@contextlib.asynccontextmanager
async def _telling(stage: Stage, order: Order, say: Callable[[str], None]) -> AsyncGenerator[list[float], None]:
    """Reports the progress during this scope. Yields a list, and adds the length of each stall of this process to the
    list."""
    stalls: list[float] = []

    async def watch() -> None:
        while True:
            began_s = time.monotonic()
            await asyncio.sleep(_LOOK_S)
            stalls.append(time.monotonic() - began_s - _LOOK_S)

    async def tell() -> None:
        progress = Progress(order.out / "histories")
        while True:
            await asyncio.sleep(_SAY_EVERY_S)
            say(await asyncio.to_thread(progress.line))

    async with background(watch(), tell()):
        yield stalls


@contextlib.asynccontextmanager
async def _weighing(stage: Stage) -> AsyncGenerator[dict[int, int], None]:
    """Yields the largest resident memory of each router process so far, by process id. Updates these figures during
    this scope."""
    most: dict[int, int] = {}

    async def weigh() -> None:
        while True:
            for pid, size in resident_bytes(stage.routers.pids).items():
                most[pid] = max(most.get(pid, 0), size)
            await asyncio.sleep(_WEIGH_EVERY_S)

    async with background(weigh()):
        yield most


@contextlib.asynccontextmanager
async def _asking(stage: Stage) -> AsyncGenerator[list[InForce], None]:
    """During this scope, asks one router after another which cluster file the router uses. Yields a list, and adds the
    answers to the list."""
    said: list[InForce] = []

    async def ask() -> None:
        while True:
            await asyncio.sleep(_ASK_EVERY_S)
            # A router may be frozen, or being restarted.
            with contextlib.suppress(grpc.RpcError):
                began_s = time.monotonic()
                digest = await asyncio.to_thread(tables.read_digest, stage.address, seconds_max=_ASK_S_MAX)
                said.append(InForce(at_s=began_s, digest=digest))

    async with background(ask()):
        yield said
