"""Enqueues jobs on one shard. Stores each job once, and either all jobs of a call or none. One statement serves many
calls.

A bad call does not harm the others. A call is invalid if its ids are too old, or if this shard does not own its org's
slot. An invalid call gets its error, and the statement runs again without this call. Jobs that the shard knows already
are looked up, for all calls at once. If Postgres refuses a row, bisection finds the call with that row
(shard/queue/bisect_errors.py).
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import NoReturn

import psycopg

from shard.errors import BadIds, IdsOutsideHorizon, NotOwned, RowLocked, ShardUnavailable, TooManyQueues
from shard.job_id import HORIZON_US, bounds_ms, made_at_ms, to_hex
from shard.placement.slots import slot_of
from shard.postgres import arrays
from shard.postgres.clock import ShardClock
from shard.postgres.pool import Database
from shard.queue import row_locks, statements
from shard.queue.bisect_errors import ROW_ERRORS, bisect_errors
from shard.queue.pending_enqueue import RESULT_UNKNOWN, Call, Inserted, PendingEnqueue, Taker
from shard.queue.queue_ids import QUEUES_MAX, Name, NewQueuesLocked, QueueIds
from shard.queue.row_locks import JobRow, KeyRow, RowLocks
from shard.vocabulary import SPARSE_COLUMNS, JobId, JobState, Known, Micros, NewJobs, OrgId, QueueId, Slot

# How many times a statement is tried, if the reason of each failure can be removed. A removed reason does not come
# back.
_TRIES_MAX = 6
_HOUR_MS = 3_600_000
# How each sparse column of NewJobs is sent.
SPARSE_ENCODERS = {
    name: arrays.sparse_texts if of is str else arrays.sparse_numbers for name, of in SPARSE_COLUMNS.items()
}
# The sparse columns that enqueue_plain.sql takes. Jobs with any other sparse column need enqueue.sql.
_PLAIN = frozenset({"priorities", "traces"})
# For this long, the time that the shard returned last is used to refuse ids that are far too old.
_HINT_NS = 2_000_000_000


class Enqueuer:
    """Stores jobs. `locks`: the row locks of jobs."""

    def __init__(self, database: Database, names: QueueIds, locks: RowLocks[JobRow], clock: ShardClock) -> None:
        self._shard = database.name
        self._clock = clock
        self._job_locks = locks
        self._key_locks = row_locks.of_keys(database)
        self._database = database
        self._names = names
        # The time that the shard returned last, and the time, by time.monotonic_ns, at which this process got it. This
        # is a hint (invariant I7).
        self._shard_time_us = 0
        self._shard_time_read_ns = -_HINT_NS

    def refuse_outside_horizon(self, ids: Sequence[str]) -> None:
        """Refuses ids that are far too old, without asking the shard, because a refused call must cost less than a call
        that is served. Does not refuse ids from the future: if the shard's clock was set back, new ids seem to be from
        the future. The shard decides about such ids. Raises IdsOutsideHorizon."""
        since_ns = time.monotonic_ns() - self._shard_time_read_ns
        if since_ns >= _HINT_NS:
            # The remembered time is too old, because somebody may have set the shard's clock since then. The enqueue
            # statement checks the ids by the shard's present time.
            return
        now_us = self._shard_time_us + since_ns // 1000
        if made_at_ms(min(ids)) < bounds_ms(now_us)[0] - _HOUR_MS:
            raise IdsOutsideHorizon(_outside(ids, now_us), now=Micros(now_us))

    async def enqueue(self, calls: Sequence[Call]) -> Sequence[dict[int, JobId] | Exception]:
        """Stores all jobs of each call, or none. Returns for each call the call's error, or the positions of jobs that
        were known already, each with the id of the known job."""
        try:
            return await bisect_errors(self._store, [PendingEnqueue(call) for call in calls])
        finally:
            for call in calls:
                if call.handover is not None:
                    call.handover.tell(RESULT_UNKNOWN)

    async def _store(self, calls: Sequence[PendingEnqueue]) -> list[dict[int, JobId] | Exception]:
        """Repeats its steps until every job is stored, known or refused. Raises ROW_ERRORS."""
        await self._refuse_locked(calls, self._job_locks.expect, self._key_locks.expect)
        pending = [call for call in calls if call.remaining]
        tries = 0
        while pending and tries < _TRIES_MAX:
            before = len(pending)
            try:
                await self._store_unlocked(pending)
            except ROW_ERRORS:
                raise
            except Exception as error:  # noqa: BLE001 - other calls may be stored already
                for call in pending:
                    if call.remaining:
                        call.refuse(error)
            pending = [call for call in pending if call.remaining]
            # A round that has refused or finished a call does not count as a try for the other calls.
            tries += len(pending) == before
        for call in pending:
            why = f"{len(call.remaining)} job(s) of org {call.jobs.org!r} kept changing during the enqueue; try again"
            call.refuse(ShardUnavailable(self._shard, why))
        return [call.answer() for call in calls]

    async def _store_unlocked(self, calls: Sequence[PendingEnqueue]) -> None:
        """Stores what one statement can store, and refuses the calls whose rows other sessions keep locked."""
        for _ in range(row_locks.TRIES_MAX):
            pending = [call for call in calls if call.remaining]
            if not pending:
                return
            try:
                await self._store_once(pending)
            except RowLocked:
                await self._refuse_locked(pending, self._job_locks.find, self._key_locks.find)
            else:
                return
        raise RowLocked(self._shard, "something that enqueues need")

    async def _refuse_locked(
        self,
        calls: Sequence[PendingEnqueue],
        find_jobs: Callable[[Iterator[JobRow]], Awaitable[set[JobRow]]],
        find_keys: Callable[[Iterator[KeyRow]], Awaitable[set[KeyRow]]],
    ) -> None:
        """Refuses calls if another session locks one of their dedup keys, or a job with one of their ids."""
        jobs = await find_jobs(row for call in calls for row in _job_rows(call))
        keys = await find_keys(row for call in calls for row in _key_rows(call))
        for call in calls if jobs or keys else ():
            locked = [
                f"dedup key {key!r} of queue {queue!r}"
                for _, queue, key in _key_rows(call)
                if (call.jobs.org, queue, key) in keys
            ]
            locked += [
                f"a job with id {call.jobs.ids[at]}"
                for at, row in zip(call.remaining, _job_rows(call), strict=True)
                if row in jobs
            ]
            if locked:
                call.refuse(RowLocked(self._shard, locked[0]))

    async def _store_once(self, calls: Sequence[PendingEnqueue]) -> None:
        """Stores the remaining jobs by one statement. Then looks up, by another statement, the jobs that were not
        stored."""
        batch = _without_shared_ids(calls)
        for call in batch:
            call.end_late_handover(time.monotonic())
        try:
            inserted = await self._insert([call.remaining_call() for call in batch])
        except _Refused as refused:
            for index, error in refused.errors.items():
                if isinstance(error, BadIds):
                    error.positions = [batch[index].remaining[at] for at in error.positions]
                batch[index].refuse(error)
            return
        except _AlreadyKnown:
            # The lookup below finds which jobs are known.
            pass
        else:
            first = 0
            for call in batch:
                jobs = len(call.remaining)
                call.add_stored(inserted, first)
                first += jobs
        pending = [call for call in calls if call.remaining]
        if pending:
            await self._look_up(pending)

    async def _insert(self, calls: Sequence[Call]) -> Inserted:
        """Runs the enqueue statement once for all of these calls. Raises _Refused or _AlreadyKnown if the statement
        stored nothing.
        """
        count = sum(len(call.jobs) for call in calls)
        for _ in range(_TRIES_MAX):
            epochs = _least_epochs(calls)
            try:
                numbers = await self._names.make(epochs, check=partial(self._check_ids, calls))
            except NewQueuesLocked as error:
                raise _Refused(
                    {
                        index: NewQueuesLocked(self._shard, locked)
                        for index, (jobs, _, _) in enumerate(calls)
                        if (locked := {(jobs.org, queue) for queue in jobs.queues}.intersection(error.names))
                    }
                ) from error
            if len(numbers) < len(epochs):
                raise _Refused(self._too_many_queues(calls, numbers))
            lanes = {number: name for name, number in numbers.items()}
            columns = _merged([call.jobs for call in calls])
            oldest, newest = min(columns.ids), max(columns.ids)
            used = {name for name in SPARSE_COLUMNS if getattr(columns, name)}
            statement, sparse = (
                (statements.ENQUEUE_PLAIN, _PLAIN) if used <= _PLAIN else (statements.ENQUEUE, SPARSE_COLUMNS)
            )
            parameters = {
                "lane_ids": arrays.numbers(lanes),
                "lane_orgs": arrays.texts([org for org, _ in lanes.values()]),
                "lane_queues": arrays.names([queue for _, queue in lanes.values()]),
                "lane_epochs": arrays.numbers([epochs[name] for name in lanes.values()]),
                "oldest_ms": made_at_ms(oldest),
                "newest_ms": made_at_ms(newest),
                "horizon_us": HORIZON_US,
                "jobs": count,
                "ids": arrays.plain(columns.ids),
                "queue_ids": _queue_ids(calls, numbers),
                "kinds": arrays.names(columns.kinds),
                "payloads": arrays.blobs(columns.payloads),
                **{name: SPARSE_ENCODERS[name](getattr(columns, name), count) for name in sparse},
                **_takers(calls, count),
            }
            try:
                rows = await self._database.run(statement, parameters)
            except psycopg.errors.UniqueViolation as error:
                raise _AlreadyKnown from error
            except psycopg.Error as error:
                if error.sqlstate == "WD001":
                    raise _AlreadyKnown from error
                raise
            now, ids_fit, admitted, gives_jobs, max_attempts, stored, slots, stored_ids, stored_in, *_ = rows[0]
            self._shard_time_us, self._shard_time_read_ns = now, time.monotonic_ns()
            if not ids_fit:
                await self._refuse_ids(calls, now)
            if len(admitted or ()) == len(lanes):
                return Inserted(
                    None if stored == count else _with_orgs(stored_ids or (), stored_in or (), lanes),
                    now,
                    {lanes[number] for number, gives in zip(admitted, gives_jobs, strict=True) if gives},
                    {lanes[number]: most for number, most in zip(admitted, max_attempts, strict=True)},
                    slots,
                )
            # Nothing was stored, because not all queues were admitted.
            unowned: dict[int, Exception] = {
                **await find_refused(self._database, [(call.jobs.org, call.epoch) for call in calls])
            }
            if unowned:
                raise _Refused(unowned)
            self._names.forget()
        raise ShardUnavailable(self._shard, "the ids of its queues keep changing")

    def _too_many_queues(self, calls: Sequence[Call], made: Collection[Name]) -> dict[int, Exception]:
        errors: dict[int, Exception] = {}
        for index, (jobs, _, _) in enumerate(calls):
            missing = {queue for queue in jobs.queues if (jobs.org, queue) not in made}
            if missing:
                errors[index] = TooManyQueues(self._shard, jobs.org, missing, queues_max=QUEUES_MAX)
        return errors

    async def _check_ids(self, calls: Sequence[Call], now: Micros) -> None:
        """Refuses the ids that the enqueue statement would refuse, so that a refused call makes no queues. Raises
        _Refused, ClockSetBack."""
        if _outside_horizon(calls, now):
            await self._refuse_ids(calls, now)

    async def _refuse_ids(self, calls: Sequence[Call], now: int) -> NoReturn:
        """Refuses the calls with ids outside the horizon. Raises _Refused, ClockSetBack."""
        if max(made_at_ms(max(jobs.ids)) for jobs, _, _ in calls) > bounds_ms(now)[1]:
            # If the shard's clock was set back, new ids seem to be from the future.
            await self._clock.record()
            self._clock.check()
        raise _Refused(_outside_horizon(calls, now))

    async def _look_up(self, calls: Sequence[PendingEnqueue]) -> None:
        """Finds which of the remaining jobs the shard knows, and moves them to `known`."""
        known = await self.known([call.jobs.only(call.remaining) for call in calls])
        for call, found in zip(calls, known, strict=True):
            call.known.update((call.remaining[at], known_as) for at, known_as in found.items())
            call.remaining = [at for at in call.remaining if at not in call.known]

    async def known(self, batches: Sequence[NewJobs]) -> list[dict[int, JobId]]:
        """Returns for each batch the positions of jobs that this shard knows, each with the id of the known job. Stores
        nothing, and does not use remembered queue ids."""
        columns = _merged(batches)
        origins = [(index, at) for index, jobs in enumerate(batches) for at in range(len(jobs))]
        orgs = {org: position for position, org in enumerate(dict.fromkeys(jobs.org for jobs in batches), start=1)}
        org_positions = [orgs[batches[index].org] for index, _ in origins]
        keyed = columns.dedup_keys.keys() | columns.live_keys.keys()
        rows: list[tuple[int, str]] = await self._database.run(
            statements.FIND_KNOWN,
            {
                "ids": arrays.plain(columns.ids),
                "orgs": arrays.texts(list(orgs)),
                # Empty: all jobs are of the first org.
                "org_positions": "{}" if len(orgs) == 1 else arrays.numbers(org_positions),
                "queues": arrays.sparse_texts({at: columns.queues[at] for at in keyed}, len(columns)),
                "dedup_keys": arrays.sparse_texts(columns.dedup_keys, len(columns)),
                "live_keys": arrays.sparse_texts(columns.live_keys, len(columns)),
                "oldest_ms": made_at_ms(min(columns.ids)),
            },
        )
        known: list[dict[int, JobId]] = [{} for _ in batches]
        for place, known_as in rows:
            index, at = origins[place - 1]
            known[index][at] = JobId(known_as)
        return known

    async def describe(self, batches: Sequence[tuple[NewJobs, Sequence[JobId]]]) -> list[dict[int, Known]]:
        """Describes the known jobs that enqueues found instead of storing duplicates. Each batch has the jobs that were
        sent, and for each of these jobs the id of the known job. Returns for each batch, by position, the descriptions
        of the known jobs that the shard still has."""
        sent = _merged([jobs for jobs, _ in batches])
        ids = [job_id for _, found in batches for job_id in found]
        origins = [(index, at) for index, (jobs, _) in enumerate(batches) for at in range(len(jobs))]
        orgs = {org: position for position, org in enumerate(dict.fromkeys(jobs.org for jobs, _ in batches), start=1)}
        org_positions = [orgs[batches[index][0].org] for index, _ in origins]
        own = {at: _digest(sent, at) for at, job_id in enumerate(ids) if job_id == sent.ids[at]}
        rows: list[tuple[int, str, bool]] = await self._database.run(
            statements.DESCRIBE_KNOWN,
            {
                "ids": arrays.plain(ids),
                "orgs": arrays.texts(list(orgs)),
                "org_positions": "{}" if len(orgs) == 1 else arrays.numbers(org_positions),
                "digests": arrays.sparse_texts(own, len(ids)),
                "oldest_ms": made_at_ms(min(ids)),
            },
        )
        known: list[dict[int, Known]] = [{} for _ in batches]
        for place, state, differs in rows:
            index, at = origins[place - 1]
            known[index][at] = Known(JobState(state), differs)
        return known


async def find_refused(database: Database, callers: Sequence[tuple[OrgId, int]]) -> dict[int, NotOwned]:
    """Finds the callers whose jobs this shard refuses. The shard does not own the slot of their org, or owns the slot
    only since an epoch that is later than the caller's epoch. `callers`: the org and the epoch of each caller. Returns
    the index of each refused caller, and its error."""
    rows: list[tuple[int, Slot, str, int]] = await database.run(
        statements.FIND_REFUSED_SLOTS,
        {
            "orgs": arrays.texts([org for org, _ in callers]),
            "slots": arrays.numbers([slot_of(org) for org, _ in callers]),
            "epochs": arrays.numbers([epoch for _, epoch in callers]),
        },
    )
    refused: dict[int, NotOwned] = {}
    for place, slot, state, epoch in rows:
        org, known = callers[place - 1]
        refused[place - 1] = NotOwned(database.name, org, slot, state=state, epoch=epoch, known=known)
    return refused


class _Refused(Exception):
    """Some calls are invalid; nothing was stored. `errors`: the error of each invalid call, by the index of the
    call."""

    def __init__(self, errors: dict[int, Exception]) -> None:
        super().__init__(errors)
        self.errors = errors


class _AlreadyKnown(Exception):
    """Nothing was stored, because a job of the calls has already finished or died, or because a live job has the same
    id. With enqueue_plain.sql, every live job with the same id causes this error. With enqueue.sql, a live job with the
    same id causes this error only if the statement has taken a free dedup key for the new job, because the key must
    remain free."""


def _outside(ids: Sequence[str], now_us: int) -> list[int]:
    """Returns the positions of ids whose time lies outside the bounds (`bounds_ms`)."""
    oldest_ms, newest_ms = bounds_ms(now_us)
    return [at for at, job_id in enumerate(ids) if not oldest_ms <= made_at_ms(job_id) <= newest_ms]


def _outside_horizon(calls: Sequence[Call], now: int) -> dict[int, Exception]:
    errors: dict[int, Exception] = {}
    for index, (jobs, _, _) in enumerate(calls):
        bad = _outside(jobs.ids, now)
        if bad:
            errors[index] = IdsOutsideHorizon(bad, now=Micros(now))
    return errors


def _without_shared_ids(calls: Sequence[PendingEnqueue]) -> Sequence[PendingEnqueue]:
    """Returns the calls for one statement. Among these, no two calls of one org have an id in common. The other calls
    wait for a later statement. A call is never split, because one statement must store all new jobs of a call."""
    if len(calls) == 1:
        return calls
    ids = [job_id for call in calls for job_id in call.jobs.ids]
    if len(set(ids)) == len(ids):
        return calls
    batch: list[PendingEnqueue] = []
    seen: set[tuple[OrgId, str]] = set()
    for call in calls:
        jobs = call.jobs
        own = {(jobs.org, jobs.ids[at]) for at in call.remaining}
        if seen.isdisjoint(own):
            seen |= own
            batch.append(call)
    return batch


def _digest(jobs: NewJobs, at: int) -> str:
    """Returns a job's digest, which describe_known.sql compares with the digest of a known job."""
    return hashlib.sha256(f"{jobs.queues[at]} {jobs.kinds[at]} ".encode() + jobs.payloads[at]).hexdigest()


