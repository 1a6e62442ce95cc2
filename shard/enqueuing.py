"""How jobs get into one shard: each once, whole calls or nothing, many calls in one statement.

Calls go together as long as all is well. Where anything is not (a queue that this shard does not take, an id that
is known, a row that Postgres refuses), each call is looked at alone, so that nobody's trouble is another's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import psycopg

from shard import arrays, statements
from shard.coalescing import caught
from shard.database import Database
from shard.errors import BadIds, IdsOutsideHorizon, IdsTaken, NotOwned, ShardUnavailable
from shard.interning import Name, Names
from shard.placement import slot_of
from shard.vocabulary import SPARSE_COLUMNS, JobId, Micros, NewJobs, OrgId, QueueId, QueueName

# How many times an act is tried again after what stood in its way was mended. Each turn mends one thing for good.
_TURNS_MAX = 6
_ALONE_AT_ONCE = 4
_HOUR_US = 3_600_000_000


class Taker(NamedTuple):
    """A consumer that waits for a job: under which lease it is to have it."""

    number: int
    worker: str
    window_us: int


class Handed(NamedTuple):
    """What became of a handover."""

    # The positions of the jobs that are leased to their takers now. The others are not, or may be: see Handover.
    positions: list[int]
    leased_at: Micros
    # As the queues say; None: the default.
    max_attempts: Mapping[tuple[OrgId, QueueName], int | None]
    # None of the others was stored by this call, and so none is leased.
    sure: bool = False


@dataclass(slots=True, kw_only=True)
class Handover:
    """Takers, by the positions of jobs that are due at once. `done` hears exactly once how it ended, whatever became of
    the caller. A job that is not among `Handed.positions` was not leased, unless an answer of the shard was lost on
    the way: releasing its lease makes sure."""

    takers: Mapping[int, Taker]
    done: Callable[[Handed], None]
    _told: bool = False
    # How many jobs were handed over.
    handed: int = 0

    def tell(self, handed: Handed) -> None:
        if not self._told:
            self._told = True
            self.handed = len(handed.positions)
            self.done(handed)


class Call(NamedTuple):
    jobs: NewJobs
    handover: Handover | None


class _Inserted(NamedTuple):
    """What one run of the statement did. `stored` None: every job was stored; else the ids of those that were."""

    stored: set[str] | None
    now: Micros
    paused: set[tuple[OrgId, QueueName]]
    # Of each queue; None: the default.
    max_attempts: dict[tuple[OrgId, QueueName], int | None]


NOTHING_HANDED = Handed([], Micros(0), {}, sure=True)
_NOTHING_KNOWN = Handed([], Micros(0), {})


class Enqueuing:
    """`horizon_days`: how old a job id may be, and so how long a retried enqueue is recognised by it."""

    def __init__(self, database: Database, names: Names, *, horizon_days: float) -> None:
        self._shard = database.name
        self._database = database
        self._names = names
        self._horizon_us = round(horizon_days * 24 * _HOUR_US)
        self._horizon_days = horizon_days

    async def together(self, calls: Sequence[Call]) -> list[dict[int, JobId] | Exception]:
        """Stores the jobs of each call, all or none. Answers for each call the positions of those that were known
        already, with the id each is known under; or why it was refused."""
        try:
            if len(calls) == 1:
                return [await caught(self._alone(calls[0]))]
            inserted = await self._insert_all(calls)
            if inserted is None:
                turns = asyncio.Semaphore(_ALONE_AT_ONCE)

                async def alone(call: Call) -> dict[int, JobId] | Exception:
                    async with turns:
                        return await caught(self._alone(call))

                return list(await asyncio.gather(*map(alone, calls)))
            if inserted.stored is None:
                for call in calls:
                    _hand(call, inserted)
                return [{} for _ in calls]
            return [await caught(self._enqueue(call, inserted)) for call in calls]
        finally:
            for call in calls:
                if call.handover is not None:
                    call.handover.tell(_NOTHING_KNOWN)

    async def _insert_all(self, calls: Sequence[Call]) -> _Inserted | None:
        """All calls in one statement. None: that cannot be, and nothing was stored."""
        if not _differ([call.jobs for call in calls]):
            return None
        try:
            return await self._insert(calls)
        except (NotOwned, BadIds, _Refused, psycopg.Error):
            # Whose fault it is shows when each goes alone.
            return None

    async def _alone(self, call: Call) -> dict[int, JobId]:
        jobs = call.jobs
        if not len(jobs):
            return {}
        twins = _twins(jobs)
        if not twins:
            return await self._enqueue(call, None)
        alone = [at for at in range(len(jobs)) if at not in twins]
        try:
            first_ones = await self._enqueue(Call(jobs.only(alone), None), None)
        except BadIds as error:
            error.positions = [alone[at] for at in error.positions]
            raise
        known = {alone[at]: known_as for at, known_as in first_ones.items()}
        # A first one that was known already need not hold the key any more: then its twin is new.
        again = [at for at, first in twins.items() if first in known and jobs.ids[at] != jobs.ids[first]]
        if again:
            others = await self._alone(Call(jobs.only(again), None))
            known.update((again[at], known_as) for at, known_as in others.items())
        for at, first in twins.items():
            if at not in again:
                known[at] = known.get(first, JobId(jobs.ids[first]))
        return known

    async def _enqueue(self, call: Call, inserted: _Inserted | None) -> dict[int, JobId]:
        """One call, whose jobs differ from each other in id and dedup key. `inserted`: what was done of it already."""
        known: dict[int, JobId] = {}
        # The positions in the call of what is in `part`.
        rest: list[int] = list(range(len(call.jobs)))
        part = call.jobs
        for turn in range(_TURNS_MAX):
            if turn or inserted is None:
                try:
                    inserted = await self._insert([call if not turn else Call(part, None)])
                except _Refused:
                    inserted = _Inserted(set(), Micros(0), set(), {})
            if not turn:
                _hand(call, inserted)
            if inserted.stored is None:
                return known
            missing = [at for at in range(len(part)) if part.ids[at] not in inserted.stored]
            if not missing:
                return known
            try:
                found = await self._find_known(part, missing)
            except BadIds as error:
                error.positions = [rest[at] for at in error.positions]
                raise
            for at, known_as in found.items():
                known[rest[at]] = known_as
            # Stored now, or known before: what is left was in nobody's books when we looked, so it is tried again.
            left = [at for at in missing if rest[at] not in known]
            if not left:
                return known
            rest = [rest[at] for at in left]
            part = part.only(left)
        raise ShardUnavailable(self._shard, f"{len(rest)} job(s) of org {part.org!r} stayed in the balance; try again")

    async def _insert(self, calls: Sequence[Call]) -> _Inserted:
        """Runs the enqueue statement once for all jobs of these calls. Raises _Refused, NotOwned, IdsOutsideHorizon
        when it stored none of them."""
        count = sum(len(call.jobs) for call in calls)
        for _ in range(_TURNS_MAX):
            numbers = await self._names.make({(jobs.org, queue) for jobs, _ in calls for queue in set(jobs.queues)})
            lanes = {number: name for name, number in numbers.items()}
            columns = _merged(calls)
            oldest, newest = min(columns.ids), max(columns.ids)
            parameters = {
                "lane_ids": arrays.numbers(lanes),
                "lane_orgs": arrays.texts([org for org, _ in lanes.values()]),
                "lane_queues": arrays.names([queue for _, queue in lanes.values()]),
                "oldest_ms": made_at_ms(oldest),
                "newest_ms": made_at_ms(newest),
                "horizon_us": self._horizon_us,
                "jobs": count,
                "ids": arrays.plain(columns.ids),
                "queue_ids": _queue_ids(calls, numbers),
                "kinds": arrays.names(columns.kinds),
                "payloads": arrays.blobs(columns.payloads),
                "priorities": arrays.sparse_numbers(columns.priorities, count),
                "attributes": arrays.sparse_texts(columns.attributes, count),
                "run_at_us": arrays.sparse_numbers(columns.run_at_us, count),
                "delay_us": arrays.sparse_numbers(columns.delay_us, count),
                "expires_at_us": arrays.sparse_numbers(columns.expires_at_us, count),
                "max_attempts": arrays.sparse_numbers(columns.max_attempts, count),
                "retries": arrays.sparse_texts(columns.retries, count),
                "dedup_keys": arrays.sparse_texts(columns.dedup_keys, count),
                "dedup_window_us": arrays.sparse_numbers(columns.dedup_window_us, count),
                "traces": arrays.sparse_texts(columns.traces, count),
                **_takers(calls, count),
            }
            try:
                rows = await self._database.run(statements.ENQUEUE, parameters)
            except psycopg.Error as error:
                if error.sqlstate in {"WD001", "WD002"}:
                    raise _Refused from error
                raise
            now, ids_fit, admitted, paused, max_attempts, stored, stored_ids, *_ = rows[0]
            if not ids_fit:
                raise self._outside_horizon(columns, now)
            if len(admitted or ()) == len(lanes):
                return _Inserted(
                    None if stored == count else set(stored_ids or ()),
                    now,
                    {lanes[number] for number, is_paused in zip(admitted, paused, strict=True) if is_paused},
                    {lanes[number]: most for number, most in zip(admitted, max_attempts, strict=True)},
                )
            # Nothing was stored.
            await self._refuse_unowned({call.jobs.org for call in calls})
            self._names.forget()
        raise ShardUnavailable(self._shard, f"the queues of org {calls[0].jobs.org!r} keep changing their numbers")

    async def _refuse_unowned(self, orgs: Collection[OrgId]) -> None:
        slots = {slot_of(org): org for org in orgs}
        for slot, state, epoch in await self._database.run(
            statements.FIND_REFUSED_SLOTS, {"slots": arrays.numbers(slots)}
        ):
            raise NotOwned(self._shard, slots[slot], slot, state=state, epoch=epoch)

    async def _find_known(self, jobs: NewJobs, positions: list[int]) -> dict[int, JobId]:
        part = jobs.only(positions)
        numbers = await self._names.make({(jobs.org, queue) for queue in set(part.queues)})
        rows = await self._database.run(
            statements.FIND_KNOWN,
            {
                "ids": arrays.plain(part.ids),
                "queue_ids": _queue_ids([Call(part, None)], numbers),
                "dedup_keys": arrays.sparse_texts(part.dedup_keys, len(part)),
                "oldest_ms": made_at_ms(min(part.ids)),
            },
        )
        foreign = {job_id for job_id, _, ours in rows if not ours}
        if foreign:
            raise IdsTaken([at for at in positions if jobs.ids[at] in foreign])
        known = {job_id: known_as for job_id, known_as, _ in rows}
        return {at: JobId(known[jobs.ids[at]]) for at in positions if jobs.ids[at] in known}

    def _outside_horizon(self, jobs: NewJobs, now: int) -> IdsOutsideHorizon:
        oldest_ms = -(-(now - self._horizon_us) // 1000)
        newest_ms = (now + _HOUR_US) // 1000
        positions = [at for at, job_id in enumerate(jobs.ids) if not oldest_ms <= made_at_ms(job_id) <= newest_ms]
        return IdsOutsideHorizon(positions, now=Micros(now), horizon_days=self._horizon_days)


class _Refused(Exception):
    """A job of the batch has already finished or died, or is another org's: nothing was stored."""


