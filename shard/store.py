"""The queue of one shard: enqueue, claim, ack, nack, extend, release, cancel, get.

Calls of one sort that come while others are under way share a statement and a commit (shard/coalescing.py). The
store keeps hints only (floors, remembered names); with all of them lost it answers the same, a little later. It
knows no gRPC, and compares no Python clock with anything the database says.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from shard import arrays, partitions, row_locks, statements
from shard.claiming import CLAIM_BYTES_MAX, Ask, Claiming, Memory, Taken
from shard.clock import ShardClock
from shard.coalescing import Acts, Coalescer, TooManyWaiting
from shard.database import Database
from shard.enqueuing import NOTHING_HANDED, Call, Enqueuing, Handover, made_at_ms
from shard.errors import IdsOutsideHorizon, RowLocked, ShardUnavailable
from shard.floor import GUARD_US, Floors
from shard.halving import by_halves
from shard.interning import Names
from shard.lease import lease_of
from shard.placement import FIRST_EPOCH
from shard.records import ANSWER_BYTES_MAX, JobRecord
from shard.settling import Acks, Extends, Nack, Nacks, Releases, Settling, apart
from shard.turns import Alone, one_by_one
from shard.vocabulary import Answer, JobId, Lease, Micros, NewJobs, OrgId, QueueId, QueueName, ShardName

_log = logging.getLogger(__name__)

# How many times an act is tried again after what stood in its way was mended. Each turn mends one thing for good.
_TURNS_MAX = 6
_PROBED_AT_ONCE = 500
# A sweep from the beginning of time that takes longer is followed by so many times as long without one.
_SWEEP_S_MAX = 0.1
_REST = 50.0
_OWED_MAX = 10_000
# Claims wait by the number of their callers, which is bounded elsewhere, not by what they wish for.
_WISHES_MAX = 20_000_000
# Where payloads are large, two of them may take a statement, and the others of their act wait for all of them.
_TAKERS_MAX = 100
# Payload counts too: an act has 4 MiB of it at most, or one call. The others wait, and the calls of other orgs have
# their share of the next act.
_BYTES_PER_WEIGHT = 4 * 1024

# What is not done together has a share of the acts all the same: else one org's would take all connections (I4).
_ALONE_WEIGHT_MAX = 100

_AnyCall = TypeVar("_AnyCall", Acks, Nacks, Extends, Releases)


@dataclass(frozen=True, slots=True, kw_only=True)
class Due:
    """When the next job of each queue is or becomes visible, by the shard's clock; without queues that have none, and
    without paused ones."""

    now: Micros
    first: dict[QueueId, Micros]


class Store:
    """One shard's queue. `horizon_days`: how old a job id may be, and so how long a retried enqueue is recognised
    by it. `visible`, if set, is told the queues of jobs that came back to be claimed.

    Every verb that changes something raises ClockSetBack while `clock` knows that the shard's clock was set back."""

    def __init__(self, database: Database, *, horizon_days: float = 7.0) -> None:
        self.name: ShardName = database.name
        self.names = Names(database)
        self.clock = ShardClock(database)
        self.visible: Callable[[set[QueueId]], None] = _ignore
        self._database = database
        self._floors = Floors()
        # Before that, by time.monotonic, no sweep looks from the beginning of time.
        self._all_again_s = 0.0
        self._accepted_since_fold = False
        # Releases that met an outage.
        self._owed: list[Releases] = []
        self._locks = row_locks.of_jobs(database)
        self._enqueuing = Enqueuing(database, self.names, self._locks, self.clock, horizon_days=horizon_days)
        settling = Settling(database, self._locks, lambda queues: self.visible(queues))
        claiming = Claiming(database, self.names, self._floors)

        def late() -> ShardUnavailable:
            return ShardUnavailable(self.name, "calls before this one have had no answer yet")

        beside = Acts()
        self._enqueues = Coalescer(
            self._enqueuing.together,
            weigh=_weight,
            whose=lambda call: call.jobs.org,
            late=late,
            beside=beside,
            dropped=_tell_nothing,
        )
        self._asks = Coalescer(self._enqueuing.known, weigh=len, whose=lambda jobs: jobs.org, late=late, beside=beside)
        self._claims = Coalescer(
            claiming.together,
            weigh=_wish,
            whose=_org,
            calls_max=_TAKERS_MAX,
            waiting_max=_WISHES_MAX,
            late=late,
            beside=beside,
            abandoned=self._give_back,
        )
        self._acks = Coalescer(_in_turn(settling.ack), weigh=_leases, whose=_org, late=late, beside=beside)
        self._nacks = Coalescer(_in_turn(settling.nack), weigh=_leases, whose=_org, late=late, beside=beside)
        self._extends = Coalescer(_in_turn(settling.extend), weigh=_leases, whose=_org, late=late, beside=beside)
        self._releases = Coalescer(_in_turn(settling.release), weigh=_leases, whose=_org, late=late, beside=beside)
        self._alone = Coalescer[Alone, Any](
            one_by_one,
            weigh=lambda call: call.weight,
            whose=_org,
            late=late,
            beside=beside,
            weight_max=_ALONE_WEIGHT_MAX,
        )

    # ── Producers ────────────────────────────────────────────────────────────────────────────────────────────────────

    async def enqueue(
        self, jobs: NewJobs, handover: Handover | None = None, *, epoch: int = FIRST_EPOCH
    ) -> dict[int, JobId]:
        """Stores the jobs, all or none, each once. Answers the positions of those that were known already, with the
        id each is known under; all others are newly stored. `epoch`: of the placement by which this shard is their
        writer, and by which its former owners have been asked (`known`). Raises NotOwned, BadIds, TooManyQueues,
        ShardUnavailable, TooManyWaiting."""
        call = Call(jobs, handover, epoch)
        if not len(jobs):
            _tell_nothing(call)
            return {}
        if self.clock.trouble is not None:
            _tell_nothing(call)
            self.clock.check()
        self._accepted_since_fold = True
        try:
            self._enqueuing.refuse_outside_horizon(jobs.ids)
        except IdsOutsideHorizon:
            _tell_nothing(call)
            raise
        return await self._enqueues.submit(call)

    async def known(self, jobs: NewJobs) -> dict[int, JobId]:
        """The positions of jobs that this shard knows, by id or dedup key, with the id each is known under; of a former
        owner this is asked before an enqueue. Raises ShardUnavailable, TooManyWaiting."""
        return await self._asks.submit(jobs) if len(jobs) else {}

    # ── Consumers ────────────────────────────────────────────────────────────────────────────────────────────────────

    async def claim(
        self,
        org: OrgId,
        queues: Sequence[QueueName],
        *,
        max_jobs: int,
        window_us: int,
        worker: str,
        bytes_max: int = CLAIM_BYTES_MAX,
        memory: Memory | None = None,
    ) -> Taken:
        """Leases up to `max_jobs` due jobs for `window_us`, fewer where they fill `bytes_max` or `memory`. Raises
        ShardUnavailable, TooManyWaiting."""
        self.clock.check()
        ask = Ask(org, tuple(queues), max_jobs, window_us, worker, bytes_max, memory)
        taken = self._claims.submit(ask)
        try:
            return await taken
        except asyncio.CancelledError:
            if not taken.cancelled() and taken.exception() is None:
                # The answer came in the very moment in which the caller left.
                self._give_back(ask, taken.result())
            raise

    async def ack(self, org: OrgId, leases: Sequence[Lease], results: Sequence[bytes | None] = ()) -> list[Answer]:
        """Finishes jobs; a result (≤ 64 KiB) is kept with each that has one."""
        self.clock.check()
        return await self._acks.submit(Acks(org, leases, results))

    async def nack(self, org: OrgId, nacks: Sequence[Nack]) -> list[Answer]:
        """Gives jobs back: to run again after a delay, or dead when attempts are used up or the nack kills."""
        self.clock.check()
        return await self._nacks.submit(Nacks(org, nacks))

    async def extend(self, org: OrgId, leases: Sequence[Lease], *, window_us: int) -> list[Answer]:
        """Prolongs leases: each then ends no earlier than `window_us` from now."""
        self.clock.check()
        return await self._extends.submit(Extends(org, leases, window_us))

    async def release(self, org: OrgId, leases: Sequence[Lease]) -> list[Answer]:
        """Gives jobs back at once, the attempt uncounted."""
        self.clock.check()
        return await self._releases.submit(Releases(org, leases))

    def release_soon(self, org: OrgId, leases: Sequence[Lease]) -> None:
        """Same, for jobs that will not reach their consumer, with nobody to wait for it; again at every sweep while the
        shard is away."""
        if not leases:
            return
        calls = Releases(org, leases)
        try:
            self.clock.check()
            released = self._releases.submit(calls)
        except (ShardUnavailable, TooManyWaiting) as error:
            self._owe(calls, error)
        else:
            released.add_done_callback(lambda done: self._released(calls, done))

    def _released(self, call: Releases, released: asyncio.Future[list[Answer]]) -> None:
        if not released.cancelled() and (error := released.exception()) is not None:
            self._owe(call, error)

    def _owe(self, call: Releases, error: BaseException) -> None:
        if isinstance(error, ShardUnavailable | TooManyWaiting) and len(self._owed) < _OWED_MAX:
            self._owed.append(call)
        else:
            _log.warning("%d job(s) stay leased until their window ends: %s", len(call.leases), error)

    def _give_back(self, ask: Ask, taken: Taken) -> None:
        """The caller has left."""
        if taken.jobs:
            self.release_soon(ask.org, [lease_of(job.id, job.lease) for job in taken.jobs])
        if ask.memory is not None:
            ask.memory.give_back(taken.held)

    # ── Both ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    async def cancel(self, org: OrgId, ids: Sequence[JobId], *, reason: str) -> list[Answer]:
        """Cancels jobs that have not finished; STALE for those that have, DEPARTING for those that are leaving."""
        self.clock.check()
        answers_of: list[Answer] = await self._alone.submit(
            Alone(org, len(ids), partial(self._cancel, org, ids, reason=reason))
        )
        return answers_of

    async def _cancel(self, org: OrgId, ids: Sequence[JobId], *, reason: str) -> list[Answer]:
        answers: dict[JobId, Answer] = {}
        was_done = False
        rest: Sequence[JobId] = list(dict.fromkeys(ids))
        rows_of = {(org, job_id.replace("-", "")): job_id for job_id in rest}
        locked = {rows_of[row] for row in await self._locks.expect(rows_of)}
        for _ in range(_TURNS_MAX):
            free = [job_id for job_id in rest if job_id not in locked]
            if not free:
                break
            try:
                rows = await partitions.finish(
                    self._database,
                    statements.CANCEL,
                    {"ids": arrays.plain(free), "org": org, "reason": reason or "cancelled"},
                )
            except RowLocked:
                locked |= {rows_of[row] for row in await self._locks.find(rows_of) if rows_of[row] in free}
                continue
            answers.update((JobId(name), Answer.DEPARTING if departing else Answer.OK) for name, departing in rows)
            missed = [job_id for job_id in free if job_id not in answers]
            there = await self._get(org, missed, include_payload=False, bytes_max=0)
            states = {record.id: record.state for record in there}
            for job_id in missed:
                match states.get(job_id):
                    case None:
                        answers[job_id] = Answer.NOT_FOUND
                    case "cancelled":
                        answers[job_id], was_done = Answer.OK, True
                    case "succeeded":
                        answers[job_id] = Answer.STALE
                    case _:
                        # It was on its way between two tables, dead or redriven, while the statement looked at both.
                        pass
            rest = [job_id for job_id in missed if job_id not in answers]
        if locked:
            more = f" (and {len(locked) - 1} more)" if len(locked) > 1 else ""
            raise RowLocked(self.name, f"job {min(locked)}{more}")
        if not rest:
            if was_done:
                # By a try whose commit may still wait.
                await self._database.run(statements.WAIT_FOR_STANDBY, {})
            return [answers[job_id] for job_id in ids]
        raise ShardUnavailable(self.name, f"{len(rest)} job(s) of org {org!r} would not stand still; try again")

    async def get(
        self,
        org: OrgId,
        ids: Sequence[JobId],
        *,
        include_payload: bool,
        bytes_max: int = ANSWER_BYTES_MAX,
        as_stored: bool = False,
    ) -> list[JobRecord]:
        """The jobs with these ids, in their order, wherever they are on this shard; not whole behind the one that fills
        `bytes_max`. `as_stored`: without what their queues say of retries, where they say nothing themselves."""
        call = partial(self._get, org, ids, include_payload=include_payload, bytes_max=bytes_max, as_stored=as_stored)
        found: list[JobRecord] = await self._alone.submit(Alone(org, len(ids), call))
        return found

    async def _get(
        self, org: OrgId, ids: Sequence[JobId], *, include_payload: bool, bytes_max: int, as_stored: bool = False
    ) -> list[JobRecord]:
        if not ids:
            return []
        rows = await self._database.run(
            statements.GET_JOBS,
            {
                "org": org,
                "ids": arrays.plain(ids),
                "include_payload": include_payload,
                "bytes_max": bytes_max,
                "as_stored": as_stored,
                "oldest_ms": made_at_ms(min(ids)),
            },
        )
        return list(map(JobRecord._make, rows))

    async def finish(self) -> None:
        """Returns once all that was asked of it has been done, what nobody waits for too."""
        producers, consumers = (self._enqueues, self._asks), (self._claims, self._acks, self._nacks)
        for coalescer in (*producers, *consumers, self._extends, self._releases, self._alone):
            await coalescer.finish()

    # ── Upkeep ───────────────────────────────────────────────────────────────────────────────────────────────────────

    async def fold_tally(self) -> None:
        """Keeps the tally of accepted jobs short; does nothing if this store has accepted none since the last time."""
        if self._accepted_since_fold:
            self._accepted_since_fold = False
            await self._database.run(statements.FOLD_TALLY, {})

    async def probe(self, queues: Iterable[QueueId]) -> Due:
        """When these queues have work next, as far as the floors know."""
        return await self._look(list(queues), self._floors.of)

    def arrived(self, queues: Collection[QueueId]) -> None:
        """Jobs of these queues have come from another shard: they may be older than all that was claimed here."""
        self._floors.arrived(queues)

    async def sweep(self, awaited: Iterable[QueueId] = ()) -> Due:
        """Same, for these and all queues in use, whatever the floors are (I7). Puts every floor where it belongs, and
        has the numbers of the queues proved.

        Looks from the beginning of time, unless it has just taken long to do so: then there are dead versions of jobs
        that a snapshot holds, and it looks for what may have committed late."""
        owed, self._owed = self._owed, []
        for call in owed:
            self.release_soon(*call)
        queues = list({*self._floors.to_sweep(), *awaited})
        await self.names.prove(queues)
        began_s = time.monotonic()
        if began_s < self._all_again_s:
            return await self._look(queues, self._floors.late, is_sweep=True)
        try:
            return await self._look(queues, is_sweep=True)
        finally:
            # Also of one that failed: it may have taken longer than a statement may.
            ended_s = time.monotonic()
            if ended_s - began_s > _SWEEP_S_MAX:
                self._all_again_s = ended_s + _REST * (ended_s - began_s)

    async def _look(
        self,
        queues: list[QueueId],
        floors_of: Callable[[QueueId], Sequence[Micros]] | None = None,
        *,
        is_sweep: bool = False,
    ) -> Due:
        """From the beginning of time, or from these floors."""
        first: dict[QueueId, Micros] = {}
        now = Micros(0)
        for at in range(0, len(queues), _PROBED_AT_ONCE):
            part = queues[at : at + _PROBED_AT_ONCE]
            arrivals = self._floors.arrivals
            asked = {"queue_ids": arrays.numbers(part)}
            if floors_of is None:
                rows = await self._database.run(statements.SWEEP, asked)
            else:
                floors = [floor for queue in part for floor in floors_of(queue)]
                rows = await self._database.run(statements.PROBE, {**asked, "floors_us": arrays.numbers(floors)})
            now, found, priorities, visible_at, paused = rows[0]
            lanes: dict[tuple[QueueId, int], Micros] = {}
            resting: set[QueueId] = set()
            if found is not None:
                lanes.update(zip(zip(found, priorities, strict=True), visible_at, strict=True))
                resting.update(queue for queue, is_paused in zip(found, paused, strict=True) if is_paused)
            if is_sweep:
                self._floors.swept(part, Micros(now - GUARD_US), lanes, arrivals=arrivals)
            for (queue, _), when in lanes.items():
                if queue not in resting:
                    first[queue] = min(when, first.get(queue, when))
        return Due(now=now, first=first)


