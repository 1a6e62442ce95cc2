"""How jobs get into one shard: each once, whole calls or nothing, many calls in one statement.

Nobody's trouble is another's. A call that will not do (its ids are too old, its slot is not owned) is told so, and the
others go again without it. What is known already is looked up, for all calls at once. If Postgres refuses a row, halves
show whose it is (shard/halving.py).
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import psycopg

from shard import arrays, row_locks, statements
from shard.clock import ShardClock
from shard.database import Database
from shard.errors import BadIds, IdsOutsideHorizon, NotOwned, RowLocked, ShardUnavailable, TooManyQueues
from shard.halving import ROW_ERRORS, by_halves
from shard.interning import QUEUES_MAX, Name, Names, NamesLocked
from shard.placement import slot_of
from shard.row_locks import JobRow, KeyRow, RowLocks
from shard.vocabulary import SPARSE_COLUMNS, JobId, Micros, NewJobs, OrgId, QueueId, QueueName, Slot

# How many times an act is tried again after what stood in its way was mended. Each turn mends one thing for good.
_TURNS_MAX = 6
_HOUR_US = 3_600_000_000
_HOUR_MS = 3_600_000
# How long the time that the shard has told is used to refuse ids that are far too old.
_HINT_NS = 2_000_000_000


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
    # Of the placement by which the caller sends them here.
    epoch: int


class _Inserted(NamedTuple):
    """What one run of the statement did. `stored` None: every job was stored; else those that were."""

    stored: set[tuple[OrgId, str]] | None
    now: Micros
    paused: set[Name]
    # Of each queue; None: the default.
    max_attempts: dict[Name, int | None]


class _Going:
    """A call on its way."""

    __slots__ = ("call", "error", "known", "left", "repeats")

    def __init__(self, call: Call) -> None:
        # Without its handover, once that has been told.
        self.call = call
        # The positions of its jobs that are neither stored nor known yet.
        self.left: Sequence[int] = range(len(call.jobs.ids))
        self.known: dict[int, JobId] = {}
        self.error: Exception | None = None
        # Positions that name an id again, each with the position that named it first. An id is one job: its first
        # naming is sent to the shard, and the others are answered as that is.
        self.repeats: dict[int, int] = {}
        ids = call.jobs.ids
        if len(set(ids)) < len(ids):
            first: dict[str, int] = {}
            for at, job_id in enumerate(ids):
                if first.setdefault(job_id, at) != at:
                    self.repeats[at] = first[job_id]
            self.left = list(first.values())
            # No handover: whoever releases the lease of a repeated position would end that of the first.
            self.call = call._replace(handover=None)

    def part(self) -> Call:
        """What of it is left."""
        jobs, handover, epoch = self.call
        if len(self.left) == len(jobs.ids):
            return self.call
        if handover is not None:
            takers = {new: handover.takers[old] for new, old in enumerate(self.left) if old in handover.takers}
            handover = Handover(takers=takers, done=handover.done)
        return Call(jobs.only(self.left), handover, epoch)

    def answer(self) -> dict[int, JobId] | Exception:
        if self.error is not None:
            return self.error
        for at, first in self.repeats.items():
            self.known[at] = self.known.get(first, JobId(self.call.jobs.ids[first]))
        return self.known

    def went(self, inserted: _Inserted) -> None:
        """What was left of it was stored, but for what is known. Where it was to be leased, it is."""
        jobs, handover, epoch = self.call
        if inserted.stored is None:
            stored = self.left
        else:
            stored = [at for at in self.left if (jobs.org, jobs.ids[at]) in inserted.stored]
        if handover is not None:
            self.call = Call(jobs, None, epoch)
            leased = [
                at for at in stored if at in handover.takers and (jobs.org, jobs.queues[at]) not in inserted.paused
            ]
            handover.tell(Handed(leased, inserted.now, inserted.max_attempts))
        if stored is self.left:
            self.left = ()
        else:
            done = set(stored)
            self.left = [at for at in self.left if at not in done]

    def refuse(self, error: Exception) -> None:
        self.error = error
        self.left = ()


NOTHING_HANDED = Handed([], Micros(0), {}, sure=True)
_NOTHING_KNOWN = Handed([], Micros(0), {})


class Enqueuing:
    """`horizon_days`: how old a job id may be, and so how long a retried enqueue is recognised by it. `locks`: of
    jobs."""

    def __init__(
        self, database: Database, names: Names, locks: RowLocks[JobRow], clock: ShardClock, *, horizon_days: float
    ) -> None:
        self._shard = database.name
        self._clock = clock
        self._job_locks = locks
        self._key_locks = row_locks.of_keys(database)
        self._database = database
        self._names = names
        self._horizon_us = round(horizon_days * 24 * _HOUR_US)
        self._horizon_days = horizon_days
        # What the shard's clock said last, and our monotonic one then; a hint (I7).
        self._told_us = 0
        self._told_ns = -_HINT_NS

    def refuse_outside_horizon(self, ids: Sequence[str]) -> None:
        """Refuses ids that are so old that the shard need not be asked: a call that is refused must cost less than one
        that is served. The shard judges all others: by a clock that was set back, ids of this moment are of the
        future. Raises IdsOutsideHorizon."""
        since_ns = time.monotonic_ns() - self._told_ns
        if since_ns >= _HINT_NS:
            # The shard's clock may have been set meanwhile: it is asked again.
            return
        now_us = self._told_us + since_ns // 1000
        if made_at_ms(min(ids)) < self._bounds_ms(now_us)[0] - _HOUR_MS:
            raise IdsOutsideHorizon(self._outside(ids, now_us), now=Micros(now_us), horizon_days=self._horizon_days)

    def _bounds_ms(self, now_us: int) -> tuple[int, int]:
        """The first and the last millisecond in which an id may have been made."""
        return -(-(now_us - self._horizon_us) // 1000), (now_us + _HOUR_US) // 1000

    def _outside(self, ids: Sequence[str], now_us: int) -> list[int]:
        """The positions of ids that were made before or after that."""
        oldest_ms, newest_ms = self._bounds_ms(now_us)
        return [at for at, job_id in enumerate(ids) if not oldest_ms <= made_at_ms(job_id) <= newest_ms]

    async def together(self, calls: Sequence[Call]) -> Sequence[dict[int, JobId] | Exception]:
        """Stores the jobs of each call, all or none. Answers for each call the positions of those that were known
        already, with the id each is known under; or why it was refused."""
        try:
            return await by_halves(self._store, [_Going(call) for call in calls])
        finally:
            for call in calls:
                if call.handover is not None:
                    call.handover.tell(_NOTHING_KNOWN)

    async def _store(self, going: Sequence[_Going]) -> list[dict[int, JobId] | Exception]:
        """Until every job is stored, known or refused. Raises what Postgres says of a row."""
        await self._refuse_locked(going, self._job_locks.expect, self._key_locks.expect)
        rest = [one for one in going if one.left]
        turns = 0
        while rest and turns < _TURNS_MAX:
            before = len(rest)
            try:
                await self._go_past_locks(rest)
            except ROW_ERRORS:
                raise
            except Exception as error:  # noqa: BLE001 - the others are stored by now
                for one in rest:
                    if one.left:
                        one.refuse(error)
            rest = [one for one in rest if one.left]
            # However many calls are refused one after another: those that are left have had no turn of their own.
            turns += len(rest) == before
        for one in rest:
            why = f"{len(one.left)} job(s) of org {one.call.jobs.org!r} stayed in the balance; try again"
            one.refuse(ShardUnavailable(self._shard, why))
        return [one.answer() for one in going]

    async def _go_past_locks(self, going: Sequence[_Going]) -> None:
        for _ in range(row_locks.TURNS_MAX):
            rest = [one for one in going if one.left]
            if not rest:
                return
            try:
                await self._go(rest)
            except RowLocked:
                await self._refuse_locked(rest, self._job_locks.find, self._key_locks.find)
            else:
                return
        raise RowLocked(self._shard, "something that enqueues need")

    async def _refuse_locked(
        self,
        going: Sequence[_Going],
        find_jobs: Callable[[Iterator[JobRow]], Awaitable[set[JobRow]]],
        find_keys: Callable[[Iterator[KeyRow]], Awaitable[set[KeyRow]]],
    ) -> None:
        """Refuses calls of which another session keeps a dedup key locked, or a job that has one of their ids."""
        jobs = await find_jobs(row for one in going for row in _job_rows(one))
        keys = await find_keys(row for one in going for row in _key_rows(one))
        for one in going if jobs or keys else ():
            found = [
                f"dedup key {key!r} of queue {queue!r}"
                for _, queue, key in _key_rows(one)
                if (one.call.jobs.org, queue, key) in keys
            ]
            found += [
                f"a job with id {one.call.jobs.ids[at]}"
                for at, row in zip(one.left, _job_rows(one), strict=True)
                if row in jobs
            ]
            if found:
                one.refuse(RowLocked(self._shard, found[0]))

    async def _go(self, going: Sequence[_Going]) -> None:
        """Stores what it can of these by one statement, and looks up the rest by another."""
        now = _choose(going)
        try:
            inserted = await self._insert([one.part() for one in now])
        except _Refused as refused:
            for turn, error in refused.errors.items():
                if isinstance(error, BadIds):
                    error.positions = [now[turn].left[at] for at in error.positions]
                now[turn].refuse(error)
            return
        except _Settled:
            # What it is known as is looked up.
            pass
        else:
            for one in now:
                one.went(inserted)
        rest = [one for one in going if one.left]
        if rest:
            await self._look_up(rest)

    async def _insert(self, calls: Sequence[Call]) -> _Inserted:
        """Runs the enqueue statement once for all of these. Raises _Refused, _Settled when it stored none of them."""
        count = sum(len(call.jobs) for call in calls)
        for _ in range(_TURNS_MAX):
            epochs = _least_epochs(calls)
            try:
                numbers = await self._names.make(epochs)
            except NamesLocked as error:
                raise _Refused(
                    {
                        turn: NamesLocked(self._shard, locked)
                        for turn, (jobs, _, _) in enumerate(calls)
                        if (locked := {(jobs.org, queue) for queue in jobs.queues}.intersection(error.names))
                    }
                ) from error
            if len(numbers) < len(epochs):
                raise _Refused(self._too_many_queues(calls, numbers))
            lanes = {number: name for name, number in numbers.items()}
            columns = _merged([call.jobs for call in calls])
            oldest, newest = min(columns.ids), max(columns.ids)
            parameters = {
                "lane_ids": arrays.numbers(lanes),
                "lane_orgs": arrays.texts([org for org, _ in lanes.values()]),
                "lane_queues": arrays.names([queue for _, queue in lanes.values()]),
                "lane_epochs": arrays.numbers([epochs[name] for name in lanes.values()]),
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
                if error.sqlstate == "WD001":
                    raise _Settled from error
                raise
            now, ids_fit, admitted, paused, max_attempts, stored, stored_ids, stored_in, _ = rows[0]
            self._told_us, self._told_ns = now, time.monotonic_ns()
            if not ids_fit:
                if made_at_ms(newest) > self._bounds_ms(now)[1]:
                    # By a clock that was set back, ids of this moment are of the future.
                    await self._clock.record()
                    self._clock.check()
                raise _Refused(self._outside_horizon(calls, now))
            if len(admitted or ()) == len(lanes):
                return _Inserted(
                    None if stored == count else _whose(stored_ids or (), stored_in or (), lanes),
                    now,
                    {lanes[number] for number, is_paused in zip(admitted, paused, strict=True) if is_paused},
                    {lanes[number]: most for number, most in zip(admitted, max_attempts, strict=True)},
                )
            # Nothing was stored.
            unowned = await self._unowned(calls)
            if unowned:
                raise _Refused(unowned)
            self._names.forget()
        raise ShardUnavailable(self._shard, "its queues keep changing their numbers")

    def _too_many_queues(self, calls: Sequence[Call], made: Collection[Name]) -> dict[int, Exception]:
        errors: dict[int, Exception] = {}
        for turn, (jobs, _, _) in enumerate(calls):
            unmade = {queue for queue in jobs.queues if (jobs.org, queue) not in made}
            if unmade:
                errors[turn] = TooManyQueues(self._shard, jobs.org, unmade, queues_max=QUEUES_MAX)
        return errors

    def _outside_horizon(self, calls: Sequence[Call], now: int) -> dict[int, Exception]:
        errors: dict[int, Exception] = {}
        for turn, (jobs, _, _) in enumerate(calls):
            bad = self._outside(jobs.ids, now)
            if bad:
                errors[turn] = IdsOutsideHorizon(bad, now=Micros(now), horizon_days=self._horizon_days)
        return errors

    async def _unowned(self, calls: Sequence[Call]) -> dict[int, Exception]:
        refused = await find_refused(self._database, [(call.jobs.org, call.epoch) for call in calls])
        return dict(refused)

    async def _look_up(self, going: Sequence[_Going]) -> None:
        """What is left of these is known, or it goes again."""
        known = await self.known([one.call.jobs.only(one.left) for one in going])
        for one, found in zip(going, known, strict=True):
            one.known.update((one.left[at], known_as) for at, known_as in found.items())
            one.left = [at for at in one.left if at not in one.known]

    async def known(self, batches: Sequence[NewJobs]) -> list[dict[int, JobId]]:
        """Of each batch the positions of jobs that this shard knows, with the id each is known under. Stores nothing,
        and counts on no memory of names."""
        columns = _merged(batches)
        places = [(turn, at) for turn, jobs in enumerate(batches) for at in range(len(jobs))]
        orgs = {org: turn for turn, org in enumerate(dict.fromkeys(jobs.org for jobs in batches), start=1)}
        rows: list[tuple[int, str]] = await self._database.run(
            statements.FIND_KNOWN,
            {
                "ids": arrays.plain(columns.ids),
                "orgs": arrays.texts(list(orgs)),
                # None: all are the first one's.
                "turns": "{}" if len(orgs) == 1 else arrays.numbers([orgs[batches[turn].org] for turn, _ in places]),
                "queues": arrays.sparse_texts({at: columns.queues[at] for at in columns.dedup_keys}, len(columns)),
                "dedup_keys": arrays.sparse_texts(columns.dedup_keys, len(columns)),
                "oldest_ms": made_at_ms(min(columns.ids)),
            },
        )
        known: list[dict[int, JobId]] = [{} for _ in batches]
        for place, known_as in rows:
            turn, at = places[place - 1]
            known[turn][at] = JobId(known_as)
        return known


async def find_refused(database: Database, callers: Sequence[tuple[OrgId, int]]) -> dict[int, NotOwned]:
    """Of those who come for these orgs by placements of these epochs: who is refused, by their places, and why."""
    rows: list[tuple[int, Slot, str, int]] = await database.run(
        statements.FIND_REFUSED_SLOTS,
        {
            "orgs": arrays.texts([org for org, _ in callers]),
            "slots": arrays.numbers([slot_of(org) for org, _ in callers]),
            "epochs": arrays.numbers([known for _, known in callers]),
        },
    )
    refused: dict[int, NotOwned] = {}
    for place, slot, state, epoch in rows:
        org, known = callers[place - 1]
        refused[place - 1] = NotOwned(database.name, org, slot, state=state, epoch=epoch, known=known)
    return refused


class _Refused(Exception):
    """Calls that will not do, by their places; nothing was stored."""

    def __init__(self, errors: dict[int, Exception]) -> None:
        super().__init__(errors)
        self.errors = errors


class _Settled(Exception):
    """A job has already finished or died, or is live and took a dedup key: nothing was stored."""


def made_at_ms(job_id: str) -> int:
    """The milliseconds since 1970 that a UUIDv7 begins with. As text, UUIDv7s sort by them."""
    return int(job_id[:8] + job_id[9:13], 16)


def _choose(going: Sequence[_Going]) -> Sequence[_Going]:
    """Calls for one statement: no two of one org name the same id. A call that is left out goes later, whole: what is
    new in a call is stored by one statement."""
    if len(going) == 1:
        return going
    ids = [job_id for one in going for job_id in one.call.jobs.ids]
    if len(set(ids)) == len(ids):
        return going
    chosen: list[_Going] = []
    named: set[tuple[OrgId, str]] = set()
    for one in going:
        jobs = one.call.jobs
        mine = {(jobs.org, jobs.ids[at]) for at in one.left}
        if named.isdisjoint(mine):
            named |= mine
            chosen.append(one)
    return chosen


def _job_rows(one: _Going) -> Iterator[JobRow]:
    jobs = one.call.jobs
    return ((jobs.org, jobs.ids[at].replace("-", "")) for at in one.left)


def _key_rows(one: _Going) -> Iterator[KeyRow]:
    jobs = one.call.jobs
    return ((jobs.org, jobs.queues[at], key) for at in one.left if (key := jobs.dedup_keys.get(at)) is not None)


def _least_epochs(calls: Sequence[Call]) -> dict[Name, int]:
    """The queues of these calls, each by the oldest placement that brings jobs for it."""
    epochs: dict[Name, int] = {}
    for jobs, _, epoch in calls:
        for queue in set(jobs.queues):
            name = jobs.org, queue
            epochs[name] = min(epoch, epochs.get(name, epoch))
    return epochs


def _whose(ids: Sequence[str], queue_ids: Sequence[QueueId], lanes: Mapping[QueueId, Name]) -> set[tuple[OrgId, str]]:
    return {(lanes[number][0], job_id) for job_id, number in zip(ids, queue_ids, strict=True)}


def _merged(batches: Sequence[NewJobs]) -> NewJobs:
    """The columns of all jobs, one after another. The org is the first one's: only the lanes tell it."""
    if len(batches) == 1:
        return batches[0]
    merged = NewJobs(org=batches[0].org)
    for jobs in batches:
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
    for jobs, _, _ in calls:
        own = {queue: numbers[jobs.org, queue] for queue in set(jobs.queues)}
        column += [own[queue] for queue in jobs.queues]
    return arrays.numbers(column)


def _takers(calls: Sequence[Call], count: int) -> dict[str, object]:
    """Which job is whose: for each job its taker's place, counted from 1, in the list of takers."""
    places: dict[Taker, int] = {}
    taken: dict[int, int] = {}
    before = 0
    for jobs, handover, _ in calls:
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