def made_at_ms(job_id: str) -> int:
    """The milliseconds since 1970 that a UUIDv7 begins with. As text, UUIDv7s sort by them."""
    return int(job_id[:8] + job_id[9:13], 16)


def _hand(call: Call, inserted: _Inserted) -> None:
    """Tells a handover which of its jobs were stored just now, and so are leased."""
    if call.handover is None or not call.handover.takers:
        return
    jobs, stored = call.jobs, inserted.stored
    call.handover.tell(
        Handed(
            [
                at
                for at in call.handover.takers
                if (stored is None or jobs.ids[at] in stored) and (jobs.org, jobs.queues[at]) not in inserted.paused
            ],
            inserted.now,
            inserted.max_attempts,
        )
    )


def _differ(batches: Sequence[NewJobs]) -> bool:
    """Whether no two jobs of these have an id or a dedup key in common."""
    if len({job_id for jobs in batches for job_id in jobs.ids}) < sum(map(len, batches)):
        return False
    keys = [(jobs.org, jobs.queues[at], key) for jobs in batches for at, key in jobs.dedup_keys.items()]
    return len(set(keys)) == len(keys)


def _merged(calls: Sequence[Call]) -> NewJobs:
    """The columns of all calls' jobs, one after another. The org is the first one's: only the lanes tell it."""
    if len(calls) == 1:
        return calls[0].jobs
    merged = NewJobs(org=calls[0].jobs.org)
    for jobs, _ in calls:
        before = len(merged)
        merged.ids += jobs.ids
        merged.queues += jobs.queues
        merged.kinds += jobs.kinds
        merged.payloads += jobs.payloads
        for name in SPARSE_COLUMNS:
            column = getattr(jobs, name)
            if column:
                getattr(merged, name).update((before + at, value) for at, value in column.items())
    return merged