def _in_turn(
    act: Callable[[Sequence[_AnyCall]], Awaitable[Sequence[list[Answer] | Exception]]],
) -> Callable[[list[_AnyCall]], Awaitable[Sequence[list[Answer] | Exception]]]:
    """An act that is done together where that may be, and one part after another where not."""

    async def do(calls: list[_AnyCall]) -> Sequence[list[Answer] | Exception]:
        if len(calls) == 1:
            return await act(calls)
        answers: dict[int, list[Answer] | Exception] = {}
        for some in apart(calls):
            answers.update(zip(map(id, some), await by_halves(act, some), strict=True))
        return [answers[id(call)] for call in calls]

    return do


def _tell_nothing(call: Call) -> None:
    if call.handover is not None:
        call.handover.tell(NOTHING_HANDED)


def _weight(call: Call) -> int:
    return len(call.jobs) + sum(map(len, call.jobs.payloads)) // _BYTES_PER_WEIGHT


def _org(call: Alone | Ask | Acks | Nacks | Extends | Releases) -> OrgId | None:
    return call.org


def _wish(ask: Ask) -> int:
    return ask.max_jobs


def _leases(call: Acks | Nacks | Extends | Releases) -> int:
    results = call.results if isinstance(call, Acks) else ()
    return len(call.leases) + sum([len(result) for result in results if result]) // _BYTES_PER_WEIGHT


def _ignore(_: set[QueueId]) -> None:
    """Nobody is waiting."""