def _job_rows(call: PendingEnqueue) -> Iterator[JobRow]:
    jobs = call.jobs
    return ((jobs.org, to_hex(jobs.ids[at])) for at in call.remaining)


def _key_rows(call: PendingEnqueue) -> Iterator[KeyRow]:
    jobs = call.jobs
    return (
        (jobs.org, jobs.queues[at], key)
        for at in call.remaining
        if (key := jobs.dedup_keys.get(at) or jobs.live_keys.get(at)) is not None
    )


def _least_epochs(calls: Sequence[Call]) -> dict[Name, int]:
    """Returns the queues of these calls, each with the lowest epoch of the calls that have jobs for this queue."""
    epochs: dict[Name, int] = {}
    for jobs, _, epoch in calls:
        for queue in set(jobs.queues):
            name = jobs.org, queue
            epochs[name] = min(epoch, epochs.get(name, epoch))
    return epochs


def _with_orgs(
    ids: Sequence[str], queue_ids: Sequence[QueueId], lanes: Mapping[QueueId, Name]
) -> set[tuple[OrgId, str]]:
    return {(lanes[number][0], job_id) for job_id, number in zip(ids, queue_ids, strict=True)}


def _merged(batches: Sequence[NewJobs]) -> NewJobs:
    """Returns the columns of all batches, one after another. The org of the result is the org of the first batch.
    Callers send the orgs of all jobs separately."""
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
    """Returns the list of takers, and for each job the number of its taker in that list, counted from 1."""
    numbers: dict[Taker, int] = {}
    taken: dict[int, int] = {}
    before = 0
    for jobs, handover, _ in calls:
        if handover is not None:
            for at, taker in handover.takers.items():
                taken[before + at] = numbers.setdefault(taker, len(numbers) + 1)
        before += len(jobs)
    return {
        "takers": arrays.sparse_numbers(taken, count),
        "leases": arrays.numbers([taker.number for taker in numbers]),
        "workers": arrays.texts([taker.worker for taker in numbers]),
        "windows_us": arrays.numbers([taker.window_us for taker in numbers]),
    }