def _queue_ids(calls: Sequence[Call], numbers: Mapping[Name, QueueId]) -> str:
    column: list[QueueId] = []
    for jobs, _ in calls:
        own = {queue: numbers[jobs.org, queue] for queue in set(jobs.queues)}
        column += [own[queue] for queue in jobs.queues]
    return arrays.numbers(column)


def _takers(calls: Sequence[Call], count: int) -> dict[str, object]:
    """Which job is whose: for each job its taker's place, counted from 1, in the list of takers."""
    places: dict[Taker, int] = {}
    taken: dict[int, int] = {}
    before = 0
    for jobs, handover in calls:
        if handover is not None:
            for at, taker in handover.takers.items():
                taken[before + at] = places.setdefault(taker, len(places) + 1)
        before += len(jobs)
    return {
        "takers": arrays.sparse_numbers(taken, count),
        "leases": arrays.numbers([taker.number for taker in places]),
        "workers": arrays.texts([taker.worker for taker in places]),
        "windows_us": arrays.numbers([taker.window_us for taker in places]),
    }


def _twins(jobs: NewJobs) -> dict[int, int]:
    """Jobs with the id, or the queue and dedup key, of an earlier one of the batch: position → the first's."""
    twins: dict[int, int] = {}
    if len(set(jobs.ids)) < len(jobs):
        first_of: dict[str, int] = {}
        for at, job_id in enumerate(jobs.ids):
            first = first_of.setdefault(job_id, at)
            if first != at:
                twins[at] = first
    if len(jobs.dedup_keys) > 1:
        first_key: dict[tuple[str, str], int] = {}
        for at, key in sorted(jobs.dedup_keys.items()):
            if at not in twins:
                first = first_key.setdefault((jobs.queues[at], key), at)
                if first != at:
                    twins[at] = first
    return twins
